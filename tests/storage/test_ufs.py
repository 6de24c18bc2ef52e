"""`Ufs`: every attempt counted, transient failures tried again, bytes of one version only, one of many writers wins a name."""

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import tenacity
from fsspec.implementations.memory import MemoryFileSystem

from pyspark_lookup import errors
from pyspark_lookup.core.metrics import COUNTERS
from pyspark_lookup.storage.stores import FileVersion
from tests.support.fakes import Host, make_host

BYTES = bytes(range(100))


def counts(host: Host) -> dict[str, int]:
    return {name: n for name, n in host.metrics.snapshot().items() if name in COUNTERS and n}


def get_file(host: Host, path: Path | str) -> FileVersion:
    """The file's version, for which nothing is noted."""
    return host.store._inner.get_meta(str(path), lambda kind: None)


def fail(host: Host, errors: Iterable[Exception]) -> None:
    remaining = iter(errors)

    def raise_next(kind: str, subject: object) -> None:
        for error in remaining:
            raise error

    host.store.before = raise_next


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of 100 bytes in a store that pins what is read."""
    (tmp_path / "f").write_bytes(BYTES)
    return tmp_path / "f"


@pytest.fixture
def unpinned() -> Iterator[MemoryFileSystem]:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("memory://f", BYTES)
    yield memory
    MemoryFileSystem.store.clear()


CALLS: dict[str, Callable[[Host, FileVersion], object]] = {
    "get_meta": lambda host, file: host.ufs.get_meta(file.url),
    "list_status": lambda host, file: host.ufs.list_status(file.url.rpartition("/")[0]),
    "get_status": lambda host, file: host.ufs.get_status(file.url),
    "read_ranges": lambda host, file: host.ufs.read_ranges(file, [(0, 10)]),
    "read_many": lambda host, file: host.ufs.read_many([(file, [(0, 10)])]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_attempts_end(path: Path, call: Callable[[Host, FileVersion], object]) -> None:
    """After max_retries + 1 attempts, or one where another will not mend it, the store's own last error is raised, with no pause after it."""
    lasting = (
        errors.UfsNotFoundError("f"), errors.UfsPermissionError("no"), errors.SourceChangedError("f"),
        errors.UfsError("disk"),
    )  # fmt: skip
    for error in (errors.UfsUnavailableError("503"), errors.UfsTimeoutError("slow"), *lasting):
        host, attempts = make_host(str(path), None, max_retries=2), 1 if error in lasting else 3
        fail(host, itertools.repeat(error))
        with pytest.raises(errors.UfsError) as caught:
            call(host, get_file(host, path))
        assert caught.value is error
        assert not isinstance(error.__cause__, tenacity.RetryError)
        assert len(host.store.calls) == attempts
        assert len(host.clock.slept) == attempts - 1 == counts(host).get("ufsRetryCount", 0)


def test_a_store_that_gets_too_many_requests_is_given_time(path: Path) -> None:
    """A store's refusals count as attempts only after a minute of pauses, other errors at once; without retries there is one attempt."""
    slow, gone_error = errors.UfsThrottledError("503"), errors.UfsUnavailableError("lost")
    for answers, retries in (([slow] * 12 + [gone_error] * 2, 2), ([gone_error, slow, gone_error], 2)):
        host = make_host(str(path), None, max_retries=retries)
        fail(host, answers)
        host.ufs.get_meta(str(path))
        assert len(host.clock.slept) == len(answers)
    for answers, retries, most in (([gone_error, *[slow] * 9, gone_error, gone_error], 2, 12), ([slow], 0, 1)):
        host = make_host(str(path), None, max_retries=retries)
        fail(host, answers)
        with pytest.raises(errors.UfsUnavailableError):
            host.ufs.get_meta(str(path))
        assert len(host.store.calls) == most
    host = make_host(str(path), None, max_retries=2)
    fail(host, itertools.repeat(slow))
    with pytest.raises(errors.UfsThrottledError):
        host.ufs.get_meta(str(path))
    assert sum(host.clock.slept[:-2]) >= 60 > sum(host.clock.slept[:-3])


def test_a_short_read_is_tried_again_and_never_handed_out(unpinned: MemoryFileSystem) -> None:
    """Fewer bytes than asked for are a transient failure, and the bytes that came are counted."""
    host = make_host("memory://f", None, max_retries=2)
    file = get_file(host, "memory://f").as_immutable()  # so it cannot have changed
    unpinned.pipe_file("memory://f", BYTES[:14])
    with pytest.raises(errors.UfsUnavailableError, match="the store returned only 9 of 10 bytes at 5"):
        host.ufs.read_ranges(file, [(5, 10)])
    assert counts(host) == {"ufsGetCount": 3, "ufsGetBytes": 27, "ufsRetryCount": 2}


def test_an_unpinned_store_is_asked_again_after_the_bytes(unpinned: MemoryFileSystem) -> None:
    """Where the store cannot pin, a file gone after the read is noticed by one more head (a changed one: test_overwritten_between_two_ranges)."""
    host = make_host("memory://f", None)
    file = get_file(host, "memory://f")
    assert (host.ufs.read_ranges(file, []), host.ufs.read_many([])) == ([], [])
    assert host.ufs.read_many([(file, []), (file, [])]) == [[], []]
    host.store.before = lambda kind, subject: unpinned.rm_file("memory://f") if kind == "head" else None
    with pytest.raises(errors.SourceChangedError, match=r"memory://.*f was replaced or removed"):
        host.ufs.read_ranges(file, [(0, 100)])
    assert host.store.kinds() == ["get", "head"]


@pytest.mark.parametrize(("files", "ranges"), [(1, 48), (4, 48), (48, 4)])
def test_sixteen_requests_at_once(path: Path, files: int, ranges: int) -> None:
    """Ranges of one file, and files of one request, are under way together, but a seventeenth waits; no thread is left behind."""
    host, before = make_host(str(path), None), {*threading.enumerate()}
    # The first breaks, and fails the read, unless so many are in it at once; the other breaks unless there are more.
    sixteen, seventeen, met = threading.Barrier(16, timeout=30), threading.Barrier(17), list[int]()

    def meet(kind: str, subject: object) -> None:
        sixteen.wait()
        with contextlib.suppress(threading.BrokenBarrierError):
            met.append(seventeen.wait(0.5))

    host.store.before = meet
    host.ufs.read_many([(get_file(host, path), [(n, 1) for n in range(ranges)])] * files)
    assert (met, counts(host)["ufsGetCount"]) == ([], files * ranges)
    assert {*threading.enumerate()} <= before


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Callable[[], Host]]:
    """A directory of a store that has an exclusive create, and what makes hosts over it."""
    if request.param == "local":
        return str(tmp_path / "t"), functools.partial(make_host, str(tmp_path / "t"), None, max_retries=2)
    table, storage = (
        f"s3://{request.getfixturevalue('bucket')}/t",
        {"endpoint_url": request.getfixturevalue("s3").endpoint},
    )
    return table, functools.partial(make_host, table, None, max_retries=2, storage=storage)


@pytest.mark.parametrize("lost_answers", [0, 1, 9])
def test_first_come(place: tuple[str, Callable[[], Host]], lost_answers: int) -> None:
    """The first writer's bytes stay, also where its puts have no answer; the second is told. One request each, and a look at what lies there."""
    path, make = place
    first, second, name = make(), make(), f"{path}/_lookup/1"
    put_if_absent, answers = first.store.put_if_absent, iter(range(lost_answers))

    def answered(*args: Any) -> Any:
        is_first = put_if_absent(*args)
        if next(answers, None) is not None:
            raise errors.UfsTimeoutError("lost")
        return is_first

    first.store.put_if_absent = answered
    assert first.ufs.put_if_absent(name, b"one")
    assert not second.ufs.put_if_absent(name, b"two")
    assert first.ufs.read_ranges(first.ufs.get_meta(name), [(0, 3)]) == [b"one"]
    assert first.store.kinds().count("put") == min(lost_answers, 2) + 1
    assert lost_answers or (counts(first)["ufsPutCount"], counts(first)["ufsPutBytes"]) == (1, 3)
    assert (second.metrics.snapshot()["ufsPutCount"], second.metrics.snapshot()["ufsPutBytes"]) == (1, 0)
    assert first.ufs.put_if_absent(name, b"one")  # ours already, as after a restart


def test_stores_without_an_exclusive_create() -> None:
    """Other stores are refused, and an empty file is no proof of anything."""
    host = make_host("memory://log", None)
    with pytest.raises(errors.NotSupportedError, match="memory"):
        host.ufs.put_if_absent("memory://log/1", b"mine")
    with pytest.raises(ValueError, match="empty"):
        host.ufs.put_if_absent("memory://log/1", b"")
