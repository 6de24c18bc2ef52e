"""Iceberg tables through Spark, of a catalog and by a version hint: read, joined, in SQL, at older snapshots, and joined to a stream while
they change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from pyspark_lookup import LookupTable, lookup_join, register_lookup
from tests.support.iceberg_tables import sql_catalog
from tests.support.iceberg_writing import IcebergTable
from tests.support.spark_iceberg import Dim
from tests.support.spark_tables import Calls, catalog_options, events, load, read_in_all_ways, running, stream_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture(params=["catalog", pytest.param("hint", marks=pytest.mark.nightly)])
def dim(request: pytest.FixtureRequest, tmp_path: Path) -> Dim:
    return Dim(tmp_path, request.param)


def test_a_table_like_any_other(spark: SparkSession, dim: Dim, name: str) -> None:
    """Read, filtered, described, joined and in SQL, under the name it has in its catalog or in Spark's; a new snapshot is seen at once."""
    first = dim.append(range(10), 0)
    df = load(spark, dim.path, dim.options)
    assert df.columns == ["id", "version", "part"]
    assert df.filter("part = 'p 1' AND id > 5").count() == 2
    spark.sql(f"CREATE TABLE {name} {catalog_options(dim.path, dim.options)}")
    dim.append(range(10, 12), 1)
    assert spark.sql(f"SELECT count(*), max(version) FROM {name}").collect() == [(12, 1)]
    described = spark.sql(f"DESCRIBE {name}").collect()
    assert [row[:2] for row in described[:3]] == [("id", "bigint"), ("version", "bigint"), ("part", "string")]
    assert load(spark, dim.path, {**dim.options, "lookup.version": first}).count() == 10
    for table, options in ((dim.path, dim.options), (name, {})):
        for strategy in ("cache", "broadcast"):
            joined = lookup_join(spark.range(13), table, "id", columns=["version"], strategy=strategy, options=options)
            assert joined.selectExpr("sum(version)", "count(id)").collect() == [(2, 13)]
    assert LookupTable.for_name(spark, name).scan().num_rows == 12
    register_lookup(spark, "iceberg_dim_of", dim.path, "id", options=dim.options)
    assert spark.sql("SELECT iceberg_dim_of(11).version, iceberg_dim_of(12).version").collect() == [(1, None)]


def test_snapshots_branches_and_tags(spark: SparkSession, dim: Dim) -> None:
    """Each is read and joined as what it was or is; the views tell of them."""
    first = dim.append(range(10), 0)
    dim.table.manage_snapshots().create_tag(first, "first").create_branch(first, "audit").commit()
    last = dim.append(range(10, 14), 1)
    dim.table.append(pa.table({"id": [99], "version": [9], "part": ["p 1"]}), branch="audit")
    audit = dim.table.refs()["audit"].snapshot_id
    dim.publish()
    pins = {"lookup.version": first, "lookup.tag": "first", "lookup.branch": "audit"}
    for key, value in pins.items():
        options = {**dim.options, key: value}
        rows = 11 if key == "lookup.branch" else 10
        assert load(spark, dim.path, options).count() == rows
        joined = lookup_join(spark.range(100), dim.path, "id", "inner", options={**options, "lookup.cache": "FULL"})
        assert joined.count() == rows
    versions = load(spark, dim.path, {**dim.options, "lookup.view": "versions"}).collect()
    assert [(row.version, row.rows_added) for row in versions] == [(first, 10), (last, 4), (audit, 1)]
    files = load(spark, dim.path, {**dim.options, "lookup.view": "files"})
    assert files.selectExpr("count(*)").collect() == [(4,)]
    tagged = load(spark, dim.path, {**dim.options, "lookup.view": "files", "lookup.tag": "first"})
    assert tagged.count() == 2
    (summary,) = load(spark, dim.path, {**dim.options, "lookup.view": "summary"}).collect()
    assert (summary.files, summary.rows) == (4, 14)
    refused = {
        "lookup.branch": "it has audit, main",
        "lookup.tag": "it has first",
        "lookup.version": "has no snapshot 7",
    }
    for key, message in refused.items():
        with pytest.raises(Exception, match=message):
            load(spark, dim.path, {**dim.options, key: "7"}).collect()


def test_writes_are_refused(spark: SparkSession, dim: Dim, name: str) -> None:
    """Also streams of changes: by name, and the table's directory stays as it was."""
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


def test_tables_that_are_not_there(spark: SparkSession, tmp_path: Path) -> None:
    """Each is told as soon as it is named, and what to do (more: `tests/sources/iceberg/test_cli.py`)."""
    _, properties = sql_catalog(tmp_path)
    catalog = {"lookup.catalog": "tests", **{f"lookup.catalog.{key}": text for key, text in properties.items()}}
    for options, message in (
        (catalog, r"the Iceberg catalog 'tests' has no table ns\.gone"),
        (
            {**catalog, "lookup.catalog.uri": f"sqlite:///{tmp_path}/no.db"},
            "the Iceberg catalog 'tests' gave no answer",
        ),
        ({"lookup.catalog": "nowhere"}, "lookup.catalog = 'nowhere'.*Configure it"),
    ):
        with pytest.raises(Exception, match=message):
            load(spark, "ns.gone", options)


def test_a_stream_follows_it(spark: SparkSession, dim: Dim, tmp_path: Path) -> None:
    """A commit is seen in the next micro-batch, in every mode; the progress says which snapshot that is."""
    snapshots = [dim.append(range(0, 200, 2), 0)]
    (tmp_path / "events").mkdir()
    joined = read_in_all_ways(stream_of(spark, tmp_path / "events"), dim.path, "version", dim.options)
    told: list[set[int]] = []
    with running(joined, "follows_iceberg") as query:
        for number in range(4):
            if number == 1:
                snapshots.append(dim.append(range(1, 200, 2), 1))
            elif number == 2:
                snapshots.append(dim.delete("id < 100"))
            elif number == 3:
                snapshots.append(dim.append(range(300, 310), 3))  # of keys that nobody looks up
            events(tmp_path / "events", number)
            query.processAllAvailable()
            progress = query.lastProgress
            assert progress is not None
            told.append({row["version"] for row in progress["observedMetrics"].values()})
    rows = spark.sql(
        "SELECT batch, full_version a, partial_version b, none_version c, broadcast_version d, scan_version e, count(*) n FROM follows_iceberg GROUP BY ALL"
    ).collect()
    found = sorted((tuple(row) for row in rows), key=repr)
    assert all(len({*row[1:6]}) == 1 for row in found)
    counts = {(row[0], row[1]): row[6] for row in found}
    assert counts == {
        (0, 0): 100,
        (0, None): 100,
        (1, 0): 100,
        (1, 1): 100,
        (2, 0): 50,
        (2, 1): 50,
        (2, None): 100,
        (3, 0): 50,
        (3, 1): 50,
        (3, None): 100,
    }
    assert told == [{snapshot} for snapshot in snapshots]


def test_rows_that_equality_deletes_remove(spark: SparkSession, tmp_path: Path) -> None:
    """What PyIceberg neither writes nor reads, by a metadata file too: deletes by value, then a deletion vector."""
    table = IcebergTable.create(tmp_path / "dim", {"id": "long", "version": "long"}, version=3)
    table.commit(table.data([{"id": key, "version": 0} for key in range(10)]))
    joined = lookup_join(spark.range(10), str(table.home), "id", "inner", options={"lookup.cache": "FULL"})
    assert joined.count() == 10
    table.commit([table.equality([{"id": 3}, {"id": 4}], ["id"])])
    assert joined.select("*").count() == 8
    (entry,) = [entry for entry in table.live() if not entry.file["content"]]
    table.commit(table.vectors([(entry.file, [0, 3])]))
    assert sorted(row.id for row in load(spark, table.home).collect()) == [1, 2, 5, 6, 7, 8, 9]
    assert joined.select("*").count() == load(spark, table.metadata).count() == 7


def test_calls_of_a_batch(spark: SparkSession, dim: Dim) -> None:
    """An unchanged table costs a look at its hint, or a question to its catalog and none to its store."""
    dim.append(range(10), 0)
    options = {**dim.options, "lookup.cache": "FULL"}
    joined = lookup_join(spark.range(10), dim.path, "id", strategy="cache", options=options)
    joined.collect()
    calls = Calls(dim.path, dim.options)
    assert joined.select("*").count() == 10
    assert calls.calls() == (0 if dim.options else 1, 0, 0)
