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

    def __init__(self, mine: Numbers, waits: list[Callable[[], None]]) -> None:
        self.mine = mine
        self._waits = waits

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
        ours = np.ones(len(hashes), np.bool_)
        waits: list[Callable[[], None]] = []
        with self._lock:
            for flight, (of_version, others, event) in self._here.items():
                if of_version == version and flight not in self._stuck_here:
                    self._leave(hashes, others, ours, waits, functools.partial(self._await_here, flight, event))
            number, done = self._next, threading.Event()
            self._next += 1
            self._here[number] = version, np.sort(hashes[ours]), done
        try:
            with self._on_host(hashes, ours, version, waits):
                yield Flight(ours, waits)
        finally:
            with self._lock:
                del self._here[number]
                self._stuck_here.discard(number)
            done.set()

    @contextlib.contextmanager
    def _on_host(self, hashes: Numbers, ours: Numbers, version: str, waits: list[Callable[[], None]]) -> Iterator[None]:
        claim = None
        if self._context.disk is not None and ours.any():
            try:
                lock = self._context.disk.acquire("claim", self._space, _LOCK_WAIT_S)
                if lock is not None:
                    try:
                        for name, payload in self._context.disk.claims(self._space, version):
                            if name not in self._stuck:
                                others = np.frombuffer(payload, np.uint64, len(payload) // 8)
                                self._leave(hashes, others, ours, waits, functools.partial(self._await, name))
                        claim = self._context.disk.create_claim(self._space, version, np.sort(hashes[ours]).tobytes())
                    finally:
                        lock.release()
            except OSError:
                self._context.metrics.inc("cacheFailureCount")
        try:
            yield
        finally:
            if claim is not None:
                claim.release()

    def _leave(
        self,
        hashes: Numbers,
        others: Numbers,
        ours: Numbers,
        waits: list[Callable[[], None]],
        wait: Callable[[], None],
    ) -> None:
        """Leave to others what they are loading. Their hashes are sorted."""
        if not len(others):
            return
        at = np.minimum(np.searchsorted(others, hashes), len(others) - 1)
        theirs = (others[at] == hashes) & ours
        if theirs.any():
            ours[theirs] = False
            self._context.metrics.inc("loadWaitCount", int(np.count_nonzero(theirs)))
            waits.append(wait)

    def _await_here(self, flight: int, done: threading.Event) -> None:
        if not done.wait(self._wait_s):
            with self._lock:
                self._stuck_here |= {flight} & self._here.keys()

    def _await(self, name: str) -> None:
        assert self._context.disk is not None
        if not self._context.disk.wait_for_claim(self._space, name, self._wait_s, self._context.clock):
            self._stuck.add(name)  # patience is for the claim, not for each who meets it
