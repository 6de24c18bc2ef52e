"""Real Spark jobs write a table under a running stream and under queries of hosts that do not know it."""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from pyspark.sql import functions as sf

from pyspark_lookup import LookupTable, lookup_join
from tests.fuzzing import by_day
from tests.spark.common import MODES, events, load, stream_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]

KEYS = 40
ALGORITHM = "mapreduce.fileoutputcommitter.algorithm.version"
JOBS: dict[str, tuple[str, dict[str, str]]] = {
    "append, 1": ("append", {ALGORITHM: "1"}),
    "append, 2": ("append", {ALGORITHM: "2"}),
    "overwrite, 1": ("overwrite", {ALGORITHM: "1"}),
    "overwrite, 2": ("overwrite", {ALGORITHM: "2"}),
    "dynamic overwrite": ("overwrite", {"partitionOverwriteMode": "dynamic"}),
}
Epochs = dict[int, list[int]]


def until(holds: Callable[[], bool]) -> None:
    """Return once something holds that another process does."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "it does not come to hold"
        threading.Event().wait(0.02)


class Job:
    """A job that writes rows of epoch 2 in three tasks, of which the first waits for `go`."""

    def __init__(self, spark: SparkSession, home: Path, kind: str) -> None:
        self.mode, self.options = JOBS[kind]
        self._path = home / "dim"
        waits, goes = str(home / "waits"), str(home / "goes")

        def held(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            from pyspark import TaskContext  # noqa: PLC0415 - in the worker

            context = TaskContext.get()
            if context is not None and context.partitionId() == 0:
                Path(waits).touch()
                while not os.path.exists(goes):
                    threading.Event().wait(0.02)
            yield from batches

        some = spark.range(0, KEYS, 1, 3).where("id % 2 = 0 OR " + str("dynamic" not in kind))
        rows = some.mapInArrow(held, "id long").selectExpr("id", "2 AS epoch", "id % 2 AS p")
        self._writer = rows.write.mode(self.mode).partitionBy("p")
        self._waits, self._goes = Path(waits), Path(goes)
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self._done: concurrent.futures.Future[None] | None = None

    def begin(self) -> None:
        """Begin, and return when two of the three tasks have written."""
        self._done = self._pool.submit(self._writer.options(**self.options).parquet, str(self._path))
        until(lambda: self._waits.exists() or (self._done is not None and self._done.done()))
        until(lambda: len([path for path in self._path.rglob("part-*.parquet") if "00000" not in path.name]) >= 4)

    def end(self) -> None:
        """Let it commit."""
        assert self._done is not None
        self._goes.touch()
        self._done.result(timeout=60)


class Stream:
    """A stream joined to the table in every way, a micro-batch at a time."""

    def __init__(self, spark: SparkSession, home: Path, **options: str) -> None:
        self._home, self._number = home, 0
        events(home / "events", 0, range(KEYS))
        joined = stream_of(spark, home / "events")
        for name, mode in MODES.items():
            given: dict[str, Any] = {**mode, **options}
            joined = lookup_join(joined, str(home / "dim"), "id", columns=["epoch"], prefix=f"{name}_", options=given)
        scanned = load(spark, home / "dim", options).selectExpr("id", "epoch AS scan_epoch")
        self._joined = joined.join(sf.broadcast(scanned), "id", "left")
        self._out = home / "out"
        writer = self._joined.writeStream.foreachBatch(self._write)
        self.query = writer.option("checkpointLocation", str(home / "cp")).start()

    def _write(self, batch: DataFrame, number: int) -> None:
        batch.write.mode("overwrite").parquet(str(self._out / f"{number:03}"))

    def next(self) -> Epochs:
        """The epochs of each key in the next micro-batch, which are the same in every way of reading."""
        self._number += 1
        if self._number > 1:
            events(self._home / "events", self._number - 1, range(KEYS))
        self.query.processAllAvailable()
        rows = ds.dataset(self._out / f"{self._number - 1:03}", format="parquet").to_table().to_pylist()
        ways = [f"{name}_epoch" for name in (*MODES, "scan")]
        found = [{key: sorted({row[way] for row in rows if row["id"] == key}) for key in range(KEYS)} for way in ways]
        assert all(one == found[0] for one in found[1:])
        return found[0]


@pytest.fixture
def dim(spark: SparkSession, tmp_path: Path) -> Path:
    """A table of epoch 1 in two partitions."""
    rows = spark.range(0, KEYS, 1, 2).selectExpr("id", "1 AS epoch", "id % 2 AS p")
    rows.write.partitionBy("p").parquet(str(tmp_path / "dim"))
    return tmp_path


def after(kind: str) -> Epochs:
    """What is there when the job has ended."""
    if kind == "dynamic overwrite":
        return {key: [2 - key % 2] for key in range(KEYS)}
    return {key: [1, 2] if kind.startswith("append") else [2] for key in range(KEYS)}


@pytest.mark.timeout(280)
@pytest.mark.parametrize("kind", by_day(JOBS, 3))
def test_a_job_writes_under_a_stream(spark: SparkSession, dim: Path, kind: str) -> None:
    """No stream dies, no answer has half a commit; the first micro-batch after the commit sees it, as do late hosts."""
    stream, job = Stream(spark, dim), Job(spark, dim, kind)
    before = {key: [1] for key in range(KEYS)}
    assert stream.next() == before
    job.begin()
    assert stream.next() == stream.next() == before
    late = LookupTable(str(dim / "dim"), {"lookup.cache.dir": str(dim / "late")})
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        scan = pool.submit(late.scan)  # it knows nothing, and waits
        assert stream.next() == before
        job.end()
        assert stream.next() == after(kind)
        found = scan.result(timeout=60).to_pylist()
    assert {key: sorted(row["epoch"] for row in found if row["id"] == key) for key in range(KEYS)} == after(kind)
    assert LookupTable(str(dim / "dim")).metrics()["busyServedCount"] > 0
    stream.query.stop()
