"""`Opening`: how to open a table reference that names another system instead of files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from pyspark_lookup.cache.memory import LookupCache
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.options.reload_trigger import CacheReloadTrigger
from pyspark_lookup.scan.table_scan import TableScan
from pyspark_lookup.storage.stores import Store
from pyspark_lookup.versions.version_source import SourceParts, VersionSource


@dataclasses.dataclass(frozen=True)
class Opening:
    """How a table in another system is opened. `key`: names it among the references of a process. `complete`: returns the options completed by
    the system, or raises OptionError if they contradict it.

    `source` makes its source of versions, `scan` its scan. `cache`, `trigger`: replace the partial cache and the reload strategy that the
    options describe, if they are given.
    """

    key: str
    complete: Callable[[LookupOptions], LookupOptions]
    store: Callable[[Callable[[], float]], Store]
    source: Callable[[SourceParts], VersionSource]
    scan: Callable[[CacheMetricGroup], TableScan]
    cache: LookupCache | None = None
    trigger: CacheReloadTrigger | None = None


class Opener(Protocol):
    """Opens the references of one process that name such a system."""

    def __init__(self, clock: HostClock) -> None: ...

    def open(self, options: LookupOptions) -> Opening | None:
        """How to open the table of these options; None if they do not name such a system. Raises OptionError."""
