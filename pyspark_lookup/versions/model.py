"""`Table` and `TableVersion`: a reference to a table, and one state of that table."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from pyspark_lookup.columnar.predicate import ColumnStats
from pyspark_lookup.columnar.types import schema_of_text
from pyspark_lookup.core.decoding import as_count, as_name, as_text, as_texts
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import FileFormatName, OnVersionGone
from pyspark_lookup.options.file_options import CsvOptions
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.options.read_options import Pin
from pyspark_lookup.storage.disk import key_of
from pyspark_lookup.storage.glob import glob_root
from pyspark_lookup.storage.stores import Deletes, FileStatistics, FileVersion, PartitionValues, StoredColumn
from pyspark_lookup.versions.deletes import DELETES

_PARTS = ("nulls", "rows", "buckets", "bucket")  # parts of a column other than its bounds; all numbers


def statistics_to_text(files: Sequence[FileVersion], schema: pa.Schema) -> str | None:
    """The statistics of files, in their order, as the text of an Arrow table with a row for each file, which is parsed only when needed.

    None if no file has any. `schema`: the table's columns.
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
    """The statistics of `count` files, as `statistics_to_text` wrote them. Raises TypeError or ValueError if it is malformed."""
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
    """The bounds of a file's columns, read from the file's row of the table when they are needed."""

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
    """The kinds of tables that are nothing but files. Each other `VersionSource` has its own. Planning finds the kind, so that an execution
    needs only one call."""

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
    """A table: where it is, in which store, what kind it is, and how its files are read.

    `url`: the canonical path. `format`: None only until the files are known. `pinned`: the version to read, in the form that its source
    takes; None: the current one. `own_write_id`: an open write whose rows its own transaction reads, too. `csv`: how CSV files are written.
    `declared`: the columns that the user declares; None: those of the files. `retained`: its source keeps earlier versions, so it is an
    error if one is gone.
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
        """32 hex digits that are equal for references that must agree on the current version."""
        return key_of(self.scope, self.url, self.kind, self.success_file, self.settle_s, *self._pin)

    @property
    def _pin(self) -> tuple[object, ...]:
        read = () if (self.csv, self.declared) == (CsvOptions(), None) else (self.csv, self.declared)
        return read if self.pinned is None else (self.pinned,)

    def fails_when_gone(self, options: LookupOptions) -> bool:
        """Whether a version that can no longer be read is an error; otherwise the current one replaces it."""
        policy = options.version.on_gone or (OnVersionGone.FAIL if self.retained else OnVersionGone.NEWER)
        return policy is OnVersionGone.FAIL

    @property
    def root(self) -> str:
        """The directory below which partition directories are."""
        return glob_root(self.url) if self.kind == Kind.GLOB else self.url


Rewrites = tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
"""For each compaction the names of its files, and of the files that they replace. The rows of both are the same."""


@dataclasses.dataclass(frozen=True)
class VersionMetadata:
    """A version, as the table's own log or metadata describes it.

    `table_id`: changes if the table is created anew. `position`: of the version in the order of the table's versions (None: they have no
    order but time). `number`: by which `lookup.version` names it (None: it has none). `state`: what the source needs to find it again (for
    a managed table its valid write ids in Hive's text form). `digest`: 32 hex digits, equal for versions with the same rows in the same
    files. `keys`: the key columns. `schema`: all columns; `partitions`: those of them that are not in the files. `rewrites`: its latest
    compactions.
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
        """(columns in the files, partition columns)."""
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
        """Decode what `to_json` wrote. Raises TypeError or ValueError if it is malformed."""
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


@dataclasses.dataclass(frozen=True)
class TableVersion:
    """One state of a table: the versions of its data files, by URL. `digest` (32 hex digits) names it.

    `metadata`: from the table's own log or metadata; None: it has none, only files.
    """

    table_id: str
    files: tuple[FileVersion, ...]
    metadata: VersionMetadata | None = None

    @cached_property
    def digest(self) -> str:
        if self.metadata is not None:
            return self.metadata.digest
        parts = (part for file in self.files for part in (file.url, file.size, file.identity))
        deletes = ((file.url, *(delete.name for delete in file.deletes)) for file in self.files if file.deletes)
        return key_of(self.table_id, *parts, *deletes)

    @cached_property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @cached_property
    def stored_columns(self) -> dict[str, StoredColumn]:
        """How its files store its columns, by column name; empty if its metadata does not say."""
        return {column.name: column for file in self.files[:1] for column in file.columns or ()}

    @cached_property
    def cacheable(self) -> bool:
        """Whether data that was read under this version may be cached."""
        return all(file.cacheable for file in self.files)

    def settled(self) -> TableVersion:
        """The same version, with files marked as so old that a later change gives them another identity."""
        if all(file.settled for file in self.files):
            return self
        files = tuple(dataclasses.replace(file, settled=True) for file in self.files)
        return dataclasses.replace(self, files=files)

    def of_files(self, files: tuple[FileVersion, ...]) -> TableVersion:
        """The version with only some of its files, as `lookup.partition` selects them."""
        return self if files == self.files else dataclasses.replace(self, files=files, metadata=None)

    @cached_property
    def deletes(self) -> tuple[Deletes, ...]:
        """The deletes that apply to rows of `files`, each once."""
        distinct_deletes = {id(file.deletes): file.deletes for file in self.files}.values()
        return tuple({deletes.name: deletes for file_deletes in distinct_deletes for deletes in file_deletes}.values())

    @property
    def number(self) -> int | None:
        """The version number, as `lookup.version` takes it; None if tables of this kind have none."""
        return None if self.metadata is None else self.metadata.number

    @property
    def commit(self) -> tuple[str, int] | None:
        """(table id, position) of the version; None if the table's versions have no order."""
        metadata = self.metadata
        return None if metadata is None or metadata.position is None else (metadata.table_id, metadata.position)

    @property
    def newest(self) -> float:
        """A hint by which another host finds this version: its position, or the time at which its newest file was modified (Unix time)."""
        if self.commit is not None:
            return float(self.commit[1])
        return max((file.modified_at_s or 0.0 for file in self.files), default=0.0)

    def to_json(self, statistics: bool = True) -> dict[str, Any]:
        """The version as a JSON value, with or without the statistics of its files."""
        rows = []
        distinct_columns = list(
            {id(file.columns): file.columns for file in self.files if file.columns is not None}.values()
        )
        numbers = {id(columns): number for number, columns in enumerate(distinct_columns)}
        for file in self.files:
            extras: dict[str, Any] = {
                "partition": file.partition,
                "deletes": [deletes.name for deletes in file.deletes],
            }
            if file.columns is not None:
                extras["columns"] = numbers[id(file.columns)]
            if file.format is not None:
                extras["format"] = file.format.value
            rows.append(
                [*file.to_json(), extras] if file.columns is not None or any(extras.values()) else file.to_json()
            )
        columns = [[column.to_json() for column in stored_columns] for stored_columns in distinct_columns]
        document: dict[str, Any] = {
            "files": rows,
            "deletes": [deletes.to_json() for deletes in self.deletes],
            "metadata": self.metadata.to_json() if self.metadata else None,
        }
        metadata = self.metadata if statistics else None
        statistics_text = None if metadata is None else statistics_to_text(self.files, metadata.all_columns)
        if statistics_text is not None:
            document["statistics"] = statistics_text
        return {**document, "columns": columns} if columns else document

    @classmethod
    def from_json(cls, table_id: str, record: Any) -> TableVersion:
        """Decode what `to_json` wrote. Raises one of `decoding.UNREADABLE` if it is malformed."""
        parsed_deletes = (DELETES[kind](fields) for kind, *fields in record["deletes"])
        deletes_by_name = {deletes.name: deletes for deletes in parsed_deletes}
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
                partition = _parse_partition(row[5]["partition"])
                form = FileFormatName(row[5]["format"]) if "format" in row[5] else None
                file = dataclasses.replace(
                    file, partition=partition, deletes=shared_deletes[names], columns=columns, format=form
                )
            files.append(file)
        metadata = None if record["metadata"] is None else VersionMetadata.from_json(record["metadata"])
        if "statistics" in record:
            pairs = zip(files, statistics_from_text(record["statistics"], len(files)), strict=True)
            files = [dataclasses.replace(file, statistics=statistics) for file, statistics in pairs]
        return cls(table_id, tuple(files), metadata)


def name_of_rows(file: FileVersion) -> str:
    """A name for a file's rows, as in `VersionMetadata.rewrites`: files with the same name have the same rows.

    For a managed table that is the file's name, which is unique; else a hash of its URL and identity.
    """
    if file.columns is not None:
        name = key_of(file.url, file.identity)
    else:
        name = file.url.rpartition("/")[2] if file.immutable else key_of(file.url, file.size, file.identity)
    # Deletes without keys may affect any row of the file.
    deletes = [deletes.name for deletes in file.deletes if deletes.keys is None]
    return key_of(name, *deletes) if deletes else name


def has_same_rows(new: TableVersion, old: TableVersion) -> bool:
    """Whether only compactions lie between two versions of a table, as far as the newer one's metadata tells."""
    after, before = new.metadata, old.metadata
    if after is None or before is None or (after.table_id, after.schema) != (before.table_id, before.schema):
        return False
    # One may have taken the name of another.
    if {file.columns for file in new.files} != {file.columns for file in old.files}:
        return False
    names = names_of_rows(old)
    for file_names, replaced in after.rewrites:
        if names.issuperset(replaced):
            names = (names - set(replaced)) | set(file_names)
    return names == names_of_rows(new)


def names_of_rows(version: TableVersion) -> set[str]:
    """Names for the rows of a version's files, and for the rows that its equality deletes name."""
    key_files = [keys for deletes in version.deletes if (keys := deletes.keys) is not None]
    return {name_of_rows(file) for file in (*version.files, *key_files)}


def require_metadata(table: Table, version: TableVersion) -> VersionMetadata:
    """The version's metadata, for a table that cannot be read without it. Raises ValueError if it is missing (HIVE-21637)."""
    if version.metadata is None or version.table_id != table.id:
        redacted_path = redact("path", table.url)
        raise ValueError(
            f"a version of {redacted_path}, a {table.kind.lower()} table, came without its list of write ids"
        )
    return version.metadata


def _parse_partition(pairs: Any) -> PartitionValues | None:
    if pairs is None:
        return None
    return tuple((as_text(name), None if value is None else as_text(value)) for name, value in pairs)
