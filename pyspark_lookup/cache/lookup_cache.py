"""`LookupCache`: rows by key, in batches (FLIP-221).

It has the FLIP's operations `open`, `get_if_present`, `put`, `invalidate` and `size`, and `close`. `get_if_present`, `put` and `invalidate`
take one key; their `_many` forms take a table of keys and move whole columns. Implement the `_many` forms in a subclass of `LookupCache`,
or those for one key in a subclass of `KeyLookupCache`.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pyspark_lookup.columnar.keys import KEY_INDEX, Numbers
from pyspark_lookup.columnar.python_values import table_of_rows
from pyspark_lookup.core.metrics import UNSET, CacheMetricGroup

Key = Mapping[str, Any]  # key column -> value
Row = Mapping[str, Any]  # column -> value


@dataclasses.dataclass(frozen=True)
class CachedRows:
    """The cached rows of some keys.

    `present`: bool per key, also True for a key that is known to have no rows. `rows`: the rows of these keys, with `KEY_INDEX` as their
    last column, ascending; rows of one key in the order in which they were put. None: the cache was never given a row, so it does not know
    their columns.
    """

    present: Numbers
    rows: pa.Table | None


class LookupCache(abc.ABC):
    """A cache of rows by key. Every implementation promises:

    - Every operation may be called from any thread, also at the same time.
    - A key that was put with no rows is present and has none: that is a hit.
    - An entry whose age reaches its time to live is gone at that moment. Reading or putting an entry restarts the time since
      its last access; only putting restarts the time since it was written.
    - `put` replaces all rows of a key. Keys are compared as in `pyspark_lookup.columnar.keys`: NaN equals NaN, -0.0 equals 0.0.
    - Rows come back as they were put: later changes of what was passed in do not show.
    - Key tables have the same columns (in name, order and type) in all calls, and so have row tables.
    """

    @abc.abstractmethod
    def open(self, metrics: CacheMetricGroup) -> None:
        """Begin to count hits and misses into `metrics`. Called before use, and again by each further user.

        A provider's own cache gets the table's live metrics. In these, lookups already count hits and misses, so those that the cache counts
        are ignored.
        """

    @abc.abstractmethod
    def get_many(self, keys: pa.Table) -> CachedRows:
        """The rows of those of `keys` that are present. Counts a hit or a miss per key; a key with a null counts as neither, and is absent."""

    @abc.abstractmethod
    def peek_many(self, keys: pa.Table) -> CachedRows:
        """Like `get_many`, but counts nothing and is not an access."""

    @abc.abstractmethod
    def put_many(self, keys: pa.Table, rows: pa.Table, ages_s: Numbers | None = None) -> None:
        """Cache `rows` (with the column `KEY_INDEX`) for `keys`; a key without a row is cached as having none.

        `ages_s`: seconds since each key was loaded (None: now). If a key comes twice, the later one counts. Raises ValueError for a key
        with a null, or rows without a key.
        """

    @abc.abstractmethod
    def invalidate_many(self, keys: pa.Table) -> None:
        """Drop these keys. Counts nothing."""

    @abc.abstractmethod
    def size(self) -> int:
        """The size of the cache, in the unit of its bound: for `DefaultLookupCache` rows, where a key without rows counts as one."""

    @abc.abstractmethod
    def bytes(self) -> int:
        """Bytes of the cached rows."""

    @abc.abstractmethod
    def close(self) -> None:
        """Drop everything. It may be called before `open`, and twice; `open` may follow."""

    # --- one key at a time ------------------------------------------------------------------------

    def get_if_present(self, key: Key) -> list[dict[str, Any]] | None:
        """The rows of a key, [] if it is known to have none; None if the cache has no answer."""
        return _to_rows(self.get_many(_key_table(key)))

    def put(self, key: Key, rows: Sequence[Row]) -> list[dict[str, Any]] | None:
        """Cache rows for a key. Returns its former rows, None if it was not present.

        Raises ValueError for a null key or if `rows` is None.
        """
        if rows is None:
            raise ValueError(f"null value for key {key!r}: give [] for a key without rows")
        key_table = _key_table(key)
        before = self.peek_many(key_table)
        names = dict.fromkeys(name for row in rows for name in row)
        table = pa.table({name: [row.get(name) for row in rows] for name in names})
        self.put_many(key_table, table.append_column(KEY_INDEX, pa.array([0] * len(rows), pa.int64())))
        return _to_rows(before)

    def invalidate(self, key: Key) -> None:
        """Drop a key."""
        self.invalidate_many(_key_table(key))


class KeyLookupCache(LookupCache):
    """A cache of one key at a time, as in FLIP-221: implement `get_if_present`, `put`, `invalidate`, `size` and `close`.

    These functions get keys without nulls, as Python values (so without dates before the year 1). The tuple of a key's values can be used in
    a dictionary: NaN is always `math.nan`, and no zero is negative. Rows come without the key columns, which the caller adds. If several
    processes share the cache, all rows in it must have the same columns.
    """

    _schema: pa.Schema | None = None  # of the rows that were last put

    def open(self, metrics: CacheMetricGroup) -> None:  # lookups count, so `metrics` is not needed
        """Like `LookupCache.open`."""

    @abc.abstractmethod
    def get_if_present(self, key: Key) -> list[dict[str, Any]] | None:
        """The rows of a key, [] if it is known to have none; None if the cache has no answer."""

    def peek(self, key: Key) -> list[dict[str, Any]] | None:
        """Like `get_if_present`, but not an access. Override it in a cache that counts accesses."""
        return self.get_if_present(key)

    @abc.abstractmethod
    def put(self, key: Key, rows: Sequence[Row]) -> list[dict[str, Any]] | None:
        """Cache rows for a key in place of its former rows, which may be returned."""

    @abc.abstractmethod
    def invalidate(self, key: Key) -> None:
        """Drop a key."""

    def bytes(self) -> int:
        """Bytes of the cached rows; -1 if unknown."""
        return UNSET

    def get_many(self, keys: pa.Table) -> CachedRows:
        return self._look_up_each(keys, self.get_if_present)

    def peek_many(self, keys: pa.Table) -> CachedRows:
        return self._look_up_each(keys, self.peek)

    def _look_up_each(self, keys: pa.Table, ask: Callable[[Key], list[dict[str, Any]] | None]) -> CachedRows:
        present, rows, numbers = np.zeros(keys.num_rows, np.bool_), list[Row](), list[int]()
        for number, key in enumerate(_canonical_keys(keys)):
            key_rows = ask(key) if None not in key.values() else None
            if key_rows is not None:
                present[number] = True
                rows += key_rows
                numbers += [number] * len(key_rows)
        if self._schema is None and not rows:
            return CachedRows(present, None)
        table = pa.Table.from_pylist(rows) if self._schema is None else table_of_rows(rows, self._schema)
        return CachedRows(present, table.append_column(KEY_INDEX, pa.array(numbers, pa.int64())))

    def put_many(self, keys: pa.Table, rows: pa.Table, ages_s: Numbers | None = None) -> None:
        self._schema = pa.schema([field for field in rows.schema if field.name != KEY_INDEX])
        lists: list[list[Row]] = [[] for _ in range(keys.num_rows)]
        for row in rows.to_pylist():
            lists[row.pop(KEY_INDEX)].append(row)
        for key, key_rows in zip(_canonical_keys(keys), lists, strict=True):
            if None in key.values():
                raise ValueError(f"key {key!r} has a null: such a key matches no rows, so nothing can be cached for it")
            self.put(key, key_rows)

    def invalidate_many(self, keys: pa.Table) -> None:
        for key in _canonical_keys(keys):
            self.invalidate(key)


def _canonical_keys(keys: pa.Table) -> Iterator[Key]:
    """The keys one by one. Equal floats have the same form: `math.nan` for NaN, 0.0 for -0.0."""
    for key in keys.to_pylist():
        yield {name: _plain(value) if isinstance(value, float) else value for name, value in key.items()}


def _plain(value: float) -> float:
    return math.nan if math.isnan(value) else value + 0.0


def _key_table(key: Key) -> pa.Table:
    return pa.table({name: [value] for name, value in key.items()})


def _to_rows(cached_rows: CachedRows) -> list[dict[str, Any]] | None:
    if not cached_rows.present[0]:
        return None
    rows: list[dict[str, Any]] = (
        [] if cached_rows.rows is None else cached_rows.rows.drop_columns([KEY_INDEX]).to_pylist()
    )
    return rows
