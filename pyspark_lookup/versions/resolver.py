"""`Resolver`: finds the version of a table that an execution reads (Alluxio's `get_meta` switch).

UFS: the store is asked once per query. CACHE: this host's last known version is used while it is young enough. The race: tasks of one
execution resolve at the same time. The first one on a host records its version, by exclusive create, and all others take that: one version
per execution.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from pyspark_lookup.core.log_events import log_event
from pyspark_lookup.core.metrics import UNSET
from pyspark_lookup.errors import (
    CHANGED_KIND,
    CatalogUnavailableError,
    DamagedFileError,
    NotATableError,
    OptionError,
    UfsError,
    UfsNotFoundError,
    UfsPermissionError,
)
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import CacheMode, FileFormatName, MetadataSource, OnBusy
from pyspark_lookup.options.file_options import CsvOptions
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.storage.block_cache import BlockCache
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.stores import LOCAL_GRANULE_S, SETTLED_AFTER_S, FileVersion, Listing
from pyspark_lookup.storage.ufs import Ufs
from pyspark_lookup.versions.enclosing import EnclosingTables
from pyspark_lookup.versions.executions import Execution, Executions, Resolution
from pyspark_lookup.versions.host_versions import HostVersions
from pyspark_lookup.versions.model import Busy, Kind, Table, TableVersion, VersionMetadata, require_metadata
from pyspark_lookup.versions.version_source import Question, SourceParts, VersionSource

_log = logging.getLogger("pyspark_lookup.metadata")
_SETTLE_WAITS_S = (2 * LOCAL_GRANULE_S, SETTLED_AFTER_S, SETTLED_AFTER_S)  # the clock of a disk has a finer resolution


class Resolver:
    """Resolves versions of tables on this host. Without a disk in `context` nothing is remembered. `sources`: the kinds of tables."""

    def __init__(
        self,
        ufs: Ufs,
        blocks: BlockCache,
        context: HostContext,
        sources: Sequence[Callable[[SourceParts], VersionSource]],
    ) -> None:
        self._ufs = ufs
        self._context = context
        self._served_digests: dict[str, str] = {}
        self._literal: dict[str, bool] = {}
        self.host = HostVersions(ufs, context, self._restore, self._has_commit)
        self.sources: list[VersionSource] = []
        parts = SourceParts(ufs, blocks, self.host, context, self.sources)
        self.sources += [make(parts) for make in sources]
        self.detect_kind = parts.detect_kind
        self._by_kind = {kind: source for source in self.sources for kind in source.kinds}
        self.enclosing = EnclosingTables(ufs, context, self.sources)
        if context.disk is not None:
            self._executions = Executions(self.host, context.disk, context)

    def source(self, table: Table) -> VersionSource:
        """The source of the table's versions."""
        return self._by_kind[table.kind]

    def _restore(self, table: Table, metadata: VersionMetadata) -> TableVersion | None:
        return self.source(table).restore(table, metadata)

    def _has_commit(self, url: str, table_id: str, position: int) -> bool:
        return all(source.has_commit(url, table_id, position) for source in self.sources)

    def lacks_files(self, version: TableVersion) -> bool:
        """Whether a version that was kept while a job writes has files that the job has removed."""
        return any(source.lacks_files(version) for source in self.sources)

    # --- planning: what is at this path? ----------------------------------------------------------

    def discover(self, options: LookupOptions, patient: bool = True) -> tuple[Table, TableVersion]:
        """The table that a path names and its current version: one metadata call (see `Ufs.get_status`).

        In CACHE mode there is none for a table that this host knows and whose version is young enough. A path that ends with a slash names
        a directory, even if an object has its name.
        """
        url = self._ufs.url_of(options.files.path)
        status: FileVersion | Listing | None = None
        url_kind = self.kind_of_url(url)
        kind = url_kind or self._known_kind(url, options)
        started_s = self._context.clock.steady_s()
        # In CACHE mode a version's age counts from when the store was last asked.
        renew = options.version.source is MetadataSource.CACHE
        if kind is not None and url_kind is None:
            # The path may be of another kind by now, or gone, so an option that does not fit is not an error before the store was asked.
            with contextlib.suppress(*CHANGED_KIND, OptionError):
                probe = self.to_table(options, kind)
                version = self._read_cached(probe, options) or self._ask(probe, started_s, renew=renew)
                return self.to_table(options, kind, version), version
            kind = None
        if kind is None:
            try:
                status = self._ufs.list_status(url) if options.files.names_directory else self._ufs.get_status(url)
                kind = self.detect_kind(status)
            except UfsNotFoundError:
                # The file with that literal name is gone, so the path is now a pattern.
                if self._literal.pop(url, False):
                    self._literal[url] = False
                    return self.discover(options, patient)
                kind = self._vanished_kind(url, options)
                if kind is None:
                    raise
        probe = self.to_table(options, kind)
        cached_version = self._read_cached(probe, options) if status is None else None
        version = cached_version or self._ask(probe, started_s, status, patient=patient, renew=renew)
        return self.to_table(options, kind, version), version

    def kind_of_url(self, url: str) -> str | None:
        """The kind of table that a canonical path itself shows; None if only the store can tell."""
        kind = next((kind for source in self.sources if (kind := source.kind_of_url(url)) is not None), None)
        return None if kind == Kind.GLOB and self.is_literal(url) else kind

    def is_literal(self, url: str) -> bool:
        """Whether a path with wildcards is the literal name of a file or directory, and so not a pattern. One call, once in a process."""
        if url not in self._literal:
            try:
                self._ufs.get_status(url)
                self._literal[url] = True
            except (UfsNotFoundError, UfsPermissionError):
                self._literal[url] = False
        return self._literal[url]

    def to_table(self, options: LookupOptions, kind: str, version: TableVersion | None = None) -> Table:
        """The table at `options.path`, which is known to be of this kind; with its format if a version is given. No store call.

        Raises OptionError for an option that has no meaning for such a table.
        """
        if kind not in self._by_kind:
            raise OptionError(
                f"{redact('path', options.files.path)}: this process has no version source for tables of kind {kind!r}"
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
                f"option {csv_options[0]} is for CSV files: {redact('path', options.files.path)} holds {form.value} files: remove it"
            )
        url = self._ufs.url_of(options.files.path)
        busy = Busy(options.files.on_busy is OnBusy.KEEP, options.files.busy_wait_s, options.files.busy_timeout_s)
        csv, declared = (CsvOptions(), None) if source.described else (options.csv, options.files.schema)
        parts = (url, self._ufs.scope, kind, form, options.files.success_file, options.files.settle_s, options.pinned)
        return Table(*parts, busy=busy, csv=csv, declared=declared, retained=source.retained)

    def _vanished_kind(self, url: str, options: LookupOptions) -> str | None:
        """The kind of table that was at a path a while ago: an overwrite may have removed it and not begun to write. None if there was none."""
        if self.kind_of_url(url) is not None or options.pinned is not None:
            return None
        probes = (self._table(options, kind, None) for kind in self._by_kind if kind != Kind.GLOB)
        return next((probe.kind for probe in probes if self.source(probe).was_here_lately(probe)), None)

    def _known_kind(self, url: str, options: LookupOptions) -> str | None:
        """The kind that the path had when this host last resolved it, in CACHE mode or for a table that keeps versions; else None."""
        last = self._last_kind(url, options)
        retained = last is not None and self._by_kind[last].retained
        return last if options.version.source is MetadataSource.CACHE or retained else None

    def _last_kind(self, url: str, options: LookupOptions) -> str | None:
        kind_by_time: dict[tuple[bool, float], str] = {}
        for kind, source in self._by_kind.items():
            if kind == Kind.GLOB or (kind == Kind.FILE and options.files.names_directory):
                continue
            probe = self._table(options if source.retained else options.unpinned, kind, None)
            record = self.host.last(probe) or self.host.last(self._table(options.unpinned, kind, None))
            if record is not None:
                # The wall clock may have been set back in between.
                is_same_boot = record["boot"] == self._context.clock.boot
                kind_by_time[is_same_boot, record["started_s" if is_same_boot else "wall_s"]] = kind
        if {Kind.DIRECTORY, Kind.FILE} <= set(kind_by_time.values()) and not url.startswith("file://"):
            return None  # an object store can have both, and the other spelling of the path, with a slash, may name one of them
        return kind_by_time[max(kind_by_time)] if kind_by_time else None

    # --- reading: which version does this execution see? ------------------------------------------

    def resolve(
        self,
        table: Table,
        options: LookupOptions,
        execution: Execution | None,
        current: Callable[[], TableVersion] | None = None,
    ) -> Resolution:
        """The version of `table` that `execution` reads (None: an execution of its own).

        `current` returns the current version; None: it is taken from the host or the store. At most one metadata call; none if the
        execution's version is on record or CACHE mode can answer. Raises NotATableError subclasses or UfsError if there is no version to
        read.
        """
        resolution = self._resolve(table, options, execution, current)
        if table.retained:
            require_metadata(table, resolution.version)
        self.count_served(table, resolution.version)
        return resolution

    def count_served(self, table: Table, version: TableVersion) -> None:
        """Count a version whose rows are about to be read, unless it is the one that was read last of this table."""
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
        return self._executions.resolve(table, execution, ask, self.source(table).one_asks)

    def resolve_again(
        self, table: Table, options: LookupOptions, execution: Execution | None, gone_digest: str, settled: bool = False
    ) -> TableVersion:
        """The version that replaces the one of `gone_digest`, from the store; it becomes the execution's version.

        `settled`: wait until its files are so old that a later change gives them another identity, unless they keep changing.
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
        version = self._ask(table, self._context.clock.steady_s(), gone_digest=gone_digest)
        return self.settle(table, version) if settled else version

    def ask(self, table: Table, patient: bool = True) -> TableVersion:
        """The store's current version: one metadata call, remembered on this host. `patient`: see `_ask`."""
        return self._ask(table, self._context.clock.steady_s(), patient=patient)

    def now_s(self) -> float:
        """The time on the clock that orders resolutions."""
        return self._context.clock.steady_s()

    def learn_newer(self, table: Table, since_s: float) -> TableVersion:
        """The version that this host has learned since `since_s`; if there is none, the store's current one."""
        record = self.host.last(table)
        is_recent = record is not None and record["boot"] == self._context.clock.boot and record["started_s"] >= since_s
        learned_version = self.host.files(table, record["digest"]) if record is not None and is_recent else None
        return self.ask(table) if learned_version is None else learned_version

    def find_recorded(self, table: Table, digest: str) -> TableVersion | None:
        """The version of that digest, if this host has it on record; else None. No store call."""
        return self.host.files(table, digest)

    def find(self, table: Table, digest: str, newest: float) -> TableVersion | None:
        """The version of that digest, from the host's records or else the store; None if the store no longer has it.

        `newest`: its `TableVersion.newest`, which finds a version to whose table only files were added since.
        """
        cached_version = self.host.files(table, digest)
        if cached_version is not None:
            return cached_version
        with self.host.lock("find", digest, self.source(table).one_asks):
            cached_version = self.host.files(table, digest)  # the last holder of the lock may have found it
            if cached_version is not None:
                return cached_version
            ask = functools.partial(self._ask, table, self._context.clock.steady_s(), patient=False)
            states = self.source(table).candidates(table, digest, newest, ask)
            version = next((state for state in states if state.digest == digest), None)
            if version is not None:
                self.host.remember(table, version)
            return version

    def settle(self, table: Table, version: TableVersion) -> TableVersion:
        """The current version, once its files are so old that a later change gives them another identity. Gives up waiting if they keep
        changing.

        `version`: the current one, just resolved.
        """
        for wait_s in _SETTLE_WAITS_S:
            if all(file.settled for file in version.files):
                break
            self._context.clock.sleep(wait_s)
            version = self.ask(table)
        return version

    def _current(
        self, table: Table, options: LookupOptions, current: Callable[[], TableVersion] | None
    ) -> TableVersion:
        if current is not None:
            return current()
        if options.version.source is MetadataSource.UFS:
            return self._ask(table, self._context.clock.steady_s(), renew=False)
        return self._read_cached(table, options) or self._ask(table, self._context.clock.steady_s())

    def count_asked(self, version: TableVersion) -> None:
        """Count the bytes of a query's version, which the query would read without a cache. Called once per query."""
        self._context.metrics.inc("resolvedBytes", version.bytes)

    # --- CACHE mode -------------------------------------------------------------------------------

    def _read_cached(self, table: Table, options: LookupOptions) -> TableVersion | None:
        """The version with which CACHE mode answers, from the store if the host's is too old; None in UFS mode or without a disk."""
        if options.version.source is MetadataSource.UFS or self._context.disk is None:
            return None
        if options.version.sync_interval_s == 0:
            return self.refresh(table)
        fresh = self._find_fresh(table, options)
        if fresh is None:
            with self.host.lock("refresh", table.id, self.source(table).one_asks):
                fresh = self._find_fresh(table, options)  # the last holder of the lock may have learned it
                if fresh is None:
                    return self.refresh(table)
        self._context.metrics.inc("metadataCacheCount")
        return fresh

    def _find_fresh(self, table: Table, options: LookupOptions) -> TableVersion | None:
        """The host's last version, if it is within the sync interval; else None. Its age counts from when its resolution began."""
        record = self.host.last(table)
        # With a full cache its reload trigger asks the store; in between the host's last version counts, whatever its age.
        interval_s = -1.0 if options.cache.mode is CacheMode.FULL else options.version.sync_interval_s
        if record is None or interval_s is None or interval_s == 0:
            return None
        age_s = self._context.clock.steady_s() - record["started_s"]
        if not self.host.reaches(record.get("log"), table.url, options):
            return None
        # Times of another boot's clock show no age.
        if interval_s > 0 and (record["boot"] != self._context.clock.boot or age_s > interval_s):
            return None
        if options.cache.mode is not CacheMode.FULL:  # a full cache has its own interval
            self._context.metrics.set_gauge("versionAsOf", int(record["wall_s"] * 1000))
        return self.host.files(table, record["digest"])

    def refresh(self, table: Table) -> TableVersion:
        """The store's current version. If it has none now, for instance because a job writes, the host's last version is used, and that is
        counted."""
        record = self.host.last(table)
        last_version = self.host.files(table, record["digest"]) if record else None
        try:
            return self._ask(table, self._context.clock.steady_s(), patient=last_version is None)
        except (NotATableError, UfsNotFoundError, DamagedFileError, CatalogUnavailableError) as problem:
            if last_version is None or (isinstance(problem, CHANGED_KIND) and self._is_another_kind(table)):
                raise
            self._context.metrics.inc("keptVersionCount")
            self._context.metrics.inc("staleServedCount")
            reason, instead = str(problem), f"keeping version {last_version.digest}"
            log_event(
                _log, logging.WARNING, "fallback", table=redact("path", table.url), reason=reason, instead=instead
            )
            return last_version

    def forget_kind(self, table: Table) -> bool:
        """Forget the table if its path has become another kind of table. Returns whether it has."""
        try:
            if not self._is_another_kind(table):
                return False
        except UfsError:
            return False
        self.host.forget(table)
        return True

    def _is_another_kind(self, table: Table) -> bool:
        """Whether the path of a table that is gone is now of another kind: a file, a directory or another kind of table."""
        with contextlib.suppress(UfsNotFoundError):
            by_url = self.kind_of_url(table.url) is not None
            return not by_url and self.detect_kind(self._ufs.get_status(table.url)) != table.kind
        return False

    # --- the store --------------------------------------------------------------------------------

    def _ask(
        self,
        table: Table,
        started_s: float,
        status: FileVersion | Listing | None = None,
        gone_digest: str | None = None,
        patient: bool = True,
        renew: bool = True,
    ) -> TableVersion:
        """The store's current version. One call (see `Question`), or more while it settles or a job writes, or for new events of a log.

        `renew`: even if the version has not changed, record that it is still the current one.
        """
        source = self.source(table)
        if not source.described:
            self.enclosing.check(table.url, table.kind == Kind.GLOB)
        answer = source.current(Question(table, started_s, status, gone_digest, patient))
        if answer.is_kept:
            return answer.version
        return self._learn(table, answer.version, answer.started_s, renew) or self._learn_again(table, source)

    def _learn(self, table: Table, version: TableVersion, started_s: float, renew: bool) -> TableVersion | None:
        self._context.metrics.inc("resolutionCount")
        self._context.metrics.set_gauge("versionAsOf", int(self._context.clock.wall_s() * 1000))
        return self.host.learn(table, version, started_s, renew=renew)

    def _learn_again(self, table: Table, source: VersionSource) -> TableVersion:
        """The store's current version, asked again because the host has a newer version on record but lacks its files.

        The race: other processes may record still newer versions meanwhile. So it is asked up to three times, and the last answer is used
        without a comparison.
        """
        for last in (False, False, True):
            answer = source.current(Question(table, self._context.clock.steady_s(), patient=False))
            if answer.is_kept:
                break
            learned_version = self.host.learn(table, answer.version, answer.started_s, trust_store=last)
            if learned_version is not None:
                return learned_version
        return answer.version

    # --- what the host remembers of a path ----------------------------------------------------------

    def is_known_as_another(self, options: LookupOptions, source: VersionSource) -> bool:
        """Whether this host has known a table of another kind than the source's at `options.path`."""
        others = (kind for kind, other in self._by_kind.items() if other is not source and kind != Kind.GLOB)
        return any(self.host.last(self._table(options.unpinned, kind, None)) is not None for kind in others)

    def history(self, options: LookupOptions) -> list[dict[str, Any]] | None:
        """The versions that the table at `options.path` lists itself (see `VersionSource.history`); None if it has no list."""
        url = self._ufs.url_of(options.files.path)
        kind = self.kind_of_url(url) or self._last_kind(url, options)
        with contextlib.suppress(UfsNotFoundError):
            kind = kind or self.detect_kind(self._ufs.get_status(url))
        return None if kind is None else self._by_kind[kind].history(self._table(options, kind, None))
