"""What differs between the versions of Spark from 4.1 on, in the one place that knows.

A worker's version is the server's; over Spark Connect the client's may be another one.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyspark
from pyspark.sql.pandas import types
from pyspark.sql.types import DataType, StructType

from pyspark_lookup.base.errors import NotSupportedError

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
        """Stands for a class that this Spark neither has nor asks for."""
        return type(name, (), {})

    ReadAllAvailable, ReadLimit = _absent("ReadAllAvailable"), _absent("ReadLimit")  # type: ignore[misc]
    ReadMaxBytes, ReadMaxFiles, ReadMaxRows = map(_absent, ("ReadMaxBytes", "ReadMaxFiles", "ReadMaxRows"))  # type: ignore[misc]
    SupportsTriggerAvailableNow = _absent("SupportsTriggerAvailableNow")  # type: ignore[misc]


def arrow_type(kind: DataType) -> pa.DataType:
    """The Arrow type in which Spark takes and gives values of a type; timestamps are in UTC."""
    return types.to_arrow_type(kind, timezone="UTC") if SPARK >= (4, 2) else types.to_arrow_type(kind)


def arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow schema in which Spark takes and gives rows."""
    return types.to_arrow_schema(schema, timezone="UTC") if SPARK >= (4, 2) else types.to_arrow_schema(schema)


def struct_type(schema: pa.Schema) -> StructType:
    """Spark's types of Arrow columns; a timestamp without a zone has none there either."""
    return types.from_arrow_schema(schema, prefer_timestamp_ntz=True)  # 4.1 has another default


def scopes_pushed_filters() -> bool:
    """Whether the filters of one scan are that scan's own: before 5.0 they leak into others of the relation (SPARK-58551)."""
    return SPARK >= (5, 0)


def require(since: tuple[int, int], what: str, instead: str) -> None:
    """Raise NotSupportedError if this Spark is older than `since`: `what` does not work there, do `instead`."""
    if since > SPARK:
        needed = ".".join(map(str, since))
        raise NotSupportedError(f"{what} needs Spark {needed}, and this is {pyspark.__version__}: {instead}")
