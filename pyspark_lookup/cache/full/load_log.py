"""`LoadLog`: writes one table's loads to the log, the counters and the host's record of reloads."""

from __future__ import annotations

import contextlib
import dataclasses
import logging

from pyspark_lookup.cache.full.snapshot import Snapshot
from pyspark_lookup.core.log_events import log_event
from pyspark_lookup.errors import foreign_text
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import Disk
from pyspark_lookup.storage.host_metrics import Reload, remember_reload

_log = logging.getLogger("pyspark_lookup.snapshot")


@dataclasses.dataclass(frozen=True)
class LoadLog:
    """Logs, counts and records the loads of the table at `url`, whose snapshots are stored under `key`."""

    key: str
    url: str
    disk: Disk
    context: HostContext

    def fall_back(self, level: int, reason: str, instead: str = "reading the files") -> None:
        """Log why a query is answered in another way: `instead` says from what."""
        log_event(_log, level, "fallback", table=self.url, reason=reason, instead=instead)

    def received(self) -> int:
        """Bytes received from the store so far."""
        return self.context.metrics.snapshot()["ufsGetBytes"]

    def succeeded(self, started_s: float, seconds: float, snapshot: Snapshot, received: int, failures: int) -> None:
        """Record a load that succeeded after `failures` failed ones. `received`: `received()` before the load."""
        self.context.metrics.inc("loadCount")
        self.context.metrics.time("loadTime", seconds)
        self.context.metrics.set_gauge("latestLoadTime", int(seconds * 1000))
        version, fetched = snapshot.version.digest, self.received() - received
        reload = Reload(started_s, seconds, version, snapshot.rows, snapshot.bytes, fetched)
        self._remember(reload)
        facts = {"version": reload.version, "seconds": seconds, "rows": reload.rows, "bytes": reload.bytes}
        level = logging.WARNING if failures else logging.INFO  # failures were logged as warnings, so their end is, too
        log_event(_log, level, "reload", table=self.url, **facts, fetched=fetched, failures_before=failures)

    def failed(
        self, started_s: float, seconds: float, problem: BaseException, version_count: int, failures: int
    ) -> None:
        """Record a load that failed after `failures` others. `version_count`: how many versions can still be served."""
        self.context.metrics.inc("numLoadFailures")
        level = logging.INFO if failures else logging.WARNING
        log_event(
            _log, level, "reload-failed", table=self.url, seconds=seconds, kept=version_count, error=repr(problem)
        )
        self._remember(Reload(started_s, seconds, error=foreign_text(str(problem))[:500] or type(problem).__name__))

    def refused(self, now_s: float, problem: BaseException, before: bool) -> None:
        """Record a load for which there is no room. Logs it unless the load `before` was refused as well."""
        self.context.metrics.inc("snapshotOverBudgetCount")
        if not before:
            self.fall_back(logging.WARNING, f"there is no room for a snapshot: {problem}")
            self._remember(Reload(now_s, 0.0, error=f"not built: {problem}"[:500]))

    def _remember(self, reload: Reload) -> None:
        with contextlib.suppress(OSError):
            remember_reload(self.disk, self.key, self.url, reload)
