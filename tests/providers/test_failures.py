"""Tables of other systems: calls that hang, calls that are tried again, and several at once."""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
from collections.abc import Iterator

import pyarrow as pa
import pytest

from pyspark_lookup.base.errors import LookupFunctionError, LookupTimeoutError
from pyspark_lookup.providers.functions import FullCachingLookupProvider, LookupContext, LookupProvider
from tests.providers.common import (
    BOUND_S,
    CACHES,
    KINDS,
    NONE,
    ONCE,
    PARTIAL,
    QUICK,
    SCHEMA,
    USERS,
    AsyncFunction,
    Desk,
    Options,
    SyncFunction,
    beside,
    counted,
    holding,
    in_turn,
    made,
    names,
    pairs,
    provider,
    raises,
    rows_of,
    users,
)

# --- calls that hang --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True], ids=["never", "late"])
@pytest.mark.parametrize("where", ["lookup", "open", "version"])
@pytest.mark.parametrize(("kind", "cache"), [("sync", PARTIAL), ("async", NONE)], ids=["sync", "async"])
def test_a_lookup_that_hangs(desk: Desk, prompt: None, kind: str, cache: Options, where: str, late: bool) -> None:
    """It is given up after the timeout, wherever it hangs; a new function answers next. A late answer is neither returned nor kept.

    The provider, the option and the key are in the error. The thread of what was given up ends with it. Where no new function can
    be made at once it is made at the next lookup.
    """
    gate, threads = threading.Event(), list[threading.Thread]()

    def hang() -> str:
        threads.append(threading.current_thread())
        return str(gate.wait(BOUND_S))

    def too_late(keys: pa.Table) -> pa.Table:
        hang()
        return rows_of({1: ["too late"]})(keys)

    first, second = made(kind, too_late if where == "lookup" else rows_of(USERS)), made(kind, rows_of(USERS))
    if where == "open":
        first.opens = hang
    version = in_turn(hang, lambda: "1") if where == "version" else None
    left = iter([first, *[None] * late, second])

    def factory(context: LookupContext) -> LookupProvider:
        if (function := next(left)) is None:
            raise OSError("not now")
        return provider(function, version=version)

    table = desk.table(factory, {**cache, **QUICK})
    try:
        with pytest.raises(LookupTimeoutError, match=r"version\(\)" if where == "version" else "key id = 1") as caught:
            table.get(1)
        assert isinstance(caught.value, TimeoutError)
        assert "provider provider_1:make did not answer within lookup.async.timeout = 0.6 s" in str(caught.value)
        failed = {"missCount": 1, "numLoadFailures": 1} if cache and where != "version" else {}
        assert counted(table) == failed
        if late:
            gate.set()
            threads[0].join(BOUND_S)
            assert not threads[0].is_alive()
        assert (names(table, 1), names(table, 1)) == (["Alice"], ["Alice"])
    finally:
        gate.set()
    assert second.log.names == ["open", "lookup"] + ([] if cache else ["lookup"])
    assert late or second.log.events[0][1] != threads[0].ident
    if cache:
        assert counted(table) == {"hitCount": 1, **failed, "missCount": 1 + len(failed) // 2, "loadCount": 1}


def test_a_scan_that_hangs(desk: Desk, prompt: None, gate: threading.Event) -> None:
    """A reload that waits for a batch is given up, and the host's lock with it: what there is serves, and others can reload."""
    hangs = [False]

    def scan() -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"id": [1], "name": ["Alice"]})
        if hangs.pop():
            gate.wait(BOUND_S)
        yield pa.RecordBatch.from_pydict({"id": [2], "name": ["Bob"]})

    options = {"lookup.cache": "FULL", "lookup.metadata.source": "CACHE", **QUICK}
    options["lookup.full-cache.periodic-reload.interval"] = "365 d"
    name = desk.name(lambda context: FullCachingLookupProvider(scan, SCHEMA))
    table, other = desk.table(name, options), desk.table(name, options)
    assert names(table, 2) == ["Bob"]
    hangs += [False, True]
    desk.clock.tick(1)
    with pytest.raises(LookupTimeoutError, match=r"0.6 s, a batch of scan\(\)"):
        table.reload()
    assert names(table, 2) == names(other, 2) == ["Bob"]
    desk.clock.tick(1)
    other.reload()
    assert hangs == []


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
    assert function.log.names == ["open", "lookup", "lookup"]
    assert len(function.log.loops) == 1


def test_who_waits_for_a_call_that_hangs_goes_on(desk: Desk, prompt: None, gate: threading.Event) -> None:
    """Who waits for its turn behind a call that hangs has a new function when that is given up."""
    hanging = threading.Event()

    def answer(keys: pa.Table) -> pa.Table:
        hanging.set()
        return holding(gate, rows_of(USERS))(keys)

    functions = [SyncFunction(answer), users()]
    table = desk.serve(functions, QUICK)
    first = beside(lambda: table.get(1))
    assert hanging.wait(BOUND_S)
    assert names(table, 2) == ["Bob", "Charlie"]
    assert isinstance(first(), LookupTimeoutError)
    assert [len(function.log.asked) for function in functions] == [1, 1]


def test_a_function_that_is_replaced_while_it_is_opened(desk: Desk, prompt: None) -> None:
    """A new function is opened before its first lookup, also where the old one is being opened when it is made."""
    opening, opened, hangs = threading.Event(), threading.Event(), threading.Event()
    asked = itertools.count()

    def slow() -> None:
        opening.set()
        opened.wait(BOUND_S)

    def version() -> str:
        if next(asked) == 1:
            hangs.wait(BOUND_S)
        return "1"

    functions = [users(), users()]
    functions[0].opens = slow
    table = desk.serve(functions, {**ONCE, "lookup.async.timeout": "1 s"}, version=version)
    first = beside(lambda: names(table, 1))
    assert opening.wait(BOUND_S)
    second = beside(lambda: table.get(2))
    try:
        assert isinstance(second(), LookupTimeoutError)
    finally:
        opened.set()
        hangs.set()
    assert first() == ["Alice"]
    assert names(table, 2) == ["Bob", "Charlie"]
    assert functions[1].log.names == ["open", "lookup"]


def test_a_hit_waits_for_no_lookup(desk: Desk) -> None:
    """A key that is held is answered while another one is being looked up, with a version() as well as without."""
    gate, asking = threading.Event(), threading.Event()

    def slow(keys: pa.Table) -> pa.Table:
        asking.set()
        return holding(gate, rows_of(USERS))(keys)

    table = desk.serve(SyncFunction(in_turn(rows_of(USERS), slow)), PARTIAL, version=lambda: "1")
    assert names(table, 1) == ["Alice"]
    other = beside(lambda: table.get(2))
    assert asking.wait(BOUND_S)
    hit = beside(lambda: names(table, 1))
    try:
        assert hit(BOUND_S / 4) == ["Alice"]
    finally:
        gate.set()
        other()


def test_after_an_interrupt(desk: Desk, prompt: None, gate: threading.Event) -> None:
    """Who interrupts a lookup that takes long can look up something else at once: a new function answers."""
    waited: list[bool] = []
    interrupted = threading.Event()

    def interrupt(*_: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def slow(keys: pa.Table) -> pa.Table:
        # A signal that comes just before the main thread waits is only handled after the wait: Python's rule, so it comes again.
        while not interrupted.wait(0.05):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        waited.append(gate.wait(BOUND_S))
        return rows_of(USERS)(keys)

    table = desk.serve([SyncFunction(slow), users()])
    was = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            table.get(1)
    finally:
        signal.signal(signal.SIGINT, was)
    assert names(table, 1) == ["Alice"]
    assert waited == []  # it stands still yet


# --- trying again -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "retries"), [*(({"lookup.max-retries": n}, n) for n in (0, 1)), (NONE, 3)], ids=["0", "1", "default"]
)
@KINDS
@CACHES
def test_attempts(desk: Desk, kind: str, given: Options, retries: int, cache: Options) -> None:
    """What fails every time is tried once more than lookup.max-retries says, three times by default; the error says how often.

    A wrong answer is not asked for again: other columns will not be better the second time.
    """
    function = made(kind, raises(OSError("down")))
    table = desk.serve(function, {**cache, **given})
    often = f" in {retries + 1} attempts" if retries else ""
    says = rf"look up key id = [12] and 1 more{often}: OSError\('down'\)"
    with pytest.raises(LookupFunctionError, match=says) as caught:
        pairs(table, 1, 2)
    assert isinstance(caught.value.__cause__, OSError)
    assert function.log.asked == [[1, 2]] * (retries + 1)
    assert len(desk.clock.slept) == retries
    assert table.metrics()["lookupRetryCount"] == 2 * retries
    assert counted(table) == ({"missCount": 2, "numLoadFailures": 2} if cache else {})
    function.answer = lambda keys: pa.table({"id": [1]})
    with pytest.raises(LookupFunctionError, match="'name' is missing"):
        table.get(1)
    assert function.log.asked[retries + 1 :] == [[1]]
    assert function.log.names.count("open") == 1


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


# --- several calls at once --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("capacity", "calls", "most"), [(1, 6, 1), (3, 10, 3), (100, 7, 7)])
def test_as_many_calls_at_once_as_there_is_capacity_for(desk: Desk, capacity: int, calls: int, most: int) -> None:
    """That many are under way together, never more, and each answer goes to its own key; a failure is the last of one at a time."""
    now, seen = [0], [0]

    async def answer(keys: pa.Table) -> pa.Table:
        now[0] += 1
        seen[0] = max(seen[0], now[0])
        for _ in range(keys.column("id")[0].as_py() % 4 + 1):
            await asyncio.sleep(0)
        now[0] -= 1
        return rows_of({n: [f"n{n}"] for n in range(calls)})(keys)

    function = AsyncFunction(answer, 1)
    table = desk.serve(function, {**ONCE, "lookup.async.capacity": capacity})
    assert pairs(table, *range(calls)) == [(n, f"n{n}") for n in range(calls)]
    assert (seen[0], now[0]) == (most, 0)
    function.answer = raises(ValueError())
    with pytest.raises(LookupFunctionError):
        pairs(table, *range(calls))
    assert calls < len(function.log.asked) <= calls + capacity


def test_one_failing_call_of_five_cancels_the_others(desk: Desk, prompt: None) -> None:
    """The first failure is the lookup's; the calls under way are cancelled, those that wait never begin, and nothing is kept.

    The next lookup begins when the cancelled calls are over: never are there more than capacity allows.
    """
    cancelled, now, seen = list[int](), [0], [0]
    failing = True

    async def answer(keys: pa.Table) -> pa.Table:
        (key,) = keys.column("id").to_pylist()
        now[0] += 1
        seen[0] = max(seen[0], now[0])
        try:
            if key == 3 and failing:
                raise ValueError("not 3")
            await (asyncio.Event().wait() if failing else asyncio.sleep(0.02))
        except asyncio.CancelledError:
            cancelled.append(key)
            await asyncio.sleep(0.05)  # gives its connection back
            raise
        finally:
            now[0] -= 1
        return rows_of({n: [f"n{n}"] for n in range(9)})(keys)

    function = AsyncFunction(answer, 1)
    table = desk.serve(function, {**PARTIAL, **ONCE, "lookup.async.capacity": 5})
    # Which key comes first is not said: the failing one is among the first five.
    with pytest.raises(LookupFunctionError, match=r"key id = 3: ValueError\('not 3'\)"):
        pairs(table, 1, 2, 3, 4, 5)
    failing = False
    assert len(pairs(table, 1, 2, 3, 4, 5)) == 5
    assert sorted(cancelled) == [1, 2, 4, 5]
    assert (seen[0], now[0]) == (5, 0)
    assert counted(table) == {"missCount": 10, "numLoadFailures": 5, "loadCount": 5}


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
    desk.restart(lambda seconds: gate.wait(BOUND_S))
    function = made(kind, raises(ValueError("again")))
    table = desk.serve(function, {**PARTIAL, "lookup.max-retries": 50, "lookup.async.timeout": "100 ms"})
    with pytest.raises(LookupTimeoutError, match="id = 1"):
        table.get(1)
    assert len(function.log.asked) == 1
    assert counted(table) == {"missCount": 1, "numLoadFailures": 1}
    function.answer = rows_of(USERS)
    assert names(table, 1) == ["Alice"]


def test_calls_wait_for_their_next_attempts_together(desk: Desk, prompt: None) -> None:
    """However many calls are to be tried again, none waits for the waiting of another."""
    calls = 40
    together = threading.Barrier(calls)
    desk.restart(lambda seconds: together.wait(1.0))
    failed: set[int] = set()

    def answer(keys: pa.Table) -> pa.Table:
        (key,) = keys.column("id").to_pylist()
        if key not in failed:
            failed.add(key)
            raise ValueError("first")
        return rows_of({n: ["x"] for n in range(calls)})(keys)

    table = desk.serve(AsyncFunction(answer, 1), {"lookup.max-retries": 1})
    assert len(pairs(table, *range(calls))) == calls
