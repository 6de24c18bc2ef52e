"""One segment of a host's rows by key, and what the rows that it holds are bounded and judged by."""

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
    """What a host holds of one table at most. Rows of a key that has none count as one."""

    rows: float
    bytes: float
    expire_after_access_s: float | None
    expire_after_write_s: float | None
    missing_keys: bool


@dataclasses.dataclass(frozen=True)
class Freshness:
    """Which version a lookup answers from.

    `schema`: the columns of its rows. `may_differ(version, keys)`: for each key whether its rows may be
    others in that version (None: of all keys). `latest()`: whether no later version is known on this host.
    """

    version: str
    schema: pa.Schema
    may_differ: Callable[[str, Sequence[pa.Array]], Numbers | None]
    latest: Callable[[], bool] = lambda: True


@dataclasses.dataclass(frozen=True)
class SharedRows:
    """What the host holds of some keys: `present` and `ages_s` (since the load) per key, `rows` by `KEY_INDEX`."""

    present: Numbers
    rows: pa.Table
    ages_s: Numbers


@dataclasses.dataclass(frozen=True)
class HostSegment:
    """One segment, open. `used`: the ms of the latest use of each key, by its number (0: none since the load)."""

    name: str
    segment: Segment
    version: str
    this_boot: bool
    members: frozenset[str]
    found: Numbers
    loaded_s: Numbers  # -inf: nobody knows
    used: Numbers

    def is_before(self, rows: Numbers, limits_s: Numbers) -> Numbers:
        """Which rows were not loaded after a time on this boot's clock, one for each; after NaN all were."""
        if not self.this_boot:
            return ~np.isnan(limits_s)
        return np.asarray(self.loaded_s[rows] <= limits_s)

    def touch(self, rows: Numbers, now_ms: int) -> None:
        """Say that the keys of these rows are in use."""
        self.used[self.segment.key_numbers(rows)] = now_ms

    def used_ms(self, rows: Numbers, now_ms: int) -> Numbers:
        """When the key of each row was last used; as nothing protects these numbers, none is believed that cannot be."""
        if not self.this_boot:
            return np.full(len(rows), _LONG_AGO_MS)
        loaded = self.loaded_s[rows]
        loaded_ms = (np.where(np.isfinite(loaded), loaded, _LONG_AGO_MS / MS) * MS).astype(np.int64)
        used = self.used[self.segment.key_numbers(rows)]
        # Others use it while this one is being looked at.
        return np.where((used > loaded_ms) & (used <= now_ms + _AHEAD_MS), used, loaded_ms)
