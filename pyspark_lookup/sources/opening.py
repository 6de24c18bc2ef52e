"""`Opening`: how a process opens a table of another system, such as a provider's, instead of a table of files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from pyspark_lookup.cache.memory import LookupCache
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.options.reload_trigger import CacheReloadTrigger
from pyspark_lookup.scan.table_scan import TableScan
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.stores import Store
from pyspark_lookup.versions.version_source import SourceParts, VersionSource


@dataclasses.dataclass(frozen=True)
class Opening:
    """The parts that make up an open table of another system.

    `key`: identifies the table among those that a process has open. `complete`: returns the options with the values that the system
    determines; raises OptionError if the options contradict the system. `store`, `source` and `scan`: functions that make the table's store,
    its source of versions and its scan. `cache`, `trigger`: if not None, they replace the partial cache and the reload strategy that the
    options describe.
    """

    key: str
    complete: Callable[[LookupOptions], LookupOptions]
    store: Callable[[Callable[[], float]], Store]
    source: Callable[[SourceParts], VersionSource]
    scan: Callable[[HostContext], TableScan]
    cache: LookupCache | None = None
    trigger: CacheReloadTrigger | None = None


class Opener(Protocol):
    """Opens tables of one other system, as options describe them."""

    def __init__(self, clock: HostClock) -> None: ...

    def open(self, options: LookupOptions) -> Opening | None:
        """The parts of the table that the options name; None if they do not name a table of this system. Raises OptionError for options that
        are invalid."""
