"""`AvroFile`: an Avro file whose blocks are decompressed one at a time. `Decoder`: the numbers and bytes in a block."""

from __future__ import annotations

import bz2
import functools
import json
import zlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyiceberg.avro.decoder import BinaryDecoder
from pyiceberg.avro.file import MAGIC, MAGIC_SIZE, SYNC_SIZE, AvroFileHeader
from pyiceberg.schema import Schema
from pyiceberg.utils.schema_conversion import LOGICAL_FIELD_TYPE_MAPPING, AvroSchemaConversion

from pyspark_lookup.core.memory import check_room, has_room
from pyspark_lookup.options.conf_file import redact

_BYTES_AT_MOST = 2**29  # the most that the records of a file may take when decompressed
_RECORD_BYTES = 1000  # approximate memory for a record
_NESTED = ("type", "fields", "items", "values")
_LOGICAL_TYPES = ("decimal", "map")


class Decoder(BinaryDecoder):
    """Like PyIceberg's StreamingBinaryDecoder, but several times as fast, because most numbers in a manifest take one byte.

    Raises EOFError at the end of the bytes, ValueError for an impossible length or number.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def tell(self) -> int:
        return self._at

    def read(self, n: int) -> bytes:
        start, self._at = self._at, self._at + n
        if n < 0:
            raise ValueError(f"a negative length, {n}")
        if self._at > len(self._data):
            raise EOFError
        return self._data[start : self._at]

    def skip(self, n: int) -> None:
        self.read(n)

    def read_int(self) -> int:
        data, at = self._data, self._at
        try:
            byte = data[at]
            if byte < 128:
                self._at = at + 1
                return (byte >> 1) ^ -(byte & 1)
            number, shift = byte & 127, 7
            while byte >= 128:
                at += 1
                byte = data[at]
                number |= (byte & 127) << shift
                shift += 7
        except IndexError:
            raise EOFError from None
        if shift > 70:
            raise ValueError("a number of more than 64 bits")
        self._at = at + 1
        return (number >> 1) ^ -(number & 1)

    def read_ints(self, n: int) -> tuple[int, ...]:
        data, at, numbers = self._data, self._at, list[int]()
        try:
            for _ in range(n):
                byte = data[at]
                at += 1
                if byte < 128:
                    numbers.append((byte >> 1) ^ -(byte & 1))
                    continue
                following = data[at]
                if following < 128:
                    at += 1
                    number = (byte & 127) | following << 7
                    numbers.append((number >> 1) ^ -(number & 1))
                    continue
                self._at = at - 1
                numbers.append(self.read_int())
                at = self._at
        except IndexError:
            raise EOFError from None
        self._at = at
        return tuple(numbers)

    def read_int_bytes_dict(self, n: int, dest: dict[int, bytes]) -> None:
        data, end = self._data, len(self._data)
        try:
            for _ in range(n):
                at = self._at
                number, length = data[at], data[at + 1]
                start = at + 2
                if number >= 128 and length < 128:  # the id is two bytes
                    number, length = (number & 127) | length << 7, data[start]
                    start += 1
                stop = start + (length >> 1)
                if number & 1 or length & 129 or stop > end or (number >= 128 and start == at + 2):
                    number = self.read_int() << 1
                    dest[number >> 1] = self.read_bytes()
                    continue
                dest[number >> 1] = data[start:stop]
                self._at = stop
        except IndexError:
            raise EOFError from None

    def skip_int(self) -> None:
        self.read_int()


def _read_header(decoder: Decoder) -> AvroFileHeader:
    """The header at the beginning of a file. PyIceberg's reader of it takes longer than the records of a small manifest.

    Raises EOFError if the header is cut off, ValueError if it is impossible.
    """
    magic = decoder.read(MAGIC_SIZE)
    if magic != MAGIC:
        raise ValueError("it does not begin like an Avro file")
    meta: dict[str, str] = {}
    while count := decoder.read_int():
        if count < 0:  # then the number of bytes follows
            count = -count
            decoder.skip_int()
        for _ in range(count):
            name = decoder.read_utf8()
            meta[name] = decoder.read_utf8()
    return AvroFileHeader(magic, meta, decoder.read(SYNC_SIZE))


class AvroFile:
    """An Avro file in memory. Raises EOFError if its header is cut off, ValueError if its header is impossible.

    PyIceberg's AvroFile uses a compiled decoder (0.12.0), which reads beyond the end of a block, and rounds doubles to floats.
    """

    def __init__(self, location: str, data: bytes) -> None:
        self._location = location
        self._decoder = Decoder(data)
        self._size = len(data)
        self._header = _read_header(self._decoder)

    @property
    def metadata(self) -> dict[str, str]:
        """The texts in the file's header, by name."""
        return self._header.meta

    def blocks(self) -> Iterator[tuple[int, bytes]]:
        """(number of records, their bytes) of each block. Raises ValueError for a damaged block or one that is too large, NotSupportedError if
        there is not enough memory for its records."""
        records = read_bytes = 0
        while self._decoder.tell() != self._size:
            try:
                count, data = self._decoder.read_int(), self._decoder.read_bytes()
            except EOFError:
                raise ValueError("it is cut off") from None
            if count < 0:
                raise ValueError(f"a block has a negative number of records, {count}")
            data = self._decompress(data, _BYTES_AT_MOST - read_bytes)
            if count > len(data):  # a record takes at least one byte, so this count is wrong
                raise ValueError(f"a block claims to have {count} records in {len(data)} bytes")
            records += count
            read_bytes += len(data)
            if not has_room(records * _RECORD_BYTES):
                check_room(records * _RECORD_BYTES, f"{redact('path', self._location)}: {records} records")
            yield count, data
            if self._decoder.read(SYNC_SIZE) != self._header.sync:
                raise ValueError("a block does not end with the file's sync marker")

    def _decompress(self, data: bytes, at_most: int) -> bytes:
        """The content of a block. Raises ValueError if it is more than `at_most` bytes, before they are all in memory."""
        codec = self._header.compression_codec()  # raises ValueError for an unknown codec
        if codec is None:
            return data
        name = self._header.meta["avro.codec"]
        if name == "snappy":
            size = shift = 0
            for byte in data[:5]:  # snappy's blocks begin with the size of their content, as a varint
                size |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    break
            content = b"" if size > at_most else codec.decompress(data)
            is_too_large = size > at_most
        elif name in ("deflate", "bzip2"):
            decoder = zlib.decompressobj(-15) if name == "deflate" else bz2.BZ2Decompressor()
            content = decoder.decompress(data, at_most + 1)
            is_too_large = len(content) > at_most
            if not (is_too_large or decoder.eof):
                raise ValueError("a block is cut off")
        else:
            with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as reader:
                content = reader.read(at_most + 1)
            is_too_large = len(content) > at_most
        if is_too_large:
            raise ValueError(f"its records take more than {_BYTES_AT_MOST} bytes")
        return content


@functools.lru_cache(maxsize=64)
def parse_schema(text: str) -> Schema:
    """The schema of a file, from the text in its header. Cached, because for a small file this takes most of the time."""
    return AvroSchemaConversion().avro_to_iceberg(_expand_schema(json.loads(text), {}))


def _expand_schema(schema: Any, named_types: dict[str, Any]) -> Any:
    """An Avro schema in the form that PyIceberg reads: names of types are replaced by the types, and unknown logical types are left out."""
    if isinstance(schema, list):
        return [_expand_schema(part, named_types) for part in schema]
    if not isinstance(schema, dict):
        return named_types.get(schema, schema)
    expanded_schema = {
        key: _expand_schema(value, named_types) if key in _NESTED else value for key, value in schema.items()
    }
    logical = expanded_schema.get("logicalType")
    if (
        logical is not None
        and logical not in _LOGICAL_TYPES
        and (logical, expanded_schema["type"]) not in LOGICAL_FIELD_TYPE_MAPPING
    ):
        del expanded_schema["logicalType"]
    if expanded_schema["type"] in ("record", "fixed", "enum"):
        named_types[schema["name"]] = expanded_schema
    return expanded_schema
