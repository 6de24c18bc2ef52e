"""Reads of a version without Spark: all of its rows, or those of some keys."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pyarrow as pa

from pyspark_lookup.cache.full.snapshot import Snapshot
from pyspark_lookup.cache.memory import KEY_INDEX
from pyspark_lookup.cache.partial import castable_keys
from pyspark_lookup.columnar.keys import one_key
from pyspark_lookup.columnar.sql_predicate import parse_where
from pyspark_lookup.columnar.types import resolve_names
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.errors import OptionError, PredicateError, SchemaError
from pyspark_lookup.lookup import planner
from pyspark_lookup.lookup.lookup import get_many_from_version, read_rows
from pyspark_lookup.lookup.plan import ReadPlan, ReadTask
from pyspark_lookup.lookup.planner import ResolvedTable
from pyspark_lookup.lookup.rows import KeyMaker, KeysLike, as_key_table, as_python
from pyspark_lookup.lookup.runtime import Engine
from pyspark_lookup.lookup.table_reader import TableReader
from pyspark_lookup.options.enums import CacheMode
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.scan.contract import all_columns, collect_table
from pyspark_lookup.versions.executions import Resolution
from pyspark_lookup.versions.model import TableVersion


def scan(
    engine: Engine,
    resolved_table: ResolvedTable,
    options: LookupOptions,
    columns: Sequence[str] | None,
    predicate: str | None,
    clock: HostClock,
) -> pa.Table:
    """The rows of a version of which `predicate` (as `lookup.where`) is true, with these columns (None: all)."""
    overrides: dict[str, str] = {}
    check_columns(columns)
    if columns is not None:
        overrides["lookup.columns"] = ",".join("`" + name.replace("`", "``") + "`" for name in columns)
    selected_columns = planner.table_columns(resolved_table, options.override(overrides))
    # Parsed separately: if the texts were joined, parentheses in it could cancel lookup.where.
    everything = all_columns((resolved_table.data, resolved_table.partitions))
    with naming("predicate"):
        predicates = [] if predicate is None else [parse_where(predicate, everything)]
    plan = planner.plan_read(resolved_table, options, selected_columns, clock, predicates)
    planner.plan_tasks(engine.reader, resolved_table, plan)
    batches = read_rows(engine.reader, plan, ReadTask(0, 1), None, resolved_table.version)
    return collect_table(batches, plan.projection.columns, resolved_table.table.url)


def check_columns(columns: Sequence[str] | None) -> None:
    """Raise SchemaError for what is no list of names."""
    if columns is None:
        return
    is_collection = isinstance(columns, Collection) and not isinstance(columns, str)
    if not is_collection or not columns or not all(isinstance(name, str) for name in columns):
        example = [columns if isinstance(columns, str) and columns else "name"]
        raise SchemaError(f"argument columns = {columns!r}: give a list of names, such as {example!r}")


@contextlib.contextmanager
def naming(argument: str) -> Iterator[None]:
    """Let the errors of a predicate name the argument that it was passed as."""
    try:
        yield
    except PredicateError as problem:
        raise PredicateError(str(problem).replace("option lookup.where", f"argument {argument}", 1)) from None


@dataclasses.dataclass
class KeyedRead:
    """Reads by key of a resolved table, by the columns `names` of `plan`.

    `direct`: the snapshot whose columns are the answer's, and whose key is one column, of the type `kind`.
    """

    names: tuple[str, ...]
    plan: ReadPlan
    direct: Snapshot | None = None
    kind: pa.DataType | None = None

    @cached_property
    def columns(self) -> list[str]:
        """The columns of the answer."""
        return list(self.plan.projection.columns.names)

    def is_direct(self, snapshot: Snapshot) -> bool:
        """Whether the answer's columns are those of a snapshot as they are."""
        if self.direct is not snapshot:
            projection, stored_schema = self.plan.projection, snapshot.schema
            fields = [stored_schema.field(name) for name in projection.columns.names if name in stored_schema.names]
            has_same_types = [field.type for field in fields] == projection.columns.types
            if (
                projection.predicate is not None
                or not has_same_types
                or len(self.names) > 1
                or KEY_INDEX in self.columns
            ):
                return False
            self.kind = stored_schema.field(self.names[0]).type
            self.direct = snapshot  # set last: other threads test it first
        return True


def plan_keyed(resolved_table: ResolvedTable, options: LookupOptions, clock: HostClock) -> KeyedRead:
    """How rows of a resolved table are read by key: key columns first, then the others. Raises OptionError without `lookup.keys`."""
    named_keys = key_names(options)
    table_columns = planner.table_columns(resolved_table, options)
    everything = all_columns((resolved_table.data, resolved_table.partitions))
    names = resolve_names(named_keys, everything, "lookup.keys")
    columns = pa.schema(
        [*(everything.field(name) for name in names), *(field for field in table_columns if field.name not in names)]
    )
    return KeyedRead(tuple(names), planner.plan_read(resolved_table, options, columns, clock))


def get_rows(
    reader: TableReader, read: KeyedRead, key: Any, version: TableVersion, snapshot: Snapshot | None
) -> list[dict[str, Any]]:
    """The rows of a version with one key: a value, a tuple in the order of `lookup.keys`, or a dictionary by their names.

    `snapshot`: that of the version, if the caller has it.
    """
    resolution, covering_snapshot = _resolve(reader, read, version, snapshot)
    rows = None if covering_snapshot is None else _rows_direct(reader, read, key, covering_snapshot)
    if rows is None:
        keys = as_key_table([key], key_names(read.plan.options))
        matches = get_many_from_version(reader, read.plan, keys, read.names, None, resolution, covering_snapshot)[0]
        rows = as_python(matches.drop_columns([KEY_INDEX]))
    return rows


def _rows_direct(reader: TableReader, read: KeyedRead, key: Any, snapshot: Snapshot) -> list[dict[str, Any]] | None:
    """The rows of one key straight from the snapshot, which is faster than by an Arrow table; None for keys and columns that need one."""
    if not read.is_direct(snapshot):
        return None
    lookup_key = one_key(key, read.kind)
    if lookup_key is None:
        return None
    try:
        rows = snapshot.get_one(read.columns, lookup_key)
    except (OverflowError, ValueError):  # a value that no Python type can hold: the slow way names its column
        return None
    reader.metrics.inc("hitCount")
    return [dict(zip(read.columns, row, strict=True)) for row in rows]


def rows_of_keys(
    reader: TableReader, read: KeyedRead, keys: pa.Table, version: TableVersion, snapshot: Snapshot | None
) -> pa.Table:
    """The rows of a version with those keys: key columns, the other columns, `key_index`. `snapshot`: that of the version, if at hand."""
    return get_many_from_version(reader, read.plan, keys, read.names, None, *_resolve(reader, read, version, snapshot))[
        0
    ]


def _resolve(
    reader: TableReader, read: KeyedRead, version: TableVersion, snapshot: Snapshot | None
) -> tuple[Resolution, Snapshot | None]:
    if snapshot is None:
        return reader.snapshots.resolve(read.plan, None, version)
    return Resolution(version, True), reader.snapshots.covering(read.plan, snapshot)


def forget_keys(
    engine: Engine, resolved_table: ResolvedTable, options: LookupOptions, keys: KeysLike | KeyMaker
) -> None:
    """Drop the rows of those keys from this host's partial caches. Raises as `LookupTable.invalidate` does."""
    if options.cache is CacheMode.FULL:
        raise OptionError(
            "option lookup.cache = 'FULL': a snapshot has all keys of one version, of which none can be forgotten alone: use reload()"
        )
    everything = all_columns((resolved_table.data, resolved_table.partitions))
    names = resolve_names(key_names(options), everything, "lookup.keys")
    arrays = castable_keys(table_of_keys(resolved_table, options, keys), [everything.field(name) for name in names])
    engine.reader.partials.invalidate(resolved_table.table, pa.Table.from_arrays(arrays, names=list(names)))


def table_of_keys(resolved_table: ResolvedTable, options: LookupOptions, keys: KeysLike | KeyMaker) -> pa.Table:
    """Keys as a table, whatever form they were given in. Raises as `as_key_table`."""
    names = key_names(options)
    return keys(names, resolved_table.columns) if callable(keys) else as_key_table(keys, names)


def key_names(options: LookupOptions) -> tuple[str, ...]:
    """The key columns. Raises OptionError if none are named."""
    if not options.keys:
        raise OptionError("option lookup.keys is missing: it names the key columns, such as lookup.keys = id")
    return options.keys
