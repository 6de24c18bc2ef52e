"""Reads the changes of a managed table: those of a stream's micro-batch, or all between two versions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from pyspark_lookup.columnar.predicate import And, Predicate
from pyspark_lookup.columnar.sql_predicate import parse_where
from pyspark_lookup.columnar.types import resolve_names, schema_of_text
from pyspark_lookup.errors import NotSupportedError, SchemaError, VersionGoneError
from pyspark_lookup.lookup.planner import planned_names
from pyspark_lookup.lookup.runtime import Engine
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.scan.contract import collect_table
from pyspark_lookup.sources.managed.change_feed import (
    CHANGE_COLUMNS,
    ChangeTask,
    change_columns,
    changes_between,
    read_changes,
)
from pyspark_lookup.sources.managed.log import TableState

_TASK_BYTES = 16 * 1024 * 1024  # a share has this many bytes of files, or _TASK_FILES small files
_TASK_FILES = 64
_TAKING_TASKS = 6


def managed_state(engine: Engine, options: LookupOptions) -> TableState:
    """The state of the table's log now. Raises NotSupportedError for a table without a log."""
    state = engine.managed.read_log(options)
    if state is None:
        raise NotSupportedError(
            f"{redact('path', options.path)} is no managed table (any more): only those, written by "
            "format('lookupcache'), have a log of their changes"
        )
    return state


def plan_changes(engine: Engine, options: LookupOptions) -> list[tuple[ChangeTask, ...]]:
    """The changes of the commits from `lookup.changes-from` to `lookup.changes-to`, both included, as shares for tasks.

    Raises VersionGoneError for positions that the log does not have, or no longer has.
    """
    state = managed_state(engine, options)
    first, last = options.changes_from or 1, options.changes_to or state.newest
    # A reader that has read everything asks for the position after the last.
    for key, position, log_end in (("from", first, state.position + 1), ("to", last, state.position)):
        if position > log_end:
            raise VersionGoneError(
                f"option lookup.changes-{key} = {position}: the log of {redact('path', options.path)} goes from 1 to {state.position}"
            )
    table = engine.managed.table(options)
    return list(shares(list(changes_between(table, engine.managed.log(table.url), state, first - 1, last, False))))


def shares(tasks: Sequence[ChangeTask]) -> Iterator[tuple[ChangeTask, ...]]:
    """The tasks, grouped into shares. Tasks about deleted rows share files, so some go together; the others are grouped by bytes, in their order."""
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
    """The changes of some tasks, where `lookup.where` and `extra_predicate` are true. `optional_columns`: columns that the table may lack."""
    schema = schema_of_text(tasks[0].schema)
    predicate = parse_where(options.where, schema) if options.where else None
    if extra_predicate is not None:
        predicate = extra_predicate if predicate is None else And((predicate, extra_predicate))
    # The change columns come last. A column that ALTER TABLE added may be in the table by now.
    table_names = {name.lower() for name in schema.names}
    absent = {name for name in optional_columns if name.lower() not in table_names}
    table_columns = [name for name in columns.names if name not in CHANGE_COLUMNS.names and name not in absent]
    for name, table_name in zip(table_columns, planned_names(table_columns, schema, options.path), strict=True):
        if name != table_name:
            raise SchemaError(f"column {name!r} of the given schema is spelled {table_name!r} in the table")
    yield from read_changes(engine.reader.versions.files, tasks, columns, predicate)


def scan_changes(
    engine: Engine,
    options: LookupOptions,
    table_columns: pa.Schema,
    columns: Sequence[str] | None,
    predicate: str | None,
) -> pa.Table:
    """The changes between two versions, with `table_columns` and the change columns, or some of them."""
    everything = change_columns(table_columns)
    extra_predicate = None if predicate is None else parse_where(predicate, everything)
    selected_columns = everything
    if columns is not None:
        selected_columns = pa.schema([everything.field(name) for name in resolve_names(columns, everything, "columns")])
    parts = (
        read_share(engine, options, selected_columns, share, extra_predicate=extra_predicate)
        for share in plan_changes(engine, options)
    )
    return collect_table((batch for part in parts for batch in part), selected_columns, options.path)
