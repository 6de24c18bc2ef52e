"""What the tasks of a lookup run: functions that Spark carries to its workers by name, with one text each.

Their bytes are equal for equal texts, so that Spark sees when two relations are one and resolves it once.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark import TaskContext

from pyspark_lookup.engine.lookup_join import issue_token, lookup_of, parsed_options
from pyspark_lookup.engine.runtime import runtime
from pyspark_lookup.spark.reading import count_for_application, current_execution, session_options

VERSION_SCHEMA = pa.schema([("_lookup_version", pa.binary())])


class Resolve:
    """For `mapInArrow`: one row with the version that this execution reads of a table. `built_at_s`: see `Execution`."""

    def __init__(self, name: str, options: str, built_at_s: float | None) -> None:
        self.__name__ = name  # as plans show it
        self._options = options
        self._built_at_s = built_at_s

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        context = TaskContext.get()
        count_for_application(context)
        options = runtime().effective(parsed_options(self._options).on_host(session_options(context)))
        token = issue_token(options, current_execution(context, self._built_at_s))
        yield pa.RecordBatch.from_arrays([pa.array([token], pa.binary())], schema=VERSION_SCHEMA)


class Probe:
    """For an iterator Arrow UDF: the rows of the keys in all arguments but the last, which is the version.

    `built_at_s`: see `Execution`.
    """

    def __init__(self, name: str, spec: str, built_at_s: float | None) -> None:
        self.__name__ = name
        self._spec = spec
        self._built_at_s = built_at_s

    def __call__(self, batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        context = TaskContext.get()
        execution = current_execution(context, self._built_at_s)
        count_for_application(context)
        lookup = lookup_of(self._spec, session_options(context))
        try:
            for *keys, token in batches:
                answers = lookup.answers(keys, token, execution)
                lookup.publish()  # a worker that is killed has published all but the batch in its hands
                yield answers
        finally:
            lookup.publish()
