"""Tables of other systems: what a lookup function is asked, what of its answers is taken, and what its failures do.

A test writes its provider as it goes (`Desk`), time stands still but for the timeouts of calls, and a
function that hangs waits for an event which is set at the end of its test.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import dataclasses
import datetime
import decimal
import gc
import itertools
import math
import multiprocessing
import os
import pickle
import random
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pyspark_lookup.runtime
from pyspark_lookup.api import LookupTable
from pyspark_lookup.cache import KEY_INDEX, CachedRows, DefaultLookupCache, LookupCache
from pyspark_lookup.clock import HostClock
from pyspark_lookup.errors import (
    LookupFunctionError,
    LookupTimeoutError,
    OptionError,
    PredicateError,
    PysparkLookupError,
    ReloadFailedError,
    SchemaError,
)
from pyspark_lookup.functions import (
    AsyncKeyLookupFunction,
    AsyncLookupFunction,
    AsyncLookupFunctionProvider,
    FullCachingLookupProvider,
    KeyLookupFunction,
    LookupContext,
    LookupFunction,
    LookupFunctionProvider,
    LookupProvider,
    PartialCachingAsyncLookupProvider,
    PartialCachingLookupProvider,
)
from pyspark_lookup.metrics import UNSET, CacheMetricGroup
from pyspark_lookup.options import LookupOptions
from pyspark_lookup.provided import ProvidedTable
from pyspark_lookup.provided import table as provided_table
from pyspark_lookup.reload import CacheReloadTrigger
from pyspark_lookup.runtime import Runtime, runtime
from pyspark_lookup.snapshot import full
from tests.fakes import FakeClock

Answer = Callable[[pa.Table], Any]
Options = Mapping[str, Any]

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
USERS = {1: ["Alice"], 2: ["Bob", "Charlie"]}  # 3 is nobody
BOUND_S = 20.0  # nothing takes this long unless it hangs

NONE: Options = {}
PARTIAL: Options = {"lookup.cache": "PARTIAL", "lookup.partial-cache.expire-after-write": "1 h"}
CACHES = pytest.mark.parametrize("cache", [NONE, PARTIAL], ids=["NONE", "PARTIAL"])
KINDS = pytest.mark.parametrize("kind", ["sync", "async"])
ONCE: Options = {"lookup.max-retries": 0}
QUICK: Options = {"lookup.max-retries": 0, "lookup.async.timeout": "600 ms"}
RETRY: Options = {
    "lookup.retry.predicate": "lookup_miss",
    "lookup.retry.fixed-delay": "7 s",
    "lookup.retry.max-attempts": 3,
}
FLIP = ("hitCount", "missCount", "loadCount", "numLoadFailures")


# --- functions ------------------------------------------------------------------------------------


class Log:
    """What happened to a function: (what, thread), and the keys of each lookup."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.tables: list[pa.Table] = []
        self.loops: set[int] = set()

    def add(self, event: str, keys: pa.Table | None = None) -> None:
        self.events.append((event, threading.get_ident()))
        if keys is not None:
            self.tables.append(keys)
        with contextlib.suppress(RuntimeError):
            self.loops.add(id(asyncio.get_running_loop()))

    @property
    def asked(self) -> list[list[Any]]:
        """The keys of each lookup: values of a single key column, sorted, or tuples of several."""
        lists = [list(zip(*(column.to_pylist() for column in keys.columns), strict=True)) for keys in self.tables]
        return [sorted(key if len(key) > 1 else key[0] for key in keys) for keys in lists]

    @property
    def opened(self) -> int:
        return sum(event == "open" for event, _ in self.events)


class SyncFunction(LookupFunction):
    """Answers as it is told."""

    def __init__(self, answer: Answer, batch_size: int | None = None) -> None:
        self.answer, self.batch_size = answer, batch_size
        self.log = Log()

    def open(self) -> None:
        self.log.add("open")

    def lookup(self, keys: pa.Table) -> pa.Table:
        self.log.add("lookup", keys)
        return self.answer(keys)

    def close(self) -> None:
        self.log.add("close")


class AsyncFunction(AsyncLookupFunction):
    """Answers as it is told, after others had their turn; what it is told may be awaitable."""

    def __init__(self, answer: Answer, batch_size: int | None = None) -> None:
        self.answer, self.batch_size = answer, batch_size or AsyncLookupFunction.batch_size
        self.log = Log()

    async def open(self) -> None:
        self.log.add("open")
        await asyncio.sleep(0)

    async def lookup(self, keys: pa.Table) -> pa.Table:
        self.log.add("lookup", keys)
        await asyncio.sleep(0)
        answer = self.answer(keys)
        return await answer if asyncio.iscoroutine(answer) else answer

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.log.add("close")


Function = SyncFunction | AsyncFunction


def made(kind: str, answer: Answer, batch_size: int | None = None) -> Function:
    """A function of this kind."""
    return (SyncFunction if kind == "sync" else AsyncFunction)(answer, batch_size)


def provider(
    function: Any,
    schema: pa.Schema = SCHEMA,
    version: Callable[[], str] | None = None,
    cache: LookupCache | None = None,
) -> LookupProvider:
    """The provider that serves this function, behind a cache of its own if there is one."""
    asynchronous = isinstance(function, AsyncLookupFunction)
    if cache is not None:
        return (PartialCachingAsyncLookupProvider if asynchronous else PartialCachingLookupProvider)(
            function, cache, schema, version
        )
    return (AsyncLookupFunctionProvider if asynchronous else LookupFunctionProvider)(function, schema, version)


def rows_of(held: Mapping[int, Sequence[str]]) -> Answer:
    """Answers with the names of those ids that are there."""

    def answer(keys: pa.Table) -> pa.Table:
        found = [(key, name) for key in keys.column("id").to_pylist() for name in held.get(key, ())]
        return pa.table({"id": [key for key, _ in found], "name": [name for _, name in found]}, schema=SCHEMA)

    return answer


def raises(problem: BaseException) -> Answer:
    """Never answers."""

    def answer(keys: pa.Table) -> pa.Table:
        raise problem

    return answer


def in_turn(*answers: Answer) -> Answer:
    """Answers by one after the other, by the last one from then on."""
    left = list(answers)

    def answer(keys: pa.Table) -> Any:
        return (left.pop(0) if len(left) > 1 else left[0])(keys)

    return answer


def in_order(calls: list[Callable[[], Any]]) -> Any:
    """What the first of some calls returns; the next one is the next time's."""
    return calls.pop(0)()


# --- tables ---------------------------------------------------------------------------------------


class Desk:
    """Tables of the providers that a test writes, in a process of a host whose clock is `clock`."""

    def __init__(self, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = FakeClock(time.time())  # or what the host has would look old enough to be swept
        self.cache_dir = cache_dir
        self._monkeypatch = monkeypatch
        self._tables: list[tuple[Runtime, LookupTable]] = []
        self._names = itertools.count(1)
        self._processes: list[Runtime] = []
        self._threads = threading.enumerate()
        self.gives_up = False
        self.restart()

    def restart(self, clock: HostClock | None = None) -> None:
        """Go on as another process of this host; tables made before answer there, too."""
        self._processes.append(Runtime(clock or self.clock.host(), random.Random(1)))
        self._be(self._processes[-1])

    def _be(self, process: Runtime) -> None:
        self._monkeypatch.setattr(pyspark_lookup.runtime, "_current", process)

    def name(self, factory: Any) -> str:
        """What `lookup.provider` calls this factory."""
        module = types.ModuleType(f"provider_{next(self._names)}")
        module.make = factory  # type: ignore[attr-defined]
        self._monkeypatch.setitem(sys.modules, module.__name__, module)
        return f"{module.__name__}:make"

    def table(self, factory: Any, options: Options = NONE, path: str | None = None) -> LookupTable:
        """The table of a factory, or of one with that name."""
        name = factory if isinstance(factory, str) else self.name(factory)
        fixed = {"lookup.provider": name, "lookup.keys": "id", "lookup.cache.dir": str(self.cache_dir)}
        table = LookupTable(path, {**fixed, **options})
        self._tables.append((runtime(), table))
        return table

    def serve(
        self,
        function: Any,
        options: Options = NONE,
        schema: pa.Schema = SCHEMA,
        version: Callable[[], str] | None = None,
        cache: LookupCache | None = None,
    ) -> LookupTable:
        """The table of one function."""
        return self.table(lambda context: provider(function, schema, version, cache), options)

    def abandon(self) -> None:
        """Leave all processes so far as they are: one of their locks may be held for ever."""
        self._tables.clear()
        self._processes.clear()
        self.restart()

    def close(self) -> None:
        """End what has begun: close the tables, and the functions of those that another process has taken over."""
        for process, table in self._tables:
            self._be(process)
            with contextlib.suppress(PysparkLookupError):
                table.close()
        for provided in itertools.chain(*(process._provided.values() for process in self._processes)):
            provided.close()
        if self.gives_up:
            for thread in set(threading.enumerate()) - set(self._threads):
                if thread.name.startswith(("lookupcache-provider-", "lookupcache-version-")):
                    thread.join(1.0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                gc.collect()  # coroutines that were given up complain here, and not in another test


@pytest.fixture
def desk(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """A host on which nobody has looked anything up."""
    desk = Desk(cache_dir, monkeypatch)
    yield desk
    desk.close()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What hanging calls wait for: set at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def prompt(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are given up soon after their timeout, and what that leaves behind is gone when the test is over."""
    monkeypatch.setattr(provided_table, "_GRACE_S", 0.1)
    desk.gives_up = True


def counted(table: LookupTable, *names: str) -> dict[str, int]:
    """The FLIP's counters and those of these names, but for the zeros."""
    metrics = table.metrics()
    return {name: metrics[name] for name in (*FLIP, *names) if metrics[name]}


def ids(*values: int | None) -> pa.Table:
    """A batch of keys."""
    return pa.table({"id": pa.array(list(values), pa.int64())})


def pairs(table: LookupTable, *values: int | None) -> list[tuple[int, str]]:
    """(place of the key, name) of all rows with any of these ids."""
    found = table.get_many(ids(*values))
    return list(zip(found.column(KEY_INDEX).to_pylist(), found.column("name").to_pylist(), strict=True))


def names(table: LookupTable, key: Any) -> list[str]:
    """The names of the rows with this key."""
    return [row["name"] for row in table.get(key)]


def beside(call: Callable[[], Any]) -> Callable[[float], Any]:
    """Run a call in a thread; returns what waits for its result, and fails the test if there is none in time."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as problem:
            results.append(problem)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result(seconds: float = BOUND_S) -> Any:
        thread.join(seconds)
        assert results, "the call hangs"
        return results[0]

    return result


# --- what a function is asked ---------------------------------------------------------------------


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


class ByKey(KeyLookupFunction):
    """Users one at a time."""

    schema = SCHEMA

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def lookup_key(self, key: Mapping[str, Any]) -> Iterable[Mapping[str, Any]] | None:
        self.asked.append(dict(key))
        known = USERS.get(key["id"])
        return None if known is None else ({**key, "name": name} for name in known)


class AsyncByKey(AsyncKeyLookupFunction):
    """Users one at a time, each after up to 10 ms."""

    schema = SCHEMA

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.rng = random.Random(5)

    async def lookup_key(self, key: Mapping[str, Any]) -> Iterable[Mapping[str, Any]] | None:
        self.asked.append(dict(key))
        await asyncio.sleep(self.rng.random() / 100)
        return [{**key, "name": name} for name in USERS.get(key["id"], ())]


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


# --- what of an answer is taken -------------------------------------------------------------------


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


# --- answers that are not taken -------------------------------------------------------------------

UNASKED = "which is not among"
BAD: dict[str, tuple[Answer, str]] = {
    "raises": (raises(ValueError("no route to host")), r"ValueError\('no route to host'\)"),
    "raises a timeout of its own": (raises(TimeoutError("theirs")), r"TimeoutError\('theirs'\)"),
    "raises the end of an iteration": (raises(StopIteration()), "StopIteration"),
    "raises one of our errors": (raises(OptionError("theirs")), r"OptionError\('theirs'\)"),
    "is cancelled": (raises(asyncio.CancelledError()), "CancelledError"),
    "None": (lambda keys: None, "returned NoneType"),
    "a list": (lambda keys: [{"id": 1, "name": "x"}], "returned list"),
    "an array": (lambda keys: keys.column("id"), "returned ChunkedArray"),
    "no columns": (lambda keys: pa.table({}), "column 'id' is missing"),
    "no key column": (
        lambda keys: pa.table({"name": ["x"]}),
        "column 'id' is missing; it returned name, its schema has id, name",
    ),
    "a column less": (lambda keys: pa.table({"id": [1]}), "column 'name' is missing"),
    "a column less without rows": (lambda keys: pa.table({"id": pa.array([], pa.int64())}), "column 'name' is missing"),
    "another spelling": (lambda keys: pa.table({"ID": [1], "name": ["x"]}), "column 'id' is missing"),
    "an unknown column": (
        lambda keys: pa.table({"id": [1], "name": ["x"], "zip": [1]}),
        "column 'zip' is not in its schema",
    ),
    "the key column twice": (
        lambda keys: pa.Table.from_arrays([pa.array([1]), pa.array([1]), pa.array(["x"])], ["id", "id", "name"]),
        "column 'id' .* there twice",
    ),
    "another type": (lambda keys: pa.table({"id": [1], "name": [5]}), "column 'name' is int64, its schema says string"),
    "another type of key": (
        lambda keys: pa.table({"id": ["1"], "name": ["x"]}),
        "column 'id' is string, its schema says int64",
    ),
    "a wider type": (
        lambda keys: pa.table({"id": pa.array([1.0]), "name": ["x"]}),
        "column 'id' is double, its schema says int64",
    ),
    "another type, in part null": (lambda keys: pa.table({"id": [1, 1], "name": [5, None]}), "column 'name' is int64"),
    "a key that nobody asked for": (lambda keys: pa.table({"id": [1, 77], "name": ["x", "y"]}), f"id = 77, {UNASKED}"),
    "a null key": (lambda keys: pa.table({"id": [1, None], "name": ["x", "y"]}), f"id = None, {UNASKED}"),
}


@pytest.mark.parametrize("bad", BAD)
@KINDS
@CACHES
def test_a_bad_answer_is_an_error_and_nothing_else(desk: Desk, kind: str, bad: str, cache: Options) -> None:
    """Whatever is wrong, the error names the provider and the key and says what; nothing is kept, and a good answer is taken next."""
    answer, says = BAD[bad]
    function = made(kind, in_turn(answer, rows_of(USERS)))
    name = desk.name(lambda context: provider(function))
    table = desk.table(name, {**cache, **ONCE})
    with pytest.raises(LookupFunctionError, match=says) as caught:
        table.get(1)
    assert name in str(caught.value)
    assert "id = 1" in str(caught.value)
    assert table.metrics()["latestLoadTime"] == UNSET
    assert table.metrics()["numCachedRecords"] <= 0
    failed = {"missCount": 1, "numLoadFailures": 1} if cache else {}
    assert counted(table) == failed
    assert names(table, 1) == ["Alice"]
    assert names(table, 1) == ["Alice"]
    assert counted(table) == ({"missCount": 2, "numLoadFailures": 1, "loadCount": 1, "hitCount": 1} if cache else {})
    assert function.log.opened == 1
    assert len(function.log.asked) == (2 if cache else 3)


@KINDS
def test_a_failure_takes_nothing_with_it(desk: Desk, kind: str) -> None:
    """Keys of a batch that were held before are hits and stay; of those that failed each counts as one failure."""
    function = made(kind, in_turn(rows_of(USERS), raises(ValueError()), rows_of(USERS)))
    table = desk.serve(function, {**PARTIAL, **ONCE})
    assert names(table, 1) == ["Alice"]
    with pytest.raises(LookupFunctionError, match=r"id = 2 and 1 more|id = 3 and 1 more"):
        pairs(table, 1, 2, 3, 2, None)
    assert counted(table) == {"hitCount": 2, "missCount": 3, "loadCount": 1, "numLoadFailures": 2}
    assert table.metrics()["numCachedRecords"] == 1
    assert names(table, 1) == ["Alice"]
    assert pairs(table, 1, 2, 3) == [(0, "Alice"), (1, "Bob"), (1, "Charlie")]
    assert counted(table) == {"hitCount": 4, "missCount": 5, "loadCount": 3, "numLoadFailures": 2}
    assert function.log.asked == [[1], [2, 3], [2, 3]]


@KINDS
def test_one_bad_piece_fails_the_lookup(desk: Desk, kind: str) -> None:
    """Of a batch in several calls of which one fails nothing is kept; the error names a key of that call."""
    held = {n: [f"n{n}"] for n in range(6)}
    good = [True]

    def answer(keys: pa.Table) -> pa.Table:
        if 4 in keys.column("id").to_pylist() and not good[0]:
            raise ValueError("not 4")
        return rows_of(held)(keys)

    table = desk.serve(made(kind, answer, 1), {**PARTIAL, **ONCE})
    good[0] = False
    with pytest.raises(LookupFunctionError, match="key id = 4: "):
        pairs(table, *range(6))
    assert counted(table) == {"missCount": 6, "numLoadFailures": 6}
    good[0] = True
    assert len(pairs(table, *range(6))) == 6
    assert counted(table) == {"missCount": 12, "numLoadFailures": 6, "loadCount": 6}


def test_a_row_of_another_call_is_not_taken(desk: Desk) -> None:
    """What a call answers is about its own keys, also where another call of the same lookup asks for the others."""
    table = desk.serve(SyncFunction(lambda keys: rows_of(USERS)(ids(1, 2)), 1), ONCE)
    with pytest.raises(LookupFunctionError, match=f"id = [12], {UNASKED} key id = [12]$"):
        pairs(table, 1, 2)


@KINDS
def test_opening_may_fail(desk: Desk, kind: str) -> None:
    """A function that could not be opened is not used; the next lookup opens it."""
    function = made(kind, rows_of(USERS))
    problems = [OSError("refused")]
    opened = function.open

    def fails_first() -> Any:
        if problems:
            raise problems.pop()
        return opened()

    function.open = fails_first  # type: ignore[method-assign]
    table = desk.serve(function, {**PARTIAL, **ONCE})
    with pytest.raises(LookupFunctionError, match=r"id = 1: OSError\('refused'\)"):
        table.get(1)
    assert function.log.events == []
    assert names(table, 1) == ["Alice"]
    assert [event for event, _ in function.log.events] == ["open", "lookup"]
    assert counted(table) == {"missCount": 2, "numLoadFailures": 1, "loadCount": 1}


@KINDS
def test_opening_is_tried_again(desk: Desk, kind: str) -> None:
    """What fails while a function is opened is tried again like a lookup, with attempts of its own."""
    function = made(kind, in_turn(raises(OSError()), rows_of(USERS)))
    problems = [OSError("refused"), OSError("refused")]
    opened = function.open

    def fails_first() -> Any:
        if problems:
            raise problems.pop()
        return opened()

    function.open = fails_first  # type: ignore[method-assign]
    table = desk.serve(function, {"lookup.max-retries": 2})
    assert names(table, 1) == ["Alice"]
    assert [event for event, _ in function.log.events] == ["open", "lookup", "lookup"]
    assert len(desk.clock.slept) == 3


@pytest.mark.parametrize("bad", [lambda: 5, lambda: None, lambda: "", lambda: b"1"])
@CACHES
def test_a_version_is_a_text(desk: Desk, bad: Callable[[], Any], cache: Options) -> None:
    """A version of any other kind, or an empty one, is an error that says what it was; nothing is asked for."""
    function = SyncFunction(rows_of(USERS))
    answers = [bad, lambda: "1"]
    name = desk.name(lambda context: provider(function, version=lambda: in_order(answers)))
    table = desk.table(name, {**cache, **ONCE})
    with pytest.raises(LookupFunctionError, match=r"version\(\) of provider .* returned .*: return a text") as caught:
        table.get(1)
    assert name in str(caught.value)
    assert function.log.events == []
    assert names(table, 1) == ["Alice"]


@CACHES
def test_a_version_may_fail(desk: Desk, cache: Options) -> None:
    """Nothing is answered while the version is not known, not even what is held; then it is again."""
    function = SyncFunction(rows_of(USERS))
    problems: list[Exception] = []

    def version() -> str:
        if problems:
            raise problems[0]
        return "1"

    table = desk.serve(function, {**cache, **ONCE}, version=version)
    assert names(table, 1) == ["Alice"]
    problems.append(ValueError("gone"))
    with pytest.raises(LookupFunctionError, match=r"provider .* failed, version\(\): ValueError\('gone'\)"):
        table.get(1)
    problems.clear()
    assert names(table, 1) == ["Alice"]
    assert function.log.asked == ([[1]] if cache else [[1], [1]])


def test_the_column_that_is_there_twice_is_named(desk: Desk) -> None:
    """Of three columns of which the last two have one name, that name is what is wrong."""
    twice = pa.Table.from_arrays([pa.array([1]), pa.array(["x"]), pa.array(["y"])], ["id", "name", "name"])
    with pytest.raises(LookupFunctionError) as caught:
        desk.serve(SyncFunction(lambda keys: twice), ONCE).get(1)
    assert "column 'name' is" in str(caught.value)


def test_a_type_that_spark_lacks(desk: Desk) -> None:
    """A column of a type that has no counterpart is an error like that of any other wrong type."""
    odd = pa.table({"id": [1], "name": pa.array([1], pa.time64("us"))})
    name = desk.name(lambda context: provider(SyncFunction(lambda keys: odd)))
    with pytest.raises(PysparkLookupError) as caught:
        desk.table(name, ONCE).get(1)
    assert isinstance(caught.value, LookupFunctionError)
    assert name in str(caught.value)


@pytest.mark.parametrize("size", [-1, "5", 2.5])
def test_a_size_that_is_none(desk: Desk, size: Any) -> None:
    """A batch size that is no positive number is an error that names the provider."""
    with pytest.raises(PysparkLookupError, match="provider_1:make"):
        desk.serve(SyncFunction(rows_of(USERS), size), ONCE).get(1)


class Panic(BaseException):
    """What libraries in Rust raise when they panic."""


@pytest.mark.parametrize("problem", [SystemExit(3), Panic("index out of bounds")], ids=["exit", "panic"])
def test_errors_of_other_kinds(desk: Desk, prompt: None, problem: BaseException) -> None:
    """What is no Exception is an error like any other, at once."""
    with pytest.raises(LookupFunctionError, match=r"SystemExit|Panic") as caught:
        desk.serve(SyncFunction(raises(problem)), QUICK).get(1)
    assert not isinstance(caught.value, LookupTimeoutError)


# --- calls that hang ------------------------------------------------------------------------------


def holding(gate: threading.Event, answer: Answer) -> Answer:
    """Answers when the gate opens."""

    def held(keys: pa.Table) -> Any:
        gate.wait(BOUND_S)
        return answer(keys)

    return held


@KINDS
@CACHES
def test_a_lookup_that_hangs(desk: Desk, prompt: None, gate: threading.Event, kind: str, cache: Options) -> None:
    """It is given up after the timeout, with the provider, the option and the key in the error; a new function answers next."""
    functions: list[Function] = []

    def factory(context: LookupContext) -> LookupProvider:
        functions.append(made(kind, rows_of(USERS) if functions else holding(gate, rows_of(USERS))))
        return provider(functions[-1])

    name = desk.name(factory)
    table = desk.table(name, {**cache, **QUICK})
    with pytest.raises(LookupTimeoutError, match="id = 1") as caught:
        table.get(1)
    assert isinstance(caught.value, TimeoutError)
    assert f"provider {name} did not answer within lookup.async.timeout = 0.6 s" in str(caught.value)
    assert counted(table) == ({"missCount": 1, "numLoadFailures": 1} if cache else {})
    assert names(table, 1) == ["Alice"]
    assert [[event for event, _ in function.log.events] for function in functions] == [["open", "lookup"]] * 2
    assert functions[0].log.events[0][1] != functions[1].log.events[0][1]
    assert names(table, 1) == ["Alice"]
    assert counted(table) == ({"missCount": 2, "numLoadFailures": 1, "loadCount": 1, "hitCount": 1} if cache else {})


def test_what_a_hanging_call_answers_late_is_nobodys(desk: Desk, prompt: None) -> None:
    """Once it was given up, its answer is neither returned nor kept, and its thread ends with it."""
    gate = threading.Event()
    threads: list[threading.Thread] = []

    def slow(keys: pa.Table) -> pa.Table:
        threads.append(threading.current_thread())
        gate.wait(BOUND_S)
        return rows_of({1: ["too late"]})(keys)

    functions = [SyncFunction(slow), SyncFunction(rows_of(USERS))]
    left = iter(functions)
    table = desk.table(lambda context: provider(next(left)), {**PARTIAL, **QUICK})
    with pytest.raises(LookupTimeoutError):
        table.get(1)
    gate.set()
    threads[0].join(BOUND_S)
    assert not threads[0].is_alive()
    assert names(table, 1) == ["Alice"]
    assert names(table, 1) == ["Alice"]
    assert [len(function.log.asked) for function in functions] == [1, 1]


@KINDS
def test_opening_that_hangs(desk: Desk, prompt: None, gate: threading.Event, kind: str) -> None:
    """It is given up as a lookup is, and the next lookup opens a new function."""
    functions: list[Function] = []

    def factory(context: LookupContext) -> LookupProvider:
        function = made(kind, rows_of(USERS))
        if not functions:
            function.open = lambda: gate.wait(BOUND_S)  # type: ignore[assignment,method-assign,return-value]
        functions.append(function)
        return provider(function)

    table = desk.table(factory, {**PARTIAL, **QUICK})
    with pytest.raises(LookupTimeoutError, match="id = 1"):
        table.get(1)
    assert names(table, 1) == ["Alice"]
    assert [[event for event, _ in function.log.events] for function in functions] == [[], ["open", "lookup"]]
    assert counted(table) == {"missCount": 2, "numLoadFailures": 1, "loadCount": 1}


@CACHES
def test_a_version_that_hangs(desk: Desk, prompt: None, gate: threading.Event, cache: Options) -> None:
    """It is given up as well, and a new provider is asked next."""
    functions = [SyncFunction(rows_of(USERS)) for _ in range(2)]
    made_so_far: list[SyncFunction] = []

    def factory(context: LookupContext) -> LookupProvider:
        first = not made_so_far
        made_so_far.append(functions[len(made_so_far)])
        return provider(made_so_far[-1], version=lambda: str(gate.wait(BOUND_S)) if first else "1")

    table = desk.table(factory, {**cache, **QUICK})
    with pytest.raises(LookupTimeoutError, match=r"0.6 s, version\(\)"):
        table.get(1)
    assert names(table, 1) == ["Alice"]
    assert [function.log.asked for function in functions] == [[], [[1]]]


@CACHES
def test_an_asynchronous_lookup_that_waits_for_ever(desk: Desk, prompt: None, cache: Options) -> None:
    """One that can be cancelled is, and its function goes on."""
    cancelled = threading.Event()

    async def forever(keys: pa.Table) -> pa.Table:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    function = AsyncFunction(in_turn(forever, rows_of(USERS)))
    table = desk.serve(function, {**cache, **QUICK})
    with pytest.raises(LookupTimeoutError, match=r"within lookup.async.timeout = 0.6 s, key id = 1$"):
        table.get(1)
    assert cancelled.wait(BOUND_S)
    assert names(table, 1) == ["Alice"]
    assert function.log.opened == 1
    assert len(function.log.loops) == 1


def test_who_waits_for_a_call_that_hangs_goes_on(desk: Desk, prompt: None, gate: threading.Event) -> None:
    """Who waits for its turn behind a call that hangs has a new function when that is given up."""
    functions: list[SyncFunction] = []
    hanging = threading.Event()

    def answer(keys: pa.Table) -> pa.Table:
        hanging.set()
        gate.wait(BOUND_S)
        return rows_of(USERS)(keys)

    def factory(context: LookupContext) -> LookupProvider:
        functions.append(SyncFunction(rows_of(USERS) if functions else answer))
        return provider(functions[-1])

    table = desk.table(factory, QUICK)
    first = beside(lambda: table.get(1))
    assert hanging.wait(BOUND_S)
    assert names(table, 2) == ["Bob", "Charlie"]
    assert isinstance(first(BOUND_S), LookupTimeoutError)
    assert [len(function.log.asked) for function in functions] == [1, 1]


def test_a_late_open_opens_no_other_function(desk: Desk, prompt: None) -> None:
    """A new function is opened before its first lookup, even when the old one's open() ends before that."""
    gate = threading.Event()
    threads: list[threading.Thread] = []
    functions: list[SyncFunction] = []

    def slow() -> None:
        threads.append(threading.current_thread())
        gate.wait(BOUND_S)

    def factory(context: LookupContext) -> LookupProvider:
        function = SyncFunction(rows_of(USERS))
        if not functions:
            function.open = slow  # type: ignore[method-assign]
        functions.append(function)
        return provider(function)

    table = desk.table(factory, QUICK)
    with pytest.raises(LookupTimeoutError):
        table.get(1)
    gate.set()
    threads[0].join(BOUND_S)
    assert names(table, 1) == ["Alice"]
    assert [event for event, _ in functions[1].log.events] == ["open", "lookup"]


def test_a_function_that_is_replaced_while_it_is_opened(desk: Desk, prompt: None) -> None:
    """A new function is opened before its first lookup, also where the old one is being opened when it is made."""
    opening, opened, hangs = threading.Event(), threading.Event(), threading.Event()
    functions: list[SyncFunction] = []
    asked = itertools.count()

    def slow() -> None:
        opening.set()
        opened.wait(BOUND_S)

    def version() -> str:
        if next(asked) == 1:
            hangs.wait(BOUND_S)
        return "1"

    def factory(context: LookupContext) -> LookupProvider:
        function = SyncFunction(rows_of(USERS))
        if not functions:
            function.open = slow  # type: ignore[method-assign]
        functions.append(function)
        return provider(function, version=version)

    table = desk.table(factory, {**ONCE, "lookup.async.timeout": "1 s"})
    first = beside(lambda: names(table, 1))
    assert opening.wait(BOUND_S)
    second = beside(lambda: table.get(2))
    try:
        assert isinstance(second(BOUND_S), LookupTimeoutError)
    finally:
        opened.set()
        hangs.set()
    assert first(BOUND_S) == ["Alice"]
    assert names(table, 2) == ["Bob", "Charlie"]
    assert [event for event, _ in functions[1].log.events] == ["open", "lookup"]


def test_a_provider_that_cannot_be_made_again(desk: Desk, prompt: None, gate: threading.Event) -> None:
    """A call that hung is a timeout whatever comes next; a provider that cannot be made again is made at the next lookup."""
    functions: list[SyncFunction] = []

    def factory(context: LookupContext) -> LookupProvider:
        functions.append(SyncFunction(rows_of(USERS) if functions else holding(gate, rows_of(USERS))))
        if len(functions) == 2:
            raise OSError("not now")
        return provider(functions[-1])

    table = desk.table(factory, QUICK)
    with pytest.raises(LookupTimeoutError):
        table.get(1)
    assert names(table, 1) == ["Alice"]
    assert [len(function.log.asked) for function in functions] == [1, 0, 1]


def test_a_hit_waits_for_no_lookup(desk: Desk) -> None:
    """A key that is held is answered while another one is being looked up, with a version() as well as without."""
    gate, asking = threading.Event(), threading.Event()

    def slow(keys: pa.Table) -> pa.Table:
        asking.set()
        gate.wait(BOUND_S)
        return rows_of(USERS)(keys)

    table = desk.serve(SyncFunction(in_turn(rows_of(USERS), slow)), PARTIAL, version=lambda: "1")
    assert names(table, 1) == ["Alice"]
    other = beside(lambda: table.get(2))
    assert asking.wait(BOUND_S)
    hit = beside(lambda: names(table, 1))
    try:
        assert hit(0.3) == ["Alice"]
    finally:
        gate.set()
        other(BOUND_S)


def test_after_an_interrupt(desk: Desk, prompt: None, gate: threading.Event) -> None:
    """Who interrupts a lookup that takes long can look up something else at once: a new function answers."""
    functions: list[SyncFunction] = []

    def slow(keys: pa.Table) -> pa.Table:
        _thread.interrupt_main()
        gate.wait(BOUND_S)
        return rows_of(USERS)(keys)

    def factory(context: LookupContext) -> LookupProvider:
        functions.append(SyncFunction(rows_of(USERS) if functions else slow))
        return provider(functions[-1])

    table = desk.table(factory)
    with pytest.raises(KeyboardInterrupt):
        table.get(1)
    assert names(table, 1) == ["Alice"]


def test_a_hit_without_a_version_waits_for_no_lookup(desk: Desk) -> None:
    """A key that is held is answered while another one is being looked up."""
    gate, asking = threading.Event(), threading.Event()

    def slow(keys: pa.Table) -> pa.Table:
        asking.set()
        gate.wait(BOUND_S)
        return rows_of(USERS)(keys)

    table = desk.serve(SyncFunction(in_turn(rows_of(USERS), slow)), PARTIAL)
    assert names(table, 1) == ["Alice"]
    other = beside(lambda: table.get(2))
    assert asking.wait(BOUND_S)
    assert beside(lambda: names(table, 1))(BOUND_S) == ["Alice"]
    gate.set()
    assert len(other(BOUND_S)) == 2


# --- several calls at once ------------------------------------------------------------------------


@pytest.mark.parametrize(("capacity", "calls", "most"), [(1, 6, 1), (3, 10, 3), (100, 7, 7)])
def test_as_many_calls_at_once_as_there_is_capacity_for(desk: Desk, capacity: int, calls: int, most: int) -> None:
    """That many are under way together, never more, and each answer goes to its own key."""
    now, seen = [0], [0]

    async def answer(keys: pa.Table) -> pa.Table:
        now[0] += 1
        seen[0] = max(seen[0], now[0])
        for _ in range(keys.column("id")[0].as_py() % 4 + 1):
            await asyncio.sleep(0)
        now[0] -= 1
        return rows_of({n: [f"n{n}"] for n in range(calls)})(keys)

    table = desk.serve(AsyncFunction(answer, 1), {"lookup.async.capacity": capacity})
    assert pairs(table, *range(calls)) == [(n, f"n{n}") for n in range(calls)]
    assert (seen[0], now[0]) == (most, 0)


def test_calls_run_together(desk: Desk) -> None:
    """Three calls that wait for each other all end where three may run at once."""
    there: list[int] = []
    together: list[asyncio.Event] = []

    async def answer(keys: pa.Table) -> pa.Table:
        together.append(asyncio.Event())
        there.append(1)
        if len(there) == 3:
            for event in together:
                event.set()
        await together[-1].wait()
        return rows_of(USERS)(keys)

    function = AsyncFunction(answer, 1)
    options = {"lookup.async.capacity": 3, "lookup.async.timeout": f"{BOUND_S:g} s", **ONCE}
    assert pairs(desk.serve(function, options), 1, 2, 3) == [(0, "Alice"), (1, "Bob"), (1, "Charlie")]


def test_one_failing_call_of_five_cancels_the_others(desk: Desk, prompt: None) -> None:
    """The first failure is the lookup's; the calls under way are cancelled, those that wait never begin, and nothing is kept."""
    cancelled: list[int] = []
    done = threading.Event()

    async def answer(keys: pa.Table) -> pa.Table:
        (key,) = keys.column("id").to_pylist()
        if key == 3:
            raise ValueError("not 3")
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(key)
            if len(cancelled) == 4:
                done.set()

    function = AsyncFunction(answer, 1)
    table = desk.serve(function, {**PARTIAL, **ONCE, "lookup.async.capacity": 5})
    # Which key comes first is not said: the failing one is among the first five.
    with pytest.raises(LookupFunctionError, match=r"key id = 3: ValueError\('not 3'\)"):
        pairs(table, 1, 2, 3, 4, 5)
    assert done.wait(BOUND_S)
    assert sorted(cancelled) == [1, 2, 4, 5]
    function.answer = rows_of({n: [f"n{n}"] for n in range(9)})
    assert len(pairs(table, 1, 2, 3, 4, 5)) == 5
    assert counted(table) == {"missCount": 10, "numLoadFailures": 5, "loadCount": 5}


def test_calls_that_wait_never_begin_after_a_failure(desk: Desk) -> None:
    """Where one runs at a time, the first failure is the last call."""
    function = AsyncFunction(raises(ValueError()), 1)
    with pytest.raises(LookupFunctionError):
        pairs(desk.serve(function, {**ONCE, "lookup.async.capacity": 1}), *range(5))
    assert len(function.log.asked) == 1


def test_the_timeout_is_for_each_call(desk: Desk) -> None:
    """Ten calls of a third of the timeout each, one after the other, are not too slow."""

    async def answer(keys: pa.Table) -> pa.Table:
        await asyncio.sleep(0.03)
        return rows_of({n: ["x"] for n in range(10)})(keys)

    options = {**ONCE, "lookup.async.capacity": 1, "lookup.async.timeout": "200 ms"}
    assert len(pairs(desk.serve(AsyncFunction(answer, 1), options), *range(10))) == 10


@KINDS
def test_the_timeout_is_for_a_call_with_its_retries(desk: Desk, prompt: None, gate: threading.Event, kind: str) -> None:
    """What is tried again and again, each time quickly, is given up when the timeout is over."""
    clock = FakeClock()
    host = HostClock(lambda: clock.wall_s, lambda: clock.steady_s, lambda seconds: gate.wait(BOUND_S), "boot-1")
    desk.restart(host)
    function = made(kind, raises(ValueError("again")))
    table = desk.serve(function, {**PARTIAL, "lookup.max-retries": 50, "lookup.async.timeout": "100 ms"})
    with pytest.raises(LookupTimeoutError, match="id = 1"):
        table.get(1)
    assert len(function.log.asked) == 1
    assert counted(table) == {"missCount": 1, "numLoadFailures": 1}
    function.answer = rows_of(USERS)
    assert names(table, 1) == ["Alice"]


@KINDS
@CACHES
def test_the_caller_may_run_in_an_event_loop(desk: Desk, kind: str, cache: Options) -> None:
    """A lookup blocks its caller's loop, and needs none of it."""
    table = desk.serve(made(kind, rows_of(USERS)), cache)

    async def main() -> list[list[str]]:
        inside = names(table, 2)
        threads = await asyncio.gather(*(asyncio.to_thread(names, table, key) for key in (1, 2, 3)))
        return [inside, *threads]

    assert asyncio.run(main()) == [["Bob", "Charlie"], ["Alice"], ["Bob", "Charlie"], []]


def test_a_function_may_run_a_loop_of_its_own(desk: Desk) -> None:
    """A function that is not asynchronous is called where no event loop runs: it may run one, as clients and drivers do."""

    async def found(keys: pa.Table) -> pa.Table:
        return rows_of(USERS)(keys)

    def answer(keys: pa.Table) -> pa.Table:
        coroutine = found(keys)
        try:
            return asyncio.run(coroutine)
        finally:
            coroutine.close()

    assert names(desk.serve(SyncFunction(answer), ONCE), 1) == ["Alice"]


def test_calls_wait_for_their_next_attempts_together(desk: Desk, prompt: None) -> None:
    """However many calls are to be tried again, none waits for the waiting of another."""
    calls = 40
    together = threading.Barrier(calls)
    clock = FakeClock()

    def sleep(seconds: float) -> None:
        together.wait(1.0)

    desk.restart(HostClock(lambda: clock.wall_s, lambda: clock.steady_s, sleep, "boot-1"))
    failed: set[int] = set()

    def answer(keys: pa.Table) -> pa.Table:
        (key,) = keys.column("id").to_pylist()
        if key not in failed:
            failed.add(key)
            raise ValueError("first")
        return rows_of({n: ["x"] for n in range(calls)})(keys)

    table = desk.serve(AsyncFunction(answer, 1), {"lookup.max-retries": 1})
    assert len(pairs(table, *range(calls))) == calls


def test_cancelled_calls_count_until_they_have_ended(desk: Desk, prompt: None) -> None:
    """After a failure the next lookup begins when the cancelled calls are over: never are there more than capacity allows."""
    now, seen = [0], [0]
    problems = [ValueError("one")]

    async def answer(keys: pa.Table) -> pa.Table:
        now[0] += 1
        seen[0] = max(seen[0], now[0])
        try:
            if problems and now[0] == 2:
                raise problems.pop()
            await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)  # gives its connection back
            raise
        finally:
            now[0] -= 1
        return rows_of(USERS)(keys)

    table = desk.serve(AsyncFunction(answer, 1), {**ONCE, "lookup.async.capacity": 2})
    with pytest.raises(LookupFunctionError):
        pairs(table, 1, 2)
    assert len(pairs(table, 1, 2)) == 3
    assert seen[0] == 2


# --- trying again ---------------------------------------------------------------------------------


@pytest.mark.parametrize("retries", [0, 1, 3])
@KINDS
@CACHES
def test_attempts(desk: Desk, kind: str, retries: int, cache: Options) -> None:
    """What fails every time is tried once more than lookup.max-retries says, and the error says how often."""
    function = made(kind, raises(OSError("down")))
    table = desk.serve(function, {**cache, "lookup.max-retries": retries})
    often = f" in {retries + 1} attempts" if retries else ""
    with pytest.raises(
        LookupFunctionError, match=rf"look up key id = 1 and 1 more{often}: OSError\('down'\)"
    ) as caught:
        pairs(table, 1, 2)
    assert isinstance(caught.value.__cause__, OSError)
    assert function.log.asked == [[1, 2]] * (retries + 1)
    assert len(desk.clock.slept) == retries
    assert table.metrics()["lookupRetryCount"] == 2 * retries
    assert counted(table) == ({"missCount": 2, "numLoadFailures": 2} if cache else {})
    assert function.log.opened == 1


def test_three_retries_by_default(desk: Desk) -> None:
    """Without an option there are four attempts, as FLIP-221 has it."""
    function = SyncFunction(raises(OSError()))
    with pytest.raises(LookupFunctionError, match="in 4 attempts"):
        desk.serve(function).get(1)
    assert len(function.log.asked) == 4


@KINDS
@CACHES
def test_a_failure_that_passes(desk: Desk, kind: str, cache: Options) -> None:
    """An attempt that fails and one that does not are one load: no failure is counted, but the attempt is."""
    function = made(kind, in_turn(raises(OSError("closed")), rows_of(USERS)))
    table = desk.serve(function, {**cache, "lookup.max-retries": 3})
    assert names(table, 1) == ["Alice"]
    assert function.log.asked == [[1], [1]]
    assert counted(table, "lookupRetryCount") == {
        "lookupRetryCount": 1,
        **({"missCount": 1, "loadCount": 1} if cache else {}),
    }
    assert names(table, 1) == ["Alice"]
    assert len(function.log.asked) == (2 if cache else 3)


@KINDS
def test_a_wrong_answer_is_not_asked_for_again(desk: Desk, kind: str) -> None:
    """Other columns will not be better the second time: only what is raised is tried again."""
    function = made(kind, lambda keys: pa.table({"id": [1]}))
    with pytest.raises(LookupFunctionError, match="'name' is missing"):
        desk.serve(function, {"lookup.max-retries": 3}).get(1)
    assert len(function.log.asked) == 1


def test_only_the_call_that_failed_is_tried_again(desk: Desk) -> None:
    """Of several calls each has attempts of its own."""
    failed: list[int] = []

    def answer(keys: pa.Table) -> pa.Table:
        if keys.column("id").to_pylist() == [2] and len(failed) < 2:
            failed.append(2)
            raise OSError()
        return rows_of(USERS)(keys)

    function = SyncFunction(answer, 1)
    table = desk.serve(function, {"lookup.max-retries": 2})
    assert len(pairs(table, 1, 2, 3)) == 3
    assert sorted(itertools.chain(*function.log.asked)) == [1, 2, 2, 2, 3]


def test_attempts_are_further_and_further_apart(desk: Desk) -> None:
    """Between attempts the host's clock waits, by chance up to 100 ms, then up to twice as long each time, never above 5 s."""
    table = desk.serve(SyncFunction(raises(OSError())), {"lookup.max-retries": 40})
    with pytest.raises(LookupFunctionError, match="in 41 attempts"):
        table.get(1)
    slept = desk.clock.slept
    assert len(slept) == 40
    assert all(0 <= seconds <= min(5.0, 0.1 * 2**n) for n, seconds in enumerate(slept))
    assert max(slept[6:]) > 2.0  # fails once in 10**13 runs
    assert len(set(slept)) > 30


def test_a_late_row(desk: Desk) -> None:
    """A key without rows is asked for again after a while, alone; the row it has by then is what is remembered."""
    function = SyncFunction(in_turn(rows_of({1: ["Alice"]}), rows_of(USERS)))
    table = desk.serve(function, {**PARTIAL, **RETRY})
    assert pairs(table, 2, 1, 2) == [(0, "Bob"), (0, "Charlie"), (1, "Alice"), (2, "Bob"), (2, "Charlie")]
    assert function.log.asked == [[1, 2], [2]]
    assert desk.clock.slept == [7.0]
    assert names(table, 2) == ["Bob", "Charlie"]
    assert counted(table, "lookupRetryCount") == {"hitCount": 2, "missCount": 2, "loadCount": 2, "lookupRetryCount": 1}


@KINDS
@CACHES
def test_a_row_that_never_comes(desk: Desk, kind: str, cache: Options) -> None:
    """After the last asking a key has no rows; only that is remembered."""
    function = made(kind, rows_of(USERS))
    table = desk.serve(function, {**cache, **RETRY})
    assert pairs(table, 1, 3, 4) == [(0, "Alice")]
    assert function.log.asked == [[1, 3, 4]] + [[3, 4]] * 3
    assert desk.clock.slept == [7.0] * 3
    assert table.get(3) == []
    assert len(function.log.asked) == (4 if cache else 8)
    if cache:
        assert counted(table, "lookupRetryCount") == {
            "hitCount": 1,
            "missCount": 3,
            "loadCount": 3,
            "lookupRetryCount": 6,
        }


def test_a_row_that_comes_at_the_last_asking(desk: Desk) -> None:
    """Nobody is told of an absence before the last asking: until then there is nothing to remember."""
    table: list[LookupTable] = []
    seen: list[int] = []

    def note(keys: pa.Table) -> pa.Table:
        seen.append(table[0].metrics()["loadCount"])
        return SCHEMA.empty_table()

    function = SyncFunction(in_turn(note, note, note, rows_of(USERS)))
    table.append(desk.serve(function, {**PARTIAL, **RETRY}))
    assert names(table[0], 1) == ["Alice"]
    assert seen == [0, 0, 0]
    assert names(table[0], 1) == ["Alice"]
    assert function.log.asked == [[1]] * 4


def test_an_absence_that_is_not_remembered_is_asked_for_again(desk: Desk) -> None:
    """With cache-missing-key=false each lookup asks all the times again; a key with rows is held."""
    function = SyncFunction(rows_of(USERS))
    table = desk.serve(function, {**PARTIAL, **RETRY, "lookup.partial-cache.cache-missing-key": "false"})
    assert (table.get(3), table.get(3), names(table, 1), names(table, 1)) == ([], [], ["Alice"], ["Alice"])
    assert function.log.asked == [[3]] * 8 + [[1]]
    assert counted(table) == {"hitCount": 1, "missCount": 3, "loadCount": 3}
    assert table.metrics()["numCachedRecords"] == 1


@KINDS
def test_an_error_while_asking_again(desk: Desk, kind: str) -> None:
    """It is an error and no absence, and what the first asking brought is not kept either."""
    function = made(kind, in_turn(rows_of(USERS), raises(OSError("down")), rows_of({**USERS, 3: ["Dora"]})))
    table = desk.serve(function, {**PARTIAL, **RETRY, **ONCE})
    with pytest.raises(LookupFunctionError, match=r"key id = 3: OSError\('down'\)"):
        pairs(table, 1, 3)
    assert counted(table) == {"missCount": 2, "numLoadFailures": 2}
    assert pairs(table, 1, 3) == [(0, "Alice"), (1, "Dora")]
    assert function.log.asked == [[1, 3], [3], [1, 3]]


def test_errors_and_absences_are_tried_again_apart(desk: Desk) -> None:
    """Attempts after errors are counted anew at each asking."""
    down = raises(OSError("down"))
    nobody = rows_of({})
    function = SyncFunction(in_turn(down, nobody, down, rows_of(USERS)))
    table = desk.serve(function, {**RETRY, "lookup.max-retries": 1})
    assert names(table, 1) == ["Alice"]
    assert table.metrics()["lookupRetryCount"] == 3
    assert [seconds for seconds in desk.clock.slept if seconds == 7.0] == [7.0]
    assert len(desk.clock.slept) == 3


@pytest.mark.parametrize("chosen", [c for n in (1, 2) for c in itertools.combinations(sorted(RETRY), n)])
def test_the_options_of_asking_again_come_together(desk: Desk, chosen: tuple[str, ...]) -> None:
    """Some of the three are as good as a mistake."""
    with pytest.raises(
        OptionError, match=r"lookup.retry.predicate, .fixed-delay and .max-attempts: give all three or none"
    ):
        desk.serve(SyncFunction(rows_of(USERS)), {key: RETRY[key] for key in chosen})


def test_a_table_asks_again_on_its_own_clock(tmp_path: Path) -> None:
    """`ProvidedTable` waits on the clock that it is given, and counts into the group that it is given."""
    options = {"lookup.provider": f"{__name__}:absent_users", "lookup.keys": "id", **RETRY}
    clock, metrics = FakeClock(), CacheMetricGroup()
    provided = ProvidedTable(LookupOptions.parse(options), clock.host())
    rows = provided.lookup(ids(3), pa.schema([("name", pa.string())]), metrics)
    assert rows.to_pydict() == {"name": [], KEY_INDEX: []}
    assert clock.slept == [7.0] * 3
    assert metrics.snapshot()["lookupRetryCount"] == 3


def absent_users(context: LookupContext) -> LookupProvider:
    """Nobody is there."""
    return provider(SyncFunction(rows_of({})))


# --- options --------------------------------------------------------------------------------------

BAD_OPTIONS: dict[str, tuple[Options, str]] = {
    "predicate, another": ({**RETRY, "lookup.retry.predicate": "exception"}, "lookup.retry.predicate = 'exception'"),
    "predicate, a dash": ({**RETRY, "lookup.retry.predicate": "lookup-miss"}, "did you mean lookup_miss"),
    "delay, no unit": ({**RETRY, "lookup.retry.fixed-delay": "100 nano sec"}, "lookup.retry.fixed-delay = '100 nano sec'"),
    "delay below zero": ({**RETRY, "lookup.retry.fixed-delay": "-10s"}, "lookup.retry.fixed-delay = '-10s'"),
    "delay of nothing": ({**RETRY, "lookup.retry.fixed-delay": "0 s"}, "greater than zero"),
    "attempts below zero": ({**RETRY, "lookup.retry.max-attempts": "-3"}, "lookup.retry.max-attempts = '-3'"),
    "no attempts": ({**RETRY, "lookup.retry.max-attempts": "0"}, "1 or more"),
    "attempts, a fraction": ({**RETRY, "lookup.retry.max-attempts": "100.0"}, "lookup.retry.max-attempts = '100.0'"),
    "timeout, no unit": ({"lookup.async.timeout": "300 si"}, "lookup.async.timeout = '300 si'"),
    "timeout of nothing": ({"lookup.async.timeout": "0 s"}, "greater than zero"),
    "no capacity": ({"lookup.async.capacity": "0"}, "lookup.async.capacity = '0'.*1 or more"),
    "capacity below zero": ({"lookup.async.capacity": "-1"}, "lookup.async.capacity = '-1'"),
    "retries below zero": ({"lookup.max-retries": "-1"}, "lookup.max-retries = '-1'"),
    "an unknown one": ({"lookup.async.time-out": "1 s"}, "did you mean lookup.async.timeout"),
    "another unknown one": ({"lookup.retry.strategy": "fixed_delay"}, "unknown option lookup.retry.strategy"),
    "a view": ({"lookup.view": "files"}, r"describe\(\) or metrics\(\)"),
    "format": ({"lookup.format": "csv"}, "lookup.format is for tables of files"),
    "partition": ({"lookup.partition": "max_pt()"}, "lookup.partition is for tables of files"),
    "success file": ({"lookup.success-file": "true"}, "lookup.success-file is for tables of files"),
    "settle": ({"lookup.settle": "1 s"}, "lookup.settle is for tables of files"),
    "block size": ({"lookup.block.size": "64 KiB"}, "lookup.block.size is for tables of files"),
    "storage": ({"lookup.storage.endpoint_url": "http://h"}, "lookup.storage.endpoint_url is for tables of files"),
    "no cache for its options": ({"lookup.partial-cache.max-rows": 5}, "should be 'PARTIAL'"),
    "full": ({"lookup.cache": "FULL"}, "has no scan function; return a FullCachingLookupProvider"),
    "partial, nothing to tell a change": ({**PARTIAL, "lookup.partial-cache.expire-after-write": ""}, "expire-after-write"),
    "partial by rows alone": ({"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": 5}, r"has no version\(\).*set lookup.partial-cache.expire-after-write"),
    "partial by access alone": ({"lookup.cache": "PARTIAL", "lookup.partial-cache.expire-after-access": "1 h"}, r"has no version\(\)"),
    "partial without a bound": ({"lookup.cache": "PARTIAL"}, r"has no version\(\)"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD_OPTIONS)
@KINDS
def test_bad_options(desk: Desk, kind: str, bad: str) -> None:
    """An option that cannot be meant is refused when the table is made, with its name; the function is not touched."""
    options, says = BAD_OPTIONS[bad]
    function = made(kind, rows_of(USERS))
    with pytest.raises(OptionError, match=says):
        desk.serve(function, options)
    assert function.log.events == []


@pytest.mark.parametrize("option", ["async.capacity", "async.timeout", "retry.predicate", "provider.table"])
def test_options_of_providers_need_one(tmp_path: Path, option: str) -> None:
    """Where no provider is named, an option of providers would be ignored, and is refused."""
    values = {"async.capacity": 5, "async.timeout": "1 s", "retry.predicate": "lookup_miss", "provider.table": "t"}
    more = RETRY if option.startswith("retry") else {}
    with pytest.raises(
        OptionError, match=rf"lookup\.{option.split('.', maxsplit=1)[0]}\..* is for tables of a provider"
    ):
        LookupTable(str(tmp_path), {f"lookup.{option}": values[option], **more})


def test_a_table_needs_a_path_or_a_provider() -> None:
    """Without both there is no table; with a provider there need be no path."""
    with pytest.raises(OptionError, match="path is missing"):
        LookupTable(None, {"lookup.keys": "id"})


def test_a_provider_needs_keys(desk: Desk) -> None:
    """A table that is asked by key says by which."""
    name = desk.name(lambda context: provider(SyncFunction(rows_of(USERS))))
    with pytest.raises(OptionError, match=r"lookup.keys = '': provider .* has the columns id, name"):
        LookupTable(None, {"lookup.provider": name})


def test_a_partial_cache_with_a_version_needs_a_bound(desk: Desk) -> None:
    """Where a version tells changes, any of the four bounds will do, and one is needed."""
    function = SyncFunction(rows_of(USERS))
    with pytest.raises(OptionError, match="would grow for ever"):
        desk.serve(function, {"lookup.cache": "PARTIAL"}, version=lambda: "1")
    for bound, value in (("max-rows", 5), ("max-bytes", "1 MiB"), ("expire-after-access", "1 h")):
        options = {"lookup.cache": "PARTIAL", f"lookup.partial-cache.{bound}": value}
        assert names(desk.serve(function, options, version=lambda: "1"), 1) == ["Alice"]


def test_options_mean_the_same_in_small_letters(desk: Desk) -> None:
    """Values that are one of a few are taken in any case."""
    options = {**PARTIAL, **RETRY, "lookup.cache": "partial", "lookup.retry.predicate": "LOOKUP_MISS"}
    table = desk.serve(SyncFunction(rows_of(USERS)), options)
    assert (names(table, 1), names(table, 1)) == (["Alice"], ["Alice"])
    assert counted(table)["hitCount"] == 1


SECRETS = {
    "password": "hunter2",
    "access_key": "hunter2",
    "auth-token": "hunter2",
    "url": "postgres://reader:hunter2@db/users",
    "endpoint": "https://db/?user=x&api_key=hunter2",
    "extra": '{"auth": {"password": "hunter2"}}',
}


@pytest.mark.parametrize("key", SECRETS)
def test_credentials_are_refused(desk: Desk, key: str) -> None:
    """An option that looks like a credential never gets to the factory, nor into the message."""
    made_with: list[LookupContext] = []
    with pytest.raises(OptionError, match=f"lookup.provider.{key} looks like a credential") as caught:
        desk.table(made_with.append, {f"lookup.provider.{key}": SECRETS[key]})
    assert "hunter2" not in str(caught.value)
    assert made_with == []


# --- making a provider ----------------------------------------------------------------------------


def test_what_a_factory_is_told(desk: Desk) -> None:
    """Keys, options without their prefix, and the path; what was not given is None. Once more if not all columns are wanted."""
    told: list[LookupContext] = []

    def factory(context: LookupContext) -> LookupProvider:
        told.append(context)
        schema = pa.schema([("id", pa.int64()), ("more", pa.int64()), ("name", pa.string()), ("flag", pa.bool_())])
        return provider(SyncFunction(lambda keys: keys), schema)

    desk.table(factory)
    assert told == [LookupContext(("id",), None, {}, None)]
    told.clear()
    options = {
        "lookup.keys": "name,id",
        "lookup.provider.table": "users",
        "lookup.provider.connect.timeout": 5,
        "lookup.provider.safe": True,
    }
    context = LookupContext(
        ("name", "id"),
        None,
        {"table": "users", "connect.timeout": "5", "safe": "true"},
        "jdbc:anything/at all",
    )
    desk.table(factory, options, path="jdbc:anything/at all")
    assert told == [context]
    told.clear()
    more = {"lookup.columns": "flag, `name`", "lookup.where": "more = 1"}
    desk.table(factory, {**options, **more}, path="jdbc:anything/at all")
    assert told == [context, dataclasses.replace(context, columns=("more", "flag"))]
    with pytest.raises(AttributeError):
        context.keys = ()  # type: ignore[misc]


class Nested:
    """A factory may be an attribute of an attribute."""

    @staticmethod
    def users(context: LookupContext) -> LookupProvider:
        return provider(SyncFunction(rows_of(USERS)))


def test_a_factory_is_named_by_its_module_and_name(desk: Desk) -> None:
    """Packages and classes have dots."""
    assert names(desk.table(f"{__name__}:Nested.users"), 1) == ["Alice"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_module_of_ours:make", r"cannot be made: ModuleNotFoundError"),
        ("tests.no_such_module:make", r"cannot be made: ModuleNotFoundError"),
        (f"{__name__}:nobody", r"cannot be made: AttributeError"),
        (f"{__name__}:Nested.nobody", r"cannot be made: AttributeError"),
        (f"{__name__}:BOUND_S", r"cannot be made: TypeError\(.*not callable"),
        (f"{__name__}:Nested", r"cannot be made: TypeError"),
        (f"{__name__}:LookupFunctionProvider", r"cannot be made: TypeError"),
        ("nocolon", "expected module:factory"),
        (":make", "expected module:factory"),
        ("a module:make", "expected module:factory"),
        ("module:", "expected module:factory"),
    ],
)
def test_factories_that_are_none(desk: Desk, name: str, says: str) -> None:
    """A factory that is not there, or is none, is an error of the option, with what was wrong."""
    with pytest.raises(OptionError, match=f"option lookup.provider = '{name}'.*{says}"):
        desk.table(name)


def test_a_module_that_cannot_be_imported(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a module raises while it is imported is in the error; mended, it can be used."""
    (tmp_path / "broken_provider_of_ours.py").write_text("raise RuntimeError('half of a module')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(OptionError, match=r"RuntimeError\('half of a module'\)"):
        desk.table("broken_provider_of_ours:make")
    assert "broken_provider_of_ours" not in sys.modules


def test_a_factory_that_raises(desk: Desk) -> None:
    """Its error is in ours, and its own OptionError is ours; the next table tries again."""
    problems: list[Exception] = [
        ValueError("no table of that name"),
        OptionError("option lookup.provider.table is missing"),
    ]

    def factory(context: LookupContext) -> LookupProvider:
        if problems:
            raise problems.pop(0)
        return provider(SyncFunction(rows_of(USERS)))

    name = desk.name(factory)
    with pytest.raises(OptionError, match=rf"{name}' cannot be made: ValueError\('no table of that name'\)"):
        desk.table(name)
    with pytest.raises(OptionError, match=r"^option lookup.provider.table is missing$"):
        desk.table(name)
    assert names(desk.table(name), 1) == ["Alice"]


@pytest.mark.parametrize("returned", [None, SyncFunction(rows_of(USERS)), LookupFunctionProvider, "provider", SCHEMA])
def test_a_factory_that_returns_something_else(desk: Desk, returned: Any) -> None:
    """What is no provider is refused, and shown."""
    with pytest.raises(OptionError, match=r"provider_1:make' returned (.|\n)*: return a LookupProvider"):
        desk.table(lambda context: returned)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (pa.schema([("id", pa.int64()), ("ID", pa.int64())]), "'id' and 'ID' differ at most in letter case"),
        (pa.schema([("id", pa.int64()), ("at", pa.time64("us"))]), "column 'at': type time64"),
    ],
)
def test_schemas_that_spark_cannot_take(desk: Desk, schema: pa.Schema, says: str) -> None:
    """A schema that is none for Spark is refused, naming the provider."""
    with pytest.raises(SchemaError, match=f"provider provider_1:make: .*{says}"):
        desk.serve(SyncFunction(rows_of(USERS)), schema=schema)


def test_a_provider_without_a_function(desk: Desk) -> None:
    """A provider that is neither asked by key nor scanned can be made, and answers nothing."""
    table = desk.table(lambda context: LookupProvider(SCHEMA))
    with pytest.raises(OptionError, match=r"provider_1:make.* has no lookup function"):
        table.get(1)


def test_a_schema_that_is_none(desk: Desk) -> None:
    """A provider whose schema is no schema is refused like one that is no provider."""
    with pytest.raises(OptionError, match="provider_1:make"):
        desk.serve(SyncFunction(rows_of(USERS)), schema=None)


@CACHES
def test_a_column_that_is_always_null(desk: Desk, cache: Options) -> None:
    """A column of nothing but nulls is one of texts, as Spark infers it."""
    schema = pa.schema([("id", pa.int64()), ("name", pa.null())])
    table = desk.serve(SyncFunction(lambda keys: keys.append_column("name", pa.nulls(keys.num_rows))), cache, schema)
    for _ in range(2):
        assert table.get(1) == [{"id": 1, "name": None}]
    assert table.describe()["columns"]["name"] == "string"


@CACHES
def test_names_in_another_case(desk: Desk, cache: Options) -> None:
    """Keys and columns may be spelled in another letter case; a factory is told them as its schema spells them."""
    told: list[LookupContext] = []

    def factory(context: LookupContext) -> LookupProvider:
        told.append(context)
        return provider(SyncFunction(rows_of(USERS)))

    table = desk.table(factory, {**cache, "lookup.keys": "ID", "lookup.columns": "NAME"})
    assert table.get(1) == [{"id": 1, "name": "Alice"}]
    assert (told[-1].keys, told[-1].columns) == (("id",), ("name",))


# --- one provider for many tables -----------------------------------------------------------------


@KINDS
@CACHES
def test_tables_of_the_same_options_are_one(desk: Desk, kind: str, cache: Options) -> None:
    """Within a process they share a provider, its function, its cache and its counters."""
    functions: list[Function] = []

    def factory(context: LookupContext) -> LookupProvider:
        functions.append(made(kind, rows_of(USERS)))
        return provider(functions[-1])

    name = desk.name(factory)
    tables = [desk.table(name, cache) for _ in range(3)]
    for table in tables:
        assert names(table, 1) == ["Alice"]
    assert len(functions) == 1
    assert functions[0].log.opened == 1
    assert functions[0].log.asked == ([[1]] if cache else [[1]] * 3)
    if cache:
        for table in tables:
            assert counted(table) == {"hitCount": 2, "missCount": 1, "loadCount": 1}
    tables[0].close()
    with pytest.raises(ValueError, match="closed"):
        tables[0].get(1)
    assert names(tables[1], 2) == ["Bob", "Charlie"]


@pytest.mark.parametrize(
    ("other", "lookups", "hits"),
    [
        ({"lookup.provider.region": "eu"}, 2, 1),
        ({"lookup.columns": "id"}, 2, 2),
        ({"lookup.keys": "name"}, 2, 2),
        ({"lookup.where": "name <> 'Bob'"}, 1, 3),
        ({"lookup.max-retries": 7}, 1, 3),
    ],
    ids=lambda other: next(iter(other)) if isinstance(other, dict) else "",
)
def test_tables_of_other_options(desk: Desk, other: Options, lookups: int, hits: int) -> None:
    """Other options of the provider are another table; other columns and keys are of the same table, and need other rows."""
    asked: list[pa.Table] = []

    def answer(keys: pa.Table) -> pa.Table:
        asked.append(keys)
        return pa.table({"id": [1], "name": ["Alice"]})

    name = desk.name(lambda context: provider(SyncFunction(answer)))
    one, two = desk.table(name, PARTIAL), desk.table(name, {**PARTIAL, **other})
    for _ in range(2):
        assert len(one.get(1)) == 1
        assert len(two.get("Alice" if "lookup.keys" in other else 1)) == 1
    assert len(asked) == lookups
    assert counted(one) == {
        "hitCount": hits,
        "missCount": 4 - hits if hits > 1 else 1,
        "loadCount": 4 - hits if hits > 1 else 1,
    }


def test_processes_of_a_host_share_rows(desk: Desk) -> None:
    """What one process looked up another one has, without opening its function; counters add up."""
    functions: list[SyncFunction] = []

    def factory(context: LookupContext) -> LookupProvider:
        functions.append(SyncFunction(rows_of(USERS)))
        return provider(functions[-1])

    table = desk.table(factory, PARTIAL)
    assert len(pairs(table, 1, 2, 3)) == 3
    desk.restart()
    assert len(pairs(table, 1, 2, 3)) == 3
    assert [function.log.opened for function in functions] == [1, 0]
    assert counted(table) == {"hitCount": 3, "missCount": 3, "loadCount": 3}
    desk.clock.tick(3600)
    assert len(pairs(table, 1, 2, 3)) == 3
    assert functions[1].log.asked == [[1, 2, 3]]


def test_a_wrong_answer_is_not_shared(desk: Desk) -> None:
    """Another process of the host sees nothing of a lookup that failed."""
    answers = [raises(OSError()), rows_of(USERS)]
    table = desk.table(lambda context: provider(SyncFunction(answers.pop(0))), {**PARTIAL, **ONCE})
    with pytest.raises(LookupFunctionError):
        table.get(1)
    desk.restart()
    assert names(table, 1) == ["Alice"]
    assert counted(table) == {"missCount": 2, "numLoadFailures": 1, "loadCount": 1}


@KINDS
def test_one_lookup_for_all_threads_that_miss(desk: Desk, kind: str) -> None:
    """Of threads that lack a key at the same time one asks, the others have hits."""
    ready = threading.Barrier(5)
    gate = threading.Event()
    function = made(kind, holding(gate, rows_of(USERS)))
    table = desk.serve(function, PARTIAL)

    def ask() -> list[tuple[int, str]]:
        ready.wait(BOUND_S)
        return pairs(table, 1, 2)

    waits = [beside(ask) for _ in range(4)]
    ready.wait(BOUND_S)
    gate.set()
    for wait in waits:
        assert wait(BOUND_S) == [(0, "Alice"), (1, "Bob"), (1, "Charlie")]
    assert function.log.asked == [[1, 2]]
    assert counted(table) == {"hitCount": 6, "missCount": 2, "loadCount": 2}


def test_who_waited_for_a_lookup_that_failed_tries_itself(desk: Desk) -> None:
    """A failure is one lookup's: others that waited for it ask themselves."""
    asking, gate = threading.Event(), threading.Event()

    def fails(keys: pa.Table) -> pa.Table:
        asking.set()
        gate.wait(BOUND_S)
        raise OSError("down")

    table = desk.serve(SyncFunction(in_turn(fails, rows_of(USERS))), {**PARTIAL, **ONCE})
    first = beside(lambda: table.get(1))
    assert asking.wait(BOUND_S)
    second = beside(lambda: names(table, 1))
    gate.set()
    assert isinstance(first(BOUND_S), LookupFunctionError)
    assert second(BOUND_S) == ["Alice"]
    assert counted(table) == {"missCount": 2, "numLoadFailures": 1, "loadCount": 1}


@pytest.mark.parametrize("when", ["a table is made", "a new process asks"])
def test_a_factory_may_use_a_table(desk: Desk, tmp_path: Path, when: str) -> None:
    """A provider may be made of what another table says."""
    pq.write_table(pa.table({"host": ["db1"]}), tmp_path / "hosts.parquet")
    hosts: list[list[str]] = []

    def factory(context: LookupContext) -> LookupProvider:
        if when == "a table is made" or hosts:
            inner = LookupTable(str(tmp_path / "hosts.parquet"), {"lookup.cache.dir": str(desk.cache_dir)})
            hosts.append(inner.scan().column("host").to_pylist())
        hosts.append([])
        return provider(SyncFunction(rows_of(USERS)))

    def use() -> list[str]:
        table = desk.table(factory)
        if when == "a new process asks":
            desk.restart()
        return names(table, 1)

    try:
        assert beside(use)(0.5) == ["Alice"]
        assert ["db1"] in hosts
    finally:
        desk.abandon()


def test_a_provider_is_made_once(desk: Desk) -> None:
    """Tables that are made at the same time have one provider."""
    together = threading.Barrier(2)
    made_so_far: list[int] = []

    def factory(context: LookupContext) -> LookupProvider:
        made_so_far.append(1)
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(0.3)
        return provider(SyncFunction(rows_of(USERS)))

    name = desk.name(factory)
    waits = [beside(lambda: names(desk.table(name), 1)) for _ in range(2)]
    assert [wait(BOUND_S) for wait in waits] == [["Alice"], ["Alice"]]
    assert len(made_so_far) == 1


@KINDS
def test_a_function_is_closed_with_the_last_table(desk: Desk, kind: str) -> None:
    """When the last table that uses it is closed, so is a function, in its thread; what is asked afterwards opens it again."""
    function = made(kind, rows_of(USERS))
    name = desk.name(lambda context: provider(function))
    one, two, three = desk.table(name), desk.table(name), desk.table(name)
    assert names(one, 1) == names(two, 1) == ["Alice"]
    one.close()
    one.close()
    assert [event for event, _ in function.log.events] == ["open", "lookup", "lookup"]
    two.close()
    assert [event for event, _ in function.log.events] == ["open", "lookup", "lookup", "close"]
    assert len({thread for _, thread in function.log.events}) == 1
    assert names(three, 2) == ["Bob", "Charlie"]
    assert [event for event, _ in function.log.events[4:]] == ["open", "lookup"]


def test_a_function_that_was_not_opened_is_not_closed(desk: Desk) -> None:
    """A table that asked nothing has nothing to close."""
    function = SyncFunction(rows_of(USERS))
    table = desk.serve(function)
    table.describe()
    table.close()
    assert function.log.events == []


def test_closing_may_fail(desk: Desk, prompt: None, gate: threading.Event) -> None:
    """What a function raises when it is closed is nobody's problem any more, and one that hangs then is given up."""
    problems: list[Answer] = [raises(OSError("gone")), lambda keys: gate.wait(BOUND_S)]
    table: LookupTable
    for problem in problems:
        function = SyncFunction(rows_of(USERS))
        function.close = lambda problem=problem: problem(ids())  # type: ignore[method-assign,misc]
        table = desk.serve(function, QUICK)
        assert names(table, 1) == ["Alice"]
        assert beside(table.close)(BOUND_S) is None
        with pytest.raises(ValueError, match="closed"):
            table.get(1)


# --- rows by key, cached --------------------------------------------------------------------------


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


def test_some_of_a_batch_are_held(desk: Desk) -> None:
    """Of 1,2,1,12,3,12,4,3 each key is asked for once, in one call, but for the one that is held; repeats are hits."""
    function = SyncFunction(rows_of({n: [f"n{n}"] for n in range(5)}))
    table = desk.serve(function, PARTIAL)
    table.get(4)
    found = pairs(table, 1, 2, 1, 12, 3, 12, 4, 3)
    assert found == [(0, "n1"), (1, "n2"), (2, "n1"), (4, "n3"), (6, "n4"), (7, "n3")]
    assert function.log.asked == [[4], [1, 2, 3, 12]]
    assert counted(table) == {"hitCount": 4, "missCount": 5, "loadCount": 5}


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


# --- caches that providers bring ------------------------------------------------------------------


class DictCache(LookupCache):
    """A cache in a few lines, of tables with the key column id, and what was done to it."""

    def __init__(self) -> None:
        self.held: dict[Any, list[dict[str, Any]]] = {}
        self.calls: list[str] = []
        self._schema: pa.Schema | None = None

    def open(self, metrics: CacheMetricGroup) -> None:
        self.calls.append("open")

    def get_many(self, keys: pa.Table) -> CachedRows:
        self.calls.append("get")
        return self._rows(keys)

    def peek_many(self, keys: pa.Table) -> CachedRows:
        self.calls.append("peek")
        return self._rows(keys)

    def _rows(self, keys: pa.Table) -> CachedRows:
        wanted = keys.column("id").to_pylist()
        present = np.array([key in self.held for key in wanted], np.bool_)
        if self._schema is None:
            return CachedRows(present, None)
        rows = [{**row, KEY_INDEX: n} for n, key in enumerate(wanted) for row in self.held.get(key, ())]
        return CachedRows(present, pa.Table.from_pylist(rows, self._schema))

    def put_many(self, keys: pa.Table, rows: pa.Table, ages_s: Any = None) -> None:
        self.calls.append("put")
        self._schema = rows.schema
        for n, key in enumerate(keys.column("id").to_pylist()):
            self.held[key] = [row for row in rows.to_pylist() if row[KEY_INDEX] == n]

    def invalidate_many(self, keys: pa.Table) -> None:
        for key in keys.column("id").to_pylist():
            self.held.pop(key, None)

    def size(self) -> int:
        return len(self.held)

    def bytes(self) -> int:
        return 100 * len(self.held)

    def close(self) -> None:
        self.calls.append("close")
        self.held.clear()


@KINDS
def test_a_cache_of_its_own(desk: Desk, kind: str) -> None:
    """A provider's own cache is asked first and told what was loaded; no option is needed, and a version() neither."""
    function, cache = made(kind, rows_of(USERS)), DictCache()
    table = desk.serve(function, cache=cache)
    assert [names(table, key) for key in (1, 3, 1, 3, 2)] == [["Alice"], [], ["Alice"], [], ["Bob", "Charlie"]]
    assert function.log.asked == [[1], [3], [2]]
    assert {key: [row["name"] for row in rows] for key, rows in cache.held.items()} == {
        1: ["Alice"],
        3: [],
        2: ["Bob", "Charlie"],
    }
    assert counted(table) == {"hitCount": 2, "missCount": 3, "loadCount": 3}
    gauges = table.metrics()
    assert (gauges["numCachedRecords"], gauges["numCachedBytes"]) == (3, 300)
    assert cache.calls.count("open") == 1
    cache.invalidate({"id": 1})
    assert names(table, 1) == ["Alice"]
    assert function.log.asked[-1] == [1]


def test_a_cache_of_its_own_is_emptied_for_a_new_version(desk: Desk) -> None:
    """It holds rows of one version: when there is another it is closed and opened anew."""
    version, held, cache = ["1"], {1: ["Alice"]}, DictCache()
    function = SyncFunction(rows_of(held))
    table = desk.serve(function, version=lambda: version[0], cache=cache)
    assert (names(table, 1), names(table, 1)) == (["Alice"], ["Alice"])
    version[0], held[1] = "2", ["Alicia"]
    assert (names(table, 1), names(table, 1)) == (["Alicia"], ["Alicia"])
    assert function.log.asked == [[1], [1]]
    assert [call for call in cache.calls if call in ("open", "close")] == ["open", "close", "open"]


def test_a_cache_of_its_own_is_one_processs(desk: Desk) -> None:
    """Nobody knows its bounds but its class, so nothing of it is shared by the host."""
    functions = [SyncFunction(rows_of(USERS)) for _ in range(2)]
    left = iter(functions)
    table = desk.table(lambda context: provider(next(left), cache=DictCache()))
    table.get(1)
    desk.restart()
    table.get(1)
    assert [function.log.asked for function in functions] == [[[1]], [[1]]]


@KINDS
def test_a_failure_tells_a_cache_nothing(desk: Desk, kind: str) -> None:
    """What could not be looked up is not put."""
    cache = DictCache()
    table = desk.serve(made(kind, raises(OSError())), ONCE, cache=cache)
    with pytest.raises(LookupFunctionError):
        table.get(1)
    assert "put" not in cache.calls
    assert counted(table) == {"missCount": 1, "numLoadFailures": 1}


@KINDS
def test_a_default_cache_of_its_own(desk: Desk, kind: str) -> None:
    """A DefaultLookupCache brings the bounds that it was built with; with them its host shares what was loaded."""
    functions: list[Function] = []

    def factory(context: LookupContext) -> LookupProvider:
        functions.append(made(kind, rows_of(USERS)))
        cache = DefaultLookupCache(expire_after_write_s=60.0, cache_missing_key=False, clock=desk.clock.host().steady_s)
        return provider(functions[-1], cache=cache)

    table = desk.table(factory)
    assert [names(table, key) for key in (1, 3, 1, 3)] == [["Alice"], [], ["Alice"], []]
    assert functions[0].log.asked == [[1], [3], [3]]
    desk.restart()
    desk.clock.tick(59)
    assert names(table, 1) == ["Alice"]
    assert functions[1].log.asked == []
    desk.clock.tick(1)
    assert names(table, 1) == ["Alice"]
    assert functions[1].log.asked == [[1]]


def test_a_default_cache_of_its_own_must_expire_or_have_versions(desk: Desk) -> None:
    """Without a version its rows would never be too old."""
    function = SyncFunction(rows_of(USERS))
    forever = DefaultLookupCache.new_builder().max_rows(5).build()
    with pytest.raises(OptionError, match=r"has no version\(\), so nothing tells when a row has changed"):
        desk.serve(function, cache=forever)
    assert names(desk.serve(function, cache=forever, version=lambda: "1"), 1) == ["Alice"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({**PARTIAL}, "lookup.partial-cache.expire-after-write: provider .* brings a cache of its own"),
        ({"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": 5}, "brings a cache of its own"),
        ({"lookup.cache": "NONE"}, "lookup.cache = 'NONE': provider .* brings a cache of the kind 'PARTIAL'"),
        ({"lookup.cache": "FULL"}, "lookup.cache = 'FULL': provider .* brings a cache of the kind 'PARTIAL'"),
    ],
    ids=["expiry", "rows", "NONE", "FULL"],
)
@pytest.mark.parametrize(
    "cache", [DictCache, lambda: DefaultLookupCache(expire_after_write_s=60.0)], ids=["own", "default"]
)
@KINDS
def test_options_beside_a_cache_of_its_own(
    desk: Desk, kind: str, cache: Callable[[], LookupCache], options: Options, says: str
) -> None:
    """Bounds of another cache would be ignored, and another kind is a contradiction: both are refused."""
    with pytest.raises(OptionError, match=says):
        desk.serve(made(kind, rows_of(USERS)), options, cache=cache())


def test_a_cache_of_its_own_may_be_asked_for(desk: Desk) -> None:
    """Saying lookup.cache=PARTIAL beside it is no contradiction."""
    function = SyncFunction(rows_of(USERS))
    table = desk.serve(function, {"lookup.cache": "PARTIAL"}, cache=DictCache())
    assert (names(table, 1), names(table, 1)) == (["Alice"], ["Alice"])
    assert len(function.log.asked) == 1


def test_a_cache_of_its_own_serves_one_table(desk: Desk, tmp_path: Path) -> None:
    """Tables with cache directories of their own see each other's rows of an older version as little as any others."""
    version, held = ["1"], {1: ["Alice"]}
    name = desk.name(
        lambda context: provider(SyncFunction(rows_of(held)), version=lambda: version[0], cache=DictCache())
    )
    one, two = (desk.table(name, {"lookup.cache.dir": str(tmp_path / place)}) for place in ("one", "two"))
    assert names(one, 1) == ["Alice"]
    version[0], held[1] = "2", ["Alicia"]
    assert names(two, 1) == ["Alicia"]


# --- whole tables ---------------------------------------------------------------------------------

PEOPLE = {1: ["Julian"], 3: ["Jark", "Jackson"], 4: ["Fabian"]}


class Manual(CacheReloadTrigger):
    """Reloads when a test says so."""

    def __init__(self) -> None:
        self.opened, self.closed = threading.Event(), threading.Event()
        self._context: CacheReloadTrigger.Context | None = None

    def open(self, context: CacheReloadTrigger.Context) -> None:
        self._context = context
        self.opened.set()

    def close(self) -> None:
        self.closed.set()

    def fire(self) -> None:
        """A reload now; raises what it raises."""
        assert self.opened.wait(BOUND_S)
        assert self._context is not None
        self._context.trigger_reload().result(BOUND_S)


class Whole:
    """A table that is scanned: `people` are its rows, `scans` counts, `problem` is raised by the next scans."""

    def __init__(self, people: Mapping[int, Sequence[str]] = PEOPLE) -> None:
        self.people = dict(people)
        self.version = "1"
        self.scans = 0
        self.problem: Exception | None = None
        self.trigger: Manual | None = None

    def scan(self) -> Iterator[pa.RecordBatch]:
        self.scans += 1
        for key, found in self.people.items():
            if self.problem is not None and key > 1:
                raise self.problem
            yield pa.RecordBatch.from_pydict({"id": [key] * len(found), "name": list(found)}, SCHEMA)

    def triggered(self, context: LookupContext) -> LookupProvider:
        self.trigger = Manual()
        return FullCachingLookupProvider(self.scan, SCHEMA, self.trigger)

    def versioned(self, context: LookupContext) -> LookupProvider:
        return FullCachingLookupProvider(self.scan, SCHEMA, version=lambda: self.version)

    def plain(self, context: LookupContext) -> LookupProvider:
        return FullCachingLookupProvider(self.scan, SCHEMA)


def everybody(table: LookupTable) -> dict[int, list[str]]:
    """All rows of a scan, by id."""
    found: dict[int, list[str]] = {}
    for row in table.scan().to_pylist():
        found.setdefault(row["id"], []).append(row["name"])
    return found


def test_a_whole_table_is_loaded_by_the_first_lookup(desk: Desk) -> None:
    """Nothing is scanned before; then every lookup and scan is answered from one copy, absences included."""
    whole = Whole()
    table = desk.table(whole.triggered)
    assert whole.scans == 0
    assert [names(table, key) for key in (1, 2, 3, 4)] == [["Julian"], [], ["Jark", "Jackson"], ["Fabian"]]
    assert everybody(table) == PEOPLE
    assert table.get(None) == []
    assert whole.scans == 1
    assert counted(table) == {"hitCount": 4, "loadCount": 1}
    gauges = table.metrics()
    assert (gauges["numCachedRecords"], gauges["snapshotReadThroughCount"]) == (4, 0)
    assert gauges["latestLoadTime"] >= 0


def test_a_trigger_of_its_own_reloads(desk: Desk) -> None:
    """Rows that came, changed and went are seen after the trigger fired, and not before."""
    whole = Whole()
    table = desk.table(whole.triggered)
    assert [names(table, key) for key in (1, 2, 4)] == [["Julian"], [], ["Fabian"]]
    whole.people = {2: ["Alex"], 3: PEOPLE[3], 4: ["Frank"]}
    desk.clock.tick(1)
    assert [names(table, key) for key in (1, 2, 4)] == [["Julian"], [], ["Fabian"]]
    assert whole.trigger is not None
    whole.trigger.fire()
    assert [names(table, key) for key in (1, 2, 4)] == [[], ["Alex"], ["Frank"]]
    assert everybody(table) == whole.people
    assert counted(table)["loadCount"] == 2
    table.close()
    assert whole.trigger.closed.wait(BOUND_S)


def test_a_reload_that_fails_leaves_what_there_is(desk: Desk) -> None:
    """The last copy goes on serving, the trigger learns of the failure, and a later reload is not lost."""
    whole = Whole()
    table = desk.table(whole.triggered)
    assert names(table, 1) == ["Julian"]
    whole.people, whole.problem = {1: ["Julia"], 2: ["Alex"]}, ValueError("cut off")
    desk.clock.tick(1)
    assert whole.trigger is not None
    with pytest.raises(LookupFunctionError, match=r"scan\(\) of provider .* failed: ValueError\('cut off'\)"):
        whole.trigger.fire()
    assert [names(table, key) for key in (1, 2)] == [["Julian"], []]
    assert counted(table) == {"hitCount": 3, "loadCount": 1, "numLoadFailures": 1}
    whole.problem = None
    whole.trigger.fire()
    assert [names(table, key) for key in (1, 2)] == [["Julia"], ["Alex"]]


@pytest.mark.parametrize("make", ["triggered", "versioned"])
def test_reload_now(desk: Desk, make: str) -> None:
    """`LookupTable.reload` copies the table as it is; where a version says that nothing changed it scans nothing."""
    whole = Whole()
    table = desk.table(getattr(whole, make))
    first = table.reload()
    assert (names(table, 1), whole.scans) == (["Julian"], 1)
    desk.clock.tick(1)
    assert (table.reload() == first) == (make == "versioned")
    whole.people, whole.version = {1: ["Julia"]}, "2"
    desk.clock.tick(1)
    assert table.reload() != first
    assert everybody(table) == {1: ["Julia"]}
    assert whole.scans == (2 if make == "versioned" else 3)


def test_a_first_load_that_fails(desk: Desk) -> None:
    """Without versions the first lookup raises what the scan raised, and the next one tries again."""
    whole = Whole()
    whole.problem = ValueError("cut off")
    name = desk.name(whole.triggered)
    table = desk.table(name)
    for _ in range(2):
        with pytest.raises(LookupFunctionError, match=r"scan\(\) .* failed: ValueError\('cut off'\)") as caught:
            table.get(1)
        assert name in str(caught.value)
    assert counted(table) == {"numLoadFailures": 2}
    whole.problem = None
    assert names(table, 1) == ["Julian"]


def test_a_new_version_is_copied_by_the_next_lookup(desk: Desk) -> None:
    """Where there is a version no trigger is needed: a lookup of another version copies the table."""
    whole = Whole()
    table = desk.table(whole.versioned)
    assert (names(table, 1), names(table, 1), whole.scans) == (["Julian"], ["Julian"], 1)
    for number in range(2, 6):
        whole.version, whole.people = str(number), {1: [f"n{number}"], number: ["x"]}
        assert names(table, 1) == [f"n{number}"]
        assert everybody(table) == whole.people
        assert whole.scans == number
    assert table.metrics()["numCachedRecords"] == 2


def test_another_process_uses_the_copy(desk: Desk) -> None:
    """A host copies a version once."""
    whole = Whole()
    table = desk.table(whole.versioned)
    assert names(table, 1) == ["Julian"]
    desk.restart()
    assert names(table, 3) == ["Jark", "Jackson"]
    assert whole.scans == 1


def test_schedules_of_the_options(desk: Desk) -> None:
    """A provider with neither a trigger nor a version is reloaded as the options say, or refused without any."""
    whole = Whole()
    with pytest.raises(
        OptionError, match=r"neither a reload trigger nor a version\(\): set lookup.full-cache.reload-strategy"
    ):
        desk.table(whole.plain)
    periodic = {"lookup.cache": "FULL", "lookup.full-cache.periodic-reload.interval": "5 min"}
    table = desk.table(whole.plain, periodic)
    assert names(table, 1) == ["Julian"]
    timed = {
        "lookup.cache": "FULL",
        "lookup.full-cache.reload-strategy": "TIMED",
        "lookup.full-cache.timed-reload.iso-time": "10:15Z",
    }
    assert names(desk.table(whole.plain, timed), 1) == ["Julian"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lookup.cache": "NONE"}, "lookup.cache = 'NONE': provider .* brings a cache of the kind 'FULL'"),
        (PARTIAL, "lookup.cache = 'PARTIAL': provider .* brings a cache of the kind 'FULL'"),
        ({"lookup.metadata.source": "UFS"}, r"lookup.metadata.source = 'UFS': provider .* has no version\(\)"),
    ],
    ids=["NONE", "PARTIAL", "UFS"],
)
def test_options_beside_a_whole_table(desk: Desk, options: Options, says: str) -> None:
    """Another kind of cache, and versions where there are none, are contradictions."""
    with pytest.raises(OptionError, match=says):
        desk.table(Whole().triggered, options)


def test_a_failed_reload_may_be_an_error(desk: Desk) -> None:
    """With on-reload-failure=FAIL nothing is answered after a reload that failed, until one succeeds."""
    whole = Whole()
    options = {
        "lookup.cache": "FULL",
        "lookup.metadata.source": "CACHE",
        "lookup.full-cache.periodic-reload.interval": "365 d",
        "lookup.full-cache.on-reload-failure": "FAIL",
    }
    table = desk.table(whole.plain, options)
    assert names(table, 1) == ["Julian"]
    whole.problem = ValueError("cut off")
    desk.clock.tick(1)
    with pytest.raises(LookupFunctionError):
        table.reload()
    with pytest.raises(ReloadFailedError, match="cut off"):
        table.get(1)
    whole.problem = None
    table.reload()
    assert names(table, 1) == ["Julian"]


SCANS: dict[str, tuple[Callable[[], Any], str]] = {
    "None": (lambda: None, "TypeError"),
    "dictionaries": (lambda: [{"id": 1, "name": "x"}], "TypeError"),
    "one batch and no list": (lambda: pa.RecordBatch.from_pydict({"id": [1], "name": ["x"]}), "TypeError"),
    "a column less": (lambda: [pa.RecordBatch.from_pydict({"id": [1]})], "column 'name' is missing"),
    "an unknown column": (
        lambda: [pa.RecordBatch.from_pydict({"id": [1], "name": ["x"], "zip": [1]})],
        "column 'zip' is not in its schema",
    ),
    "another type": (lambda: [pa.RecordBatch.from_pydict({"id": [1], "name": [1]})], "column 'name' is int64"),
}


@pytest.mark.parametrize("bad", SCANS)
def test_bad_scans(desk: Desk, bad: str) -> None:
    """A scan that gives anything but the schema's columns is an error, and no copy of it is kept."""
    scan, says = SCANS[bad]
    scans = [scan, lambda: [pa.RecordBatch.from_pydict({"name": ["x"], "id": pa.array([1], pa.int8())})]]
    name = desk.name(lambda context: FullCachingLookupProvider(lambda: in_order(scans), SCHEMA, Manual()))
    table = desk.table(name)
    with pytest.raises(LookupFunctionError, match=says) as caught:
        table.get(1)
    assert name in str(caught.value)
    desk.clock.tick(1)
    assert names(table, 1) == ["x"]


def test_an_empty_table(desk: Desk) -> None:
    """No batches are no rows."""
    whole = Whole({})
    table = desk.table(whole.versioned)
    assert (table.get(1), everybody(table)) == ([], {})
    assert table.scan().schema.equals(SCHEMA)


def test_rows_without_a_key_are_scanned(desk: Desk) -> None:
    """A row whose key is null is nobody's answer, but a row of the table."""
    batch = pa.RecordBatch.from_pydict({"id": [None, 1], "name": ["x", "y"]}, SCHEMA)
    table = desk.table(lambda context: FullCachingLookupProvider(lambda: [batch], SCHEMA, Manual()))
    assert pairs(table, None, 1) == [(1, "y")]
    assert table.scan().num_rows == 2


def test_a_whole_table_by_predicate_and_columns(desk: Desk) -> None:
    """Columns and predicates of the options and of a scan hold for a copy as for files."""
    whole = Whole()
    table = desk.table(whole.versioned, {"lookup.columns": "name", "lookup.where": "id > 1"})
    assert table.scan().column_names == ["name"]
    assert sorted(table.scan().column("name").to_pylist()) == ["Fabian", "Jackson", "Jark"]
    assert table.scan(["name"], "name = 'Jark'").to_pydict() == {"name": ["Jark"]}
    assert (table.get(1), table.get(4)) == ([], [{"id": 4, "name": "Fabian"}])


@pytest.mark.parametrize("why", ["no directory", "no time to wait"])
def test_a_whole_table_without_a_copy(desk: Desk, why: str) -> None:
    """Where there is no copy, or not yet, a lookup scans the provider's table."""
    whole = Whole()
    options: Options = {"lookup.cache": "FULL", "lookup.full-cache.build-wait": "0 s"}
    if why == "no directory":
        options = {"lookup.cache.dir": "/proc/no/such/directory"}
    table = desk.table(whole.versioned, options)
    assert [names(table, key) for key in (1, 2, 3)] == [["Julian"], [], ["Jark", "Jackson"]]


def test_a_copy_of_a_version_that_fails(desk: Desk) -> None:
    """A scan that fails is the lookup's error, with what the provider said."""
    whole = Whole()
    whole.problem = ValueError("cut off")
    table = desk.table(whole.versioned)
    with pytest.raises(LookupFunctionError, match="cut off"):
        table.get(1)


def test_a_whole_table_with_some_columns(desk: Desk) -> None:
    """A factory that brings no other columns than it was told brings enough for a copy, too."""
    schema = pa.schema([*SCHEMA, ("blob", pa.binary())])

    def factory(context: LookupContext) -> LookupProvider:
        wanted = [*context.keys, *(schema.names[1:] if context.columns is None else context.columns)]
        rows = pa.Table.from_pylist([{"id": 1, "name": "Alice"}], schema).select(wanted)
        return FullCachingLookupProvider(rows.to_batches, schema, version=lambda: "1")

    table = desk.table(factory, {"lookup.columns": "name"})
    assert table.scan().to_pylist() == [{"name": "Alice"}]
    assert table.get(1) == [{"id": 1, "name": "Alice"}]


def test_a_schedule_beside_a_trigger_of_its_own(desk: Desk) -> None:
    """An interval that would be ignored is refused, as bounds beside a cache of its own are."""
    options = {"lookup.cache": "FULL", "lookup.full-cache.periodic-reload.interval": "5 min"}
    with pytest.raises(OptionError, match=r"lookup.full-cache.periodic-reload.interval"):
        desk.table(Whole().triggered, options)


@pytest.mark.parametrize("options", [{}, {"lookup.cache": "FULL"}], ids=["alone", "with FULL"])
def test_a_trigger_of_its_own_is_enough(desk: Desk, options: Options) -> None:
    """Saying what holds anyway, lookup.metadata.source=CACHE, takes no interval that is never used."""
    assert names(desk.table(Whole().triggered, {"lookup.metadata.source": "CACHE", **options}), 1) == ["Julian"]


def test_a_new_version_is_written_once(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a whole table takes the place of the one before it: there is nothing to make one of."""
    folds: list[int] = []
    monkeypatch.setattr(full, "_is_worth_folding", lambda snapshot: folds.append(len(snapshot.layers)))
    whole = Whole()
    table = desk.table(whole.versioned)
    for number in range(3):
        whole.version = str(number)
        table.reload()
    assert folds == [1, 1, 1]


# --- scans of tables that are asked by key --------------------------------------------------------


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


# --- keys of other kinds --------------------------------------------------------------------------


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


# --- any history ----------------------------------------------------------------------------------

IDS = st.integers(0, 12) | st.none()


@settings(max_examples=40, deadline=None)
@given(
    batches=st.lists(st.lists(IDS, max_size=8), min_size=1, max_size=6),
    rows=st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["x", "y", ""])), max_size=12),
    size=st.integers(1, 4),
    kind=st.sampled_from(["sync", "async"]),
    seed=st.integers(0, 99),
    fails=st.sets(st.integers(0, 8), max_size=3),
)
def test_any_history(
    batches: list[list[int | None]],
    rows: list[tuple[int, str]],
    size: int,
    kind: str,
    seed: int,
    fails: set[int],
) -> None:
    """Whatever is asked and fails in whatever pieces: answers are those of a dictionary, each key is loaded until it is held, counters add up."""
    held: dict[int, list[str]] = {}
    for key, name in rows:
        held.setdefault(key, []).append(name)
    shuffled = random.Random(seed)
    calls = itertools.count()

    def answer(keys: pa.Table) -> pa.Table:
        if next(calls) in fails:
            raise OSError("down")
        order = rows_of(held)(keys).column("id").to_pylist()
        shuffled.shuffle(order)
        left = {key: iter(held[key]) for key in order}
        return pa.table({"id": order, "name": [next(left[key]) for key in order]}, schema=SCHEMA)

    function = made(kind, answer, size)
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as monkeypatch:
        desk = Desk(Path(directory) / "cache", monkeypatch)
        table = desk.serve(function, {**PARTIAL, **ONCE})
        known: set[int] = set()
        hits = misses = failures = 0
        for batch in batches:
            valid = [key for key in batch if key is not None]
            new = set(valid) - known
            misses, hits = misses + len(new), hits + len(valid) - len(new)
            expected = [(n, name) for n, key in enumerate(batch) for name in held.get(key, ())]  # type: ignore[arg-type]
            before = len(function.log.asked)
            try:
                assert pairs(table, *batch) == expected
                known |= new
                assert sorted(itertools.chain(*function.log.asked[before:])) == sorted(new)
            except LookupFunctionError:
                failures += len(new)
            assert all(len(keys) <= size for keys in function.log.asked)
        metrics = table.metrics()
        assert [metrics[name] for name in FLIP] == [hits, misses, misses - failures, failures]
        if batches and any(key is not None for batch in batches for key in batch):
            assert metrics["numCachedRecords"] == sum(max(len(held.get(key, ())), 1) for key in known)
        desk.close()


# --- other processes ------------------------------------------------------------------------------

FORK_EVENTS: list[tuple[int, str]] = []
FORK_GATE = threading.Event()
FORK_HANGS = threading.Event()


class Forked(LookupFunction):
    """Says which process does what; hangs for the key 13."""

    def open(self) -> None:
        FORK_EVENTS.append((os.getpid(), "open"))

    def lookup(self, keys: pa.Table) -> pa.Table:
        FORK_EVENTS.append((os.getpid(), f"lookup {keys.column('id').to_pylist()}"))
        if (
            keys.column("id").to_pylist() == [13]
            and multiprocessing.parent_process() is not None
            and FORK_HANGS.is_set()
        ):
            FORK_GATE.wait(BOUND_S)
        return rows_of({**USERS, 13: ["Judas"]})(keys)


def forked_users(context: LookupContext) -> LookupProvider:
    """A factory that a new process can import."""
    return provider(Forked())


def in_child(table: LookupTable, pipe: Connection) -> None:
    """Use in a forked child what its parent uses."""
    inherited = len(FORK_EVENTS)
    found = [names(table, 1), names(table, 2), table.get(3)]
    pipe.send((os.getpid(), found, FORK_EVENTS[inherited:]))


def use_and_fork(cache_dir: str, cache: Options, pipe: Connection) -> None:
    """Look up, fork while a lookup hangs, look up in both; tell who did what."""
    fixed = {"lookup.provider": "tests.test_providers:forked_users", "lookup.keys": "id", "lookup.cache.dir": cache_dir}
    table = LookupTable(None, {**fixed, **cache})
    first = names(table, 1)
    FORK_HANGS.set()
    hanging = beside(lambda: names(table, 13))
    while len(FORK_EVENTS) < 3:
        FORK_GATE.wait(0.001)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=in_child, args=(table, theirs))
    child.start()
    told = ours.recv() if ours.poll(BOUND_S) else "the forked child hangs"
    if told == "the forked child hangs":
        child.kill()
    child.join()
    FORK_GATE.set()
    pipe.send((os.getpid(), first, hanging(BOUND_S), names(table, 2), told, FORK_EVENTS, table.metrics()["missCount"]))


@CACHES
def test_a_forked_child_opens_a_function_of_its_own(tmp_path: Path, cache: Options) -> None:
    """A table that was used before a fork answers in the child, by a new function, even while the parent's hangs."""
    # In a spawned process: this one has threads and must not fork.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=use_and_fork, args=(str(tmp_path / "cache"), cache, theirs))
    process.start()
    told = ours.recv() if ours.poll(BOUND_S + 30) else None
    process.join(BOUND_S)
    if process.is_alive():
        process.kill()
    assert told is not None, "the process hangs"
    parent, first, hanging, after, in_fork, events, misses = told
    child, found, of_child = in_fork
    assert (first, hanging, after) == (["Alice"], ["Judas"], ["Bob", "Charlie"])
    assert found == [["Alice"], ["Bob", "Charlie"], []]
    assert child != parent
    assert {pid for pid, _ in of_child} == {child}
    assert {pid for pid, _ in events} == {parent}
    # With a cache the host shares the first row, and the child shares its own with its parent.
    mine = ["open", "lookup [1]", "lookup [13]"]
    assert [event for _, event in events] == (mine if cache else [*mine, "lookup [2]"])
    expected = ["open", "lookup [1]", "lookup [2]", "lookup [3]"]
    assert [event for _, event in of_child] == [event for event in expected if not cache or event != "lookup [1]"]
    assert misses == (4 if cache else 0)


@KINDS
def test_a_pickled_table_is_the_same_table(desk: Desk, kind: str) -> None:
    """A copy made by pickling has the same options: in one process, the same provider and cache."""
    function = made(kind, rows_of(USERS))
    table = desk.serve(function, PARTIAL)
    assert names(table, 1) == ["Alice"]
    copy = pickle.loads(pickle.dumps(table))
    assert names(copy, 1) == ["Alice"]
    assert function.log.asked == [[1]]


def test_what_a_table_says_of_itself(desk: Desk) -> None:
    """Its path is the provider's name, its version another for each text of version(), its options are shown."""
    version = ["1"]
    name = desk.name(lambda context: provider(SyncFunction(rows_of(USERS)), version=lambda: version[0]))
    table = desk.table(name, {"lookup.provider.region": "eu"})
    first = table.describe()
    assert first["path"].startswith(f"provider:{name}/")
    assert first["columns"] == {"id": "int64", "name": "string"}
    assert "lookup.provider.region='eu'" in first["options"]
    assert table.version == first["version"]
    version[0] = "2"
    assert table.version != first["version"]
    version[0] = "1"
    assert table.version == first["version"]
    with pytest.raises(OptionError, match=r"only lookup.cache = 'FULL' has a snapshot"):
        table.reload()
