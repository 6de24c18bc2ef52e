"""What the benchmarks of Delta and Iceberg tables share: the same questions, each beside the format's own reader, which they name."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from benchmarks.common import alternate, make_table, report, session
from pyspark_lookup import LookupTable, lookup_join

Act = Callable[[], object]
KEYS = 10_000
CALLS = ("ufsHeadCount", "ufsListCount", "ufsGetCount", "ufsGetBytes")
FULL = {"lookup.cache": "FULL", "lookup.full-cache.build-wait": "10 min"}
MODES = {
    "NONE": {"lookup.cache": "NONE"},
    "PARTIAL": {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "1000000"},
    "FULL": FULL,
}


def customers(home: Path, rows: int, files: int) -> list[Path]:
    """The files that a table is written from, in the order of their numbers."""
    return sorted(make_table(home, rows, files, 11).iterdir(), key=lambda path: int(path.stem.split("-")[1]))


def opened(table: Path | str, cache: Path, options: Mapping[str, str]) -> LookupTable:
    return LookupTable(str(table), {"lookup.keys": "id", "lookup.cache.dir": str(cache), **options})


def count_calls(reader: LookupTable, act: Act) -> dict[str, int]:
    """Count the requests to the store, and the bytes read from it, while `act` runs."""
    before = reader.metrics()
    act()
    after = reader.metrics()
    return {name: after[name] - before[name] for name in CALLS}


def unchanged(reader: LookupTable, peers: Mapping[str, Act], runs: int, where: str = "") -> dict[str, list[float]]:
    """Measure a lookup of a key when nothing is new, beside the calls by which other readers find that out. Ratios are to the first of these."""
    reader.get(1)
    contenders: dict[str, Act] = {"LookupTable.get": lambda: reader.get(1), **peers}
    seconds = alternate(contenders, 5, runs * 20)
    report(f"Nothing is new{where}", seconds, next(iter(peers)))
    print(f"\nAsked of the store by `get`: {count_calls(reader, lambda: reader.get(1))}\n")
    return seconds


def drawn_keys(rows: int) -> pa.Table:
    return pa.table({"id": np.random.default_rng(7).integers(0, rows, KEYS)})


def keys(readers: Mapping[str, LookupTable], drawn: pa.Table, rows: int, peer: str, scan: Act, runs: int) -> None:
    """Measure lookups of the drawn keys in each mode, beside `scan`, which returns the number of their rows."""
    assert scan() == len(pc.unique(drawn.column("id")))
    contenders: dict[str, Act] = {
        name: lambda reader=reader: reader.get_many(drawn).num_rows  # type: ignore[misc]
        for name, reader in readers.items()
    }
    assert all(ask() == KEYS for ask in contenders.values())
    report(f"{KEYS:,} keys of {rows:,}", alternate({**contenders, peer: scan}, 1, runs), peer)


def more_rows(source: Path, rows: int) -> pa.Table:
    """New rows for a table of `rows` rows: 1 % of that number, or fewer if the file has fewer. Their ids follow those of the table."""
    new = pq.read_table(source)
    count = min(rows // 100, new.num_rows)
    return new.slice(0, count).set_column(0, "id", pa.array(np.arange(rows, rows + count)))


@dataclasses.dataclass(frozen=True)
class Change:
    """A commit, and how many rows a key has after it."""

    name: str
    commit: Act
    key: int
    found: int


def visible(
    make: Callable[[Path, Path], tuple[LookupTable, Sequence[Change]]], work: Path, rows: int, runs: int
) -> dict[str, dict[str, int]]:
    """Measure a build in a new cache, and the time until each change is visible. Returns what each change asked of the store in the last run."""
    times: dict[str, list[float]] = {}
    spent: dict[str, dict[str, int]] = {}
    for run in range(runs):
        copy, host = work / f"copy-{run}", work / f"host-{run}"
        reader, changes = make(copy, host)

        def timed(label: str, key: int, row_count: int, reader: LookupTable = reader) -> None:
            start_s = time.perf_counter()
            assert len(reader.get(key)) == row_count
            times.setdefault(label, []).append(time.perf_counter() - start_s)

        timed("build", 0, 1)
        for change in changes:
            change.commit()
            calls = count_calls(reader, lambda change=change: timed(change.name, change.key, change.found))  # type: ignore[misc]
            spent[change.name] = calls
        reader.close()
        shutil.rmtree(copy)
        shutil.rmtree(host)
    print(f"\n{rows:,} rows, FULL; {runs} runs; build {statistics.median(times['build']):.2f} s\n")
    print("| commit | visible after, median s | of a build | max | asked of the store |\n|---|---|---|---|---|")
    for label, calls in spent.items():
        median = statistics.median(times[label])
        shares = [time_s / build for time_s, build in zip(times[label], times["build"], strict=True)]
        print(f"| {label} | {median:.3f} | {statistics.median(shares):.1%} | {max(shares):.1%} | {json.dumps(calls)} |")
    return spent


def stream(
    table: Path | str,
    options: Mapping[str, str],
    peer: str,
    read: Callable[[], pa.Table],
    work: Path,
    rows: int,
    runs: int,
) -> None:
    """Measure micro-batches joined to the table, beside a broadcast join with all rows, which each micro-batch reads anew."""
    spark = session(2, {"spark.driver.memory": "8g"})
    rng, events = np.random.default_rng(3), work / "events"
    events.mkdir()
    for number in range(runs + 1):
        columns = {"key": rng.integers(0, rows, KEYS), "amount": rng.random(KEYS)}
        pq.write_table(pa.table(columns), events / f"{number:04}.parquet")

    def micro_batches(enrich: Callable[[DataFrame], DataFrame], per_batch: bool) -> list[float]:
        source = spark.readStream.schema("key long, amount double").option("maxFilesPerTrigger", 1).parquet(str(events))
        checkpoint = tempfile.mkdtemp(dir=work)

        def write(batch: DataFrame, number: int) -> None:
            (enrich(batch) if per_batch else batch).agg(sf.sum("score"), sf.count("name")).collect()

        joined = (source if per_batch else enrich(source)).writeStream.foreachBatch(write)
        query = joined.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        query.awaitTermination()
        return [
            progress["durationMs"]["triggerExecution"] / 1000
            for progress in query.recentProgress
            if progress["numInputRows"]
        ][1:]

    def broadcast(batch: DataFrame) -> DataFrame:
        return batch.join(sf.broadcast(spark.createDataFrame(read())), sf.col("key") == sf.col("id"), "left")

    lookup_options = {**FULL, **options, "lookup.cache.dir": str(work / "streamed")}
    times = {
        "lookup_join": micro_batches(
            lambda df: lookup_join(df, str(table), {"key": "id"}, options=lookup_options), False
        ),
        f"broadcast of what {peer} reads": micro_batches(broadcast, True),
    }
    report(f"A micro-batch of {KEYS:,} rows", times, f"broadcast of what {peer} reads")
    spark.stop()


def arguments(description: str | None, parts: Sequence[str], runs: int) -> argparse.ArgumentParser:
    """A parser of the arguments that each of these benchmarks takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()) / "lookupcache-bench")
    parser.add_argument("--parts", default=",".join(parts))
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--files", type=int, default=100)
    parser.add_argument("--runs", type=int, default=runs)
    return parser


def run_parts(args: argparse.Namespace, runners: Mapping[str, Callable[[Path], object]]) -> None:
    """Run the parts that are asked for, each with a new directory."""
    with tempfile.TemporaryDirectory(dir=args.dir) as work:
        for part in args.parts.split(","):
            home = Path(work) / part
            home.mkdir()
            runners[part](home)
