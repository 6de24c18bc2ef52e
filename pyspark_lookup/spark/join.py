"""`lookup_join`: a DataFrame or a stream, enriched with rows of a lookup table by key.

The version comes from a relation of one row, which is broadcast: Spark resolves it once per execution and
micro-batch, and once for all lookups of a table in a plan. An Arrow UDF gets it beside the keys and returns
lists of rows, which `inline_outer` makes rows again (plain `inline` would evaluate the UDF twice).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import logging
import operator
import re
import threading
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    MapType,
    StringType,
    StructField,
    StructType,
    VariantType,
)
from pyspark.util import PythonEvalType

from pyspark_lookup.base.errors import OptionError, SchemaError
from pyspark_lookup.columnar.keys import comparable
from pyspark_lookup.columnar.types import resolve_names, widens
from pyspark_lookup.engine.lookup_join import ERROR_COLUMN, FOUND_COLUMN, LookupSpec
from pyspark_lookup.io.disk import key_of
from pyspark_lookup.options.enums import CacheMode, OnError, View
from pyspark_lookup.spark.reading import Probe, Resolve
from pyspark_lookup.spark.table_argument import (
    LookedUp,
    TableArgument,
    cache_given,
    defaults_to_full,
    look_up,
    quote,
    with_cache,
    with_default_cache,
)
from pyspark_lookup.spark.types import arrow_type

_log = logging.getLogger("pyspark_lookup.join")
How = Literal["left", "leftouter", "left_outer", "inner"]
Strategy = Literal["auto", "cache", "broadcast"]
_NO_KEYS = (ArrayType, MapType, StructType, VariantType)
_HOW = {"left": "left", "leftouter": "left", "left_outer": "left", "inner": "inner"}
_VERSION_COLUMN = "_lookup_version"
# Up to so many rows Spark's own broadcast join is the faster one of a batch query (benchmarks/bench_join.py), and up
# to more where keys are known to repeat: lookups hand their rows over in lists.
_BROADCAST_ROWS = 2_000_000
_BROADCAST_REPEATED_ROWS = 3_000_000
_explained: dict[str, tuple[str, LookedUp]] = {}
_explained_lock = threading.Lock()
_versions_lock = threading.Lock()


def lookup_join(
    df: DataFrame,
    table: TableArgument,
    on: str | Sequence[str] | Mapping[str, str],
    how: How = "left",
    columns: Sequence[str] | None = None,
    prefix: str | None = None,
    strategy: Strategy = "auto",
    as_of: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> DataFrame:
    """`df` with the columns of the table's rows that have the same key: a left or inner join, always current.

    Works on batch DataFrames and streams, in Spark Classic and Connect. Each execution and each micro-batch answers
    from one version of the table, the newest at its start (design: Alluxio's get_meta once per query).

    `table`: a path (has a `/`), a catalog table's name, or a `LookupTable`; None with `lookup.provider`. `on`: a column, a list
    of columns equal on both sides, or a dict `{column of df: column of table}`. `how`: `left` or `inner`. `columns`: of the
    table, in that order (default: all but its keys). `prefix`: put before their names. A key with several rows gives as
    many; one with a null gives none.

    `strategy`: `cache` looks keys up in this package's caches; `broadcast` reads the table through them and has Spark
    broadcast it; `auto` chooses, and `explain_lookup` says why. `as_of`: a column of `df` with the time at which the row is to
    be valid, by the table's columns `lookup.valid-from` and `lookup.valid-to` (see `asof`): one row at most. `options`: the mapping that `spark.read` takes, as {"lookup.cache": "FULL"};
    without `lookup.cache` a table of files of up to `lookup.scan.split-size` has FULL.

    Raises OptionError for arguments, SchemaError for columns and types that do not fit (both when called), and at
    execution what a lookup raises (see `lookup.on-error`).
    """
    pairs = _pairs(on)
    kind = _HOW.get(str(how).lower().strip())
    if kind is None:
        raise OptionError(f"argument how = {how!r}: a lookup join is 'left' or 'inner'")
    if strategy not in ("auto", "cache", "broadcast"):
        raise OptionError(f"argument strategy = {strategy!r}: 'auto', 'cache' or 'broadcast'")
    found = look_up(df.sparkSession, table, [right for _, right in pairs], columns, options or {}, as_of is not None)
    keys = [_key(df, left, found, right) for (left, _), right in zip(pairs, found.keys, strict=True)]
    validity = None if as_of is None else _validity(found)
    if as_of is not None and validity is not None:
        keys.append(_time(df, as_of, found, validity))
    names = [(prefix or "") + field.name for field in found.chosen]
    _check_names(df, names, found)
    chosen, found, why = _strategy(df, found, strategy, as_of is not None)
    join = _Join(found, keys, names, kind, validity)
    name = f"lookup_{found.label}_{key_of(*names, kind, chosen, as_of, *(left for left, _ in pairs))[:6]}"
    explained = f"{name}\n  table: {found.url}\n  on: {', '.join(f'{a} = {b}' for a, b in pairs)} ({kind})\n"
    explained += "" if validity is None else f"  as of: {as_of}, by {' and '.join(filter(None, validity))}\n"
    explained += f"  strategy: {chosen} ({why})\n  cache: lookup.cache = {found.parsed.cache.value}{'' if cache_given(found.options) else ', by default'}; "
    explained += f"lookup.metadata.source = {found.parsed.metadata_source.value}"
    with _explained_lock:
        _explained[name] = explained, found
    _log.info("lookup join %s: %s (%s)", name, chosen, why)
    return join.broadcast(df, name) if chosen == "broadcast" else join.join_cached(df, name)


def explain_lookup(df: DataFrame) -> str:
    """How each lookup in a DataFrame's plan is carried out, and why: its table, strategy and cache. Also prints it.

    Where a full cache is wanted one host is asked, by a job, whether it has room for a snapshot. Of lookups that this process
    has joined; there is none in what was built elsewhere.
    """
    with contextlib.redirect_stdout(io.StringIO()) as plan:
        df.explain(extended=True)
    named = dict.fromkeys(re.findall(r"\blookup_\w+_[0-9a-f]{6}_[0-9a-f]{6}\b", plan.getvalue()))
    with _explained_lock:
        known = [_explained[name] for name in named if name in _explained]
    told = [explained + _not_kept(table) for explained, table in known]
    text = "\n".join(told) if told else "no lookup join in this DataFrame"
    print(text)  # noqa: T201 - as DataFrame.explain does
    return text


def _not_kept(table: LookedUp) -> str:
    """A line that says why a host keeps no snapshot of the table; nothing if it has one, or would."""
    if table.parsed.cache is not CacheMode.FULL or table.parsed.provider is not None:
        return ""
    try:
        reason = table.view(View.SUMMARY).collect()[0].not_kept
    except Exception as problem:  # the store or Spark fails: then so will the query, and say why
        reason = f"unknown, {type(problem).__name__}"
    return "" if reason is None else f"\n  snapshot: none, the table is read from its files ({reason})"


def _pairs(on: Any) -> list[tuple[str, str]]:
    """(column of the DataFrame, column of the table) for each key."""
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
            "an expression with df.withColumn before"
        )
    right = [name.casefold() for _, name in pairs]
    if len(set(right)) != len(right):
        raise OptionError(f"argument on = {on!r}: a column of the table is given twice")
    return pairs


def _field(df: DataFrame, name: str, argument: str) -> StructField:
    """The column of the DataFrame that an argument names."""
    fields = [field for field in df.schema.fields if field.name.casefold() == name.casefold()]
    if not fields:
        raise SchemaError(f"argument {argument}: the DataFrame has no column {name!r}; it has {', '.join(df.columns)}")
    if len(fields) > 1:
        raise SchemaError(f"argument {argument}: the DataFrame has several columns {name!r}: rename one")
    return fields[0]


def _widen(field: StructField, theirs: DataType) -> Column:
    """A column of the DataFrame in a type of the table that has all its values, if it is one."""
    column = sf.col(quote(field.name))
    mine, other = arrow_type(field.dataType), arrow_type(theirs)
    return column.cast(theirs) if mine != other and widens(mine, other) else column


def _key(df: DataFrame, left: str, table: LookedUp, right: str) -> Column:
    """The key column of the DataFrame, in a type that the table's keys can be compared with."""
    field, theirs = _field(df, left, "on"), table.type_of(right)
    _check_key(left, field.dataType, right, theirs)
    return _widen(field, theirs)


def _validity(table: LookedUp) -> tuple[str, str | None]:
    """The table's columns that say when a row is valid."""
    start, end = table.parsed.valid_from, table.parsed.valid_to
    if start is None:
        raise OptionError(
            "argument as_of needs the table's columns that say when a row is valid: "
            "options={'lookup.valid-from': 'valid_from', 'lookup.valid-to': 'valid_to'}"
        )
    (own,) = resolve_names((start,), table.schema, "lookup.valid-from")
    other = None if end is None else resolve_names((end,), table.schema, "lookup.valid-to")[0]
    if other is not None and table.type_of(own) != table.type_of(other):
        raise SchemaError(
            f"options lookup.valid-from and lookup.valid-to: {own!r} is {table.type_of(own).simpleString()}, {other!r} is "
            f"{table.type_of(other).simpleString()}; both must be of one type"
        )
    return own, other


def _time(df: DataFrame, as_of: str, table: LookedUp, validity: tuple[str, str | None]) -> Column:
    """The column of the DataFrame with the time, in the type of the table's."""
    field, theirs = _field(df, as_of, "as_of"), table.type_of(validity[0])
    mine, other = arrow_type(field.dataType), arrow_type(theirs)
    ordered = (pa.types.is_temporal, pa.types.is_integer, pa.types.is_decimal)
    if not any(test(other) for test in ordered) or not widens(mine, other):
        raise SchemaError(
            f"argument as_of: {as_of!r} is {field.dataType.simpleString()}, the table's {validity[0]!r} is "
            f"{theirs.simpleString()}: give a time, date or number of one type, cast with df.withColumn"
        )
    return _widen(field, theirs)


def _check_key(left: str, own: DataType, right: str, theirs: DataType) -> None:
    """Raise SchemaError unless keys of the type `own` can be looked up among those of type `theirs`."""
    if isinstance(own, StringType) and own.collation not in (None, "UTF8_BINARY"):
        raise SchemaError(
            f"key {left!r} is {own.simpleString()}, whose texts are equal by rules of that collation; the table compares bytes: "
            f"cast it, e.g. df.withColumn({left!r}, expr('CAST({left} AS STRING)'))"
        )
    try:
        mine, other = arrow_type(own), arrow_type(theirs)
        fits = (widens(mine, other) and not pa.types.is_nested(other)) or comparable(mine, other)
    except Exception:  # a type that Arrow does not have
        fits = False
    if not fits:
        types = f"key {left!r} is {own.simpleString()}, the table's {right!r} is {theirs.simpleString()}"
        if isinstance(own, _NO_KEYS) or isinstance(theirs, _NO_KEYS):
            raise SchemaError(
                f"{types}: keys of this type are not supported. Keys are numbers, text, binary, dates, times and booleans"
            )
        raise SchemaError(
            f"{types}: they cannot be compared as they are. A cast changes values that are none of the other type (2.7 becomes 2, and "
            "finds its rows): cast the DataFrame's column only if there are none, or read the table's in a type that has both, by "
            "lookup.schema"
        )


def _check_names(df: DataFrame, names: Sequence[str], table: LookedUp) -> None:
    """Raise OptionError if a column of the result would have the name of another."""
    added = [*names, *([ERROR_COLUMN] if table.parsed.on_error is OnError.NULL else [])]
    taken = {name.casefold() for name in df.columns}
    for name in added:
        if name.casefold() in taken:
            raise OptionError(
                f"column {name!r} of the table is also one of the DataFrame: give prefix='…', choose others by "
                "columns=[…], or rename one"
                if name in names
                else f"column {name!r}, which lookup.on-error = 'NULL' adds, is also one of the DataFrame: rename it"
            )
        taken.add(name.casefold())
    for name in (FOUND_COLUMN, _VERSION_COLUMN):
        if name in taken:
            raise OptionError(f"column {name!r}: that name is used by lookup joins; rename it")


def _strategy(df: DataFrame, table: LookedUp, wanted: str, as_of: bool) -> tuple[str, LookedUp, str]:
    """(strategy, the table with the cache it needs, why)."""
    by_null = table.parsed.on_error is OnError.NULL
    if wanted == "broadcast":
        if as_of:
            raise OptionError("argument as_of needs strategy='cache': a broadcast would give every row that is valid")
        if by_null:
            raise OptionError("option lookup.on-error = 'NULL' needs strategy='cache': a broadcast fails as a whole")
        return "broadcast", table, "asked for"
    facts = None
    given = cache_given(table.options)
    cached = table
    if table.parsed.provider is None and not (given and (wanted == "cache" or df.isStreaming)):
        # A snapshot that is there knows more.
        viewed = with_cache(table, CacheMode.FULL) if defaults_to_full(table) else table
        facts = viewed.view(View.SUMMARY).collect()[0]
        cached = with_default_cache(table, facts.bytes)
    if wanted == "cache":
        return "cache", cached, "asked for"
    if as_of:
        return "cache", cached, "one row of several by their time"
    if df.isStreaming:
        return "cache", cached, "a stream: its cost is to follow the micro-batch"
    if facts is None:
        return "cache", cached, "a provider's table"
    if by_null:
        return "cache", cached, "lookup.on-error = NULL"
    if table.parsed.cache is CacheMode.PARTIAL:
        return "cache", cached, "lookup.cache = PARTIAL: a table not to be read whole"
    if facts.bytes > table.parsed.split_size:
        return "cache", cached, f"{facts.bytes:,} bytes of files are more than lookup.scan.split-size"
    if facts.rows is None:
        return "cache", cached, "how many rows it has is not known before they are read"
    bound, keys = (_BROADCAST_REPEATED_ROWS, "repeated ") if facts.unique_keys is False else (_BROADCAST_ROWS, "")
    if facts.rows > bound:
        return "cache", cached, f"{facts.rows:,} rows are more than {bound:,}"
    return "broadcast", table, f"a batch, and {facts.rows:,} {keys}rows are no more than {bound:,}"


def row_type(fields: Iterable[StructField], names: Sequence[str], by_null: bool, marked: bool = False) -> StructType:
    """The struct that a lookup's UDF returns for a row."""
    row = [StructField(name, field.dataType) for name, field in zip(names, fields, strict=True)]
    if by_null:
        row.append(StructField(ERROR_COLUMN, StringType()))
    if marked:
        row.append(StructField(FOUND_COLUMN, BooleanType()))
    return StructType(row)


def lookup_udf(
    name: str,
    table: LookedUp,
    names: Sequence[str],
    many: bool,
    marked: bool = False,
    validity: tuple[str, str | None] | None = None,
) -> Any:
    """The UDF (keys…, version) -> the key's rows, as a list of structs, or its row; with `validity` (keys…, time, version)."""
    shown = [field.name for field in table.chosen]
    needed = [column for column in validity or () if column is not None and column not in shown]
    columns = table.arrow([*shown, *needed])
    spec = LookupSpec(table.options, table.keys, columns, tuple(names), many, marked, validity)
    row = row_type(table.chosen, names, table.parsed.on_error is OnError.NULL, marked)
    kind: Any = ArrayType(row) if many else row
    with warnings.catch_warnings():  # type hints cannot say how many arguments there are
        warnings.filterwarnings("ignore", "It is preferred to specify type hints", UserWarning)
        return arrow_udf(
            Probe(name, spec.to_text(), _built_at_s(table.spark)), kind, PythonEvalType.SQL_SCALAR_ARROW_ITER_UDF
        )


def _version_of(table: LookedUp, observed: bool) -> DataFrame:
    """One row: the version of a table that the execution reads; its digest in the query's progress if `observed`.

    The same DataFrame for the same options: Spark refuses two observations of one name unless they are one. They are kept with
    the session, and go with it: PySpark makes one for each micro-batch of `foreachBatch`.
    """
    options, built_at_s = json.dumps(dict(table.options), sort_keys=True), _built_at_s(table.spark)
    place = options, observed, built_at_s
    with _versions_lock:
        known: dict[tuple[str, bool, float | None], DataFrame] = vars(table.spark).setdefault("_lookup_versions", {})
        if place not in known:
            # The range makes it a relation of Spark's own, whose exchange Spark uses again in the same plan.
            resolve = Resolve(f"version_of_{table.label}", options, built_at_s)
            version = table.spark.range(0, 1, 1, 1).mapInArrow(resolve, f"{_VERSION_COLUMN} binary")
            if observed:
                digest = sf.lower(sf.hex(sf.substring(_VERSION_COLUMN, 2, 16)))
                url = sf.max(sf.lit(table.url)).alias("table")
                version = version.observe(f"lookup_{table.label}", sf.max(digest).alias("version"), url)
            known[place] = version
        return known[place]


def _built_at_s(spark: SparkSession) -> float | None:
    """The time, in a `foreachBatch` function of Spark Classic: what is built there reads back what it has written before.

    Over Connect the actions of such a function are executions of their own.
    """
    try:
        inside = bool(spark.sparkContext.getLocalProperty("streaming.sql.batchId"))
    except (AttributeError, NotImplementedError, PySparkException):
        inside = False
    return time.time() if inside else None


@dataclasses.dataclass(frozen=True)
class _Join:
    table: LookedUp
    keys: Sequence[Column]
    names: Sequence[str]
    how: str
    validity: tuple[str, str | None] | None = None

    def join_cached(self, df: DataFrame, name: str) -> DataFrame:
        marked = self.how == "inner" or not self.names
        probe = lookup_udf(name, self.table, self.names, many=True, marked=marked, validity=self.validity)
        # Without the hint Spark, which takes the relation for huge, would broadcast the DataFrame.
        explained = df.crossJoin(sf.broadcast(_version_of(self.table, df.isStreaming)))
        rows = explained.select("*", sf.inline_outer(probe(*self.keys, sf.col(_VERSION_COLUMN))))
        if self.how == "inner":
            kept = sf.col(FOUND_COLUMN)
            if self.table.parsed.on_error is OnError.NULL:
                kept = kept | sf.col(ERROR_COLUMN).isNotNull()
            rows = rows.filter(kept)
        return rows.drop(_VERSION_COLUMN, FOUND_COLUMN) if marked else rows.drop(_VERSION_COLUMN)

    def broadcast(self, df: DataFrame, name: str) -> DataFrame:
        """The join by Spark's broadcast of the table, read through the cache."""
        table = self.table
        if df.isStreaming and "lookup.version-at" not in table.options:
            # A table of several tasks would stay as it was when the stream began.
            table = dataclasses.replace(table, options={**table.options, "lookup.version-at": "READ"})
        taken = {name.casefold() for name in (*df.columns, *self.names)}
        free = (key for number in itertools.count() if (key := f"_lookup_key_{number}") not in taken)
        own = list(itertools.islice(free, len(self.keys)))
        wanted = [field.name for field in table.chosen]
        read = table.read(list(dict.fromkeys([*table.keys, *wanted])))
        renamed = [*zip(table.keys, own, strict=True), *zip(wanted, self.names, strict=True)]
        shown = [sf.col(quote(column)).alias(alias) for column, alias in renamed]
        side = sf.broadcast(read.select(*shown).alias(name))
        pairs = [key == sf.col(alias) for key, alias in zip(self.keys, own, strict=True)]
        return df.join(side, functools.reduce(operator.and_, pairs), self.how).drop(*own)
