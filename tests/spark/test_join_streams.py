"""Streams joined to a table that changes under them: each micro-batch is of one version, the newest at its start."""

from __future__ import annotations

import collections
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.dataset as ds
import pytest

from pyspark_lookup import lookup_join
from tests.fuzzing import by_day
from tests.spark.common import MODES, batches_of, events, load, put, running, stream_of
from tests.test_toy_source import MODES as TOY_MODES
from tests.test_toy_source import people
from tests.toy_source import commit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

pytestmark = pytest.mark.spark

KEYS = 200
RESTARTS = 3
# A table of one file that is replaced in place; or a directory to which each version comes under a new name, the latest of
# which counts and the old ones of which stay.
TABLES = {
    "replaced": ("dim.parquet", "", {}),
    "renamed": ("dim", "v={:04}/part.parquet", {"lookup.partition": "max_pt()"}),
}


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(("kind", "batches"), by_day([("replaced", 20), ("renamed", 50)], 2))
def test_each_batch_is_of_one_version(spark: SparkSession, tmp_path: Path, kind: str, batches: int) -> None:
    """Micro-batches in all three modes at once, changes while they run, three restarts: one version in each batch, none older
    than the one before, no row lost or doubled; the query's progress and the views say which version it was."""
    changes = batches * 2 // 5
    place, file, options = TABLES[kind]
    table = tmp_path / place

    def publish(version: int) -> None:
        put(table / file.format(version), version, range(0, KEYS, 2))

    publish(1)
    for number in range(batches):
        events(tmp_path / "events", number, range(KEYS))
    joined = stream_of(spark, tmp_path / "events")
    for prefix, mode in MODES.items():
        joined = lookup_join(
            joined, str(table), "id", columns=["version"], prefix=f"{prefix}_", options={**mode, **options}
        )
    due, done = threading.Semaphore(0), threading.Event()

    def change() -> None:
        for version in range(2, changes + 2):
            due.acquire()
            if done.is_set():
                return
            publish(version)

    def write(batch: DataFrame, number: int) -> None:
        if number * changes // batches != (number + 1) * changes // batches:
            due.release()  # the table is replaced while this batch runs
        batch.write.mode("overwrite").parquet(str(tmp_path / "out" / f"{number:03}"))

    writer = threading.Thread(target=change)
    writer.start()
    told: dict[int, set[str]] = {}
    try:
        for stop_at in [*(batches * n // (RESTARTS + 1) for n in range(1, RESTARTS + 1)), None]:
            made = joined.writeStream.foreachBatch(write).option("checkpointLocation", str(tmp_path / "checkpoint"))
            query = made.start()
            run_until(query, stop_at)
            for progress in query.recentProgress:
                for row in progress["observedMetrics"].values():
                    told.setdefault(progress["batchId"], set()).add(row["version"])
                    assert row["table"] == str(table)
    finally:
        done.set()
        due.release()
        writer.join()
    versions: dict[str, list[int]] = {prefix: [] for prefix in MODES}
    seen: list[int] = []
    for written in sorted((tmp_path / "out").iterdir()):  # after a restart a batch may take two files
        rows = ds.dataset(written).to_table().to_pylist()
        seen += [row["event"] for row in rows]
        for prefix, found in versions.items():
            of_even = {row[f"{prefix}_version"] for row in rows if row["id"] % 2 == 0}
            assert {row[f"{prefix}_version"] for row in rows if row["id"] % 2} == {None}
            assert len(of_even) == 1, (written.name, prefix, of_even)
            found.append(of_even.pop())
    assert len(versions["full"]) >= batches - RESTARTS
    assert sorted(seen) == sorted(number * 100_000 + key for number in range(batches) for key in range(KEYS))
    assert versions["full"] == sorted(versions["full"])
    assert versions["full"] == versions["partial"] == versions["none"]
    assert len(set(versions["full"])) > changes // 2
    assert all(len(digests) == 1 for digests in told.values())
    pairs = {(versions["full"][number], digest) for number, digests in told.items() for digest in digests}
    assert len(pairs) == len({version for version, _ in pairs}) == len({digest for _, digest in pairs})
    (last,) = told[max(told)]
    metrics = {row.name: row for row in load(spark, table, {"lookup.view": "metrics"}).collect()}
    assert metrics["tokenVersion"].detail == last
    known = {row.digest: row for row in load(spark, table, {"lookup.view": "versions"}).collect()}
    assert known[last].token_at is not None


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


def test_aggregates_with_a_watermark(spark: SparkSession, tmp_path: Path) -> None:
    """Update mode: a windowed count by a looked-up column, with a watermark and state; the version is not part of the state."""
    path = put(tmp_path / "dim.parquet", 7, range(5))
    for number in range(3):
        events(tmp_path / "events", number, range(10))
    timed = stream_of(spark, tmp_path / "events").selectExpr("id", "timestamp_seconds((batch + 1000) * 3600) AS at")
    joined = lookup_join(timed.withWatermark("at", "10 hours"), str(path), "id")
    with running(joined.groupBy("at", "version").count(), "counted", "update") as query:
        query.processAllAvailable()
    rows = spark.table("counted").groupBy("at", "version").agg({"count": "max"}).collect()
    assert sorted((tuple(row)[1:] for row in rows), key=repr) == [(7, 5)] * 3 + [(None, 5)] * 3


def test_a_kind_of_table_that_only_tests_know(spark: SparkSession, tmp_path: Path) -> None:
    """(Workers know it from `tests.preloaded`.) Its columns and partition column, its rows without deleted ones, the version that is asked for; and joined to a stream in each
    mode at once, the version that is current at a micro-batch's start."""
    table = tmp_path / "dim"
    commit(table, {("a.parquet", "eu"): people(0, 100, 0), ("b.parquet", "us"): people(100, 100, 0)}, {})
    (tmp_path / "events").mkdir()
    stream = stream_of(spark, tmp_path / "events")
    modes = {name.lower(): mode for name, mode in TOY_MODES.items() if "CACHE" not in name}
    for name, mode in modes.items():
        stream = lookup_join(stream, str(table), "id", columns=["region"], prefix=f"{name}_", options=mode)
    for number, there in ((1, {"eu": 100, "us": 100}), (2, {"eu": 100, "us": 98, None: 2})):
        events(tmp_path / "events", number)
        (found,) = batches_of(stream.select("batch", *(f"{name}_region" for name in modes)), tmp_path / "checkpoint")
        assert collections.Counter(found) == {(number, *[region] * 3): count for region, count in there.items()}
        if number == 1:
            commit(table, {("c.parquet", "eu"): people(200, 1, 1)}, {"b.parquet": [5, 6]})
    assert load(spark, table).columns == ["id", "name", "region"]
    assert load(spark, table).where("id BETWEEN 104 AND 107").count() == 2
    commit(table, {}, {"a.parquet": [2]})
    assert load(spark, table, {"lookup.version": "1"}).where("region = 'eu'").count() == 101
