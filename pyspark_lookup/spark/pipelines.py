"""Declarative Pipelines: whether code runs in one of their files, where Spark refuses some operations.

In a flow's function (`@dp.materialized_view`, `@dp.table`, …) nothing may be analysed or executed: the datasets that it reads may not exist
yet. Code in such a file must not change the session. Each refusal leaves a stack trace in the server's log, so this
module tries no operation to find out.
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
    """The contexts in which requests of this thread tell the server to which pipeline they belong."""
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
