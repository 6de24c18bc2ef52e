"""Virtual time for code that blocks: threads that run one at a time, and whose waits take no time.

`VirtualTime` is the scheduler. Its tasks are real threads, of which exactly one runs; the others wait for their turn. A task that sleeps,
waits for a lock, a queue or a future, gives its turn to the task whose time comes next, and the clock jumps to that time. So a run is
repeatable, and an hour of mostly waiting takes as long as the code between the waits.

`simulate_engine` runs the engine of `pyspark_lookup` in such a time: within it the package's modules find the locks, queues, futures, threads and
clocks of the scheduler in place of Python's. Nothing else of the engine is replaced. Time that the engine computes counts as none.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import heapq
import itertools
import queue
import sys
import threading
import time
import types
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import fsspec.asyn

from pyspark_lookup.core import threads

T = TypeVar("T")


class _Stopped(BaseException):
    """Ends a task when the run is over."""


class Task:
    """A thread that runs when its turn comes. `owner`: whom it works for, which the tasks that it starts inherit."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.turn = threading.Lock()
        self.turn.acquire()
        self.ticket = 0  # the number of its waits; a wake-up for an earlier wait is ignored
        self.is_woken = self.is_over = False
        self.joining: list[Task] = []
        self.thread: threading.Thread | None = None


class VirtualTime:
    """The scheduler and its clock. The thread that makes it is its first task. `entered`: called with a task's owner at each turn."""

    def __init__(self, entered: Callable[[Any], None] = lambda owner: None) -> None:
        self.now_s = 0.0
        self.switches = 0
        self._entered = entered
        self._queue: list[tuple[float, int, Task, int]] = []
        self._numbers = itertools.count()
        self._main = self.current = Task(None, "main")
        self._tasks: set[Task] = set()
        self._problem: BaseException | None = None
        self._closed = False

    def start(self, name: str, work: Callable[[], object], owner: object = None) -> Task:
        """Start a task. It runs at the current time, after the tasks that are already due."""
        task = Task(self.current.owner if owner is None else owner, name)

        def run() -> None:
            task.turn.acquire()
            try:
                if not self._closed:
                    self._entered(task.owner)
                    work()
            except (_Stopped, threads.ProcessEndsError):
                pass
            except BaseException as problem:
                self._problem = self._problem or problem
                self._wake(self._main)
            finally:
                task.is_over = True
                self._tasks.discard(task)
                for waiting in task.joining:
                    self._wake(waiting)
                if not self._closed:
                    self._give_turn()

        task.thread = threading.Thread(target=run, name=name, daemon=True)
        self._tasks.add(task)
        task.thread.start()
        self._push(task, self.now_s)
        return task

    def run(self, until_s: float) -> None:
        """Let the tasks run until a time. Raises the first error of a task."""
        while self.now_s < until_s and self._problem is None:
            self.wait(until_s - self.now_s)
        if self._problem is not None:
            raise self._problem

    def close(self) -> None:
        """End all tasks where they wait."""
        self._closed = True
        while self._tasks:
            task = next(iter(self._tasks))
            task.turn.release()
            assert task.thread is not None
            task.thread.join()

    # --- what tasks call --------------------------------------------------------------------------

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        until_s = self.now_s + max(seconds, 0.0)
        self._push(self.current, until_s)
        self._pause()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for `wake`. Returns False if `timeout_s` has passed before."""
        if timeout_s is not None:
            self._push(self.current, self.now_s + max(timeout_s, 0.0))
        return self._pause()

    def wait_for(self, is_true: Callable[[], bool], waiting: list[Task], timeout_s: float | None = None) -> bool:
        """Wait until a condition holds. Whoever makes it true must wake the tasks in `waiting`. Returns whether it holds."""
        until_s = None if timeout_s is None else self.now_s + max(timeout_s, 0.0)
        while not is_true():
            self._check_open()
            task = self.current
            waiting.append(task)
            woken = self.wait(None if until_s is None else until_s - self.now_s)
            if task in waiting:
                waiting.remove(task)
            if not woken and until_s is not None and self.now_s >= until_s:
                return is_true()
        return True

    def wake_all(self, waiting: list[Task]) -> None:
        """Wake the tasks of a list, and empty it."""
        woken, waiting[:] = waiting[:], []
        for task in woken:
            self._wake(task)

    def _wake(self, task: Task) -> None:
        if not task.is_over:
            task.is_woken = True
            self._push(task, self.now_s)

    def join(self, task: Task, timeout_s: float | None = None) -> None:
        """Wait until a task has ended."""
        self.wait_for(lambda: task.is_over, task.joining, timeout_s)

    # --- turns ------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        """Raise _Stopped if the run is over."""
        if self._closed:
            raise _Stopped

    def _push(self, task: Task, at_s: float) -> None:
        heapq.heappush(self._queue, (at_s, next(self._numbers), task, task.ticket))

    def _pause(self) -> bool:
        """Wait for this task's next turn. Returns True if it was woken, False if its time has come."""
        task = self.current
        self._check_open()
        if self._next() is not task:
            self.current.turn.release()
            task.turn.acquire()
            self._check_open()
        task.ticket += 1
        task.is_woken, woken = False, task.is_woken
        self._entered(task.owner)
        return woken

    def _next(self) -> Task:
        """Make the task whose turn is next the current one, and let the clock jump to its time. Returns the task."""
        while True:
            at_s, _, task, ticket = heapq.heappop(self._queue)
            if ticket == task.ticket and not task.is_over:
                self.now_s = max(self.now_s, at_s)
                self.current = task
                self.switches += 1
                return task

    def _give_turn(self) -> None:
        self._next().turn.release()


# --- locks, queues and futures of tasks -------------------------------------------------------------


class _Lock:
    """`threading.Lock` and `threading.RLock` for tasks."""

    def __init__(self, time: VirtualTime, reentrant: bool) -> None:
        self._time, self._reentrant = time, reentrant
        self._owner: Task | None = None
        self._depth = 0
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        task = self._time.current
        if self._owner is not None and not (self._reentrant and self._owner is task):
            timeout_s = 0.0 if not blocking else timeout if timeout >= 0 else None
            if not blocking or not self._time.wait_for(lambda: self._owner is None, self._waiting, timeout_s):
                return False
        self._owner = task
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            if self._waiting:
                self._time.wake_all(self._waiting)

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()


class _Condition:
    """`threading.Condition` for tasks."""

    def __init__(self, time: VirtualTime) -> None:
        self._time, self._lock = time, _Lock(time, True)
        self._waiting: list[Task] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        task = self._time.current
        self._waiting.append(task)
        self._lock.release()
        woken = self._time.wait(timeout)
        if task in self._waiting:
            self._waiting.remove(task)
        self._lock.acquire()
        return woken

    def notify(self, n: int = 1) -> None:
        woken, self._waiting = self._waiting[:n], self._waiting[n:]
        self._time.wake_all(woken)

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class _Event:
    """`threading.Event` for tasks."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._is_set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._time.wake_all(self._waiting)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._time.wait_for(self.is_set, self._waiting, timeout)


class _Queue:
    """`queue.SimpleQueue` for tasks."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._items: collections.deque[Any] = collections.deque()
        self._waiting: list[Task] = []

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._time.wake_all(self._waiting)

    def get(self) -> Any:
        self._time.wait_for(lambda: bool(self._items), self._waiting)
        return self._items.popleft()


class _Joined:
    """What `pyspark_lookup.core.threads.start` returns: a thread that can be awaited."""

    def __init__(self, time: VirtualTime, task: Task) -> None:
        self._time, self._task, self.name = time, task, task.name

    def join(self, timeout: float | None = None) -> None:
        self._time.join(self._task, timeout)


def _instead(module: types.ModuleType, **names: Any) -> Any:
    """A copy of a module, with other objects under some names."""
    changed = types.ModuleType(module.__name__)
    changed.__dict__.update({**vars(module), **names})
    return changed


def _finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for nothing but tasks. Returns its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("a coroutine of the store waits for something that is not a task")


@contextlib.contextmanager
def simulate_engine(time_: VirtualTime, wall_s: float) -> Iterator[None]:
    """Run `pyspark_lookup` in virtual time while the block runs. `wall_s`: the Unix time at which it begins."""
    replacements: dict[str, tuple[Any, Any]] = {
        "threading": (
            threading,
            _instead(
                threading,
                Lock=lambda: _Lock(time_, False),
                RLock=lambda: _Lock(time_, True),
                Condition=lambda: _Condition(time_),
                Event=lambda: _Event(time_),
            ),
        ),
        "queue": (queue, _instead(queue, SimpleQueue=lambda: _Queue(time_))),
        "time": (
            time,
            _instead(
                time,
                sleep=time_.sleep,
                monotonic=lambda: time_.now_s,
                time=lambda: wall_s + time_.now_s,
            ),
        ),
    }

    def start(name: str, work: Callable[[], None], *, foreign: bool = False) -> _Joined:
        return _Joined(time_, time_.start(name, work))

    real_result = concurrent.futures.Future.result

    def result(self: concurrent.futures.Future[Any], timeout: float | None = None) -> Any:
        if not self.done():
            waiting: list[Task] = []
            self.add_done_callback(lambda _: time_.wake_all(waiting))
            if not time_.wait_for(self.done, waiting, timeout):
                raise concurrent.futures.TimeoutError
        return real_result(self)

    with contextlib.ExitStack() as restored:

        def replace(owner: Any, name: str, value: Any) -> None:
            restored.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        for module in [module for name, module in sys.modules.items() if name.startswith("pyspark_lookup")]:
            for name, (real, virtual) in replacements.items():
                if vars(module).get(name) is real:
                    replace(module, name, virtual)
        replace(threads, "start", start)
        replace(concurrent.futures.Future, "result", result)
        replace(fsspec.asyn, "sync", lambda loop, function, *arguments: _finish(function(*arguments)))
        yield
