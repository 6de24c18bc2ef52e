"""The UDF that looks rows up in a join or SQL function: it passes keys and version tokens to Python, and rows back to Spark.

It is an iterator Arrow UDF if Spark has these, and otherwise an iterator pandas UDF. pandas would change keys: a BIGINT column with nulls becomes
doubles, a null number NaN, and times after 2262 do not fit. So the plan passes each key as a number without nulls and a flag, or as bytes. The
result is a Series that gives Spark its Arrow array unchanged (docs/decisions/pandas-udf.md).
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from pyspark_lookup.columnar.types import cast_exactly, schema_of_text, text_of_schema
from pyspark_lookup.errors import NotSupportedError, OptionError, SchemaError
from pyspark_lookup.lookup.lookup_join import PassSpec, issue_token, options_from_json
from pyspark_lookup.lookup.runtime import runtime
from pyspark_lookup.spark import features
from pyspark_lookup.spark.reading import Probe, current_execution, session_options
from pyspark_lookup.spark.types import arrow_schema
from pyspark_lookup.spark.worker_errors import without_traceback
from pyspark_lookup.versions.executions import Build

_INTEGERS = (ByteType, ShortType, IntegerType, LongType)
_PLAIN_KEYS = (*_INTEGERS, BooleanType, StringType, BinaryType, DateType, DecimalType)
_DAY_US = 86_400_000_000
_EXACT_DOUBLES = 2**53


class LookupUdf:
    """The UDF that makes the lookups of `spec`. Its arguments are the keys, and then the columns, `versions` in number, with version tokens.

    For each row it returns a list of structs of `fields` or, unless `spec.many`, one struct or null. `keys`: the types of the keys. `function`:
    the attribute with the object that Spark registers and calls.
    """

    def __init__(
        self, name: str, spec: PassSpec, fields: Sequence[StructField], keys: Sequence[DataType], versions: int
    ) -> None:
        self._keys = tuple(keys)
        self._single = not spec.many and not features.ARROW_UDFS
        if features.ARROW_UDFS:
            probe = Probe(name, spec.to_text(), versions)
            self.function = _udf(features.arrow_udf, probe, fields, spec.many, "SQL_SCALAR_ARROW_ITER_UDF")
        else:
            types = arrow_schema(StructType([StructField(str(n), key) for n, key in enumerate(self._keys)]))
            encoded = EncodedProbe(name, spec.to_text(), versions, text_of_schema(types), self._single)
            self.function = pandas_function(encoded, fields, spec.many or self._single)

    def arguments(self, keys: Sequence[str]) -> list[str]:
        """The SQL of the arguments by which the function gets `keys` (SQL expressions). The columns with version tokens come after them."""
        if features.ARROW_UDFS:
            return list(keys)
        return [column for sql, kind in zip(keys, self._keys, strict=True) for column in encode(sql, kind)]

    def answer(self, call: str) -> str:
        """The SQL of the function's result. `call`: the SQL of the call of the function."""
        # A pandas UDF cannot return a null struct.
        return f"get({call}, 0)" if self._single else call


def pandas_function(probe: Probe, fields: Sequence[StructField], many: bool) -> Any:
    """The pandas UDF that calls `probe`. For each row it returns a list of structs of `fields` (`many`) or one struct."""
    return _udf(pandas_udf, probe, fields, many, "SQL_SCALAR_PANDAS_ITER_UDF")


def _udf(make: Any, probe: Probe, fields: Sequence[StructField], many: bool, eval_type: str) -> Any:
    row = StructType(list(fields))
    with warnings.catch_warnings():  # type hints cannot express a variable number of arguments
        warnings.filterwarnings("ignore", ".*it is preferred to specify type hints", UserWarning)
        return make(probe, ArrayType(row) if many else row, getattr(features.PythonEvalType, eval_type))


def encode(sql: str, kind: DataType) -> list[str]:
    """The SQL of the columns by which a pandas UDF gets a key unchanged: a number and whether the key is null, or one column of bytes or decimals.

    Raises NotSupportedError for a key of a type that has neither form.
    """
    if isinstance(kind, StringType):
        return [f"CAST({sql} AS BINARY)"]  # text that is not UTF-8 has no Python string
    if isinstance(kind, (BinaryType, DecimalType)):
        return [sql]
    return [f"coalesce({_number(sql, kind)}, 0)", f"{sql} IS NULL"]


def _number(sql: str, kind: DataType) -> str:
    """The SQL of a key as a number: the days of a date, the microseconds of a time or interval. Raises NotSupportedError for other types."""
    if isinstance(kind, BooleanType):
        return f"CAST({sql} AS INT)"
    if isinstance(kind, (*_INTEGERS, FloatType, DoubleType)):
        return sql
    if isinstance(kind, DateType):
        return f"unix_date({sql})"
    if isinstance(kind, TimestampType):
        return f"unix_micros({sql})"
    seconds = f"extract(HOUR FROM {sql}) * 3600 + extract(MINUTE FROM {sql}) * 60"
    micros = f"({seconds}) * 1000000L + CAST(extract(SECOND FROM {sql}) * 1000000 AS BIGINT)"
    if isinstance(kind, DayTimeIntervalType):
        return f"extract(DAY FROM {sql}) * {_DAY_US}L + {micros}"
    if isinstance(kind, TimestampNTZType):
        # The number is added up from the parts of the time: not every Spark's `unix_micros` takes a time without a zone, and a cast to
        # TIMESTAMP would use the session's time zone, in which some hours do not exist.
        return f"unix_date(CAST({sql} AS DATE)) * {_DAY_US}L + {micros}"
    raise NotSupportedError(
        f"key {sql} is {kind.simpleString()}, which this Spark cannot pass to a lookup in Python: cast it with df.withColumn to the type of the "
        "table's column"
    )


def decode(columns: Sequence[Any], types: pa.Schema) -> list[pa.Array]:
    """The keys whose columns by `encode` arrived as the Series `columns`. `types`: the schema of the keys."""
    series = iter(columns)
    return [_decode(series, kind) for kind in types.types]


def _decode(series: Iterator[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_string(kind):
        return pa.array(next(series), pa.binary()).view(kind)
    if pa.types.is_binary(kind) or pa.types.is_decimal(kind):
        return pa.array(next(series), kind)
    numbers, nulls = next(series).to_numpy(), next(series).to_numpy()
    if pa.types.is_boolean(kind):
        return pa.array(numbers != 0, kind, mask=nulls)
    return pa.array(numbers, mask=nulls).cast(pa.int32() if pa.types.is_date32(kind) else kind).cast(kind)


class EncodedProbe(Probe):
    """An iterator pandas UDF that looks rows up by keys in the form of `encode`. `types`: the schema of the keys, as text.

    `single`: the result for each row is one struct or null, which Spark gets as a list of one or no struct.
    """

    def __init__(self, name: str, spec: str, versions: int, types: str, single: bool) -> None:
        super().__init__(name, spec, versions)
        self._types = types
        self._single = single

    def __call__(self, batches: Iterator[tuple[Any, ...]]) -> Iterator[Any]:
        for answers in super().__call__(map(self._arrays, batches)):
            yield arrow_series(_as_lists(answers) if self._single else answers)

    def _arrays(self, columns: tuple[Any, ...]) -> tuple[pa.Array, ...]:
        keys, versions = columns[: -self._versions], columns[-self._versions :]
        arrays = [pa.array(column, pa.binary() if column.dtype == object else pa.int64()) for column in versions]
        return (*decode(keys, schema_of_text(self._types)), *arrays)


def _as_lists(structs: pa.StructArray) -> pa.ListArray:
    """A list for each struct, with this struct as its only element; an empty list for each null."""
    counts = pc.cumulative_sum(structs.is_valid().cast(pa.int32()))
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), counts])
    kind = pa.list_(pa.field("element", structs.type))
    return pa.ListArray.from_arrays(offsets, structs.drop_null(), type=kind)


class PlainProbe(Probe):
    """An iterator pandas UDF whose only arguments are keys, for a Spark without functions defined in SQL.

    The caller cannot pass a version token, so the tasks find the version themselves: all tasks of a query or micro-batch on one host read the
    same version. `keys`: the table's key columns. `options`: the table's options, as JSON. Unless `spec.many`, the result for each row is a struct,
    whose fields are null if no row has the key.
    """

    def __init__(self, name: str, spec: PassSpec, keys: pa.Schema, options: str, build: Build | None) -> None:
        super().__init__(name, spec.to_text(), 1)
        self._keys = text_of_schema(keys)
        self._options = options
        self._build = build

    @without_traceback
    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        options = runtime().effective(options_from_json(self._options).on_host(session_options()))
        token = issue_token(options, current_execution(self._build))
        for answers in super().__call__(self._arrays(columns, token) for columns in batches):
            yield arrow_series(answers) if pa.types.is_list(answers.type) else arrow_frame(answers)

    def _arrays(self, columns: Any, token: bytes) -> tuple[pa.Array, ...]:
        series = columns if isinstance(columns, tuple) else (columns,)
        keys = schema_of_text(self._keys)
        if len(series) != len(keys):
            raise OptionError(
                f"function {self.__name__}: the number of arguments is {len(series)}: give one for each of {', '.join(keys.names)}"
            )
        arrays = [plain_key(self.__name__, field, column) for field, column in zip(keys, series, strict=True)]
        return (*arrays, pa.repeat(pa.scalar(token, pa.binary()), len(series[0])))


def check_plain_key(name: str, field: StructField) -> None:
    """Raise NotSupportedError if a pandas UDF would not get keys of this type unchanged. `name`: the name of the function."""
    if not isinstance(field.dataType, _PLAIN_KEYS):
        features.SQL_FUNCTIONS.require(
            f"register_lookup, name = {name!r}: key {field.name!r} is {field.dataType.simpleString()}, and a function for such keys",
            "use lookup_join",
        )


def plain_key(function: str, field: pa.Field, column: Any) -> pa.Array:
    """The values of an argument, in the type of the table's key column `field`. `column`: the argument, a Series, as a pandas UDF gets it.

    Raises SchemaError if the values do not fit this type.
    """
    key_type, subject = field.type, f"function {function}: key {field.name!r}"
    try:
        if column.ndim != 1:
            raise TypeError("it is a struct: pass one of its fields")
        values = pa.array(column, from_pandas=True)
        if _is_number(key_type) and pa.types.is_floating(values.type):
            values = _whole_numbers(values, subject)
        if not (pa.types.is_null(values.type) or any(is_kind(key_type) and is_kind(values.type) for is_kind in _ALIKE)):
            # Arrow's cast differs from Spark's: it writes other texts for numbers and times, and turns a time into a count of its unit.
            raise TypeError(f"it is {values.type}: cast it in SQL")
        return cast_exactly(values, key_type) if pa.types.is_decimal(key_type) else values.cast(key_type)
    except SchemaError:
        raise
    except (pa.ArrowException, TypeError, ValueError) as problem:
        raise SchemaError(f"{subject} is {key_type}, and the argument does not fit: {problem}") from None


def _whole_numbers(doubles: pa.Array, subject: str) -> pa.Array:
    """The integers in an argument with nulls, which Spark has passed as doubles.

    Raises ArrowInvalid for a number with a fraction, SchemaError for doubles so large that they may have been rounded.
    """
    if (pc.max(pc.abs(doubles)).as_py() or 0) >= _EXACT_DOUBLES:
        raise SchemaError(
            f"{subject} is null in some rows and beyond 2^53 in others, and this Spark passes a column with nulls as doubles, which would round "
            "them: use lookup_join, or filter the nulls out first"
        )
    return doubles.cast(pa.int64())


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_decimal(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


_ALIKE = (_is_number, _is_bytes, pa.types.is_boolean, pa.types.is_date32)


@functools.cache
def _pandas() -> Any:
    """The module pandas, imported when it is first used, because only tasks need it."""
    return importlib.import_module("pandas")


def _pandas_array(values: pa.Array) -> Any:
    return _pandas().arrays.ArrowExtensionArray(pa.chunked_array([values]))


@functools.cache
def _arrow_series_class() -> Any:
    class ArrowSeries(_pandas().Series):  # type: ignore[misc]
        """A Series over an Arrow array that already has Spark's types.

        PySpark would convert the values one at a time by `apply` and `map`, so these return the Series unchanged.
        """

        @property
        def _constructor(self) -> Any:
            return ArrowSeries

        def apply(self, *_: Any, **__: Any) -> Any:
            return self

        map = apply

    return ArrowSeries


def arrow_series(answers: pa.Array) -> Any:
    """A pandas Series that gives Spark the array `answers` without a copy."""
    return _arrow_series_class()(_pandas_array(answers))


@functools.cache
def _arrow_frame_class() -> Any:
    class ArrowFrame(_pandas().DataFrame):  # type: ignore[misc]
        """A pandas DataFrame whose columns are `ArrowSeries`."""

        @property
        def _constructor_sliced(self) -> Any:
            return _arrow_series_class()

    return ArrowFrame


def arrow_frame(structs: pa.StructArray) -> Any:
    """A pandas DataFrame that gives Spark the fields of `structs` as columns, without a copy."""
    columns = zip(structs.type, structs.flatten(), strict=True)
    return _arrow_frame_class()({field.name: _pandas_array(column) for field, column in columns})
