"""`register_lookup`: lookup tables as functions of SQL, current at every execution, one version in each."""

import concurrent.futures
import threading
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from pyspark_lookup import register_lookup
from pyspark_lookup.errors import OptionError, SchemaError
from pyspark_lookup.spark import sql_functions
from tests.support.spark_tables import Calls, publish_version, saved
from tests.support.sparks import SQL_FUNCTIONS, needs

pytestmark = [pytest.mark.spark, needs(SQL_FUNCTIONS)]


@pytest.fixture
def facts(spark: SparkSession) -> str:
    spark.range(20).selectExpr("id", "CASE WHEN id % 5 < 4 THEN id END AS k").createOrReplaceTempView("function_facts")
    return "function_facts"


def test_one_version_in_a_statement(spark: SparkSession, tmp_path: Path, name: str, facts: str) -> None:
    """However often a statement refers to the function, it sees one version while the table changes, and costs one HEAD."""
    path = publish_version(tmp_path / "dim.parquet", 1)
    register_lookup(spark, name, str(path), "id")
    kind = spark.sql(f"SELECT {name}(CAST(4 AS INT)) AS r").schema["r"].dataType
    assert kind.simpleString() == "struct<version:bigint>"
    whole = spark.sql(f"SELECT k, {name}(k).version AS v FROM {facts}")
    view = f"SELECT k, {name}(k).version AS v FROM {facts} WHERE k < 10"
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW {name}_view AS {view}")
    for version in (2, 3):
        publish_version(path, version)
        for statement in (
            f"SELECT {name}(k).version AS a, {name}(k + 1).version AS b FROM {facts} WHERE k BETWEEN 1 AND 5",
            f"SELECT a.v AS a, b.v AS b FROM {name}_view a JOIN {name}_view b USING (k)",
            f"SELECT max(v) AS a, min(v) AS b FROM (SELECT v FROM {name}_view UNION ALL SELECT {name}(k).version FROM {facts})",
            f"SELECT {name}(k).version AS a, {name}({name}(k).version).version AS b FROM {facts} WHERE k < 3",
        ):
            rows = spark.sql(statement).collect()
            assert {(row.a, row.b) for row in rows} == {(version, version)}, statement
        calls = Calls(path)
        expected = {k: version if k is not None and k < 10 else None for k in (*range(20), None)}
        assert all(row.v == expected[row.k] for row in whole.select("*").collect())
        assert calls.calls() == (1, 0, 0)


def test_threads_that_register_one_name(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """No thread gets an error from Spark, and the function belongs to one lookup: its version is that of the table that its rows come from."""
    paths = [str(saved(tmp_path / f"{number}.parquet", {"id": [1], "number": [number]})) for number in range(3)]
    ready = threading.Barrier(len(paths))

    def register(path: str) -> None:
        ready.wait()
        register_lookup(spark, name, path, "id")

    for _ in range(2):
        with concurrent.futures.ThreadPoolExecutor(len(paths)) as pool:
            list(pool.map(register, paths))
        assert spark.sql(f"SELECT {name}(1).number").first()[0] in range(3)
        assert spark.sql("SHOW USER FUNCTIONS LIKE '*_lookup_tried_*'").collect() == []


STANDS: list[tuple[str, int]] = [
    ("SELECT count(*) FROM {t} WHERE {f}(k).version = 7", 8),
    ("SELECT count(*) FROM {t} f LEFT JOIN (SELECT 7 AS v) o ON {f}(f.k).version = o.v", 20),
    ("SELECT max(c) FROM (SELECT {f}(k).version AS v, count(*) AS c FROM {t} GROUP BY {f}(k).version)", 12),
    ("SELECT max(CASE WHEN k > 2 THEN {f}(k).version END) FROM {t}", 7),
    ("SELECT max(n) FROM (SELECT row_number() OVER (PARTITION BY {f}(k).version ORDER BY id) AS n FROM {t})", 12),
]


def test_where_it_may_stand(spark: SparkSession, tmp_path: Path, name: str, facts: str) -> None:
    """A function may stand in WHERE, JOIN ON, GROUP BY, CASE, windows and DataFrame expressions."""
    register_lookup(spark, name, str(publish_version(tmp_path / "dim.parquet", 7)), "id")
    for statement, expected in STANDS:
        assert spark.sql(statement.format(f=name, t=facts)).collect()[0][0] == expected, statement
    versions = spark.table(facts).select(sf.call_function(name, sf.col("k")).version.alias("v"))
    assert versions.filter("v = 7").count() == 8


def test_rows_of_a_key(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """`name_rows(key)` is a table of all rows, `multi` an array of them; otherwise a second row is an error that says what to do."""
    rows = {"n": [1, 2, 3], "g": ["x", "y", "x"], "w h": [None, b"b", b"c"]}
    path = saved(tmp_path / "dim.parquet", rows)
    register_lookup(spark, name, str(path), "g", multi=True)
    (row,) = spark.sql(f"SELECT {name}('x').n AS x, {name}('z') AS z, {name}(NULL) AS nothing").collect()
    assert (row.x, row.z, row.nothing) == ([1, 3], [], [])
    register_lookup(spark, name, str(path), "g")
    assert spark.sql(f"SELECT {name}('y').n").collect() == [(2,)]
    with pytest.raises(PythonException, match=r"several rows.*g = 'x'.*multi=True"):
        spark.sql(f"SELECT {name}('x').n").collect()
    # Spark also calls the function for the rows of ELSE, so their keys must be null.
    source = "FROM VALUES ('x'), ('y') AS t(g)"
    with pytest.raises(PythonException, match="several rows"):
        spark.sql(f"SELECT CASE WHEN g = 'y' THEN {name}(g).n END AS n {source}").collect()
    frame = spark.sql(f"SELECT {name}(CASE WHEN g = 'y' THEN g END).n AS n {source}")
    assert frame.collect() == [(None,), (2,)]
    key_rows = spark.sql(f"SELECT * FROM {name}_rows('x')").collect()
    assert [row.asDict() for row in key_rows] == [{"g": "x", "n": 1, "w h": None}, {"g": "x", "n": 3, "w h": b"c"}]
    calls = Calls(path)
    assert spark.sql(f"SELECT * FROM {name}_rows('nobody') UNION ALL SELECT * FROM {name}_rows(NULL)").collect() == []
    assert calls.calls()[2] == 0
    assert spark.sql(f"SELECT n FROM {name}_rows(g => 'y')").collect() == [(2,)]


def test_several_keys_and_odd_names(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """Arguments and columns come in the order in which they were named, whatever characters the names have."""
    rows = {"a b": [1, 1], "version": ["x", "y"], "c.d": [5.0, 6.0], "é`": [True, None]}
    path = saved(tmp_path / "dim.parquet", {**rows, "e-f": [{"g h": [{"i`j": 7}]}, None]})
    register_lookup(spark, name, str(path), ["version", "a b"], columns=["é`", "C.D", "e-f"])
    expected = [("é`", True), ("c.d", 5.0), ("e-f", {"g h": [{"i`j": 7}]})]
    for query, keys in (
        (f"SELECT found.* FROM (SELECT {name}('x', 1) AS found)", []),
        (f"SELECT * FROM {name}_rows('x', 1)", [("version", "x"), ("a b", 1)]),
    ):
        (row,) = spark.sql(query).collect()
        assert list(row.asDict(recursive=True).items()) == keys + expected


def test_refusals(spark: SparkSession, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments that do not fit are errors that name what is wrong. Both functions of a lookup are replaced, or none."""
    old = saved(tmp_path / "old.parquet", {"id": [1], "v": [1]})
    new = saved(tmp_path / "new.parquet", {"id": [1], "w": ["x"]})
    register_lookup(spark, name, str(old), "id")
    register_lookup(spark, f"{name}_2_rows", str(old), "id")
    refused: list[tuple[dict[str, object], type[Exception], str]] = [
        ({"name": "a-b"}, OptionError, "name"),
        ({"name": f"{name}_ROWS"}, OptionError, rf"both would have a function {name}_rows\(\)"),
        ({"name": f"{name}_2"}, OptionError, f"both would have a function {name}_2_rows"),
        ({"key": "nothing"}, SchemaError, "nothing"),
        ({"columns": ["nothing"]}, SchemaError, "nothing"),
        ({"table": "no_such_table"}, OptionError, "no_such_table"),
        ({"options": {"lookup.keys": "v"}}, OptionError, "lookup.keys = 'v' differs from the argument"),
        ({"options": {"lookup.view": "files"}}, OptionError, "lookup.view"),
    ]
    for arguments, error, says in refused:
        with pytest.raises(error, match=says):
            register_lookup(spark, **{"name": name, "table": str(new), "key": "id", **arguments})  # type: ignore[arg-type]
    body = sql_functions._body

    def broken(*arguments: object, **more: object) -> str:
        return body(*arguments, **more) + (" nonsense" if more.get("as_rows") else "")  # type: ignore[arg-type]

    with monkeypatch.context() as patch, pytest.raises(AnalysisException):
        patch.setattr(sql_functions, "_body", broken)
        register_lookup(spark, name, str(new), "id")
    assert spark.sql(f"SELECT {name}(1).v AS v, r.v AS w FROM {name}_rows(1) r").collect() == [(1, 1)]
    register_lookup(spark, name, str(new), "id")
    assert spark.sql(f"SELECT {name}(1).w AS v, r.w AS w FROM {name}_rows(1) r").collect() == [("x", "x")]


@pytest.mark.nightly
def test_a_table_that_is_gone(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """The error is one line of ours below Spark's header; with `lookup.on-error=NULL` a column; a query without rows raises none."""
    path = publish_version(tmp_path / "dim" / "a.parquet", 1)
    options = {"lookup.busy-wait": "0 s"}
    register_lookup(spark, name, str(path.parent), "id", options=options)
    register_lookup(spark, f"{name}_lenient", str(path.parent), "id", options={**options, "lookup.on-error": "NULL"})
    path.unlink()
    path.parent.rmdir()
    with pytest.raises(PythonException) as caught:
        spark.sql(f"SELECT {name}(1).version, r.* FROM {name}_rows(1) r").collect()
    lines = str(caught.value).strip().splitlines()
    assert lines[1:] == [f"pyspark_lookup.errors.UfsNotFoundError: file://{path.parent} does not exist"]
    assert spark.sql(f"SELECT {name}(id) FROM range(0)").collect() == []
    ((answer,),) = spark.sql(f"SELECT {name}_lenient(1)").collect()
    assert (answer.version, answer.lookup_error) == (None, f"UfsNotFoundError: file://{path.parent} does not exist")
