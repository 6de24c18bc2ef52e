"""Calls of a user's code in threads, while the process ends."""

import itertools
import threading
from collections.abc import Iterator

import pytest

from pyspark_lookup.core import threads
from pyspark_lookup.sources.providers.call_runner import iterate_in_thread


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_scan_that_begins_as_the_process_ends(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """A thread of ours does not wait for a user's scan once the process has begun to end, whichever of the two came first."""
    monkeypatch.setattr(threads, "_threads", threads._Threads())
    begun, released, outcomes = threading.Event(), threading.Event(), list[str]()

    def scan() -> Iterator[int]:
        begun.set()
        released.wait(60)
        yield from itertools.count()

    def read() -> None:
        if when == "before":
            threads.end_all()
        try:
            next(iterate_in_thread(scan, "a-scan", 60))
        except threads.ProcessEndsError:
            outcomes.append("ended")

    monkeypatch.setattr(threads, "_FOREIGN_END_S", 0.0)
    reader = threads.start("a-reader", read)
    if when == "after":
        assert begun.wait(60)
        threads.end_all()
    reader.join(60)
    released.set()
    assert (outcomes, begun.is_set()) == (["ended"], when == "after")
