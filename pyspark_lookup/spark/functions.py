"""`register_lookup`: a lookup table as a function of SQL.

Spark calls an Arrow UDF with the keys and, by a scalar subquery over a source, the version. The subquery is read
once per reference; the execution's record makes the references of one query agree on a host.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.types import StructField

from pyspark_lookup.errors import OptionError
from pyspark_lookup.options import OnError, View
from pyspark_lookup.spark.join import lookup_udf, row_type
from pyspark_lookup.spark.tables import LookedUp, TableArgument, defaults_to_full, looked_up, quoted, with_default_cache

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
    found = looked_up(spark, table, keys, columns, options)
    if defaults_to_full(found):
        found = with_default_cache(found, found.view(View.SUMMARY).collect()[0].bytes)
    if not found.chosen:
        raise OptionError("argument columns: give at least one column of the table")
    view = f"_lookup_{name}_version"
    found.view(View.TOLD).createOrReplaceTempView(view)
    _register(found, name, view, many=multi)
    # The rows of a key show the key as well: as it is in the table, if it was chosen there.
    own = tuple(StructField(column, found.type_of(column)) for column in found.keys)
    others = tuple(field for field in found.chosen if field.name not in found.keys)
    _register(dataclasses.replace(found, chosen=(*own, *others)), f"{name}_rows", view, many=True, as_rows=True)


def _register(table: LookedUp, function: str, view: str, many: bool, as_rows: bool = False) -> None:
    """A function of SQL on top of a UDF that is named after it, and of the view of the version."""
    names = [field.name for field in table.chosen]
    udf = f"_lookup_{function}"
    table.spark.udf.register(udf, lookup_udf(udf, table, names, many))
    declared = ", ".join(f"{quoted(key)} {table.type_of(key).simpleString()}" for key in table.keys)
    call = f"{udf}({', '.join(map(quoted, table.keys))}, (SELECT version FROM {view}))"
    head = f"CREATE OR REPLACE TEMPORARY FUNCTION {function}({declared})"
    if as_rows:
        row = row_type(table.chosen, names, table.parsed.on_error is OnError.NULL)
        returned = ", ".join(f"{quoted(field.name)} {field.dataType.simpleString()}" for field in row)
        table.spark.sql(f"{head} RETURNS TABLE ({returned}) RETURN SELECT r.* FROM (SELECT inline({call})) r")
    else:
        table.spark.sql(f"{head} RETURN {call}")
