"""What does a query pay for being current? A point read with no result, beside a Python source that returns nothing.

Both are read through the same DataFrame, planned once; ours resolves the table's version (a HEAD), records it
for the execution, and prunes every row group by statistics.

    python -m benchmarks.bench_overhead [--runs 60]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from benchmarks.common import alternate, make_table, report, session


class EmptyReader(DataSourceReader):
    """One task, no rows."""

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[tuple[object, ...]]:
        return iter(())


class EmptySource(DataSource):
    """A Python source that does as little as possible."""

    @classmethod
    def name(cls) -> str:
        return "empty"

    def schema(self) -> str:
        return "id bigint, name string"

    def reader(self, schema: StructType) -> DataSourceReader:
        return EmptyReader()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "lookupcache-bench")
    args = parser.parse_args()
    table = make_table(args.data, args.rows, 1, args.seed)
    spark = session(2)
    spark.dataSource.register(EmptySource)
    empty = spark.read.format("empty").load()
    reader = spark.read.format("lookupcache").option("lookup.cache.dir", str(args.data / "cache"))
    reader = reader.option("lookup.columns", "id,name")
    no_row = reader.option("lookup.where", "id = -1").load(f"file://{table / 'part-0.parquet'}")
    one_row = reader.option("lookup.where", "id = 700000").load(f"file://{table / 'part-0.parquet'}")
    cached = reader.option("lookup.where", "id = -1").option("lookup.metadata.source", "CACHE")
    cached_no_row = cached.option("lookup.metadata.sync-interval", "1 h").load(f"file://{table / 'part-0.parquet'}")
    assert no_row.collect() == []
    assert len(one_row.collect()) == 1
    seconds = alternate(
        {
            "empty Python source": empty.collect,
            "lookupcache, no row": no_row.collect,
            "lookupcache, no row, CACHE": cached_no_row.collect,
            "lookupcache, one row": one_row.collect,
        },
        args.warmup,
        args.runs,
    )
    report(f"Query overhead of a point read, {args.rows:,} rows, local", seconds, "empty Python source")
    spark.stop()


if __name__ == "__main__":
    main()
