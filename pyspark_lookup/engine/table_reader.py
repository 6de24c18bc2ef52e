"""A planned read: which version its tasks take, and what happens when that version vanishes.

`ReadPlan` and `ReadTask` are values that travel from the planning process to the reading ones;
`TableReader` carries them out. Of a task that resolves at reading, the first batch comes after all of
its bytes are secured, so it can start over with a newer version without mixing two.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import weakref
from collections.abc import Iterator, Sequence

import pyarrow as pa

from pyspark_lookup.base.decoding import text_of
from pyspark_lookup.base.errors import SourceChangedError, UfsNotFoundError, VersionGoneError
from pyspark_lookup.cache.full.full_cache import FullCache
from pyspark_lookup.cache.full.loader import Layout
from pyspark_lookup.cache.full.registry import FullTables
from pyspark_lookup.cache.full.snapshot import Ranges, Snapshot
from pyspark_lookup.cache.full.snapshot_scan import snapshot_batches
from pyspark_lookup.cache.memory import LookupCache
from pyspark_lookup.cache.partial import PartialTables
from pyspark_lookup.columnar.keys import check_key_types
from pyspark_lookup.columnar.predicate import ColumnStats, Predicate, columns_of
from pyspark_lookup.columnar.sql_predicate import parse_where
from pyspark_lookup.columnar.types import resolve_names
from pyspark_lookup.engine.plan import ReadPlan, ReadTask
from pyspark_lookup.io.block_cache import BlockCache
from pyspark_lookup.io.context import HostContext
from pyspark_lookup.io.disk import key_of
from pyspark_lookup.io.stores import SETTLED_AFTER_S, FileVersion
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import MetadataSource
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.options.reload_trigger import CacheReloadTrigger
from pyspark_lookup.scan.contract import PreparedScan, TableScan, all_columns, share_of, slices_of
from pyspark_lookup.scan.open_file import Projection, Slice
from pyspark_lookup.scan.schema_cache import HostSchemas
from pyspark_lookup.scan.table_scan import Scan
from pyspark_lookup.table.executions import Execution, Resolution
from pyspark_lookup.table.model import Table, TableVersion
from pyspark_lookup.table.partitions import select_partitions
from pyspark_lookup.table.resolver import Resolver
from pyspark_lookup.table.restarts import read_with_restarts

_log = logging.getLogger("pyspark_lookup.reader")
_STARTS = 5  # a table that changes under this many reads in a row is an error
_SECURED_AT_MOST = 15


class TableReader:
    """Reads of one table reference in this process, on this host.

    `scans`: what reads its rows, and what does so for a snapshot; None: files are read. `cache`, `trigger`: in place of a partial
    cache, and of a reload strategy, that the options describe.
    """

    def __init__(
        self,
        resolver: Resolver,
        blocks: BlockCache,
        context: HostContext,
        block_size: int,
        scans: tuple[TableScan, TableScan] | None = None,
        cache: LookupCache | None = None,
        trigger: CacheReloadTrigger | None = None,
    ) -> None:
        self.resolver = resolver
        self.metrics = context.metrics
        self._secured: set[str] = set()  # what this process brought here last
        self._context = context
        self._users: weakref.WeakSet[object] = weakref.WeakSet()
        # A snapshot keeps the rows, so the bytes they were decoded from need not be kept as well.
        self._scan, self._load_scan = scans or (
            Scan(blocks, context.metrics, block_size),
            Scan(blocks.read_only(), context.metrics, block_size),
        )
        self._schemas = HostSchemas(self._scan, context)
        self.partials = PartialTables(context, cache)
        self._fulls = FullTables(
            self._load_scan,
            resolver,
            self.layout,
            context,
            trigger,
        )

    def schema(self, table: Table, version: TableVersion) -> tuple[pa.Schema, pa.Schema]:
        """(columns in the files, columns in the directories) of a version."""
        return self._schemas.of(table, version)

    def _data_schema(self, table: Table, version: TableVersion) -> pa.Schema:
        return self.schema(table, version)[0]

    def splittable(self, table: Table) -> bool:
        """Whether one file's rows may go to several tasks."""
        return self._scan.splittable(table)

    def rows(self, table: Table, options: LookupOptions, version: TableVersion) -> int | None:
        """How many rows a version has, all of `lookup.partition` if that is given; None where only reading them would tell."""
        return self._scan.rows(table, select_partitions(table, version, options))

    @property
    def reads_all_rows(self) -> bool:
        """Whether the table can be read as a whole, not only by key."""
        return self._scan.reads_all_rows

    def rows_by_key(self, keys: pa.Table, columns: pa.Schema) -> pa.Table | None:
        """The rows of keys from a table that is asked by key; None for one whose files are read. See `TableScan.rows_by_key`."""
        return self._scan.rows_by_key(keys, columns)

    # --- lookup.cache=FULL ------------------------------------------------------------------------

    def full(self, table: Table, options: LookupOptions) -> FullCache | None:
        """The full cache that the options ask for; None if they do not, or there is no cache directory."""
        return self._fulls.of(table, options)

    def layout(self, table: Table, options: LookupOptions, version: TableVersion) -> Layout:
        """What is kept of the rows of a version, in a snapshot or by key."""
        data, partitions = self.schema(table, version)
        everything = all_columns((data, partitions))
        keys = resolve_names(options.keys or (), everything, "lookup.keys")
        check_key_types([everything.field(name) for name in keys])
        names = set(everything.names)
        if options.columns is not None:
            names = {*keys, *resolve_names(options.columns, everything, "lookup.columns")}
            names |= columns_of(parse_where(options.where, everything)) if options.where else set()
        columns = pa.schema([field for field in everything if field.name in names])
        return Layout(columns, tuple(keys), data, partitions, table.declared is not None)

    def resolve(
        self, plan: ReadPlan, execution: Execution | None, version: TableVersion | None = None
    ) -> tuple[Resolution, Snapshot | None]:
        """The version that `execution` reads, and its snapshot if there is one to read it from.

        `version`: the current one, if the caller has just resolved it (a full cache in CACHE mode has its own).
        """
        resolution, snapshot = self._resolved(plan, execution, version)
        if version is None and resolution.decided_here:
            self.resolver.count_asked(resolution.version)
        return resolution, snapshot

    def _resolved(
        self, plan: ReadPlan, execution: Execution | None, version: TableVersion | None
    ) -> tuple[Resolution, Snapshot | None]:
        table, options = plan.table, plan.options
        full = self.full(table, options)
        if full is not None and options.metadata_source is MetadataSource.CACHE:
            latest = self.served(table, options)
            if latest is not None:
                served, snapshot = latest
                resolution = self.resolver.resolve(table, options, execution, lambda: served)
                if resolution.version.digest == served.digest:
                    return resolution, self.covering(plan, snapshot)
                return resolution, self._snapshot(plan, resolution.version)
        resolution = (
            Resolution(version, True) if version is not None else self.resolver.resolve(table, options, execution)
        )
        return resolution, self._snapshot(plan, resolution.version)

    def served(self, table: Table, options: LookupOptions) -> tuple[TableVersion, Snapshot] | None:
        """What a full cache answers from in CACHE mode, the first load being waited for.

        None without one, and while it is behind what this host has committed: the store answers then, and it reloads.
        """
        full = self.full(table, options)
        latest = full.current() if full is not None and options.metadata_source is MetadataSource.CACHE else None
        if full is None or latest is None or self.resolver.host.includes_own_writes(table, options, latest[0]):
            return latest
        full.ask_reload()
        return None

    def snapshot_of(
        self, table: Table, options: LookupOptions, version: TableVersion, wait_s: float | None = None
    ) -> Snapshot | None:
        """The snapshot of a version, built now if a query may wait for that; None without one.

        `wait_s`: how long it may (None: `lookup.full-cache.build-wait`).
        """
        full = self.full(table, options)
        if full is None:
            return None
        if options.metadata_source is MetadataSource.CACHE:
            return full.find(version)
        return full.build(version, options.build_wait_s if wait_s is None else wait_s)

    def _snapshot(self, plan: ReadPlan, version: TableVersion) -> Snapshot | None:
        if self.full(plan.table, plan.options) is None:
            return None
        return self.covering(plan, self.snapshot_of(plan.table, plan.options, version))

    def covers(self, plan: ReadPlan, kept: pa.Schema) -> bool:
        """Whether these columns are all that the plan needs: lookup.columns may have left something out."""
        tested = columns_of(plan.projection.predicate) if plan.projection.predicate is not None else frozenset()
        return {*plan.projection.columns.names, *tested} <= set(kept.names)

    def covering(self, plan: ReadPlan, snapshot: Snapshot | None) -> Snapshot | None:
        """A snapshot that has all that the plan needs."""
        if snapshot is not None and plan.options.columns is not None and not self.covers(plan, snapshot.schema):
            snapshot = None
        if snapshot is None:
            self.metrics.inc("snapshotReadThroughCount")
        return snapshot

    def _from_snapshot(
        self, plan: ReadPlan, snapshot: Snapshot, version: TableVersion, pieces: Sequence[Slice] | None
    ) -> Iterator[pa.RecordBatch]:
        ranges = None if pieces is None else Ranges(tuple((p.file.url, p.start, p.end) for p in pieces))
        whole = functools.partial(self._data_schema, plan.table, version)
        return snapshot_batches(snapshot, plan.projection, ranges, whole, redact("path", plan.table.url), self.metrics)

    # --- lookup.cache=PARTIAL ---------------------------------------------------------------------

    def rows_where(
        self,
        plan: ReadPlan,
        layout: Layout,
        version: TableVersion,
        files: Sequence[FileVersion],
        wanted: Predicate | None,
    ) -> pa.Table:
        """The rows of those `files` of a version of which `wanted` is true, with all columns of `layout`.

        Raises SourceChangedError if a file is no longer in its version.
        """
        projection = dataclasses.replace(layout.projection, predicate=wanted)
        prepared = self._prepared(plan.table, version, slices_of(files), projection)
        return pa.Table.from_batches(list(prepared.batches()), layout.columns)

    def files(self, keep: bool = True) -> TableScan:
        """What reads files; `keep`: what it read stays in this host's cache, for those who read it next."""
        return self._scan if keep else self._load_scan

    def secure(self, table: Table, options: LookupOptions, version: TableVersion) -> None:
        """Bring a version's bytes into this host's cache, where nothing that happens to its files can change them.

        Raises SourceChangedError if a file is no longer in its version.
        """
        place = key_of(version.digest, options.columns, options.where, options.partition)
        if place in self._secured:
            return
        layout = self.layout(table, options, version)
        files = select_partitions(table, version, options)
        self._prepared(table, version, slices_of(files), layout.projection)
        if all(file.cacheable for file in files):  # else nothing was kept
            self._secured = {*list(self._secured)[-_SECURED_AT_MOST:], place}

    def bounds_of(self, table: Table, layout: Layout, files: Sequence[FileVersion]) -> list[list[ColumnStats | None]]:
        """Between which values the rows of each file lie, for each key column."""
        return self._scan.bounds(table, files, layout.partitions, layout.keys)

    def replaced(
        self, plan: ReadPlan, resolution: Resolution, execution: Execution | None, change: SourceChangedError
    ) -> TableVersion:
        """The version to go on with when a file of the resolved one is gone, as `lookup.on-version-gone` says."""
        if not resolution.decided_here and plan.table.fails_when_gone(plan.options):
            raise self._gone(plan, change) from change
        return self.resolver.resolve_again(plan.table, plan.options, execution, resolution.version.digest)

    # --- reading ----------------------------------------------------------------------------------

    def read(
        self, plan: ReadPlan, task: ReadTask, execution: Execution | None, version: TableVersion | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a task as batches of the plan's columns, all from one version.

        `version`: the current one, if the caller has just resolved it. Raises VersionGoneError where
        `lookup.on-version-gone` says so, SchemaError if the table no longer has the planned columns,
        UfsError or NotATableError if it cannot be read.
        """
        if task.pieces is not None:
            self._tell_age(plan, execution)
            planned = self.resolver.version_of(plan.table, task.digest) if task.digest is not None else None
            if planned is not None:
                if task.number == 0:
                    self.resolver.count_asked(planned)
                snapshot = self._snapshot(plan, planned)
                if snapshot is not None:
                    return self._from_snapshot(plan, snapshot, planned, task.pieces if task.count > 1 else None)
            return self._planned(plan, task, task.pieces, execution).batches()
        resolution, found = self.resolve(plan, execution, version)
        files = select_partitions(plan.table, resolution.version, plan.options)
        pieces = share_of(files, task.number, task.count, self.splittable(plan.table))
        if found is not None:
            return self._from_snapshot(plan, found, resolution.version, pieces if task.count > 1 else None)
        return self._from_files(plan, task, execution, resolution, pieces)

    def read_files(self, plan: ReadPlan, version: TableVersion) -> Iterator[pa.RecordBatch]:
        """All rows of exactly this version from the files themselves. Raises SourceChangedError if one is no longer in it."""
        pieces = slices_of(select_partitions(plan.table, version, plan.options))
        return self._prepared(plan.table, version, pieces, plan.projection).batches()

    def _prepared(
        self, table: Table, version: TableVersion, pieces: Sequence[Slice], projection: Projection
    ) -> PreparedScan:
        """Parts of a version's files, ready to be decoded. Raises SourceChangedError if one is no longer in it."""
        return self._scan.prepare(table, pieces, projection, functools.partial(self._data_schema, table, version))

    def _from_files(
        self,
        plan: ReadPlan,
        task: ReadTask,
        execution: Execution | None,
        resolution: Resolution,
        pieces: tuple[Slice, ...],
    ) -> Iterator[pa.RecordBatch]:
        try:
            prepared = self._prepared(plan.table, resolution.version, pieces, plan.projection)
        except SourceChangedError as change:
            if task.count > 1:
                prepared = self._newer_files(plan, pieces, resolution.version, execution, change)
            elif not resolution.decided_here and plan.table.fails_when_gone(plan.options):
                # Others of this execution may have answered from the version that is gone.
                raise self._gone(plan, change) from change
            else:
                prepared = self._start_over(plan, resolution.version, execution)
        return prepared.batches()

    def _planned(
        self, plan: ReadPlan, task: ReadTask, pieces: tuple[Slice, ...], execution: Execution | None
    ) -> PreparedScan:
        """A task whose version planning fixed."""
        if self._context.clock.wall_s() - plan.planned_at_s > SETTLED_AFTER_S:
            # Too new to keep when it was planned, but by now its identity is proof enough.
            pieces = tuple(dataclasses.replace(p, file=dataclasses.replace(p.file, settled=True)) for p in pieces)
        try:
            return self._scan.prepare(plan.table, pieces, plan.projection)
        except SourceChangedError as change:
            planned = TableVersion(plan.table.id, tuple(piece.file for piece in pieces))
            if task.count > 1:
                return self._newer_files(plan, pieces, planned, execution, change)
            if plan.table.fails_when_gone(plan.options):
                raise self._gone(plan, change) from change
            return self._start_over(plan, planned, execution)

    def _start_over(self, plan: ReadPlan, gone: TableVersion, execution: Execution | None) -> PreparedScan:
        """The only task of a read, with the version that replaced `gone`: nothing was handed out yet."""

        def read(version: TableVersion) -> PreparedScan:
            pieces = slices_of(select_partitions(plan.table, version, plan.options))
            return self._prepared(plan.table, version, pieces, plan.projection)

        def renewed(version: TableVersion, change: SourceChangedError | None = None) -> TableVersion:
            return self.resolver.resolve_again(plan.table, plan.options, execution, version.digest)

        return read_with_restarts(plan.table, renewed(gone), read, renewed)[0]

    def _newer_files(
        self,
        plan: ReadPlan,
        pieces: tuple[Slice, ...],
        gone: TableVersion,
        execution: Execution | None,
        change: SourceChangedError,
    ) -> PreparedScan:
        """One task of several after a change: files replaced in place are read anew, whole.

        A file that other tasks read parts of would be mixed, and the rows of one that vanished may be
        anywhere: both are errors even where a newer version is welcome.
        """
        if plan.table.fails_when_gone(plan.options):
            raise self._gone(plan, change) from change
        for _ in range(_STARTS):
            try:
                version = self.resolver.resolve_again(plan.table, plan.options, execution, gone.digest)
            except UfsNotFoundError as missing:
                raise self._gone(plan, change) from missing
            current = {file.url: file for file in version.files}
            renewed = []
            for piece in pieces:
                file = current.get(piece.file.url)
                if file == piece.file:
                    renewed.append(piece)
                elif file is not None and piece.whole:
                    renewed.append(Slice(file, 0, file.size))
                else:
                    raise self._gone(plan, change) from change
            try:
                return self._scan.prepare(plan.table, renewed, plan.projection)
            except SourceChangedError as again:
                change, gone = again, version
        raise self._gone(plan, change) from change

    def _gone(self, plan: ReadPlan, change: SourceChangedError) -> VersionGoneError:
        self.metrics.inc("versionGoneCount")
        return VersionGoneError(
            f"the version of {redact('path', plan.table.url)} this query resolved is gone: {change}. Run the query again "
            "(with a new load() if its DataFrame was planned before); to change a table under running queries, write new "
            "file names and keep the old files a while"
        )

    def hold(self, table: Table, options: LookupOptions, user: object) -> None:
        """Keep the full cache's schedule and the provider's connection until `user` lets go of them, or is gone."""
        self._users.add(user)
        self._fulls.hold(table, options, user)

    def let_go(self, table: Table, options: LookupOptions, user: object) -> None:
        """Close what `user` was the last one to hold; what is on disk stays."""
        self._users.discard(user)
        if not self._users:
            self._scan.close()
        self._fulls.let_go(table, options, user)

    def _tell_age(self, plan: ReadPlan, execution: Execution | None) -> None:
        """Log once, from one process of the host, that a later execution reads an older plan's version."""
        if execution is None or self._context.disk is None:
            return
        try:
            first = self._context.disk.create_record("plan", plan.id, execution.id, text_of)
            if first == execution.id or self._context.disk.has_record("plan", f"{plan.id}-told"):
                return
            nonce = os.urandom(8).hex()
            if self._context.disk.create_record("plan", f"{plan.id}-told", nonce) != nonce:
                return
        except OSError:
            return
        _log.warning(
            "reading %s as it was %.0f s ago, when this DataFrame was first planned; plan again with a new load(), or set "
            "lookup.version-at=READ",
            redact("path", plan.table.url),
            self._context.clock.wall_s() - plan.planned_at_s,
        )
