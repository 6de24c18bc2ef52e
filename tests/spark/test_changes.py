"""The change stream of a managed table through Spark: what each micro-batch has, and where it goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from pyspark_lookup import LookupTable
from tests.spark.common import NO_OPTIONS, batches_of, load
from tests.versions import needs_spark

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession

    from tests.s3server import S3Server

pytestmark = pytest.mark.spark

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
CHANGES = {"lookup.view": "changes"}
Batches = list[list[tuple[Any, ...]]]


def rows(*ids: int, name: str = "a") -> pa.Table:
    return pa.table({"id": ids, "name": [name] * len(ids)}, SCHEMA)


class Desk:
    """A managed table and the streams that read it."""

    def __init__(self, spark: SparkSession, home: Path, path: str, storage: Mapping[str, str] = NO_OPTIONS) -> None:
        self.spark, self.home, self.path, self._storage = spark, home, path, storage
        own = {"lookup.keys": "id", "lookup.cache.dir": str(home / "cache"), "lookup.write.compact-after": "0"}
        self.table = LookupTable(path, {**storage, **own})
        self.table.write(rows())

    def stream(self, options: Mapping[str, str] = NO_OPTIONS) -> DataFrame:
        return self.spark.readStream.format("lookupcache").options(**self._storage, **options).load(self.path)

    def run(self, options: Mapping[str, str] = NO_OPTIONS, checkpoint: str = "c") -> Batches:
        """The micro-batches of what there is."""
        return batches_of(self.stream(options), self.home / checkpoint)


@pytest.fixture
def desk(spark: SparkSession, tmp_path: Path) -> Iterator[Desk]:
    found = Desk(spark, tmp_path, str(tmp_path / "t"))
    yield found
    found.table.close()


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
    batches: Batches = []

    def keep(batch: DataFrame, number: int) -> None:
        batches.append(sorted(map(tuple, batch.collect())))

    writer = desk.stream(CHANGES).writeStream.foreachBatch(keep)
    query = writer.option("checkpointLocation", str(desk.home / "c")).start()
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
    assert [row[:3] for row in batches[0]] == [(1, "a", "insert"), (2, "a", "insert")]
    assert batches[1:] == [
        [(3, "a", "insert", one)],
        [(2, "a", "update_preimage", two), (2, "b", "update_postimage", two), (4, "b", "insert", two)],
        [(1, "a", "delete", three)],
        [(2, "b", "delete", four), (3, "a", "delete", four), (4, "b", "delete", four), (9, "a", "insert", four)],
    ]
    progress = query.lastProgress
    query.stop()
    assert progress is not None
    assert f'"position": {four}' in str(progress.sources[0].endOffset).replace("'", '"')


@needs_spark(4, 2, "limits of a micro-batch")
def test_limits(desk: Desk) -> None:
    """A micro-batch takes whole commits within its limit, and one at least."""
    for number in range(4):
        desk.table.write(rows(number, 100 + number))
    for limit, value, sizes in [
        ("rows", "4", [4, 4]),
        ("rows", "5", [4, 4]),
        ("rows", "1", [2, 2, 2, 2]),
        ("files", "3", [6, 2]),
        ("bytes", "1", [2, 2, 2, 2]),
        ("bytes", "1 GiB", [8]),
    ]:
        options = {"lookup.stream.start": "1", f"lookup.stream.max-{limit}-per-trigger": value}
        found = desk.run(options, f"{limit} {value}")
        assert [len(batch) for batch in found] == sizes
        assert sorted(row for batch in found for row in batch) == [(n, "a") for n in [0, 1, 2, 3, 100, 101, 102, 103]]


def test_where_it_begins(desk: Desk) -> None:
    """With the rows there are, with what comes, or after a log position that the log has; not with another table of the same name."""
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
    shutil.rmtree(desk.path)
    LookupTable(desk.path, {"lookup.keys": "id", "lookup.cache.dir": str(desk.home / "other")}).write(rows(5))
    with pytest.raises(Exception, match="dropped and created anew since this stream began"):
        desk.run(checkpoint="latest")


def test_available_now_ends(desk: Desk) -> None:
    """What is committed after a run has begun is for the next one."""
    desk.table.write(rows(1))
    batches: Batches = []

    def late(batch: DataFrame, number: int) -> None:
        batches.append(sorted(map(tuple, batch.collect())))
        desk.table.write(rows(100 + number))

    writer = desk.stream().writeStream.foreachBatch(late).option("checkpointLocation", str(desk.home / "c"))
    assert writer.trigger(availableNow=True).start().awaitTermination(120)
    assert batches == [[(1, "a")]]
    assert desk.run() == [[(100, "a")]]


def test_columns_and_predicates(spark: SparkSession, s3: S3Server, tmp_path: Path) -> None:
    """lookup.columns and lookup.where are those of its rows; the columns of changes are beside them. On S3, too."""
    s3.client.create_bucket(Bucket="streamed")
    desk = Desk(spark, tmp_path, "s3://streamed/t", {"lookup.storage.endpoint_url": s3.endpoint})
    desk.table.write(rows(1, 2, 3))
    desk.table.upsert(rows(1, 3, name="b"))
    some = {"lookup.columns": "name", "lookup.where": "id >= 2", "lookup.stream.start": "1"}
    (found,) = desk.run({**CHANGES, **some})
    kinds = [row[:2] for row in found]
    assert kinds == [("a", "insert"), ("a", "insert"), ("a", "update_preimage"), ("b", "update_postimage")]


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
        load(spark, desk.path, CHANGES).collect()


def test_into_another_managed_table(desk: Desk) -> None:
    """Upserts that a stream carries from one managed table into another make it equal, each commit once."""
    copy = str(desk.home / "copy")
    for number in range(3):
        desk.table.upsert(rows(number, number + 1, name=str(number)))
        stream = desk.stream(CHANGES).filter("_change_type IN ('insert', 'update_postimage')")
        writer = stream.drop("_change_type", "_log_position").writeStream.format("lookupcache")
        options = {"lookup.keys": "id", "lookup.write.mode": "upsert", "checkpointLocation": str(desk.home / "copied")}
        assert writer.options(**options).trigger(availableNow=True).start(copy).awaitTermination(120)
    held = LookupTable(copy, {"lookup.cache.dir": str(desk.home / "cache")})
    assert held.scan().sort_by("id") == desk.table.scan().sort_by("id")


def test_an_aggregation_over_a_table_without_rows(desk: Desk) -> None:
    """Spark asks for a micro-batch from the beginning to the beginning: it has no rows, and is no error."""
    writer = desk.stream().groupBy("id").count().writeStream.outputMode("update").format("noop")
    writer = writer.option("checkpointLocation", str(desk.home / "counts")).trigger(availableNow=True)
    query = writer.start()
    assert query.awaitTermination(120)
    assert sum(progress.numInputRows for progress in query.recentProgress) == 0
