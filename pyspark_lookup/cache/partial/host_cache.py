"""`SharedCache`: rows by key that some process of a host has loaded, in files that all processes of the host map into memory.

Each load is written as one segment (`storage.disk.segments`), which other processes see whole or not at all. From time to time some segments
are merged into one; the merged segment names its members, which no longer count. A segment has rows of one version of the table. It also
answers for another version, for keys whose rows cannot differ. The name of a segment begins with a time, so the latest one is last in a sorted
listing of the directory.

When each key was last used is in a file of numbers beside the segment, which all processes map for writing. The race: they write these times
without a lock, so a time may be lost or damaged. Only the order of eviction and the expiry after access depend on these times, and an
impossible time counts as the time of the load.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from pyspark_lookup.cache.memory import KEY_INDEX
from pyspark_lookup.cache.partial.invalidations import Invalidations
from pyspark_lookup.cache.segments import WITHOUT_FILES, Segment, SegmentBuilder, open_rows
from pyspark_lookup.columnar.keys import (
    Keys,
    Numbers,
    Seed,
    as_array,
    as_bools,
    as_indices,
    key_numbers,
    merge_rows,
    one_array,
    sort_distinct,
)
from pyspark_lookup.columnar.types import cast_column
from pyspark_lookup.core.decoding import UNREADABLE, as_name, as_text, as_texts
from pyspark_lookup.errors import CacheFullError
from pyspark_lookup.scan.formats import BATCH_ROWS
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import Disk

MS = 1000.0
_AHEAD_MS = 60_000
_LONG_AGO_MS = -(2**50)


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The limits of a host's cache of one table. A key without rows counts as one row.

    `missing_keys`: whether to cache that a key has no rows. `outdated`: whether to keep rows that are outdated or have expired, for `SharedCache.get`
    with `stale`.
    """

    rows: float
    bytes: float
    expire_after_access_s: float | None
    expire_after_write_s: float | None
    missing_keys: bool
    outdated: bool = False


@dataclasses.dataclass(frozen=True)
class Freshness:
    """The version of a table whose rows a lookup wants, and which rows of other versions it may take.

    `schema`: the columns of the rows. `may_differ(version, keys)`: for each key, whether its rows in the version with the digest `version` may
    differ from those in this version (None: those of any key may). `latest()`: whether this host knows no later version. `later_keys(version)`:
    the keys whose rows may differ (None: any key may be among them, or they cannot be listed). `fades(version)`: whether rows of that version
    will soon be unusable, unless they are merged into this version.
    """

    version: str
    schema: pa.Schema
    may_differ: Callable[[str, Sequence[pa.Array]], Numbers | None]
    latest: Callable[[], bool] = lambda: True
    later_keys: Callable[[str], pa.Table | None] = lambda version: None
    fades: Callable[[str], bool] = lambda version: False


@dataclasses.dataclass(frozen=True)
class SharedRows:
    """The host's cached rows of some keys. `present`: for each key, whether it is cached. `ages_s`: for each key, the seconds since its load.

    `rows`: the rows of the keys that are present, with the column `KEY_INDEX`.
    """

    present: Numbers
    rows: pa.Table
    ages_s: Numbers


@dataclasses.dataclass(frozen=True)
class HostSegment:
    """A segment of the shared cache, mapped. Each key without rows has one row here.

    `this_boot`: whether its times are on the steady clock since the machine last started. `members`: the names of the segments that were
    merged into it. `has_row`: for each row, whether it is a real row, and not the mark of a key without rows. `loaded_s`: for each row, when its
    key was loaded. `outdated`: for each row, whether it is only kept as the last one that was loaded. `latest_use_ms`: for each key, by its number, when it was last used, in milliseconds (0: not since the load).
    """

    name: str
    segment: Segment
    version: str
    this_boot: bool
    members: frozenset[str]
    has_row: Numbers
    loaded_s: Numbers  # -inf: not known
    outdated: Numbers
    latest_use_ms: Numbers

    def is_older(self, rows: Numbers, limits_s: Numbers) -> Numbers:
        """For each of `rows`, whether its load began at its limit or earlier. `limits_s`: a time for each row (steady clock); NaN: no limit."""
        if not self.this_boot:
            return ~np.isnan(limits_s)
        return np.asarray(self.loaded_s[rows] <= limits_s)

    def touch(self, rows: Numbers, now_ms: int) -> None:
        """Record that the keys of these rows are used now."""
        self.latest_use_ms[self.segment.key_numbers(rows)] = now_ms

    def used_ms(self, rows: Numbers, now_ms: int) -> Numbers:
        """For each row, when its key was last used, in milliseconds on the steady clock.

        The file of these times has no checksum: if a time is impossible, the time of the load counts instead.
        """
        if not self.this_boot:
            return np.full(len(rows), _LONG_AGO_MS)
        loaded_s = self.loaded_s[rows]
        loaded_ms = (np.where(np.isfinite(loaded_s), loaded_s, _LONG_AGO_MS / MS) * MS).astype(np.int64)
        use_ms = self.latest_use_ms[self.segment.key_numbers(rows)]
        # The race: other processes may have written later times since `now_ms` was read, so times a little later than `now_ms` count.
        return np.where((use_ms > loaded_ms) & (use_ms <= now_ms + _AHEAD_MS), use_ms, loaded_ms)


# The columns that a segment has in addition to the table's columns: `has_row`, `loaded_s` and `outdated` of `HostSegment`.
_HAS_ROW, _LOADED_S, _OUTDATED = "lookup:found", "lookup:loaded_s", "lookup:outdated"
_SEGMENTS_AT_MOST = 8
_EVICT_TO = 0.875
REFUSE_ABOVE = 1.125
_MEMORY_BYTES = 1024**3  # a builder keeps a quarter of this in memory before it writes to disk
_STRAGGLERS_AT_MOST = 32  # if there are more segments, even a process that does not read the latest version merges them


@dataclasses.dataclass(eq=False, repr=False)
class SharedCache:
    """The rows of one table by the key columns `keys`, shared by this host's processes.

    If the cache directory fails, this counts as a failure in the metrics, and as a miss. `space`: a hash of the table and its columns.
    """

    disk: Disk
    context: HostContext
    space: str
    keys: pa.Schema
    seed: Seed
    bounds: Bounds
    invalidations: Invalidations | None = None

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._parts: dict[str, HostSegment] = {}
        self._covered: set[str] = set()
        self._fresh: Freshness | None = None
        self._merging = False

    # --- reading ----------------------------------------------------------------------------------

    def get(
        self, keys: Sequence[pa.Array], hashes: Numbers, fresh: Freshness, stale: bool = False
    ) -> SharedRows | None:
        """The host's cached rows of `keys`, which are all different and not null; None if no key is cached.

        `stale`: the last rows that were loaded, of whatever version and age.
        """
        now_s = self.context.clock.steady_s()
        self.disk.use_table(self.space)
        present = np.zeros(len(hashes), np.bool_)
        ages_s = np.zeros(len(hashes), np.float64)
        lacking = np.arange(len(hashes))
        row_tables: list[pa.Table] = []
        limits = None if stale else self._limits(hashes)
        for part in self._refresh():
            if not len(lacking):
                break
            if not self._fits(part, fresh):
                continue
            lacking_keys = keys if len(lacking) == len(hashes) else [array.take(as_indices(lacking)) for array in keys]
            differs = (
                np.zeros(len(lacking), np.bool_)
                if part.version == fresh.version or stale
                else fresh.may_differ(part.version, lacking_keys)
            )
            if differs is None:
                continue
            matches = part.segment.probe(Keys(lacking_keys), hashes[lacking])
            usable = ~differs[matches.keys]
            if not stale:
                usable &= self._live(part, matches.rows, now_s) & ~part.outdated[matches.rows]
            if limits is not None:
                usable &= ~part.is_older(matches.rows, limits[lacking][matches.keys])
            places, rows = lacking[matches.keys[usable]], matches.rows[usable]
            if not len(rows):
                continue
            if part.version != fresh.version and not stale:
                self.context.metrics.inc("sharedCarriedOverCount", len(sort_distinct(places)))
            part.touch(rows, int(now_s * MS))
            present[places] = True
            ages_s[places] = now_s - part.loaded_s[rows]
            real = part.has_row[rows]
            columns = self._take(part, rows[real], fresh.schema)
            schema = fresh.schema.append(pa.field(KEY_INDEX, pa.int64()))
            row_tables.append(pa.Table.from_arrays([*columns, as_indices(places[real])], schema=schema))
            lacking = lacking[~present[lacking]]
        if not present.any():
            return None
        return SharedRows(present, merge_rows(row_tables, fresh.schema), ages_s)

    def _limits(self, hashes: Numbers) -> Numbers | None:
        """For each key, the time before which a load of the key does not count (see `Invalidations.limits`)."""
        if self.invalidations is None:
            return None
        return self.invalidations.limits(hashes, list(self.keys), self.seed)

    def touch(self, keys: Sequence[pa.Array], hashes: Numbers) -> None:
        """Record that these keys are used now. `get` does this, too: call this for keys that were found elsewhere."""
        now_ms = int(self.context.clock.steady_s() * MS)
        used_keys = Keys(keys)
        for part in self._refresh():
            if self._is_keyed(part):
                part.touch(part.segment.probe(used_keys, hashes).rows, now_ms)

    def sizes(self) -> tuple[int, int]:
        """(number of rows, number of bytes on disk) in the host's cache, when this process last looked."""
        with self._lock:
            return _total_sizes([*self._parts.values()])

    def close(self) -> None:
        """Unmap the segments. The files stay."""
        with self._lock:
            self._parts = {}
            self._covered.clear()

    def _is_keyed(self, part: HostSegment) -> bool:
        """Whether a segment has an index over this cache's key columns, with their current types and this cache's seed."""
        schema = part.segment.schema
        is_indexed = part.segment.keys == tuple(self.keys.names) and part.segment.seed == self.seed
        return is_indexed and all(schema.field(field.name).type == field.type for field in self.keys)

    def _fits(self, part: HostSegment, fresh: Freshness) -> bool:
        schema = part.segment.schema
        return self._is_keyed(part) and all(
            field.name in schema.names and schema.field(field.name).type == field.type for field in fresh.schema
        )

    def _live(self, part: HostSegment, rows: Numbers, now_s: float) -> Numbers:
        """For each row, whether it has not expired yet."""
        bounds, live = self.bounds, np.ones(len(rows), np.bool_)
        if not part.this_boot and (bounds.expire_after_write_s is not None or bounds.expire_after_access_s is not None):
            # Their times are from before the machine last started, and cannot be compared with the current time.
            return ~live
        if bounds.expire_after_write_s is not None:
            live &= part.loaded_s[rows] > now_s - bounds.expire_after_write_s
        if bounds.expire_after_access_s is not None:
            live &= part.used_ms(rows, int(now_s * MS)) > (now_s - bounds.expire_after_access_s) * MS
        return live

    def _take(self, part: HostSegment, rows: Numbers, schema: pa.Schema) -> list[pa.Array]:
        arrays = part.segment.take(schema.names, rows)
        return [cast_column(array, field.type, field.name, "") for array, field in zip(arrays, schema, strict=True)]

    def _refresh(self) -> list[HostSegment]:
        """The segments that lookups use, mapped, the latest one first. Members of a merged segment are left out."""
        with self._lock:
            names = set(self.disk.segments(self.space))
            self._covered &= names
            if names != self._parts.keys() | self._covered:
                self._parts = {name: part for name, part in self._parts.items() if name in names}
                for name in sorted(names - self._parts.keys(), reverse=True):
                    # The race: the members of a merged segment stay in the directory until the process that merged them removes them, and
                    # this process may have been killed. So members are left out by their names.
                    part = self._open(name) if name not in self._covered else None
                    if part is not None:
                        self._parts[name] = part
                        self._covered |= part.members & names
                for name in self._covered:
                    self._parts.pop(name, None)
            return [self._parts[name] for name in sorted(self._parts, reverse=True)]

    def _open(self, name: str) -> HostSegment | None:
        segment = open_rows(self.disk, self.space, name)
        if segment is None:
            return None
        numbers = self.disk.open_numbers(self.space, name, segment.rows)
        try:
            meta = segment.meta
            if (
                segment.schema.field(_HAS_ROW).type != pa.bool_()
                or segment.schema.field(_LOADED_S).type != pa.float64()
                or segment.schema.field(_OUTDATED).type != pa.bool_()
            ):
                raise ValueError(
                    "a column that says whether a key has a row, when it was loaded, or whether it is outdated, has the wrong type"
                )
            has_row, loaded_s, outdated = segment.take([_HAS_ROW, _LOADED_S, _OUTDATED], np.arange(segment.rows))
            return HostSegment(
                name,
                segment,
                as_name(meta["version"]),
                as_text(meta["boot"]) == self.context.clock.boot,
                frozenset(as_texts(meta["members"])),
                as_bools(has_row),
                np.frombuffer(loaded_s.buffers()[1] or b"", np.float64, len(loaded_s)),
                as_bools(outdated),
                np.zeros(segment.rows, np.int64) if numbers is None else np.frombuffer(numbers, np.int64, segment.rows),
            )
        except UNREADABLE:
            self.disk.discard_segment(self.space, name)
            return None

    # --- writing ----------------------------------------------------------------------------------

    def put(
        self, keys: Sequence[pa.Array], hashes: Numbers, rows: pa.Table, fresh: Freshness, loaded_s: Numbers
    ) -> None:
        """Share the `rows` (with `KEY_INDEX`) of keys with the host's other processes. `loaded_s`: for each key, the time from which its age counts,
        at the latest when its load began (steady clock)."""
        self._refresh()
        held_rows, held_bytes = self.sizes()
        bounds = self.bounds
        if held_rows > bounds.rows * REFUSE_ABOVE or held_bytes > bounds.bytes * REFUSE_ABOVE:
            self.context.metrics.inc("sharedRefusedCount")
        else:
            batch = self._stored_rows(keys, rows, loaded_s)
            if batch.num_rows and batch.num_rows <= bounds.rows:
                try:
                    self._publish([batch], fresh.version, (), None)
                except CacheFullError:
                    self.context.metrics.inc("sharedRefusedCount")
                except OSError:
                    self.context.metrics.inc("cacheFailureCount")
                    return
        self.tidy(fresh)

    def _stored_rows(self, keys: Sequence[pa.Array], rows: pa.Table, loaded_s: Numbers) -> pa.RecordBatch:
        """The rows of keys, and a row for each key without rows, as a batch with the columns of a segment."""
        numbers = key_numbers(rows)
        absent = np.full(len(loaded_s), self.bounds.missing_keys)
        absent[numbers] = False
        absent_numbers = np.flatnonzero(absent)
        absent_keys = as_indices(absent_numbers)
        columns: dict[str, pa.Array] = {}
        for field, key in zip(self.keys, keys, strict=True):
            has_column = field.name in rows.column_names
            present_values = one_array(rows.column(field.name)) if has_column else key.take(as_indices(numbers))
            columns[field.name] = pa.concat_arrays([present_values, key.take(absent_keys)])
        for field in rows.schema:
            if field.name != KEY_INDEX and field.name not in columns:
                present_values = one_array(rows.column(field.name))
                columns[field.name] = pa.concat_arrays([present_values, pa.nulls(len(absent_keys), field.type)])
        total = len(numbers) + len(absent_keys)
        columns[_HAS_ROW] = as_array(np.arange(total) < len(numbers))
        columns[_LOADED_S] = as_array(loaded_s[np.concatenate([numbers, absent_numbers])])
        columns[_OUTDATED] = as_array(np.zeros(total, np.bool_))
        return pa.record_batch(columns)

    def _publish(
        self, batches: Sequence[pa.RecordBatch], version: str, members: Sequence[str], used_ms: Numbers | None
    ) -> None:
        rows = sum(batch.num_rows for batch in batches)
        builder = SegmentBuilder(batches[0].schema, self.keys.names, self.seed, self.disk.reserve, _MEMORY_BYTES)
        with contextlib.closing(builder):
            next_row = 0
            for batch in batches:
                positions = np.arange(next_row, next_row + batch.num_rows, dtype=np.uint64)
                next_row += batch.num_rows
                builder.add([(batch, positions, batch.num_rows / rows)])
            writer = builder.finish(self.disk.create_segment, [rows], strict=False)
        with self._lock:
            latest = max((*self._parts, *self._covered), default="0")
        # The new name must be the last one in sorted order, even if the wall clock was set back.
        at_ns = max(int(self.context.clock.wall_s() * 1e9), int(latest[:16], 16) + 1)
        name = f"{at_ns:016x}-{self.context.rng.getrandbits(32):08x}" if not members else f"{max(members)}+"
        meta = {
            **builder.meta,
            WITHOUT_FILES: True,
            "version": version,
            "boot": self.context.clock.boot,
            "members": list(members),
        }
        with contextlib.closing(writer):
            # A small segment is not flushed to the disk: opening it checks every byte, so one that was half written is noticed.
            writer.finish(meta, durable=bool(members))
            numbers = self.disk.open_numbers(self.space, name, rows, create=True)
            self.disk.publish_segment(self.space, name, writer)
        if used_ms is not None and numbers is not None:
            part = self._open(name)
            if part is not None:
                everything = np.arange(rows)
                by_key = np.frombuffer(numbers, np.int64, rows)
                by_key[part.segment.key_numbers(everything)] = used_ms[part.segment.ordinals.astype(np.int64)]

    # --- merging and eviction -----------------------------------------------------------------------

    def tidy(self, fresh: Freshness) -> None:
        """Merge segments, in a thread, if there are too many, if they exceed the cache's bounds, or if the rows of one fade."""
        parts = self._refresh()
        rows, size = _total_sizes(parts)
        full = rows > self.bounds.rows or size > self.bounds.bytes
        self._fresh = fresh
        if self._merging or not (full or len(parts) > _SEGMENTS_AT_MOST or _fade(parts, fresh)):
            return
        self._merging = True

        def merge() -> None:
            try:
                with self.disk.hold("merge", self.space, 0) as alone:
                    if alone and self._fresh is not None:
                        # `self._fresh` is the version of the latest `put`, which may be newer than that of the one that started this thread.
                        self._merge(self._fresh)
            except CacheFullError:
                self.context.metrics.inc("sharedRefusedCount")
            except OSError:
                self.context.metrics.inc("cacheFailureCount")
            finally:
                self._merging = False

        try:
            self.context.start(f"lookupcache-merge-{self.space[:8]}", merge)
        except RuntimeError:  # there are too many threads, or the process ends
            self._merging = False

    def _merge(self, fresh: Freshness) -> None:
        """Merge the latest segments into one. If the bounds are exceeded, merge all segments, without the rows that were not used for longest.

        All are also merged if the rows of one fade.
        """
        # The times of last use are copied, because other processes go on writing them.
        parts = [dataclasses.replace(part, latest_use_ms=part.latest_use_ms.copy()) for part in self._refresh()]
        rows, size = _total_sizes(parts)
        bounds = self.bounds
        room = min(
            _EVICT_TO * bounds.rows if rows > bounds.rows else float("inf"),
            _EVICT_TO * bounds.bytes * rows / size if size > bounds.bytes else float("inf"),
        )
        if room == float("inf"):
            # Only a process that reads the latest version merges: any other would drop rows of newer versions.
            latest = fresh.latest() or len(parts) > _STRAGGLERS_AT_MOST
            parts = [] if not latest else parts if _fade(parts, fresh) else _choose_for_merging(parts)
        if not parts:
            return
        now_s = self.context.clock.steady_s()
        live_rows: list[tuple[HostSegment, Numbers]] = []
        for part in parts:
            right, outdated = self._worth_keeping(part, live_rows, fresh, now_s)
            live_rows.append((dataclasses.replace(part, outdated=outdated), right))
        if sum(len(alive) for _, alive in live_rows) > room:
            live_rows = self._latest_used(live_rows, int(room), int(now_s * MS))
        batches, used_ms = [], []
        for part, alive in live_rows:
            for start in range(0, len(alive), BATCH_ROWS):
                batch_rows = alive[start : start + BATCH_ROWS]
                batches.append(self._stored_batch(part, batch_rows, fresh))
                used_ms.append(part.used_ms(batch_rows, int(now_s * MS)))
        # Remove also members of these segments that a killed process has left behind: they would count again once the segments that name them
        # are gone.
        merged_names = {part.name for part in parts}
        with self._lock:
            merged_names |= {member for part in parts for member in part.members} & self._covered
        if batches:
            self._publish(batches, fresh.version, sorted(merged_names), np.concatenate(used_ms))
            self.context.metrics.inc("sharedMergeCount")
        for name in merged_names:
            self.disk.unlink_segment(self.space, name)
        self._refresh()

    def _worth_keeping(
        self, part: HostSegment, newer: Sequence[tuple[HostSegment, Numbers]], fresh: Freshness, now_s: float
    ) -> tuple[Numbers, Numbers]:
        """(the rows of `part` that are right in the version `fresh.version`, and whose keys are not in a newer segment; for each row of `part`, whether
        it is outdated). If `Bounds.outdated`, the first also has the outdated rows.

        `newer`: pairs of a newer segment and those of its rows that are kept.
        """
        all_outdated = part.outdated.copy()
        if not self._fits(part, fresh):
            return np.zeros(0, np.int64), all_outdated
        newer_rows: list[tuple[HostSegment, Numbers]] = []
        for newer_part, kept_rows in newer:
            mask = np.zeros(newer_part.segment.rows, np.bool_)
            mask[kept_rows] = True
            newer_rows.append((newer_part, mask))
        alive: list[Numbers] = [np.zeros(0, np.int64)]
        for start in range(0, part.segment.rows, BATCH_ROWS):
            rows = np.arange(start, min(start + BATCH_ROWS, part.segment.rows))
            good = self._live(part, rows, now_s) & ~part.outdated[rows]
            keys = self._take(part, rows, self.keys)
            if part.version != fresh.version:
                stale = fresh.may_differ(part.version, keys)
                good = np.zeros(len(rows), np.bool_) if stale is None else good & ~stale
            part_keys = Keys(keys)
            hashes = part_keys.hashes(self.seed)
            limits = self._limits(hashes)
            if limits is not None:
                good &= ~part.is_older(rows, limits)
            all_outdated[rows] = ~good
            if self.bounds.outdated:
                good[:] = True
            for newer_part, mask in newer_rows:
                if mask.any():
                    matches = newer_part.segment.probe(part_keys, hashes)
                    good[matches.keys[mask[matches.rows]]] = False
            alive.append(rows[good])
        return np.concatenate(alive), all_outdated

    def _latest_used(
        self, live_rows: list[tuple[HostSegment, Numbers]], room: int, now_ms: int
    ) -> list[tuple[HostSegment, Numbers]]:
        """Of the rows in `live_rows`, at most `room` of those that were used last; of each key either all rows or none."""
        ranks = []
        for part, alive in live_rows:
            of_part = [np.zeros(0, np.int64)]
            for start in range(0, len(alive), BATCH_ROWS):
                rows = alive[start : start + BATCH_ROWS]
                hashes = Keys(self._take(part, rows, self.keys)).hashes(self.seed)
                # Keys that were used in the same millisecond are ordered by their hashes, so that not all of them must go together.
                of_part.append((part.used_ms(rows, now_ms) << 12) | (hashes >> np.uint64(52)).astype(np.int64))
            ranks.append(np.concatenate(of_part))
        together = np.concatenate(ranks)
        limit = np.partition(together, len(together) - room - 1)[len(together) - room - 1]
        self.context.metrics.inc("sharedEvictedCount", int(np.count_nonzero(together <= limit)))
        return [(part, alive[rank > limit]) for (part, alive), rank in zip(live_rows, ranks, strict=True)]

    def _stored_batch(self, part: HostSegment, rows: Numbers, fresh: Freshness) -> pa.RecordBatch:
        value_fields = [field for field in fresh.schema if field.name not in self.keys.names]
        fields = [*self.keys, *value_fields, pa.field(_HAS_ROW, pa.bool_()), pa.field(_LOADED_S, pa.float64())]
        schema = pa.schema([pa.field(field.name, field.type) for field in fields])
        arrays = self._take(part, rows, schema)
        if not part.this_boot:  # times from before the machine last started mean nothing on the current steady clock
            arrays[-1] = as_array(np.full(len(rows), -np.inf))
        schema = schema.append(pa.field(_OUTDATED, pa.bool_()))
        return pa.RecordBatch.from_arrays([*arrays, as_array(part.outdated[rows])], schema=schema)


def _fade(parts: Sequence[HostSegment], fresh: Freshness) -> bool:
    return any(fresh.fades(part.version) for part in parts)


def _total_sizes(parts: Sequence[HostSegment]) -> tuple[int, int]:
    """(number of rows, number of bytes on disk) of some segments together."""
    return sum(part.segment.rows for part in parts), sum(part.segment.bytes for part in parts)


def _choose_for_merging(parts: Sequence[HostSegment]) -> list[HostSegment]:
    """The segments to merge: the latest ones, back to the first segment that is much larger than all later ones together; this one is left out.

    So each row is copied only a few times.
    """
    merged_parts: list[HostSegment] = []
    rows = 0
    for part in parts:
        if len(merged_parts) >= _SEGMENTS_AT_MOST // 2 and part.segment.rows > 2 * rows:
            break
        merged_parts.append(part)
        rows += part.segment.rows
    return merged_parts
