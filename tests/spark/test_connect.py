"""Spark Connect: a client that shares nothing with its server but the file system does what a classic session does."""

import os
import sys
from pathlib import Path

import pytest

from tests.support.fuzzing import BY_NIGHT
from tests.support.preloaded import python_variables
from tests.support.spark_tables import CONNECT, publish_version, run_script, saved
from tests.support.sparks import DATA_SOURCES, PIPELINES, needs

pytestmark = [needs(DATA_SOURCES), pytest.mark.spark, pytest.mark.slow]
_FENCE = """
import sys
import traceback

class Fence:
    def find_spec(self, name, path=None, target=None):
        if name != "pyiceberg":
            return
        if not any(frame.filename.endswith("spark/reading.py") for frame in traceback.extract_stack()):
            raise ModuleNotFoundError("this task has no PyIceberg")

if "pyspark.worker" in sys.orig_argv:  # what computes tasks, not what plans them
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyiceberg"]:
        del sys.modules[name]
    sys.meta_path.insert(0, Fence())
"""


def without_pyiceberg(home: Path) -> str:
    """A Python path on which tasks of lookups cannot import PyIceberg; those of reads ask which version is current."""
    (home / "fence").mkdir()
    (home / "fence" / "sitecustomize.py").write_text(_FENCE)
    return os.pathsep.join([str(home / "fence"), *(place for place in sys.path if place)])


_BEGIN = f"""{CONNECT}
import sys
from pathlib import Path
path, replacement = sys.argv[1:]
spark = connect.getOrCreate()
"""


def test_spark_connect(tmp_path: Path) -> None:
    """The source is discovered, and every action reads the current version; SQL tables and errors are as elsewhere. Tasks that are told a version need no PyIceberg."""
    path = saved(tmp_path / "dim.parquet", {"id": [1, 2], "name": ["a", "b"]})
    replacement = saved(tmp_path / "new.parquet", {"id": [1, 2], "name": ["c", "d"]})
    script = """
import os
df = spark.read.format("lookupcache").load(path)
print("FIRST", sorted(row.name for row in df.collect()))
spark.sql(f"CREATE TABLE dim USING lookupcache OPTIONS (path '{path}')")
os.replace(replacement, path)
print("SECOND", sorted(row.name for row in df.collect()))
print("TABLE", sorted(row.name for row in spark.sql("SELECT name FROM dim").collect()))
from pyspark.sql import functions as sf
from pyspark_lookup import LookupTable, lookup_join, register_lookup
print("NAMED", LookupTable.for_name(spark, "dim").scan(["name"]).num_rows)
from tests.support.spark_tables import WAYS, load
from tests.support.spark_lakes import IcebergDim

@sf.udf("boolean")
def has_pyiceberg(number):
    try:
        import pyiceberg
    except ImportError:
        return False
    return True

print("WORKERS", spark.range(1).select(has_pyiceberg("id")).first()[0])
dim = IcebergDim(Path(path).parent)
for number in range(COMMITS):
    dim.append(range(number, number + 1), number)
    if not number:
        register_lookup(spark, "dim_of", dim.path, "id", options=dim.options)
    joined = spark.range(5)
    for way in ("none", "broadcast"):
        how = {**WAYS[way], "options": {**dim.options, **WAYS[way].get("options", {})}}
        joined = lookup_join(joined, dim.path, "id", "inner", columns=["version"], prefix=f"{way}_", **how)
    called = spark.sql("SELECT count(dim_of(id).version) FROM range(5)").first()[0]
    print("ICEBERG", load(spark, dim.path, dim.options).count(), joined.count(), called)
try:
    spark.read.format("lookupcache").option("lookup.cahe", "NONE").load(path).schema
except Exception as problem:
    print("ERROR", "did you mean lookup.cache" in str(problem))
spark.sql("DROP TABLE dim")
spark.stop()
"""
    variables = {**python_variables(tmp_path), "PYTHONPATH": without_pyiceberg(tmp_path)}
    commits = 2 if BY_NIGHT else 1
    assert run_script(tmp_path, f"COMMITS = {commits}{_BEGIN}{script}", path, replacement, variables=variables) == [
        "FIRST ['a', 'b']", "SECOND ['c', 'd']", "TABLE ['c', 'd']", "NAMED 2", "WORKERS False",
        *(f"ICEBERG {n} {n} {n}" for n in range(1, commits + 1)), "ERROR True",
    ]  # fmt: skip


@needs(PIPELINES)
@pytest.mark.nightly
def test_flows_of_pipelines(tmp_path: Path) -> None:
    """The function of a pipeline's flow may not analyse anything: there, lookups are planned without analysis, and tasks check the keys."""
    path = saved(tmp_path / "dim.parquet", {"id": [1, 2], "name": ["c", "d"]})
    script = """
from datetime import datetime, timezone
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark_lookup import lookup_join
from pyspark.pipelines.add_pipeline_analysis_context import add_pipeline_analysis_context
spark.sql(f"CREATE TABLE dim USING lookupcache OPTIONS (path '{path}')")

def enrich(query, table, on, *others, **given):
    df = spark.sql(query)
    try:
        with add_pipeline_analysis_context(spark, "graph", "flow"):  # now the server analyses nothing
            df = lookup_join(df, table, on, **given)
            for other in others:
                df = lookup_join(df, *other)
        shown = sorted(map(tuple, df.collect()), key=str)
    except Exception as problem:
        shown = next(part for part in FAILURES if part in str(problem))
    print("FLOW", shown)

FAILURES = [
    "keys for column 'id' of the table are string, the column is int64",
    "'k' is string collate UTF8_LCASE: Spark compares its values by rules",
    "'broadcast'", "LookupTable.for_name(spark, 'dim')", "argument as_of has the type timestamp[us], but the",
]
at = [datetime(2024, 1, day, tzinfo=timezone.utc) for day in (1, 3)]
history = path + "-history.parquet"
pq.write_table(pa.table({"id": [1, 1], "since": pa.array(at, pa.timestamp("us", "UTC")), "v": ["old", "new"]}), history)
numbers = "SELECT * FROM VALUES {} AS t(k)"
enrich(numbers.format("(1), (9), (NULL)"), path, {"k": "id"})
enrich(numbers.format("(1.00BD), (2.50BD)"), path, {"k": "id"}, how="inner")
enrich(numbers.format("(1)"), path, {"k": "id"}, (path, {"name": "name"}, "left", ["id"]), options={"lookup.on-error": "NULL"})
enrich(numbers.format("('1')"), path, {"k": "id"})
enrich("SELECT 'A' COLLATE UTF8_LCASE AS k", path, {"k": "name"})
enrich(numbers.format("(1)"), path, {"k": "id"}, strategy="broadcast")
enrich(numbers.format("(1)"), "dim", {"k": "id"})
since = {"as_of": "t", "options": {"lookup.valid-from": "since"}, "columns": ["v"]}
spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
for moment in "TIMESTAMP'2024-01-03 00:59'", "TIMESTAMP'2024-01-03 01:00'", "TIMESTAMP_NTZ'2024-01-03 01:00'":
    enrich(f"SELECT 1 AS k, {moment} AS t", history, {"k": "id"}, **since)
spark.stop()
"""
    assert run_script(tmp_path, _BEGIN + script, path, "", variables=python_variables(tmp_path), timeout_s=200) == [
        "FLOW [(1, 'c'), (9, None), (None, None)]",
        "FLOW [(Decimal('1.00'), 'c')]",
        "FLOW [(1, 'c', None, 1)]",
        "FLOW keys for column 'id' of the table are string, the column is int64",
        "FLOW 'k' is string collate UTF8_LCASE: Spark compares its values by rules",
        "FLOW 'broadcast'",
        "FLOW LookupTable.for_name(spark, 'dim')",
        "FLOW [(1, datetime.datetime(2024, 1, 2, 23, 59), 'old')]",
        "FLOW [(1, datetime.datetime(2024, 1, 3, 0, 0), 'new')]",
        "FLOW argument as_of has the type timestamp[us], but the",
    ]


@pytest.mark.timeout(560)  # some twenty steps, each with workers of its own
@pytest.mark.nightly
def test_lookups_and_writes_over_spark_connect(tmp_path: Path) -> None:
    """Joins, streams, SQL functions and errors are as in a classic session; a managed table is written, joined and followed."""
    path = publish_version(tmp_path / "dim.parquet", 1)
    script = """
import os
from pyspark_lookup import explain_lookup, lookup_join, register_lookup
facts = spark.range(20)
for strategy, how in (("broadcast", "left"), ("auto", "inner")):
    joined = lookup_join(facts, path, "id", how, prefix="p_", strategy=strategy)
    print("JOIN", joined.columns, joined.count(), joined.filter("p_version = 1").count())
joined = lookup_join(lookup_join(facts, path, "id", strategy="cache"), path, "id", prefix="b_", strategy="cache")
print("EXPLAINED", explain_lookup(joined).count("strategy: cache (asked for)"))
register_lookup(spark, "dim_of", path, "id")
print("SQL", tuple(spark.sql("SELECT sum(dim_of(id).version), sum(dim_of(id + 1).version) FROM range(20)").collect()[0]))
print("ROWS", spark.sql("SELECT * FROM dim_of_rows(3)").collect())
facts.write.parquet("events")
stream = lookup_join(spark.readStream.schema("id long").parquet("events"), path, "id")
query = stream.writeStream.format("memory").queryName("seen").start()
for moment in ("BEFORE", "AFTER"):
    query.processAllAvailable()
    print(moment, spark.sql("SELECT sum(version) FROM seen").collect()[0][0], joined.agg({"b_version": "sum"}).collect()[0][0])
    if moment == "BEFORE":
        os.replace(replacement, path)
        facts.write.mode("append").parquet("events")
(observed,) = query.lastProgress["observedMetrics"].values()
print("OBSERVED", len(observed["values"][0]), observed["values"][1] == path)  # as Connect has it
query.stop()
texts = spark.createDataFrame([("a",)], "id string")
for df, arguments in ((facts, {"how": "outer"}), (facts, {"columns": ["nothing"]}), (texts, {})):
    try:
        lookup_join(df, path, **{"on": "id", **arguments})
    except Exception as problem:
        print("ERROR", type(problem).__name__)

path = os.path.abspath("table")
ours = {"format": "lookupcache", "path": path}
rows = spark.sql("SELECT * FROM VALUES (1, 'a'), (2, 'b') AS t(id, name)")
rows.write.save(**ours, mode="append", **{"lookup.keys": "id"})
df = spark.read.load(**ours)
def seen():
    return " ".join(f"{row.id}{row.name}" for row in df.orderBy("id").collect())
changed = spark.sql("SELECT * FROM VALUES (2, 'c'), (3, 'd') AS t(id, name)")
changed.write.save(**ours, mode="append", **{"lookup.write.mode": "upsert"})
print("UPSERT", seen())
spark.sql(f"CREATE TABLE dim USING lookupcache OPTIONS (path '{path}')")
spark.sql("INSERT INTO dim VALUES (4, 'e')")
spark.range(5, 7).selectExpr("CAST(id AS INT) AS id").write.parquet("arriving")
for _ in range(2):
    writer = spark.readStream.schema("id int").parquet("arriving").selectExpr("id", "'s' AS name").writeStream
    writer = writer.format("lookupcache").option("checkpointLocation", "written").trigger(availableNow=True)
    assert writer.start(path).awaitTermination(120)
print("STREAM", seen())
changes = spark.readStream.load(**ours, **{"lookup.view": "changes"})
writer = changes.writeStream.option("checkpointLocation", "followed").trigger(availableNow=True)
assert writer.format("parquet").start(os.path.abspath("changes")).awaitTermination(120)
found = spark.read.parquet(os.path.abspath("changes")).select("id", "name", "_change_type").sort("id").collect()
print("THERE", " ".join(f"{row.id}{row.name}:{row._change_type}" for row in found))
import pyarrow as pa
from pyspark_lookup import LookupTable
managed = path + "-managed"
LookupTable(managed, {"lookup.keys": "id"}).write(pa.table({"id": [1]}))
LookupTable(managed + "-nets", {"lookup.keys": "network"}).write([{"network": "10.0.0.0/8", "place": "company"}])
LookupTable(managed + "-nets").alter(properties={"lookup.cidr": "network"})
register_lookup(spark, "place_of", managed + "-nets")
joined = lookup_join(spark.sql("SELECT '10.1.2.3' AS ip"), managed + "-nets", cidr="ip", columns=["place"])
print("NETWORKS", joined.first().place, spark.sql("SELECT place_of('10.9.9.9').place").first()[0])
spark.range(1, 4).write.parquet("batches")

def act(batch, number):  # in a process of the server's
    from concurrent.futures import ThreadPoolExecutor
    made = [lookup_join(batch, managed, "id", "inner", [], strategy=way) for way in ("cache", "broadcast")]
    seen = [frame.count() for frame in made]
    LookupTable(managed).write(pa.table({"id": [2]}))
    with ThreadPoolExecutor(1) as pool:
        seen += [pool.submit(frame.count).result() for frame in made]
    seen.append(lookup_join(batch, managed, "id", "inner", []).count())
    Path(path + "-seen").write_text(str(seen))

stream = spark.readStream.schema("id long").parquet("batches").writeStream.foreachBatch(act)
stream = stream.option("checkpointLocation", "batches-seen").trigger(availableNow=True)
assert stream.start().awaitTermination(120)
print("BATCH", Path(path + "-seen").read_text())
"""
    replacement = publish_version(tmp_path / "replacement.parquet", 10)
    assert run_script(
        tmp_path, _BEGIN + script, path, replacement, variables=python_variables(tmp_path), timeout_s=500
    ) == [
        *["JOIN ['id', 'p_version'] 20 10", "JOIN ['id', 'p_version'] 10 10"], "EXPLAINED 2", "SQL (10, 9)",
        "ROWS [Row(id=3, version=1)]", "BEFORE 10 10", "AFTER 110 100", "OBSERVED 15 True",
        *["ERROR OptionError", "ERROR SchemaError", "ERROR SchemaError"], "UPSERT 1a 2c 3d", "STREAM 1a 2c 3d 4e 5s 6s",
        "THERE 1a:insert 2c:insert 3d:insert 4e:insert 5s:insert 6s:insert", "NETWORKS company company", "BATCH [1, 1, 1, 1, 2]",
    ]  # fmt: skip
