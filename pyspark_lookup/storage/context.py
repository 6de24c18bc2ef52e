"""`HostContext`: the objects that all parts of a table reference share in this process."""

from __future__ import annotations

import dataclasses
import random
import socket
from collections.abc import Callable

from pyspark_lookup.core import threads
from pyspark_lookup.core.clock import HostClock, Timer
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.storage.disk import Disk

Start = Callable[[str, Callable[[], None]], None]


def in_thread(name: str, run: Callable[[], None]) -> None:
    """Run a function in a thread that ends with the process. Raises RuntimeError if no thread can be started."""
    threads.start(name, run)


@dataclasses.dataclass(frozen=True)
class HostContext:
    """The cache directory (None: there is none), the counters, the clock and the random numbers that a table reference uses.

    `start`: runs a function in a thread with the given name. `timer`: runs the reload schedules of several tables (None: each table has its
    own timer). `name`: the host's name; the jitter of its schedules is computed from it.
    """

    disk: Disk | None
    metrics: CacheMetricGroup
    clock: HostClock
    rng: random.Random
    start: Start = in_thread
    timer: Timer | None = None
    name: str = dataclasses.field(default_factory=socket.gethostname)
