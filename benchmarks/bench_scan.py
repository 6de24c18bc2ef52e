"""How long does a warm full scan take, beside Spark's own parquet reader?

Five columns of 10M rows are aggregated with two tasks: once from local files, once from a remote store
with a delay per request, unchanged since the last scan. Goals: local at most 1.35× Spark's time, or 1.05× the
floor; remote at least 3× faster.

Two more Python sources show the floor: `ready batches` hands out Arrow batches that lie decoded in a mapped
file; `pyarrow alone` decodes the Parquet files as they are, with pyarrow and nothing else. CPU seconds are those of
the whole process tree, on which other programs of the machine have little influence.

    python -m benchmarks.bench_scan [--rows N] [--runs N] [--delay-ms 30] [--mbytes-per-s 0] [--only local]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from benchmarks import servers
from benchmarks.common import alternate, cpu_s, make_table, report, session

AGGREGATES = ("sum(id)", "max(name)", "max(segment)", "sum(score)", "max(since)")
PEER, OURS, FULL, READY, ALONE = (
    "spark.read.parquet",
    "lookupcache",
    "lookupcache, FULL",
    "ready batches",
    "pyarrow alone",
)
BATCH_ROWS = 65_536


class Files(DataSource):
    """A source that divides the files of a directory among `tasks` tasks: Arrow files, whose batches are ready, or Parquet files."""

    @classmethod
    def name(cls) -> str:
        return "bench_files"

    def schema(self) -> str:
        return "id bigint, name string, segment string, score double, since date"

    def reader(self, schema: Any) -> DataSourceReader:
        return FilesReader(self.options["path"], int(self.options["tasks"]))


class FilesReader(DataSourceReader):
    def __init__(self, path: str, tasks: int) -> None:
        self._paths = sorted(map(str, Path(path).iterdir()))
        self._tasks = tasks

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(self._paths[number :: self._tasks]) for number in range(self._tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        for path in partition.value:
            if path.endswith(".parquet"):
                yield from pq.ParquetFile(path).iter_batches(BATCH_ROWS, use_threads=False)
            else:
                stored = pa.ipc.open_file(pa.memory_map(path))
                yield from map(stored.get_batch, range(stored.num_record_batches))


def make_ready(table: Path, directory: Path) -> Path:
    """Write the table's rows as uncompressed Arrow files. Made once."""
    ready = directory / f"ready-{table.parent.name}"
    if not ready.exists():
        ready.mkdir()
        for path in table.glob("*.parquet"):
            rows = pq.read_table(path)
            with pa.ipc.new_file(ready / f"{path.stem}.arrow", rows.schema) as file:
                file.write_table(rows, BATCH_ROWS)
    return ready


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
    parser.add_argument("--only", choices=["local"])
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "lookupcache-bench")
    args = parser.parse_args()
    table = make_table(args.data, args.rows, args.files, args.seed)
    spark = session(2)
    cache = args.data / "cache"
    reader = spark.read.format("lookupcache").option("lookup.cache.dir", str(cache))
    # As many tasks as Spark's own reader makes of these files.
    spark_table = spark.read.parquet(str(table))
    tasks = spark_table.rdd.getNumPartitions()
    size = sum(file.stat().st_size for file in table.iterdir())
    reader = reader.option("lookup.scan.split-size", str(size // tasks + args.files))
    lookup_table = reader.load(f"file://{table}")
    assert lookup_table.rdd.getNumPartitions() == tasks, (lookup_table.rdd.getNumPartitions(), tasks)
    full = reader.option("lookup.cache", "FULL").option("lookup.keys", "id").load(f"file://{table}")
    spark.dataSource.register(Files)
    files = spark.read.format("bench_files").option("tasks", tasks)
    ready, alone = files.load(str(make_ready(table, args.data))), files.load(str(table))
    scans = {PEER: spark_table, OURS: lookup_table, FULL: full, READY: ready, ALONE: alone}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in scans}
    for scan in scans.values():
        check(scan, spark_table)
    contenders = {name: measured(scan, cpu_seconds[name]) for name, scan in scans.items()}
    seconds = alternate(contenders, args.warmup, args.runs)
    title = f"Warm full scan, local, {args.rows:,} rows × 5 columns, {tasks} tasks"
    report(title, seconds, PEER)
    report(f"{title}, CPU", {name: samples[args.warmup :] for name, samples in cpu_seconds.items()}, PEER)
    report(f"{title}, beside the floor", seconds, READY)
    if args.only is not None:
        spark.stop()
        return
    delay_s, rate = args.delay_ms / 1000, args.mbytes_per_s * 1e6
    with servers.webhdfs(table, delay_s, rate) as hdfs, servers.s3(table, "bench", "customers", delay_s) as endpoint:
        spark_table = spark.read.parquet(hdfs)
        lookup_table = reader.option("lookup.storage.endpoint_url", endpoint).load("s3://bench/customers")
        check(lookup_table, spark_table)
        seconds = alternate(
            {"spark.read.parquet": lambda: aggregate(spark_table), "lookupcache": lambda: aggregate(lookup_table)},
            args.warmup,
            args.runs,
        )
        # A new plan for every query, so the metadata call of planning is included.
        seconds |= alternate(
            {"lookupcache, new load() each": lambda: aggregate(reader.load("s3://bench/customers"))},
            args.warmup,
            args.runs,
        )
    limit = f", {args.mbytes_per_s:g} MB/s a connection" if rate else ""
    report(f"Unchanged remote table, {args.delay_ms:g} ms a request{limit}", seconds, "spark.read.parquet")
    spark.stop()


def measured(table: DataFrame, cpu_seconds: list[float]) -> Callable[[], None]:
    """A function that aggregates the table and appends the CPU seconds this took."""

    def run() -> None:
        before_s, _ = cpu_s()
        aggregate(table)
        cpu_seconds.append(cpu_s()[0] - before_s)

    return run


def aggregate(table: DataFrame) -> list[object]:
    return list(table.selectExpr(*AGGREGATES).collect()[0])


def check(actual: DataFrame, expected: DataFrame) -> None:
    """Assert that both read the same rows. The last digits of a sum of doubles may differ, because they depend on its order."""
    for value, target in zip(aggregate(actual), aggregate(expected), strict=True):
        is_equal = abs(value - target) <= 1e-6 * abs(target) if isinstance(target, float) else value == target  # type: ignore[operator]
        assert is_equal, (value, target)


if __name__ == "__main__":
    main()
