"""The interface that all formats share, and a file object over the byte ranges that are in memory."""

from __future__ import annotations

import abc
import bisect
import contextlib
import dataclasses
import io
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import pyarrow as pa

from pyspark_lookup.columnar.predicate import ColumnStats
from pyspark_lookup.errors import DamagedFileError, NoMemoryError, PysparkLookupError, raise_ours
from pyspark_lookup.scan.formats.inference import Inferred
from pyspark_lookup.storage.stores import FileVersion, Range

Data = bytes | memoryview

BATCH_ROWS = 65536
_TAIL_BYTES = 64 * 1024
_SMALL_BYTES = 256 * 1024  # a file of up to this size is read as a whole, with its footer


class RangesFile(io.RawIOBase):
    """A read-only file over those ranges of it that are in memory. Other ranges are fetched when they are read."""

    def __init__(self, size: int, ranges: Mapping[Range, Data], fetch: Callable[[Range], Data]) -> None:
        self._size = size
        self._starts: list[int] = []
        self._parts: list[tuple[int, Data]] = []  # (end, bytes) of each
        for (offset, length), data in sorted(ranges.items(), key=lambda item: (item[0][0], -item[0][1])):
            if not self._parts or offset + length > self._parts[-1][0]:  # otherwise an earlier range includes it
                self._starts.append(offset)
                self._parts.append((offset + length, data))
        self._fetch = fetch
        self._at = 0

    def with_tail(self, start: int, tail: bytes) -> RangesFile:
        """The same file with `tail` instead of its bytes from `start` on."""
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
        """Up to `length` bytes from here, without a copy if one range has them."""
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
        """The longest piece from `start` that one range has; otherwise the bytes up to the next range, which are fetched."""
        place = bisect.bisect_right(self._starts, start)
        if place:
            (end, data), offset = self._parts[place - 1], self._starts[place - 1]
            if start < end and (piece := memoryview(data)[start - offset : start - offset + requested]):
                return piece
        following = min([start + requested, *self._starts[place : place + 1]])
        return self._fetch((start, following - start))


@dataclasses.dataclass(frozen=True)
class Unit:
    """The smallest part that is decoded at once: a row group, a record batch, or a whole file. `middle` is a file offset."""

    number: int
    middle: int


class FileIndex(abc.ABC):
    """An opened file: its schema in the types that Spark has, its units, and the ranges of their bytes."""

    schema: pa.Schema
    units: Sequence[Unit]
    inferred: Mapping[str, Inferred] | None = None
    """For text files: the inferred types of columns that were not planned."""
    misfits: Mapping[str, str] = MappingProxyType({})
    """For text files: columns with a value that is not of the planned type, and that value."""
    nameless: bool = False
    """Whether columns have no names, so that declared columns are matched by position."""
    memory_bytes: int = 4096
    """About how many bytes of memory the index takes while it is cached."""

    @property
    def stored_schema(self) -> pa.Schema:
        """The schema as the file itself has it, with its field ids."""
        return self.schema

    def stats(self, unit: Unit, column: str) -> ColumnStats | None:
        """The bounds of a column's values; None if they are not known."""
        return None

    def rows(self, unit: Unit) -> int | None:
        """The number of rows of a unit; None if one would have to read them."""
        return None

    def decoded_bytes(self, unit: Unit, columns: Sequence[str]) -> int | None:
        """About how many bytes the rows take in a snapshot, with its index; None if one would have to read them."""
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
    """A format of files that begin with magic bytes and end with a footer, its length and the magic bytes.

    `frame`: the size of all of these except the footer.
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
        """The index in the footer that begins at that offset and has that length."""


def _no_fetch(part: Range) -> Data:
    raise DamagedFileError(f"bytes {part} are outside the file's index")


def _tail_range(file: FileVersion) -> Range:
    length = file.size if file.size <= _SMALL_BYTES else _TAIL_BYTES
    return file.size - length, length


def damaged_file_error(file: FileVersion, kind: str, problem: object) -> DamagedFileError:
    return DamagedFileError(f"{file.url} is not a readable {kind} file: {problem}")


@contextlib.contextmanager
def reading(file: FileVersion, kind: str) -> Iterator[None]:
    """A context that raises DamagedFileError for any error of a decoder on bad bytes."""
    try:
        yield
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
            instead = "if the file is not damaged, read fewer columns or write it in smaller parts"
            error = NoMemoryError(f"{str(error).strip()}: there is not enough memory for its contents; {instead}")
        raise_ours(error, problem)


def inside(file: FileVersion, kind: str, ranges: list[Range]) -> list[Range]:
    """The ranges that a file names for its parts. Raises DamagedFileError if one is not inside the file."""
    for offset, length in ranges:
        if not 0 <= offset <= offset + length <= file.size:
            raise damaged_file_error(
                file, kind, f"a part of {length} bytes at {offset} is not inside its {file.size} bytes"
            )
    return ranges
