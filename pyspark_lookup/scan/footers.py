"""Reads the footers of a large directory's files, and records the schemas and statistics in them for all processes of the host (`ListedColumns`).

So a host reads each footer once, and later reads open only the files that may have matching rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from pyspark_lookup.columnar.keys import Numbers
from pyspark_lookup.columnar.predicate import ColumnStats, StatsColumns, join_stats, referenced_columns
from pyspark_lookup.scan.open_file import OpenFile, Projection
from pyspark_lookup.versions.file_columns import ColumnFiles
from pyspark_lookup.versions.listed_columns import ListedColumns, columns_of
from pyspark_lookup.versions.model import Table, partition_value, typed_partition_values

_AT_ONCE = 1000  # footers that are in memory at the same time
_FEW = 64  # up to this many unknown footers are not read here: they are read together with the rows, and not recorded

OpenFiles = Callable[[ColumnFiles], Sequence[OpenFile]]


def prune_files(table: Table, files: ColumnFiles, projection: Projection) -> ColumnFiles:
    """The files that may have rows of a projection, by what is known without a read of any file.

    Raises SchemaError for a partition value that is not of the planned type.
    """
    if projection.predicate is None:
        return files
    columns, known = columns_of(files), {}
    if columns is not None:
        needed = _mask(columns, files)
        known = {
            name: columns.stats(table.format, name, kind, needed).stats for name, kind in _tested_columns(projection)
        }
    try:
        return files.prune(projection.predicate, projection.partitions, partition_value, known)
    except ValueError:
        for file in files:
            typed_partition_values(table, file, projection.partitions)  # raises an error that names the file
        raise


def prune_by_footers(table: Table, files: ColumnFiles, projection: Projection, open_files: OpenFiles) -> ColumnFiles:
    """The files that may have rows of a projection. If many of their footers are not known, reads these footers and records their statistics."""
    remaining = prune_files(table, files, projection)
    columns, tested = columns_of(files), _tested_columns(projection)
    if columns is None or not tested:
        return remaining
    needed = _mask(columns, remaining)
    known = np.logical_and.reduce([columns.stats(table.format, name, kind, needed).known for name, kind in tested])
    unknown = np.flatnonzero(needed & ~known)
    if len(unknown) <= _FEW:
        return remaining
    stats: dict[str, list[ColumnStats | None]] = {name: [] for name, _ in tested}
    for opened in _open_some(columns, unknown, open_files):
        for file in opened:
            for name, rows in stats.items():
                rows.append(join_stats([file.stats(unit, projection, name) for unit in file.index.units]))
    for name, kind in tested:
        columns.learn_stats(table.format, name, kind, unknown, StatsColumns.from_rows(stats[name], kind))
    return prune_files(table, remaining, projection)


def known_bounds(
    table: Table, files: ColumnFiles, columns: ListedColumns, tested: pa.Schema
) -> list[list[ColumnStats | None] | None]:
    """For each file the statistics of the columns `tested`; None for a file whose footer is not known."""
    needed = _mask(columns, files)
    parts = [columns.stats(table.format, field.name, field.type, needed) for field in tested]
    known = np.logical_and.reduce([needed, *(part.known for part in parts)])
    return [
        [part.stats.row(row) for part in parts] if row >= 0 and known[row] else None for row in files.order.tolist()
    ]


def schemas_of(
    table: Table, files: ColumnFiles, columns: ListedColumns, open_files: OpenFiles
) -> Iterator[tuple[str, pa.Schema]]:
    """Pairs (URL of a file, its schema) for the first file with each schema, and for each file that is not in `columns`, in the files' order.

    Reads the footers that are not known, and records their schemas.
    """
    needed = _mask(columns, files)
    codes, schemas = columns.schemas(table.format, needed)
    unknown = np.flatnonzero(needed & (codes < 0))
    if len(unknown):
        new = [file.index.schema for opened in _open_some(columns, unknown, open_files) for file in opened]
        codes, schemas = columns.learn_schemas(table.format, unknown, new)
    in_columns = np.flatnonzero(files.order >= 0)
    firsts = in_columns[np.unique(codes[files.order[in_columns]], return_index=True)[1]]
    schema_by_place = {place: schemas[codes[files.order[place]]] for place in firsts.tolist()}
    others = np.flatnonzero(files.order < 0)
    opened_others = open_files(files.take(others))
    schema_by_place |= {p: file.index.schema for p, file in zip(others.tolist(), opened_others, strict=True)}
    for place, schema in sorted(schema_by_place.items(), key=lambda item: item[0]):
        yield files[place].url, schema


def _tested_columns(projection: Projection) -> list[tuple[str, pa.DataType]]:
    """(name, type) of each column that the predicate tests and of which footers have statistics: no partition column, and no nested one."""
    fields = (field for field in projection.data if field.name not in projection.partitions.names)
    tested = referenced_columns(projection.predicate)
    return [(field.name, field.type) for field in fields if field.name in tested and not pa.types.is_nested(field.type)]


def _mask(columns: ListedColumns, files: ColumnFiles) -> Numbers:
    mask = np.zeros(len(columns), np.bool_)
    mask[files.rows] = True
    return mask


def _open_some(columns: ListedColumns, rows: Numbers, open_files: OpenFiles) -> Iterator[Sequence[OpenFile]]:
    for start in range(0, len(rows), _AT_ONCE):
        yield open_files(ColumnFiles(columns, (), rows[start : start + _AT_ONCE]))
