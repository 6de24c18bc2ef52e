"""Rows that are deleted by their values (Iceberg's equality deletes), as positions in their files.

Null equals null, and NaN equals NaN, but -0.0 is not 0.0, as in Iceberg.
"""

from __future__ import annotations

import collections
import dataclasses
import decimal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.key_rows import RowIndex
from pyspark_lookup.columnar.keys import Keys, Numbers, one_array
from pyspark_lookup.columnar.predicate import Among, And, Predicate
from pyspark_lookup.core.parallel import run_in_order
from pyspark_lookup.scan.open_file import Latest
from pyspark_lookup.storage.stores import Deletes, EqualityColumns, FileVersion

_THREADS = 8  # which mostly wait for the store
_KEPT_BYTES = 64 * 1024 * 1024
_FILES_KEPT = 4 * 1024 * 1024  # positions in total

ReadRows = Callable[[FileVersion, pa.Schema], pa.Table]
"""Reads all rows of a file with such columns, deleted rows included."""
PlaceRows = Callable[[FileVersion, pa.Schema, Predicate | None], Iterator[tuple[Numbers, pa.RecordBatch]]]
"""(positions, columns of that schema) of the rows of a file for which a predicate may be true, deleted rows included."""


def comparable_values(columns: Sequence[pa.Array]) -> list[pa.Array]:
    """Columns that are equal in exactly those rows in which `columns` are, but without nulls and floats, and with structs as their only field."""
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
