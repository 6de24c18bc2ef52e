"""UDFs of lookups without Arrow UDFs, or without functions in SQL: keys and rows pass through pandas unchanged."""

import decimal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.errors import PythonException
from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType

from pyspark_lookup import lookup_join, register_lookup
from pyspark_lookup.errors import NotSupportedError, SchemaError
from pyspark_lookup.spark.lookup_udf import arrow_frame, arrow_series, plain_key
from tests.support.spark_tables import Calls, conf, publish_version, saved
from tests.support.sparks import ARROW_UDFS, SQL_FUNCTIONS, without

pytestmark = pytest.mark.spark
INSTANT = pa.timestamp("us", "UTC")
EXTREMES = {
    "l": (pa.int64(), [2**53 + 1, -(2**63), 2**63 - 1]),
    "d": (pa.float64(), [float("nan"), -0.0, 5e-324]),
    "t": (pa.timestamp("us", tz="UTC"), [-62_135_596_800_000_000, -1, 253_402_300_799_999_999]),
    "n": (pa.timestamp("us"), [-62_135_596_800_000_000, -1, 253_402_300_799_999_999]),
    "e": (pa.date32(), [-719_162, -1, 2_932_896]),
    "m": (pa.decimal128(38, 10), [decimal.Decimal(text) for text in (f"{'9' * 28}.{'9' * 10}", "0", "-1E-10")]),
    "x": (pa.binary(), [b"", b"\xff", b"\0" * 3]),
    "s": (pa.string(), ["", "ö", "\U0001f600"]),
}
EXACT = {"l": 2**53 - 1, "x": b"\xff", "s": "ö", "e": -1, "m": decimal.Decimal("-1E-10"), "b": True}
"""Keys of a plain function, of types that pandas does not change."""


def test_keys_at_the_ends_of_their_types(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """Keys at the ends of their types are found among nulls, in a time zone whose clocks change, each column by itself; by a plain function, too."""
    rows = {column: pa.array([*keys, None], kind) for column, (kind, keys) in EXTREMES.items()}
    facts = spark.read.parquet(str(saved(tmp_path / "facts.parquet", pa.table({**rows, "own": [0, 1, 2, 3]}))))
    exact = {column: pa.array([key, None], EXTREMES.get(column, [None])[0]) for column, key in EXACT.items()}
    exact_facts = saved(tmp_path / "exact.parquet", pa.table({**exact, "own": [0, 1]}))
    spark.read.parquet(str(exact_facts)).createOrReplaceTempView(f"{name}_facts")
    with conf(spark, "spark.sql.session.timeZone", "America/New_York"), without(ARROW_UDFS):
        for column, keys in rows.items():
            table = pa.table({column: keys.slice(0, 3), "place": [0, 1, 2]})
            path = saved(tmp_path / f"{column}.parquet", table)
            facts = lookup_join(facts, str(path), column, prefix=f"{column}_", strategy="cache")
        for row in facts.select("own", *(f"{column}_place" for column in rows)).collect():
            assert [*row][1:] == [row.own if row.own < 3 else None] * len(rows)
    with without(SQL_FUNCTIONS, ARROW_UDFS):
        for column, keys in exact.items():
            path = saved(tmp_path / f"exact_{column}.parquet", pa.table({column: keys.slice(0, 1), "place": [0]}))
            register_lookup(spark, f"{name}_{column}", str(path), column)
        calls = ", ".join(f"{name}_{column}({column}).place" for column in EXACT)
        for row in spark.sql(f"SELECT own, {calls} FROM {name}_facts").collect():
            assert [*row][1:] == [None if row.own else 0] * len(EXACT)


def test_intervals_as_keys(spark: SparkSession, tmp_path: Path) -> None:
    """Intervals of all signs are found, beside a key of another type."""
    values = "(INTERVAL '1 02:03:04.000005' DAY TO SECOND), (INTERVAL '-9 00:00:00.000001' DAY TO SECOND), (INTERVAL '0 0:0:0' DAY TO SECOND)"
    rows = spark.sql(f"SELECT k, 7L AS n, CAST(k AS STRING) AS place FROM VALUES {values} t(k)")
    rows.write.parquet(str(tmp_path / "dim"))
    facts = spark.sql(f"SELECT k, 7L AS n, CAST(k AS STRING) AS own FROM VALUES {values}, (NULL) t(k)")
    with without(ARROW_UDFS):
        joined = lookup_join(facts, str(tmp_path / "dim"), ["k", "n"], strategy="cache")
    answers = joined.selectExpr("own", "place").collect()
    assert len(answers) == 4
    assert all(row.own == row.place for row in answers)


def test_text_that_is_not_utf_8(spark: SparkSession, tmp_path: Path) -> None:
    """Text that is not UTF-8 finds no row, and the query goes on."""
    path = saved(tmp_path / "dim.parquet", {"s": ["a"], "place": [0]})
    facts = spark.sql("SELECT CAST(b AS STRING) AS s FROM VALUES (X'61'), (X'ff'), (X'c328') t(b)")
    with without(ARROW_UDFS):
        joined = lookup_join(facts, str(path), "s", strategy="cache")
    assert sorted(str(row.place) for row in joined.select("place").collect()) == ["0", "None", "None"]


def test_a_function_of_single_rows(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """The function returns null for a missing key, and the row of another, as with Arrow UDFs."""
    path = publish_version(tmp_path / "dim.parquet", 7)
    with without(ARROW_UDFS):
        register_lookup(spark, name, str(path), "id")
    if SQL_FUNCTIONS:
        rows = spark.sql(f"SELECT k, {name}(k) AS r, {name}(k).version AS v FROM VALUES (1L), (99L), (NULL) t(k)")
        assert {row.k: (row.r, row.v) for row in rows.collect()} == {1: ((7,), 7), 99: (None, None), None: (None, None)}


@pytest.fixture
def plain() -> Iterator[None]:
    with without(SQL_FUNCTIONS, ARROW_UDFS):
        yield


@pytest.mark.usefixtures("plain")
def test_a_plain_function(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """A plain function answers each statement from the newest version, for one call. A missing key gives null, or with `multi` an empty list."""
    path = publish_version(tmp_path / "dim.parquet", 1)
    register_lookup(spark, name, str(path), "id")
    register_lookup(spark, f"{name}_all", str(path), "id", multi=True)
    facts = spark.createDataFrame([(1,), (2,), (99,), (None,)], "k bigint")
    facts.coalesce(1).createOrReplaceTempView(f"{name}_facts")
    for version in (1, 2):
        publish_version(path, version)
        calls = Calls(path)
        rows = spark.sql(f"SELECT k, {name}(k).version AS v FROM {name}_facts").collect()
        assert {row.k: row.v for row in rows} == {1: version, 2: version, 99: None, None: None}
        assert calls.calls()[0] == 1
        lists = spark.sql(f"SELECT k, {name}_all(k) AS r FROM {name}_facts").collect()
        rows = {row.k: [item.version for item in row.r] for row in lists}
        assert rows == {1: [version], 2: [version], 99: [], None: []}


@pytest.mark.usefixtures("plain")
def test_what_a_plain_function_refuses(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """A key that pandas would change is refused: by its type when the function is registered, and a number that is no longer exact when it arrives."""
    for kind, arrow in (("double", pa.float64()), ("timestamp", pa.timestamp("us"))):
        table_path = saved(tmp_path / f"{kind}.parquet", pa.table({"k": pa.array([1], arrow), "v": [1]}))
        with pytest.raises(NotSupportedError, match=rf"key 'k' is {kind}.*functions defined in SQL.*use lookup_join"):
            register_lookup(spark, name, str(table_path), "k")
    register_lookup(spark, name, str(publish_version(tmp_path / "dim.parquet", 1)), "id")
    many = spark.createDataFrame([(2**53 + 1,), (None,)], StructType([StructField("k", LongType())])).coalesce(1)
    text = spark.createDataFrame([("x",)], StructType([StructField("k", StringType())]))
    calls = [(many, "k", "2.53 in others"), (text, "k", "does not fit"), (many, "k, k", "2: give one for each of id")]
    for number, (rows, call, words) in enumerate(calls):
        rows.createOrReplaceTempView(f"{name}_{number}")
        with pytest.raises(PythonException, match=words):
            spark.sql(f"SELECT {name}({call}).version FROM {name}_{number}").collect()


@pytest.mark.skipif(bool(SQL_FUNCTIONS), reason="newer Sparks convert its columns otherwise, and never get one")
@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(
    "value",
    [
        pa.array([[1, None]], pa.list_(pa.int64())),
        pa.array([[("a", 2**53 + 1)]], pa.map_(pa.string(), pa.int64())),
        pa.array([{"x": None, "t": [253_402_300_799_999_999]}], pa.struct({"x": pa.int64(), "t": pa.list_(INSTANT)})),
    ],
)
def test_nested_columns_of_a_plain_function(spark: SparkSession, tmp_path: Path, name: str, value: pa.Array) -> None:
    path = saved(tmp_path / "dim.parquet", pa.table({"id": [1], "v": value}))
    register_lookup(spark, name, str(path), "id")
    columns = "k", f"to_json(struct({name}(k).v)) AS v"
    rows = {row.k: row.v for row in spark.range(1, 3).withColumnRenamed("id", "k").selectExpr(*columns).collect()}
    assert rows == {1: spark.read.parquet(str(path)).selectExpr("to_json(struct(v)) AS v").collect()[0].v, 2: "{}"}


PLAIN_ARGUMENTS: list[tuple[pa.DataType, Any, list[Any] | str]] = [
    (pa.string(), pd.Series([1.0]), "it is double"),  # Arrow writes 1, Spark 1.0
    (pa.string(), pd.Series([pd.Timestamp("2020-01-01")]), "it is timestamp"),
    (pa.string(), pd.Series([b"\xff"]), "UTF8"),
    (pa.int64(), pd.Series([pd.Timestamp("2020-01-01")]), "it is timestamp"),  # Arrow would take its nanoseconds
    (pa.int64(), pd.Series([1.5, None]), "truncated"),
    (pa.int64(), pd.Series([2.0**53, None]), r"beyond 2\^53"),
    (pa.int64(), pd.Series([7.0, None]), [7, None]),
    (pa.int64(), pd.Series([decimal.Decimal("7.00")]), [7]),
    (pa.decimal128(10, 2), pd.Series([7]), [decimal.Decimal("7.00")]),
    (pa.decimal128(10, 2), pd.Series([0.101]), "truncated"),
    (pa.decimal128(10, 2), pd.Series([decimal.Decimal("0.101")]), "data loss"),
    (pa.binary(), pd.Series(["a", None]), [b"a", None]),
    (pa.bool_(), pd.Series([2]), "it is int64"),
    (pa.date32(), pd.Series([18_262]), "it is int64"),
    (pa.date32(), pd.Series([None, None]), [None, None]),
    (pa.int64(), pd.DataFrame({"a": [1]}), "it is a struct"),
]


def test_arguments_of_other_types() -> None:
    """A number may be looked up as a number of another type. What Arrow converts differently from Spark is an error, and so is what does not fit."""
    for kind, argument, expected in PLAIN_ARGUMENTS:
        if isinstance(expected, list):
            assert plain_key("f", pa.field("k", kind), argument).to_pylist() == expected
            continue
        with pytest.raises(SchemaError, match=rf"function f: key 'k' .*{expected}"):
            plain_key("f", pa.field("k", kind), argument)


def test_answers_stay_arrow() -> None:
    """pyarrow takes the array itself, without a copy, also from a renamed column. For other types PySpark converts it as before."""
    answers = pa.array([[{"a": 1}], None], pa.list_(pa.struct([("a", pa.int32())])))
    series = arrow_series(answers)
    frame = arrow_frame(pa.StructArray.from_arrays([answers], ["l"]))
    assert len(series) == 2
    for column in (series, frame["l"], frame["l"].rename("other")):
        converted = column.apply(lambda _: 1 / 0)
        assert pa.Array.from_pandas(converted, type=answers.type).equals(answers)
    wider = pa.list_(pa.struct([("a", pa.int64())]))
    assert pa.Array.from_pandas(series, type=wider).type == wider
