"""The Spark format: what each shape of query sees, what it costs at the store, and what a snapshot or a partial cache answers."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest
from deltalake import convert_to_deltalake
from pyspark.errors import AnalysisException

from pyspark_lookup import LookupTable, configure, lookup_join, warm
from pyspark_lookup.errors import OptionError, SchemaError
from pyspark_lookup.spark.session import RECOMMENDED
from tests.support.spark_tables import Calls, catalog_options, conf, load, publish_version, saved
from tests.support.sparks import DATA_SOURCES, needs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.support.s3server import Request, S3Server

pytestmark = [needs(DATA_SOURCES), pytest.mark.spark]


def versions(df: DataFrame) -> set[int]:
    return {row.version for row in df.collect()}


def test_plans_of_a_file(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """An execution costs one HEAD and no GET while the file is unchanged, and sees a file that replaces it; in CACHE mode it costs no call."""
    path = publish_version(tmp_path / "dim.parquet", 1)
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
    assert spark.read.option("lookup.where", "id < 2").table(name).count() == 2
    # A schema taken from this table reads the path that is named, not the table's.
    schema, other_path = spark.table(name).schema, publish_version(tmp_path / "other.parquet", 7)
    assert versions(spark.read.format("lookupcache").schema(schema).load(str(other_path))) == {7}
    df.createOrReplaceTempView("view_of_df")
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW view_of_sql {catalog_options(path)}")
    for version in (2, 3):
        publish_version(path, version)
        calls.calls()
        assert versions(df) == {version}
        heads, lists, gets = calls.calls()
        assert (heads, lists, gets > 0) == (1, 0, True)
        for table in ("view_of_df", "view_of_sql", name):
            assert versions(spark.sql(f"SELECT version FROM {table}")) == {version}
    cached = {"lookup.metadata.source": "CACHE", "lookup.metadata.sync-interval": "1 h"}
    publish_version(path, 4)
    calls.calls()
    assert versions(load(spark, path, cached)) == {3}
    assert calls.calls() == (0, 0, 0)


def test_calls_of_a_directory(spark: SparkSession, tmp_path: Path) -> None:
    """An unchanged directory costs one LIST; after one file is replaced, only that file is read. Its files and versions are views."""
    for number in range(10):
        publish_version(tmp_path / "dim" / f"{number}.parquet", 1, range(number * 10, number * 10 + 10))
    df = load(spark, tmp_path / "dim")
    assert df.count() == 100
    calls = Calls(tmp_path / "dim")
    assert df.count() == 100
    assert calls.calls() == (0, 1, 0)
    new = publish_version(tmp_path / "dim" / "4.parquet", 2, range(40, 50))
    assert df.filter("version = 2").count() == 10
    delta = calls.take_metrics()
    assert [delta[f"{kind}Count"] for kind in ("ufsHead", "ufsList", "fileResynced", "fileCached")] == [0, 1, 1, 9]
    assert 0 < delta["ufsGetBytes"] <= new.stat().st_size
    (tmp_path / "dim" / "0.parquet").unlink()
    views = {view: load(spark, tmp_path / "dim", {"lookup.view": view}) for view in ("files", "versions", "metrics")}
    urls = sorted(row.url for row in views["files"].collect())
    assert urls == [f"file://{tmp_path}/dim/{number}.parquet" for number in range(1, 10)]
    versions_of_host = sorted(views["versions"].collect(), key=lambda row: row.resolved_at)
    assert [row.files for row in versions_of_host] == [10, 10, 9]
    metrics = {row.name: row.value for row in views["metrics"].collect()}
    assert metrics["ufsListCount"] >= 4
    assert metrics["rowsReadCount"] == 300


@pytest.mark.parametrize("shape", ["self join", "retried task", "many tasks"])
def test_one_version_per_execution(spark: SparkSession, s3: S3Server, tmp_path: Path, shape: str) -> None:
    """The parts of one execution resolve the version once, though the table changes right after; so do tasks that resolve it themselves."""
    options, ids, place = {"lookup.storage.endpoint_url": s3.endpoint}, range(10), f"{shape}.parquet"
    if shape == "many tasks":
        options |= {"lookup.version-at": "READ", "lookup.scan.split-size": "1 MiB"}
        ids = range(80_000)
    noise = [os.urandom(64) for _ in ids]
    tables = ({"id": ids, "version": [version] * len(ids), "noise": noise} for version in (1, 2))
    old, new = (saved(tmp_path / f"{n}.parquet", table, group=5_000) for n, table in enumerate(tables))

    def change(request: Request) -> None:
        if request.kind == "head":
            s3.after = None
            s3.client.upload_file(str(new), "bucket", place)

    s3.client.create_bucket(Bucket="bucket")
    s3.client.upload_file(str(old), "bucket", place)
    df = load(spark, f"s3a://bucket/{place}", options)
    assert df.rdd.getNumPartitions() >= (4 if shape == "many tasks" else 1)
    if shape == "self join":
        query = df.alias("a").join(df.alias("b"), "id").selectExpr("a.version", "b.version AS other")
        query = query.selectExpr("stack(2, version, other) AS version")
    elif shape == "many tasks":
        query = df.groupBy("version").max("id")
    else:
        marker = tmp_path / "failed-once"

        def fail_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from batches
            if not marker.exists():
                marker.touch()
                raise RuntimeError("first attempt")

        query = df.select("version").mapInArrow(fail_once, "version long")
    df.select("id", "version").collect()  # version 1 is on this host
    s3.log.clear()
    s3.after = change
    assert versions(query) == {1}
    assert (s3.count()["head"], s3.count()["list"], s3.count()["get"]) == (1, 0, 0)
    assert versions(query.select("version")) == {2}


@pytest.mark.parametrize("enabled", ["false", "true"])
def test_shapes_that_leak_pushed_filters_are_right(
    spark: SparkSession, tmp_path: Path, name: str, enabled: str
) -> None:
    """With Spark's pushdown on or off, no filter of one scan prunes another scan of the same relation."""
    path = publish_version(tmp_path / "dim.parquet", 1, group=2)
    with conf(spark, "spark.sql.python.filterPushdown.enabled", enabled):
        df = load(spark, path)
        assert df.filter("id = 1").union(df).count() == 11
        assert sorted(r.id for r in df.filter("id = 1").union(df.filter("id = 2")).collect()) == [1, 2]
        df.createOrReplaceTempView("leaky")
        joined = "SELECT b.id FROM leaky a JOIN leaky b ON a.version = b.version WHERE a.id = 3"
        assert spark.sql(joined).count() == 10
        spark.sql(f"CREATE TABLE {name} {catalog_options(path)}")
        for table in ("leaky", name):
            assert spark.sql(f"SELECT id FROM {table} WHERE id = 3 UNION ALL SELECT id FROM {table}").count() == 11
    calls = Calls(path)
    filtered = load(spark, path, {"lookup.where": "id >= 4 AND id < 8"})
    assert filtered.filter("id > 5").union(df).count() == 12
    assert calls.take_metrics()["rowGroupsPrunedCount"] == 3


MISTAKES: list[tuple[dict[str, str], str]] = [
    ({"lookup.cache": "FULL", "lookup.keys": "nope"}, "option lookup.keys: the table has no column 'nope'"),
    ({"lookup.storage.secret": "hunter2"}, "looks like a credential"),
    ({"lookup.columns": "id,nam"}, "the table has no column 'nam'"),
    ({"lookup.where": "upper(id) = 'A'"}, "is not supported; supported are"),
    ({"lookup.on-error": "NULL"}, "lookup.on-error = NULL is for lookup_join and register_lookup"),
    ({"lookup.view": "files", "LOOKUP.write.mode": "upsert"}, "lookup.write.mode is for writes"),
    ({"lookup.view": "files", "lookup.stream.start": "1"}, "lookup.stream.start is for streams of changes"),
]


def test_mistakes_are_errors_at_planning(spark: SparkSession, tmp_path: Path) -> None:
    """A mistake in the options, or a path that is not a table, fails load() itself, on the driver, and says what to do."""
    path = publish_version(tmp_path / "dim.parquet", 1)
    for options, message in MISTAKES:
        with pytest.raises(Exception, match=message) as caught:
            load(spark, path, options)
        assert "hunter2" not in str(caught.value)
        # Spark's header says where the error comes from, and no stack frame follows.
        first_word = r"\[PYTHON_DATA_SOURCE_ERROR\] .*: (pyspark_lookup\S+Error: .*|\S+)\s+SQLSTATE: 38000"
        assert re.fullmatch(first_word, str(caught.value))
    with pytest.raises(Exception, match=r"lookup\.stream\.start is for streams of changes"):
        load(spark, path, {"lookup.stream.start": "1"}).collect()  # before that, the option may be for readStream
    (tmp_path / "empty").mkdir()
    publish_version(tmp_path / "delta" / "part.parquet", 1)
    (tmp_path / "delta" / "_delta_log").mkdir()
    tables = {"nowhere": "does not exist", "empty": "there is no table at", "delta": "so it is not a Delta table"}
    for place, message in tables.items():
        with pytest.raises(Exception, match=message):
            load(spark, tmp_path / place)


def test_texts_with_a_collation(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """Columns have the collation that Spark has written, and are filtered by it; what this package compares itself is refused by name."""
    columns = {"s": "'a' COLLATE UTF8_LCASE", "n": "named_struct('x', array('b' COLLATE UNICODE_CI))", "t": "'t'"}
    rows = spark.sql(f"SELECT 1L AS id, {', '.join(f'{text} AS {column}' for column, text in columns.items())}")
    rows.write.parquet(str(tmp_path / "dim"))
    path = tmp_path / "dim"
    for _ in range(2):  # from the files, and then from the host's records
        read = load(spark, path)
        assert read.schema == spark.read.parquet(str(path)).schema
        assert read.filter("s = 'A' AND n.x[0] = 'B'").count() == 1
    with conf(spark, "spark.sql.python.filterPushdown.enabled", "true"):
        assert load(spark, path).filter("s = 'A' AND t = 't'").count() == 1
    spark.sql(f"CREATE TABLE {name} {catalog_options(path)}")
    assert spark.sql(f"SELECT id FROM {name} WHERE s = 'A'").count() == 1
    with pytest.raises(Exception, match=r"column 's' has a collation.*lookup\.where compares bytes"):
        load(spark, path, {"lookup.where": "s = 'A'"})
    with pytest.raises(Exception, match=r"option lookup\.keys: column 's' has a collation"):
        load(spark, path, {"lookup.keys": "s"})
    with pytest.raises(SchemaError, match=r"column 's' of the table is string collate UTF8_LCASE.*columns=\[…\]"):
        lookup_join(spark.range(3), str(path), "id")
    assert lookup_join(spark.range(3), str(path), "id", "inner", columns=["t"]).collect() == [(1, "t")]
    plain = {"lookup.schema": "id LONG, s STRING, t STRING"}
    assert lookup_join(spark.range(3), str(path), "id", "inner", options=plain).collect() == [(1, "a", "t")]
    assert load(spark, path, {**plain, "lookup.where": "s = 'A'"}).count() == 0
    convert_to_deltalake(str(path))  # which knows nothing of collations
    (log,) = (path / "_delta_log").glob("*.json")
    actions = {name: action for line in log.read_text().splitlines() for name, action in json.loads(line).items()}
    actions["metaData"]["schemaString"] = rows.schema.json()
    log.write_text("\n".join(json.dumps({name: action}) for name, action in actions.items()))
    assert load(spark, path).filter("s = 'A' AND n.x[0] = 'B'").count() == 1


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
    """Workers follow `spark.lookupcache.cache.dir` unless an option overrides it; the recommended confs change no answer."""
    path = publish_version(tmp_path / "dim.parquet", 1)
    with conf(spark, "spark.lookupcache.cache.dir", str(tmp_path / "session-cache")):
        load(spark, path).collect()
        assert (tmp_path / "session-cache" / "v1" / "blocks").is_dir()
        shutil.rmtree(tmp_path / "session-cache")
        load(spark, path, {"lookup.cache.dir": str(tmp_path / "own")}).collect()
        assert not (tmp_path / "session-cache").exists()
        assert (tmp_path / "own" / "v1").is_dir()
    with conf(spark, "spark.lookupcache.where", "id = 1"), pytest.raises(Exception, match="can be set for a session"):
        load(spark, path).collect()
    before = {key: spark.conf.get(key, None) for key in RECOMMENDED}  # None: this Spark does not know it
    assert configure(spark) is spark
    assert {key: spark.conf.get(key) for key in RECOMMENDED} == dict(RECOMMENDED)
    assert load(spark, path).count() == 10
    for key, value in before.items():
        spark.conf.unset(key) if value is None else spark.conf.set(key, value)


def test_types_that_only_spark_knows(spark: SparkSession, tmp_path: Path) -> None:
    """Day-time intervals are what Spark's reader gives, also nested; types that no Python source can read are named errors."""
    intervals = spark.sql(
        "SELECT 1 AS id, INTERVAL '1 02:03:04.5' DAY TO SECOND AS i, named_struct('a', INTERVAL '5' SECOND) AS s, "
        "array(INTERVAL '7' HOUR) AS l, map('k', INTERVAL '1' DAY) AS m"
    )
    intervals.write.parquet(str(tmp_path / "intervals"))
    frame = load(spark, tmp_path / "intervals")
    assert frame.collect() == spark.read.parquet(str(tmp_path / "intervals")).collect()
    assert frame.schema["i"].dataType.simpleString() == "interval day to second"
    for kind, value in {"interval year to month": "INTERVAL '1-2' YEAR TO MONTH"}.items():
        spark.sql(f"SELECT 1 AS id, array({value}) AS v").write.parquet(str(tmp_path / kind))
        with pytest.raises(AnalysisException, match=f"column 'v' is of Spark's type {kind}"):
            load(spark, tmp_path / kind)
        assert load(spark, tmp_path / kind, {"lookup.columns": "id"}).collect() == [(1,)]
        assert spark.read.format("lookupcache").schema("id INT").load(str(tmp_path / kind)).collect() == [(1,)]


HOST = socket.gethostname()
KEYED = {"lookup.keys": "id", "lookup.cache": "FULL"}
PARTIAL = {"lookup.keys": "id", "lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "1000"}


def test_tasks_share_a_snapshot(spark: SparkSession, tmp_path: Path) -> None:
    """A scan of several tasks gives each row once, from the snapshot, as Spark's own reader does from the files."""
    path, rng = tmp_path / "dim", np.random.default_rng(3)
    for number, count in enumerate((60_000, 270_000, 20_000)):
        ids = rng.integers(0, 2**40, count)
        rows = {"id": ids, "v": ids * 7, "g": pa.array([f"g{n % 5}" for n in range(count)])}
        saved(path / f"{number}.parquet", rows, group=50_000)
    df = load(spark, path, {**KEYED, "lookup.scan.split-size": "1 MiB"})
    assert df.rdd.getNumPartitions() > 3
    question = ("count(*)", "sum(id)", "sum(v)", "min(g)", "max(g)")
    actual = df.selectExpr(*question).collect()
    assert actual == spark.read.parquet(str(path)).selectExpr(*question).collect()
    assert df.union(df).selectExpr("sum(id)").collect()[0][0] == 2 * actual[0]["sum(id)"]
    metrics = LookupTable(str(path)).metrics()
    # The union reads the table twice.
    assert metrics["resolvedBytes"] == 3 * sum(file.stat().st_size for file in path.iterdir())
    assert (metrics["snapshotReadThroughCount"], metrics["loadCount"]) == (0, 1)


def test_keys_are_loaded_once(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """With PARTIAL, keys in lookup.where, here of a catalog table, are loaded once, also absent ones. Then they cost a HEAD, also in other workers, in other DataFrames and without Spark."""
    path = publish_version(tmp_path / "dim.parquet", 1, range(5000))
    spark.sql(f"CREATE TABLE {name} {catalog_options(path, {**PARTIAL, 'lookup.where': 'id IN (3, 4999, 77777)'})}")
    df = spark.table(name)
    assert sorted(row.id for row in df.collect()) == [3, 4999]
    calls = Calls(path)
    assert sorted(row.id for row in df.collect()) == [3, 4999]
    df.limit(1).collect()  # ends its worker
    second_frame = load(spark, path, {**PARTIAL, "lookup.where": "id IN (4999, 3) AND version = 1"})
    assert second_frame.select("version").collect() == [(1,), (1,)]
    delta = calls.take_metrics()
    assert (delta["ufsGetCount"], delta["rowGroupsReadCount"], delta["missCount"]) == (0, 0, 0)
    assert delta["hitCount"] == 3 + 3 + 2
    with LookupTable(str(path), PARTIAL) as table:
        assert table.get(77777) == []
    assert calls.take_metrics()["missCount"] == 0
    with LookupTable.for_name(spark, name) as named:
        assert [named.get(3), named.get(9)] == [[{"id": 3, "version": 1}], []]  # lookup.where holds for lookups, too


def test_warm_executors(spark: SparkSession, tmp_path: Path) -> None:
    """`warm` loads the current version into each cache directory that it reaches, and reports it; it reports failures, too."""
    path = publish_version(tmp_path / "dim" / "a.parquet", 1, range(1000)).parent
    (host,) = warm(spark, path, tasks=4, options={"lookup.keys": "id"})
    table = LookupTable(str(path), {"lookup.keys": "id", "lookup.cache": "FULL"})
    assert (host.host, host.version, host.rows, host.error) == (HOST, table.version, 1000, None)
    before = table.metrics()["ufsGetCount"]
    assert table.get(7) == [{"id": 7, "version": 1}]
    assert table.metrics()["ufsGetCount"] == before
    (path / "noise.parquet").write_bytes(b"noise")
    (failed,) = warm(spark, table, tasks=2)
    assert failed.version is None
    assert "noise.parquet" in str(failed.error)
    with pytest.raises(OptionError, match="unknown option lookup"):
        warm(spark, path, options={"lookup.keyz": "id"})
    with pytest.raises(ValueError, match="tasks = 0"):
        warm(spark, path, tasks=0)
