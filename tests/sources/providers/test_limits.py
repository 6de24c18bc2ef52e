"""How much load a host puts on a provider's system: calls per time, connections, and what is refused after failures; across processes."""

import asyncio
import collections
import errno
import math
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.errors import LookupFunctionError, LookupTimeoutError, OptionError
from pyspark_lookup.lookup.runtime import Runtime
from pyspark_lookup.sources.providers.functions import (
    FullCachingLookupProvider,
    LookupContext,
    LookupFunctionProvider,
    LookupProvider,
)
from pyspark_lookup.sources.providers.limits import CircuitBreaker, Connections, Rate, RateLimit, parse_rate
from pyspark_lookup.sources.providers.provider import ProvidedTable
from pyspark_lookup.sources.registry import parse_options
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import Disk, key_of
from pyspark_lookup.storage.disk.directory import Lock
from tests.support.fakes import FakeClock
from tests.support.lookup_functions import (
    BOUND_S,
    ONCE,
    PARTIAL,
    QUICK,
    SCHEMA,
    USERS,
    Desk,
    beside,
    in_turn,
    make_answer,
    make_function,
    names,
    pairs,
    provider,
    raises,
    users,
)


def host(root: Path | None, clock: FakeClock, boot: str = "boot-1") -> HostContext:
    """The context of a process of the host."""
    metrics = CacheMetricGroup()
    disk = None if root is None else Disk(root, 2**30, metrics, clock.host().wall_s, random.Random(7))
    return HostContext(disk, metrics, clock.host(boot), random.Random(7))


@pytest.mark.parametrize("rate", [Rate(1, 1.0), Rate(5, 1.0), Rate(7, 60.0)], ids=str)
@pytest.mark.parametrize("shared", [True, False], ids=["host", "process"])
def test_no_period_has_more_calls(cache_dir: Path, rate: Rate, shared: bool) -> None:
    """Whenever calls come, and from whichever process, no period has more of them than allowed; and none waits longer than it must."""
    clock, rng = FakeClock(), random.Random(7)
    processes = [
        RateLimit(host(cache_dir if shared else None, clock), "system", rate) for _ in range(3 if shared else 1)
    ]
    starts: list[float] = []
    for _ in range(200):
        if rng.random() < 0.4:
            clock.tick(rng.choice((0.1, 0.5, 1.0, 3.0)) * rate.period_s / rate.calls)
        wait_s = rng.choice(processes).reserve()
        earliest_s = starts[-rate.calls] + rate.period_s if len(starts) >= rate.calls else -math.inf
        assert clock.steady_s + wait_s == pytest.approx(max(clock.steady_s, earliest_s))
        starts.append(clock.steady_s + wait_s)
    for first, after in zip(starts, starts[rate.calls :], strict=False):
        assert after - first >= rate.period_s * 0.999999


def test_a_rate_does_not_outlive_the_machine(cache_dir: Path) -> None:
    """The times of an earlier boot, and of a damaged file, delay nobody; a lost directory is begun again."""
    clock, rate = FakeClock(), Rate(1, 60.0)
    limit = RateLimit(host(cache_dir, clock), "system", rate)
    assert (limit.reserve(), limit.reserve()) == (0.0, 60.0)
    (state,) = (cache_dir / "v1" / "locks").glob("limit-*")
    rebooted = RateLimit(host(cache_dir, clock, "boot-2"), "system", rate)
    assert (rebooted.reserve(), rebooted.reserve()) == (0.0, 60.0)
    assert limit.reserve() == 0.0
    boot = state.read_bytes()[:16]
    for damage in (b"", b"\xff" * 32, boot + b"\xff" * 16, boot + b"\1" + b"\0" * 7 + b"\xff" * 8):
        state.write_bytes(damage)
        assert limit.reserve() == 0.0
    state.unlink()
    assert limit.reserve() == 0.0
    assert limit.reserve() == 60.0


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "ten", "5/d", "/s", "9999999"])
def test_rates_that_are_none(desk: Desk, text: str) -> None:
    with pytest.raises(OptionError, match=r"option lookup\.rate-limit.*100/min"):
        desk.serve(users(), {"lookup.rate-limit": text})
    assert parse_rate(" 100 / MIN ") == Rate(100, 60.0)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_lookups_keep_to_the_rate(desk: Desk, kind: str) -> None:
    """The rate counts retries and calls of version(), too, and those of other processes. A wait does not count towards a timeout."""
    times: list[float] = []
    answer = make_answer({key: ["somebody"] for key in range(40)})

    def record_and_answer(keys: pa.Table) -> pa.Table:
        times.append(desk.clock.steady_s)
        return answer(keys)

    def version() -> str:
        times.append(desk.clock.steady_s)
        return "1"

    def fail_once(keys: pa.Table) -> pa.Table:
        times.append(desk.clock.steady_s)
        raise ValueError("once")

    functions = iter(
        [make_function(kind, in_turn(fail_once, record_and_answer), 1), make_function(kind, record_and_answer, 1)]
    )
    factory = desk.name(lambda context: provider(next(functions), version=version))
    options = {"lookup.rate-limit": 4, "lookup.async.timeout": "1 s"}
    assert len(pairs(desk.table(factory, options), *range(20))) == 20
    desk.restart()
    table = desk.table(factory, options)
    assert len(pairs(table, *range(20, 40))) == 20
    assert len(times) == 43
    if kind == "sync":  # calls that wait at the same time all move the clock of the test
        for first, after in zip(times, times[4:], strict=False):
            assert after - first >= 0.999
    assert table.metrics()["rateLimitWaitCount"] > 10


def test_no_more_connections_than_allowed(cache_dir: Path) -> None:
    """Each counts for the whole host; one that is free, or whose process was killed, goes to the next."""
    clock = FakeClock()
    first, second = (Connections(host(cache_dir, clock), "system", 2) for _ in range(2))
    connections = [first.acquire(), second.acquire()]
    assert None not in connections
    assert [first.acquire(), second.acquire()] == [None, None]
    assert not first.are_awaited
    with second.waiting():
        assert first.are_awaited
    assert not first.are_awaited
    connections.pop().release()
    ready, ready_end = os.pipe()
    child = os.fork()
    if not child:  # pragma: no cover
        assert Connections(host(cache_dir, clock), "system", 2).acquire() is not None
        os.write(ready_end, b"!")
        signal.pause()
    assert os.read(ready, 1) == b"!"
    assert first.acquire() is None
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert first.acquire() is not None
    alone = Connections(host(None, clock), "system", 1)
    connection = alone.acquire()
    assert connection is not None
    assert alone.acquire() is None


def test_a_connection_goes_to_whom_waits(desk: Desk) -> None:
    """A function that is open and not needed is closed for another process; one that answers is left to do so."""
    log = collections.Counter[str]()

    def function(name: str) -> Any:
        result = make_function("sync", make_answer(USERS))
        result.opens = lambda: log.update([f"{name} opened"])
        result.close = lambda: log.update([f"{name} closed"])  # type: ignore[method-assign]
        return result

    functions = iter([function("first"), function("second")])
    name = desk.name(lambda context: provider(next(functions)))
    options = {"lookup.max-connections": 1, **ONCE}
    first = desk.table(name, options)
    assert names(first, 1) == ["Alice"]
    assert names(first, 1) == ["Alice"]
    desk.restart()
    second = desk.table(name, options)
    result = beside(lambda: names(second, 2))
    assert result() == ["Bob", "Charlie"]
    assert log == {"first opened": 1, "first closed": 1, "second opened": 1}
    assert second.metrics()["connectionWaitCount"] == 1


def test_a_scan_is_a_connection_and_the_wait_for_one_ends(desk: Desk, gate: threading.Event) -> None:
    """As many asynchronous calls as connections run at once; a scan that finds none free fails after the timeout, and names the option."""
    running, most = list[int](), list[int]()

    async def answer(keys: pa.Table) -> pa.Table:
        running.append(1)
        most.append(len(running))
        await asyncio.sleep(0.01)
        running.pop()
        return make_answer(USERS)(keys)

    table = desk.serve(make_function("async", answer, 1), {"lookup.max-connections": 2, **ONCE})
    assert len(pairs(table, *range(12))) == 3
    assert max(most) == 2
    assert table.metrics()["connectionWaitCount"] == 0  # no call waits for another one of its own lookup

    def scan() -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pylist([{"id": 1, "name": "Alice"}], SCHEMA)

    def whole(context: LookupContext) -> LookupProvider:
        return FullCachingLookupProvider(scan, SCHEMA, version=lambda: "1")

    name = desk.name(whole)
    connection = Connections(host(desk.cache_dir, desk.clock), key_of(name, ""), 1).acquire()
    assert connection is not None
    whole_table = desk.table(name, {"lookup.max-connections": 1, "lookup.async.timeout": "1 s"})
    with pytest.raises(LookupTimeoutError, match=r"connections that lookup\.max-connections = 1 allows were in use"):
        whole_table.get(1)
    connection.release()
    assert names(whole_table, 1) == ["Alice"]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_busy_process_gives_way(desk: Desk, kind: str) -> None:
    """Another process that waits for the only connection gets it between two calls, although the next call could begin at once."""
    turns: list[int] = []

    def answer(keys: pa.Table) -> pa.Table:
        desk.clock.tick(1.0)
        return make_answer(USERS)(keys)

    function = make_function(kind, answer, 1)
    name = desk.name(lambda context: provider(function))
    other, sleep = Connections(host(desk.cache_dir, desk.clock), key_of(name, ""), 1), desk.clock.sleep

    def look_once(seconds: float) -> None:
        sleep(seconds)
        connection = other.acquire()
        if connection is not None:
            turns.append(len(function.log.tables))
            connection.release()

    desk.clock.sleep = look_once  # type: ignore[method-assign]
    desk.restart()  # with this clock
    table = desk.table(name, {"lookup.max-connections": 1, **ONCE})
    with other.waiting():
        for _ in range(2):
            assert len(pairs(table, 1, 2)) == 3
    assert turns == ([2] if kind == "sync" else [1, 2, 3])


@pytest.mark.parametrize("end", ["hangs", "is left"])
def test_a_scan_keeps_its_connection_until_it_ends(desk: Desk, gate: threading.Event, end: str) -> None:
    """A scan that hangs, or whose reader leaves it, still counts as a connection: its system may still be at work."""

    batch = pa.RecordBatch.from_pylist(
        [{"id": 1, "name": "Alice"}], SCHEMA
    )  # imports pandas, which takes longer than the timeout

    def scan() -> Iterator[pa.RecordBatch]:
        yield batch
        gate.wait(BOUND_S)

    name = desk.name(lambda context: FullCachingLookupProvider(scan, SCHEMA, version=lambda: "1"))
    options = {
        "lookup.provider": name,
        "lookup.keys": "id",
        "lookup.max-connections": 1,
        **QUICK,
    }
    table = ProvidedTable(parse_options(options), desk.clock.host())
    table.limit(host(desk.cache_dir, desk.clock))
    connections = Connections(host(desk.cache_dir, desk.clock), key_of(name, ""), 1)
    batches = table.scan(SCHEMA)
    assert next(batches).num_rows == 1
    if end == "is left":
        del batches
    else:
        with pytest.raises(LookupTimeoutError):
            next(batches)
    assert connections.acquire() is None
    gate.set()
    for thread in threading.enumerate():
        if thread.name.startswith("lookupcache-scan-"):
            thread.join(BOUND_S)
    connection = connections.acquire()
    assert connection is not None
    connection.release()


@pytest.mark.parametrize("failing", ["acquire", "create_claim", "write"])
def test_limits_without_a_cache_directory_that_works(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """If the cache directory cannot be read or written, each process keeps the limits for itself, and counts the failure."""
    context = host(cache_dir, FakeClock())
    connections, rate = Connections(context, "system", 1), RateLimit(context, "system", Rate(1, 60.0))
    breaker = CircuitBreaker(context, "system", 10.0)
    owner = Lock if failing == "write" else Disk
    monkeypatch.setattr(owner, failing, raises(OSError(errno.ENOSPC, "no space left on device")))
    connection = connections.acquire()
    assert (connection is None, connections.acquire()) == (False, None)
    with connections.waiting():
        assert connections.are_awaited
    assert connection is not None
    connection.release()
    assert connections.acquire() is not None
    assert (rate.reserve(), rate.reserve()) == (0.0, 60.0)
    for _ in range(5):
        assert breaker.refusal(True) is None
        breaker.failed("down")
    assert breaker.refusal(True) is not None
    breaker.succeeded()
    assert breaker.refusal(True) is None
    assert context.metrics.snapshot()["cacheFailureCount"] > 0


@pytest.mark.parametrize("shared", [True, False], ids=["host", "process"])
def test_versions_and_changes_are_calls_on_connections(
    desk: Desk, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one connection, the function gives it up for a version, and has it again for its lookup; nobody waits in vain."""
    if not shared:
        monkeypatch.setattr(Runtime, "_disk", lambda *_: None)
    connected, called, versions = list[str](), collections.Counter[str](), iter(range(1, 9))

    def connects(name: str, answer: Any = None) -> Any:
        connected.append(name)
        called[name] += 1
        assert len(connected) == 1, f"connected at once: {connected}"
        if answer is not None:
            connected.remove(name)
        return answer

    function = make_function("sync", make_answer(USERS))
    function.opens = lambda: connects("function")
    function.close = lambda: connected.remove("function")  # type: ignore[method-assign]
    changed = pa.table({"id": pa.array([1], pa.int64())})

    def factory(context: LookupContext) -> LookupProvider:
        changes = lambda since: connects("changes", changed)  # noqa: E731
        return LookupFunctionProvider(
            function, SCHEMA, lambda: connects("version", str(next(versions))), changes=changes
        )

    table = desk.table(factory, {**PARTIAL, "lookup.max-connections": 1, **ONCE})
    for _ in range(3):
        assert names(table, 1) == ["Alice"]
    assert called == {"version": 3, "changes": 2, "function": 3}
    assert table.metrics()["changesFailureCount"] == 0


BREAKER = {"lookup.circuit-breaker.wait-duration": "30 s", **QUICK}


def test_a_system_that_is_down_is_left_alone(desk: Desk) -> None:
    """After five lookups in a row that failed, none of the host's processes calls it for the given time; then one tries, and it is as before."""
    state = {"up": False}
    calls: list[int] = []

    def answer(keys: pa.Table) -> pa.Table:
        calls.append(keys.num_rows)
        if not state["up"]:
            raise ConnectionError("no route")
        return make_answer(USERS)(keys)

    name = desk.name(lambda context: provider(make_function("sync", answer)))
    table = desk.table(name, BREAKER)
    for _ in range(5):
        with pytest.raises(LookupFunctionError, match="no route"):
            table.get(1)
    assert len(calls) == 5
    for _ in range(2):
        for _ in range(3):
            with pytest.raises(
                LookupFunctionError, match=r"was not called .*5 times in a row.* for another 30 s; .*no route"
            ):
                table.get(1)
        desk.restart()
        table = desk.table(name, BREAKER)
    assert len(calls) == 5
    desk.clock.tick(30)
    with pytest.raises(LookupFunctionError, match="failed to look up"):
        table.get(1)
    with pytest.raises(LookupFunctionError, match="was not called"):
        table.get(1)
    assert len(calls) == 6
    desk.clock.tick(30)
    state["up"] = True
    assert names(table, 1) == ["Alice"]
    state["up"] = False
    for _ in range(4):
        with pytest.raises(LookupFunctionError, match="failed to look up"):
            table.get(1)
    state["up"] = True
    assert names(table, 1) == ["Alice"]
    assert table.metrics()["circuitOpenCount"] >= 1


def test_only_one_tries_again(cache_dir: Path) -> None:
    """If the process that tries again dies, another one tries after the same time. A version is asked for without being the one that tries."""
    clock = FakeClock()
    breakers = [CircuitBreaker(host(cache_dir, clock), "system", 10.0) for _ in range(3)]
    for breaker in breakers * 2:
        breaker.failed("down")
    assert breakers[0].refusal(True) is not None
    clock.tick(10)
    assert [breaker.refusal(False) for breaker in breakers] == [None] * 3
    assert [breaker.refusal(True) is None for breaker in breakers] == [True, False, False]
    clock.tick(10)
    assert [breaker.refusal(True) is None for breaker in breakers] == [True, False, False]
    breakers[0].succeeded()
    assert [breaker.refusal(True) for breaker in breakers] == [None] * 3


def test_keys_that_fail_among_others_are_no_failure_of_the_system(desk: Desk) -> None:
    """As long as calls for other keys succeed, the circuit stays closed."""

    def answer(keys: pa.Table) -> pa.Table:
        if 3 in keys["id"].to_pylist():
            raise ValueError("bad key")
        return make_answer(USERS)(keys)

    table = desk.serve(make_function("sync", answer), BREAKER)
    for _ in range(12):
        with pytest.raises(LookupFunctionError, match="id = 3"):
            table.get_many(pa.table({"id": [1, 2, 3]}))
    assert names(table, 1) == ["Alice"]


def test_a_version_that_fails_opens_the_circuit(desk: Desk) -> None:
    """A system that is down fails before any lookup, and is not asked for its version either."""
    calls: list[int] = []

    def version() -> str:
        calls.append(1)
        raise ConnectionError("no route")

    table = desk.serve(users(), {**BREAKER, **PARTIAL}, version=version)
    for _ in range(9):
        with pytest.raises(LookupFunctionError):
            table.get(1)
    assert len(calls) == 5
