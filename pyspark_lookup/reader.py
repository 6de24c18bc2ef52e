"""A planned read: which version its tasks take, and what happens when that version vanishes.

`ReadPlan` and `ReadTask` are values that travel from the planning process to the reading ones;
`TableReader` carries them out. Of a task that resolves at reading, the first batch comes after all of
its bytes are secured, so it can start over with a newer version without mixing two.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import logging
import os
from collections.abc import Iterator

import pyarrow as pa

from pyspark_lookup.blocks import BlockCache
from pyspark_lookup.clock import HostClock
from pyspark_lookup.disk import Disk, key_of
from pyspark_lookup.errors import SourceChangedError, UfsNotFoundError, VersionGoneError
from pyspark_lookup.formats import open_format
from pyspark_lookup.metadata import Execution, Metadata, Resolution
from pyspark_lookup.metrics import CacheMetricGroup
from pyspark_lookup.options import LookupOptions, OnVersionGone, redact
from pyspark_lookup.scan import Prepared, Projection, Scan, Slice, share_of, slices_of
from pyspark_lookup.stores import SETTLED_AFTER_S
from pyspark_lookup.table import Table, TableVersion, select_partitions

__all__ = ["ReadPlan", "ReadTask", "TableReader"]

_log = logging.getLogger("pyspark_lookup.reader")
_STARTS = 5  # a table that changes under this many reads in a row is an error


@dataclasses.dataclass(frozen=True)
class ReadPlan:
    """What a query reads of a table. `id` tells plans apart, `planned_at_s` is Unix time."""

    id: str
    options: LookupOptions
    table: Table
    projection: Projection
    planned_at_s: float


@dataclasses.dataclass(frozen=True)
class ReadTask:
    """One task of a plan: share `number` of `count` of the version.

    `pieces` are fixed at planning; None: the version is resolved when the task reads.
    """

    number: int
    count: int
    pieces: tuple[Slice, ...] | None = None


class TableReader:
    """Reads of one table reference in this process, on this host."""

    def __init__(
        self,
        metadata: Metadata,
        blocks: BlockCache,
        disk: Disk | None,
        metrics: CacheMetricGroup,
        clock: HostClock,
        block_size: int,
    ) -> None:
        self.metadata = metadata
        self.metrics = metrics
        self._disk = disk
        self._clock = clock
        self._block_size = block_size
        self._scan = Scan(blocks, metrics, block_size)

    def schema(self, table: Table, version: TableVersion) -> tuple[pa.Schema, pa.Schema]:
        """(columns in the files, columns in the directories) of a version; kept on this host by digest."""
        key = key_of(version.digest, table.format)
        settled = all(file.cacheable for file in version.files)
        record = self._disk.get_record("schema", key) if self._disk and settled else None
        if isinstance(record, list):
            data, partitions = (pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text))) for text in record)
            return data, partitions
        found = self._scan.schema(table, version.files)
        if self._disk and settled:
            try:
                self._disk.replace_record(
                    "schema", key, [base64.b64encode(schema.serialize()).decode() for schema in found]
                )
            except OSError:
                self.metrics.inc("cacheFailureCount")
        return found

    def _data_schema(self, table: Table, version: TableVersion) -> pa.Schema:
        return self.schema(table, version)[0]

    def splittable(self, table: Table) -> bool:
        """Whether one file's rows may go to several tasks."""
        assert table.format is not None
        return open_format(table.format, self._block_size).splittable

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
            return self._planned(plan, task, task.pieces, execution).batches()
        if version is not None:
            resolution = Resolution(version, True)
        else:
            resolution = self.metadata.resolve(plan.table, plan.options, execution)
        files = select_partitions(plan.table, resolution.version.files, plan.options)
        pieces = share_of(files, task.number, task.count, self.splittable(plan.table))
        try:
            # Files that lookup.partition leaves out may have the columns that these lack.
            complete = task.count == 1 and len(files) == len(resolution.version.files)
            prepared = self._scan.prepare(
                plan.table,
                pieces,
                plan.projection,
                complete,
                functools.partial(self._data_schema, plan.table, resolution.version),
            )
        except SourceChangedError as change:
            if task.count > 1:
                prepared = self._newer_files(plan, pieces, resolution.version, execution, change)
            elif not resolution.decided_here and plan.options.on_version_gone is OnVersionGone.FAIL:
                # Others of this execution may have answered from the version that is gone.
                raise self._gone(plan, change) from change
            else:
                prepared = self._start_over(plan, resolution.version, execution)
        return prepared.batches()

    def _planned(
        self, plan: ReadPlan, task: ReadTask, pieces: tuple[Slice, ...], execution: Execution | None
    ) -> Prepared:
        """A task whose version planning fixed."""
        if self._clock.wall_s() - plan.planned_at_s > SETTLED_AFTER_S:
            # Too new to keep when it was planned, but by now its identity is proof enough.
            pieces = tuple(dataclasses.replace(p, file=dataclasses.replace(p.file, settled=True)) for p in pieces)
        try:
            complete = task.count == 1 and plan.options.partition is None
            return self._scan.prepare(plan.table, pieces, plan.projection, complete)
        except SourceChangedError as change:
            planned = TableVersion(plan.table.id, tuple(piece.file for piece in pieces))
            if task.count > 1:
                return self._newer_files(plan, pieces, planned, execution, change)
            if plan.options.on_version_gone is OnVersionGone.FAIL:
                raise self._gone(plan, change) from change
            return self._start_over(plan, planned, execution)

    def _start_over(self, plan: ReadPlan, gone: TableVersion, execution: Execution | None) -> Prepared:
        """The only task of a read, with the version that replaced `gone`: nothing was handed out yet."""
        for _ in range(_STARTS):
            gone = self.metadata.resolve_again(plan.table, plan.options, execution, gone)
            pieces = slices_of(select_partitions(plan.table, gone.files, plan.options))
            try:
                complete = len(pieces) == len(gone.files)
                return self._scan.prepare(
                    plan.table,
                    pieces,
                    plan.projection,
                    complete,
                    functools.partial(self._data_schema, plan.table, gone),
                )
            except SourceChangedError:
                continue
        raise VersionGoneError(
            f"{redact('path', plan.table.url)} changed under {_STARTS + 1} reads in a row: write new files and keep the old "
            "ones a while, or set lookup.settle"
        )

    def _newer_files(
        self,
        plan: ReadPlan,
        pieces: tuple[Slice, ...],
        gone: TableVersion,
        execution: Execution | None,
        change: SourceChangedError,
    ) -> Prepared:
        """One task of several after a change: files replaced in place are read anew, whole.

        A file that other tasks read parts of would be mixed, and the rows of one that vanished may be
        anywhere: both are errors even where a newer version is welcome.
        """
        if plan.options.on_version_gone is OnVersionGone.FAIL:
            raise self._gone(plan, change) from change
        for _ in range(_STARTS):
            try:
                version = self.metadata.resolve_again(plan.table, plan.options, execution, gone)
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
                return self._scan.prepare(plan.table, renewed, plan.projection, complete=False)
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

    def _tell_age(self, plan: ReadPlan, execution: Execution | None) -> None:
        """Log once, from one process of the host, that a later execution reads an older plan's version."""
        if execution is None or self._disk is None:
            return
        try:
            first = self._disk.create_record("plan", plan.id, execution.id)
            if first == execution.id or self._disk.has_record("plan", f"{plan.id}-told"):
                return
            nonce = os.urandom(8).hex()
            if self._disk.create_record("plan", f"{plan.id}-told", nonce) != nonce:
                return
        except OSError:
            return
        _log.warning(
            "reading %s as it was %.0f s ago, when this DataFrame was first planned; plan again with a new load(), or set "
            "lookup.version-at=READ",
            redact("path", plan.table.url),
            self._clock.wall_s() - plan.planned_at_s,
        )
