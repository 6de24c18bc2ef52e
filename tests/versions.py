"""What a test needs of Spark's version."""

from __future__ import annotations

import pytest

from pyspark_lookup.spark.types import SPARK


def needs_spark(major: int, minor: int, what: str) -> pytest.MarkDecorator:
    """Skips a test on an older Spark, which lacks `what`."""
    return pytest.mark.skipif((major, minor) > SPARK, reason=f"needs Spark {major}.{minor}: {what}")
