"""Reads a version of a table.

The process that plans a read passes a `ReadPlan` and `ReadTask`s to the processes that read; there, `TableReader` reads the rows of a task. A
task that finds its version only when it reads returns no batch before all bytes that it needs are in memory or in this host's cache. Until then
it can begin again with a newer version, without mixing rows of two versions. `HostSchemas` caches the columns of versions by digest, because a
version never changes.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from pyspark_lookup.cache.full.full_cache import FullCache, FullTables
from pyspark_lookup.cache.full.loader import Layout
from pyspark_lookup.cache.full.snapshot import Snapshot, snapshot_batches
from pyspark_lookup.cache.memory import LookupCache
from pyspark_lookup.cache.partial import PartialTables
from pyspark_lookup.cache.partial.change_log import FindChanges
from pyspark_lookup.columnar.keys import Numbers, check_key_types
from pyspark_lookup.columnar.predicate import ColumnStats, Predicate, referenced_columns
from pyspark_lookup.columnar.sql_predicate import parse_where
from pyspark_lookup.columnar.types import resolve_names, schema_of_text, text_of_schema, unreadable
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.decoding import as_text
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.errors import CHANGED_KIND, SourceChangedError, UfsNotFoundError, VersionGoneError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import CacheMode, MetadataSource
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.options.reload_trigger import CacheReloadTrigger
from pyspark_lookup.scan.open_file import Latest, Projection, Slice
from pyspark_lookup.scan.table_scan import (
    PreparedScan,
    Scan,
    TableScan,
    all_columns,
    collect_table,
    cut_shares,
    to_slices,
)
from pyspark_lookup.storage.block_cache import BlockCache
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import key_of
from pyspark_lookup.storage.stores import SETTLED_AFTER_S, FileVersion
from pyspark_lookup.versions.executions import Execution, Resolution, read_with_restarts
from pyspark_lookup.versions.file_columns import ColumnFiles
from pyspark_lookup.versions.model import Table, TableVersion, are_cacheable, require_metadata, select_partitions
from pyspark_lookup.versions.resolver import Resolver

_AT_MOST = 8  # versions whose columns a process keeps in memory


class HostSchemas:
    """Finds the columns of versions. `scan` reads them from the files; this process and the host's cache directory keep them."""

    def __init__(self, scan: TableScan, context: HostContext) -> None:
        self._scan = scan
        self._context = context
        self._schemas = Latest[tuple[pa.Schema, pa.Schema]](_AT_MOST)

    def get_columns(self, table: Table, version: TableVersion) -> tuple[pa.Schema, pa.Schema]:
        """(columns in the files, partition columns) of a version, from the table's metadata or, if it has none, from the files."""
        if version.metadata is not None or table.retained:
            return require_metadata(table, version).columns
        if not version.cacheable:
            return self._scan.schema(table, version.files)
        key = key_of(version.digest, table.format)
        schemas = self._schemas.get((key,)) or self._keep(table, version, key)
        self._schemas.put((key,), schemas, 1)
        return schemas

    def _keep(self, table: Table, version: TableVersion, key: str) -> tuple[pa.Schema, pa.Schema]:
        disk = self._context.disk
        record: tuple[pa.Schema, pa.Schema] | None = disk.get_record("schema", key, _parse_schemas) if disk else None
        if record is not None:
            return record
        schemas = self._scan.schema(table, version.files)
        if disk:
            try:
                disk.replace_record("schema", key, [text_of_schema(schema) for schema in schemas])
            except OSError:
                self._context.metrics.inc("cacheFailureCount")
        return schemas


def _parse_schemas(texts: Any) -> tuple[pa.Schema, pa.Schema]:
    data, partitions = map(schema_of_text, texts)
    return data, partitions


@dataclasses.dataclass(frozen=True)
class ResolvedTable:
    """A table, its version that a read has found, and the columns of this version: `data` in the files, `partitions` the partition columns."""

    table: Table
    version: TableVersion
    data: pa.Schema
    partitions: pa.Schema

    @property
    def columns(self) -> pa.Schema:
        """All columns, in the order of the declared schema or of the table's metadata. If there is neither, the partition columns come last."""
        everything = all_columns((self.data, self.partitions))
        declared, metadata = self.table.declared, self.version.metadata
        if declared is not None:
            names = declared.names
        elif metadata is not None:
            names = metadata.all_columns.names
        else:
            return everything
        return pa.schema([everything.field(name) for name in names])


def with_table_keys(options: LookupOptions, version: TableVersion) -> LookupOptions:
    """The options, with the table's key columns if the options name none."""
    metadata = version.metadata
    if options.files.keys is not None or metadata is None or not metadata.keys:
        return options
    return options.with_values({"lookup.keys": metadata.keys})


@dataclasses.dataclass(frozen=True)
class ReadPlan:
    """What a query reads of a table. `id`: a text that no other plan has. `number`: the number of the planned version, if versions have numbers.

    `planned_s`: when the plan was made, on the steady clock of the machine start that `boot` names.
    """

    id: str
    options: LookupOptions
    table: Table
    projection: Projection
    planned_s: float
    boot: str
    number: int | None = None

    @property
    def needed_columns(self) -> list[str]:
        """The columns that are returned, then those that only the predicate needs."""
        return self.projection.needed_columns

    def age_s(self, clock: HostClock) -> float | None:
        """The plan's age in seconds; None on another host, whose clock cannot be compared."""
        return clock.steady_s() - self.planned_s if clock.boot == self.boot else None


@dataclasses.dataclass(frozen=True)
class ReadTask:
    """One task of a plan: it reads share `number` of `count` shares of a version.

    `digest`, `pieces`: the version, and the parts of its files that the task reads. Both are None if the task finds the version when it reads.
    `catalog_id`: see `VersionSource.catalog_id`. `by_key`: the plan names the keys of its rows, so the rows are looked up by key.
    """

    number: int
    count: int
    pieces: tuple[Slice, ...] | None = None
    digest: str | None = None
    catalog_id: str | None = None
    by_key: bool = False


# --- one version ----------------------------------------------------------------------------------

_SECURED_AT_MOST = 15
_SELECTED_AT_MOST = 4


class VersionReader:
    """Reads the columns and rows of given versions. `scan`: reads rows for queries. `load_scan`: reads rows for a full cache."""

    def __init__(self, scan: TableScan, load_scan: TableScan, context: HostContext) -> None:
        self._scan, self._load_scan = scan, load_scan
        self._schemas = HostSchemas(scan, context)
        self._selected = Latest[TableVersion](_SELECTED_AT_MOST)
        self._secured: set[str] = set()  # keys of the versions that `secure` has copied last

    def schema(self, table: Table, version: TableVersion) -> tuple[pa.Schema, pa.Schema]:
        """(columns in the files, partition columns) of a version."""
        return self._schemas.get_columns(table, version)

    def data_schema(self, table: Table, version: TableVersion) -> pa.Schema:
        """The columns in the files of a version."""
        return self.schema(table, version)[0]

    def splittable(self, table: Table) -> bool:
        """Whether the rows of one file may go to several tasks."""
        return self._scan.splittable(table)

    def rows(self, table: Table, options: LookupOptions, version: TableVersion) -> int | None:
        """The number of rows of a version, in the partitions that `lookup.partition` selects; None if the rows would have to be read for this."""
        return self._scan.rows(table, select_partitions(table, version, options))

    @property
    def reads_all_rows(self) -> bool:
        """Whether the table can be read as a whole; False if rows can only be looked up by key."""
        return self._scan.reads_all_rows

    def rows_by_key(self, keys: pa.Table, columns: pa.Schema, ages_s: Numbers | None = None) -> pa.Table | None:
        """The rows of `keys` in a table whose rows can be looked up by key; None for a table of files. As `TableScan.rows_by_key`."""
        return self._scan.rows_by_key(keys, columns, ages_s)

    @property
    def looks_up_keys(self) -> bool:
        """Whether `rows_by_key` returns rows."""
        return self._scan.looks_up_keys

    @property
    def dates_rows(self) -> bool:
        """As `TableScan.dates_rows`."""
        return self._scan.dates_rows

    @property
    def changed_keys(self) -> FindChanges | None:
        """`TableScan.changed_keys`; None if no version of the table has known changes."""
        return self._scan.changed_keys if self._scan.tells_changes else None

    def layout(self, table: Table, options: LookupOptions, version: TableVersion) -> Layout:
        """The columns of a version that the full cache and the partial cache store."""
        data, partitions = self.schema(table, version)
        everything = all_columns((data, partitions))
        keys = resolve_names(options.files.keys or (), everything, "lookup.keys")
        check_key_types([everything.field(name) for name in keys])
        names = {field.name for field in everything if unreadable(field.type) is None}
        if options.read.columns is not None:
            names = {*keys, *resolve_names(options.read.columns, everything, "lookup.columns")}
            names |= referenced_columns(parse_where(options.read.where, everything)) if options.read.where else set()
        columns = pa.schema([field for field in everything if field.name in names])
        return Layout(columns, tuple(keys), data, partitions, table.declared is not None)

    def rows_where(
        self,
        plan: ReadPlan,
        layout: Layout,
        version: TableVersion,
        files: Sequence[FileVersion],
        predicate: Predicate | None,
    ) -> pa.Table:
        """The rows of some `files` of a version for which `predicate` is true, with all columns of `layout`.

        Raises SourceChangedError if a file was replaced or removed.
        """
        projection = dataclasses.replace(layout.projection, predicate=predicate)
        prepared = self.prepare(plan.table, version, to_slices(files), projection)
        return collect_table(prepared.batches(), layout.columns, plan.table.url)

    def files(self, keep: bool = True) -> TableScan:
        """The scan with which to read files. `keep`: this host's cache keeps the bytes that are read."""
        return self._scan if keep else self._load_scan

    def secure(self, table: Table, options: LookupOptions, version: TableVersion) -> None:
        """Copy a version's bytes to this host's cache, where they stay the same if the files are replaced.

        Raises SourceChangedError if a file was replaced or removed before it was copied.
        """
        place = key_of(version.digest, options.read.columns, options.read.where, options.files.partition)
        if place in self._secured:
            return
        layout = self.layout(table, options, version)
        files = select_partitions(table, version, options)
        self.prepare(table, version, to_slices(files), layout.projection)
        if are_cacheable(files):  # otherwise nothing was cached
            self._secured = {*list(self._secured)[-_SECURED_AT_MOST:], place}

    def select(self, table: Table, options: LookupOptions, version: TableVersion) -> TableVersion:
        """The version with only the files that `lookup.partition` selects. Raises the errors of `select_partitions`."""
        if options.files.partition is None:
            return version
        place = version.digest, table.id, options.files.partition
        selected = self._selected.get(place)
        if selected is None:
            selected = version.of_files(select_partitions(table, version, options))
            if version.is_settled:
                self._selected.put(place, selected, 1)
        return selected

    def key_bounds(self, table: Table, layout: Layout, files: Sequence[FileVersion]) -> list[list[ColumnStats | None]]:
        """For each file, the statistics of each key column."""
        keys = pa.schema([layout.columns.field(name) for name in layout.keys])
        return self._scan.bounds(table, files, layout.partitions, keys)

    def read_files(self, plan: ReadPlan, version: TableVersion) -> Iterator[pa.RecordBatch]:
        """All planned rows of a version, from its files. Raises SourceChangedError if a file was replaced or removed."""
        pieces = to_slices(select_partitions(plan.table, version, plan.options))
        return self.prepare(plan.table, version, pieces, plan.projection).batches()

    def prepare(
        self, table: Table, version: TableVersion, pieces: Sequence[Slice], projection: Projection
    ) -> PreparedScan:
        """Parts of a version's files, ready to be decoded. Raises SourceChangedError if a file was replaced or removed."""
        return self._scan.prepare(table, pieces, projection, functools.partial(self.data_schema, table, version))


# --- snapshots ------------------------------------------------------------------------------------


class SnapshotReader:
    """Finds the snapshot of a full cache from which a query can read."""

    def __init__(
        self, resolver: Resolver, versions: VersionReader, fulls: FullTables, metrics: CacheMetricGroup
    ) -> None:
        self._resolver = resolver
        self._versions = versions
        self._fulls = fulls
        self._metrics = metrics

    def resolve(
        self, plan: ReadPlan, execution: Execution | None, version: TableVersion | None = None, exact: bool = False
    ) -> tuple[Resolution, Snapshot | None]:
        """(the version that `execution` reads, its snapshot, or None if there is none from which the plan can be read).

        `version`: the current version, if the caller has just resolved it; a full cache in CACHE mode answers from its own version instead.
        `exact`: only a snapshot of the same files counts, because the caller reads only parts of the files.
        """
        resolution, snapshot = self._resolve(plan, execution, version, exact)
        if version is None and resolution.decided_here:
            self._resolver.count_asked(resolution.version)
        return resolution, snapshot

    def _resolve(
        self, plan: ReadPlan, execution: Execution | None, version: TableVersion | None, exact: bool
    ) -> tuple[Resolution, Snapshot | None]:
        table, options = plan.table, plan.options
        full = self._fulls.get_cache(table, options)
        if full is not None and options.version.source is MetadataSource.CACHE:
            latest = self.current(table, options)
            if latest is not None:
                served_version, snapshot = latest
                resolution = self._resolver.resolve(table, options, execution, lambda: served_version)
                if resolution.version.digest == served_version.digest:
                    return resolution, self.covering(plan, snapshot)
                return resolution, self._find_in(full, plan, resolution.version, exact)
            # The last version that this host knows may be older than its last reload, so the store is asked.
            current: Callable[[], TableVersion] | None = functools.partial(
                self._resolver.current_versions.refresh, table
            )
        else:
            current = None
        if version is not None:
            resolution = Resolution(version, True)
        else:
            resolution = self._resolver.resolve(table, options, execution, current)
        return resolution, self._find_in(full, plan, resolution.version, exact)

    def current(self, table: Table, options: LookupOptions) -> tuple[TableVersion, Snapshot] | None:
        """(the version, the snapshot) from which a full cache answers in CACHE mode. Waits for the first load.

        None without such a full cache. Also None if the snapshot lacks a commit of this host: then a reload starts, and the caller must ask the
        store; and if the table's catalog must be asked whether this principal may read the table.
        """
        full = self._fulls.get_cache(table, options)
        latest = full.current() if full is not None and options.version.source is MetadataSource.CACHE else None
        if latest is not None and not self._is_authorised(table, latest[0]):
            return None
        if full is None or latest is None or self._resolver.host.includes_own_writes(table, options, latest[0]):
            return latest
        full.ask_reload()
        return None

    def _is_authorised(self, table: Table, version: TableVersion) -> bool:
        return self._resolver.kinds.source(table).is_authorised(table, version)

    def unchanged(
        self, full: FullCache, table: Table, options: LookupOptions, version: TableVersion
    ) -> Snapshot | None:
        """The snapshot of a version, if a full cache in CACHE mode still answers from it and needs no reload; otherwise None.

        Also None if the snapshot lacks a commit of this host, and if the table's catalog must be asked whether this principal may read the table.
        """
        snapshot = full.unchanged(version)
        if snapshot is None or not self._resolver.host.includes_own_writes(table, options, version):
            return None
        if not self._is_authorised(table, version):
            return None
        self._metrics.inc("metadataCacheCount")
        return snapshot

    def get(
        self,
        table: Table,
        options: LookupOptions,
        version: TableVersion,
        wait_s: float | None = None,
        exact: bool = False,
    ) -> Snapshot | None:
        """The snapshot of a version, which in UFS mode is built if there is none; None if there is no full cache, or the build takes too long.

        `wait_s`: how long to wait for a build (None: `lookup.full-cache.build-wait`). `exact`: as in `FullCache.build`.
        """
        full = self._fulls.get_cache(table, options)
        return None if full is None else _get_from(full, options, version, wait_s, exact)

    def find(self, plan: ReadPlan, version: TableVersion, exact: bool = False) -> Snapshot | None:
        """The snapshot of a version, as `get` returns it, if it has all columns that the plan needs; otherwise None."""
        return self._find_in(self._fulls.get_cache(plan.table, plan.options), plan, version, exact)

    def _find_in(self, full: FullCache | None, plan: ReadPlan, version: TableVersion, exact: bool) -> Snapshot | None:
        return None if full is None else self.covering(plan, _get_from(full, plan.options, version, None, exact))

    def covering(self, plan: ReadPlan, snapshot: Snapshot | None) -> Snapshot | None:
        """`snapshot` if it has all columns that the plan needs; otherwise None. A metric counts how often the result is None."""
        selects_columns = plan.options.read.columns is not None
        if selects_columns and snapshot is not None and not set(plan.needed_columns) <= set(snapshot.schema.names):
            snapshot = None
        if snapshot is None:
            self._metrics.inc("snapshotReadThroughCount")
        return snapshot

    def batches(
        self, plan: ReadPlan, snapshot: Snapshot, version: TableVersion, pieces: Sequence[Slice] | None
    ) -> Iterator[pa.RecordBatch]:
        """The planned rows in a snapshot. `pieces`: only the rows of these parts of the version's files; None: all rows."""
        ranges = None if pieces is None else [(p.file.url, p.start, p.end) for p in pieces]
        read_schema = functools.partial(self._versions.data_schema, plan.table, version)
        return snapshot_batches(
            snapshot, plan.projection, ranges, read_schema, redact("path", plan.table.url), self._metrics
        )


def _get_from(
    full: FullCache, options: LookupOptions, version: TableVersion, wait_s: float | None, exact: bool
) -> Snapshot | None:
    if options.version.source is MetadataSource.CACHE:
        return full.find(version)
    return full.build(version, options.full_cache.build_wait_s if wait_s is None else wait_s, exact)


# --- a table --------------------------------------------------------------------------------------

_log = logging.getLogger("pyspark_lookup.reader")
_BLOCK_BYTES = 4 * 1024 * 1024
_STARTS = 5  # if the table changes during this many attempts in a row, this is an error


class TableReader:
    """Reads a table in this process.

    `scans`: the scan for queries and the scan for full caches (None: scans of files). `cache`, `trigger`: used instead of the partial cache and
    the reload strategy that the options describe. `block_size`: the size in bytes of the ranges that are read of CSV, JSON and ORC files.
    """

    def __init__(
        self,
        resolver: Resolver,
        blocks: BlockCache,
        context: HostContext,
        scans: tuple[TableScan, TableScan] | None = None,
        cache: LookupCache | None = None,
        trigger: CacheReloadTrigger | None = None,
        block_size: int = _BLOCK_BYTES,
    ) -> None:
        self.resolver, self.kinds, self.current_versions = resolver, resolver.kinds, resolver.current_versions
        self.host = resolver.host
        self.metrics = context.metrics
        self._context = context
        self._users: weakref.WeakSet[object] = weakref.WeakSet()
        # A load of a full cache reads each file once, and the snapshot then has its rows. So the bytes that it reads need not be cached.
        self._scan, load_scan = scans or (
            Scan(blocks, context.metrics, block_size),
            Scan(blocks.read_only(), context.metrics, block_size, rereads=False),
        )
        self.versions = VersionReader(self._scan, load_scan, context)
        self.partials = PartialTables(context, cache)
        self.fulls = FullTables(load_scan, self.kinds, self.current_versions, self.versions.layout, context, trigger)
        self.snapshots = SnapshotReader(resolver, self.versions, self.fulls, context.metrics)

    def now_s(self) -> float:
        """The time on the host's steady clock, by which requests for the current version are ordered."""
        return self._context.clock.steady_s()

    def find(
        self, options: LookupOptions, last_table: Table | None = None, last: ResolvedTable | None = None
    ) -> ResolvedTable:
        """The table that is at `options.files.path` now, with its columns.

        Makes one metadata call, and reads what it needs to find the columns. `last_table`: the table that was last at the path; with it, a file
        costs a HEAD instead of a LIST. `last`: what the last call with the same options returned; it is returned again if nothing has changed. If a
        file is replaced before its schema was read, the newer version is read. Raises the errors of `Resolver.discover` and
        `VersionReader.schema`, and VersionGoneError if the table keeps changing.
        """
        began_s = self.now_s()
        table, version = self._discover(options, last_table, last)
        try:
            version = self._serve(options, table, version, began_s)
        except CHANGED_KIND:
            if not self.kinds.forget_kind(table):
                raise
            table, version = self.resolver.discover(options)
            version = self._serve(options, table, version, began_s)
        if (
            options.cache.mode is CacheMode.NONE
            and version.bytes > options.read.split_size
            and self.kinds.lacks_files(version)
        ):
            # A job has removed files of this version. Tasks could not read these files, and could not go on with a newer version either.
            version = self.resolver.resolve_again(table, options, None, version.digest)
        # `last.version`, not `version`: the columns of `last` may come from files that were too new to be trusted.
        if (
            last is not None
            and last.table is table
            and last.version.digest == version.digest
            and last.version.cacheable
        ):
            return last if last.version is version else dataclasses.replace(last, version=version)
        (data, partitions), version = read_with_restarts(
            table,
            version,
            functools.partial(self.versions.schema, table),
            lambda gone, _: self.resolver.resolve_again(table, options, None, gone.digest),
        )
        return ResolvedTable(table, version, data, partitions)

    def _discover(
        self, options: LookupOptions, last_table: Table | None, last: ResolvedTable | None
    ) -> tuple[Table, TableVersion]:
        if last_table is None:
            return self.resolver.discover(options)
        if last_table.pinned != options.pinned:
            last_table = dataclasses.replace(last_table, pinned=options.pinned)
        try:
            version = self.resolver.resolve(last_table, options, None).version
        except CHANGED_KIND:
            # There may be a table of another kind now, e.g. a directory instead of a file. If nothing is at the path, `resolve` has already waited
            # for a job to write it, so `discover` need not wait again.
            return self.resolver.discover(options, patient=False)
        if last is not None and last.table is last_table and last.version.digest == version.digest:
            return last_table, version
        return self.kinds.to_table(options, last_table.kind, version), version

    def _serve(self, options: LookupOptions, table: Table, version: TableVersion, began_s: float) -> TableVersion:
        """The version to read: that of the latest snapshot, if a full cache in CACHE mode answers; otherwise `version`.

        The snapshot may be older than `version`, the last version that this host knows. `began_s`: when the read began (steady clock).
        """
        if options.version.source is not MetadataSource.CACHE:
            return version
        full = self.fulls.get_cache(table, with_table_keys(options, version))
        if full is None:
            return version
        latest = full.latest()
        if latest is None:  # there is no snapshot yet, so the store's version is read
            return self.current_versions.learn_newer(table, began_s)
        has_own_writes = self.host.includes_own_writes(table, options, latest)
        return latest if has_own_writes and self.kinds.source(table).is_authorised(table, latest) else version

    def replace(
        self, plan: ReadPlan, resolution: Resolution, execution: Execution | None, change: SourceChangedError
    ) -> TableVersion:
        """The version to read instead, if a file of the resolved version is gone. Raises VersionGoneError if `lookup.on-version-gone` forbids this."""
        if not resolution.decided_here and plan.table.fails_when_gone(plan.options):
            raise self._version_gone(plan, change, resolution.version.number) from change
        return self.resolver.resolve_again(plan.table, plan.options, execution, resolution.version.digest)

    def read(
        self, plan: ReadPlan, task: ReadTask, execution: Execution | None, version: TableVersion | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a task, in batches with the plan's columns, all from one version.

        `version`: the current version, if the caller has just resolved it. Raises VersionGoneError if a file was replaced and
        `lookup.on-version-gone` forbids to read a newer version, SchemaError if the table no longer has the planned columns, UfsError or
        NotATableError if the table cannot be read.
        """
        if task.pieces is not None:
            self.kinds.source(plan.table).authorise(plan.table, task.catalog_id)
            self._tell_age(plan, execution)
            planned_version = (
                self.current_versions.find_recorded(plan.table, task.digest) if task.digest is not None else None
            )
            if planned_version is not None:
                if task.number == 0:
                    self.resolver.count_asked(planned_version)
                snapshot = self.snapshots.find(plan, planned_version, exact=task.count > 1)
                if snapshot is not None:
                    return self.snapshots.batches(
                        plan, snapshot, planned_version, task.pieces if task.count > 1 else None
                    )
            return self._prepare_planned(plan, task, task.pieces, execution).batches()
        resolution, snapshot = self.snapshots.resolve(plan, execution, version, exact=task.count > 1)
        files = select_partitions(plan.table, resolution.version, plan.options)
        pieces: Sequence[Slice] = (
            to_slices(files)
            if task.count == 1 and isinstance(files, ColumnFiles)
            else cut_shares(files, [task.number], task.count, self.versions.splittable(plan.table))[0]
        )
        if snapshot is not None:
            return self.snapshots.batches(plan, snapshot, resolution.version, pieces if task.count > 1 else None)
        return self._from_files(plan, task, execution, resolution, pieces)

    def _from_files(
        self,
        plan: ReadPlan,
        task: ReadTask,
        execution: Execution | None,
        resolution: Resolution,
        pieces: Sequence[Slice],
    ) -> Iterator[pa.RecordBatch]:
        try:
            prepared = self.versions.prepare(plan.table, resolution.version, pieces, plan.projection)
        except SourceChangedError as change:
            if task.count > 1:
                prepared = self._newer_files(plan, pieces, resolution.version, execution, change)
            elif not resolution.decided_here and plan.table.fails_when_gone(plan.options):
                # Other tasks of this execution may have answered from the lost version.
                raise self._version_gone(plan, change, resolution.version.number) from change
            else:
                prepared = self._restart(plan, resolution.version, execution)
        return prepared.batches()

    def _prepare_planned(
        self, plan: ReadPlan, task: ReadTask, pieces: tuple[Slice, ...], execution: Execution | None
    ) -> PreparedScan:
        """The prepared scan of a task whose version was chosen when the read was planned."""
        age_s = plan.age_s(self._context.clock)
        if age_s is not None and age_s > SETTLED_AFTER_S:
            # When the read was planned, a file may have been so new that a change might not have shown in its identity, so it was not to be
            # cached. By now it is old enough.
            pieces = tuple(dataclasses.replace(p, file=dataclasses.replace(p.file, settled=True)) for p in pieces)
        try:
            return self._scan.prepare(plan.table, pieces, plan.projection)
        except SourceChangedError as change:
            planned_version = TableVersion(plan.table.id, tuple(piece.file for piece in pieces))
            if task.count > 1:
                return self._newer_files(plan, pieces, planned_version, execution, change)
            if plan.table.fails_when_gone(plan.options):
                raise self._version_gone(plan, change, plan.number) from change
            return self._restart(plan, planned_version, execution)

    def _restart(self, plan: ReadPlan, lost_version: TableVersion, execution: Execution | None) -> PreparedScan:
        """The prepared scan of the version that replaced `lost_version`, for the only task of a read, which has returned no rows yet."""

        def read(version: TableVersion) -> PreparedScan:
            pieces = to_slices(select_partitions(plan.table, version, plan.options))
            return self.versions.prepare(plan.table, version, pieces, plan.projection)

        def resolve_again(version: TableVersion, change: SourceChangedError | None = None) -> TableVersion:
            return self.resolver.resolve_again(plan.table, plan.options, execution, version.digest)

        return read_with_restarts(plan.table, resolve_again(lost_version), read, resolve_again)[0]

    def _newer_files(
        self,
        plan: ReadPlan,
        pieces: Sequence[Slice],
        lost_version: TableVersion,
        execution: Execution | None,
        change: SourceChangedError,
    ) -> PreparedScan:
        """The prepared scan of one of several tasks, after files have changed: it reads each replaced file in its new state.

        Two cases are errors even if newer versions are allowed. If the task reads only a part of a replaced file, other tasks may have read
        other parts in its old state. If a file was removed, its rows may now be in any other file.
        """
        if plan.table.fails_when_gone(plan.options):
            raise self._version_gone(plan, change, plan.number) from change
        for _ in range(_STARTS):
            try:
                version = self.resolver.resolve_again(plan.table, plan.options, execution, lost_version.digest)
            except UfsNotFoundError as missing:
                raise self._version_gone(plan, change, plan.number) from missing
            current = {file.url: file for file in version.files}
            new_pieces = []
            for piece in pieces:
                file = current.get(piece.file.url)
                if file == piece.file:
                    new_pieces.append(piece)
                elif file is not None and piece.whole:
                    new_pieces.append(Slice(file, 0, file.size))
                else:
                    raise self._version_gone(plan, change, plan.number) from change
            try:
                return self._scan.prepare(plan.table, new_pieces, plan.projection)
            except SourceChangedError as another_change:
                change, lost_version = another_change, version
        raise self._version_gone(plan, change, plan.number) from change

    def _version_gone(self, plan: ReadPlan, change: SourceChangedError, number: int | None) -> VersionGoneError:
        self.metrics.inc("versionGoneCount")
        label = "the version" if number is None else f"version {number}"
        return VersionGoneError(
            f"{label} of {redact('path', plan.table.url)}, which this query had chosen, is gone: {change}. Run the query again (with a new load() if "
            f"its DataFrame was planned earlier); {plan.table.how_to_keep_versions}"
        )

    def has_fixed_rows(self, table: Table, version: TableVersion) -> bool:
        """Whether each read of a version returns the same rows, so that rows may be kept for as long as the digest is the same."""
        return version.cacheable and self.kinds.source(table).shows_changes

    def hold(self, table: Table, options: LookupOptions, user: object) -> None:
        """Keep the schedule of the full cache and the connection of the provider open, until `user` calls `let_go` or is garbage-collected."""
        self._users.add(user)
        self.fulls.hold(table, options, user)

    def let_go(self, table: Table, options: LookupOptions, user: object) -> None:
        """Stop keeping open what `hold` keeps open for `user`, and close what no other user holds. Files on disk stay."""
        self._users.discard(user)
        if not self._users:
            self._scan.close()
            self.partials.close()
        self.fulls.let_go(table, options, user)

    @property
    def is_held(self) -> bool:
        """Whether the reader has users (see `hold`)."""
        return bool(self._users)

    @property
    def is_idle(self) -> bool:
        """Whether the reader can be dropped: it has no users, and all that it knows is on disk."""
        unrecorded = self.host.has_unwritten or self.partials.has_unrecorded
        return not self._users and not unrecorded

    def _tell_age(self, plan: ReadPlan, execution: Execution | None) -> None:
        """Log a warning if an execution reads the version that was planned for an earlier one. A host warns once for each plan."""
        if execution is None or self._context.disk is None:
            return
        try:
            first = self._context.disk.create_record("plan", plan.id, execution.id, as_text)
            if first == execution.id or self._context.disk.has_record("plan", f"{plan.id}-warned"):
                return
            nonce = os.urandom(8).hex()
            if self._context.disk.create_record("plan", f"{plan.id}-warned", nonce) != nonce:
                return
        except OSError:
            return
        _log.warning(
            "reading %s as it was %s ago, when this DataFrame was first planned; plan again with a new load(), or set "
            "lookup.version-at=READ",
            redact("path", plan.table.url),
            "some time" if (age_s := plan.age_s(self._context.clock)) is None else f"{age_s:.0f} s",
        )
