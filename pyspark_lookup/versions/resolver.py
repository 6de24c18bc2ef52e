"""`Resolver`: finds the version of a table that an execution reads.

The race: tasks of one execution resolve at the same time. The first one on a host records its version, by exclusive create, and all
others take that: one version per execution.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable

from pyspark_lookup.core.log_events import log_event
from pyspark_lookup.core.metrics import UNSET
from pyspark_lookup.errors import (
    CHANGED_KIND,
    OptionError,
    UfsNotFoundError,
)
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import MetadataSource
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.stores import FileVersion, Listing
from pyspark_lookup.storage.ufs import Ufs
from pyspark_lookup.versions.current_versions import CurrentVersions
from pyspark_lookup.versions.executions import Execution, Executions, Resolution
from pyspark_lookup.versions.model import Table, TableVersion, require_metadata
from pyspark_lookup.versions.table_kinds import TableKinds

_log = logging.getLogger("pyspark_lookup.metadata")


class Resolver:
    """Resolves versions of tables on this host. Without a disk in `context` nothing is remembered."""

    def __init__(self, kinds: TableKinds, ufs: Ufs, context: HostContext) -> None:
        self._ufs = ufs
        self._context = context
        self._served_digests: dict[str, str] = {}
        self.kinds = kinds
        self.host = kinds.host
        self.current_versions = CurrentVersions(kinds, context)
        if context.disk is not None:
            self._executions = Executions(self.host, context.disk, context)

    def discover(self, options: LookupOptions, patient: bool = True) -> tuple[Table, TableVersion]:
        """The table that a path names and its current version: one metadata call (see `Ufs.get_status`).

        In CACHE mode there is none for a table that this host knows and whose version is young enough. A path that ends with a slash names
        a directory, even if an object has its name.
        """
        url = self._ufs.url_of(options.files.path)
        status: FileVersion | Listing | None = None
        url_kind = self.kinds.kind_of_url(url)
        kind = url_kind or self.kinds.known_kind(url, options)
        started_s = self._context.clock.steady_s()
        # In CACHE mode a version's age counts from when the store was last asked.
        renew = options.version.source is MetadataSource.CACHE
        if kind is not None and url_kind is None:
            # The path may be of another kind by now, or gone, so an option that does not fit is not an error before the store was asked.
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
                # The file with that literal name is gone, so the path is now a pattern.
                if self.kinds.forget_literal(url):
                    return self.discover(options, patient)
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
        return self._executions.resolve(table, execution, ask, self.kinds.source(table).one_asks)

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
        """Count the bytes of a query's version, which the query would read without a cache. Called once per query."""
        self._context.metrics.inc("resolvedBytes", version.bytes)
