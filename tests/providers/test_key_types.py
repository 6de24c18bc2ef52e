"""Tables of other systems: keys of other kinds."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pyarrow as pa
import pytest

from pyspark_lookup.base.errors import LookupFunctionError, SchemaError
from pyspark_lookup.cache.memory import KEY_INDEX
from tests.providers.common import (
    CACHES,
    KINDS,
    ONCE,
    USERS,
    Desk,
    Options,
    SyncFunction,
    counted,
    made,
    names,
    pairs,
    rows_of,
)


@KINDS
@CACHES
def test_composite_keys(desk: Desk, kind: str, cache: Options) -> None:
    """Keys of several columns, in any order and with a null in any of them, are one key each."""
    schema = pa.schema([("name", pa.string()), ("city", pa.string()), ("id", pa.int64())])
    rows = [
        {"name": "Alice", "city": "Bern", "id": 1},
        {"name": None, "city": "Rome", "id": 1},
        {"name": "Bob", "city": "Bern", "id": 2},
    ]

    def answer(keys: pa.Table) -> pa.Table:
        wanted = {(key["id"], key["city"]) for key in keys.to_pylist()}
        return pa.Table.from_pylist([row for row in rows if (row["id"], row["city"]) in wanted], schema)

    function = made(kind, answer)
    table = desk.serve(function, {**cache, "lookup.keys": "id,city"}, schema)
    asked = pa.table({"city": ["Bern", "Rome", None, "Bern", "Bern"], "id": [1, 1, 1, None, 1]})
    found = table.get_many(asked)
    assert found.column_names == ["id", "city", "name", KEY_INDEX]
    assert found.column("name").to_pylist() == ["Alice", None, "Alice"]
    assert found.column(KEY_INDEX).to_pylist() == [0, 1, 4]
    assert function.log.asked == [[(1, "Bern"), (1, "Rome")]]
    assert function.log.tables[0].schema.equals(pa.schema([("id", pa.int64()), ("city", pa.string())]))
    assert table.get((2, "Bern")) == [{"id": 2, "city": "Bern", "name": "Bob"}]
    assert table.get({"city": "Bern", "id": 2}) == [{"id": 2, "city": "Bern", "name": "Bob"}]
    assert table.get((2, None)) == []
    if cache:
        assert counted(table) == {"hitCount": 2, "missCount": 3, "loadCount": 3}
    wrong = desk.serve(
        SyncFunction(lambda keys: pa.Table.from_pylist(rows, schema)), {**ONCE, "lookup.keys": "id,city"}, schema
    )
    with pytest.raises(
        LookupFunctionError, match=r"id = 1, city = 'Rome', which is not among key id = 1, city = 'Bern'$"
    ):
        wrong.get((1, "Bern"))


@CACHES
def test_text_keys(desk: Desk, cache: Options) -> None:
    """Texts are compared byte by byte: case, spaces, NULs and composed letters make other keys; the empty text is one."""
    keys = ["a", "A", "a ", "", "a\0", "\u00e9", "e\u0301", "x" * 5000]
    schema = pa.schema([("id", pa.string()), ("n", pa.int64())])
    held = {key: n for n, key in enumerate(keys)}

    def answer(asked: pa.Table) -> pa.Table:
        found = [key for key in asked.column("id").to_pylist() if key in held]
        return pa.table({"id": found, "n": [held[key] for key in found]})

    function = SyncFunction(answer, 3)
    table = desk.serve(function, cache, schema)
    for _ in range(2):
        found = table.get_many(pa.table({"id": [*keys, "b", keys[0]]}))
        assert found.column("n").to_pylist() == [*range(len(keys)), 0]
    assert sorted(itertools.chain(*function.log.asked[:3])) == sorted([*keys, "b"])


@KINDS
@CACHES
def test_float_keys(desk: Desk, kind: str, cache: Options) -> None:
    """NaN is a key, asked for once whatever its bits; -0.0 is 0.0, and rows with either answer it, each as it was given."""
    schema = pa.schema([("id", pa.float64()), ("n", pa.int64())])
    answer = pa.table({"id": [-0.0, math.nan, 0.0, 1.5], "n": [0, 1, 2, 3]})

    def among(keys: pa.Table) -> pa.Table:
        wanted = keys.column("id").to_pylist()
        mask = [
            any(key == value or (math.isnan(key) and math.isnan(value)) for key in wanted)
            for value in answer["id"].to_pylist()
        ]
        return answer.filter(pa.array(mask))

    function = made(kind, among)
    table = desk.serve(function, cache, schema)
    other_nan = np.frombuffer(np.uint64(0xFFF8000000000001).tobytes(), np.float64)[0]
    asked = pa.table({"id": pa.array([math.nan, 0.0, -0.0, other_nan, 1.5], pa.float64())})
    for _ in range(2):
        found = table.get_many(asked)
        assert found.column(KEY_INDEX).to_pylist() == [0, 1, 1, 2, 2, 3, 4]
        assert found.column("n").to_pylist() == [1, 0, 2, 0, 2, 1, 3]
        zeros = found.column("id").to_pylist()[1:3]
        assert [math.copysign(1, zero) for zero in zeros] == [-1, 1]
    assert [len(keys) for keys in function.log.asked] == ([3] if cache else [3, 3])
    if cache:
        assert counted(table) == {"hitCount": 7, "missCount": 3, "loadCount": 3}


def test_keys_that_the_column_cannot_hold(desk: Desk) -> None:
    """A number too large for the key column is nobody's key, and is not asked for."""
    function = SyncFunction(lambda keys: keys.append_column("name", pa.array(["x"] * keys.num_rows)))
    table = desk.serve(function, schema=pa.schema([("id", pa.int32()), ("name", pa.string())]))
    assert pairs(table, 2**40, 7) == [(1, "x")]
    assert function.log.asked == [[7]]
    with pytest.raises(SchemaError):
        table.get_many(pa.table({"id": ["seven"]}))


def test_a_column_that_is_named_as_the_index(desk: Desk) -> None:
    """The answer has a column of that name itself: the table's is refused, unless it is left out."""
    schema = pa.schema([("id", pa.int64()), ("name", pa.string()), (KEY_INDEX, pa.int64())])
    function = SyncFunction(rows_of(USERS))
    with pytest.raises(SchemaError, match=r"leave it out by lookup.columns"):
        desk.serve(function, schema=schema).get(1)
    assert names(desk.serve(function, {"lookup.columns": "name"}, schema), 1) == ["Alice"]
