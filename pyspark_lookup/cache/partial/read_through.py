"""`PartialCache`: a lookup through the caches, loading what they lack (FLIP-221's CachingLookupFunction).

A key is looked for in this process, then in what the processes of the host share, and then loaded, by
one of them at a time. Counters count keys: who waits for another's load has a hit; every key that is
loaded here is one miss, and one load or one failure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from pyspark_lookup.base.errors import LookupFunctionError, SchemaError
from pyspark_lookup.base.metrics import UNSET, CacheMetricGroup, MetricsOfCache
from pyspark_lookup.cache.memory import CachedRows, DefaultLookupCache, LookupCache
from pyspark_lookup.cache.partial.host_cache import SharedCache
from pyspark_lookup.cache.partial.host_segment import Freshness
from pyspark_lookup.cache.partial.invalidations import NO_CALL, Call, Invalidations, castable_keys
from pyspark_lookup.cache.partial.single_flight import Flights
from pyspark_lookup.columnar.key_rows import distinct_keys, key_numbers, merge_rows, renumber, rows_for
from pyspark_lookup.columnar.keys import Keys, Numbers, as_indices
from pyspark_lookup.io.context import HostContext

Load = Callable[[Sequence[pa.Array]], pa.Table]
"""The rows of some keys, all different and none null, ascending by the column `KEY_INDEX`."""

_TOUCH_EVERY_S = 1.0


@dataclasses.dataclass(eq=False, repr=False)
class PartialCache:
    """Rows by key of one table (its keys and columns) as this process and its host hold them.

    `make_cache`: a cache for one version of the table; the one of another version is given up. It may be the
    same one, emptied: what threads do that still answer from the other version then passes it by.
    """

    key_names: Sequence[str]
    make_cache: Callable[[], LookupCache]
    shared: SharedCache | None
    flights: Flights
    context: HostContext
    invalidations: Invalidations | None = None

    def __post_init__(self) -> None:
        self._names = list(self.key_names)
        self._lock = threading.Lock()
        self._cache: _OfVersion | None = None
        self._invalidated = NO_CALL  # the last call that this process has followed
        self._touched_s = self.context.clock.steady_s()

    def lookup(self, keys: Sequence[pa.Array], fresh: Freshness, load: Load) -> pa.Table:
        """The rows of all keys, by the column `KEY_INDEX`; keys may repeat, one with a null has no rows.

        Raises what `load` raises; what other keys' loads brought is kept. If only some keys failed, the error has the rows of
        the others.
        """
        asked = Keys(keys)
        known = asked.rows if asked.valid is None else int(np.count_nonzero(asked.valid))
        query = self._query(keys, fresh)
        rest, _ = self._find_here(asked, keys, query)
        try:
            if len(rest):
                self._find_beyond(keys, rest, query, load)
            elif self.shared is not None:
                self._touch(keys)
            rows = merge_rows(query.parts, fresh.schema)
            if query.failure is not None:
                query.failure.rows, query.failure.failures = rows, query.failures
                raise query.failure
            return rows
        finally:
            self.context.metrics.inc("hitCount", known - query.loaded)
            self.context.metrics.inc("missCount", query.loaded)
            if len(rest):
                self._tell(query.cache)

    def get_held(self, keys: Sequence[pa.Array], fresh: Freshness) -> tuple[pa.Table, Numbers]:
        """The rows of those keys that this process or its host holds, by `KEY_INDEX`, and which keys these are."""
        asked = Keys(keys)
        query = self._query(keys, fresh)
        rest, present = self._find_here(asked, keys, query)
        if len(rest) and self.shared is not None:
            hashes = asked.hashes(self.flights.seed)
            present[rest] = True
            present[self._find_shared(keys, hashes, rest, query)] = False
        self.context.metrics.inc("hitCount", int(np.count_nonzero(present)))
        return merge_rows(query.parts, fresh.schema), present

    def _find_here(self, asked: Keys, keys: Sequence[pa.Array], query: _Query) -> tuple[Numbers, Numbers]:
        """The keys that this process does not hold, and which ones it does; their rows are in the query's parts."""
        found = query.cache.get(self._table(keys))
        if found.rows is not None:
            query.parts.append(found.rows)
        lacking = ~found.present if asked.valid is None else ~found.present & asked.valid
        return np.flatnonzero(lacking), found.present.copy()

    def _find_beyond(self, keys: Sequence[pa.Array], rest: Numbers, query: _Query, load: Load) -> None:
        """The rows of the keys `rest`, which this process does not hold."""
        some = _take(keys, rest)
        asked = Keys(some)
        chosen, places = distinct_keys(asked, asked.hashes(self.flights.seed))
        different = _take(some, chosen)
        hashes = Keys(different).hashes(self.flights.seed)
        before, query.parts = query.parts, []  # until the end by places among the different keys
        left = self._find_shared(different, hashes, np.arange(len(chosen)), query)
        while len(left):
            with self.flights.claim(hashes[left], query.fresh.version) as flight:
                mine = left[flight.mine]
                # Once more, now that nobody else loads them: who did may have finished in between.
                mine = self._find_shared(different, hashes, mine, query)
                if len(mine):
                    self._load(different, hashes, mine, query, load)
            theirs = left[~flight.mine]
            flight.wait()
            left = self._find_shared(different, hashes, theirs, query)
        rows = rows_for(merge_rows(query.parts, query.fresh.schema), places)
        query.parts = [*before, renumber(rows, rest[key_numbers(rows)])]
        failed = np.flatnonzero(np.isin(places, list(query.failures)))
        query.failures = {int(rest[place]): query.failures[int(places[place])] for place in failed}

    def _find_shared(self, keys: Sequence[pa.Array], hashes: Numbers, wanted: Numbers, query: _Query) -> Numbers:
        """Those of the `wanted` keys that the host does not hold; the rows of the others are in the query's parts."""
        if not len(wanted):
            return wanted
        some = _take(keys, wanted)
        if self.shared is None:  # another thread may have loaded them
            held = query.cache.get(self._table(some), peek=True)
            if held.rows is not None:
                query.add(held.rows, wanted)
            return wanted[~held.present]
        found = self.shared.get(some, hashes[wanted], query.fresh)
        if found is None:
            return wanted
        here = np.flatnonzero(found.present)
        if len(here):
            places = np.cumsum(found.present) - 1
            rows = renumber(found.rows, places[key_numbers(found.rows)])
            self._keep(query, _take(some, here), rows, found.ages_s[here])
            query.add(found.rows, wanted)
        return wanted[~found.present]

    def _load(self, keys: Sequence[pa.Array], hashes: Numbers, wanted: Numbers, query: _Query, load: Load) -> None:
        some = _take(keys, wanted)
        metrics, clock = self.context.metrics, self.context.clock
        started_s = clock.steady_s()
        query.loaded += len(wanted)
        try:
            rows = load(some)
        except LookupFunctionError as problem:
            metrics.inc("numLoadFailures", len(problem.failures) or len(wanted))
            if problem.rows is None:
                raise
            query.fail(problem, wanted)
            answered = np.setdiff1d(np.arange(len(wanted)), list(problem.failures))
            rows = renumber(problem.rows, np.searchsorted(answered, key_numbers(problem.rows)))
            some, wanted = _take(some, answered), wanted[answered]
            if not len(wanted):
                return
        except BaseException:
            metrics.inc("numLoadFailures", len(wanted))
            raise
        metrics.inc("loadCount", len(wanted))
        # As old as the moment before it was asked for.
        age_s = clock.steady_s() - started_s
        metrics.set_gauge("latestLoadTime", int(age_s * 1000))
        metrics.time("loadTime", age_s)
        self._keep(query, some, rows, np.full(len(wanted), age_s))
        if self.shared is not None:
            self.shared.put(some, hashes[wanted], rows, query.fresh, started_s)
        query.add(rows, wanted)

    def _touch(self, keys: Sequence[pa.Array]) -> None:
        """Tell the host now and then what is in use here, or it would give up what every process holds."""
        now_s = self.context.clock.steady_s()
        if now_s - self._touched_s >= _TOUCH_EVERY_S and self.shared is not None:
            self._touched_s = now_s
            self.shared.touch(keys, Keys(keys).hashes(self.flights.seed))

    def _table(self, keys: Sequence[pa.Array]) -> pa.Table:
        return pa.Table.from_arrays(list(keys), self._names)

    def _keep(self, query: _Query, keys: Sequence[pa.Array], rows: pa.Table, ages_s: Numbers) -> None:
        """Hold rows in this process, unless keys were invalidated since the lookup began: these may be among them."""
        with self._lock:
            if query.invalidated == self._invalidated:
                query.cache.put(self._table(keys), rows, ages_s)

    def _query(self, keys: Sequence[pa.Array], fresh: Freshness) -> _Query:
        """A lookup of keys like these: what was to be forgotten before it begins is forgotten."""
        with self._lock:
            if self._cache is None or not self._cache.holds(fresh):
                self._renew(fresh)
            self._forget_invalidated(keys, fresh)
            assert self._cache is not None
            return _Query(self._cache, fresh, self._invalidated)

    def _renew(self, fresh: Freshness) -> None:
        if self._cache is not None:
            self._cache.give_up()
        cache = self.make_cache()
        # Hits are counted here, those that another level answers too; of ours the host says how much it holds.
        own = not isinstance(cache, DefaultLookupCache)
        cache.open(MetricsOfCache(self.context.metrics) if own else CacheMetricGroup())
        self._cache = _OfVersion(fresh, cache)

    def _forget_invalidated(self, keys: Sequence[pa.Array], fresh: Freshness) -> None:
        if self.invalidations is None or (latest := self.invalidations.refresh()) == self._invalidated:
            return
        news, self._invalidated = self.invalidations.since(self._invalidated), latest
        if news is None:
            self._renew(fresh)
            return
        assert self._cache is not None
        fields = [pa.field(name, array.type) for name, array in zip(self._names, keys, strict=True)]
        with contextlib.suppress(SchemaError):  # of types that the columns had once, and no entry's
            self._cache.invalidate(self._table(castable_keys(news, fields)))

    def close(self) -> None:
        """Let go of what this process holds."""
        with self._lock:
            if self._cache is not None:
                self._cache.give_up()
                self._cache = None
        if self.shared is not None:
            self.shared.close()

    def _tell(self, cache: _OfVersion) -> None:
        rows, size = cache.sizes() if self.shared is None else self.shared.sizes()
        self.context.metrics.set_gauge("numCachedRecords", rows)
        if size != UNSET:
            self.context.metrics.set_gauge("numCachedBytes", size)


class _OfVersion:
    """A cache for as long as it holds rows of one version; then it knows nothing and keeps nothing."""

    def __init__(self, fresh: Freshness, cache: LookupCache) -> None:
        self._fresh = fresh
        self._cache: LookupCache | None = cache
        self._lock = threading.Lock()

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

    def invalidate(self, keys: pa.Table) -> None:
        with self._lock:
            if self._cache is not None:
                self._cache.invalidate_many(keys)

    def sizes(self) -> tuple[int, int]:
        with self._lock:
            return (0, 0) if self._cache is None else (self._cache.size(), self._cache.bytes())

    def give_up(self) -> None:
        with self._lock:
            assert self._cache is not None
            self._cache.close()
            self._cache = None


@dataclasses.dataclass
class _Query:
    """A lookup: the cache and the version that answer it, the rows found so far, and how many keys were loaded for it.

    `invalidated`: the last invalidation that it knows of. `failures`: why keys have no answer, by place; `failure`: the first
    error that told of some.
    """

    cache: _OfVersion
    fresh: Freshness
    invalidated: Call = NO_CALL
    parts: list[pa.Table] = dataclasses.field(default_factory=list)
    loaded: int = 0
    failures: dict[int, LookupFunctionError] = dataclasses.field(default_factory=dict)
    failure: LookupFunctionError | None = None

    def fail(self, problem: LookupFunctionError, keys: Numbers) -> None:
        """Note the failures of a load of `keys`."""
        self.failure = self.failure or problem
        self.failures |= {int(keys[place]): reason for place, reason in problem.failures.items()}

    def add(self, rows: pa.Table, keys: Numbers) -> None:
        """Rows whose `KEY_INDEX` is a place in `keys`."""
        self.parts.append(renumber(rows, keys[key_numbers(rows)]))


def _take(keys: Sequence[pa.Array], places: Numbers) -> list[pa.Array]:
    indices = as_indices(places)
    return [array.take(indices) for array in keys]
