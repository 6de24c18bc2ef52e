"""What does a Delta table cost, beside deltalake: nothing new, 10,000 keys, a commit, a micro-batch; and a log of 10,000 commits?

The table has 10M rows in 100 files, on a local disk, unless arguments say otherwise; it is written by deltalake, and made once.

unchanged  a key of a FULL cache when nothing is new, beside what tells deltalake so: `update_incremental` of an open table, and
           opening it again.
keys       10,000 keys, the same ones again, in NONE, PARTIAL and FULL, all warm, beside `DeltaTable.scan` with
           the predicate `id IN (…)`.
visible    a build of the FULL cache, and then how long until the first answer that has an append of 1 % (goal: 3 % of a build),
           and until 10,000 rows are gone that deletion vectors delete (goal: 1 %, and 0 bytes of data files).
stream     a micro-batch of 10,000 rows joined to the table, beside the same stream joined to a broadcast of all the rows, which deltalake
           reads in each micro-batch.
log        a new process of a host that knows the log, and a new host, of tables with 10 and 10,000 commits, on disk and on S3 (moto on
           loopback, whose own time for a LIST grows with the bucket: see the bare request): requests, bytes and seconds. Goal:
           unchanged at most 1.2 times what it costs on ten.

    pip install -e '.[spark,bench,test]'
    python -m benchmarks.bench_delta [--parts unchanged,keys,visible,stream,log] [--rows N] [--files N] [--runs N] [--commits N]
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from benchmarks.common import alternate, make_table, report, session
from benchmarks.servers import s3
from pyspark_lookup import LookupTable, lookup_join
from tests.delta.common import append_commit, vectors_of

PARTS = ("unchanged", "keys", "visible", "stream", "log")
KEYS = 10_000
CALLS = ("ufsHeadCount", "ufsListCount", "ufsGetCount", "ufsGetBytes")
FULL = {"lookup.cache": "FULL", "lookup.full-cache.build-wait": "10 min"}
MODES = {
    "NONE": {"lookup.cache": "NONE"},
    "PARTIAL": {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "1000000"},
    "FULL": FULL,
}


def make_delta(home: Path, rows: int, files: int) -> Path:
    """A Delta table of so many customers, a commit for each file; made once."""
    table = home / f"delta-{rows}-{files}"
    if not (table / "_delta_log" / f"{files - 1:020}.json").exists():
        for file in sorted(make_table(home, rows, files, 11).iterdir(), key=lambda path: int(path.stem.split("-")[1])):
            write_deltalake(str(table), pq.read_table(file), mode="append")
    return table


def opened(table: Path | str, cache: Path, options: dict[str, str]) -> LookupTable:
    return LookupTable(str(table), {"lookup.keys": "id", "lookup.cache.dir": str(cache), **options})


def calls_of(reader: LookupTable, act: Callable[[], object]) -> dict[str, int]:
    """What an act asks of the store."""
    before = reader.metrics()
    act()
    after = reader.metrics()
    return {name: after[name] - before[name] for name in CALLS}


def unchanged(table: Path, work: Path, runs: int) -> None:
    reader, known = opened(table, work / "host", FULL), DeltaTable(str(table))
    reader.get(1)
    contenders: dict[str, Callable[[], object]] = {
        "LookupTable.get": lambda: reader.get(1),
        "update_incremental": known.update_incremental,
        "DeltaTable(path)": lambda: DeltaTable(str(table)).version(),
    }
    report("Nothing is new", alternate(contenders, 5, runs * 20), "update_incremental")
    print(f"\nAsked of the store by `get`: {calls_of(reader, lambda: reader.get(1))}\n")


def keys(table: Path, work: Path, rows: int, runs: int) -> None:
    rng = np.random.default_rng(7)
    drawn = pa.table({"id": rng.integers(0, rows, KEYS)})
    readers = {name: opened(table, work / "host", options) for name, options in MODES.items()}
    known = DeltaTable(str(table))
    predicate = f"id IN ({', '.join(map(str, drawn.column('id').to_pylist()))})"

    def asked(name: str) -> int:
        return readers[name].get_many(drawn).num_rows

    def scanned() -> int:
        return pa.table(known.scan(predicate=predicate)).num_rows

    distinct = len(pc.unique(drawn.column("id")))
    assert scanned() == distinct
    assert all(asked(name) == KEYS for name in readers)
    contenders: dict[str, Callable[[], object]] = {name: lambda name=name: asked(name) for name in readers}  # type: ignore[misc]
    report(
        f"{KEYS:,} keys of {rows:,}", alternate({**contenders, "DeltaTable.scan": scanned}, 1, runs), "DeltaTable.scan"
    )


def visible(table: Path, work: Path, rows: int, runs: int) -> None:
    shares: dict[str, list[float]] = {"append": [], "vectors": []}
    times: dict[str, list[float]] = {"build": [], "append": [], "vectors": []}
    spent: dict[str, Any] = {}
    for run in range(runs):
        copy, host = work / f"copy-{run}", work / f"host-{run}"
        shutil.copytree(table, copy)
        reader = opened(copy, host, FULL)

        def timed(what: str, key: int, found: int, reader: LookupTable = reader) -> None:
            began = time.perf_counter()
            assert len(reader.get(key)) == found
            times[what].append(time.perf_counter() - began)

        timed("build", 0, 1)
        new = pq.read_table(sorted(table.glob("*.parquet"))[0])
        count = min(rows // 100, new.num_rows)
        ids = pa.array(np.arange(rows, rows + count))
        write_deltalake(str(copy), new.slice(0, count).set_column(0, "id", ids), mode="append")
        spent["append"] = calls_of(reader, lambda: timed("append", rows, 1))
        delete_by_vectors(copy, KEYS)
        spent["vectors"] = calls_of(reader, lambda: timed("vectors", 0, 0))
        for what, found in shares.items():
            found.append(times[what][-1] / times["build"][-1])
        reader.close()
        shutil.rmtree(copy)
        shutil.rmtree(host)
    print(f"\n{rows:,} rows, FULL; {runs} runs; build {statistics.median(times['build']):.2f} s\n")
    print("| commit | visible after, median s | of a build | max | asked of the store |\n|---|---|---|---|---|")
    for what, found in shares.items():
        median = statistics.median(times[what])
        print(
            f"| {what} | {median:.3f} | {statistics.median(found):.1%} | {max(found):.1%} | {json.dumps(spent[what])} |"
        )


def delete_by_vectors(table: Path, count: int) -> None:
    """Delete about so many rows, the first ones of each file that has no vector, by a vector each."""
    adds: dict[str, dict[str, Any]] = {}
    for commit in sorted((table / "_delta_log").glob("*.json")):
        for line in commit.read_text().splitlines():
            action = json.loads(line)
            if "add" in action:
                adds[action["add"]["path"]] = action["add"]
    features = {
        "readerFeatures": ["deletionVectors"],
        "writerFeatures": ["deletionVectors", "appendOnly", "invariants"],
    }
    actions: list[dict[str, Any]] = [{"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}}]
    vectors = vectors_of(table, [range(-(-count // len(adds)))] * len(adds))  # in one file, as Delta writes them
    for (path, add), vector in zip(adds.items(), vectors, strict=True):
        actions.append({"remove": {"path": path, "deletionTimestamp": 1, "dataChange": True}})
        actions.append({"add": {**add, "dataChange": True, "deletionVector": vector}})
    append_commit(table, actions)


def stream(table: Path, work: Path, rows: int, runs: int) -> None:
    spark = session(2, {"spark.driver.memory": "8g"})
    rng, events = np.random.default_rng(3), work / "events"
    events.mkdir()
    for number in range(runs + 1):
        columns = {"key": rng.integers(0, rows, KEYS), "amount": rng.random(KEYS)}
        pq.write_table(pa.table(columns), events / f"{number:04}.parquet")

    def micro_batches(enrich: Callable[[DataFrame], DataFrame], each: bool) -> list[float]:
        source = spark.readStream.schema("key long, amount double").option("maxFilesPerTrigger", 1).parquet(str(events))
        checkpoint = tempfile.mkdtemp(dir=work)

        def write(batch: DataFrame, number: int) -> None:
            (enrich(batch) if each else batch).agg(sf.sum("score"), sf.count("name")).collect()

        made = (source if each else enrich(source)).writeStream.foreachBatch(write)
        query = made.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        query.awaitTermination()
        return [one["durationMs"]["triggerExecution"] / 1000 for one in query.recentProgress if one["numInputRows"]][1:]

    def broadcast(batch: DataFrame) -> DataFrame:
        read = pa.table(DeltaTable(str(table)).scan())
        # Spark takes no string_view.
        plain = [of.with_type(pa.string()) if of.type == pa.string_view() else of for of in read.schema]
        read = read.cast(pa.schema(plain))
        return batch.join(sf.broadcast(spark.createDataFrame(read)), sf.col("key") == sf.col("id"), "left")

    options = {**FULL, "lookup.cache.dir": str(work / "streamed")}
    times = {
        "lookup_join": micro_batches(lambda df: lookup_join(df, str(table), {"key": "id"}, options=options), False),
        "broadcast of what deltalake reads": micro_batches(broadcast, True),
    }
    report(f"A micro-batch of {KEYS:,} rows", times, "broadcast of what deltalake reads")
    spark.stop()


def make_log(home: Path, commits: int) -> Path:
    """A table of so many commits of one small file each, and checkpoints as Delta's default has them, of which the last is kept."""
    table = home / f"log-{commits}"
    log = table / "_delta_log"
    if (log / f"{commits - 1:020}.json").exists():
        return table
    write_deltalake(str(table), pa.table({"id": [0], "name": ["a"]}))
    first = [json.loads(line) for line in (log / f"{0:020}.json").read_text().splitlines()]
    (add,) = (action["add"] for action in first if "add" in action)
    data = (table / add["path"]).read_bytes()
    for number in range(1, commits):
        name = f"part-{number:05}.parquet"
        (table / name).write_bytes(data)
        action = {"add": {**add, "path": name}}
        (log / f"{number:020}.json").write_text(
            json.dumps({"commitInfo": {"timestamp": number}}) + "\n" + json.dumps(action)
        )
        if number == commits // 10 * 10 - 5 and commits > 10:
            DeltaTable(str(table)).create_checkpoint()
    return table


@contextmanager
def placed(table: Path, kind: str) -> Iterator[tuple[str, dict[str, str], Callable[[], object] | None]]:
    """Where a table lies, with the options for it; and the bare request for what follows its newest commit."""
    if kind == "disk":
        yield str(table), {}, None
        return
    newest = f"{table.name}/_delta_log/{max((table / '_delta_log').glob('*.json')).name[:20]}"
    with s3(table, "bench", table.name, 0) as endpoint:
        client = boto3.client("s3", endpoint_url=endpoint)
        listed = functools.partial(
            client.list_objects_v2, Bucket="bench", Prefix=f"{table.name}/_delta_log/", StartAfter=newest, Delimiter="/"
        )
        yield f"s3://bench/{table.name}", {"lookup.storage.endpoint_url": endpoint}, listed


def log(home: Path, work: Path, commits: int, runs: int) -> None:
    print(
        "\n| store | commits | who asks | median ms | p99 ms | HEAD | LIST | GET | bytes |\n|---|---|---|---|---|---|---|---|---|"
    )
    medians: dict[tuple[str, int], float] = {}
    for kind in ("disk", "S3"):
        for count in (10, commits):
            with placed(make_log(home, count), kind) as (path, own, bare):
                known, asks_bare = "a host that knows it", "boto3: one LIST"
                asking = {"a new host": min(runs, 5), known: runs * 20, **({asks_bare: runs * 20} if bare else {})}
                for who, asks in asking.items():
                    times, spent = [], dict[str, int]()
                    reader = opened(path, work / f"{kind}-{count}-0", own)
                    for run in range(asks):
                        if who == "a new host":
                            reader = opened(path, work / f"{kind}-{count}-{run}", own)
                        began = time.perf_counter()
                        if who == asks_bare and bare:
                            bare()
                        else:
                            spent = calls_of(reader, lambda reader=reader: reader.version)  # type: ignore[misc]
                        times.append(time.perf_counter() - began)
                    median = statistics.median(times) * 1000
                    if who == known:
                        medians[kind, count] = median
                    last = " | ".join(f"{value:,}" for value in spent.values())
                    p99 = sorted(times)[int(len(times) * 0.99)] * 1000
                    print(f"| {kind} | {count:,} | {who} | {median:.2f} | {p99:.2f} | {last} |", flush=True)
        print(
            f"| {kind} | {commits:,} to 10, unchanged | | {medians[kind, commits] / medians[kind, 10]:.2f} times | | | | | |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()) / "lookupcache-bench")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--files", type=int, default=100)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--commits", type=int, default=10_000)
    given = parser.parse_args()
    given.dir.mkdir(parents=True, exist_ok=True)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    parts = given.parts.split(",")
    with tempfile.TemporaryDirectory(dir=given.dir) as work:
        home = Path(work)
        table = make_delta(given.dir, given.rows, given.files) if {*parts} - {"log"} else Path()
        runners: dict[str, Callable[[], None]] = {
            "unchanged": lambda: unchanged(table, home / "unchanged", given.runs),
            "keys": lambda: keys(table, home / "keys", given.rows, given.runs),
            "visible": lambda: visible(table, home / "visible", given.rows, given.runs),
            "stream": lambda: stream(table, home / "stream", given.rows, given.runs),
            "log": lambda: log(given.dir, home / "log", given.commits, given.runs),
        }
        for part in parts:
            (home / part).mkdir()
            runners[part]()


if __name__ == "__main__":
    main()
