"""`VersionReader`: the rows of exactly one version of a table, from its files or its provider."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import pyarrow as pa

from pyspark_lookup.cache.full.loader import Layout
from pyspark_lookup.columnar.keys import check_key_types
from pyspark_lookup.columnar.predicate import ColumnStats, Predicate, referenced_columns
from pyspark_lookup.columnar.sql_predicate import parse_where
from pyspark_lookup.columnar.types import resolve_names, unreadable
from pyspark_lookup.lookup.plan import ReadPlan
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.scan.contract import PreparedScan, TableScan, all_columns, collect_table, to_slices
from pyspark_lookup.scan.open_file import Projection, Slice
from pyspark_lookup.scan.schema_cache import HostSchemas
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import key_of
from pyspark_lookup.storage.stores import FileVersion
from pyspark_lookup.versions.model import Table, TableVersion
from pyspark_lookup.versions.partitions import select_partitions

_SECURED_AT_MOST = 15


class VersionReader:
    """Reads a given version of one table reference on this host. Which version a query reads is decided elsewhere.

    `scan`: reads rows for queries. `load_scan`: reads rows for a snapshot.
    """

    def __init__(self, scan: TableScan, load_scan: TableScan, context: HostContext) -> None:
        self._scan, self._load_scan = scan, load_scan
        self._schemas = HostSchemas(scan, context)
        self._secured: set[str] = set()  # versions that this process has brought here last

    def schema(self, table: Table, version: TableVersion) -> tuple[pa.Schema, pa.Schema]:
        """(columns in the files, columns in the directories) of a version."""
        return self._schemas.get_columns(table, version)

    def data_schema(self, table: Table, version: TableVersion) -> pa.Schema:
        """The columns in the files of a version."""
        return self.schema(table, version)[0]

    def splittable(self, table: Table) -> bool:
        """Whether one file's rows may go to several tasks."""
        return self._scan.splittable(table)

    def rows(self, table: Table, options: LookupOptions, version: TableVersion) -> int | None:
        """The number of rows of a version (of `lookup.partition` if that is set); None if only reading them would tell."""
        return self._scan.rows(table, select_partitions(table, version, options))

    @property
    def reads_all_rows(self) -> bool:
        """Whether the table can be read as a whole; False: only by key."""
        return self._scan.reads_all_rows

    def rows_by_key(self, keys: pa.Table, columns: pa.Schema) -> pa.Table | None:
        """The rows of keys, from a table that is read by key; None for a table of files. See `TableScan.rows_by_key`."""
        return self._scan.rows_by_key(keys, columns)

    def layout(self, table: Table, options: LookupOptions, version: TableVersion) -> Layout:
        """The columns of a version's rows that a cache stores, in a snapshot or by key."""
        data, partitions = self.schema(table, version)
        everything = all_columns((data, partitions))
        keys = resolve_names(options.keys or (), everything, "lookup.keys")
        check_key_types([everything.field(name) for name in keys])
        names = {field.name for field in everything if unreadable(field.type) is None}
        if options.columns is not None:
            names = {*keys, *resolve_names(options.columns, everything, "lookup.columns")}
            names |= referenced_columns(parse_where(options.where, everything)) if options.where else set()
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
        """The rows of some `files` of a version where `predicate` is true, with all columns of `layout`.

        Raises SourceChangedError if a file is no longer in its version.
        """
        projection = dataclasses.replace(layout.projection, predicate=predicate)
        prepared = self.prepare(plan.table, version, to_slices(files), projection)
        return collect_table(prepared.batches(), layout.columns, plan.table.url)

    def files(self, keep: bool = True) -> TableScan:
        """A scan of files. `keep`: the bytes that it reads stay in this host's cache."""
        return self._scan if keep else self._load_scan

    def secure(self, table: Table, options: LookupOptions, version: TableVersion) -> None:
        """Copy a version's bytes to this host's cache, where changes of its files do not reach them.

        Raises SourceChangedError if a file is no longer in its version.
        """
        place = key_of(version.digest, options.columns, options.where, options.partition)
        if place in self._secured:
            return
        layout = self.layout(table, options, version)
        files = select_partitions(table, version, options)
        self.prepare(table, version, to_slices(files), layout.projection)
        if all(file.cacheable for file in files):  # else nothing was cached
            self._secured = {*list(self._secured)[-_SECURED_AT_MOST:], place}

    def key_bounds(self, table: Table, layout: Layout, files: Sequence[FileVersion]) -> list[list[ColumnStats | None]]:
        """The bounds of each key column in each file, for each file in order."""
        return self._scan.bounds(table, files, layout.partitions, layout.keys)

    def read_files(self, plan: ReadPlan, version: TableVersion) -> Iterator[pa.RecordBatch]:
        """All rows of exactly this version from the files themselves. Raises SourceChangedError if one is no longer in it."""
        pieces = to_slices(select_partitions(plan.table, version, plan.options))
        return self.prepare(plan.table, version, pieces, plan.projection).batches()

    def prepare(
        self, table: Table, version: TableVersion, pieces: Sequence[Slice], projection: Projection
    ) -> PreparedScan:
        """Parts of a version's files, ready to be decoded. Raises SourceChangedError if one is no longer in it."""
        return self._scan.prepare(table, pieces, projection, functools.partial(self.data_schema, table, version))
