"""Converts Spark's types and schemas to Arrow's, and Arrow's to Spark's."""

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
    """The Arrow type in which Spark exchanges values of a Spark type with Python. Timestamps are in UTC."""
    return types.to_arrow_type(kind, **_UTC)


def arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow schema in which Spark exchanges rows of a Spark schema with Python."""
    return types.to_arrow_schema(schema, **_UTC)


def struct_type(schema: pa.Schema) -> StructType:
    """The Spark schema of Arrow columns, with the collations that their metadata names. A timestamp without a time zone becomes TIMESTAMP_NTZ.

    Raises SchemaError for a column with a collation whose files have different types.
    """
    # The default of the argument differs between Spark's versions.
    struct = types.from_arrow_schema(schema, prefer_timestamp_ntz=True)
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
    """Whether a type is or contains a STRING with a collation, by which two texts with different bytes may be equal."""
    return "__COLLATIONS" in StructType([StructField("c", kind)]).json()
