"""Manifests and manifest lists of Iceberg tables, read and written by the specification. PyIceberg is only asked for their Avro schemas."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import fastavro
from pyiceberg import manifest as schemas
from pyiceberg.schema import Schema
from pyiceberg.types import NestedField, StructType
from pyiceberg.utils.schema_conversion import AvroSchemaConversion

from tests.support.iceberg_values import iceberg_type, is_nan, raw, result_kind, to_bytes

Meta = dict[str, Any]
"""A table's metadata.json."""
File = dict[str, Any]
"""A `data_file` of a manifest, its maps as dictionaries, its partition raw, and `spec_id`."""
EXISTING, ADDED, DELETED = range(3)
_MAPS = ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts", "lower_bounds", "upper_bounds")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A live file of a snapshot."""

    file: File
    sequence: int
    file_sequence: int
    snapshot: int

    @property
    def key(self) -> tuple[str, int | None]:
        """What no other live file has: deletion vectors may share a path."""
        return self.file["file_path"], self.file.get("content_offset")

    @property
    def partition(self) -> tuple[Any, ...]:
        return self.file["spec_id"], *map(repr, self.file["partition"].values())


def every_field(meta: Meta) -> dict[int, dict[str, Any]]:
    """The columns of all schemas by id, each as the newest schema that has it."""
    return {field["id"]: field for schema in meta["schemas"] for field in schema["fields"]}


def find_spec(meta: Meta, number: int) -> list[dict[str, Any]]:
    return next(spec["fields"] for spec in meta["partition-specs"] if spec["spec-id"] == number)


def _kinds(meta: Meta, spec: int) -> dict[str, str]:
    """The types of a partition's values by the names of its fields."""
    fields = every_field(meta)
    return {
        field["name"]: result_kind(field["transform"], fields[field["source-id"]]["type"])
        for field in find_spec(meta, spec)
    }


def _entry_schema(meta: Meta, spec: int) -> Schema:
    parts = zip(find_spec(meta, spec), _kinds(meta, spec).values(), strict=True)
    fields = [
        NestedField(field["field-id"], field["name"], iceberg_type(kind), required=False) for field, kind in parts
    ]
    version = meta["format-version"]
    # Files of format 2 may name the data file of their deletes, too.
    file = schemas.data_file_with_partition(StructType(*fields), version if version == 1 else 3)
    return schemas.manifest_entry_schema_with_data_file(version, file)


def _write(path: Path, name: str, schema: Schema, records: Iterable[Any], metadata: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    avro = fastavro.parse_schema(AvroSchemaConversion().iceberg_to_avro(schema, schema_name=name))
    with path.open("wb") as out:
        fastavro.writer(out, avro, records, codec="deflate", metadata=metadata)


def _read(path: Path) -> list[Any]:
    with path.open("rb") as source:
        return list(fastavro.reader(source))


def write_manifest(
    path: Path, meta: Meta, spec: int, snapshot: int, sequence: int, entries: Sequence[tuple[int, Entry]]
) -> dict[str, Any]:
    """Write files of one spec, all of data or all of deletes; what a list says of the manifest, but its location."""
    records = []
    for status, entry in entries:
        file = {**entry.file, "block_size_in_bytes": 1 << 26}
        for name in _MAPS:
            pairs = file.get(name)
            file[name] = None if pairs is None else [{"key": key, "value": value} for key, value in pairs.items()]
        inherited = status == ADDED and entry.sequence == sequence
        records.append(
            {"status": status, "snapshot_id": entry.snapshot, "data_file": file}
            | {"sequence_number": None if inherited else entry.sequence}
            | {"file_sequence_number": None if status == ADDED else entry.file_sequence}
        )
    deletes = any(entry.file.get("content") for _, entry in entries)
    schema = next(
        known_schema for known_schema in meta["schemas"] if known_schema["schema-id"] == meta["current-schema-id"]
    )
    metadata = {"schema": json.dumps(schema), "schema-id": str(schema["schema-id"])}
    metadata |= {"partition-spec": json.dumps(find_spec(meta, spec)), "partition-spec-id": str(spec)}
    metadata |= {"format-version": str(meta["format-version"]), "content": "deletes" if deletes else "data"}
    _write(path, "manifest_entry", _entry_schema(meta, spec), records, metadata)
    manifest: dict[str, Any] = {
        "manifest_length": path.stat().st_size,
        "partition_spec_id": spec,
        "content": int(deletes),
        "sequence_number": sequence,
        "min_sequence_number": min(
            (known_schema.sequence for status, known_schema in entries if status != DELETED), default=sequence
        ),
        "added_snapshot_id": snapshot,
        "partitions": _summary(meta, spec, [entry.file["partition"] for _, entry in entries]),
    }
    for status, name in ((ADDED, "added"), (EXISTING, "existing"), (DELETED, "deleted")):
        files = [entry.file for of, entry in entries if of == status]
        manifest |= {
            f"{name}_files_count": len(files),
            f"{name}_rows_count": sum(file["record_count"] for file in files),
        }
    return manifest


def _summary(meta: Meta, spec: int, partitions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    summaries = []
    for name, kind in _kinds(meta, spec).items():
        values = [value for value in (part[name] for part in partitions) if value is not None]
        numbers = [value for value in values if not is_nan(value)]
        bounds = (
            {"lower_bound": to_bytes(kind, min(numbers)), "upper_bound": to_bytes(kind, max(numbers))}
            if numbers
            else {}
        )
        nulls = {"contains_null": len(values) < len(partitions), "contains_nan": len(numbers) < len(values)}
        summaries.append(nulls | bounds)
    return summaries


def write_list(path: Path, meta: Meta, snapshot: int, sequence: int, manifests: Iterable[Mapping[str, Any]]) -> None:
    version = meta["format-version"]
    metadata = {"snapshot-id": str(snapshot), "sequence-number": str(sequence), "format-version": str(version)}
    _write(path, "manifest_file", schemas.MANIFEST_LIST_FILE_SCHEMAS[version], manifests, metadata)


def read_list(path: Path) -> list[dict[str, Any]]:
    """The manifests of a snapshot, with what format 1 leaves out."""
    zeros = ("content", "sequence_number", "min_sequence_number")
    return [{**manifest, **{name: manifest.get(name) or 0 for name in zeros}} for manifest in _read(path)]


def read_manifest(path: Path, meta: Meta, manifest: Mapping[str, Any]) -> list[Entry]:
    """The live files of a manifest, with what they inherit from it."""
    spec, entries = manifest["partition_spec_id"], []
    kinds = _kinds(meta, spec)
    for record in _read(path):
        if record["status"] == DELETED:
            continue
        file = {**record["data_file"], "spec_id": spec}
        for name in _MAPS:
            pairs = file.get(name)
            file[name] = None if pairs is None else {pair["key"]: pair["value"] for pair in pairs}
        file["content"] = file.get("content") or 0
        file["partition"] = {name: raw(kinds[name], value) for name, value in file["partition"].items()}
        sequences = [record.get(f"{prefix}sequence_number") for prefix in ("", "file_")]
        sequence, file_sequence = (manifest["sequence_number"] if number is None else number for number in sequences)
        entries.append(Entry(file, sequence, file_sequence, record["snapshot_id"] or manifest["added_snapshot_id"]))
    return entries
