"""Half of the tests read a table of one file as they read one of thousands, the others by night."""

import zlib

import pytest

from pyspark_lookup.sources.iceberg.source import IcebergSource
from tests.support.fuzzing import BY_NIGHT


@pytest.fixture(autouse=True)
def mapped_from(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """So many files become columns."""
    count = (1, 1000)[(zlib.crc32(request.node.nodeid.encode()) + BY_NIGHT) % 2]
    monkeypatch.setattr(IcebergSource, "mapped_from", count)
    return count
