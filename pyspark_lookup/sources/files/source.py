"""`FilesSource`: the versions of tables of plain files. A version is the set of data files that one listing shows while no job writes.

Spark's jobs leave more than data files in a directory: temporary files of jobs that still write or have died, the log of a streaming
sink, and the marker files of Databricks' commit protocol.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import posixpath
import re
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.keys import Numbers, as_bools, as_indices
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.decoding import UNREADABLE, as_text, as_texts, describe_fault
from pyspark_lookup.core.log_events import log_event
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.errors import (
    DamagedFileError,
    OptionError,
    SourceChangedError,
    TableBusyError,
    TableEmptyError,
    TableFormatError,
    UfsError,
    UfsNotFoundError,
)
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import FileFormatName
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.scan.formats.model import detect_format
from pyspark_lookup.storage.block_cache import BlockCache, Data
from pyspark_lookup.storage.stores import FileVersion, ListedFiles, Listing, split_urls
from pyspark_lookup.storage.ufs import Ufs
from pyspark_lookup.versions.file_columns import ColumnFiles
from pyspark_lookup.versions.host_versions import HostVersions
from pyspark_lookup.versions.listed_columns import (
    columns_of,
    lacks_states,
    lacks_urls,
    one_of_each_extension,
    to_column_files,
)
from pyspark_lookup.versions.model import Kind, Table, TableVersion, glob_matches, glob_reaches
from pyspark_lookup.versions.version_source import Answer, Question, SourceParts, VersionSource


def refuse_tables(table_url: str, kind: str, listing: Listing, sources: Sequence[VersionSource]) -> None:
    """Raise TableFormatError if a listing shows that the path is, or contains, a table of another kind, or a Hudi table."""
    pattern = table_url if kind == Kind.GLOB else ""
    directories = _reach(listing, pattern)
    for source in sources:
        source.refuse_tables(listing, directories, pattern)
    hudi = next((directory for directory in directories if directory.rsplit("/", 1)[-1] == ".hoodie"), None)
    if hudi is not None:
        raise TableFormatError(
            f"{redact('path', listing.url)} holds {hudi}, so it is a Hudi table: a listing does not say which of its files are "
            "current. Read it with format('hudi') or through a lookup.provider of your own, or export the current version as plain files"
        )


def job_directories(table_url: str, kind: str, listing: Listing) -> list[str]:
    """The temporary directories of jobs that are writing the table or died while writing it, as paths below the listed directory."""
    directories = _reach(listing, table_url if kind == Kind.GLOB else "")
    return sorted(directory for directory in directories if _is_job_directory(directory.rsplit("/", 1)[-1]))


def data_files(
    table_url: str, kind: str, listing: Listing, success_file: bool = False, dead: Sequence[str] = ()
) -> tuple[FileVersion, ...] | ListedFiles:
    """The data files in a listing: files that are not empty, and whose path has no part that begins with `_` or `.` (but `_a=1` is allowed).

    `dead`: the directories of jobs that have died. Raises TableBusyError if a job is writing the table, TableEmptyError if there is no data
    file.
    """
    pattern = table_url if kind == Kind.GLOB else ""
    busy = [directory for directory in job_directories(table_url, kind, listing) if directory not in dead]
    if busy:
        raise TableBusyError(
            f"{redact('path', listing.url)} holds {busy[0]}: a job is writing this table, or died less than lookup.busy-timeout ago. Wait for the job, or, "
            f"if you know that no job runs, remove {busy[0]}, which loses that job's unfinished output"
        )
    if success_file and f"{listing.url.rstrip('/')}/_SUCCESS" not in listing.urls_ending("/_SUCCESS"):
        raise TableBusyError(
            f"{redact('path', listing.url)} has no _SUCCESS file, which lookup.success-file = true requires: wait for the job that writes the table. Without the option, files of an unfinished job are read, too"
        )
    files = _select_data(listing, pattern)
    if not files:
        reason = (
            "no file matches the glob"
            if kind == Kind.GLOB
            else "the directory holds no data file (names that begin with _ or . are skipped)"
        )
        raise TableEmptyError(f"there is no table at {redact('path', table_url)}: {reason}")
    return files


def _select_data(listing: Listing, pattern: str) -> tuple[FileVersion, ...] | ListedFiles:
    """The files of a listing that are not empty, have no skipped part in their path, and match the glob `pattern` (empty: no glob)."""

    def is_data(url: str) -> bool:
        skipped = any(map(_is_skipped, url[len(listing.url) :].split("/")))
        return not skipped and (not pattern or glob_matches(url, pattern))

    if not isinstance(listing.files, ListedFiles):
        return tuple(file for file in listing.files if file.size > 0 and is_data(file.url))
    files = listing.files.filter(listing.files.sizes > 0)
    if pattern:
        return files.filter(np.array([is_data(url) for url in files.urls.to_pylist()], np.bool_))
    directories, places, names = split_urls(files.urls)
    is_skipped = ~np.array([is_data(f"{directory}/-") for directory in directories], np.bool_)[places]
    suspects = np.flatnonzero(as_bools(pc.or_(pc.starts_with(names, "."), pc.starts_with(names, "_"))))
    is_skipped[suspects] |= np.array([_is_skipped(n) for n in names.take(as_indices(suspects)).to_pylist()], np.bool_)
    return files.filter(~is_skipped)


def _is_skipped(name: str) -> bool:
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


# `__magic` and, since Hadoop 3.4, `__magic_job-<id>` are those of S3A's magic committer, `.staging_<ms>` those of Flink.
_JOB_PREFIXES = ("__magic", ".spark-staging-", ".hive-staging", "_spark_staging", ".staging_")


def _is_job_directory(name: str) -> bool:
    return name == "_temporary" or name.startswith(_JOB_PREFIXES)


def _reach(listing: Listing, pattern: str) -> list[str]:
    """The listed directories whose parent may have files of the glob, in itself or further down; all of them if `pattern` is empty."""
    if not pattern:
        return list(listing.directories)
    return [d for d in listing.directories if glob_reaches(f"{listing.url}/{d}".rpartition("/")[0], pattern)]


def select_committed(
    blocks: BlockCache, listing: Listing, files: tuple[FileVersion, ...] | ListedFiles
) -> tuple[FileVersion, ...] | ListedFiles:
    """The files that the log of a streaming file sink (`_spark_metadata`) lists as committed.

    Log files are `<batch>` or `<batch>.compact`: a version line, then one JSON object per file. A compact file also lists all files of the
    batches before it. Raises DamagedFileError for a malformed log file.
    """
    prefix = f"{listing.url}/_spark_metadata/"
    logs: dict[int, tuple[bool, FileVersion]] = {}
    log_names = listing.files
    if isinstance(log_names, ListedFiles):
        log_names = log_names.filter(as_bools(pc.starts_with(log_names.urls, prefix)))
    for file in log_names:
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
                f"{redact('path', file.url)} is damaged: it is not a log file of a streaming sink ({describe_fault(problem)}). Restore it; or, if no "
                "stream writes here any more, move _spark_metadata away: then all files are read, also uncommitted ones"
            ) from None
    if isinstance(files, ListedFiles):
        names = split_urls(files.urls)[2]
        return files.filter(as_bools(pc.is_in(names, value_set=pa.array(list(committed_names), pa.string()))))
    return tuple(file for file in files if file.url.rsplit("/", 1)[-1] in committed_names)


class CommitMarkers:
    """Says which files are visible by Databricks' commit protocol (DBIO). It keeps what marker files say, so each of them is read once.

    A job writes `_started_<id>` into a directory, files named `…-tid-<id>-…`, and at its end `_committed_<id>`: a JSON object with the names
    that it has `added`, and those of other files that it has `removed`, which stay there until VACUUM. An empty `_committed_<id>` does not
    count. Files are also visible if their name has no `<id>`, or if their `<id>` has no markers, because VACUUM removes markers, too.
    """

    def __init__(self, blocks: BlockCache) -> None:
        self._blocks = blocks
        self._changes: dict[
            FileVersion, tuple[list[str], list[str]]
        ] = {}  # of the markers in the last listing that had some

    def select_visible(
        self, listing: Listing, files: tuple[FileVersion, ...] | ListedFiles
    ) -> tuple[FileVersion, ...] | ListedFiles:
        """The files that are visible; all of them if no directory has marker files.

        Raises DamagedFileError for a malformed marker file, SourceChangedError if one was removed after it was listed.
        """
        started = _find_markers(listing, "_started_")
        committed = [file for file in _find_markers(listing, "_committed_") if file.size > 0]
        if not started and not committed:
            return files
        changes = {file: self._changes[file] for file in committed if file in self._changes}
        new_markers = [file for file in committed if file not in changes]
        locations = [self._blocks.get_blocks_and_locations(file.url, file) for file in new_markers]
        contents = self._blocks.read([(location, [(0, location.file.size)]) for location in locations])
        changes.update((file, _parse_marker(file, data)) for file, (data,) in zip(new_markers, contents, strict=True))
        self._changes = {file: marked for file, marked in changes.items() if file.cacheable}
        added_urls = {url for added, _ in changes.values() for url in added}
        removed_urls = {url for _, removed in changes.values() for url in removed}
        urls = files.urls if isinstance(files, ListedFiles) else pa.array([file.url for file in files], pa.string())
        jobs = pc.extract_regex(urls, r"^(?P<directory>.*)/[^/]*-tid-(?P<id>[a-z0-9]+)-[^/]*$")
        jobs = pc.binary_join_element_wise(pc.struct_field(jobs, "directory"), pc.struct_field(jobs, "id"), "/")
        began = _is_in(jobs, {_job_of(file, "_started_") for file in started})
        has_committed = _is_in(jobs, {_job_of(file, "_committed_") for file in committed})
        is_visible = np.where(has_committed, _is_in(urls, added_urls), ~began) & ~_is_in(urls, removed_urls)
        if isinstance(files, ListedFiles):
            return files.filter(is_visible)
        return tuple(itertools.compress(files, is_visible))


def _parse_marker(file: FileVersion, data: Data) -> tuple[list[str], list[str]]:
    """(URLs of the files that a job has added, URLs of those that it has removed), from `_committed_<id>`."""
    directory = posixpath.dirname(file.url)
    try:
        marker = json.loads(bytes(data))
        added, removed = ([f"{directory}/{name}" for name in as_texts(marker[key])] for key in ("added", "removed"))
    except UNREADABLE as problem:
        raise DamagedFileError(
            f"{redact('path', file.url)} is damaged: it does not say which files a job on Databricks has added and removed ({describe_fault(problem)}): "
            "restore it, or, if no job on Databricks writes here, rename it"
        ) from None
    return added, removed


_MARKER_ID = re.compile(r"(?:vacuum)?[0-9]+")


def _find_markers(listing: Listing, prefix: str) -> list[FileVersion]:
    """The listed marker files whose names begin with `prefix`."""
    files = listing.files
    if isinstance(files, ListedFiles):
        files = tuple(files.filter(as_bools(pc.match_substring(files.urls, f"/{prefix}"))))
    return [
        file
        for file in files
        if f"/{prefix}" in file.url
        and posixpath.basename(file.url).startswith(prefix)
        and _MARKER_ID.fullmatch(posixpath.basename(file.url), len(prefix))
    ]


def _job_of(marker: FileVersion, prefix: str) -> str:
    directory, name = posixpath.split(marker.url)
    return f"{directory}/{name.removeprefix(prefix)}"


def _is_in(texts: pa.Array, values: set[str]) -> Numbers:
    return as_bools(pc.is_in(texts, value_set=pa.array(list(values), pa.string())))


# --- jobs that write ------------------------------------------------------------------------------

_log = logging.getLogger("pyspark_lookup.metadata")


class WritingJobs:
    """What this host knows about jobs that write the tables. Each message about a job is logged once per process."""

    def __init__(self, ufs: Ufs, host: HostVersions, metrics: CacheMetricGroup, clock: HostClock) -> None:
        self._ufs = ufs
        self._host = host
        self._metrics = metrics
        self._clock = clock
        self._logged_reasons: set[str] = set()
        self._lacking_digest: str | None = None
        self._seen_s: dict[str, float] = {}  # by table id: when a version was last kept, on the steady clock
        self._alive_until_s: dict[
            str, float
        ] = {}  # by URL of a job's directory: the time until which the job cannot count as dead, on the steady clock

    def keep(self, table: Table, problem: Exception, gone_digest: str | None) -> TableVersion | None:
        """The last version that this host knows, to be read while a job writes, because the job's files are not part of a version yet.

        None if no job writes, or this host knows no version. Some files of the version may be gone; the reader then notices it.
        """
        if not isinstance(problem, TableBusyError) or not table.busy.keep:
            return None
        record = self._host.last(table)
        last_version = self._host.files(table, record["digest"]) if record is not None else None
        if last_version is None or last_version.digest == gone_digest:
            return None
        self._seen_s[table.id] = self._clock.steady_s()
        self._host.forget_missing(table)
        lacks = problem.listing is not None and lacks_states(last_version.files, problem.listing.files)
        self._lacking_digest = last_version.digest if lacks else None
        self._metrics.inc("busyServedCount")
        self._tell_once(table, str(problem), f"using version {last_version.digest}")
        return last_version

    def lacks_files(self, version: TableVersion) -> bool:
        """Whether the job that is writing has removed files of a version that `keep` has returned."""
        return version.digest == self._lacking_digest

    def was_here_lately(self, table: Table) -> bool:
        """Whether this host has seen the table within the last `lookup.busy-timeout`."""
        seen_s = self._last_seen_s(table)
        return seen_s is not None and self._clock.steady_s() - seen_s <= table.busy.timeout_s

    def missing_since_s(self, table: Table) -> float:
        """When a query of this host first found the table missing, on the steady clock; now, if this query is the first.

        So all queries share one wait for a job: a retried task, or the next query, waits only for the time that is left.
        """
        return self._host.missing_since_s(table, self._last_seen_s(table) or 0.0)

    def _last_seen_s(self, table: Table) -> float | None:
        """When this host last saw the table, on the steady clock; None if that was before the host was booted, or if it never did."""
        record = self._host.last(table)
        if record is None or record["boot"] != self._clock.boot:
            return None
        return max(float(record["started_s"]), self._host.seen_s(table), self._seen_s.get(table.id, 0.0))

    def find_dead(self, table: Table, listing: Listing) -> list[str]:
        """The directories of jobs in which nothing has changed for `lookup.busy-timeout`, by the store's clock."""
        dead = []
        for directory in job_directories(table.url, table.kind, listing):
            url, steady_s = f"{listing.url}/{directory}", self._clock.steady_s()
            if steady_s < self._alive_until_s.get(url, 0.0):
                continue
            try:
                changed_s, now_s = self._ufs.last_change_s(url)
            except UfsError:
                continue  # the job has just ended, or its directory cannot be read: the job is not known to be dead
            if changed_s is not None and not url.startswith("file://"):
                # Directories on an object store have no time of change. A commit that moves files out of one shows in the times of the
                # moved files.
                changed_s = max(changed_s, _newest_s(listing.files))
            if changed_s is None or now_s - changed_s < table.busy.timeout_s:
                if changed_s is not None:
                    self._alive_until_s[url] = steady_s + table.busy.timeout_s - (now_s - changed_s)
                continue
            dead.append(directory)
            reason = f"nothing in {url} has changed for {now_s - changed_s:.0f} s (lookup.busy-timeout = {table.busy.timeout_s:g} s): its job counts as dead"
            self._tell_once(
                table,
                reason,
                "ignoring this directory; if no job runs, remove it, which loses the job's unfinished output",
            )
        return dead

    def _tell_once(self, table: Table, reason: str, instead: str) -> None:
        if reason not in self._logged_reasons:
            self._logged_reasons.add(reason)
            redacted_path = redact("path", table.url)
            log_event(
                _log, logging.WARNING, "busy", table=redacted_path, reason=redact("path", reason), instead=instead
            )


_SETTLE_POLLS = 20  # listings before a table that keeps changing is an error
_CONFIRM_S = 1.0  # the pause between two listings that must agree, see `FilesSource._confirm`
_BUSY_POLL_S = 0.5  # the pause between two listings while a job writes


class FilesSource(VersionSource):
    """The versions of a file, of a directory, or of the files that match a glob."""

    kinds = (Kind.FILE, Kind.DIRECTORY, Kind.GLOB)
    pins = ()
    retained = False
    described = False
    markers = (".hoodie",)  # Hudi tables look like plain files but for this directory
    label = "a Hudi table"

    def __init__(self, parts: SourceParts) -> None:
        super().__init__(parts)
        self._ufs, self._host, self._clock = parts.ufs, parts.host, parts.context.clock
        # The last listing, the table's id and `past_jobs` with which it was read, and the version that was made of it.
        self._latest: tuple[Listing, tuple[str, bool], TableVersion] | None = None
        self._markers = CommitMarkers(parts.blocks)
        self._jobs = WritingJobs(parts.ufs, parts.host, parts.context.metrics, parts.context.clock)

    @classmethod
    def detect_kind(cls, status: FileVersion | Listing) -> str | None:
        return Kind.FILE if isinstance(status, FileVersion) else Kind.DIRECTORY

    def check_options(self, options: LookupOptions, kind: str) -> None:
        if options.files.success_file and kind == Kind.FILE:
            raise OptionError(
                f"option lookup.success-file = 'true': {redact('path', options.files.path)} is a file, and only the directory of a job has a _SUCCESS file: remove the option"
            )
        self._refuse_pin(options)

    def detect_format(self, files: Sequence[FileVersion]) -> FileFormatName | None:
        some = one_of_each_extension(files) if isinstance(files, ColumnFiles) else files
        return detect_format([file.url for file in some])

    def current(self, question: Question) -> Answer:
        """The current version. Makes one store call; more while files are younger than `lookup.settle` or while a job writes."""
        table, started_s, status = question.table, question.started_s, question.status
        began_s = self._clock.steady_s()
        while True:
            try:
                return Answer(self._list(table, started_s, status), started_s)
            except (TableBusyError, TableEmptyError, UfsNotFoundError) as problem:
                last_version = self._jobs.keep(table, problem, question.gone_digest)
                if last_version is not None:
                    return Answer(last_version, started_s, is_kept=True)
                if not question.patient or not self._is_worth_waiting(table, problem):
                    raise
                busy = isinstance(problem, TableBusyError)
                since_s = began_s if busy else self._jobs.missing_since_s(table)
                left_s = since_s + table.busy.wait_s - self._clock.steady_s()
                if left_s <= 0:
                    raise
            self._clock.sleep(min(_BUSY_POLL_S, left_s))
            started_s, status = self._clock.steady_s(), None

    def candidates(
        self, table: Table, digest: str, newest: float, ask: Callable[[], TableVersion]
    ) -> Sequence[TableVersion]:
        """The current version, and the same version without the files that are newer than `newest`.

        The second one is the version that the token names if files have only been added since the token was made.
        """
        try:
            version = ask()
        except TableBusyError as problem:  # a job may have only added files to the version that the token names
            if problem.listing is None:
                raise
            version = self._version(table, problem.listing, past_jobs=True)
        if isinstance(version.files, ColumnFiles):
            return [
                version,
                TableVersion(table.id, version.files.take(np.flatnonzero(version.files.modified_at_s <= newest))),
            ]
        older = tuple(file for file in version.files if (file.modified_at_s or 0.0) <= newest)
        return [version, TableVersion(table.id, older)]

    def was_here_lately(self, table: Table) -> bool:
        return table.kind == Kind.DIRECTORY and self._jobs.was_here_lately(table)

    def lacks_files(self, version: TableVersion) -> bool:
        return self._jobs.lacks_files(version)

    # --- the store --------------------------------------------------------------------------------

    def _list(self, table: Table, started_s: float, status: FileVersion | Listing | None) -> TableVersion:
        """The version that the store lists, once its files are older than `lookup.settle`.

        Raises NotATableError if the listing shows no version.
        """
        problem = ""
        for _ in range(_SETTLE_POLLS):
            status = self._get_status(table) if status is None else status
            wait_s = self._unsettled_s(table, status)
            if wait_s <= 0:
                try:
                    version = self._version(table, status)
                    return self._confirm(table, version) if self._has_shrunk(table, version, started_s) else version
                except (
                    SourceChangedError
                ) as change:  # a clean-up has removed a marker or a log file since it was listed
                    problem, status = f"changed while it was read ({change})", None
                    continue
            self._clock.sleep(wait_s)
            problem, status = f"had files newer than lookup.settle = {table.settle_s} s", None
        raise TableBusyError(
            f"{redact('path', table.url)} {problem} in each of {_SETTLE_POLLS} listings: try again later"
        )

    def _is_worth_waiting(self, table: Table, problem: Exception) -> bool:
        """Whether waiting may help. A job that is writing may end soon.

        If the table was here lately and is missing now, an overwrite may have begun: it removes files before a listing shows the job's
        directory.
        """
        if not table.busy.keep or table.kind == Kind.FILE:
            return False
        if isinstance(problem, TableBusyError):
            return True
        return self._jobs.was_here_lately(table) and self._has_parent(table) and not self._is_another_kind(table)

    def _has_parent(self, table: Table) -> bool:
        """Whether the parent of the table's directory exists. Always true on object stores, which have no directories."""
        parent = posixpath.dirname(table.root.rstrip("/"))
        return not table.root.startswith("file://") or self._ufs.has_directory(parent)

    def _is_another_kind(self, table: Table) -> bool:
        with contextlib.suppress(UfsNotFoundError):
            return table.kind != Kind.GLOB and self._parts.detect_kind(self._ufs.get_status(table.url)) != table.kind
        return False

    def _has_shrunk(self, table: Table, version: TableVersion, started_s: float) -> bool:
        """Whether the table has lost files since the last known version and gained none: somebody removes files, or a job has just begun.

        A version that another process recorded after this listing was requested is not compared.
        """
        record = self._host.last(table)
        if table.kind == Kind.FILE or record is None or record["digest"] == version.digest:
            return False
        if record["boot"] == self._clock.boot and record["started_s"] > started_s:
            return False
        last = self._host.files(table, record["digest"])
        return last is not None and len(version.files) < len(last.files) and not lacks_urls(version.files, last.files)

    def _confirm(self, table: Table, version: TableVersion) -> TableVersion:
        """The table's version, once a listing shows all files of the listing before it.

        The race: a job that overwrites a directory removes its files one by one, before anything shows that the job runs. A listing in
        between shows only a part of the table, and no read would fail if all blocks of that part are cached on this host.
        """
        for _ in range(_SETTLE_POLLS):
            self._clock.sleep(_CONFIRM_S)
            newer_version = self._version(table, self._get_status(table))
            if not lacks_urls(version.files, newer_version.files):
                return newer_version
            version = newer_version
        raise TableBusyError(
            f"{redact('path', table.url)} keeps losing files: in each of {_SETTLE_POLLS} listings, files of the previous listing were missing: try again later"
        )

    def _get_status(self, table: Table) -> FileVersion | Listing:
        if table.kind == Kind.FILE:
            return self._ufs.get_meta(table.url)
        return self._ufs.list_status(table.root)

    def _unsettled_s(self, table: Table, status: FileVersion | Listing) -> float:
        """Seconds until the newest file is as old as `lookup.settle`; 0 or less if it already is."""
        if table.settle_s is None:
            return 0.0
        files = (status,) if isinstance(status, FileVersion) else status.files
        newest = _newest_s(files)
        listed_at_s = status.listed_at_s if isinstance(status, Listing) else None
        now_s = self._clock.wall_s() if listed_at_s is None else listed_at_s
        return min(newest + table.settle_s - now_s, table.settle_s)

    def _refuse_files(self, files: Sequence[FileVersion]) -> None:
        if isinstance(
            files, ListedFiles
        ):  # one file of each directory is enough: the directory shows whether it belongs to another table
            first_rows = np.unique(split_urls(files.urls)[1], return_index=True)[1]
            urls = files.urls.take(as_indices(first_rows)).to_pylist()
        else:
            urls = [file.url for file in files]
        for source in self._parts.sources:
            source.refuse_files(urls)

    def _version(self, table: Table, status: FileVersion | Listing, past_jobs: bool = False) -> TableVersion:
        """The version that the store's answer `status` shows. `past_jobs`: ignore jobs that are writing.

        Raises NotATableError if the answer shows no version.
        """
        if isinstance(status, FileVersion):
            self._refuse_files([status])
            return TableVersion(table.id, (status,))
        if self._latest is not None and self._latest[0] is status and self._latest[1] == (table.id, past_jobs):
            return self._latest[2]
        refuse_tables(table.url, table.kind, status, self._parts.sources)
        ignored_directories = (
            job_directories(table.url, table.kind, status) if past_jobs else self._jobs.find_dead(table, status)
        )
        try:
            files = data_files(table.url, table.kind, status, table.success_file and not past_jobs, ignored_directories)
        except TableBusyError as problem:
            problem.listing = status
            raise
        except TableEmptyError:
            if not ignored_directories:
                raise
            # A job that overwrites the table has removed all its files and not put new ones yet, so the kind of table cannot be seen.
            busy = TableBusyError(
                f"{redact('path', status.url)} holds no data file, only {ignored_directories[0]} of a job that is overwriting the table or has died: wait for the job, "
                "or, if you know that no job runs, write the table again"
            )
            busy.listing = status
            raise busy from None
        self._refuse_files(files)
        if "_spark_metadata" in status.directories:
            files = select_committed(self._parts.blocks, status, files)
        files = self._markers.select_visible(status, files)
        if not len(files):
            raise TableEmptyError(
                f"there is no table at {redact('path', table.url)}: its files belong to streams or jobs that have not committed: wait for them, or, if you know that none runs, write the table again"
            )
        version = self._to_version(table, files)
        if not ignored_directories:  # whether a job is dead shows only with time
            self._latest = status, (table.id, past_jobs), version
        return version

    def _to_version(self, table: Table, files: tuple[FileVersion, ...] | ListedFiles) -> TableVersion:
        """The version that has these files.

        If the files are in columns, the result is the last version that this host knows, if nothing has changed; otherwise it shares the
        columns of that version.
        """
        if not isinstance(files, ListedFiles):
            return TableVersion(table.id, files)
        record = self._host.last(table)
        last = None if record is None else self._host.files(table, record["digest"])
        if last is None and self._latest is not None and self._latest[1][0] == table.id:
            last = self._latest[2]
        digest = TableVersion.digest_of_listing(table.id, files)
        if last is not None and last.digest == digest and last.is_settled:
            return last
        columns = None if last is None else columns_of(last.files)
        return TableVersion(table.id, to_column_files(files, table.root, columns), known_digest=digest)


def _newest_s(files: Sequence[FileVersion]) -> float:
    """When the newest file was modified (Unix time); 0.0 if no file has a time."""
    if isinstance(files, ListedFiles):
        return float(files.modified_at_s.max(initial=0.0))
    return max((file.modified_at_s or 0.0 for file in files), default=0.0)
