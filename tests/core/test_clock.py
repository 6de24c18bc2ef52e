"""One timer for a process: what its tasks may count on, and that the schedules of many tables share it."""

import concurrent.futures
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pyspark_lookup.core.clock import Timer
from pyspark_lookup.storage.disk import directory
from tests.support.disks import Opened
from tests.support.fakes import make_host


class Loops:
    def __init__(self) -> None:
        self.started: list[Callable[[], None]] = []

    def __call__(self, name: str, work: Callable[[], None]) -> None:
        assert "-schedule-" in name
        self.started.append(work)


def test_tasks_are_run_when_they_have_said() -> None:
    """Each until it is done, those that fail beside others, one that is asked for while it runs once more; then the thread ends."""
    loops, ran = Loops(), list[str]()
    timer = Timer(loops)

    def task(name: str, *waits: float | None) -> Callable[[], float | None]:
        left = iter(waits)

        def run() -> float | None:
            ran.append(name)
            return next(left)

        return run

    def failing() -> None:
        ran.append("failing")
        timer.run_soon(again)
        raise ValueError("on purpose")

    def again() -> float | None:
        ran.append("again")
        if ran.count("again") == 1:
            timer.run_soon(again)
            return 1000.0
        timer.end()
        return None

    timer.run_soon(task("slow", 0.02, None))
    timer.run_soon(task("quick", 0.0, 0.01, None))
    assert len(loops.started) == 1
    loops.started.pop()()
    assert sorted(ran) == ["quick", "quick", "quick", "slow", "slow"]
    timer.run_soon(failing)
    loops.started.pop()()
    assert ran[5:] == ["failing", "again", "again"]
    with pytest.raises(RuntimeError, match="the process is ending"):
        timer.run_soon(failing)


def test_threads_of_a_process_take_turns_at_the_account(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many they are, none finds the account locked by another of its process for too long."""
    disk = Opened(cache_dir).disk
    monkeypatch.setattr(directory, "_LOCK_WAIT_S", -1.0)
    ready = threading.Barrier(8)

    def take(number: int) -> None:
        ready.wait()
        for _ in range(40):
            disk.counting(make_host(str(cache_dir), None).metrics).take("records", 4096)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(take, range(8)))
    assert disk.usage().records == 8 * 40 * 4096
