"""`FilesSource`: the versions of plain files. A version is what one listing shows while no job writes."""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Callable, Sequence

from pyspark_lookup.errors import OptionError, TableBusyError, TableEmptyError, UfsNotFoundError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import FileFormatName
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.scan.formats.file_names import detect_format
from pyspark_lookup.sources.files.listing import data_files, job_directories, refuse_tables
from pyspark_lookup.sources.files.spark_jobs import WritingJobs, select_committed
from pyspark_lookup.storage.glob import is_glob
from pyspark_lookup.storage.stores import FileVersion, Listing
from pyspark_lookup.versions.model import Kind, Table, TableVersion
from pyspark_lookup.versions.version_source import Answer, Question, SourceParts, VersionSource

_SETTLE_POLLS = 20
_CONFIRM_S = 1.0
_BUSY_POLL_S = 0.5


class FilesSource(VersionSource):
    """The versions of a file, of a directory, or of the files that match a glob."""

    kinds = (Kind.FILE, Kind.DIRECTORY, Kind.GLOB)
    pins = ()
    retained = False
    described = False
    markers = (".hoodie",)  # Hudi's; to other readers its tables are plain files
    label = "a Hudi table"

    def __init__(self, parts: SourceParts) -> None:
        super().__init__(parts)
        self._ufs, self._host, self._clock = parts.ufs, parts.host, parts.context.clock
        self._latest: tuple[Listing, tuple[Table, bool], TableVersion] | None = (
            None  # the last listing, its table, and the version that it gave
        )
        self._jobs = WritingJobs(parts.ufs, parts.host, parts.context.metrics, parts.context.clock)

    @classmethod
    def kind_of_url(cls, url: str) -> str | None:
        return Kind.GLOB if is_glob(url) else None

    @classmethod
    def detect_kind(cls, status: FileVersion | Listing) -> str | None:
        return Kind.FILE if isinstance(status, FileVersion) else Kind.DIRECTORY

    def check_options(self, options: LookupOptions, kind: str) -> None:
        if options.files.success_file and kind == Kind.FILE:
            raise OptionError(
                f"option lookup.success-file = 'true': {redact('path', options.files.path)} is a file, and only the directory of a job has a _SUCCESS file: remove it"
            )
        self._refuse_pin(options, kind)

    def detect_format(self, files: Sequence[FileVersion]) -> FileFormatName | None:
        return detect_format([file.url for file in files])

    def current(self, question: Question) -> Answer:
        """The current version. One store call, or more while the table settles or a job writes it."""
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
        """The current version, and a version with only its files that are not newer than `newest`. If files have only been added since the
        earlier version, the second is that version."""
        try:
            version = ask()
        except TableBusyError as problem:  # a job may have only added files to the version that the token names
            if problem.listing is None:
                raise
            version = self._version(table, problem.listing, past_jobs=True)
        older = tuple(file for file in version.files if (file.modified_at_s or 0.0) <= newest)
        return [version, TableVersion(table.id, older)]

    def was_here_lately(self, table: Table) -> bool:
        return table.kind == Kind.DIRECTORY and self._jobs.was_here_lately(table)

    def lacks_files(self, version: TableVersion) -> bool:
        return self._jobs.lacks_files(version)

    # --- the store --------------------------------------------------------------------------------

    def _list(self, table: Table, started_s: float, status: FileVersion | Listing | None) -> TableVersion:
        """The version that the store lists, once it has settled. Raises NotATableError if the listing is not a version."""
        for _ in range(_SETTLE_POLLS):
            status = self._get_status(table) if status is None else status
            wait_s = self._unsettled_s(table, status)
            if wait_s <= 0:
                version = self._version(table, status)
                return self._confirm(table, version) if self._has_shrunk(table, version, started_s) else version
            self._clock.sleep(wait_s)
            status = None
        raise TableBusyError(
            f"{table.url} is still being written after {_SETTLE_POLLS} waits of lookup.settle = {table.settle_s} s: try again later"
        )

    def _is_worth_waiting(self, table: Table, problem: Exception) -> bool:
        """Whether waiting may help: a job may end soon, or have just begun, because an overwrite removes files before its directory is listed."""
        if not table.busy.keep or table.kind == Kind.FILE:
            return False
        if isinstance(problem, TableBusyError):
            return True
        return self._jobs.was_here_lately(table) and self._has_parent(table) and not self._is_another_kind(table)

    def _has_parent(self, table: Table) -> bool:
        """Whether the directory that contains the table's exists; always true on object stores, where nobody can tell."""
        parent = posixpath.dirname(table.root.rstrip("/"))
        return not table.root.startswith("file://") or self._ufs.has_directory(parent)

    def _is_another_kind(self, table: Table) -> bool:
        with contextlib.suppress(UfsNotFoundError):
            return table.kind != Kind.GLOB and self._parts.detect_kind(self._ufs.get_status(table.url)) != table.kind
        return False

    def _has_shrunk(self, table: Table, version: TableVersion, started_s: float) -> bool:
        """Whether the table has lost files since the last known version, and gained none: somebody removes files, or a job has just begun.

        A version that another process recorded after this listing was requested is not compared.
        """
        record = self._host.last(table)
        if table.kind == Kind.FILE or record is None or record["digest"] == version.digest:
            return False
        if record["boot"] == self._clock.boot and record["started_s"] > started_s:
            return False
        last = self._host.files(table, record["digest"])
        return last is not None and {f.url for f in version.files} < {f.url for f in last.files}

    def _confirm(self, table: Table, version: TableVersion) -> TableVersion:
        """The version once no more files disappear between two listings.

        A job that overwrites a directory removes its files one by one before anything shows that it runs. A listing in between is half a
        table, and no read fails if all blocks of that half are cached here.
        """
        for _ in range(_SETTLE_POLLS):
            self._clock.sleep(_CONFIRM_S)
            newer_version = self._version(table, self._get_status(table))
            if {file.url for file in version.files} <= {file.url for file in newer_version.files}:
                return newer_version
            version = newer_version
        raise TableBusyError(
            f"{table.url} keeps losing files: {_SETTLE_POLLS} listings in a row lacked some: try again later"
        )

    def _get_status(self, table: Table) -> FileVersion | Listing:
        if table.kind == Kind.FILE:
            return self._ufs.get_meta(table.url)
        return self._ufs.list_status(table.root)

    def _unsettled_s(self, table: Table, status: FileVersion | Listing) -> float:
        """Seconds until the newest file is as old as `lookup.settle` asks; 0 or less if it is."""
        if table.settle_s is None:
            return 0.0
        files = (status,) if isinstance(status, FileVersion) else status.files
        newest = max((file.modified_at_s for file in files if file.modified_at_s is not None), default=0.0)
        listed_at_s = status.listed_at_s if isinstance(status, Listing) else None
        now_s = self._clock.wall_s() if listed_at_s is None else listed_at_s
        return min(newest + table.settle_s - now_s, table.settle_s)

    def _refuse_files(self, files: Sequence[FileVersion]) -> None:
        urls = [file.url for file in files]
        for source in self._parts.sources:
            source.refuse_files(urls)

    def _version(self, table: Table, status: FileVersion | Listing, past_jobs: bool = False) -> TableVersion:
        """The version in the store's answer. `past_jobs`: even while jobs write. Raises NotATableError if it is not a version."""
        if isinstance(status, FileVersion):
            self._refuse_files([status])
            return TableVersion(table.id, (status,))
        if self._latest is not None and self._latest[0] is status and self._latest[1] == (table, past_jobs):
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
            # A job that overwrites has removed all files and not put any yet, so the kind of table is unknown.
            busy = TableBusyError(
                f"{status.url} holds no data file, only {ignored_directories[0]} of a job that is overwriting it or has died: wait for the job, "
                "or write the table again"
            )
            busy.listing = status
            raise busy from None
        self._refuse_files(files)
        if "_spark_metadata" in status.directories:
            files = select_committed(self._parts.blocks, status, files)
            if not files:
                raise TableEmptyError(
                    f"there is no table at {redact('path', table.url)}: its streaming sink has committed no file"
                )
        version = TableVersion(table.id, files)
        if not ignored_directories:  # whether a job is dead shows only with time
            self._latest = status, (table, past_jobs), version
        return version
