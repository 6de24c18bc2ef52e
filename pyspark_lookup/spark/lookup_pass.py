"""`Chain`: consecutive lookups on a DataFrame, which are a single step of the plan, called a pass.

The tokens of the versions to read come from a relation of one row, which is broadcast: Spark computes it once for each execution or micro-batch.
A UDF gets the keys of all lookups and the tokens, and returns a list of results for each row. `inline_outer` turns the lists into rows (plain
`inline` would evaluate the UDF twice).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import operator
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import (
    BooleanType,
    DataType,
    StringType,
    StructField,
)

from pyspark_lookup.core.forks import ForkSafeLock
from pyspark_lookup.lookup.lookup_join import ERROR_COLUMN, FOUND_COLUMN, LookupSpec, PassSpec, Place, Stage
from pyspark_lookup.lookup.range_match import MatchKind
from pyspark_lookup.options.enums import OnError
from pyspark_lookup.spark.load import resolve_versions, token_columns
from pyspark_lookup.spark.lookup_udf import LookupUdf
from pyspark_lookup.spark.pipelines import in_flow_function
from pyspark_lookup.spark.table_argument import DimensionTable, quote
from pyspark_lookup.spark.types import arrow_type
from pyspark_lookup.storage.disk import key_of
from pyspark_lookup.versions.executions import Build

VERSION_COLUMN = "_lookup_version"
"""The prefix of the names of columns with version tokens."""

_versions_lock = ForkSafeLock()
_RELATIONS_AT_MOST = 64  # how many relations of versions a session keeps
# The first line of the optimized plan, in the form of `explain(mode="cost")`.
_STATISTICS = re.compile(r"Statistics\(sizeInBytes=([0-9.E+]+) ([KMGTPE]?i?)B(?:, rowCount=([0-9.E+]+))?")
_UNITS = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_HUGE_BYTES = 2**50
_WIDTHS = {"string": 20, "binary": 100, "byte": 1, "boolean": 1, "short": 2, "integer": 4, "float": 4, "date": 4}


@dataclasses.dataclass(frozen=True)
class Key:
    """A key column of a DataFrame, and the type in which tasks get it.

    `path`: the column's name; for a field of a struct, the names that lead to it. `cast`: whether the plan casts the column to `type`.
    `planned`: False if Spark does not show the column's type before it runs the query. Then `type` is the type of the table's column, the plan
    passes the key on unchanged, and tasks check whether it fits.
    """

    path: tuple[str, ...]
    type: DataType
    cast: bool
    planned: bool = True

    @property
    def column(self) -> str:
        """The column's name in messages and plans, e.g. `s.id`."""
        return ".".join(self.path)

    @property
    def sql(self) -> str:
        """The key as an SQL expression."""
        # Fields of structs are written as subscripts: in `a.b`, `a` could also be the alias of a table.
        column = quote(self.path[0]) + "".join(f"[{_literal(name)}]" for name in self.path[1:])
        if not self.planned:
            return _compared_by_bytes(self.column, column)
        return f"CAST({column} AS {self.type.simpleString()})" if self.cast else column


@dataclasses.dataclass(frozen=True)
class ChainedLookup:
    """One lookup on a DataFrame.

    `keys`: the DataFrame's columns with the keys, in the order of the table's keys; with `match`, the last of them has the value to match.
    `names`: the names of the columns that the lookup adds. `build`: the micro-batch in whose `foreachBatch` function the lookup was built, if any.
    `broadcast`: whether it is a broadcast join, and not part of a pass. `why`: the reason for this.
    """

    table: DimensionTable
    keys: tuple[Key, ...]
    names: tuple[str, ...]
    how: str
    match: tuple[MatchKind, tuple[str, ...]] | None
    build: Build | None
    broadcast: bool = False
    why: str = ""
    wait: str = ""
    """How long facts wait for their row; empty: they do not."""

    @property
    def name(self) -> str:
        """The name of the lookup in plans. Lookups that `explain_lookup` describes differently have different names."""
        pairs = [(key.column, name) for key, name in itertools.zip_longest(self.keys, self.table.keys)]
        returned_names = [field.name for field in self.table.returned_fields]
        mark = key_of(pairs, returned_names, self.names, self.how, self.match, self.broadcast, self.why, self.wait)
        return f"lookup_{self.table.label}_{mark[:6]}"

    @property
    def version(self) -> str:
        """A name for the version that the lookup reads. Lookups that must read the same version have the same name here."""
        return f"{key_of(self.options_text, self.build and dataclasses.astuple(self.build))[:16]}"

    @property
    def adds_error(self) -> bool:
        """Whether a failed lookup puts its error into a column of the row, instead of failing the query."""
        return self.table.parsed.read.on_error is OnError.NULL

    @property
    def options_text(self) -> str:
        return json.dumps(dict(self.table.options), sort_keys=True)

    @property
    def fields(self) -> list[StructField]:
        """The columns that the lookup adds."""
        fields = [
            StructField(name, field.dataType)
            for name, field in zip(self.names, self.table.returned_fields, strict=True)
        ]
        return [*fields, StructField(ERROR_COLUMN, StringType())] if self.adds_error else fields

    @property
    def spec(self) -> LookupSpec:
        table = self.table
        returned_names = [field.name for field in table.returned_fields]
        match_names = [column for column in (self.match[1] if self.match else ()) if column not in returned_names]
        keys = pa.schema([(name, arrow_type(key.type)) for name, key in zip(table.keys, self.keys, strict=False)])
        return LookupSpec(table.options, keys, table.arrow([*returned_names, *match_names]), self.names, self.match)


@dataclasses.dataclass(frozen=True)
class Chain:
    """Consecutive lookups on the DataFrame `base`. `apart`: why lookups before `base` are not in the same pass."""

    base: DataFrame
    apart: str
    lookups: tuple[ChainedLookup, ...] = ()

    def to_dataframe(self) -> DataFrame:
        """The DataFrame `base` with the columns of all lookups, which are made in one pass."""
        relations = relate_versions(self.base, {lookup.version: lookup for lookup in self.lookups})
        tokens = {version: columns for relation in relations for version, columns in relation.tokens.items()}
        # The UDF gets all columns of each relation: Spark reuses a relation's broadcast only for passes that read the same columns of it.
        versions = [column for relation in relations for column in relation.columns]
        arguments: dict[tuple[tuple[str, ...], str], Key] = {}
        stages = []
        for number, lookup in enumerate(self.lookups):
            places = tuple(self._place(key, number, arguments) for key in lookup.keys)
            version = tuple(map(versions.index, tokens[lookup.version]))
            stages.append(Stage(lookup.spec, places, version, lookup.how, lookup.build))
        fields = [field for lookup in self.lookups for field in lookup.fields]
        spec = PassSpec(tuple(stages), many=True)
        if spec.drops or not fields:
            fields.append(StructField(FOUND_COLUMN, BooleanType()))
        udf = LookupUdf(self.name, spec, fields, [key.type for key in arguments.values()], len(versions))
        rows = self.base
        for relation in relations:
            # With the hint, Spark broadcasts the row even if spark.sql.autoBroadcastJoinThreshold is -1.
            rows = rows.crossJoin(sf.broadcast(relation.versions))
        keys = map(sf.expr, udf.arguments([key.sql for key in arguments.values()]))
        rows = rows.select("*", sf.inline_outer(udf.function(*keys, *map(sf.col, versions))))
        if spec.drops:
            rows = rows.filter(sf.col(FOUND_COLUMN))
        if in_flow_function(self.base.sparkSession):
            # The columns of `base` are not known here. This condition is true for each row, but Spark refuses a name in it that two columns
            # of the result have.
            nulls = [sf.col(quote(field.name)).isNull() for lookup in self.lookups for field in lookup.fields]
            rows = rows.filter(functools.reduce(operator.or_, nulls, sf.lit(True)))
        hidden = versions + [field.name for field in fields if field.name == FOUND_COLUMN]
        if in_flow_function(self.base.sparkSession):
            # `drop` is not possible: a Connect server analyses its input at once, and the datasets of a pipeline may not exist yet.
            return rows.selectExpr(f"* EXCEPT ({', '.join(map(quote, hidden))})")
        return rows.drop(*hidden)

    @property
    def name(self) -> str:
        """The name of the pass in plans."""
        names = [lookup.name for lookup in self.lookups]
        marks = f"{key_of(*names)[:6]}_{key_of(self.apart, *reversed(names))[:6]}"
        if len(names) == 1:
            return f"lookup_{self.lookups[0].table.place}_{marks}"
        return f"lookup_{len(names)}_{'_'.join(lookup.table.place for lookup in self.lookups)[:60]}_{marks}"

    def _place(self, key: Key, number: int, arguments: dict[tuple[tuple[str, ...], str], Key]) -> Place:
        """Where a lookup's key comes from: a column of an earlier lookup, or an argument of the UDF, which is added to `arguments` if need be."""
        folded = tuple(name.lower() for name in key.path)
        for earlier, lookup in enumerate(self.lookups[:number]):
            for column, field in enumerate(lookup.fields):
                if (field.name.lower(),) == folded:
                    return earlier, column
        argument = folded, key.type.json()
        arguments.setdefault(argument, key)
        return list(arguments).index(argument)


def _compared_by_bytes(name: str, key: str) -> str:
    """The SQL of a key whose type only Spark's planner will know. It raises an error for a text with a collation or of the type CHAR.

    Tasks could not do this, because they do not see these types. `name`: the key's name in the error.
    """
    kind = f"typeof({key})"  # the optimizer replaces this, and all that is computed from it, by a constant
    reason = (
        ": Spark compares its values by rules of that type, but the table compares bytes; before the lookup, cast it to STRING (a CHAR: "
        "CAST(rtrim(…) AS STRING))"
    )
    message = f"concat({_literal(f'key {name!r} is ')}, {kind}, {_literal(reason)})"
    return f"CASE WHEN {kind} RLIKE '^char[(]|collate' THEN raise_error({message}) ELSE {key} END"


def _literal(text: str) -> str:
    """The SQL literal of a text."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def relate_versions(df: DataFrame, tables: Mapping[str, ChainedLookup]) -> list[_Relation]:
    """Relations that together have the version tokens of all `tables`: each has one row, with the tokens of some tables.

    If an earlier lookup in `df` reads a table, its token comes from the relation of that lookup, so that the whole query reads one version of the
    table. The same tables always get the same DataFrame: Spark reuses the broadcast of an identical relation, and refuses two different
    observations of the same name. The latest relations are kept in the session object: PySpark makes a new one for each micro-batch of
    `foreachBatch`.
    """
    spark = df.sparkSession
    observed = not in_flow_function(spark) and df.isStreaming
    missing = dict(tables)
    build = max(
        (lookup.build for lookup in tables.values() if lookup.build), key=lambda build: build.at_s, default=None
    )
    with _versions_lock:
        relations: collections.OrderedDict[tuple[tuple[str, ...], bool], _Relation]
        relations = vars(spark).setdefault("_lookup_versions", collections.OrderedDict())
        shared = {key: relation for key, relation in relations.items() if key[1] == observed and {*key[0]} & {*missing}}
        shared.pop((tuple(missing), observed), None)
        covering = []
        if shared:
            plan = plan_text(df)
            for (versions, _), relation in shared.items():
                if {*versions} & {*missing} and relation.name in plan:
                    relations.move_to_end((versions, observed))
                    covering.append(relation)
                    missing = {version: table for version, table in missing.items() if version not in versions}
        if missing:
            place = tuple(missing), observed
            if place not in relations:
                _forget(relations, build)
                relations[place] = _resolve_versions(spark, missing, observed, build)
            relations.move_to_end(place)
            covering.append(relations[place])
        return covering


class _Relation(NamedTuple):
    """A relation of one row with the version tokens of some tables. `name`: its name in plans. `versions`: its DataFrame.

    `tokens`: for each version (`ChainedLookup.version`), the names of the columns with its token. `build`: the micro-batch in whose `foreachBatch`
    function the relation was made, if any.
    """

    name: str
    versions: DataFrame
    tokens: Mapping[str, tuple[str, ...]]
    build: Build | None

    @property
    def columns(self) -> list[str]:
        return [column for columns in self.tokens.values() for column in columns]


def _forget(relations: collections.OrderedDict[Any, _Relation], build: Build | None) -> None:
    """Make room for one more relation: drop those of earlier micro-batches of the same stream, and the oldest ones if there are too many."""
    for place, relation in list(relations.items()):
        if build and relation.build and relation.build.stream == build.stream and relation.build.batch != build.batch:
            del relations[place]
    while len(relations) >= _RELATIONS_AT_MOST:
        relations.popitem(last=False)


def _resolve_versions(
    spark: SparkSession, tables: Mapping[str, ChainedLookup], observed: bool, build: Build | None
) -> _Relation:
    """A new relation of one row with the version tokens of `tables`. `observed`: let the progress of the streaming query show the versions."""
    first = next(iter(tables.values())).table
    mark = key_of(*tables)[:6]
    name = f"version_of_{first.label}" if len(tables) == 1 else f"version_of_{len(tables)}_tables_{mark}"
    # Relations of different tables may be in one plan, so the names of their columns differ.
    prefixes = {version: f"{VERSION_COLUMN}_{key_of(*tables)[:12]}_{n}" for n, version in enumerate(tables)}
    requests = {prefixes[version]: (lookup.options_text, lookup.build) for version, lookup in tables.items()}
    versions = resolve_versions(spark, name, requests)
    if observed:
        for name_of_version, lookup in tables.items():
            digest_column, place_column, error_column = token_columns(prefixes[name_of_version])
            # See `VersionToken.to_numbers`.
            digest = sf.lower(sf.lpad(sf.hex(sf.shiftrightunsigned(digest_column, 4)), 15, "0"))
            digest = sf.when(sf.col(error_column).isNull(), digest)
            number = -1 - sf.col(place_column)
            # With `mark`, because a query may have two passes with this table, each with different other tables.
            observation = f"lookup_{lookup.table.label}" if len(tables) == 1 else f"lookup_{lookup.table.label}_{mark}"
            url = sf.max(sf.lit(lookup.table.url)).alias("table")
            # Null for plain files, which have no version numbers.
            version = sf.max(sf.when(number >= 0, number)).alias("version")
            versions = versions.observe(observation, sf.max(digest).alias("digest"), url, version)
    tokens = {
        version: token_columns(prefixes[version])[: 3 if lookup.adds_error else 2] for version, lookup in tables.items()
    }
    relation = _Relation(name, versions, tokens, build)
    return relation._replace(versions=versions.select(*relation.columns))


def plan_text(df: DataFrame, mode: str = "extended") -> str:
    """The text of a DataFrame's plans. (`DataFrame.explain` would print it, among the output of other threads.)

    In the function of a flow in a pipeline, this is the text of the plan that the client will send to Spark.
    """
    frame: Any = df
    if in_flow_function(df.sparkSession):
        return str(frame._plan.to_proto(frame.sparkSession.client))
    session: Any = frame.sparkSession
    if isinstance(session, SparkSession):
        jvm: Any = session._jvm
        return str(jvm.PythonSQLUtils.explainString(frame._jdf.queryExecution(), mode))
    return str(frame._explain_string(extended=mode))


def estimated_rows(df: DataFrame) -> int | None:
    """About how many rows Spark expects of a DataFrame; None if it does not know."""
    statistics = _STATISTICS.search(plan_text(df, "cost"))
    if statistics is None:
        return None
    size, unit, rows = statistics.groups()
    if rows is not None:
        return int(float(rows))
    expected = float(size) * 1024 ** _UNITS.index(unit)
    width = 8 + sum(_WIDTHS.get(field.dataType.typeName(), 8) for field in df.schema)
    # For a relation of unknown size, Spark assumes a huge size.
    return None if expected > _HUGE_BYTES else int(expected / width)


def broadcast_join(df: DataFrame, lookup: ChainedLookup) -> DataFrame:
    """`df`, joined by Spark itself with a broadcast of the lookup's table, which Spark reads through this package's cache."""
    table = lookup.table
    if df.isStreaming and "lookup.version-at" not in table.options:
        # A table with several tasks would stay as it was when the stream began.
        table = dataclasses.replace(table, options={**table.options, "lookup.version-at": "READ"})
    used_names = {name.lower() for name in (*df.columns, *lookup.names)}
    free = (key for number in itertools.count() if (key := f"_lookup_key_{number}") not in used_names)
    key_aliases = list(itertools.islice(free, len(lookup.keys)))
    value_columns = [field.name for field in table.returned_fields]
    read = table.read(list(dict.fromkeys([*table.keys, *value_columns])))
    renamed = [*zip(table.keys, key_aliases, strict=True), *zip(value_columns, lookup.names, strict=True)]
    selected = [sf.col(quote(column)).alias(alias) for column, alias in renamed]
    side = sf.broadcast(read.select(*selected).alias(lookup.name))
    pairs = [sf.expr(key.sql) == sf.col(alias) for key, alias in zip(lookup.keys, key_aliases, strict=True)]
    return df.join(side, functools.reduce(operator.and_, pairs), lookup.how).drop(*key_aliases)
