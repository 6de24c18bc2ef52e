"""`lookup.cache=PARTIAL` behind Spark: reads that say which keys they want answer from the host's cache, others leave it alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pyspark_lookup import LookupTable
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
