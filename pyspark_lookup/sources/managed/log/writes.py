"""`TableWrite`, `TableWrites` and `Change`: the writes and changes that a managed table's log adds up to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from pyspark_lookup.sources.managed.log.events import DataFile, WriteMode


@dataclasses.dataclass(frozen=True)
class TableWrite:
    """A write: its id and mode, its files so far, and the positions of its allocation and of its end (None: it is open).

    `replaces`: for a compaction, the writes whose rows are in its files; `least` and `rank` are the lowest and highest write ids of these
    rows. `vacuumed`: its files are gone. `nonce`: of the event that allocated the id.
    """

    id: int
    mode: WriteMode
    allocated_at: int
    files: tuple[DataFile, ...] = ()
    ended_at: int | None = None
    committed: bool = False
    deletes: tuple[DataFile, ...] = ()
    replaces: tuple[int, ...] = ()
    least: int = 0
    rank: int = 0
    vacuumed: bool = False
    nonce: str = ""

    def __post_init__(self) -> None:
        if not self.rank:
            object.__setattr__(self, "least", self.id)
            object.__setattr__(self, "rank", self.id)

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def label(self) -> str:
        """Identifies the write's content in a version's digest, by its id and the names of its files, which are unique.

        The label of an open write, which its transaction sees, changes with each file that is added.
        """
        names = self.names
        first, last = (names[0], names[-1]) if names else ("", "")
        return f"{self.id}+{len(self.files)}+{len(self.deletes)}+{first}+{last}"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its files, each of them unique."""
        return tuple(file.name for file in (*self.files, *self.deletes))

    @property
    def does_something(self) -> bool:
        """Whether it has data files or delete files."""
        return bool(self.files or self.deletes)

    def as_compaction(self, writes: TableWrites, replaces: tuple[int, ...]) -> TableWrite:
        """This write as a compaction that replaces the given writes."""
        least = min(writes[id_].least for id_ in replaces)
        rank = max(writes[id_].rank for id_ in replaces)
        return dataclasses.replace(self, replaces=(*self.replaces, *replaces), least=least, rank=rank)


_NEWER_AT_MOST = 64


class TableWrites:
    """Writes by id, in the order of their ids. A copy costs as much as the latest additions, however many writes there are."""

    __slots__ = ("_newer", "_older")

    def __init__(self, writes: Iterable[TableWrite] = ()) -> None:
        self._older = {write.id: write for write in writes}  # shared with copies
        self._newer: dict[int, TableWrite] = {}

    def copy(self) -> TableWrites:
        if len(self._newer) > _NEWER_AT_MOST:
            return TableWrites(self.values())
        writes = TableWrites()
        writes._older, writes._newer = self._older, dict(self._newer)
        return writes

    def store(self, write: TableWrite) -> None:
        """Add a write with a new highest id, or replace the write that has its id."""
        self._newer[write.id] = write

    def get(self, write_id: int | None) -> TableWrite | None:
        if write_id is None:
            return None
        return self._newer.get(write_id) or self._older.get(write_id)

    def __getitem__(self, write_id: int) -> TableWrite:
        write = self.get(write_id)
        if write is None:
            raise KeyError(write_id)
        return write

    def __contains__(self, write_id: int | None) -> bool:
        return write_id in self._newer or write_id in self._older

    def __len__(self) -> int:
        return len(self._older.keys() | self._newer.keys())

    def values(self) -> Iterator[TableWrite]:
        if not self._newer:
            yield from self._older.values()
            return
        for id_, write in self._older.items():
            yield self._newer.get(id_, write)
        for id_, write in self._newer.items():
            if id_ not in self._older:
                yield write


@dataclasses.dataclass(frozen=True)
class Change:
    """An event that made a version: its position, Unix time on its writer's clock, and its write (None: the event that created the table)."""

    position: int
    at_s: float
    write_id: int | None
