"""`Compactor`: writes the rows of several writes into a few files, sorted by key, in a commit that changes no row.

A compaction's commit names the writes that it replaces. Writes that others commit meanwhile stay; if they delete rows, the compaction deletes
these rows in its own files, too. If another commit has replaced the same writes, the compaction starts again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.errors import UfsError, UfsNotFoundError, WriteConflictError, redact_cause
from pyspark_lookup.sources.managed.conflicts import Rewriting, RowsByKey
from pyspark_lookup.sources.managed.data_files import WriteSizes
from pyspark_lookup.sources.managed.log import NotificationLog, TableState, TableWrite, WriteMode
from pyspark_lookup.sources.managed.source import managed_version
from pyspark_lookup.sources.managed.writer import TableWriter
from pyspark_lookup.storage.stores import FileVersion
from pyspark_lookup.versions.model import PATH, Table

_log = logging.getLogger("pyspark_lookup.writing")

_ATTEMPTS = 5
_DELETED_SHARE = 0.2  # a requested compaction takes all writes if more than this share of their rows is deleted


def choose(state: TableState, is_requested: bool, bounds: WriteSizes) -> list[TableWrite]:
    """The writes that a compaction should replace; none if a compaction would gain nothing.

    Writes are taken in the order of their size, the smallest first, as long as the next write is small, or at most twice as large as all
    writes taken before it together. So a row is rewritten only a few times, however often the table is compacted. `is_requested`: True if a
    caller requests the compaction, False if a commit starts it. A requested compaction takes all writes if more than a fifth of the rows is
    deleted.
    """
    with_rows = {write.id for write in state.find_visible()}
    sizes = {write.id: write.bytes for write in state.find_needed()}
    candidates = [
        write for write in state.find_needed() if is_requested or sizes[write.id] <= bounds.unasked_write_bytes
    ]
    sizes.update((id_, 0) for id_ in sizes.keys() - with_rows)
    rows = sum(write.rows for write in candidates if write.id in with_rows)
    deleted_count = sum(file.rows for write in candidates for file in write.deletes)
    always = bounds.compact_bytes if is_requested else bounds.unasked_compact_bytes
    if is_requested and deleted_count > _DELETED_SHARE * rows:
        return candidates
    selection: list[TableWrite] = []
    size = 0
    for write in sorted(candidates, key=lambda write: sizes[write.id]):
        if selection and sizes[write.id] > max(always, 2 * size):
            break
        selection.append(write)
        size += sizes[write.id]
    has_small_files = (
        len(selection) == 1
        and len(selection[0].files) > 1
        and selection[0].bytes < bounds.small_file_bytes * len(selection[0].files)
    )
    return (
        selection
        if len(selection) > 1 or (is_requested and has_small_files and selection[0].mode is not WriteMode.COMPACT)
        else []
    )


class Compactor:
    """Compacts the managed table at `log.url`. `after`: a commit starts a compaction once this many writes can be compacted (0: never)."""

    def __init__(
        self, writer: TableWriter, log: NotificationLog, table: Table, rows: RowsByKey, after: int, sizes: WriteSizes
    ) -> None:
        self._writer = writer
        self._log = log
        self._table = table
        self._rows = rows
        self._after = after
        self._sizes = sizes
        self._redacted_path = log.redacted_path

    def compact(self) -> TableState:
        """Compact the writes that `choose` selects, in one commit. Returns the state after this commit; the current state if `choose` selects
        none.

        Raises UfsNotFoundError if there is no table, WriteConflictError if others replaced the same rows during each of several attempts.
        """
        return self._compact(is_requested=True)

    def compact_if_due(self) -> None:
        """Compact small writes if there are enough and no other compaction runs. Errors are only logged, because the caller's rows are
        committed."""
        state = self._log.cached_state()
        if not self._after or state is None or self._is_under_way(state):
            return
        if len(choose(state, False, self._sizes)) < self._after:
            return
        try:
            self._compact(is_requested=False)
        except Exception as problem:
            _log.warning(
                "compacting %s failed; another commit will try again",
                self._redacted_path,
                exc_info=redact_cause(problem),
            )

    def _is_under_way(self, state: TableState) -> bool:
        """Whether a compaction has begun so recently that its process is probably still alive."""
        recent = state.position - 4 * self._after
        return any(write.mode is WriteMode.COMPACT and write.allocated_at > recent for write in state.open_writes())

    def _compact(self, is_requested: bool) -> TableState:
        problem: WriteConflictError | None = None
        for _ in range(_ATTEMPTS):
            state = self._log.latest()
            if state is None:
                raise UfsNotFoundError(
                    f"{self._redacted_path} is not a managed table, so there is nothing to compact: check the path"
                )
            if not choose(state, is_requested, self._sizes):
                return state
            try:
                return self._fold(state, is_requested)
            except WriteConflictError as conflict:
                problem = conflict
        assert problem is not None
        raise problem

    def _fold(self, state: TableState, is_requested: bool) -> TableState:
        job = self._writer.begin(state.definition.schema, WriteMode.COMPACT)
        try:
            since = self._log.cached_state()
            write_id = job.write_id
            if since is None or since.table_id != job.table_id or write_id is None:
                raise WriteConflictError(f"{self._redacted_path} was dropped and recreated: compact it again")
            job = dataclasses.replace(job, definition=since.definition)  # others may have added columns meanwhile
            # A compaction replaces only writes that began before it.
            replaced_writes = [write for write in choose(since, is_requested, self._sizes) if write.id < write_id]
            if not replaced_writes:
                self._writer.abort(job, (), "others have compacted the same writes")
                return self._log.latest() or since
            paths = {f"{self._table.url}/{file.path}" for write in replaced_writes for file in write.files}
            files = managed_version(self._table, since).files
            replaced_files = [file for file in files if file.url in paths]
            other_files = [file for file in files if file.url not in paths]
            outside_deletes = self._marks(since, replaced_writes, other_files)
            parts = self._rows.order(since.definition, replaced_files) if replaced_files else ()
            new_files = self._writer.write_ordered(job, parts, "compacted")
            rows = self._rows.count(replaced_files) if replaced_files else 0
            # Read the files back: unreadable ones must not replace readable ones.
            written_rows = self._rows.read_back(job.definition, new_files) if new_files else 0
            if written_rows != rows:
                raise AssertionError(
                    f"{self._redacted_path}: the compacted files have {written_rows} rows instead of {rows}, so nothing was compacted"
                )
        except BaseException:
            with contextlib.suppress(UfsError):  # the error itself says more
                self._writer.abort(job, ())
            raise
        effect = Rewriting(
            self._rows, self._table, since, [write.id for write in replaced_writes], new_files, outside_deletes
        )
        committed_state = self._writer.commit(job, new_files, effect=effect)
        assert committed_state is not None
        return committed_state

    def _marks(
        self, since: TableState, replaced_writes: Sequence[TableWrite], other_files: Sequence[FileVersion]
    ) -> pa.Table | None:
        """The rows of `other_files` that the compacted writes delete; None if these writes have no delete files, or there are no other
        files."""
        marks = [file for write in replaced_writes for file in write.deletes]
        if not marks or not other_files:
            return None
        deleted_rows = self._rows.read_delete_files(since.definition, marks)
        paths = pa.array([file.url.removeprefix(self._table.url + "/") for file in other_files], pa.string())
        deleted_rows = deleted_rows.filter(pc.is_in(deleted_rows.column(PATH), value_set=paths))
        # A key may also be null because a predicate has deleted a row without a key.
        if since.rekeyed_at and any(deleted_rows.column(name).null_count for name in since.definition.keys):
            raise WriteConflictError(
                f"{self._redacted_path}: the key columns have changed since some rows were replaced, and the deletes of these rows cannot be "
                "compacted: while nobody else writes, set the former key columns with LookupTable.alter(keys=…), compact and set the new ones again, or "
                "overwrite the table with its own rows"
            )
        return deleted_rows
