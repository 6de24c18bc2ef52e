"""The rows of each view (`lookup.view`): what a host knows about a table, and the changes of a managed table.

`files`: the files of the current version (makes one metadata call). `versions`: the versions that this host has read, or all versions that the
table lists. `metrics`: the counters of the hosts that Spark's tasks reach. `summary`: one row about the current version. `token`: the token of the
version that the execution reads; to make sure that it can be read, this view copies the rows of a small table to this host (see `version_token`).
`changes`: the changes of a stream's micro-batch, or all changes between two versions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from pyspark_lookup.columnar.predicate import And, Predicate
from pyspark_lookup.columnar.sql_predicate import parse_where
from pyspark_lookup.columnar.types import resolve_names, schema_of_text
from pyspark_lookup.core.metrics import COUNTERS, GAUGES, HOST_GAUGES
from pyspark_lookup.errors import NotSupportedError, SchemaError, VersionGoneError
from pyspark_lookup.lookup import planner
from pyspark_lookup.lookup.planner import planned_names
from pyspark_lookup.lookup.range_match import stored_options
from pyspark_lookup.lookup.read import ResolvedTable
from pyspark_lookup.lookup.runtime import Engine
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import View
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.scan.table_scan import collect_table
from pyspark_lookup.sources.managed.change_feed import (
    CHANGE_COLUMNS,
    ChangeTask,
    change_columns,
    changes_between,
    read_changes,
)
from pyspark_lookup.sources.managed.log import TableState
from pyspark_lookup.sources.managed.options import ChangeOptions
from pyspark_lookup.storage.disk import key_of
from pyspark_lookup.versions.executions import Execution

_TASK_BYTES = 16 * 1024 * 1024  # a Spark task reads up to this many bytes of files, or _TASK_FILES small files
_TASK_FILES = 64
_TAKING_TASKS = 6


def managed_state(engine: Engine, options: LookupOptions) -> TableState:
    """The current state of a managed table's log. Raises NotSupportedError if the table is not a managed one."""
    state = engine.managed.read_log(options)
    if state is None:
        raise NotSupportedError(
            f"{redact('path', options.files.path)} is not (or no longer) a managed table, and lookupcache "
            "reads changes only of managed tables: check the path, or read the table's rows with spark.read (not readStream), without "
            "lookup.changes-from"
        )
    return state


def plan_changes(engine: Engine, options: LookupOptions) -> list[tuple[ChangeTask, ...]]:
    """The changes of the commits from `lookup.changes-from` to `lookup.changes-to`, both included, divided into a share for each Spark task.

    Raises VersionGoneError for positions that the log does not have (yet, or any more).
    """
    state = managed_state(engine, options)
    changes = options.kind(ChangeOptions)
    first, last = changes.first or 1, changes.last or state.newest
    # `from` may be one position after the end of the log: a reader that has read all changes asks for that.
    for key, position, log_end in (("from", first, state.position + 1), ("to", last, state.position)):
        if position > log_end:
            raise VersionGoneError(
                f"option lookup.changes-{key} = {position}: the log of {redact('path', options.files.path)} ends at position "
                f"{state.position}: give {log_end}{' (the next commit)' if log_end > state.position else ''} or less"
            )
    table = engine.managed.table(options)
    return list(shares(list(changes_between(table, engine.managed.log(table.url), state, first - 1, last, False))))


def shares(tasks: Sequence[ChangeTask]) -> Iterator[tuple[ChangeTask, ...]]:
    """The change tasks in groups, one for each Spark task.

    Change tasks that only find deleted rows are grouped by number, because they read the same files. All others are grouped by bytes, in their
    order.
    """
    taking = [task for task in tasks if task.marks and not task.added]
    for start in range(0, len(taking), _TAKING_TASKS):
        yield tuple(taking[start : start + _TAKING_TASKS])
    share: list[ChangeTask] = []
    for task in tasks:
        if task.marks and not task.added:
            continue
        if share and (len(share) >= _TASK_FILES or sum(t.bytes for t in share) + task.bytes > _TASK_BYTES):
            yield tuple(share)
            share = []
        share.append(task)
    if share:
        yield tuple(share)


def read_share(
    engine: Engine,
    options: LookupOptions,
    columns: pa.Schema,
    tasks: Sequence[ChangeTask],
    optional_columns: Sequence[str] = (),
    extra_predicate: Predicate | None = None,
) -> Iterator[pa.RecordBatch]:
    """The changed rows of some change tasks for which `lookup.where` and `extra_predicate` are true.

    `columns`: the columns to return. `optional_columns`: those of them that are null if the table lacks them.
    """
    schema = schema_of_text(tasks[0].schema)
    predicate = parse_where(options.read.where, schema) if options.read.where else None
    if extra_predicate is not None:
        predicate = extra_predicate if predicate is None else And((predicate, extra_predicate))
    # The columns that a read of changes adds come last. An optional column may be in the table, if ALTER TABLE has added it meanwhile.
    table_names = {name.lower() for name in schema.names}
    absent = {name for name in optional_columns if name.lower() not in table_names}
    table_columns = [name for name in columns.names if name not in CHANGE_COLUMNS.names and name not in absent]
    for name, table_name in zip(table_columns, planned_names(table_columns, schema, options.files.path), strict=True):
        if name != table_name:
            raise SchemaError(
                f"column {name!r} of the given schema is spelled {table_name!r} in the table: spell it the same way"
            )
    yield from read_changes(engine.reader.versions.files, tasks, columns, predicate)


def scan_changes(
    engine: Engine,
    options: LookupOptions,
    table_columns: pa.Schema,
    columns: Sequence[str] | None,
    predicate: str | None,
) -> pa.Table:
    """The changes between two versions, with `table_columns` and the columns that a read of changes adds, or with some of these (`columns`)."""
    everything = change_columns(table_columns)
    extra_predicate = None if predicate is None else parse_where(predicate, everything)
    selected_columns = everything
    if columns is not None:
        selected_columns = pa.schema([everything.field(name) for name in resolve_names(columns, everything, "columns")])
    parts = (
        read_share(engine, options, selected_columns, share, extra_predicate=extra_predicate)
        for share in plan_changes(engine, options)
    )
    return collect_table((batch for part in parts for batch in part), selected_columns, options.files.path)


# --- views ----------------------------------------------------------------------------------------

_INSTANT = pa.timestamp("us", "UTC")
_SCHEMAS = {
    View.FILES: pa.schema(
        [
            ("url", pa.string()),
            ("size", pa.int64()),
            ("identity", pa.string()),
            ("modified_at", _INSTANT),  # for a managed table: the time of the commit
            ("write_id", pa.int64()),  # null for plain files, like `rows`
            ("rows", pa.int64()),
        ]
    ),
    View.VERSIONS: pa.schema(
        [
            ("digest", pa.string()),
            ("resolved_at", _INSTANT),
            ("files", pa.int64()),
            ("bytes", pa.int64()),
            ("token_at", _INSTANT),  # when a join or SQL function on this host last used the version; null: never
            # Managed tables only: all versions in the log. The columns above are null for versions that this host has not read.
            ("version", pa.int64()),  # in the form that lookup.version takes
            ("committed_at", _INSTANT),
            ("operation", pa.string()),  # create, alter, or the mode of a write
            ("write_id", pa.int64()),
            ("files_added", pa.int64()),  # null after a vacuum, like `rows_added`
            ("rows_added", pa.int64()),
        ]
    ),
    View.METRICS: pa.schema(
        [
            ("host", pa.string()),
            ("cache_dir", pa.string()),
            ("name", pa.string()),
            ("value", pa.int64()),  # -1: a gauge that is not set
            ("meaning", pa.string()),
            ("detail", pa.string()),
        ]
    ),
    View.SUMMARY: pa.schema(
        [
            ("digest", pa.string()),
            ("files", pa.int64()),
            ("bytes", pa.int64()),
            ("rows", pa.int64()),  # null if the files would have to be read to count them
            ("unique_keys", pa.bool_()),  # null without a snapshot
            ("keys_of_table", pa.list_(pa.string())),  # the key columns of a managed table; null if it has none
            (
                "options_of_table",
                pa.string(),
            ),  # the options of lookups by range that the table's properties store, as JSON
            (
                "not_kept",
                pa.string(),
            ),  # why this host has no space for a snapshot; null if it has space, or needs no snapshot
            ("shows_changes", pa.bool_()),  # whether a change of the rows makes another version
        ]
    ),
    View.TOKEN: pa.schema([("version", pa.binary())]),
}
_FOOTERS_AT_MOST = 64


_METRICS_TASKS = 64  # more than there are executors, because Spark decides where tasks run


@dataclasses.dataclass(frozen=True)
class ViewTask:
    """A task of a view. Most views have one task.

    The view `metrics` has several tasks, to reach several hosts; `nonce` identifies their plan. The view `changes` has a task for each group of
    `changes`, with the `columns` to read.
    """

    view: View
    number: int = 0
    nonce: str = ""
    changes: tuple[ChangeTask, ...] = ()
    columns: pa.Schema | None = None


def view_tasks(options: LookupOptions, nonce: str) -> list[ViewTask]:
    """The tasks of a view."""
    count = _METRICS_TASKS if options.read.view is View.METRICS else 1
    return [ViewTask(options.read.view, number, nonce) for number in range(count)]


def view_schema(view: View) -> pa.Schema:
    """The columns of a view."""
    return _SCHEMAS[view]


def view_batches(
    engine: Engine,
    task: ViewTask,
    options: LookupOptions,
    token: Callable[[], bytes],
    execution: Execution | None = None,
) -> Iterator[pa.RecordBatch]:
    """The rows of a view: one batch, or several batches of changes. `token`: returns the version token of this execution."""
    if task.columns is not None:
        yield from read_share(engine, options, task.columns, task.changes)
        return
    views = {View.FILES: _files, View.VERSIONS: _versions, View.METRICS: _metrics}
    if task.view is View.TOKEN:
        rows: list[dict[str, object]] = [{"version": token()}]
    elif task.view is View.SUMMARY:
        rows = [describe_version(engine, options)]
    elif task.view is View.METRICS and not _is_asked(engine, task, execution):
        rows = []
    else:
        rows = views[task.view](engine, options)
    yield pa.RecordBatch.from_pylist(rows, schema=_SCHEMAS[task.view])


def describe_table(engine: Engine, resolved_table: ResolvedTable, options: LookupOptions) -> dict[str, Any]:
    """The dictionary that `LookupTable.describe` returns."""
    return {
        "path": redact("path", resolved_table.table.url),
        "kind": resolved_table.table.kind,
        "format": resolved_table.table.format.value if resolved_table.table.format else None,
        "columns": {field.name: str(field.type) for field in planner.table_columns(resolved_table, options)},
        "version": resolved_table.version.digest,
        "files": len(resolved_table.version.files),
        "bytes": resolved_table.version.bytes,
        "options": repr(options),
        **engine.reader.kinds.source(resolved_table.table).details(resolved_table.table, resolved_table.version),
    }


def _micros(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1e6)


def _files(engine: Engine, options: LookupOptions) -> list[dict[str, object]]:
    resolver = engine.reader.resolver
    table, version = resolver.discover(options)
    write_ids = resolver.kinds.source(table).write_ids(table, version)
    rows: list[dict[str, object]] = []
    for file in version.files:
        at = _micros(file.modified_at_s)
        row = {"url": redact("path", file.url), "size": file.size, "identity": file.identity, "modified_at": at}
        count = file.statistics.rows if file.statistics is not None else None
        rows.append({**row, "write_id": write_ids.get(file.url), "rows": count})
    return rows


def _versions(engine: Engine, options: LookupOptions) -> list[dict[str, object]]:
    resolver = engine.reader.resolver
    host_versions: list[dict[str, object]] = [
        {**row, "resolved_at": _micros(row["resolved_at"]), "token_at": _micros(row["token_at"])}
        for row in resolver.host.known_versions(options)
    ]
    history = resolver.kinds.history(options)
    if history is None:
        return host_versions
    rows_by_position = {row["position"]: row for row in host_versions}
    return [
        {**rows_by_position.get(row["version"], {}), **row, "committed_at": _micros(row["committed_at"])}
        for row in history
    ]


def _is_asked(engine: Engine, task: ViewTask, execution: Execution | None) -> bool:
    if execution is None:
        # Without an execution there is no record by which tasks could agree on the one that answers.
        return task.number == 0
    return answers_for_host(engine, key_of(task.nonce, execution.application, execution.id), task.number)


def answers_for_host(engine: Engine, key: str, number: int) -> bool:
    """Whether task `number` answers for its host (for the host's cache directory). Of the tasks with the same `key`, only one does.

    The race: tasks of one host run at the same time. The first task that creates a record under the key answers, and so does a repeated attempt
    of this task. Without a cache directory, task 0 answers.
    """
    if engine.disk is None:
        return number == 0
    with contextlib.suppress(OSError):
        return bool(engine.disk.create_record("asked", key, number) == number)
    return False


def _metrics(engine: Engine, options: LookupOptions) -> list[dict[str, object]]:
    values = engine.host_metrics()
    meanings = {**COUNTERS, **GAUGES, **HOST_GAUGES}
    rows: list[dict[str, object]] = [
        {"name": name, "value": values[name], "meaning": doc, "detail": None} for name, doc in meanings.items()
    ]
    token_versions = [row for row in engine.reader.host.known_versions(options) if row["token_at"] is not None]
    if token_versions:
        last = max(token_versions, key=lambda row: row["token_at"])
        meaning = "Unix ms when a join or SQL function last issued a version token, whose version is in `detail`"
        at_ms = int(last["token_at"] * 1000)
        rows.append({"name": "tokenVersion", "value": at_ms, "meaning": meaning, "detail": last["digest"]})
    where = {"host": socket.gethostname(), "cache_dir": str(options.cache.directory())}
    return [{**where, **row} for row in rows]


def describe_version(engine: Engine, options: LookupOptions) -> dict[str, Any]:
    """The only row of the view `summary`."""
    reader = engine.reader
    table, version = reader.resolver.discover(options)
    full = reader.fulls.get_cache(table, options)
    snapshot = full.find(version) if full is not None else None
    rows = snapshot.rows if snapshot is not None else None
    if rows is None and len(version.files) <= _FOOTERS_AT_MOST:
        rows = reader.versions.rows(table, options, version)
    unique = snapshot.unique if snapshot is not None else None
    count, size = len(version.files), version.bytes
    refusal = full.refusal(version) if full is not None and snapshot is None else None
    facts = {"digest": version.digest, "files": count, "bytes": size, "rows": rows}
    keys = list(version.metadata.keys) if version.metadata is not None and version.metadata.keys else None
    source = reader.kinds.source(table)
    stored = stored_options(source.details(table, version).get("properties", {}))
    of_table = {"keys_of_table": keys, "options_of_table": json.dumps(stored)}
    return {**facts, "unique_keys": unique, **of_table, "not_kept": refusal, "shows_changes": source.shows_changes}
