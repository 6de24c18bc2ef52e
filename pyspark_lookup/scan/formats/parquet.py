"""Parquet: blocks are the tail with the footer, and column chunks."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pyspark_lookup.base.errors import PysparkLookupError
from pyspark_lookup.columnar.predicate import ColumnStats
from pyspark_lookup.columnar.types import spark_schema
from pyspark_lookup.io.stores import FileVersion, Range
from pyspark_lookup.scan.formats.inference import Inferred
from pyspark_lookup.scan.formats.model import (
    BATCH_ROWS,
    Data,
    FileIndex,
    RangesFile,
    Unit,
    damaged,
    inside,
    no_fetch,
    tail_range,
)
from pyspark_lookup.scan.formats.spark_types import spark_fields


class ParquetFormat:
    """Blocks: the tail with the footer, and column chunks."""

    splittable = True

    def first_ranges(self, file: FileVersion) -> list[Range]:
        return [tail_range(file)]

    def open_index(
        self, file: FileVersion, data: Mapping[Range, Data], planned: pa.Schema | None
    ) -> FileIndex | list[Range]:
        tail = data[tail_range(file)]
        if len(tail) < 12 or bytes(tail[-4:]) != b"PAR1":
            raise damaged(file, "parquet", "it does not end with PAR1")
        (footer,) = struct.unpack("<I", tail[-8:-4])
        if footer + 12 > file.size:
            raise damaged(file, "parquet", f"a footer of {footer} bytes does not fit")
        whole = (file.size - footer - 8, footer + 8)
        if footer + 8 > len(tail) and whole not in data:
            return [whole]
        try:
            metadata = pq.read_metadata(pa.PythonFile(RangesFile(file.size, data, no_fetch), mode="r"))
            return ParquetIndex(file, metadata)
        except (pa.ArrowException, OSError, ValueError) as problem:  # ValueError: a name that is no UTF-8
            if isinstance(problem, PysparkLookupError):
                raise
            raise damaged(file, "parquet", problem) from problem


class ParquetIndex:
    """A parquet footer."""

    def __init__(self, file: FileVersion, metadata: pq.FileMetaData) -> None:
        self.inferred: Mapping[str, Inferred] | None = None
        self.misfits: Mapping[str, str] = {}
        self._file = file
        self._metadata = metadata
        arrow = metadata.schema.to_arrow_schema()
        self._leaves: dict[str, range] = {}
        first, fields = 0, []
        for field in arrow:
            leaves = range(first, first + _leaf_count(field.type))
            int96 = [metadata.schema.column(leaf).physical_type == "INT96" for leaf in leaves]
            fields.append(pa.field(field.name, _with_instants(field.type, iter(int96))))
            self._leaves[field.name] = leaves
            first = leaves.stop
        fields = spark_fields(fields, metadata.metadata, file.url)
        self.schema = spark_schema(pa.schema(fields), file.url)
        flat = [not pa.types.is_nested(field.type) for field in self.schema]
        self._flat = {
            field.name for field, is_flat in zip(fields, flat, strict=True) if is_flat and _bounded(field.type)
        }
        self._stats: dict[tuple[int, str], ColumnStats | None] = {}
        self.units = [Unit(number, self._middle(number)) for number in range(metadata.num_row_groups)]

    def _middle(self, number: int) -> int:
        group = self._metadata.row_group(number)
        spans = inside(self._file, "parquet", [_chunk_range(group.column(leaf)) for leaf in range(group.num_columns)])
        if not spans:
            return 0
        return (min(offset for offset, _ in spans) + max(offset + length for offset, length in spans)) // 2

    def stats(self, unit: Unit, column: str) -> ColumnStats | None:
        if column not in self._flat:
            return None
        key = (unit.number, column)
        if key not in self._stats:
            self._stats[key] = self._read_stats(unit, column)
        return self._stats[key]

    def _read_stats(self, unit: Unit, column: str) -> ColumnStats | None:
        group = self._metadata.row_group(unit.number)
        chunk = group.column(self._leaves[column].start)
        found = chunk.statistics
        if found is None or chunk.physical_type == "INT96":
            return None
        low = high = None
        if found.has_min_max:
            # A date or time beyond Python's years, or a text cut inside a character, bounds nothing here.
            with contextlib.suppress(OverflowError, ValueError):
                low, high = _comparable(found.min), _comparable(found.max)
            if isinstance(low, bytes) and not pa.types.is_binary(self.schema.field(column).type):
                low = high = None  # half floats and JSON texts, as they are stored
        return ColumnStats(low, high, found.null_count if found.has_null_count else None, group.num_rows)

    def ranges(self, unit: Unit, columns: Sequence[str]) -> list[Range]:
        group = self._metadata.row_group(unit.number)
        return [_chunk_range(group.column(leaf)) for name in columns for leaf in self._leaves[name]]

    def rows(self, unit: Unit) -> int:
        return int(self._metadata.row_group(unit.number).num_rows)

    def batches(self, unit: Unit, columns: Sequence[str], source: RangesFile) -> Iterator[pa.RecordBatch]:
        try:
            file = pq.ParquetFile(
                pa.PythonFile(source, mode="r"),
                metadata=self._metadata,
                coerce_int96_timestamp_unit="us",
                pre_buffer=False,
                # Those of managed tables have checksums; what others write there is not always right.
                page_checksum_verification=self._file.immutable,
            )
            # By number: a name with a dot is also the path of a struct's field.
            leaves = [leaf for name in columns for leaf in self._leaves[name]]
            yield from file.reader.iter_batches(
                BATCH_ROWS, row_groups=[unit.number], column_indices=leaves, use_threads=False
            )
        except (pa.ArrowException, OSError) as problem:
            if isinstance(problem, PysparkLookupError):
                raise
            raise damaged(self._file, "parquet", problem) from problem


def _chunk_range(chunk: pq.ColumnChunkMetaData) -> Range:
    start = chunk.data_page_offset
    if chunk.dictionary_page_offset:  # some writers give 0 for none
        start = min(start, chunk.dictionary_page_offset)
    return start, chunk.total_compressed_size


def _leaf_count(kind: pa.DataType) -> int:
    """Parquet columns behind an Arrow column."""
    if isinstance(kind, pa.BaseExtensionType):
        return _leaf_count(kind.storage_type)
    if pa.types.is_struct(kind):
        return sum(_leaf_count(field.type) for field in kind)
    if pa.types.is_map(kind):
        return _leaf_count(kind.key_type) + _leaf_count(kind.item_type)
    if pa.types.is_nested(kind):
        return _leaf_count(kind.value_type)
    return 1


def _with_instants(kind: pa.DataType, int96: Iterator[bool]) -> pa.DataType:
    """`kind` with INT96 timestamps as instants in UTC, which is what Spark and Hive mean by them."""
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _with_instants(field.type, int96)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_with_instants(kind.key_type, int96), _with_instants(kind.item_type, int96))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(_with_instants(kind.value_type, int96))
    return pa.timestamp("us", "UTC") if next(int96) else kind


def _bounded(kind: pa.DataType) -> bool:
    """Whether parquet bounds of this type compare as its values do (nanoseconds lose digits, durations are numbers)."""
    if pa.types.is_dictionary(kind):
        return _bounded(kind.value_type)
    if pa.types.is_timestamp(kind):
        return kind.unit in ("ms", "us", "s")
    return not pa.types.is_duration(kind)


def _comparable(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str, bytes, decimal.Decimal, datetime.datetime)):
        return value
    return value if type(value) is datetime.date else None
