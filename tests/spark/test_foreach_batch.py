"""Inside a `foreachBatch` function: what is written is read back, and nothing of a micro-batch is kept."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from py4j import finalizer
from pyspark.sql import SparkSession as ClassicSession
from pyspark.sql import functions as sf

from pyspark_lookup import LookupTable, lookup_join, register_lookup
from tests.fuzzing import by_day
from tests.spark.common import conf, events, load, stream_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]

Seen = dict[str, list[int]]
KEYS = [1, 2, 3]


class Dim:
    """A plain or a managed table, written and read by a session."""

    def __init__(self, kind: str, home: Path, spark: SparkSession, name: str) -> None:
        self.path, self._kind = str(home / kind), kind
        if kind == "managed":
            LookupTable(self.path, {"lookup.keys": "id"}).write(pa.table({"id": [1]}))
        else:
            spark.range(1, 2).write.parquet(self.path)
        self.function = name

    def append(self, spark: SparkSession, number: int) -> None:
        """One more row."""
        form = "lookupcache" if self._kind == "managed" else "parquet"
        spark.range(number, number + 1).write.format(form).mode("append").save(self.path)

    def seen(self, spark: SparkSession) -> Seen:
        """The keys that a scan, a join and a function find which are made now."""
        register_lookup(spark, self.function, self.path, key="id", columns=["id"])
        asked = spark.createDataFrame([(key,) for key in KEYS], "id long")
        joined = lookup_join(asked, self.path, "id", columns=["id"], prefix="d_", strategy="cache")
        called = asked.selectExpr(f"{self.function}(id).id AS d")
        return {
            "scan": sorted(row.id for row in load(spark, self.path).collect()),
            "join": sorted(row.d_id for row in joined.collect() if row.d_id is not None),
            "function": sorted(row.d for row in called.collect() if row.d is not None),
        }


def each_batch(spark: SparkSession, home: Path, stream: DataFrame, act: Callable[[DataFrame, int], None]) -> None:
    """Run `act` for each of the files of events that are there."""
    writer = stream.writeStream.foreachBatch(act).option("checkpointLocation", str(home / "cp"))
    writer.trigger(availableNow=True).start().awaitTermination()


@pytest.mark.parametrize("kind", by_day(["managed", "plain"], 2))
def test_what_a_batch_writes_it_reads_back(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    """Scans, joins and functions that are made in the function after a write see what it has written; what was built before it keeps
    its version."""
    dim = Dim(kind, tmp_path, spark, f"read_back_{kind}")
    for number in range(2):
        events(tmp_path / "events", number, range(3))
    seen: list[Seen] = []
    kept: list[int] = []

    def act(batch: DataFrame, number: int) -> None:
        session = batch.sparkSession
        seen.append(dim.seen(session))
        asked = session.createDataFrame([(key,) for key in KEYS], "id long")
        joined = lookup_join(asked, dim.path, "id", how="inner", columns=["id"], prefix="d_", strategy="cache")
        built = (joined, load(session, dim.path))
        kept.extend(frame.select("*").count() for frame in built)
        dim.append(session, number + 2)
        kept.extend(frame.select("*").count() for frame in built)
        seen.append(dim.seen(session))

    each_batch(spark, tmp_path, stream_of(spark, tmp_path / "events"), act)
    expected = [[1], [1, 2], [1, 2], [1, 2, 3]]
    assert seen == [dict.fromkeys(("scan", "join", "function"), keys) for keys in expected]
    assert kept == [1] * 4 + [2] * 4


@pytest.mark.parametrize(
    ("kind", "side", "adaptive"),
    by_day(itertools.product(["plain", "managed"], ["scan", "stream", "neither"], ["true", "false"]), 5),
)
def test_the_streams_own_lookups_keep_a_batch_to_one_version(
    spark: SparkSession, tmp_path: Path, kind: str, side: str, adaptive: str
) -> None:
    """Joins, scans and functions in the stream's plan answer all actions of a micro-batch from one version, however Spark
    carries them out."""
    dim = Dim(kind, tmp_path, spark, f"one_version_{kind}")
    register_lookup(spark, dim.function, dim.path, key="id", columns=["id"])
    for number in range(2):
        events(tmp_path / "events", number, range(1, 4))
    stream = stream_of(spark, tmp_path / "events")
    stream = lookup_join(stream, dim.path, "id", columns=["id"], prefix="join_", strategy="cache")
    stream = stream.selectExpr("id", "join_id", f"{dim.function}(id).id AS called_id")
    scanned = load(spark, dim.path).selectExpr("id AS scan_id")
    scanned = scanned.hint("broadcast") if side == "scan" else scanned
    stream = (stream.hint("broadcast") if side == "stream" else stream).join(scanned, sf.expr("scan_id = id"), "inner")
    seen: list[list[tuple[int, int, int]]] = []

    def act(batch: DataFrame, number: int) -> None:
        for attempt in range(3):
            rows = batch.select("*").collect()  # a plan of its own: Spark keeps what it has broadcast for an object
            seen.append(sorted((row.join_id, row.called_id, row.scan_id) for row in rows))
            if attempt == 0:
                dim.append(batch.sparkSession, number + 2)

    with conf(spark, "spark.sql.adaptive.enabled", adaptive):
        each_batch(spark, tmp_path, stream, act)
    assert seen == [[(1, 1, 1)]] * 3 + [[(1, 1, 1), (2, 2, 2)]] * 3


@pytest.mark.timeout(280)
@pytest.mark.nightly
def test_a_long_stream_keeps_nothing_of_its_batches(spark: SparkSession, tmp_path: Path) -> None:
    """After many micro-batches with a join built in each, no session, no object of the JVM and no memory is left of them."""
    dim = Dim("plain", tmp_path, spark, "long_stream")
    batches, warm = 60, 20
    for number in range(batches):
        events(tmp_path / "events", number, range(3))
    found: list[tuple[int, int, int]] = []
    runtime = spark._jvm.java.lang.Runtime.getRuntime()  # type: ignore[union-attr]

    def act(batch: DataFrame, number: int) -> None:
        lookup_join(batch, dim.path, "id", columns=["id"], prefix="d_", strategy="cache").collect()
        if number in (warm, batches - 1):
            gc.collect()
            for _ in range(2):
                spark._jvm.java.lang.System.gc()  # type: ignore[union-attr]
            sessions = sum(isinstance(one, ClassicSession) for one in gc.get_objects())
            used = runtime.totalMemory() - runtime.freeMemory()
            found.append((sessions, len(finalizer.ThreadSafeFinalizer.finalizers), used))

    each_batch(spark, tmp_path, stream_of(spark, tmp_path / "events"), act)
    (sessions, references, used), (later, now, last) = found
    assert later <= sessions
    assert now <= references + 10
    assert last - used < 20 * 2**20
