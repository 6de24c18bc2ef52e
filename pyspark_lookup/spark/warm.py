"""`warm`: loads a table's current version into the caches of the executors before the first query needs it."""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from pyspark_lookup.columnar.ddl import parse_columns
from pyspark_lookup.errors import PysparkLookupError
from pyspark_lookup.lookup.lookup_table import LookupTable
from pyspark_lookup.lookup.metadata_tables import answers_for_host
from pyspark_lookup.lookup.runtime import runtime
from pyspark_lookup.options.enums import CacheMode
from pyspark_lookup.sources.registry import parse_options
from pyspark_lookup.spark.reading import count_for_application, session_options
from pyspark_lookup.spark.table_argument import TableArgument, resolve_table_options

_COLUMNS = "host STRING, cache_dir STRING, version STRING, rows BIGINT, bytes BIGINT, seconds DOUBLE, error STRING"


@dataclasses.dataclass(frozen=True)
class Warmed:
    """The result of `warm` for one cache directory: the loaded `version` with its `rows` and `bytes`, or the `error` of the load."""

    host: str
    cache_dir: str
    version: str | None
    rows: int | None
    bytes: int | None
    seconds: float
    error: str | None


class _Warm:
    """A function for `mapInArrow`: the first of the tasks that have the same cache directory loads the table there, and the others do nothing."""

    def __init__(self, options: str, nonce: str) -> None:
        self._options = options
        self._nonce = nonce

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        numbers = [number for batch in batches for number in batch.column(0).to_pylist()]
        count_for_application()
        read, session = json.loads(self._options), session_options()
        options = runtime().effective(parse_options(read).on_host(session))
        if answers_for_host(runtime().engine(options), self._nonce, numbers[0]):
            with LookupTable.of_stored({**session, **read}) as table:
                row = {"host": socket.gethostname(), "cache_dir": str(options.cache.directory()), **_warm(table)}
            yield pa.RecordBatch.from_pylist([row], schema=parse_columns(_COLUMNS))


def _warm(table: LookupTable) -> dict[str, Any]:
    clock = runtime().clock
    started_s = clock.steady_s()
    try:
        version = table.warm()
    except (PysparkLookupError, OSError) as problem:
        return {"seconds": clock.steady_s() - started_s, "error": f"{type(problem).__name__}: {problem}"}
    metrics = table.metrics()
    seconds = clock.steady_s() - started_s
    return {
        "version": version,
        "rows": metrics["numCachedRecords"],
        "bytes": metrics["numCachedBytes"],
        "seconds": seconds,
    }


def warm(
    spark: SparkSession, table: TableArgument, tasks: int = 32, options: Mapping[str, Any] | None = None
) -> list[Warmed]:
    """Load a table's current version into the full cache of every executor that a Spark job reaches. Returns an entry for each cache directory.

    `table`: a path, the name of a catalog table, or a `LookupTable`. `tasks`: the number of the job's tasks. Spark chooses their executors, so give
    several times the number of executors. `options`: options of the table, e.g. {"lookup.keys": "id"}. If a load fails, its entry has the
    `error`. Raises OptionError for options that a full cache cannot have, ValueError for `tasks` below 1.
    """
    if tasks < 1:
        raise ValueError(f"argument tasks = {tasks}: give 1 or more")
    table_options = {**resolve_table_options(spark, table, options or {}), "lookup.cache": CacheMode.FULL.value}
    parse_options(table_options)  # report wrong options here, and not in tasks
    numbers = spark.range(0, tasks, 1, tasks)
    rows = numbers.mapInArrow(_Warm(json.dumps(table_options), runtime().nonce()), _COLUMNS).collect()
    return sorted((Warmed(**row.asDict()) for row in rows), key=lambda row: (row.host, row.cache_dir))
