"""What a scan is to those who use one, and how files are dealt out to tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import pyarrow as pa

from pyspark_lookup.columnar.keys import Numbers
from pyspark_lookup.columnar.predicate import ColumnStats
from pyspark_lookup.io.stores import FileVersion
from pyspark_lookup.scan.open_file import Projection, Slice
from pyspark_lookup.table.model import Table


def slices_of(files: Sequence[FileVersion]) -> tuple[Slice, ...]:
    """Whole files as slices."""
    return tuple(Slice(file, 0, file.size) for file in files)


def share_of(files: Sequence[FileVersion], number: int, count: int, splittable: bool) -> tuple[Slice, ...]:
    """The `number`-th of `count` shares of the files, about equal in bytes; a pure function, so tasks agree.

    The shares are disjoint and cover every file. Only a file of 1.5 shares or more is cut: a whole one
    can be read anew if it is replaced, and its footer is opened once.
    """
    total = sum(file.size for file in files)
    if not total:  # a file that became empty is to be opened, and found damaged
        return slices_of(files) if number == 0 else ()
    low, high = total * number // count, total * (number + 1) // count
    pieces: list[Slice] = []
    start = 0
    for file in files:
        cuts = min(max(round(file.size * count / total), 1), file.size) if splittable else 1
        for cut in range(cuts):
            piece = Slice(file, file.size * cut // cuts, file.size * (cut + 1) // cuts)
            if low <= start + (piece.start + piece.end) // 2 < high:
                pieces.append(piece)
        start += file.size
    return tuple(pieces)


class PreparedScan(Protocol):
    """A task that only has to be decoded."""

    def batches(self) -> Iterator[pa.RecordBatch]: ...
    def units(self) -> Iterator[tuple[FileVersion, int, Iterator[pa.RecordBatch]]]: ...


class TableScan(Protocol):
    """What reads a table's rows: see `Scan`. `reads_all_rows`: whether it can read them all, not only by key."""

    @property
    def reads_all_rows(self) -> bool: ...
    def rows_by_key(self, keys: pa.Table, columns: pa.Schema) -> pa.Table | None:
        """The rows of `keys` (all different, none null) with `columns` and `KEY_INDEX`; None: they are in files, to be read."""
        ...

    def close(self) -> None:
        """Let go of connections until the next use."""
        ...

    def splittable(self, table: Table) -> bool: ...
    def schema(self, table: Table, files: Sequence[FileVersion]) -> tuple[pa.Schema, pa.Schema]: ...
    def bounds(
        self, table: Table, files: Sequence[FileVersion], partitions: pa.Schema, names: Sequence[str]
    ) -> list[list[ColumnStats | None]]: ...
    def rows(self, table: Table, files: Sequence[FileVersion]) -> int | None: ...
    def deleted(self, table: Table, files: Sequence[FileVersion]) -> dict[str, Numbers]: ...
    def prepare(
        self,
        table: Table,
        pieces: Sequence[Slice],
        projection: Projection,
        columns_of_version: Callable[[], pa.Schema] | None = None,
    ) -> PreparedScan: ...


Files = Callable[[bool], TableScan]
"""What reads files; told whether what it reads stays in this host's cache, for those who read it next."""


def all_columns(version_schema: tuple[pa.Schema, pa.Schema]) -> pa.Schema:
    """Columns of the files, then of the directories: the order in which a table shows them."""
    data, partitions = version_schema
    return pa.schema([*data, *partitions])
