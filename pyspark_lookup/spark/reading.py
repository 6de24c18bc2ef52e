"""What an executor's Python worker runs: `read` for the task of a scan, and for a lookup the functions `Resolve` and `Probe`.

`Resolve` and `Probe` hold only simple values, most of them texts, so that equal functions have equal pickles. Spark compares functions by their
pickles, and runs `Resolve` only once if two are equal.
"""

from __future__ import annotations

import functools
import gc
import os
import re
import sys
import time
import zipimport
from collections.abc import Callable, Iterable, Iterator, Sequence

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

# Spark's notation for sizes of memory; a number without a unit is in megabytes.
_HEAP = re.compile("([0-9]+)([kmgt]?)b?")
_LARGEST_ARRAY = 2**31 - 16  # the most bytes that an array can have in the JVM
_ROWS_AT_ONCE = 65_536  # rows of joined batches, see `JoinedBatches`
_BYTES_AT_ONCE = 32 * 2**20  # bytes of the arguments of joined batches, and of the answers to them
_COLLECTED_S = 0.2  # how long batches are collected before they are looked up


def read(
    plan: ReadPlan | LookupOptions,
    task: ReadTask | ViewTask,
    build: Build | None,
    built_at_s: float,
    columns: pa.Schema,
) -> Iterator[pa.RecordBatch]:
    """The batches of one task. All bytes are read from the store before the first batch is yielded.

    `plan`: the plan of a read of the table's rows; for a read of a view, the options. `columns`: the columns of the batches. Those that the plan
    does not read are null.
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
            execution = current_execution(build, built_at_s)
            rows = functools.partial(read_rows, engine.reader) if task.by_key else engine.reader.read
            batches = rows(plan, task, execution)
        # Now, because a query with a LIMIT may stop its workers after the first batch.
        engine.publish_metrics()
        for batch in batches:
            yield batch if batch.schema.names == columns.names else _widen(batch, columns)


def _widen(batch: pa.RecordBatch, columns: pa.Schema) -> pa.RecordBatch:
    arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
    values = [arrays[c.name] if c.name in arrays else pa.nulls(batch.num_rows, c.type) for c in columns]
    return pa.RecordBatch.from_arrays(values, schema=columns)


def count_for_application() -> None:
    """Tell the runtime the id of the Spark application, under which the metrics of this worker are then counted."""
    context = TaskContext.get()
    name = context.getLocalProperty("spark.app.id") if context is not None else None
    if name:
        runtime().of_application(name)


def prepare_worker() -> None:
    """Make the later tasks of this worker start faster. Called at the start of a task, before it opens a table."""
    if TaskContext.get() is not None:
        _freeze_modules()
        _forget_archives()


def _forget_archives() -> None:
    """Drop the finders of Python's import system for archives (zip files and jars). An import from an archive makes a new finder.

    Up to Spark 4.1, each task begins with `importlib.invalidate_caches()`, and up to Python 3.12, each finder of an archive then reads the
    archive's whole directory. A worker has about 15 such finders, for PySpark's own archive and for one of Spark's jars, and their reading
    takes 60 to 90 ms of CPU time a task. The finders of files added by `SparkContext.addPyFile` stay, because such a file may be replaced.
    """
    added = SparkFiles.getRootDirectory()
    for path, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimport.zipimporter) and not finder.archive.startswith(added + os.sep):
            sys.path_importer_cache.pop(path, None)


@functools.cache
def _freeze_modules() -> None:
    """Exempt the objects of the imported modules from garbage collections. Spark runs a collection after each task of a worker, which takes 50 ms
    without this.

    Called before the worker opens its first table, so that the objects of tables are not exempt.
    """
    pa.array([0])  # The first array of a process imports pandas.
    gc.collect()
    gc.freeze()


def session_options() -> dict[str, str]:
    """The options that the session sets as confs `spark.lookupcache.*`, by option key. {} outside Spark."""
    context = TaskContext.get()
    if context is None:
        return {}
    # Not only the confs with a known key are read, so that a mistyped key is an error. Spark has no public list of a task's properties.
    host_values = {key: context.getLocalProperty(SPARK_CONF_PREFIX + key.removeprefix("lookup.")) for key in HOST_KEYS}
    local_properties = getattr(context, "_localProperties", None) or {}
    other_values = {
        "lookup." + key.removeprefix(SPARK_CONF_PREFIX): v
        for key, v in local_properties.items()
        if key.startswith(SPARK_CONF_PREFIX)
    }
    return {key: value for key, value in {**host_values, **other_values}.items() if value}


def largest_row() -> int:
    """The most bytes that a row may have. This is an eighth of the memory of Spark's JVM, which copies a row each time the row's buffer grows, and
    does so for several tasks at a time."""
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
    """The execution to which this task belongs: a stream's micro-batch, or a query. All tasks of an execution read the same version.

    `build`: the micro-batch in whose foreachBatch function the read or lookup was built. If it is None, the micro-batch is the one that the
    task's properties name. `built_at_s`: when the read was built, for a `build` that is None. Returns None outside Spark, and if the task's
    properties name no execution: then the task resolves a version for itself.
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


def lookup_execution(build: Build | None) -> Execution | None:
    """The execution of the lookups of this task. If the task's properties name none, it is the task itself: all its batches read the same rows."""
    execution, context = current_execution(build), TaskContext.get()
    if execution is None and context is not None:
        application = context.getLocalProperty("spark.app.id") or ""
        return Execution(application, f"task {context.taskAttemptId()}")
    return execution


class Resolve:
    """A function for `mapInArrow` that returns one row: for each table of a lookup, the token of the version that this execution reads.

    `tables`: for each table its options, as JSON, and the micro-batch in whose function the lookup was built. `columns`: the names of the row's
    columns, three for each table (`columns_of_token`).
    """

    def __init__(self, name: str, tables: Sequence[tuple[str, Build | None]], columns: Sequence[str]) -> None:
        self.__name__ = name  # Spark's plans show it
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


class JoinedBatches:
    """Joins successive batches of columns into larger ones. Yields (the columns, the number of rows of the largest batch in them).

    A lookup has a fixed cost for each call, which is a third of its time for 10,000 keys. So batches are looked up together: as many rows as
    were looked up before, up to about `rows_at_once`, which may be changed meanwhile. A query with a LIMIT, which ends its workers early, so
    never looks up more than twice the rows that it needs. Joined batches have at most `bytes_at_once` bytes. Their rows may come from a slow
    stream, so they are not collected for more than 0.2 s.
    """

    def __init__(
        self,
        batches: Iterable[Sequence[pa.Array]],
        rows_at_once: int,
        bytes_at_once: int = _BYTES_AT_ONCE,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._batches = batches
        self.rows_at_once = rows_at_once
        self._bytes_at_once = bytes_at_once
        self._now_s = now_s

    def __iter__(self) -> Iterator[tuple[Sequence[pa.Array], int]]:
        parts: list[Sequence[pa.Array]] = []
        rows = size = largest = rows_before = 0
        began_s = self._now_s()
        for batch in self._batches:
            batch_bytes = sum(column.nbytes for column in batch)
            if parts and size + batch_bytes > self._bytes_at_once:
                yield _concat(parts), largest
                rows_before, parts, rows, size, largest = rows_before + rows, [], 0, 0, 0
            parts.append(batch)
            rows, size, largest = rows + len(batch[0]), size + batch_bytes, max(largest, len(batch[0]))
            if rows >= min(rows_before, self.rows_at_once) or self._now_s() - began_s > _COLLECTED_S:
                yield _concat(parts), largest
                rows_before, parts, rows, size, largest = rows_before + rows, [], 0, 0, 0
                began_s = self._now_s()
        if parts:
            yield _concat(parts), largest


def _concat(parts: Sequence[Sequence[pa.Array]]) -> Sequence[pa.Array]:
    return parts[0] if len(parts) == 1 else [pa.concat_arrays(columns) for columns in zip(*parts, strict=True)]


class Probe:
    """The Arrow UDF that does the lookups of a pass. Its arguments are columns: first the keys and values to look up, then the versions (`versions` columns).

    `spec`: the description of the pass, as JSON (`open_pass`).
    """

    def __init__(self, name: str, spec: str, versions: int) -> None:
        self.__name__ = name
        self._spec = spec
        self._versions = versions

    @without_traceback
    def __call__(self, batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        prepare_worker()
        count_for_application()
        lookups = open_pass(self._spec, session_options())
        executions = [lookup_execution(stage.build) for stage in lookups.spec.stages]
        row_bytes = largest_row()
        joined = JoinedBatches(batches, _ROWS_AT_ONCE if lookups.in_memory else 0)
        try:
            for arrays, batch_rows in joined:
                keys, versions = arrays[: -self._versions], arrays[-self._versions :]
                for answers in lookups.answers(keys, versions, executions, row_bytes):
                    # All answers to joined batches are in memory at once. So if the rows are wide, fewer are looked up together.
                    rows_per_limit = _BYTES_AT_ONCE * len(answers) // max(answers.nbytes, 1)
                    joined.rows_at_once = min(joined.rows_at_once, rows_per_limit)
                    lookups.publish()  # for each batch, because Spark may kill the worker before the last one
                    # Spark gets batches that are no larger than its own.
                    for start in range(0, len(answers), batch_rows):
                        yield answers.slice(start, batch_rows)
        finally:
            lookups.publish()
