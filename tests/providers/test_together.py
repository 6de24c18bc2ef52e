"""Tables of other systems: several calls at once."""

from __future__ import annotations

import asyncio
import threading

import pyarrow as pa
import pytest

from pyspark_lookup.base.clock import HostClock
from pyspark_lookup.base.errors import LookupFunctionError, LookupTimeoutError
from tests.fakes import FakeClock
from tests.providers.common import (
    BOUND_S,
    CACHES,
    KINDS,
    ONCE,
    PARTIAL,
    USERS,
    AsyncFunction,
    Desk,
    Options,
    SyncFunction,
    counted,
    made,
    names,
    pairs,
    raises,
    rows_of,
)


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
