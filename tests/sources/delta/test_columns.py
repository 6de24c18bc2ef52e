"""Columns of Delta tables as keys, and under other names: partition columns, renamed and dropped ones."""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from pyspark_lookup import SchemaError
from tests.support.delta_tables import append_commit
from tests.support.lake_tables import MODES, opened

MAPPED = {"minReaderVersion": 2, "minWriterVersion": 5}


def test_partitions_that_are_no_numbers(tmp_path: Path) -> None:
    """NaN and infinities are values of a partition column, NaN the largest; a value that is none of its type is named."""
    path, values = tmp_path / "t", ["NaN", "Infinity", "-Infinity", "1.5", None]
    write_deltalake(str(path), pa.table({"id": [0], "part": [0.5]}), partition_by=["part"])
    add = next(line["add"] for line in map(json.loads, (path / "_delta_log" / f"{0:020}.json").open()) if "add" in line)
    for number, value in enumerate(values, 1):
        pq.write_table(pa.table({"id": [number]}), path / f"{number}.parquet")
        size = (path / f"{number}.parquet").stat().st_size
        more = {"path": f"{number}.parquet", "partitionValues": {"part": value}, "size": size, "stats": None}
        append_commit(path, [{"add": {**add, **more}}])
    assert opened(path, tmp_path / "cache").scan().num_rows == len(values) + 1
    for options, ids in (
        ({"partition": "max_pt()"}, [1]),
        ({"partition": "part=NaN"}, [1]),
        ({"where": "part = DOUBLE('NaN')"}, [1]),
        ({"where": "part > 1.5D"}, [1, 2]),
        ({"where": "part < 0D"}, [3]),
        ({"where": "part IS NULL"}, [5]),
    ):
        assert sorted(opened(path, tmp_path / "cache", **options).scan().column("id").to_pylist()) == ids, options
    append_commit(path, [{"add": {**add, "partitionValues": {"part": "much"}}}])
    for options in ({}, {"partition": "max_pt()"}):
        with pytest.raises(SchemaError, match=r"'much' of .*\.parquet"):
            opened(path, tmp_path / "cache", **options).scan()


def schema(columns: Sequence[tuple[str, str]]) -> str:
    """Of numbers: (name, name in the files)."""
    fields = []
    for number, (name, stored) in enumerate(columns):
        mapping = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": stored}
        fields.append({"name": name, "type": "long", "nullable": True, "metadata": mapping})
    return json.dumps({"type": "struct", "fields": fields})


def write_mapped(
    path: Path, columns: Sequence[tuple[str, str]], rows: pa.Table, protocol: dict[str, Any]
) -> dict[str, Any]:
    """A table with one file; its metadata."""
    (path / "_delta_log").mkdir(parents=True)
    pq.write_table(rows, path / "f.parquet")
    add = {"path": "f.parquet", "partitionValues": {}, "size": (path / "f.parquet").stat().st_size, "dataChange": True}
    metadata = {"id": "x", "format": {"provider": "parquet"}, "schemaString": schema(columns), "partitionColumns": []}
    metadata["configuration"] = {"delta.columnMapping.mode": "name"}
    actions = [{"protocol": protocol}, {"metaData": metadata}, {"add": add}]
    (path / "_delta_log" / f"{0:020}.json").write_text("".join(json.dumps(action) + "\n" for action in actions))
    return metadata


ROWS = pa.table({"p1": [1, 2], "p2": [2, 7]})
CHANGES = {
    "renamed": ([("a", "p1"), ("c", "p2")], {"a": 2, "c": 7}),
    "dropped and added": ([("a", "p1"), ("b", "p3")], {"a": 2, "b": None}),
    "swapped": ([("b", "p1"), ("a", "p2")], {"a": 2, "b": 1}),
}
"""Columns of a table that had `a` and `b`, and its row of 2."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", CHANGES)
def test_names_that_mean_other_columns(tmp_path: Path, mode: str, change: str) -> None:
    """Rows that a host has cached by a name belong to the column that had it then, also when the change is taken back."""
    columns, row = CHANGES[change]
    path, before = tmp_path / "t", [("a", "p1"), ("b", "p2")]
    metadata = write_mapped(path, before, ROWS, MAPPED)
    table = opened(path, tmp_path / "cache", mode, "a")
    assert table.get_many([1, 2, 7]).num_rows == 2
    steps = [(columns, row), (before, {"a": 2, "b": 7}), (before[:1], {"a": 2}), (before, {"a": 2, "b": 7})]
    for mapping, expected in steps:
        append_commit(path, [{"metaData": {**metadata, "schemaString": schema(mapping)}}])
        assert table.get(2) == [expected]
        assert opened(path, tmp_path / "cache", mode, "a").get(2) == [expected]


def test_a_mapping_that_only_writers_need(tmp_path: Path) -> None:
    """Delta on Spark has left the feature out for readers, where a table came from version 2 of the protocol."""
    features = {"readerFeatures": list[str](), "writerFeatures": ["columnMapping"]}
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, **features}
    write_mapped(tmp_path / "t", [("a", "p1"), ("b", "p2")], pa.table({"p1": [1], "p2": [2]}), protocol)
    assert opened(tmp_path / "t", tmp_path / "cache").scan().to_pylist() == [{"a": 1, "b": 2}]


@pytest.mark.parametrize("shape", ["struct", "list", "map"])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_fields_that_are_others_of_the_same_names(tmp_path: Path, mode: str, shape: str) -> None:
    """The fields of a struct are told by their mapping, also where the file's have the planned names and types."""
    path, values = tmp_path / "t", {"a": 10, "b": 20}
    wrap = {"struct": lambda value: value, "map": lambda value: [("k", value)]}.get(shape, lambda value: [value])
    kind = pa.struct({"a": pa.int64(), "b": pa.int64()})
    kind = {"struct": kind, "map": pa.map_(pa.string(), kind), "list": pa.list_(kind)}[shape]
    rows = pa.table({"id": [1, 2], "of": pa.array([wrap(values), None], kind)})
    metadata = write_mapped(path, [("id", "id")], rows, MAPPED)

    def commit(fields: Sequence[tuple[str, str]]) -> None:
        inner = json.loads(schema(fields))
        nested = {"type": "array", "elementType": inner, "containsNull": True}
        if shape == "map":
            nested = {"type": "map", "keyType": "string", "valueType": inner, "valueContainsNull": True}
        whole = json.loads(schema([("id", "id"), ("of", "of")]))
        whole["fields"][1]["type"] = inner if shape == "struct" else nested
        append_commit(path, [{"metaData": {**metadata, "schemaString": json.dumps(whole)}}])

    for fields, expected in (
        ([("a", "a"), ("b", "b")], values),
        ([("a", "a"), ("b", "new")], {"a": 10, "b": None}),
        ([("a", "b"), ("b", "a")], {"a": 20, "b": 10}),
        ([("a", "a"), ("b", "b")], values),
    ):
        commit(fields)
        table = opened(path, tmp_path / "cache", mode, "id")
        assert table.get(1) == [{"id": 1, "of": wrap(expected)}]
        assert table.get(2) == [{"id": 2, "of": None}]


def write_raw(path: Path, fields: dict[str, Any], rows: pa.Table, parts: dict[str, str | None]) -> None:
    """A table with one file, whatever the log says of it. `fields`: their types; `parts`: partition columns, and values if not None."""
    metadata = write_mapped(path, [], rows, {"minReaderVersion": 1, "minWriterVersion": 2})
    types = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in fields.items()]
    definition = {"schemaString": json.dumps({"type": "struct", "fields": types}), "partitionColumns": [*parts]}
    add = json.loads((path / "_delta_log" / f"{0:020}.json").read_text().splitlines()[2])["add"]
    add["partitionValues"] = {name: value for name, value in parts.items() if value is not None}
    remove = {"path": add["path"], "dataChange": True}
    append_commit(path, [{"metaData": {**metadata, "configuration": {}, **definition}}, {"remove": remove}])
    append_commit(path, [{"add": add}])


ARRAY, STRUCT = {"type": "array", "elementType": "integer", "containsNull": True}, {"type": "struct", "fields": [
    {"name": name, "type": "integer", "nullable": True, "metadata": {}} for name in "ab"
]}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("string", pa.array([b"abc"]), "abc"),
        ("short", pa.array([5], pa.int32()), 5),
        ("timestamp", pa.nulls(1), None),
        (ARRAY, pa.array([[None]], pa.list_(pa.null())), [None]),
        (STRUCT, pa.array([{"a": 1, "b": None}], pa.struct({"a": pa.int32(), "b": pa.null()})), {"a": 1, "b": None}),
    ],
)
def test_files_that_say_less_than_the_log(tmp_path: Path, kind: Any, values: pa.Array, expected: object) -> None:
    """Some writers annotate neither text nor short numbers, or write no type for what is null everywhere."""
    write_raw(tmp_path / "t", {"id": "long", "v": kind}, pa.table({"id": [1], "v": values}), {})
    for mode in MODES:
        assert opened(tmp_path / "t", tmp_path / "cache", mode, "id").get(1) == [{"id": 1, "v": expected}]
        if isinstance(expected, str | int):
            assert opened(tmp_path / "t", tmp_path / "cache", mode, "v").get(expected) == [{"id": 1, "v": expected}]
            assert opened(tmp_path / "t", tmp_path / "cache", where=f"v = {expected!r}").scan().num_rows == 1


def test_partition_values_as_some_writers_have_them(tmp_path: Path) -> None:
    """A partition value that is not mentioned is null; an instant may say its offset; a float is the float of its digits."""
    fields = {"id": "long", "none": "string", "at": "timestamp", "f": "float"}
    parts = {"none": None, "at": "2024-01-01 02:00:00+02:00", "f": "0.1"}
    write_raw(tmp_path / "t", fields, pa.table({"id": [1]}), parts)
    (row,) = opened(tmp_path / "t", tmp_path / "cache").scan().to_pylist()
    assert (row["none"], row["at"]) == (None, datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc))
    for where in ("f = 0.1F", "f IN (0.1F)", "f > 0.1D", "none IS NULL", "at = TIMESTAMP '2024-01-01 00:00:00Z'"):
        assert opened(tmp_path / "t", tmp_path / "cache", where=where).scan().num_rows == 1, where
