"""`LookupCache`: keys to rows, in batches (FLIP-221).

The FLIP's five operations, `open`, `get_if_present`, `put`, `invalidate` and `size`, and `close`. The
first four take one key; their `_many` forms take a table of keys and move whole columns.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from pyspark_lookup.base.metrics import CacheMetricGroup
from pyspark_lookup.columnar.key_rows import KEY_INDEX
from pyspark_lookup.columnar.keys import Numbers

Key = Mapping[str, Any]  # key column -> value
Row = Mapping[str, Any]  # column -> value


@dataclasses.dataclass(frozen=True)
class CachedRows:
    """What a cache has for some keys.

    `present`: bool per key, True also for a key that is known to have no rows. `rows`: the rows of those
    keys, with `KEY_INDEX` as their last column, ascending; rows of one key in the order in which they were put.
    None: the cache was never given a row, so it does not know their columns.
    """

    present: Numbers
    rows: pa.Table | None


class LookupCache(abc.ABC):
    """Rows by key. What an implementation promises:

    - Every operation may be called from any thread, also at the same time.
    - A key that was put with no rows is present and has none: that is a hit.
    - An entry whose age reaches its time to live is gone at that moment. Reading an entry restarts the time since
      its last access, only putting it restarts the time since it was written.
    - `put` replaces all rows of a key. Two keys are one as `pyspark_lookup.columnar.keys` says: NaN is NaN, -0.0 is 0.0.
    - Rows come back as they were put: later changes of what was passed in do not show.
    - Key tables have the same columns (in name, order and type) in all calls, and so have row tables.
    """

    @abc.abstractmethod
    def open(self, metrics: CacheMetricGroup) -> None:
        """Begin to count hits and misses into `metrics`. Called before use, and again by each further user."""

    @abc.abstractmethod
    def get_many(self, keys: pa.Table) -> CachedRows:
        """The rows of those of `keys` that are present. Counts a hit or a miss per key; one with a null is neither, and absent."""

    @abc.abstractmethod
    def peek_many(self, keys: pa.Table) -> CachedRows:
        """As `get_many`, but counts nothing and is no access."""

    @abc.abstractmethod
    def put_many(self, keys: pa.Table, rows: pa.Table, ages_s: Numbers | None = None) -> None:
        """Keep `rows` (with the column `KEY_INDEX`) for `keys`; a key without a row is kept as having none.

        `ages_s`: seconds since each key was loaded (None: now). Of a key that comes twice the later one counts.
        Raises ValueError for a key with a null, or rows without a key.
        """

    @abc.abstractmethod
    def invalidate_many(self, keys: pa.Table) -> None:
        """Forget those keys. Counts nothing."""

    @abc.abstractmethod
    def size(self) -> int:
        """How much is held, in the unit of the cache's bound: for `DefaultLookupCache` rows, of which a key without any is one."""

    @abc.abstractmethod
    def bytes(self) -> int:
        """Bytes of what is held."""

    @abc.abstractmethod
    def close(self) -> None:
        """Forget everything. Safe when never opened, and twice; `open` begins anew."""

    # --- one key at a time ------------------------------------------------------------------------

    def get_if_present(self, key: Key) -> list[dict[str, Any]] | None:
        """The rows of a key, [] if it is known to have none; None if the cache does not know."""
        return _rows_of(self.get_many(_one(key)))

    def put(self, key: Key, rows: Sequence[Row]) -> list[dict[str, Any]] | None:
        """Keep rows for a key; those that it had before, None if it was not there.

        Raises ValueError for a null key or if `rows` is None.
        """
        if rows is None:
            raise ValueError(f"null value for key {key!r}: a key without rows has []")
        asked = _one(key)
        before = self.peek_many(asked)
        names = dict.fromkeys(name for row in rows for name in row)
        table = pa.table({name: [row.get(name) for row in rows] for name in names})
        self.put_many(asked, table.append_column(KEY_INDEX, pa.array([0] * len(rows), pa.int64())))
        return _rows_of(before)

    def invalidate(self, key: Key) -> None:
        """Forget a key."""
        self.invalidate_many(_one(key))


def _one(key: Key) -> pa.Table:
    return pa.table({name: [value] for name, value in key.items()})


def _rows_of(found: CachedRows) -> list[dict[str, Any]] | None:
    if not found.present[0]:
        return None
    rows: list[dict[str, Any]] = [] if found.rows is None else found.rows.drop_columns([KEY_INDEX]).to_pylist()
    return rows
