"""The interface of scans, how files are divided among tasks, and batches as scans return them."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import pyarrow as pa

from pyspark_lookup.columnar.keys import Numbers
from pyspark_lookup.columnar.predicate import ColumnStats, Predicate, evaluate
from pyspark_lookup.core.memory import free_bytes
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.errors import NotSupportedError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.scan.deletes import DeletedValues
from pyspark_lookup.scan.formats import BATCH_ROWS
from pyspark_lookup.scan.open_file import Projection, Slice
from pyspark_lookup.storage.stores import Deletes, EqualityColumns, FileVersion
from pyspark_lookup.versions.model import Table

_UNCHECKED_BYTES = 64 * 1024 * 1024  # of rows in memory: after this many more, free memory is checked, and a batch ends


def to_slices(files: Sequence[FileVersion]) -> tuple[Slice, ...]:
    """One slice for each file, of all its bytes."""
    return tuple(Slice(file, 0, file.size) for file in files)


def cut_share(files: Sequence[FileVersion], number: int, count: int, splittable: bool) -> tuple[Slice, ...]:
    """The `number`-th of `count` shares of the files, about equal in bytes. A pure function, so all tasks compute the same shares.

    The shares are disjoint and cover every file. Only a file of 1.5 shares or more is cut, because a file that is read as a whole can be
    read again if it is replaced, and its footer is opened once.
    """
    total = sum(file.size for file in files)
    if not total:  # a file that became empty must be opened, and found damaged
        return to_slices(files) if number == 0 else ()
    low, high = total * number // count, total * (number + 1) // count
    pieces: list[Slice] = []
    start = 0
    for file in files:
        cuts = min(max(round(file.size * count / total), 1), file.size) if splittable else 1
        # Considers only the cuts near this share, because a table's log may claim any file size.
        first = (low - start) * cuts // max(file.size, 1) - 1
        last = (high - start) * cuts // max(file.size, 1) + 1
        for cut in range(max(first, 0), min(last + 1, cuts)):
            piece = Slice(file, file.size * cut // cuts, file.size * (cut + 1) // cuts)
            if low <= start + (piece.start + piece.end) // 2 < high:
                pieces.append(piece)
        start += file.size
    return tuple(pieces)


@dataclasses.dataclass(frozen=True)
class PreparedUnit:
    """A unit of a file (e.g. a row group) whose bytes are in memory: its `middle` byte in the file, its approximate `bytes`, its exact `rows`.

    `rows` None: the file has no other units, and its rows are counted when they are decoded.
    """

    file: FileVersion
    middle: int
    bytes: int
    rows: int | None
    batches: Iterator[pa.RecordBatch]


class PreparedScan(Protocol):
    """A task whose bytes are in memory, so that its rows only have to be decoded."""

    def batches(self) -> Iterator[pa.RecordBatch]: ...
    def units(self) -> Iterator[PreparedUnit]: ...


class TableScan(abc.ABC):
    """Reads a table's rows. The defaults are for files about which nothing is known."""

    @property
    def reads_all_rows(self) -> bool:
        """Whether the scan can read all rows; otherwise it can only look rows up by key."""
        return True

    def rows_by_key(self, keys: pa.Table, columns: pa.Schema) -> pa.Table | None:
        """The rows of `keys` (all different, none null) with `columns` and `KEY_INDEX`; None if the rows are in files that must be scanned."""
        return None

    def close(self) -> None:  # noqa: B027 # most hold nothing
        """Close connections; the next use opens them again."""

    def forget_files(self) -> None:  # noqa: B027
        """Drop what is known about files, because none of them is read again soon."""

    def splittable(self, table: Table) -> bool:
        """Whether one file's rows may be read in parts."""
        return False

    @abc.abstractmethod
    def schema(self, table: Table, files: Sequence[FileVersion]) -> tuple[pa.Schema, pa.Schema]:
        """(columns in the files, columns in the directories), in the types that Spark has."""

    def bounds(
        self, table: Table, files: Sequence[FileVersion], partitions: pa.Schema, names: Sequence[str]
    ) -> list[list[ColumnStats | None]]:
        """The bounds of these columns (spelled as in `schema`) in each file; None if they are not known."""
        return [[None for _ in names] for _ in files]

    def rows(self, table: Table, files: Sequence[FileVersion]) -> int | None:
        """The number of rows in the files; None if one would have to read them."""
        return None

    def decoded_bytes(self, table: Table, files: Sequence[FileVersion], names: Sequence[str]) -> int | None:
        """About how many bytes these columns take in a snapshot; None if one would have to read them."""
        return None

    def read_deleted(self, table: Table, files: Sequence[FileVersion]) -> dict[str, Numbers]:
        """The positions of deleted rows, by the URL of their file."""
        return {}

    def deleted_values(
        self, table: Table, deletes: Sequence[Deletes]
    ) -> Iterable[tuple[EqualityColumns, DeletedValues]]:
        """The values of equality deletes, grouped by their columns."""
        return ()

    @abc.abstractmethod
    def prepare(
        self,
        table: Table,
        pieces: Sequence[Slice],
        projection: Projection,
        columns_of_version: Callable[[], pa.Schema] | None = None,
    ) -> PreparedScan:
        """Everything that a task needs, in memory.

        `columns_of_version` returns the columns of the version's files; it is called if the pieces lack a planned column. None: such a
        column is null.
        """


Files = Callable[[bool], TableScan]
"""Makes a scan of files. The argument: whether the bytes that it reads stay in this host's cache, for later reads."""


def all_columns(version_schema: tuple[pa.Schema, pa.Schema]) -> pa.Schema:
    """Columns of the files, then of the directories: the order in which a table shows them."""
    data, partitions = version_schema
    return pa.schema([*data, *partitions])


def coalesce(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, metrics: CacheMetricGroup
) -> Iterator[pa.RecordBatch]:
    """The rows in batches of about 64k (fewer if rows are long), with exactly `schema`."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        metrics.inc("rowsReadCount", batch.num_rows)
        if rows and (rows + batch.num_rows > BATCH_ROWS or size > _UNCHECKED_BYTES):
            yield _concat(waiting, schema)
            waiting, rows, size = [], 0, 0
        waiting.append(batch)
        rows += batch.num_rows
        size += 0 if batch.num_rows == BATCH_ROWS else batch.nbytes
    if waiting:
        yield _concat(waiting, schema)


def collect_table(batches: Iterable[pa.RecordBatch], schema: pa.Schema, url: str) -> pa.Table:
    """The rows of the table at `url` in memory. Raises NotSupportedError if they do not fit there."""
    parts: list[pa.RecordBatch] = []
    size = checked_bytes = 0
    for batch in batches:
        parts.append(batch)
        size += batch.nbytes
        if size - checked_bytes > _UNCHECKED_BYTES:
            checked_bytes = size
            if (free := free_bytes()) < max(2 * _UNCHECKED_BYTES, size // 4):
                raise NotSupportedError(
                    f"{redact('path', url)}: its rows take more than {size} bytes of memory, but only {free} are free: read fewer columns or rows, or let Spark read the table in several tasks (spark.read.format('lookupcache'))"
                )
    return pa.Table.from_batches(parts, schema)


def matching_rows(batch: pa.RecordBatch, predicate: Predicate | None) -> pa.RecordBatch | None:
    """The rows for which the predicate is true; None if there are none."""
    if predicate is None:
        return batch
    mask = evaluate_mask(predicate, batch)
    if mask.true_count == 0:
        return None
    return batch.filter(mask) if mask.true_count < batch.num_rows or mask.null_count else batch


def _concat(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    batch = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    return pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def evaluate_mask(predicate: Predicate | None, batch: pa.RecordBatch) -> pa.BooleanArray:
    assert predicate is not None
    return evaluate(predicate, dict(zip(batch.schema.names, batch.columns, strict=True)), batch.num_rows)
