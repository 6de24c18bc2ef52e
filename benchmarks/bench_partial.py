"""What does a partial cache cost per key, in a process and shared by a host, and how good is its eviction?

1. `DefaultLookupCache` beside a dict, cachetools, cachebox and diskcache: 1M int keys held, 64k batches, one
   core, rows of five columns (int, double, three texts). "which rows" is the lookup alone, for which the peers give
   the tuple they hold; "Arrow" goes from an Arrow array of keys to an Arrow table of rows. Goals: get at most 150
   ns/key, put at most 300 ns/key, Arrow to Arrow at least 1.5 M keys/s.
2. The shared store: a batch that another process loaded, in a process that has not seen it, beside lmdb, SQLite and
   diskcache with the rows as JSON. Goal: at most 5 us/key.
3. Hit rates of exact LRU, which ours is, beside theine's W-TinyLFU, on a zipf trace and on one mixed with scans.

Flink's `DefaultLookupCache` is compared in `bench_flink`.

    python -m benchmarks.bench_partial [--rows N] [--runs N]
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import multiprocessing
import os
import platform
import random
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cachebox
import cachetools
import diskcache
import lmdb
import numpy as np
import pyarrow as pa
import theine

from pyspark_lookup.cache.memory import KEY_INDEX, DefaultLookupCache
from pyspark_lookup.cache.partial.host_cache import Bounds, Freshness, SharedCache
from pyspark_lookup.columnar.keys import Keys, Seed
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import Disk

BATCH = 65_536
ZIPF = 1.1
NAMES = ["number", "score", "name", "segment", "country"]
SEED = Seed(0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)


def make_rows(ids: np.ndarray) -> pa.Table:
    texts = ids.tolist()
    columns = [
        pa.array(ids * 2),
        pa.array(ids * 0.5),
        pa.array([f"name-{n:019d}" for n in texts]),
        pa.array([f"segment-{n % 1000:05d}" for n in texts]),
        pa.array([f"country-{n % 200:03d}" for n in texts]),
    ]
    return pa.table(columns, NAMES).append_column(KEY_INDEX, pa.array(np.arange(len(ids))))


def make_keys(ids: np.ndarray) -> pa.Table:
    return pa.table({"id": ids})


def cpu_ns(run: Callable[[], object]) -> float:
    started = time.process_time_ns()
    run()
    return float(time.process_time_ns() - started)


# --- 1: in a process -----------------------------------------------------------------------------------


class Peer:
    """A cache that maps an int to a tuple."""

    def __init__(self, cache: Any, count: int, get: Callable[[Any], Callable[[int], Any]]) -> None:
        self.held, self.count, self._get = cache, count, get

    def put(self, ids: Sequence[int], rows: Sequence[tuple[Any, ...]]) -> None:
        cache = self.held
        for key, row in zip(ids, rows, strict=True):
            cache[key] = row

    def get(self, keys: pa.Array) -> list[Any]:
        get = self._get(self.held)
        return [get(key) for key in keys.to_pylist()]

    def arrow(self, keys: pa.Array) -> pa.Table:
        columns = zip(*self.get(keys), strict=True)
        return pa.table([keys, *map(pa.array, columns)], ["id", *NAMES])


def in_process(args: argparse.Namespace, directory: Path) -> None:
    rows = args.rows // BATCH * BATCH
    rng = np.random.default_rng(1)
    every = rng.permutation(np.arange(2 * rows))
    batches = [(make_keys(ids), make_rows(ids)) for ids in np.split(every, 2 * rows // BATCH)]
    filling, evicting = batches[: rows // BATCH], batches[rows // BATCH :]
    weights = np.cumsum(np.arange(1, rows + 1) ** -ZIPF)
    traces = {
        "uniform": lambda: every[rng.integers(0, rows, BATCH)],
        "zipf": lambda: every[np.searchsorted(weights, rng.random(BATCH) * weights[-1])],
    }
    print(f"\n## In a process: {rows:,} int keys, batches of {BATCH:,}, CPU ns per key")
    print("| what | contender | keys | median | p99 | ratio to ours |")
    print("|---|---|---|---|---|---|")
    lookup_cache = DefaultLookupCache.new_builder().max_rows(rows).build()
    peers = {
        "dict": Peer({}, rows, lambda cache: cache.get),
        "cachetools.LRUCache": Peer(cachetools.LRUCache(rows), rows, lambda cache: cache.get),
        "cachetools.TTLCache": Peer(cachetools.TTLCache(rows, 3600), rows, lambda cache: cache.get),
        "cachebox.LRUCache": Peer(cachebox.LRUCache(rows), rows, lambda cache: cache.get),
        "cachebox.TTLCache": Peer(cachebox.TTLCache(rows, 3600), rows, lambda cache: cache.get),
        "diskcache.Cache": Peer(diskcache.Cache(str(directory / "diskcache")), 4096, lambda cache: cache.get),
    }
    puts: dict[str, list[float]] = collections.defaultdict(list)
    for keys, batch_rows in filling:
        puts["DefaultLookupCache"].append(cpu_ns(lambda k=keys, r=batch_rows: lookup_cache.put_many(k, r)) / BATCH)
    for name, peer in peers.items():
        for keys, batch_rows in filling:
            few = min(BATCH, peer.count)
            ids = keys.column("id").to_pylist()[:few]
            tuples = list(zip(*(batch_rows.column(n).slice(0, few).to_pylist() for n in NAMES), strict=True))
            puts[name].append(cpu_ns(lambda p=peer, i=ids, t=tuples: p.put(i, t)) / few)
            if peer.count < rows:
                break
    print_times("put, below the bound", puts, "new")
    gets: dict[str, dict[str, list[float]]] = {trace: collections.defaultdict(list) for trace in traces}
    arrows: dict[str, dict[str, list[float]]] = {trace: collections.defaultdict(list) for trace in traces}
    few_ids = filling[0][0].column("id").to_numpy()[:4096]
    for number in range(args.runs + 2):
        for trace, draw in traces.items():
            ids = draw()
            array = pa.array(ids)
            table = make_keys(ids)
            of_get = cpu_ns(lambda a=array: which_rows(lookup_cache, a)) / BATCH
            of_arrow = cpu_ns(lambda t=table: lookup_cache.get_many(t)) / BATCH
            if number < 2:
                continue
            gets[trace]["DefaultLookupCache"].append(of_get)
            arrows[trace]["DefaultLookupCache"].append(of_arrow)
            for name, peer in peers.items():
                if number > 6 and name != "dict":
                    continue
                peer_keys = array if peer.count >= rows else pa.array(few_ids[rng.integers(0, 4096, 2048)])
                gets[trace][name].append(cpu_ns(lambda p=peer, a=peer_keys: p.get(a)) / len(peer_keys))
                arrows[trace][name].append(cpu_ns(lambda p=peer, a=peer_keys: p.arrow(a)) / len(peer_keys))
    for trace in traces:
        print_times("get, which rows", gets[trace], trace)
    for trace in traces:
        print_times("get, Arrow to Arrow", arrows[trace], trace)
    for peer in peers.values():
        if peer.count >= rows:
            peer.held.clear()
    gc.collect()
    evictions: dict[str, list[float]] = {"DefaultLookupCache": []}
    for keys, batch_rows in [*evicting, *filling]:
        evictions["DefaultLookupCache"].append(cpu_ns(lambda k=keys, r=batch_rows: lookup_cache.put_many(k, r)) / BATCH)
    print_times("put, at the bound", evictions, "new")
    mean = statistics.mean(evictions["DefaultLookupCache"])
    best = statistics.median(arrows["uniform"]["DefaultLookupCache"])
    print(f"\n- put at the bound, mean with the moving of what stays: {mean:.0f} ns/key")
    for goal, value, good in (
        ("get at most 150 ns/key uniform", statistics.median(gets["uniform"]["DefaultLookupCache"]), 150),
        ("put at most 300 ns/key", statistics.median(puts["DefaultLookupCache"]), 300),
        ("put at the bound at most 300 ns/key", statistics.median(evictions["DefaultLookupCache"]), 300),
        ("Arrow to Arrow at least 1.5 M keys/s (667 ns/key)", best, 667),
    ):
        print(f"- {goal}: {value:.0f} ns/key, {'reached' if value <= good else 'MISSED'}")


def which_rows(cache: DefaultLookupCache, keys: pa.Array) -> object:
    """Do what a get does until it knows the numbers of the rows. The access is recorded."""
    entries = cache._entries
    assert entries is not None
    numbers = cache._live(entries, Keys([keys]), cache._time())
    entries.touch(numbers, cache._log.add(numbers, cache._now_s))
    cache._log.trim(entries.live, entries.latest_accesses)
    return entries.locate_rows(numbers)


def print_times(operation: str, times: dict[str, list[float]], keys: str) -> None:
    own_median = statistics.median(times["DefaultLookupCache"])
    for name, samples in times.items():
        median = statistics.median(samples)
        ratio = "" if name == "DefaultLookupCache" else f"{median / own_median:.1f}"
        print(f"| {operation} | {name} | {keys} | {median:.0f} | {float(np.percentile(samples, 99)):.0f} | {ratio} |")


# --- 2: shared by a host -------------------------------------------------------------------------------


def shared_cache(directory: str) -> SharedCache:
    clock, metrics = HostClock(), CacheMetricGroup()
    disk = Disk(Path(directory) / "ours", 2**32, metrics, clock.wall_s, random.Random(1))
    context = HostContext(disk, metrics, clock, random.Random(1), lambda name, run: run())
    bounds = Bounds(float("inf"), float("inf"), None, None, True)
    keys = pa.schema([("id", pa.int64())])
    return SharedCache(disk, context, "bench", keys, SEED, bounds)


def fresh_version() -> Freshness:
    return Freshness("v", pa.schema([(f.name, f.type) for f in make_rows(np.arange(1)).schema][:-1]), lambda v, k: None)


def loaded_elsewhere(directory: str, size: int, batches: int) -> dict[str, list[float]]:
    """Get batches that another process put, in a process that has seen none of them. Returns microseconds of wall time per key."""
    times: dict[str, list[float]] = {"ours": [], "lmdb": [], "SQLite": [], "diskcache": []}
    cache = shared_cache(directory)
    fresh_ = fresh_version()
    store = lmdb.open(f"{directory}/lmdb", map_size=2**32, readonly=True, lock=False)
    database = sqlite3.connect(f"{directory}/sqlite")
    disk = diskcache.Cache(f"{directory}/diskcache")
    for number in range(batches):
        ids = np.arange(number * size, (number + 1) * size)
        arrays = [pa.array(ids)]
        started = time.perf_counter()
        answer = cache.get(arrays, Keys(arrays).hashes(SEED), fresh_)
        times["ours"].append((time.perf_counter() - started) / size * 1e6)
        assert answer is not None
        assert answer.present.all()
        names = [name.to_bytes(8, "big") for name in ids.tolist()]
        started = time.perf_counter()
        with store.begin(buffers=False) as transaction:
            cursor = transaction.cursor()
            rows = [json.loads(value) for _, value in cursor.getmulti(names)]
        table(rows)
        times["lmdb"].append((time.perf_counter() - started) / size * 1e6)
        started = time.perf_counter()
        query = "SELECT rows FROM cache WHERE key IN (SELECT value FROM json_each(?))"
        rows = [json.loads(row) for (row,) in database.execute(query, [json.dumps(ids.tolist())])]
        table(rows)
        times["SQLite"].append((time.perf_counter() - started) / size * 1e6)
        started = time.perf_counter()
        few = ids.tolist()[:1000]
        rows = [json.loads(disk[key]) for key in few]
        table(rows)
        times["diskcache"].append((time.perf_counter() - started) / len(few) * 1e6)
    return times


def table(rows: Sequence[Sequence[Any]]) -> pa.Table:
    return pa.table(list(map(pa.array, zip(*rows, strict=True))), NAMES)


def put_elsewhere(directory: str, size: int, batches: int) -> None:
    """Put the batches into our shared cache, in a process of its own."""
    cache = shared_cache(directory)
    fresh_ = fresh_version()
    for number in range(batches):
        ids = np.arange(number * size, (number + 1) * size)
        arrays = [pa.array(ids)]
        cache.put(arrays, Keys(arrays).hashes(SEED), make_rows(ids), fresh_, np.zeros(len(ids)))


def shared(args: argparse.Namespace, directory: Path) -> None:
    print("\n## Shared by a host: a batch that another process loaded, wall us per key")
    print("| keys in a batch | contender | median | max | ratio to ours |")
    print("|---|---|---|---|---|")
    for size, batches in ((1000, 20), (BATCH, 5)):
        place = directory / f"shared-{size}"
        place.mkdir()
        ids = np.arange(size * batches)
        rows = make_rows(ids)
        texts = [json.dumps(row) for row in zip(*(rows.column(n).to_pylist() for n in NAMES), strict=True)]
        store = lmdb.open(str(place / "lmdb"), map_size=2**32, sync=False)
        with store.begin(write=True) as transaction:
            pairs = [(key.to_bytes(8, "big"), text.encode()) for key, text in zip(ids.tolist(), texts, strict=True)]
            transaction.cursor().putmulti(pairs)
        store.close()
        database = sqlite3.connect(place / "sqlite")
        database.execute("CREATE TABLE cache (key INTEGER PRIMARY KEY, rows TEXT)")
        database.executemany("INSERT INTO cache VALUES (?, ?)", zip(ids.tolist(), texts, strict=True))
        database.commit()
        database.close()
        with diskcache.Cache(str(place / "diskcache")) as disk:
            for number in range(batches):
                for key in ids[number * size : number * size + 1000].tolist():
                    disk[key] = texts[key]
        for function in (put_elsewhere, loaded_elsewhere):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                results = pool.apply(function, (str(place), size, batches))
        assert results is not None
        own_median = statistics.median(results["ours"])
        for name, times in results.items():
            median = statistics.median(times)
            print(
                f"| {size:,} | {name} | {median:.2f} | {max(times):.2f} | {'' if name == 'ours' else f'{median / own_median:.1f}'} |"
            )
        print(
            f"\n- at most 5 us/key, batches of {size:,}: {own_median:.2f}, {'reached' if own_median <= 5 else 'MISSED'}\n"
        )


# --- 3: hit rates --------------------------------------------------------------------------------------


def hit_rates(args: argparse.Namespace) -> None:
    print("\n## Hit rates")
    print("| trace | room | ours | exact LRU | W-TinyLFU (theine) |")
    print("|---|---|---|---|---|")
    rng = np.random.default_rng(5)
    weights = np.cumsum(np.arange(1, 1_000_001) ** -ZIPF)
    zipf = np.searchsorted(weights, rng.random(1_000_000) * weights[-1])
    mixed = zipf.reshape(-1, 1000).copy()
    scans = np.arange(2_000_000, 2_000_000 + 300 * 1000).reshape(300, 1000)
    mixed[rng.choice(len(mixed), 300, replace=False)] = scans  # three batches in ten have keys that never come again
    for name, trace in (("zipf 1.1", zipf.reshape(-1, 1000)), ("zipf 1.1 and 30 % scans", mixed)):
        for room in (1_000, 10_000, 100_000):
            own_rate = ours_hit(trace, room)
            exact = lru_hit(trace, room)
            tiny = theine_hit(trace, room)
            print(f"| {name} | {room:,} | {own_rate:.2%} | {exact:.2%} | {tiny:.2%} |")


def ours_hit(trace: np.ndarray, room: int) -> float:
    cache = DefaultLookupCache.new_builder().max_rows(room).build()
    hits = 0
    for ids in trace:
        present = cache.get_many(make_keys(ids)).present
        # Within a batch, the first miss of a key loads it, and further ones wait for that load: they count as hits.
        missing, first = np.unique(ids[~present], return_index=True)
        hits += len(ids) - len(missing)
        missing = ids[~present][np.sort(first)]
        if len(missing):
            rows = pa.table({"v": missing, KEY_INDEX: np.arange(len(missing))})
            cache.put_many(make_keys(missing), rows)
    return hits / trace.size


def lru_hit(trace: np.ndarray, room: int) -> float:
    cache: collections.OrderedDict[int, None] = collections.OrderedDict()
    hits = 0
    for key in trace.ravel().tolist():
        if key in cache:
            cache.move_to_end(key)
            hits += 1
        else:
            cache[key] = None
            if len(cache) > room:
                cache.popitem(last=False)
    return hits / trace.size


def theine_hit(trace: np.ndarray, room: int) -> float:
    cache: Any = theine.Cache(room)
    hits = 0
    for key in trace.ravel().tolist():
        if cache.get(key)[1]:
            hits += 1
        else:
            cache.set(key, 1)
    return hits / trace.size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_048_576)
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--only", choices=["process", "shared", "rates"])
    args = parser.parse_args()
    print(f"command: {' '.join(['python', '-m', 'benchmarks.bench_partial', *sys.argv[1:]])}")
    print(
        f"machine: {os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}, Python {platform.python_version()}"
    )
    directory = Path(tempfile.mkdtemp(prefix="bench-partial-"))
    try:
        if args.only in (None, "process"):
            in_process(args, directory)
        if args.only in (None, "shared"):
            shared(args, directory)
        if args.only in (None, "rates"):
            hit_rates(args)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
