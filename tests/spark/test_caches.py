"""`lookup.cache` behind Spark: what a scan, a key predicate and a catalog table cost that a snapshot or a partial cache answers; metrics of a running cluster, and
what warms it."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest

from pyspark_lookup import LookupTable, lookup_join, warm
from pyspark_lookup.base.errors import OptionError
from pyspark_lookup.base.metrics import COUNTERS
from tests.spark.common import MODES, Calls, catalog_options, conf, load, put, saved

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
HOST = socket.gethostname()
FULL = {"lookup.keys": "id", "lookup.cache": "FULL"}
PARTIAL = {"lookup.keys": "id", "lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "1000"}


def test_a_snapshot_answers(spark: SparkSession, tmp_path: Path) -> None:
    """FULL: an unchanged table costs one HEAD and no data, a key predicate a probe; the same DataFrame sees a replaced file."""
    path = put(tmp_path / "dim.parquet", 1, range(5000))
    df = load(spark, path, FULL)
    assert sorted(map(tuple, df.collect())) == [(n, 1) for n in range(5000)]
    calls = Calls(path)
    assert df.count() == 5000
    counted = set(COUNTERS) - {"versionServedCount"}  # once more where another worker takes it
    moved = {name: value for name, value in calls.since().items() if value and name in counted}
    size = path.stat().st_size
    assert moved == {"ufsHeadCount": 1, "resolutionCount": 1, "rowsReadCount": 5000, "resolvedBytes": size}
    rows = load(spark, path, {**FULL, "lookup.where": "id IN (3, 4999, 77777)"}).collect()
    assert sorted(row.id for row in rows) == [3, 4999]
    delta = calls.since()
    assert (delta["ufsGetCount"], delta["rowsReadCount"], delta["rowGroupsReadCount"]) == (0, 2, 0)
    put(path, 2)
    assert {row.version for row in df.collect()} == {2}
    delta = calls.since()
    assert (delta["loadCount"], delta["snapshotReadThroughCount"]) == (1, 0)


def test_tasks_share_a_snapshot(spark: SparkSession, tmp_path: Path) -> None:
    """A scan of several tasks gives each row once, from the snapshot, as Spark's own reader does from the files."""
    path, rng = tmp_path / "dim", np.random.default_rng(3)
    for number, count in enumerate((90_000, 400_000, 30_000)):
        ids = rng.integers(0, 2**40, count)
        rows = {"id": ids, "v": ids * 7, "g": pa.array([f"g{n % 5}" for n in range(count)])}
        saved(path / f"{number}.parquet", rows, group=50_000)
    df = load(spark, path, {**FULL, "lookup.scan.split-size": "1 MiB"})
    assert df.rdd.getNumPartitions() > 3
    question = ("count(*)", "sum(id)", "sum(v)", "min(g)", "max(g)", "count(DISTINCT id)")
    ours = df.selectExpr(*question).collect()
    assert ours == spark.read.parquet(str(path)).selectExpr(*question).collect()
    assert df.union(df).selectExpr("sum(id)").collect()[0][0] == 2 * ours[0]["sum(id)"]
    found = LookupTable(str(path)).metrics()
    assert found["resolvedBytes"] == 3 * sum(file.stat().st_size for file in path.iterdir())  # the union reads it twice
    assert (found["snapshotReadThroughCount"], found["loadCount"]) == (0, 1)


def test_a_catalog_table_serves_what_was_loaded(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """CACHE mode from SQL: queries see the snapshot, without a store call, until a reload brings the next."""
    path = put(tmp_path / "dim.parquet", 1)
    cache = {"lookup.metadata.source": "CACHE", "lookup.full-cache.periodic-reload.interval": "1 h"}
    spark.sql(f"CREATE TABLE {name} {catalog_options(path, {**FULL, **cache})}")
    assert spark.sql(f"SELECT DISTINCT version FROM {name}").collect() == [(1,)]
    put(path, 2)
    calls = Calls(path)
    assert spark.sql(f"SELECT DISTINCT version FROM {name} a JOIN {name} b USING (id, version)").collect() == [(1,)]
    assert calls.calls() == (0, 0, 0)
    with LookupTable.for_name(spark, name) as table:
        table.reload()
        assert table.get(3) == [{"id": 3, "version": 2}]
    assert spark.sql(f"SELECT DISTINCT version FROM {name}").collect() == [(2,)]


def test_keys_are_loaded_once(spark: SparkSession, tmp_path: Path) -> None:
    """PARTIAL: keys named in lookup.where, or in a pushed filter, are loaded once, absent ones too; then they cost a HEAD, in other
    workers, in other DataFrames and without Spark as well."""
    path = put(tmp_path / "dim.parquet", 1, range(5000))
    df = load(spark, path, {**PARTIAL, "lookup.where": "id IN (3, 4999, 77777)"})
    assert sorted(row.id for row in df.collect()) == [3, 4999]
    calls = Calls(path)
    assert sorted(row.id for row in df.collect()) == [3, 4999]
    df.limit(1).collect()  # ends its worker
    again = load(spark, path, {**PARTIAL, "lookup.where": "id IN (4999, 3) AND version = 1"})
    assert again.select("version").collect() == [(1,), (1,)]
    delta = calls.since()
    assert (delta["ufsGetCount"], delta["rowGroupsReadCount"], delta["missCount"]) == (0, 0, 0)
    assert delta["hitCount"] == 3 + 3 + 2
    with LookupTable(str(path), PARTIAL) as table:
        assert table.get(77777) == []
    assert calls.since()["missCount"] == 0
    with conf(spark, "spark.sql.python.filterPushdown.enabled", "true"):
        for _ in range(2):
            df = load(spark, path, {**PARTIAL, "lookup.filter-pushdown": "true"})
            assert df.filter("id = 7 AND version > 0").collect() == [(7, 1)]
    delta = calls.since()
    assert (delta["missCount"], delta["hitCount"]) == (1, 1)


def test_a_catalog_table_by_key(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """PARTIAL: a table of the catalog keeps its options; a join over its keys and lookups answer through one cache."""
    path = put(tmp_path / "dim.parquet", 1)
    spark.sql(f"CREATE TABLE {name} {catalog_options(path, {**PARTIAL, 'lookup.where': 'id IN (1, 2, 3)'})}")
    assert spark.sql(f"SELECT count(*) FROM {name} a JOIN {name} b USING (id)").collect() == [(3,)]
    with LookupTable.for_name(spark, name) as table:
        assert table.get(2) == [{"id": 2, "version": 1}]
        assert table.get(9) == []  # lookup.where holds for lookups, too
        metrics = table.metrics()
    assert metrics["missCount"] == metrics["loadCount"] == 4
    shown = {row.name: row.value for row in load(spark, path, {"lookup.view": "metrics"}).collect()}
    assert shown["loadCount"] == 4


def test_metrics_of_all_hosts(spark: SparkSession, tmp_path: Path) -> None:
    """Each host that could be reached answers once, whichever tasks ran on it, and whenever it is asked; what a worker counts says
    which application it works for."""
    path = put(tmp_path / "dim.parquet", 1)
    assert lookup_join(spark.range(20), str(path), on="id", options=MODES["partial"]).count() == 20
    view = load(spark, path, {"lookup.view": "metrics"})
    for _ in range(2):  # of a DataFrame that is planned once
        rows = view.collect()
        assert {row.host for row in rows} == {HOST}
        assert len({row.name for row in rows}) == len(rows)
    values = {row.name: row.value for row in rows}
    assert values["hitCount"] + values["missCount"] == 20
    assert values["lookupTimeCount"] > 0
    table = LookupTable(str(path))
    assert table.metrics()["missCount"] == values["missCount"]
    assert view.filter("name = 'diskFreeBytes'").first().value > 0
    workers = table.metrics_by_worker()
    assert workers
    assert all(name.startswith(HOST) for name in workers)


def test_warm_executors(spark: SparkSession, tmp_path: Path) -> None:
    """Every cache directory that was reached has the current version then, and says so; what fails is told, too."""
    path = put(tmp_path / "dim" / "a.parquet", 1, range(1000)).parent
    (host,) = warm(spark, path, tasks=4, options={"lookup.keys": "id"})
    table = LookupTable(str(path), {"lookup.keys": "id", "lookup.cache": "FULL"})
    assert (host.host, host.version, host.rows, host.error) == (HOST, table.version, 1000, None)
    before = table.metrics()["ufsGetCount"]
    assert table.get(7) == [{"id": 7, "version": 1}]
    assert table.metrics()["ufsGetCount"] == before
    (path / "noise.parquet").write_bytes(b"noise")
    (failed,) = warm(spark, table, tasks=2)
    assert failed.version is None
    assert "noise.parquet" in str(failed.error)
    with pytest.raises(OptionError, match="unknown option lookup"):
        warm(spark, path, options={"lookup.keyz": "id"})
    with pytest.raises(ValueError, match="tasks = 0"):
        warm(spark, path, tasks=0)
