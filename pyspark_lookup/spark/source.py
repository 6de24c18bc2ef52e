"""The data source behind Spark's `format("lookupcache")`. Spark calls it in short-lived processes.

Spark imports this module only to list the available formats. So that this is fast, methods import the engine when they need it. This is
the only module of the package whose imports are not all at the top.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark_lookup.spark import features
from pyspark_lookup.spark.worker_errors import errors_without_traceback

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from pyspark_lookup.lookup.read import ResolvedTable
    from pyspark_lookup.spark.planning import Planning

_WITHOUT_WRITERS = "write the table with LookupTable(path).write(…), in a stream by foreachBatch"


@errors_without_traceback
class DefaultSource(features.DataSource):
    """Reads a table of files through the host's cache, in the table's current version, and writes managed tables.

    `docs/options.md` lists the options. Spark calls `schema()` and `reader()` in two processes, and pickles the instance in
    between. The pickle has the table that `schema()` resolved, so `reader()` does not ask the store for it again.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        features.DATA_SOURCES.require(
            "format 'lookupcache'", "read the table with pyspark_lookup.read_table(spark, path, options)"
        )
        self.options = dict(options)
        self._built_at_s = time.time()
        self._resolved_table: ResolvedTable | None = None

    @classmethod
    def name(cls) -> str:
        return "lookupcache"

    def schema(self) -> StructType:
        """The table's columns now. For CREATE TABLE, the metadata of one column also holds the options."""
        from pyspark_lookup.spark import planning

        schema, self._resolved_table = planning.plan_schema(self.options)
        return schema

    def reader(self, schema: StructType) -> features.DataSourceReader:
        from pyspark_lookup.spark import planning

        plan = planning.Planning.from_options(self.options, schema, self._resolved_table)
        # There is no pushFilters: the filters of one scan would reach others of the same relation (SPARK-58551).
        return LookupReader(plan, self._built_at_s)

    def writer(self, schema: StructType, overwrite: bool) -> features.DataSourceWriter:
        """The writer of a batch write to a managed table. The first write creates the table."""
        features.ARROW_WRITERS.require("a write with format 'lookupcache'", _WITHOUT_WRITERS)
        from pyspark_lookup.spark import writer

        return writer.batch_writer(self.options, schema, overwrite)

    def streamReader(self, schema: StructType) -> features.DataSourceStreamReader:
        """The reader of a stream of a managed table's changes."""
        from pyspark_lookup.spark import change_stream

        return change_stream.stream_reader(self.options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> features.DataSourceStreamWriter:
        """The writer of a streaming query to a managed table. It commits each micro-batch exactly once."""
        features.ARROW_WRITERS.require("a stream with format 'lookupcache'", _WITHOUT_WRITERS)
        from pyspark_lookup.spark import writer

        return writer.stream_writer(self.options, schema, overwrite)


@errors_without_traceback
class LookupReader(features.DataSourceReader):
    """Plans the tasks of a batch read, and reads the rows of each task. A task carries all that its process needs."""

    def __init__(self, plan: Planning, built_at_s: float) -> None:
        self._plan: Planning | None = plan
        self._built_at_s = built_at_s

    def partitions(self) -> list[features.InputPartition]:
        """The tasks, each with the whole plan of the read, because Spark passes nothing else to the process that reads a task."""
        assert self._plan is not None
        common = self._plan.build, self._built_at_s, self._plan.columns
        return [features.InputPartition((plan, task, *common)) for plan, task in self._plan.tasks()]

    def read(self, partition: features.InputPartition | None) -> Iterator[pa.RecordBatch]:
        from pyspark_lookup.spark import reading

        if partition is None or partition.value is None:  # Spark may ask for this if `partitions()` is empty
            return iter(())
        return reading.read(*partition.value)

    def __getstate__(self) -> dict[str, Any]:
        return {"_plan": None, "_built_at_s": 0.0}  # `read` needs only its partition
