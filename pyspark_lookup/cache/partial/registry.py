"""The partial caches of tables of files: one for each table, keys and columns, made on first use."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Sequence

import pyarrow as pa

from pyspark_lookup.cache.memory import DefaultLookupCache, LookupCache
from pyspark_lookup.cache.partial.carry_over import Changes, FileBounds
from pyspark_lookup.cache.partial.host_cache import SharedCache
from pyspark_lookup.cache.partial.host_segment import Bounds, Freshness
from pyspark_lookup.cache.partial.invalidations import Invalidations
from pyspark_lookup.cache.partial.read_through import PartialCache
from pyspark_lookup.cache.partial.single_flight import Flights
from pyspark_lookup.columnar.keys import Seed, draw_seed
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import Disk, key_of
from pyspark_lookup.versions.model import Table, TableVersion

_FLIGHT_WAIT_S = 60.0
_CACHES_AT_MOST = 16  # of a table, for different columns; the host still has the rows of those that are dropped


class PartialTables:
    """The partial caches of this process and, if there is a `disk`, of this host.

    `provider_cache`: a provider's own cache, used instead of the one that the options describe. Only its class knows its bounds, so the
    host shares nothing of it.
    """

    def __init__(self, context: HostContext, provider_cache: LookupCache | None = None) -> None:
        self._provider_cache = provider_cache
        self._context = context
        self._lock = threading.Lock()
        self._caches: dict[str, tuple[PartialCache, Changes]] = {}
        self._invalidations: dict[str, Invalidations] = {}

    def get_cache(
        self,
        table: Table,
        space: str,
        options: LookupOptions,
        keys: pa.Schema,
        columns: pa.Schema,
        version: TableVersion,
        bounds_of: FileBounds,
    ) -> tuple[PartialCache, Freshness]:
        """The cache of rows with `columns` by `keys`, and the version of the table for which it answers.

        `space`: names the table's reference, its keys and its columns.
        """
        cache, changes = self._cache(table, space, options, keys)
        changes.remember(version, bounds_of)
        may_differ = functools.partial(changes.may_differ, version.digest)
        latest = functools.partial(changes.is_latest, version.digest)
        return cache, Freshness(version.digest, columns, may_differ, latest)

    def invalidate(self, table: Table, keys: pa.Table) -> None:
        """Invalidate these keys, which have no nulls, on the host. Raises OSError if its cache directory cannot be written."""
        with self._lock:
            invalidations = self._get_invalidations(table, keys.column_names)
        invalidations.add(keys)

    @property
    def has_unrecorded(self) -> bool:
        """Whether only this process knows of some invalidated keys, for lack of a cache directory. The provider's cache may still have rows of them."""
        return self._provider_cache is not None and self._context.disk is None and bool(self._invalidations)

    def _get_invalidations(self, table: Table, names: Sequence[str]) -> Invalidations:
        # All references to the table share one log, in whichever order they name its keys.
        place = key_of(table.scope, table.url, *sorted(names))
        if place not in self._invalidations:
            self._invalidations[place] = Invalidations(self._context, place, names)
        return self._invalidations[place]

    def _cache(self, table: Table, space: str, options: LookupOptions, keys: pa.Schema) -> tuple[PartialCache, Changes]:
        place = key_of(space, keys.serialize().hex(), options.partial_cache, options.cache.max_bytes)
        with self._lock:
            cache = self._caches.pop(place, None) or self._make(table, space, options, keys)
            self._caches[place] = cache  # the most recently used cache is last
            while len(self._caches) > _CACHES_AT_MOST:
                del self._caches[next(iter(self._caches))]
            return cache

    def close(self) -> None:
        """Drop what this process has cached. Files on disk stay."""
        with self._lock:
            caches, self._caches = self._caches, {}
        for cache, _ in caches.values():
            cache.close()

    def _make(self, table: Table, space: str, options: LookupOptions, keys: pa.Schema) -> tuple[PartialCache, Changes]:
        invalidations = self._get_invalidations(table, keys.names)
        seed, disk = self._seed(space)
        context = dataclasses.replace(self._context, disk=disk)
        provider_cache, shared = self._provider_cache, None
        config = options.partial_cache.parameters if provider_cache is None else None
        if isinstance(provider_cache, DefaultLookupCache):
            config = provider_cache.config
        for gauge, name in (("maxCachedRecords", "max_rows"), ("maxCachedBytes", "max_bytes")):
            if config is not None and config[name] is not None:
                context.metrics.set_gauge(gauge, int(config[name]))
        if disk is not None and config is not None:
            rows, size = (math.inf if bound is None else bound for bound in (config["max_rows"], config["max_bytes"]))
            bounds = Bounds(
                rows,
                min(disk.budget(), size),
                config["expire_after_access_s"],
                config["expire_after_write_s"],
                config["cache_missing_key"],
            )
            shared = SharedCache(disk, context, space, keys, seed, bounds, invalidations)

        def make_cache() -> LookupCache:
            return (
                DefaultLookupCache.from_options(options, context.clock.steady_s)
                if provider_cache is None
                else provider_cache
            )

        flights = Flights(context, space, seed, _FLIGHT_WAIT_S)
        cache = PartialCache(keys.names, make_cache, shared, flights, context, invalidations)
        return cache, Changes(context, space, keys)

    def _seed(self, space: str) -> tuple[Seed, Disk | None]:
        """The seed of the hashes of this space's keys, the same in all processes of the host."""
        seed, disk = draw_seed(self._context.rng), self._context.disk
        if disk is None:
            return seed, None
        try:
            value = {"seed": seed.to_json()}
            return disk.create_record("snapshot", space, value, lambda record: Seed.from_json(record["seed"])), disk
        except OSError:
            self._context.metrics.inc("cacheFailureCount")
            return seed, None
