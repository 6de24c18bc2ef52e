"""Columns in the types that Spark has written them as, which it says beside a format's own types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from pyspark_lookup.base.errors import NotSupportedError
from pyspark_lookup.columnar.types import unreadable_type


def typed_fields(fields: Sequence[pa.Field], said: Mapping[str, Any], url: str) -> list[pa.Field]:
    """Fields in the types that are `said` of them by name, as in Spark's own JSON; those of which nothing is said stay as they are.

    A VARIANT, a TIME or a year-month interval is an `unreadable_type`: a Python source cannot hand it to Spark.
    """
    return [field if field.name not in said else _field(field, said[field.name], url) for field in fields]


def _field(field: pa.Field, said: Any, url: str) -> pa.Field:
    try:
        return field.with_type(_typed(field.type, said))
    except NotSupportedError as problem:
        return field.with_type(unreadable_type(f"column {field.name!r} is of {problem} ({url})"))


def _typed(kind: pa.DataType, said: Any) -> pa.DataType:
    if isinstance(said, str):
        if said == "variant" or said.startswith(("interval year", "interval month")):
            instead = "to_json(v)" if said == "variant" else "a number of months"
            raise NotSupportedError(
                f"Spark's type {said}, which no Python source can read: write it as {instead} instead"
            )
        if said.startswith("time(") and pa.types.is_int64(kind):  # in ORC
            raise NotSupportedError(f"Spark's type {said}, which no Python source can read: write it as text instead")
        if said == "timestamp_ntz" and pa.types.is_int64(kind):  # in ORC
            return pa.timestamp("us")
        return pa.duration("us") if said.startswith("interval ") and pa.types.is_int64(kind) else kind
    inner = said.get("type") if isinstance(said, dict) else None
    if inner == "struct" and pa.types.is_struct(kind):
        types = {field.get("name"): field.get("type") for field in said.get("fields", ())}
        return pa.struct([field.with_type(_typed(field.type, types.get(field.name))) for field in kind])
    if inner == "array" and pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_typed(kind.value_type, said.get("elementType"))))
    if inner == "map" and pa.types.is_map(kind):
        key = _typed(kind.key_type, said.get("keyType"))
        return pa.map_(key, kind.item_field.with_type(_typed(kind.item_type, said.get("valueType"))))
    return kind
