"""Delta tables, damaged: the rows that an independent evaluation finds, or an error that names the table (see `tests/test_fuzz.py`)."""

import collections
import contextlib
import datetime
import functools
import json
import os
import random
import re
import shutil
import struct
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup.errors import DamagedFileError, PysparkLookupError
from pyspark_lookup.lookup.lookup import get_many
from pyspark_lookup.lookup.read import ReadPlan, ReadTask
from pyspark_lookup.sources.delta.source import DeletionVector
from pyspark_lookup.sources.registry import parse_options
from tests.support.delta_evaluation import Rows, State, as_multiset, decoded_z85, evaluated, list_commits, vector_values
from tests.support.delta_tables import encode_z85, write_vector, write_vectors
from tests.support.fakes import FakeClock, make_host
from tests.support.fuzzing import altered, damaged, fuzzed, make_home, memory_at_most, misspelled
from tests.support.lake_tables import MODES, roaring, sealed

pytestmark = pytest.mark.timeout(600 * int(os.environ.get("LOOKUPCACHE_FUZZ", "1")))  # a hang ends here
PLACEHOLDER_URL = "file:///HERE"
"""Stands in a log for the URL of the directory with the table."""
SHAPES = {"classic": "none", "parts": "name", "v2 json": "id", "v2 parquet": "none"}
"""The form of a table's checkpoint, and the mode of its column mapping."""
CHECKPOINT = 3
"""The version that it is of; the last one is 6."""
_STRUCT = {"type": "struct", "fields": [("x", "long", 7), ("y", "string", 8)]}
_COLUMNS = [("id", "long", 1), ("part", "string", 2), ("num", "integer", 3), ("name", "string", 4), ("at", "timestamp", 5), ("both", _STRUCT, 6)]  # fmt: skip
_CHECKPOINT = """
txn STRUCT(appId TEXT, version BIGINT), checkpointMetadata STRUCT(version BIGINT),
add STRUCT(path TEXT, partitionValues MAP(TEXT, TEXT), size BIGINT, modificationTime BIGINT, dataChange BOOLEAN, stats TEXT,
    deletionVector STRUCT(storageType TEXT, pathOrInlineDv TEXT, "offset" INT, sizeInBytes INT, cardinality BIGINT),
    stats_parsed STRUCT(numRecords BIGINT, minValues STRUCT(id BIGINT, name TEXT), maxValues STRUCT(id BIGINT, name TEXT),
        nullCount STRUCT(id BIGINT, name BIGINT))),
remove STRUCT(path TEXT, deletionTimestamp BIGINT, dataChange BOOLEAN),
metaData STRUCT(id TEXT, schemaString TEXT, partitionColumns TEXT[], configuration MAP(TEXT, TEXT), createdTime BIGINT,
    format STRUCT(provider TEXT, options MAP(TEXT, TEXT))),
protocol STRUCT(minReaderVersion INT, minWriterVersion INT, readerFeatures TEXT[], writerFeatures TEXT[]),
sidecar STRUCT(path TEXT, sizeInBytes BIGINT, modificationTime BIGINT)
"""
"""The columns of a checkpoint, as SQL declares them."""


class _Writer:
    def __init__(self, path: Path, mapping: str) -> None:
        self.path, self.mapping = path, mapping
        self.log = path / "_delta_log"
        self.log.mkdir(parents=True)

    def stored(self, name: str) -> str:
        return name if self.mapping == "none" else f"col-{name}"

    def schema(self, columns: Sequence[Any] = tuple(_COLUMNS)) -> list[dict[str, Any]]:
        fields = []
        for name, kind, number in columns:
            mapped = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": self.stored(name)}
            stored_type = kind if isinstance(kind, str) else {"type": "struct", "fields": self.schema(kind["fields"])}
            fields.append({"name": name, "type": stored_type, "nullable": True, "metadata": mapped if self.mapping != "none" else {}})  # fmt: skip
        return fields

    def add(self, number: int, part: str | None, rows: int = 6) -> dict[str, Any]:
        """Write a data file; its action."""
        ids = [number * 10 + n for n in range(rows)]
        names = [None if n == 2 else f"n{n % 4}" for n in ids]
        at = [datetime.datetime(2024, 1, 1 + number, n, tzinfo=datetime.timezone.utc) for n in range(rows)]
        structs = [None if n % 5 == 4 else {self.stored("x"): n, self.stored("y"): f"y{n}"} for n in ids]
        inner = pa.struct([self._field("x", pa.int64(), 7), self._field("y", pa.string(), 8)])
        fields = [self._field("id", pa.int64(), 1), self._field("name", pa.string(), 4)]
        fields += [self._field("at", pa.timestamp("us", "UTC"), 5), self._field("both", inner, 6)]
        table = pa.Table.from_arrays(
            [pa.array(values, field.type) for values, field in zip((ids, names, at, structs), fields, strict=True)],
            schema=pa.schema(fields),
        )
        name = f"part=b c/{number}.parquet" if part == "b c" else f"{number}.parquet"
        (self.path / name).parent.mkdir(exist_ok=True)
        pq.write_table(table, self.path / name)
        non_null_names = [name for name in names if name is not None]
        bounds = [{self.stored("id"): pick(ids), self.stored("name"): pick(non_null_names)} for pick in (min, max)]
        nulls = {self.stored("id"): 0, self.stored("name"): rows - len(non_null_names)}
        stats = {"numRecords": rows, "minValues": bounds[0], "maxValues": bounds[1], "nullCount": nulls}
        return {
            "path": name.replace(" ", "%20"),
            "partitionValues": {self.stored("part"): part, self.stored("num"): str(number) if number % 2 else None},
            "size": (self.path / name).stat().st_size,
            "modificationTime": 1_700_000_000_000 + number,
            "dataChange": True,
            "stats": json.dumps(stats),
        }

    def _field(self, name: str, kind: pa.DataType, number: int) -> pa.Field:
        return pa.field(self.stored(name), kind, metadata={"PARQUET:field_id": str(number)})

    def commit(self, version: int, *actions: dict[str, Any]) -> None:
        lines = [{"commitInfo": {"timestamp": 1_700_000_000_000 + version, "operation": "WRITE"}}, *actions]
        (self.log / f"{version:020}.json").write_text("".join(json.dumps(action) + "\n" for action in lines))

    def vector(self, storage: str, places: Sequence[int], runs: bool = False) -> dict[str, Any]:
        """A vector, in its file behind another one."""
        if storage == "i":
            return write_vector(self.path, places, storage, runs)
        vector = write_vectors(self.path, [[1, 2], places], storage, runs, uuid.UUID(int=len(places)))[1]
        return vector | {"pathOrInlineDv": vector["pathOrInlineDv"].replace(self.path.parent.as_uri(), PLACEHOLDER_URL)}

    def checkpoint(self, shape: str, actions: Sequence[dict[str, Any]]) -> None:
        """Write a checkpoint, and the hint that leads to it."""
        first = f"{CHECKPOINT:020}.checkpoint"
        hint: dict[str, Any] = {"version": CHECKPOINT, "size": len(actions)}
        files = [action for action in actions if "add" in action or "remove" in action]
        other_actions = [{"checkpointMetadata": {"version": CHECKPOINT}}, *(a for a in actions if a not in files)]
        if shape == "classic":
            self._rows(self.log / f"{first}.parquet", actions)
        elif shape == "parts":
            hint["parts"] = 2
            for number in range(2):
                self._rows(self.log / f"{first}.{number + 1:010}.{2:010}.parquet", actions[number::2])
        else:
            (self.log / "_sidecars").mkdir()
            for number in range(2):
                side = self.log / "_sidecars" / f"{uuid.UUID(int=number)}.parquet"
                self._rows(side, files[number::2])
                sidecar = {"path": side.name, "sizeInBytes": side.stat().st_size, "modificationTime": 1}
                other_actions.append({"sidecar": sidecar})
            place = self.log / f"{first}.{uuid.UUID(int=9)}.{'json' if shape == 'v2 json' else 'parquet'}"
            if shape == "v2 json":
                place.write_text("".join(json.dumps(action) + "\n" for action in other_actions))
            else:
                self._rows(place, other_actions)
            hint["v2Checkpoint"] = {"path": place.name}
        (self.log / "_last_checkpoint").write_text(json.dumps(hint))

    def _rows(self, place: Path, actions: Sequence[dict[str, Any]]) -> None:
        """Write a file of a checkpoint, with a checksum for each page."""
        with duckdb.connect() as database:
            database.execute(f"CREATE TABLE checkpoint ({_CHECKPOINT})")
            schema = database.table("checkpoint").to_arrow_table().schema
        table = pa.Table.from_pylist([_as_row(action) for action in actions], schema)
        pq.write_table(table, place, write_page_checksum=True, data_page_size=256, use_dictionary=False)


def _as_row(action: dict[str, Any]) -> dict[str, Any]:
    """An action as a row: maps as pairs, and statistics in both forms."""
    ((name, fields),) = action.items()
    row = {key: list(value.items()) if key in ("partitionValues", "configuration") else value for key, value in fields.items()}  # fmt: skip
    if name == "add" and "col-" not in fields["stats"]:
        row["stats_parsed"] = json.loads(fields["stats"])
    return {name: row}


def write_world(path: Path, shape: str) -> None:
    """A table of seven versions, in `path`."""
    mapping = SHAPES[shape]
    writer = _Writer(path, mapping)
    features = ["deletionVectors", "columnMapping", "v2Checkpoint"]
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": features, "writerFeatures": features}
    configuration = {"delta.enableDeletionVectors": "true"}
    configuration |= {} if mapping == "none" else {"delta.columnMapping.mode": mapping}
    metadata = {
        "id": "0000-of-this-table", "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": writer.schema()}), "partitionColumns": ["part", "num"],
        "configuration": configuration, "createdTime": 1,
    }  # fmt: skip
    first, second, third = writer.add(0, "a"), writer.add(1, None), writer.add(2, "b c")
    writer.commit(0, {"protocol": protocol}, {"metaData": metadata}, {"add": first}, {"add": second})
    writer.commit(1, {"add": third}, {"txn": {"appId": "x", "version": 1}})
    inline = {**first, "deletionVector": writer.vector("i", [0, 3])}
    writer.commit(2, {"remove": {"path": first["path"], "deletionTimestamp": 1, "dataChange": True}}, {"add": inline})
    folded = {**writer.add(3, "b c", 12), "dataChange": False}
    removes = [
        {"remove": {"path": add["path"], "deletionTimestamp": 1, "dataChange": False}} for add in (second, third)
    ]
    writer.commit(3, *removes, {"add": folded})
    actions = [{"protocol": protocol}, {"metaData": metadata}, {"add": inline}, *removes, {"add": folded}]
    writer.checkpoint(shape, actions)
    in_file = {**folded, "dataChange": True, "deletionVector": writer.vector("u", [1, 4, 5, 6, 11], runs=True)}
    removed = {"path": folded["path"], "deletionTimestamp": 1, "dataChange": True, "partitionValues": {}, "size": 1}
    writer.commit(4, {"remove": removed}, {"add": in_file}, {"add": writer.add(4, "ü/%")})
    elsewhere = {**writer.add(5, "a"), "deletionVector": writer.vector("p", [2])}
    writer.commit(5, {"add": elsewhere}, {"domainMetadata": {"domain": "x", "configuration": "{}", "removed": False}})
    extended = {**inline, "deletionVector": writer.vector("i", [0, 3, 5], runs=True)}
    writer.commit(6, {"remove": {**inline, "deletionTimestamp": 1}}, {"add": extended})


def copy_world(source: Path, path: Path) -> Path:
    """A copy of its own at `path`, which is of the same name."""
    shutil.copytree(source, path)
    for file in (path / "_delta_log").glob("*.json"):
        data = file.read_bytes()
        if PLACEHOLDER_URL.encode() in data:
            file.write_bytes(data.replace(PLACEHOLDER_URL.encode(), path.parent.as_uri().encode()))
    return path


NAME = "dim-of-the-fuzz"
LAST = 6
CASE_AT_MOST_S = 20.0


@functools.cache
def world(shape: str) -> tuple[Path, Rows]:
    path = make_home() / NAME
    write_world(path, shape)
    with copied(shape, path) as copy:
        state, *_ = evaluated(copy)
    return path, state.rows


@contextlib.contextmanager
def copied(shape: str, source: Path | None = None) -> Iterator[Path]:
    """A copy of one's own to be damaged; beside it there is room for a cache directory."""
    with tempfile.TemporaryDirectory() as home:
        yield copy_world(source or world(shape)[0], Path(home) / NAME)


def commit(path: Path, version: int) -> Path:
    return path / "_delta_log" / f"{version:020}.json"


def at_once(name: str, run: Callable[[], None]) -> None:
    """Loads are made by who asks for them; nobody runs a schedule."""
    if "-schedule-" not in name:
        run()


@contextlib.contextmanager
def in_bounds() -> Iterator[None]:
    """The block takes neither time nor memory without end."""
    started_s = time.process_time()
    with memory_at_most():
        yield
    assert time.process_time() - started_s < CASE_AT_MOST_S


class Reader:
    """A new process of a host: what it starts beside a read has ended when the read has."""

    def __init__(self, path: Path, cache: Path, mode: str = "none", **options: Any) -> None:
        more = {f"lookup.{key}": str(value) for key, value in options.items()}
        self.options = {"path": str(path), **MODES[mode], **more}
        self.host = make_host(str(path), cache, FakeClock(5_000_000_000.0), start=at_once)

    def plan(self, **more: str) -> ReadPlan:
        return self.host.plan(parse_options({**self.options, **more}))[1]

    def scan(self) -> Rows:
        plan = self.plan()
        batches = list(self.host.reader.read(plan, ReadTask(0, 1), None))
        return as_multiset(pa.Table.from_batches(batches, plan.projection.columns).to_pylist())

    def get_many(self) -> Rows:
        """The rows of all keys."""
        plan, keys = self.plan(**{"lookup.keys": "id"}), pa.table({"id": pa.array([*range(62), -5, None], pa.int64())})
        rows = get_many(self.host.reader, plan, keys, ["id"], None)
        return as_multiset(rows.select(plan.projection.columns.names).to_pylist())

    def history(self) -> Any:
        return self.host.resolver.kinds.history(parse_options(self.options))


def judge(
    path: Path, cache: Path, mode: str, states: Sequence[State], more: Sequence[Rows] = (), **options: Any
) -> None:
    """A scan, and a lookup of all keys, are one of the states, or `more`; or an error that names the table."""
    accepted = [state.rows for state in states] + [*more]
    reader = Reader(path, cache, mode, **options)
    try:
        assert mode == "partial" or reader.scan() in accepted
    except PysparkLookupError as problem:
        message = rf"{NAME}|deletion vector of \S+\.parquet|column '.*' (is of type|cannot be read)"
        assert re.search(message, str(problem)), problem
    try:
        answer = reader.get_many()
    except PysparkLookupError:
        return
    assert any(answer <= rows for rows in accepted)
    statistics = [add.get("stats") for state in states for add in state.files.values()]
    if all(isinstance(text, str) and text in known_statistics() for text in statistics):
        keyed = [{row: count for row, count in rows.items() if "('id', None)" not in row} for rows in accepted]
        assert answer in map(collections.Counter, keyed)


@functools.cache
def known_statistics() -> set[str]:
    """The statistics in the tables' own commits: files that statistics rule out are not opened."""
    lines = [line for shape in SHAPES for file in list_commits(world(shape)[0]).values() for line in file.open()]
    return {add["stats"] for line in lines if (add := json.loads(line).get("add"))}


def other_action(data: st.DataObject, action: dict[str, Any]) -> Any:
    """An action in which something is something else; also within the texts that are JSON themselves."""
    if (vector := (action.get("add") or {}).get("deletionVector")) and data.draw(st.booleans()):
        return {"add": {**action["add"], "deletionVector": other_vector(data, vector)}}
    for kind, name in (("metaData", "schemaString"), ("add", "stats")):
        text = (action.get(kind) or {}).get(name)
        if text and data.draw(st.booleans()):
            return {kind: {**action[kind], name: json.dumps(data.draw(altered(json.loads(text))))}}
    return data.draw(altered(action))


def other_vector(data: st.DataObject, vector: dict[str, Any]) -> Any:
    name = data.draw(st.sampled_from(["all", *vector]))
    if name == "all":
        return data.draw(altered(vector))
    if isinstance(vector[name], str):
        pieces = ["u", "i", "p", "..", "/", "\0", "~", "00000", "#####"]
        return {**vector, name: data.draw(misspelled(vector[name], pieces))}
    numbers = [0, -1, vector[name] + 1, vector[name] - 1, 2**31 - 1, 2**31, 2**40, 2**60, 2**63 - 1, 2**64]
    return {**vector, name: data.draw(st.sampled_from(numbers))}


def other_lines(data: st.DataObject, lines: list[str]) -> list[str]:
    """The lines of a commit with one of them gone, twice, elsewhere, cut, or with other values."""
    at = data.draw(st.integers(0, len(lines) - 1))
    action = json.loads(lines[at])
    match data.draw(st.sampled_from(["value"] * 6 + ["remove", "repeat", "move", "cut", "twice", "deep", "number"])):
        case "remove":
            return lines[:at] + lines[at + 1 :]
        case "repeat":
            return [*lines, lines[at]]
        case "move":
            return [*lines[:at], *lines[at + 1 :], lines[at]]
        case "cut":
            cut = data.draw(st.integers(0, len(lines[at])))
            return [*lines[:at], lines[at][:cut], *data.draw(st.sampled_from([[], lines[at + 1 :]]))]
        case "twice":  # two values of one name: the last one counts
            second = other_action(data, action)
            parts = [part for part in data.draw(st.permutations([action, second])) if isinstance(part, dict)]
            lines[at] = "{" + ", ".join(filter(None, (json.dumps(part)[1:-1] for part in parts))) + "}"
        case "deep":
            depth = data.draw(st.sampled_from([100, 5000, 100_000]))
            opening, closing = data.draw(st.sampled_from([("[", "]"), ('{"a":', "}")]))
            lines[at] = f'{{"add": {opening * depth}1{closing * depth}}}'
        case "number":
            numbers = st.sampled_from(["1e400", "-0", "9" * 5000, "NaN", "-Infinity", "1.0", "0x1", "1e3"])
            lines[at] = lines[at].replace('"size": ', f'"size": {data.draw(numbers)}, "was": ', 1)
        case _:
            lines[at] = json.dumps(other_action(data, action))
    return lines


def hurt_commit(data: st.DataObject, path: Path) -> int:
    """Damage one commit: its bytes, or its lines. Returns from which version on that may be seen, as all of these do."""
    versions = sorted(list_commits(path))
    version, other_version = (data.draw(st.sampled_from(versions)) for _ in range(2))
    file = commit(path, version)
    if data.draw(st.integers(0, 3)) == 0:
        file.write_bytes(data.draw(damaged(file.read_bytes(), [commit(path, other_version).read_bytes()])))
    else:
        lines = other_lines(data, file.read_text().splitlines())
        file.write_text("".join(f"{line}\n" for line in lines))
    return version


def other_name(name: str) -> st.SearchStrategy[str]:
    """A name in which another number is another one, as of a part."""
    numbers = re.findall(r"\d+", name)
    replacements = st.sampled_from(["0", "1", "2", "4", "5", "6", "7", "9" * 20])
    pairs = st.tuples(st.sampled_from(numbers), replacements)
    return pairs.map(lambda pair: name.replace(pair[0], pair[1][: len(pair[0])].zfill(len(pair[0]))))


def hurt_checkpoint(data: st.DataObject, path: Path) -> int:
    """Damage one file of a checkpoint: its name, bytes, lines, columns or rows; a change within Parquet gets the right checksums."""
    log = path / "_delta_log"
    files = sorted([*log.glob("*.checkpoint.*"), *log.glob("_sidecars/*")])
    file = data.draw(st.sampled_from(files))
    if data.draw(st.integers(0, 9)) == 0:
        file.rename(file.with_name(data.draw(other_name(file.name))))
    elif data.draw(st.booleans()):
        other_contents = [file.read_bytes() for file in [*files, commit(path, LAST)]]
        file.write_bytes(data.draw(damaged(file.read_bytes(), other_contents)))
    elif file.suffix == ".json":
        file.write_text("".join(f"{line}\n" for line in other_lines(data, file.read_text().splitlines())))
    else:
        table = pq.read_table(file).combine_chunks()
        at, names = data.draw(st.integers(0, table.num_columns - 1)), table.column_names
        match data.draw(st.sampled_from(["remove", "rename", "rows", "null", "text"])):
            case "remove":
                table = table.remove_column(at)
            case "rename":
                table = table.rename_columns([*names[:at], data.draw(st.sampled_from([*names, "x"])), *names[at + 1 :]])
            case "rows":
                rows = st.lists(st.integers(0, max(table.num_rows - 1, 0)), max_size=8)
                table = pa.concat_tables([table.slice(0, 0), *(table.slice(n, 1) for n in data.draw(rows))])
            case "null":
                table = table.set_column(at, names[at], pa.nulls(table.num_rows, table.column(at).type))
            case "text":
                table = table.set_column(at, names[at], pa.array(map(str, table.column(at).to_pylist())))
        pq.write_table(table, file, write_page_checksum=data.draw(st.booleans()))
    return -1


@pytest.mark.parametrize("name", ["metaData", "protocol"])
def test_two_columns_of_a_checkpoint_with_one_name(name: str) -> None:
    """Readers disagree on which of them counts."""
    with copied("classic") as path:
        for version in range(CHECKPOINT):
            commit(path, version).unlink()
        (file,) = (path / "_delta_log").glob("*.checkpoint.parquet")
        table = pq.read_table(file)
        names = [name if column == "checkpointMetadata" else column for column in table.column_names]
        pq.write_table(table.rename_columns(names), file)
        with pytest.raises(DamagedFileError, match="not a Delta checkpoint: two columns have one name"):
            Reader(path, path.parent / "cache").scan()


def hurt_vector(data: st.DataObject, path: Path) -> int:
    """Damage a vector: its bytes, or what the log says of it. The checksum, the size and the number of rows may be those of the new bytes."""
    version = data.draw(st.sampled_from([4, 5, 6]))
    lines = [json.loads(line) for line in commit(path, version).read_text().splitlines()]
    adds = [line["add"] for line in lines if "deletionVector" in line.get("add", {})]
    vector = adds[0]["deletionVector"]
    way = data.draw(st.sampled_from(["bytes", "sealed", "sealed", "described"]))
    place = next(path.rglob("ab/deletion_vector_*" if version == 4 else "deletion_vector_*"))
    if way == "described":
        adds[0]["deletionVector"] = other_vector(data, vector)
    elif way == "bytes" and vector["storageType"] != "i":
        place.write_bytes(data.draw(damaged(place.read_bytes())))
    else:
        offset = vector.get("offset", 0)
        inline = vector["storageType"] == "i"
        text = vector["pathOrInlineDv"]
        old_bitmap = decoded_z85(text)[: vector["sizeInBytes"]] if inline else place.read_bytes()[offset + 4 : -4]
        bitmap = data.draw(damaged(old_bitmap, [roaring(range(5000)), roaring([2**32, 5]), roaring(range(3, 9), True)]))
        vector["sizeInBytes"] = len(bitmap)
        if inline:
            vector["pathOrInlineDv"] = encode_z85(bitmap)
        else:
            place.write_bytes(place.read_bytes()[:offset] + sealed(bitmap))
        with contextlib.suppress(Exception):
            if data.draw(st.booleans()):
                vector["cardinality"] = len(vector_values(bitmap))
    commit(path, version).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return version


@pytest.mark.parametrize("hurt", [hurt_commit, hurt_checkpoint, hurt_vector])
@given(data=st.data())
@fuzzed(40)
def test_damage(data: st.DataObject, hurt: Callable[[st.DataObject, Path], int]) -> None:
    """A table is damaged before a host learns of it, or when it knows some of its versions."""
    shape = data.draw(st.sampled_from(list(SHAPES)))
    known_version = data.draw(st.sampled_from([None, None, None, 4, LAST]))
    mode = data.draw(st.sampled_from(["none", "none", "partial", "full"]))
    truth = world(shape)[1]
    with copied(shape) as path, in_bounds():
        cache = path.parent / "cache"
        if data.draw(st.booleans()):
            for version in range(CHECKPOINT):
                commit(path, version).unlink()
        if known_version is not None:
            later = {file: file.read_bytes() for file in (commit(path, n) for n in range(known_version + 1, LAST + 1))}
            for file in later:
                file.unlink()
            Reader(path, cache, mode).get_many()
            for file, text in later.items():
                file.write_bytes(text)
        since = hurt(data, path)
        cached = [truth] if known_version is not None and since <= known_version else []
        judge(path, cache, mode, evaluated(path), cached)
        version = data.draw(st.integers(0, LAST))
        if known_version is None:
            judge(path, cache, "none", evaluated(path, version), version=version)
        with contextlib.suppress(PysparkLookupError):
            Reader(path, cache).history()


@functools.cache
def bitmaps() -> list[bytes]:
    rng = random.Random(5)
    sparse = [rng.randrange(2**34) for _ in range(50)]
    dense = [n for n in range(2**17) if rng.random() < 0.1]
    row_sets = [[], [0], [65535, 65536], range(70_000), sparse, dense, range(0, 2**20, 2**16), [2**32 - 1, 2**32]]
    return [roaring(places, runs) for places in row_sets for runs in (False, True) if places or not runs]


def test_bitmaps_of_all_kinds() -> None:
    for blob in bitmaps():
        assert decode_bitmap(blob, len(vector_values(blob))).tolist() == sorted(vector_values(blob))


def test_bitmaps_with_parts_that_are_empty() -> None:
    """Writers list a part for each 2^32 rows up to the last, with rows or without. Bytes of no part are damage."""
    (bitmap,) = [blob for blob in bitmaps() if vector_values(blob) == {0}][:1]
    part = bitmap[16:]  # behind the number of the part
    empty = struct.pack("<II", 12346, 0)
    numbered = [struct.pack("<I", number) + (part if number == 2 else empty) for number in range(3)]
    blob = bitmap[:4] + struct.pack("<Q", 3) + b"".join(numbered)
    assert decode_bitmap(blob, 1).tolist() == [2 * 2**32]
    assert decode_bitmap(bitmap[:4] + struct.pack("<Q", 1) + numbered[0], 0).tolist() == []
    with pytest.raises(DamagedFileError, match="outside its containers"):
        decode_bitmap(blob + b"\0", 1)


def decode_bitmap(blob: bytes, rows: int) -> Any:
    """What the package makes of a bitmap in a file."""
    vector = DeletionVector("of.parquet", "p", "x", 1, len(blob), rows, f"file:///{NAME}/x")
    return vector.positions(sealed(blob))["of.parquet"]


def test_a_text_that_is_filled_up() -> None:
    """Z85 of bytes that four does not divide, as Rust writes it: of the row 3, by delta-kernel-rs."""
    text = "^Bg9^0rr910000000000iXQKl0rr91000005c8Xg##093"
    positions = DeletionVector("of.parquet", "i", text, 0, 34, 1, None).positions(b"")
    assert positions["of.parquet"].tolist() == [3]
    for wrong in (text[:-5] + "####0", text[:-5] + "##zzz", text[:-1]):
        with pytest.raises(DamagedFileError):
            DeletionVector("of.parquet", "i", wrong, 0, 34, 1, None).positions(b"")


@given(data=st.data())
@fuzzed(250)
def test_a_damaged_bitmap(data: st.DataObject) -> None:
    """A damaged bitmap with the right checksum: its rows, if it makes sense, are those of the evaluation."""
    blob = data.draw(damaged(data.draw(st.sampled_from(bitmaps())), bitmaps()))
    values: set[int] | None = None
    with contextlib.suppress(Exception):
        values = vector_values(blob)
    with in_bounds():
        try:
            rows = decode_bitmap(blob, len(values or ()))
        except DamagedFileError as problem:
            assert values is None
            assert NAME in str(problem)
        else:
            assert values is not None
            assert rows.tolist() == sorted(values)
