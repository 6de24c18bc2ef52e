"""`DefaultLookupCache`: FLIP-221's cache in the memory of one process, by whole columns.

Eviction is exactly least recently used. The memory of evicted, expired and replaced entries is freed when it exceeds that of
live ones: then the live entries are copied into new columns.
"""

from __future__ import annotations

import functools
import math
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.cache.lookup_cache import CachedRows, LookupCache
from pyspark_lookup.cache.memory.entries import Entries
from pyspark_lookup.columnar.key_rows import KEY_INDEX
from pyspark_lookup.columnar.keys import Keys, Numbers, as_indices, cast_keys, check_key_types, draw_seed, one_array
from pyspark_lookup.columnar.types import cast_column, spark_type, widens
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.forks import resets_in_child
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.errors import OptionError, SchemaError
from pyspark_lookup.options.enums import CacheMode
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.options.parsing import is_number

_SLACK = 128 * 1024
_BATCHES_AT_MOST = 4096  # small batches, for instance of one key each


class AccessLog:
    """Accesses to entries, in order and numbered from 0, with times in seconds that never go back.

    A batch of accesses is appended as it comes. An access that is read from the old end counts only if the same entry has no later one. So
    the order is exact, and costs no Python step per entry. `timed`: whether to keep the times of accesses, for `find_first_later`.
    """

    def __init__(self, timed: bool) -> None:
        self._timed = timed
        self._batches: deque[tuple[Numbers, Numbers]] = deque()  # (entries, numbers of the accesses)
        self._length = 0
        self._next = 0
        # (first access, time): the time applies up to the next pair's first access.
        self._times: deque[tuple[int, float]] = deque()

    def add(self, entries: Numbers, now_s: float) -> Numbers:
        """Add an access to each of these entries, in order, now. Returns their numbers."""
        numbers = np.arange(self._next, self._next + len(entries))
        if self._timed and (not self._times or now_s > self._times[-1][1]):
            self._times.append((self._next, now_s))
        self._next += len(entries)
        self._batches.append((entries, numbers))
        self._length += len(entries)
        return numbers

    def find_first_later(self, limit_s: float) -> int:
        """The number of the first access later than `limit_s`, which must not decrease from call to call."""
        while self._times and self._times[0][1] <= limit_s:
            self._times.popleft()
        return self._times[0][0] if self._times else self._next

    def pop_earlier(self, access: int, latest: Callable[[Numbers], Numbers]) -> Numbers:
        """Remove and return the entries whose latest access, according to `latest`, was before `access`."""
        old_entries = [np.zeros(0, np.int64)]
        while self._batches and self._batches[0][1][0] < access:
            entries, numbers = self._batches.popleft()
            cut = int(np.searchsorted(numbers, access))
            if cut < len(numbers):
                self._batches.appendleft((entries[cut:], numbers[cut:]))
            self._length -= cut
            current = latest(entries[:cut]) == numbers[:cut]
            old_entries.append(entries[:cut][current])
        return np.concatenate(old_entries)

    def pop_oldest(self, latest: Callable[[Numbers], Numbers], enough: Callable[[Numbers], int | None]) -> Numbers:
        """Remove and return the least recently used entries, batch by batch, until `enough` says how many of a batch suffice."""
        oldest_entries = [np.zeros(0, np.int64)]
        while self._batches:
            entries, numbers = self._batches.popleft()
            current = np.flatnonzero(latest(entries) == numbers)
            count = enough(entries[current])
            if count is None:
                self._length -= len(entries)
                oldest_entries.append(entries[current])
                continue
            cut = int(current[count]) if count < len(current) else len(entries)
            oldest_entries.append(entries[current[:count]])
            self._length -= cut
            if cut < len(entries):
                self._batches.appendleft((entries[cut:], numbers[cut:]))
            break
        return np.concatenate(oldest_entries)

    def trim(self, live: int, latest: Callable[[Numbers], Numbers]) -> None:
        """Drop accesses that no longer count, if they are more than half of the log. `live`: the number of entries."""
        if self._length > 2 * live + _SLACK or len(self._batches) > _BATCHES_AT_MOST:
            self._rewrite(lambda entries: entries, latest)

    def renumber(self, numbers_there: Numbers, latest: Callable[[Numbers], Numbers]) -> None:
        """Give entries their new numbers (-1: removed). `latest`: the latest accesses by new number, which is updated."""
        self._rewrite(lambda entries: numbers_there[entries], latest)

    def _rewrite(self, move: Callable[[Numbers], Numbers], latest: Callable[[Numbers], Numbers]) -> None:
        entries, numbers = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for old_numbers, accesses in self._batches:
            moved = move(old_numbers)
            is_current = moved >= 0
            is_current[is_current] = latest(moved[is_current]) == accesses[is_current]
            entries.append(moved[is_current])
            numbers.append(accesses[is_current])
        whole = np.concatenate(entries), np.concatenate(numbers)
        self._batches = deque([whole] if len(whole[0]) else [])
        self._length = len(whole[0])


# --- the cache ------------------------------------------------------------------------------------

_GARBAGE_ROWS = 64 * 1024
_GARBAGE_BYTES = 1024 * 1024
_PURGES = 8  # per time to live
_CLOCK = HostClock()


def _check_bound(name: str, value: Any) -> Any:
    """The value of a bound. Raises ValueError unless it is a number, 0 or more."""
    if not is_number(value) or not value >= 0:
        raise ValueError(f"{name} = {value!r}: expected a number, 0 or more")
    return value


class DefaultLookupCacheBuilder:
    """Builds a `DefaultLookupCache`. It needs at least one bound."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def expire_after_access(self, seconds: float) -> DefaultLookupCacheBuilder:
        """Drop an entry that was not read or put for this long (>= 0; 0 caches nothing)."""
        return self._set_bound("expire_after_access_s", seconds)

    def expire_after_write(self, seconds: float) -> DefaultLookupCacheBuilder:
        """Drop an entry this long after it was put (>= 0; 0 caches nothing)."""
        return self._set_bound("expire_after_write_s", seconds)

    def max_rows(self, rows: int) -> DefaultLookupCacheBuilder:
        """Cache at most this many rows (>= 0). A key without rows counts as one."""
        return self._set_bound("max_rows", rows)

    def max_bytes(self, size: int) -> DefaultLookupCacheBuilder:
        """Cache entries of at most this many bytes (>= 0). The memory in use is up to twice that, see the module."""
        return self._set_bound("max_bytes", size)

    def cache_missing_key(self, wanted: bool) -> DefaultLookupCacheBuilder:
        """Whether to remember that a key has no rows (default: yes)."""
        self._values["cache_missing_key"] = wanted
        return self

    def _set_bound(self, name: str, value: float) -> DefaultLookupCacheBuilder:
        self._values[name] = _check_bound(name, value)
        return self

    def build(self) -> DefaultLookupCache:
        """The cache. Raises OptionError if it has no bound (FLIP-221)."""
        return DefaultLookupCache(**self._values)


class DefaultLookupCache(LookupCache):
    """A cache within the bounds that `DefaultLookupCacheBuilder` sets.

    `clock` gives seconds that never go back. A copy made by pickling has the same bounds, and is empty. An entry larger than a bound is not
    cached.
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
                _check_bound(name, bound)
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
        """Become empty: a thread of the parent may have held the lock, with entries half changed."""
        self._lock = threading.RLock()
        self._metrics = CacheMetricGroup()
        self._now_s = -math.inf
        self._purge_at_s = -math.inf
        self._entries: Entries | None = None
        self._log = AccessLog(self._access_s is not None)

    @staticmethod
    def new_builder() -> DefaultLookupCacheBuilder:
        """A builder of a cache."""
        return DefaultLookupCacheBuilder()

    @classmethod
    def from_options(cls, options: LookupOptions, clock: Callable[[], float] = _CLOCK.steady_s) -> DefaultLookupCache:
        """The cache that `lookup.partial-cache.*` describe. Raises OptionError unless lookup.cache is PARTIAL."""
        if options.cache.mode is not CacheMode.PARTIAL:
            raise OptionError(f"option lookup.cache = {options.cache.mode.value!r} should be 'PARTIAL'")
        return cls(**options.partial_cache.parameters, clock=clock)

    @property
    def config(self) -> dict[str, Any]:
        """The bounds, by the names of this class's parameters; None: no such bound."""
        return dict(self._config)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DefaultLookupCache) and self._config == other._config

    def __hash__(self) -> int:
        return hash(tuple(self._config.values()))

    def __repr__(self) -> str:
        bounds = ", ".join(f"{name}={value!r}" for name, value in self._config.items() if value is not None)
        return f"DefaultLookupCache({bounds})"

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(DefaultLookupCache, **self._config), ()

    # --- the five operations ----------------------------------------------------------------------

    def open(self, metrics: CacheMetricGroup) -> None:
        with self._lock:
            self._metrics = metrics
            self._set_gauges()

    def get_many(self, keys: pa.Table) -> CachedRows:
        return self._get(keys, access=True)

    def peek_many(self, keys: pa.Table) -> CachedRows:
        return self._get(keys, access=False)

    def _get(self, keys: pa.Table, access: bool) -> CachedRows:
        with self._lock:
            entries = self._entries
            if entries is None:
                requested_keys = Keys([one_array(column) for column in keys.columns])
                entry_numbers = np.full(requested_keys.rows, -1, np.int64)
            else:
                requested_keys = Keys(cast_keys(keys, entries.key_fields))
                entry_numbers = self._live(entries, requested_keys, self._time())
            present = entry_numbers >= 0
            hits = np.flatnonzero(present)
            hit_entries = entry_numbers if len(hits) == len(entry_numbers) else entry_numbers[hits]
            if access:
                valid_count = (
                    requested_keys.rows if requested_keys.valid is None else int(np.count_nonzero(requested_keys.valid))
                )
                self._metrics.inc("hitCount", len(hits))
                self._metrics.inc("missCount", valid_count - len(hits))
                if entries is not None and len(hit_entries):
                    entries.touch(hit_entries, self._log.add(hit_entries, self._now_s))
                    self._log.trim(entries.live, entries.latest_accesses)
            if entries is None:
                return CachedRows(present, None)
            columns, (places, rows), fields = entries.columns(), entries.locate_rows(hit_entries), entries.row_fields
            if not fields and not entries.has_rows:
                return CachedRows(present, None)
        # Outside the lock: these arrays never change, because columns grow only at their end.
        indices = as_indices(rows)
        arrays = [
            cast_column(pc.take(column, indices, boundscheck=False), field.type, field.name, "")
            for column, field in zip(columns, fields, strict=True)
        ]
        numbers = as_indices(hits[places])
        schema = pa.schema([*fields, pa.field(KEY_INDEX, pa.int64())])
        return CachedRows(present, pa.Table.from_arrays([*arrays, numbers], schema=schema))

    def _live(self, entries: Entries, keys: Keys, now_s: float) -> Numbers:
        """The number of each key's entry; -1 where there is none, or it has expired."""
        entry_numbers = entries.find(keys, keys.hashes(self._seed))
        if self._access_s is None and self._write_s is None:
            return entry_numbers
        hits = np.flatnonzero(entry_numbers >= 0)
        expired = np.zeros(len(hits), np.bool_)
        if self._access_s is not None:
            expired |= entries.latest_accesses(entry_numbers[hits]) < self._log.find_first_later(now_s - self._access_s)
        if self._write_s is not None:
            expired |= entries.written_s(entry_numbers[hits]) <= now_s - self._write_s
        entry_numbers[hits[expired]] = -1
        return entry_numbers

    def put_many(self, keys: pa.Table, rows: pa.Table, ages_s: Numbers | None = None) -> None:
        with self._lock:
            entries, fields = self._open(keys, rows)
            put_keys = Keys(cast_keys(keys, entries.key_fields))
            if put_keys.valid is not None:
                row = int(np.flatnonzero(~put_keys.valid)[0])
                raise ValueError(
                    f"key {keys.slice(row, 1).to_pylist()[0]} has a null: such a key matches no rows, so nothing can be cached for it"
                )
            columns, counts = _group(rows, fields, put_keys.rows)
            self._entries = entries
            if fields and not entries.row_fields:
                entries.adopt(fields)
            if not self._missing and not counts.all():
                keys_with_rows = as_indices(np.flatnonzero(counts))
                put_keys = Keys([column.array.take(keys_with_rows) for column in put_keys.columns])
                ages_s = None if ages_s is None else ages_s[counts > 0]
                counts = counts[counts > 0]
            if not put_keys.rows:
                return
            now_s = self._time()
            written_s = np.full(put_keys.rows, now_s) if ages_s is None else now_s - ages_s
            entry_numbers = entries.put(put_keys, put_keys.hashes(self._seed), columns, counts, written_s)
            alive = entry_numbers[entries.latest_accesses(entry_numbers) >= 0]
            entries.touch(alive, self._log.add(alive, now_s))
            weights, sizes = entries.weights(slice(int(entry_numbers[0]), None))
            too_large = (weights > self._max_rows) | (sizes > self._max_bytes)
            if too_large.any():
                entries.remove(
                    np.setdiff1d(entry_numbers[too_large], entry_numbers[entries.latest_accesses(entry_numbers) < 0])
                )
            self._purge(entries, now_s)
            self._evict(entries)
            self._compact(entries)
            self._set_gauges()

    def invalidate_many(self, keys: pa.Table) -> None:
        with self._lock:
            entries = self._entries
            if entries is not None:
                dropped_keys = Keys(cast_keys(keys, entries.key_fields))
                entry_numbers = entries.find(dropped_keys, dropped_keys.hashes(self._seed))
                entries.remove(np.unique(entry_numbers[entry_numbers >= 0]))
                self._compact(entries)
                self._set_gauges()

    def size(self) -> int:
        with self._lock:
            if self._entries is not None:
                self._purge(self._entries, self._time(), at_once=True)
                self._set_gauges()
            return 0 if self._entries is None else self._entries.live_rows

    def bytes(self) -> int:
        with self._lock:
            return 0 if self._entries is None else self._entries.live_bytes

    def close(self) -> None:
        with self._lock:
            self._entries = None
            self._log = AccessLog(self._access_s is not None)
            self._set_gauges()

    # --- within the bounds ------------------------------------------------------------------------

    def _time(self) -> float:
        """The time now, which is never before that of an earlier call."""
        self._now_s = max(self._now_s, self._clock())
        return self._now_s

    def _open(self, keys: pa.Table, rows: pa.Table) -> tuple[Entries, Sequence[pa.Field]]:
        """The entries for these keys and rows, and their columns. The first keys and the first rows determine the types."""
        fields = [pa.field(f.name, spark_type(f.type)) for f in rows.schema if f.name != KEY_INDEX]
        entries = self._entries
        if entries is None:
            key_fields = [pa.field(field.name, spark_type(field.type)) for field in keys.schema]
            check_key_types(key_fields)
            return Entries(key_fields, []), fields
        return entries, entries.row_fields if entries.row_fields or entries.has_rows else fields

    def _purge(self, entries: Entries, now_s: float, at_once: bool = False) -> None:
        """Remove expired entries: by access in every call, by age only now and then, or if `at_once`."""
        if self._access_s is not None:
            expired = self._log.pop_earlier(self._log.find_first_later(now_s - self._access_s), entries.latest_accesses)
            entries.remove(expired)
        if self._write_s is not None and (at_once or now_s >= self._purge_at_s):
            entries.remove(entries.find_expired(now_s - self._write_s))
            self._purge_at_s = now_s + self._write_s / _PURGES

    def _evict(self, entries: Entries) -> None:
        if self._write_s is not None and (entries.live_rows > self._max_rows or entries.live_bytes > self._max_bytes):
            self._purge(entries, self._now_s, at_once=True)
        rows, size = entries.live_rows - self._max_rows, entries.live_bytes - self._max_bytes
        if rows <= 0 and size <= 0:
            return

        def enough(entry_numbers: Numbers) -> int | None:
            nonlocal rows, size
            weights, sizes = entries.weights(entry_numbers)
            weights, sizes = np.cumsum(weights), np.cumsum(sizes)
            count = max(int(np.searchsorted(weights, rows)), int(np.searchsorted(sizes, size))) + 1
            if count > len(entry_numbers):
                if len(entry_numbers):
                    rows, size = rows - int(weights[-1]), size - int(sizes[-1])
                return None
            return count

        entries.remove(self._log.pop_oldest(entries.latest_accesses, enough))

    def _compact(self, entries: Entries) -> None:
        dead_entries, dead_bytes = len(entries) - entries.live, entries.all_bytes - entries.live_bytes
        if dead_entries > max(entries.live, _GARBAGE_ROWS) or dead_bytes > max(entries.live_bytes, _GARBAGE_BYTES):
            self._entries, numbers_there = entries.compact()
            self._log.renumber(numbers_there, self._entries.latest_accesses)

    def _set_gauges(self) -> None:
        entries = self._entries
        self._metrics.set_gauge("numCachedRecords", 0 if entries is None else entries.live_rows)
        self._metrics.set_gauge("numCachedBytes", 0 if entries is None else entries.live_bytes)


def _group(rows: pa.Table, fields: Sequence[pa.Field], keys: int) -> tuple[list[pa.Array], Numbers]:
    """The columns of `rows` in the order of their keys, and the number of rows of each of the `keys` keys."""
    if not rows.num_rows:
        return [pa.array([], field.type) for field in fields], np.zeros(keys, np.int64)
    if KEY_INDEX not in rows.column_names:
        raise SchemaError(f"rows have no column {KEY_INDEX}, the number of each row's key")
    missing_columns = [field.name for field in fields if field.name not in rows.column_names]
    if missing_columns or len(fields) + 1 != rows.num_columns:
        names = [name for name in rows.column_names if name != KEY_INDEX]
        raise SchemaError(
            f"rows have the columns {', '.join(names)}; this cache holds {', '.join(f.name for f in fields)}"
        )
    indices = one_array(rows.column(KEY_INDEX)).cast(pa.int64())
    numbers = np.frombuffer(indices.buffers()[1], np.int64, indices.offset + len(indices))[indices.offset :]
    if indices.null_count or int(numbers.min()) < 0 or int(numbers.max()) >= keys:
        raise ValueError(
            f"column {KEY_INDEX} must have the number of one of the {keys} keys, counted from 0, for each row"
        )
    for field in fields:
        if not widens(spark_type(rows.schema.field(field.name).type, pa.null()), field.type):
            row_type = rows.schema.field(field.name).type
            raise SchemaError(f"rows have column {field.name!r} as {row_type}, this cache holds {field.type}")
    columns = [cast_column(one_array(rows.column(field.name)), field.type, field.name, "rows") for field in fields]
    if (numbers[1:] < numbers[:-1]).any():
        order = as_indices(np.argsort(numbers, kind="stable"))
        columns = [column.take(order) for column in columns]
    return columns, np.bincount(numbers, minlength=keys)
