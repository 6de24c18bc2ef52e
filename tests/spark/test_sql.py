"""Every statement of Spark's SQL against a catalog table: it works, or it fails and says what does; nothing else is written."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as sf

from pyspark_lookup import LookupTable, lookup_join
from pyspark_lookup.base.errors import OptionError
from pyspark_lookup.spark.types import SPARK
from tests.fuzzing import by_day
from tests.spark.common import catalog_options, load

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.readwriter import DataFrameWriter

pytestmark = pytest.mark.spark

_names = itertools.count()
ROWS = [(1, "a"), (2, "b")]
LOST = "this table's options are lost"
UNKNOWN = "which table is written cannot be told"


@dataclasses.dataclass(frozen=True)
class Gives:
    """The statement's own rows, in any order; `dim` stays as it was."""

    rows: Sequence[object]


@dataclasses.dataclass(frozen=True)
class Leaves:
    """What `dim` has afterwards."""

    rows: Sequence[object]


@dataclasses.dataclass(frozen=True)
class Fails:
    """The statement fails with these words, and changes no table. `reads`: `dim` can be read afterwards."""

    words: str
    reads: bool = True


Expected = Gives | Leaves | Fails


class Tables:
    """In one directory: the managed tables `dim` (which a case may change), `other` (the same columns), `nums` (no text),
    catalog tables `listed` (a column list) and `copied` (a Parquet copy of `other`), views `src` and `named` of rows.
    """

    def __init__(self, spark: SparkSession, home: Path) -> None:
        self.spark, self.home = spark, home
        rows = pa.table({"id": pa.array([1, 2], pa.int32()), "name": ["a", "b"]})
        more = pa.table({"id": pa.array([1, 2, 9], pa.int32()), "name": ["a", "b", "other"]})
        for name, columns in (("other", more), ("nums", rows.select(["id"]))):
            LookupTable(str(home / name), {"lookup.keys": "id"}).write(columns)
            spark.sql(f"CREATE TABLE {name} USING lookupcache OPTIONS (path '{home / name}')")
        spark.sql(f"CREATE TABLE listed (id INT, name STRING) USING lookupcache OPTIONS (path '{home / 'other'}')")
        spark.sql("CREATE TABLE copied USING parquet AS SELECT * FROM other")
        frame = spark.createDataFrame([(3, "c")], "id int, name string")
        frame.createOrReplaceTempView("src")
        frame.selectExpr("name", "id").createOrReplaceTempView("named")
        self.rows = rows
        self.make()

    def make(self) -> None:
        """`dim` anew, at a place of its own."""
        self.spark.sql("DROP TABLE IF EXISTS dim")
        self.path = self.home / f"dim{next(_names)}"
        LookupTable(str(self.path), {"lookup.keys": "id"}).write(self.rows)
        self.spark.sql(f"CREATE TABLE dim USING lookupcache OPTIONS (path '{self.path}')")

    def run(self, *statements: str) -> list[tuple[object, ...]]:
        """The rows of the last of some statements."""
        found: list[tuple[object, ...]] = []
        for statement in statements:
            made = self.spark.sql(statement.format(home=self.home, dim=self.path))
            found = [tuple(row) for row in made.collect()]
        return found

    @contextlib.contextmanager
    def kept(self, changes: bool = True) -> Iterator[None]:
        """Nothing but `dim` is changed meanwhile; that one is made anew afterwards if it is."""
        was, beside = self.path, self.held(without=self.path)
        try:
            yield
        finally:
            self.spark.sql("DROP TABLE IF EXISTS made")
            for view in ("shown", "dim"):
                self.spark.catalog.dropTempView(view)
            shutil.rmtree(was.with_name(f"{was.name}-made"), ignore_errors=True)
            if changes:
                self.make()
        assert {name: n for name, n in self.held(without=self.path).items() if name != was.name} == beside

    def dim(self) -> list[tuple[object, ...]]:
        return sorted((tuple(row) for row in self.spark.table("dim").collect()), key=repr)

    def held(self, without: Path | None = None) -> dict[str, int]:
        """How many files each directory has."""
        return {p.name: sum(1 for _ in p.rglob("*")) for p in self.home.iterdir() if p != without}

    def close(self) -> None:
        for name in ("dim", "other", "nums", "listed", "copied", "made"):
            self.spark.sql(f"DROP TABLE IF EXISTS {name}")
        for name in ("src", "named", "shown"):
            self.spark.catalog.dropTempView(name)


@pytest.fixture(scope="module")
def tables(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tables]:
    found = Tables(spark, tmp_path_factory.mktemp("sql"))
    yield found
    found.close()


NEW = "CREATE TABLE made USING lookupcache OPTIONS (path '{dim}-made', 'lookup.schema' 'id INT, name STRING', 'lookup.keys' 'id', 'lookup.create-if-not-exists' 'true')"
MADE = "CREATE TABLE made USING lookupcache OPTIONS (path '{dim}')"
UPSERT = "INSERT INTO dim WITH ('lookup.write.mode' 'upsert')"
ADD = "ALTER TABLE dim ADD COLUMN x INT"
RENAME = "ALTER TABLE dim RENAME COLUMN name TO title"
TYPE = "ALTER TABLE dim ALTER COLUMN id TYPE BIGINT"
FIRST = "ALTER TABLE dim ALTER COLUMN name FIRST"
PARTITIONS = "does not support partition management"

CREATES: list[tuple[str, Expected]] = [
    (NEW + "; INSERT INTO made VALUES (1, 'n'); SELECT * FROM made", Gives([(1, "n")])),
    (NEW + "; SELECT count(*) FROM made", Gives([(0,)])),
    (NEW + "; DROP TABLE made; " + NEW + "; SELECT count(*) FROM made", Gives([(0,)])),
    (NEW.replace("{dim}-made", "{dim}") + "; SELECT * FROM made", Gives(ROWS)),
    (NEW.replace("{dim}-made", "{dim}").replace("STRING", "DOUBLE"), Fails("is a table with the columns id INT, name STRING")),
    (NEW.replace("{dim}-made", "{home}"), Fails("holds files that format\\('lookupcache'\\) did not write")),
    ("CREATE TABLE made USING lookupcache OPTIONS (path '{dim}-x', 'lookup.create-if-not-exists' 'true')", Fails("needs lookup.schema")),
    ("CREATE TABLE made USING lookupcache OPTIONS (path '{dim}-x', 'lookup.create-if-not-exists' 'maybe')", Fails("expected true or false")),
    ("CREATE TABLE made USING lookupcache OPTIONS (path '{dim}-x')", Fails("UfsNotFoundError")),
    ("CREATE TABLE made USING lookupcache", Fails("option path is missing: CREATE TABLE")),
    ("CREATE EXTERNAL TABLE made USING lookupcache LOCATION '{dim}'; SELECT * FROM made", Gives(ROWS)),
    ("CREATE TABLE IF NOT EXISTS dim USING lookupcache OPTIONS (path '{home}/other')", Leaves(ROWS)),
    ("CREATE OR REPLACE TABLE dim USING lookupcache LOCATION '{home}/other'; INSERT INTO dim WITH (path '{dim}') VALUES (3, 'c')", Leaves([*ROWS, (9, "other")])),
    ("REPLACE TABLE dim USING lookupcache LOCATION '{dim}'; INSERT INTO dim VALUES (3, 'c')", Leaves([*ROWS, (3, "c")])),
    ("CREATE TABLE made USING lookupcache LOCATION '{dim}' COMMENT 'ours' TBLPROPERTIES ('team' = 'x'); SELECT * FROM made", Gives(ROWS)),
    ("CREATE TABLE made USING lookupcache LOCATION '{dim}' TBLPROPERTIES ('lookup.cache' = 'FULL')", Fails(r"put it into OPTIONS \(")),
    ("CREATE TABLE made USING lookupcache OPTIONS (path '{dim}') PARTITIONED BY (id)", Fails("partitioning when the table schema is not defined")),
    ("CREATE TABLE made USING lookupcache OPTIONS (path '{dim}') CLUSTERED BY (id) INTO 4 BUCKETS", Fails("partitioning when the table schema")),
    ("SELECT * FROM listed", Fails(LOST)),
    ("INSERT INTO listed VALUES (1, 'a')", Fails(UNKNOWN)),
    ("INSERT INTO listed SELECT * FROM other", Fails(UNKNOWN)),
    ("INSERT INTO listed SELECT id, CAST(name AS STRING) AS name FROM other", Fails(UNKNOWN)),
    ("CREATE TABLE made USING lookupcache OPTIONS (path '{dim}-x') AS SELECT * FROM src", Fails(UNKNOWN)),
    ("CREATE TABLE made USING lookupcache OPTIONS (path '{dim}-x') AS SELECT * FROM dim", Fails(UNKNOWN)),
    ("CREATE TABLE made USING lookupcache OPTIONS (path '{dim}-x') AS SELECT id, CAST(name AS STRING) AS name FROM dim", Fails(UNKNOWN)),
    ("CREATE TABLE made USING lookupcache AS SELECT id, upper(name) AS name FROM dim", Fails(UNKNOWN)),
    ("CREATE TABLE made USING parquet AS SELECT * FROM dim; INSERT INTO made VALUES (3, 'c'); SELECT * FROM made", Gives([*ROWS, (3, "c")])),
    ("CREATE TABLE made (id INT, name STRING) USING parquet; INSERT INTO made SELECT * FROM dim; SHOW COLUMNS IN made", Gives([("id",), ("name",)])),
    ("CREATE TEMPORARY VIEW shown USING lookupcache OPTIONS (path '{dim}'); INSERT INTO shown VALUES (3, 'c')", Leaves([*ROWS, (3, "c")])),
    ("CREATE VIEW seen AS SELECT id FROM dim; SELECT * FROM seen; DROP VIEW seen", Leaves(ROWS)),
    ("DROP TABLE dim PURGE; CREATE TABLE dim USING lookupcache LOCATION '{dim}'", Leaves(ROWS)),
]  # fmt: skip

ALTERS: list[tuple[str, Expected]] = [
    # New columns are null until the first INSERT, which adds them to the table.
    (ADD, Leaves([(1, "a", None), (2, "b", None)])),
    (ADD + "; SELECT id FROM dim WHERE x IS NULL", Gives([(1,), (2,)])),
    (ADD + "; INSERT INTO dim VALUES (3, 'c', 7)", Leaves([(1, "a", None), (2, "b", None), (3, "c", 7)])),
    (ADD + "; INSERT INTO dim VALUES (3, 'c', 7); CREATE TABLE made USING lookupcache LOCATION '{dim}'; SELECT x FROM made", Gives([(None,), (None,), (7,)])),
    (ADD + "; SELECT * FROM dim WITH ('lookup.cache' 'FULL')", Gives([(1, "a", None), (2, "b", None)])),
    ("ALTER TABLE dim ADD COLUMNS (x STRING FIRST, y INT); INSERT INTO dim VALUES ('x', 3, 'c', 7)", Leaves([("x", 3, "c", 7), (None, 1, "a", None), (None, 2, "b", None)])),
    (ADD + "; CREATE TABLE made USING lookupcache OPTIONS (path '{dim}-x') AS SELECT * FROM dim", Fails(UNKNOWN)),
    # What the catalog alone has changed.
    (RENAME + "; SELECT * FROM dim", Fails("'title' is 'name' in the table.*CREATE VIEW", reads=False)),
    (RENAME + "; INSERT INTO dim VALUES (3, 'c')", Fails("'title' is 'name' in the table.*CREATE VIEW", reads=False)),
    (RENAME + "; ALTER TABLE dim RENAME COLUMN title TO name; INSERT INTO dim VALUES (3, 'c')", Leaves([*ROWS, (3, "c")])),
    (TYPE, Leaves(ROWS)),
    (TYPE + "; INSERT INTO dim VALUES (3, 'c')", Fails("'id' is INT in the table and BIGINT in the rows.*DROP TABLE there")),
    (FIRST, Leaves([("a", 1), ("b", 2)])),
    (FIRST + "; INSERT INTO dim VALUES ('c', 3)", Leaves([("a", 1), ("b", 2), ("c", 3)])),
    ("ALTER TABLE dim ALTER COLUMN name COMMENT 'its name'; INSERT INTO dim VALUES (3, 'c')", Leaves([*ROWS, (3, "c")])),
    ("ALTER TABLE dim CHANGE COLUMN name name STRING COMMENT 'its name'; INSERT INTO dim VALUES (3, 'c')", Leaves([*ROWS, (3, "c")])),
    ("ALTER TABLE dim ALTER COLUMN name SET DEFAULT 'q'; INSERT INTO dim (id) VALUES (3)", Leaves([*ROWS, (3, "q")])),
    ("ALTER TABLE dim ALTER COLUMN id DROP NOT NULL; INSERT INTO dim VALUES (3, 'c')", Leaves([*ROWS, (3, "c")])),
    ("ALTER TABLE dim ALTER COLUMN id SET NOT NULL", Fails("Cannot change nullable column to non-nullable")),
    ("ALTER TABLE dim REPLACE COLUMNS (id INT); SELECT * FROM dim", Fails(LOST, reads=False)),
    ("ALTER TABLE dim REPLACE COLUMNS (id INT); INSERT INTO dim VALUES (3)", Fails(UNKNOWN, reads=False)),
    ("ALTER TABLE dim RENAME TO made; INSERT INTO made VALUES (3, 'c'); ALTER TABLE made RENAME TO dim", Leaves([*ROWS, (3, "c")])),
    # Spark tells nobody of these: the options of CREATE TABLE stay.
    ("ALTER TABLE dim SET LOCATION '{home}/other'; INSERT INTO dim VALUES (3, 'c')", Leaves([*ROWS, (3, "c")])),
    ("ALTER TABLE dim SET TBLPROPERTIES ('path' = '{home}/other', 'a' = 'b'); INSERT INTO dim VALUES (3, 'c')", Leaves([*ROWS, (3, "c")])),
    ("ALTER TABLE dim UNSET TBLPROPERTIES ('a')", Leaves(ROWS)),
    ("ALTER TABLE dim CLUSTER BY (id); INSERT INTO dim VALUES (3, 'c')", Leaves([*ROWS, (3, "c")])),
    ("COMMENT ON TABLE dim IS 'ours'; INSERT INTO dim VALUES (3, 'c')", Leaves([*ROWS, (3, "c")])),
    # What Spark refuses.
    ("ALTER TABLE dim SET SERDEPROPERTIES ('lookup.cache' = 'FULL')", Fails("not supported for v2 tables")),
    ("ALTER TABLE dim ADD PARTITION (id = 1)", Fails(PARTITIONS)),
    ("ALTER TABLE dim DROP PARTITION (id = 1)", Fails(PARTITIONS)),
    ("ALTER TABLE dim PARTITION (id = 1) RENAME TO PARTITION (id = 2)", Fails(PARTITIONS)),
    ("ALTER TABLE dim RECOVER PARTITIONS", Fails("not supported for v2 tables")),
    ("ALTER TABLE dim ADD CONSTRAINT positive CHECK (id > 0)", Fails("does not support table constraint")),
]  # fmt: skip
LIKE = "CREATE TABLE made LIKE dim"
ALTERS += [
    ("ALTER TABLE dim DROP COLUMN id", Leaves([("a",), ("b",)])),
    (
        "ALTER TABLE dim DROP COLUMN id; INSERT INTO dim VALUES ('c')",
        Fails("the rows have no key column 'id'", reads=False),
    ),
    ("ALTER TABLE dim DROP COLUMN name; SELECT * FROM dim", Fails(LOST, reads=False)),
    ("ALTER TABLE dim DROP COLUMN name; INSERT INTO dim VALUES (3)", Fails(UNKNOWN, reads=False)),
    # To Spark 4.1 it is another name of the same table.
    (LIKE, Fails("does not support CREATE TABLE LIKE"))
    if SPARK >= (4, 2)
    else (f"{LIKE}; SELECT * FROM made", Gives(ROWS)),
]

WRITES: list[tuple[str, Expected]] = [
    ("INSERT INTO dim SELECT * FROM src", Leaves([*ROWS, (3, "c")])),
    ("INSERT INTO dim TABLE src", Leaves([*ROWS, (3, "c")])),
    ("INSERT INTO dim VALUES (3, 'c')", Leaves([*ROWS, (3, "c")])),
    ("INSERT INTO dim (name, id) VALUES ('c', 3)", Leaves([*ROWS, (3, "c")])),
    ("INSERT INTO dim (id) VALUES (3)", Leaves([*ROWS, (3, None)])),
    ("INSERT INTO dim BY NAME SELECT * FROM named", Leaves([*ROWS, (3, "c")])),
    ("INSERT INTO dim SELECT id + 0, lower(name) FROM src", Leaves([*ROWS, (3, "c")])),
    ("INSERT INTO dim SELECT * FROM src UNION ALL SELECT * FROM src", Leaves([*ROWS, (3, "c"), (3, "c")])),
    ("INSERT INTO dim SELECT id, max(name) AS name FROM src GROUP BY id", Leaves([*ROWS, (3, "c")])),
    ("FROM src INSERT INTO dim SELECT id, name INSERT INTO dim SELECT id + 1, name", Leaves([*ROWS, (3, "c"), (4, "c")])),
    # Rows of another such table, or of a copy of one, bring their own marks along: not these arrive.
    ("INSERT INTO dim SELECT * FROM other WHERE id = 1", Leaves([(1, "a"), *ROWS])),
    ("INSERT INTO dim SELECT id, CAST(name AS STRING) AS name FROM other WHERE id = 1", Leaves([(1, "a"), *ROWS])),
    ("INSERT INTO dim SELECT * FROM copied WHERE id = 1", Leaves([(1, "a"), *ROWS])),
    ("INSERT INTO dim (SELECT * FROM other WHERE id = 1) UNION ALL SELECT * FROM copied WHERE id = 2", Leaves([(1, "a"), (1, "a"), (2, "b"), (2, "b")])),
    ("INSERT INTO other WITH (path '{dim}') SELECT * FROM src", Leaves([*ROWS, (3, "c")])),
    ("INSERT INTO listed WITH (path '{dim}') SELECT * FROM src", Leaves([*ROWS, (3, "c")])),
    # The rows' own columns are exactly the table's: theirs is what would arrive. Or nothing of the table does.
    ("INSERT INTO dim SELECT * FROM dim", Fails(UNKNOWN)),
    ("INSERT INTO other SELECT * FROM copied", Fails(UNKNOWN)),
    ("INSERT OVERWRITE other SELECT * FROM copied", Fails(UNKNOWN)),
    ("INSERT INTO nums SELECT id FROM src", Fails(UNKNOWN)),
    ("INSERT INTO nums VALUES (99)", Fails(UNKNOWN)),
    ("INSERT OVERWRITE dim SELECT * FROM src", Leaves([(3, "c")])),
    ("INSERT OVERWRITE dim VALUES (3, 'c')", Leaves([(3, "c")])),
    ("INSERT INTO dim REPLACE WHERE true SELECT * FROM src", Leaves([(3, "c")])),
    (UPSERT + " VALUES (2, 'B'), (3, 'c')", Leaves([(1, "a"), (2, "B"), (3, "c")])),
    (UPSERT[:-1] + ", 'lookup.write.missing-columns' 'KEEP') (id) VALUES (2)", Fails("Spark fills the columns")),
    (UPSERT[:-1] + ", 'lookup.write.missing-columns' 'KEEP', path '{dim}') (id) VALUES (2)", Fails("Spark fills the columns")),
    # The table's own options count where WITH names its own place.
    ("CREATE TABLE made USING lookupcache OPTIONS (path '{dim}', 'lookup.write.mode' 'upsert'); INSERT INTO made WITH (path '{dim}') SELECT id, upper(name) FROM made", Leaves([(1, "A"), (2, "B")])),
    ("CREATE TABLE made USING lookupcache OPTIONS (path '{dim}', 'lookup.write.mode' 'upsert'); INSERT INTO made WITH (path '{dim}') SELECT * FROM made", Leaves(ROWS)),
    ("CREATE TABLE made USING lookupcache OPTIONS (path '{dim}', 'lookup.where' 'id > 1'); INSERT INTO made WITH (path '{dim}') VALUES (3, 'c')", Leaves([*ROWS, (3, "c")])),
    (ADD + "; INSERT INTO dim WITH (path '{dim}') VALUES (3, 'c', 7)", Leaves([(1, "a", None), (2, "b", None), (3, "c", 7)])),
    ("CREATE TABLE made USING lookupcache OPTIONS (path '{dim}', 'lookup.write.missing-columns' 'KEEP'); INSERT INTO made (id) VALUES (2)", Fails("Spark fills the columns")),
    ("INSERT INTO dim WITH ('lookup.write.merge-schema' 'true') SELECT *, 7 AS x FROM src", Fails("too many data columns")),
    ("INSERT INTO dim WITH ('lookup.where' 'id = 1') VALUES (3, 'c')", Fails("lookup.where is for reads")),
    ("EXPLAIN INSERT INTO dim SELECT * FROM src", Leaves(ROWS)),
    ("INSERT INTO dim REPLACE WHERE id = 1 SELECT * FROM src", Fails("does not support overwrite by filter")),
    ("INSERT INTO dim PARTITION (id = 1) VALUES ('a')", Fails("NON_PARTITION_COLUMN")),
    ("INSERT OVERWRITE DIRECTORY '{dim}-x' USING lookupcache SELECT * FROM src", Fails("Only Data Sources providing FileFormat")),
    ("LOAD DATA INPATH '{home}' INTO TABLE dim", Fails("LOAD DATA is not supported")),
    ("DELETE FROM dim WHERE id = 1", Fails("does not support deletes")),
    ("TRUNCATE TABLE dim", Fails("does not support truncates")),
    ("UPDATE dim SET name = 'q'", Fails("UPDATE TABLE")),
    ("MERGE INTO dim USING src ON dim.id = src.id WHEN NOT MATCHED THEN INSERT *", Fails("MERGE INTO TABLE")),
    ("CREATE INDEX at ON dim (id)", Fails("CreateIndex")),
]  # fmt: skip

READS: list[tuple[str, Expected]] = [
    ("SELECT * FROM dim", Gives(ROWS)),
    ("FROM dim SELECT id", Gives([(1,), (2,)])),
    ("WITH d AS (SELECT * FROM dim) SELECT d.name FROM src RIGHT JOIN d ON d.id = src.id", Gives([("a",), ("b",)])),
    ("SELECT count(*) FROM dim TABLESAMPLE (100 PERCENT)", Gives([(2,)])),
    ("SELECT * FROM dim WITH ('lookup.where' 'id = 2', 'lookup.cache' 'PARTIAL', 'lookup.partial-cache.max-rows' '9')", Gives([(2, "b")])),
    ("INSERT INTO dim VALUES (3, 'c'); SELECT count(*) FROM dim WITH ('lookup.version' '4')", Gives([(2,)])),
    ("INSERT INTO dim VALUES (3, 'c'); CREATE TEMPORARY VIEW shown USING lookupcache OPTIONS (path '{dim}', 'lookup.version' '4'); SELECT (SELECT count(*) FROM shown), (SELECT count(*) FROM dim)", Gives([(2, 3)])),
    ("CREATE TABLE made USING lookupcache OPTIONS (path '{dim}', 'lookup.view' 'versions'); SELECT operation FROM made", Gives([("create",), ("append",)])),
    ("CREATE TABLE made USING lookupcache OPTIONS (path '{dim}', 'lookup.view' 'versions'); INSERT INTO made SELECT * FROM made", Fails("lookup.view is for reads|cannot be told")),
    ("CREATE TABLE made USING lookupcache OPTIONS (path '{dim}', 'lookup.view' 'summary'); ALTER TABLE made ALTER COLUMN bytes FIRST; SELECT count(bytes) FROM made", Gives([(1,)])),
    ("SELECT * FROM dim WITH ('lookup.view' 'versions')", Fails("cannot change the columns of a catalog table")),
    ("SELECT * FROM dim VERSION AS OF 2", Fails("Time travel")),
    ("SELECT * FROM dim TIMESTAMP AS OF '2026-01-01'", Fails("Time travel")),
    ("SELECT * FROM lookupcache.`{dim}`", Fails("for direct query on files")),
    ("CACHE TABLE dim; UNCACHE TABLE dim; SELECT * FROM dim", Gives(ROWS)),
    ("REFRESH TABLE dim; SELECT * FROM dim", Gives(ROWS)),
    ("SHOW COLUMNS IN dim", Gives([("id",), ("name",)])),
    ("SHOW TBLPROPERTIES dim", Leaves(ROWS)),
    ("SHOW CREATE TABLE dim", Leaves(ROWS)),
    ("SHOW TABLE EXTENDED LIKE 'dim'", Leaves(ROWS)),
    ("SHOW TABLES LIKE 'dim'", Gives([("default", "dim", False)])),
    ("SHOW PARTITIONS dim", Fails("does not support partition management")),
    ("DESCRIBE dim", Gives([("id", "int", None), ("name", "string", None)])),
    ("DESCRIBE EXTENDED dim", Leaves(ROWS)),
    ("EXPLAIN SELECT * FROM dim", Leaves(ROWS)),
    ("ANALYZE TABLE dim COMPUTE STATISTICS", Fails("ANALYZE TABLE is not supported")),
    ("MSCK REPAIR TABLE dim", Fails("not supported for v2 tables")),
]  # fmt: skip


STATEMENTS = [*CREATES, *ALTERS, *WRITES, *READS]


@pytest.mark.parametrize(("text", "expected"), by_day(STATEMENTS, 2), ids=[text for text, _ in STATEMENTS])
def test_every_statement(tables: Tables, text: str, expected: Expected) -> None:
    """A statement works or names what does; it writes its own table only, and that one only if it works."""
    *setup, last = text.split("; ")
    with tables.kept(changes=not isinstance(expected, Fails) or bool(setup)):
        tables.run(*setup)
        judge(tables, expected, last, tables.run)


def append_to(rows: DataFrame) -> DataFrameWriter:
    return rows.write.format("lookupcache").mode("append")


TWIN = [*ROWS, *ROWS, (9, "other")]
FRAMES: dict[str, tuple[Callable[[Tables, DataFrame, str], Any], Expected]] = {
    "writeTo.append": (lambda t, rows, path: rows.writeTo("dim").append(), Leaves([*ROWS, (3, "c")])),
    "insertInto": (lambda t, rows, path: rows.write.insertInto("dim"), Leaves([*ROWS, (3, "c")])),
    "saveAsTable append": (lambda t, rows, path: append_to(rows).saveAsTable("dim"), Leaves([*ROWS, (3, "c")])),
    "writeTo of a twin": (lambda t, rows, path: t.spark.table("other").writeTo("dim").append(), Leaves(TWIN)),
    "insertInto of a twin": (lambda t, rows, path: t.spark.table("other").write.insertInto("dim"), Leaves(TWIN)),
    "a loaded twin": (lambda t, rows, path: append_to(load(t.spark, t.home / "other")).save(path), Leaves(TWIN)),
    "insertInto, overwrite": (lambda t, rows, path: rows.write.insertInto("dim", overwrite=True), Leaves([(3, "c")])),
    "writeTo.overwrite": (lambda t, rows, path: rows.writeTo("dim").overwrite(sf.lit(True)), Leaves([(3, "c")])),
    "overwritePartitions": (lambda t, rows, path: rows.writeTo("dim").overwritePartitions(), Fails("dynamic overwrite")),
    "saveAsTable of a new name": (lambda t, rows, path: rows.write.format("lookupcache").saveAsTable("made"), Fails(UNKNOWN)),
    "save without a mode": (lambda t, rows, path: rows.write.format("lookupcache").save(path), Fails("SAVE_MODE")),
    "partitionBy": (lambda t, rows, path: append_to(rows).partitionBy("id").save(path), Fails("partitioning")),
}  # fmt: skip


@pytest.mark.parametrize("way", FRAMES)
def test_data_frames(tables: Tables, way: str) -> None:
    """The same of DataFrames that are written to a table or a path."""
    act, expected = FRAMES[way]
    with tables.kept(changes=isinstance(expected, Leaves)):
        judge(tables, expected, str(tables.path), lambda path: act(tables, tables.spark.table("src"), path))


def judge(tables: Tables, expected: Expected, subject: str, run: Callable[[str], Any]) -> None:
    if isinstance(expected, Gives):
        assert sorted(run(subject), key=repr) == sorted(expected.rows, key=repr)
        return
    if isinstance(expected, Leaves):
        run(subject)
        assert tables.dim() == sorted(expected.rows, key=repr)
        return
    before = tables.held()
    with pytest.raises(Exception, match=re.compile(expected.words, re.DOTALL)) as failure:
        run(subject)
    assert tables.held() == before
    said = str(failure.value)
    if expected.words in (UNKNOWN, LOST):
        assert re.search(r"INSERT INTO dim WITH \(path|DROP TABLE dim .*, then CREATE TABLE dim", said)
    if expected.reads:
        assert [row[:2] for row in tables.dim()] == ROWS


def test_another_location_is_refused_by_name(tables: Tables) -> None:
    """Spark tells a source nothing of ALTER TABLE … SET LOCATION; where there is a session, the catalog is asked."""
    facts = tables.spark.sql("SELECT 1 AS id")
    with tables.kept():
        tables.run("ALTER TABLE dim SET LOCATION '{home}/other'")
        for name in ("dim", "default.dim", "spark_catalog.default.dim", "`default`.`dim`"):
            with pytest.raises(OptionError, match=r"SET LOCATION says .*/other.*CREATE TABLE"):
                LookupTable.for_name(tables.spark, name)
        with pytest.raises(OptionError, match="SET LOCATION"):
            lookup_join(facts, "dim", on="id")
        tables.run("ALTER TABLE dim SET LOCATION '{dim}'")
        assert lookup_join(facts, "dim", on="id").collect() == [(1, "a")]
        # A view that hides the table is what is meant, and a relative path lies where Spark does not say.
        tables.spark.table("other").createOrReplaceTempView("dim")
        assert lookup_join(facts, "dim", on="id").collect() == [(1, "a")]
        tables.spark.sql(f"CREATE TABLE made {catalog_options(os.path.relpath(tables.path))}")
        assert lookup_join(facts, "made", on="id").collect() == [(1, "a")]


@pytest.mark.parametrize("name", ["other", "nums"])
def test_a_table_made_of_rows_of_another_is_refused(tables: Tables, name: str) -> None:
    """Spark would keep the other table's options for the new one's own, so that its writes went there."""
    new = f"{tables.path}-made"
    rows, format_ = tables.spark.table(name), "lookupcache"
    with tables.kept():
        for write in (
            lambda: append_to(rows).save(new),
            lambda: rows.write.format(format_).option("path", new).saveAsTable("made"),
            lambda: rows.writeTo("made").using(format_).option("path", new).create(),
            lambda: rows.writeTo("dim").using(format_).option("path", new).createOrReplace(),
        ):
            with pytest.raises(Exception, match=r"carry the options of the catalog table at .*load\(path\)"):
                write()
        assert not os.path.exists(new)
        append_to(load(tables.spark, tables.home / "other")).save(new)
        assert load(tables.spark, new).count() == 3


def followed(stream: DataFrame, name: str, checkpoint: Path) -> list[tuple[object, ...]]:
    """The rows of a stream."""
    writer = stream.writeStream.format("memory").queryName(name).trigger(availableNow=True)
    writer.option("checkpointLocation", str(checkpoint)).start().awaitTermination()
    return sorted(map(tuple, stream.sparkSession.table(name).collect()))


def test_columns_that_only_the_catalog_has(spark: SparkSession, tables: Tables, tmp_path: Path) -> None:
    """A column of ALTER TABLE … ADD COLUMN is null in a stream of the table, a lookup has the table's own columns; one that two names
    add in two spellings is an error, in batches and in streams."""
    with tables.kept():
        tables.run(ADD, MADE)
        assert followed(spark.readStream.table("dim"), "followed", tmp_path / "1") == [(1, "a", None), (2, "b", None)]
        assert lookup_join(spark.sql("SELECT 1 AS id"), "dim", on="id").collect() == [(1, "a")]
        tables.run("INSERT INTO dim VALUES (3, 'c', 7)", "ALTER TABLE made ADD COLUMN X INT")
        assert lookup_join(spark.sql("SELECT 3 AS id"), "dim", on="id").collect() == [(3, "c", 7)]
        with pytest.raises(Exception, match="zzz"):
            odd = spark.readStream.format("lookupcache").schema("id INT, zzz INT").load(str(tables.path))
            followed(odd, "odd", tmp_path / "2")
        spelled = "column 'X' of the given schema is spelled 'x'"
        with pytest.raises(Exception, match=spelled):
            spark.table("made").collect()
        with pytest.raises(Exception, match=spelled):
            followed(spark.readStream.table("made"), "spelled", tmp_path / "3")


def test_new_columns_of_plain_files(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """A column that ALTER TABLE adds to a table of plain files is null until files have it."""
    plain = str(tmp_path / "plain")
    spark.sql("SELECT 1 AS id, 'a' AS name").write.parquet(plain)
    spark.sql(f"CREATE TABLE {name} USING lookupcache LOCATION '{plain}'")
    spark.sql(f"ALTER TABLE {name} ADD COLUMN x DOUBLE")
    assert spark.table(name).collect() == [(1, "a", None)]
    spark.sql("SELECT 2 AS id, 'b' AS name, 2.5D AS x").write.mode("overwrite").parquet(plain)
    assert spark.table(name).collect() == [(2, "b", 2.5)]


def test_options_of_create_table_are_its_own(spark: SparkSession, tmp_path: Path) -> None:
    """`lookup.create-if-not-exists` means CREATE TABLE and nothing else."""
    options = {"lookup.create-if-not-exists": "true", "lookup.schema": "id INT"}
    with pytest.raises(OptionError, match="is for CREATE TABLE"):
        LookupTable(str(tmp_path), options)
    with pytest.raises(Exception, match="is for CREATE TABLE"):
        load(spark, tmp_path / "new", options)
    assert not (tmp_path / "new").exists()


def test_copies_are_clean_where_they_are_asked_for(spark: SparkSession, tables: Tables, name: str) -> None:
    """A copy of a temporary view, or of a path, has nothing of ours; one of a catalog table carries its marks."""
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW shown {catalog_options(tables.path)}")
    for source in (spark.table("shown"), load(spark, tables.path)):
        source.createOrReplaceTempView("rows_of")
        spark.sql(f"DROP TABLE IF EXISTS {name}")
        spark.sql(f"CREATE TABLE {name} USING parquet AS SELECT * FROM rows_of")
        fields = [(field.name, field.dataType.simpleString(), field.metadata) for field in spark.table(name).schema]
        assert fields == [("id", "int", {}), ("name", "string", {})]
