"""Half of the histories read a Delta table of one file as they read one of thousands."""

import zlib

import pytest

from pyspark_lookup.sources.delta.source import DeltaSource


@pytest.fixture(autouse=True)
def mapped_from(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeltaSource, "mapped_from", (1, 1000)[zlib.crc32(request.node.nodeid.encode()) % 2])
