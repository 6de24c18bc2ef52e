"""Reads Parquet files. The byte ranges that are read are the tail with the footer, and column chunks."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import decimal
import functools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pyspark_lookup.columnar.calendars import (
    Convert,
    convert_bounds,
    convert_columns,
    gregorian_dates,
    gregorian_instants,
)
from pyspark_lookup.columnar.predicate import ColumnStats
from pyspark_lookup.columnar.types import (
    VARIANT,
    has_variant_parts,
    lenient_schema,
    split_type,
    unreadable,
    with_collations,
    with_parts,
    without_counterpart,
)
from pyspark_lookup.core.memory import free_bytes
from pyspark_lookup.scan.formats.arrow_ipc import narrow_parquet
from pyspark_lookup.scan.formats.model import (
    BATCH_ROWS,
    FileIndex,
    FooterFormat,
    RangesFile,
    Unit,
    inside,
    reading,
    typed_fields,
)
from pyspark_lookup.storage.stores import FileVersion, Range

# Bytes of memory that a decoded footer takes for each of its bytes: measured 670 kB for 63 kB with 300 columns.
_DECODED_FOOTER = 12
# About how many bytes of the decompressed file become one batch: with many columns, a batch has few rows.
_BATCH_BYTES = 16 * 1024 * 1024
_BOUND_BYTES = 256 * 1024 * 1024  # the bytes of memory that a batch may take
_VALUE_BYTES = 8  # the most bytes of a number
_WIDTHS = {"INT32": 4, "FLOAT": 4, "BOOLEAN": 1}
# Lists that take more bytes of memory than this for each byte in the file may be a decompression bomb. Embeddings take about 1, ids up to 8.
_BOMB_SHARE = 16
# If a row group has more columns than the first number, and at most the second number of bytes, it is read as a whole: separate reads of its
# columns would cost more than they save.
_WIDE, _TOGETHER = 256, 4 * 1024 * 1024
_INDEX_BYTES = 24  # bytes that a snapshot's index takes for a row: its key and its position in the file
_INTERVAL_BYTES = 12
# The beginning of a dictionary page's header, up to its two sizes.
_PAGE_HEAD = re.compile(rb"\x15\x04\x15([\x80-\xff]{0,4}[\x00-\x7f])\x15([\x80-\xff]{0,4}[\x00-\x7f])", re.DOTALL)
_PAGE_HEAD_BYTES = 13
# A group in pyarrow's text of a Parquet schema, such as `  optional group field_id=-1 v (Variant(1)) {`.
_GROUP = re.compile(r"(?P<indent> +)\w+ group field_id=-?\d+ (?P<name>.*?)(?: \((?P<type>[A-Z].*)\))? \{", re.DOTALL)
_SPARK = b"org.apache.spark."
_SPARK_SCHEMA = b"org.apache.spark.sql.parquet.row.metadata"  # Spark keeps its own schema in the footer, as JSON


class ParquetFormat(FooterFormat):
    name, magic, frame = "parquet", b"PAR1", 12

    def _index(self, file: FileVersion, source: RangesFile, start: int, length: int) -> FileIndex:
        try:
            return ParquetIndex(file, pq.read_metadata(source.to_arrow()))
        except pa.ArrowNotImplementedError:
            source.seek(start)
            tail, wide = narrow_parquet(bytes(source.read()))
            if not wide:
                raise
            source = source.with_tail(start, tail)
            return ParquetIndex(file, pq.read_metadata(source.to_arrow()), wide)


@dataclasses.dataclass(frozen=True, eq=False)
class _Layout:
    """The columns of Parquet files, as their footers describe them.

    `stored`: the schema in the files. `schema`: the columns in the types that Spark has. `leaves`: for each column, the positions of the Parquet
    columns of which it consists. `flat`: the columns whose statistics can be compared. `converts`: for columns in another calendar, the
    conversion of each of their parts.
    """

    stored: pa.Schema
    schema: pa.Schema
    leaves: Mapping[str, range]
    flat: frozenset[str]
    converts: Mapping[str, list[Convert | None]]

    @classmethod
    def of_footer(cls, metadata: pq.FileMetaData, wide: Mapping[str, str], url: str) -> _Layout:
        """The columns of the file at `url`. `wide`: for each column with integers that are too wide for pyarrow, the name of their type."""
        stored = metadata.schema.to_arrow_schema()
        leaves_by_name: dict[str, range] = {}
        converts_by_name: dict[str, list[Convert | None]] = {}
        calendars = HybridTimes.from_footer(metadata.metadata)
        first, fields = 0, []
        variants = _variants(stored, metadata.schema)
        for field in stored:
            leaves = range(first, first + _leaf_count(field.type))
            columns = [metadata.schema.column(leaf) for leaf in leaves]
            int96 = [column.physical_type == "INT96" for column in columns]
            unsupported = wide.get(field.name)
            if any(column.length == _INTERVAL_BYTES and column.converted_type == "INTERVAL" for column in columns):
                unsupported = "INTERVAL of Parquet"
            kind = _with_instants(field.type, iter(int96))
            if variants:
                kind = _with_variants(kind, iter([column.path for column in columns]), variants)
            fields.append(without_counterpart(pa.field(field.name, kind), unsupported, url))
            leaves_by_name[field.name] = leaves
            first = leaves.stop
            if calendars is not None:
                converts = list(calendars.converts(field.type, iter(int96)))
                if any(converts):
                    converts_by_name[field.name] = converts
        fields = spark_fields(fields, metadata.metadata, url)
        schema = lenient_schema(pa.schema(fields), url)
        nested = {field.name for field in schema if pa.types.is_nested(field.type)}
        comparable = {field.name for field in fields if _has_comparable_bounds(field.type)}
        flat = frozenset(comparable.intersection(schema.names) - nested)
        return cls(stored, schema, leaves_by_name, flat, converts_by_name)


_LAYOUTS_KEPT = 64
_layouts: dict[object, _Layout] = {}
"""The layouts that were used last. Many small files of one writer have the same one, and for them it would take most of the time to open a file."""


def _find_layout(metadata: pq.FileMetaData, wide: Mapping[str, str], url: str) -> _Layout:
    """The layout of the file at `url`, see `_Layout.of_footer`."""
    # The text of a schema has all that it says of its columns: names, nesting, field ids and types.
    key = str(metadata.schema).partition("\n")[2], tuple((metadata.metadata or {}).items()), tuple(wide.items())
    layout = _layouts.pop(key, None) or _Layout.of_footer(metadata, wide, url)
    if all(unreadable(field.type) is None for field in layout.schema):  # otherwise the reason names the file
        while len(_layouts) >= _LAYOUTS_KEPT:
            # The race: another thread may remove the same layout.
            _layouts.pop(next(iter(_layouts), None), None)
        _layouts[key] = layout
    return layout


class ParquetIndex(FileIndex):
    """The index of a Parquet file. `wide`: for each column with integers that are too wide for pyarrow, the name of their type."""

    def __init__(
        self, file: FileVersion, metadata: pq.FileMetaData, wide: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._file = file
        self._metadata = metadata
        self.memory_bytes = metadata.serialized_size * _DECODED_FOOTER
        layout = _find_layout(metadata, wide, file.url)
        self.schema, self._stored_schema = layout.schema, layout.stored
        self._leaves, self._flat, self._converts = layout.leaves, layout.flat, layout.converts
        self._stats: dict[tuple[int, str], ColumnStats | None] = {}
        self._together: dict[int, list[Range]] = {}  # for each row group that is read as a whole, its range
        # `_read_longest_text` by row group and column: kept, because it has to decode a dictionary.
        self._longest: dict[tuple[int, int], int] = {}
        self.units = [Unit(number, self._middle(number)) for number in range(metadata.num_row_groups)]

    @property
    def stored_schema(self) -> pa.Schema:
        return self._stored_schema

    def _middle(self, number: int) -> int:
        group = self._metadata.row_group(number)
        spans = inside(self._file, "parquet", [_chunk_range(group.column(leaf)) for leaf in range(group.num_columns)])
        if not spans:
            return 0
        if len(spans) > _WIDE:
            start, end = min(offset for offset, _ in spans), max(offset + length for offset, length in spans)
            if end - start <= _TOGETHER:
                self._together[number] = [(start, end - start)]
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
        statistics = chunk.statistics
        if statistics is None or chunk.physical_type == "INT96":
            return None
        low = high = None
        if statistics.has_min_max and column in self._converts:
            low, high = self._gregorian_bounds(column, statistics.min_raw, statistics.max_raw)
        elif statistics.has_min_max:
            # A date or time in a year that Python lacks, and a text that was cut inside a character, cannot be used as bounds.
            with contextlib.suppress(OverflowError, ValueError):
                low, high = _comparable(statistics.min), _comparable(statistics.max)
            if isinstance(low, bytes) and not pa.types.is_binary(self.schema.field(column).type):
                # Statistics have half floats and JSON texts as stored bytes, which do not compare like values.
                low = high = None
        return ColumnStats(low, high, statistics.null_count if statistics.has_null_count else None, group.num_rows)

    def _gregorian_bounds(self, column: str, low: int, high: int) -> tuple[Any, Any]:
        (convert,), kind = self._converts[column], self.schema.field(column).type
        assert convert is not None
        if pa.types.is_date(kind):
            stored = pa.array([low, high], pa.int32()).cast(kind)
        else:
            stored = pa.array([low, high], pa.int64()).cast(self.stored_schema.field(column).type)
        return convert_bounds(convert(stored))

    def ranges(self, unit: Unit, columns: Sequence[str]) -> list[Range]:
        if (whole := self._together.get(unit.number)) is not None:
            return whole
        group = self._metadata.row_group(unit.number)
        return [_chunk_range(group.column(leaf)) for name in columns for leaf in self._leaves[name]]

    def rows(self, unit: Unit) -> int:
        return int(self._metadata.row_group(unit.number).num_rows)

    def decoded_bytes(self, unit: Unit, columns: Sequence[str]) -> int:
        group = self._metadata.row_group(unit.number)
        size = group.num_rows * _INDEX_BYTES
        for name in columns:
            try:
                size += group.num_rows * self.schema.field(name).type.bit_width // 8
            except ValueError:  # for text and lists, whose values are in the pages
                size += group.num_rows * 4
                size += sum(group.column(leaf).total_uncompressed_size for leaf in self._leaves[name])
        return int(size)

    def batches(self, unit: Unit, columns: Sequence[str], source: RangesFile) -> Iterator[pa.RecordBatch]:
        # Columns are requested by number, because a name with a dot could also be the path of a struct's field.
        leaves = [leaf for name in columns for leaf in self._leaves[name]]
        with reading(self._file, "parquet"):
            rows = self._batch_rows(unit, leaves, source)
            for batch in self._read(unit, leaves, source, rows):
                yield convert_columns(batch, self._converts) if self._converts else batch

    def _read(
        self, unit: Unit, leaves: list[int], source: RangesFile, rows: int, dictionary: str | None = None
    ) -> Iterator[pa.RecordBatch]:
        file = pq.ParquetFile(
            source.to_arrow(),
            metadata=self._metadata,
            read_dictionary=None if dictionary is None else [dictionary],
            coerce_int96_timestamp_unit="us",
            pre_buffer=False,
            # Files of managed tables, which have the table's column names, have page checksums. Other writers' checksums are sometimes wrong,
            # and Java's reader does not look at them.
            page_checksum_verification=self._file.immutable and self._file.columns is None,
        )
        yield from file.reader.iter_batches(rows, row_groups=[unit.number], column_indices=leaves, use_threads=False)

    def _batch_rows(self, unit: Unit, leaves: Sequence[int], source: RangesFile) -> int:
        """How many rows a batch may have, so that it does not take too much memory: a few bytes in the file may stand for many long values.

        Raises MemoryError for lists that may be a decompression bomb.
        """
        group, schema = self._metadata.row_group(unit.number), self._metadata.schema
        chunks = [group.column(leaf) for leaf in leaves]
        size = sum(chunk.total_uncompressed_size for chunk in chunks)
        rows = min(max(_BATCH_BYTES * group.num_rows // max(size, 1), 1), BATCH_ROWS)
        most = max((chunk.num_values for chunk in chunks), default=0)
        if most * max(size, _VALUE_BYTES) <= _BOUND_BYTES:
            return int(rows)  # these rows fit, even if each value were as long as all values in the file together
        decoded = 0
        for leaf, chunk in zip(leaves, chunks, strict=True):
            width, batch_rows = _WIDTHS.get(chunk.physical_type, _VALUE_BYTES), min(rows, group.num_rows)
            if chunk.physical_type == "FIXED_LEN_BYTE_ARRAY":
                width = max(schema.column(leaf).length, 1)
            elif (
                chunk.has_dictionary_page
                and batch_rows * chunk.total_uncompressed_size > _BOUND_BYTES
                and batch_rows * _dictionary_bytes(chunk, source) > _BOUND_BYTES
            ):
                width = max(width, self._longest_text_bytes(unit, leaf, source))
            size = width * chunk.num_values
            decoded += size
            # Lists with many bytes in the file are usually spread over many rows. But a few bytes may stand for one huge list, in one row.
            is_bomb = chunk.num_values > group.num_rows and size > _BOMB_SHARE * chunk.total_compressed_size
            if is_bomb and size > max(_BOUND_BYTES, free_bytes()):
                raise MemoryError(f"{chunk.num_values} list elements in {group.num_rows} rows")
        return max(int(min(rows, _BOUND_BYTES * group.num_rows // max(decoded, 1))), 1)

    def _longest_text_bytes(self, unit: Unit, leaf: int, source: RangesFile) -> int:
        """The number of bytes of the longest text in a column's dictionary; 0 if there is no dictionary, or the column is nested."""
        if (unit.number, leaf) not in self._longest:
            self._longest[unit.number, leaf] = self._read_longest_text(unit, leaf, source)
        return self._longest[unit.number, leaf]

    def _read_longest_text(self, unit: Unit, leaf: int, source: RangesFile) -> int:
        column = self._metadata.schema.column(leaf)
        if column.physical_type != "BYTE_ARRAY" or column.path != column.name:
            return 0
        batch = next(self._read(unit, [leaf], source, 1, column.path), None)
        if batch is None or not pa.types.is_dictionary(batch.schema.field(0).type):
            return 0
        return pc.max(pc.binary_length(batch.column(0).dictionary)).as_py() or 0


@dataclasses.dataclass(frozen=True)
class HybridTimes:
    """Which dates and times of a Parquet file are in the hybrid calendar, as Spark 2.4 writes them, and later versions in LEGACY mode.

    `annotated`: whether dates, and instants in milliseconds and microseconds, are in the hybrid calendar. `int96`: whether instants of the type
    INT96 are. `zone`: the time zone of the session that wrote the file. Times without a zone are never in the hybrid calendar.
    """

    annotated: bool
    int96: bool
    zone: str

    @classmethod
    def from_footer(cls, footer: Mapping[bytes, bytes] | None) -> HybridTimes | None:
        """Which times are in the hybrid calendar, by the metadata in a file's footer; None if all are in the Gregorian calendar."""
        version = re.match(rb"(\d+)\.(\d+)", (footer or {}).get(_SPARK + b"version", b""))
        if footer is None or version is None:
            return None
        written_by = tuple(map(int, version.groups()))
        annotated = written_by < (3, 0) or _SPARK + b"legacyDateTime" in footer
        int96 = written_by < (3, 1) or _SPARK + b"legacyINT96" in footer
        zone = footer.get(_SPARK + b"timeZone", b"UTC").decode(errors="replace")
        return cls(annotated, int96, zone) if annotated or int96 else None

    def converts(self, kind: pa.DataType, int96: Iterator[bool]) -> Iterator[Convert | None]:
        """For each flat part of a column, its conversion to the Gregorian calendar (None: no conversion). `int96`: whether a part is INT96."""
        shape, parts = split_type(kind)
        if shape is not None:
            for part in parts:
                yield from self.converts(part, int96)
            return
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if next(int96):
            yield functools.partial(gregorian_instants, zone=self.zone) if self.int96 else None
        elif self.annotated and pa.types.is_timestamp(kind) and kind.tz is not None:
            yield functools.partial(gregorian_instants, zone=self.zone)
        else:
            yield gregorian_dates if self.annotated and pa.types.is_date32(kind) else None


def _dictionary_bytes(chunk: pq.ColumnChunkMetaData, source: RangesFile) -> int:
    """The size in bytes of a column's dictionary, by its page header; the size of the whole column chunk if the header cannot be read.

    So no value in the dictionary is longer than this. The header is "struct PageHeader { 1: PageType type; 2: i32 uncompressed_page_size;
    3: i32 compressed_page_size; … }" in Thrift's compact protocol. The larger of its two sizes counts.
    """
    source.seek(_chunk_range(chunk)[0])
    head = _PAGE_HEAD.match(bytes(source.read(_PAGE_HEAD_BYTES)))
    if head is None:
        return int(chunk.total_uncompressed_size)
    return int(max(sum((byte & 0x7F) << 7 * place for place, byte in enumerate(size)) >> 1 for size in head.groups()))


def _chunk_range(chunk: pq.ColumnChunkMetaData) -> Range:
    start = chunk.data_page_offset
    if chunk.dictionary_page_offset:  # some writers write 0 if there is no dictionary
        start = min(start, chunk.dictionary_page_offset)
    return start, chunk.total_compressed_size


def _variants(arrow: pa.Schema, schema: pq.ParquetSchema) -> set[str]:
    """The paths of VARIANTs. Parquet stores a VARIANT as a group, and pyarrow shows its type only in the text of the schema."""
    if not any(_may_have_variants(field.type) for field in arrow):
        return set()
    names: list[str] = []
    paths = set()
    for line in str(schema).splitlines()[2:]:
        group = _GROUP.fullmatch(line)
        if group is not None:
            names[len(group["indent"]) // 2 - 1 :] = [group["name"]]
            if (group["type"] or "").startswith("Variant("):
                paths.add(".".join(names))
    return paths


def _may_have_variants(kind: pa.DataType) -> bool:
    return has_variant_parts(kind) or any(map(_may_have_variants, split_type(kind)[1]))


def _with_variants(kind: pa.DataType, leaves: Iterator[str], variants: Collection[str]) -> pa.DataType:
    """The type `kind` with VARIANT for the groups at the paths `variants`. `leaves`: the paths of the leaf columns, in order."""
    shape, parts = split_type(kind)
    if shape is None:
        next(leaves)
        return kind
    if has_variant_parts(kind):
        names = [field.name for field in kind]
        paths = [next(leaves) for _ in range(_leaf_count(kind))]
        at = sum(_leaf_count(part) for part in parts[: names.index("metadata")])
        if paths[at].removesuffix(".metadata") in variants:
            return VARIANT
        leaves = iter(paths)
    return with_parts(kind, [_with_variants(part, leaves, variants) for part in parts])


def _leaf_count(kind: pa.DataType) -> int:
    """The number of Parquet columns of which an Arrow column consists."""
    if isinstance(kind, pa.BaseExtensionType):
        return _leaf_count(kind.storage_type)
    shape, parts = split_type(kind)
    return 1 if shape is None else sum(map(_leaf_count, parts))


def _with_instants(kind: pa.DataType, int96: Iterator[bool]) -> pa.DataType:
    """The type `kind` with instants in UTC instead of INT96 timestamps, because these are instants for Spark and Hive."""
    shape, parts = split_type(kind)
    if shape is not None:
        return with_parts(kind, [_with_instants(part, int96) for part in parts])
    return pa.timestamp("us", "UTC") if next(int96) else kind


def _has_comparable_bounds(kind: pa.DataType) -> bool:
    """Whether the bounds of a column of type `kind` in Parquet statistics compare like the column's values.

    The bounds of timestamps with nanoseconds do not, because they lose digits; nor do the bounds of durations, which are plain numbers.
    """
    if pa.types.is_dictionary(kind):
        return _has_comparable_bounds(kind.value_type)
    if pa.types.is_timestamp(kind):
        return kind.unit in ("ms", "us", "s")
    return not pa.types.is_duration(kind)


def _comparable(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str, bytes, decimal.Decimal, datetime.datetime)):
        return value
    return value if type(value) is datetime.date else None


def spark_fields(fields: list[pa.Field], footer: Mapping[bytes, bytes] | None, url: str) -> list[pa.Field]:
    """The fields of a Parquet file with the types that Spark noted when it wrote the file; a field without a note keeps its type.

    In Parquet, a day-time interval is a plain number of microseconds, and a VARIANT is a struct. A year-month interval gets an `unreadable_type`,
    because a Python source cannot return such values to Spark.
    """
    fields_by_name = _read_spark_fields(footer)
    typed = typed_fields(fields, {name: field["type"] for name, field in fields_by_name.items()}, url)
    return [
        with_collations(field, fields_by_name[field.name]) if field.name in fields_by_name else field for field in typed
    ]


def _read_spark_fields(footer: Mapping[bytes, bytes] | None) -> dict[str, Any]:
    """The fields that Spark noted in a footer, by column; {} if there is no such note, or it is malformed."""
    text = (footer or {}).get(_SPARK_SCHEMA, b"")
    if not any(word in text for word in (b"interval", b"variant", b"__COLLATIONS")):
        return {}
    try:
        return {field["name"]: field for field in json.loads(text)["fields"] if "type" in field}
    except (ValueError, KeyError, TypeError, RecursionError):  # another writer uses Spark's key for something else
        return {}
