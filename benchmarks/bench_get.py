"""What does one key cost, and what does being current add to it?

`LookupTable.get` of a full cache, warm, one key after the other, in CACHE mode (no call to the store) and in UFS mode (one listing
a call), in turn with a bare listing of the directory: its names, each with its size and times. Keys are int64 and texts of 24 characters.
Then `get_many` of 10,000 keys in both modes. Goals, as ratios in pairs of runs (medians): `get` at most 2 times the listing in CACHE mode
and 6 times in UFS mode, `get_many` in UFS mode at most 1.3 times that of CACHE mode.

    python -m benchmarks.bench_get [--rows N] [--files N] [--runs N] [--core 1]
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.bench_lookup import lookup_options, make_lookup_table
from benchmarks.common import alternate
from pyspark_lookup import LookupTable

LISTING, CACHE, UFS = "a listing", "CACHE", "UFS"
MANY = 10_000


def listing(directory: Path) -> list[tuple[str, int, int, int, int]]:
    """List what tells one state of a directory from another: each file's name, size, times and inode."""
    with os.scandir(directory) as entries:
        stats = ((entry.name, entry.stat()) for entry in entries)
        return sorted((name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for name, s in stats)


def measure(path: Path, cache: Path, key: str, args: argparse.Namespace) -> None:
    """Measure both modes with one key column."""
    rng = np.random.default_rng(args.seed)
    stored = pq.read_table(path, columns=[key]).column(0).combine_chunks()
    picks = stored.take(pa.array(rng.integers(0, len(stored), args.runs + args.warmup)))
    tables = {mode: LookupTable(str(path), lookup_options(key, cache, mode == CACHE)) for mode in (CACHE, UFS)}
    for table in tables.values():
        table.warm()
        for pick in picks.to_pylist()[:100]:
            assert len(table.get(pick)) == 1
    feeds = {mode: itertools.cycle(picks.to_pylist()) for mode in tables}
    gets: dict[str, Callable[[], object]] = {
        mode: (lambda table=table, feed=feeds[mode]: table.get(next(feed)))  # type: ignore[misc]
        for mode, table in tables.items()
    }
    seconds = alternate({LISTING: partial(listing, path), **gets}, args.warmup, args.runs)
    kind = "int64" if key == "id" else "24 characters"
    show(f"get of one key ({kind}), {args.rows:,} rows in {args.files} files", seconds, 1e6, "µs", LISTING)
    tell("CACHE to the listing", ratio(seconds, CACHE, LISTING), 2)
    tell("UFS to the listing", ratio(seconds, UFS, LISTING), 6)
    keys = pa.table({key: stored.take(pa.array(rng.integers(0, len(stored), MANY)))})
    several = {mode: partial(table.get_many, keys) for mode, table in tables.items()}
    seconds = alternate(several, args.warmup // 10, args.runs // 10)
    show(f"get_many of {MANY:,} keys ({kind})", seconds, 1e3, "ms", CACHE)
    tell("get_many, UFS to CACHE", ratio(seconds, UFS, CACHE), 1.3)


def ratio(seconds: Mapping[str, list[float]], name: str, peer: str) -> float:
    """The median of the ratios of a contender's runs to the peer's, run by run."""
    return statistics.median(time_s / peer_s for time_s, peer_s in zip(seconds[name], seconds[peer], strict=True))


def show(title: str, seconds: Mapping[str, list[float]], scale: float, unit: str, peer: str) -> None:
    print(f"\n## {title}")
    print(f"| contender | runs | p50 {unit} | p99 {unit} | ratio to peer (median of pairs) |\n|---|---|---|---|---|")
    for name, times in seconds.items():
        p50, p99 = (scale * float(np.percentile(times, share)) for share in (50, 99))
        to_peer = "peer" if name == peer else f"{ratio(seconds, name, peer):.2f}"
        print(f"| {name} | {len(times)} | {p50:.2f} | {p99:.2f} | {to_peer} |")


def tell(label: str, value: float, goal: float) -> None:
    print(f"- {label}: {value:.2f}, goal {goal:g}: {'reached' if value <= goal else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5000)
    parser.add_argument("--warmup", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--core", type=int, default=1, help="the one everything runs on; -1: any")
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "lookupcache-bench")
    args = parser.parse_args()
    args.data.mkdir(parents=True, exist_ok=True)
    path = make_lookup_table(args.data, args.rows, args.files, False, args.seed)
    if args.core >= 0:
        os.sched_setaffinity(0, {args.core})
    print(f"command: {' '.join(['python', '-m', 'benchmarks.bench_get', *sys.argv[1:]])}")
    print(f"machine: {os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}, Python {platform.python_version()}")  # fmt: skip
    cache = Path(tempfile.mkdtemp(prefix="cache-", dir=args.data))
    try:
        for key in ("id", "name"):
            measure(path, cache, key, args)
    finally:
        shutil.rmtree(cache, ignore_errors=True)


if __name__ == "__main__":
    main()
