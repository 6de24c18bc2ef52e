"""Which version of a table is current, and who says so (Alluxio's `get_meta` switch).

UFS: the store is asked once per query. CACHE: this host's last known version answers while it is
young enough. Either way the first resolver of an execution records what it found, by exclusive
create, and every later one of that execution on this host takes it: one version per execution.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
from collections.abc import Callable

from pyspark_lookup.base.clock import HostClock
from pyspark_lookup.base.errors import (
    NotATableError,
    OptionError,
    TableBusyError,
    TableEmptyError,
    UfsError,
    UfsNotFoundError,
    VersionGoneError,
)
from pyspark_lookup.base.log_events import log_event
from pyspark_lookup.base.metrics import CacheMetricGroup
from pyspark_lookup.io.block_cache import BlockCache
from pyspark_lookup.io.disk import Disk
from pyspark_lookup.io.stores import LOCAL_GRANULE_S, SETTLED_AFTER_S
from pyspark_lookup.io.ufs import FileVersion, Listing, Ufs
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import CacheMode, CsvOptions, FileFormatName, MetadataSource, OnBusy
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.table.executions import Execution, Executions, Resolution
from pyspark_lookup.table.file_names import format_of
from pyspark_lookup.table.glob import is_glob
from pyspark_lookup.table.host_versions import HostVersions
from pyspark_lookup.table.listing import data_files, job_directories, refuse_inside
from pyspark_lookup.table.log import NotificationLog, TableState
from pyspark_lookup.table.model import Busy, Kind, Table, TableVersion, kind_of, managed_version
from pyspark_lookup.table.sink_log import committed_by_sink
from pyspark_lookup.table.spark_jobs import WritingJobs

__all__ = ["Metadata"]

_log = logging.getLogger("pyspark_lookup.metadata")
_SETTLE_POLLS = 20
_KINDS = (Kind.DIRECTORY, Kind.FILE, Kind.MANAGED)
_CONFIRM_S = 1.0
_BUSY_POLL_S = 0.5
_SETTLE_WAITS_S = (2 * LOCAL_GRANULE_S, SETTLED_AFTER_S, SETTLED_AFTER_S)  # the clock of a disk is finer


class Metadata:
    """Resolves versions of one table reference on this host. `disk` None: nothing is remembered."""

    def __init__(
        self,
        ufs: Ufs,
        blocks: BlockCache,
        disk: Disk | None,
        metrics: CacheMetricGroup,
        clock: HostClock,
        rng: random.Random,
    ) -> None:
        self._ufs = ufs
        self._blocks = blocks
        self._disk = disk
        self._metrics = metrics
        self._served: dict[str, str] = {}
        self._clock = clock
        self._rng = rng
        self._logs: dict[str, NotificationLog] = {}
        self.host = HostVersions(ufs, disk, metrics, clock, self.log)
        self._jobs = WritingJobs(ufs, self.host, metrics, clock)
        self.lacks_files = self._jobs.lacks_files
        if disk is not None:
            self._executions = Executions(self.host, disk, metrics, clock)

    # --- planning: what is at this path? ----------------------------------------------------------

    def discover(self, options: LookupOptions, patient: bool = True) -> tuple[Table, TableVersion]:
        """The table a path names and its current version: one metadata call (see `Ufs.get_status`).

        In CACHE mode a table this host knows and may still answer for costs none. A path that ends with a slash names a
        directory, also where an object has its name.
        """
        url = self._ufs.url_of(options.path)
        status: FileVersion | Listing | None = None
        kind = Kind.GLOB if is_glob(url) else self._known_kind(url, options)
        started_s = self._clock.steady_s()
        if kind is not None and kind is not Kind.GLOB:
            probe = self._table(options, kind, None)  # whose options may not fit what is there no more
            # It may be of another kind by now, or nothing: only the store can say that options do not fit.
            with contextlib.suppress(UfsNotFoundError, OptionError):
                version = self._cached(probe, options) or self._ask(probe, started_s)
                return self.table_of(options, kind, version), version
            kind = None
        if kind is None:
            try:
                status = self._ufs.list_status(url) if _names_directory(options) else self._ufs.get_status(url)
                kind = kind_of(status)
            except UfsNotFoundError:
                kind = self._vanished_kind(url, options)
                if kind is None:
                    raise
        probe = self.table_of(options, kind)
        if probe.managed:
            return probe, self._cached(probe, options) or self._ask(probe, started_s)
        cached = self._cached(probe, options) if status is None else None
        version = cached or self._ask(probe, started_s, status, patient=patient)
        return self.table_of(options, kind, version), version

    def table_of(self, options: LookupOptions, kind: Kind, version: TableVersion | None = None) -> Table:
        """The table at `options.path`, which is known to be of this kind; with its format, given a version. No store call."""
        if kind is Kind.MANAGED:
            _check_managed(options)
        elif options.pinned is not None:
            key = "lookup.version" if options.version is not None else "lookup.valid-write-ids"
            raise OptionError(
                f"option {key} = {str(options.pinned)!r} is for managed tables: {redact('path', options.path)} has no log"
            )
        return self._table(options, kind, version)

    def _table(self, options: LookupOptions, kind: Kind, version: TableVersion | None) -> Table:
        form = FileFormatName.PARQUET if kind is Kind.MANAGED else options.format
        if form is None and version is not None and options.provider is None:
            form = format_of([file.url for file in version.files])
        wrong = sorted(key for key in options.explicit if key.startswith("lookup.csv."))
        if wrong and form not in (None, FileFormatName.CSV) and kind is not Kind.MANAGED:
            raise OptionError(
                f"option {wrong[0]} is for CSV files: {redact('path', options.path)} has {form.value}: remove it"
            )
        url = self._ufs.url_of(options.path)
        pinned = options.pinned
        busy = Busy(options.on_busy is OnBusy.KEEP, options.busy_wait_s, options.busy_timeout_s)
        csv, declared = (CsvOptions(), None) if kind is Kind.MANAGED else (options.csv, options.schema)
        parts = (url, self._ufs.scope, kind, form, options.success_file, options.settle_s, pinned)
        return Table(*parts, busy=busy, csv=csv, declared=declared)

    def _vanished_kind(self, url: str, options: LookupOptions) -> Kind | None:
        """DIRECTORY, if that is what was here lately: an overwrite may have removed it, and not begun to write."""
        probe = self.table_of(options, Kind.DIRECTORY) if not is_glob(url) and options.pinned is None else None
        return Kind.DIRECTORY if probe is not None and self._jobs.was_here_lately(probe) else None

    def _known_kind(self, url: str, options: LookupOptions) -> Kind | None:
        """What the path was when this host last learned of it, for CACHE mode to answer or to keep; a log is asked itself."""
        learned: dict[tuple[bool, float], Kind] = {}
        kinds = (Kind.DIRECTORY, Kind.MANAGED) if _names_directory(options) else _KINDS
        for kind in kinds:
            probe = self._table(options if kind is Kind.MANAGED else _unpinned(options), kind, None)
            record = self.host.last(probe)
            if record is not None:
                # The wall clock may have been set back in between.
                here = record["boot"] == self._clock.boot
                learned[here, record["started_s" if here else "wall_s"]] = kind
        if {Kind.DIRECTORY, Kind.FILE} <= set(learned.values()) and not url.startswith("file://"):
            return None  # an object store can have both; one may be what the other spelling of the path names, with a slash
        last = learned[max(learned)] if learned else None
        return last if options.metadata_source is MetadataSource.CACHE or last is Kind.MANAGED else None

    # --- reading: which version does this execution see? ------------------------------------------

    def resolve(
        self,
        table: Table,
        options: LookupOptions,
        execution: Execution | None,
        current: Callable[[], TableVersion] | None = None,
    ) -> Resolution:
        """The version of `table` that `execution` reads (None: an execution of its own).

        `current` says which one is, where it is not this class that knows. At most one metadata call, none if the execution has its record or CACHE mode can answer.
        Raises NotATableError subclasses or UfsError if there is no version to read.
        """
        resolution = self._resolved(table, options, execution, current)
        self.count_served(table, resolution.version)
        return resolution

    def count_served(self, table: Table, version: TableVersion) -> None:
        """Count that rows of a version are about to be read."""
        if self._served.get(table.id) != version.digest:
            self._served[table.id] = version.digest
            self._metrics.inc("versionServedCount")

    def _resolved(
        self,
        table: Table,
        options: LookupOptions,
        execution: Execution | None,
        current: Callable[[], TableVersion] | None,
    ) -> Resolution:
        if execution is None or self._disk is None:
            return Resolution(self._current(table, options, current), True)
        return self._executions.resolve(table, execution, lambda: self._current(table, options, current))

    def resolve_again(
        self, table: Table, options: LookupOptions, execution: Execution | None, gone: str, settled: bool = False
    ) -> TableVersion:
        """The version that replaces the one of digest `gone`, asked from the store; the execution's record follows it.

        `settled`: wait until its files can be told from their next state, unless they keep changing.
        """
        self._metrics.inc("versionGoneCount")
        log_event(
            _log,
            logging.WARNING,
            "version-gone",
            table=redact("path", table.url),
            version=gone,
            instead="resolving again",
        )
        if execution is not None and self._disk is not None:
            return self._executions.replace(table, execution, gone, lambda: self._replacement(table, gone, settled))
        return self._replacement(table, gone, settled)

    def _replacement(self, table: Table, gone: str, settled: bool) -> TableVersion:
        version = self._ask(table, self._clock.steady_s(), gone=gone)
        return self.settled(table, version) if settled else version

    def ask(self, table: Table, patient: bool = True) -> TableVersion:
        """The store's current version: one metadata call, remembered on this host. `patient`: see `_ask`."""
        return self._ask(table, self._clock.steady_s(), patient=patient)

    def version_of(self, table: Table, digest: str) -> TableVersion | None:
        """The version of that digest, if this host has its files on record. No store call."""
        return self.host.files(table, digest)

    def find(self, table: Table, digest: str, newest: float) -> TableVersion | None:
        """The version of that digest, from one listing if this host does not know it; None if the store has moved on.

        `newest`: its `TableVersion.newest`. A table to which only files were added since is found by that.
        """
        known = self.host.files(table, digest)
        if known is not None:
            return known
        with self.host.locked("find", digest):
            known = self.host.files(table, digest)  # whoever held the lock before us may have found it
            if known is not None:
                return known
            try:
                version = self._ask(table, self._clock.steady_s(), patient=False)
            except TableBusyError as problem:  # what was announced may be told from what a job adds
                if problem.listing is None:
                    raise
                version = self._version(table, problem.listing, past_jobs=True)
            states = [version]
            log = self.log(table.url).known() if table.managed else None
            if log is not None and table.pinned is None:
                with contextlib.suppress(VersionGoneError, ValueError, OverflowError):  # nor does anybody know infinity
                    states.append(managed_version(table, log, int(newest)))
            if not table.managed:
                older = tuple(file for file in version.files if (file.modified_at_s or 0.0) <= newest)
                states.append(TableVersion(table.id, older))
            found = next((state for state in states if state.digest == digest), None)
            if found is not None:
                version = found
                self.host.remember(table, version)
            return found

    def settled(self, table: Table, version: TableVersion) -> TableVersion:
        """The current version, with its files old enough to be told from their next state, unless they keep changing.

        `version`: the current one as it was just resolved.
        """
        for wait_s in _SETTLE_WAITS_S:
            if all(file.settled for file in version.files):
                break
            self._clock.sleep(wait_s)
            version = self.ask(table)
        return version

    def _current(
        self, table: Table, options: LookupOptions, current: Callable[[], TableVersion] | None
    ) -> TableVersion:
        if current is not None:
            return current()
        if options.metadata_source is MetadataSource.UFS:
            return self._ask(table, self._clock.steady_s())
        return self._cached(table, options) or self._ask(table, self._clock.steady_s())

    def count_asked(self, version: TableVersion) -> None:
        """Count that a query asks for a version's rows, which without a cache would be read anew: once for each query."""
        self._metrics.inc("resolvedBytes", version.bytes)

    # --- CACHE mode -------------------------------------------------------------------------------

    def _cached(self, table: Table, options: LookupOptions) -> TableVersion | None:
        """The version CACHE mode answers with, refreshed if it is too old; None in UFS mode or without a disk."""
        if options.metadata_source is MetadataSource.UFS or self._disk is None:
            return None
        if options.sync_interval_s == 0:
            return self._refreshed(table)
        fresh = self._fresh(table, options)
        if fresh is None:
            with self.host.locked("refresh", table.id):
                fresh = self._fresh(table, options)  # whoever held the lock before us may have learned it
                if fresh is None:
                    return self._refreshed(table)
        self._metrics.inc("metadataCacheCount")
        return fresh

    def _fresh(self, table: Table, options: LookupOptions) -> TableVersion | None:
        """The last known version if it is within the sync interval. Its age counts from when it was learned."""
        record = self.host.last(table)
        # With a full cache its trigger asks the store; in between, what it learned last is known here.
        interval_s = -1.0 if options.cache is CacheMode.FULL else options.sync_interval_s
        if record is None or interval_s is None or interval_s == 0:
            return None
        age_s = self._clock.steady_s() - record["started_s"]
        if not self.host.reaches(record.get("log"), self.host.floors(table.url, options)):
            return None
        # Another boot's clock says nothing about age.
        if interval_s > 0 and (record["boot"] != self._clock.boot or age_s > interval_s):
            return None
        if options.cache is not CacheMode.FULL:  # which has its own
            self._metrics.set_gauge("versionAsOf", int(record["wall_s"] * 1000))
        return self.host.files(table, record["digest"])

    def _refreshed(self, table: Table) -> TableVersion:
        record = self.host.last(table)
        kept = self.host.files(table, record["digest"]) if record else None
        try:
            return self._ask(table, self._clock.steady_s(), patient=kept is None)
        except (NotATableError, UfsNotFoundError) as problem:
            if kept is None or (isinstance(problem, UfsNotFoundError) and self._is_another_kind(table)):
                raise
            self._metrics.inc("keptVersionCount")
            self._metrics.inc("staleServedCount")
            reason, instead = str(problem), f"keeping version {kept.digest}"
            log_event(
                _log, logging.WARNING, "fallback", table=redact("path", table.url), reason=reason, instead=instead
            )
            return kept

    def forget_kind(self, table: Table) -> bool:
        """Forget that the path is such a table, if something else is there by now; whether there is."""
        try:
            if not self._is_another_kind(table):
                return False
        except UfsError:
            return False
        self.host.forget(table)
        return True

    def _is_another_kind(self, table: Table) -> bool:
        """Whether something is there where a table is not found any more, as it was known: a file, or a directory."""
        with contextlib.suppress(UfsNotFoundError):
            return table.kind is not Kind.GLOB and kind_of(self._ufs.get_status(table.url)) is not table.kind
        return False

    # --- the store --------------------------------------------------------------------------------

    def _ask(
        self,
        table: Table,
        started_s: float,
        status: FileVersion | Listing | None = None,
        gone: str | None = None,
        patient: bool = True,
    ) -> TableVersion:
        """The store's current version, once it is quiet: one call (more only while it settles or a job writes, and of a log).

        `status`: what the store has just said. `gone`: the digest of a version that cannot be read any more. `patient`: wait for
        a job, up to `lookup.busy-wait`.
        """
        if table.managed:
            version = self._learned(table, self._at_log(table), started_s)
            return version or self._learned_again(table, self._at_log)
        until_s: float | None = None
        while True:
            try:
                version = self._learned(table, self._listed(table, started_s, status), started_s)
                return version or self._learned_again(table, self._listed_now)
            except (TableBusyError, TableEmptyError, UfsNotFoundError) as problem:
                kept = self._jobs.kept(table, problem, gone)
                if kept is not None:
                    return kept
                now_s = self._clock.steady_s()
                until_s = now_s + table.busy.wait_s if until_s is None else until_s
                if not patient or now_s >= until_s or not self._is_worth_waiting(table, problem):
                    raise
            self._clock.sleep(min(_BUSY_POLL_S, until_s - now_s))
            started_s, status = self._clock.steady_s(), None

    def _listed(self, table: Table, started_s: float, status: FileVersion | Listing | None) -> TableVersion:
        """What the store lists, once it is quiet. Raises what says that it is no version."""
        for _ in range(_SETTLE_POLLS):
            status = self._get_status(table) if status is None else status
            wait_s = self._unsettled_s(table, status)
            if wait_s <= 0:
                version = self._version(table, status)
                return self._confirmed(table, version) if self._shrank(table, version, started_s) else version
            self._clock.sleep(wait_s)
            status = None
        raise TableBusyError(
            f"{table.url} is still being written after {_SETTLE_POLLS} waits for lookup.settle = {table.settle_s} s"
        )

    def _listed_now(self, table: Table) -> TableVersion:
        return self._listed(table, self._clock.steady_s(), None)

    def _is_worth_waiting(self, table: Table, problem: Exception) -> bool:
        """Whether a job may end soon, or begin: one that overwrites removes files before anything tells of it."""
        if not table.busy.keep or table.kind is Kind.FILE:
            return False
        if isinstance(problem, TableBusyError):
            return True
        return self._jobs.was_here_lately(table) and not self._is_another_kind(table)

    def _learned(self, table: Table, version: TableVersion, started_s: float) -> TableVersion | None:
        self._metrics.inc("resolutionCount")
        self._metrics.set_gauge("versionAsOf", int(self._clock.wall_s() * 1000))
        return self.host.learned(table, version, started_s)

    def _learned_again(self, table: Table, ask: Callable[[Table], TableVersion]) -> TableVersion:
        """What the store says once more, where this host had learned of something newer that it does not know the files of.

        Of what others learn meanwhile the same may be true: then it is asked again, and believed in the end.
        """
        for last in (False, False, True):
            started_s = self._clock.steady_s()
            version = ask(table)
            learned = self.host.learned(table, version, started_s, again=last)
            if learned is not None:
                return learned
        return version

    def log_of(self, options: LookupOptions) -> TableState | None:
        """What the log of the table at `options.path` says now; None if it has none."""
        url = self._ufs.url_of(options.path)
        if is_glob(url):
            return None
        probes = [self._table(_unpinned(options), kind, None) for kind in (Kind.DIRECTORY, Kind.FILE)]
        known = any(self.host.last(probe) is not None for probe in probes)
        return None if known and self.log(url).known() is None else self.log(url).latest()

    def log(self, url: str) -> NotificationLog:
        """The log of the managed table at a canonical URL."""
        if url not in self._logs:
            self._logs[url] = NotificationLog(self._ufs, self._disk, self._metrics, self._clock, self._rng, url)
        return self._logs[url]

    def _at_log(self, table: Table) -> TableVersion:
        state = self.log(table.url).latest()
        if state is None:
            raise UfsNotFoundError(f"{redact('path', table.url)} is no managed table (any more)")
        return managed_version(table, state)

    def _shrank(self, table: Table, version: TableVersion, started_s: float) -> bool:
        """Whether files are gone since the last known version and none came: removal, or a job that has just begun.

        What another process has learned since this listing was asked for says nothing of it.
        """
        record = self.host.last(table)
        if table.kind is Kind.FILE or record is None or record["digest"] == version.digest:
            return False
        if record["boot"] == self._clock.boot and record["started_s"] > started_s:
            return False
        last = self.host.files(table, record["digest"])
        return last is not None and {f.url for f in version.files} < {f.url for f in last.files}

    def _confirmed(self, table: Table, version: TableVersion) -> TableVersion:
        """A version after which no more files went.

        A job that overwrites a directory removes its files one by one before anything tells of the
        job. Such a listing is half a table, and its blocks may all be cached here.
        """
        for _ in range(_SETTLE_POLLS):
            self._clock.sleep(_CONFIRM_S)
            again = self._version(table, self._get_status(table))
            if {file.url for file in version.files} <= {file.url for file in again.files}:
                return again
            version = again
        raise TableBusyError(f"{table.url} keeps losing files: {_SETTLE_POLLS} listings in a row have fewer")

    def _get_status(self, table: Table) -> FileVersion | Listing:
        if table.kind is Kind.FILE:
            return self._ufs.get_meta(table.url)
        return self._ufs.list_status(table.root)

    def _unsettled_s(self, table: Table, status: FileVersion | Listing) -> float:
        """Seconds until the newest file is as old as `lookup.settle` asks; <= 0: it is."""
        if table.settle_s is None:
            return 0.0
        files = (status,) if isinstance(status, FileVersion) else status.files
        newest = max((file.modified_at_s for file in files if file.modified_at_s is not None), default=0.0)
        return min(newest + table.settle_s - self._clock.wall_s(), table.settle_s)

    def _version(self, table: Table, status: FileVersion | Listing, past_jobs: bool = False) -> TableVersion:
        """What the store's answer is a version of. `past_jobs`: whatever jobs are at it. Raises what says that it is none."""
        if isinstance(status, FileVersion):
            refuse_inside(status.url)
            return TableVersion(table.id, (status,))
        ignored = job_directories(table.url, table.kind, status) if past_jobs else self._jobs.dead(table, status)
        try:
            files = data_files(table.url, table.kind, status, table.success_file and not past_jobs, ignored)
        except TableBusyError as problem:
            problem.listing = status
            raise
        except TableEmptyError:
            if not ignored:
                raise
            # A job that overwrites has removed the files, and put none: that says nothing of what the table is.
            busy = TableBusyError(
                f"{status.url} holds no data file but {ignored[0]}, of a job that overwrites it or has died: wait for the job, or "
                "write the table anew"
            )
            busy.listing = status
            raise busy from None
        if "_spark_metadata" in status.directories:
            files = committed_by_sink(self._blocks, status, files)
            if not files:
                raise TableEmptyError(
                    f"{redact('path', table.url)} is no table now: its streaming sink has committed no file"
                )
        return TableVersion(table.id, files)


def _names_directory(options: LookupOptions) -> bool:
    """Whether the path itself says that it is a directory; a web URL's last slash says nothing."""
    return options.path.endswith("/") and not options.path.startswith(("http://", "https://"))


def _unpinned(options: LookupOptions) -> LookupOptions:
    pinned = options.pinned is not None
    return dataclasses.replace(options, version=None, valid_write_ids=None) if pinned else options


def _check_managed(options: LookupOptions) -> None:
    """Raise OptionError for an option about files that somebody else writes."""
    given = {
        "lookup.format": options.format is not None,
        "lookup.partition": options.partition is not None,
        "lookup.success-file": options.success_file,
        "lookup.settle": options.settle_s is not None,
        **{key: True for key in sorted(options.explicit) if key == "lookup.schema" or key.startswith("lookup.csv.")},
    }
    for key in (key for key, is_given in given.items() if is_given):
        raise OptionError(f"option {key} has no meaning for {redact('path', options.path)}, a managed table: remove it")
