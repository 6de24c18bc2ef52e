"""Managed tables written by Spark: rows land once or not at all, whatever becomes of a task, a job or a stream. By name: `test_sql`."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import functions as sf

from pyspark_lookup import LookupTable, lookup_join, register_lookup
from tests.fuzzing import by_day
from tests.spark.common import MODES, NO_OPTIONS, catalog_options, load, put, saved
from tests.test_by_key import ALL_KEYS, Model
from tests.test_by_key import MODES as KEY_MODES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import DataStreamWriter

    from tests.s3server import S3Server

pytestmark = pytest.mark.spark


def write(rows: DataFrame, path: object, options: Mapping[str, str] = NO_OPTIONS, mode: str = "append") -> None:
    rows.write.format("lookupcache").mode(mode).options(**{"lookup.keys": "id", **options}).save(str(path))


def log_of(path: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a kind in a table's log."""
    found = [json.loads(file.read_text()) for file in sorted((path / "_lookup" / "log").glob("*.json"))]
    return [event for event in found if event["kind"] == kind]


def assert_no_others(path: Path) -> None:
    """The files that are there are those that the log names."""
    named = [file for event in log_of(path, "write") for file, _, _ in event["files"]]
    assert sorted(file.relative_to(path).as_posix() for file in path.glob("*/**/*.parquet")) == sorted(named)


def test_rows_of_all_types_come_back(spark: SparkSession, tmp_path: Path) -> None:
    """What is written is what is read, to the microsecond and the last digit, through scan and lookup."""
    rows = spark.sql(
        "SELECT id, CAST(id AS STRING) AS s, id / 3 AS d, CAST(id AS DECIMAL(20, 5)) AS e, DATE '2026-01-01' AS day, "
        "TIMESTAMP '2026-01-01 10:00:00.123456' AS t, TIMESTAMP_NTZ '2026-01-01 10:00:00.123456' AS n, array(id, NULL) AS l, "
        "named_struct('x', id) AS st, map('k', id) AS m, CAST('ab' AS BINARY) AS b, id > 5 AS flag FROM range(10)"
    )
    write(rows, tmp_path / "t")
    joined = lookup_join(spark.range(10), str(tmp_path / "t"), "id")
    for found in (load(spark, tmp_path / "t"), joined):
        assert found.orderBy("id").collect() == rows.orderBy("id").collect()


def test_every_mode(spark: SparkSession, tmp_path: Path) -> None:
    """Appends add up, an upsert takes the place of the rows with its keys, an overwrite that of all; scans and joins in each cache
    mode see them, and every version stays readable by its position."""
    path, upsert = tmp_path / "t", {"lookup.write.mode": "upsert"}
    write(spark.range(100).withColumn("v", sf.lit(0)), path)
    write(spark.range(50, 150).withColumn("v", sf.lit(1)), path, upsert)
    expected = [0] * 50 + [1] * 100
    assert [row.v for row in load(spark, path).orderBy("id").collect()] == expected
    for options in MODES.values():
        joined = lookup_join(spark.range(150), str(path), "id", strategy="cache", options=options)
        assert [row.v for row in joined.orderBy("id").collect()] == expected
    with pytest.raises(Exception, match=r"id = [01] and the new rows have it more than once"):
        write(spark.range(2).union(spark.range(2)).withColumn("v", sf.lit(2)), path, upsert)
    with pytest.raises(Exception, match="is for Spark's append mode"):
        write(spark.range(2), path, upsert, "overwrite")
    write(spark.range(150, 153).withColumn("v", sf.lit(2)), path)
    write(spark.range(7).withColumn("v", sf.lit(3)), path, mode="overwrite")
    versions = load(spark, path, {"lookup.view": "versions"}).orderBy("version").collect()
    assert [row.operation for row in versions] == ["create", "append", "upsert", "append", "overwrite"]
    counts = [load(spark, path, {"lookup.version": str(row.version)}).count() for row in versions]
    assert counts == [0, 100, 150, 153, 7]
    files = load(spark, path, {"lookup.view": "files"}).collect()
    assert sum(row.rows for row in files) == 7
    assert len({row.write_id for row in files}) == 1


def test_own_writes_are_read_in_cache_mode(spark: SparkSession, tmp_path: Path) -> None:
    """A scan, a join and a SQL function planned after a write of this driver see it, though the store is never asked again."""
    path, cache = tmp_path / "t", {"lookup.metadata.source": "CACHE"}
    write(spark.range(3).withColumn("v", sf.lit("old")), path)
    ends = {name: {"lookup.metadata.sync-interval": "-1"} for name in ("none", "partial")}
    ends["full"] = {"lookup.full-cache.periodic-reload.interval": "1 h"}
    modes = {name: {**mode, **cache, **ends[name]} for name, mode in MODES.items()}

    def joined(options: dict[str, str]) -> list[Any]:
        return [row.v for row in lookup_join(spark.range(5), str(path), "id", options=options).orderBy("id").collect()]

    for options in modes.values():
        assert joined(options) == ["old"] * 3 + [None] * 2
    write(spark.range(3, 5).withColumn("v", sf.lit("new")), path)
    for name, options in modes.items():
        assert joined(options) == ["old"] * 3 + ["new"] * 2
        assert load(spark, path, {**options, "lookup.keys": "id"}).count() == 5
        register_lookup(spark, f"own_{name}", str(path), "id", options=options)
        assert spark.sql(f"SELECT own_{name}(4).v").collect() == [("new",)]


def failing(spark: SparkSession, partitions: int, attempts: int) -> DataFrame:
    """1,000 rows; the task of one partition dies in its first attempts, after it has put files."""

    def fails(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        context = TaskContext.get()
        if context is not None and context.partitionId() == partitions // 2 and context.attemptNumber() < attempts:
            raise RuntimeError("injected: this attempt dies")

    return spark.range(0, 1000, 1, partitions).mapInArrow(fails, "id long")


def test_a_task_that_is_tried_again_adds_no_rows(spark: SparkSession, tmp_path: Path) -> None:
    """A task whose first attempt dies after it has put files leaves its rows once, and no file beside them."""
    write(failing(spark, 3, attempts=1), tmp_path / "t")
    assert load(spark, tmp_path / "t").count() == 1000
    assert_no_others(tmp_path / "t")


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_failed_job_leaves_nothing(spark: SparkSession, tmp_path: Path, partitions: int) -> None:
    """A job that fails is aborted by an event, its files are removed, and no row of it is ever read."""
    path = tmp_path / "t"
    write(spark.range(5), path)
    with pytest.raises(Exception, match="this attempt dies"):
        write(failing(spark, partitions, attempts=99), path)
    assert len(log_of(path, "abort")) == 1
    if partitions == 1:  # of several tasks Spark lets some run on after the abort: what they put then is for vacuum
        assert_no_others(path)
    assert load(spark, path).count() == 5


def test_columns_are_added_when_asked_for(spark: SparkSession, tmp_path: Path) -> None:
    """A column that the table does not have is refused, or added with null in older rows; another type never fits."""
    path = tmp_path / "t"
    write(spark.range(2), path)
    wider = spark.range(2, 4).withColumn("note", sf.lit("x"))
    with pytest.raises(Exception, match=r"no column 'note'.*lookup.write.merge-schema"):
        write(wider, path)
    write(wider, path, {"lookup.write.merge-schema": "true"})
    write(spark.range(4, 5), path)
    assert [row.note for row in load(spark, path).orderBy("id").collect()] == [None, None, "x", "x", None]
    with pytest.raises(Exception, match="'note' is STRING in the table and INT in the rows"):
        write(spark.range(1).withColumn("note", sf.lit(1)), path)


def test_what_is_refused(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """A write refuses what only a read can follow, files of somebody else, which stay as they were, and a store without exclusive
    create; a plain table is no stream."""
    for options, words in (
        ({"lookup.where": "id = 1"}, "lookup.where is for reads"),
        ({"lookup.version": "1"}, "lookup.version or lookup.valid-write-ids is for reads"),
        ({"lookup.view": "files"}, "lookup.view is for reads"),
        ({"lookup.format": "csv"}, "lookup.format has no meaning"),
        ({"lookup.wriet.timeout": "1 h"}, "did you mean lookup.write.timeout"),
    ):
        with pytest.raises(Exception, match=words):
            write(spark.range(1), tmp_path / "t", options)
    with pytest.raises(Exception, match=r"no exclusive create"):
        write(spark.range(1), "memory://bucket/t")
    path = put(tmp_path / "dim" / "a.parquet", 1)
    before = path.read_bytes()
    for place in (path, path.parent):
        with pytest.raises(Exception, match=r"holds files that format.'lookupcache'. did not write"):
            write(load(spark, path), place)
    spark.sql(f"CREATE TABLE {name} {catalog_options(path)}")
    with pytest.raises(Exception, match="which table is written cannot be told"):
        spark.sql(f"INSERT INTO {name} VALUES (1, 2)")
    with pytest.raises(Exception, match="is no managed table"):
        spark.readStream.format("lookupcache").load(str(path)).writeStream.format("noop").start().processAllAvailable()
    assert ([*path.parent.iterdir()], path.read_bytes()) == ([path], before)


def test_a_table_on_s3(spark: SparkSession, s3: S3Server) -> None:
    """The same on S3: written, appended to, read and joined."""
    s3.client.create_bucket(Bucket="written")
    storage = {"lookup.storage.endpoint_url": s3.endpoint}
    for start in (0, 5):
        write(spark.range(start, start + 5), "s3a://written/t", storage)
    assert load(spark, "s3a://written/t", storage).count() == 10
    assert lookup_join(spark.range(20), "s3://written/t", "id", how="inner", options=storage).count() == 10


STEPS = ["write", "write", "write", "begin", "commit", "compact", "vacuum"]
KINDS = ["append", "append", "upsert", "upsert", "delete", "overwrite"]


@pytest.mark.parametrize("mode", by_day(KEY_MODES, 3))
def test_joins_are_as_the_model(spark: SparkSession, tmp_path: Path, mode: str) -> None:
    """A random history of all kinds of writes and upkeep: after each step a left join finds for every key what the model has."""
    draw = random.Random(f"joins {mode}")
    model = Model(tmp_path, KEY_MODES[mode], draw.choice([0, 4000, 2**26]))
    asked = spark.createDataFrame([*ALL_KEYS, (None, "a"), (99, "b")], "id long, part string")
    options = {**model.own, **KEY_MODES[mode]}
    for _ in range(14):
        kind = draw.choice(KINDS)
        chosen = draw.sample(ALL_KEYS, draw.randrange(1, 8))
        model.take(draw.choice(STEPS), (kind, chosen), draw.random() < 0.5)
        joined = lookup_join(asked, model.path, ["id", "part"], columns=["v"], strategy="cache", options=options)
        found = sorted(map(tuple, joined.collect()), key=repr)
        expected = [row for row in model.expected if row[:2] in set(ALL_KEYS)]
        without = [
            (*key, None) for key in [*ALL_KEYS, (None, "a"), (99, "b")] if key not in {row[:2] for row in expected}
        ]
        assert found == sorted([*expected, *without], key=repr)
    model.check()
    model.close()


# --- streams -------------------------------------------------------------------------------------------


def feed(home: Path, *numbers: int) -> None:
    """Files of ten ids each."""
    for number in numbers:
        saved(home / "in" / f"{number:03}.parquet", {"id": range(number * 10, number * 10 + 10)})


def stream_of(spark: SparkSession, home: Path) -> DataFrame:
    """What was fed, one file in each micro-batch."""
    return spark.readStream.schema("id long").option("maxFilesPerTrigger", "1").parquet(str(home / "in"))


def run(writer: DataStreamWriter, home: Path, path: Path | None = None) -> None:
    """Write all that is there."""
    writer = writer.option("checkpointLocation", str(home / "checkpoint")).trigger(availableNow=True)
    assert writer.start(None if path is None else str(path)).awaitTermination(120)


def test_each_micro_batch_is_committed_once(spark: SparkSession, tmp_path: Path) -> None:
    """A batch whose commit Spark has forgotten, as after a crash between the two, is run again and not added again. Batches are told
    apart by their query: one with a new checkpoint begins at 0 and is committed all the same."""
    path, other = tmp_path / "t", tmp_path / "other"

    def append(home: Path) -> list[int]:
        run(stream_of(spark, home).writeStream.format("lookupcache").option("lookup.keys", "id"), home, path)
        return sorted(row.id for row in load(spark, path).collect())

    feed(tmp_path, 0, 1, 2)
    assert append(tmp_path) == list(range(30))
    for name in ("2", ".2.crc"):
        (tmp_path / "checkpoint" / "commits" / name).unlink(missing_ok=True)
    feed(tmp_path, 3)
    assert append(tmp_path) == list(range(40))
    feed(other, 5)
    assert append(other) == [*range(40), *range(50, 60)]
    assert [event["batch"][1] for event in log_of(path, "commit")] == [0, 1, 2, 3, 0]
    assert_no_others(path)


def test_a_stream_in_complete_mode_replaces(spark: SparkSession, tmp_path: Path) -> None:
    """outputMode('complete') leaves the last result."""
    feed(tmp_path, 0, 1)
    counts = stream_of(spark, tmp_path).groupBy((sf.col("id") % 2).alias("parity")).count()
    run(counts.writeStream.format("lookupcache").outputMode("complete"), tmp_path, tmp_path / "t")
    assert load(spark, tmp_path / "t").orderBy("parity").collect() == [(0, 10), (1, 10)]


def test_update_mode_upserts_once(spark: SparkSession, tmp_path: Path) -> None:
    """A function that writes what an aggregation updates, and fails after its commit: the batch runs again and is not written again."""
    path, fails = tmp_path / "t", [1, 2]

    def upsert(batch: DataFrame, number: int) -> None:
        own = {"mode": "upsert", "missing-columns": "KEEP", "batch": f"counts:{number}"}
        write(batch, path, {f"lookup.write.{key}": value for key, value in own.items()})
        if number in fails:
            fails.remove(number)
            raise RuntimeError("after the commit")

    there = pa.table({"id": [0, 1], "count": [0, 0], "note": ["zero", "one"]})
    LookupTable(str(path), {"lookup.keys": "id"}).write(there)
    feed(tmp_path, *range(4))
    counts = stream_of(spark, tmp_path).groupBy((sf.col("id") % 3).alias("id")).count()
    writer = counts.writeStream.outputMode("update").foreachBatch(upsert)
    for _ in range(2):
        with pytest.raises(Exception, match="after the commit"):
            run(writer, tmp_path)
    run(writer, tmp_path)
    expected = {key: sum(1 for n in range(40) if n % 3 == key) for key in range(3)}
    found = {row.id: (row["count"], row.note) for row in load(spark, path).collect()}
    assert found == {0: (expected[0], "zero"), 1: (expected[1], "one"), 2: (expected[2], None)}
    batches = [event["batch"] for event in log_of(path, "commit") if event.get("batch")]
    assert batches == [["counts", number] for number in range(4)]


def test_a_stream_needs_a_path(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """toTable hands on nothing that says where the table is: refused with what works."""
    feed(tmp_path, 0)
    write(spark.range(1), tmp_path / "t")
    spark.sql(f"CREATE TABLE {name} {catalog_options(tmp_path / 't')}")
    writer = stream_of(spark, tmp_path).writeStream.format("lookupcache")
    with pytest.raises(Exception, match=r"start\(path\)"):
        writer.option("checkpointLocation", str(tmp_path / "c")).toTable(name).processAllAvailable()
