"""`DefaultLookupCache`: FLIP-221's cache in the memory of one process, by whole columns.

Eviction is exactly least recently used. An entry that was evicted, has expired or was replaced keeps
its memory until as much of it has come together as there is in use; then the rest is moved together.
"""

from __future__ import annotations

import functools
import math
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.base.clock import HostClock
from pyspark_lookup.base.errors import OptionError, SchemaError
from pyspark_lookup.base.forks import resets_in_child
from pyspark_lookup.base.metrics import CacheMetricGroup
from pyspark_lookup.cache.lookup_cache import CachedRows, LookupCache
from pyspark_lookup.cache.memory.access_log import AccessLog
from pyspark_lookup.cache.memory.entries import Entries
from pyspark_lookup.columnar.key_rows import KEY_INDEX
from pyspark_lookup.columnar.keys import Keys, Numbers, as_indices, cast_keys, check_key_types, draw_seed, one_array
from pyspark_lookup.columnar.types import cast_column, spark_type, widens
from pyspark_lookup.options.enums import CacheMode
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.options.parsing import is_number

_GARBAGE_ROWS = 64 * 1024
_GARBAGE_BYTES = 1024 * 1024
_PURGES = 8  # per time to live
_CLOCK = HostClock()


def _bound(name: str, value: Any) -> Any:
    """The value of a bound. Raises ValueError for what cannot be one."""
    if not is_number(value) or not value >= 0:
        raise ValueError(f"{name} = {value!r}: expected a number, 0 or more")
    return value


class DefaultLookupCacheBuilder:
    """Says what a `DefaultLookupCache` is to hold. Give it at least one bound."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def expire_after_access(self, seconds: float) -> DefaultLookupCacheBuilder:
        """Drop an entry that was not read or put for so long (>= 0; 0 keeps nothing)."""
        return self._with("expire_after_access_s", seconds)

    def expire_after_write(self, seconds: float) -> DefaultLookupCacheBuilder:
        """Drop an entry so long after it was put (>= 0; 0 keeps nothing)."""
        return self._with("expire_after_write_s", seconds)

    def max_rows(self, rows: int) -> DefaultLookupCacheBuilder:
        """Hold at most so many rows (>= 0), a key without rows counting as one."""
        return self._with("max_rows", rows)

    def max_bytes(self, size: int) -> DefaultLookupCacheBuilder:
        """Hold entries of at most so many bytes (>= 0). Memory in use is up to twice that, see the module."""
        return self._with("max_bytes", size)

    def cache_missing_key(self, wanted: bool) -> DefaultLookupCacheBuilder:
        """Whether to remember that a key has no rows (default: yes)."""
        self._values["cache_missing_key"] = wanted
        return self

    def _with(self, name: str, value: float) -> DefaultLookupCacheBuilder:
        self._values[name] = _bound(name, value)
        return self

    def build(self) -> DefaultLookupCache:
        """The cache. Raises OptionError if nothing bounds it (FLIP-221)."""
        return DefaultLookupCache(**self._values)


class DefaultLookupCache(LookupCache):
    """A cache within all bounds that were given; see `DefaultLookupCacheBuilder` for what they mean.

    `clock` gives seconds that never go back. A copy made by pickling has the same bounds, and holds
    nothing. An entry larger than a bound is not kept.
    """

    def __init__(
        self,
        *,
        expire_after_access_s: float | None = None,
        expire_after_write_s: float | None = None,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        cache_missing_key: bool = True,
        clock: Callable[[], float] = _CLOCK.steady_s,
        rng: random.Random | None = None,
    ) -> None:
        self._config: dict[str, Any] = {
            "expire_after_access_s": expire_after_access_s,
            "expire_after_write_s": expire_after_write_s,
            "max_rows": max_rows,
            "max_bytes": max_bytes,
            "cache_missing_key": cache_missing_key,
        }
        for name, bound in list(self._config.items())[:-1]:
            if bound is not None:
                _bound(name, bound)
        if all(bound is None for bound in list(self._config.values())[:-1]):
            raise OptionError(
                "a lookup cache without expiration and without a maximum size would grow without bound: set one of "
                "lookup.partial-cache.expire-after-access, lookup.partial-cache.expire-after-write, "
                "lookup.partial-cache.max-rows or lookup.partial-cache.max-bytes"
            )
        self._access_s, self._write_s = expire_after_access_s, expire_after_write_s
        self._max_rows = math.inf if max_rows is None else max_rows
        self._max_bytes = math.inf if max_bytes is None else max_bytes
        self._missing = cache_missing_key
        self._clock = clock
        self._seed = draw_seed(rng or random.Random())
        self.reset_in_child()
        resets_in_child(self)

    def reset_in_child(self) -> None:
        """Begin empty: a thread of the parent may have held the lock, with entries half changed."""
        self._lock = threading.RLock()
        self._metrics = CacheMetricGroup()
        self._now_s = -math.inf
        self._purge_at_s = -math.inf
        self._entries: Entries | None = None
        self._log = AccessLog(self._access_s is not None)

    @staticmethod
    def new_builder() -> DefaultLookupCacheBuilder:
        """Begin to describe a cache."""
        return DefaultLookupCacheBuilder()

    @classmethod
    def from_options(cls, options: LookupOptions, clock: Callable[[], float] = _CLOCK.steady_s) -> DefaultLookupCache:
        """The cache that `lookup.partial-cache.*` describe. Raises OptionError unless lookup.cache is PARTIAL."""
        if options.cache is not CacheMode.PARTIAL:
            raise OptionError(f"option lookup.cache = {options.cache.value!r} should be 'PARTIAL'")
        return cls(**options.partial_cache, clock=clock)

    @property
    def config(self) -> dict[str, Any]:
        """The bounds, by the names of this class's parameters; None: not bounded so."""
        return dict(self._config)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DefaultLookupCache) and self._config == other._config

    def __hash__(self) -> int:
        return hash(tuple(self._config.values()))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self._config.items() if value is not None)
        return f"DefaultLookupCache({shown})"

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(DefaultLookupCache, **self._config), ()

    # --- the five operations ----------------------------------------------------------------------

    def open(self, metrics: CacheMetricGroup) -> None:
        with self._lock:
            self._metrics = metrics
            self._tell()

    def get_many(self, keys: pa.Table) -> CachedRows:
        return self._get(keys, access=True)

    def peek_many(self, keys: pa.Table) -> CachedRows:
        return self._get(keys, access=False)

    def _get(self, keys: pa.Table, access: bool) -> CachedRows:
        with self._lock:
            held = self._entries
            if held is None:
                asked = Keys([one_array(column) for column in keys.columns])
                entries = np.full(asked.rows, -1, np.int64)
            else:
                asked = Keys(cast_keys(keys, held.key_fields))
                entries = self._live(held, asked, self._time())
            present = entries >= 0
            hits = np.flatnonzero(present)
            found = entries if len(hits) == len(entries) else entries[hits]
            if access:
                known = asked.rows if asked.valid is None else int(np.count_nonzero(asked.valid))
                self._metrics.inc("hitCount", len(hits))
                self._metrics.inc("missCount", known - len(hits))
                if held is not None and len(found):
                    held.touch(found, self._log.add(found, self._now_s))
                    self._log.trim(held.live, held.used)
            if held is None:
                return CachedRows(present, None)
            columns, (places, rows), fields = held.columns(), held.rows_of(found), held.row_fields
            if not fields and not held.has_rows:
                return CachedRows(present, None)
        # Outside of the lock: what is looked at here is only ever appended to.
        indices = as_indices(rows)
        taken = [
            cast_column(pc.take(column, indices, boundscheck=False), field.type, field.name, "")
            for column, field in zip(columns, fields, strict=True)
        ]
        numbers = as_indices(hits[places])
        schema = pa.schema([*fields, pa.field(KEY_INDEX, pa.int64())])
        return CachedRows(present, pa.Table.from_arrays([*taken, numbers], schema=schema))

    def _live(self, held: Entries, keys: Keys, now_s: float) -> Numbers:
        """The entry of each key that may be answered from, else -1."""
        entries = held.find(keys, keys.hashes(self._seed))
        if self._access_s is None and self._write_s is None:
            return entries
        found = np.flatnonzero(entries >= 0)
        expired = np.zeros(len(found), np.bool_)
        if self._access_s is not None:
            expired |= held.used(entries[found]) < self._log.first_after(now_s - self._access_s)
        if self._write_s is not None:
            expired |= held.written_s(entries[found]) <= now_s - self._write_s
        entries[found[expired]] = -1
        return entries

    def put_many(self, keys: pa.Table, rows: pa.Table, ages_s: Numbers | None = None) -> None:
        with self._lock:
            held, fields = self._open(keys, rows)
            asked = Keys(cast_keys(keys, held.key_fields))
            if asked.valid is not None:
                row = int(np.flatnonzero(~asked.valid)[0])
                raise ValueError(f"null key: {keys.slice(row, 1).to_pylist()[0]}")
            columns, counts = _group(rows, fields, asked.rows)
            self._entries = held
            if fields and not held.row_fields:
                held.adopt(fields)
            if not self._missing and not counts.all():
                kept = as_indices(np.flatnonzero(counts))
                asked = Keys([column.array.take(kept) for column in asked.columns])
                ages_s = None if ages_s is None else ages_s[counts > 0]
                counts = counts[counts > 0]
            if not asked.rows:
                return
            now_s = self._time()
            written_s = np.full(asked.rows, now_s) if ages_s is None else now_s - ages_s
            entries = held.put(asked, asked.hashes(self._seed), columns, counts, written_s)
            alive = entries[held.used(entries) >= 0]
            held.touch(alive, self._log.add(alive, now_s))
            weights, sizes = held.weights(slice(int(entries[0]), None))
            too_large = (weights > self._max_rows) | (sizes > self._max_bytes)
            if too_large.any():
                held.remove(np.setdiff1d(entries[too_large], entries[held.used(entries) < 0]))
            self._purge(held, now_s)
            self._evict(held)
            self._compact(held)
            self._tell()

    def invalidate_many(self, keys: pa.Table) -> None:
        with self._lock:
            held = self._entries
            if held is not None:
                asked = Keys(cast_keys(keys, held.key_fields))
                entries = held.find(asked, asked.hashes(self._seed))
                held.remove(np.unique(entries[entries >= 0]))
                self._compact(held)
                self._tell()

    def size(self) -> int:
        with self._lock:
            if self._entries is not None:
                self._purge(self._entries, self._time(), now=True)
                self._tell()
            return 0 if self._entries is None else self._entries.live_rows

    def bytes(self) -> int:
        with self._lock:
            return 0 if self._entries is None else self._entries.live_bytes

    def close(self) -> None:
        with self._lock:
            self._entries = None
            self._log = AccessLog(self._access_s is not None)
            self._tell()

    # --- within the bounds ------------------------------------------------------------------------

    def _time(self) -> float:
        """Now; never before the time of an earlier call."""
        self._now_s = max(self._now_s, self._clock())
        return self._now_s

    def _open(self, keys: pa.Table, rows: pa.Table) -> tuple[Entries, Sequence[pa.Field]]:
        """Where to put these; what the first keys and the first rows are like decides for all."""
        fields = [pa.field(f.name, spark_type(f.type)) for f in rows.schema if f.name != KEY_INDEX]
        held = self._entries
        if held is None:
            key_fields = [pa.field(field.name, spark_type(field.type)) for field in keys.schema]
            check_key_types(key_fields)
            return Entries(key_fields, []), fields
        return held, held.row_fields if held.row_fields or held.has_rows else fields

    def _purge(self, held: Entries, now_s: float, now: bool = False) -> None:
        """Take away what has expired: by access at once, by age from time to time."""
        if self._access_s is not None:
            gone = self._log.pop_before(self._log.first_after(now_s - self._access_s), held.used)
            held.remove(gone)
        if self._write_s is not None and (now or now_s >= self._purge_at_s):
            held.remove(held.find_written_before(now_s - self._write_s))
            self._purge_at_s = now_s + self._write_s / _PURGES

    def _evict(self, held: Entries) -> None:
        if self._write_s is not None and (held.live_rows > self._max_rows or held.live_bytes > self._max_bytes):
            self._purge(held, self._now_s, now=True)
        rows, size = held.live_rows - self._max_rows, held.live_bytes - self._max_bytes
        if rows <= 0 and size <= 0:
            return

        def enough(entries: Numbers) -> int | None:
            nonlocal rows, size
            weights, sizes = held.weights(entries)
            weights, sizes = np.cumsum(weights), np.cumsum(sizes)
            wanted = max(int(np.searchsorted(weights, rows)), int(np.searchsorted(sizes, size))) + 1
            if wanted > len(entries):
                if len(entries):
                    rows, size = rows - int(weights[-1]), size - int(sizes[-1])
                return None
            return wanted

        held.remove(self._log.pop_oldest(held.used, enough))

    def _compact(self, held: Entries) -> None:
        entries, size = len(held) - held.live, held.all_bytes - held.live_bytes
        if entries > max(held.live, _GARBAGE_ROWS) or size > max(held.live_bytes, _GARBAGE_BYTES):
            self._entries, numbers_there = held.compact()
            self._log.renumber(numbers_there, self._entries.used)

    def _tell(self) -> None:
        held = self._entries
        self._metrics.set_gauge("numCachedRecords", 0 if held is None else held.live_rows)
        self._metrics.set_gauge("numCachedBytes", 0 if held is None else held.live_bytes)


def _group(rows: pa.Table, fields: Sequence[pa.Field], keys: int) -> tuple[list[pa.Array], Numbers]:
    """The columns of `rows` in the order of their keys, and how many each of `keys` keys has."""
    if not rows.num_rows:
        return [pa.array([], field.type) for field in fields], np.zeros(keys, np.int64)
    if KEY_INDEX not in rows.column_names:
        raise SchemaError(f"rows have no column {KEY_INDEX}, which says whose each is")
    lost = [field.name for field in fields if field.name not in rows.column_names]
    if lost or len(fields) + 1 != rows.num_columns:
        names = [name for name in rows.column_names if name != KEY_INDEX]
        raise SchemaError(
            f"rows have the columns {', '.join(names)}; this cache holds {', '.join(f.name for f in fields)}"
        )
    indices = one_array(rows.column(KEY_INDEX)).cast(pa.int64())
    numbers = np.frombuffer(indices.buffers()[1], np.int64, indices.offset + len(indices))[indices.offset :]
    if indices.null_count or int(numbers.min()) < 0 or int(numbers.max()) >= keys:
        raise ValueError(f"rows without a key: {KEY_INDEX} has to be a place among the {keys} keys")
    for field in fields:
        if not widens(spark_type(rows.schema.field(field.name).type, pa.null()), field.type):
            found = rows.schema.field(field.name).type
            raise SchemaError(f"rows have column {field.name!r} as {found}, this cache holds {field.type}")
    columns = [cast_column(one_array(rows.column(field.name)), field.type, field.name, "rows") for field in fields]
    if (numbers[1:] < numbers[:-1]).any():
        order = as_indices(np.argsort(numbers, kind="stable"))
        columns = [column.take(order) for column in columns]
    return columns, np.bincount(numbers, minlength=keys)
