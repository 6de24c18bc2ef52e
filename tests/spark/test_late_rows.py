"""Rows of a stream that wait for their row in the table: once each, over restarts and failed batches. Histories are in tests/lookup/test_late_facts.py."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from pyspark_lookup import LookupTable, OptionError, explain_lookup, lookup_join
from pyspark_lookup.errors import NotSupportedError, PysparkLookupError, SchemaError
from pyspark_lookup.spark.features import STATEFUL_PROCESSORS
from tests.support.lookup_service import service_options
from tests.support.spark_tables import Calls, conf, publish_version, saved
from tests.support.sparks import needs, without

pytestmark = [pytest.mark.spark, needs(STATEFUL_PROCESSORS)]
STORE = "spark.sql.streaming.stateStore.providerClass"
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
SCHEMA = "id long, event long, at timestamp"


@pytest.fixture(autouse=True)
def rocksdb(spark: SparkSession) -> Iterator[None]:
    with conf(spark, STORE, ROCKSDB):
        yield


class Stream:
    """A stream of facts in files that are looked up in a table, and its results. Each `run` starts the stream from its checkpoint and stops it.

    `metrics`: those of the last run, from all of its batches.
    """

    def __init__(self, spark: SparkSession, home: Path, join: Callable[[DataFrame], DataFrame]) -> None:
        self.facts, self.out = home / "facts", home / "out"
        self.metrics: dict[str, Any] = {}
        self._spark = spark
        self._join = join
        self._checkpoint = str(home / "checkpoint")
        self._files = 0
        self.facts.mkdir()

    def send(self, *ids: int, at_s: int = 0) -> None:
        self._files += 1
        columns = {
            "id": list(ids),
            "event": [100 * self._files + key for key in ids],
            "at": pa.array([at_s * 1_000_000] * len(ids), pa.timestamp("us", "UTC")),
        }
        saved(self.facts / f"{self._files}.parquet", columns)

    def run(self, fails: bool = False) -> None:
        """Run the stream once with `availableNow`. `fails`: the batch fails after the sink has its rows."""
        self.metrics = dict.fromkeys(("waiting", "woken", "expired", "crowded"), 0)

        def write(batch: DataFrame, number: int) -> None:
            rows = batch.toPandas() if fails else batch
            if fails:
                raise ArithmeticError(f"{len(rows)} rows")
            batch.write.mode("overwrite").parquet(str(self.out / f"{number:03}"))

        stream = self._spark.readStream.schema(SCHEMA).parquet(str(self.facts))
        query = self._join(stream).writeStream.foreachBatch(write).option("checkpointLocation", self._checkpoint)
        running = query.trigger(availableNow=True).start()
        try:
            assert running.awaitTermination(250)
        finally:
            running.stop()
        for progress in running.recentProgress:  # after a batch that has failed, there is one more
            (row,) = (row for name, row in progress["observedMetrics"].items() if name.startswith("late_"))
            if row.waiting is None:  # a batch without a row, only to advance the watermark
                continue
            self.metrics["waiting"], self.metrics["oldest"] = row.waiting, row.oldest
            for name in ("woken", "expired", "crowded"):
                self.metrics[name] += row[name]

    def results(self) -> list[tuple[Any, ...]]:
        rows = self._spark.read.option("recursiveFileLookup", "true").parquet(str(self.out))
        return in_order([tuple(row)[:2] + tuple(row)[3:] for row in rows.collect()])


def in_order(rows: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return sorted(rows, key=str)


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_each_fact_leaves_once(spark: SparkSession, tmp_path: Path) -> None:
    """Facts with a match pass at once; others when the table has their row, or when their time is over. A batch that fails runs again."""
    table = publish_version(tmp_path / "dim.parquet", 1, range(3))

    def join(facts: DataFrame, wait: str = "1 day") -> DataFrame:
        return lookup_join(facts.withColumnRenamed("event", "an.event"), str(table), "id", wait=wait)

    stream = Stream(spark, tmp_path, join)
    calls = Calls(table)
    stream.send(0, 1, 1, 3, 4, 4)
    stream.run()
    assert stream.results() == [(0, 100, 1), (1, 101, 1), (1, 101, 1)]
    assert stream.metrics.pop("oldest") is not None
    counted = LookupTable(str(table)).metrics()
    assert (counted["lateWaiting"], counted["lateHeldCount"]) == (3, 3)
    assert 0 <= counted["lateOldest"] < 250_000
    assert stream.metrics == {"waiting": 3, "woken": 0, "expired": 0, "crowded": 0}
    assert calls.take_metrics()["hitCount"] == 6  # each fact was looked up once
    publish_version(table, 2, range(4))
    stream.send(1, 5)
    with pytest.raises(StreamingQueryException, match="ArithmeticError: 2 rows"):
        stream.run(fails=True)
    stream.run()
    released = [(0, 100, 1), (1, 101, 1), (1, 101, 1), (1, 201, 2), (3, 103, 2)]
    assert stream.results() == released
    assert (stream.metrics["waiting"], stream.metrics["woken"]) == (3, 1)
    calls.take_metrics()
    publish_version(table, 3, range(5))
    stream._join = lambda facts: join(facts, "1 ms")  # also for those that wait already
    stream.run()  # without facts, there is still a batch
    assert stream.results() == in_order([*released, (4, 104, 3), (4, 104, 3), (5, 205, None)])
    assert calls.take_metrics()["hitCount"] == 3  # the facts that waited, once
    assert stream.metrics == {"waiting": 0, "woken": 2, "expired": 1, "crowded": 0, "oldest": None}


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(280)
def test_deadlines_by_the_watermark(spark: SparkSession, tmp_path: Path) -> None:
    """With `wait_on`, a fact's own time counts, and the watermark is the clock. The result may have a watermark of its own, and be deduplicated."""
    table = publish_version(tmp_path / "dim.parquet", 1, range(3))

    def join(facts: DataFrame) -> DataFrame:
        timed = facts.withWatermark("at", "10 minutes").dropDuplicatesWithinWatermark(["id", "event"])
        return lookup_join(timed, str(table), "id", wait="1 hour", wait_on="at")

    hour_s = 3600
    stream = Stream(spark, tmp_path, join)
    stream.send(1, 7, 7, at_s=10 * hour_s)
    stream.run()
    assert stream.results() == [(1, 101, 1)]
    assert stream.metrics["waiting"] == 1
    stream.send(2, at_s=12 * hour_s)
    stream.run()
    stream.send(8, at_s=12 * hour_s)
    stream.run()  # the watermark is 11:50
    assert stream.results() == in_order([(1, 101, 1), (2, 202, 1), (7, 107, None)])
    assert stream.metrics["waiting"] == 1


def test_explanation(spark: SparkSession, tmp_path: Path) -> None:
    """The lookups before and after one that waits are passes of their own, and `explain_lookup` says why. The new column is the last."""
    table = str(publish_version(tmp_path / "dim.parquet", 1))
    (tmp_path / "facts").mkdir()
    facts = spark.readStream.schema(SCHEMA).parquet(str(tmp_path / "facts"))
    first = lookup_join(facts, table, "id", prefix="a_")
    waiting = lookup_join(first, table, "id", columns=["version", "_lookup_waited"], wait="90 min", how="inner")
    last = lookup_join(waiting, table, "id", prefix="c_")
    assert last.columns == ["id", "event", "at", "a_version", "version", "_lookup_waited", "c_version"]
    assert dict(waiting.dtypes)["_lookup_waited"] == "interval day to second"
    text = explain_lookup(last)
    assert text.count("strategy: cache") == 3
    assert "  wait: 5400 s from the arrival; the pass ends here\n" in text
    assert "pass: its own (rows wait in it)" in text
    assert "pass: its own (in the pass before, rows wait)" in text


def test_wrong_arguments(spark: SparkSession, tmp_path: Path) -> None:
    """A lookup that cannot wait is refused when it is built, with what to do."""
    table = str(publish_version(tmp_path / "dim.parquet", 1))
    (tmp_path / "facts").mkdir()
    stream = spark.readStream.schema(SCHEMA).parquet(str(tmp_path / "facts"))

    def refused(
        message: str, df: DataFrame = stream, error: type[PysparkLookupError] = OptionError, **named: Any
    ) -> None:
        with pytest.raises(error, match=message):
            lookup_join(df, named.pop("table", table), "id", **named)

    refused("argument wait = '2 hours': the DataFrame is a batch", spark.range(3), wait="2 hours")
    refused("argument wait_on = 'at' needs the argument wait", wait_on="at")
    refused("argument wait_max_rows = 5 needs the argument wait", wait_max_rows=5)
    refused("argument wait_max_rows = 5: give at least 16", wait="1 h", wait_max_rows=5)
    refused("argument wait_max_rows = 1.5: expected a number of rows", wait="1 h", wait_max_rows=1.5)
    refused("argument wait = 'soon': expected a duration", wait="soon")
    refused("argument wait = '0 s': expected a duration greater than zero", wait="0 s")
    refused("not 'left_anti'", wait="1 h", how="anti")
    refused("argument wait needs strategy='cache'", wait="1 h", strategy="broadcast")
    refused("lookup.on-error = 'NULL'", wait="1 h", options={"lookup.on-error": "NULL"})
    refused(
        "argument wait_on: the DataFrame has no column 'when'", error=PysparkLookupError, wait="1 h", wait_on="when"
    )
    refused("argument wait_on = 'at': the column has no watermark", wait="1 h", wait_on="at")
    timed = stream.withWatermark("at", "1 hour")
    windows = timed.groupBy("id", sf.window("at", "1 hour")).count()
    refused("wait_on = 'window' is of the type struct<", windows, SchemaError, wait="1 h", wait_on="window")
    fields = timed.select("id", sf.struct("at").alias("of"))
    refused("wait_on = 'of.at' is a field of of", fields, SchemaError, wait="1 h", wait_on="of.at")
    managed = str(tmp_path / "managed")
    LookupTable(managed, {"lookup.keys": "id"}).write(pa.table({"id": [1]}))
    refused("option lookup.version names one version", wait="1 h", table=managed, options={"lookup.version": "1"})
    refused("column '_lookup_waited', which argument wait adds, is also in the DataFrame", stream.withColumnRenamed("event", "_lookup_waited"),
            wait="1 h", columns=["_lookup_waited"])  # fmt: skip
    refused(
        "lookup.retry.fixed-delay has no meaning with the argument wait, because waiting rows are looked up again in each new version of this table",
        wait="1 h",
        options={"lookup.retry.fixed-delay": "1 min"},
    )
    with conf(spark, STORE, "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"):
        refused(f"needs {STORE} = {ROCKSDB}", wait="1 h")
    with without(STATEFUL_PROCESSORS):
        refused("needs stateful processors in Python", error=NotSupportedError, wait="1 h")
    waiting = lookup_join(stream.withWatermark("at", "1 hour"), table, "id", wait="1 h", wait_on="at")
    assert "spark.watermarkDelayMs" not in waiting.schema.json()
    twice = stream.select("id", *(sf.lit(number).alias("x") for number in range(2)))
    assert lookup_join(twice, table, "id", wait="1 h").columns[:3] == ["id", "x", "x"]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(280)
@pytest.mark.parametrize("versioned", [False, True], ids=["without versions", "with versions"])
def test_providers(spark: SparkSession, tmp_path: Path, versioned: bool) -> None:
    """A provider is asked again for keys without rows when its version has changed, or when the delay is over: not for misses that are cached."""
    options = service_options(tmp_path, "versioned_cities" if versioned else "cities")
    delay = {} if versioned else {"lookup.retry.fixed-delay": "1 h"}

    def join(facts: DataFrame) -> DataFrame:
        return lookup_join(facts, None, "id", wait="1 day", options={**options, **delay})

    request_log = tmp_path / "asked"
    stream = Stream(spark, tmp_path, join)
    with pytest.raises(
        OptionError, match="fixed-delay has no meaning" if versioned else "has no version.. that shows when"
    ):
        wrong = {"lookup.retry.fixed-delay": "1 min"} if versioned else {}
        facts = spark.readStream.schema(SCHEMA).parquet(str(stream.facts))
        lookup_join(facts, None, "id", wait="1 day", options={**options, **wrong})
    stream.send(1, 3, 3, 4)
    stream.run()
    assert [json.loads(line) for line in request_log.read_text().splitlines()] == [[1, 3, 4]]
    request_log.write_text("")
    stream.run()
    assert request_log.read_text() == ""  # the same version, or too early
    (tmp_path / "founded").write_text(json.dumps({3: "Hamar"}))
    if not versioned:
        delay["lookup.retry.fixed-delay"] = "1 ms"
    stream.run()
    calls = [json.loads(line) for line in request_log.read_text().splitlines()]
    assert sorted(key for call in calls for key in call) == [3, 4]
    assert stream.results() == in_order([(1, 101, "Oslo"), (3, 103, "Hamar"), (3, 103, "Hamar")])
    assert (stream.metrics["waiting"], stream.metrics["woken"]) == (1, 2)
