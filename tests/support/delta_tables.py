"""What tests of Delta tables share: the oracle, tables as users open them, and commits and deletion vectors written by hand."""

import base64
import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from pyspark_lookup.sources.delta.source import _B85, _Z85
from tests.support.delta_evaluation import State, list_commits, read_actions
from tests.support.lake_tables import roaring, sealed


def by_deltalake(table: Path) -> pa.Table:
    """All rows, as delta-rs reads them."""
    return pa.table(QueryBuilder().register("t", DeltaTable(str(table))).execute("SELECT * FROM t"))


def encode_z85(data: bytes) -> str:
    digits = {ord(b85): ord(z85) for z85, b85 in zip(_Z85, _B85, strict=True)}
    return base64.b85encode(data + bytes(-len(data) % 4)).decode().translate(digits)


def write_vector(table: Path, places: Sequence[int], storage: str, runs: bool = False) -> dict[str, Any]:
    """A deletion vector as the log has it, in a file of its own unless it is `i`."""
    if storage == "i":
        data = roaring(places, runs)
        return _described(storage, data, places) | {"pathOrInlineDv": encode_z85(data)}
    return write_vectors(table, [places], storage, runs)[0]


def write_vectors(
    table: Path, many: Sequence[Sequence[int]], storage: str = "u", runs: bool = False, name: uuid.UUID | None = None
) -> list[dict[str, Any]]:
    """Deletion vectors as the log has them, in one file."""
    name, prefix = name or uuid.uuid4(), "ab" if storage == "u" else ""
    path = table / prefix / f"deletion_vector_{name}.bin"
    path.parent.mkdir(exist_ok=True)
    place = prefix + encode_z85(name.bytes) if storage == "u" else path.as_uri()
    blob, vectors = b"\1", []
    for places in many:
        data = roaring(places, runs)
        vectors.append(_described(storage, data, places) | {"pathOrInlineDv": place, "offset": len(blob)})
        blob += sealed(data)
    path.write_bytes(blob)
    return vectors


def _described(storage: str, data: bytes, places: Sequence[int]) -> dict[str, Any]:
    return {"storageType": storage, "sizeInBytes": len(data), "cardinality": len({*places})}


def log_of_files(table: Path, schema: Any, *features: str) -> None:
    """Give a directory of Parquet files the log of a Delta table. `schema`: Spark's, as JSON. `features`: those that readers must have."""
    (table / "_delta_log").mkdir()
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": features, "writerFeatures": features}
    metadata = {"id": "1", "format": {"provider": "parquet"}, "schemaString": json.dumps(schema), "configuration": {}}
    adds = [{"add": make_add(path)} for path in sorted(table.glob("*.parquet"))]
    actions = [{"protocol": protocol}, {"metaData": {**metadata, "partitionColumns": []}}, *adds]
    (table / "_delta_log" / f"{0:020}.json").write_text("".join(json.dumps(action) + "\n" for action in actions))


def make_add(path: Path) -> dict[str, Any]:
    """The action that adds a file without statistics."""
    size = path.stat().st_size
    return {"path": path.name, "partitionValues": {}, "size": size, "modificationTime": 1, "dataChange": True}


def append_commit(table: Path, actions: Sequence[dict[str, Any]]) -> int:
    """Write a commit by hand; its version."""
    log = table / "_delta_log"
    version = max(int(path.stem) for path in log.glob("*.json") if path.stem.isdecimal()) + 1
    (log / f"{version:020}.json").write_text("".join(json.dumps(action) + "\n" for action in actions))
    return version


def set_properties(table: Path, properties: Mapping[str, str]) -> int:
    """Write a commit that replaces the properties of a table's first commit (deltalake refuses names that it does not know); its version."""
    actions = map(json.loads, (table / f"_delta_log/{0:020}.json").read_text().splitlines())
    (metadata,) = (action["metaData"] for action in actions if "metaData" in action)
    return append_commit(table, [{"metaData": {**metadata, "configuration": properties}}])


def give_vectors(table: Path, adds: Sequence[dict[str, Any]], vectors: Sequence[dict[str, Any]]) -> int:
    """Write a commit that gives files these deletion vectors in place of those that they had; its version."""
    names = [{name: add[name] for name in ("path", "deletionVector") if name in add} for add in adds]
    removes = [{"remove": {**name, "deletionTimestamp": 1, "dataChange": True}} for name in names]
    pairs = zip(adds, vectors, strict=True)
    added = [{"add": {**add, "dataChange": True, "deletionVector": vector}} for add, vector in pairs]
    return append_commit(table, [*removes, *added])


def replay_files(path: Path, version: int) -> dict[tuple[str, Any], dict[str, Any]]:
    """The files of a version, by what a remove names, from all commits."""
    state, commits = State(path), list_commits(path)
    for number in range(version + 1):
        state.apply(read_actions(commits[number]))
    return state.files
