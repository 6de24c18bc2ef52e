"""Half of the histories read a table of one file as they read one of thousands."""

import zlib

import pytest

from pyspark_lookup.scan import footers
from pyspark_lookup.storage.stores import ListedFiles
from pyspark_lookup.versions import listed_columns
from tests.support.large_tables import mapped_from

__all__ = ["mapped_from"]


@pytest.fixture(autouse=True)
def listed_from(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the number of files from which a directory's listing becomes columns."""
    monkeypatch.setattr(ListedFiles, "least", (1, 1000)[zlib.crc32(request.node.nodeid.encode()) // 2 % 2])
    monkeypatch.setattr(listed_columns, "_ADDED_AT_MOST", 2)
    monkeypatch.setattr(listed_columns, "_GONE_AT_MOST", 2)
    monkeypatch.setattr(footers, "_FEW", 0)
