"""The Spark format: what each shape of query sees, and what it costs at the store."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import AnalysisException

from pyspark_lookup import LookupTable, configure
from pyspark_lookup.base.errors import NotATableError, UfsNotFoundError, VersionGoneError
from pyspark_lookup.spark.session import RECOMMENDED
from tests.fakes import wait_until_settled

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.s3server import Request, S3Server

pytestmark = pytest.mark.spark
_names = itertools.count()


def put(path: Path, version: int, ids: range = range(10), group: int = 1000) -> Path:
    """Publish a file of rows (id, version) by rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    pq.write_table(pa.table({"id": list(ids), "version": [version] * len(ids)}), new, row_group_size=group)
    os.replace(new, path)
    wait_until_settled(path)
    return path


def load(spark: SparkSession, path: object, options: Mapping[str, str] = MappingProxyType({})) -> DataFrame:
    return spark.read.format("lookupcache").options(**options).load(str(path))


class Calls:
    """Store calls to one table by all processes of this host, since the last look."""

    def __init__(self, path: object, options: dict[str, object] | None = None) -> None:
        self._table = LookupTable(str(path), options)
        self._last = self._table.metrics()

    def since(self) -> dict[str, int]:
        now = self._table.metrics()
        delta = {name: now[name] - self._last[name] for name in now}
        self._last = now
        return delta

    def calls(self) -> tuple[int, int, int]:
        """(heads, lists, gets)."""
        delta = self.since()
        return delta["ufsHeadCount"], delta["ufsListCount"], delta["ufsGetCount"]


@contextlib.contextmanager
def conf(spark: SparkSession, key: str, value: str) -> Iterator[None]:
    spark.conf.set(key, value)
    yield
    spark.conf.unset(key)


@pytest.fixture
def name(spark: SparkSession) -> Iterator[str]:
    """A catalog table's name, dropped afterwards."""
    table = f"dim_{next(_names)}"
    yield table
    spark.sql(f"DROP TABLE IF EXISTS {table}")


# --- calls ----------------------------------------------------------------------------------------


def test_calls_of_a_file(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """A single file: planning 1 call, an execution 1 head, 0 list, and 0 get while it is unchanged."""
    path = put(tmp_path / "dim.parquet", 1)
    calls = Calls(path)
    df = load(spark, path)
    heads, lists, gets = calls.calls()
    assert (heads, lists) == (1, 0)
    df.collect()
    assert calls.calls() == (1, 0, 0)
    df.filter("id = 1").count()
    assert calls.calls() == (1, 0, 0)
    spark.sql(f"CREATE TABLE {name} USING lookupcache OPTIONS (path '{path}')")
    assert calls.calls() == (1, 0, 0)
    spark.sql(f"SELECT * FROM {name}").collect()
    assert calls.calls() == (2, 0, 0)  # planned once, executed once
    put(path, 2)
    assert {row.version for row in df.collect()} == {2}
    heads, lists, gets = calls.calls()
    assert (heads, lists) == (1, 0)
    assert gets > 0


def test_calls_of_a_directory_of_100_files(spark: SparkSession, tmp_path: Path) -> None:
    """100 files unchanged: 1 list, 0 head, 0 get; one replaced: data calls for that file only."""
    for number in range(100):
        put(tmp_path / "dim" / f"{number:03}.parquet", 1, range(number * 10, number * 10 + 10))
    df = load(spark, tmp_path / "dim")
    assert df.count() == 1000
    calls = Calls(tmp_path / "dim")
    assert df.count() == 1000
    assert calls.calls() == (0, 1, 0)
    put(tmp_path / "dim" / "042.parquet", 2, range(420, 430))
    assert df.filter("version = 2").count() == 10
    delta = calls.since()
    assert (delta["ufsHeadCount"], delta["ufsListCount"]) == (0, 1)
    assert (delta["fileResyncedCount"], delta["fileCachedCount"]) == (1, 99)
    size = (tmp_path / "dim" / "042.parquet").stat().st_size
    assert 0 < delta["ufsGetBytes"] <= size


def test_cache_mode_within_its_interval_makes_no_call(spark: SparkSession, tmp_path: Path) -> None:
    """CACHE mode: 0 calls of any kind, planning included, and the version of when it was learned."""
    path = put(tmp_path / "dim.parquet", 1)
    options = {"lookup.metadata.source": "CACHE", "lookup.metadata.sync-interval": "1 h"}
    load(spark, path, options).collect()
    calls = Calls(path)
    put(path, 2)
    df = load(spark, path, options)
    assert {row.version for row in df.collect()} == {1}
    assert {row.version for row in df.collect()} == {1}
    assert calls.calls() == (0, 0, 0)
    assert {row.version for row in load(spark, path).collect()} == {2}


# --- freshness ------------------------------------------------------------------------------------


def test_reused_plans_see_a_replaced_file(spark: SparkSession, tmp_path: Path) -> None:
    """A reused DataFrame, a temporary view of it and one from SQL see a new file at their next execution."""
    path = put(tmp_path / "dim.parquet", 1)
    df = load(spark, path)
    df.createOrReplaceTempView("view_of_df")
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW view_of_sql USING lookupcache OPTIONS (path '{path}')")
    for version in (1, 2, 3):
        put(path, version)
        assert {row.version for row in df.select("version").collect()} == {version}
        assert {row.version for row in spark.sql("SELECT version FROM view_of_df").collect()} == {version}
        assert {row.version for row in spark.sql("SELECT version FROM view_of_sql").collect()} == {version}


def test_stream_static_join_sees_a_replaced_file(spark: SparkSession, tmp_path: Path) -> None:
    """The static side of a running stream is the table's current version in each micro-batch."""
    path = put(tmp_path / "dim.parquet", 1)
    events = tmp_path / "events"
    put(events / "1.parquet", 0)
    stream = spark.readStream.schema("id long, version long").parquet(str(events)).select("id")
    joined = stream.join(load(spark, path), "id")
    query = joined.writeStream.format("memory").queryName("joined").start()
    try:
        for version in (1, 2, 3):
            put(path, version)
            put(events / f"{version + 1}.parquet", 0)
            query.processAllAvailable()
        counts = {row.version: row["count"] for row in spark.table("joined").groupBy("version").count().collect()}
    finally:
        query.stop()
    assert set(counts) >= {2, 3}
    assert sum(counts.values()) == 40


def s3_put(s3: S3Server, key: str, version: int, tmp_path: Path) -> None:
    s3.client.upload_file(str(put(tmp_path / "upload.parquet", version)), "bucket", key)


@pytest.fixture
def s3_table(s3: S3Server, tmp_path: Path) -> str:
    """s3://bucket/<key> of version 1."""
    s3.client.create_bucket(Bucket="bucket")
    key = f"dim-{next(_names)}.parquet"
    s3_put(s3, key, 1, tmp_path)
    return f"s3a://bucket/{key}"


@pytest.mark.parametrize("shape", ["union", "self join", "view twice", "retried task"])
def test_one_version_per_execution(
    spark: SparkSession, s3: S3Server, s3_table: str, tmp_path: Path, shape: str
) -> None:
    """Parts of one execution agree on its version and resolve once, though the table changes right after."""
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

    def change(request: Request) -> None:
        if request.kind == "head":
            s3.after = None
            s3_put(s3, s3_table.rsplit("/", 1)[-1], 2, tmp_path)

    s3.log.clear()
    s3.after = change
    assert {row.version for row in query.collect()} == {1}
    assert s3.count()["head"] == 1
    assert s3.count()["get"] == 0
    assert {row.version for row in query.select("version").collect()} == {2}


def test_all_tasks_of_a_query_are_on_one_version(
    spark: SparkSession, s3: S3Server, s3_table: str, tmp_path: Path
) -> None:
    """`lookup.version-at=READ`: many tasks resolve once between them, though the table changes right after."""
    key = s3_table.rsplit("/", 1)[-1]

    def publish(version: int) -> None:
        path = tmp_path / "large.parquet"
        noise = pa.array([os.urandom(64) for _ in range(80_000)])
        table = pa.table({"id": range(80_000), "version": [version] * 80_000, "noise": noise})
        pq.write_table(table, path, row_group_size=5_000)
        s3.client.upload_file(str(path), "bucket", key)

    publish(1)
    options = {
        "lookup.storage.endpoint_url": s3.endpoint,
        "lookup.scan.split-size": "1 MiB",
        "lookup.version-at": "READ",
    }
    df = load(spark, s3_table, options)
    assert df.rdd.getNumPartitions() >= 4
    assert df.selectExpr("max(version)", "count(id)").collect()[0][:] == (1, 80_000)

    def change(request: Request) -> None:
        if request.kind == "head":
            s3.after = None
            publish(2)

    s3.log.clear()
    s3.after = change
    rows = df.groupBy("version").count().collect()
    assert [(row.version, row["count"]) for row in rows] == [(1, 80_000)]
    assert (s3.count()["head"], s3.count()["list"], s3.count()["get"]) == (1, 0, 0)
    rows = df.groupBy("version").count().collect()
    assert [(row.version, row["count"]) for row in rows] == [(2, 80_000)]


def test_a_directory_under_an_overwriting_job_is_never_half_a_table(spark: SparkSession, tmp_path: Path) -> None:
    """While a Spark job overwrites the directory again and again, a read is one version whole, or a named error after a wait."""
    directory = str(tmp_path / "dim")

    def overwrite(version: int) -> None:
        spark.range(0, 1000, 1, 8).selectExpr("id", f"{version} AS version").write.mode("overwrite").parquet(directory)

    overwrite(0)
    done, met = threading.Event(), threading.Event()
    last = 0

    def job() -> None:
        nonlocal last
        try:
            while last < 8 or (not met.is_set() and last < 60):
                last += 1
                overwrite(last)
        finally:
            done.set()

    writer = threading.Thread(target=job)
    writer.start()
    seen: list[set[int]] = []
    with LookupTable(directory, {"lookup.cache.dir": str(tmp_path / "cache")}) as table:
        while not done.is_set():
            try:
                rows = table.scan()
            except (NotATableError, UfsNotFoundError, VersionGoneError):
                continue
            assert rows.num_rows == 1000
            seen.append(set(rows["version"].unique().to_pylist()))
            if table.metrics()["busyServedCount"]:
                met.set()
        writer.join()
        assert set(table.scan()["version"].unique().to_pylist()) == {last}
        assert met.is_set()
    assert all(len(versions) == 1 for versions in seen)


# --- pushdown -------------------------------------------------------------------------------------


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
        twice = "SELECT id FROM leaky WHERE id = 3 UNION ALL SELECT id FROM leaky"
        assert spark.sql(twice).count() == 11
        joined = "SELECT b.id FROM leaky a JOIN leaky b ON a.version = b.version WHERE a.id = 3"
        assert spark.sql(joined).count() == 10
        spark.sql(f"CREATE TABLE {name} USING lookupcache OPTIONS (path '{path}')")
        assert spark.sql(f"SELECT id FROM {name} WHERE id = 3 UNION ALL SELECT id FROM {name}").count() == 11


def test_pushdown_prunes_when_asked_for(spark: SparkSession, tmp_path: Path) -> None:
    """`lookup.filter-pushdown=true`: a scan of its own prunes row groups by Spark's filter, rows stay exact."""
    path = put(tmp_path / "dim.parquet", 1, ids=range(1000), group=100)
    with conf(spark, "spark.sql.python.filterPushdown.enabled", "true"):
        calls = Calls(path)
        df = load(spark, path, {"lookup.filter-pushdown": "true"}).filter("id = 123 AND version IN (1, 2)")
        assert [row.id for row in df.collect()] == [123]
        delta = calls.since()
        assert (delta["rowGroupsReadCount"], delta["rowGroupsPrunedCount"]) == (1, 9)
    # With Spark's switch off the option does no harm.
    assert load(spark, path, {"lookup.filter-pushdown": "true"}).filter("id = 123").count() == 1


def test_where_prunes_and_is_exact_anywhere(spark: SparkSession, tmp_path: Path) -> None:
    """`lookup.where` is scoped to its own read, prunes row groups, and may meet a filter above it."""
    path = put(tmp_path / "dim.parquet", 1, ids=range(1000), group=100)
    calls = Calls(path)
    one = load(spark, path, {"lookup.where": "id >= 150 AND id < 250"})
    assert one.count() == 100
    assert calls.since()["rowGroupsPrunedCount"] == 8
    assert one.filter("id > 200").union(load(spark, path)).count() == 1049


# --- catalog --------------------------------------------------------------------------------------


def test_catalog_table_life(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """CREATE … OPTIONS, SELECT, spark.table, read-time options, and DROP that leaves the files alone."""
    directory = tmp_path / "with space" / "dim"
    for day in (1, 2):
        put(directory / f"day={day}" / "part.parquet", day)
    spark.sql(
        f"CREATE TABLE {name} USING lookupcache OPTIONS (path '{directory}', 'lookup.keys' 'id', 'lookup.where' 'id < 5')"
    )
    assert spark.table(name).columns == ["id", "version", "day"]
    assert spark.sql(f"SELECT * FROM {name}").count() == 10
    assert spark.read.option("lookup.where", "id < 2").table(name).count() == 4
    assert spark.sql(f"SELECT * FROM {name} WITH (`lookup.partition` = 'max_pt()')").count() == 5
    put(directory / "day=3" / "part.parquet", 3)
    assert spark.sql(f"SELECT DISTINCT day FROM {name}").count() == 3
    assert LookupTable.for_name(spark, name).scan(["day"]).num_rows == 15
    spark.sql(f"DROP TABLE {name}")
    assert sorted(p.name for p in directory.iterdir()) == ["day=1", "day=2", "day=3"]


def test_location_and_relative_paths(
    spark: SparkSession, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LOCATION works like a path option; a table without either is told how."""
    path = put(tmp_path / "dim.parquet", 1)
    spark.sql(f"CREATE TABLE {name} USING lookupcache LOCATION '{path}'")
    assert spark.table(name).count() == 10
    spark.sql(f"DROP TABLE {name}")
    with pytest.raises(Exception, match="option path is missing"):
        spark.sql(f"CREATE TABLE {name} USING lookupcache OPTIONS ('lookup.keys' 'id')")


def test_reads_that_name_a_path_ignore_a_copied_schema(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """A schema taken from one table and used to load another reads the path that is named."""
    one, other = put(tmp_path / "one.parquet", 1), put(tmp_path / "other.parquet", 2)
    spark.sql(f"CREATE TABLE {name} USING lookupcache OPTIONS (path '{one}')")
    copied = spark.table(name).schema
    rows = spark.read.format("lookupcache").schema(copied).load(str(other)).collect()
    assert {row.version for row in rows} == {2}


def test_plain_files_are_not_written(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """A table of somebody else's files is refused as a sink and as a stream, with what works, and stays as it was."""
    path = put(tmp_path / "dim.parquet", 1)
    before = path.read_bytes()
    with pytest.raises(Exception, match=r"holds files that .* did not write"):
        load(spark, path).write.format("lookupcache").mode("append").save(str(path))
    spark.sql(f"CREATE TABLE {name} USING lookupcache OPTIONS (path '{path}')")
    with pytest.raises(Exception, match="which table is written cannot be told"):
        spark.sql(f"INSERT INTO {name} VALUES (1, 2)")
    with pytest.raises(Exception, match="is no managed table"):
        spark.readStream.format("lookupcache").load(str(path)).writeStream.format("noop").start().processAllAvailable()
    assert path.read_bytes() == before


# --- options and schemas --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
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
    ],
)
def test_mistakes_are_errors_at_planning(
    spark: SparkSession, tmp_path: Path, options: dict[str, str], message: str
) -> None:
    """Every mistake in the options fails load() itself, on the driver, and says what to do."""
    path = put(tmp_path / "dim.parquet", 1)
    with pytest.raises(Exception, match=message) as caught:
        spark.read.format("lookupcache").options(**options).load(str(path))
    assert "hunter2" not in str(caught.value)


def test_missing_tables_fail_at_planning(spark: SparkSession, tmp_path: Path) -> None:
    """A path that does not exist, an empty directory and a Delta table fail load() with their names."""
    (tmp_path / "empty").mkdir()
    put(tmp_path / "delta" / "part.parquet", 1)
    (tmp_path / "delta" / "_delta_log").mkdir()
    for path, message in (
        ("nowhere", "does not exist"),
        ("empty", "is no table now"),
        ("delta", "it is a Delta table"),
    ):
        with pytest.raises(Exception, match=message):
            load(spark, tmp_path / path)


def test_a_user_schema_prunes_columns(spark: SparkSession, tmp_path: Path) -> None:
    """`schema(...)` and `lookup.columns` read fewer columns; a wider type is cast, a column that no file has is null."""
    path = tmp_path / "dim.parquet"
    pq.write_table(pa.table({"id": pa.array([1, 2], pa.int32()), "a": ["x", "y"], "b": [1.5, None]}), path)
    rows = spark.read.format("lookupcache").schema("b double, id bigint").load(str(path)).collect()
    assert [tuple(row) for row in rows] == [(1.5, 1), (None, 2)]
    assert load(spark, path, {"lookup.columns": "B,id"}).columns == ["b", "id"]
    assert spark.read.format("lookupcache").schema("nope int").load(str(path)).collect() == [(None,), (None,)]
    with pytest.raises(Exception, match=r"column 'id' of .* is int32 and cannot be read as string"):
        spark.read.format("lookupcache").schema("id string").load(str(path)).collect()
    with pytest.raises(Exception, match="contradicts the given schema"):
        spark.read.format("lookupcache").schema("b double").option("lookup.columns", "a").load(str(path)).collect()


def test_session_conf_moves_the_cache_at_run_time(spark: SparkSession, tmp_path: Path) -> None:
    """`spark.lookupcache.cache.dir` is followed by the reading workers, but yields to an option."""
    path = put(tmp_path / "dim.parquet", 1)
    with conf(spark, "spark.lookupcache.cache.dir", str(tmp_path / "session-cache")):
        load(spark, path).collect()
        assert (tmp_path / "session-cache" / "v1" / "blocks").is_dir()
        shutil.rmtree(tmp_path / "session-cache")
        spark.read.format("lookupcache").option("lookup.cache.dir", str(tmp_path / "own")).load(str(path)).collect()
        assert not (tmp_path / "session-cache").exists()
        assert (tmp_path / "own" / "v1").is_dir()
    with conf(spark, "spark.lookupcache.where", "id = 1"), pytest.raises(Exception, match="can be set for a session"):
        load(spark, path).collect()


def test_views_of_a_table(spark: SparkSession, tmp_path: Path) -> None:
    """`lookup.view`: the files of the current version, the versions known here, and the counters."""
    path = put(tmp_path / "dim" / "a.parquet", 1)
    load(spark, path.parent).collect()
    put(tmp_path / "dim" / "b.parquet", 1)
    assert [row.url for row in load(spark, path.parent, {"lookup.view": "files"}).orderBy("url").collect()] == [
        f"file://{tmp_path}/dim/{name}.parquet" for name in "ab"
    ]
    assert [
        row.files for row in load(spark, path.parent, {"lookup.view": "versions"}).orderBy("resolved_at").collect()
    ] == [1, 2]
    metrics = {row.name: row.value for row in load(spark, path.parent, {"lookup.view": "metrics"}).collect()}
    assert metrics["ufsListCount"] >= 2
    assert metrics["rowsReadCount"] == 10


def test_recommended_confs_change_no_answer(spark: SparkSession, tmp_path: Path) -> None:
    """`configure(spark)` sets the recommended confs at run time; reads stay right."""
    path = put(tmp_path / "dim.parquet", 1)
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
    found = spark.read.format("lookupcache").load(str(tmp_path / "intervals"))
    assert found.collect() == spark.read.parquet(str(tmp_path / "intervals")).collect()
    assert found.schema["i"].dataType.simpleString() == "interval day to second"
    refused = {"variant": "parse_json('[1]')", "interval year to month": "INTERVAL '1-2' YEAR TO MONTH"}
    for kind, value in refused.items():
        path = str(tmp_path / kind)
        spark.sql(f"SELECT 1 AS id, array({value}) AS v").write.parquet(path)
        with pytest.raises(AnalysisException, match=f"column 'v' is of Spark's type {kind}"):
            spark.read.format("lookupcache").load(path)
