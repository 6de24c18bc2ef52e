"""ORC: one task decodes a file as a whole, with the calendar, types and time zones that the file names."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.orc

from pyspark_lookup.columnar.calendars import Convert, convert_columns, gregorian_dates
from pyspark_lookup.columnar.types import lenient_schema, split_type, unreadable
from pyspark_lookup.core import memory
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.scan.formats.model import BATCH_ROWS, FileIndex, RangesFile, Unit, reading, typed_fields
from pyspark_lookup.scan.formats.orc_tail import OrcTail, read_tail
from pyspark_lookup.scan.formats.orc_times import UTC_NAMES, StoredTimes
from pyspark_lookup.storage.stores import FileVersion, Range

_SPARK_TYPE = b"spark.sql.catalyst.type"
_SPARK_VERSION = b"org.apache.spark.version"
_OUT_OF_RANGE = "out of range for nanosecond resolution"  # pyarrow's only such message for times in ORC
_INSTANT, _LOCAL = pa.timestamp("us", tz="UTC"), pa.timestamp("us")


class OrcIndex(FileIndex):
    """The index of an ORC file. `declared`: the columns that the table declares, because Hive's files do not say which times are instants."""

    def __init__(
        self, file: FileVersion, content: bytes, ranges: list[Range], declared: pa.Schema | None = None
    ) -> None:
        self._file, self._ranges, self._content = file, ranges, content
        self._raw = pa.orc.ORCFile(pa.BufferReader(content)).schema
        names = self._raw.names
        # The names that old versions of Hive use, whatever the names in the table.
        self.nameless = bool(names) and all(name.startswith("_col") for name in names)
        spark_types = {field.name: _read_spark_type(field) for field in self._raw}
        typed = typed_fields(list(self._raw), {name: kind for name, kind in spark_types.items() if kind}, file.url)
        by_spark = _SPARK_VERSION in (self._raw.metadata or {})
        declared_fields = list(declared or ()) if self.nameless else _by_name(names, declared)
        declared_fields += [None] * (len(names) - len(declared_fields))
        self._stored = pa.schema(
            [
                field.with_type(
                    _mark_instants(
                        field.type, spark_types[field.name], by_spark, declared_field.type if declared_field else None
                    )
                )
                for field, declared_field in zip(typed, declared_fields, strict=False)
            ]
        )
        self.schema = lenient_schema(self._stored, file.url)
        self.units = [Unit(0, 0)]
        self._times = {field.name for field in self._raw if _has_times(field.type)}
        self._converts: dict[str, list[Convert | None]] = {}
        for raw, stored in zip(self._raw, self._stored, strict=True):
            leaves = list(self._leaves(raw.type, stored.type)) if unreadable(stored.type) is None else []
            if any(leaves):
                self._converts[raw.name] = leaves

    @property
    def stored_schema(self) -> pa.Schema:
        return self._stored

    @cached_property
    def _tail(self) -> OrcTail:
        return read_tail(self._content)

    def _leaves(self, raw: pa.DataType, stored: pa.DataType) -> Iterator[Convert | None]:
        """For each flat part of a column as pyarrow reads it, the conversion to the type and calendar that the file names."""
        shape, parts = split_type(raw)
        if shape is not None:
            for raw_part, stored_part in zip(parts, split_type(stored)[1], strict=True):
                yield from self._leaves(raw_part, stored_part)
        elif pa.types.is_date32(raw):
            yield gregorian_dates if self._tail.hybrid else None
        elif pa.types.is_timestamp(raw):
            # A time that pyarrow can hold is the same in both calendars, if it was written in UTC.
            instant = stored.tz is not None and raw.tz is None
            yield functools.partial(_cast, kind=pa.timestamp("ns", tz="UTC")) if instant else None
        else:
            yield None if raw == stored else functools.partial(_cast, kind=stored)

    def ranges(self, unit: Unit, columns: Sequence[str]) -> list[Range]:
        return self._ranges

    def batches(self, unit: Unit, columns: Sequence[str], source: RangesFile) -> Iterator[pa.RecordBatch]:
        with reading(self._file, "orc"):
            # Without any column the reader returns no rows.
            read = list(columns) or self.schema.names[:1]
            file = pa.orc.ORCFile(pa.BufferReader(self._content))
            as_it_is = self._times.isdisjoint(read) or all(
                stripe.time_zone in UTC_NAMES for stripe in self._tail.stripes
            )
            for number in range(file.nstripes):
                self._check_room(number, read)
                try:
                    batch = file.read_stripe(number, columns=self._select_columns(read)) if as_it_is else None
                except pa.ArrowInvalid as problem:
                    if _OUT_OF_RANGE not in str(problem):
                        raise
                    batch = None
                if batch is None:
                    batch = self._read_exact_times(number, read, columns)
                else:
                    batch = convert_columns(batch.select(list(columns)), self._converts)
                for start in range(0, batch.num_rows, BATCH_ROWS):
                    yield batch.slice(start, BATCH_ROWS)

    def _check_room(self, number: int, columns: Sequence[str]) -> None:
        """Raise MemoryError if a stripe does not fit in free memory: it is read as a whole, and few bytes may stand for many rows."""
        rows = self._tail.rows[number]
        size = rows * sum(_least_bytes(self._raw.field(name).type) for name in columns)
        if not memory.has_room(size):
            raise MemoryError(
                f"{rows} rows in one stripe take at least {size} bytes, but only {memory.free_bytes()} are free"
            )

    def _select_columns(self, columns: Sequence[str]) -> list[str] | None:
        """The columns to request from the reader; None (all) if it would take a name with a dot for a field of a struct."""
        structs = {field.name for field in self._raw if pa.types.is_nested(field.type)}
        mistaken = any(name[:at] in structs for name in columns for at, mark in enumerate(name) if mark == ".")
        return None if mistaken else list(columns)

    def _read_exact_times(self, number: int, read: Sequence[str], columns: Sequence[str]) -> pa.RecordBatch:
        """The rows of a stripe, with times of any year, and of writers in any time zone."""
        converts = dict(self._converts)
        for name in self._times.intersection(read):
            times = StoredTimes(self._tail, self._tail.stripes[number], f"column {name!r} of {self._file.url}")
            raw, stored = self._raw.field(name).type, self._stored.field(name).type
            converters = iter(self._converts.get(name) or [None] * _leaf_count(raw))
            numbers = iter(self._tail.leaf_columns(name, self._raw))
            converts[name] = list(_exact_leaves(raw, stored, times, numbers, converters))
        batch = self._with_seconds.read_stripe(number, columns=self._select_columns(read))
        return convert_columns(batch.select(list(columns)), converts)

    @cached_property
    def _with_seconds(self) -> pa.orc.ORCFile:
        return pa.orc.ORCFile(pa.PythonFile(self._tail.with_seconds(), mode="r"))


def _exact_leaves(
    raw: pa.DataType,
    stored: pa.DataType,
    times: StoredTimes,
    numbers: Iterator[int],
    converts: Iterator[Convert | None],
) -> Iterator[Convert | None]:
    """For each flat part of a column, its conversion where times are numbers; `converts`: the conversions where they are not."""
    shape, parts = split_type(raw)
    if shape is not None:
        for raw_part, stored_part in zip(parts, split_type(stored)[1], strict=True):
            yield from _exact_leaves(raw_part, stored_part, times, numbers, converts)
        return
    column, convert = next(numbers), next(converts)
    if not pa.types.is_timestamp(raw):
        yield convert
    elif raw.tz is not None:
        yield functools.partial(times.zoned, number=column)
    elif stored.tz is not None:
        yield functools.partial(times.instants, number=column)
    else:
        yield functools.partial(times.local, number=column)


def _least_bytes(kind: pa.DataType) -> int:
    """The least bytes that a value of that type takes."""
    try:
        return int(kind.bit_width + 7) // 8
    except ValueError:  # for text and nested types
        return 4


def _leaf_count(kind: pa.DataType) -> int:
    shape, parts = split_type(kind)
    return 1 if shape is None else sum(map(_leaf_count, parts))


def _has_times(kind: pa.DataType) -> bool:
    return pa.types.is_timestamp(kind) or any(map(_has_times, split_type(kind)[1]))


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    return column.cast(kind)


def _by_name(names: Sequence[str], declared: pa.Schema | None) -> list[pa.Field | None]:
    folded = {field.name.lower(): field for field in declared or ()}
    return [folded.get(name.lower()) for name in names]


def _read_spark_type(field: pa.Field) -> Any:
    """The type that Spark has noted for a field, from Spark's JSON; None without such a note."""
    kind = field.type
    if pa.types.is_struct(kind):
        return {"type": "struct", "fields": [{"name": part.name, "type": _read_spark_type(part)} for part in kind]}
    if pa.types.is_list(kind):
        return {"type": "array", "elementType": _read_spark_type(kind.value_field)}
    if pa.types.is_map(kind):
        return {
            "type": "map",
            "keyType": _read_spark_type(kind.key_field),
            "valueType": _read_spark_type(kind.item_field),
        }
    text = (field.metadata or {}).get(_SPARK_TYPE)
    return None if text is None else text.decode(errors="replace")


def _mark_instants(kind: pa.DataType, spark_type: Any, by_spark: bool, declared: pa.DataType | None) -> pa.DataType:
    """`kind`, with times as instants if they are that. ORC's timestamps have no zone, but Spark writes its TIMESTAMP as one."""
    if pa.types.is_timestamp(kind) and kind.tz is None:
        if spark_type is None:
            return _INSTANT if by_spark or (declared is not None and declared == _INSTANT) else _LOCAL
        return _LOCAL if str(spark_type).startswith("timestamp_ntz") else _INSTANT
    shape, parts = split_type(kind)
    if shape is None:
        return kind
    declared_shape, declared_parts = (None, []) if declared is None else split_type(declared)
    declared_parts = declared_parts if declared_shape == shape else [None] * len(parts)
    if pa.types.is_struct(kind):
        inner = [field["type"] for field in spark_type["fields"]]
    else:
        inner = (
            [spark_type["keyType"], spark_type["valueType"]] if pa.types.is_map(kind) else [spark_type["elementType"]]
        )
    timed = [
        _mark_instants(part, part_type, by_spark, declared_part)
        for part, part_type, declared_part in zip(parts, inner, declared_parts, strict=True)
    ]
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(part) for field, part in zip(kind, timed, strict=True)])
    if pa.types.is_map(kind):
        return pa.map_(kind.key_field.with_type(timed[0]), kind.item_field.with_type(timed[1]))
    return pa.list_(kind.value_field.with_type(timed[0]))
