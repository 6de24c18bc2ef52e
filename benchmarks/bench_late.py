"""What does it cost a stream that facts wait for their row, beside the same lookup without `wait`, and beside a job written by hand?

    python -m benchmarks.bench_late                       # 10M rows, a million facts waiting
    python -m benchmarks.bench_late --waiting 100000 --rounds 1

Each round starts each contender from its checkpoint (**restart**: from `start()` to the end of the first micro-batch), in turn. It then
reads files of 10,000 facts, of which 1 % have no row, one a micro-batch (**trigger**: the whole of it, from the query's own progress; CPU
of Spark and all Python processes). Then the table gets rows for 1,000 of the facts that wait (**change**: how much longer the micro-batch
takes that sees them). Goals: a trigger with `wait` takes at most 1.5 times as long as without; a change at most 2 s.

- *lookup_join*: the peer, without `wait`. Facts without a row pass with nulls.
- *wait, few waiting* and *wait*: with `wait`, before and after a million facts came that have no row.
- *functions that do nothing*: Spark's part of the plan of `wait`. Its functions look up nothing and keep nothing.
- *by hand*: in `foreachBatch`, `lookup_join` looks up the new facts and those that are parked, and the function parks those without a row
  anew, in plain Parquet files. They stand in for a Delta table, whose jar may not exist for this Spark: a commit to Delta writes the same
  Parquet files, and then its log. There are no deadlines, and a batch that fails in between may write facts twice.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from benchmarks.bench_managed import customers, full_table
from benchmarks.common import cpu_s, session
from pyspark_lookup import lookup_join
from pyspark_lookup.spark.features import StatefulProcessor

BATCH_ROWS, RELEASED = 10_000, 1000
COLUMNS = ["name", "score", "visits"]
CONF = {
    "spark.driver.memory": "8g",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.streaming.numRecentProgressUpdates": "200",
    "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}
PARTS, PARCELS = 16, "part int, facts binary"
Enrich = Callable[[DataFrame], DataFrame]


@dataclasses.dataclass
class Contender:
    """A streaming query over files of facts, one file a micro-batch, and its measured seconds: of each micro-batch and each start.

    `write`: what its sink does with a micro-batch; None: nothing. `share`: the share of the micro-batches that it runs; less than 1 for slow ones.
    """

    home: Path
    enrich: Enrich
    write: Callable[[DataFrame, int], None] | None = None
    share: float = 1.0
    triggers: list[list[float]] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)
    changes: list[float] = dataclasses.field(default_factory=list)
    restarts: list[float] = dataclasses.field(default_factory=list)
    _files: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    def send(self, facts: pa.Table) -> None:
        (self.home / "facts").mkdir(parents=True, exist_ok=True)
        file = self.home / f"{next(self._files):06}.parquet"
        pq.write_table(facts, file)
        file.rename(self.home / "facts" / file.name)

    def start(self, spark: SparkSession) -> Any:
        stream = spark.readStream.schema("k long, amount double").option("maxFilesPerTrigger", "1")
        writer = self.enrich(stream.parquet(str(self.home / "facts"))).writeStream
        writer = writer.format("noop") if self.write is None else writer.foreachBatch(self.write)
        return writer.option("checkpointLocation", str(self.home / "checkpoint")).start()


def await_batch(query: Any, batch: int) -> list[Any]:
    """Wait until the query has finished micro-batch `batch`. Returns the progress of the micro-batches with facts so far."""
    while query.lastProgress is None or query.lastProgress["batchId"] < batch:
        query.awaitTermination(0.25)
    return [p for p in query.recentProgress if p["numInputRows"] >= BATCH_ROWS]


def trigger_s(progress: Sequence[Any]) -> list[float]:
    return [p["durationMs"]["triggerExecution"] / 1000 for p in progress]


def measure(
    spark: SparkSession,
    contender: Contender,
    draw_facts: Callable[[], pa.Table],
    batches: int,
    change: Callable[[], None],
) -> None:
    """Measure one round of a contender: a restart, some micro-batches and a change."""
    batches = math.ceil(batches * contender.share)
    warmup = math.ceil(4 * contender.share)
    for _ in range(warmup + batches + 2):
        contender.send(draw_facts())
    start_s = time.perf_counter()
    query = contender.start(spark)
    try:
        while query.lastProgress is None:
            query.awaitTermination(0.02)
        contender.restarts.append(time.perf_counter() - start_s)
        first = query.lastProgress["batchId"]
        await_batch(query, first + warmup)
        used_s, from_batch = cpu_s()[0], query.lastProgress["batchId"]
        progress = await_batch(query, first + warmup + batches)
        contender.cpu.append((cpu_s()[0] - used_s) / (query.lastProgress["batchId"] - from_batch))
        contender.triggers.append(trigger_s(progress[warmup : warmup + batches]))
        await_batch(query, first + warmup + batches + 1)
        last = query.lastProgress["batchId"]
        change()
        contender.send(draw_facts())
        later: list[Any] = []
        while not any(
            p["numInputRows"] >= BATCH_ROWS for p in later
        ):  # with `wait`, smaller micro-batches may come first
            query.awaitTermination(0.25)
            later = [p for p in query.recentProgress if p["batchId"] > last and p["numInputRows"]]
        contender.changes.append(max(trigger_s(later)) - statistics.median(contender.triggers[-1]))
    finally:
        query.stop()


# --- the contenders -------------------------------------------------------------------------------


class ByHand:
    """A function for `foreachBatch`. It looks up the new facts and the parked ones, and parks those without a row again."""

    def __init__(self, join: Enrich, home: Path) -> None:
        self._join = join
        self._home = home

    def __call__(self, batch: DataFrame, number: int) -> None:
        parked = self._home / f"parked-{number - 1}"
        if parked.exists():
            batch = batch.unionAll(batch.sparkSession.read.schema(batch.schema).parquet(str(parked)))
        joined = self._join(batch).persist()
        joined.where("name IS NOT NULL").write.format("noop").mode("overwrite").save()
        joined.where("name IS NULL").select("k", "amount").write.mode("overwrite").parquet(
            str(self._home / f"parked-{number}")
        )
        joined.unpersist()
        shutil.rmtree(self._home / f"parked-{number - 2}", ignore_errors=True)


class NoState(StatefulProcessor):  # type: ignore[misc]
    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Any], timers: Any) -> Iterator[Any]:
        yield pd.DataFrame({"facts": [facts for frame in rows for facts in frame["facts"]]})

    def close(self) -> None:
        pass


def send_parts(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        size = -(-batch.num_rows // PARTS)
        facts = [batch.slice(part * size, size).serialize().to_pybytes() for part in range(PARTS)]
        yield pa.RecordBatch.from_pydict({"part": pa.array(range(PARTS), pa.int32()), "facts": facts})


def do_nothing(df: DataFrame) -> DataFrame:
    """Build the plan of a lookup with `wait`, but with functions that only pass the facts on, as bytes."""
    names = [*df.columns, *COLUMNS]

    def read_facts(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schema = pa.schema([("k", pa.int64()), ("amount", pa.float64())])
        for batch in batches:
            for value in filter(len, batch.column(0).drop_null().to_pylist()):
                facts = pa.ipc.read_record_batch(pa.py_buffer(value), schema)
                columns = [*facts.columns, *(pa.nulls(facts.num_rows, pa.string()) for _ in COLUMNS)]
                yield pa.RecordBatch.from_arrays(columns, names=names)

    versions = sf.broadcast(df.sparkSession.range(1).withColumnRenamed("id", "version"))
    ticks = (
        df.sparkSession.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", 1)
        .option("numPartitions", 1)
        .load()
    )
    woken = ticks.crossJoin(versions).selectExpr(
        f"explode(sequence(0, {PARTS - 1})) AS part", "CAST(NULL AS BINARY) AS facts"
    )
    parts = df.crossJoin(versions).mapInArrow(send_parts, PARCELS).unionAll(woken)
    passed = parts.groupBy("part").transformWithStateInPandas(NoState(), "facts binary", "Append", "None")
    passed = passed.observe("passed", sf.count("facts").alias("parts"))
    return passed.mapInArrow(read_facts, "k long, amount double, " + ", ".join(f"{name} string" for name in COLUMNS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()) / "lookupcache-bench")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--waiting", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=15)
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    home = Path(tempfile.mkdtemp(dir=args.dir))
    spark = session(2, CONF)
    try:
        compare(spark, home, args.rows, args.waiting, args.rounds, args.batches)
    finally:
        spark.stop()
        shutil.rmtree(home)


def compare(spark: SparkSession, home: Path, rows: int, waiting: int, rounds: int, batches: int) -> None:
    path, table = full_table(home, "table", rows)
    options = {"lookup.cache": "FULL", "lookup.full-cache.build-wait": "10 min", "lookup.cache.dir": str(home / "host")}
    rng = np.random.default_rng(5)
    unreleased = itertools.count(rows, RELEASED)  # the keys of facts that wait

    def joined(wait: str | None = None) -> Enrich:
        return lambda df: lookup_join(df, str(path), {"k": "id"}, columns=COLUMNS, options=options, wait=wait)

    def facts(keys: Any) -> pa.Table:
        return pa.table({"k": keys, "amount": rng.random(len(keys))})

    def draw_facts() -> pa.Table:
        keys = rng.integers(0, rows, BATCH_ROWS)
        return facts(np.where(rng.random(BATCH_ROWS) < 0.01, rows + 10 * waiting, keys))

    def change() -> None:
        table.write(customers(next(unreleased), RELEASED, 1))

    contenders = {
        "lookup_join": Contender(home / "none", joined()),
        "wait, few waiting": Contender(home / "few", joined(wait="10 days")),
        "wait": Contender(home / "wait", joined(wait="10 days")),
        "functions that do nothing": Contender(home / "nothing", do_nothing),
        "by hand": Contender(home / "hand", lambda df: df, ByHand(joined(), home), share=0.2),
    }
    for name in ("wait", "by hand"):
        contenders[name].send(facts(np.arange(rows, rows + waiting)))
        query = contenders[name].start(spark)
        await_batch(query, 0)
        query.stop()
    for contender in contenders.values():  # a round to warm up: it fills the caches, and Spark compiles its code
        measure(spark, contender, draw_facts, batches, change)
        for figures in (contender.triggers, contender.cpu, contender.changes, contender.restarts):
            figures.clear()
    for _ in range(rounds):
        for contender in contenders.values():
            measure(spark, contender, draw_facts, batches, change)
    report(contenders, rows, waiting)


def report(contenders: dict[str, Contender], rows: int, waiting: int) -> None:
    print(f"\n## Micro-batches of {BATCH_ROWS:,} facts, a table of {rows:,} rows, {waiting:,} facts waiting (local[2])")
    print(f"command: {' '.join(['python', '-m', 'benchmarks.bench_late', *sys.argv[1:]])}")
    print(f"machine: {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(
        "| contender | rounds | trigger median s | max s | CPU s | change median s | restart median s | ratio to peer (median of rounds) |"
    )
    print("|---|---|---|---|---|---|---|---|")
    peer = [statistics.median(times) for times in contenders["lookup_join"].triggers]
    for name, contender in contenders.items():
        medians = [statistics.median(times) for times in contender.triggers]
        ratio = statistics.median(median / peer_median for median, peer_median in zip(medians, peer, strict=True))
        print(
            f"| {name} | {len(medians)} | {statistics.median(medians):.3f} | {max(map(max, contender.triggers)):.3f} | "
            f"{statistics.median(contender.cpu):.2f} | {statistics.median(contender.changes):.2f} | "
            f"{statistics.median(contender.restarts):.2f} | {'peer' if name == 'lookup_join' else f'{ratio:.2f}'} |"
        )


if __name__ == "__main__":
    main()
