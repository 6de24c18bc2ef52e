"""Types of columns, nested ones among them, and values of each."""

import math
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from pyspark_lookup.columnar.types import spark_type
from tests.support.key_values import KINDS, scalar_values

# A NaN is not equal to itself; see test_nans_keep_their_bits.
SCALARS = st.sampled_from([*KINDS, pa.decimal128(38, 38), pa.timestamp("us", "UTC")])


def without_nan(kind: pa.DataType) -> st.SearchStrategy[Any]:
    values = scalar_values(kind)
    return values.filter(lambda value: not math.isnan(value)) if pa.types.is_floating(kind) else values


@st.composite
def kinds(draw: st.DrawFn, depth: int) -> pa.DataType:
    """Types nested at most so deep, as Spark takes them."""
    if depth == 0:
        return draw(SCALARS)
    inner = kinds(depth - 1)
    shape = draw(st.sampled_from(["list", "struct", "map", "less deep"]))
    if shape == "less deep":
        return draw(inner)
    if shape == "list":
        kind = pa.list_(draw(inner))
    elif shape == "map":
        kind = pa.map_(draw(SCALARS), draw(inner))
    else:
        kind = pa.struct([(f"f{n}", field) for n, field in enumerate(draw(st.lists(inner, min_size=1, max_size=3)))])
    return spark_type(kind)


def nested_values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Values of a type, a null among them at every level."""
    if pa.types.is_struct(kind):
        values: st.SearchStrategy[Any] = st.fixed_dictionaries(
            {field.name: nested_values(field.type) for field in kind}
        )
    elif pa.types.is_map(kind):
        values = st.lists(st.tuples(without_nan(kind.key_type), nested_values(kind.item_type)), max_size=3)
    elif pa.types.is_list(kind):
        values = st.lists(nested_values(kind.value_type), max_size=3)
    else:
        values = without_nan(kind)
    return st.none() | values | values


def draw_pieces(draw: st.DrawFn, kind: pa.DataType) -> list[pa.Array]:
    """Some arrays of a type: whole ones, slices of longer ones, empty ones."""
    pieces = []
    for values in draw(st.lists(st.lists(nested_values(kind), max_size=8), max_size=4)):
        array = pa.array(values, kind)
        start = draw(st.integers(0, len(values)))
        stop = draw(st.integers(start, len(values)))
        pieces.append(array if draw(st.booleans()) else array.slice(start, stop - start))
    return pieces
