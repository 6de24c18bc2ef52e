"""The files of a version on their way into a segment: fetched some at once, and decoded unit by unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from pyspark_lookup.cache.segments.builder import ROW_BITS
from pyspark_lookup.columnar.keys import Numbers
from pyspark_lookup.core.parallel import run_in_order
from pyspark_lookup.scan.contract import PreparedScan, PreparedUnit, TableScan
from pyspark_lookup.scan.deletes import live_mask
from pyspark_lookup.scan.open_file import Projection, Slice
from pyspark_lookup.storage.stores import FileVersion
from pyspark_lookup.versions.model import Table

PlacedUnit = tuple[PreparedUnit, int]
"""A unit, and the place of its first row in its file."""
_DECODED_AT_ONCE = 8  # parts of what is fetched at once


def prepare_units(
    scan: TableScan, table: Table, files: Sequence[FileVersion], projection: Projection, at_once: int
) -> Iterator[list[PlacedUnit]]:
    """The units of the files in order, some at a time: about an eighth of the `at_once` bytes that are fetched together.

    The next bytes are fetched while these units are decoded.
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
    """The files as slices, in groups of about as many bytes as are fetched at once."""
    group: list[Slice] = []
    size = 0
    for file in files:
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
    """The live rows of units, with their positions and share of `total` bytes, as a builder takes them.

    `numbers`: of the files; `deleted`: the places of deleted rows by URL; `unit_rows` gets how many rows each unit has.
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
        if unit.rows is None and first > start:  # without a row count, the share of a batch is unknown until the end
            yield batch.slice(0, 0), positions[:0], share
        unit_rows.append((number, unit, first - start))
