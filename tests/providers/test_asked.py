"""Tables of other systems: what a function is asked."""

from __future__ import annotations

import datetime
import decimal
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyarrow as pa
import pytest

from pyspark_lookup.providers.functions import LookupContext, LookupProvider
from tests.providers.common import (
    BOUND_S,
    CACHES,
    KINDS,
    USERS,
    AsyncByKey,
    ByKey,
    Desk,
    Function,
    Options,
    SyncFunction,
    beside,
    ids,
    made,
    names,
    pairs,
    provider,
    rows_of,
)


@KINDS
@CACHES
def test_keys_are_different_and_none_is_null(desk: Desk, kind: str, cache: Options) -> None:
    """However often keys come and with nulls among them, each is asked for once, and each place has its rows."""
    function = made(kind, rows_of(USERS))
    table = desk.serve(function, cache)
    assert pairs(table, 2, None, 1, 2, 3, None, 1) == [
        (0, "Bob"),
        (0, "Charlie"),
        (2, "Alice"),
        (3, "Bob"),
        (3, "Charlie"),
        (6, "Alice"),
    ]
    assert function.log.asked == [[1, 2, 3]]
    assert table.get(None) == []
    assert pairs(table, None, None) == []
    assert table.get_many(ids()).num_rows == 0
    assert function.log.asked == [[1, 2, 3]]


KEY_TYPES = [
    (pa.int32(), pa.array([7], pa.int8())),
    (pa.int64(), pa.array([7], pa.uint16())),
    (pa.string(), pa.array(["ä"], pa.large_string())),
    (pa.string(), pa.array(["ä"]).dictionary_encode()),
    (pa.large_string(), pa.array(["ä"])),
    (pa.binary(), pa.array([b"\0"], pa.large_binary())),
    (pa.bool_(), pa.array([False])),
    (pa.date32(), pa.array([datetime.date(2024, 2, 29)])),
    (pa.timestamp("us", "UTC"), pa.array([datetime.datetime(2024, 2, 29)], pa.timestamp("ms", "UTC"))),
    (pa.decimal128(10, 2), pa.array([decimal.Decimal("1.10")], pa.decimal128(5, 2))),
    (pa.float64(), pa.array([0.5], pa.float32())),
]


@pytest.mark.parametrize(("kind", "keys"), KEY_TYPES, ids=[f"{kind} {keys.type}" for kind, keys in KEY_TYPES])
@CACHES
def test_keys_have_the_tables_types(desk: Desk, kind: pa.DataType, keys: pa.Array, cache: Options) -> None:
    """In whatever type keys are given, a function gets columns named and typed as the table's."""
    schema = pa.schema([("code", kind), ("name", pa.string())])
    function = SyncFunction(lambda keys: keys.append_column("name", pa.array(["x"] * keys.num_rows)))
    table = desk.serve(function, {**cache, "lookup.keys": "code"}, schema)
    found = table.get_many(pa.table({"code": keys}))
    assert found.column("name").to_pylist() == ["x"]
    (asked,) = function.log.tables
    stored = pa.string() if kind == pa.large_string() else kind
    assert (asked.column_names, asked.schema.types) == (["code"], [stored])
    assert asked.column(0).to_pylist() == keys.cast(kind).to_pylist()


@pytest.mark.parametrize(("size", "calls"), [(1, 5), (2, 3), (5, 1), (100, 1)])
@KINDS
def test_batches(desk: Desk, kind: str, size: int, calls: int) -> None:
    """A call has `batch_size` keys at most; which rows belong to which key is not lost."""
    function = made(kind, rows_of({n: [f"n{n}"] for n in range(9)}), size)
    table = desk.serve(function)
    assert pairs(table, 5, 0, 8, 0, 3, 77) == [(0, "n5"), (1, "n0"), (2, "n8"), (3, "n0"), (4, "n3")]
    asked = function.log.asked
    assert [len(keys) for keys in asked] == [size] * (5 // size) + [5 % size] * (5 % size > 0)
    assert len(asked) == calls
    assert sorted(itertools.chain(*asked)) == [0, 3, 5, 8, 77]


def test_batches_by_default(desk: Desk) -> None:
    """Without a size of its own a function gets all keys in one call, an asynchronous one 128."""
    everyone = rows_of({n: ["x"] for n in range(300)})
    for kind, sizes in (("sync", [300]), ("async", [44, 128, 128])):
        function = made(kind, everyone)
        assert len(pairs(desk.serve(function), *range(300))) == 300
        assert sorted(len(keys) for keys in function.log.asked) == sizes


@KINDS
@CACHES
def test_a_function_is_opened_once(desk: Desk, kind: str, cache: Options) -> None:
    """Each process opens its function once, before the first lookup; nothing happens before one is needed."""
    functions: list[Function] = []

    def factory(context: LookupContext) -> LookupProvider:
        functions.append(made(kind, rows_of(USERS)))
        return provider(functions[-1])

    table = desk.table(factory, cache)
    assert functions[0].log.events == []
    table.get(None)
    table.describe()
    assert functions[0].log.events == []
    for key in (1, 2, 2, 4):
        table.get(key)
    assert [event for event, _ in functions[0].log.events][:2] == ["open", "lookup"]
    desk.restart()
    table.get(5)
    table.get(6)
    assert [function.log.opened for function in functions] == [1, 1]
    assert functions[1].log.events[0][0] == "open"


@KINDS
def test_one_thread(desk: Desk, kind: str) -> None:
    """However many threads ask, a function is used by one that is none of them, one lookup after the other."""
    running: list[int] = []
    overlaps: list[int] = []

    def answer(keys: pa.Table) -> pa.Table:
        running.append(1)
        overlaps.append(len(running))
        found = rows_of(USERS)(keys)
        running.pop()
        return found

    function = made(kind, answer)
    table = desk.serve(function)
    waits = [beside(lambda: [names(table, key) for key in (1, 2, 3, 1)]) for _ in range(4)]
    for wait in waits:
        assert wait(BOUND_S) == [["Alice"], ["Bob", "Charlie"], [], ["Alice"]]
    threads = {thread for _, thread in function.log.events}
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert len(function.log.loops) == (kind == "async")  # no loop is seen to run where none is needed
    assert set(overlaps) == {1}
    assert function.log.opened == 1


@pytest.mark.parametrize("make", [ByKey, AsyncByKey])
@CACHES
def test_one_key_at_a_time(desk: Desk, make: Callable[[], ByKey | AsyncByKey], cache: Options) -> None:
    """A function of single keys gets each as a dictionary; None and nothing both mean no rows."""
    function = make()
    table = desk.serve(function, cache)
    assert pairs(table, 3, 2, 1, 2) == [(1, "Bob"), (1, "Charlie"), (2, "Alice"), (3, "Bob"), (3, "Charlie")]
    assert sorted(function.asked, key=str) == [{"id": 1}, {"id": 2}, {"id": 3}]


def test_one_key_in_each_call(desk: Desk) -> None:
    """Without a size of its own an asynchronous function of single keys has one key in a call."""
    sizes: list[int] = []

    class Counting(AsyncByKey):
        async def lookup(self, keys: pa.Table) -> pa.Table:
            sizes.append(keys.num_rows)
            return await super().lookup(keys)

    desk.serve(Counting()).get_many(ids(1, 2, 3))
    assert sizes == [1, 1, 1]


def test_a_column_that_a_dictionary_lacks_is_null(desk: Desk) -> None:
    """The schema of a function of single keys says which columns its rows have."""

    class Nameless(ByKey):
        def lookup_key(self, key: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
            return [key]

    assert desk.serve(Nameless()).get(1) == [{"id": 1, "name": None}]
