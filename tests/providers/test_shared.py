"""Tables of other systems: one provider for many tables."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup.base.errors import LookupFunctionError
from pyspark_lookup.engine.lookup_table import LookupTable
from pyspark_lookup.providers.functions import LookupContext, LookupProvider
from tests.providers.common import (
    BOUND_S,
    CACHES,
    KINDS,
    ONCE,
    PARTIAL,
    QUICK,
    USERS,
    Answer,
    Desk,
    Function,
    Options,
    SyncFunction,
    beside,
    counted,
    ids,
    made,
    names,
    pairs,
    provider,
    raises,
    rows_of,
)


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
