"""Columns of Delta tables as keys, and under other names: partition columns, renamed and dropped ones."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tests.delta.common import MODES, opened


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "value", ["a b/%=ü", 7, True, Decimal("1.50"), datetime.date(2026, 3, 1), datetime.datetime(2026, 3, 1, 2, 3, 4, 5)]
)
def test_a_partition_column_is_the_key(tmp_path: Path, mode: str, value: Any) -> None:
    rows = pa.table({"id": [1, 2], "part": pa.array([value, None])})
    write_deltalake(str(tmp_path / "t"), rows, partition_by=["part"])
    table = opened(tmp_path / "t", tmp_path / "cache", mode, "part")
    for _ in range(2):  # the second time the files' values are known
        assert table.get(value) == [{"id": 1, "part": value}]
