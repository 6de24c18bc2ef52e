"""Declarative Pipelines: a project on disk that `spark-pipelines` runs, once and again after its files have changed."""

import os
import sys
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pyspark
import pytest

from tests.support.spark_tables import run_command, saved
from tests.support.sparks import PIPELINES, needs

pytestmark = [needs(PIPELINES), pytest.mark.spark, pytest.mark.nightly]
_SPEC = """
name: enrichment
storage: {home}/storage
catalog: spark_catalog
database: default
libraries:
  - glob:
      include: transformations/**
"""
_FLOWS = """
from pyspark import pipelines as dp
from pyspark.sql import SparkSession
from pyspark_lookup import NotSupportedError, lookup_join, register_lookup

spark = SparkSession.active()
AIRPORTS, FLIGHTS = {airports!r}, {flights!r}

try:
    register_lookup(spark, "airport", AIRPORTS, "code")
except NotSupportedError as problem:
    print("REFUSED", problem)


@dp.table
def flights():
    return spark.readStream.schema("flight LONG, dest STRING, backup STRING").parquet(FLIGHTS)


@dp.table
def arrivals():
    df = lookup_join(spark.readStream.table("flights"), AIRPORTS, on={{"dest": "code"}})
    return lookup_join(df, AIRPORTS, on={{"backup": "code"}}, prefix="backup_")


@dp.materialized_view
def known():
    return lookup_join(spark.read.table("flights"), AIRPORTS, on={{"dest": "code"}}, how="inner")
"""


def read_rows(dataset: Path) -> list[tuple[Any, ...]]:
    """The rows of a pipeline's dataset, in order."""
    files = [str(file) for file in dataset.glob("*.parquet")]
    return sorted((tuple(row.values()) for row in ds.dataset(files).to_table().to_pylist()), key=str)


def run(project: Path) -> str:
    """What a run of the pipeline prints."""
    conf = {
        "spark.sql.catalogImplementation": "hive",  # so that the next run knows the datasets of this one
        "spark.sql.warehouse.dir": str(project / "warehouse"),
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
    }
    options = [part for key, value in conf.items() for part in ("--conf", f"{key}={value}")]
    program = Path(pyspark.__file__).with_name("bin") / "spark-pipelines"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return run_command(program, "run", *options, cwd=project, env=env)


@pytest.mark.timeout(1200)
def test_flows_look_up_in_the_current_table(tmp_path: Path) -> None:
    """Lookups on a pipeline's own datasets: a streaming table keeps what was current, a materialized view gets what is."""
    airports = tmp_path / "airports" / "a.parquet"
    flights = tmp_path / "flights"
    project = tmp_path / "project"
    (project / "transformations").mkdir(parents=True)
    (project / "spark-pipeline.yml").write_text(_SPEC.format(home=project.as_uri()))
    flows = _FLOWS.format(airports=str(airports.parent), flights=str(flights))
    (project / "transformations" / "flows.py").write_text(flows)

    saved(airports, {"code": ["EWR", "JFK"], "name": ["Newark", "Kennedy"]})
    saved(flights / "1.parquet", {"flight": [1, 2], "dest": ["JFK", "XXX"], "backup": ["EWR", "EWR"]})
    output = run(project)
    assert "REFUSED register_lookup, name = 'airport': Spark creates no functions in a pipeline" in output
    first = [(1, "JFK", "EWR", "Kennedy", "Newark"), (2, "XXX", "EWR", None, "Newark")]
    assert read_rows(project / "warehouse" / "arrivals") == first
    assert read_rows(project / "warehouse" / "known") == [(1, "JFK", "EWR", "Kennedy")]

    saved(airports, {"code": ["EWR", "JFK", "XXX"], "name": ["Liberty", "Kennedy", "Nowhere"]})
    saved(flights / "2.parquet", {"flight": [3], "dest": ["EWR"], "backup": ["XXX"]})
    run(project)
    assert read_rows(project / "warehouse" / "arrivals") == [*first, (3, "EWR", "XXX", "Liberty", "Nowhere")]
    expected = [(1, "JFK", "EWR", "Kennedy"), (2, "XXX", "EWR", "Nowhere"), (3, "EWR", "XXX", "Liberty")]
    assert read_rows(project / "warehouse" / "known") == expected
