"""`BaseFiles`: the data files of a Delta table at one version, as columns that all processes of a host map from its cache directory.

A table of 300,000 files may have a gigabyte of statistics in its checkpoint, one JSON text for each file. The texts are copied unparsed,
compressed, and do not become Python objects. When a query first compares a column, Arrow parses the bounds of that column from the texts, and
the parsed bounds are stored, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from pyspark_lookup.columnar.keys import Keys, Numbers, Seed, as_bools, as_indices, as_int64, one_array
from pyspark_lookup.columnar.predicate import ColumnStats, StatsColumns
from pyspark_lookup.core.decoding import as_counts, as_name
from pyspark_lookup.sources.delta.actions import Add, Key, Vector, key_of_file
from pyspark_lookup.storage.disk import Disk, key_of
from pyspark_lookup.versions.column_segments import (
    concat_stats,
    ipc_file,
    open_batch,
    open_stats,
    write_segment,
    write_stats,
)

_SEEDS = (Seed(0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93), Seed(0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9))
_WORD = (1 << 64) - 1
_FILES, _TEXTS, _STATS = "files", "texts", "stats"
_PARTITION = "partition:"
_GROUP_ROWS = 512  # texts that are compressed together, and so are decompressed together to read one of them
_GROUPS_AT_ONCE = 32  # groups that are decompressed at a time to parse all texts
_PARTS_AT_MOST = 16  # parts with statistics; if there are more, the smaller ones are written together
_TEXT = pa.large_string()
_COLUMNS = pa.schema(
    [
        ("path", pa.string()),
        ("vector", pa.string()),
        ("descriptor", pa.string()),
        ("size", pa.int64()),
        ("modified_ms", pa.int64()),
        ("text_row", pa.int64()),
    ]
)
"""The columns for a data file: its key (`path`, `vector`), and the other values of its `Add`. `descriptor`: the deletion vector as JSON.
`text_row`: the row of its statistics among the texts of all parts."""

_TEXT_ROW = _COLUMNS.get_field_index("text_row")

Sums = tuple[int, int]
"""The sums of two hashes over the keys of files. Equal sets of files have equal sums, in whatever order the files were added and removed."""


def sum_keys(keys: Iterable[Key]) -> Sums:
    """The sums of the hashes of some keys, see `Sums`."""
    paths, vectors = zip(*pairs, strict=True) if (pairs := list(keys)) else ((), ())
    return _sum_columns(pa.array(paths, pa.string()), pa.array(vectors, pa.string()))


def _sum_columns(paths: pa.Array, vectors: pa.Array) -> Sums:
    if not len(paths):
        return 0, 0
    keys = Keys([paths, vectors])
    first, second = (int(np.sum(keys.hashes(seed), dtype=np.uint64)) for seed in _SEEDS)
    return first, second


def combine_sums(sums: Sums, added: Sums, removed: Sums) -> Sums:
    """The sums after files were added and removed. `added` and `removed`: the sums of these files."""
    first, second = ((old + new - gone) & _WORD for old, new, gone in zip(sums, added, removed, strict=True))
    return first, second


# --- statistics -----------------------------------------------------------------------------------

ParseBounds = Callable[[str | None], ColumnStats | None]
"""Parses the statistics of one column from the JSON text of one file."""


class StatisticsPart:
    """The statistics of some files, one JSON text for each. They are compressed in Arrow files (`buffers`) with `counts` rows each.

    `name`: the part's segment in the host's cache directory; None: the texts are in memory.
    """

    def __init__(self, buffers: Sequence[Any], counts: Sequence[int], name: str | None) -> None:
        self.name = name
        self.rows = sum(counts)
        self._files = [pa.ipc.open_file(pa.py_buffer(buffer)) for buffer in buffers]
        self._groups = [
            (file, number)
            for file, count in zip(self._files, counts, strict=True)
            for number in range(-(-count // _GROUP_ROWS))
        ]
        sizes = [min(_GROUP_ROWS, count - start) for count in counts for start in range(0, count, _GROUP_ROWS)]
        self._starts = np.cumsum([0, *sizes])
        self._bounds: dict[str, StatsColumns] = {}

    def text(self, row: int) -> str | None:
        """The statistics of the file in a row; None if it has none."""
        group = int(np.searchsorted(self._starts, row, "right")) - 1
        file, number = self._groups[group]
        text = file.get_batch(number).column(0)[row - int(self._starts[group])].as_py()
        return None if text is None else str(text)

    def take(self, rows: Numbers) -> pa.Array:
        """The statistics of the files in some rows. `rows`: ascending."""
        groups = np.searchsorted(self._starts, rows, "right") - 1
        parts = [pa.array([], _TEXT)]
        for group in np.unique(groups).tolist():
            file, number = self._groups[group]
            inside = as_indices(rows[groups == group] - self._starts[group])
            parts.append(file.get_batch(number).column(0).take(inside))
        return pa.concat_arrays(parts)

    def texts(self) -> Iterator[pa.Array]:
        """The statistics of all files, some thousand at a time."""
        for start in range(0, len(self._groups), _GROUPS_AT_ONCE):
            batches = [file.get_batch(number) for file, number in self._groups[start : start + _GROUPS_AT_ONCE]]
            yield pa.concat_arrays([batch.column(0) for batch in batches])

    def bounds(self, disk: Disk | None, table: str, stored: str, kind: pa.DataType, parse: ParseBounds) -> StatsColumns:
        """The statistics of the column that the files call `stored`, as columns. The texts are parsed once per host."""
        end = key_of(stored, kind)[:16]
        if end not in self._bounds:
            kept_disk = disk if self.name is not None else None
            columns = None if kept_disk is None else open_stats(kept_disk, table, f"{self.name}-{end}")
            if columns is None:
                parts = [parse_bounds(texts, stored, kind, parse) for texts in self.texts()]
                columns = concat_stats(parts)
                if kept_disk is not None:
                    with contextlib.suppress(OSError):  # then another process parses them again
                        write_stats(kept_disk, table, f"{self.name}-{end}", columns)
            self._bounds[end] = columns
        return self._bounds[end]


def compress_texts(texts: pa.Array) -> pa.Buffer:
    """An Arrow file with JSON texts, compressed in groups of `_GROUP_ROWS` rows."""
    sink = pa.BufferOutputStream()
    table = pa.Table.from_arrays([texts.cast(_TEXT)], names=[_STATS])
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table, max_chunksize=_GROUP_ROWS)
    return sink.getvalue()


def parse_bounds(texts: pa.Array, stored: str, kind: pa.DataType, parse: ParseBounds) -> StatsColumns:
    """The statistics of a column, parsed from the JSON texts of some files.

    `parse`: parses a single text. It is used if Arrow cannot parse all texts together.
    """
    columns = _parse_together(texts, stored, kind)
    if columns is not None:
        return columns
    return StatsColumns.from_rows([parse(text) for text in texts.to_pylist()], kind)


_INSTANT = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z?$"
EXACT_DIGITS = 15
"""A double represents every decimal of up to this many digits exactly."""
ROUNDED_BITS = 48
"""A decimal with more digits that was written as a double is off by at most 2**-ROUNDED_BITS of its value."""
_DECIMAL_DIGITS = 38
_FIRST_YEAR, _LAST_YEAR = (
    1901,
    9998,
)  # other years need arithmetic that Arrow lacks, so such bounds are parsed one by one
_CUT = "\ufffd"


def _parse_together(texts: pa.Array, stored: str, kind: pa.DataType) -> StatsColumns | None:
    """The statistics of a column, all parsed by Arrow; None if the result would differ from that of `source._to_statistics`."""
    json_type = _json_type(kind)
    lines = pc.fill_null(texts, "{}")
    # Each text must be one line with one object, so that Arrow returns one row for each text.
    if (
        json_type is None
        or pc.any(pc.match_substring(lines, "\n")).as_py()
        or not pc.all(pc.starts_with(lines, "{")).as_py()
    ):
        return None
    joined = pc.binary_join_element_wise(lines, pa.scalar("", lines.type), pa.scalar("\n", lines.type))
    column = pa.struct([(stored, json_type)])
    fields = [("numRecords", pa.int64()), ("tightBounds", pa.bool_()), ("minValues", column), ("maxValues", column)]
    schema = pa.schema([*fields, ("nullCount", pa.struct([(stored, pa.int64())]))])
    data = joined.buffers()[2]
    try:
        table = pj.read_json(
            pa.BufferReader(data),
            pj.ReadOptions(use_threads=False, block_size=max(data.size, 1 << 16)),
            pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
        if table.num_rows != len(texts):
            return None
        rows, tight, low, high, nulls = (
            one_array(table.column(name)) for name in (*(name for name, _ in fields), "nullCount")
        )
        low, high, nulls = (pc.struct_field(part, [0]) for part in (low, high, nulls))
        if pc.any(pc.less(rows, 0)).as_py():
            return None
        bounds = _convert(low, high, kind)
    except (pa.ArrowException, OverflowError):
        return None
    if bounds is None:
        return None
    if tight.null_count < len(tight) and pc.any(pc.match_substring_regex(lines, r'"tightBounds"\s*:\s*null')).as_py():
        return None
    tight = pc.fill_null(tight, True)
    inside = pc.and_(pc.greater_equal(nulls, 0), pc.less_equal(nulls, rows))
    exact = pc.or_(tight, pc.or_(pc.equal(nulls, 0), pc.equal(nulls, rows)))
    nulls = pc.if_else(pc.fill_null(pc.and_(inside, exact), False), nulls, pa.scalar(None, pa.int64()))
    low, high = bounds
    valid = pc.and_(rows.is_valid(), pc.fill_null(pc.less_equal(low, high), False))
    low, high = (pc.if_else(valid, side, pa.scalar(None, side.type)) for side in (low, high))
    return StatsColumns(low, high, nulls, rows)


def _json_type(kind: pa.DataType) -> pa.DataType | None:
    """The type as which Arrow reads the bounds of a column from JSON; None if it cannot read them."""
    if pa.types.is_integer(kind):
        return pa.int64()
    if pa.types.is_floating(kind):
        return pa.float64()
    if pa.types.is_decimal(kind):
        return pa.decimal128(_DECIMAL_DIGITS, kind.scale)
    return pa.string() if pa.types.is_string(kind) or pa.types.is_date32(kind) or pa.types.is_timestamp(kind) else None


def _convert(low: pa.Array, high: pa.Array, kind: pa.DataType) -> tuple[pa.Array, pa.Array] | None:
    """The bounds in the column's type, widened where writers round; None if some must be parsed one by one. Raises ArrowException."""
    if pa.types.is_string(kind):
        return None if pc.any(pc.ends_with(high, _CUT)).as_py() else (low, high)
    if pa.types.is_floating(kind):
        return _widen_floats(low, np.fmin), _widen_floats(high, np.fmax)
    if pa.types.is_decimal(kind):
        if kind.precision > EXACT_DIGITS:
            widened = _widen_decimals(low, -1), _widen_decimals(high, 1)
            if widened[0] is None or widened[1] is None:
                return None
            low, high = widened
        return low.cast(kind), high.cast(kind)
    if pa.types.is_date32(kind):
        low, high = (pc.utf8_slice_codeunits(side, 0, 10).cast(pa.date32()) for side in (low, high))
    elif pa.types.is_timestamp(kind):
        if not all(
            pc.fill_null(pc.all(pc.match_substring_regex(side, _INSTANT)), True).as_py() for side in (low, high)
        ):
            return None
        low, high = (pc.utf8_rtrim(side, "Z").cast(pa.timestamp("us")) for side in (low, high))
        # Writers round timestamps down to milliseconds.
        high = pc.add(high, pa.scalar(datetime.timedelta(milliseconds=1), pa.duration("us")))
        if kind.tz is not None:
            low, high = (pc.assume_timezone(side, "UTC") for side in (low, high))
    else:
        return low, high
    for side in (low, high):
        years = pc.min_max(pc.year(side))
        if years["min"].is_valid and not _FIRST_YEAR <= years["min"].as_py() <= years["max"].as_py() <= _LAST_YEAR:
            return None
    return low, high


def _widen_decimals(decimals: pa.Array, sign: int) -> pa.Array | None:
    """The decimals, each made lower (`sign` -1) or higher (1) by the rounding error of a double, because some writers write decimals as
    doubles.

    None if some decimals have more digits than fit into 62 bits.
    """
    filled = pc.fill_null(decimals, 0)
    words = np.frombuffer(filled.buffers()[1], np.int64).reshape(-1, 2)[filled.offset : filled.offset + len(filled)]
    units, rest = words[:, 0], words[:, 1]
    if (rest != units >> 63).any() or (np.abs(units) >= 1 << 62).any():
        return None
    units = units + sign * ((np.abs(units) + (1 << ROUNDED_BITS) - 1) >> ROUNDED_BITS)
    buffer = pa.py_buffer(np.stack([units, units >> 63], axis=1).tobytes())
    widened = pa.Array.from_buffers(decimals.type, len(units), [None, buffer])
    return pc.if_else(decimals.is_valid(), widened, pa.scalar(None, decimals.type))


def _widen_floats(numbers: pa.Array, choose: Callable[[Numbers, Numbers], Numbers]) -> pa.Array:
    """The numbers, each replaced by the nearest 32-bit float if `choose` prefers that.

    A 32-bit value may be written by the shortest text that identifies it among 32-bit floats. Parsed as a double, that text may be another
    number.
    """
    values = pc.fill_null(numbers, 0.0).to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):
        floats = values.astype(np.float32).astype(np.float64)
    widened = choose(values, np.where(np.isfinite(floats), floats, values))
    return pc.if_else(numbers.is_valid(), pa.array(widened), pa.scalar(None, pa.float64()))


# --- files ----------------------------------------------------------------------------------------


class BaseFiles:
    """The data files of a state of a log, in columns, ascending by key. Immutable.

    `sums`: see `Sums`. `name`: the segment with the columns; None: they are in memory. `table`: the key of the log's segments.
    """

    def __init__(
        self,
        batch: pa.RecordBatch,
        parts: Sequence[StatisticsPart],
        sums: Sums,
        disk: Disk | None,
        table: str,
        name: str | None,
    ) -> None:
        self._batch = batch
        self.parts = tuple(parts)
        self.sums = sums
        self.name = name
        self._disk = disk
        self._table = table
        self.rows = batch.num_rows
        self.paths, self.vectors, self.descriptors = (batch.column(number) for number in range(3))
        self.sizes, self.modified_ms, self._text_rows = (as_int64(batch.column(number)) for number in range(3, 6))
        self._starts = np.cumsum([0, *(part.rows for part in parts)])

    @property
    def partition_columns(self) -> list[str]:
        """The names, as in the log, of the partition columns for which at least one file has a value."""
        return [name.removeprefix(_PARTITION) for name in self._batch.schema.names[len(_COLUMNS) :]]

    def partition_values(self, stored: str) -> pa.Array:
        """The values of a partition column as text; null for files that have none."""
        number = self._batch.schema.get_field_index(f"{_PARTITION}{stored}")
        return pa.nulls(self.rows, pa.string()) if number < 0 else self._batch.column(number)

    def key(self, row: int) -> Key:
        return self.paths[row].as_py(), self.vectors[row].as_py()

    def find(self, key: Key) -> int | None:
        """The row of the file with this key; None if there is no such file."""
        row = self.first_row_from(key)
        return row if row < self.rows and self.key(row) == key else None

    def first_row_from(self, key: Key) -> int:
        """The first row whose key is `key` or greater."""
        low, high = 0, self.rows
        while low < high:
            middle = (low + high) // 2
            if self.key(middle) < key:
                low = middle + 1
            else:
                high = middle
        return low

    def find_path(self, path: str) -> range:
        """The rows of the files with a path. Several files with one path differ in their deletion vectors."""
        start = self.first_row_from((path, ""))
        stop = start
        while stop < self.rows and self.paths[stop].as_py() == path:
            stop += 1
        return range(start, stop)

    def add(self, row: int) -> Add:
        """The `add` action of the file in a row."""
        values = [(stored, self.partition_values(stored)[row].as_py()) for stored in self.partition_columns]
        sizes = int(self.sizes[row]), int(self.modified_ms[row])
        return Add(self.paths[row].as_py(), tuple(sorted(values)), *sizes, self._statistics(row), self.vector(row))

    def vector(self, row: int) -> Vector | None:
        """The deletion vector of the file in a row; None if it has none."""
        descriptor = self.descriptors[row].as_py()
        return None if descriptor is None else Vector(*json.loads(descriptor))

    def _statistics(self, row: int) -> str | None:
        text_row = int(self._text_rows[row])
        part = int(np.searchsorted(self._starts, text_row, "right")) - 1
        return self.parts[part].text(text_row - int(self._starts[part]))

    def statistics(self, stored: str, kind: pa.DataType, parse: ParseBounds) -> StatsColumns:
        """The statistics of the column that the files call `stored`, one row for each file."""
        parts = [part.bounds(self._disk, self._table, stored, kind, parse) for part in self.parts]
        return concat_stats(parts).take(as_indices(self._text_rows))

    def next_base(self, gone: Numbers, added: Sequence[Add]) -> BaseFiles:
        """New columns, without the files in the rows `gone`, and with the files `added`.

        Statistics that are on disk already are not written again, except if they are in `_PARTS_AT_MOST` or more parts: then the statistics
        of the smaller parts are written again.
        """
        rows = np.delete(np.arange(self.rows), gone)
        text_rows = self._text_rows[rows]
        part_numbers = np.searchsorted(self._starts, text_rows, "right") - 1
        live_counts = np.bincount(part_numbers, minlength=len(self.parts))
        kept_numbers = np.flatnonzero(live_counts)
        if len(kept_numbers) >= _PARTS_AT_MOST:
            kept_numbers = np.sort(np.argsort(live_counts)[-_PARTS_AT_MOST // 2 :])
        kept_parts = [self.parts[number] for number in kept_numbers.tolist()]
        moves = np.zeros(len(self.parts), np.int64)
        moves[kept_numbers] = np.cumsum([0, *(part.rows for part in kept_parts)])[:-1] - self._starts[kept_numbers]
        is_kept = np.isin(part_numbers, kept_numbers)
        kept_rows = self._batch.take(as_indices(rows[is_kept]))
        kept_text_rows = text_rows[is_kept] + moves[part_numbers[is_kept]]
        builder = BaseBuilder(self._disk, self._table)
        try:
            builder.add_rows(
                kept_rows.set_column(_TEXT_ROW, _COLUMNS.field(_TEXT_ROW), pa.array(kept_text_rows)), kept_parts
            )
            for number in np.unique(part_numbers[~is_kept]).tolist():
                in_part = rows[part_numbers == number]
                in_part = in_part[np.argsort(self._text_rows[in_part])]
                texts = self.parts[number].take(self._text_rows[in_part] - self._starts[number])
                builder.add_columns(self._batch.take(as_indices(in_part)), texts)
            for add in added:
                builder.add_file(add)
            return builder.finish()
        finally:
            builder.close()

    def to_json(self) -> dict[str, Any] | None:
        """The record with which `open_base` finds the columns on disk; None if they are in memory."""
        names = [part.name for part in self.parts]
        return (
            None
            if self.name is None or None in names
            else {"files": self.name, "statistics": names, "sums": list(self.sums)}
        )

    @property
    def segment_prefixes(self) -> set[str]:
        """The beginnings of the names of the segments that hold these columns and their statistics."""
        return {name for name in (self.name, *(part.name for part in self.parts)) if name is not None}


def open_base(disk: Disk, table: str, record: Any) -> BaseFiles | None:
    """The columns that a record of `to_json` describes; None if a segment is missing or damaged.

    Raises one of `decoding.UNREADABLE` for a malformed record.
    """
    sums = [int(number) & _WORD for number in record["sums"]]
    opened = disk.open_segment(table, as_name(record["files"]))
    parts = []
    for name in record["statistics"]:
        segment = disk.open_segment(table, as_name(name))
        if segment is None:
            return None
        counts = as_counts(segment.meta["counts"])
        parts.append(
            StatisticsPart([segment.regions[f"{_TEXTS}{number}"] for number in range(len(counts))], counts, name)
        )
    if opened is None:
        return None
    return BaseFiles(open_batch(opened.regions[_FILES]), parts, (sums[0], sums[1]), disk, table, record["files"])


class BaseBuilder:
    """Collects files and turns them into `BaseFiles`. With a `disk`, statistics are written to it as they come.

    The methods raise OSError if the disk has no room.
    """

    def __init__(self, disk: Disk | None, table: str) -> None:
        self._disk = disk
        self._table = table
        self._batches: list[pa.RecordBatch] = []
        self._parts: list[StatisticsPart] = []
        self._buffers: list[pa.Buffer] = []
        self._counts: list[int] = []
        self._added: list[Add] = []
        self._writer = None if disk is None else disk.create_segment({})
        self.rows = 0

    def close(self) -> None:
        """Remove the unfinished segment, if there is one."""
        if self._writer is not None:
            self._writer.close()

    def add_rows(self, batch: pa.RecordBatch, parts: Sequence[StatisticsPart]) -> None:
        """Take over rows of other columns, with the parts that have their statistics. Must be called before the other methods."""
        self._batches.append(batch)
        self._parts = list(parts)
        self.rows += batch.num_rows

    def add_columns(self, batch: pa.RecordBatch, stats: pa.Array) -> None:
        """Add rows of other columns, whose statistics `stats` are written again."""
        names = batch.schema.names
        partitions = {name.removeprefix(_PARTITION): batch.column(name) for name in names[len(_COLUMNS) :]}
        self._append(list(batch.columns[:_TEXT_ROW]), partitions, stats)

    def add_file(self, add: Add) -> None:
        """Add a file. It replaces an earlier file with the same key."""
        self._added.append(add)
        self.rows += 1

    def add_batch(self, adds: pa.StructArray) -> None:
        """Add the files in a checkpoint's `add` column, in which no row is null. Raises one of `decoding.UNREADABLE` for malformed
        actions."""
        if not len(adds):
            return
        self._flush()
        names = [field.name for field in adds.type]

        def column(name: str, kind: pa.DataType) -> pa.Array:
            return adds.field(name).cast(kind) if name in names else pa.nulls(len(adds), kind)

        vectors = adds.field("deletionVector") if "deletionVector" in names else None
        descriptors = pa.nulls(len(adds), pa.string())
        keys = pa.repeat(pa.scalar(""), len(adds))
        if vectors is not None and vectors.null_count < len(vectors):
            parsed = [Vector.from_descriptor(descriptor) for descriptor in vectors.to_pylist()]
            descriptors = pa.array(
                [None if v is None else json.dumps(dataclasses.astuple(v)) for v in parsed], pa.string()
            )
            keys = pa.array([key_of_file("", vector)[1] for vector in parsed], pa.string())
        paths, sizes = column("path", pa.string()), column("size", pa.int64())
        if paths.null_count or sizes.null_count or pc.min(sizes).as_py() <= 0:
            raise ValueError("a data file has no path, or no size above 0")
        modified = pc.fill_null(column("modificationTime", pa.int64()), 0)
        partitions = _partition_columns(adds.field("partitionValues"))
        self._append([paths, keys, descriptors, sizes, modified], partitions, statistics_texts(adds))

    def _flush(self) -> None:
        """Turn the files that were added one by one into columns."""
        added, self._added = self._added, []
        if not added:
            return
        self.rows -= len(added)
        stored = sorted({name for add in added for name, _ in add.partition})
        partitions = {name: pa.array([dict(add.partition).get(name) for add in added], pa.string()) for name in stored}
        descriptors = [None if add.vector is None else json.dumps(dataclasses.astuple(add.vector)) for add in added]
        paths, keys = zip(*(add.key for add in added), strict=True)
        columns = [pa.array(values, pa.string()) for values in (paths, keys, descriptors)]
        columns += [
            pa.array(values, pa.int64()) for values in ([a.size for a in added], [a.modified_ms for a in added])
        ]
        self._append(columns, partitions, pa.array([add.statistics for add in added], _TEXT))

    def _append(self, columns: list[pa.Array], partitions: Mapping[str, pa.Array], stats: pa.Array) -> None:
        count = len(stats)
        first = sum(part.rows for part in self._parts) + sum(self._counts)
        arrays = [*columns, pa.array(np.arange(first, first + count)), *partitions.values()]
        fields = [*_COLUMNS, *(pa.field(f"{_PARTITION}{name}", pa.string()) for name in partitions)]
        self._batches.append(pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields)))
        buffer = compress_texts(stats)
        if self._writer is None:
            self._buffers.append(buffer)
        else:
            self._writer.add(f"{_TEXTS}{len(self._counts)}", buffer)
        self._counts.append(count)
        self.rows += count

    def finish(self) -> BaseFiles:
        """The columns of all files that were added, ascending by key. If several files have the same key, the last one counts.

        Raises ValueError if a path has two deletion vectors.
        """
        self._flush()
        parts = [*self._parts]
        if self._counts:
            parts.append(self._finish_part())
        self.close()
        table = pa.concat_tables([pa.Table.from_batches([batch]) for batch in self._batches], promote_options="default")
        batch = _sort_by_key(table.combine_chunks())
        sums = _sum_columns(batch.column(0), batch.column(1))
        name = None
        if self._disk is not None:
            name = f"base-{uuid.uuid4().hex}"
            write_segment(self._disk, self._table, name, {_FILES: ipc_file(batch)})
            opened = self._disk.open_segment(self._table, name)
            if opened is None:
                raise OSError("a segment was removed as soon as it was written")
            batch = open_batch(opened.regions[_FILES])
        return BaseFiles(batch, parts, sums, self._disk, self._table, name)

    def _finish_part(self) -> StatisticsPart:
        if self._disk is None or self._writer is None:
            return StatisticsPart(self._buffers, self._counts, None)
        name = f"stats-{uuid.uuid4().hex}"
        self._writer.finish({"counts": self._counts})
        self._disk.publish_segment(self._table, name, self._writer)
        opened = self._disk.open_segment(self._table, name)
        if opened is None:
            raise OSError("a segment was removed as soon as it was written")
        return StatisticsPart(
            [opened.regions[f"{_TEXTS}{number}"] for number in range(len(self._counts))], self._counts, name
        )


def statistics_texts(adds: pa.StructArray) -> pa.Array:
    """The statistics of `add` actions as JSON texts; null for actions without statistics."""
    names = [field.name for field in adds.type]
    texts = adds.field("stats") if "stats" in names else pa.nulls(len(adds))
    is_text = pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)
    texts = texts.cast(_TEXT) if is_text else pa.nulls(len(adds), _TEXT)
    is_empty = pc.equal(pc.binary_length(texts), 0)
    if pc.any(is_empty).as_py():
        texts = pc.if_else(is_empty, pa.scalar(None, _TEXT), texts)
    if "stats_parsed" in names and texts.null_count:
        texts = pc.coalesce(texts, _texts_of_parsed(adds.field("stats_parsed"), texts.is_null()))
    return texts


def _texts_of_parsed(parsed: pa.StructArray, needed: pa.Array) -> pa.Array:
    """The statistics in `stats_parsed`, which some checkpoints have instead of texts, as JSON texts; null where `needed` is false."""
    is_known = pc.and_(needed, parsed.is_valid())
    return pc.if_else(is_known, _json_texts(parsed, pa.nulls(len(parsed), _TEXT)), pa.scalar(None, _TEXT))


_ESCAPED = (("\\", "\\\\"), ('"', '\\"'), *((chr(code), f"\\u{code:04x}") for code in range(0x20)))


def _json_texts(values: pa.Array, nothing: pa.Array, depth: int = 0) -> pa.Array:
    """The values of a part of `stats_parsed` as JSON, in the form that the log's statistics have. `nothing`: the result for a type without
    bounds."""
    kind = values.type
    if pa.types.is_struct(kind) and kind.num_fields and depth < 2:
        texts = [pa.scalar("{", _TEXT)]
        for number, field in enumerate(kind):
            value = _json_texts(pc.struct_field(values, [number]), nothing, depth + 1)
            comma = "," if number else ""
            texts += [pa.scalar(f"{comma}{json.dumps(field.name)}:", _TEXT), pc.fill_null(value, "null")]
        return pc.binary_join_element_wise(*texts, pa.scalar("}", _TEXT), pa.scalar("", _TEXT))
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_decimal(kind):
        return values.cast(_TEXT)
    if pa.types.is_floating(kind):
        doubles = values.cast(pa.float64())
        return pc.if_else(pc.is_finite(doubles), doubles, pa.scalar(None, pa.float64())).cast(_TEXT)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        texts = values.cast(_TEXT)
        if pc.any(pc.match_substring_regex(texts, r'[\\"\x00-\x1f]')).as_py():
            for character, escaped in _ESCAPED:
                texts = pc.replace_substring(texts, character, escaped)
    elif pa.types.is_date32(kind):
        texts = values.cast(_TEXT)
    elif pa.types.is_timestamp(kind):
        instants = values.cast(pa.timestamp("us", kind.tz), safe=False).cast(pa.timestamp("us"))
        zone = pa.scalar("" if kind.tz is None else "Z", _TEXT)
        texts = pc.replace_substring(instants.cast(_TEXT), " ", "T")
        texts = pc.binary_join_element_wise(texts, zone, pa.scalar("", _TEXT))
    else:
        return nothing
    quote = pa.scalar('"', _TEXT)
    return pc.binary_join_element_wise(quote, texts, quote, pa.scalar("", _TEXT))


def _partition_columns(values: pa.Array) -> dict[str, pa.Array]:
    """The partition values of files as text, by column. An empty text counts as null. Raises ValueError if the values are not in a map."""
    if not pa.types.is_map(values.type):
        raise ValueError(f"partitionValues is not a map: its type is {values.type}")
    names = pc.unique(values.keys.cast(pa.string())).to_pylist()
    columns = {
        name: pc.map_lookup(values, pa.scalar(name, values.type.key_type), "last").cast(pa.string()) for name in names
    }
    return {
        name: pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts) for name, texts in columns.items()
    }


def _sort_by_key(table: pa.Table) -> pa.RecordBatch:
    """The files ascending by key. Of several files with the same key only the last is left.

    Raises ValueError if a path has two deletion vectors.
    """
    order = pc.sort_indices(table, [("path", "ascending"), ("vector", "ascending"), ("text_row", "ascending")])
    rows = table.take(order).combine_chunks()
    paths, vectors = one_array(rows.column("path")), one_array(rows.column("vector"))
    if len(paths) > 1:
        same_path = as_bools(pc.equal(paths.slice(1), paths.slice(0, len(paths) - 1)))
        if same_path.any():
            same_key = same_path & as_bools(pc.equal(vectors.slice(1), vectors.slice(0, len(vectors) - 1)))
            last = np.append(~same_key, True)
            rows = rows.filter(pa.array(last)).combine_chunks()
            if (same_path & ~same_key).any():
                raise ValueError("it lists a data file twice, with different deletion vectors")
    arrays = [one_array(column) for column in rows.columns]
    return pa.RecordBatch.from_arrays(arrays, schema=rows.schema)
