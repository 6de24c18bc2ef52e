"""Threads that work for one caller, who gets their results in order."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from pyspark_lookup.core import threads as process_threads

T = TypeVar("T")
R = TypeVar("R")


class _Workers(Generic[T, R]):
    """Threads that call `do` for submitted items. If the caller disappears without ending them, they end with the process."""

    def __init__(self, do: Callable[[T], R], at_most: int) -> None:
        self._do = do
        self._submitted: queue.SimpleQueue[tuple[concurrent.futures.Future[R], T] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._ending = False
        process_threads.ends_with_process(self)
        with contextlib.suppress(RuntimeError):  # there are too many threads, or there is no address space for one more
            for number in range(at_most):
                self._threads.append(process_threads.start(f"lookupcache-build-{number}", self._work))

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
    """The results of `do` for each item, in order, from `threads` threads that run only a little ahead of the caller. 0: in the caller's thread."""
    workers = _Workers(do, threads)
    ahead: collections.deque[concurrent.futures.Future[R]] = collections.deque()
    try:
        if not workers.count:
            for item in items:
                process_threads.check()
                yield do(item)
            return
        for item in items:
            process_threads.check()
            ahead.append(workers.submit(item))
            if len(ahead) > workers.count:
                yield ahead.popleft().result()
        while ahead:
            process_threads.check()
            yield ahead.popleft().result()
    finally:
        for future in ahead:
            future.cancel()
        workers.end()
        workers.wait()
