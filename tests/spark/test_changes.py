"""The change stream of a managed table through Spark: what each micro-batch has, and where it goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from pyspark_lookup import LookupTable
from tests.versions import needs_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from tests.s3server import S3Server

pytestmark = pytest.mark.spark

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
CHANGES = {"lookup.view": "changes"}
LIMITED = needs_spark(4, 2, "limits of a micro-batch")


def rows(*ids: int, name: str = "a") -> pa.Table:
    return pa.table({"id": ids, "name": [name] * len(ids)}, SCHEMA)


class Desk:
    """A managed table and the streams that read it."""

    def __init__(self, spark: SparkSession, home: Path) -> None:
        self.spark, self.home, self.path = spark, home, str(home / "t")
        own = {"lookup.keys": "id", "lookup.cache.dir": str(home / "cache"), "lookup.write.compact-after": "0"}
        self.table = LookupTable(self.path, own)
        self.table.write(rows())
        self.batches: list[list[tuple[Any, ...]]] = []
        self._running: list[StreamingQuery] = []

    def stream(self, options: dict[str, str] | None = None) -> DataFrame:
        return self.spark.readStream.format("lookupcache").options(**(options or {})).load(self.path)

    def start(self, stream: DataFrame, checkpoint: str = "c", **trigger: Any) -> StreamingQuery:
        def keep(batch: DataFrame, number: int) -> None:
            self.batches.append(sorted(tuple(row) for row in batch.collect()))

        writer = stream.writeStream.foreachBatch(keep).option("checkpointLocation", str(self.home / checkpoint))
        query = (writer.trigger(**trigger) if trigger else writer).start()
        self._running.append(query)
        return query

    def run(self, options: dict[str, str] | None = None, checkpoint: str = "c") -> list[list[tuple[Any, ...]]]:
        """The micro-batches of what there is."""
        self.batches = []
        assert self.start(self.stream(options), checkpoint, availableNow=True).awaitTermination(120)
        # Spark begins a query with a micro-batch, also where there is nothing.
        return [batch for batch in self.batches if batch]

    def close(self) -> None:
        for query in self._running:
            query.stop()
        self.table.close()


@pytest.fixture
def desk(spark: SparkSession, tmp_path: Path) -> Iterator[Desk]:
    found = Desk(spark, tmp_path)
    yield found
    found.close()


def test_rows_that_are_added(desk: Desk) -> None:
    """A stream begins with the rows there are and goes on with what is appended, each once, also over a restart and a compaction."""
    desk.table.write(rows(1, 2))
    assert desk.run() == [[(1, "a"), (2, "a")]]
    desk.table.write(rows(3))
    desk.table.compact()
    desk.table.write(rows(4))
    assert desk.run() == [[(3, "a"), (4, "a")]]
    assert desk.run() == []
    position = desk.table.upsert(rows(1, name="b"))
    with pytest.raises(Exception, match=rf"position {position} \(upsert\) takes rows away.*lookup.view = changes"):
        desk.run()


def test_a_running_stream_keeps_up(desk: Desk) -> None:
    """Commits of all kinds come to a running stream in the next micro-batch, with what they did and their position."""
    desk.table.write(rows(1, 2))
    query = desk.start(desk.stream(CHANGES))
    query.processAllAvailable()
    steps: list[Callable[[], int]] = [
        lambda: desk.table.write(rows(3)),
        lambda: desk.table.upsert(rows(2, 4, name="b")),
        lambda: desk.table.delete(pa.table({"id": [1]})),
        lambda: desk.table.write(rows(9), "overwrite"),
    ]
    positions = []
    for step in steps:
        positions.append(step())
        query.processAllAvailable()
    one, two, three, four = positions
    assert [row[:3] for row in desk.batches[0]] == [(1, "a", "insert"), (2, "a", "insert")]
    assert desk.batches[1:] == [
        [(3, "a", "insert", one)],
        [(2, "a", "update_preimage", two), (2, "b", "update_postimage", two), (4, "b", "insert", two)],
        [(1, "a", "delete", three)],
        [(2, "b", "delete", four), (3, "a", "delete", four), (4, "b", "delete", four), (9, "a", "insert", four)],
    ]
    progress = query.lastProgress
    assert progress is not None
    assert f'"position": {four}' in str(progress.sources[0].endOffset).replace("'", '"')


@pytest.mark.parametrize(
    ("limit", "sizes"),
    [
        ({}, [8]),
        pytest.param({"lookup.stream.max-rows-per-trigger": "4"}, [4, 4], marks=LIMITED),
        pytest.param({"lookup.stream.max-rows-per-trigger": "5"}, [4, 4], marks=LIMITED),
        pytest.param({"lookup.stream.max-rows-per-trigger": "1"}, [2, 2, 2, 2], marks=LIMITED),
        pytest.param({"lookup.stream.max-files-per-trigger": "3"}, [6, 2], marks=LIMITED),
        pytest.param({"lookup.stream.max-bytes-per-trigger": "1"}, [2, 2, 2, 2], marks=LIMITED),
        pytest.param({"lookup.stream.max-bytes-per-trigger": "1 GiB"}, [8], marks=LIMITED),
    ],
)
def test_limits(desk: Desk, limit: dict[str, str], sizes: list[int]) -> None:
    """A micro-batch takes whole commits within its limit, and one at least."""
    for number in range(4):
        desk.table.write(rows(number, 100 + number))
    found = desk.run({"lookup.stream.start": "1", **limit})
    assert [len(batch) for batch in found] == sizes
    assert sorted(row for batch in found for row in batch) == sorted((n, "a") for n in [0, 1, 2, 3, 100, 101, 102, 103])


def test_where_it_begins(desk: Desk) -> None:
    """With the rows there are, with what comes, or after a log position that the log has."""
    first = desk.table.write(rows(1))
    desk.table.write(rows(2))
    assert desk.run({"lookup.stream.start": "LATEST"}, "latest") == []
    assert desk.run({"lookup.stream.start": str(first)}, "position") == [[(2, "a")]]
    assert desk.run({"lookup.stream.start": "snapshot"}, "snapshot") == [[(1, "a"), (2, "a")]]
    desk.table.write(rows(3))
    for checkpoint in ("latest", "position", "snapshot"):
        assert desk.run({"lookup.stream.start": "LATEST"}, checkpoint) == [[(3, "a")]]
    with pytest.raises(Exception, match=r"lookup.stream.start = '99': the log of the table ends at"):
        desk.run({"lookup.stream.start": "99"}, "beyond")


def test_available_now_ends(desk: Desk) -> None:
    """What is committed after a run has begun is for the next one."""
    desk.table.write(rows(1))

    def late(batch: DataFrame, number: int) -> None:
        desk.batches.append(sorted(tuple(row) for row in batch.collect()))
        desk.table.write(rows(100 + number))

    writer = desk.stream().writeStream.foreachBatch(late).option("checkpointLocation", str(desk.home / "c"))
    assert writer.trigger(availableNow=True).start().awaitTermination(120)
    assert desk.batches == [[(1, "a")]]
    assert desk.run() == [[(100, "a")]]


def test_columns_and_predicates(desk: Desk) -> None:
    """lookup.columns and lookup.where are those of its rows; the columns of changes are beside them."""
    desk.table.write(rows(1, 2, 3))
    options = {**CHANGES, "lookup.columns": "name", "lookup.where": "id >= 2", "lookup.stream.start": "1"}
    desk.table.upsert(rows(1, 3, name="b"))
    (found,) = desk.run(options)
    kinds = [row[:2] for row in found]
    assert kinds == [("a", "insert"), ("a", "insert"), ("a", "update_preimage"), ("b", "update_postimage")]


def test_a_table_that_was_made_anew(desk: Desk) -> None:
    """A stream does not go on with another table of the same name."""
    desk.table.write(rows(1))
    desk.run()
    shutil.rmtree(desk.path)
    LookupTable(desk.path, {"lookup.keys": "id", "lookup.cache.dir": str(desk.home / "other")}).write(rows(5))
    with pytest.raises(Exception, match="dropped and created anew since this stream began"):
        desk.run()


def test_what_is_refused(desk: Desk, spark: SparkSession) -> None:
    """Options that a stream cannot have, two limits, and changes in a batch read: errors that say what works."""
    desk.table.write(rows(1))
    for options, words in (
        ({"lookup.version": "3"}, "use lookup.stream.start"),
        ({"lookup.view": "files"}, "use data or changes"),
        ({"lookup.stream.max-rows-per-trigger": "1", "lookup.stream.max-files-per-trigger": "1"}, "give one"),
        ({"lookup.stream.start": "0"}, "SNAPSHOT, LATEST or a log position"),
        ({"lookup.stream.begin": "1"}, "unknown option lookup.stream.begin"),
    ):
        with pytest.raises(Exception, match=words):
            desk.run(options, "refused")
    with pytest.raises(Exception, match=r"changes are read by spark.readStream"):
        spark.read.format("lookupcache").options(**CHANGES).load(desk.path).collect()


def test_a_catalog_table(desk: Desk, spark: SparkSession) -> None:
    """readStream.table streams the table that the catalog names, with the options it was created with."""
    desk.table.write(rows(1))
    spark.sql(f"CREATE TABLE streamed USING lookupcache OPTIONS (path '{desk.path}')")
    try:
        assert desk.start(spark.readStream.table("streamed"), availableNow=True).awaitTermination(120)
    finally:
        spark.sql("DROP TABLE streamed")
    assert desk.batches == [[(1, "a")]]


def test_into_another_managed_table(desk: Desk, spark: SparkSession) -> None:
    """Upserts that a stream carries from one managed table into another make it equal, each commit once."""
    copy = str(desk.home / "copy")

    def run() -> None:
        stream = desk.stream(CHANGES).filter("_change_type IN ('insert', 'update_postimage')")
        writer = stream.drop("_change_type", "_log_position").writeStream.format("lookupcache")
        options = {"lookup.keys": "id", "lookup.write.mode": "upsert", "checkpointLocation": str(desk.home / "copied")}
        assert writer.options(**options).trigger(availableNow=True).start(copy).awaitTermination(120)

    for number in range(3):
        desk.table.upsert(rows(number, number + 1, name=str(number)))
        run()
    held = LookupTable(copy, {"lookup.cache.dir": str(desk.home / "cache")})
    assert held.scan().sort_by("id") == desk.table.scan().sort_by("id")


def test_on_s3(spark: SparkSession, s3: S3Server, tmp_path: Path) -> None:
    """The same from S3."""
    path = "s3://streamed/t"
    s3.client.create_bucket(Bucket="streamed")
    storage = {"lookup.storage.endpoint_url": s3.endpoint}
    table = LookupTable(path, {**storage, "lookup.keys": "id", "lookup.cache.dir": str(tmp_path / "c")})
    table.write(rows(1, 2))
    table.upsert(rows(2, name="b"))
    found = []

    def keep(batch: DataFrame, number: int) -> None:
        found.extend(sorted(tuple(row)[:3] for row in batch.collect()))

    stream = (
        spark.readStream.format("lookupcache").options(**storage, **CHANGES, **{"lookup.stream.start": "1"}).load(path)
    )
    writer = stream.writeStream.foreachBatch(keep).option("checkpointLocation", str(tmp_path / "checkpoint"))
    assert writer.trigger(availableNow=True).start().awaitTermination(120)
    assert found == [
        (1, "a", "insert"),
        (2, "a", "insert"),
        (2, "a", "update_preimage"),
        (2, "b", "update_postimage"),
    ]


def test_an_aggregation_over_a_table_without_rows(spark: SparkSession, desk: Desk) -> None:
    """Spark asks for a micro-batch from the beginning to the beginning: it has no rows, and is no error."""
    counts = desk.stream().groupBy("id").count()
    writer = counts.writeStream.outputMode("update").option("checkpointLocation", str(desk.home / "counts"))
    assert (
        writer.foreachBatch(lambda batch, number: desk.batches.append(batch.collect()))
        .trigger(availableNow=True)
        .start()
        .awaitTermination(120)
    )
    assert not any(desk.batches)
