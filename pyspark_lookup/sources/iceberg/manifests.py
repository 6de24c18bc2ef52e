"""Reads manifest lists and manifests, which are Avro files that PyIceberg decodes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, cast

from pyiceberg.avro.reader import Reader
from pyiceberg.avro.resolver import resolve_reader
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

from pyspark_lookup.core.decoding import describe_fault
from pyspark_lookup.errors import DamagedFileError, NotSupportedError, raise_ours
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.sources.iceberg.avro import AvroFile, Decoder, parse_schema
from pyspark_lookup.sources.iceberg.entries import DATA, Entry, Manifest

_NEWEST = 3  # the table format whose manifests have all columns of the earlier formats, and more
_FIELDS = {field.name: place for place, field in enumerate(DATA_FILE_TYPE[_NEWEST].fields)}
ADDED, DELETED = 1, 2
"""The values of an entry's status, except for 0."""
PARTITION_ID = 102
"""The id of the field `partition`."""
_SPEC_ID = "partition-spec-id"

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


@functools.lru_cache(maxsize=64)
def _find_reader(schema: str, form: _Form) -> Reader:
    """A decoder of the records of a file.

    Cached, because the manifests of many commits have the same schema, and for a small manifest this takes most of the time.
    """
    return resolve_reader(parse_schema(schema), form.schema, form.types, form.enums)


def _read_records(file: AvroFile, form: _Form) -> Iterator[Any]:
    """The records of a file. Raises ValueError for a block that is cut off or has bytes left over."""
    reader = _find_reader(file.metadata["avro.schema"], form)
    for count, data in file.blocks():
        decoder = Decoder(data)
        for _ in range(count):
            try:
                yield reader.read(decoder)
            except EOFError:
                raise ValueError("a block is cut off") from None
        if decoder.tell() != len(data):
            raise ValueError("a block has bytes after its records")


def read_manifest_list(location: str, data: bytes) -> list[Manifest]:
    """The manifests of a snapshot. Raises DamagedFileError, which names the file, and NotSupportedError if a manifest is encrypted."""
    try:
        names = [field.name for field in _MANIFEST_LIST_SCHEMA.fields]
        records = _read_records(AvroFile(location, data), _LIST)
        rows = [dict(zip(names, record._data, strict=True)) for record in records]
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
    file = AvroFile(manifest.location, data)
    ids = tuple(field.field_id for field in partition_type(parse_schema(file.metadata["avro.schema"])).fields)
    spec_id = spec_id_of(manifest, file)
    for record in _read_records(file, _MANIFEST):
        status, _, sequence, _, row = record._data
        if int(status) == DELETED:
            continue
        if sequence is None:
            # A file that was added with the manifest has the manifest's sequence number; in format version 1 all numbers are 0.
            if int(status) != ADDED and manifest.sequence:
                raise ValueError(f"the existing file {row.file_path} has no sequence number")
            sequence = manifest.sequence
        yield _entry(row._data, spec_id, ids, int(sequence))


def spec_id_of(manifest: Manifest, file: AvroFile) -> int:
    """The number of a manifest's partition spec. `file`: the manifest itself."""
    return int(file.metadata.get(_SPEC_ID, 0)) if manifest.spec_id is None else manifest.spec_id


def partition_type(schema: Schema) -> StructType:
    """The partitions in a manifest with this schema."""
    return cast("StructType", schema.find_type(PARTITION_ID))


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
    return DamagedFileError(
        f"{redacted_path} is not an Iceberg {file_kind}: {describe_fault(problem)}: restore this file"
    )
