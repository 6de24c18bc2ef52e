"""Rows to data files: in the table's columns, sorted by key, in row groups that a point read can afford."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from pyspark_lookup.base.errors import PutUnknownError, SchemaError, UfsError, UfsUnavailableError
from pyspark_lookup.columnar.ddl import type_ddl
from pyspark_lookup.columnar.keys import check_key_types
from pyspark_lookup.columnar.types import cast_column, spark_schema, spark_type, widens
from pyspark_lookup.io.ufs import Ufs
from pyspark_lookup.managed.sizes import WriteSizes
from pyspark_lookup.options.enums import MissingColumns
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.table.deletes import PATH, ROW, delete_file_bytes, distinct_places
from pyspark_lookup.table.log import DataFile, Definition

__all__ = ["DataFiles", "conformed", "defined", "kept_columns", "matched"]

_AT_ONCE = 4  # files of rows that come in order are sorted together


def defined(schema: pa.Schema, keys: tuple[str, ...], origin: str) -> Definition:
    """A new table's definition, from the columns of the first rows. Raises SchemaError for types or keys that cannot be."""
    found = spark_schema(schema, origin)
    columns = pa.schema([pa.field(field.name, spark_type(field.type)) for field in found])
    if not columns.names:
        raise SchemaError(f"{origin}: a table needs a column")
    if len({key.casefold() for key in keys}) < len(keys):
        raise SchemaError(f"option lookup.keys = {','.join(keys)!r}: a column is named twice")
    spelled = {name.casefold(): name for name in columns.names}
    for key in keys:
        if key.casefold() not in spelled:
            raise SchemaError(
                f"option lookup.keys: the rows have no column {key!r}; they have {', '.join(columns.names)}"
            )
    _check_names(columns)
    names = tuple(spelled[key.casefold()] for key in keys)
    check_key_types([columns.field(name) for name in names])
    return Definition(columns, names)


def matched(definition: Definition, schema: pa.Schema, merge: bool, origin: str) -> Definition:
    """The table's definition once rows of `schema` are in it: the same, or with more columns at the end.

    Rows may lack columns, which are null in them, and have narrower types. Raises SchemaError for a column that the
    table does not have, unless `merge`, and for one of another type.
    """
    rows = spark_schema(schema, origin)
    held = {field.name.casefold(): field for field in definition.schema}
    added = []
    for field in rows:
        known = held.get(field.name.casefold())
        if known is None:
            if not merge:
                raise SchemaError(
                    f"{origin}: the table has no column {field.name!r}; it has {', '.join(definition.schema.names)}. "
                    "lookup.write.merge-schema = true adds it"
                )
            added.append(pa.field(field.name, spark_type(field.type)))
        elif not widens(field.type, known.type):
            raise SchemaError(
                f"{origin}: column {known.name!r} is {type_ddl(known.type)} in the table and {type_ddl(field.type)} in the rows: cast "
                "them. If ALTER TABLE … ALTER COLUMN … TYPE has changed it in the catalog, DROP TABLE there (its files stay) and CREATE "
                "TABLE it anew"
            )
    if not added:
        return definition
    _check_names(pa.schema(added))
    return Definition(pa.schema([*definition.schema, *added]), definition.keys, definition.properties)


def kept_columns(definition: Definition, schema: pa.Schema, options: LookupOptions, origin: str) -> tuple[str, ...]:
    """The columns that rows of `schema` lack, where `lookup.write.missing-columns` says that rows there are keep their values.

    Raises SchemaError for a key column, and where the option says nothing.
    """
    given = {name.casefold() for name in schema.names}
    lacking = tuple(name for name in definition.schema.names if name.casefold() not in given)
    keys = [name for name in lacking if name in definition.keys]
    if keys:
        raise SchemaError(f"{origin}: the rows of an upsert have no key column {keys[0]!r}")
    if lacking and options.write_missing_columns is None:
        raise SchemaError(
            f"{origin}: the rows of an upsert have no column {lacking[0]!r}: give it, or set lookup.write.missing-columns "
            "to KEEP (a row that is there keeps its value) or NULL (the value that was there is lost)"
        )
    return lacking if options.write_missing_columns is MissingColumns.KEEP else ()


def _check_names(columns: pa.Schema) -> None:
    for name in columns.names:
        if name.casefold() in (PATH, ROW):
            raise SchemaError(
                f"column {name!r}: that name is used by files that say which rows do not count; rename it"
            )


def conformed(batch: pa.RecordBatch, schema: pa.Schema, origin: str) -> pa.RecordBatch:
    """Rows in the table's columns and types. Raises SchemaError for a value that does not fit."""
    given = {name.casefold(): column for name, column in zip(batch.schema.names, batch.columns, strict=True)}
    columns = []
    for field in schema:
        column = given.get(field.name.casefold())
        if column is None:
            columns.append(pa.nulls(batch.num_rows, field.type))
        else:
            columns.append(cast_column(column, field.type, field.name, origin))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _slices(table: pa.Table, size: int) -> Iterator[pa.Table]:
    """The table in slices of so many bytes."""
    rows = max(table.num_rows * size // max(table.nbytes, 1), 1)
    return (table.slice(start, rows) for start in range(0, table.num_rows, rows))


class DataFiles:
    """Writes rows to new files of one directory of a table. `directory` is relative to `url`, the table's."""

    def __init__(
        self, ufs: Ufs, url: str, directory: str, definition: Definition, rng: random.Random, sizes: WriteSizes
    ) -> None:
        self._ufs = ufs
        self._url = url
        self._directory = directory
        self._definition = definition
        self._rng = rng
        self._sizes = sizes

    def write(self, batches: Iterable[pa.RecordBatch], prefix: str) -> list[DataFile]:
        """The files that hold the rows, whole in the store; none without rows. What was put before an error is removed."""
        return self._put_all((self._sorted(table) for table in self._tables(batches, self._sizes.file_bytes)), prefix)

    def write_ordered(self, parts: Iterable[Iterable[pa.RecordBatch]], prefix: str) -> list[DataFile]:
        """The files of rows that come in parts in the order of the keys: no two of them have keys between each other's."""
        if not self._definition.keys:
            return self.write(itertools.chain.from_iterable(parts), prefix)
        # A part is one table, unless it is much larger than its files let expect.
        size = self._sizes.file_bytes
        sorted_parts = (self._sorted(table) for part in parts for table in self._tables(part, _AT_ONCE * size))
        return self._put_all((piece for table in sorted_parts for piece in _slices(table, size)), prefix)

    def _put_all(self, tables: Iterable[pa.Table], prefix: str) -> list[DataFile]:
        files: list[DataFile] = []
        try:
            for table in tables:
                files.append(self._put(table, f"{self._directory}/{prefix}-{len(files):05d}"))
        except BaseException:
            self.remove(files)
            raise
        return files

    def remove(self, files: Iterable[DataFile]) -> None:
        """Remove files that nobody will see; one that cannot be removed stays."""
        for file in files:
            try:
                self._ufs.delete(f"{self._url}/{file.path}")
            except UfsError:
                return

    def _tables(self, batches: Iterable[pa.RecordBatch], at_most: int) -> Iterator[pa.Table]:
        schema = self._definition.schema
        held: list[pa.RecordBatch] = []
        size = 0
        for batch in batches:
            rows = max(batch.num_rows * self._sizes.file_bytes // max(batch.nbytes, 1), 1)
            for start in range(0, batch.num_rows, rows):  # a table of somebody's may be one batch
                held.append(conformed(batch.slice(start, rows), schema, self._url))
                size += held[-1].nbytes
                if size >= at_most:
                    yield pa.Table.from_batches(held, schema)
                    held, size = [], 0
        if held:
            yield pa.Table.from_batches(held, schema)

    def put_deletes(self, rows: pa.Table) -> DataFile:
        """A file that names rows of others which do not count any more (see `scan.deletes`)."""
        places = distinct_places(rows)
        return self._put_bytes(delete_file_bytes(places), f"{self._directory}/deletes", places.num_rows)

    def _sorted(self, table: pa.Table) -> pa.Table:
        keys = self._definition.keys
        return table.sort_by([(name, "ascending") for name in keys]) if keys else table

    def _put(self, table: pa.Table, path: str) -> DataFile:
        least, most = self._sizes.row_group_rows
        group = min(max(self._sizes.row_group_bytes * table.num_rows // max(table.nbytes, 1), least), most)
        sink = pa.BufferOutputStream()
        pq.write_table(
            table, sink, row_group_size=group, compression="zstd", compression_level=1, write_page_checksum=True
        )
        return self._put_bytes(sink.getvalue().to_pybytes(), path, table.num_rows)

    def _put_bytes(self, data: bytes, path: str, rows: int) -> DataFile:
        while True:  # no file that somebody has put is ever replaced
            name = f"{path}-{self._rng.getrandbits(64):016x}.parquet"
            try:
                if self._ufs.put_if_absent(f"{self._url}/{name}", data):
                    return DataFile(name, len(data), rows)
            except PutUnknownError as problem:  # if it is there, nothing names it
                raise UfsUnavailableError(f"nothing was written to {self._url}: {problem.__cause__}") from problem
