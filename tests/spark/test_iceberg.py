"""Iceberg tables through Spark, of a catalog and by a version hint: read, joined, in SQL, at older snapshots, and joined to a stream while
they change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from pyspark_lookup import lookup_join
from tests.support.iceberg_tables import sql_catalog
from tests.support.iceberg_writing import IcebergTable
from tests.support.spark_iceberg import Dim
from tests.support.spark_lakes import (
    check_a_table_like_any_other,
    check_calls_of_a_batch,
    check_that_a_stream_follows,
)
from tests.support.spark_tables import catalog_options, load
from tests.support.sparks import DATA_SOURCES, needs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [needs(DATA_SOURCES), pytest.mark.spark]


@pytest.fixture(params=["catalog", pytest.param("hint", marks=pytest.mark.nightly)])
def dim(request: pytest.FixtureRequest, tmp_path: Path) -> Dim:
    return Dim(tmp_path, request.param)


def test_a_table_like_any_other(spark: SparkSession, dim: Dim, name: str) -> None:
    check_a_table_like_any_other(spark, dim, name)


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
    check_that_a_stream_follows(spark, dim, tmp_path)


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
    """A look at its hint, or a question to its catalog and none to its store."""
    check_calls_of_a_batch(spark, dim, 0 if dim.options else 1)
