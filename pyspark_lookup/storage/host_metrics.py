"""`Publisher` and `read_table_counts`: the counters of a host's processes, shared in the cache directory (FLIP-221's metric group).

Each process has a file for each table. It writes its numbers there after each batch of a Spark task and after each call. For calls of `get`,
`get_many` and `scan` that follow each other closely, a thread writes the numbers every tenth of a second (`Engine.publish_soon`). So the sums over a
host's processes are exact, but for the last batch, or the calls of the last tenth of a second, of a process that was killed.
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

from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.decoding import as_count, as_number, as_text
from pyspark_lookup.core.metrics import COUNTERS, GAUGES, HOST_GAUGES, UNSET, CacheMetricGroup, add_metrics
from pyspark_lookup.storage.disk import CounterFile, Counts, Disk, key_of

_MERGE_ABOVE = 64  # files of a table; if there are more, those of ended processes are merged
_APPLICATIONS_KEPT = 16  # ended applications that keep a separate total; those that ended earlier are merged
_OLDER = "older"
_GAUGES_AT = "gaugesAt"  # Unix microseconds at which a gauge last changed in the process
_NUMBER = struct.Struct("=q")
_GAUGES_BEGIN = len(COUNTERS) * _NUMBER.size
_NAMES = (*COUNTERS, *GAUGES, _GAUGES_AT)


class Publisher:
    """Publishes this process's counters of one table to the other processes of the host. Must not be used after a fork."""

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
        self._counted = _counts_in(self._before)  # counts that are already in files that this process has closed
        self._gauges_at = 0
        self._closed = False

    def publish(self) -> None:
        """Publish this process's counters to the other processes of the host."""
        if self._disk is not None:
            with (
                self._lock
            ):  # the race: a thread could read its numbers, be overtaken, and overwrite newer numbers with them
                self._write(self._disk, self.metrics.pack())

    def close(self) -> None:
        """Close this process's file. Later counts are written to a new file."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file, self._before, self._closed = None, self._published, True
                self._counted = _counts_in(self._before)

    def _write(self, disk: Disk, packed: bytes) -> None:
        if self._closed and packed == self._before:  # nothing has changed since the file was closed
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
            self._file.write(_less(packed, self._counted) + _NUMBER.pack(self._gauges_at))
        except OSError:
            self.metrics.inc("cacheFailureCount")
            return
        self._published = packed

    def _new_file(self, disk: Disk) -> CounterFile:
        host, process = socket.gethostname(), os.getpid()
        name = f"{self._label}-{host}-{process}-{os.urandom(4).hex()}"
        about = {"url": self._url, "host": host, "process": process, "application": self.application}
        file = disk.new_counters(name, about, dict.fromkeys(_NAMES, 0))
        disk.merge_counters(self._label, _MERGE_ABOVE, self._merge, _assign_totals)
        return file

    def _merge(self, parts: list[Counts]) -> tuple[dict[str, Any], dict[str, int]]:
        """(`about`, numbers) of the total that replaces several counts."""
        values = {**_add(parts), _GAUGES_AT: max(map(_gauge_time, parts))}
        about = {"url": parts[-1].about.get("url", ""), "ended_s": self._clock.wall_s()}
        of_one = {_application(part) for part in parts}
        if len(of_one) == 1 and None not in of_one:
            return {**about, "application": of_one.pop()}, values
        applications = sorted({name for part in parts for name in _applications(part)})[-_MERGE_ABOVE:]
        return {**about, "applications": applications}, values

    def host_total(self) -> dict[str, int]:
        """The sum of the published counters of all processes of this host, including this process, and the host's gauges."""
        if self._disk is None:
            return {**self.metrics.snapshot(), **dict.fromkeys(HOST_GAUGES, UNSET)}
        self.publish()
        total = _add(self._disk.counters(self._label))
        waiting = read_waiting(self._disk).get(self._url)
        return {**total, **_table_gauges(total, waiting, self._clock), **disk_gauges(self._disk)}

    def remember_waiting(self, lookup: str, partition: int, waiting: Waiting) -> None:
        """Record how many facts wait in a partition of a lookup's state. `lookup`: a name that no other lookup of this host has."""
        if self._disk is not None:
            record = {"url": self._url, "lookup": lookup, **dataclasses.asdict(waiting)}
            try:
                self._disk.replace_record("waiting", f"{lookup}-{partition}", record)
            except OSError:
                self.metrics.inc("cacheFailureCount")

    def by_worker(self) -> dict[str, dict[str, int]]:
        """The published counters of each process of this host, including this process, by `<host>-<process>`.

        The counters of processes that ended long ago are merged into one entry, `ended`.
        """
        self.publish()
        counts_by_worker: dict[str, list[Counts]] = {}
        for counts in self._disk.counters(self._label) if self._disk is not None else ():
            counts_by_worker.setdefault(_worker(counts), []).append(counts)
        return {name: _add(of_worker) for name, of_worker in counts_by_worker.items()}


def _counts_in(packed: bytes) -> list[tuple[int, int]]:
    """(position, number) of each counter that is not 0, in numbers that `CacheMetricGroup.pack` has packed."""
    return [(place, number) for place, number in enumerate(array.array("q", packed)[: len(COUNTERS)]) if number]


def _less(packed: bytes, counted: Sequence[tuple[int, int]]) -> bytes:
    """The packed numbers, with counters reduced by `counted` (see `_counts_in`). Gauges stay as they are."""
    if not counted:
        return packed
    numbers = array.array("q", packed)
    for place, number in counted:
        numbers[place] -= number
    return numbers.tobytes()


@dataclasses.dataclass(frozen=True)
class ApplicationCounts:
    """The counts of one table by the processes of a host that belong to one Spark application, or to none."""

    values: Mapping[str, int]
    processes: int


@dataclasses.dataclass(frozen=True)
class TableCounts:
    """The counts of one table by all processes of a host. `by_application`: the counts of each application, without those that ended long
    ago."""

    label: str
    url: str
    values: Mapping[str, int]
    processes: int
    applications: tuple[str, ...]
    by_application: Mapping[str, ApplicationCounts]


_OF_QUESTIONS = {"ufsHeadCount", "ufsListCount", "ufsRetryCount"}
"""The counters that also count calls for a path at which there is no table."""


def read_table_counts(disk: Disk, clock: HostClock) -> list[TableCounts]:
    """The counts of each table that was read or written on this host, by URL. Paths that never had a table are left out."""
    counts_by_label: dict[str, list[Counts]] = {}
    for counts in disk.counters(""):
        counts_by_label.setdefault(counts.name.split("-", 1)[0], []).append(counts)
    tables, waiting = [], read_waiting(disk)
    for label, parts in counts_by_label.items():
        total = _add(parts)
        counted = {name for name in COUNTERS if total[name]}
        if counted and counted <= _OF_QUESTIONS:
            continue
        url = str(parts[-1].about.get("url", ""))
        values = {**total, **_table_gauges(total, waiting.get(url), clock)}
        named = sorted({name for part in parts for name in _applications(part)})
        of_one: dict[str, list[Counts]] = {}
        for part in parts:
            if (name := _application(part)) is not None:
                of_one.setdefault(name, []).append(part)
        by_application = {
            name: ApplicationCounts(_add(application_counts), sum(part.alive for part in application_counts))
            for name, application_counts in sorted(of_one.items())
        }
        tables.append(TableCounts(label, url, values, sum(p.alive for p in parts), tuple(named), by_application))
    return sorted(tables, key=lambda table: (table.url, table.label))


def _table_gauges(total: Mapping[str, int], waiting: Waiting | None, clock: HostClock) -> dict[str, int]:
    """The `TABLE_GAUGES` of a table. `total`: the table's counters, summed over the host. `waiting`: the facts that wait for its rows."""
    oldest_us = None if waiting is None else waiting.oldest_us
    return {
        "reloadLag": _lag(total, clock),
        "lateWaiting": UNSET if waiting is None else waiting.facts,
        "lateOldest": UNSET if oldest_us is None else max(int(clock.wall_s() * 1000) - oldest_us // 1000, 0),
    }


def disk_gauges(disk: Disk) -> dict[str, int]:
    """The gauges of a cache directory."""
    space = disk.space()
    return {
        "diskBlockBytes": space.blocks,
        "diskSegmentBytes": space.segments,
        "diskRecordBytes": space.records,
        "diskBudget": space.budget,
        "diskFreeBytes": space.free,
    }


def _lag(total: Mapping[str, int], clock: HostClock) -> int:
    as_of = total["versionAsOf"]
    # Only in CACHE mode does a reader depend on when the store was last asked: in UFS mode every query asks it.
    return UNSET if as_of == UNSET or not total["metadataCacheCount"] else max(int(clock.wall_s() * 1000) - as_of, 0)


def _add(parts: Sequence[Counts]) -> dict[str, int]:
    return add_metrics([part.values for part in sorted(parts, key=_gauge_time)])


def _gauge_time(counts: Counts) -> int:
    return counts.values.get(_GAUGES_AT, 0)


def _worker(counts: Counts) -> str:
    return f"{counts.about['host']}-{counts.about['process']}" if "process" in counts.about else "ended"


def _applications(counts: Counts) -> list[str]:
    return [name for name in (counts.about.get("application"), *counts.about.get("applications", ())) if name]


def _application(counts: Counts) -> str | None:
    """The application to which counts belong ("": none); None for counts of several applications."""
    return None if counts.about.get("applications") else str(counts.about.get("application", ""))


def _assign_totals(every: list[Counts]) -> dict[str, str]:
    """The name of the total into which each file may be merged: one per application that is alive or ended lately, and one for all others."""
    of_one = [(name, counts) for counts in every if (name := _application(counts)) is not None]
    living = {name for name, counts in of_one if counts.alive}
    # Counts without `ended_s` are not in a total yet, so their processes ended last.
    ended = sorted(of_one, key=lambda one: float(one[1].about.get("ended_s", "inf")))
    lately = list(dict.fromkeys(name for name, _ in reversed(ended)))[:_APPLICATIONS_KEPT]
    totals = {"": "", **{name: key_of(name)[:16] for name in (*living, *lately) if name}}
    return {counts.name: totals.get(_application(counts) or "", _OLDER) for _, counts in of_one} | {
        counts.name: _OLDER for counts in every if _application(counts) is None
    }


# --- reloads ----------------------------------------------------------------------------------------

_RELOADS_KEPT = 200  # loads on record for each snapshot


@dataclasses.dataclass(frozen=True)
class Reload:
    """One load of a snapshot on this host: when it began (Unix time), how many seconds it took, and its outcome.

    If it succeeded, `error` is empty, and `version`, `rows` and `bytes` are those of the snapshot. `fetched`: the bytes received from the
    store during the load.
    """

    at_s: float
    seconds: float
    version: str = ""
    rows: int = 0
    bytes: int = 0
    fetched: int = 0
    error: str = ""


def remember_reload(disk: Disk, key: str, url: str, reload: Reload) -> None:
    """Record a load. The latest 200 loads of each snapshot are kept. The caller must hold the table's lock. Raises OSError if the disk
    fails."""
    _, before = disk.get_record("reloads", key, _parse_reloads) or (url, [])
    reload_records = [dataclasses.asdict(recent) for recent in [*before, reload][-_RELOADS_KEPT:]]
    disk.replace_record("reloads", key, {"url": url, "reloads": reload_records})


def _parse_reloads(record: Any) -> tuple[str, list[Reload]]:
    """(URL, loads) in a record. Raises one of `decoding.UNREADABLE` for a malformed record."""
    reloads = []
    for row in record["reloads"]:
        at_s, seconds = (as_number(row[name]) for name in ("at_s", "seconds"))
        rows, size, fetched = (as_count(row[name]) for name in ("rows", "bytes", "fetched"))
        reloads.append(Reload(at_s, seconds, as_text(row["version"]), rows, size, fetched, as_text(row["error"])))
    return as_text(record["url"]), reloads


def read_reloads(disk: Disk) -> dict[str, list[Reload]]:
    """For each table (by URL), the loads that this host has recorded, oldest first."""
    reloads_by_url: dict[str, list[Reload]] = {}
    for _, (url, reloads) in disk.records("reloads", "", _parse_reloads):
        reloads_by_url.setdefault(url, []).extend(reloads)
    return {url: sorted(reloads, key=lambda reload: reload.at_s) for url, reloads in sorted(reloads_by_url.items())}


# --- facts that wait --------------------------------------------------------------------------------

_MOVED_US = 600_000_000  # Spark has given a partition to another host if a micro-batch so much later did not visit it


@dataclasses.dataclass(frozen=True)
class Waiting:
    """How many facts of a stream wait for their row, after the micro-batch of the time `at_us` (Unix microseconds).

    `oldest_us`: when the fact arrived that has waited longest; None if none waits.
    """

    at_us: int
    facts: int
    oldest_us: int | None


def _parse_waiting(record: Any) -> tuple[str, str, Waiting]:
    """(URL, lookup, facts) in a record. Raises one of `decoding.UNREADABLE` for a malformed record."""
    oldest_us = None if record["oldest_us"] is None else int(as_number(record["oldest_us"]))
    waiting = Waiting(as_count(record["at_us"]), as_count(record["facts"]), oldest_us)
    return as_text(record["url"]), as_text(record["lookup"]), waiting


def read_waiting(disk: Disk) -> dict[str, Waiting]:
    """The facts that wait on this host for rows of each table, by the table's URL."""
    by_lookup: dict[tuple[str, str], list[Waiting]] = {}
    for _, (url, lookup, waiting) in disk.records("waiting", "", _parse_waiting):
        by_lookup.setdefault((url, lookup), []).append(waiting)
    by_url: dict[str, list[Waiting]] = {}
    for (url, _), partitions in by_lookup.items():
        newest_us = max(waiting.at_us for waiting in partitions)
        by_url.setdefault(url, []).extend(w for w in partitions if w.at_us >= newest_us - _MOVED_US)
    return {
        url: Waiting(
            max(waiting.at_us for waiting in parts),
            sum(waiting.facts for waiting in parts),
            min((waiting.oldest_us for waiting in parts if waiting.oldest_us is not None), default=None),
        )
        for url, parts in by_url.items()
    }
