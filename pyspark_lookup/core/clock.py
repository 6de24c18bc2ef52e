"""`HostClock`: a host's clocks, passed as one argument. `Timer`: runs the periodic tasks of a process on one thread.

`wall_s` is Unix time, to be compared with the times of files. `steady_s` counts from the host's start, and is never set back or forward. Its
values can be compared between processes of the same `boot`, but not of different ones.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import heapq
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pyspark_lookup.core.threads import ends_with_process, sleep

# Unlike CLOCK_MONOTONIC, this clock goes on while the machine is suspended. An age must include that time.
_steady_s = functools.partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@dataclasses.dataclass(frozen=True)
class HostClock:
    """The functions that read a host's two clocks, in seconds, and a function that sleeps.

    `boot`: the id of the host's current boot; empty if the operating system does not tell it.
    """

    wall_s: Callable[[], float] = time.time
    steady_s: Callable[[], float] = _steady_s
    sleep: Callable[[float], None] = sleep
    boot: str = dataclasses.field(default_factory=_boot_id)


Task = Callable[[], float | None]
"""A function that does the work that is due, and never waits. Returns the seconds until its next run (None: it is not run again)."""

_log = logging.getLogger("pyspark_lookup.timer")
_AFTER_ERROR_S = 60.0  # a task that has failed runs again after this time
_AT_ONCE = 8  # pieces of background work, see `Timer.has_room`
_LONG_S = 10.0  # work that takes longer than this no longer counts for `Timer.has_room`


class Timer:
    """Runs tasks one after the other on one thread, each at the time that it has asked for. The thread ends when no task is left.

    `start`: a function that starts a thread with the given name and function. A timer must not be used after a fork.
    """

    def __init__(self, start: Callable[[str, Callable[[], None]], object]) -> None:
        self._start = start
        self._changed = threading.Condition()
        self._times: dict[Task, float] = {}  # by task: when it runs next, on Python's monotonic clock
        self._queue: list[
            tuple[float, int, Task]
        ] = []  # (time, number, task); some entries are out of date, see `_next`
        self._numbers = itertools.count()
        self._running = self._ended = False
        self._thread: threading.Thread | None = None
        self._running_work: list[tuple[float, concurrent.futures.Future[None]]] = []
        ends_with_process(self)

    def run_soon(self, task: Task) -> None:
        """Run a task as soon as possible. If it is running now, it runs once more. Raises RuntimeError if no thread can be started."""
        with self._changed:
            if self._ended:
                raise RuntimeError("the process is ending")
            new = task not in self._times
            self._push(task, -math.inf)
            self._changed.notify()
            begin, self._running = not self._running, True
        if begin:
            try:
                self._start("lookupcache-schedule-timer", self._loop)
            except BaseException:
                with self._changed:
                    self._running = False
                    if new:
                        del self._times[task]
                raise

    def remove(self, task: Task) -> None:
        """Do not run a task again, unless `run_soon` asks for it. If it is running now, it runs to its end."""
        with self._changed:
            self._times.pop(task, None)
            self._changed.notify()

    @property
    def can_be_awaited(self) -> bool:
        """Whether the current thread may wait until a task has run: the timer has a thread, and that is not the current thread."""
        return self._thread is not None and self._thread is not threading.current_thread() and not self._ended

    def has_room(self) -> bool:
        """Whether a task may start background work: fewer than 8 pieces of work that began in the last 10 seconds are still running."""
        since_s = time.monotonic() - _LONG_S
        self._running_work = [(at_s, work) for at_s, work in self._running_work if at_s > since_s and not work.done()]
        return len(self._running_work) < _AT_ONCE

    def add_work(self, work: concurrent.futures.Future[None]) -> None:
        """Count background work that a task has started, for `has_room`."""
        self._running_work.append((time.monotonic(), work))

    def end(self) -> None:
        """Stop running tasks."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def _push(self, task: Task, at_s: float) -> None:
        self._times[task] = at_s
        heapq.heappush(self._queue, (at_s, next(self._numbers), task))

    def _next(self) -> Task | None:
        """The next task, as soon as it is due; None if no task is left or the timer has ended."""
        with self._changed:
            while self._times and not self._ended:
                at_s, _, task = self._queue[0]
                wait_s = at_s - time.monotonic()
                if (
                    self._times.get(task) != at_s
                ):  # out of date: `run_soon` has given the task another time, or it was removed
                    heapq.heappop(self._queue)
                elif wait_s > 0:
                    self._changed.wait(wait_s)
                else:
                    heapq.heappop(self._queue)
                    self._times[task] = math.inf
                    return task
            self._running, self._thread = False, None
            return None

    def _loop(self) -> None:
        self._thread = threading.current_thread()
        while (task := self._next()) is not None:
            try:
                again_s = task()
            except Exception:  # the other tasks go on
                _log.exception("a task of the timer failed")
                again_s = _AFTER_ERROR_S
            with self._changed:
                if self._times.get(task) != math.inf:  # it was requested again, or removed, while it ran
                    continue
                if again_s is None:
                    del self._times[task]
                else:
                    self._push(task, time.monotonic() + again_s)
