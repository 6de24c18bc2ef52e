"""`Effect`: how a commit changes rows that other writes have committed, and what must be checked before the commit.

The race: others commit while a write is under way. So a write first looks into all commits since it began, and then puts its own event at the
next position of the log. If another event has taken that position, the write looks again.

`KeyedRows` finds the rows that have given keys, and checks that keys are unique.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.keys import SEED, Keys, Numbers, distinct_keys, match_rows, one_array, sort_distinct
from pyspark_lookup.columnar.predicate import (
    Among,
    And,
    ColumnStats,
    Compare,
    IsNull,
    Or,
    Predicate,
    referenced_columns,
)
from pyspark_lookup.columnar.sql_predicate import parse_where
from pyspark_lookup.errors import DamagedFileError, NonUniqueKeyError, WriteConflictError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.scan.open_file import Projection
from pyspark_lookup.scan.table_scan import Files, Prepared, PreparedScan, Scan, matching_rows, to_slices
from pyspark_lookup.sources.managed.log import DataFile, Definition, TableState
from pyspark_lookup.sources.managed.source import managed_version, version_of_file
from pyspark_lookup.storage.stores import FileVersion
from pyspark_lookup.versions.model import PATH, ROW, Table, place_fields


class RowsByKey(Protocol):
    """Finds a table's rows by their keys: see `KeyedRows`."""

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
    """The effect of a write on the rows of other writes. `replaces`: for a compaction, the ids of the writes whose rows are in its files."""

    @property
    def replaces(self) -> tuple[int, ...]: ...
    @property
    def added(self) -> Sequence[DataFile]:
        """The data files that the last call of `look` has put for the write."""

    def check(self, state: TableState) -> None:
        """Raise WriteConflictError if the write can no longer be committed after this state."""

    def is_due(self, state: TableState) -> bool:
        """Whether the state has commits that matter to the write and that the write has not looked into yet."""

    def look(self, state: TableState, definition: Definition) -> pa.Table | None:
        """Look into the commits for which `is_due` is true.

        Returns the rows of these commits that the write replaces or deletes, in the form that `RowsByKey.find` returns; None if there are
        none.
        """


class Independent:
    """The effect of an append, or of an overwrite, which replaces the rows of all lower write ids: neither depends on other commits."""

    replaces: tuple[int, ...] = ()
    added: Sequence[DataFile] = ()

    def check(self, state: TableState) -> None:
        pass

    def is_due(self, state: TableState) -> bool:
        return False

    def look(self, state: TableState, definition: Definition) -> pa.Table | None:
        return None


class _Looking:
    """The base of effects that look once into each file that others have committed."""

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
    """Replaces or deletes the rows with certain keys: the keys that the function `keys` returns, and those that `add` is given.

    `own_directory`: the directory of the write's own files, whose rows stay.
    """

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
        """The keys whose rows are replaced; None if they have not been read yet."""
        return self._keys

    def add(self, keys: pa.Table, checked_files: Iterable[FileVersion]) -> None:
        """Also replace the rows with these keys. The write has already replaced their rows in `checked_files`."""
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
    """Deletes the rows for which a predicate is true, from all files that are committed before this write."""

    def __init__(self, rows: RowsByKey, table: Table, where: str) -> None:
        super().__init__(rows, table)
        self._where = where

    def look(self, state: TableState, definition: Definition) -> pa.Table | None:
        new_files = self._find_new(state)
        self._checked_urls.update(file.url for file in new_files)
        return self._rows.find_where(definition, self._where, new_files) if new_files else None


class Keeping:
    """Replaces the rows that have the keys of the write's rows. In columns that the write's rows lack, the old values stay.

    The race: others may change these old values until the commit. So the write looks into each new version. If the old values have changed,
    it writes all its rows again with the new values, and deletes the rows that it wrote before.

    `row_files`: the write's rows, with nulls in the columns that they lack. `names`: the columns that they have. `write_files` writes rows to
    files.
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
        """See `Effect.look`. Raises NonUniqueKeyError for a key that two of the write's rows, or two of the table's rows, have."""
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
    """The rows of `places` that are not in `other_places`, compared by `PATH` and `ROW`."""
    excluded = set(zip(*(other_places.column(name).to_pylist() for name in (PATH, ROW)), strict=True))
    pairs = zip(*(places.column(name).to_pylist() for name in (PATH, ROW)), strict=True)
    return places.filter(pa.array([place not in excluded for place in pairs], pa.bool_()))


class NewKeys(_Looking):
    """Adds rows whose keys the table must not have yet (`lookup.write.unique-keys`). Keys that the effect `beside` replaces are allowed."""

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
        """Also add rows with these keys. The caller has checked that no two of these keys are equal."""
        self._keys = keys if self._keys is None else pa.concat_tables([self._keys, keys])

    def is_due(self, state: TableState) -> bool:
        return self._keys is None or super().is_due(state)

    def look(self, state: TableState, definition: Definition) -> pa.Table | None:
        """See `Effect.look`; returns None. Raises NonUniqueKeyError for a key that two rows of the table would have."""
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
    """The effect of a compaction: `files` have the rows of the writes `replaces`, as these rows were at the state `since`.

    Rows that others delete by key during the compaction are deleted in `files`, too. Rows that others delete by a predicate cannot be found
    by key: then the compaction must start again. `outside_deletes`: the rows of other files that the replaced writes delete.
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
                f"{redact('path', self._table.url)} was overwritten or compacted, or its key columns changed, during this compaction: compact it again"
            )
        if state.deleted_where_at > self._since.position:
            raise WriteConflictError(
                f"rows of {redact('path', self._table.url)} were deleted by a predicate during this compaction: compact it again"
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
        """The ids of the writes with deletes that were committed since the compaction began and that `look` has not seen."""
        since_position = self._since.position
        ended_writes = (
            write for write in state.writes.values() if write.committed and (write.ended_at or 0) > since_position
        )
        return [write.id for write in ended_writes if write.deletes and write.id not in self._checked_ids]


_AT_ONCE = 1_000_000  # about how many rows are compared with the keys at a time


class KeyedRows:
    """Finds rows of one managed table by key. `merge_bytes`: about how many bytes of the files go into one part of `order`."""

    def __init__(self, files: Files, table: Table, merge_bytes: int = 32 * 1024 * 1024) -> None:
        self._files = files
        self._table = table
        self._merge_bytes = merge_bytes

    def read_keys(self, definition: Definition, files: Sequence[DataFile | FileVersion]) -> pa.Table:
        """The key columns of all live rows of these files. A live row is one that no write has deleted; in new files all rows are live."""
        versions = self._versions(files)
        prepared = self._prepare(versions, definition.schema, definition.keys, None)
        columns = pa.schema([definition.schema.field(name) for name in definition.keys])
        return pa.Table.from_batches(list(prepared.batches()), columns)

    def check_different(self, keys: pa.Table) -> None:
        """Raise NonUniqueKeyError if two rows have the same key. A row with a null in a key column has no key."""
        probes = Keys([one_array(column) for column in keys.columns])
        distinct, places = distinct_keys(probes, probes.hashes(SEED))
        counts = np.bincount(places[places >= 0], minlength=len(distinct))
        if len(counts) and counts.max() > 1:
            raise self._twice(
                keys, int(distinct[np.argmax(counts > 1)]), "is in the new rows more than once: write each key once"
            )

    def exclude_keys(self, keys: pa.Table, excluded_keys: pa.Table) -> pa.Table:
        """The rows of `keys` that are not among `excluded_keys`."""
        probes = Keys([one_array(column) for column in keys.columns])
        is_new = np.ones(keys.num_rows, np.bool_)
        is_new[match_rows(excluded_keys, excluded_keys.column_names, probes).keys] = False
        return keys.filter(pa.array(is_new))

    def check_new(self, definition: Definition, keys: pa.Table, files: Sequence[FileVersion]) -> None:
        """Raise NonUniqueKeyError if a live row of these files has one of the keys."""
        matches = self.find(definition, keys, files)
        if matches.num_rows:
            probes = Keys([one_array(keys.column(name)) for name in definition.keys])
            at = match_rows(matches, definition.keys, probes).keys[0]
            raise self._twice(
                keys,
                int(at),
                "is in the table already, and lookup.write.unique-keys allows one row per key: upsert the row, or leave it out",
            )

    def find(self, definition: Definition, keys: pa.Table, files: Sequence[FileVersion]) -> pa.Table:
        """The live rows of these files that have one of the keys, as their key columns, `PATH` and `ROW`.

        Reads only the key columns, and skips row groups that cannot have one of the keys.
        """
        names = list(definition.keys)
        arrays = [one_array(keys.column(name)) for name in names]
        predicate = _among(names, arrays)
        parts = []
        for rows in self._place(definition, files, names, predicate):
            parts.append(self._matching(rows, names, arrays))
        fields = [definition.schema.field(name) for name in names]
        return pa.concat_tables(parts) if parts else pa.schema([*fields, *place_fields()]).empty_table()

    def find_where(self, definition: Definition, where: str, files: Sequence[FileVersion]) -> pa.Table:
        """The live rows of these files for which a predicate is true, in the form that `find` returns. Raises PredicateError for an invalid
        predicate."""
        predicate = parse_where(where, definition.schema)
        places = [*definition.keys, PATH, ROW]
        names = [
            name for name in definition.schema.names if name in referenced_columns(predicate) or name in definition.keys
        ]
        parts = [
            pa.Table.from_batches([rows]).select(places)
            for part in self._place(definition, files, names, predicate)
            for batch in part.to_batches()
            if (rows := matching_rows(batch, predicate)) is not None
        ]
        fields = [definition.schema.field(name) for name in definition.keys]
        return pa.concat_tables(parts) if parts else pa.schema([*fields, *place_fields()]).empty_table()

    def read_all(self, definition: Definition, files: Sequence[DataFile | FileVersion]) -> pa.Table:
        """All rows of new files, in memory."""
        prepared = self._prepare(self._versions(files), definition.schema, definition.schema.names, None, keep=False)
        return pa.Table.from_batches(list(prepared.batches()), definition.schema)

    def locate_all(self, definition: Definition, files: Sequence[DataFile]) -> pa.Table:
        """All rows of new files, including rows with a null key, in the form that `find` returns."""
        parts = []
        for file in files:
            keys = self.read_all(definition, [file]).select(list(definition.keys))
            path = pa.repeat(file.path, keys.num_rows)
            places = pa.array(np.arange(keys.num_rows))
            schema = pa.schema([*keys.schema, *place_fields()])
            parts.append(pa.Table.from_arrays([*keys.columns, path, places], schema=schema))
        return pa.concat_tables(parts)

    def complete(
        self, definition: Definition, rows: pa.Table, lacking: Sequence[str], files: Sequence[FileVersion]
    ) -> tuple[pa.Table, pa.Table]:
        """Fill the columns `lacking` of `rows` from the rows of `files` that have the same keys.

        Returns the filled rows, and the rows of `files` that have their keys, in the form that `find` returns. Raises NonUniqueKeyError if
        two live rows of `files` have the key of a row of `rows`.
        """
        names = list(definition.keys)
        arrays = [one_array(rows.column(name)) for name in names]
        probes = Keys(arrays)
        data = [*names, *lacking]
        parts = [
            self._matching(part, names, arrays) for part in self._place(definition, files, data, _among(names, arrays))
        ]
        fields = [definition.schema.field(name) for name in data]
        stored_rows = pa.concat_tables(parts) if parts else pa.schema([*fields, *place_fields()]).empty_table()
        matches = match_rows(stored_rows, names, probes)
        at, counts = np.unique(matches.keys, return_counts=True)
        if len(counts) and counts.max() > 1:
            raise self._twice(
                rows,
                int(at[np.argmax(counts > 1)]),
                f"is in the table more than once, so it is not clear which value of {lacking[0]!r} to keep: give "
                "the rows that column, or delete the key's rows first, which loses their values in the columns that the new rows lack",
                names,
            )
        places = np.full(rows.num_rows, -1, np.int64)
        places[matches.keys] = matches.rows
        indices = pa.array(places, mask=places < 0)
        for name in lacking:
            rows = rows.set_column(
                rows.schema.get_field_index(name), definition.schema.field(name), stored_rows.column(name).take(indices)
            )
        return rows, stored_rows.select([*names, PATH, ROW])

    def _matching(self, rows: pa.Table, names: Sequence[str], keys: Sequence[pa.Array]) -> pa.Table:
        """The rows of `rows` that have one of the keys."""
        key_table = pa.Table.from_arrays(list(keys), names=list(names))
        matches = match_rows(key_table, names, Keys([one_array(rows.column(name)) for name in names]))
        return rows.take(pa.array(sort_distinct(matches.keys)))

    def read_delete_files(self, definition: Definition, files: Sequence[DataFile | FileVersion]) -> pa.Table:
        """The deleted rows that delete files name, as key columns, `PATH` and `ROW`.

        A key column is null for rows that were deleted while the table had other key columns.
        """
        data = pa.schema([*definition.schema, *place_fields()])
        names = [*definition.keys, PATH, ROW]

        def read(versions: Sequence[FileVersion]) -> pa.Table:
            batches = self._prepare(versions, data, names, None).batches()
            return pa.Table.from_batches(list(batches), pa.schema([data.field(name) for name in names]))

        def is_damaged(rows: pa.Table) -> bool:
            return bool(rows.column(PATH).null_count or rows.column(ROW).null_count)

        versions = self._versions(files)
        deleted_rows = read(versions)
        if is_damaged(deleted_rows):
            damaged_file = next(version for version in versions if is_damaged(read([version])))
            raise DamagedFileError(
                f"{redact('path', damaged_file.url)} is a damaged delete file: it has a row without a path or a position: restore the file"
            )
        return deleted_rows

    def count_rows(
        self, definition: Definition, names: Sequence[str], file: FileVersion, keys: pa.Table | None = None
    ) -> Iterator[tuple[Numbers, pa.RecordBatch]]:
        """(positions, columns `names`) of the live rows of a file. With `keys`, row groups without these keys are left out."""
        predicate = None
        if keys is not None:
            predicate = _among(definition.keys, [one_array(keys.column(name)) for name in definition.keys])
        prepared = self._prepare([file], definition.schema, names, predicate, keep=False)
        assert isinstance(prepared, Prepared)
        for _, places, batch in prepared.place():
            yield places, batch

    def count(self, files: Sequence[FileVersion]) -> int:
        """The number of live rows in these files."""
        rows = self._files(True).rows(self._table, files)
        assert rows is not None  # parquet footers have the number of rows
        return rows

    def read_back(self, definition: Definition, files: Sequence[DataFile]) -> int:
        """The number of rows that a read of all columns of these new files returns."""
        names = definition.schema.names
        prepared = self._prepare(self._versions(files), definition.schema, names, None, keep=False)
        return sum(batch.num_rows for batch in prepared.batches())

    def order(self, definition: Definition, files: Sequence[FileVersion]) -> Iterator[Iterable[pa.RecordBatch]]:
        """The live rows of the files, in parts: all keys of a part come before the keys of the next. Without key columns, the order is
        arbitrary.

        A part fits in memory, unless very many rows have the same key. The rows within a part are not sorted.
        """
        names = definition.schema.names
        if not definition.keys:
            for group in _groups(files, self._merge_bytes):
                yield self._prepare(group, definition.schema, names, None, keep=False).batches()
            return
        for predicate in self._ranges(definition, list(files), definition.keys, None):
            yield self._prepare(files, definition.schema, names, predicate, keep=False).batches()

    def _ranges(
        self, definition: Definition, files: Sequence[FileVersion], keys: Sequence[str], within: Predicate | None
    ) -> Iterator[Predicate | None]:
        """Predicates that divide all rows into ranges of the first key column. A range that is too large is divided by the next key
        column."""
        name = keys[0]
        units = self._unit_bounds(files, definition.schema, name, within)
        cuts = _cuts(definition.schema.field(name), units, self._merge_bytes)
        for low, high in zip([None, *cuts], [*cuts, None], strict=True):
            # Nulls are in the first range, NaN in the last, as in Spark's order.
            parts = [] if within is None else [within]
            if low is not None:
                parts.append(Compare(name, ">=", low))
            if high is not None:
                below = Compare(name, "<", high)
                parts.append(below if low is not None else Or((IsNull(name), below)))
            predicate = None if not parts else parts[0] if len(parts) == 1 else And(tuple(parts))
            size = sum(bytes_ for stats, bytes_ in units if _overlaps(stats, low, high))
            if size > 2 * self._merge_bytes and len(keys) > 1:
                yield from self._ranges(definition, files, keys[1:], predicate)
            else:
                yield predicate

    def _place(
        self, definition: Definition, files: Sequence[FileVersion], names: Sequence[str], predicate: Predicate
    ) -> Iterator[pa.Table]:
        """The live rows of the row groups in which `predicate` may be true, with their path and position, as several tables."""
        schema = pa.schema([*(definition.schema.field(name) for name in names), *place_fields()])
        prepared = self._prepare(files, definition.schema, names, predicate)
        assert isinstance(prepared, Prepared)
        parts: list[pa.Table] = []
        for file, places, batch in prepared.place():
            path = pa.repeat(file.url.removeprefix(self._table.url + "/"), len(places))
            parts.append(pa.Table.from_arrays([*batch.columns, path, pa.array(places, pa.int64())], schema=schema))
            if sum(part.num_rows for part in parts) >= _AT_ONCE:
                yield pa.concat_tables(parts)
                parts = []
        if parts:
            yield pa.concat_tables(parts)

    def _versions(self, files: Sequence[DataFile | FileVersion]) -> list[FileVersion]:
        return [version_of_file(self._table, file) if isinstance(file, DataFile) else file for file in files]

    def _prepare(
        self,
        files: Sequence[FileVersion],
        data: pa.Schema,
        names: Sequence[str],
        predicate: Predicate | None,
        keep: bool = True,
    ) -> PreparedScan:
        """A scan of the columns `names` of files that have the columns `data`. It skips row groups that `predicate` rules out."""
        columns = pa.schema([data.field(name) for name in names])
        projection = Projection(columns, data, pa.schema([]), predicate)
        return self._files(keep).prepare(self._table, to_slices(files), projection)

    def _unit_bounds(
        self, files: Sequence[FileVersion], data: pa.Schema, name: str, predicate: Predicate | None
    ) -> list[tuple[ColumnStats | None, int]]:
        """(bounds of a column, bytes) of each row group of the files in which `predicate` may be true."""
        scan = self._files(False)
        assert isinstance(scan, Scan)  # managed tables are files
        projection = Projection(pa.schema([data.field(name)]), data, pa.schema([]), predicate)
        return scan.unit_bounds(self._table, files, projection)

    def _twice(self, keys: pa.Table, row: int, why: str, names: Sequence[str] | None = None) -> NonUniqueKeyError:
        key = ", ".join(f"{name} = {keys.column(name)[row].as_py()!r}" for name in names or keys.column_names)
        return NonUniqueKeyError(f"nothing was written to {redact('path', self._table.url)}: the key {key} {why}")


def _groups(files: Sequence[FileVersion], at_most: int) -> Iterator[list[FileVersion]]:
    """The files in their order, in groups of up to `at_most` bytes; a file larger than that is alone in its group."""
    group: list[FileVersion] = []
    for file in files:
        if group and sum(member.size for member in group) + file.size > at_most:
            yield group
            group = []
        group.append(file)
    if group:
        yield group


def _cuts(field: pa.Field, units: Sequence[tuple[ColumnStats | None, int]], part: int) -> list[Any]:
    """Values that divide the row groups `units` into ranges of about `part` bytes, ascending and distinct."""
    kind = field.type
    ordered = (pa.types.is_integer, pa.types.is_string, pa.types.is_date, pa.types.is_timestamp, pa.types.is_decimal)
    if not any(test(kind) for test in ordered):
        return []
    bounded_units = [(stats.low, size) for stats, size in units if stats is not None and stats.low is not None]
    cuts: list[Any] = []
    size = 0
    for low, bytes_ in sorted(bounded_units, key=lambda unit: unit[0]):
        if size >= part and (not cuts or low > cuts[-1]):
            cuts.append(low)
            size = 0
        size += bytes_
    return cuts


def _overlaps(stats: ColumnStats | None, low: Any, high: Any) -> bool:
    """Whether a row group may have values that are at least `low` and less than `high` (None: no bound)."""
    if stats is None or stats.low is None or stats.high is None:
        return True
    return (low is None or stats.high >= low) and (high is None or stats.low < high)


def _among(names: Sequence[str], keys: Sequence[pa.Array]) -> Predicate:
    parts = tuple(Among(name, pc.unique(array).drop_null()) for name, array in zip(names, keys, strict=True))
    return parts[0] if len(parts) == 1 else And(parts)
