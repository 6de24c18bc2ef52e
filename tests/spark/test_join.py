"""Joins with providers and with tables that fail (`lookup.on-error`), the choice of a strategy and its explanation, and joins as of a time."""

import concurrent.futures
import itertools
import json
import logging
import random
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from pyspark_lookup import LookupTable, OptionError, SchemaError, explain_lookup, lookup_join, register_lookup
from pyspark_lookup.spark import join, reading
from pyspark_lookup.spark.join import Strategy
from pyspark_lookup.spark.lookup_pass import estimated_rows
from tests.support.lookup_service import service_options
from tests.support.spark_tables import (
    MODES,
    catalog_options,
    conf,
    events,
    publish_version,
    run_script,
    running,
    saved,
    stream_events,
)
from tests.support.sparks import DATA_SOURCES, SQL_FUNCTIONS, needs

pytestmark = pytest.mark.spark
NULL = {"lookup.on-error": "NULL"}


def read_requests(home: Path) -> list[list[int]]:
    return [json.loads(line) for line in (home / "asked").open()]


def enriched(spark: SparkSession, ids: str, options: dict[str, Any], how: str = "left") -> DataFrame:
    facts = spark.sql(f"SELECT explode(array({ids})) AS id").coalesce(1)
    return lookup_join(facts, None, "id", how, options=options)


def test_what_spark_can_take_as_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row may take an eighth of the memory of the JVM that receives it, by the properties that a task sees."""
    for master, driver, executor, size in (
        ("local[2]", "2g", "9g", 2**28),
        ("spark://host:7077", "2g", "4096", 2**29),
        ("yarn", None, None, 2**27),
        ("yarn", None, "64GB", 2**31 - 16),
    ):
        properties = {"master": master, "driver.memory": driver, "executor.memory": executor}
        local = types.SimpleNamespace(getLocalProperty=lambda name, of=properties: of.get(name.removeprefix("spark.")))
        monkeypatch.setattr(reading, "TaskContext", types.SimpleNamespace(get=lambda local=local: local))
        assert reading.largest_row() == size


@pytest.mark.nightly
def test_a_key_with_more_rows_than_the_jvm_holds(tmp_path: Path) -> None:
    """One key with 300 MB of rows in a JVM of 512 MB: an error that names it, from a join and from a function, and the application lives on."""
    ids = pa.array(np.zeros(150_000, np.int64))
    table = pa.table({"id": ids, "text": pa.array([f"{n:02000}" for n in range(150_000)])})
    path = saved(tmp_path / "dim.parquet", pa.concat_tables([table, pa.table({"id": [1], "text": ["small"]})]))
    script = """
import sys
from pyspark.sql import SparkSession
from pyspark_lookup import lookup_join, register_lookup
spark = SparkSession.builder.master("local[2]").config("spark.driver.memory", "512m").getOrCreate()
register_lookup(spark, "dim", sys.argv[1], "id", multi=True)
facts = spark.range(2)
for frame in (lookup_join(facts, sys.argv[1], "id", strategy="cache"), spark.sql("SELECT size(dim(id)) FROM range(2)")):
    try:
        frame.count() if "text" in frame.columns else frame.collect()
    except Exception as problem:
        print("FAILED", "have the same key, id = 0" in str(problem) or str(problem)[:500])
print("LIVES", lookup_join(facts.filter("id = 1"), sys.argv[1], "id", strategy="cache").first().text)
"""
    assert run_script(tmp_path, script, path) == ["FAILED True", "FAILED True", "LIVES small"]


@needs(DATA_SOURCES)
def test_decimals_are_not_rounded(spark: SparkSession, tmp_path: Path) -> None:
    """Decimals that Spark's join would round are compared exactly: `auto` takes the cache, and `broadcast` is refused."""
    zero = pa.table({"k": pa.array([0], pa.decimal128(38, 0)), "n": pa.array([0], pa.int64()), "name": ["zero"]})
    path = str(saved(tmp_path / "dim.parquet", zero))
    facts = spark.sql(
        "SELECT CAST(-0.01 AS DECIMAL(10, 2)) k, CAST(1e-19 AS DECIMAL(38, 19)) n, CAST(0 AS DECIMAL(38, 2)) fits"
    )
    for on in ("k", "n"):
        for strategy in ("auto", "cache"):
            assert lookup_join(facts, path, on, columns=["name"], strategy=strategy).first().name is None
        with pytest.raises(
            OptionError, match=rf"strategy = 'broadcast': key '{on}' is decimal\(.*round decimals.*: use 'cache'"
        ):
            lookup_join(facts, path, on, columns=["name"], strategy="broadcast")
        assert "would round decimals" in explain_lookup(lookup_join(facts, path, on, columns=["name"]))
    assert lookup_join(facts, path, {"fits": "n"}, columns=["name"], strategy="broadcast").first().name == "zero"


@needs(DATA_SOURCES)
def test_keys_of_char_and_varchar(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """VARCHAR is text. CHAR is padded with blanks, which the table's texts lack: the error says how to remove them."""
    path = saved(tmp_path / "dim.parquet", {"code": ["ab", "abc"], "name": ["x", "y"]})
    spark.sql(f"CREATE TABLE {name} {catalog_options(path)}")
    with conf(spark, "spark.sql.preserveCharVarcharTypeInfo", "true"):
        for strategy in ("cache", "broadcast"):
            facts = spark.sql("SELECT CAST('ab' AS VARCHAR(5)) AS code")
            joined = lookup_join(facts, name if strategy == "cache" else str(path), "code", strategy=strategy)
            assert joined.collect() == [("ab", "x")]
            assert joined.schema["code"].dataType.simpleString() == "varchar(5)"
        padded = spark.sql("SELECT CAST('ab' AS CHAR(5)) AS code")
        padding = r"key 'code' is char\(5\), whose values are padded.*rtrim\(code\) AS STRING"
        with pytest.raises(SchemaError, match=padding):
            lookup_join(padded, str(path), "code")
        trimmed = padded.withColumn("code", sf.expr("CAST(rtrim(code) AS STRING)"))
        assert lookup_join(trimmed, str(path), "code", strategy="cache").collect() == [("ab", "x")]
        with pytest.raises(AnalysisException, match=r"preserveCharVarcharTypeInfo = 'true': column 'code' is varchar"):
            spark.table(name).collect()


def test_a_provider(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """A join asks a provider for the distinct keys of a batch, and not again while they are cached and not invalidated; so does a SQL function."""
    limits = {"lookup.async.capacity": "2", "lookup.async.timeout": "30 s"}
    options = service_options(tmp_path, "async_cities", **limits)
    joined = enriched(spark, "1, 2, 3, NULL, 1", options)
    assert joined.collect() == [(1, "Oslo"), (2, "Bergen"), (3, None), (None, None), (1, "Oslo")]
    assert enriched(spark, "3, 2, 1", options, "inner").collect() == [(2, "Bergen"), (1, "Oslo")]
    register_lookup(spark, name, None, "id", options=options)
    assert spark.sql(f"SELECT {name}(2).city").collect() == [("Bergen",)]
    assert read_requests(tmp_path) == [[1, 2, 3]]
    LookupTable(None, {**options, "lookup.keys": "id"}).invalidate([2, 3])  # also in the caches of Spark's workers
    assert enriched(spark, "1, 2, 3", options).count() == 3
    assert read_requests(tmp_path) == [[1, 2, 3], [2, 3]]
    assert "a provider's table" in explain_lookup(joined)
    with pytest.raises(Exception, match="returns rows by key only"):
        lookup_join(spark.range(3), None, "id", strategy="broadcast", options=options).collect()


def test_a_failure_as_a_column(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """With `lookup.on-error=NULL` rows pass with the reason, cached keys get their rows, and failures are not cached; by default the query fails."""
    options, down = service_options(tmp_path, **NULL), tmp_path / "down"
    assert enriched(spark, "1, 7", options).select("lookup_error").distinct().collect() == [(None,)]
    down.touch()
    for how, misses in (("left", [(None, None, False), (7, None, False)]), ("inner", [])):
        rows = enriched(spark, "1, 2, NULL, 7, 8", options, how).collect()
        answers = [(row.id, row.city, bool(row.lookup_error)) for row in rows]
        assert sorted(answers, key=str) == sorted(
            [(1, "Oslo", False), (2, None, True), *misses, (8, None, True)], key=str
        )
    register_lookup(spark, name, None, "id", options=options)
    of_row = f"SELECT f.* FROM (SELECT {name}(2) AS f)"
    of_rows = f" UNION ALL SELECT city, lookup_error FROM {name}_rows(2)" if SQL_FUNCTIONS else ""
    rows += spark.sql(of_row + of_rows).collect()
    reasons = [row.lookup_error for row in rows if row.lookup_error]
    assert len(reasons) == (4 if SQL_FUNCTIONS else 3)
    assert all("LookupFunctionError" in error and "the service is down" in error for error in reasons)
    failure = r"LookupFunctionError.*tests\.support\.lookup_service:cities.*the service is down"
    with pytest.raises(PythonException, match=failure):
        enriched(spark, "2", service_options(tmp_path)).collect()
    down.unlink()
    assert enriched(spark, "2", options).collect()[0].city == "Bergen"


def test_a_table_that_cannot_be_resolved(spark: SparkSession, tmp_path: Path) -> None:
    """A stream goes on while its table is gone, with the reason in its rows, and finds rows again once the table is back."""
    path = publish_version(tmp_path / "dim.parquet", 1)
    (tmp_path / "events").mkdir()
    options = {"lookup.cache": "FULL", "lookup.max-retries": "0", **NULL}
    joined = lookup_join(stream_events(spark, tmp_path / "events"), str(path), "id", options=options)
    with running(joined, "unresolved") as query:
        for version in (1, 2, 3):
            path.unlink() if version == 2 else publish_version(path, version)
            events(tmp_path / "events", version, range(3))
            query.processAllAvailable()
    rows = sorted(spark.table("unresolved").collect(), key=lambda row: row.batch)
    assert [row.version for row in rows] == [1, 1, 1, None, None, None, 3, 3, 3]
    assert ["UfsNotFoundError" in str(row.lookup_error) for row in rows] == [row.version is None for row in rows]


CACHE_MODE = {"lookup.metadata.source": "CACHE", "lookup.metadata.sync-interval": "1 h"}
EXPLANATIONS: list[tuple[dict[str, Any], str, list[str]]] = [
    ({}, "auto", ["cache (a batch of about 3 rows, fewer than 500,005)", "lookup.cache = FULL"]),
    ({}, "cache", ["cache (asked for)", "lookup.cache = FULL"]),
    ({}, "broadcast", ["broadcast (asked for)"]),
    (MODES["none"], "cache", ["cache (asked for)", "lookup.cache = NONE;"]),
    (MODES["partial"], "auto", ["cache (lookup.cache = PARTIAL"]),
    ({"lookup.on-error": "NULL"}, "auto", ["cache (lookup.on-error = NULL)", "lookup.cache = FULL"]),
    (CACHE_MODE, "cache", ["cache (asked for)", "NONE, by default; lookup.metadata.source = CACHE"]),
]


def test_a_batch(spark: SparkSession, tmp_path: Path) -> None:
    """The explanation says how a lookup runs, and why."""
    path = publish_version(tmp_path / "dim.parquet", 1)
    for options, strategy, says in EXPLANATIONS:
        joined = lookup_join(spark.range(3), str(path), "id", strategy=strategy, options=options)
        text = explain_lookup(joined.filter("version = 1").select("id"))
        assert [part for part in [*says, f"table: {path}", "on: id = id (left)"] if part not in text] == []
    assert explain_lookup(spark.range(3)) == "no lookup join in this DataFrame"


def test_what_auto_makes_of_a_chain(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broadcasts become a pass when their tables together are large compared with the batch; the rows stay the same."""
    monkeypatch.setattr(join, "_PASS_ROWS", 0)
    path = str(publish_version(tmp_path / "dim.parquet", 1))
    single = lookup_join(spark.range(8), path, "id")
    assert "broadcast (a batch, and 10 rows are no more than 2,000,000)" in explain_lookup(single)
    chain = lookup_join(single, path, "id", prefix="other_")
    text = explain_lookup(chain)
    assert "2 lookups in one pass" in text
    assert text.count("cache (a batch of about 8 rows, fewer than 10)") == 2
    # With an operation between them, each lookup is planned by itself.
    apart = lookup_join(single.select("*"), path, "id", prefix="other_")
    assert explain_lookup(apart).count("broadcast (") == 2
    assert sorted(chain.collect()) == sorted(apart.collect())
    assert len(chain.collect()) == 8


@needs(DATA_SOURCES)
def test_a_chain_is_of_what_was_asked_for(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A broadcast that becomes part of a pass keeps the arguments and the table of its call, even if the caller changes the arguments and drops the name."""
    monkeypatch.setattr(join, "_PASS_ROWS", 0)
    path = str(saved(tmp_path / "dim.parquet", {"id": range(10), "key": range(9, -1, -1), "v": range(10)}))
    on, columns, options = {"id": "id"}, ["v"], {"lookup.where": "id < 5"}
    spark.sql(f"CREATE TABLE {name} {catalog_options(path)}")
    single = lookup_join(spark.range(8), name, on, columns=columns, options=options)
    on["id"], options["lookup.where"], columns[0] = "key", "id < 3", "key"
    spark.sql(f"DROP TABLE {name}")
    chain = lookup_join(single, path, "id", columns=(column for column in ("key",)))  # type: ignore[arg-type]
    assert "2 lookups in one pass" in explain_lookup(chain)
    assert sorted(chain.collect()) == [(n, n if n < 5 else None, 9 - n) for n in range(8)]
    swapped = [
        lookup_join(single.select("*"), path, {"id": table_column}, columns=[], strategy="cache")
        for table_column in ("id", "key")
    ]
    assert ["on: id = key" in explain_lookup(df) for df in swapped] == [False, True]


def test_rows_that_spark_expects(spark: SparkSession, tmp_path: Path) -> None:
    """The estimate is exact for a range, follows from the bytes of files, and is missing for local data. Several threads may ask at once."""
    path = saved(tmp_path / "facts.parquet", {"id": range(1000), "v": range(1000)})
    expected = path.stat().st_size // 24
    assert estimated_rows(spark.read.parquet(str(path))) == pytest.approx(expected, abs=expected // 50)
    assert estimated_rows(spark.createDataFrame([(1,)], "id int")) is None
    before = sys.stdout
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        estimates = list(threads.map(lambda rows: estimated_rows(spark.range(rows)), range(40)))
    assert estimates == list(range(40))
    assert sys.stdout is before


def test_what_auto_goes_by(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The choice depends on rows, repeated keys (which a snapshot knows), bytes, and on whether it is a stream; the log says why as well."""
    monkeypatch.setattr(join, "_BROADCAST_ROWS", 9)
    monkeypatch.setattr(join, "_BROADCAST_REPEATED_ROWS", 15)
    monkeypatch.setattr(join, "_PASS_ROWS", 1000 - 6)

    def explained(path: Path, **options: str) -> str:
        return explain_lookup(lookup_join(spark.range(1000), str(path), "id", options=options))

    unique = publish_version(tmp_path / "unique.parquet", 1)
    repeated = saved(tmp_path / "repeated.parquet", {"id": [1, 1, *range(10)], "v": range(12)})
    with caplog.at_level(logging.INFO, "pyspark_lookup.join"):
        assert "cache (10 rows are more than 9)" in explained(unique)
    assert "cache (10 rows are more than 9)" in caplog.text
    assert "cache (12 rows are more than 9)" in explained(repeated)
    LookupTable(str(repeated), {"lookup.keys": "id", "lookup.cache": "FULL"}).warm()
    assert "broadcast (a batch, and 12 repeated rows are no more than 15)" in explained(repeated)
    monkeypatch.setattr(join, "_BROADCAST_ROWS", 100)
    events(tmp_path / "events", 1)
    stream = stream_events(spark, tmp_path / "events")
    assert "cache (a stream" in explain_lookup(lookup_join(stream, str(unique), "id"))
    large = saved(tmp_path / "large.parquet", {"id": range(300_000), "v": range(300_000)}, group=300_000)
    small = {"lookup.cache": "FULL", "lookup.cache.max-bytes": "1 MiB", "lookup.cache.dir": str(tmp_path / "small")}
    assert "snapshot: none, the table is read from its files (" in explained(large, **small)
    assert "snapshot: none" not in explained(large, **{**small, "lookup.cache.max-bytes": "1 GiB"})
    text = explained(large, **{"lookup.scan.split-size": "1 MiB"})
    assert "are more than lookup.scan.split-size" in text
    assert "lookup.cache = NONE, by default" in text
    lines = tmp_path / "lines.csv"
    lines.write_text("id,v\n1,2\n")
    assert "not known before they are read" in explained(lines)


VALIDITY = {"lookup.valid-from": "valid_from", "lookup.valid-to": "valid_to"}
TIMES = {
    "instant": "timestamp_seconds({} * 86400)",
    "local": "CAST(timestamp_seconds({} * 86400) AS TIMESTAMP_NTZ)",
    "date": "date_from_unix_date(CAST({} AS INT))",
    "number": "{}",
}
"""For each type the SQL of the time so many units after the first."""


def history(overlaps: bool) -> list[tuple[int, int | None, int | None, str]]:
    """Rows of 60 keys with gaps, nulls on both ends, and overlaps on request; a key's rows begin at different times."""
    draw, rows = random.Random(1), list[tuple[int, int | None, int | None, str]]()
    for key in range(60):
        ends = sorted(draw.sample(range(30), draw.randrange(1, 7)))
        for number, (start, end) in enumerate(itertools.pairwise(ends)):
            first = number == 0 and draw.random() < 0.3
            last = number == len(ends) - 2 and draw.random() < 0.4
            length = end - start + (draw.randrange(5) if overlaps else -draw.randrange(2))
            rows.append((key, None if first else start, None if last else start + length, f"{key}-{number}"))
    draw.shuffle(rows)
    return rows


def moments(spark: SparkSession, time: str) -> DataFrame:
    key, at = "nullif(event * 7 % 73, 72)", "nullif(event * 11 % 31, 30)"
    return spark.range(2000).selectExpr("id AS event").selectExpr("event", f"{key} AS id", f"{time.format(at)} AS at")


@pytest.mark.parametrize(
    ("kind", "mode", "how"),
    [
        pytest.param(kind, mode, how, marks=[pytest.mark.nightly] * (kind in ("local", "date")))
        for kind, mode, how in zip(TIMES, [*MODES, "full"], ["left", "inner"] * 2, strict=True)
    ],
)
def test_as_of_is_a_join_on_ranges(spark: SparkSession, tmp_path: Path, kind: str, mode: str, how: str) -> None:
    """The rows are those of Spark's join on ranges. Two rows valid at once are an error that names the key, or the later one counts, also if rows have no end."""
    path, options = str(tmp_path / "dim"), {**MODES[mode], **VALIDITY}
    valid = "(valid_from IS NULL OR valid_from <= at)"
    if kind == "number":
        del options["lookup.valid-to"]
    else:
        valid += " AND (valid_to IS NULL OR at < valid_to)"
    rows = spark.createDataFrame(history(how == "inner"), "id LONG, since LONG, until LONG, name STRING")
    since, until = (TIMES[kind].format(column) for column in ("since", "until"))
    rows.selectExpr("id", f"{since} AS valid_from", f"{until} AS valid_to", "name").coalesce(1).write.parquet(path)
    facts = moments(spark, TIMES[kind])
    if how == "inner" and "lookup.valid-to" in options:
        with pytest.raises(Exception, match=r"rows of the key id = \d+ are valid at "):
            lookup_join(facts, path, "id", as_of="at", options=options).collect()
        options["lookup.overlap"] = "NEWEST"
    actual = lookup_join(facts, path, "id", how=how, columns=["name"], as_of="at", options=options)
    assert "as of: at, by valid_from" in explain_lookup(actual)
    ranges = sf.expr(f"id = key AND at IS NOT NULL AND {valid}")
    expected = facts.join(spark.read.parquet(path).withColumnRenamed("id", "key"), ranges, how)
    expected = expected.groupBy("event").agg(sf.max_by("name", sf.struct("valid_from")).alias("name"))
    assert sorted(map(tuple, actual.select("event", "name").collect())) == sorted(map(tuple, expected.collect()))


def test_what_as_of_refuses(spark: SparkSession, tmp_path: Path) -> None:
    """Missing options, missing columns, columns of another type, and a broadcast are errors when `lookup_join` is called."""
    path = str(tmp_path / "t")
    rows = "id", "current_date() AS valid_from", "current_date() AS valid_to", "'a' AS name"
    spark.range(1).selectExpr(*rows).write.parquet(path)
    facts = moments(spark, TIMES["date"]).selectExpr("*", "'x' AS text", "now() AS instant")
    for as_of, more, words in (
        ("at", {}, "argument as_of needs the table's columns"),
        ("then", VALIDITY, "no column 'then'"),
        ("text", VALIDITY, "'text' is string, the table's 'valid_from' is date"),
        ("instant", VALIDITY, "'instant' is timestamp"),
        ("at", {"lookup.valid-from": "since"}, "no column 'since'"),
        ("at", {**VALIDITY, "lookup.valid-to": "name"}, "both must have the same type"),
        ("at", {**VALIDITY, "lookup.overlap": "LAST"}, "lookup.overlap = 'LAST'"),
    ):
        with pytest.raises(Exception, match=words):
            lookup_join(facts, path, "id", as_of=as_of, options=more)
    with pytest.raises(Exception, match="strategy='cache'"):
        lookup_join(facts, path, "id", as_of="at", strategy="broadcast", options=VALIDITY)
    with pytest.raises(OptionError, match=r"lookup\.valid-from is for lookups with as_of .*: remove it"):
        lookup_join(facts, path, "id", options=VALIDITY)


def test_a_key_within_a_struct(spark: SparkSession, tmp_path: Path) -> None:
    """`on` may name a field of a struct, at any depth and in any letter case; a column with that whole name comes first."""
    path = str(tmp_path / "cities")
    rows = [(1, "Oslo", {"id": 2}), (2, "Bergen", {"id": 1})]
    spark.createDataFrame(rows, "id LONG, city STRING, next STRUCT<id: LONG>").coalesce(1).write.parquet(path)
    df = spark.sql("SELECT struct(id, struct(id AS `a.b`) AS t) AS s, id + 1 AS `s.x` FROM range(1, 3)")
    options = {"lookup.cache.dir": str(tmp_path / "cache")}
    strategies: Iterator[Strategy] = itertools.cycle(("cache", "broadcast"))

    def names(on: dict[str, str], of: DataFrame = df, prefix: str = "") -> list[str]:
        how: dict[str, Any] = {"strategy": next(strategies), "options": options, "prefix": prefix}
        joined = lookup_join(of, path, on, columns=["city", "next"], **how)
        return [row[f"{prefix}city"] for row in sorted(joined.collect(), key=lambda row: row.s.id)]

    assert names({"s.id": "id"}) == names({"S.T.A.b": "ID"}) == ["Oslo", "Bergen"]
    alias = df.withColumn("id", sf.lit(0)).alias("s")  # has an id, too
    assert names({"s.id": "id"}, alias) == ["Oslo", "Bergen"]
    assert names({"s.x": "id"}) == ["Bergen", None]
    first = lookup_join(df, path, {"s.id": "id"}, options=options)
    for _ in range(2):
        assert names({"next.id": "id"}, first, "next_") == ["Bergen", "Oslo"]
    with pytest.raises(SchemaError, match=r"argument on: the DataFrame has no column 's\.y'"):
        names({"s.y": "id"})
    with pytest.raises(SchemaError, match="argument key: the table has no column 'idd'"):
        register_lookup(spark, "lookup_within", path, key="idd", options=options)


@needs(DATA_SOURCES)
def test_views_and_tables_of_other_formats(spark: SparkSession, tmp_path: Path) -> None:
    """Lookups in them are refused with a way out, because a view's filter and version would be lost. A view of a whole table is accepted."""
    path, options = str(tmp_path / "t"), {"lookup.cache.dir": str(tmp_path / "cache")}
    spark.range(3).coalesce(1).write.parquet(path)
    df = spark.range(3)
    views = {
        "whole_view": "SELECT * FROM of_lookups",
        "part_view": "SELECT * FROM of_lookups WHERE id > 1",
        "with_view": "SELECT * FROM of_lookups WITH ('lookup.where' 'id > 1')",
        "other_view": "SELECT * FROM range(3)",
    }
    spark.sql(f"CREATE TABLE of_lookups USING lookupcache OPTIONS (path '{path}')")
    spark.sql(f"CREATE TABLE of_parquet USING parquet LOCATION '{path}'")
    try:
        for name, query in views.items():
            spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW {name} AS {query}")
        spark.read.option("lookup.where", "id > 1").table("of_lookups").createOrReplaceTempView("read_view")
        assert lookup_join(df, "whole_view", "id", "inner", options=options).count() == 3
        for name in ("part_view", "with_view", "read_view", "other_view"):
            with pytest.raises(OptionError, match=f"^{name} is a view, .* lookup.where .* managed table"):
                lookup_join(df, name, "id", options=options)
        with pytest.raises(
            OptionError,
            match=r"^table of_parquet is not of the format lookupcache, or has lost its options .*: give the path",
        ):
            lookup_join(df, "of_parquet", "id", options=options)
    finally:
        for name in (*views, "read_view"):
            spark.catalog.dropTempView(name)
        for name in ("of_lookups", "of_parquet"):
            spark.sql(f"DROP TABLE IF EXISTS {name}")
