"""Spark's types and Arrow's: the schemas in which Spark takes and gives rows."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyspark.sql.pandas import types
from pyspark.sql.types import DataType, StructField, StructType

from pyspark_lookup.columnar.types import collated_field
from pyspark_lookup.errors import SchemaError
from pyspark_lookup.spark import features

_UTC: Any = {"timezone": "UTC"} if features.TYPES_HAVE_TIME_ZONES else {}


def arrow_type(kind: DataType) -> pa.DataType:
    """The Arrow type in which Spark takes and gives values of a type. Timestamps are in UTC."""
    return types.to_arrow_type(kind, **_UTC)


def arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow schema in which Spark takes and gives rows."""
    return types.to_arrow_schema(schema, **_UTC)


def struct_type(schema: pa.Schema) -> StructType:
    """Spark's schema of Arrow columns, with their collations. A timestamp without a zone becomes TIMESTAMP_NTZ."""
    struct = types.from_arrow_schema(schema, prefer_timestamp_ntz=True)  # the default differs between Sparks
    for field, column in zip(struct, schema, strict=True):
        collated = collated_field(column)
        if collated is not None:
            kind = StructField.fromJson(collated).dataType
            if arrow_type(kind) != arrow_type(field.dataType):
                raise SchemaError(
                    f"column {column.name!r} has a collation, and is {column.type} in one file and {kind.simpleString()} in another: "
                    "declare it with lookup.schema, or leave it out with lookup.columns"
                )
            field.dataType = kind
    return struct


def is_collated(kind: DataType) -> bool:
    """Whether a type, or one nested in it, is a STRING with a collation (two strings may then be equal with different bytes)."""
    return "__COLLATIONS" in StructType([StructField("c", kind)]).json()
