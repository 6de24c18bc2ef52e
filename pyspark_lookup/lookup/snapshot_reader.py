"""`SnapshotReader`: which version a query takes, and the snapshot that answers it where there is a full cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa

from pyspark_lookup.cache.full.full_cache import FullCache
from pyspark_lookup.cache.full.registry import FullTables
from pyspark_lookup.cache.full.snapshot import Snapshot
from pyspark_lookup.cache.full.snapshot_scan import snapshot_batches
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.lookup.plan import ReadPlan
from pyspark_lookup.lookup.version_reader import VersionReader
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import MetadataSource
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.scan.open_file import Slice
from pyspark_lookup.versions.executions import Execution, Resolution
from pyspark_lookup.versions.model import Table, TableVersion
from pyspark_lookup.versions.resolver import Resolver


class SnapshotReader:
    """The full caches of one table reference on this host, and what queries read from them."""

    def __init__(
        self, resolver: Resolver, versions: VersionReader, fulls: FullTables, metrics: CacheMetricGroup
    ) -> None:
        self._resolver = resolver
        self._versions = versions
        self._fulls = fulls
        self._metrics = metrics

    def resolve(
        self, plan: ReadPlan, execution: Execution | None, version: TableVersion | None = None, exact: bool = False
    ) -> tuple[Resolution, Snapshot | None]:
        """The version that `execution` reads, and its snapshot if there is one to read it from.

        `version`: the current one, if the caller has just resolved it (a full cache in CACHE mode has its own). `exact`: the caller
        reads only parts of its files.
        """
        resolution, snapshot = self._resolve(plan, execution, version, exact)
        if version is None and resolution.decided_here:
            self._resolver.count_asked(resolution.version)
        return resolution, snapshot

    def _resolve(
        self, plan: ReadPlan, execution: Execution | None, version: TableVersion | None, exact: bool
    ) -> tuple[Resolution, Snapshot | None]:
        table, options = plan.table, plan.options
        full = self._fulls.get_cache(table, options)
        if full is not None and options.metadata_source is MetadataSource.CACHE:
            latest = self.current(table, options)
            if latest is not None:
                served_version, snapshot = latest
                resolution = self._resolver.resolve(table, options, execution, lambda: served_version)
                if resolution.version.digest == served_version.digest:
                    return resolution, self.covering(plan, snapshot)
                return resolution, self.find(plan, resolution.version, exact)
            # What this host knows of the table may be as old as its last reload, or older.
            current: Callable[[], TableVersion] | None = functools.partial(self._resolver.refresh, table)
        else:
            current = None
        if version is not None:
            resolution = Resolution(version, True)
        else:
            resolution = self._resolver.resolve(table, options, execution, current)
        return resolution, self.find(plan, resolution.version, exact)

    def current(self, table: Table, options: LookupOptions) -> tuple[TableVersion, Snapshot] | None:
        """The version and snapshot from which a full cache answers in CACHE mode; waits for the first load.

        None without a full cache. Also None while the snapshot lacks a commit of this host: the store answers then, and a reload starts.
        """
        full = self._fulls.get_cache(table, options)
        latest = full.current() if full is not None and options.metadata_source is MetadataSource.CACHE else None
        if full is None or latest is None or self._resolver.host.includes_own_writes(table, options, latest[0]):
            return latest
        full.ask_reload()
        return None

    def unchanged(
        self, full: FullCache, table: Table, options: LookupOptions, version: TableVersion
    ) -> Snapshot | None:
        """The snapshot of a version, if a full cache in CACHE mode still answers from it and needs no reload."""
        snapshot = full.unchanged(version)
        if snapshot is None or not self._resolver.host.includes_own_writes(table, options, version):
            return None
        self._metrics.inc("metadataCacheCount")
        return snapshot

    def get(
        self,
        table: Table,
        options: LookupOptions,
        version: TableVersion,
        wait_s: float | None = None,
        exact: bool = False,
    ) -> Snapshot | None:
        """The snapshot of a version, built now if the query may wait for it; else None.

        `wait_s`: how long it may wait (None: `lookup.full-cache.build-wait`). `exact`: see `FullCache.build`.
        """
        full = self._fulls.get_cache(table, options)
        if full is None:
            return None
        if options.metadata_source is MetadataSource.CACHE:
            return full.find(version)
        return full.build(version, options.build_wait_s if wait_s is None else wait_s, exact)

    def find(self, plan: ReadPlan, version: TableVersion, exact: bool = False) -> Snapshot | None:
        """The snapshot of a version if it has all that the plan needs."""
        if self._fulls.get_cache(plan.table, plan.options) is None:
            return None
        return self.covering(plan, self.get(plan.table, plan.options, version, exact=exact))

    def covering(self, plan: ReadPlan, snapshot: Snapshot | None) -> Snapshot | None:
        """The snapshot if it has all columns that the plan needs; else None."""
        selects_columns = plan.options.columns is not None
        if selects_columns and snapshot is not None and not set(plan.needed_columns) <= set(snapshot.schema.names):
            snapshot = None
        if snapshot is None:
            self._metrics.inc("snapshotReadThroughCount")
        return snapshot

    def batches(
        self, plan: ReadPlan, snapshot: Snapshot, version: TableVersion, pieces: Sequence[Slice] | None
    ) -> Iterator[pa.RecordBatch]:
        """The planned rows of a snapshot; with `pieces`, those of such parts of the version's files only."""
        ranges = None if pieces is None else [(p.file.url, p.start, p.end) for p in pieces]
        read_schema = functools.partial(self._versions.data_schema, plan.table, version)
        return snapshot_batches(
            snapshot, plan.projection, ranges, read_schema, redact("path", plan.table.url), self._metrics
        )
