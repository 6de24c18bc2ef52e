"""The deleted rows of a version. Equality deletes are matched with the rows of the latest snapshot, so data files in it are not read again."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from pyspark_lookup.cache.full.snapshot import Snapshot
from pyspark_lookup.cache.segments.segment import Segment
from pyspark_lookup.columnar.keys import Keys, Numbers, one_array
from pyspark_lookup.scan.contract import TableScan
from pyspark_lookup.scan.equality import DeletedValues, merge_positions
from pyspark_lookup.scan.formats import BATCH_ROWS
from pyspark_lookup.storage.stores import Deletes, EqualityColumns, FileVersion
from pyspark_lookup.versions.model import Table, TableVersion


def read_deleted(
    scan: TableScan, table: Table, version: TableVersion, last: Snapshot | None, fetched: AbstractSet[FileVersion]
) -> dict[str, Numbers]:
    """The positions of deleted rows, by the URL of their file. Positions that `last` has already removed may be missing.

    `fetched`: files whose rows are not taken from `last`, although it has them.
    """
    by_value = [file for file in version.files if any(delete_file.equality is not None for delete_file in file.deletes)]
    layer_files: list[tuple[Segment, list[tuple[int, FileVersion]]]] = []
    elsewhere = {*by_value}
    if by_value and last is not None:
        marks = {delete_file.name for delete_file in version.deletes}
        for layer in last.layers:
            if not marks.issuperset(layer.segment.marks):
                continue  # rows that this version still has were removed from it
            places = {
                FileVersion(stored_file.url, stored_file.size, stored_file.identity): place
                for place, stored_file in enumerate(layer.segment.files)
                if layer.ranks[place] >= 0
            }
            places = {file: place for file, place in places.items() if file not in fetched}
            lacking = _lacking_columns(layer.segment, version.deletes)
            inside = [
                (places[file], file)
                for file in by_value
                if file in places
                and (not lacking or lacking.isdisjoint(delete_file.name for delete_file in file.deletes))
            ]
            layer_files.append((layer.segment, inside))
            elsewhere -= {file for _, file in inside}
    other_files = [
        file
        for file in version.files
        if file in elsewhere or not any(delete_file.equality for delete_file in file.deletes)
    ]
    positions = scan.read_deleted(table, other_files)
    for segment, inside in layer_files:
        plain = [
            dataclasses.replace(
                file, deletes=tuple(delete_file for delete_file in file.deletes if delete_file.equality is None)
            )
            for _, file in inside
        ]
        by_position = scan.read_deleted(table, plain)
        positions |= merge_positions(by_position, _locate_deleted(scan, table, segment, inside))
    return positions


def _lacking_columns(segment: Segment, deletes: Sequence[Deletes]) -> set[str]:
    """The names of equality deletes whose columns a segment lacks, or has in another type."""
    fields = {*segment.schema}
    return {
        delete_file.name
        for delete_file in deletes
        if delete_file.equality is not None and not fields.issuperset(delete_file.equality.schema)
    }


def _locate_deleted(
    scan: TableScan, table: Table, segment: Segment, inside: Sequence[tuple[int, FileVersion]]
) -> dict[str, Numbers]:
    """The positions of the rows in a segment that new equality deletes remove, by the URL of their file."""
    marks = {*segment.marks}
    groups: dict[tuple[str, ...], tuple[list[Deletes], list[int]]] = {}
    for place, file in inside:
        new = [
            delete_file
            for delete_file in file.deletes
            if delete_file.equality is not None and delete_file.name not in marks
        ]
        groups.setdefault(tuple(delete_file.name for delete_file in new), (new, []))[1].append(place)
    parts: dict[int, list[Numbers]] = defaultdict(list)
    for new, places in groups.values():
        for columns, values in scan.deleted_values(table, new):
            for rows in _match_rows(segment, columns, values):
                ordinals = segment.ordinals[rows].astype(np.int64)
                files = np.searchsorted(segment.file_starts, ordinals, "right") - 1
                for place in np.intersect1d(files, places).tolist():
                    parts[place].append(ordinals[files == place] - segment.file_starts[place])
    urls = {place: file.url for place, file in inside}
    return {urls[place]: np.unique(np.concatenate(arrays)) for place, arrays in parts.items()}


def _match_rows(segment: Segment, columns: EqualityColumns, values: DeletedValues) -> Iterator[Numbers]:
    """The numbers of the rows of a segment that have one of the deleted values."""
    names = columns.schema.names
    if set(names) == set(segment.keys) and not any(column.null_count for column in values.rows.columns):
        keys = Keys([one_array(values.rows.column(name)) for name in segment.keys])
        rows = segment.probe(keys, keys.hashes(segment.seed)).rows
        candidates = segment.take(names, rows)  # keys are compared as Spark does
        yield rows[values.mark(candidates)]
        return
    for start in range(0, segment.rows, BATCH_ROWS):
        stop = min(start + BATCH_ROWS, segment.rows)
        yield start + np.flatnonzero(values.mark(segment.slice(names, start, stop)))
