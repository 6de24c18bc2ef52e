"""`ManagedTables`: reads the logs of managed tables, and makes the objects that write these tables."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import pyarrow as pa

from pyspark_lookup.errors import NotSupportedError, OptionError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.scan.table_scan import TableScan
from pyspark_lookup.sources.managed.compaction import Compactor
from pyspark_lookup.sources.managed.conflicts import KeyedRows
from pyspark_lookup.sources.managed.data_files import WriteSizes
from pyspark_lookup.sources.managed.log import NotificationLog, TableState
from pyspark_lookup.sources.managed.open_transaction import OpenWrites
from pyspark_lookup.sources.managed.options import ChangeOptions, WriteOptions
from pyspark_lookup.sources.managed.source import MANAGED, LogSource
from pyspark_lookup.sources.managed.vacuum import Vacuumed, vacuum, vacuum_if_due
from pyspark_lookup.sources.managed.writer import Heartbeats, TableWriter
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.ufs import Ufs
from pyspark_lookup.versions.model import Kind, Table
from pyspark_lookup.versions.resolver import TableKinds


class ManagedTables:
    """The managed tables in one store, found by the options that name them. A table need not exist yet.

    `scan_of_files`: returns a scan of the tables' files; its argument says whether the rows are for a snapshot of the full cache.
    """

    def __init__(
        self,
        kinds: TableKinds,
        ufs: Ufs,
        context: HostContext,
        scan_of_files: Callable[[bool], TableScan],
        sizes: WriteSizes,
    ) -> None:
        self.sizes = sizes
        self._kinds = kinds
        self._ufs = ufs
        self._context = context
        self._scan_of_files = scan_of_files
        self._heartbeats: dict[
            tuple[str, float], Heartbeats
        ] = {}  # by the table's URL and the time after which a writer counts as dead
        self._source = next((source for source in kinds.sources if isinstance(source, LogSource)), None)

    # --- the log ----------------------------------------------------------------------------------

    def table(self, options: LookupOptions) -> Table:
        """The managed table at `options.files.path`, whether or not it exists.

        Raises OptionError for a path with wildcards and for options that a managed table does not take, NotSupportedError for a provider's
        table and for a path that names a table of another kind.
        """
        if self._source is None:
            raise NotSupportedError(
                f"{options.place}: lookupcache does not write to a provider's table: write to the provider's own system"
            )
        kind = self._kinds.kind_of_url(self._ufs.url_of(options.files.path))
        if kind == Kind.GLOB:
            raise OptionError(
                f"option path = {redact('path', options.files.path)!r}: give a managed table a path without wildcards (*, ?, [, {{)"
            )
        if kind is not None:
            label = next(source.label for source in self._kinds.sources if kind in source.kinds)
            raise NotSupportedError(
                f"{redact('path', options.files.path)} is {label}: lookupcache can read it, but writes only managed tables; write to it with its own tools"
            )
        return self._kinds.to_table(options, MANAGED)

    def log(self, url: str) -> NotificationLog:
        """The log of the managed table at a canonical URL."""
        assert self._source is not None
        return self._source.log(url)

    def read_log(self, options: LookupOptions) -> TableState | None:
        """The latest state of the log of the table at `options.files.path`; None if there is no log, or the table is of another kind."""
        url = self._ufs.url_of(options.files.path)
        if self._source is None or self._kinds.kind_of_url(url) is not None:
            return None
        log = self.log(url)
        if self._kinds.is_known_as_another(options, self._source) and log.cached_state() is None:
            return None
        return log.latest()

    def schema(self, options: LookupOptions) -> pa.Schema | None:
        """The columns of the managed table at `options.files.path`; None if there is no such table."""
        state = self.read_log(options)
        return None if state is None else state.definition.schema

    def keys(self, options: LookupOptions) -> tuple[str, ...]:
        """The key columns of the managed table at `options.files.path`; the key columns in the options if there is no table, or it has no
        keys."""
        state = self.log(self._ufs.url_of(options.files.path)).cached_state() or self.read_log(options)
        return state.definition.keys if state is not None and state.definition.keys else options.files.keys or ()

    # --- writes -----------------------------------------------------------------------------------

    def writer(self, options: LookupOptions) -> TableWriter:
        """A writer for the managed table at `options.files.path`. Raises OptionError for a path with wildcards, and for options of reads."""
        if options.pinned is not None or options.kind(ChangeOptions).first is not None:
            pin = next(iter(options.pins), "lookup.changes-from")
            raise OptionError(f"option {pin} is for reads: remove it from the write")
        log, table, rows = self._parts(options)
        raise_floor = functools.partial(self._kinds.host.raise_floor, table)
        enclosing, place = self._kinds.enclosing, (log.url, options.kind(WriteOptions).timeout_s)
        heartbeats = self._heartbeats.setdefault(place, Heartbeats(self._ufs, self._context, *place))
        return TableWriter(
            self._ufs, log, self._context, options, table, rows, raise_floor, self.sizes, enclosing, heartbeats
        )

    def compactor(self, options: LookupOptions) -> Compactor:
        """A compactor for the managed table at `options.files.path`. Raises the errors of `writer`."""
        return Compactor(
            self.writer(options), *self._parts(options), options.kind(WriteOptions).compact_after, self.sizes
        )

    def open_writes(self, options: LookupOptions) -> OpenWrites:
        """The writes of a transaction that begins now. Raises the errors of `writer`, and UfsError if the store fails."""
        writer = self.writer(options)
        log, table, rows = self._parts(options)
        return OpenWrites(writer, log, table, rows, options.kind(WriteOptions).unique_keys, log.latest())

    @contextlib.contextmanager
    def committing(self, options: LookupOptions) -> Iterator[TableWriter]:
        """A writer for a `with` block whose body commits. After the block, runs a compaction or a vacuum if one is due."""
        yield self.writer(options)
        if options.kind(WriteOptions).compact_after:
            self.compactor(options).compact_if_due()
        log, _, _ = self._parts(options)
        vacuum_if_due(self._ufs, log, self._nonce())

    def vacuum(self, options: LookupOptions, older_than_s: float, force: bool) -> Vacuumed:
        """Remove the files that no version of the last `older_than_s` seconds needs, and return what was removed. Raises the errors of
        `vacuum.vacuum`."""
        log, _, _ = self._parts(options)
        return vacuum(self._ufs, log, self._nonce(), older_than_s, force)

    def _nonce(self) -> str:
        return f"{self._context.rng.getrandbits(64):016x}"

    def _parts(self, options: LookupOptions) -> tuple[NotificationLog, Table, KeyedRows]:
        table = self.table(options)
        return self.log(table.url), table, KeyedRows(self._scan_of_files, table, self.sizes.merge_bytes)
