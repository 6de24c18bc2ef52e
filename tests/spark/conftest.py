"""What tests through Spark are given."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_names = itertools.count()


@pytest.fixture
def name(spark: SparkSession) -> Iterator[str]:
    """A name that no other test uses; a table of it is dropped afterwards."""
    found = f"name_{next(_names)}"
    yield found
    spark.sql(f"DROP TABLE IF EXISTS {found}")
