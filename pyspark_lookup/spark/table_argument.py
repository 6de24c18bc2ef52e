"""Finds the table that the argument `table` of a lookup names, with its options and columns, and checks the arguments that name columns.

The argument is a path, a catalog table's name, or a `LookupTable`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.types import DataType, StringType, StructField, StructType, VarcharType

from pyspark_lookup.columnar.keys import KEY_INDEX
from pyspark_lookup.columnar.types import resolve_names
from pyspark_lookup.errors import NotSupportedError, OptionError, SchemaError, UnreadableColumnError
from pyspark_lookup.lookup.catalog_tables import named_options, resolve_path
from pyspark_lookup.lookup.lookup_table import LookupTable
from pyspark_lookup.lookup.metadata_tables import describe_version
from pyspark_lookup.lookup.range_match import MatchKind, check_match_types, named_columns
from pyspark_lookup.lookup.runtime import runtime
from pyspark_lookup.options.conf_file import conf_file_options
from pyspark_lookup.options.enums import CacheMode, MetadataSource, View
from pyspark_lookup.options.groups import ReadOptions, refuse_in_reads
from pyspark_lookup.options.lookup_options import HOST_KEYS, SPARK_CONF_PREFIX, LookupOptions, merge_options
from pyspark_lookup.options.parsing import option_text, parse_names
from pyspark_lookup.sources.registry import names_catalog, names_system, parse_options
from pyspark_lookup.spark.load import load, load_columns, plans_here
from pyspark_lookup.spark.pipelines import in_flow_function
from pyspark_lookup.spark.types import arrow_schema, is_collated, unreadable_reason
from pyspark_lookup.storage.disk import key_of

Stored = Literal["stored"]
TableArgument = str | os.PathLike[str] | LookupTable | None
# Options that select the columns and rows of a read. A lookup has arguments of its own for this.
_OF_READS = frozenset({"lookup.columns", "lookup.view", "lookup.version-at"})


@dataclasses.dataclass(frozen=True)
class DimensionTable:
    """The table of a lookup. `options` and `parsed`: its options, as texts and parsed. `schema`: all its columns. `keys`: the key columns.
    `returned_fields`: the columns that the lookup returns, in their order."""

    spark: SparkSession
    options: Mapping[str, str]
    parsed: LookupOptions
    schema: StructType
    keys: tuple[str, ...]
    returned_fields: tuple[StructField, ...]

    @property
    def place(self) -> str:
        """The last part of the table's path or name, in letters, digits and `_`, as Spark's plans can show it."""
        # The part of a URL after `?` may be a signature, and the part before `@` a password.
        place = (self.parsed.files.path or self.parsed.place).partition("?")[0].rpartition("@")[2]
        last = re.sub(r"[^A-Za-z0-9]+", "_", place.rstrip("/").rsplit("/", 1)[-1])
        return last.strip("_")[:40] or "table"

    @property
    def label(self) -> str:
        """The name of the table in Spark's plans: its `place`, and a hash of its options."""
        return f"{self.place}_{key_of(*sorted(self.options.items()))[:6]}"

    @property
    def url(self) -> str:
        """The table's path or its name in a catalog, without credentials."""
        return self.parsed.place

    def read(self, columns: Sequence[str]) -> DataFrame:
        """A DataFrame of these columns of the table, read through the host's cache."""
        column_list = ",".join(map(quote, columns))
        return load(self.spark, {**self.options, "lookup.columns": column_list})

    def arrow(self, names: Sequence[str]) -> pa.Schema:
        return arrow_schema(StructType([self.schema[name] for name in names]))

    def column_type(self, name: str) -> DataType:
        return self.schema[name].dataType

    def facts(self) -> Row:
        """The row that the view `summary` of the table has on the driver's host; over Spark Connect, on one of the server's hosts."""
        return _facts(self.spark, self.options)


def _facts(spark: SparkSession, options: Mapping[str, str]) -> Row:
    if not plans_here(spark):
        return load_view(spark, options, View.SUMMARY).collect()[0]
    keys = {key: SPARK_CONF_PREFIX + key.removeprefix("lookup.") for key in HOST_KEYS}
    session = {key: text for key, name in keys.items() if (text := spark.conf.get(name, None))}
    parsed = runtime().effective(parse_options(options).on_host(session))
    engine = runtime().engine(parsed)
    with engine.publish():
        return Row(**describe_version(engine, parsed))


def load_view(spark: SparkSession, options: Mapping[str, str], view: View) -> DataFrame:
    """A DataFrame of a view of the table with these options (`lookup.view`)."""
    return load(spark, {**options, "lookup.view": view.value})


def look_up(
    spark: SparkSession,
    table: TableArgument,
    keys: Sequence[str] | None,
    columns: Sequence[str] | None,
    options: Mapping[str, Any],
    match: MatchArgument | Stored | None = None,
    key_argument: str = "on",
) -> DimensionTable:
    """The table that a lookup names, with its columns as Spark sees them now.

    `keys`: the key columns; None for those that the table's options or its log name. `key_argument`: the name that errors give to this
    argument. `columns`: the columns to return; None for all but the keys. `match`: an argument by which the lookup compares a value with
    columns of the table, e.g. with a range; then `keys` may be empty. If it is "stored", the table's own options name these columns,
    and the keys are the table's key columns that are not among them.
    Raises OptionError for an option that is not for lookups and for a name of no table, SchemaError for a column that the table does not have.
    """
    argument_options = {key: option_text(value) for key, value in options.items()}
    explicit = {key.lower() for key in argument_options}
    for key in sorted(_OF_READS & explicit):
        instead = "give the argument columns instead" if key == "lookup.columns" else "leave it out"
        raise OptionError(f"option {key} is for reads, not for lookups: {instead}")
    refuse_in_reads(explicit - {"lookup.on-error"}, matches=match is not None)
    stored, schema = _table(spark, table, argument_options)
    merged_options = resolve_path(merge_options(stored, argument_options))
    if any(key.lower() == "lookup.changes-from" for key in merged_options):
        raise OptionError("option lookup.changes-from reads changes, in which nothing can be looked up: leave it out")
    own_options = {key.lower(): text for key, text in argument_options.items()}
    keys_option = own_options.get("lookup.keys")
    if match is not None:
        merged_options = _with_stored_match(spark, match, merged_options, own_options)
    if match == "stored":
        keys = _keys_beside(spark, merged_options)
    elif keys is None:
        keys = _stored_keys(spark, merged_options)
    elif (
        keys
        and keys_option is not None
        and {key.lower() for key in parse_names(keys_option)} != {key.lower() for key in keys}
    ):
        raise OptionError(
            f"option lookup.keys = {keys_option!r} differs from the argument `on` (or `key`), {', '.join(keys)}: a lookup uses "
            "all of the table's keys; leave one of the two out"
        )
    if keys:
        merged_options["lookup.keys"] = ",".join(map(quote, keys))
    columns_option = merged_options.get("lookup.columns")
    parsed = parse_options(merged_options)
    if schema is None:
        schema = load_columns(spark, _without_cache(merged_options))
    key_names = tuple(_resolve(keys, schema, key_argument))
    if keys:
        merged_options["lookup.keys"] = ",".join(map(quote, _order(key_names, {**stored, **argument_options})))
    if columns is None:
        shown_names = (
            schema.names
            if columns_option is None
            else resolve_names(parsed.read.columns or (), schema, "lookup.columns")
        )
        columns = [name for name in shown_names if name not in key_names]
    names = _resolve(columns, schema, "columns")
    if KEY_INDEX in names:
        raise SchemaError(
            f"the table's column {KEY_INDEX!r} has the same name as the column that a lookup adds to its rows: leave it out with columns=[…], or rename it"
        )
    for name in (*key_names, *names):
        reason = unreadable_reason(schema[name])
        if reason is not None:
            advice = "look up by other key columns" if name in key_names else f"leave {name!r} out, with columns=[…]"
            raise UnreadableColumnError(f"{reason}: {advice}")
        if is_collated(schema[name].dataType):
            raise SchemaError(
                f"column {name!r} of the table is {schema[name].dataType.simpleString()}, and a lookup compares and returns plain text: leave it "
                f"out with columns=[…], or, in a table of files, declare it with options={{'lookup.schema': '{name} STRING, …'}}"
            )
    returned_fields = tuple(StructField(name, schema[name].dataType) for name in names)
    final_options = parse_options(merged_options)
    floor = _known_floor(final_options)
    if floor is not None:
        merged_options.setdefault("lookup.floor", floor)
    return DimensionTable(spark, merged_options, final_options, schema, key_names, returned_fields)


def _with_stored_match(
    spark: SparkSession, match: MatchArgument | Stored, options: dict[str, str], own_options: Mapping[str, str]
) -> dict[str, str]:
    """The options, completed by the options that a managed table's log stores, if neither the match nor the options name the columns to compare.

    `own_options`: the options that the lookup itself gives. Raises OptionError if one of them names columns that the match does not name.
    """
    kinds = list(_MATCH_COLUMNS) if match == "stored" else [match.kind]
    if match != "stored" and match.columns:
        key = match.kind.option
        text = own_options.get(key)
        named = match.columns if text is None else named_columns(match.kind, LookupOptions().override({key: text}).read)
        if [name.lower() for name in named] != [name.lower() for name in match.columns]:
            raise OptionError(
                f"option {key} = {text!r} differs from the argument {match.kind.value}, {' and '.join(match.columns)}: leave one of the two out"
            )
        return options
    if any(kind.option in options for kind in kinds) or names_system(options):
        return options
    return {**json.loads(_facts(spark, _without_cache(options)).options_of_table), **options}


def _keys_beside(spark: SparkSession, options: Mapping[str, str]) -> Sequence[str]:
    """The table's key columns without those that its options name as columns to compare (e.g. the bounds of a range)."""
    read = parse_options(_without_cache(options)).read
    columns = {name.lower() for name in named_columns(stored_match(read).kind, read)}
    return [name for name in _find_keys(spark, options) or () if name.lower() not in columns]


def _stored_keys(spark: SparkSession, options: Mapping[str, str]) -> Sequence[str]:
    """The key columns that the options name; if they name none, those that the log of a managed table names. Raises OptionError if there are
    none."""
    keys = _find_keys(spark, options)
    if not keys:
        raise OptionError(
            "argument on is missing, and the table does not say by which columns it is looked up (lookup.keys): give "
            "on='id', a list of columns, or a dict {column of df: column of table}"
        )
    return keys


def _find_keys(spark: SparkSession, options: Mapping[str, str]) -> Sequence[str] | None:
    text = {key.lower(): value for key, value in options.items()}.get("lookup.keys")
    if text is not None:
        return parse_names(text)
    return None if names_system(options) else _facts(spark, _without_cache(options)).keys_of_table


def _known_floor(options: LookupOptions) -> str | None:
    """The last commit that this host has made to the table, as a text for the option `lookup.floor`. With this option, a host whose cached
    metadata does not have the commit asks the store. None if this host has made no commit, or if every host asks the store anyway."""
    if options.system is not None or options.version.source is MetadataSource.UFS:
        return None
    engine = runtime().engine(options)
    floor = engine.reader.host.floor(engine.url_of(options.files.path))
    return None if floor is None else f"{floor[0]}:{floor[1]}"


def _without_cache(options: Mapping[str, str]) -> dict[str, str]:
    """The options that decide which columns a table has. The cache is switched off, because it is not needed to find the columns."""
    schema_options = {key: text for key, text in options.items() if key not in _OF_READS}
    if names_system(schema_options):
        return schema_options
    schema_options.pop("lookup.keys", None)
    without = merge_options(schema_options, {"lookup.cache": CacheMode.NONE.value})
    everything = {**conf_file_options(), **without}
    if "lookup.metadata.sync-interval" not in everything:
        # A table with a full cache has no interval after which to ask the store, but without a cache the interval must be set. -1 (never) is
        # enough, because the columns of the last known version will do. UFS is set for another host that plans, whose conf file may say CACHE.
        source = without.setdefault(
            "lookup.metadata.source", everything.get("lookup.metadata.source", MetadataSource.UFS.value)
        )
        if source.strip().upper() == MetadataSource.CACHE.value:
            without["lookup.metadata.sync-interval"] = "-1"
    return without


def _resolve(columns: Sequence[str], schema: StructType, argument: str) -> list[str]:
    if isinstance(columns, str):
        raise SchemaError(f"argument {argument} = {columns!r}: give a list of names, e.g. [{columns!r}]")
    spelled_names = resolve_names(tuple(columns), schema, argument, f"argument {argument}")
    twice = [name for name in spelled_names if spelled_names.count(name) > 1]
    if twice:
        raise SchemaError(f"argument {argument}: {twice[0]!r} is given twice: give each column once")
    return spelled_names


def quote(name: str) -> str:
    """A column's name in backquotes. SQL accepts any name in this form."""
    return "`" + name.replace("`", "``") + "`"


def _order(keys: tuple[str, ...], stored: Mapping[str, str]) -> tuple[str, ...]:
    """The keys in the order of the table's own `lookup.keys`, if that names the same columns. Lookups with the keys in another order then share the
    table's cache."""
    text = {key.lower(): value for key, value in stored.items()}.get("lookup.keys")
    if text is None:
        return keys
    table_keys = LookupOptions.parse({"path": "x", "lookup.keys": text}).files.keys or ()
    folded = {key.lower(): key for key in keys}
    if {name.lower() for name in table_keys} != set(folded):
        return keys
    return tuple(folded[name.lower()] for name in table_keys)


def _table(
    spark: SparkSession, table: TableArgument, argument_options: Mapping[str, str]
) -> tuple[dict[str, str], StructType | None]:
    """(the table's own options, its columns if a catalog knows them). Raises OptionError if the argument names no table."""
    if isinstance(table, LookupTable):
        return table.given, None
    if table is None:
        if names_system(argument_options):
            return {}, None
        raise OptionError("argument table is None: give a path, a catalog table's name or a LookupTable")
    if isinstance(table, os.PathLike):
        return {"path": os.fspath(table)}, None
    if not isinstance(table, str):
        raise OptionError(f"argument table = {table!r}: give a path, a catalog table's name or a LookupTable")
    if "/" in table or "\\" in table or names_catalog(argument_options):
        return {"path": table}, None
    if in_flow_function(spark):
        raise NotSupportedError(
            f"argument table = {table!r}: inside the function of a pipeline's flow, Spark does not look up catalog tables; give its "
            f"path, or dim = LookupTable.for_name(spark, {table!r}), made outside the function"
        )
    if not spark.catalog.tableExists(table):
        raise OptionError(f"argument table = {table!r}: there is no such table; a path has a '/', e.g. './{table}'")
    table_options, schema = named_options(spark, table)
    return table_options, None if schema is None else StructType([_plain_text(field) for field in schema])


def _plain_text(field: StructField) -> StructField:
    """A catalog table's column with the type that it has in the files. `planning` makes one STRING column a VARCHAR in the catalog, and Spark shows
    that type if `spark.sql.preserveCharVarcharTypeInfo` is true."""
    return StructField(field.name, StringType()) if isinstance(field.dataType, VarcharType) else field


def resolve_table_options(spark: SparkSession, table: TableArgument, options: Mapping[str, Any]) -> dict[str, str]:
    """The options of the table that the argument `table` names, with `options` added. Raises OptionError if the argument names no table."""
    argument_options = {key: option_text(value) for key, value in options.items()}
    refuse_in_reads(argument_options)
    stored, _ = _table(spark, table, argument_options)
    return resolve_path(merge_options(stored, argument_options))


def is_cache_set(options: Mapping[str, str]) -> bool:
    """Whether `options` or the conf file set `lookup.cache`."""
    return "lookup.cache" in options or "lookup.cache" in conf_file_options()


def defaults_to_full(table: DimensionTable) -> bool:
    """Whether a lookup gives the table a full cache if the table is small. It does if `lookup.cache` is not set and each query asks the store for
    the current version, so that a full cache needs no other trigger to reload."""
    by_query = table.parsed.version.source is MetadataSource.UFS and table.parsed.system is None
    return by_query and not is_cache_set(table.options)


def with_default_cache(table: DimensionTable, size: int) -> DimensionTable:
    """The table with the cache that a lookup gives it if `lookup.cache` is not set. `size`: the bytes of the table's files."""
    small = size <= table.parsed.read.split_size
    return with_cache(table, CacheMode.FULL) if small and defaults_to_full(table) else table


def with_cache(table: DimensionTable, mode: CacheMode) -> DimensionTable:
    options = merge_options(table.options, {"lookup.cache": mode.value})
    return dataclasses.replace(table, options=options, parsed=parse_options(options))


@dataclasses.dataclass(frozen=True)
class MatchArgument:
    """An argument `as_of`, `between`, `cidr` or `starts_with`: a lookup compares the DataFrame's `column` with the table's `columns`. If `columns` is
    empty, the table's options name them."""

    kind: MatchKind
    column: str
    columns: tuple[str, ...]


def parse_match(
    as_of: Any, between: Any, cidr: Any, starts_with: Any, names_column: bool = True
) -> MatchArgument | None:
    """The one of these four arguments that is not None; None if there is none. `names_column`: whether the argument also names the DataFrame's column.

    Raises OptionError if more than one is given, or if its value does not have the form that the argument needs.
    """
    arguments = {
        kind: value
        for kind, value in zip(MatchKind, (as_of, between, cidr, starts_with), strict=True)
        if value is not None
    }
    if len(arguments) > 1:
        names = " and ".join(kind.value for kind in arguments)
        raise OptionError(f"arguments {names}: give only one of them; for both, look up twice, or filter the result")
    for kind, value in arguments.items():
        if kind is MatchKind.AS_OF:
            if not isinstance(value, str):
                raise OptionError(f"argument as_of = {value!r}: give the name of a column with times")
            return MatchArgument(kind, value, ())
        if names_column and isinstance(value, str):
            return MatchArgument(kind, value, ())
        counts, df_column, example = _MATCH_COLUMNS[kind]
        advice = f"give the table's columns, e.g. {example}"
        pairs = [("", value)]
        if names_column:
            pairs = list(value.items()) if isinstance(value, Mapping) else []
            advice = (
                f"give one column of df and what it is compared with, e.g. {{'{df_column}': {example}}}, or the column of df alone if {kind.option} "
                "names the columns of the table"
            )
        columns = [(c,) if isinstance(c, str) else tuple(c) if isinstance(c, Sequence) else () for _, c in pairs]
        if (
            len(pairs) != 1
            or len(columns[0]) not in counts
            or not all(isinstance(c, str) for c in (pairs[0][0], *columns[0]))
        ):
            raise OptionError(f"argument {kind.value} = {value!r}: {advice}")
        return MatchArgument(kind, pairs[0][0], columns[0])
    return None


_MATCH_COLUMNS: Mapping[MatchKind, tuple[tuple[int, ...], str, str]] = {
    MatchKind.BETWEEN: ((2,), "amount", "('low', 'high')"),
    MatchKind.CIDR: ((1, 2), "ip", "'network'"),
    MatchKind.STARTS_WITH: ((1,), "number", "'dial_code'"),
}
"""For each kind of match: how many of the table's columns it compares, and an example of a DataFrame's column and of the table's columns."""


def match_columns(match: MatchArgument, table: DimensionTable) -> tuple[str, ...]:
    """The columns of the table with which a match compares, as the table spells them. Raises OptionError if nothing names them, SchemaError for
    columns that the table does not have or of other types."""
    kind = match.kind
    if kind is MatchKind.AS_OF:
        return _validity(table)
    columns, subject = match.columns, f"argument {kind.value}"
    if not columns:
        columns, subject = named_columns(kind, table.parsed.read), f"option {kind.option}"
        if not columns:
            _, df_column, example = _MATCH_COLUMNS[kind]
            raise OptionError(
                f"argument {kind.value} = {match.column!r}: the table does not say which of its columns are compared: give "
                f"{{{match.column or df_column!r}: {example}}}, or set {kind.option}"
            )
    try:
        names = tuple(resolve_names(columns, table.schema, subject))
    except SchemaError as problem:
        raise SchemaError(str(problem).replace("option ", "", 1)) from None
    check_match_types(kind, table.arrow(names), subject)
    return names


def stored_match(options: ReadOptions) -> MatchArgument:
    """The match whose columns the options of a table name. Raises OptionError if the options name the columns of no match, or of several."""
    kinds = [kind for kind in _MATCH_COLUMNS if named_columns(kind, options)]
    if len(kinds) > 1:
        keys, arguments = (" and ".join(names) for names in ([k.option for k in kinds], [k.value for k in kinds]))
        raise OptionError(
            f"options {keys} each say how rows are found: give the argument {arguments.replace(' and ', ' or ')}"
        )
    if not kinds:
        raise OptionError(
            "argument key is missing: name the table's key columns, or give between, cidr or starts_with, which a table may also store (lookup.range, "
            "lookup.cidr, lookup.starts-with)"
        )
    return MatchArgument(kinds[0], "", ())


def _validity(table: DimensionTable) -> tuple[str, ...]:
    """The columns from which and until which a row is valid (`lookup.valid-from`, and `lookup.valid-to` if it is set)."""
    start, end = table.parsed.read.valid_from, table.parsed.read.valid_to
    if start is None:
        raise OptionError(
            "argument as_of needs the table's columns that say when a row is valid: give "
            "options={'lookup.valid-from': 'valid_from', 'lookup.valid-to': 'valid_to'}"
        )
    (start_column,) = resolve_names((start,), table.schema, "lookup.valid-from")
    end_column = None if end is None else resolve_names((end,), table.schema, "lookup.valid-to")[0]
    if end_column is not None and table.column_type(start_column) != table.column_type(end_column):
        raise SchemaError(
            f"options lookup.valid-from and lookup.valid-to: {start_column!r} is {table.column_type(start_column).simpleString()}, {end_column!r} is "
            f"{table.column_type(end_column).simpleString()}; both must have the same type"
        )
    if end_column is None and "lookup.overlap" in table.options:
        raise OptionError(
            "option lookup.overlap has no effect without lookup.valid-to, because a row is valid until the next row of its key: remove it"
        )
    return (start_column,) if end_column is None else (start_column, end_column)


def check_match_cache(match: MatchArgument, keys: Sequence[object], table: DimensionTable) -> None:
    """Raise OptionError if the table has a partial cache, which keeps rows by key, and the lookup has no keys."""
    if not keys and table.parsed.cache.mode is CacheMode.PARTIAL:
        raise OptionError(
            f"option lookup.cache = 'PARTIAL' caches rows by key, and a lookup with only the argument {match.kind.value} has no key: set lookup.cache = FULL, or give keys as well"
        )
