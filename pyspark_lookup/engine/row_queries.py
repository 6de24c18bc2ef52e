"""Reads of a version without Spark: all of its rows, or those of some keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from pyspark_lookup.base.clock import HostClock
from pyspark_lookup.base.errors import OptionError, SchemaError
from pyspark_lookup.cache.memory import KEY_INDEX
from pyspark_lookup.cache.partial import castable_keys
from pyspark_lookup.columnar.sql_predicate import parse_where
from pyspark_lookup.columnar.types import resolve_names
from pyspark_lookup.engine import planner
from pyspark_lookup.engine.lookup import get_many, read_rows
from pyspark_lookup.engine.plan import ReadTask
from pyspark_lookup.engine.planner import Found
from pyspark_lookup.engine.rows import KeyMaker, Keys, keys_given
from pyspark_lookup.engine.runtime import Engine
from pyspark_lookup.options.enums import CacheMode
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.scan.contract import all_columns


def scan(
    engine: Engine,
    found: Found,
    options: LookupOptions,
    columns: Sequence[str] | None,
    predicate: str | None,
    clock: HostClock,
) -> pa.Table:
    """The rows of a version of which `predicate` (as `lookup.where`) is true, with these columns (None: all)."""
    overrides: dict[str, str] = {}
    if columns is not None and (isinstance(columns, str) or not columns):
        raise SchemaError(f"argument columns = {columns!r}: give a list of names, such as {[columns or 'name']!r}")
    if columns is not None:
        overrides["lookup.columns"] = ",".join("`" + name.replace("`", "``") + "`" for name in columns)
    shown = planner.table_columns(found, options.override(overrides))
    # Parsed by itself: joined as text, its parentheses could leave lookup.where.
    added = [] if predicate is None else [parse_where(predicate, all_columns((found.data, found.partitions)))]
    plan = planner.plan_read(found, options, shown, clock, added)
    planner.plan_tasks(engine.reader, found, plan)
    batches = read_rows(engine.reader, plan, ReadTask(0, 1), None, found.version)
    return pa.Table.from_batches(list(batches), plan.projection.columns)


def rows_with(engine: Engine, found: Found, options: LookupOptions, key: Any, clock: HostClock) -> list[dict[str, Any]]:
    """The rows of a version with one key: a value, a tuple in the order of `lookup.keys`, or a dictionary by their names."""
    names = key_names(options)
    keys = keys_given([key], names)
    rows: list[dict[str, Any]] = rows_of_keys(engine, found, options, keys, clock).drop_columns([KEY_INDEX]).to_pylist()
    return rows


def rows_of_keys(engine: Engine, found: Found, options: LookupOptions, keys: pa.Table, clock: HostClock) -> pa.Table:
    """The rows of a version with those keys: key columns, the other columns, `key_index`."""
    shown = planner.table_columns(found, options)
    everything = all_columns((found.data, found.partitions))
    names = resolve_names(key_names(options), everything, "lookup.keys")
    columns = pa.schema(
        [*(everything.field(name) for name in names), *(field for field in shown if field.name not in names)]
    )
    plan = planner.plan_read(found, options, columns, clock)
    return get_many(engine.reader, plan, keys, names, None, found.version)


def forget_keys(engine: Engine, found: Found, options: LookupOptions, keys: Keys | KeyMaker) -> None:
    """Have this host forget what its partial caches hold of those keys. Raises as `LookupTable.invalidate` does."""
    if options.cache is CacheMode.FULL:
        raise OptionError(
            "option lookup.cache = 'FULL': a snapshot has all keys of one version, of which none can be forgotten alone: use reload()"
        )
    everything = all_columns((found.data, found.partitions))
    names = resolve_names(key_names(options), everything, "lookup.keys")
    arrays = castable_keys(table_of_keys(found, options, keys), [everything.field(name) for name in names])
    engine.reader.partials.invalidate(found.table, pa.Table.from_arrays(arrays, names=list(names)))


def table_of_keys(found: Found, options: LookupOptions, keys: Keys | KeyMaker) -> pa.Table:
    """Keys as a table, whatever form they were given in. Raises as `keys_given`."""
    names = key_names(options)
    return keys(names, found.columns) if callable(keys) else keys_given(keys, names)


def key_names(options: LookupOptions) -> tuple[str, ...]:
    """The key columns. Raises OptionError if none are named."""
    if not options.keys:
        raise OptionError("option lookup.keys is missing: it names the key columns, such as lookup.keys = id")
    return options.keys
