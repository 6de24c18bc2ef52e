"""PARTIAL over S3 at a distance: what a batch of keys costs the store, cold, warm and from another worker."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup.engine.lookup_table import LookupTable
from tests.processes.test_fill import BOUND_S
from tests.s3server import Request, S3Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROWS = 10_000_000
GROUP = 65_536
KEYS = 1000
DELAY_S = 0.03


class Distance:
    """Each request takes 30 ms longer; how many are on their way at most."""

    def __init__(self, server: S3Server) -> None:
        self.most = self._now = 0
        self._lock = threading.Lock()
        self._never = threading.Event()
        server.before, server.after = self.before, self.after

    def before(self, method: str, path: str) -> None:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        self._never.wait(DELAY_S)

    def after(self, request: Request) -> None:
        with self._lock:
            self._now -= 1


def value_of(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return ids * 7 + 1


def look_up(path: str, options: Mapping[str, str], ids: list[int]) -> tuple[list[int], dict[str, int]]:
    """What a worker answers, in a process of its own, and its host's counters."""
    with LookupTable(path, options) as table:
        return table.get_many(pa.table({"id": ids})).column("value").to_pylist(), table.metrics()


def test_a_thousand_keys_of_ten_million(s3: S3Server, tmp_path: Path) -> None:
    """Cold: one request per touched row group and column at most, many at once; warm: one HEAD; from another worker the same."""
    ids = np.arange(ROWS)
    file = tmp_path / "big.parquet"
    with pq.ParquetWriter(
        file, pa.schema([("id", pa.int64()), ("value", pa.int64()), ("other", pa.int32())])
    ) as writer:
        for start in range(0, ROWS, GROUP):
            some = ids[start : start + GROUP]
            columns = {"id": some, "value": value_of(some), "other": (some % 1000).astype(np.int32)}
            writer.write_table(pa.table(columns, schema=writer.schema), row_group_size=GROUP)
    s3.client.create_bucket(Bucket="partial")
    s3.client.upload_file(str(file), "partial", "dim/big.parquet")
    wanted = np.random.default_rng(1).choice(ROWS, KEYS, replace=False).tolist()
    groups = len({key // GROUP for key in wanted})
    path = "s3://partial/dim/big.parquet"
    options = {
        "lookup.keys": "id",
        "lookup.cache": "PARTIAL",
        "lookup.partial-cache.max-rows": "100000",
        "lookup.cache.dir": str(tmp_path / "cache"),
        "lookup.storage.endpoint_url": s3.endpoint,
    }
    distance = Distance(s3)
    s3.log.clear()
    with LookupTable(path, options) as table:
        cold = table.get_many(pa.table({"id": wanted}))
        assert cold.column("value").to_pylist() == value_of(np.array(wanted)).tolist()
        footer = 2  # its length is not known beforehand
        assert s3.count()["get"] <= groups * 3 + footer
        assert s3.count()["bytes"] < file.stat().st_size * 1.01
        assert distance.most >= 4  # neighbours share a request, so they are few
        s3.log.clear()
        assert table.get_many(pa.table({"id": wanted})).equals(cold)
        assert [request.kind for request in s3.log] == ["head"]
    s3.log.clear()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        values, metrics = pool.apply_async(look_up, (path, options, wanted)).get(BOUND_S)
    assert values == cold.column("value").to_pylist()
    assert [request.kind for request in s3.log] == ["list"]  # what a path is, and which version
    assert (metrics["hitCount"], metrics["missCount"], metrics["loadCount"]) == (2 * KEYS, KEYS, KEYS)
