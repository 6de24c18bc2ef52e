"""A soak's stream, joined to both tables and started again from its checkpoint whenever it ends. Orders on its input: `restart`, `stop`."""

import json
import queue
import sys
import threading
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming import StreamingQuery, StreamingQueryListener

from pyspark_lookup import lookup_join
from tests.soak import tables
from tests.support.workers import Notes

HEAP = "-Xms512m -XX:+AlwaysPreTouch"
"""Heaps that are there from the beginning, so that what grows is something else."""
_CONF = {
    "spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.executor.cores": "1",
    "spark.cores.max": "2", "spark.executor.memory": "512m", "spark.executor.extraJavaOptions": HEAP,
    "spark.driver.memory": "512m", "spark.driver.extraJavaOptions": HEAP, "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2", "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.sql.session.timeZone": "UTC",
}  # fmt: skip


class Listener(StreamingQueryListener):  # type: ignore[misc]
    """Notes which versions each micro-batch says that it used."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    def onQueryStarted(self, event: Any) -> None:
        pass

    def onQueryProgress(self, event: Any) -> None:
        progress = json.loads(event.progress.json)
        told = {row["table"]: row["digest"] for row in (progress.get("observedMetrics") or {}).values()}
        rows, duration = progress["numInputRows"], progress["durationMs"].get("triggerExecution")
        self._notes.add("progress", batch=progress["batchId"], rows=rows, versions=told, ms=duration)

    def onQueryTerminated(self, event: Any) -> None:
        pass


class Application:
    def __init__(self, given: dict[str, Any], notes: Notes) -> None:
        self._given, self._notes, self._home = given, notes, Path(given["home"])
        builder = SparkSession.builder.master(given["master"])
        for key, value in _CONF.items():
            builder = builder.config(key, value)
        self._spark = builder.getOrCreate()
        self._spark.sparkContext.setLogLevel("ERROR")
        self._stream: DataFrame | None = None
        self._spark.streams.addListener(Listener(notes))

    def _joined(self) -> DataFrame:
        rate = self._spark.readStream.format("rate").option("rowsPerSecond", self._given["rate"])
        events = rate.option("numPartitions", 2).load()
        events = events.select("value", sf.pmod(sf.hash("value"), sf.lit(tables.KEYS)).cast("long").alias("id"))
        store = self._given["storage"]
        published = {**tables.OF_PUBLISHED, **store}
        events = lookup_join(events, tables.PUBLISHED, "id", columns=["publish"], options=published)
        return lookup_join(events, tables.MANAGED, "id", columns=["tag", "n"], options={**tables.OF_MANAGED, **store})

    def _write(self, batch: DataFrame, number: int) -> None:
        self._notes.add("batch", batch=number)
        batch.write.mode("overwrite").parquet(str(self._home / "out" / f"{number:06}"))
        self._notes.add("written", batch=number)

    def _start(self) -> StreamingQuery:
        if self._stream is None:
            self._stream = self._joined()
        writer = self._stream.writeStream.foreachBatch(self._write).trigger(processingTime="500 milliseconds")
        return writer.option("checkpointLocation", str(self._home / "checkpoint")).start()

    def run(self, orders: queue.SimpleQueue[str]) -> None:
        while True:
            try:
                query = self._start()
            except Exception as problem:  # the tables are looked at, over the same store
                self._notes.add("not started", error=_text(problem))
                continue
            self._notes.add("started")
            try:
                while orders.empty() and not query.awaitTermination(0.1):
                    pass
            except Exception as problem:
                self._notes.add("ended", error=_text(problem))
            if not orders.empty():
                order = orders.get()
                self._notes.add("stopping", order=order)
                query.stop()
                self._stream = None  # as by another application
                self._notes.add("stopped", order=order)
                if order == "stop":
                    self._spark.stop()
                    return


def _text(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if "Error" in line or "Exception" in line]
    return f"{type(problem).__name__}: {' | '.join(lines)[-2000:]}"


def main() -> None:
    given = json.loads(sys.argv[1])
    orders: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            orders.put(line.strip())

    threading.Thread(target=listen, daemon=True).start()
    Application(given, Notes(Path(given["notes"]), "application")).run(orders)


if __name__ == "__main__":
    main()
