"""`register_lookup` makes a lookup table an SQL function.

The function calls a UDF with the keys and a version token, which it gets from a view by a scalar subquery. Each use of the function in a query has
a subquery of its own. On one host, all of them return the same version: the first one records it for the query, and the others read the record.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.types import ArrayType, DataType, MapType, StringType, StructField, StructType

from pyspark_lookup.core.forks import ForkSafeLock
from pyspark_lookup.errors import NotSupportedError, OptionError
from pyspark_lookup.lookup.lookup_join import PassSpec, Stage
from pyspark_lookup.lookup.range_match import Match, MatchKind
from pyspark_lookup.options.enums import OnError, View
from pyspark_lookup.spark import features
from pyspark_lookup.spark.lookup_pass import ChainedLookup, Key
from pyspark_lookup.spark.lookup_udf import LookupUdf, PlainProbe, check_plain_key, pandas_function
from pyspark_lookup.spark.micro_batch import current_build
from pyspark_lookup.spark.pipelines import in_pipeline
from pyspark_lookup.spark.table_argument import (
    DimensionTable,
    MatchArgument,
    TableArgument,
    check_match_cache,
    defaults_to_full,
    load_view,
    look_up,
    match_columns,
    parse_match,
    quote,
    stored_match,
    with_default_cache,
)
from pyspark_lookup.spark.types import arrow_schema, arrow_type

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# The race: two threads may register lookups with the same name. Under the lock, the functions and the view are of one of them.
_creating = ForkSafeLock()
_TRIED = "_lookup_tried_"  # the prefix of functions that are created only to see whether Spark accepts them


def register_lookup(
    spark: SparkSession,
    name: str,
    table: TableArgument,
    key: str | Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    multi: bool = False,
    options: Mapping[str, Any] | None = None,
    between: Sequence[str] | None = None,
    cidr: str | Sequence[str] | None = None,
    starts_with: str | None = None,
    value_type: str | None = None,
) -> None:
    """Make a lookup table a temporary function of this session, as in `SELECT f.*, airport(f.dest).name FROM flights f`.

    `name(key…)` returns a struct of the table's `columns` (default: all but the key), null if no row has the key; with `multi` an array of
    structs, empty if no row has it. `name_rows(key…)` is a table function that returns the rows of one constant key, key columns first.
    `key`: the table's key column, or several in the order of the arguments. `table`, `options`: as for `lookup_join`.

    With `between`, `cidr` or `starts_with`, the function has one more argument, the last one: a value that is compared with columns of the
    table. `between`: two columns; a row matches if the value lies between them. `cidr`: the column with a network, or two columns; a row
    matches if the value is an address in its network. `starts_with`: the column with a prefix; a row matches if the value begins with it. `key`
    is then optional. If `key` is not given either, the table's options say which of the three applies (`lookup.range`, `lookup.cidr` or
    `lookup.starts-with`), and the keys are the table's other key columns. `value_type`: the type to which Spark casts the value, such as
    'BIGINT' or 'BINARY' for addresses (default: the type of the table's column).

    Each query or micro-batch answers from the version that is current when it starts. Without functions defined in SQL (Spark 3.5), each
    host finds that version by itself, there is no `name_rows`, and `name(key…)` returns a struct of nulls if no row has the key.

    Raises OptionError and SchemaError for arguments that do not fit. A query raises NonUniqueKeyError for a key with several rows, unless
    `multi`.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise OptionError(f"argument name = {name!r}: give a function's name, of letters, digits and _")
    if in_pipeline(spark):
        raise NotSupportedError(
            f"register_lookup, name = {name!r}: Spark creates no functions in a pipeline. Call lookup_join in the function of a flow, or, in "
            "SQL, join a table that was created before with CREATE TABLE … USING lookupcache"
        )
    match = parse_match(None, between, cidr, starts_with, names_column=False)
    keys = [key] if isinstance(key, str) else list(key or ())
    if key is None and match is None:
        dim_table = look_up(spark, table, None, columns, options or {}, "stored", "key")
        match = stored_match(dim_table.parsed.read)
    else:
        dim_table = look_up(spark, table, keys, columns, options or {}, match, "key")
    if match is not None:
        check_match_cache(match, dim_table.keys, dim_table)
    elif value_type is not None:
        raise OptionError(
            f"argument value_type = {value_type!r} is for functions with between, cidr or starts_with: give one of these, or leave value_type out"
        )
    matched = None if match is None else _matched(match, dim_table, value_type)
    if defaults_to_full(dim_table):
        dim_table = with_default_cache(dim_table, dim_table.facts().bytes)
    if not dim_table.returned_fields:
        raise OptionError(
            "argument columns: the function would return no columns: name at least one column of the table"
        )
    # `name_rows` also returns the key columns, before all others.
    key_fields = tuple(StructField(column, dim_table.column_type(column)) for column in dim_table.keys)
    value_fields = tuple(field for field in dim_table.returned_fields if field.name not in dim_table.keys)
    whole = dataclasses.replace(dim_table, returned_fields=(*key_fields, *value_fields))
    if not features.SQL_FUNCTIONS:
        _register_plain(dim_table, matched, name, multi)
        return
    with _creating:
        registered: set[str] = vars(spark).setdefault("_lookup_functions", set())
        _check_name(name, registered)
        try:
            _create(dim_table, whole, matched, _TRIED + name.lower(), multi)
        finally:  # functions of an earlier call with this name stay until Spark has accepted both new functions
            _drop(spark, _TRIED + name.lower())
        _create(dim_table, whole, matched, name, multi)
        registered.add(name.lower())


@dataclasses.dataclass(frozen=True)
class _Matched:
    """How the last argument of a function, which has the type `type`, matches some of the table's columns."""

    kind: MatchKind
    columns: tuple[str, ...]
    type: DataType


def _matched(match: MatchArgument, table: DimensionTable, value_type: str | None) -> _Matched:
    """How the last argument of a function is matched.

    Raises OptionError for a `value_type` that is not an SQL type, SchemaError for a type that does not compare with the table's columns.
    """
    columns = match_columns(match, table)
    if value_type is None:
        return _Matched(match.kind, columns, table.column_type(columns[0]))
    try:
        kind = table.spark.sql(f"SELECT CAST(NULL AS {value_type}) AS value").schema["value"].dataType
    except Exception:  # of Spark's parser
        raise OptionError(f"argument value_type = {value_type!r}: give an SQL type, such as 'BIGINT'") from None
    Match(match.kind, columns).cast_values(table.arrow(columns).field(0), pa.nulls(0, arrow_type(kind)))
    return _Matched(match.kind, columns, kind)


def _single_lookup(table: DimensionTable, match: _Matched | None, many: bool) -> tuple[ChainedLookup, PassSpec]:
    """(the lookup that a function makes, the spec of a UDF that makes only this lookup). `many`: a row may have several results."""
    names = tuple(field.name for field in table.returned_fields)
    keys = [Key((key,), table.column_type(key), False) for key in table.keys]
    if match is not None:
        name = "value" if "value" not in table.keys else "matched_value"
        keys.append(Key((name,), match.type, False))
    kind = None if match is None else (match.kind, match.columns)
    lookup = ChainedLookup(table, tuple(keys), names, "left", kind, current_build(table.spark))
    stage = Stage(lookup.spec, tuple(range(len(keys))), (0,), "left", lookup.build)
    return lookup, PassSpec((stage,), many)


def _register_plain(table: DimensionTable, match: _Matched | None, name: str, multi: bool) -> None:
    """Register a UDF as the function `name`, in a Spark without functions defined in SQL. There is no function `name_rows` then."""
    lookup, spec = _single_lookup(table, match, multi)
    arguments = StructType([StructField(key.column, key.type) for key in lookup.keys])
    for argument in arguments:
        check_plain_key(name, argument)
    probe = PlainProbe(name, spec, arrow_schema(arguments), lookup.options_text, lookup.build)
    table.spark.udf.register(name, pandas_function(probe, lookup.fields, multi))


def _create(dim_table: DimensionTable, whole: DimensionTable, match: _Matched | None, name: str, multi: bool) -> None:
    """Create the functions `name` and `name_rows`, a UDF for each, and the view from which they get the version token."""
    base = f"_lookup_{name.lower()}"
    # Spark adds its own stack frames to an error in a subquery. So the view returns an error instead of a token, and the UDF raises it.
    on_error = OnError.STALE if dim_table.parsed.read.on_error is OnError.STALE else OnError.NULL
    options = {**dim_table.options, "lookup.on-error": on_error.value}
    load_view(dim_table.spark, options, View.TOKEN).createOrReplaceTempView(f"{base}_version")
    bodies = {
        name: _body(dim_table, match, base, many=multi),
        f"{name}_rows": _body(whole, match, base, many=True, as_rows=True),
    }
    for function, body in bodies.items():
        dim_table.spark.sql(f"CREATE OR REPLACE TEMPORARY FUNCTION {function}{body}")


def _drop(spark: SparkSession, name: str) -> None:
    for function in (name, f"{name}_rows", *_udfs(f"_lookup_{name}")):
        spark.sql(f"DROP TEMPORARY FUNCTION IF EXISTS {function}")
    spark.catalog.dropTempView(f"_lookup_{name}_version")


def _check_name(name: str, registered: set[str]) -> None:
    """Raise OptionError if `name` or `name_rows` is already a function of another lookup in the session. `registered`: names of lookups."""
    lower_name = name.lower()
    clashes = {f"{lower_name}_rows": f"{lower_name}_rows", lower_name.removesuffix("_rows"): lower_name}
    for clashing, function in clashes.items():
        if clashing != lower_name and clashing in registered:
            raise OptionError(
                f"argument name = {name!r}: a lookup {clashing!r} is registered in this session, and both would have a function "
                f"{function}(): give another name"
            )


def _udfs(base: str) -> tuple[str, str]:
    """(the name of the UDF that a lookup's function calls, that of the UDF that its `_rows` function calls)."""
    return f"{base}_udf", f"{base}_rows_udf"


def _body(table: DimensionTable, match: _Matched | None, base: str, many: bool, as_rows: bool = False) -> str:
    """The SQL of CREATE FUNCTION after the function's name: arguments, result, and the query that calls the UDF. Registers this UDF.

    `as_rows`: the body of the table function `name_rows`.
    """
    udf = _udfs(base)[as_rows]
    lookup, spec = _single_lookup(table, match, many)
    lookup_udf = LookupUdf(udf, spec, lookup.fields, [key.type for key in lookup.keys], 1)
    table.spark.udf.register(udf, lookup_udf.function)
    declared = ", ".join(f"{quote(key.column)} {_ddl(key.type)}" for key in lookup.keys)
    keys = [key.sql for key in lookup.keys]
    if match is not None and match.kind is MatchKind.CIDR and isinstance(match.type, StringType):
        keys[-1] = _address(keys[-1])
    arguments = ", ".join(lookup_udf.arguments(keys))
    call = lookup_udf.answer(f"{udf}({arguments}, (SELECT version FROM {base}_version))")
    if not as_rows:
        return f"({declared}) RETURN {call}"
    returned = ", ".join(f"{quote(field.name)} {_ddl(field.dataType)}" for field in lookup.fields)
    return f"({declared}) RETURNS TABLE ({returned}) RETURN SELECT r.* FROM (SELECT inline({call})) r"


def _address(text: str) -> str:
    """An SQL expression for an Internet address as text. `text`: an SQL expression for the address as text, or for a number as text, which is
    taken as an IPv4 address."""
    number = f"TRY_CAST({text} AS BIGINT)"
    parts = ", ".join(f"shiftright({number}, {bits}) & 255" for bits in (24, 16, 8, 0))
    return f"IF({number} BETWEEN 0 AND 4294967295, concat_ws('.', {parts}), {text})"


def _ddl(kind: DataType) -> str:
    """The SQL name of a type, with the names of struct fields in backquotes."""
    if isinstance(kind, StructType):
        return f"STRUCT<{', '.join(f'{quote(field.name)}: {_ddl(field.dataType)}' for field in kind)}>"
    if isinstance(kind, ArrayType):
        return f"ARRAY<{_ddl(kind.elementType)}>"
    if isinstance(kind, MapType):
        return f"MAP<{_ddl(kind.keyType)}, {_ddl(kind.valueType)}>"
    return kind.simpleString()
