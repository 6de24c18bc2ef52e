"""The changes of a managed table: the rows that each commit of its log has added and removed.

A change is a row and its kind, `insert` or `delete`. If an upsert replaces a row by another with the same key, there are two changes:
`update_preimage` with the old row, and `update_postimage` with the new one. A compaction changes no row. Planning reads only the log; tasks
read the rows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.keys import Keys, Numbers, RowIndex, as_indices, one_array, sort_distinct
from pyspark_lookup.columnar.predicate import Predicate, referenced_columns
from pyspark_lookup.columnar.types import schema_of_text
from pyspark_lookup.errors import NotSupportedError, SchemaError, VersionGoneError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.scan.table_scan import Files, matching_rows
from pyspark_lookup.sources.managed.conflicts import KeyedRows
from pyspark_lookup.sources.managed.log import Change, Definition, NotificationLog, TableState, TableWrite, WriteMode
from pyspark_lookup.sources.managed.source import managed_version, read_version, version_of_file
from pyspark_lookup.storage.stores import DELETE_FILE, FileVersion
from pyspark_lookup.versions.model import PATH, ROW, DeleteFile, Table, require_metadata

CHANGE_TYPE, LOG_POSITION, COMMIT_TIMESTAMP = "_change_type", "_log_position", "_commit_timestamp"
CHANGE_COLUMNS = pa.schema(
    [(CHANGE_TYPE, pa.string()), (LOG_POSITION, pa.int64()), (COMMIT_TIMESTAMP, pa.timestamp("us", "UTC"))]
)
"""The columns that are added to a changed row: the kind of the change, the log position of the commit (as in `lookup.version`), and when the
store got that commit (null: the log was trimmed)."""

_PRUNED_BY = 10_000  # if more keys than this were removed, all row groups are read: hardly any could be skipped
_INSERT, _DELETE, _BEFORE, _AFTER = "insert", "delete", "update_preimage", "update_postimage"


@dataclasses.dataclass(frozen=True)
class ChangeTask:
    """Rows that one commit has added or removed, for one task to read.

    `added`: True for added rows, False for removed ones. `files`: the files that have these rows. `marks`: the commit's delete files, which
    name the rows that it deletes. `counterparts`: for updates, the files with the other half of each update: the new rows if `files` has the
    old ones, the old rows if `files` has the new ones. `keys`: the table's key columns at the time of the commit. `schema`: the table's
    current columns. `committed_at_s`: the time of the commit on the store's clock.
    """

    table: Table
    position: int
    added: bool
    files: tuple[FileVersion, ...]
    keys: tuple[str, ...]
    schema: str
    marks: tuple[FileVersion, ...] = ()
    counterparts: tuple[FileVersion, ...] = ()
    committed_at_s: float | None = None

    @property
    def bytes(self) -> int:
        """The total size of `files`, in bytes."""
        return sum(file.size for file in self.files)


def change_columns(columns: pa.Schema) -> pa.Schema:
    """The columns of a row, followed by `CHANGE_COLUMNS`. Raises SchemaError if the table has a column with the name of one of
    `CHANGE_COLUMNS`."""
    for name in CHANGE_COLUMNS.names:
        if name in columns.names:
            raise SchemaError(
                f"the table's column {name!r} has the same name as a column that reads of changes add: leave it out with lookup.columns"
            )
    return pa.schema([*columns, *CHANGE_COLUMNS])


# --- planning ---------------------------------------------------------------------------------------


def plan_snapshot(table: Table, log: NotificationLog, state: TableState, position: int) -> list[ChangeTask]:
    """The tasks that read all rows of the version at a position, as inserts of the commits that wrote their files.

    After a compaction it is no longer known which commit added a row: the compaction then counts as that commit. Raises VersionGoneError if
    the version was vacuumed.
    """
    version = read_version(log, table, state, position)
    earlier = log.pages.find_state(state, position)
    keys, schema = earlier.find_definition(position).keys, _schema(table, state)
    committed_writes = (write for write in earlier.writes.values() if write.committed)
    put_at = {
        f"{table.url}/{file.path}": write.ended_at or position for write in committed_writes for file in write.files
    }
    tasks = [ChangeTask(table, put_at[file.url], True, (file,), keys, schema) for file in version.files]
    return _timed(log, tasks, 0)


def cost(state: TableState, change: Change) -> tuple[int, int, int]:
    """The (rows, files, bytes) that a reader of a change must read. `state`: the state that `LogPages.changes` returns with the change."""
    write = state.writes[change.write_id] if change.write_id is not None else None
    if write is None or write.mode is WriteMode.COMPACT:
        return 0, 0, 0
    if write.vacuumed:  # unknown; reading it raises VersionGoneError
        return 1, 1, 1
    files_to_read = [*write.files, *write.deletes]
    if write.mode is WriteMode.OVERWRITE:
        files_to_read += [
            file for needed_write in state.find_needed(change.position - 1) for file in needed_write.files
        ]
    return sum(file.rows for file in files_to_read), len(files_to_read), sum(file.size for file in files_to_read)


def changes_between(
    table: Table, log: NotificationLog, state: TableState, after: int, until: int, appends_only: bool
) -> Iterator[ChangeTask]:
    """The tasks that read the changes of the commits after position `after`, up to and including `until`, in order.

    Raises VersionGoneError if the files of such a commit were vacuumed. With `appends_only`, raises NotSupportedError for a commit that
    removes rows.
    """
    schema = _schema(table, state)
    tasks: list[ChangeTask] = []
    for part, change in log.pages.changes(state, after, until):
        write = part.writes[change.write_id] if change.write_id is not None else None
        if write is not None and write.mode is not WriteMode.COMPACT:
            before = part.find_needed(change.position - 1) if _removes(write) else ()
            is_vacuumed = any(log.pages.is_vacuumed(state, needed_write) for needed_write in (write, *before))
            tasks += _tasks(table, part, change.position, write, appends_only, schema, is_vacuumed)
    yield from _timed(log, tasks, after)


def _timed(log: NotificationLog, tasks: Sequence[ChangeTask], after: int) -> list[ChangeTask]:
    """The tasks, each with the time of its commit. `after`: a position before all these commits."""
    if not tasks:
        return []
    put_at_s = log.put_times(after, max(task.position for task in tasks) - after)
    return [dataclasses.replace(task, committed_at_s=put_at_s.get(task.position)) for task in tasks]


def _tasks(
    table: Table,
    state: TableState,
    position: int,
    write: TableWrite,
    appends_only: bool,
    schema: str,
    is_vacuumed: bool,
) -> Iterator[ChangeTask]:
    where = redact("path", table.url)
    if is_vacuumed:
        raise VersionGoneError(
            f"{where}: the changes at log position {position} were vacuumed before they were read, and are lost. Restart a stream with a new "
            "checkpoint (with lookup.stream.start = SNAPSHOT it returns all current rows again, but not the deletes that it has missed), or a batch "
            "at a later lookup.changes-from. "
            "In future, vacuum only changes that all readers have read"
        )
    removes = _removes(write)
    if removes and appends_only:
        raise NotSupportedError(
            f"{where}: the commit at log position {position} ({write.mode.value}) removes rows, which a stream of rows cannot "
            f"express: set lookup.view = changes, whose column {CHANGE_TYPE} can"
        )
    keys = state.find_definition(position).keys
    marks = tuple(version_of_file(table, file, DELETE_FILE) for file in write.deletes)
    deletes = tuple(DeleteFile(mark.url, mark.size) for mark in marks)
    new_files = [dataclasses.replace(version_of_file(table, file), deletes=deletes) for file in write.files]
    before: tuple[FileVersion, ...] = ()
    if removes:
        before = tuple(managed_version(table, state, position - 1).files)
    if write.mode is WriteMode.OVERWRITE:
        stay = {file.url for file in managed_version(table, state, position).files}
        for file in before:
            if file.url not in stay:
                yield ChangeTask(table, position, False, (file,), keys, schema)
        before = tuple(file for file in before if file.url in stay)
    if marks and before:
        yield ChangeTask(table, position, False, before, keys, schema, marks, tuple(new_files))
    for file in new_files:
        yield ChangeTask(table, position, True, (file,), keys, schema, marks, before if marks else ())


def _removes(write: TableWrite) -> bool:
    """Whether a write may remove rows that the table had before."""
    return write.mode is WriteMode.OVERWRITE or bool(write.deletes)


def _schema(table: Table, state: TableState) -> str:
    return require_metadata(table, managed_version(table, state)).schema


# --- reading ----------------------------------------------------------------------------------------


def read_changes(
    files: Files, tasks: Sequence[ChangeTask], columns: pa.Schema, predicate: Predicate | None
) -> Iterator[pa.RecordBatch]:
    """The changed rows for which `predicate` is true, with `columns`, some of which may be change columns.

    A file from which several commits have removed rows is read once. A column that the table does not have is null. Raises SourceChangedError
    if a file is gone.
    """
    table_names = {name for name in columns.names if name not in CHANGE_COLUMNS.names}
    times = {task.position: None if task.committed_at_s is None else int(task.committed_at_s * 1e6) for task in tasks}
    predicate_columns = referenced_columns(predicate)
    read_names = {*table_names, *predicate_columns, *(key for task in tasks for key in task.keys)}
    parts = [_Changes(files, task, read_names) for task in tasks]
    removing_parts = [part for part in parts if part.removes]
    other_changes = (change for part in parts if not part.removes for change in part.rows())
    for position, kinds, batch in itertools.chain(_read_removed(removing_parts), other_changes):
        of_commit = (position, times[position])
        change_arrays = (
            pa.repeat(pa.scalar(value, field.type), batch.num_rows)
            for value, field in zip(of_commit, list(CHANGE_COLUMNS)[1:], strict=True)
        )
        names = [*batch.schema.names, *CHANGE_COLUMNS.names]
        rows = pa.RecordBatch.from_arrays([*batch.columns, kinds, *change_arrays], names)
        matches = matching_rows(rows, predicate)
        if matches is not None and matches.num_rows:
            columns_by_name = dict(zip(matches.schema.names, matches.columns, strict=True))
            shown_columns = [
                columns_by_name[c.name] if c.name in columns_by_name else pa.nulls(matches.num_rows, c.type)
                for c in columns
            ]
            yield pa.RecordBatch.from_arrays(shown_columns, schema=columns)


_Change = tuple[int, pa.Array, pa.RecordBatch]  # (log position, kind of change of each row, rows)


def _read_removed(parts: Sequence[_Changes]) -> Iterator[_Change]:
    """The rows that the commits' delete files mark as deleted. Each data file is read once, even if several tasks need rows of it."""
    files: dict[str, FileVersion] = {}
    from_file: dict[str, list[tuple[_Changes, Numbers, pa.Table]]] = {}
    for part in parts:
        removed = part.find_removed()
        for file in part.task.files:
            if file.url in removed:
                files[file.url] = file
                from_file.setdefault(file.url, []).append((part, *removed[file.url]))
    have_same_keys = len({part.task.keys for part in parts}) == 1
    for url, file in files.items():
        keys = [removed_keys for _, _, removed_keys in from_file[url]]
        is_selective = have_same_keys and sum(table.num_rows for table in keys) <= _PRUNED_BY
        # Rows deleted by a predicate may have no key.
        is_selective = is_selective and all(
            table.num_columns and not any(c.null_count for c in table.columns) for table in keys
        )
        # `find_removed` has already left out rows that were deleted earlier.
        whole_file = dataclasses.replace(file, deletes=())
        for at, batch in parts[0].read(whole_file, pa.concat_tables(keys) if is_selective else None):
            for part, removed_rows, _ in from_file[url]:
                low, high = np.searchsorted(removed_rows, [at[0], at[-1] + 1])
                if low < high:
                    rows = batch.take(as_indices(removed_rows[low:high] - at[0]))
                    yield part.task.position, part.kinds_of_removed(rows), rows


class _Changes:
    """Reads the rows of one task, and tells the kind of change of each row."""

    def __init__(self, files: Files, task: ChangeTask, read_names: Collection[str]) -> None:
        self.task = task
        self._files = files
        self._rows = KeyedRows(files, task.table)
        self._definition = Definition(schema_of_text(task.schema), task.keys)
        self._new: RowIndex | None = None
        self._names = [name for name in self._definition.schema.names if name in read_names]

    @property
    def removes(self) -> bool:
        """Whether the task's rows were removed by delete files, and not by an overwrite."""
        return bool(self.task.marks) and not self.task.added

    def rows(self) -> Iterator[_Change]:
        """The rows of the task's files: either all added, or all removed."""
        old = None
        if self.task.marks and self.task.counterparts:
            removed_keys = [keys for _, keys in self._find_removed(self.task.counterparts).values()]
            old = self._index(pa.concat_tables(removed_keys)) if removed_keys else None
        match_kind, default_kind = (_AFTER, _INSERT) if self.task.added else (_BEFORE, _DELETE)
        for file in self.task.files:
            for _, batch in self.read(file, None):
                yield (
                    self.task.position,
                    _kinds(self._match(old, batch), match_kind, default_kind, batch.num_rows),
                    batch,
                )

    def read(self, file: FileVersion, keys: pa.Table | None) -> Iterator[tuple[Numbers, pa.RecordBatch]]:
        """(positions, rows) of a file. With `keys`, row groups without these keys are left out."""
        located_rows = self._rows.count_rows(self._definition, self._names, file, keys)
        return ((at, batch) for at, batch in located_rows if batch.num_rows)

    def find_removed(self) -> dict[str, tuple[Numbers, pa.Table]]:
        """(the positions of the removed rows, the keys of these rows) by the URL of their file."""
        self._new = (
            self._index(self._rows.read_keys(self._definition, self.task.counterparts))
            if self.task.counterparts
            else None
        )
        return self._find_removed(self.task.files)

    def kinds_of_removed(self, rows: pa.RecordBatch) -> pa.Array:
        """The kind of change of each removed row."""
        return _kinds(self._match(self._new, rows), _BEFORE, _DELETE, rows.num_rows)

    def _find_removed(self, files: Sequence[FileVersion]) -> dict[str, tuple[Numbers, pa.Table]]:
        """The rows of these files that the task's delete files name, in the form that `find_removed` returns. Rows that earlier commits
        deleted are left out."""
        marks = self._rows.read_delete_files(self._definition, self.task.marks)
        prefix = self.task.table.url + "/"
        urls_by_path = {file.url.removeprefix(prefix): file.url for file in files}
        deleted_by_url = self._files(True).read_deleted(self.task.table, files)
        paths = one_array(marks.column(PATH)).dictionary_encode()
        # One sort instead of a search for each file: a commit may delete very many rows of many files.
        codes = np.asarray(paths.indices)
        order = np.argsort(codes, kind="stable")
        starts = np.searchsorted(codes[order], np.arange(len(paths.dictionary) + 1)).tolist()
        positions = np.asarray(one_array(marks.column(ROW)))[order]
        keys = marks.select(list(self.task.keys)).take(as_indices(order))
        removed: dict[str, tuple[Numbers, pa.Table]] = {}
        for path, start, stop in zip(paths.dictionary.to_pylist(), starts[:-1], starts[1:], strict=True):
            if path in urls_by_path:
                of_file, of_keys = positions[start:stop], keys.slice(start, stop - start)
                deleted_positions = deleted_by_url.get(urls_by_path[path])
                if deleted_positions is not None:
                    is_removed = ~np.isin(of_file, deleted_positions)
                    of_file, of_keys = of_file[is_removed], of_keys.filter(pa.array(is_removed))
                if len(of_file):
                    removed[urls_by_path[path]] = sort_distinct(of_file), of_keys
        return removed

    def _index(self, keys: pa.Table) -> RowIndex | None:
        return RowIndex(keys, self.task.keys) if keys.num_rows else None

    def _match(self, index: RowIndex | None, batch: pa.RecordBatch) -> Numbers | None:
        """For each row, whether the index has its key; None if the index has the key of no row."""
        if index is None or not batch.num_rows:
            return None
        has_key = np.zeros(batch.num_rows, np.bool_)
        has_key[index.match(Keys([batch.column(name) for name in self.task.keys])).keys] = True
        return has_key if has_key.any() else None


def _kinds(has_match: Numbers | None, match_kind: str, default_kind: str, rows: int) -> pa.Array:
    if has_match is None:
        return pa.repeat(pa.scalar(default_kind, pa.string()), rows)
    return pc.if_else(pa.array(has_match), match_kind, default_kind)
