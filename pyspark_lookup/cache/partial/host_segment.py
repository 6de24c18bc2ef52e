"""One segment of a host's rows by key, the cache's bounds, and the version from which a lookup wants rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from pyspark_lookup.cache.segments.segment import Segment
from pyspark_lookup.columnar.keys import Numbers

MS = 1000.0
_AHEAD_MS = 60_000
_LONG_AGO_MS = -(2**50)


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The bounds of a host's cache of one table. A key without rows counts as one row."""

    rows: float
    bytes: float
    expire_after_access_s: float | None
    expire_after_write_s: float | None
    missing_keys: bool


@dataclasses.dataclass(frozen=True)
class Freshness:
    """The version from which a lookup wants rows.

    `schema`: the columns of the rows. `may_differ(version, keys)`: for each key whether its rows may be different in that version (None: of
    all keys). `latest()`: whether no later version is known on this host.
    """

    version: str
    schema: pa.Schema
    may_differ: Callable[[str, Sequence[pa.Array]], Numbers | None]
    latest: Callable[[], bool] = lambda: True


@dataclasses.dataclass(frozen=True)
class SharedRows:
    """The host's rows of some keys: `present` and `ages_s` (since the load) per key, `rows` with `KEY_INDEX`."""

    present: Numbers
    rows: pa.Table
    ages_s: Numbers


@dataclasses.dataclass(frozen=True)
class HostSegment:
    """One open segment. `latest_use_ms`: for each key, by its number, the ms of its latest use (0: none since the load)."""

    name: str
    segment: Segment
    version: str
    this_boot: bool
    members: frozenset[str]
    has_row: Numbers
    loaded_s: Numbers  # -inf: unknown
    latest_use_ms: Numbers

    def is_older(self, rows: Numbers, limits_s: Numbers) -> Numbers:
        """For each row whether it was loaded at its limit or earlier. Limits are on this boot's steady clock; NaN: no limit."""
        if not self.this_boot:
            return ~np.isnan(limits_s)
        return np.asarray(self.loaded_s[rows] <= limits_s)

    def touch(self, rows: Numbers, now_ms: int) -> None:
        """Record that the keys of these rows are in use."""
        self.latest_use_ms[self.segment.key_numbers(rows)] = now_ms

    def used_ms(self, rows: Numbers, now_ms: int) -> Numbers:
        """For each row when its key was last used, in ms. The file has no checksum: an impossible time is replaced by that of the load."""
        if not self.this_boot:
            return np.full(len(rows), _LONG_AGO_MS)
        loaded_s = self.loaded_s[rows]
        loaded_ms = (np.where(np.isfinite(loaded_s), loaded_s, _LONG_AGO_MS / MS) * MS).astype(np.int64)
        use_ms = self.latest_use_ms[self.segment.key_numbers(rows)]
        # The race: other processes write later times meanwhile, which count.
        return np.where((use_ms > loaded_ms) & (use_ms <= now_ms + _AHEAD_MS), use_ms, loaded_ms)
