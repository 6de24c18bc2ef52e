"""`OpenWrites`: the writes of one transaction, all under one write id.

The transaction itself sees each of its writes at once. Others see all of them after the commit, or none of them ever.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable

import pyarrow as pa

from pyspark_lookup.columnar.types import text_of_schema
from pyspark_lookup.core.write_ids import ValidWriteIdList
from pyspark_lookup.errors import (
    CommitUnknownError,
    DamagedFileError,
    UfsError,
    UfsUnavailableError,
    WriteConflictError,
    raise_ours,
)
from pyspark_lookup.sources.managed.conflicts import Both, ByKey, NewKeys, RowsByKey
from pyspark_lookup.sources.managed.data_files import Job, conform
from pyspark_lookup.sources.managed.log import DataFile, NotificationLog, TableState, WriteMode
from pyspark_lookup.sources.managed.source import managed_version
from pyspark_lookup.sources.managed.writer import TableWriter
from pyspark_lookup.versions.model import Table, TableVersion

_INTERRUPTED = "one of its writes was interrupted"  # completes a sentence about the transaction


class OpenWrites:
    """The writes that one transaction has made so far. Each write is in the log as soon as it is made.

    `since`: the table's state when the transaction began (None: there was no table). `unique`: whether `lookup.write.unique-keys` is set. An
    overwrite replaces the transaction's earlier writes, so it takes a new write id.
    """

    def __init__(
        self,
        writer: TableWriter,
        log: NotificationLog,
        table: Table,
        rows: RowsByKey,
        unique: bool,
        since: TableState | None,
    ) -> None:
        self._writer = writer
        self._log = log
        self._table = table
        self._rows = rows
        self._unique = unique
        self._since = since
        self._base = since.valid_write_ids() if since is not None else None
        self._job: Job | None = None
        self._keyed: ByKey | None = None
        self._new: NewKeys | None = None
        self._count = 0
        self._unknown_reason: str | None = None  # why it is unknown which of the transaction's files are in the log

    # --- what the transaction sees ----------------------------------------------------------------

    def valid_write_ids(self) -> ValidWriteIdList | None:
        """The list of the writes that the transaction sees: its own, and all that were committed when it began. None if there is no table
        yet."""
        if self._job is None or self._base is None:
            return self._base
        return self._base.commit(self._write_id)

    def version(self) -> tuple[Table, TableVersion]:
        """The table, and its version as the transaction sees it.

        Raises WriteConflictError if the table is gone, or if others have aborted the transaction's write.
        """
        valid_ids, state, current = self.valid_write_ids(), self._since, self._log.cached_state()
        if valid_ids is None or state is None or current is None or current.table_id != valid_ids.table:
            raise WriteConflictError(
                f"{self._log.redacted_path} was dropped, or dropped and recreated, since the transaction began: begin another transaction"
            )
        own_write_id = None if self._job is None else self._write_id
        if own_write_id is not None:
            write = current.writes.get(own_write_id)
            if write is None or write.ended_at is not None:
                raise WriteConflictError(
                    f"{self._log.redacted_path}: others have aborted the transaction's write {own_write_id}: begin another transaction"
                )
            state = state.with_open_write(write)
        table = dataclasses.replace(self._table, pinned=str(valid_ids), own_write_id=own_write_id)
        version = managed_version(table, state)
        if self._job is not None and version.metadata is not None:
            # The schema includes columns that the transaction's own writes add.
            schema = text_of_schema(self._job.definition.schema)
            version = dataclasses.replace(version, metadata=dataclasses.replace(version.metadata, schema=schema))
        return table, version

    # --- writes -----------------------------------------------------------------------------------

    def write(self, schema: pa.Schema, batches: Iterable[pa.RecordBatch], mode: WriteMode) -> None:
        """Write rows. The transaction sees them from now on. Raises the errors of `TableWriter.begin` and `TableWriter.commit`."""
        self._attempt(lambda: self._add(schema, batches, mode), mode is WriteMode.OVERWRITE)

    def delete(self, keys: pa.Table) -> None:
        """Delete the rows with these keys, including rows that this transaction has written. Raises the errors of `TableWriter.delete`."""
        key_table = self._writer.cast_key_table(keys)
        if key_table.num_rows:
            self._attempt(lambda: self._hide(self._begin(key_table.schema, WriteMode.DELETE), [], key_table), False)

    def _attempt(self, act: Callable[[], None], anew: bool) -> None:
        """Run `act`, which writes. If it fails with an error, the transaction is as before; if it is interrupted, the transaction fails.

        `anew`: `act` writes under a new write id, and so replaces the transaction's earlier writes.
        """
        self._check_whole()
        before = self._job, self._keyed, self._new, self._base
        begins = anew or self._job is None
        if begins:
            self._job = None
        try:
            act()
        except Exception:
            if begins:
                self.abort("a write of the transaction failed")
            self._job, self._keyed, self._new, self._base = before
            raise
        except BaseException:
            self._unknown_reason = _INTERRUPTED
            raise
        if begins and before[0] is not None:
            with contextlib.suppress(
                UfsError, DamagedFileError
            ):  # without a commit its rows stay invisible, aborted or not
                self._writer.abort(before[0], (), "the transaction has overwritten it")

    def _add(self, schema: pa.Schema, batches: Iterable[pa.RecordBatch], mode: WriteMode) -> None:
        job = self._begin(schema, mode)
        kept_columns = self._writer.find_kept_columns(job.definition, schema, mode)
        if kept_columns:
            new_rows = pa.Table.from_batches(
                [conform(batch, job.definition.schema, "the rows") for batch in batches], job.definition.schema
            )
            self._rows.check_different(new_rows.select(list(job.definition.keys)))
            batches = self._rows.complete(job.definition, new_rows, kept_columns, self.version()[1].files)[
                0
            ].to_batches()
        self._count += 1
        files = self._writer.write(job, batches, f"part-{self._count:05d}")
        try:
            self._put_files(job, files, mode)
        except Exception:
            state = self._log.cached_state()
            if self._unknown_reason is None and state is not None:
                self._writer.discard(job, files, state)
            raise

    def _begin(self, schema: pa.Schema, mode: WriteMode) -> Job:
        if self._job is None:
            self._job = self._writer.begin(schema, mode, first=True)
            if self._base is None:
                self._base, self._since = ValidWriteIdList(self._job.table_id, 0), self._log.cached_state()
            if self._base.table != self._job.table_id:
                raise WriteConflictError(
                    f"{self._log.redacted_path} was dropped and recreated since the transaction began: begin another transaction"
                )
            table = dataclasses.replace(self._table, own_write_id=self._write_id)
            self._keyed = ByKey(self._rows, table, None, self._job.directory)
            self._new = NewKeys(self._rows, table, [], self._job.directory, self._keyed)
        self._job = self._writer.widen(self._job, schema, mode.by_key)
        return self._job

    def _put_files(self, job: Job, files: list[DataFile], mode: WriteMode) -> None:
        definition = job.definition
        if mode is WriteMode.UPSERT:
            keys = self._rows.read_keys(definition, files)
            self._rows.check_different(keys)
            self._hide(job, files, keys)
            return
        if self._unique and self._new is not None:
            keys = self._rows.read_keys(definition, files)
            self._rows.check_different(keys)
            self._rows.check_new(definition, keys, self.version()[1].files)
            self._log_put(job, files, None, functools.partial(self._new.add, keys))
            return
        self._log_put(job, files, None)

    def _hide(self, job: Job, files: list[DataFile], keys: pa.Table) -> None:
        """Put files, if any, and delete the rows with these keys from all files that the transaction sees, its own earlier files included."""
        assert self._keyed is not None
        visible_files = self.version()[1].files
        own_prefix = f"{self._table.url}/{job.directory}/"
        checked_files = [file for file in visible_files if not file.url.startswith(own_prefix)]
        replaced_rows = self._rows.find(job.definition, keys, visible_files)
        self._log_put(job, files, replaced_rows, functools.partial(self._keyed.add, keys, checked_files))

    def _log_put(
        self, job: Job, files: list[DataFile], rows: pa.Table | None, on_logged: Callable[[], None] = lambda: None
    ) -> None:
        """Write a delete file that names `rows`, and put its name and those of `files` into the log; then call `on_logged`."""
        # Until the put returns, the log may or may not name the files. If the store's answer is lost, the files stay, and the transaction
        # can no longer be committed.
        self._unknown_reason = _INTERRUPTED
        try:
            self._writer.put_files(job, files, rows)
        except CommitUnknownError as problem:
            self._unknown_reason = str(problem.__cause__ or problem)
            self._check_whole(problem)
        except Exception:
            self._unknown_reason = None
            raise
        on_logged()
        self._unknown_reason = None

    def _check_whole(self, cause: Exception | None = None) -> None:
        """Raise UfsUnavailableError if it is unknown whether one of the transaction's writes is in the log."""
        if self._unknown_reason is not None:
            raise_ours(
                UfsUnavailableError(
                    f"the transaction on {self._log.redacted_path} has failed, and nothing of it will be committed: "
                    f"{self._unknown_reason}; begin another transaction"
                ),
                cause,
            )

    # --- its end ----------------------------------------------------------------------------------

    def commit(self) -> int | None:
        """Make all writes visible at once, and return the log position of the commit; None if the writes change nothing.

        Raises the errors of `TableWriter.commit`.
        """
        if self._unknown_reason is not None:
            self.abort("it is unknown which of its writes are in the log")
            self._check_whole()
        if self._job is None or self._keyed is None or self._new is None:
            return None
        job, write_id, self._job = self._job, self._write_id, None
        effect = Both((self._keyed, self._new) if self._unique else (self._keyed,))
        state = self._writer.commit(job, (), effect=effect)
        write = state.writes.get(write_id) if state is not None and state.table_id == job.table_id else None
        return write.ended_at if write is not None and write.committed else None

    def abort(self, reason: str) -> None:
        """Make sure that nobody ever sees a row of the transaction."""
        if self._job is not None:
            job, self._job = self._job, None
            with contextlib.suppress(UfsError, DamagedFileError):  # without a commit its rows stay invisible
                self._writer.abort(job, (), reason)

    @property
    def _write_id(self) -> int:
        assert self._job is not None
        assert self._job.write_id is not None
        return self._job.write_id
