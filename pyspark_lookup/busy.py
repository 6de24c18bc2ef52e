"""Jobs that write a table's files: what a host goes on with meanwhile, and which of them are dead."""

from __future__ import annotations

import logging

from pyspark_lookup.clock import HostClock
from pyspark_lookup.conf import redact
from pyspark_lookup.errors import TableBusyError, UfsNotFoundError
from pyspark_lookup.hostversions import HostVersions
from pyspark_lookup.logs import log_event
from pyspark_lookup.metrics import CacheMetricGroup
from pyspark_lookup.table import Table, TableVersion, job_directories
from pyspark_lookup.ufs import Listing, Ufs

__all__ = ["WritingJobs"]

_log = logging.getLogger("pyspark_lookup.metadata")


class WritingJobs:
    """Jobs of others at one table reference, as this host sees them. What it says of one is logged once in a process."""

    def __init__(self, ufs: Ufs, host: HostVersions, metrics: CacheMetricGroup, clock: HostClock) -> None:
        self._ufs = ufs
        self._host = host
        self._metrics = metrics
        self._clock = clock
        self._told: set[str] = set()
        self._lacking: str | None = None

    def kept(self, table: Table, problem: Exception, gone: str | None) -> TableVersion | None:
        """While a job writes, the last version that this host knows: what the job has written is nobody's yet.

        None if there is no job, or no such version. Its files may be gone; what reads them finds that out.
        """
        if not isinstance(problem, TableBusyError) or not table.busy.keep:
            return None
        record = self._host.last(table)
        kept = self._host.files(table, record["digest"]) if record is not None else None
        if kept is None or kept.digest == gone:
            return None
        self._lacking = kept.digest if set(kept.files).difference(problem.files) else None
        self._metrics.inc("busyServedCount")
        self._tell_once(table, str(problem), f"going on with version {kept.digest}")
        return kept

    def lacks_files(self, version: TableVersion) -> bool:
        """Whether a version that was kept while a job writes has files that the job has removed."""
        return version.digest == self._lacking

    def was_here_lately(self, table: Table) -> bool:
        """Whether this host has seen the table within `lookup.busy-timeout`."""
        record = self._host.last(table)
        return (
            record is not None
            and record["boot"] == self._clock.boot
            and self._clock.steady_s() - record["started_s"] <= table.busy.timeout_s
        )

    def dead(self, table: Table, listing: Listing) -> list[str]:
        """Directories of jobs in which nothing has changed for `lookup.busy-timeout`, by the store's clock."""
        dead = []
        for directory in job_directories(table.url, table.kind, listing):
            try:
                changed_s, now_s = self._ufs.last_change_s(f"{listing.url}/{directory}")
            except UfsNotFoundError:
                continue  # its job has just ended: the listing is older than that
            if changed_s is not None and now_s - changed_s >= table.busy.timeout_s:
                dead.append(directory)
                reason = f"{listing.url}/{directory} is of a job that died {now_s - changed_s:.0f} s ago or more"
                self._tell_once(table, reason, "reading the files as if it were not there; remove it")
        return dead

    def _tell_once(self, table: Table, reason: str, instead: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            shown = redact("path", table.url)
            log_event(_log, logging.WARNING, "busy", table=shown, reason=redact("path", reason), instead=instead)
