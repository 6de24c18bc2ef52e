"""Runs code of providers with a time limit, on a separate thread. If a call takes too long, its thread is abandoned."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar, cast

from pyspark_lookup.core import threads

T = TypeVar("T")

_LOOK_S = 1.0  # seconds within which a thread notices that nobody wants its items any more


class CallTimeoutError(Exception):
    """A call did not end in time. Its thread has been abandoned."""


class CallFailedError(Exception):
    """A call raised the exception `problem`."""

    def __init__(self, problem: BaseException) -> None:
        super().__init__(problem)
        self.problem = problem


def iterate_in_thread(
    make: Callable[[], Iterable[T]], name: str, timeout_s: float, on_end: Callable[[], None] = lambda: None
) -> Iterator[T]:
    """The items of `make()`, one by one. A new thread makes them, at most two items ahead of the caller.

    `on_end` is called when the iterator of `make()` has ended, even if that is after a timeout. Raises CallFailedError if `make()` or its iterator
    raises, CallTimeoutError for an item that takes longer than `timeout_s`; the thread is then abandoned.
    """
    results: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(1)
    abandoned = threading.Event()

    def offer(item: T | None, problem: BaseException | None) -> None:
        while not abandoned.is_set():
            with contextlib.suppress(queue.Full):
                results.put((item, problem), timeout=_LOOK_S)
                return

    def run() -> None:
        try:
            try:
                for item in make():
                    offer(item, None)
                    if abandoned.is_set():
                        return
            finally:
                on_end()
            offer(None, StopIteration())
        except BaseException as problem:  # also SystemExit, which would end the thread without a report
            offer(None, problem)

    # The race: the process may begin to end at this moment. Either it finds the consumer and wakes it, or it began before the consumer was
    # registered, and `check` notices that in a thread of ours, for which nobody would wait.
    consumer = _Consumer(results, abandoned)
    try:
        threads.check()
        threads.start(name, run, foreign=True)
    except BaseException:
        on_end()
        raise
    try:
        while True:
            try:
                item, problem = results.get(timeout=timeout_s)
            except queue.Empty:
                raise CallTimeoutError from None
            if isinstance(problem, StopIteration):
                return
            if isinstance(problem, threads.ProcessEndsError):
                raise problem
            if problem is not None:
                raise CallFailedError(problem)
            yield cast(T, item)
    finally:
        consumer.leave()


class _Consumer:
    """The reader of the items that a thread makes. `leave`: the reader wants no more items. `end`: the process ends, so the reader must stop
    waiting."""

    def __init__(self, results: queue.Queue[Any], abandoned: threading.Event) -> None:
        self._results = results
        self._abandoned = abandoned
        threads.ends_with_process(self)

    def leave(self) -> None:
        self._abandoned.set()
        with contextlib.suppress(queue.Empty):  # wakes the thread that makes items, which may be waiting for room
            self._results.get_nowait()

    def end(self) -> None:
        self._abandoned.set()
        while True:  # this loop ends, because the other thread puts at most one more item
            with contextlib.suppress(queue.Full):
                self._results.put_nowait((None, threads.ProcessEndsError()))
                return
            with contextlib.suppress(queue.Empty):
                self._results.get_nowait()


class Calls:
    """Runs coroutines on one event loop, in one thread that starts with the first call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[concurrent.futures.Future[Any], asyncio.AbstractEventLoop] = {}  # calls that have not begun
        threads.ends_with_process(self)

    def run(
        self, call: Callable[[], Coroutine[Any, Any, T]], timeout_s: float, waited_s: Callable[[], float] = lambda: 0.0
    ) -> T:
        """The result of `call()`. Raises CallFailedError if it raises, CallTimeoutError after `timeout_s`.

        `waited_s`: returns how long calls have waited for their turn in all, the current wait included; such time does not count.

        After a timeout, the next call runs in a new thread. Calls that were waiting for the one that timed out run there, too.
        """

        async def run_call() -> tuple[T | None, BaseException | None]:
            with self._lock:
                self._waiting.pop(future, None)
            try:
                return await call(), None
            except BaseException as problem:  # also SystemExit, which would end the thread without a report
                return None, problem

        with self._lock:
            loop = self._loop = self._loop or self._start_loop()
            future = asyncio.run_coroutine_threadsafe(run_call(), loop)
            self._waiting[future] = loop
        try:
            result, problem = _result_of(future, timeout_s, waited_s)
        except concurrent.futures.TimeoutError:
            with self._lock:
                has_started = self._waiting.pop(future, None) is None
            if not has_started:  # an earlier call hangs, and that call's own timeout has not ended yet
                future.cancel()
                return self.run(call, timeout_s, waited_s)
            self._leave(loop, future)
            raise CallTimeoutError from None
        except concurrent.futures.CancelledError:  # the thread was abandoned before this call began
            return self.run(call, timeout_s, waited_s)
        except BaseException:  # the caller is interrupted
            self._leave(loop, future)
            raise
        if problem is not None:
            raise CallFailedError(problem)
        return cast(T, result)

    def _leave(self, loop: asyncio.AbstractEventLoop, future: concurrent.futures.Future[Any]) -> None:
        """Abandon a thread, which ends when its call ends."""
        future.cancel()
        with self._lock:
            if self._loop is loop:
                self._loop = None
            waiting_calls = [
                waiting_future for waiting_future, waiting_loop in self._waiting.items() if waiting_loop is loop
            ]
            self._waiting = {
                waiting_future: waiting_loop
                for waiting_future, waiting_loop in self._waiting.items()
                if waiting_loop is not loop
            }
        for waiting_future in waiting_calls:
            waiting_future.cancel()
        with contextlib.suppress(RuntimeError):  # the loop has ended just now
            loop.call_soon_threadsafe(loop.stop)

    def _start_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda loop, context: None)  # errors of abandoned calls are reported already
        threads.start(self._name, functools.partial(_run_until_stopped, loop), foreign=True)
        return loop

    def end(self) -> None:
        """End the thread as soon as its call has ended."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None


def _result_of(future: concurrent.futures.Future[T], timeout_s: float, waited_s: Callable[[], float]) -> T:
    """The result of a future. Raises TimeoutError after `timeout_s`, and the time by which `waited_s` grows meanwhile."""
    started_s, left_s = time.monotonic() - waited_s(), timeout_s
    while True:
        try:
            return future.result(left_s)
        except concurrent.futures.TimeoutError:
            left_s = started_s + timeout_s + waited_s() - time.monotonic()
            if left_s <= 0:
                raise


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        loop.run_until_complete(_end_all())
    finally:
        loop.close()


async def _end_all() -> None:
    pending_tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in pending_tasks:
        task.cancel()
    await asyncio.gather(*pending_tasks, return_exceptions=True)


async def call_and_await(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a function, asynchronous or not. The function is called when this coroutine is awaited."""
    loop = asyncio.get_running_loop()
    if not inspect.iscoroutinefunction(function):
        asyncio._set_running_loop(None)  # the function may run an event loop of its own
    try:
        result = function(*args)
    finally:
        asyncio._set_running_loop(loop)
    return await result if inspect.isawaitable(result) else result
