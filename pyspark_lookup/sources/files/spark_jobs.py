"""What Spark's jobs leave in a table of files: directories of jobs that write or have died, and the log of a streaming sink."""

from __future__ import annotations

import json
import logging

from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.decoding import UNREADABLE, as_text
from pyspark_lookup.core.log_events import log_event
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.errors import DamagedFileError, TableBusyError, UfsError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.sources.files.listing import job_directories
from pyspark_lookup.storage.block_cache import BlockCache
from pyspark_lookup.storage.stores import FileVersion, Listing
from pyspark_lookup.storage.ufs import Ufs
from pyspark_lookup.versions.host_versions import HostVersions
from pyspark_lookup.versions.model import Table, TableVersion


def select_committed(blocks: BlockCache, listing: Listing, files: tuple[FileVersion, ...]) -> tuple[FileVersion, ...]:
    """The files that a streaming file sink's log (`_spark_metadata`) has committed.

    Log files are `<batch>` or `<batch>.compact`: a version line, then one JSON object per file. A compact file also lists all files of the
    batches before it. Raises DamagedFileError for a malformed one.
    """
    prefix = f"{listing.url}/_spark_metadata/"
    logs: dict[int, tuple[bool, FileVersion]] = {}
    for file in listing.files:
        name = file.url.removeprefix(prefix)
        batch = name.removesuffix(".compact")
        if file.url.startswith(prefix) and batch.isdecimal() and file.size > 0:
            logs[int(batch)] = max(
                (name.endswith(".compact"), file), logs.get(int(batch), (False, file)), key=lambda e: e[0]
            )
    start = max((batch for batch, (compact, _) in logs.items() if compact), default=0)
    log_files = [logs[batch][1] for batch in sorted(logs) if batch >= start]
    locations = [blocks.get_blocks_and_locations(file.url, file) for file in log_files]
    texts = blocks.read([(location, [(0, location.file.size)]) for location in locations])
    committed_names: set[str] = set()
    for file, (data,) in zip(log_files, texts, strict=True):
        try:
            for line in bytes(data).decode().splitlines()[1:]:
                entry = json.loads(line)
                name = as_text(entry["path"]).rsplit("/", 1)[-1]
                (committed_names.discard if entry.get("action") == "delete" else committed_names.add)(name)
        except UNREADABLE as problem:
            raise DamagedFileError(
                f"{redact('path', file.url)} is not a log of a streaming sink: {problem!r}"
            ) from None
    return tuple(file for file in files if file.url.rsplit("/", 1)[-1] in committed_names)


# --- jobs that write ------------------------------------------------------------------------------

_log = logging.getLogger("pyspark_lookup.metadata")


class WritingJobs:
    """The jobs that write a table, as this host sees them. Each message about a job is logged once in a process."""

    def __init__(self, ufs: Ufs, host: HostVersions, metrics: CacheMetricGroup, clock: HostClock) -> None:
        self._ufs = ufs
        self._host = host
        self._metrics = metrics
        self._clock = clock
        self._logged_reasons: set[str] = set()
        self._lacking_digest: str | None = None
        self._seen_s: dict[str, float] = {}  # for each table by its id, when a version was last kept
        self._alive_until_s: dict[
            str, float
        ] = {}  # for each directory by its URL, the time before which its job cannot count as dead

    def keep(self, table: Table, problem: Exception, gone_digest: str | None) -> TableVersion | None:
        """The last version that this host knows, while a job writes: the job's files belong to no version yet.

        None if there is no job, or no such version. Its files may be gone; readers find that out.
        """
        if not isinstance(problem, TableBusyError) or not table.busy.keep:
            return None
        record = self._host.last(table)
        last_version = self._host.files(table, record["digest"]) if record is not None else None
        if last_version is None or last_version.digest == gone_digest:
            return None
        self._seen_s[table.id] = self._clock.steady_s()
        self._host.forget_missing(table)
        lacks = problem.listing is not None and set(last_version.files).difference(problem.listing.files)
        self._lacking_digest = last_version.digest if lacks else None
        self._metrics.inc("busyServedCount")
        self._tell_once(table, str(problem), f"using version {last_version.digest}")
        return last_version

    def lacks_files(self, version: TableVersion) -> bool:
        """Whether a version that was kept while a job writes has files that the job has removed."""
        return version.digest == self._lacking_digest

    def was_here_lately(self, table: Table) -> bool:
        """Whether this host has seen the table within `lookup.busy-timeout`."""
        seen_s = self._last_seen_s(table)
        return seen_s is not None and self._clock.steady_s() - seen_s <= table.busy.timeout_s

    def missing_since_s(self, table: Table) -> float:
        """When this host's first query found the table missing, on the steady clock: now, if this is the first one.

        So all queries share one wait for a job: a retried task and the next query only wait for the rest of it.
        """
        return self._host.missing_since_s(table, self._last_seen_s(table) or 0.0)

    def _last_seen_s(self, table: Table) -> float | None:
        """When this host last saw the table; None if it has not since it was booted."""
        record = self._host.last(table)
        if record is None or record["boot"] != self._clock.boot:
            return None
        return max(float(record["started_s"]), self._host.seen_s(table), self._seen_s.get(table.id, 0.0))

    def find_dead(self, table: Table, listing: Listing) -> list[str]:
        """Directories of jobs in which nothing has changed for `lookup.busy-timeout`, by the store's clock."""
        dead = []
        for directory in job_directories(table.url, table.kind, listing):
            url, steady_s = f"{listing.url}/{directory}", self._clock.steady_s()
            if steady_s < self._alive_until_s.get(url, 0.0):
                continue
            try:
                changed_s, now_s = self._ufs.last_change_s(url)
            except UfsError:
                continue  # its job has just ended, or the directory cannot be read: it is not known to be dead
            if changed_s is not None and not url.startswith("file://"):
                # An object store's directories have no time. If a commit copies files out of one, that shows in the files.
                changed_s = max([changed_s, *(file.modified_at_s or 0.0 for file in listing.files)])
            if changed_s is None or now_s - changed_s < table.busy.timeout_s:
                if changed_s is not None:
                    self._alive_until_s[url] = steady_s + table.busy.timeout_s - (now_s - changed_s)
                continue
            dead.append(directory)
            reason = f"{url} belongs to a job that died {now_s - changed_s:.0f} s ago or earlier"
            self._tell_once(table, reason, "ignoring this directory; remove it")
        return dead

    def _tell_once(self, table: Table, reason: str, instead: str) -> None:
        if reason not in self._logged_reasons:
            self._logged_reasons.add(reason)
            redacted_path = redact("path", table.url)
            log_event(
                _log, logging.WARNING, "busy", table=redacted_path, reason=redact("path", reason), instead=instead
            )
