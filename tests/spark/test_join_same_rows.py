"""`lookup_join` gives the rows and the schema of Spark's own join, for every key, value, query and cache mode."""

import decimal
import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import LongType, StringType

from pyspark_lookup import LookupTable, lookup_join
from pyspark_lookup.errors import OptionError, SchemaError
from pyspark_lookup.spark import features
from tests.support.fuzzing import MORE, by_day
from tests.support.spark_columns import FOREIGN, NESTED, PRIMITIVES, SEED, Column, arrow_table, drawn
from tests.support.spark_joins import assert_same, by_spark
from tests.support.spark_tables import FULL, WAYS, catalog_options, saved
from tests.support.sparks import DATA_SOURCES, SQL_FUNCTIONS, UDFS, needs

pytestmark = pytest.mark.spark
Look = Callable[..., DataFrame]
_views = itertools.count()


def by_lookup(way: str) -> Look:
    return functools.partial(lookup_join, **WAYS[way])


def draw_sides(column: Column, *extra: Any) -> tuple[pa.DataType, list[Any], pa.DataType, list[Any]]:
    """Draw keys of one type for both sides: some in common, the first among them, and some on one side only."""
    shared, *values = [*drawn(column.values, 12, f"keys of {column.name}"), *extra]
    third = len(values) // 3
    return column.type, [shared, *values[third:]], column.type, [shared, *values[: 2 * third + 1], *extra]


_EXTRA: dict[str, tuple[Any, ...]] = {
    "single": (math.nan, 0.0, -0.0, math.inf, -math.inf, 2.0**-149),
    "double": (math.nan, 0.0, -0.0, math.inf, -math.inf, 5e-324),
    "name": ("", "é", "e\u0301", "x" * 3000, "x" * 2999 + "y", " x"),
    "bytes": (b"", b"\0", b"\0\0", b"\xff" * 2000),
}
_D = decimal.Decimal
_MOST = 2**31 - 1
_ONE_TYPE = {column.name: draw_sides(column, *_EXTRA.get(column.name, ())) for column in PRIMITIVES} | {
    "whole": (pa.decimal128(38, 0), [_D(10**38 - 1), _D(0), _D(-7)], pa.decimal128(38, 0), [_D(10**38 - 1), _D(-7)]),
    "cents": (pa.decimal128(10, 2), [_D("1.10"), _D("0.00")], pa.decimal128(10, 2), [_D("1.10"), _D("-0.01")]),
}
_TWO_TYPES: dict[str, tuple[pa.DataType, list[Any], pa.DataType, list[Any]]] = {
    "int in long": (pa.int32(), [1, -5, _MOST], pa.int64(), [1, -5, _MOST, _MOST + 1, 2**32 + 1]),
    "byte in short": (pa.int8(), [1, -128, 127], pa.int16(), [1, -128, 128, 257]),
    "long in int": (pa.int64(), [1, -5, 2**32 + 1, -(2**63), 2**63 - 1, _MOST], pa.int32(), [1, -5, -1, 0, _MOST]),
    "long in byte": (pa.int64(), [1, 257, -129, 127], pa.int8(), [1, 127, -128]),
    "finer decimal": (pa.decimal128(12, 4), [_D("1.1000"), _D("1.1001"), _D("99999999.9999")], pa.decimal128(10, 2), [_D("1.10"), _D("99999999.99")]),
    "coarser decimal": (pa.decimal128(5, 1), [_D("1.1"), _D("-0.5")], pa.decimal128(10, 2), [_D("1.10"), _D("-0.55")]),
    "wider decimal": (pa.decimal128(30, 2), [_D("1.10"), _D(10**25)], pa.decimal128(10, 2), [_D("1.10"), _D("7.00")]),
    "int in decimal": (pa.int32(), [1, 2, _MOST], pa.decimal128(10, 2), [_D("1.00"), _D("2.01"), _D("99999999.99")]),
    "long in whole": (pa.int64(), [1, -(2**63)], pa.decimal128(38, 0), [_D(1), _D(-(2**63)), _D(10**37)]),
    "decimal in int": (pa.decimal128(10, 2), [_D("1.00"), _D("1.50"), _D("2.00")], pa.int32(), [1, 2]),
    "whole in long": (pa.decimal128(38, 0), [_D(-3), _D(10**37), _D(2**63)], pa.int64(), [-3, 2**63 - 1]),
    "float in double": (pa.float32(), [0.5, 0.1, math.nan, -0.0], pa.float64(), [0.5, 0.1, math.nan, 0.0]),
    "double in float": (pa.float64(), [0.5, 0.1, math.nan, -0.0, 1e300, math.inf], pa.float32(), [0.5, 0.1, math.nan, 0.0, math.inf]),
    "int in double": (pa.int32(), [3, 0, _MOST], pa.float64(), [3.0, -0.0, 3.5, float(_MOST)]),
}  # fmt: skip
KEYS = _ONE_TYPE | _TWO_TYPES
ON = {f"my {name}": name for name in KEYS}


def varied(side: int) -> pa.Table:
    """For each key column, rows in which it takes each of its values and null, while all other columns keep their first value."""
    first = {name: kinds[2 * side + 1][0] for name, kinds in KEYS.items()}
    rows = [first | {name: value} for name, kinds in KEYS.items() for value in [*kinds[2 * side + 1], None, None]]
    columns = {name: pa.array([row[name] for row in rows], kinds[2 * side]) for name, kinds in KEYS.items()}
    return pa.table({("fact", "row_id")[side]: pa.array(range(len(rows))), **columns})


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(a file of facts, the table's): both with a column of every key type."""
    home, tables = tmp_path_factory.mktemp("keys"), [varied(0).rename_columns(["fact", *ON]), varied(1)]
    facts, dim = (str(saved(home / f"{number}.parquet", rows, 16)) for number, rows in enumerate(tables))
    return facts, dim


@pytest.mark.parametrize(("way", "how", "udfs"), by_day(itertools.product(WAYS, ["left", "inner"], UDFS), 16))
def test_keys_of_every_type_together(
    spark: SparkSession, sides: tuple[str, str], way: str, how: str, udfs: str
) -> None:
    """A key of many columns, of equal and of different types on both sides, finds what it finds in Spark, if one column differs, is null or repeats."""
    facts = spark.read.parquet(sides[0])
    with UDFS[udfs]():
        actual, expected = (
            look(facts, sides[1], ON, how, ["row_id", *KEYS], "of ") for look in (by_lookup(way), by_spark)
        )
    assert_same(actual, expected)
    assert expected.count() > len(KEYS) ** 2


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A table with a column of every type, nested ones and ones that Spark does not write among them."""
    table, _ = arrow_table([*PRIMITIVES, *NESTED, *FOREIGN], random.Random(SEED))
    doubled = pa.concat_tables([table, table.slice(0, 40)])
    return str(saved(tmp_path_factory.mktemp("values") / "dim.parquet", doubled, 16))


@pytest.mark.parametrize(
    ("way", "udfs"),
    by_day([("full", "pandas"), ("full", "Arrow"), ("broadcast", "Arrow"), ("partial", "Arrow"), ("none", "Arrow")], 2),
)
def test_values_of_every_type(spark: SparkSession, values: str, way: str, udfs: str) -> None:
    """Columns of any type, nested ones too, arrive with the table's values, nulls and Spark type."""
    df = spark.range(-5, 300, 1, 3).withColumnRenamed("id", "row_id")
    with UDFS[udfs]():
        actual = by_lookup(way)(df, values, "row_id")
    assert_same(actual, by_spark(df, values, "row_id"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Paths of the facts and of the tables."""
    home, rng = tmp_path_factory.mktemp("shapes"), random.Random(SEED)

    def draw_array(values: Sequence[Any], count: int, kind: pa.DataType | None = None) -> pa.Array:
        return pa.array([None if rng.random() < 0.15 else rng.choice(values) for _ in range(count)], kind or pa.int64())

    codes, text = ["de", "fr", "", "ö", "xx"], pa.string()
    facts = {
        "n": list(range(60)),
        "id": draw_array(range(20), 60),
        "code": draw_array(codes, 60, text),
        "qty": draw_array(range(5), 60),
    }
    score = draw_array([0.5, math.nan, -0.0], 40, pa.float64())
    city = {"Id": draw_array(range(15), 40), "name": draw_array(["x", "y", "é", ""], 40, text), "score": score}
    tables = {
        "facts": pa.table({**facts, "x.y": draw_array(range(9), 60)}),
        "city": pa.table({**city, "code": draw_array(codes[:4], 40, text)}),
        "country": pa.table({"code": codes[:3] * 2, "Land": ["D", "F", None, "D2", None, "?"]}),
        "odd": pa.table({name: draw_array(range(4), 12) for name in ("k.1 ü`", "a.b", "c d", "e`f", "größe", "x,y")}),
        "many": pa.table({"id": [n % 5000 for n in range(15_000)], "v": list(range(15_000))}),
    }
    return SimpleNamespace(**{name: str(saved(home / f"{name}.parquet", table, 16)) for name, table in tables.items()})


def viewed(df: DataFrame, query: str) -> DataFrame:
    """The answer of SQL over a view of a DataFrame, which is `{v}` in the query."""
    name = f"view_of_joined_{next(_views)}"
    df.createOrReplaceTempView(name)
    return df.sparkSession.sql(query.format(v=name))


plus_one = sf.udf(lambda number: None if number is None else number + 1, LongType())
doubled = sf.udf(lambda number: number and number * 2, LongType())
if features.ARROW_UDFS:
    doubled = sf.arrow_udf(lambda numbers: pc.multiply(numbers, 2), LongType())


@sf.pandas_udf(StringType())
def louder(texts: pd.Series) -> pd.Series:
    return texts.str.upper() + "!"


def with_itself(df: DataFrame) -> DataFrame:
    return df.alias("l").join(df.alias("r"), "n").select("n", "l.name", "r.score")


# Several lookups, of few or no columns, in an empty table: `test_lookup_pass.test_generated_chains`.
SHAPES: dict[str, Callable[[DataFrame, Look, SimpleNamespace], DataFrame]] = {
    "a dict": lambda df, look, t: look(df, t.city, {"qty": "Id"}, "leftouter", prefix="c_"),
    "letter case": lambda df, look, t: look(df, t.city, {"ID": "iD", "CODE": "Code"}, "INNER", ["NAME", "sCore"]),
    "one df column for two": lambda df, look, t: look(df, t.many, {"id": "id", "ID": "v"}, "left", []),
    "a dotted key": lambda df, look, t: look(df, t.city, {"x.y": "id"}, "left", ["name"]),
    "odd names, all": lambda df, look, t: look(df, t.odd, {"x.y": "K.1 Ü`"}, "inner", prefix="ü.`").filter("`ü.``a.b` > 0"),
    "empty partitions": lambda df, look, t: look(df.sparkSession.range(0, 3, 1, 8), t.city, "id", "left"),
    "a null": lambda df, look, t: look(df.withColumn("k", sf.lit(None)), t.city, {"k": "id"}, "left", ["name"]),
    "filter of both": lambda df, look, t: look(df, t.city, "id", "inner", ["name", "score"]).filter("name <> code or n + score > 3"),
    "filter on the key": lambda df, look, t: look(df, t.city, "id", "inner", ["name"]).filter("id = 3 and id = qty"),
    "aggregation": lambda df, look, t: look(df, t.city, "id", "left", ["name", "score"]).groupBy("name").agg(sf.count("*"), sf.sum("n"), sf.max("score")),
    "joined to itself": lambda df, look, t: with_itself(look(df, t.city, "id", "left", ["name", "score"])),
    "udfs of what was found": lambda df, look, t: look(df, t.city, "id", "left", ["name", "Id"], "c_").select("n", louder("c_name"), plus_one("c_Id"), doubled("c_Id"), doubled("n")),
    "udfs around": lambda df, look, t: look(df.withColumn("k", doubled(plus_one("qty"))), t.city, {"k": "id"}, "left", ["name", "Id"], "c_").withColumn("m", plus_one("c_Id")).filter(plus_one("n") > 5).filter(louder("c_name") == "X!"),
    "sql": lambda df, look, t: viewed(look(df, t.city, "id", "left", ["name"]),"SELECT name, count(*) c FROM {v} WHERE n IN (SELECT n FROM {v} WHERE qty > 1) GROUP BY ALL HAVING c > 1"),
    "two columns of one name": lambda df, look, t: look(df.select("*", sf.col("qty").alias("n")), t.city, "id", "left", ["name"]),
    "a name that looks reserved": lambda df, look, t: look(df.withColumn("_lookup_key_0", sf.lit(7)), t.city, "id", "left", ["name"]),
    "many rows": lambda df, look, t: look(df.sparkSession.range(0, 40_000, 1, 2).selectExpr("id % 6000 id"), t.many, "id", "left").agg(sf.count("*"), sf.count("v"), sf.sum("v"), sf.sum(sf.xxhash64("id", "v") % 1000)),
}  # fmt: skip


@pytest.mark.parametrize("shape", by_day(SHAPES, 2))
def test_queries(spark: SparkSession, files: SimpleNamespace, shape: str) -> None:
    """A query around a lookup join has the same rows and schema as around Spark's join; by day each query is tried in one way."""
    df = spark.read.parquet(files.facts)
    expected = SHAPES[shape](df, by_spark, files)
    turn = list(SHAPES).index(shape) % len(WAYS)
    for way in WAYS if MORE > 1 else [list(WAYS)[turn]]:
        assert_same(SHAPES[shape](df, by_lookup(way), files), expected, way)


@needs(DATA_SOURCES)
def test_tables_given_otherwise(spark: SparkSession, files: SimpleNamespace, name: str) -> None:
    """A catalog table's name and a LookupTable mean the table whose path they have. A Column, which only Spark's own join takes, is refused."""
    df = spark.read.parquet(files.facts)
    expected = by_spark(df, files.city, "id", "left", ["name", "score"])
    spark.sql(f"CREATE TABLE {name} {catalog_options(files.city)}")
    for table in (name, f"default.{name.upper()}", LookupTable(files.city, {"lookup.keys": "Id"})):
        actual = lookup_join(df, table, "id", "left", ["name", "score"], strategy="cache", options=FULL)
        assert_same(actual, expected)
        for on in (sf.col("id"), df["id"] == sf.col("Id"), [sf.col("id")]):
            with pytest.raises(OptionError, match="argument on"):
                lookup_join(df, table, on, columns=["name"])  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["left", "inner"])
def test_plans(spark: SparkSession, files: SimpleNamespace, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The lookup is evaluated once; a filter on the DataFrame's column reaches its files, one on the table's is above."""
    df = lookup_join(spark.read.parquet(files.facts), files.city, "id", how, ["name"], strategy="cache", options=FULL)
    capsys.readouterr()
    df.filter("name = 'x' and id > 5").explain()
    lines = capsys.readouterr().out.splitlines()
    evaluated, scan = (
        next(n for n, line in enumerate(lines) if part in line) for part in ("ArrowEvalPython", "FileScan")
    )
    assert sum("ArrowEvalPython" in line for line in lines) == 1
    assert max(n for n, line in enumerate(lines) if "= x" in line) < evaluated < scan
    assert "GreaterThan(id,5)" in lines[scan].partition("PushedFilters")[2]


MISTAKES: list[tuple[type[Exception], dict[str, Any], str]] = [
    (OptionError, {"on": []}, "argument on"),
    (OptionError, {"on": {"id": "id", "n": "ID"}}, "given twice"),
    (SchemaError, {"on": {"idd": "id"}}, "no column 'idd'"),
    (SchemaError, {"df": ["*", "n AS ID"]}, "several columns 'id'"),
    (SchemaError, {"columns": ["name", "nam"]}, "no column 'nam'"),
    (SchemaError, {"columns": ["name", "NAME"]}, "given twice"),
    (OptionError, {"columns": ["code"]}, "'code'.*prefix="),
    (OptionError, {"df": ["id", "n AS c_name"], "prefix": "c_"}, "'c_name'"),
    (OptionError, {"how": "full"}, "argument how = 'full'.*'left', 'inner'"),
    (OptionError, {"strategy": "hash"}, "argument strategy = 'hash'"),
    (OptionError, {"lookup.cach": "FULL"}, "lookup.cach"),
    (OptionError, {"lookup.keys": "name"}, "lookup.keys = 'name' differs from the argument `on`"),
    (OptionError, {"lookup.columns": "name"}, "lookup.columns"),
    (OptionError, {"strategy": "broadcast", "lookup.on-error": "NULL"}, "on-error.*cache"),
    (OptionError, {"lookup.write.mode": "upsert"}, "lookup.write.mode is for writes"),
    (OptionError, {"table": "no_city"}, r"'no_city'.*no such table.*\./no_city"),
    (OptionError, {"table": None}, "table is None"),
    (OptionError, {"df": ["*", "1 AS _lookup_version"]}, "_lookup_version"),
    (OptionError, {"df": ["id", "1 AS lookup_error"], "lookup.on-error": "NULL"}, "lookup_error"),
    (SchemaError, {"df": ["code AS id"]}, "string.*bigint"),
    (SchemaError, {"on": {"n": "name"}}, "bigint.*string"),
    (SchemaError, {"table": "values", "df": ["now() AS day"]}, "timestamp.*date"),
    (SchemaError, {"table": "values", "df": ["array(1L) AS list"]}, "array<bigint>.*array<bigint>"),
]

if SQL_FUNCTIONS:  # a Spark with them has variants and collations, too
    MISTAKES += [
        (SchemaError, {"df": ["parse_json('3') AS id"]}, "variant.*bigint"),
        (SchemaError, {"df": ["code COLLATE UTF8_LCASE AS name"], "on": "name", "columns": ["score"]}, "UTF8_LCASE"),
    ]


def test_mistakes(spark: SparkSession, files: SimpleNamespace, values: str) -> None:
    """A join that cannot work is refused when it is built, with the name of the argument or column, or the types."""
    facts = spark.read.parquet(files.facts)
    for error, arguments, message in MISTAKES:
        arguments = {"df": ["*"], "table": "city", **arguments}
        df = facts.selectExpr(*arguments.pop("df"))
        table = arguments.pop("table")
        on = arguments.pop("on", df.columns[0] if table == "values" else "id")
        columns = arguments.pop("columns", ["name"] if table == "city" else [])
        options = {name: arguments.pop(name) for name in list(arguments) if name.startswith("lookup.")}
        place = {"values": values, "city": files.city}.get(str(table), table)
        with pytest.raises(error, match=f"(?s){message}"):
            lookup_join(df, place, on, columns=columns, options=options, **arguments)
