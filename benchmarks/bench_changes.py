"""What do a managed table's changes cost: lookups over many upserts, a stream of changes, an upsert under a running stream?

points    keys of a table of 1M rows, looked up one by one (`LookupTable.get`, blocks of files in the cache), after 100
          upserts of 1,000 keys each and after `compact()`; goal at most 3 times as long before it as after.
stream    `readStream` of a table of 5M rows and of 20 upserts of 100,000 keys each into it (both images of each), on
          local[2] into Spark's noop sink; goal at least 200,000 rows a second.
running   10,000 keys are upserted into a table of 10M rows that a running stream looks up with `lookup.cache=FULL`; how
          many micro-batches pass until their new rows are answered (goal at most 2).

    python -m benchmarks.bench_changes [--parts points,stream,running] [--rows N] [--runs N]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from benchmarks.bench_managed import full_table, updated
from benchmarks.common import session
from pyspark_lookup import LookupTable, lookup_join

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTS = ("points", "stream", "running")
CACHES = {"NONE": {}, "PARTIAL": {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "1000000"}}


def points(work: Path, runs: int) -> None:
    path, table = full_table(work, "points", 1_000_000)
    for number in range(100):
        table.upsert(updated(1_000_000, 1000, number))
    rng = np.random.default_rng(5)
    print("| cache | state | files | p50 ms | p99 ms | to compacted |\n|---|---|---|---|---|---|")
    seconds: dict[tuple[str, str], list[float]] = {}
    files = {}
    for state in ("100 upserts", "compacted"):
        if state == "compacted":
            started = time.perf_counter()
            table.compact()
            folded_s = time.perf_counter() - started
        files[state] = table.describe()["files"]
        for cache, options in CACHES.items():
            reader = LookupTable(str(path), {**options, "lookup.cache.dir": str(work / f"{cache}-{state}")})
            reader.scan()  # loads the blocks into the cache
            keys = rng.choice(1_000_000, runs + 20, replace=False).tolist()
            times = []
            for key in keys:
                started = time.perf_counter()
                assert len(reader.get(key)) == 1
                times.append(time.perf_counter() - started)
            seconds[cache, state] = sorted(times[20:])
    for (cache, state), times in seconds.items():
        p50, p99 = (1000 * times[int(len(times) * share)] for share in (0.5, 0.99))
        ratio = statistics.median(times) / statistics.median(seconds[cache, "compacted"])
        print(f"| {cache} | {state} | {files[state]} | {p50:.2f} | {p99:.2f} | {ratio:.2f} |")
    print(f"\ncompact() took {folded_s:.2f} s\n")


def stream(spark: SparkSession, work: Path, runs: int) -> None:
    path, table = full_table(work, "stream", 5_000_000)
    snapshot, changes = [], []
    reader = spark.readStream.format("lookupcache").option("lookup.view", "changes")
    for run in range(runs):
        query = reader.load(str(path)).writeStream.format("noop").option("checkpointLocation", str(work / f"c{run}"))
        for number, seconds in enumerate((snapshot, changes)):
            if number:
                for part in range(20):
                    table.upsert(updated(5_000_000, 100_000, run * 20 + part))
            running = query.trigger(availableNow=True).start()
            running.awaitTermination()
            progress = [p for p in running.recentProgress if p.numInputRows]
            rows = sum(p.numInputRows for p in progress)
            seconds.append(rows / sum(p.durationMs["addBatch"] / 1000 for p in progress))
    print(f"\nchange stream on local[2], {runs} runs, median rows/s: snapshot {statistics.median(snapshot):,.0f}; both images of "
          f"upserts {statistics.median(changes):,.0f} (least {min(snapshot + changes):,.0f})\n")  # fmt: skip


def running(spark: SparkSession, work: Path, rows: int, runs: int) -> None:
    path, table = full_table(work, "running", rows)
    (work / "in").mkdir()
    rows_read: list[int] = []

    def keep(batch: DataFrame, _: int) -> None:
        rows_read.append(batch.agg({"visits": "max"}).first()[0])

    source = spark.readStream.schema("id long").parquet(str(work / "in"))
    options = {"lookup.cache": "FULL", "lookup.full-cache.build-wait": "10 min", "lookup.cache.dir": str(work / "host")}
    joined = lookup_join(source, str(path), "id", columns=["visits"], options=options)
    query = joined.writeStream.foreachBatch(keep).option("checkpointLocation", str(work / "running-c")).start()

    def batch(keys: pa.Table) -> float:
        spark.createDataFrame(keys).write.mode("append").parquet(str(work / "in"))
        started = time.perf_counter()
        query.processAllAvailable()
        return time.perf_counter() - started

    waited, times = [], []
    build_s = batch(pa.table({"id": [1]}))
    plain_s = statistics.median(batch(pa.table({"id": [1]})) for _ in range(3))
    for run in range(runs):
        new = updated(rows, 10_000, run).set_column(3, "visits", pa.array(np.full(10_000, 1000 + run)))
        table.upsert(new)
        rows_read.clear()
        count = 0
        while not rows_read or rows_read[-1] != 1000 + run:
            times.append(batch(new.select(["id"])))
            count += 1
        waited.append(count)
    query.stop()
    print(f"\n{rows:,} rows, FULL, running stream: first micro-batch (builds) {build_s:.2f} s, one without news {plain_s:.2f} s; after "
          f"an upsert of 10,000 keys {statistics.median(times):.2f} s; new rows answered after {max(waited)} micro-batches at most\n")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--runs", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-changes-", ignore_cleanup_errors=True) as directory:
        work = Path(directory)
        if "points" in args.parts:
            points(work, args.runs or 1000)
        if "stream" in args.parts or "running" in args.parts:
            spark = session(2)
            if "stream" in args.parts:
                stream(spark, work, args.runs or 3)
            if "running" in args.parts:
                running(spark, work, args.rows, args.runs or 5)
            spark.stop()


if __name__ == "__main__":
    main()
