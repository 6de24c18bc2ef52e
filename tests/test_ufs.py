"""`Ufs`: every attempt counted, transient failures tried again, bytes of one version only."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

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
from tests.fakes import FakeClock, make_host


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
        return path.rstrip("/")

    def get_meta(self, path: str, count: Count) -> FileVersion:
        count("head")
        self._note("head", path)
        if path not in self.files:
            raise UfsNotFoundError(path)
        return FileVersion(path, len(self.files[path]), str(hash(self.files[path])))

    def list_status(self, path: str, count: Count) -> Listing:
        for page in range(2):
            count("list")
            self._note("list", page)
        return Listing(path, tuple(self.get_meta(name, lambda kind: None) for name in self.files), frozenset())

    def get_status(self, path: str, count: Count) -> FileVersion | Listing:
        return self.get_meta(path, count) if path in self.files else self.list_status(path, count)

    @contextlib.contextmanager
    def pinned(self, file: FileVersion) -> Iterator[Callable[[int, int], bytes]]:
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

    def fail(self, error: Exception, times: int, kinds: tuple[str, ...] = ("head", "list", "get")) -> None:
        """Let the next `times` calls of these kinds raise."""
        left = [times]

        def before(kind: str, subject: object) -> None:
            if kind in kinds and left[0] > 0:
                left[0] -= 1
                raise error

        self.store.before = before

    def version(self, url: str = "f") -> FileVersion:
        return self.store.get_meta(url, lambda kind: None)


def test_each_call_is_counted_by_kind_and_bytes() -> None:
    """Heads, listing calls, data requests and bytes are counted as the store makes them, and nothing else is."""
    door = Door()
    file = door.ufs.get_meta("f")
    assert door.counts() == {"ufsHeadCount": 1}
    assert door.ufs.get_status("f") == file
    listing = door.ufs.list_status("d")
    assert door.ufs.get_status("d") == listing
    assert door.counts() == {"ufsHeadCount": 2, "ufsListCount": 4}
    assert door.ufs.read_ranges(file, [(0, 10), (90, 10), (5, 1)]) == [bytes(range(10)), bytes(range(90, 100)), b"\x05"]
    assert door.counts() == {"ufsHeadCount": 2, "ufsListCount": 4, "ufsGetCount": 3, "ufsGetBytes": 21}


def test_nothing_asked_is_nothing_counted() -> None:
    """No range and no file make no call; naming a path neither."""
    door = Door(pins=False)
    assert door.ufs.read_ranges(door.version(), []) == []
    assert door.ufs.read_many([]) == []
    assert door.ufs.read_many([(door.version(), []), (door.version("g"), [])]) == [[], []]
    assert (door.ufs.url_of("x/"), door.ufs.scope) == ("x", "scripted")
    assert door.counts() == {}


# --- further attempts --------------------------------------------------------------------------------

CALLS = {
    "get_meta": lambda ufs, file: ufs.get_meta("f"),
    "list_status": lambda ufs, file: ufs.list_status("d"),
    "get_status": lambda ufs, file: ufs.get_status("f"),
    "read_ranges": lambda ufs, file: ufs.read_ranges(file, [(0, 10)]),
    "read_many": lambda ufs, file: ufs.read_many([(file, [(0, 10)])]),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


@each_call
@pytest.mark.parametrize("error", [UfsUnavailableError("503"), UfsTimeoutError("slow")])
def test_a_transient_error_is_tried_again(call: Callable[[Ufs, FileVersion], object], error: UfsError) -> None:
    """After n - 1 transient failures the nth attempt answers; each attempt is counted, each pause slept."""
    door = Door(max_retries=3)
    file = door.version()
    calm = call(door.ufs, file)
    before = door.counts()
    door.fail(error, 3)
    assert call(door.ufs, file) == calm
    moved = {name: n - before.get(name, 0) for name, n in door.counts().items()}
    assert moved["ufsRetryCount"] == 3
    assert len(door.clock.slept) == 3
    calls = sum(moved.get(name, 0) for name in ("ufsHeadCount", "ufsListCount", "ufsGetCount"))
    assert calls == 3 + sum(n for name, n in before.items() if name != "ufsGetBytes")


@each_call
@pytest.mark.parametrize("error", [UfsUnavailableError("503"), UfsTimeoutError("slow")])
@pytest.mark.parametrize("max_retries", [0, 2])
def test_attempts_end(call: Callable[[Ufs, FileVersion], object], error: UfsError, max_retries: int) -> None:
    """After max_retries + 1 attempts the store's own last error is raised, with no pause after it."""
    door = Door(max_retries)
    file = door.version()
    made = len(door.store.calls)
    door.fail(error, 100)
    with pytest.raises(UfsError) as caught:
        call(door.ufs, file)
    assert caught.value is error
    assert len(door.store.calls) - made == max_retries + 1
    assert len(door.clock.slept) == max_retries == door.counts().get("ufsRetryCount", 0)


@each_call
@pytest.mark.parametrize(
    "error", [UfsNotFoundError("f"), UfsPermissionError("no"), SourceChangedError("f"), UfsError("disk")]
)
def test_other_errors_are_raised_at_once(call: Callable[[Ufs, FileVersion], object], error: UfsError) -> None:
    """What another attempt will not mend is raised after one attempt, counted."""
    door = Door(max_retries=5)
    file = door.version()
    made = len(door.store.calls)
    door.fail(error, 100)
    with pytest.raises(UfsError) as caught:
        call(door.ufs, file)
    assert caught.value is error
    assert len(door.store.calls) - made == 1
    assert sum(door.counts().values()) == 1
    assert door.clock.slept == []


def test_pauses_grow_and_are_bounded() -> None:
    """The pauses lie between nothing and a bound that doubles from 0.1 s up to 5 s."""
    door = Door(max_retries=12)
    door.fail(UfsUnavailableError("503"), 1000)
    for _ in range(20):
        with pytest.raises(UfsUnavailableError):
            door.ufs.get_meta("f")
    for number, pauses in enumerate(zip(*[iter(door.clock.slept)] * 12, strict=True)):
        assert len(pauses) == 12, number
        assert all(0 <= pause <= min(0.1 * 2**n, 5) for n, pause in enumerate(pauses))
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
    assert sorted(door.store.calls[1:]) == sorted([("get", ("f", n, 10)) for n in (0, 10, 10, 20)])


def test_no_foreign_retry_error_escapes() -> None:
    """The library that retries never shows in an error."""
    door = Door(max_retries=1)
    door.fail(UfsTimeoutError("slow"), 100)
    with pytest.raises(UfsTimeoutError) as caught:
        door.ufs.get_meta("f")
    assert not isinstance(caught.value.__cause__, tenacity.RetryError)


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
    door = Door(pins=False)
    file = door.version()

    def overwrite(kind: str, subject: object) -> None:
        if kind == "get" and data is not None:
            door.store.files["f"] = data
        elif kind == "head" and data is None:
            door.store.files.clear()

    door.store.before = overwrite
    with pytest.raises(SourceChangedError, match="f was replaced or removed"):
        door.ufs.read_ranges(file, [(0, 100)])
    assert [kind for kind, _ in door.store.calls] == ["head", "get", "head"]
    assert door.counts()["ufsHeadCount"] == 1


def test_a_change_of_an_unpinned_file_is_not_shown_with_credentials() -> None:
    """The error of a changed file shows its URL redacted."""
    door = Door(pins=False)
    door.store.files["http://u:pw@h/f"] = b"x"
    file = door.version("http://u:pw@h/f")
    door.store.files["http://u:pw@h/f"] = b"y"
    with pytest.raises(SourceChangedError, match=r"http://\[redacted\]@h/f"):
        door.ufs.read_ranges(file, [(0, 1)])


def test_files_are_read_together_each_in_its_own_version(tmp_path: Path) -> None:
    """Ranges of many files come back in the order asked, and a file that changed fails the whole request."""
    paths = [tmp_path / f"f{n}" for n in range(20)]
    for n, path in enumerate(paths):
        path.write_bytes(bytes([n]) * 1000)
    host = make_host(str(tmp_path), None)
    files = host.ufs.list_status(str(tmp_path)).files
    asked = [(file, [(n * 10, 5) for n in range(8)]) for file in reversed(files)]
    answers = host.ufs.read_many(asked)
    assert answers == [[bytes([int(file.url.rpartition("f")[2])]) * 5] * 8 for file, _ in asked]
    assert host.metrics.snapshot()["ufsGetCount"] == 160
    paths[7].write_bytes(b"other" * 200)
    with pytest.raises(SourceChangedError, match="f7 changed"):
        host.ufs.read_many(asked)


def test_reads_run_at_the_same_time() -> None:
    """Ranges of one file, and files of one request, are under way together; no thread is left behind."""
    door = Door()
    together = threading.Barrier(4, timeout=30)  # breaks, and fails the read, unless four are in it at once

    def meet(kind: str, subject: object) -> None:
        together.wait()

    door.store.before = meet
    f, g = FileVersion("f", 100, "x"), FileVersion("g", 50, "y")
    door.ufs.read_ranges(f, [(n, 1) for n in range(4)])
    door.ufs.read_many([(f, [(0, 1), (1, 1)]), (g, [(0, 1), (1, 1)])])
    assert door.counts()["ufsGetCount"] == 8
    assert not [thread for thread in threading.enumerate() if "ThreadPoolExecutor" in thread.name]


@pytest.mark.parametrize(("files", "ranges"), [(1, 40), (4, 40), (40, 4), (17, 1)])
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
    assert met == []
    assert door.counts()["ufsGetCount"] == files * ranges
