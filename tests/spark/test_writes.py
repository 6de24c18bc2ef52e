"""Managed tables written by Spark: every statement's rows land in the named table or nowhere, once or not at all."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import TaskContext
from pyspark.sql import functions as sf

from pyspark_lookup import LookupTable, lookup_join, register_lookup
from tests.spark.test_source import load

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.s3server import S3Server

pytestmark = pytest.mark.spark

_names = itertools.count()
UNKNOWN = "which table is written cannot be told"


def write(rows: DataFrame, path: object, mode: str = "append", **options: str) -> None:
    given = {"lookup.keys": "id", **{key.replace("__", ".").replace("_", "-"): text for key, text in options.items()}}
    rows.write.format("lookupcache").mode(mode).options(**given).save(str(path))


def events(path: Path) -> list[dict[str, Any]]:
    """A table's log."""
    return [json.loads(file.read_text()) for file in sorted((path / "_lookup" / "log").glob("*.json"))]


def data_files(path: Path) -> list[Path]:
    return sorted(path.glob("*/**/*.parquet"))


class Tables:
    """Catalog tables: `dim` and `other` alike, `nums` without text; and sources of rows."""

    def __init__(self, spark: SparkSession, home: Path) -> None:
        self.spark, self.home = spark, home
        rows = spark.createDataFrame([(1, "a"), (2, "b")], "id bigint, name string")
        for name, frame in {"dim": rows, "other": rows, "nums": rows.select("id")}.items():
            write(frame, home / name)
            spark.sql(f"CREATE TABLE {name} USING lookupcache OPTIONS (path '{home / name}')")
        rows.createOrReplaceTempView("src")

    def counts(self) -> dict[str, int]:
        return {name: LookupTable(str(self.home / name)).scan().num_rows for name in ("dim", "other", "nums")}

    def changed_by(self, statement: Callable[[], object]) -> dict[str, int]:
        """How many rows more each table has."""
        before = self.counts()
        try:
            statement()
        finally:
            after = self.counts()
        return {name: after[name] - before[name] for name in after if after[name] != before[name]}


@pytest.fixture(scope="module")
def tables(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tables]:
    yield Tables(spark, tmp_path_factory.mktemp("written"))
    for name in ("dim", "other", "nums"):
        spark.sql(f"DROP TABLE {name}")
    spark.catalog.dropTempView("src")


# --- catalog tables ----------------------------------------------------------------------------------

FRAMES: list[tuple[str, Callable[[Tables, DataFrame], Any], dict[str, int] | str]] = [
    ("writeTo.append", lambda t, rows: rows.writeTo("dim").append(), {"dim": 2}),
    ("insertInto", lambda t, rows: rows.write.insertInto("dim"), {"dim": 2}),
    ("saveAsTable append", lambda t, rows: rows.write.mode("append").format("lookupcache").saveAsTable("dim"), {"dim": 2}),
    ("writeTo of a twin", lambda t, rows: t.spark.table("other").writeTo("dim").append(), {"dim": 2}),
    ("insertInto of a twin", lambda t, rows: t.spark.table("other").write.insertInto("dim"), {"dim": 2}),
    ("overwritePartitions", lambda t, rows: rows.writeTo("dim").overwritePartitions(), "dynamic overwrite"),
    ("saveAsTable of a new name", lambda t, rows: rows.write.format("lookupcache").saveAsTable("brandnew"), UNKNOWN),
    ("save without a mode", lambda t, rows: rows.write.format("lookupcache").save(f"{t.home}/dim"), "SAVE_MODE"),
    ("partitionBy", lambda t, rows: rows.write.format("lookupcache").mode("append").partitionBy("id").save(f"{t.home}/dim"), "partitioning"),
    ("a loaded twin", lambda t, rows: load(t.spark, t.home / "other").write.format("lookupcache").mode("append").save(f"{t.home}/dim"), {"dim": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "statement", "expected"), FRAMES, ids=[name for name, _, _ in FRAMES])
def test_data_frames_land_in_the_named_table(
    tables: Tables, name: str, statement: Callable[[Tables, DataFrame], Any], expected: dict[str, int] | str
) -> None:
    """The same of DataFrames that are written to a table or a path."""
    tables.spark.sql(f"INSERT OVERWRITE other WITH (path '{tables.home}/other') VALUES (1, 'a'), (2, 'b')")
    rows = tables.spark.table("src")
    if isinstance(expected, str):

        def run() -> None:
            with pytest.raises(Exception, match=expected):
                statement(tables, rows)

        assert tables.changed_by(run) == {}
    else:
        assert tables.changed_by(lambda: statement(tables, rows)) == expected


@pytest.mark.parametrize(
    "overwrite",
    [
        lambda rows: rows.sparkSession.sql("INSERT OVERWRITE dim SELECT * FROM src"),
        lambda rows: rows.write.insertInto("dim", overwrite=True),
        lambda rows: rows.writeTo("dim").overwrite(sf.lit(True)),
    ],
    ids=["INSERT OVERWRITE", "insertInto", "writeTo.overwrite"],
)
def test_an_overwrite_leaves_its_rows(tables: Tables, overwrite: Callable[[DataFrame], Any]) -> None:
    """An overwrite of a catalog table by name replaces the rows of that table."""
    tables.spark.sql("INSERT INTO dim VALUES (50, 'old')")
    overwrite(tables.spark.table("src"))
    assert sorted(tuple(row) for row in tables.spark.table("dim").collect()) == [(1, "a"), (2, "b")]


def test_rows_of_all_types_come_back(spark: SparkSession, tmp_path: Path) -> None:
    """What is written is what is read, to the microsecond and the last digit, through scan and lookup."""
    rows = spark.sql(
        "SELECT id, CAST(id AS STRING) AS s, id / 3 AS d, CAST(id AS DECIMAL(20, 5)) AS e, DATE '2026-01-01' AS day, "
        "TIMESTAMP '2026-01-01 10:00:00.123456' AS t, TIMESTAMP_NTZ '2026-01-01 10:00:00.123456' AS n, array(id, NULL) AS l, "
        "named_struct('x', id) AS st, map('k', id) AS m, CAST('ab' AS BINARY) AS b, id > 5 AS flag FROM range(10)"
    )
    write(rows, tmp_path / "t")
    found = load(spark, tmp_path / "t")
    assert found.orderBy("id").collect() == rows.orderBy("id").collect()
    joined = lookup_join(spark.range(10), str(tmp_path / "t"), "id")
    assert joined.orderBy("id").collect() == rows.orderBy("id").collect()


def test_a_stream_of_appends_and_an_overwrite(spark: SparkSession, tmp_path: Path) -> None:
    """Appends add up, an overwrite replaces, and every version stays readable by its position."""
    path = tmp_path / "t"
    for start in (0, 10):
        write(spark.range(start, start + 10), path)
    write(spark.range(100, 103), path, "overwrite")
    assert load(spark, path).count() == 3
    versions = load(spark, path, {"lookup.view": "versions"}).orderBy("version").collect()
    assert [row.operation for row in versions] == ["create", "append", "append", "overwrite"]
    counts = [load(spark, path, {"lookup.version": str(row.version)}).count() for row in versions]
    assert counts == [0, 10, 20, 3]
    files = load(spark, path, {"lookup.view": "files"}).collect()
    assert {row.write_id for row in files} == {3}
    assert sum(row.rows for row in files) == 3


def test_own_writes_are_read_in_cache_mode(spark: SparkSession, tmp_path: Path) -> None:
    """A scan, a join and a SQL function planned after a write of this driver see it, though the store is never asked again."""
    path = tmp_path / "t"
    write(spark.range(3).withColumn("v", sf.lit("old")), path)
    cached = {"lookup.metadata.source": "CACHE", "lookup.metadata.sync-interval": "-1"}
    full = {
        "lookup.cache": "FULL",
        "lookup.metadata.source": "CACHE",
        "lookup.full-cache.periodic-reload.interval": "1 h",
    }
    partial = {**cached, "lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "100"}
    modes = ({**cached, "lookup.cache": "NONE"}, partial, full)

    def joined(options: dict[str, str]) -> list[Any]:
        return [row.v for row in lookup_join(spark.range(5), str(path), "id", options=options).orderBy("id").collect()]

    for options in modes:
        assert joined(options) == ["old"] * 3 + [None] * 2
    write(spark.range(3, 5).withColumn("v", sf.lit("new")), path)
    for number, options in enumerate(modes):
        assert joined(options) == ["old"] * 3 + ["new"] * 2
        assert load(spark, path, {**options, "lookup.keys": "id"}).count() == 5
        register_lookup(spark, f"own_{number}", str(path), "id", options=options)
        assert spark.sql(f"SELECT own_{number}(4).v").collect() == [("new",)]


def test_a_task_that_is_tried_again_adds_no_rows(spark: SparkSession, tmp_path: Path) -> None:
    """A task whose first attempt dies after it has put files leaves its rows once, and no file beside them."""

    def fails_first(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        context = TaskContext.get()
        if context is not None and context.attemptNumber() == 0 and context.partitionId() == 1:
            raise RuntimeError("injected: the first attempt dies")

    path = tmp_path / "t"
    rows = spark.range(0, 1000, 1, 3).mapInArrow(fails_first, "id long")
    write(rows, path)
    assert load(spark, path).count() == 1000
    (written,) = [event for event in events(path) if event["kind"] == "write"]
    assert sorted(file.relative_to(path).as_posix() for file in data_files(path)) == sorted(
        f for f, _, _ in written["files"]
    )


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_failed_job_leaves_nothing(spark: SparkSession, tmp_path: Path, partitions: int) -> None:
    """A job that fails is aborted by an event, its files are removed, and no row of it is ever read."""

    def fails(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        context = TaskContext.get()
        if context is not None and context.partitionId() == partitions // 2:
            raise RuntimeError("injected: it never works")

    path = tmp_path / "t"
    write(spark.range(5), path)
    before = data_files(path)
    with pytest.raises(Exception, match="it never works"):
        write(spark.range(0, 1000, 1, partitions).mapInArrow(fails, "id long"), path)
    assert [event["kind"] for event in events(path)][-1] == "abort"
    # Of several tasks Spark lets some run on after the abort: what they put then is for vacuum.
    assert partitions > 1 or data_files(path) == before
    assert load(spark, path).count() == 5


def test_columns_are_added_when_asked_for(spark: SparkSession, tmp_path: Path) -> None:
    """A column that the table does not have is refused, or added with null in older rows; another type never fits."""
    path = tmp_path / "t"
    write(spark.range(2), path)
    wider = spark.range(2, 4).withColumn("note", sf.lit("x"))
    with pytest.raises(Exception, match=r"no column 'note'.*lookup.write.merge-schema"):
        write(wider, path)
    write(wider, path, lookup__write__merge_schema="true")
    write(spark.range(4, 5), path)
    assert [row.note for row in load(spark, path).orderBy("id").collect()] == [None, None, "x", "x", None]
    with pytest.raises(Exception, match="'note' is STRING in the table and INT in the rows"):
        write(spark.range(1).withColumn("note", sf.lit(1)), path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lookup.where": "id = 1"}, "lookup.where is for reads"),
        ({"lookup.version": "1"}, "lookup.version or lookup.valid-write-ids is for reads"),
        ({"lookup.view": "files"}, "lookup.view is for reads"),
        ({"lookup.format": "csv"}, "lookup.format has no meaning"),
        ({"lookup.wriet.timeout": "1 h"}, "did you mean lookup.write.timeout"),
    ],
)
def test_options_that_mean_nothing_for_a_write(
    spark: SparkSession, tmp_path: Path, options: dict[str, str], words: str
) -> None:
    """A write refuses what only a read can follow."""
    with pytest.raises(Exception, match=words):
        spark.range(1).write.format("lookupcache").mode("append").options(**options).save(str(tmp_path / "t"))


def test_places_that_cannot_be_written(spark: SparkSession, tmp_path: Path) -> None:
    """Files of somebody else are not added to, and a store without exclusive create is refused."""
    spark.range(3).write.parquet(str(tmp_path / "pq"))
    with pytest.raises(Exception, match=r"holds files that format.'lookupcache'. did not write"):
        write(spark.range(1), tmp_path / "pq")
    with pytest.raises(Exception, match=r"no exclusive create"):
        write(spark.range(1), "memory://bucket/t")


def test_a_table_on_s3(spark: SparkSession, s3: S3Server) -> None:
    """The same on S3: written, appended to, read and joined."""
    s3.client.create_bucket(Bucket="written")
    storage = {"lookup.storage.endpoint_url": s3.endpoint}
    for start in (0, 5):
        frame = spark.range(start, start + 5).write.format("lookupcache").mode("append")
        frame.options(**{"lookup.keys": "id", **storage}).save("s3a://written/t")
    assert load(spark, "s3a://written/t", storage).count() == 10
    found = lookup_join(spark.range(20), "s3://written/t", "id", how="inner", options=storage)
    assert found.count() == 10


def test_rows_are_upserted(spark: SparkSession, tmp_path: Path) -> None:
    """lookup.write.mode=upsert takes the place of the rows with the same keys, seen by a scan and by a join in each cache mode."""
    path, upsert = tmp_path / "t", {"lookup__write__mode": "upsert"}
    write(spark.range(100).withColumn("v", sf.lit(0)), path)
    write(spark.range(50, 150).withColumn("v", sf.lit(1)), path, **upsert)
    expected = [0] * 50 + [1] * 100
    assert [row.v for row in load(spark, path).orderBy("id").collect()] == expected
    partial = {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "1000"}
    for options in ({"lookup.cache": "NONE"}, partial, {"lookup.cache": "FULL"}):
        joined = lookup_join(spark.range(150), str(path), "id", strategy="cache", options=options)
        assert [row.v for row in joined.orderBy("id").collect()] == expected
    with pytest.raises(Exception, match=r"id = [01] and the new rows have it more than once"):
        write(spark.range(2).union(spark.range(2)).withColumn("v", sf.lit(2)), path, **upsert)
    with pytest.raises(Exception, match="is for Spark's append mode"):
        write(spark.range(2), path, "overwrite", **upsert)


# --- streams -------------------------------------------------------------------------------------------


def feed(directory: Path, number: int) -> None:
    directory.mkdir(exist_ok=True)
    new = directory / f".{number}"
    pq.write_table(pa.table({"id": [number * 10 + n for n in range(10)]}), new)
    new.rename(directory / f"{number:03}.parquet")


def run_stream(spark: SparkSession, home: Path, path: Path, **options: str) -> None:
    """Write all that is there, one file in each micro-batch."""
    source = spark.readStream.schema("id long").option("maxFilesPerTrigger", "1").parquet(str(home / "in"))
    query = (
        source.writeStream.format("lookupcache")
        .options(**{"lookup.keys": "id", **options})
        .option("checkpointLocation", str(home / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(path))
    )
    assert query.awaitTermination(120)


def ids(spark: SparkSession, path: Path) -> list[int]:
    return sorted(row.id for row in load(spark, path).collect())


def test_each_micro_batch_is_committed_once(spark: SparkSession, tmp_path: Path) -> None:
    """A batch whose commit Spark has forgotten, as after a crash between the two, is run again and not added again."""
    path = tmp_path / "t"
    for number in range(3):
        feed(tmp_path / "in", number)
    run_stream(spark, tmp_path, path)
    assert ids(spark, path) == list(range(30))
    for name in ("2", ".2.crc"):
        (tmp_path / "checkpoint" / "commits" / name).unlink(missing_ok=True)
    feed(tmp_path / "in", 3)
    run_stream(spark, tmp_path, path)
    assert ids(spark, path) == list(range(40))
    batches = [event["batch"][1] for event in events(path) if event["kind"] == "commit"]
    assert batches == [0, 1, 2, 3]
    committed = [file for event in events(path) if event["kind"] == "write" for file, _, _ in event["files"]]
    assert sorted(file.relative_to(path).as_posix() for file in data_files(path)) == sorted(committed)


def test_a_query_with_a_new_checkpoint_is_another(spark: SparkSession, tmp_path: Path) -> None:
    """Batches are told apart by their query: a new one begins at 0 and is committed all the same."""
    path = tmp_path / "t"
    feed(tmp_path / "in", 0)
    run_stream(spark, tmp_path, path)
    other = tmp_path / "other"
    feed_directory = other / "in"
    other.mkdir()
    feed(feed_directory, 5)
    run_stream(spark, other, path)
    assert ids(spark, path) == [*range(10), *range(50, 60)]


def test_a_stream_in_complete_mode_replaces(spark: SparkSession, tmp_path: Path) -> None:
    """outputMode('complete') leaves the last result."""
    for number in range(2):
        feed(tmp_path / "in", number)
    source = spark.readStream.schema("id long").option("maxFilesPerTrigger", "1").parquet(str(tmp_path / "in"))
    query = (
        source.groupBy((sf.col("id") % 2).alias("parity"))
        .count()
        .writeStream.format("lookupcache")
        .outputMode("complete")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(tmp_path / "t"))
    )
    assert query.awaitTermination(120)
    assert sorted(tuple(row) for row in load(spark, tmp_path / "t").collect()) == [(0, 10), (1, 10)]


def test_update_mode_upserts_once(spark: SparkSession, tmp_path: Path) -> None:
    """A function that writes what an aggregation updates, and fails after its commit: the batch runs again and is not written again."""
    path, fails = tmp_path / "t", [1, 2]

    def upsert(batch: DataFrame, number: int) -> None:
        own = {
            "lookup__write__mode": "upsert",
            "lookup__write__missing-columns": "KEEP",
            "lookup__write__batch": f"counts:{number}",
        }
        write(batch, path, **own)
        if number in fails:
            fails.remove(number)
            raise RuntimeError("after the commit")

    def run() -> None:
        source = spark.readStream.schema("id long").option("maxFilesPerTrigger", "1").parquet(str(tmp_path / "in"))
        counts = source.groupBy((sf.col("id") % 3).alias("id")).count()
        writer = counts.writeStream.outputMode("update").option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.trigger(availableNow=True).foreachBatch(upsert).start()
        assert query.awaitTermination(120)

    LookupTable(str(path), {"lookup.keys": "id"}).write(
        pa.table({"id": [0, 1], "count": [0, 0], "note": ["zero", "one"]})
    )
    for number in range(4):
        feed(tmp_path / "in", number)
    for _ in range(2):
        with pytest.raises(Exception, match="after the commit"):
            run()
    run()
    expected = {key: sum(1 for n in range(40) if n % 3 == key) for key in range(3)}
    found = {row.id: (row["count"], row.note) for row in load(spark, path).collect()}
    assert found == {0: (expected[0], "zero"), 1: (expected[1], "one"), 2: (expected[2], None)}
    commits = [event for event in events(path) if event["kind"] == "commit" and event.get("batch")]
    assert [event["batch"] for event in commits] == [["counts", number] for number in range(4)]


def test_a_stream_needs_a_path(spark: SparkSession, tmp_path: Path) -> None:
    """toTable hands on nothing that says where the table is: refused with what works."""
    feed(tmp_path / "in", 0)
    write(spark.range(1), tmp_path / "t")
    name = f"streamed_{next(_names)}"
    spark.sql(f"CREATE TABLE {name} USING lookupcache OPTIONS (path '{tmp_path / 't'}')")
    source = spark.readStream.schema("id long").parquet(str(tmp_path / "in"))
    with pytest.raises(Exception, match=r"start\(path\)"):
        query = source.writeStream.format("lookupcache").option("checkpointLocation", str(tmp_path / "c")).toTable(name)
        query.processAllAvailable()
    spark.sql(f"DROP TABLE {name}")
