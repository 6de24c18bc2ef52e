"""Columns that files of one table hold in several types: the Arrow types, values for them, and which of them meet."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa

__all__ = ["FAMILIES", "JSON_FAMILIES", "KEYS", "SHAPES", "Shape", "column"]

_DAY = datetime.date(2024, 1, 1)
_INSTANT = datetime.datetime(2024, 1, 1, 12)


@dataclasses.dataclass(frozen=True)
class Shape:
    """An Arrow type, and a value of it for a number."""

    type: pa.DataType
    value: Callable[[int], Any]


def _text(n: int) -> str:
    return f"text {n}"


def _blob(n: int) -> bytes:
    return n.to_bytes(16, "big")


def _list(n: int) -> list[int]:
    return list(range(n % 4))


def _days(n: int) -> datetime.date:
    return _DAY + datetime.timedelta(days=n)


def _seconds(n: int) -> datetime.datetime:
    return _INSTANT + datetime.timedelta(seconds=n)


def _instants(n: int) -> datetime.datetime:
    return _seconds(n).replace(tzinfo=datetime.timezone.utc)


def _struct(*types: pa.DataType) -> pa.DataType:
    return pa.struct(list(zip("ab", types, strict=True)))


SHAPES: dict[str, Shape] = {
    "null": Shape(pa.null(), lambda n: None),
    "bool": Shape(pa.bool_(), lambda n: n % 2 == 0),
    "int8": Shape(pa.int8(), lambda n: n),
    "int16": Shape(pa.int16(), lambda n: n),
    "int32": Shape(pa.int32(), lambda n: n),
    "int64": Shape(pa.int64(), lambda n: n),
    "uint32": Shape(pa.uint32(), lambda n: n),
    "uint64": Shape(pa.uint64(), lambda n: n),
    "dec20": Shape(pa.decimal128(20, 0), decimal.Decimal),
    "dec38": Shape(pa.decimal128(38, 2), lambda n: decimal.Decimal(n) / 4),
    "dec12": Shape(pa.decimal128(12, 2), lambda n: decimal.Decimal(n) / 4),
    "float32": Shape(pa.float32(), lambda n: n / 4),
    "float64": Shape(pa.float64(), lambda n: n / 8),
    "string": Shape(pa.string(), _text),
    "large_string": Shape(pa.large_string(), _text),
    "string_view": Shape(pa.string_view(), _text),
    "dict": Shape(pa.dictionary(pa.int8(), pa.string()), _text),
    "binary": Shape(pa.binary(), _blob),
    "large_binary": Shape(pa.large_binary(), _blob),
    "binary_view": Shape(pa.binary_view(), _blob),
    "uuid": Shape(pa.binary(16), _blob),
    "list_null": Shape(pa.list_(pa.null()), lambda n: [None] * (n % 2)),
    "list32": Shape(pa.list_(pa.int32()), _list),
    "list64": Shape(pa.list_(pa.int64()), _list),
    "large_list": Shape(pa.large_list(pa.int64()), _list),
    "list_view": Shape(pa.list_view(pa.int64()), _list),
    "pair": Shape(pa.list_(pa.int64(), 2), lambda n: [n, None]),
    "list_uuid": Shape(pa.list_(pa.binary(16)), lambda n: [_blob(n), None][: n % 3]),
    "struct_null": Shape(_struct(pa.null(), pa.null()), lambda n: {"a": None, "b": None}),
    "struct32": Shape(_struct(pa.int32(), pa.string()), lambda n: {"a": n, "b": _text(n)}),
    "struct64": Shape(_struct(pa.int64(), pa.string_view()), lambda n: {"a": n, "b": None}),
    "map": Shape(pa.map_(pa.string(), pa.int64()), lambda n: [(f"k{i}", i) for i in range(n % 3)]),
    "map32": Shape(pa.map_(pa.large_string(), pa.int32()), lambda n: [(f"k{i}", None) for i in range(n % 3)]),
    "date32": Shape(pa.date32(), _days),
    "date64": Shape(pa.date64(), _days),
    "stamp": Shape(pa.timestamp("us"), _seconds),
    "stamp_ns": Shape(pa.timestamp("ns"), _seconds),
    "stamp_s": Shape(pa.timestamp("s"), _seconds),
    "instant": Shape(pa.timestamp("us", "UTC"), _instants),
    "instant_ms": Shape(pa.timestamp("ms", "Europe/Paris"), _instants),
    "duration": Shape(pa.duration("us"), lambda n: datetime.timedelta(seconds=n)),
    "duration_s": Shape(pa.duration("s"), lambda n: datetime.timedelta(seconds=n)),
    "time": Shape(pa.time64("us"), lambda n: datetime.time(n % 24)),
}
"""By name. All of it but `time` has a counterpart in Spark."""

FAMILIES: dict[str, tuple[str, ...]] = {
    "whole": ("int8", "int16", "int32", "int64", "dec20", "uint32", "uint64"),
    "numbers": ("int16", "int32", "float32", "float64"),
    "decimals": ("int32", "dec12", "dec38"),
    "texts": ("string", "large_string", "string_view", "dict"),
    "bytes": ("binary", "large_binary", "binary_view", "uuid"),
    "lists": ("list_null", "list32", "list64", "large_list", "list_view", "pair"),
    "nested": ("list_uuid", "list_null"),
    "structs": ("struct_null", "struct32", "struct64"),
    "maps": ("map", "map32"),
    "dates": ("date32", "date64"),
    "stamps": ("stamp", "stamp_ns", "stamp_s"),
    "instants": ("instant", "instant_ms"),
    "durations": ("duration", "duration_s"),
    "flags": ("bool",),
}
"""Shapes that one column may have in files of one table; a column of nulls, or none, goes with each."""

JSON_FAMILIES: dict[str, tuple[str, ...]] = {
    "whole": ("int64",),
    "reals": ("float64",),
    "texts": ("string",),
    "flags": ("bool",),
    "lists": ("list_null", "list64"),
    "structs": ("struct_null", "struct32"),
}
"""The same for JSON lines, where types are what the values look like."""

KEYS: dict[str, tuple[str, ...]] = {
    "whole": ("int32", "int64"),
    "long": ("int64",),
    "decimals": ("int32", "dec20"),
    "texts": ("string", "dict", "string_view", "large_string"),
    "uuids": ("uuid", "binary"),
    "dates": ("date32", "date64"),
}
"""The same for a key column, which holds nulls, too."""


def column(shape: str, numbers: list[int | None]) -> pa.Array:
    """A column with a value for each number, and null for None. Null lists are not empty below their nulls."""
    chosen = SHAPES[shape]
    values = [None if n is None else chosen.value(n) for n in numbers]
    if shape in ("list32", "list64") and values:
        return _with_full_nulls(chosen.type, values)
    if chosen.type in (pa.string_view(), pa.binary_view()):
        plain = pa.string() if chosen.type == pa.string_view() else pa.binary()
        return pa.array(values, plain).cast(chosen.type)
    return pa.array(values, chosen.type)


def _with_full_nulls(kind: pa.DataType, values: list[Any]) -> pa.Array:
    """Lists of which each null one spans two items that nobody may see, as slices and filters leave them."""
    shown = [[-1, -2] if value is None else value for value in values]
    plain = pa.array(shown, kind)
    return pa.ListArray.from_arrays(
        plain.offsets, plain.values, type=kind, mask=pa.array([value is None for value in values])
    )


def draw_numbers(rng: random.Random, count: int, nulls: float) -> list[int | None]:
    """Numbers for `column`, some of them None."""
    return [None if rng.random() < nulls else rng.randrange(100) for _ in range(count)]
