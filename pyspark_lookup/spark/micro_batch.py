"""Finds the micro-batch to which the code of a thread belongs: on the driver, in a `foreachBatch` function; in a task, by Spark's properties.

The jobs of a `foreachBatch` function may lack Spark's properties, if the function sets job groups or uses threads of its own. So each lookup notes
the micro-batch in which it was built.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from pyspark_lookup.versions.executions import Build

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT_EXECUTION = "spark.sql.execution.root.id"
"""The Spark property with the number of the outermost execution. For all that a `foreachBatch` function runs, it is that of the micro-batch."""
_CONNECT_WORKER = "pyspark/sql/connect/streaming/worker/foreach_batch_worker.py"


def read_build(property_of: Callable[[str], str | None]) -> Build | None:
    """The micro-batch that a thread's properties name; None if they name none.

    A batch that runs again after a restart of its query counts as another micro-batch, and so reads the version that is current then.
    """
    stream, batch = property_of("sql.streaming.queryId"), property_of("streaming.sql.batchId")
    return Build(stream, f"{batch} in {property_of(ROOT_EXECUTION)}", time.time()) if stream and batch else None


def current_build(spark: SparkSession) -> Build | None:
    """The micro-batch whose `foreachBatch` function runs now; None outside of such a function."""
    return _connect_build() if _CONNECT_WORKER in _main_file() else _classic_build(spark)


def _classic_build(spark: Any) -> Build | None:
    """The micro-batch of this thread, without Spark Connect.

    A thread that the `foreachBatch` function has started has no properties of Spark: then this is the micro-batch of the stream to which the
    session belongs.
    """
    try:
        return read_build(spark.sparkContext.getLocalProperty) or _session_build(spark._jsparkSession)
    except (AttributeError, NotImplementedError, PySparkException, Py4JError):
        return None  # Spark Connect, outside a `foreachBatch` function; or a Spark with other internals


def _session_build(session: Any) -> Build | None:
    """The current micro-batch of the stream to which a session of the JVM belongs; None if it belongs to no stream."""
    for query in list(session.sharedState().activeStreamingQueries().values()):
        try:
            owner, batch = query.sparkSessionForStream(), query.getLatestExecutionContext().batchId()
        except Py4JError:  # a Spark that has no such methods
            owner, batch = query.lastExecution().sparkSession(), query.currentBatchId()
        if owner.equals(session):
            return Build(str(query.id()), f"{batch} of run {query.runId()}", time.time())
    return None


def _main_file() -> str:
    """The path of the Python file that this process runs."""
    return (getattr(sys.modules.get("__main__"), "__file__", None) or "").replace("\\", "/")


def _connect_build() -> Build | None:
    """The micro-batch whose `foreachBatch` function this process runs, if Spark Connect started it for this: read from the main thread's stack."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "process" and "df_id" in frame.f_locals:
            return Build("of Connect", str(frame.f_locals["df_id"]), time.time())
        frame = frame.f_back
    return None
