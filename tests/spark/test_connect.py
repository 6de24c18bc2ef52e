"""Spark Connect: a client that shares nothing with its server but the file system does what a classic session does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spark.common import put, said_by, saved

pytestmark = [pytest.mark.spark, pytest.mark.slow]

_CONNECT = """
import sys
from pyspark.sql import SparkSession
path, replacement = sys.argv[1:]
spark = SparkSession.builder.remote("local[2]").getOrCreate()
"""


def test_spark_connect(tmp_path: Path) -> None:
    """Over Spark Connect: auto-discovered, current at every action, SQL tables and errors as elsewhere."""
    path = saved(tmp_path / "dim.parquet", {"id": [1, 2], "name": ["a", "b"]})
    replacement = saved(tmp_path / "new.parquet", {"id": [1, 2], "name": ["c", "d"]})
    script = """
import os
df = spark.read.format("lookupcache").load(path)
print("FIRST", sorted(row.name for row in df.collect()))
spark.sql(f"CREATE TABLE dim USING lookupcache OPTIONS (path '{path}')")
os.replace(replacement, path)
print("SECOND", sorted(row.name for row in df.collect()), df.filter("id = 1").count(), df.count())
print("TABLE", sorted(row.name for row in spark.sql("SELECT name FROM dim").collect()))
from pyspark_lookup import LookupTable
print("NAMED", LookupTable.for_name(spark, "dim").scan(["name"]).num_rows)
try:
    spark.read.format("lookupcache").option("lookup.cahe", "NONE").load(path).schema
except Exception as problem:
    print("ERROR", "did you mean lookup.cache" in str(problem))
spark.sql("DROP TABLE dim")
spark.stop()
"""
    assert said_by(tmp_path, _CONNECT + script, path, replacement) == [
        "FIRST ['a', 'b']",
        "SECOND ['c', 'd'] 1 2",
        "TABLE ['c', 'd']",
        "NAMED 2",
        "ERROR True",
    ]


@pytest.mark.nightly
def test_lookups_over_spark_connect(tmp_path: Path) -> None:
    """Over Spark Connect: the join, its explanation, a stream, SQL functions and errors work as in a classic session."""
    path = put(tmp_path / "dim.parquet", 1)
    script = """
import os
from pyspark.sql import functions as sf
from pyspark_lookup import explain_lookup, lookup_join, register_lookup
from pyspark_lookup.base.errors import PysparkLookupError
facts = spark.range(20)
for strategy in ("cache", "broadcast", "auto"):
    for how in ("left", "inner"):
        joined = lookup_join(facts, path, "id", how, prefix="p_", strategy=strategy)
        print("JOIN", joined.columns, joined.count(), joined.filter("p_version = 1").count())
joined = lookup_join(lookup_join(facts, path, "id", strategy="cache"), path, "id", prefix="b_", strategy="cache")
print("EXPLAINED", explain_lookup(joined).count("strategy: cache (asked for)"))
register_lookup(spark, "dim", path, "id")
print("SQL", spark.sql("SELECT sum(dim(id).version), sum(dim(id + 1).version) FROM range(20)").collect()[0])
print("ROWS", spark.sql("SELECT * FROM dim_rows(3)").collect())
facts.write.parquet("events")
stream = lookup_join(spark.readStream.schema("id long").parquet("events"), path, "id")
query = stream.writeStream.format("memory").queryName("seen").start()
query.processAllAvailable()
print("BEFORE", spark.sql("SELECT sum(version) FROM seen").collect()[0][0], joined.count())
os.replace(replacement, path)
facts.write.mode("append").parquet("events")
query.processAllAvailable()
print("AFTER", spark.sql("SELECT sum(version) FROM seen").collect()[0][0], joined.agg({"b_version": "sum"}).collect()[0][0])
(observed,) = query.lastProgress["observedMetrics"].values()
print("OBSERVED", len(observed["values"][0]), observed["values"][1] == path)  # as Connect has it
query.stop()
spark.createDataFrame([("a",)], "id string").createOrReplaceTempView("texts")
key = "CAST(id % 40 AS STRING) AS g"
spark.range(200).selectExpr("IF(id % 9 = 0, NULL, id % 60) AS k", key, "id AS v").write.parquet("many")
left = spark.range(300).selectExpr("IF(id % 7 = 0, NULL, id % 90) AS k", key, "id")
for on, how in ((["k"], "left"), (["g", "k"], "inner")):
    def rows_of(joined):
        return sorted(map(str, joined.filter("id % 3 < 2").select("id", "v").collect()))
    expected = rows_of(left.join(spark.read.parquet("many"), on, how))
    for options in ({"lookup.cache": "NONE"}, {"lookup.cache": "FULL"}, {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "1000"}):
        ours = lookup_join(left, os.path.abspath("many"), on, how, strategy="cache", columns=["v"], options=options)
        print("SAME", rows_of(ours) == expected or (on, how, options))
for arguments in ({"how": "outer"}, {"columns": ["nothing"]}, {"on": {"id": "version"}, "columns": ["id"]}):
    try:
        lookup_join(facts, path, **{"on": "id", **arguments})
    except PysparkLookupError as problem:
        print("ERROR", type(problem).__name__)
try:
    lookup_join(spark.table("texts"), path, "id")
except PysparkLookupError as problem:
    print("ERROR", problem)
"""
    lines = said_by(tmp_path, _CONNECT + script, path, put(tmp_path / "replacement.parquet", 10))
    assert lines[:-1] == [
        *["JOIN ['id', 'p_version'] 20 10", "JOIN ['id', 'p_version'] 10 10"] * 3,
        "EXPLAINED 2",
        "SQL Row(sum(dim(id).version)=10, sum(dim((id + 1)).version)=9)",
        "ROWS [Row(id=3, version=1)]",
        "BEFORE 10 20",
        "AFTER 110 100",
        "OBSERVED 32 True",
        *["SAME True"] * 6,
        "ERROR OptionError",
        "ERROR SchemaError",
        "ERROR OptionError",
    ]
    assert "'id' is string, the table's 'id' is bigint" in lines[-1]


@pytest.mark.timeout(560)  # nine steps, each with workers of its own
@pytest.mark.nightly
def test_writes_over_spark_connect(tmp_path: Path) -> None:
    """Over Spark Connect: a managed table is written by batches, SQL and streams, joined, and its changes are followed."""
    script = """
import os
from pyspark_lookup import LookupTable, lookup_join
rows = spark.sql("SELECT * FROM VALUES (1, 'a'), (2, 'b') AS t(id, name)")
rows.write.format("lookupcache").mode("append").option("lookup.keys", "id").save(path)
df = spark.read.format("lookupcache").load(path)
def seen():
    return " ".join(f"{row.id}{row.name}" for row in df.orderBy("id").collect())
print("FIRST", seen())
changed = spark.sql("SELECT * FROM VALUES (2, 'c'), (3, 'd') AS t(id, name)")
changed.write.format("lookupcache").mode("append").option("lookup.write.mode", "upsert").save(path)
print("UPSERT", seen())
spark.sql(f"CREATE TABLE dim USING lookupcache OPTIONS (path '{path}')")
spark.sql("INSERT INTO dim VALUES (4, 'e')")
print("INSERT", seen())
spark.range(5, 7).selectExpr("CAST(id AS INT) AS id").write.parquet("arriving")
def write_stream():
    arriving = spark.readStream.schema("id int").parquet("arriving").selectExpr("id", "'s' AS name")
    writer = arriving.writeStream.format("lookupcache").option("checkpointLocation", "written")
    assert writer.trigger(availableNow=True).start(path).awaitTermination(120)
write_stream()
write_stream()
print("STREAM", seen())
joined = lookup_join(spark.range(1, 4).selectExpr("CAST(id AS INT) AS id"), path, "id", strategy="cache")
print("JOIN", sorted(row.name for row in joined.collect()))
changes = spark.readStream.format("lookupcache").option("lookup.view", "changes").load(path)
def follow():
    writer = changes.writeStream.option("checkpointLocation", "followed").trigger(availableNow=True)
    assert writer.format("parquet").start(os.path.abspath("changes")).awaitTermination(120)
    found = spark.read.parquet(os.path.abspath("changes")).select("id", "name", "_change_type").sort("id", "_change_type").collect()
    return " ".join(f"{row.id}{row.name}:{row._change_type}" for row in found)
print("THERE", follow())
LookupTable(path).delete(spark.sql("SELECT 1 AS id").toArrow())
rows.filter("id = 2").write.format("lookupcache").mode("append").option("lookup.write.mode", "upsert").save(path)
print("CHANGED", follow())
rows.write.format("lookupcache").mode("overwrite").save(path)
print("OVERWRITE", seen())
try:
    rows.withColumn("extra", rows.id).write.format("lookupcache").mode("append").save(path)
except Exception as problem:
    print("ERROR", "merge-schema" in str(problem))
"""
    assert said_by(tmp_path, _CONNECT + script, tmp_path / "dim", "", timeout_s=500) == [
        "FIRST 1a 2b",
        "UPSERT 1a 2c 3d",
        "INSERT 1a 2c 3d 4e",
        "STREAM 1a 2c 3d 4e 5s 6s",
        "JOIN ['a', 'c', 'd']",
        "THERE 1a:insert 2c:insert 3d:insert 4e:insert 5s:insert 6s:insert",
        "CHANGED 1a:delete 1a:insert 2c:insert 2b:update_postimage 2c:update_preimage 3d:insert 4e:insert 5s:insert 6s:insert",
        "OVERWRITE 1a 2b",
        "ERROR True",
    ]
