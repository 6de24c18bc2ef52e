"""What tests of large tables share, whose files are columns: from how many files on, another process, and columns that are lost."""

import random
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from unittest import mock

import pytest

from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.errors import CacheFullError
from pyspark_lookup.lookup import lookup_table as api
from pyspark_lookup.lookup.runtime import Runtime
from pyspark_lookup.sources.delta.source import DeltaSource
from pyspark_lookup.sources.iceberg.source import IcebergSource
from pyspark_lookup.storage.disk import Disk
from tests.support.disks import flipped
from tests.support.fuzzing import BY_NIGHT

Lose = Callable[[Iterable[Path]], None]


@pytest.fixture(autouse=True)
def mapped_from(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """From how many files on these become columns: half of the tests read a table of one as they read one of thousands, the others do by night.
    A test that has to do both by day takes `both_ways`."""
    count: int = getattr(request, "param", None) or (1, 1000)[(zlib.crc32(request.node.nodeid.encode()) + BY_NIGHT) % 2]
    for source in (DeltaSource, IcebergSource):
        monkeypatch.setattr(source, "mapped_from", count)
    return count


both_ways = pytest.mark.parametrize("mapped_from", [1, 1000], ids=["columns", "objects"], indirect=True)


@pytest.fixture
def restart(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Begins another process, to which all that is opened from then on belongs."""

    def begin() -> None:
        runtime = Runtime(HostClock(), random.Random())
        monkeypatch.setattr(api, "runtime", lambda: runtime)

    begin()
    return begin


@pytest.fixture(params=["removed", "damaged", "full"])
def lose(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Lose:
    """Makes what lies there unreadable; or nothing can be put there, as there is no room."""
    if request.param == "full":
        monkeypatch.setattr(Disk, "create_segment", mock.Mock(side_effect=CacheFullError("no room")))

    def remove(paths: Iterable[Path]) -> None:
        for path in paths:
            if request.param == "damaged":
                path.write_bytes(flipped(content := path.read_bytes(), len(content) * 4))
            else:
                path.unlink()

    return remove
