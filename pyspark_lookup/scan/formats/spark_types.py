"""Columns in the types that Spark noted when it wrote them, which a format itself lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from pyspark_lookup.columnar.types import unreadable_type
from pyspark_lookup.errors import NotSupportedError


def typed_fields(fields: Sequence[pa.Field], spark_types: Mapping[str, Any], url: str) -> list[pa.Field]:
    """Fields in the types that `spark_types` has for their names, in Spark's JSON; the other fields stay as they are.

    A VARIANT, a TIME or a year-month interval is an `unreadable_type`, because a Python source cannot return it to Spark.
    """
    return [field if field.name not in spark_types else _field(field, spark_types[field.name], url) for field in fields]


def _field(field: pa.Field, spark_type: Any, url: str) -> pa.Field:
    try:
        return field.with_type(_apply_spark_type(field.type, spark_type))
    except NotSupportedError as problem:
        return field.with_type(unreadable_type(f"column {field.name!r} is of {problem} ({url})"))


def _apply_spark_type(kind: pa.DataType, spark_type: Any) -> pa.DataType:
    if isinstance(spark_type, str):
        if spark_type == "variant" or spark_type.startswith(("interval year", "interval month")):
            instead = "to_json(v)" if spark_type == "variant" else "a number of months"
            raise NotSupportedError(
                f"Spark's type {spark_type}, which no Python source can read: write it as {instead} instead"
            )
        if spark_type.startswith("time(") and pa.types.is_int64(kind):  # in ORC
            raise NotSupportedError(
                f"Spark's type {spark_type}, which no Python source can read: write it as text instead"
            )
        if spark_type == "timestamp_ntz" and pa.types.is_int64(kind):  # in ORC
            return pa.timestamp("us")
        return pa.duration("us") if spark_type.startswith("interval ") and pa.types.is_int64(kind) else kind
    inner = spark_type.get("type") if isinstance(spark_type, dict) else None
    if inner == "struct" and pa.types.is_struct(kind):
        types = {field.get("name"): field.get("type") for field in spark_type.get("fields", ())}
        return pa.struct([field.with_type(_apply_spark_type(field.type, types.get(field.name))) for field in kind])
    if inner == "array" and pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_apply_spark_type(kind.value_type, spark_type.get("elementType"))))
    if inner == "map" and pa.types.is_map(kind):
        key = _apply_spark_type(kind.key_type, spark_type.get("keyType"))
        return pa.map_(key, kind.item_field.with_type(_apply_spark_type(kind.item_type, spark_type.get("valueType"))))
    return kind
