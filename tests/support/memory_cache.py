"""The cache in memory: what its tests share."""

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pytest

from pyspark_lookup.cache.disk_lookup_cache import DiskCacheLookupCache
from pyspark_lookup.cache.lookup_cache import Key, KeyLookupCache, LookupCache
from pyspark_lookup.cache.memory import KEY_INDEX, CachedRows, DefaultLookupCache, default_cache
from pyspark_lookup.core.metrics import CacheMetricGroup
from tests.support.fakes import FakeClock


class Dictionary(KeyLookupCache):
    """A cache of single keys, emptied when it is closed. It counts what lookups count, too, and each row as one byte."""

    def __init__(self) -> None:
        self.entries: dict[Any, list[dict[str, Any]]] = {}
        self.opened = 0
        self.metrics = CacheMetricGroup()

    def open(self, metrics: CacheMetricGroup) -> None:
        self.opened += 1
        self.metrics = metrics

    def get_if_present(self, key: Key) -> list[dict[str, Any]] | None:
        rows = self.entries.get(tuple(key.values()))
        self.metrics.inc("missCount" if rows is None else "hitCount")
        return rows

    def put(self, key: Key, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
        before = self.entries.get(tuple(key.values()))
        self.entries[tuple(key.values())] = [dict(row) for row in rows]
        self.metrics.set_gauge("numCachedBytes", self.size())
        return before

    def invalidate(self, key: Key) -> None:
        self.entries.pop(tuple(key.values()), None)

    def size(self) -> int:
        return sum(max(len(rows), 1) for rows in self.entries.values())

    def close(self) -> None:
        self.entries.clear()


Cache = TypeVar("Cache", bound=LookupCache)
UNBOUNDED = 2**63 - 1
ROWS = pa.schema([("v", pa.int64()), ("t", pa.string()), ("b", pa.bool_()), (KEY_INDEX, pa.int64())])
Row = dict[str, Any]


@contextlib.contextmanager
def small() -> Iterator[None]:
    """Columns grow, the log is trimmed and entries are moved together after a handful of them, not after thousands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default_cache, "_SMALLEST", 1)
        patch.setattr(default_cache, "_SLACK", 2)
        patch.setattr(default_cache, "_GARBAGE_ROWS", 4)
        yield


def make_cache(clock: FakeClock | None = None, **bounds: Any) -> DefaultLookupCache:
    """A cache with these bounds (none: as good as unbounded) whose hashes are the same in each run."""
    clock = clock or FakeClock()
    return DefaultLookupCache(**(bounds or {"max_rows": UNBOUNDED}), clock=lambda: clock.steady_s, rng=random.Random(7))


def make_disk_cache(
    directory: Path, clock: FakeClock | None = None, boot: str = "boot-1", max_bytes: int = 2**26, **more: Any
) -> DiskCacheLookupCache:
    """A cache in a database there, which is as good as unbounded."""
    clock = clock or FakeClock()
    return DiskCacheLookupCache(directory, max_bytes=max_bytes, clock=clock.host(boot), **more)


def opened(cache: Cache) -> tuple[Cache, CacheMetricGroup]:
    metrics = CacheMetricGroup()
    cache.open(metrics)
    return cache, metrics


def counts(metrics: CacheMetricGroup) -> tuple[int, int]:
    """(hits, misses) so far."""
    values = metrics.snapshot()
    return values["hitCount"], values["missCount"]


def make_keys(*numbers: int) -> pa.Table:
    return pa.table({"k": pa.array(numbers, pa.int64())})


def make_rows(*values: int | list[int]) -> pa.Table:
    """Rows for as many keys: each has the one row, or those of a list."""
    lists = [value if isinstance(value, list) else [value] for value in values]
    places = [place for place, rows in enumerate(lists) for _ in rows]
    return pa.table({
        "v": pa.array([value for rows in lists for value in rows], pa.int64()),
        KEY_INDEX: pa.array(places, pa.int64()),
    })  # fmt: skip


def list_values(cached: CachedRows) -> list[list[Any] | None]:
    """Of each key the column v of its rows, None where the key is absent."""
    lists: list[list[Any] | None] = [[] if present else None for present in cached.present.tolist()]
    if cached.rows is not None:
        for value, place in zip(cached.rows["v"].to_pylist(), cached.rows[KEY_INDEX].to_pylist(), strict=True):
            lists[place].append(value)
    return lists


def list_present(cache: LookupCache, numbers: Sequence[int]) -> list[int]:
    """Those of the keys that are there; looking is no access."""
    return [
        n
        for n, is_present in zip(numbers, cache.peek_many(make_keys(*numbers)).present.tolist(), strict=True)
        if is_present
    ]


def make_row(serial: int) -> Row:
    """A row that no other is equal to, with nulls."""
    return {"v": serial, "t": None if serial % 5 == 0 else "é" * (serial % 40), "b": [None, True, False][serial % 3]}
