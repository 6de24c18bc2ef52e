"""Every statement of Spark's SQL on a catalog table: it works, or it fails and names one that works; it writes no other table."""

import contextlib
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.readwriter import DataFrameWriter

from pyspark_lookup import LookupTable, lookup_join
from pyspark_lookup.errors import OptionError
from tests.support.fuzzing import by_day
from tests.support.spark_tables import catalog_options, collect_batches, load
from tests.support.sparks import DATA_SOURCES, PARTIAL_INSERTS, STREAM_LIMITS, needs

pytestmark = [needs(DATA_SOURCES), pytest.mark.spark]
_names = itertools.count()
ROWS = [(1, "a"), (2, "b")]
LOST_OPTIONS = "this table's options are lost"
UNKNOWN = "it is not clear which table is written"


class Expect(NamedTuple):
    """What a statement does: it `gives` rows, in any order, or `leaves` rows in `dim`; or it `fails` with these words, and changes no table.
    `reads`: `dim` can be read after a failure."""

    gives: Sequence[object] | None = None
    leaves: Sequence[object] | None = None
    fails: str = ""
    reads: bool = True


class Tables:
    """Managed tables `dim` (which a case may change), `other` (the same columns) and `nums` (no text), catalog tables `listed` (a column
    list) and `copied` (a Parquet copy of `other`), views `src` and `named` of rows."""

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
        """Create `dim` again, in a new directory."""
        self.spark.sql("DROP TABLE IF EXISTS dim")
        self.path = self.home / f"dim{next(_names)}"
        LookupTable(str(self.path), {"lookup.keys": "id"}).write(self.rows)
        self.spark.sql(f"CREATE TABLE dim USING lookupcache OPTIONS (path '{self.path}')")

    def run(self, *statements: str) -> list[tuple[object, ...]]:
        """Run statements, and return the rows of the last one."""
        rows: list[tuple[object, ...]] = []
        for statement in statements:
            frame = self.spark.sql(statement.format(home=self.home, dim=self.path))
            rows = [tuple(row) for row in frame.collect()]
        return rows

    @contextlib.contextmanager
    def kept(self, changes: bool = True) -> Iterator[None]:
        """Check that only `dim` changes in the body. Afterwards create it again, if the body `changes` it."""
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
        return {p.name: sum(1 for _ in p.rglob("*")) for p in self.home.iterdir() if p != without}


@pytest.fixture(scope="module")
def tables(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Tables:
    return Tables(spark, tmp_path_factory.mktemp("sql"))


NEW = "CREATE TABLE made USING lookupcache OPTIONS (path '{dim}-made', 'lookup.schema' 'id INT, name STRING', 'lookup.keys' 'id', 'lookup.create-if-not-exists' 'true')"
UPSERT = "INSERT INTO dim WITH ('lookup.write.mode' 'upsert')"
ADD = "ALTER TABLE dim ADD COLUMN x INT"
RENAME = "ALTER TABLE dim RENAME COLUMN name TO title"
TYPE = "ALTER TABLE dim ALTER COLUMN id TYPE BIGINT"
FIRST = "ALTER TABLE dim ALTER COLUMN name FIRST"
PLAIN = "INSERT OVERWRITE DIRECTORY '{dim}-made' USING parquet SELECT 1 AS id, 'a' AS name; CREATE TABLE made USING lookupcache LOCATION '{dim}-made'; ALTER TABLE made ADD COLUMN x DOUBLE"
UPPER = "INSERT INTO made WITH (path '{dim}') SELECT id, upper(name) FROM made"
ONE_ROW = "VALUES (3, 'c')"
WITH_C = [*ROWS, (3, "c")]


def build_create(place: str, *options: str) -> str:
    """The statement that creates the table `made` at a path, with options."""
    option_list = ", ".join([f"path '{place}'", *options])
    return f"CREATE TABLE made USING lookupcache OPTIONS ({option_list})"


# Statements separated by semicolons run one after the other; what is expected is expected of the last.
NO_DATA = Expect(fails="Cannot find data for the output column")  # Spark fills no column that an INSERT leaves out
CREATES: list[tuple[str, Expect]] = [
    (f"{NEW}; INSERT INTO made VALUES (1, 'n'); SELECT * FROM made", Expect(gives=[(1, "n")])),
    (NEW.replace("{dim}-made", "{dim}") + "; SELECT * FROM made", Expect(gives=ROWS)),
    (NEW.replace("{dim}-made", "{dim}").replace("STRING", "DOUBLE"), Expect(fails="is a table with the columns id INT, name STRING")),
    (NEW.replace("{dim}-made", "{home}"), Expect(fails="holds files that format\\('lookupcache'\\) did not write")),
    (build_create("{dim}-x", "'lookup.create-if-not-exists' 'true'"), Expect(fails="needs lookup.schema")),
    (build_create("{dim}-x"), Expect(fails="UfsNotFoundError")),
    ("CREATE TABLE made USING lookupcache", Expect(fails="option path is missing: write CREATE TABLE")),
    ("CREATE EXTERNAL TABLE made USING lookupcache LOCATION '{dim}' COMMENT 'ours' TBLPROPERTIES ('team' = 'x'); SELECT * FROM made", Expect(gives=ROWS)),
    ("CREATE TABLE IF NOT EXISTS dim USING lookupcache OPTIONS (path '{home}/other')", Expect(leaves=ROWS)),
    (f"CREATE OR REPLACE TABLE dim USING lookupcache LOCATION '{{home}}/other'; INSERT INTO dim WITH (path '{{dim}}') {ONE_ROW}", Expect(leaves=[*ROWS, (9, "other")])),
    ("CREATE TABLE made USING lookupcache LOCATION '{dim}' TBLPROPERTIES ('lookup.cache' = 'FULL')", Expect(fails=r"put it into OPTIONS \(")),
    ("SELECT * FROM listed", Expect(fails=LOST_OPTIONS)),
    ("INSERT INTO listed VALUES (1, 'a')", Expect(fails=UNKNOWN)),
    (build_create("{dim}-x") + " AS SELECT * FROM src", Expect(fails=UNKNOWN)),
    (build_create("{dim}-x") + " AS SELECT id, CAST(name AS STRING) AS name FROM dim", Expect(fails=f"{UNKNOWN}|PLAN_VALIDATION_FAILED")),
    (f"CREATE TABLE made USING parquet AS SELECT * FROM dim; INSERT INTO made {ONE_ROW}; SELECT * FROM made", Expect(gives=WITH_C)),
    (f"CREATE TEMPORARY VIEW shown USING lookupcache OPTIONS (path '{{dim}}'); INSERT INTO shown {ONE_ROW}", Expect(leaves=WITH_C)),
    ("CREATE VIEW seen AS SELECT id FROM dim; SELECT * FROM seen; DROP VIEW seen; DROP TABLE dim PURGE; CREATE TABLE dim USING lookupcache LOCATION '{dim}'", Expect(leaves=ROWS)),
]  # fmt: skip
ALTERS: list[tuple[str, Expect]] = [
    # New columns are null until the first INSERT, which adds them to the table.
    (f"{ADD}; SELECT * FROM dim WITH ('lookup.cache' 'FULL'); SELECT id FROM dim WHERE x IS NULL", Expect(gives=[(1,), (2,)])),
    (f"{ADD}; INSERT INTO dim VALUES (3, 'c', 7); CREATE TABLE made USING lookupcache LOCATION '{{dim}}'; SELECT x FROM made", Expect(gives=[(None,), (None,), (7,)])),
    ("ALTER TABLE dim ADD COLUMNS (x STRING FIRST, y INT); INSERT INTO dim VALUES ('x', 3, 'c', 7)", Expect(leaves=[("x", 3, "c", 7), (None, 1, "a", None), (None, 2, "b", None)])),
    (f"{ADD}; INSERT INTO dim WITH (path '{{dim}}') VALUES (3, 'c', 7)", Expect(leaves=[(1, "a", None), (2, "b", None), (3, "c", 7)])),
    (f"{PLAIN}; SELECT * FROM made", Expect(gives=[(1, "a", None)])),
    (f"{PLAIN}; SELECT * FROM made; INSERT OVERWRITE DIRECTORY '{{dim}}-made' USING parquet SELECT 2 AS id, 'b' AS name, 2.5D AS x; SELECT * FROM made", Expect(gives=[(2, "b", 2.5)])),
    # Changes that only the catalog has.
    (f"{RENAME}; SELECT * FROM dim", Expect(fails="'title' is 'name' in the table.*CREATE VIEW", reads=False)),
    (f"{RENAME}; INSERT INTO dim {ONE_ROW}", Expect(fails="'title' is 'name' in the table.*CREATE VIEW", reads=False)),
    (f"{RENAME}; ALTER TABLE dim RENAME COLUMN title TO name; INSERT INTO dim {ONE_ROW}", Expect(leaves=WITH_C)),
    (f"{TYPE}; SELECT * FROM dim", Expect(gives=ROWS)),
    (f"{TYPE}; INSERT INTO dim {ONE_ROW}", Expect(fails="'id' is INT in the table and BIGINT in the rows.*DROP TABLE, which leaves its files but loses its options")),
    (f"{FIRST}; SELECT * FROM dim; INSERT INTO dim VALUES ('c', 3)", Expect(leaves=[("a", 1), ("b", 2), ("c", 3)])),
    (f"ALTER TABLE dim ALTER COLUMN name COMMENT 'its name'; ALTER TABLE dim CHANGE COLUMN name name STRING COMMENT 'its'; INSERT INTO dim {ONE_ROW}", Expect(leaves=WITH_C)),
    ("ALTER TABLE dim ALTER COLUMN name SET DEFAULT 'q'; INSERT INTO dim (id) VALUES (3)", Expect(leaves=[*ROWS, (3, "q")]) if PARTIAL_INSERTS else NO_DATA),
    (f"ALTER TABLE dim ALTER COLUMN id DROP NOT NULL; ALTER TABLE dim CLUSTER BY (id); INSERT INTO dim {ONE_ROW}", Expect(leaves=WITH_C)),
    ("ALTER TABLE dim REPLACE COLUMNS (id INT); INSERT INTO dim VALUES (3)", Expect(fails=UNKNOWN, reads=False)),
    ("ALTER TABLE dim DROP COLUMN id; SELECT * FROM dim", Expect(gives=[("a",), ("b",)])),
    ("ALTER TABLE dim DROP COLUMN id; INSERT INTO dim VALUES ('c')", Expect(fails="the rows have no key column 'id'", reads=False)),
    ("ALTER TABLE dim DROP COLUMN name; SELECT * FROM dim", Expect(fails=LOST_OPTIONS, reads=False)),
    ("ALTER TABLE dim DROP COLUMN name; INSERT INTO dim VALUES (3)", Expect(fails=UNKNOWN, reads=False)),
    (f"ALTER TABLE dim RENAME TO made; INSERT INTO made {ONE_ROW}; ALTER TABLE made RENAME TO dim", Expect(leaves=WITH_C)),
    # Spark does not tell the source of these: the options of CREATE TABLE stay.
    (f"ALTER TABLE dim SET LOCATION '{{home}}/other'; INSERT INTO dim {ONE_ROW}", Expect(leaves=WITH_C)),
    (f"ALTER TABLE dim SET TBLPROPERTIES ('path' = '{{home}}/other', 'a' = 'b'); ALTER TABLE dim UNSET TBLPROPERTIES ('a'); COMMENT ON TABLE dim IS 'ours'; INSERT INTO dim {ONE_ROW}", Expect(leaves=WITH_C)),
]  # fmt: skip
WRITES: list[tuple[str, Expect]] = [
    (f"INSERT INTO dim SELECT * FROM src; INSERT INTO dim TABLE src; INSERT INTO dim {ONE_ROW}; INSERT INTO dim (name, id) VALUES ('c', 3)", Expect(leaves=[*ROWS, *[(3, "c")] * 4])),
    ("INSERT INTO dim (id) VALUES (3)", Expect(leaves=[*ROWS, (3, None)]) if PARTIAL_INSERTS else NO_DATA),
    ("INSERT INTO dim BY NAME SELECT * FROM named; INSERT INTO dim SELECT id + 0, lower(name) FROM src", Expect(leaves=[*ROWS, (3, "c"), (3, "c")])),
    ("FROM src INSERT INTO dim SELECT id, name INSERT INTO dim SELECT id + 1, name", Expect(leaves=[*WITH_C, (4, "c")])),
    # Rows of another such table, or of a copy of one, bring that table's marks along; the writer must not follow them.
    ("INSERT INTO dim SELECT id, CAST(name AS STRING) AS name FROM other WHERE id = 1", Expect(leaves=[(1, "a"), *ROWS])),
    ("INSERT INTO dim (SELECT * FROM other WHERE id = 1) UNION ALL SELECT * FROM copied WHERE id = 2", Expect(leaves=[(1, "a"), (1, "a"), (2, "b"), (2, "b")])),
    ("INSERT INTO other WITH (path '{dim}') SELECT * FROM src; INSERT INTO listed WITH (path '{dim}') SELECT * FROM src", Expect(leaves=[*WITH_C, (3, "c")])),
    # The rows have exactly the table's columns, so only their own marks would arrive; or no mark of the table arrives.
    ("INSERT INTO dim SELECT * FROM dim", Expect(fails=UNKNOWN)),
    ("INSERT INTO other SELECT * FROM copied", Expect(fails=UNKNOWN)),
    ("INSERT INTO nums VALUES (99)", Expect(fails=UNKNOWN)),
    ("INSERT OVERWRITE dim SELECT * FROM src", Expect(leaves=[(3, "c")])),
    ("INSERT OVERWRITE dim VALUES (4, 'd'); INSERT INTO dim REPLACE WHERE true SELECT * FROM src", Expect(leaves=[(3, "c")])),
    (f"{UPSERT} VALUES (2, 'B'), (3, 'c')", Expect(leaves=[(1, "a"), (2, "B"), (3, "c")])),
    (f"{UPSERT[:-1]}, 'lookup.write.missing-columns' 'KEEP', path '{{dim}}') (id) VALUES (2)", Expect(fails="Spark fills the columns") if PARTIAL_INSERTS else NO_DATA),
    # The table's options also apply where WITH names the table's own path.
    (build_create("{dim}", "'lookup.write.mode' 'upsert'") + f"; {UPPER}; INSERT INTO made WITH (path '{{dim}}') SELECT * FROM made", Expect(leaves=[(1, "A"), (2, "B")])),
    (build_create("{dim}", "'lookup.where' 'id > 1'") + f"; INSERT INTO made WITH (path '{{dim}}') {ONE_ROW}", Expect(leaves=WITH_C)),
    (build_create("{dim}", "'lookup.write.missing-columns' 'KEEP'") + "; INSERT INTO made (id) VALUES (2)", Expect(fails="Spark fills the columns") if PARTIAL_INSERTS else NO_DATA),
    ("INSERT INTO dim WITH ('lookup.write.merge-schema' 'true') SELECT *, 7 AS x FROM src", Expect(fails="too many data columns")),
    ("EXPLAIN INSERT INTO dim SELECT * FROM src", Expect(leaves=ROWS)),
]  # fmt: skip
READS: list[tuple[str, Expect]] = [
    ("FROM dim SELECT id; WITH d AS (SELECT * FROM dim) SELECT d.name FROM src RIGHT JOIN d ON d.id = src.id", Expect(gives=[("a",), ("b",)])),
    ("SELECT * FROM dim WITH ('lookup.where' 'id = 2', 'lookup.cache' 'PARTIAL', 'lookup.partial-cache.max-rows' '9')", Expect(gives=[(2, "b")])),
    (f"INSERT INTO dim {ONE_ROW}; SELECT count(*) FROM dim WITH ('lookup.version' '4')", Expect(gives=[(2,)])),
    (f"INSERT INTO dim {ONE_ROW}; CREATE TEMPORARY VIEW shown USING lookupcache OPTIONS (path '{{dim}}', 'lookup.version' '4'); SELECT (SELECT count(*) FROM shown), (SELECT count(*) FROM dim)", Expect(gives=[(2, 3)])),
    (build_create("{dim}", "'lookup.view' 'versions'") + "; SELECT operation FROM made", Expect(gives=[("create",), ("append",)])),
    (build_create("{dim}", "'lookup.view' 'versions'") + "; INSERT INTO made SELECT * FROM made", Expect(fails="lookup.view is for reads|not clear which")),
    (build_create("{dim}", "'lookup.view' 'summary'") + "; ALTER TABLE made ALTER COLUMN bytes FIRST; SELECT count(bytes) FROM made", Expect(gives=[(1,)])),
    # Options of a table are for all reads and writes of it; those of a read are for that read.
    (build_create("{dim}", "'lookup.write.mode' 'upsert', 'lookup.on-error' 'NULL'") + "; SELECT * FROM made", Expect(gives=ROWS)),
    *((f"SELECT * FROM dim WITH ('{key}' '{text}')", Expect(fails=f"option {key} ")) for key, text in (("lookup.write.mode", "upsert"), ("lookup.on-error", "NULL"))),
    ("SELECT * FROM dim WITH ('lookup.view' 'versions')", Expect(fails="would change the columns of a catalog table")),
    ("CACHE TABLE dim; UNCACHE TABLE dim; REFRESH TABLE dim; SELECT * FROM dim", Expect(gives=ROWS)),
    ("SHOW TBLPROPERTIES dim; SHOW CREATE TABLE dim; SHOW TABLE EXTENDED LIKE 'dim'; DESCRIBE EXTENDED dim; EXPLAIN SELECT * FROM dim; SHOW COLUMNS IN dim", Expect(gives=[("id",), ("name",)])),
    ("DESCRIBE dim", Expect(gives=[("id", "int", None), ("name", "string", None)])),
]  # fmt: skip
REFUSED: dict[str, list[str]] = {
    "partitioning when the table schema": [build_create("{dim}") + how for how in (" PARTITIONED BY (id)", " CLUSTERED BY (id) INTO 4 BUCKETS")],
    "partition management": [f"ALTER TABLE dim {how} PARTITION (id = 1)" for how in ("ADD", "DROP")] + ["ALTER TABLE dim PARTITION (id = 1) RENAME TO PARTITION (id = 2)", "SHOW PARTITIONS dim"],
    "not supported for v2 tables": ["ALTER TABLE dim SET SERDEPROPERTIES ('lookup.cache' = 'FULL')", "ALTER TABLE dim RECOVER PARTITIONS", "MSCK REPAIR TABLE dim"],
    "Cannot change nullable column to non-nullable": ["ALTER TABLE dim ALTER COLUMN id SET NOT NULL"],
    "does not support table constraint|near 'CONSTRAINT'": ["ALTER TABLE dim ADD CONSTRAINT positive CHECK (id > 0)"],
    "NON_PARTITION_COLUMN": ["INSERT INTO dim PARTITION (id = 1) VALUES ('a')"],
    "Only Data Sources providing FileFormat": ["INSERT OVERWRITE DIRECTORY '{dim}-x' USING lookupcache SELECT * FROM src"],
    "(LOAD DATA|ANALYZE TABLE) is not supported": ["LOAD DATA INPATH '{home}' INTO TABLE dim", "ANALYZE TABLE dim COMPUTE STATISTICS"],
    "does not support (deletes|truncates|overwrite by filter)": ["DELETE FROM dim WHERE id = 1", "TRUNCATE TABLE dim", "INSERT INTO dim REPLACE WHERE id = 1 SELECT * FROM src"],
    "(UPDATE|MERGE INTO) TABLE": ["UPDATE dim SET name = 'q'", "MERGE INTO dim USING src ON dim.id = src.id WHEN NOT MATCHED THEN INSERT *"],
    "CreateIndex": ["CREATE INDEX at ON dim (id)"],
    "Time travel": ["SELECT * FROM dim VERSION AS OF 2", "SELECT * FROM dim TIMESTAMP AS OF '2026-01-01'"],
    "for direct query on files": ["SELECT * FROM lookupcache.`{dim}`"],
    # Up to Spark 4.1 it makes another name of the same table.
    "does not support CREATE TABLE LIKE": ["CREATE TABLE made LIKE dim"] if STREAM_LIMITS else [],
}  # fmt: skip
STATEMENTS = [*CREATES, *ALTERS, *WRITES, *READS]
STATEMENTS += [(text, Expect(fails=words)) for words, texts in REFUSED.items() for text in texts]


@pytest.mark.parametrize(("text", "expected"), by_day(STATEMENTS, 3), ids=[text for text, _ in STATEMENTS])
def test_every_statement(tables: Tables, text: str, expected: Expect) -> None:
    """A statement works, or its error names one that does. It writes only its own table, and only if it works."""
    *setup, last = text.split("; ")
    with tables.kept(changes=not expected.fails or bool(setup)):
        tables.run(*setup)
        judge(tables, expected, last, tables.run)


def make_appender(rows: DataFrame) -> DataFrameWriter:
    return rows.write.format("lookupcache").mode("append")


def test_data_frames(tables: Tables) -> None:
    """DataFrames that are written to a table or a path keep the same rules."""
    rows, twin, path = tables.spark.table("src"), tables.spark.table("other"), str(tables.path)
    with tables.kept():
        for words, write in (
            ("dynamic overwrite", lambda: rows.writeTo("dim").overwritePartitions()),
            (UNKNOWN, lambda: rows.write.format("lookupcache").saveAsTable("made")),
            ("SAVE_MODE", lambda: rows.write.format("lookupcache").save(path)),
            ("partitioning", lambda: make_appender(rows).partitionBy("id").save(path)),
        ):
            with pytest.raises(Exception, match=words):
                write()
        make_appender(rows).saveAsTable("dim")
        for frame in (rows, twin):
            frame.writeTo("dim").append()
            frame.write.insertInto("dim")
        assert tables.dim() == sorted([*ROWS * 3, *[(3, "c")] * 3, *[(9, "other")] * 2])
        rows.write.insertInto("dim", overwrite=True)
        assert tables.dim() == [(3, "c")]
        twin.writeTo("dim").overwrite(sf.lit(True))
        assert tables.dim() == [*ROWS, (9, "other")]
        for replace in ("createOrReplace", "replace"):
            with pytest.raises(Exception, match=UNKNOWN):
                getattr(rows.writeTo("dim").using("lookupcache"), replace)()
            # Spark drops the name before it asks the source; the rows are still there.
            assert not tables.spark.catalog.tableExists("dim")
            tables.spark.sql(f"CREATE TABLE dim {catalog_options(path)}")
            assert tables.dim() == [*ROWS, (9, "other")]


def test_two_versions_in_one_statement(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """A table, and a view of its path at another version, each read their own version; so do DataFrames with different options."""
    path = str(tmp_path / "dim")
    table = LookupTable(path, {"lookup.keys": "id"})
    for key in (1, 2):
        table.write(pa.table({"id": [key]}))
    first = table.versions()[1]["version"]
    spark.sql(f"CREATE TABLE {name} {catalog_options(path)}")
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW {name}_first {catalog_options(path, {'lookup.version': first})}")
    statements = {
        f"SELECT id FROM {name} EXCEPT SELECT id FROM {name}_first": [2],
        f"SELECT a.id FROM {name} a LEFT ANTI JOIN {name}_first b ON a.id = b.id": [2],
        f"SELECT id FROM {name} UNION ALL SELECT id FROM {name}_first": [1, 1, 2],
        f"SELECT id FROM {name}_first UNION ALL SELECT id FROM {name}": [1, 1, 2],
    }
    for statement, ids in statements.items():
        assert sorted(row.id for row in spark.sql(statement).collect()) == ids
    older = spark.read.option("lookup.version", first).table(name)
    assert [row.id for row in spark.table(name).exceptAll(older).collect()] == [2]


def judge(tables: Tables, expected: Expect, subject: str, run: Callable[[str], Any]) -> None:
    before = tables.held()
    if expected.fails:
        with pytest.raises(Exception, match=re.compile(expected.fails, re.DOTALL)) as failure:
            run(subject)
        assert tables.held() == before
        if expected.fails in (UNKNOWN, LOST_OPTIONS):
            hint = r"INSERT INTO dim WITH \(path|DROP TABLE dim .*, then CREATE TABLE dim"
            assert re.search(hint, str(failure.value))
        if expected.reads:
            assert [row[:2] for row in tables.dim()] == ROWS
        return
    rows = run(subject)
    if expected.leaves is not None:
        assert tables.dim() == sorted(expected.leaves, key=repr)
    if expected.gives is not None:
        assert sorted(rows, key=repr) == sorted(expected.gives, key=repr)


def test_another_location_is_refused_by_name(tables: Tables) -> None:
    """Spark does not tell a source of ALTER TABLE … SET LOCATION; where there is a session, the catalog is asked."""
    facts = tables.spark.sql("SELECT 1 AS id")
    with tables.kept():
        tables.run("ALTER TABLE dim SET LOCATION '{home}/other'")
        for name in ("dim", "default.dim", "spark_catalog.default.dim", "`default`.`dim`"):
            with pytest.raises(OptionError, match=r"SET LOCATION says .*/other.*CREATE TABLE"):
                LookupTable.for_name(tables.spark, name)
        with pytest.raises(OptionError, match="SET LOCATION"):
            lookup_join(facts, "dim", on="id")
        tables.run(
            "CREATE TABLE made USING lookupcache OPTIONS (path '{dim}', 'lookup.where' 'id = 1')",
            "ALTER TABLE made SET LOCATION '{home}/other'",
        )
        with pytest.raises(OptionError, match=r"CREATE TABLE made .*\(path '…', 'lookup\.where' 'id = 1'\)"):
            LookupTable.for_name(tables.spark, "made")
        tables.run("DROP TABLE made", "ALTER TABLE dim SET LOCATION '{dim}'")
        assert lookup_join(facts, "dim", on="id").collect() == [(1, "a")]
        # A view that hides the table is used instead of it. Of a relative path, Spark does not say where it lies.
        tables.spark.table("other").createOrReplaceTempView("dim")
        assert lookup_join(facts, "dim", on="id").collect() == [(1, "a")]
        tables.spark.sql(f"CREATE TABLE made {catalog_options(os.path.relpath(tables.path))}")
        assert lookup_join(facts, "made", on="id").collect() == [(1, "a")]


@pytest.mark.parametrize("name", ["other", "nums"])
def test_a_table_made_of_rows_of_another_is_refused(tables: Tables, name: str) -> None:
    """Spark would give the new table the options of the other one, so that writes would go there."""
    new = f"{tables.path}-made"
    rows, format_ = tables.spark.table(name), "lookupcache"
    with tables.kept():
        for write in (
            lambda: make_appender(rows).save(new),
            lambda: rows.write.format(format_).option("path", new).saveAsTable("made"),
            lambda: rows.writeTo("made").using(format_).option("path", new).create(),
            lambda: rows.writeTo("dim").using(format_).option("path", new).createOrReplace(),
        ):
            with pytest.raises(Exception, match=r"come from the catalog table at .*load\(path\)"):
                write()
        assert not os.path.exists(new)
        make_appender(load(tables.spark, tables.home / "other")).save(new)
        assert load(tables.spark, new).count() == 3


@pytest.mark.nightly
def test_columns_that_only_the_catalog_has(spark: SparkSession, tables: Tables, tmp_path: Path) -> None:
    """A column of ADD COLUMN is null in a stream, and lookups lack it. If two names of a table add it in two spellings, that is an error."""
    with tables.kept():
        tables.run(ADD, build_create("{dim}"))
        assert collect_batches(spark.readStream.table("dim"), tmp_path / "1") == [[(1, "a", None), (2, "b", None)]]
        assert lookup_join(spark.sql("SELECT 1 AS id"), "dim", on="id").collect() == [(1, "a")]
        tables.run("INSERT INTO dim VALUES (3, 'c', 7)", "ALTER TABLE made ADD COLUMN X INT")
        assert lookup_join(spark.sql("SELECT 3 AS id"), "dim", on="id").collect() == [(3, "c", 7)]
        with pytest.raises(Exception, match="zzz"):
            stream = spark.readStream.format("lookupcache").schema("id INT, zzz INT").load(str(tables.path))
            collect_batches(stream, tmp_path / "2")
        spelled = "column 'X' of the given schema is spelled 'x'"
        with pytest.raises(Exception, match=spelled):
            spark.table("made").collect()
        with pytest.raises(Exception, match=spelled):
            collect_batches(spark.readStream.table("made"), tmp_path / "3")
