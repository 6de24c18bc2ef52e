"""PARTIAL over S3 at a distance: what a batch of keys costs the store, cold, warm and from another worker."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup.engine.lookup_table import LookupTable
from tests.s3server import Request, S3Server
from tests.workers import in_fresh_process

pytestmark = pytest.mark.slow

ROWS, GROUP, DELAY_S = 3_000_000, 65_536, 0.03


def look_up(path: str, options: dict[str, str], wanted: list[int]) -> None:
    """What a worker answers in a process of its own, of which the host has loaded everything."""
    with LookupTable(path, options) as table:
        assert table.get_many(pa.table({"id": wanted})).column("value").to_pylist() == [n * 7 + 1 for n in wanted]
        assert [table.metrics()[name] for name in ("hitCount", "missCount", "loadCount")] == [
            2 * len(wanted),
            len(wanted),
            len(wanted),
        ]


def test_many_keys_of_a_large_file(s3: S3Server, tmp_path: Path) -> None:
    """Cold: one request per touched row group and column at most, many at once; warm: one HEAD; from another worker one LIST."""
    ids = np.arange(ROWS)
    file = tmp_path / "big.parquet"
    rows = pa.table({"id": ids, "value": ids * 7 + 1, "other": (ids % 1000).astype(np.int32)})
    pq.write_table(rows, file, row_group_size=GROUP)
    s3.client.create_bucket(Bucket="partial")
    s3.client.upload_file(str(file), "partial", "dim/big.parquet")
    wanted = list(range(7, ROWS, 4 * GROUP))  # neighbours would share a request
    options = {"lookup.keys": "id", "lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "100000",
               "lookup.cache.dir": str(tmp_path / "cache"), "lookup.storage.endpoint_url": s3.endpoint}  # fmt: skip
    running: list[str] = []
    most = [0]

    def before(method: str, path: str) -> None:
        running.append(path)
        most.append(len(running))
        threading.Event().wait(DELAY_S)

    def after(request: Request) -> None:
        running.pop()

    s3.before, s3.after = before, after
    s3.log.clear()
    path = "s3://partial/dim/big.parquet"
    with LookupTable(path, options) as table:
        cold = table.get_many(pa.table({"id": wanted}))
        assert cold.column("value").to_pylist() == [n * 7 + 1 for n in wanted]
        footer = 2  # its length is not known beforehand
        assert s3.count()["get"] <= len(wanted) * 3 + footer
        assert s3.count()["bytes"] < file.stat().st_size / 2
        assert max(most) >= 4
        s3.log.clear()
        assert table.get_many(pa.table({"id": wanted})).equals(cold)
        assert [request.kind for request in s3.log] == ["head"]
    s3.log.clear()
    in_fresh_process(look_up, path, options, wanted)
    assert [request.kind for request in s3.log] == ["list"]  # what a path is, and which version
