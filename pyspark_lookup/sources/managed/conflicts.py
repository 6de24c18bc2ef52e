"""The effect of a commit on rows that others have committed, and the checks that it needs.

The race: others commit while a write is under way. So a write looks into all new commits, and puts its own event at the position that
follows them. If another event has taken that position, it looks again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.errors import WriteConflictError
from pyspark_lookup.sources.managed.log import DataFile, Definition, TableState
from pyspark_lookup.sources.managed.source import managed_version, version_of_file
from pyspark_lookup.storage.stores import FileVersion
from pyspark_lookup.versions.model import PATH, ROW, Table


class RowsByKey(Protocol):
    """A table's rows by their keys: see `rows_by_key.KeyedRows`."""

    def read_keys(self, definition: Definition, files: Sequence[DataFile]) -> pa.Table: ...
    def check_different(self, keys: pa.Table) -> None: ...
    def exclude_keys(self, keys: pa.Table, excluded_keys: pa.Table) -> pa.Table: ...
    def check_new(self, definition: Definition, keys: pa.Table, files: Sequence[FileVersion]) -> None: ...
    def find(self, definition: Definition, keys: pa.Table, files: Sequence[FileVersion]) -> pa.Table: ...
    def find_where(self, definition: Definition, where: str, files: Sequence[FileVersion]) -> pa.Table: ...
    def read_delete_files(self, definition: Definition, files: Sequence[DataFile]) -> pa.Table: ...
    def read_all(self, definition: Definition, files: Sequence[DataFile]) -> pa.Table: ...
    def locate_all(self, definition: Definition, files: Sequence[DataFile]) -> pa.Table: ...
    def complete(
        self, definition: Definition, rows: pa.Table, lacking: Sequence[str], files: Sequence[FileVersion]
    ) -> tuple[pa.Table, pa.Table]: ...
    def count(self, files: Sequence[FileVersion]) -> int: ...
    def read_back(self, definition: Definition, files: Sequence[DataFile]) -> int: ...
    def order(self, definition: Definition, files: Sequence[FileVersion]) -> Iterator[Iterable[pa.RecordBatch]]: ...


class Effect(Protocol):
    """What a write does to rows of other writes. `replaces`: for a compaction, the writes whose rows its files have."""

    @property
    def replaces(self) -> tuple[int, ...]: ...
    @property
    def added(self) -> Sequence[DataFile]:
        """Data files of the write that the last `look` has put."""

    def check(self, state: TableState) -> None:
        """Raise WriteConflictError if the write can no longer be committed after this state."""

    def is_due(self, state: TableState) -> bool:
        """Whether the state has commits that matter to the write and that it has not looked into."""

    def look(self, state: TableState, definition: Definition) -> pa.Table | None:
        """Look into the commits that make it due. Returns their rows that the write replaces, in the form that `RowsByKey.find` returns."""


class Independent:
    """The effect of an append, or of an overwrite, which replaces all lower write ids: no commit needs a look."""

    replaces: tuple[int, ...] = ()
    added: Sequence[DataFile] = ()

    def check(self, state: TableState) -> None:
        pass

    def is_due(self, state: TableState) -> bool:
        return False

    def look(self, state: TableState, definition: Definition) -> pa.Table | None:
        return None


class _Looking:
    """An effect that looks once into each file that others have committed."""

    replaces: tuple[int, ...] = ()
    added: Sequence[DataFile] = ()

    def __init__(self, rows: RowsByKey, table: Table, own_directory: str | None = None) -> None:
        self._rows = rows
        self._table = table
        self._own_prefix = None if own_directory is None else f"{table.url}/{own_directory}/"
        self._checked_urls: set[str] = set()

    def check(self, state: TableState) -> None:
        pass

    def is_due(self, state: TableState) -> bool:
        return bool(self._find_new(state))

    def _find_new(self, state: TableState) -> list[FileVersion]:
        candidates = (file for file in managed_version(self._table, state).files if file.url not in self._checked_urls)
        return [file for file in candidates if self._own_prefix is None or not file.url.startswith(self._own_prefix)]


class ByKey(_Looking):
    """An effect that replaces the rows with certain keys (`keys`, `add`). `own_directory`: the directory of the write's own files, which stay."""

    def __init__(
        self,
        rows: RowsByKey,
        table: Table,
        keys: Callable[[Definition], pa.Table] | None,
        own_directory: str | None = None,
    ) -> None:
        super().__init__(rows, table, own_directory)
        self._keys_of = keys
        self._keys: pa.Table | None = None

    @property
    def keys(self) -> pa.Table | None:
        """The keys; None before the first look."""
        return self._keys

    def add(self, keys: pa.Table, checked_files: Iterable[FileVersion]) -> None:
        """Replace the rows with these keys, too. The write has replaced those in `checked_files` already."""
        urls = {file.url for file in checked_files}
        self._checked_urls = urls if self._keys is None else self._checked_urls & urls
        self._keys = keys if self._keys is None else pa.concat_tables([self._keys, keys])

    def look(self, state: TableState, definition: Definition) -> pa.Table | None:
        if self._keys is None and self._keys_of is not None:
            self._keys = self._keys_of(definition)
        new_files = self._find_new(state)
        self._checked_urls.update(file.url for file in new_files)
        return self._rows.find(definition, self._keys, new_files) if new_files and self._keys is not None else None


class Where(_Looking):
    """Deletes the rows for which a predicate is true, in all files that are committed before this write is."""

    def __init__(self, rows: RowsByKey, table: Table, where: str) -> None:
        super().__init__(rows, table)
        self._where = where

    def look(self, state: TableState, definition: Definition) -> pa.Table | None:
        new_files = self._find_new(state)
        self._checked_urls.update(file.url for file in new_files)
        return self._rows.find_where(definition, self._where, new_files) if new_files else None


class Keeping:
    """Replaces the rows with its keys, and keeps their values in the columns that its own rows lack.

    The race: others may change these values until the commit. So each new version is looked into, and if its values differ, all rows are
    written again with them, and the files written before are deleted. `row_files`: the new rows, with nulls in the columns that they lack.
    `names`: the columns that they have. `write_files` writes rows to files.
    """

    replaces: tuple[int, ...] = ()

    def __init__(
        self,
        rows: RowsByKey,
        table: Table,
        row_files: Sequence[DataFile],
        names: Sequence[str],
        write_files: Callable[[Definition, pa.Table], list[DataFile]],
    ) -> None:
        self._rows = rows
        self._table = table
        self._row_files = row_files
        self._names = frozenset(names)
        self._write_files = write_files
        self._checked_digest: str | None = None
        self._deleted: pa.Table | None = None
        self._last_write: tuple[pa.Table, list[DataFile]] | None = None
        self.added: Sequence[DataFile] = ()

    def check(self, state: TableState) -> None:
        pass

    def is_due(self, state: TableState) -> bool:
        return managed_version(self._table, state).digest != self._checked_digest

    def look(self, state: TableState, definition: Definition) -> pa.Table | None:
        """Raises NonUniqueKeyError for a key that two of the write's rows, or two of the table's, have."""
        self.added = ()
        version = managed_version(self._table, state)
        if version.digest == self._checked_digest:
            return None
        self._checked_digest = version.digest
        new_rows = self._rows.read_all(definition, self._row_files)
        self._rows.check_different(new_rows.select(list(definition.keys)))
        lacking = [name for name in definition.schema.names if name not in self._names]
        rows, replaced_rows = self._rows.complete(definition, new_rows, lacking, version.files)
        parts = [replaced_rows if self._deleted is None else _exclude_places(replaced_rows, self._deleted)]
        self._deleted = parts[0] if self._deleted is None else pa.concat_tables([self._deleted, parts[0]])
        if self._last_write is None or not rows.equals(self._last_write[0]):
            if self._last_write is not None:
                parts.append(self._rows.locate_all(definition, self._last_write[1]))
            self._last_write = rows, self._write_files(definition, rows)
            self.added = self._last_write[1]
        return pa.concat_tables(parts)


def _exclude_places(places: pa.Table, other_places: pa.Table) -> pa.Table:
    """The places that are not among `other_places`."""
    excluded = set(zip(*(other_places.column(name).to_pylist() for name in (PATH, ROW)), strict=True))
    pairs = zip(*(places.column(name).to_pylist() for name in (PATH, ROW)), strict=True)
    return places.filter(pa.array([place not in excluded for place in pairs], pa.bool_()))


class NewKeys(_Looking):
    """Adds rows whose keys the table must not have (`lookup.write.unique-keys`), except for keys that `beside` replaces."""

    def __init__(
        self,
        rows: RowsByKey,
        table: Table,
        files: Sequence[DataFile],
        own_directory: str | None = None,
        beside: ByKey | None = None,
    ) -> None:
        super().__init__(rows, table, own_directory)
        self._files = files
        self._beside = beside
        self._keys: pa.Table | None = None

    def add(self, keys: pa.Table) -> None:
        """Add rows with these keys, too. The caller has checked that no two are equal."""
        self._keys = keys if self._keys is None else pa.concat_tables([self._keys, keys])

    def is_due(self, state: TableState) -> bool:
        return self._keys is None or super().is_due(state)

    def look(self, state: TableState, definition: Definition) -> pa.Table | None:
        """Raises NonUniqueKeyError for a key that two rows have."""
        if self._keys is None:
            self._keys = self._rows.read_keys(definition, self._files)
            self._rows.check_different(self._keys)
        new_files = self._find_new(state)
        self._checked_urls.update(file.url for file in new_files)
        replaced_keys = self._beside.keys if self._beside is not None else None
        keys = self._keys if replaced_keys is None else self._rows.exclude_keys(self._keys, replaced_keys)
        if new_files and keys.num_rows:
            self._rows.check_new(definition, keys, new_files)
        return None


class Both:
    """The effects of several writes that are committed as one."""

    replaces: tuple[int, ...] = ()
    added: Sequence[DataFile] = ()

    def __init__(self, effects: Sequence[Effect]) -> None:
        self._effects = effects

    def check(self, state: TableState) -> None:
        for effect in self._effects:
            effect.check(state)

    def is_due(self, state: TableState) -> bool:
        return any(effect.is_due(state) for effect in self._effects)

    def look(self, state: TableState, definition: Definition) -> pa.Table | None:
        parts = [rows for effect in self._effects if (rows := effect.look(state, definition)) is not None]
        return pa.concat_tables(parts) if parts else None


class Rewriting:
    """The effect of a compaction: `files` have the rows of the writes `replaces`, as they were at the state `since`.

    Rows that others have since deleted by key are deleted in these files, too. Rows deleted by a predicate cannot be found by key: then the
    compaction must start again. `outside_deletes`: the rows in other files that the replaced writes delete.
    """

    added: Sequence[DataFile] = ()

    def __init__(
        self,
        rows: RowsByKey,
        table: Table,
        since: TableState,
        replaces: Sequence[int],
        files: Sequence[DataFile],
        outside_deletes: pa.Table | None,
    ) -> None:
        self.replaces = tuple(sorted(replaces))
        self._rows = rows
        self._table = table
        self._since = since
        self._outside_deletes = outside_deletes
        self._visible_ids = {write.id for write in since.find_visible()} & set(replaces)
        self._paths = {file.path for id_ in replaces for file in since.writes[id_].files}
        self._files = files
        self._checked_ids: set[int] = set()

    def check(self, state: TableState) -> None:
        needed_ids, visible_ids = (
            {write.id for write in writes} for writes in (state.find_needed(), state.find_visible())
        )
        is_unchanged = (
            needed_ids.issuperset(self.replaces)
            and visible_ids.issuperset(self._visible_ids)
            and not state.has_new_keys(self._since.position)
        )
        if not is_unchanged:
            raise WriteConflictError(
                f"table {state.table_id} was overwritten, compacted or given other keys during this compaction: compact it again"
            )
        if state.deleted_where_at > self._since.position:
            raise WriteConflictError(
                f"rows of table {state.table_id} were deleted by a predicate during this compaction: compact it again"
            )

    def is_due(self, state: TableState) -> bool:
        return bool(self._find_new(state))

    def look(self, state: TableState, definition: Definition) -> pa.Table | None:
        new_ids = self._find_new(state)
        self._checked_ids.update(new_ids)
        marks = self._rows.read_delete_files(
            definition, [file for id_ in new_ids for file in state.writes[id_].deletes]
        )
        inside = pa.array(sorted(self._paths), pa.string())
        keys = marks.filter(pc.is_in(marks.column(PATH), value_set=inside)).select(list(definition.keys))
        new_versions = [version_of_file(self._table, file) for file in self._files]
        parts = [self._outside_deletes] if self._outside_deletes is not None else []
        self._outside_deletes = None
        if keys.num_rows and new_versions:
            parts.append(self._rows.find(definition, keys, new_versions))
        return pa.concat_tables(parts) if parts else None

    def _find_new(self, state: TableState) -> list[int]:
        """The writes by key that have been committed since the compaction began and that `look` has not seen."""
        since_position = self._since.position
        ended_writes = (
            write for write in state.writes.values() if write.committed and (write.ended_at or 0) > since_position
        )
        return [write.id for write in ended_writes if write.deletes and write.id not in self._checked_ids]
