"""Converts Spark's types and schemas to Arrow's, and Arrow's to Spark's."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyspark.sql.pandas import types
from pyspark.sql.types import DataType, StructField, StructType

from pyspark_lookup.columnar.types import (
    check_all_readable,
    collated_field,
    has_variant,
    unreadable,
    unreadable_type,
)
from pyspark_lookup.errors import SchemaError
from pyspark_lookup.spark import features

_UNREADABLE = "lookup.unreadable"
_UTC: Any = {"timezone": "UTC"} if features.TYPES_HAVE_TIME_ZONES else {}


def arrow_type(kind: DataType) -> pa.DataType:
    """The Arrow type in which Spark exchanges values of a Spark type with Python. Timestamps are in UTC."""
    return types.to_arrow_type(kind, **_UTC)


def arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow schema in which Spark exchanges rows of a Spark schema with Python."""
    return types.to_arrow_schema(schema, **_UTC)


def checked_arrow_schema(schema: StructType, label: str) -> pa.Schema:
    """The Arrow schema in which Spark exchanges these rows with Python. Raises SchemaError for a column whose type Arrow
    lacks.

    `label`: the first words of the error.
    """
    for field in schema:
        try:
            arrow_schema(StructType([field]))
        except Exception as problem:  # which class of Spark's depends on the type and on the version of Spark
            raise SchemaError(
                f"{label} column {field.name!r} is {field.dataType.simpleString()}, which Spark does not pass to Python "
                f"({type(problem).__name__}): cast it or leave it out"
            ) from None
    return arrow_schema(schema)


def struct_type(schema: pa.Schema, readable: bool = True) -> StructType:
    """The Spark schema of Arrow columns, with the collations that their metadata names. A timestamp without a time zone becomes TIMESTAMP_NTZ.

    `readable`: False for a schema in which columns that Spark cannot read are VOID, with the reason in their metadata; `unreadable_reason` returns
    it. Otherwise they raise UnreadableColumnError. Raises SchemaError for a column with a collation whose files have different types.
    """
    schema = pa.schema([_for_spark(field) for field in schema])
    if readable:
        check_all_readable(schema)
    reasons = [unreadable(field.type) for field in schema]
    stand_ins = [
        field if reason is None else field.with_type(pa.null()) for field, reason in zip(schema, reasons, strict=True)
    ]
    # The default of the argument differs between Spark's versions.
    struct = types.from_arrow_schema(pa.schema(stand_ins), prefer_timestamp_ntz=True)
    for field, column, reason in zip(struct, schema, reasons, strict=True):
        if reason is not None:
            field.metadata = {_UNREADABLE: reason}
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


def _for_spark(field: pa.Field) -> pa.Field:
    if features.VARIANTS or not has_variant(field.type):
        return field
    reason = (
        f"column {field.name!r} is a VARIANT, which Spark {features.VARIANTS.since} has and this Spark does not have"
    )
    return field.with_type(unreadable_type(reason))


def unreadable_reason(field: StructField) -> str | None:
    """Why Spark cannot read a column of a table; None if it can. `field`: the column in a schema made with `readable=False`."""
    return (field.metadata or {}).get(_UNREADABLE)


def is_collated(kind: DataType) -> bool:
    """Whether a type is or contains a STRING with a collation, by which two texts with different bytes may be equal."""
    return "__COLLATIONS" in StructType([StructField("c", kind)]).json()
