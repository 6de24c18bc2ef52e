"""The partial cache: bounds of several parts, and many keys at once."""

from __future__ import annotations

import contextlib
import math

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup.columnar.predicate import Among, ColumnStats, evaluate, join_stats, may_match
from tests.partial.common import stats
from tests.test_keys import KINDS, examples, plain, values_of


@pytest.mark.parametrize("nan", [stats(math.nan, math.nan, None), stats(0.0, math.nan, None)])
def test_joined_bounds_that_are_nan(nan: ColumnStats) -> None:
    """Some writers' bounds are NaN, or without a count of nulls: nothing is known then, nor of those joined with them."""
    for parts in ([nan, stats(1.0, 2.0)], [stats(1.0, 2.0), nan]):
        assert join_stats(parts) == ColumnStats(None, None, None, 20)


@examples(60)
@given(kind=st.sampled_from(KINDS), data=st.data())
def test_among(kind: pa.DataType, data: st.DataObject) -> None:
    """True of the rows that hold one of the values (of floats: of any value), and of bounds that one may lie between."""
    wanted = data.draw(st.lists(values_of(kind), min_size=1, max_size=6))
    rows = data.draw(st.lists(st.none() | values_of(kind) | st.sampled_from(wanted), max_size=8))
    values, column = pc.unique(pa.array(wanted, kind)), pa.array(rows, kind)
    node = Among("c", values)
    found = evaluate(node, {"c": column}, len(column)).to_pylist()
    known = set(plain(values))
    for value, is_found in zip(plain(column), found, strict=True):
        there = value is not None and value in known
        assert bool(is_found) == (there or (pa.types.is_floating(kind) and value is not None))
    here = column.drop_null()
    with contextlib.suppress(ValueError, OverflowError):  # Python has not all values of all types
        ordered = sorted(value for value in here.to_pylist() if not (isinstance(value, float) and math.isnan(value)))
        if ordered and not pa.types.is_temporal(kind):
            bounds = ColumnStats(ordered[0], ordered[-1], column.null_count, len(column))
            holds = any(found) and not pa.types.is_floating(kind)
            assert node.within(bounds) or not holds
            assert may_match(node, lambda name: bounds) == node.within(bounds)
    assert node.within(ColumnStats(None, None, None, 5))
    assert not may_match(node, lambda name: ColumnStats(None, None, 5, 5))
    assert may_match(node, lambda name: None)


@examples(40)
@given(wanted=st.sets(st.integers(-20, 20), min_size=1), low=st.integers(-20, 20), high=st.integers(-20, 20))
def test_among_is_exact_for_whole_numbers(wanted: set[int], low: int, high: int) -> None:
    """Bounds match if and only if one of the values lies between them."""
    node = Among("c", pa.array(wanted, pa.int64()))
    assert node.ordered == sorted(wanted)
    expected = any(low <= value <= high for value in wanted)
    assert node.within(ColumnStats(low, high, 0, 5)) == expected
    assert not Among("c", pa.array([], pa.int64())).within(ColumnStats(low, high, 0, 5))


@pytest.mark.parametrize(
    "values",
    [
        pa.array([1.0, math.nan]),
        pa.array([2**62], pa.int64()).cast(pa.timestamp("us")),
        pa.array([2**31 - 1], pa.int32()).cast(pa.date32()),
    ],
    ids=str,
)
def test_among_values_without_an_order(values: pa.Array) -> None:
    """Where Python cannot order the values, or lacks one, any bounds may hold one."""
    node = Among("c", values)
    assert node.ordered is None
    assert node.within(ColumnStats(5, 6, 0, 1))
