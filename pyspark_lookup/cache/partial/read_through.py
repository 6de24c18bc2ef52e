"""`PartialCache`: a lookup through the caches, loading what they lack (FLIP-221's CachingLookupFunction).

A key is looked for in this process, then in what the processes of the host share, and then loaded, by
one of them at a time. Counters count keys: who waits for another's load has a hit; every key that is
loaded here is one miss, and one load or one failure.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from pyspark_lookup.base.metrics import CacheMetricGroup
from pyspark_lookup.cache.memory import CachedRows, LookupCache
from pyspark_lookup.cache.partial.host_cache import SharedCache
from pyspark_lookup.cache.partial.host_segment import Freshness
from pyspark_lookup.cache.partial.single_flight import Flights
from pyspark_lookup.columnar.key_rows import distinct_keys, key_numbers, merged_rows, no_rows, renumbered, rows_for
from pyspark_lookup.columnar.keys import Keys, Numbers, as_indices
from pyspark_lookup.io.context import HostContext

Load = Callable[[Sequence[pa.Array]], pa.Table]
"""The rows of some keys, all different and none null, ascending by the column `KEY_INDEX`."""

_TOUCH_EVERY_S = 1.0


class PartialCache:
    """Rows by key of one table (its keys and columns) as this process and its host hold them.

    `make_cache`: a cache for one version of the table; the one of another version is given up. It may be the
    same one, emptied: what threads do that still answer from the other version then passes it by.
    """

    def __init__(
        self,
        key_names: Sequence[str],
        make_cache: Callable[[], LookupCache],
        shared: SharedCache | None,
        flights: Flights,
        context: HostContext,
    ) -> None:
        self._names = list(key_names)
        self._make_cache = make_cache
        self._shared = shared
        self._flights = flights
        self._context = context
        self._lock = threading.Lock()
        self._cache: _OfVersion | None = None
        self._touched_s = context.clock.steady_s()

    def lookup(self, keys: Sequence[pa.Array], fresh: Freshness, load: Load) -> pa.Table:
        """The rows of all keys, by the column `KEY_INDEX`; keys may repeat, one with a null has no rows.

        Raises what `load` raises; what other keys' loads brought is kept.
        """
        asked = Keys(keys)
        known = asked.rows if asked.valid is None else int(np.count_nonzero(asked.valid))
        cache = self._cache_of(fresh)
        found = cache.get(self._table(keys))
        lacking = ~found.present if asked.valid is None else ~found.present & asked.valid
        rest = np.flatnonzero(lacking)
        loaded = _Loaded()
        try:
            parts = [no_rows(fresh.schema)] if found.rows is None else [found.rows]
            if len(rest):
                indices = as_indices(rest)
                parts.append(self._beyond([array.take(indices) for array in keys], rest, cache, fresh, load, loaded))
            elif self._shared is not None:
                self._touch(keys)
            return merged_rows(parts, fresh.schema)
        finally:
            self._context.metrics.inc("hitCount", known - loaded.keys)
            self._context.metrics.inc("missCount", loaded.keys)
            if len(rest):
                self._tell(cache)

    def held(self, keys: Sequence[pa.Array], fresh: Freshness) -> tuple[pa.Table, Numbers]:
        """The rows of those keys that this process or its host holds, by `KEY_INDEX`, and which keys these are."""
        asked = Keys(keys)
        cache = self._cache_of(fresh)
        found = cache.get(self._table(keys))
        parts = [no_rows(fresh.schema)] if found.rows is None else [found.rows]
        rest = np.flatnonzero(~found.present if asked.valid is None else ~found.present & asked.valid)
        present = found.present.copy()
        if len(rest) and self._shared is not None:
            hashes = asked.hashes(self._flights.seed)
            present[rest] = True
            present[self._from_shared(keys, hashes, rest, cache, fresh, parts)] = False
        self._context.metrics.inc("hitCount", int(np.count_nonzero(present)))
        return merged_rows(parts, fresh.schema), present

    def _beyond(
        self,
        keys: Sequence[pa.Array],
        numbers: Numbers,
        cache: _OfVersion,
        fresh: Freshness,
        load: Load,
        loaded: _Loaded,
    ) -> pa.Table:
        """The rows of keys that this process does not hold, `KEY_INDEX` being `numbers` of them."""
        asked = Keys(keys)
        chosen, places = distinct_keys(asked, asked.hashes(self._flights.seed))
        indices = as_indices(chosen)
        different = [array.take(indices) for array in keys]
        hashes = Keys(different).hashes(self._flights.seed)
        parts = [no_rows(fresh.schema)]
        left = self._from_shared(different, hashes, np.arange(len(chosen)), cache, fresh, parts)
        while len(left):
            with self._flights.claim(hashes[left], fresh.version) as flight:
                mine = left[flight.mine]
                # Once more, now that nobody else loads them: who did may have finished in between.
                mine = self._from_shared(different, hashes, mine, cache, fresh, parts)
                if len(mine):
                    parts.append(self._loaded(different, hashes, mine, cache, fresh, load, loaded))
            theirs = left[~flight.mine]
            flight.wait()
            left = self._from_shared(different, hashes, theirs, cache, fresh, parts)
        rows = rows_for(merged_rows(parts, fresh.schema), places)
        return renumbered(rows, numbers[key_numbers(rows)])

    def _from_shared(
        self,
        keys: Sequence[pa.Array],
        hashes: Numbers,
        wanted: Numbers,
        cache: _OfVersion,
        fresh: Freshness,
        parts: list[pa.Table],
    ) -> Numbers:
        """Adds the rows of those of the `wanted` keys that the host holds to `parts`; the others."""
        if not len(wanted):
            return wanted
        indices = as_indices(wanted)
        some = [array.take(indices) for array in keys]
        if self._shared is None:  # another thread may have loaded them
            held = cache.get(self._table(some), peek=True)
            if held.rows is not None:
                parts.append(renumbered(held.rows, wanted[key_numbers(held.rows)]))
            return wanted[~held.present]
        found = self._shared.get(some, hashes[wanted], fresh)
        if found is None:
            return wanted
        here = np.flatnonzero(found.present)
        if len(here):
            taken = [array.take(as_indices(here)) for array in some]
            places = np.cumsum(found.present) - 1
            cache.put(self._table(taken), renumbered(found.rows, places[key_numbers(found.rows)]), found.ages_s[here])
            parts.append(renumbered(found.rows, wanted[key_numbers(found.rows)]))
        return wanted[~found.present]

    def _loaded(
        self,
        keys: Sequence[pa.Array],
        hashes: Numbers,
        wanted: Numbers,
        cache: _OfVersion,
        fresh: Freshness,
        load: Load,
        loaded: _Loaded,
    ) -> pa.Table:
        indices = as_indices(wanted)
        some = [array.take(indices) for array in keys]
        started_s = self._context.clock.steady_s()
        loaded.keys += len(wanted)
        try:
            rows = load(some)
        except BaseException:
            self._context.metrics.inc("numLoadFailures", len(wanted))
            raise
        self._context.metrics.inc("loadCount", len(wanted))
        # As old as the moment before it was asked for.
        age_s = self._context.clock.steady_s() - started_s
        self._context.metrics.set_gauge("latestLoadTime", int(age_s * 1000))
        self._context.metrics.time("loadTime", age_s)
        cache.put(self._table(some), rows, np.full(len(wanted), age_s))
        if self._shared is not None:
            self._shared.put(some, hashes[wanted], rows, fresh, started_s)
        return renumbered(rows, wanted[key_numbers(rows)])

    def _touch(self, keys: Sequence[pa.Array]) -> None:
        """Tell the host now and then what is in use here, or it would give up what every process holds."""
        now_s = self._context.clock.steady_s()
        if now_s - self._touched_s >= _TOUCH_EVERY_S and self._shared is not None:
            self._touched_s = now_s
            self._shared.touch(keys, Keys(keys).hashes(self._flights.seed))

    def _table(self, keys: Sequence[pa.Array]) -> pa.Table:
        return pa.Table.from_arrays(list(keys), self._names)

    def _cache_of(self, fresh: Freshness) -> _OfVersion:
        with self._lock:
            if self._cache is None or not self._cache.holds(fresh):
                if self._cache is not None:
                    self._cache.give_up()
                self._cache = _OfVersion(fresh, self._make_cache())
            return self._cache

    def _tell(self, cache: _OfVersion) -> None:
        rows, size = cache.sizes() if self._shared is None else self._shared.sizes()
        self._context.metrics.set_gauge("numCachedRecords", rows)
        self._context.metrics.set_gauge("numCachedBytes", size)


class _OfVersion:
    """A cache for as long as it holds rows of one version; then it knows nothing and keeps nothing."""

    def __init__(self, fresh: Freshness, cache: LookupCache) -> None:
        self._fresh = fresh
        self._cache: LookupCache | None = cache
        self._lock = threading.Lock()
        # Counted elsewhere: what another level answers is a hit, too.
        cache.open(CacheMetricGroup())

    def holds(self, fresh: Freshness) -> bool:
        """Whether its rows are of this version, and have these columns."""
        return self._fresh.version == fresh.version and bool(self._fresh.schema.equals(fresh.schema))

    def get(self, keys: pa.Table, peek: bool = False) -> CachedRows:
        with self._lock:
            if self._cache is None:
                return CachedRows(np.zeros(keys.num_rows, np.bool_), None)
            return self._cache.peek_many(keys) if peek else self._cache.get_many(keys)

    def put(self, keys: pa.Table, rows: pa.Table, ages_s: Numbers) -> None:
        with self._lock:
            if self._cache is not None:
                self._cache.put_many(keys, rows, ages_s)

    def sizes(self) -> tuple[int, int]:
        with self._lock:
            return (0, 0) if self._cache is None else (self._cache.size(), self._cache.bytes())

    def give_up(self) -> None:
        with self._lock:
            assert self._cache is not None
            self._cache.close()
            self._cache = None


class _Loaded:
    keys = 0
