"""What carries keys to Python and rows back: an iterator Arrow UDF, a pandas UDF with encoded keys, or `mapInArrow`?

    python -m benchmarks.bench_udf [--rows N] [--runs N]

2M rows against a table of 200,000 (FULL, warm): all of two looked-up columns, all of eight, and two of eight, beside 20 columns of
the facts. The answers are counted, and must agree. `mapInArrow` exists only here, to compare with (docs/decisions/pandas-udf.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from benchmarks.common import alternate, report, session
from pyspark_lookup import KEY_INDEX, LookupTable, lookup_join
from pyspark_lookup.spark import features

TABLE_ROWS = 200_000
FACT_COLUMNS = 20


def make_table(directory: Path) -> Path:
    """Write the table: `id`, and eight columns of text and numbers."""
    path = directory / f"udf-{TABLE_ROWS}.parquet"
    if not path.exists():
        ids = np.arange(TABLE_ROWS)
        columns: dict[str, Any] = {"id": ids}
        for number in range(4):
            columns[f"c{2 * number}"] = pa.array(np.char.add(f"name-{number}-", (ids % 1000).astype(str)))
            columns[f"c{2 * number + 1}"] = ids * (number + 0.5)
        pq.write_table(pa.table(columns), path)
    return path


def map_in_arrow(df: DataFrame, path: Path, columns: list[str], options: Mapping[str, str]) -> DataFrame:
    """Look up in a function of whole batches, with at most one match for each key."""
    keyed = {**options, "lookup.keys": "id", "lookup.columns": ",".join(["id", *columns])}

    def look_up(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        table = LookupTable(str(path), keyed)
        for batch in batches:
            rows = pa.table(table.get_many(pa.table({"id": batch.column("k")})))
            places = pc.index_in(pa.array(range(batch.num_rows)), rows[KEY_INDEX].combine_chunks())
            columns_taken = [rows[name].combine_chunks().take(places) for name in columns]
            yield pa.RecordBatch.from_arrays([*batch.columns, *columns_taken], [*batch.schema.names, *columns])

    kinds = ", ".join(f"{name} {'string' if int(name[1]) % 2 == 0 else 'double'}" for name in columns)
    facts = ", ".join(f"`{field.name}` {field.dataType.simpleString()}" for field in df.schema)
    return df.mapInArrow(look_up, f"{facts}, {kinds}")


def by_udf(df: DataFrame, path: Path, columns: list[str], options: Mapping[str, str], arrow: bool) -> DataFrame:
    present = features.ARROW_UDFS
    features.ARROW_UDFS = dataclasses.replace(present, present=arrow)
    try:
        return lookup_join(df, str(path), {"k": "id"}, columns=columns, strategy="cache", options=options)
    finally:
        features.ARROW_UDFS = present


def bench(spark: SparkSession, home: Path, rows: int, runs: int) -> None:
    path, options = make_table(home), {"lookup.cache": "FULL", "lookup.cache.dir": str(home / "cache")}
    more = [f"id + {number} AS f{number}" for number in range(FACT_COLUMNS)]
    df = spark.range(0, rows, 1, 4).selectExpr(f"(id * 7919) % {TABLE_ROWS * 6 // 5} AS k", *more)
    ways: dict[str, Callable[[list[str]], DataFrame]] = {
        "pandas UDF": lambda columns: by_udf(df, path, columns, options, arrow=False),
        "mapInArrow": lambda columns: map_in_arrow(df, path, columns, options),
    }
    if features.ARROW_UDFS:
        ways = {"Arrow UDF": lambda columns: by_udf(df, path, columns, options, arrow=True), **ways}
    two, eight = ["c0", "c1"], [f"c{number}" for number in range(8)]
    for title, columns, selected in (
        ("two columns", two, [*df.columns, *two]),
        ("eight columns", eight, [*df.columns, *eight]),
        ("eight columns, of which two are used", eight, ["k", *two]),
    ):
        frames = {name: join(columns).select(*selected) for name, join in ways.items()}
        counts = {frame.agg(sf.count("c0"), sf.sum("c1")).collect()[0] for frame in frames.values()}
        assert len(counts) == 1, counts
        times = alternate({name: lambda frame=frame: write(frame) for name, frame in frames.items()}, 1, runs)
        report(f"{rows:,} rows, {title}", times, next(iter(ways)))


def write(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()) / "lookupcache-bench")
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    spark = session(2)
    try:
        bench(spark, args.dir, args.rows, args.runs)
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
