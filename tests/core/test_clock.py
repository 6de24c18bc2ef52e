"""The timer of a process: what its tasks may rely on, and that the schedules of many tables share it."""

from collections.abc import Callable

import pytest

from pyspark_lookup.core.clock import Timer


class Loops:
    def __init__(self) -> None:
        self.started: list[Callable[[], None]] = []

    def __call__(self, name: str, work: Callable[[], None]) -> None:
        assert "-schedule-" in name
        self.started.append(work)


def test_tasks_are_run_when_they_have_said() -> None:
    """Each task runs until it is done, also if another one fails; a task that is requested while it runs, runs once more; then the thread ends."""
    loops, ran = Loops(), list[str]()
    timer = Timer(loops)

    def task(name: str, *waits: float | None) -> Callable[[], float | None]:
        remaining_waits = iter(waits)

        def run() -> float | None:
            ran.append(name)
            return next(remaining_waits)

        return run

    def failing() -> None:
        ran.append("failing")
        timer.run_soon(run_twice)
        raise ValueError("on purpose")

    def run_twice() -> float | None:
        ran.append("again")
        if ran.count("again") == 1:
            timer.run_soon(run_twice)
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
