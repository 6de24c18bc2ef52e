"""Clocks and stores for tests: time that only moves when told, storage that fails when told."""

import contextlib
import dataclasses
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.lookup import planner
from pyspark_lookup.lookup.read import ReadPlan, ReadTask, ResolvedTable, TableReader, with_table_keys
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.sources.managed.data_files import WriteSizes
from pyspark_lookup.sources.managed.tables import ManagedTables
from pyspark_lookup.sources.registry import SOURCES, parse_options
from pyspark_lookup.storage.block_cache import BlockCache
from pyspark_lookup.storage.context import HostContext, Start, in_thread
from pyspark_lookup.storage.disk import Disk
from pyspark_lookup.storage.stores import LOCAL_GRANULE_S, FileVersion, Store, open_store
from pyspark_lookup.storage.ufs import Ufs
from pyspark_lookup.versions.model import Table
from pyspark_lookup.versions.resolver import Resolver, TableKinds

CACHES: dict[str, dict[str, str]] = {
    "NONE": {},
    "PARTIAL": {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "1000"},
    "FULL": {"lookup.cache": "FULL"},
}
"""The options of each cache mode, by its name."""
_hosts = itertools.count(7)  # two processes of a host draw different names


def wait_until_settled(*paths: Path) -> None:
    """Return once the files are older than the clock's granule: from then on their bytes are kept."""
    settled_s = max((path.stat().st_ctime for path in paths), default=0) + 2 * LOCAL_GRANULE_S
    while time.time() <= settled_s:
        threading.Event().wait(0.002)  # other tests go on


class FakeClock:
    """A host's clocks under a test's hand; sleeping moves them. `at_wall_s` starts far from any file's time."""

    def __init__(self, wall_s: float = 4_000_000_000.0) -> None:
        self.wall_s = wall_s
        self.steady_s = 1000.0
        self.slept: list[float] = []

    def tick(self, seconds: float) -> None:
        """Let time pass on both clocks."""
        self.wall_s += seconds
        self.steady_s += seconds

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.tick(seconds)

    def host(self, boot: str = "boot-1") -> HostClock:
        return HostClock(lambda: self.wall_s, lambda: self.steady_s, self.sleep, boot)


class Later:
    """Runs beside a test when the test says so: what was started waits in `waiting` as (name, function). `at_once`: loads do not."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, Callable[[], None]]] = []
        self.at_once = False

    def __call__(self, name: str, run: Callable[[], None]) -> None:
        if self.at_once and "-load-" in name:
            run()
        else:
            self.waiting.append((name, run))

    def loads(self) -> int:
        """Run the loads that wait, and those that they ask for; how many workers that were."""
        count = 0
        while loads := [entry for entry in self.waiting if "-load-" in entry[0]]:
            self.waiting.remove(loads[0])
            loads[0][1]()
            count += 1
        return count


_KINDS = {
    "get_meta": "head", "list_status": "list", "get_status": "status", "list_files": "files", "list_tree": "tree",
    "last_change_s": "change", "delete": "delete", "delete_many": "delete",
}  # fmt: skip
"""The calls of a store that a `FaultyStore` lists besides puts and reads, and their kinds."""


class FaultyStore:
    """A store that lists each call as (kind, subject) and runs `before(kind, subject)` ahead of it, and `after` a put has arrived.

    `before` may raise what the store would raise, or change the files underneath. A "get" is listed per range, as
    (kind, (url, offset, length)).
    """

    def __init__(self, inner: Store, before: Callable[[str, object], None] = lambda kind, subject: None) -> None:
        self._inner, self.before = inner, before
        self.after: Callable[[], None] = lambda: None
        self.calls: list[tuple[str, object]] = []

    def _note(self, kind: str, subject: object) -> None:
        self.calls.append((kind, subject))
        self.before(kind, subject)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if name not in _KINDS:
            return attribute

        def call(path: str, *args: Any) -> Any:
            self._note(_KINDS[name], path)
            return attribute(path, *args)

        return call

    def put_if_absent(self, path: str, *args: Any) -> FileVersion | None:
        self._note("put", path)
        version = self._inner.put_if_absent(path, *args)
        self.after()
        return version

    @contextlib.contextmanager
    def pin(self, file: FileVersion) -> Iterator[Callable[[int, int], bytes]]:
        with self._inner.pin(file) as read:

            def noted(offset: int, length: int) -> bytes:
                self._note("get", (file.url, offset, length))
                return read(offset, length)

            yield noted

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.calls]


@dataclasses.dataclass
class Host:
    """One process's engine over a `FaultyStore` and a cache directory, with its clock and counters."""

    store: FaultyStore
    ufs: Ufs
    disk: Disk | None
    blocks: BlockCache
    resolver: Resolver
    reader: TableReader
    managed: ManagedTables
    metrics: CacheMetricGroup
    clock: FakeClock

    def plan(
        self, options: LookupOptions, table: Table | None = None, columns: pa.Schema | None = None
    ) -> tuple[ResolvedTable, ReadPlan]:
        """What is there now, and the plan of a read of the columns that the options leave, or of these."""
        resolved = self.reader.find(options, table)
        columns = planner.table_columns(resolved, options) if columns is None else columns
        return resolved, planner.plan_read(
            resolved, with_table_keys(options, resolved.version), columns, self.clock.host()
        )

    def planned(
        self, path: Path, more: Mapping[str, str] | None = None, columns: pa.Schema | None = None
    ) -> tuple[ReadPlan, list[ReadTask]]:
        """The plan of a read of a path with these options, and its tasks."""
        options = {f"lookup.{key}": value for key, value in (more or {}).items()}
        resolved, plan = self.plan(parse_options({"path": str(path), **options}), None, columns)
        return plan, planner.plan_tasks(self.reader, resolved, plan)


def make_host(
    path: str,
    cache_dir: Path | None,
    clock: FakeClock | None = None,
    *,
    max_bytes: int = 2**30,
    max_retries: int = 0,
    wait_s: float = 5.0,
    boot: str = "boot-1",
    storage: dict[str, object] | None = None,
    start: Start = in_thread,
    opened: Store | None = None,
    name: str = "host",
) -> Host:
    """The engine as the runtime composes it, with its parts at hand. `cache_dir` None: no cache. `opened`: its store."""
    clock = clock or FakeClock()
    metrics = CacheMetricGroup()
    store = FaultyStore(opened or open_store(path, storage or {}, lambda: clock.wall_s))
    ufs = Ufs(store, metrics, max_retries, clock.sleep)
    disk = None
    if cache_dir is not None:
        disk = Disk(cache_dir, max_bytes, metrics, lambda: clock.wall_s, random.Random(7))
    context = HostContext(disk, metrics, clock.host(boot), random.Random(next(_hosts)), start, name=name)
    blocks = BlockCache(ufs, context, wait_s)
    resolver = Resolver(TableKinds(ufs, blocks, context, SOURCES), ufs, context)
    reader = TableReader(resolver, blocks, context, block_size=64 * 1024)
    managed = ManagedTables(resolver.kinds, ufs, context, reader.versions.files, WriteSizes())
    return Host(store, ufs, disk, blocks, resolver, reader, managed, metrics, clock)
