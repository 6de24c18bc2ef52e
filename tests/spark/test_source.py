"""The Spark format: what each shape of query sees, and what it costs at the store."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException

from pyspark_lookup import LookupTable, configure
from pyspark_lookup.spark.session import RECOMMENDED
from tests.spark.common import Calls, catalog_options, conf, load, put, saved

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.s3server import Request, S3Server

pytestmark = pytest.mark.spark
_keys = itertools.count()


def versions(df: DataFrame) -> set[int]:
    return {row.version for row in df.collect()}


# --- calls and freshness --------------------------------------------------------------------------


def test_plans_of_a_file(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """Planning costs 1 call, an execution 1 head and no get while the file is unchanged; plans, views and catalog tables that are
    executed again see what has replaced it."""
    path = put(tmp_path / "dim.parquet", 1)
    calls = Calls(path)
    df = load(spark, path)
    assert calls.calls()[:2] == (1, 0)
    assert versions(df) == {1}
    assert calls.calls() == (1, 0, 0)
    assert df.filter("id = 1").count() == 1
    assert calls.calls() == (1, 0, 0)
    spark.sql(f"CREATE TABLE {name} {catalog_options(path)}")
    assert calls.calls() == (1, 0, 0)
    spark.sql(f"SELECT * FROM {name}").collect()
    assert calls.calls() == (2, 0, 0)  # planned once, executed once
    df.createOrReplaceTempView("view_of_df")
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW view_of_sql {catalog_options(path)}")
    for version in (2, 3):
        put(path, version)
        calls.calls()
        assert versions(df) == {version}
        heads, lists, gets = calls.calls()
        assert (heads, lists, gets > 0) == (1, 0, True)
        for table in ("view_of_df", "view_of_sql", name):
            assert versions(spark.sql(f"SELECT version FROM {table}")) == {version}


def test_calls_of_a_directory(spark: SparkSession, tmp_path: Path) -> None:
    """Unchanged: 1 list; with one of its files replaced: data calls for that one only. Its files and versions are views."""
    for number in range(10):
        put(tmp_path / "dim" / f"{number}.parquet", 1, range(number * 10, number * 10 + 10))
    df = load(spark, tmp_path / "dim")
    assert df.count() == 100
    calls = Calls(tmp_path / "dim")
    assert df.count() == 100
    assert calls.calls() == (0, 1, 0)
    new = put(tmp_path / "dim" / "4.parquet", 2, range(40, 50))
    assert df.filter("version = 2").count() == 10
    delta = calls.since()
    assert [delta[f"{kind}Count"] for kind in ("ufsHead", "ufsList", "fileResynced", "fileCached")] == [0, 1, 1, 9]
    assert 0 < delta["ufsGetBytes"] <= new.stat().st_size
    (tmp_path / "dim" / "0.parquet").unlink()
    views = {view: load(spark, tmp_path / "dim", {"lookup.view": view}) for view in ("files", "versions", "metrics")}
    found = [row.url for row in views["files"].orderBy("url").collect()]
    assert found == [f"file://{tmp_path}/dim/{number}.parquet" for number in range(1, 10)]
    assert [row.files for row in views["versions"].orderBy("resolved_at").collect()] == [10, 10, 9]
    metrics = {row.name: row.value for row in views["metrics"].collect()}
    assert metrics["ufsListCount"] >= 4
    assert metrics["rowsReadCount"] == 300


def test_cache_mode_within_its_interval_makes_no_call(spark: SparkSession, tmp_path: Path) -> None:
    """CACHE mode: 0 calls of any kind, planning included, and the version of when it was learned."""
    path = put(tmp_path / "dim.parquet", 1)
    options = {"lookup.metadata.source": "CACHE", "lookup.metadata.sync-interval": "1 h"}
    load(spark, path, options).collect()
    calls = Calls(path)
    put(path, 2)
    df = load(spark, path, options)
    assert versions(df) == versions(df) == {1}
    assert calls.calls() == (0, 0, 0)
    assert versions(load(spark, path)) == {2}


@pytest.fixture
def s3_table(s3: S3Server) -> str:
    """A place on S3 where nothing is."""
    s3.client.create_bucket(Bucket="bucket")
    return f"s3a://bucket/dim-{next(_keys)}.parquet"


def change_after_head(s3: S3Server, table: str, path: Path) -> None:
    """From here on: what follows the first HEAD finds another file there."""

    def change(request: Request) -> None:
        if request.kind == "head":
            s3.after = None
            s3.client.upload_file(str(path), "bucket", table.rsplit("/", 1)[-1])

    s3.log.clear()
    s3.after = change


@pytest.mark.parametrize("shape", ["union", "self join", "view twice", "retried task"])
def test_one_version_per_execution(
    spark: SparkSession, s3: S3Server, s3_table: str, tmp_path: Path, shape: str
) -> None:
    """Parts of one execution agree on its version and resolve once, though the table changes right after."""
    s3.client.upload_file(str(put(tmp_path / "1.parquet", 1)), "bucket", s3_table.rsplit("/", 1)[-1])
    df = load(spark, s3_table, {"lookup.storage.endpoint_url": s3.endpoint})
    if shape == "union":
        query = df.union(df).select("version")
    elif shape == "self join":
        query = df.alias("a").join(df.alias("b"), "id").selectExpr("a.version", "b.version AS other")
        query = query.selectExpr("stack(2, version, other) AS version")
    elif shape == "view twice":
        df.createOrReplaceTempView("twice")
        query = spark.sql("SELECT version FROM twice WHERE id > 4 UNION ALL SELECT version FROM twice WHERE id <= 4")
    else:
        marker = tmp_path / "failed-once"

        def fail_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from batches
            if not marker.exists():
                marker.touch()
                raise RuntimeError("first attempt")

        query = df.select("version").mapInArrow(fail_once, "version long")
    df.collect()  # version 1 is on this host
    change_after_head(s3, s3_table, put(tmp_path / "2.parquet", 2))
    assert versions(query) == {1}
    assert (s3.count()["head"], s3.count()["get"]) == (1, 0)
    assert versions(query.select("version")) == {2}


def test_all_tasks_of_a_query_are_on_one_version(
    spark: SparkSession, s3: S3Server, s3_table: str, tmp_path: Path
) -> None:
    """`lookup.version-at=READ`: many tasks resolve once between them, though the table changes right after."""

    def large(version: int) -> Path:
        noise = pa.array([os.urandom(64) for _ in range(80_000)])
        rows = {"id": range(80_000), "version": [version] * 80_000, "noise": noise}
        return saved(tmp_path / f"{version}.parquet", rows, group=5_000)

    s3.client.upload_file(str(large(1)), "bucket", s3_table.rsplit("/", 1)[-1])
    options = {"lookup.storage.endpoint_url": s3.endpoint, "lookup.scan.split-size": "1 MiB"}
    df = load(spark, s3_table, {**options, "lookup.version-at": "READ"})
    assert df.rdd.getNumPartitions() >= 4
    assert df.selectExpr("max(version)", "count(id)").collect() == [(1, 80_000)]
    change_after_head(s3, s3_table, large(2))
    assert df.groupBy("version").count().collect() == [(1, 80_000)]
    assert (s3.count()["head"], s3.count()["list"], s3.count()["get"]) == (1, 0, 0)
    assert df.groupBy("version").count().collect() == [(2, 80_000)]


@pytest.mark.parametrize("enabled", ["false", "true"])
def test_shapes_that_leak_pushed_filters_are_right(
    spark: SparkSession, tmp_path: Path, name: str, enabled: str
) -> None:
    """With Spark's pushdown on or off, no filter of one scan prunes another scan of the same relation."""
    path = put(tmp_path / "dim.parquet", 1, group=2)
    with conf(spark, "spark.sql.python.filterPushdown.enabled", enabled):
        df = load(spark, path)
        assert df.filter("id = 1").count() == 1
        assert df.count() == 10
        assert df.filter("id = 1").union(df).count() == 11
        assert sorted(r.id for r in df.filter("id = 1").union(df.filter("id = 2")).collect()) == [1, 2]
        df.createOrReplaceTempView("leaky")
        joined = "SELECT b.id FROM leaky a JOIN leaky b ON a.version = b.version WHERE a.id = 3"
        assert spark.sql(joined).count() == 10
        spark.sql(f"CREATE TABLE {name} {catalog_options(path)}")
        for table in ("leaky", name):
            assert spark.sql(f"SELECT id FROM {table} WHERE id = 3 UNION ALL SELECT id FROM {table}").count() == 11
        # With Spark's switch off the option does no harm.
        assert load(spark, path, {"lookup.filter-pushdown": "true"}).filter("id = 1").count() == 1
    calls = Calls(path)
    some = load(spark, path, {"lookup.where": "id >= 4 AND id < 8"})
    assert some.filter("id > 5").union(df).count() == 12
    assert calls.since()["rowGroupsPrunedCount"] == 3


# --- catalog, options and schemas -----------------------------------------------------------------


def test_catalog_table_life(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """CREATE … OPTIONS, SELECT, spark.table, read-time options, and DROP that leaves the files alone."""
    directory = tmp_path / "with space" / "dim"
    for day in (1, 2):
        put(directory / f"day={day}" / "part.parquet", day)
    options = catalog_options(directory, {"lookup.keys": "id", "lookup.where": "id < 5"})
    spark.sql(f"CREATE TABLE {name} {options}")
    assert spark.table(name).columns == ["id", "version", "day"]
    assert spark.sql(f"SELECT * FROM {name}").count() == 10
    assert spark.read.option("lookup.where", "id < 2").table(name).count() == 4
    assert spark.sql(f"SELECT * FROM {name} WITH (`lookup.partition` = 'max_pt()')").count() == 5
    put(directory / "day=3" / "part.parquet", 3)
    assert spark.sql(f"SELECT DISTINCT day FROM {name}").count() == 3
    assert LookupTable.for_name(spark, name).scan(["day"]).num_rows == 15
    # A schema that was taken from it reads the path that is named.
    other = put(tmp_path / "other.parquet", 7)
    assert versions(spark.read.format("lookupcache").schema(spark.table(name).schema).load(str(other))) == {7}
    spark.sql(f"DROP TABLE {name}")
    assert sorted(p.name for p in directory.iterdir()) == ["day=1", "day=2", "day=3"]


MISTAKES: list[tuple[dict[str, str], str]] = [
    ({"lookup.cahe": "NONE"}, "did you mean lookup.cache"),
    ({"lookup.cache": "FUL"}, "did you mean FULL"),
    ({"lookup.cache": "PARTIAL", "lookup.keys": "id"}, "without any bound would grow for ever"),
    ({"lookup.cache": "FULL", "lookup.metadata.source": "CACHE"}, "Missing 'lookup.full-cache.periodic-reload"),
    ({"lookup.full-cache.retain": "1 h"}, "should be 'FULL'"),
    ({"lookup.cache": "FULL", "lookup.full-cache.reload-strategy": "no.such:trigger"}, "No module named 'no'"),
    ({"lookup.cache": "FULL", "lookup.keys": "nope"}, "the table has no column 'nope'"),
    ({"lookup.settle": "5 sekunden"}, "expected a duration"),
    ({"lookup.metadata.source": "CACHE"}, "needs lookup.metadata.sync-interval"),
    ({"header": "true"}, "unknown option header"),
    ({"lookup.storage.secret": "hunter2"}, "looks like a credential"),
    ({"lookup.columns": "id,nam"}, "the table has no column 'nam'"),
    ({"lookup.keys": "nam"}, "option lookup.keys: the table has no column 'nam'"),
    ({"lookup.where": "upper(id) = 'A'"}, "is not supported; supported are"),
    ({"lookup.partition": "day=1"}, "no k=v directories"),
]


def test_mistakes_are_errors_at_planning(spark: SparkSession, tmp_path: Path) -> None:
    """A mistake in the options, or a path that is no table, fails load() itself, on the driver, and says what to do."""
    path = put(tmp_path / "dim.parquet", 1)
    for options, message in MISTAKES:
        with pytest.raises(Exception, match=message) as caught:
            load(spark, path, options)
        assert "hunter2" not in str(caught.value)
    (tmp_path / "empty").mkdir()
    put(tmp_path / "delta" / "part.parquet", 1)
    (tmp_path / "delta" / "_delta_log").mkdir()
    tables = {"nowhere": "does not exist", "empty": "is no table now", "delta": "it is a Delta table"}
    for place, message in tables.items():
        with pytest.raises(Exception, match=message):
            load(spark, tmp_path / place)


def test_a_user_schema_prunes_columns(spark: SparkSession, tmp_path: Path) -> None:
    """`schema(...)` and `lookup.columns` read fewer columns; a wider type is cast, a column that no file has is null."""
    path = saved(tmp_path / "dim.parquet", {"id": pa.array([1, 2], pa.int32()), "a": ["x", "y"], "b": [1.5, None]})
    reader = spark.read.format("lookupcache")
    assert reader.schema("b double, id bigint").load(str(path)).collect() == [(1.5, 1), (None, 2)]
    assert reader.schema("nope int").load(str(path)).collect() == [(None,), (None,)]
    with pytest.raises(Exception, match=r"column 'id' of .* is int32 and cannot be read as string"):
        reader.schema("id string").load(str(path)).collect()
    with pytest.raises(Exception, match="contradicts the given schema"):
        reader.schema("b double").option("lookup.columns", "a").load(str(path)).collect()
    assert load(spark, path, {"lookup.columns": "B,id"}).columns == ["b", "id"]
    declared = spark.read.format("lookupcache").option("lookup.schema", "id INT")
    assert declared.schema("id int").load(str(path)).collect() == [(1,), (2,)]
    with pytest.raises(Exception, match=r"option lookup\.schema = 'id INT' contradicts \.schema\('id BIGINT'\)"):
        declared.schema("id bigint").load(str(path)).collect()


def test_confs_of_a_session(spark: SparkSession, tmp_path: Path) -> None:
    """`spark.lookupcache.cache.dir` is followed by the reading workers, but yields to an option; the recommended ones change no answer."""
    path = put(tmp_path / "dim.parquet", 1)
    with conf(spark, "spark.lookupcache.cache.dir", str(tmp_path / "session-cache")):
        load(spark, path).collect()
        assert (tmp_path / "session-cache" / "v1" / "blocks").is_dir()
        shutil.rmtree(tmp_path / "session-cache")
        load(spark, path, {"lookup.cache.dir": str(tmp_path / "own")}).collect()
        assert not (tmp_path / "session-cache").exists()
        assert (tmp_path / "own" / "v1").is_dir()
    with conf(spark, "spark.lookupcache.where", "id = 1"), pytest.raises(Exception, match="can be set for a session"):
        load(spark, path).collect()
    before = {key: spark.conf.get(key) for key in RECOMMENDED}
    try:
        assert configure(spark) is spark
        assert {key: spark.conf.get(key) for key in RECOMMENDED} == dict(RECOMMENDED)
        assert load(spark, path).count() == 10
    finally:
        for key, value in before.items():
            spark.conf.set(key, value)


def test_types_that_only_spark_knows(spark: SparkSession, tmp_path: Path) -> None:
    """Day-time intervals are what Spark's reader gives, also nested; types that no Python source can read are named errors."""
    intervals = spark.sql(
        "SELECT 1 AS id, INTERVAL '1 02:03:04.5' DAY TO SECOND AS i, named_struct('a', INTERVAL '5' SECOND) AS s, "
        "array(INTERVAL '7' HOUR) AS l, map('k', INTERVAL '1' DAY) AS m"
    )
    intervals.write.parquet(str(tmp_path / "intervals"))
    found = load(spark, tmp_path / "intervals")
    assert found.collect() == spark.read.parquet(str(tmp_path / "intervals")).collect()
    assert found.schema["i"].dataType.simpleString() == "interval day to second"
    refused = {"variant": "parse_json('[1]')", "interval year to month": "INTERVAL '1-2' YEAR TO MONTH"}
    for kind, value in refused.items():
        spark.sql(f"SELECT 1 AS id, array({value}) AS v").write.parquet(str(tmp_path / kind))
        with pytest.raises(AnalysisException, match=f"column 'v' is of Spark's type {kind}"):
            load(spark, tmp_path / kind)
