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
    chosen = [spelled[name.casefold()] for name in columns] if columns is not None else None
    shown = [name for name in side.columns if name not in keys] if chosen is None else chosen
    own = [f"own key {number}" for number in range(len(keys))]
    right = side.select(
        *(sf.col(quoted(key)).alias(alias) for key, alias in zip(keys, own, strict=True)),
        *(sf.col(quoted(name)).alias(prefix + name) for name in shown),
    )
    equal = [sf.col(quoted(left)) == sf.col(quoted(alias)) for left, alias in zip(pairs, own, strict=True)]
    return df.join(right, functools.reduce(operator.and_, equal), how).drop(*own)


def as_multiset(df: DataFrame) -> collections.Counter[str]:
    """The multiset of rows, told apart by type and by the sign of zero."""
    return collections.Counter(repr(tuple(row)) for row in df.collect())


def assert_same(mine: DataFrame, theirs: DataFrame, of: str = "") -> None:
    """The same columns, types and rows."""
    columns, others = ([(field.name, field.dataType) for field in frame.schema] for frame in (mine, theirs))
    assert columns == others
    found, wanted = as_multiset(mine), as_multiset(theirs)
    assert found == wanted, f"seed {SEED} {of}, too many: {[*(found - wanted)][:5]}, missing: {[*(wanted - found)][:5]}"
