"""`register_lookup`: lookup tables as functions of SQL, current at every execution, one version in each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import functions as sf

from pyspark_lookup import register_lookup
from pyspark_lookup.base.errors import OptionError, SchemaError
from pyspark_lookup.spark import sql_functions
from tests.fakes import wait_until_settled
from tests.spark.test_source import Calls, put

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
_names = itertools.count()


@pytest.fixture
def name() -> Iterator[str]:
    """A function's name that no other test uses."""
    yield f"fn_{next(_names)}"


@pytest.fixture
def facts(spark: SparkSession) -> str:
    spark.range(20).selectExpr("id", "CASE WHEN id % 5 < 4 THEN id END AS k").createOrReplaceTempView("function_facts")
    return "function_facts"


def table_of(path: Path, rows: dict[str, list[object]]) -> Path:
    pq.write_table(pa.table(rows), path)
    wait_until_settled(path)
    return path


def test_a_row_by_key(spark: SparkSession, tmp_path: Path, name: str, facts: str) -> None:
    """A struct of the columns that are not keys; null for a key that is null or not there; one HEAD for a statement."""
    path = put(tmp_path / "dim.parquet", 3)
    register_lookup(spark, name, str(path), "id")
    statement = f"SELECT k, {name}(k).version AS v FROM {facts}"
    spark.sql(statement).collect()
    calls = Calls(path)
    rows = {row.k: row.v for row in spark.sql(statement).collect()}
    assert calls.calls() == (1, 0, 0)
    assert rows == {k: 3 if k is not None and k < 10 else None for k in rows}
    assert (
        spark.sql(f"SELECT {name}(CAST(4 AS INT)) AS r").schema["r"].dataType.simpleString() == "struct<version:bigint>"
    )


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT {f}(k).version AS a, {f}(k + 1).version AS b FROM {t} WHERE k BETWEEN 1 AND 5",
        "SELECT a.v AS a, b.v AS b FROM {f}_view a JOIN {f}_view b USING (k)",
        "SELECT max(v) AS a, min(v) AS b FROM (SELECT v FROM {f}_view UNION ALL SELECT {f}(k).version FROM {t})",
        "SELECT {f}(k).version AS a, {f}({f}(k).version).version AS b FROM {t} WHERE k < 3",
    ],
    ids=["two calls", "self join", "union", "nested"],
)
def test_one_version_in_a_statement(spark: SparkSession, tmp_path: Path, name: str, facts: str, statement: str) -> None:
    """However often a statement refers to the function, what it sees is of one version, while the table changes under it."""
    path = put(tmp_path / "dim.parquet", 1)
    register_lookup(spark, name, str(path), "id")
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW {name}_view AS SELECT k, {name}(k).version AS v FROM {facts} WHERE k < 10"
    )
    for version in (2, 3, 4):
        put(path, version)
        rows = spark.sql(statement.format(f=name, t=facts)).collect()
        assert {(row.a, row.b) for row in rows} == {(version, version)}


def test_where_it_may_stand(spark: SparkSession, tmp_path: Path, name: str, facts: str) -> None:
    """In WHERE, JOIN ON, GROUP BY, CASE, windows, aggregates and DataFrame expressions; not in ORDER BY, where a subselect does."""
    path = put(tmp_path / "dim.parquet", 7)
    register_lookup(spark, name, str(path), "id")
    for statement, expected in [
        (f"SELECT count(*) FROM {facts} WHERE {name}(k).version = 7", 8),
        (f"SELECT count(*) FROM {facts} f JOIN (SELECT 7 AS v) o ON {name}(f.k).version = o.v", 8),
        (f"SELECT count(*) FROM {facts} f LEFT JOIN (SELECT 7 AS v) o ON {name}(f.k).version = o.v", 20),
        (
            f"SELECT max(c) FROM (SELECT {name}(k).version AS v, count(*) AS c FROM {facts} GROUP BY {name}(k).version)",
            12,
        ),
        (f"SELECT sum({name}(k).version) FROM {facts}", 56),
        (f"SELECT max(CASE WHEN k > 2 THEN {name}(k).version END) FROM {facts}", 7),
        (
            f"SELECT max(n) FROM (SELECT row_number() OVER (PARTITION BY {name}(k).version ORDER BY id) AS n FROM {facts})",
            12,
        ),
        (f"SELECT first(v) FROM (SELECT {name}(k).version AS v FROM {facts}) ORDER BY 1", 7),
    ]:
        assert spark.sql(statement).collect()[0][0] == expected, statement
    table = spark.table(facts)
    assert table.select(sf.call_function(name, sf.col("k")).version.alias("v")).filter("v = 7").count() == 8
    assert table.filter(sf.expr(f"{name}(k).version = 7")).count() == 8
    for refused in (
        f"SELECT * FROM {facts} ORDER BY {name}(k).version",
        f"SELECT * FROM {facts} LATERAL VIEW inline(array({name}(k))) AS r",
        f"CREATE FUNCTION kept(k BIGINT) RETURN {name}(k)",
    ):
        with pytest.raises(AnalysisException):
            spark.sql(refused).collect()


def test_several_rows_for_a_key(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """`multi`: an array of all rows in file order, empty without any; otherwise a second row is an error that says what to do."""
    path = table_of(tmp_path / "dim.parquet", {"g": ["x", "y", "x"], "n": [1, 2, 3]})
    register_lookup(spark, name, str(path), "g", multi=True)
    (row,) = spark.sql(f"SELECT {name}('x').n AS x, {name}('z') AS z, {name}(NULL) AS nothing").collect()
    assert (row.x, row.z, row.nothing) == ([1, 3], [], [])
    register_lookup(spark, name, str(path), "g")
    assert spark.sql(f"SELECT {name}('y').n").collect()[0][0] == 2
    with pytest.raises(PythonException, match=r"several rows.*g = 'x'.*multi=True"):
        spark.sql(f"SELECT {name}('x').n").collect()


def test_rows_of_a_constant_key(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """`name_rows(key)` is a table: key columns first; none for an absent key or null; nothing is fetched for it when it is known."""
    path = table_of(tmp_path / "dim.parquet", {"n": [1, 2, 3], "g": ["x", "y", "x"], "w h": [None, b"b", b"c"]})
    register_lookup(spark, name, str(path), "g")
    rows = spark.sql(f"SELECT * FROM {name}_rows('x')").collect()
    assert [tuple(row) for row in rows] == [("x", 1, None), ("x", 3, bytearray(b"c"))]
    assert rows[0].asDict().keys() == {"g", "n", "w h"}
    calls = Calls(path)
    assert spark.sql(f"SELECT * FROM {name}_rows('nobody') UNION ALL SELECT * FROM {name}_rows(NULL)").collect() == []
    assert calls.calls()[2] == 0
    assert spark.sql(f"SELECT n FROM {name}_rows(g => 'y')").collect() == [(2,)]


def test_several_keys_and_odd_names(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """Keys are arguments in the order that is given, whatever their names; chosen columns come in the order that is given."""
    rows = {"a b": [1, 1], "version": ["x", "y"], "c.d": [5.0, 6.0], "é`": [True, None]}
    path = table_of(tmp_path / "dim.parquet", rows)
    register_lookup(spark, name, str(path), ["version", "a b"], columns=["é`", "C.D"])
    (row,) = spark.sql(f"SELECT {name}('x', 1) AS r").collect()
    assert row.r.asDict() == {"é`": True, "c.d": 5.0}
    assert [tuple(r) for r in spark.sql(f"SELECT * FROM {name}_rows('y', 1)").collect()] == [("y", 1, None, 6.0)]


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"name": "a-b"}, OptionError, "name"),
        ({"key": "nothing"}, SchemaError, "nothing"),
        ({"key": []}, OptionError, "key"),
        ({"columns": ["nothing"]}, SchemaError, "nothing"),
        ({"columns": []}, OptionError, "columns"),
        ({"table": "no_such_table"}, OptionError, "no_such_table"),
        ({"options": {"lookup.cahce": "FULL"}}, OptionError, "did you mean lookup.cache"),
        ({"options": {"lookup.keys": "version"}}, OptionError, "lookup.keys = 'version' is not what"),
        ({"options": {"lookup.view": "files"}}, OptionError, "lookup.view"),
    ],
)
def test_refusals(
    spark: SparkSession, tmp_path: Path, arguments: dict[str, object], error: type[Exception], says: str
) -> None:
    """Arguments that do not fit are errors when the function is registered, and name what is wrong."""
    given: dict[str, object] = {"name": "fn_bad", "table": str(put(tmp_path / "dim.parquet", 1)), "key": "id"}
    with pytest.raises(error, match=says):
        register_lookup(spark, **{**given, **arguments})  # type: ignore[arg-type]


def test_names_that_sql_must_quote(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """Columns and nested fields with spaces, dashes and backquotes are what they are in the answer."""
    path = table_of(tmp_path / "dim.parquet", {"a b": [1], "c-d": [{"e f": [{"g`h": 7}]}]})
    register_lookup(spark, name, str(path), "a b")
    (row,) = spark.sql(f"SELECT {name}(1) AS r").collect()
    assert row.r.asDict(recursive=True) == {"c-d": {"e f": [{"g`h": 7}]}}
    (row,) = spark.sql(f"SELECT * FROM {name}_rows(1)").collect()
    assert row.asDict(recursive=True) == {"a b": 1, "c-d": {"e f": [{"g`h": 7}]}}


def test_a_lookup_that_cannot_be_registered(
    spark: SparkSession, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both functions of a lookup are replaced, or none: where Spark refuses one, the old ones answer from the old table."""
    old = table_of(tmp_path / "old.parquet", {"id": [1], "v": [1]})
    new = table_of(tmp_path / "new.parquet", {"id": [1], "w": ["x"]})
    register_lookup(spark, name, str(old), "id")
    with monkeypatch.context() as patch:
        body = sql_functions._body
        patch.setattr(
            sql_functions, "_body", lambda *a, **more: body(*a, **more) + (" nonsense" if more.get("as_rows") else "")
        )
        with pytest.raises(AnalysisException):
            register_lookup(spark, name, str(new), "id")
    assert spark.sql(f"SELECT {name}(1).v AS v, r.v AS w FROM {name}_rows(1) r").collect() == [(1, 1)]
    register_lookup(spark, name, str(new), "id")
    assert spark.sql(f"SELECT {name}(1).w AS v, r.w AS w FROM {name}_rows(1) r").collect() == [("x", "x")]


def test_two_lookups_with_a_function_of_one_name(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """A name that is another lookup's table function, or would make that one of the other's, is refused."""
    path = table_of(tmp_path / "dim.parquet", {"id": [1], "v": [1]})
    register_lookup(spark, name, str(path), "id")
    with pytest.raises(OptionError, match=rf"both would have a function {name}_rows\(\)"):
        register_lookup(spark, f"{name}_ROWS", str(path), "id")
    register_lookup(spark, f"{name}_2_rows", str(path), "id")
    with pytest.raises(OptionError, match=f"both would have a function {name}_2_rows"):
        register_lookup(spark, f"{name}_2", str(path), "id")
    assert spark.sql(f"SELECT v FROM {name}_rows(1)").collect() == [(1,)]
