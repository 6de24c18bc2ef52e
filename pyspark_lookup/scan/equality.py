"""Finds rows that are deleted by their values (Iceberg's equality deletes).

An index has, for each combination of values in the delete files, the highest sequence number of a delete file with these values. A row of a
data file is deleted if the number for its values is higher than the sequence number of the data file. So one index serves all data files of a
partition, whichever commits added them. Values are compared as in Iceberg: null equals null, and NaN equals NaN, but -0.0 does not equal 0.0.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import decimal
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.keys import (
    SEED,
    KeyIndex,
    Keys,
    Numbers,
    as_indices,
    check_index,
    index_rows,
    one_array,
    order_rows,
    sort_distinct,
)
from pyspark_lookup.columnar.predicate import Among, And, Or, Predicate
from pyspark_lookup.columnar.types import text_of_schema
from pyspark_lookup.core.decoding import as_count, as_text
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.core.memory import check_room
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.scan.formats import BATCH_ROWS
from pyspark_lookup.scan.open_file import Latest
from pyspark_lookup.storage.disk import Disk, OpenSegment, key_of
from pyspark_lookup.storage.stores import EqualityColumns, EqualityDeletes, EqualityGroup, FileVersion
from pyspark_lookup.versions.column_segments import PartSegments, ipc_file, open_batch, write_segment

_KEPT_BYTES = 64 * 1024 * 1024
_POSITIONS_KEPT = 4 * 1024 * 1024
_UNCHECKED_BYTES = 64 * 1024 * 1024
_NO_DELETE = -1
_ROW_BYTES = 32  # what the index takes for each row: a hash, a sequence number, a share of a bucket

PlaceRows = Callable[
    [Sequence[FileVersion], pa.Schema, Predicate | None], Iterator[tuple[FileVersion, Numbers, pa.RecordBatch]]
]
"""A function that reads files. It yields (file, positions of rows in the file, these rows with the columns of the schema).

The rows are those for which the predicate may be true, also the ones that are deleted by value. The files come in the given order.
"""


def comparable_values(columns: Sequence[pa.Array]) -> list[pa.Array]:
    """Columns that have neither nulls nor floats, and in which two rows are equal exactly if they are equal in `columns`.

    A column of structs must have a single field. The result has this field in place of the column.
    """
    values: list[pa.Array] = []
    for column in columns:
        while pa.types.is_struct(column.type):
            column = pc.struct_field(column, [0])
        if pa.types.is_floating(column.type):
            nulls = column.is_null()
            plain = pc.fill_null(column, 0.0).to_numpy(zero_copy_only=False).astype(np.float64)
            plain[np.isnan(plain)] = np.nan
            column = pc.if_else(nulls, pa.scalar(None, pa.int64()), pa.array(plain.view(np.int64)))
        values += [pc.fill_null(column, _blank(column.type)), column.is_null()]
    return values


def _blank(kind: pa.DataType) -> pa.Scalar:
    """Some value of type `kind`, to be put in the place of nulls."""
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return pa.scalar("" if pa.types.is_string(kind) else b"", kind)
    if pa.types.is_boolean(kind):
        return pa.scalar(False)
    return pa.scalar(decimal.Decimal(0) if pa.types.is_decimal(kind) else 0, kind)


@dataclasses.dataclass(frozen=True)
class IndexedDeletes:
    """An index of the `rows` of some delete files. Each row occurs once, with the highest sequence number of a file that has it.

    `files`: the names and sequence numbers of the delete files. `sequences`: the sequence number of each row.
    """

    files: tuple[tuple[str, int], ...]
    rows: pa.Table
    sequences: Numbers
    index: KeyIndex

    @classmethod
    def of_rows(cls, files: tuple[tuple[str, int], ...], rows: pa.Table, sequences: Numbers) -> IndexedDeletes:
        """The index of `rows`, which may occur several times. `sequences`: the sequence number of each row, ascending."""
        columns = [one_array(column) for column in rows.columns]
        keys = Keys(comparable_values(columns))
        order = order_rows(keys, keys.hashes(SEED)).last_rows()
        indices = as_indices(order.rows)
        distinct = pa.Table.from_arrays([column.take(indices) for column in columns], schema=rows.schema)
        return cls(files, distinct, sequences[order.rows], index_rows(order, keys))

    def followed_by(self, later: IndexedDeletes) -> IndexedDeletes:
        """The index of the rows of this index and of `later`, whose sequence numbers are higher."""
        rows, sequences = (
            pa.concat_tables([self.rows, later.rows]),
            np.concatenate([self.sequences, later.sequences]),
        )
        order = np.argsort(sequences, kind="stable")
        return IndexedDeletes.of_rows((*self.files, *later.files), rows.take(as_indices(order)), sequences[order])

    @property
    def memory_bytes(self) -> int:
        """About how much memory the rows and their index take."""
        # Twice, because the index has a copy of the rows.
        return int(1 + _ROW_BYTES * self.rows.num_rows + 2 * self.rows.nbytes)

    @property
    def has_nulls(self) -> bool:
        return any(column.null_count for column in self.rows.columns)

    @cached_property
    def predicate(self) -> Predicate | None:
        """A predicate that is true for each data row with the values of one of `rows`, and perhaps for others.

        It compares the columns that are not nested or floating-point, and have no nulls in `rows`; None if there is no such column.
        """
        parts: list[Predicate] = []
        for field, column in zip(self.rows.schema, self.rows.columns, strict=True):
            if not (pa.types.is_nested(field.type) or pa.types.is_floating(field.type) or column.null_count):
                parts.append(Among(field.name, pc.unique(column)))
        return None if not parts else parts[0] if len(parts) == 1 else And(tuple(parts))


@dataclasses.dataclass(frozen=True)
class DeletedValues:
    """All deleted values of one set of columns (`columns`). `parts`: the indexes that together have these values, in the order of the delete files."""

    columns: EqualityColumns
    parts: tuple[IndexedDeletes, ...]

    def highest(self, columns: Sequence[pa.Array]) -> Numbers:
        """For each row of `columns`, the highest sequence number of a delete file with the row's values; -1 if no delete file has them."""
        keys = Keys(comparable_values(columns))
        hashes, highest = keys.hashes(SEED), np.full(keys.rows, _NO_DELETE, np.int64)
        for part in self.parts:  # a later part has higher sequence numbers, so it overwrites those of the part before
            matches = part.index.probe(keys, hashes)
            highest[matches.keys] = part.sequences[matches.rows]
        return highest

    @cached_property
    def predicate(self) -> Predicate | None:
        """A predicate that is true for each data row with deleted values, as `IndexedDeletes.predicate`, but for all parts."""
        predicates = [part.predicate for part in self.parts]
        known = [predicate for predicate in predicates if predicate is not None]
        return None if len(known) < len(predicates) else known[0] if len(known) == 1 else Or(tuple(known))


_FORM = 1  # the number of the format in which segments and hashes are written; another release may have another one
_ROWS, _SEQUENCES = "rows", "sequences"
_KEPT_FROM = 8  # an index of fewer delete files is not written to the disk: the block cache keeps these files
_FLUSHED_FROM = 65536  # a part with more rows is flushed to the disk


class IndexSegments:
    """The `IndexedDeletes` of one table in the host's cache directory `disk`, from which all processes map them. `table`: a key of the table."""

    def __init__(self, disk: Disk, table: str) -> None:
        self._disk = disk
        self._table = table
        self._segments = PartSegments(disk, self._write)

    def _key(self, columns: EqualityColumns, first: str) -> str:
        stored = [column.to_json() for column in columns.file.columns or ()]
        return key_of("equality", _FORM, self._table, json.dumps(stored), text_of_schema(columns.schema), first)

    def find(self, columns: EqualityColumns, first: str) -> list[IndexedDeletes]:
        """The recorded parts of the index of deletes by `columns`. `first`: the name of the oldest delete file."""
        return self._segments.find(self._key(columns, first), functools.partial(_parse_part, columns.schema))

    def keep(self, columns: EqualityColumns, first: str, parts: Sequence[IndexedDeletes]) -> None:
        """Record the parts of the index of deletes by `columns` for all processes of the host, instead of those recorded before. Raises OSError."""
        self._segments.keep(self._key(columns, first), parts)

    def _write(self, key: str, name: str, part: IndexedDeletes) -> None:
        columns = [one_array(column) for column in part.rows.columns]
        batch = pa.RecordBatch.from_arrays(columns, schema=part.rows.schema)
        arrays = {_SEQUENCES: part.sequences, **part.index.arrays}
        regions = {_ROWS: ipc_file(batch), **{name: np.ascontiguousarray(array) for name, array in arrays.items()}}
        types = {name: array.dtype.str for name, array in arrays.items()}
        # A small part is not flushed to the disk. After a crash it may be damaged, so each process that opens it checks it.
        is_durable = part.rows.num_rows > _FLUSHED_FROM
        write_segment(self._disk, key, name, regions, {"files": part.files, "types": types}, is_durable)


def _parse_part(schema: pa.Schema, segment: OpenSegment) -> IndexedDeletes:
    """The part in a segment that `IndexSegments` wrote. `schema`: its columns. Raises ValueError or another error for a malformed part."""
    rows = pa.Table.from_batches([open_batch(segment.regions[_ROWS])])
    files = tuple((as_text(file), as_count(sequence)) for file, sequence in segment.meta["files"])
    types = segment.meta["types"]
    arrays = {name: np.frombuffer(segment.regions[name], types[name]) for name in types}
    sequences = arrays.pop(_SEQUENCES)
    check_index(arrays, rows.num_rows, rows.num_rows)
    if rows.schema != schema or len(sequences) != rows.num_rows:
        raise ValueError("its columns or rows differ from those expected")
    stored = comparable_values([one_array(column) for column in rows.columns])
    return IndexedDeletes(files, rows, sequences, KeyIndex(arrays, stored, 0))


class EqualityIndexes:
    """The indexes of one table's equality deletes. A host reads each delete file once, and many of them at a time.

    Most versions have the delete files of the version before and a few new ones. Then only the new files are read, and become a new part.
    `place`: reads rows of data files and delete files. `read`: the same, but the block cache does not keep what it reads. `segments`: the
    parts that the host keeps on disk; None: each process reads the delete files itself.
    """

    def __init__(self, read: PlaceRows, place: PlaceRows, segments: IndexSegments | None = None) -> None:
        self._read = read
        self._place = place
        self._segments = segments
        self._parts = Latest[tuple[IndexedDeletes, ...]](_KEPT_BYTES)
        self._values = Latest[tuple[DeletedValues, ...]](_KEPT_BYTES)
        self._positions = Latest[Numbers](_POSITIONS_KEPT)

    def values_of(self, group: EqualityGroup) -> tuple[DeletedValues, ...]:
        """What `read_values` returns, kept in memory for the next call, because many files of a version have the same group."""
        values = self._values.get((group,))
        if values is None:
            values = self.read_values(group)
            self._values.put((group,), values, sum(part.memory_bytes for one in values for part in one.parts))
        return values

    def read_values(self, group: EqualityGroup) -> tuple[DeletedValues, ...]:
        """The deleted values of a group, for each set of columns, in the order of `EqualityGroup.by_columns`."""
        return tuple(self._read_values(columns, deletes) for columns, deletes in group.by_columns)

    def _read_values(self, columns: EqualityColumns, deletes: Sequence[EqualityDeletes]) -> DeletedValues:
        names = tuple((delete.name, delete.sequence) for delete in deletes)
        place = columns.file.columns, columns.schema, names[0]
        known = self._parts.get(place) or ()
        parts = _matching_parts(known, names)
        count = sum(len(part.files) for part in parts)  # how many of the delete files the parts have
        on_record: list[IndexedDeletes] = []
        segments = self._segments if len(names) >= _KEPT_FROM else None
        if count < len(names) and segments is not None:
            # The race: other processes of the host read the same delete files at the same time, and record them as parts of other sizes. Each
            # process goes on with the parts that were recorded last.
            on_record = segments.find(columns, names[0][0])
            recorded_parts = _matching_parts(on_record, names)
            recorded_count = sum(len(part.files) for part in recorded_parts)
            if recorded_count >= count:
                parts, count = recorded_parts, recorded_count
        before = [*parts]
        if count < len(names):
            read = self._place if segments is None else self._read
            parts.append(self._read_rows(read, columns.schema, deletes[count:], names[count:]))
        # Joins parts until each has at least twice the rows of the next one. So there are few parts, and a row is seldom indexed again.
        while len(parts) > 1 and 2 * parts[-1].rows.num_rows > parts[-2].rows.num_rows:
            later = parts.pop()
            parts[-1] = parts[-1].followed_by(later)
        self._parts.put(place, tuple(parts), sum(part.memory_bytes for part in parts))
        # The parts on record may be those of a later version, which most readers need: do not replace them.
        is_later = [file for part in on_record for file in part.files][: len(names)] == [*names]
        if segments is not None and [*map(id, parts)] != [*map(id, before)] and not is_later:
            with contextlib.suppress(OSError):  # if this fails, other processes must read the delete files, too
                segments.keep(columns, names[0][0], parts)
        return DeletedValues(columns, tuple(parts))

    def _read_rows(
        self, read: PlaceRows, schema: pa.Schema, deletes: Sequence[EqualityDeletes], names: tuple[tuple[str, int], ...]
    ) -> IndexedDeletes:
        sequences = {delete.keys.url: delete.sequence for delete in deletes}
        batches: list[pa.RecordBatch] = []
        numbers = [np.zeros(0, np.int64)]
        size = checked_bytes = 0
        for file, _, batch in read([delete.equality.file for delete in deletes], schema, None):
            batches.append(batch)
            numbers.append(np.full(batch.num_rows, sequences[file.url], np.int64))
            size += batch.nbytes
            if size - checked_bytes > _UNCHECKED_BYTES:
                checked_bytes = size
                check_room(4 * size, f"{redact('path', file.url)} and other equality deletes: their rows and an index")
        return IndexedDeletes.of_rows(names, pa.Table.from_batches(batches, schema), np.concatenate(numbers))

    def read_positions(self, files: Iterable[FileVersion]) -> dict[str, Numbers]:
        """For each file that equality deletes concern, by its URL, the positions of the rows that they delete, ascending."""
        files = [file for file in files if file.equality]
        keys = {file.url: (file.url, file.identity, file.columns, *file.equality) for file in files}
        positions: dict[str, Numbers] = {}
        groups: dict[EqualityGroup, list[FileVersion]] = collections.defaultdict(list)
        for file in files:
            known = self._positions.get(keys[file.url])
            if known is not None:
                positions[file.url] = known
                continue
            for group in file.equality:
                groups[group].append(file)
        parts: dict[str, list[Numbers]] = collections.defaultdict(list)
        for group, concerned in groups.items():
            for values in self.values_of(group):
                for url, places in self._find_positions(values, concerned):
                    parts[url].append(places)
        for file in files:
            if file.url not in positions:
                positions[file.url] = sort_distinct(np.concatenate([np.zeros(0, np.int64), *parts[file.url]]))
                self._positions.put(keys[file.url], positions[file.url], len(positions[file.url]) + 1)
        return positions

    def _find_positions(self, values: DeletedValues, files: Sequence[FileVersion]) -> Iterator[tuple[str, Numbers]]:
        """Pairs (URL of a file, positions of rows in it that `values` delete). The rows of many small files are compared at once."""
        sequences = {file.url: file.sequence for file in files}
        columns, schema = values.columns.file.columns, values.columns.schema
        plain = [dataclasses.replace(file, deletes=(), equality=(), columns=columns) for file in files]
        waiting: list[tuple[str, Numbers, pa.RecordBatch]] = []
        rows = 0
        for file, places, batch in self._place(plain, schema, values.predicate):
            waiting.append((file.url, places, batch))
            rows += batch.num_rows
            if rows >= BATCH_ROWS:
                yield from _select_deleted(values, waiting, sequences)
                waiting, rows = [], 0
        if waiting:
            yield from _select_deleted(values, waiting, sequences)


def _matching_parts(parts: Sequence[IndexedDeletes], names: tuple[tuple[str, int], ...]) -> list[IndexedDeletes]:
    """Those parts from the beginning of `parts` whose delete files are, in the same order, the first of `names`.

    A part with other delete files belongs to a later version, or to a version before a compaction.
    """
    matching: list[IndexedDeletes] = []
    count = 0
    for part in parts:
        if part.files != names[count : count + len(part.files)]:
            break
        matching.append(part)
        count += len(part.files)
    return matching


def _select_deleted(
    values: DeletedValues, waiting: Sequence[tuple[str, Numbers, pa.RecordBatch]], sequences: dict[str, int]
) -> Iterator[tuple[str, Numbers]]:
    batch = pa.concat_batches([batch for _, _, batch in waiting])
    highest, start = values.highest(batch.columns), 0
    for url, places, part in waiting:
        yield url, places[highest[start : start + part.num_rows] > sequences[url]]
        start += part.num_rows
