"""Reads ORC files. One task decodes a file as a whole, with the calendar, types and time zones that the file names.

This module reads the parts of an ORC footer that pyarrow reads but does not expose: the calendar, types by column, time zones, and positions
of streams. pyarrow reads neither times far from 1970 nor times of writers in other time zones correctly. So this module computes them from the
stored seconds and fractions. The fractions are unsigned numbers in runs, for which pyarrow has no type ("Run Length Encoding" in ORC's
specification).
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.orc

from pyspark_lookup.columnar.calendars import (
    LOCAL_MEAN_TIME_END,
    Convert,
    UnknownZoneError,
    ZoneHistory,
    build_array,
    convert_columns,
    fixed_offset,
    gregorian_dates,
    view_numbers,
)
from pyspark_lookup.columnar.types import lenient_schema, split_type, unreadable
from pyspark_lookup.core import memory
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.errors import SchemaError, raise_ours
from pyspark_lookup.scan.formats.model import (
    BATCH_ROWS,
    Data,
    FileIndex,
    RangesFile,
    Unit,
    decompressed,
    reading,
    typed_fields,
)
from pyspark_lookup.storage.stores import FileVersion, Range

Numbers = npt.NDArray[np.int64]

_WIDTHS = [*range(1, 25), 26, 28, 30, 32, 40, 48, 56, 64]
"""The number of bits of each value in a run, by the five-bit code that stands for this number in the run's header."""


def unsigned_numbers(data: bytes | memoryview, count: int, version: int) -> Numbers:
    """The first `count` numbers of a stream. `version`: the version of the run length encoding, 1 or 2. Raises ValueError if there are
    fewer numbers."""
    numbers = np.zeros(count, np.int64)
    at = place = 0
    decode = _run_of_version_1 if version == 1 else _run_of_version_2
    try:
        while place < count:
            run, at = decode(data, at)
            run = run[: count - place]
            numbers[place : place + len(run)] = run
            place += len(run)
    except (IndexError, OverflowError) as problem:
        raise_ours(ValueError(f"a stream of numbers ends after {place} of {count}"), problem)
    return numbers


def _run_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return _to_signed(value), at
        if shift >= 70:
            raise ValueError("a number that does not end")


def _to_signed(value: int) -> int:
    """The signed number with the same 64 bits. Needed because Arrow's writer stores negative fractions for times before 1970."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _run_of_version_1(data: bytes | memoryview, at: int) -> tuple[Numbers, int]:
    """(the numbers of a run, the position after the run).

    A control byte of 0 to 127 is the length minus 3; a delta of one byte and the first value follow. After a higher control byte `c` come
    256 - `c` values.
    """
    control = data[at]
    if control < 128:
        delta = data[at + 1]
        first, end = _run_varint(data, at + 2)
        return first + np.arange(control + 3, dtype=np.int64) * (delta - 256 if delta > 127 else delta), end
    values = []
    at += 1
    for _ in range(256 - control):
        value, at = _run_varint(data, at)
        values.append(value)
    return np.array(values, np.int64), at


def _run_of_version_2(data: bytes | memoryview, at: int) -> tuple[Numbers, int]:
    first = data[at]
    kind, code = first >> 6, (first >> 1) & 31
    if kind == 0:  # short repeat: "3 bits: bytes of the value - 1, 3 bits: count - 3"
        size = ((first >> 3) & 7) + 1
        return np.full((first & 7) + 3, _to_signed(_read_big_endian(data, at + 1, size)), np.int64), at + 1 + size
    length = ((first & 1) << 8 | data[at + 1]) + 1
    at += 2
    if kind == 1:
        return _unpack(data, at, length, _WIDTHS[code])
    if kind == 2:
        return _unpack_patched(data, at, length, _WIDTHS[code])
    base, at = _run_varint(data, at)
    zigzag, at = _run_varint(data, at)
    delta = (zigzag >> 1) ^ -(zigzag & 1)
    if code == 0:  # all deltas are equal
        return base + np.arange(length, dtype=np.int64) * delta, at
    steps, at = _unpack(data, at, max(length - 2, 0), _WIDTHS[code])
    signed = -steps if delta < 0 else steps
    return np.cumsum(np.concatenate([np.array([base, delta], np.int64), signed]))[:length], at


def _unpack_patched(data: bytes | memoryview, at: int, length: int, width: int) -> tuple[Numbers, int]:
    """(the numbers of a run of patched values, the position after the run).

    The run has a base, and for each value its difference from the base in `width` bits. Differences with more bits are patched: a list has,
    for each of them, the gap from the patched value before, and the patch, its upper bits.
    """
    size, patch_width = (data[at] >> 5) + 1, _WIDTHS[data[at] & 31]
    gap_width, patches = (data[at + 1] >> 5) + 1, data[at + 1] & 31
    base = _read_big_endian(data, at + 2, size)
    sign = 1 << (size * 8 - 1)
    base = -(base & (sign - 1)) if base & sign else base
    values, at = _unpack(data, at + 2 + size, length, width)
    entry_width = next((bits for bits in _WIDTHS if bits >= gap_width + patch_width), 64)
    entries, at = _unpack(data, at, patches, entry_width)
    place = 0
    for entry in entries.tolist():
        place += (entry & ((1 << entry_width) - 1)) >> patch_width
        values[place] |= _to_signed((entry & ((1 << patch_width) - 1)) << width)
    return base + values, at


def _read_big_endian(data: bytes | memoryview, at: int, size: int) -> int:
    if at + size > len(data):
        raise IndexError(at)
    return int.from_bytes(data[at : at + size], "big")


def _unpack(data: bytes | memoryview, at: int, count: int, width: int) -> tuple[Numbers, int]:
    """(`count` numbers of `width` bits each, the highest bit first; the position of the byte after them)."""
    end = at + (count * width + 7) // 8
    if end > len(data):
        raise IndexError(at)
    bits = np.unpackbits(np.frombuffer(data[at:end], np.uint8), count=count * width).reshape(count, width)
    whole = np.zeros((count, 64), np.uint8)
    whole[:, 64 - width :] = bits
    return np.packbits(whole, axis=1).view(">u8").reshape(count).astype(np.int64), end


def decompress_lzo(data: memoryview, at_most: int) -> bytes:
    """The decompressed bytes of a block in the compression LZO1X, which some writers of ORC use and for which pyarrow has no codec.

    Raises ValueError for a damaged block, or if the decompressed block has more than `at_most` bytes.
    """
    try:
        return _decompress_lzo(data, at_most)
    except IndexError:
        raise ValueError("an LZO block that ends too soon") from None


def _decompress_lzo(data: memoryview, at_most: int) -> bytes:
    output = bytearray()
    at = 0

    def read_length(bits: int, most: int) -> int:
        """The length in the low bits of an instruction. If these are 0, it is `most`, plus 255 for each zero byte that follows, plus the next byte."""
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

    state = 0  # how many literals the last instruction ended with: 0 to 3, or 4 for four and more
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
    """Append the `length` bytes that begin `distance` bytes before the end; if `distance` is smaller than `length`, these bytes repeat."""
    start = len(output) - distance
    pattern = output[start : start + length]
    output += (pattern * (length // len(pattern) + 1))[:length]


# --- the tail of a file ---------------------------------------------------------------------------

_FOOTER_LENGTH, _COMPRESSION, _BLOCK_SIZE = 1, 2, 3  # fields of the postscript
_STRIPES, _TYPES, _METADATA, _WRITER, _CALENDAR = 3, 4, 5, 9, 11  # fields of the footer
_SUBTYPES, _ATTRIBUTES = 2, 7  # fields of a type
_STREAMS, _ENCODINGS, _TIME_ZONE = 1, 2, 3  # fields of a stripe's footer
_STRIPE_ROWS = 5  # a field of a stripe's entry in the footer
_NESTED = (10, 11, 12, 13)  # kinds of types: lists, maps, structs, unions
_TIMESTAMPS, _LONG = (9, 18), 4
_SECONDARY = 5  # the kind of stream that has the nanoseconds of times
_VERSION_2 = (2, 3)  # the kinds of encodings with runs of version 2
_LONGEST_NUMBER = 16  # bytes, more than any encoding needs for a fraction
_ORIGINAL = 32 * 1024  # bytes of an uncompressed chunk
_CODECS = {2: "snappy", 4: "lz4_raw", 5: "zstd", 6: "brotli"}
_ZLIB, _LZO = 1, 3
_PROLEPTIC = 2
_JAVA = 0
_LARGEST_BLOCK = 1 << 23  # a chunk's length has 23 bits
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
    """The values of a field that is a list of numbers, in one of the two encodings of Protocol Buffers (packed or not)."""
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
    """The bytes of a field, given what `parse_fields` returns for it."""
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
    """The footer of a stripe (a part of the file with some of its rows). `start`: the position in the file of the stripe's first stream."""

    start: int
    footer: memoryview

    @cached_property
    def time_zone(self) -> str:
        """The writer's time zone, for its times without a zone; empty if the file does not say."""
        return "".join(bytes(part).decode(errors="replace") for part in _parts(self.footer, _TIME_ZONE)[-1:])


@dataclasses.dataclass(frozen=True)
class OrcTail:
    """The decoded end of an ORC file. `content`: the bytes of the file. `end`: where its postscript begins. `footer`: the decompressed footer."""

    content: memoryview
    end: int
    footer: memoryview
    compression: int
    block_size: int

    @cached_property
    def hybrid(self) -> bool:
        """Whether the file uses the hybrid calendar, in which days before 1582-10-15 are in the Julian calendar.

        If the file does not name its calendar, it is hybrid if Java's writer wrote the file. A file of Iceberg's writer is never hybrid,
        although it says so.
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
        """The numbers of the file's flat columns of which the column `name` consists, in their order. `schema`: the file's schema."""
        types = self._types

        def flat(number: int) -> Iterator[int]:
            if _number(types[number], 1) in _NESTED:
                for part in _numbers(types[number], _SUBTYPES):
                    yield from flat(part)
            else:
                yield number

        return list(flat(_numbers(types[0], _SUBTYPES)[schema.get_field_index(name)]))

    def fractions(self, stripe: Stripe, column: int, count: int) -> Numbers:
        """The nanoseconds within the second of each time of a column in a stripe, except nulls. `count`: how many times are not null."""
        at = stripe.start
        for stream in _parts(stripe.footer, _STREAMS):
            kind, stream_column, length = (_number(stream, field) for field in (1, 2, 3))
            if kind == _SECONDARY and stream_column == column:
                encoding = sum(
                    _number(message, 1) for message in _parts(stripe.footer, _ENCODINGS)[column : column + 1]
                )
                data = self._decompress_stream(self.content[at : at + length], _LONGEST_NUMBER * count + 1024)
                packed = unsigned_numbers(data, count, 2 if encoding in _VERSION_2 else 1)
                # "The low three bits": how many zeros at the end of the number are left out, minus one.
                zeros = packed & 7
                fractions: Numbers = (packed >> 3) * 10 ** np.where(zeros > 0, zeros + 1, 0)
                return fractions
            at += length
        if count:
            raise ValueError(f"a stripe has no nanoseconds for the timestamps in column {column}")
        return np.zeros(0, np.int64)

    @cached_property
    def reader_of_seconds(self) -> pa.orc.ORCFile:
        """A reader of the file `with_seconds`."""
        return pa.orc.ORCFile(pa.PythonFile(self.with_seconds(), mode="r"))

    def with_seconds(self) -> RangesFile:
        """The same file, with a footer that declares times as numbers.

        For such columns, pyarrow reads the stored seconds since 2015 in the writer's time zone, in any year.
        """
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


def read_tail(content: Data) -> OrcTail:
    """The decoded end of the ORC file with the bytes `content`. Raises ValueError if these do not end like an ORC file."""
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
    """The decompressed bytes of a stream. `at_most`: stop after about this many bytes.

    The stream consists of chunks. Before each are three bytes, "length << 1 | is original": an original chunk is not compressed.
    """
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
    if codec in (
        "zstd",
        "brotli",
    ):  # the compressed data mark where they end, so the decompressed length need not be known
        return bytes(pa.CompressedInputStream(pa.BufferReader(chunk), codec).read(at_most))
    try:
        length = _varint(chunk, 0)[0] if codec == "snappy" else _lz4_length(chunk)
    except IndexError:
        raise ValueError("a chunk that ends too soon") from None
    if length > at_most:
        raise ValueError(f"a chunk of {length} bytes, but {at_most} at most are allowed")
    return bytes(pa.Codec(codec).decompress(chunk, length, asbytes=True))


def _lz4_length(chunk: memoryview) -> int:
    """The decompressed length of an LZ4 block. The block is a sequence of "token, literals, offset, match"; the last item has literals only."""
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


UTC_NAMES = {
    "",
    "UTC",
    "GMT",
    "Z",
    "UCT",
    "Zulu",
    "Universal",
    "Greenwich",
    "Etc/UTC",
    "Etc/GMT",
    "Etc/UCT",
    "Etc/Zulu",
}
_BASE = 1420070400  # "seconds since 2015-01-01 00:00:00 in the writer's time zone"
_MICROS = 10**6
_LONGEST = 2**63 // _MICROS


class StoredTimes:
    """Converts the times of a column in one stripe, which pyarrow has read as numbers of seconds. `column_label`: the column, as errors name it.

    In the methods, `column` has the seconds, and `number` is the number of the flat column in the file.
    """

    def __init__(self, tail: OrcTail, stripe: Stripe, column_label: str) -> None:
        self._tail, self._stripe, self._column_label = tail, stripe, column_label

    def zoned(self, column: pa.Array, number: int) -> pa.Array:
        """The times of a column of instants, which ORC stores in UTC, whatever the writer's time zone."""
        seconds, fractions = self._seconds(column, number, _BASE)
        return self._array(column, _gregorian(seconds, "UTC", self._tail.hybrid), fractions, "UTC")

    def instants(self, column: pa.Array, number: int) -> pa.Array:
        """The times of a column without a zone as instants: when a clock in the writer's time zone showed these times."""
        zone = self._zone
        seconds, fractions = self._seconds(column, number, _base(zone))
        return self._array(column, _gregorian(seconds, zone, self._tail.hybrid), fractions, "UTC")

    def local(self, column: pa.Array, number: int) -> pa.Array:
        """The times of a column without a zone, as a clock in the writer's time zone showed them."""
        zone = self._zone
        seconds, fractions = self._seconds(column, number, _base(zone))
        old = seconds < LOCAL_MEAN_TIME_END
        local = _to_local(seconds, zone)
        if old.any():
            local[old] = ZoneHistory.from_zone(zone).local_seconds(seconds[old], self._tail.hybrid)
        return self._array(column, local, fractions, None)

    @property
    def _zone(self) -> str:
        return "UTC" if self._stripe.time_zone in UTC_NAMES else self._stripe.time_zone

    def _seconds(self, column: pa.Array, number: int, base: int) -> tuple[Numbers, Numbers]:
        """(seconds since 1970, nanoseconds within the second) of each row; 0 where the column is null."""
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        fractions = np.zeros(len(column), np.int64)
        fractions[valid] = self._tail.fractions(self._stripe, number, int(valid.sum()))
        seconds = np.where(valid, view_numbers(column, np.int64), 0)
        if (np.abs(seconds) > _LONGEST - _BASE).any():
            raise SchemaError(
                f"{self._column_label} has a time beyond what microseconds in 64 bits can express: leave the column out with lookup.columns"
            )
        seconds += np.where(valid, base, 0)
        # Java's writers round seconds before 1970 towards 1970.
        seconds -= (seconds < 0) & (fractions > 999_999)
        return seconds, fractions

    def _array(self, column: pa.Array, seconds: Numbers, fractions: Numbers, zone: str | None) -> pa.Array:
        if (fractions % 1000).any():
            raise SchemaError(
                f"{self._column_label} has nanoseconds and cannot be read as {pa.timestamp('us', zone)}: leave the column out with "
                "lookup.columns, or write its times in microseconds"
            )
        return build_array(column, seconds * _MICROS + fractions // 1000, pa.timestamp("us", zone))


def _gregorian(seconds: Numbers, zone: str, hybrid: bool) -> Numbers:
    old = seconds < LOCAL_MEAN_TIME_END
    if old.any():
        seconds[old] = ZoneHistory.from_zone(zone).gregorian_seconds(seconds[old], hybrid)
    return seconds


@functools.lru_cache(maxsize=64)
def _base(zone: str) -> int:
    """The Unix second at which 2015 began in a time zone."""
    at = _BASE
    # Twice, because the offset at the first guess may differ from the offset at the beginning of 2015.
    for _ in range(2):
        at += _BASE - int(_to_local(np.array([at], np.int64), zone)[0])
    return at


def _to_local(seconds: Numbers, zone: str) -> Numbers:
    """For each instant (Unix seconds), the Unix second at which a clock in UTC shows what a clock in `zone` shows at the instant."""
    fixed = fixed_offset(zone)
    if fixed is not None:
        return seconds + fixed
    try:
        instants = pa.array(seconds).cast(pa.timestamp("s", tz=zone))
        return np.array(pc.local_timestamp(instants).cast(pa.int64()))
    except pa.ArrowInvalid:
        raise UnknownZoneError(zone) from None


_SPARK_TYPE = b"spark.sql.catalyst.type"
_SPARK_VERSION = b"org.apache.spark.version"
# Pyarrow's message about a time in an ORC file that it cannot read.
_OUT_OF_RANGE = "out of range for nanosecond resolution"
_INSTANT, _LOCAL = pa.timestamp("us", tz="UTC"), pa.timestamp("us")


class OrcIndex(FileIndex):
    """The index of an ORC file. `declared`: the columns that the user declares, because Hive's files do not say which times are instants.

    It does not keep the file's bytes, `content`, because the indexes of many files are kept.
    """

    def __init__(
        self, file: FileVersion, content: Data, ranges: list[Range], declared: pa.Schema | None = None
    ) -> None:
        self._file, self._ranges = file, ranges
        self._raw = pa.orc.ORCFile(pa.BufferReader(content)).schema
        names = self._raw.names
        # Old versions of Hive write `_col0`, `_col1`, … into files instead of the names of the table's columns.
        self.nameless = bool(names) and all(name.startswith("_col") for name in names)
        spark_types = {field.name: _read_spark_type(field) for field in self._raw}
        typed = typed_fields(list(self._raw), {name: kind for name, kind in spark_types.items() if kind}, file.url)
        by_spark = _SPARK_VERSION in (self._raw.metadata or {})
        declared_fields = list(declared or ()) if self.nameless else _by_name(names, declared)
        declared_fields += [None] * (len(names) - len(declared_fields))
        self._stored = pa.schema(
            [
                field.with_type(
                    _mark_instants(
                        field.type, spark_types[field.name], by_spark, declared_field.type if declared_field else None
                    )
                )
                for field, declared_field in zip(typed, declared_fields, strict=False)
            ]
        )
        self.schema = lenient_schema(self._stored, file.url)
        self.units = [Unit(0, 0)]
        self._times = {field.name for field in self._raw if _has_times(field.type)}
        self._converts: dict[str, list[Convert | None]] = {}
        tail = read_tail(content)
        for raw, stored in zip(self._raw, self._stored, strict=True):
            leaves = list(_leaves(raw.type, stored.type, tail)) if unreadable(stored.type) is None else []
            if any(leaves):
                self._converts[raw.name] = leaves

    @property
    def stored_schema(self) -> pa.Schema:
        return self._stored

    def ranges(self, unit: Unit, columns: Sequence[str]) -> list[Range]:
        return self._ranges

    def batches(self, unit: Unit, columns: Sequence[str], source: RangesFile) -> Iterator[pa.RecordBatch]:
        with reading(self._file, "orc"):
            # If no column is requested, the reader returns no rows, so the first column is read to count them.
            read = list(columns) or self.schema.names[:1]
            source.seek(0)
            content = decompressed(self._file, source.read())
            tail, file = read_tail(content), pa.orc.ORCFile(pa.BufferReader(content))
            as_it_is = self._times.isdisjoint(read) or all(stripe.time_zone in UTC_NAMES for stripe in tail.stripes)
            for number in range(file.nstripes):
                self._check_room(tail, number, read)
                try:
                    batch = file.read_stripe(number, columns=self._select_columns(read)) if as_it_is else None
                except pa.ArrowInvalid as problem:
                    if _OUT_OF_RANGE not in str(problem):
                        raise
                    batch = None
                if batch is None:
                    batch = self._read_exact_times(tail, number, read, columns)
                else:
                    batch = convert_columns(batch.select(list(columns)), self._converts)
                for start in range(0, batch.num_rows, BATCH_ROWS):
                    yield batch.slice(start, BATCH_ROWS)

    def _check_room(self, tail: OrcTail, number: int, columns: Sequence[str]) -> None:
        """Raise MemoryError if a stripe does not fit into free memory. A stripe is read as a whole, and a few bytes may stand for many rows."""
        rows = tail.rows[number]
        size = rows * sum(_least_bytes(self._raw.field(name).type) for name in columns)
        if not memory.has_room(size):
            raise MemoryError(
                f"{rows} rows in one stripe take at least {size} bytes, but only {memory.free_bytes()} are free"
            )

    def _select_columns(self, columns: Sequence[str]) -> list[str] | None:
        """The columns to request from pyarrow's reader; None (all columns) if it would take a name with a dot for a field of a struct."""
        structs = {field.name for field in self._raw if pa.types.is_nested(field.type)}
        mistaken = any(name[:at] in structs for name in columns for at, mark in enumerate(name) if mark == ".")
        return None if mistaken else list(columns)

    def _read_exact_times(
        self, tail: OrcTail, number: int, read: Sequence[str], columns: Sequence[str]
    ) -> pa.RecordBatch:
        """The rows of a stripe, even if it has times that pyarrow cannot hold, or times of a writer whose time zone is not UTC.

        `columns`: the columns to return. `read`: the same columns, or another one if there are none, because pyarrow needs one to count the rows.
        """
        converts = dict(self._converts)
        for name in self._times.intersection(read):
            times = StoredTimes(tail, tail.stripes[number], f"column {name!r} of {self._file.url}")
            raw, stored = self._raw.field(name).type, self._stored.field(name).type
            converters = iter(self._converts.get(name) or [None] * _leaf_count(raw))
            numbers = iter(tail.leaf_columns(name, self._raw))
            converts[name] = list(_exact_leaves(raw, stored, times, numbers, converters))
        batch = tail.reader_of_seconds.read_stripe(number, columns=self._select_columns(read))
        return convert_columns(batch.select(list(columns)), converts)


def _leaves(raw: pa.DataType, stored: pa.DataType, tail: OrcTail) -> Iterator[Convert | None]:
    """For each flat part of a column, the function that converts what pyarrow reads to the file's type and to the Gregorian calendar."""
    shape, parts = split_type(raw)
    if shape is not None:
        for raw_part, stored_part in zip(parts, split_type(stored)[1], strict=True):
            yield from _leaves(raw_part, stored_part, tail)
    elif pa.types.is_date32(raw):
        yield gregorian_dates if tail.hybrid else None
    elif pa.types.is_timestamp(raw):
        # pyarrow's nanoseconds can hold only times for which both calendars agree, if they were written in UTC.
        instant = stored.tz is not None and raw.tz is None
        yield functools.partial(_cast, kind=pa.timestamp("ns", tz="UTC")) if instant else None
    else:
        yield None if raw == stored else functools.partial(_cast, kind=stored)


def _exact_leaves(
    raw: pa.DataType,
    stored: pa.DataType,
    times: StoredTimes,
    numbers: Iterator[int],
    converts: Iterator[Convert | None],
) -> Iterator[Convert | None]:
    """For each flat part of a column, its conversion if times are read as numbers. `converts`: the conversions for all other types."""
    shape, parts = split_type(raw)
    if shape is not None:
        for raw_part, stored_part in zip(parts, split_type(stored)[1], strict=True):
            yield from _exact_leaves(raw_part, stored_part, times, numbers, converts)
        return
    column, convert = next(numbers), next(converts)
    if not pa.types.is_timestamp(raw):
        yield convert
    elif raw.tz is not None:
        yield functools.partial(times.zoned, number=column)
    elif stored.tz is not None:
        yield functools.partial(times.instants, number=column)
    else:
        yield functools.partial(times.local, number=column)


def _least_bytes(kind: pa.DataType) -> int:
    """The smallest number of bytes that a value of type `kind` may take."""
    try:
        return int(kind.bit_width + 7) // 8
    except ValueError:  # for text and nested types
        return 4


def _leaf_count(kind: pa.DataType) -> int:
    shape, parts = split_type(kind)
    return 1 if shape is None else sum(map(_leaf_count, parts))


def _has_times(kind: pa.DataType) -> bool:
    return pa.types.is_timestamp(kind) or any(map(_has_times, split_type(kind)[1]))


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    return column.cast(kind)


def _by_name(names: Sequence[str], declared: pa.Schema | None) -> list[pa.Field | None]:
    folded = {field.name.lower(): field for field in declared or ()}
    return [folded.get(name.lower()) for name in names]


def _read_spark_type(field: pa.Field) -> Any:
    """The type that Spark has noted in the file for a field, as Spark's JSON of a type; None without such a note."""
    kind = field.type
    if pa.types.is_struct(kind):
        return {"type": "struct", "fields": [{"name": part.name, "type": _read_spark_type(part)} for part in kind]}
    if pa.types.is_list(kind):
        return {"type": "array", "elementType": _read_spark_type(kind.value_field)}
    if pa.types.is_map(kind):
        return {
            "type": "map",
            "keyType": _read_spark_type(kind.key_field),
            "valueType": _read_spark_type(kind.item_field),
        }
    text = (field.metadata or {}).get(_SPARK_TYPE)
    return None if text is None else text.decode(errors="replace")


def _mark_instants(kind: pa.DataType, spark_type: Any, by_spark: bool, declared: pa.DataType | None) -> pa.DataType:
    """The type `kind`, with instants instead of times without a zone where Spark's note or the declared type says so.

    Spark writes its type TIMESTAMP, an instant, as a time without a zone. `by_spark`: Spark has written the file.
    """
    if pa.types.is_timestamp(kind) and kind.tz is None:
        if spark_type is None:
            return _INSTANT if by_spark or (declared is not None and declared == _INSTANT) else _LOCAL
        return _LOCAL if str(spark_type).startswith("timestamp_ntz") else _INSTANT
    shape, parts = split_type(kind)
    if shape is None:
        return kind
    declared_shape, declared_parts = (None, []) if declared is None else split_type(declared)
    declared_parts = declared_parts if declared_shape == shape else [None] * len(parts)
    if pa.types.is_struct(kind):
        inner = [field["type"] for field in spark_type["fields"]]
    else:
        inner = (
            [spark_type["keyType"], spark_type["valueType"]] if pa.types.is_map(kind) else [spark_type["elementType"]]
        )
    timed = [
        _mark_instants(part, part_type, by_spark, declared_part)
        for part, part_type, declared_part in zip(parts, inner, declared_parts, strict=True)
    ]
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(part) for field, part in zip(kind, timed, strict=True)])
    if pa.types.is_map(kind):
        return pa.map_(kind.key_field.with_type(timed[0]), kind.item_field.with_type(timed[1]))
    return pa.list_(kind.value_field.with_type(timed[0]))
