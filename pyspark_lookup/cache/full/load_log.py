"""`LoadLog`: what the log, the counters and the host's record of reloads say of one table's loads."""

from __future__ import annotations

import contextlib
import dataclasses
import logging

from pyspark_lookup.base.errors import foreign_text
from pyspark_lookup.base.log_events import log_event
from pyspark_lookup.cache.full.snapshot import Snapshot
from pyspark_lookup.io.context import HostContext
from pyspark_lookup.io.disk import Disk
from pyspark_lookup.io.host_metrics import Reload, remember_reload

_log = logging.getLogger("pyspark_lookup.snapshot")


@dataclasses.dataclass(frozen=True)
class LoadLog:
    """What is said of the loads of the table at `url`, whose snapshots are under a key."""

    key: str
    url: str
    disk: Disk
    context: HostContext

    def fall_back(self, level: int, reason: str, instead: str = "reading the files") -> None:
        """Say why a query is answered otherwise."""
        log_event(_log, level, "fallback", table=self.url, reason=reason, instead=instead)

    def received(self) -> int:
        """Bytes from the store so far."""
        return self.context.metrics.snapshot()["ufsGetBytes"]

    def done(self, started_s: float, seconds: float, snapshot: Snapshot, received: int, failures: int) -> None:
        """A load that succeeded after so many that failed; `received`: as it was before."""
        self.context.metrics.inc("loadCount")
        self.context.metrics.time("loadTime", seconds)
        self.context.metrics.set_gauge("latestLoadTime", int(seconds * 1000))
        version, fetched = snapshot.version.digest, self.received() - received
        done = Reload(started_s, seconds, version, snapshot.rows, snapshot.bytes, fetched)
        self._remember(done)
        facts = {"version": done.version, "seconds": seconds, "rows": done.rows, "bytes": done.bytes}
        level = logging.WARNING if failures else logging.INFO  # where a failure was seen, its end is
        log_event(_log, level, "reload", table=self.url, **facts, fetched=fetched, failures_before=failures)

    def failed(self, started_s: float, seconds: float, problem: BaseException, kept: int, failures: int) -> None:
        """A load that failed after so many others; `kept`: how many versions there are still."""
        self.context.metrics.inc("numLoadFailures")
        level = logging.INFO if failures else logging.WARNING
        log_event(_log, level, "reload-failed", table=self.url, seconds=seconds, kept=kept, error=repr(problem))
        self._remember(Reload(started_s, seconds, error=foreign_text(str(problem))[:500] or type(problem).__name__))

    def refused(self, now_s: float, problem: BaseException, before: bool) -> None:
        """A load for which there is no room; said once (`before`: it was)."""
        self.context.metrics.inc("snapshotOverBudgetCount")
        if not before:
            self.fall_back(logging.WARNING, f"there is no room for a snapshot: {problem}")
            self._remember(Reload(now_s, 0.0, error=f"not built: {problem}"[:500]))

    def _remember(self, reload: Reload) -> None:
        with contextlib.suppress(OSError):
            remember_reload(self.disk, self.key, self.url, reload)
