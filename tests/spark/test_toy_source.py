"""A kind of table that only tests know, read and joined by Spark (its workers know it from `tests.preloaded`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pyspark_lookup import lookup_join
from tests.spark.test_join_streams import events, stream_of
from tests.spark.test_source import load
from tests.test_toy_source import MODES, people
from tests.toy_source import commit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
TABLES = {("a.parquet", "eu"): people(0, 100, 0), ("b.parquet", "us"): people(100, 100, 0)}


def test_a_read(spark: SparkSession, tmp_path: Path) -> None:
    """Its columns and partition column, its rows without deleted ones, and the version that is asked for."""
    table = tmp_path / "dim"
    commit(table, TABLES, {})
    commit(table, {}, {"a.parquet": [1]})
    assert load(spark, table).columns == ["id", "name", "region"]
    assert load(spark, table).where("id < 3").count() == 2
    commit(table, {}, {"a.parquet": [2]})
    assert load(spark, table, {"lookup.version": "1"}).where("region = 'eu'").count() == 99


@pytest.mark.parametrize("mode", [name for name in MODES if "CACHE" not in name])
def test_a_stream_is_joined(spark: SparkSession, tmp_path: Path, mode: str) -> None:
    """Each micro-batch is joined to the version that is current at its start."""
    table, source, found = tmp_path / "dim", tmp_path / "events", tmp_path / "found"
    commit(table, TABLES, {})
    source.mkdir()
    joined = lookup_join(
        stream_of(spark, source), str(table), on="id", how="inner", options={**MODES[mode], "lookup.keys": "id"}
    )
    for number in (1, 2):
        events(source, number)
        writer = joined.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start(str(found)).awaitTermination()
        commit(table, {("c.parquet", "eu"): people(200, 1, 1)} if number == 1 else {}, {"b.parquet": [5, 6]})
    rows = spark.read.parquet(str(found)).groupBy("batch", "region").count().collect()
    assert sorted(tuple(row) for row in rows) == [(1, "eu", 100), (1, "us", 100), (2, "eu", 100), (2, "us", 98)]
