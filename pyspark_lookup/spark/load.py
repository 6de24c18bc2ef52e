"""`load` returns a table as a DataFrame: by the data source or, in a Spark without data sources in Python, by tasks of `mapInArrow`.

In the second case, one task finds the version to read for each query or micro-batch, as for a lookup join. Each of the other tasks plans the
read of this version for itself, and reads its share of the rows.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from pyspark_lookup.lookup.catalog_tables import resolve_path
from pyspark_lookup.lookup.read import ResolvedTable
from pyspark_lookup.lookup.runtime import runtime
from pyspark_lookup.lookup.version_token import VersionToken, table_of_token
from pyspark_lookup.options.conf_file import conf_file_options
from pyspark_lookup.options.enums import OnError, OnVersionGone, VersionAt, View
from pyspark_lookup.options.groups import ANY_TYPE, BUILT, EXPLICIT
from pyspark_lookup.options.lookup_options import merge_options
from pyspark_lookup.options.parsing import option_text
from pyspark_lookup.sources.managed.options import ChangeOptions
from pyspark_lookup.spark import features, planning
from pyspark_lookup.spark.micro_batch import current_build
from pyspark_lookup.spark.pipelines import in_flow_function
from pyspark_lookup.spark.reading import Resolve, count_for_application, current_execution, read, session_options
from pyspark_lookup.spark.types import arrow_schema
from pyspark_lookup.spark.worker_errors import without_traceback
from pyspark_lookup.versions.executions import Build

TablePath = str | os.PathLike[str] | None
_FORMAT = "lookupcache"
_VERSION = "version"
# Spark estimates 32 bytes for a row with a task's number and version. With so many rows for each task, it estimates 128 MiB for a task, the
# size that a task reads by default.
_NUMBERS_PER_TASK = 2**22
_NUMBER = StructType([StructField("id", LongType())])


def load(spark: SparkSession, options: Mapping[str, str], explicit: str | None = "") -> DataFrame:
    """A DataFrame of a table, or of a view of it (`lookup.view`).

    `explicit`: the names, separated by commas, of the options that the user has set for this read; None: all options.
    """
    build = current_build(spark)
    load_options = dict(options)
    if explicit is not None:
        load_options[EXPLICIT] = explicit
    if build is not None:
        load_options[BUILT] = json.dumps(dataclasses.astuple(build))
    if features.DATA_SOURCES:
        return spark.read.format(_FORMAT).options(**load_options).load()
    load_options = {_folded(key): text for key, text in load_options.items() if _folded(key) != "lookup.version-at"}
    planned = _describe(spark, load_options)
    share = ReadShare(
        json.dumps(planned.options, sort_keys=True), planned.schema.json(), planned.tasks, runtime().nonce()
    )
    version = _version(spark, load_options, planned, build)
    return _numbered_tasks(spark, planned.tasks).crossJoin(sf.broadcast(version)).mapInArrow(share, planned.schema)


def _folded(key: str) -> str:
    """The name of an option: in lower case if it begins with `lookup.`, because Spark's readers ignore case; otherwise unchanged."""
    return key.lower() if key.lower().startswith("lookup.") else key


class _Planned(NamedTuple):
    """How tasks read a table. `options`: those with which each task plans the read again. `tasks`: the number of tasks.

    `versioned`: one task finds the version for all tasks; False for a view, which finds its version itself.
    """

    schema: StructType
    tasks: int
    options: dict[str, str]
    versioned: bool


def _version(spark: SparkSession, options: Mapping[str, str], planned: _Planned, build: Build | None) -> DataFrame:
    """A DataFrame of one row: the token of the version that the query or micro-batch reads, as two numbers; two nulls for a view."""
    columns = token_columns(_VERSION)[:2]
    if not planned.versioned:
        return spark.range(0, 1, 1, 1).select(*(sf.lit(None).cast(LongType()).alias(column) for column in columns))
    texts = {key: text for key, text in options.items() if key not in (EXPLICIT, BUILT)}
    # Errors of the version fail the query here, and do not become rows. The last version of a provider that fails is no error.
    stale = {**conf_file_options(), **texts}.get("lookup.on-error", "").strip().upper() == OnError.STALE.value
    strict = texts if stale else merge_options(texts, {"lookup.on-error": OnError.FAIL.value})
    tables = {_VERSION: (json.dumps(strict, sort_keys=True), build)}
    return resolve_versions(spark, "version_of_table", tables).select(*columns)


def token_columns(prefix: str) -> tuple[str, str, str]:
    """The names of the three columns with a table's version token (see `columns_of_token`)."""
    return f"{prefix}_digest", f"{prefix}_place", f"{prefix}_error"


def resolve_versions(spark: SparkSession, name: str, tables: Mapping[str, tuple[str, Build | None]]) -> DataFrame:
    """A DataFrame of one row with the version tokens that the query or micro-batch reads: for each table its `token_columns`.

    `name`: the name in plans. `tables`: for each prefix of column names, (the options of a table as JSON, the micro-batch in which its lookup
    was built, if any).
    """
    names = [column for prefix in tables for column in token_columns(prefix)]
    types = (LongType(), LongType(), BinaryType()) * len(tables)
    columns = StructType([StructField(column, kind) for column, kind in zip(names, types, strict=True)])
    # A range and not createDataFrame, because Spark recognises two equal ranges, and reuses the result within a plan.
    return numbered_rows(spark, 1).mapInArrow(Resolve(name, list(tables.values()), names), columns)


def load_columns(spark: SparkSession, options: Mapping[str, str]) -> StructType:
    """The columns that the table has now. Those that Spark cannot read are VOID (see `unreadable_reason`)."""
    options = {**options, ANY_TYPE: "true"}
    if plans_here(spark):
        return planning.plan_schema({**options, EXPLICIT: ""})[0]
    if features.DATA_SOURCES:
        return load(spark, options).schema
    return _describe(spark, {**options, EXPLICIT: ""}).schema


def plans_here(spark: SparkSession) -> bool:
    """Whether this process plans reads of tables itself, instead of asking Spark.

    The driver does so, because Spark would start a Python process for each plan. The function of a flow in a pipeline does so, too, because it
    gets no answer from its Connect server.
    """
    return in_flow_function(spark) or isinstance(spark, SparkSession)


def numbered_rows(spark: SparkSession, count: int) -> DataFrame:
    """The numbers from 0 to `count` - 1, each in a task of its own: the input of a `mapInArrow` function that produces its rows itself."""
    # With a schema, Spark Connect need not ask the server for the input columns of `mapInArrow`.
    return spark.range(0, count, 1, count).to(_NUMBER)


def _numbered_tasks(spark: SparkSession, count: int) -> DataFrame:
    """The rows of `numbered_rows`, but Spark estimates a large size for them, so that it does not broadcast the table that these tasks read.

    Spark does not know how much `mapInArrow` returns, and estimates as much as for its input.
    """
    numbers = spark.range(0, count * _NUMBERS_PER_TASK, 1, count).where(f"id % {_NUMBERS_PER_TASK} = 0")
    return numbers.selectExpr(f"id div {_NUMBERS_PER_TASK} AS id").to(_NUMBER)


def _describe(spark: SparkSession, options: Mapping[str, str]) -> _Planned:
    """How tasks read a table now. Over Spark Connect, a task on the server plans this."""
    if plans_here(spark):
        return _plan(options)
    columns = StructType([StructField("planned", StringType())])
    row = numbered_rows(spark, 1).mapInArrow(Describe(json.dumps(dict(options))), columns).collect()[0]
    schema, *rest = json.loads(row.planned)
    return _Planned(StructType.fromJson(schema), *rest)


def _plan(options: Mapping[str, str]) -> _Planned:
    schema, resolved_table = planning.plan_schema(options)
    if ANY_TYPE in options:
        return _Planned(schema, 0, {}, False)
    planned = planning.Planning.from_options(options, schema, resolved_table)
    view = planned.options.read.view
    same_everywhere = dict(options)
    if view is View.CHANGES:
        # All tasks read changes up to the same commit, which is chosen when the read is planned, as in the data source.
        newest, changes = planned.newest_change(), planned.options.kind(ChangeOptions)
        if changes.last is None and newest >= (changes.first or 1):
            same_everywhere["lookup.changes-to"] = str(newest)
            planned = planning.Planning.from_options(same_everywhere, schema, resolved_table)
        same_everywhere.pop("lookup.columns", None)  # the schema has only these columns already
    tasks = max(len(planned.tasks()), 1)
    if view is View.DATA:  # tasks read the version whose token they get, and must not look for the current one
        same_everywhere["lookup.version-at"] = VersionAt.PLAN.value
    if view is View.DATA and tasks > 1:
        # All hosts must divide the files into the same shares, even if their conf files differ.
        same_everywhere["lookup.scan.split-size"] = str(planned.options.read.split_size)
    return _Planned(schema, tasks, same_everywhere, view is View.DATA)


class Describe:
    """The function for `mapInArrow` that plans how tasks read a table. It returns one row: a `_Planned` as JSON.

    `options`: those of the read, as JSON.
    """

    def __init__(self, options: str) -> None:
        self._options = options

    @without_traceback
    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        count_for_application()
        schema, *rest = _plan(json.loads(self._options))
        yield pa.RecordBatch.from_pydict({"planned": [json.dumps([schema.jsonValue(), *rest])]})


class ReadShare:
    """The function for `mapInArrow` that returns a task's share of a table's rows. Its input is one row: the task's number, and the version to
    read.

    `options`: those of the read, as JSON. `schema`: the columns to read, as JSON. `tasks`: how many tasks share the read. `nonce`: a text that no
    other read has.
    """

    def __init__(self, options: str, schema: str, tasks: int, nonce: str) -> None:
        self._options = options
        self._schema = schema
        self._tasks = tasks
        self._nonce = nonce

    @without_traceback
    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        shares = [
            row for batch in batches for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)
        ]
        count_for_application()
        options = json.loads(self._options)
        columns = StructType.fromJson(json.loads(self._schema))
        for number, *token in shares:
            planned = planning.Planning.from_options(options, columns, _find_table(options, token, self._tasks))
            for plan, task in planned.tasks(self._nonce)[number :: self._tasks]:
                yield from read(plan, task, planned.build, time.time(), arrow_schema(columns))


def _find_table(options: Mapping[str, str], token: Sequence[int | None], tasks: int) -> ResolvedTable | None:
    """The table in the version that the two numbers of a token name; None for a view, which has no token.

    Raises VersionGoneError if this host can no longer read the version and the read is split over several `tasks`, because a newer version would
    be split differently.
    """
    digest, place = token
    if digest is None or place is None:
        return None
    parsed = planning.read_options(options).on_host(session_options())
    if tasks > 1:
        parsed = parsed.with_values({"lookup.on-version-gone": OnVersionGone.FAIL})
    engine = runtime().engine(parsed)
    with engine.publish():
        return table_of_token(engine.reader, parsed, VersionToken.from_numbers(digest, place), current_execution())


def read_table(spark: SparkSession, path: TablePath = None, options: Mapping[str, Any] | None = None) -> DataFrame:
    """A table as a DataFrame. Works with each version of Spark; from 4.0 on, it is `spark.read.format("lookupcache").options(**options).load(path)`.

    `path`: a file, directory, glob or table; None if an option names the table (`lookup.provider`). `options`: as for `spark.read`.

    Without data sources in Python (Spark 3.5), each query or micro-batch reads the version that is current when it starts. It reads all columns
    from the files, even if it selects fewer: name the columns that you need in `lookup.columns`.

    Raises OptionError for options that are unknown or contradict each other, and other subclasses of PysparkLookupError if the table
    cannot be read.
    """
    texts = {key: option_text(value) for key, value in (options or {}).items()}
    if path is not None:
        texts["path"] = os.fspath(path)
    return load(spark, resolve_path(texts), None)
