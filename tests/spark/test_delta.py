"""Delta tables through Spark: read, joined, in a catalog, in SQL functions, and joined to a stream while they change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from pyspark_lookup import lookup_join, register_lookup
from tests.support.spark_tables import Calls, catalog_options, events, load, read_in_all_ways, running, stream_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def write(path: Path, ids: range, version: int, mode: str = "append") -> None:
    rows = pa.table({"id": [*ids], "version": [version] * len(ids), "part": [f"p {key % 2}" for key in ids]})
    write_deltalake(str(path), rows, mode=mode, partition_by=["part"])


def test_a_table_like_any_other(spark: SparkSession, tmp_path: Path, name: str) -> None:
    path = tmp_path / "dim"
    write(path, range(10), 0)
    df = load(spark, path)
    assert df.columns == ["id", "version", "part"]
    assert df.filter("part = 'p 1' AND id > 5").count() == 2
    spark.sql(f"CREATE TABLE {name} {catalog_options(path)}")
    write(path, range(10, 12), 1)
    assert spark.sql(f"SELECT count(*), max(version) FROM {name}").collect() == [(12, 1)]
    assert load(spark, path, {"lookup.version": "0"}).count() == 10
    versions = load(spark, path, {"lookup.view": "versions"}).collect()
    assert [row.version for row in versions if row.version is not None][:2] == [0, 1]
    for strategy in ("cache", "broadcast"):
        joined = lookup_join(spark.range(13), name, "id", columns=["version"], strategy=strategy)
        assert joined.selectExpr("sum(version)", "count(id)").collect() == [(2, 13)]
    register_lookup(spark, "dim_of", str(path), "id")
    assert spark.sql("SELECT dim_of(11).version, dim_of(12).version").collect() == [(1, None)]


def test_a_stream_follows_it(spark: SparkSession, tmp_path: Path) -> None:
    """A commit is seen in the next micro-batch, in every mode, for one call where nothing is new; the progress says which version."""
    path = tmp_path / "dim"
    write(path, range(0, 200, 2), 0)
    (tmp_path / "events").mkdir()
    joined = read_in_all_ways(stream_of(spark, tmp_path / "events"), path, "version")
    told: list[set[int]] = []
    with running(joined, "follows_delta") as query:
        for number in range(4):
            if number == 1:
                write(path, range(1, 200, 2), 1)
            elif number == 2:
                DeltaTable(str(path)).delete("id < 100")
            elif number == 3:
                write(path, range(300, 310), 3)  # of keys that nobody looks up
                DeltaTable(str(path)).optimize.compact()
            events(tmp_path / "events", number)
            query.processAllAvailable()
            told.append({row["version"] for row in query.lastProgress["observedMetrics"].values()})
    rows = spark.sql(
        "SELECT batch, full_version a, partial_version b, none_version c, broadcast_version d, scan_version e, count(*) n FROM follows_delta GROUP BY ALL"
    ).collect()
    found = sorted((tuple(row) for row in rows), key=repr)
    assert all(len({*row[1:6]}) == 1 for row in found)
    counts = {(row[0], row[1]): row[6] for row in found}
    assert counts == {
        (0, 0): 100,
        (0, None): 100,
        (1, 0): 100,
        (1, 1): 100,
        **{(batch, version): 50 for batch in (2, 3) for version in (0, 1)},
        **{(batch, None): 100 for batch in (2, 3)},
    }
    assert told == [{0}, {1}, {2}, {4}]


def test_calls_of_a_batch(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "dim"
    write(path, range(10), 0)
    joined = lookup_join(spark.range(10), str(path), "id", strategy="cache", options={"lookup.cache": "FULL"})
    joined.collect()
    calls = Calls(path)
    assert joined.select("*").count() == 10
    assert calls.calls() == (2, 0, 0)
