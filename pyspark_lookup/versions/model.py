"""`Table`: where a table is, and how its files are read. `TableVersion`: one state of the table, with its files.

This module also has functions for paths with wildcards, for delete files of managed tables, and for partition columns and `lookup.partition`.
A delete file of a managed table is a Parquet file that names the deleted rows of other files by path and position, like Iceberg's position
deletes. In addition it has the key columns of these rows.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import decimal
import fnmatch
import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pyspark_lookup.columnar.keys import Numbers, one_array, sort_distinct
from pyspark_lookup.columnar.predicate import ColumnStats
from pyspark_lookup.columnar.types import PLAN_AGAIN, decimal_of_text, schema_of_text
from pyspark_lookup.core.decoding import UNREADABLE, as_count, as_counts, as_name, as_text, as_texts, describe_fault
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.errors import DamagedFileError, NotATableError, OptionError, SchemaError, raise_ours
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import FileFormatName, OnVersionGone
from pyspark_lookup.options.groups import CsvOptions, Pin
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.storage.disk import digest_of, key_of, key_of_texts
from pyspark_lookup.storage.stores import (
    DELETE_FILE,
    Deletes,
    EqualityDeletes,
    EqualityGroup,
    FileStatistics,
    FileVersion,
    ListedFiles,
    PartitionValues,
    Range,
    StoredColumn,
    key_of_column,
)
from pyspark_lookup.versions.directories import NULL_PARTITION, parse_partition, partition_values, unescape
from pyspark_lookup.versions.file_columns import ColumnFiles
from pyspark_lookup.versions.listed_columns import (
    ListedColumns,
    listed_from_record,
    listed_to_record,
    one_of_each_directory,
    to_listed,
)
from pyspark_lookup.versions.recorded_columns import files_from_record, files_to_record

_GLOB = re.compile(r"[*?\[{]")


def is_glob(path: str) -> bool:
    """Whether a path has wildcards (`*`, `?`, `[…]`, `{a,b}`). False for a web URL, in which `?` begins the query."""
    return not path.startswith(("http://", "https://")) and _GLOB.search(path) is not None


def glob_root(url: str) -> str:
    """The directory above the first component of a glob that has a wildcard."""
    return re.split(_GLOB, url, maxsplit=1)[0].rpartition("/")[0]


def glob_matches(url: str, pattern: str) -> bool:
    """Whether the path of a file, or of a directory above it, matches a glob. Each component is matched by itself: `*` matches no slash."""
    components = url.split("/")
    return any(
        len(components) >= len(pattern_components) and _components_match(components, pattern_components)
        for pattern_components in _alternatives(pattern)
    )


def glob_reaches(directory: str, pattern: str) -> bool:
    """Whether something below a directory may match a glob."""
    return any(
        _components_match(directory.split("/"), pattern_components) for pattern_components in _alternatives(pattern)
    )


def _components_match(components: Sequence[str], pattern_components: Sequence[str]) -> bool:
    """Whether each component matches the part of the pattern at its place, up to the end of the shorter list."""
    return all(fnmatch.fnmatchcase(name, part) for name, part in zip(components, pattern_components, strict=False))


@functools.lru_cache(maxsize=128)
def _alternatives(pattern: str) -> tuple[tuple[str, ...], ...]:
    """The patterns without braces that a pattern with braces stands for, each split into components."""
    braces = re.search(r"(?<!\\)\{([^{}]*)\}", pattern)
    if braces is None:
        # For fnmatch, a backslash is an ordinary character: an escaped wildcard becomes `[*]`.
        plain = re.sub(r"\\(.)", lambda escaped: f"[{escaped[1]}]" if escaped[1] in "*?[" else escaped[1], pattern)
        return (tuple(plain.replace("[^", "[!").split("/")),)
    choices = (pattern[: braces.start()] + choice + pattern[braces.end() :] for choice in braces[1].split(","))
    return tuple(parts for choice in choices for parts in _alternatives(choice))


PATH, ROW = "_lookup_file", "_lookup_row"
"""The columns of a delete file that tell where a deleted row is: its file's path below the table, and its position in it (int64, from 0)."""


def place_fields() -> list[pa.Field]:
    """The two fields `PATH` and `ROW` of a delete file's schema."""
    return [pa.field(PATH, pa.string()), pa.field(ROW, pa.int64())]


def distinct_places(rows: pa.Table) -> pa.Table:
    """The rows of delete files, sorted by `PATH` and `ROW`, each once: two writes at the same time may both have deleted a row."""
    sorted_rows = rows.sort_by([(PATH, "ascending"), (ROW, "ascending")]).combine_chunks()
    if sorted_rows.num_rows < 2:
        return sorted_rows
    differs = (
        pc.not_equal(column.slice(1), column.slice(0, len(column) - 1))
        for column in (one_array(sorted_rows.column(name)) for name in (PATH, ROW))
    )
    is_first = pa.concat_arrays([pa.array([True]), pc.or_(*differs)])
    return sorted_rows.filter(is_first)


def delete_file_bytes(rows: pa.Table) -> bytes:
    """The bytes of a delete file. `rows`: the key columns, `PATH` and `ROW` of the deleted rows, in the order of `distinct_places`."""
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, compression="zstd", compression_level=1, write_page_checksum=True)
    data = bytes(sink.getvalue().to_pybytes())
    _parse_positions("deleted rows", data)  # a delete file that cannot be read would make the table unreadable
    return data


@dataclasses.dataclass(frozen=True)
class DeleteFile:
    """A delete file of a managed table, by its URL and size."""

    url: str
    size: int

    @property
    def name(self) -> str:
        return self.url

    @property
    def place(self) -> tuple[FileVersion, Range]:
        return self.keys, (0, self.size)

    @property
    def keys(self) -> FileVersion:
        return FileVersion(self.url, self.size, DELETE_FILE)

    def positions(self, data: bytes | memoryview) -> Mapping[str, Numbers]:
        return _parse_positions(self.url, data)

    def to_json(self) -> list[Any]:
        return ["file", self.url, self.size]

    @classmethod
    def from_json(cls, record: Any) -> DeleteFile:
        """The delete file that `to_json` described, from its list without the first item. Raises TypeError or ValueError for another list."""
        url, size = record
        return cls(as_text(url), as_count(size))


DELETES: dict[str, Callable[[Any], Deletes | EqualityDeletes]] = {"file": DeleteFile.from_json}
"""Functions that decode deletes from the list that their `to_json` returned. The key is the list's first item; the argument is the other items."""


def parse_deletes(record: Any) -> Any:
    """The deletes whose `to_json` returned `record`. Raises one of `decoding.UNREADABLE` for any other value."""
    kind, *fields = record
    return DELETES[kind](fields)


def _parse_positions(url: str, data: bytes | memoryview) -> dict[str, Numbers]:
    """The deleted rows that a delete file names: by path, their positions, ascending, each once. Raises DamagedFileError, which names `url`.

    A delete file may name a position twice: compactions of earlier releases wrote such files after two writes had deleted the same row.
    """
    try:
        with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as file:
            table = file.read([PATH, ROW]).combine_chunks()
            row_count = file.metadata.num_rows
        table.validate(full=True)
        if table.num_rows != row_count:  # a footer with a truncated list of row groups still parses
            raise ValueError(f"{row_count} rows were expected, not {table.num_rows}")
        if table.schema.types != [field.type for field in place_fields()] or any(c.null_count for c in table.columns):
            raise ValueError("each row must have a path and a position")
        paths, rows = table.column(PATH).to_numpy(), table.column(ROW).to_numpy()
        starts = np.flatnonzero(np.concatenate([[len(rows) > 0], paths[1:] != paths[:-1]]))
        parts = np.split(rows, starts[1:]) if len(starts) else []
        places = {str(paths[start]): part for start, part in zip(starts, parts, strict=True)}
        if len(places) < len(parts) or any(part[0] < 0 or (np.diff(part) < 0).any() for part in parts):
            raise ValueError("the positions of each file must be together and ascending")
        places = {path: sort_distinct(part) for path, part in places.items()}
    except (*UNREADABLE, pa.ArrowException, OSError) as problem:
        redacted_path = redact("path", url)
        raise_ours(
            DamagedFileError(
                f"{redacted_path} is not a readable delete file: {describe_fault(problem)}: restore this file"
            ),
            problem,
        )
    return places


_PARTS = ("nulls", "rows", "buckets", "bucket")  # the statistics of a column besides its bounds; all are integers


def statistics_to_text(files: Sequence[FileVersion], schema: pa.Schema) -> str | None:
    """The statistics of files as a text, for JSON: an Arrow table with a row for each file, in the order of `files`.

    None if no file has statistics. `schema`: the table's columns.
    """
    statistics = [file.statistics for file in files]
    if all(entry is None for entry in statistics):
        return None
    counts = [None if entry is None else entry.rows for entry in statistics]
    columns: dict[str, pa.Array] = {
        "": pa.array([entry is not None for entry in statistics], pa.bool_()),
        "rows": pa.array(counts, pa.int64()),
    }
    names = dict.fromkeys(name for entry in statistics if entry is not None for name in entry.bounds)
    for name in (name for name in names if schema.get_field_index(name) >= 0):
        bounds = [None if entry is None else entry.bounds.get(name) for entry in statistics]
        kind = schema.field(name).type
        try:
            low, high = (
                pa.array([None if stats is None else getattr(stats, side) for stats in bounds], kind)
                for side in ("low", "high")
            )
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            continue
        columns |= {f"low:{name}": low, f"high:{name}": high}
        numbers = [_numbers(stats) for stats in bounds]
        for place, part in enumerate(_PARTS):
            columns[f"{part}:{name}"] = pa.array([row[place] for row in numbers], pa.int64())
    table = pa.Table.from_arrays(list(columns.values()), names=list(columns))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return base64.b64encode(sink.getvalue()).decode()


def _numbers(stats: ColumnStats | None) -> tuple[int | None, ...]:
    if stats is None:
        return (None,) * len(_PARTS)
    return stats.null_count, stats.rows, *(stats.bucket or (None, None))


def statistics_from_text(text: Any, count: int) -> list[FileStatistics | None]:
    """The statistics of `count` files, from the text of `statistics_to_text`. Raises TypeError or ValueError for any other text."""
    try:
        table = pa.ipc.open_stream(pa.py_buffer(base64.b64decode(as_text(text), validate=True))).read_all()
        table = table.combine_chunks()
        table.validate(full=True)
    except (OSError, pa.ArrowException) as problem:
        raise ValueError(str(problem)) from None
    if table.num_rows != count:
        raise ValueError(f"statistics of {table.num_rows} files instead of {count}")
    has_statistics, rows = table.column("").to_pylist(), table.column("rows").to_pylist()
    return [
        FileStatistics(rows[place], _Bounds(table, place)) if has_statistics[place] else None for place in range(count)
    ]


class _Bounds(Mapping[str, ColumnStats]):
    """The statistics of a file's columns, by name. Each is read from the file's `row` of the Arrow table when it is needed."""

    def __init__(self, table: pa.Table, row: int) -> None:
        self._table = table
        self._row = row

    def __getitem__(self, name: str) -> ColumnStats:
        if self._table.schema.get_field_index(f"low:{name}") < 0:
            raise KeyError(name)
        nulls, rows, buckets, bucket = (self._value(part, name) for part in _PARTS)
        if rows is None:
            raise KeyError(name)
        bucket_pair = None if buckets is None else (buckets, bucket)
        return ColumnStats(self._value("low", name), self._value("high", name), nulls, rows, bucket_pair)

    def _value(self, part: str, name: str) -> Any:
        return self._table.column(f"{part}:{name}")[self._row].as_py()

    def __iter__(self) -> Iterator[str]:
        names = (name.removeprefix("low:") for name in self._table.column_names if name.startswith("low:"))
        return (name for name in names if self._value("rows", name) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


# --- tables and their versions --------------------------------------------------------------------


class Kind:
    """The names of the kinds of tables that are plain files. Each other kind is named by its `VersionSource`.

    A query's planning finds out the kind of the table, so that the execution needs only one call to the store.
    """

    FILE = "FILE"
    DIRECTORY = "DIRECTORY"
    GLOB = "GLOB"


@dataclasses.dataclass(frozen=True)
class Busy:
    """What a read does while a job writes the table's files: the options `lookup.on-busy`, `.busy-wait` and `.busy-timeout`."""

    keep: bool = True
    wait_s: float = 30.0
    timeout_s: float = 600.0


@dataclasses.dataclass(frozen=True)
class Table:
    """A table as a read sees it: where it is, in which store, what kind it is, which version is read, and how its files are read.

    `url`: the canonical path. `scope`: the scope of the store (`Ufs.scope`). `kind`: a name in `VersionSource.kinds`. `format`: None only
    until the files are known. `pinned`: the version to read; None: the current one. `own_write_id`: in a read by a transaction, the write
    of the transaction, whose rows it sees, too. `csv`: the syntax of CSV files. `declared`: the columns that the user declares; None: those
    of the files. `retained`: the table keeps earlier versions, so it is an error if a version is gone.
    """

    url: str
    scope: str
    kind: str
    format: FileFormatName | None
    success_file: bool = False
    settle_s: float | None = None
    pinned: Pin | None = None
    own_write_id: int | None = None
    busy: Busy = Busy()
    csv: CsvOptions = CsvOptions()
    declared: pa.Schema | None = None
    retained: bool = False

    def __repr__(self) -> str:
        return f"Table({redact('path', self.url)!r}, {self.kind}, {self.format}, {self.pinned!r})"

    @cached_property
    def id(self) -> str:
        """A hash of 32 hex digits, equal for all reads of the table that must agree on its current version."""
        return key_of(self.scope, self.url, self.kind, self.success_file, self.settle_s, *self._pin)

    @property
    def _pin(self) -> tuple[object, ...]:
        read = () if (self.csv, self.declared) == (CsvOptions(), None) else (self.csv, self.declared)
        return read if self.pinned is None else (self.pinned,)

    def fails_when_gone(self, options: LookupOptions) -> bool:
        """Whether it is an error if a version can no longer be read (`lookup.on-version-gone`); otherwise the current state of its files is read."""
        policy = options.version.on_gone or (OnVersionGone.FAIL if self.retained else OnVersionGone.NEWER)
        return policy is OnVersionGone.FAIL

    @property
    def how_to_keep_versions(self) -> str:
        """What an error about a version that is gone advises, so that it does not happen again."""
        if self.retained:
            return "in future, let vacuums and clean-ups keep the versions that queries still read"
        return "to change a table under running queries, write files with new names and keep the old files for a while"

    @cached_property
    def root(self) -> str:
        """The directory below which partition directories are."""
        return glob_root(self.url) if self.kind == Kind.GLOB else self.url


Rewrites = tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
"""For each compaction: (the names of its new files, the names of the files that they replace). The new and the old files have the same rows.

Delete files with keys have names, too. One that applied to a replaced file and stays in the table is among both, because the new files equal
the old ones only together with it.
"""


@dataclasses.dataclass(frozen=True)
class VersionMetadata:
    """What the table's own log or metadata says of a version.

    `table_id`: an id that changes if the table is dropped and recreated. `position`: the version's place in the order of the table's versions (None:
    only times order them). `number`: the number by which `lookup.version` names the version (None: versions have no numbers). `state`: a
    text by which the source finds the version again (for a managed table, its valid write ids in Hive's form). `digest`: 15 hex digits;
    versions with the same digest have the same rows in the same files. `keys`: the key columns. `schema`: all columns, as `text_of_schema` writes them.
    `partitions`: the columns that are not in the files. `rewrites`: the table's latest compactions.
    """

    table_id: str
    position: int | None
    state: str
    digest: str
    keys: tuple[str, ...]
    schema: str
    partitions: tuple[str, ...] = ()
    rewrites: Rewrites = dataclasses.field(default=(), compare=False)
    number: int | None = None

    @cached_property
    def all_columns(self) -> pa.Schema:
        """The columns in the table's own order."""
        return schema_of_text(self.schema)

    @cached_property
    def columns(self) -> tuple[pa.Schema, pa.Schema]:
        """(the columns that the files contain, the partition columns)."""
        schema = self.all_columns
        partitions = pa.schema([schema.field(name) for name in self.partitions])
        return pa.schema([field for field in schema if field.name not in self.partitions]), partitions

    def to_json(self) -> list[Any]:
        """The metadata as a JSON value."""
        keys, partitions = list(self.keys), list(self.partitions)
        fields = [self.digest, keys, self.schema, partitions, self.rewrites, self.number]
        return [self.table_id, self.position, self.state, *fields]

    @classmethod
    def from_json(cls, record: Any) -> VersionMetadata:
        """The metadata that `to_json` returned as a list. Raises TypeError or ValueError for any other value."""
        table_id, position, state, digest, keys, schema, partitions, rewrites, number = record
        parsed_rewrites = tuple(
            (as_texts(file_names), as_texts(replaced_names)) for file_names, replaced_names in rewrites
        )
        if not set(as_texts(partitions)) <= set(schema_of_text(as_text(schema)).names):
            raise ValueError("a partition column is not among the columns")
        return cls(
            as_text(table_id),
            None if position is None else as_count(position),
            as_text(state),
            as_name(digest),
            as_texts(keys),
            schema,
            as_texts(partitions),
            parsed_rewrites,
            None if number is None else as_count(number),
        )


_EXACT_AT_MOST = 2.0**62

Files = tuple[FileVersion, ...] | ColumnFiles
"""The files of a version, ascending by URL: objects, or the columns of a large table."""


def file_sizes(files: Sequence[FileVersion]) -> Numbers:
    """The sizes of files in bytes, as int64; as Python integers if int64 may not hold their sum, because a damaged log may claim any size."""
    sizes = (
        files.sizes if isinstance(files, ColumnFiles) else np.fromiter((f.size for f in files), np.int64, len(files))
    )
    return sizes if sizes.sum(dtype=np.float64) < _EXACT_AT_MOST else sizes.astype(object)


def are_cacheable(files: Sequence[FileVersion]) -> bool:
    """Whether data that was read from the files may be cached."""
    return files.cacheable if isinstance(files, ColumnFiles) else all(file.cacheable for file in files)


@dataclasses.dataclass(frozen=True)
class TableVersion:
    """One state of a table: its data files, ascending by URL, each in one state of its own. `digest` (15 hex digits) names the version.

    `metadata`: what the table's own log or metadata says of the version; None for a table of plain files. `known_digest`: the digest, if it
    was computed before.
    """

    table_id: str
    files: Files
    metadata: VersionMetadata | None = None
    known_digest: str | None = dataclasses.field(default=None, compare=False, repr=False)

    @staticmethod
    def digest_of_listing(table_id: str, listed: ListedFiles) -> str:
        """The digest of the version of a directory with these files."""
        return digest_of(table_id, *listed.keys)

    @cached_property
    def digest(self) -> str:
        if self.metadata is not None:
            return self.metadata.digest
        if self.known_digest is not None:
            return self.known_digest
        if isinstance(self.files, ColumnFiles):
            if isinstance(self.files.columns, ListedColumns):
                return self.digest_of_listing(self.table_id, to_listed(self.files))
            sizes = pa.array(self.files.sizes).cast(pa.string())
            return digest_of("rows", self.table_id, *map(key_of_column, (self.files.row_names, sizes)))
        columns = ([f.url for f in self.files], [str(f.size) for f in self.files], [f.identity for f in self.files])
        deletes = ((file.url, *(delete.name for delete in file.deletes)) for file in self.files if file.deletes)
        groups = [group.names for group in self.equality]
        numbers = {id(group): number for number, group in enumerate(self.equality)}
        concerned = (
            (file.url, file.sequence, *(numbers[id(group)] for group in file.equality))
            for file in (self.files if numbers else ())
            if file.equality
        )
        return digest_of(self.table_id, *map(key_of_texts, columns), *deletes, *groups, *concerned)

    @cached_property
    def bytes(self) -> int:
        return int(file_sizes(self.files).sum())

    @cached_property
    def stored_columns(self) -> dict[str, StoredColumn]:
        """How the files store the table's columns (under which name or field id), by column name; empty if the metadata does not say."""
        return {column.name: column for file in self.files[:1] for column in file.columns or ()}

    @cached_property
    def cacheable(self) -> bool:
        """Whether data that was read under this version may be cached."""
        return are_cacheable(self.files)

    @cached_property
    def is_settled(self) -> bool:
        """Whether all files are `settled`: so old that a later change gives them another identity."""
        if isinstance(self.files, ColumnFiles):
            return self.files.is_settled
        return all(file.settled for file in self.files)

    def settled(self) -> TableVersion:
        """The same version with each of its files marked as `settled`."""
        if self.is_settled:
            return self
        files = (
            self.files.settled()
            if isinstance(self.files, ColumnFiles)
            else tuple(dataclasses.replace(file, settled=True) for file in self.files)
        )
        return dataclasses.replace(self, files=files)

    def of_files(self, files: Files) -> TableVersion:
        """The version with only the `files`, a part of its files that `lookup.partition` selects."""
        return self if len(files) == len(self.files) else TableVersion(self.table_id, files)

    @cached_property
    def equality(self) -> tuple[EqualityGroup, ...]:
        """The groups of equality deletes that concern rows of `files`, each once."""
        if isinstance(self.files, ColumnFiles):
            return self.files.equality
        distinct_groups = {id(file.equality): file.equality for file in self.files}.values()
        return tuple({id(group): group for groups in distinct_groups for group in groups}.values())

    @cached_property
    def deletes(self) -> tuple[Deletes | EqualityDeletes, ...]:
        """The deletes, by position and by value, that concern rows of `files`, each once."""
        distinct_deletes: list[Sequence[Deletes | EqualityDeletes]] = [group.files for group in self.equality]
        distinct_deletes += (
            [self.files.deletes]
            if isinstance(self.files, ColumnFiles)
            else {id(file.deletes): file.deletes for file in self.files}.values()
        )
        return tuple({deletes.name: deletes for some in distinct_deletes for deletes in some}.values())

    @cached_property
    def number(self) -> int | None:
        """The version number, as `lookup.version` takes it; None if tables of this kind have none."""
        return None if self.metadata is None else self.metadata.number

    @cached_property
    def commit(self) -> tuple[str, int] | None:
        """(table id, position) of the version; None if the table's versions have no order."""
        metadata = self.metadata
        return None if metadata is None or metadata.position is None else (metadata.table_id, metadata.position)

    @property
    def newest(self) -> float:
        """A number by which another host finds this version: its position, or else the Unix time at which its newest file was modified."""
        if self.commit is not None:
            return float(self.commit[1])
        if isinstance(self.files, ColumnFiles):
            return float(self.files.modified_at_s.max(initial=0.0))
        return max((file.modified_at_s or 0.0 for file in self.files), default=0.0)

    def to_json(self, statistics: bool = True) -> dict[str, Any]:
        """The version as a JSON value. Without `statistics`, files in columns stay in columns, and their equality deletes lose their bounds."""
        if not statistics and isinstance(self.files, ColumnFiles):
            equality_deletes = {deletes.name: deletes for group in self.equality for deletes in group.files}
            listed = listed_to_record(self.files)  # None unless they are files of a directory, which have no deletes
            return {
                "files": files_to_record(self.files) if listed is None else listed,
                "deletes": [deletes.without_bounds().to_json() for deletes in equality_deletes.values()],
                "metadata": self.metadata.to_json() if self.metadata else None,
            }
        rows = []
        distinct_columns = list(
            {id(file.columns): file.columns for file in self.files if file.columns is not None}.values()
        )
        numbers = {id(columns): number for number, columns in enumerate(distinct_columns)}
        groups = {id(group): number for number, group in enumerate(self.equality)}
        for file in self.files:
            extras: dict[str, Any] = {
                "partition": file.partition,
                "deletes": [deletes.name for deletes in file.deletes],
            }
            if file.columns is not None:
                extras["columns"] = numbers[id(file.columns)]
            if file.format is not None:
                extras["format"] = file.format.value
            if file.equality or file.sequence:
                extras["equality"] = [file.sequence, *(groups[id(group)] for group in file.equality)]
            rows.append(
                [*file.to_json(), extras] if file.columns is not None or any(extras.values()) else file.to_json()
            )
        columns = [[column.to_json() for column in stored_columns] for stored_columns in distinct_columns]
        document: dict[str, Any] = {
            "files": rows,
            "deletes": [deletes.to_json() for deletes in self.deletes],
            "metadata": self.metadata.to_json() if self.metadata else None,
        }
        if groups:
            document["equality"] = [group.names for group in self.equality]
        metadata = self.metadata if statistics else None
        statistics_text = None if metadata is None else statistics_to_text(self.files, metadata.all_columns)
        if statistics_text is not None:
            document["statistics"] = statistics_text
        return {**document, "columns": columns} if columns else document

    @classmethod
    def from_json(cls, table_id: str, record: Any) -> TableVersion:
        """The version that `to_json` returned as a dictionary. Raises one of `decoding.UNREADABLE` for any other value."""
        parsed_deletes = map(parse_deletes, record["deletes"])
        deletes_by_name: dict[str, Any] = {deletes.name: deletes for deletes in parsed_deletes}
        metadata = None if record["metadata"] is None else VersionMetadata.from_json(record["metadata"])
        if isinstance(record["files"], dict):
            parse = (
                listed_from_record
                if "listed" in record["files"]
                else functools.partial(files_from_record, parse_deletes=parse_deletes)
            )
            return cls(table_id, parse(record["files"], deletes_by_name), metadata)
        groups = [EqualityGroup.from_names(as_texts(names), deletes_by_name) for names in record.get("equality", ())]
        shared_groups: dict[tuple[int, ...], tuple[EqualityGroup, ...]] = {}
        distinct_columns = [tuple(map(StoredColumn.from_json, columns)) for columns in record.get("columns", ())]
        shared_deletes: dict[tuple[str, ...], tuple[Deletes, ...]] = {}
        files = []
        for row in record["files"]:
            file = FileVersion.from_json(row[:5])
            if len(row) > 5:
                names = as_texts(row[5]["deletes"])
                if names not in shared_deletes:
                    shared_deletes[names] = tuple(deletes_by_name[name] for name in names)
                columns = distinct_columns[as_count(row[5]["columns"])] if "columns" in row[5] else None
                partition = parse_partition(row[5]["partition"])
                form = FileFormatName(row[5]["format"]) if "format" in row[5] else None
                sequence, *numbers = as_counts(row[5].get("equality", (0,)))
                if (key := tuple(numbers)) not in shared_groups:
                    shared_groups[key] = tuple(groups[number] for number in numbers)
                file = dataclasses.replace(
                    file,
                    partition=partition,
                    deletes=shared_deletes[names],
                    columns=columns,
                    format=form,
                    equality=shared_groups[key],
                    sequence=sequence,
                )
            files.append(file)
        if "statistics" in record:
            pairs = zip(files, statistics_from_text(record["statistics"], len(files)), strict=True)
            files = [dataclasses.replace(file, statistics=statistics) for file, statistics in pairs]
        return cls(table_id, tuple(files), metadata)


def name_of_rows(file: FileVersion) -> str:
    """A name for the rows of a file, as `VersionMetadata.rewrites` has them: files whose rows have the same name contain the same rows.

    The name is that of the file for a file of a managed table, where file names are unique; for any other file, a hash of its URL and
    identity. If the file has deletes without keys, they are part of the name.
    """
    if file.identity == DELETE_FILE and file.columns is not None:
        name = key_of(file.url, file.identity, file.sequence)  # if it was added again, it deletes rows of more files
    elif file.columns is not None:
        name = key_of(file.url, file.identity)
    else:
        name = file.url.rpartition("/")[2] if file.immutable else key_of(file.url, file.size, file.identity)
    # Deletes without keys may affect any row of the file.
    deletes = [deletes.name for deletes in file.deletes if deletes.keys is None]
    return key_of(name, *deletes) if deletes else name


def replay_rewrites(rewrites: Rewrites, names: Collection[str]) -> set[str]:
    """What some names of rows become after compactions. A compaction has an effect only if all names that it replaces are among them."""
    names = {*names}
    for new_names, replaced in rewrites:
        if names.issuperset(replaced):
            names = names.difference(replaced).union(new_names)
    return names


def has_same_rows(new: TableVersion, old: TableVersion) -> bool:
    """Whether two versions of a table have the same rows, because only compactions lie between them; False if the metadata does not say."""
    after, before = new.metadata, old.metadata
    if after is None or before is None or (after.table_id, after.schema) != (before.table_id, before.schema):
        return False
    if not after.rewrites:
        return new.digest == old.digest
    # A column may have been renamed to the old name of another column.
    if new.stored_columns != old.stored_columns:
        return False
    differences = differing_files(new, old)
    assert differences is not None
    return not changed_names(new, *differences)


def changed_names(new: TableVersion, added: Collection[str], removed: Collection[str]) -> set[str]:
    """The names of the rows in which `new` differs from an earlier version, without what compactions rewrote. `added` and `removed`: the names
    that `differing_files` returns for the two versions.
    """
    rewrites = () if new.metadata is None else new.metadata.rewrites
    # Delete files that both versions have: a compaction may depend on them.
    kept_deletes = {name_of_rows(keys) for keys in key_files(new)}.difference(added) if rewrites else set()
    return replay_rewrites(rewrites, kept_deletes.union(removed)) ^ kept_deletes.union(added)


def key_files(version: TableVersion) -> list[FileVersion]:
    """The delete files of a version that have the keys of the deleted rows."""
    if isinstance(version.files, ColumnFiles) and version.files.row_names_have_all_deletes:
        # No position deletes have keys. There may be one for each file, so they do not become objects.
        return [
            deletes.keys for deletes in {id(some): some for group in version.equality for some in group.files}.values()
        ]
    return [keys for deletes in version.deletes if (keys := deletes.keys) is not None]


def differing_files(
    new: TableVersion, old: TableVersion, at_most: float = math.inf
) -> tuple[dict[str, FileVersion], dict[str, FileVersion]] | None:
    """(the files that only `new` has, the files that only `old` has), each by the name of its rows. Delete files with keys count as files.

    None if there are more than `at_most` such files.
    """
    parts: tuple[list[FileVersion], list[FileVersion]] = [*key_files(new)], [*key_files(old)]
    if isinstance(new.files, ColumnFiles) and isinstance(old.files, ColumnFiles):
        differences = new.files.difference(old.files), old.files.difference(new.files)
        if sum(map(len, differences)) > at_most:
            return None
        files: tuple[Iterable[FileVersion], Iterable[FileVersion]] = differences
    else:
        files = new.files, old.files
    ours, theirs = (
        {name_of_rows(file): file for file in (*some, *keys)} for some, keys in zip(files, parts, strict=True)
    )
    added = {name: file for name, file in ours.items() if name not in theirs}
    removed = {name: file for name, file in theirs.items() if name not in ours}
    return None if len(added) + len(removed) > at_most else (added, removed)


def require_metadata(table: Table, version: TableVersion) -> VersionMetadata:
    """The version's metadata, for a table that cannot be read without metadata. Raises ValueError if the version has none, or is one of another
    table."""
    if version.metadata is None or version.table_id != table.id:
        redacted_path = redact("path", table.url)
        raise ValueError(
            f"{redacted_path} is no longer a table of the kind {table.kind}, as when the query was planned: plan again (a new load() or SQL statement)"
        )
    return version.metadata


_INTEGER = re.compile(r"[+-]?\d{1,38}")


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_NO_NUMBERS = ("NaN", "Infinity", "-Infinity", "inf", "-inf")  # as Spark spells these values, and as Rust does


def raw_partition_values(table: Table, file: FileVersion) -> PartitionValues:
    """For each partition column, a pair (column, the file's value as text; None: null), from the table's metadata or else from the directories."""
    return partition_values(table.root, file.url) if file.partition is None else file.partition


def partition_fields(table: Table, files: Sequence[FileVersion]) -> pa.Schema:
    """The partition columns of some files, with types that are inferred from all values, as Spark infers them.

    Integers become int32, int64 or a decimal; ISO dates become date32; other numbers become float64. All other values become strings, also
    times, and fractions beside an integer that does not fit into int32. Raises NotATableError naming two files whose directories have different columns.
    """
    columns: dict[str, list[str | None]] = {}
    first: tuple[str, ...] | None = None
    for file in one_of_each_directory(files):
        pairs = raw_partition_values(table, file)
        names = tuple(name for name, _ in pairs)
        if len({name.lower() for name in names}) < len(names):
            raise NotATableError(
                f"{redact('path', file.url)} lies in two directories of one partition column ({', '.join(names)}): move it out of one of them"
            )
        if first is None:
            first = names
        if names != first:
            raise NotATableError(
                f"{redact('path', file.url)} has partition columns {list(names)} but {redact('path', files[0].url)} has {list(first)}: "
                "give the directory or glob of one table"
            )
        for name, value in pairs:
            columns.setdefault(name, []).append(value)
    declared_fields = {field.name.lower(): field for field in table.declared or ()}
    fields = []
    for name, values in columns.items():
        field = declared_fields.get(name.lower())
        if field is not None and field.name != name:
            raise SchemaError(
                f"column {field.name!r} of lookup.schema or .schema(…) is spelled {name!r} in the directories: spell it the same way"
            )
        fields.append(pa.field(name, _partition_type(values) if field is None else field.type))
    return pa.schema(fields)


def _partition_type(values: list[str | None]) -> pa.DataType:
    distinct_values = {value for value in values if value is not None}
    integers = [int(value) for value in distinct_values if _INTEGER.fullmatch(value)]
    bits = max(((n if n >= 0 else ~n).bit_length() + 1 for n in integers), default=0)
    if distinct_values and len(integers) == len(distinct_values):
        digits = max(len(str(abs(n))) for n in integers)
        return pa.int32() if bits <= 32 else pa.int64() if bits <= 64 else pa.decimal128(digits, 0)
    if distinct_values and all(_is_date(value) for value in distinct_values):
        return pa.date32()
    numbers = all(_NUMBER.fullmatch(value) for value in distinct_values)
    return pa.float64() if distinct_values and numbers and bits <= 32 else pa.string()


def _is_date(value: str) -> bool:
    try:
        return re.fullmatch(r"\d{4}-\d\d-\d\d", value) is not None and bool(datetime.date.fromisoformat(value))
    except ValueError:
        return False


def partition_value(value: str | None, kind: pa.DataType) -> object:
    """The Python value that the text of a partition value stands for in a column of type `kind`; None for null.

    Raises ValueError if the type has no such value.
    """
    if value is None:
        return None
    if pa.types.is_decimal(kind) and kind.scale:
        return decimal_of_text(value, kind)
    if pa.types.is_integer(kind) or pa.types.is_decimal(kind):
        # Python also parses spellings, such as 1_000, that type inference does not take for numbers; so it does for the types below.
        number = int(value) if _INTEGER.fullmatch(value) else None
        highest = 10**kind.precision - 1 if pa.types.is_decimal(kind) else (1 << (kind.bit_width - 1)) - 1
        lowest = -highest if pa.types.is_decimal(kind) else -highest - 1
        if number is None or not lowest <= number <= highest:
            raise ValueError(value)
        return decimal.Decimal(number) if pa.types.is_decimal(kind) else number
    if pa.types.is_date(kind):
        if not _is_date(value):
            raise ValueError(value)
        return datetime.date.fromisoformat(value)
    if pa.types.is_floating(kind):
        if not _NUMBER.fullmatch(value) and value not in _NO_NUMBERS:
            raise ValueError(value)
        return pa.scalar(float(value), kind).as_py()  # rounded to float32 if rows are
    if not pa.types.is_string(kind):  # the type that the user has declared
        try:
            return pa.array([value]).cast(kind)[0].as_py()
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise ValueError(value) from None
    return value


def select_partitions(table: Table, version: TableVersion, options: LookupOptions) -> Files:
    """The files of a version that `lookup.partition` selects: those of the latest partition, or those with the values that the option names.

    `max_pt()` selects the largest value of the first partition column, then, in the files with this value, the largest of the second column,
    and so on; null is the smallest value. Raises OptionError if the table has no partitions, or the option names no partition column.
    """
    files = version.files
    if options.files.partition is None:
        return files
    fields = partition_fields(table, files) if version.metadata is None else version.metadata.columns[1]
    if not fields.names:
        raise OptionError(
            f"option lookup.partition = {options.files.partition!r}: {redact('path', table.url)} has no k=v directories: remove the option"
        )
    if isinstance(files, ColumnFiles):
        groups, first_files = files.group_by_partition(fields.names)
        selected_files = {*_select_files(table, tuple(first_files), options, fields)}
        is_selected = np.array([file in selected_files for file in first_files], np.bool_)
        return files.take(np.flatnonzero(is_selected[groups]))
    return _select_files(table, files, options, fields)


def _select_files(
    table: Table, files: tuple[FileVersion, ...], options: LookupOptions, fields: pa.Schema
) -> tuple[FileVersion, ...]:
    assert options.files.partition is not None
    typed_values = {file: typed_partition_values(table, file, fields) for file in files}
    if options.files.partition.replace(" ", "").lower() == "max_pt()":
        selected_files = list(files)
        for name in fields.names:
            ordered_values = [
                _order_key(value) for file in selected_files if (value := typed_values[file][name]) is not None
            ]
            latest = max(ordered_values) if ordered_values else None
            selected_files = [file for file in selected_files if _order_key(typed_values[file][name]) == latest]
        return tuple(selected_files)
    selected_values: dict[str, object] = {}
    name_by_lowercase = {name.lower(): name for name in fields.names}
    for pair in options.files.partition.split(","):
        column, separator, value = (part.strip() for part in pair.partition("="))
        name = name_by_lowercase.get(column.lower(), "")
        if not separator or not name:
            raise OptionError(
                f"option lookup.partition = {options.files.partition!r}: expected max_pt() or column=value,…; the partition columns of "
                f"{redact('path', table.url)} are {', '.join(fields.names)}"
            )
        try:
            raw = None if value == NULL_PARTITION else unescape(value)
            selected_values[name] = partition_value(raw, fields.field(name).type)
        except ValueError:
            raise OptionError(
                f"option lookup.partition = {options.files.partition!r}: {value!r} is not a valid {fields.field(name).type} for column {name}"
            ) from None
    return tuple(
        file
        for file in files
        if all(_order_key(typed_values[file][name]) == _order_key(value) for name, value in selected_values.items())
    )


def typed_partition_values(table: Table, file: FileVersion, fields: pa.Schema) -> dict[str, object]:
    """The values of a file's partition columns, by column. Raises SchemaError if the file has no value for a column, or a value of another type."""
    values = dict(raw_partition_values(table, file))
    typed_values: dict[str, object] = {}
    for field in fields:
        if field.name not in values:
            raise SchemaError(
                f"{redact('path', file.url)} lies in no {field.name}=… directory; when the query was planned, all files of the table did: "
                f"the table changed; {PLAN_AGAIN}"
            )
        try:
            typed_values[field.name] = partition_value(values[field.name], field.type)
        except ValueError:
            if table.declared is not None:
                raise SchemaError(
                    f"{redact('path', file.url)}: the value {values[field.name]!r} of partition column {field.name!r} is not a valid {field.type}, its "
                    "type in lookup.schema or .schema(…): declare a type that the values of all its directories have (STRING always "
                    "does), or move this directory out of the table"
                ) from None
            raise SchemaError(
                f"partition column {field.name!r} was planned as {field.type}, which {values[field.name]!r} of {redact('path', file.url)} is "
                f"not: the table changed; {PLAN_AGAIN}"
            ) from None
    return typed_values


def _order_key(value: Any) -> Any:
    """A sort key by which values have the same order as in Spark, where NaN equals NaN and is above all numbers; None for null."""
    return None if value is None else (value != value, 0 if value != value else value)  # noqa: PLR0124
