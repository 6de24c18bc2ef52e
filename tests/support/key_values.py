"""Every type of key, values of each, and how these compare."""

import decimal
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from pyspark_lookup.columnar.keys import Seed

SEED = Seed(0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)
US, US_UTC = pa.timestamp("us"), pa.timestamp("us", "UTC")
# Every type a key of a table may have, as Spark takes it.
KINDS = [
    pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(),
    pa.string(), pa.binary(), pa.date32(), US, US_UTC, pa.duration("us"),
    pa.decimal128(5, 2), pa.decimal128(20, 0), pa.decimal128(38, 10),
]  # fmt: skip
each_kind = pytest.mark.parametrize("kind", KINDS, ids=map(str, KINDS))
LARGE = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
TEXTS = ["", "\0", "\0\0", "a", "a\0", "a\0\0", "\0a", "a" * 7, "a" * 8, "a" * 8 + "\0", "a" * 9, "é", "é" * 4]
LONG = ["x" * 1024, "x" * 1025, "x" * 1024 + "y", "y" + "x" * 1024, "x" * 5000, "x" * 4999 + "\0"]
# Not-a-numbers: those that arithmetic makes, and (signalling) those that only raw bits are.
QUIET = {
    pa.float64(): [0x7FF8 << 48, 0xFFF8 << 48, 0x7FF8 << 48 | 1, 2**64 - 1],
    pa.float32(): [0x7FC00000, 0xFFC00001, 2**32 - 1],
}
SIGNALLING = {pa.float64(): [0x7FF0 << 48 | 1, 0xFFF4 << 48], pa.float32(): [0x7F800001, 0xFFA00000]}


def number(digits: int, scale: int) -> decimal.Decimal:
    """`digits` times ten to the -scale, exactly (decimal's own arithmetic rounds to 28 digits)."""
    return decimal.Decimal(f"{digits}E{-scale}")


def scalar_values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Values of a type, as `pa.array` takes them: times as numbers, for Python has not all of them."""
    if pa.types.is_boolean(kind):
        return st.booleans()
    if pa.types.is_decimal(kind):
        most = 10**kind.precision - 1
        few = min(most, 10)
        digits = st.integers(-most, most) | st.integers(-few, few) | st.sampled_from([most, -most])
        return digits.map(lambda n: number(n, kind.scale))
    if pa.types.is_floating(kind):
        floats = st.floats(width=kind.bit_width)  # type: ignore[arg-type]
        return floats | st.sampled_from([0.0, -0.0, math.nan, math.inf, 1.0, 1.5])
    # By number, or hypothesis would print the long ones whenever it names the strategy.
    special = st.integers(0, len(TEXTS + LONG) - 1).map(lambda n: (TEXTS + LONG)[n])
    if pa.types.is_string(kind):
        return st.text(st.characters(codec="utf-8"), max_size=20) | special
    if pa.types.is_binary(kind):
        return st.binary(max_size=20) | special.map(str.encode)
    top = 2 ** (kind.bit_width - 1)
    return st.integers(-top, top - 1) | st.integers(-3, 3) | st.sampled_from([-top, top - 1, -top + 1])


def plain(array: pa.Array) -> list[Any]:
    """The values such that Python's equality is that of keys; null is None."""
    kind = array.type
    if pa.types.is_temporal(kind):
        array = array.cast(pa.int32() if pa.types.is_date32(kind) else pa.int64())
    values: list[Any] = array.to_pylist()
    return ["NaN" if isinstance(value, float) and math.isnan(value) else value for value in values]


def bits(numbers: Sequence[int], kind: pa.DataType) -> pa.Array:
    """An array of values given by their bits."""
    raw = np.array(numbers, np.dtype(f"u{kind.bit_width // 8}"))
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(raw)])


def mixed(word: int, seed: Seed) -> int:
    word = word * seed.first % 2**64
    return (word ^ word >> 32) * seed.second % 2**64
