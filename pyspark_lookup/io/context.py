"""What all parts of a table reference share in this process."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable

from pyspark_lookup.base.clock import HostClock
from pyspark_lookup.base.metrics import CacheMetricGroup
from pyspark_lookup.io.disk import Disk

Start = Callable[[str, Callable[[], None]], None]


def in_thread(name: str, run: Callable[[], None]) -> None:
    """Run a function in a daemon thread: a worker that ends does not wait for a reload."""
    threading.Thread(target=run, name=name, daemon=True).start()


@dataclasses.dataclass(frozen=True)
class HostContext:
    """The cache directory (None: there is none), the counters, the clock and the randomness of one table reference.

    `start`: runs a function beside its caller, under a name.
    """

    disk: Disk | None
    metrics: CacheMetricGroup
    clock: HostClock
    rng: random.Random
    start: Start = in_thread
