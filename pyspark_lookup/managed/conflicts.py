"""What a commit does to rows that others have committed, and what it has to look into for that.

Others commit while a write is under way. So what is there is looked into as often as something is new, and the commit
event is put only where nothing is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.base.errors import WriteConflictError
from pyspark_lookup.io.stores import FileVersion
from pyspark_lookup.table.deletes import PATH, ROW
from pyspark_lookup.table.log import DataFile, Definition, TableState
from pyspark_lookup.table.log_source import managed_version, version_of_file
from pyspark_lookup.table.model import Table


class RowsByKey(Protocol):
    """What there is to know of a table's rows by their keys: see `rows_by_key.KeyedRows`."""

    def keys_of(self, definition: Definition, files: Sequence[DataFile]) -> pa.Table: ...
    def check_different(self, keys: pa.Table) -> None: ...
    def without(self, keys: pa.Table, others: pa.Table) -> pa.Table: ...
    def check_new(self, definition: Definition, keys: pa.Table, others: Sequence[FileVersion]) -> None: ...
    def find(self, definition: Definition, keys: pa.Table, files: Sequence[FileVersion]) -> pa.Table: ...
    def find_where(self, definition: Definition, where: str, files: Sequence[FileVersion]) -> pa.Table: ...
    def read_deleted_by(self, definition: Definition, files: Sequence[DataFile]) -> pa.Table: ...
    def all_of(self, definition: Definition, files: Sequence[DataFile]) -> pa.Table: ...
    def every(self, definition: Definition, files: Sequence[DataFile]) -> pa.Table: ...
    def complete(
        self, definition: Definition, rows: pa.Table, lacking: Sequence[str], files: Sequence[FileVersion]
    ) -> tuple[pa.Table, pa.Table]: ...
    def count(self, files: Sequence[FileVersion]) -> int: ...
    def read_back(self, definition: Definition, files: Sequence[DataFile]) -> int: ...
    def order(self, definition: Definition, files: Sequence[FileVersion]) -> Iterator[Iterable[pa.RecordBatch]]: ...


class Effect(Protocol):
    """What one write does beside adding rows. `replaces`: of a compaction, the writes whose rows its files have."""

    @property
    def replaces(self) -> tuple[int, ...]: ...
    @property
    def added(self) -> Sequence[DataFile]:
        """Files that the last look has put, with rows of the write."""

    def check(self, state: TableState) -> None:
        """Raise WriteConflictError if the write can no longer be committed after this state."""

    def is_due(self, state: TableState) -> bool:
        """Whether the state has something that matters and was not looked into."""

    def look(self, state: TableState, definition: Definition) -> pa.Table | None:
        """Look into that; the rows found there that the write takes the place of, as `RowsByKey.find` says them."""


class Independent:
    """Rows beside those there are, or in place of all of lower write ids: nothing to look into."""

    replaces: tuple[int, ...] = ()
    added: Sequence[DataFile] = ()

    def check(self, state: TableState) -> None:
        pass

    def is_due(self, state: TableState) -> bool:
        return False

    def look(self, state: TableState, definition: Definition) -> pa.Table | None:
        return None


class _Looking:
    """Looks into each file that others have committed once."""

    replaces: tuple[int, ...] = ()
    added: Sequence[DataFile] = ()

    def __init__(self, rows: RowsByKey, table: Table, own: str | None = None) -> None:
        self._rows = rows
        self._table = table
        self._own = None if own is None else f"{table.url}/{own}/"
        self._looked: set[str] = set()

    def check(self, state: TableState) -> None:
        pass

    def is_due(self, state: TableState) -> bool:
        return bool(self._fresh(state))

    def _fresh(self, state: TableState) -> list[FileVersion]:
        found = (file for file in managed_version(self._table, state).files if file.url not in self._looked)
        return [file for file in found if self._own is None or not file.url.startswith(self._own)]


class ByKey(_Looking):
    """Takes the place of the rows with its keys, those of `keys` and of `add`. `own`: the directory of files that it is not about."""

    def __init__(
        self, rows: RowsByKey, table: Table, keys: Callable[[Definition], pa.Table] | None, own: str | None = None
    ) -> None:
        super().__init__(rows, table, own)
        self._keys_of = keys
        self._keys: pa.Table | None = None

    @property
    def keys(self) -> pa.Table | None:
        """The keys; None before the first look."""
        return self._keys

    def add(self, keys: pa.Table, looked: Iterable[FileVersion]) -> None:
        """Take the place of rows with these keys, too; the write has done so in the files `looked` already."""
        urls = {file.url for file in looked}
        self._looked = urls if self._keys is None else self._looked & urls
        self._keys = keys if self._keys is None else pa.concat_tables([self._keys, keys])

    def look(self, state: TableState, definition: Definition) -> pa.Table | None:
        if self._keys is None and self._keys_of is not None:
            self._keys = self._keys_of(definition)
        fresh = self._fresh(state)
        self._looked.update(file.url for file in fresh)
        return self._rows.find(definition, self._keys, fresh) if fresh and self._keys is not None else None


class Where(_Looking):
    """Deletes the rows of which a predicate is true, whoever has committed them before this is."""

    def __init__(self, rows: RowsByKey, table: Table, where: str) -> None:
        super().__init__(rows, table)
        self._where = where

    def look(self, state: TableState, definition: Definition) -> pa.Table | None:
        fresh = self._fresh(state)
        self._looked.update(file.url for file in fresh)
        return self._rows.find_where(definition, self._where, fresh) if fresh else None


class Keeping:
    """Takes the place of the rows with its keys, whose values it keeps in columns that its own rows lack.

    What the others are is looked at as often as it changes, so that nothing that was committed meanwhile is lost: then all rows
    are put anew, and those that were put before are deleted. `given`: the rows, with nulls there; `names`: the columns that they
    have; `put` makes files of rows.
    """

    replaces: tuple[int, ...] = ()

    def __init__(
        self,
        rows: RowsByKey,
        table: Table,
        given: Sequence[DataFile],
        names: Sequence[str],
        put: Callable[[Definition, pa.Table], list[DataFile]],
    ) -> None:
        self._rows = rows
        self._table = table
        self._given = given
        self._names = frozenset(names)
        self._make = put
        self._seen: str | None = None
        self._deleted: pa.Table | None = None
        self._put: tuple[pa.Table, list[DataFile]] | None = None
        self.added: Sequence[DataFile] = ()

    def check(self, state: TableState) -> None:
        pass

    def is_due(self, state: TableState) -> bool:
        return managed_version(self._table, state).digest != self._seen

    def look(self, state: TableState, definition: Definition) -> pa.Table | None:
        """Raises NonUniqueKeyError for a key that the rows, or those that are there, have twice."""
        self.added = ()
        version = managed_version(self._table, state)
        if version.digest == self._seen:
            return None
        self._seen = version.digest
        given = self._rows.all_of(definition, self._given)
        self._rows.check_different(given.select(list(definition.keys)))
        lacking = [name for name in definition.schema.names if name not in self._names]
        rows, found = self._rows.complete(definition, given, lacking, version.files)
        parts = [found if self._deleted is None else _beside(found, self._deleted)]
        self._deleted = parts[0] if self._deleted is None else pa.concat_tables([self._deleted, parts[0]])
        if self._put is None or not rows.equals(self._put[0]):
            if self._put is not None:
                parts.append(self._rows.every(definition, self._put[1]))
            self._put = rows, self._make(definition, rows)
            self.added = self._put[1]
        return pa.concat_tables(parts)


def _beside(places: pa.Table, others: pa.Table) -> pa.Table:
    """The places that are not among the others."""
    known = set(zip(*(others.column(name).to_pylist() for name in (PATH, ROW)), strict=True))
    found = zip(*(places.column(name).to_pylist() for name in (PATH, ROW)), strict=True)
    return places.filter(pa.array([place not in known for place in found], pa.bool_()))


class NewKeys(_Looking):
    """Adds rows with keys that are not there (`lookup.write.unique-keys`), or that `beside` takes the place of."""

    def __init__(
        self,
        rows: RowsByKey,
        table: Table,
        files: Sequence[DataFile],
        own: str | None = None,
        beside: ByKey | None = None,
    ) -> None:
        super().__init__(rows, table, own)
        self._files = files
        self._beside = beside
        self._keys: pa.Table | None = None

    def add(self, keys: pa.Table) -> None:
        """Rows with these keys are added, too; that they differ was looked into."""
        self._keys = keys if self._keys is None else pa.concat_tables([self._keys, keys])

    def is_due(self, state: TableState) -> bool:
        return self._keys is None or super().is_due(state)

    def look(self, state: TableState, definition: Definition) -> pa.Table | None:
        """Raises NonUniqueKeyError for a key that is there twice."""
        if self._keys is None:
            self._keys = self._rows.keys_of(definition, self._files)
            self._rows.check_different(self._keys)
        fresh = self._fresh(state)
        self._looked.update(file.url for file in fresh)
        replaced = self._beside.keys if self._beside is not None else None
        keys = self._keys if replaced is None else self._rows.without(self._keys, replaced)
        if fresh and keys.num_rows:
            self._rows.check_new(definition, keys, fresh)
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
        found = [rows for effect in self._effects if (rows := effect.look(state, definition)) is not None]
        return pa.concat_tables(found) if found else None


class Rewriting:
    """Puts the rows of `replaces`, as they were at the state `since`, into `files`.

    Rows of them that others have deleted by key since are deleted there, too. What was deleted by a predicate, no key tells: then it is
    to be done again. `kept`: what the replaced writes delete in other files.
    """

    added: Sequence[DataFile] = ()

    def __init__(
        self,
        rows: RowsByKey,
        table: Table,
        since: TableState,
        replaces: Sequence[int],
        files: Sequence[DataFile],
        kept: pa.Table | None,
    ) -> None:
        self.replaces = tuple(sorted(replaces))
        self._rows = rows
        self._table = table
        self._since = since
        self._kept = kept
        self._seen = {write.id for write in since.find_visible()} & set(replaces)
        self._paths = {file.path for id_ in replaces for file in since.writes[id_].files}
        self._files = files
        self._looked: set[int] = set()

    def check(self, state: TableState) -> None:
        needed, seen = ({write.id for write in writes} for writes in (state.find_needed(), state.find_visible()))
        same = (
            needed.issuperset(self.replaces)
            and seen.issuperset(self._seen)
            and not state.has_new_keys(self._since.position)
        )
        if not same:
            raise WriteConflictError(
                f"table {state.table_id} was overwritten, compacted or given other keys as it was compacted: compact it again"
            )
        if state.deleted_where_at > self._since.position:
            raise WriteConflictError(
                f"rows of table {state.table_id} were deleted by a predicate as it was compacted: compact it again"
            )

    def is_due(self, state: TableState) -> bool:
        return bool(self._fresh(state))

    def look(self, state: TableState, definition: Definition) -> pa.Table | None:
        fresh = self._fresh(state)
        self._looked.update(fresh)
        marks = self._rows.read_deleted_by(definition, [file for id_ in fresh for file in state.writes[id_].deletes])
        inside = pa.array(sorted(self._paths), pa.string())
        keys = marks.filter(pc.is_in(marks.column(PATH), value_set=inside)).select(list(definition.keys))
        own = [version_of_file(self._table, file) for file in self._files]
        found = [self._kept] if self._kept is not None else []
        self._kept = None
        if keys.num_rows and own:
            found.append(self._rows.find(definition, keys, own))
        return pa.concat_tables(found) if found else None

    def _fresh(self, state: TableState) -> list[int]:
        """The writes by key that were committed since."""
        known = self._since.position
        ended = (write for write in state.writes.values() if write.committed and (write.ended_at or 0) > known)
        return [write.id for write in ended if write.deletes and write.id not in self._looked]
