"""`lookup.cache=PARTIAL` behind Spark: reads that say which keys they want answer from the host's cache, others leave it alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup import LookupTable
from tests.fakes import wait_until_settled
from tests.spark.test_source import Calls, load, put

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
PARTIAL = {"lookup.keys": "id", "lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "1000"}
KEYS = {"lookup.keys": "id"}


@pytest.fixture
def dim(spark: SparkSession) -> Iterator[str]:
    """A catalog table's name, dropped afterwards."""
    yield "partial_dim"
    spark.sql("DROP TABLE IF EXISTS partial_dim")


def test_keys_are_loaded_once(spark: SparkSession, tmp_path: Path) -> None:
    """Keys named in lookup.where are loaded once, absent ones too; then they cost a HEAD, in other workers and DataFrames as well."""
    path = put(tmp_path / "dim.parquet", 1, range(5000))
    df = load(spark, path, {**PARTIAL, "lookup.where": "id IN (3, 4999, 77777)"})
    assert sorted(row.id for row in df.collect()) == [3, 4999]
    calls = Calls(path, KEYS)
    assert sorted(row.id for row in df.collect()) == [3, 4999]
    df.limit(1).collect()  # ends its worker
    again = load(spark, path, {**PARTIAL, "lookup.where": "id IN (4999, 3) AND version = 1"})
    assert again.select("version").collect() == [(1,), (1,)]
    delta = calls.since()
    assert (delta["ufsGetCount"], delta["rowGroupsReadCount"], delta["missCount"]) == (0, 0, 0)
    assert delta["hitCount"] == 3 + 3 + 2
    with LookupTable(path, PARTIAL) as table:  # the same cache without Spark
        assert table.get(77777) == []
    assert calls.since()["missCount"] == 0


def test_a_new_version_is_seen(spark: SparkSession, tmp_path: Path) -> None:
    """The next execution of the same DataFrame sees a replaced file, and loads only keys that it can hold."""
    path = tmp_path / "dim"
    put(path / "0.parquet", 1, range(100))
    put(path / "1.parquet", 1, range(100, 200))
    df = load(spark, path, {**PARTIAL, "lookup.where": "id IN (5, 105)"})
    assert sorted(map(tuple, df.collect())) == [(5, 1), (105, 1)]
    put(path / "1.parquet", 2, range(100, 200))
    calls = Calls(str(path), KEYS)
    assert sorted(map(tuple, df.collect())) == [(5, 1), (105, 2)]
    delta = calls.since()
    assert (delta["missCount"], delta["hitCount"], delta["sharedCarriedOverCount"]) == (1, 1, 1)


def test_other_scans_leave_the_cache_alone(spark: SparkSession, tmp_path: Path) -> None:
    """A scan without keys gives what the files hold and neither reads nor fills the cache, however many tasks it has."""
    path = tmp_path / "dim"
    path.mkdir()
    for number in range(3):
        ids = range(number * 100_000, (number + 1) * 100_000)
        pq.write_table(
            pa.table({"id": ids, "v": [n * 7 for n in ids]}), path / f"{number}.parquet", row_group_size=20_000
        )
        wait_until_settled(path / f"{number}.parquet")
    options = {**PARTIAL, "lookup.scan.split-size": "1 MiB"}
    df = load(spark, path, options)
    assert df.rdd.getNumPartitions() > 1
    total = df.selectExpr("count(*)", "sum(v)").collect()
    assert total == [(300_000, 7 * 299_999 * 300_000 // 2)]
    assert load(spark, path, {**options, "lookup.where": "v > 100"}).count() == 299_985
    metrics = LookupTable(str(path), KEYS).metrics()
    assert metrics["hitCount"] == metrics["missCount"] == metrics["loadCount"] == 0
    # A large table, and still one task for a few keys.
    keyed = load(spark, path, {**options, "lookup.where": "id IN (1, 250000)"})
    assert keyed.rdd.getNumPartitions() == 1
    assert sorted(map(tuple, keyed.collect())) == [(1, 7), (250_000, 1_750_000)]


def test_a_catalog_table(spark: SparkSession, tmp_path: Path, dim: str) -> None:
    """A table of the catalog keeps its options; a view over its keys and a join answer through the cache."""
    path = put(tmp_path / "dim.parquet", 1)
    options = {"path": path, **PARTIAL, "lookup.where": "id IN (1, 2, 3)"}
    given = ", ".join(f"'{key}' '{value}'" for key, value in options.items())
    spark.sql(f"CREATE TABLE {dim} USING lookupcache OPTIONS ({given})")
    assert spark.sql(f"SELECT count(*) FROM {dim} a JOIN {dim} b USING (id)").collect() == [(3,)]
    with LookupTable.for_name(spark, dim) as table:
        assert table.get(2) == [{"id": 2, "version": 1}]
        assert table.get(9) == []  # lookup.where holds for lookups, too
        metrics = table.metrics()
    assert metrics["missCount"] == metrics["loadCount"] == 4
    shown = {row.name: row.value for row in load(spark, path, {"lookup.view": "metrics"}).collect()}
    assert shown["loadCount"] == 4


def test_pushed_filters_over_keys(spark: SparkSession, tmp_path: Path) -> None:
    """Where pushed filters are allowed, one over the keys is a lookup."""
    path = put(tmp_path / "dim.parquet", 1, range(5000))
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        calls = Calls(path, KEYS)
        for _ in range(2):
            df = load(spark, path, {**PARTIAL, "lookup.filter-pushdown": "true"})
            assert [tuple(row) for row in df.filter("id = 7 AND version > 0").collect()] == [(7, 1)]
        delta = calls.since()
        assert (delta["missCount"], delta["hitCount"]) == (1, 1)
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lookup.partial-cache.max-rows": "5"}, "should be 'PARTIAL'"),
        ({"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "5"}, "needs lookup.keys"),
        ({**PARTIAL, "lookup.keys": "nope"}, "the table has no column 'nope'"),
        ({**PARTIAL, "lookup.partial-cache.max-rows": "-1"}, "expected a whole number"),
        ({"lookup.provider": "no.such:provider", "lookup.keys": "id"}, "No module named 'no'"),
    ],
)
def test_mistakes_are_told_when_the_read_is_planned(
    spark: SparkSession, tmp_path: Path, options: dict[str, str], message: str
) -> None:
    """Options of the partial cache that contradict each other fail at load(), by name."""
    path = put(tmp_path / "dim.parquet", 1)
    with pytest.raises(Exception, match=message):
        load(spark, path, options)
