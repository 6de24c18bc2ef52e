"""The harm that is done to a running soak: processes killed, the disk filled, the clock stepped, storms in the store, restarts of the query."""

import collections
import contextlib
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.soak.watch import python_workers

FAULTS = {"delayed": 0.05, "refused": 0.02, "lost": 0.01, "unanswered": 0.01, "truncated": 0.01}
"""How often the store fails, of all requests."""
STORM = {**FAULTS, "refused": 0.4, "lost": 0.1}
FAKETIME = "/usr/lib/*/faketime/libfaketimeMT.so.1"
STEPS_S = (3600, -3600)
CALM_BATCHES = 3
"""Micro-batches that are written between two harms, so that a slow machine is harmed less often."""


class Clocks:
    """The wall clocks of the executors' Python workers, stepped by Debian's faketime. `missing`: why it cannot be done."""

    def __init__(self, work: Path) -> None:
        libraries = sorted(Path("/").glob(FAKETIME.lstrip("/")))
        self.missing = "" if libraries else f"no {FAKETIME}: apt-get install libfaketime"
        self._files = [work / f"clock{number}" for number in range(2)]
        for number in range(2):
            self.step(number, 0)
        self._library = str(libraries[0]) if libraries else ""

    def variables(self, number: int) -> dict[str, str]:
        """The variables that the wrapper of an executor's Python hands on to it."""
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
    """Harm in an order that is drawn from a deck of each kind, again and again. `pending_kinds`: those that could not be done yet."""

    def __init__(self, soak: Any) -> None:
        self._counts = collections.Counter[str]()
        self._soak, self._rng = soak, soak.rng  # a `Soak`, whose module needs this one
        self._kinds = [self._kill_executor, self._kill_worker, self._fill_disk, self._storm, self._restart]
        self._kinds += [self._kill_writer, *([] if soak.clocks.missing else [self._step_clock])]
        self.pending_kinds = {kind.__name__ for kind in self._kinds}
        self._deck: list[Callable[[], None]] = []
        self._undo: list[tuple[float, Callable[[], None]]] = []
        self._now_s = self._next_at = 0.0
        self._calm_until = CALM_BATCHES

    def tick(self, now_s: float, published: int) -> None:
        """Do what is due at `now_s` on the monotonic clock, when `published` micro-batches have been written."""
        self._now_s = now_s
        for entry in [entry for entry in self._undo if entry[0] <= now_s]:
            self._undo.remove(entry)
            entry[1]()
        if now_s < self._next_at or published < self._calm_until:
            return
        if not self._deck:
            self._deck = [*self._kinds, self._kill_worker]
            self._rng.shuffle(self._deck)
        harm = self._deck.pop()
        with contextlib.suppress(LookupError, ProcessLookupError):  # there is nobody at this moment
            harm()
            self._counts[harm.__name__.lstrip("_")] += 1
            self.pending_kinds.discard(harm.__name__)
        self._next_at = now_s + self._rng.uniform(2, 10)
        self._calm_until = published + CALM_BATCHES

    def end(self) -> None:
        for _, undo in self._undo:
            undo()
        self._undo.clear()

    def summarize(self) -> dict[str, Any]:
        return {"harm": dict(self._counts), "harm not done": sorted(self.pending_kinds)}

    def _later(self, undo: Callable[[], None], least_s: float, most_s: float) -> None:
        self._undo.append((self._now_s + self._rng.uniform(least_s, most_s), undo))

    def _kill_executor(self) -> None:
        os.kill(self._soak.cluster.executor(self._rng.randrange(2)), signal.SIGKILL)

    def _kill_worker(self) -> None:
        """Kill a Python worker, or the daemon that forks them."""
        workers = python_workers(self._soak.cluster.workers[self._rng.randrange(2)].pid)
        os.kill(self._rng.choice(workers), signal.SIGKILL)

    def _fill_disk(self) -> None:
        """The Python workers of an executor may write no byte more, which fails as on a full disk, with another errno."""
        self._limit_files(0)
        self._later(lambda: self._limit_files(resource.RLIM_INFINITY), 5, 15)

    def _limit_files(self, size: int) -> None:
        for process in python_workers(self._soak.cluster.workers[1].pid):
            with contextlib.suppress(ProcessLookupError):
                _, hard = resource.prlimit(process, resource.RLIMIT_FSIZE)
                resource.prlimit(process, resource.RLIMIT_FSIZE, (min(size, hard) if hard >= 0 else size, hard))

    def _step_clock(self) -> None:
        number = self._rng.randrange(2)
        self._soak.clocks.step(number, self._rng.choice(STEPS_S))
        self._later(lambda: self._soak.clocks.step(number, 0), 8, 25)

    def _restart(self) -> None:
        self._soak.workers.tell("application", "restart")

    def _storm(self) -> None:
        self._soak.fail(STORM)
        self._later(lambda: self._soak.fail(FAULTS), 2, 6)

    def _kill_writer(self) -> None:
        self._soak.restart_writer()
