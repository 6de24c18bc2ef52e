"""What do several lookups cost in a row, beside one of them and beside Spark's own broadcast joins?

    python -m benchmarks.bench_star                 # everything
    python -m benchmarks.bench_star --only stream   # or batch, or cold

Stream: micro-batches of 10,000 rows, enriched from no, one, three and five tables of 1M rows (FULL, warm, unchanged); the whole
trigger from the query's own progress. Goal: five cost at most 1.4 times what one costs above none. Batch: 2M rows and the same
tables. Goals: five lookups take at most 0.75 times the broadcast joins, and twice one lookup, or 1.15 times a UDF that returns
constant rows. "A pass each": an operation between the lookups, which keeps them apart. Cold: six tables of 1,000 rows, with nothing cached, in a session that has run a query.
Goals: 2.5 s for the first `lookup_join`, 0.15 s for each further one, 3 s for the first run, 0.7 s for the second.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from benchmarks.bench_join import BATCH_ROWS, COLUMNS, by_constant, time_batches, write
from benchmarks.common import alternate, make_table, report, session
from pyspark_lookup import lookup_join

TABLES, ROWS = 5, 1_000_000
Enrich = Callable[[DataFrame], DataFrame]


def by_lookups(tables: list[Path], cache: Path, apart: bool = False, strategy: str = "cache") -> Enrich:
    """Look up in each table by the columns k0, k1, …. `apart`: with an operation between the lookups, so that each is a pass of its own."""
    options = {"lookup.cache.dir": str(cache)} | ({"lookup.cache": "FULL"} if strategy == "cache" else {})

    def enrich(df: DataFrame) -> DataFrame:
        for number, table in enumerate(tables):
            df = df.select("*") if apart else df
            df = lookup_join(
                df, str(table), {f"k{number}": "id"}, columns=COLUMNS, prefix=f"t{number}_", strategy=strategy, options=options
            )  # fmt: skip
        return df

    return enrich


def by_broadcasts(spark: SparkSession, tables: list[Path]) -> Enrich:
    """Enrich by Spark's own broadcast joins in place of lookups."""
    sides = [spark.read.parquet(str(table)).select("id", *COLUMNS) for table in tables]

    def enrich(df: DataFrame) -> DataFrame:
        for number, side in enumerate(sides):
            columns = [sf.col(name).alias(f"t{number}_{name}") for name in COLUMNS]
            named = side.select(sf.col("id").alias(f"id{number}"), *columns)
            df = df.join(sf.broadcast(named), sf.col(f"k{number}") == sf.col(f"id{number}"), "left").drop(f"id{number}")
        return df

    return enrich


def make_events(directory: Path, files: int) -> Path:
    """Write files of one micro-batch each, with a key for each table."""
    events = directory / f"star-{files}"
    if not events.exists():
        rng = np.random.default_rng(5)
        events.mkdir()
        for number in range(files):
            keys = {f"k{n}": rng.integers(0, ROWS, BATCH_ROWS) for n in range(TABLES)}
            pq.write_table(pa.table({**keys, "amount": rng.random(BATCH_ROWS)}), events / f"{number:04}.parquet")
    return events


def bench_stream(spark: SparkSession, home: Path, tables: list[Path], rounds: int) -> None:
    events, cache = make_events(home, 60), home / "cache"
    schema = ", ".join(f"k{number} long" for number in range(TABLES)) + ", amount double"
    contenders: dict[str, tuple[Enrich, int]] = {"no lookup": (lambda df: df, 12)}
    contenders |= {f"{count} lookups": (by_lookups(tables[:count], cache), 12) for count in (1, 3, 5)}
    contenders["5 lookups, a pass each"] = (by_lookups(tables, cache, apart=True), 12)
    contenders["5 broadcast joins"] = (by_broadcasts(spark, tables), 3)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, (enrich, count) in contenders.items():
            samples = time_batches(spark, events, enrich, home, count, schema)
            times[name] += [batch["triggerExecution"] for batch in samples]
    print(f"\n## The trigger of a micro-batch of {BATCH_ROWS:,} rows (local[2])\n")
    print("| contender | batches | median s | max s | above none s | to one lookup |\n|---|---|---|---|---|---|")
    no_lookup, one_lookup = (statistics.median(times[name]) for name in ("no lookup", "1 lookups"))
    for name, samples in times.items():
        more = statistics.median(samples) - no_lookup
        print(
            f"| {name} | {len(samples)} | {more + no_lookup:.3f} | {max(samples):.3f} | {more:.3f} | {more / (one_lookup - no_lookup):.2f} |"
        )


def bench_batch(spark: SparkSession, home: Path, tables: list[Path], rows: int, runs: int) -> None:
    keys = [f"(id * {7919 + 2 * number}) % {ROWS * 6 // 5} AS k{number}" for number in range(TABLES)]
    df = spark.range(0, rows, 1, 4).selectExpr(*keys, "CAST(id AS STRING) AS payload")
    enrichments = {"5 broadcast joins": by_broadcasts(spark, tables)}
    enrichments |= {f"{count} broadcast joins": by_broadcasts(spark, tables[:count]) for count in (1, 3)}
    enrichments |= {f"{count} lookups": by_lookups(tables[:count], home / "cache") for count in (1, 3, 5)}
    for count in (1, 5):
        names = [f"k{number}" for number in range(count)]
        enrichments[f"{count} constant rows"] = functools.partial(by_constant, keys=names)
    enrichments["5 lookups, a pass each"] = by_lookups(tables, home / "cache", apart=True)
    enrichments["5 lookups, auto"] = by_lookups(tables, home / "cache", strategy="auto")
    contenders = {name: lambda enrich=enrich: write(enrich(df)) for name, enrich in enrichments.items()}
    report(f"{rows:,} rows, tables of {ROWS:,}", alternate(contenders, 1, runs), "5 broadcast joins")


def bench_cold(spark: SparkSession, home: Path, runs: int) -> None:
    tables = [make_table(home, 1000, 1, seed) for seed in range(6)]
    df = spark.range(0, 1000, 1, 2).selectExpr(*(f"id % {900 + n} AS k{n}" for n in range(6)))
    df.collect()
    print("\n## Six tables of 1,000 rows\n")
    print(
        "| strategy | cache | first call s | further calls s | first run s | second run s |\n|---|---|---|---|---|---|"
    )
    for number in range(runs):
        for strategy in ("auto", "cache"):
            cache = Path(tempfile.mkdtemp(dir=home))
            for state in ("empty", "filled"):
                calls, enriched = [], df
                for place, table in enumerate(tables):
                    start_s = time.perf_counter()
                    options = {"lookup.cache.dir": str(cache)}
                    enriched = lookup_join(
                        enriched, str(table), {f"k{place}": "id"}, prefix=f"t{place}_", strategy=strategy, options=options
                    )  # fmt: skip
                    calls.append(time.perf_counter() - start_s)
                took = []
                for _ in range(2):
                    start_s = time.perf_counter()
                    write(enriched)
                    took.append(time.perf_counter() - start_s)
                print(
                    f"| {strategy}{', the first of the session' if not number else ''} | {state} | {calls[0]:.2f} | "
                    f"{statistics.median(calls[1:]):.3f} | {took[0]:.2f} | {took[1]:.2f} |",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()) / "lookupcache-bench")
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", choices=["stream", "batch", "cold"])
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    spark = session(2, {"spark.driver.memory": "8g", "spark.sql.streaming.numRecentProgressUpdates": "200"})
    try:
        if args.only in (None, "cold"):  # comes first, because a session is cold only once
            bench_cold(spark, args.dir, 2)
        tables = [make_table(args.dir, ROWS, 4, seed) for seed in range(TABLES)]
        if args.only in (None, "stream"):
            bench_stream(spark, args.dir, tables, args.rounds)
        if args.only in (None, "batch"):
            bench_batch(spark, args.dir, tables, args.rows, args.runs)
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
