"""How long does a warm full scan take, beside Spark's own parquet reader?

Five columns of 10M rows are aggregated with two tasks: once from local files, once from a remote store
with a delay per request, unchanged since the last scan. Goals: local at most 2× Spark's time, remote at
least 3× faster.

    python -m benchmarks.bench_scan [--rows N] [--runs N] [--delay-ms 30] [--mbytes-per-s 0]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from pyspark.sql import DataFrame

from benchmarks import servers
from benchmarks.common import alternate, make_table, report, session

AGGREGATES = ("sum(id)", "max(name)", "max(segment)", "sum(score)", "max(since)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--delay-ms", type=float, default=30)
    parser.add_argument(
        "--mbytes-per-s", type=float, default=0, help="of one connection to the remote store; 0: as fast as it goes"
    )
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "lookupcache-bench")
    args = parser.parse_args()
    table = make_table(args.data, args.rows, args.files, args.seed)
    spark = session(2)
    cache = args.data / "cache"
    reader = spark.read.format("lookupcache").option("lookup.cache.dir", str(cache))
    # As many tasks as Spark's own reader makes of these files.
    theirs = spark.read.parquet(str(table))
    tasks = theirs.rdd.getNumPartitions()
    size = sum(file.stat().st_size for file in table.iterdir())
    reader = reader.option("lookup.scan.split-size", str(size // tasks + args.files))
    ours = reader.load(f"file://{table}")
    assert ours.rdd.getNumPartitions() == tasks, (ours.rdd.getNumPartitions(), tasks)
    check(ours, theirs)
    seconds = alternate(
        {"spark.read.parquet": lambda: aggregate(theirs), "lookupcache": lambda: aggregate(ours)},
        args.warmup,
        args.runs,
    )
    report(f"Warm full scan, local, {args.rows:,} rows × 5 columns, {tasks} tasks", seconds, "spark.read.parquet")

    delay_s, rate = args.delay_ms / 1000, args.mbytes_per_s * 1e6
    with servers.webhdfs(table, delay_s, rate) as hdfs, servers.s3(table, "bench", "customers", delay_s) as endpoint:
        theirs = spark.read.parquet(hdfs)
        ours = reader.option("lookup.storage.endpoint_url", endpoint).load("s3://bench/customers")
        check(ours, theirs)
        seconds = alternate(
            {"spark.read.parquet": lambda: aggregate(theirs), "lookupcache": lambda: aggregate(ours)},
            args.warmup,
            args.runs,
        )
        # A plan made anew for every query: planning's metadata call is in it.
        seconds |= alternate(
            {"lookupcache, new load() each": lambda: aggregate(reader.load("s3://bench/customers"))},
            args.warmup,
            args.runs,
        )
    limit = f", {args.mbytes_per_s:g} MB/s a connection" if rate else ""
    report(f"Unchanged remote table, {args.delay_ms:g} ms a request{limit}", seconds, "spark.read.parquet")
    spark.stop()


def aggregate(table: DataFrame) -> list[object]:
    return list(table.selectExpr(*AGGREGATES).collect()[0])


def check(ours: DataFrame, theirs: DataFrame) -> None:
    """The two read the same rows (a sum of doubles depends on its order in the last digits)."""
    for mine, other in zip(aggregate(ours), aggregate(theirs), strict=True):
        same = abs(mine - other) <= 1e-6 * abs(other) if isinstance(other, float) else mine == other  # type: ignore[operator]
        assert same, (mine, other)


if __name__ == "__main__":
    main()
