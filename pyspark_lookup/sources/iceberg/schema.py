"""An Iceberg table's columns: their Arrow types, and the field ids and names that they have in its files."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from pyspark_lookup.columnar.types import MOST_NESTED, lenient_schema, type_of_column
from pyspark_lookup.core.decoding import as_text, as_texts, show
from pyspark_lookup.errors import NotSupportedError
from pyspark_lookup.storage.stores import StoredColumn

_TYPES = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", tz="UTC"),
    "string": pa.string(),
    "uuid": pa.string(),
    "binary": pa.binary(),
    "unknown": pa.string(),  # null in every row
}
_DECIMAL = re.compile(r"decimal\(\s*(\d+)\s*,\s*(\d+)\s*\)")
_FIXED = re.compile(r"fixed\[\s*\d+\s*\]")


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a primitive type that is not inside a list or map. `path`: the names of the structs that it is in, and its own."""

    field_id: int
    path: tuple[str, ...]
    iceberg_type: str
    type: pa.DataType


def arrow_schema(schema: Mapping[str, Any]) -> pa.Schema:
    """The columns of a schema, in the types that Spark reads them as. A column of an unknown type gets an `unreadable_type`."""
    names = [as_text(field["name"]) for field in schema["fields"]]
    types = [type_of_column(_parse_type, field["type"], field["name"]) for field in schema["fields"]]
    return lenient_schema(pa.schema(list(zip(names, types, strict=True))))


def _parse_type(definition: Any, depth: int = 0) -> pa.DataType:
    if depth > MOST_NESTED:
        raise NotSupportedError(f"it has a type nested more than {MOST_NESTED} deep, which is not supported")
    depth += 1
    if isinstance(definition, str):
        if definition in _TYPES:
            return _TYPES[definition]
        decimal = _DECIMAL.fullmatch(definition)
        if decimal is not None and len(decimal[1]) <= 2 and 0 < int(decimal[1]) <= 38 and len(decimal[2]) <= 2:
            return pa.decimal128(int(decimal[1]), int(decimal[2]))
        if _FIXED.fullmatch(definition):
            return pa.binary()
    elif isinstance(definition, dict):
        kind = definition.get("type")
        if kind == "struct":
            return pa.struct(
                [pa.field(as_text(f["name"]), _parse_type(f["type"], depth)) for f in definition["fields"]]
            )
        if kind == "list":
            return pa.list_(pa.field("element", _parse_type(definition["element"], depth)))
        if kind == "map":
            return pa.map_(
                _parse_type(definition["key"], depth), pa.field("value", _parse_type(definition["value"], depth))
            )
    raise NotSupportedError(f"type {show(definition)} is not supported")


def stored_columns(schema: Mapping[str, Any], name_mapping: Sequence[Any] | None) -> tuple[StoredColumn, ...]:
    """How files store the columns: by field id, and in files without ids by the names in `name_mapping` (None: there is no mapping)."""
    return tuple(stored_column(field, name_mapping) for field in schema["fields"])


def stored_column(field: Mapping[str, Any], name_mapping: Sequence[Any] | None) -> StoredColumn:
    return _make_stored_column(
        as_text(field["name"]), int(field["id"]), field["type"], field.get("initial-default"), name_mapping
    )


def _make_stored_column(
    name: str, field_id: int, kind: Any, default: Any, mapping: Sequence[Any] | None
) -> StoredColumn:
    mapped_field: Mapping[str, Any] = next((entry for entry in mapping or () if entry.get("field-id") == field_id), {})
    inner = None if mapping is None else mapped_field.get("fields") or []
    text = None if default is None else default if isinstance(default, str) else json.dumps(default)
    names = None if mapping is None else as_texts(mapped_field.get("names") or [])
    parts = tuple(_parts(kind, inner))
    return StoredColumn(name, name, field_id, parts, names, text, kind == "uuid")


def _parts(kind: Any, mapping: Sequence[Any] | None) -> Iterator[StoredColumn]:
    shape = kind.get("type") if isinstance(kind, dict) else None
    if shape == "struct":
        yield from (stored_column(field, mapping) for field in kind["fields"])
    elif shape == "list":
        yield _make_stored_column("element", int(kind["element-id"]), kind["element"], None, mapping)
    elif shape == "map":
        yield _make_stored_column("key", int(kind["key-id"]), kind["key"], None, mapping)
        yield _make_stored_column("value", int(kind["value-id"]), kind["value"], None, mapping)


def flat_columns(schema: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[Column]:
    """The columns of a schema that can have bounds or partitions; columns of unknown types are left out."""
    for field in schema["fields"]:
        kind, names = field["type"], (*path, as_text(field["name"]))
        if isinstance(kind, dict) and kind.get("type") == "struct":
            yield from flat_columns(kind, names)
        elif isinstance(kind, str):
            try:
                yield Column(int(field["id"]), names, kind, _parse_type(kind))
            except NotSupportedError:
                continue


def find_field(schemas: Sequence[Mapping[str, Any]], field_id: int) -> tuple[Mapping[str, Any], ...]:
    """The structs that lead to a field, and the field, in the first schema that has one with that id; empty if none has."""
    return next((field_path for schema in schemas if (field_path := _find(schema["fields"], field_id))), ())


def _find(fields: Sequence[Mapping[str, Any]], field_id: int) -> tuple[Mapping[str, Any], ...]:
    for field in fields:
        if int(field["id"]) == field_id:
            return (field,)
        kind = field["type"]
        if isinstance(kind, dict) and kind.get("type") == "struct" and (inner := _find(kind["fields"], field_id)):
            return (field, *inner)
    return ()
