"""What the processes and the cache directories of a soak hold while it runs, whether that grows, and what is left in the end."""

import collections
import contextlib
import dataclasses
import itertools
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.storage.disk import Disk
from pyspark_lookup.storage.disk.directory import MARKER
from pyspark_lookup.storage.host_metrics import read_table_counts
from tests.soak import tables
from tests.support.cluster import Cluster
from tests.support.disks import bytes_below

MIB = 1024 * 1024
ALLOWED = {"resident": (1.15, 48 * MIB), "handles": (1.15, 16), "processes": (1.15, 3)}
"""How much larger the median of the last quarter may be than that of the second: this factor, and so much more."""
SLACK_BYTES = MIB // 4
"""Allowed beside `lookup.cache.max-bytes`: locks, claims, and records that are written in the place of others."""
_LEAST_SAMPLES = 12


@dataclasses.dataclass(frozen=True)
class Process:
    """A process at one moment: `session` is the id of its session, `parent` of its parent."""

    id: int
    parent: int
    session: int
    command: str

    def usage(self) -> tuple[int, int] | None:
        """(resident bytes, open files) of it now; None if it has ended."""
        with contextlib.suppress(OSError, IndexError):
            resident = int(Path(f"/proc/{self.id}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
            return resident, len(os.listdir(f"/proc/{self.id}/fd"))
        return None


def all_processes() -> Iterator[Process]:
    for id_ in sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        with contextlib.suppress(OSError, IndexError):  # it may end while we look
            command = Path(f"/proc/{id_}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state, parent, _, session = Path(f"/proc/{id_}/stat").read_text().rpartition(")")[2].split()[:4]
            if state != "Z":
                yield Process(id_, int(parent), int(session), command)


def python_workers(session: int) -> list[int]:
    """The Python workers of a session's executors, and the daemons that fork them."""
    return [
        process.id for process in all_processes() if process.session == session and "pyspark.daemon" in process.command
    ]


class Watch:
    """Samples by name. Of several processes of a kind the largest counts, and how many there are."""

    def __init__(self, cluster: Cluster, application: int, directories: Sequence[Path]) -> None:
        self._cluster, self._application, self._directories = cluster, application, directories
        self.samples: dict[str, list[float]] = {}
        self.most: dict[str, int] = {}

    def sample(self) -> None:
        for kind, processes in self._processes().items():
            if usages := [usage for process in processes if (usage := process.usage()) is not None]:
                resident, handles = map(max, zip(*usages, strict=True))
                for name, value in (("resident", resident), ("handles", handles), ("processes", len(usages))):
                    self.samples.setdefault(f"{kind}, {name}", []).append(value)
        for directory in self._directories:
            self.most[directory.name] = max(self.most.get(directory.name, 0), bytes_below(directory / "v1"))

    def _processes(self) -> dict[str, list[Process]]:
        sessions = {worker.pid for worker in self._cluster.workers}
        by_kind: dict[str, list[Process]] = collections.defaultdict(list)
        for process in all_processes():
            if process.id == self._application:
                by_kind["driver's Python"].append(process)
            elif process.parent == self._application:
                by_kind["driver"].append(process)
            elif process.session in sessions and "pyspark.daemon" in process.command:
                by_kind["Python workers"].append(process)
            elif process.session in sessions and "CoarseGrainedExecutorBackend" in process.command:
                by_kind["executors"].append(process)
        return by_kind

    def wrong(self) -> list[str]:
        problems = []
        for name, values in self.samples.items():
            factor, more = ALLOWED[name.rpartition(" ")[2]]
            _, second, _, last = quarters(values)
            if len(values) >= _LEAST_SAMPLES and last > second * factor + more:
                problems.append(f"{name}: {second:.0f} in the second quarter, {last:.0f} in the last")
        over = {name: size for name, size in self.most.items() if size > tables.MAX_BYTES + SLACK_BYTES}
        return [*problems, *(f"{name}: {size} bytes, more than {tables.MAX_BYTES}" for name, size in over.items())]

    def summarize(self) -> dict[str, str]:
        """The medians of the quarters, for people."""
        medians = {}
        for name, values in self.samples.items():
            unit = MIB if name.endswith("resident") else 1
            medians[name] = " ".join(f"{median / unit:.0f}" for median in quarters(values))
        return {**medians, **{f"most bytes, {name}": f"{size}" for name, size in self.most.items()}}


def quarters(values: Sequence[float]) -> list[float]:
    """The medians of the four quarters of samples that were taken one as long after the other."""
    edges = [len(values) * quarter // 4 for quarter in range(5)]
    return [statistics.median(values[begin:end] or [0.0]) for begin, end in itertools.pairwise(edges)]


LATER_S = 2 * 3600.0
"""When leftovers of the dead are old enough to be swept."""
LOCKS = 4096
"""Lock files of a kind at most."""
KNOWN_ENTRIES = {"blocks", "claims", "counters", "locks", "records", "snapshots", "tmp"}
KNOWN_ENTRIES |= {MARKER, "usage", "usage.lock", "evict.lock", "repair.lock", "total.lock", "swept"}


def check_directory(directory: Path) -> tuple[dict[str, Any], list[str]]:
    """(what there was to see and repair, what is wrong) in the cache directory of processes that have all ended."""
    root, disk = directory / "v1", _disk(directory, 0.0)
    counted: collections.Counter[str] = collections.Counter()
    for table in read_table_counts(disk, HostClock()):
        counted.update({name: value for name, value in table.values.items() if value > 0})
    leftovers = [path for part in ("tmp", "claims") for path in (root / part).rglob("*") if path.is_file()]
    repaired = disk.check(repair=True)
    second_check = disk.check()
    _disk(directory, LATER_S).sweep()
    kinds = collections.Counter(path.name.rpartition("-")[0] for path in (root / "locks").iterdir())
    wrong = {
        "damaged after its repair": [*second_check.damaged, *second_check.leftovers],
        "leftovers that outlive a sweep": [path for path in leftovers if path.exists()],
        "so many lock files of kinds": [(kind, count) for kind, count in kinds.items() if count > LOCKS],
        "nobody knows what these are": sorted(set(os.listdir(root)) - KNOWN_ENTRIES),
    }
    report = {"counted": dict(counted), "repaired": [*repaired.damaged, *repaired.leftovers]}
    report |= {"left by the dead": len(leftovers), "locks": dict(kinds)}
    return report, [f"{directory.name}: {problem}: {entries[:5]}" for problem, entries in wrong.items() if entries]


def _disk(directory: Path, later_s: float) -> Disk:
    return Disk(directory, tables.MAX_BYTES, CacheMetricGroup(), lambda: time.time() + later_s, random.Random(0))
