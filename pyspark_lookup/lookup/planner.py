"""Plans reads: makes a `ReadPlan` and the tasks of the read from the options and the resolved table.

Every wrong option is reported here, on the driver, before tasks run.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence

import pyarrow as pa

from pyspark_lookup.cache.full.schedule import make_trigger
from pyspark_lookup.cache.full.snapshot import key_values
from pyspark_lookup.columnar.keys import check_key_types
from pyspark_lookup.columnar.predicate import And, Predicate
from pyspark_lookup.columnar.sql_predicate import parse_where
from pyspark_lookup.columnar.types import check_all_readable, check_readable, collated_field, resolve_names
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.credentials import names_shown
from pyspark_lookup.errors import OptionError, SchemaError
from pyspark_lookup.lookup.read import ReadPlan, ReadTask, ResolvedTable, TableReader, with_table_keys
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import CacheMode, VersionAt
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.scan.footers import prune_files
from pyspark_lookup.scan.open_file import Projection, Slice
from pyspark_lookup.scan.table_scan import all_columns, cut_shares
from pyspark_lookup.storage.stores import FileStatistics
from pyspark_lookup.versions.file_columns import ColumnFiles
from pyspark_lookup.versions.model import file_sizes, select_partitions

_TASKS_AT_MOST = 10_000  # tasks of one read; without a limit there could be any number, because a damaged log may claim any file size


def table_columns(resolved_table: ResolvedTable, options: LookupOptions, readable: bool = True) -> pa.Schema:
    """The columns that a read of all rows returns. Also checks each option that names a column.

    `readable`: False to include columns that cannot be read, with an `unreadable_type`; otherwise they raise UnreadableColumnError. Raises SchemaError for an unknown column, PredicateError for a predicate that does not fit the columns, OptionError for a
    `lookup.partition` that does not fit.
    """
    everything = resolved_table.columns
    options = with_table_keys(options, resolved_table.version)
    if options.cache.mode is CacheMode.PARTIAL and not options.files.keys:
        raise OptionError(
            "option lookup.cache = 'PARTIAL' needs lookup.keys: name the columns by which rows are looked up"
        )
    if options.files.keys:
        keys = resolve_names(options.files.keys, everything, "lookup.keys")
        fields = [everything.field(name) for name in keys]
        check_key_types(fields)
        collated_names = [field.name for field in fields if collated_field(field) is not None]
        if collated_names:
            raise SchemaError(
                f"option lookup.keys: column {collated_names[0]!r} has a collation, by which Spark compares text, but keys are compared "
                f"by their bytes: name other key columns, or, in a table of files, declare it as plain text with lookup.schema, e.g. '{collated_names[0]} STRING, …'"
            )
    if options.cache.mode is CacheMode.FULL and options.system is None:
        make_trigger(options)  # so that a custom trigger that cannot be imported fails here
    if options.read.where:
        parse_where(options.read.where, everything)
    read = options.read
    columns_of_matches: dict[str, str | tuple[str, ...] | None] = {
        "lookup.range": read.between,
        "lookup.cidr": read.cidr,
        "lookup.starts-with": read.starts_with,
        "lookup.valid-from": read.valid_from,
        "lookup.valid-to": read.valid_to,
    }
    for key, named in columns_of_matches.items():
        resolve_names((named,) if isinstance(named, str) else named or (), everything, key)
    select_partitions(resolved_table.table, resolved_table.version, options)
    if options.read.columns is None:
        if readable:
            check_all_readable(everything, f"{redact('path', resolved_table.table.url)}: ")
        return everything
    return pa.schema(
        [everything.field(name) for name in resolve_names(options.read.columns, everything, "lookup.columns")]
    )


def planned_names(names: Sequence[str], columns: pa.Schema, url: str, declared: bool = False) -> list[str]:
    """The columns `names` in the table's own spelling. Raises SchemaError for a column that the table does not have.

    `declared`: the columns come from the user (`lookup.schema` or `.schema(…)`), not from the table as it was when the query was planned.
    """
    table_names = {name.lower() for name in columns.names}
    missing_names = [name for name in names if name.lower() not in table_names]
    if missing_names:
        says = (
            "the schema that was given names it: correct the schema, or leave the column out"
            if declared
            else "it had the column when the query was planned, so the table changed: plan again (create the DataFrame, view or stream again)"
        )
        raise SchemaError(
            f"{redact('path', url)} has no column {missing_names[0]!r} (it has {names_shown(columns.names, missing_names[0] if declared else '')}); {says}"
        )
    return resolve_names(names, columns, "lookup.columns")


def plan_read(
    resolved_table: ResolvedTable,
    options: LookupOptions,
    columns: pa.Schema,
    clock: HostClock,
    predicates: Sequence[Predicate] = (),
    declared: bool = False,
) -> ReadPlan:
    """The plan of a read that returns `columns`, with exactly these names and types.

    `predicates`: conditions in addition to `lookup.where`. `declared`: the user has declared the types of the columns. Raises SchemaError if the
    table does not have such columns.
    """
    declared = declared or resolved_table.table.declared is not None
    everything = resolved_table.columns
    table_names = planned_names(columns.names, everything, resolved_table.table.url, declared)
    for column, name in zip(columns, table_names, strict=True):
        check_readable(column, everything.field(name).type, resolved_table.table.url, declared)
        if column.name != name:
            raise SchemaError(
                f"column {column.name!r} of the given schema is spelled {name!r} in the table: spell it the same way"
            )
    # A column that is read in a wider type is planned in that type; the others keep the table's types.
    types = {field.name: field.type for field in columns}
    data = pa.schema([pa.field(f.name, types.get(f.name, f.type)) for f in resolved_table.data])
    partitions = pa.schema([pa.field(f.name, types.get(f.name, f.type)) for f in resolved_table.partitions])
    where = [parse_where(options.read.where, all_columns((data, partitions)))] if options.read.where else []
    conjuncts = (*where, *predicates)
    predicate = None if not conjuncts else conjuncts[0] if len(conjuncts) == 1 else And(conjuncts)
    projection = Projection(columns, data, partitions, predicate, declared)
    return ReadPlan(
        uuid.uuid4().hex,
        options,
        resolved_table.table,
        projection,
        clock.steady_s(),
        clock.boot,
        resolved_table.version.number,
    )


def requested_keys(plan: ReadPlan) -> list[pa.Array] | None:
    """The keys to which the plan's predicate limits the rows, as columns in the order of `lookup.keys`.

    None if the predicate does not limit them. Also None if rows are not looked up by key: they are only with a partial cache, or with a
    provider without a cache.
    """
    options, projection = plan.options, plan.projection
    by_key = options.cache.mode is CacheMode.PARTIAL or (
        options.system is not None and options.cache.mode is CacheMode.NONE
    )
    if not by_key or projection.predicate is None:
        return None
    everything = all_columns((projection.data, projection.partitions))
    names = resolve_names(options.files.keys or (), everything, "lookup.keys")
    return key_values(projection.predicate, pa.schema([everything.field(name) for name in names]))


def reads_by_key(reader: TableReader, plan: ReadPlan) -> bool:
    """Whether the rows of a plan are looked up by key. Raises OptionError if a provider returns rows by key only, and the plan does not name the
    keys."""
    if requested_keys(plan) is not None:
        return True
    if not reader.versions.reads_all_rows:
        raise OptionError(
            f"{plan.options.place} returns rows by key only: name the keys in "
            'lookup.where (e.g. "id IN (1, 2)"), use LookupTable.get, or, if the provider is your own, make its factory return a provider with a scan'
        )
    return False


def plan_tasks(reader: TableReader, resolved_table: ResolvedTable, plan: ReadPlan) -> list[ReadTask]:
    """The tasks of a plan: one task for rows by key, or for a small table; otherwise one for each share of the files' bytes.

    `lookup.version-at` says whether the tasks read `resolved_table.version`, or find the current version when they read. By default, a single task
    finds the version, and several tasks read the planned one. Raises the error of `reads_by_key`.
    """
    if reads_by_key(reader, plan):
        return [ReadTask(0, 1, by_key=True)]
    files = select_partitions(resolved_table.table, resolved_table.version, plan.options)
    if isinstance(files, ColumnFiles) and plan.options.version.at is not VersionAt.READ:
        files = prune_files(resolved_table.table, files, plan.projection)
    count = max(-(-int(file_sizes(files).sum()) // plan.options.read.split_size), 1)
    count = min(count, _TASKS_AT_MOST)
    splittable = reader.versions.splittable(resolved_table.table)
    if not splittable:
        count = min(count, max(len(files), 1))
    version_at = plan.options.version.at
    if version_at is VersionAt.READ or (version_at is VersionAt.AUTO and count == 1):
        return [ReadTask(number, count) for number in range(count)]
    shares = cut_shares(files, range(count), count, splittable)
    # Files without matching rows have been left out above, so tasks need no statistics.
    if isinstance(files, ColumnFiles):
        shares = [tuple(map(_without_bounds, pieces)) for pieces in shares]
    nonempty_shares = [pieces for pieces in shares if pieces] or [()]
    version, count = resolved_table.version, len(nonempty_shares)
    catalog_id = reader.kinds.source(resolved_table.table).catalog_id(version)
    return [
        ReadTask(number, count, pieces, version.digest, catalog_id) for number, pieces in enumerate(nonempty_shares)
    ]


def _without_bounds(piece: Slice) -> Slice:
    file = piece.file
    statistics = None if file.statistics is None else FileStatistics(file.statistics.rows)
    return dataclasses.replace(piece, file=dataclasses.replace(file, statistics=statistics))
