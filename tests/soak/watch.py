"""What the processes and the cache directories of a soak hold while it runs, and whether that grows."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from tests.cluster import Cluster
from tests.soak import tables
from tests.soak.processes import all_processes, descendants, usage

MIB = 1024 * 1024
ALLOWED = {"resident": (1.15, 48 * MIB), "handles": (1.15, 16), "processes": (1.15, 3)}
"""How much larger the median of the last quarter may be than that of the second: this factor, and so much more."""
SNAPSHOT_BYTES = 32 * MIB
"""Allowed beside the blocks: snapshots within `lookup.full-cache.retain`, shared loads, what is being written."""
BLOCK_SHARE = 1.125
"""Allowed of `lookup.cache.max-bytes`: a share of puts may be on the disk before others have made room for it."""
_LEAST_SAMPLES = 12
_TRIES = 3
_BRIEF = ("planner's workers",)
"""Processes that live for seconds, whenever a stream starts: what one holds cannot grow for long. They are counted."""


class Pulse:
    """Whether the stream goes on: it hangs when neither a micro-batch is written nor an error said for `hang_s`.

    A query that fails and is run again may take longer for a micro-batch, but no longer than `_TRIES` such times. While the
    query has been stopped by the run itself, neither counts. Times are of the monotonic clock.
    """

    def __init__(self, hang_s: float, now: float) -> None:
        self._hang_s = hang_s
        self._heard_at = self._written_at = now
        self._stopped = False
        self.silent_s = self.unwritten_s = 0.0

    def heard(self, kind: str, at: float) -> None:
        """Take in a note of the application."""
        began_again = self._stopped and kind == "started"
        self._stopped = kind == "stopping" or (self._stopped and not began_again)
        if kind in ("written", "stopping", "stopped") or began_again:
            self._heard_at = self._written_at = at
        elif kind == "ended":
            self._heard_at = at

    def check(self, now: float) -> None:
        """AssertionError if it hangs."""
        if self._stopped:
            return
        silent_s, unwritten_s = now - self._heard_at, now - self._written_at
        self.silent_s, self.unwritten_s = max(self.silent_s, silent_s), max(self.unwritten_s, unwritten_s)
        if silent_s > self._hang_s:
            raise AssertionError(f"nothing was heard of the stream for {silent_s:.0f} s")
        if unwritten_s > _TRIES * self._hang_s:
            raise AssertionError(f"no micro-batch was written for {unwritten_s:.0f} s")


class Watch:
    """Samples by name. Of several processes of a kind the largest counts, and how many there are."""

    def __init__(self, cluster: Cluster, application: int, directories: Sequence[Path]) -> None:
        self._cluster = cluster
        self._application = application
        self._directories = directories
        self.samples: dict[str, list[tuple[float, float]]] = {}
        self.most: dict[str, int] = {}

    def sample(self, now: float) -> None:
        """Look at everything once."""
        for kind, processes in self._processes().items():
            if kind in _BRIEF:
                self._add(now, f"{kind}, processes", len(processes))
            elif found := [used for process in processes if (used := usage(process)) is not None]:
                self._add(now, f"{kind}, resident", max(used.resident for used in found))
                self._add(now, f"{kind}, handles", max(used.handles for used in found))
                self._add(now, f"{kind}, processes", len(found))
        for directory in self._directories:
            for part in ("blocks", "snapshots"):
                size = bytes_below(directory / "v1" / part)
                name = f"{directory.name} {part}"
                self.most[name] = max(self.most.get(name, 0), size)

    def _add(self, now: float, name: str, value: float) -> None:
        self.samples.setdefault(name, []).append((now, value))

    def _processes(self) -> dict[str, list[int]]:
        sessions = {worker.pid for worker in self._cluster.workers}
        kinds = ("executors", "Python workers", "driver", "planner's Python", *_BRIEF)
        found: dict[str, list[int]] = {kind: [] for kind in kinds}
        for process in all_processes():
            if process.session in sessions and "pyspark.daemon" in process.command:
                found["Python workers"].append(process.id)
            elif process.session in sessions and "CoarseGrainedExecutorBackend" in process.command:
                found["executors"].append(process.id)
        planners = descendants(self._application)
        daemons = {process.id for process in planners if "pyspark.daemon" in process.command}
        for process in planners:
            kind = "planner's Python" if process.id in daemons else "driver"
            found["planner's workers" if process.parent in daemons else kind].append(process.id)
        found["driver's Python"] = [self._application]
        return found

    def wrong(self) -> list[str]:
        """What has grown, and which directory was over its budget."""
        found = [text for name, values in self.samples.items() if (text := growth(name, values)) is not None]
        allowed = {"blocks": tables.MAX_BYTES * BLOCK_SHARE, "snapshots": SNAPSHOT_BYTES}
        for name, size in self.most.items():
            if size > allowed[name.rpartition(" ")[2]]:
                found.append(f"{name}: {size} bytes, more than {allowed[name.rpartition(' ')[2]]:.0f}")
        return found

    def told(self) -> dict[str, str]:
        """The medians of the quarters, for people."""
        shown = {}
        for name, values in self.samples.items():
            unit = MIB if name.endswith("resident") else 1
            shown[name] = " ".join(f"{median / unit:.0f}" for median in quarters(values))
        return {**shown, **{f"most bytes, {name}": f"{size}" for name, size in self.most.items()}}


def growth(name: str, values: Sequence[tuple[float, float]]) -> str | None:
    if len(values) < _LEAST_SAMPLES:
        return None
    factor, more = ALLOWED[name.rpartition(" ")[2]]
    _, second, _, last = quarters(values)
    if last <= second * factor + more:
        return None
    return f"{name}: {second:.0f} in the second quarter, {last:.0f} in the last"


def quarters(values: Sequence[tuple[float, float]]) -> list[float]:
    """The medians of the four quarters of the time that the samples cover."""
    begin, end = values[0][0], values[-1][0]
    found: list[list[float]] = [[], [], [], []]
    for at, value in values:
        found[min(int(4 * (at - begin) / ((end - begin) or 1)), 3)].append(value)
    return [statistics.median(part) if part else 0.0 for part in found]


def bytes_below(directory: Path) -> int:
    """Bytes of the files below a directory."""
    size = 0
    for place, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.stat(os.path.join(place, name)).st_size
    return size
