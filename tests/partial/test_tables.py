"""The partial cache: the caches of a table."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pyarrow as pa

from pyspark_lookup.base.metrics import CacheMetricGroup
from pyspark_lookup.cache.memory import CachedRows, DefaultLookupCache, LookupCache
from pyspark_lookup.cache.partial import PartialTables
from pyspark_lookup.columnar.keys import Numbers
from pyspark_lookup.io.context import HostContext
from pyspark_lookup.io.disk import Disk
from pyspark_lookup.io.ufs import FileVersion
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.table.model import TableVersion
from tests.fakes import FakeClock, Later
from tests.partial.common import KEYS, ROWS, Source, stats


class Plain(LookupCache):
    """A cache of somebody's own, of which nothing is known."""

    def __init__(self) -> None:
        self.inner = DefaultLookupCache(max_rows=100)
        self.opened = self.closed = 0

    def open(self, metrics: CacheMetricGroup) -> None:
        self.opened += 1
        self.inner.open(metrics)

    def get_many(self, keys: pa.Table) -> CachedRows:
        return self.inner.get_many(keys)

    def peek_many(self, keys: pa.Table) -> CachedRows:
        return self.inner.peek_many(keys)

    def put_many(self, keys: pa.Table, rows: pa.Table, ages_s: Numbers | None = None) -> None:
        self.inner.put_many(keys, rows, ages_s)

    def invalidate_many(self, keys: pa.Table) -> None:
        self.inner.invalidate_many(keys)

    def size(self) -> int:
        return self.inner.size()

    def bytes(self) -> int:
        return self.inner.bytes()

    def close(self) -> None:
        self.closed += 1
        self.inner.close()


class Tables:
    """The caches of tables in one process, asked without a reader in between."""

    def __init__(self, root: Path | None, source: Source, own: LookupCache | None = None, **bounds: str) -> None:
        self.clock = FakeClock()
        self.metrics = CacheMetricGroup()
        disk = Disk(root, 2**30, self.metrics, lambda: self.clock.wall_s, random.Random(7)) if root else None
        rng = random.Random(os.urandom(8))
        self.tables = PartialTables(HostContext(disk, self.metrics, self.clock.host(), rng, Later()), own)
        self.source = source
        given = {"lookup.partial-cache.max-rows": "1000", **bounds}
        self.options = LookupOptions.parse({"path": "/dim", "lookup.keys": "k", "lookup.cache": "PARTIAL", **given})

    def lookup(self, *keys: int, version: str = "v1", space: str = "s") -> list[int]:
        files = TableVersion("t", (FileVersion("file:///dim/a", 1, version),))
        cache, fresh = self.tables.of(
            space, self.options, KEYS, ROWS, files, lambda files: [[stats(0, 5)] for _ in files]
        )
        rows = cache.lookup([pa.array(keys, pa.int64())], fresh, self.source.load(version))
        values: list[int] = rows.column("v").to_pylist()
        return values


def test_processes_draw_one_seed(cache_dir: Path, source: Source) -> None:
    """All processes of a host share by one seed, drawn by the first; tables and other options have their own caches."""
    one, other = Tables(cache_dir, source), Tables(cache_dir, source)
    assert one.lookup(1, 2) == [10, 20, 21]
    assert other.lookup(2, 1) == [20, 21, 10]
    assert source.loaded() == [1, 2]
    assert one.lookup(1, space="another table") == [10]
    assert source.loaded() == [1]
    assert one.lookup(8, version="v1") == [80, 81]
    source.versions = {"v1": source.versions["v1"], "v2": source.versions["v1"]}
    source.loaded()
    assert one.lookup(1, 8, version="v2") == [10, 80, 81]  # both files may hold keys up to 5
    assert source.loaded() == [1]


def test_a_seed_that_cannot_be_shared(cache_dir: Path, source: Source) -> None:
    """Without a record of the seed a process caches for itself; that is counted."""
    tables = Tables(cache_dir, source)
    (cache_dir / "v1" / "records").rmdir()
    (cache_dir / "v1" / "records").touch()
    assert tables.lookup(1) == tables.lookup(1) == [10]
    assert source.loaded() == [1]
    assert list((cache_dir / "v1" / "snapshots").iterdir()) == []
    assert tables.metrics.snapshot()["cacheFailureCount"] > 0


def test_a_cache_of_ones_own(cache_dir: Path, source: Source) -> None:
    """A cache of which only its class knows the bounds is not shared, and serves one version at a time; a default one shares."""
    own = Plain()
    tables = Tables(cache_dir, source, own)
    assert tables.lookup(1, 2) == tables.lookup(1, 2) == [10, 20, 21]
    assert source.loaded() == [1, 2]
    assert (own.opened, own.closed, own.size()) == (1, 0, 3)
    source.versions = {"v1": source.versions["v1"], "v2": {1: [5]}}
    assert tables.lookup(1, 2, version="v2") == [5]
    assert source.loaded() == [1, 2]
    assert (own.opened, own.closed) == (2, 1)
    assert list((cache_dir / "v1" / "snapshots").iterdir()) == []
    default = DefaultLookupCache(max_rows=100)
    assert Tables(cache_dir, source, default).lookup(1) == [10]
    assert default.size() == 1
    assert Tables(cache_dir, source, DefaultLookupCache(max_rows=5)).lookup(1) == [10]
    assert source.loaded() == [1]


def test_without_a_directory(source: Source) -> None:
    """There is a cache in the process all the same."""
    tables = Tables(None, source)
    assert tables.lookup(1, 2) == tables.lookup(1, 2) == [10, 20, 21]
    assert source.loaded() == [1, 2]
    assert tables.metrics.snapshot()["cacheFailureCount"] == 0
