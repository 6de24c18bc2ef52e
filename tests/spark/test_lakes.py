"""Delta and Iceberg tables through Spark: read, joined, in a catalog, in SQL functions, and joined to a stream while they change."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pyspark_lookup import LookupTable, lookup_join, register_lookup
from pyspark_lookup.spark.join import Strategy
from tests.support.spark_lakes import DeltaDim, IcebergDim, LakeTable
from tests.support.spark_tables import Calls, catalog_options, events, load, read_in_all_ways, running, stream_events
from tests.support.sparks import DATA_SOURCES, needs

pytestmark = [needs(DATA_SOURCES), pytest.mark.spark]


# Code for Spark does not depend on the kind of table (tests/test_house.py), so by day each of these tests takes one kind.
@pytest.mark.parametrize("make", [IcebergDim, pytest.param(DeltaDim, marks=pytest.mark.nightly)])
def test_a_table_like_any_other(spark: SparkSession, make: type[LakeTable], tmp_path: Path, name: str) -> None:
    """The table is read, described, joined and used in SQL. A new version is seen at once; an unchanged table costs two HEADs, or a request to its catalog."""
    dim = make(tmp_path)
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
    full = {**dim.options, "lookup.cache": "FULL"}
    tables: dict[Strategy, tuple[str, Mapping[str, str]]] = {"cache": (dim.path, full), "broadcast": (name, {})}
    for strategy, (table, options) in tables.items():
        joined = lookup_join(spark.range(13), table, "id", columns=["version"], strategy=strategy, options=options)
        calls = Calls(dim.path, dim.options)
        assert joined.selectExpr("sum(version)", "count(id)").collect() == [(2, 13)]
        if strategy == "cache":
            calls.calls()
            assert joined.select("*").count() == 13
            assert calls.calls() == (2 if isinstance(dim, DeltaDim) else 0, 0, 0)
    assert LookupTable.for_name(spark, name).scan().num_rows == 12
    register_lookup(spark, "lake_row", dim.path, "id", options=dim.options)
    assert spark.sql("SELECT lake_row(11).version, lake_row(12).version").collect() == [(1, None)]


@pytest.mark.parametrize("make", [DeltaDim, pytest.param(IcebergDim, marks=pytest.mark.nightly)])
def test_a_stream_follows_it(spark: SparkSession, make: type[LakeTable], tmp_path: Path) -> None:
    """A commit is seen in the next micro-batch, in every mode; the progress says which version that is."""
    dim = make(tmp_path)
    versions = [dim.append(range(0, 200, 2), 0)]
    changes = (
        lambda: dim.append(range(1, 200, 2), 1),
        lambda: dim.delete("id < 100"),
        lambda: dim.append(range(300, 310), 3),  # of keys that nobody looks up
    )
    events(tmp_path / "events", 0)
    joined = read_in_all_ways(stream_events(spark, tmp_path / "events"), dim.path, "version", dim.options)
    reported: list[set[int]] = []
    with running(joined, "follows_a_lake") as query:
        for number in range(4):
            if number:
                versions.append(changes[number - 1]())
                events(tmp_path / "events", number)
            query.processAllAvailable()
            reported.append({row["version"] for row in query.lastProgress["observedMetrics"].values()})
    ways = "full_version, partial_version, none_version, broadcast_version, scan_version"
    rows = spark.sql(f"SELECT batch, {ways}, count(*) FROM follows_a_lake GROUP BY ALL").collect()
    assert all(len({*row[1:6]}) == 1 for row in rows)
    assert {(row[0], row[1]): row[6] for row in rows} == {
        **{(0, version): 100 for version in (0, None)},
        **{(1, version): 100 for version in (0, 1)},
        **{(batch, version): count for batch in (2, 3) for version, count in ((0, 50), (1, 50), (None, 100))},
    }
    assert reported == [{version} for version in versions]


def test_writes_are_refused(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """Writes and streams of changes are refused by name, and the table's directory stays as it was."""
    dim = IcebergDim(tmp_path)
    dim.append(range(10), 0)
    spark.sql(f"CREATE TABLE {name} {catalog_options(dim.path, dim.options)}")
    home = Path(dim.table.location().removeprefix("file://"))
    files = {*home.rglob("*")}
    refused = "is an Iceberg table: lookupcache can read it, but writes only managed tables"
    with pytest.raises(Exception, match=refused):
        spark.sql(f"INSERT INTO {name} VALUES (1, 1, 'p 1')")
    rows = load(spark, dim.path, dim.options)
    with pytest.raises(Exception, match=refused):
        rows.write.save(dim.path, "lookupcache", "append", **dim.options)
    changes = spark.readStream.format("lookupcache").options(**dim.options, **{"lookup.view": "changes"})
    with pytest.raises(Exception, match="a managed table"):
        changes.load(dim.path).writeStream.format("noop").start().processAllAvailable()
    assert {*home.rglob("*")} == files
