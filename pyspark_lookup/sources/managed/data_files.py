"""`DataFiles`: writes rows to the files of a managed table.

`Job` describes a write to its tasks and to its commit. Data files have the table's columns, are sorted by key, and have row groups that are
small enough to read a single row. `WriteSizes` has the limits, in bytes and rows, for files, row groups and compactions. Other functions of
this module derive a table's `Definition` from the columns of rows, and check that rows fit it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from pyspark_lookup.columnar.ddl import type_ddl
from pyspark_lookup.columnar.keys import check_key_types
from pyspark_lookup.columnar.types import CREATE_AGAIN, conform_columns, spark_schema, spark_type, widens
from pyspark_lookup.core.credentials import names_shown
from pyspark_lookup.errors import OptionError, PutUnknownError, SchemaError, UfsError, UfsUnavailableError, raise_ours
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import MissingColumns
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.sources.managed.log import DataFile, Definition, TableState, TableWrite, WriteMode
from pyspark_lookup.sources.managed.log.events import PAGE
from pyspark_lookup.sources.managed.options import WriteOptions
from pyspark_lookup.storage.stores.store import is_data_file
from pyspark_lookup.storage.ufs import Ufs
from pyspark_lookup.versions.model import PATH, ROW, delete_file_bytes, distinct_places


def define(schema: pa.Schema, keys: tuple[str, ...], origin: str) -> Definition:
    """A new table's definition, from the columns of its first rows. Raises SchemaError for types or keys that a table cannot have."""
    spark_columns = spark_schema(schema, origin)
    columns = pa.schema([pa.field(field.name, spark_type(field.type)) for field in spark_columns])
    if not columns.names:
        raise SchemaError(f"{origin}: no columns are given, but a table needs at least one: add a column")
    if len({key.lower() for key in keys}) < len(keys):
        raise SchemaError(f"option lookup.keys = {','.join(keys)!r} names a column twice: name each column once")
    spelled_names = {name.lower(): name for name in columns.names}
    for key in keys:
        if key.lower() not in spelled_names:
            raise SchemaError(
                f"{origin}: the key column {key!r} is not among the columns ({names_shown(columns.names, key)}): correct lookup.keys, or add the column"
            )
    _check_names(columns)
    names = tuple(spelled_names[key.lower()] for key in keys)
    check_key_types([columns.field(name) for name in names])
    return Definition(columns, names)


def match_definition(definition: Definition, schema: pa.Schema, merge: bool, origin: str) -> Definition:
    """The table's definition once rows of `schema` are in it: unchanged, or with more columns at the end.

    Rows may lack columns of the table, which are then null in these rows, and may have narrower types. Raises SchemaError for a column of an
    incompatible type, and, unless `merge` is set, for a column that the table does not have.
    """
    rows = spark_schema(schema, origin)
    table_fields = {field.name.lower(): field for field in definition.schema}
    new_fields = []
    for field in rows:
        table_field = table_fields.get(field.name.lower())
        if table_field is None:
            if not merge:
                raise SchemaError(
                    f"{origin}: the table has no column {field.name!r}; to add it, set lookup.write.merge-schema = true; the current columns are "
                    f"{names_shown(definition.schema.names, field.name)}"
                )
            new_fields.append(pa.field(field.name, spark_type(field.type)))
        elif not widens(field.type, table_field.type):
            raise SchemaError(
                f"{origin}: column {table_field.name!r} is {type_ddl(table_field.type)} in the table and {type_ddl(field.type)} in the rows, which does not fit: "
                f"cast the rows to {type_ddl(table_field.type)} if that changes no value. If ALTER TABLE … ALTER COLUMN … TYPE has changed the type in the catalog only, "
                f"{CREATE_AGAIN}"
            )
    if not new_fields:
        return definition
    _check_names(pa.schema(new_fields))
    return Definition(pa.schema([*definition.schema, *new_fields]), definition.keys, definition.properties)


def find_kept_columns(
    definition: Definition, schema: pa.Schema, options: LookupOptions, origin: str
) -> tuple[str, ...]:
    """The columns that rows of `schema` lack and in which existing rows keep their values, as `lookup.write.missing-columns` says.

    Raises SchemaError for a missing key column, and, if that option is not set, for any missing column.
    """
    row_names = {name.lower() for name in schema.names}
    lacking = tuple(name for name in definition.schema.names if name.lower() not in row_names)
    keys = [name for name in lacking if name in definition.keys]
    if keys:
        raise SchemaError(f"{origin}: the rows of an upsert have no key column {keys[0]!r}: add the column")
    if lacking and options.kind(WriteOptions).missing_columns is None:
        raise SchemaError(
            f"{origin}: the rows of an upsert have no column {lacking[0]!r}: add it, or set lookup.write.missing-columns "
            "to KEEP (an existing row keeps its value) or NULL (the existing value is lost)"
        )
    return lacking if options.kind(WriteOptions).missing_columns is MissingColumns.KEEP else ()


def _check_names(columns: pa.Schema) -> None:
    for name in columns.names:
        if name.lower() in (PATH, ROW):
            raise SchemaError(
                f"column {name!r} cannot be written, because delete files use that name: rename the column"
            )


def conform(batch: pa.RecordBatch, schema: pa.Schema, origin: str) -> pa.RecordBatch:
    """The rows with the table's columns, in the table's types. Raises SchemaError for a value that does not fit."""
    row_columns = {name.lower(): column for name, column in zip(batch.schema.names, batch.columns, strict=True)}
    table_columns = {name: row_columns[name.lower()] for name in schema.names if name.lower() in row_columns}
    return conform_columns(table_columns, batch.num_rows, schema, origin)


def extend_definition(
    state: TableState, schema: pa.Schema, options: LookupOptions, by_key: bool, origin: str
) -> Definition:
    """The table's definition once rows of `schema` are written. `by_key`: whether the write is an upsert or delete.

    Raises SchemaError or OptionError if the table cannot take such rows.
    """
    keys = options.files.keys
    definition = state.definition
    if keys is not None and [k.lower() for k in keys] != [k.lower() for k in definition.keys]:
        raise OptionError(
            f"option lookup.keys = {','.join(keys)!r}: the key columns of {origin} are {','.join(definition.keys) or '(none)'}: "
            "leave the option out, or change them with LookupTable.alter(keys=…)"
        )
    row_names = {name.lower() for name in schema.names}
    lacking = [key for key in definition.keys if key.lower() not in row_names]
    if lacking:
        raise SchemaError(
            f"{origin}: the rows have no key column {lacking[0]!r}, so lookups could not find them: add the column"
        )
    if (options.kind(WriteOptions).unique_keys or by_key) and not definition.keys:
        operation = "an upsert or delete" if by_key else "option lookup.write.unique-keys"
        raise OptionError(
            f"{operation} needs key columns, and {origin} has none: name them with LookupTable.alter(keys=…)"
        )
    try:
        return match_definition(definition, schema, options.kind(WriteOptions).merge_schema, origin)
    except SchemaError as problem:
        if state.since or any(write.committed for write in state.writes.values()):
            raise
        raise SchemaError(
            f"{problem}. (Nothing has been committed to this table yet: its columns are those of its creation, or of a first write "
            "that failed or is still running. To declare other columns, make sure that nothing writes to it, and remove its directory)"
        ) from None


_MIB = 1024 * 1024


@dataclasses.dataclass(frozen=True)
class WriteSizes:
    """The sizes, in bytes and rows, of the files and row groups that writes make, and of compactions.

    Tests use smaller sizes, so that small tables have many files. `file_bytes`: rows that take this much memory are sorted and written as one
    file (if rows come in the order of their keys, four times as many are sorted at once). `row_group_bytes`: the size of a row group in
    memory. `row_group_rows`: the least and the most rows of a row group. `merge_bytes`: the size of the files that a compaction reads and
    sorts at once.

    `compact_bytes`: a compaction that a caller requests takes every write smaller than this. `unasked_compact_bytes`: the same for a
    compaction that a commit starts, which takes no write larger than `unasked_write_bytes`. `small_file_bytes`: a requested compaction also
    rewrites a single write whose files are smaller than this on average. `log_page`: the number of events in a page of a new table's log.
    """

    file_bytes: int = 128 * _MIB
    row_group_bytes: int = _MIB
    row_group_rows: tuple[int, int] = (1024, 128 * 1024)
    merge_bytes: int = 32 * _MIB
    compact_bytes: int = 64 * _MIB
    unasked_compact_bytes: int = 4 * _MIB
    unasked_write_bytes: int = 256 * _MIB
    small_file_bytes: int = 8 * _MIB
    log_page: int = PAGE


@dataclasses.dataclass(frozen=True)
class Job:
    """A write under way: all that its tasks and its commit need to know, in any process.

    `write_id`: None if the commit allocates the id. `definition`: the columns of the job's files. `began_s`: when the job began, on the
    steady clock. `nonce`: the nonce of the event that allocated the id, because a table restored from a copy may have given the same id to
    another write. `kept_columns`: the columns that the job's rows lack, in which existing rows keep their values.
    """

    table_id: str
    write_id: int | None
    mode: WriteMode
    directory: str
    definition: Definition
    began_s: float
    nonce: str = ""
    kept_columns: tuple[str, ...] = ()

    @property
    def mark(self) -> str:
        """16 hexadecimal digits that only the names of this job's files contain. "" if no nonce is known."""
        of_write = self.write_id is not None and self.directory == write_directory(self.write_id)
        return self.nonce[:16] if of_write else self.directory.rpartition("-")[2]

    def has_put(self, name: str) -> bool:
        """Whether a task of the job has put the file `name`, a path below the table's directory."""
        directory, _, last = name.rpartition("/")
        return bool(self.mark) and directory == self.directory and f"-{self.mark}-" in last and is_data_file(name)


def write_directory(write_id: int) -> str:
    return f"write-{write_id:020d}"


def batch_directory(batch: tuple[str, int], nonce: str) -> str:
    """The directory for the files of one attempt to write a batch. `batch`: the query's name and the number of the batch."""
    return f"stream-{batch[0]}/{batch[1]:012d}-{nonce}"


def own_write(state: TableState, job: Job) -> TableWrite | None:
    """The job's write in the state; None if the state does not have it.

    Nonces are compared as well as ids: if the table was restored from a copy, another write may have the same id.
    """
    write = state.writes.get(job.write_id) if state.table_id == job.table_id else None
    return None if write is None or (job.nonce and write.nonce and job.nonce != write.nonce) else write


def named_files(state: TableState, job: Job) -> set[str]:
    """The paths of the files in a job's directory that the log names. For an aborted write the log names no files."""
    writes: Iterable[TableWrite] = state.writes.values() if state.table_id == job.table_id else ()
    job_write = state.writes.get(job.write_id)
    if job_write is not None and job.directory == write_directory(job_write.id):
        writes = [job_write]  # no other write has files in it
    paths = (file.path for write in writes for file in (*write.files, *write.deletes))
    return {path for path in paths if path.startswith(job.directory + "/")}


_AT_ONCE = 4  # the rows of this many files are sorted together if rows come in the order of their keys


def remove_files(ufs: Ufs, url: str, files: Iterable[DataFile]) -> None:
    """Remove files, of the table at `url`, that no version will need. If the store fails, the remaining files stay."""
    with contextlib.suppress(UfsError):
        for file in files:
            ufs.delete(f"{url}/{file.path}")


def _slices(table: pa.Table, size: int) -> Iterator[pa.Table]:
    """The table in slices of about `size` bytes."""
    rows = max(table.num_rows * size // max(table.nbytes, 1), 1)
    return (table.slice(start, rows) for start in range(0, table.num_rows, rows))


class DataFiles:
    """Writes the rows of a job to new files of the table at `url`. The names of the files contain the job's mark."""

    def __init__(self, ufs: Ufs, url: str, job: Job, rng: random.Random, sizes: WriteSizes) -> None:
        self._ufs = ufs
        self._url = url
        self._job = job
        self._definition = job.definition
        self._rng = rng
        self._sizes = sizes

    def write(self, batches: Iterable[pa.RecordBatch], prefix: str) -> list[DataFile]:
        """Write the rows, and return the new files: none if there are no rows. If a write fails, the files put before it are removed."""
        return self._put_all((self._sorted(table) for table in self._tables(batches, self._sizes.file_bytes)), prefix)

    def write_ordered(self, parts: Iterable[Iterable[pa.RecordBatch]], prefix: str) -> list[DataFile]:
        """Write rows that come in parts ordered by key, and return the new files. The key ranges of two files do not overlap."""
        if not self._definition.keys:
            return self.write(itertools.chain.from_iterable(parts), prefix)
        # A part is sorted as one table, unless it is much larger than expected.
        size = self._sizes.file_bytes
        sorted_parts = (self._sorted(table) for part in parts for table in self._tables(part, _AT_ONCE * size))
        return self._put_all((piece for table in sorted_parts for piece in _slices(table, size)), prefix)

    def _put_all(self, tables: Iterable[pa.Table], prefix: str) -> list[DataFile]:
        files: list[DataFile] = []
        try:
            for table in tables:
                files.append(self._put_table(table, f"{self._job.directory}/{prefix}-{len(files):05d}"))
        except BaseException:
            remove_files(self._ufs, self._url, files)
            raise
        return files

    def _tables(self, batches: Iterable[pa.RecordBatch], at_most: int) -> Iterator[pa.Table]:
        schema = self._definition.schema
        pending: list[pa.RecordBatch] = []
        size = 0
        for batch in batches:
            rows = max(batch.num_rows * self._sizes.file_bytes // max(batch.nbytes, 1), 1)
            for start in range(0, batch.num_rows, rows):  # a caller's table may be one large batch
                pending.append(conform(batch.slice(start, rows), schema, self._url))
                size += pending[-1].nbytes
                if size >= at_most:
                    yield pa.Table.from_batches(pending, schema)
                    pending, size = [], 0
        if pending:
            yield pa.Table.from_batches(pending, schema)

    def put_deletes(self, rows: pa.Table) -> DataFile:
        """Write a delete file, and return it. `rows`: the deleted rows of other files, by path and position (see `versions.model`)."""
        places = distinct_places(rows)
        return self._put_bytes(delete_file_bytes(places), f"{self._job.directory}/deletes", places.num_rows)

    def _sorted(self, table: pa.Table) -> pa.Table:
        keys = self._definition.keys
        return table.sort_by([(name, "ascending") for name in keys]) if keys else table

    def _put_table(self, table: pa.Table, path: str) -> DataFile:
        least, most = self._sizes.row_group_rows
        group = min(max(self._sizes.row_group_bytes * table.num_rows // max(table.nbytes, 1), least), most)
        sink = pa.BufferOutputStream()
        pq.write_table(
            table, sink, row_group_size=group, compression="zstd", compression_level=1, write_page_checksum=True
        )
        return self._put_bytes(sink.getvalue().to_pybytes(), path, table.num_rows)

    def _put_bytes(self, data: bytes, path: str, rows: int) -> DataFile:
        while True:  # until the name is free: an existing file is never replaced
            name = f"{path}-{self._job.mark}-{self._rng.getrandbits(64):016x}.parquet"
            try:
                if self._ufs.put_if_absent(f"{self._url}/{name}", data):
                    return DataFile(name, len(data), rows)
            except PutUnknownError as problem:  # if the file was put nevertheless, nothing names it
                raise_ours(
                    UfsUnavailableError(
                        f"nothing was written to {redact('path', self._url)}: {problem.__cause__}; write again"
                    ),
                    problem,
                )
