"""`OpenTable`: a table as a `LookupTable` resolved it last, so that nothing is planned again while the table stays the same."""

from __future__ import annotations

import dataclasses

from pyspark_lookup.cache.full.full_cache import FullCache
from pyspark_lookup.cache.full.snapshot import Snapshot
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.lookup import planner
from pyspark_lookup.lookup.planner import ResolvedTable
from pyspark_lookup.lookup.row_queries import KeyedRead, plan_keyed
from pyspark_lookup.lookup.runtime import Engine, runtime
from pyspark_lookup.options.enums import MetadataSource
from pyspark_lookup.options.lookup_options import LookupOptions


@dataclasses.dataclass
class OpenTable:
    """A resolved table, with the options as its metadata completes them. `full`: its full cache in CACHE mode."""

    engine: Engine
    resolved_table: ResolvedTable
    options: LookupOptions
    full: FullCache | None

    @cached_property
    def read(self) -> KeyedRead:
        """How its rows are read by key. Raises OptionError without `lookup.keys`."""
        return plan_keyed(self.resolved_table, self.options, runtime().clock)

    def unchanged(self) -> Snapshot | None:
        """The snapshot that answers in CACHE mode, if it is of the resolved version and can be used at once."""
        if self.full is None:
            return None
        snapshots = self.engine.reader.snapshots
        return snapshots.unchanged(self.full, self.resolved_table.table, self.options, self.resolved_table.version)


def refresh_table(engine: Engine, options: LookupOptions, before: OpenTable | None, same_options: bool) -> OpenTable:
    """The table at `options.path` now: `before` itself if nothing has changed. `same_options`: `before` has the same options.

    One metadata call; raises as `planner.find`.
    """
    last_table = before.resolved_table.table if before is not None else None
    last = before.resolved_table if before is not None and same_options and before.engine is engine else None
    resolved_table = planner.find(engine.reader, options, last_table, last)
    if (
        before is not None
        and last is not None
        and resolved_table.table is last.table
        and resolved_table.data is last.data
    ):
        before.resolved_table = resolved_table
        return before
    complete = planner.with_table_keys(options, resolved_table)
    cached = options.metadata_source is MetadataSource.CACHE
    return OpenTable(
        engine,
        resolved_table,
        complete,
        engine.reader.fulls.get_cache(resolved_table.table, complete) if cached else None,
    )
