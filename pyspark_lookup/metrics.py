"""`CacheMetricGroup`: named counters and gauges of one table in one process (FLIP-221).

The FLIP's seven names are kept as Flink ships them; ours stand beside them. Rules:

- A counter only grows; `UNSET` (-1) is a gauge nobody has set (Flink's convention).
- `ufs*Count` move once per attempt at the store's door, failed attempts included.
- `blockHitCount` + `blockMissCount` = blocks asked for. A damaged block is a miss too.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

__all__ = ["COUNTERS", "GAUGES", "UNSET", "CacheMetricGroup", "add_metrics"]

UNSET = -1

COUNTERS: Mapping[str, str] = {
    "hitCount": "keys answered from a cache (FLIP-221)",
    "missCount": "keys that needed a load (FLIP-221)",
    "loadCount": "loads that succeeded (FLIP-221)",
    "numLoadFailures": "loads that failed (FLIP-221)",
    "ufsHeadCount": "metadata calls for one path",
    "ufsListCount": "listing calls",
    "ufsGetCount": "data requests",
    "ufsGetBytes": "data bytes received",
    "ufsPutCount": "write requests",
    "ufsPutBytes": "bytes written",
    "ufsDeleteCount": "files removed",
    "ufsRetryCount": "attempts after the first",
    "resolutionCount": "versions resolved at the store",
    "resolutionReuseCount": "versions taken from an execution's record",
    "announcedCount": "versions told to the tasks of joins and SQL functions",
    "metadataCacheCount": "versions answered by this host (lookup.metadata.source=CACHE)",
    "keptVersionCount": "unreadable states of a table in CACHE mode: the last version was kept",
    "versionGoneCount": "versions that vanished before they were read",
    "getBlocksAndLocationsCount": "files the block cache was asked about (Alluxio)",
    "fileLoadedCount": "... whose path it did not know",
    "fileResyncedCount": "... of which it knew another version",
    "fileCachedCount": "... which it held in that version",
    "blockHitCount": "blocks answered from disk",
    "blockMissCount": "blocks fetched",
    "blockWaitCount": "blocks another loader fetched meanwhile",
    "blockDamagedCount": "blocks that failed their checksum",
    "blockEvictedCount": "blocks removed for space",
    "blockRefusedCount": "blocks too large for the cache or not safe to keep",
    "snapshotReadThroughCount": "queries that read the files because a snapshot was not ready (lookup.cache=FULL)",
    "snapshotFoldCount": "snapshots whose layers were made one",
    "snapshotDamagedCount": "snapshots that failed their checksum",
    "lookupRetryCount": "keys that a provider was asked for again, after an error or because they had no rows",
    "loadWaitCount": "keys that another loader was loading already (lookup.cache=PARTIAL)",
    "sharedCarriedOverCount": "keys answered from an older version's load, which no change can have touched",
    "sharedMergeCount": "times that shared loads were made one file",
    "sharedEvictedCount": "shared rows given up for space",
    "sharedRefusedCount": "loads not shared because the host holds too much already",
    "cacheFailureCount": "failures of the cache directory; the store answered instead",
    "rowGroupsReadCount": "row groups or record batches decoded",
    "rowGroupsPrunedCount": "row groups skipped by statistics",
    "filesPrunedCount": "files skipped by partition value",
    "rowsReadCount": "rows handed out",
}

GAUGES: Mapping[str, str] = {
    "latestLoadTime": "ms the latest load took (FLIP-221)",
    "numCachedRecords": "rows in the cache (FLIP-221)",
    "numCachedBytes": "bytes in the cache (FLIP-221)",
}


class CacheMetricGroup:
    """Counters and gauges of one table in this process; safe from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._gauges = dict.fromkeys(GAUGES, UNSET)

    def inc(self, name: str, amount: int = 1) -> None:
        """Add `amount` (>= 0) to a counter. Raises KeyError for an unknown name."""
        with self._lock:
            self._counters[name] += amount

    def set_gauge(self, name: str, value: int) -> None:
        """Replace a gauge's value. Raises KeyError for an unknown name."""
        with self._lock:
            if name not in self._gauges:
                raise KeyError(name)
            self._gauges[name] = value

    def snapshot(self) -> dict[str, int]:
        """All values at one moment, counters and gauges, by name."""
        with self._lock:
            return {**self._counters, **self._gauges}


def add_metrics(snapshots: list[Mapping[str, int]]) -> dict[str, int]:
    """One snapshot for several processes, oldest first: counters add up, the latest gauge that is set counts."""
    total = {**dict.fromkeys(COUNTERS, 0), **dict.fromkeys(GAUGES, UNSET)}
    for snapshot in snapshots:
        for name in COUNTERS:
            total[name] += snapshot.get(name, 0)
        for name in GAUGES:
            if snapshot.get(name, UNSET) != UNSET:
                total[name] = snapshot[name]
    return total
