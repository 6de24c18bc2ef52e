"""Columns of files under other names, or with fewer fields, than the table has them: see `StoredColumn`."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence

import pyarrow as pa

from pyspark_lookup.columnar.predicate import ColumnStats
from pyspark_lookup.columnar.types import cast_column, list_of_entries, offsets_of, spark_type
from pyspark_lookup.io.stores import FileVersion, StoredColumn
from pyspark_lookup.scan.formats import FileIndex, Unit

_FIELD_ID = b"PARQUET:field_id"
_INSTANT, _LOCAL = pa.timestamp("us", tz="UTC"), pa.timestamp("us")


def find_names(file: FileVersion, index: FileIndex, planned: pa.Schema) -> dict[str, str]:
    """Planned column -> what a file calls it, for those it has."""
    if file.columns is None:
        folded = {name.casefold(): name for name in index.schema.names}
        return {name: folded[name.casefold()] for name in planned.names if name.casefold() in folded}
    columns = {column.name: column for column in file.columns}
    found = {}
    for name in planned.names:
        field = _find(index.stored_schema, columns[name]) if name in columns else None
        if field is not None:
            found[name] = field.name
    return found


def type_as_planned(file: FileVersion, index: FileIndex, name: str, stored: str, planned: pa.DataType) -> pa.DataType:
    """The type of a file's column, of which the table's metadata may say more than the file."""
    if file.columns is None:
        return index.schema.field(stored).type
    return _type(index.stored_schema.field(stored).type, planned, _parts_of(file.columns, name))


def stats_as_planned(
    file: FileVersion, index: FileIndex, unit: Unit, stored: str, planned: pa.DataType | None
) -> ColumnStats | None:
    """The bounds of a file's column in the planned type (None: whatever it is), if they are bounds there."""
    held = index.schema.field(stored).type
    found = index.stats(unit, stored)
    if found is None or file.columns is None or held == planned or not pa.types.is_temporal(held):
        return found
    if (held, planned) != (_LOCAL, _INSTANT):
        return None
    low, high = (None if end is None else end.replace(tzinfo=datetime.timezone.utc) for end in (found.low, found.high))
    return ColumnStats(low, high, found.null_count, found.rows)


def column_as_planned(file: FileVersion, column: pa.Array, name: str, planned: pa.DataType) -> pa.Array:
    """A file's column in the planned type. Raises SchemaError if a value would change."""
    if file.columns is None or column.type == planned:
        return cast_column(column, planned, name, file.url)
    return _array(column, planned, _parts_of(file.columns, name), name, file.url)


def _parts_of(columns: Sequence[StoredColumn], name: str) -> Sequence[StoredColumn]:
    return next((column.parts for column in columns if column.name == name), ())


def _find(fields: Iterable[pa.Field], column: StoredColumn) -> pa.Field | None:
    if column.field_id is not None:
        wanted = b"%d" % column.field_id
        return next((field for field in fields if (field.metadata or {}).get(_FIELD_ID) == wanted), None)
    named = {field.name.casefold(): field for field in fields}
    return named.get(column.stored.casefold())


def _fields(
    found: pa.DataType, planned: pa.DataType, parts: Sequence[StoredColumn]
) -> list[tuple[int | None, Sequence[StoredColumn]]]:
    """For each field of a planned struct its place in the one that was found (None: it has none), and its own parts."""
    columns = {part.name: part for part in parts}
    there = list(found)
    places: list[tuple[int | None, Sequence[StoredColumn]]] = []
    for field in planned:
        column = columns.get(field.name, StoredColumn(field.name, field.name, None))
        own = _find(there, column)
        places.append((None if own is None else there.index(own), column.parts))
    return places


def _type(found: pa.DataType, planned: pa.DataType, parts: Sequence[StoredColumn]) -> pa.DataType:
    if pa.types.is_struct(planned) and pa.types.is_struct(found):
        types = [
            pa.null() if place is None else _type(found.field(place).type, field.type, own)
            for field, (place, own) in zip(planned, _fields(found, planned, parts), strict=True)
        ]
        return pa.struct([pa.field(field.name, kind) for field, kind in zip(planned, types, strict=True)])
    if pa.types.is_list(planned) and pa.types.is_list(found):
        return pa.list_(pa.field("element", _type(found.value_type, planned.value_type, _parts_of(parts, "element"))))
    if pa.types.is_map(planned) and pa.types.is_map(found):
        key = _type(found.key_type, planned.key_type, _parts_of(parts, "key"))
        return pa.map_(key, pa.field("value", _type(found.item_type, planned.item_type, _parts_of(parts, "value"))))
    known = spark_type(found)
    # Instants without a zone are in UTC; a date that was widened begins its day.
    return planned if (known, planned) in ((_LOCAL, _INSTANT), (pa.date32(), _LOCAL)) else known


def _array(column: pa.Array, planned: pa.DataType, parts: Sequence[StoredColumn], name: str, origin: str) -> pa.Array:
    if pa.types.is_struct(planned) and pa.types.is_struct(column.type):
        held = column.flatten()  # which applies the parent's nulls and offset to the children
        children = [
            pa.nulls(len(column), field.type)
            if place is None
            else _array(held[place], field.type, own, f"{name}.{field.name}", origin)
            for field, (place, own) in zip(planned, _fields(column.type, planned, parts), strict=True)
        ]
        return pa.StructArray.from_arrays(
            children, fields=list(planned), mask=column.is_null() if column.null_count else None
        )
    if pa.types.is_list(planned) and pa.types.is_list(column.type):
        values = _array(column.flatten(), planned.value_type, _parts_of(parts, "element"), f"{name}.element", origin)
        return pa.ListArray.from_arrays(offsets_of(column), values, type=planned)
    if pa.types.is_map(planned) and pa.types.is_map(column.type):
        as_list = list_of_entries(column)
        inner = as_list.flatten()
        keys = _array(inner.field(0), planned.key_type, _parts_of(parts, "key"), f"{name}.key", origin)
        items = _array(inner.field(1), planned.item_type, _parts_of(parts, "value"), f"{name}.value", origin)
        return pa.MapArray.from_arrays(offsets_of(as_list), keys, items, type=planned)
    return cast_column(column, planned, name, origin)
