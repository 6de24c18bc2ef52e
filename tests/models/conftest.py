"""Half of the histories read a Delta or Iceberg table of one file, or a directory of one file, as they read one of thousands."""

import zlib

import pytest

from pyspark_lookup.scan import footers
from pyspark_lookup.sources.delta.source import DeltaSource
from pyspark_lookup.sources.iceberg.source import IcebergSource
from pyspark_lookup.storage.stores import ListedFiles
from pyspark_lookup.versions import listed_columns


@pytest.fixture(autouse=True)
def mapped_from(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many files become columns."""
    place = zlib.crc32(request.node.nodeid.encode())
    for source in (DeltaSource, IcebergSource):
        monkeypatch.setattr(source, "mapped_from", (1, 1000)[place % 2])
    monkeypatch.setattr(ListedFiles, "least", (1, 1000)[place // 2 % 2])
    monkeypatch.setattr(listed_columns, "_ADDED_AT_MOST", 2)
    monkeypatch.setattr(listed_columns, "_GONE_AT_MOST", 2)
    monkeypatch.setattr(footers, "_FEW", 0)
