"""`Snapshot`: all rows of a version, in layers. These are a base and up to three overlays, each a segment of rows with marks for deleted rows.

A row of a layer is marked as deleted if it was deleted, or if its file is not in the version. All rows of a file are in one layer. The rows of
a batch of keys are gathered layer by layer, and then sorted by key, file and row in the file. A scan of a snapshot returns the same columns,
types and rows as a scan of the version's files.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.cache.segments import ROW_BITS, Segment
from pyspark_lookup.columnar.keys import SEED, Keys, Numbers, OneKey, as_indices, distinct_keys, hash_one
from pyspark_lookup.columnar.predicate import And, Compare, In, Predicate, referenced_columns
from pyspark_lookup.columnar.types import PLAN_AGAIN, cast_column, check_readable, conform_columns
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.errors import SchemaError
from pyspark_lookup.scan.formats import BATCH_ROWS
from pyspark_lookup.scan.open_file import Projection
from pyspark_lookup.scan.table_scan import coalesce, matching_rows
from pyspark_lookup.versions.model import TableVersion

_FEW = 8  # up to this many rows are read faster value by value than by column
_SELECTED_AT_ONCE = 16 * BATCH_ROWS  # so many rows of a layer are tested before those that are selected are returned
_COMPACTION_SHARE = 0.25  # see `is_worth_compacting`
_BITS_OF_BYTE = np.array([number.bit_count() for number in range(256)], np.uint8)
_NEIGHBOURS = 6  # 2**6 neighbouring rows of a file share a mark in the first, rough search of `Layer.find_deleted`
Ranges = Sequence[tuple[str, int, int]]
"""Parts of files, each as (URL, first byte, byte after the last). A part consists of the row groups whose middle byte is in it."""


@dataclasses.dataclass(frozen=True)
class Marks:
    """Which rows of a segment are deleted. `bits`: one bit for each row, in bytes, the lowest bit first."""

    bits: Numbers

    @cached_property
    def count(self) -> int:
        return int(_BITS_OF_BYTE[self.bits].sum(dtype=np.int64))

    def contains(self, rows: Numbers) -> Numbers:
        """For each of `rows`, whether it is deleted."""
        return np.asarray((self.bits[rows >> 3] >> (rows & 7).astype(np.uint8) & 1).view(np.bool_))

    def between(self, start: int, stop: int) -> Numbers:
        """For each row from `start` to before `stop`, whether it is deleted."""
        bits = np.unpackbits(self.bits[start >> 3 : (stop + 7) >> 3], bitorder="little")
        return bits[start & 7 : (start & 7) + stop - start].view(np.bool_)

    def __contains__(self, row: int) -> bool:
        return bool(self.bits[row >> 3] >> (row & 7) & 1)

    @classmethod
    def from_rows(cls, deleted: Numbers, count: int) -> Marks:
        """The marks of a segment with `count` rows. `deleted`: the numbers of its deleted rows, in any order."""
        bits = np.zeros((count + 7) >> 3, np.uint8)
        np.bitwise_or.at(bits, deleted >> 3, np.left_shift(np.uint8(1), (deleted & 7).astype(np.uint8)))
        return cls(bits)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A segment in a snapshot. `deleted`: which of its rows are deleted (None: no row).

    `ranks`: for each of its files, the position of the file in the version; -1 if the version does not have the file.
    """

    segment: Segment
    deleted: Marks | None
    ranks: Numbers

    @property
    def visible_rows(self) -> int:
        return self.segment.rows - (0 if self.deleted is None else self.deleted.count)

    def marks_with(self, rows: Numbers) -> Marks | None:
        """The marks of the layer's deleted rows and of `rows`; None if there are none."""
        if not len(rows):
            return self.deleted
        marks = Marks.from_rows(rows, self.segment.rows)
        return marks if self.deleted is None else Marks(marks.bits | self.deleted.bits)

    def without_marks(self, is_unmarked: Numbers) -> Layer:
        """The layer without the marks of the rows of some files. `is_unmarked`: for each file, whether its rows lose their marks."""
        if self.deleted is None or not is_unmarked.any():
            return self
        rows = np.flatnonzero(self.deleted.between(0, self.segment.rows))
        rows = rows[~is_unmarked[self.segment.locate_in_files(rows)[0]]]
        return Layer(self.segment, Marks.from_rows(rows, self.segment.rows) if len(rows) else None, self.ranks)

    def find_deleted(self, ranks: Numbers, deleted: Mapping[str, Numbers]) -> Marks | None:
        """Which rows of the layer another version, or a selection of that version's files, does not have; None if it has them all.

        These are the rows that the layer marks, the rows of files with the rank -1, and the rows whose position in their file is in `deleted`
        (by URL). `ranks`: for each of the layer's files, its position in the other version or the selection; -1: it is not there.
        """
        segment = self.segment
        is_gone = (ranks < 0) & (self.ranks >= 0) & (np.diff(segment.file_starts) > 0)
        numbers = segment.files.states.find_urls(deleted)
        rows_by_file = [
            (number, rows)
            for number, rows in zip(numbers.tolist(), deleted.values(), strict=True)
            if number >= 0 and ranks[number] >= 0
        ]
        if (not is_gone.any() and not rows_by_file) or not segment.rows:
            return self.deleted
        marked = np.repeat(is_gone, segment.files.rows)
        for number, rows in rows_by_file:
            marked[segment.file_starts[number] + rows[: np.searchsorted(rows, segment.files.rows[number])]] = True
        marked_blocks = np.logical_or.reduceat(marked, np.arange(0, len(marked), 1 << _NEIGHBOURS))
        row_arrays = []
        for start in range(0, segment.rows, BATCH_ROWS):
            ordinals = segment.ordinals[start : start + BATCH_ROWS]
            # Most batches have few deleted rows. They are first searched for in the small array of marked blocks, which stays in the
            # processor's cache.
            rows = np.flatnonzero(marked_blocks.take(ordinals >> _NEIGHBOURS, mode="wrap"))
            row_arrays.append(start + rows[marked.take(ordinals[rows], mode="wrap")])
        return self.marks_with(np.concatenate(row_arrays))

    def pieces(self, names: Sequence[str], among: range) -> Iterator[tuple[list[pa.Array], Numbers]]:
        """The rows of a range that are not deleted, in batches: (their columns `names`, their positions)."""
        for start in among[::BATCH_ROWS]:
            stop = min(start + BATCH_ROWS, among.stop)
            rows = np.arange(start, stop)
            if self.deleted is not None:
                rows = rows[~self.deleted.between(start, stop)]
            if len(rows):
                yield self.segment.take(names, rows), self.positions(rows)

    def positions(self, rows: Numbers) -> Numbers:
        """The position of each row in the version, as a number: rank of its file << ROW_BITS | position in the file."""
        files, within = self.segment.locate_in_files(rows)
        return np.asarray((self.ranks[files].astype(np.uint64) << ROW_BITS) | within.astype(np.uint64))


@dataclasses.dataclass(frozen=True)
class Answer:
    """The rows of a batch of keys. `keys`: for each row, the position of its key in the batch (int64, ascending). `columns`: the rows' columns."""

    keys: Numbers
    columns: list[pa.Array]


class Snapshot:
    """All rows of one version. `layers`: the base, then the overlays. All layers have the same schema, seed and keys.

    A row has a number in the snapshot, too: its number in its layer, added to the number of all rows of the layers before.
    """

    version: TableVersion  # set after the constructor, when the version's record has been read
    base_name = ""  # the name of the base's segment, if it is on disk
    layers_name = ""  # the name of exactly these layers

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = tuple(layers)
        base = layers[0].segment
        self.schema = base.schema
        self.keys = base.keys
        self.seed = base.seed
        self.rows = sum(layer.visible_rows for layer in layers)
        self.bytes = sum(layer.segment.bytes for layer in layers)
        # With several layers this is not known (None), because two layers may have rows of the same key.
        self.unique = base.unique if len(self.layers) == 1 else None
        self._uses_hashes = any(layer.segment.uses_hashes for layer in layers)

    @cached_property
    def first_numbers(self) -> Numbers:
        """The number of each layer's first row, and the number of all rows, including deleted ones."""
        return np.cumsum([0, *(layer.segment.rows for layer in self.layers)])

    def take(self, names: Sequence[str], rows: Numbers) -> list[pa.Array]:
        """The named columns of the rows with these numbers, in their order."""
        if len(self.layers) == 1:
            return self.layers[0].segment.take(names, rows)
        parts, places, count = [], np.empty(len(rows), np.int64), 0
        for layer, first, end in zip(self.layers, self.first_numbers[:-1], self.first_numbers[1:], strict=True):
            own = np.flatnonzero((first <= rows) & (rows < end))
            places[own] = np.arange(count, count + len(own))
            count += len(own)
            parts.append(layer.segment.take(names, rows[own] - first))
        return self._join(names, parts, as_indices(places))

    def _join(self, names: Sequence[str], parts: Sequence[list[pa.Array]], indices: pa.Array) -> list[pa.Array]:
        """The columns of parts from several layers, one after the other, in the order of `indices`."""
        return [
            pc.take(_concat(arrays, self.schema.field(name).type), indices, boundscheck=False)
            for name, arrays in zip(names, zip(*parts, strict=True), strict=True)
        ]

    def is_worth_compacting(self) -> bool:
        """Whether the rows in overlays and the deleted rows, added up, are more than a quarter of the base's rows."""
        base, *overlays = self.layers
        over = sum(layer.segment.rows for layer in overlays)
        deleted = sum(layer.segment.rows - layer.visible_rows for layer in self.layers)
        return over + deleted > _COMPACTION_SHARE * base.segment.rows

    def get(self, names: Sequence[str], keys: Keys) -> Answer:
        """The columns `names` of all rows that have any of the keys. The rows of one key are in file order."""
        return self._gather(names, self._find(keys))

    def _gather(self, names: Sequence[str], layer_matches: list[tuple[Layer, Numbers, Numbers]]) -> Answer:
        if not layer_matches:
            nothing = np.zeros(0, np.int64)
            return Answer(nothing, self.layers[0].segment.take(names, nothing))
        if len(layer_matches) == 1:
            ((layer, numbers, rows),) = layer_matches
            return Answer(numbers, layer.segment.take(names, rows))
        numbers = np.concatenate([numbers for _, numbers, _ in layer_matches])
        positions = np.concatenate([layer.positions(rows) for layer, _, rows in layer_matches])
        order = np.lexsort((positions, numbers))
        parts = [layer.segment.take(names, rows) for layer, _, rows in layer_matches]
        return Answer(numbers[order], self._join(names, parts, as_indices(order)))

    def get_one(self, names: Sequence[str], key: OneKey) -> list[dict[str, Any]]:
        """The columns `names` of the rows that have one key, in file order, as dictionaries of Python values. Only for keys that are a single
        column."""
        hashed = hash_one(key, self.seed) if self._uses_hashes else 0
        layer_rows: list[tuple[Layer, Sequence[int]]] = []
        for layer in self.layers:
            rows: Sequence[int] = layer.segment.locate_rows(key, hashed)
            if layer.deleted is not None and rows:
                rows = [row for row in rows if row not in layer.deleted]
            if rows:
                layer_rows.append((layer, rows))
        if not layer_rows:
            return []
        if len(layer_rows) == 1 and len(layer_rows[0][1]) <= _FEW:
            ((layer, rows),) = layer_rows
            return [layer.segment.row(names, row) for row in rows]
        parts = [(layer, np.zeros(len(rows), np.int64), np.array(rows, np.int64)) for layer, rows in layer_rows]
        columns = [column.to_pylist() for column in self._gather(names, parts).columns]
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    def _find(self, keys: Keys) -> list[tuple[Layer, Numbers, Numbers]]:
        """For each layer that has rows of the keys: (the layer, for each row the position of its key, for each row its number in the layer). Deleted
        rows are left out."""
        hashes = keys.hashes(self.seed)
        layer_matches: list[tuple[Layer, Numbers, Numbers]] = []
        for layer in self.layers:
            matches = layer.segment.probe(keys, hashes)
            numbers, rows = matches.keys, matches.rows
            if layer.deleted is not None and len(rows):
                is_live = ~layer.deleted.contains(rows)
                numbers, rows = numbers[is_live], rows[is_live]
            if len(rows):
                layer_matches.append((layer, numbers, rows))
        return layer_matches

    def batches(self, names: Sequence[str], ranges: Ranges | None = None) -> Iterator[tuple[int, list[pa.Array]]]:
        """All rows, or those in some parts of files, in no particular order, in batches: (number of rows, their columns `names`)."""
        for layer in self.layers:
            bounds = None if ranges is None else _bounds(layer, ranges)
            if bounds is not None and not len(bounds):
                continue
            # Each task of a scan goes through all rows for those of its parts of files, which lie anywhere among them. Rows are taken from many
            # batches at once, so that few rows of each make large batches, too.
            for start in range(0, layer.segment.rows, _SELECTED_AT_ONCE):
                stop = min(start + _SELECTED_AT_ONCE, layer.segment.rows)
                is_selected = _mask(layer, bounds, start, stop)
                if is_selected is None or is_selected.all():
                    for first in range(start, stop, BATCH_ROWS):
                        end = min(first + BATCH_ROWS, stop)
                        yield end - first, layer.segment.slice(names, first, end)
                    continue
                rows = start + np.flatnonzero(is_selected)
                for first in range(0, len(rows), BATCH_ROWS):
                    selected = rows[first : first + BATCH_ROWS]
                    yield len(selected), layer.segment.take(names, selected)


def _bounds(layer: Layer, ranges: Ranges) -> Numbers:
    """Where the rows of `ranges` are in a layer, as ordinals (see `cache.segments`): start, end, start, end and so on, ascending."""
    numbers = layer.segment.files.states.find_urls(url for url, _, _ in ranges)
    bounds: list[tuple[int, int]] = []
    for (_, first, end), number in zip(ranges, numbers.tolist(), strict=True):
        if number < 0 or layer.ranks[number] < 0:
            continue
        at = int(layer.segment.file_starts[number])
        for middle, rows in layer.segment.files.units(number):
            if first <= middle < end and rows:
                bounds.append((at, at + rows))
            at += rows
    # Merge neighbouring ranges: otherwise an ordinal at the edge between two ranges would count as outside of both.
    merged: list[int] = []
    for low, high in sorted(bounds):
        if merged and merged[-1] == low:
            merged[-1] = high
        else:
            merged += [low, high]
    return np.array(merged, np.int64)


def _mask(layer: Layer, bounds: Numbers | None, start: int, stop: int) -> Numbers | None:
    """For each row from `start` to before `stop`, whether it is not deleted and is inside the bounds; None if all are."""
    is_selected: Numbers | None = None
    if bounds is not None:
        ordinals = layer.segment.ordinals[start:stop]
        if len(bounds) == 2:
            low, high = bounds.tolist()  # NumPy compares with Python's integers without making the ordinals wider
            is_selected = (ordinals >= low) & (ordinals < high)
        else:
            is_selected = (np.searchsorted(bounds, ordinals.astype(np.int64), "right") & 1).astype(np.bool_)
    if layer.deleted is not None:
        is_live = ~layer.deleted.between(start, stop)
        is_selected = is_live if is_selected is None else is_selected & is_live
    return is_selected


def _concat(arrays: Sequence[pa.Array], kind: pa.DataType) -> pa.Array:
    """The arrays of several layers as one array of type `kind`. They are cast, because a text column may have Arrow's large type
    in some layers only."""
    return pa.concat_arrays([cast_column(array, kind, "", "") for array in arrays])


_KEYS_AT_MOST = 100_000  # if a predicate allows more keys, a scan is as fast as a lookup of these keys


def snapshot_batches(
    snapshot: Snapshot,
    projection: Projection,
    ranges: Ranges | None,
    whole: Callable[[], pa.Schema],
    url: str,
    metrics: CacheMetricGroup,
) -> Iterator[pa.RecordBatch]:
    """The rows of a projection in a snapshot, or in parts of its files (`ranges`).

    If the predicate limits the keys to a list of values, the index finds the rows. Every error is raised before the first batch. `whole`:
    returns the columns of all files of the version.
    """
    predicate = projection.predicate
    tested = referenced_columns(predicate)
    names = list(dict.fromkeys([*projection.columns.names, *sorted(tested)]))
    stored = [name for name in names if name in snapshot.schema.names]
    _check(snapshot, projection, names, whole, url)
    keyed = pa.schema([snapshot.schema.field(name) for name in snapshot.keys])
    keys = key_values(predicate, keyed) if predicate is not None and ranges is None else None
    if keys is not None:
        # Two values of the predicate may be the same key: NaN twice, or two numbers that are equal as float32.
        probed = Keys(keys)
        if probed.rows > 1:
            distinct_rows = as_indices(np.sort(distinct_keys(probed, probed.hashes(SEED))[0]))
            probed = Keys([values.take(distinct_rows) for values in keys])
        answer = snapshot.get(stored, probed)
        pieces: Iterator[tuple[int, list[pa.Array]]] = iter([(len(answer.keys), answer.columns)])
    else:
        pieces = snapshot.batches(stored, ranges)

    def batches() -> Iterator[pa.RecordBatch]:
        for rows, columns in pieces:
            for start in range(0, rows, BATCH_ROWS):
                part = [column.slice(start, BATCH_ROWS) for column in columns] if rows > BATCH_ROWS else columns
                stored_columns = dict(zip(stored, part, strict=True))
                batch = plan_columns(stored_columns, min(rows - start, BATCH_ROWS), names, projection, url)
                matching_batch = matching_rows(batch, predicate)
                if matching_batch is not None:
                    yield matching_batch.select(projection.columns.names)

    return coalesce(batches(), projection.columns, metrics)


def _check(
    snapshot: Snapshot, projection: Projection, names: Sequence[str], whole: Callable[[], pa.Schema], url: str
) -> None:
    """Raise the SchemaError that a read of the files would raise."""
    missing_columns = [] if projection.declared else [name for name in names if name not in snapshot.schema.names]
    if missing_columns:
        elsewhere = {name.lower() for name in whole().names}
        missing_columns = [name for name in missing_columns if name.lower() not in elsewhere]
    if missing_columns:
        raise SchemaError(
            f"no file of {url} has column {missing_columns[0]!r} any more: the table changed; {PLAN_AGAIN}"
        )
    for name in names:
        if name in snapshot.schema.names:
            stored_type = snapshot.schema.field(name).type
            check_readable(_plan(projection, name), stored_type, url, projection.declared)


def _plan(projection: Projection, name: str) -> pa.Field:
    return (projection.data if name in projection.data.names else projection.partitions).field(name)


def plan_columns(
    columns: Mapping[str, pa.Array], rows: int, names: Sequence[str], projection: Projection, url: str
) -> pa.RecordBatch:
    """A batch with the columns `names` in their planned types. `columns`: the snapshot's columns, by name; a column that it lacks is null."""
    return conform_columns(columns, rows, pa.schema([_plan(projection, name) for name in names]), url)


def key_values(predicate: Predicate, keys: pa.Schema) -> list[pa.Array] | None:
    """All keys whose rows can fulfil the predicate, as columns with the types in `keys`; None if the predicate does not limit each key column."""
    if not keys.names:
        return None
    parts = _parts(predicate)
    choices: list[tuple[object, ...]] = []
    for field in keys:
        value_lists = [values for part in parts if (values := _values(part, field.name)) is not None]
        if not value_lists:
            return None
        values = min(value_lists, key=len)
        if any(isinstance(value, float) for value in values) and not pa.types.is_floating(field.type):
            return None  # Spark compares such values as doubles, and one double equals several large integers
        choices.append(values)
    if math.prod(map(len, choices)) > _KEYS_AT_MOST:
        return None
    rows = list(itertools.product(*choices))
    try:
        return [pa.array([row[number] for row in rows], field.type) for number, field in enumerate(keys)]
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return None  # a literal cannot be converted to the column's type; a scan compares the two as Spark does


def _parts(predicate: Predicate) -> list[Predicate]:
    """The conditions that must all hold for a predicate to be true."""
    if isinstance(predicate, And):
        return [part for inner in predicate.parts for part in _parts(inner)]
    return [predicate]


def _values(part: Predicate, name: str) -> tuple[object, ...] | None:
    """The values of column `name` that a condition allows; None if the condition does not limit them to a list."""
    if isinstance(part, Compare) and part.column == name and part.op == "=":
        return (part.value,)
    if isinstance(part, In) and part.column == name and not part.negated:
        return part.values
    return None
