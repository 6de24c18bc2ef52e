"""Streams joined to a table that changes under them: each micro-batch is of one version, the newest at its start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as sf

from pyspark_lookup import LookupTable, lookup_join
from tests.fuzzing import by_day
from tests.spark.test_source import load, put

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

pytestmark = pytest.mark.spark

FULL = {"lookup.cache": "FULL"}
MODES = {
    "full": FULL,
    "partial": {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "10000"},
    "none": {"lookup.cache": "NONE"},
}
KEYS = 200
RESTARTS = 3


def events(directory: Path, number: int, keys: range = range(KEYS)) -> Path:
    """A file of the stream: (id, at) with `at` in seconds."""
    directory.mkdir(exist_ok=True)
    table = pa.table(
        {"id": list(keys), "event": [number * 100_000 + key for key in keys], "batch": [number] * len(keys)}
    )
    new = directory / f".{number:03}"
    pq.write_table(table, new)
    return new.rename(directory / f"{number:03}.parquet")


def stream_of(spark: SparkSession, directory: Path) -> DataFrame:
    reader = spark.readStream.schema("id long, event long, batch long").option("maxFilesPerTrigger", "1")
    return reader.parquet(str(directory))


class Replaced:
    """A table of one file, replaced in place."""

    options: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, home: Path) -> None:
        self.path = home / "dim.parquet"

    def publish(self, version: int) -> None:
        put(self.path, version, range(0, KEYS, 2))

    def version_in(self, row: dict[str, Any], prefix: str) -> int | None:
        value: int | None = row[f"{prefix}_version"]
        return value


class Renamed(Replaced):
    """A directory to which each version comes under a new name, of which the latest counts; the old ones stay."""

    options = {"lookup.partition": "max_pt()"}  # noqa: RUF012

    def __init__(self, home: Path) -> None:
        self.path = home / "dim"

    def publish(self, version: int) -> None:
        put(self.path / f"v={version:04}" / "part.parquet", version, range(0, KEYS, 2))


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(("kind", "batches"), by_day([(Replaced, 20), (Renamed, 50)], 2))
def test_each_batch_is_of_one_version(spark: SparkSession, tmp_path: Path, kind: type[Replaced], batches: int) -> None:
    """Micro-batches in all three modes at once, changes while they run, three restarts: one version in each batch, none older
    than the one before, no row lost or doubled; and the query's progress says which version it was."""
    changes = batches * 2 // 5
    table = kind(tmp_path)
    table.publish(1)
    for number in range(batches):
        events(tmp_path / "events", number)
    joined = stream_of(spark, tmp_path / "events")
    for prefix, mode in MODES.items():
        options: dict[str, Any] = {**mode, **table.options}
        joined = lookup_join(joined, str(table.path), "id", columns=["version"], prefix=f"{prefix}_", options=options)

    due, done = threading.Semaphore(0), threading.Event()

    def change() -> None:
        for version in range(2, changes + 2):
            due.acquire()
            if done.is_set():
                return
            table.publish(version)

    def write(batch: DataFrame, number: int) -> None:
        if number * changes // batches != (number + 1) * changes // batches:
            due.release()  # the table is replaced while this batch runs
        batch.write.mode("overwrite").parquet(str(tmp_path / "out" / f"{number:03}"))

    writer = threading.Thread(target=change)
    writer.start()
    told: dict[int, set[str]] = {}
    try:
        for stop_at in [*(batches * n // (RESTARTS + 1) for n in range(1, RESTARTS + 1)), None]:
            query = started(joined, tmp_path, write)
            run_until(query, stop_at)
            for progress in query.recentProgress:
                found = {row["version"] for row in progress["observedMetrics"].values()}
                told.setdefault(progress["batchId"], set()).update(found)
    finally:
        done.set()
        due.release()
        writer.join()
    versions = {prefix: [] for prefix in MODES}
    seen: list[int] = []
    for written in sorted((tmp_path / "out").iterdir()):  # after a restart a batch may take two files
        rows = ds.dataset(written).to_table().to_pylist()
        seen += [row["event"] for row in rows]
        for prefix, found in versions.items():
            of_even = {table.version_in(row, prefix) for row in rows if row["id"] % 2 == 0}
            assert {table.version_in(row, prefix) for row in rows if row["id"] % 2} == {None}
            assert len(of_even) == 1, (written.name, prefix, of_even)
            found.append(of_even.pop())
    assert len(versions["full"]) >= batches - RESTARTS
    assert sorted(seen) == sorted(number * 100_000 + key for number in range(batches) for key in range(KEYS))
    assert versions["full"] == sorted(versions["full"])
    assert versions["full"] == versions["partial"] == versions["none"]
    assert len(set(versions["full"])) > changes // 2
    assert all(len(digests) == 1 for digests in told.values() if digests)


def started(joined: DataFrame, home: Path, write: Callable[[DataFrame, int], None]) -> StreamingQuery:
    return joined.writeStream.foreachBatch(write).option("checkpointLocation", str(home / "checkpoint")).start()


def run_until(query: StreamingQuery, batch: int | None) -> None:
    """Wait until a batch has ended, or all; then stop the query in the midst of what it does."""
    try:
        if batch is None:
            query.processAllAvailable()
            return
        while query.isActive and (query.lastProgress is None or query.lastProgress["batchId"] < batch):
            query.awaitTermination(0.05)
    finally:
        query.stop()


def in_memory(joined: DataFrame, name: str, mode: str = "append") -> StreamingQuery:
    return joined.writeStream.format("memory").queryName(name).outputMode(mode).start()


def test_a_running_stream_sees_changes(spark: SparkSession, tmp_path: Path) -> None:
    """Append mode: each batch has what the table holds at its start; the metrics view names the version announced last."""
    path = put(tmp_path / "dim.parquet", 1)
    events(tmp_path / "events", 0, range(10))
    joined = lookup_join(stream_of(spark, tmp_path / "events"), str(path), "id")
    query = in_memory(joined, "changes")
    try:
        for version in (1, 2, 3):
            put(path, version)
            events(tmp_path / "events", version, range(10))
            query.processAllAvailable()
        found = {row.batch: row.version for row in spark.table("changes").distinct().collect()}
        (told,) = query.lastProgress["observedMetrics"].values()
    finally:
        query.stop()
    assert {found[batch] for batch in (1, 2, 3)} == {1, 2, 3}
    table = LookupTable(str(path))
    assert told["version"] == table.version
    assert told["table"] == str(path)
    metrics = {row.name: row for row in load(spark, path, {"lookup.view": "metrics"}).collect()}
    assert metrics["tokenVersion"].detail == table.version
    known = {row.digest: row for row in load(spark, path, {"lookup.view": "versions"}).collect()}
    assert known[table.version].token_at is not None


@pytest.mark.parametrize("mode", MODES)
def test_a_micro_batch_has_the_rows_of_a_batch_join(spark: SparkSession, tmp_path: Path, mode: str) -> None:
    """Several rows for a key, none, nulls, two keys and filters on both sides: a stream's rows are those of Spark's own batch join."""
    events(tmp_path / "events", 1, range(300))
    rows = [(key % 90, f"g{key % 4}" if key % 11 else None, key) for key in range(400)]
    dim = spark.createDataFrame(rows, "id long, g string, value long")
    dim.coalesce(1).write.parquet(str(tmp_path / "dim"))
    keyed = {"g": "CASE WHEN event % 13 > 0 THEN concat('g', event % 4) END"}

    def filtered(joined: DataFrame) -> DataFrame:
        return joined.filter("event % 5 < 4 AND (value IS NULL OR value % 3 < 2)")

    options: dict[str, Any] = MODES[mode]
    for how in ("left", "inner"):
        stream = stream_of(spark, tmp_path / "events").withColumns({c: sf.expr(e) for c, e in keyed.items()})
        joined = lookup_join(stream, str(tmp_path / "dim"), ["id", "g"], how, options=options)
        query = in_memory(filtered(joined), f"rows_{mode}_{how}")
        try:
            query.processAllAvailable()
        finally:
            query.stop()
        facts = spark.read.parquet(str(tmp_path / "events")).withColumns({c: sf.expr(e) for c, e in keyed.items()})
        expected = filtered(facts.join(dim, ["id", "g"], how)).select("event", "value").collect()
        found = spark.table(f"rows_{mode}_{how}").select("event", "value").collect()
        assert sorted(found, key=str) == sorted(expected, key=str)
        assert len(found) > 90


def test_aggregates_with_a_watermark(spark: SparkSession, tmp_path: Path) -> None:
    """Update mode: a windowed count by a looked-up column, with a watermark and state; the version is not part of the state."""
    path = put(tmp_path / "dim.parquet", 7, range(5))
    for number in range(3):
        events(tmp_path / "events", number, range(10))
    timed = stream_of(spark, tmp_path / "events").selectExpr("id", "timestamp_seconds((batch + 1000) * 3600) AS at")
    joined = lookup_join(timed.withWatermark("at", "10 hours"), str(path), "id")
    counted = joined.groupBy("at", "version").count()
    query = in_memory(counted, "counted", "update")
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    rows = spark.table("counted").groupBy("at", "version").agg({"count": "max"}).collect()
    assert sorted(tuple(row)[1:] for row in rows if row.version) == [(7, 5)] * 3
    assert sorted(tuple(row)[1:] for row in rows if row.version is None) == [(None, 5)] * 3
