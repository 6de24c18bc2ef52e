"""A soak's streams, started again from their checkpoints whenever they end. Orders on its input: `restart`, `stop`.

One is joined to both tables. In the other, events wait for their row: those whose keys a publish brings a moment later.
"""

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
    "spark.sql.session.timeZone": "UTC", "spark.sql.streaming.stateStore.providerClass":
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
}  # fmt: skip


class Listener(StreamingQueryListener):  # type: ignore[misc]
    """Notes which versions each micro-batch says that it used."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    def onQueryStarted(self, event: Any) -> None:
        pass

    def onQueryProgress(self, event: Any) -> None:
        progress = json.loads(event.progress.json)
        observed = progress.get("observedMetrics") or {}
        versions = {row["table"]: row["digest"] for row in observed.values() if "table" in row}
        rows, duration = progress["numInputRows"], progress["durationMs"].get("triggerExecution")
        kind = _kind(progress["name"], "progress")
        self._notes.add(kind, batch=progress["batchId"], rows=rows, versions=versions, ms=duration)

    def onQueryTerminated(self, event: Any) -> None:
        pass


def _kind(stream: str, kind: str) -> str:
    """The kind of a note: that of the stream in which events wait is another one."""
    return kind if stream == "joined" else f"{stream} {kind}"


class Application:
    def __init__(self, arguments: dict[str, Any], notes: Notes) -> None:
        self._arguments, self._notes, self._home = arguments, notes, Path(arguments["home"])
        builder = SparkSession.builder.master(arguments["master"])
        for key, value in _CONF.items():
            builder = builder.config(key, value)
        self._spark = builder.getOrCreate()
        self._spark.sparkContext.setLogLevel("ERROR")
        self._streams: dict[str, DataFrame] = {}
        self._spark.streams.addListener(Listener(notes))

    def _events(self) -> DataFrame:
        rate = self._spark.readStream.format("rate").option("rowsPerSecond", self._arguments["rate"])
        events = rate.option("numPartitions", 2).load()
        return events.select("value", sf.pmod(sf.hash("value"), sf.lit(tables.KEYS)).cast("long").alias("id"))

    def _join_late(self, wait: str) -> DataFrame:
        options = {**tables.OF_PUBLISHED, **self._arguments["storage"]}
        columns = ["publish", "_lookup_waited"]
        joined = lookup_join(self._events(), tables.PUBLISHED, "id", columns=columns, options=options, wait=wait)
        waited = sf.expr("unix_micros(timestamp_seconds(0) + _lookup_waited) AS waited")
        return joined.select("value", "id", "publish", waited)

    def _joined(self) -> DataFrame:
        events, store = self._events(), self._arguments["storage"]
        published = {**tables.OF_PUBLISHED, **store}
        events = lookup_join(events, tables.PUBLISHED, "id", columns=["publish"], options=published)
        return lookup_join(events, tables.MANAGED, "id", columns=["tag", "n"], options={**tables.OF_MANAGED, **store})

    def _start(self, name: str, **trigger: Any) -> StreamingQuery:
        if name not in self._streams:
            self._streams[name] = self._join_late("10 min") if name == "late" else self._joined()

        def write(batch: DataFrame, number: int) -> None:
            self._notes.add(_kind(name, "batch"), batch=number)
            batch.write.mode("overwrite").parquet(str(self._home / tables.OUTPUTS[name] / f"{number:06}"))
            self._notes.add(_kind(name, "written"), batch=number)

        writer = self._streams[name].writeStream.foreachBatch(write).queryName(name)
        writer = writer.option("checkpointLocation", str(self._home / tables.CHECKPOINTS[name]))
        return writer.trigger(**(trigger or {"processingTime": "500 milliseconds"})).start()

    def _end_waiting(self) -> None:
        """Have all events leave that wait, whether or not they have a row, in one more micro-batch."""
        while True:
            try:
                self._streams["late"] = self._join_late("1 ms")
                self._start("late", availableNow=True).awaitTermination()
                return
            except Exception as problem:
                self._notes.add("late ended", error=_text(problem))

    def run(self, orders: queue.SimpleQueue[str]) -> None:
        running: dict[str, StreamingQuery] = {}
        while True:
            for name in tables.OUTPUTS.keys() - running.keys():
                try:
                    running[name] = self._start(name)
                    self._notes.add(_kind(name, "started"))
                except Exception as problem:  # the tables are looked at, over the same store
                    self._notes.add(_kind(name, "not started"), error=_text(problem))
            for name, query in list(running.items()):
                try:
                    if query.awaitTermination(0.1):
                        del running[name]
                except Exception as problem:
                    del running[name]
                    self._notes.add(_kind(name, "ended"), error=_text(problem))
            if not orders.empty():
                order = orders.get()
                self._notes.add("stopping", order=order)
                for query in running.values():
                    query.stop()
                running.clear()
                self._streams.clear()  # as by another application
                self._notes.add("stopped", order=order)
                if order == "stop":
                    self._end_waiting()
                    self._spark.stop()
                    return


def _text(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if "Error" in line or "Exception" in line]
    return f"{type(problem).__name__}: {' | '.join(lines)[-2000:]}"


def main() -> None:
    arguments = json.loads(sys.argv[1])
    orders: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            orders.put(line.strip())

    threading.Thread(target=listen, daemon=True).start()
    Application(arguments, Notes(Path(arguments["notes"]), "application")).run(orders)


if __name__ == "__main__":
    main()
