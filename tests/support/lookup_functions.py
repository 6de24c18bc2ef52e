"""Tables of other systems: what a lookup function is asked, what of its answers is taken, and what its failures do: what its tests share."""

import asyncio
import contextlib
import gc
import itertools
import operator
import random
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import pyspark_lookup.lookup.runtime
from pyspark_lookup.cache.memory import KEY_INDEX, DefaultLookupCache, LookupCache
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.errors import PysparkLookupError
from pyspark_lookup.lookup.lookup_table import LookupTable
from pyspark_lookup.lookup.runtime import Runtime, runtime
from pyspark_lookup.sources.providers.functions import (
    AsyncLookupFunction,
    AsyncLookupFunctionProvider,
    LookupFunction,
    LookupFunctionProvider,
    LookupProvider,
    PartialCachingAsyncLookupProvider,
    PartialCachingLookupProvider,
)
from tests.support.fakes import FakeClock

Answer = Callable[[pa.Table], Any]
Options = Mapping[str, Any]
Version = Callable[[], str] | None
SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
USERS = {1: ["Alice"], 2: ["Bob", "Charlie"]}  # 3 is nobody
BOUND_S = 20.0  # nothing takes this long unless it hangs
TEXTS = ["O'Brien", "'; DROP TABLE t; --", '"', "' OR '1'='1", "back\\slash", "{a,b}", "$1", "?1", "NULL", "", " ", "a\n\tä€𝄞"]  # fmt: skip
"""Keys that mean something else to whoever does not quote them."""
NONE: Options = {}
PARTIAL: Options = {"lookup.cache": "PARTIAL", "lookup.partial-cache.expire-after-write": "1 h"}
ONCE: Options = {"lookup.max-retries": 0}
QUICK: Options = {"lookup.max-retries": 0, "lookup.async.timeout": "600 ms"}
CACHES = pytest.mark.parametrize("cache", [NONE, PARTIAL], ids=["NONE", "PARTIAL"])
KINDS = pytest.mark.parametrize("kind", ["sync", "async"])
EITHER = pytest.mark.parametrize(("kind", "cache"), [("sync", PARTIAL), ("async", NONE)], ids=["sync", "async"])
"""Each kind of function with one mode, where neither has to do with the other."""
FLIP = ("hitCount", "missCount", "loadCount", "numLoadFailures")


class Log:
    """What happened to a function: (what, thread), the keys of each lookup, and the event loops that ran."""

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
    def names(self) -> list[str]:
        return [event for event, _ in self.events]

    @property
    def requested_keys(self) -> list[list[Any]]:
        """The keys of each lookup: values of a single key column, sorted, or tuples of several."""
        lists = [list(zip(*(column.to_pylist() for column in keys.columns), strict=True)) for keys in self.tables]
        return [sorted(key if len(key) > 1 else key[0] for key in keys) for keys in lists]


class _Told:
    """A function that answers and opens as it is told."""

    def __init__(self, answer: Answer, batch_size: int | None = None) -> None:
        self.answer, self.opens, self.log = answer, lambda: None, Log()
        if batch_size is not None:
            self.batch_size = batch_size


class SyncFunction(_Told, LookupFunction):
    def open(self) -> None:
        self.opens()
        self.log.add("open")

    def lookup(self, keys: pa.Table) -> pa.Table:
        self.log.add("lookup", keys)
        return self.answer(keys)

    def close(self) -> None:
        self.log.add("close")


class AsyncFunction(_Told, AsyncLookupFunction):
    """A `SyncFunction` that is asynchronous, and answers after others had their turn; what it is told may be awaitable."""

    async def open(self) -> None:
        self.opens()
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


def make_function(kind: str, answer: Answer, batch_size: int | None = None) -> Function:
    return (SyncFunction if kind == "sync" else AsyncFunction)(answer, batch_size)


def users() -> SyncFunction:
    return SyncFunction(make_answer(USERS))


def provider(
    function: Any, schema: pa.Schema = SCHEMA, version: Version = None, cache: LookupCache | None = None
) -> LookupProvider:
    """The provider that serves this function, behind a cache of its own if there is one."""
    asynchronous = isinstance(function, AsyncLookupFunction)
    if cache is not None:
        kind = PartialCachingAsyncLookupProvider if asynchronous else PartialCachingLookupProvider
        return kind(function, cache, schema, version)
    return (AsyncLookupFunctionProvider if asynchronous else LookupFunctionProvider)(function, schema, version)


def make_answer(names: Mapping[int, Sequence[str]]) -> Answer:
    """Answers with the names of those ids that are there."""

    def answer(keys: pa.Table) -> pa.Table:
        pairs = [(key, name) for key in keys.column("id").to_pylist() for name in names.get(key, ())]
        return pa.table({"id": [key for key, _ in pairs], "name": [name for _, name in pairs]}, schema=SCHEMA)

    return answer


def raises(problem: BaseException) -> Callable[..., Any]:
    """Never answers."""

    def answer(*args: object) -> Any:
        raise problem

    return answer


def in_turn(*answers: Callable[..., Any]) -> Callable[..., Any]:
    """Does one after the other, the last one from then on."""
    pending = list(answers)

    def answer(*args: Any) -> Any:
        return (pending.pop(0) if len(pending) > 1 else pending[0])(*args)

    return answer


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

    def restart(self) -> None:
        """Go on as another process of this host, which draws other names; tables made before answer there, too."""
        self._processes.append(Runtime(self.clock.host(), random.Random(1 + len(self._processes))))
        self._be(self._processes[-1])

    def _be(self, process: Runtime) -> None:
        self._monkeypatch.setattr(pyspark_lookup.lookup.runtime, "_current", process)

    def name(self, factory: Any) -> str:
        """What `lookup.provider` calls this factory: provider_1:make, provider_2:make."""
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

    def serve(self, function: Any, options: Options = NONE, *of: Any, **named: Any) -> LookupTable:
        """The table of one function, as of `provider`; of several, each provider that is made has the next one."""
        functions = iter(function) if isinstance(function, list) else itertools.repeat(function)
        return self.table(lambda context: provider(next(functions), *of, **named), options)

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
        for provided in itertools.chain(*(process._openers[0].futures.values() for process in self._processes)):
            provided.result(0).close()
        if self.gives_up:
            for thread in set(threading.enumerate()) - set(self._threads):
                if thread.name.startswith(("lookupcache-provider-", "lookupcache-version-", "lookupcache-make-")):
                    thread.join(1.0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                gc.collect()  # coroutines that were given up complain here, and not in another test


def counted(table: LookupTable, *names: str) -> dict[str, int]:
    """The FLIP's counters and those of these names, but for the zeros."""
    metrics = table.metrics()
    return {name: metrics[name] for name in (*FLIP, *names) if metrics[name]}


def ids(*values: int | None) -> pa.Table:
    return pa.table({"id": pa.array(list(values), pa.int64())})


def pairs(table: LookupTable, *values: int | None) -> list[tuple[int, str]]:
    """(place of the key, name) of all rows with any of these ids."""
    table_rows = table.get_many(ids(*values))
    return list(zip(table_rows.column(KEY_INDEX).to_pylist(), table_rows.column("name").to_pylist(), strict=True))


def names(table: LookupTable, key: Any) -> list[str]:
    return [row["name"] for row in table.get(key)]


def beside(call: Callable[[], Any]) -> Callable[..., Any]:
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


_FORWARDED = ("get_many", "peek_many", "put_many", "invalidate_many", "size", "bytes")


class Plain(LookupCache):
    """A cache of somebody's own, of which nothing is known."""

    get_many, peek_many, put_many, invalidate_many, size, bytes = (
        property(operator.attrgetter(f"inner.{name}")) for name in _FORWARDED
    )

    def __init__(self) -> None:
        self.inner = DefaultLookupCache(max_rows=100)
        self.opened = self.closed = 0

    def open(self, metrics: CacheMetricGroup) -> None:
        self.opened += 1
        self.inner.open(metrics)

    def close(self) -> None:
        self.closed += 1
        self.inner.close()
