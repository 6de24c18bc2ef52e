"""What takes a Spark application of its own: a metastore that outlives it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = [pytest.mark.spark, pytest.mark.nightly]

_HIVE = """
import sys
from pyspark.sql import SparkSession
warehouse, step = sys.argv[1:]
spark = (SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").enableHiveSupport()
    .config("spark.sql.warehouse.dir", warehouse + "/warehouse")
    .config("spark.hadoop.javax.jdo.option.ConnectionURL", f"jdbc:derby:;databaseName={warehouse}/metastore;create=true")
    .config("spark.driver.extraJavaOptions", f"-Dderby.system.home={warehouse}").getOrCreate())
"""


def run(tmp_path: Path, script: str, *arguments: object, timeout_s: float = 240) -> str:
    """The output of a Python program of its own; its failure fails the test with that output."""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_table_survives_in_a_hive_metastore(tmp_path: Path) -> None:
    """A table created in the Hive (Derby) catalog is read by another application, with its options."""
    path = tmp_path / "dim.parquet"
    pq.write_table(pa.table({"id": [1, 2, 3], "name": ["a", "b", "c"]}), path)
    create = f"""
spark.sql("CREATE TABLE dim USING lookupcache OPTIONS (path '{path}', 'lookup.keys' 'id', 'lookup.where' 'id > 1')")
print("ROWS", sorted(row.name for row in spark.table("dim").collect()))
"""
    assert "ROWS ['b', 'c']" in run(tmp_path, _HIVE + create, tmp_path, "create")
    pq.write_table(pa.table({"id": [1, 2, 3, 4], "name": ["a", "b", "c", "new"]}), path)
    read = """
print("ROWS", sorted(row.name for row in spark.sql("SELECT * FROM dim").collect()))
print("ONE", spark.sql("SELECT * FROM dim WITH (`lookup.where` = 'id = 1')").collect()[0].name)
spark.sql("DROP TABLE dim")
"""
    output = run(tmp_path, _HIVE + read, tmp_path, "read")
    assert "ROWS ['b', 'c', 'new']" in output
    assert "ONE a" in output
    assert path.exists()
