"""`CacheMetricGroup`: named counters and gauges of one table in one process (FLIP-221).

The seven metrics of the FLIP have the names that Flink gives them. The others are ours. Rules:

- A counter only grows. A gauge that was never set is `UNSET` (-1), as in Flink.
- The durations of each name in `TIMES` are a histogram, kept as counters: `<name>Count`, `<name>Micros`, and for each of `BOUNDS_MS`
  `<name>UpTo<bound>`, which counts the durations of at most `bound` milliseconds that are longer than the bound before it. A duration
  above the last bound is in no bucket.
- Each `ufs*Count` grows by one with each attempt to call the store, even if the attempt fails.
- `blockHitCount` + `blockMissCount` is the number of requested blocks. A damaged block is also a miss.
"""

from __future__ import annotations

import array
import bisect
import itertools
import threading
from collections.abc import Mapping

UNSET = -1

BOUNDS_MS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000, 60_000)
"""Upper bounds of the buckets into which the durations of `TIMES` are counted."""

TIMES: Mapping[str, str] = {
    "lookupTime": "lookups (calls of get and get_many, and batches of joins and SQL functions)",
    "loadTime": "successful loads (of a batch of missing keys, or of a snapshot)",
}


def bucket_names(name: str) -> list[str]:
    """The names of the counters `<name>UpTo<bound>`, in the order of `BOUNDS_MS`."""
    return [f"{name}UpTo{bound_ms:g}" for bound_ms in BOUNDS_MS]


def cumulate_buckets(values: Mapping[str, int], name: str) -> list[int]:
    """For each of `BOUNDS_MS`, how many of the durations counted under `name` (one of `TIMES`) were at most that long."""
    return list(itertools.accumulate(values[bucket] for bucket in bucket_names(name)))


def _describe_times() -> dict[str, str]:
    descriptions: dict[str, str] = {}
    for name, meaning in TIMES.items():
        descriptions |= {f"{name}Count": meaning, f"{name}Micros": f"total microseconds of {meaning}"}
        buckets = zip(bucket_names(name), BOUNDS_MS, strict=True)
        descriptions |= {
            bucket: f"{meaning} that took at most {bound_ms:g} ms, and more than the bound before"
            for bucket, bound_ms in buckets
        }
    return descriptions


COUNTERS: Mapping[str, str] = {
    "hitCount": "keys answered from a cache (FLIP-221)",
    "missCount": "keys that needed a load (FLIP-221)",
    "loadCount": "successful loads (FLIP-221): with lookup.cache=FULL loads of the table, with PARTIAL distinct keys that were loaded",
    "numLoadFailures": "failed loads (FLIP-221), counted like loadCount",
    "ufsHeadCount": "metadata calls for one path",
    "ufsListCount": "listing calls",
    "ufsGetCount": "data requests",
    "ufsGetBytes": "data bytes received",
    "ufsPutCount": "write requests",
    "ufsPutBytes": "bytes written",
    "ufsDeleteCount": "files removed",
    "ufsRetryCount": "calls to the store that were repeated",
    "resolutionCount": "times that the store was asked for a table's current version",
    "resolutionReuseCount": "times that a table's version was known from the record of the same execution of a query",
    "versionServedCount": "times that a process began to answer from another version",
    "staleServedCount": "answers from a version that could not be renewed when it should have been",
    "resolvedBytes": "bytes of the files of the resolved versions: the cost of reading the table again for each query",
    "tokenCount": "version tokens issued to the tasks of joins and SQL functions",
    "metadataCacheCount": "versions answered by this host (lookup.metadata.source=CACHE)",
    "busyServedCount": "times that the last known version was used because a job was writing the files (lookup.on-busy=KEEP)",
    "keptVersionCount": "times that the last version was kept because the table could not be read (lookup.metadata.source=CACHE)",
    "batchSkippedCount": "micro-batches that were not written because their query had committed them before, or a later one",
    "versionGoneCount": "versions whose files were gone before they were read",
    "getBlocksAndLocationsCount": "files for which the block cache was asked (Alluxio)",
    "fileLoadedCount": "files for which the block cache was asked and whose path it did not have",
    "fileResyncedCount": "files for which the block cache was asked and of which it had another version",
    "fileCachedCount": "files for which the block cache was asked and which it had in that version",
    "blockHitCount": "blocks answered from disk",
    "blockMissCount": "blocks fetched",
    "blockWaitCount": "blocks that another loader fetched meanwhile",
    "blockDamagedCount": "blocks that failed their checksum",
    "blockEvictedCount": "blocks removed for space",
    "blockRefusedCount": "blocks too large for the cache or not safe to keep",
    "snapshotBuildCount": "snapshots that were loaded (lookup.cache=FULL)",
    "snapshotOverBudgetCount": "snapshots that were not built, or not finished, because lookup.cache.max-bytes has no room for them",
    "tableEvictedCount": "unused tables whose snapshots or rows by key were removed for space",
    "snapshotReadThroughCount": "queries that read the files because a snapshot was not ready (lookup.cache=FULL)",
    "snapshotCompactionCount": "snapshots whose layers were compacted into one",
    "derivedBuildCount": "indexes of the ranges of a snapshot that were built (lookup.cache=FULL)",
    "snapshotDamagedCount": "snapshots that failed their checksum",
    "lookupRetryCount": "keys that were requested from a provider again, after an error or because they had no rows",
    "changesCallCount": "times that a provider was asked which keys have changed (its changes())",
    "changesFailureCount": "failed calls of changes(), after which all keys counted as changed",
    "changedKeyCount": "keys that have changed since the last version, as changes() said",
    "staleKeyCount": "keys that were answered with the last cached rows because their load had failed (lookup.on-error=STALE)",
    "rateLimitWaitCount": "calls of a provider that waited for their turn",
    "connectionWaitCount": "calls of a provider that waited for a connection",
    "circuitOpenCount": "calls of a provider that were refused because the last ones had failed",
    "loadWaitCount": "keys that another loader was loading already (lookup.cache=PARTIAL)",
    "sharedCarriedOverCount": "keys answered from an older version's load, because no change can have affected them",
    "sharedMergeCount": "merges of shared loads into one file",
    "sharedEvictedCount": "shared rows removed for space",
    "sharedRefusedCount": "loads that were not shared because the host's cache was full",
    "cacheFailureCount": "failures of the cache directory, after which the store answered instead",
    "rowGroupsReadCount": "row groups or record batches decoded",
    "rowGroupsPrunedCount": "row groups skipped by statistics",
    "filesPrunedCount": "files, or parts of files, skipped by partition values or by statistics of files",
    "rowsReadCount": "rows that scans returned",
    "rangeEmptyCount": "rows whose range holds no value, each time that a lookup by range compared them",
    "networkSkippedCount": "rows whose network cannot be read, each time that a lookup compared them (lookup.on-bad-network=SKIP)",
    "lateHeldCount": "facts of streams that began to wait for their row, each time that their micro-batch ran (lookup_join with wait)",
    "lateWokenCount": "facts that had waited and got their row (lookup_join with wait)",
    "lateExpiredCount": "facts without a row whose time was over (lookup_join with wait)",
    "lateCrowdedCount": "facts that had waited and passed without a row because too many waited (wait_max_rows)",
    **_describe_times(),
}

GAUGES: Mapping[str, str] = {
    "latestLoadTime": "ms the latest load took (FLIP-221)",
    "numCachedRecords": "rows in the cache (FLIP-221)",
    "numCachedBytes": "bytes in the cache (FLIP-221)",
    "maxCachedRecords": "maximum number of rows in the cache (lookup.partial-cache.max-rows)",
    "maxCachedBytes": "maximum number of bytes in the cache (lookup.partial-cache.max-bytes)",
    "tableVersion": "number of the version that answers, in the form that lookup.version takes (tables that keep versions)",
    "versionAsOf": "Unix ms at which the version that answers was last known to be current",
}

TABLE_GAUGES: Mapping[str, str] = {
    "reloadLag": "ms since the version that answers was last known to be current (lookup.metadata.source=CACHE)",
    "lateWaiting": "facts that wait for their row in the parts of streams' states that this host visited last (lookup_join with wait)",
    "lateOldest": "ms since the arrival of the fact that has waited longest there",
}
"""Gauges of a table that are computed when they are read, and that no process sets."""

HOST_GAUGES: Mapping[str, str] = {
    **TABLE_GAUGES,
    "diskBlockBytes": "bytes of blocks in the cache directory, of all tables",
    "diskSegmentBytes": "bytes of snapshots and shared loads in the cache directory, of all tables",
    "diskRecordBytes": "bytes of records and counters in the cache directory, of all tables",
    "diskBudget": "maximum bytes of the cache directory (lookup.cache.max-bytes)",
    "diskFreeBytes": "free bytes on the disk of the cache directory",
}
"""The same, and those of the cache directory."""

_PLACES = {name: place for place, name in enumerate(COUNTERS)}
_GAUGE_PLACES = {name: place for place, name in enumerate(GAUGES, len(COUNTERS))}
_TIME_PLACES = {
    name: (_PLACES[f"{name}Count"], _PLACES[f"{name}Micros"], [*map(_PLACES.get, bucket_names(name)), None])
    for name in TIMES
}


class CacheMetricGroup:
    """Counters and gauges of one table in this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The values are an array, because its bytes are written to the process's file of counters after each batch.
        self._values = array.array("q", [0] * len(COUNTERS) + [UNSET] * len(GAUGES))

    def inc(self, name: str, amount: int = 1) -> None:
        """Add `amount` (>= 0) to a counter. Raises KeyError for an unknown name."""
        with self._lock:
            self._values[_PLACES[name]] += amount

    def time(self, name: str, seconds: float) -> None:
        """Count one duration (>= 0) under `name`, one of `TIMES`. Raises KeyError for an unknown name."""
        count, micros, buckets = _TIME_PLACES[name]
        place = buckets[bisect.bisect_left(BOUNDS_MS, seconds * 1000)]
        with self._lock:
            self._values[count] += 1
            self._values[micros] += int(seconds * 1e6)
            if place is not None:
                self._values[place] += 1

    def set_gauge(self, name: str, value: int) -> None:
        """Replace a gauge's value. Raises KeyError for an unknown name."""
        with self._lock:
            self._values[_GAUGE_PLACES[name]] = value

    def pack(self) -> bytes:
        """All values at one moment, as int64s in this machine's byte order: first those of `COUNTERS`, then those of `GAUGES`."""
        with self._lock:
            return self._values.tobytes()

    def snapshot(self) -> dict[str, int]:
        """All values at one moment, counters and gauges, by name."""
        with self._lock:
            values = self._values.tolist()
        return dict(zip((*COUNTERS, *GAUGES), values, strict=True))


class MetricsOfCache(CacheMetricGroup):
    """The metric group for a cache that a user has written. It shares the numbers of `live`.

    It ignores the hits and misses that the cache counts, because lookups count them.
    """

    def __init__(self, live: CacheMetricGroup) -> None:
        self._lock, self._values = live._lock, live._values

    def inc(self, name: str, amount: int = 1) -> None:
        if name not in ("hitCount", "missCount"):
            super().inc(name, amount)


def add_metrics(snapshots: list[Mapping[str, int]]) -> dict[str, int]:
    """The metrics of several processes in sum. Counters are added; a gauge has the value that was set last.

    `snapshots`: the metrics of each process, oldest first.
    """
    total = {**dict.fromkeys(COUNTERS, 0), **dict.fromkeys(GAUGES, UNSET)}
    for snapshot in snapshots:
        for name in COUNTERS:
            total[name] += snapshot.get(name, 0)
        for name in GAUGES:
            if snapshot.get(name, UNSET) != UNSET:
                total[name] = snapshot[name]
    return total
