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
    """How a table in another system is opened. `key`: identifies the table among those that a process has open. `complete`: returns the
    options, completed by the system; raises OptionError if they contradict what the system says.

    `store`, `source` and `scan` make the table's store, its source of versions and its scan. `cache`, `trigger`: if given, they replace the
    partial cache and the reload strategy that the options describe.
    """

    key: str
    complete: Callable[[LookupOptions], LookupOptions]
    store: Callable[[Callable[[], float]], Store]
    source: Callable[[SourceParts], VersionSource]
    scan: Callable[[CacheMetricGroup], TableScan]
    cache: LookupCache | None = None
    trigger: CacheReloadTrigger | None = None


class Opener(Protocol):
    """Opens the tables of another system whose options this process was given."""

    def __init__(self, clock: HostClock) -> None: ...

    def open(self, options: LookupOptions) -> Opening | None:
        """How to open the table of these options; None if they do not name such a system. Raises OptionError."""
