"""What does a managed table cost: a commit, planning against a long log, a small append to a full cache?

commit    100,000 rows written by `LookupTable.write` (write id, files, commit; everything fsynced) beside the same
          rows sorted and put into one fsynced parquet file by pyarrow; goal at most 50 ms beyond that.
planning  a new process of the host asks for the version of a table with 10 and with 10,000 commits, whose log its
          host has read before: store calls (goal at most 2) and seconds; and the first reading on a new host. Then
          commits of one row each to these tables, with the options' defaults, so some of them compact.
append    1 % of new rows is appended to a table of 10M rows with `lookup.cache=FULL`; until a key of them is
          answered, beside a build of the whole snapshot; goal at most 15 % of that. The commit itself is apart.
upsert    10,000 keys, spread over the same table, are upserted; until one of them is answered (goal at most 10 % of
          a build), and the commit.

aging     a table of 50 keys after 300 commits of one-row upserts, and after `--commits`: with upkeep (each 300 commits a
          vacuum of all that is not current; the log of no more is kept), and without a vacuum, as if all were inside its
          retention. A commit, the first look at the table on a new host and in a new process, files, and the bytes of
          the host's cache directory. Goals: with upkeep each at most 1.5 times what it was after 300 commits; without, a
          commit at most 2 times, and 50 ms in a new process. Commits between these are made without waiting for the disk.

    python -m benchmarks.bench_managed [--parts commit,planning,append,upsert,aging] [--rows N] [--runs N] [--commits N]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import alternate, report
from pyspark_lookup import LookupTable
from pyspark_lookup.sources.managed.log import (
    Allocate,
    Commit,
    Create,
    DataFile,
    Definition,
    Write,
    WriteMode,
    event_bytes,
)

PARTS = ("commit", "planning", "append", "upsert", "aging")
COMMITS = (10, 10_000)
# No compaction: a commit that now and then compacts others would be a different measurement.
OWN = {"lookup.keys": "id", "lookup.write.compact-after": "0"}


def customers(start: int, rows: int, seed: int) -> pa.Table:
    """Make rows of customers, in random order."""
    rng = np.random.default_rng(seed)
    names = np.char.add("customer-", rng.integers(0, 10**6, rows).astype(str))
    ids = rng.permutation(np.arange(start, start + rows))
    return pa.table(
        {"id": ids, "name": pa.array(names), "score": rng.random(rows), "visits": rng.integers(0, 500, rows)}
    )


def commit(work: Path, runs: int) -> None:
    table = LookupTable(str(work / "commits"), {**OWN, "lookup.cache.dir": str(work / "cache")})
    rows = customers(0, 100_000, 1)
    table.write(rows)

    def plain() -> None:
        path = work / "plain.parquet"
        with path.open("wb") as file:
            pq.write_table(rows.sort_by("id"), file, compression="zstd", compression_level=1)
            file.flush()
            os.fsync(file.fileno())

    times = alternate({"LookupTable.write": lambda: table.write(rows), "one parquet file": plain}, 3, runs)
    report("A commit of 100,000 rows on a local disk", times, "one parquet file")
    more = [a - b for a, b in zip(times["LookupTable.write"], times["one parquet file"], strict=True)]
    print(f"\nBeyond writing the data: median {statistics.median(more) * 1000:.1f} ms, max {max(more) * 1000:.1f} ms\n")


def make_log(path: Path, commits: int) -> None:
    """Write a table with `commits` appends, all of the same file, without waiting for the disk."""
    log, head = path / "_lookup" / "log", ("table-of-a-benchmark", "nonce", 0.0)
    log.mkdir(parents=True)
    (path / "data").mkdir()
    rows = pa.table({"id": pa.array([1], pa.int64()), "name": ["a"]})
    pq.write_table(rows, path / "data" / "one.parquet")
    size = (path / "data" / "one.parquet").stat().st_size
    events = [Create(1, *head, Definition(rows.schema, ("id",)))]
    for number in range(1, commits + 1):
        at, files = len(events), (DataFile("data/one.parquet", size, 1),)
        events += [Allocate(at + 1, *head, number, WriteMode.APPEND), Write(at + 2, *head, number, files)]
        events += [Commit(at + 3, *head, number)]
    for event in events:
        (log / f"{event.position:020d}.json").write_bytes(event_bytes(event))


_PLAN = """
import json, sys, time
from pyspark_lookup import LookupTable
table = LookupTable(sys.argv[1], {"lookup.cache.dir": sys.argv[2]})
before, started = table.metrics(), time.perf_counter()
table.version
seconds, after = time.perf_counter() - started, table.metrics()
calls = {name: after[name] - before[name] for name in ("ufsHeadCount", "ufsListCount", "ufsGetCount")}
print(json.dumps([seconds, calls]))
"""


def planning(work: Path, runs: int) -> None:
    print("| commits | who asks | runs | median s | HEAD | LIST | GET |\n|---|---|---|---|---|---|---|")
    for commits in COMMITS:
        path = work / f"log-{commits}"
        make_log(path, commits)
        # Our own commits write checkpoints when they are due, as a log of this length would have them.
        table = LookupTable(str(path), {"lookup.cache.dir": str(work / "writer")})
        for _ in range(20):
            table.write(pa.table({"id": [2], "name": ["b"]}))
        for client in ("a new host", "a new process"):
            answers = []
            for run in range(runs):
                cache = work / f"host-{commits}-{run if client == 'a new host' else 0}"
                process = subprocess.run(
                    [sys.executable, "-c", _PLAN, str(path), str(cache)], capture_output=True, text=True, check=True
                )
                answers.append(json.loads(process.stdout))
            calls = answers[-1][1]
            median = statistics.median(seconds for seconds, _ in answers)
            print(f"| {commits:,} | {client} | {runs} | {median:.3f} | " + " | ".join(map(str, calls.values())) + " |")
    print("\n| commits | one more, of one row: runs | median s | max s |\n|---|---|---|---|")
    for commits in COMMITS:
        table = LookupTable(str(work / f"log-{commits}"), {"lookup.cache.dir": str(work / "writer")})
        times = []
        for _ in range(5 * runs):
            started = time.perf_counter()
            table.write(pa.table({"id": [2], "name": ["b"]}))
            times.append(time.perf_counter() - started)
        print(f"| {commits:,} | {len(times)} | {statistics.median(times):.3f} | {max(times):.3f} |")


def full_table(work: Path, name: str, rows: int) -> tuple[Path, LookupTable]:
    """Write a table of `rows` customers. Returns (its path, the table as the host that wrote it has it open)."""
    path = work / name
    table = LookupTable(str(path), {**OWN, "lookup.cache.dir": str(work / "writer")})
    for part in range(10):
        table.write(customers(part * rows // 10, rows // 10, part))
    return path, table


def append(work: Path, rows: int, runs: int) -> None:
    path, table = full_table(work, "full", rows)
    options = {"lookup.cache": "FULL", "lookup.full-cache.build-wait": "10 min"}
    builds, visible, commits = [], [], []
    for run in range(runs):
        reader = LookupTable(str(path), {**options, "lookup.cache.dir": str(work / f"host-{run}")})
        started = time.perf_counter()
        assert reader.get(1)
        builds.append(time.perf_counter() - started)
        new = customers(rows * (run + 2), rows // 100, run)
        started = time.perf_counter()
        table.write(new)
        commits.append(time.perf_counter() - started)
        started = time.perf_counter()
        assert reader.get(rows * (run + 2) + 5)
        visible.append(time.perf_counter() - started)
        reader.close()
        shutil.rmtree(work / f"host-{run}")
    print(f"\n{rows:,} rows, FULL; {runs} runs, medians: build {statistics.median(builds):.2f} s; commit of 1 % "
          f"{statistics.median(commits):.2f} s; visible after {statistics.median(visible):.2f} s, "
          f"{statistics.median(v / b for v, b in zip(visible, builds, strict=True)) * 100:.1f} % of a build "
          f"(max {max(v / b for v, b in zip(visible, builds, strict=True)) * 100:.1f} %)\n")  # fmt: skip


def updated(rows: int, keys: int, seed: int) -> pa.Table:
    """Make new rows for `keys` random keys of a table of `rows` customers."""
    rng = np.random.default_rng(seed)
    return customers(0, keys, seed).set_column(0, "id", pa.array(rng.choice(rows, keys, replace=False)))


def upsert(work: Path, rows: int, runs: int) -> None:
    path, table = full_table(work, "upserted", rows)
    options = {"lookup.cache": "FULL", "lookup.full-cache.build-wait": "10 min", "lookup.cache.dir": str(work / "host")}
    reader = LookupTable(str(path), options)
    started = time.perf_counter()
    assert reader.get(1)
    build = time.perf_counter() - started
    visible, commits = [], []
    for run in range(runs):
        new = updated(rows, 10_000, run).set_column(3, "visits", pa.array(np.full(10_000, 1000 + run)))
        started = time.perf_counter()
        table.upsert(new)
        commits.append(time.perf_counter() - started)
        started = time.perf_counter()
        (row,) = reader.get(new.column("id")[17].as_py())
        visible.append(time.perf_counter() - started)
        assert row["visits"] == 1000 + run
    print(f"\n{rows:,} rows, FULL, built in {build:.2f} s; {runs} upserts of 10,000 keys, medians: commit "
          f"{statistics.median(commits):.2f} s; visible after {statistics.median(visible):.2f} s, "
          f"{statistics.median(visible) / build * 100:.1f} % of the build (max {max(visible) / build * 100:.1f} %)\n")  # fmt: skip


_LIVE = """
import os, sys, time
import pyarrow as pa
from pyspark_lookup import LookupTable
path, cache, begin, end, upkeep, patient = sys.argv[1:]
if not int(patient):
    os.fsync = lambda descriptor: None
table = LookupTable(path, {"lookup.keys": "id", "lookup.cache.dir": cache})
times = []
for number in range(int(begin), int(end)):
    started = time.perf_counter()
    table.upsert(pa.table({"id": [number % 50], "name": [f"customer-{number}"]}))
    times.append(time.perf_counter() - started)
    if int(upkeep) and (number % 300 == 299 or number == int(end) - 1):
        table.alter(properties={"lookup.log.retention": "0 s"})
        table.vacuum("0 s", force=True)
print(sorted(times[3:])[len(times[3:]) // 2] if len(times) > 3 else 0)
"""


def aged(path: Path, cache: Path, begin: int, end: int, upkeep: bool, patient: bool) -> float:
    """Commit the upserts from `begin` to `end` in a process of their own. Returns the median seconds of a commit."""
    arguments = [str(path), str(cache), str(begin), str(end), str(int(upkeep)), str(int(patient))]
    process = subprocess.run([sys.executable, "-c", _LIVE, *arguments], capture_output=True, text=True, check=True)
    return float(process.stdout)


def measure_age(work: Path, path: Path, cache: Path, at: int, upkeep: bool, runs: int) -> list[float]:
    """Measure a table after `at` commits: [commit ms; first look on a new host: requests, ms; in a new process: ms; files; bytes of the cache]."""
    commit_s = aged(path, cache, at, at + 60, upkeep, patient=True)
    aged(path, cache, at + 60, at + 300, upkeep, patient=False)
    samples: dict[str, list[tuple[float, int]]] = {"new": [], "known": []}
    for run in range(runs):
        for client, host in (("new", work / f"host-{path.name}-{at}-{run}"), ("known", cache)):
            command = [sys.executable, "-c", _PLAN, str(path), str(host)]
            process = subprocess.run(command, capture_output=True, text=True, check=True)
            seconds, calls = json.loads(process.stdout)
            samples[client].append((seconds, sum(calls.values())))
    new_s, known_s = (statistics.median(seconds for seconds, _ in samples[client]) for client in ("new", "known"))
    files, cache_files = ([p for p in place.rglob("*") if p.is_file()] for place in (path, cache))
    requests = max(calls for _, calls in samples["new"])
    return [
        commit_s * 1000,
        requests,
        new_s * 1000,
        known_s * 1000,
        len(files),
        sum(p.stat().st_size for p in cache_files),
    ]


def aging(work: Path, commits: int, runs: int) -> None:
    print("\n| commits | a commit ms | new host: requests | ms | new process ms | files | bytes in the cache |")
    print("|---|---|---|---|---|---|---|")
    for name, upkeep in (("with upkeep", True), ("all kept", False)):
        path, cache = work / name.replace(" ", "-"), work / f"cache-{upkeep}"
        first: list[float] = []
        for begin, end in ((0, 300), (600, commits)):
            aged(path, cache, begin, end, upkeep, patient=False)
            figures = measure_age(work, path, cache, end, upkeep, runs)
            print(f"| {end:,}, {name} | " + " | ".join(f"{value:,.1f}" for value in figures) + " |", flush=True)
            first = first or figures
        ratios = (later / earlier for later, earlier in zip(figures, first, strict=True))
        print("| ratio | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--commits", type=int, default=100_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-managed-") as directory:
        work = Path(directory)
        if "commit" in args.parts:
            commit(work, args.runs or 30)
        if "planning" in args.parts:
            planning(work, args.runs or 5)
        if "append" in args.parts:
            append(work, args.rows, args.runs or 3)
        if "upsert" in args.parts:
            upsert(work, args.rows, args.runs or 5)
        if "aging" in args.parts:
            aging(work, args.commits, args.runs or 5)


if __name__ == "__main__":
    main()
