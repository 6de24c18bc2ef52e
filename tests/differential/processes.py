"""Readers in processes of their own: one that lives on, and ones that are born for a request.

A clean process with all imports behind it is kept, and forks them: a new process costs milliseconds so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import logging
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pyarrow as pa
import pytest

from pyspark_lookup import LookupTable
from pyspark_lookup.cache.partial import host_cache
from pyspark_lookup.engine import runtime as runtime_module
from pyspark_lookup.engine.runtime import Runtime
from pyspark_lookup.io.context import in_thread
from tests.differential.managed import SIZES
from tests.fakes import FakeClock

__all__ = ["Answer", "Nursery", "Request", "Session", "reader_runtime"]

_USED_LATE = ("pandas", "sqlglot.dialects.spark")  # imported by the first lookup, the first predicate
_BOUND_S = 60.0  # far above what a request takes; a process not done by then hangs


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one call gave: a table of rows, a schema, or an error by its class."""

    value: Any = None
    error: str = ""
    text: str = ""


@dataclasses.dataclass(frozen=True)
class Request:
    """What to ask a table. `asks`: (method, arguments…) of `LookupTable`, in order; `at`: the clocks' times.

    `scheduled`: reloads of the full cache run by their schedule, as they do in an application.
    """

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
    """This process on a clock that the history moves, with small sizes. Reloads happen when they are asked for.

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
        """The answers to a request, of a table that stays open."""
        self.clock.wall_s = max(self.clock.wall_s, request.at[0])
        self.clock.steady_s = max(self.clock.steady_s, request.at[1])
        key = (request.path, request.options)
        try:
            if key not in self._tables:
                self._tables[key] = LookupTable(request.path, dict(request.options))
        except Exception as problem:
            return [_error(problem) for _ in request.asks]
        return [_asked(self._tables[key], *ask) for ask in request.asks]


def _asked(table: LookupTable, method: str, *args: Any) -> Answer:
    try:
        found = getattr(table, method)
        return Answer(found(*args) if callable(found) else found)
    except Exception as problem:
        return _error(problem)


def _error(problem: Exception) -> Answer:
    ours = any(base.__name__ == "PysparkLookupError" for base in type(problem).__mro__)
    return Answer(error=type(problem).__name__ if ours else f"internal {type(problem).__name__}", text=str(problem))


# --- processes ------------------------------------------------------------------------------------


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


def _raise_children(pipe: Connection) -> None:
    """Fork a process for each name, or for each request without one, and pass requests on, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in _USED_LATE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    living: dict[str, Connection] = {}
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            name, request = pipe.recv()
            child = living.get(name)
            if child is None:
                child, process = _fork(pipe, list(living.values()), once=not name)
                if name:
                    living[name] = child
            try:
                child.send(request)
                pipe.send(child.recv() if child.poll(_BOUND_S) else "hangs")
            except (EOFError, BrokenPipeError):
                living.pop(name, None)
                pipe.send("died")
            if not name:
                child.close()
                os.waitpid(process, 0)


def _fork(pipe: Connection, others: list[Connection], once: bool) -> tuple[Connection, int]:
    here, there = multiprocessing.Pipe()
    process = os.fork()
    if process == 0:
        for inherited in (pipe, here, *others):
            inherited.close()
        try:
            _read_until_closed(there, once)
        finally:
            os._exit(0)
    there.close()
    return here, process


class Nursery:
    """The clean process, and the requests to those that it forks."""

    def __init__(self) -> None:
        self._pipe, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_raise_children, args=(there,), daemon=True)
        self._process.start()
        there.close()

    def ask(self, name: str, request: Request) -> tuple[list[Answer], tuple[float, float]]:
        """(the answers of the process of that name, its clocks' times); "": of one that is born for the request."""
        self._pipe.send((name, request))
        found = self._pipe.recv() if self._pipe.poll(2 * _BOUND_S) else "hangs"
        if isinstance(found, str):
            return [Answer(error=f"internal process {found}") for _ in request.asks], request.at
        answers, at = found
        return answers, at

    def close(self) -> None:
        """End all processes."""
        self._pipe.close()
        self._process.join(_BOUND_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def key_table(schema: pa.Schema, keys: list[tuple[Any, ...]]) -> pa.Table:
    """Keys as `get_many` takes them."""
    columns = [pa.array([key[n] for key in keys], field.type) for n, field in enumerate(schema)]
    return pa.Table.from_arrays(columns, schema=schema)
