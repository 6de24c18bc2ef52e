"""Reading in an executor's worker: which execution this is, and the batches of one task."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pyarrow as pa
from pyspark import TaskContext

from pyspark_lookup.engine.lookup import read_rows
from pyspark_lookup.engine.lookup_join import issue_token
from pyspark_lookup.engine.metadata_tables import ViewTask, view_batches
from pyspark_lookup.engine.plan import ReadPlan, ReadTask
from pyspark_lookup.engine.runtime import runtime
from pyspark_lookup.options.lookup_options import HOST_KEYS, SPARK_CONF_PREFIX, LookupOptions
from pyspark_lookup.table.executions import Execution


def read(
    plan: ReadPlan | LookupOptions, task: ReadTask | ViewTask, built_at_s: float, columns: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The batches of a task of a DataFrame that was built at a time. Everything is read from the store before the first one.

    `columns`: those of the batches; what the plan does not read of them is null.
    """
    context = TaskContext.get()
    count_for_application(context)
    options = (plan if isinstance(plan, LookupOptions) else plan.options).on_host(session_options(context))
    engine = runtime().engine(options)
    with engine.published():
        if isinstance(plan, LookupOptions):
            assert isinstance(task, ViewTask)
            execution = current_execution(context, built_at_s)
            token = functools.partial(issue_token, options, execution)
            batches = view_batches(engine, task, options, token, execution)
        else:
            assert isinstance(task, ReadTask)
            batches = read_rows(engine.reader, plan, task, current_execution(context, built_at_s))
        # Now: a query with a LIMIT stops its workers after the first batch.
        engine.publish_metrics()
        for batch in batches:
            yield batch if batch.schema.names == columns.names else _widened(batch, columns)


def _widened(batch: pa.RecordBatch, columns: pa.Schema) -> pa.RecordBatch:
    held = dict(zip(batch.schema.names, batch.columns, strict=True))
    values = [held[c.name] if c.name in held else pa.nulls(batch.num_rows, c.type) for c in columns]
    return pa.RecordBatch.from_arrays(values, schema=columns)


def count_for_application(context: TaskContext | None) -> None:
    """Count what this worker does for the application that it is a worker of."""
    name = context.getLocalProperty("spark.app.id") if context is not None else None
    if name:
        runtime().of_application(name)


def session_options(context: TaskContext | None) -> dict[str, str]:
    """What the session sets as `spark.lookupcache.*` at run time, as option keys."""
    if context is None:
        return {}
    # Asked by name, a mistyped key would be ignored; Spark keeps no public list of them.
    known = {key: context.getLocalProperty(SPARK_CONF_PREFIX + key.removeprefix("lookup.")) for key in HOST_KEYS}
    given = getattr(context, "_localProperties", None) or {}
    found = {
        "lookup." + key.removeprefix(SPARK_CONF_PREFIX): v
        for key, v in given.items()
        if key.startswith(SPARK_CONF_PREFIX)
    }
    return {key: value for key, value in {**known, **found}.items() if value}


def current_execution(context: TaskContext | None, built_at_s: float | None = None) -> Execution | None:
    """What this task's rows must agree with: a stream's micro-batch, or a query with all its parts.

    `built_at_s`: when what asks was built, if that may have been inside a `foreachBatch` function. None outside Spark, or where
    Spark does not say: the task then resolves for itself.
    """
    if context is None:
        return None
    application = "/".join(context.getLocalProperty(key) or "" for key in ("spark.app.id", "spark.app.startTime"))
    stream, batch = (context.getLocalProperty(key) for key in ("sql.streaming.queryId", "streaming.sql.batchId"))
    if stream and batch:
        # A batch that runs again after a restart is another execution: it sees what is current then.
        run = context.getLocalProperty("spark.jobGroup.id") or ""
        return Execution(application, f"stream {stream} run {run} batch {batch}", built_at_s)
    for key in ("spark.sql.execution.root.id", "spark.sql.execution.id"):
        execution = context.getLocalProperty(key)
        if execution:
            return Execution(application, f"execution {execution}")
    return None
