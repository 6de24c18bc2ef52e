"""What a soak has left in the cache directories: damage that a repair takes away, and no more leftovers than it may."""

from __future__ import annotations

import collections
import os
import random
import time
from pathlib import Path
from typing import Any

from pyspark_lookup.base.clock import HostClock
from pyspark_lookup.base.metrics import CacheMetricGroup
from pyspark_lookup.io.disk import Disk
from pyspark_lookup.io.host_metrics import tables_on
from tests.soak import tables

LATER_S = 2 * 3600.0
"""When leftovers of the dead are old enough to be swept."""
LOCKS = 4096
"""Lock files of a kind at most."""
SHOWN = (
    "tokenCount",
    "hitCount",
    "missCount",
    "loadCount",
    "numLoadFailures",
    "snapshotBuildCount",
    "snapshotReadThroughCount",
    "versionGoneCount",
    "blockEvictedCount",
    "sharedEvictedCount",
    "blockDamagedCount",
    "snapshotDamagedCount",
    "cacheFailureCount",
    "ufsRetryCount",
)


def check_directory(directory: Path) -> tuple[dict[str, Any], list[str]]:
    """(what there was to see and repair, what is wrong) in the cache directory of processes that have all ended."""
    wrong = []
    disk = _disk(directory, 0.0)
    counted: collections.Counter[str] = collections.Counter()
    for table in tables_on(disk, HostClock()):
        counted.update({name: table.values[name] for name in SHOWN})
    left = [path for part in ("tmp", "claims") for path in (directory / "v1" / part).rglob("*") if path.is_file()]
    repaired = disk.check(repair=True)
    told: dict[str, Any] = {"counted": dict(counted), "repaired": [*repaired.damaged, *repaired.leftovers]}
    told["left by the dead"] = len(left)
    again = disk.check()
    if again.damaged or again.leftovers:
        wrong.append(f"{directory.name}: damaged after its repair: {again.damaged[:5]} {again.leftovers[:5]}")
    _disk(directory, LATER_S).sweep()
    stay = [path for path in left if path.exists()]
    if stay:
        wrong.append(f"{directory.name}: {len(stay)} leftovers outlive a sweep: {stay[:5]}")
    kinds = collections.Counter(path.name.rpartition("-")[0] for path in (directory / "v1" / "locks").iterdir())
    told["locks"] = dict(kinds)
    wrong += [f"{directory.name}: {count} lock files of kind {kind}" for kind, count in kinds.items() if count > LOCKS]
    known = {"blocks", "claims", "counters", "locks", "records", "snapshots", "tmp"}
    known |= {"usage", "usage.lock", "evict.lock", "repair.lock", "total.lock", "swept"}
    strange = sorted(set(os.listdir(directory / "v1")) - known)
    if strange:
        wrong.append(f"{directory.name}: nobody knows what {strange} are")
    records = {path.name: len(os.listdir(path)) for path in (directory / "v1" / "records").iterdir()}
    told["records"] = records
    return told, wrong


def _disk(directory: Path, later_s: float) -> Disk:
    return Disk(directory, tables.MAX_BYTES, CacheMetricGroup(), lambda: time.time() + later_s, random.Random(0))
