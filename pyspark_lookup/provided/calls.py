"""Calls of foreign code with an end: on a thread of its own, given up when it takes too long."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["CallTimeoutError", "Calls"]

T = TypeVar("T")


class CallTimeoutError(Exception):
    """A call did not end in time; its thread is left to itself."""


class Calls:
    """Runs coroutines on one event loop in one thread, made when first needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, call: Callable[[], Coroutine[Any, Any, T]], timeout_s: float) -> T:
        """What `call()` returns or raises. CallTimeoutError after `timeout_s`; the next call gets a new thread."""
        with self._lock:
            loop = self._loop = self._loop or self._started()
        future = asyncio.run_coroutine_threadsafe(call(), loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            if future.done():  # raised by the call itself
                raise
            future.cancel()
            with self._lock:
                if self._loop is loop:
                    self._loop = None
            loop.call_soon_threadsafe(loop.stop)  # whenever the call ends
            raise CallTimeoutError from None

    def _started(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda loop, context: None)  # of a call that was given up: told already
        # A daemon: a call that hangs must not keep the process from ending.
        threading.Thread(target=loop.run_forever, name=self._name, daemon=True).start()
        return loop

    def close(self) -> None:
        """End the thread once its call has ended."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None
