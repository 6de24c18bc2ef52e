"""File formats: which byte ranges a file's schema, statistics and rows lie in, and how they decode.

A format never touches storage. It names ranges; the caller brings their bytes; `RangesFile` lets
pyarrow read them as one file. `open_index` is called until it no longer asks for more ranges.
"""

from __future__ import annotations

import bz2
import contextlib
import dataclasses
import datetime
import decimal
import gzip
import io
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.orc
import pyarrow.parquet as pq

from pyspark_lookup.errors import DamagedFileError, NotSupportedError, OptionError, PysparkLookupError
from pyspark_lookup.options import FileFormatName
from pyspark_lookup.predicate import ColumnStats
from pyspark_lookup.schema import spark_schema
from pyspark_lookup.ufs import FileVersion, Range

__all__ = ["BATCH_ROWS", "FileFormat", "FileIndex", "RangesFile", "Unit", "format_of"]

Data = bytes | memoryview

BATCH_ROWS = 65536
_TAIL_BYTES = 64 * 1024
_SMALL_BYTES = 256 * 1024  # a file of this size comes whole, with its footer
_EXTENSIONS = {
    ".parquet": FileFormatName.PARQUET, ".parq": FileFormatName.PARQUET, ".pq": FileFormatName.PARQUET,
    ".arrow": FileFormatName.ARROW, ".feather": FileFormatName.ARROW, ".ipc": FileFormatName.ARROW,
    ".csv": FileFormatName.CSV, ".json": FileFormatName.JSON, ".jsonl": FileFormatName.JSON,
    ".ndjson": FileFormatName.JSON, ".orc": FileFormatName.ORC,
}  # fmt: skip
_DECOMPRESS: Mapping[str, Callable[[bytes], bytes]] = {".gz": gzip.decompress, ".bz2": bz2.decompress}


def format_of(urls: Sequence[str]) -> FileFormatName:
    """The one format that file names tell. Raises OptionError if they tell none, or several."""
    found: dict[FileFormatName, str] = {}
    for url in urls:
        name = _name(url)
        for suffix in _DECOMPRESS:
            name = name.removesuffix(suffix)
        kind = _EXTENSIONS.get("." + name.rsplit(".", 1)[-1]) if "." in name else None
        if kind is None:
            raise OptionError(
                f"the format of {url} is not told by its name: set lookup.format (parquet, arrow, csv, json, orc)"
            )
        found.setdefault(kind, url)
    if len(found) > 1:
        raise OptionError(
            f"files of several formats: {', '.join(found.values())}: give a glob of one, or lookup.format"
        )
    return next(iter(found))


def _name(url: str) -> str:
    """The last part of a URL, without its query, in lower case."""
    return url.rsplit("/", 1)[-1].partition("?")[0].lower()


class RangesFile(io.RawIOBase):
    """A read-only file over the ranges of it that are in memory; others are fetched when asked for."""

    def __init__(self, size: int, ranges: Mapping[Range, Data], fetch: Callable[[Range], Data]) -> None:
        self._size = size
        self._ranges = sorted((offset, length, data) for (offset, length), data in ranges.items())
        self._fetch = fetch
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return self._size

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def read(self, length: int | None = -1) -> Data:
        """Up to `length` bytes from here, without a copy where one range holds them."""
        available = max(self._size - self._at, 0)
        wanted = available if length is None or length < 0 else min(length, available)
        start, self._at = self._at, self._at + wanted
        if not wanted:
            return b""
        parts: list[Data] = []
        while wanted:
            part = self._part(start, wanted)
            parts.append(part)
            start, wanted = start + len(part), wanted - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _part(self, start: int, wanted: int) -> Data:
        """The longest piece from `start` that one range holds; else up to the next range, fetched."""
        best: Data = b""
        following = start + wanted
        for offset, length, data in self._ranges:
            if offset <= start < offset + length:
                piece = memoryview(data)[start - offset : start - offset + wanted]
                if len(piece) > len(best):
                    best = piece
            elif offset > start:
                following = min(following, offset)
        return best or self._fetch((start, following - start))


@dataclasses.dataclass(frozen=True)
class Unit:
    """What is decoded at once: a row group, a record batch, or a whole file. `middle` is a file offset."""

    number: int
    middle: int


class FileIndex(Protocol):
    """An opened file: its schema as Spark takes it, its units, and where their bytes lie."""

    @property
    def schema(self) -> pa.Schema: ...
    @property
    def units(self) -> Sequence[Unit]: ...

    def stats(self, unit: Unit, column: str) -> ColumnStats | None: ...
    def ranges(self, unit: Unit, columns: Sequence[str]) -> list[Range]: ...
    def batches(self, unit: Unit, columns: Sequence[str], source: RangesFile) -> Iterator[pa.RecordBatch]: ...


class FileFormat(Protocol):
    """`splittable`: units of one file may go to different tasks."""

    splittable: bool

    def first_ranges(self, file: FileVersion) -> list[Range]: ...
    def open_index(
        self, file: FileVersion, data: Mapping[Range, Data], planned: pa.Schema | None
    ) -> FileIndex | list[Range]: ...


def open_format(name: FileFormatName, block_size: int) -> FileFormat:
    """The format of that name; `block_size` in bytes is for formats without natural blocks."""
    if name is FileFormatName.PARQUET:
        return ParquetFormat()
    if name is FileFormatName.ARROW:
        return ArrowFormat()
    return WholeFileFormat(name, block_size)


__all__ += ["open_format"]


def _no_fetch(part: Range) -> Data:
    raise DamagedFileError(f"bytes {part} are outside the file's index")


def _tail(file: FileVersion) -> Range:
    length = file.size if file.size <= _SMALL_BYTES else _TAIL_BYTES
    return file.size - length, length


def _damaged(file: FileVersion, kind: str, problem: object) -> DamagedFileError:
    return DamagedFileError(f"{file.url} is not a readable {kind} file: {problem}")


def _inside(file: FileVersion, kind: str, ranges: list[Range]) -> list[Range]:
    """The ranges that a file gives for its parts. Raises DamagedFileError if one is not inside the file."""
    for offset, length in ranges:
        if not 0 <= offset <= offset + length <= file.size:
            raise _damaged(file, kind, f"a part of {length} bytes at {offset} is not inside its {file.size} bytes")
    return ranges


# --- parquet --------------------------------------------------------------------------------------


class ParquetFormat:
    """Blocks: the tail with the footer, and column chunks."""

    splittable = True

    def first_ranges(self, file: FileVersion) -> list[Range]:
        return [_tail(file)]

    def open_index(
        self, file: FileVersion, data: Mapping[Range, Data], planned: pa.Schema | None
    ) -> FileIndex | list[Range]:
        tail = data[_tail(file)]
        if len(tail) < 12 or bytes(tail[-4:]) != b"PAR1":
            raise _damaged(file, "parquet", "it does not end with PAR1")
        (footer,) = struct.unpack("<I", tail[-8:-4])
        if footer + 12 > file.size:
            raise _damaged(file, "parquet", f"a footer of {footer} bytes does not fit")
        whole = (file.size - footer - 8, footer + 8)
        if footer + 8 > len(tail) and whole not in data:
            return [whole]
        try:
            metadata = pq.read_metadata(pa.PythonFile(RangesFile(file.size, data, _no_fetch), mode="r"))
            return ParquetIndex(file, metadata)
        except (pa.ArrowException, OSError, ValueError) as problem:  # ValueError: a name that is no UTF-8
            if isinstance(problem, PysparkLookupError):
                raise
            raise _damaged(file, "parquet", problem) from problem


class ParquetIndex:
    """A parquet footer."""

    def __init__(self, file: FileVersion, metadata: pq.FileMetaData) -> None:
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
        self.schema = spark_schema(pa.schema(fields), file.url)
        flat = [not pa.types.is_nested(field.type) for field in self.schema]
        self._flat = {f.name for f, is_flat in zip(arrow, flat, strict=True) if is_flat and _bounded(f.type)}
        self.units = [Unit(number, self._middle(number)) for number in range(metadata.num_row_groups)]

    def _middle(self, number: int) -> int:
        group = self._metadata.row_group(number)
        spans = _inside(self._file, "parquet", [_chunk_range(group.column(leaf)) for leaf in range(group.num_columns)])
        if not spans:
            return 0
        return (min(offset for offset, _ in spans) + max(offset + length for offset, length in spans)) // 2

    def stats(self, unit: Unit, column: str) -> ColumnStats | None:
        if column not in self._flat:
            return None
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
            )
            # By number: a name with a dot is also the path of a struct's field.
            leaves = [leaf for name in columns for leaf in self._leaves[name]]
            yield from file.reader.iter_batches(
                BATCH_ROWS, row_groups=[unit.number], column_indices=leaves, use_threads=False
            )
        except (pa.ArrowException, OSError) as problem:
            if isinstance(problem, PysparkLookupError):
                raise
            raise _damaged(self._file, "parquet", problem) from problem


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


# --- Arrow IPC file (Feather V2) ------------------------------------------------------------------


class ArrowFormat:
    """Blocks: the tail with the footer, dictionaries, and record batches."""

    splittable = True

    def first_ranges(self, file: FileVersion) -> list[Range]:
        return [_tail(file)]

    def open_index(
        self, file: FileVersion, data: Mapping[Range, Data], planned: pa.Schema | None
    ) -> FileIndex | list[Range]:
        tail = data[_tail(file)]
        if len(tail) < 18 or bytes(tail[-6:]) != b"ARROW1":
            hint = "; Feather version 1 is not supported" if bytes(tail[-4:]) == b"FEA1" else ""
            raise _damaged(file, "Arrow IPC", f"it does not end with ARROW1{hint}")
        (footer,) = struct.unpack("<i", tail[-10:-6])
        if not 0 < footer <= file.size - 18:
            raise _damaged(file, "Arrow IPC", f"a footer of {footer} bytes does not fit")
        whole = (file.size - footer - 10, footer + 10)
        if footer + 10 > len(tail) and whole not in data:
            return [whole]
        source = RangesFile(file.size, data, _no_fetch)
        source.seek(whole[0])
        try:
            dictionaries, batches = _ipc_blocks(bytes(source.read(footer)))
            source.seek(0)
            schema = pa.ipc.open_file(pa.PythonFile(source, mode="r")).schema
            _inside(file, "Arrow IPC", dictionaries + batches)
            return ArrowIndex(file, schema, dictionaries, batches)
        except (pa.ArrowException, struct.error, OSError, ValueError) as problem:  # ValueError: a name that is no UTF-8
            if isinstance(problem, PysparkLookupError):
                raise
            raise _damaged(file, "Arrow IPC", problem) from problem


class ArrowIndex:
    """An Arrow IPC footer: its record batches are whole, so columns are pruned after the read."""

    def __init__(self, file: FileVersion, schema: pa.Schema, dictionaries: list[Range], batches: list[Range]) -> None:
        self._file = file
        self._dictionaries = dictionaries
        self._batches = batches
        self.schema = spark_schema(schema, file.url)
        self.units = [Unit(number, offset + length // 2) for number, (offset, length) in enumerate(batches)]

    def stats(self, unit: Unit, column: str) -> ColumnStats | None:
        return None

    def ranges(self, unit: Unit, columns: Sequence[str]) -> list[Range]:
        return [*self._dictionaries, self._batches[unit.number]]

    def batches(self, unit: Unit, columns: Sequence[str], source: RangesFile) -> Iterator[pa.RecordBatch]:
        try:
            batch = pa.ipc.open_file(pa.PythonFile(source, mode="r")).get_batch(unit.number).select(list(columns))
            batch.validate(full=True)  # bad offsets or codes would read other memory: about 2 GB/s
        except (pa.ArrowException, OSError) as problem:
            if isinstance(problem, PysparkLookupError):
                raise
            raise _damaged(self._file, "Arrow IPC", problem) from problem
        for start in range(0, batch.num_rows, BATCH_ROWS):
            yield batch.slice(start, BATCH_ROWS)


def _ipc_blocks(footer: bytes) -> tuple[list[Range], list[Range]]:
    """(dictionaries, record batches) of an IPC footer, which pyarrow reads but does not show.

    "table Footer { version: MetadataVersion; schema: Schema; dictionaries: [Block]; recordBatches:
    [Block]; … }", "struct Block { offset: long; metaDataLength: int; bodyLength: long }" (Arrow's
    File.fbs). A flatbuffer table starts with the signed distance back to its vtable, which holds a
    16-bit field offset per field after two 16-bit sizes; a vector is reached by a 32-bit distance.
    """
    (table,) = struct.unpack_from("<I", footer, 0)
    (back,) = struct.unpack_from("<i", footer, table)
    vtable = table - back
    (vtable_bytes,) = struct.unpack_from("<H", footer, vtable)

    def blocks(field: int) -> list[Range]:
        slot = 4 + 2 * field
        (offset,) = struct.unpack_from("<H", footer, vtable + slot) if slot < vtable_bytes else (0,)
        if not offset:
            return []
        at = table + offset
        vector = at + struct.unpack_from("<I", footer, at)[0]
        (count,) = struct.unpack_from("<I", footer, vector)
        entries = (struct.unpack_from("<qi4xq", footer, vector + 4 + 24 * number) for number in range(count))
        return [(start, metadata + body) for start, metadata, body in entries]

    return blocks(2), blocks(3)


# --- CSV, JSON lines, ORC -------------------------------------------------------------------------


class WholeFileFormat:
    """Blocks: aligned ranges. The schema is inferred from the whole file; one task decodes it."""

    splittable = False

    def __init__(self, name: FileFormatName, block_size: int) -> None:
        self._name = name
        self._block_size = block_size

    def first_ranges(self, file: FileVersion) -> list[Range]:
        starts = range(0, file.size, self._block_size)
        return [(start, min(self._block_size, file.size - start)) for start in starts]

    def open_index(
        self, file: FileVersion, data: Mapping[Range, Data], planned: pa.Schema | None
    ) -> FileIndex | list[Range]:
        blocks = [data[part] for part in self.first_ranges(file)]
        content = bytes(blocks[0]) if len(blocks) == 1 else b"".join(blocks)
        try:
            for suffix, decompress in _DECOMPRESS.items():
                if _name(file.url).endswith(suffix):
                    content = decompress(content)
            if len(content) >= 2**31 - 1 and self._name is not FileFormatName.ORC:
                raise NotSupportedError(
                    f"{file.url} holds {len(content)} bytes of {self._name.value}, which is read as one piece of up to "
                    "2 GiB: split it, or write parquet"
                )
            if self._name is FileFormatName.ORC:
                table = None
                schema = pa.orc.ORCFile(pa.BufferReader(content)).schema
            else:
                table = _parse(self._name, content, planned)
                schema = table.schema
            return WholeFileIndex(file, self._name, schema, table, content, self.first_ranges(file))
        except PysparkLookupError:
            raise
        except (pa.ArrowException, OSError, EOFError, ValueError, zlib.error) as problem:
            raise _damaged(file, self._name.value, problem) from problem


class WholeFileIndex:
    """A file decoded as one unit."""

    def __init__(
        self,
        file: FileVersion,
        name: FileFormatName,
        schema: pa.Schema,
        table: pa.Table | None,
        content: bytes,
        ranges: list[Range],
    ) -> None:
        self._file, self._name, self._table, self._content, self._ranges = file, name, table, content, ranges
        self.schema = spark_schema(schema, file.url)
        self.units = [Unit(0, 0)]

    def stats(self, unit: Unit, column: str) -> ColumnStats | None:
        return None

    def ranges(self, unit: Unit, columns: Sequence[str]) -> list[Range]:
        return self._ranges

    def batches(self, unit: Unit, columns: Sequence[str], source: RangesFile) -> Iterator[pa.RecordBatch]:
        try:
            table = self._table
            if table is None:
                # Without any column it would read no row.
                wanted = list(columns) or self.schema.names[:1]
                table = pa.orc.ORCFile(pa.BufferReader(self._content)).read(columns=wanted)
            yield from table.select(list(columns)).to_batches(BATCH_ROWS)
        except (pa.ArrowException, OSError) as problem:
            raise _damaged(self._file, self._name.value, problem) from problem


def _parse(name: FileFormatName, content: bytes, planned: pa.Schema | None) -> pa.Table:
    """CSV with a header line or JSON lines as a table of the file's own columns; types as planned where given.

    Where a value does not fit its planned type, types are inferred, for the caller to compare.
    """
    read = _read_json if name is FileFormatName.JSON else _read_csv
    wanted = {} if planned is None else {field.name: field.type for field in planned}
    try:
        table = read(content, wanted)
    except pa.ArrowInvalid:
        if not wanted:
            raise
        return read(content, {})
    names = table.schema.names
    if name is FileFormatName.JSON:
        # A JSON reader adds the columns it is told of. Those without a value may not be in the file.
        told = {n: kind for n, kind in wanted.items() if table.column(n).null_count < table.num_rows}
        if len(told) < len(wanted):
            names = read(content, told).schema.names
    folded = {n.casefold(): kind for n, kind in wanted.items()}
    spelled = {n: folded[n.casefold()] for n in names if n.casefold() in folded}
    if not spelled.keys() <= wanted.keys():  # in another letter case
        table = read(content, spelled)
    return table.select(names)


def _read_json(content: bytes, types: Mapping[str, pa.DataType]) -> pa.Table:
    schema = pa.schema(list(types.items())) if types else None
    options = pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="infer")
    read = pa.json.ReadOptions(block_size=_one_block(content))
    table = pa.json.read_json(pa.BufferReader(content), read, options)
    table.validate(full=True)  # the reader lets texts through that are no UTF-8
    return table


def _read_csv(content: bytes, types: Mapping[str, pa.DataType]) -> pa.Table:
    if not content.endswith((b"\n", b"\r")):
        content += b"\n"  # a header line alone is no CSV to pyarrow without it
    read = pa.csv.ReadOptions(block_size=_one_block(content))
    parse = pa.csv.ParseOptions(newlines_in_values=True)
    convert = {"null_values": [""], "strings_can_be_null": True, "quoted_strings_can_be_null": False}

    def table(types: Mapping[str, pa.DataType]) -> pa.Table:
        options = pa.csv.ConvertOptions(column_types=dict(types), **convert)
        return pa.csv.read_csv(pa.BufferReader(content), read, parse, options)

    inferred = table(types)
    # Spark takes no time of day: such columns stay the text they were.
    times = {field.name: pa.string() for field in inferred.schema if pa.types.is_time(field.type)}
    return table({**types, **times}) if times else inferred


def _one_block(content: bytes) -> int:
    """Inference must see every value, or a file could not be read by its own schema."""
    return max(len(content) + 1, 1024)
