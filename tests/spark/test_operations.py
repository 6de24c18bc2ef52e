"""What a running cluster can be asked: its metrics, and to be warm."""

from __future__ import annotations

import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from pyspark_lookup import LookupTable, lookup_join, warm
from pyspark_lookup.base.errors import OptionError

pytestmark = pytest.mark.spark


def put(path: Path, rows: int) -> Path:
    path.mkdir(exist_ok=True)
    pq.write_table(pa.table({"id": range(rows), "name": [f"n{n}" for n in range(rows)]}), path / f"{rows}.parquet")
    return path


def test_metrics_of_all_hosts(spark: SparkSession, tmp_path: Path) -> None:
    """Each host that could be reached answers once, whichever tasks ran on it, and whenever it is asked."""
    path = put(tmp_path / "dim", 10)
    facts = spark.range(20)
    assert (
        lookup_join(
            facts, str(path), on="id", options={"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": 100}
        ).count()
        == 20
    )
    view = spark.read.format("lookupcache").option("lookup.view", "metrics").load(str(path))
    for _ in range(2):  # of a DataFrame that is planned once
        rows = view.collect()
        assert {row.host for row in rows} == {socket.gethostname()}
        assert len({row.name for row in rows}) == len(rows)
    values = {row.name: row.value for row in rows}
    assert values["hitCount"] + values["missCount"] == 20
    assert values["lookupTimeCount"] > 0
    own = LookupTable(str(path)).metrics()
    assert own["missCount"] == values["missCount"]
    assert view.filter("name = 'diskFreeBytes'").first().value > 0


def test_workers_count_for_their_application(spark: SparkSession, tmp_path: Path) -> None:
    """What a worker counts says which application it works for."""
    path = put(tmp_path / "dim", 10)
    spark.read.format("lookupcache").load(str(path)).collect()
    workers = LookupTable(str(path)).metrics_by_worker()
    assert len(workers) >= 1
    assert all(name.startswith(socket.gethostname()) for name in workers)


def test_warm_executors(spark: SparkSession, tmp_path: Path) -> None:
    """Every cache directory that was reached has the current version then, and says so; what fails is told, too."""
    path = put(tmp_path / "dim", 1000)
    (host,) = warm(spark, path, tasks=4, options={"lookup.keys": "id"})
    table = LookupTable(str(path), {"lookup.keys": "id", "lookup.cache": "FULL"})
    assert (host.host, host.version, host.rows, host.error) == (socket.gethostname(), table.version, 1000, None)
    before = table.metrics()["ufsGetCount"]
    assert table.get(7) == [{"id": 7, "name": "n7"}]
    assert table.metrics()["ufsGetCount"] == before
    (path / "noise.parquet").write_bytes(b"noise")
    (failed,) = warm(spark, table, tasks=2)
    assert failed.version is None
    assert "noise.parquet" in str(failed.error)
    with pytest.raises(OptionError, match="unknown option lookup"):
        warm(spark, path, options={"lookup.keyz": "id"})
    with pytest.raises(ValueError, match="tasks = 0"):
        warm(spark, path, tasks=0)
