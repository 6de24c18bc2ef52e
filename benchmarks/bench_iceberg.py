"""What does an Iceberg table cost, beside PyIceberg: nothing new, 10,000 keys, an append, equality deletes, a micro-batch?

The table has 10M rows in 100 files, on a local disk and in an SQL catalog, unless arguments say otherwise; it is written by PyIceberg,
with a snapshot for each file, and made once.

unchanged  a key of a FULL cache when nothing is new, beside what tells PyIceberg so: `refresh` of an open table, and loading it again. In
           the SQL catalog, in a REST catalog (on loopback and in this process, so that both pay for its answers; a bare request for one is
           a contender, too), and by a version hint.
keys       10,000 keys, the same ones again, in NONE, PARTIAL and FULL, all warm, beside `Table.scan` with the filter `In("id", …)`.
visible    a build of the FULL cache, and then how long until the first answer that has an append of 1 % (goal: 3 % of a build),
           and until 10,000 rows are gone that an equality delete file deletes (goal: 3 %, and 0 bytes of data files).
upserts    commits of 500 rows each, as Flink writes them: an equality delete of their keys, and the rows anew. How long until the first
           answer that has the last of 1, 20, … 240 of them that nobody has compacted, in each mode, beside a build of the FULL cache.
stream     a micro-batch of 10,000 rows joined to the table, beside the same stream joined to a broadcast of all the rows, which PyIceberg
           reads in each micro-batch.

    pip install -e '.[spark,bench,test,iceberg]'
    python -m benchmarks.bench_iceberg [--parts unchanged,keys,visible,upserts,stream] [--rows N] [--files N] [--runs N]
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

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
UPSERTED = 500  # rows of a commit
COMMITS = (1, 20, 60, 120, 240)
"""After how many commits the answers are timed."""


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
            table = IcebergTable.open(own.load_table(TABLE).metadata_location, publish)
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


def upserts(place: Path, work: Path, rows: int) -> None:
    catalog, _ = sql_catalog(place)
    table, rng = copied(catalog, work / "copy"), random.Random(1)
    readers = {name: opened(table.home, work / name, mode) for name, mode in MODES.items()}
    began = time.perf_counter()
    readers["FULL"].get(0)
    build = time.perf_counter() - began
    print(f"\n{rows:,} rows; build {build:.2f} s\n")
    print(f"| commits | {' | '.join(f'{name}, s' for name in readers)} |\n|---|{'---|' * len(readers)}")
    for number in range(1, max(COMMITS) + 1):
        keys = [{"id": key} for key in rng.sample(range(rows), UPSERTED)]
        table.commit([table.equality(keys, ["id"]), *table.data([{**key, "name": f"v{number}"} for key in keys])])
        spent = []
        for name, reader in readers.items():
            if name != "FULL" and number not in COMMITS:
                continue
            began = time.perf_counter()
            found = reader.get(keys[0]["id"])
            spent.append(time.perf_counter() - began)
            assert [row["name"] for row in found] == [f"v{number}"]
        if number in COMMITS:
            print(f"| {number} | {' | '.join(f'{seconds:.3f}' for seconds in spent)} |", flush=True)


def stream(place: Path, work: Path, rows: int, runs: int) -> None:
    catalog, options = sql_catalog(place)
    lake.stream(TABLE, options, "PyIceberg", lambda: catalog.load_table(TABLE).scan().to_arrow(), work, rows, runs)


def main() -> None:
    given = lake.arguments(__doc__, PARTS, 5).parse_args()
    given.dir.mkdir(parents=True, exist_ok=True)
    place = make_iceberg(given.dir, given.rows, given.files)
    source = customers(given.dir, given.rows, given.files)[0]
    runners: Mapping[str, Callable[[Path], None]] = {
        "unchanged": lambda work: unchanged(place, work, given.runs),
        "keys": lambda work: keys(place, work, given.rows, given.runs),
        "visible": lambda work: visible(place, source, work, given.rows, given.runs),
        "upserts": lambda work: upserts(place, work, given.rows),
        "stream": lambda work: stream(place, work, given.rows, given.runs),
    }
    lake.run_parts(given, runners)


if __name__ == "__main__":
    main()
