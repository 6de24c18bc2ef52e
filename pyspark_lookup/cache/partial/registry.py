"""`PartialTables` has the partial caches of tables. `Changes` says for which keys two versions of a table may have different rows.

Cached rows of one version also answer for another version, except for keys whose rows may differ there. Two versions differ in the files that
only one of them has. A key that is outside the bounds of all these files has the same rows in both versions. A file that a compaction has
written counts as the files that it replaced.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import math
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.cache.disk_lookup_cache import DATABASES, DiskCacheLookupCache
from pyspark_lookup.cache.memory import DefaultLookupCache, LookupCache
from pyspark_lookup.cache.partial.change_log import ChangeLog, FindChanges
from pyspark_lookup.cache.partial.host_cache import Bounds, Freshness, SharedCache
from pyspark_lookup.cache.partial.invalidations import Invalidations
from pyspark_lookup.cache.partial.read_through import Flights, PartialCache
from pyspark_lookup.columnar.keys import Numbers, Seed, as_bools, draw_seed
from pyspark_lookup.columnar.predicate import ColumnStats
from pyspark_lookup.core.decoding import as_name, as_text, as_texts
from pyspark_lookup.errors import DamagedFileError, SchemaError, UfsError
from pyspark_lookup.options.enums import OnError, PartialCacheStore
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import Disk, key_of
from pyspark_lookup.storage.stores import FileVersion
from pyspark_lookup.versions.file_columns import ColumnFiles
from pyspark_lookup.versions.model import (
    Rewrites,
    Table,
    TableVersion,
    changed_names,
    differing_files,
    key_files,
    name_of_rows,
)

FileBounds = Callable[[Sequence[FileVersion]], list[list[ColumnStats | None]]]
"""A function that returns, for each file, the statistics of each key column (None: not known)."""

VersionOf = Callable[[str], TableVersion | None]
"""A function that returns the version with a digest; None if this host does not have the version."""

_STEPS_AT_MOST = 256  # two versions with more versions between them are not compared
_CHANGED_AT_MOST = 4096  # if more files have changed, no rows of another version are used
_TABLES_AT_MOST = 16
_REWRITES, _TABLE, _PARENT, _WHOLE = b"rewrites", b"table", b"parent", b"whole"


class Changes:
    """Records, for versions of a table, the bounds of the columns `keys` in their files. `space`: a hash of the table and its columns."""

    def __init__(self, context: HostContext, space: str, keys: pa.Schema) -> None:
        self._latest = f"latest-{space}"
        self._context = context
        self._keys = keys
        self._tables: dict[str, pa.Table] = {}
        self._lock = threading.Lock()

    def remember(
        self, version: TableVersion, bounds_of: FileBounds, version_of: VersionOf, whole_digest: str | None = None
    ) -> None:
        """Record the bounds of a version's files, so that the next version can be compared with this one.

        Of a large table, only the files are recorded that this version has and the one recorded before has not, or the other way round.
        `version_of`: returns the version with a digest. `whole_digest`: if `version` has only some partitions of the table's version, the digest
        of the table's version.
        """
        if self._context.disk is None or self._record(version.digest) is not None:
            return
        if isinstance(version.files, ColumnFiles):
            latest = self._latest_known()
            try:
                previous = None if latest is None else version_of(self._whole_digest(latest))
                changes = None if previous is None or previous.digest != latest else _find_changes(version, previous)
                if latest is not None and changes is not None:
                    bounds = [row for files in changes for row in bounds_of(files)]
                    files = [file for files in changes for file in files]
                    self._put(version, files, bounds, {_PARENT: latest, _WHOLE: whole_digest or ""})
                    return
            except (UfsError, DamagedFileError):
                pass  # the bounds of a removed file are only in its footer, which can no longer be read
            except SchemaError:
                pass  # the partition value of a removed file does not have the type of the current partition values
            self._put(version, [], [], {_PARENT: "", _WHOLE: whole_digest or ""})
            return
        keyed = [keys for deletes in version.deletes if (keys := deletes.keys) is not None]
        files = [*version.files, *keyed]
        self._put(version, files, bounds_of(files), {})

    def _put(
        self,
        version: TableVersion,
        files: Sequence[FileVersion],
        bounds: Sequence[Sequence[ColumnStats | None]],
        about: Mapping[bytes, str],
    ) -> None:
        assert self._context.disk is not None
        rows: dict[str, list[Any]] = {"file": [name_of_rows(file) for file in files]}
        for number, field in enumerate(self._keys):
            column = [row[number] for row in bounds]
            rows[f"{number}.low"] = [_value(stats, "low", field.type) for stats in column]
            rows[f"{number}.high"] = [_value(stats, "high", field.type) for stats in column]
            rows[f"{number}.none"] = [stats is not None and stats.all_null for stats in column]
        rewrites = version.metadata.rewrites if version.metadata is not None and not about else ()
        rows["live"] = [True] * len(files)
        written = pa.table(rows, schema=self._schema())
        table = pa.concat_tables([written, self._rewritten(rewrites, {*rows["file"]})])
        table = table.replace_schema_metadata({_REWRITES: json.dumps(rewrites), _TABLE: _table_key(version), **about})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        text = base64.b64encode(sink.getvalue()).decode()
        try:
            self._context.disk.replace_record("bounds", self._key(version.digest), text)
            self._context.disk.replace_record("bounds", self._latest, version.digest)
        except OSError:
            self._context.metrics.inc("cacheFailureCount")
        self._keep(version.digest, table)

    def _whole_digest(self, digest: str) -> str:
        """The digest of the whole version, if the recorded version `digest` has only some of its partitions; otherwise `digest`."""
        record = self._record(digest)
        whole: bytes = b"" if record is None else (record.schema.metadata or {}).get(_WHOLE, b"")
        return whole.decode() or digest

    def is_latest(self, digest: str) -> bool:
        """Whether `digest` is the version that was recorded last, or no version was recorded.

        False if the table has gone back to `digest`: a version is recorded only once.
        """
        return self._latest_known() in (None, digest)

    def _latest_known(self) -> str | None:
        return (
            self._context.disk.get_record("bounds", self._latest, as_name) if self._context.disk is not None else None
        )

    def may_differ(self, new: str, old: str, keys: Sequence[pa.Array]) -> Numbers | None:
        """For each key, whether its rows may differ between the versions with the digests `new` and `old`; None if those of any key may."""
        before, after = self._record(old), self._record(new)
        if before is None or after is None or before.schema != after.schema:
            return None
        if (before.schema.metadata or {}).get(_TABLE) != (after.schema.metadata or {}).get(_TABLE):
            return None  # another table, or other columns of the same names
        changed: pa.Table | None
        # A record with a parent has only the files in which its version differs from its parent. So follow the parents.
        if any(_PARENT in (record.schema.metadata or {}) for record in (before, after)):
            changed = self._changes_between(new, old)
            changed = self._changes_between(old, new) if changed is None else changed
            if changed is None:
                return None
        else:
            changed = _read_changed(before, after)
        if changed.num_rows > _CHANGED_AT_MOST:
            return None
        touched = np.zeros(len(keys[0]), np.bool_)
        for number in range(changed.num_rows):
            inside = np.ones(len(touched), np.bool_)
            for column, key in enumerate(keys):
                low, high, none = (changed.column(f"{column}.{name}")[number] for name in ("low", "high", "none"))
                if none.as_py():  # this key column is null in all rows of the file
                    inside[:] = False
                elif low.is_valid and high.is_valid:
                    within = pc.and_(pc.greater_equal(key, low), pc.less_equal(key, high))
                    if pa.types.is_floating(key.type):  # NaN is within no bounds
                        within = pc.or_(within, pc.is_nan(key))
                    inside &= as_bools(within)
            touched |= inside
        return touched

    def _changes_between(self, new: str, old: str) -> pa.Table | None:
        """The bounds of the files that changed from version `old` to version `new`; None if the records do not lead from `new` back to `old`."""
        parts: list[pa.Table] = []
        digest = new
        for _ in range(_STEPS_AT_MOST):
            record = self._record(digest)
            parent = b"" if record is None else (record.schema.metadata or {}).get(_PARENT, b"")
            if record is None or not parent:
                return None
            parts.append(record.replace_schema_metadata())
            digest = parent.decode()
            if digest == old:
                return pa.concat_tables(parts)
        return None

    def _rewritten(self, rewrites: Rewrites, live_names: Collection[str]) -> pa.Table:
        """The recorded bounds of the files that compactions have written, and of the files that they have replaced, except `live_names`."""
        latest = self._latest_known() if rewrites else None
        before = self._record(latest) if latest is not None else None
        if before is None:
            return self._schema().empty_table()
        rows = _named(
            before.replace_schema_metadata(),
            [name for rewrite in rewrites for names in rewrite for name in names if name not in live_names],
        )
        return rows.set_column(rows.schema.get_field_index("live"), "live", pa.repeat(False, rows.num_rows))

    def _record(self, digest: str) -> pa.Table | None:
        with self._lock:
            table: pa.Table | None = self._tables.get(digest)
        if table is None and self._context.disk is not None:
            table = self._context.disk.get_record("bounds", self._key(digest), self._parse_bounds)
            if table is not None:
                self._keep(digest, table)
        return table

    def _parse_bounds(self, record: Any) -> pa.Table:
        """The bounds in a record. Raises ValueError if they are damaged, or are for other key columns."""
        try:
            table = pa.ipc.open_stream(pa.py_buffer(base64.b64decode(as_text(record), validate=True))).read_all()
            table.validate(full=True)
        except (OSError, pa.ArrowException) as problem:
            raise ValueError(str(problem)) from None
        if table.schema != self._schema():
            raise ValueError("the bounds are for other key columns")
        _parse_rewrites(table)
        return table

    def _keep(self, digest: str, table: pa.Table) -> None:
        with self._lock:
            self._tables[digest] = table
            while len(self._tables) > _TABLES_AT_MOST:
                del self._tables[next(iter(self._tables))]

    def _key(self, digest: str) -> str:
        return key_of(digest, *self._keys.names)

    def _schema(self) -> pa.Schema:
        fields = [pa.field("file", pa.string()), pa.field("live", pa.bool_())]
        for number, field in enumerate(self._keys):
            fields += [pa.field(f"{number}.low", field.type), pa.field(f"{number}.high", field.type)]
            fields += [pa.field(f"{number}.none", pa.bool_())]
        return pa.schema(fields)


def _table_key(version: TableVersion) -> str:
    """A hash of the version's table, its partition columns, and the names of its columns in the files."""
    # All files of a large table have the same columns.
    files = version.files[:1] if isinstance(version.files, ColumnFiles) else version.files
    named = {id(file.columns): file.columns for file in files if file.columns is not None}
    metadata = version.metadata
    table = () if metadata is None else (metadata.table_id, *metadata.partitions)
    return key_of(*table, *(json.dumps([column.to_json() for column in columns]) for columns in named.values()))


def _find_changes(version: TableVersion, previous: TableVersion) -> list[Sequence[FileVersion]] | None:
    """[files that `version` has added, files that it has removed], compared with `previous`, both of a large table.

    Files that compactions have written or replaced do not count. None if there are too many files, or the two are not of the same table.
    """
    if not isinstance(version.files, ColumnFiles) or not isinstance(previous.files, ColumnFiles):
        return None
    if _table_key(version) != _table_key(previous):
        return None
    rewrites = () if version.metadata is None else version.metadata.rewrites
    if not rewrites and not key_files(version) and not key_files(previous):
        added, removed = version.files.difference(previous.files), previous.files.difference(version.files)
        return None if len(added) + len(removed) > _CHANGED_AT_MOST else [added, removed]
    changes = differing_files(version, previous, _CHANGED_AT_MOST)
    if changes is None:
        return None
    added_by_name, removed_by_name = changes
    names = changed_names(version, added_by_name, removed_by_name)
    if not names <= added_by_name.keys() | removed_by_name.keys():
        # Some files that a compaction has written are in neither version, so it cannot be left out: all files count.
        return [[*by_name.values()] for by_name in changes]
    return [[file for name, file in by_name.items() if name in names] for by_name in changes]


def _read_changed(before: pa.Table, after: pa.Table) -> pa.Table:
    """The bounds of the files in which two versions differ.

    If there was a compaction between the two versions, the files that it has written do not count, because their rows are not new. Of the files
    that it has replaced, those count that the earlier version lacks.
    """
    rewrites = _parse_rewrites(after)
    alive, old_names = (_names(part.filter(part.column("live"))) for part in (after, before))
    on_record = _names(after)
    # The earlier version has a compaction if it has the files that were written, or a later compaction of these files.
    compacted, later_rewrites = set(old_names), []
    for new_names, replaced in reversed(rewrites):
        written_names = set(new_names).difference(replaced)
        if written_names and compacted.issuperset(written_names):
            compacted.update(replaced)
        else:
            later_rewrites.append((new_names, replaced))
    changed: set[str] = set()
    for new_names, replaced in reversed(later_rewrites):
        # A compaction is left out only if the bounds of all its files are on record.
        if (old_names | on_record).issuperset(replaced) and on_record.issuperset(new_names):
            changed |= set(replaced) - old_names
            old_names = (old_names - set(replaced)) | set(new_names)
    changed |= old_names ^ alive
    rows = pa.concat_tables([after.replace_schema_metadata(), before.replace_schema_metadata()])
    return _named(rows, sorted(changed))


def _parse_rewrites(table: pa.Table) -> Rewrites:
    rewrites = json.loads((table.schema.metadata or {}).get(_REWRITES, b"[]"))
    return tuple((as_texts(new_names), as_texts(replaced_names)) for new_names, replaced_names in rewrites)


def _named(rows: pa.Table, names: Sequence[str]) -> pa.Table:
    return rows.filter(pc.is_in(rows.column("file"), value_set=pa.array(names, pa.string())))


def _names(rows: pa.Table) -> set[str]:
    return set(rows.column("file").to_pylist())


def _value(stats: ColumnStats | None, side: str, kind: pa.DataType) -> Any:
    """A bound (`side`: low or high) as a value of the key's type; None if it is not known, or is not a value of this type."""
    value = None if stats is None else getattr(stats, side)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    try:
        pa.scalar(value, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return None
    return value


_FLIGHT_WAIT_S = 60.0
# So many caches stay in this process; the shared cache still has the rows of caches that are dropped.
_CACHES_AT_MOST = 16


class PartialTables:
    """The partial caches of this process: one for each table and each choice of key columns and options.

    `provider_cache`: a provider's own cache, used instead of the one that the options describe. Unless it is a `DefaultLookupCache`, its bounds
    are not known, so the host's processes do not share its rows.
    """

    def __init__(self, context: HostContext, provider_cache: LookupCache | None = None) -> None:
        self._provider_cache = provider_cache
        self._context = context
        self._lock = threading.Lock()
        self._caches: dict[str, tuple[PartialCache, Changes]] = {}
        self._invalidations: dict[str, Invalidations] = {}
        self._change_logs: dict[str, ChangeLog] = {}

    def get_cache(
        self,
        table: Table,
        space: str,
        options: LookupOptions,
        keys: pa.Schema,
        columns: pa.Schema,
        version: TableVersion,
        bounds_of: FileBounds,
        version_of: VersionOf,
        whole_digest: str | None = None,
        find_changes: FindChanges | None = None,
        newest: Callable[[], str | None] = lambda: None,
    ) -> tuple[PartialCache, Freshness]:
        """(the partial cache of a table, the `Freshness` with which to look up rows of `version`). `columns`: the columns of the rows.

        `space`: a hash of the table and its columns. The arguments from `version` on are those of `Changes.remember`. `find_changes`, if the table
        can name the keys that have changed, and `newest`: as in `ChangeLog.fresh`.
        """
        cache, changes = self._cache(table, space, options, keys)
        if find_changes is not None:
            return cache, self._change_log(table, keys).fresh(version, columns, newest, find_changes)
        changes.remember(version, bounds_of, version_of, whole_digest)
        may_differ = functools.partial(changes.may_differ, version.digest)
        latest = functools.partial(changes.is_latest, version.digest)
        return cache, Freshness(version.digest, columns, may_differ, latest)

    def invalidate(self, table: Table, keys: pa.Table) -> None:
        """Invalidate `keys`, which have no nulls, on the whole host. Raises OSError if the cache directory cannot be written."""
        with self._lock:
            invalidations = self._get_invalidations(table, keys.column_names)
        invalidations.add(keys)

    @property
    def has_unrecorded(self) -> bool:
        """Whether keys were invalidated in a provider's own cache, and only this process knows them, because there is no cache directory."""
        return self._provider_cache is not None and self._context.disk is None and bool(self._invalidations)

    def _get_invalidations(self, table: Table, names: Sequence[str]) -> Invalidations:
        # All reads of the table share one log, in whichever order they name its keys.
        place = key_of(table.scope, table.url, *sorted(names))
        if place not in self._invalidations:
            self._invalidations[place] = Invalidations(self._context, place, names)
        return self._invalidations[place]

    def _change_log(self, table: Table, keys: pa.Schema) -> ChangeLog:
        # All reads of the table by these keys share one log, whichever columns they read.
        place = key_of(table.scope, table.url, keys.serialize().hex())
        with self._lock:
            if place not in self._change_logs:
                self._change_logs[place] = ChangeLog(self._context, place, keys)
            return self._change_logs[place]

    def _cache(self, table: Table, space: str, options: LookupOptions, keys: pa.Schema) -> tuple[PartialCache, Changes]:
        place = key_of(space, keys.serialize().hex(), options.partial_cache, options.cache.max_bytes)
        with self._lock:
            cache = self._caches.pop(place, None) or self._make(table, space, options, keys)
            self._caches[place] = cache  # the most recently used cache is last
            while len(self._caches) > _CACHES_AT_MOST:
                del self._caches[next(iter(self._caches))]
            return cache

    def close(self) -> None:
        """Drop what this process has cached. Files on disk stay."""
        with self._lock:
            caches, self._caches = self._caches, {}
        for cache, _ in caches.values():
            cache.close()

    def _make(self, table: Table, space: str, options: LookupOptions, keys: pa.Schema) -> tuple[PartialCache, Changes]:
        invalidations = self._get_invalidations(table, keys.names)
        seed, disk = self._seed(space)
        context = dataclasses.replace(self._context, disk=disk)
        provider_cache, shared = self._provider_cache, None
        config = options.partial_cache.parameters if provider_cache is None else None
        if isinstance(provider_cache, DefaultLookupCache):
            config = provider_cache.config
        for gauge, name in (("maxCachedRecords", "max_rows"), ("maxCachedBytes", "max_bytes")):
            if config is not None and config[name] is not None:
                context.metrics.set_gauge(gauge, int(config[name]))
        in_database = options.partial_cache.store is PartialCacheStore.DISKCACHE and provider_cache is None
        if disk is not None and config is not None and not in_database:
            rows, size = (math.inf if bound is None else bound for bound in (config["max_rows"], config["max_bytes"]))
            bounds = Bounds(
                rows,
                min(disk.budget(), size),
                config["expire_after_access_s"],
                config["expire_after_write_s"],
                config["cache_missing_key"],
                options.read.on_error is OnError.STALE,
            )
            shared = SharedCache(disk, context, space, keys, seed, bounds, invalidations)

        def make_cache() -> LookupCache:
            if provider_cache is not None:
                return provider_cache
            if in_database and disk is not None:
                bounds = options.partial_cache
                assert bounds.max_bytes is not None
                return DiskCacheLookupCache(
                    os.path.join(options.cache.directory(), DATABASES, space),
                    max_bytes=bounds.max_bytes,
                    expire_after_write_s=bounds.expire_after_write_s,
                    cache_missing_key=bounds.cache_missing_key,
                    clock=context.clock,
                )
            return DefaultLookupCache.from_options(options, context.clock.steady_s)

        flights = Flights(context, space, seed, _FLIGHT_WAIT_S)
        stale = options.read.on_error is OnError.STALE
        cache = PartialCache(keys.names, make_cache, shared, flights, context, invalidations, stale)
        return cache, Changes(context, space, keys)

    def _seed(self, space: str) -> tuple[Seed, Disk | None]:
        """(the seed of the hashes of a table's keys, the disk on which all processes of the host find this seed; None without a cache directory)."""
        seed, disk = draw_seed(self._context.rng), self._context.disk
        if disk is None:
            return seed, None
        try:
            value = {"seed": seed.to_json()}
            return disk.create_record("snapshot", space, value, lambda record: Seed.from_json(record["seed"])), disk
        except OSError:
            self._context.metrics.inc("cacheFailureCount")
            return seed, None
