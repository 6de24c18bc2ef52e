"""What does a Delta table cost, beside deltalake: nothing new, 10,000 keys, a commit, a micro-batch; and a log of 10,000 commits?

The table has 10M rows in 100 files, on a local disk, unless arguments say otherwise; it is written by deltalake, and made once.

unchanged  a key of a FULL cache when nothing is new, beside what tells deltalake so: `update_incremental` of an open table, and
           opening it again.
keys       10,000 keys, the same ones again, in NONE, PARTIAL and FULL, all warm, beside `DeltaTable.scan` with
           the predicate `id IN (…)`.
visible    a build of the FULL cache, and then how long until the first answer that has an append of 1 % (goal: 3 % of a build),
           and until 10,000 rows are gone that deletion vectors delete (goal: 1 %, and 0 bytes of data files).
reload     a FULL cache of tables of 100 and of 10,000 files of two rows, without deletion vectors (and with a checkpoint), and with one for
           each file (and no checkpoint): how long until the first answer with the rows of a commit that adds one file. Goal: at most twice
           as long with 10,000 files as with 100.
stream     a micro-batch of 10,000 rows joined to the table, beside the same stream joined to a broadcast of all the rows, which deltalake
           reads in each micro-batch.
large      a table of 300,000 files with statistics of 100 columns (no data files; 650 MB of checkpoint): what a new host, a new process, a
           commit of one file and a key that no file can have cost, beside `DeltaTable(path)`. Each in a process of its own, with its
           imports done. Goals: a new host 1.5 times deltalake, a new process 0.25 times and 150 MB, a commit 20 ms, a key 30 ms.
log        a new process of a host that knows the log, and a new host, of tables with 10 and 10,000 commits, on disk and on S3 (moto on
           loopback, whose own time for a LIST grows with the bucket: see the bare request): requests, bytes and seconds. Goal:
           unchanged at most 1.2 times what it costs on ten.

    pip install -e '.[spark,bench,test]'
    python -m benchmarks.bench_delta [--parts unchanged,keys,visible,reload,stream,large,log] [--rows N] [--files N] [--runs N]
                                     [--commits N] [--large-files N] [--columns N]
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake
from deltalake.transaction import AddAction

from benchmarks import lake
from benchmarks.lake import FULL, KEYS, MODES, Change, count_calls, customers, drawn_keys, more_rows, opened
from benchmarks.servers import s3
from pyspark_lookup import LookupTable
from tests.support.delta_tables import append_commit, write_vectors

PARTS = ("unchanged", "keys", "visible", "reload", "stream", "large", "log")


def make_delta(home: Path, rows: int, files: int) -> Path:
    """Write a Delta table of `rows` customers, with a commit for each file. Made once."""
    table = home / f"delta-{rows}-{files}"
    if not (table / "_delta_log" / f"{files - 1:020}.json").exists():
        for file in customers(home, rows, files):
            write_deltalake(str(table), pq.read_table(file), mode="append")
    return table


def unchanged(table: Path, work: Path, runs: int) -> None:
    table_state = DeltaTable(str(table))
    peers = {
        "update_incremental": table_state.update_incremental,
        "DeltaTable(path)": lambda: DeltaTable(str(table)).version(),
    }
    lake.unchanged(opened(table, work / "host", FULL), peers, runs)


def keys(table: Path, work: Path, rows: int, runs: int) -> None:
    drawn, table_state = drawn_keys(rows), DeltaTable(str(table))
    readers = {name: opened(table, work / "host", options) for name, options in MODES.items()}
    predicate = f"id IN ({', '.join(map(str, drawn.column('id').to_pylist()))})"
    lake.keys(
        readers, drawn, rows, "DeltaTable.scan", lambda: pa.table(table_state.scan(predicate=predicate)).num_rows, runs
    )


def visible(table: Path, work: Path, rows: int, runs: int) -> None:
    def make(copy: Path, host: Path) -> tuple[LookupTable, list[Change]]:
        shutil.copytree(table, copy)
        new = more_rows(min(table.glob("*.parquet")), rows)
        return opened(copy, host, FULL), [
            Change("append", lambda: write_deltalake(str(copy), new, mode="append"), rows, 1),
            Change("vectors", lambda: delete_by_vectors(copy, KEYS), 0, 0),
        ]

    lake.visible(make, work, rows, runs)


def reload(work: Path, runs: int) -> None:
    print(
        "\n| files | deletion vectors | a build, s | one more commit, median s | at most, s | CPU s |\n|---|---|---|---|---|---|"
    )
    for count, has_vectors in itertools.product((100, 10_000), (False, True)):
        path = work / f"t{count}-{has_vectors}"
        write_deltalake(str(path), _make_rows(0))
        table = DeltaTable(str(path))

        def commit(numbers: Iterable[int], path: Path = path, table: DeltaTable = table) -> None:
            table.update_incremental()
            table.create_write_transaction([_add_file(path, number) for number in numbers], "append", table.schema())

        commit(range(1, count))
        if has_vectors:
            delete_by_vectors(path, count)
        else:
            table.update_incremental()
            table.create_checkpoint()
        reader = opened(path, work / f"host{count}-{has_vectors}", FULL)
        start_s = time.perf_counter()
        reader.get(0)
        build_s, times, cpu = time.perf_counter() - start_s, [], []
        for number in range(count, count + runs):
            commit([number])
            start_s, cpu_s = time.perf_counter(), time.process_time()
            assert [row["name"] for row in reader.get(2 * number)] == [f"v{number}"]
            times.append(time.perf_counter() - start_s)
            cpu.append(time.process_time() - cpu_s)
        numbers = build_s, statistics.median(times), max(times), statistics.median(cpu)
        print(
            f"| {count:,} | {'yes' if has_vectors else 'no'} | "
            + " | ".join(f"{number:.3f}" for number in numbers)
            + " |",
            flush=True,
        )


def _make_rows(number: int) -> pa.Table:
    return pa.table({"id": [2 * number, 2 * number + 1], "name": [f"v{number}"] * 2})


def _add_file(table: Path, number: int) -> AddAction:
    """Write a file of two rows, and return the action that adds it to the table."""
    path = table / f"f{number:07}.parquet"
    pq.write_table(_make_rows(number), path)
    bounds = {"numRecords": 2, "minValues": {"id": 2 * number}, "maxValues": {"id": 2 * number + 1}}
    return AddAction(path.name, path.stat().st_size, {}, int(time.time() * 1000), True, json.dumps(bounds))


def delete_by_vectors(table: Path, count: int) -> None:
    """Delete about `count` rows: write a deletion vector for each file, which deletes its first rows. No file may have one already."""
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
    vectors = write_vectors(table, [range(-(-count // len(adds)))] * len(adds))  # in one file, as Delta writes them
    for (path, add), vector in zip(adds.items(), vectors, strict=True):
        actions.append({"remove": {"path": path, "deletionTimestamp": 1, "dataChange": True}})
        actions.append({"add": {**add, "dataChange": True, "deletionVector": vector}})
    append_commit(table, actions)


def stream(table: Path, work: Path, rows: int, runs: int) -> None:
    def read() -> pa.Table:
        rows = pa.table(DeltaTable(str(table)).scan())
        # Spark does not accept string_view.
        plain = [field.with_type(pa.string()) if field.type == pa.string_view() else field for field in rows.schema]
        return rows.cast(pa.schema(plain))

    lake.stream(table, {}, "deltalake", read, work, rows, runs)


_SHARE = 20_000  # files that are added to the checkpoint at once


def make_large(home: Path, files: int, columns: int) -> Path:
    """Write the log of a table of `files` files: one checkpoint with the statistics of each column. There are no data files."""
    table = home / f"large-{files}-{columns}"
    log = table / "_delta_log"
    if (log / "_last_checkpoint").exists():
        return table
    log.mkdir(parents=True, exist_ok=True)
    names = ["id", *(f"c{number}" for number in range(1, columns))]
    kinds = ["string" if number % 4 == 3 else "long" for number in range(columns)]
    fields = [{"name": n, "type": k, "nullable": True, "metadata": {}} for n, k in zip(names, kinds, strict=True)]
    metadata = {"id": "large", "schemaString": json.dumps({"type": "struct", "fields": fields}), "partitionColumns": []}
    protocol = {"minReaderVersion": 1, "minWriterVersion": 2}
    definition = {**metadata, "format": {"provider": "parquet", "options": {}}, "configuration": {}}
    for number, actions in enumerate([[{"protocol": protocol}, {"metaData": definition}], [{"commitInfo": {}}]]):
        (log / f"{number:020}.json").write_text("".join(json.dumps(action) + "\n" for action in actions))
    texts = pa.map_(pa.string(), pa.string())
    numbers = {"size": pa.int64(), "modificationTime": pa.int64(), "dataChange": pa.bool_()}
    add = pa.struct({"path": pa.string(), "partitionValues": texts, **numbers, "stats": pa.string()})
    form = pa.struct({"provider": pa.string(), "options": texts})
    lists = {"partitionColumns": pa.list_(pa.string()), "configuration": texts}
    meta = pa.struct({"id": pa.string(), "format": form, "schemaString": pa.string(), **lists})
    schema = pa.schema({"add": add, "metaData": meta, "protocol": pa.struct(dict.fromkeys(protocol, pa.int32()))})
    with pq.ParquetWriter(log / f"{1:020}.checkpoint.parquet", schema) as writer:
        described = {**metadata, "format": {"provider": "parquet", "options": []}, "configuration": []}
        writer.write_batch(pa.RecordBatch.from_pylist([{"protocol": protocol}, {"metaData": described}], schema))
        for start in range(0, files, _SHARE):
            count = min(_SHARE, files - start)
            ids = np.arange(start, start + count)
            rng = np.random.default_rng(start)
            low = [ids * 1000, *(rng.integers(0, 10**6, count) for _ in names[1:])]
            high = [ids * 1000 + 999, *(values + rng.integers(0, 10**6, count) for values in low[1:])]
            nulls = [rng.integers(0, 3, count) for _ in names]
            parts = zip(("minValues", "maxValues", "nullCount"), (low, high, nulls), strict=True)
            quoted = [kind == "string" for kind in kinds]
            objects = [
                _json_objects(key, names, values, quoted if key != "nullCount" else [False] * columns)
                for key, values in parts
            ]
            stats = pc.binary_join_element_wise('{"numRecords":1000', *objects, ",")
            stats = pc.binary_join_element_wise(stats, "}", "")
            paths = pa.array([f"part-{i:06}-{i * 2654435761 % 2**32:08x}.snappy.parquet" for i in ids.tolist()])
            offsets = pa.array(np.zeros(count + 1, np.int32))
            no_texts = pa.array([], pa.string())
            constants = [pa.array(np.full(count, value)) for value in (5_000_000, 1_700_000_000_000, True)]
            columns_of_add = [paths, pa.MapArray.from_arrays(offsets, no_texts, no_texts), *constants, stats]
            adds = pa.StructArray.from_arrays(columns_of_add, fields=list(add))
            null_columns = [pa.nulls(count, schema.field(name).type) for name in ("metaData", "protocol")]
            writer.write_batch(pa.RecordBatch.from_arrays([adds, *null_columns], schema=schema))
    (log / "_last_checkpoint").write_text(json.dumps({"version": 1, "size": files + 2}))
    return table


def _json_objects(key: str, names: list[str], values: list[Any], quoted: list[bool]) -> pa.Array:
    """`"key":{"name":value,…}` for each row of the values."""
    pairs = [
        pc.binary_join_element_wise(f'"{name}":{mark}', pa.array(numbers).cast(pa.string()), mark, "")
        for name, numbers, mark in zip(names, values, ['"' if quote else "" for quote in quoted], strict=True)
    ]
    return pc.binary_join_element_wise(f'"{key}":{{', pc.binary_join_element_wise(*pairs, ","), "}", "")


_MEASURE = """
import json, sys, time
import deltalake, pandas, pyarrow.json, pyarrow.parquet
from pyspark_lookup import LookupTable
path, cache, what = sys.argv[1:]
def anonymous():
    return sum(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("Anonymous")) / 1024
before = anonymous()
reader = None if what == "deltalake" else LookupTable(path, {"lookup.cache.dir": cache, "lookup.keys": "id", "lookup.cache": "NONE"})
times = []
for act in [lambda: deltalake.DeltaTable(path)] if reader is None else [lambda: reader.version, lambda: reader.version, lambda: reader.get(-1), lambda: reader.get(-2)]:
    wall, cpu = time.perf_counter(), time.process_time()
    kept = act()
    times.append((time.perf_counter() - wall, time.process_time() - cpu))
print(json.dumps([times, anonymous() - before]))
"""


def large(home: Path, work: Path, files: int, columns: int, runs: int) -> None:
    table = make_large(home, files, columns)
    print(f"\n{files:,} files, statistics of {columns} columns; seconds of CPU (time) as medians of {runs} runs")
    print("\n| who | version | again | a key | another key | anonymous MB |\n|---|---|---|---|---|---|")
    medians: dict[str, float] = {}

    def measure(contender: str, caches: Sequence[str]) -> None:
        answers = []
        for cache in caches:
            command = [sys.executable, "-c", _MEASURE, str(table), str(work / cache), contender]
            answers.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        count = len(answers[0][0])
        walls, cpus = ([statistics.median(a[0][n][side] for a in answers) for n in range(count)] for side in (0, 1))
        medians[contender] = cpus[0]
        cells = [f"{cpu:.3f} ({wall:.3f})" for wall, cpu in zip(walls, cpus, strict=True)] + [""] * (4 - count)
        print(f"| {contender} | {' | '.join(cells)} | {statistics.median(a[1] for a in answers):.0f} |", flush=True)

    measure("deltalake", [""] * runs)
    measure("a new host", [f"large-{run}" for run in range(runs)])
    measure("a new process", ["large-0"] * runs)
    reader = opened(str(table), work / "large-0", {"lookup.keys": "id"})
    assert reader.version
    ids = itertools.count(files)
    times = []
    log = table / "_delta_log"
    try:
        for _ in range(runs * 4):
            stats = json.dumps(
                {"numRecords": 1, "minValues": {"id": 0}, "maxValues": {"id": 0}, "nullCount": {"id": 0}}
            )
            add = {
                "path": f"added-{next(ids)}.parquet",
                "size": 9,
                "partitionValues": {},
                "modificationTime": 0,
                "stats": stats,
            }
            append_commit(table, [{"add": {**add, "dataChange": True}}])
            cpu = time.process_time()
            assert reader.version
            times.append(time.process_time() - cpu)
    finally:
        for commit in sorted(log.glob("*.json"))[2:]:
            commit.unlink()
    ratios = {contender: medians[contender] / medians["deltalake"] for contender in ("a new host", "a new process")}
    print(
        f"\na commit of one file: {statistics.median(times) * 1000:.1f} ms of CPU, p99 {sorted(times)[-1] * 1000:.1f}"
    )
    print("beside deltalake: " + ", ".join(f"{contender} {ratio:.3f} times" for contender, ratio in ratios.items()))


def make_log(home: Path, commits: int) -> Path:
    """Write a table with `commits` commits of one small file each, and the last of the checkpoints that Delta writes by default."""
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
    """Put a table on disk or in S3. Yields (its location, its options, a bare request for what follows its newest commit; None on disk)."""
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
            with placed(make_log(home, count), kind) as (path, options, bare):
                known_host, asks_bare = "a host that knows it", "boto3: one LIST"
                asking = {"a new host": min(runs, 5), known_host: runs * 20, **({asks_bare: runs * 20} if bare else {})}
                for client, asks in asking.items():
                    times, spent = [], dict[str, int]()
                    reader = opened(path, work / f"{kind}-{count}-0", options)
                    for run in range(asks):
                        if client == "a new host":
                            reader = opened(path, work / f"{kind}-{count}-{run}", options)
                        start_s = time.perf_counter()
                        if client == asks_bare and bare:
                            bare()
                        else:
                            spent = count_calls(reader, lambda reader=reader: reader.version)  # type: ignore[misc]
                        times.append(time.perf_counter() - start_s)
                    median = statistics.median(times) * 1000
                    if client == known_host:
                        medians[kind, count] = median
                    last = " | ".join(f"{value:,}" for value in spent.values())
                    p99 = sorted(times)[int(len(times) * 0.99)] * 1000
                    print(f"| {kind} | {count:,} | {client} | {median:.2f} | {p99:.2f} | {last} |", flush=True)
        print(
            f"| {kind} | {commits:,} to 10, unchanged | | {medians[kind, commits] / medians[kind, 10]:.2f} times | | | | | |"
        )


def main() -> None:
    parser = lake.arguments(__doc__, PARTS, 5)
    parser.add_argument("--commits", type=int, default=10_000)
    parser.add_argument("--large-files", type=int, default=300_000)
    parser.add_argument("--columns", type=int, default=100)
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    table = (
        make_delta(args.dir, args.rows, args.files) if {*args.parts.split(",")} - {"log", "large", "reload"} else Path()
    )
    runners: dict[str, Callable[[Path], None]] = {
        "unchanged": lambda work: unchanged(table, work, args.runs),
        "keys": lambda work: keys(table, work, args.rows, args.runs),
        "visible": lambda work: visible(table, work, args.rows, args.runs),
        "reload": lambda work: reload(work, args.runs),
        "stream": lambda work: stream(table, work, args.rows, args.runs),
        "large": lambda work: large(args.dir, work, args.large_files, args.columns, args.runs),
        "log": lambda work: log(args.dir, work, args.commits, args.runs),
    }
    lake.run_parts(args, runners)


if __name__ == "__main__":
    main()
