"""`lookup_join` adds to each row of a DataFrame or stream the columns of the rows with the same key in a lookup table.

Consecutive lookups are one step of the plan, called a pass: a lookup on the result of `lookup_join` builds this step again, with one more lookup.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import (
    ArrayType,
    CharType,
    DataType,
    MapType,
    NullType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VarcharType,
)
from pyspark.storagelevel import StorageLevel

from pyspark_lookup.columnar.keys import accepts
from pyspark_lookup.columnar.types import widens
from pyspark_lookup.core.credentials import names_shown
from pyspark_lookup.core.forks import ForkSafeLock
from pyspark_lookup.errors import NotSupportedError, OptionError, SchemaError
from pyspark_lookup.lookup.late_facts import PARTS
from pyspark_lookup.lookup.lookup_join import ERROR_COLUMN, FOUND_COLUMN
from pyspark_lookup.lookup.range_match import MatchKind
from pyspark_lookup.options.enums import CacheMode, OnError, View
from pyspark_lookup.options.parsing import check_argument, duration_argument_s, option_text
from pyspark_lookup.sources.registry import take_retry_delay
from pyspark_lookup.spark import features
from pyspark_lookup.spark.late import WAITED_COLUMN, Wait, has_watermark, join_late
from pyspark_lookup.spark.lookup_pass import (
    VERSION_COLUMN,
    Chain,
    ChainedLookup,
    Key,
    broadcast_join,
    estimated_rows,
    plan_text,
)
from pyspark_lookup.spark.micro_batch import current_build
from pyspark_lookup.spark.pipelines import in_flow_function
from pyspark_lookup.spark.table_argument import (
    DimensionTable,
    MatchArgument,
    TableArgument,
    check_match_cache,
    defaults_to_full,
    is_cache_set,
    load_view,
    look_up,
    match_columns,
    parse_match,
    with_cache,
    with_default_cache,
)
from pyspark_lookup.spark.types import arrow_type, is_collated

_log = logging.getLogger("pyspark_lookup.join")
How = Literal[
    "left", "leftouter", "left_outer", "inner", "semi", "leftsemi", "left_semi", "anti", "leftanti", "left_anti"
]
_INTEGER_DIGITS = {8: 3, 16: 5, 32: 10, 64: 20}  # of Spark's decimals for integers, by bits
Strategy = Literal["auto", "cache", "broadcast"]
_NO_KEYS = (ArrayType, MapType, StructType, features.VariantType)
_HOW = {"left": "left", "leftouter": "left", "inner": "inner", "semi": "left_semi", "leftsemi": "left_semi"} | {
    "anti": "left_anti",
    "leftanti": "left_anti",
}
_CHAIN = "_lookup_chain"  # the attribute of a DataFrame that has its `Chain`
_BROADCASTS = "_lookup_broadcasts"  # the attribute of a DataFrame that has its `_Broadcasts`
# In a batch query, Spark's own broadcast join is faster for tables of up to this many rows (benchmarks/bench_join.py). If keys are known to
# repeat in the table, it is faster for larger tables, too, because lookups return the rows of a key in lists.
_BROADCAST_ROWS = 2_000_000
_BROADCAST_REPEATED_ROWS = 3_000_000
# If a DataFrame has fewer rows than this number plus half the number of rows of all its tables, a pass has ended before Spark would have built
# the broadcasts (benchmarks/bench_star.py).
_PASS_ROWS = 500_000


@dataclasses.dataclass(frozen=True)
class _Broadcasts:
    """Consecutive lookups for which `auto` chose broadcasts. `base`: the DataFrame before the first of them.

    `rows`: how many rows their tables have together. `lookups`: the lookups in the form that a pass needs, if a pass turns out to be better.
    """

    base: DataFrame
    rows: int = 0
    lookups: tuple[ChainedLookup, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Choice:
    """The strategy for a lookup. `broadcast`: whether it is a broadcast join, and not a pass. `why`: the reason.

    `cached`: the table with the cache that a pass needs. `rows`: the table's number of rows, if `auto` chose a broadcast.
    """

    broadcast: bool
    cached: DimensionTable
    why: str
    rows: int | None = None


@dataclasses.dataclass(frozen=True)
class _Explanation:
    """What `explain_lookup` says of a lookup. `full`: the options of its table, if the table has a full cache; None otherwise.

    With `full`, `explain_lookup` also asks a host whether it has room for the full cache.
    """

    text: str
    full: Mapping[str, str] | None


class _Unknown(StructField):
    """A column of a DataFrame whose schema Spark does not show (in a flow of a pipeline)."""


# What `explain_lookup` says, by the name of a pass or broadcast, the newest one last: (explanations of its lookups, why the lookups before it
# are not in the same pass). These are only texts, so that they keep no session alive. Their number is bounded, because the function of a stream
# may build new lookups for ever.
_explained: collections.OrderedDict[str, tuple[tuple[_Explanation, ...], str]] = collections.OrderedDict()
_EXPLAINED_AT_MOST = 500
_explained_lock = ForkSafeLock()
_STATE_STORE = "spark.sql.streaming.stateStore.providerClass"
_STATE_PACKAGE, _ROCKSDB = "org.apache.spark.sql.execution.streaming.state.", "RocksDBStateStoreProvider"


def lookup_join(
    df: DataFrame,
    table: TableArgument,
    on: str | Sequence[str] | Mapping[str, str] | None = None,
    how: How = "left",
    columns: Sequence[str] | None = None,
    prefix: str | None = None,
    strategy: Strategy = "auto",
    as_of: str | None = None,
    options: Mapping[str, Any] | None = None,
    between: str | Mapping[str, Sequence[str]] | None = None,
    cidr: str | Mapping[str, str | Sequence[str]] | None = None,
    starts_with: str | Mapping[str, str] | None = None,
    wait: str | datetime.timedelta | None = None,
    wait_on: str | None = None,
    wait_max_rows: int = 10_000_000,
) -> DataFrame:
    """`df` with the columns of the table's rows that have the same key, from the table's current version.

    Works on batch DataFrames and streams, in Spark Classic and Connect. Each execution and each micro-batch reads one version of the table: the
    newest one when it starts.

    `table`: a path (has a `/`), a catalog table's name, or a `LookupTable`; None with `lookup.provider`. `on`: a column, a list of columns
    with the same names on both sides, or a dict `{column of df: column of table}` (`s.id` is a field of a struct); by default the table's
    own keys (`lookup.keys`, from its options or its log), which must then be columns of `df`, too. `how`: `left`, `inner`, or `left_semi`
    and `left_anti` for the rows with, or without, a match. `columns`: the columns of the table to add, in that order (default: all but the
    keys). `prefix`: a string to put before their names. If several rows of the table have the key, there is a result for each of them; a key
    with a null has no match.

    Lookups on the result of a `lookup_join` form one pass: together they cost little more than one of them. A key may be a column that an
    earlier lookup has added. An operation in between begins another pass.

    `strategy`: `cache` looks keys up in this package's caches; `broadcast` reads the table through these caches and lets Spark broadcast it;
    `auto` chooses, and `explain_lookup` says why. `as_of`: a column of `df` with the time at which the table's row must be valid, by the
    columns that `lookup.valid-from` and `lookup.valid-to` name; at most one row then matches.

    `between`: `{column of df: (lowest, highest)}` looks up rows between whose two columns the value lies; null is an open bound. `cidr`:
    `{column of df: network}` looks up the network of an IP address (text, 4 or 16 bytes, or an integer for IPv4); the network is text such as
    `10.0.0.0/8`, a pair of columns with its first and last address, or one with its address and length. `starts_with`:
    `{column of df: prefix}` looks up the prefix with which a text or binary value begins. The column of `df` alone is enough if `lookup.range`,
    `lookup.cidr` or `lookup.starts-with` names the columns of the table. One of these arguments at most. Beside one of
    them, `on` is optional, and `lookup.overlap` says what happens if several rows match. `options`: a mapping as for `spark.read`, such as
    {"lookup.cache": "FULL"}. If `lookup.cache` is not set, a table of files of up to `lookup.scan.split-size` gets a full cache.

    `wait`: in a stream, how long a row of `df` without a match waits for the table to have its row ("2 hours", or a timedelta). `wait_on`: the
    column of `df` with the time from which it waits, by the stream's watermark; by default it waits from its arrival on. If more than
    `wait_max_rows` rows wait, the oldest ones stop waiting, as if their time were over. The column `_lookup_waited`, if `columns` names it, says how long each
    row has waited.

    Raises OptionError for wrong arguments, and SchemaError for columns and types that do not fit, when it is called. When the query runs, it may
    raise the errors of a lookup (see `lookup.on-error`).
    """
    if not hasattr(df, "sparkSession"):
        raise OptionError(f"argument df is a {type(df).__name__}: give a Spark DataFrame as the first argument")
    waiting = _parse_wait(df, wait, wait_on, wait_max_rows, columns)
    if waiting is not None:
        options, retry_s = take_retry_delay({key: option_text(value) for key, value in (options or {}).items()})
        waiting = dataclasses.replace(waiting, retry_s=retry_s)
        columns = None if columns is None else [column for column in columns if column != WAITED_COLUMN]
    match = parse_match(as_of, between, cidr, starts_with)
    pairs = None if on is None else _parse_join_keys(on)
    if pairs is None and match is not None and match.kind is not MatchKind.AS_OF:
        pairs = []
    kind = _HOW.get(str(how).lower().strip().replace("_", ""))
    if kind is None:
        raise OptionError(f"argument how = {how!r}: give 'left', 'inner', 'left_semi' or 'left_anti'")
    if kind in ("left_semi", "left_anti"):
        if columns:
            raise OptionError(
                f"argument columns = {columns!r}: a {kind} join returns no columns of the table: leave the argument out"
            )
        columns = ()
    if strategy not in ("auto", "cache", "broadcast"):
        raise OptionError(f"argument strategy = {strategy!r}: give 'auto', 'cache' or 'broadcast'")
    key_columns = None if pairs is None else [table_column for _, table_column in pairs]
    dim_table = look_up(df.sparkSession, table, key_columns, columns, options or {}, match)
    pairs = [(name, name) for name in dim_table.keys] if pairs is None else pairs
    keys = [
        _key(df, df_column, dim_table, table_column)
        for (df_column, _), table_column in zip(pairs, dim_table.keys, strict=True)
    ]
    matched = None
    if match is not None:
        matched = match.kind, match_columns(match, dim_table)
        keys.append(_match_value(df, match, dim_table, matched[1]))
    if match is not None:
        check_match_cache(match, keys[:-1], dim_table)
    names = tuple((prefix or "") + field.name for field in dim_table.returned_fields)
    _check_names(df, [*names, WAITED_COLUMN] if waiting is not None and waiting.shown else names, dim_table)
    if waiting is not None:
        _check_waiting(kind, strategy, dim_table, waiting)
    choice = _choose(df, dim_table, strategy, match, keys)
    lookup = ChainedLookup(
        choice.cached, tuple(keys), names, kind, matched, current_build(df.sparkSession), why=choice.why
    )
    if waiting is not None:
        return _wait(df, dataclasses.replace(lookup, wait=str(waiting)), waiting)
    chain, broadcasts = _get_chain(df), _get_broadcasts(df)
    roots = {key.path[0].lower() for key in keys if len(key.path) > 1}
    if roots & {name.lower() for earlier in (*chain.lookups, *broadcasts.lookups) for name in earlier.names}:
        # A pass returns the columns of its lookups unchanged, so it cannot look up a field of such a column. So begin another pass.
        chain, broadcasts = Chain(df, "a key is in a column that an earlier lookup has added"), _Broadcasts(df)
    if not choice.broadcast:
        return _pass(chain, lookup)
    if choice.rows is not None and (few := _explain_pass(broadcasts.base, broadcasts.rows + choice.rows)) is not None:
        # The earlier broadcasts become lookups of this pass, too, because each more lookup costs it little.
        joining = (dataclasses.replace(earlier, why=few) for earlier in (*broadcasts.lookups, lookup))
        return _pass(_get_chain(broadcasts.base), *joining)
    plain = dataclasses.replace(lookup, table=dim_table, broadcast=True)
    _explain(plain.name, (plain,), "Spark joins it")
    joined = broadcast_join(df, plain)
    if choice.rows is not None:
        vars(joined)[_BROADCASTS] = _Broadcasts(
            broadcasts.base, broadcasts.rows + choice.rows, (*broadcasts.lookups, lookup)
        )
    return joined


def _pass(chain: Chain, *lookups: ChainedLookup) -> DataFrame:
    """The DataFrame of a chain with some lookups added, all in one pass."""
    longer = dataclasses.replace(chain, lookups=(*chain.lookups, *lookups))
    _explain(longer.name, longer.lookups, longer.apart, len(lookups))
    joined = longer.to_dataframe()
    vars(joined)[_CHAIN] = longer
    return joined


def _wait(df: DataFrame, lookup: ChainedLookup, waiting: Wait) -> DataFrame:
    """The DataFrame with a lookup whose rows wait, in a pass of its own."""
    apart = "rows wait in it"
    chain = Chain(df, apart, (lookup,))
    _explain(chain.name, chain.lookups, apart)
    joined = join_late(chain, lookup, waiting)
    vars(joined)[_CHAIN] = Chain(joined, "in the pass before, rows wait")
    return joined


def _parse_wait(
    df: DataFrame, wait: object, wait_on: str | None, wait_max_rows: int, columns: Sequence[str] | None
) -> Wait | None:
    """How the rows of a lookup wait; None if they do not. Raises OptionError for wrong arguments, and for a DataFrame whose rows cannot wait."""
    if wait is None:
        for name, value, default in (("wait_on", wait_on, None), ("wait_max_rows", wait_max_rows, 10_000_000)):
            if value != default:
                raise OptionError(f"argument {name} = {value!r} needs the argument wait: say how long rows wait")
        return None
    seconds = duration_argument_s("wait", wait)
    if seconds <= 0:
        raise OptionError(f"argument wait = {wait!r}: expected a duration greater than zero")
    check_argument("wait_max_rows", wait_max_rows, int, "a number of rows")
    if wait_max_rows < PARTS:
        raise OptionError(
            f"argument wait_max_rows = {wait_max_rows}: give at least {PARTS}, because the limit is divided among the {PARTS} parts of the state"
        )
    features.STATEFUL_PROCESSORS.require("argument wait", "leave it out, and look up the rows again later")
    if in_flow_function(df.sparkSession):
        raise NotSupportedError(
            "argument wait: inside the function of a pipeline's flow, Spark does not show the columns of the DataFrame whose rows would wait: leave wait out there"
        )
    if not df.isStreaming:
        raise OptionError(
            f"argument wait = {wait!r}: the DataFrame is a batch, which ends before the table can change: leave wait out, or give a stream"
        )
    store = df.sparkSession.conf.get(_STATE_STORE, "") or ""
    if not store.endswith(_ROCKSDB):
        raise OptionError(
            f"argument wait keeps rows in Spark's state, which needs {_STATE_STORE} = {_STATE_PACKAGE}{_ROCKSDB}: set it in the session before "
            "the query starts"
        )
    if wait_on is not None:
        *within, field = _field(df, wait_on, "wait_on", TimestampType())
        if within or not isinstance(field.dataType, TimestampType | TimestampNTZType):
            raise SchemaError(
                f"argument wait_on = {wait_on!r} is {'a field of' if within else 'of the type'} "
                f"{within[0].name if within else field.dataType.simpleString()}: give a column of the type TIMESTAMP, with a watermark"
            )
        if not has_watermark(field):
            raise OptionError(
                f"argument wait_on = {wait_on!r}: the column has no watermark, which would show when a row has waited long enough: call "
                f"df.withWatermark({wait_on!r}, …) before the lookup"
            )
    return Wait(seconds, wait_on, wait_max_rows, columns is not None and WAITED_COLUMN in columns)


def _check_waiting(kind: str, strategy: str, table: DimensionTable, waiting: Wait) -> None:
    """Raise OptionError for a lookup whose rows cannot wait."""
    if kind not in ("left", "inner"):
        raise OptionError(
            f"argument wait needs how='left' or how='inner', not {kind!r}: give one of these, or leave wait out"
        )
    if strategy == "broadcast":
        raise OptionError(
            "argument wait needs strategy='cache', because rows cannot wait in a broadcast join: change the strategy, or leave wait out"
        )
    if table.parsed.read.on_error is OnError.NULL:
        raise OptionError(
            "option lookup.on-error = 'NULL': with the argument wait, a failed lookup must fail its micro-batch: remove the option"
        )
    for key in table.parsed.version.pins:
        raise OptionError(
            f"option {key} names one version of the table, which never gets new rows, so a row that waits would never find a match: remove it, or the argument wait"
        )
    shows_changes = True
    if table.parsed.system is not None:
        # Asked of a worker: only there can the provider be imported for certain.
        shows_changes = load_view(table.spark, table.options, View.SUMMARY).collect()[0].shows_changes
    for options in table.parsed.kinds:
        options.check_waiting(shows_changes, waiting.retry_s)


def _explain(name: str, lookups: tuple[ChainedLookup, ...], apart: str, new: int = 1) -> None:
    """Keep what `explain_lookup` will say of a step of the plan. Log the strategy of the last `new` lookups."""
    for lookup in lookups[-new:]:
        _log.info("lookup join %s: %s (%s)", lookup.name, _strategy_name(lookup), lookup.why)
    explanations = tuple(map(_build_explanation, lookups))
    with _explained_lock:
        _explained[name] = explanations, apart
        _explained.move_to_end(name)
        if len(_explained) > _EXPLAINED_AT_MOST:
            _explained.popitem(last=False)


def _strategy_name(lookup: ChainedLookup) -> str:
    return "broadcast" if lookup.broadcast else "cache"


def _build_explanation(lookup: ChainedLookup) -> _Explanation:
    table = lookup.table
    pairs = ", ".join(f"{key.column} = {name}" for key, name in zip(lookup.keys, table.keys, strict=False))
    text = f"{lookup.name}\n  table: {table.url}\n  on: {pairs or 'no keys'} ({lookup.how})\n"
    if lookup.match is not None:
        text += f"  {lookup.match[0].value.replace('_', ' ')}: {lookup.keys[-1].column}, by {' and '.join(lookup.match[1])}\n"
    if lookup.names:
        text += f"  columns: {', '.join(lookup.names)}\n"
    if lookup.wait:
        text += f"  wait: {lookup.wait}; the pass ends here\n"
    default = "" if is_cache_set(table.options) else ", by default"
    text += f"  strategy: {_strategy_name(lookup)} ({lookup.why})\n  cache: lookup.cache = {table.parsed.cache.mode.value}{default}; "
    text += f"lookup.metadata.source = {table.parsed.version.source.value}"
    full = table.parsed.cache.mode is CacheMode.FULL and table.parsed.system is None
    return _Explanation(text, table.options if full else None)


def _get_chain(df: DataFrame) -> Chain:
    """The chain of lookups that ends in `df`, to which the next lookup is added; an empty chain if `df` does not end in one."""
    chain: Chain | None = vars(df).get(_CHAIN)
    if chain is None:
        return Chain(df, "its DataFrame is not what lookup_join returned")
    return Chain(df, "its DataFrame is persisted") if _is_persisted(df) else chain


def _get_broadcasts(df: DataFrame) -> _Broadcasts:
    """The broadcasts that `auto` has chosen for the last lookups of `df`. The next lookup may turn them into a pass."""
    broadcasts: _Broadcasts | None = vars(df).get(_BROADCASTS)
    return _Broadcasts(df) if broadcasts is None or _is_persisted(df) else broadcasts


def _is_persisted(df: DataFrame) -> bool:
    return not in_flow_function(df.sparkSession) and df.storageLevel != StorageLevel.NONE


def _explain_pass(df: DataFrame, rows: int) -> str | None:
    """The reason why a pass is better than broadcasts of tables with `rows` rows in total.

    None if broadcasts are better, or if Spark cannot estimate the number of rows of `df`.
    """
    # The DataFrame before the lookups: for looked-up columns, Spark cannot estimate a size, and so no number of rows.
    expected, enough = estimated_rows(_get_chain(df).base), _PASS_ROWS + rows // 2
    return (
        None if expected is None or expected >= enough else f"a batch of about {expected:,} rows, fewer than {enough:,}"
    )


def explain_lookup(df: DataFrame) -> str:
    """How each lookup in a DataFrame's plan is made, and why: its table, strategy and cache. Returns text of several lines, to `print`.

    If a table has a full cache, a Spark job asks one host whether it has disk space for it. Only the last 500 passes and broadcasts that this
    process has built can be explained.
    """
    pass_names = dict.fromkeys(re.findall(r"\blookup_\w+_[0-9a-f]{6}_[0-9a-f]{6}\b", plan_text(df)))
    with _explained_lock:
        explanations = [_explained[name] for name in pass_names if name in _explained]
    paragraphs = []
    for lookups, apart in explanations:
        texts = [lookup.text + _snapshot_line(df.sparkSession, lookup.full) for lookup in lookups]
        if len(texts) > 1:
            texts = [f"{len(texts)} lookups in one pass", *("  " + text.replace("\n", "\n  ") for text in texts)]
        if len(explanations) > 1:
            texts.append(f"  pass: its own ({apart})")
        paragraphs += texts
    return "\n".join(paragraphs) if paragraphs else "no lookup join in this DataFrame"


def _snapshot_line(spark: SparkSession, full: Mapping[str, str] | None) -> str:
    """A line that says why a host has no room for the full cache of a table; empty if it has room, or needs none. `full`: as in `_Explanation`."""
    if full is None or in_flow_function(spark):
        return ""
    try:
        reason = load_view(spark, full, View.SUMMARY).collect()[0].not_kept
    except Exception as problem:  # if the store or Spark fails, the query will fail, too, and its error says why
        reason = f"unknown, {type(problem).__name__}"
    return "" if reason is None else f"\n  snapshot: none, the table is read from its files ({reason})"


def _parse_join_keys(on: Any) -> list[tuple[str, str]]:
    """For each key, (column of the DataFrame, column of the table), from the argument `on`."""
    pairs: list[tuple[Any, Any]] = []
    if isinstance(on, str):
        pairs = [(on, on)]
    elif isinstance(on, Mapping):
        pairs = list(on.items())
    elif isinstance(on, Sequence):
        pairs = [(name, name) for name in on]
    if not pairs or not all(isinstance(name, str) for pair in pairs for name in pair):
        raise OptionError(
            f"argument on = {on!r}: give a column, a list of columns, or a dict {{column of df: column of table}}; compute "
            "an expression with df.withColumn first"
        )
    right = [name.lower() for _, name in pairs]
    if len(set(right)) != len(right):
        raise OptionError(f"argument on = {on!r}: a column of the table is given twice: give each once")
    return pairs


def _known_fields(df: DataFrame) -> list[StructField]:
    """The columns of the DataFrame; in the function of a flow in a pipeline, where Spark does not show them, those that lookups have added."""
    if in_flow_function(df.sparkSession):
        return [field for lookup in _get_chain(df).lookups for field in lookup.fields]
    return df.schema.fields


def _find_fields(fields: Sequence[StructField], name: str) -> list[tuple[StructField, ...]]:
    """The columns that a name may mean, each as its path through structs. `s.id` is the field `id` of `s`, unless there is a column `s.id`."""
    matches = [(field,) for field in fields if field.name.lower() == name.lower()]
    if matches:
        return list(matches)
    return [
        (field, *inner)
        for field in fields
        if isinstance(field.dataType, StructType) and name.lower().startswith(f"{field.name.lower()}.")
        for inner in _find_fields(field.dataType.fields, name[len(field.name) + 1 :])
    ]


def _field(df: DataFrame, name: str, argument: str, table_type: DataType) -> tuple[StructField, ...]:
    """The column of the DataFrame that an argument names, as its path through structs.

    If Spark does not show the schema, this is an `_Unknown` of the type `table_type`; tasks then check whether the column fits this type.
    """
    fields = _find_fields(_known_fields(df), name)
    if not fields:
        if in_flow_function(df.sparkSession):
            return tuple(_Unknown(part, table_type) for part in name.split("."))
        raise SchemaError(
            f"argument {argument}: the DataFrame has no column {name!r}; it has {names_shown(df.columns, name)}"
        )
    if len(fields) > 1:
        raise SchemaError(f"argument {argument}: the DataFrame has several columns {name!r}: rename one")
    return fields[0]


def _widen(path: tuple[StructField, ...], table_type: DataType) -> Key:
    """The `Key` for the DataFrame's column at `path`. It is cast to `table_type` if this type has all values of the column's type."""
    field, names = path[-1], tuple(field.name for field in path)
    if isinstance(field, _Unknown):
        return Key(names, table_type, cast=False, planned=False)
    df_arrow, table_arrow = arrow_type(field.dataType), arrow_type(table_type)
    wider = df_arrow != table_arrow and widens(df_arrow, table_arrow)
    return Key(names, table_type if wider else field.dataType, wider)


def _key(df: DataFrame, df_column: str, table: DimensionTable, table_column: str, argument: str = "on") -> Key:
    """The `Key` by which the DataFrame's column `df_column` is looked up in the table's `table_column`. Raises SchemaError if the two cannot be
    compared."""
    table_type = table.column_type(table_column)
    path = _field(df, df_column, argument, table_type)
    field = path[-1]
    if isinstance(field.dataType, CharType):
        raise SchemaError(
            f"key {df_column!r} is {field.dataType.simpleString()}, whose values are padded with blanks, and the table's are not: look "
            f"them up without the blanks, e.g. df.withColumn({df_column!r}, expr('CAST(rtrim({df_column}) AS STRING)'))"
        )
    if isinstance(field.dataType, VarcharType):  # text with a maximum length
        _check_key(df_column, StringType(), table_column, table_type)
        return Key(tuple(field.name for field in path), StringType(), cast=True)
    _check_key(df_column, field.dataType, table_column, table_type)
    return _widen(path, table_type)


def _match_value(df: DataFrame, match: MatchArgument, table: DimensionTable, columns: tuple[str, ...]) -> Key:
    """The `Key` for the DataFrame's column with the values to match. Raises SchemaError if they cannot be compared with the table's `columns`."""
    if match.kind is MatchKind.AS_OF:
        return _time(df, match.column, table, columns)
    if match.kind is not MatchKind.CIDR:
        return _key(df, match.column, table, columns[0], match.kind.value)
    path = _field(df, match.column, "cidr", table.column_type(columns[0]))
    if isinstance(path[-1].dataType, CharType | VarcharType | NullType):  # text, or nothing
        return _key(df, match.column, table, columns[0], "cidr")
    kind = arrow_type(path[-1].dataType)
    if not (pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_integer(kind)):
        raise SchemaError(
            f"argument cidr: {match.column!r} is {path[-1].dataType.simpleString()}; addresses must be text, binary of 4 or 16 bytes, or integers"
        )
    return Key(tuple(field.name for field in path), path[-1].dataType, False, not isinstance(path[-1], _Unknown))


def _time(df: DataFrame, as_of: str, table: DimensionTable, validity: tuple[str, ...]) -> Key:
    """The `Key` for the DataFrame's column `as_of`, cast to the type of the table's columns `validity`. Raises SchemaError if this may change its
    values."""
    table_type = table.column_type(validity[0])
    path = _field(df, as_of, "as_of", table_type)
    field = path[-1]
    df_arrow, table_arrow = arrow_type(field.dataType), arrow_type(table_type)
    ordered = (pa.types.is_temporal, pa.types.is_integer, pa.types.is_decimal)
    if not any(test(table_arrow) for test in ordered) or not widens(df_arrow, table_arrow):
        raise SchemaError(
            f"argument as_of: {as_of!r} is {field.dataType.simpleString()}, the table's {validity[0]!r} is "
            f"{table_type.simpleString()}, and both must be timestamps, dates or numbers, and have the same type: cast {as_of!r} with df.withColumn"
        )
    return _widen(path, table_type)


def _check_key(df_column: str, df_type: DataType, table_column: str, table_type: DataType) -> None:
    """Raise SchemaError unless keys of the type `df_type` can be looked up in a column of the type `table_type`."""
    if isinstance(df_type, StringType) and is_collated(df_type):
        raise SchemaError(
            f"key {df_column!r} is {df_type.simpleString()}, which compares by collation; the table compares bytes: "
            f"cast it, e.g. df.withColumn({df_column!r}, expr('CAST({df_column} AS STRING)'))"
        )
    try:
        fits = accepts(arrow_type(table_type), arrow_type(df_type))
    except Exception:  # a type that Arrow does not have
        fits = False
    if not fits:
        types = f"key {df_column!r} is {df_type.simpleString()}, the table's {table_column!r} is {table_type.simpleString()}"
        if isinstance(df_type, _NO_KEYS) or isinstance(table_type, _NO_KEYS):
            raise SchemaError(
                f"{types}: keys of this type are not supported: use numbers, text, binary, dates, timestamps or booleans"
            )
        raise SchemaError(
            f"{types}, and values of these types cannot be compared without loss: cast the DataFrame's column if the cast changes no value (2.7 as INT "
            "is 2, and would find the row of 2), or, in a table of files, declare the table's column with another type in lookup.schema"
        )


def _check_names(df: DataFrame, names: Sequence[str], table: DimensionTable) -> None:
    """Raise OptionError if two columns of the result would have the same name."""
    added = [*names, *([ERROR_COLUMN] if table.parsed.read.on_error is OnError.NULL else [])]
    used_names = {field.name.lower() for field in _known_fields(df)}
    for name in added:
        if name.lower() in used_names:
            if name == WAITED_COLUMN:
                raise OptionError(
                    f"column {name!r}, which argument wait adds, is also in the DataFrame: rename it there, or leave it out of columns=[…]"
                )
            raise OptionError(
                f"the table and the DataFrame both have a column {name!r}: give prefix='…', choose other columns with "
                "columns=[…], or rename one"
                if name in names
                else f"column {name!r}, which lookup.on-error = 'NULL' adds, is also in the DataFrame: rename it there"
            )
        used_names.add(name.lower())
    for name in used_names:
        if name == FOUND_COLUMN or name.startswith(VERSION_COLUMN):
            raise OptionError(f"column {name!r} has a name that lookup joins use: rename it")


def _explain_rounding(keys: Sequence[Key], table: DimensionTable) -> str | None:
    """How Spark's own join would compare a key: a text for messages, or None if it compares all keys without rounding them.

    Spark compares decimals in a type of 38 digits at most. If two types need more, it rounds their digits after the point.
    """
    for key, name in zip(keys, table.keys, strict=False):
        kinds = [arrow_type(key.type), arrow_type(table.column_type(name))]
        digits = [
            (k.precision - k.scale, k.scale) if pa.types.is_decimal(k) else (_INTEGER_DIGITS.get(k.bit_width, 0), 0)
            for k in kinds
            if pa.types.is_decimal(k) or pa.types.is_integer(k)
        ]
        if kinds[0] == kinds[1] or len(digits) < 2 or not any(map(pa.types.is_decimal, kinds)):
            continue
        if max(whole for whole, _ in digits) + max(scale for _, scale in digits) > 38:
            types = f"{key.type.simpleString()}, the table's {name!r} is {table.column_type(name).simpleString()}"
            return f"key {key.column!r} is {types}, and Spark would round decimals to compare them"
    return None


def _choose(
    df: DataFrame, table: DimensionTable, strategy: str, match: MatchArgument | None, keys: Sequence[Key]
) -> _Choice:
    """The strategy with which a table is joined to a DataFrame, and the reason for it."""
    rounded = _explain_rounding(keys, table)
    by_null = table.parsed.read.on_error is OnError.NULL
    if strategy == "broadcast":
        if match is not None:
            raise OptionError(
                f"argument {match.kind.value} needs strategy='cache': a broadcast join would return all rows of a key, not the one that matches"
            )
        if by_null:
            raise OptionError("option lookup.on-error = 'NULL' needs strategy='cache': a broadcast fails as a whole")
        if in_flow_function(df.sparkSession):
            raise OptionError(
                "argument strategy = 'broadcast': inside the function of a pipeline's flow, Spark does not analyze DataFrames; use "
                "'cache', or join spark.read.format('lookupcache').load(…) with Spark's own broadcast()"
            )
        if rounded is not None:
            raise OptionError(f"argument strategy = 'broadcast': {rounded}: use 'cache', which compares them exactly")
        return _Choice(True, table, "asked for")
    facts = None
    has_cache_option = is_cache_set(table.options)
    cached = table
    unknown = in_flow_function(df.sparkSession)
    if table.parsed.system is None and not (has_cache_option and (strategy == "cache" or unknown or df.isStreaming)):
        # If the table would get a full cache, ask with this option: a snapshot knows the number of rows, and whether keys repeat.
        viewed = with_cache(table, CacheMode.FULL) if defaults_to_full(table) else table
        facts = viewed.facts()
        cached = with_default_cache(table, facts.bytes)
    if strategy == "cache":
        return _Choice(False, cached, "asked for")
    if match is not None:
        return _Choice(
            False, cached, "one row of several by their time" if match.kind is MatchKind.AS_OF else "a match by range"
        )
    if unknown:
        return _Choice(False, cached, "a pipeline's flow: Spark does not reveal the DataFrame")
    if df.isStreaming:
        return _Choice(False, cached, "a stream: its cost should depend on the micro-batch")
    if facts is None:
        return _Choice(False, cached, "a provider's table")
    if by_null:
        return _Choice(False, cached, "lookup.on-error = NULL")
    if rounded is not None:
        return _Choice(False, cached, rounded)
    if table.parsed.cache.mode is CacheMode.PARTIAL:
        return _Choice(False, cached, "lookup.cache = PARTIAL: the table should not be read as a whole")
    if facts.bytes > table.parsed.read.split_size:
        return _Choice(False, cached, f"{facts.bytes:,} bytes of files are more than lookup.scan.split-size")
    if facts.rows is None:
        return _Choice(False, cached, "its number of rows is not known before they are read")
    row_limit, repeated = (
        (_BROADCAST_REPEATED_ROWS, "repeated ") if facts.unique_keys is False else (_BROADCAST_ROWS, "")
    )
    if facts.rows > row_limit:
        return _Choice(False, cached, f"{facts.rows:,} rows are more than {row_limit:,}")
    return _Choice(
        True, cached, f"a batch, and {facts.rows:,} {repeated}rows are no more than {row_limit:,}", facts.rows
    )
