"""A Delta table's columns, from the log's JSON: as Arrow types, and by which names its files have them."""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa

from pyspark_lookup.base.decoding import show, text_of
from pyspark_lookup.base.errors import NotSupportedError
from pyspark_lookup.io.stores import StoredColumn

_PHYSICAL, _ID = "delta.columnMapping.physicalName", "delta.columnMapping.id"
_TYPES = {
    "string": pa.string(),
    "long": pa.int64(),
    "integer": pa.int32(),
    "short": pa.int16(),
    "byte": pa.int8(),
    "float": pa.float32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "void": pa.string(),
}
_DECIMAL = re.compile(r"decimal\((\d+),\s*(\d+)\)")


def arrow_schema(schema: Any) -> pa.Schema:
    """The columns of a schema in the log. Raises NotSupportedError for a type that is unknown here, TypeError or ValueError for no schema."""
    return pa.schema(
        [pa.field(text_of(field["name"]), _type_of(field["type"], field["name"])) for field in schema["fields"]]
    )


def _type_of(found: Any, column: str) -> pa.DataType:
    if isinstance(found, str):
        if found in _TYPES:
            return _TYPES[found]
        decimal = _DECIMAL.fullmatch(found)
        if decimal is not None:
            return pa.decimal128(int(decimal[1]), int(decimal[2]))
    elif isinstance(found, dict):
        kind = found.get("type")
        if kind == "struct":
            fields = found["fields"]
            return pa.struct([pa.field(text_of(f["name"]), _type_of(f["type"], column)) for f in fields])
        if kind == "array":
            return pa.list_(pa.field("element", _type_of(found["elementType"], column)))
        if kind == "map":
            return pa.map_(_type_of(found["keyType"], column), pa.field("value", _type_of(found["valueType"], column)))
    raise NotSupportedError(f"column {column!r} is of type {show(found)}, which cannot be read")


def stored_columns(schema: Any, mode: str) -> tuple[StoredColumn, ...]:
    """How files name the columns, under a column mapping (`name` or `id`), or without one (`none`)."""
    return tuple(_stored(field, mode) for field in schema["fields"])


def _stored(field: Any, mode: str) -> StoredColumn:
    metadata = field.get("metadata") or {}
    number = metadata.get(_ID)
    if mode == "id" and not isinstance(number, int):
        raise ValueError(f"column {show(field['name'])} has no {_ID}")
    stored = text_of(field["name"] if mode == "none" else metadata[_PHYSICAL])
    return StoredColumn(text_of(field["name"]), stored, number if mode == "id" else None, _parts(field["type"], mode))


def _parts(found: Any, mode: str) -> tuple[StoredColumn, ...]:
    """The fields of a struct; what a list or a map has, by the names that Arrow gives them."""
    kind = found.get("type") if isinstance(found, dict) else None
    if kind == "struct":
        return tuple(_stored(field, mode) for field in found["fields"])
    if kind == "array":
        return (StoredColumn("element", "element", None, _parts(found["elementType"], mode)),)
    if kind == "map":
        pairs = (("key", found["keyType"]), ("value", found["valueType"]))
        return tuple(StoredColumn(name, name, None, _parts(of, mode)) for name, of in pairs)
    return ()
