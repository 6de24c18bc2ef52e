"""What does a directory of many small files cost, beside a bare listing; and one process with many tables open?

files   a directory of 10,000 files of ten rows each, in 500 partitions (hard links to a few; `--files 100000` for the numbers in the README): its
        version and a lookup of a key, in a new process of a new host, and in another process. On a new host the first lookup reads the footers
        of all files, so ask for `--footers` to wait for it. Also: a version after one more file, and the rows of a partition. CPU seconds
        (user and system) beside a listing with `os.scandir` and a stat of each file. Goals, for 100,000 files: 0.1 s beyond the listing for a
        version, 30 ms for a key whose file is known (metadata.source=CACHE, so that nothing is listed), 150 MB of anonymous memory.
open    anonymous memory of one process that has 100 tables of one small file open and has looked up a key in each, in PARTIAL and FULL.

    python -m benchmarks.bench_files [--parts files,open] [--files N] [--tables N] [--footers]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

_LINKS = 30_000  # links to one file; file systems limit their number
_PARTITIONS = 500

_COMMON = """
import os, sys, time
import pandas, pyarrow.json, pyarrow.parquet
from pyspark_lookup import LookupTable
def anonymous():
    return sum(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("Anonymous")) / 1024
before = anonymous()
"""
_FILES = """
who, path, cache, footers = sys.argv[1:]
common = {"lookup.cache.dir": cache, "lookup.keys": "id", "lookup.schema": "id BIGINT, v STRING, day INT"}
listed, kept = LookupTable(path, common), LookupTable(path, common | {"lookup.metadata.source": "CACHE", "lookup.metadata.sync-interval": "1 h"})
def walk():
    pending, count = [path], 0
    while pending:
        for entry in os.scandir(pending.pop()):
            if entry.is_dir():
                pending.append(entry.path)
            else:
                count += entry.stat().st_size > 0
    return count
def add():
    os.link(os.path.join(path, "_0.parquet"), os.path.join(path, "day=3", f"added-{os.getpid()}.parquet"))
    time.sleep(0.1)
acts = {"a bare listing": walk, "version": lambda: listed.version, "version again": lambda: listed.version,
        "rows of a partition": lambda: listed.scan(predicate="day = 3 AND id < 5").num_rows}
if who == "another process":
    acts = {"known version": lambda: kept.version} | acts
if footers == "True":
    acts |= {"a key": lambda: kept.get(-1), "another key": lambda: kept.get(-2), "a key, listed": lambda: listed.get(-3)}
acts |= {"": add, "version after one more file": lambda: listed.version}
for name, act in acts.items():
    started = time.process_time()
    act()
    if name:
        print(f"| {who} | {name} | {time.process_time() - started:.3f} | {anonymous() - before:.0f} |", flush=True)
"""
_OPEN = """
home, mode, *tables = sys.argv[1:]
options = {"lookup.cache.dir": home, "lookup.keys": "id", "lookup.cache": mode}
options |= {"lookup.partial-cache.max-rows": "1000"} if mode == "PARTIAL" else {"lookup.full-cache.build-wait": "10 min"}
opened = [LookupTable(path, options) for path in tables]
started = time.process_time()
for table in opened:
    assert table.get(1) == table.get(1) != []
print(f"| {mode} | {len(opened)} | {time.process_time() - started:.2f} | {anonymous() - before:.0f} |", flush=True)
"""


def run(script: str, *args: object) -> None:
    subprocess.run([sys.executable, "-c", _COMMON + script, *map(str, args)], check=True)


def make_directory(home: Path, files: int) -> Path:
    """Make a directory of `files` files in partitions. Made once."""
    path = home / f"files-{files}"
    if (path / "_MADE").exists():
        return path
    for number in range(-(-files // _LINKS)):
        path.mkdir(parents=True, exist_ok=True)
        ids = range(number * 10, number * 10 + 10)
        pq.write_table(pa.table({"id": ids, "v": [f"v{i}" for i in ids]}), path / f"_{number}.parquet")
    for number in range(files):
        target = (
            path
            / f"day={number * _PARTITIONS // files}"
            / f"part-{number:06}-{number * 2654435761 % 2**32:08x}.parquet"
        )
        target.parent.mkdir(exist_ok=True)
        os.link(path / f"_{number // _LINKS}.parquet", target)
    (path / "_MADE").touch()
    return path


def measure_files(home: Path, work: Path, files: int, footers: bool) -> None:
    path = make_directory(home, files)
    print(
        f"\n{files:,} files in {_PARTITIONS} partitions, CPU seconds\n\n| who | what | CPU s | anonymous MB |\n|---|---|---|---|"
    )
    try:
        for client in ("a new host", "another process"):
            run(_FILES, client, path, work / "cache", footers)
    finally:
        for added in path.glob("day=3/added-*"):
            added.unlink()


def measure_open(work: Path, tables: int) -> None:
    paths = [work / f"table-{number}" for number in range(tables)]
    for path in paths:
        path.mkdir()
        pq.write_table(
            pa.table({"id": range(1000), "name": [f"n{number}" for number in range(1000)]}), path / "a.parquet"
        )
    print("\nOne process with many small tables open\n\n| mode | tables | CPU s | anonymous MB |\n|---|---|---|---|")
    for mode in ("PARTIAL", "FULL"):
        run(_OPEN, work / mode, mode, *paths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()) / "lookupcache-bench")
    parser.add_argument("--parts", default="files,open")
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--tables", type=int, default=100)
    parser.add_argument("--footers", action="store_true", help="read the footers of all files, and look up keys")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.dir) as work:
        if "files" in args.parts.split(","):
            measure_files(args.dir, Path(work), args.files, args.footers)
        if "open" in args.parts.split(","):
            measure_open(Path(work), args.tables)


if __name__ == "__main__":
    main()
