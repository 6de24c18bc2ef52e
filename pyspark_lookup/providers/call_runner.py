"""Calls of foreign code with an end: on a thread of its own, given up when it takes too long."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar, cast

from pyspark_lookup.base import threads

T = TypeVar("T")

_LOOK_S = 1.0  # how soon a thread notices that nobody takes what it makes, at the latest


class CallTimeoutError(Exception):
    """A call did not end in time; its thread is left to itself."""


class CallFailedError(Exception):
    """A call raised `problem`."""

    def __init__(self, problem: BaseException) -> None:
        super().__init__(problem)
        self.problem = problem


def beside(make: Callable[[], Iterable[T]], name: str, timeout_s: float) -> Iterator[T]:
    """What `make()` gives, one by one, made on a thread of its own, which waits until one is taken.

    Raises CallFailedError, or CallTimeoutError for one that takes longer than `timeout_s`: then the thread is left to itself.
    """
    made: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(1)
    left = threading.Event()

    def put(one: T | None, problem: BaseException | None) -> None:
        while not left.is_set():
            with contextlib.suppress(queue.Full):
                made.put((one, problem), timeout=_LOOK_S)
                return

    def run() -> None:
        try:
            for one in make():
                put(one, None)
                if left.is_set():
                    return
            put(None, StopIteration())
        except BaseException as problem:  # a SystemExit would end the thread, and nobody would hear of it
            put(None, problem)

    threads.start(name, run, foreign=True)
    caller = _Caller(made, left)  # as long as somebody takes what is made
    try:
        while True:
            try:
                one, problem = made.get(timeout=timeout_s)
            except queue.Empty:
                raise CallTimeoutError from None
            if isinstance(problem, StopIteration):
                return
            if isinstance(problem, threads.ProcessEndsError):
                raise problem
            if problem is not None:
                raise CallFailedError(problem)
            yield cast(T, one)
    finally:
        caller.leave()


class _Caller:
    """Who takes what is made beside it, until it has enough or the process ends."""

    def __init__(self, made: queue.Queue[Any], left: threading.Event) -> None:
        self._made = made
        self._left = left
        threads.ends_with_process(self)

    def leave(self) -> None:
        self._left.set()
        with contextlib.suppress(queue.Empty):  # the other thread may wait for room
            self._made.get_nowait()

    def end(self) -> None:
        self._left.set()
        while True:  # the other thread may put one more, but no two
            with contextlib.suppress(queue.Full):
                self._made.put_nowait((None, threads.ProcessEndsError()))
                return
            with contextlib.suppress(queue.Empty):
                self._made.get_nowait()


class Calls:
    """Runs coroutines on one event loop in one thread, made when first needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[concurrent.futures.Future[Any], asyncio.AbstractEventLoop] = {}  # calls that have not begun
        threads.ends_with_process(self)

    def run(self, call: Callable[[], Coroutine[Any, Any, T]], timeout_s: float) -> T:
        """What `call()` returns. Raises CallFailedError, or CallTimeoutError after `timeout_s`.

        Then the next call gets a new thread, and so do those that wait behind this one.
        """

        async def ended() -> tuple[T | None, BaseException | None]:
            with self._lock:
                self._waiting.pop(future, None)
            try:
                return await call(), None
            except BaseException as problem:  # a SystemExit would end the thread, and nobody would hear of it
                return None, problem

        with self._lock:
            loop = self._loop = self._loop or self._started()
            future = asyncio.run_coroutine_threadsafe(ended(), loop)
            self._waiting[future] = loop
        try:
            result, problem = future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            with self._lock:
                begun = self._waiting.pop(future, None) is None
            if not begun:  # the call before it hangs, and whoever waits for that one has not woken yet
                future.cancel()
                return self.run(call, timeout_s)
            self._leave(loop, future)
            raise CallTimeoutError from None
        except concurrent.futures.CancelledError:  # the thread was left before this call began
            return self.run(call, timeout_s)
        except BaseException:  # the caller is interrupted
            self._leave(loop, future)
            raise
        if problem is not None:
            raise CallFailedError(problem)
        return cast(T, result)

    def _leave(self, loop: asyncio.AbstractEventLoop, future: concurrent.futures.Future[Any]) -> None:
        """Leave a thread to itself; it ends when its call does."""
        future.cancel()
        with self._lock:
            if self._loop is loop:
                self._loop = None
            behind = [other for other, of in self._waiting.items() if of is loop]
            self._waiting = {other: of for other, of in self._waiting.items() if of is not loop}
        for other in behind:
            other.cancel()
        with contextlib.suppress(RuntimeError):  # it has ended just now
            loop.call_soon_threadsafe(loop.stop)

    def _started(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda loop, context: None)  # of a call that was given up: told already
        threads.start(self._name, functools.partial(_run_until_stopped, loop), foreign=True)
        return loop

    def end(self) -> None:
        """End the thread once its call has ended."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        loop.run_until_complete(_end_all())
    finally:
        loop.close()


async def _end_all() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
