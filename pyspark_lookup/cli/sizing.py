"""`advice`: which cache mode and sizes suit a table, from its statistics and, if there is one, from a trace of keys.

The trace is replayed through the partial cache itself, once for each of several sizes (a shadow cache): what is said of a size
is what it would have done. Keys come in batches, as lookups do; a key that is missed twice in a batch is loaded once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from pyspark_lookup.cache.memory import KEY_INDEX, DefaultLookupCache
from pyspark_lookup.columnar.keys import Keys
from pyspark_lookup.io.disk import DiskSpace
from pyspark_lookup.options.enums import CacheMode

_BATCH = 10_000
_SIZES = 8
_NEAR = 0.98  # of what the largest size would have answered
_SMALL = 256 * 1024 * 1024  # decoded: not worth a thought
_RELOAD = 2  # old and new lie on disk together


@dataclasses.dataclass(frozen=True)
class TableFacts:
    """A table as far as it matters: its rows (None: unknown), the bytes of its files, and those of its rows, decoded.

    `estimated`: the last is a guess from the files' size. `provided`: it comes from a provider, key by key.
    """

    rows: int | None
    file_bytes: int
    decoded_bytes: int
    estimated: bool = False
    provided: bool = False


@dataclasses.dataclass(frozen=True)
class Replayed:
    """What a partial cache of `max_rows` keys would have answered of a trace."""

    max_rows: int
    requests: int
    hits: int

    @property
    def hit_rate(self) -> float:
        return self.hits / self.requests if self.requests else 0.0


@dataclasses.dataclass(frozen=True)
class Advice:
    """The options that suit a table, and why."""

    options: dict[str, str]
    reasons: tuple[str, ...]
    distinct_keys: int | None
    sizes: tuple[Replayed, ...]


def advice(facts: TableFacts, space: DiskSpace, memory_bytes: int, trace: pa.Table | None) -> Advice:
    """What to set for a table on a host with this disk and memory (-1: unknown). `trace`: the key columns of lookups, in their order."""
    sizes: tuple[Replayed, ...] = ()
    distinct = None
    if trace is not None and trace.num_rows:
        distinct = _distinct(trace)
        sizes = tuple(replayed(trace, size) for size in _sizes(distinct))
    fits = facts.decoded_bytes * _RELOAD <= (space.free if space.free >= 0 else facts.decoded_bytes * _RELOAD)
    what = f"its rows take {'about ' if facts.estimated else ''}{facts.decoded_bytes / 1e6:,.1f} MB decoded"
    if facts.provided:
        reasons = ["a provider answers by key: there is no whole table to keep"]
    elif not fits:
        reasons = [f"{what}; a full cache needs twice that on disk, and {space.free / 1e6:,.0f} MB are free"]
    elif facts.decoded_bytes <= _SMALL:
        return _full([f"{what}: small enough for every host to keep it whole"], distinct, sizes)
    elif memory_bytes >= 0 and facts.decoded_bytes > memory_bytes // 2 and sizes and _chosen(sizes).hit_rate > 0.9:
        reasons = [f"{what}, more than half of the memory, and a part of the keys is asked for again and again"]
    else:
        return _full([f"{what}, and the disk has room for it"], distinct, sizes)
    return _partial(reasons, distinct, sizes)


def _full(reasons: list[str], distinct: int | None, sizes: tuple[Replayed, ...]) -> Advice:
    return Advice({"lookup.cache": CacheMode.FULL.value}, tuple(reasons), distinct, sizes)


def _partial(reasons: list[str], distinct: int | None, sizes: tuple[Replayed, ...]) -> Advice:
    options = {"lookup.cache": CacheMode.PARTIAL.value}
    if not sizes:
        reasons.append("how many rows to hold only a trace of keys tells (--trace); 1,000,000 is a start")
        return Advice({**options, "lookup.partial-cache.max-rows": "1000000"}, tuple(reasons), distinct, sizes)
    best = _chosen(sizes)
    reasons.append(
        f"with {best.max_rows:,} rows {best.hit_rate:.1%} of the trace's keys would have been answered from the cache"
    )
    if best.hit_rate < 0.5:
        reasons.append("most keys are asked for once only: more rows would not help")
    return Advice({**options, "lookup.partial-cache.max-rows": str(best.max_rows)}, tuple(reasons), distinct, sizes)


def _chosen(sizes: Sequence[Replayed]) -> Replayed:
    """The smallest size that is nearly as good as the largest."""
    most = max(size.hits for size in sizes)
    return next(size for size in sizes if size.hits >= _NEAR * most)


def _sizes(distinct: int) -> list[int]:
    """Sizes up to all keys, each about 2.7 times the one before."""
    shares = np.geomspace(0.001, 1.0, _SIZES)
    return sorted({max(int(np.ceil(distinct * share)), 1) for share in shares})


def _distinct(trace: pa.Table) -> int:
    return int(trace.group_by(trace.column_names).aggregate([]).num_rows)


def replayed(trace: pa.Table, max_rows: int) -> Replayed:
    """What a partial cache of that size would have answered. `trace`: key columns, a request per row; those with a null count for nothing."""
    cache = DefaultLookupCache(max_rows=max_rows)
    empty = pa.table({KEY_INDEX: pa.array([], pa.int64())})
    requests = hits = 0
    for start in range(0, trace.num_rows, _BATCH):
        batch = trace.slice(start, _BATCH).combine_chunks()
        valid = Keys([column.combine_chunks() for column in batch.columns]).valid
        known = batch if valid is None else batch.filter(pa.array(valid))
        present = cache.get_many(known).present
        missed = known.filter(pa.array(~present)).group_by(known.column_names).aggregate([])
        requests += known.num_rows
        hits += known.num_rows - missed.num_rows
        if missed.num_rows:
            cache.put_many(missed, empty)
    cache.close()
    return Replayed(max_rows, requests, hits)
