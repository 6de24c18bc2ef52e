"""Several threads that work for one caller, which gets what they make in order."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def run_in_order(do: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """What `do` makes of each item, in order; done by so many threads, little more than that ahead of the caller. 0: by the caller."""
    given: queue.SimpleQueue[tuple[concurrent.futures.Future[R], T] | None] = queue.SimpleQueue()
    ahead: collections.deque[concurrent.futures.Future[R]] = collections.deque()

    def work() -> None:
        while (one := given.get()) is not None:
            future, item = one
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(do(item))
                except BaseException as problem:
                    future.set_exception(problem)
            del one, future, item

    workers: list[threading.Thread] = []
    try:
        with contextlib.suppress(RuntimeError):  # there are too many, or there is no address space for one more
            for number in range(threads):
                # A process that ends waits for the threads of an executor, and so for all that a provider scans; not for daemons.
                worker = threading.Thread(target=work, name=f"lookupcache-build-{number}", daemon=True)
                worker.start()
                workers.append(worker)
        if not workers:
            yield from map(do, items)
            return
        for item in items:
            ahead.append(concurrent.futures.Future())
            given.put((ahead[-1], item))
            if len(ahead) > len(workers):
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        for future in ahead:
            future.cancel()
        for _ in workers:
            given.put(None)
        for worker in workers:
            worker.join()
