"""The differences between the versions of Spark from 4.1 on, in one place.

A worker's version is the server's; over Spark Connect the client may have another one.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyspark
from pyspark.sql.pandas import types
from pyspark.sql.types import DataType, StructField, StructType

from pyspark_lookup.columnar.types import collated_field
from pyspark_lookup.errors import NotSupportedError, SchemaError

SPARK = tuple(int(number) for number in pyspark.__version__.split(".")[:2])

if SPARK >= (4, 2):
    from pyspark.sql.streaming.datasource import ReadAllAvailable as ReadAllAvailable
    from pyspark.sql.streaming.datasource import ReadLimit as ReadLimit
    from pyspark.sql.streaming.datasource import ReadMaxBytes as ReadMaxBytes
    from pyspark.sql.streaming.datasource import ReadMaxFiles as ReadMaxFiles
    from pyspark.sql.streaming.datasource import ReadMaxRows as ReadMaxRows
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow as SupportsTriggerAvailableNow
else:

    def _absent(name: str) -> Any:
        """A placeholder for a class that this Spark does not have, and never uses."""
        return type(name, (), {})

    ReadAllAvailable, ReadLimit = _absent("ReadAllAvailable"), _absent("ReadLimit")  # type: ignore[misc]
    ReadMaxBytes, ReadMaxFiles, ReadMaxRows = map(_absent, ("ReadMaxBytes", "ReadMaxFiles", "ReadMaxRows"))  # type: ignore[misc]
    SupportsTriggerAvailableNow = _absent("SupportsTriggerAvailableNow")  # type: ignore[misc]


def arrow_type(kind: DataType) -> pa.DataType:
    """The Arrow type in which Spark takes and gives values of a type. Timestamps are in UTC."""
    return types.to_arrow_type(kind, timezone="UTC") if SPARK >= (4, 2) else types.to_arrow_type(kind)


def arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow schema in which Spark takes and gives rows."""
    return types.to_arrow_schema(schema, timezone="UTC") if SPARK >= (4, 2) else types.to_arrow_schema(schema)


def struct_type(schema: pa.Schema) -> StructType:
    """Spark's schema of Arrow columns, with their collations. A timestamp without a zone becomes TIMESTAMP_NTZ."""
    struct = types.from_arrow_schema(schema, prefer_timestamp_ntz=True)  # Spark 4.1 has another default
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


def require(since: tuple[int, int], feature: str, instead: str) -> None:
    """Raise NotSupportedError if this Spark is older than `since`. `feature`: what does not work there; `instead`: what to do."""
    if since > SPARK:
        required = ".".join(map(str, since))
        raise NotSupportedError(f"{feature} needs Spark {required}, and this is {pyspark.__version__}: {instead}")
