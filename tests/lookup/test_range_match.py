"""Matches by range beside a loop over all rows: values whose types are not those of the bounds, and the errors."""

from __future__ import annotations

import decimal
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup.columnar.keys import KEY_INDEX
from pyspark_lookup.errors import DamagedFileError, OverlapError
from pyspark_lookup.lookup.range_match import Match, MatchedRanges, MatchKind, RangeMatcher, matching_rows
from pyspark_lookup.options.enums import Overlap

_NUMBERS = [
    pa.int8(), pa.int64(), pa.decimal128(5, 2), pa.decimal128(12, 1), pa.decimal128(18, 0), pa.decimal128(18, 6), pa.decimal128(20, 4),
    pa.decimal128(38, 0), pa.decimal128(38, 18), pa.decimal128(38, 38),
]  # fmt: skip


def numbers(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Numbers near zero, and the least and the most that a type has."""
    if pa.types.is_integer(kind):
        most = 2 ** (kind.bit_width - 1) - 1
        return st.integers(-4, 4) | st.sampled_from([-most - 1, most])
    with decimal.localcontext(prec=80):
        most, step = 10**kind.precision - 1, Decimal(1).scaleb(-kind.scale)
        unscaled = [*range(-3, 4), *(n * 10**kind.scale for n in range(-3, 4)), -most, most]
        return st.sampled_from([n * step for n in unscaled if abs(n) <= most])


@given(st.data(), st.sampled_from(_NUMBERS), st.sampled_from(_NUMBERS))
def test_numbers_of_other_types(data: st.DataObject, bounds: pa.DataType, kind: pa.DataType) -> None:
    """Numbers of other types compare as in Python, however many digits both types have together."""
    draw_bound = st.none() | numbers(bounds)
    rows = data.draw(st.lists(st.tuples(draw_bound, draw_bound), min_size=1, max_size=6))
    values = data.draw(st.lists(st.none() | numbers(kind), min_size=1, max_size=6))
    match = Match(MatchKind.BETWEEN, ("low", "high"), overlap=Overlap.ALL)
    columns = [pa.array([row[side] for row in rows], bounds) for side in (0, 1)]
    probes = match.cast_values(pa.field("low", bounds), pa.array(values, kind))
    matcher = RangeMatcher(match, MatchedRanges(match, columns, probes.type, str))
    matches = zip(*(side.tolist() for side in matcher.find(probes)), strict=True)
    assert list(matches) == [
        (number, row)
        for number, value in enumerate(values)
        for row, (low, high) in enumerate(rows)
        if value is not None and (low is None or low <= value) and (high is None or value <= high)
    ]


_ENDS: list[list[Any]] = [
    [None, -5, 0, 5, 7],
    [None, -1e300, 0.0, 1.0, 2.0, float("inf"), float("nan")],
    [None, "", "a", "b", "c"],
    [None, *(Decimal(n) for n in (-(10**30), 0, 1, 10**30))],
]


@given(st.data(), st.sampled_from(_ENDS))
def test_of_ranges_inside_one_another_the_inner_one_is_narrower(data: st.DataObject, ends: list[Any]) -> None:
    """The inner range wins also if both are open, or of the same size after rounding, and whichever comes last in the table."""
    outer = data.draw(st.tuples(st.integers(0, 2), st.integers(3, len(ends))))
    inner = data.draw(st.tuples(st.integers(outer[0], 2), st.integers(3, outer[1])))
    is_last = data.draw(st.booleans())
    ranges = [outer, inner] if is_last else [inner, outer]
    kind = pa.array(ends).type
    lows = pa.array([ends[low] for low, _ in ranges], kind)
    highs = pa.array([None if high == len(ends) else ends[high] for _, high in ranges], kind)
    match = Match(MatchKind.BETWEEN, ("low", "high"), overlap=Overlap.NARROWEST)
    matcher = RangeMatcher(match, MatchedRanges(match, [lows, highs], kind, str))
    _, rows = matcher.find(pa.array([ends[3]], kind))
    assert rows.tolist() == [1 if is_last or inner == outer else 0]


def test_errors_of_values_that_python_does_not_have() -> None:
    """Errors can show times after the year 9999, and text that is not UTF-8."""
    times = [pa.array([1, 2], pa.timestamp("us", "UTC")), pa.array([2**62, None], pa.timestamp("us", "UTC"))]
    text = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(np.array([0, 1], np.int32)), pa.py_buffer(b"\xff")]
    )
    match = Match(MatchKind.BETWEEN, ("low", "high"))
    matcher = RangeMatcher(match, MatchedRanges(match, times, times[0].type, str))
    with pytest.raises(OverlapError, match=f"match the value {2**61}, e.g. .*low = .*high = {2**62}.* and "):
        matcher.find(pa.array([2**61], times[0].type))
    rows = pa.table({"name": text, KEY_INDEX: [0]})
    with pytest.raises(DamagedFileError, match=r"name = b'\\xff': name = b'\\xff' is not a network"):
        matching_rows(rows, pa.table({"name": text}), text, Match(MatchKind.CIDR, ("name",)))
