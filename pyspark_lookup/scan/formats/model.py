"""`FileFormat` and `FileIndex`: the interface of all file formats. `RangesFile`: a file object over byte ranges that are in memory.

This module also finds the format that a file's name shows, and applies the types that Spark notes in the files it writes.
"""

from __future__ import annotations

import abc
import bisect
import bz2
import contextlib
import dataclasses
import functools
import gzip
import io
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import pyarrow as pa

from pyspark_lookup.columnar.calendars import UnknownZoneError
from pyspark_lookup.columnar.predicate import ColumnStats
from pyspark_lookup.columnar.types import VARIANT, has_variant_parts, unreadable_type
from pyspark_lookup.errors import (
    DamagedFileError,
    NoMemoryError,
    NotSupportedError,
    OptionError,
    PysparkLookupError,
    SchemaError,
    raise_ours,
)
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import FileFormatName
from pyspark_lookup.scan.formats.inference import Inferred
from pyspark_lookup.storage.stores import FileVersion, Range

Data = bytes | memoryview

_EXTENSIONS = {
    ".parquet": FileFormatName.PARQUET, ".parq": FileFormatName.PARQUET, ".pq": FileFormatName.PARQUET,
    ".arrow": FileFormatName.ARROW, ".feather": FileFormatName.ARROW, ".ipc": FileFormatName.ARROW,
    ".csv": FileFormatName.CSV, ".json": FileFormatName.JSON, ".jsonl": FileFormatName.JSON,
    ".ndjson": FileFormatName.JSON, ".orc": FileFormatName.ORC,
}  # fmt: skip
TEXT_AT_MOST = 2**31 - 2  # bytes of a text file, decompressed
_PART = 1024 * 1024
# Content that decompresses to more bytes than these, and to more than 50 times its size, may be a decompression bomb: it is decompressed
# twice, first only to count the bytes.
_DOUBTFUL_BYTES, _DOUBTFUL_RATIO = 64 * _PART, 50


def _decompress(open_file: Callable[[io.BytesIO], gzip.GzipFile | bz2.BZ2File], content: Data) -> bytes:
    """The decompressed content. Raises NotSupportedError for content that is too large to be read, before this takes much memory."""
    if not content:  # a file without rows
        return b""
    doubtful = max(_DOUBTFUL_BYTES, _DOUBTFUL_RATIO * len(content))
    parts: list[bytes] = []
    size = 0
    with open_file(io.BytesIO(content)) as file:
        while part := file.read(_PART):
            size += len(part)
            if size > TEXT_AT_MOST:
                raise NotSupportedError(
                    f"the file has more than {TEXT_AT_MOST} bytes of text, and text is read as a whole: split the file, or write parquet"
                )
            if size <= doubtful:
                parts.append(part)
            else:
                parts.clear()
    if size <= doubtful:
        return b"".join(parts)
    with open_file(io.BytesIO(content)) as file:
        return file.read()


DECOMPRESS: Mapping[str, Callable[[Data], bytes]] = {
    ".gz": functools.partial(_decompress, lambda file: gzip.GzipFile(fileobj=file)),
    ".bz2": functools.partial(_decompress, bz2.BZ2File),
}


def decompressed(file: FileVersion, content: Data) -> Data:
    """The content of a file, decompressed if its name has the suffix of a compression."""
    for suffix, decompress in DECOMPRESS.items():
        if base_name(file.url).endswith(suffix):
            try:
                content = decompress(content)
            except NotSupportedError as problem:
                raise NotSupportedError(f"{redact('path', file.url)}: {problem}") from None
    return content


def detect_format(urls: Sequence[str]) -> FileFormatName:
    """The format that the names of files show. Raises OptionError if a name shows no format, or if two names show different formats."""
    urls_by_format: dict[FileFormatName, str] = {}
    for url in urls:
        name = base_name(url)
        for suffix in DECOMPRESS:
            name = name.removesuffix(suffix)
        kind = _EXTENSIONS.get("." + name.rsplit(".", 1)[-1]) if "." in name else None
        if kind is None:
            raise OptionError(
                f"the name of {url} does not show its format: set lookup.format (parquet, arrow, csv, json, orc)"
            )
        urls_by_format.setdefault(kind, url)
    if len(urls_by_format) > 1:
        raise OptionError(
            f"files of several formats: {', '.join(urls_by_format.values())}: give a glob that matches one format. If the names are wrong, set lookup.format, "
            "which applies to all files"
        )
    return next(iter(urls_by_format))


def base_name(url: str) -> str:
    """The file name in a URL, in lower case. The query of a web URL is left out; in any other URL a `?` is part of the name."""
    path = url.partition("?")[0] if url.startswith(("http://", "https://")) else url
    return path.rsplit("/", 1)[-1].lower()


def typed_fields(fields: Sequence[pa.Field], spark_types: Mapping[str, Any], url: str) -> list[pa.Field]:
    """Fields with the types that Spark noted for them. `spark_types`: by name, Spark's JSON of a type; fields without a note keep their type.

    A TIME or a year-month interval gets an `unreadable_type`, because a Python source cannot return such values to Spark.
    """
    return [field if field.name not in spark_types else _field(field, spark_types[field.name], url) for field in fields]


def _field(field: pa.Field, spark_type: Any, url: str) -> pa.Field:
    try:
        return field.with_type(_apply_spark_type(field.type, spark_type))
    except NotSupportedError as problem:
        return field.with_type(unreadable_type(f"column {field.name!r} is of {problem} ({url})"))


def _apply_spark_type(kind: pa.DataType, spark_type: Any) -> pa.DataType:
    if isinstance(spark_type, str):
        if spark_type == "variant" and has_variant_parts(kind):
            return VARIANT
        if spark_type.startswith(("interval year", "interval month")):
            raise NotSupportedError(
                f"Spark's type {spark_type}, which no Python source can read: write it as a number of months instead"
            )
        if spark_type.startswith("time(") and pa.types.is_int64(kind):  # in ORC
            raise NotSupportedError(
                f"Spark's type {spark_type}, which no Python source can read: write it as text instead"
            )
        if spark_type == "timestamp_ntz" and pa.types.is_int64(kind):  # in ORC
            return pa.timestamp("us")
        return pa.duration("us") if spark_type.startswith("interval ") and pa.types.is_int64(kind) else kind
    inner = spark_type.get("type") if isinstance(spark_type, dict) else None
    if inner == "struct" and pa.types.is_struct(kind):
        types = {field.get("name"): field.get("type") for field in spark_type.get("fields", ())}
        return pa.struct([field.with_type(_apply_spark_type(field.type, types.get(field.name))) for field in kind])
    if inner == "array" and pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_apply_spark_type(kind.value_type, spark_type.get("elementType"))))
    if inner == "map" and pa.types.is_map(kind):
        key = _apply_spark_type(kind.key_type, spark_type.get("keyType"))
        return pa.map_(key, kind.item_field.with_type(_apply_spark_type(kind.item_type, spark_type.get("valueType"))))
    return kind


BATCH_ROWS = 65536
_TAIL_BYTES = 64 * 1024
_SMALL_BYTES = 256 * 1024  # a file of up to this size is read as a whole when its footer is read


class RangesFile(io.RawIOBase):
    """A read-only file object. Some ranges of the file are in memory; `fetch` reads all other bytes when they are needed."""

    def __init__(self, size: int, ranges: Mapping[Range, Data], fetch: Callable[[Range], Data]) -> None:
        self._size = size
        self._starts: list[int] = []
        self._parts: list[tuple[int, Data]] = []  # (end, bytes) of each range, in the order of `_starts`
        for (offset, length), data in sorted(ranges.items(), key=lambda item: (item[0][0], -item[0][1])):
            if not self._parts or offset + length > self._parts[-1][0]:  # otherwise an earlier range includes it
                self._starts.append(offset)
                self._parts.append((offset + length, data))
        self._fetch = fetch
        self._at = 0

    def to_arrow(self) -> pa.NativeFile:
        """A file object for Arrow. If all bytes are in memory, Arrow reads them without calls to Python."""
        if len(self._parts) == 1 and self._starts == [0] and self._parts[0][0] == self._size:
            return pa.BufferReader(self._parts[0][1])
        return pa.PythonFile(self, mode="r")

    def with_tail(self, start: int, tail: bytes) -> RangesFile:
        """The same file, with the bytes `tail` instead of its bytes from position `start` on."""
        parts: dict[Range, Data] = {(start, len(tail)): tail}
        for offset, (_, data) in zip(self._starts, self._parts, strict=True):
            if offset < start:
                head = memoryview(data)[: start - offset]
                parts[offset, len(head)] = head
        return RangesFile(self._size, parts, self._fetch)

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
        """Up to `length` bytes from the current position, without a copy if one range in memory has them."""
        available = max(self._size - self._at, 0)
        requested = available if length is None or length < 0 else min(length, available)
        start, self._at = self._at, self._at + requested
        if not requested:
            return b""
        parts: list[Data] = []
        while requested:
            part = self._part(start, requested)
            parts.append(part)
            start, requested = start + len(part), requested - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _part(self, start: int, requested: int) -> Data:
        """At least one of the `requested` bytes from `start` on.

        If a range in memory has the first byte, returns all requested bytes that are in this range. Otherwise the bytes up to the next range in
        memory are fetched.
        """
        place = bisect.bisect_right(self._starts, start)
        if place:
            (end, data), offset = self._parts[place - 1], self._starts[place - 1]
            if start < end and (piece := memoryview(data)[start - offset : start - offset + requested]):
                return piece
        following = min([start + requested, *self._starts[place : place + 1]])
        return self._fetch((start, following - start))


@dataclasses.dataclass(frozen=True)
class Unit:
    """The smallest part of a file that is decoded at once: a row group, a record batch, or a whole file.

    `number`: its position among the file's units. `middle`: the offset of its middle byte, which decides to which `Slice` the unit belongs.
    """

    number: int
    middle: int


class FileIndex(abc.ABC):
    """What must be known of a file to read its rows: its schema in the types that Spark has, its units, and the byte ranges of each unit."""

    schema: pa.Schema
    units: Sequence[Unit]
    inferred: Mapping[str, Inferred] | None = None
    """For CSV and JSON files: the inferred types of columns that were not planned, or have a value that does not fit the planned type."""
    misfits: Mapping[str, str] = MappingProxyType({})
    """For CSV and JSON files: by column, the message about a value that does not fit the planned type."""
    nameless: bool = False
    """Whether columns have no names, so that declared columns are matched by position."""
    in_memory: bool = False
    """Whether all rows are in memory, so that no bytes of the file are read."""
    memory_bytes: int = 4096
    """About how many bytes of memory the index takes while it is cached."""

    @property
    def stored_schema(self) -> pa.Schema:
        """The schema in the file, with the file's own types and field ids."""
        return self.schema

    def stats(self, unit: Unit, column: str) -> ColumnStats | None:
        """The statistics of a column in a unit; None if they are not known."""
        return None

    def rows(self, unit: Unit) -> int | None:
        """The number of rows of a unit; None if it would be known only after the rows were read."""
        return None

    def decoded_bytes(self, unit: Unit, columns: Sequence[str]) -> int | None:
        """About how many bytes the unit's rows take in a full cache, its key index included; None if only reading the rows would show it."""
        return None

    @abc.abstractmethod
    def ranges(self, unit: Unit, columns: Sequence[str]) -> list[Range]: ...
    @abc.abstractmethod
    def batches(self, unit: Unit, columns: Sequence[str], source: RangesFile) -> Iterator[pa.RecordBatch]: ...


class FileFormat(Protocol):
    """A file format. `splittable`: units of one file may go to different tasks."""

    splittable: bool

    def first_ranges(self, file: FileVersion) -> list[Range]: ...
    def open_index(
        self, file: FileVersion, data: Mapping[Range, Data], planned: pa.Schema | None
    ) -> FileIndex | list[Range]: ...


class FooterFormat(abc.ABC):
    """A format whose files begin with magic bytes, and end with a footer, the footer's length and the magic bytes.

    `frame`: how many bytes the two magic byte strings and the length take together, with their padding.
    """

    splittable = True
    name: str
    magic: bytes
    frame: int

    def first_ranges(self, file: FileVersion) -> list[Range]:
        return [_tail_range(file)]

    def open_index(
        self, file: FileVersion, data: Mapping[Range, Data], planned: pa.Schema | None
    ) -> FileIndex | list[Range]:
        tail = data[_tail_range(file)]
        end = 4 + len(self.magic)
        if len(tail) < self.frame or bytes(tail[-len(self.magic) :]) != self.magic:
            hint = "; Feather version 1 is not supported" if bytes(tail[-4:]) == b"FEA1" else ""
            raise damaged_file_error(file, self.name, f"it does not end with {self.magic.decode()}{hint}")
        (footer,) = struct.unpack("<i", tail[-end : -len(self.magic)])
        if not 0 < footer <= file.size - self.frame:
            raise damaged_file_error(file, self.name, f"a footer of {footer} bytes does not fit into the file")
        whole = (file.size - footer - end, footer + end)
        if whole[1] > len(tail) and whole not in data:
            return [whole]
        with reading(file, self.name):
            return self._index(file, RangesFile(file.size, data, _no_fetch), whole[0], footer)

    @abc.abstractmethod
    def _index(self, file: FileVersion, source: RangesFile, start: int, length: int) -> FileIndex:
        """The index of a file whose footer is the `length` bytes from offset `start` on."""


def _no_fetch(part: Range) -> Data:
    raise ValueError(f"bytes {part} are outside the file's index")


def _tail_range(file: FileVersion) -> Range:
    length = file.size if file.size <= _SMALL_BYTES else _TAIL_BYTES
    return file.size - length, length


def damaged_file_error(file: FileVersion, kind: str, problem: object) -> DamagedFileError:
    reason = str(problem).rstrip(" .:\n").replace("\n", " ")
    damage = f"{redact('path', file.url)} is not a readable {kind} file: {reason}".rstrip(" .:")
    return DamagedFileError(f"{damage}: restore the file, or write it again")


@contextlib.contextmanager
def reading(file: FileVersion, kind: str) -> Iterator[None]:
    """A context that turns any error that a decoder raises for bad bytes into a DamagedFileError, which names the file."""
    try:
        yield
    except UnknownZoneError as problem:
        raise SchemaError(f"{redact('path', file.url)} has {problem}") from None
    except PysparkLookupError:
        raise
    except (
        pa.ArrowException,
        MemoryError,
        OSError,
        EOFError,
        ValueError,
        RecursionError,
        struct.error,
        zlib.error,
    ) as problem:
        error = damaged_file_error(file, kind, problem)
        if isinstance(problem, MemoryError) or "bad_alloc" in str(problem):
            reason = f" ({' '.join(str(problem).split())})" if str(problem) else ""
            error = NoMemoryError(
                f"{redact('path', file.url)} cannot be read as {kind}: there is not enough memory{reason}: read fewer columns, or write it in smaller "
                "parts; if it is damaged, restore it"
            )
        raise_ours(error, problem)


def inside(file: FileVersion, kind: str, ranges: list[Range]) -> list[Range]:
    """Check the ranges that a file's footer names, and return them. Raises DamagedFileError if one of them is not inside the file."""
    for offset, length in ranges:
        if not 0 <= offset <= offset + length <= file.size:
            raise damaged_file_error(
                file, kind, f"a part of {length} bytes at {offset} is not inside its {file.size} bytes"
            )
    return ranges
