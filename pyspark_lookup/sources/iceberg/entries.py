"""`Manifest` and `Entry`: the manifests of a snapshot, and the files that they list.

The module also finds out what a file's partition says about its columns: values, bounds and buckets (the specification's "Partition
Transforms").
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import decimal
import functools
import json
import math
import re
import struct
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from pyspark_lookup.columnar.calendars import widened
from pyspark_lookup.columnar.predicate import ColumnStats
from pyspark_lookup.columnar.types import EXACT
from pyspark_lookup.core.decoding import UNREADABLE, as_text
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.sources.iceberg.metadata import PartitionField

EPOCH_DATE = datetime.date(1970, 1, 1)
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_WIDTH = re.compile(r"(bucket|truncate)\[(\d+)\]")
_MICROSECOND = datetime.timedelta(microseconds=1)
_TIMES = ("year", "month", "day", "hour")
_IN_TEXT = frozenset({"boolean", "int", "long", "date", "timestamp", "timestamptz", "string", "uuid"})


def python_value(value: Any, iceberg_type: str) -> Any:
    """A value from a manifest as a Python value. Manifests have dates as days since 1970, and times as microseconds.

    Raises one of `decoding.UNREADABLE` for an invalid value.
    """
    if iceberg_type == "date":
        return value if isinstance(value, datetime.date) else EPOCH_DATE + datetime.timedelta(days=value)
    if iceberg_type in ("timestamp", "timestamptz"):
        at = value if isinstance(value, datetime.datetime) else EPOCH + value * _MICROSECOND
        return at.replace(tzinfo=datetime.timezone.utc if iceberg_type == "timestamptz" else None)
    if iceberg_type == "uuid":
        return str(value if isinstance(value, uuid.UUID) else uuid.UUID(bytes=bytes(value)))
    return value


def is_told_in_text(iceberg_type: str) -> bool:
    """Whether values of a type can be written as text and selected by that text. Floats and bytes cannot."""
    return iceberg_type in _IN_TEXT or iceberg_type.startswith("decimal")


def text_of_value(value: Any, iceberg_type: str) -> str:
    """A partition value as text. Raises one of `decoding.UNREADABLE` for a value of a wrong type."""
    native_value = python_value(value, iceberg_type)
    if isinstance(native_value, bool):
        return str(native_value).lower()
    if isinstance(native_value, bytes):
        return native_value.hex()
    return native_value.isoformat() if isinstance(native_value, datetime.date) else str(native_value)


def identity_fields(fields: Sequence[PartitionField]) -> dict[int, int]:
    """For each column that is partitioned by its own values (transform `identity`): its field id, and the position of its value in a
    partition."""
    return {
        field.source: place
        for place, field in enumerate(fields)
        if field.transform == "identity" and field.source is not None
    }


def partition_stats(
    field: PartitionField, value: Any, iceberg_type: str, kind: pa.DataType, rows: int
) -> ColumnStats | None:
    """The bounds of the column `field.source` that follow from a partition value, for a file with `rows` rows; None if nothing follows."""
    transform, width_match = field.transform, _WIDTH.fullmatch(field.transform)
    if transform == "void" or not (transform in ("identity", *_TIMES) or width_match):
        return None
    if value is None:  # all rows of the partition have a null
        return ColumnStats(None, None, rows, rows)
    with contextlib.suppress(*UNREADABLE, decimal.InvalidOperation):
        if transform == "identity":
            native_value = python_value(value, iceberg_type)
            if isinstance(native_value, (float, bytes)):
                return None
            return ColumnStats(native_value, native_value, 0, rows)
        if width_match and width_match[1] == "bucket":
            is_hashed = iceberg_type != "uuid" and not pa.types.is_decimal(kind)
            return ColumnStats(None, None, 0, rows, (int(width_match[2]), int(value))) if is_hashed else None
        if width_match:
            return _truncated_stats(value, int(width_match[2]), kind, rows)
        # If another program wrote the file and it was then added to the table, its dates may be of the calendar before 1582.
        low, high = widened(*_span(transform, value))
        if iceberg_type == "date":
            return ColumnStats(low.date(), high.date(), 0, rows)
        zone = datetime.timezone.utc if iceberg_type == "timestamptz" else None
        return ColumnStats(low.replace(tzinfo=zone), high.replace(tzinfo=zone), 0, rows)
    return None


def _span(transform: str, value: Any) -> tuple[datetime.datetime, datetime.datetime]:
    """The first and the last instant of the year, month, day or hour with the number `value`, counted from 1970."""
    number = (value - EPOCH_DATE).days if isinstance(value, datetime.date) else int(value)
    # Some writers round times before 1970 towards 1970, so a value may be one too high.
    first = _start(transform, number - 1 if number <= 0 else number)
    return first, _start(transform, number + 1) - _MICROSECOND


def _start(transform: str, number: int) -> datetime.datetime:
    if transform == "year":
        return EPOCH.replace(year=1970 + number)
    if transform == "month":
        return EPOCH.replace(year=1970 + number // 12, month=number % 12 + 1)
    return EPOCH + (datetime.timedelta(days=number) if transform == "day" else datetime.timedelta(hours=number))


def _truncated_stats(value: Any, width: int, kind: pa.DataType, rows: int) -> ColumnStats | None:
    if isinstance(value, str):
        if len(value) < width:
            return ColumnStats(value, value, 0, rows)
        last = ord(value[-1]) + 1
        # The bound is the value with its last character raised by one, which sorts after all texts that begin with the value. There is no
        # such character after the last one of Unicode, and a half of a UTF-16 pair is not a character.
        return (
            None if last > 0x10FFFF or 0xD800 <= last < 0xE000 else ColumnStats(value, value[:-1] + chr(last), 0, rows)
        )
    if isinstance(value, decimal.Decimal):
        more = decimal.Decimal(width - 1).scaleb(-kind.scale, EXACT)
        return ColumnStats(value, EXACT.add(value, more), 0, rows)
    return ColumnStats(value, value + width - 1, 0, rows) if isinstance(value, int) else None


def narrow(first: ColumnStats | None, second: ColumnStats | None) -> ColumnStats | None:
    """The tightest bounds of a column that follow from two pairs of bounds, both of which are true."""
    if first is None or second is None:
        return first if second is None else second
    lows = [low for low in (first.low, second.low) if low is not None]
    highs = [high for high in (first.high, second.high) if high is not None]
    nulls = first.null_count if first.null_count is not None else second.null_count
    if first.all_null or second.all_null:
        nulls = first.rows
    low, high = max(lows, default=None), min(highs, default=None)
    return ColumnStats(low, high, nulls, first.rows, first.bucket or second.bucket)


DATA, POSITION_DELETES, EQUALITY_DELETES = 0, 1, 2
"""The values of a data_file's `content`."""
_DAY_US = 86_400_000_000
_NUMBERS = {("date", 4): "<i", ("timestamp", 8): "<q", ("timestamptz", 8): "<q"}


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest, as the manifest list describes it. `length` and `spec_id` are None in tables of format version 1 without manifest lists.

    `files`: the number of live files in the manifest; None if the list does not say. `has_data`: True if the manifest lists data files, False
    if it lists delete files.
    """

    location: str
    length: int | None
    spec_id: int | None
    sequence: int
    files: int | None = None
    has_data: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """The entry of a live file in a manifest. `location`: as the writer spelled it. `sequence`: the data sequence number.

    `partition`: the values of the partition fields with the ids `partition_ids`. `lower`, `upper`, `nulls` and `values`: the file's bounds
    and counts, by field id. `referenced`, `offset` and `length` belong to a deletion vector: its data file, and the place of its bytes in the
    Puffin file.
    """

    location: str
    content: int
    format: str
    spec_id: int
    partition_ids: tuple[int, ...]
    partition: tuple[Any, ...]
    sequence: int
    size: int
    rows: int
    lower: Mapping[int, bytes]
    upper: Mapping[int, bytes]
    nulls: Mapping[int, int]
    values: Mapping[int, int]
    equality_ids: tuple[int, ...]
    referenced: str | None
    offset: int | None
    length: int | None


def value_to_json(value: Any) -> Any:
    """A partition value or a bound as a JSON value. Raises TypeError for a type that manifests do not have."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return ["float", value.hex()]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, (decimal.Decimal, uuid.UUID)):
        return [type(value).__name__, str(value)]
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return [type(value).__name__, value.isoformat()]
    raise TypeError(f"a partition value has the type {type(value).__name__}, which manifests do not have")


_PARSERS: dict[str, Callable[[str], Any]] = {
    "float": float.fromhex,
    "bytes": bytes.fromhex,
    "Decimal": decimal.Decimal,
    "UUID": uuid.UUID,
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
}


def value_from_json(value: Any) -> Any:
    """The value that `value_to_json` wrote. Raises one of `decoding.UNREADABLE` for a malformed value."""
    if not isinstance(value, list):
        return value
    kind, text = value
    return _PARSERS[kind](as_text(text))


Partition = tuple[int, tuple[int, ...], tuple[Any, ...]]
"""A file's partition: (spec id, ids of the partition fields, values of these fields)."""


def text_of_partition(entry: Entry) -> str:
    """A file's partition as JSON text."""
    return json.dumps([entry.spec_id, entry.partition_ids, [value_to_json(value) for value in entry.partition]])


@functools.lru_cache(maxsize=256)
def parse_partition(text: str) -> Partition:
    """The partition that `text_of_partition` wrote. Raises one of `decoding.UNREADABLE` for malformed text.

    Cached, because many files of a table without partitions have the same one.
    """
    spec_id, ids, values = json.loads(text)
    return int(spec_id), tuple(map(int, ids)), tuple(map(value_from_json, values))


_SIDES = ("lower", "upper", "nulls", "values")


class _StatisticsText:
    """The bounds and counts of a file as JSON text, which is parsed when one of them is first read."""

    def __init__(self, text: str) -> None:
        self._text = text

    @classmethod
    def of_entry(cls, entry: Entry) -> str:
        bounds = [{id_: bound.hex() for id_, bound in getattr(entry, side).items()} for side in _SIDES[:2]]
        return json.dumps([*bounds, dict(entry.nulls), dict(entry.values)])

    @cached_property
    def sides(self) -> dict[str, dict[int, Any]]:
        lower, upper, *counts = json.loads(self._text)
        bounds = ({int(id_): bytes.fromhex(bound) for id_, bound in side.items()} for side in (lower, upper))
        numbers = ({int(id_): int(count) for id_, count in side.items()} for side in counts)
        return dict(zip(_SIDES, (*bounds, *numbers), strict=True))


class _Side(Mapping[int, Any]):
    """One of the four `_SIDES` for a file, such as its lower bounds, by field id."""

    def __init__(self, statistics: _StatisticsText, side: str) -> None:
        self._statistics = statistics
        self._side = side

    def __getitem__(self, field_id: int) -> Any:
        return self._statistics.sides[self._side][field_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._statistics.sides[self._side])

    def __len__(self) -> int:
        return len(self._statistics.sides[self._side])


def entry_to_json(entry: Entry) -> list[Any]:
    """An entry as a JSON array, which `entry_from_json` reads."""
    place = [entry.referenced, entry.offset, entry.length]
    numbers = [entry.sequence, entry.size, entry.rows]
    texts = [text_of_partition(entry), _StatisticsText.of_entry(entry)]
    return [entry.location, entry.content, entry.format, *numbers, list(entry.equality_ids), *place, *texts]


def entry_from_json(record: Any) -> Entry:
    """The entry that `entry_to_json` wrote. Raises one of `decoding.UNREADABLE` for a malformed record."""
    location, content, form, sequence, size, rows, equality_ids, referenced, offset, length, partition, text = record
    statistics = _StatisticsText(as_text(text))
    lower, upper, nulls, values = (_Side(statistics, side) for side in _SIDES)
    return Entry(
        as_text(location),
        int(content),
        as_text(form),
        *parse_partition(partition),
        int(sequence),
        int(size),
        int(rows),
        lower,
        upper,
        nulls,
        values,
        tuple(map(int, equality_ids)),
        None if referenced is None else as_text(referenced),
        None if offset is None else int(offset),
        None if length is None else int(length),
    )


def parse_bound(data: bytes | None, iceberg_type: str, kind: pa.DataType) -> Any:
    """A bound as a Python value (the specification's "Binary single-value serialization"); None if the bytes are not a value that can be
    compared."""
    if data is None:
        return None
    with contextlib.suppress(*UNREADABLE, struct.error):
        if iceberg_type in ("int", "long"):
            return int.from_bytes(data, "little", signed=True) if len(data) in (4, 8) else None
        if iceberg_type in ("float", "double"):
            value = struct.unpack("<f" if len(data) == 4 else "<d", data)[0]
            return None if math.isnan(value) else float(value)
        if iceberg_type == "boolean":
            return data != b"\0"
        if iceberg_type == "string":
            return data.decode()
        if iceberg_type == "binary" or iceberg_type.startswith("fixed"):
            return data
        if pa.types.is_decimal(kind):
            unscaled = int.from_bytes(data, "big", signed=True)
            return decimal.Decimal(unscaled).scaleb(-kind.scale, EXACT)
        form = _NUMBERS.get((iceberg_type, len(data)))
        if form is not None:
            return python_value(struct.unpack(form, data)[0], iceberg_type)
        # The column was a date when the file was written.
        if iceberg_type.startswith("timestamp") and len(data) == 4:
            return python_value(struct.unpack("<i", data)[0] * _DAY_US, iceberg_type)
    return None
