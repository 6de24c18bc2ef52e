"""What does a lookup join cost a micro-batch, and a bulk query, beside Spark's own broadcast join?

    python -m benchmarks.bench_join                 # everything: 10M rows, some 15 minutes
    python -m benchmarks.bench_join --only stream   # or bulk, or crossover
    python -m benchmarks.bench_join --only stream --no-peer   # without the broadcast join, whose JVM needs many GB on Spark 3.5 and 4.0

Stream: micro-batches of 10,000 rows against a table of 10M rows (FULL, warm, unchanged), `addBatch` and the whole trigger
from the query's own progress. Bulk: 20M rows against 1M. Crossover: batch queries over tables of several sizes, from which
`strategy="auto"` takes its bound.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import ArrayType, DoubleType, StringType, StructField, StructType

from benchmarks.common import alternate, make_table, report, session
from pyspark_lookup import lookup_join
from pyspark_lookup.spark import features
from pyspark_lookup.spark.lookup_udf import arrow_series, pandas_function

BATCH_ROWS = 10_000
COLUMNS = ["name", "segment", "score"]


def no_names(keys: Iterator[Any]) -> Iterator[Any]:
    for key in keys:
        yield pa.nulls(len(key), pa.string()) if features.ARROW_UDFS else pd.Series([None] * len(key), dtype=object)


def trivial() -> Any:
    """A UDF of the kind that lookups use that does nothing: the least that such a UDF costs."""
    if features.ARROW_UDFS:
        return features.arrow_udf(no_names, StringType(), features.PythonEvalType.SQL_SCALAR_ARROW_ITER_UDF)
    return sf.pandas_udf(no_names, StringType(), features.PythonEvalType.SQL_SCALAR_PANDAS_ITER_UDF)


def make_events(directory: Path, files: int, rows: int) -> Path:
    """Write files of one micro-batch each, with random keys below `rows`."""
    events = directory / f"events-{rows}-{files}"
    if not events.exists():
        rng = np.random.default_rng(5)
        events.mkdir()
        for number in range(files):
            table = pa.table({"k": rng.integers(0, rows, BATCH_ROWS), "amount": rng.random(BATCH_ROWS)})
            pq.write_table(table, events / f"{number:04}.parquet")
    return events


def time_batches(
    spark: SparkSession,
    events: Path,
    enrich: Callable[[DataFrame], DataFrame],
    home: Path,
    stop: int,
    schema: str = "k long, amount double",
) -> list[dict[str, float]]:
    """Run a stream. Returns the seconds of `addBatch` and of the whole trigger of each micro-batch but the first two."""
    stream = spark.readStream.schema(schema).option("maxFilesPerTrigger", "1").parquet(str(events))
    checkpoint = tempfile.mkdtemp(dir=home)
    query = enrich(stream).writeStream.format("noop").option("checkpointLocation", checkpoint).start()
    try:
        while query.isActive and (query.lastProgress is None or query.lastProgress["batchId"] < stop + 1):
            query.awaitTermination(0.2)
        batches = [p for p in query.recentProgress if p["numInputRows"]]
    finally:
        query.stop()
        shutil.rmtree(checkpoint)
    return [
        {part: p["durationMs"][part] / 1000 for part in ("addBatch", "triggerExecution")} for p in batches[2 : stop + 2]
    ]


def bench_stream(spark: SparkSession, home: Path, rows: int, rounds: int, peer: bool) -> None:
    options = {"lookup.cache": "FULL", "lookup.cache.dir": str(home / "cache")}
    tables = {count: make_table(home, count, 4, 1) for count in (rows // 100, rows)}
    events = make_events(home, 60, rows // 100)

    def joined(count: int) -> Callable[[DataFrame], DataFrame]:
        return lambda df: lookup_join(df, str(tables[count]), {"k": "id"}, columns=COLUMNS, options=options)

    def static(df: DataFrame) -> DataFrame:
        table = spark.read.parquet(str(tables[rows])).select("id", *COLUMNS)
        return df.join(sf.broadcast(table), sf.col("k") == sf.col("id"), "left").drop("id")

    contenders: dict[str, tuple[Callable[[DataFrame], DataFrame], int]] = {
        "no join": (lambda df: df, 12),
        "a trivial UDF": (lambda df: df.withColumn("name", trivial()("k")), 12),
        f"lookup_join, {rows // 100:,} rows": (joined(rows // 100), 12),
        f"lookup_join, {rows:,} rows": (joined(rows), 12),
    }
    if peer:
        contenders[f"stream-static broadcast join, {rows:,} rows"] = (static, 3)
    times: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, (enrich, count) in contenders.items():
            times[name] += time_batches(spark, events, enrich, home, count)
    print(f"\n## A micro-batch of {BATCH_ROWS:,} rows, from the query's progress (local[2])")
    print("| contender | batches | addBatch median s | max s | trigger median s | max s |")
    print("|---|---|---|---|---|---|")
    for name, samples in times.items():
        cells = []
        for part in ("addBatch", "triggerExecution"):
            values = [batch[part] for batch in samples]
            cells += [f"{statistics.median(values):.3f}", f"{max(values):.3f}"]
        print(f"| {name} | {len(samples)} | {' | '.join(cells)} |")
    add = {name: statistics.median(batch["addBatch"] for batch in samples) for name, samples in times.items()}
    whole = {name: statistics.median(batch["triggerExecution"] for batch in samples) for name, samples in times.items()}
    _, udf, small, large, *static_joins = contenders
    for join in static_joins:
        print(f"addBatch: {add[join] / add[large]:.0f} times faster than the broadcast join")
    print(f"trigger: {whole[large] - whole[udf]:+.3f} s beside the trivial UDF")
    print(
        f"from {rows // 100:,} to {rows:,} rows: trigger {whole[large] / whole[small] - 1:+.0%}, addBatch {add[large] / add[small] - 1:+.0%}"
    )


def write(df: DataFrame) -> None:
    df.write.format("noop").mode("overwrite").save()


def by_constant(df: DataFrame, keys: Sequence[str] = ("k",)) -> DataFrame:
    """Join `df` with one constant row of a table for each key: the least that lookups by a UDF cost.

    Like a lookup, the UDF gets a version of two numbers for each table beside the keys.
    """
    names = [f"t{table}_{name}" for table in range(len(keys)) for name in COLUMNS] if len(keys) > 1 else COLUMNS
    ids = np.arange(65_536)
    table = [np.char.add("customer-", ids.astype(str)), np.repeat(["retail", "public"], len(ids) // 2), ids * 0.5]

    def constant_rows(batches: Iterator[Any]) -> Iterator[Any]:
        rows = pa.StructArray.from_arrays([pa.array(column) for column in table] * len(keys), names)
        offsets = pa.array(np.arange(len(ids) + 1, dtype=np.int32))
        answers = pa.ListArray.from_arrays(offsets, rows, type=pa.list_(pa.field("element", rows.type)))
        for first_keys, *_ in batches:
            yield answers[: len(first_keys)] if features.ARROW_UDFS else arrow_series(answers[: len(first_keys)])

    kinds = [StringType(), StringType(), DoubleType()] * len(keys)
    fields = [StructField(name, kind) for name, kind in zip(names, kinds, strict=True)]
    if features.ARROW_UDFS:
        kind = features.PythonEvalType.SQL_SCALAR_ARROW_ITER_UDF
        function = features.arrow_udf(constant_rows, ArrayType(StructType(fields)), kind)
    else:
        function = pandas_function(constant_rows, fields, many=True)
    versions = [f"{part}{table}" for table in range(len(keys)) for part in ("digest", "place")]
    version = df.sparkSession.range(1).selectExpr(*(f"id AS {name}" for name in versions))
    rows = df.crossJoin(sf.broadcast(version))
    return rows.select("*", sf.inline_outer(function(*keys, *versions))).drop(*versions)


def make_facts(spark: SparkSession, rows: int, keys: int) -> DataFrame:
    """Rows that Spark computes: a payload and a key. One key in six has no match."""
    return spark.range(0, rows, 1, 4).selectExpr(f"(id * 7919) % {keys * 6 // 5} AS k", "CAST(id AS STRING) AS payload")


def bench_bulk(spark: SparkSession, home: Path, facts: int, rows: int, runs: int, batch: str | None) -> None:
    options = {"lookup.cache": "FULL", "lookup.cache.dir": str(home / "cache")}
    table = make_table(home, rows, 4, 1)
    df = make_facts(spark, facts, rows)
    dim = spark.read.parquet(str(table)).select("id", *COLUMNS)

    def make_join(strategy: str) -> Callable[[], None]:
        strategy_options = options if strategy == "cache" else {"lookup.cache.dir": options["lookup.cache.dir"]}
        return lambda: write(
            lookup_join(df, str(table), {"k": "id"}, columns=COLUMNS, strategy=strategy, options=strategy_options)
        )

    contenders = {
        "Spark's broadcast join": lambda: write(df.join(sf.broadcast(dim), df.k == dim.id, "left").drop("id")),
        "a constant function": lambda: write(by_constant(df)),
        "lookup_join, cache": make_join("cache"),
        "lookup_join, broadcast": make_join("broadcast"),
        "lookup_join, auto": make_join("auto"),
    }
    if batch is not None:
        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", batch)
    times = alternate(contenders, 1, runs)
    spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    report(f"{facts:,} rows against {rows:,}, batches of {batch or '10000'}", times, "Spark's broadcast join")


def bench_crossover(spark: SparkSession, home: Path, runs: int) -> None:
    options = {"lookup.cache": "FULL", "lookup.cache.dir": str(home / "cache")}
    rows_per_key = 1
    for rows in (100_000, 1_000_000, 3_000_000, 10_000_000):
        crossover(spark, str(make_table(home, rows, 4, 1)), rows, rows_per_key, options, runs)
    rows_per_key = 4
    for rows in (1_000_000, 4_000_000):
        table = home / f"repeated-{rows}-{rows_per_key}.parquet"
        if not table.exists():
            ids = np.arange(rows) % (rows // rows_per_key)
            columns = {"id": ids, "name": [f"n{n}" for n in ids % 1000], "segment": ids % 7, "score": ids * 0.5}
            pq.write_table(pa.table(columns), table)
        crossover(spark, str(table), rows, rows_per_key, options, runs)


def crossover(
    spark: SparkSession, table: str, rows: int, rows_per_key: int, options: Mapping[str, str], runs: int
) -> None:
    """Print a line for each number of facts: the seconds of lookups, and of a broadcast join with the same table."""
    for facts in (100_000, 2_000_000, 20_000_000)[: 3 if rows_per_key == 1 else 2]:
        df = make_facts(spark, facts, rows // rows_per_key)
        contenders = {
            strategy: functools.partial(write_join, df, table, strategy, options) for strategy in ("cache", "broadcast")
        }
        times = {name: statistics.median(samples) for name, samples in alternate(contenders, 1, runs).items()}
        ratio = times["cache"] / times["broadcast"]
        print(
            f"| {rows:,} | {rows_per_key} | {facts:,} | {times['cache']:.2f} | {times['broadcast']:.2f} | {ratio:.2f} |",
            flush=True,
        )


def write_join(df: DataFrame, table: str, strategy: str, options: Mapping[str, str]) -> None:
    write(lookup_join(df, table, {"k": "id"}, columns=COLUMNS, strategy=strategy, options=options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()) / "lookupcache-bench")
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of the table of a stream")
    parser.add_argument("--facts", type=int, default=20_000_000, help="rows that are joined in bulk")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", choices=["stream", "bulk", "crossover"])
    parser.add_argument("--no-peer", action="store_true", help="leave out the broadcast join of a stream")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    spark = session(2, {"spark.driver.memory": "8g", "spark.sql.streaming.numRecentProgressUpdates": "200"})
    try:
        if args.only in (None, "stream"):
            bench_stream(spark, args.dir, args.rows, args.rounds, not args.no_peer)
        if args.only in (None, "bulk"):
            for batch in (None, "65536"):
                bench_bulk(spark, args.dir, args.facts, 1_000_000, args.runs, batch)
        if args.only in (None, "crossover"):
            print("\n## Batch queries by size of the table and of the facts\n")
            print("| table rows | for a key | fact rows | cache s | broadcast s | ratio |\n|---|---|---|---|---|---|")
            bench_crossover(spark, args.dir, args.runs)
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
