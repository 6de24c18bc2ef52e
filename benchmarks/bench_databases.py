"""What do lookups in PostgreSQL cost, beside what is written by hand? How soon are changes seen? How fast is an HTTP API asked within its limit?

    python -m benchmarks.bench_databases                                        # four minutes: a million rows, also of the table that changes
    python -m benchmarks.bench_databases --rows 1000000 --of 10000000 --runs 20 --batches 10
    python -m benchmarks.bench_databases --parts changes

`lookups`: 10,000 keys that are all there, without Spark, beside a SELECT by psycopg whose rows become Arrow columns. The keys of *PARTIAL, cold*
are others in each run; those of *PARTIAL, warm* the same.

`idle`: a lookup of a cached key when nothing has changed, beside a SELECT of the version by psycopg.

`stream`: micro-batches of 10,000 facts, `local[2]`, written to Spark's `noop` sink: `lookup_join` beside a `foreachBatch` that reads the table by
Spark's JDBC source and joins it with the broadcast hint, and beside one whose tasks select the rows by psycopg. CPU is that of Spark, of all
Python processes and of the server.

`changes`: the time until a lookup of 1,000 changed keys has returned their new rows, after their commit, as a share of a build (goal: 3 %), and
the statements that the server was sent for it. The recipe of docs/databases.md keeps version and changes.

`http`: keys/s of a table with `lookup.rate-limit` = 500/s, one key in a request, if 0, 50 or 95 % of the keys are cached. The peer is the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from aiohttp import web
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from benchmarks.common import alternate, cpu_s, report, session
from pyspark_lookup import LookupTable, lookup_join
from tests.support.databases import CHANGES, VERSION, recipe
from tests.support.postgres import PostgresServer

COLUMNS = ["name", "score", "visits"]
SELECT = "SELECT id, name, score, visits FROM customers WHERE id = ANY(%s)"
SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string()), ("score", pa.float64()), ("visits", pa.int32())])
FACTS = "k long, amount double"
FOLLOWED = {"lookup.version-query": VERSION, "lookup.changes-query": CHANGES}
MODES = {
    "NONE": {},
    "PARTIAL": {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "10000000", **FOLLOWED},
    "FULL": {"lookup.cache": "FULL", "lookup.full-cache.build-wait": "1 h", **FOLLOWED},
}
Sink = Callable[[DataFrame], Any]


def fill(server: PostgresServer, rows: int) -> None:
    """Create the table `customers` with `rows` rows, and what the recipe adds to it."""
    server.execute("DROP TABLE IF EXISTS customers, customers_version, customers_changes")
    server.execute("CREATE TABLE customers (id bigint, name text, score double precision, visits integer)")
    columns = "i, 'customer-' || (i::bigint * 7919 % 1000000), random(), i % 500"
    server.execute(f"INSERT INTO customers SELECT {columns} FROM generate_series(0, {rows - 1}) AS i")
    server.execute("ALTER TABLE customers ADD PRIMARY KEY (id)")
    server.execute("DROP FUNCTION IF EXISTS customers_changed")
    server.execute(recipe("postgresql"))
    server.execute("VACUUM ANALYZE customers")


def make_options(mode: str, home: Path) -> dict[str, str]:
    return {
        "lookup.table": "customers",
        "lookup.keys": "id",
        "lookup.cache.dir": str(home / f"host-{mode}"),
        **MODES[mode],
    }


def table_of_rows(rows: list[tuple[Any, ...]]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [()] * len(SCHEMA)
    return pa.table(
        [pa.array(values, field.type) for values, field in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
    )


def heading(question: str) -> None:
    print(f"\n## {question}")
    print(f"command: {' '.join(['python', '-m', 'benchmarks.bench_databases', *sys.argv[1:]])}")
    print(f"machine: {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")


# --- lookups without Spark --------------------------------------------------------------------------


def bench_lookups(server: PostgresServer, home: Path, rows: int, count: int, runs: int) -> None:
    rng = np.random.default_rng(1)
    batches = [
        pa.table({"id": keys}) for keys in np.split(rng.permutation(rows)[: rows // count * count], rows // count)
    ]
    if len(batches) < runs + 3:
        raise SystemExit(f"--rows {rows}: {runs} runs with {count} keys each need at least {(runs + 3) * count}")
    cold, keys = iter(batches[1:]), batches[0]
    connection = psycopg.connect(server.uri)
    tables = {mode: LookupTable(server.uri, make_options(mode, home)) for mode in MODES}
    start_s = time.perf_counter()
    tables["FULL"].get(1)
    print(f"a build of {rows:,} rows: {time.perf_counter() - start_s:.2f} s")
    contenders: dict[str, Callable[[], pa.Table]] = {
        "psycopg, by hand": lambda: table_of_rows(connection.execute(SELECT, [keys["id"].to_pylist()]).fetchall()),
        "NONE": lambda: tables["NONE"].get_many(keys),
        "PARTIAL, cold": lambda: tables["PARTIAL"].get_many(next(cold)),
        "PARTIAL, warm": lambda: tables["PARTIAL"].get_many(keys),
        "FULL": lambda: tables["FULL"].get_many(keys),
    }
    for name, run in contenders.items():
        assert run().num_rows == count, name
    report(
        f"{count:,} keys of {rows:,} rows in PostgreSQL, without Spark",
        alternate(contenders, 1, runs),
        "psycopg, by hand",
    )
    connection.close()
    for table in tables.values():
        table.close()


def bench_idle(server: PostgresServer, home: Path, runs: int) -> None:
    peer = "psycopg: SELECT n FROM customers_version"
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(psycopg.connect(server.uri, autocommit=True))
        tables = {mode: stack.enter_context(LookupTable(server.uri, make_options(mode, home))) for mode in MODES}
        contenders: dict[str, Callable[[], Any]] = {peer: lambda: connection.execute(VERSION).fetchall()}
        contenders |= {mode: functools.partial(table.get, 1) for mode, table in tables.items()}
        report(
            "One key, which is cached, and nothing has changed (NONE: asked for)",
            alternate(contenders, 20, 50 * runs),
            peer,
        )


# --- micro-batches ----------------------------------------------------------------------------------


def make_facts(directory: Path, rows: int, count: int, files: int, is_cold: bool) -> Path:
    """Write files of facts, one for each micro-batch. If `is_cold`, each has keys of its own; otherwise all have the same keys."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(2)
    keys = rng.permutation(rows)
    for number in range(files):
        file_keys = keys[number * count : (number + 1) * count] if is_cold else rng.permutation(keys[-count:])
        pq.write_table(pa.table({"k": file_keys, "amount": rng.random(count)}), directory / f"{number:05}.parquet")
    return directory


def triggers(spark: SparkSession, facts: Path, home: Path, sink: Sink) -> tuple[list[float], float]:
    """Run a stream to its end. Returns (seconds of each micro-batch but the first two, CPU seconds of one of them).

    The stream ends with its last file. If it were stopped in the middle of a micro-batch, Spark might end its thread with a StackOverflowError.
    """
    stream = spark.readStream.schema(FACTS).option("maxFilesPerTrigger", "1").parquet(str(facts))
    writer = sink(stream).option("checkpointLocation", tempfile.mkdtemp(dir=home))
    query = writer.trigger(availableNow=True).start()

    def progress() -> dict[int, float]:
        return {
            p["batchId"]: p["durationMs"]["triggerExecution"] / 1000 for p in query.recentProgress if p["numInputRows"]
        }

    while max(progress(), default=0) < 1:
        if query.awaitTermination(0.1):
            raise RuntimeError(f"the stream has ended after {len(progress())} micro-batches")
    first, began_s = max(progress()), cpu_s()[0]
    query.awaitTermination()
    seconds, used_s = progress(), cpu_s()[0] - began_s
    return [time_s for number, time_s in seconds.items() if number > 1], used_s / (max(seconds) - first)


def select_by_hand(uri: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def select(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with psycopg.connect(uri) as connection:
            for batch in batches:
                rows = connection.execute(SELECT, [batch.column(0).to_pylist()]).fetchall()
                joined = pa.Table.from_batches([batch]).join(table_of_rows(rows), "k", "id")
                yield from joined.select(["k", "amount", *COLUMNS]).to_batches()

    return select


def bench_stream(
    server: PostgresServer, home: Path, rows: int, count: int, batches: int, rounds: int, jdbc: str
) -> None:
    spark = session(
        2,
        {
            "spark.jars.packages": jdbc,
            "spark.jars.excludes": "org.checkerframework:checker-qual",
            "spark.sql.streaming.numRecentProgressUpdates": "1000",
        },
    )
    if rows < (batches + 2) * count:
        raise SystemExit(
            f"--rows {rows}: {batches} micro-batches of {count} keys each need at least {(batches + 2) * count}"
        )
    cold = make_facts(home / "cold", rows, count, batches + 2, True)
    warm = make_facts(home / "warm", rows, count, batches + 2, False)
    address = server.uri.partition("?")[0]

    def joined(mode: str, number: int = 0) -> Sink:
        options = make_options(mode, home / f"round-{number}")
        return lambda df: lookup_join(df, server.uri, {"k": "id"}, columns=COLUMNS, options=options).writeStream.format(
            "noop"
        )

    def in_batch(write: Callable[[DataFrame], DataFrame]) -> Sink:
        return lambda df: df.writeStream.foreachBatch(
            lambda batch, _: write(batch).write.format("noop").mode("overwrite").save()
        )

    def by_jdbc(batch: DataFrame) -> DataFrame:
        reader = batch.sparkSession.read.format("jdbc").option("url", f"jdbc:{address}").option("user", "tester")
        reader = reader.option("driver", "org.postgresql.Driver")
        table = reader.option("dbtable", "customers").option("fetchsize", 10_000).load()
        return batch.join(sf.broadcast(table), sf.col("k") == sf.col("id"), "left").drop("id")

    def by_hand(batch: DataFrame) -> DataFrame:
        return batch.mapInArrow(select_by_hand(server.uri), f"{FACTS}, name string, score double, visits int")

    peer = "foreachBatch, psycopg by hand"
    contenders: dict[str, tuple[Path, Callable[[int], Sink]]] = {
        peer: (cold, lambda number: in_batch(by_hand)),
        "foreachBatch, JDBC broadcast join": (cold, lambda number: in_batch(by_jdbc)),
        "lookup_join, NONE": (cold, lambda number: joined("NONE")),
        "lookup_join, PARTIAL, cold": (cold, lambda number: joined("PARTIAL", number)),
        "lookup_join, PARTIAL, warm": (warm, lambda number: joined("PARTIAL", number)),
        "lookup_join, FULL": (cold, lambda number: joined("FULL")),
    }
    seconds: dict[str, list[list[float]]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, (facts, sink) in contenders.items():
            times, used_s = triggers(spark, facts, home, sink(number))
            print(f"round {number}: {name}: {statistics.median(times):.3f} s", file=sys.stderr, flush=True)
            seconds[name].append(times)
            cpu[name].append(used_s)
    spark.stop()
    heading(f"A micro-batch of {count:,} facts beside {rows:,} rows in PostgreSQL (local[2])")
    print("| contender | micro-batches | median s | p99 s | max s | CPU s | ratio to peer (median of rounds) |")
    print("|---|---|---|---|---|---|---|")
    medians = {name: [statistics.median(times) for times in samples] for name, samples in seconds.items()}
    for name, samples in seconds.items():
        every = [time_s for times in samples for time_s in times]
        ratio = statistics.median(
            median / peer_median for median, peer_median in zip(medians[name], medians[peer], strict=True)
        )
        print(
            f"| {name} | {len(every)} | {statistics.median(every):.3f} | {np.percentile(every, 99):.3f} | {max(every):.3f} | "
            f"{statistics.median(cpu[name]):.2f} | {'peer' if name == peer else f'{ratio:.2f}'} |"
        )


# --- changes ----------------------------------------------------------------------------------------


def bench_changes(server: PostgresServer, home: Path, rows: int, changed: int, runs: int) -> None:
    rng = np.random.default_rng(3)
    full = LookupTable(server.uri, make_options("FULL", home / "changes"))
    partial = LookupTable(server.uri, make_options("PARTIAL", home / "changes"))
    start_s, used_s = time.perf_counter(), cpu_s()[0]
    assert full.get(0)
    build_s, build_cpu_s = time.perf_counter() - start_s, cpu_s()[0] - used_s
    changed_ids = rng.choice(rows, min(10 * changed, rows), replace=False)
    partial.get_many(pa.table({"id": changed_ids}))
    contenders = {"FULL": full, "PARTIAL": partial}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    statements: dict[str, list[int]] = {name: [] for name in contenders}
    for number in range(runs):
        keys = rng.choice(changed_ids, changed, replace=False)
        visits = 1_000 + number
        server.execute(f"UPDATE customers SET visits = {visits} WHERE id = ANY('{{{','.join(map(str, keys))}}}')")
        for name, table in contenders.items():
            before, used_s = len(server.statements()), cpu_s()[0]
            start_s = time.perf_counter()
            answer = table.get_many(pa.table({"id": keys}))
            seconds[name].append(time.perf_counter() - start_s)
            cpu[name].append(cpu_s()[0] - used_s)
            statements[name].append(len(server.statements()) - before)
            assert answer["visits"].to_pylist() == [visits] * changed, name
    for table in contenders.values():
        table.close()
    heading(f"{changed:,} of {rows:,} rows in PostgreSQL have changed: the first lookup of these keys")
    print(
        "| contender | runs | median s | max s | CPU s | build s | build CPU s | share of a build, % (goal 3) | share of its CPU, % | statements |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, times in seconds.items():
        share, used_s = 100 * statistics.median(times) / build_s, statistics.median(cpu[name])
        print(
            f"| {name} | {runs} | {statistics.median(times):.3f} | {max(times):.3f} | {used_s:.2f} | {build_s:.2f} | {build_cpu_s:.2f} | "
            f"{share:.2f} | {100 * used_s / build_cpu_s:.2f} | {statistics.median(statements[name]):g} |"
        )


# --- HTTP -------------------------------------------------------------------------------------------


def serve(port: Any) -> None:
    """Serve an API that has a row for each id. Sends the port it listens on to `port`."""

    async def answer(request: web.Request) -> web.Response:
        number = int(request.match_info["id"])
        return web.json_response({"id": number, "name": f"customer-{number}"})

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/customers/{id}", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


def bench_http(home: Path, limit: int, seconds: float, at_once: int) -> None:
    receiver, sender = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(sender,), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{receiver.recv()}/customers/{{id}}"
    heading(f"Keys/s of an HTTP API within {limit} requests/s, batches of {at_once:,} keys")
    print("| hits, % | keys | s | keys/s | requests/s | keys/s, of what the limit allows |")
    print("|---|---|---|---|---|---|")
    try:
        for hits in (0.0, 0.5, 0.95):
            _measure_http(url, home / f"http-{hits:g}", hits, limit, seconds, at_once)
    finally:
        server.terminate()
        server.join()


def _measure_http(url: str, cache: Path, hits: float, limit: int, seconds: float, at_once: int) -> None:
    options = {
        "lookup.provider": "http",
        "lookup.http.url": url,
        "lookup.schema": "id BIGINT, name STRING",
        "lookup.keys": "id",
        "lookup.cache": "PARTIAL",
        "lookup.partial-cache.expire-after-write": "1 h",
        "lookup.partial-cache.max-rows": "10000000",
        "lookup.cache.dir": str(cache),
    }
    cached_ids = np.arange(at_once)
    with LookupTable(None, options) as unlimited:
        unlimited.get_many(pa.table({"id": cached_ids}))
    with LookupTable(None, {**options, "lookup.rate-limit": str(limit)}) as table:
        # The limit holds for each second, so the first requests would all be sent at once. Spend that burst before the clock starts.
        table.get_many(pa.table({"id": np.arange(10**9, 10**9 + limit)}))
        new, ids_done = at_once, 0
        start_s = time.perf_counter()
        while ids_done < limit * seconds / (1 - hits):
            count = round(at_once * (1 - hits))
            keys = np.concatenate([cached_ids[: at_once - count], np.arange(new, new + count)])
            assert table.get_many(pa.table({"id": keys})).num_rows == at_once
            new, ids_done = new + count, ids_done + at_once
        took_s = time.perf_counter() - start_s
    allowed = limit / (1 - hits)
    print(
        f"| {100 * hits:.0f} | {ids_done:,} | {took_s:.1f} | {ids_done / took_s:,.0f} | {(new - at_once) / took_s:.0f} | {ids_done / took_s / allowed:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="lookups,idle,stream,changes,http", help="with commas")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the table of lookups and of the stream")
    parser.add_argument("--keys", type=int, default=10_000, help="in a lookup, and facts in a micro-batch")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batches", type=int, default=6, help="micro-batches in a round")
    parser.add_argument("--of", type=int, default=1_000_000, help="rows of the table that changes")
    parser.add_argument("--changed", type=int, default=1_000)
    parser.add_argument("--limit", type=int, default=500, help="requests/s")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each share of hits")
    parser.add_argument("--jdbc", default="org.postgresql:postgresql:42.7.13", help="the driver of the JDBC source")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()) / "lookupcache-bench")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    parts, home = args.parts.split(","), Path(tempfile.mkdtemp(dir=args.dir))
    server = functools.partial(PostgresServer, logged="none")
    try:
        if {"lookups", "idle", "stream"} & set(parts):
            with contextlib.closing(server()) as postgres:
                fill(postgres, args.rows)
                if "lookups" in parts:
                    bench_lookups(postgres, home, args.rows, args.keys, args.runs)
                if "idle" in parts:
                    bench_idle(postgres, home, args.runs)
                if "stream" in parts:
                    bench_stream(postgres, home, args.rows, args.keys, args.batches, args.rounds, args.jdbc)
        if "changes" in parts:
            with contextlib.closing(PostgresServer()) as postgres:
                fill(postgres, args.of)
                bench_changes(postgres, home, args.of, args.changed, args.runs)
        if "http" in parts:
            bench_http(home, args.limit, args.seconds, args.keys // 10)
    finally:
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
