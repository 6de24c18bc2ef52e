"""What an executor's Python worker runs: `read` returns the batches of a scan's task; `Resolve` and `Probe` are the functions of a lookup.

Spark pickles `Resolve` and `Probe` with their texts. Equal texts have equal pickles, so Spark sees when two relations are the same, and
resolves them once.
"""

from __future__ import annotations

import functools
import gc
import os
import re
import sys
import zipimport
from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark import SparkFiles, TaskContext

from pyspark_lookup.core.threads import run_in_order
from pyspark_lookup.lookup.lookup import read_rows
from pyspark_lookup.lookup.lookup_join import columns_of_token, issue_token, open_pass, options_from_json
from pyspark_lookup.lookup.metadata_tables import ViewTask, view_batches
from pyspark_lookup.lookup.read import ReadPlan, ReadTask
from pyspark_lookup.lookup.runtime import runtime
from pyspark_lookup.options.lookup_options import HOST_KEYS, SPARK_CONF_PREFIX, LookupOptions
from pyspark_lookup.spark.micro_batch import ROOT_EXECUTION, read_build
from pyspark_lookup.spark.worker_errors import without_traceback
from pyspark_lookup.versions.executions import Build, Execution

_HEAP = re.compile(
    "([0-9]+)([kmgt]?)b?"
)  # Spark's notation for sizes of memory; a number without a unit is in megabytes
_LARGEST_ARRAY = 2**31 - 16  # bytes of the largest array that the JVM can have


def read(
    plan: ReadPlan | LookupOptions,
    task: ReadTask | ViewTask,
    build: Build | None,
    built_at_s: float,
    columns: pa.Schema,
) -> Iterator[pa.RecordBatch]:
    """The batches of one task. All bytes are read from the store before the first batch is yielded.

    `columns`: the columns of the batches; columns that the plan does not read are null.
    """
    prepare_worker()
    count_for_application()
    options = (plan if isinstance(plan, LookupOptions) else plan.options).on_host(session_options())
    engine = runtime().engine(options)
    with engine.publish():
        if isinstance(plan, LookupOptions):
            assert isinstance(task, ViewTask)
            execution = current_execution(build, built_at_s)
            token = functools.partial(issue_token, options, execution)
            batches = view_batches(engine, task, options, token, execution)
        else:
            assert isinstance(task, ReadTask)
            batches = read_rows(engine.reader, plan, task, current_execution(build, built_at_s))
        # Publish now, because a query with a LIMIT stops its workers after the first batch.
        engine.publish_metrics()
        for batch in batches:
            yield batch if batch.schema.names == columns.names else _widen(batch, columns)


def _widen(batch: pa.RecordBatch, columns: pa.Schema) -> pa.RecordBatch:
    arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
    values = [arrays[c.name] if c.name in arrays else pa.nulls(batch.num_rows, c.type) for c in columns]
    return pa.RecordBatch.from_arrays(values, schema=columns)


def count_for_application() -> None:
    """Count the metrics of this worker under its Spark application."""
    context = TaskContext.get()
    name = context.getLocalProperty("spark.app.id") if context is not None else None
    if name:
        runtime().of_application(name)


def prepare_worker() -> None:
    """Make the tasks that this worker runs from now on start sooner. Called when a task begins, before it opens a table."""
    if TaskContext.get() is not None:
        _freeze_modules()
        _forget_archives()


def _forget_archives() -> None:
    """Drop the import system's finders for zip files and jars; an import makes a new one.

    Up to Spark 4.1, each task begins with `importlib.invalidate_caches()`, and up to Python 3.12, each finder for an archive then reads the
    archive's whole directory. There are some 15 of them for PySpark's archive and for a jar of Spark: in all, 60 to 90 ms of CPU time a task.
    Those for files of `SparkContext.addPyFile` stay, because such a file may be replaced.
    """
    added = SparkFiles.getRootDirectory()
    for path, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimport.zipimporter) and not finder.archive.startswith(added + os.sep):
            sys.path_importer_cache.pop(path, None)


@functools.cache
def _freeze_modules() -> None:
    """Exempt what this worker has imported from garbage collections: Spark's daemon collects after each task, which takes 50 ms with these modules.

    Called before the worker opens its first table, so that nothing of a table is exempt.
    """
    pa.array([0])  # The first array of a process imports pandas.
    gc.collect()
    gc.freeze()


def session_options() -> dict[str, str]:
    """The options that the session sets at run time as `spark.lookupcache.*`, by option key."""
    context = TaskContext.get()
    if context is None:
        return {}
    # All properties are read, so that a mistyped key is an error instead of being ignored. Spark has no public list of them.
    host_values = {key: context.getLocalProperty(SPARK_CONF_PREFIX + key.removeprefix("lookup.")) for key in HOST_KEYS}
    local_properties = getattr(context, "_localProperties", None) or {}
    other_values = {
        "lookup." + key.removeprefix(SPARK_CONF_PREFIX): v
        for key, v in local_properties.items()
        if key.startswith(SPARK_CONF_PREFIX)
    }
    return {key: value for key, value in {**host_values, **other_values}.items() if value}


def largest_row() -> int:
    """The most bytes that Spark's JVM can take as one row: an eighth of its memory, because it copies a row while its buffer grows, and other tasks
    do the same."""
    context = TaskContext.get()
    if context is None:
        return _LARGEST_ARRAY
    local = (context.getLocalProperty("spark.master") or "").startswith("local")
    text = context.getLocalProperty("spark.driver.memory" if local else "spark.executor.memory")
    heap = _HEAP.fullmatch((text or "1g").strip().lower())
    if heap is None:
        return _LARGEST_ARRAY
    shift = {"k": 10, "m": 20, "g": 30, "t": 40}[heap[2] or "m"]
    return min((int(heap[1]) << shift) // 8, _LARGEST_ARRAY)


def current_execution(build: Build | None = None, built_at_s: float | None = None) -> Execution | None:
    """The execution to which this task belongs: a stream's micro-batch, or a whole query. All tasks of an execution read one version.

    `build`: the micro-batch in whose function the lookup was built, whichever thread runs it. Without it, Spark's properties say whether
    there is a micro-batch. `built_at_s`: when a DataFrame was built, if the driver did not know its micro-batch. None outside Spark, or if
    Spark does not say: then the task resolves the version for itself.
    """
    context = TaskContext.get()
    if context is None:
        return None
    application = "/".join(context.getLocalProperty(key) or "" for key in ("spark.app.id", "spark.app.startTime"))
    if build is not None:
        return Execution(application, build.execution, build.at_s)
    build = read_build(context.getLocalProperty)
    if build is not None:
        return Execution(application, build.execution, built_at_s)
    for key in (ROOT_EXECUTION, "spark.sql.execution.id"):
        execution = context.getLocalProperty(key)
        if execution:
            return Execution(application, f"execution {execution}")
    return None


class Resolve:
    """The function for `mapInArrow` that returns one row: for each table the token of the version that this execution reads.

    `tables`: for each token the options of the table, and the micro-batch in which the lookup was built. `columns`: the names of the row's
    columns, three for each table, see `columns_of_token`.
    """

    def __init__(self, name: str, tables: Sequence[tuple[str, Build | None]], columns: Sequence[str]) -> None:
        self.__name__ = name  # the name that plans show
        self._tables = tuple(tables)
        self._columns = tuple(columns)

    @without_traceback
    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        prepare_worker()
        count_for_application()
        session = session_options()
        requests = [(text, current_execution(build)) for text, build in self._tables]

        def resolve(request: tuple[str, Execution | None]) -> bytes:
            return issue_token(runtime().effective(options_from_json(request[0]).on_host(session)), request[1])

        threads = len(self._tables) if len(self._tables) > 1 else 0
        values = [value for token in run_in_order(resolve, requests, threads) for value in columns_of_token(token)]
        types = (pa.int64(), pa.int64(), pa.binary()) * len(self._tables)
        columns = [pa.array([value], kind) for value, kind in zip(values, types, strict=True)]
        yield pa.RecordBatch.from_arrays(columns, names=self._columns)


class Probe:
    """The iterator Arrow UDF of a pass: looks up the keys among its arguments. The last arguments are the versions."""

    def __init__(self, name: str, spec: str, versions: int) -> None:
        self.__name__ = name
        self._spec = spec
        self._versions = versions

    @without_traceback
    def __call__(self, batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        prepare_worker()
        count_for_application()
        lookups = open_pass(self._spec, session_options())
        executions = [current_execution(stage.build) for stage in lookups.spec.stages]
        row_bytes = largest_row()
        try:
            for arrays in batches:
                keys, versions = arrays[: -self._versions], arrays[-self._versions :]
                for answers in lookups.answers(keys, versions, executions, row_bytes):
                    lookups.publish()  # so that a worker that is killed has published all but its current batch
                    yield answers
        finally:
            lookups.publish()
