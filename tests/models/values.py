"""The types and values that Spark shows for those of a file, by the rules of the documentation. Nothing of the package is used here."""

import datetime
import decimal
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

_INTS = {"int8": 3, "int16": 5, "int32": 10, "int64": 19}
"""The number of digits of each type."""
_EXACT = decimal.Context(prec=60)


class ImpossibleError(Exception):
    """There is no right answer: types do not go together, or a directory is not a table."""


def shown(kind: pa.DataType) -> pa.DataType:
    """The type in which Spark receives values of an Arrow type. Null stays null."""
    texts = dict.fromkeys(("string", "large_string", "string_view"), pa.string())
    if (mapped := {"uint64": pa.decimal128(20, 0), **texts}.get(str(kind))) is not None:
        return mapped
    types = pa.types
    if types.is_dictionary(kind):
        return shown(kind.value_type)
    if types.is_date(kind):
        return pa.date32()
    if types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if types.is_struct(kind):
        return pa.struct([(field.name, shown(field.type)) for field in kind])
    if types.is_nested(kind):
        return pa.list_(pa.field("element", shown(kind.value_type)))
    return kind


def united(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    """The type that holds the values of both (as Spark shows them) without loss. Raises ImpossibleError if there is none."""
    if first == second or pa.types.is_null(second):
        return first
    if pa.types.is_null(first):
        return second
    if pa.types.is_struct(first) and pa.types.is_struct(second):
        if [field.name for field in first] != [field.name for field in second]:
            raise ImpossibleError(f"{first} and {second}")
        return pa.struct([(a.name, united(a.type, b.type)) for a, b in zip(first, second, strict=True)])
    if pa.types.is_list(first) and pa.types.is_list(second):
        return pa.list_(pa.field("element", united(first.value_type, second.value_type)))
    if _holds(first, second):
        return first
    if _holds(second, first):
        return second
    raise ImpossibleError(f"{first} and {second}")


def united_type(kinds: Sequence[pa.DataType]) -> pa.DataType:
    """The type that holds the values of all, in whatever order they are united. Raises ImpossibleError if there is none."""
    problems = []
    for order in itertools.permutations(dict.fromkeys(kinds)):
        try:
            return functools.reduce(united, order)
        except ImpossibleError as problem:
            problems.append(problem)
    raise problems[0]


def _holds(wide: pa.DataType, narrow: pa.DataType) -> bool:
    if str(wide) in _INTS and str(narrow) in _INTS:
        return _INTS[str(wide)] >= _INTS[str(narrow)]
    if pa.types.is_float64(wide):
        return str(narrow) in ("float", "int8", "int16", "int32")
    if pa.types.is_decimal(wide):
        whole = wide.precision - wide.scale
        if str(narrow) in _INTS:
            return bool(whole >= _INTS[str(narrow)])
        return pa.types.is_decimal(narrow) and wide.scale >= narrow.scale and whole >= narrow.precision - narrow.scale
    return False


def finished(kind: pa.DataType) -> pa.DataType:
    """The type in the table: a string if all values are null, as Spark infers it."""
    if pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, finished(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(pa.field("element", finished(kind.value_type)))
    return kind


def converted(value: Any, kind: pa.DataType, utc: bool = False) -> Any:
    """A file's value in the table's type, which can hold it. `utc`: a time without a zone is an instant."""
    if value is None:
        return None
    types = pa.types
    if types.is_struct(kind):
        return {field.name: converted(value[field.name], field.type, utc) for field in kind}
    if types.is_list(kind):
        return [converted(item, kind.value_type, utc) for item in value]
    if types.is_decimal(kind):
        return decimal.Decimal(value).quantize(decimal.Decimal(1).scaleb(-kind.scale), context=_EXACT)
    if types.is_floating(kind):
        return float(value)
    if hasattr(value, "to_pydatetime"):
        value = value.to_pydatetime()
    if types.is_timestamp(kind):
        if kind.tz is not None and value.tzinfo is None and utc:
            value = value.replace(tzinfo=datetime.timezone.utc)
        return value if value.tzinfo is None else value.astimezone(datetime.timezone.utc)
    return value


def plain(value: Any) -> str:
    """A text that two values have in common if and only if they are the same in every respect."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {plain(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return ("[" if isinstance(value, list) else "(") + ", ".join(map(plain, value)) + "]"
    if isinstance(value, datetime.datetime):
        return value.isoformat() if value.tzinfo is None else value.astimezone(datetime.timezone.utc).isoformat()
    if isinstance(value, (datetime.date, datetime.timedelta, decimal.Decimal)):
        return f"{type(value).__name__} {value}"
    return repr(value)
