"""`VersionSource`: the interface that each kind of table implements, by which the rest of the package asks for the versions of its tables."""

from __future__ import annotations

import abc
import bisect
import dataclasses
import datetime
import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.write_ids import ValidWriteIdList
from pyspark_lookup.errors import OptionError, VersionGoneError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import FileFormatName
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.storage.block_cache import BlockCache
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.stores import FileVersion, Listing, Store
from pyspark_lookup.storage.ufs import Ufs
from pyspark_lookup.versions.host_versions import HostVersions
from pyspark_lookup.versions.model import Table, TableVersion, VersionMetadata

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_MILLISECOND = datetime.timedelta(milliseconds=1)
_TIMES_KEPT = 16
_OF_FILES = ("lookup.schema", "lookup.csv.", "lookup.on-busy", "lookup.busy-")


OpenUrl = Callable[[str, bool, "Mapping[str, Any] | None"], Store]
"""Opens the store of a URL. The second argument says whether the options `lookup.storage.*` apply, the third has the options of credentials that a
catalog has vended (`VendedCredentials.options`); None: the credentials of this process are used."""


@dataclasses.dataclass(frozen=True)
class SourceParts:
    """The objects that a source works with: the store and its cached blocks, and this host's records of versions."""

    ufs: Ufs
    blocks: BlockCache
    host: HostVersions
    context: HostContext
    sources: Sequence[VersionSource]
    """The sources of all kinds of tables, in the order in which they are asked what is at a path. Empty until all of them are made."""

    def detect_kind(self, status: FileVersion | Listing) -> str:
        """The kind of table at a path, as the store's answer `status` about the path shows it."""
        return next(kind for source in self.sources if (kind := source.detect_kind(status)) is not None)


@dataclasses.dataclass(frozen=True)
class Question:
    """A request for the version of a table to read: its current version, or the one that `table.pinned` names.

    `started_s`: when the request began, on the host's steady clock. `status`: the store's answer about the path, if it was just asked.
    `gone_digest`: the digest of a version that can no longer be read. `patient`: wait for a job that writes the table, up to
    `lookup.busy-wait`.
    """

    table: Table
    started_s: float
    status: FileVersion | Listing | None = None
    gone_digest: str | None = None
    patient: bool = True


@dataclasses.dataclass(frozen=True)
class Answer:
    """The version to read. `started_s`: when the call that returned it began, on the host's steady clock.

    `is_kept`: a job is writing the table, so this is the last version that the host knows, and not one that the store shows now.
    """

    version: TableVersion
    started_s: float
    is_kept: bool = False


class TimeTravel:
    """Finds the version of a table that was current at a time. The result for a time before the last commit is cached.

    A commit counts as made at the time that it states, or at the time of the commit before it if that is later: writers' clocks differ.
    """

    def __init__(self) -> None:
        self._versions_by_time: dict[tuple[str, datetime.datetime], int] = {}

    def find(
        self, url: str, table_id: str, at: datetime.datetime, commits: Callable[[int], Iterable[tuple[int, int]]]
    ) -> int:
        """The number of the version that was current at `at`. Raises VersionGoneError for a time before the first commit.

        `commits`: returns the versions and the times of their commits (Unix ms), oldest first. For the time `at` (Unix ms) it may leave
        out all but the last commit up to it and the next one; if none is as early, all but the first. It is called only if the result is not cached.
        """
        version = self._versions_by_time.get((table_id, at))
        if version is not None:
            return version
        # Views show times in whole milliseconds, so a time that was copied from a view must find its commit.
        at_ms = (at - _EPOCH) // _MILLISECOND
        versions_and_times = tuple(commits(at_ms))
        if not versions_and_times:
            raise VersionGoneError(
                f"{redact('path', url)} has no version as of {at.isoformat()} (lookup.timestamp): its log has no commits any more"
            )
        versions, times = zip(*versions_and_times, strict=True)
        times = tuple(itertools.accumulate(times, max))
        count = bisect.bisect_right(times, at_ms)
        if not count:
            first = (_EPOCH + times[0] * _MILLISECOND).isoformat()
            raise VersionGoneError(
                f"{redact('path', url)} has no version as of {at.isoformat()} (lookup.timestamp): the oldest version in "
                f"its log, {versions[0]}, dates from {first}: give that time or a later one"
            )
        if count < len(times):
            self._versions_by_time = {
                **dict(list(self._versions_by_time.items())[-_TIMES_KEPT:]),
                (table_id, at): versions[count - 1],
            }
        return int(versions[count - 1])


class VersionSource(abc.ABC):
    """Finds the versions of tables of one kind, or of some kinds that are alike. A `TableVersion` has all that a read of the version needs.

    `kinds`: the names of these kinds. `pins`: the options that name an older version. `retained`: the table keeps older versions, so a read
    can name one. `described`: the table's metadata has its columns, so the options that say how files are read have no meaning. `one_asks`:
    while one query of a host asks for the current version, the host's other queries wait for its answer. `markers`: names of directories
    that only such a table has. `marker_file`: if not empty, the name of a file that must be in the marker's directory, too. `url_prefixes`,
    `url_suffixes`: how canonical paths begin or end that show by their spelling that they are such tables. `label`: what errors call such a
    table, such as "an Iceberg table". `shows_changes`: after each change
    of its rows the table has another version, or is read as it was before. `fleeting`: a version has no files, so its rows can be read only
    while it is the current version, except from a copy.
    """

    kinds: ClassVar[tuple[str, ...]]
    pins: ClassVar[tuple[str, ...]] = ("lookup.version", "lookup.timestamp")
    retained: ClassVar[bool] = True
    described: ClassVar[bool] = True
    fleeting: ClassVar[bool] = False
    one_asks: ClassVar[bool] = True
    markers: ClassVar[tuple[str, ...]] = ()
    marker_file: ClassVar[str] = ""
    url_prefixes: tuple[str, ...] = ()
    url_suffixes: tuple[str, ...] = ()
    label: ClassVar[str] = "a table"
    shows_changes = True

    def __init__(self, parts: SourceParts) -> None:
        self._parts = parts

    @classmethod
    def bind(cls, options: LookupOptions, shared: dict[Any, Any]) -> Callable[[SourceParts], VersionSource]:
        """A function that makes the source for reads with these options.

        `shared`: objects that all sources of this process share. A source puts its objects there under keys of its own.
        """
        return cls

    @classmethod
    def open_store(
        cls, options: LookupOptions, open_url: OpenUrl, shared: dict[Any, Any], clock: HostClock, rng: random.Random
    ) -> Store | None:
        """The store of a table whose `path` is a name, e.g. in a catalog of this source; None if `path` is a path or URL, or a name for another source.

        Called before `bind`, with the same `shared`.
        """
        return None

    def kind_of_url(self, url: str) -> str | None:
        """The kind of table that a canonical path shows by its spelling; None if only the store can tell."""
        return self.kinds[0] if url.startswith(self.url_prefixes) or url.endswith(self.url_suffixes) else None

    @classmethod
    def detect_kind(cls, status: FileVersion | Listing) -> str | None:
        """The kind of table at a path, as the store's answer `status` shows it; None if there is no table of this source's kinds."""
        if not isinstance(status, Listing):
            return None
        markers = [marker for marker in cls.markers if marker in status.directories]
        if cls.marker_file and markers:
            urls = status.urls_ending(f"/{cls.marker_file}")
            markers = [marker for marker in markers if f"{status.url}/{marker}/{cls.marker_file}" in urls]
        return cls.kinds[0] if markers else None

    @classmethod
    def is_shown(cls, listing: Listing) -> bool:
        """Whether a directory has files of such a table, so that no other table may be written there."""
        return cls.described and cls.detect_kind(listing) is not None

    @classmethod
    def refuse_tables(cls, listing: Listing, directories: Sequence[str], pattern: str) -> None:
        """Raise TableFormatError if a listing that is to be read as plain files shows a table of this kind.

        `directories`: the directories where a file that matches the glob `pattern` may be. Without a pattern: all directories of the listing.
        """
        return

    @classmethod
    def refuse_files(cls, urls: Sequence[str]) -> None:
        """Raise TableFormatError if one of these plain files belongs to a table of this kind."""
        return

    @classmethod
    def marks_table(cls, ufs: Ufs, marker_url: str) -> bool:
        """Whether there is a directory at `marker_url` (a name in `markers`), and it belongs to a table of this kind. Raises UfsError."""
        return ufs.has_directory(marker_url) and cls.has_own_file(ufs, marker_url)

    @classmethod
    def has_own_file(cls, ufs: Ufs, marker_url: str) -> bool:
        """Whether the directory at `marker_url` has the file that every table of this kind has in it. Other programs may use the directory's name, too."""
        return True

    @abc.abstractmethod
    def current(self, question: Question) -> Answer:
        """The version to read: the table's current one, or the one that the table's options name. Takes one call to the store or catalog.

        Raises UfsNotFoundError if there is no table, NotATableError if what is there cannot be read as a table, VersionGoneError if a version
        that an option names is gone, or another UfsError.
        """

    def candidates(
        self, table: Table, digest: str, newest: float, ask: Callable[[], TableVersion]
    ) -> Sequence[TableVersion]:
        """Versions among which may be the one that a version token names: the current one, which `ask` returns, and earlier ones.

        `digest`, `newest`: what the token says about its version (`TableVersion.digest`, `TableVersion.newest`).
        """
        return [ask()]

    def restore(self, table: Table, metadata: VersionMetadata) -> TableVersion | None:
        """The version that `metadata` describes, from the host's records; None if the records do not have it. Makes no call to the store."""
        return None

    def is_authorised(self, table: Table, version: TableVersion) -> bool:
        """Whether this process may answer from what this host has cached of a version: False if the table's catalog has grants, and has not
        confirmed for this principal a short time ago that it may read this table. Makes no call."""
        return True

    def catalog_id(self, version: TableVersion) -> str | None:
        """The id of a version's table in its catalog, which changes if the table is dropped and created again; None: it has none."""
        return None

    def authorise(self, table: Table, catalog_id: str | None) -> None:  # noqa: B027 # most tables have no catalog
        """Have the table's catalog confirm that this principal may read the table with this `catalog_id`, unless it did so a short time ago.

        Called before a process reads a version that another process has named, after that process asked the catalog about the table. Raises
        UfsPermissionError if the principal may not read the table, UfsNotFoundError if there is none, VersionGoneError if another table has its
        name now, NotSupportedError if the catalog states a condition that is not met, CatalogUnavailableError if it does not answer.
        """

    def check_options(self, options: LookupOptions, kind: str) -> None:
        """Raise OptionError for an option that has no meaning for such a table."""
        self._refuse_pin(options)
        is_set = {
            "lookup.format": options.files.format is not None,
            "lookup.success-file": options.files.success_file,
            "lookup.settle": options.files.settle_s is not None,
            **{key: True for key in sorted(options.explicit) if key.startswith(_OF_FILES)},
        }
        self._refuse(options, [key for key, is_given in is_set.items() if is_given])

    def _refuse_pin(self, options: LookupOptions) -> None:
        for key, pin in options.pins.items():
            if key not in self.pins:
                *others, last = self.pins or ("",)
                choices = f"{', '.join(others)} or {last}" if others else last
                takes = f"takes {choices}" if self.pins else "keeps no versions"
                label = self.label if self.described else "a table of plain files"
                raise OptionError(
                    f"option {key} = {str(pin)!r} is for other tables: {redact('path', options.files.path)} is {label} and {takes}: remove "
                    "the option"
                )

    def _refuse(self, options: LookupOptions, keys: Sequence[str]) -> None:
        if keys:
            redacted_path = redact("path", options.files.path)
            raise OptionError(f"option {keys[0]} has no meaning for {redacted_path}, {self.label}: remove it")

    def detect_format(self, files: Sequence[FileVersion]) -> FileFormatName | None:
        """The format of a version's files."""
        return FileFormatName.PARQUET

    # --- what views show --------------------------------------------------------------------------

    def history(self, table: Table) -> list[dict[str, Any]] | None:
        """The versions that the table's own metadata lists, oldest first, as `lookup.view=versions` shows them; None if it lists none."""
        return None

    def write_ids(self, table: Table, version: TableVersion) -> dict[str, int]:
        """For each file of a version, by URL, the id of the write that put it there; empty for tables without write ids."""
        return {}

    def valid_write_ids(self, version: TableVersion) -> ValidWriteIdList | None:
        """The writes whose rows a version includes; None for tables without write ids."""
        return None

    def details(self, table: Table, version: TableVersion) -> dict[str, Any]:
        """The details that `describe` shows only for tables of this kind."""
        return {}

    # --- writes -----------------------------------------------------------------------------------

    def has_commit(self, url: str, table_id: str, position: int) -> bool:
        """Whether the table at a URL has a commit, as far as this host knows; True for kinds of tables that this package does not write."""
        return True

    def was_here_lately(self, table: Table) -> bool:
        """Whether a table that is missing now was there a short time ago, so that a job may be replacing it."""
        return False

    def lacks_files(self, version: TableVersion) -> bool:
        """Whether a version that was kept while a job writes has files that the job has removed."""
        return False
