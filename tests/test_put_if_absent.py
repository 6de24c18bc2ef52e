"""`Ufs.put_if_absent`: one of many writers wins a name, whatever becomes of its request or its answer."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from moto.s3.responses import S3Response

from pyspark_lookup.base.errors import NotSupportedError, UfsPermissionError, UfsTimeoutError, UfsUnavailableError
from pyspark_lookup.base.metrics import CacheMetricGroup
from pyspark_lookup.io.stores import open_store
from pyspark_lookup.io.ufs import Ufs
from tests.fakes import FaultyStore
from tests.s3server import S3Server

WRITERS = 8
ROUNDS = 30
_buckets = itertools.count()


class Door:
    """A `Ufs` over a store that fails as a test says: `before` a put, or `after` it, when it has arrived."""

    def __init__(self, path: str, options: dict[str, Any] | None = None, retries: int = 2) -> None:
        self.store = FaultyStore(open_store(path, options or {}, time.time))
        self.metrics = CacheMetricGroup()
        self.ufs = Ufs(self.store, self.metrics, retries, lambda seconds: None)
        self.after: Callable[[], None] = lambda: None
        put = self.store.put_if_absent

        def answered(path: str, data: bytes, count: Any) -> Any:
            found = put(path, data, count)
            self.after()
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


def failing(times: int, error: type[Exception]) -> Callable[[], None]:
    left = itertools.count()

    def fail() -> None:
        if next(left) < times:
            raise error("lost")

    return fail


def test_first_come(place: tuple[str, dict[str, Any]]) -> None:
    """The first writer's bytes stay; the second is told; one request each, and a look at what lies there."""
    path, options = place
    one, two = Door(path, options), Door(path, options)
    assert one.ufs.put_if_absent(f"{path}/1", b"one")
    assert not two.ufs.put_if_absent(f"{path}/1", b"two")
    file = one.ufs.get_meta(f"{path}/1")
    assert one.ufs.read_ranges(file, [(0, 3)]) == [b"one"]
    assert (one.count("ufsPutCount"), one.count("ufsPutBytes")) == (1, 3)
    assert (two.count("ufsPutCount"), two.count("ufsPutBytes")) == (1, 0)
    assert one.ufs.put_if_absent(f"{path}/1", b"one")  # ours already, as after a restart


def test_an_answer_that_was_lost(place: tuple[str, dict[str, Any]]) -> None:
    """A put that arrived but whose answer did not counts once: the next attempt, or a look, finds its own bytes."""
    path, options = place
    door = Door(path, options)
    door.after = failing(1, UfsTimeoutError)
    assert door.ufs.put_if_absent(f"{path}/1", b"mine")
    door.after = failing(9, UfsTimeoutError)
    assert door.ufs.put_if_absent(f"{path}/2", b"mine")
    other = Door(path, options)
    assert not other.ufs.put_if_absent(f"{path}/1", b"else")
    assert not other.ufs.put_if_absent(f"{path}/2", b"else")


def test_a_put_that_never_arrived(place: tuple[str, dict[str, Any]]) -> None:
    """After n + 1 attempts the error is raised, and the name is free."""
    path, options = place
    door = Door(path, options)
    door.store.before = lambda kind, subject: failing(9, UfsUnavailableError)() if kind == "put" else None
    with pytest.raises(UfsUnavailableError):
        door.ufs.put_if_absent(f"{path}/1", b"mine")
    assert [kind for kind, _ in door.store.calls].count("put") == 3
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


def test_the_server_has_an_exclusive_create(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is between the server's look whether there is an object and its put while somebody else is, as on S3 itself."""
    s3.client.create_bucket(Bucket="exclusive")
    between = threading.Barrier(2)
    met = []
    step = S3Response._get_checksum

    def after_the_look(self: S3Response, headers: dict[str, Any]) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            between.wait(0.2)
            met.append(self)
        return step(self, headers)

    monkeypatch.setattr(S3Response, "_get_checksum", after_the_look)
    doors = [Door("s3://exclusive/t", {"endpoint_url": s3.endpoint}) for _ in range(2)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        won = list(pool.map(lambda n: doors[n].ufs.put_if_absent("s3://exclusive/t/1", b"%d" % n), range(2)))
    assert not met
    assert sum(found is not None for found in won) == 1


def test_racing_threads(place: tuple[str, dict[str, Any]]) -> None:
    """Of eight writers of a name exactly one wins, every time, and its bytes are there, whole."""
    path, options = place
    doors = [Door(path, options) for _ in range(WRITERS)]
    with concurrent.futures.ThreadPoolExecutor(WRITERS) as pool:
        for number in range(ROUNDS):
            name = f"{path}/{number}"
            data = [f"{writer}-{os.urandom(8).hex()}".encode() * 50 for writer in range(WRITERS)]
            won = list(
                pool.map(lambda w, name=name, data=data: doors[w].ufs.put_if_absent(name, data[w]), range(WRITERS))
            )
            assert sum(found is not None for found in won) == 1
            file = doors[0].ufs.get_meta(name)
            assert doors[0].ufs.read_ranges(file, [(0, file.size)]) == [
                data[[found is not None for found in won].index(True)]
            ]


def race(directory: str, writer: int, begin: Any, results: Any) -> None:
    door = Door(directory)
    for number in range(ROUNDS):
        begin.wait()
        if door.ufs.put_if_absent(f"{directory}/{number}", f"{writer}-{number}".encode()):
            results.put((number, writer))


def test_racing_processes(tmp_path: Path) -> None:
    """The same of processes on a local disk; nothing but the files is left."""
    context = multiprocessing.get_context("fork")
    begin, results = context.Barrier(WRITERS), context.Queue()
    directory = str(tmp_path / "log")
    writers = [context.Process(target=race, args=(directory, n, begin, results)) for n in range(WRITERS)]
    for process in writers:
        process.start()
    won = dict(results.get(timeout=60) for _ in range(ROUNDS))
    for process in writers:
        process.join(60)
        assert process.exitcode == 0
    assert results.empty()
    assert {name: (tmp_path / "log" / name).read_text() for name in os.listdir(directory)} == {
        str(number): f"{writer}-{number}" for number, writer in won.items()
    }


def test_stores_without_an_exclusive_create() -> None:
    """Other stores are refused, and an empty file is no proof of anything."""
    with pytest.raises(NotSupportedError, match="memory"):
        Door("memory://log").ufs.put_if_absent("memory://log/1", b"mine")
    with pytest.raises(ValueError, match="empty"):
        Door("memory://log").ufs.put_if_absent("memory://log/1", b"")
