"""The rows of an Iceberg table by the specification, read slowly and plainly: neither PyIceberg nor the package is asked."""

import dataclasses
import functools
import gzip
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import orc

from tests.support.delta_evaluation import checked_values
from tests.support.iceberg_manifests import Entry, File, Meta, every_field, find_spec, read_list, read_manifest
from tests.support.iceberg_values import ID_KEYS, Field, Kind, arrow_field, from_json, from_raw, is_nan, ordered

DATA, POSITION, EQUALITY = range(3)
PATH_ID, PLACE_ID = 2147483546, 2147483545
"""The columns of files with position deletes."""
Row = dict[int, Any]
"""Values by field id; of structs too."""
_NAMES = "schema.name-mapping.default"


def load(metadata: Path) -> Meta:
    """A metadata.json, plain or packed, in the form of format 2."""
    data = metadata.read_bytes()
    meta: Meta = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    if "schemas" not in meta:
        meta |= {"schemas": [{"schema-id": 0, **meta["schema"]}], "current-schema-id": 0}
    if "partition-specs" not in meta:
        meta["partition-specs"] = [{"spec-id": 0, "fields": meta["partition-spec"]}]
    return meta


def read(metadata: Path, **of: Any) -> pa.Table:
    """The rows, as Spark has them, of what `Oracle` takes."""
    return Oracle(metadata, **of).table()


@dataclasses.dataclass(frozen=True)
class _Deletes:
    """Rows that an equality delete file names, by the paths to its columns: of its partition or, `is_global`, of all."""

    entry: Entry
    is_global: bool
    paths: tuple[tuple[int, ...], ...]
    keys: frozenset[tuple[Any, ...]]


class Oracle:
    """A snapshot: that of an id, of a branch or tag, at a time, or the current one."""

    def __init__(
        self,
        metadata: Path,
        *,
        snapshot: int | None = None,
        branch: str | None = None,
        tag: str | None = None,
        at_ms: int | None = None,
    ) -> None:
        self.meta, self.home = load(metadata), metadata.parent.parent
        meta, ref = self.meta, branch or tag
        if at_ms is not None:
            snapshot = [entry for entry in meta["snapshot-log"] if entry["timestamp-ms"] <= at_ms][-1]["snapshot-id"]
        elif ref not in (None, "main"):
            snapshot = meta["refs"][ref]["snapshot-id"]
        travels = snapshot is not None and branch is None
        snapshot_id = meta.get("current-snapshot-id") if snapshot is None else snapshot
        self.snapshot = next(
            (entry for entry in meta.get("snapshots") or [] if entry["snapshot-id"] == snapshot_id), None
        )
        schema = meta["current-schema-id"]
        if travels and self.snapshot is not None:
            schema = self.snapshot.get("schema-id", schema)
        self.fields: list[Field] = next(entry["fields"] for entry in meta["schemas"] if entry["schema-id"] == schema)
        self._every = every_field(meta) | {field["id"]: field for field in self.fields}
        mapping = (meta.get("properties") or {}).get(_NAMES)
        self._mapping = None if mapping is None else json.loads(mapping)

    def local(self, location: str) -> Path:
        """Where a file of the table is on this disk."""
        home: str = self.meta["location"]
        if location.startswith(home + "/"):
            return self.home / location[len(home) + 1 :]
        return Path(location.removeprefix("file://"))

    @functools.cached_property
    def manifests(self) -> list[dict[str, Any]]:
        return [] if self.snapshot is None else read_list(self.local(self.snapshot["manifest-list"]))

    @functools.cached_property
    def entries(self) -> list[Entry]:
        return [entry for manifest in self.manifests for entry in self.read_entries(manifest)]

    def read_entries(self, manifest: Mapping[str, Any]) -> list[Entry]:
        return read_manifest(self.local(manifest["manifest_path"]), self.meta, manifest)

    def table(self) -> pa.Table:
        return self.rows(
            row for entry in self.entries if entry.file["content"] == DATA for _, row in self.live_rows(entry)
        )

    def rows(self, rows: Iterable[dict[str, Any]]) -> pa.Table:
        """Rows of `live_rows` as Spark has them."""
        schema = pa.schema([arrow_field(field) for field in self.fields])
        return pa.Table.from_pylist([{name: _spark(value) for name, value in row.items()} for row in rows], schema)

    def live_rows(self, entry: Entry) -> Iterator[tuple[int, dict[str, Any]]]:
        """The rows of a data file that no delete names, by their positions, in the columns of the snapshot's schema."""
        deletes = [delete for delete in self._equality_deletes if entry.sequence < delete.entry.sequence]
        deletes = [delete for delete in deletes if delete.is_global or delete.entry.partition == entry.partition]
        paths = [path for delete in deletes for path in delete.paths]
        field_ids = {field["id"] for field in self.fields} | {path[0] for path in paths}
        deleted = self.deleted_places(entry)
        for place, row in enumerate(self._rows(entry.file, field_ids)):
            if place not in deleted and not any(_key(row, delete.paths) in delete.keys for delete in deletes):
                yield place, {field["name"]: _named(field["type"], row[field["id"]]) for field in self.fields}

    def deleted_places(self, entry: Entry) -> set[int]:
        """The positions of a data file that its deletion vector names or, if it has none, position deletes."""
        path = self.local(entry.file["file_path"])
        for vector, target in self._vectors:
            if target == path:
                assert vector.sequence >= entry.sequence
                start, size = vector.file["content_offset"], vector.file["content_size_in_bytes"]
                data = self.local(vector.file["file_path"]).read_bytes()
                places = checked_values(data[start : start + size], size - 8)
                assert len(places) == vector.file["record_count"]
                return places
        return {
            place
            for delete, rows in self._position_deletes
            if delete.sequence >= entry.sequence and delete.partition == entry.partition
            for target, place in rows
            if target == path
        }

    @functools.cached_property
    def _vectors(self) -> list[tuple[Entry, Path]]:
        return [
            (entry, self.local(entry.file["referenced_data_file"])) for entry in self.entries if is_vector(entry.file)
        ]

    @functools.cached_property
    def _position_deletes(self) -> list[tuple[Entry, list[tuple[Path, int]]]]:
        deletes = []
        for entry in self.entries:
            if entry.file["content"] == POSITION and not is_vector(entry.file):
                columns = _plain_columns(self.local(entry.file["file_path"]), entry.file["file_format"])
                deletes.append((entry, [*zip(map(self.local, columns[PATH_ID]), columns[PLACE_ID], strict=True)]))
        return deletes

    @functools.cached_property
    def _equality_deletes(self) -> list[_Deletes]:
        deletes = []
        for entry in self.entries:
            if entry.file["content"] == EQUALITY:
                paths = tuple(self._find_path(number) for number in entry.file["equality_ids"])
                rows = self._rows(entry.file, {path[0] for path in paths})
                is_global = all(field["transform"] == "void" for field in find_spec(self.meta, entry.file["spec_id"]))
                deletes.append(_Deletes(entry, is_global, paths, frozenset(_key(row, paths) for row in rows)))
        return deletes

    def _find_path(self, number: int) -> tuple[int, ...]:
        """The ids of the structs around a field, and its own."""
        pending: list[tuple[tuple[int, ...], Field]] = [((field["id"],), field) for field in self._every.values()]
        for path, field in pending:
            if path[-1] == number:
                return path
            if isinstance(field["type"], dict) and field["type"]["type"] == "struct":
                pending += [((*path, inner["id"]), inner) for inner in field["type"]["fields"]]
        raise AssertionError(f"no field {number}")

    def _rows(self, file: File, field_ids: Iterable[int]) -> list[Row]:
        """The rows of a file in the given columns, deleted ones too."""
        path, name = self.local(file["file_path"]), file["file_format"]
        columns = _plain_columns(path, name, self._mapping)
        parts = zip(find_spec(self.meta, file["spec_id"]), file["partition"].values(), strict=True)
        identity = {part["source-id"]: value for part, value in parts if part["transform"] == "identity"}
        values_by_id: dict[int, Sequence[Any]] = {}
        for number in field_ids:
            field = self._every[number]
            if number in columns:
                values_by_id[number] = [_projected(field["type"], value) for value in columns[number]]
            elif number in identity:
                values_by_id[number] = [from_raw(field["type"], identity[number])] * file["record_count"]
            else:
                values_by_id[number] = [_default(field)] * file["record_count"]
        return [dict(zip(values_by_id, values, strict=True)) for values in zip(*values_by_id.values(), strict=True)]


def is_vector(file: File) -> bool:
    return bool(file["file_format"].upper() == "PUFFIN")


def _key(row: Row, paths: Iterable[tuple[int, ...]]) -> tuple[Any, ...]:
    """A row's values as equality deletes compare them: null is null, NaN is NaN, and -0.0 is not 0.0."""
    key = []
    for path in paths:
        value: Any = row
        for number in path:
            value = None if value is None else value[number]
        if isinstance(value, float):
            value = "NaN" if is_nan(value) else ordered(value)
        key.append(value)
    return tuple(key)


def _plain_columns(path: Path, name: str, mapping: list[Any] | None = None) -> dict[int, list[Any]]:
    """The values of a file's columns by field id, structs as rows."""
    form = name.lower()
    table = pq.ParquetFile(path).read() if form == "parquet" else orc.ORCFile(path).read()
    fields = [*table.schema]
    if not any(_has_ids(field, ID_KEYS[form]) for field in fields):
        assert mapping is not None
        fields = [_mapped(field, mapping, ID_KEYS[form]) for field in fields]
    columns = {}
    for field, column in zip(fields, table.columns, strict=True):
        number = _id(field, ID_KEYS[form])
        if number is not None:
            kind = column.type
            if pa.types.is_timestamp(kind):
                column = column.cast(pa.timestamp("us", kind.tz))
            columns[number] = [_by_id(field, value, ID_KEYS[form]) for value in column.to_pylist()]
    return columns


def _id(field: pa.Field, key: bytes) -> int | None:
    metadata = field.metadata or {}
    return int(metadata[key]) if key in metadata else None


def _inner(field: pa.Field) -> list[pa.Field]:
    kind = field.type
    if pa.types.is_map(kind):
        return [kind.key_field, kind.item_field]
    return [kind.field(number) for number in range(kind.num_fields)]


def _has_ids(field: pa.Field, key: bytes) -> bool:
    return _id(field, key) is not None or any(_has_ids(inner, key) for inner in _inner(field))


def _mapped(field: pa.Field, mapping: list[Any], key: bytes) -> pa.Field:
    """A field with the ids that a name mapping has for it and those inside of it; as its position says, of a list or map."""
    mapped_field = next((candidate for candidate in mapping if field.name in candidate["names"]), None)
    if mapped_field is None:
        return field
    kind, within = field.type, mapped_field.get("fields") or []
    if pa.types.is_struct(kind):
        kind = pa.struct([_mapped(inner, within, key) for inner in _inner(field)])
    elif pa.types.is_list(kind):
        kind = pa.list_(_mapped(kind.value_field.with_name("element"), within, key))
    elif pa.types.is_map(kind):
        names = zip(_inner(field), ("key", "value"), strict=True)
        kind = pa.map_(*(_mapped(inner.with_name(name), within, key) for inner, name in names))
    return pa.field(
        field.name,
        kind,
        field.nullable,
        None if "field-id" not in mapped_field else {key: str(mapped_field["field-id"])},
    )


def _by_id(field: pa.Field, value: Any, key: bytes) -> Any:
    if value is None:
        return None
    inner = _inner(field)
    if pa.types.is_struct(field.type):
        ids = [(_id(item, key), item) for item in inner]
        return {number: _by_id(item, value[item.name], key) for number, item in ids if number is not None}
    if pa.types.is_list(field.type):
        return [_by_id(inner[0], item, key) for item in value]
    if pa.types.is_map(field.type):
        return [(_by_id(inner[0], item, key), _by_id(inner[1], item_value, key)) for item, item_value in value]
    return value


def _projected(kind: Kind, value: Any) -> Any:
    """A value of a file in a type of the table."""
    if value is None:
        return None
    if isinstance(kind, dict):
        if kind["type"] == "struct":
            return {
                item["id"]: _projected(item["type"], value[item["id"]]) if item["id"] in value else _default(item)
                for item in kind["fields"]
            }
        if kind["type"] == "list":
            return [_projected(kind["element"], item) for item in value]
        return [(_projected(kind["key"], item), _projected(kind["value"], item_value)) for item, item_value in value]
    return uuid.UUID(bytes=value) if kind == "uuid" and isinstance(value, bytes) else value


def _default(field: Field) -> Any:
    """What a column has in rows that were written before it was added."""
    value = from_json(field["type"], field.get("initial-default"))
    return value if value is None or not isinstance(field["type"], dict) else _projected(field["type"], {})


def _named(kind: Kind, value: Any) -> Any:
    """A value with structs by name."""
    if value is None or not isinstance(kind, dict):
        return value
    if kind["type"] == "struct":
        return {field["name"]: _named(field["type"], value[field["id"]]) for field in kind["fields"]}
    if kind["type"] == "list":
        return [_named(kind["element"], item) for item in value]
    return [(_named(kind["key"], item), _named(kind["value"], item_value)) for item, item_value in value]


def _spark(value: Any) -> Any:
    """A value as Spark has it: a UUID is a text."""
    if isinstance(value, dict):
        return {name: _spark(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_spark(item) for item in value)
    return str(value) if isinstance(value, uuid.UUID) else value
