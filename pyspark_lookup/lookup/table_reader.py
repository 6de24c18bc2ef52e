"""Carries out planned reads: which version the tasks read, and what happens when its files vanish.

`ReadPlan` and `ReadTask` are values that travel from the planning process to the reading ones;
`TableReader` carries them out. A task that resolves its version while reading returns its first batch after all
its bytes are secured, so it can restart with a newer version without mixing two.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import weakref
from collections.abc import Iterator

import pyarrow as pa

from pyspark_lookup.cache.full.registry import FullTables
from pyspark_lookup.cache.memory import LookupCache
from pyspark_lookup.cache.partial import PartialTables
from pyspark_lookup.core.decoding import as_text
from pyspark_lookup.errors import SourceChangedError, UfsNotFoundError, VersionGoneError
from pyspark_lookup.lookup.plan import ReadPlan, ReadTask
from pyspark_lookup.lookup.snapshot_reader import SnapshotReader
from pyspark_lookup.lookup.version_reader import VersionReader
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.options.reload_trigger import CacheReloadTrigger
from pyspark_lookup.scan.contract import PreparedScan, TableScan, cut_share, to_slices
from pyspark_lookup.scan.open_file import Slice
from pyspark_lookup.scan.table_scan import Scan
from pyspark_lookup.storage.block_cache import BlockCache
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.stores import SETTLED_AFTER_S
from pyspark_lookup.versions.executions import Execution, Resolution
from pyspark_lookup.versions.model import Table, TableVersion
from pyspark_lookup.versions.partitions import select_partitions
from pyspark_lookup.versions.resolver import Resolver
from pyspark_lookup.versions.restarts import read_with_restarts

_log = logging.getLogger("pyspark_lookup.reader")
_BLOCK_BYTES = 4 * 1024 * 1024
_STARTS = 5  # attempts in a row before a changing table is an error


class TableReader:
    """Reads of one table reference in this process, on this host.

    `scans`: the scan for queries and the scan for snapshots (None: scans of files). `cache`, `trigger`: replace the partial
    cache and the reload strategy that the options describe. `block_size`: of formats without natural blocks (CSV, JSON, ORC).
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
        self.resolver = resolver
        self.metrics = context.metrics
        self._context = context
        self._users: weakref.WeakSet[object] = weakref.WeakSet()
        # Loads and compactions read each file once, and a snapshot has the decoded rows: their bytes need not be cached.
        self._scan, load_scan = scans or (
            Scan(blocks, context.metrics, block_size),
            Scan(blocks.read_only(), context.metrics, block_size, rereads=False),
        )
        self.versions = VersionReader(self._scan, load_scan, context)
        self.partials = PartialTables(context, cache)
        self.fulls = FullTables(load_scan, resolver, self.versions.layout, context, trigger)
        self.snapshots = SnapshotReader(resolver, self.versions, self.fulls, context.metrics)

    def replace(
        self, plan: ReadPlan, resolution: Resolution, execution: Execution | None, change: SourceChangedError
    ) -> TableVersion:
        """The version to go on with when a file of the resolved one is gone, as `lookup.on-version-gone` says."""
        if not resolution.decided_here and plan.table.fails_when_gone(plan.options):
            raise self._version_gone(plan, change, resolution.version.number) from change
        return self.resolver.resolve_again(plan.table, plan.options, execution, resolution.version.digest)

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
            planned_version = self.resolver.find_recorded(plan.table, task.digest) if task.digest is not None else None
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
        pieces = cut_share(files, task.number, task.count, self.versions.splittable(plan.table))
        if snapshot is not None:
            return self.snapshots.batches(plan, snapshot, resolution.version, pieces if task.count > 1 else None)
        return self._from_files(plan, task, execution, resolution, pieces)

    def _from_files(
        self,
        plan: ReadPlan,
        task: ReadTask,
        execution: Execution | None,
        resolution: Resolution,
        pieces: tuple[Slice, ...],
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
        """A task whose version was fixed at planning."""
        age_s = plan.age_s(self._context.clock)
        if age_s is not None and age_s > SETTLED_AFTER_S:
            # At planning the file was too new to be cached; by now its identity is reliable.
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
        """The only task of a read, started over with the version that replaced `lost_version`. It has returned no rows yet."""

        def read(version: TableVersion) -> PreparedScan:
            pieces = to_slices(select_partitions(plan.table, version, plan.options))
            return self.versions.prepare(plan.table, version, pieces, plan.projection)

        def resolve_again(version: TableVersion, change: SourceChangedError | None = None) -> TableVersion:
            return self.resolver.resolve_again(plan.table, plan.options, execution, version.digest)

        return read_with_restarts(plan.table, resolve_again(lost_version), read, resolve_again)[0]

    def _newer_files(
        self,
        plan: ReadPlan,
        pieces: tuple[Slice, ...],
        lost_version: TableVersion,
        execution: Execution | None,
        change: SourceChangedError,
    ) -> PreparedScan:
        """One of several tasks, after a change of files: a file that was replaced is read again, as a whole.

        A file that other tasks read parts of would be mixed, and the rows of one that vanished may be
        anywhere: both are errors even where a newer version is welcome.
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
        return VersionGoneError(
            f"the version{'' if number is None else f' {number}'} of {redact('path', plan.table.url)} this query resolved is gone: "
            f"{change}. Run the query again (with a new load() if its DataFrame was planned before); to change a table under "
            "running queries, write new file names and keep the old files a while"
        )

    def hold(self, table: Table, options: LookupOptions, user: object) -> None:
        """Keep the full cache's schedule and the provider's connection open until `user` lets go of them, or is collected."""
        self._users.add(user)
        self.fulls.hold(table, options, user)

    def let_go(self, table: Table, options: LookupOptions, user: object) -> None:
        """Close what only `user` still uses; files on disk stay."""
        self._users.discard(user)
        if not self._users:
            self._scan.close()
            self.partials.close()
        self.fulls.let_go(table, options, user)

    @property
    def is_held(self) -> bool:
        """Whether it has users."""
        return bool(self._users)

    @property
    def is_idle(self) -> bool:
        """Whether it can be dropped: it has no users, and everything it knows is on disk."""
        unrecorded = self.resolver.host.has_unwritten or self.partials.has_unrecorded
        return not self._users and not unrecorded

    def _tell_age(self, plan: ReadPlan, execution: Execution | None) -> None:
        """Warn if a later execution reads the version of an older plan; once per plan, from one process of the host."""
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
