"""Readers in processes of their own: one that lives on, and ones that are born for a request."""

import contextlib
import dataclasses
import functools
import logging
import multiprocessing
import random
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pyarrow as pa
import pytest

from pyspark_lookup import LookupTable
from pyspark_lookup.cache.partial import host_cache
from pyspark_lookup.lookup import runtime as runtime_module
from pyspark_lookup.lookup.runtime import Runtime
from pyspark_lookup.storage.context import in_thread
from tests.models.managed import SIZES
from tests.support.fakes import FakeClock

_BOUND_S = 60.0  # far above what a request takes; a process not done by then hangs


@dataclasses.dataclass(frozen=True)
class Answer:
    """The result of one call: a table of rows, a schema, or the class of an error. `failures`: loads that failed behind it."""

    value: Any = None
    error: str = ""
    text: str = ""
    failures: int = 0


@dataclasses.dataclass(frozen=True)
class Request:
    """Calls of a table: (method, arguments…) in order, `at` these times. `scheduled`: full caches reload by their schedule."""

    path: str
    options: tuple[tuple[str, str], ...]
    asks: tuple[tuple[Any, ...], ...]
    at: tuple[float, float]
    scheduled: bool = False


def _start(scheduled: bool, name: str, run: Callable[[], None]) -> None:
    if scheduled or "-schedule-" not in name:
        in_thread(name, run)


@contextlib.contextmanager
def reader_runtime(clock: FakeClock, scheduled: bool = False) -> Iterator[None]:
    """Give this process a clock that the history moves, and small sizes. Reloads happen only on request, unless they are `scheduled`.

    Names of files on disk are random, and not drawn from the seed: two processes must not draw the same.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_cache, "_SEGMENTS_AT_MOST", 2)
        runtime = Runtime(clock.host(), random.Random(), SIZES, functools.partial(_start, scheduled))
        patch.setattr(runtime_module, "_current", runtime)
        yield


class Session:
    """The tables that one process has open."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self._tables: dict[tuple[Any, ...], LookupTable] = {}

    def ask(self, request: Request) -> list[Answer]:
        """The answers to a request, by a table that stays open."""
        self.clock.wall_s = max(self.clock.wall_s, request.at[0])
        self.clock.steady_s = max(self.clock.steady_s, request.at[1])
        key = (request.path, request.options)
        try:
            if key not in self._tables:
                self._tables[key] = LookupTable(request.path, dict(request.options))
        except Exception as problem:
            return [_error(problem) for _ in request.asks]
        return [_ask(self._tables[key], *ask) for ask in request.asks]

    def close(self) -> None:
        for table in self._tables.values():
            table.close()


def _ask(table: LookupTable, method: str, *args: Any) -> Answer:
    metrics = table._engine().reader.metrics
    before = metrics.snapshot()["numLoadFailures"]
    try:
        member = getattr(table, method)
        value = member(*args) if callable(member) else member
    except Exception as problem:
        return _error(problem)
    return Answer(value, failures=metrics.snapshot()["numLoadFailures"] - before)


def _error(problem: Exception) -> Answer:
    is_ours = any(base.__name__ == "PysparkLookupError" for base in type(problem).__mro__)
    return Answer(error=type(problem).__name__ if is_ours else f"internal {type(problem).__name__}", text=str(problem))


def _read_until_closed(pipe: Connection, once: bool) -> None:
    logging.disable(logging.CRITICAL)
    clock = FakeClock(0.0)
    with contextlib.suppress(EOFError, BrokenPipeError):
        request: Request = pipe.recv()
        with reader_runtime(clock, request.scheduled):
            session = Session(clock)
            while True:
                answers = session.ask(request)
                pipe.send((answers, (clock.wall_s, clock.steady_s)))
                if once:
                    return
                request = pipe.recv()


class Nursery:
    """Processes forked from a clean one with all imports: one for each name, and one for each request without a name."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        # Modules that are imported lazily, too.
        self._context.set_forkserver_preload([__name__, "pandas", "sqlglot.dialects.spark", "tests.models.place"])
        self._living: dict[str, Connection] = {}

    def ask(self, name: str, request: Request) -> tuple[list[Answer], tuple[float, float]]:
        """(the answers of the process of this name, the times of its clocks). "" means a new process for this request."""
        pipe = self._living.get(name) or self._born(name)
        try:
            pipe.send(request)
            if pipe.poll(_BOUND_S):
                return pipe.recv()
            problem = "hangs"
        except (EOFError, BrokenPipeError):
            problem = "died"
        finally:
            if not name:
                self.close(name)
        self.close(name)
        return [Answer(error=f"internal process {problem}") for _ in request.asks], request.at

    def _born(self, name: str) -> Connection:
        self._living[name], child_pipe = self._context.Pipe()
        self._context.Process(target=_read_until_closed, args=(child_pipe, not name), daemon=True).start()
        child_pipe.close()
        return self._living[name]

    def close(self, *names: str) -> None:
        for name in names or list(self._living):
            if name in self._living:
                self._living.pop(name).close()


def key_table(schema: pa.Schema, keys: list[tuple[Any, ...]]) -> pa.Table:
    """Keys as `get_many` takes them."""
    columns = [pa.array([key[n] for key in keys], field.type) for n, field in enumerate(schema)]
    return pa.Table.from_arrays(columns, schema=schema)
