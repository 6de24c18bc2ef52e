"""The `lookupcache` format: what Spark calls, in short-lived planner and reader processes.

Spark imports this module to list formats, so it stays light: the engine is imported inside the
methods, the one place in this package where imports are not at the top.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    Filter,
    InputPartition,
)

from pyspark_lookup.spark.worker_errors import errors_without_traceback

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from pyspark_lookup.engine.planner import Found
    from pyspark_lookup.spark.planning import Planning


@errors_without_traceback
class DefaultSource(DataSource):
    """A table of files, read through this host's cache, always in its current version.

    Options: see `pyspark_lookup.options.lookup_options`. Instances are pickled between Spark's planner processes;
    what `schema()` found travels to `reader()` with them, so that one load() makes one metadata call.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = dict(options)
        self._built_at_s = time.time()
        self._found: Found | None = None

    @classmethod
    def name(cls) -> str:
        return "lookupcache"

    def schema(self) -> StructType:
        """The table's columns now; for CREATE TABLE also its options, as metadata of the first one."""
        from pyspark_lookup.spark import planning

        schema, self._found = planning.schema_of(self.options)
        return schema

    def reader(self, schema: StructType) -> DataSourceReader:
        from pyspark_lookup.spark import planning

        plan = planning.Planning.of(self.options, schema, self._found)
        # Spark refuses a reader with pushFilters unless it is about to call it.
        reader = PushdownReader if planning.prunes_by_pushed_filters(plan) else LookupReader
        return reader(plan, self._built_at_s)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A write of a managed table; its first write creates it."""
        from pyspark_lookup.spark import writer

        return writer.batch_writer(self.options, schema, overwrite)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """The changes of a managed table, commit by commit."""
        from pyspark_lookup.spark import change_stream

        return change_stream.stream_reader(self.options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """A stream into a managed table, each micro-batch committed once."""
        from pyspark_lookup.spark import writer

        return writer.stream_writer(self.options, schema, overwrite)


@errors_without_traceback
class LookupReader(DataSourceReader):
    """Plans tasks and reads them. Its state is not needed after `partitions()`."""

    def __init__(self, plan: Planning, built_at_s: float) -> None:
        self._plan: Planning | None = plan
        self._built_at_s = built_at_s

    def partitions(self) -> list[InputPartition]:
        """One for each task, with its whole plan: nothing else reaches the reading process."""
        assert self._plan is not None
        others = self._plan.build, self._built_at_s, self._plan.columns
        return [InputPartition((plan, task, *others)) for plan, task in self._plan.tasks()]

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        from pyspark_lookup.spark import reading

        if partition is None or partition.value is None:  # what Spark 4.1, and later ones, make of no tasks
            return iter(())
        return reading.read(*partition.value)

    def __getstate__(self) -> dict[str, Any]:
        return {"_plan": None, "_built_at_s": 0.0}  # what a task needs is in its partition


@errors_without_traceback
class PushdownReader(LookupReader):
    """A reader that prunes by the filters Spark pushes; Spark still applies all of them itself."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:
        assert self._plan is not None
        self._plan.push(filters)
        yield from filters
