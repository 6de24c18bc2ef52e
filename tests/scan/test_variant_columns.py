"""VARIANT columns of tables: Delta and Iceberg, files of other writers, and files whose columns the user declares."""

import random
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup.columnar.types import VARIANT, is_variant
from pyspark_lookup.columnar.variants import assemble
from pyspark_lookup.errors import PredicateError, SchemaError
from tests.support.delta_tables import append_commit, log_of_files, make_add
from tests.support.iceberg_writing import IcebergTable
from tests.support.lake_tables import MODES, opened
from tests.support.variants import (
    decode,
    encode,
    encode_metadata,
    field_names,
    fitting_value,
    random_shape,
    random_value,
    shredded,
)

COLUMNS = {
    "id": "long",
    "v": "variant",
    "s": {"type": "struct", "fields": [{"name": "v", "type": "variant", "nullable": True, "metadata": {}}]},
}
SCHEMA = {"type": "struct", "fields": [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in COLUMNS.items()]}  # fmt: skip


def decoded(value: Any) -> Any:
    return None if value is None else decode(value["metadata"], value["value"])


@pytest.mark.parametrize("mode", MODES)
def test_delta_tables(tmp_path: Path, cache_dir: Path, mode: str) -> None:
    """Each file is shredded in its own way; files come and go, many of them small."""
    rng = random.Random(mode)
    path, values, files = tmp_path / "t", {}, {}
    path.mkdir()
    table = None
    for commit in range(4):
        adds, removed = [], rng.choice([*files] or [None])
        for number in range((10, 1, 2, 1)[commit]):
            shape, ids = random_shape(rng), range(len(values), len(values) + rng.randint(1, 5))
            added = {key: None if rng.random() < 0.1 else fitting_value(rng, shape) for key in ids}
            column = shredded(list(added.values()), shape, rng)
            name = f"{commit}-{number}.parquet"
            inside = pa.StructArray.from_arrays([column], ["v"])
            pq.write_table(
                pa.table({"id": list(ids), "v": column, "s": inside}), path / name, store_schema=rng.random() < 0.5
            )
            adds.append(make_add(path / name))
            values |= added
            files[name] = list(ids)
        if commit == 0:
            log_of_files(path, SCHEMA, "variantType", "variantShredding")
            table = opened(path, cache_dir, mode, "id")
        else:
            values |= dict.fromkeys(files.pop(removed))  # their numbers are not used again
            append_commit(path, [*({"add": add} for add in adds), {"remove": {"path": removed, "dataChange": True, "deletionTimestamp": 1}}])  # fmt: skip
        live = sorted(key for ids in files.values() for key in ids)
        for rows in (table.scan(), table.get_many(live)):
            assert all(map(is_variant, (rows.schema.field("v").type, rows.schema.field("s").type.field(0).type)))
            assert {row["id"]: decoded(row["v"]) for row in rows.to_pylist()} == {key: values[key] for key in live}
            assert {row["id"]: decoded(row["s"]["v"]) for row in rows.to_pylist()} == {key: values[key] for key in live}


def test_iceberg_tables(tmp_path: Path, cache_dir: Path) -> None:
    parts = [
        {"id": number, "name": name, "required": True, "type": "binary"}
        for number, name in ((4, "metadata"), (5, "value"))
    ]
    table = IcebergTable.create(tmp_path / "t", {"id": "long", "v": {"type": "struct", "fields": parts}}, 3)
    rng = random.Random(0)
    values = [random_value(rng) for _ in range(5)]
    pairs = []
    for value in values:
        names = sorted(field_names(value))
        pairs.append({"metadata": encode_metadata(names, 2), "value": encode(value, names, rng)})
    table.commit(table.data([{"id": number, "v": pair} for number, pair in enumerate(pairs)]))
    table.meta["schemas"][0]["fields"][1]["type"] = "variant"
    table.save()
    for mode in MODES:
        reader = opened(table.home, cache_dir, mode, "id")
        assert reader.schema.field("v").type.equals(VARIANT, check_metadata=True)
        assert [decoded(row["v"]) for row in reader.scan().sort_by("id").to_pylist()] == values
        assert decoded(reader.get(3)[0]["v"]) == values[3]


def test_files_of_other_writers(tmp_path: Path, cache_dir: Path) -> None:
    """Parquet's annotation says that a group is a VARIANT."""
    rows = "SELECT i AS id, CASE i WHEN 1 THEN NULL WHEN 2 THEN [i]::VARIANT ELSE {'a': i, 'b': 'x'}::VARIANT END AS v FROM range(1, 4) t(i)"
    path = tmp_path / "t"
    path.mkdir()
    duckdb.connect().execute(f"COPY ({rows}) TO '{path / 'a.parquet'}' (FORMAT parquet)")
    table = opened(path, cache_dir, "full", "id")
    assert is_variant(table.schema.field("v").type)
    number = decoded(table.get(2)[0]["v"])[0]
    assert number[1] == 2
    assert [decoded(row["v"]) for row in table.scan().sort_by("id").to_pylist()] == [
        None, [number], {"a": (number[0], 3), "b": ("string", "x")}
    ]  # fmt: skip


def test_declared_columns(tmp_path: Path, cache_dir: Path) -> None:
    """A struct is a VARIANT only if somebody says so; nothing else can be one."""
    rng, path = random.Random(3), tmp_path / "t"
    path.mkdir()
    values = [None, {"a": ("int8", 1)}, [("string", "x")]]
    column = shredded(values, {"a": "int8"}, rng)
    inside = pa.array([[value] for value in column.to_pylist()], pa.list_(column.type))
    pq.write_table(pa.table({"id": [0, 1, 2], "v": column, "l": inside}), path / "a.parquet")
    assert not is_variant(opened(path, cache_dir).schema.field("v").type)
    table = opened(path, cache_dir, schema="id INT, v VARIANT, l ARRAY<VARIANT>")
    rows = table.scan().to_pylist()
    assert [decoded(row["v"]) for row in rows] == [decoded(row["l"][0]) for row in rows] == values
    for options, error, says in (
        ({"schema": "id VARIANT"}, SchemaError, "'id' of .* is int64 and cannot be read as VARIANT"),
        ({"schema": "v VARIANT", "keys": "v"}, SchemaError, "'v' is VARIANT, which cannot be a key"),
        ({"schema": "v VARIANT", "where": "v = 1"}, PredicateError, "'v' of type VARIANT cannot be compared"),
    ):
        with pytest.raises(error, match=says):
            opened(path, cache_dir, "none", **options).scan()
    (path / "a.parquet").unlink()
    (path / "a.json").write_text('{"v": {"metadata": "a", "value": "b"}}')
    with pytest.raises(SchemaError, match="cannot be read as VARIANT"):
        opened(path, cache_dir, schema="v VARIANT").scan()


def test_managed_tables(tmp_path: Path, cache_dir: Path) -> None:
    """Managed tables store the VARIANT values that a write brings, and return them after upserts and compaction."""
    rng = random.Random(5)
    values = [None, *(random_value(rng) for _ in range(9))]
    column = assemble(shredded(values, None, rng))
    table = opened(tmp_path / "t", cache_dir, "full", "id")
    inside = pa.ListArray.from_arrays(pa.array(range(11), pa.int32()), column)
    rows = pa.table({"id": range(10), "v": column, "l": inside})
    table.write(rows.slice(0, 6))
    table.upsert(rows.slice(4))
    for _ in range(2):
        for mode in MODES:
            reader = opened(tmp_path / "t", cache_dir, mode, "id")
            assert is_variant(reader.schema.field("l").type.value_type)
            answer = reader.scan().sort_by("id").to_pylist()
            assert [decoded(row["v"]) for row in answer] == [decoded(row["l"][0]) for row in answer] == values
            assert decoded(reader.get(5)[0]["v"]) == values[5]
        table.compact()


def test_damaged_values(tmp_path: Path, cache_dir: Path) -> None:
    path = tmp_path / "t"
    path.mkdir()
    kind = pa.struct([("metadata", pa.binary()), ("value", pa.binary()), ("typed_value", pa.uint16())])
    column = pa.array([{"metadata": b"\1\0\0", "typed_value": 1}], kind)
    pq.write_table(pa.table({"id": [1], "v": column}), path / "a.parquet")
    log_of_files(path, {"type": "struct", "fields": SCHEMA["fields"][:2]}, "variantType")
    with pytest.raises(
        SchemaError, match=r"column 'v' of .*a.parquet has an invalid VARIANT: one of its parts is uint16"
    ):
        opened(path, cache_dir).scan()
    assert opened(path, cache_dir, columns="id").scan().num_rows == 1
