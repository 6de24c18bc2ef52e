"""Writes a managed table from Spark: the driver begins and commits a write, and tasks write its files, each in a process of its own.

The driver passes the options and the `Job` to the tasks, and they return their files. If Spark runs a task twice, it writes its files
twice, and the commit names the files of one run. A micro-batch that is already committed is not committed again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.types import StructType

from pyspark_lookup.errors import OptionError
from pyspark_lookup.lookup.runtime import runtime
from pyspark_lookup.options.enums import View
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.sources.managed import Job, batch_directory
from pyspark_lookup.sources.managed.log import Batch, DataFile, WriteMode
from pyspark_lookup.sources.managed.options import WriteOptions
from pyspark_lookup.sources.registry import parse_options
from pyspark_lookup.spark.features import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark_lookup.spark.planning import resolve_write_options
from pyspark_lookup.spark.reading import session_options
from pyspark_lookup.spark.types import checked_arrow_schema
from pyspark_lookup.spark.worker_errors import errors_without_traceback


@dataclasses.dataclass
class Written(WriterCommitMessage):
    """What a task returns to the driver: the files that it wrote. In a stream also the streaming query, and the job of the micro-batch."""

    files: tuple[DataFile, ...]
    query: str | None = None
    job: Job | None = None


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> BatchWriter:
    """Begin a batch write, and return its writer.

    Raises the errors of `TableWriter.begin`, and OptionError for an option that a write cannot have.
    """
    parsed = _parse(options, schema)
    batch = parsed.kind(WriteOptions).batch
    name = None if batch is None else batch_directory(batch, runtime().nonce())
    return BatchWriter(parsed, _begin(parsed, schema, overwrite, name))


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> StreamWriter:
    """The writer of a streaming query. Raises the errors of `batch_writer`, and OptionError if no path is given."""
    if "path" not in {key.lower() for key in options}:
        raise OptionError(
            "option path is missing: write a stream with df.writeStream.format('lookupcache').start(path); "
            "toTable does not pass on the path of a table"
        )
    # `checkpointLocation` is an option of Spark itself.
    parsed = _parse({key: text for key, text in options.items() if key.lower() != "checkpointlocation"}, schema)
    if parsed.kind(WriteOptions).batch is not None:
        raise OptionError(
            "option lookup.write.batch is for batch writes, and a stream numbers its batches itself: remove the option"
        )
    return StreamWriter(parsed, _begin(parsed, schema, overwrite, runtime().nonce()))


def _parse(options: Mapping[str, str], schema: StructType) -> LookupOptions:
    parsed = parse_options(resolve_write_options(options, schema), origin="write option")
    read_options = [] if parsed.system is None else [parsed.system]
    read_options += ["lookup.where"] if parsed.read.where else []
    read_options += ["lookup.columns"] if parsed.read.columns else []
    read_options += ["lookup.view"] if parsed.read.view is not View.DATA else []
    read_options += parsed.pins
    if read_options:
        raise OptionError(f"option {read_options[0]} is for reads: remove it from the write")
    return parsed


def _begin(options: LookupOptions, schema: StructType, overwrite: bool, name: str | None) -> Job:
    is_upsert = options.kind(WriteOptions).is_upsert(overwrite)
    engine = runtime().engine(options)
    with engine.publish():
        mode = WriteMode.OVERWRITE if overwrite else WriteMode.UPSERT if is_upsert else WriteMode.APPEND
        return engine.managed.writer(options).begin(checked_arrow_schema(schema, "to write:"), mode, name)


def _write_files(options: LookupOptions, job: Job, batches: Iterator[pa.RecordBatch]) -> tuple[DataFile, ...]:
    """Write the rows of one run of a task, and return the files that have them."""
    context = TaskContext.get()
    task_options = options.on_host(session_options())
    engine = runtime().engine(task_options)
    number = context.partitionId() if context is not None else 0
    with engine.publish():
        return tuple(engine.managed.writer(task_options).write(job, batches, f"part-{number:05d}"))


def _files(messages: Sequence[WriterCommitMessage | None]) -> list[DataFile]:
    return [file for message in messages if isinstance(message, Written) for file in message.files]


def _find_batch(messages: Sequence[WriterCommitMessage | None]) -> list[tuple[Job, str]]:
    """The (job, query) of a micro-batch, as a list of one; an empty list if no task wrote anything."""
    jobs = [
        (message.job, message.query)
        for message in messages
        if isinstance(message, Written) and message.job and message.query
    ]
    return jobs[:1]


@errors_without_traceback
class BatchWriter(DataSourceArrowWriter):
    def __init__(self, options: LookupOptions, job: Job) -> None:
        self._options = options
        self._job = job

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return Written(_write_files(self._options, self._job, iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        batch = self._options.kind(WriteOptions).batch
        with runtime().engine(self._options).committing(self._options) as writer:
            writer.commit(self._job, _files(messages), None if batch is None else Batch(*batch))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        engine = runtime().engine(self._options)
        with engine.publish():
            engine.managed.writer(self._options).abort(self._job, _files(messages), "the job failed")


@errors_without_traceback
class StreamWriter(DataSourceStreamArrowWriter):
    """Commits the micro-batches of a streaming query. Spark makes a new instance for each commit, so the tasks' messages hold all that a commit
    needs."""

    def __init__(self, options: LookupOptions, job: Job) -> None:
        self._options = options
        self._job = job

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        query = context.getLocalProperty("sql.streaming.queryId") if context is not None else None
        batch = context.getLocalProperty("streaming.sql.batchId") if context is not None else None
        if not query or not batch:
            raise OptionError(
                "Spark does not say to which streaming query and batch this task belongs, so its rows cannot be written exactly once: write them in "
                "a foreachBatch function, with the option lookup.write.batch = 'name:number'"
            )
        job = dataclasses.replace(self._job, directory=batch_directory((query, int(batch)), self._job.directory))
        return Written(_write_files(self._options, job, iterator), query, job)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark names it
        for job, query in _find_batch(messages):
            with runtime().engine(self._options).committing(self._options) as writer:
                writer.commit(job, _files(messages), Batch(query, batchId))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark names it
        for job, query in _find_batch(messages):
            engine = runtime().engine(self._options)
            with engine.publish():
                engine.managed.writer(self._options).abort(job, _files(messages), batch=Batch(query, batchId))
