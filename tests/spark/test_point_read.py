"""A point read of a large remote file: what a cold one may cost, and that a second one costs one call."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup import LookupTable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.s3server import S3Server

pytestmark = [pytest.mark.spark, pytest.mark.slow]
ROWS, GROUPS = 1_000_000, 16


@pytest.fixture(scope="module")
def large(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An 80 MB zstd parquet file of 16 row groups, most of it in columns that point reads do not ask for."""
    rng = np.random.default_rng(3)
    ids = np.arange(ROWS) * 3
    table = pa.table(
        {
            "id": ids,
            "name": pa.array(np.char.add("customer ", ids.astype(str))),
            "score": rng.integers(0, 1000, ROWS),
            "payload": pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(72), ROWS, [None, pa.py_buffer(rng.bytes(72 * ROWS))]
            ),
        }
    )
    path: Path = tmp_path_factory.mktemp("large") / "dim.parquet"
    pq.write_table(table, path, compression="zstd", row_group_size=ROWS // GROUPS)
    assert 75e6 < path.stat().st_size < 90e6
    assert pq.read_metadata(path).num_row_groups == GROUPS
    s3_server.client.create_bucket(Bucket="large")
    s3_server.client.upload_file(str(path), "large", "dim.parquet")
    return "s3://large/dim.parquet"


def test_cold_point_read_through_spark(spark: SparkSession, s3: S3Server, large: str) -> None:
    """`lookup.where = 'id = …'`: at most 1 HEAD + 3 GET and 1 MB (and planning's one LIST); again: 1 HEAD, 0 GET."""
    s3.log.clear()
    df = (
        spark.read.format("lookupcache")
        .option("lookup.storage.endpoint_url", s3.endpoint)
        .option("lookup.columns", "id,name,score")
        .option("lookup.where", "id = 1500000")
        .load(large)
    )
    assert s3.count()["list"] == 1
    assert [row.name for row in df.collect()] == ["customer 1500000"]
    counts = s3.count()
    assert (counts["head"], counts["list"]) == (1, 1)
    assert counts["get"] <= 3
    assert counts["bytes"] <= 1_000_000
    s3.log.clear()
    assert [row.name for row in df.collect()] == ["customer 1500000"]
    assert s3.count() == {"head": 1, "list": 0, "get": 0, "bytes": 0}


def test_cold_point_read_without_spark(s3: S3Server, large: str, cache_dir: Path) -> None:
    """The engine alone: a hit costs 3 GET, an absent key no value column, a known key again 1 HEAD."""
    options = {"lookup.storage.endpoint_url": s3.endpoint, "lookup.cache.dir": str(cache_dir)}
    with LookupTable(large, options) as table:
        s3.log.clear()
        assert table.scan(["name"], "id = 3000").to_pylist() == [{"name": "customer 3000"}]
        counts = s3.count()
        assert counts["head"] + counts["list"] == 1
        assert counts["get"] <= 3
        assert counts["bytes"] <= 1_000_000
        s3.log.clear()
        assert table.scan(["name"], "id = 3000").num_rows == 1
        assert s3.count() == {"head": 1, "list": 0, "get": 0, "bytes": 0}
        s3.log.clear()
        assert table.scan(None, "id = 3001").num_rows == 0  # absent: its row group's keys are here already
        assert s3.count() == {"head": 1, "list": 0, "get": 0, "bytes": 0}
