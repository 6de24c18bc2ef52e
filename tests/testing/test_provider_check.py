"""The checks of providers: what keeps the rules passes, and for each rule there is a provider that breaks it, which they notice."""

import asyncio
import contextlib
import itertools
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import pyspark_lookup
from pyspark_lookup.cache.lookup_cache import Key
from pyspark_lookup.sources.providers.functions import (
    AsyncLookupFunction,
    AsyncLookupFunctionProvider,
    DatedRows,
    FullCachingLookupProvider,
    LookupContext,
    LookupFunction,
    LookupFunctionProvider,
    LookupProvider,
    PartialCachingLookupProvider,
)
from pyspark_lookup.testing import RULES, ProviderCheckError, check_provider
from tests.support.changed_keys import changed_keys, list_keys
from tests.support.key_values import KINDS
from tests.support.memory_cache import Dictionary

SCHEMA = pa.schema([("id", pa.int64()), ("place", pa.string()), ("name", pa.string()), ("n", pa.float64())])
VALUES = [
    (1, "Oslo", "one", 1.5), (1, "Bergen", None, math.nan), (2, "Oslo", "two", -0.0), (2, "Oslo", "zwei", None),
    (2, "Oslo", "zwei", None), (3, "bergen", "", 3.0), (None, "Oslo", "no key", 4.0),
]  # fmt: skip
ROWS = pa.Table.from_pylist([dict(zip(SCHEMA.names, row, strict=True)) for row in VALUES], SCHEMA)
KEYS = ("id", "place")
QUICK_S = 0.3  # what hangs does so at least this long
Tuple = tuple[Any, ...]


class Shelf:
    """A table of another system, in memory: it has a version, and tells which keys have changed."""

    def __init__(self, rows: pa.Table = ROWS, keys: Sequence[str] = KEYS) -> None:
        self.rows, self.keys = rows, tuple(keys)
        self.writes: list[pa.Table] = []
        self.down = False
        self.sessions = 0
        self.connected = False
        self.owner: int | None = None  # the process that connected first
        self.files: list[int] = []

    def write(self, rows: pa.Table) -> None:
        changed, self.rows = changed_keys(self.rows, rows, self.keys), rows
        self.writes.append(changed)

    def answer(self) -> None:
        if self.down:
            raise ConnectionError("down")

    def version(self) -> str:
        self.answer()
        return f"v{len(self.writes)}"

    def changes(self, since: str) -> pa.Table | None:
        self.answer()
        return pa.concat_tables([self.rows.select(self.keys).slice(0, 0), *self.writes[int(since[1:]) :]])

    def scan(self) -> Iterator[pa.RecordBatch]:
        for batch in self.rows.to_batches(max_chunksize=3):
            self.answer()
            yield batch

    def find(self, keys: pa.Table) -> pa.Table:
        requested, rows = {*list_keys(keys, keys.column_names)}, self.rows
        return rows.filter(pa.array([key in requested for key in list_keys(rows, keys.column_names)], pa.bool_()))

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        self.down, self.sessions = True, self.sessions + 1
        yield
        self.down = False


class Function(LookupFunction):
    """Looks up rows on a shelf, over a session that is lost in an outage."""

    def __init__(self, shelf: Shelf, context: LookupContext) -> None:
        self.shelf, self.context = shelf, context
        self.session: int | None = None

    def open(self) -> None:
        self.shelf.answer()
        self.session = self.shelf.sessions

    def lookup(self, keys: pa.Table) -> pa.Table:
        if self.session != self.shelf.sessions or self.shelf.down:
            self.session = None
            self.open()
        return self.select_columns(self.shelf.find(keys))

    def select_columns(self, rows: pa.Table) -> pa.Table:
        """Only the columns that are read."""
        columns = self.context.columns
        return rows if columns is None else rows.select([*self.context.keys, *columns])

    def close(self) -> None:
        self.session = None


class AsyncFunction(AsyncLookupFunction):
    """The same, after others had their turn."""

    def __init__(self, shelf: Shelf, context: LookupContext) -> None:
        self.inner = Function(shelf, context)

    async def open(self) -> None:
        self.inner.open()

    async def lookup(self, keys: pa.Table) -> pa.Table:
        await asyncio.sleep(0)
        return self.inner.lookup(keys)

    async def close(self) -> None:
        self.inner.close()


def provider(
    shelf: Shelf,
    function: Callable[[Shelf, LookupContext], Any] = Function,
    schema: pa.Schema | None = None,
    version: Callable[[], Any] | None = None,
    **more: Any,
) -> Callable[[LookupContext], LookupProvider]:
    """The factory of a provider that looks up with this function, and has these attributes, too."""

    def make(context: LookupContext) -> LookupProvider:
        instance = function(shelf, context)
        asynchronous = isinstance(instance, AsyncLookupFunction)
        kind = AsyncLookupFunctionProvider if asynchronous else LookupFunctionProvider
        result = kind(instance, schema or shelf.rows.schema, version or shelf.version)
        vars(result).update(more)
        return result

    return make


def check(shelf: Shelf, factory: Any, **more: Any) -> None:
    check_provider(factory, shelf.rows, shelf.keys, timeout_s=20.0, largest_call=500, **more)


@pytest.mark.parametrize("function", [Function, pytest.param(AsyncFunction, marks=pytest.mark.nightly)])
def test_a_provider_that_keeps_the_rules(function: Any) -> None:
    """A provider that keeps the rules passes, whatever it can do; the table has its rows back after the writes of the check."""
    shelf = Shelf()
    factory = provider(shelf, function, changes=shelf.changes, scan=shelf.scan)
    check(shelf, factory, write=shelf.write, outage=shelf.outage)
    assert shelf.rows is ROWS
    assert not shelf.down


@pytest.mark.nightly
def test_a_provider_without_versions_and_one_without_lookups() -> None:
    """A provider without versions, and one without lookups, pass, with a client that must not be used before a fork; so does one that supplies a cache."""
    shelf = Shelf()

    def unversioned(context: LookupContext) -> LookupProvider:
        return LookupFunctionProvider(Function(shelf, context), SCHEMA)

    def scanned(context: LookupContext) -> LookupProvider:
        return FullCachingLookupProvider(shelf.scan, SCHEMA, version=shelf.version)

    def caching(context: LookupContext) -> LookupProvider:
        return PartialCachingLookupProvider(Function(shelf, context), Dictionary(), SCHEMA)

    for factory in (unversioned, scanned, caching):
        check(shelf, factory, write=shelf.write, outage=shelf.outage, survives_fork=False)


@pytest.mark.nightly
def test_keys_of_every_type() -> None:
    """A provider passes with keys of all types at once, among them those that look alike, and with a key that is not a number."""
    draws = {
        pa.bool_(): [True, False, True], pa.float32(): [math.nan, -0.0, 1.5], pa.float64(): [math.nan, -0.0, 0.1],
        pa.string(): ["Straße", "a ", "é"], pa.binary(): [b"", b"\0", b"\xff"],
    }  # fmt: skip
    columns = {f"k{n}": pa.array(draws.get(kind, [1, 2, 3]), kind) for n, kind in enumerate(KINDS)}
    shelf = Shelf(pa.table({**columns, "v": [1, 2, 3]}), list(columns))
    check(shelf, provider(shelf), write=shelf.write)


# --- providers that break a rule ----------------------------------------------------------------------


def lookup(answer: Callable[[Function, pa.Table], Any], **attributes: Any) -> Callable[[Shelf, LookupContext], Any]:
    """Functions that look up so."""
    return type("Broken", (Function,), {"lookup": answer, **attributes})


def fail_values(is_bad: Callable[[Any], bool]) -> Callable[[Shelf, LookupContext], Any]:
    """Functions that fail for some values."""

    def answer(self: Function, keys: pa.Table) -> pa.Table:
        if any(is_bad(value) for column in keys.columns for value in column.to_pylist()):
            raise ValueError("out of range")
        return Function.lookup(self, keys)

    return lookup(answer)


def in_place(self: Function, keys: pa.Table) -> pa.Table:
    """A lookup whose results share one piece of memory."""
    rows = Function.lookup(self, keys)
    memory = vars(self).setdefault("memory", np.zeros(1000, np.int64))
    memory[: rows.num_rows] = rows.column("id").to_numpy()
    column = pa.Array.from_buffers(pa.int64(), rows.num_rows, [None, pa.py_buffer(memory)])
    return rows.set_column(0, "id", column)


class Shared(Function):
    """All instances have one session."""

    def open(self) -> None:
        self.shelf.connected = True

    def lookup(self, keys: pa.Table) -> pa.Table:
        if not self.shelf.connected:
            raise ConnectionError("closed")
        return self.select_columns(self.shelf.find(keys))

    def close(self) -> None:
        self.shelf.connected = False


class Once(Function):
    """Cannot be opened again."""

    was_open = False

    def open(self) -> None:
        if self.was_open:
            raise RuntimeError("a pool that was closed")
        self.was_open = True
        super().open()


class Inherited(Function):
    """A function whose connections are those of the process that made the first one."""

    def open(self) -> None:
        self.shelf.owner = self.shelf.owner or os.getpid()
        if self.shelf.owner != os.getpid():
            raise ConnectionError("the answer is that of another process")
        super().open()


class Dying(Inherited):
    """Ends a process that was forked."""

    def open(self) -> None:
        try:
            super().open()
        except ConnectionError:
            os._exit(3)


class Mixing(AsyncFunction):
    """Remembers what it was asked until it answers."""

    async def lookup(self, keys: pa.Table) -> pa.Table:
        self.keys = keys
        await asyncio.sleep(0)
        return self.inner.lookup(self.keys)


class Snapshot(Function):
    """Sees what was there when it was opened."""

    def open(self) -> None:
        super().open()
        self.rows = self.shelf.rows

    def lookup(self, keys: pa.Table) -> pa.Table:
        return self.select_columns(Shelf(self.rows, self.shelf.keys).find(keys))


class Silent(Function):
    """Finds nothing while the system is down."""

    def lookup(self, keys: pa.Table) -> pa.Table:
        return self.select_columns(self.shelf.rows.slice(0, 0) if self.shelf.down else self.shelf.find(keys))


class Lost(Function):
    """Never connects again."""

    def lookup(self, keys: pa.Table) -> pa.Table:
        if self.session != self.shelf.sessions or self.shelf.down:
            raise ConnectionError("broken pipe")
        return self.select_columns(self.shelf.find(keys))


class Leaking(Function):
    """Leaves its connections open."""

    def open(self) -> None:
        leaking(self.shelf, super().open)()


class Pooled(AsyncFunction):
    """Refuses more calls than its pool has connections."""

    calls = 0

    async def lookup(self, keys: pa.Table) -> pa.Table:
        self.calls += 1
        try:
            if self.calls > 50:
                raise ConnectionError("no connection is free")
            return await super().lookup(keys)
        finally:
            self.calls -= 1


class Forgetful(Dictionary):
    """A cache that knows each key, but not its rows."""

    def get_if_present(self, key: Key) -> list[dict[str, Any]] | None:
        return None if super().get_if_present(key) is None else []


def hang(*_: object) -> None:
    threading.Event().wait(2 * QUICK_S)


def strict(shelf: Shelf, context: LookupContext) -> Function:
    """Takes names as they are in the schema only."""
    if context.keys != KEYS:
        raise KeyError(context.keys)
    return Function(shelf, context)


def same_function(shelf: Shelf) -> Callable[[LookupContext], LookupProvider]:
    function = Function(shelf, LookupContext(KEYS, None, {}, None))
    return lambda context: LookupFunctionProvider(function, SCHEMA)


def with_strict_columns(shelf: Shelf) -> Callable[[LookupContext], LookupProvider]:
    """The factory of a provider whose schema depends on the columns that are read."""
    strict_schema = SCHEMA.set(3, SCHEMA.field(3).with_nullable(False))
    return lambda context: provider(shelf, schema=SCHEMA if context.columns is None else strict_schema)(context)


def caching(shelf: Shelf) -> Callable[[LookupContext], LookupProvider]:
    return lambda context: PartialCachingLookupProvider(Function(shelf, context), Forgetful(), SCHEMA)


def by_columns(shelf: Shelf, keys: pa.Table) -> pa.Table:
    """Rows that match each column by itself."""
    requested = [{*keys.column(name).to_pylist()} for name in KEYS]
    mask = [all(v in values for v, values in zip(key, requested, strict=True)) for key in list_keys(shelf.rows, KEYS)]
    return shelf.rows.filter(pa.array(mask, pa.bool_()))


def without_case(shelf: Shelf, keys: pa.Table) -> pa.Table:
    requested = {(id, place.lower()) for id, place in list_keys(keys, KEYS)}
    mask = [id is not None and (id, place.lower()) in requested for id, place in list_keys(shelf.rows, KEYS)]
    return shelf.rows.filter(pa.array(mask, pa.bool_()))


def once_each(rows: pa.Table) -> pa.Table:
    return rows.take(
        pa.array(
            [place for place, row in enumerate(rows.to_pylist()) if row not in rows.to_pylist()[:place]], pa.int64()
        )
    )


def lacking_deleted(shelf: Shelf) -> Callable[[str], pa.Table]:
    def changes(since: str) -> pa.Table:
        keys = shelf.changes(since)
        assert keys is not None
        present = {*list_keys(shelf.rows, KEYS)}
        return keys.filter(pa.array([key in present for key in list_keys(keys, KEYS)], pa.bool_()))

    return changes


def two_halves(shelf: Shelf) -> Callable[[pa.Table], None]:
    """Writes so that others see the first half, if there is somebody who may."""
    was_read = threading.Event()
    find = shelf.find

    def watched(keys: pa.Table) -> pa.Table:
        rows = find(keys)
        was_read.set()
        return rows

    def write(rows: pa.Table) -> None:
        if threading.current_thread().name == "lookupcache-check-write":
            shelf.rows = pa.concat_tables([shelf.rows, rows])
            for _ in range(2):
                was_read.clear()
                was_read.wait(5)
        shelf.write(rows)

    shelf.find = watched  # type: ignore[method-assign]
    return write


def half_scanned(shelf: Shelf) -> Callable[[], Iterator[pa.RecordBatch]]:
    batches = shelf.rows.to_batches()
    scans = itertools.count()
    return lambda: iter(batches if next(scans) < 1 else [])


def at_most(shelf: Shelf, count: int) -> Callable[[], Iterator[pa.RecordBatch]]:
    """Scans the first rows only."""
    return lambda: iter(shelf.rows.slice(0, count).to_batches())


def interrupted(shelf: Shelf) -> Callable[[], Iterator[pa.RecordBatch]]:
    """Ends a scan where it can get no more rows."""

    def scan() -> Iterator[pa.RecordBatch]:
        shelf.answer()
        for batch in shelf.rows.to_batches(max_chunksize=1):
            if shelf.down:
                return
            yield batch

    return scan


def leaking(shelf: Shelf, call: Callable[[], Any]) -> Callable[[], Any]:
    """Leaves a connection open."""

    def connect() -> Any:
        shelf.files.append(os.open(os.devnull, os.O_RDONLY))
        return call()

    return connect


def paged(shelf: Shelf) -> Callable[[], Iterator[pa.RecordBatch]]:
    """Scans page by page, each in a transaction of its own."""

    def scan() -> Iterator[pa.RecordBatch]:
        place = 0
        while page := shelf.rows.slice(place, 50).to_batches():
            place += 50
            yield page[0]

    return scan


def with_keys(shelf: Shelf) -> Callable[[str], pa.Table | None]:
    """Knows no changes of rows without a key."""

    def changes(since: str) -> pa.Table | None:
        keys = shelf.changes(since)
        return None if keys is None else keys.drop_null()

    return changes


def one_session(shelf: Shelf) -> Callable[[LookupContext], LookupProvider]:
    """Lookups and `version()` use one session, which can do one thing at a time."""
    lock = threading.Lock()

    def alone(work: Callable[[], Any]) -> Any:
        if not lock.acquire(blocking=False):
            raise ConnectionError("the session is in use")
        try:
            time.sleep(0.001)  # others have their turn
            return work()
        finally:
            lock.release()

    return provider(
        shelf,
        lookup(lambda self, keys: alone(lambda: Function.lookup(self, keys))),
        version=lambda: alone(shelf.version),
    )


def in_local_time(shelf: Shelf) -> Callable[[LookupContext], LookupProvider]:
    """A provider whose driver converts instants to the time zone of the process."""
    instants = pa.array([n * 10**15 for n in range(ROWS.num_rows)], pa.timestamp("us", "UTC"))
    shelf.rows = ROWS.append_column("at", instants)

    def shifted(self: Function, keys: pa.Table) -> pa.Table:
        rows = Function.lookup(self, keys)
        if "at" not in rows.column_names:
            return rows
        moved = pa.array([n - time.timezone * 10**6 for n in rows["at"].cast(pa.int64()).to_pylist()], pa.int64())
        return rows.set_column(rows.schema.get_field_index("at"), "at", moved.cast(pa.timestamp("us", "UTC")))

    return provider(shelf, lookup(shifted))


def by_bits(shelf: Shelf) -> Callable[[LookupContext], LookupProvider]:
    """Compares floats by their bits."""
    shelf.rows, shelf.keys = pa.table({"f": [-0.0, 1.5, 2.5]}), ("f",)

    def find(self: Function, keys: pa.Table) -> pa.Table:
        requested = {*map(str, keys["f"].to_pylist())}
        return shelf.rows.filter(pa.array([str(f) in requested for f in shelf.rows["f"].to_pylist()], pa.bool_()))

    return provider(shelf, lookup(find))


def other_each_time() -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"{next(numbers)}"


def numbered(shelf: Shelf) -> Callable[[LookupContext], LookupProvider]:
    """Each instance has a version of its own."""
    numbers = itertools.count()

    def make(context: LookupContext) -> LookupProvider:
        number = next(numbers)
        return provider(shelf, version=lambda: f"{number}")(context)

    return make


Broken = Callable[[Shelf], tuple[Any, Mapping[str, Any]]]


_SLOW = {
    "cached", "changes", "fork", "fresh-rows", "new-version", "one-state", "outage", "scan", "thread", "version", "zone",
}  # fmt: skip
_rules_by_day: set[str] = set()


def break_rule(rule: str, text: str, make: Callable[[Shelf], Any], **more: Callable[[Shelf], Any]) -> Any:
    """A provider that breaks a rule, what the check says of it, and the arguments of the check. By day, the first one of rules checked early."""
    by_night = rule in _rules_by_day or rule in _SLOW
    _rules_by_day.add(rule)
    return pytest.param(
        rule,
        text,
        lambda shelf: (make(shelf), {name: value(shelf) for name, value in more.items()}),
        id=f"{rule}: {text}",
        marks=[pytest.mark.nightly] if by_night else [],
    )


def writes(shelf: Shelf) -> Any:
    return shelf.write


def outages(shelf: Shelf) -> Any:
    return shelf.outage


BROKEN = [
    break_rule("kind", "the factory returned None", lambda shelf: lambda context: None),
    break_rule("kind", "make it a LookupFunction", lambda shelf: lambda context: LookupFunctionProvider(AsyncFunction(shelf, context), SCHEMA)),  # type: ignore[arg-type]
    break_rule("kind", "has neither a function nor a scan", lambda shelf: lambda context: LookupProvider(SCHEMA)),
    break_rule("schema", "the schema is ['id']", lambda shelf: provider(shelf, schema=["id"])),  # type: ignore[arg-type]
    break_rule("schema", "column 'id': type time64[us] has no counterpart in Spark", lambda shelf: provider(shelf, schema=SCHEMA.set(0, pa.field("id", pa.time64("us"))))),
    break_rule("schema", "lacks the key column 'place'", lambda shelf: provider(shelf, schema=SCHEMA.remove(1))),
    break_rule("schema", "but the table has", lambda shelf: provider(shelf, schema=SCHEMA.remove(3))),
    break_rule("schema", "column 'n' is string in the schema, but double", lambda shelf: provider(shelf, schema=SCHEMA.set(3, pa.field("n", pa.string())))),
    break_rule("factory", "the factory raised KeyError", lambda shelf: provider(shelf, strict)),
    break_rule("factory", "has not returned within", lambda shelf: hang, timeout_s=lambda shelf: QUICK_S),
    break_rule("factory", "the same function object in two calls", same_function),
    break_rule("factory", "with columns = () in LookupContext, the schema is id int64, place string, name string, n double not null, but otherwise id int64, place string, name string, n double: return", with_strict_columns),
    break_rule("factory", "for the keys ['place', 'id'], lookup of key", lambda shelf: provider(shelf, lookup(lambda self, keys: Function.lookup(self, pa.table(keys.columns, KEYS)) if pa.types.is_integer(keys.column(0).type) else self.select_columns(self.shelf.rows.slice(0, 0))))),
    break_rule("columns", "for the columns [], provider under test", lambda shelf: provider(shelf, type("Narrow", (Function,), {"select_columns": lambda self, rows: rows if self.context.columns is None else rows.select(self.context.columns)}))),
    break_rule("batch-size", "batch_size is 0", lambda shelf: provider(shelf, lookup(Function.lookup, batch_size=0))),
    break_rule("batch-size", "batch_size is None, but with 500 keys", lambda shelf: provider(shelf, lookup(lambda self, keys: Function.lookup(self, keys) if keys.num_rows < 300 else 1 / 0))),
    break_rule("result", "returned list", lambda shelf: provider(shelf, lookup(lambda self, keys: Function.lookup(self, keys).to_pylist()))),
    break_rule("result", "column 'n' is string", lambda shelf: provider(shelf, lookup(lambda self, keys: (rows := Function.lookup(self, keys)).set_column(3, "n", rows["n"].cast(pa.string()))))),
    break_rule("result", "DatedRows with age_s = -1", lambda shelf: provider(shelf, lookup(lambda self, keys: DatedRows(Function.lookup(self, keys), age_s=-1)))),
    break_rule("unrequested-key", "lookup of key id = 1, place = 'Bergen' returned a row with key id = 1, place = 'Oslo', which was", lambda shelf: provider(shelf, lookup(lambda self, keys: self.shelf.rows.filter(pa.compute.is_valid(self.shelf.rows["id"]))))),
    break_rule("unrequested-key", "key id = None", lambda shelf: provider(shelf, lookup(lambda self, keys: self.shelf.rows))),
    break_rule("unrequested-key", "which was not requested", lambda shelf: provider(shelf, lookup(lambda self, keys: by_columns(self.shelf, keys)))),
    break_rule("unrequested-key", "which was not requested", lambda shelf: provider(shelf, lookup(lambda self, keys: without_case(self.shelf, keys)))),
    break_rule("rows", "lacks the row (id = 2, place = 'Oslo', name = 'zwei', n = None): it is there 1 times", lambda shelf: provider(shelf, lookup(lambda self, keys: once_each(Function.lookup(self, keys))))),
    break_rule("rows", "lacks the row", lambda shelf: provider(shelf, lookup(lambda self, keys: Function.lookup(self, keys).slice(1)))),
    break_rule("rows", "2 times, the table has it 1 times", lambda shelf: provider(shelf, lookup(lambda self, keys: pa.concat_tables([Function.lookup(self, keys)] * 2)))),
    break_rule("rows", "name = '', n = nan) instead of (id = 1, place = 'Bergen', name = None", lambda shelf: provider(shelf, lookup(lambda self, keys: (rows := Function.lookup(self, keys)).set_column(2, "name", rows["name"].fill_null(""))))),
    break_rule("rows", "with zeros of the other sign, lookup of key f = 0.0 lacks the row", by_bits),
    break_rule("rows", "in a table with 507 rows, lookup of key", lambda shelf: provider(shelf, lookup(lambda self, keys: Function.lookup(self, keys).slice(0, 100))), write=writes),
    break_rule("any-key", "key id = 9223372036854775807", lambda shelf: provider(shelf, fail_values(lambda value: value == 2**63 - 1))),
    break_rule("any-key", r"place = '\x00'", lambda shelf: provider(shelf, fail_values(lambda value: value == "\0"))),
    break_rule("any-key", "with keys in two chunks, lookup of key id = 1, place = 'Bergen' lacks", lambda shelf: provider(shelf, lookup(lambda self, keys: Function.lookup(self, pa.table([column.chunk(0) for column in keys.columns[:1]] + [keys.column(1).slice(0, len(keys.column(0).chunk(0)))], keys.column_names))))),
    break_rule("repeatable", "after other lookups, the result of", lambda shelf: provider(shelf, lookup(in_place))),
    break_rule("open-close", "open() raised RuntimeError", lambda shelf: provider(shelf, Once)),
    break_rule("open-close", "after close() and open() 6 times, the process has 6 more open files and connections", lambda shelf: provider(shelf, Leaking), timeout_s=lambda shelf: 1.0),
    break_rule("thread", "after another instance was closed, lookup of key id = 1", lambda shelf: provider(shelf, Shared)),
    break_rule("concurrent-calls", "100 lookups at once raised ConnectionError('no connection is free')", lambda shelf: provider(shelf, Pooled)),
    break_rule("concurrent-calls", "while other calls ran", lambda shelf: provider(shelf, Mixing)),
    break_rule("thread", "the session is in use", one_session),
    break_rule("zone", "with TZ = LKC-05:45, lookup of key", in_local_time),
    break_rule("fork", "the answer is that of another process", lambda shelf: provider(shelf, Inherited)),
    break_rule("fork", "a forked process died", lambda shelf: provider(shelf, Dying)),
    break_rule("time", "lookup of key id = 1, place = 'Oslo' and 3 more has not returned within 0.3 s", lambda shelf: provider(shelf, lookup(hang)), timeout_s=lambda shelf: QUICK_S),
    break_rule("error", "open() raised ConnectionError('down')", lambda shelf: vars(shelf).update(down=True) or provider(shelf)),
    break_rule("outage", "in an outage, lookup of key id = 1, place = 'Oslo' and 3 more raised no error, but returned 0 rows", lambda shelf: provider(shelf, Silent), outage=outages),
    break_rule("outage", "in 4 attempts after an outage", lambda shelf: provider(shelf, Lost), outage=outages),
    break_rule("outage", "in an outage, version() raised no error, but returned 'v0'", lambda shelf: provider(shelf, version=lambda: f"v{len(shelf.writes)}"), outage=outages),
    break_rule("outage", "in an outage, changes('v0') raised no error, but returned 0 rows", lambda shelf: provider(shelf, changes=lambda since: shelf.rows.select(KEYS).slice(0, 0)), outage=outages),
    break_rule("outage", "in an outage, scan() raised no error, but returned 0 rows", lambda shelf: provider(shelf, scan=lambda: [] if shelf.down else shelf.rows.to_batches()), outage=outages),
    break_rule("outage", "interrupted by an outage, scan() lacks", lambda shelf: provider(shelf, scan=interrupted(shelf)), outage=outages),
    break_rule("version", "version() returned 7", lambda shelf: provider(shelf, version=lambda: 7)),
    break_rule("version", "after version() 6 times, the process has 6 more open files and connections", lambda shelf: provider(shelf, version=leaking(shelf, shelf.version)), timeout_s=lambda shelf: 1.0),
    break_rule("version", "version() returned ''", lambda shelf: provider(shelf, version=lambda: shelf.version() if shelf.rows.num_rows else ""), write=writes),
    break_rule("version", "the second time: no row has changed", lambda shelf: provider(shelf, version=other_each_time())),
    break_rule("version", "from another instance: no row has changed", numbered),
    break_rule("version", "in a forked process: no row has changed", lambda shelf: provider(shelf, version=lambda: f"{os.getpid()}")),
    break_rule("new-version", "before and after a write", lambda shelf: provider(shelf, version=lambda: "1"), write=writes),
    break_rule("new-version", "before and after a write", lambda shelf: provider(shelf, version=lambda: f"{shelf.rows.num_rows} rows"), write=writes),
    break_rule("fresh-rows", "after a write, lookup of key id = 1, place = 'Oslo' returned the row", lambda shelf: provider(shelf, Snapshot), write=writes),
    break_rule("one-state", "that it never had together", lambda shelf: lambda context: LookupFunctionProvider(Function(shelf, context), SCHEMA), write=two_halves),
    break_rule("one-state", "during a write of 507 rows to 7, scan() returned", lambda shelf: provider(shelf, scan=paged(shelf)), write=writes),
    break_rule("changes", "lacks key id = 1, place = 'Oslo'", lambda shelf: provider(shelf, changes=lacking_deleted(shelf)), write=writes),
    break_rule("changes", "has no key with a null", lambda shelf: provider(shelf, scan=shelf.scan, changes=with_keys(shelf)), write=writes),
    break_rule("changes", "not a table of the key columns", lambda shelf: provider(shelf, changes=lambda since: shelf.rows)),
    break_rule("changes", "lacks key", lambda shelf: provider(shelf, changes=lambda since: shelf.changes(f"v{max(int(since[1:]), len(shelf.writes) - 1)}")), write=writes),
    break_rule("scan", "scan() returned Table", lambda shelf: provider(shelf, scan=lambda: [shelf.rows])),
    break_rule("scan", "in a table with 507 rows, scan() lacks the row", lambda shelf: provider(shelf, scan=at_most(shelf, 100)), write=writes),
    break_rule("scan", "after a scan that was left at its first batch 6 times", lambda shelf: provider(shelf, scan=leaking(shelf, shelf.scan)), timeout_s=lambda shelf: 1.0),
    break_rule("scan", "during another scan, scan() lacks the row", lambda shelf: provider(shelf, scan=half_scanned(shelf))),
    break_rule("scan", "scan() lacks the row (id = None", lambda shelf: provider(shelf, scan=lambda: shelf.rows.slice(0, 6).to_batches())),
    break_rule("cached", "with lookup.cache = PARTIAL, lookup of key", caching),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "text", "make"), BROKEN)
def test_a_broken_rule(rule: str, text: str, make: Broken) -> None:
    """The error names the rule, what happened, and where the rule is."""
    shelf = Shelf()
    factory, arguments = make(shelf)
    arguments = {"timeout_s": 20.0, **arguments}
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [os.close(file) for file in shelf.files])
        with pytest.raises(ProviderCheckError) as caught:
            check_provider(factory, shelf.rows, shelf.keys, largest_call=500, **arguments)
    assert (caught.value.rule, text in str(caught.value)) == (rule, True), str(caught.value)
    section, statement = RULES[rule]
    assert str(caught.value).endswith(f"\nrule {rule}: {statement} (docs/providers.md#{section})")
    assert isinstance(caught.value, AssertionError)


def test_each_rule_can_be_broken() -> None:
    """No rule lacks a provider that breaks it; and the documentation has the section that each names."""
    assert {param.values[0] for param in BROKEN} == RULES.keys()
    document = Path(pyspark_lookup.__file__).parent.parent / "docs" / "providers.md"
    titles = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    sections = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
    assert {section for section, _ in RULES.values()} - sections == set()


def test_rows_with_too_few_keys() -> None:
    """Rows with too few keys are an error of the test, not of the provider."""
    shelf = Shelf(ROWS.slice(0, 2))
    with pytest.raises(ValueError, match="rows have 2 different keys without nulls: pass rows with 3"):
        check_provider(provider(shelf), shelf.rows, KEYS)
