"""Finds the rows of a managed table that have given keys, and checks that keys are unique."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.keys import SEED, Keys, Numbers, distinct_keys, match_rows, one_array
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
from pyspark_lookup.errors import DamagedFileError, NonUniqueKeyError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.scan.open_file import Projection
from pyspark_lookup.scan.table_scan import Files, Prepared, PreparedScan, Scan, matching_rows, to_slices
from pyspark_lookup.sources.managed.log import DataFile, Definition
from pyspark_lookup.sources.managed.source import version_of_file
from pyspark_lookup.storage.stores import FileVersion
from pyspark_lookup.versions.model import PATH, ROW, Table, place_fields

_AT_ONCE = 1_000_000  # rows that are compared with the keys at a time


class KeyedRows:
    """Finds rows of one managed table by key. `merge_bytes`: about how many bytes of files make one part in `order`."""

    def __init__(self, files: Files, table: Table, merge_bytes: int = 32 * 1024 * 1024) -> None:
        self._files = files
        self._table = table
        self._merge_bytes = merge_bytes

    def read_keys(self, definition: Definition, files: Sequence[DataFile | FileVersion]) -> pa.Table:
        """The key columns of all live rows of these files. In new files all rows are live."""
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
        """The keys that are not among `excluded_keys`."""
        probes = Keys([one_array(column) for column in keys.columns])
        is_new = np.ones(keys.num_rows, np.bool_)
        is_new[match_rows(excluded_keys, excluded_keys.column_names, probes).keys] = False
        return keys.filter(pa.array(is_new))

    def check_new(self, definition: Definition, keys: pa.Table, files: Sequence[FileVersion]) -> None:
        """Raise NonUniqueKeyError if a live row of the files has one of the keys."""
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
        """The live rows of these files that have one of the keys: key columns, `deletes.PATH` and `deletes.ROW`.

        Reads only the key columns, and only of row groups that may have such keys.
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
        """The live rows of these files for which a predicate is true, in the form that `find` returns. Raises PredicateError."""
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
        """All rows of new files, including those with a null key, in the form that `find` returns."""
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
        """Fill the columns `lacking` of `rows` from the rows of `files` with the same keys. Returns the filled rows, and the rows that they
        were filled from, in the form that `find` returns.

        Raises NonUniqueKeyError for a key that two live rows have.
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
                "the rows that column, or delete the key's rows first",
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
        """The rows that have one of the keys."""
        key_table = pa.Table.from_arrays(list(keys), names=list(names))
        matches = match_rows(key_table, names, Keys([one_array(rows.column(name)) for name in names]))
        return rows.take(pa.array(np.unique(matches.keys)))

    def read_delete_files(self, definition: Definition, files: Sequence[DataFile | FileVersion]) -> pa.Table:
        """The rows that delete files name: key columns (null if the table had other keys then), `deletes.PATH` and `deletes.ROW`."""
        data = pa.schema([*definition.schema, *place_fields()])
        names = [*definition.keys, PATH, ROW]
        versions = self._versions(files)
        batches = self._prepare(versions, data, names, None).batches()
        deleted_rows = pa.Table.from_batches(list(batches), pa.schema([data.field(name) for name in names]))
        if deleted_rows.column(PATH).null_count or deleted_rows.column(ROW).null_count:
            urls = ", ".join(redact("path", version.url) for version in versions[:3])
            raise DamagedFileError(f"{urls}: a deleted row lacks its path or its position")
        return deleted_rows

    def count_rows(
        self, definition: Definition, names: Sequence[str], file: FileVersion, keys: pa.Table | None = None
    ) -> Iterator[tuple[Numbers, pa.RecordBatch]]:
        """(positions, columns `names`) of the live rows of a file; with `keys`, only of units that may have some of these."""
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
        """The live rows of the files, in parts that are ordered by key.

        A part fits in memory, unless very many rows have one key; rows within a part are not sorted.
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
        """Predicates that divide all rows among them: ranges of the first key column, or of more key columns if these ranges are too large."""
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
        """The live rows of row groups where `predicate` may be true, with their path and position, in several batches."""
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
        """A scan of some columns of files with the columns `data`, which skips the units that `predicate` rules out."""
        columns = pa.schema([data.field(name) for name in names])
        projection = Projection(columns, data, pa.schema([]), predicate)
        return self._files(keep).prepare(self._table, to_slices(files), projection)

    def _unit_bounds(
        self, files: Sequence[FileVersion], data: pa.Schema, name: str, predicate: Predicate | None
    ) -> list[tuple[ColumnStats | None, int]]:
        """(bounds of a column, bytes) of each unit of files in which `predicate` may be true."""
        scan = self._files(False)
        assert isinstance(scan, Scan)  # managed tables are files
        projection = Projection(pa.schema([data.field(name)]), data, pa.schema([]), predicate)
        return scan.unit_bounds(self._table, files, projection)

    def _twice(self, keys: pa.Table, row: int, why: str, names: Sequence[str] | None = None) -> NonUniqueKeyError:
        key = ", ".join(f"{name} = {keys.column(name)[row].as_py()!r}" for name in names or keys.column_names)
        return NonUniqueKeyError(f"nothing was written to {redact('path', self._table.url)}: the key {key} {why}")


def _groups(files: Sequence[FileVersion], at_most: int) -> Iterator[list[FileVersion]]:
    """The files in their order, in groups of up to `at_most` bytes; a larger file is alone in its group."""
    group: list[FileVersion] = []
    for file in files:
        if group and sum(member.size for member in group) + file.size > at_most:
            yield group
            group = []
        group.append(file)
    if group:
        yield group


def _cuts(field: pa.Field, units: Sequence[tuple[ColumnStats | None, int]], part: int) -> list[Any]:
    """Values that divide the units into ranges of about `part` bytes; ascending and distinct."""
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
    """Whether a unit may have rows from `low` on and below `high` (None: no end)."""
    if stats is None or stats.low is None or stats.high is None:
        return True
    return (low is None or stats.high >= low) and (high is None or stats.low < high)


def _among(names: Sequence[str], keys: Sequence[pa.Array]) -> Predicate:
    parts = tuple(Among(name, pc.unique(array).drop_null()) for name, array in zip(names, keys, strict=True))
    return parts[0] if len(parts) == 1 else And(parts)
