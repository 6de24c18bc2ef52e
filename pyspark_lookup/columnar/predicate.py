"""Predicates over columns: evaluated exactly for rows, and roughly for statistics, to skip files and row groups.

A predicate is a tree of `And` / `Or` over leaves, with every NOT pushed into its leaf. Values follow
Spark SQL: three-valued logic, NaN equal to itself and above every number, -0.0 equal to 0.0, text
and binary ordered by bytes. A leaf compares one column, of a type that `columnar.types.spark_type` returns.
"""

from __future__ import annotations

import bisect
import dataclasses
import datetime
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.keys import Numbers, as_bools, as_int64
from pyspark_lookup.core.forks import cached_property

_C1, _C2 = np.uint32(0xCC9E2D51), np.uint32(0x1B873593)


def bucket_numbers(values: pa.Array, count: int) -> Numbers | None:
    """The bucket of each value among `count` buckets, as in Iceberg's transform `bucket`; None for a type without bucket hashes.

    No value may be null.
    """
    hashes = bucket_hashes(values)
    if hashes is None:
        return None
    numbers: Numbers = (hashes & np.uint32(0x7FFFFFFF)).astype(np.int64) % count
    return numbers


def bucket_hashes(values: pa.Array) -> Numbers | None:
    """The bucket hash of each value, as uint32 (32-bit Murmur3, x86, seed 0, as Iceberg computes it); None for a type without bucket hashes."""
    kind = values.type
    if pa.types.is_integer(kind):
        return _hash_longs(values.cast(pa.int64()).to_numpy(zero_copy_only=False))
    if pa.types.is_date32(kind):
        return _hash_longs(values.cast(pa.int32()).cast(pa.int64()).to_numpy(zero_copy_only=False))
    if pa.types.is_timestamp(kind):
        return _hash_longs(values.cast(pa.timestamp("us", kind.tz)).cast(pa.int64()).to_numpy(zero_copy_only=False))
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return _hash_bytes(values.cast(pa.binary()).to_pylist())
    return None


def _hash_longs(numbers: Numbers) -> Numbers:
    """The hashes of 64-bit integers; each is hashed as its 8 bytes in little-endian order."""
    words = np.ascontiguousarray(numbers, "<i8").view("<u4").reshape(-1, 2)
    return _hash_words(words, np.full(len(words), 8, np.uint32), np.zeros(len(words), np.uint32))


def _hash_bytes(texts: list[bytes]) -> Numbers:
    """The hashes of byte strings of any lengths. All strings with the same number of words are hashed at once."""
    lengths = np.fromiter(map(len, texts), np.uint32, len(texts))
    hashes = np.zeros(len(texts), np.uint32)
    for words in np.unique(lengths >> 2).tolist():
        places = np.flatnonzero(lengths >> 2 == words)
        padded = b"".join(texts[place].ljust(4 * words + 4, b"\0") for place in places.tolist())
        padded_words = np.frombuffer(padded, "<u4").reshape(len(places), words + 1)
        hashes[places] = _hash_words(padded_words[:, :words], lengths[places], padded_words[:, words])
    return hashes


def _hash_words(words: Numbers, lengths: Numbers, tail: Numbers) -> Numbers:
    """The hashes of values of `lengths` bytes. A value is a row of `words`, followed by up to three bytes, which are a word in `tail`."""
    hashes = np.zeros(len(words), np.uint32)
    for column in range(words.shape[1]):
        hashes ^= _mix_word(words[:, column])
        hashes = _rotate_left(hashes, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    hashes ^= _mix_word(tail)  # 0 for a value without such bytes
    hashes ^= lengths.astype(np.uint32)
    hashes ^= hashes >> np.uint32(16)
    hashes *= np.uint32(0x85EBCA6B)
    hashes ^= hashes >> np.uint32(13)
    hashes *= np.uint32(0xC2B2AE35)
    return np.asarray(hashes ^ (hashes >> np.uint32(16)))


def _mix_word(word: Numbers) -> Numbers:
    mixed: Numbers = _rotate_left(word.astype(np.uint32) * _C1, 15) * _C2
    return mixed


def _rotate_left(numbers: Numbers, bits: int) -> Numbers:
    return np.asarray((numbers << np.uint32(bits)) | (numbers >> np.uint32(32 - bits)))


def bucket_number(value: Any, kind: pa.DataType, count: int) -> int | None:
    """The bucket of one value among `count` buckets; None if columns of type `kind` have no bucket hashes, or cannot have the value."""
    try:
        numbers = bucket_numbers(pa.array([value], kind), count)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return None
    return None if numbers is None else int(numbers[0])


# --- predicates -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ColumnStats:
    """Statistics of one column in a row group or file. The bounds `low` and `high` may be wider than the values.

    A bound or `null_count` that is not known is None. Bounds do not tell whether there are NaNs. `bucket`: (number of buckets, the bucket to
    which all values other than null belong by `bucket_numbers`); None if it is not known.
    """

    low: Any
    high: Any
    null_count: int | None
    rows: int
    bucket: tuple[int, int] | None = None

    @classmethod
    def from_constant(cls, value: Any) -> ColumnStats:
        """The statistics of rows that all have the same value, which may be None."""
        return cls(value, value, int(value is None), 1)

    @property
    def all_null(self) -> bool:
        return self.null_count is not None and self.null_count >= self.rows


def join_stats(parts: Sequence[ColumnStats | None]) -> ColumnStats | None:
    """The statistics of one column over several row groups; None if a group has none."""
    known_parts = [part for part in parts if part is not None]
    if len(known_parts) < len(parts):
        return None
    rows = sum(part.rows for part in known_parts)
    nulls = [part.null_count for part in known_parts]
    count = None if any(n is None for n in nulls) else sum(n for n in nulls if n is not None)
    bounded = [part for part in known_parts if not part.all_null]
    bounds = [value for part in bounded for value in (part.low, part.high)]
    if any(value is None or (isinstance(value, float) and math.isnan(value)) for value in bounds):
        return ColumnStats(None, None, count, rows)
    lows, highs = [part.low for part in bounded], [part.high for part in bounded]
    return ColumnStats(min(lows, default=None), max(highs, default=None), count, rows)


@dataclasses.dataclass(frozen=True)
class And:
    parts: tuple[Predicate, ...]


@dataclasses.dataclass(frozen=True)
class Or:
    parts: tuple[Predicate, ...]


@dataclasses.dataclass(frozen=True)
class Compare:
    """`column op value`; op is one of = <> < <= > >=."""

    column: str
    op: str
    value: Any


@dataclasses.dataclass(frozen=True)
class In:
    """`column [NOT] IN values`. `has_null`: the list has NULL, too."""

    column: str
    values: tuple[Any, ...]
    has_null: bool
    negated: bool = False


@dataclasses.dataclass(frozen=True)
class IsNull:
    column: str
    negated: bool = False


@dataclasses.dataclass(frozen=True)
class NullSafeEqual:
    """`[NOT] column <=> value`. The result is never null."""

    column: str
    value: Any
    negated: bool = False


@dataclasses.dataclass(frozen=True)
class StartsWith:
    """`column [NOT] LIKE 'prefix%'`."""

    column: str
    prefix: str
    negated: bool = False


@dataclasses.dataclass(frozen=True)
class Constant:
    """`value` where `column` is not null, null where it is null; without a column, `value` everywhere."""

    value: bool | None
    column: str | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Among:
    """`column` is one of many `values` (an Arrow array, distinct and without nulls); used only to leave out files and rows when a lookup scans.

    In a column of floats, whose zeros and NaNs have several bit patterns, this predicate is true for all rows that are not null.
    """

    column: str
    values: pa.Array

    @cached_property
    def ordered(self) -> list[Any] | None:
        """The values as Python values, ascending; None if no Python type can hold one of them, or values of their type have no order."""
        if pa.types.is_floating(self.values.type):
            return None
        try:
            ascending: list[Any] = pc.take(self.values, pc.array_sort_indices(self.values)).to_pylist()
        except (ValueError, OverflowError, pa.ArrowNotImplementedError):
            return None
        return ascending

    @cached_property
    def _buckets(self) -> dict[int, frozenset[int] | None]:
        return {}

    def _in_bucket(self, count: int, bucket: int) -> bool:
        if count not in self._buckets:
            numbers = bucket_numbers(self.values, count)
            self._buckets[count] = None if numbers is None else frozenset(numbers.tolist())
        filled_buckets = self._buckets[count]
        return filled_buckets is None or bucket in filled_buckets

    def within(self, bounds: ColumnStats) -> bool:
        """Whether a column with these statistics may have one of the values."""
        if bounds.bucket is not None and not self._in_bucket(*bounds.bucket):
            return False
        if self.ordered is None or bounds.low is None or bounds.high is None:
            return True
        at = bisect.bisect_left(self.ordered, bounds.low)
        return at < len(self.ordered) and bool(self.ordered[at] <= bounds.high)


Predicate = And | Or | Compare | In | IsNull | NullSafeEqual | StartsWith | Constant | Among

_NEGATED = {"=": "<>", "<>": "=", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}


def negate(node: Predicate) -> Predicate:
    """NOT `node`, with the NOT moved into the leaves (valid in three-valued logic)."""
    match node:
        case And(parts):
            return Or(tuple(map(negate, parts)))
        case Or(parts):
            return And(tuple(map(negate, parts)))
        case Compare(column, op, value):
            return Compare(column, _NEGATED[op], value)
        case Constant(value, column):
            return Constant(None if value is None else not value, column)
        case Among():
            raise TypeError("Among cannot be negated: it may be true for rows without its values")
        case _:
            return dataclasses.replace(node, negated=not node.negated)


def referenced_columns(node: Predicate | None) -> frozenset[str]:
    """The names of the columns that a predicate refers to."""
    if node is None:
        return frozenset()
    if isinstance(node, (And, Or)):
        return frozenset().union(*map(referenced_columns, node.parts))
    return frozenset() if node.column is None else frozenset({node.column})


# --- rows -----------------------------------------------------------------------------------------


def evaluate(node: Predicate, columns: Mapping[str, pa.Array], rows: int) -> pa.Array:
    """Whether the predicate is true, false or null for each row: a boolean array of length `rows`, made without a loop over rows."""
    match node:
        case And(parts):
            return functools.reduce(pc.and_kleene, (evaluate(part, columns, rows) for part in parts))
        case Or(parts):
            return functools.reduce(pc.or_kleene, (evaluate(part, columns, rows) for part in parts))
        case Compare(column, op, value):
            return _compare(columns[column], op, value)
        case In(column, values, has_null, negated):
            return _match_values(columns[column], values, has_null, negated)
        case IsNull(column, negated):
            array = columns[column]
            return pc.is_valid(array) if negated else pc.is_null(array)
        case NullSafeEqual(column, value, negated):
            equal = pc.fill_null(_compare(columns[column], "=", value), False)
            return pc.invert(equal) if negated else equal
        case StartsWith(column, prefix, negated):
            starts = pc.starts_with(columns[column], prefix)
            return pc.invert(starts) if negated else starts
        case Among(column, values):
            array = columns[column]
            return pc.is_valid(array) if pa.types.is_floating(array.type) else pc.is_in(array, value_set=values)
        case Constant(value, None):
            return pa.nulls(rows, pa.bool_()) if value is None else pa.repeat(pa.scalar(value), rows)
        case Constant(value, column):
            constant = pa.repeat(pa.scalar(value, pa.bool_()), rows)
            return pc.if_else(pc.is_valid(columns[str(column)]), constant, pa.scalar(None, pa.bool_()))


_KERNEL = {
    "=": pc.equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}


def _compare(array: pa.Array, op: str, value: Any) -> pa.Array:
    if pa.types.is_floating(array.type) or isinstance(value, float):
        if pa.types.is_decimal(array.type):
            array = array.cast(pa.string())  # Arrow's cast from decimal to double is sometimes wrong in the last digit
        return _compare_doubles(pc.cast(array, pa.float64(), safe=False), op, float(value))
    if pa.types.is_boolean(array.type):
        array, value = array.cast(pa.int8()), int(value)
    return _KERNEL[op](array, pa.scalar(value, array.type))


def _compare_doubles(array: pa.Array, op: str, value: float) -> pa.Array:
    """IEEE comparison, adapted to Spark's order, in which NaN equals NaN and is above all other numbers."""
    if op in ("<>", ">=", "<="):
        return pc.invert(_compare_doubles(array, _NEGATED[op], value))
    is_nan = pc.is_nan(array)  # null where the value is null
    if math.isnan(value):
        return {"=": is_nan, "<": pc.invert(is_nan), ">": pc.and_(is_nan, pc.invert(is_nan))}[op]
    plain = _KERNEL[op](array, pa.scalar(value))
    return pc.or_(plain, is_nan) if op == ">" else plain


def _match_values(array: pa.Array, values: tuple[Any, ...], has_null: bool, negated: bool) -> pa.Array:
    if pa.types.is_floating(array.type) or any(isinstance(value, float) for value in values):
        is_member = pa.repeat(pa.scalar(False), len(array))
        for value in values:
            is_member = pc.or_(is_member, pc.fill_null(_compare(array, "=", value), False))
    else:
        is_member = pc.is_in(array, value_set=pa.array(list(values), array.type))
    unknown = pc.is_null(array)
    if has_null:
        unknown = pc.or_(unknown, pc.invert(is_member))
    result = pc.if_else(unknown, pa.scalar(None, pa.bool_()), is_member)
    return pc.invert(result) if negated else result


_BUCKETED: dict[type, pa.DataType] = {
    int: pa.int64(),
    str: pa.string(),
    bytes: pa.binary(),
    datetime.date: pa.date32(),
    datetime.datetime: pa.timestamp("us", tz="UTC"),
}
"""For a literal of each Python type, the Arrow type of its bucket hash. Decimals are missing: their hash depends on the column's scale."""


# --- statistics -----------------------------------------------------------------------------------


def may_match(node: Predicate, stats: Callable[[str], ColumnStats | None]) -> bool:
    """Whether there may be a row for which the predicate is true, by the statistics that `stats` returns for a column; True if unsure."""
    match node:
        case And(parts):
            return all(may_match(part, stats) for part in parts)
        case Or(parts):
            return any(may_match(part, stats) for part in parts)
        case Constant(value, None):
            return value is True
    bounds = stats(str(node.column))
    if bounds is None:
        return not (isinstance(node, Constant) and node.value is not True)
    if isinstance(node, IsNull):
        return not bounds.all_null if node.negated else bounds.null_count != 0
    if isinstance(node, NullSafeEqual) and node.negated:
        return True
    if bounds.all_null:
        return False
    match node:
        case Constant(value, _):
            return value is True
        case Compare(_, "=", value) | NullSafeEqual(_, value, _):
            return _equals(bounds, value)
        case Compare(_, op, value):
            return _within(bounds, op, value)
        case In(_, values, _, negated=False):
            return any(_equals(bounds, value) for value in values)
        case Among():
            return node.within(bounds)
        case StartsWith(_, prefix, negated=False):
            low, high = bounds.low, bounds.high
            return not (
                (isinstance(high, str) and high[: len(prefix)] < prefix)
                or (isinstance(low, str) and low[: len(prefix)] > prefix)
            )
        case _:
            return True


def _equals(bounds: ColumnStats, value: Any) -> bool:
    """Whether a value within the bounds can equal `value`."""
    if bounds.bucket is not None and type(value) in _BUCKETED:
        count, bucket = bounds.bucket
        if bucket_number(value, _BUCKETED[type(value)], count) not in (None, bucket):
            return False
    return _within(bounds, "=", value)


def _within(bounds: ColumnStats, op: str, value: Any) -> bool:
    """Whether the comparison `column op value` may be true for a row, by the column's bounds. A column of doubles may also have NaN, which is outside
    the bounds."""
    low, high = bounds.low, bounds.high
    if low is None or high is None or op == "<>":
        return True
    if isinstance(value, float) and not isinstance(low, float):
        return True  # Spark rounds the values of an exact column to doubles before it compares them; the bounds are not rounded
    if (isinstance(value, float) and math.isnan(value)) or (
        isinstance(low, float) and (math.isnan(low) or math.isnan(high))
    ):
        return True
    if op == "=":
        return bool(low <= value <= high)
    if op == "<":
        return bool(low < value)
    if op == "<=":
        return bool(low <= value)
    # NaN is above every number and not within the bounds.
    return isinstance(low, float) or bool(high > value if op == ">" else high >= value)


# --- statistics of many files -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StatsColumns:
    """`ColumnStats` of one column in many files, one row for each file. `low` and `high` are in the column's type, but integers are int64 and floating
    numbers float64; all other arrays are int64.

    A value that is not known is null. A file has no statistics if neither its bounds nor its null count are known. `bucket_counts`: for each
    file, the number of buckets. `buckets`: the bucket of the file's values. Both are None if no file has a bucket.
    """

    low: pa.Array
    high: pa.Array
    null_counts: pa.Array
    rows: pa.Array
    bucket_counts: pa.Array | None = None
    buckets: pa.Array | None = None

    @classmethod
    def from_constants(cls, values: pa.Array) -> StatsColumns:
        """The statistics of files in each of which all rows have the same value, which may be null."""
        return cls(values, values, values.is_null().cast(pa.int64()), pa.repeat(pa.scalar(1, pa.int64()), len(values)))

    @classmethod
    def from_rows(cls, rows: Sequence[ColumnStats | None], kind: pa.DataType) -> StatsColumns:
        """The statistics of a column of type `kind`, one item of `rows` for each file; without buckets.

        A bound that `kind` cannot hold counts as not known.
        """
        kind = pa.int64() if pa.types.is_integer(kind) else pa.float64() if pa.types.is_floating(kind) else kind
        low, high = (
            _fit([None if stats is None else getattr(stats, side) for stats in rows], kind) for side in ("low", "high")
        )
        nulls, counts = (
            pa.array([None if stats is None else getattr(stats, name) for stats in rows], pa.int64())
            for name in ("null_count", "rows")
        )
        return cls(low, high, nulls, counts)

    def take(self, places: pa.Array) -> StatsColumns:
        """The statistics of the files at `places`, in that order. For a null in `places`, nothing is known."""
        return StatsColumns(*(None if array is None else array.take(places) for array in self.arrays))

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The attributes in the order of the constructor's arguments."""
        return self.low, self.high, self.null_counts, self.rows, self.bucket_counts, self.buckets

    def row(self, place: int) -> ColumnStats | None:
        """The statistics of one file; None if it has none."""
        values: list[Any] = [None if array is None else array[place].as_py() for array in self.arrays]
        low, high, nulls, rows, count, bucket = values
        if rows is None or (nulls is None and low is None):
            return None
        return ColumnStats(low, high, nulls, rows, None if count is None else (count, bucket))

    @cached_property
    def _files_by_bucket_count(self) -> dict[int, tuple[Numbers, Numbers]]:
        """For each number of buckets that occurs: (for each file, whether it has that number of buckets; the bucket of each file)."""
        if self.bucket_counts is None or self.buckets is None:
            return {}
        counts, buckets = (as_int64(pc.fill_null(array, 0)) for array in (self.bucket_counts, self.buckets))
        return {count: (counts == count, buckets) for count in np.unique(counts).tolist() if count}

    def _in_buckets(self, numbers_of: Callable[[int], Numbers | None]) -> Numbers:
        """For each file, whether it may have values of certain buckets; True if its bucket is not known.

        `numbers_of`: returns these buckets for a number of buckets; None if all buckets count.
        """
        mask = np.ones(len(self.low), np.bool_)
        for count, (has_count, buckets) in self._files_by_bucket_count.items():
            numbers = numbers_of(count)
            if numbers is not None:
                mask &= ~has_count | np.isin(buckets, numbers)
        return mask

    @cached_property
    def known(self) -> Numbers:
        """For each file, whether it has statistics."""
        return as_bools(self.rows.is_valid()) & as_bools(pc.or_(self.low.is_valid(), self.null_counts.is_valid()))

    @cached_property
    def all_null(self) -> Numbers:
        return as_bools(pc.fill_null(pc.greater_equal(self.null_counts, self.rows), False))

    @cached_property
    def _open(self) -> Numbers:
        """For each file, whether it may have any value, because a bound is not known or is NaN."""
        bounded = pc.and_(self.low.is_valid(), self.high.is_valid())
        if pa.types.is_floating(self.low.type):
            number = pc.invert(pc.or_(pc.is_nan(self.low), pc.is_nan(self.high)))
            bounded = pc.and_(bounded, pc.fill_null(number, False))
        return ~as_bools(bounded)

    def may_satisfy(self, op: str, value: Any) -> Numbers:
        """For each file, whether the comparison `column op value` may be true for one of its rows, by its bounds and bucket. A column of doubles may
        also have NaN, which is outside the bounds."""
        mask = self._may_satisfy(op, value)
        kind = _BUCKETED.get(type(value)) if op == "=" else None
        if kind is None or not self._files_by_bucket_count:
            return mask

        def number_of(count: int) -> Numbers | None:
            number = bucket_number(value, kind, count)
            return None if number is None else np.array([number])

        return mask & self._in_buckets(number_of)

    def _may_satisfy(self, op: str, value: Any) -> Numbers:
        everywhere = np.ones(len(self.low), np.bool_)
        is_floating = pa.types.is_floating(self.low.type)
        if op == "<>" or (isinstance(value, float) and (math.isnan(value) or not is_floating)):
            return everywhere
        if is_floating and isinstance(value, int) and abs(value) > _EXACT_AT_MOST:
            return everywhere  # the double next to the integer may be another number
        if op in (">", ">=") and is_floating:
            return everywhere  # NaN is above every number and not within the bounds
        try:
            scalar = pa.scalar(value, pa.float64() if is_floating else self.low.type)
            if scalar.as_py() != value:
                return everywhere  # `scalar` has another value: Arrow cuts a decimal to an integer, and an instant to a day
            low, high = (array.cast(pa.float64()) if is_floating else array for array in (self.low, self.high))
            if pa.types.is_boolean(scalar.type):
                scalar, low, high = (part.cast(pa.int8()) for part in (scalar, low, high))
            conditions = {
                "=": lambda: pc.and_(pc.less_equal(low, scalar), pc.greater_equal(high, scalar)),
                "<": lambda: pc.less(low, scalar),
                "<=": lambda: pc.less_equal(low, scalar),
                ">": lambda: pc.greater(high, scalar),
                ">=": lambda: pc.greater_equal(high, scalar),
            }
            return as_bools(pc.fill_null(conditions[op](), True)) | self._open
        except (pa.ArrowException, OverflowError, TypeError):
            return everywhere  # the column's type has no such value

    def may_have_any(self, values: pa.Array) -> Numbers:
        """For each file, whether one of its rows may have one of `values`, by its bounds and bucket. `values` are distinct and not null."""
        if pa.types.is_floating(self.low.type) or pa.types.is_floating(values.type) or not len(self.low):
            return np.ones(len(self.low), np.bool_)
        try:
            if values.type != self.low.type:
                values = values.cast(self.low.type)
            if len(values) <= _VALUES_EACH:
                marks = (self.may_satisfy("=", value.as_py()) for value in values)
                return functools.reduce(np.logical_or, marks, np.zeros(len(self.low), np.bool_))
            in_buckets = self._in_buckets(functools.partial(bucket_numbers, values))
            # Each bound and value is replaced by its rank among all of them: an integer, which numpy can search for whatever the type is.
            everything = pa.chunked_array([self.low, self.high, values]).combine_chunks()
            ranks = pc.rank(everything, tiebreaker="dense")
        except (pa.ArrowException, OverflowError, ValueError):
            return np.ones(len(self.low), np.bool_)
        files = len(self.low)
        numbers = as_int64(ranks.cast(pa.int64()))
        low, high, ordered = numbers[:files], numbers[files : 2 * files], np.sort(numbers[2 * files :])
        places = np.searchsorted(ordered, low)
        inside = (places < len(ordered)) & (ordered[np.minimum(places, len(ordered) - 1)] <= high)
        return (inside | self._open) & in_buckets


def _fit(bounds: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """The bounds as an array of type `kind`; null for a bound that this type cannot hold, such as a rounded decimal with one more digit."""
    try:
        return pa.array(bounds, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return pa.array([bound if _is_of_type(bound, kind) else None for bound in bounds], kind)


def _is_of_type(bound: Any, kind: pa.DataType) -> bool:
    try:
        pa.scalar(bound, kind)
        return True
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return False


_EXACT_AT_MOST = 2**53  # a double can hold each integer up to this one
_VALUES_EACH = 16  # up to this many values are compared with the bounds one after the other


def may_match_files(node: Predicate, stats: Callable[[str], StatsColumns | None], count: int) -> Numbers:
    """`may_match` for many files at once: for each of `count` files, whether it may have a row for which the predicate is true."""
    match node:
        case And(parts):
            return functools.reduce(np.logical_and, (may_match_files(part, stats, count) for part in parts))
        case Or(parts):
            return functools.reduce(np.logical_or, (may_match_files(part, stats, count) for part in parts))
        case Constant(value, None):
            return np.full(count, value is True)
    columns = stats(str(node.column))
    is_constant = isinstance(node, Constant)
    unknown = np.full(count, not is_constant or (isinstance(node, Constant) and node.value is True))
    if columns is None:
        return unknown
    return np.where(columns.known, _may_match_known(node, columns, count), unknown)


def _may_match_known(node: Predicate, columns: StatsColumns, count: int) -> Numbers:
    everywhere = np.ones(count, np.bool_)
    if isinstance(node, IsNull):
        if node.negated:
            return ~columns.all_null
        return as_bools(pc.fill_null(pc.not_equal(columns.null_counts, 0), True))
    if isinstance(node, NullSafeEqual) and node.negated:
        return everywhere
    match node:
        case Constant(value, _):
            mask = np.full(count, value is True)
        case Compare(_, op, value):
            mask = columns.may_satisfy(op, value)
        case NullSafeEqual(_, value, _):
            mask = everywhere if value is None else columns.may_satisfy("=", value)
        case In(_, values, _, negated=False):
            mask = _may_have(columns, values, everywhere)
        case Among(_, values):
            mask = columns.may_have_any(values)
        case StartsWith(_, prefix, negated=False) if pa.types.is_string(columns.low.type):
            length = len(prefix)
            low, high = (pc.utf8_slice_codeunits(array, 0, length) for array in (columns.low, columns.high))
            outside = pc.or_kleene(pc.less(high, prefix), pc.greater(low, prefix))
            mask = ~as_bools(pc.fill_null(outside, False))
        case _:
            mask = everywhere
    return mask & ~columns.all_null


def _may_have(columns: StatsColumns, values: tuple[Any, ...], everywhere: Numbers) -> Numbers:
    if not values:
        return ~everywhere
    if any(isinstance(value, float) for value in values):
        return functools.reduce(np.logical_or, (columns.may_satisfy("=", value) for value in values))
    try:
        array = pa.array(list(values), columns.low.type)
        return columns.may_have_any(pc.unique(array)) if array.to_pylist() == [*values] else everywhere
    except (pa.ArrowException, OverflowError):
        return everywhere
