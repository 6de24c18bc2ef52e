"""Converts Python values to Arrow columns and tables, and rows back to dictionaries.

A value that would change is an error, except that floats are rounded for a column of 32-bit floats. Arrow alone would truncate 1.5 to an integer,
and a datetime to its date.

`as_arrow_rows` and `as_key_table` take rows and keys in all forms in which Python users have them.
"""

from __future__ import annotations

import datetime
import decimal
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.types import cast_exactly, converts, spark_type, split_type
from pyspark_lookup.errors import SchemaError, foreign_repr, foreign_text, raise_ours

_MOST_DIGITS = 38
_LARGEST = {pa.float16(): 65504.0, pa.float32(): 3.4028234663852886e38}


def table_of_rows(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Rows (dictionaries) as a table with the columns of `schema`; a column that a row lacks is null.

    Raises SchemaError naming the first column with a value that does not fit its type, and the value.
    """
    columns = []
    for field in schema:
        try:
            columns.append(exact_array([row.get(field.name) for row in rows], field.type))
        except (ValueError, TypeError, OverflowError, pa.ArrowException) as problem:
            raise_ours(SchemaError(f"column {field.name!r}: {problem}"), problem)
    return pa.Table.from_arrays(columns, schema=schema)


def exact_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """The values as an array of type `kind`.

    Raises ValueError for the first value that `kind` would change, ArrowException for a value of another type.
    """
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
    """Whether Arrow, when it converts values of a Python type to `kind`, may silently drop a part of a value."""
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


@runtime_checkable
class ArrowStream(Protocol):
    """Anything that exports an Arrow C stream: tables of pyarrow, pandas, polars, DuckDB and others (the Arrow PyCapsule interface)."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


RowsLike: TypeAlias = "ArrowStream | Sequence[Mapping[str, Any]]"
"""Anything that can be made into rows: an object that exports an Arrow C stream, a `pa.RecordBatch`, or a list of dictionaries."""
KeysLike: TypeAlias = "ArrowStream | Sequence[Any]"
"""Anything that can be made into keys: rows with the key columns, or a list of values (of tuples, for several key columns)."""
KeyMaker: TypeAlias = Callable[[Sequence[str], pa.Schema], pa.Table]
"""A function that returns a table of keys. Its arguments are the names of the key columns, and the schema of the table."""

_ROWS = "give rows as a pyarrow Table, RecordBatch or RecordBatchReader, a pandas or polars DataFrame, a DuckDB relation, or a list of dictionaries"
_KEYS = "give keys as a list of values (of tuples, for several key columns) or of dictionaries, an array, or a table with the key columns"


def as_arrow_rows(
    rows: Any, table_schema: Callable[[], pa.Schema | None], complete: bool = False
) -> pa.Table | pa.RecordBatchReader:
    """The rows as an Arrow table or stream.

    `rows`: anything that `RowsLike` names. `table_schema`: returns the columns of the table to which the rows belong (None: not known);
    called only for dictionaries, whose values have no Arrow types. `complete`: all dictionaries must have the same keys; otherwise a missing
    one is a null. Raises TypeError for rows of any other type, SchemaError for dictionaries whose values of one column have no common type.
    """
    if isinstance(rows, (pa.Table, pa.RecordBatchReader)):
        return rows
    if isinstance(rows, pa.RecordBatch):
        return pa.Table.from_batches([rows])
    if _is_of_pandas(rows, "DataFrame"):
        try:
            # An index with a name is a column, for instance after groupby or set_index; plain row numbers are not.
            return pa.Table.from_pandas(rows, preserve_index=all(name is not None for name in rows.index.names))
        except pa.ArrowException as problem:
            raise_ours(
                SchemaError(
                    f"the pandas DataFrame cannot be converted to Arrow: {problem}; give each column values of one type"
                ),
                problem,
            )
    if isinstance(rows, ArrowStream):
        try:
            return pa.RecordBatchReader.from_stream(rows)
        except (pa.ArrowInvalid, ValueError) as problem:  # the object exports one column, and no rows
            raise_ours(TypeError(f"rows of type {type(rows).__name__} cannot be read: {_ROWS}"), problem)
    if isinstance(rows, Sequence) and not isinstance(rows, (str, bytes)):
        return _table_from_dictionaries(rows, table_schema(), complete)
    raise TypeError(f"rows of type {type(rows).__name__} cannot be read: {_ROWS}")


def as_key_table(keys: Any, names: Sequence[str]) -> pa.Table:
    """The keys as a table. `names`: the key columns; empty for a table without key columns.

    The columns of a table of keys are matched with `names` by name, the values of a tuple by position. Raises TypeError for keys in a form
    that `KeysLike` does not name, SchemaError for a number that Arrow cannot hold, or for a table that lacks one of the columns.
    """
    if isinstance(keys, (pa.Table, pa.RecordBatch, pa.RecordBatchReader)) or _is_of_pandas(keys, "DataFrame"):
        table = as_arrow_rows(keys, lambda: None)
        return _check_key_columns(table.read_all() if isinstance(table, pa.RecordBatchReader) else table, names)
    if isinstance(keys, (str, bytes, Mapping)):
        raise TypeError(
            f"keys of type {type(keys).__name__} cannot be read: {_KEYS}; for the rows of one key use get()"
        )
    if isinstance(keys, Sequence) and keys and all(isinstance(key, Mapping) for key in keys):
        return _check_key_columns(_table_from_dictionaries(keys, None, True), names)
    if isinstance(keys, Sequence) and len(names) > 1:
        return _table_from_tuples(keys, names)
    column = as_array_of_values(keys, "keys", _KEYS)
    if pa.types.is_struct(column.type):
        return _check_key_columns(pa.Table.from_struct_array(column), names)
    return (
        pa.table({(names or ("key",))[0]: column}) if len(names) <= 1 else _table_from_tuples(column.to_pylist(), names)
    )


def as_array_of_values(values: Any, label: str, advice: str) -> pa.Array | pa.ChunkedArray:
    """The values of a list, a Series or an Arrow array as an Arrow array, in the type that Arrow infers.

    `label`: what the values are, and `advice`: in which forms they can be given, in errors. Raises SchemaError for a number that Arrow cannot
    hold, TypeError for anything else that Arrow cannot read.
    """
    try:
        if isinstance(values, ArrowStream):
            return pa.chunked_array(values)
        # NaN is a valid key; only in a Series of pandas it stands for null.
        of_pandas = _is_of_pandas(values, "Series")
        try:
            return pa.array(values, from_pandas=of_pandas)
        except (OverflowError, pa.ArrowInvalid):
            if not any(isinstance(value, decimal.Decimal) for value in values):
                raise
            # Beside decimals, Arrow takes no integers with more digits.
            return pa.array([decimal.Decimal(value) if type(value) is int else value for value in values])
    except OverflowError as problem:
        fault = "a number does not fit into 64 bits: give such numbers as decimal.Decimal, for a DECIMAL column"
        raise_ours(SchemaError(f"{label}: {fault}"), problem)
    except (TypeError, ValueError, pa.ArrowException) as problem:
        fault = f"of type {type(values).__name__} cannot be read ({foreign_text(str(problem))})"
        raise_ours(TypeError(f"{label} {fault}: {advice}"), problem)


_USE_ARROW = "read it with get_many(), which returns Arrow, or leave the column out with lookup.columns"


def as_python(rows: pa.Table | pa.RecordBatch, advice: str = _USE_ARROW) -> list[dict[str, Any]]:
    """The rows as dictionaries. Raises SchemaError for a value that no Python type can hold, such as a day after the year 9999.

    `advice`: how the error tells its reader to do without Python values.
    """
    try:
        dictionaries: list[dict[str, Any]] = rows.to_pylist()
        return dictionaries
    except (OverflowError, ValueError) as problem:
        raise_ours(SchemaError(f"{_beyond_python(rows)}: {advice}"), problem)


def _beyond_python(rows: pa.Table | pa.RecordBatch) -> str:
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        try:
            column.to_pylist()
        except (OverflowError, ValueError) as problem:
            return f"column {name!r} of type {column.type} has a value that no Python type can hold ({problem})"
    return "the rows have a value that no Python type can hold"


def _is_of_pandas(value: Any, name: str) -> bool:
    return type(value).__module__.partition(".")[0] == "pandas" and type(value).__name__ == name


def _check_key_columns(keys: pa.Table, names: Sequence[str]) -> pa.Table:
    column_names = {name.lower() for name in keys.column_names}
    if not column_names >= {name.lower() for name in names}:
        raise SchemaError(
            f"keys have the columns {', '.join(keys.column_names)}, but lookup.keys names {', '.join(names)}: name the keys' columns as lookup.keys does"
        )
    return keys


def _table_from_tuples(keys: Sequence[Any], names: Sequence[str]) -> pa.Table:
    bad_key = next((key for key in keys if not isinstance(key, (tuple, list)) or len(key) != len(names)), None)
    if bad_key is not None:
        raise TypeError(
            f"key {foreign_text(foreign_repr(bad_key))} is not a tuple of {len(names)} values, one for each column of lookup.keys "
            f"({', '.join(names)}): {_KEYS}"
        )
    return pa.table(
        {
            name: as_array_of_values([key[place] for key in keys], f"column {name!r} of keys", _KEYS)
            for place, name in enumerate(names)
        }
    )


def _table_from_dictionaries(rows: Sequence[Any], table_schema: pa.Schema | None, complete: bool) -> pa.Table:
    bad_row = next((row for row in rows if not isinstance(row, Mapping)), None)
    if bad_row is not None:
        raise TypeError(f"a list of rows has a value of type {type(bad_row).__name__}: {_ROWS}")
    types = {} if table_schema is None else {field.name.lower(): field.type for field in table_schema}
    columns: dict[str, pa.Array] = {}
    # The names of all rows, because some rows may lack one.
    for name in dict.fromkeys(name for row in rows for name in row):
        if not isinstance(name, str):
            raise TypeError(f"a dictionary has the key {foreign_text(foreign_repr(name))}: give column names as str")
        if complete and not all(name in row for row in rows):
            raise SchemaError(
                f"some of the dictionaries have no {name!r}: give all of them a value (None for null), or write those without {name!r} separately"
            )
        try:
            columns[name] = _column([row.get(name) for row in rows], types.get(name.lower()))
        except OverflowError as problem:
            fault = "a number does not fit into 64 bits: give such numbers as decimal.Decimal, for a DECIMAL column"
            raise_ours(SchemaError(f"column {name!r} of the rows: {fault}"), problem)
        except (TypeError, ValueError, SchemaError, pa.ArrowException) as problem:
            raise_ours(SchemaError(f"column {name!r} of the rows: {problem}"), problem)
    if not columns and table_schema is not None:
        return table_schema.empty_table()
    return pa.table(columns)


def _column(values: list[Any], kind: pa.DataType | None) -> pa.Array:
    """The values as a column of type `kind` (None: the type that Arrow infers).

    Raises SchemaError, ValueError, TypeError or ArrowException if a value would change, except that floats may be rounded to float32.
    """
    if kind is None or pa.types.is_nested(kind):
        return pa.array(values) if kind is None else exact_array(values, kind)
    array = pa.array(values)
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), kind)
    inferred_type = spark_type(array.type)
    if pa.types.is_floating(kind) and pa.types.is_floating(inferred_type):
        rounded_array = array.cast(kind)
        if not pc.all(pc.equal(pc.is_finite(array), pc.is_finite(rounded_array)), min_count=0).as_py():
            raise pa.ArrowInvalid(f"a value is out of the range of {kind}")
        return rounded_array
    of_times = pa.types.is_timestamp(kind) and (
        inferred_type == kind or (pa.types.is_date(inferred_type) and kind.tz is None)
    )
    if not (converts(inferred_type, kind) or of_times):
        raise SchemaError(f"the values are {inferred_type}, but the table's column is {kind}: cast them")
    return cast_exactly(array, kind)
