"""`OpenFile`: a file whose index (the decoded footer) is in memory; `decode` returns the rows of one of its units.

A unit is the smallest part of a file that is decoded at once, such as a row group. A column whose name or type in the file is not the
table's is found by its `StoredColumn`.

`KnownFiles` keeps, in this process, what was read of files that never change: their indexes, and for small files the values of a column. So a
lookup over many small files reads only the few files that have its keys.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.keys import Keys, Numbers, Seed, sort_distinct
from pyspark_lookup.columnar.predicate import Among, And, ColumnStats, Predicate, referenced_columns
from pyspark_lookup.columnar.types import (
    VARIANT,
    cast_column,
    check_readable,
    flatten_offsets,
    has_variant,
    has_variant_parts,
    is_variant,
    list_of_entries,
    spark_type,
    split_type,
    widens,
)
from pyspark_lookup.columnar.variants import assemble
from pyspark_lookup.core.decoding import describe_fault
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.errors import DamagedFileError, SchemaError, UfsError, raise_ours
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import FileFormatName
from pyspark_lookup.options.groups import CsvOptions
from pyspark_lookup.scan.formats import Data, FileFormat, FileIndex, RangesFile, Unit
from pyspark_lookup.scan.formats.arrow_ipc import ArrowFormat
from pyspark_lookup.scan.formats.parquet import ParquetFormat
from pyspark_lookup.scan.formats.whole_file import WholeFileFormat
from pyspark_lookup.storage.block_cache import BlockCache, BlocksAndLocations
from pyspark_lookup.storage.stores import FileVersion, Range, StoredColumn
from pyspark_lookup.versions.model import partition_value

_FIELD_IDS = (b"PARQUET:field_id", b"iceberg.id")  # the metadata keys of Parquet and of ORC
_INSTANT, _LOCAL = pa.timestamp("us", tz="UTC"), pa.timestamp("us")
_UUID_BYTES, _UUID_TEXT = 16, 36
_HEX_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)
_DESCRIBED_BETTER = {
    (_LOCAL, _INSTANT),  # some writers leave out the zone of instants, which are in UTC
    (pa.date32(), _LOCAL),  # the table's column was a date before it became a time; a date is the start of its day
    (pa.binary(), pa.string()),  # some writers of Parquet do not mark bytes as text
    (pa.int32(), pa.int16()),  # some writers do not mark numbers as short
    (pa.int32(), pa.int8()),
}
"""(type in the file, type in the table's metadata) of columns that are read in the second type, because it says more than the first one."""
_FEW = 16
_wide: dict[int, tuple[Sequence[StoredColumn], dict[str, StoredColumn]]] = {}
"""Stored columns by name, for the last tables with many columns.

The key is the id of a tuple of columns, because computing the tuple's hash would take as long as searching the tuple.
"""
_HYPHENS = (8, 13, 18, 23)


def open_format(
    name: FileFormatName, block_size: int, csv: CsvOptions | None = None, declared: pa.Schema | None = None
) -> FileFormat:
    """The format with the name `name`. `declared`: the columns that the user declares; None: each file's own columns are read.

    `block_size`: for a format whose files have no parts of their own (CSV, JSON, ORC), the size in bytes of the ranges that are read.
    """
    if name is FileFormatName.PARQUET:
        return ParquetFormat()
    if name is FileFormatName.ARROW:
        return ArrowFormat()
    return WholeFileFormat(name, block_size, csv or CsvOptions(), declared)


def find_names(
    file: FileVersion, index: FileIndex, planned: pa.Schema, declared: pa.Schema | None = None
) -> dict[str, str]:
    """For each planned column that a file has, the column's name in the file. `declared`: all columns that the user declares, in order.

    Raises SchemaError if the file's columns have no names, and there are more of them than the user declares.
    """
    if file.columns is None and declared is not None and index.nameless:
        if len(index.schema) > len(declared):
            raise SchemaError(
                f"{redact('path', file.url)} has {len(index.schema)} columns without names, but lookup.schema or .schema(…) has {len(declared)}: "
                f"{', '.join(declared.names)}: declare all of them, in their order"
            )
        stored = dict(zip(declared.names, index.schema.names, strict=False))
        return {name: stored[name] for name in planned.names if name in stored}
    if file.columns is None:
        folded = {name.lower(): name for name in index.schema.names}
        return {name: folded[name.lower()] for name in planned.names if name.lower() in folded}
    columns = {column.name: column for column in file.columns}
    fields = _Fields(index.stored_schema)
    by_place = file.format is not FileFormatName.ORC
    stored_names = {}
    for name in planned.names:
        place = fields.find(columns[name], by_place) if name in columns else None
        if place is not None:
            stored_names[name] = fields.all[place].name
    return stored_names


def type_as_planned(file: FileVersion, index: FileIndex, name: str, stored: str, planned: pa.DataType) -> pa.DataType:
    """The type in which a file's column is read, before it is cast to the planned type.

    This is its type in the file, or the planned type if the table's metadata says more than the file. `stored`: the column's name in the file.
    """
    if file.columns is None and not has_variant(planned):
        return index.schema.field(stored).type
    return _type(index.stored_schema.field(stored).type, planned, _column(file.columns or (), name))


def stats_as_planned(
    file: FileVersion, index: FileIndex, unit: Unit, stored: str, planned: pa.DataType | None
) -> ColumnStats | None:
    """The statistics of a column in a unit of a file, in the planned type (None: in the file's type). `stored`: the column's name in the file.

    None if the statistics are not known, or if their bounds do not bound the values in the planned type.
    """
    stored_type = index.schema.field(stored).type
    stats = index.stats(unit, stored)
    if stats is None or file.columns is None or stored_type == planned:
        return stats
    if not pa.types.is_temporal(stored_type):
        return None if pa.types.is_binary(stored_type) else stats
    if (stored_type, planned) != (_LOCAL, _INSTANT):
        return None
    low, high = (None if end is None else end.replace(tzinfo=datetime.timezone.utc) for end in (stats.low, stats.high))
    return ColumnStats(low, high, stats.null_count, stats.rows)


def column_as_planned(file: FileVersion, column: pa.Array, name: str, planned: pa.DataType) -> pa.Array:
    """A column as it was read from a file, cast to the planned type. Raises SchemaError if a value would change."""
    as_it_is = file.columns is None and not has_variant(planned)
    if as_it_is or (column.type == planned and not pa.types.is_nested(planned)):
        return cast_column(column, planned, name, file.url)
    # Fields of a struct may have been renamed. So they are found by their `StoredColumn`s: in the file, another field may have a planned name.
    return _array(column, planned, _column(file.columns or (), name), name, file.url)


def missing_value(file: FileVersion, name: str, planned: pa.DataType) -> object:
    """The value that a column has in all rows of a file that lacks the column: the file's partition value, the column's default, or None."""
    text = dict(file.partition or ()).get(name)
    if text is not None:
        return _parse_value(text, planned)
    return None if file.columns is None else _default(_column(file.columns, name), planned)


def may_lack(file: FileVersion, name: str) -> bool:
    """Whether a column that a file lacks may have a value that is not null in the file's rows: a default, or a partition value."""
    default = None if file.columns is None else _column(file.columns, name).default
    return default is not None or name in dict(file.partition or ())


def missing_column(file: FileVersion, name: str, planned: pa.DataType, rows: int) -> pa.Array:
    """A column that a file lacks, with its `missing_value` in each of `rows` rows."""
    return _repeat(missing_value(file, name, planned), planned, rows)


def _repeat(value: object, kind: pa.DataType, rows: int) -> pa.Array:
    if value is None:
        return pa.nulls(rows, kind)
    return pa.array([value], kind).take(pa.array(np.zeros(rows, np.int64)))


def _default(column: StoredColumn, kind: pa.DataType) -> object:
    text = column.default
    if text is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: _default(_column(column.parts, field.name), field.type) for field in kind}
    if pa.types.is_nested(kind):
        return []
    return _parse_value(text, kind)


def _parse_value(text: str, kind: pa.DataType) -> object:
    """The value that a text in the table's metadata stands for. The metadata writes binary values in hexadecimal digits."""
    if pa.types.is_floating(kind):
        return float(text)
    return bytes.fromhex(text) if pa.types.is_binary(kind) else partition_value(text, kind)


def _column(columns: Sequence[StoredColumn], name: str) -> StoredColumn:
    """How files store the table's column `name`. If `columns` do not have this column, files have it under the same name."""
    if len(columns) <= _FEW:
        return next((column for column in columns if column.name == name), StoredColumn(name, name, None))
    entry = _wide.get(id(columns))
    if entry is None or entry[0] is not columns:
        entry = columns, {column.name: column for column in reversed(columns)}
        if len(_wide) > _FEW:
            _wide.clear()
        _wide[id(columns)] = entry
    return entry[1].get(name) or StoredColumn(name, name, None)


def _get_field_id(field: pa.Field) -> bytes | None:
    return next((field_id for key in _FIELD_IDS if (field_id := (field.metadata or {}).get(key)) is not None), None)


class _Fields:
    """The fields of a file, or of a struct in it, by field id and by name."""

    def __init__(self, fields: Iterable[pa.Field]) -> None:
        self.all = list(fields)
        self._folded = {field.name.lower(): place for place, field in enumerate(self.all)}

    @cached_property
    def _places(self) -> dict[str, int]:
        """For each name of a field, the position of the first field that has it."""
        return {field.name: place for place, field in reversed(list(enumerate(self.all)))}

    @cached_property
    def _by_id(self) -> dict[bytes | None, int]:
        return {_get_field_id(field): place for place, field in reversed(list(enumerate(self.all)))}

    def find(self, column: StoredColumn, by_place: bool = False) -> int | None:
        """The position of a column among the fields; None if it is missing.

        `by_place`: if neither the fields have ids nor the column has names in files, its field id is taken as its position, from 1.
        """
        if column.field_id is None:
            return self._folded.get(column.stored.lower())
        if any(field_id is not None for field_id in self._by_id):
            return self._by_id.get(b"%d" % column.field_id)
        if column.names is None and by_place:
            return column.field_id - 1 if 0 < column.field_id <= len(self.all) else None
        names = (column.stored,) if column.names is None else column.names
        return min((self._places[name] for name in names if name in self._places), default=None)


def _type(stored: pa.DataType, planned: pa.DataType, column: StoredColumn) -> pa.DataType:
    parts = column.parts
    if is_variant(planned) and has_variant_parts(stored):
        return VARIANT
    if pa.types.is_struct(planned) and pa.types.is_struct(stored):
        fields, kinds, places = list(stored), [], _Fields(stored)
        for field in planned:
            child = _column(parts, field.name)
            place = places.find(child)
            kinds.append(pa.null() if place is None else _type(fields[place].type, field.type, child))
        return pa.struct([pa.field(field.name, kind) for field, kind in zip(planned, kinds, strict=True)])
    if pa.types.is_list(planned) and split_type(stored)[0] == "list":
        return pa.list_(pa.field("element", _type(stored.value_type, planned.value_type, _column(parts, "element"))))
    if pa.types.is_map(planned) and pa.types.is_map(stored):
        key = _type(stored.key_type, planned.key_type, _column(parts, "key"))
        return pa.map_(key, pa.field("value", _type(stored.item_type, planned.item_type, _column(parts, "value"))))
    spark_stored = spark_type(stored, pa.null())
    as_planned = column.uuid or (spark_stored, planned) in _DESCRIBED_BETTER
    return planned if as_planned else spark_stored


def _array(column: pa.Array, planned: pa.DataType, stored: StoredColumn, name: str, origin: str) -> pa.Array:
    if is_variant(planned):
        try:
            return assemble(column)
        except (ValueError, TypeError, NotImplementedError) as problem:  # Arrow's exceptions are among these
            error = SchemaError(
                f"column {name!r} of {redact('path', origin)} has an invalid VARIANT: {describe_fault(problem)}: write the file again, or leave the column out with lookup.columns"
            )
            raise_ours(error, problem)
    if pa.types.is_struct(planned) and pa.types.is_struct(column.type):
        places = _Fields(column.type)
        arrays, children = column.flatten(), []  # flatten() applies the parent's nulls and offset to the children
        for field in planned:
            child = _column(stored.parts, field.name)
            place = places.find(child)
            if place is None:
                children.append(_repeat(_default(child, field.type), field.type, len(column)))
            else:
                children.append(_array(arrays[place], field.type, child, f"{name}.{field.name}", origin))
        return pa.StructArray.from_arrays(
            children, fields=list(planned), mask=column.is_null() if column.null_count else None
        )
    if pa.types.is_list(planned) and split_type(column.type)[0] == "list":
        child = _column(stored.parts, "element")
        values = _array(column.flatten(), planned.value_type, child, f"{name}.element", origin)
        return pa.ListArray.from_arrays(flatten_offsets(column), values, type=planned)
    if pa.types.is_map(planned) and pa.types.is_map(column.type):
        as_list = list_of_entries(column)
        inner = as_list.flatten()
        keys = _array(inner.field(0), planned.key_type, _column(stored.parts, "key"), f"{name}.key", origin)
        items = _array(inner.field(1), planned.item_type, _column(stored.parts, "value"), f"{name}.value", origin)
        return pa.MapArray.from_arrays(flatten_offsets(as_list), keys, items, type=planned)
    return _text_of_uuids(column) if stored.uuid else cast_column(column, planned, name, origin)


def _text_of_uuids(column: pa.Array) -> pa.Array:
    """UUIDs of 16 bytes as texts of 8-4-4-4-12 hexadecimal digits."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    fixed = column.cast(pa.binary()).fill_null(bytes(_UUID_BYTES)).cast(pa.binary(_UUID_BYTES))
    raw_bytes = np.frombuffer(fixed.buffers()[1], np.uint8).reshape(-1, _UUID_BYTES)
    data = raw_bytes[fixed.offset : fixed.offset + len(fixed)]
    digits = _HEX_DIGITS[np.stack([data >> 4, data & 15], axis=2).reshape(-1, 2 * _UUID_BYTES)]
    text = np.full((len(data), _UUID_TEXT), ord("-"), np.uint8)
    text[:, [place for place in range(_UUID_TEXT) if place not in _HYPHENS]] = digits
    offsets = np.arange(len(data) + 1, dtype=np.int32) * _UUID_TEXT
    texts = pa.StringArray.from_buffers(len(data), pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(text)))
    return pc.if_else(column.is_null(), pa.scalar(None, pa.string()), texts)


_INDEXES = 64 * 1024 * 1024  # bytes of memory that all indexes may take, approximately
_SMALL = 1024 * 1024  # the largest size in bytes of a file whose values are kept
_VALUES = 4 * 1024 * 1024  # how many values are kept in total, 8 bytes each
# A predicate with more values is not compared with the kept ones: nearly every file would have some of them.
_VALUES_AT_MOST = 1000
_SEED = Seed(0x2545F4914F6CDD1D, 0x9E6C63D0876A9A47)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Slice:
    """A part of a file: the units whose middle byte is in the range [start, end) of the file's bytes."""

    file: FileVersion
    start: int
    end: int

    @property
    def whole(self) -> bool:
        return self.start == 0 and self.end == self.file.size


@dataclasses.dataclass(frozen=True)
class Projection:
    """What a scan returns: `columns` (names and types as planned, in order) of rows for which `predicate` holds.

    `data`: the planned schema of all columns in the files. `partitions`: the planned schema of the partition columns. `declared`: the user
    has declared the types, so files are read in them; False: planning has inferred the types from the files.
    """

    columns: pa.Schema
    data: pa.Schema
    partitions: pa.Schema
    predicate: Predicate | None = None
    declared: bool = False

    @cached_property
    def needed_columns(self) -> list[str]:
        """The columns that are returned, then those that only the predicate needs."""
        tested = () if self.predicate is None else sorted(referenced_columns(self.predicate))
        return list(dict.fromkeys([*self.columns.names, *tested]))


_Reopen = Callable[[FileVersion, BlocksAndLocations], tuple[FileIndex, dict[Range, Data]]]
"""A function that reads a file's index from the store. It returns the index, and the ranges of bytes from which it has read the index."""


@dataclasses.dataclass
class OpenFile:
    """A file whose index (footer) is open."""

    piece: Slice
    blocks: BlockCache
    index: FileIndex
    head: dict[Range, Data]  # bytes from which the index was read, if they are in memory
    data: dict[Range, Data]  # bytes from which rows are decoded, except those in `head`
    names: dict[str, str]  # for each planned column that the file has: the column's name in the file
    partition: Mapping[str, object]
    reopen: _Reopen
    units: list[Unit] = dataclasses.field(default_factory=list)
    deleted: Numbers | None = None  # positions of deleted rows in the file
    read_from: tuple[Range, ...] = ()  # the ranges from which the index was read, whether they are in memory or not
    starts: dict[int, int] = dataclasses.field(default_factory=dict)
    equality_fields: Mapping[str, pa.Field] = dataclasses.field(default_factory=dict)
    """The columns that equality deletes of this file compare, each under a name that no other column has."""
    equality_names: list[list[str]] = dataclasses.field(default_factory=list)
    """Names in `equality_fields`: a list for each set of columns that the file's equality deletes compare."""
    deleted_values: list[Any] = dataclasses.field(default_factory=list)
    """The `DeletedValues` of each of these sets of columns, in the same order as `equality_names`."""

    def first_row(self, unit: Unit) -> int:
        """The position in the file of a unit's first row. Only for formats whose index says how many rows each unit has."""
        if not self.starts:
            first = 0
            for index_unit in self.index.units:
                self.starts[index_unit.number] = first
                first += self.index.rows(index_unit) or 0
        return self.starts[unit.number]

    def stats(self, unit: Unit, projection: Projection, name: str) -> ColumnStats | None:
        """The statistics of a column, in the projection's type, in a unit of the file (such as a row group); None if they are not known."""
        if name in self.partition:
            return ColumnStats.from_constant(self.partition[name])
        planned = projection.data.field(name).type
        if name not in self.names:
            return ColumnStats.from_constant(missing_value(self.piece.file, name, planned))
        if not widens(type_as_planned(self.piece.file, self.index, name, self.names[name], planned), planned):
            return None  # bounds in the file's type may be no bounds in the planned type
        return stats_as_planned(self.piece.file, self.index, unit, self.names[name], planned)

    def spell(self, columns: Iterable[str]) -> list[str]:
        """The names in this file of `columns`, each once, without columns that the file lacks."""
        return list(dict.fromkeys(self.names[name] for name in sorted(columns) if name in self.names))

    def add_equality_columns(self) -> None:
        """Let `decode` also read the columns that equality deletes of this file compare, under names that no other column has.

        They are separate columns, because the table may no longer have these columns, or may have them in another type. Raises
        SchemaError if the file has one of them in a type that cannot be read.
        """
        file = self.piece.file
        values, columns, partition, fields = dict(file.partition or ()), list(file.columns or ()), [], {}
        self.equality_names = []
        for compared in (compared for group in file.equality for compared, _ in group.by_columns):
            stored = compared.file.columns or ()
            spelled = find_names(dataclasses.replace(file, columns=stored), self.index, compared.schema)
            names = [f"\0{len(self.equality_names)} {name}" for name in compared.schema.names]
            self.equality_names.append(names)
            for name, field in zip(names, compared.schema, strict=True):
                fields[name] = field.with_name(name)
                columns.append(dataclasses.replace(_column(stored, field.name), name=name))
                if field.name in values:
                    partition.append((name, values[field.name]))
                if field.name in spelled:
                    self.names[name] = spelled[field.name]
        view = dataclasses.replace(file, columns=tuple(columns), partition=(*(file.partition or ()), *partition))
        self.piece, self.equality_fields = dataclasses.replace(self.piece, file=view), fields
        for name, field in fields.items():
            if name in self.names:
                stored_type = type_as_planned(view, self.index, name, self.names[name], field.type)
                misfit = self.index.misfits.get(self.names[name])
                check_readable(field.with_name(name.partition(" ")[2]), stored_type, file.url, False, misfit)

    @cached_property
    def location(self) -> BlocksAndLocations:
        """Which blocks of the file are cached, and where; looked up when bytes are needed for the first time."""
        return self.blocks.get_blocks_and_locations(self.piece.file.url, self.piece.file)

    def bring_again(self) -> None:
        """Read the index again, from the store instead of the cache. From then on, all bytes of the file are read there, when they are needed.

        Raises DamagedFileError or UfsError.
        """
        self.index, self.head = self.reopen(self.piece.file, self.location)
        self.data, self.read_from = {}, ()
        self.blocks = self.blocks.read_only()

    def source(self, unit: Unit, columns: Sequence[str]) -> RangesFile:
        """A file object from which one unit is decoded. Of all bytes in memory it has only those of the index and of this unit."""
        # The race: another thread may replace `head` and `data` in `bring_again`. This unit keeps the two that it begins with.
        head, data = self.head, self.data
        ranges = {part: data[part] for part in self.index.ranges(unit, columns) if part in data}

        def fetch(part: Range) -> Data:
            return self.blocks.read([(self.location, [part])])[0][0]

        return RangesFile(self.piece.file.size, {**head, **ranges}, fetch)


class Latest(Generic[T]):
    """An LRU cache in memory of values up to a total weight; one value stays even if it weighs more. It also drops values that were not used in the last `rounds` rounds.

    A round begins with each call of `begin_round`.
    """

    def __init__(self, at_most: int, rounds: float = math.inf) -> None:
        self._at_most = at_most
        self._rounds = rounds
        self._round = 0
        self._weight = 0
        # (value, weight, round of the last use), the least recently used first.
        self._entries: collections.OrderedDict[tuple[object, ...], tuple[T, int, int]] = collections.OrderedDict()
        self._lock = threading.Lock()

    def begin_round(self) -> None:
        """Begin a round. Values that were not used in the last `rounds` rounds are dropped, such as those of files that the table has lost."""
        with self._lock:
            self._round += 1
            while self._entries and self._round - next(iter(self._entries.values()))[2] > self._rounds:
                self._weight -= self._entries.popitem(last=False)[1][1]

    def get(self, key: tuple[object, ...]) -> T | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            if entry[2] != self._round:
                self._entries[key] = entry[0], entry[1], self._round
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: tuple[object, ...], value: T, weight: int) -> None:
        with self._lock:
            self._weight += weight - self._entries.pop(key, (value, 0, 0))[1]
            self._entries[key] = value, weight, self._round
            while self._weight > self._at_most and len(self._entries) > 1:
                self._weight -= self._entries.popitem(last=False)[1][1]

    def remove(self, key: tuple[object, ...]) -> None:
        with self._lock:
            self._weight -= self._entries.pop(key, (None, 0, 0))[1]


class KnownFiles:
    """The indexes, and values of columns, of immutable files that this process used in its last `reads_kept` reads."""

    def __init__(self, reads_kept: int) -> None:
        self._indexes = Latest[tuple[FileIndex, tuple[Range, ...]]](_INDEXES, reads_kept)
        self._values = Latest[Numbers](_VALUES, reads_kept)

    def begin_read(self) -> None:
        """Begin a read. Files that none of the last reads used are forgotten."""
        self._indexes.begin_round()
        self._values.begin_round()

    def index(self, file: FileVersion) -> tuple[FileIndex, tuple[Range, ...]] | None:
        """(the file's index, the ranges of bytes from which it was read) if the file was opened before; otherwise None."""
        return self._indexes.get(_place(file)) if file.immutable else None

    def keep(self, file: FileVersion, index: FileIndex, read_from: Iterable[Range]) -> None:
        if file.immutable:
            self._indexes.put(_place(file), (index, tuple(read_from)), index.memory_bytes)

    def forget(self, file: FileVersion) -> None:
        """Forget the index of a file, which may have been read from damaged bytes."""
        self._indexes.remove(_place(file))

    def may_have(self, file: OpenFile, unit: Unit, projection: Projection) -> bool:
        """Whether a unit of a file may have one of the values that the predicate lists; True if `learn` was not called for the unit."""
        for among in _cached_conditions(file, projection.predicate):
            hashes = _hash_values(among)
            values = self._values.get(_key(file, unit, among, projection)) if hashes is not None else None
            if values is None or hashes is None:
                continue
            places = np.searchsorted(values, hashes)
            if not len(values) or not (values[np.minimum(places, len(values) - 1)] == hashes).any():
                return False
        return True

    def learn(self, file: OpenFile, projection: Projection) -> None:
        """Keep, for `may_have`, the values that a small file has in the columns of which the predicate lists values. Its bytes are in memory."""
        for among in _cached_conditions(file, projection.predicate):
            if _hash_values(among) is None:
                continue
            for unit in file.units:
                key = _key(file, unit, among, projection)
                if self._values.get(key) is None:
                    batches = decode(file, unit, [among.column], projection)
                    parts = [Keys([batch.column(0)]).hashes(_SEED) for batch in batches]
                    values = sort_distinct(np.concatenate(parts)) if parts else np.zeros(0, np.uint64)
                    self._values.put(key, values, max(len(values), 1))


def in_rounds(files: Sequence[FileVersion], at_once: int) -> Iterator[list[FileVersion]]:
    """The files in groups of about `at_once` bytes. The files of a group are read at the same time."""
    some: list[FileVersion] = []
    size = 0
    for file in files:
        if some and size + file.size > at_once:
            yield some
            some, size = [], 0
        some.append(file)
        size += file.size
    if some:
        yield some


def _place(file: FileVersion) -> tuple[object, ...]:
    return file.url, file.size, file.identity


def _is_small(file: OpenFile) -> bool:
    return file.piece.file.size <= _SMALL and file.piece.file.immutable and not file.index.in_memory


def _key(file: OpenFile, unit: Unit, among: Among, projection: Projection) -> tuple[object, ...]:
    return *_place(file.piece.file), unit.number, file.names[among.column], projection.data.field(among.column).type


def _cached_conditions(file: OpenFile, predicate: Predicate | None) -> list[Among]:
    """The conditions `Among` of a predicate on columns that the file has; none if the file is not small and immutable."""
    return [among for among in value_conditions(predicate) if among.column in file.names] if _is_small(file) else []


def value_conditions(predicate: Predicate | None) -> list[Among]:
    """The conditions `Among`, which list the values of a column, that must hold for the predicate to be true."""
    if isinstance(predicate, Among):
        return [predicate]
    parts = predicate.parts if isinstance(predicate, And) else ()
    return [among for part in parts for among in value_conditions(part)]


@functools.lru_cache(maxsize=8)
def _hash_values(among: Among) -> Numbers | None:
    """The hashes of the values; None for too many values, and for floats, because equal floats may have different bit patterns."""
    if len(among.values) > _VALUES_AT_MOST or pa.types.is_floating(among.values.type):
        return None
    return Keys([among.values]).hashes(_SEED)


def decode(file: OpenFile, unit: Unit, columns: Sequence[str], projection: Projection) -> Iterator[pa.RecordBatch]:
    """The rows of a unit, with `columns` in their planned types. Partition columns, and columns that the file lacks, are filled in."""
    stored = [file.names[name] for name in columns if name in file.names and name not in file.partition]
    # A column that an equality delete compares may also be one of the table's columns.
    stored = list(dict.fromkeys(stored))
    for batch in _batches(file, unit, stored):
        rows = batch.num_rows
        arrays, fields = [], []
        for name in columns:
            field = file.equality_fields.get(name)
            if field is None:
                field = (projection.partitions if name in file.partition else projection.data).field(name)
            fields.append(field)
            if name in file.partition:
                arrays.append(pa.repeat(pa.scalar(file.partition[name], field.type), rows))
            elif name in file.names:
                arrays.append(column_as_planned(file.piece.file, batch.column(file.names[name]), name, field.type))
            else:
                arrays.append(missing_column(file.piece.file, name, field.type, rows))
        yield pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _batches(file: OpenFile, unit: Unit, stored: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The batches of one unit of a file (such as a row group), with the file's columns `stored`.

    If bytes cannot be decoded, they are read once more, from the store, because the cached bytes may be damaged.
    """
    yielded_rows = 0
    try:
        for batch in file.index.batches(unit, stored, file.source(unit, stored)):
            yielded_rows += batch.num_rows
            yield batch
        return
    except DamagedFileError as problem:
        try:
            file.bring_again()
        except UfsError:
            raise problem from None
    for batch in file.index.batches(unit, stored, file.source(unit, stored)):
        if yielded_rows < batch.num_rows:
            yield batch.slice(yielded_rows)
        yielded_rows = max(yielded_rows - batch.num_rows, 0)


def to_read(part: Range, file: OpenFile) -> Range:
    """The range of bytes to read in order to get the range `part`, which is not in memory.

    If the index was read from a larger range that includes `part`, returns that range, because it is more likely to be cached.
    """
    offset, length = part
    around = (r for r in file.read_from if r[0] <= offset and offset + length <= r[0] + r[1])
    return next(around, part)


def is_missing(part: Range, file: OpenFile) -> bool:
    """Whether a range of bytes must be read before rows in it can be decoded, because it is not in memory."""
    offset, length = part
    in_memory = part in file.data or any(
        start <= offset and offset + length <= start + size for start, size in file.head
    )
    return length > 0 and not in_memory
