"""Columns with a row for each file of a large table, in segments: files of the host's cache directory, which each process maps into memory."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import pyarrow as pa

from pyspark_lookup.columnar.predicate import StatsColumns
from pyspark_lookup.core.decoding import UNREADABLE, as_name, as_text, as_texts
from pyspark_lookup.storage.disk import Disk, OpenSegment

T = TypeVar("T")
_ROWS = "rows"
_NAMES = ("low", "high", "null_counts", "rows", "bucket_counts", "buckets")


def ipc_file(batch: pa.RecordBatch) -> pa.Buffer:
    """The bytes of an Arrow file with one batch, which `open_batch` opens."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def open_batch(region: Any) -> pa.RecordBatch:
    """The batch in a region of a segment with the bytes of `ipc_file`. Raises ArrowException or OSError if the region is damaged."""
    return pa.ipc.open_file(pa.py_buffer(region)).get_batch(0)


def batch_to_text(batch: pa.RecordBatch) -> str:
    """A batch as text, for JSON: an Arrow stream, compressed with LZ4, in Base64."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_batch(batch)
    return base64.b64encode(sink.getvalue()).decode()


def batch_from_text(text: Any, schema: pa.Schema) -> pa.RecordBatch:
    """The batch that `batch_to_text` wrote. Raises TypeError or ValueError for any other text, or for a batch of another schema."""
    try:
        batch = pa.ipc.open_stream(pa.py_buffer(base64.b64decode(as_text(text), validate=True))).read_next_batch()
        batch.validate(full=True)
    except (OSError, StopIteration, pa.ArrowException) as problem:
        raise ValueError(str(problem)) from None
    if batch.schema != schema:
        raise ValueError(f"a batch has the columns {batch.schema.names} instead of {schema.names}, or other types")
    return batch


def write_segment(
    disk: Disk,
    table: str,
    name: str,
    regions: Mapping[str, Any],
    meta: Mapping[str, Any] | None = None,
    durable: bool = True,
) -> None:
    """Write a segment of a table, and then show it to other processes. `durable`: as in `SegmentWriter.finish`.

    Raises OSError if there is no room for the segment.
    """
    writer = disk.create_segment({})
    try:
        for region, data in regions.items():
            writer.add(region, data)
        writer.finish(meta or {}, durable)
        disk.publish_segment(table, name, writer)
    finally:
        writer.close()


def write_batch(
    disk: Disk, table: str, name: str, batch: pa.RecordBatch, meta: Mapping[str, Any] | None = None
) -> None:
    """Write a batch to a segment, from which `read_batch` reads it. Raises OSError if there is no room for the segment."""
    write_segment(disk, table, name, {_ROWS: ipc_file(batch)}, meta)


def read_batch(disk: Disk, table: str, name: str, parse: Callable[[pa.RecordBatch, dict[str, Any]], T]) -> T | None:
    """What `parse` returns for a segment's batch and metadata; None if the segment is missing or malformed. A malformed segment is removed.

    `parse` raises an ArrowException or one of `decoding.UNREADABLE` for a batch that is not of the expected form.
    """
    segment = disk.open_segment(table, name)
    if segment is None:
        return None
    try:
        return parse(open_batch(segment.regions[_ROWS]), segment.meta)
    except (pa.ArrowException, OSError, *UNREADABLE):
        disk.discard_segment(table, name)
        return None


def write_stats(disk: Disk, table: str, name: str, stats: StatsColumns) -> None:
    """Write the statistics of a column to a segment. Raises OSError if there is no room for the segment."""
    columns = {name: array for name, array in zip(_NAMES, stats.arrays, strict=True) if array is not None}
    write_batch(disk, table, name, pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns)))


def open_stats(disk: Disk, table: str, name: str) -> StatsColumns | None:
    """The statistics in a segment that `write_stats` wrote; None if the segment is missing or malformed."""
    return read_batch(
        disk, table, name, lambda batch, _: StatsColumns(**dict(zip(batch.schema.names, batch.columns, strict=True)))
    )


def concat_stats(parts: Sequence[StatsColumns]) -> StatsColumns:
    """The rows of all parts, one part after the other. No part may have buckets."""
    if len(parts) == 1:
        return parts[0]
    arrays = zip(*((part.low, part.high, part.null_counts, part.rows) for part in parts), strict=True)
    return StatsColumns(*(pa.concat_arrays(some) for some in arrays))


def remove_unneeded(disk: Disk, table: str, needed: Sequence[str]) -> None:
    """Remove the table's segments that are no longer needed, except those that the last call named as needed.

    A segment that was needed in the last call, but is not now, stays until the next call, and is among the first to be evicted. `needed`: the
    beginnings of the names of needed segments. Raises OSError.

    The race: another process may have read the table's last record, before the current one replaced it, and may now be opening the segments
    that the last record names. So these segments stay until the next call.
    """
    unneeded = [name for name in disk.segments(table) if not (needed and name.startswith(tuple(needed)))]
    superseded = disk.superseded_segments(table)
    for name in {*superseded}.intersection(unneeded):
        disk.remove_segment(table, name)
    if unneeded or superseded:
        disk.supersede_segments(table, unneeded)


_SERIES_NOTED = 256


class PartSegments(Generic[T]):
    """Series of parts, such as those of an index, in the host's cache directory `disk`. Each part is a segment, and all processes map it.

    `write`: writes a part as the segment with a key and a name, and raises OSError if there is no room. `prefix`: how the names of the
    segments begin.
    """

    def __init__(self, disk: Disk, write: Callable[[str, str, T], None], prefix: str = "part-") -> None:
        self._disk = disk
        self._write = write
        self._prefix = prefix
        self._parts: dict[str, dict[str, T]] = {}  # by the key of the series, and then by the name of the segment

    def find(self, key: str, parse: Callable[[OpenSegment], T]) -> list[T]:
        """The recorded parts of a series, up to the first that is missing.

        `parse`: the part in a segment. It raises an ArrowException, OSError, or one of `decoding.UNREADABLE` for a segment that is not of the
        expected form, which is then removed.
        """
        known, parts = self._parts.get(key, {}), dict[str, T]()
        for name in self._disk.get_record("log", key, as_texts) or ():
            part = known.get(name) or self._open(key, as_name(name), parse)
            if part is None:
                break
            parts[name] = part
        self._note(key, parts)
        return [*parts.values()]

    def keep(self, key: str, parts: Sequence[T]) -> None:
        """Record the parts of a series for all processes of the host, instead of those recorded before. Raises OSError."""
        names = {id(part): name for name, part in self._parts.get(key, {}).items()}
        for part in parts:
            if id(part) not in names:
                names[id(part)] = f"{self._prefix}{uuid.uuid4().hex}"
                self._write(key, names[id(part)], part)
        by_name = {names[id(part)]: part for part in parts}
        self._disk.replace_record("log", key, [*by_name])
        self._note(key, by_name)
        remove_unneeded(self._disk, key, [*by_name])

    def _note(self, key: str, parts: dict[str, T]) -> None:
        if parts:
            self._disk.use_table(key)
        recent = list(self._parts.items())[-_SERIES_NOTED:]
        self._parts = {**dict(recent), key: parts}

    def _open(self, key: str, name: str, parse: Callable[[OpenSegment], T]) -> T | None:
        segment = self._disk.open_segment(key, name)
        if segment is None:
            return None
        try:
            return parse(segment)
        except (*UNREADABLE, pa.ArrowException, OSError):
            self._disk.discard_segment(key, name)
            return None
