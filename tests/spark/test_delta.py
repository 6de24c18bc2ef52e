"""Delta tables through Spark: read, joined, in a catalog, in SQL functions, and joined to a stream while they change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable, write_deltalake

from tests.support.spark_lakes import (
    check_a_table_like_any_other,
    check_calls_of_a_batch,
    check_that_a_stream_follows,
    rows_of,
)
from tests.support.sparks import DATA_SOURCES, needs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

pytestmark = [needs(DATA_SOURCES), pytest.mark.spark]


class Dim:
    """A table that delta-rs writes."""

    options: Mapping[str, str] = {}

    def __init__(self, home: Path) -> None:
        self.path = str(home / "dim")

    def append(self, ids: range, version: int) -> int:
        write_deltalake(self.path, rows_of(ids, version), mode="append", partition_by=["part"])
        return DeltaTable(self.path).version()

    def delete(self, where: str) -> int:
        DeltaTable(self.path).delete(where)
        return DeltaTable(self.path).version()


@pytest.fixture
def dim(tmp_path: Path) -> Dim:
    return Dim(tmp_path)


def test_a_table_like_any_other(spark: SparkSession, dim: Dim, name: str) -> None:
    check_a_table_like_any_other(spark, dim, name)


def test_a_stream_follows_it(spark: SparkSession, dim: Dim, tmp_path: Path) -> None:
    check_that_a_stream_follows(spark, dim, tmp_path)


def test_calls_of_a_batch(spark: SparkSession, dim: Dim) -> None:
    """A look at the newest commit, and for the next one."""
    check_calls_of_a_batch(spark, dim, 2)
