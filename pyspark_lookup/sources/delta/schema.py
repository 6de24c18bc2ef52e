"""A Delta table's columns, from the log's JSON: their Arrow types, and the names that they have in its files."""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa

from pyspark_lookup.columnar.types import MOST_NESTED, lenient_schema, type_of_column, with_collations
from pyspark_lookup.core.decoding import as_text, show
from pyspark_lookup.errors import NotSupportedError
from pyspark_lookup.storage.stores import StoredColumn

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
    """The columns of a schema in the log. A column of an unknown type gets an `unreadable_type`. Raises TypeError or ValueError if it is malformed."""
    columns = [
        with_collations(
            pa.field(as_text(field["name"]), type_of_column(_parse_type, field["type"], field["name"])), field
        )
        for field in schema["fields"]
    ]
    return lenient_schema(pa.schema(columns))


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
    elif isinstance(definition, dict):
        kind = definition.get("type")
        if kind == "struct":
            fields = definition["fields"]
            return pa.struct([pa.field(as_text(f["name"]), _parse_type(f["type"], depth)) for f in fields])
        if kind == "array":
            return pa.list_(pa.field("element", _parse_type(definition["elementType"], depth)))
        if kind == "map":
            return pa.map_(
                _parse_type(definition["keyType"], depth),
                pa.field("value", _parse_type(definition["valueType"], depth)),
            )
    raise NotSupportedError(f"type {show(definition)} is not supported")


def stored_columns(schema: Any, mode: str) -> tuple[StoredColumn, ...]:
    """The names of the columns in the files. `mode`: of the column mapping, `name`, `id` or `none`."""
    return tuple(_to_stored_column(field, mode) for field in schema["fields"])


def _to_stored_column(field: Any, mode: str) -> StoredColumn:
    metadata = field.get("metadata") or {}
    number = metadata.get(_ID)
    if mode == "id" and not isinstance(number, int):
        raise ValueError(f"column {show(field['name'])} has no {_ID}")
    stored_name = as_text(field["name"] if mode == "none" else metadata[_PHYSICAL])
    return StoredColumn(
        as_text(field["name"]), stored_name, number if mode == "id" else None, _parts(field["type"], mode)
    )


def _parts(definition: Any, mode: str) -> tuple[StoredColumn, ...]:
    """The fields of a struct, or the parts of a list or map, by Arrow's names for these."""
    kind = definition.get("type") if isinstance(definition, dict) else None
    if kind == "struct":
        return tuple(_to_stored_column(field, mode) for field in definition["fields"])
    if kind == "array":
        return (StoredColumn("element", "element", None, _parts(definition["elementType"], mode)),)
    if kind == "map":
        pairs = (("key", definition["keyType"]), ("value", definition["valueType"]))
        return tuple(StoredColumn(name, name, None, _parts(part_definition, mode)) for name, part_definition in pairs)
    return ()
