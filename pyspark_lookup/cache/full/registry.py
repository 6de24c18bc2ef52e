"""The full caches of a table: one for each set of keys, columns, partitions and schedule, made on first use."""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable

from pyspark_lookup.cache.full.full_cache import FullCache
from pyspark_lookup.cache.full.loader import Layout, SnapshotLoader
from pyspark_lookup.options.enums import CacheMode
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.options.reload_trigger import CacheReloadTrigger
from pyspark_lookup.scan.contract import TableScan
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import key_of
from pyspark_lookup.versions.current_versions import CurrentVersions
from pyspark_lookup.versions.model import Table, TableVersion
from pyspark_lookup.versions.table_kinds import TableKinds


@dataclasses.dataclass(eq=False, repr=False)
class FullTables:
    """Caches of whole tables in this process and on this host. `trigger`: replaces the reload schedule of the options."""

    scan: TableScan
    kinds: TableKinds
    current: CurrentVersions
    layout_of: Callable[[Table, LookupOptions, TableVersion], Layout]
    context: HostContext
    trigger: CacheReloadTrigger | None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._caches: dict[tuple[object, ...], FullCache] = {}
        self._users: dict[FullCache, weakref.WeakSet[object]] = {}
        self.owner: object = None  # the engine: a running schedule refers to it, and so keeps it alive

    def get_cache(self, table: Table, options: LookupOptions) -> FullCache | None:
        """The full cache that the options ask for; None if they ask for none, or there is no cache directory."""
        if options.cache.mode is not CacheMode.FULL or self.context.disk is None:
            return None
        # Columns that a predicate needs are kept in addition to the chosen ones.
        columns = None if options.read.columns is None else (options.read.columns, options.read.where)
        key_parts = (table.id, options.files.keys, columns, options.files.partition, options.version.source.value)
        place = (key_parts, options.full_cache)
        with self._lock:
            if place not in self._caches:
                key = key_of(*key_parts)
                self._caches[place] = FullCache(
                    key,
                    table,
                    options,
                    functools.partial(self._lay_out, table, options),
                    self.kinds,
                    self.current,
                    SnapshotLoader(
                        self.scan,
                        self.context.disk,
                        self.context.rng,
                        table,
                        key,
                        options.full_cache.build_memory_bytes,
                    ),
                    self.context.disk,
                    self.context,
                    self.trigger,
                )
            return self._caches[place]

    def _lay_out(self, table: Table, options: LookupOptions, version: TableVersion) -> Layout:
        return self.layout_of(table, options, version)

    def hold(self, table: Table, options: LookupOptions, user: object) -> None:
        """Keep a cache's schedule until `user` releases it, or is collected."""
        full = self.get_cache(table, options)
        if full is not None:
            self._users.setdefault(full, weakref.WeakSet()).add(user)

    def let_go(self, table: Table, options: LookupOptions, user: object) -> None:
        """Release a cache, and close it if `user` was the last to hold it. Files on disk stay."""
        full = self.get_cache(table, options)
        users = self._users.get(full) if full is not None else None
        if full is None or users is None:
            return
        users.discard(user)
        if not users:
            with self._lock:
                del self._users[full]
                self._caches = {place: cache for place, cache in self._caches.items() if cache is not full}
            full.close()
