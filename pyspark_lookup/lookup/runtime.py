"""The composition root: builds a reader for a table reference out of this process's parts.

The one global of the package. It is rebuilt when the process id changes, because nothing opened
before a fork (a store's connections, a lock) may be used after it.
"""

from __future__ import annotations

import atexit
import collections
import concurrent.futures
import contextlib
import functools
import json
import logging
import os
import random
import threading
import weakref
from collections.abc import Iterator

import pyarrow as pa

from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.forks import ForkSafeLock
from pyspark_lookup.core.log_events import log_event
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.core.threads import end_all
from pyspark_lookup.core.timer import Timer
from pyspark_lookup.errors import CacheDirectoryError, OptionError
from pyspark_lookup.lookup.apart import check_apart
from pyspark_lookup.lookup.table_reader import TableReader
from pyspark_lookup.options.conf_file import conf_file_secrets, redact
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.sources.iceberg.catalog import Catalog
from pyspark_lookup.sources.managed import (
    Compactor,
    OpenWrites,
    TableWriter,
    Vacuumed,
    WriteSizes,
    vacuum,
    vacuum_if_due,
)
from pyspark_lookup.sources.managed.log import NotificationLog
from pyspark_lookup.sources.managed.rows_by_key import KeyedRows
from pyspark_lookup.sources.providers import ProvidedScan, ProvidedStore, ProvidedTable, ProviderSource, with_provider
from pyspark_lookup.sources.registry import SOURCES
from pyspark_lookup.storage.block_cache import BlockCache
from pyspark_lookup.storage.context import HostContext, Start, in_thread
from pyspark_lookup.storage.disk import Disk, key_of, memory_backed
from pyspark_lookup.storage.glob import is_glob
from pyspark_lookup.storage.host_metrics import Publisher
from pyspark_lookup.storage.stores import CatalogStore, Store, open_store
from pyspark_lookup.storage.ufs import Ufs
from pyspark_lookup.versions.model import Table
from pyspark_lookup.versions.resolver import Resolver

_log = logging.getLogger("pyspark_lookup.runtime")
_BLOCK_WAIT_S = 60.0
_ENGINES_KEPT = 256  # without users: each takes at least 25 kB and keeps a file of counters open
_IDLE_PROBES = 16  # engines that are looked at to find an idle one


class Engine:
    """One table reference's parts in this process."""

    def __init__(
        self,
        reader: TableReader,
        ufs: Ufs,
        context: HostContext,
        publisher: Publisher,
        sizes: WriteSizes,
    ) -> None:
        self.reader = reader
        reader.fulls.owner = self
        self.sizes = sizes
        self.disk = context.disk
        self._ufs = ufs
        self._context = context
        self.last_table: Table | None = None  # the table at its path when a token was issued last
        self._publisher = publisher
        self.host_metrics = publisher.host_total
        self.worker_metrics = publisher.by_worker
        self.url_of = ufs.url_of

    def publish_metrics(self) -> None:
        """Put this process's counters where the host finds them; now and then the cache directory is swept, beside the caller."""
        self._publisher.publish()
        if self.disk is not None and self.disk.sweep_is_due():
            with contextlib.suppress(RuntimeError):  # there are too many threads, or the process ends
                self._context.start("lookupcache-sweep", self.disk.sweep)

    def let_go(self, table_and_options: tuple[Table, LookupOptions] | None, user: object) -> None:
        """Close what only `user` still uses (`table_and_options`: what it has read, if anything), and the files of counters if nobody else needs them."""
        self.publish_metrics()
        if table_and_options is not None:
            self.reader.let_go(*table_and_options, user)
        if not self.reader.is_held:
            self._publisher.close()

    def suspend(self) -> None:
        """Publish the counters, and close their file until the next use of the engine."""
        self._publisher.publish()
        self._publisher.close()

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Count how long the block takes, if it ends well."""
        started_s = self._context.clock.steady_s()
        yield
        self.reader.metrics.time(name, self._context.clock.steady_s() - started_s)

    def writer(self, options: LookupOptions) -> TableWriter:
        """Writes of the managed table at `options.path`, which need not be there yet. Raises OptionError for a glob."""
        url = self._ufs.url_of(options.path)
        if is_glob(url) and not self.reader.resolver.is_literal(url):
            raise OptionError(
                f"option path = {redact('path', options.path)!r}: a new table has a name without wildcards (*, ?, [, {{)"
            )
        if options.pinned is not None or options.changes_from is not None:
            pin = next(iter(options.pins), "lookup.changes-from")
            raise OptionError(f"option {pin} is for reads: a write takes none, remove it")
        log, table, rows = self._managed(options, url)
        raise_floor = functools.partial(self.reader.resolver.host.raise_floor, table)
        enclosing = self.reader.resolver.enclosing
        return TableWriter(self._ufs, log, self._context, options, table, rows, raise_floor, self.sizes, enclosing)

    def compactor(self, options: LookupOptions) -> Compactor:
        """Compactions of the managed table at `options.path`. Raises OptionError for a glob."""
        writer = self.writer(options)
        parts = self._managed(options, self._ufs.url_of(options.path))
        return Compactor(writer, *parts, options.write_compact_after, self.sizes)

    def open_writes(self, options: LookupOptions) -> OpenWrites:
        """The writes of a transaction that begins now. Raises OptionError for a glob, UfsError if the store fails."""
        writer = self.writer(options)
        log, table, rows = self._managed(options, self._ufs.url_of(options.path))
        return OpenWrites(writer, log, table, rows, options.write_unique_keys, log.latest())

    @contextlib.contextmanager
    def publish(self) -> Iterator[None]:
        """Publish what is counted in the block, however it ends."""
        try:
            yield
        finally:
            self.publish_metrics()

    @contextlib.contextmanager
    def committing(self, options: LookupOptions) -> Iterator[TableWriter]:
        """A writer for a block that commits. Afterwards runs a compaction or vacuum if one is due, and publishes the counters."""
        with self.publish():
            yield self.writer(options)
            if options.write_compact_after:
                self.compactor(options).compact_if_due()
            log, _, _ = self._managed(options, self._ufs.url_of(options.path))
            vacuum_if_due(self._ufs, log, self._nonce())

    def schema_in_log(self, options: LookupOptions) -> pa.Schema | None:
        """The columns of the managed table at `options.path`; None if there is none."""
        state = self.reader.resolver.read_log(options)
        return None if state is None else state.definition.schema

    def keys_in_log(self, options: LookupOptions) -> tuple[str, ...]:
        """The key columns of the managed table at `options.path`; those of the options if there is none."""
        state = self.reader.resolver.log(
            self._ufs.url_of(options.path)
        ).cached_state() or self.reader.resolver.read_log(options)
        return state.definition.keys if state is not None and state.definition.keys else options.keys or ()

    def vacuum(self, options: LookupOptions, older_than_s: float, force: bool) -> Vacuumed:
        """Remove what the managed table at `options.path` has not needed for so long. Raises as `sources.managed.vacuum` does."""
        log, _, _ = self._managed(options, self._ufs.url_of(options.path))
        return vacuum(self._ufs, log, self._nonce(), older_than_s, force)

    def _nonce(self) -> str:
        return f"{self._context.rng.getrandbits(64):016x}"

    def _managed(self, options: LookupOptions, url: str) -> tuple[NotificationLog, Table, KeyedRows]:
        table = self.reader.resolver.to_managed_table(options)
        return (
            self.reader.resolver.log(url),
            table,
            KeyedRows(self.reader.versions.files, table, self.sizes.merge_bytes),
        )


class Runtime:
    """Stores, cache directories and engines of one process, each opened once, when first needed."""

    def __init__(
        self, clock: HostClock, rng: random.Random, sizes: WriteSizes | None = None, start: Start = in_thread
    ) -> None:
        self.pid = os.getpid()
        self.clock = clock
        self._rng = rng
        self._sizes = sizes or WriteSizes()
        self._start = start
        self._timer = Timer(start)
        self._lock = threading.RLock()  # reentrant: opening a store runs foreign code, which may open a table
        self._stores: dict[str, Store] = {}
        self._catalogs: dict[tuple[str, tuple[tuple[str, str], ...]], Catalog] = {}
        self._disks: dict[str, Disk | str] = {}  # or why the directory cannot be used
        # Engines in use, and recently used ones. A dropped engine is built again when needed, as in another process:
        # anything that must survive it is on disk.
        self._engines: weakref.WeakValueDictionary[str, Engine] = weakref.WeakValueDictionary()
        self._recent: collections.OrderedDict[str, Engine] = collections.OrderedDict()
        self._publishers: weakref.WeakValueDictionary[str, Publisher] = weakref.WeakValueDictionary()
        self._application = ""
        self._provided: dict[str, concurrent.futures.Future[ProvidedTable]] = {}

    def engine(self, options: LookupOptions) -> Engine:
        """The parts for a table reference. A cache directory that cannot be used is logged and done without."""
        provided_table = self._provided_table(options)
        with self._lock:
            key = key_of(options.path, options.catalog, options.catalog_properties, options.storage, options.cache_directory(), options.cache_max_bytes, options.max_retries, options.block_size, self._provided_key(options), options.cache)  # fmt: skip
            engine = self._engines.get(key)
            if engine is None:
                engine = self._engines[key] = self._build(options, provided_table)
            self._recent[key] = engine
            self._recent.move_to_end(key)
            idle = self._take_idle(key)
        if idle is not None:
            idle.suspend()
        return engine

    def _take_idle(self, requested_key: str) -> Engine | None:
        """An idle engine, dropped because too many are kept, but not the requested one. It is freed once nobody uses it."""
        for _ in range(_IDLE_PROBES if len(self._recent) > _ENGINES_KEPT else 0):
            key, engine = next(iter(self._recent.items()))
            if engine.reader.is_idle and key != requested_key:
                return self._recent.pop(key)
            self._recent.move_to_end(key)
        return None

    def of_application(self, name: str) -> None:
        """Count from now on for the Spark application with this id, whose worker this process is."""
        with self._lock:
            self._application = name
            for publisher in self._living_publishers():
                publisher.application = name

    def publish(self) -> None:
        """Put what was counted in this process where the host finds it."""
        for publisher in self._living_publishers():
            publisher.publish()

    def _living_publishers(self) -> list[Publisher]:
        """The publishers that exist now, listed in one step. Other threads add some meanwhile, and the lock may be held by one whose store hangs."""
        return [publisher for ref in self._publishers.valuerefs() if (publisher := ref()) is not None]

    def nonce(self) -> str:
        """16 hex digits that nobody else has drawn."""
        return f"{self._rng.getrandbits(64):016x}"

    def effective(self, options: LookupOptions) -> LookupOptions:
        """The options, completed by the provider that they name. Raises OptionError if it cannot be made or they contradict it."""
        provided_table = self._provided_table(options)
        return options if provided_table is None else with_provider(options, provided_table)

    def _provided_key(self, options: LookupOptions) -> str:
        made_with = (
            options.provider,
            options.provider_options,
            options.path,
            options.keys,
            options.columns,
            options.where,
        )
        calls = (options.max_retries, options.async_capacity, options.async_timeout_s)
        retries = (options.retry_predicate, options.retry_fixed_delay_s, options.retry_max_attempts)
        return key_of(*made_with, *calls, *retries, options.cache_directory()) if options.provider is not None else ""

    def _provided_table(self, options: LookupOptions) -> ProvidedTable | None:
        """The table of a provider, made by the first caller; others wait. Made outside the lock, because a factory may hang, or open a table."""
        if options.provider is None:
            return None
        key = self._provided_key(options)
        with self._lock:
            existing = self._provided.get(key)
            future = existing or self._provided.setdefault(key, concurrent.futures.Future())
        if existing is None:
            try:
                future.set_result(ProvidedTable(options, self.clock))
            except BaseException as problem:
                with self._lock:
                    del self._provided[key]
                future.set_exception(problem)
        return future.result()

    def _build(self, options: LookupOptions, provided_table: ProvidedTable | None) -> Engine:
        store = (
            self._open_store(options)
            if provided_table is None
            else ProvidedStore(provided_table, options, self.clock.wall_s)
        )
        url = store.url_of(options.path)
        check_apart(url, options.cache_directory())
        label = key_of(store.scope, url)
        # All references to one table share their counters, which are published once.
        place = key_of(label, options.cache_directory())
        publisher = self._publishers.get(place)
        metrics = publisher.metrics if publisher else CacheMetricGroup()
        ufs = Ufs(store, metrics, options.max_retries, self.clock.sleep)
        context = HostContext(self._disk(options, metrics), metrics, self.clock, self._rng, self._start, self._timer)
        if publisher is None:
            publisher = self._publishers[place] = Publisher(
                metrics, context.disk, label, redact("path", url), self.clock
            )
        publisher.application = self._application
        blocks = BlockCache(ufs, context, _BLOCK_WAIT_S)
        sources = SOURCES if provided_table is None else [functools.partial(ProviderSource, provided_table)]
        resolver = Resolver(ufs, blocks, context, sources, self._catalog(options))
        if provided_table is None:
            reader = TableReader(resolver, blocks, context, options.block_size)
        else:
            scan = ProvidedScan(provided_table, metrics)
            provider_parts = (scan, scan), provided_table.cache, provided_table.trigger
            reader = TableReader(resolver, blocks, context, options.block_size, *provider_parts)
        return Engine(reader, ufs, context, publisher, self._sizes)

    def _catalog(self, options: LookupOptions) -> Catalog | None:
        if options.catalog is None:
            return None
        key = options.catalog, options.catalog_properties
        if key not in self._catalogs:
            self._catalogs[key] = Catalog(*key)
        return self._catalogs[key]

    def _open_store(self, options: LookupOptions) -> Store:
        if options.catalog is None:
            return self._store(options.path, options)
        scope = json.dumps(options.storage, default=str)
        open_path = functools.partial(self._store, options=options)
        return CatalogStore(options.catalog, options.catalog_properties, open_path, scope)

    def _store(self, path: str, options: LookupOptions) -> Store:
        protocol = path.split("://", 1)[0] if "://" in path else "file"
        # URLs of other protocols may name a host, so there is one store per host, not per protocol.
        place = path.split("://", 1)[-1].split("/", 1)[0] if protocol not in ("file", "s3", "s3a", "s3n") else ""
        local = (
            protocol == "file" and options.catalog is not None
        )  # storage options are not for the catalog's local tables
        secrets = conf_file_secrets() if protocol != "file" else {}
        storage = {} if local else {**secrets, **options.storage_options()}
        key = key_of(protocol, place, sorted(storage.items()))
        if key not in self._stores:
            self._stores[key] = open_store(path, storage, self.clock.wall_s)
        return self._stores[key]

    def _disk(self, options: LookupOptions, metrics: CacheMetricGroup) -> Disk | None:
        directory = options.cache_directory()
        key = key_of(directory, options.cache_max_bytes)
        if key not in self._disks:
            try:
                disk = Disk(directory, options.cache_max_bytes, metrics, self.clock.wall_s, self._rng)
                disk.sweep()
                self._disks[key] = disk
                if memory_backed(directory):
                    _log.warning(
                        "cache directory %s lies in memory (tmpfs): set lookup.cache.dir to a local disk", directory
                    )
            except (CacheDirectoryError, OSError) as problem:
                instead = "going on without a cache, each read asks the store"
                log_event(
                    _log,
                    logging.WARNING,
                    "fallback",
                    table=redact("path", options.path),
                    reason=str(problem),
                    instead=instead,
                )
                self._disks[key] = str(problem)
        disk_or_reason = self._disks[key]
        if isinstance(disk_or_reason, str):
            metrics.inc("cacheFailureCount")
            return None
        # Tables share the directory, but each engine writes its own counters.
        return disk_or_reason.counting(metrics)

    def cache_problem(self, options: LookupOptions) -> str:
        """Why this process does without the cache directory that the options name."""
        reason = self._disks.get(key_of(options.cache_directory(), options.cache_max_bytes))
        return reason if isinstance(reason, str) else f"cache directory {options.cache_directory()} cannot be used"


_current: Runtime | None = None
_making = ForkSafeLock()
_inherited: list[
    Runtime
] = []  # never closed here: closing a connection may tell the server, which would end the parent's


def runtime() -> Runtime:
    """This process's runtime; a new one in a new process, also after a fork."""
    global _current
    current = _current
    if current is not None and current.pid == os.getpid():
        return current
    with _making:
        if _current is None or _current.pid != os.getpid():
            if _current is not None:
                _inherited.append(_current)
            _current = Runtime(HostClock(), random.Random())
        return _current


@atexit.register
def _at_exit() -> None:
    end_all()  # first, so that the counts of these threads are published, too
    # A forked child that has not used the runtime inherits its parent's, and must not publish it.
    if _current is not None and _current.pid == os.getpid():
        _current.publish()
