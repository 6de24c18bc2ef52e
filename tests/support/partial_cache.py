"""The partial cache: what one process loaded answers for all of the host, for as long as it is right: what its tests share."""

import contextlib
import dataclasses
import math
import os
import random
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pyspark_lookup.cache.memory import KEY_INDEX, DefaultLookupCache, LookupCache
from pyspark_lookup.cache.partial.host_cache import Bounds, Freshness, SharedCache, SharedRows
from pyspark_lookup.cache.partial.invalidations import Invalidations
from pyspark_lookup.cache.partial.read_through import Flights, Load, PartialCache
from pyspark_lookup.columnar.keys import Keys, Numbers, Seed
from pyspark_lookup.columnar.predicate import ColumnStats
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.lookup import planner
from pyspark_lookup.lookup.lookup import get_many, read_rows
from pyspark_lookup.lookup.read import ReadTask
from pyspark_lookup.sources.registry import parse_options
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import Disk
from tests.support.fakes import FakeClock, Later
from tests.support.full_cache import Table

BOUND_S = 60.0  # far above what any of this takes
SEED = Seed(0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)
SPACE = "0" * 32
KEYS = pa.schema([("k", pa.int64())])
ROWS = pa.schema([("v", pa.int64()), ("t", pa.string())])
NONE = Bounds(math.inf, math.inf, None, None, True)
Differ = Callable[[str, Sequence[pa.Array]], Numbers | None]
KeyValues = dict[Any, list[Any] | None]


def unknown(version: str, keys: Sequence[pa.Array]) -> None:
    """Nothing is known of another version."""


def differing(*changed: int) -> Differ:
    """By this answer these keys may have other rows in any other version, and no others."""
    return lambda version, keys: np.isin(keys[0].to_numpy(), list(changed))


def using(clock: FakeClock, process: "Process", *used_keys: int) -> Differ:
    """No key differs, but to find that out takes half a second, in which that process uses some."""

    def answer(version: str, keys: Sequence[pa.Array]) -> Numbers:
        clock.tick(0.5)
        process.touch(*used_keys)
        return np.zeros(len(keys[0]), np.bool_)

    return answer


def run_waiting(later: Later) -> int:
    """Do what waits to be done beside; how much that was."""
    waiting = later.waiting[:]
    later.waiting.clear()
    for _, run in waiting:
        run()
    return len(waiting)


def make_rows(lists: Iterable[Sequence[int]]) -> pa.Table:
    """The rows of some keys, given as lists of values."""
    pairs = [(number, value) for number, values in enumerate(lists) for value in values]
    columns = {"v": [value for _, value in pairs], "t": [f"t{value}" for _, value in pairs]}
    schema = ROWS.append(pa.field(KEY_INDEX, pa.int64()))
    return pa.table({**columns, KEY_INDEX: [number for number, _ in pairs]}, schema=schema)


def by_key(keys: Sequence[Any], present: Iterable[bool], rows: pa.Table) -> KeyValues:
    """The column v of each key's rows, None of a key that is absent; the text beside must be that row's."""
    values: KeyValues = {key: [] if is_present else None for key, is_present in zip(keys, present, strict=True)}
    numbers = rows.column(KEY_INDEX).to_pylist()
    assert numbers == sorted(numbers)
    for number, value, text in zip(numbers, rows.column("v").to_pylist(), rows.column("t").to_pylist(), strict=True):
        assert text == f"t{value}"
        values[keys[number]].append(value)
    return values


class Process:
    """A process of a host as far as it shares loads: its view, its counters, and what it wants to do beside."""

    def __init__(
        self,
        root: Path,
        clock: FakeClock | None = None,
        bounds: Bounds = NONE,
        *,
        keys: pa.Schema = KEYS,
        boot: str = "boot-1",
        seed: Seed = SEED,
        host: HostClock | None = None,
    ) -> None:
        self.clock = clock or FakeClock()
        self.host = host or self.clock.host(boot)
        self.metrics = Waited()
        self.disk = Disk(root, 2**30, self.metrics, self.host.wall_s, random.Random(7))
        self.later = Later()
        self.seed = seed
        rng = random.Random(os.urandom(8))
        self.shared = SharedCache(
            self.disk, HostContext(self.disk, self.metrics, self.host, rng, self.later), SPACE, keys, seed, bounds
        )
        self.root, self.directory = root, root / "v1" / "snapshots" / SPACE

    def hashes(self, keys: Sequence[pa.Array]) -> Numbers:
        return Keys(keys).hashes(self.seed)

    def put_rows(
        self,
        keys: Sequence[pa.Array],
        rows: pa.Table,
        version: str = "v1",
        may_differ: Differ = unknown,
        latest: Callable[[], bool] = lambda: True,
    ) -> None:
        """Share rows that were loaded just now. Names of segments are times, so none has another's."""
        schema = pa.schema([field for field in rows.schema if field.name != KEY_INDEX])
        self.clock.wall_s += 0.001
        fresh = Freshness(version, schema, may_differ, latest)
        hashes = self.hashes(keys)
        self.shared.put(keys, hashes, rows, fresh, np.full(len(hashes), self.clock.steady_s))

    def get_rows(
        self, keys: Sequence[pa.Array], schema: pa.Schema, version: str = "v1", may_differ: Differ = unknown
    ) -> SharedRows | None:
        return self.shared.get(keys, self.hashes(keys), Freshness(version, schema, may_differ))

    def put(
        self,
        rows: Mapping[int, Sequence[int]],
        version: str = "v1",
        may_differ: Differ = unknown,
        latest: Callable[[], bool] = lambda: True,
    ) -> None:
        keys = [pa.array(list(rows), pa.int64())]
        self.put_rows(keys, make_rows(rows.values()), version, may_differ, latest)

    def get(self, *keys: int, version: str = "v1", may_differ: Differ = unknown) -> KeyValues:
        shared_rows = self.get_rows([pa.array(keys, pa.int64())], ROWS, version, may_differ)
        if shared_rows is None:
            return dict.fromkeys(keys)
        assert shared_rows.present.any()
        assert (shared_rows.ages_s >= 0).all()
        return by_key(keys, shared_rows.present.tolist(), shared_rows.rows)

    def touch(self, *keys: int) -> None:
        arrays = [pa.array(keys, pa.int64())]
        self.shared.touch(arrays, self.hashes(arrays))

    def merge(self) -> int:
        return run_waiting(self.later)

    def names(self) -> list[str]:
        return self.disk.segments(SPACE)

    def count(self, name: str) -> int:
        return self.metrics.snapshot()[name]


@contextlib.contextmanager
def new_directory() -> Iterator[Path]:
    """A directory of its own for one of many examples."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        yield Path(root)


EXPIRING = [{"expire_after_write_s": 10.0}, {"expire_after_access_s": 10.0}]
BOUNDS = ({"rows": 12}, {"bytes": 6000}, *EXPIRING, {"rows": 16, "expire_after_access_s": 10.0, "missing_keys": False})
BOUNDED = [NONE, *(dataclasses.replace(NONE, **bounds) for bounds in BOUNDS)]


def stats(low: Any, high: Any, nulls: int | None = 0) -> ColumnStats:
    return ColumnStats(low, high, nulls, 10)


GROUP_ROWS = 3  # of the files whose keys are told by `may_hold`


def is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def may_hold(file: Sequence[Any], key: Sequence[Any]) -> bool:
    """Whether a file of these keys can hold one, as far as the bounds of its columns tell; a file without rows has none."""
    for n, part in enumerate(key):
        groups = [file[at : at + GROUP_ROWS] for at in range(0, len(file), GROUP_ROWS)]
        groups = [[row[n] for row in group if row[n] is not None] for group in groups]
        values = [value for group in groups for value in group]
        if file and not values:
            return False
        if file and not is_nan(part) and not any(group and all(map(is_nan, group)) for group in groups):
            ordered = [value for value in values if not is_nan(value)]
            if not min(ordered) <= part <= max(ordered):
                return False
    return True


class Dim(Table):
    """A table of files on a host of its own that is looked up through the partial cache."""

    def __init__(
        self,
        path: Path,
        cache_dir: Path | None,
        options: Mapping[str, str] | None = None,
        clock: FakeClock | None = None,
    ) -> None:
        defaults = {"lookup.keys": "id", "lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "100000"}
        super().__init__(path, cache_dir, {**defaults, **(options or {})}, clock)

    def rows(self, columns: Mapping[str, Any], cache: bool = True) -> list[dict[str, Any]]:
        """The rows of these keys, without the cache on request."""
        options = self.options
        if not cache:
            off = {"lookup.partition": options.files.partition} if options.files.partition else {}
            table_options = {"path": options.files.path, "lookup.keys": ",".join(options.files.keys or ())}
            options = parse_options({**table_options, **off})
        resolved = self.host.reader.find(options, self.table)
        table_columns = planner.table_columns(resolved, options)
        names = list(columns)
        ordered = pa.schema(
            [table_columns.field(n) for n in (*names, *(n for n in table_columns.names if n not in names))]
        )
        plan = planner.plan_read(resolved, options, ordered, self.host.clock.host())
        answer = get_many(self.host.reader, plan, pa.table(dict(columns)), names, None, resolved.version)
        return list(answer.to_pylist())

    def check(self, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The rows of these keys, which must be those that the files have."""
        answer = self.rows(columns)
        assert answer == self.rows(columns, cache=False)
        return answer

    def matching(self, where: str | None = None) -> list[tuple[Any, ...]]:
        """The rows of a scan, of those that a predicate is true of."""
        options = self.options.override({"lookup.where": where} if where else {})
        _, plan = self.host.plan(options, self.table)
        batches = read_rows(self.host.reader, plan, ReadTask(0, 1), None)
        return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]

    def count_growth(self, run: Callable[[], object], *names: str) -> tuple[int, ...]:
        """By how much `run` lets counters grow."""
        before = self.host.metrics.snapshot()
        run()
        after = self.host.metrics.snapshot()
        return tuple(after[name] - before[name] for name in names)


COUNTERS = ("hitCount", "missCount", "loadCount", "sharedCarriedOverCount")


class Source:
    """A table as loads see it: rows by version and key. What was loaded is on record; `before` runs ahead of each load."""

    def __init__(self, **versions: Mapping[int, Sequence[int]]) -> None:
        self.versions = versions or {"v1": {n: [n * 10 + i for i in range(n % 3)] for n in range(200)}}
        self.loads: list[list[int]] = []
        self.before: Callable[[list[int]], object] = lambda keys: None

    def load(self, version: str) -> Load:
        def load(keys: Sequence[pa.Array], ages_s: Numbers) -> pa.Table:
            assert [array.null_count for array in keys] == [0]
            requested_keys = keys[0].to_pylist()
            assert len(set(requested_keys)) == len(requested_keys)
            self.loads.append(requested_keys)
            self.before(requested_keys)
            return make_rows([self.versions[version].get(key, []) for key in requested_keys])

        return load

    def loaded(self) -> list[int]:
        """The keys that were loaded, in order of value; forgotten by asking."""
        keys = sorted(key for load in self.loads for key in load)
        self.loads.clear()
        return keys


class Waited(CacheMetricGroup):
    """Counters that say when somebody begins to wait for another's load."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Event()

    def inc(self, name: str, amount: int = 1) -> None:
        super().inc(name, amount)
        if name == "loadWaitCount" and amount:
            self.waits.set()

    def get_counts(self, *names: str) -> tuple[int, ...]:
        values = self.snapshot()
        return tuple(values[name] for name in names)


class Worker:
    """A process with its own cache and, if it has a directory, what the host shares."""

    def __init__(
        self,
        root: Path | None,
        source: Source,
        clock: FakeClock | None = None,
        bounds: Bounds = NONE,
        *,
        host: HostClock | None = None,
        wait_s: float = 60.0,
        make: Callable[[], LookupCache] | None = None,
    ) -> None:
        self.clock = clock or FakeClock()
        self.host = host or self.clock.host()
        self.source, self.make, self.bounds = source, make, bounds
        self.process = None if root is None else Process(root, self.clock, bounds, host=self.host)
        self.metrics = Waited() if self.process is None else self.process.metrics
        disk, shared = (None, None) if self.process is None else (self.process.disk, self.process.shared)
        context = HostContext(disk, self.metrics, self.host, random.Random())
        self.invalidations = Invalidations(context, SPACE, KEYS.names)
        if shared is not None:
            shared.invalidations = self.invalidations
        flights = Flights(context, SPACE, SEED, wait_s)
        self.cache = PartialCache(KEYS.names, self._make, shared, flights, context, self.invalidations)

    def _make(self) -> LookupCache:
        if self.make is not None:
            return self.make()
        return DefaultLookupCache(
            max_rows=2**62 if math.isinf(self.bounds.rows) else int(self.bounds.rows),
            expire_after_access_s=self.bounds.expire_after_access_s,
            expire_after_write_s=self.bounds.expire_after_write_s,
            cache_missing_key=self.bounds.missing_keys,
            clock=self.host.steady_s,
            rng=random.Random(7),
        )

    def lookup(self, *keys: int | None, version: str = "v1", may_differ: Differ = unknown) -> list[list[int]]:
        """The values of each key's rows."""
        self.clock.wall_s += 0.001
        fresh = Freshness(version, ROWS, may_differ)
        rows = self.cache.lookup([pa.array(keys, pa.int64())], fresh, self.source.load(version))
        assert rows.schema.equals(ROWS.append(pa.field(KEY_INDEX, pa.int64())))
        by_number = by_key(range(len(keys)), [True] * len(keys), rows)
        return [values or [] for values in by_number.values()]

    def invalidate(self, *keys: int) -> None:
        """Have the host forget these keys; a moment later it may load them."""
        self.invalidations.add(pa.table({"k": pa.array(keys, pa.int64())}))
        self.clock.tick(0.001)

    def get_counters(self) -> tuple[int, ...]:
        """(hits, misses, loads, failures) so far."""
        return self.metrics.get_counts("hitCount", "missCount", "loadCount", "numLoadFailures")

    def count(self, name: str) -> int:
        return self.metrics.snapshot()[name]
