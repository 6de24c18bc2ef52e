"""Single flight: of several that lack a key at the same time, one loads it and the others wait for that.

Who is about to load keys says so in a claim: their hashes, in a file that it keeps locked until it is
done or dead. Others leave those keys to it, wait for the lock, and look again. Nobody waits while
holding a claim, so no two can wait for each other. Two keys of one hash are taken for one here, which
costs a wait and no more.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import numpy as np

from pyspark_lookup.columnar.keys import Numbers, Seed
from pyspark_lookup.io.context import HostContext

_LOCK_WAIT_S = 1.0


class Flight:
    """What of the keys that were asked for is for the caller to load (`mine`, bool per key), and what others are loading."""

    def __init__(self, hashes: Numbers) -> None:
        self.mine = np.ones(len(hashes), np.bool_)
        self.hashes = hashes
        self._waits: list[Callable[[], None]] = []

    def leave(self, others: Numbers, wait: Callable[[], None]) -> int:
        """Leave to others the keys with these hashes (ascending), which they are loading; how many these are."""
        at = np.minimum(np.searchsorted(others, self.hashes), len(others) - 1)
        theirs = (others[at] == self.hashes) & self.mine if len(others) else np.zeros_like(self.mine)
        if theirs.any():
            self.mine[theirs] = False
            self._waits.append(wait)
        return int(np.count_nonzero(theirs))

    def wait(self) -> None:
        """Until the others have loaded theirs, or given up. Not while one's own claim is held."""
        for wait in self._waits:
            wait()


class Flights:
    """Loads of one table's keys that are under way in this process, and on this host if there is a `disk`.

    `seed`: of the hashes of keys, the same in all processes. `wait_s`: how long one waits for another;
    then it loads for itself.
    """

    def __init__(self, context: HostContext, space: str, seed: Seed, wait_s: float) -> None:
        self.seed = seed
        self._context = context
        self._space = space
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._here: dict[int, tuple[str, Numbers, threading.Event]] = {}
        self._next = 0
        self._stuck: set[str] = set()  # claims that were waited for in vain
        self._stuck_here: set[int] = set()

    @contextlib.contextmanager
    def claim(self, hashes: Numbers, version: str) -> Iterator[Flight]:
        """Say that those keys are being loaded which nobody else loads; until the block ends."""
        flight = Flight(hashes)
        with self._lock:
            for other, (of_version, others, event) in self._here.items():
                if of_version == version and other not in self._stuck_here:
                    self._leave(flight, others, functools.partial(self._await_here, other, event))
            number, done = self._next, threading.Event()
            self._next += 1
            self._here[number] = version, np.sort(hashes[flight.mine]), done
        try:
            with self._on_host(flight, version):
                yield flight
        finally:
            with self._lock:
                del self._here[number]
                self._stuck_here.discard(number)
            done.set()

    @contextlib.contextmanager
    def _on_host(self, flight: Flight, version: str) -> Iterator[None]:
        claim, disk = None, self._context.disk
        if disk is not None and flight.mine.any():
            try:
                with disk.hold("claim", self._space, _LOCK_WAIT_S) as alone:
                    for name, payload in disk.claims(self._space, version) if alone else ():
                        if name not in self._stuck:
                            others = np.frombuffer(payload, np.uint64, len(payload) // 8)
                            self._leave(flight, others, functools.partial(self._await, name))
                    if alone:
                        claim = disk.create_claim(self._space, version, np.sort(flight.hashes[flight.mine]).tobytes())
            except OSError:
                self._context.metrics.inc("cacheFailureCount")
        try:
            yield
        finally:
            if claim is not None:
                claim.release()

    def _leave(self, flight: Flight, others: Numbers, wait: Callable[[], None]) -> None:
        self._context.metrics.inc("loadWaitCount", flight.leave(others, wait))

    def _await_here(self, flight: int, done: threading.Event) -> None:
        if not done.wait(self._wait_s):
            with self._lock:
                self._stuck_here |= {flight} & self._here.keys()

    def _await(self, name: str) -> None:
        assert self._context.disk is not None
        if not self._context.disk.wait_for_claim(self._space, name, self._wait_s, self._context.clock):
            self._stuck.add(name)  # patience is for the claim, not for each who meets it
