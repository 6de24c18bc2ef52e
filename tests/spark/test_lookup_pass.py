"""A chain of lookups is one pass, with the rows and the schema of the same joins in Spark, one after the other."""

import dataclasses
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from pyspark_lookup import LookupTable, OptionError, SchemaError, explain_lookup, lookup_join
from pyspark_lookup.spark.join import Strategy
from pyspark_lookup.spark.lookup_pass import plan_text
from tests.support.fuzzing import seeds
from tests.support.lookup_service import service_options
from tests.support.spark_joins import assert_same, by_spark
from tests.support.spark_tables import (
    FULL,
    MODES,
    Calls,
    catalog_options,
    conf,
    each_batch,
    events,
    made_files,
    publish_version,
    running,
    saved,
    stream_events,
)
from tests.support.sparks import DATA_SOURCES, UDFS, needs

pytestmark = pytest.mark.spark
HOWS = ("left", "left", "inner", "left_semi", "left_anti")
KINDS = {"id": "number", "small": "number", "parent": "number", "weight": "number", "code": "text", "label": "text"}
"""The columns that may be keys, in facts and in tables; a number may be looked up in any column of numbers."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A lookup of a chain: its table, keys, kind of join, columns, prefix and cache mode."""

    table: str
    on: Mapping[str, str]
    how: str
    columns: list[str]
    prefix: str
    mode: str


def drawn(rng: random.Random) -> list[Step]:
    """Draw two to five lookups; half of their keys are columns that an earlier lookup has added."""
    # For each column of a table, the columns of the DataFrame with values like its own.
    candidates = {name: [name] for name in KINDS}
    steps: list[Step] = []
    for number in range(rng.randint(2, 5)):
        on: dict[str, str] = {}
        for key in rng.sample(["id", "code", "weight", "small"], rng.choice([1, 1, 2])):
            kind = "text" if key == "code" else "number"
            excluded = {"weight"} if key != "weight" else {*KINDS} - {"weight", "small"}
            fits = [name for name, of in KINDS.items() if of == kind and name not in excluded]
            df_column = rng.choice([column for name in fits for column in candidates[name][-2:] if column not in on])
            on[df_column] = key
        how = rng.choice(HOWS)
        prefix = f"t{number}_"
        columns = rng.sample(list(KINDS), rng.randint(0, 3)) if how in ("left", "inner") else []
        for column in columns:
            candidates[column].append(prefix + column)
        table = rng.choice(["few", "many", "many", "none"] if how == "left" else ["few", "many"])
        steps.append(Step(table, on, how, columns, prefix, rng.choice(list(MODES))))
    return steps


def by_lookups(df: DataFrame, files: Mapping[str, str], steps: list[Step]) -> DataFrame:
    for step in steps:
        columns = step.columns if step.how in ("left", "inner") else None
        how = {"strategy": "cache", "options": MODES[step.mode]}
        df = lookup_join(df, files[step.table], step.on, step.how, columns, step.prefix, **how)
    return df


def by_joins(df: DataFrame, files: Mapping[str, str], steps: list[Step]) -> DataFrame:
    for step in steps:
        df = by_spark(df, files[step.table], step.on, step.how, step.columns, step.prefix)
    return df


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return made_files(tmp_path_factory.mktemp("chains"))


def passes(df: DataFrame, capsys: pytest.CaptureFixture[str]) -> int:
    """Count the steps of a plan that run Python."""
    capsys.readouterr()
    df.explain()
    return capsys.readouterr().out.count("ArrowEvalPython")


@pytest.mark.parametrize("seed", seeds(1))
def test_generated_chains(
    spark: SparkSession, files: dict[str, str], seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Chains in all modes and kinds of joins, keyed by columns of the DataFrame and of earlier lookups, with keys that repeat or are null."""
    rng = random.Random(seed)
    for _ in range(3):
        steps = drawn(rng)
        df = spark.read.parquet(files["facts"])
        with UDFS[rng.choice([*UDFS])]():
            actual = by_lookups(df, files, steps)
        assert passes(actual, capsys) == 1
        with conf(spark, "spark.sql.execution.arrow.maxRecordsPerBatch", rng.choice(["3", "10000"])):
            assert_same(actual, by_joins(df, files, steps), f"{seed}: {steps}")
    stream = by_lookups(spark.readStream.schema(df.schema).parquet(files["facts"]), files, steps)
    with running(stream, "generated") as query:
        query.processAllAvailable()
        assert_same(spark.table("generated"), by_joins(df, files, steps), f"a stream of {seed}: {steps}")


def test_lookups_apart(spark: SparkSession, files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """An operation between two lookups begins another pass, with the same rows; `explain_lookup` says which lookups share a pass, and why others do not."""
    steps = [Step("few", {"id": "id"}, "left", ["code"], f"t{n}_", "full") for n in range(3)]
    df = spark.read.parquet(files["facts"]).filter("id > 0")
    first = by_lookups(df, files, steps[:1])
    operations = {"not what lookup_join returned": lambda: first.filter("id > 0"), "persisted": first.persist}
    for why, operation in operations.items():
        apart = by_lookups(operation(), files, steps[1:])
        text = explain_lookup(apart)
        assert text.count("2 lookups in one pass") == 1
        reasons = re.findall(r"pass: its own \(its DataFrame is (.*)\)", text)
        assert reasons == [why, "not what lookup_join returned"]
        assert_same(apart, by_joins(df, files, steps))
    first.unpersist()
    together = by_lookups(first, files, steps[1:])
    assert passes(together, capsys) == 1
    text = explain_lookup(together)
    assert "3 lookups in one pass" in text
    assert "its own" not in text


def test_calls_of_a_pass(spark: SparkSession, files: dict[str, str]) -> None:
    """One job asks once for the version of each table, however many lookups and passes of a query read it."""
    df = spark.read.parquet(files["facts"])
    tables = ("few", "many", "few", "many")
    steps = [Step(table, {"id": "id"}, "left", ["code"], f"t{n}_", "full") for n, table in enumerate(tables)]
    single_pass = by_lookups(df, files, steps[:3])
    two_passes = by_lookups(single_pass.filter("id > 2"), files, steps[3:])
    two_passes.collect()
    assert len({*re.findall(r"version_of_\w+", plan_text(two_passes))}) == 1  # Spark reuses its exchange
    for query in (single_pass, two_passes):
        calls = [Calls(files[table]) for table in ("few", "many")]
        spark.sparkContext.setJobGroup("calls", "", False)
        query.select("*").collect()
        assert [call.calls() for call in calls] == [(1, 0, 0)] * 2
    assert_same(two_passes, by_joins(df.filter("id > 2"), files, steps))


def test_all_that_a_lookup_can_do_in_a_pass(spark: SparkSession, tmp_path: Path, files: dict[str, str]) -> None:
    """A time from another lookup, a provider, an error as a column, a lookup without columns: one pass returns the same rows as several."""
    periods = {"id": [*range(8)] * 2, "since": [0] * 8 + [5] * 8, "name": ["old"] * 8 + ["new"] * 8}
    dim = str(saved(tmp_path / "dim.parquet", periods))
    validity = {"lookup.valid-from": "since", "lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "99"}
    (tmp_path / "service").mkdir()
    failing = service_options(tmp_path / "service", **{"lookup.on-error": "NULL"})
    (tmp_path / "service" / "down").touch()

    def joined(between: Callable[[Any], Any]) -> DataFrame:
        df = spark.read.parquet(files["facts"])
        df = lookup_join(df, files["many"], "code", columns=["parent"], prefix="p_", strategy="cache", options=FULL)
        df = lookup_join(between(df), dim, "id", columns=["name"], as_of="p_parent", options=validity)
        df = lookup_join(between(df), None, {"p_parent": "id"}, "inner", prefix="s_", options=failing)
        df = lookup_join(between(df), files["few"], "id", columns=[], strategy="cache")
        return lookup_join(between(df), None, "id", "left_anti", options=service_options(tmp_path / "service2"))

    (tmp_path / "service2").mkdir()
    assert_same(joined(lambda df: df), joined(lambda df: df.select("*")))
    rows = joined(lambda df: df).collect()
    assert {row.lookup_error is None for row in rows} == {False}
    assert {row.name for row in rows} >= {"old", "new"}


def test_semi_and_anti_joins(spark: SparkSession, files: dict[str, str]) -> None:
    """Semi and anti joins, by each name that Spark accepts, keep the rows with or without a match; columns of the table may not be named."""
    df = spark.read.parquet(files["facts"])
    strategies: tuple[Strategy, ...] = ("cache", "broadcast")
    names = ("semi", "anti", "leftanti", "leftsemi", "left_semi", "LEFT_ANTI")
    for strategy, how in zip(strategies * 3, names, strict=True):
        joined = lookup_join(df, files["many"], ["id", "code"], how, strategy=strategy)
        assert_same(joined, by_spark(df, files["many"], ["id", "code"], how.lower(), columns=[]))
    with pytest.raises(OptionError, match=r"columns.*left_semi join returns no columns"):
        lookup_join(df, files["many"], "id", "semi", columns=["label"])


@needs(DATA_SOURCES)
def test_keys_that_the_table_names(spark: SparkSession, tmp_path: Path, files: dict[str, str], name: str) -> None:
    """Without `on`, the keys come from the catalog table, the managed table's log or the options; the DataFrame's columns have the same names."""
    df = spark.read.parquet(files["facts"]).select("ID", "code")
    expected = by_spark(df, files["few"], ["id", "code"], columns=["label"])
    spark.sql(
        f"CREATE TABLE {name} {catalog_options(files['few'], {'lookup.keys': 'code, id', 'lookup.write.mode': 'upsert'})}"
    )
    keyed = LookupTable(files["few"], {"lookup.keys": "id,code"})
    for table, options in ((name, {}), (keyed, {}), (files["few"], {"lookup.keys": "id, code"})):
        for strategy in ("cache", "broadcast"):
            assert_same(lookup_join(df, table, columns=["label"], strategy=strategy, options=options), expected)
    managed = LookupTable(str(tmp_path / "managed"), {"lookup.keys": "id"})
    managed.write(pa.table({"id": [1, 2], "city": ["Oslo", "Bergen"]}))
    joined = lookup_join(spark.range(1, 4), str(tmp_path / "managed"))
    assert sorted(joined.collect()) == [(1, "Oslo"), (2, "Bergen"), (3, None)]
    with pytest.raises(OptionError, match=r"argument on is missing.*lookup.keys"):
        lookup_join(df, files["few"])
    with pytest.raises(SchemaError, match="no column 'id'"):
        lookup_join(df.select("code"), str(tmp_path / "managed"))


def test_a_stream_of_chains(spark: SparkSession, tmp_path: Path) -> None:
    """Each micro-batch reads and reports one version of each table, also of a table that two passes read."""
    paths = [publish_version(tmp_path / f"{table}.parquet", 1) for table in ("one", "two")]
    (tmp_path / "events").mkdir()
    joined = stream_events(spark, tmp_path / "events")
    for number, path in enumerate([*paths, paths[0]]):
        between = joined.filter("event >= 0") if number == 2 else joined
        joined = lookup_join(between, str(path), "id", prefix=f"t{number}_", options=FULL)
    with running(joined, "chained") as query:
        for version in (1, 2, 3):
            publish_version(paths[version % 2], version)
            events(tmp_path / "events", version, range(3))
            query.processAllAvailable()
        observed_metrics = [
            progress["observedMetrics"] for progress in query.recentProgress if progress["numInputRows"]
        ]
    rows = spark.table("chained").select("batch", "t0_version", "t1_version", "t2_version").collect()
    assert sorted({*map(tuple, rows)}) == [(1, 1, 1, 1), (2, 2, 1, 2), (3, 2, 3, 2)]
    assert [{row["table"] for row in metrics.values()} for metrics in observed_metrics] == [{*map(str, paths)}] * 3
    first, second, third = ({row["table"]: row["digest"] for row in metrics.values()} for metrics in observed_metrics)
    assert first[str(paths[0])] != second[str(paths[0])] == third[str(paths[0])]


def test_chains_that_meet(spark: SparkSession, tmp_path: Path) -> None:
    """Two chains that share a table read one version of it when a query on one host combines them."""
    first, second = (publish_version(tmp_path / f"{table}.parquet", 1) for table in ("one", "two"))
    facts, arguments = spark.range(10), {"columns": ["version"], "options": FULL, "strategy": "cache"}
    chain = lookup_join(
        lookup_join(facts, str(first), "id", **arguments), str(second), "id", prefix="two_", **arguments
    )
    union = chain.select("version").union(lookup_join(facts, str(first), "id", **arguments).select("version"))
    for version in (1, 2, 3):
        publish_version(first, version)
        assert [(row.version, row["count"]) for row in union.groupBy("version").count().collect()] == [(version, 20)]


def test_chains_in_foreach_batch(spark: SparkSession, tmp_path: Path) -> None:
    """A lookup that is built after a write sees it, even if it shares a pass with a lookup that was built before."""
    path = publish_version(tmp_path / "dim.parquet", 1)
    events(tmp_path / "events", 0, range(2))
    versions: list[Any] = []

    def act(batch: DataFrame, number: int) -> None:
        before = lookup_join(batch, str(path), "id", prefix="before_", options=FULL)
        before.collect()
        publish_version(path, 2)
        after = lookup_join(before, str(path), "id", prefix="after_", options=FULL)
        versions.append({(row.before_version, row.after_version) for row in after.collect()})

    each_batch(stream_events(spark, tmp_path / "events"), tmp_path / "checkpoint", act)
    assert versions == [{(1, 2)}]
