"""`SnapshotLoader` writes the layers of a version's snapshot to disk. It reuses the rows of unchanged files, and fetches only changed files.

A snapshot consists of layers: a base with most rows, and up to three overlays with the rows of files that changed later. After a small change,
the layers of the previous version stay, and one overlay is written. A fourth overlay takes over the rows of the last one, and of those before it
that are not much larger, and replaces them. After a large change or a change of the schema, or to merge the layers, a new base is written; rows
of unchanged files are copied into it from the layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.cache.full.snapshot import Layer, Marks, Snapshot
from pyspark_lookup.cache.segments import (
    HELD_AT_MOST,
    ROW_BITS,
    Segment,
    SegmentBuilder,
    SegmentFiles,
    open_rows,
    write_file_list,
)
from pyspark_lookup.columnar.keys import (
    Keys,
    Numbers,
    Seed,
    SkewedError,
    as_bools,
    as_indices,
    as_int64,
    draw_seed,
    one_array,
    sort_distinct,
)
from pyspark_lookup.columnar.types import conform_columns, is_source
from pyspark_lookup.core.memory import free_bytes
from pyspark_lookup.core.threads import run_in_order
from pyspark_lookup.errors import CacheFullError, LookupFunctionError
from pyspark_lookup.scan.equality import DeletedValues
from pyspark_lookup.scan.formats import BATCH_ROWS
from pyspark_lookup.scan.open_file import Projection, Slice
from pyspark_lookup.scan.table_scan import (
    PreparedScan,
    PreparedUnit,
    TableScan,
    live_mask,
    merge_positions,
)
from pyspark_lookup.storage.disk import Disk, ReservedFile, SegmentWriter, key_of
from pyspark_lookup.storage.stores import EqualityGroup, FileVersion
from pyspark_lookup.versions.file_columns import ColumnFiles
from pyspark_lookup.versions.model import Table, TableVersion, file_sizes

PlacedUnit = tuple[PreparedUnit, int]
"""(a unit of a file, the position of the unit's first row in the file)."""
_DECODED_AT_ONCE = 8  # an eighth of the bytes that are fetched together is decoded together


def prepare_units(
    scan: TableScan, table: Table, files: Sequence[FileVersion], projection: Projection, at_once: int
) -> Iterator[list[PlacedUnit]]:
    """The units of the files, in order, in groups that are decoded together: about an eighth of `at_once` bytes each.

    About `at_once` bytes are fetched together. The next bytes are fetched while these are decoded.
    """
    rounds = _rounds(files, scan.splittable(table), at_once)
    first_rows: dict[FileVersion, int] = {}

    def fetch(pieces: list[Slice]) -> PreparedScan:
        return scan.prepare(table, pieces, projection)

    for prepared in run_in_order(fetch, rounds, 1):
        unit_group: list[PlacedUnit] = []
        for unit in prepared.units():
            first = first_rows.get(unit.file, 0)
            first_rows[unit.file] = first + (unit.rows or 0)
            unit_group.append((unit, first))
            if sum(placed_unit.bytes for placed_unit, _ in unit_group) >= at_once // _DECODED_AT_ONCE:
                yield unit_group
                unit_group = []
        if unit_group:
            yield unit_group


def _rounds(files: Sequence[FileVersion], splittable: bool, at_once: int) -> Iterator[list[Slice]]:
    """The files as slices, in groups of about `at_once` bytes, which are fetched together."""
    group: list[Slice] = []
    size = 0
    for file in files:
        file = dataclasses.replace(file, deletes=(), equality=())  # deleted rows are left out later, by their positions
        cuts = max(-(-file.size // at_once), 1) if splittable else 1
        for cut in range(cuts):
            piece = Slice(file, file.size * cut // cuts, file.size * (cut + 1) // cuts)
            if group and size + piece.end - piece.start > at_once:
                yield group
                group, size = [], 0
            group.append(piece)
            size += piece.end - piece.start
    if group:
        yield group


def read_live_rows(
    units: Sequence[PlacedUnit],
    numbers: Mapping[FileVersion, int],
    deleted: Mapping[str, Numbers],
    total: int,
    unit_rows: list[tuple[int, PreparedUnit, int]],
) -> Iterator[tuple[pa.RecordBatch, Numbers, float]]:
    """The rows of units that are not deleted, as `SegmentBuilder.add` takes them: (rows, their positions, their share of `total` bytes).

    `numbers`: the number of each file. `deleted`: the positions of deleted rows, by the URL of the file. `unit_rows`: a list; this function
    appends (file number, unit, number of rows) for each unit, deleted rows included.
    """
    for unit, start in units:
        number, first, share = numbers[unit.file], start, unit.bytes / total
        for batch in unit.batches:
            part = share * batch.num_rows / unit.rows if unit.rows else 0.0
            positions = np.arange(first, first + batch.num_rows, dtype=np.uint64) | np.uint64(number) << ROW_BITS
            live = live_mask(deleted.get(unit.file.url), first, batch.num_rows)
            first += batch.num_rows
            if live is None:
                yield batch, positions, part
            elif live.any():
                yield batch.filter(pa.array(live)), positions[live], part
        if unit.rows is None and first > start:  # the number of rows, and so the share of each batch, is known only now
            yield batch.slice(0, 0), positions[:0], share
        unit_rows.append((number, unit, first - start))


# --- deleted rows ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ChangedDeletes:
    """How the deletes of a version differ from those of `last_version`, the version of the latest layers.

    `old_names`: the names of all deletes of `last_version`. `keeps_deleted`: for each file of the version, whether all its rows that are deleted
    in `last_version` are certainly deleted in the version, too. `may_have_new`: for each file, whether it may have position deletes that it does
    not have in `last_version`.
    """

    old_names: frozenset[str]
    keeps_deleted: Numbers
    may_have_new: Numbers

    @classmethod
    def compare(cls, version: TableVersion, last_version: TableVersion | None) -> ChangedDeletes:
        """Compare the deletes of two versions. If `last_version` is None, all deletes of `version` count as new.

        A delete that both versions have applies to the same files in both. A file that was removed and added again is a different file: if
        deletes apply by sequence numbers, the file's number is part of its identity. A deletion vector that replaces position deletes has all
        their rows, as the Iceberg specification requires.
        """
        files = ColumnFiles.from_files(version.files)
        keeps_deleted, may_have_new = np.ones(len(files), np.bool_), np.ones(len(files), np.bool_)
        if last_version is None:
            return cls(frozenset(), ~keeps_deleted, may_have_new)
        old_files = ColumnFiles.from_files(last_version.files)
        if files.row_names_have_all_deletes and old_files.row_names_have_all_deletes:
            may_have_new = np.isin(files.order, files.difference(old_files).order)
        if not pc.all(pc.is_in(old_files.delete_names, value_set=files.delete_names)).as_py():
            keeps_deleted = ~may_have_new
        # Positions are known by URL. So for a file that was added twice, with two sequence numbers, they must be those of both.
        urls, identities = files.states.urls, files.states.identities
        differs = pc.and_(pc.equal(urls[1:], urls[:-1]), pc.not_equal(identities[1:], identities[:-1]))
        places = np.flatnonzero(as_bools(differs))
        keeps_deleted[places] = keeps_deleted[places + 1] = False
        names = {name for group in version.equality for name in group.names}
        old_deletes = {deletes.name: deletes.sequence for group in last_version.equality for deletes in group.files}
        # An equality delete that the version no longer has deleted rows only in files with lower sequence numbers.
        keeps_deleted &= files.sequences >= max((old_deletes[name] for name in old_deletes.keys() - names), default=0)
        return cls(frozenset([*old_files.delete_names.to_pylist(), *old_deletes]), keeps_deleted, may_have_new)


def read_deleted(
    scan: TableScan,
    table: Table,
    version: TableVersion,
    last: Snapshot | None,
    changes: ChangedDeletes,
    is_fetched: Numbers,
) -> dict[str, Numbers]:
    """The positions of deleted rows, by the URL of their file.

    They are complete for each file without `keeps_deleted`, and for each file whose rows are not taken from `last`, the latest snapshot. For
    any other file, they may lack rows that `last` lacks or marks as deleted: its new equality deletes are compared with the rows of `last`,
    so that its data file is not read again. `changes`: compares the deletes of `version` with those of the version of `last`. `is_fetched`:
    for each file, whether its rows are read from the store although `last` has them.
    """
    files = ColumnFiles.from_files(version.files)
    groups = files.find_equality_places()
    # In the end, the files with deletes that cannot be applied to the rows of a layer.
    needs_reading = files.has_deletes.copy()
    for _, places in groups:
        needs_reading[places] = True
    in_layers: list[tuple[Segment, Numbers, Numbers]] = []
    if last is not None and needs_reading.any():
        for layer in last.layers:
            numbers = layer.segment.files.states.find(files.states)
            is_inside = needs_reading & changes.keeps_deleted & ~is_fetched & (numbers >= 0)
            is_inside[is_inside] = layer.ranks[numbers[is_inside]] >= 0
            for group, places in groups:
                is_inside[places] &= files.sequences[places] >= _last_lacking(layer.segment, group)
            in_layers.append((layer.segment, numbers, is_inside))
            needs_reading &= ~is_inside
    positions = scan.read_deleted(table, files.take(np.flatnonzero(needs_reading)))
    for segment, numbers, is_inside in in_layers:
        with_deletes = files.take(np.flatnonzero(is_inside & files.has_deletes & changes.may_have_new))
        files_with_new = [
            dataclasses.replace(file, deletes=new, equality=())
            for file in with_deletes
            if (new := tuple(deletes for deletes in file.deletes if deletes.name not in changes.old_names))
        ]
        places_in_segment = [(group, places[is_inside[places]]) for group, places in groups]
        group_files = [(group, numbers[places], files.sequences[places]) for group, places in places_in_segment]
        located_rows = _locate_deleted(scan, table, segment, changes.old_names, group_files)
        # A version may name a file twice: the positions of both are merged.
        new_positions = merge_positions(scan.read_deleted(table, files_with_new), located_rows)
        positions = merge_positions(positions, new_positions)
    return positions


def _last_lacking(segment: Segment, group: EqualityGroup) -> int:
    """The highest sequence number of those deletes in a group that cannot be compared with a segment's rows; 0 if all can be compared.

    Deletes cannot be compared if the segment lacks one of the columns by which they delete, or has it in another type.
    """
    fields = {*segment.schema}
    lacking = [deletes[-1] for columns, deletes in group.by_columns if not fields.issuperset(columns.schema)]
    return max((deletes.sequence for deletes in lacking), default=0)


def _locate_deleted(
    scan: TableScan,
    table: Table,
    segment: Segment,
    skipped: frozenset[str],
    groups: Iterable[tuple[EqualityGroup, Numbers, Numbers]],
) -> dict[str, Numbers]:
    """For each file in a segment, by URL, the positions of the rows that equality deletes delete, if the segment has these rows.

    `skipped`: the names of deletes that are not applied. `groups`: (deletes, the numbers in the segment of the files to which they apply, the
    sequence numbers of these files).
    """
    new_deletes = [
        (new, numbers, file_sequences)
        for group, numbers, file_sequences in groups
        if len(numbers) and (new := tuple(deletes for deletes in group.files if deletes.name not in skipped))
    ]
    if not new_deletes:
        return {}
    is_deleted = np.zeros(int(segment.file_starts[-1]), np.bool_)
    for new, numbers, file_sequences in new_deletes:
        sequences = np.full(len(segment.files), np.iinfo(np.int64).max)  # the deletes do not apply to other files
        sequences[numbers] = file_sequences
        for values in scan.deleted_values(table, EqualityGroup(new)):
            for rows, highest in _match_rows(segment, values):
                row_files, row_positions = segment.locate_in_files(rows)
                ordinals = segment.file_starts[row_files] + row_positions
                is_deleted[ordinals[highest > sequences[row_files]]] = True
    deleted = np.flatnonzero(is_deleted)
    bounds = np.searchsorted(deleted, segment.file_starts)
    return {
        segment.files.states.url(number): deleted[bounds[number] : bounds[number + 1]] - segment.file_starts[number]
        for number in np.flatnonzero(np.diff(bounds)).tolist()
    }


def _match_rows(segment: Segment, values: DeletedValues) -> Iterator[tuple[Numbers, Numbers]]:
    """Pairs (row numbers of a segment; for each of these rows, the highest sequence number among the deletes with its values, or -1)."""
    names = values.columns.schema.names
    if set(names) == set(segment.keys) and not any(part.has_nulls for part in values.parts):
        for part in values.parts:
            keys = Keys([one_array(part.rows.column(name)) for name in segment.keys])
            rows = sort_distinct(segment.probe(keys, keys.hashes(segment.seed)).rows)
            # `highest` compares the values once more, because `probe` compares keys as Spark does, and not as Iceberg.
            yield rows, values.highest(segment.take(names, rows))
        return
    for start in range(0, segment.rows, BATCH_ROWS):
        stop = min(start + BATCH_ROWS, segment.rows)
        yield np.arange(start, stop), values.highest(segment.slice(names, start, stop))


# --- loads ----------------------------------------------------------------------------------------

T = TypeVar("T")
Progress = Callable[[int, int], None]  # called with (bytes that are done, bytes in total)

OVERLAYS_AT_MOST = 3
# An overlay is kept if it has at least this many times the rows of the overlays after it, which are replaced.
_KEPT_RATIO = 4
# If more than this share of a version's bytes has changed, a new base costs about as much as an overlay.
_OVERLAY_SHARE = 0.25
_FETCHED_AT_ONCE = 32 * 1024 * 1024
_COPIED_ROWS = 2**18
_THREADS_AT_MOST = 4
_MEMORY_AT_MOST = 2 * 1024**3
_SEEDS = 4
_MIB = 1024 * 1024
_DECODED_SHARE = 4.0  # a guess how many bytes a snapshot takes for each byte of its files
# If there is room for this many bytes of snapshot per byte of file, no footers are read for an estimate.
DECODED_AT_MOST = 20
_FOOTERS_AT_MOST = 16
# In SQLite, a lookup of a key costs as much as a scan of 2.5 rows if a call has 1,000 keys, and of 50 rows if it has one. With a sixteenth of the
# rows, lookups cost between a sixth of a scan and three scans; with more, the table is scanned. A few keys are always looked up.
_LOOKED_UP_SHARE = 1 / 16
_LOOKED_UP_AT_LEAST = 1024
_LOOKED_UP_AT_ONCE = 2**16


@dataclasses.dataclass(frozen=True)
class Layout:
    """The columns of a table's snapshots. `columns`: their names and types. `keys`: the names of the key columns, over which there is an index.

    `data`: all columns of the table in the files. `partitions`: all partition columns. `declared`: as in `Projection`.
    """

    columns: pa.Schema
    keys: tuple[str, ...]
    data: pa.Schema
    partitions: pa.Schema
    declared: bool = False

    @property
    def projection(self) -> Projection:
        return Projection(self.columns, self.data, self.partitions, declared=self.declared)


@dataclasses.dataclass(frozen=True)
class StoredLayer:
    """A layer on disk. `name`: the name of the segment with the layer's rows. `deleted`: the name of the segment that marks deleted rows; None: no row
    is deleted.

    `gone`: the numbers of the layer's files that are not in the version.
    """

    name: str
    deleted: str | None
    gone: tuple[int, ...]


def open_layers(disk: Disk, table_key: str, stored: Sequence[StoredLayer]) -> Snapshot | None:
    """The snapshot that consists of layers on disk, mapped, which are not evicted while it is in use; None if one is missing or damaged."""
    opened: list[tuple[Segment, Marks | None, StoredLayer]] = []
    for layer in stored:
        segment = open_rows(disk, table_key, layer.name)
        if segment is None:
            return None
        deleted = None if layer.deleted is None else _open_marks(disk, table_key, layer.deleted, segment.rows)
        if layer.deleted is not None and deleted is None:
            return None
        if layer.gone and max(layer.gone) >= len(segment.files):
            return None
        opened.append((segment, deleted, layer))
    ranks = _rank_files([(segment.files, layer.gone) for segment, _, layer in opened])
    snapshot = Snapshot([Layer(segment, deleted, ranks[n]) for n, (segment, deleted, _) in enumerate(opened)])
    snapshot.base_name, snapshot.layers_name = stored[0].name, name_layers(stored)
    return snapshot


def _rank_files(parts: Sequence[tuple[SegmentFiles, Sequence[int]]]) -> list[Numbers]:
    """For each of several segments, the positions of its files in the version of a snapshot; -1 for a file that is gone.

    `parts`: (the files of the segment, the numbers of those that are gone).
    """
    live = [np.delete(np.arange(len(files)), gone) for files, gone in parts]
    urls = [files.states.urls.take(as_indices(numbers)) for (files, _), numbers in zip(parts, live, strict=True)]
    order = as_int64(pc.sort_indices(pa.concat_arrays(urls)).cast(pa.int64()))
    positions = np.empty(len(order), np.int64)
    positions[order] = np.arange(len(order))
    ranks = [np.full(len(files), -1, np.int64) for files, _ in parts]
    ends = np.cumsum([len(numbers) for numbers in live])
    for rank, numbers, end in zip(ranks, live, ends.tolist(), strict=True):
        rank[numbers] = positions[end - len(numbers) : end]
    return ranks


def _count_kept(last: Snapshot) -> int:
    """How many layers, counted from the base, a new snapshot keeps when an overlay is added. The new overlay replaces the others.

    With three overlays the last one is replaced. Those before it are kept if they have at least `_KEPT_RATIO` times the rows of those after
    them. So a thousand small changes write a row 14 times on average. If each fourth overlay replaced the other three, it would be 168 times.
    """
    kept = len(last.layers)
    if kept <= OVERLAYS_AT_MOST:
        return kept
    rows = [layer.visible_rows for layer in last.layers]
    kept -= 1
    while kept > 1 and rows[kept - 1] < _KEPT_RATIO * sum(rows[kept:]):
        kept -= 1
    return kept


def name_layers(stored: Sequence[StoredLayer]) -> str:
    """A name for exactly these layers: layers with different rows get a different name."""
    return key_of(*(part for layer in stored for part in (layer.name, layer.deleted, layer.gone)))


def _open_marks(disk: Disk, table_key: str, name: str, rows: int) -> Marks | None:
    """The marks of a layer's deleted rows; None if they are missing, damaged or for another number of rows."""
    opened = disk.open_segment(table_key, name)
    if opened is None:
        return None
    bits = np.frombuffer(opened.regions.get("deleted", b""), np.uint8)
    if len(bits) != (rows + 7) >> 3:
        disk.discard_segment(table_key, name)
        return None
    return Marks(bits)


def bytes_per_file_byte(last: Snapshot) -> float:
    """How many bytes a snapshot takes for each byte of its data files."""
    return last.bytes / max(sum(int(layer.segment.files.states.sizes.sum()) for layer in last.layers), 1)


@dataclasses.dataclass(frozen=True)
class SnapshotLoader:
    """Writes the layers of one table on this host. Only one loader at a time may work on a table; `FullCache` takes a lock for this."""

    scan: TableScan
    disk: Disk
    rng: random.Random
    table: Table
    table_key: str
    memory_bytes: int | None = None  # how much memory a build may use; None: a share of the free memory

    def load(
        self,
        version: TableVersion,
        layout: Layout,
        last: Snapshot | None,
        stored: Sequence[StoredLayer],
        last_version: TableVersion | None,
        progress: Progress,
        share: float | None = None,
        compact: bool = False,
    ) -> tuple[StoredLayer, ...]:
        """Write the layers of exactly `version` to disk, and return them. Reuses the layers of the latest snapshot.

        `last`: these layers, mapped into memory; `stored`: the same layers, as files. `last_version`: their version; if it is None (not known), all
        deletes of `version` are applied again, and equality deletes are compared with the rows of the data files instead of those of the layers.
        `share`: about how many bytes a snapshot takes for each byte of its files; None: it is estimated. `compact`: write one base layer, not an
        overlay on the latest layers.
        Raises SourceChangedError if a file was replaced or removed, SchemaError, UfsError, CacheFullError if the cache directory's budget has
        no room for the layers (before anything is read, if an estimate shows this), or another OSError if the directory cannot be written.
        """
        is_outdated = self._find_outdated(version, layout, last)
        reusable = last if last is not None and is_source(last.schema, layout.columns) else None
        changes = ChangedDeletes.compare(version, None if last is None else last_version)
        deleted = read_deleted(self.scan, self.table, version, reusable, changes, is_outdated)
        load = _Load(version, layout, last, deleted, changes.keeps_deleted, progress, is_outdated)
        small = last is not None and not compact and load.is_small(last)
        file_bytes = max(sum(file.size for file in load.fetched) if small else version.bytes, 1)
        size = self.estimate(version, layout, file_bytes, share if last is None else bytes_per_file_byte(last))
        try:
            with contextlib.closing(self.disk.reserve_room(size)) as load.room:
                return self._load(load, last if small else None, stored)
        except CacheFullError as problem:
            if load.room is not None:
                # The estimate was too low. The next attempt reserves at least as much as this attempt has used, and about twice as much if
                # the budget allows.
                size = max(size + problem.more, min(2 * max(size, _MIB), self.disk.most() * 7 // 8))
            problem.wanted, problem.of_bytes = size, file_bytes
            raise
        finally:  # the next load reads other files, because it finds the rows of these in the layers
            self.scan.forget_files()

    def load_changes(
        self,
        version: TableVersion,
        layout: Layout,
        last: Snapshot,
        stored: Sequence[StoredLayer],
        last_version: TableVersion,
        progress: Progress,
    ) -> tuple[StoredLayer, ...] | None:
        """Write the layers of `version` to disk, if the table can name the keys that have changed since `last_version`, and return them.

        `last_version`: the version of the latest layers, `last`, mapped, and `stored`, on disk. Looks up only the rows of changed keys; all other rows
        stay in the layers. None if the changes are not known, or if a scan of the table costs less. Raises LookupFunctionError if not a single
        key can be looked up, CacheFullError as `load` does, or another OSError.
        """
        if not last.schema.equals(layout.columns) or last.keys != layout.keys:
            return None
        keys = pa.schema([layout.columns.field(name) for name in layout.keys])
        changed = self.scan.changed_keys(last_version, version, keys)
        if changed is None or changed.keyless:
            return None
        if changed.keys.num_rows > max(_LOOKED_UP_SHARE * last.rows, _LOOKED_UP_AT_LEAST):
            return None
        rows = self._look_up(changed.keys, layout, progress)
        if rows is None:
            return None
        merged = last.layers[_count_kept(last) :]
        probed = Keys([one_array(column) for column in changed.keys.columns])
        hashes = probed.hashes(last.seed)
        marks = [layer.marks_with(layer.segment.probe(probed, hashes).rows) for layer in last.layers]
        size = 2 * rows.nbytes + sum(layer.segment.bytes for layer in merged) + _MIB
        with contextlib.closing(self.disk.reserve_room(size)) as room:
            layers = [
                self._keep(room, old, layer, layer_marks, old.gone)
                for old, layer, layer_marks in zip(stored, last.layers, marks, strict=True)
                if layer not in merged
            ]
            parts = [
                Layer(layer.segment, marks[n], layer.ranks) for n, layer in enumerate(last.layers) if layer in merged
            ]
            # If this is raised, the table is scanned, and its new base may have another seed.
            with contextlib.suppress(SkewedError):
                if rows.num_rows or any(part.visible_rows for part in parts):
                    layers.append(self._write_rows(room, layout, last.seed, version.files[0], "", rows, parts))
                return tuple(layers)
        return None

    def _look_up(self, keys: pa.Table, layout: Layout, progress: Progress) -> pa.Table | None:
        """The rows of `keys`, with the columns of the layout.

        None if the lookups of some keys fail and those of others succeed: a scan may be able to read all rows.
        """
        parts = [layout.columns.empty_table()]
        for start in range(0, keys.num_rows, _LOOKED_UP_AT_ONCE):
            progress(start // 2, keys.num_rows)
            try:
                rows = self.scan.rows_by_key(keys.slice(start, _LOOKED_UP_AT_ONCE), layout.columns)
            except LookupFunctionError as problem:
                if 0 < len(problem.failures) < min(keys.num_rows - start, _LOOKED_UP_AT_ONCE):
                    return None
                raise
            assert rows is not None
            parts.append(rows.select(layout.columns.names))
        return pa.concat_tables(parts)

    def merge_layers(self, version: TableVersion, layout: Layout, last: Snapshot) -> tuple[StoredLayer, ...]:
        """Write all rows of `last`, which `load_changes` has made, to a single base, and return this layer. Raises CacheFullError or OSError."""
        rows = layout.columns.empty_table()
        with contextlib.closing(self.disk.reserve_room(last.bytes)) as room:
            for attempt in range(_SEEDS):
                seed, strict = draw_seed(self.rng), attempt + 1 < _SEEDS
                with contextlib.suppress(SkewedError):
                    file = version.files[0]
                    return (self._write_rows(room, layout, seed, file, file.identity, rows, last.layers, strict),)
        raise AssertionError("the last attempt accepts any seed")

    def _keep(
        self,
        room: ReservedFile | None,
        stored: StoredLayer,
        layer: Layer,
        marks: Marks | None,
        gone_files: tuple[int, ...],
    ) -> StoredLayer:
        """A layer of the latest snapshot whose deleted rows are now `marks`. `gone_files`: the numbers of its files that are gone.

        Writes the marks to disk if they have changed.
        """
        if marks is None:
            return StoredLayer(stored.name, None, gone_files)
        if layer.deleted is not None and np.array_equal(marks.bits, layer.deleted.bits):
            return StoredLayer(stored.name, stored.deleted, gone_files)
        writer = self.disk.create_segment({"deleted": len(marks.bits)}, room)
        with contextlib.closing(writer):
            writer.append("deleted", marks.bits)
            return StoredLayer(stored.name, self._publish(writer, {}), gone_files)

    def _write_rows(
        self,
        room: ReservedFile,
        layout: Layout,
        seed: Seed,
        file: FileVersion,
        identity: str,
        rows: pa.Table,
        parts: Sequence[Layer],
        strict: bool = True,
    ) -> StoredLayer:
        """Write a new segment with `rows` and the rows of `parts`, and return its layer. The segment has one file: `file`, but with `identity`.

        Without an identity, no later load takes the rows for all rows of the file.
        """
        memory_bytes, threads = self._memory_bytes(), _threads()
        spill = functools.partial(self.disk.reserve, out_of=room)
        builder = SegmentBuilder(layout.columns, layout.keys, seed, spill, memory_bytes, threads)
        total = max(rows.num_rows + sum(part.visible_rows for part in parts), 1)
        names = layout.columns.names

        def batches() -> Iterator[pa.RecordBatch]:
            yield from rows.to_batches(max_chunksize=BATCH_ROWS)
            for part in parts:
                for columns, _ in part.pieces(names, range(part.segment.rows)):
                    yield conform_columns(dict(zip(names, columns, strict=True)), len(columns[0]), layout.columns, "")

        with contextlib.closing(builder):
            count = 0
            for batch in batches():
                positions = np.arange(count, count + batch.num_rows, dtype=np.uint64)
                builder.add([(batch, positions, batch.num_rows / total)])
                count += batch.num_rows
            writer = builder.finish(lambda sizes: self.disk.create_segment(sizes, room), [count], strict)
        with contextlib.closing(writer):
            size = file.size if identity else 0
            write_file_list(writer, SegmentFiles.single(file.url, size, identity, count))
            name = self._publish(writer, builder.meta)
        return StoredLayer(name, None, ())

    def _find_outdated(self, version: TableVersion, layout: Layout, last: Snapshot | None) -> Numbers:
        """For each file, whether the layers have it without its values in some column, because the column was added or renamed since.

        Reads footers, unless such a column is a partition column.
        """
        files = ColumnFiles.from_files(version.files)
        is_outdated = np.zeros(len(files), np.bool_)
        if last is None or not version.stored_columns:
            return is_outdated
        columns = pa.schema([field for field in layout.columns if field.name not in last.schema.names])
        if not len(columns):
            return is_outdated
        is_in_layers: Numbers = is_outdated.copy()
        for layer in last.layers:
            is_in_layers |= layer.segment.files.states.find(files.states) >= 0
        if any(name in layout.partitions.names for name in columns.names) or not is_in_layers.any():
            return is_in_layers
        bounds = self.scan.bounds(self.table, files.take(np.flatnonzero(is_in_layers)), layout.partitions, columns)
        is_outdated[is_in_layers] = [any(stats is None or not stats.all_null for stats in row) for row in bounds]
        return is_outdated

    def _load(self, load: _Load, under: Snapshot | None, stored: Sequence[StoredLayer]) -> tuple[StoredLayer, ...]:
        if under is not None:
            # If this is raised, write a base, which may have another seed than the layers.
            with contextlib.suppress(SkewedError):
                return self._write_overlay(load, under, stored)
        for attempt in range(_SEEDS):
            seed, strict = draw_seed(self.rng), attempt + 1 < _SEEDS
            with contextlib.suppress(SkewedError):
                return (self._write(load, np.arange(len(load.files)), seed, strict),)
        raise AssertionError("the last attempt accepts any seed")

    def estimate(self, version: TableVersion, layout: Layout, file_bytes: int, share: float | None) -> int:
        """About how many bytes of the cache directory's budget it takes to build a snapshot of `file_bytes` bytes of a version's files.

        `share`: how many bytes a snapshot takes for each byte of its files. None: it is guessed if there is plenty of room, otherwise
        estimated from a few footers.
        """
        if share is None:
            share = _DECODED_SHARE
            if self.disk.lacks("segments", file_bytes * DECODED_AT_MOST) > 0:
                share = self._decoded_share(version, layout)
        size = int(file_bytes * share)
        # The latter: chunks that wait on disk.
        return size + max(size - min(self._memory_bytes() // 4, HELD_AT_MOST), 0)

    def _decoded_share(self, version: TableVersion, layout: Layout) -> float:
        """About how many bytes a snapshot takes for each byte of its files, by the footers of some of the files."""
        places = np.flatnonzero(file_sizes(version.files))
        places = places[:: max(len(places) // _FOOTERS_AT_MOST, 1)][:_FOOTERS_AT_MOST]
        sample = [version.files[place] for place in places.tolist()]
        decoded = self.scan.decoded_bytes(self.table, sample, layout.columns.names) if sample else None
        return _DECODED_SHARE if decoded is None else decoded / sum(file.size for file in sample)

    def _write_overlay(self, load: _Load, last: Snapshot, stored: Sequence[StoredLayer]) -> tuple[StoredLayer, ...]:
        """Write an overlay with the rows of new files, and mark the rows of removed files in the latest layers. Returns all these layers.

        If it would be the fourth overlay, it also gets the rows of one or more of the other three, and replaces them.
        """
        layer_numbers = range(_count_kept(last) if load.fetched else len(last.layers))
        layers = []
        for n in layer_numbers:
            layer, ranks = last.layers[n], load.ranks[n]
            if n == 0 or (ranks >= 0).any():
                marks, gone_files = load.find_deleted(n, ranks), tuple(np.flatnonzero(ranks < 0).tolist())
                layers.append(self._keep(load.room, stored[n], layer, marks, gone_files))
        places = np.flatnonzero(~np.isin(load.layer_numbers, layer_numbers))
        if len(places):
            layers.append(self._write(load, places, last.seed, True))
        return tuple(layers)

    def _publish(self, writer: SegmentWriter, meta: Mapping[str, Any]) -> str:
        """Write the footer of a segment, and then show the segment to other processes. Returns its name."""
        name = f"{self.rng.getrandbits(64):016x}"
        writer.finish(meta)
        self.disk.publish_segment(self.table_key, name, writer)
        return name

    def _write(self, load: _Load, places: Numbers, seed: Seed, strict: bool) -> StoredLayer:
        """Write a new segment with the rows of the files at `places` in the version, and return its layer.

        Copies the rows that the latest layers have, and fetches the others. `places` must include all files of `load.fetched`.
        """
        schema = load.layout.columns
        states = load.files.states.take(places)
        fetched_numbers = np.flatnonzero(load.layer_numbers[places] < 0)
        numbers = dict(zip(load.fetched, fetched_numbers.tolist(), strict=True))
        units: dict[int, list[tuple[int, int]]] = {number: [] for number in numbers.values()}
        # Parts of the segment's list of files: (positions in `places`, the files).
        file_lists: list[tuple[Numbers, SegmentFiles]] = []
        memory_bytes, threads = self._memory_bytes(), _threads()
        builder = SegmentBuilder(
            schema, load.layout.keys, seed, lambda size: self.disk.reserve(size, load.room), memory_bytes, threads
        )
        total = max(int(states.sizes.sum()), 1)
        progress = _Progress(load.progress, total)

        def decode(placed_units: Sequence[PlacedUnit]) -> list[tuple[int, PreparedUnit, int]]:
            """Pass the rows of some units to the builder. Returns (file number, unit, number of rows) for each unit."""
            unit_rows: list[tuple[int, PreparedUnit, int]] = []
            builder.add(
                map(progress.report_piece, read_live_rows(placed_units, numbers, load.deleted, total, unit_rows))
            )
            return unit_rows

        with contextlib.closing(builder):
            for layer in load.select_layers(places):
                copied_files = layer.segment.files.take(np.flatnonzero(layer.ranks >= 0))
                file_lists.append((layer.ranks[layer.ranks >= 0], copied_files))
                size = int(copied_files.states.sizes.sum())
                names = [name for name in schema.names if name in layer.segment.schema.names]
                share = size / total / max(layer.visible_rows, 1)

                def copy(rows: range, layer: Layer = layer, names: list[str] = names, share: float = share) -> None:
                    """Pass some rows of a layer to the builder, cast to the types of the layout, and with nulls in columns that the layer lacks."""
                    batches = (
                        (conform_columns(dict(zip(names, columns, strict=True)), len(positions), schema, ""), positions)
                        for columns, positions in layer.pieces(names, rows)
                    )
                    builder.add((batch, positions, share * len(positions)) for batch, positions in batches)

                cuts = range(0, layer.segment.rows, _COPIED_ROWS)
                parts = (range(start, min(start + _COPIED_ROWS, layer.segment.rows)) for start in cuts)
                for _ in run_in_order(copy, parts, threads):
                    pass
                progress.read(size)
            at_once = min(_FETCHED_AT_ONCE, memory_bytes // 8)
            fetched = prepare_units(self.scan, self.table, load.fetched, load.layout.projection, at_once)
            for unit_rows in run_in_order(decode, fetched, threads):
                for number, unit, rows in unit_rows:
                    units[number].append((unit.middle, rows))
                    progress.read(unit.bytes)
            # If the version names a file twice, the last place gets the rows. The others get an entry without rows.
            listed_numbers = np.concatenate([*(some for some, _ in file_lists), np.array([*units], np.int64)])
            units |= {number: [] for number in np.delete(np.arange(len(states)), listed_numbers).tolist()}
            read_numbers = np.array([*units], np.int64)
            file_lists.append((read_numbers, SegmentFiles.from_units(states.take(read_numbers), [*units.values()])))
            files = SegmentFiles.merge(file_lists)
            progress.all_read()
            writer = builder.finish(
                lambda sizes: self.disk.create_segment(sizes, load.room), files.rows, strict, progress.report_written
            )
        with contextlib.closing(writer):
            write_file_list(writer, files)
            name = self._publish(writer, builder.meta)
        return StoredLayer(name, None, ())

    def _memory_bytes(self) -> int:
        return _memory_bytes() if self.memory_bytes is None else self.memory_bytes


class _Progress:
    """Reports how much of a build is done. Reading the files counts as the first half, writing the segment as the second."""

    def __init__(self, tell: Progress, total: int) -> None:
        self._tell = tell
        self._total = total
        self._read = 0
        self._lock = threading.Lock()  # one thread at a time reports, so the reported number never decreases

    def read(self, size: int) -> None:
        with self._lock:
            self._read += size
            self._tell(self._read // 2, self._total)

    def report_piece(self, piece: T) -> T:
        """Report that the build makes progress, and return `piece`.

        It is not enough to report after each unit: a provider's scan is a single unit, and may take an hour.
        """
        self.read(0)
        return piece

    def all_read(self) -> None:
        self._read = self._total
        self.read(0)

    def report_written(self, share: float) -> None:
        self._tell((self._total + int(self._total * share)) // 2, self._total)


class _Load:
    """A version to load, and which of its files the latest layers have.

    `layer_numbers`: for each file, the number of the layer that has it (-1: none has it). `numbers`: for each file, its number among the files
    of this layer (-1: no layer has it). `ranks`: for each layer, the position in the version of each of its files (-1: the file is not in the
    version). `fetched`: the files to read from the store, because no layer has all their rows and columns. `deleted`: what `read_deleted`
    returns. `room`: the part of the budget that is reserved for the load. The argument `keeps_deleted` is that of `ChangedDeletes`, and
    `is_outdated` is what `SnapshotLoader._find_outdated` returns.

    If a column's type in the layers does not widen to the current type, the layers count as empty: their values differ from those of the
    files. For instance, all values of a partition column were numbers, and now one of them is text.
    """

    def __init__(
        self,
        version: TableVersion,
        layout: Layout,
        last: Snapshot | None,
        deleted: Mapping[str, Numbers],
        keeps_deleted: Numbers,
        progress: Progress,
        is_outdated: Numbers,
    ) -> None:
        self.version = version
        self.layout = layout
        self.deleted = deleted
        self.progress = progress
        self.room: ReservedFile | None = None
        self._layers = last.layers if last is not None else ()
        self.files = files = ColumnFiles.from_files(version.files)
        self.layer_numbers, self.numbers = np.full(len(files), -1), np.full(len(files), -1)
        self.ranks = [np.full(len(layer.segment.files), -1, np.int64) for layer in self._layers]
        # For each file of each layer, whether its rows that the layer marks as deleted stay deleted. Also true for files that are gone.
        self._keeps_marks = [np.ones(len(layer.segment.files), np.bool_) for layer in self._layers]
        self._gone_bytes = 0
        is_usable = last is not None and is_source(last.schema, layout.columns)
        for layer_number, layer in enumerate(self._layers):
            numbers = layer.segment.files.states.find(files.states)
            is_inside = (numbers >= 0) & ~is_outdated & is_usable
            is_inside[is_inside] = layer.ranks[numbers[is_inside]] >= 0
            # A segment lacks the rows that were deleted when it was written. The version to load may be an older one, which has these rows.
            may_lack_rows = is_inside & ~keeps_deleted
            if may_lack_rows.any():
                is_inside[may_lack_rows] = _has_all_rows(layer.segment, deleted)[numbers[may_lack_rows]]
            places = np.flatnonzero(is_inside)
            self.layer_numbers[places], self.numbers[places] = layer_number, numbers[places]
            self.ranks[layer_number][numbers[places]] = places
            self._keeps_marks[layer_number][numbers[places]] = keeps_deleted[places]
            is_gone = (layer.ranks >= 0) & (self.ranks[layer_number] < 0)
            self._gone_bytes += int(layer.segment.files.states.sizes[is_gone].sum())
        self.fetched = tuple(files.take(np.flatnonzero(self.layer_numbers < 0)))

    def is_small(self, last: Snapshot) -> bool:
        """Whether so little has changed since the latest layers were written that an overlay costs less than a new base."""
        same_layout = last.schema.equals(self.layout.columns) and last.keys == self.layout.keys
        changed = sum(file.size for file in self.fetched) + self._gone_bytes
        return same_layout and changed <= _OVERLAY_SHARE * max(self.version.bytes, 1)

    def find_deleted(self, layer_number: int, ranks: Numbers) -> Marks | None:
        """Which rows of a layer are deleted in the version, or belong to a file with the rank -1; None if no row does. `ranks`: as in
        `Layer.find_deleted`."""
        layer, keeps_marks = self._layers[layer_number], self._keeps_marks[layer_number]
        return layer.without_marks(~keeps_marks).find_deleted(ranks, self.deleted)

    def select_layers(self, places: Numbers) -> Iterator[Layer]:
        """The layers that have rows of the files at `places` in the version, with all other rows marked as deleted.

        Their ranks are positions in `places`.
        """
        for layer_number, layer in enumerate(self._layers):
            positions = np.flatnonzero(self.layer_numbers[places] == layer_number)
            ranks = np.full(len(layer.segment.files), -1, np.int64)
            ranks[self.numbers[places[positions]]] = positions
            if len(positions):
                yield Layer(layer.segment, self.find_deleted(layer_number, ranks), ranks)


def _has_all_rows(segment: Segment, deleted: Mapping[str, Numbers]) -> Numbers:
    """For each file of a segment, whether the segment has all rows of the file that are not deleted in a version.

    `deleted`: the positions of the version's deleted rows, by URL. The result is only valid for files of which it has all these rows.
    """
    # The version may delete the same rows by other delete files, because a compaction rewrites delete files. So rows are compared.
    is_present = np.zeros(int(segment.file_starts[-1]), np.bool_)
    for start in range(0, segment.rows, BATCH_ROWS):
        is_present[segment.ordinals[start : start + BATCH_ROWS].astype(np.int64)] = True
    for number, rows in zip(segment.files.states.find_urls(deleted).tolist(), deleted.values(), strict=True):
        if number >= 0:
            within = rows[: np.searchsorted(rows, segment.files.rows[number])]
            is_present[segment.file_starts[number] + within] = True
    is_whole = np.ones(len(segment.files), np.bool_)
    has_rows = np.flatnonzero(segment.files.rows)
    if len(has_rows):
        is_whole[has_rows] = np.logical_and.reduceat(is_present, segment.file_starts[has_rows])
    return is_whole


def _threads() -> int:
    """The number of threads that build a segment: one for each core that the process may use, at most `_THREADS_AT_MOST`."""
    return min(len(os.sched_getaffinity(0)), _THREADS_AT_MOST)


def _memory_bytes() -> int:
    """The bytes of memory that a build may use: an eighth of the free memory, within limits."""
    return max(min(free_bytes() // 8, _MEMORY_AT_MOST), 16 * 1024 * 1024)
