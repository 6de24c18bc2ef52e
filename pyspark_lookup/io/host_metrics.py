"""`Publisher` and `tables_on`: what the processes of a host have counted, put where all of them find it (FLIP-221's metric group).

Each process has a file per table in the cache directory and puts its numbers there after each batch of a Spark task and each
call. So sums over the processes of a host are exact, and short by the batch in flight of a process that was killed.
"""

from __future__ import annotations

import array
import dataclasses
import os
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from pyspark_lookup.base.clock import HostClock
from pyspark_lookup.base.decoding import count_of, number_of, text_of
from pyspark_lookup.base.metrics import COUNTERS, GAUGES, HOST_GAUGES, UNSET, CacheMetricGroup, add_metrics
from pyspark_lookup.io.disk import CounterFile, Counts, Disk, key_of

_MERGE_ABOVE = 64
_APPLICATIONS_KEPT = 16  # that have ended: what older ones have counted is kept together
_OLDER = "older"
_GAUGES_AT = "gaugesAt"  # Unix microseconds at which one last changed in the process
_NUMBER = struct.Struct("=q")
_GAUGES_BEGIN = len(COUNTERS) * _NUMBER.size
_NAMES = (*COUNTERS, *GAUGES, _GAUGES_AT)


class Publisher:
    """One table's counters in this process, and how they reach the other processes of the host. Not for use after a fork."""

    def __init__(self, metrics: CacheMetricGroup, disk: Disk | None, label: str, url: str, clock: HostClock) -> None:
        self.metrics = metrics
        self.application = ""
        self._disk = disk
        self._label = label
        self._url = url
        self._clock = clock
        self._lock = threading.Lock()
        self._file: CounterFile | None = None
        self._published = self._before = CacheMetricGroup().pack()
        self._gauges_at = 0
        self._closed = False

    def publish(self) -> None:
        """Put this process's counters where others of the host find them."""
        if self._disk is not None:
            with self._lock:  # or what one thread has read first might be put last
                self._put(self._disk, self.metrics.pack())

    def close(self) -> None:
        """Leave the file as it is; what is counted from now on goes into another one."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file, self._before, self._closed = None, self._published, True

    def _put(self, disk: Disk, packed: bytes) -> None:
        if self._closed and packed == self._before:  # nothing since
            return
        if packed == self._published and self._file is not None:
            return
        if packed[_GAUGES_BEGIN:] != self._published[_GAUGES_BEGIN:]:
            self._gauges_at = int(self._clock.wall_s() * 1e6)
        try:
            if self._file is not None and self._file.is_removed():
                self._file.close()
                self._file = None
            if self._file is None:
                self._file = self._new_file(disk)
            self._file.put(_less(packed, self._before) + _NUMBER.pack(self._gauges_at))
        except OSError:
            self.metrics.inc("cacheFailureCount")
            return
        self._published = packed

    def _new_file(self, disk: Disk) -> CounterFile:
        host, process = socket.gethostname(), os.getpid()
        name = f"{self._label}-{host}-{process}-{os.urandom(4).hex()}"
        about = {"url": self._url, "host": host, "process": process, "application": self.application}
        file = disk.new_counters(name, about, dict.fromkeys(_NAMES, 0))
        disk.merge_counters(self._label, _MERGE_ABOVE, self._merge, _totals_of)
        return file

    def _merge(self, parts: list[Counts]) -> tuple[dict[str, Any], dict[str, int]]:
        """What a total of those is about, and its numbers."""
        values = {**_add(parts), _GAUGES_AT: max(map(_gauges_at, parts))}
        about = {"url": parts[-1].about.get("url", ""), "ended_s": self._clock.wall_s()}
        of_one = {_application(part) for part in parts}
        if len(of_one) == 1 and None not in of_one:
            return {**about, "application": of_one.pop()}, values
        applications = sorted({name for part in parts for name in _applications(part)})[-_MERGE_ABOVE:]
        return {**about, "applications": applications}, values

    def host_total(self) -> dict[str, int]:
        """The counters summed over all processes of this host that have published, this one included, and what the host says."""
        if self._disk is None:
            return {**self.metrics.snapshot(), **dict.fromkeys(HOST_GAUGES, UNSET)}
        self.publish()
        total = _add(self._disk.counters(self._label))
        return {**total, **host_gauges(self._disk, total, self._clock)}

    def by_worker(self) -> dict[str, dict[str, int]]:
        """The counters of each process of this host that has published, by `<host>-<process>`; this one included.

        Those of processes long gone are together, as `ended`.
        """
        self.publish()
        found: dict[str, list[Counts]] = {}
        for counts in self._disk.counters(self._label) if self._disk is not None else ():
            found.setdefault(_worker(counts), []).append(counts)
        return {name: _add(of_worker) for name, of_worker in found.items()}


def _less(packed: bytes, before: bytes) -> bytes:
    """Numbers with what the counters have counted since; gauges are as they are."""
    counted = array.array("q", packed)
    for place, number in enumerate(array.array("q", before)[: len(COUNTERS)]):
        counted[place] -= number
    return counted.tobytes()


@dataclasses.dataclass(frozen=True)
class ApplicationCounts:
    """What the processes of a host have counted of one table for one Spark application, or for none."""

    values: Mapping[str, int]
    processes: int


@dataclasses.dataclass(frozen=True)
class TableCounts:
    """What the processes of a host have counted of one table, together; by application without those that ended long ago."""

    label: str
    url: str
    values: Mapping[str, int]
    processes: int
    applications: tuple[str, ...]
    by_application: Mapping[str, ApplicationCounts]


_OF_QUESTIONS = {"ufsHeadCount", "ufsListCount", "ufsRetryCount"}


def tables_on(disk: Disk, clock: HostClock) -> list[TableCounts]:
    """What was counted of each table that was read or written on this host, by URL; not of paths where none was ever found."""
    found: dict[str, list[Counts]] = {}
    for counts in disk.counters(""):
        found.setdefault(counts.name.split("-", 1)[0], []).append(counts)
    tables = []
    for label, parts in found.items():
        total = _add(parts)
        counted = {name for name in COUNTERS if total[name]}
        if counted and counted <= _OF_QUESTIONS:
            continue
        values = {**total, "reloadLag": _lag(total, clock)}
        named = sorted({name for part in parts for name in _applications(part)})
        url = str(parts[-1].about.get("url", ""))
        of_one: dict[str, list[Counts]] = {}
        for part in parts:
            if (name := _application(part)) is not None:
                of_one.setdefault(name, []).append(part)
        by_application = {
            name: ApplicationCounts(_add(own), sum(part.alive for part in own)) for name, own in sorted(of_one.items())
        }
        tables.append(TableCounts(label, url, values, sum(p.alive for p in parts), tuple(named), by_application))
    return sorted(tables, key=lambda table: (table.url, table.label))


def host_gauges(disk: Disk, total: Mapping[str, int], clock: HostClock) -> dict[str, int]:
    """`HOST_GAUGES` of a table with these counters."""
    space = disk.space()
    return {
        "reloadLag": _lag(total, clock),
        "diskBlockBytes": space.blocks,
        "diskSegmentBytes": space.segments,
        "diskRecordBytes": space.records,
        "diskBudget": space.budget,
        "diskFreeBytes": space.free,
    }


def _lag(total: Mapping[str, int], clock: HostClock) -> int:
    as_of = total["versionAsOf"]
    # Without CACHE mode every query asks the store, however long ago the last one was.
    return UNSET if as_of == UNSET or not total["metadataCacheCount"] else max(int(clock.wall_s() * 1000) - as_of, 0)


def _add(parts: Sequence[Counts]) -> dict[str, int]:
    return add_metrics([part.values for part in sorted(parts, key=_gauges_at)])


def _gauges_at(counts: Counts) -> int:
    return counts.values.get(_GAUGES_AT, 0)


def _worker(counts: Counts) -> str:
    return f"{counts.about['host']}-{counts.about['process']}" if "process" in counts.about else "ended"


def _applications(counts: Counts) -> list[str]:
    return [name for name in (counts.about.get("application"), *counts.about.get("applications", ())) if name]


def _application(counts: Counts) -> str | None:
    """The one application that counts are of ("": of none); None for those of several together."""
    return None if counts.about.get("applications") else str(counts.about.get("application", ""))


def _totals_of(every: list[Counts]) -> dict[str, str]:
    """The total that each file is to be part of: one for each application that lives or has ended lately, and one for all others."""
    of_one = [(name, counts) for counts in every if (name := _application(counts)) is not None]
    living = {name for name, counts in of_one if counts.alive}
    # Those that are in no total yet have ended last.
    ended = sorted(of_one, key=lambda one: float(one[1].about.get("ended_s", "inf")))
    lately = list(dict.fromkeys(name for name, _ in reversed(ended)))[:_APPLICATIONS_KEPT]
    kept = {"": "", **{name: key_of(name)[:16] for name in (*living, *lately) if name}}
    return {counts.name: kept.get(_application(counts) or "", _OLDER) for _, counts in of_one} | {
        counts.name: _OLDER for counts in every if _application(counts) is None
    }


# --- reloads ----------------------------------------------------------------------------------------

_RELOADS_KEPT = 200


@dataclasses.dataclass(frozen=True)
class Reload:
    """One load of a snapshot on this host: when it began (Unix time), how long it took, and what came of it.

    `error` is empty if it went well; then `version`, `rows` and `bytes` are those of the snapshot. `fetched`: bytes received
    from the store meanwhile.
    """

    at_s: float
    seconds: float
    version: str = ""
    rows: int = 0
    bytes: int = 0
    fetched: int = 0
    error: str = ""


def remember_reload(disk: Disk, key: str, url: str, reload: Reload) -> None:
    """Put a load on record; the latest ones of each snapshot are kept. One process at a time. OSError if the disk fails."""
    _, before = disk.get_record("reloads", key, _reloads_of) or (url, [])
    kept = [dataclasses.asdict(one) for one in [*before, reload][-_RELOADS_KEPT:]]
    disk.replace_record("reloads", key, {"url": url, "reloads": kept})


def _reloads_of(found: Any) -> tuple[str, list[Reload]]:
    """What a record of loads has to be."""
    reloads = []
    for one in found["reloads"]:
        at_s, seconds = (number_of(one[name]) for name in ("at_s", "seconds"))
        rows, size, fetched = (count_of(one[name]) for name in ("rows", "bytes", "fetched"))
        reloads.append(Reload(at_s, seconds, text_of(one["version"]), rows, size, fetched, text_of(one["error"])))
    return text_of(found["url"]), reloads


def reloads_on(disk: Disk) -> dict[str, list[Reload]]:
    """The loads that are on record on this host, by the table's URL, oldest first."""
    found: dict[str, list[Reload]] = {}
    for _, (url, reloads) in disk.records("reloads", "", _reloads_of):
        found.setdefault(url, []).extend(reloads)
    return {url: sorted(reloads, key=lambda reload: reload.at_s) for url, reloads in sorted(found.items())}
