"""`LookupCache`: a cache of rows by key.

It has the operations of FLIP-221: `open`, `get_if_present`, `put`, `invalidate`, `size` and `close`. `get_if_present`, `put` and `invalidate`
take one key. `get_many`, `put_many` and `invalidate_many` take a table of keys, and move whole columns. A subclass of `LookupCache` implements
the functions for many keys, a subclass of `KeyLookupCache` those for one key.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from pyspark_lookup.columnar.keys import KEY_INDEX, Numbers
from pyspark_lookup.columnar.python_values import as_python, table_of_rows
from pyspark_lookup.core.metrics import UNSET, CacheMetricGroup

Key = Mapping[str, Any]  # key column -> value
Row = Mapping[str, Any]  # column -> value


@dataclasses.dataclass(frozen=True)
class CachedRows:
    """The cached rows of some keys.

    `present`: for each key, whether the cache knows its rows; True also for a key that is known to have no rows. `rows`: the rows of the keys
    that are present, with `KEY_INDEX` as the last column, ascending; rows of one key in the order in which they were put. None: no row was
    ever put, so the cache does not know the columns of rows.
    """

    present: Numbers
    rows: pa.Table | None


@dataclasses.dataclass(frozen=True)
class EntryRules:
    """Which entries of a persistent cache may answer now.

    `version`: the name of the table's current version; rows that are put now belong to it. `columns`: those of the rows (None: those of the
    first rows that are put). `may_differ(version, keys)`: for each key, whether its rows in another version may differ from those in the current
    one; None: those of any key may. `limits(keys)`: for each key, the time (steady clock) until which loads of it do not count; NaN: each load
    counts; None: each load of each key does.
    """

    version: str
    columns: pa.Schema | None = None
    may_differ: Callable[[str, Sequence[pa.Array]], Numbers | None] = lambda version, keys: None
    limits: Callable[[Sequence[pa.Array]], Numbers | None] = lambda keys: None


class LookupCache(abc.ABC):
    """A cache of rows by key. Each implementation promises:

    - Any thread may call any operation, also while another thread calls one.
    - A key that was put without rows is present: a lookup of it is a hit, and returns no rows.
    - An entry whose age reaches its time to live is gone at that moment. Reading or putting an entry restarts the time since
      its last access; only putting restarts the time since it was written.
    - `put` replaces all rows of a key. Keys are compared as in Spark's joins: NaN equals NaN, -0.0 equals 0.0.
    - Rows are returned as they were put. If the caller changes the lists or arrays afterwards, this does not show.

    Callers promise that all tables of keys have the same columns, in name, order and type, and so do all tables of rows.

    `persistent`: whether entries outlive `close`, and other processes may share them. Callers then call `use` after `open`, and whenever the
    version changes; they call `invalidate_many` for other caches only.
    """

    persistent: ClassVar[bool] = False

    @abc.abstractmethod
    def open(self, metrics: CacheMetricGroup) -> None:
        """Begin to count hits and misses in `metrics`. Each user of the cache calls this before using it.

        A provider's own cache gets the metrics of the table. Lookups already count hits and misses there, so the metrics ignore the hits and
        misses that such a cache counts.
        """

    def use(self, rules: EntryRules) -> None:  # noqa: B027 # only persistent caches need it
        """Answer with the entries that `rules` allow from now on. Does nothing in a cache that is not persistent: it has no other entries."""

    @abc.abstractmethod
    def get_many(self, keys: pa.Table) -> CachedRows:
        """The cached rows of `keys`. Counts a hit or a miss for each key. A key with a null is never present, and counts as neither."""

    @abc.abstractmethod
    def peek_many(self, keys: pa.Table) -> CachedRows:
        """The same rows as `get_many`, but counts no hits and misses, and does not count as an access."""

    @abc.abstractmethod
    def put_many(self, keys: pa.Table, rows: pa.Table, ages_s: Numbers | None = None) -> None:
        """Cache `rows` (with the column `KEY_INDEX`) for `keys`. A key without rows is cached as a key that has no rows.

        `ages_s`: for each key, the seconds since it was loaded (None: all were loaded now). If a key occurs twice, the second occurrence
        counts. Raises ValueError for a key with a null, and for rows whose `KEY_INDEX` names no key.
        """

    @abc.abstractmethod
    def invalidate_many(self, keys: pa.Table) -> None:
        """Drop these keys. Counts no hits or misses."""

    @abc.abstractmethod
    def size(self) -> int:
        """The size of the cache, in the unit in which it is bounded. For `DefaultLookupCache`: rows; a key without rows counts as one row."""

    @abc.abstractmethod
    def bytes(self) -> int:
        """The number of bytes that the cached rows take."""

    @abc.abstractmethod
    def close(self) -> None:
        """Drop all entries, unless the cache is persistent. May be called before `open`, and several times; afterwards `open` may be called again."""

    # --- one key at a time ------------------------------------------------------------------------

    def get_if_present(self, key: Key) -> list[dict[str, Any]] | None:
        """The cached rows of a key; [] if the key is known to have no rows, None if the cache does not know."""
        return _to_rows(self.get_many(_key_table(key)))

    def put(self, key: Key, rows: Sequence[Row]) -> list[dict[str, Any]] | None:
        """Cache rows for a key. Returns the rows that were cached for it before; None if there were none.

        Raises ValueError for a key with a null, and if `rows` is None.
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
    """A cache that is asked for one key at a time, as in FLIP-221: implement `get_if_present`, `put`, `invalidate`, `size` and `close`.

    Keys are Python values without nulls. The tuple of a key's values can be the key of a dictionary: NaN is always `math.nan`, and no zero is
    negative. Rows do not have the key columns, which the caller adds. The cache is never asked for a key, and never gets a key or a row, with a
    value that no Python type can hold, such as a date before the year 1: such a key is a miss. If several processes share the cache, all rows in
    it must have the same columns.
    """

    _schema: pa.Schema | None = None  # the columns of the rows that were put last

    def open(self, metrics: CacheMetricGroup) -> None:
        """Does nothing: lookups count hits and misses themselves, so `metrics` is not needed."""

    @abc.abstractmethod
    def get_if_present(self, key: Key) -> list[dict[str, Any]] | None:
        """The cached rows of a key; [] if the key is known to have no rows, None if the cache does not know."""

    def peek(self, key: Key) -> list[dict[str, Any]] | None:
        """Returns what `get_if_present` returns, but does not count as an access. Override this method in a cache that counts accesses."""
        return self.get_if_present(key)

    @abc.abstractmethod
    def put(self, key: Key, rows: Sequence[Row]) -> list[dict[str, Any]] | None:
        """Cache rows for a key in place of its cached rows. May return the replaced rows."""

    @abc.abstractmethod
    def invalidate(self, key: Key) -> None:
        """Drop a key."""

    def bytes(self) -> int:
        """The number of bytes that the cached rows take; -1 if it is not known."""
        return UNSET

    def get_many(self, keys: pa.Table) -> CachedRows:
        return self._look_up_each(keys, self.get_if_present)

    def peek_many(self, keys: pa.Table) -> CachedRows:
        return self._look_up_each(keys, self.peek)

    def _look_up_each(self, keys: pa.Table, ask: Callable[[Key], list[dict[str, Any]] | None]) -> CachedRows:
        present, rows, numbers = np.zeros(keys.num_rows, np.bool_), list[Row](), list[int]()
        for number, key in enumerate(_canonical_keys(keys)):
            key_rows = None if key is None or None in key.values() else ask(key)
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
        lists: list[list[Row] | None] = [[] for _ in range(keys.num_rows)]
        for number, row in zip(rows[KEY_INDEX].to_pylist(), _to_python(rows), strict=True):
            key_rows = lists[number]
            if row is None:
                lists[number] = None
            elif key_rows is not None:
                del row[KEY_INDEX]
                key_rows.append(row)
        for key, key_rows in zip(_canonical_keys(keys), lists, strict=True):
            if key is None:
                continue
            if None in key.values():
                raise ValueError(f"key {key!r} has a null: such a key matches no rows, so nothing can be cached for it")
            if key_rows is None:
                self.invalidate(key)
            else:
                self.put(key, key_rows)

    def invalidate_many(self, keys: pa.Table) -> None:
        for key in _canonical_keys(keys):
            if key is not None and None not in key.values():
                self.invalidate(key)


def _canonical_keys(keys: pa.Table) -> Iterator[Key | None]:
    """The keys, one at a time; None for a key that no Python type can hold. Equal floats become the same object or value: each NaN is
    `math.nan`, and -0.0 is 0.0."""
    for key in _to_python(keys):
        yield (
            None
            if key is None
            else {name: _plain(value) if isinstance(value, float) else value for name, value in key.items()}
        )


def _to_python(table: pa.Table) -> list[dict[str, Any] | None]:
    """The rows as dictionaries; None for a row with a value that no Python type can hold."""
    try:
        dictionaries: list[dict[str, Any] | None] = table.to_pylist()
        return dictionaries
    except (OverflowError, ValueError):
        if table.num_rows == 1:
            return [None]
        return [row for number in range(table.num_rows) for row in _to_python(table.slice(number, 1))]


def _plain(value: float) -> float:
    return math.nan if math.isnan(value) else value + 0.0


def _key_table(key: Key) -> pa.Table:
    return pa.table({name: [value] for name, value in key.items()})


def _to_rows(cached_rows: CachedRows) -> list[dict[str, Any]] | None:
    if not cached_rows.present[0]:
        return None
    return [] if cached_rows.rows is None else as_python(cached_rows.rows.drop_columns([KEY_INDEX]))
