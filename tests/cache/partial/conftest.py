"""Fixtures of the partial cache, in which what one process loaded answers for all of the host, for as long as it is right."""

from pathlib import Path

import pytest

from pyspark_lookup.cache.partial import host_cache
from tests.support.fakes import FakeClock
from tests.support.partial_cache import Process, Source


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def process(cache_dir: Path, clock: FakeClock) -> Process:
    return Process(cache_dir, clock)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cache, "_SEGMENTS_AT_MOST", 2)


@pytest.fixture
def source() -> Source:
    return Source()
