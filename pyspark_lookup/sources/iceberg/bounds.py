"""Parses the bounds of a column in many files at once, from the bytes in the manifests, with the same results as `parse_bound` and `narrow`
for one file."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.calendars import widened
from pyspark_lookup.columnar.keys import Numbers, as_array, as_bools, as_indices, offsets_and_data
from pyspark_lookup.columnar.predicate import ColumnStats, StatsColumns
from pyspark_lookup.sources.iceberg.entries import EPOCH_DATE, parse_bound

_LAST_DAY = (datetime.date.max - EPOCH_DATE).days
_FIRST_DAY = (datetime.date.min - EPOCH_DATE).days
_DAY_US = 86_400_000_000
_FIRST_KEPT = datetime.date(2000, 1, 1)  # bounds from this day on mean the same in every calendar, see `widened`


def bound_type(kind: pa.DataType) -> pa.DataType:
    """The type of a column's bounds in `StatsColumns`. Numbers get the widest type, because older files may have the column in a narrower
    one."""
    return pa.int64() if pa.types.is_integer(kind) else pa.float64() if pa.types.is_floating(kind) else kind


def column_stats(columns: pa.Table, rows: Numbers, iceberg_type: str, kind: pa.DataType) -> StatsColumns:
    """The statistics of a column in each file, parsed from the bounds and counts in the manifests.

    `columns`: the lower and upper bounds, the null counts and the value counts. `rows`: the number of rows of each file, negative if it is
    not known.
    """
    lower, upper, nulls, values = (_one(columns.column(number)) for number in range(4))
    is_counted = (rows >= 0) & as_bools(pc.fill_null(pc.equal(values, as_array(rows)), True))
    nulls = pc.if_else(as_array(is_counted), nulls, pa.scalar(None, pa.int64()))
    if iceberg_type == "uuid":
        low = high = pa.nulls(len(rows), kind)
    else:
        low, high = (_parse_bounds(side, iceberg_type, kind) for side in (lower, upper))
        is_ordered = pc.fill_null(pc.less_equal(_comparable(low), _comparable(high)), False)
        low, high = (pc.if_else(is_ordered, side, pa.scalar(None, side.type)) for side in (low, high))
        if pa.types.is_temporal(kind):
            low, high = _widen(low, 0), _widen(high, 1)
    return StatsColumns(low, high, nulls, as_array(np.maximum(rows, 1)))


def _one(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _parse_bounds(bounds: pa.Array, iceberg_type: str, kind: pa.DataType) -> pa.Array:
    """The bounds, in the type `bound_type(kind)`; null where the bytes are not a value of the type."""
    if pa.types.is_binary(kind):
        return bounds.cast(kind)
    if pa.types.is_string(kind):
        try:
            return bounds.cast(kind)
        except pa.ArrowInvalid:  # not UTF-8
            return _parse_distinct(bounds, iceberg_type, kind)
    if iceberg_type in ("int", "long"):
        values, is_valid = _read_numbers(bounds, {4: "<i4", 8: "<i8"}, np.int64)
        return _masked(values, is_valid)
    if iceberg_type in ("float", "double"):
        with np.errstate(invalid="ignore"):  # the bytes of a signalling NaN
            numbers, is_valid = _read_numbers(bounds, {4: "<f4", 8: "<f8"}, np.float64)
        return _masked(numbers, is_valid & ~np.isnan(numbers))
    if iceberg_type == "date":
        days, is_valid = _read_numbers(bounds, {4: "<i4"}, np.int64)
        is_valid &= (days >= _FIRST_DAY) & (days <= _LAST_DAY)
        return _masked(np.where(is_valid, days, 0).astype(np.int32), is_valid).cast(pa.date32())
    if iceberg_type in ("timestamp", "timestamptz"):
        micros, has_micros = _read_numbers(bounds, {8: "<i8"}, np.int64)
        days, has_days = _read_numbers(bounds, {4: "<i4"}, np.int64)  # the column was a date when the file was written
        micros = np.where(has_days, np.clip(days, _FIRST_DAY - 1, _LAST_DAY + 1) * _DAY_US, micros)
        is_valid = (has_micros | has_days) & (micros >= _FIRST_DAY * _DAY_US) & (micros < (_LAST_DAY + 1) * _DAY_US)
        return _masked(np.where(is_valid, micros, 0), is_valid).cast(kind)
    return _parse_distinct(bounds, iceberg_type, kind)


def _read_numbers(bounds: pa.Array, forms: dict[int, str], kind: type) -> tuple[Numbers, Numbers]:
    """(the numbers, whether each could be read), from bounds of bytes. `forms`: the numpy type of a bound, by its length in bytes."""
    offsets, data = offsets_and_data(bounds)
    lengths = offsets[1:] - offsets[:-1]
    is_known = as_bools(bounds.is_valid())
    numbers: Numbers = np.zeros(len(bounds), kind)
    is_read: Numbers = np.zeros(len(bounds), np.bool_)
    for width, form in forms.items():
        places = np.flatnonzero(is_known & (lengths == width))
        parts = data[offsets[places][:, None] + np.arange(width)]
        numbers[places] = np.ascontiguousarray(parts).view(form)[:, 0] if len(places) else 0
        is_read[places] = True
    return numbers, is_read


def _masked(values: Numbers, is_valid: Numbers) -> pa.Array:
    array = as_array(values)
    return array if is_valid.all() else pc.if_else(as_array(is_valid), array, pa.scalar(None, array.type))


def _parse_distinct(bounds: pa.Array, iceberg_type: str, kind: pa.DataType) -> pa.Array:
    distinct = bounds.dictionary_encode()
    values = [parse_bound(data, iceberg_type, kind) for data in distinct.dictionary.to_pylist()]
    return as_values(values, bound_type(kind)).take(distinct.indices)


def as_values(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """The values as an array of a type; null where the type cannot hold the value."""
    try:
        return pa.array(values, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return pa.array([value if _fits(value, kind) else None for value in values], kind)


def _fits(value: Any, kind: pa.DataType) -> bool:
    try:
        pa.scalar(value, kind)
        return True
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return False


def _widen(bounds: pa.Array, side: int) -> pa.Array:
    """Low bounds (`side` 0) or high bounds (1), widened so that they are true whichever calendar the writer used, see `widened`."""
    old = pc.fill_null(pc.less(bounds.cast(pa.timestamp("us")), pa.scalar(_FIRST_KEPT).cast(pa.timestamp("us"))), False)
    if not pc.any(old).as_py():
        return bounds
    distinct = bounds.filter(old).dictionary_encode()
    values = [widened(value, value)[side] for value in distinct.dictionary.to_pylist()]
    return pc.replace_with_mask(bounds, old, pa.array(values, bounds.type).take(distinct.indices))


def constants(stats: Sequence[ColumnStats | None], kind: pa.DataType) -> StatsColumns:
    """The statistics of one column in several files, from one object for each file (None: nothing is known)."""
    low, high = (
        as_values([None if one is None else getattr(one, side) for one in stats], bound_type(kind))
        for side in ("low", "high")
    )
    numbers = [
        (None,) * 4 if one is None else (one.null_count, one.rows, *(one.bucket or (None, None))) for one in stats
    ]
    return StatsColumns(low, high, *(pa.array([row[number] for row in numbers], pa.int64()) for number in range(4)))


def narrow_columns(stats: StatsColumns, partitions: StatsColumns, codes: Numbers) -> StatsColumns:
    """The tightest bounds of a column that follow from the manifests and from the partition of each file, as `narrow` gives them.

    `partitions`: for each partition, the statistics of a file with one row in it. `codes`: the number of each file's partition.
    """
    other = partitions.take(as_indices(codes))
    low = _choose(stats.low, other.low, pc.greater)
    high = _choose(stats.high, other.high, pc.less)
    nulls = pc.coalesce(stats.null_counts, other.null_counts)
    is_empty = as_array(stats.all_null | other.all_null)
    nulls = pc.if_else(is_empty, stats.rows, nulls)
    return StatsColumns(low, high, nulls, stats.rows, other.bucket_counts, other.buckets)


def _choose(one: pa.Array, other: pa.Array, compare: Callable[[pa.Array, pa.Array], pa.Array]) -> pa.Array:
    """The values of `one` where `compare(one, other)` is true, and those of `other` elsewhere. Where one of the two is null, the value of the
    other."""
    is_chosen = pc.or_kleene(compare(_comparable(one), _comparable(other)), other.is_null())
    return pc.if_else(pc.fill_null(is_chosen, False), one, other)


def _comparable(bounds: pa.Array) -> pa.Array:
    return bounds.cast(pa.int8()) if pa.types.is_boolean(bounds.type) else bounds
