"""Rows of a `TableVersion` as Arrow batches: prune, read through the block cache, filter.

`Scan.prepare` does all I/O of a task before its first batch. So if a version vanishes meanwhile, that is noticed before any row was
returned. The prepared task only decodes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import pyarrow as pa

from pyspark_lookup.columnar.keys import Numbers
from pyspark_lookup.columnar.predicate import ColumnStats, Predicate, join_stats, may_match, referenced_columns
from pyspark_lookup.columnar.types import check_readable, lenient_schema, merge_schemas, widens
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.errors import DamagedFileError, SchemaError
from pyspark_lookup.scan.contract import PreparedUnit, TableScan, coalesce, evaluate_mask, matching_rows, to_slices
from pyspark_lookup.scan.deletes import DeletedRows, DeletedValues, EqualityDeleted, drop_deleted, merge_positions
from pyspark_lookup.scan.formats import Data, FileFormat, FileIndex, Inferred, Unit, join_inferred, open_format
from pyspark_lookup.scan.open_file import KnownFiles, OpenFile, Projection, Slice, decode, is_missing, to_read
from pyspark_lookup.scan.stored_columns import find_names, may_lack, missing_value, stats_as_planned, type_as_planned
from pyspark_lookup.storage.block_cache import BlockCache, BlocksAndLocations
from pyspark_lookup.storage.stores import DELETE_FILE, Deletes, EqualityColumns, FileVersion, Range
from pyspark_lookup.versions.model import Table, partition_fields, raw_partition_values, typed_partition_values

# A scan of up to this many units decodes its predicate's columns first, and fetches the others only where rows match. With more
# units, a second round of requests costs more than it saves.
_TWO_PHASE_UNITS = 8
_TWO_PHASE_BYTES = 256 * 1024
_READS_KEPT = 200  # after this many reads without a use of a file, its index is cheaper to read again than to keep


class Scan(TableScan):
    """Reads of one table through one block cache. `rereads`: most of the next reads are of the same files."""

    def __init__(self, blocks: BlockCache, metrics: CacheMetricGroup, block_size: int, rereads: bool = True) -> None:
        self._blocks = blocks
        self._metrics = metrics
        self._block_size = block_size
        self._deleted = DeletedRows(blocks)
        self._reads_kept = _READS_KEPT if rereads else 1  # parts of one large file are read one after the other
        self._known_files = KnownFiles(self._reads_kept)
        self._by_value: EqualityDeleted | None = None

    def forget_files(self) -> None:
        self._known_files = KnownFiles(self._reads_kept)

    def splittable(self, table: Table) -> bool:
        assert table.format is not None
        return open_format(table.format, self._block_size).splittable  # whatever its columns

    # --- schema -----------------------------------------------------------------------------------

    def schema(self, table: Table, files: Sequence[FileVersion]) -> tuple[pa.Schema, pa.Schema]:
        """Implements `TableScan.schema`.

        Reads the part of each file that shows its schema (a footer; all of a CSV or JSON file), through the cache; nothing if the columns
        are declared. A column that is in both counts as the directory's. Raises SchemaError naming both files if they disagree.
        """
        partitions = partition_fields(table, files)
        folded = {name.lower() for name in partitions.names}
        if table.declared is not None:
            partitions = pa.schema([field for field in partitions if field.name in table.declared.names])
            data = table.declared
        else:
            opened = self._open(table, to_slices(files), None)
            data = merge_schemas((file.piece.file.url, schema) for file, schema in _infer_together(opened))
        return pa.schema([field for field in data if field.name.lower() not in folded]), partitions

    def bounds(
        self, table: Table, files: Sequence[FileVersion], partitions: pa.Schema, names: Sequence[str]
    ) -> list[list[ColumnStats | None]]:
        """Implements `TableScan.bounds`. Reads each file's statistics through the cache."""
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
                # Null in every row. But delete files have the key columns of their own time only.
                unknown = file.piece.file.identity == DELETE_FILE or may_lack(file.piece.file, name)
                row.append(None if unknown else ColumnStats.from_constant(None))
            else:
                source, stored = (file.piece.file, file.index), spelled[name]
                row.append(join_stats([stats_as_planned(*source, unit, stored, None) for unit in file.index.units]))
        return row

    def unit_bounds(
        self, table: Table, files: Sequence[FileVersion], projection: Projection
    ) -> list[tuple[ColumnStats | None, int]]:
        """(bounds of the projection's only column, bytes) of each unit that may have rows of the projection."""
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
        """Implements `TableScan.rows`. Reads footers through the cache, if needed."""
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
        return merge_positions(
            self._deleted.read_positions(table.url, files), self._equality_deleted(table).read_positions(files)
        )

    def deleted_values(
        self, table: Table, deletes: Sequence[Deletes]
    ) -> Iterable[tuple[EqualityColumns, DeletedValues]]:
        """Implements `TableScan.deleted_values`. Reads delete files through the cache."""
        return self._equality_deleted(table).values(deletes)

    def _equality_deleted(self, table: Table) -> EqualityDeleted:
        if self._by_value is None:
            read = functools.partial(self._read_rows, table)
            self._by_value = EqualityDeleted(read, functools.partial(self._place_rows, table))
        return self._by_value

    def _read_rows(self, table: Table, file: FileVersion, schema: pa.Schema) -> pa.Table:
        prepared = self._prepare(table, to_slices([file]), Projection(schema, schema, pa.schema([])))
        return pa.Table.from_batches(list(prepared.batches()), schema)

    def _place_rows(
        self, table: Table, file: FileVersion, schema: pa.Schema, predicate: Predicate | None
    ) -> Iterator[tuple[Numbers, pa.RecordBatch]]:
        prepared = self._prepare(table, to_slices([file]), Projection(schema, schema, pa.schema([]), predicate))
        return ((places, batch) for _, places, batch in prepared.place())

    # --- rows -------------------------------------------------------------------------------------

    def prepare(
        self,
        table: Table,
        pieces: Sequence[Slice],
        projection: Projection,
        columns_of_version: Callable[[], pa.Schema] | None = None,
    ) -> Prepared:
        """Implements `TableScan.prepare`. No store call follows.

        Raises SourceChangedError if a file is no longer in its version, SchemaError if it does not fit the projection.
        """
        self._known_files.begin_read()
        return self._prepare(table, pieces, projection, columns_of_version)

    def _prepare(
        self,
        table: Table,
        pieces: Sequence[Slice],
        projection: Projection,
        columns_of_version: Callable[[], pa.Schema] | None = None,
    ) -> Prepared:
        remaining = self._prune_files(table, pieces, projection)
        opened = self._open(table, remaining, projection)
        self._check_schema(opened, projection, columns_of_version)
        deleted = self.read_deleted(table, [piece.file for piece in remaining])
        for file in opened:
            file.deleted = deleted.get(file.piece.file.url)
            inside = [unit for unit in file.index.units if file.piece.start <= unit.middle < file.piece.end]
            file.units = [unit for unit in inside if self._may_match(file, unit, projection)]
            file.units = [unit for unit in file.units if self._known_files.may_have(file, unit, projection)]
            self._metrics.inc("rowGroupsPrunedCount", len(inside) - len(file.units))
        self._load(opened, projection)
        for file in opened:
            self._known_files.learn(file, projection)
        return Prepared(opened, projection, self._metrics)

    def _prune_files(self, table: Table, pieces: Sequence[Slice], projection: Projection) -> list[Slice]:
        described = any(piece.file.statistics is not None and piece.file.statistics.bounds for piece in pieces)
        if projection.predicate is None or not (projection.partitions.names or described):
            return list(pieces)
        remaining = []
        for piece in pieces:
            values = _partition_values(table, piece.file, projection.partitions)
            bounds = {} if piece.file.statistics is None else piece.file.statistics.bounds
            if may_match(
                projection.predicate, {**bounds, **{n: ColumnStats.from_constant(v) for n, v in values.items()}}.get
            ):
                remaining.append(piece)
        self._metrics.inc("filesPrunedCount", len(pieces) - len(remaining))
        return remaining

    def _open(self, table: Table, pieces: Sequence[Slice], projection: Projection | None) -> list[OpenFile]:
        """Open every file's index, all files at once: one round of requests if a tail suffices."""
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
        for piece in pieces:
            cached_index = self._known_files.index(piece.file)
            files.append(None if cached_index is None else make_file(piece, cached_index[0], {}, cached_index[1]))
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
        """A file's index and the ranges from which it was read, read from the store and not from the cache. Raises DamagedFileError or UfsError."""
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
    ) -> None:
        needed_names = _scanned_columns(projection)
        for file in opened:
            for name in needed_names & file.names.keys():
                field = projection.data.field(name)
                stored_type = type_as_planned(file.piece.file, file.index, name, file.names[name], field.type)
                misfit = file.index.misfits.get(file.names[name])
                check_readable(field, stored_type, file.piece.file.url, projection.declared, misfit)
        missing_names = sorted(name for name in needed_names if not any(name in file.names for file in opened))
        if projection.declared or not missing_names or not opened or columns_of_version is None:
            return  # as in Spark, a declared column that no file has is null
        # Files that are not read here may have the column.
        elsewhere = {name.lower() for name in columns_of_version().names}
        missing_names = [name for name in missing_names if name.lower() not in elsewhere]
        if missing_names:
            raise SchemaError(
                f"no file of {opened[0].piece.file.url.rsplit('/', 1)[0]} has column {missing_names[0]!r} any more: the table "
                "changed; plan again (a new load() or SQL statement; a catalog table must be created again)"
            )

    def _may_match(self, file: OpenFile, unit: Unit, projection: Projection) -> bool:
        if projection.predicate is None:
            return True

        def stats(name: str) -> ColumnStats | None:
            if name in file.partition:
                return ColumnStats.from_constant(file.partition[name])
            if name not in file.names:
                return ColumnStats.from_constant(missing_value(file.piece.file, name, projection.data.field(name).type))
            planned = projection.data.field(name).type
            if not widens(type_as_planned(file.piece.file, file.index, name, file.names[name], planned), planned):
                return None  # its type is not the requested one
            return stats_as_planned(file.piece.file, file.index, unit, file.names[name], planned)

        return may_match(projection.predicate, stats)

    def _load(self, opened: list[OpenFile], projection: Projection) -> None:
        """Read the bytes of all units into memory; if that saves work, only those of units with matching rows."""
        tested = referenced_columns(projection.predicate)
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
        self._fetch(opened, _scanned_columns(projection))

    def _fetch(self, opened: list[OpenFile], columns: frozenset[str]) -> None:
        requests = []
        for file in opened:
            ranges = [part for unit in file.units for part in file.index.ranges(unit, file.spell(columns))]
            missing = dict.fromkeys(to_read(part, file) for part in ranges if is_missing(part, file))
            if missing:
                requests.append((file, list(missing)))
        answers = self._blocks.read([(file.location, ranges) for file, ranges in requests])
        for (file, ranges), parts in zip(requests, answers, strict=True):
            for part, data in zip(ranges, parts, strict=True):
                (file.head if part in file.read_from else file.data)[part] = data


class Prepared:
    """A task whose bytes are in memory."""

    def __init__(self, opened: list[OpenFile], projection: Projection, metrics: CacheMetricGroup) -> None:
        self._opened = opened
        self._projection = projection
        self._metrics = metrics

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, in file order, in batches of about 64k, with exactly the projection's schema."""
        yield from coalesce(self._filter(), self._projection.columns, self._metrics)

    def units(self) -> Iterator[PreparedUnit]:
        """Every unit in file order, whatever the predicate, with the deleted rows. Threads may decode several at once."""
        for file in self._opened:
            size = file.piece.file.size // max(len(file.index.units), 1)  # a slice may contain the middle of no unit
            for unit in file.units:
                self._metrics.inc("rowGroupsReadCount")
                batches = decode(file, unit, self._projection.columns.names, self._projection)
                rows = file.index.rows(unit)
                if rows is None and len(file.index.units) > 1:
                    decoded = list(batches)
                    rows, batches = sum(batch.num_rows for batch in decoded), iter(decoded)
                yield PreparedUnit(file.piece.file, unit.middle, size, rows, batches)

    def place(self) -> Iterator[tuple[FileVersion, Numbers, pa.RecordBatch]]:
        """(file, positions in it, the live rows there) of all units that may have rows for which the predicate is true."""
        for file, unit, batches in self._decode(self._projection.columns.names):
            first = file.first_row(unit)
            for batch in batches:
                rows, places = drop_deleted(file.deleted, first, batch)
                first += batch.num_rows
                yield file.piece.file, places, rows

    def _filter(self) -> Iterator[pa.RecordBatch]:
        for file, unit, batches in self._decode(self._projection.needed_columns):
            self._metrics.inc("rowGroupsReadCount")
            first = 0 if file.deleted is None else file.first_row(unit)
            for batch in batches:
                rows = batch if file.deleted is None else drop_deleted(file.deleted, first, batch)[0]
                first += batch.num_rows
                matches = matching_rows(rows, self._projection.predicate)
                if matches is not None and matches.num_rows:
                    yield matches.select(self._projection.columns.names)

    def _decode(self, names: Sequence[str]) -> Iterator[tuple[OpenFile, Unit, Iterator[pa.RecordBatch]]]:
        for file in self._opened:
            for unit in file.units:
                yield file, unit, decode(file, unit, names, self._projection)
            file.data.clear()


def _scanned_columns(projection: Projection) -> frozenset[str]:
    """Columns of the files that the scan returns or tests."""
    return frozenset(projection.needed_columns) - frozenset(projection.partitions.names)


def _declared_schema(table: Table, pieces: Sequence[Slice]) -> pa.Schema | None:
    """The columns that a table's files are declared to have."""
    if table.declared is None:
        return None
    in_directories = {name for piece in pieces[:1] for name, _ in raw_partition_values(table, piece.file)}
    return pa.schema([field for field in table.declared if field.name not in in_directories])


def _infer_together(opened: Sequence[OpenFile]) -> Iterator[tuple[OpenFile, pa.Schema]]:
    """The schema of each file. Columns of text files have the type of their values in all files."""
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
    """The bounds of a file's columns according to the table's metadata; None if it lacks some."""
    values = _partition_values(table, file, partitions)
    bounds = {} if file.statistics is None else file.statistics.bounds
    stats: dict[str, ColumnStats] = {
        **bounds,
        **{name: ColumnStats.from_constant(value) for name, value in values.items()},
    }
    return [stats[name] for name in names] if all(name in stats for name in names) else None


def _partition_values(table: Table, file: FileVersion, fields: pa.Schema) -> dict[str, object]:
    # Delete files belong to no partition, or to several.
    return typed_partition_values(table, file, fields) if fields.names and file.identity != DELETE_FILE else {}
