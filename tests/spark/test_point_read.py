"""A point read of a large remote file: what a cold one may cost, and that a second one costs one call."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup import LookupTable
from tests.spark.common import load

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.s3server import S3Server

pytestmark = [pytest.mark.spark, pytest.mark.slow]
ROWS, GROUPS = 1_000_000, 16


@pytest.fixture(scope="module")
def large(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An 80 MB zstd parquet file of 16 row groups, most of it in columns that point reads do not ask for."""
    rng, ids = np.random.default_rng(3), np.arange(ROWS) * 3
    payload = pa.FixedSizeBinaryArray.from_buffers(pa.binary(72), ROWS, [None, pa.py_buffer(rng.bytes(72 * ROWS))])
    names = pa.array(np.char.add("customer ", ids.astype(str)))
    table = pa.table({"id": ids, "name": names, "score": rng.integers(0, 1000, ROWS), "payload": payload})
    path: Path = tmp_path_factory.mktemp("large") / "dim.parquet"
    pq.write_table(table, path, compression="zstd", row_group_size=ROWS // GROUPS)
    assert 75e6 < path.stat().st_size < 90e6
    assert pq.read_metadata(path).num_row_groups == GROUPS
    s3_server.client.create_bucket(Bucket="large")
    s3_server.client.upload_file(str(path), "large", "dim.parquet")
    return "s3://large/dim.parquet"


def test_cold_point_read(spark: SparkSession, s3: S3Server, large: str) -> None:
    """`lookup.where = 'id = …'`: at most 1 HEAD + 3 GET and 1 MB (and planning's one LIST); then, or for an absent key of the same row
    group and without Spark: 1 HEAD, 0 GET."""
    storage = {"lookup.storage.endpoint_url": s3.endpoint}
    df = load(spark, large, {**storage, "lookup.columns": "id,name,score", "lookup.where": "id = 1500000"})
    assert s3.count()["list"] == 1
    assert [row.name for row in df.collect()] == ["customer 1500000"]
    counts = s3.count()
    assert (counts["head"], counts["list"]) == (1, 1)
    assert (counts["get"] <= 3, counts["bytes"] <= 1_000_000) == (True, True)
    one_head = {"head": 1, "list": 0, "get": 0, "bytes": 0}
    s3.log.clear()
    assert [row.name for row in df.collect()] == ["customer 1500000"]
    assert s3.count() == one_head
    with LookupTable(large, storage) as table:
        table.describe()
        for columns, key, count in ((["name"], 1500000, 1), (None, 1500001, 0)):
            s3.log.clear()
            assert table.scan(columns, f"id = {key}").num_rows == count
            assert s3.count() == one_head
