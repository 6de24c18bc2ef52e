"""`Resolver`: finds the version of a table that a Spark execution reads.

`TableKinds` says what is at a path: which kind of table, and whether it lies inside another table. `CurrentVersions` says which version is
current. With `lookup.metadata.source` = UFS, each query asks the store once. With CACHE, a query uses the last version that this host knows,
unless it is too old.

The race: tasks of one execution ask at the same time, and may get different versions. The first task on a host records its version, by
exclusive create, and all other tasks read that version.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pyspark_lookup.core.log_events import log_event
from pyspark_lookup.core.metrics import UNSET
from pyspark_lookup.core.threads import run_in_order
from pyspark_lookup.errors import (
    CHANGED_KIND,
    CatalogUnavailableError,
    DamagedFileError,
    NotATableError,
    OptionError,
    TableFormatError,
    UfsError,
    UfsNotFoundError,
    UfsPermissionError,
)
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import CacheMode, FileFormatName, MetadataSource, OnBusy
from pyspark_lookup.options.groups import CsvOptions
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.storage.block_cache import BlockCache
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import key_of
from pyspark_lookup.storage.stores import LOCAL_GRANULE_S, SETTLED_AFTER_S, FileVersion, Listing
from pyspark_lookup.storage.ufs import Ufs
from pyspark_lookup.versions.executions import Execution, Executions, Resolution
from pyspark_lookup.versions.host_versions import HostVersions
from pyspark_lookup.versions.model import (
    Busy,
    Kind,
    Table,
    TableVersion,
    VersionMetadata,
    glob_root,
    is_glob,
    require_metadata,
)
from pyspark_lookup.versions.version_source import Question, SourceParts, VersionSource

_CONCURRENT_LISTS = 16


class TableKinds:
    """Finds the kind of the table at a path, and the `VersionSource` of that kind. `host`: this host's records of versions."""

    def __init__(
        self,
        ufs: Ufs,
        blocks: BlockCache,
        context: HostContext,
        sources: Sequence[Callable[[SourceParts], VersionSource]],
    ) -> None:
        self._ufs = ufs
        self._context = context
        self._literal: dict[str, bool] = {}
        self.host = HostVersions(ufs, context, self._restore, self._has_commit)
        self.sources: list[VersionSource] = []
        parts = SourceParts(ufs, blocks, self.host, context, self.sources)
        self.sources += [make(parts) for make in sources]
        self.detect_kind = parts.detect_kind
        self._by_kind = {kind: source for source in self.sources for kind in source.kinds}
        self.names = tuple(self._by_kind)
        """The names of the kinds of tables. A version token names a kind by its place in this tuple, so all hosts must run the same release."""
        self.enclosing = EnclosingTables(ufs, context, self.sources)

    def name_of_number(self, number: int) -> str:
        """The kind at place `number` of `names`. Raises OptionError if `names` has no such place."""
        if number >= len(self.names):
            raise OptionError(
                f"argument version: the token is for a kind of table (number {number}) that this process does not know: run the same release of "
                "pyspark_lookup on the driver and on all hosts"
            )
        return self.names[number]

    def source(self, table: Table) -> VersionSource:
        """The source of the table's versions."""
        return self._by_kind[table.kind]

    def kind_of_url(self, url: str) -> str | None:
        """The kind of table that a canonical path shows by its spelling; None if only the store can tell."""
        kind = next((kind for source in self.sources if (kind := source.kind_of_url(url)) is not None), None)
        if kind is None and Kind.GLOB in self._by_kind and is_glob(url) and not self.is_literal(url):
            return Kind.GLOB
        return kind

    def is_literal(self, url: str) -> bool:
        """Whether a path with wildcards is the literal name of a file or directory, and so no pattern. Asks the store once in each process."""
        if url not in self._literal:
            try:
                self._ufs.get_status(url)
                self._literal[url] = True
            except (UfsNotFoundError, UfsPermissionError):
                self._literal[url] = False
        return self._literal[url]

    def forget_literal(self, url: str) -> bool:
        """From now on, treat a path with wildcards as a pattern, because the file of this literal name is gone.

        Returns whether the path counted as a literal name before.
        """
        was_literal = self._literal.get(url, False)
        if was_literal:
            self._literal[url] = False
        return was_literal

    def to_table(self, options: LookupOptions, kind: str, version: TableVersion | None = None) -> Table:
        """The table at `options.files.path`, which is known to be of the kind `kind`. Makes no call to the store.

        `version`: a version of the table, whose files show the table's format; None: the format may stay unknown. Raises OptionError for an
        option that has no meaning for a table of this kind.
        """
        if kind not in self._by_kind:
            raise OptionError(
                f"{redact('path', options.files.path)}: this process does not know tables of the kind {kind!r}: run the "
                "same release of pyspark_lookup on the driver and on all hosts"
            )
        self._by_kind[kind].check_options(options, kind)
        return self._table(options, kind, version)

    def _table(self, options: LookupOptions, kind: str, version: TableVersion | None) -> Table:
        source = self._by_kind[kind]
        form = None if source.described else options.files.format
        if form is None and (source.described or version is not None):
            form = source.detect_format(version.files if version is not None else ())
        csv_options = sorted(key for key in options.explicit if key.startswith("lookup.csv."))
        if csv_options and form not in (None, FileFormatName.CSV) and not source.described:
            raise OptionError(
                f"option {csv_options[0]} is for CSV files: {redact('path', options.files.path)} has {form.value} files: remove the option"
            )
        url = self._ufs.url_of(options.files.path)
        busy = Busy(options.files.on_busy is OnBusy.KEEP, options.files.busy_wait_s, options.files.busy_timeout_s)
        csv, declared = (CsvOptions(), None) if source.described else (options.csv, options.files.schema)
        parts = (url, self._ufs.scope, kind, form, options.files.success_file, options.files.settle_s, options.pinned)
        return Table(*parts, busy=busy, csv=csv, declared=declared, retained=source.retained)

    def vanished_kind(self, url: str, options: LookupOptions) -> str | None:
        """The kind of table that was at a path a short time ago, and that an overwrite may be replacing; None if there was no table."""
        if self.kind_of_url(url) is not None or options.pinned is not None:
            return None
        probes = (self._table(options, kind, None) for kind in self._by_kind if kind != Kind.GLOB)
        return next((probe.kind for probe in probes if self.source(probe).was_here_lately(probe)), None)

    def known_kind(self, url: str, options: LookupOptions) -> str | None:
        """The kind of table that was at a path when this host last resolved it; None if the host never did.

        Also None if each query asks the store (UFS) and tables of this kind keep no versions, because the store's answer then shows the kind.
        """
        last = self._last_kind(url, options)
        retained = last is not None and self._by_kind[last].retained
        return last if options.version.source is MetadataSource.CACHE or retained else None

    def is_new(self, url: str, options: LookupOptions) -> bool:
        """Whether only the store can tell what is at a path: the spelling does not show it, and this host has never resolved the path."""
        return self.kind_of_url(url) is None and self._last_kind(url, options) is None

    def _last_kind(self, url: str, options: LookupOptions) -> str | None:
        kind_by_time: dict[tuple[bool, float], str] = {}
        for kind, source in self._by_kind.items():
            if kind == Kind.GLOB or (kind == Kind.FILE and options.files.names_directory):
                continue
            probe = self._table(options if source.retained else options.unpinned, kind, None)
            record = self.host.last(probe) or self.host.last(self._table(options.unpinned, kind, None))
            if record is not None:
                # The steady clock is preferred, because the wall clock may have been set back in the meantime.
                is_same_boot = record["boot"] == self._context.clock.boot
                kind_by_time[is_same_boot, record["started_s" if is_same_boot else "wall_s"]] = kind
        if {Kind.DIRECTORY, Kind.FILE} <= set(kind_by_time.values()) and not url.startswith("file://"):
            return None  # an object store can have a file and a directory of the same name; a slash at the end of the path tells them apart
        return kind_by_time[max(kind_by_time)] if kind_by_time else None

    def forget_kind(self, table: Table) -> bool:
        """Forget the table's last version if there is another kind of table at its path now. Returns whether there is."""
        try:
            if not self.is_another_kind(table):
                return False
        except UfsError:
            return False
        self.host.forget(table)
        return True

    def is_another_kind(self, table: Table) -> bool:
        """Whether the path of a table that is gone now has a table of another kind, such as a file instead of a directory."""
        with contextlib.suppress(UfsNotFoundError):
            by_url = self.kind_of_url(table.url) is not None
            return not by_url and self.detect_kind(self._ufs.get_status(table.url)) != table.kind
        return False

    def is_known_as_another(self, options: LookupOptions, source: VersionSource) -> bool:
        """Whether this host has on record a table at `options.files.path` of a kind that is not one of `source`."""
        others = (kind for kind, other in self._by_kind.items() if other is not source and kind != Kind.GLOB)
        return any(self.host.last(self._table(options.unpinned, kind, None)) is not None for kind in others)

    def history(self, options: LookupOptions) -> list[dict[str, Any]] | None:
        """The versions that the metadata of the table at `options.files.path` lists (see `VersionSource.history`); None if it lists none."""
        url = self._ufs.url_of(options.files.path)
        kind = self.kind_of_url(url) or self._last_kind(url, options)
        with contextlib.suppress(UfsNotFoundError):
            kind = kind or self.detect_kind(self._ufs.get_status(url))
        return None if kind is None else self._by_kind[kind].history(self._table(options, kind, None))

    def lacks_files(self, version: TableVersion) -> bool:
        """Whether a version that was kept while a job writes has files that the job has removed."""
        return any(source.lacks_files(version) for source in self.sources)

    def _restore(self, table: Table, metadata: VersionMetadata) -> TableVersion | None:
        return self.source(table).restore(table, metadata)

    def _has_commit(self, url: str, table_id: str, position: int) -> bool:
        return all(source.has_commit(url, table_id, position) for source in self.sources)


class EnclosingTables:
    """Finds a table inside which a path lies. Each host looks once for each path. `sources`: their `markers` are the directories to look for."""

    def __init__(self, ufs: Ufs, context: HostContext, sources: Sequence[VersionSource]) -> None:
        self._ufs = ufs
        self._context = context
        self._sources = sources
        self._markers = {marker: source for source in sources for marker in source.markers}
        self._checked_urls: set[str] = set()

    def check(self, url: str, glob: bool = False) -> None:
        """Raise TableFormatError if a directory above `url` is a table. `glob`: `url` is a glob."""
        enclosing = self.find(url, glob)
        if enclosing is not None:
            directory, kind = enclosing
            raise TableFormatError(
                f"{redact('path', url)} lies inside {redact('path', directory)}, {kind}: its files may be outdated, or hold deleted "
                f"rows. Read {redact('path', directory)} instead, and limit its rows with lookup.where"
            )

    def find(self, url: str, glob: bool = False) -> tuple[str, str] | None:
        """(the nearest directory above `url` that is a table, words for the kind of this table); None if there is no such directory.

        When this host sees the path for the first time, this makes a call to the store for each directory above the path and each marker. A
        directory that this process may not list counts as no table.
        """
        if url in self._checked_urls:
            return None
        key = key_of("place", self._ufs.scope, url)
        disk = self._context.disk
        if disk is None or disk.get_record("place", key) is None:
            places = [(directory, marker) for directory in _directories_above(url, glob) for marker in self._markers]
            answers = run_in_order(lambda place: self._is_table(*place), places, min(_CONCURRENT_LISTS, len(places)))
            enclosing = [place for place, is_table in zip(places, answers, strict=True) if is_table]
            for directory, marker in enclosing:
                return directory, self._markers[marker].label
            if disk is not None:
                with contextlib.suppress(OSError):
                    # The value is not the URL, because a URL might contain a signature.
                    disk.create_record("place", key, 1)
        self._checked_urls.add(url)
        return None

    def label_of(self, listing: Listing) -> str | None:
        """The words for the kind of table (`VersionSource.label`) that the files in a listing show; None if they show no table."""
        return next((source.label for source in self._sources if source.is_shown(listing)), None)

    def _is_table(self, directory: str, marker: str) -> bool:
        with contextlib.suppress(UfsNotFoundError, UfsPermissionError):
            return self._markers[marker].marks_table(self._ufs, f"{directory}/{marker}")
        return False


def _directories_above(url: str, glob: bool) -> Iterator[str]:
    """The directories above a path, nearest first; for a local path also those that its symbolic links lead to."""
    place = glob_root(url) if glob else url  # the listing of a glob shows the tables below the glob's root
    scheme, _, path = place.partition("://")
    paths = [path]
    if scheme == "file":
        parent, _, name = path.rpartition("/")
        paths += [os.path.realpath(path), f"{os.path.realpath(parent)}/{name}"]
    seen_directories: set[str] = set()
    for directory in paths:
        while "/" in directory:
            directory = directory.rpartition("/")[0]
            if directory not in seen_directories:
                seen_directories.add(directory)
                yield f"{scheme}://{directory}"


_log = logging.getLogger("pyspark_lookup.metadata")
_SETTLE_WAITS_S = (
    2 * LOCAL_GRANULE_S,
    SETTLED_AFTER_S,
    SETTLED_AFTER_S,
)  # the first wait is long enough for files on a local disk


class CurrentVersions:
    """Finds the current version: asks the store, or in CACHE mode this host's records. Without a disk in `context` there are no records."""

    def __init__(self, kinds: TableKinds, context: HostContext) -> None:
        self._kinds = kinds
        self._host = kinds.host
        self._context = context

    def ask(self, table: Table, patient: bool = True) -> TableVersion:
        """The version that is current in the store now, which this host records. `patient`: as in `Question`."""
        return self.ask_since(table, self._context.clock.steady_s(), patient=patient)

    def refresh(self, table: Table, find_fresh: Callable[[], TableVersion | None] | None = None) -> TableVersion:
        """The store's current version, or this host's last version if the store has none now, for instance because a job is writing.

        `find_fresh`: one process of the host asks at a time, and the others wait for what it records: a version that this function returns.
        Metrics count how often the host's last version is returned. Raises the store's error if this host has no version of the table, or if
        there is a table of another kind at the path now.
        """

        def ask() -> TableVersion:
            return self.ask_since(table, self._context.clock.steady_s(), patient=self._last_version(table) is None)

        try:
            is_locked = find_fresh is not None and self._kinds.source(table).one_asks
            with self._host.lock("refresh", table.id, is_locked, pauses=True):
                return (find_fresh and find_fresh()) or ask()
        except (NotATableError, UfsNotFoundError, DamagedFileError, CatalogUnavailableError) as problem:
            last_version = self._last_version(table)
            if last_version is None or (isinstance(problem, CHANGED_KIND) and self._kinds.is_another_kind(table)):
                raise
            if not self._kinds.source(table).is_authorised(table, last_version):
                raise
            self._context.metrics.inc("keptVersionCount")
            self._context.metrics.inc("staleServedCount")
            reason, instead = str(problem), f"keeping version {last_version.digest}"
            log_event(
                _log, logging.WARNING, "fallback", table=redact("path", table.url), reason=reason, instead=instead
            )
            return last_version

    def _last_version(self, table: Table) -> TableVersion | None:
        record = self._host.last(table)
        return self._host.files(table, record["digest"]) if record else None

    def read_cached(self, table: Table, options: LookupOptions) -> TableVersion | None:
        """The current version in CACHE mode: the last one that this host knows, or the store's if the host's is too old.

        None in UFS mode, and without a disk.
        """
        if options.version.source is MetadataSource.UFS or self._context.disk is None:
            return None
        if options.version.sync_interval_s == 0:
            return self.refresh(table)
        find_fresh = functools.partial(self._count_fresh, table, options)
        return find_fresh() or self.refresh(table, find_fresh)

    def _count_fresh(self, table: Table, options: LookupOptions) -> TableVersion | None:
        fresh = self._find_fresh(table, options)
        if fresh is not None:
            self._context.metrics.inc("metadataCacheCount")
        return fresh

    def _find_fresh(self, table: Table, options: LookupOptions) -> TableVersion | None:
        """The host's last version, if its resolution began less than the sync interval ago; otherwise None."""
        record = self._host.last(table)
        # With a full cache, the reload trigger asks the store. Between reloads the host's last version counts, whatever its age.
        interval_s = -1.0 if options.cache.mode is CacheMode.FULL else options.version.sync_interval_s
        if record is None or interval_s is None or interval_s == 0:
            return None
        age_s = self._context.clock.steady_s() - record["started_s"]
        if not self._host.reaches(record.get("log"), table.url, options):
            return None
        # The steady clock starts again with the machine, so a time from before the last start shows no age.
        if interval_s > 0 and (record["boot"] != self._context.clock.boot or age_s > interval_s):
            return None
        version = self._host.files(table, record["digest"])
        if version is None or not self._kinds.source(table).is_authorised(table, version):
            return None
        if options.cache.mode is not CacheMode.FULL:  # a full cache has its own interval
            self._context.metrics.set_gauge("versionAsOf", int(record["wall_s"] * 1000))
        return version

    def settle(self, table: Table, version: TableVersion) -> TableVersion:
        """The current version, after a wait until its files are so old that a later change gives them another identity.

        `version`: the current version, which was just resolved. If the files keep changing, the wait ends after about 4 seconds.
        """
        for wait_s in _SETTLE_WAITS_S:
            if version.is_settled:
                break
            self._context.clock.sleep(wait_s)
            version = self.ask(table)
        return version

    def learn_newer(self, table: Table, since_s: float) -> TableVersion:
        """The version that this host has recorded since `since_s` (steady clock); if there is none, the store's current version."""
        record = self._host.last(table)
        is_recent = record is not None and record["boot"] == self._context.clock.boot and record["started_s"] >= since_s
        learned_version = self._host.files(table, record["digest"]) if record is not None and is_recent else None
        if learned_version is None or not self._kinds.source(table).is_authorised(table, learned_version):
            return self.ask(table)
        return learned_version

    def find_recorded(self, table: Table, digest: str) -> TableVersion | None:
        """The version with the digest `digest`, if this host has it on record; otherwise None. Makes no call to the store."""
        return self._host.files(table, digest)

    def find(self, table: Table, digest: str, newest: float) -> TableVersion | None:
        """The version with the digest `digest`, from the host's records or else from the store; None if the store no longer has this version.

        `newest`: the version's `TableVersion.newest`, by which the version is found even if files were added to the table since.
        """
        cached_version = self._host.files(table, digest)
        if cached_version is not None:
            return cached_version
        with self._host.lock("find", digest, self._kinds.source(table).one_asks):
            # The process that had the lock before may have recorded the version.
            cached_version = self._host.files(table, digest)
            if cached_version is not None:
                return cached_version
            ask = functools.partial(self.ask_since, table, self._context.clock.steady_s(), patient=False)
            states = self._kinds.source(table).candidates(table, digest, newest, ask)
            version = next((state for state in states if state.digest == digest), None)
            if version is not None:
                self._host.remember(table, version)
            return version

    def ask_since(
        self,
        table: Table,
        started_s: float,
        status: FileVersion | Listing | None = None,
        gone_digest: str | None = None,
        patient: bool = True,
        renew: bool = True,
    ) -> TableVersion:
        """The store's current version at `started_s` (steady clock) or later, which this host records.

        Takes one call to the store. Takes more calls if the table's files are still new, if a job is writing them, or if the table's log has
        new events. `status`, `gone_digest`, `patient`: as in `Question`. `renew`: even if the version has not changed, record that it is still
        the current one.
        """
        source = self._kinds.source(table)
        if not source.described:
            self._kinds.enclosing.check(table.url, table.kind == Kind.GLOB)
        answer = source.current(Question(table, started_s, status, gone_digest, patient))
        if answer.is_kept:
            return answer.version
        learned = self._learn(table, answer.version, answer.started_s, renew) or self._learn_again(table, source)
        if learned is answer.version:
            return learned
        # The race: a process of another principal may have recorded a newer version, of another table that its catalog has under this name.
        ids = {version.metadata.table_id for version in (learned, answer.version) if version.metadata is not None}
        return answer.version if len(ids) > 1 and not source.is_authorised(table, learned) else learned

    def _learn(self, table: Table, version: TableVersion, started_s: float, renew: bool) -> TableVersion | None:
        self._context.metrics.inc("resolutionCount")
        self._context.metrics.set_gauge("versionAsOf", int(self._context.clock.wall_s() * 1000))
        return self._host.learn(table, version, started_s, renew=renew)

    def _learn_again(self, table: Table, source: VersionSource) -> TableVersion:
        """The store's current version, asked again: the host has a newer version on record than the store's last answer, but not its files.

        The race: other processes may record still newer versions meanwhile. So the store is asked up to three times, and its third answer is
        used without a comparison.
        """
        for last in (False, False, True):
            answer = source.current(Question(table, self._context.clock.steady_s(), patient=False))
            if answer.is_kept:
                break
            learned_version = self._host.learn(table, answer.version, answer.started_s, trust_store=last)
            if learned_version is not None:
                return learned_version
        return answer.version


class Resolver:
    """Finds, for the reads of this host, the table at a path and the version to read. Without a disk in `context` nothing is recorded."""

    def __init__(self, kinds: TableKinds, ufs: Ufs, context: HostContext) -> None:
        self._ufs = ufs
        self._context = context
        self._served_digests: dict[str, str] = {}
        self._has_discovered = False
        self.kinds = kinds
        self.host = kinds.host
        self.current_versions = CurrentVersions(kinds, context)
        if context.disk is not None:
            self._executions = Executions(self.host, context.disk, context)

    def discover(self, options: LookupOptions, patient: bool = True) -> tuple[Table, TableVersion]:
        """(the table at `options.files.path`, its current version). Takes one call to the store (see `Ufs.get_status`).

        In CACHE mode this takes no call if this host knows the table and the version that it knows is young enough. A path that ends with a
        slash names a directory, even if an object has the same name without the slash.

        The race: all workers of a new host begin at once. Under a lock, one of them reads the table's log or metadata; the others then find
        its records.
        """
        url = self._ufs.url_of(options.files.path)
        is_first = not self._has_discovered and self.kinds.is_new(url, options)
        self._has_discovered = True
        with self.host.lock("discover", url, is_first):
            return self._discover(options, url, patient)

    def _discover(self, options: LookupOptions, url: str, patient: bool) -> tuple[Table, TableVersion]:
        status: FileVersion | Listing | None = None
        url_kind = self.kinds.kind_of_url(url)
        kind = url_kind or self.kinds.known_kind(url, options)
        started_s = self._context.clock.steady_s()
        # In CACHE mode, the age of a version counts from the last time that the store was asked, so this time must be recorded.
        renew = options.version.source is MetadataSource.CACHE
        if kind is not None and url_kind is None:
            # There may be another kind of table at the path by now, or none. So an option that does not fit the known kind is not an error yet.
            with contextlib.suppress(*CHANGED_KIND, OptionError):
                probe = self.kinds.to_table(options, kind)
                version = self.current_versions.read_cached(probe, options) or self.current_versions.ask_since(
                    probe, started_s, renew=renew
                )
                return self.kinds.to_table(options, kind, version), version
            kind = None
        if kind is None:
            try:
                status = self._ufs.list_status(url) if options.files.names_directory else self._ufs.get_status(url)
                kind = self.kinds.detect_kind(status)
            except UfsNotFoundError:
                # The path counted as a literal name, but the file of this name is gone: now the path is a pattern.
                if self.kinds.forget_literal(url):
                    return self._discover(options, url, patient)
                kind = self.kinds.vanished_kind(url, options)
                if kind is None:
                    raise
        probe = self.kinds.to_table(options, kind)
        cached_version = self.current_versions.read_cached(probe, options) if status is None else None
        version = cached_version or self.current_versions.ask_since(
            probe, started_s, status, patient=patient, renew=renew
        )
        return self.kinds.to_table(options, kind, version), version

    def resolve(
        self,
        table: Table,
        options: LookupOptions,
        execution: Execution | None,
        current: Callable[[], TableVersion] | None = None,
    ) -> Resolution:
        """The version of `table` that `execution` reads (None: a read that belongs to no execution).

        `current`: returns the current version; None: the host's records or the store are asked. Takes at most one call to the store, and no
        call if the execution's version is on record, or if in CACHE mode the host's version is young enough. Raises NotATableError or UfsError
        if there is no version to read.
        """
        resolution = self._resolve(table, options, execution, current)
        if not resolution.decided_here:
            source = self.kinds.source(table)
            source.authorise(table, source.catalog_id(resolution.version))
        if table.retained:
            require_metadata(table, resolution.version)
        self.count_served(table, resolution.version)
        return resolution

    def count_served(self, table: Table, version: TableVersion) -> None:
        """Add 1 to the metric `versionServedCount` before a read of a version, unless this process's last read of the table had the same version."""
        if self._served_digests.get(table.id) != version.digest:
            self._served_digests[table.id] = version.digest
            self._context.metrics.inc("versionServedCount")
        self._context.metrics.set_gauge("tableVersion", UNSET if version.number is None else version.number)

    def _resolve(
        self,
        table: Table,
        options: LookupOptions,
        execution: Execution | None,
        current: Callable[[], TableVersion] | None,
    ) -> Resolution:
        if execution is None or self._context.disk is None:
            return Resolution(self._current(table, options, current), True)
        ask = functools.partial(self._current, table, options, current)
        return self._executions.resolve(table, execution, ask, self.kinds.source(table).one_asks)

    def resolve_again(
        self, table: Table, options: LookupOptions, execution: Execution | None, gone_digest: str, settled: bool = False
    ) -> TableVersion:
        """The store's current version, to be read instead of the one with `gone_digest`. From now on, the execution reads this version.

        `settled`: wait until its files are old enough, as `CurrentVersions.settle` does.
        """
        self._context.metrics.inc("versionGoneCount")
        log_event(
            _log,
            logging.WARNING,
            "version-gone",
            table=redact("path", table.url),
            version=gone_digest,
            instead="resolving again",
        )
        if execution is not None and self._context.disk is not None:
            return self._executions.replace(
                table, execution, gone_digest, lambda: self._replacement(table, gone_digest, settled)
            )
        return self._replacement(table, gone_digest, settled)

    def _replacement(self, table: Table, gone_digest: str, settled: bool) -> TableVersion:
        version = self.current_versions.ask_since(table, self._context.clock.steady_s(), gone_digest=gone_digest)
        return self.current_versions.settle(table, version) if settled else version

    def _current(
        self, table: Table, options: LookupOptions, current: Callable[[], TableVersion] | None
    ) -> TableVersion:
        if current is not None:
            return current()
        if options.version.source is MetadataSource.UFS:
            return self.current_versions.ask_since(table, self._context.clock.steady_s(), renew=False)
        return self.current_versions.read_cached(table, options) or self.current_versions.ask_since(
            table, self._context.clock.steady_s()
        )

    def count_asked(self, version: TableVersion) -> None:
        """Add the size of a version to the metric `resolvedBytes`: what a query would read without a cache. Call this once for each query."""
        self._context.metrics.inc("resolvedBytes", version.bytes)
