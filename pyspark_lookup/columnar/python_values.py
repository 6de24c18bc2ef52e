"""Converts Python values to Arrow columns without changing any: Arrow alone would cut 1.5 to an integer, and a time to its day."""

from __future__ import annotations

import datetime
import decimal
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from pyspark_lookup.columnar.types import split_type
from pyspark_lookup.errors import SchemaError, raise_ours

_MOST_DIGITS = 38
_LARGEST = {pa.float16(): 65504.0, pa.float32(): 3.4028234663852886e38}


def table_of_rows(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Rows (dicts) as a table; a column that a row lacks is null. Raises SchemaError with the first value that does not fit its column's type."""
    columns = []
    for field in schema:
        try:
            columns.append(exact_array([row.get(field.name) for row in rows], field.type))
        except (ValueError, TypeError, OverflowError, pa.ArrowException) as problem:
            raise_ours(SchemaError(f"column {field.name!r}: {problem}"), problem)
    return pa.Table.from_arrays(columns, schema=schema)


def exact_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Values as an array. Raises ValueError for the first value that the type would change, ArrowException for a value of another type."""
    if pa.types.is_decimal(kind):  # a zero stays a zero, whatever its exponent
        values = [0 if isinstance(value, decimal.Decimal) and value.is_zero() else value for value in values]
    _check(values, kind)
    return pa.array(values, kind)


def _check(values: Iterable[Any], kind: pa.DataType) -> None:
    non_nulls = [value for value in values if value is not None]
    shape, parts = split_type(kind)
    if pa.types.is_struct(kind):
        rows = [value for value in non_nulls if isinstance(value, Mapping)]
        for field in kind:
            _check([row.get(field.name) for row in rows], field.type)
    elif pa.types.is_map(kind):
        entries = [pair for value in non_nulls for pair in (value.items() if isinstance(value, Mapping) else value)]
        for place, part in enumerate(parts):
            _check([pair[place] for pair in entries], part)
    elif shape is not None:
        _check([item for value in non_nulls if not isinstance(value, (str, bytes)) for item in value], parts[0])
    else:
        lossy = {python_type for python_type in set(map(type, non_nulls)) if _may_lose(python_type, kind)}
        for value in non_nulls:
            if type(value) in lossy and _is_changed(value, kind):
                raise ValueError(f"{str(value)[:80]} is not a valid {kind}")


def _may_lose(python_type: type, kind: pa.DataType) -> bool:
    """Whether Arrow converts values of a Python type to `kind` although it may silently drop a part of them."""
    if pa.types.is_decimal(kind):
        return issubclass(python_type, decimal.Decimal)
    if pa.types.is_floating(kind):
        return issubclass(python_type, numbers.Real) and kind in _LARGEST
    if pa.types.is_integer(kind) or pa.types.is_temporal(kind):
        fractions = issubclass(python_type, numbers.Real) and not issubclass(python_type, numbers.Integral)
        return fractions or issubclass(python_type, (decimal.Decimal, datetime.datetime))
    return False


def _is_changed(value: Any, kind: pa.DataType) -> bool:
    if isinstance(value, decimal.Decimal):
        # Arrow ends the process for a decimal with more digits than any of its types has.
        if not value.is_finite() or int(value.as_tuple().exponent) < -_MOST_DIGITS:
            return True
        return not pa.types.is_decimal(kind) and value != value.to_integral_value()
    if isinstance(value, datetime.datetime):
        if pa.types.is_date(kind):
            return value.time() != datetime.time()
        return bool(getattr(value, "nanosecond", 0)) and getattr(kind, "unit", None) != "ns"  # pandas' timestamps
    if pa.types.is_floating(kind):
        return math.isfinite(value) and abs(value) > _LARGEST[kind]
    return not math.isfinite(value) or bool(value != math.floor(value))
