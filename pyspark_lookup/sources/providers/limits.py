"""Limits of the load that a host puts on a provider's system: `RateLimit`, `Connections` and `CircuitBreaker`.

All processes of a host share the limits, for all tables with the same `lookup.provider` and the same system (`BuiltInOptions.find_limit_scope`). The state is in small files
of the cache directory, which are read and written under a lock for each call. So nothing is open when a process forks, and a process that is killed leaves at
most a place in the queue unused. Times are on the host's steady clock: the state of an earlier boot does not count. Without a cache directory, or
if it fails, the limits are those of this process alone.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import math
import re
import struct
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Protocol, TypeVar

from pyspark_lookup.core import threads
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.decoding import as_text
from pyspark_lookup.errors import LookupFunctionError, LookupTimeoutError
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import key_of

T = TypeVar("T")

_LOCK_WAIT_S = 5.0  # far longer than anybody holds a lock, unless the process is suspended
_PERIODS_S = {"s": 1.0, "min": 60.0, "h": 3600.0}
_RATE = re.compile(r"(\d{1,6})\s*(?:/\s*(s|min|h))?")
_FAR_S = 7 * 86400.0  # a longer wait can only come from a damaged file


@dataclasses.dataclass(frozen=True)
class Rate:
    """`calls` in each period of `period_s` seconds, at most."""

    calls: int
    period_s: float


def parse_rate(text: str) -> Rate:
    match = _RATE.fullmatch(text.strip().lower())
    if match is None or not int(match[1]):
        raise ValueError(
            "a number of calls per second, 1 to 999999, or a number with a unit (s, min, h), such as '100/min'"
        )
    return Rate(int(match[1]), _PERIODS_S[match[2] or "s"])


class _State(Protocol):
    """A few bytes that one caller at a time reads and writes. Bytes that were never written are zeros."""

    def read(self, size: int, at: int) -> bytes: ...

    def write(self, data: bytes, at: int) -> None: ...


class _InMemory:
    def __init__(self) -> None:
        self._data = bytearray()

    def read(self, size: int, at: int) -> bytes:
        return bytes(self._data[at : at + size]).ljust(size, b"\0")

    def write(self, data: bytes, at: int) -> None:
        self._data.extend(bytes(max(at + len(data) - len(self._data), 0)))
        self._data[at : at + len(data)] = data


class _SharedState:
    """The state with the key `name`, which all processes of the host share if there is a cache directory; otherwise the state of this process.

    Its first bytes name the boot. The first caller after a reboot sets the `head` bytes that follow to zero.
    """

    def __init__(self, context: HostContext, name: str, head: int) -> None:
        self._context = context
        self._name = name
        self._head = head
        self._boot = bytes.fromhex(key_of(context.clock.boot))
        self._lock = threading.Lock()
        self._own = _InMemory()

    def use(self, work: Callable[[_State], T]) -> T:
        """What `work` returns for the state. If the cache directory fails, it is called again, for the state of this process."""
        disk = self._context.disk
        with self._lock:
            try:
                lock = None if disk is None else disk.acquire("limit", self._name, _LOCK_WAIT_S)
                if lock is not None:
                    with contextlib.ExitStack() as stack:
                        stack.callback(lock.release)
                        return work(self._begun(lock))
            except OSError:
                self._context.metrics.inc("cacheFailureCount")
            return work(self._begun(self._own))

    def _begun(self, state: _State) -> _State:
        if state.read(len(self._boot), 0) != self._boot:
            state.write(self._boot + bytes(self._head), 0)
        return state


_AT = 16  # where the state begins, after the name of the boot


class RateLimit:
    """At most `rate.calls` calls begin in any period of `rate.period_s` seconds: a further call waits until the first of them is a period old.

    The file has the number of calls so far, and the times of the last `rate.calls` calls, in a ring. A caller takes the next place in the ring
    before it waits. `sleep` is called outside of the lock.
    """

    def __init__(self, context: HostContext, name: str, rate: Rate) -> None:
        self._context = context
        self._rate = rate
        self._state = _SharedState(context, key_of("rate", name, rate.calls, rate.period_s), 8)

    def reserve(self) -> float:
        """Take the next place. Returns the seconds until the call may begin (0 or more)."""
        now_s = self._context.clock.steady_s()

        def take_place(state: _State) -> float:
            (number,) = struct.unpack("<Q", state.read(8, _AT))
            at = _AT + 8 * (1 + number % self._rate.calls)
            (earlier_s,) = struct.unpack("<d", state.read(8, at))
            begin_s = now_s
            if number >= self._rate.calls and math.isfinite(earlier_s) and abs(earlier_s - now_s) < _FAR_S:
                begin_s = max(now_s, earlier_s + self._rate.period_s)
            state.write(struct.pack("<d", begin_s), at)
            state.write(struct.pack("<Q", (number + 1) % 2**63), _AT)
            return begin_s

        begin_s = self._state.use(take_place)
        if begin_s > now_s:
            self._context.metrics.inc("rateLimitWaitCount")
        return begin_s - now_s


class Slot(Protocol):
    """One of the connections that `Connections` allows."""

    def release(self) -> None: ...


class Connections:
    """At most `at_most` connections are open at once. Each is a claim in the cache directory, which the kernel frees if its process dies."""

    def __init__(self, context: HostContext, name: str, at_most: int) -> None:
        self._context = context
        self._space = key_of("connections", name)
        self.at_most = at_most
        self._own = threading.BoundedSemaphore(at_most)  # counts without a cache directory, or if it fails
        self._own_waiting = 0

    def acquire(self) -> Slot | None:
        """A connection; None if all are open."""
        disk = self._context.disk
        if disk is not None:
            try:
                with disk.hold("claim", self._space, _LOCK_WAIT_S) as alone:
                    if not alone or len(disk.claims(self._space, "open")) >= self.at_most:
                        return None
                    return disk.create_claim(self._space, "open", b"")
            except OSError:
                self._context.metrics.inc("cacheFailureCount")
        return self._own if self._own.acquire(blocking=False) else None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A block in which the holders of connections see that somebody waits for one."""
        self._context.metrics.inc("connectionWaitCount")
        disk = self._context.disk
        claim = None
        if disk is not None:
            with contextlib.suppress(OSError):  # then only this process sees who waits
                claim = disk.create_claim(self._space, "waiting", b"")
        self._own_waiting += 1
        try:
            yield
        finally:
            self._own_waiting -= 1
            if claim is not None:
                claim.release()

    @property
    def are_awaited(self) -> bool:
        """Whether some process waits for a connection."""
        disk = self._context.disk
        with contextlib.suppress(OSError):
            return bool(self._own_waiting or (disk is not None and disk.claims(self._space, "waiting")))
        return False


_FAILURES = 5  # lookups in a row, as in Envoy's outlier detection
_BREAKER = struct.Struct("<Qdq256s")


class CircuitBreaker:
    """Refuses calls for `wait_s` seconds after five calls in a row have failed for all their keys. Then it lets one lookup or scan try again.

    While that one runs, or if its process dies, all other calls are refused for another `wait_s`.
    """

    def __init__(self, context: HostContext, name: str, wait_s: float) -> None:
        self._context = context
        self._wait_s = wait_s
        self._state = _SharedState(context, key_of("breaker", name), _BREAKER.size)

    def refusal(self, probes: bool) -> str | None:
        """Why a call is refused; None if it may begin. `probes`: whether the call is a lookup or a scan, which may test whether the system is back."""
        now_s = self._context.clock.steady_s()

        def find_reason(state: _State) -> str | None:
            failures, refused_s, size, reason = _BREAKER.unpack(state.read(_BREAKER.size, _AT))
            if failures < _FAILURES:
                return None
            left_s = refused_s + self._wait_s - now_s
            if not 0 < left_s <= self._wait_s:
                if probes:
                    state.write(_BREAKER.pack(failures, now_s, size, reason), _AT)
                return None
            text = reason[: max(min(size, len(reason)), 0)].decode(errors="replace")
            return (
                f"it has failed {failures} times in a row, so lookup.circuit-breaker.wait-duration = {self._wait_s:g} s refuses calls for another "
                f"{left_s:.0f} s; the last error was: {text}"
            )

        refusal = self._state.use(find_reason)
        if refusal is not None:
            self._context.metrics.inc("circuitOpenCount")
        return refusal

    def succeeded(self) -> None:
        """Record that a lookup or scan has succeeded."""

        def clear(state: _State) -> None:
            if any(state.read(8, _AT)):
                state.write(bytes(_BREAKER.size), _AT)

        self._state.use(clear)

    def failed(self, reason: str) -> None:
        """Record that a call has failed for all its keys."""
        text = reason.encode(errors="replace")[:256]

        def count(state: _State) -> None:
            failures = _BREAKER.unpack(state.read(_BREAKER.size, _AT))[0] + 1
            state.write(_BREAKER.pack(min(failures, 2**32), self._context.clock.steady_s(), len(text), text), _AT)

        self._state.use(count)


_CONNECTION_POLL_S = 0.05
_WATCH_EVERY_S = 1.0
_GIVE_WAY_S = 2 * _CONNECTION_POLL_S  # everybody who waits looks once in this time


class CallGate:
    """Delays or refuses calls of the provider `name`, so that they keep its limits. There are no limits until `limit` is called.

    `timeout_s`: the longest wait for a connection. The time that calls wait counts against no other timeout, see `waited_s`. `offer`:
    closes the function if it is open and idle, and a call waits for its connection.
    """

    def __init__(self, name: str, clock: HostClock, timeout_s: float, offer: Callable[[], None]) -> None:
        self._name = name
        self._clock = clock
        self._timeout_s = timeout_s
        self._offer = offer
        self.version_record = ""
        self._version = ""
        self._waited_s = 0.0
        self._context: HostContext | None = None
        self._rate: RateLimit | None = None
        self._connections: Connections | None = None
        self._breaker: CircuitBreaker | None = None
        self._gives_way = False
        self._gave_way_s = -math.inf
        self._watched: Callable[[], float | None] | None = None
        self._release: weakref.finalize[..., object] | None = None  # releases the connection of the open function

    def limit(
        self, context: HostContext, system: str, rate: Rate | None, connections: int | None, wait_s: float | None
    ) -> None:
        """Set the limits. Calls of one `system` share them. `wait_s`: how long a circuit stays open; None: there is no circuit breaker."""
        self._context = context
        self._rate = None if rate is None else RateLimit(context, system, rate)
        self._connections = None if connections is None else Connections(context, system, connections)
        self._breaker = None if wait_s is None else CircuitBreaker(context, system, wait_s)

    # --- the circuit breaker ------------------------------------------------------------------------

    def check(self, operation: str, probes: bool = True) -> None:
        """Raise LookupFunctionError if calls are refused, because the last ones have failed. `probes`: as in `CircuitBreaker.refusal`."""
        refusal = None if self._breaker is None else self._breaker.refusal(probes)
        if refusal is not None:
            raise LookupFunctionError(f"provider {self._name} was not called ({operation}): {refusal}")

    def succeeded(self) -> None:
        if self._breaker is not None:
            self._breaker.succeeded()

    def failed(self, problem: BaseException | None) -> None:
        if self._breaker is not None:
            self._breaker.failed(str(problem))

    # --- the last version ---------------------------------------------------------------------------

    def keep_version(self, version: str) -> None:
        """Record a version, for `last_version` of all processes of the host."""
        if version != self._version and self._context is not None and self._context.disk is not None:
            try:
                self._context.disk.replace_record("provided", self.version_record, version)
                self._version = version
            except OSError:
                self._context.metrics.inc("cacheFailureCount")

    def last_version(self) -> str | None:
        """The version that a process of this host has recorded last; None if there is none. Counts a stale answer."""
        if self._context is None or self._context.disk is None:
            return None
        version: str | None = self._context.disk.get_record("provided", self.version_record, as_text)
        if version is not None:
            self._context.metrics.inc("staleServedCount")
        return version

    # --- turns and connections ----------------------------------------------------------------------

    def waited_s(self) -> float:
        """The total time for which calls have waited for their turn, in seconds, including the current wait."""
        return self._waited_s

    async def sleep(self, seconds: float) -> None:
        slept: concurrent.futures.Future[None] = concurrent.futures.Future()
        slept.set_running_or_notify_cancel()  # so that cancelling the call does not cancel it

        def wait() -> None:  # on its own thread, so that several calls wait at the same time
            try:
                self._clock.sleep(seconds)
            finally:
                slept.set_result(None)

        threads.start(f"lookupcache-retry-{self._name}", wait, foreign=True)
        await asyncio.wrap_future(slept)

    async def take_turn(self) -> None:
        """Wait until one more call is within the rate limit."""
        if self._rate is not None and (wait_s := self._rate.reserve()):
            self._waited_s += wait_s
            await self.sleep(wait_s)

    async def connect(self, operation: str) -> Slot | None:
        """A connection, as soon as one is free; None if they are not limited. Raises LookupTimeoutError if none becomes free in time."""
        pauses = self._pauses(operation)
        try:
            while True:
                await self.sleep(next(pauses))
        except StopIteration as end:
            connection: Slot | None = end.value
            return connection
        finally:
            pauses.close()

    def connect_and_take_turn(self, operation: str) -> Slot | None:
        """`connect` and `take_turn`, for a caller without an event loop."""
        pauses = self._pauses(operation)
        with contextlib.closing(pauses):
            while True:
                try:
                    self._clock.sleep(next(pauses))
                except StopIteration as end:
                    connection: Slot | None = end.value
                    break
        if self._rate is not None and (wait_s := self._rate.reserve()):
            self._clock.sleep(wait_s)
        return connection

    def _pauses(self, operation: str) -> Generator[float, None, Slot | None]:
        """Yields the pauses (seconds) until a connection is free, and returns the connection."""
        connections = self._connections
        if connections is None:
            return None
        if self._gives_way:
            self._gives_way = False
            self._waited_s += _GIVE_WAY_S
            yield _GIVE_WAY_S
        if (connection := connections.acquire()) is not None:
            return connection
        until_s = self._clock.steady_s() + self._timeout_s
        with connections.waiting():
            self._offer()  # what waits may be a call of version() or a scan beside this process's own function
            while self._clock.steady_s() < until_s:
                self._waited_s += _CONNECTION_POLL_S
                yield _CONNECTION_POLL_S
                if (connection := connections.acquire()) is not None:
                    return connection
        raise LookupTimeoutError(
            f"provider {self._name} was not called ({operation}): all connections that lookup.max-connections = {connections.at_most} allows were in use for "
            f"lookup.async.timeout = {self._timeout_s:g} s: raise one of these options"
        )

    def give_way(self) -> None:
        """Make the next call wait a moment before it takes a connection.

        The race: a waiter looks for a free connection only from time to time. If the next call of this process took the connection as soon as it is
        free, the waiter would never get it.
        """
        self._gives_way = True

    def disconnect_call(self, connection: Slot) -> None:
        """Free the connection of a call. Others that wait for one get a turn every second."""
        connection.release()
        now_s = self._clock.steady_s()
        if now_s >= self._gave_way_s + _WATCH_EVERY_S and self._connections is not None:
            self._gave_way_s = now_s
            if self._connections.are_awaited:
                self.give_way()

    def keep(self, connection: Slot | None, function: object) -> None:
        """Keep a connection taken for as long as a function is open. If a call of the function hangs, that is until the call ends."""
        self._release = None if connection is None else weakref.finalize(function, connection.release)

    def disconnect(self) -> None:
        """Free the connection of the function, which was closed."""
        if self._release is not None:
            self._release()
            self._release = None

    def abandon(self) -> None:
        """Leave the connection to a function that hangs."""
        self._release = None

    @property
    def is_awaited(self) -> bool:
        """Whether another call waits for the connection of the open function."""
        return self._release is not None and self._connections is not None and self._connections.are_awaited

    def watch(self) -> None:
        """Call `offer` in a thread when another process waits for the connection of the open function. Looks every second."""
        context = self._context
        if self._release is None or context is None or context.timer is None:
            return

        def look() -> float | None:
            if self._release is None:
                return None
            if self.is_awaited:
                context.start(f"lookupcache-disconnect-{self._name}", self._offer)
            return _WATCH_EVERY_S

        if self._watched is None:
            self._watched = look
        with contextlib.suppress(RuntimeError):  # the process ends
            context.timer.run_soon(self._watched)
