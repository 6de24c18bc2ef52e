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
           of them that nobody has compacted: the first lookup of a new process with an empty cache, in NONE and in PARTIAL, of one key and of
           1,000 keys, beside the same table compacted, in processor time; and how long a FULL cache takes to have one more commit.
stream     a micro-batch of 10,000 rows joined to the table, beside the same stream joined to a broadcast of all the rows, which PyIceberg
           reads in each micro-batch.

    pip install -e '.[spark,bench,test,iceberg]'
    python -m benchmarks.bench_iceberg [--parts unchanged,keys,visible,upserts,stream] [--rows N] [--files N] [--runs N]
                                      [--commits N,N,…] [--size N]
"""

from __future__ import annotations

import importlib
import multiprocessing
import random
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

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
from tests.support.iceberg_oracle import load
from tests.support.iceberg_writing import IcebergTable
from tests.support.rest_catalog import RestCatalog

PARTS = ("unchanged", "keys", "visible", "upserts", "stream")
TABLE = "ns.customers"


def sql_catalog(home: Path) -> tuple[SqlCatalog, dict[str, str]]:
    """A catalog in a file of a directory, with an empty namespace or what is there; and the options that name it."""
    home.mkdir(exist_ok=True)
    uri = f"sqlite:///{home / 'catalog.db'}"
    catalog = SqlCatalog("bench", uri=uri, warehouse=home.as_uri())
    catalog.create_namespace_if_not_exists("ns")
    return catalog, named(type="sql", uri=uri)


def named(**properties: str) -> dict[str, str]:
    return {"lookup.catalog": "bench", **{f"lookup.catalog.{name}": value for name, value in properties.items()}}


def make_iceberg(home: Path, rows: int, files: int) -> Path:
    """The directory of an SQL catalog that has a table of so many customers, an append for each file; made once."""
    place = home / f"iceberg-{rows}-{files}"
    catalog, _ = sql_catalog(place)
    sources = customers(home, rows, files)
    table = catalog.create_table_if_not_exists(TABLE, pq.read_schema(sources[0]))
    for source in sources[len(table.history()) :]:
        table.append(pq.read_table(source))
    return place


def copied(catalog: Catalog, home: Path, publish: Publish | None = None) -> IcebergTable:
    """A table that begins with the files of the one in a catalog, which stay where they are. Without a way to publish, a hint names it."""
    metadata = catalog.load_table(TABLE).metadata_location.removeprefix("file://")
    made = IcebergTable(home, {**load(Path(metadata)), "location": home.as_uri()}, publish)
    made.save()
    return made


class PromptCatalog(RestCatalog):
    """One that sends an answer of several packets at once: else each waits 40 ms for the acknowledgement of its first."""

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
    for where, found in seconds.items():
        for contender, times in found.items():
            print(f"| {where} | {contender} | {statistics.median(times) * 1000:.2f} |")


def loading(catalog: Catalog) -> dict[str, Act]:
    return {"Table.refresh": catalog.load_table(TABLE).refresh, "load_table": lambda: catalog.load_table(TABLE)}


def keys(place: Path, work: Path, rows: int, runs: int) -> None:
    catalog, options = sql_catalog(place)
    drawn, known = drawn_keys(rows), catalog.load_table(TABLE)
    readers = {name: opened(TABLE, work / "host", {**mode, **options}) for name, mode in MODES.items()}
    wanted = In("id", {*drawn.column("id").to_pylist()})  # type: ignore[call-arg,arg-type]
    lake.keys(readers, drawn, rows, "Table.scan", lambda: known.scan(row_filter=wanted).to_arrow().num_rows, runs)


def visible(place: Path, source: Path, work: Path, rows: int, runs: int) -> None:
    catalog, _ = sql_catalog(place)
    new = more_rows(source, rows)
    written: list[int] = []

    def make(copy: Path, host: Path) -> tuple[LookupTable, list[Change]]:
        own, options = sql_catalog(copy)
        publish = in_catalog(own, TABLE)
        copied(catalog, copy / "table", publish)

        def delete() -> None:
            metadata = Path(own.load_table(TABLE).metadata_location.removeprefix("file://"))
            table = IcebergTable(metadata.parent.parent, load(metadata), publish)
            table.metadata, table._number = metadata, len([*metadata.parent.glob("*.metadata.json")])
            before = set(table.home.rglob("*.*"))
            table.commit([table.equality([{"id": number} for number in range(0, rows, rows // KEYS)], ["id"])])
            written[:] = [path.stat().st_size for path in {*table.home.rglob("*.*")} - before]

        return opened(TABLE, host, {**FULL, **options}), [
            Change("append", lambda: own.load_table(TABLE).append(new), rows, 1),
            Change("equality deletes", delete, 0, 0),
        ]

    asked = lake.visible(make, work, rows, runs)["equality deletes"]["ufsGetBytes"]
    print(
        f"\nThe files of metadata and deletes that the equality deletes wrote have {sum(written):,} bytes, {asked:,} were read."
    )


def first_lookup(table: str, cache: str, options: Mapping[str, str], keys: Sequence[int]) -> tuple[float, float, int]:
    """(processor time, time on the clock, rows) of the first lookup of a new process, which has imported what it needs."""
    importlib.import_module("pyspark_lookup.sources.iceberg.manifests")
    reader = opened(table, Path(cache), options)
    began, worked = time.perf_counter(), time.process_time()
    found = reader.get_many(pa.table({"id": keys})).num_rows if len(keys) > 1 else len(reader.get(keys[0]))
    return time.process_time() - worked, time.perf_counter() - began, found


def upserts(place: Path, work: Path, rows: int, files: int, runs: int, commits: Sequence[int], size: int) -> None:
    catalog, options = sql_catalog(place)
    table, rng = copied(catalog, work / "copy"), random.Random(1)
    full = opened(table.home, work / "FULL", FULL)
    began = time.perf_counter()
    full.get(0)
    print(f"\n{rows:,} rows; build {time.perf_counter() - began:.2f} s; commits of {size} rows\n", flush=True)

    def commit(number: int) -> int:
        keys = [{"id": key} for key in rng.sample(range(rows), size)]
        table.commit([table.equality(keys, ["id"]), *table.data([{**key, "name": f"v{number}"} for key in keys])])
        return keys[0]["id"]

    print("| commits | lookup | not compacted, CPU s (clock) | compacted, CPU s (clock) | ratio of CPU (clock) |")
    print("|---|---|---|---|---|")
    reloads, made = [], 0
    for count in commits:
        for number in range(made, count):
            commit(number)
        full.get(0)
        made, times = count + 3, []
        for number in range(count, made):
            key = commit(number)
            began = time.perf_counter()
            assert [row["name"] for row in full.get(key)] == [f"v{number}"]
            times.append(time.perf_counter() - began)
        reloads.append((made, min(times)))
        live = full.scan()
        name = f"ns.compacted{count}"
        compacted = catalog.create_table(name, live.schema)
        live = live.sort_by("id")
        for part in range(files):
            low, high = (live.num_rows * cut // files for cut in (part, part + 1))
            compacted.append(live.slice(low, high - low))
        tables = {"not compacted": (str(table.home), {}), "compacted": (name, options)}
        del live
        for mode in ("NONE", "PARTIAL"):
            for keys in ([rows // 2], rng.sample(range(rows), 1000)):
                spent: dict[str, list[tuple[float, float, int]]] = {what: [] for what in tables}
                for run in range(runs):
                    for what, (path, more) in tables.items():
                        host = work / f"host-{count}-{mode}-{len(keys)}-{run}-{what}"
                        with multiprocessing.get_context("spawn").Pool(1) as pool:
                            spent[what].append(
                                pool.apply(first_lookup, (path, str(host), {**MODES[mode], **more}, keys))
                            )
                        shutil.rmtree(host)
                assert {found for times in spent.values() for _, _, found in times} == {len(keys)}
                (cpu, clock), (peer_cpu, peer_clock) = (
                    tuple(min(run[place] for run in spent[what]) for place in range(2)) for what in tables
                )
                print(
                    f"| {made:,} | {mode}, {len(keys):,} keys | {cpu:.3f} ({clock:.3f}) | {peer_cpu:.3f} ({peer_clock:.3f}) "
                    f"| {cpu / peer_cpu:.2f} ({clock / peer_clock:.2f}) |",
                    flush=True,
                )
    print("\n| commits | a FULL cache has one more after, s |\n|---|---|")
    for count, seconds in reloads:
        print(f"| {count:,} | {seconds:.3f} |")


def stream(place: Path, work: Path, rows: int, runs: int) -> None:
    catalog, options = sql_catalog(place)
    lake.stream(TABLE, options, "PyIceberg", lambda: catalog.load_table(TABLE).scan().to_arrow(), work, rows, runs)


def main() -> None:
    parser = lake.arguments(__doc__, PARTS, 5)
    parser.add_argument("--commits", default="100,200,400,1000")
    parser.add_argument("--size", type=int, default=500)
    given = parser.parse_args()
    given.dir.mkdir(parents=True, exist_ok=True)
    place = make_iceberg(given.dir, given.rows, given.files)
    source = customers(given.dir, given.rows, given.files)[0]
    runners: Mapping[str, Callable[[Path], None]] = {
        "unchanged": lambda work: unchanged(place, work, given.runs),
        "keys": lambda work: keys(place, work, given.rows, given.runs),
        "visible": lambda work: visible(place, source, work, given.rows, given.runs),
        "upserts": lambda work: upserts(
            place, work, given.rows, given.files, given.runs, list(map(int, given.commits.split(","))), given.size
        ),
        "stream": lambda work: stream(place, work, given.rows, given.runs),
    }
    lake.run_parts(given, runners)


if __name__ == "__main__":
    main()
