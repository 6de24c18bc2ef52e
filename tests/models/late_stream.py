"""A stream of `tests.models.late_rows`: facts that wait in two lookups, over tasks and batches that fail. Orders are JSON lines on its input."""

import importlib
import json
import os
import queue
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from pyspark_lookup import lookup_join
from tests.support.workers import Notes

SCHEMA = "fact long, key0 long, key1 long, at timestamp"
LATENESS_S = 10
_CONF = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.stateStore.providerClass":
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    "spark.sql.streaming.minBatchesToRetain": "100000",
}  # fmt: skip


class Harm:
    """A function for `mapInArrow` whose task sometimes fails in its first attempt, by an error or by the end of its process."""

    def __init__(self, share: float) -> None:
        self._share = share

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        harm = random.random() / self._share if context is not None and not context.attemptNumber() else 1.0
        if harm < 0.5:
            raise RuntimeError("injected")
        yield from batches
        if harm < 1:
            os.kill(os.getpid(), signal.SIGKILL)


def join(spark: SparkSession, settings: dict[str, Any], order: dict[str, Any]) -> DataFrame:
    reader = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 2)
    facts = reader.parquet(f"{settings['home']}/facts")
    facts = facts.mapInArrow(Harm(order["harm"]), facts.schema)
    for number, table in enumerate(settings["tables"]):
        if table["by_watermark"]:
            facts = facts.withWatermark("at", f"{LATENESS_S} seconds")
        joined = lookup_join(
            facts, table["path"], {f"key{number}": "id"}, table["how"], ["value", "_lookup_waited"], f"t{number}_",
            options=table["options"], wait=order["waits"][number], wait_on="at" if table["by_watermark"] else None,
        )  # fmt: skip
        waited = sf.expr("unix_micros(timestamp_seconds(0) + _lookup_waited)").alias(f"waited{number}")
        left_ms = sf.expr("unix_millis(current_timestamp())").alias(f"left{number}")
        facts = joined.select(*facts.columns, f"t{number}_value", waited, left_ms)
    return facts.mapInArrow(Harm(order["harm"]), facts.schema)


def writer(home: str, harm: float) -> Callable[[DataFrame, int], None]:
    def write(batch: DataFrame, number: int) -> None:
        batch.write.mode("overwrite").parquet(f"{home}/out/{number:06}")
        if random.random() < harm:
            raise ArithmeticError("injected")

    return write


class Application:
    def __init__(self, settings: dict[str, Any], notes: Notes) -> None:
        self._given, self._notes = settings, notes
        builder: Any = SparkSession.builder.config("spark.ui.enabled", "false").config("spark.driver.memory", "1g")
        if settings["connect"]:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            client = importlib.import_module("pyspark.sql.connect.client")
            client.DefaultChannelBuilder.default_port = staticmethod(lambda: port)
            builder = builder.remote("local[2,4]").config("spark.connect.grpc.binding.port", port)
        else:
            builder = builder.master("local[2,4]")
        self._spark: SparkSession = builder.getOrCreate()
        for key, value in _CONF.items():
            self._spark.conf.set(key, value)
        if not settings["connect"]:
            self._spark.sparkContext.setLogLevel("ERROR")

    def run(self, orders: queue.SimpleQueue[str]) -> None:
        while (text := orders.get()) != "stop":
            order = json.loads(text)
            while not self._is_done(order, orders):
                pass
            self._notes.add("done", order=order["number"])

    def _is_done(self, order: dict[str, Any], orders: queue.SimpleQueue[str]) -> bool:
        """Run the query of an order until there is another order, or nothing left to do. Returns False if it has failed."""
        rows = join(self._spark, self._given, order)
        query: Any = rows.writeStream.foreachBatch(writer(self._given["home"], order["harm"]))
        query = query.option("checkpointLocation", f"{self._given['home']}/checkpoint")
        trigger: dict[str, Any] = {"processingTime": order["trigger"]} if order["trigger"] else {"availableNow": True}
        query = query.trigger(**trigger).start()
        noted: set[int] = set()
        self._notes.add("started", order=order["number"])
        try:
            while orders.empty() and query.isActive:
                query.awaitTermination(0.2)
                self._note_progress(query, noted)
            self._note_progress(query, noted)
        except Exception as problem:
            self._notes.add("ended", error=f"{type(problem).__name__}: {str(problem)[:2000]}")
            if "injected" not in str(problem) and "exited unexpectedly" not in str(problem):
                raise
            return False
        finally:
            query.stop()
        return True

    def _note_progress(self, query: Any, noted: set[int]) -> None:
        for progress in query.recentProgress:
            if progress["batchId"] not in noted:
                noted.add(progress["batchId"])
                observed = {name: row.asDict() for name, row in (progress["observedMetrics"] or {}).items()}
                text = json.dumps(observed, default=str)
                self._notes.add("progress", batch=progress["batchId"], observed=text, ms=time.time() * 1000)


def main() -> None:
    settings = json.loads(sys.argv[1])
    orders: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            orders.put(line.strip())

    threading.Thread(target=listen, daemon=True).start()
    Application(settings, Notes(Path(settings["home"]) / "notes", "application")).run(orders)


if __name__ == "__main__":
    main()
