"""Single flight: of several callers that lack a key at the same time, one loads it and the others wait.

A process claims the keys that it is about to load: it writes their hashes into a file, and keeps that locked until it is done or dead.
Others leave these keys to it, wait for the lock, and look into the cache again. Nobody waits while holding a claim, so no two can wait for
each other. Two keys with the same hash are treated as one, which costs no more than a wait.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import numpy as np

from pyspark_lookup.columnar.keys import Numbers, Seed
from pyspark_lookup.storage.context import HostContext

_LOCK_WAIT_S = 1.0


class Flight:
    """Which of the requested keys the caller has to load (`to_load`, bool per key). Others are loading the rest."""

    def __init__(self, hashes: Numbers) -> None:
        self.to_load = np.ones(len(hashes), np.bool_)
        self.hashes = hashes
        self._waits: list[Callable[[], None]] = []

    def leave(self, hashes_elsewhere: Numbers, wait: Callable[[], None]) -> int:
        """Leave the keys with these hashes (ascending) to another caller, who is loading them. Returns their number.

        `wait` blocks until that load has ended.
        """
        places = np.minimum(np.searchsorted(hashes_elsewhere, self.hashes), len(hashes_elsewhere) - 1)
        is_elsewhere = (
            (hashes_elsewhere[places] == self.hashes) & self.to_load
            if len(hashes_elsewhere)
            else np.zeros_like(self.to_load)
        )
        if is_elsewhere.any():
            self.to_load[is_elsewhere] = False
            self._waits.append(wait)
        return int(np.count_nonzero(is_elsewhere))

    def wait(self) -> None:
        """Wait until the loads of the others have ended. Never call it inside `Flights.claim`: two callers would wait for each other."""
        for wait in self._waits:
            wait()


class Flights:
    """The running loads of one table's keys in this process and, if there is a `disk`, on this host.

    `seed`: of the hashes of keys, the same in all processes. `wait_s`: how long to wait for another load; after that, a caller loads the
    keys itself.
    """

    def __init__(self, context: HostContext, space: str, seed: Seed, wait_s: float) -> None:
        self.seed = seed
        self._context = context
        self._space = space
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._in_process: dict[int, tuple[str, Numbers, threading.Event]] = {}
        self._next = 0
        self._stuck: set[str] = set()  # claims for which a wait has timed out
        self._stuck_in_process: set[int] = set()

    @contextlib.contextmanager
    def claim(self, hashes: Numbers, version: str) -> Iterator[Flight]:
        """Claim the keys that nobody else is loading, until the block ends."""
        flight = Flight(hashes)
        with self._lock:
            for flight_number, (of_version, hashes_elsewhere, event) in self._in_process.items():
                if of_version == version and flight_number not in self._stuck_in_process:
                    self._leave(
                        flight, hashes_elsewhere, functools.partial(self._await_in_process, flight_number, event)
                    )
            number, finished = self._next, threading.Event()
            self._next += 1
            self._in_process[number] = version, np.sort(hashes[flight.to_load]), finished
        try:
            with self._on_host(flight, version):
                yield flight
        finally:
            with self._lock:
                del self._in_process[number]
                self._stuck_in_process.discard(number)
            finished.set()

    @contextlib.contextmanager
    def _on_host(self, flight: Flight, version: str) -> Iterator[None]:
        claim, disk = None, self._context.disk
        if disk is not None and flight.to_load.any():
            try:
                with disk.hold("claim", self._space, _LOCK_WAIT_S) as alone:
                    for name, payload in disk.claims(self._space, version) if alone else ():
                        if name not in self._stuck:
                            hashes_elsewhere = np.frombuffer(payload, np.uint64, len(payload) // 8)
                            self._leave(flight, hashes_elsewhere, functools.partial(self._await_on_host, name))
                    if alone:
                        claim = disk.create_claim(
                            self._space, version, np.sort(flight.hashes[flight.to_load]).tobytes()
                        )
            except OSError:
                self._context.metrics.inc("cacheFailureCount")
        try:
            yield
        finally:
            if claim is not None:
                claim.release()

    def _leave(self, flight: Flight, hashes_elsewhere: Numbers, wait: Callable[[], None]) -> None:
        self._context.metrics.inc("loadWaitCount", flight.leave(hashes_elsewhere, wait))

    def _await_in_process(self, flight_number: int, finished: threading.Event) -> None:
        if not finished.wait(self._wait_s):
            with self._lock:
                self._stuck_in_process |= {flight_number} & self._in_process.keys()

    def _await_on_host(self, name: str) -> None:
        assert self._context.disk is not None
        if not self._context.disk.wait_for_claim(self._space, name, self._wait_s, self._context.clock):
            self._stuck.add(name)  # later callers do not wait for this claim again
