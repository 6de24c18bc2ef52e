"""Reads the rows of a `TableVersion` as Arrow batches: skips files and row groups, reads through the block cache, drops deleted rows, filters.

`TableScan` is the interface of all scans, also of tables in other systems; `Scan` reads files. `Scan.prepare` makes all calls to the store
that a task needs before the task returns its first batch. So if a file of the version has vanished, the task notices it before it has returned
any row. The prepared task only decodes bytes in memory.

A row may be deleted by its position, or by its values (see `scan.equality`). Values are compared after the row has been read.
"""

from __future__ import annotations

import abc
import bisect
import dataclasses
import functools
import threading
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, overload

import numpy as np
import pyarrow as pa

from pyspark_lookup.columnar.keys import Numbers, as_bools, as_indices, sort_distinct
from pyspark_lookup.columnar.predicate import (
    Among,
    And,
    ColumnStats,
    Predicate,
    evaluate,
    join_stats,
    may_match,
    referenced_columns,
)
from pyspark_lookup.columnar.types import PLAN_AGAIN, check_readable, lenient_schema, merge_schemas
from pyspark_lookup.core.memory import free_bytes
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.errors import DamagedFileError, NotSupportedError, SchemaError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.scan.equality import DeletedValues, EqualityIndexes, IndexSegments
from pyspark_lookup.scan.footers import (
    OpenFiles,
    known_bounds,
    prune_by_footers,
    prune_files,
    schemas_of,
)
from pyspark_lookup.scan.formats import (
    BATCH_ROWS,
    Data,
    FileFormat,
    FileIndex,
    Inferred,
    Unit,
    join_inferred,
)
from pyspark_lookup.scan.merged_files import MergedFiles, MergedIndex, SmallFiles, merge
from pyspark_lookup.scan.open_file import (
    KnownFiles,
    OpenFile,
    Projection,
    Slice,
    decode,
    find_names,
    in_rounds,
    is_missing,
    may_lack,
    open_format,
    stats_as_planned,
    to_read,
    type_as_planned,
    value_conditions,
)
from pyspark_lookup.storage.block_cache import BlockCache, BlocksAndLocations
from pyspark_lookup.storage.disk import key_of
from pyspark_lookup.storage.stores import DELETE_FILE, Deletes, EqualityGroup, FileVersion, Range
from pyspark_lookup.versions.file_columns import ColumnFiles
from pyspark_lookup.versions.listed_columns import columns_of
from pyspark_lookup.versions.model import (
    Table,
    TableVersion,
    file_sizes,
    partition_fields,
    raw_partition_values,
    typed_partition_values,
)


def merge_positions(by_position: Mapping[str, Numbers], by_value: Mapping[str, Numbers]) -> dict[str, Numbers]:
    """For each file, by URL, the positions of its deleted rows, from position deletes and equality deletes together."""
    merged = dict(by_position)
    for url, positions in by_value.items():
        if len(positions):
            merged[url] = sort_distinct(np.concatenate([merged[url], positions])) if url in merged else positions
    return merged


_DELETES_AT_MOST = 512  # how many decoded deletes stay in memory: those that were used last


def drop_deleted(deleted: Numbers | None, first: int, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Numbers]:
    """(the rows of a batch that are not deleted, their positions in the file). `first`: the position of the batch's first row."""
    positions = np.arange(first, first + batch.num_rows)
    live = live_mask(deleted, first, batch.num_rows)
    return (batch, positions) if live is None else (batch.filter(pa.array(live)), positions[live])


def live_mask(deleted: Numbers | None, first: int, rows: int) -> Numbers | None:
    """A mask of the `rows` rows of a file from position `first` on: True for rows that are not deleted; None if none of them is deleted.

    `deleted`: the positions of deleted rows, ascending; None: no row of the file is deleted.
    """
    if deleted is None:
        return None
    low, high = np.searchsorted(deleted, [first, first + rows])
    if low == high:
        return None
    mask = np.ones(rows, np.bool_)
    mask[deleted[low:high] - first] = False
    return mask


class DeletedRows:
    """Reads which rows of files are deleted by position. A process decodes each delete file once."""

    def __init__(self, blocks: BlockCache) -> None:
        self._blocks = blocks
        self._lock = threading.Lock()
        self._positions_by_name: dict[str, Mapping[str, Numbers]] = {}
        # For the version that was read last: (the names of its deletes, for each file the positions that its deletes name together). The key
        # of a file is its URL and the number of its combination of deletes.
        self._merged: tuple[tuple[str, ...], dict[tuple[str, int], Numbers | None]] = (), {}
        # The number of each combination of deletes, by the names of the deletes.
        self._groups: dict[tuple[str, ...], int] = {}

    def read_positions(self, root: str, files: Iterable[FileVersion]) -> dict[str, Numbers]:
        """For each file with deleted rows, by URL, the positions of these rows, ascending. `root`: the table's URL."""
        files = [file for file in files if file.deletes]
        # All files of a managed table's version have the same deletes.
        distinct_deletes = {id(file.deletes): file.deletes for file in files}
        deletes = {delete.name: delete for group in distinct_deletes.values() for delete in group}
        if not deletes:
            return {}
        with self._lock:
            names, merged = self._merged
            if names != tuple(deletes):
                merged = {}
                self._merged, self._groups = (tuple(deletes), merged), {}
            groups = {
                key: self._groups.setdefault(tuple(delete.name for delete in group), len(self._groups))
                for key, group in distinct_deletes.items()
            }
        places = {file.url: (file.url, groups[id(file.deletes)]) for file in files}
        new = {file.url: file for file in files if places[file.url] not in merged}
        if new:
            by_name = self._read(list(deletes.values()), root)
            for url, file in new.items():
                path = url.removeprefix(root + "/")
                parts = [by_name[delete.name][path] for delete in file.deletes if path in by_name[delete.name]]
                merged[places[url]] = None if not parts else sort_distinct(np.concatenate(parts))
        return {file.url: positions for file in files if (positions := merged[places[file.url]]) is not None}

    def _read(self, deletes: Sequence[Deletes], root: str) -> dict[str, Mapping[str, Numbers]]:
        """For each of the deletes, by name, the positions that it names in each data file, by the file's path. `root`: the table, for errors."""
        with self._lock:
            by_name = {
                delete.name: self._positions_by_name[delete.name]
                for delete in deletes
                if delete.name in self._positions_by_name
            }
        missing = [delete for delete in deletes if delete.name not in by_name]
        parts: dict[FileVersion, list[Range]] = {}  # ranges in the same file are read by one request
        for file, part in (place for delete in missing if (place := delete.place) is not None):
            parts.setdefault(file, []).append(part)
        locations = {file: self._blocks.get_blocks_and_locations(file.url, file) for file in parts}
        read = self._blocks.read([(locations[file], ranges) for file, ranges in parts.items()])
        texts = {
            (file, part): data
            for file, contents in zip(parts, read, strict=True)
            for part, data in zip(parts[file], contents, strict=True)
        }
        for delete in missing:
            if delete.place is None:
                try:
                    by_name[delete.name] = delete.positions(b"")
                except DamagedFileError as problem:
                    raise DamagedFileError(f"{redact('path', root)}: {problem}") from None
                continue
            file, part = delete.place
            try:
                by_name[delete.name] = delete.positions(texts[file, part])
            except DamagedFileError:  # the bytes may have been damaged in transfer
                by_name[delete.name] = delete.positions(self._blocks.read_anew(locations[file], [part])[0])
                self._blocks.count_damaged()
        with self._lock:
            for name, positions in by_name.items():
                self._positions_by_name.pop(name, None)
                self._positions_by_name[name] = positions
            while len(self._positions_by_name) > max(_DELETES_AT_MOST, len(by_name)):
                del self._positions_by_name[next(iter(self._positions_by_name))]
        return by_name


_UNCHECKED_BYTES = (
    64 * 1024 * 1024
)  # after each run of this many bytes of rows, check how much memory is free, or end the batch


class WholeFiles(Sequence[Slice]):
    """For each of many files, a slice with all its bytes. A slice is made only when it is requested."""

    def __init__(self, files: ColumnFiles) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    @overload
    def __getitem__(self, place: int) -> Slice: ...
    @overload
    def __getitem__(self, place: slice) -> WholeFiles: ...
    def __getitem__(self, place: int | slice) -> Slice | WholeFiles:
        if isinstance(place, slice):
            return WholeFiles(self.files[place])
        file = self.files[place]
        return Slice(file, 0, file.size)


def to_slices(files: Sequence[FileVersion]) -> Sequence[Slice]:
    """For each file, a slice with all its bytes."""
    return WholeFiles(files) if isinstance(files, ColumnFiles) else tuple(Slice(file, 0, file.size) for file in files)


def cut_shares(
    files: Sequence[FileVersion], numbers: Iterable[int], count: int, splittable: bool
) -> list[tuple[Slice, ...]]:
    """The slices of the shares `numbers` (from 0) if files are divided into `count` shares with about equal numbers of bytes.

    A pure function, so all tasks compute the same shares. The shares are disjoint and cover every file. Only a file with the bytes of 1.5
    shares or more is cut: a file that one task reads as a whole can be read again if it is replaced, and its footer is read only once.
    """
    ends: list[int] = np.cumsum(file_sizes(files)).tolist()
    if not ends or not ends[-1]:  # an empty file must be opened, too, so that a damaged one is noticed
        return [tuple(to_slices(files)) if number == 0 else () for number in numbers]
    return [_cut_share(files, ends, number, count, splittable) for number in numbers]


def _cut_share(
    files: Sequence[FileVersion], ends: list[int], number: int, count: int, splittable: bool
) -> tuple[Slice, ...]:
    """The slices of one share. `ends`: for each file, the bytes up to its end."""
    total = ends[-1]
    low, high = total * number // count, total * (number + 1) // count
    pieces: list[Slice] = []
    first_file, end_file = bisect.bisect_left(ends, low), bisect.bisect_left(ends, high) + 1
    start = ends[first_file - 1] if first_file else 0
    for file in files[first_file:end_file]:
        cuts = min(max(round(file.size * count / total), 1), file.size) if splittable else 1
        # Only cuts near this share are tried: a table's log may claim any file size, and so any number of cuts.
        first = (low - start) * cuts // max(file.size, 1) - 1
        last = (high - start) * cuts // max(file.size, 1) + 1
        for cut in range(max(first, 0), min(last + 1, cuts)):
            piece = Slice(file, file.size * cut // cuts, file.size * (cut + 1) // cuts)
            if low <= start + (piece.start + piece.end) // 2 < high:
                pieces.append(piece)
        start += file.size
    return tuple(pieces)


@dataclasses.dataclass(frozen=True)
class PreparedUnit:
    """A unit of a file (e.g. a row group) whose bytes are in memory.

    `middle`: the offset of the unit's middle byte in the file. `bytes`: about its size in the file. `rows`: the exact number of its rows;
    None if the file has no other unit, and the number is known only after decoding.
    """

    file: FileVersion
    middle: int
    bytes: int
    rows: int | None
    batches: Iterator[pa.RecordBatch]


class PreparedScan(Protocol):
    """A task whose bytes are all in memory: its rows only have to be decoded."""

    def batches(self) -> Iterator[pa.RecordBatch]: ...
    def units(self) -> Iterator[PreparedUnit]: ...


@dataclasses.dataclass(frozen=True)
class ChangedKeys:
    """Keys whose rows may have changed: `keys`, all different, without nulls. `keyless`: whether rows without a key may have changed, too."""

    keys: pa.Table
    keyless: bool


class TableScan(abc.ABC):
    """Reads a table's rows. Methods that are not abstract answer here for files about which nothing is known."""

    @property
    def reads_all_rows(self) -> bool:
        """Whether the scan can read all rows; False if it can only look up rows by key."""
        return True

    def rows_by_key(self, keys: pa.Table, columns: pa.Schema, ages_s: Numbers | None = None) -> pa.Table | None:
        """The rows of `keys` (all different, none null) with `columns` and `KEY_INDEX`; None for a scan that cannot look rows up by key.

        `ages_s`: set, for each key, to the seconds that its rows count as older than this call (infinite: they must not be cached).
        """
        return None

    @property
    def looks_up_keys(self) -> bool:
        """Whether `rows_by_key` returns rows."""
        return False

    @property
    def dates_rows(self) -> bool:
        """Whether the ages that `rows_by_key` sets are right only for caches with the same `lookup.partial-cache.expire-after-write`."""
        return False

    @property
    def tells_changes(self) -> bool:
        """Whether `changed_keys` may know what has changed."""
        return False

    def changed_keys(self, since: TableVersion, now: TableVersion, keys: pa.Schema) -> ChangedKeys | None:
        """The keys whose rows may differ between `since` and the state at the time of this call; None if this is not known.

        `keys`: the key columns. Call this after `now` was found to be the current version, so that the keys also count for `now`.
        """
        return None

    def close(self) -> None:  # noqa: B027 # most scans have nothing to close
        """Close connections. The next use of the scan opens them again."""

    def forget_files(self) -> None:  # noqa: B027
        """Drop from memory what is known of files. Call this if no file that was read will be read again soon."""

    def splittable(self, table: Table) -> bool:
        """Whether several tasks may read parts of the same file."""
        return False

    @abc.abstractmethod
    def schema(self, table: Table, files: Sequence[FileVersion]) -> tuple[pa.Schema, pa.Schema]:
        """(columns in the files, partition columns), in the types that Spark has."""

    def bounds(
        self, table: Table, files: Sequence[FileVersion], partitions: pa.Schema, columns: pa.Schema
    ) -> list[list[ColumnStats | None]]:
        """For each file, the statistics of each of `columns` (spelled as in `schema`); None for a column of which they are not known."""
        return [[None for _ in columns] for _ in files]

    def rows(self, table: Table, files: Sequence[FileVersion]) -> int | None:
        """The number of rows in the files, without deleted rows; None if it would be known only after the rows were read."""
        return None

    def decoded_bytes(self, table: Table, files: Sequence[FileVersion], names: Sequence[str]) -> int | None:
        """About how many bytes the columns `names` take in a full cache; None if this would be known only after the rows were read."""
        return None

    def read_deleted(self, table: Table, files: Sequence[FileVersion]) -> dict[str, Numbers]:
        """For each file with deleted rows, by URL, the positions of these rows."""
        return {}

    def deleted_values(self, table: Table, group: EqualityGroup) -> Iterable[DeletedValues]:
        """The deleted values in a group of equality deletes, for each set of columns that these compare."""
        return ()

    @abc.abstractmethod
    def prepare(
        self,
        table: Table,
        pieces: Sequence[Slice],
        projection: Projection,
        columns_of_version: Callable[[], pa.Schema] | None = None,
    ) -> PreparedScan:
        """A task that decodes `pieces`, with all bytes that it needs in memory.

        `columns_of_version`: returns the columns of all files of the version. It is called if no file of the task has a planned column: if no
        file of the version has the column either, this is an error. None: such a column is null.
        """


Files = Callable[[bool], TableScan]
"""A function that returns a scan of files. Its argument says whether this host's cache keeps the bytes that the scan reads, for later reads."""


def all_columns(version_schema: tuple[pa.Schema, pa.Schema]) -> pa.Schema:
    """The columns of the files, then the partition columns: the order in which a table shows them. `version_schema`: what `TableScan.schema` returned."""
    data, partitions = version_schema
    return pa.schema([*data, *partitions])


def coalesce(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, metrics: CacheMetricGroup
) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of about 65,536 rows (fewer if rows are long), with exactly the schema `schema`."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        metrics.inc("rowsReadCount", batch.num_rows)
        if rows and (rows + batch.num_rows > BATCH_ROWS or size > _UNCHECKED_BYTES):
            yield _concat(waiting, schema)
            waiting, rows, size = [], 0, 0
        waiting.append(batch)
        rows += batch.num_rows
        size += 0 if batch.num_rows == BATCH_ROWS else batch.nbytes
    if waiting:
        yield _concat(waiting, schema)


def collect_table(batches: Iterable[pa.RecordBatch], schema: pa.Schema, url: str) -> pa.Table:
    """The rows of some batches as one table. Raises NotSupportedError, which names `url`, if they do not fit into memory."""
    parts: list[pa.RecordBatch] = []
    size = checked_bytes = 0
    for batch in batches:
        parts.append(batch)
        size += batch.nbytes
        if size - checked_bytes > _UNCHECKED_BYTES:
            checked_bytes = size
            if (free := free_bytes()) < max(2 * _UNCHECKED_BYTES, size // 4):
                raise NotSupportedError(
                    f"{redact('path', url)}: its rows do not fit into memory: {size} bytes are read, and only {free} are still free: read fewer columns or rows, or let Spark read the table in several tasks (spark.read.format('lookupcache'))"
                )
    return pa.Table.from_batches(parts, schema)


def matching_rows(batch: pa.RecordBatch, predicate: Predicate | None) -> pa.RecordBatch | None:
    """The rows for which the predicate is true; None if there are none."""
    if predicate is None:
        return batch
    mask = evaluate_mask(predicate, batch)
    if mask.true_count == 0:
        return None
    return batch.filter(mask) if mask.true_count < batch.num_rows or mask.null_count else batch


def _concat(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    batch = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    return pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def evaluate_mask(predicate: Predicate | None, batch: pa.RecordBatch) -> pa.BooleanArray:
    assert predicate is not None
    return evaluate(predicate, dict(zip(batch.schema.names, batch.columns, strict=True)), batch.num_rows)


# A scan of up to this many units first decodes the columns of its predicate. It fetches the other columns only of units with matching
# rows. With more units, this second round of requests costs more than it saves.
_TWO_PHASE_UNITS = 8
_TWO_PHASE_BYTES = 256 * 1024
_READ_AT_ONCE = 32 * 1024 * 1024  # about how many bytes of files `_place_rows` has in memory
_MERGED_FROM = 8
_MERGED_BYTES = 256 * 1024  # the largest size of a file that is merged with others
_READS_KEPT = 200  # the index of a file that was not used in this many reads is dropped: reading it again costs less than keeping it


class Scan(TableScan):
    """Reads the files of one table through a block cache. `rereads`: whether the same files will be read again and again.

    `merged_from`: from this number of small files on that a lookup needs, they are merged, see `SmallFiles`.
    """

    def __init__(
        self,
        blocks: BlockCache,
        metrics: CacheMetricGroup,
        block_size: int,
        rereads: bool = True,
        merged_from: int = _MERGED_FROM,
    ) -> None:
        self._blocks = blocks
        self._metrics = metrics
        self._block_size = block_size
        self._deleted = DeletedRows(blocks)
        # 1 and not 0, because the parts of a large file are read one after the other.
        self._reads_kept = _READS_KEPT if rereads else 1
        self._known_files = KnownFiles(self._reads_kept)
        self._equality: EqualityIndexes | None = None
        self._merged_from = merged_from
        self._small_files: SmallFiles | None = None

    def forget_files(self) -> None:
        self._known_files = KnownFiles(self._reads_kept)

    def splittable(self, table: Table) -> bool:
        assert table.format is not None
        return open_format(table.format, self._block_size).splittable

    # --- schema -----------------------------------------------------------------------------------

    def schema(self, table: Table, files: Sequence[FileVersion]) -> tuple[pa.Schema, pa.Schema]:
        """Implements `TableScan.schema`.

        Reads, through the cache, the part of each file that shows its schema: the footer, or all of a CSV or JSON file. Reads nothing if the
        user has declared the columns. A column that is both in the files and in the directories' names counts as a partition column. A
        column whose types in two files do not fit together gets an `unreadable_type`, whose reason names both files.
        """
        partitions = partition_fields(table, files)
        folded = {name.lower() for name in partitions.names}
        if table.declared is not None:
            partitions = pa.schema([field for field in partitions if field.name in table.declared.names])
            data = table.declared
        elif (
            isinstance(files, ColumnFiles)
            and (columns := columns_of(files)) is not None
            and (open_files := self._footer_opener(table, None)) is not None
        ):
            data = merge_schemas(schemas_of(table, files, columns, open_files))
        else:
            opened = self._open(table, to_slices(files), None)
            data = merge_schemas((file.piece.file.url, schema) for file, schema in _infer_together(opened))
        return pa.schema([field for field in data if field.name.lower() not in folded]), partitions

    def bounds(
        self, table: Table, files: Sequence[FileVersion], partitions: pa.Schema, columns: pa.Schema
    ) -> list[list[ColumnStats | None]]:
        """Implements `TableScan.bounds`. Reads the footers of files whose statistics are not known, through the cache."""
        names, listed = columns.names, columns_of(files)
        if isinstance(files, ColumnFiles) and listed is not None and not {*names} & {*partitions.names}:
            known = known_bounds(table, files, listed, columns)
            others = [file for file, row in zip(files, known, strict=True) if row is None]
            rows = iter(self.bounds(table, others, partitions, columns))
            return [next(rows) if row is None else row for row in known]
        described = {file.url: _described_bounds(table, file, partitions, names) for file in files}
        unknown = [file for file in files if described[file.url] is None]
        read = zip(unknown, self._open(table, to_slices(unknown), None), strict=True)
        bounds = {file.url: self._read_bounds(table, opened, partitions, names) for file, opened in read}
        return [described[file.url] or bounds[file.url] for file in files]

    def _read_bounds(
        self, table: Table, file: OpenFile, partitions: pa.Schema, names: Sequence[str]
    ) -> list[ColumnStats | None]:
        values = _partition_values(table, file.piece.file, partitions)
        requested = pa.schema([pa.field(name, pa.null()) for name in names])
        spelled = find_names(file.piece.file, file.index, requested, _declared_schema(table, [file.piece]))
        row: list[ColumnStats | None] = []
        for name in names:
            if name in values:
                row.append(ColumnStats.from_constant(values[name]))
            elif name not in spelled:
                # A data file without the column has null in every row. But a delete file has only the columns that were keys when it was
                # written, whatever the values of the deleted rows in others.
                unknown = file.piece.file.identity == DELETE_FILE or may_lack(file.piece.file, name)
                row.append(None if unknown else ColumnStats.from_constant(None))
            else:
                source, stored = (file.piece.file, file.index), spelled[name]
                row.append(join_stats([stats_as_planned(*source, unit, stored, None) for unit in file.index.units]))
        return row

    def unit_bounds(
        self, table: Table, files: Sequence[FileVersion], projection: Projection
    ) -> list[tuple[ColumnStats | None, int]]:
        """For each unit that may have rows of the projection: (statistics of the projection's only column, size of the unit in bytes)."""
        (name,) = projection.columns.names
        bounds = []
        for file in self._open(table, to_slices(files), projection):
            for unit in file.index.units:
                if self._may_match(file, unit, projection):
                    size = sum(length for _, length in file.index.ranges(unit, file.index.schema.names))
                    stats = None
                    if name in file.names:
                        planned = projection.columns.field(name).type
                        stats = stats_as_planned(file.piece.file, file.index, unit, file.names[name], planned)
                    bounds.append((stats, size))
        return bounds

    def rows(self, table: Table, files: Sequence[FileVersion]) -> int | None:
        """Implements `TableScan.rows`. Reads the footers of files whose number of rows is not known, through the cache."""
        counts = [file.statistics.rows if file.statistics is not None else None for file in files]
        unknown = [file for file, count in zip(files, counts, strict=True) if count is None]
        counts = [count for count in counts if count is not None]
        counts += [f.index.rows(unit) for f in self._open(table, to_slices(unknown), None) for unit in f.index.units]
        known_counts = [count for count in counts if count is not None]
        deleted = sum(map(len, self.read_deleted(table, files).values()))
        return sum(known_counts) - deleted if len(known_counts) == len(counts) else None

    def decoded_bytes(self, table: Table, files: Sequence[FileVersion], names: Sequence[str]) -> int | None:
        """Implements `TableScan.decoded_bytes`. Reads footers through the cache, for formats that have them."""
        if not self.splittable(table):
            return None
        requested = pa.schema([pa.field(name, pa.null()) for name in names])
        sizes: list[int | None] = []
        for file in self._open(table, to_slices(files), None):
            columns = list(find_names(file.piece.file, file.index, requested).values())
            sizes += [file.index.decoded_bytes(unit, columns) for unit in file.index.units]
        known_sizes = [size for size in sizes if size is not None]
        return sum(known_sizes) if len(known_sizes) == len(sizes) else None

    def read_deleted(self, table: Table, files: Sequence[FileVersion]) -> dict[str, Numbers]:
        """Implements `TableScan.read_deleted`. Reads delete files through the cache."""
        by_position = self._deleted.read_positions(table.url, files)
        with_deletes = [file for file in files if file.equality]
        by_value = self._equality_indexes(table).read_positions(with_deletes) if with_deletes else {}
        return merge_positions(by_position, by_value)

    def deleted_values(self, table: Table, group: EqualityGroup) -> Iterable[DeletedValues]:
        """Implements `TableScan.deleted_values`. Reads delete files through the cache."""
        return self._equality_indexes(table).read_values(group)

    def _equality_indexes(self, table: Table) -> EqualityIndexes:
        if self._equality is None:
            place, read, segments = functools.partial(self._place_rows, table), None, None
            disk = self._blocks.disk
            if disk is not None:
                # The host's disk keeps the index, so the block cache need not keep the delete files as well.
                read = functools.partial(self._without_keeping()._place_small, table)
                segments = IndexSegments(disk, key_of(self._blocks.scope, table.url))
            self._equality = EqualityIndexes(read or place, place, segments)
        return self._equality

    def _without_keeping(self) -> Scan:
        """A scan of the same files that does not keep the bytes that it fetches in the block cache."""
        return Scan(self._blocks.read_only(), self._metrics, self._block_size, rereads=False)

    def _place_rows(
        self, table: Table, files: Sequence[FileVersion], schema: pa.Schema, predicate: Predicate | None
    ) -> Iterator[tuple[FileVersion, Numbers, pa.RecordBatch]]:
        projection = Projection(schema, schema, pa.schema([]), predicate)
        for some in in_rounds(files, _READ_AT_ONCE):
            yield from self._prepare(table, to_slices(some), projection).place()

    def _place_small(
        self, table: Table, files: Sequence[FileVersion], schema: pa.Schema, predicate: Predicate | None
    ) -> Iterator[tuple[FileVersion, Numbers, pa.RecordBatch]]:
        """As `_place_rows`, for many small files whose columns are stored alike: their rows are decoded and merged first, and then cast at once."""
        projection = Projection(schema, schema, pa.schema([]), predicate)
        for some in in_rounds(files, _READ_AT_ONCE):
            is_alike = len(some) > 1 and all(file.size <= _MERGED_BYTES and not file.deletes for file in some)
            parts = merge(self._open_whole(table, some)) if is_alike else []
            if len(parts) != 1 or len(parts[0].names) < len(some):
                yield from self._prepare(table, to_slices(some), projection).place()
                continue
            index = MergedIndex(parts[0], some[0].size)
            (opened,) = self._open(table, to_slices(some[:1]), projection, {0: index})
            self._check_schema([opened], projection, None, None)
            rows = pa.concat_batches(decode(opened, index.units[0], schema.names, projection))
            start = 0
            for file, end in zip(some, parts[0].ends.tolist(), strict=True):
                yield file, np.arange(end - start), rows.slice(start, end - start)
                start = end

    # --- rows -------------------------------------------------------------------------------------

    def prepare(
        self,
        table: Table,
        pieces: Sequence[Slice],
        projection: Projection,
        columns_of_version: Callable[[], pa.Schema] | None = None,
    ) -> Prepared:
        """Implements `TableScan.prepare`: reads all bytes that the task needs. Decoding them makes no call to the store.

        Raises SourceChangedError if a file was replaced or removed, SchemaError if a file does not fit the projection.
        """
        self._known_files.begin_read()
        return self._prepare(table, pieces, projection, columns_of_version, merges=True)

    def _prepare(
        self,
        table: Table,
        pieces: Sequence[Slice],
        projection: Projection,
        columns_of_version: Callable[[], pa.Schema] | None = None,
        merges: bool = False,
    ) -> Prepared:
        selected, indexes = self._prune_files(table, pieces, projection), dict[int, MergedIndex]()
        if merges:
            selected, indexes = self._select_merged(table, pieces, selected, projection)
        remaining = list(selected)  # each object is made once
        opened = self._open(table, remaining, projection, indexes)
        first_file = pieces[0].file if not opened and isinstance(pieces, WholeFiles) and len(pieces) else None
        self._check_schema(opened, projection, columns_of_version, first_file)
        deleted = self._deleted.read_positions(table.url, [piece.file for piece in remaining])
        for file in opened:
            file.deleted = deleted.get(file.piece.file.url)
            inside = [unit for unit in file.index.units if file.piece.start <= unit.middle < file.piece.end]
            file.units = [unit for unit in inside if self._may_match(file, unit, projection)]
            file.units = [unit for unit in file.units if self._known_files.may_have(file, unit, projection)]
            self._metrics.inc("rowGroupsPrunedCount", len(inside) - len(file.units))
            if file.units and file.piece.file.equality:
                file.add_equality_columns()
        self._load(opened, projection)
        for file in opened:
            self._known_files.learn(file, projection)
            # The values of a small file may rule it out although its bounds do not.
            units = [unit for unit in file.units if self._known_files.may_have(file, unit, projection)]
            self._metrics.inc("rowGroupsPrunedCount", len(file.units) - len(units))
            file.units = units
            if file.units:
                file.deleted_values = [
                    values
                    for group in file.piece.file.equality
                    for values in self._equality_indexes(table).values_of(group)
                ]
        return Prepared(opened, projection, self._metrics)

    def _select_merged(
        self, table: Table, pieces: Sequence[Slice], remaining: Sequence[Slice], projection: Projection
    ) -> tuple[Sequence[Slice], dict[int, MergedIndex]]:
        """(`remaining` without the small files that have none of the values that the predicate lists, the indexes of the other small files by
        their places).

        The rows of these files are in memory. Nothing is known of files that are not small, or that could not be merged, so these remain.
        `pieces`: of all files of the version.
        """
        partitions = projection.partitions.names
        conditions = [among for among in value_conditions(projection.predicate) if among.column not in partitions]
        disk = self._blocks.disk
        if disk is None or not conditions or len(remaining) < self._merged_from or not self.splittable(table):
            return remaining, {}
        sizes = file_sizes(remaining.files if isinstance(remaining, WholeFiles) else [p.file for p in remaining])
        is_small = sizes <= _MERGED_BYTES
        if np.count_nonzero(is_small) < self._merged_from:
            return remaining, {}
        names = _state_names(remaining)
        small = np.flatnonzero(is_small & as_bools(names.is_valid()))
        if len(small) < self._merged_from:
            return remaining, {}
        if self._small_files is None:
            key, reader = key_of(self._blocks.scope, table.url), self._without_keeping()
            open_files = functools.partial(reader._open_whole, table)
            self._small_files = SmallFiles(disk, key, open_files, self._metrics, self._merged_from, self._blocks.wait_s)
        parts = self._small_files.find(
            names.take(as_indices(small)),
            lambda: _state_names(pieces),
            lambda places: [remaining[place].file for place in small[places].tolist()],
        )
        remains = np.ones(len(remaining), np.bool_)
        by_place: dict[int, tuple[MergedFiles, int]] = {}
        for part in parts:
            places, numbers = part.find(names)
            if len(places):
                has_values = self._have_values(table, part, remaining[int(places[0])], conditions, projection)[numbers]
                remains[places] = has_values
                pairs = zip(places[has_values].tolist(), numbers[has_values].tolist(), strict=True)
                by_place |= {place: (part, number) for place, number in pairs}
        chosen = np.flatnonzero(remains).tolist()
        self._metrics.inc("rowGroupsPrunedCount", len(remaining) - len(chosen))
        slices = [remaining[place] for place in chosen]
        located = ((number, by_place.get(place)) for number, place in enumerate(chosen))
        return slices, {n: MergedIndex(at[0], slices[n].file.size, at[1]) for n, at in located if at is not None}

    def _have_values(
        self, table: Table, part: MergedFiles, piece: Slice, conditions: Sequence[Among], projection: Projection
    ) -> Numbers:
        """For each file of a part, whether it has a row for which the conditions are true. `piece`: one of the files."""
        (file,) = self._open(table, [piece], projection, {0: MergedIndex(part, piece.file.size)})
        tested = [among for among in conditions if among.column in file.names]
        if not tested:  # all files lack the columns
            return np.ones(len(part.ends), np.bool_)
        predicate = tested[0] if len(tested) == 1 else And(tuple(tested))
        columns = sorted({among.column for among in tested})
        batches = decode(file, file.index.units[0], columns, projection)
        masks = [as_bools(evaluate_mask(predicate, batch).fill_null(False)) for batch in batches]
        rows = np.flatnonzero(np.concatenate([np.zeros(0, np.bool_), *masks]))
        has_values = np.zeros(len(part.ends), np.bool_)
        has_values[np.searchsorted(part.ends, rows, "right")] = True
        return has_values

    def _open_whole(self, table: Table, files: Sequence[FileVersion]) -> list[OpenFile]:
        """Files with all their bytes in memory."""
        opened = self._open(table, to_slices(files), None)
        for file in opened:
            file.names = {name: name for name in file.index.schema.names}
            file.units = [*file.index.units]
        self._fetch(opened, None)
        return opened

    def _prune_files(self, table: Table, pieces: Sequence[Slice], projection: Projection) -> Sequence[Slice]:
        if isinstance(pieces, WholeFiles):
            open_files = self._footer_opener(table, projection)
            remaining_files = (
                prune_files(table, pieces.files, projection)
                if open_files is None
                else prune_by_footers(table, pieces.files, projection, open_files)
            )
            self._metrics.inc("filesPrunedCount", len(pieces) - len(remaining_files))
            return to_slices(remaining_files)
        described = any(piece.file.statistics is not None and piece.file.statistics.bounds for piece in pieces)
        if projection.predicate is None or not (projection.partitions.names or described):
            return list(pieces)
        remaining = []
        for piece in pieces:
            values = _partition_values(table, piece.file, projection.partitions)
            bounds: Mapping[str, ColumnStats] = {} if piece.file.statistics is None else piece.file.statistics.bounds
            constants = {name: ColumnStats.from_constant(value) for name, value in values.items()}
            if may_match(projection.predicate, ChainMap(constants, bounds).get):  # type: ignore[arg-type]
                remaining.append(piece)
        self._metrics.inc("filesPrunedCount", len(pieces) - len(remaining))
        return remaining

    def _footer_opener(self, table: Table, projection: Projection | None) -> OpenFiles | None:
        """A function that opens files by reading their footers; None for a format whose files have to be read as a whole."""
        return (lambda files: self._open(table, to_slices(files), projection)) if self.splittable(table) else None

    def _open(
        self,
        table: Table,
        pieces: Sequence[Slice],
        projection: Projection | None,
        indexes: Mapping[int, FileIndex] = MappingProxyType({}),
    ) -> list[OpenFile]:
        """The files of `pieces`, with their indexes. Reads all indexes that are not known at the same time. `indexes`: those of some pieces.

        This takes one round of requests, unless the footer of a file is longer than the tail that is read first.
        """
        assert table.format is not None
        declared = _declared_schema(table, pieces)
        forms = {
            name: open_format(name or table.format, self._block_size, table.csv, declared)
            for name in {piece.file.format for piece in pieces}
        }
        columns = projection.data if projection else None
        planned = columns or pa.schema([])
        partitions = projection.partitions if projection else pa.schema([])

        def make_file(
            piece: Slice, index: FileIndex, head: dict[Range, Data], read_from: tuple[Range, ...]
        ) -> OpenFile:
            values = _partition_values(table, piece.file, partitions)
            names = find_names(piece.file, index, planned, declared)
            reopen = functools.partial(self._open_anew, forms[piece.file.format], columns)
            return OpenFile(piece, self._blocks, index, head, {}, names, values, reopen, read_from=read_from)

        files: list[OpenFile | None] = []
        for number, piece in enumerate(pieces):
            known = (indexes[number], ()) if number in indexes else self._known_files.index(piece.file)
            files.append(None if known is None else make_file(piece, known[0], {}, known[1]))
        new = [number for number, file in enumerate(files) if file is None]
        locations = {n: self._blocks.get_blocks_and_locations(pieces[n].file.url, pieces[n].file) for n in new}
        data: dict[int, dict[Range, Data]] = {number: {} for number in new}
        requested = {n: forms[pieces[n].file.format].first_ranges(pieces[n].file) for n in new}
        while requested:
            answers = self._blocks.read([(locations[number], ranges) for number, ranges in requested.items()])
            following: dict[int, list[Range]] = {}
            for (number, ranges), parts in zip(requested.items(), answers, strict=True):
                data[number].update(zip(ranges, parts, strict=True))
                piece = pieces[number]
                form = forms[piece.file.format]
                try:
                    result = form.open_index(piece.file, data[number], columns)
                except DamagedFileError:  # the bytes may have been damaged in transfer
                    result, data[number] = self._open_anew(form, columns, piece.file, locations[number])
                if isinstance(result, list):
                    following[number] = result
                    continue
                self._known_files.keep(piece.file, result, data[number])
                files[number] = make_file(piece, result, data[number], ())
            requested = following
        return [file for file in files if file is not None]

    def _open_anew(
        self, form: FileFormat, planned: pa.Schema | None, file: FileVersion, location: BlocksAndLocations
    ) -> tuple[FileIndex, dict[Range, Data]]:
        """(a file's index, the ranges from which it was read), from the store instead of the cache. Raises DamagedFileError or UfsError."""
        self._known_files.forget(file)
        data: dict[Range, Data] = {}
        requested = form.first_ranges(file)
        while True:
            data.update(zip(requested, self._blocks.read_anew(location, requested), strict=True))
            result = form.open_index(file, data, planned)
            if not isinstance(result, list):
                self._blocks.count_damaged()
                self._known_files.keep(file, result, data)
                return result, data
            requested = result

    def _check_schema(
        self,
        opened: list[OpenFile],
        projection: Projection,
        columns_of_version: Callable[[], pa.Schema] | None,
        pruned_file: FileVersion | None,
    ) -> None:
        """Raise SchemaError if a file does not fit the projection, or no file of the version has a planned column.

        `pruned_file`: if no file was opened because the statistics of all of them rule out matching rows, one of these files.
        """
        needed_names = _scanned_columns(projection)
        for file in opened:
            for name in needed_names & file.names.keys():
                field = projection.data.field(name)
                stored_type = type_as_planned(file.piece.file, file.index, name, file.names[name], field.type)
                misfit = file.index.misfits.get(file.names[name])
                check_readable(field, stored_type, file.piece.file.url, projection.declared, misfit)
        missing_names = sorted(name for name in needed_names if not any(name in file.names for file in opened))
        some_file = opened[0].piece.file if opened else pruned_file
        if projection.declared or not missing_names or some_file is None or columns_of_version is None:
            return  # as in Spark, a declared column that no file has is null
        # Other files of the version, which this task does not read, may have the column.
        elsewhere = {name.lower() for name in columns_of_version().names}
        missing_names = [name for name in missing_names if name.lower() not in elsewhere]
        if missing_names:
            raise SchemaError(
                f"no file of {redact('path', some_file.url.rsplit('/', 1)[0])} has column {missing_names[0]!r} any more: the table "
                f"changed; {PLAN_AGAIN}"
            )

    def _may_match(self, file: OpenFile, unit: Unit, projection: Projection) -> bool:
        if projection.predicate is None:
            return True
        return may_match(projection.predicate, functools.partial(file.stats, unit, projection))

    def _load(self, opened: list[OpenFile], projection: Projection) -> None:
        """Read the bytes of all units into memory; if it pays to decode the predicate's columns first, only of units with matching rows."""
        if projection.predicate is not None:
            self._drop_units(opened, projection, referenced_columns(projection.predicate))
        self._fetch(opened, _scanned_columns(projection), with_equality=True)

    def _drop_units(self, opened: list[OpenFile], projection: Projection, tested: frozenset[str]) -> None:
        """Drop the units without matching rows, if it pays to read and decode the predicate's columns (`tested`) first."""
        units = sum(len(file.units) for file in opened)
        deferred_bytes = sum(
            length
            for file in opened
            for unit in file.units
            for _, length in set(file.index.ranges(unit, file.spell(_scanned_columns(projection))))
            - set(file.index.ranges(unit, file.spell(tested)))
        )
        if tested and units <= _TWO_PHASE_UNITS and deferred_bytes > _TWO_PHASE_BYTES:
            self._fetch(opened, tested)
            for file in opened:
                matching = []
                for unit in file.units:
                    batches = decode(file, unit, sorted(tested), projection)
                    if any(evaluate_mask(projection.predicate, batch).true_count for batch in batches):
                        matching.append(unit)
                file.units = matching

    def _fetch(self, opened: list[OpenFile], columns: frozenset[str] | None, with_equality: bool = False) -> None:
        """Read the bytes of some columns, or of all that the files have."""
        requests = []
        for file in opened:
            needed = file.names if columns is None else columns
            names = file.spell([*needed, *file.equality_fields] if with_equality else needed)
            ranges = [part for unit in file.units for part in file.index.ranges(unit, names)]
            missing = dict.fromkeys(to_read(part, file) for part in ranges if is_missing(part, file))
            if missing:
                requests.append((file, list(missing)))
        answers = self._blocks.read([(file.location, ranges) for file, ranges in requests])
        for (file, ranges), parts in zip(requests, answers, strict=True):
            for part, data in zip(ranges, parts, strict=True):
                (file.head if part in file.read_from else file.data)[part] = data


class Prepared:
    """A task of a `Scan` whose bytes are all in memory."""

    def __init__(self, opened: list[OpenFile], projection: Projection, metrics: CacheMetricGroup) -> None:
        self._opened = opened
        self._projection = projection
        self._metrics = metrics

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The matching rows that are not deleted, in file order, in batches of about 65,536 rows, with exactly the projection's schema."""
        yield from coalesce(self._filter(), self._projection.columns, self._metrics)

    def units(self) -> Iterator[PreparedUnit]:
        """The units in file order, with all their rows, also deleted rows and rows that do not match. Threads may decode several units at once."""
        for file in self._opened:
            size = file.piece.file.size // max(len(file.index.units), 1)  # a file may have no units
            for unit in file.units:
                self._metrics.inc("rowGroupsReadCount")
                batches = decode(file, unit, self._projection.columns.names, self._projection)
                rows = file.index.rows(unit)
                if rows is None and len(file.index.units) > 1:
                    decoded = list(batches)
                    rows, batches = sum(batch.num_rows for batch in decoded), iter(decoded)
                yield PreparedUnit(file.piece.file, unit.middle, size, rows, batches)

    def place(self) -> Iterator[tuple[FileVersion, Numbers, pa.RecordBatch]]:
        """For each batch of rows that are not deleted: (file, positions of the rows in the file, the rows).

        Units that can have no matching rows are left out, but the rows of all other units are returned, whether they match or not.
        """
        for file, unit, batches in self._decode(self._projection.columns.names):
            first = file.first_row(unit)
            for batch in batches:
                rows, places = drop_deleted(file.deleted, first, batch)
                first += batch.num_rows
                live = _live_by_value(file, rows)
                if live is not None:
                    rows, places = rows.filter(pa.array(live)), places[live]
                yield file.piece.file, places, rows.select(self._projection.columns.names)

    def _filter(self) -> Iterator[pa.RecordBatch]:
        for file, unit, batches in self._decode(self._projection.needed_columns):
            self._metrics.inc("rowGroupsReadCount")
            first = 0 if file.deleted is None else file.first_row(unit)
            for batch in batches:
                rows = batch if file.deleted is None else drop_deleted(file.deleted, first, batch)[0]
                first += batch.num_rows
                matches = matching_rows(rows, self._projection.predicate)
                live = None if matches is None else _live_by_value(file, matches)
                if matches is not None and live is not None:
                    matches = matches.filter(pa.array(live))
                if matches is not None and matches.num_rows:
                    yield matches.select(self._projection.columns.names)

    def _decode(self, names: Sequence[str]) -> Iterator[tuple[OpenFile, Unit, Iterator[pa.RecordBatch]]]:
        for file in self._opened:
            for unit in file.units:
                yield file, unit, decode(file, unit, [*names, *file.equality_fields], self._projection)
            file.data.clear()


def _live_by_value(file: OpenFile, batch: pa.RecordBatch) -> Numbers | None:
    """A mask of a batch of a file's rows: True for rows that no equality delete deletes; None if none is deleted by one."""
    if not file.equality_names or not batch.num_rows:
        return None
    live = np.ones(batch.num_rows, np.bool_)
    for names, values in zip(file.equality_names, file.deleted_values, strict=True):
        live &= values.highest([batch.column(name) for name in names]) <= file.piece.file.sequence
    return None if live.all() else live


def _state_names(pieces: Sequence[Slice]) -> pa.Array:
    """For each piece that is a whole immutable file its `FileVersion.state_name`; null for others."""
    if isinstance(pieces, WholeFiles):
        return pieces.files.state_names
    return pa.array([piece.file.state_name if piece.whole else None for piece in pieces], pa.string())


def _scanned_columns(projection: Projection) -> frozenset[str]:
    """The columns that the scan returns or its predicate tests, without partition columns."""
    return frozenset(projection.needed_columns) - frozenset(projection.partitions.names)


def _declared_schema(table: Table, pieces: Sequence[Slice]) -> pa.Schema | None:
    """The columns that the user declares for a table's files, without those in directories; None if none are declared."""
    if table.declared is None:
        return None
    in_directories = {name for piece in pieces[:1] for name, _ in raw_partition_values(table, piece.file)}
    return pa.schema([field for field in table.declared if field.name not in in_directories])


def _infer_together(opened: Sequence[OpenFile]) -> Iterator[tuple[OpenFile, pa.Schema]]:
    """Pairs (file, its schema). A column of CSV or JSON files has one type in all of them, inferred from its values in all files together."""
    inferred_by_name: dict[str, Inferred] = {}
    for file in opened:
        for name, inferred in (file.index.inferred or {}).items():
            folded = name.lower()
            inferred_by_name[folded] = (
                join_inferred(inferred_by_name[folded], inferred) if folded in inferred_by_name else inferred
            )
    types = {folded: inferred.type() for folded, inferred in inferred_by_name.items()}
    for file in opened:
        schema = file.index.schema
        if file.index.inferred is not None:
            schema = lenient_schema(
                pa.schema([f.with_type(types[f.name.lower()]) for f in schema]), file.piece.file.url
            )
        yield file, schema


def _described_bounds(
    table: Table, file: FileVersion, partitions: pa.Schema, names: Sequence[str]
) -> list[ColumnStats | None] | None:
    """The statistics of a file's columns that the table's metadata has, in the order of `names`; None if it lacks those of a column."""
    values = _partition_values(table, file, partitions)
    bounds: Mapping[str, ColumnStats] = {} if file.statistics is None else file.statistics.bounds
    stats = [ColumnStats.from_constant(values[name]) if name in values else bounds.get(name) for name in names]
    if file.identity == DELETE_FILE and file.columns is not None:
        in_file = {column.name for column in file.columns}
        is_known = all(one is not None or name not in in_file for name, one in zip(names, stats, strict=True))
    else:
        is_known = None not in stats
    return stats if is_known else None


def _partition_values(table: Table, file: FileVersion, fields: pa.Schema) -> dict[str, object]:
    # A delete file belongs to no partition, or to several.
    return typed_partition_values(table, file, fields) if fields.names and file.identity != DELETE_FILE else {}
