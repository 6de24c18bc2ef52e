"""Tables of other systems: one provider for many tables, in one process and in several."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup.base.errors import OptionError
from pyspark_lookup.engine.lookup_table import LookupTable
from pyspark_lookup.providers.functions import LookupContext, LookupFunction, LookupProvider
from tests.providers.common import (
    BOUND_S,
    CACHES,
    KINDS,
    PARTIAL,
    QUICK,
    USERS,
    Desk,
    Options,
    SyncFunction,
    beside,
    counted,
    made,
    names,
    provider,
    raises,
    rows_of,
    users,
)


@KINDS
@CACHES
def test_tables_of_the_same_options_are_one(desk: Desk, kind: str, cache: Options) -> None:
    """Within a process they share a provider, its function, its cache and its counters; so does a pickled copy of one."""
    function = made(kind, rows_of(USERS))
    left = iter([function])  # the provider of a second one could not be made
    name = desk.name(lambda context: provider(next(left)))
    tables = [desk.table(name, cache) for _ in range(2)]
    tables.append(pickle.loads(pickle.dumps(tables[0])))
    for table in tables:
        assert names(table, 1) == ["Alice"]
    assert function.log.names.count("open") == 1
    assert function.log.asked == ([[1]] if cache else [[1]] * 3)
    for table in tables if cache else []:
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
    function = SyncFunction(lambda keys: pa.table({"id": [1], "name": ["Alice"]}))
    name = desk.name(lambda context: provider(function))
    one, two = desk.table(name, PARTIAL), desk.table(name, {**PARTIAL, **other})
    for _ in range(2):
        assert len(one.get(1)) == 1
        assert len(two.get("Alice" if "lookup.keys" in other else 1)) == 1
    assert len(function.log.tables) == lookups
    misses = 4 - hits if hits > 1 else 1
    assert counted(one) == {"hitCount": hits, "missCount": misses, "loadCount": misses}


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
        return provider(users())

    def use() -> list[str]:
        table = desk.table(factory)
        if when == "a new process asks":
            desk.restart()
        return names(table, 1)

    try:
        assert beside(use)() == ["Alice"]
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
        return provider(users())

    name = desk.name(factory)
    waits = [beside(lambda: names(desk.table(name), 1)) for _ in range(2)]
    assert [wait() for wait in waits] == [["Alice"], ["Alice"]]
    assert len(made_so_far) == 1


@KINDS
def test_a_function_is_closed_with_the_last_table(desk: Desk, kind: str) -> None:
    """When the last table that uses it is closed, so is a function, in its thread; what is asked afterwards opens it again."""
    function = made(kind, rows_of(USERS))
    name = desk.name(lambda context: provider(function))
    unused, one, two, three = (desk.table(name) for _ in range(4))
    unused.describe()
    unused.close()
    assert function.log.events == []  # nor is it closed if it was not opened
    assert names(one, 1) == names(two, 1) == ["Alice"]
    one.close()
    one.close()
    assert function.log.names == ["open", "lookup", "lookup"]
    two.close()
    assert function.log.names == ["open", "lookup", "lookup", "close"]
    assert len({thread for _, thread in function.log.events}) == 1
    assert names(three, 2) == ["Bob", "Charlie"]
    assert function.log.names[4:] == ["open", "lookup"]


def test_closing_may_fail(desk: Desk, prompt: None, gate: threading.Event) -> None:
    """What a function raises when it is closed is nobody's problem any more, and one that hangs then is given up."""
    for problem in (raises(OSError("gone")), lambda: gate.wait(BOUND_S)):
        function = users()
        function.close = problem  # type: ignore[method-assign]
        table = desk.serve(function, QUICK)
        assert names(table, 1) == ["Alice"]
        assert beside(table.close)() is None
        with pytest.raises(ValueError, match="closed"):
            table.get(1)


def test_what_a_table_says_of_itself(desk: Desk) -> None:
    """Its path is the provider's name, its version another for each text of version(), its options are shown."""
    version = ["1"]
    table = desk.serve(users(), {"lookup.provider.region": "eu"}, version=lambda: version[0])
    first = table.describe()
    assert first["path"].startswith("provider:provider_1:make/")
    assert first["columns"] == {"id": "int64", "name": "string"}
    assert "lookup.provider.region='eu'" in first["options"]
    assert table.version == first["version"]
    version[0] = "2"
    assert table.version != first["version"]
    version[0] = "1"
    assert table.version == first["version"]
    with pytest.raises(OptionError, match=r"only lookup.cache = 'FULL' has a snapshot"):
        table.reload()


# --- a fork ----------------------------------------------------------------------------------------------

FORK_EVENTS: list[tuple[int, str]] = []
FORK_GATE = threading.Event()
FORK_HANGS = threading.Event()


class Forked(LookupFunction):
    """Says which process does what; hangs for the key 13."""

    def open(self) -> None:
        FORK_EVENTS.append((os.getpid(), "open"))

    def lookup(self, keys: pa.Table) -> pa.Table:
        asked = keys.column("id").to_pylist()
        FORK_EVENTS.append((os.getpid(), f"lookup {asked}"))
        if asked == [13] and multiprocessing.parent_process() is not None and FORK_HANGS.is_set():
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
    told = ours.recv() if ours.poll(BOUND_S) else None
    if told is None:
        child.kill()
    child.join()
    FORK_GATE.set()
    pipe.send((os.getpid(), first, hanging(), names(table, 2), told, FORK_EVENTS, table.metrics()["missCount"]))


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
    assert in_fork is not None, "the forked child hangs"
    child, found, of_child = in_fork
    assert (first, hanging, after) == (["Alice"], ["Judas"], ["Bob", "Charlie"])
    assert found == [["Alice"], ["Bob", "Charlie"], []]
    assert child != parent
    # With a cache the host shares the first row, and the child shares its own with its parent.
    mine = ["open", "lookup [1]", "lookup [13]"]
    assert events == [(parent, event) for event in (mine if cache else [*mine, "lookup [2]"])]
    expected = ["open", *([] if cache else ["lookup [1]"]), "lookup [2]", "lookup [3]"]
    assert of_child == [(child, event) for event in expected]
    assert misses == (4 if cache else 0)
