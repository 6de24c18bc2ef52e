"""`PartialCache` looks keys up in the caches, and loads the keys that the caches lack (FLIP-221's CachingLookupFunction).

A key is looked up in the cache of this process, then in the cache that the host's processes share; if neither has it, it is loaded. Metrics
count keys: a key that another caller loads meanwhile is a hit; a key that this caller loads is one miss, and one load or one failed load.

The race: several callers may lack the same key at the same time. Only one of them loads it, and the others wait and look again. For this, a
process claims the keys that it is about to load: it writes their hashes into a file, and keeps this file locked until the load ends or the process
dies. Other processes leave these keys to it, wait for the lock, and look into the cache again. No process waits while it has a claim, so no two
can wait for each other. Two keys with the same hash count as one key here, which costs no more than a wait.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from pyspark_lookup.cache.lookup_cache import EntryRules
from pyspark_lookup.cache.memory import CachedRows, DefaultLookupCache, LookupCache
from pyspark_lookup.cache.partial.host_cache import Freshness, SharedCache
from pyspark_lookup.cache.partial.invalidations import NO_CALL, Call, Invalidations, castable_keys
from pyspark_lookup.columnar.keys import (
    Keys,
    Numbers,
    Seed,
    as_array,
    as_indices,
    distinct_keys,
    key_numbers,
    merge_rows,
    no_rows,
    renumber,
    take_requested,
)
from pyspark_lookup.core.metrics import UNSET, CacheMetricGroup, MetricsOfCache
from pyspark_lookup.errors import LookupFunctionError, SchemaError
from pyspark_lookup.storage.context import HostContext

_LOCK_WAIT_S = 1.0


class Flight:
    """The keys that a caller lacks, by their `hashes`. `to_load`: for each key, True if this caller has to load it; False if another caller is loading
    it."""

    def __init__(self, hashes: Numbers) -> None:
        self.to_load = np.ones(len(hashes), np.bool_)
        self.hashes = hashes
        self._waits: list[Callable[[], None]] = []

    def leave(self, hashes_elsewhere: Numbers, wait: Callable[[], None]) -> int:
        """Leave the keys with the hashes `hashes_elsewhere` (ascending) to another caller, which is loading them. Returns how many keys these are.

        `wait`: blocks until the other caller's load has ended.
        """
        places = np.minimum(np.searchsorted(hashes_elsewhere, self.hashes), len(hashes_elsewhere) - 1)
        is_elsewhere = (
            (hashes_elsewhere[places] == self.hashes) & self.to_load
            if len(hashes_elsewhere)
            else np.zeros_like(self.to_load)
        )
        if is_elsewhere.any():
            self.to_load[is_elsewhere] = False
            self._waits.append(wait)
        return int(np.count_nonzero(is_elsewhere))

    def wait(self) -> None:
        """Wait until the loads of the other callers have ended. Never call this inside `Flights.claim`: two callers might wait for each other."""
        for wait in self._waits:
            wait()


class Flights:
    """Knows which keys of a table are being loaded, in this process and, if there is a cache directory, in the host's other processes.

    `space`: a hash of the table and its columns. `seed`: the seed of the hashes of keys, the same in all processes. `wait_s`: how long to wait
    for another caller's load; after this time, a caller loads the keys itself.
    """

    def __init__(self, context: HostContext, space: str, seed: Seed, wait_s: float) -> None:
        self.seed = seed
        self._context = context
        self._space = space
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._in_process: dict[int, tuple[str, Numbers, threading.Event]] = {}
        self._next = 0
        self._stuck: set[str] = set()  # the names of claims of other processes for which a wait has timed out
        self._stuck_in_process: set[int] = set()

    @contextlib.contextmanager
    def claim(self, hashes: Numbers, version: str) -> Iterator[Flight]:
        """Claim those keys, by their hashes, that no other caller is loading, until the `with` block ends.

        The block gets a `Flight`, which says which keys to load. `version`: only loads of the same version count.
        """
        flight = Flight(hashes)
        with self._lock:
            for flight_number, (of_version, hashes_elsewhere, event) in self._in_process.items():
                if of_version == version and flight_number not in self._stuck_in_process:
                    self._leave(
                        flight, hashes_elsewhere, functools.partial(self._await_in_process, flight_number, event)
                    )
            number, finished = self._next, threading.Event()
            self._next += 1
            self._in_process[number] = version, np.sort(hashes[flight.to_load]), finished
        try:
            with self._on_host(flight, version):
                yield flight
        finally:
            with self._lock:
                del self._in_process[number]
                self._stuck_in_process.discard(number)
            finished.set()

    @contextlib.contextmanager
    def _on_host(self, flight: Flight, version: str) -> Iterator[None]:
        claim, disk = None, self._context.disk
        if disk is not None and flight.to_load.any():
            try:
                with disk.hold("claim", self._space, _LOCK_WAIT_S) as alone:
                    for name, payload in disk.claims(self._space, version) if alone else ():
                        if name not in self._stuck:
                            hashes_elsewhere = np.frombuffer(payload, np.uint64, len(payload) // 8)
                            self._leave(flight, hashes_elsewhere, functools.partial(self._await_on_host, name))
                    if alone:
                        claim = disk.create_claim(
                            self._space, version, np.sort(flight.hashes[flight.to_load]).tobytes()
                        )
            except OSError:
                self._context.metrics.inc("cacheFailureCount")
        try:
            yield
        finally:
            if claim is not None:
                claim.release()

    def _leave(self, flight: Flight, hashes_elsewhere: Numbers, wait: Callable[[], None]) -> None:
        self._context.metrics.inc("loadWaitCount", flight.leave(hashes_elsewhere, wait))

    def _await_in_process(self, flight_number: int, finished: threading.Event) -> None:
        if not finished.wait(self._wait_s):
            with self._lock:
                self._stuck_in_process |= {flight_number} & self._in_process.keys()

    def _await_on_host(self, name: str) -> None:
        assert self._context.disk is not None
        if not self._context.disk.wait_for_claim(self._space, name, self._wait_s, self._context.clock):
            self._stuck.add(name)  # later callers do not wait for this claim again


Load = Callable[[Sequence[pa.Array], Numbers], pa.Table]
"""A function that loads the rows of some keys, all different and none null. It returns the rows ordered by the column `KEY_INDEX`.

The second argument is set, for each key, to the seconds that its rows count as older than the call (infinite: they must not be cached).
"""

_TOUCH_EVERY_S = 1.0


@dataclasses.dataclass(eq=False, repr=False)
class PartialCache:
    """The partial cache of one table, for one choice of key columns and columns: in this process, and in files that the host's processes share.

    `make_cache`: returns a cache for one version of the table. It is called after the last cache was closed, and may return the same object
    again, because threads that still read the last version can no longer reach the object. `shared`: None if the host shares nothing.
    `answers_stale`: if a load fails, answer with the last rows that the host has, of whatever version and age.
    """

    key_names: Sequence[str]
    make_cache: Callable[[], LookupCache]
    shared: SharedCache | None
    flights: Flights
    context: HostContext
    invalidations: Invalidations | None = None
    answers_stale: bool = False

    def __post_init__(self) -> None:
        self._names = list(self.key_names)
        self._lock = threading.Lock()
        self._cache: _OfVersion | None = None
        self._invalidated = NO_CALL  # the last call of `invalidate` whose keys this process has dropped
        self._touched_s = self.context.clock.steady_s()

    def lookup(self, keys: Sequence[pa.Array], fresh: Freshness, load: Load) -> pa.Table:
        """The rows of all keys, with the column `KEY_INDEX`. Keys may repeat; a key with a null has no rows.

        `load` is called for the keys that are not cached. Raises its errors; rows of other keys that were loaded before the error stay cached.
        If only some keys failed, the error has the rows of all other keys.
        """
        requested_keys = Keys(keys)
        valid_count = (
            requested_keys.rows if requested_keys.valid is None else int(np.count_nonzero(requested_keys.valid))
        )
        query = self._query(keys, fresh)
        missing_keys, _ = self._find_in_process(requested_keys, keys, query)
        try:
            if len(missing_keys):
                self._find_or_load(keys, missing_keys, query, load)
            elif self.shared is not None:
                self._touch(keys)
            rows = merge_rows(query.parts, fresh.schema)
            if query.failure is not None:
                query.failure.rows, query.failure.failures = rows, query.failures
                raise query.failure
            return rows
        finally:
            self.context.metrics.inc("hitCount", valid_count - query.loaded)
            self.context.metrics.inc("missCount", query.loaded)
            if len(missing_keys):
                self._set_gauges(query.cache)

    def get_held(self, keys: Sequence[pa.Array], fresh: Freshness) -> tuple[pa.Table, Numbers]:
        """(the cached rows of `keys`, with `KEY_INDEX`; for each key, whether this process or the host has it cached). Loads nothing."""
        requested_keys = Keys(keys)
        query = self._query(keys, fresh)
        missing_keys, present = self._find_in_process(requested_keys, keys, query)
        if len(missing_keys) and self.shared is not None:
            hashes = requested_keys.hashes(self.flights.seed)
            present[missing_keys] = True
            present[self._find_shared(keys, hashes, missing_keys, query)] = False
        self.context.metrics.inc("hitCount", int(np.count_nonzero(present)))
        return merge_rows(query.parts, fresh.schema), present

    def _find_in_process(
        self, requested_keys: Keys, keys: Sequence[pa.Array], query: _Query
    ) -> tuple[Numbers, Numbers]:
        """(positions of the keys that this process lacks, for each key whether it is cached here). Adds the cached rows to the query."""
        cached_rows = query.cache.get(self._table(keys))
        if cached_rows.rows is not None:
            query.parts.append(cached_rows.rows)
        is_missing = (
            ~cached_rows.present if requested_keys.valid is None else ~cached_rows.present & requested_keys.valid
        )
        return np.flatnonzero(is_missing), cached_rows.present.copy()

    def _find_or_load(self, keys: Sequence[pa.Array], missing_keys: Numbers, query: _Query, load: Load) -> None:
        """Add to the query the rows of the keys at the positions `missing_keys`, which are not cached in this process.

        The rows come from the files that the host's processes share, or else from `load`.
        """
        key_arrays = _take(keys, missing_keys)
        repeated_keys = Keys(key_arrays)
        distinct_places, places = distinct_keys(repeated_keys, repeated_keys.hashes(self.flights.seed))
        different = _take(key_arrays, distinct_places)
        hashes = Keys(different).hashes(self.flights.seed)
        local_parts, query.parts = (
            query.parts,
            [],
        )  # in the new parts, `KEY_INDEX` is a position among the distinct keys
        pending_keys = self._find_shared(different, hashes, np.arange(len(distinct_places)), query)
        while len(pending_keys):
            with self.flights.claim(hashes[pending_keys], query.fresh.version) as flight:
                keys_to_load = pending_keys[flight.to_load]
                # The race: after this caller has looked for the keys, another caller may have loaded them, and have released its claim
                # before this one made its own. So this caller looks again, under its own claim.
                keys_to_load = self._find_shared(different, hashes, keys_to_load, query)
                if len(keys_to_load):
                    self._load(different, hashes, keys_to_load, query, load)
            keys_elsewhere = pending_keys[~flight.to_load]
            flight.wait()
            pending_keys = self._find_shared(different, hashes, keys_elsewhere, query)
        rows = take_requested(merge_rows(query.parts, query.fresh.schema), places)
        query.parts = [*local_parts, renumber(rows, missing_keys[key_numbers(rows)])]
        failed = np.flatnonzero(np.isin(places, list(query.failures)))
        query.failures = {int(missing_keys[place]): query.failures[int(places[place])] for place in failed}

    def _find_shared(self, keys: Sequence[pa.Array], hashes: Numbers, numbers: Numbers, query: _Query) -> Numbers:
        """Look for the keys at the positions `numbers` in the shared cache (without one, again in this process's cache), and add the rows found to the
        query. Returns the positions of the keys that were not found."""
        if not len(numbers):
            return numbers
        key_arrays = _take(keys, numbers)
        if self.shared is None:  # then only another thread of this process may have loaded the keys
            cached_rows = query.cache.get(self._table(key_arrays), peek=True)
            if cached_rows.rows is not None:
                query.add(cached_rows.rows, numbers)
            return numbers[~cached_rows.present]
        shared_rows = self.shared.get(key_arrays, hashes[numbers], query.fresh)
        if shared_rows is None:
            return numbers
        shared_keys = np.flatnonzero(shared_rows.present)
        if len(shared_keys):
            places = np.cumsum(shared_rows.present) - 1
            rows = renumber(shared_rows.rows, places[key_numbers(shared_rows.rows)])
            self._keep(query, _take(key_arrays, shared_keys), rows, shared_rows.ages_s[shared_keys])
            query.add(shared_rows.rows, numbers)
        return numbers[~shared_rows.present]

    def _load(self, keys: Sequence[pa.Array], hashes: Numbers, numbers: Numbers, query: _Query, load: Load) -> None:
        key_arrays = _take(keys, numbers)
        metrics, clock = self.context.metrics, self.context.clock
        started_s = clock.steady_s()
        query.loaded += len(numbers)
        ages_s = np.zeros(len(numbers))
        try:
            rows = load(key_arrays, ages_s)
        except LookupFunctionError as problem:
            metrics.inc("numLoadFailures", len(problem.failures) or len(numbers))
            failures = dict(problem.failures) or dict.fromkeys(range(len(numbers)), problem)
            stale = self._answer_stale(
                key_arrays, hashes[numbers], numbers, query, np.array(sorted(failures), np.int64)
            )
            if problem.rows is None and not len(stale):
                raise
            query.fail(problem, numbers, {place: failures[place] for place in failures.keys() - set(stale.tolist())})
            answered = np.setdiff1d(np.arange(len(numbers)), list(failures))
            loaded_rows = no_rows(query.fresh.schema) if problem.rows is None else problem.rows
            rows = renumber(loaded_rows, np.searchsorted(answered, key_numbers(loaded_rows)))
            key_arrays, numbers, ages_s = _take(key_arrays, answered), numbers[answered], ages_s[answered]
            if not len(numbers):
                return
        except BaseException:
            metrics.inc("numLoadFailures", len(numbers))
            raise
        metrics.inc("loadCount", len(numbers))
        # The age of rows counts from the start of their load: the table may have changed while they were loaded.
        age_s = clock.steady_s() - started_s
        metrics.set_gauge("latestLoadTime", int(age_s * 1000))
        metrics.time("loadTime", age_s)
        query.add(rows, numbers)
        if not (cached := np.isfinite(ages_s)).all():
            key_arrays, numbers, ages_s = _take(key_arrays, np.flatnonzero(cached)), numbers[cached], ages_s[cached]
            rows = rows.filter(as_array(cached[key_numbers(rows)]))
            rows = renumber(rows, (np.cumsum(cached) - 1)[key_numbers(rows)])
        if len(numbers):
            self._keep(query, key_arrays, rows, ages_s + age_s)
            if self.shared is not None:
                self.shared.put(key_arrays, hashes[numbers], rows, query.fresh, started_s - ages_s)

    def _answer_stale(
        self, keys: Sequence[pa.Array], hashes: Numbers, numbers: Numbers, query: _Query, failed: Numbers
    ) -> Numbers:
        """Add to the query the last rows of the keys at the places `failed`, which could not be loaded. Returns the places of those that had rows.

        `numbers`: the position of each key in the query. The rows are not cached again.
        """
        if not self.answers_stale or self.shared is None:
            return np.zeros(0, np.int64)
        stale_rows = self.shared.get(_take(keys, failed), hashes[failed], query.fresh, stale=True)
        if stale_rows is None:
            return np.zeros(0, np.int64)
        query.add(stale_rows.rows, numbers[failed])
        self.context.metrics.inc("staleKeyCount", int(np.count_nonzero(stale_rows.present)))
        return failed[stale_rows.present]

    def _touch(self, keys: Sequence[pa.Array]) -> None:
        """Record in the shared cache, at most once a second, which keys this process uses.

        Otherwise the shared cache would evict keys that this process answers from its own memory.
        """
        now_s = self.context.clock.steady_s()
        if now_s - self._touched_s >= _TOUCH_EVERY_S and self.shared is not None:
            self._touched_s = now_s
            self.shared.touch(keys, Keys(keys).hashes(self.flights.seed))

    def _table(self, keys: Sequence[pa.Array]) -> pa.Table:
        return pa.Table.from_arrays(list(keys), self._names)

    def _keep(self, query: _Query, keys: Sequence[pa.Array], rows: pa.Table, ages_s: Numbers) -> None:
        """Cache rows in this process, unless keys were invalidated since the lookup began: the rows may belong to such keys."""
        with self._lock:
            if query.invalidated == self._invalidated:
                query.cache.put(self._table(keys), rows, ages_s)

    def _query(self, keys: Sequence[pa.Array], fresh: Freshness) -> _Query:
        """A new lookup. First makes the cache of its version the current one, and drops keys from it that were invalidated."""
        with self._lock:
            if self._cache is None or not self._cache.holds(fresh):
                self._carry_over(fresh)
            self._forget_invalidated(keys, fresh)
            assert self._cache is not None
            return _Query(self._cache, fresh, self._invalidated)

    def _carry_over(self, fresh: Freshness) -> None:
        """Make the cache one of the version of `fresh`: drop the keys that have changed if they can be listed, otherwise all keys."""
        changed_keys = None if self._cache is None else self._cache.later_keys(fresh)
        if self._cache is None or changed_keys is None:
            self._renew(fresh)
        else:
            # The race: a thread that still loads rows for the last version holds the last object, which takes no rows from now on.
            cache = self._cache.hand_over()
            self._cache = _OfVersion(fresh, cache)
            if cache.persistent:
                cache.use(self._entry_rules(fresh))
            else:
                self._cache.invalidate(changed_keys.select(self._names))
        if self.shared is not None:
            self.shared.tidy(fresh)

    def _renew(self, fresh: Freshness) -> None:
        if self._cache is not None:
            self._cache.give_up()
        cache = self.make_cache()
        # This class counts hits itself, because it also knows the hits in the shared cache. A default cache must not count hits once more.
        is_custom = not isinstance(cache, DefaultLookupCache)
        cache.open(MetricsOfCache(self.context.metrics) if is_custom else CacheMetricGroup())
        if cache.persistent:
            cache.use(self._entry_rules(fresh))
        self._cache = _OfVersion(fresh, cache)

    def _entry_rules(self, fresh: Freshness) -> EntryRules:
        """The rules by which a persistent cache answers. It knows by itself which entries were loaded before an invalidation."""

        def find_limits(keys: Sequence[pa.Array]) -> Numbers | None:
            if self.invalidations is None:
                return None
            fields = [pa.field(name, array.type) for name, array in zip(self._names, keys, strict=True)]
            return self.invalidations.limits(Keys(keys).hashes(self.flights.seed), fields, self.flights.seed)

        return EntryRules(fresh.version, fresh.schema, fresh.may_differ, find_limits)

    def _forget_invalidated(self, keys: Sequence[pa.Array], fresh: Freshness) -> None:
        if self.invalidations is None or (latest := self.invalidations.refresh()) == self._invalidated:
            return
        news, self._invalidated = self.invalidations.find_later_keys(self._invalidated), latest
        if self._cache is not None and self._cache.persistent:
            return
        if news is None:
            self._renew(fresh)
            return
        assert self._cache is not None
        fields = [pa.field(name, array.type) for name, array in zip(self._names, keys, strict=True)]
        # Raised for keys of types that the columns had earlier: no entry has such keys.
        with contextlib.suppress(SchemaError):
            self._cache.invalidate(self._table(castable_keys(news, fields)))

    def close(self) -> None:
        """Drop what this process has cached. Files on disk stay."""
        with self._lock:
            if self._cache is not None:
                self._cache.give_up()
                self._cache = None
        if self.shared is not None:
            self.shared.close()

    def _set_gauges(self, cache: _OfVersion) -> None:
        rows, size = cache.sizes() if self.shared is None else self.shared.sizes()
        self.context.metrics.set_gauge("numCachedRecords", rows)
        if size != UNSET:
            self.context.metrics.set_gauge("numCachedBytes", size)


class _OfVersion:
    """A cache of the rows of one version. After `give_up` it has no entries and takes none, although other threads may still use it."""

    def __init__(self, fresh: Freshness, cache: LookupCache) -> None:
        self._fresh = fresh
        self._cache: LookupCache | None = cache
        self._lock = threading.Lock()

    def holds(self, fresh: Freshness) -> bool:
        """Whether the cache is for the version and the columns of `fresh`."""
        return self._fresh.version == fresh.version and bool(self._fresh.schema.equals(fresh.schema))

    @property
    def persistent(self) -> bool:
        return self._cache is not None and self._cache.persistent

    def later_keys(self, fresh: Freshness) -> pa.Table | None:
        """The keys whose rows may differ between this cache's version and that of `fresh`; None if any key may be among them, or the columns differ."""
        return fresh.later_keys(self._fresh.version) if self._fresh.schema.equals(fresh.schema) else None

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
        self.hand_over().close()

    def hand_over(self) -> LookupCache:
        """The cache, open and with its entries. This object has none from now on, and takes none."""
        with self._lock:
            assert self._cache is not None
            cache, self._cache = self._cache, None
            return cache


@dataclasses.dataclass
class _Query:
    """A lookup that is running. `parts`: the rows that were found so far. `loaded`: how many keys were loaded.

    `invalidated`: the latest call of `invalidate` when the lookup began. `failures`: the errors of the keys that could not be loaded, by
    position. `failure`: the first error of a load that failed for some of its keys.
    """

    cache: _OfVersion
    fresh: Freshness
    invalidated: Call = NO_CALL
    parts: list[pa.Table] = dataclasses.field(default_factory=list)
    loaded: int = 0
    failures: dict[int, LookupFunctionError] = dataclasses.field(default_factory=dict)
    failure: LookupFunctionError | None = None

    def fail(self, problem: LookupFunctionError, keys: Numbers, failures: Mapping[int, LookupFunctionError]) -> None:
        """Record the `failures`, by place, of a load of the keys at the positions `keys`."""
        if failures:
            self.failure = self.failure or problem
        self.failures |= {int(keys[place]): reason for place, reason in failures.items()}

    def add(self, rows: pa.Table, keys: Numbers) -> None:
        """Add rows whose `KEY_INDEX` is a position in `keys`, which has the positions of the keys in the lookup."""
        self.parts.append(renumber(rows, keys[key_numbers(rows)]))


def _take(keys: Sequence[pa.Array], places: Numbers) -> list[pa.Array]:
    indices = as_indices(places)
    return [array.take(indices) for array in keys]
