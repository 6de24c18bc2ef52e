"""What a managed table's log adds up to, in parts: its writes, its changes, and the versions that they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pyspark_lookup.base.decoding import count_of, name_of, text_of, texts_of
from pyspark_lookup.base.write_ids import ValidWriteIdList
from pyspark_lookup.table.log.events import DataFile, WriteMode, schema_of_text

__all__ = ["Change", "LogVersion", "TableWrite"]


@dataclasses.dataclass(frozen=True)
class TableWrite:
    """One write id: what it does, its files so far, and the positions of its allocation and of its end (None: open).

    `replaces`: of a compaction, the writes whose rows are in its files; `least` and `rank` are the lowest and the highest
    write id that these rows came with. `vacuumed`: its files are gone. `nonce`: of the event that allocated the id.
    """

    id: int
    mode: WriteMode
    allocated_at: int
    files: tuple[DataFile, ...] = ()
    ended_at: int | None = None
    committed: bool = False
    hidden: tuple[DataFile, ...] = ()
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
        """What a version that it is in is known by: its id, and its files, whose names nobody else has drawn.

        An open one, which its transaction sees, goes on changing.
        """
        names = self.names
        first, last = (names[0], names[-1]) if names else ("", "")
        return f"{self.id}+{len(self.files)}+{len(self.hidden)}+{first}+{last}"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its files, each of which there is once."""
        return tuple(file.name for file in (*self.files, *self.hidden))

    @property
    def does_something(self) -> bool:
        """Whether it has put files, of rows or of what hides some."""
        return bool(self.files or self.hidden)

    def replacing(self, writes: Mapping[int, TableWrite], replaces: tuple[int, ...]) -> TableWrite:
        """This write as a compaction of those."""
        least = min(writes[id_].least for id_ in replaces)
        rank = max(writes[id_].rank for id_ in replaces)
        return dataclasses.replace(self, replaces=(*self.replaces, *replaces), least=least, rank=rank)


@dataclasses.dataclass(frozen=True)
class Change:
    """An event that made a version: its position, Unix time by its writer's clock, and its write (None: the definition)."""

    position: int
    at_s: float
    write_id: int | None


@dataclasses.dataclass(frozen=True)
class LogVersion:
    """One version of a managed table: its table's id, what a list lets through, and how the table was defined.

    `position` is that of the last event that matters to it, `write_ids` the list in Hive's text form. `folds`: for the
    latest compactions in it the names of their files with rows, and of all those that they took the place of.
    """

    table_id: str
    position: int
    write_ids: str
    digest: str
    keys: tuple[str, ...]
    schema: str
    folds: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = dataclasses.field(default=(), compare=False)

    def plain(self) -> list[Any]:
        """The version as JSON can hold it."""
        return [self.table_id, self.position, self.write_ids, self.digest, list(self.keys), self.schema, self.folds]

    @classmethod
    def of_plain(cls, found: Any) -> LogVersion:
        """The version that `plain` wrote. Raises TypeError or ValueError for anything else."""
        table_id, position, write_ids, digest, keys, schema, folds = found
        folded = tuple((texts_of(own), texts_of(others)) for own, others in folds)
        schema_of_text(text_of(schema))
        ValidWriteIdList.parse(text_of(write_ids))
        return cls(text_of(table_id), count_of(position), write_ids, name_of(digest), texts_of(keys), schema, folded)
