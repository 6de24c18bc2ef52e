"""`Ufs.put_if_absent`: one of many writers wins a name, whatever becomes of its request or its answer."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from pyspark_lookup.base.errors import NotSupportedError, UfsPermissionError, UfsTimeoutError, UfsUnavailableError
from pyspark_lookup.base.metrics import CacheMetricGroup
from pyspark_lookup.io.stores import open_store
from pyspark_lookup.io.ufs import Ufs
from tests.fakes import FaultyStore
from tests.s3server import S3Server

_buckets = itertools.count()


class Door:
    """A `Ufs` whose puts fail so many times, each when it has arrived, or (`arrives` false) before."""

    def __init__(
        self, path: str, options: dict[str, Any] | None = None, failing: int = 0, arrives: bool = True
    ) -> None:
        self.store = FaultyStore(open_store(path, options or {}, time.time))
        self.metrics = CacheMetricGroup()
        self.ufs = Ufs(self.store, self.metrics, 2, lambda seconds: None)
        self.puts = 0
        put = self.store.put_if_absent

        def answered(path: str, data: bytes, count: Any) -> Any:
            self.puts += 1
            found = put(path, data, count) if arrives or self.puts > failing else None
            if self.puts <= failing:
                raise UfsTimeoutError("lost") if arrives else UfsUnavailableError("lost")
            return found

        self.store.put_if_absent = answered  # type: ignore[method-assign]

    def count(self, name: str) -> int:
        return self.metrics.snapshot()[name]


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """(a directory of a store that has an exclusive create, its options)."""
    if request.param == "local":
        return str(tmp_path / "table" / "_lookup"), {}
    server: S3Server = request.getfixturevalue("s3")
    bucket = f"puts-{next(_buckets)}"
    server.client.create_bucket(Bucket=bucket)
    return f"s3://{bucket}/table/_lookup", {"endpoint_url": server.endpoint}


@pytest.mark.parametrize("lost", [0, 1, 9])
def test_first_come(place: tuple[str, dict[str, Any]], lost: int) -> None:
    """The first writer's bytes stay, also where answers to its put do not arrive; the second is told. One request each, and a look
    at what lies there."""
    path, options = place
    one, two = Door(path, options, lost), Door(path, options)
    assert one.ufs.put_if_absent(f"{path}/1", b"one")
    assert not two.ufs.put_if_absent(f"{path}/1", b"two")
    file = one.ufs.get_meta(f"{path}/1")
    assert one.ufs.read_ranges(file, [(0, 3)]) == [b"one"]
    assert one.puts == min(lost, 2) + 1
    assert lost or (one.count("ufsPutCount"), one.count("ufsPutBytes")) == (1, 3)
    assert (two.count("ufsPutCount"), two.count("ufsPutBytes")) == (1, 0)
    assert one.ufs.put_if_absent(f"{path}/1", b"one")  # ours already, as after a restart


def test_a_put_that_never_arrived(place: tuple[str, dict[str, Any]]) -> None:
    """After n + 1 attempts the error is raised, and the name is free."""
    path, options = place
    door = Door(path, options, 9, arrives=False)
    with pytest.raises(UfsUnavailableError):
        door.ufs.put_if_absent(f"{path}/1", b"mine")
    assert door.puts == 3
    assert Door(path, options).ufs.put_if_absent(f"{path}/1", b"else")


def test_conflicts_at_the_store(s3: S3Server) -> None:
    """409 (another conditional write is under way) and 503 are tried again; 403 is not."""
    s3.client.create_bucket(Bucket="conflicts")
    door = Door("s3://conflicts/t", {"endpoint_url": s3.endpoint})
    for status in (409, 503):
        answers = iter([status])
        s3.before = lambda method, path, answers=answers: next(answers, None) if method == "PUT" else None
        assert door.ufs.put_if_absent(f"s3://conflicts/t/{status}", b"mine")
    s3.before = lambda method, path: 403 if method == "PUT" else None
    with pytest.raises(UfsPermissionError):
        door.ufs.put_if_absent("s3://conflicts/t/403", b"mine")


def test_stores_without_an_exclusive_create() -> None:
    """Other stores are refused, and an empty file is no proof of anything."""
    with pytest.raises(NotSupportedError, match="memory"):
        Door("memory://log").ufs.put_if_absent("memory://log/1", b"mine")
    with pytest.raises(ValueError, match="empty"):
        Door("memory://log").ufs.put_if_absent("memory://log/1", b"")
