"""Columns that files of one table hold in several types: the Arrow types, values for them, and which of them meet."""

import datetime
import decimal
import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa

_INSTANT = datetime.datetime(2024, 1, 1, 12)


def _struct(*types: pa.DataType) -> pa.DataType:
    return pa.struct(list(zip("ab", types, strict=True)))


Shape = tuple[pa.DataType, Callable[[int], Any]]
SHAPES: dict[str, Shape] = {
    "null": (pa.null(), lambda n: None),
    "bool": (pa.bool_(), lambda n: n % 2 == 0),
    **{name: (getattr(pa, name)(), int) for name in ("int8", "int16", "int32", "int64", "uint64")},
    "dec20": (pa.decimal128(20, 0), decimal.Decimal),
    **{f"dec{digits}": (pa.decimal128(digits, 2), lambda n: decimal.Decimal(n) / 4) for digits in (38, 12)},
    "float32": (pa.float32(), lambda n: n / 4),
    "float64": (pa.float64(), lambda n: n / 8),
    **{name: (getattr(pa, name)(), "text {}".format) for name in ("string", "large_string", "string_view")},
    "dict": (pa.dictionary(pa.int8(), pa.string()), "text {}".format),
    "list_null": (pa.list_(pa.null()), lambda n: [None] * (n % 2)),
    "list32": (pa.list_(pa.int32()), lambda n: list(range(n % 4))),
    "list64": (pa.list_(pa.int64()), lambda n: list(range(n % 4))),
    "struct_null": (_struct(pa.null(), pa.null()), lambda n: {"a": None, "b": None}),
    "struct32": (_struct(pa.int32(), pa.string()), lambda n: {"a": n, "b": f"text {n}"}),
    "struct64": (_struct(pa.int64(), pa.string_view()), lambda n: {"a": n, "b": None}),
    **{
        kind: (getattr(pa, kind)(), lambda n: (_INSTANT + datetime.timedelta(n)).date())
        for kind in ("date32", "date64")
    },
    **{
        name: (pa.timestamp(unit), lambda n: _INSTANT + datetime.timedelta(seconds=n))
        for name, unit in (("stamp", "us"), ("stamp_ns", "ns"), ("stamp_s", "s"))
    },
}
FAMILIES: dict[str, tuple[str, ...]] = {
    "whole": ("int8", "int16", "int32", "int64", "dec20", "uint64"),
    "numbers": ("int16", "int32", "float32", "float64"),
    "decimals": ("int32", "dec12", "dec38"),
    "texts": ("string", "large_string", "string_view", "dict"),
    "lists": ("list_null", "list32", "list64"),
    "structs": ("struct_null", "struct32", "struct64"),
    "dates": ("date32", "date64"),
    "stamps": ("stamp", "stamp_ns", "stamp_s"),
    "flags": ("bool",),
}
"""Shapes that one column may have in files of one table; a column of nulls, or none, goes with each."""
KEYS: dict[str, tuple[str, ...]] = {
    "whole": ("int32", "int64"),
    "decimals": ("int32", "dec20"),
    "texts": ("string", "dict", "string_view", "large_string"),
    "dates": ("date32", "date64"),
}
"""The same for a key column, which holds nulls, too."""


def column(shape: str, numbers: list[int | None]) -> pa.Array:
    """A column with a value for each number, and null for None. Null lists have items below their nulls."""
    kind, value = SHAPES[shape]
    values = [None if n is None else value(n) for n in numbers]
    if shape in ("list32", "list64") and values:
        # Lists of which each null one spans two items that nobody may see, as slices and filters leave them.
        plain = pa.array([[-1, -2] if value is None else value for value in values], kind)
        nulls = pa.array([value is None for value in values])
        return pa.ListArray.from_arrays(plain.offsets, plain.values, type=kind, mask=nulls)
    if kind == pa.string_view():
        return pa.array(values, pa.string()).cast(kind)
    return pa.array(values, kind)


def draw_numbers(rng: random.Random, count: int, nulls: float) -> list[int | None]:
    """Numbers for `column`, some of them None."""
    return [None if rng.random() < nulls else rng.randrange(100) for _ in range(count)]
