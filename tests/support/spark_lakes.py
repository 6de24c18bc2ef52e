"""A table of Delta or Iceberg through Spark: what holds for both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from pyspark_lookup import LookupTable, lookup_join, register_lookup
from pyspark_lookup.spark.join import Strategy
from tests.support.spark_tables import Calls, catalog_options, events, load, read_in_all_ways, running, stream_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class LakeTable(Protocol):
    """A table of rows (id, version, part), in which its writer says which version it has made."""

    path: str
    options: Mapping[str, str]

    def append(self, ids: range, version: int) -> int: ...

    def delete(self, where: str) -> int: ...


def rows_of(ids: range, version: int) -> pa.Table:
    return pa.table({"id": [*ids], "version": [version] * len(ids), "part": [f"p {key % 2}" for key in ids]})


def check_a_table_like_any_other(spark: SparkSession, dim: LakeTable, name: str) -> None:
    """Read, filtered, described, joined and in SQL, under its own name or Spark's; a new version is seen at once."""
    first = dim.append(range(10), 0)
    df = load(spark, dim.path, dim.options)
    assert df.filter("part = 'p 1' AND id > 5").count() == 2
    spark.sql(f"CREATE TABLE {name} {catalog_options(dim.path, dim.options)}")
    last = dim.append(range(10, 12), 1)
    assert spark.sql(f"SELECT count(*), max(version) FROM {name}").collect() == [(12, 1)]
    described = spark.sql(f"DESCRIBE {name}").collect()
    assert [row[:2] for row in described[:3]] == [("id", "bigint"), ("version", "bigint"), ("part", "string")]
    assert load(spark, dim.path, {**dim.options, "lookup.version": first}).count() == 10
    versions = load(spark, dim.path, {**dim.options, "lookup.view": "versions"}).collect()
    assert [row.version for row in versions if row.version is not None][:2] == [first, last]
    tables: dict[Strategy, tuple[str, Mapping[str, str]]] = {"cache": (dim.path, dim.options), "broadcast": (name, {})}
    for strategy, (table, options) in tables.items():
        joined = lookup_join(spark.range(13), table, "id", columns=["version"], strategy=strategy, options=options)
        assert joined.selectExpr("sum(version)", "count(id)").collect() == [(2, 13)]
    assert LookupTable.for_name(spark, name).scan().num_rows == 12
    register_lookup(spark, "lake_row", dim.path, "id", options=dim.options)
    assert spark.sql("SELECT lake_row(11).version, lake_row(12).version").collect() == [(1, None)]


def check_that_a_stream_follows(spark: SparkSession, dim: LakeTable, home: Path) -> None:
    """A commit is seen in the next micro-batch, in every mode; the progress says which version that is."""
    versions = [dim.append(range(0, 200, 2), 0)]
    changes = (
        lambda: dim.append(range(1, 200, 2), 1),
        lambda: dim.delete("id < 100"),
        lambda: dim.append(range(300, 310), 3),  # of keys that nobody looks up
    )
    events(home / "events", 0)
    joined = read_in_all_ways(stream_of(spark, home / "events"), dim.path, "version", dim.options)
    reported: list[set[int]] = []
    with running(joined, "follows_a_lake") as query:
        for number in range(4):
            if number:
                versions.append(changes[number - 1]())
                events(home / "events", number)
            query.processAllAvailable()
            progress = query.lastProgress
            assert progress is not None
            reported.append({row["version"] for row in progress["observedMetrics"].values()})
    ways = "full_version, partial_version, none_version, broadcast_version, scan_version"
    rows = spark.sql(f"SELECT batch, {ways}, count(*) FROM follows_a_lake GROUP BY ALL").collect()
    assert all(len({*row[1:6]}) == 1 for row in rows)
    assert {(row[0], row[1]): row[6] for row in rows} == {
        **{(0, version): 100 for version in (0, None)},
        **{(1, version): 100 for version in (0, 1)},
        **{(batch, version): count for batch in (2, 3) for version, count in ((0, 50), (1, 50), (None, 100))},
    }
    assert reported == [{version} for version in versions]


def check_calls_of_a_batch(spark: SparkSession, dim: LakeTable, heads: int) -> None:
    """An unchanged table costs a join so many HEADs, and nothing else of its store."""
    dim.append(range(10), 0)
    options = {**dim.options, "lookup.cache": "FULL"}
    joined = lookup_join(spark.range(10), dim.path, "id", strategy="cache", options=options)
    joined.collect()
    calls = Calls(dim.path, dim.options)
    assert joined.select("*").count() == 10
    assert calls.calls() == (heads, 0, 0)
