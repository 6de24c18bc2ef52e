"""`Chain`: the lookups on one DataFrame that are a single step of the plan, called a pass.

The versions come from a relation of one row, which is broadcast: Spark computes it once per execution and micro-batch. A UDF gets the
versions beside the keys of all lookups and returns lists of rows, which `inline_outer` turns into rows (plain `inline` would evaluate the
UDF twice).
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
"""The prefix of the names of columns with versions."""

_versions_lock = ForkSafeLock()
_RELATIONS_AT_MOST = 64  # per session
# The first line of the optimized plan, in the form of `explain(mode="cost")`.
_STATISTICS = re.compile(r"Statistics\(sizeInBytes=([0-9.E+]+) ([KMGTPE]?i?)B(?:, rowCount=([0-9.E+]+))?")
_UNITS = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_HUGE_BYTES = 2**50
_WIDTHS = {"string": 20, "binary": 100, "byte": 1, "boolean": 1, "short": 2, "integer": 4, "float": 4, "date": 4}


@dataclasses.dataclass(frozen=True)
class Key:
    """A key column of a DataFrame, and the type in which tasks get it.

    `path`: the column's name; for a field of a struct the names that lead to it. `cast`: whether the plan casts the column to the type.
    `planned`: False if Spark does not reveal the column's type yet. Then `type` is that of the table's key, the column is passed on unchanged,
    and tasks check whether it fits.
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
        """The key in SQL."""
        # Fields of structs are written as subscripts: in `a.b`, `a` could also be the alias of a table.
        column = quote(self.path[0]) + "".join(f"[{_literal(name)}]" for name in self.path[1:])
        if not self.planned:
            return _compared_by_bytes(self.column, column)
        return f"CAST({column} AS {self.type.simpleString()})" if self.cast else column


@dataclasses.dataclass(frozen=True)
class ChainedLookup:
    """A lookup of a chain. `keys`: the DataFrame's columns with the keys, in the order of the table's keys; with `match`, the last of them has the
    value to match. `names`: the names of the columns that the lookup adds.

    `build`: the micro-batch in whose `foreachBatch` function the lookup was built, if any. `broadcast`: whether it is a broadcast join, and not
    part of a pass. `why`: the reason for that choice.
    """

    table: DimensionTable
    keys: tuple[Key, ...]
    names: tuple[str, ...]
    how: str
    match: tuple[MatchKind, tuple[str, ...]] | None
    build: Build | None
    broadcast: bool = False
    why: str = ""

    @property
    def name(self) -> str:
        """The name of the lookup in plans, different for each lookup that `explain_lookup` tells apart."""
        pairs = [(key.column, name) for key, name in itertools.zip_longest(self.keys, self.table.keys)]
        returned_names = [field.name for field in self.table.returned_fields]
        mark = key_of(pairs, returned_names, self.names, self.how, self.match, self.broadcast, self.why)
        return f"lookup_{self.table.label}_{mark[:6]}"

    @property
    def version(self) -> str:
        """A name for the version that the lookup reads, equal for lookups that read the same."""
        return f"{key_of(self.options_text, self.build and dataclasses.astuple(self.build))[:16]}"

    @property
    def adds_error(self) -> bool:
        """Whether rows whose lookup fails pass, with the error in a column."""
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
    """Consecutive lookups on the DataFrame `base`. `apart`: why lookups that `base` itself may contain are not part of the chain."""

    base: DataFrame
    apart: str
    lookups: tuple[ChainedLookup, ...] = ()

    def to_dataframe(self) -> DataFrame:
        """The base with the columns of all lookups, in one pass."""
        relations = relate_versions(self.base, {lookup.version: lookup for lookup in self.lookups})
        tokens = {version: columns for relation in relations for version, columns in relation.tokens.items()}
        # All columns, because Spark would not reuse the exchange of a relation of which another pass reads other columns.
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
            # The hint, because spark.sql.autoBroadcastJoinThreshold may be -1.
            rows = rows.crossJoin(sf.broadcast(relation.versions))
        keys = map(sf.expr, udf.arguments([key.sql for key in arguments.values()]))
        rows = rows.select("*", sf.inline_outer(udf.function(*keys, *map(sf.col, versions))))
        if spec.drops:
            rows = rows.filter(sf.col(FOUND_COLUMN))
        if in_flow_function(self.base.sparkSession):
            # The columns of the base are not known. Spark refuses a name that two of them have, and this condition is true for
            # each row.
            nulls = [sf.col(quote(field.name)).isNull() for lookup in self.lookups for field in lookup.fields]
            rows = rows.filter(functools.reduce(operator.or_, nulls, sf.lit(True)))
        hidden = versions + [field.name for field in fields if field.name == FOUND_COLUMN]
        if in_flow_function(self.base.sparkSession):
            # Not `drop`: a Connect server analyses its input at once, and a pipeline's own datasets may not exist yet.
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
        """The place of a lookup's key: a column of an earlier lookup, or an argument of the UDF, which is added if necessary."""
        folded = tuple(name.lower() for name in key.path)
        for earlier, lookup in enumerate(self.lookups[:number]):
            for column, field in enumerate(lookup.fields):
                if (field.name.lower(),) == folded:
                    return earlier, column
        argument = folded, key.type.json()
        arguments.setdefault(argument, key)
        return list(arguments).index(argument)


def _compared_by_bytes(name: str, key: str) -> str:
    """A key, in SQL, whose type only Spark's planner will know. Tasks do not see collations and CHAR, so the plan itself refuses such a key."""
    kind = f"typeof({key})"  # a constant to the optimizer, like everything computed from it
    reason = (
        ": its texts are equal by rules of that type, and the table compares bytes; cast it to STRING before the lookup"
    )
    message = f"concat({_literal(f'key {name!r} is ')}, {kind}, {_literal(reason)})"
    return f"CASE WHEN {kind} RLIKE '^char[(]|collate' THEN raise_error({message}) ELSE {key} END"


def _literal(text: str) -> str:
    """A text in SQL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def relate_versions(df: DataFrame, tables: Mapping[str, ChainedLookup]) -> list[_Relation]:
    """Relations that cover all `tables`: a relation has one row, with the tokens of the versions that the execution reads of its tables.

    If earlier lookups in `df` read a table, its version comes from their relation, so that the whole query reads one version of the table. The
    same tables always get the same DataFrame: Spark reuses the exchange of an identical relation, and refuses two different observations with
    the same name. The latest relations are kept in the session object, and go with it: PySpark makes a session for each micro-batch of
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
    """The versions of some tables: the relation's name in plans, its DataFrame, the names of its columns with the token of each version, and the
    micro-batch in whose function it was made (if any)."""

    name: str
    versions: DataFrame
    tokens: Mapping[str, tuple[str, ...]]
    build: Build | None

    @property
    def columns(self) -> list[str]:
        return [column for columns in self.tokens.values() for column in columns]


def _forget(relations: collections.OrderedDict[Any, _Relation], build: Build | None) -> None:
    """Before a relation is added: drop the relations of the stream's earlier micro-batches, and the oldest ones if there are very many."""
    for place, relation in list(relations.items()):
        if build and relation.build and relation.build.stream == build.stream and relation.build.batch != build.batch:
            del relations[place]
    while len(relations) >= _RELATIONS_AT_MOST:
        relations.popitem(last=False)


def _resolve_versions(
    spark: SparkSession, tables: Mapping[str, ChainedLookup], observed: bool, build: Build | None
) -> _Relation:
    """A relation of one row with the tokens of `tables`. `observed`: whether the query's progress shows their versions."""
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
            # The observation's name has the mark, because one query may have passes in which the table is with different other tables.
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
    """The text of a DataFrame's plans, which `DataFrame.explain` would print among the output of other threads.

    In the function of a pipeline's flow, the text of the plan that the client will send to Spark.
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
    # Spark takes a relation of unknown size for huge.
    return None if expected > _HUGE_BYTES else int(expected / width)


def broadcast_join(df: DataFrame, lookup: ChainedLookup) -> DataFrame:
    """`df` joined by Spark with a broadcast of the lookup's table, which is read through this package's cache."""
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
