"""`CurrentVersions`: which version of a table is current (Alluxio's `get_meta` switch).

UFS: the store is asked once per query. CACHE: this host's last known version is used while it is young enough.
"""

from __future__ import annotations

import functools
import logging

from pyspark_lookup.core.log_events import log_event
from pyspark_lookup.errors import (
    CHANGED_KIND,
    CatalogUnavailableError,
    DamagedFileError,
    NotATableError,
    UfsNotFoundError,
)
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import CacheMode, MetadataSource
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.stores import LOCAL_GRANULE_S, SETTLED_AFTER_S, FileVersion, Listing
from pyspark_lookup.versions.model import Kind, Table, TableVersion
from pyspark_lookup.versions.table_kinds import TableKinds
from pyspark_lookup.versions.version_source import Question, VersionSource

_log = logging.getLogger("pyspark_lookup.metadata")
_SETTLE_WAITS_S = (2 * LOCAL_GRANULE_S, SETTLED_AFTER_S, SETTLED_AFTER_S)  # the clock of a disk has a finer resolution


class CurrentVersions:
    """Asks the store for versions, and this host's records in CACHE mode. Without a disk in `context` nothing is remembered."""

    def __init__(self, kinds: TableKinds, context: HostContext) -> None:
        self._kinds = kinds
        self._host = kinds.host
        self._context = context

    def ask(self, table: Table, patient: bool = True) -> TableVersion:
        """The store's current version: one metadata call, remembered on this host. `patient`: see `ask_since`."""
        return self.ask_since(table, self._context.clock.steady_s(), patient=patient)

    def refresh(self, table: Table) -> TableVersion:
        """The store's current version. If it has none now, for instance because a job writes, the host's last version is used, and that is
        counted."""
        record = self._host.last(table)
        last_version = self._host.files(table, record["digest"]) if record else None
        try:
            return self.ask_since(table, self._context.clock.steady_s(), patient=last_version is None)
        except (NotATableError, UfsNotFoundError, DamagedFileError, CatalogUnavailableError) as problem:
            if last_version is None or (isinstance(problem, CHANGED_KIND) and self._kinds.is_another_kind(table)):
                raise
            self._context.metrics.inc("keptVersionCount")
            self._context.metrics.inc("staleServedCount")
            reason, instead = str(problem), f"keeping version {last_version.digest}"
            log_event(
                _log, logging.WARNING, "fallback", table=redact("path", table.url), reason=reason, instead=instead
            )
            return last_version

    def read_cached(self, table: Table, options: LookupOptions) -> TableVersion | None:
        """The version with which CACHE mode answers, from the store if the host's is too old; None in UFS mode or without a disk."""
        if options.version.source is MetadataSource.UFS or self._context.disk is None:
            return None
        if options.version.sync_interval_s == 0:
            return self.refresh(table)
        fresh = self._find_fresh(table, options)
        if fresh is None:
            with self._host.lock("refresh", table.id, self._kinds.source(table).one_asks):
                fresh = self._find_fresh(table, options)  # the last holder of the lock may have learned it
                if fresh is None:
                    return self.refresh(table)
        self._context.metrics.inc("metadataCacheCount")
        return fresh

    def _find_fresh(self, table: Table, options: LookupOptions) -> TableVersion | None:
        """The host's last version, if it is within the sync interval; else None. Its age counts from when its resolution began."""
        record = self._host.last(table)
        # With a full cache its reload trigger asks the store; in between the host's last version counts, whatever its age.
        interval_s = -1.0 if options.cache.mode is CacheMode.FULL else options.version.sync_interval_s
        if record is None or interval_s is None or interval_s == 0:
            return None
        age_s = self._context.clock.steady_s() - record["started_s"]
        if not self._host.reaches(record.get("log"), table.url, options):
            return None
        # Times of another boot's clock show no age.
        if interval_s > 0 and (record["boot"] != self._context.clock.boot or age_s > interval_s):
            return None
        if options.cache.mode is not CacheMode.FULL:  # a full cache has its own interval
            self._context.metrics.set_gauge("versionAsOf", int(record["wall_s"] * 1000))
        return self._host.files(table, record["digest"])

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

    def learn_newer(self, table: Table, since_s: float) -> TableVersion:
        """The version that this host has learned since `since_s`; if there is none, the store's current one."""
        record = self._host.last(table)
        is_recent = record is not None and record["boot"] == self._context.clock.boot and record["started_s"] >= since_s
        learned_version = self._host.files(table, record["digest"]) if record is not None and is_recent else None
        return self.ask(table) if learned_version is None else learned_version

    def find_recorded(self, table: Table, digest: str) -> TableVersion | None:
        """The version with this digest, if this host has it on record; else None. No store call."""
        return self._host.files(table, digest)

    def find(self, table: Table, digest: str, newest: float) -> TableVersion | None:
        """The version with this digest, from the host's records or else the store; None if the store no longer has it.

        `newest`: its `TableVersion.newest`, which finds a version to whose table only files were added since.
        """
        cached_version = self._host.files(table, digest)
        if cached_version is not None:
            return cached_version
        with self._host.lock("find", digest, self._kinds.source(table).one_asks):
            cached_version = self._host.files(table, digest)  # the last holder of the lock may have found it
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
        """The store's current version, as of `started_s` or later.

        This takes one call to the store, and more if the table must settle, if a job is writing its files, or if its log has new events.
        For `status`, `gone_digest` and `patient` see `Question`.

        `renew`: even if the version has not changed, record that it is still the current one.
        """
        source = self._kinds.source(table)
        if not source.described:
            self._kinds.enclosing.check(table.url, table.kind == Kind.GLOB)
        answer = source.current(Question(table, started_s, status, gone_digest, patient))
        if answer.is_kept:
            return answer.version
        return self._learn(table, answer.version, answer.started_s, renew) or self._learn_again(table, source)

    def _learn(self, table: Table, version: TableVersion, started_s: float, renew: bool) -> TableVersion | None:
        self._context.metrics.inc("resolutionCount")
        self._context.metrics.set_gauge("versionAsOf", int(self._context.clock.wall_s() * 1000))
        return self._host.learn(table, version, started_s, renew=renew)

    def _learn_again(self, table: Table, source: VersionSource) -> TableVersion:
        """The store's current version, asked again because the host has a newer version on record but lacks its files.

        The race: other processes may record still newer versions meanwhile. So it is asked up to three times, and the last answer is used
        without a comparison.
        """
        for last in (False, False, True):
            answer = source.current(Question(table, self._context.clock.steady_s(), patient=False))
            if answer.is_kept:
                break
            learned_version = self._host.learn(table, answer.version, answer.started_s, trust_store=last)
            if learned_version is not None:
                return learned_version
        return answer.version
