"""What Spark says of a Parquet file's columns beyond what Parquet does: it keeps its own schema in the footer, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from pyspark_lookup.base.errors import SchemaError

_KEY = b"org.apache.spark.sql.parquet.row.metadata"


def spark_fields(fields: list[pa.Field], footer: Mapping[bytes, bytes] | None, url: str) -> list[pa.Field]:
    """The fields of a Parquet file in the types that Spark has written them as; those it says nothing of stay as they are.

    A day-time interval is a plain number of microseconds in Parquet, a VARIANT two binary columns. Raises SchemaError naming the
    column for a type that a Python source cannot hand to Spark: VARIANT and year-month intervals.
    """
    said = _said(footer)
    return [
        field if field.name not in said else field.with_type(_typed(field.type, said[field.name], field.name, url))
        for field in fields
    ]


def _said(footer: Mapping[bytes, bytes] | None) -> dict[str, Any]:
    """Spark's types by column; none where it has written nothing, or nothing that is known."""
    text = (footer or {}).get(_KEY, b"")
    if b"interval" not in text and b"variant" not in text:
        return {}
    try:
        return {field["name"]: field["type"] for field in json.loads(text)["fields"]}
    except (ValueError, KeyError, TypeError, RecursionError):  # of a writer that uses the key for something else
        return {}


def _typed(kind: pa.DataType, said: Any, name: str, url: str) -> pa.DataType:
    if isinstance(said, str):
        if said == "variant" or said.startswith(("interval year", "interval month")):
            instead = "to_json(v)" if said == "variant" else "a number of months"
            raise SchemaError(
                f"{url}: column {name!r} is of Spark's type {said}, which no Python source can read: write it as {instead} instead, "
                "or leave it out of the files"
            )
        return pa.duration("us") if said.startswith("interval ") and pa.types.is_int64(kind) else kind
    inner = said.get("type") if isinstance(said, dict) else None
    if inner == "struct" and pa.types.is_struct(kind):
        types = {field.get("name"): field.get("type") for field in said.get("fields", ())}
        return pa.struct([field.with_type(_typed(field.type, types.get(field.name), name, url)) for field in kind])
    if inner == "array" and pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_typed(kind.value_type, said.get("elementType"), name, url)))
    if inner == "map" and pa.types.is_map(kind):
        key = _typed(kind.key_type, said.get("keyType"), name, url)
        return pa.map_(key, kind.item_field.with_type(_typed(kind.item_type, said.get("valueType"), name, url)))
    return kind
