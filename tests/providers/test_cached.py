"""Tables of other systems: rows by key, cached."""

from __future__ import annotations

import decimal
import itertools
from collections.abc import Callable

import pyarrow as pa
import pytest

from pyspark_lookup.base.errors import LookupFunctionError, PredicateError, SchemaError
from pyspark_lookup.base.metrics import UNSET
from pyspark_lookup.providers.functions import LookupContext, LookupProvider
from tests.providers.common import (
    BOUND_S,
    CACHES,
    PARTIAL,
    USERS,
    Answer,
    AsyncByKey,
    AsyncFunction,
    ByKey,
    Desk,
    Function,
    Options,
    SyncFunction,
    beside,
    counted,
    names,
    provider,
    raises,
    rows_of,
)


@pytest.mark.parametrize("make", [ByKey, AsyncByKey])
def test_caching(desk: Desk, make: Callable[[], ByKey | AsyncByKey]) -> None:
    """Keys with one row, with two and with none are looked up once each; the second time all are hits."""
    function = make()
    table = desk.serve(function, PARTIAL)
    expected = [["Alice"], ["Bob", "Charlie"], []]
    assert [names(table, key) for key in (1, 2, 3)] == expected
    assert counted(table) == {"missCount": 3, "loadCount": 3}
    assert [names(table, key) for key in (1, 2, 3)] == expected
    assert len(function.asked) == 3
    assert counted(table) == {"hitCount": 3, "missCount": 3, "loadCount": 3}
    assert table.metrics()["numCachedRecords"] == 1 + 2 + 1


@pytest.mark.parametrize("make", [SyncFunction, AsyncFunction])
@pytest.mark.parametrize("users", [5, 3])
def test_sharing_among_parallel_readers(desk: Desk, make: Callable[[Answer], Function], users: int) -> None:
    """Readers of several shares of the ids 1 to 6 fill one cache: the users that there are, and that the others are not."""
    julian = {1: "Julian", 2: "Jark", 3: "Fabian", 4: "Hello world", 5: "Hello world"}
    function = make(rows_of({key: [name] for key, name in julian.items() if key <= users}))
    name = desk.name(lambda context: provider(function))
    tables = [desk.table(name, {**PARTIAL, "lookup.partial-cache.max-rows": 999_999_999}) for _ in range(4)]
    waits = [
        beside(lambda table=table, n=n: [names(table, key) for key in range(1 + n % 2, 7, 2)])  # type: ignore[misc]
        for n, table in enumerate(tables)
    ]
    found = [wait(BOUND_S) for wait in waits]
    for n, lists in enumerate(found):
        assert lists == [[julian[key]] if key <= users else [] for key in range(1 + n % 2, 7, 2)]
    assert sorted(itertools.chain(*function.log.asked)) == [1, 2, 3, 4, 5, 6]
    assert counted(tables[0]) == {"hitCount": 6, "missCount": 6, "loadCount": 6}
    assert tables[3].metrics()["numCachedRecords"] == 6


def test_gauges_are_set_by_the_first_load(desk: Desk) -> None:
    """Before the first lookup no gauge is set; the time of the latest load is that of the lookup, whatever it found."""
    function = SyncFunction(rows_of(USERS))
    table = desk.serve(function, PARTIAL)
    before = table.metrics()
    assert {before[name] for name in ("latestLoadTime", "numCachedRecords", "numCachedBytes")} == {UNSET}
    held = function.answer
    function.answer = lambda keys: (desk.clock.tick(0.25), held(keys))[1]
    table.get(3)
    after = table.metrics()
    assert (after["latestLoadTime"], after["numCachedRecords"]) == (250, 1)
    assert after["numCachedBytes"] > 0
    function.answer = raises(OSError())
    with pytest.raises(LookupFunctionError):
        table.get(1)
    assert table.metrics()["latestLoadTime"] == 250


def test_absences_are_not_kept_on_request(desk: Desk) -> None:
    """With cache-missing-key=false a key without rows is looked up each time, a new row is seen at once."""
    held = {1: ["Alice"]}
    function = SyncFunction(rows_of(held))
    table = desk.serve(function, {**PARTIAL, "lookup.partial-cache.cache-missing-key": False})
    assert (table.get(3), table.get(3)) == ([], [])
    held[3] = ["Dora"]
    assert (names(table, 3), names(table, 3)) == (["Dora"], ["Dora"])
    assert function.log.asked == [[3]] * 3
    assert counted(table) == {"hitCount": 1, "missCount": 3, "loadCount": 3}


def test_an_answer_is_as_old_as_it_may_be(desk: Desk) -> None:
    """Without versions a row is answered until it is as old as expire-after-write says, counted from before it was asked for."""
    held = {1: ["Alice"]}

    def slow(keys: pa.Table) -> pa.Table:
        found = rows_of(held)(keys)
        desk.clock.tick(10)
        return found

    function = SyncFunction(slow)
    table = desk.serve(function, PARTIAL)
    assert names(table, 1) == ["Alice"]
    held[1] = ["Alicia"]
    desk.clock.tick(3589)
    assert names(table, 1) == ["Alice"]
    desk.clock.tick(1)
    assert names(table, 1) == ["Alicia"]
    assert len(function.log.asked) == 2


def test_a_new_version_is_seen_by_the_next_lookup(desk: Desk) -> None:
    """Everything is asked for again when the version is another, absences too; an older version that comes back is itself."""
    version, held = ["1"], {1: ["Alice"]}
    asked: list[str] = []

    def ask() -> str:
        asked.append(version[0])
        return version[0]

    function = SyncFunction(rows_of(held))
    table = desk.serve(function, {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": 100}, version=ask)
    assert (names(table, 1), table.get(3)) == (["Alice"], [])
    held.update({1: ["Alicia"], 3: ["Dora"]})
    assert (names(table, 1), table.get(3)) == (["Alice"], [])  # as long as the provider says that nothing changed
    version[0] = "2"
    assert (names(table, 1), names(table, 3)) == (["Alicia"], ["Dora"])
    assert function.log.asked == [[1], [3]] * 2
    assert asked == ["1"] * 4 + ["2"] * 2  # once per query
    desk.clock.tick(10**6)
    assert names(table, 1) == ["Alicia"]  # no time makes it old
    assert counted(table) == {"hitCount": 3, "missCount": 4, "loadCount": 4}


def test_a_host_may_say_which_version_is_current(desk: Desk) -> None:
    """With lookup.metadata.source=CACHE the version is asked for once per interval."""
    version = ["1"]
    asked: list[str] = []

    def ask() -> str:
        asked.append(version[0])
        return version[0]

    options = {
        "lookup.cache": "PARTIAL",
        "lookup.partial-cache.max-rows": 100,
        "lookup.metadata.source": "CACHE",
        "lookup.metadata.sync-interval": "5 min",
    }
    held = {1: ["Alice"]}
    table = desk.serve(SyncFunction(rows_of(held)), options, version=ask)
    assert names(table, 1) == ["Alice"]
    version[0], held[1] = "2", ["Alicia"]
    desk.clock.tick(300)
    assert names(table, 1) == ["Alice"]
    desk.clock.tick(1)
    assert names(table, 1) == ["Alicia"]
    assert asked == ["1", "2"]


def test_rows_that_the_predicate_leaves_out(desk: Desk) -> None:
    """`lookup.where` holds for the answer whatever the provider fetches; a key whose rows fail it is held, and has none."""
    function = SyncFunction(rows_of(USERS))
    table = desk.serve(function, {**PARTIAL, "lookup.where": "name <> 'Bob' AND name LIKE 'C%'"})
    assert [names(table, key) for key in (1, 2, 1, 2)] == [[], ["Charlie"]] * 2
    assert function.log.asked == [[1], [2]]


PREDICATES = [
    ("comment = 'v1'", [1]),
    ("dec = 100.1011", [1]),
    ("re = 2.5", [2, 3]),
    ("do = 1.1", [1, 2]),
    ("re = 2.5 AND do = 1.1", [2]),
    ("dec = 100.2022 OR do = 1.1", [1, 2]),
    ("comment IS NULL", [3]),
]


@pytest.mark.parametrize(("where", "numbers"), PREDICATES)
@CACHES
def test_predicates(desk: Desk, where: str, numbers: list[int], cache: Options) -> None:
    """Of the rows of a key those come that fulfil the predicate, on columns of any kind, nulls included."""
    schema = pa.schema(
        [
            ("id", pa.int64()),
            ("n", pa.int64()),
            ("comment", pa.string()),
            ("dec", pa.decimal128(10, 4)),
            ("re", pa.float32()),
            ("do", pa.float64()),
        ]
    )
    values = [(1, "v1", "100.1011", 1.5, 1.1), (2, "v2", "100.2022", 2.5, 1.1), (3, None, "100.3033", 2.5, 2.2)]
    rows = [
        {"id": 1, "n": n, "comment": comment, "dec": decimal.Decimal(dec), "re": re, "do": do}
        for n, comment, dec, re, do in values
    ]
    answer = pa.Table.from_pylist(rows, schema)
    table = desk.serve(SyncFunction(lambda keys: answer), {**cache, "lookup.where": where}, schema)
    for _ in range(2):
        assert [row["n"] for row in table.get(1)] == numbers


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"lookup.keys": "zip"}, SchemaError, "lookup.keys: the table has no column 'zip'; it has id, name"),
        ({"lookup.columns": "zip"}, SchemaError, "lookup.columns: the table has no column 'zip'; it has id, name"),
        ({"lookup.where": "zip = 1"}, PredicateError, "no column 'zip'"),
        ({"lookup.where": "zip = 1", "lookup.columns": "name"}, PredicateError, "no column 'zip'"),
        ({"lookup.where": "name > 1"}, PredicateError, "name"),
    ],
    ids=str,
)
def test_columns_that_are_not_there(desk: Desk, options: Options, kind: type[Exception], says: str) -> None:
    """Options that name other columns than the provider's are refused at the first query, before the function is asked."""
    function = SyncFunction(rows_of(USERS))
    with pytest.raises(kind, match=says):
        desk.serve(function, options).get(1)
    assert function.log.events == []


@CACHES
def test_a_factory_is_told_of_the_predicates_columns(desk: Desk, cache: Options) -> None:
    """Who brings the keys and the columns that it was told brings enough for the predicate, too."""
    schema = pa.schema([("id", pa.int64()), ("name", pa.string()), ("flag", pa.bool_()), ("rest", pa.int64())])
    everything = pa.Table.from_pylist(
        [{"id": 1, "name": "Alice", "flag": True}, {"id": 1, "name": "Alicia", "flag": False}], schema
    )

    def factory(context: LookupContext) -> LookupProvider:
        wanted = [*context.keys, *(schema.names if context.columns is None else context.columns)]
        return provider(SyncFunction(lambda keys: everything.select(wanted)), schema)

    table = desk.table(factory, {**cache, "lookup.columns": "name", "lookup.where": "flag = true"})
    assert table.get(1) == [{"id": 1, "name": "Alice"}]
    assert table.get(1) == [{"id": 1, "name": "Alice"}]
