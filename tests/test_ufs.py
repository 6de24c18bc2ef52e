"""`Ufs`: every attempt counted, transient failures tried again, bytes of one version only."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import tenacity

from pyspark_lookup.base.errors import (
    SourceChangedError,
    UfsError,
    UfsNotFoundError,
    UfsPermissionError,
    UfsTimeoutError,
    UfsUnavailableError,
)
from pyspark_lookup.base.metrics import COUNTERS, CacheMetricGroup
from pyspark_lookup.io.stores import Count, FileVersion, Listing
from pyspark_lookup.io.ufs import Ufs
from tests.fakes import FakeClock


class ScriptedStore:
    """A store of one-version files that runs `before(kind, subject)` ahead of each call, as a store counts it."""

    scope = "scripted"

    def __init__(self, files: dict[str, bytes], pins: bool = True) -> None:
        self.files = files
        self.pins = pins
        self.calls: list[tuple[str, object]] = []
        self.before: Callable[[str, object], None] = lambda kind, subject: None
        self.shorten = 0

    def _note(self, kind: str, subject: object) -> None:
        self.calls.append((kind, subject))
        self.before(kind, subject)

    def url_of(self, path: str) -> str:
        return path

    def get_meta(self, path: str, count: Count) -> FileVersion:
        count("head")
        self._note("head", path)
        if path not in self.files:
            raise UfsNotFoundError(path)
        return FileVersion(path, len(self.files[path]), str(hash(self.files[path])))

    def list_status(self, path: str, count: Count) -> Listing:
        count("list")
        self._note("list", path)
        return Listing(path, (), frozenset())

    get_status = get_meta

    @contextlib.contextmanager
    def pin(self, file: FileVersion) -> Iterator[Callable[[int, int], bytes]]:
        def read(offset: int, length: int) -> bytes:
            self._note("get", (file.url, offset, length))
            data = self.files[file.url][offset : offset + length]
            return data[: len(data) - self.shorten]

        yield read


class Door:
    """A `Ufs` over a scripted store, with its counters and clock."""

    def __init__(self, max_retries: int = 0, pins: bool = True) -> None:
        self.store = ScriptedStore({"f": bytes(range(100)), "g": bytes(50)}, pins)
        self.metrics = CacheMetricGroup()
        self.clock = FakeClock()
        self.ufs = Ufs(self.store, self.metrics, max_retries, self.clock.sleep)

    def counts(self) -> dict[str, int]:
        """The counters that moved."""
        return {name: n for name, n in self.metrics.snapshot().items() if name in COUNTERS and n}

    def fail(self, error: Exception, times: int) -> None:
        """Let the next `times` calls raise."""
        left = iter(range(times))

        def before(kind: str, subject: object) -> None:
            if next(left, None) is not None:
                raise error

        self.store.before = before

    def version(self, url: str = "f") -> FileVersion:
        return self.store.get_meta(url, lambda kind: None)


# --- further attempts --------------------------------------------------------------------------------

CALLS = {
    "get_meta": lambda ufs, file: ufs.get_meta("f"),
    "list_status": lambda ufs, file: ufs.list_status("d"),
    "get_status": lambda ufs, file: ufs.get_status("f"),
    "read_ranges": lambda ufs, file: ufs.read_ranges(file, [(0, 10)]),
    "read_many": lambda ufs, file: ufs.read_many([(file, [(0, 10)])]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_attempts_end(call: Callable[[Ufs, FileVersion], object]) -> None:
    """After max_retries + 1 attempts, or one where another will not mend it, the store's own last error is raised, with no pause after it."""
    lasting = (UfsNotFoundError("f"), UfsPermissionError("no"), SourceChangedError("f"), UfsError("disk"))
    for error in (UfsUnavailableError("503"), UfsTimeoutError("slow"), *lasting):
        door, attempts = Door(max_retries=2), 1 if error in lasting else 3
        file = door.version()
        made = len(door.store.calls)
        door.fail(error, 100)
        with pytest.raises(UfsError) as caught:
            call(door.ufs, file)
        assert caught.value is error
        assert not isinstance(error.__cause__, tenacity.RetryError)
        assert len(door.store.calls) - made == attempts
        assert len(door.clock.slept) == attempts - 1 == door.counts().get("ufsRetryCount", 0)


def test_pauses_grow_and_are_bounded() -> None:
    """The pauses lie between nothing and a bound that doubles from 0.1 s up to 5 s."""
    door = Door(max_retries=12)
    for _ in range(20):
        door.fail(UfsUnavailableError("503"), 12)
        door.ufs.get_meta("f")
    assert len(door.clock.slept) == 240
    assert all(0 <= pause <= min(0.1 * 2 ** (n % 12), 5) for n, pause in enumerate(door.clock.slept))
    assert max(door.clock.slept) > 2


def test_one_ranges_failure_repeats_that_range_only() -> None:
    """Of several ranges the one that failed is asked again, the others are not."""
    door = Door(max_retries=1)
    file = door.version()
    failed = []

    def before(kind: str, subject: object) -> None:
        if subject == ("f", 10, 10) and not failed:
            failed.append(subject)
            raise UfsUnavailableError("503")

    door.store.before = before
    parts = door.ufs.read_ranges(file, [(0, 10), (10, 10), (20, 10)])
    assert b"".join(parts) == bytes(range(30))
    assert door.counts() == {"ufsGetCount": 4, "ufsGetBytes": 30, "ufsRetryCount": 1}
    assert sorted(door.store.calls[1:]) == [("get", ("f", n, 10)) for n in (0, 10, 10, 20)]


# --- bytes of one version ----------------------------------------------------------------------------


def test_a_short_read_is_tried_again_and_never_handed_out() -> None:
    """Fewer bytes than asked for are a transient failure, and the bytes that came are counted."""
    door = Door(max_retries=2)
    file = door.version()
    door.store.shorten = 1
    with pytest.raises(UfsUnavailableError, match="short read: 9 of 10 bytes at 5"):
        door.ufs.read_ranges(file, [(5, 10)])
    assert door.counts() == {"ufsGetCount": 3, "ufsGetBytes": 27, "ufsRetryCount": 2}


@pytest.mark.parametrize("data", [b"short", bytes(100), None], ids=["shorter", "equal size", "removed"])
def test_an_unpinned_store_is_asked_again_after_the_bytes(data: bytes | None) -> None:
    """Where the store cannot pin, a version that changed during the read is noticed by one more head, not retried away."""
    door, url = Door(pins=False), "http://u:pw@h/f"
    door.store.files = {url: bytes(range(100))}
    file = door.version(url)
    assert door.ufs.read_ranges(file, []) == door.ufs.read_many([]) == []
    assert door.ufs.read_many([(file, []), (file, [])]) == [[], []]

    def overwrite(kind: str, subject: object) -> None:
        if kind == "get" and data is not None:
            door.store.files[url] = data
        elif kind == "head" and data is None:
            door.store.files.clear()

    door.store.before = overwrite
    with pytest.raises(SourceChangedError, match=r"http://\[redacted\]@h/f was replaced or removed"):
        door.ufs.read_ranges(file, [(0, 100)])
    assert [kind for kind, _ in door.store.calls] == ["head", "get", "head"]
    assert door.counts()["ufsHeadCount"] == 1


def test_reads_run_at_the_same_time() -> None:
    """Ranges of one file, and files of one request, are under way together; no thread is left behind."""
    door, before = Door(), {*threading.enumerate()}
    together = threading.Barrier(4, timeout=30)  # breaks, and fails the read, unless four are in it at once
    door.store.before = lambda kind, subject: together.wait()
    f, g = FileVersion("f", 100, "x"), FileVersion("g", 50, "y")
    door.ufs.read_ranges(f, [(n, 1) for n in range(4)])
    door.ufs.read_many([(f, [(0, 1), (1, 1)]), (g, [(0, 1), (1, 1)])])
    assert door.counts()["ufsGetCount"] == 8
    assert {*threading.enumerate()} <= before


@pytest.mark.parametrize(("files", "ranges"), [(1, 40), (4, 40), (40, 4)])
def test_at_most_sixteen_requests_at_once(files: int, ranges: int) -> None:
    """However many files and ranges are asked for, a seventeenth request waits for one of sixteen."""
    door = Door()
    seventeen = threading.Barrier(17)
    met: list[int] = []

    def meet(kind: str, subject: object) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            met.append(seventeen.wait(0.5))

    door.store.files = {str(n): bytes(100) for n in range(files)}
    wanted = [(FileVersion(url, 100, "x"), [(n, 1) for n in range(ranges)]) for url in door.store.files]
    door.store.before = meet
    door.ufs.read_many(wanted)
    assert (met, door.counts()["ufsGetCount"]) == ([], files * ranges)
