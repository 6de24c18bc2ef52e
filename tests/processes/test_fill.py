"""Real processes that fill one cache directory, killed at every step. They are forked by a spawned one, for that of the tests has threads."""

import fcntl
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyspark_lookup.storage.disk import on_disk
from pyspark_lookup.storage.disk.directory import HEADER_BYTES
from tests.support.block_source import Source
from tests.support.fakes import FakeClock, Host, make_host, wait_until_settled
from tests.support.fuzzing import BY_NIGHT, by_day
from tests.support.workers import in_fresh_process

FEW = [(n * 70_000, 1000) for n in range(3)]  # too far apart to share a request
MAX_BYTES = 2**20  # of the directories of those that are killed


STEPS = {"open", "os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "os.utime", "os.scandir", "fcntl.flock"}


class Steps:
    """The steps of this process in a directory. Before its nth one, it says so and waits to be killed."""

    def __init__(self, directory: Path, last: int, report: int) -> None:
        self._directory, self._last, self._report = str(directory), last, report
        self.names: list[str] = []
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
        self.names.append(name)
        if len(self.names) == self._last:
            os.write(self._report, b"!")
            signal.pause()


def host_now(path: Path, cache_dir: Path, max_bytes: int = 2**30, later_s: float = 0) -> Host:
    return make_host(str(path), cache_dir, FakeClock(time.time() + later_s), max_bytes=max_bytes)


def fill(source: Source, cache_dir: Path, step: Callable[[str], None]) -> None:
    host = host_now(source.path, cache_dir, MAX_BYTES)
    host.store.before = lambda kind, subject: step(kind)
    source.read(*FEW, host=host)
    host.disk.create_record("execution", "k", "mine")
    host.disk.replace_record("version", "r", 2)
    host.disk.sweep()


def prepared(source: Source, cache_dir: Path, full: bool) -> None:
    """The directory as the killed process finds it: a record, and if `full` no room for its blocks."""
    host = host_now(source.path, cache_dir, MAX_BYTES)
    host.disk.replace_record("version", "r", 1)
    if full:
        pages = [*([26] * 9), 3]  # and two for their directories
        source.read(*((n * 80_000, 4096 * count - HEADER_BYTES) for n, count in enumerate(pages)), host=host)
        assert host.disk.lacks("blocks", 1) == 1


def assert_sound(source: Source, cache_dir: Path, where: str) -> None:
    """After a kill: no lock is held, nothing broken is served, what is missing is fetched, and repair leaves it clean."""
    root = cache_dir / "v1"
    for lock in [*(root.glob("*.lock")), *(root.glob("locks/*"))]:
        with open(lock, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    host = host_now(source.path, cache_dir, MAX_BYTES)
    disk = host.disk
    # It may claim what is not there yet, never less than there is under its name.
    leftover_bytes = sum(on_disk(path.stat().st_size) for path in (root / "tmp").iterdir())
    leftover_bytes += 2 * on_disk(1)  # the directories of a block, where the account was cut short
    assert disk.usage().total >= disk.used_bytes() - leftover_bytes, where
    assert disk.used_bytes() <= MAX_BYTES, where
    assert disk.check().damaged == (), where
    cached_blocks = source.locate(host).cached_blocks
    assert source.read(*FEW, host=host) == source.right(*FEW), where
    assert source.gets(host) == [block for block in FEW if block not in cached_blocks], where
    assert disk.get_record("version", "r") in (1, 2), where
    recorded = disk.create_record("execution", "k", "other")
    assert recorded in ("mine", "other"), where
    assert disk.create_record("execution", "k", "third") == recorded, where
    counts = host.metrics.snapshot()
    assert (counts["blockDamagedCount"], counts["cacheFailureCount"], counts["blockWaitCount"]) == (0, 0, 0), where
    later = host_now(source.path, cache_dir, later_s=2 * 3600).disk
    report = later.check(repair=True)
    second_report = later.check()
    assert (report.damaged, second_report.damaged, second_report.leftovers) == ((), (), ()), where
    assert list((root / "tmp").iterdir()) == [], where
    assert disk.usage().total == disk.used_bytes(), where
    assert disk.usage().blocks >= second_report.bytes, where
    after = host_now(source.path, cache_dir)
    assert source.read(*FEW, host=after) == source.right(*FEW), where
    assert source.gets(after) == [], where


def kill_at_steps(path: Path, base: Path, full: bool, every: int, answer: Path) -> None:
    """Kill fillers before their first step, before every so many later ones, and one not at all, whose steps are the answer."""
    source = Source(path, None, size=1_000_000)
    wait_until_settled(path)
    for number in itertools.count(1, every):
        cache_dir = base / str(number)
        prepared(source, cache_dir, full)
        report, tell = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                steps = Steps(cache_dir, number, tell)
                fill(source, cache_dir, steps.step)
                os.write(tell, json.dumps(steps.names).encode())
            finally:
                os._exit(0)
        os.close(tell)
        with os.fdopen(report, "rb") as reports:
            step = reports.read(1)
            if step == b"!":
                os.kill(child, signal.SIGKILL)
            step += reports.read()
        os.waitpid(child, 0)
        assert_sound(source, cache_dir, f"killed before step {number}")
        if step != b"!":
            answer.write_bytes(step)
            return


@pytest.mark.parametrize("full", by_day([True, False], 2), ids=["full cache", "empty cache"])
def test_killed_at_every_step_of_a_fill(tmp_path: Path, full: bool) -> None:
    """A filler killed before any of its system calls or requests leaves no lock, nothing broken, nothing uncounted. By day: of every fifth."""
    every = 1 if BY_NIGHT else 5
    in_fresh_process(kill_at_steps, tmp_path / "file", tmp_path / "caches", full, every, tmp_path / "answer")
    reached = json.loads((tmp_path / "answer").read_text())
    expected = {"get", "head", "open", "os.mkdir", "os.rename", "os.link", "os.remove", "fcntl.flock"}
    assert set(reached) >= (expected | {"os.rmdir", "os.scandir"} if full else expected)
    assert reached.count("os.rename") > len(FEW)
    assert len(reached) > 50
