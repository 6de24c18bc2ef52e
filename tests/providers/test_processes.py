"""Tables of other systems: other processes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pyarrow as pa
import pytest

from pyspark_lookup.base.errors import OptionError
from pyspark_lookup.engine.lookup_table import LookupTable
from pyspark_lookup.providers.functions import LookupContext, LookupFunction, LookupProvider
from tests.providers.common import (
    BOUND_S,
    CACHES,
    KINDS,
    PARTIAL,
    USERS,
    Desk,
    Options,
    SyncFunction,
    beside,
    made,
    names,
    provider,
    rows_of,
)

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
    fixed = {"lookup.provider": f"{__name__}:forked_users", "lookup.keys": "id", "lookup.cache.dir": cache_dir}
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
