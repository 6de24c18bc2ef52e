"""The rows that Delta's protocol says a table has, in plain Python, and pyroaring, that shares nothing else with the package; none where a log makes no sense."""

import collections
import contextlib
import datetime
import json
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pyarrow.parquet as pq
from pyroaring import BitMap64

Actions = list[dict[str, Any]]
Files = dict[tuple[str, Any], dict[str, Any]]
Rows = collections.Counter[str]
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10})|\.[0-9a-fA-F-]{36})?\.(parquet|json)")
_READ = (
    *(f"add.{name}" for name in ("path", "partitionValues", "size", "modificationTime", "deletionVector", "stats")),
    "metaData",
    "protocol",
    "sidecar",
)
_WHOLE = {"long": 64, "integer": 32, "short": 16, "byte": 8}
KNOWN_FEATURES = {"columnMapping", "deletionVectors", "timestampNtz", "typeWidening", "v2Checkpoint"}


def as_multiset(rows: Iterable[Mapping[str, Any]]) -> Rows:
    """Rows as they compare, whatever the order of columns."""
    return collections.Counter(repr(sorted((name, _plain(value)) for name, value in row.items())) for row in rows)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return sorted((name, _plain(part)) for name, part in value.items())
    return value.astimezone(datetime.timezone.utc).isoformat() if isinstance(value, datetime.datetime) else value


class State:
    """What the log says of a version: the last metadata and protocol, and the files that are left."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: Any = None
        self.protocol: Any = None
        self.files: Files = {}
        self.rows = Rows()

    def apply(self, actions: Actions) -> None:
        """Apply one commit, or a checkpoint: what it removes goes first, for a file may come back with another vector."""
        for action in actions:
            if action.get("remove") is not None:
                assert isinstance(action["remove"]["path"], str)
                self.files.pop(_file_key(action["remove"]), None)
        for action in actions:
            if (add := action.get("add")) is not None:
                assert isinstance(add["path"], str)
                assert _is_count(add["size"])
                self.files[_file_key(add)] = add
            self.metadata = self.metadata if action.get("metaData") is None else action["metaData"]
            self.protocol = self.protocol if action.get("protocol") is None else action["protocol"]

    def following(self, commits: Mapping[int, Path], version: int, newest: int) -> list["State"]:
        """This state after the commits that follow; [] if it makes no sense."""
        with contextlib.suppress(Exception):
            for number in range(version + 1, newest + 1):
                self.apply(read_actions(commits[number]))
            if version <= newest >= 0:
                self.rows = as_multiset(self._all_rows())
                return [self]
        return []

    def _all_rows(self) -> list[dict[str, Any]]:
        version, features = self.protocol["minReaderVersion"], self.protocol.get("readerFeatures")
        assert version in (1, 2, 3)
        assert version is not True
        if version == 3:
            assert isinstance(features, list)
            assert set(features) <= KNOWN_FEATURES
        assert isinstance(self.metadata["id"], str)
        configuration = dict(self.metadata.get("configuration") or {})
        mapping = configuration.get("delta.columnMapping.mode", "none")
        assert mapping in ("none", "name", "id")
        if not (version == 2 or (version == 3 and "columnMapping" in features)):
            mapping = "none"
        fields = json.loads(self.metadata["schemaString"])["fields"]
        assert len({field["name"].lower() for field in fields}) == len(fields)
        partitions = self.metadata["partitionColumns"]
        assert isinstance(partitions, list)
        assert set(partitions) <= {field["name"] for field in fields}
        paths = [path for path, _ in self.files]
        assert len(set(paths)) == len(paths)  # one file, two vectors: whose rows are they?
        file_rows = (rows for add in self.files.values() for rows in self._read_rows(add, fields, partitions, mapping))
        return list(file_rows)

    def _read_rows(self, add: dict[str, Any], fields: Any, partitions: list[str], mapping: str) -> Iterator[Any]:
        values = add["partitionValues"]
        values = values if isinstance(values, dict) else dict(values)
        assert all(isinstance(name, str) and isinstance(value, str | None) for name, value in values.items())
        file = pq.ParquetFile(resolve_path(self.path, add["path"]))
        deleted = _deleted(self.path, add)
        ids = {field.name: _field_id(field) for field in file.schema_arrow}
        for number, row in enumerate(file.read().to_pylist()):
            if number not in deleted:
                yield {
                    field["name"]: _partition_value(values.get(_stored(field, mapping)), field["type"])
                    if field["name"] in partitions
                    else _value(row, ids, file.schema_arrow, field, mapping)
                    for field in fields
                }


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _file_key(action: dict[str, Any]) -> tuple[str, Any]:
    vector = action.get("deletionVector")
    return action["path"], None if vector is None else (
        vector["storageType"],
        vector["pathOrInlineDv"],
        vector.get("offset") or 0,
    )


def resolve_path(table: Path, spelled: str) -> Path:
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:|/", spelled) is None:
        return table / unquote(spelled)
    parsed = urlparse(spelled)
    assert parsed.scheme in ("", "file")
    assert not parsed.netloc
    return Path(unquote(spelled.removeprefix("file://").removeprefix("file:")))


def _stored(field: Any, mapping: str) -> str:
    name = field["name"] if mapping == "none" else field["metadata"]["delta.columnMapping.physicalName"]
    assert isinstance(name, str)
    return name


def _field_id(field: Any) -> int | None:
    number = (field.metadata or {}).get(b"PARQUET:field_id")
    return None if number is None else int(number)


def _value(row: Any, ids: Mapping[str, int | None], file_schema: Any, field: Any, mapping: str) -> Any:
    """A column of a row, or a field of a struct: by its id, or by its name, in whatever case."""
    if mapping == "id":
        field_id = field["metadata"]["delta.columnMapping.id"]
        assert isinstance(field_id, int)
        names = [name for name, number in ids.items() if number == field_id]
    else:
        names = [name for name in ids if name.lower() == _stored(field, mapping).lower()]
    if not names:
        return _typed(None, field["type"])
    value, kind = row[names[0]], field["type"]
    if isinstance(kind, dict) and isinstance(value, dict):
        assert kind["type"] == "struct"
        file_type = file_schema.field(names[0]).type
        inner = {part.name: _field_id(part) for part in file_type}
        return {part["name"]: _value(value, inner, file_type, part, mapping) for part in kind["fields"]}
    return _typed(value, kind)


def _typed(value: Any, kind: Any) -> Any:
    """A value that is of the type; the type is one that is known, also of a null."""
    if isinstance(kind, dict):
        assert kind["type"] == "struct"
        assert value is None
        for field in kind["fields"]:
            _typed(None, field["type"])
        return None
    if kind in _WHOLE:
        assert value is None or (isinstance(value, int) and -(2 ** (_WHOLE[kind] - 1)) <= value < 2 ** (_WHOLE[kind] - 1))  # fmt: skip
    elif kind in ("string", "void"):
        assert value is None or (isinstance(value, str) and kind == "string")
    elif kind == "timestamp":
        assert value is None or isinstance(value, datetime.datetime)
    else:
        assert value is None
        assert kind in ("float", "double", "boolean", "binary", "date", "timestamp_ntz")
    return value


def _partition_value(text: str | None, kind: Any) -> Any:
    if text is None or not text:
        return _typed(None, kind)
    return _typed(int(text) if kind in _WHOLE else text, kind)


def decoded_z85(text: str) -> bytes:
    assert len(text) % 5 == 0
    numbers = [sum(_Z85.index(digit) * 85 ** (4 - at) for at, digit in enumerate(text[n : n + 5])) for n in range(0, len(text), 5)]  # fmt: skip
    return struct.pack(f">{len(numbers)}I", *numbers)


def _deleted(table: Path, add: dict[str, Any]) -> set[int]:
    vector = add.get("deletionVector")
    if vector is None:
        return set()
    size, data, offset = vector["sizeInBytes"], vector["pathOrInlineDv"], vector.get("offset") or 0
    assert _is_count(size)
    assert _is_count(offset)
    if vector["storageType"] == "i":
        positions = vector_values(decoded_z85(data)[:size])
    else:
        if vector["storageType"] == "u":
            number = decoded_z85(data[-20:]).hex()
            name = "-".join([number[:8], number[8:12], number[12:16], number[16:20], number[20:]])
            place = table / data[:-20] / f"deletion_vector_{name}.bin"
        else:
            assert vector["storageType"] == "p"
            place = resolve_path(Path("/nowhere"), data)
        positions = checked_values(place.read_bytes()[offset : offset + size + 8], size)
    assert len(positions) == vector["cardinality"]
    return positions


def checked_values(blob: bytes, size: int) -> set[int]:
    """The rows of a vector in a file, between its size and its checksum."""
    assert len(blob) == size + 8
    assert struct.unpack(">I", blob[:4]) == (size,)
    assert struct.unpack(">I", blob[-4:]) == (zlib.crc32(blob[4:-4]),)
    return vector_values(blob[4:-4])


def vector_values(data: bytes) -> set[int]:
    """The rows in a 64-bit roaring bitmap, with nothing after the last, as pyroaring reads them."""
    assert struct.unpack("<i", data[:4]) == (1681511377,)
    bitmap = BitMap64.deserialize(data[4:])
    assert len(bitmap) < 2**20
    assert len(bitmap.serialize()) == len(data) - 4
    assert not bitmap or bitmap.max() < 2**63
    return set(bitmap)


def list_commits(path: Path) -> dict[int, Path]:
    matches = (re.fullmatch(r"(\d{20})\.json", file.name) for file in (path / "_delta_log").iterdir())
    return {int(match[1]): path / "_delta_log" / match[0] for match in matches if match}


def list_checkpoints(path: Path) -> dict[int, list[list[Path]]]:
    """The complete checkpoints by their version, each the files that it is made of."""
    checkpoints: dict[int, list[list[Path]]] = {}
    parts: dict[tuple[int, int], dict[int, Path]] = {}
    for file in sorted((path / "_delta_log").iterdir()):
        if match := _CHECKPOINT.fullmatch(file.name):
            if match[2]:
                parts.setdefault((int(match[1]), int(match[3])), {})[int(match[2])] = file
            else:
                checkpoints.setdefault(int(match[1]), []).append([file])
    for (version, count), of in parts.items():
        if len(of) == count and set(of) == {*range(1, count + 1)}:
            checkpoints.setdefault(version, []).append([of[number] for number in range(1, count + 1)])
    return checkpoints


def read_actions(file: Path) -> Actions:
    """The actions of a commit, or of a file of a checkpoint."""
    if file.suffix == ".json":
        actions = [json.loads(line) for line in file.read_bytes().split(b"\n") if line.strip()]
        assert actions
        assert all(isinstance(action, dict) for action in actions)
        return actions
    source = pq.ParquetFile(file, page_checksum_verification=True)
    file_columns = {".".join(source.schema.column(n).path.split(".")[:2]) for n in range(len(source.schema))}
    names = {name.partition(".")[0] for name in file_columns}
    columns = [name for name in _READ if name in file_columns or name in names]
    rows = source.read(columns).to_pylist() if columns else []
    assert all(isinstance(value, dict | None) for row in rows for value in row.values())
    return rows


def _checkpoint_actions(files: Sequence[Path]) -> Actions:
    actions = [action for file in files for action in read_actions(file)]
    sidecars = [action["sidecar"] for action in actions if action.get("sidecar") is not None]
    for sidecar in sidecars:
        actions += read_actions(files[0].parent / "_sidecars" / unquote(sidecar["path"]))
    return actions


def evaluated(path: Path, version: int | None = None) -> list[State]:
    """What a version may be: from each checkpoint that can be read, and from the first commit on. None: the log makes no sense."""
    commits = list_commits(path)
    newest = max(commits, default=-1) if version is None else version
    starts = [(number, files) for number, several in list_checkpoints(path).items() for files in several]
    versions = []
    for number, files in [*starts, (-1, [])]:
        state = State(path)
        with contextlib.suppress(Exception):  # whatever it is: there is no sense in it
            state.apply(_checkpoint_actions(files) if files else [])
            versions += state.following(commits, number, newest)
    return versions


def live_files(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The files of the newest version as a commit adds them, by their paths and vectors."""
    commits, checkpoints = list_commits(path), list_checkpoints(path)
    first = max((number for number in checkpoints if number <= max(commits)), default=-1)
    state = State(path)
    if checkpoints and first >= 0:
        state.apply(_checkpoint_actions(checkpoints[first][0]))
    for number in range(first + 1, max(commits) + 1):
        state.apply(read_actions(commits[number]))
    named = ("path", "size", "modificationTime", "stats", "deletionVector")
    return {
        (file, repr(vector)): {name: add.get(name) for name in named}
        | {"partitionValues": dict(add["partitionValues"])}
        for (file, vector), add in state.files.items()
    }
