"""How many keys a second does a full cache answer on one core, beside the ways a Python user joins without it?

Batches of 65,536 keys against 10M rows of five columns (key, double, three strings), Arrow in, Arrow out
with plain strings, in three shapes: (a) an int64 key and two strings of few distinct values, (b) an int64 key
and unique strings only, (c) the rows of (a) by a key of 24 characters. Each contender is built, checked
against the others' answers and timed in turn with ours and with the yardstick, a numpy gather of one double
column. Goals in million lookups/s: 1.4 (a), 0.8 (b), 0.9 (c), 10 for the probe alone (a); 1.5 times the best
peer, 3 times all but pandas.

    python -m benchmarks.bench_lookup [--rows N] [--shapes a,b,c] [--peers pandas,…] [--runs N] [--core 1]
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Must be set before these libraries are imported: one core, however many the machine has.
os.environ |= {"POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1"}

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.common import alternate
from pyspark_lookup import LookupTable
from pyspark_lookup.cache.full.snapshot import Snapshot
from pyspark_lookup.columnar.keys import Keys, as_indices
from pyspark_lookup.lookup.runtime import runtime
from pyspark_lookup.sources.registry import parse_options

BATCH = 65_536
COLUMNS = ["id", "price", "name", "segment", "country"]
SHAPES = {"a": "id", "b": "id", "c": "name"}  # and their key column
GOALS = {"a": 1.4, "b": 0.8, "c": 0.9}
PROBE_GOAL = 10.0
SLOW_ABOVE_S = 0.25  # for a batch; slower peers get fewer batches
OURS, PROBE, GATHER = "ours", "ours, probe only", "numpy gather of a double"
CACHE_TABLE, UFS_TABLE = "LookupTable.get_many, CACHE", "LookupTable.get_many, UFS"
ZIPF = 1.1

Lookup = Callable[[pa.Array], Any]
Numbers = np.ndarray[Any, np.dtype[Any]]


# --- the table and the keys -----------------------------------------------------------------------


def make_lookup_table(directory: Path, rows: int, files: int, unique: bool, seed: int) -> Path:
    """Write a table with random, sparse, even ids in zstd parquet files. Made once.

    `unique`: all three strings are unique. Otherwise only `name` is, which has 24 characters with the id in them.
    """
    table = directory / f"lookup-{rows}-{files}-{'unique' if unique else 'few'}-{seed}"
    if (table / "done").exists():
        return table / "data"
    rng = np.random.default_rng(seed)
    (table / "data").mkdir(parents=True, exist_ok=True)
    ids = np.unique(rng.integers(0, 2**61, rows + rows // 100 + 10) * 2)
    ids = rng.permutation(ids)[:rows]
    segments = pa.array([f"segment-{number:05d}-of-customers" for number in range(1000)])
    countries = pa.array([f"country-{number:03d}" for number in range(200)])
    for number in range(files):
        file_ids = ids[rows * number // files : rows * (number + 1) // files]
        few = [pc.take(texts, pa.array(rng.integers(0, len(texts), len(file_ids)))) for texts in (segments, countries)]
        segment, country = [_text(prefix, file_ids) for prefix in ("segm-", "land-")] if unique else few
        columns = [file_ids, rng.random(len(file_ids)), _text("name-", file_ids), segment, country]
        path = table / "data" / f"part-{number:03d}.parquet"
        pq.write_table(pa.table(columns, COLUMNS), path, compression="zstd", row_group_size=250_000)
    (table / "done").touch()
    return table / "data"


def _text(prefix: str, ids: Numbers) -> pa.Array:
    """Make a text of 24 characters for each id, with a prefix of five."""
    digits = pc.utf8_lpad(pa.array(ids).cast(pa.string()), 19, "0")
    return pc.binary_join_element_wise(prefix, digits, "")


def key_batches(ids: Numbers, key: str, workload: str, count: int, rng: np.random.Generator) -> list[pa.Array]:
    """Draw batches of keys. Stored ids are even, so an odd key is a miss."""
    batches = []
    if workload == "zipf":
        weights = np.cumsum(np.arange(1, len(ids) + 1) ** -ZIPF)
        ids = rng.permutation(ids)  # the hot rows lie anywhere in the table
    for _ in range(count):
        if workload == "zipf":
            rows = np.searchsorted(weights, rng.random(BATCH) * weights[-1])
        else:
            rows = rng.integers(0, len(ids), BATCH)
        batch_ids = ids[rows]
        if workload == "half":
            batch_ids = batch_ids + rng.integers(0, 2, BATCH)
        batches.append(pa.array(batch_ids) if key == "id" else _text("name-", batch_ids))
    return batches


WORKLOADS = {"uniform": "uniform, 100 % hits", "half": "uniform, 50 % hits", "zipf": f"zipf {ZIPF}, 100 % hits"}


# --- ours -----------------------------------------------------------------------------------------


def lookup_options(key: str, cache: Path, cached: bool) -> dict[str, str]:
    options = {"lookup.keys": key, "lookup.cache": "FULL", "lookup.cache.dir": str(cache)}
    if cached:
        options |= {"lookup.metadata.source": "CACHE", "lookup.full-cache.periodic-reload.interval": "1 h"}
    return options


def open_snapshot(path: Path, options: Mapping[str, str]) -> Snapshot:
    """Open the latest snapshot of a table, as a worker of this host does."""
    parsed = parse_options({**options, "path": str(path)})
    reader = runtime().engine(parsed).reader
    full = reader.fulls.get_cache(reader.find(parsed).table, parsed)
    assert full is not None
    current = full.current()
    assert current is not None
    return current[1]


def whole(snapshot: Snapshot, key: str) -> Lookup:
    """A lookup that returns all five columns of the rows of a batch of keys."""
    names = [name for name in COLUMNS if name != key]

    def lookup(keys: pa.Array) -> pa.Table:
        answer = snapshot.get(names, Keys([keys]))
        return pa.table([pc.take(keys, as_indices(answer.keys), boundscheck=False), *answer.columns], [key, *names])

    return lookup


def probe(snapshot: Snapshot) -> Lookup:
    """A lookup that returns only which rows match."""
    (layer,) = snapshot.layers

    def lookup(keys: pa.Array) -> object:
        batch = Keys([keys])
        return layer.segment.probe(batch, batch.hashes(snapshot.seed))

    return lookup


# --- the peers: each takes the table and gives back its lookup ------------------------------------


@dataclass(frozen=True)
class Peer:
    """How a peer is built, and what it needs."""

    name: str
    module: str
    build: Callable[[pa.Table, str], Lookup]


def pandas_objects(table: pa.Table, key: str) -> Lookup:
    return _pandas(table.to_pandas(), key)


def pandas_arrow(table: pa.Table, key: str) -> Lookup:
    import pandas as pd  # noqa: PLC0415

    return _pandas(table.to_pandas(types_mapper=pd.ArrowDtype), key)


def _pandas(frame: Any, key: str) -> Lookup:
    import pandas as pd  # noqa: PLC0415

    index = pd.Index(frame[key])

    def lookup(keys: pa.Array) -> pa.Table:
        rows = index.get_indexer(keys.to_pandas())
        return pa.Table.from_pandas(frame.take(rows[rows >= 0]), preserve_index=False)

    return lookup


def polars_join(table: pa.Table, key: str) -> Lookup:
    import polars as pl  # noqa: PLC0415

    frame = pl.from_arrow(table)
    return lambda keys: pl.from_arrow(pa.table([keys], [key])).join(frame, on=key, how="inner").to_arrow()


def duckdb_arrow(table: pa.Table, key: str) -> Lookup:
    return _duckdb(table, key, f"CREATE VIEW stored AS SELECT {', '.join(COLUMNS)} FROM given")


def duckdb_native(table: pa.Table, key: str) -> Lookup:
    return _duckdb(table, key, f"CREATE TABLE stored AS SELECT {', '.join(COLUMNS)} FROM given")


def _duckdb(table: pa.Table, key: str, create: str) -> Lookup:
    import duckdb  # noqa: PLC0415

    connection = duckdb.connect(config={"threads": 1})
    connection.register("given", table)
    connection.execute(create)

    def lookup(keys: pa.Array) -> pa.Table:
        connection.register("probe", pa.table([keys], [key]))
        return connection.sql(f"SELECT stored.* FROM probe JOIN stored USING ({key})").to_arrow_table()

    return lookup


def acero_probe_left(table: pa.Table, key: str) -> Lookup:
    return lambda keys: pa.table([keys], [key]).join(table, key, join_type="inner", use_threads=False)


def acero_table_left(table: pa.Table, key: str) -> Lookup:
    return lambda keys: table.join(pa.table([keys], [key]), key, join_type="inner", use_threads=False)


def dict_of_rows(table: pa.Table, key: str) -> Lookup:
    place = COLUMNS.index(key)
    types = table.schema.types
    rows: dict[object, tuple[object, ...]] = {}
    gc.disable()  # the collector would walk through millions of tuples again and again
    for batch in table.to_batches(BATCH):
        rows |= {row[place]: row for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)}
    gc.enable()
    gc.freeze()

    def lookup(keys: pa.Array) -> pa.Table:
        matching = [row for row in map(rows.get, keys.to_pylist()) if row is not None]
        columns = zip(*matching, strict=True)
        return pa.table([pa.array(column, kind) for column, kind in zip(columns, types, strict=True)], COLUMNS)

    return lookup


PEERS = {
    "pandas": Peer("pandas get_indexer + take, objects", "pandas", pandas_objects),
    "pandas-arrow": Peer("pandas get_indexer + take, ArrowDtype", "pandas", pandas_arrow),
    "polars": Peer("polars join", "polars", polars_join),
    "duckdb-arrow": Peer("duckdb join, registered Arrow", "duckdb", duckdb_arrow),
    "duckdb": Peer("duckdb join, native table", "duckdb", duckdb_native),
    "acero": Peer("Acero join, probe left", "pyarrow", acero_probe_left),
    "acero-table-left": Peer("Acero join, table left", "pyarrow", acero_table_left),
    "dict": Peer("dict of rows", "builtins", dict_of_rows),
}


# --- measuring ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Seconds of a contender's batches, and of the gather and of our lookup that ran beside each of them."""

    seconds: list[float]
    gathers: list[float]
    ours: list[float]

    @property
    def millions_per_s(self) -> float:
        return BATCH / statistics.median(self.seconds) / 1e6

    def ratio(self, peer_seconds: Sequence[float]) -> float:
        return statistics.median(time_s / peer_s for time_s, peer_s in zip(self.seconds, peer_seconds, strict=True))


def in_turn(contenders: Mapping[str, Callable[[pa.Array], object]], keys: list[pa.Array], warmup: int, runs: int) -> dict[str, Measured]:  # fmt: skip
    """Time all contenders in turn. In each round all of them get the same keys."""
    feeds = {name: itertools.cycle(keys) for name in contenders}
    seconds = alternate({name: _next(run, feeds[name]) for name, run in contenders.items()}, warmup, runs)
    return {name: Measured(times, seconds[GATHER], seconds[OURS]) for name, times in seconds.items()}


def _next(run: Callable[[pa.Array], object], feed: Iterator[pa.Array]) -> Callable[[], object]:
    return lambda: run(next(feed))


def check(lookup: Lookup, reference: Lookup, keys: pa.Array, key: str) -> None:
    """Assert that both return the same rows, in any order."""
    actual, expected = (_normal(look_up(keys), key) for look_up in (lookup, reference))
    assert actual.equals(expected), (actual.slice(0, 3).to_pylist(), expected.slice(0, 3).to_pylist())


def _normal(answer: pa.Table, key: str) -> pa.Table:
    kinds = {"id": pa.int64(), "price": pa.float64()}
    columns = [answer.column(name).cast(kinds.get(name, pa.string())) for name in COLUMNS]
    return pa.table(columns, COLUMNS).sort_by(key).combine_chunks()


def measure(shape: str, path: Path, cache: Path, args: argparse.Namespace) -> None:
    """Measure all contenders of one shape."""
    key = SHAPES[shape]
    rng = np.random.default_rng(args.seed)
    table = pq.read_table(path).combine_chunks()
    ids = table.column("id").to_numpy()
    count = args.warmup + args.runs  # no batch comes twice, so that only hot keys are in the processor's caches
    batches = {workload: key_batches(ids, key, workload, count, rng) for workload in args.workloads}
    prices = table.column("price").to_numpy().copy()
    picks = itertools.cycle([rng.integers(0, len(prices), BATCH) for _ in range(count)])
    tables = {CACHE_TABLE: LookupTable(str(path), lookup_options(key, cache, cached=True))}
    tables[UFS_TABLE] = LookupTable(str(path), lookup_options(key, cache, cached=False))
    for lookup_table in tables.values():
        lookup_table.warm()
    snapshot = open_snapshot(path, lookup_options(key, cache, cached=True))
    reference = whole(snapshot, key)
    always: dict[str, Lookup] = {GATHER: lambda keys: np.take(prices, next(picks)), OURS: reference}
    extra: dict[str, Lookup] = {name: (lambda keys, t=t: t.get_many(pa.table([keys], [key]))) for name, t in tables.items()}  # type: ignore[misc]  # fmt: skip
    measured: dict[str, dict[str, Measured]] = {}
    for workload, keys in batches.items():
        for lookup in extra.values():
            check(lookup, reference, keys[0], key)
        measured[workload] = in_turn({**always, PROBE: probe(snapshot), **extra}, keys, args.warmup, args.runs)
    missing = [name for name in args.peers if importlib.util.find_spec(PEERS[name].module) is None]
    for peer in (PEERS[name] for name in args.peers if name not in missing):
        lookup = peer.build(table, key)
        for workload, keys in batches.items():
            check(lookup, reference, keys[0], key)
            started = time.perf_counter()
            lookup(keys[0])
            slow = time.perf_counter() - started > SLOW_ABOVE_S
            warmup, runs = (1, args.slow_runs) if slow else (args.warmup, args.runs)
            measured[workload][peer.name] = in_turn({**always, peer.name: lookup}, keys, warmup, runs)[peer.name]
        del lookup
        gc.unfreeze()
        gc.collect()
        pa.default_memory_pool().release_unused()
    show(shape, measured, [PEERS[name].name for name in missing], args.rows)


# --- printing -------------------------------------------------------------------------------------


def show(shape: str, results: Mapping[str, Mapping[str, Measured]], missing: Sequence[str], rows: int) -> None:
    """Print the table of one shape, and whether its goals are reached."""
    key = SHAPES[shape]
    peers = {peer.name for peer in PEERS.values()}
    kinds = {"a": "two strings of few values, one unique", "b": "three unique strings", "c": "the rows of (a)"}
    print(f"\n## ({shape}) {kinds[shape]}, key {key} ({'int64' if key == 'id' else '24 characters'}), {rows:,} rows")
    print("| keys | contender | batches | M lookups/s | median ms | p99 ms | × gather | ours is faster by |")
    print("|---|---|---|---|---|---|---|---|")
    for workload, measured in results.items():
        for name, contender in measured.items():
            times = [1000 * second for second in contender.seconds]
            faster = "" if name in (OURS, GATHER) else f"{contender.ratio(contender.ours):.2f}"
            # A peer that walks through the table leaves the gather's memory cold, so beside such a peer the gather is no yardstick.
            gathers = "" if name in peers else f"{contender.ratio(contender.gathers):.1f}"
            print(
                f"| {WORKLOADS[workload]} | {name} | {len(times)} | {contender.millions_per_s:.2f} | {statistics.median(times):.2f} | "
                f"{float(np.percentile(times, 99)):.2f} | {gathers} | {faster} |"
            )
        for name in missing:
            print(f"| {WORKLOADS[workload]} | {name}: not installed | | | | | | |")
    uniform = results.get("uniform")
    if uniform is None:
        return
    if rows != 10_000_000:
        print("(the goals are for 10,000,000 rows)")
    tell(f"({shape}) whole lookup, M/s", uniform[OURS].millions_per_s, GOALS[shape])
    if shape == "a":
        tell(f"({shape}) probe only, M/s", uniform[PROBE].millions_per_s, PROBE_GOAL)
    ratios = {peer.name: uniform[peer.name].ratio(uniform[peer.name].ours) for peer in PEERS.values() if peer.name in uniform}  # fmt: skip
    if ratios:
        best = min(ratios, key=ratios.__getitem__)
        tell(f"({shape}) times the best peer ({best})", ratios[best], 1.5)
        other_ratios = {name: ratio for name, ratio in ratios.items() if "pandas" not in name}
        if other_ratios:
            best = min(other_ratios, key=other_ratios.__getitem__)
            tell(f"({shape}) times the best peer but pandas ({best})", other_ratios[best], 3.0)


def tell(label: str, value: float, goal: float) -> None:
    print(f"- {label}: {value:.2f}, goal {goal:g}: {'reached' if value >= goal else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=list(SHAPES))
    parser.add_argument("--workloads", type=lambda text: text.split(","), default=list(WORKLOADS))
    parser.add_argument("--peers", type=lambda text: [n for n in text.split(",") if n], default=list(PEERS), help=f"of {', '.join(PEERS)}; the dict needs 6 GB at 10M rows")  # fmt: skip
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument(
        "--slow-runs",
        type=int,
        default=4,
        help="of peers that take long for a batch, as most do that work through the table for it",
    )
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--core", type=int, default=1, help="the one everything runs on; -1: any")
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "lookupcache-bench")
    args = parser.parse_args()
    args.data.mkdir(parents=True, exist_ok=True)
    paths = {
        unique: make_lookup_table(args.data, args.rows, args.files, unique, args.seed)
        for unique in {shape == "b" for shape in args.shapes}
    }
    if args.core >= 0:
        os.sched_setaffinity(0, {args.core})
    pa.set_cpu_count(1)
    print(f"command: {' '.join(['python', '-m', 'benchmarks.bench_lookup', *sys.argv[1:]])}")
    print(f"machine: {os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}, Python {platform.python_version()}")  # fmt: skip
    print(f"batches of {BATCH:,} keys, one core")
    cache = Path(tempfile.mkdtemp(prefix="cache-", dir=args.data))
    try:
        for shape in args.shapes:
            measure(shape, paths[shape == "b"], cache, args)
    finally:
        shutil.rmtree(cache, ignore_errors=True)


if __name__ == "__main__":
    main()
