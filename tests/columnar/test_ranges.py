"""Ranges beside a loop over all rows: which row wins, which rows hold a value, at all bounds, of all types, with groups and without."""

from __future__ import annotations

import dataclasses
import decimal
import math
import random
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
from hypothesis import example, given
from hypothesis import strategies as st

from pyspark_lookup.columnar import ranges as ranges_module
from pyspark_lookup.columnar.ranges import NONE, Pick, RangeIndex, Ranges, Stabbing
from tests.support.fuzzing import fuzzed

_TEXT = st.text("a\0b", max_size=2) | st.sampled_from(["aaaaaaaa", "aaaaaaaa\0", "aaaaaaaab", "a" * 16, "a" * 17, "é"])
_KINDS: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int32(): st.integers(-4, 4),
    pa.int64(): st.sampled_from([-(2**63), -1, 0, 1, 2, 2**63 - 1]),
    pa.float64(): st.sampled_from([-math.inf, -1.5, -0.0, 0.0, 1.5, 2.0, math.inf, math.nan]),
    pa.bool_(): st.booleans(),
    pa.date32(): st.integers(-3, 3),
    pa.timestamp("us", "UTC"): st.sampled_from([-(2**62), -1, 0, 1, 2**62]),
    pa.string(): _TEXT,
    pa.binary(): st.binary(max_size=2) | st.sampled_from([b"\xff", b"\xff\xff", b"a\xff"]),
    pa.decimal128(9, 2): st.integers(-3, 3).map(decimal.Decimal),
    pa.decimal128(38, 1): st.sampled_from([-(10**36), -1, 0, 1, 2, 10**36]).map(decimal.Decimal),
}


def order(value: Any) -> Any:
    """A value as Spark orders it."""
    if isinstance(value, float):
        return (1, 0.0) if math.isnan(value) else (0, value)
    return value.encode() if isinstance(value, str) else value


@dataclasses.dataclass
class Case:
    kind: pa.DataType
    rows: list[tuple[Any, Any, int]]
    values: list[tuple[Any, int]]
    closed: tuple[bool, bool]
    groups: int | None

    def holding(self, value: Any, group: int) -> list[int]:
        """The rows that hold a value, one after the other."""
        return [
            number
            for number, (low, high, row_group) in enumerate(self.rows)
            if (self.groups is None or (row_group == group and group >= 0))
            and (low is None or high is None or order(low) <= order(high))
            and (low is None or order(low) < order(value) or (self.closed[0] and order(low) == order(value)))
            and (high is None or order(value) < order(high) or (self.closed[1] and order(value) == order(high)))
        ]

    def column(self, values: list[Any]) -> pa.Array:
        """The values behind one that is cut off, so that the array has an offset."""
        return pa.array([None, *values], self.kind)[1:]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from(list(_KINDS)))
    drawn_bound, groups = st.none() | _KINDS[kind], draw(st.sampled_from([None, 1, 3]))
    group = st.integers(-1, (groups or 1) - 1)
    rows = draw(st.lists(st.tuples(drawn_bound, drawn_bound, group), max_size=9))
    values = draw(st.lists(st.tuples(_KINDS[kind], group), max_size=6))
    return Case(kind, rows, values, (draw(st.booleans()), draw(st.booleans())), groups)


def _numbers(groups: int | None, numbers: list[int]) -> np.ndarray[Any, Any] | None:
    return None if groups is None else np.array(numbers, np.int64)


# The first row covers five segments: two blocks of four.
_AROUND = [(0, 10, 0), (2, 4, 0), (6, 8, 0)]
_ZEROS = [("a", None, 0), ("a\0", "a\0", 0), ("a" * 8, "a" * 8 + "\0", 0)]


@given(cases(), st.sampled_from(Pick), st.sampled_from([1, 3, 2**18]))
@example(Case(pa.int64(), _AROUND, [(value, 0) for value in range(11)], (True, False), None), Pick.NARROWEST, 2**18)
@example(
    Case(pa.string(), _ZEROS, [(text, 0) for row in _ZEROS for text in (row[0], row[0] + "\0")], (True, True), None),
    Pick.NEWEST,
    2**18,
)
def test_ranges_are_found(case: Case, pick: Pick, at_once: int) -> None:
    """The right range is found whichever row wins, and however many rows are sorted at once."""
    lows, highs = (case.column([row[side] for row in case.rows]) for side in (0, 1))
    ranges = Ranges.from_bounds(lows, highs, case.closed, _numbers(case.groups, [row[2] for row in case.rows]))
    with mock.patch.object(ranges_module, "_ROWS_AT_ONCE", at_once):
        index = RangeIndex.build(ranges, pick, case.groups or 1)
    positions = ranges.positions(case.column([value for value, _ in case.values]))
    groups = _numbers(case.groups, [group for _, group in case.values])
    winners, segments = index.find(positions, groups).tolist(), index.find_segments(positions, groups)
    numbers, rows = Stabbing.from_ranges(ranges, case.groups or 1).find(positions, groups)
    for number, (value, group) in enumerate(case.values):
        holding = case.holding(value, group)
        assert rows[numbers == number].tolist() == holding
        is_shared = index.is_shared is not None and bool(index.is_shared[segments[number]]) and segments[number] >= 0
        assert is_shared == (len(holding) > 1)
        assert winners[number] in (holding or [NONE])
        if pick is Pick.NEWEST and holding:
            starts = [case.rows[row][0] for row in holding]
            latest = max((start is not None, order(start) if start is not None else 0) for start in starts)
            last = [
                r
                for r, s in zip(holding, starts, strict=True)
                if (s is not None) == latest[0] and (s is None or order(s) == latest[1])
            ]
            assert winners[number] == last[-1]


@fuzzed(160)
@given(
    st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 9)), max_size=12), st.lists(st.integers(-10, 20), max_size=8)
)
def test_the_narrowest_wins(rows: list[tuple[int, int]], values: list[int]) -> None:
    """The narrowest range wins whatever the type: integers, doubles, decimals of 38 digits, addresses."""
    lows, highs = [low for low, _ in rows], [low + size for low, size in rows]
    expected = [
        min(((size, -low, -n, n) for n, (low, size) in enumerate(rows) if low <= value <= low + size), default=(NONE,))[
            -1
        ]
        for value in values
    ]
    for kind in (pa.int64(), pa.float64(), pa.decimal128(38, 5)):
        ranges = Ranges.from_bounds(
            *(pa.array(side, pa.int64()).cast(kind, safe=False) for side in (lows, highs)), (True, True)
        )
        index = RangeIndex.build(ranges, Pick.NARROWEST)
        assert index.find(ranges.positions(pa.array(values, pa.int64()).cast(kind))).tolist() == expected


_WORDS = st.text("ab\0", max_size=3) | st.sampled_from(["a" * 9, "a" * 9 + "b"])


@fuzzed(160)
@given(
    st.sampled_from([pa.string(), pa.binary()]),
    st.lists(st.none() | _WORDS | st.just("\xff"), max_size=8),
    st.lists(_WORDS | st.sampled_from(["\xff\xff", "b" * 20]), max_size=6),
)
def test_the_longest_prefix_wins(kind: pa.DataType, prefixes: list[str | None], values: list[str]) -> None:
    def encode(text: str | None) -> Any:
        return text if text is None or pa.types.is_string(kind) else text.encode("latin-1")

    ranges = Ranges.from_prefixes(pa.array([encode(prefix) for prefix in prefixes], kind))
    winners = RangeIndex.build(ranges, Pick.NARROWEST).find(ranges.positions(pa.array(map(encode, values), kind)))
    for value, winner in zip(values, winners.tolist(), strict=True):
        matching = [(len(p), n) for n, p in enumerate(prefixes) if p is not None and value.startswith(p)]
        assert winner == max(matching, default=(0, NONE))[1]


@given(st.integers(0, 2**32), st.sampled_from([5, 2**20, 2**40, 2**63]))
def test_groups_with_many_segments(seed: int, spread: int) -> None:
    """The last row of the group that begins before the value is found, also for values below and above all others of the group."""
    draw = random.Random(seed)

    def number() -> int:
        return draw.choice([draw.randrange(-spread, spread), draw.randrange(-(2**63), 2**63), -(2**63), 2**63 - 1])

    rows = [(draw.randrange(4), draw.randrange(-spread, spread)) for _ in range(draw.randrange(80))]
    values = [(draw.randrange(-1, 4), number()) for _ in range(40)]
    groups = np.array([group for group, _ in rows], np.int64)
    ranges = Ranges.from_bounds(pa.array([low for _, low in rows], pa.int64()), None, (True, False), groups)
    index = RangeIndex.build(ranges, Pick.NEWEST, 4)
    winners = index.find(
        ranges.positions(pa.array([value for _, value in values])), np.array([group for group, _ in values])
    )
    for (group, value), winner in zip(values, winners.tolist(), strict=True):
        before = [(low, row) for row, (row_group, low) in enumerate(rows) if row_group == group and low <= value]
        assert winner == max(before, default=(0, NONE))[1]
