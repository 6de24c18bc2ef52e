"""The harm that is done to a running soak: processes killed, the disk filled, the clock stepped, the store in a storm, the query
stopped and started."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import resource
import signal
from collections.abc import Callable
from pathlib import Path

from tests.soak.parts import FAULTS, STORM, Parts
from tests.soak.watch import python_workers

FAKETIME = "/usr/lib/*/faketime/libfaketimeMT.so.1"
STEPS_S = (3600, -3600)
CALM_BATCHES = 3
"""Micro-batches that are written between two harms, so that a slow machine is harmed less often."""


class Clocks:
    """The wall clocks of the executors' Python workers, stepped by Debian's faketime. `missing`: why it cannot be done."""

    def __init__(self, work: Path) -> None:
        found = sorted(Path("/").glob(FAKETIME.lstrip("/")))
        self.missing = "" if found else f"no {FAKETIME}: apt-get install libfaketime"
        self._files = [work / f"clock{number}" for number in range(2)]
        for number in range(2):
            self.step(number, 0)
        self._library = str(found[0]) if found else ""

    def variables(self, number: int) -> dict[str, str]:
        """What the wrapper of an executor's Python hands on to it."""
        if self.missing:
            return {}
        return {
            "SOAK_PRELOAD": self._library,
            "SOAK_SITE": str(Path(__file__).with_name("site")),
            "FAKETIME_TIMESTAMP_FILE": str(self._files[number]),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",  # a step is one of the wall clock
            "FAKETIME_DISABLE_SHM": "1",
            "NO_FAKE_STAT": "1",  # the times of files are the kernel's
        }

    def step(self, number: int, seconds: int) -> None:
        self._files[number].write_text(f"{seconds:+d}\n")


class Chaos:
    """Harm in an order that is drawn from a deck of each kind, again and again. `counts`: what was done how often.

    `left`: the kinds that were not done yet, for there was nobody to do it to, or no time.
    """

    def __init__(self, rng: random.Random, parts: Parts, clocks: Clocks) -> None:
        self.counts = collections.Counter[str]()
        self._rng = rng
        self._parts = parts
        self._clocks = clocks
        self._kinds = [
            self._kill_executor,
            self._kill_worker,
            self._fill_disk,
            self._storm,
            self._restart,
            self._kill_writer,
        ]
        self._kinds += [] if clocks.missing else [self._step_clock]
        self.left = {kind.__name__ for kind in self._kinds}
        self._deck: list[Callable[[], None]] = []
        self._undo: list[tuple[float, Callable[[], None]]] = []
        self._now = self._next_at = 0.0
        self._calm_until = CALM_BATCHES

    def tick(self, now: float, written: int) -> None:
        """Do what is due: `now` on the monotonic clock, when so many micro-batches have been written."""
        self._now = now
        for entry in [entry for entry in self._undo if entry[0] <= now]:
            self._undo.remove(entry)
            entry[1]()
        if now < self._next_at or written < self._calm_until:
            return
        if not self._deck:
            self._deck = [*self._kinds, self._kill_worker]
            self._rng.shuffle(self._deck)
        harm = self._deck.pop()
        with contextlib.suppress(LookupError, ProcessLookupError):  # there is nobody at this moment
            harm()
            self.left.discard(harm.__name__)
        self._next_at = now + self._rng.uniform(2, 10)
        self._calm_until = written + CALM_BATCHES

    def end(self) -> None:
        """Take back what can be taken back."""
        for _, undo in self._undo:
            undo()
        self._undo.clear()

    def _done(self, what: str, undo: Callable[[], None] | None = None, least_s: float = 0, most_s: float = 0) -> None:
        self.counts[what] += 1
        if undo is not None:
            self._undo.append((self._now + self._rng.uniform(least_s, most_s), undo))

    # --- kinds ------------------------------------------------------------------------------------

    def _kill_executor(self) -> None:
        os.kill(self._parts.cluster.executor(self._rng.randrange(2)), signal.SIGKILL)
        self._done("executors killed")

    def _kill_worker(self) -> None:
        """A Python worker, or the daemon that forks them."""
        found = python_workers(self._parts.cluster.workers[self._rng.randrange(2)].pid)
        os.kill(self._rng.choice(found), signal.SIGKILL)
        self._done("Python workers killed")

    def _fill_disk(self) -> None:
        """The Python workers of an executor may write no byte more, which fails as on a full disk, with another errno."""
        self._limit_files(0)
        self._done("disk filled", lambda: self._limit_files(resource.RLIM_INFINITY), 5, 15)

    def _limit_files(self, size: int) -> None:
        for process in python_workers(self._parts.cluster.workers[1].pid):
            with contextlib.suppress(ProcessLookupError):
                _, hard = resource.prlimit(process, resource.RLIMIT_FSIZE)
                resource.prlimit(process, resource.RLIMIT_FSIZE, (min(size, hard) if hard >= 0 else size, hard))

    def _step_clock(self) -> None:
        number, seconds = self._rng.randrange(2), self._rng.choice(STEPS_S)
        self._clocks.step(number, seconds)
        self._done(f"clock stepped {seconds:+d} s", lambda: self._clocks.step(number, 0), 8, 25)

    def _restart(self) -> None:
        self._parts.workers.tell("application", "restart")
        self._done("stream restarted")

    def _storm(self) -> None:
        self._parts.fail(STORM)
        self._done("storms of the store", lambda: self._parts.fail(FAULTS), 2, 6)

    def _kill_writer(self) -> None:
        """And have another process go on in its place."""
        self._parts.restart_writer(self._rng)
        self._done("writers killed")
