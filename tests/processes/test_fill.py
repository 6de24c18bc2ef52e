"""Real processes that fill one cache directory: racing, killed at every step, forked in the middle; and what a snapshot costs them.

Each test hands a function of this module to a fresh ("spawn") process, because the test process has
threads and must not fork. What that process asserts is asserted here: it must exit with 0.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pyspark_lookup.lookup.lookup_table import LookupTable
from pyspark_lookup.lookup.runtime import runtime
from pyspark_lookup.storage.disk import Disk, on_disk
from pyspark_lookup.storage.disk.directory import HEADER_BYTES
from tests.support.disks import data_of
from tests.support.fakes import FakeClock, Host, make_host
from tests.support.fuzzing import by_day
from tests.support.workers import BOUND_S, in_fresh_process, run_processes

if TYPE_CHECKING:
    from tests.support.s3server import S3Server  # which takes long to import

BLOCKS = [(n * 70_000, 1000) for n in range(12)]  # too far apart to share a request
FEW = BLOCKS[:3]
RACERS = 16
MAX_BYTES = 2**20  # of the directories of those that are killed


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file of a million random bytes."""
    path = tmp_path / "source"
    path.write_bytes(data_of(1, 1_000_000))
    return path


def located(host: Host, path: Path) -> Any:
    version = host.ufs.get_meta(str(path))
    host.store.calls.clear()
    return host.blocks.get_blocks_and_locations(version.url, version)


def read(host: Host, path: Path, blocks: list[tuple[int, int]]) -> list[bytes]:
    return [bytes(data) for data in host.blocks.read([(located(host, path), blocks)])[0]]


def right(path: Path, blocks: list[tuple[int, int]]) -> list[bytes]:
    content = path.read_bytes()
    return [content[offset : offset + length] for offset, length in blocks]


def gets(host: Host) -> list[tuple[int, int]]:
    return sorted(subject[1:] for kind, subject in host.store.calls if kind == "get")  # type: ignore[index]


def racer(path: Path, cache_dir: Path, start: Any, answer: Path) -> None:
    host = make_host(str(path), cache_dir, wait_s=BOUND_S)
    location = located(host, path)
    start.wait(BOUND_S)
    data = b"".join(host.blocks.read([(location, BLOCKS)])[0])
    answer.write_text(json.dumps([hashlib.sha256(data).hexdigest(), gets(host)]))


def race(path: Path, cache_dir: Path, answers: Path, method: str) -> None:
    start = multiprocessing.get_context(method).Barrier(RACERS)  # type: ignore[attr-defined]
    run_processes(method, racer, [(path, cache_dir, start, answers / str(number)) for number in range(RACERS)])


@pytest.mark.parametrize("method", by_day(["fork", "spawn"], 2))
def test_racing_processes_fetch_each_block_once(tmp_path: Path, cache_dir: Path, source: Path, method: str) -> None:
    """Of 16 processes that want the same blocks at once every one reads them whole, and the store is asked once per block."""
    answers = tmp_path / "answers"
    answers.mkdir()
    in_fresh_process(race, source, cache_dir, answers, method)
    digests, asked = zip(*(json.loads(answer.read_text()) for answer in answers.iterdir()), strict=True)
    assert (len(digests), {*digests}) == (RACERS, {hashlib.sha256(b"".join(right(source, BLOCKS))).hexdigest()})
    assert sorted(tuple(block) for blocks in asked for block in blocks) == BLOCKS
    disk = disk_of(cache_dir)
    assert (disk.check().blocks, disk.check().damaged) == (len(BLOCKS), ())
    assert disk.used_bytes() == disk.usage().total
    assert list((cache_dir / "v1" / "tmp").iterdir()) == []


STEPS = {"open", "os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "os.utime", "os.scandir", "fcntl.flock"}


class Steps:
    """Ends this process at its nth step in a directory: says which step it is about to make, then waits to be killed."""

    def __init__(self, directory: Path, last: int, report: int) -> None:
        self._directory, self._left, self._report = str(directory), last, report
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        paths = " ".join(os.fsdecode(arg) for arg in args if isinstance(arg, (str, bytes, os.PathLike)))
        # A name in a directory that is open: one is opened for each name, and only what is made counts.
        if event == "open":
            inside = "/" not in paths and bool(args[2] & os.O_CREAT)
        else:
            inside = any(self._is_inside(arg) for arg in args if isinstance(arg, int) and arg > 2)
        if event in STEPS and (event == "fcntl.flock" or inside or self._directory in paths):
            self.step(event)

    def _is_inside(self, descriptor: int) -> bool:
        try:
            return os.readlink(f"/proc/self/fd/{descriptor}").startswith(self._directory)
        except OSError:
            return False

    def step(self, name: str) -> None:
        self._left -= 1
        if self._left == 0:
            os.write(self._report, name.encode())
            signal.pause()


def host_now(path: Path, cache_dir: Path, max_bytes: int = 2**30, later_s: float = 0) -> Host:
    """A host whose clock stands still at the real time, or later."""
    return make_host(str(path), cache_dir, FakeClock(time.time() + later_s), max_bytes=max_bytes)


def disk_of(cache_dir: Path, later_s: float = 0) -> Disk:
    disk = host_now(Path("/x"), cache_dir, later_s=later_s).disk
    assert disk is not None
    return disk


def fill(path: Path, cache_dir: Path, step: Callable[[str], None]) -> None:
    """What a worker does to the directory: blocks, an exclusive record, a replaced one, a lock."""
    host = host_now(path, cache_dir, MAX_BYTES)
    host.store.before = lambda kind, subject: step(kind)
    read(host, path, FEW)
    assert host.disk is not None
    host.disk.create_record("execution", "k", "mine")
    host.disk.replace_record("version", "r", 2)
    host.disk.sweep()


def prepared(path: Path, cache_dir: Path, full: bool) -> None:
    """The directory as the killed process finds it: a record, and if `full` no room for its blocks."""
    host = host_now(path, cache_dir, MAX_BYTES)
    assert host.disk is not None
    host.disk.replace_record("version", "r", 1)
    if full:
        pages = [*([26] * 9), 3]  # and two for their directories
        read(host, path, [(n * 80_000, 4096 * count - HEADER_BYTES) for n, count in enumerate(pages)])
        assert host.disk.lacks("blocks", 1) == 1


def assert_sound(path: Path, cache_dir: Path, where: str) -> None:
    """After a kill: no lock is held, nothing broken is served, what is missing is fetched, and repair leaves it clean."""
    root = cache_dir / "v1"
    for lock in [*(root.glob("*.lock")), *(root.glob("locks/*"))]:
        with open(lock, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    host = host_now(path, cache_dir, MAX_BYTES)
    disk = host.disk
    assert disk is not None
    # It may claim what is not there yet, never less than there is under its name.
    left = sum(on_disk(path.stat().st_size) for path in (root / "tmp").iterdir())
    left += 2 * on_disk(1)  # the directories of a block, where the account was cut short
    assert disk.usage().total >= disk.used_bytes() - left, where
    assert disk.used_bytes() <= MAX_BYTES, where
    assert disk.check().damaged == (), where
    held = located(host, path).cached_blocks
    assert read(host, path, FEW) == right(path, FEW), where
    assert gets(host) == [block for block in FEW if block not in held], where
    assert disk.get_record("version", "r") in (1, 2), where
    recorded = disk.create_record("execution", "k", "other")
    assert recorded in ("mine", "other"), where
    assert disk.create_record("execution", "k", "third") == recorded, where
    counts = host.metrics.snapshot()
    assert (counts["blockDamagedCount"], counts["cacheFailureCount"], counts["blockWaitCount"]) == (0, 0, 0), where
    later = disk_of(cache_dir, later_s=2 * 3600)
    found = later.check(repair=True)
    again = later.check()
    assert (found.damaged, again.damaged, again.leftovers) == ((), (), ()), where
    assert list((root / "tmp").iterdir()) == [], where
    assert disk.usage().total == disk.used_bytes(), where
    assert disk.usage().blocks >= again.bytes, where
    after = host_now(path, cache_dir)
    assert read(after, path, FEW) == right(path, FEW), where
    assert gets(after) == [], where


def forked(function: Callable[..., None], *given: Any) -> int:
    """A forked process that runs it."""
    child = os.fork()
    if child == 0:
        try:
            function(*given)
        finally:
            os._exit(0)
    return child


def fill_until(path: Path, cache_dir: Path, last: int, report: int) -> None:
    fill(path, cache_dir, Steps(cache_dir, last, report).step)


def kill_at_every_step(path: Path, base: Path, full: bool, answer: Path) -> None:
    reached: list[str] = []
    while True:
        cache_dir = base / str(len(reached))
        prepared(path, cache_dir, full)
        report, tell = os.pipe()
        child = forked(fill_until, path, cache_dir, len(reached) + 1, tell)
        os.close(tell)
        with os.fdopen(report) as reports:
            step = os.read(reports.fileno(), 100).decode()
        if step:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert_sound(path, cache_dir, f"killed before step {len(reached) + 1} ({step}), after {reached}")
        if not step:
            break
        reached.append(step)
    answer.write_text(json.dumps(reached))


@pytest.mark.parametrize("full", by_day([True, False], 2), ids=["full cache", "empty cache"])
def test_killed_at_every_step_of_a_fill(tmp_path: Path, source: Path, full: bool) -> None:
    """A filler killed before any of its system calls or requests leaves no lock, nothing broken, nothing uncounted."""
    in_fresh_process(kill_at_every_step, source, tmp_path / "caches", full, tmp_path / "answer")
    reached = json.loads((tmp_path / "answer").read_text())
    expected = {"get", "head", "open", "os.mkdir", "os.rename", "os.link", "os.remove", "fcntl.flock"}
    assert set(reached) >= (expected | {"os.rmdir", "os.scandir"} if full else expected)
    assert reached.count("os.rename") > len(FEW)
    assert len(reached) > 50


def scan_in_child(path: str, parent: int) -> None:
    mine = runtime()
    assert mine.pid == os.getpid() != parent
    assert mine is runtime()
    assert LookupTable(path).scan().num_rows == 1000


def fork_while_busy(path: str, cache_dir: Path, conf: Path, environ: dict[str, str]) -> None:
    conf.write_text(f"lookup.cache.dir = {cache_dir}\n" + "".join(f"{k} = {v}\n" for k, v in environ.items()))
    os.environ["LOOKUPCACHE_CONF"] = str(conf)
    before = runtime()
    table = LookupTable(path)
    table.scan()  # imports what its store needs: no Python can fork while another thread imports
    stop = threading.Event()

    def scan() -> None:
        while not stop.is_set():
            table.scan()

    with ThreadPoolExecutor(1) as pool:
        scanning = pool.submit(scan)
        try:
            for _ in range(10):
                run_processes("fork", scan_in_child, [(path, os.getpid())] * 2)
        finally:
            stop.set()
        scanning.result()
    assert runtime() is before
    assert table.scan().num_rows == 1000


CSV = "id,name\n" + "".join(f"{n},n{n}\n" for n in range(1000))


@pytest.mark.parametrize("store", by_day(["s3", "local"], 2))
def test_a_forked_child_builds_its_own_runtime(tmp_path: Path, cache_dir: Path, s3: S3Server, store: str) -> None:
    """Children forked at any moment of a parent that reads all the time have a runtime and connections of their own."""
    (tmp_path / "t.csv").write_text(CSV)
    given: tuple[str, dict[str, str]] = str(tmp_path / "t.csv"), {}
    if store == "s3":
        s3.client.create_bucket(Bucket="forked")
        s3.client.put_object(Bucket="forked", Key="t.csv", Body=CSV.encode())
        given = "s3://forked/t.csv", {"lookup.storage.endpoint_url": s3.endpoint}
    in_fresh_process(fork_while_busy, given[0], cache_dir, tmp_path / "conf", given[1])
