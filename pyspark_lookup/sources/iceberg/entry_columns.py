"""`EntryColumns`: the files that a large table's manifests list, as columns that all processes of a host map from its cache directory.

A table of 300,000 files has millions of column bounds in its manifests. These bounds are stored as the manifests have them, compressed, one
column of the table at a time. When a query first compares a column, the bounds of that column are parsed for all files, and the parsed bounds
are stored, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.keys import Numbers, as_array, as_indices, as_int64, one_array
from pyspark_lookup.columnar.predicate import StatsColumns
from pyspark_lookup.core.decoding import as_count, as_counts, as_name, as_texts
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.sources.iceberg.entries import (
    DATA,
    Entry,
    Partition,
    entry_from_json,
    entry_to_json,
    parse_partition,
    text_of_partition,
)
from pyspark_lookup.storage.disk import Disk
from pyspark_lookup.versions.column_segments import ipc_file, open_batch, open_stats, write_segment, write_stats

_FILES, _PARTITIONS, _DELETES = "files", "partitions", "deletes"
_GROUP_ROWS = 2048  # bounds that are compressed together, and so are decompressed together to read one of them
_CHUNK_ROWS = 16384  # files whose statistics are written together
_BUFFERED_ENTRIES = 1024  # entries that are collected before they are turned into columns
_PARTS_AT_MOST = 16  # parts with statistics; if there are more, the smaller ones are written together
_COLUMNS = pa.schema(
    [
        ("url", pa.string()),
        ("location", pa.string()),
        ("format", pa.string()),
        ("partition", pa.int64()),
        ("sequence", pa.int64()),
        ("size", pa.int64()),
        ("rows", pa.int64()),
        ("manifest", pa.int64()),
        ("place", pa.int64()),
    ]
)
"""The columns for a data file: its URL, the values in its entry, the numbers of its partition and of its manifest, and the row of its
statistics (`place`)."""
STATISTICS = pa.schema(
    [("lower", pa.large_binary()), ("upper", pa.large_binary()), ("nulls", pa.int64()), ("values", pa.int64())]
)
"""The statistics of one column of the table in a file, as the manifest states them: its bounds, its number of nulls and its number of values."""


_AUTHORITY = r"^(?P<authority>[A-Za-z][A-Za-z0-9+.-]*:(?://[^/]*)?)"  # as `parse_authority` has it


@dataclasses.dataclass(frozen=True)
class EntryBatch:
    """Some data files as columns. `manifests` and `partition_codes`: the numbers of their manifests and of their `partitions`, which are texts.

    `samples`: an entry of each kind of file, without statistics. `statistics`: by field id, as in `STATISTICS`, one row for each file.
    """

    manifests: Numbers
    locations: pa.Array
    formats: pa.Array
    partition_codes: Numbers
    partitions: Sequence[str]
    sequences: Numbers
    sizes: Numbers
    rows: Numbers
    samples: Sequence[Entry]
    statistics: Mapping[int, pa.Table]


class StatisticsPart:
    """The statistics of some data files, by field id.

    They are stored in chunks; `counts` has the number of rows of each chunk. A chunk has one compressed Arrow file for each column of which it
    has values. `name`: the part's segment in the host's cache directory; None: the statistics are in memory.
    """

    def __init__(self, regions: Mapping[str, Any], counts: Sequence[int], name: str | None) -> None:
        self.name = name
        self.rows = sum(counts)
        self.field_ids = sorted({int(region.partition("-")[0]) for region in regions})
        self._regions = regions
        self._starts = np.cumsum([0, *counts])
        self._readers: dict[str, Any] = {}
        self._latest: dict[
            int, tuple[int, int, Any]
        ] = {}  # by field id: (chunk, group, the group's rows) that were read last

    def columns(self, field_id: int) -> pa.Table:
        """The statistics of a column in all files of the part, with the columns `STATISTICS`."""
        tables = []
        for chunk, count in enumerate(np.diff(self._starts).tolist()):
            reader = self._open(field_id, chunk)
            tables.append(_unknown(count) if reader is None else reader.read_all())
        return pa.concat_tables(tables)

    def values(self, field_id: int, row: int) -> dict[str, Any]:
        """The statistics of a column in one file; values that are not known are None."""
        chunk = int(np.searchsorted(self._starts, row, "right")) - 1
        group, place = divmod(row - int(self._starts[chunk]), _GROUP_ROWS)
        latest = self._latest.get(field_id)
        if latest is None or latest[:2] != (chunk, group):
            reader = self._open(field_id, chunk)
            latest = chunk, group, None if reader is None else reader.get_batch(group)
            self._latest[field_id] = latest
        batch = latest[2]
        return {name: None if batch is None else batch.column(name)[place].as_py() for name in STATISTICS.names}

    def _open(self, field_id: int, chunk: int) -> Any:
        region = f"{field_id}-{chunk}"
        if region not in self._readers:
            data = self._regions.get(region)
            self._readers[region] = None if data is None else pa.ipc.open_file(pa.py_buffer(data))
        return self._readers[region]


def _unknown(count: int) -> pa.Table:
    return pa.Table.from_arrays([pa.nulls(count, field.type) for field in STATISTICS], schema=STATISTICS)


class _Side(Mapping[int, Any]):
    """One column of `STATISTICS` for a file, such as its lower bounds, by field id."""

    def __init__(self, part: StatisticsPart, row: int, side: str) -> None:
        self._part = part
        self._row = row
        self._side = side

    def __getitem__(self, field_id: int) -> Any:
        value = self._part.values(field_id, self._row)[self._side]
        if value is None:
            raise KeyError(field_id)
        return value

    def __iter__(self) -> Iterator[int]:
        return (field_id for field_id in self._part.field_ids if field_id in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class EntryColumns:
    """The live data files and the delete files that some manifests list. Immutable. The data files are in columns, ascending by URL.

    `manifests`: the locations of the manifests. `name`: the segment with the columns; None: they are in memory. `table`: the key of the
    table's segments. `places`: the location of the table and its URL, with which the URLs of the files were computed (see `Locations`).
    """

    def __init__(
        self,
        batch: pa.RecordBatch,
        partitions: pa.Array,
        deletes: Any,
        parts: Sequence[StatisticsPart],
        manifests: tuple[str, ...],
        places: tuple[str, ...],
        disk: Disk | None,
        table: str,
        name: str | None,
    ) -> None:
        self.batch = batch
        self.partitions = partitions
        self._deletes = deletes
        self.parts = tuple(parts)
        self.manifests = manifests
        self.places = places
        self.name = name
        self._disk = disk
        self._table = table
        self.rows = batch.num_rows
        self.urls, self.locations, self.formats = (batch.column(number) for number in range(3))
        (
            self.partition_codes,
            self.sequences,
            self.sizes,
            self.row_counts,
            self.manifest_numbers,
            self.statistics_rows,
        ) = (as_int64(batch.column(number)) for number in range(3, 9))
        self._part_starts = np.cumsum([0, *(part.rows for part in parts)])
        self._stats: dict[str, StatsColumns] = {}

    @cached_property
    def deletes(self) -> list[tuple[int, Entry]]:
        """(the number of its manifest, its entry) of each delete file."""
        return [(as_count(number), entry_from_json(record)) for number, record in json.loads(bytes(self._deletes))]

    @cached_property
    def by_location(self) -> Numbers:
        """The rows in the order of their locations. URLs may have another order."""
        return as_int64(pc.sort_indices(self.locations).cast(pa.int64()))

    @cached_property
    def authorities(self) -> pa.Array:
        """`parse_authority` of each location."""
        return pc.fill_null(pc.struct_field(pc.extract_regex(self.locations, _AUTHORITY), "authority"), "")

    def partition(self, code: int) -> Partition:
        """The partition with the number `code`."""
        return parse_partition(self.partitions[code].as_py())

    def entry(self, row: int) -> Entry:
        """The entry of the data file in a row."""
        at = int(self.statistics_rows[row])
        number = int(np.searchsorted(self._part_starts, at, "right")) - 1
        part, at = self.parts[number], at - int(self._part_starts[number])
        sequence, size, rows = (int(column[row]) for column in (self.sequences, self.sizes, self.row_counts))
        lower, upper, nulls, values = (_Side(part, at, side) for side in STATISTICS.names)
        partition = self.partition(int(self.partition_codes[row]))
        texts = self.locations[row].as_py(), DATA, self.formats[row].as_py()
        return Entry(*texts, *partition, sequence, size, rows, lower, upper, nulls, values, (), None, None, None)

    def statistics(self, field_id: int) -> pa.Table:
        """The statistics of a column, as the manifests state them: the columns `STATISTICS`, one row for each file."""
        tables = [part.columns(field_id) for part in self.parts]
        return pa.concat_tables([_unknown(0), *tables]).take(as_indices(self.statistics_rows))

    def stats(self, key: str, parse: Callable[[], StatsColumns]) -> StatsColumns:
        """The statistics that `parse` returns. `parse` is called once per host for each `key`, and its result is stored on disk."""
        if key not in self._stats:
            disk, name = self._disk, f"{self.name}-{key}"
            columns = None if disk is None or self.name is None else open_stats(disk, self._table, name)
            if columns is None or len(columns.low) != self.rows:
                columns = parse()
                if disk is not None and self.name is not None:
                    with contextlib.suppress(OSError):  # then another process parses them again
                        write_stats(disk, self._table, name, columns)
            self._stats[key] = columns
        return self._stats[key]

    def live_rows(self, manifests: Iterable[str]) -> Numbers:
        """The row numbers, ascending, of the data files that these manifests list."""
        return np.flatnonzero(self._is_of(manifests)[self.manifest_numbers])

    def live_deletes(self, manifests: Iterable[str]) -> list[Entry]:
        """The entries of the delete files that these manifests list."""
        is_live = self._is_of(manifests)
        return [entry for number, entry in self.deletes if is_live[number]]

    def _is_of(self, manifests: Iterable[str]) -> Numbers:
        wanted = {*manifests}
        return np.array([location in wanted for location in self.manifests], np.bool_)

    def to_json(self) -> dict[str, Any] | None:
        """The record with which `open_entries` finds the columns on disk; None if they are in memory."""
        names = [part.name for part in self.parts]
        return None if self.name is None or None in names else {"files": self.name, "statistics": names}

    @property
    def segment_prefixes(self) -> list[str]:
        """The beginnings of the names of the segments that hold these columns and their statistics."""
        return [name for name in (self.name, *(part.name for part in self.parts)) if name is not None]


def open_entries(disk: Disk, table: str, record: Any) -> EntryColumns | None:
    """The columns that a record of `to_json` describes; None if a segment is missing or damaged.

    Raises one of `decoding.UNREADABLE` for a malformed record.
    """
    parts = []
    for name in as_texts(record["statistics"]):
        segment = disk.open_segment(table, as_name(name))
        if segment is None:
            return None
        parts.append(StatisticsPart(segment.regions, as_counts(segment.meta["counts"]), name))
    name = as_name(record["files"])
    segment = disk.open_segment(table, name)
    if segment is None:
        return None
    try:
        batch, partitions = (open_batch(segment.regions[region]) for region in (_FILES, _PARTITIONS))
    except (pa.ArrowException, OSError) as problem:
        raise ValueError(str(problem)) from None
    manifests, places = as_texts(segment.meta["manifests"]), as_texts(segment.meta["places"])
    deletes = segment.regions[_DELETES]
    return EntryColumns(batch, partitions.column(0), deletes, parts, manifests, places, disk, table, name)


class EntryBuilder:
    """Collects the entries of manifests and turns them into `EntryColumns`. With a `disk`, statistics are written to it as they come.

    `resolve_url`: returns the URL of a location. `check`: raises an error for a file that cannot be read. The methods raise
    OSError if the disk has no room.
    """

    def __init__(
        self, disk: Disk | None, table: str, resolve_url: Callable[[str], str], check: Callable[[Entry], None]
    ) -> None:
        self._disk = disk
        self._table = table
        self._resolve_url = resolve_url
        self._check = check
        self._manifests: list[str] = []
        self._batches: list[pa.RecordBatch] = []
        self._partitions: dict[str, int] = {}
        self._deletes: list[tuple[int, Entry]] = []
        self._parts: list[StatisticsPart] = []
        self._buffered: list[tuple[int, Entry]] = []
        self._waiting: list[tuple[int, dict[int, pa.Table]]] = []
        self._regions: dict[str, Any] = {}
        self._counts: list[int] = []
        self._writer = None if disk is None else disk.create_segment({})

    def close(self) -> None:
        """Remove the unfinished segment, if there is one."""
        if self._writer is not None:
            self._writer.close()

    def take_over(self, columns: EntryColumns, manifests: Sequence[str]) -> None:
        """Take over the files of these manifests from other columns. Must be called before `add`.

        The statistics of these files stay where they are, except if they are in `_PARTS_AT_MOST` or more parts: then the statistics of the
        smaller parts are written again. With a disk, statistics that are in memory are written, too.
        """
        numbers = np.full(len(columns.manifests), -1)
        live_locations = {*manifests}
        for number, location in enumerate(columns.manifests):
            if location in live_locations:
                numbers[number] = len(self._manifests)
                self._manifests.append(location)
        self._deletes += [(int(numbers[number]), entry) for number, entry in columns.deletes if numbers[number] >= 0]
        rows = columns.live_rows(manifests)
        at = columns.statistics_rows[rows]
        starts = np.cumsum([0, *(part.rows for part in columns.parts)])
        part_numbers = np.searchsorted(starts, at, "right") - 1
        counts = np.bincount(part_numbers, minlength=len(columns.parts))
        # Parts in memory were made while the disk had no room. Columns on disk cannot refer to them.
        is_reusable = np.array([self._disk is None or part.name is not None for part in columns.parts], np.bool_)
        kept_numbers = np.flatnonzero(is_reusable & (counts > 0))
        if len(kept_numbers) >= _PARTS_AT_MOST:
            largest_first = kept_numbers[np.argsort(-counts[kept_numbers])]
            kept_numbers = np.sort(largest_first[: _PARTS_AT_MOST // 2])
        self._parts = [columns.parts[number] for number in kept_numbers.tolist()]
        moves = np.zeros(len(columns.parts), np.int64)
        moves[kept_numbers] = np.cumsum([0, *(part.rows for part in self._parts)])[:-1] - starts[kept_numbers]
        is_kept = np.isin(part_numbers, kept_numbers)
        codes = np.zeros(len(columns.partitions), np.int64)
        for code in np.unique(columns.partition_codes[rows]).tolist():
            codes[code] = self._code(columns.partitions[code].as_py())

        def add(some: Numbers, places: Numbers) -> None:
            changes = {
                "partition": codes[columns.partition_codes[some]],
                "manifest": numbers[columns.manifest_numbers[some]],
                "place": places,
            }
            batch = columns.batch.take(as_indices(some))
            for name, values in changes.items():
                batch = batch.set_column(_COLUMNS.get_field_index(name), name, as_array(values))
            self._batches.append(batch.cast(_COLUMNS))

        add(rows[is_kept], at[is_kept] + moves[part_numbers[is_kept]])
        for number in np.unique(part_numbers[~is_kept]).tolist():
            in_part = rows[part_numbers == number]
            part, inside = columns.parts[number], columns.statistics_rows[in_part] - starts[number]
            tables = {id_: part.columns(id_).take(as_indices(inside)) for id_ in part.field_ids}
            add(in_part, self._statistics_row() + np.arange(len(in_part)))
            self._add_statistics(len(in_part), tables)

    def begin(self, location: str) -> int:
        """The number of a manifest, whose files are added next."""
        self._manifests.append(location)
        return len(self._manifests) - 1

    def add(self, location: str, entries: Iterable[Entry]) -> None:
        """Add the live files of a manifest. Raises the errors of `check`."""
        number = self.begin(location)
        for entry in entries:
            self._check(entry)
            if entry.content == DATA:
                self._buffered.append((number, entry))
            else:
                self._deletes.append((number, entry))
        if len(self._buffered) >= _BUFFERED_ENTRIES:
            self._flush_entries()

    def add_batch(self, batch: EntryBatch) -> None:
        """Add live data files. Raises the errors of `check`."""
        for entry in batch.samples:
            self._check(entry)
        codes = np.array([self._code(partition) for partition in batch.partitions], np.int64)
        first, count = self._statistics_row(), len(batch.locations)
        urls = [self._resolve_url(location) for location in batch.locations.to_pylist()]
        numbers = [codes[batch.partition_codes], batch.sequences, batch.sizes, batch.rows, batch.manifests]
        columns = [pa.array(urls, pa.string()), batch.locations, batch.formats]
        columns += [as_indices(column) for column in (*numbers, np.arange(first, first + count))]
        self._batches.append(pa.RecordBatch.from_arrays(columns, schema=_COLUMNS))
        self._add_statistics(count, dict(batch.statistics))

    def _code(self, partition: str) -> int:
        return self._partitions.setdefault(partition, len(self._partitions))

    def _statistics_row(self) -> int:
        """The row that the next added statistics will have."""
        return sum(part.rows for part in self._parts) + sum(self._counts) + sum(count for count, _ in self._waiting)

    def _flush_entries(self) -> None:
        """Turn the buffered entries into columns."""
        buffered, self._buffered = self._buffered, []
        if not buffered:
            return
        entries = [entry for _, entry in buffered]
        partitions = [text_of_partition(entry) for entry in entries]
        codes = {partition: code for code, partition in enumerate(dict.fromkeys(partitions))}
        tables = {}
        for id_ in sorted({id_ for entry in entries for side in STATISTICS.names for id_ in getattr(entry, side)}):
            sides = ([getattr(entry, field.name).get(id_) for entry in entries] for field in STATISTICS)
            arrays = [pa.array(values, field.type) for values, field in zip(sides, STATISTICS, strict=True)]
            tables[id_] = pa.Table.from_arrays(arrays, schema=STATISTICS)
        sequences, sizes, rows = (
            np.array([getattr(entry, name) for entry in entries], np.int64) for name in ("sequence", "size", "rows")
        )
        self.add_batch(
            EntryBatch(
                np.array([number for number, _ in buffered], np.int64),
                pa.array([entry.location for entry in entries], pa.string()),
                pa.array([entry.format for entry in entries], pa.string()),
                np.array([codes[partition] for partition in partitions], np.int64),
                [*codes],
                sequences,
                sizes,
                rows,
                (),
                tables,
            )
        )

    def _add_statistics(self, count: int, tables: dict[int, pa.Table]) -> None:
        self._waiting.append((count, tables))
        if sum(count for count, _ in self._waiting) >= _CHUNK_ROWS:
            self._flush_statistics()

    def _flush_statistics(self) -> None:
        """Write the collected statistics as one chunk."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        for id_ in sorted({id_ for _, tables in waiting for id_ in tables}):
            column = pa.concat_tables([tables[id_] if id_ in tables else _unknown(count) for count, tables in waiting])
            region, data = f"{id_}-{len(self._counts)}", _compress(column)
            if self._writer is None:
                self._regions[region] = data
            else:
                self._writer.add(region, data)
        self._counts.append(sum(count for count, _ in waiting))

    def finish(self, places: tuple[str, ...]) -> EntryColumns:
        """The columns of all files that were added, ascending by URL."""
        self._flush_entries()
        self._flush_statistics()
        parts = [*self._parts]
        if self._counts:
            parts.append(self._finish_part())
        self.close()
        table = pa.Table.from_batches(self._batches, _COLUMNS).combine_chunks()
        table = table.take(pc.sort_indices(table, [("url", "ascending")]))
        files = pa.RecordBatch.from_arrays([one_array(column) for column in table.columns], schema=_COLUMNS)
        partitions = pa.RecordBatch.from_arrays([pa.array([*self._partitions], pa.string())], names=[_PARTITIONS])
        deletes = json.dumps([[number, entry_to_json(entry)] for number, entry in self._deletes]).encode()
        manifests, name = tuple(self._manifests), None
        if self._disk is not None:
            name = f"entries-{uuid.uuid4().hex}"
            regions = {_FILES: ipc_file(files), _PARTITIONS: ipc_file(partitions), _DELETES: deletes}
            meta = {"manifests": manifests, "places": places}
            write_segment(self._disk, self._table, name, regions, meta)
            record = {"files": name, "statistics": [part.name for part in parts]}
            opened = open_entries(self._disk, self._table, record)
            if opened is None:
                raise OSError("a segment was removed as soon as it was written")
            return opened
        return EntryColumns(files, partitions.column(0), deletes, parts, manifests, places, None, self._table, None)

    def _finish_part(self) -> StatisticsPart:
        if self._disk is None or self._writer is None:
            return StatisticsPart(self._regions, self._counts, None)
        name = f"statistics-{uuid.uuid4().hex}"
        self._writer.finish({"counts": self._counts})
        self._disk.publish_segment(self._table, name, self._writer)
        opened = self._disk.open_segment(self._table, name)
        if opened is None:
            raise OSError("a segment was removed as soon as it was written")
        return StatisticsPart(opened.regions, self._counts, name)


def _compress(column: pa.Table) -> pa.Buffer:
    """An Arrow file with the statistics of a column, compressed in groups of `_GROUP_ROWS` rows."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, column.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(column.combine_chunks(), max_chunksize=_GROUP_ROWS)
    return sink.getvalue()
