"""`lookup.cache=FULL` behind Spark: scans and key predicates answer from the snapshot, in every shape of query."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup import LookupTable
from pyspark_lookup.base.metrics import COUNTERS
from tests.fakes import wait_until_settled
from tests.spark.test_source import Calls, load, put

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
FULL = {"lookup.keys": "id", "lookup.cache": "FULL"}
CACHE = {**FULL, "lookup.metadata.source": "CACHE", "lookup.full-cache.periodic-reload.interval": "1 h"}


@pytest.fixture
def dim(spark: SparkSession) -> Iterator[str]:
    """A catalog table's name, dropped afterwards."""
    yield "full_dim"
    spark.sql("DROP TABLE IF EXISTS full_dim")


def test_a_scan_answers_from_the_snapshot(spark: SparkSession, tmp_path: Path) -> None:
    """An unchanged table costs one HEAD and no data; a replaced file is seen by the next execution of the same DataFrame."""
    path = put(tmp_path / "dim.parquet", 1)
    df = load(spark, path, FULL)
    assert sorted(map(tuple, df.collect())) == [(n, 1) for n in range(10)]
    calls = Calls(path, {"lookup.keys": "id"})
    assert df.count() == 10
    counted = set(COUNTERS) - {"versionServedCount"}  # once more where another worker takes it
    moved = {name: value for name, value in calls.since().items() if value and name in counted}
    assert moved == {"ufsHeadCount": 1, "resolutionCount": 1, "rowsReadCount": 10, "resolvedBytes": path.stat().st_size}
    put(path, 2)
    assert {row.version for row in df.collect()} == {2}
    delta = calls.since()
    assert delta["loadCount"] == 1
    assert delta["snapshotReadThroughCount"] == 0


def test_a_key_predicate_is_a_probe(spark: SparkSession, tmp_path: Path) -> None:
    """lookup.where over the key reads the rows of that key from the snapshot, and nothing from the store."""
    path = put(tmp_path / "dim.parquet", 1, range(5000))
    load(spark, path, FULL).count()
    calls = Calls(path, {"lookup.keys": "id"})
    rows = load(spark, path, {**FULL, "lookup.where": "id IN (3, 4999, 77777)"}).collect()
    assert sorted(row.id for row in rows) == [3, 4999]
    delta = calls.since()
    assert (delta["ufsGetCount"], delta["rowsReadCount"], delta["rowGroupsReadCount"]) == (0, 2, 0)


def test_tasks_share_a_snapshot(spark: SparkSession, tmp_path: Path) -> None:
    """A scan of several tasks gives each row once, from the snapshot, as Spark's own reader does from the files."""
    path = tmp_path / "dim"
    path.mkdir()
    rng = np.random.default_rng(3)
    for number, rows in enumerate((90_000, 400_000, 30_000)):
        ids = rng.integers(0, 2**40, rows)
        table = pa.table({"id": ids, "v": ids * 7, "g": pa.array([f"g{n % 5}" for n in range(rows)])})
        pq.write_table(table, path / f"{number}.parquet", row_group_size=50_000)
        wait_until_settled(path / f"{number}.parquet")
    df = load(spark, path, {**FULL, "lookup.scan.split-size": "1 MiB"})
    assert df.rdd.getNumPartitions() > 3
    question = ("count(*)", "sum(id)", "sum(v)", "min(g)", "max(g)", "count(DISTINCT id)")
    ours = df.selectExpr(*question).collect()
    assert ours == spark.read.parquet(str(path)).selectExpr(*question).collect()
    assert df.union(df).selectExpr("sum(id)").collect()[0][0] == 2 * ours[0]["sum(id)"]
    delta = LookupTable(str(path), {"lookup.keys": "id"}).metrics()
    assert delta["resolvedBytes"] == 3 * sum(file.stat().st_size for file in path.iterdir())  # the union reads it twice
    assert delta["snapshotReadThroughCount"] == 0
    assert delta["loadCount"] == 1


def test_a_catalog_table_serves_what_was_loaded(spark: SparkSession, tmp_path: Path, dim: str) -> None:
    """CACHE mode from SQL: queries see the snapshot, without a store call, until a reload brings the next."""
    path = put(tmp_path / "dim.parquet", 1)
    options = ", ".join(f"'{key}' '{value}'" for key, value in {"path": path, **CACHE}.items())
    spark.sql(f"CREATE TABLE {dim} USING lookupcache OPTIONS ({options})")
    assert spark.sql(f"SELECT DISTINCT version FROM {dim}").collect() == [(1,)]
    put(path, 2)
    calls = Calls(path, {"lookup.keys": "id"})
    assert spark.sql(f"SELECT DISTINCT version FROM {dim} a JOIN {dim} b USING (id, version)").collect() == [(1,)]
    assert calls.calls() == (0, 0, 0)
    with LookupTable.for_name(spark, dim) as table:
        table.reload()
        assert table.get(3) == [{"id": 3, "version": 2}]
    assert spark.sql(f"SELECT DISTINCT version FROM {dim}").collect() == [(2,)]
    names = {
        row.name for row in spark.read.format("lookupcache").option("lookup.view", "metrics").load(str(path)).collect()
    }
    assert {"hitCount", "loadCount", "numCachedRecords", "latestLoadTime"} <= names
