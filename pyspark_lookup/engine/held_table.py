"""`HeldTable`: a table as a `LookupTable` has found it last, so that what has not changed is not worked out again."""

from __future__ import annotations

import dataclasses

from pyspark_lookup.base.forks import cached_property
from pyspark_lookup.cache.full.full_cache import FullCache
from pyspark_lookup.cache.full.snapshot import Snapshot
from pyspark_lookup.engine import planner
from pyspark_lookup.engine.planner import Found
from pyspark_lookup.engine.row_queries import KeyedRead, plan_keyed
from pyspark_lookup.engine.runtime import Engine, runtime
from pyspark_lookup.options.enums import MetadataSource
from pyspark_lookup.options.lookup_options import LookupOptions


@dataclasses.dataclass
class HeldTable:
    """What was found of a table, with the options as its metadata completes them. `full`: its full cache in CACHE mode."""

    engine: Engine
    found: Found
    options: LookupOptions
    full: FullCache | None

    @cached_property
    def read(self) -> KeyedRead:
        """How its rows are read by key. Raises OptionError without `lookup.keys`."""
        return plan_keyed(self.found, self.options, runtime().clock)

    def unchanged(self) -> Snapshot | None:
        """The snapshot that answers in CACHE mode, if it is of the version that was found, and nothing has to be done for that."""
        if self.full is None:
            return None
        snapshots = self.engine.reader.snapshots
        return snapshots.unchanged(self.full, self.found.table, self.options, self.found.version)


def find_again(engine: Engine, options: LookupOptions, before: HeldTable | None, same: bool) -> HeldTable:
    """The table at `options.path` now; `before`, if that has found the same. `same`: it has the same options.

    One metadata call; raises as `planner.find`.
    """
    known = before.found.table if before is not None else None
    last = before.found if before is not None and same and before.engine is engine else None
    found = planner.find(engine.reader, options, known, last)
    if before is not None and last is not None and found.table is last.table and found.data is last.data:
        before.found = found
        return before
    complete = planner.with_table_keys(options, found)
    cached = options.metadata_source is MetadataSource.CACHE
    return HeldTable(engine, found, complete, engine.reader.fulls.get_cache(found.table, complete) if cached else None)
