"""Tables of other systems: what of an answer is taken."""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from pyspark_lookup.cache.memory import KEY_INDEX
from tests.providers.common import CACHES, KINDS, SCHEMA, USERS, Desk, Options, SyncFunction, ids, made, pairs, rows_of


@KINDS
@CACHES
def test_rows_come_in_any_order(desk: Desk, kind: str, cache: Options) -> None:
    """Rows are put with their keys wherever they stand in the answer; those of one key keep their order."""
    order = [("c", 3), ("a1", 1), ("b1", 2), ("a0", 1), ("b0", 2), ("a2", 1)]

    def answer(keys: pa.Table) -> pa.Table:
        return pa.table({"name": [name for name, _ in order], "id": [key for _, key in order]})

    found = desk.serve(made(kind, answer), cache).get_many(ids(2, 1, None, 3))
    assert found.column_names == ["id", "name", KEY_INDEX]
    assert found.column("id").to_pylist() == [2, 2, 1, 1, 1, 3]
    assert found.column("name").to_pylist() == ["b1", "b0", "a1", "a0", "a2", "c"]
    assert found.column(KEY_INDEX).to_pylist() == [0, 0, 1, 1, 1, 3]


FORMS: dict[str, Callable[[pa.Table], Any]] = {
    "a batch": lambda rows: rows.combine_chunks().to_batches()[0],
    "narrow integers": lambda rows: rows.set_column(0, "id", rows.column("id").cast(pa.int8())),
    "unsigned integers": lambda rows: rows.set_column(0, "id", rows.column("id").cast(pa.uint32())),
    "large text": lambda rows: rows.set_column(1, "name", rows.column("name").cast(pa.large_string())),
    "a view of text": lambda rows: rows.set_column(1, "name", rows.column("name").cast(pa.string_view())),
    "codes": lambda rows: rows.set_column(1, "name", rows.column("name").dictionary_encode()),
    "codes of keys": lambda rows: rows.set_column(0, "id", rows.column("id").dictionary_encode()),
    "chunks": lambda rows: pa.concat_tables([rows.slice(n, 1) for n in range(rows.num_rows)]),
    "chunks of codes": lambda rows: pa.concat_tables(
        [pa.table({"id": [row["id"]], "name": pa.array([row["name"]]).dictionary_encode()}) for row in rows.to_pylist()]
    ),
    "an empty chunk": lambda rows: pa.concat_tables([rows.slice(0, 0), rows]),
    "a slice": lambda rows: pa.concat_tables([rows, rows]).combine_chunks().slice(rows.num_rows, rows.num_rows),
    "no null allowed": lambda rows: rows.cast(pa.schema([pa.field(f.name, f.type, False) for f in SCHEMA])),
    "other order": lambda rows: rows.select(["name", "id"]),
}


@pytest.mark.parametrize("form", FORMS)
@CACHES
def test_answers_in_other_forms(desk: Desk, form: str, cache: Options) -> None:
    """An answer may have narrower types, codes, chunks and another order of columns; the table's types come out."""
    table = desk.serve(SyncFunction(lambda keys: FORMS[form](rows_of(USERS)(keys))), cache)
    for _ in range(2):
        assert pairs(table, 2, 3, 1) == [(0, "Bob"), (0, "Charlie"), (2, "Alice")]
        assert table.get_many(ids(1)).schema.types == [pa.int64(), pa.string(), pa.int64()]


NOTHING: dict[str, Any] = {
    "typed": SCHEMA.empty_table(),
    "untyped": pa.table({"id": [], "name": []}),
    "no chunk": pa.Table.from_batches([], SCHEMA),
    "a batch": pa.RecordBatch.from_arrays([pa.array([], field.type) for field in SCHEMA], schema=SCHEMA),
}


@pytest.mark.parametrize("nothing", NOTHING)
@KINDS
@CACHES
def test_answers_without_rows(desk: Desk, kind: str, nothing: str, cache: Options) -> None:
    """A table without rows says that no key has any."""
    function = made(kind, lambda keys: NOTHING[nothing])
    table = desk.serve(function, cache)
    assert (table.get(1), pairs(table, 1, 2)) == ([], [])


@CACHES
def test_other_columns_of_the_schema_are_left_out(desk: Desk, cache: Options) -> None:
    """Columns that were not asked for may come, if the schema has them, and may be wrong in nothing but their values."""
    schema = pa.schema([("id", pa.int64()), ("name", pa.string()), ("city", pa.string())])
    wide = pa.table({"city": ["Bern"], "id": [1], "name": ["Alice"]})
    table = desk.serve(SyncFunction(lambda keys: wide), {**cache, "lookup.columns": "name"}, schema)
    assert table.get(1) == [{"id": 1, "name": "Alice"}]
    narrow = desk.serve(
        SyncFunction(lambda keys: wide.drop_columns("city")), {**cache, "lookup.columns": "name"}, schema
    )
    assert narrow.get(1) == [{"id": 1, "name": "Alice"}]


@CACHES
def test_values_of_all_kinds(desk: Desk, cache: Options) -> None:
    """Nulls, nested values and values of every width come back as they were answered."""
    schema = pa.schema(
        [
            ("id", pa.int64()),
            ("amount", pa.decimal128(12, 3)),
            ("tags", pa.list_(pa.field("element", pa.struct([("k", pa.string()), ("v", pa.int32())])))),
            ("seen", pa.timestamp("us", "UTC")),
            ("share", pa.float32()),
            ("raw", pa.binary()),
        ]
    )
    moment = datetime.datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=datetime.timezone.utc)
    rows = [
        {"id": 1, "amount": decimal.Decimal("1.125"), "tags": [{"k": "a", "v": 1}, None], "seen": moment},
        {"id": 1, "amount": None, "tags": [], "seen": None, "share": math.inf, "raw": b"\0"},
        {"id": 2},
    ]
    answer = pa.Table.from_pylist(rows, schema)
    table = desk.serve(SyncFunction(lambda keys: answer), cache, schema)
    for _ in range(2):
        found = table.get_many(ids(1, 2))
        assert found.drop_columns([KEY_INDEX]).equals(answer)
        assert found.column(KEY_INDEX).to_pylist() == [0, 0, 1]


@pytest.mark.parametrize("columns", [SCHEMA, pa.schema([("id", pa.int64())])], ids=["chosen", "all there are"])
@CACHES
def test_key_columns_alone(desk: Desk, columns: pa.Schema, cache: Options) -> None:
    """A table of which only the keys are wanted says which of them are there."""
    function = SyncFunction(lambda keys: rows_of(USERS)(keys).select(columns.names))
    table = desk.serve(function, {**cache, "lookup.columns": "id"}, columns)
    for _ in range(2):
        assert table.get_many(ids(1, 3, 2)).to_pydict() == {"id": [1, 2, 2], KEY_INDEX: [0, 2, 2]}
