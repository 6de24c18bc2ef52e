"""The harm that is done to a running soak: processes killed, the disk filled, the clock stepped, the store in a storm, the query
stopped and started."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import resource
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tests.cluster import Cluster
from tests.soak.processes import python_workers

FAKETIME = "/usr/lib/*/faketime/libfaketimeMT.so.1"
STEPS_S = (3600, -3600)
CALM_BATCHES = 3
"""Micro-batches that are written between two harms, so that a slow machine is harmed less often."""
_TMPFS_MIB = 64


class Disk(Protocol):
    """How one executor's cache directory is brought to refuse writes."""

    how: str
    directory: Path

    def fill(self) -> None: ...
    def free(self) -> None: ...
    def close(self) -> None: ...


class SmallDisk:
    """A small tmpfs, filled to the last byte. OSError if none may be mounted here."""

    how = "a full tmpfs"

    def __init__(self, mount: Path) -> None:
        mount.mkdir()
        self._mount = mount
        self.directory = mount / "cache"
        command = ["mount", "-t", "tmpfs", "-o", f"size={_TMPFS_MIB}m,mode=700", "tmpfs", str(mount)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (subprocess.CalledProcessError, FileNotFoundError) as problem:
            raise OSError(f"no tmpfs can be mounted: {problem}") from problem

    def fill(self) -> None:
        with (self._mount / "filler").open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))

    def free(self) -> None:
        (self._mount / "filler").unlink(missing_ok=True)

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self._mount)], check=False)


class LimitedFiles:
    """Python workers that may not write to files: RLIMIT_FSIZE, which fails as a full disk does, with another errno."""

    how = "RLIMIT_FSIZE of the Python workers, for no tmpfs may be mounted here"

    def __init__(self, directory: Path, workers: Callable[[], list[int]]) -> None:
        self.directory = directory
        self._workers = workers

    def fill(self) -> None:
        self._limit(0)

    def free(self) -> None:
        self._limit(resource.RLIM_INFINITY)

    def _limit(self, size: int) -> None:
        for process in self._workers():
            with contextlib.suppress(ProcessLookupError):
                _, hard = resource.prlimit(process, resource.RLIMIT_FSIZE)
                resource.prlimit(process, resource.RLIMIT_FSIZE, (min(size, hard) if hard >= 0 else size, hard))

    def close(self) -> None:
        self.free()


class Clocks:
    """The wall clocks of the executors' Python workers, stepped by Debian's faketime. `missing`: why it cannot be done."""

    def __init__(self, work: Path) -> None:
        found = sorted(Path("/").glob(FAKETIME.lstrip("/")))
        self.missing = "" if found else f"no {FAKETIME}: apt-get install libfaketime"
        self._files = [work / f"clock{number}" for number in range(2)]
        for file in self._files:
            file.write_text("+0\n")
        self._library = str(found[0]) if found else ""
        self._site = Path(__file__).with_name("site")

    def variables(self, number: int) -> dict[str, str]:
        """What the wrapper of an executor's Python hands on to it."""
        if self.missing:
            return {}
        return {
            "SOAK_PRELOAD": self._library,
            "SOAK_SITE": str(self._site),
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

    def __init__(
        self,
        rng: random.Random,
        cluster: Cluster,
        disk: Disk,
        clocks: Clocks,
        order: Callable[[str], None],
        storm: Callable[[bool], None],
        kill_writer: Callable[[], None],
    ) -> None:
        self.counts = collections.Counter[str]()
        self._rng = rng
        self._cluster = cluster
        self._disk = disk
        self._clocks = clocks
        self._order = order
        self._storm = storm
        self._kill_writer = kill_writer
        self._kinds: list[Callable[[], bool]] = [self.kill_executor, self.kill_worker, self.fill_disk, self.step_clock]
        self._kinds += [self.restart, self.storm, self.kill_writer]
        self.left = {kind.__name__ for kind in self._kinds}
        self._deck: list[Callable[[], bool]] = []
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
            self._deck = [*self._kinds, self.kill_worker]
            self._rng.shuffle(self._deck)
        harm = self._deck.pop()
        if harm():
            self.left.discard(harm.__name__)
        self._next_at = now + self._rng.uniform(2, 10)
        self._calm_until = written + CALM_BATCHES

    def end(self) -> None:
        """Take back what can be taken back."""
        for _, undo in self._undo:
            undo()
        self._undo.clear()

    def _later(self, least_s: float, most_s: float, undo: Callable[[], None]) -> None:
        self._undo.append((self._now + self._rng.uniform(least_s, most_s), undo))

    # Each says whether it was done, or cannot be done here.

    def kill_executor(self) -> bool:
        try:
            os.kill(self._cluster.executor(self._rng.randrange(2)), signal.SIGKILL)
        except (LookupError, ProcessLookupError):
            return False
        self.counts["executors killed"] += 1
        return True

    def kill_worker(self) -> bool:
        """A Python worker, or the daemon that forks them."""
        found = python_workers(self._cluster.workers[self._rng.randrange(2)].pid)
        try:
            os.kill(self._rng.choice(found), signal.SIGKILL)
        except (LookupError, ProcessLookupError):
            return False
        self.counts["Python workers killed"] += 1
        return True

    def fill_disk(self) -> bool:
        self._disk.fill()
        self.counts[f"disk filled ({self._disk.how})"] += 1
        self._later(5, 15, self._disk.free)
        return True

    def step_clock(self) -> bool:
        if self._clocks.missing:
            return True
        number, seconds = self._rng.randrange(2), self._rng.choice(STEPS_S)
        self._clocks.step(number, seconds)
        self.counts[f"clock stepped {seconds:+d} s"] += 1
        self._later(8, 25, lambda: self._clocks.step(number, 0))
        return True

    def restart(self) -> bool:
        self._order("restart")
        self.counts["stream restarted"] += 1
        return True

    def storm(self) -> bool:
        self._storm(True)
        self.counts["storms of the store"] += 1
        self._later(2, 6, lambda: self._storm(False))
        return True

    def kill_writer(self) -> bool:
        self._kill_writer()
        self.counts["writers killed"] += 1
        return True
