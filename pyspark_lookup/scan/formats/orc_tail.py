"""Parts of an ORC footer that pyarrow reads but does not expose: the calendar, types by column, time zones, positions of streams."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.scan.formats.model import Data, RangesFile
from pyspark_lookup.scan.formats.orc_numbers import Numbers, unsigned_numbers
from pyspark_lookup.storage.stores import Range


def decompress_lzo(data: memoryview, at_most: int) -> bytes:
    """The decompressed bytes of a block of LZO1X, which some writers of ORC use and for which pyarrow has no codec.

    Raises ValueError for a damaged block, or one of more than `at_most` bytes.
    """
    try:
        return _decompress_lzo(data, at_most)
    except IndexError:
        raise ValueError("an LZO block that ends too soon") from None


def _decompress_lzo(data: memoryview, at_most: int) -> bytes:
    output = bytearray()
    at = 0

    def read_length(bits: int, most: int) -> int:
        """The length in the low bits of an instruction. 0 stands for `most`, plus 255 for each zero byte that follows, plus the next byte."""
        nonlocal at
        if bits:
            return bits
        length = most
        while data[at] == 0:
            length, at = length + 255, at + 1
            if length > at_most:
                raise ValueError("an LZO block that is longer than it may be")
        at += 1
        return length + data[at - 1]

    def literals(count: int) -> None:
        nonlocal at, output
        if at + count > len(data):
            raise IndexError(at)
        if len(output) + count > at_most:
            raise ValueError("an LZO block that is longer than it may be")
        output += data[at : at + count]
        at += count

    state = 0  # the number of literals that came last: 1 to 3, or 4 for more; 0: none
    if data[0] > 17:
        at, state = 1, min(data[0] - 17, 4)
        literals(data[0] - 17)
    while True:
        code = data[at]
        at += 1
        if code < 16 and state == 0:
            literals(3 + read_length(code, 15))
            state = 4
            continue
        if code < 16:
            distance = (data[at] << 2) + (code >> 2) + (2049 if state == 4 else 1)
            at, length, state = at + 1, 3 if state == 4 else 2, code & 3
        elif code < 64:
            few = code < 32
            length = 2 + (read_length(code & 7, 7) if few else read_length(code & 31, 31))
            low = data[at] | data[at + 1] << 8
            distance = (((code & 8) << 11) + 16384 if few else 1) + (low >> 2)
            at, state = at + 2, low & 3
            if few and distance == 16384:
                return bytes(output)
        else:
            length = 3 + (code >> 5 & 1) if code < 128 else 5 + (code >> 5 & 3)
            distance = (data[at] << 3) + (code >> 2 & 7) + 1
            at, state = at + 1, code & 3
        if distance > len(output) or len(output) + length > at_most:
            raise ValueError("an LZO block that is not valid")
        _repeat(output, distance, length)
        literals(state)


def _repeat(output: bytearray, distance: int, length: int) -> None:
    """Append `length` bytes copied from `distance` bytes back, repeating them if there are fewer."""
    start = len(output) - distance
    pattern = output[start : start + length]
    output += (pattern * (length // len(pattern) + 1))[:length]


# --- the tail of a file ---------------------------------------------------------------------------

_FOOTER_LENGTH, _COMPRESSION, _BLOCK_SIZE = 1, 2, 3  # fields of the postscript
_STRIPES, _TYPES, _METADATA, _WRITER, _CALENDAR = 3, 4, 5, 9, 11  # fields of the footer
_SUBTYPES, _ATTRIBUTES = 2, 7  # fields of a type
_STREAMS, _ENCODINGS, _TIME_ZONE = 1, 2, 3  # fields of a stripe's footer
_STRIPE_ROWS = 5  # field of a stripe in the footer
_NESTED = (10, 11, 12, 13)  # kinds of types: lists, maps, structs, unions
_TIMESTAMPS, _LONG = (9, 18), 4
_SECONDARY = 5  # a kind of streams
_VERSION_2 = (2, 3)  # kinds of encodings
_LONGEST_NUMBER = 16  # bytes, more than any encoding needs for a fraction
_ORIGINAL = 32 * 1024  # bytes of an uncompressed chunk
_CODECS = {2: "snappy", 4: "lz4_raw", 5: "zstd", 6: "brotli"}
_ZLIB, _LZO = 1, 3
_PROLEPTIC = 2
_JAVA = 0
_LARGEST_BLOCK = 1 << 23  # as a length of 23 bits can express
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def parse_fields(message: memoryview) -> Iterator[tuple[int, int, Any]]:
    """(number, wire type, value) of each field of a Protocol Buffers message. Raises ValueError if the bytes are not a message."""
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
                raise ValueError(f"a field of the unknown wire type {wire}")
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
    raise ValueError("a number that does not end")


def _numbers(message: memoryview, number: int) -> list[int]:
    """The values of a repeated field of numbers, packed or not."""
    numbers: list[int] = []
    for field, wire, value in parse_fields(message):
        if field == number and wire == _VARINT:
            numbers.append(value)
        elif field == number and wire == _BYTES:
            at = 0
            while at < len(value):
                element, at = _varint(value, at)
                numbers.append(element)
    return numbers


def _number(message: memoryview, number: int, default: int = 0) -> int:
    return (_numbers(message, number) or [default])[-1]


def _parts(message: memoryview, number: int) -> list[memoryview]:
    return [value for field, wire, value in parse_fields(message) if field == number and wire == _BYTES]


def _encode_field(number: int, wire: int, value: Any) -> bytes:
    """The bytes of a field, from the parts that `parse_fields` returns."""
    key = _encode_varint(number << 3 | wire)
    if wire == _VARINT:
        return key + _encode_varint(value)
    return b"".join([key, _encode_varint(len(value)) if wire == _BYTES else b"", value])


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


@dataclasses.dataclass(frozen=True)
class Stripe:
    """A stripe's footer, and the positions of the streams that it names."""

    start: int
    footer: memoryview

    @cached_property
    def time_zone(self) -> str:
        """The writer's time zone, for its times without a zone; empty if the file does not say."""
        return "".join(bytes(part).decode(errors="replace") for part in _parts(self.footer, _TIME_ZONE)[-1:])


@dataclasses.dataclass(frozen=True)
class OrcTail:
    """The end of an ORC file. `content`: the bytes of the file; its postscript begins at `end`. `footer`: the decompressed footer."""

    content: memoryview
    end: int
    footer: memoryview
    compression: int
    block_size: int

    @cached_property
    def hybrid(self) -> bool:
        """Whether days before 1582-10-15 are in the Julian calendar.

        If the file does not say, they are in files of Java's writers, and in no others. Iceberg's writer counts Gregorian days although its
        files say otherwise.
        """
        calendar = _number(self.footer, _CALENDAR)
        if calendar == 0:
            return _number(self.footer, _WRITER, _JAVA) == _JAVA
        return calendar != _PROLEPTIC and not self._is_of_iceberg

    @cached_property
    def rows(self) -> list[int]:
        """The number of rows in each stripe."""
        return [_number(stripe, _STRIPE_ROWS) for stripe in _parts(self.footer, _STRIPES)]

    @cached_property
    def stripes(self) -> list[Stripe]:
        """The stripes of the file. Raises ValueError if one is not inside the file."""
        stripes = []
        for stripe in _parts(self.footer, _STRIPES):
            start, index, data, footer = (_number(stripe, field) for field in (1, 2, 3, 4))
            at = start + index + data
            if at + footer > self.end:
                raise ValueError(f"a stripe's footer at {at} is not inside the file")
            stripes.append(Stripe(start, self._decompress_stream(self.content[at : at + footer])))
        return stripes

    def leaf_columns(self, name: str, schema: pa.Schema) -> list[int]:
        """The numbers of the flat columns of which a column of the file consists, in their order."""
        types = self._types

        def flat(number: int) -> Iterator[int]:
            if _number(types[number], 1) in _NESTED:
                for part in _numbers(types[number], _SUBTYPES):
                    yield from flat(part)
            else:
                yield number

        return list(flat(_numbers(types[0], _SUBTYPES)[schema.get_field_index(name)]))

    def fractions(self, stripe: Stripe, column: int, count: int) -> Numbers:
        """The nanoseconds of the `count` times of a column in a stripe, which are stored apart from the seconds."""
        at = stripe.start
        for stream in _parts(stripe.footer, _STREAMS):
            kind, stream_column, length = (_number(stream, field) for field in (1, 2, 3))
            if kind == _SECONDARY and stream_column == column:
                encoding = sum(
                    _number(message, 1) for message in _parts(stripe.footer, _ENCODINGS)[column : column + 1]
                )
                data = self._decompress_stream(self.content[at : at + length], _LONGEST_NUMBER * count + 1024)
                packed = unsigned_numbers(data, count, 2 if encoding in _VERSION_2 else 1)
                # "The low three bits: how many zeros are left out, less one".
                zeros = packed & 7
                fractions: Numbers = (packed >> 3) * 10 ** np.where(zeros > 0, zeros + 1, 0)
                return fractions
            at += length
        if count:
            raise ValueError(f"a stripe has no nanoseconds for the timestamps in column {column}")
        return np.zeros(0, np.int64)

    def with_seconds(self) -> RangesFile:
        """The file with all times as numbers: seconds since 2015 in the writer's time zone. No year is out of their range."""
        footer = b""
        for number, wire, value in parse_fields(self.footer):
            if number == _TYPES and wire == _BYTES:
                value = b"".join(
                    _encode_field(
                        field, kind, _LONG if (field, kind) == (1, _VARINT) and content in _TIMESTAMPS else content
                    )
                    for field, kind, content in parse_fields(value)
                )
            footer += _encode_field(number, wire, value)
        if self.compression:
            parts = [footer[at : at + _ORIGINAL] for at in range(0, len(footer), _ORIGINAL)]
            footer = b"".join((len(part) << 1 | 1).to_bytes(3, "little") + part for part in parts)
        postscript = b"".join(
            _encode_field(number, wire, len(footer) if (number, wire) == (_FOOTER_LENGTH, _VARINT) else value)
            for number, wire, value in parse_fields(self.content[self.end : -1])
        )
        tail = footer + postscript + bytes([len(postscript)])
        start = self.end - _number(self.content[self.end : -1], _FOOTER_LENGTH)
        ranges = {(0, start): self.content[:start], (start, len(tail)): memoryview(tail)}
        return RangesFile(start + len(tail), ranges, _refuse_read)

    def _decompress_stream(self, data: memoryview, at_most: int | None = None) -> memoryview:
        return _decompress_stream(data, self.compression, self.block_size, at_most)

    @cached_property
    def _types(self) -> list[memoryview]:
        return _parts(self.footer, _TYPES)

    @cached_property
    def _is_of_iceberg(self) -> bool:
        attributes = (attribute for kind in self._types for attribute in _parts(kind, _ATTRIBUTES))
        return any(bytes(key) == b"iceberg.id" for attribute in attributes for key in _parts(attribute, 1))


def read_tail(content: bytes) -> OrcTail:
    """The footer of a file. Raises ValueError if the content is not one."""
    data = memoryview(content)
    length = data[-1] if data else 0
    postscript = data[len(data) - 1 - length : len(data) - 1] if length < len(data) else data[:0]
    footer = _number(postscript, _FOOTER_LENGTH)
    end = len(data) - 1 - length
    if not 0 < footer <= end:
        raise ValueError(f"a footer of {footer} bytes does not fit into the file")
    compression, block_size = _number(postscript, _COMPRESSION), _number(postscript, _BLOCK_SIZE, 256 * 1024)
    return OrcTail(
        data, end, _decompress_stream(data[end - footer : end], compression, block_size), compression, block_size
    )


def _refuse_read(part: Range) -> Data:
    raise ValueError(f"bytes {part} are outside the file")


def _decompress_stream(data: memoryview, compression: int, block_size: int, at_most: int | None = None) -> memoryview:
    """A stream of bytes, decompressed: chunks after "3 bytes: length << 1 | is original". `at_most`: stop after about this many bytes."""
    if compression == 0:
        return data
    parts: list[bytes | memoryview] = []
    at = total = 0
    while at < len(data) and (at_most is None or total < at_most):
        header = int.from_bytes(data[at : at + 3], "little")
        chunk = data[at + 3 : at + 3 + (header >> 1)]
        if len(chunk) < header >> 1:
            raise ValueError("a chunk that is longer than its stream")
        parts.append(chunk if header & 1 else _decompress(chunk, compression, min(block_size, _LARGEST_BLOCK)))
        at += 3 + len(chunk)
        total += len(parts[-1])
    return memoryview(b"".join(parts))


def _decompress(chunk: memoryview, compression: int, at_most: int) -> bytes:
    if compression == _ZLIB:
        return zlib.decompressobj(-15).decompress(chunk, at_most)
    if compression == _LZO:
        return decompress_lzo(chunk, at_most)
    codec = _CODECS.get(compression)
    if codec is None:
        raise ValueError(f"compression {compression} cannot be read")
    if codec in ("zstd", "brotli"):  # their chunks mark their own end
        return bytes(pa.CompressedInputStream(pa.BufferReader(chunk), codec).read(at_most))
    try:
        length = _varint(chunk, 0)[0] if codec == "snappy" else _lz4_length(chunk)
    except IndexError:
        raise ValueError("a chunk that ends too soon") from None
    if length > at_most:
        raise ValueError(f"a chunk of {length} bytes, but {at_most} at most are allowed")
    return bytes(pa.Codec(codec).decompress(chunk, length, asbytes=True))


def _lz4_length(chunk: memoryview) -> int:
    """The decompressed length of an LZ4 block: "token, literals, offset, match", repeated, the last without a match."""
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
