"""Finds out which features the Spark of this process has. It looks for each feature, because vendors add features to older versions of Spark.

No other module asks for a version of Spark, or handles a part of PySpark that may be missing. A worker has the server's version of Spark; over
Spark Connect, the client may have another version.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import TYPE_CHECKING, Any

import pyspark
from pyspark.sql.pandas import types

if "prefer_timestamp_ntz" not in inspect.signature(types.from_arrow_schema).parameters:
    raise ImportError(
        f"pyspark_lookup needs Spark 3.5 or newer, and this is PySpark {pyspark.__version__}: install a newer one"
    )


def find(module: str, name: str) -> Any:
    """The attribute `name` of a module of PySpark; None if this Spark lacks it."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


@dataclasses.dataclass(frozen=True)
class Feature:
    """A feature that only some versions of Spark have. `title`: its name in errors. `since`: the first release of Apache Spark that has it.

    `present`: whether the Spark of this process has it.
    """

    title: str
    since: str
    present: bool

    def __bool__(self) -> bool:
        return self.present

    def require(self, what: str, instead: str) -> None:
        """Raise NotSupportedError if this Spark lacks the feature. `what`: the request that needs it. `instead`: what the user can do."""
        from pyspark_lookup.errors import NotSupportedError

        if not self.present:
            raise NotSupportedError(
                f"{what} needs {self.title} (Spark {self.since}), which this Spark {pyspark.__version__} does not have: {instead}"
            )


def _has(module: str, name: str) -> bool:
    return find(module, name) is not None


def _class(module: str, name: str) -> Any:
    """A class of PySpark; if this Spark lacks it, an empty class."""
    return find(module, name) or type(name, (), {})


arrow_udf: Any = find("pyspark.sql.pandas.functions", "arrow_udf")
PythonEvalType: Any = find("pyspark.util", "PythonEvalType") or find("pyspark.rdd", "PythonEvalType")
VariantType: Any = _class("pyspark.sql.types", "VariantType")
StatefulProcessor: Any = _class("pyspark.sql.streaming.stateful_processor", "StatefulProcessor")

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSource as DataSource
    from pyspark.sql.datasource import DataSourceArrowWriter as DataSourceArrowWriter
    from pyspark.sql.datasource import DataSourceReader as DataSourceReader
    from pyspark.sql.datasource import DataSourceStreamArrowWriter as DataSourceStreamArrowWriter
    from pyspark.sql.datasource import DataSourceStreamReader as DataSourceStreamReader
    from pyspark.sql.datasource import DataSourceStreamWriter as DataSourceStreamWriter
    from pyspark.sql.datasource import DataSourceWriter as DataSourceWriter
    from pyspark.sql.datasource import InputPartition as InputPartition
    from pyspark.sql.datasource import WriterCommitMessage as WriterCommitMessage
    from pyspark.sql.streaming.datasource import ReadAllAvailable as ReadAllAvailable
    from pyspark.sql.streaming.datasource import ReadLimit as ReadLimit
    from pyspark.sql.streaming.datasource import ReadMaxBytes as ReadMaxBytes
    from pyspark.sql.streaming.datasource import ReadMaxFiles as ReadMaxFiles
    from pyspark.sql.streaming.datasource import ReadMaxRows as ReadMaxRows
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow as SupportsTriggerAvailableNow
else:
    _BATCH = "pyspark.sql.datasource"
    _STREAM = "pyspark.sql.streaming.datasource"
    DataSource = _class(_BATCH, "DataSource")
    DataSourceReader = _class(_BATCH, "DataSourceReader")
    DataSourceWriter = _class(_BATCH, "DataSourceWriter")
    DataSourceStreamReader = _class(_BATCH, "DataSourceStreamReader")
    DataSourceStreamWriter = _class(_BATCH, "DataSourceStreamWriter")
    DataSourceArrowWriter = _class(_BATCH, "DataSourceArrowWriter")
    # Before Spark had this class, a stream's writer got Arrow batches if it was also a DataSourceArrowWriter.
    DataSourceStreamArrowWriter = find(_BATCH, "DataSourceStreamArrowWriter") or type(
        "DataSourceStreamArrowWriter", (DataSourceStreamWriter, DataSourceArrowWriter), {}
    )
    InputPartition = _class(_BATCH, "InputPartition")
    WriterCommitMessage = _class(_BATCH, "WriterCommitMessage")
    ReadAllAvailable = _class(_STREAM, "ReadAllAvailable")
    ReadLimit = _class(_STREAM, "ReadLimit")
    ReadMaxBytes = _class(_STREAM, "ReadMaxBytes")
    ReadMaxFiles = _class(_STREAM, "ReadMaxFiles")
    ReadMaxRows = _class(_STREAM, "ReadMaxRows")
    SupportsTriggerAvailableNow = _class(_STREAM, "SupportsTriggerAvailableNow")

ARROW_UDFS = Feature(
    "iterator Arrow UDFs", "4.1", bool(arrow_udf) and hasattr(PythonEvalType, "SQL_SCALAR_ARROW_ITER_UDF")
)
DATA_SOURCES = Feature("data sources in Python", "4.0", _has("pyspark.sql.datasource", "DataSource"))
VARIANTS = Feature("VARIANT", "4.0", _has("pyspark.sql.types", "VariantType"))
SQL_FUNCTIONS = Feature("functions defined in SQL", "4.0", VARIANTS.present)
ARROW_WRITERS = Feature("writers of Arrow batches", "4.0", _has("pyspark.sql.datasource", "DataSourceArrowWriter"))
STREAM_LIMITS = Feature(
    "read limits of streaming sources in Python", "4.2", _has("pyspark.sql.streaming.datasource", "ReadMaxRows")
)
STATEFUL_PROCESSORS = Feature(
    "stateful processors in Python", "4.0", _has("pyspark.sql.streaming.stateful_processor", "StatefulProcessor")
)
TYPES_HAVE_TIME_ZONES = "timezone" in inspect.signature(types.to_arrow_type).parameters
"""Whether PySpark's `to_arrow_type` takes a time zone for timestamps. If it does not, their Arrow type is in UTC."""
