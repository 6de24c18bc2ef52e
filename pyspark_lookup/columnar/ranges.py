"""`RangeIndex`: finds the rows whose range holds a value, for ranges of numbers, times, text and binary, and so for networks and prefixes.

The ranges of a group (the rows with one key; without keys all rows are one group) cut its values into segments. A build finds for each segment
the row that wins there. A range has two ends, so there are at most twice as many segments as rows. A lookup is one search for the segment,
in a table by the upper bits of the value and then among the few segments of its entry. No step of a build or lookup is a Python loop over rows.
An index and a tree are plain arrays, which may be memory-mapped.

Values are compared as int64 *positions*. A value of up to 64 bits has an int64 of its own (`codes_of`). For others, such as text and long
decimals, the position says where they stand among the sorted bounds (`SortedBytes`): bound number n has 2n, values between bounds n - 1 and n have 2n - 1.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.keys import Numbers, as_bools, offsets_and_data
from pyspark_lookup.core.forks import cached_property

LEAST, MOST = -(2**63), 2**63 - 1
_WORD = 8


class Pick(enum.Enum):
    """Which range wins, if several hold the same value. In a tie, the later row wins."""

    NARROWEST = "the smallest range, then the one that begins last, then the one that ends first"
    NEWEST = "the range that begins last"


# --- values as positions --------------------------------------------------------------------------


def codes_of(array: pa.Array) -> Numbers | None:
    """The values as int64 in the same order, undefined for nulls; None if 64 bits do not hold all values of the type.

    As in Spark, NaN is larger than all numbers, and -0.0 equals 0.0.
    """
    kind = array.type
    if pa.types.is_decimal(kind) and kind.precision <= 18:
        return _values(array.cast(pa.decimal128(kind.precision, kind.scale)), np.int64, 2)[::2]
    if pa.types.is_floating(kind):
        numbers = _doubles(array) + 0.0
        numbers[np.isnan(numbers)] = np.nan
        bits = numbers.view(np.int64)
        return np.asarray(np.where(bits < 0, bits ^ np.int64(MOST), bits))
    if pa.types.is_boolean(kind):
        return as_bools(array.fill_null(False)).astype(np.int64)
    if pa.types.is_integer(kind) or pa.types.is_temporal(kind):  # Spark's integers have signs
        return _values(array, np.dtype(f"i{kind.bit_width // 8}")).astype(np.int64, copy=False)
    return None


def _values(array: pa.Array, dtype: Any, each: int = 1) -> Numbers:
    """The values of an array of fixed width; each value is `each` consecutive numbers. Undefined for nulls."""
    values = np.frombuffer(array.buffers()[1] or b"", dtype, each * (array.offset + len(array)))
    return values[each * array.offset :]


def _doubles(array: pa.Array) -> Numbers:
    return _values(array.cast(pa.float64()), np.float64)


def sortable_bytes(array: pa.Array) -> pa.Array:
    """The values as binary that sorts as they do."""
    kind = array.type
    if not pa.types.is_decimal(kind):
        return array.cast(pa.large_binary())
    values = join_words(_words(array)).cast(pa.large_binary())
    return pc.if_else(array.is_valid(), values, None) if array.null_count else values


ADDRESS = pa.binary(16)
"""The type of addresses of networks: 16 bytes, big-endian."""


def join_words(words: Sequence[Numbers]) -> pa.Array:
    """Unsigned integers as big-endian binary, which sorts in the same way. `words`: their 64-bit words, the most significant first."""
    joined = np.stack(words, axis=1).astype(">u8")
    return pa.Array.from_buffers(pa.binary(_WORD * len(words)), len(joined), [None, pa.py_buffer(joined)])


def _words(array: pa.Array) -> list[Numbers]:
    """Decimals or addresses as unsigned integers that sort in the same way, each in 64-bit words, the most significant first.

    Undefined for nulls.
    """
    kind = array.type
    if kind == ADDRESS:
        halves = _values(array, ">u8", 2).astype(np.uint64)
        return [halves[::2], halves[1::2]]
    if kind.bit_width < 128:
        array = array.cast(pa.decimal128(kind.precision, kind.scale))
    count = array.type.bit_width // 64
    values = _values(array, np.uint64, count)
    words = [values[number::count] for number in reversed(range(count))]
    return [words[0] ^ np.uint64(2**63), *words[1:]]


class SortedBytes:
    """Distinct binary values in ascending order, and the search for others among them.

    `offsets` (int64, one more than there are values) and `data`: the bytes of all values, followed by eight more bytes. `first`: the first word
    (eight bytes) of each value. `longest`: an array with one number, the length of the longest value in bytes.
    """

    def __init__(self, offsets: Numbers, data: Numbers, first: Numbers, longest: Numbers) -> None:
        self._bytes, self._first, self._longest = _Bytes(offsets, data), first, int(longest[0])

    @classmethod
    def from_values(cls, values: pa.Array) -> SortedBytes:
        """The distinct values of some binary values, which may be in any order and have nulls."""
        distinct = pc.unique(values).drop_null()
        stored = _Bytes.from_values(distinct.take(pc.sort_indices(distinct)))
        longest = np.diff(stored.offsets).max(initial=0, keepdims=True)
        return cls(stored.offsets, stored.data, stored.words(np.arange(len(distinct)), 0), longest)

    @property
    def arrays(self) -> dict[str, Numbers]:
        """The arrays that `__init__` takes, by name."""
        longest = np.array([self._longest])
        return {"offsets": self._bytes.offsets, "data": self._bytes.data, "first": self._first, "longest": longest}

    def positions(self, values: pa.Array) -> Numbers:
        """The position of each binary value: 2n if it equals stored value number n, 2n - 1 if it equals none and n are smaller; undefined for nulls."""
        requested, stored = _Bytes.from_values(values), self._bytes
        first = requested.words(np.arange(len(values)), 0)
        low, high = np.searchsorted(self._first, first, "left"), np.searchsorted(self._first, first, "right")
        # Between `low` and `high` all words so far are equal. Each round compares the next word, with zeros after the end.
        for number in range(1, -(-self._longest // _WORD)):
            rows = np.flatnonzero(low < high)
            if not len(rows):
                break
            words, start, stop = requested.words(rows, number), low[rows], high[rows]
            low[rows] = stored.bisect(start, stop, number, words, np.less)
            high[rows] = stored.bisect(start, stop, number, words, np.less_equal)
        # The length tells "a" from "a\0".
        rows = np.flatnonzero(low < high)
        lengths, stop = requested.lengths(rows), high[rows]
        start = bisect(low[rows], stop, lambda middle, n: stored.lengths(middle) < lengths[n])
        is_equal = start < stop
        is_equal[is_equal] = stored.lengths(start[is_equal]) == lengths[is_equal]
        positions = 2 * low - 1
        positions[rows] = 2 * start - ~is_equal
        return positions


class _Bytes:
    """Binary values as words of eight bytes, big-endian, padded with zeros. `offsets`, `data`: see `SortedBytes`."""

    def __init__(self, offsets: Numbers, data: Numbers) -> None:
        self.offsets, self.data = offsets, data
        self._every_word = np.ndarray((len(data) - _WORD + 1,), "<u8", data, 0, (1,))

    @classmethod
    def from_values(cls, values: pa.Array) -> _Bytes:
        """The values of a binary array; undefined for nulls."""
        offsets, data = offsets_and_data(values)
        inside = data[offsets[0] : offsets[-1]]
        return cls(offsets - offsets[0], np.concatenate([inside, np.zeros(_WORD, np.uint8)]))

    def lengths(self, rows: Numbers) -> Numbers:
        """The length of the value in each of `rows`, in bytes."""
        return np.asarray(self.offsets[rows + 1] - self.offsets[rows])

    def words(self, rows: Numbers, number: int) -> Numbers:
        """Word `number` of the value in each of `rows`, as uint64, which compares as the bytes do."""
        begins = self.offsets[rows] + number * _WORD
        left = np.clip(self.offsets[rows + 1] - begins, 0, _WORD).astype(np.uint64)
        words = self._every_word[np.minimum(begins, len(self._every_word) - 1)].byteswap()
        cut = np.minimum((np.uint64(_WORD) - left) * np.uint64(8), np.uint64(63))
        return np.asarray(np.where(left > 0, words >> cut << cut, np.uint64(0)))

    def bisect(self, low: Numbers, high: Numbers, number: int, words: Numbers, is_below: np.ufunc) -> Numbers:
        """For each pair of bounds the first row from `low` up to `high` for which `is_below(its word, the pair's word)` is false.

        `number`: which word of a row is compared.
        """
        return bisect(low, high, lambda middle, which: is_below(self.words(middle, number), words[which]))


def bisect(low: Numbers, high: Numbers, is_below: Callable[[Numbers, Numbers], Numbers]) -> Numbers:
    """For each pair of bounds the first number from `low` up to `high` for which `is_below` is false.

    `is_below(numbers, which)`: called with one number for each of the pairs `which`.
    """
    low, high = low.copy(), high.copy()
    which = np.flatnonzero(low < high)
    while len(which):
        middle = (low[which] + high[which]) >> 1
        below = is_below(middle, which)
        low[which] = np.where(below, middle + 1, low[which])
        high[which] = np.where(below, high[which], middle)
        which = which[low[which] < high[which]]
    return low


def positions_of(values: pa.Array, bounds: SortedBytes | None) -> Numbers:
    """The positions of values, see `Ranges.bounds`; undefined for nulls."""
    if bounds is not None:
        return bounds.positions(sortable_bytes(values))
    codes = codes_of(values)
    assert codes is not None
    return codes


# --- ranges ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ranges:
    """The ranges of some rows, as the first and last position of each.

    `low`, `high`: the lowest and highest value of each range; null if it has none. `group`: the number of the row's group, -1 for a row that is
    in none (None: all rows are in one group). `is_empty`: whether a row's range holds no value. `bounds`: the sorted bounds, among which values
    get their positions (None: the positions come from `codes_of`).
    """

    first: Numbers
    last: Numbers
    low: pa.Array
    high: pa.Array | None
    group: Numbers | None
    is_empty: Numbers
    bounds: SortedBytes | None

    @classmethod
    def from_bounds(
        cls, low: pa.Array, high: pa.Array | None, closed: tuple[bool, bool], group: Numbers | None = None
    ) -> Ranges:
        """The ranges from `low` to `high`, which have one type. A null bound is open; without `high`, all ranges are open above.

        `closed`: whether the ranges hold the bounds themselves.
        """
        sides = [low] if high is None else [low, high]
        bounds, codes = None, [codes_of(side) for side in sides]
        if codes[0] is None:
            keys = [sortable_bytes(side) for side in sides]
            bounds = SortedBytes.from_values(pa.concat_arrays(keys))
            codes = [bounds.positions(key) for key in keys]
        starts, stops = codes[0], codes[-1]
        assert starts is not None
        assert stops is not None
        first, is_after_all = _side(starts, low, 0 if closed[0] else 1, LEAST)
        last, is_before_all = np.full(len(low), MOST), np.zeros(len(low), np.bool_)
        if high is not None:
            last, is_before_all = _side(stops, high, 0 if closed[1] else -1, MOST)
        is_empty = is_after_all | is_before_all | (first > last)
        return cls(first, last, low, high, group, is_empty, bounds)

    @classmethod
    def from_prefixes(cls, prefixes: pa.Array, group: Numbers | None = None) -> Ranges:
        """The ranges of the values (text or binary) that begin with each prefix. A row whose prefix is null holds no value."""
        low = prefixes.cast(pa.large_binary())
        ranges = cls.from_bounds(low, _after(low), (True, False), group)
        return dataclasses.replace(ranges, is_empty=ranges.is_empty | ~_valid(prefixes))

    def positions(self, values: pa.Array) -> Numbers:
        """The positions of values of the ranges' type; undefined for nulls."""
        return positions_of(values, self.bounds)

    def hold(self, positions: Numbers) -> Numbers:
        """Whether each row's range holds the position at the same place of `positions`."""
        return np.asarray((self.first <= positions) & (positions <= self.last) & ~self.is_empty)

    @cached_property
    def _width(self) -> list[Numbers]:
        """The size of each range, as columns of numbers, the most significant first."""
        is_bounded = _valid(self.low) & (False if self.high is None else _valid(self.high))
        parts = _width(self.low, self.high, self.first, self.last)
        return [np.where(is_bounded, part, _widest(part)) for part in parts]

    def best_first(self, pick: Pick, rows: Numbers) -> Numbers:
        """The indices into `rows` (ascending row numbers) in the order in which they win: each row wins over all after it."""
        later_first, begins_last = np.arange(len(rows))[::-1], (~_valid(self.low)[rows], ~self.first[rows])
        if pick is Pick.NEWEST:
            return np.asarray(np.lexsort((later_first, *begins_last)))
        # Of ranges that are inside one another, both may be open, or of one size after rounding: the inner one wins.
        widths = (part[rows] for part in reversed(self._width))
        return np.asarray(np.lexsort((later_first, self.last[rows], *begins_last, *widths)))


def _side(codes: Numbers, bound: pa.Array, step: int, unbounded: int) -> tuple[Numbers, Numbers]:
    """(the position where each range begins or ends, whether the range is empty because nothing lies beyond its excluded bound).

    `step`: from a bound to the first position in the range: 0 if the range holds the bound, else 1 or -1. `unbounded`: the position of a null.
    """
    positions, has_bound = codes + step if step else codes, _valid(bound)
    is_outermost = np.zeros(len(codes), np.bool_)
    if step:
        is_outermost = has_bound & (codes == (MOST if step > 0 else LEAST))
    if bound.null_count:
        positions = np.where(has_bound, positions, unbounded)
    return positions, is_outermost


def _width(low: pa.Array, high: pa.Array | None, first: Numbers, last: Numbers) -> Sequence[Numbers]:
    """The size of each range that has both bounds."""
    kind = low.type
    if high is not None and pa.types.is_floating(kind):
        with np.errstate(invalid="ignore"):
            return (np.nan_to_num(_doubles(high) - _doubles(low), nan=np.inf, posinf=np.inf),)
    if high is not None and (pa.types.is_decimal(kind) or kind == ADDRESS):
        parts, borrow = [], np.zeros(len(low), np.bool_)
        for low_word, high_word in zip(reversed(_words(low)), reversed(_words(high)), strict=True):
            parts.append(high_word - low_word - borrow)
            borrow = (high_word < low_word) | (borrow & (high_word == low_word))
        return parts[::-1]
    # Of text and binary, only ranges inside one another compare.
    return (last.view(np.uint64) - first.view(np.uint64),)


def _widest(width: Numbers) -> Any:
    return np.inf if width.dtype.kind == "f" else np.iinfo(width.dtype).max


def _after(prefixes: pa.Array) -> pa.Array:
    """For each prefix, the lowest binary value above all values that begin with it; null if there is none."""
    offsets, data = offsets_and_data(prefixes)
    lengths, data = np.diff(offsets), data.copy()
    ends = np.maximum(offsets[1:] - 1, 0)
    # Bytes 0xFF at the end, which text does not have, cannot be counted up, so the byte before them is.
    while (is_full := (lengths > 0) & (data[ends] == 255) if len(data) else np.zeros(len(lengths), np.bool_)).any():
        lengths, ends = lengths - is_full, np.maximum(ends - is_full, 0)
    has_successor = lengths > 0
    data[ends[has_successor]] += 1
    kept = np.repeat(np.cumsum(lengths) - lengths, lengths)
    shortened = data[np.repeat(offsets[:-1], lengths) + np.arange(int(lengths.sum())) - kept]
    new_offsets = np.concatenate([[0], np.cumsum(lengths)])
    values = pa.Array.from_buffers(
        pa.large_binary(),
        len(lengths),
        [None, pa.py_buffer(new_offsets), pa.py_buffer(np.ascontiguousarray(shortened))],
    )
    return pc.if_else(pa.array(has_successor), values, None)


def _valid(array: pa.Array) -> Numbers:
    return as_bools(array.is_valid()) if array.null_count else np.ones(len(array), np.bool_)


NONE = -1
_ROWS_AT_ONCE = 2**18
_FEW = 4  # up to this many segments, a group needs no table


@dataclasses.dataclass(frozen=True)
class RangeIndex:
    """The segments into which ranges cut the positions of each group, and the rows that win in them.

    `starts`: the first position of each segment, ascending within a group; the last segment of a group has no end. `winners`: the number of
    the row that wins in a segment, NONE if no range holds it; and NONE once more at the end, for positions before the first segment.
    `is_shared`: whether several ranges hold a segment (None: this is so for no segment).

    Where to search: a group has buckets, about as many as segments, in which its positions come by their upper bits: the bucket of a position is
    its distance from `lows` (of the group), shifted by `shifts`. `table`: for the buckets of all groups the number of the first segment that
    begins in it or later, and the number of all segments. `buckets`: the number of each group's first bucket, and the number of all buckets. If
    each group has one bucket, these three are None. Thus a search takes a step or two instead of twenty.
    """

    starts: Numbers
    winners: Numbers
    table: Numbers
    is_shared: Numbers | None = None
    buckets: Numbers | None = None
    lows: Numbers | None = None
    shifts: Numbers | None = None

    @classmethod
    def build(cls, ranges: Ranges, pick: Pick, groups: int = 1) -> RangeIndex:
        """The index of ranges whose groups have numbers below `groups`."""
        rows, group = _by_group(ranges)
        small = np.int32 if len(ranges.first) < 2**31 else np.int64
        counts = np.zeros(groups, np.int64)
        parts: list[tuple[Numbers, Numbers, Numbers]] = []
        for start, stop in itertools.pairwise(_cuts(group, len(rows)).tolist()):
            starts, winners, is_shared, segment_groups = _cut_segments(
                ranges, pick, rows[start:stop], group[start:stop]
            )
            parts.append((starts, winners.astype(small), is_shared))
            if len(segment_groups):
                first = segment_groups[0]
                counts[first : segment_groups[-1] + 1] = np.bincount(segment_groups - first)
        starts, winners, is_shared = map(np.concatenate, zip(*parts, strict=True))
        parts.clear()
        table, *buckets = _tables(starts, counts)
        return cls(starts, np.append(winners, small(NONE)), table, is_shared if is_shared.any() else None, *buckets)

    @property
    def arrays(self) -> dict[str, Numbers]:
        """The arrays that `__init__` takes, by name, without those that are None."""
        arrays = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: array for name, array in arrays.items() if array is not None}

    def find_segments(self, positions: Numbers, groups: Numbers | None = None) -> Numbers:
        """The number of the segment of each position in its group; -1 if none. `groups`: -1 for a position without a group (None: all positions
        are in group 0)."""
        if not len(self.starts):
            return np.full(len(positions), -1)
        first: Numbers = np.zeros(1, np.int64) if groups is None else np.maximum(groups, 0)
        slots = first
        if self.buckets is not None and self.lows is not None and self.shifts is not None:
            group, first = first, self.buckets[first].astype(np.int64)
            lows = self.lows[group]
            above = (np.maximum(positions, lows) - lows).view(np.uint64) >> self.shifts[group].astype(np.uint64)
            slots = first + np.minimum(above, (self.buckets[group + 1] - first - 1).astype(np.uint64)).view(np.int64)
        begins, stops = self.table[slots].astype(np.int64), self.table[slots + 1].astype(np.int64)
        if len(begins) != len(positions):
            begins, stops = (np.full(len(positions), bound[0]) for bound in (begins, stops))
        after = bisect(begins, stops, lambda middle, which: self.starts[middle] <= positions[which])
        is_before = (after == begins) & (slots == first)
        if groups is not None:
            is_before |= groups < 0
        return np.asarray(np.where(is_before, -1, after - 1))

    def find(self, positions: Numbers, groups: Numbers | None = None) -> Numbers:
        """The number of the row that wins at each position of its group; NONE if no range holds it."""
        return self.winners[self.find_segments(positions, groups)]


def _by_group(ranges: Ranges) -> tuple[Numbers, Numbers]:
    """(the rows whose ranges hold a value and that are in a group, by group and then in their order, their groups)."""
    if ranges.group is None:
        rows = np.flatnonzero(~ranges.is_empty)
        return rows, np.zeros(len(rows), np.int64)
    rows = np.flatnonzero(~ranges.is_empty & (ranges.group >= 0))
    group = ranges.group[rows]
    if (group[1:] < group[:-1]).any():
        order = np.argsort(group, kind="stable")
        rows, group = rows[order], group[order]
    return rows, group


def _cuts(group: Numbers, rows: int) -> Numbers:
    """Bounds that cut rows, ordered by group, into parts of about `_ROWS_AT_ONCE` rows, and no group into two: each part is sorted in the
    processor's cache."""
    inner = np.searchsorted(group, group[_ROWS_AT_ONCE:rows:_ROWS_AT_ONCE])
    return np.unique(np.concatenate([[0], inner, [rows]])) if rows else np.array([0, 0])


def _cut_segments(
    ranges: Ranges, pick: Pick, rows: Numbers, group: Numbers
) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """(first position, winner, whether several ranges hold it, group) of each segment of the groups of some `rows`, ordered by `group`."""
    first, last = ranges.first[rows], ranges.last[rows]
    # Segments begin where a range begins, and after the last position of one.
    ends = np.flatnonzero(last < MOST)
    edges = np.concatenate([first, last[ends] + 1])
    edge_groups = np.concatenate([group, group[ends]])
    is_one_group = not len(group) or group[0] == group[-1]
    order = np.argsort(edges, kind="stable") if is_one_group else np.lexsort((edges, edge_groups))
    sorted_edges, sorted_groups = edges[order], edge_groups[order]
    is_new = np.ones(len(order), np.bool_)
    is_new[1:] = (sorted_edges[1:] != sorted_edges[:-1]) | (sorted_groups[1:] != sorted_groups[:-1])
    segment_of = np.empty(len(order), np.int64)
    segment_of[order] = np.cumsum(is_new) - 1
    starts, segment_groups = sorted_edges[is_new], sorted_groups[is_new]
    begins, stops = segment_of[: len(rows)], np.searchsorted(segment_groups, group, "right")
    stops[ends] = segment_of[len(rows) :]
    best_first = ranges.best_first(pick, rows)
    covering = _cover(begins[best_first], stops[best_first], len(starts))
    winners = np.concatenate([rows[best_first], [NONE]])[covering]
    depth = np.bincount(begins, minlength=len(starts) + 1) - np.bincount(stops, minlength=len(starts) + 1)
    return starts, winners, np.cumsum(depth)[: len(starts)] > 1, segment_groups


def _tables(starts: Numbers, counts: Numbers) -> tuple[Numbers, Numbers | None, Numbers | None, Numbers | None]:
    """`table`, `buckets`, `lows` and `shifts` of a `RangeIndex`. `counts`: the number of each group's segments."""
    offsets = np.concatenate([[0], np.cumsum(counts)])
    kind = np.int32 if len(starts) < 2**31 else np.int64
    is_large = counts > _FEW
    large = np.flatnonzero(is_large)
    if not len(large):
        return offsets.astype(kind), None, None, None
    # A range without a lowest value would stretch the table over all of int64.
    begins = offsets[large]
    low = starts[begins + (starts[begins] == LEAST)]
    spread = (starts[offsets[large + 1] - 1] - low).view(np.uint64)
    lows, shifts, sizes = np.zeros(len(counts), np.int64), np.zeros(len(counts), np.uint8), np.ones_like(counts)
    lows[large] = low
    shifts[large] = np.maximum(_bit_lengths(spread) - _bit_lengths(counts[large]), 0)
    sizes[large] = (spread >> shifts[large].astype(np.uint64)).astype(np.int64) + 1
    buckets = np.concatenate([[0], np.cumsum(sizes)])
    table = np.zeros(int(buckets[-1]) + 1, kind)
    cuts = np.unique(np.searchsorted(offsets, np.arange(0, len(starts), _ROWS_AT_ONCE)))
    for first, last in itertools.pairwise([*cuts.tolist(), len(counts)]):
        own = np.repeat(np.arange(first, last), counts[first:last])
        inside = np.maximum(starts[offsets[first] : offsets[last]], lows[own]) - lows[own]
        above = np.where(is_large[own], inside.view(np.uint64) >> shifts[own].astype(np.uint64), np.uint64(0))
        places = buckets[own] - buckets[first] + above.view(np.int64)
        table[buckets[first] + 1 : buckets[last] + 1] = np.bincount(places, minlength=buckets[last] - buckets[first])
    np.cumsum(table, out=table)
    return table, buckets.astype(np.int32 if buckets[-1] < 2**31 else np.int64), lows, shifts


def _bit_lengths(numbers: Numbers) -> Numbers:
    """The number of bits of each number, or one more: the numbers are rounded to doubles first."""
    return np.frexp(numbers.astype(np.float64))[1].astype(np.int64)


def _cover(begins: Numbers, stops: Numbers, segments: int) -> Numbers:
    """For each segment the least number of a row that covers it; the number of rows if none does. Row n covers the segments from `begins[n]`
    to before `stops[n]`.

    The segments of a row are those of two blocks, which may overlap and whose size is a power of two. From the largest blocks down, each block
    hands its least row on to its two halves.
    """
    rows, least = np.arange(len(begins)), np.full(segments, len(begins))
    levels = np.frexp((stops - begins).astype(np.float64))[1].astype("int64") - 1
    by_level = np.argsort(levels, kind="stable")
    highest = int(levels.max(initial=0))
    ends = np.searchsorted(levels[by_level], np.arange(highest + 2))
    for level in range(highest, -1, -1):
        size = 1 << level
        if level < highest:
            handed_on = least.copy()
            np.minimum(handed_on[size:], least[: max(segments - size, 0)], out=handed_on[size:])
            least = handed_on
        some = by_level[ends[level] : ends[level + 1]]
        np.minimum.at(least, begins[some], rows[some])
        np.minimum.at(least, stops[some] - size, rows[some])
    return least


class Stabbing:
    """All rows whose range holds a position: an interval tree without pointers, over the rows of each group ordered by their first position.

    A level of the tree has the largest `last` of each block of 2, 4, 8, … rows, so that blocks whose ranges have all ended are skipped. `rows`:
    the number of each row, `firsts`: its first position. `offsets`: the place of the first row of each group, and the number of all rows.
    `lasts`: the levels, one after the other: the first has the `last` of each row.
    """

    def __init__(self, rows: Numbers, firsts: Numbers, offsets: Numbers, lasts: Numbers) -> None:
        self._rows, self._firsts, self._offsets, self._lasts = rows, firsts, offsets, lasts
        self._levels, begin, size = [lasts[: len(rows)]], len(rows), len(rows)
        while size > 1:
            size = (size + 1) // 2
            self._levels.append(lasts[begin : begin + size])
            begin += size

    @classmethod
    def from_ranges(cls, ranges: Ranges, groups: int = 1) -> Stabbing:
        """The tree of ranges whose groups have numbers below `groups`."""
        rows, group = _by_group(ranges)
        order = np.lexsort((ranges.first[rows], group))
        offsets = np.concatenate([[0], np.cumsum(np.bincount(group, minlength=groups))])
        rows = rows[order]
        levels = [ranges.last[rows]]
        while len(levels[-1]) > 1:
            level = levels[-1]
            even = np.concatenate([level, [LEAST]]) if len(level) % 2 else level
            levels.append(np.maximum(even[::2], even[1::2]))
        small = np.int32 if len(ranges.first) < 2**31 else np.int64
        return cls(rows.astype(small), ranges.first[rows], offsets.astype(small), np.concatenate(levels))

    @property
    def arrays(self) -> dict[str, Numbers]:
        """The arrays that `__init__` takes, by name."""
        return {"rows": self._rows, "firsts": self._firsts, "offsets": self._offsets, "lasts": self._lasts}

    def find(self, positions: Numbers, groups: Numbers | None = None) -> tuple[Numbers, Numbers]:
        """All pairs of a position and a row whose range holds it: (indices of positions, row numbers), ordered by both."""
        groups = np.zeros(len(positions), np.int64) if groups is None else groups
        begins = self._offsets[groups].astype(np.int64)
        stops = np.where(groups >= 0, self._offsets[groups + 1], begins)
        stops = bisect(begins, stops, lambda middle, which: self._firsts[middle] <= positions[which])
        which: Numbers = np.flatnonzero(begins < stops)
        blocks: Numbers = np.zeros(len(which), np.int64)
        for level in range(len(self._levels) - 1, -1, -1):
            if level < len(self._levels) - 1:
                which, blocks = np.repeat(which, 2), (2 * blocks[:, None] + [0, 1]).ravel()
            start, stop = blocks << level, (blocks + 1) << level
            may_hold = (stop > begins[which]) & (start < stops[which])
            which, blocks = which[may_hold], blocks[may_hold]
            may_hold = self._levels[level][blocks] >= positions[which]
            which, blocks = which[may_hold], blocks[may_hold]
        rows = self._rows[blocks].astype(np.int64)
        order = np.lexsort((rows, which))
        return which[order], rows[order]
