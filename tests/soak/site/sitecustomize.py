"""Faketime takes a sleep until a time of the monotonic clock for one of the wall clock: beside it, Python sleeps in another way."""

import threading
import time


def sleep(seconds: float) -> None:
    if seconds < 0:
        raise ValueError("sleep length must be non-negative")
    threading.Event().wait(seconds)


time.sleep = sleep
