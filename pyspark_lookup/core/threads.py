"""Background threads that end before the interpreter does, and threads that work for one caller, who gets their results in order.

The race: while the process is ending, Python (before 3.14) ends a daemon thread that acquires the GIL, wherever that thread is. If it is in a
destructor of Arrow's, for instance that of a batch over a mapped file, this aborts the process. So all our threads are started here. At the
end of the process they are asked to end, and awaited. Each stops at its next call of `check`, where no work is half done. All of them are
daemon threads nevertheless, so that a thread that hangs in foreign code, or waits for a store, does not keep the process from ending.
"""

from __future__ import annotations

import atexit
import collections
import concurrent.futures
import contextlib
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from pyspark_lookup.core.forks import living, resets_in_child

_log = logging.getLogger("pyspark_lookup.threads")
_END_S = (
    10.0  # far longer than the time between two calls of `check`, but short for somebody who waits for a process to end
)
_FOREIGN_END_S = 2.0  # the same for threads that run a user's code, which does not call `check`


class ProcessEndsError(BaseException):
    """Raised in a background thread to stop its work because the process is ending. Nothing has failed."""


class Ending(Protocol):
    """An owner of waiting threads. `end` makes these threads return soon."""

    def end(self) -> None: ...


class _Thread(threading.Thread):
    """A thread that `start` has started."""

    def __init__(self, name: str, work: Callable[[], None], foreign: bool) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self.foreign = foreign
        # The race: `end_all` may see this thread before another thread has started it. join() would then fail, so `end_all` waits for this
        # event first.
        self.over = threading.Event()

    def run(self) -> None:
        try:
            self._work()
        except ProcessEndsError:
            pass
        finally:
            del self._work  # frees the objects that the function refers to, even if somebody keeps this thread object
            _threads.running.discard(self)
            self.over.set()


class _Threads:
    """The threads of this process that `start` has started. A forked child begins without any."""

    def __init__(self) -> None:
        self.reset_in_child()
        resets_in_child(self)

    def reset_in_child(self) -> None:
        self.running: set[_Thread] = set()
        self.endings: weakref.WeakValueDictionary[int, Ending] = weakref.WeakValueDictionary()
        self.ended = threading.Event()


_threads = _Threads()


def start(name: str, work: Callable[[], None], *, foreign: bool = False) -> threading.Thread:
    """Start a thread that runs a function, and return it. Raises RuntimeError if no more threads can be started.

    `foreign`: the function runs a user's code, and a caller waits for its result. Without `foreign`, RuntimeError is also raised once the
    process is ending.
    """
    if _threads.ended.is_set() and not foreign:
        raise RuntimeError("the process is ending")
    thread = _Thread(name, work, foreign)
    _threads.running.add(thread)
    try:
        thread.start()
    except BaseException:
        _threads.running.discard(thread)
        raise
    return thread


def ends_with_process(owner: Ending) -> None:
    """Register an owner. Its `end` is called when the process ends, if the owner still exists then."""
    _threads.endings[id(owner)] = owner


def has_ended() -> bool:
    """Whether the process has begun to end."""
    return _threads.ended.is_set()


def is_ending() -> bool:
    """Whether the process is ending and the current thread is one that `start` has started."""
    return _threads.ended.is_set() and isinstance(threading.current_thread(), _Thread)


def check() -> None:
    """Raise ProcessEndsError in a thread of ours if the process is ending. Call this where no work is half done."""
    if is_ending():
        raise ProcessEndsError


def sleep(seconds: float) -> None:
    """Like `time.sleep`, but a thread that `start` has started wakes up with ProcessEndsError when the process is ending."""
    if isinstance(threading.current_thread(), _Thread):
        _threads.ended.wait(seconds)
        check()
    else:
        time.sleep(seconds)


@atexit.register
def end_all() -> None:
    """End all threads that `start` has started, and wait for them: up to 10 seconds, for threads with a user's code up to 2."""
    if _threads.ended.is_set():  # this is a second call: threads that still run did not stop in time at the first
        return
    _threads.ended.set()
    for owner in living(_threads.endings):
        owner.end()
    since_s, late_threads = time.monotonic(), set[_Thread]()
    # A thread may have started others just before it ended, so the set of running threads is looked at again.
    while unfinished := _threads.running - late_threads - {threading.current_thread()}:
        thread = min(unfinished, key=lambda thread: thread.foreign)
        left_s = since_s + (_FOREIGN_END_S if thread.foreign else _END_S) - time.monotonic()
        if thread.over.wait(max(left_s, 0.0)):
            thread.join()
        else:
            late_threads.add(thread)
    if late_threads:
        names = ", ".join(sorted(thread.name for thread in late_threads))
        _log.info("the process ends although these threads did not stop in time: %s", names)


T = TypeVar("T")
R = TypeVar("R")


class _Workers(Generic[T, R]):
    """Threads that call `do` for submitted items. If the caller disappears without ending them, they end with the process."""

    def __init__(self, do: Callable[[T], R], at_most: int) -> None:
        self._do = do
        self._submitted: queue.SimpleQueue[tuple[concurrent.futures.Future[R], T] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._ending = False
        ends_with_process(self)
        with contextlib.suppress(RuntimeError):  # there are too many threads, or there is no address space for one more
            for number in range(at_most):
                self._threads.append(start(f"lookupcache-build-{number}", self._work))

    @property
    def count(self) -> int:
        return len(self._threads)

    def submit(self, item: T) -> concurrent.futures.Future[R]:
        future: concurrent.futures.Future[R] = concurrent.futures.Future()
        self._submitted.put((future, item))
        return future

    def _work(self) -> None:
        while (submitted := self._submitted.get()) is not None:
            future, item = submitted
            if self._ending:
                future.cancel()
            elif future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._do(item))
                except BaseException as problem:
                    future.set_exception(problem)
            del submitted, future, item

    def end(self) -> None:
        """Start no more items, and tell the threads to end."""
        self._ending = True
        for _ in self._threads:
            self._submitted.put(None)

    def wait(self) -> None:
        """Wait until all threads have ended."""
        for thread in self._threads:
            thread.join()


def run_in_order(do: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """The results of `do` for each item, in the order of the items. They are computed by `threads` threads, only a little ahead of the
    caller.

    If `threads` is 0, or no thread can be started, the caller's thread runs `do`.
    """
    workers = _Workers(do, threads)
    ahead: collections.deque[concurrent.futures.Future[R]] = collections.deque()
    try:
        if not workers.count:
            for item in items:
                check()
                yield do(item)
            return
        for item in items:
            check()
            ahead.append(workers.submit(item))
            if len(ahead) > workers.count:
                yield ahead.popleft().result()
        while ahead:
            check()
            yield ahead.popleft().result()
    finally:
        for future in ahead:
            future.cancel()
        workers.end()
        workers.wait()
