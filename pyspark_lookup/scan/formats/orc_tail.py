"""What the end of an ORC file says that pyarrow reads but does not show: the calendar, types by column, time zones, where streams lie."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from pyspark_lookup.base.forks import cached_property

_FOOTER_LENGTH, _COMPRESSION, _BLOCK_SIZE = 1, 2, 3  # fields of the postscript
_STRIPES, _TYPES, _METADATA, _WRITER, _CALENDAR = 3, 4, 5, 9, 11  # fields of the footer
_SUBTYPES, _ATTRIBUTES = 2, 7  # fields of a type
_STREAMS, _ENCODINGS, _TIME_ZONE = 1, 2, 3  # fields of a stripe's footer
_CODECS = {2: "snappy", 4: "lz4_raw", 5: "zstd", 6: "brotli"}  # beside zlib, 1; pyarrow lacks LZO, 3
_ZLIB = 1
_PROLEPTIC = 2
_JAVA = 0
_LARGEST_BLOCK = 1 << 23  # of which a length of 23 bits can tell
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def fields_of(message: memoryview) -> Iterator[tuple[int, int, Any]]:
    """(number, wire type, value) of each field of a Protocol Buffers message. Raises ValueError for what is none."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        wire = key & 7
        value: int | memoryview
        if wire == _VARINT:
            value, at = _varint(message, at)
        else:
            if wire == _BYTES:
                length, at = _varint(message, at)
            elif wire in (_FIXED64, _FIXED32):
                length = 8 if wire == _FIXED64 else 4
            else:
                raise ValueError(f"a field of wire type {wire}")
            value, at = message[at : at + length], at + length
            if at > len(message):
                raise ValueError("a field that is longer than its message")
        yield key >> 3, wire, value


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("a number without an end")


def _numbers(message: memoryview, number: int) -> list[int]:
    """A repeated field of numbers, packed or not."""
    found: list[int] = []
    for field, wire, value in fields_of(message):
        if field == number and wire == _VARINT:
            found.append(value)
        elif field == number and wire == _BYTES:
            at = 0
            while at < len(value):
                one, at = _varint(value, at)
                found.append(one)
    return found


def _number(message: memoryview, number: int, default: int = 0) -> int:
    return (_numbers(message, number) or [default])[-1]


def _parts(message: memoryview, number: int) -> list[memoryview]:
    return [value for field, wire, value in fields_of(message) if field == number and wire == _BYTES]


@dataclasses.dataclass(frozen=True)
class OrcTail:
    """The footer of an ORC file, `content`."""

    content: memoryview
    footer: memoryview
    compression: int
    block_size: int

    @property
    def hybrid(self) -> bool:
        """Whether days before 1582-10-15 are those of the Julian calendar.

        If the file does not say, those of Java's writers are, and nobody else's. Iceberg's writer counts Gregorian days and says otherwise.
        """
        calendar = _number(self.footer, _CALENDAR)
        if calendar == 0:
            return _number(self.footer, _WRITER, _JAVA) == _JAVA
        return calendar != _PROLEPTIC and not self._of_iceberg

    @cached_property
    def _of_iceberg(self) -> bool:
        attributes = (attribute for kind in _parts(self.footer, _TYPES) for attribute in _parts(kind, _ATTRIBUTES))
        return any(bytes(key) == b"iceberg.id" for attribute in attributes for key in _parts(attribute, 1))


def read_tail(content: bytes) -> OrcTail:
    """The end of a file. Raises ValueError for one that is none."""
    data = memoryview(content)
    length = data[-1] if data else 0
    postscript = data[len(data) - 1 - length : len(data) - 1] if length < len(data) else data[:0]
    footer = _number(postscript, _FOOTER_LENGTH)
    end = len(data) - 1 - length
    if not 0 < footer <= end:
        raise ValueError(f"a footer of {footer} bytes does not fit")
    compression, block_size = _number(postscript, _COMPRESSION), _number(postscript, _BLOCK_SIZE, 256 * 1024)
    return OrcTail(data, _plain(data[end - footer : end], compression, block_size), compression, block_size)


def _plain(data: memoryview, compression: int, block_size: int) -> memoryview:
    """A stream of bytes, decompressed: chunks behind "3 bytes: length << 1 | is original"."""
    if compression == 0:
        return data
    parts: list[bytes | memoryview] = []
    at = 0
    while at < len(data):
        header = int.from_bytes(data[at : at + 3], "little")
        chunk = data[at + 3 : at + 3 + (header >> 1)]
        if len(chunk) < header >> 1:
            raise ValueError("a chunk that is longer than its stream")
        parts.append(chunk if header & 1 else _decompress(chunk, compression, min(block_size, _LARGEST_BLOCK)))
        at += 3 + len(chunk)
    return memoryview(b"".join(parts))


def _decompress(chunk: memoryview, compression: int, at_most: int) -> bytes:
    if compression == _ZLIB:
        return zlib.decompressobj(-15).decompress(chunk, at_most)
    codec = _CODECS.get(compression)
    if codec is None:
        raise ValueError(f"compression {compression} cannot be read")
    if codec in ("zstd", "brotli"):  # whose chunks end where they say so
        return bytes(pa.CompressedInputStream(pa.BufferReader(chunk), codec).read(at_most))
    length = _varint(chunk, 0)[0] if codec == "snappy" else _lz4_length(chunk)
    if length > at_most:
        raise ValueError(f"a chunk of {length} bytes, of at most {at_most}")
    return bytes(pa.Codec(codec).decompress(chunk, length, asbytes=True))


def _lz4_length(chunk: memoryview) -> int:
    """How long an LZ4 block is, decompressed: "token, literals, offset, match" again and again, the last without a match."""
    at = total = 0

    def longer(length: int) -> int:
        nonlocal at
        while length >= 15:
            length += chunk[at]
            at += 1
            if chunk[at - 1] < 255:
                break
        return length

    while at < len(chunk):
        token = chunk[at]
        at += 1
        literals = longer(token >> 4)
        at += literals
        total += literals
        if at >= len(chunk):
            break
        at += 2
        total += longer(token & 15) + 4
    return total
