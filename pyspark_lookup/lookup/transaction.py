"""`Transaction`: several writes of one managed table as one commit, which sees its own rows before others do (Hive's write ids)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal

import pyarrow as pa

from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.write_ids import ValidWriteIdList
from pyspark_lookup.errors import OptionError, UfsNotFoundError
from pyspark_lookup.lookup import planner
from pyspark_lookup.lookup.open_table import OpenTable
from pyspark_lookup.lookup.planner import ResolvedTable
from pyspark_lookup.lookup.row_queries import get_rows, key_names, rows_of_keys, scan
from pyspark_lookup.lookup.rows import KeysLike, RowsLike, as_arrow_rows, as_key_table
from pyspark_lookup.lookup.runtime import Engine
from pyspark_lookup.options.enums import CacheMode
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.sources.managed.log import WriteMode
from pyspark_lookup.versions.model import require_metadata

WritingMode = Literal["append", "overwrite", "upsert"]
_MODES = {mode.value: mode for mode in (WriteMode.APPEND, WriteMode.OVERWRITE, WriteMode.UPSERT)}


def write_mode(mode: str) -> WriteMode:
    """The mode of a write of rows. Raises OptionError for anything else."""
    member = _MODES.get(mode.lower()) if isinstance(mode, str) else None
    if member is None:
        raise OptionError(f"argument mode = {mode!r}: give 'append', 'overwrite' or 'upsert'")
    return member


def check_no_batch(options: LookupOptions, operation: str) -> None:
    """Raise OptionError for `lookup.write.batch`, which this kind of write ignores."""
    if options.write_batch is not None:
        raise OptionError(f"option lookup.write.batch is for single writes of rows, not for {operation}: remove it")


class Transaction:
    """Several writes that become visible together, at the end of the `with` block; after an error in it, never.

    Made by `LookupTable.transaction`; for one thread of one process. Its reads see the table as it was when the block was
    entered, and its own writes; they read the files, whatever `lookup.cache` says. Without writes nothing is logged. Commits
    of others meanwhile stay: if several writes have one key, the last commit wins.
    """

    def __init__(self, engine: Engine, options: LookupOptions, clock: HostClock) -> None:
        check_no_batch(options, "a transaction")
        # A version that only this transaction sees is not worth a place in a cache.
        self._options = dataclasses.replace(options, cache=CacheMode.NONE)
        self._engine = engine
        self._clock = clock
        self._writes = engine.managed.open_writes(options)
        self._ended = False
        self._pid = os.getpid()
        self.position: int | None = None
        """The log position of its commit; None before it, and if it has changed nothing."""

    # --- writes -----------------------------------------------------------------------------------

    def write(self, rows: RowsLike, mode: WritingMode = "append") -> None:
        """Write rows, as `LookupTable.write` does; an overwrite takes the place of what this transaction has written, too."""
        self._check_open()
        how = write_mode(mode)
        arrow_rows = as_arrow_rows(rows, lambda: self._engine.managed.schema(self._options), how is WriteMode.UPSERT)
        if isinstance(arrow_rows, pa.Table) and not arrow_rows.num_rows and how is not WriteMode.OVERWRITE:
            return
        self._writes.write(
            arrow_rows.schema, arrow_rows.to_batches() if isinstance(arrow_rows, pa.Table) else arrow_rows, how
        )

    def upsert(self, rows: RowsLike) -> None:
        """Write rows in place of those that have their keys, as `LookupTable.upsert` does."""
        self.write(rows, "upsert")

    def delete(self, keys: KeysLike) -> None:
        """Remove the rows with those keys, as `LookupTable.delete` does."""
        self._check_open()
        self._writes.delete(as_key_table(keys, self._engine.managed.keys(self._options)))

    # --- reads ------------------------------------------------------------------------------------

    @property
    def valid_write_ids(self) -> ValidWriteIdList | None:
        """The writes that this transaction sees: its own write id counts as committed. None before the table exists."""
        self._check_open()
        return self._writes.valid_write_ids()

    def scan(self, columns: Sequence[str] | None = None, predicate: str | None = None) -> pa.Table:
        """The rows it sees, as `LookupTable.scan` gives them."""
        open_table = self._open()
        return scan(self._engine, open_table.resolved_table, open_table.options, columns, predicate, self._clock)

    def get(self, key: Any) -> list[dict[str, Any]]:
        """The rows it sees with this key, as `LookupTable.get` gives them."""
        open_table = self._open()
        return get_rows(self._engine.reader, open_table.read, key, open_table.resolved_table.version, None)

    def get_many(self, keys: KeysLike) -> pa.Table:
        """The rows it sees with those keys, as `LookupTable.get_many` gives them."""
        open_table = self._open()
        key_table = as_key_table(keys, key_names(open_table.options))
        return rows_of_keys(self._engine.reader, open_table.read, key_table, open_table.resolved_table.version, None)

    def _open(self) -> OpenTable:
        self._check_open()
        if self._writes.valid_write_ids() is None:
            raise UfsNotFoundError(
                f"{self._engine.url_of(self._options.path)} is no managed table yet: write to it first"
            )
        table, version = self._writes.version()
        resolved_table = ResolvedTable(table, version, *require_metadata(table, version).columns)
        return OpenTable(self._engine, resolved_table, planner.with_table_keys(self._options, resolved_table), None)

    # --- its end ----------------------------------------------------------------------------------

    def commit(self) -> None:
        """Make its writes the table's, all at once; the end of the block does so. Raises as `LookupTable.write` does."""
        self._check_open()
        self._ended = True
        with self._engine.committing(self._options):
            self.position = self._writes.commit()

    def abort(self) -> None:
        """Give up its writes; an error in the block does so. Does nothing if the transaction has ended."""
        if not self._ended and self._pid == os.getpid():  # a forked child must not abort its parent's transaction
            self._ended = True
            with self._engine.publish():
                self._writes.abort("the transaction was given up")

    def _check_open(self) -> None:
        if self._ended:
            raise ValueError("this transaction has ended: begin another one")
        if self._pid != os.getpid():
            raise ValueError("this transaction belongs to the process that has forked this one: begin another one here")

    def __enter__(self) -> Transaction:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        elif not self._ended and self._pid == os.getpid():
            self.commit()
