"""What does an Iceberg table cost, beside PyIceberg: nothing new, 10,000 keys, an append, equality deletes, a micro-batch?

The table has 10M rows in 100 files, on a local disk and in an SQL catalog, unless arguments say otherwise; it is written by PyIceberg,
with a snapshot for each file, and made once.

unchanged  a key of a FULL cache when nothing is new, beside what tells PyIceberg so: `refresh` of an open table, and loading it again. In
           the SQL catalog, in a REST catalog (on loopback and in this process, so that both pay for its answers; a bare request for one is
           a contender, too), and by a version hint.
keys       10,000 keys, the same ones again, in NONE, PARTIAL and FULL, all warm, beside `Table.scan` with the filter `In("id", …)`.
visible    a build of the FULL cache, and then how long until the first answer that has an append of 1 % (goal: 3 % of a build),
           and until 10,000 rows are gone that an equality delete file deletes (goal: 3 %, and 0 bytes of data files).
upserts    commits of 500 rows each, as Flink writes them: an equality delete of their keys, and the rows anew. After 100, 200, 400 and 1,000
           of them that nobody has compacted: the first lookup of a new process with an empty cache, and of the next process of that host, in
           NONE and in PARTIAL, of one key and of 1,000 keys, beside the same table compacted, in processor time; and how long a FULL cache takes
           to have one more commit.
large      a table of 300,000 files with bounds of 100 columns (no data files; 400 MB of manifests): what a new host, a new process, a commit
           of one file and a key that no file can have cost, beside PyIceberg's plan of a scan for such a key. Each in a process of its own,
           with its imports done. Goals: a new process 0.25 times PyIceberg and 150 MB, a commit 20 ms, a key 30 ms.
stream     a micro-batch of 10,000 rows joined to the table, beside the same stream joined to a broadcast of all the rows, which PyIceberg
           reads in each micro-batch.

    pip install -e '.[spark,bench,test,iceberg]'
    python -m benchmarks.bench_iceberg [--parts unchanged,keys,visible,upserts,large,stream] [--rows N] [--files N] [--runs N]
                                      [--commits N,N,…] [--size N] [--large-files N] [--columns N]
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import requests
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.expressions import In
from pyiceberg.table import StaticTable

from benchmarks import lake
from benchmarks.lake import FULL, KEYS, MODES, Act, Change, customers, drawn_keys, more_rows, opened
from pyspark_lookup import LookupTable
from tests.support.iceberg_definition import Publish, in_catalog
from tests.support.iceberg_manifests import ADDED, Entry, write_manifest
from tests.support.iceberg_oracle import load
from tests.support.iceberg_writing import IcebergTable
from tests.support.rest_catalog import RestCatalog

PARTS = ("unchanged", "keys", "visible", "upserts", "large", "stream")
TABLE = "ns.customers"


def sql_catalog(home: Path) -> tuple[SqlCatalog, dict[str, str]]:
    """Open the SQL catalog of a directory, or create it with an empty namespace. Returns (catalog, the options that name it)."""
    home.mkdir(exist_ok=True)
    uri = f"sqlite:///{home / 'catalog.db'}"
    catalog = SqlCatalog("bench", uri=uri, warehouse=home.as_uri())
    catalog.create_namespace_if_not_exists("ns")
    return catalog, named(type="sql", uri=uri)


def named(**properties: str) -> dict[str, str]:
    return {"lookup.catalog": "bench", **{f"lookup.catalog.{name}": value for name, value in properties.items()}}


def make_iceberg(home: Path, rows: int, files: int) -> Path:
    """Write a table of `rows` customers, with an append for each file. Returns the directory of its SQL catalog. Made once."""
    place = home / f"iceberg-{rows}-{files}"
    catalog, _ = sql_catalog(place)
    sources = customers(home, rows, files)
    table = catalog.create_table_if_not_exists(TABLE, pq.read_schema(sources[0]))
    for source in sources[len(table.history()) :]:
        table.append(pq.read_table(source))
    return place


def copied(catalog: Catalog, home: Path, publish: Publish | None = None) -> IcebergTable:
    """Create a table that begins with the catalog's data files, where they are. Without `publish`, a version hint names its metadata."""
    metadata = catalog.load_table(TABLE).metadata_location.removeprefix("file://")
    created = IcebergTable(home, {**load(Path(metadata)), "location": home.as_uri()}, publish)
    created.save()
    return created


class PromptCatalog(RestCatalog):
    """A REST catalog that sends all packets of an answer at once. Otherwise each answer waits 40 ms until its first packet is acknowledged."""

    def __init__(self) -> None:
        super().__init__()
        self._server.RequestHandlerClass.disable_nagle_algorithm = True  # type: ignore[attr-defined]


def unchanged(place: Path, work: Path, runs: int) -> None:
    catalog, in_sql = sql_catalog(place)
    seconds = {"SQL": lake.unchanged(opened(TABLE, work / "sql", {**FULL, **in_sql}), loading(catalog), runs, " (SQL)")}
    with PromptCatalog() as server:
        server.publisher(TABLE)(catalog.load_table(TABLE).metadata_location)
        reader = opened(TABLE, work / "rest", {**FULL, **named(type="rest", uri=server.uri)})
        url, client = f"{server.uri}/v1/namespaces/{TABLE.replace('.', '/tables/')}", requests.Session()
        peers = {
            **loading(load_catalog("bench", type="rest", uri=server.uri)),
            "the bare request": lambda: client.get(url).content,
        }
        seconds["REST"] = lake.unchanged(reader, peers, runs, " (REST)")
        server.requests.clear()
        reader.get(1)
        print(f"Asked of the catalog: {', '.join(server.requests)}")
    copy = copied(catalog, work / "copy").home
    static = {"StaticTable.from_metadata": lambda: StaticTable.from_metadata(str(copy))}
    seconds["a hint"] = lake.unchanged(opened(copy, work / "hint", FULL), static, runs, " (a version hint)")
    print("\n| catalog | contender | median ms |\n|---|---|---|")
    for where, samples in seconds.items():
        for contender, times in samples.items():
            print(f"| {where} | {contender} | {statistics.median(times) * 1000:.2f} |")


def loading(catalog: Catalog) -> dict[str, Act]:
    return {"Table.refresh": catalog.load_table(TABLE).refresh, "load_table": lambda: catalog.load_table(TABLE)}


def keys(place: Path, work: Path, rows: int, runs: int) -> None:
    catalog, options = sql_catalog(place)
    drawn, table_state = drawn_keys(rows), catalog.load_table(TABLE)
    readers = {name: opened(TABLE, work / "host", {**mode, **options}) for name, mode in MODES.items()}
    key_filter = In("id", {*drawn.column("id").to_pylist()})  # type: ignore[call-arg,arg-type]
    lake.keys(
        readers, drawn, rows, "Table.scan", lambda: table_state.scan(row_filter=key_filter).to_arrow().num_rows, runs
    )


def visible(place: Path, source: Path, work: Path, rows: int, runs: int) -> None:
    catalog, _ = sql_catalog(place)
    new = more_rows(source, rows)
    file_sizes: list[int] = []

    def make(copy: Path, host: Path) -> tuple[LookupTable, list[Change]]:
        copy_catalog, options = sql_catalog(copy)
        publish = in_catalog(copy_catalog, TABLE)
        copied(catalog, copy / "table", publish)

        def delete() -> None:
            metadata = Path(copy_catalog.load_table(TABLE).metadata_location.removeprefix("file://"))
            table = IcebergTable(metadata.parent.parent, load(metadata), publish)
            table.metadata, table._number = metadata, len([*metadata.parent.glob("*.metadata.json")])
            before = set(table.home.rglob("*.*"))
            table.commit([table.equality([{"id": number} for number in range(0, rows, rows // KEYS)], ["id"])])
            file_sizes[:] = [path.stat().st_size for path in {*table.home.rglob("*.*")} - before]

        return opened(TABLE, host, {**FULL, **options}), [
            Change("append", lambda: copy_catalog.load_table(TABLE).append(new), rows, 1),
            Change("equality deletes", delete, 0, 0),
        ]

    bytes_read = lake.visible(make, work, rows, runs)["equality deletes"]["ufsGetBytes"]
    print(
        f"\nThe files of metadata and deletes that the equality deletes wrote have {sum(file_sizes):,} bytes, {bytes_read:,} were read."
    )


def first_lookup(table: str, cache: str, options: Mapping[str, str], keys: Sequence[int]) -> tuple[float, float, int]:
    """Look up keys for the first time in a new process, its imports done. Returns (CPU seconds, seconds, number of rows)."""
    importlib.import_module("pyspark_lookup.sources.iceberg.manifests")
    reader = opened(table, Path(cache), options)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    row_count = reader.get_many(pa.table({"id": keys})).num_rows if len(keys) > 1 else len(reader.get(keys[0]))
    return time.process_time() - start_cpu_s, time.perf_counter() - start_s, row_count


def upserts(place: Path, work: Path, rows: int, files: int, runs: int, commits: Sequence[int], size: int) -> None:
    catalog, options = sql_catalog(place)
    table, rng = copied(catalog, work / "copy"), random.Random(1)
    full = opened(table.home, work / "FULL", FULL)
    start_s = time.perf_counter()
    full.get(0)
    print(f"\n{rows:,} rows; build {time.perf_counter() - start_s:.2f} s; commits of {size} rows\n", flush=True)

    def commit(number: int) -> int:
        keys = [{"id": key} for key in rng.sample(range(rows), size)]
        table.commit([table.equality(keys, ["id"]), *table.data([{**key, "name": f"v{number}"} for key in keys])])
        return keys[0]["id"]

    print("| commits | lookup | not compacted, CPU s (clock) | compacted, CPU s (clock) | ratio of CPU (clock) |")
    print("|---|---|---|---|---|")
    reloads, commit_count = [], 0
    for count in commits:
        for number in range(commit_count, count):
            commit(number)
        full.get(0)
        commit_count, times = count + 3, []
        for number in range(count, commit_count):
            key = commit(number)
            start_s = time.perf_counter()
            assert [row["name"] for row in full.get(key)] == [f"v{number}"]
            times.append(time.perf_counter() - start_s)
        reloads.append((commit_count, min(times)))
        live = full.scan()
        name = f"ns.compacted{count}"
        if catalog.table_exists(name):  # from a run that was stopped
            catalog.drop_table(name)
        compacted = catalog.create_table(name, live.schema)
        live = live.sort_by("id")
        for part in range(files):
            low, high = (live.num_rows * cut // files for cut in (part, part + 1))
            compacted.append(live.slice(low, high - low))
        tables = {"not compacted": (str(table.home), {}), "compacted": (name, options)}
        del live
        for mode in ("NONE", "PARTIAL"):
            for key_count in (1, 1000):
                keys_by_client = {
                    "new host": rng.sample(range(rows), key_count),
                    "new process": rng.sample(range(rows), key_count),
                }
                spent: dict[tuple[str, str], list[tuple[float, float, int]]] = {
                    (client, state): [] for client in keys_by_client for state in tables
                }
                for run in range(runs):
                    for state, (path, more) in tables.items():
                        host = work / f"host-{count}-{mode}-{key_count}-{run}-{state}"
                        for client, keys in keys_by_client.items():
                            with multiprocessing.get_context("spawn").Pool(1) as pool:
                                arguments = path, str(host), {**MODES[mode], **more}, keys
                                spent[client, state].append(pool.apply(first_lookup, arguments))
                        shutil.rmtree(host)
                assert {row_count for times in spent.values() for _, _, row_count in times} == {key_count}
                for client in keys_by_client:
                    (cpu, clock), (peer_cpu, peer_clock) = (
                        tuple(min(run[place] for run in spent[client, state]) for place in range(2)) for state in tables
                    )
                    print(
                        f"| {commit_count:,} | {client}, {mode}, {key_count:,} keys | {cpu:.3f} ({clock:.3f}) | {peer_cpu:.3f} ({peer_clock:.3f}) "
                        f"| {cpu / peer_cpu:.2f} ({clock / peer_clock:.2f}) |",
                        flush=True,
                    )
    print("\n| commits | a FULL cache has one more after, s |\n|---|---|")
    for count, seconds in reloads:
        print(f"| {count:,} | {seconds:.3f} |")


_PER_MANIFEST = 1500  # files in a manifest
_BLOCK_BYTES = 64_000  # of a block of a manifest, as Java writes it
_LOW, _HIGH, _PATH = b"LLLLLLLL", b"HHHHHHHH", "#" * 16


def make_large(home: Path, files: int, columns: int) -> IcebergTable:
    """Write the metadata of a table of `files` files with the bounds of each column. There are no data files. Its hint names the version with all files.

    All records of a manifest have the same length, so they are made as a matrix of bytes from the record of one file.
    """
    place = home / f"iceberg-large-{files}-{columns}"
    kinds = ["string" if number % 4 == 3 else "long" for number in range(columns)]
    names = ["id", *(f"c{number}" for number in range(1, columns))]
    if (place / "metadata" / "v2.metadata.json").exists():
        table = IcebergTable(place, load(place / "metadata" / "v2.metadata.json"))
        table._number = 1
        table.save()  # the hint names this version again
        return table
    table = IcebergTable.create(place, dict(zip(names, kinds, strict=True)))
    ids = [field["id"] for field in table.fields]

    def record(nulls: int) -> tuple[dict[str, Any], bytes, bytes]:
        """Write a manifest with one file. Returns (its entry in a manifest list, the header, the record)."""
        url = f"{table.meta['location']}/data/{_PATH}.parquet"
        numbers = {name: dict.fromkeys(ids, 1000) for name in ("column_sizes", "value_counts")}
        bounds = {"lower_bounds": dict.fromkeys(ids, _LOW), "upper_bounds": dict.fromkeys(ids, _HIGH)}
        file = {
            "content": 0,
            "file_path": url,
            "file_format": "PARQUET",
            "partition": {},
            "spec_id": 0,
            "record_count": 1000,
        }
        file |= {"file_size_in_bytes": 5_000_000, "null_value_counts": dict.fromkeys(ids, nulls), **numbers, **bounds}
        path = place / "metadata" / "template.avro"
        listed = write_manifest(path, table.meta, 0, 1, 1, [(ADDED, Entry(file, 1, 1, 1))])
        data = path.read_bytes()
        path.unlink()
        start = data.index(data[-16:]) + 16
        block = data[start:-16]
        while block[1] & 128:  # skip the block's length, which follows its number of records
            block = block[:1] + block[2:]
        return listed, data[:start], zlib.decompress(block[2:], -15)

    listed, header, plain = record(0)
    template = np.frombuffer(plain, np.uint8)
    null_places = np.flatnonzero(template != np.frombuffer(record(1)[2], np.uint8))
    low, high = ([match.start() for match in re.finditer(mark, plain)] for mark in (_LOW, _HIGH))
    path_place = plain.index(_PATH.encode())
    assert len(low) == len(high) == len(null_places) == columns

    def digits(numbers: Any, width: int) -> Any:
        return (48 + numbers[:, None] // 10 ** np.arange(width - 1, -1, -1) % 10).astype(np.uint8)

    manifests = []
    for start in range(0, files, _PER_MANIFEST):
        count = min(_PER_MANIFEST, files - start)
        rng, numbers = np.random.default_rng(start), np.arange(start, start + count)
        rows = np.tile(template, (count, 1))
        rows[:, path_place : path_place + 16] = digits(numbers * 2654435761 % 10**16, 16)
        rows[:, null_places] = rng.integers(0, 3, (count, columns)) * 2
        for column, kind in enumerate(kinds):
            least = numbers * 1000 if not column else rng.integers(0, 10**6, count)
            most = least + (999 if not column else rng.integers(0, 10**6, count))
            for at, values in ((low[column], least), (high[column], most)):
                content = (
                    digits(values, 8) if kind == "string" else values.astype("<i8").view(np.uint8).reshape(count, 8)
                )
                rows[:, at : at + 8] = content
        path = place / "metadata" / f"manifest-{start:07}.avro"
        with path.open("wb") as out:
            out.write(header)
            for block_rows in np.array_split(rows, max(rows.size // _BLOCK_BYTES, 1)):
                packer = zlib.compressobj(1, wbits=-15)
                block = packer.compress(block_rows.tobytes()) + packer.flush()
                out.write(_varint(len(block_rows)) + _varint(len(block)) + block + header[-16:])
        counts = {"added_files_count": count, "added_rows_count": count * 1000, "manifest_length": path.stat().st_size}
        manifests.append({**listed, **counts, "manifest_path": f"{table.meta['location']}/metadata/{path.name}"})
    table._add_snapshot(1, 1, manifests, "append", "main")
    return table


def _varint(number: int) -> bytes:
    """Encode a number as Avro writes a long that is not negative."""
    remaining, groups = number << 1, []
    while remaining > 127:
        groups.append(remaining & 127 | 128)
        remaining >>= 7
    return bytes([*groups, remaining])


_MEASURE = """
import json, sys, time
import pandas, pyarrow.parquet
from pyiceberg.expressions import EqualTo
from pyiceberg.table import StaticTable
import pyspark_lookup.sources.iceberg.manifests
from pyspark_lookup import LookupTable
path, cache, what = sys.argv[1:]
def anonymous():
    return sum(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("Anonymous")) / 1024
before = anonymous()
reader = None if what == "PyIceberg" else LookupTable(path, {"lookup.cache.dir": cache, "lookup.keys": "id", "lookup.cache": "NONE"})
times = []
for act in [lambda: list(StaticTable.from_metadata(path).scan(EqualTo("id", -1)).plan_files())] if reader is None else [lambda: reader.version, lambda: reader.version, lambda: reader.get(-1), lambda: reader.get(-2)]:
    wall, cpu = time.perf_counter(), time.process_time()
    kept = act()
    times.append((time.perf_counter() - wall, time.process_time() - cpu))
print(json.dumps([times, anonymous() - before]))
"""


def large(home: Path, work: Path, files: int, columns: int, runs: int) -> None:
    table = make_large(home, files, columns)
    print(f"\n{files:,} files, bounds of {columns} columns; seconds of CPU (time) as medians of {runs} runs, or of one")
    print("\n| who | version | again | a key | another key | anonymous MB |\n|---|---|---|---|---|---|")
    medians: dict[str, float] = {}

    def measure(contender: str, count: int) -> None:
        answers = []
        for _ in range(count):
            command = [sys.executable, "-c", _MEASURE, str(table.home), str(work / "large"), contender]
            answers.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        steps = len(answers[0][0])
        walls, cpus = ([statistics.median(a[0][n][side] for a in answers) for n in range(steps)] for side in (0, 1))
        medians[contender] = cpus[0]
        cells = [f"{cpu:.3f} ({wall:.3f})" for wall, cpu in zip(walls, cpus, strict=True)] + [""] * (4 - steps)
        print(f"| {contender} | {' | '.join(cells)} | {statistics.median(a[1] for a in answers):.0f} |", flush=True)

    measure("PyIceberg", 1)
    measure("a new host", 1)
    measure("a new process", runs)
    reader = opened(str(table.home), work / "large", {})
    assert reader.version
    values = {field["name"]: 0 if field["type"] == "long" else "0" for field in table.fields}
    times = []
    for _ in range(runs * 4):
        table.commit(table.data([values]))
        cpu = time.process_time()
        assert reader.version
        times.append(time.process_time() - cpu)
    ratios = {contender: medians[contender] / medians["PyIceberg"] for contender in ("a new host", "a new process")}
    print(
        f"\na commit of one file: {statistics.median(times) * 1000:.1f} ms of CPU, p99 {sorted(times)[-1] * 1000:.1f}"
    )
    print("beside PyIceberg: " + ", ".join(f"{contender} {ratio:.4f} times" for contender, ratio in ratios.items()))


def stream(place: Path, work: Path, rows: int, runs: int) -> None:
    catalog, options = sql_catalog(place)
    lake.stream(TABLE, options, "PyIceberg", lambda: catalog.load_table(TABLE).scan().to_arrow(), work, rows, runs)


def main() -> None:
    parser = lake.arguments(__doc__, PARTS, 5)
    parser.add_argument("--commits", default="100,200,400,1000")
    parser.add_argument("--size", type=int, default=500)
    parser.add_argument("--large-files", type=int, default=300_000)
    parser.add_argument("--columns", type=int, default=100)
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    needs_rows = {*args.parts.split(",")} != {"large"}
    place = make_iceberg(args.dir, args.rows, args.files) if needs_rows else Path()
    source = customers(args.dir, args.rows, args.files)[0] if needs_rows else Path()
    runners: Mapping[str, Callable[[Path], None]] = {
        "unchanged": lambda work: unchanged(place, work, args.runs),
        "keys": lambda work: keys(place, work, args.rows, args.runs),
        "visible": lambda work: visible(place, source, work, args.rows, args.runs),
        "upserts": lambda work: upserts(
            place, work, args.rows, args.files, args.runs, list(map(int, args.commits.split(","))), args.size
        ),
        "large": lambda work: large(args.dir, work, args.large_files, args.columns, args.runs),
        "stream": lambda work: stream(place, work, args.rows, args.runs),
    }
    lake.run_parts(args, runners)


if __name__ == "__main__":
    main()
