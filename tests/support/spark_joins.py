"""Joins as Spark does them, and whether two DataFrames have the same rows."""

import collections
import functools
import operator
from collections.abc import Mapping
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from tests.support.spark_columns import SEED


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def by_spark(df: DataFrame, table: str, on: Any, how: str = "left", columns: Any = None, prefix: str = "") -> DataFrame:
    """What `lookup_join` promises, in Spark's own words."""
    side = df.sparkSession.read.parquet(table)
    spelled = {name.casefold(): name for name in side.columns}
    pairs = dict(on) if isinstance(on, Mapping) else {name: name for name in ([on] if isinstance(on, str) else on)}
    keys = [spelled[name.casefold()] for name in pairs.values()]
    table_columns = [spelled[name.casefold()] for name in columns] if columns is not None else None
    value_columns = [name for name in side.columns if name not in keys] if table_columns is None else table_columns
    aliases = [f"own key {number}" for number in range(len(keys))]
    right = side.select(
        *(sf.col(quoted(key)).alias(alias) for key, alias in zip(keys, aliases, strict=True)),
        *(sf.col(quoted(name)).alias(prefix + name) for name in value_columns),
    )
    equal = [sf.col(quoted(fact_key)) == sf.col(quoted(alias)) for fact_key, alias in zip(pairs, aliases, strict=True)]
    return df.join(right, functools.reduce(operator.and_, equal), how).drop(*aliases)


def as_multiset(df: DataFrame) -> collections.Counter[str]:
    """The multiset of rows, told apart by type and by the sign of zero."""
    return collections.Counter(repr(tuple(row)) for row in df.collect())


def assert_same(actual: DataFrame, expected: DataFrame, of: str = "") -> None:
    """The same columns, types and rows."""
    columns, expected_columns = (
        [(field.name, field.dataType) for field in frame.schema] for frame in (actual, expected)
    )
    assert columns == expected_columns
    actual_rows, expected_rows = as_multiset(actual), as_multiset(expected)
    assert actual_rows == expected_rows, (
        f"seed {SEED} {of}, too many: {[*(actual_rows - expected_rows)][:5]}, missing: {[*(expected_rows - actual_rows)][:5]}"
    )
