"""Tables of other systems: scans of tables that are asked by key."""

from __future__ import annotations

import pyarrow as pa
import pytest

from pyspark_lookup.base.errors import LookupFunctionError, OptionError
from pyspark_lookup.providers.functions import LookupContext, LookupProvider
from tests.providers.common import (
    CACHES,
    KINDS,
    ONCE,
    PARTIAL,
    SCHEMA,
    USERS,
    Desk,
    Options,
    SyncFunction,
    counted,
    made,
    names,
    provider,
    raises,
    rows_of,
)


@CACHES
def test_a_scan_needs_keys(desk: Desk, cache: Options) -> None:
    """A table that gives rows by key only cannot be scanned unless it is said for which keys, and the error says how."""
    function = SyncFunction(rows_of(USERS))
    for where in (None, "id > 1", "id = 1 OR name = 'x'", "name = 'Bob'", "id BETWEEN 1 AND 2", "NOT id = 1"):
        table = desk.serve(function, {**cache, **({"lookup.where": where} if where else {})})
        with pytest.raises(OptionError, match=r"gives rows by key only; say which in lookup.where .*IN \(1, 2\)"):
            table.scan()
    assert function.log.events == []


@pytest.mark.parametrize(
    ("where", "asked", "found"),
    [
        ("id IN (1, 2)", [[1, 2]], {"Alice", "Bob", "Charlie"}),
        ("id = 2", [[2]], {"Bob", "Charlie"}),
        ("2 = id", [[2]], {"Bob", "Charlie"}),
        ("id IN (2, 2, 3, 2)", [[2, 3]], {"Bob", "Charlie"}),
        ("id IN (1, 2) AND name LIKE 'C%'", [[1, 2]], {"Charlie"}),
        ("id IN (1, 2) AND id = 2", [[2]], {"Bob", "Charlie"}),
        ("id IN (3, 4)", [[3, 4]], set()),
        ("id IN (2, 99999999999999999999)", [[2]], {"Bob", "Charlie"}),
    ],
)
@KINDS
@CACHES
def test_a_scan_for_some_keys(
    desk: Desk, kind: str, where: str, asked: list[list[int]], found: set[str], cache: Options
) -> None:
    """A predicate that fixes the keys makes a scan a lookup: those keys are asked for, once, and no others."""
    function = made(kind, rows_of(USERS))
    table = desk.serve(function, {**cache, "lookup.where": where})
    for _ in range(2):
        rows = table.scan()
        assert set(rows.column("name").to_pylist()) == found
        assert rows.schema.equals(SCHEMA)
    assert function.log.asked == (asked if cache else asked * 2)


def test_a_scan_says_its_keys_itself(desk: Desk) -> None:
    """The predicate of a scan will do as well, beside the columns that it wants; what it brought, a lookup finds."""
    function = SyncFunction(rows_of(USERS))
    table = desk.serve(function, PARTIAL)
    assert sorted(table.scan(["name"], "id IN (1, 2)").column("name").to_pylist()) == ["Alice", "Bob", "Charlie"]
    assert names(table, 2) == ["Bob", "Charlie"]
    assert function.log.asked == [[1, 2]]


@CACHES
def test_a_scan_for_composite_keys(desk: Desk, cache: Options) -> None:
    """All key columns must be fixed; then every combination is asked for."""
    schema = pa.schema([("id", pa.int64()), ("name", pa.string()), ("n", pa.int64())])
    row = {"id": 1, "name": "x", "n": 5}
    function = SyncFunction(lambda keys: pa.Table.from_pylist([row], schema))
    options = {**cache, "lookup.keys": "id,name"}
    table = desk.serve(function, {**options, "lookup.where": "id = 1 AND name = 'x'"}, schema)
    assert table.scan().to_pylist() == [row]
    assert desk.serve(function, options, schema).scan(None, "name IN ('x', 'y') AND id IN (1, 2)").to_pylist() == [row]
    assert function.log.asked == [[(1, "x")], [(1, "x"), (1, "y"), (2, "x"), (2, "y")]]
    with pytest.raises(OptionError, match="rows by key only"):
        desk.serve(function, {**options, "lookup.where": "id = 1"}, schema).scan()


def test_columns_beyond_those_that_are_kept(desk: Desk) -> None:
    """A scan by key for a column that lookup.columns leaves out asks the provider each time; keys are counted as ever."""
    schema = pa.schema([*SCHEMA, ("city", pa.string())])
    function = SyncFunction(lambda keys: pa.table({"id": [1], "name": ["Alice"], "city": ["Bern"]}))
    table = desk.serve(function, {**PARTIAL, **ONCE, "lookup.columns": "name"}, schema)
    for _ in range(2):
        assert table.scan(["city"], "id = 1").to_pylist() == [{"city": "Bern"}]
    assert counted(table) == {"missCount": 2, "loadCount": 2}
    function.answer = raises(OSError())
    with pytest.raises(LookupFunctionError):
        table.scan(["city"], "id = 1")
    assert counted(table) == {"missCount": 3, "loadCount": 2, "numLoadFailures": 1}


@CACHES
def test_columns_reach_the_provider(desk: Desk, cache: Options) -> None:
    """A factory is told which columns are wanted, and need bring no others."""
    schema = pa.schema([("id", pa.int64()), ("name", pa.string()), ("blob", pa.binary())])
    contexts: list[LookupContext] = []

    def factory(context: LookupContext) -> LookupProvider:
        contexts.append(context)
        return provider(SyncFunction(rows_of(USERS)), schema)

    table = desk.table(factory, {**cache, "lookup.columns": "name", "lookup.where": "id IN (1)"})
    assert table.scan().to_pylist() == [{"name": "Alice"}]
    assert table.get(1) == [{"id": 1, "name": "Alice"}]
    assert contexts[-1].columns == ("name",)
    with pytest.raises(LookupFunctionError, match="column 'blob' is missing"):
        table.scan(["blob"])
