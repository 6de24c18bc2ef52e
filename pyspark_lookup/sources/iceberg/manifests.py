"""Reads manifest lists and manifests, which are Avro files that PyIceberg decodes."""

from __future__ import annotations

import bz2
import dataclasses
import functools
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

import pyarrow as pa
from pyiceberg.avro.decoder import BinaryDecoder
from pyiceberg.avro.file import META_SCHEMA, AvroFile, AvroFileHeader, Block
from pyiceberg.avro.reader import Reader
from pyiceberg.avro.resolver import construct_reader, resolve_reader
from pyiceberg.io import InputFile, InputStream
from pyiceberg.manifest import (
    DATA_FILE_TYPE,
    MANIFEST_ENTRY_SCHEMAS,
    MANIFEST_LIST_FILE_SCHEMAS,
    DataFile,
    DataFileContent,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    PartitionFieldSummary,
)
from pyiceberg.schema import Schema
from pyiceberg.types import StructType
from pyiceberg.utils.lazydict import LazyDict
from pyiceberg.utils.schema_conversion import LOGICAL_FIELD_TYPE_MAPPING, AvroSchemaConversion

from pyspark_lookup.core.memory import check_room
from pyspark_lookup.errors import DamagedFileError, NotSupportedError, raise_ours
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.sources.iceberg.entries import DATA, Entry, Manifest

_NEWEST = 3  # the table format whose manifests have all columns of the earlier formats, and more
_FIELDS = {field.name: place for place, field in enumerate(DATA_FILE_TYPE[_NEWEST].fields)}
_ADDED, _DELETED = 1, 2
_PARTITION_ID = 102
_SPEC_ID = "partition-spec-id"


_SYNC_BYTES = 16
_BYTES_AT_MOST = 2**29  # the most that the records of a file may take when decompressed
_RECORD_BYTES = 1000  # approximate memory for a record
_NESTED = ("type", "fields", "items", "values")
_LOGICAL_TYPES = ("decimal", "map")
# Format 1 leaves out columns that later formats require. This reader needs none of them.
_MANIFEST_LIST_SCHEMA = Schema(
    *(field.model_copy(update={"required": False}) for field in MANIFEST_LIST_FILE_SCHEMAS[_NEWEST].fields)
)


@dataclasses.dataclass(frozen=True, eq=False)
class _Form:
    """The columns of a kind of Avro file, and the Python types of its records and enumerations, by field id."""

    schema: Schema
    types: dict[int, Any]
    enums: dict[int, Any]


_LIST = _Form(_MANIFEST_LIST_SCHEMA, {-1: ManifestFile, 508: PartitionFieldSummary}, {517: ManifestContent})
_MANIFEST = _Form(
    MANIFEST_ENTRY_SCHEMAS[_NEWEST],
    {-1: ManifestEntry, 2: DataFile},
    {0: ManifestEntryStatus, 134: DataFileContent},
)


class _Decoder(BinaryDecoder):
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


_HEADER = construct_reader(
    META_SCHEMA, {-1: AvroFileHeader}
)  # for a small manifest, this takes longer than its records


class _AvroFile(AvroFile[Any]):
    """PyIceberg's AvroFile, with a decoder that stops at the end of its bytes.

    Raises ValueError for a block that is cut off or has bytes after its records. PyIceberg's compiled decoder (0.12.0) reads beyond the end,
    and rounds doubles to floats.
    """

    def __init__(self, input_file: InputFile, form: _Form) -> None:
        super().__init__(input_file)
        self.form = form

    def __enter__(self) -> _AvroFile:
        with self.input_file.open() as stream:
            self.decoder = _Decoder(stream.read())
        self.header = self._read_header()
        self.schema, self.reader = _resolve(self.header.meta["avro.schema"], self.form)
        self._block_bytes = self._read_bytes = self._records = 0
        return self

    def _read_header(self) -> AvroFileHeader:
        return cast("AvroFileHeader", _HEADER.read(self.decoder))

    def _read_block(self) -> int:
        if self.block:
            if self.block.block_decoder.tell() != self._block_bytes:
                raise ValueError("a block has bytes after its records")
            if self.decoder.read(_SYNC_BYTES) != self.header.sync:
                raise ValueError("a block does not end with the file's sync marker")
        if self.decoder.tell() == len(self.input_file):
            raise EOFError
        try:
            count, data = self.decoder.read_int(), self.decoder.read_bytes()
        except EOFError:
            raise ValueError("it is cut off") from None
        if count < 0:
            raise ValueError(f"a block has a negative number of records, {count}")
        data = self._decompress(data, _BYTES_AT_MOST - self._read_bytes)
        if count > len(data):  # a record takes at least one byte, so this count is wrong
            raise ValueError(f"a block claims to have {count} records in {len(data)} bytes")
        self._records += count
        check_room(
            self._records * _RECORD_BYTES, f"{redact('path', self.input_file.location)}: {self._records} records"
        )
        self._block_bytes = len(data)
        self._read_bytes += len(data)
        self.block = Block(self.reader, count, _Decoder(data))
        return int(count)

    def _decompress(self, data: bytes, at_most: int) -> bytes:
        """The content of a block. Raises ValueError if it is more than `at_most` bytes, before so many bytes are in memory."""
        codec = self.header.compression_codec()  # raises ValueError for an unknown codec
        if codec is None:
            return data
        name = self.header.meta["avro.codec"]
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

    def __next__(self) -> Any:
        while self.block is None or not self.block.has_next():
            try:
                self._read_block()
            except EOFError:
                raise StopIteration from None
        try:
            return next(self.block)
        except EOFError:
            raise ValueError("a block is cut off") from None


@functools.lru_cache(maxsize=64)
def _resolve(schema: str, form: _Form) -> tuple[Schema, Reader]:
    """(the schema of a file, a decoder of its records).

    Cached, because the manifests of many commits have the same schema, and for a small manifest this takes most of the time.
    """
    stored = AvroSchemaConversion().avro_to_iceberg(_expand_schema(json.loads(schema), {}))
    return stored, resolve_reader(stored, form.schema, form.types, form.enums)


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


class _Bytes(InputFile):
    """The content of a file in memory, as an `InputFile`."""

    def __init__(self, location: str, data: bytes) -> None:
        super().__init__(location)
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def exists(self) -> bool:
        return True

    def open(self, seekable: bool = True) -> InputStream:
        return io.BytesIO(self._data)


def read_manifest_list(location: str, data: bytes) -> list[Manifest]:
    """The manifests of a snapshot. Raises DamagedFileError that names the file, NotSupportedError if a manifest is encrypted."""
    try:
        with _AvroFile(_Bytes(location, data), _LIST) as reader:
            names = [field.name for field in _MANIFEST_LIST_SCHEMA.fields]
            rows = [dict(zip(names, record._data, strict=True)) for record in reader]
        return [_manifest(row) for row in rows]
    except NotSupportedError:
        raise
    except Exception as problem:
        raise_ours(_damaged_file_error(location, "manifest list", problem), problem)


def _manifest(row: dict[str, Any]) -> Manifest:
    if row["key_metadata"]:
        raise NotSupportedError(
            f"{redact('path', row['manifest_path'])} is encrypted, which is not supported: read the table with format('iceberg')"
        )
    spec_id, sequence = int(row["partition_spec_id"]), int(row["sequence_number"] or 0)
    counts = [row[f"{name}_files_count"] for name in ("added", "existing")]
    files = None if None in counts else sum(map(int, counts))
    has_data = int(row["content"] or 0) == DATA
    return Manifest(str(row["manifest_path"]), int(row["manifest_length"]), spec_id, sequence, files, has_data)


def read_manifest(manifest: Manifest, data: bytes) -> list[Entry]:
    """The entries of a manifest's live files, i.e. without deleted ones. Raises DamagedFileError that names the manifest, NotSupportedError
    for encryption."""
    try:
        return list(_entries(manifest, data))
    except NotSupportedError:
        raise
    except Exception as problem:
        raise_ours(_damaged_file_error(manifest.location, "manifest", problem), problem)


def _entries(manifest: Manifest, data: bytes) -> Iterator[Entry]:
    with _AvroFile(_Bytes(manifest.location, data), _MANIFEST) as reader:
        spec_id = manifest.spec_id
        if spec_id is None:
            spec_id = int(reader.header.meta.get(_SPEC_ID, 0))
        ids = tuple(field.field_id for field in cast("StructType", reader.schema.find_type(_PARTITION_ID)).fields)
        for record in reader:
            status, _, sequence, _, file = record._data
            if int(status) == _DELETED:
                continue
            if sequence is None:
                # A file that was added with the manifest has the manifest's sequence number; in format 1 all numbers are 0.
                if int(status) != _ADDED and manifest.sequence:
                    raise ValueError(f"the existing file {file.file_path} has no sequence number")
                sequence = manifest.sequence
            yield _entry(file._data, spec_id, ids, int(sequence))


def _entry(row: list[Any], spec_id: int, partition_ids: tuple[int, ...], sequence: int) -> Entry:
    def get(name: str) -> Any:
        return row[_FIELDS[name]]

    location = str(get("file_path"))
    if get("key_metadata"):
        raise NotSupportedError(
            f"{redact('path', location)} is encrypted, which is not supported: read the table with format('iceberg')"
        )
    return Entry(
        location,
        int(get("content") or 0),
        str(get("file_format")).upper(),
        spec_id,
        partition_ids,
        tuple(get("partition")._data),
        sequence,
        int(get("file_size_in_bytes")),
        int(get("record_count")),
        _to_dict(get("lower_bounds")),
        _to_dict(get("upper_bounds")),
        _to_dict(get("null_value_counts")),
        _to_dict(get("value_counts")),
        tuple(get("equality_ids") or ()),
        get("referenced_data_file"),
        get("content_offset"),
        get("content_size_in_bytes"),
    )


def _to_dict(pairs: Mapping[Any, Any] | None) -> dict[Any, Any]:
    """The pairs of a map as a dictionary. Copying PyIceberg's LazyDict directly would be slow, because it looks up each key."""
    return pairs._build_dict() if isinstance(pairs, LazyDict) else dict(pairs or {})


def _damaged_file_error(location: str, file_kind: str, problem: Exception) -> DamagedFileError:
    redacted_path = redact("path", location)
    return DamagedFileError(f"{redacted_path} is not an Iceberg {file_kind}: {type(problem).__name__}: {problem}")
