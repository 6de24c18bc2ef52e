"""The rows of many small files, merged: all processes of a host map them, so that a lookup opens only the files that have its keys.

A stream of upserts leaves a small file with each commit. To open a thousand of them takes a second, even if the cache directory has their
bytes; to look up a key in all their rows takes milliseconds. So one process reads these files once, with all columns, and writes their rows
one file after the other, as one part. Later small files become further parts, and parts are joined as they grow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.keys import Numbers, as_indices, as_int64
from pyspark_lookup.columnar.types import unreadable
from pyspark_lookup.core.memory import check_room
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.errors import PysparkLookupError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.scan.formats import BATCH_ROWS, FileIndex, RangesFile, Unit
from pyspark_lookup.scan.open_file import OpenFile, in_rounds
from pyspark_lookup.storage.disk import DERIVED, Disk, OpenSegment, key_of
from pyspark_lookup.storage.stores import FileVersion, Range
from pyspark_lookup.versions.column_segments import PartSegments, ipc_file, open_batch, write_segment

_FORM = 1  # the number of the format in which parts are written; another release may have another one
_ROWS, _FILES, _STORED, _PLANNED = "rows", "files", "stored", "planned"
_FILES_SCHEMA = pa.schema([("name", pa.string()), ("end", pa.int64())])
_COLUMNS_AT_MOST = 64  # files with more columns are not merged: a lookup needs few of them
_PART_BYTES = 64 * 1024 * 1024  # of rows; larger parts are not joined
_READ_BYTES = 16 * 1024 * 1024  # bytes of files that become one part
_PARTS_AT_MOST = 32
_FLUSHED_BYTES = 1024 * 1024  # a part with more bytes is flushed to the disk

OpenFiles = Callable[[Sequence[FileVersion]], Sequence[OpenFile]]


@dataclasses.dataclass(frozen=True, eq=False)
class MergedFiles:
    """Files with the same columns. `rows`: the rows of the first file, then those of the second, and so on, with all columns as they are stored.

    `names`: the `FileVersion.state_name` of each file. `ends`: the position in `rows` after the last row of each file. `stored`,
    `planned`: `FileIndex.stored_schema` and `FileIndex.schema` of the files.
    """

    names: pa.Array
    ends: Numbers
    rows: pa.RecordBatch
    stored: pa.Schema
    planned: pa.Schema

    def find(self, names: pa.Array) -> tuple[Numbers, Numbers]:
        """(places in `names` of the files that are merged here, the numbers of these files)."""
        numbers = as_int64(pc.fill_null(pc.index_in(names, value_set=self.names), -1).cast(pa.int64()))
        places = np.flatnonzero(numbers >= 0)
        return places, numbers[places]

    def starts(self) -> Numbers:
        return np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])

    def take(self, numbers: Numbers) -> MergedFiles:
        """Only the files with these numbers (ascending), and their rows."""
        starts = self.starts()
        sizes = self.ends[numbers] - starts[numbers]
        ends = np.cumsum(sizes)
        rows = np.arange(int(sizes.sum())) + np.repeat(starts[numbers] - ends + sizes, sizes)
        return dataclasses.replace(
            self, names=self.names.take(as_indices(numbers)), ends=ends, rows=self.rows.take(as_indices(rows))
        )

    def has_columns_of(self, other: MergedFiles) -> bool:
        schemas = zip(
            (self.stored, self.planned, self.rows.schema), (other.stored, other.planned, other.rows.schema), strict=True
        )
        return all(schema.equals(of_other, check_metadata=True) for schema, of_other in schemas)

    def followed_by(self, later: MergedFiles) -> MergedFiles:
        """These files and those of `later`, which have the same columns."""
        return dataclasses.replace(
            self,
            names=pa.concat_arrays([self.names, later.names]),
            ends=np.concatenate([self.ends, later.ends + self.rows.num_rows]),
            rows=pa.concat_batches([self.rows, later.rows]),
        )


class MergedIndex(FileIndex):
    """The index of one of the files in `merged`, or of all of them as if they were one file. Its rows are in memory."""

    in_memory = True

    def __init__(self, merged: MergedFiles, size: int, number: int | None = None) -> None:
        start, end = 0, merged.rows.num_rows
        if number is not None:
            start, end = int(merged.ends[number - 1]) if number else 0, int(merged.ends[number])
        self._rows = merged.rows.slice(start, end - start)
        self._stored = merged.stored
        self.schema = merged.planned
        self.units = [Unit(0, size // 2)]

    @property
    def stored_schema(self) -> pa.Schema:
        return self._stored

    def rows(self, unit: Unit) -> int:
        return int(self._rows.num_rows)

    def ranges(self, unit: Unit, columns: Sequence[str]) -> list[Range]:
        return []

    def batches(self, unit: Unit, columns: Sequence[str], source: RangesFile) -> Iterator[pa.RecordBatch]:
        rows = self._rows.select(list(columns))
        return (rows.slice(start, BATCH_ROWS) for start in range(0, rows.num_rows, BATCH_ROWS))


class SmallFiles:
    """The merged files of one table, in the host's cache directory `disk`. `table`: a key of the table.

    `open_files`: opens files without keeping their bytes in the cache directory. `merged_from`: files that are in no part yet are merged when there
    are this many. `wait_s`: how long to wait for another process that merges the table's files.
    """

    def __init__(
        self, disk: Disk, table: str, open_files: OpenFiles, metrics: CacheMetricGroup, merged_from: int, wait_s: float
    ) -> None:
        self._disk = disk
        self._metrics = metrics
        self._key = key_of("merged", _FORM, table)
        self._open_files = open_files
        self._merged_from = merged_from
        self._wait_s = wait_s
        self._segments = PartSegments(disk, self._write, f"{DERIVED}merged-")
        self._lock = threading.Lock()
        self._refused: set[str] = set()  # names of files that cannot be merged

    def find(
        self, names: pa.Array, version_names: Callable[[], pa.Array], files: Callable[[Numbers], Sequence[FileVersion]]
    ) -> list[MergedFiles]:
        """The merged parts that together have these small files, except for a few. First merges the files that are in no part, if they are many.

        `names`: the names of the files that a lookup needs; such files never change. `version_names`: returns the names of all files of its
        version. `files`: returns the files at some places in `names`. Raises the errors of `open_files`.
        """
        with self._lock:
            parts = self._segments.find(self._key, _parse)
            if len(self._lacking(parts, names)) >= self._merged_from:
                parts = self._merge(names, version_names, files)
        return parts

    def _lacking(self, parts: Sequence[MergedFiles], names: pa.Array) -> Numbers:
        """The places of the files that are in no part and can be merged."""
        is_known = np.zeros(len(names), np.bool_)
        for part in parts:
            is_known[part.find(names)[0]] = True
        places = np.flatnonzero(~is_known)
        return np.array(
            [p for p in places.tolist() if names[p].as_py() not in self._refused] if self._refused else places
        )

    def _merge(
        self, names: pa.Array, version_names: Callable[[], pa.Array], files: Callable[[Numbers], Sequence[FileVersion]]
    ) -> list[MergedFiles]:
        lock = None
        with contextlib.suppress(OSError):
            # A process that was suspended while it merges keeps its lock. After the wait, this process merges the files, too.
            lock = self._disk.acquire("derive", self._key, self._wait_s)
        try:
            parts = self._segments.find(self._key, _parse)  # another process may have merged them meanwhile
            places = self._lacking(parts, names)
            if len(places) < self._merged_from:
                return parts
            made = [*self._read(files(places))]
            try:
                self._segments.keep(self._key, _join(parts, made, version_names()))
            except OSError:  # the budget may have no room: then each file is opened when it is read
                self._metrics.inc("cacheFailureCount")
                self._refused.update(names.take(as_indices(places)).to_pylist())
                return parts
            return self._segments.find(self._key, _parse)
        finally:
            if lock is not None:
                lock.release()

    def _read(self, files: Sequence[FileVersion]) -> Iterator[MergedFiles]:
        """The files, read and merged; those that cannot be merged are left out."""
        for some in in_rounds(files, _READ_BYTES):
            opened = self._open_files(some)
            parts = merge(opened)
            merged = {name for part in parts for name in part.names.to_pylist()}
            self._refused.update(name for file in opened if (name := str(file.piece.file.state_name)) not in merged)
            yield from parts

    def _write(self, key: str, name: str, part: MergedFiles) -> None:
        files = pa.RecordBatch.from_arrays([part.names, as_indices(part.ends)], schema=_FILES_SCHEMA)
        schemas = {_STORED: part.stored.serialize(), _PLANNED: part.planned.serialize()}
        regions = {_ROWS: ipc_file(part.rows), _FILES: ipc_file(files), **schemas}
        write_segment(self._disk, key, name, regions, durable=part.rows.nbytes > _FLUSHED_BYTES)


def _parse(segment: OpenSegment) -> MergedFiles:
    """The part in a segment that `SmallFiles` wrote. Raises ValueError or an Arrow error for a malformed one."""
    rows, files = (open_batch(segment.regions[name]) for name in (_ROWS, _FILES))
    stored, planned = (pa.ipc.read_schema(pa.py_buffer(segment.regions[name])) for name in (_STORED, _PLANNED))
    if files.schema != _FILES_SCHEMA or not rows.schema.names == stored.names == planned.names:
        raise ValueError("its columns differ from those expected")
    ends = as_int64(files.column(1))
    if (
        files.column(0).null_count
        or not len(ends)
        or int(ends[-1]) != rows.num_rows
        or (np.diff(ends, prepend=0) < 0).any()
    ):
        raise ValueError("its files do not have its rows")
    return MergedFiles(files.column(0), ends, rows, stored, planned)


def merge(files: Sequence[OpenFile]) -> list[MergedFiles]:
    """The rows of files whose bytes are in memory, merged. Files that cannot be merged, or that have no rows, are left out."""
    groups: list[tuple[FileIndex, list[tuple[str, int]], list[pa.RecordBatch]]] = []
    size = 0
    for file in files:
        batches = _all_rows(file)
        if not batches:
            continue
        size += sum(batch.nbytes for batch in batches)
        check_room(2 * size, f"{redact('path', file.piece.file.url)} and other small files: their rows")
        group = next((group for group in groups if _are_alike(group[0], file.index)), None)
        if group is None:
            group = file.index, [], []
            groups.append(group)
        group[1].append((str(file.piece.file.state_name), sum(batch.num_rows for batch in batches)))
        group[2].extend(batches)
    return [
        MergedFiles(
            pa.array([name for name, _ in members], pa.string()),
            np.cumsum([count for _, count in members]),
            pa.concat_batches(batches),
            index.stored_schema.remove_metadata(),
            index.schema.remove_metadata(),
        )
        for index, members, batches in groups
    ]


def _all_rows(file: OpenFile) -> list[pa.RecordBatch] | None:
    """All rows of a file; None if it cannot be merged, because it has many columns, or one that cannot be read."""
    index = file.index
    names = index.schema.names
    if (
        len(names) > _COLUMNS_AT_MOST
        or index.inferred is not None
        or index.misfits
        or names != index.stored_schema.names
    ):
        return None
    if any(unreadable(field.type) is not None for field in index.schema):
        return None
    try:
        return [batch for unit in index.units for batch in index.batches(unit, names, file.source(unit, names))]
    except (PysparkLookupError, pa.ArrowException):  # a query for the column says what is wrong with it
        return None


def _are_alike(index: FileIndex, other: FileIndex) -> bool:
    """Whether two files have the same columns."""
    return index is other or all(
        schema is of_other or schema.remove_metadata().equals(of_other.remove_metadata(), check_metadata=True)
        for schema, of_other in ((index.schema, other.schema), (index.stored_schema, other.stored_schema))
    )


def _join(parts: Sequence[MergedFiles], made: Sequence[MergedFiles], version_names: pa.Array) -> list[MergedFiles]:
    """The parts to record: the current ones and the new ones, joined until each has at least twice the rows of the next one.

    Files that the version lacks are left out of the parts that are joined. A part of which the version has less than half, such as one from before a
    compaction, is not joined: a reader of another version may need it. If there are too many of these parts, the oldest are dropped.
    """
    others: list[MergedFiles] = []
    joined: list[MergedFiles] = []
    for part in (*parts, *made):
        live = np.sort(part.find(version_names)[1])
        if 2 * len(live) < len(part.names):
            others.append(part)
            continue
        joined.append(part)
        while len(joined) > 1:
            before, last = joined[-2:]
            size = before.rows.nbytes + last.rows.nbytes
            if 2 * last.rows.num_rows <= before.rows.num_rows or size > _PART_BYTES or not before.has_columns_of(last):
                break
            joined[-2:] = [_live_files(before, version_names).followed_by(_live_files(last, version_names))]
    room = max(_PARTS_AT_MOST - len(joined), 0)
    return [*others[len(others) - min(len(others), room) :], *joined[-_PARTS_AT_MOST:]]


def _live_files(part: MergedFiles, version_names: pa.Array) -> MergedFiles:
    live = np.sort(part.find(version_names)[1])
    return part if len(live) == len(part.names) else part.take(live)
