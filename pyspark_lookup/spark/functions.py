"""`register_lookup`: a lookup table as a function of SQL.

Spark calls an Arrow UDF with the keys and, by a scalar subquery over a source, the version. The subquery is read
once per reference; the execution's record makes the references of one query agree on a host.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.types import StructField

from pyspark_lookup.errors import OptionError
from pyspark_lookup.options import CacheMode, MetadataSource, OnError, View
from pyspark_lookup.spark.join import lookup_udf, row_type
from pyspark_lookup.spark.tables import LookedUp, TableArgument, cache_given, looked_up, with_cache

__all__ = ["register_lookup"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def register_lookup(
    spark: SparkSession,
    name: str,
    table: TableArgument,
    key: str | Sequence[str],
    columns: Sequence[str] | None = None,
    multi: bool = False,
    **options: Any,
) -> None:
    """Make `SELECT f.*, airport(f.dest).name FROM flights f` work: temporary functions of this session.

    `name(key…)`: a struct of the table's `columns` (default: all but the key), null where no row has the key; with
    `multi` an array of structs, empty where none has. `name_rows(key…)`: a table function that returns the rows of one
    constant key, key columns first. `key`: the table's key column, or several in the order of the arguments. `table`,
    `options`: as for `lookup_join`.

    Each execution answers from the newest version at its start. Raises OptionError and SchemaError for arguments that do
    not fit; a query raises NonUniqueKeyError for a key with several rows, unless `multi`.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise OptionError(f"argument name = {name!r}: give a function's name, of letters, digits and _")
    keys = [key] if isinstance(key, str) else list(key)
    found = _with_default_cache(looked_up(spark, table, keys, columns, options))
    if not found.chosen:
        raise OptionError("argument columns: give at least one column of the table")
    key_fields = tuple(StructField(k, found.type_of(k)) for k in found.keys)
    others = tuple(field for field in found.chosen if field.name not in found.keys)
    _register(found, name, name, [field.name for field in found.chosen], multi)
    whole = LookedUp(spark, found.options, found.parsed, found.schema, found.keys, (*key_fields, *others))
    _register_rows(whole, name)


def _with_default_cache(table: LookedUp) -> LookedUp:
    by_query = table.parsed.provider is None and table.parsed.metadata_source is MetadataSource.UFS
    if cache_given(table.options) or not by_query:
        return table
    facts = table.view(View.SUMMARY).collect()[0]
    return with_cache(table, CacheMode.FULL) if facts.bytes <= table.parsed.split_size else table


def _register(table: LookedUp, name: str, function: str, names: Sequence[str], many: bool) -> None:
    """The function, on top of a UDF and a view of the version which are named after it."""
    spark = table.spark
    udf, view = f"_lookup_{function}", f"_lookup_{function}_version"
    spark.udf.register(udf, lookup_udf(udf, table, names, many))
    _version_view(table, view)
    arguments = [f"k{number}" for number in range(len(table.keys))]
    declared = ", ".join(
        f"{argument} {table.type_of(key).simpleString()}" for argument, key in zip(arguments, table.keys, strict=True)
    )
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY FUNCTION {name}({declared}) "
        f"RETURN {udf}({', '.join(arguments)}, (SELECT version FROM {view}))"
    )


def _version_view(table: LookedUp, view: str) -> None:
    table.view(View.TOLD).createOrReplaceTempView(view)


def _register_rows(table: LookedUp, name: str) -> None:
    spark = table.spark
    names = [field.name for field in table.chosen]
    udf, view = f"_lookup_{name}_rows", f"_lookup_{name}_version"
    spark.udf.register(udf, lookup_udf(udf, table, names, many=True))
    arguments = [f"k{number}" for number in range(len(table.keys))]
    declared = ", ".join(
        f"{argument} {table.type_of(key).simpleString()}" for argument, key in zip(arguments, table.keys, strict=True)
    )
    row = row_type(table.chosen, names, table.parsed.on_error is OnError.NULL)
    returned = ", ".join(f"`{field.name}` {field.dataType.simpleString()}" for field in row)
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY FUNCTION {name}_rows({declared}) RETURNS TABLE ({returned}) "
        f"RETURN SELECT r.* FROM (SELECT inline({udf}({', '.join(arguments)}, (SELECT version FROM {view})))) r"
    )
