"""Managed tables written by Spark: rows land once or not at all, whatever happens to a task, a job or a stream. And streams that follow the changes."""

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming import DataStreamWriter

from pyspark_lookup import LookupTable, OptionError, lookup_join
from pyspark_lookup.spark.source import DefaultSource
from tests.support.spark_tables import (
    MODES,
    NO_OPTIONS,
    catalog_options,
    collect_batches,
    each_batch,
    events,
    load,
    publish_version,
    stream_events,
)
from tests.support.sparks import DATA_SOURCES, needs

pytestmark = [needs(DATA_SOURCES), pytest.mark.spark]


def write(rows: DataFrame, path: object, options: Mapping[str, str] = NO_OPTIONS, mode: str = "append") -> None:
    rows.write.format("lookupcache").mode(mode).options(**{"lookup.keys": "id", **options}).save(str(path))


def read_log_events(path: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a kind in a table's log."""
    log_events = [json.loads(file.read_text()) for file in sorted((path / "_lookup" / "log").glob("*.json"))]
    return [event for event in log_events if event["kind"] == kind]


def assert_no_others(path: Path) -> None:
    """The data files are exactly those that the log names."""
    named = [file for event in read_log_events(path, "write") for file, _, _ in event["files"]]
    assert sorted(file.relative_to(path).as_posix() for file in path.glob("*/**/*.parquet")) == sorted(named)


def test_every_mode(spark: SparkSession, tmp_path: Path) -> None:
    """Appends add up, an upsert replaces the rows with its keys, an overwrite all; every mode sees it, and earlier versions stay readable."""
    path, upsert, expected = tmp_path / "t", {"lookup.write.mode": "upsert"}, dict[int, int]()
    modes = itertools.cycle(MODES.values())

    def check() -> None:
        assert {row.id: row.v for row in load(spark, path).collect()} == expected
        joined = lookup_join(spark.range(160), str(path), "id", strategy="cache", options=next(modes)).collect()
        assert sorted(map(tuple, joined)) == [(key, expected.get(key)) for key in range(160)]

    steps: list[tuple[range, Mapping[str, str], str]] = [
        (range(100), NO_OPTIONS, "append"),
        (range(50, 150), upsert, "append"),
        (range(150, 153), NO_OPTIONS, "append"),
        (range(7), NO_OPTIONS, "overwrite"),
    ]
    for v, (ids, options, mode) in enumerate(steps):
        write(spark.range(ids.start, ids.stop).withColumn("v", sf.lit(v)), path, options, mode)
        expected = {**(expected if mode == "append" else {}), **dict.fromkeys(ids, v)}
        check()
    with pytest.raises(Exception, match=r"key id = [01] is in the new rows more than once"):
        write(spark.range(2).union(spark.range(2)).withColumn("v", sf.lit(2)), path, upsert)
    with pytest.raises(Exception, match="is for the mode append"):
        write(spark.range(2), path, upsert, "overwrite")
    versions = sorted(load(spark, path, {"lookup.view": "versions"}).collect(), key=lambda row: row.version)
    assert [row.operation for row in versions] == ["create", "append", "upsert", "append", "overwrite"]
    assert load(spark, path, {"lookup.version": str(versions[2].version)}).count() == 150
    files = load(spark, path, {"lookup.view": "files"}).collect()
    assert sum(row.rows for row in files) == 7
    assert len({row.write_id for row in files}) == 1
    with LookupTable(str(path)) as table:
        table.delete(pa.table({"id": [expected.popitem()[0]]}))
        check()
        table.compact()
        check()


def failing(spark: SparkSession, partitions: int, attempts: int) -> DataFrame:
    """1,000 rows; the task of one partition dies in its first attempts, after it has put files."""

    def fails(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        context = TaskContext.get()
        if context is not None and context.partitionId() == partitions // 2 and context.attemptNumber() < attempts:
            raise RuntimeError("injected: this attempt dies")

    return spark.range(0, 1000, 1, partitions).mapInArrow(fails, "id long")


def test_tasks_that_die(spark: SparkSession, tmp_path: Path) -> None:
    """A task that dies after it has put files leaves its rows once, and no file beside them; of a job that fails no row is ever read."""
    path = tmp_path / "t"
    write(failing(spark, 3, attempts=1), path)
    assert load(spark, path).count() == 1000
    assert_no_others(path)
    for aborted, partitions in enumerate((1, 3), 1):
        with pytest.raises(Exception, match="this attempt dies"):
            write(failing(spark, partitions, attempts=99), path)
        assert len(read_log_events(path, "abort")) == aborted
        # Spark lets some of several tasks run on after the abort: vacuum removes what they write.
        if partitions == 1:
            assert_no_others(path)
    assert load(spark, path).count() == 1000


def test_what_is_refused(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """Writes are refused with options of reads, over other files, to a store without exclusive creation, and with columns that do not fit."""
    with pytest.raises(Exception, match=r"lookup\.where is for reads"):
        write(spark.range(1), tmp_path / "t", {"lookup.where": "id = 1"})
    noted = spark.range(1, 2).withColumn("note", sf.lit("x"))
    write(spark.range(1), tmp_path / "t")
    with pytest.raises(Exception, match=r"no column 'note'.*lookup.write.merge-schema"):
        write(noted, tmp_path / "t")
    write(noted, tmp_path / "t", {"lookup.write.merge-schema": "true"})
    assert sorted(load(spark, tmp_path / "t").collect()) == [(0, None), (1, "x")]
    with pytest.raises(Exception, match="'note' is STRING in the table and INT in the rows"):
        write(noted.withColumn("note", sf.lit(1)), tmp_path / "t")
    with pytest.raises(
        Exception, match=r"to write: column 'note' is interval year to month, which Spark does not pass to Python"
    ):
        write(noted.withColumn("note", sf.expr("INTERVAL '1-2' YEAR TO MONTH")), tmp_path / "t")
    with pytest.raises(
        Exception,
        match=r"does not guarantee that a file is created only if it does not exist: give a path on a local disk or on S3",
    ):
        write(spark.range(1), "memory://bucket/t")
    path = publish_version(tmp_path / "dim" / "a.parquet", 1)
    before = path.read_bytes()
    for place in (path, path.parent):
        with pytest.raises(Exception, match=r"(holds files|is a file) that format.'lookupcache'. did not write"):
            write(load(spark, path), place)
    spark.sql(f"CREATE TABLE {name} {catalog_options(path)}")
    with pytest.raises(Exception, match="it is not clear which table is written"):
        spark.sql(f"INSERT INTO {name} VALUES (1, 2)")
    with pytest.raises(Exception, match=r"is not \(or no longer\) a managed table"):
        spark.readStream.format("lookupcache").load(str(path)).writeStream.format("noop").start().processAllAvailable()
    assert ([*path.parent.iterdir()], path.read_bytes()) == ([path], before)


def feed(home: Path, *numbers: int) -> None:
    """Files of ten ids each."""
    for number in numbers:
        events(home / "in", number, range(number * 10, number * 10 + 10))


def run(writer: DataStreamWriter, home: Path, path: Path | None = None) -> None:
    """Run the stream until it has written all that is there."""
    writer = writer.option("checkpointLocation", str(home / "checkpoint")).trigger(availableNow=True)
    assert writer.start(None if path is None else str(path)).awaitTermination(120)


def test_each_micro_batch_is_committed_once(spark: SparkSession, tmp_path: Path) -> None:
    """A micro-batch whose commit Spark has forgotten runs again, and its rows are not added again. Batches of another query are other batches."""
    path, other_home = tmp_path / "t", tmp_path / "other"

    def append(home: Path) -> list[int]:
        writer = stream_events(spark, home / "in").select("id").writeStream.format("lookupcache")
        run(writer.option("lookup.keys", "id"), home, path)
        return sorted(row.id for row in load(spark, path).collect())

    feed(tmp_path, 0, 1, 2)
    assert append(tmp_path) == list(range(30))
    for name in ("2", ".2.crc"):
        (tmp_path / "checkpoint" / "commits" / name).unlink(missing_ok=True)
    feed(tmp_path, 3)
    assert append(tmp_path) == list(range(40))
    feed(other_home, 5)
    assert append(other_home) == [*range(40), *range(50, 60)]
    assert [event["batch"][1] for event in read_log_events(path, "commit")] == [0, 1, 2, 3, 0]
    assert_no_others(path)


def test_update_mode_upserts_once(spark: SparkSession, tmp_path: Path) -> None:
    """A function that writes what an aggregation updates, and fails after its commit: the batch runs again and is not written again."""
    path, fails = tmp_path / "t", [1]

    def upsert(batch: DataFrame, number: int) -> None:
        write_options = {"mode": "upsert", "missing-columns": "KEEP", "batch": f"counts:{number}"}
        write(batch, path, {f"lookup.write.{key}": value for key, value in write_options.items()})
        if number in fails:
            fails.remove(number)
            raise RuntimeError("after the commit")

    initial_rows = pa.table({"id": [0, 1], "count": [0, 0], "note": ["zero", "one"]})
    LookupTable(str(path), {"lookup.keys": "id"}).write(initial_rows)
    feed(tmp_path, *range(3))
    counts = stream_events(spark, tmp_path / "in").select("id").groupBy((sf.col("id") % 3).alias("id")).count()
    writer = counts.writeStream.outputMode("update").foreachBatch(upsert)
    with pytest.raises(Exception, match="after the commit"):
        run(writer, tmp_path)
    run(writer, tmp_path)
    assert sorted(load(spark, path).collect()) == [(0, 10, "zero"), (1, 10, "one"), (2, 10, None)]
    batches = [event["batch"] for event in read_log_events(path, "commit") if event.get("batch")]
    assert batches == [["counts", number] for number in range(3)]


def test_modes_and_places(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """outputMode('complete') leaves the last result. toTable does not say where the table is: it is refused, with what works."""
    feed(tmp_path, 0, 1)
    counts = stream_events(spark, tmp_path / "in").groupBy((sf.col("id") % 2).alias("parity")).count()
    writer = counts.writeStream.format("lookupcache").outputMode("complete")
    run(writer, tmp_path, tmp_path / "t")
    assert sorted(load(spark, tmp_path / "t").collect()) == [(0, 10), (1, 10)]
    spark.sql(f"CREATE TABLE {name} {catalog_options(tmp_path / 't')}")
    with pytest.raises(Exception, match=r"start\(path\)"):
        writer.option("checkpointLocation", str(tmp_path / "c")).toTable(name).processAllAvailable()


SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
CHANGES = {"lookup.view": "changes"}
Batches = list[list[tuple[Any, ...]]]


def rows(*ids: int, name: str = "a") -> pa.Table:
    return pa.table({"id": ids, "name": [name] * len(ids)}, SCHEMA)


class Desk:
    """A managed table and the streams that read it."""

    def __init__(self, spark: SparkSession, home: Path) -> None:
        self.spark, self.home, self.path = spark, home, str(home / "t")
        options = {"lookup.keys": "id", "lookup.cache.dir": str(home / "cache"), "lookup.write.compact-after": "0"}
        self.table = LookupTable(self.path, options)
        self.table.write(rows())

    def stream(self, options: Mapping[str, str] = NO_OPTIONS) -> DataFrame:
        return self.spark.readStream.format("lookupcache").options(**options).load(self.path)

    def run(self, options: Mapping[str, str] = NO_OPTIONS, checkpoint: str = "c") -> Batches:
        return collect_batches(self.stream(options), self.home / checkpoint)


@pytest.fixture
def desk(spark: SparkSession, tmp_path: Path) -> Desk:
    return Desk(spark, tmp_path)


def test_rows_that_are_added(desk: Desk) -> None:
    """A stream begins with the current rows and goes on with appended ones, each once, over restarts and compactions."""
    counts = desk.stream().groupBy("id").count().writeStream.outputMode("update").format("noop")
    run(counts, desk.home / "counts")
    desk.table.write(rows(1, 2))
    batches: Batches = []

    def collect_and_write(batch: DataFrame, number: int) -> None:
        batches.append(sorted(map(tuple, batch.collect())))
        desk.table.write(rows(3))

    each_batch(desk.stream(), desk.home / "c", collect_and_write)
    assert batches == [[(1, "a"), (2, "a")]]
    desk.table.compact()
    desk.table.write(rows(4))
    assert desk.run() == [[(3, "a"), (4, "a")]]
    position = desk.table.upsert(rows(1, name="b"))
    with pytest.raises(Exception, match=rf"position {position} \(upsert\) removes rows.*lookup.view = changes"):
        desk.run()


def test_a_running_stream_keeps_up(desk: Desk) -> None:
    """The next micro-batch of a running stream has the commit, of whatever kind, with its changes and its position."""
    desk.table.write(rows(1, 2))
    batches: Batches = []

    def keep(batch: DataFrame, number: int) -> None:
        batches.append(sorted(map(tuple, batch.drop("_commit_timestamp").collect())))

    writer = desk.stream(CHANGES).writeStream.foreachBatch(keep)
    query = writer.option("checkpointLocation", str(desk.home / "c")).start()
    query.processAllAvailable()
    positions = []
    for step in (
        lambda: desk.table.write(rows(3)),
        lambda: desk.table.upsert(rows(2, 4, name="b")),
        lambda: desk.table.delete(pa.table({"id": [1]})),
        lambda: desk.table.write(rows(9), "overwrite"),
    ):
        positions.append(step())
        query.processAllAvailable()
    append_position, upsert_position, delete_position, overwrite_position = positions
    assert [row[:3] for row in batches[0]] == [(1, "a", "insert"), (2, "a", "insert")]
    assert batches[1:] == [
        [(3, "a", "insert", append_position)],
        [
            (2, "a", "update_preimage", upsert_position),
            (2, "b", "update_postimage", upsert_position),
            (4, "b", "insert", upsert_position),
        ],
        [(1, "a", "delete", delete_position)],
        [
            (2, "b", "delete", overwrite_position),
            (3, "a", "delete", overwrite_position),
            (4, "b", "delete", overwrite_position),
            (9, "a", "insert", overwrite_position),
        ],
    ]
    progress = query.lastProgress
    query.stop()
    assert f'"position": {overwrite_position}' in str(progress.sources[0].endOffset).replace("'", '"')


def test_where_it_begins(desk: Desk) -> None:
    """LATEST begins with the next commit, also of a stream that is started again. Options that a stream cannot have are errors that say what works."""
    first = desk.table.write(rows(1))
    assert desk.run({"lookup.stream.start": "LATEST"}) == []
    desk.table.write(rows(3))
    assert desk.run({"lookup.stream.start": "LATEST"}) == [[(3, "a")]]
    for options, words in (
        ({"lookup.stream.start": "99"}, "lookup.stream.start = '99': the log of the table ends at"),
        ({"lookup.stream.start": "0"}, "SNAPSHOT, LATEST or a log position"),
        ({"lookup.stream.begin": "1"}, "unknown option lookup.stream.begin"),
        ({"lookup.stream.max-rows-per-trigger": "1", "lookup.stream.max-files-per-trigger": "1"}, "give only one"),
        ({"lookup.version": str(first)}, "use lookup.stream.start"),
        ({"lookup.view": "files"}, "use data or changes"),
        ({"lookup.write.mode": "upsert"}, "lookup.write.mode is for writes"),
        ({"lookup.changes-from": "1"}, "lookup.changes-from is for batch reads: in a stream use lookup.stream.start"),
    ):
        with pytest.raises(OptionError, match=words):
            source = DefaultSource({"path": desk.path, **options})
            source.streamReader(source.schema()).initialOffset()
    with pytest.raises(Exception, match=r"needs lookup.changes-from in a batch"):
        load(desk.spark, desk.path, CHANGES).collect()


def test_columns_and_predicates(desk: Desk) -> None:
    """lookup.columns and lookup.where apply to the rows; the columns that describe a change come after them."""
    desk.table.write(rows(1, 2, 3))
    desk.table.upsert(rows(1, 3, name="b"))
    options = {"lookup.columns": "name", "lookup.where": "id >= 2", "lookup.stream.start": "1"}
    (changes,) = desk.run({**CHANGES, **options})
    kinds = [row[:2] for row in changes]
    assert kinds == [("a", "insert"), ("a", "insert"), ("a", "update_preimage"), ("b", "update_postimage")]


def test_into_another_managed_table(desk: Desk) -> None:
    """Upserts that a stream carries from one managed table into another make it equal, each commit once."""
    copy = desk.home / "copy"
    for number in range(2):
        desk.table.upsert(rows(number, number + 1, name=str(number)))
        stream = desk.stream(CHANGES).filter("_change_type IN ('insert', 'update_postimage')")
        writer = stream.drop("_change_type", "_log_position", "_commit_timestamp").writeStream.format("lookupcache")
        run(writer.options(**{"lookup.keys": "id", "lookup.write.mode": "upsert"}), desk.home, copy)
    assert LookupTable(str(copy)).scan().sort_by("id") == desk.table.scan().sort_by("id")
