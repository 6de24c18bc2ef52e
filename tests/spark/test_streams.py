"""Streams that read and write tables while the tables change: each micro-batch sees one version, the newest when it starts."""

import collections
import concurrent.futures
import contextlib
import gc
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming import StreamingQuery

from pyspark_lookup import LookupTable, explain_lookup, lookup_join, register_lookup
from pyspark_lookup.spark import join, lookup_pass
from pyspark_lookup.spark.features import find
from pyspark_lookup.spark.join import Strategy
from pyspark_lookup.versions.executions import Build
from tests.support.fuzzing import BY_NIGHT, by_day
from tests.support.spark_tables import (
    WAYS,
    conf,
    each_batch,
    events,
    load,
    publish_version,
    read_in_all_ways,
    running,
    stream_events,
)
from tests.support.sparks import DATA_SOURCES, REAL_TIME, needs

pytestmark = pytest.mark.spark
COUNT = 200
BATCHES, RESTARTS = (8, 2) if BY_NIGHT else (3, 1)
STRATEGIES: tuple[Strategy, ...] = ("cache", "broadcast")


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_each_batch_is_of_one_version(spark: SparkSession, tmp_path: Path) -> None:
    """Micro-batches read a changing table in all ways, over restarts: each sees one version, never an older one than before, and no row is lost or doubled."""
    table = tmp_path / "dim.parquet"

    def publish(version: int) -> None:
        publish_version(table, version, range(0, COUNT, 2))

    publish(1)
    for number in range(BATCHES):
        events(tmp_path / "events", number, range(COUNT))
    joined = read_in_all_ways(stream_events(spark, tmp_path / "events"), table, "version")
    newer = itertools.count(2)

    def write(batch: DataFrame, number: int) -> None:
        if number % 2 == 0:
            writer.submit(lambda: publish(next(newer)))  # the table is replaced while this batch runs
        batch.write.mode("overwrite").parquet(str(tmp_path / "out" / f"{number:03}"))

    digests_by_batch: dict[int, set[str]] = {}
    with concurrent.futures.ThreadPoolExecutor(1) as writer:
        for stop_at in [*(BATCHES * n // (RESTARTS + 1) for n in range(1, RESTARTS + 1)), None]:
            stream_writer = joined.writeStream.foreachBatch(write).option(
                "checkpointLocation", str(tmp_path / "checkpoint")
            )
            query = stream_writer.start()
            stop_at_batch(query, stop_at)
            for progress in query.recentProgress:
                for row in (progress.get("observedMetrics") or {}).values():  # Spark 3.5 leaves out what is empty
                    digests_by_batch.setdefault(progress["batchId"], set()).add(row["digest"])
                    assert row["table"] == str(table)
    versions, event_ids = list[int](), list[int]()
    ways = [f"{way}_version" for way in (*WAYS, "scan")]
    for batch_path in sorted((tmp_path / "out").iterdir()):  # after a restart a batch may take two files
        rows = ds.dataset(batch_path).to_table().to_pylist()
        event_ids += [row["event"] for row in rows]
        assert {row[way] for row in rows if row["id"] % 2 for way in ways} == {None}
        (version,) = {row[way] for row in rows if row["id"] % 2 == 0 for way in ways}
        versions.append(version)
    assert len(versions) >= BATCHES - RESTARTS
    assert sorted(event_ids) == sorted(number * 100_000 + key for number in range(BATCHES) for key in range(COUNT))
    assert versions == sorted(versions)
    assert len(set(versions)) > BATCHES // 3
    assert all(len(digests) == 1 for digests in digests_by_batch.values())
    pairs = {(versions[number], digest) for number, digests in digests_by_batch.items() for digest in digests}
    assert len(pairs) == len({version for version, _ in pairs}) == len({digest for _, digest in pairs})
    (last,) = digests_by_batch[max(digests_by_batch)]
    metrics = {row.name: row for row in load(spark, table, {"lookup.view": "metrics"}).collect()}
    assert metrics["tokenVersion"].detail == last
    versions_by_digest = {row.digest: row for row in load(spark, table, {"lookup.view": "versions"}).collect()}
    assert versions_by_digest[last].token_at is not None


def stop_at_batch(query: StreamingQuery, batch: int | None) -> None:
    """Wait until the batch with this number has ended, or all batches if it is None; then stop the query, whatever it is doing."""
    try:
        if batch is None:
            query.processAllAvailable()
            return
        while query.isActive and (query.lastProgress is None or query.lastProgress["batchId"] < batch):
            query.awaitTermination(0.05)
    finally:
        query.stop()


def test_aggregates_with_a_watermark(spark: SparkSession, tmp_path: Path) -> None:
    """Update mode: a windowed count by a looked-up column, with a watermark and state; the version is not part of the state."""
    path = publish_version(tmp_path / "dim.parquet", 7, range(5))
    for number in range(2):
        events(tmp_path / "events", number, range(10))
    timed = stream_events(spark, tmp_path / "events").selectExpr("id", "timestamp_seconds((batch + 1000) * 3600) AS at")
    joined = lookup_join(timed.withWatermark("at", "10 hours"), str(path), "id")
    with running(joined.groupBy("at", "version").count(), "counted", "update") as query:
        query.processAllAvailable()
    rows = spark.table("counted").groupBy("at", "version").agg({"count": "max"}).collect()
    assert sorted((tuple(row)[1:] for row in rows), key=repr) == [(7, 5)] * 2 + [(None, 5)] * 2


@needs(REAL_TIME)
@pytest.mark.parametrize("strategy", ["broadcast", "cache"])
def test_real_time_mode(spark: SparkSession, tmp_path: Path, strategy: Strategy) -> None:
    """A broadcast join works, with the version at the start of a batch; Spark refuses a lookup pass and names its operator."""
    jvm: Any = spark._jvm
    output = tmp_path / "seen"

    def append(row: Row) -> None:
        with output.open("a") as rows:
            rows.write(f"{row.id} {row.version}\n")

    path = publish_version(tmp_path / "dim.parquet", 7, range(5))
    source = getattr(jvm, "org.apache.spark.sql.execution.streaming.sources.LowLatencyMemoryStream$")
    memory = getattr(source, "MODULE$").singlePartition(
        spark._jsparkSession, jvm.org.apache.spark.sql.Encoders.STRING()
    )
    memory.addData(jvm.scala.jdk.javaapi.CollectionConverters.asScala(jvm.java.util.List.of("4", "5")))
    frame = find("pyspark.sql.classic.dataframe", "DataFrame")
    stream = frame(memory.toDF(), spark).selectExpr("CAST(value AS long) AS id")
    with conf(spark, "spark.sql.streaming.realTimeMode.minBatchDuration", "100"):
        writer = lookup_join(stream, str(path), "id", strategy=strategy).writeStream.outputMode("update")
        writer = writer.foreach(append)
        java: Any = writer  # from Python: from Spark 4.2 on
        java._jwrite.trigger(jvm.org.apache.spark.sql.streaming.Trigger.RealTime("1 second"))
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        try:
            if strategy == "broadcast":
                await_condition(
                    lambda: (output.exists() and len(output.read_text().splitlines()) == 2) or not query.isActive
                )
                assert sorted(output.read_text().splitlines()) == ["4 7", "5 None"]
            else:
                words = "ArrowEvalPythonExec are not in the operator allowlist"
                with pytest.raises(StreamingQueryException, match=words):
                    query.awaitTermination(120)
        finally:
            query.stop()


ALGORITHM = "mapreduce.fileoutputcommitter.algorithm.version"
JOBS: dict[str, tuple[str, dict[str, str]]] = {
    "append, 1": ("append", {ALGORITHM: "1"}),
    "overwrite, 2": ("overwrite", {ALGORITHM: "2"}),
    "dynamic overwrite": ("overwrite", {"partitionOverwriteMode": "dynamic"}),
}
Epochs = dict[int, list[int]]


def await_condition(condition: Callable[[], bool]) -> None:
    """Wait until another process has made the condition true."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it does not come to hold"
        threading.Event().wait(0.02)


@contextlib.contextmanager
def writing(spark: SparkSession, home: Path, kind: str) -> Iterator[None]:
    """Run a job that writes rows of epoch 2 in three tasks. In the body two tasks have written and one has not; afterwards the job commits."""
    mode, options = JOBS[kind]
    waits, goes = home / "waits", home / "goes"

    def hold_first_task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext  # noqa: PLC0415 - in the worker

        context = TaskContext.get()
        if context is not None and context.partitionId() == 0:
            waits.touch()
            while not goes.exists():
                threading.Event().wait(0.02)
        yield from batches

    ids = spark.range(0, 40, 1, 3).where("id % 2 = 0 OR " + str("dynamic" not in kind))
    rows = ids.mapInArrow(hold_first_task, "id long").selectExpr("id", "2 AS epoch", "id % 2 AS p")
    writer = rows.write.mode(mode).options(**options).partitionBy("p")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        job = pool.submit(writer.parquet, str(home / "dim"))
        try:
            await_condition(lambda: waits.exists() or job.done())
            # `os.walk`, unlike `rglob`, passes over directories that Spark removes meanwhile.
            await_condition(
                lambda: (
                    sum(
                        name.startswith("part-") and "-00000-" not in name
                        for *_, names in os.walk(home / "dim")
                        for name in names
                    )
                    >= 4
                )
            )
            yield
        finally:
            goes.touch()
        job.result(timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("kind", by_day(JOBS, 3))
def test_a_job_writes_under_a_stream(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    """No stream fails, and no answer has half a commit. The first micro-batch after the commit sees it, and so does a host that comes late."""
    home = tmp_path
    rows = spark.range(0, 40, 1, 2).selectExpr("id", "1 AS epoch", "id % 2 AS p")
    rows.write.partitionBy("p").parquet(str(home / "dim"))
    (home / "events").mkdir()
    joined = read_in_all_ways(stream_events(spark, home / "events"), home / "dim", "epoch")
    numbers = itertools.count()

    def read_epochs() -> Epochs:
        """Return the epochs of each key in the next micro-batch, which must be the same in every way of reading."""
        events(home / "events", number := next(numbers), range(40))
        query.processAllAvailable()
        rows = [row for row in spark.table("busy").collect() if row.batch == number]
        ways = [f"{way}_epoch" for way in (*WAYS, "scan")]
        answers = [{key: sorted({row[way] for row in rows if row.id == key}) for key in range(40)} for way in ways]
        assert all(answer == answers[0] for answer in answers)
        return answers[0]

    before = {key: [1] for key in range(40)}
    after = {key: [1, 2] if kind.startswith("append") else [2] for key in range(40)}
    if kind == "dynamic overwrite":
        after = {key: [2 - key % 2] for key in range(40)}
    late_table = LookupTable(str(home / "dim"), {"lookup.cache.dir": str(home / "late")})
    with running(joined, "busy") as query, concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert read_epochs() == before
        with writing(spark, home, kind):
            assert read_epochs() == before
            scan = pool.submit(late_table.scan)  # this host has no earlier version, so it waits
            assert read_epochs() == before
        assert read_epochs() == after
        scanned_rows = scan.result(timeout=60).to_pylist()
    assert {key: sorted(row["epoch"] for row in scanned_rows if row["id"] == key) for key in range(40)} == after
    assert LookupTable(str(home / "dim")).metrics()["busyServedCount"] > 0


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
        """Append a row."""
        if self._kind == "managed" and not DATA_SOURCES:
            LookupTable(self.path).write([{"id": number}])
        else:
            form = "lookupcache" if self._kind == "managed" else "parquet"
            spark.range(number, number + 1).write.format(form).mode("append").save(self.path)

    def joined(self, spark: SparkSession) -> DataFrame:
        """A new join of three keys with the table."""
        facts = spark.createDataFrame([(key,) for key in (1, 2, 3)], "id long")
        return lookup_join(facts, self.path, "id", how="inner", columns=["id"], prefix="d_", strategy="cache")

    def seen(self, spark: SparkSession) -> list[list[int]]:
        """The keys that a new scan, a new join and a new function find."""
        register_lookup(spark, self.function, self.path, key="id", columns=["id"])
        called = spark.sql(f"SELECT {self.function}(id).id AS id FROM range(1, 4)").where("id IS NOT NULL")
        frames = (load(spark, self.path), self.joined(spark), called)
        return [sorted(row.id for row in rows.collect()) for rows in frames]


@pytest.mark.nightly  # by day: the next test, and test_lookup_pass.test_chains_in_foreach_batch
@pytest.mark.parametrize("kind", ["plain", "managed"])
@pytest.mark.parametrize("adaptive", ["true", "false"])
@pytest.mark.parametrize("side", ["scan", "stream", "neither"])
def test_what_a_batch_writes_it_reads_back(
    spark: SparkSession, tmp_path: Path, kind: str, adaptive: str, side: str
) -> None:
    """In `foreachBatch`, lookups built after a write see it; those built before it, and the stream's own, keep their version."""
    dim = Dim(kind, tmp_path, spark, f"read_back_{kind}")
    register_lookup(spark, f"own_{kind}", dim.path, key="id", columns=["id"])
    for number in range(2):
        events(tmp_path / "events", number, range(1, 4))
    stream = stream_events(spark, tmp_path / "events")
    stream = lookup_join(stream, dim.path, "id", columns=["id"], prefix="join_", strategy="cache")
    stream = stream.selectExpr("id", "join_id", f"own_{kind}(id).id AS called_id")
    scanned = load(spark, dim.path).selectExpr("id AS scan_id")
    scanned = scanned.hint("broadcast") if side == "scan" else scanned
    stream = (stream.hint("broadcast") if side == "stream" else stream).join(scanned, sf.expr("scan_id = id"), "inner")
    later_keys: list[list[list[int]]] = []
    built_counts: list[int] = []
    stream_rows: list[list[tuple[int, int, int]]] = []

    def act(batch: DataFrame, number: int) -> None:
        session = batch.sparkSession
        built = (dim.joined(session), load(session, dim.path))
        for attempt in range(2):
            rows = batch.select("*").collect()  # a new plan, because Spark keeps the broadcast of a DataFrame
            stream_rows.append(sorted((row.join_id, row.called_id, row.scan_id) for row in rows))
            built_counts.extend(frame.select("*").count() for frame in built)
            if attempt == 0:
                dim.append(session, number + 2)
        later_keys.append(dim.seen(session))

    with conf(spark, "spark.sql.adaptive.enabled", adaptive):
        each_batch(stream, tmp_path / "cp", act)
    assert later_keys == [[keys] * 3 for keys in ([1, 2], [1, 2, 3])]
    assert built_counts == [1] * 4 + [2] * 4
    assert stream_rows == [[(1, 1, 1)]] * 2 + [[(1, 1, 1), (2, 2, 2)]] * 2


def test_a_micro_batch_is_of_one_version_whatever_users_set(spark: SparkSession, tmp_path: Path) -> None:
    """Lookups keep the version they were built with, in a user's job group and in threads without Spark's properties; those built after a write see it."""
    dim = Dim("managed", tmp_path, spark, "in_threads")
    events(tmp_path / "events", 0, range(1, 4))
    stream = lookup_join(
        stream_events(spark, tmp_path / "events"), dim.path, "id", "inner", columns=["id"], prefix="own_"
    )
    stream = stream.join(
        sf.broadcast(load(spark, dim.path).withColumnRenamed("id", "scan_id")), sf.expr("scan_id = id")
    )
    answers: dict[str, list[list[int]]] = {}

    def frames(batch: DataFrame, outer: bool = False) -> dict[str, DataFrame]:
        """New lookups of each kind. `outer`: also one on a DataFrame of the session that started the stream."""
        session = batch.sparkSession
        facts = session.range(1, 5)
        register_lookup(session, dim.function, dim.path, key="id", columns=["id"])
        ways = {strategy: lookup_join(facts, dim.path, "id", "inner", [], strategy=strategy) for strategy in STRATEGIES}
        called = session.sql(f"SELECT id FROM range(1, 5) WHERE {dim.function}(id).id IS NOT NULL")
        outer_frames = {"outer": lookup_join(spark.range(1, 5), dim.path, "id", "inner", [])} if outer else {}
        return {**ways, "scan": load(session, dim.path), "function": called, **outer_frames}

    def keys(of: DataFrame) -> list[int]:
        return sorted(row.id for row in of.select("*").collect())

    def act(batch: DataFrame, number: int) -> None:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: spark.range(1).count()).result()
            stream_keys = [keys(batch)]
            makers = {2: lambda: frames(batch, outer=True), 3: lambda: pool.submit(frames, batch).result()}
            for added, make in makers.items():
                built = make()
                for name, frame in built.items():
                    answers.setdefault(name, []).append(keys(frame))
                dim.append(batch.sparkSession, added)
                spark.sparkContext.setJobGroup(f"mine {added}", "a group of the user's")
                for name, frame in built.items():
                    answers[name].append(keys(frame))
                    if added == 2:
                        answers[name].append(pool.submit(keys, frame).result())
            stream_keys += [keys(batch), pool.submit(keys, batch).result()]
            assert stream_keys == [[1]] * 3

    each_batch(stream, tmp_path / "cp", act)
    assert answers.pop("outer") == [[1]] * 3
    assert answers == {name: [[1]] * 3 + [[1, 2]] * 2 for name in (*STRATEGIES, "scan", "function")}


def test_what_the_driver_keeps_of_its_lookups(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After many micro-batches the driver keeps only the last explanations, as text, and a limited number of relations, of the last micro-batch."""
    path = str(publish_version(tmp_path / "dim.parquet", 1))
    monkeypatch.setattr(join, "_EXPLAINED_AT_MOST", 5)
    monkeypatch.setattr(join, "_explained", collections.OrderedDict())
    monkeypatch.setattr(lookup_pass, "_RELATIONS_AT_MOST", 5)
    sessions: list[weakref.ref[SparkSession]] = []
    relations = vars(spark).setdefault("_lookup_versions", collections.OrderedDict())
    relations.clear()
    for number in range(6):
        build = Build("a stream", str(number), 1000.0 + number)
        monkeypatch.setattr(join, "current_build", lambda session, build=build: build)
        # PySpark makes such a session for each micro-batch.
        batch_session = SparkSession(spark.sparkContext, spark._jsparkSession)
        joined = lookup_join(batch_session.range(1000 * number), path, "id")
        lookup_join(spark.range(3), path, "id", strategy="cache")
        lookup_join(spark.range(4), path, "id", strategy="cache")
        sessions.append(weakref.ref(batch_session))
        assert {relation.build.batch for relation in relations.values() if relation.build} == {str(number)}
    assert "about 5,000 rows" in explain_lookup(joined)
    del joined
    gc.collect()
    assert [reference() for reference in sessions[:-1]] == [None] * 5  # PySpark holds the last one
    assert len(join._explained) == 5
    assert len(relations) == 1
    monkeypatch.undo()
    monkeypatch.setattr(lookup_pass, "_RELATIONS_AT_MOST", 5)
    chain: DataFrame = spark.range(3)
    for number in range(8):
        options = {"lookup.max-retries": number}
        chain = lookup_join(chain, path, "id", prefix=f"p{number}_", strategy="cache", options=options)
    assert len(relations) == 5
    assert chain.first()[1:] == (1,) * 8
