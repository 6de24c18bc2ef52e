"""`ListedColumns`: the files of a large directory as columns, with the statistics and schemas in their footers.

All processes of a host map the columns from its cache directory. A later version of the directory consists of these columns without the files
that were removed since, and of the files that were added (`ColumnFiles`). When too many files have changed, new columns are written. They keep
what is known of the footers of files that have not changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.keys import Numbers, as_bools, as_indices, as_int64
from pyspark_lookup.columnar.predicate import StatsColumns
from pyspark_lookup.columnar.types import schema_of_text, text_of_schema
from pyspark_lookup.core.decoding import as_count, as_name, as_text, as_texts
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.options.enums import FileFormatName
from pyspark_lookup.storage.disk import Disk, key_of
from pyspark_lookup.storage.stores import FileVersion, ListedFiles, PartitionValues, split_urls
from pyspark_lookup.versions.column_segments import (
    batch_from_text,
    batch_to_text,
    concat_stats,
    read_batch,
    write_batch,
)
from pyspark_lookup.versions.directories import partition_values
from pyspark_lookup.versions.file_columns import ColumnFiles, FileColumns

T = TypeVar("T")
_FILES, _SCHEMAS = "files", "schemas"
_KNOWN, _CODE = "known", "code"
_STATS = ("low", "high", "null_counts", "rows")
_ADDED_AT_MOST, _GONE_AT_MOST = 64, 1024
_SCHEMAS_AT_MOST = 256
_Footers = tuple[pa.RecordBatch, dict[str, Any]]
"""(a batch with a row for each file, null where the file's footer has not been read; values to which the rows refer, such as the schemas)."""


@dataclasses.dataclass(frozen=True)
class KnownStats:
    """The statistics of a column in the footers of many files. `known`: for each file, whether its footer has been read."""

    stats: StatsColumns
    known: Numbers


class ListedColumns(FileColumns):
    """The files in a listing of a directory whose identity shows each change, as columns.

    `root`: the directory below which partition directories are. `name`: under which the columns are in the host's cache directory `disk`;
    None: they are in memory only.
    """

    def __init__(self, listed: ListedFiles, root: str, disk: Disk | None = None, name: str | None = None) -> None:
        self.listed = listed
        self.urls, self.sizes = listed.urls, listed.sizes
        self.name = name
        self.root = root
        self._disk = disk
        self._footers: dict[str, _Footers] = {}

    def __len__(self) -> int:
        return len(self.listed)

    # --- files ------------------------------------------------------------------------------------

    def file(self, row: int) -> FileVersion:
        return self.listed[row]

    @property
    def modified_at_s(self) -> Numbers:
        return self.listed.modified_at_s

    def row_names(self, rows: Numbers) -> pa.Array:
        sizes = self.listed.batch.column("size").cast(pa.string())
        columns = (column.take(as_indices(rows)) for column in (self.urls, sizes, self.listed.identities))
        return pc.binary_join_element_wise(*columns, "\0")

    def identities(self, rows: Numbers) -> pa.Array:
        return self.listed.identities.take(as_indices(rows))

    def partition_of(self, file: FileVersion) -> PartitionValues:
        return partition_values(self.root, file.url)

    def partition_values(self, name: str) -> pa.Array:
        directories, places = self.directories
        texts = [dict(partition_values(self.root, f"{directory}/-")).get(name) for directory in directories]
        return pa.array(texts, pa.string()).take(as_indices(places))

    @cached_property
    def directories(self) -> tuple[list[str], Numbers]:
        """(the directories of the files, each once; for each file the place of its directory in this list)."""
        return split_urls(self.urls)[:2]

    def statistics(self, name: str) -> StatsColumns | None:
        return None  # a listing says nothing about columns

    # --- footers ----------------------------------------------------------------------------------

    def stats(self, form: FileFormatName | None, name: str, kind: pa.DataType, needed: Numbers) -> KnownStats:
        """The statistics of the column `name`, read as type `kind`, in those files whose footers have been read.

        `form`: the format as which the table's files are read. `needed`: a mask of the files whose statistics are needed.
        """

        def parse(batch: pa.RecordBatch) -> KnownStats:
            columns = StatsColumns(*(batch.column(field) for field in _STATS))
            if columns.low.type != columns.high.type or not columns.null_counts.type == columns.rows.type == pa.int64():
                raise ValueError("these are not statistics")
            return KnownStats(columns, as_bools(pc.fill_null(batch.column(_KNOWN), False)))

        return self._recall(_stats_place(form, name, kind), lambda batch, _: parse(batch), needed) or KnownStats(
            StatsColumns.from_rows([None], kind).take(pa.nulls(len(self), pa.int64())), np.zeros(len(self), np.bool_)
        )

    def learn_stats(
        self, form: FileFormatName | None, name: str, kind: pa.DataType, rows: Numbers, stats: StatsColumns
    ) -> None:
        """Record the statistics of a column in the files at `rows`, whose footers were just read. `stats`: a row for each of these files."""
        before = self.stats(form, name, kind, np.ones(len(self), np.bool_))
        places = np.arange(len(self))
        places[rows] = len(self) + np.arange(len(rows))
        known = before.known.copy()
        known[rows] = True
        joined = concat_stats([before.stats, stats]).take(as_indices(places))
        columns = [joined.low, joined.high, joined.null_counts, joined.rows, pa.array(known)]
        self._remember(
            _stats_place(form, name, kind), (pa.RecordBatch.from_arrays(columns, names=[*_STATS, _KNOWN]), {})
        )

    def schemas(self, form: FileFormatName | None, needed: Numbers) -> tuple[Numbers, list[pa.Schema]]:
        """(for each file the number of its schema, or -1 if its footer has not been read; the schemas).

        `needed`: a mask of the files whose schemas are needed.
        """

        def parse(batch: pa.RecordBatch, about: dict[str, Any]) -> tuple[Numbers, list[pa.Schema]]:
            known_schemas = [schema_of_text(text) for text in as_texts(about[_SCHEMAS])]
            codes = as_int64(pc.fill_null(batch.column(_CODE), -1).cast(pa.int64()))
            if codes.max(initial=-1) >= len(known_schemas):
                raise ValueError("it names a schema that it does not have")
            return codes, known_schemas

        return self._recall(f"{_SCHEMAS}-{_name_of(form)}", parse, needed) or (np.full(len(self), -1), [])

    def learn_schemas(
        self, form: FileFormatName | None, rows: Numbers, schemas: Sequence[pa.Schema]
    ) -> tuple[Numbers, list[pa.Schema]]:
        """Record the schemas of the files at `rows`, whose footers were just read. Returns what `schemas` returns from then on.

        If the files have more than 256 different schemas, nothing is recorded.
        """
        before, known_schemas = self.schemas(form, np.ones(len(self), np.bool_))
        numbers = {text_of_schema(schema): number for number, schema in enumerate(known_schemas)}
        texts = {id(schema): text_of_schema(schema) for schema in schemas}
        codes = before.copy()
        codes[rows] = [numbers.setdefault(texts[id(schema)], len(numbers)) for schema in schemas]
        if len(numbers) <= _SCHEMAS_AT_MOST:
            column = pa.array(codes.astype(np.int32), mask=codes < 0)
            batch = pa.RecordBatch.from_arrays([column], names=[_CODE])
            self._remember(f"{_SCHEMAS}-{_name_of(form)}", (batch, {_SCHEMAS: [*numbers]}))
        return codes, [schema_of_text(text) for text in numbers]

    def _recall(self, place: str, parse: Callable[[pa.RecordBatch, dict[str, Any]], T], needed: Numbers) -> T | None:
        """What `parse` returns for the footers that are known under the name `place`; None if none are known.

        If this process does not know the footer of a needed file, it first reads what other processes have recorded.
        """
        footers = self._footers.get(place)
        if self._disk is not None and self.name is not None and (footers is None or _lacks(footers, needed)):

            def check(batch: pa.RecordBatch, about: dict[str, Any]) -> _Footers:
                if batch.num_rows != len(self):
                    raise ValueError("the footers are of other files")
                parse(batch, about)
                return batch, about

            recorded = read_batch(self._disk, self.name, place, check)
            if recorded is not None and (footers is None or _count(recorded) >= _count(footers)):
                footers = self._footers[place] = recorded
        return None if footers is None else parse(*footers)

    def _remember(self, place: str, footers: _Footers) -> None:
        self._footers[place] = footers
        if self._disk is not None and self.name is not None:
            with contextlib.suppress(OSError):  # if this fails, other processes must read the footers themselves
                write_batch(self._disk, self.name, place, *footers)

    # --- in the cache directory -------------------------------------------------------------------

    def save(self, disk: Disk) -> str:
        """Write the columns to the host's cache directory, unless they are there already. Returns their name there. Raises OSError."""
        if self.name is None or _FILES not in disk.segments(self.name):
            name = uuid.uuid4().hex
            write_batch(disk, name, _FILES, self.listed.batch)
            disk.replace_record("listed", name, len(self))
            self._disk, self.name = disk, name
            for place, footers in list(self._footers.items()):
                self._remember(place, footers)
        elif (
            disk.get_record("listed", self.name, as_count) is None
        ):  # nobody has read it for so long that it was removed
            disk.replace_record("listed", self.name, len(self))
        return self.name

    def next(self, listed: ListedFiles) -> ListedColumns:
        """The columns of a newer listing of the same directory. They know the footers that these columns know of files that have not changed."""
        columns = ListedColumns(listed, self.root)
        places = list(self._footers)
        if self._disk is not None and self.name is not None:
            everything = np.ones(len(self), np.bool_)
            places = list({*places, *self._disk.segments(self.name)} - {_FILES})
            for place in places:
                self._recall(place, lambda batch, _: batch, everything)
        rows = self.listed.find(listed)
        earlier = pa.array(rows, mask=rows < 0)
        columns._footers = {
            place: (batch.take(earlier), about)
            for place in places
            if place in self._footers
            for batch, about in (self._footers[place],)
        }
        return columns


def _name_of(form: FileFormatName | None) -> str:
    return "none" if form is None else form.value


def _stats_place(form: FileFormatName | None, name: str, kind: pa.DataType) -> str:
    return key_of("stats", _name_of(form), name, kind)


def _is_known(footers: _Footers) -> Numbers:
    batch = footers[0]
    if _CODE in batch.schema.names:
        return as_bools(batch.column(_CODE).is_valid())
    return as_bools(pc.fill_null(batch.column(_KNOWN), False))


def _lacks(footers: _Footers, needed: Numbers) -> bool:
    return bool((needed & ~_is_known(footers)).any())


def _count(footers: _Footers) -> int:
    return int(_is_known(footers).sum())


def open_columns(disk: Disk, name: str, root: str) -> ListedColumns | None:
    """The columns that `save` wrote under `name`; None if they are missing or damaged."""
    if disk.get_record("listed", name, as_count) is None:
        return None
    listed = read_batch(disk, name, _FILES, lambda batch, _: ListedFiles.from_batch(batch))
    if listed is None:
        return None
    disk.use_table(name)
    return ListedColumns(listed, root, disk, name)


# --- the files of a version -----------------------------------------------------------------------


def columns_of(version_files: Sequence[FileVersion]) -> ListedColumns | None:
    """The `ListedColumns` of the files of a version; None if the files are objects, or columns of another kind of table."""
    columns = version_files.columns if isinstance(version_files, ColumnFiles) else None
    return columns if isinstance(columns, ListedColumns) else None


def to_column_files(
    listed: ListedFiles, root: str, earlier: ListedColumns | None
) -> ColumnFiles | tuple[FileVersion, ...]:
    """The files of a version that consists of the files in a listing. `earlier`: the columns of an earlier version of the directory, if any.

    A file whose identity does not yet show each change becomes a `FileVersion` object instead of a row of the columns. If there are many such
    files, all files become objects.
    """
    is_in_columns = listed.cacheable
    if earlier is not None:
        rows = np.where(is_in_columns, earlier.listed.find(listed), -1)
        kept_rows = rows[rows >= 0]
        if len(rows) - len(kept_rows) <= _ADDED_AT_MOST and len(earlier) - len(kept_rows) <= _GONE_AT_MOST:
            return ColumnFiles.merge(earlier, kept_rows, listed.take(np.flatnonzero(rows < 0)))
    if len(listed) - is_in_columns.sum() > _ADDED_AT_MOST:
        return tuple(listed)
    in_columns = listed.filter(is_in_columns)
    columns = ListedColumns(in_columns, root) if earlier is None else earlier.next(in_columns)
    return ColumnFiles.merge(columns, np.arange(len(columns)), listed.take(np.flatnonzero(~is_in_columns)))


def one_of_each_directory(files: Sequence[FileVersion]) -> Sequence[FileVersion]:
    """The first file of each directory. If the files are not in `ListedColumns`, all files."""
    columns = columns_of(files)
    return files if columns is None else _one_of_each(files, columns.directories[1])


def one_of_each_extension(files: Sequence[FileVersion]) -> Sequence[FileVersion]:
    """A file with each of the file name extensions that occur. If the files are not in `ListedColumns`, all files."""
    columns = columns_of(files)
    if columns is None:
        return files
    extension = columns.urls[0].as_py().rpartition("/")[2].rpartition(".")[2] if len(columns) else ""
    if extension in ("parquet", "orc", "arrow") and pc.all(pc.ends_with(columns.urls, f".{extension}")).as_py():
        return _one_of_each(files, np.zeros(len(columns), np.int64))  # the usual case
    parts = pc.split_pattern(split_urls(columns.urls)[2], ".", reverse=True, max_splits=2)
    starts, ends = (as_int64(side.cast(pa.int64())) for side in (parts.offsets[:-1], parts.offsets[1:]))
    last_parts, middle_parts = (parts.values.take(as_indices(np.maximum(ends - back, starts))) for back in (1, 2))
    extensions = pc.binary_join_element_wise(pa.array(ends - starts > 1).cast(pa.string()), last_parts, ".")
    is_compressed = pc.is_in(pc.utf8_lower(last_parts), value_set=pa.array(["gz", "bz2"]))
    extensions = pc.if_else(is_compressed, pc.binary_join_element_wise(middle_parts, extensions, "."), extensions)
    return _one_of_each(files, as_int64(extensions.dictionary_encode().indices.cast(pa.int64())))


def _one_of_each(files: Sequence[FileVersion], codes: Numbers) -> ColumnFiles:
    """The first file with each code, and all files that are not in the columns. `codes`: a code for each row of the columns."""
    assert isinstance(files, ColumnFiles)
    is_first = files.order < 0
    in_columns = np.flatnonzero(~is_first)
    is_first[in_columns[np.unique(codes[files.order[in_columns]], return_index=True)[1]]] = True
    return files.take(np.flatnonzero(is_first))


def to_listed(files: Sequence[FileVersion]) -> ListedFiles:
    """The files of a version or listing as `ListedFiles`."""
    columns = columns_of(files)
    if isinstance(files, ColumnFiles) and columns is not None:
        in_columns = columns.listed.take(files.rows)
        return ListedFiles.concat([in_columns, ListedFiles.from_files(files.others)]) if files.others else in_columns
    return files if isinstance(files, ListedFiles) else ListedFiles.from_files(files)


def lacks_urls(files: Sequence[FileVersion], other_files: Sequence[FileVersion]) -> bool:
    """Whether `other_files` lack a URL that is among `files`. All are files of the same directory."""
    if isinstance(files, tuple) or isinstance(other_files, tuple):
        return not {file.url for file in files} <= {file.url for file in other_files}
    return not as_bools(pc.is_in(to_listed(files).urls, value_set=to_listed(other_files).urls)).all()


def lacks_states(files: Sequence[FileVersion], other_files: Sequence[FileVersion]) -> bool:
    """Whether `other_files` lack one of `files`, or have it in another state. All are files of the same directory."""
    if isinstance(files, tuple) or isinstance(other_files, tuple):
        return not {*files} <= {*other_files}
    return bool((to_listed(other_files).find(to_listed(files)) < 0).any())


def files_to_json(files: ColumnFiles, columns: ListedColumns, disk: Disk) -> dict[str, Any]:
    """A JSON value that describes the files of a version, for a record in the host's cache directory.

    Writes the columns to that directory, too, unless they are there already. Raises OSError.
    """
    gone = np.delete(np.arange(len(columns)), files.rows)
    return {"columns": columns.save(disk), "gone": gone.tolist(), "added": [file.to_json() for file in files.others]}


def listed_to_record(files: ColumnFiles) -> dict[str, Any] | None:
    """The files of a version as a self-contained JSON value, without their footers; None if their columns are not `ListedColumns`."""
    columns = columns_of(files)
    if columns is None:
        return None
    text = batch_to_text(columns.listed.take(files.rows).batch)
    return {"listed": text, "root": columns.root, "added": [file.to_json() for file in files.others]}


def listed_from_record(record: Any, deletes_by_name: Mapping[str, Any]) -> ColumnFiles:
    """The files that `listed_to_record` described. `deletes_by_name`: not used, because listed files have no deletes.

    Raises one of `decoding.UNREADABLE` for any other value.
    """
    listed = ListedFiles.from_batch(batch_from_text(record["listed"], ListedFiles.schema))
    columns = ListedColumns(listed, as_text(record["root"]))
    return ColumnFiles.merge(columns, np.arange(len(listed)), [FileVersion.from_json(row) for row in record["added"]])


def files_from_json(record: Any, open_named: Callable[[str], ListedColumns | None]) -> ColumnFiles:
    """The files that `files_to_json` described. `open_named`: opens the columns of a name.

    Raises one of `decoding.UNREADABLE` if the record is malformed, or its columns are missing.
    """
    columns = open_named(as_name(record["columns"]))
    if columns is None:
        raise ValueError("the columns of its files are gone")
    gone = [as_count(row) for row in record["gone"]]
    if gone and max(gone) >= len(columns):
        raise ValueError(f"it removes row {max(gone)} (counted from 0), but its columns have {len(columns)} rows")
    others = [FileVersion.from_json(row) for row in record["added"]]
    return ColumnFiles.merge(columns, np.delete(np.arange(len(columns)), gone), others)
