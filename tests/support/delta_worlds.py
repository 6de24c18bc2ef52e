"""Delta tables that are written by hand, for `test_delta_fuzz`: with all that a log may have, in each form of checkpoints."""

import datetime
import json
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.delta_tables import vector_of, vectors_of

HERE = "file:///HERE"
"""Stands in a log for the URL of the directory with the table."""
SHAPES = {"classic": "none", "parts": "name", "v2 json": "id", "v2 parquet": "none"}
"""The form of a table's checkpoint, and the mode of its column mapping."""
CHECKPOINT = 3
"""The version that it is of; the last one is 6."""
_STRUCT = {"type": "struct", "fields": [("x", "long", 7), ("y", "string", 8)]}
_COLUMNS = [("id", "long", 1), ("part", "string", 2), ("num", "integer", 3), ("name", "string", 4), ("at", "timestamp", 5), ("both", _STRUCT, 6)]  # fmt: skip
_TEXTS = pa.map_(pa.string(), pa.string())
_VECTOR = pa.struct(
    {"storageType": pa.string(), "pathOrInlineDv": pa.string(), "offset": pa.int32(), "sizeInBytes": pa.int32()}
    | {"cardinality": pa.int64()}
)
_BOUNDS = pa.struct({"id": pa.int64(), "name": pa.string()})
_STATS = pa.struct(
    {"numRecords": pa.int64(), "minValues": _BOUNDS, "maxValues": _BOUNDS}
    | {"nullCount": pa.struct({"id": pa.int64(), "name": pa.int64()})}
)
_CHECKPOINT = {
    "txn": pa.struct({"appId": pa.string(), "version": pa.int64()}),
    "add": pa.struct(
        {"path": pa.string(), "partitionValues": _TEXTS, "size": pa.int64(), "modificationTime": pa.int64()}
        | {"dataChange": pa.bool_(), "stats": pa.string(), "deletionVector": _VECTOR, "stats_parsed": _STATS}
    ),
    "remove": pa.struct({"path": pa.string(), "deletionTimestamp": pa.int64(), "dataChange": pa.bool_()}),
    "metaData": pa.struct(
        {"id": pa.string(), "schemaString": pa.string(), "partitionColumns": pa.list_(pa.string())}
        | {"configuration": _TEXTS, "createdTime": pa.int64()}
        | {"format": pa.struct({"provider": pa.string(), "options": _TEXTS})}
    ),
    "protocol": pa.struct(
        {"minReaderVersion": pa.int32(), "minWriterVersion": pa.int32()}
        | {"readerFeatures": pa.list_(pa.string()), "writerFeatures": pa.list_(pa.string())}
    ),
    "checkpointMetadata": pa.struct({"version": pa.int64()}),
    "sidecar": pa.struct({"path": pa.string(), "sizeInBytes": pa.int64(), "modificationTime": pa.int64()}),
}


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
            of = kind if isinstance(kind, str) else {"type": "struct", "fields": self.schema(kind["fields"])}
            fields.append({"name": name, "type": of, "nullable": True, "metadata": mapped if self.mapping != "none" else {}})  # fmt: skip
        return fields

    def add(self, number: int, part: str | None, rows: int = 6) -> dict[str, Any]:
        """Write a data file; its action."""
        ids = [number * 10 + n for n in range(rows)]
        names = [None if n == 2 else f"n{n % 4}" for n in ids]
        at = [datetime.datetime(2024, 1, 1 + number, n, tzinfo=datetime.timezone.utc) for n in range(rows)]
        both = [None if n % 5 == 4 else {self.stored("x"): n, self.stored("y"): f"y{n}"} for n in ids]
        inner = pa.struct([self._field("x", pa.int64(), 7), self._field("y", pa.string(), 8)])
        fields = [self._field("id", pa.int64(), 1), self._field("name", pa.string(), 4)]
        fields += [self._field("at", pa.timestamp("us", "UTC"), 5), self._field("both", inner, 6)]
        found = pa.Table.from_arrays(
            [pa.array(of, field.type) for of, field in zip((ids, names, at, both), fields, strict=True)],
            schema=pa.schema(fields),
        )
        name = f"part=b c/{number}.parquet" if part == "b c" else f"{number}.parquet"
        (self.path / name).parent.mkdir(exist_ok=True)
        pq.write_table(found, self.path / name)
        known = [name for name in names if name is not None]
        bounds = [{self.stored("id"): pick(ids), self.stored("name"): pick(known)} for pick in (min, max)]
        nulls = {self.stored("id"): 0, self.stored("name"): rows - len(known)}
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
        said = [{"commitInfo": {"timestamp": 1_700_000_000_000 + version, "operation": "WRITE"}}, *actions]
        (self.log / f"{version:020}.json").write_text("".join(json.dumps(action) + "\n" for action in said))

    def vector(self, storage: str, places: Sequence[int], runs: bool = False) -> dict[str, Any]:
        """A vector, in its file behind another one."""
        if storage == "i":
            return vector_of(self.path, places, storage, runs)
        vector = vectors_of(self.path, [[1, 2], places], storage, runs, uuid.UUID(int=len(places)))[1]
        return vector | {"pathOrInlineDv": vector["pathOrInlineDv"].replace(self.path.parent.as_uri(), HERE)}

    def checkpoint(self, shape: str, actions: Sequence[dict[str, Any]]) -> None:
        """Write a checkpoint, and the hint that leads to it."""
        first = f"{CHECKPOINT:020}.checkpoint"
        hint: dict[str, Any] = {"version": CHECKPOINT, "size": len(actions)}
        files = [action for action in actions if "add" in action or "remove" in action]
        others = [{"checkpointMetadata": {"version": CHECKPOINT}}, *(a for a in actions if a not in files)]
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
                said = {"path": side.name, "sizeInBytes": side.stat().st_size, "modificationTime": 1}
                others.append({"sidecar": said})
            place = self.log / f"{first}.{uuid.UUID(int=9)}.{'json' if shape == 'v2 json' else 'parquet'}"
            if shape == "v2 json":
                place.write_text("".join(json.dumps(action) + "\n" for action in others))
            else:
                self._rows(place, others)
            hint["v2Checkpoint"] = {"path": place.name}
        (self.log / "_last_checkpoint").write_text(json.dumps(hint))

    def _rows(self, place: Path, actions: Sequence[dict[str, Any]]) -> None:
        """Write a file of a checkpoint, with a checksum for each page."""
        table = pa.Table.from_pylist([_as_row(action) for action in actions], pa.schema(_CHECKPOINT))
        pq.write_table(table, place, write_page_checksum=True, data_page_size=256, use_dictionary=False)


def _as_row(action: dict[str, Any]) -> dict[str, Any]:
    """An action as a row: maps as pairs, and statistics in both forms."""
    ((name, of),) = action.items()
    row = {key: list(value.items()) if key in ("partitionValues", "configuration") else value for key, value in of.items()}  # fmt: skip
    if name == "add" and "col-" not in of["stats"]:
        row["stats_parsed"] = json.loads(of["stats"])
    return {name: row}


def write_world(path: Path, shape: str) -> None:
    """A table of seven versions, in `path`."""
    mapping = SHAPES[shape]
    of = _Writer(path, mapping)
    features = ["deletionVectors", "columnMapping", "v2Checkpoint"]
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": features, "writerFeatures": features}
    configuration = {"delta.enableDeletionVectors": "true"}
    configuration |= {} if mapping == "none" else {"delta.columnMapping.mode": mapping}
    metadata = {
        "id": "0000-of-this-table", "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": of.schema()}), "partitionColumns": ["part", "num"],
        "configuration": configuration, "createdTime": 1,
    }  # fmt: skip
    one, two, three = of.add(0, "a"), of.add(1, None), of.add(2, "b c")
    of.commit(0, {"protocol": protocol}, {"metaData": metadata}, {"add": one}, {"add": two})
    of.commit(1, {"add": three}, {"txn": {"appId": "x", "version": 1}})
    inline = {**one, "deletionVector": of.vector("i", [0, 3])}
    of.commit(2, {"remove": {"path": one["path"], "deletionTimestamp": 1, "dataChange": True}}, {"add": inline})
    folded = {**of.add(3, "b c", 12), "dataChange": False}
    gone = [{"remove": {"path": old["path"], "deletionTimestamp": 1, "dataChange": False}} for old in (two, three)]
    of.commit(3, *gone, {"add": folded})
    of.checkpoint(shape, [{"protocol": protocol}, {"metaData": metadata}, {"add": inline}, *gone, {"add": folded}])
    in_file = {**folded, "dataChange": True, "deletionVector": of.vector("u", [1, 4, 5, 6, 11], runs=True)}
    removed = {"path": folded["path"], "deletionTimestamp": 1, "dataChange": True, "partitionValues": {}, "size": 1}
    of.commit(4, {"remove": removed}, {"add": in_file}, {"add": of.add(4, "ü/%")})
    elsewhere = {**of.add(5, "a"), "deletionVector": of.vector("p", [2])}
    of.commit(5, {"add": elsewhere}, {"domainMetadata": {"domain": "x", "configuration": "{}", "removed": False}})
    again = {**inline, "deletionVector": of.vector("i", [0, 3, 5], runs=True)}
    of.commit(6, {"remove": {**inline, "deletionTimestamp": 1}}, {"add": again})


def copy_world(made: Path, path: Path) -> Path:
    """A copy of its own at `path`, which is of the same name."""
    shutil.copytree(made, path)
    for file in (path / "_delta_log").glob("*.json"):
        data = file.read_bytes()
        if HERE.encode() in data:
            file.write_bytes(data.replace(HERE.encode(), path.parent.as_uri().encode()))
    return path
