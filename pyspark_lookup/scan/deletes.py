"""The positions of deleted rows in a version's files, whether they are deleted by position or by their values (Iceberg's equality deletes).

Values are compared as in Iceberg: null equals null, and NaN equals NaN, but -0.0 does not equal 0.0.
"""

from __future__ import annotations

import collections
import dataclasses
import decimal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.key_rows import RowIndex
from pyspark_lookup.columnar.keys import Keys, Numbers, one_array
from pyspark_lookup.columnar.predicate import Among, And, Predicate
from pyspark_lookup.core.threads import run_in_order
from pyspark_lookup.errors import DamagedFileError
from pyspark_lookup.scan.open_file import Latest
from pyspark_lookup.storage.block_cache import BlockCache
from pyspark_lookup.storage.stores import Deletes, EqualityColumns, FileVersion, Range

_THREADS = 8  # which mostly wait for the store
_KEPT_BYTES = 64 * 1024 * 1024
_FILES_KEPT = 4 * 1024 * 1024  # positions in total

ReadRows = Callable[[FileVersion, pa.Schema], pa.Table]
"""Reads all rows of a file, deleted rows included, with the columns of a schema."""
PlaceRows = Callable[[FileVersion, pa.Schema, Predicate | None], Iterator[tuple[Numbers, pa.RecordBatch]]]
"""Reads (positions, columns of a schema) of the rows of a file for which a predicate may be true, deleted rows included."""


def comparable_values(columns: Sequence[pa.Array]) -> list[pa.Array]:
    """Columns that are equal in the same rows as `columns`, but have no nulls and no floats; a struct is replaced by its only field."""
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
    """Any value of a type, as a placeholder for nulls."""
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return pa.scalar("" if pa.types.is_string(kind) else b"", kind)
    if pa.types.is_boolean(kind):
        return pa.scalar(False)
    return pa.scalar(decimal.Decimal(0) if pa.types.is_decimal(kind) else 0, kind)


class DeletedValues:
    """The values of all `rows` of some equality delete files with the same columns."""

    def __init__(self, schema: pa.Schema, rows: pa.Table) -> None:
        self.schema, self.rows = schema, rows
        columns = comparable_values([one_array(column) for column in rows.columns])
        names = [str(number) for number in range(len(columns))]
        self._index = RowIndex(pa.Table.from_arrays(columns, names=names), names)

    def mark(self, columns: Sequence[pa.Array]) -> Numbers:
        """A bool for each row of `columns`: whether its values are among the deleted ones."""
        keys = Keys(comparable_values(columns))
        marked = np.zeros(keys.rows, np.bool_)
        marked[self._index.match(keys).keys] = True
        return marked

    @property
    def predicate(self) -> Predicate | None:
        """A predicate that every row with deleted values satisfies; None: any row may have them."""
        parts: list[Predicate] = []
        for field, column in zip(self.schema, self.rows.columns, strict=True):
            if not (pa.types.is_nested(field.type) or pa.types.is_floating(field.type) or column.null_count):
                parts.append(Among(field.name, pc.unique(column)))
        return None if not parts else parts[0] if len(parts) == 1 else And(tuple(parts))


class EqualityDeleted:
    """The positions of rows that equality deletes delete. Each delete file is decoded once per process."""

    def __init__(self, read: ReadRows, place: PlaceRows) -> None:
        self._read = read
        self._place = place
        self._rows = Latest[pa.Table](_KEPT_BYTES)
        self._values = Latest[DeletedValues](_KEPT_BYTES)
        self._positions = Latest[Numbers](_FILES_KEPT)

    def read_positions(self, files: Iterable[FileVersion]) -> dict[str, Numbers]:
        """The positions of deleted rows, ascending, by the URL of each file that has equality deletes."""
        files = [file for file in files if any(delete.equality is not None for delete in file.deletes)]
        for deletes in {id(file.deletes): file.deletes for file in files}.values():
            collections.deque(self.values(deletes), 0)  # compute them once, before several threads need them
        position_arrays = run_in_order(self._file_positions, files, min(len(files), _THREADS) if len(files) > 1 else 0)
        return {file.url: positions for file, positions in zip(files, position_arrays, strict=True)}

    def _file_positions(self, file: FileVersion) -> Numbers:
        deletes = [delete for delete in file.deletes if delete.equality is not None]
        equality_columns = [delete.equality for delete in deletes if delete.equality is not None]
        key = (
            file.url,
            file.identity,
            file.columns,
            *((columns.file.url, columns.file.columns, columns.schema) for columns in equality_columns),
        )
        positions = self._positions.get(key)
        if positions is None:
            parts = [self._find_positions(file, columns, values) for columns, values in self.values(deletes)]
            positions = np.unique(np.concatenate(parts))
            self._positions.put(key, positions, len(positions) + 1)
        return positions

    def values(self, deletes: Sequence[Deletes]) -> Iterator[tuple[EqualityColumns, DeletedValues]]:
        """The deleted values, grouped by the deletes' columns."""
        groups: dict[tuple[object, ...], list[EqualityColumns]] = {}
        for delete in deletes:
            columns = delete.equality
            if columns is not None:
                groups.setdefault((columns.file.columns, columns.schema), []).append(columns)
        for group_key, group in groups.items():
            key = (*group_key, *(columns.file.url for columns in group))
            deleted_values = self._values.get(key)
            if deleted_values is None:
                schema = group[0].schema
                deleted_values = DeletedValues(
                    schema, pa.concat_tables([self._read_rows(columns) for columns in group])
                )
                self._values.put(key, deleted_values, deleted_values.rows.nbytes + 1)
            yield group[0], deleted_values

    def _read_rows(self, columns: EqualityColumns) -> pa.Table:
        """The rows of a delete file, cached by file: each commit makes other groups of files, most of which were read before."""
        key = (columns.file.url, columns.file.columns, columns.schema)
        rows = self._rows.get(key)
        if rows is None:
            rows = self._read(columns.file, columns.schema)
            self._rows.put(key, rows, rows.nbytes + 1)
        return rows

    def _find_positions(self, file: FileVersion, columns: EqualityColumns, values: DeletedValues) -> Numbers:
        plain = dataclasses.replace(file, deletes=(), columns=columns.file.columns)
        parts = [
            places[values.mark(batch.columns)] for places, batch in self._place(plain, columns.schema, values.predicate)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def merge_positions(by_position: Mapping[str, Numbers], by_value: Mapping[str, Numbers]) -> dict[str, Numbers]:
    """The positions of deleted rows by URL, from position deletes and equality deletes together."""
    merged = dict(by_position)
    for url, positions in by_value.items():
        if len(positions):
            merged[url] = np.union1d(merged[url], positions) if url in merged else positions
    return merged


_DELETES_AT_MOST = 512  # deletes in memory, the most recently used


def drop_deleted(deleted: Numbers | None, first: int, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Numbers]:
    """The rows of a batch that are not deleted, and their positions in the file; `first` is that of the batch's first row."""
    positions = np.arange(first, first + batch.num_rows)
    live = live_mask(deleted, first, batch.num_rows)
    return (batch, positions) if live is None else (batch.filter(pa.array(live)), positions[live])


def live_mask(deleted: Numbers | None, first: int, rows: int) -> Numbers | None:
    """A mask of `rows` rows from position `first` of a file: True for rows that are not deleted; None if none is deleted. `deleted`:
    positions, ascending."""
    if deleted is None:
        return None
    low, high = np.searchsorted(deleted, [first, first + rows])
    if low == high:
        return None
    mask = np.ones(rows, np.bool_)
    mask[deleted[low:high] - first] = False
    return mask


class DeletedRows:
    """The positions of deleted rows in each file. Each delete file is decoded once per process."""

    def __init__(self, blocks: BlockCache) -> None:
        self._blocks = blocks
        self._lock = threading.Lock()
        self._positions_by_name: dict[str, Mapping[str, Numbers]] = {}
        # Of the version that was asked about last: its deletes, and what they say together of each file.
        self._merged: tuple[tuple[str, ...], dict[tuple[str, int], Numbers | None]] = (), {}
        self._groups: dict[tuple[str, ...], int] = {}  # the numbers of combinations of deletes

    def read_positions(self, root: str, files: Iterable[FileVersion]) -> dict[str, Numbers]:
        """The positions of deleted rows, ascending, by the URL of each file that has some. `root`: the table's URL."""
        files = [file for file in files if any(delete.equality is None for delete in file.deletes)]
        # All files of a managed table's version have the same deletes.
        position_deletes = {
            id(file.deletes): tuple(delete for delete in file.deletes if delete.equality is None) for file in files
        }
        deletes = {delete.name: delete for group in position_deletes.values() for delete in group}
        if not deletes:
            return {}
        with self._lock:
            names, merged = self._merged
            if names != tuple(deletes):
                merged = {}
                self._merged, self._groups = (tuple(deletes), merged), {}
            groups = {
                key: self._groups.setdefault(tuple(delete.name for delete in group), len(self._groups))
                for key, group in position_deletes.items()
            }
        places = {file.url: (file.url, groups[id(file.deletes)]) for file in files}
        new = {file.url: file for file in files if places[file.url] not in merged}
        if new:
            by_name = self._read(list(deletes.values()))
            for url, file in new.items():
                path = url.removeprefix(root + "/")
                parts = [
                    by_name[delete.name][path]
                    for delete in position_deletes[id(file.deletes)]
                    if path in by_name[delete.name]
                ]
                merged[places[url]] = None if not parts else np.unique(np.concatenate(parts))
        return {file.url: positions for file in files if (positions := merged[places[file.url]]) is not None}

    def _read(self, deletes: Sequence[Deletes]) -> dict[str, Mapping[str, Numbers]]:
        """The name of each of the deletes -> path of a data file -> positions of its deleted rows."""
        with self._lock:
            by_name = {
                delete.name: self._positions_by_name[delete.name]
                for delete in deletes
                if delete.name in self._positions_by_name
            }
        missing = [delete for delete in deletes if delete.name not in by_name]
        parts: dict[FileVersion, list[Range]] = {}  # ranges in the same file are one request
        for file, part in (place for delete in missing if (place := delete.place) is not None):
            parts.setdefault(file, []).append(part)
        locations = {file: self._blocks.get_blocks_and_locations(file.url, file) for file in parts}
        read = self._blocks.read([(locations[file], ranges) for file, ranges in parts.items()])
        texts = {
            (file, part): data
            for file, contents in zip(parts, read, strict=True)
            for part, data in zip(parts[file], contents, strict=True)
        }
        for delete in missing:
            if delete.place is None:
                by_name[delete.name] = delete.positions(b"")
                continue
            file, part = delete.place
            try:
                by_name[delete.name] = delete.positions(texts[file, part])
            except DamagedFileError:  # the bytes may have been damaged in transfer
                by_name[delete.name] = delete.positions(self._blocks.read_anew(locations[file], [part])[0])
                self._blocks.count_damaged()
        with self._lock:
            for name, positions in by_name.items():
                self._positions_by_name.pop(name, None)
                self._positions_by_name[name] = positions
            while len(self._positions_by_name) > max(_DELETES_AT_MOST, len(by_name)):
                del self._positions_by_name[next(iter(self._positions_by_name))]
        return by_name
