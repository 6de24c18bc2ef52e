"""Finds out whether code runs in a file that defines a pipeline (Declarative Pipelines), where Spark refuses some operations.

Code in such a file must not change the session. In the function of a flow (`@dp.materialized_view`, `@dp.table`, …), Spark plans and executes
nothing, because the datasets that it reads may not exist yet. Each operation that Spark refuses leaves a stack trace in the server's log. So this
module does not try operations to find out.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession


def in_pipeline(spark: SparkSession) -> bool:
    """Whether this thread runs a file that defines a pipeline."""
    return bool(_contexts(spark))


def in_flow_function(spark: SparkSession) -> bool:
    """Whether this thread runs the function of a flow, in which Spark plans and executes nothing."""
    return any(context.HasField("flow_name") for context in _contexts(spark))


def _contexts(spark: Any) -> list[Any]:
    """The contexts of pipelines that this thread sends to the server with each request; [] outside of a pipeline."""
    if isinstance(spark, SparkSession):
        return []  # the session is one of Spark Classic, which has no pipelines
    extensions = getattr(spark.client.thread_local, "user_context_extensions", ())
    if not extensions:
        return []
    from pyspark.sql.connect.proto import PipelineAnalysisContext  # noqa: PLC0415 - a classic session needs no gRPC

    contexts = []
    for _, extension in extensions:
        context = PipelineAnalysisContext()
        if extension.Unpack(context):
            contexts.append(context)
    return contexts
