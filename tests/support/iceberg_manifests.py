"""Manifests and manifest lists of Iceberg tables, read and written by the specification: neither PyIceberg nor the package is asked."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import fastavro

from tests.support.iceberg_values import decimal_of, is_nan, raw, result_kind, to_bytes

Meta = dict[str, Any]
"""A table's metadata.json."""
File = dict[str, Any]
"""A `data_file` of a manifest, its maps as dictionaries, its partition raw, and `spec_id`."""
EXISTING, ADDED, DELETED = range(3)
_MAPS = {
    "column_sizes": (108, 117, 118, "long"),
    "value_counts": (109, 119, 120, "long"),
    "null_value_counts": (110, 121, 122, "long"),
    "nan_value_counts": (137, 138, 139, "long"),
    "lower_bounds": (125, 126, 127, "bytes"),
    "upper_bounds": (128, 129, 130, "bytes"),
}
_AVRO: dict[str, Any] = {
    "boolean": "boolean",
    "int": "int",
    "long": "long",
    "float": "float",
    "double": "double",
    "string": "string",
    "binary": "bytes",
    "date": {"type": "int", "logicalType": "date"},
    "timestamp": {"type": "long", "logicalType": "timestamp-micros", "adjust-to-utc": False},
    "timestamptz": {"type": "long", "logicalType": "timestamp-micros", "adjust-to-utc": True},
    "uuid": {"type": "fixed", "size": 16, "name": "uuid_fixed", "logicalType": "uuid"},
}


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


def spec_of(meta: Meta, number: int) -> list[dict[str, Any]]:
    return next(spec["fields"] for spec in meta["partition-specs"] if spec["spec-id"] == number)


def _kinds(meta: Meta, spec: int) -> dict[str, str]:
    """The types of a partition's values by the names of its fields."""
    fields = every_field(meta)
    return {one["name"]: result_kind(one["transform"], fields[one["source-id"]]["type"]) for one in spec_of(meta, spec)}


def _field(number: int, name: str, kind: Any, required: bool = False) -> dict[str, Any]:
    more = {} if required else {"default": None}
    return {"name": name, "field-id": number, "type": kind if required else ["null", kind], **more}


def _avro(kind: str, name: str) -> Any:
    if kind.startswith("decimal"):
        precision, scale = decimal_of(kind)
        size = ((10**precision).bit_length() + 8) // 8
        decimal = {"logicalType": "decimal", "precision": precision, "scale": scale}
        return {"type": "fixed", "size": size, "name": f"{name}_fixed", **decimal}
    if kind.startswith("fixed"):
        return {"type": "fixed", "size": int(kind[6:-1]), "name": f"{name}_fixed"}
    return _AVRO[kind] if kind != "uuid" else {**_AVRO[kind], "name": f"{name}_uuid"}


def _map(name: str) -> dict[str, Any]:
    number, key, value, kind = _MAPS[name]
    pair = [_field(key, "key", "int", True), _field(value, "value", kind, True)]
    items = {"type": "record", "name": f"k{key}_v{value}", "fields": pair}
    return _field(number, name, {"type": "array", "logicalType": "map", "items": items})


def _entry_schema(meta: Meta, spec: int) -> dict[str, Any]:
    version = meta["format-version"]
    parts = zip(spec_of(meta, spec), _kinds(meta, spec).values(), strict=True)
    values = [_field(one["field-id"], one["name"], _avro(kind, one["name"])) for one, kind in parts]
    file = [
        *([_field(134, "content", "int", True)] if version > 1 else []),
        _field(100, "file_path", "string", True),
        _field(101, "file_format", "string", True),
        _field(102, "partition", {"type": "record", "name": "r102", "fields": values}, True),
        _field(103, "record_count", "long", True),
        _field(104, "file_size_in_bytes", "long", True),
        *([_field(105, "block_size_in_bytes", "long", True)] if version == 1 else []),
        *map(_map, _MAPS),
    ]
    if version > 1:
        file += [
            _field(135, "equality_ids", {"type": "array", "element-id": 136, "items": "int"}),
            _field(143, "referenced_data_file", "string"),
        ]
    if version > 2:
        file += [
            _field(142, "first_row_id", "long"),
            _field(144, "content_offset", "long"),
            _field(145, "content_size_in_bytes", "long"),
        ]
    sequences = [_field(3, "sequence_number", "long"), _field(4, "file_sequence_number", "long")]
    fields = [
        _field(0, "status", "int", True),
        _field(1, "snapshot_id", "long", version == 1),
        *(sequences if version > 1 else []),
        _field(2, "data_file", {"type": "record", "name": "r2", "fields": file}, True),
    ]
    return {"type": "record", "name": "manifest_entry", "fields": fields}


def _list_schema(version: int) -> dict[str, Any]:
    bounds = [
        _field(509, "contains_null", "boolean", True),
        _field(518, "contains_nan", "boolean"),
        _field(510, "lower_bound", "bytes"),
        _field(511, "upper_bound", "bytes"),
    ]
    summary = {"type": "array", "element-id": 508, "items": {"type": "record", "name": "r508", "fields": bounds}}
    sequences = [
        _field(517, "content", "int", True),
        _field(515, "sequence_number", "long", True),
        _field(516, "min_sequence_number", "long", True),
    ]
    counts = [(504, "added_files", "int"), (505, "existing_files", "int"), (506, "deleted_files", "int")]
    counts += [(512, "added_rows", "long"), (513, "existing_rows", "long"), (514, "deleted_rows", "long")]
    fields = [
        _field(500, "manifest_path", "string", True),
        _field(501, "manifest_length", "long", True),
        _field(502, "partition_spec_id", "int", True),
        *(sequences if version > 1 else []),
        _field(503, "added_snapshot_id", "long", True),
        *(_field(number, f"{name}_count", kind, version > 1) for number, name, kind in counts),
        _field(507, "partitions", summary),
        *([_field(520, "first_row_id", "long")] if version > 2 else []),
    ]
    return {"type": "record", "name": "manifest_file", "fields": fields}


def _write(path: Path, schema: Mapping[str, Any], records: Iterable[Any], metadata: Mapping[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as out:
        fastavro.writer(out, fastavro.parse_schema(dict(schema)), records, codec="deflate", metadata=dict(metadata))


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
    schema = next(one for one in meta["schemas"] if one["schema-id"] == meta["current-schema-id"])
    metadata = {"schema": json.dumps(schema), "schema-id": str(schema["schema-id"])}
    metadata |= {"partition-spec": json.dumps(spec_of(meta, spec)), "partition-spec-id": str(spec)}
    metadata |= {"format-version": str(meta["format-version"]), "content": "deletes" if deletes else "data"}
    _write(path, _entry_schema(meta, spec), records, metadata)
    found: dict[str, Any] = {
        "manifest_length": path.stat().st_size,
        "partition_spec_id": spec,
        "content": int(deletes),
        "sequence_number": sequence,
        "min_sequence_number": min((one.sequence for status, one in entries if status != DELETED), default=sequence),
        "added_snapshot_id": snapshot,
        "partitions": _summary(meta, spec, [entry.file["partition"] for _, entry in entries]),
    }
    for status, name in ((ADDED, "added"), (EXISTING, "existing"), (DELETED, "deleted")):
        files = [entry.file for of, entry in entries if of == status]
        found |= {f"{name}_files_count": len(files), f"{name}_rows_count": sum(file["record_count"] for file in files)}
    return found


def _summary(meta: Meta, spec: int, partitions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for name, kind in _kinds(meta, spec).items():
        values = [value for value in (part[name] for part in partitions) if value is not None]
        known = [value for value in values if not is_nan(value)]
        bounds = {"lower_bound": to_bytes(kind, min(known)), "upper_bound": to_bytes(kind, max(known))} if known else {}
        nulls = {"contains_null": len(values) < len(partitions), "contains_nan": len(known) < len(values)}
        found.append(nulls | bounds)
    return found


def write_list(path: Path, meta: Meta, snapshot: int, sequence: int, manifests: Iterable[Mapping[str, Any]]) -> None:
    version = meta["format-version"]
    metadata = {"snapshot-id": str(snapshot), "sequence-number": str(sequence), "format-version": str(version)}
    _write(path, _list_schema(version), manifests, metadata)


def read_list(path: Path) -> list[dict[str, Any]]:
    """The manifests of a snapshot, with what format 1 leaves out."""
    zeros = ("content", "sequence_number", "min_sequence_number")
    return [{**one, **{name: one.get(name) or 0 for name in zeros}} for one in _read(path)]


def read_manifest(path: Path, meta: Meta, manifest: Mapping[str, Any]) -> list[Entry]:
    """The live files of a manifest, with what they inherit from it."""
    spec, found = manifest["partition_spec_id"], []
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
        own, of_file = (manifest["sequence_number"] if number is None else number for number in sequences)
        found.append(Entry(file, own, of_file, record["snapshot_id"] or manifest["added_snapshot_id"]))
    return found
