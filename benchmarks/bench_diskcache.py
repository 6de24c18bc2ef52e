"""What do rows by key cost in a database of diskcache, beside the built-in cache of a host?

CPU microseconds per key of a put, a hit and a miss of BATCH keys, and of a hit in each of several processes at once: CPU time of all processes.
Both caches return Arrow tables of five columns (int, double, three texts). The built-in cache is asked as a process asks that has not seen the
keys (its files are mapped, and it has no copy of its own).

    python -m benchmarks.bench_diskcache [--runs N] [--processes N]
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.bench_partial import SEED, fresh_version, make_keys, make_rows, shared_cache
from pyspark_lookup.cache.disk_lookup_cache import DiskCacheLookupCache
from pyspark_lookup.cache.lookup_cache import EntryRules
from pyspark_lookup.columnar.keys import Keys

BATCH = 1000


class BuiltIn:
    """The built-in cache, which the processes of a host share."""

    def __init__(self, directory: str) -> None:
        self._cache, self._fresh = shared_cache(directory), fresh_version()

    def put(self, ids: Any) -> None:
        arrays = [pa.array(ids)]
        self._cache.put(
            arrays, Keys(arrays).hashes(SEED), make_rows(ids), self._fresh, time.clock_gettime(time.CLOCK_BOOTTIME)
        )

    def count(self, ids: Any) -> int:
        arrays = [pa.array(ids)]
        answer = self._cache.get(arrays, Keys(arrays).hashes(SEED), self._fresh)
        return 0 if answer is None else answer.rows.num_rows


class OnDisk:
    """The database of diskcache."""

    def __init__(self, directory: str) -> None:
        self._cache = DiskCacheLookupCache(Path(directory) / "database", max_bytes=2**30)
        self._cache.use(EntryRules("v", fresh_version().schema))

    def put(self, ids: Any) -> None:
        self._cache.put_many(make_keys(ids), make_rows(ids))

    def count(self, ids: Any) -> int:
        rows = self._cache.get_many(make_keys(ids)).rows
        return 0 if rows is None else rows.num_rows


def cpu_us(run: Callable[[], object]) -> float:
    started = time.process_time_ns()
    run()
    return (time.process_time_ns() - started) / 1000 / BATCH


def shared_cpu_us(cache: Any, ids: Any, processes: int) -> float:
    """CPU microseconds of a hit, per key and process, in forked processes that run at once. What each of them has to set up is included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    children = []
    for _ in range(processes):
        child = os.fork()
        if not child:
            os._exit(0 if cache.count(ids) == BATCH else 1)
        children.append(child)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds * 1e6 / BATCH / processes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--processes", type=int, default=4)
    arguments = parser.parse_args()
    print(f"command: python -m benchmarks.bench_diskcache {' '.join(sys.argv[1:])}".rstrip())
    print(
        f"machine: {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, pyarrow {pa.__version__}"
    )
    times: dict[tuple[str, str], list[float]] = {}
    draw = random.Random(1)
    with tempfile.TemporaryDirectory() as directory:
        caches = {"built-in": BuiltIn(directory), "diskcache": OnDisk(directory)}
        for run in range(arguments.runs):
            ids = np.arange(run * BATCH, (run + 1) * BATCH)
            for name in draw.sample(sorted(caches), 2):  # both in turn, in a random order
                cache = caches[name]
                put_rows, count = functools.partial(cache.put, ids), functools.partial(cache.count, ids)
                miss = functools.partial(cache.count, ids + 10**9)
                for operation, call in (("put", put_rows), ("hit", count), ("miss", miss)):
                    times.setdefault((operation, name), []).append(cpu_us(call))
                hit = f"hit in {arguments.processes} new processes"
                times.setdefault((hit, name), []).append(shared_cpu_us(cache, ids, arguments.processes))
    print(f"\n| of {BATCH:,} keys | cache | runs | median CPU us per key | p99 | ratio to built-in (median of pairs) |")
    print("|---|---|---|---|---|---|")
    for (operation, name), samples in times.items():
        pairs = zip(samples, times[operation, "built-in"], strict=True)
        ratio = (
            "peer"
            if name == "built-in"
            else f"{statistics.median(time_us / peer_us for time_us, peer_us in pairs):.1f}"
        )
        median, p99 = statistics.median(samples), float(np.percentile(samples, 99))
        print(f"| {operation} | {name} | {len(samples)} | {median:.1f} | {p99:.1f} | {ratio} |")


if __name__ == "__main__":
    main()
