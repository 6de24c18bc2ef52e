"""`RangeIndex`: finds the rows whose range holds a value, for ranges of numbers, times, text and binary, and so for networks and prefixes.

The ranges of a group (the rows with one key; without keys all rows are one group) cut its values into segments. A build finds for each segment
the row that wins there. A range has two ends, so there are at most twice as many segments as rows. A lookup is one binary search for the
segment. No step of a build or lookup is a Python loop over rows.

Values are compared as int64 *positions*. A value of up to 64 bits has an int64 of its own (`codes_of`). For others, such as text and long
decimals, the position says where they stand among the sorted bounds (`SortedBytes`): bound number n has 2n, values between bounds n - 1 and n have 2n - 1.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.keys import Numbers, as_bools, offsets_and_data
from pyspark_lookup.core.forks import cached_property

LEAST, MOST = -(2**63), 2**63 - 1
_SIGN = np.int64(MOST)
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
    """The values of an array of fixed width, each as `each` numbers in a row; undefined for nulls."""
    values = np.frombuffer(array.buffers()[1] or b"", dtype, each * (array.offset + len(array)))
    return values[each * array.offset :]


def _doubles(array: pa.Array) -> Numbers:
    return _values(array.cast(pa.float64()), np.float64)


def sortable_bytes(array: pa.Array) -> pa.Array:
    """The values as binary in the same order."""
    kind = array.type
    if not pa.types.is_decimal(kind):
        return array.cast(pa.binary())
    values = join_words(_words(array)).cast(pa.binary())
    return pc.if_else(array.is_valid(), values, None) if array.null_count else values


ADDRESS = pa.binary(16)
"""The type of addresses of networks: 16 bytes, big-endian."""


def join_words(words: Sequence[Numbers]) -> pa.Array:
    """Numbers without signs as big-endian binary, in the same order. `words`: their words (uint64), those that weigh most first."""
    joined = np.stack(words, axis=1).astype(">u8")
    return pa.Array.from_buffers(pa.binary(_WORD * len(words)), len(joined), [None, pa.py_buffer(joined)])


def _words(array: pa.Array) -> list[Numbers]:
    """Decimals or addresses as the words (uint64) of numbers without signs, in the same order; undefined for nulls."""
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
    """Distinct binary values in ascending order, and the search for others among them."""

    def __init__(self, values: pa.Array) -> None:
        self.values = values
        self._bytes = _Bytes(values)
        self._first = self._bytes.words(np.arange(len(values)), 0)

    @classmethod
    def from_values(cls, values: pa.Array) -> SortedBytes:
        """The distinct values of some binary values, which may be in any order and have nulls."""
        distinct = pc.unique(values).drop_null()
        return cls(distinct.take(pc.sort_indices(distinct)))

    def positions(self, values: pa.Array) -> Numbers:
        """The position of each binary value: 2n if it equals stored value number n, 2n - 1 if it equals none and n are smaller; undefined for nulls."""
        requested, stored = _Bytes(values), self._bytes
        first = requested.words(np.arange(len(values)), 0)
        low, high = np.searchsorted(self._first, first, "left"), np.searchsorted(self._first, first, "right")
        # Between `low` and `high` all words so far are equal. Each round compares the next word, with zeros after the end.
        for number in range(1, -(-int(stored.lengths.max(initial=0)) // _WORD)):
            rows = np.flatnonzero(low < high)
            if not len(rows):
                break
            words, start, stop = requested.words(rows, number), low[rows], high[rows]
            low[rows] = stored.bisect(start, stop, number, words, np.less)
            high[rows] = stored.bisect(start, stop, number, words, np.less_equal)
        # The length tells "a" from "a\0".
        rows = np.flatnonzero(low < high)
        lengths, stop = requested.lengths[rows], high[rows]
        start = bisect(low[rows], stop, lambda middle, n: stored.lengths[middle] < lengths[n])
        is_equal = start < stop
        is_equal[is_equal] = stored.lengths[start[is_equal]] == lengths[is_equal]
        positions = 2 * low - 1
        positions[rows] = 2 * start - ~is_equal
        return positions


class _Bytes:
    """Binary values as words of eight bytes, big-endian, padded with zeros."""

    def __init__(self, values: pa.Array) -> None:
        offsets, data = offsets_and_data(values)
        self._starts, self.lengths = offsets[:-1], np.diff(offsets)
        padded = np.concatenate([data, np.zeros(_WORD, np.uint8)])
        self._every_word = np.ndarray((len(padded) - _WORD + 1,), "<u8", padded, 0, (1,))

    def words(self, rows: Numbers, number: int) -> Numbers:
        """Word `number` of the value in each of `rows`, as uint64, which compares as the bytes do."""
        left = np.clip(self.lengths[rows] - number * _WORD, 0, _WORD).astype(np.uint64)
        at = np.minimum(self._starts[rows] + number * _WORD, len(self._every_word) - 1)
        words = self._every_word[at].byteswap()
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
        low = prefixes.cast(pa.binary())
        ranges = cls.from_bounds(low, _after(low), (True, False), group)
        return dataclasses.replace(ranges, is_empty=ranges.is_empty | ~_valid(prefixes))

    def positions(self, values: pa.Array) -> Numbers:
        """The positions of values of the ranges' type; undefined for nulls."""
        if self.bounds is not None:
            return self.bounds.positions(sortable_bytes(values))
        codes = codes_of(values)
        assert codes is not None
        return codes

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
    """The least value (binary) after all that begin with each prefix; null if there is none."""
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
    new_offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    values = pa.Array.from_buffers(
        pa.binary(), len(lengths), [None, pa.py_buffer(new_offsets), pa.py_buffer(np.ascontiguousarray(shortened))]
    )
    return pc.if_else(pa.array(has_successor), values, None)


def _valid(array: pa.Array) -> Numbers:
    return as_bools(array.is_valid()) if array.null_count else np.ones(len(array), np.bool_)


NONE, SEVERAL = -1, -2


@dataclasses.dataclass(frozen=True)
class RangeIndex:
    """The segments into which ranges cut the positions of each group, and the rows that win in them.

    `starts`: the first position of each segment, ascending within a group; the last segment of a group has no end. `winners`: the number of
    the row that wins in a segment, NONE if no range holds it; and NONE once more at the end, for positions before the first segment.
    `is_shared`: whether several ranges hold a segment (None: this is so for no segment).
    `offsets`: for each group the number of its first segment, and the number of all segments.
    """

    starts: Numbers
    winners: Numbers
    is_shared: Numbers | None
    offsets: Numbers

    @classmethod
    def build(cls, ranges: Ranges, pick: Pick, groups: int = 1) -> RangeIndex:
        """The index of ranges whose groups have numbers below `groups`."""
        member = ~ranges.is_empty if ranges.group is None else ~ranges.is_empty & (ranges.group >= 0)
        rows = np.flatnonzero(member)
        group = np.zeros(len(rows), np.int64) if ranges.group is None else ranges.group[rows]
        first, last = ranges.first[rows], ranges.last[rows]
        # Segments begin where a range begins, and after the last position of one.
        ends = np.flatnonzero(last < MOST)
        edges = np.concatenate([first, last[ends] + 1])
        edge_groups = np.concatenate([group, group[ends]])
        order = np.argsort(edges, kind="stable") if groups == 1 else np.lexsort((edges, edge_groups))
        sorted_edges, sorted_groups = edges[order], edge_groups[order]
        is_new = np.ones(len(order), np.bool_)
        is_new[1:] = (sorted_edges[1:] != sorted_edges[:-1]) | (sorted_groups[1:] != sorted_groups[:-1])
        segment_of = np.empty(len(order), np.int64)
        segment_of[order] = np.cumsum(is_new) - 1
        starts, segment_groups = sorted_edges[is_new], sorted_groups[is_new]
        offsets = np.searchsorted(segment_groups, np.arange(groups + 1))
        begins, stops = segment_of[: len(rows)], offsets[group + 1]
        stops[ends] = segment_of[len(rows) :]
        best_first = ranges.best_first(pick, rows)
        winners = np.concatenate([rows[best_first], [NONE]])[_cover(begins[best_first], stops[best_first], len(starts))]
        depth = np.cumsum(
            np.bincount(begins, minlength=len(starts) + 1) - np.bincount(stops, minlength=len(starts) + 1)
        )
        is_shared = depth[: len(starts)] > 1
        small = np.int32 if len(ranges.first) < 2**31 else np.int64
        return cls(starts, np.append(winners, NONE).astype(small), is_shared if is_shared.any() else None, offsets)

    @cached_property
    def _buckets(self) -> _Buckets:
        return _Buckets.from_starts(self.starts)

    def find_segments(self, positions: Numbers, groups: Numbers | None = None) -> Numbers:
        """The number of the segment of each position in its group; -1 if none. `groups`: -1 for a position without a group."""
        if groups is None:
            begins, stops = self._buckets.find(positions)
        else:
            begins = self.offsets[groups]
            stops = np.where(groups >= 0, self.offsets[groups + 1], begins)
        segments = bisect(begins, stops, lambda middle, which: self.starts[middle] <= positions[which]) - 1
        return segments if groups is None else np.asarray(np.where(segments >= begins, segments, -1))

    def find(self, positions: Numbers, groups: Numbers | None = None) -> Numbers:
        """The number of the row that wins at each position of its group; NONE if no range holds it."""
        return self.winners[self.find_segments(positions, groups)]


@dataclasses.dataclass(frozen=True)
class _Buckets:
    """Where to search among ascending `starts`: a table by the upper bits of a position, about as long as `starts`.

    A search in a bucket takes two or three steps instead of twenty, all in the processor's cache.
    """

    low: int
    shift: int
    table: Numbers

    @classmethod
    def from_starts(cls, starts: Numbers) -> _Buckets:
        # A range without a lowest value would stretch the table over all of int64.
        inner = starts[starts > LEAST] if len(starts) and starts[0] == LEAST else starts
        low, high = (int(inner[0]), int(inner[-1])) if len(inner) else (0, 0)
        shift = max((high - low).bit_length() - len(starts).bit_length() - 1, 0)
        count = ((high - low) >> shift) + 1
        table = np.searchsorted(cls(low, shift, np.zeros(count + 1, np.int64))._bucket(starts), np.arange(count + 1))
        return cls(low, shift, table.astype(np.int32 if len(starts) < 2**31 else np.int64))

    def find(self, positions: Numbers) -> tuple[Numbers, Numbers]:
        """The bounds of the search for each position: (the first start that may be after it, the last one)."""
        buckets = self._bucket(positions)
        return self.table[buckets].astype(np.int64), self.table[buckets + 1].astype(np.int64)

    def _bucket(self, positions: Numbers) -> Numbers:
        above = np.maximum(positions, self.low).view(np.uint64) - np.uint64(self.low % 2**64)
        return np.asarray(np.minimum(above >> np.uint64(self.shift), np.uint64(len(self.table) - 2)), np.int64)


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

    A level of the tree has the largest `last` of each block of 2, 4, 8, … rows, so that blocks whose ranges have all ended are skipped.
    """

    def __init__(self, ranges: Ranges, groups: int = 1) -> None:
        member = ~ranges.is_empty if ranges.group is None else ~ranges.is_empty & (ranges.group >= 0)
        rows = np.flatnonzero(member)
        group = np.zeros(len(rows), np.int64) if ranges.group is None else ranges.group[rows]
        order = np.lexsort((ranges.first[rows], group))
        self._rows, self._firsts = rows[order], ranges.first[rows[order]]
        self._offsets = np.searchsorted(group[order], np.arange(groups + 1))
        self._levels = [ranges.last[self._rows]]
        while len(self._levels[-1]) > 1:
            level = self._levels[-1]
            even = np.concatenate([level, [LEAST]]) if len(level) % 2 else level
            self._levels.append(np.maximum(even[::2], even[1::2]))

    def find(self, positions: Numbers, groups: Numbers | None = None) -> tuple[Numbers, Numbers]:
        """All pairs of a position and a row whose range holds it: (indices of positions, row numbers), ordered by both."""
        groups = np.zeros(len(positions), np.int64) if groups is None else groups
        begins = self._offsets[groups]
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
        rows = self._rows[blocks]
        order = np.lexsort((rows, which))
        return which[order], rows[order]
