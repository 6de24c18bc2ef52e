"""`Runtime`: all that a process has open. For a table, as a path and options name it, this is an `Engine`.

The runtime is the only global object of the package. After a fork, the child makes a new one, because it must not use what its parent has
opened, such as a store's connections or a lock.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import logging
import os
import random
import socket
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pyspark_lookup.core.clock import HostClock, Timer
from pyspark_lookup.core.forks import ForkSafeLock, living
from pyspark_lookup.core.log_events import log_event
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.core.threads import end_all
from pyspark_lookup.errors import CacheDirectoryError, OptionError
from pyspark_lookup.lookup.read import TableReader
from pyspark_lookup.options.conf_file import conf_file_secrets, redact
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.sources.managed import TableWriter, WriteSizes
from pyspark_lookup.sources.managed.tables import ManagedTables
from pyspark_lookup.sources.opening import Opening
from pyspark_lookup.sources.registry import OPENERS, SOURCES
from pyspark_lookup.storage.block_cache import BlockCache
from pyspark_lookup.storage.context import HostContext, Start, in_thread
from pyspark_lookup.storage.disk import LAYOUT, SWEEP_EVERY_S, Disk, key_of, memory_backed
from pyspark_lookup.storage.host_metrics import Publisher
from pyspark_lookup.storage.stores import Store, open_store, with_vended
from pyspark_lookup.storage.ufs import Ufs
from pyspark_lookup.versions.model import Table, glob_reaches, glob_root, is_glob
from pyspark_lookup.versions.resolver import Resolver, TableKinds

_FILE = "file://"


def check_apart(url: str, cache: Path) -> None:
    """Raise OptionError if a local table lies in the cache directory, or the cache directory lies in the table, even if only by symbolic links.

    If it did, the cache would remove the table's files, or a read of the table would also read the cache's files.
    """
    if not url.startswith(_FILE):
        return
    path = url.removeprefix(_FILE)
    glob = is_glob(path) and not os.path.lexists(path)
    table = Path(glob_root(path) if glob else path)
    if _is_descendant(table, cache):
        raise OptionError(
            f"option path = {redact('path', url)!r} lies in the cache directory {cache}, where files are removed: "
            "keep tables elsewhere, or set lookup.cache.dir to another directory"
        )
    # The cache directory may lie below the root of a glob, if the glob matches none of the cache's own directories.
    pattern = os.path.realpath(table) + path.removeprefix(str(table)) if glob else ""
    if _is_descendant(cache, table) and (not glob or glob_reaches(f"{os.path.realpath(cache)}/{LAYOUT}", pattern)):
        raise OptionError(
            f"option lookup.cache.dir = {str(cache)!r} lies in the table {redact('path', url)}, which would be read with the cache's "
            "files in it: set lookup.cache.dir to a directory outside the table"
        )


def _is_descendant(path: Path, ancestor: Path) -> bool:
    """Whether a path is `ancestor` or lies below it, also by symbolic links. Neither of the two has to exist."""
    real, top = Path(os.path.realpath(path)), Path(os.path.realpath(ancestor))
    if real.is_relative_to(top):
        return True
    with contextlib.suppress(OSError):
        status = os.stat(top)
        return any(_is_same(directory, status) for directory in (real, *real.parents))
    return False


def _is_same(directory: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(directory), status)
    except OSError:
        return False


# --- engines, and the runtime ---------------------------------------------------------------------

_log = logging.getLogger("pyspark_lookup.runtime")
_BLOCK_WAIT_S = 60.0
# How many engines stay open without users. Each takes at least 25 kB, and keeps a file of counters open.
_ENGINES_KEPT = 256
_IDLE_PROBES = 16  # how many engines are examined to find an idle one
_PUBLISH_EVERY_S = 0.1


class Engine:
    """What this process has open for one table: the object that reads it, the object that writes managed tables, and the counters.

    `publish_every_s`: how often calls that follow each other closely publish their counters (0: each call does).
    """

    def __init__(
        self,
        reader: TableReader,
        ufs: Ufs,
        context: HostContext,
        publisher: Publisher,
        managed: ManagedTables,
        publish_every_s: float,
    ) -> None:
        self.reader = reader
        reader.fulls.owner = self
        self.managed = managed
        self.disk = context.disk
        self._ufs = ufs
        self._context = context
        self.last_table: Table | None = None  # the table that was at the path when a token was last issued
        self._publisher = publisher
        self._publish_every_s = publish_every_s
        self.steady_s = context.clock.steady_s
        self._sweep_from_s = self.steady_s() + SWEEP_EVERY_S  # `Runtime` has just swept the directory
        self._publish_from_s = 0.0
        self._publishes_later = False
        # The timer does not keep the engine: its counts are published before it is dropped (`suspend`).
        self._late_task = functools.partial(_publish_late, weakref.ref(self))
        self.host_metrics = publisher.host_total
        self.worker_metrics = publisher.by_worker
        self.remember_waiting = publisher.remember_waiting
        self.url_of = ufs.url_of

    def publish_metrics(self) -> None:
        """Publish this process's counters to the host's other processes. If it is time, also start to clean up the cache directory, in a thread."""
        self._publisher.publish()
        now_s = self.steady_s()
        self._publish_from_s = now_s + self._publish_every_s
        if self.disk is not None and now_s >= self._sweep_from_s:
            self._sweep_from_s = now_s + SWEEP_EVERY_S
            with contextlib.suppress(RuntimeError):  # there are too many threads, or the process ends
                self._context.start("lookupcache-sweep", self.disk.sweep)

    def publish_soon(self) -> None:
        """Publish the counters: now, or in a thread `publish_every_s` after they were published last. To publish costs nearly half as much as the
        rest of a warm `get`."""
        timer = self._context.timer
        if timer is None or self.steady_s() >= self._publish_from_s:
            self.publish_metrics()
        elif not self._publishes_later:
            self._publishes_later = True
            try:
                timer.run_soon(self._late_task)
            except RuntimeError:  # there are too many threads, or the process ends
                self._publishes_later = False
                self.publish_metrics()

    def publish_if_due(self) -> float | None:
        """Publish the counters that `publish_soon` has left, if it is time. Otherwise, returns the seconds until then."""
        wait_s = self._publish_from_s - self.steady_s()
        if wait_s > 0:
            return wait_s
        self._publishes_later = False  # before the numbers are read, so that later counts ask the timer again
        self.publish_metrics()
        return None

    def let_go(self, table_and_options: tuple[Table, LookupOptions] | None, user: object) -> None:
        """Close what only `user` has used; if there are no other users, also close the file of counters.

        `table_and_options`: the table that the user has read, with its options; None if the user has read none.
        """
        self.publish_metrics()
        if table_and_options is not None:
            self.reader.let_go(*table_and_options, user)
        if not self.reader.is_held:
            if self._context.timer is not None and self._publishes_later:
                self._publishes_later = False
                self._context.timer.remove(self._late_task)  # so that its thread ends
            self._publish_from_s = 0.0
            self._publisher.close()

    def suspend(self) -> None:
        """Publish the counters, and close their file until the next use of the engine."""
        self._publisher.publish()
        self._publisher.close()

    def time_lookup(self, started_s: float) -> None:
        """Count a lookup that began at `started_s`, a time of `steady_s`, and ends now."""
        self.reader.metrics.time("lookupTime", self.steady_s() - started_s)

    @contextlib.contextmanager
    def publish(self) -> Iterator[None]:
        """A `with` block after which the counters are published, even if it raises."""
        try:
            yield
        finally:
            self.publish_metrics()

    @contextlib.contextmanager
    def committing(self, options: LookupOptions) -> Iterator[TableWriter]:
        """A `with` block that gets the writer of `ManagedTables.committing`. Publishes the counters after the block, even if it raises."""
        with self.publish(), self.managed.committing(options) as writer:
            yield writer


def _publish_late(engine: weakref.ref[Engine]) -> float | None:
    """The timer's task of an engine. See `Engine.publish_if_due`."""
    living = engine()
    return None if living is None else living.publish_if_due()


class Runtime:
    """The stores, cache directories and engines of one process. Each is opened once, when it is first needed.

    `host`: the host's name (None: the name that the system says). `publish_every_s`: see `Engine`.
    """

    def __init__(
        self,
        clock: HostClock,
        rng: random.Random,
        sizes: WriteSizes | None = None,
        start: Start = in_thread,
        host: str | None = None,
        publish_every_s: float = 0.0,
    ) -> None:
        self.pid = os.getpid()
        self.clock = clock
        self._rng = rng
        self._sizes = sizes or WriteSizes()
        self._start = start
        self._host = host or socket.gethostname()
        self._timer = Timer(start)
        self._publish_every_s = publish_every_s
        self._lock = threading.RLock()  # reentrant: opening a store runs a user's code, which may open another table
        self._stores: dict[str, Store] = {}
        self._shared: dict[Any, Any] = {}  # objects that several sources of versions share, such as a catalog
        self._openers = [opener(clock) for opener in OPENERS]
        self._disks: dict[str, Disk | str] = {}  # a disk, or the reason why the directory cannot be used
        # The engines in use, and those that were used recently. A dropped engine is made again when it is needed, because all that must
        # outlast an engine is on disk.
        self._engines: weakref.WeakValueDictionary[str, Engine] = weakref.WeakValueDictionary()
        self._recent: collections.OrderedDict[str, Engine] = collections.OrderedDict()
        self._publishers: weakref.WeakValueDictionary[str, Publisher] = weakref.WeakValueDictionary()
        self._application = ""

    def engine(self, options: LookupOptions) -> Engine:
        """The engine for the table that options name. If the cache directory cannot be used, logs this; the engine then works without one."""
        opening = self._open(options)
        with self._lock:
            key = key_of(
                options.files.path,
                *((type(kind).__name__, kind.identity) for kind in options.set_kinds if kind.identity),
                options.storage,
                options.cache.mode,
                options.cache.directory(),  # however it is spelled
                options.cache.max_bytes,
                "" if opening is None else opening.key,
            )
            engine = self._engines.get(key)
            if engine is None:
                engine = self._engines[key] = self._build(options, opening)
            self._recent[key] = engine
            self._recent.move_to_end(key)
            idle = self._take_idle(key)
        if idle is not None:
            idle.suspend()
        return engine

    def _take_idle(self, requested_key: str) -> Engine | None:
        """Forget an idle engine, but not the requested one, if this process has too many engines. Returns the engine; None if none was forgotten."""
        for _ in range(_IDLE_PROBES if len(self._recent) > _ENGINES_KEPT else 0):
            key, engine = next(iter(self._recent.items()))
            if engine.reader.is_idle and key != requested_key:
                return self._recent.pop(key)
            self._recent.move_to_end(key)
        return None

    def of_application(self, name: str) -> None:
        """From now on, count under the id of the Spark application of which this process is a worker."""
        with self._lock:
            self._application = name
            for publisher in living(self._publishers):
                publisher.application = name

    def publish(self) -> None:
        """Publish this process's counters to the host's other processes."""
        for publisher in living(self._publishers):  # without the lock, which a thread whose store hangs may hold
            publisher.publish()

    def nonce(self) -> str:
        """16 random hex digits, which no other call returns."""
        return f"{self._rng.getrandbits(64):016x}"

    def effective(self, options: LookupOptions) -> LookupOptions:
        """The options, completed by the system that they name (such as a provider), if any.

        Raises OptionError if they contradict that system, or it cannot be opened.
        """
        opening = self._open(options)
        return options if opening is None else opening.complete(options)

    def _open(self, options: LookupOptions) -> Opening | None:
        if options.system is None:
            return None
        return next((opening for opener in self._openers if (opening := opener.open(options)) is not None), None)

    def _build(self, options: LookupOptions, opening: Opening | None) -> Engine:
        store = self._open_store(options) if opening is None else opening.store(self.clock.wall_s)
        url = store.url_of(options.files.path)
        check_apart(url, options.cache.directory())
        label = key_of(store.scope, url)
        # All engines of one table share their counters, so that these are published once.
        place = key_of(label, options.cache.directory())
        publisher = self._publishers.get(place)
        metrics = publisher.metrics if publisher else CacheMetricGroup()
        ufs = Ufs(store, metrics, options.storage.max_retries, self.clock.sleep)
        disk = self._disk(options, metrics)
        context = HostContext(disk, metrics, self.clock, self._rng, self._start, self._timer, self._host)
        if publisher is None:
            publisher = self._publishers[place] = Publisher(
                metrics, context.disk, label, redact("path", url), self.clock
            )
        publisher.application = self._application
        blocks = BlockCache(ufs, context, _BLOCK_WAIT_S)
        if opening is None:
            sources = [source.bind(options, self._shared) for source in SOURCES]
            resolver = Resolver(TableKinds(ufs, blocks, context, sources), ufs, context)
            reader = TableReader(resolver, blocks, context)
        else:
            resolver = Resolver(TableKinds(ufs, blocks, context, [opening.source]), ufs, context)
            scan = opening.scan(context)
            replaced = (scan, scan), opening.cache, opening.trigger
            reader = TableReader(resolver, blocks, context, *replaced)
        managed = ManagedTables(resolver.kinds, ufs, context, reader.versions.files, self._sizes)
        return Engine(reader, ufs, context, publisher, managed, self._publish_every_s)

    def _open_store(self, options: LookupOptions) -> Store:
        def open_url(url: str, with_storage: bool, credential_options: Mapping[str, Any] | None = None) -> Store:
            return self._store(url, options, with_storage, credential_options)

        stores = (source.open_store(options, open_url, self._shared, self.clock, self._rng) for source in SOURCES)
        return next((store for store in stores if store is not None), None) or self._store(options.files.path, options)

    def _store(
        self,
        path: str,
        options: LookupOptions,
        with_storage: bool = True,
        credential_options: Mapping[str, Any] | None = None,
    ) -> Store:
        if credential_options is not None:  # the caller keeps the store until the credentials are renewed
            return open_store(path, with_vended(options.storage.parameters, credential_options), self.clock.wall_s)
        protocol = path.split("://", 1)[0] if "://" in path else "file"
        # A URL of another protocol may name a host, so there is a store for each host.
        place = path.split("://", 1)[-1].split("/", 1)[0] if protocol not in ("file", "s3", "s3a", "s3n") else ""
        secrets = conf_file_secrets() if protocol != "file" else {}
        storage = {**secrets, **dict(options.storage.parameters)} if with_storage else {}
        key = key_of(protocol, place, sorted(storage.items()))
        if key not in self._stores:
            self._stores[key] = open_store(path, storage, self.clock.wall_s)
        return self._stores[key]

    def _disk(self, options: LookupOptions, metrics: CacheMetricGroup) -> Disk | None:
        directory = options.cache.directory()
        key = key_of(directory, options.cache.max_bytes)
        if key not in self._disks:
            try:
                disk = Disk(directory, options.cache.max_bytes, metrics, self.clock.wall_s, self._rng)
                disk.sweep()
                self._disks[key] = disk
                if memory_backed(directory):
                    _log.warning(
                        "cache directory %s lies in memory (tmpfs): set lookup.cache.dir to a local disk", directory
                    )
            except (CacheDirectoryError, OSError) as problem:
                instead = "working without a cache: each read asks the store"
                log_event(
                    _log,
                    logging.WARNING,
                    "fallback",
                    table=redact("path", options.files.path),
                    reason=str(problem),
                    instead=instead,
                )
                self._disks[key] = str(problem)
        disk_or_reason = self._disks[key]
        if isinstance(disk_or_reason, str):
            metrics.inc("cacheFailureCount")
            return None
        # Tables share the directory, but each table has its own counters.
        return disk_or_reason.counting(metrics)

    def cache_problem(self, options: LookupOptions) -> str:
        """The reason why this process works without the cache directory that the options name."""
        reason = self._disks.get(key_of(options.cache.directory(), options.cache.max_bytes))
        return reason if isinstance(reason, str) else f"cache directory {options.cache.directory()} cannot be used"


_current: Runtime | None = None
_making = ForkSafeLock()
# The runtimes of parent processes. They stay here and are never closed: to close a connection may tell the server, which would then end the
# parent's connection, too.
_inherited: list[Runtime] = []


def runtime() -> Runtime:
    """This process's runtime; a new one in a new process, also after a fork."""
    global _current
    current = _current
    if current is not None and current.pid == os.getpid():
        return current
    with _making:
        if _current is None or _current.pid != os.getpid():
            publish_every_s = _PUBLISH_EVERY_S
            if _current is not None:
                _inherited.append(_current)
                publish_every_s = 0.0  # a forked child may end by `os._exit`, without notice
            _current = Runtime(HostClock(), random.Random(), publish_every_s=publish_every_s)
            _publish_at_end_of_child()
        return _current


def _publish_at_end_of_child() -> None:
    """Have a child process of `multiprocessing` publish its counters before it ends. It does not call what `atexit` has registered."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None and sys.modules["multiprocessing.process"].parent_process() is not None:
        util.Finalize(None, _at_exit, exitpriority=0)


@atexit.register
def _at_exit() -> None:
    end_all()  # ends the package's threads first, so that their counts are published, too
    # A forked child that has not used the runtime still has its parent's runtime, whose counts it must not publish.
    if _current is not None and _current.pid == os.getpid():
        _current.publish()
