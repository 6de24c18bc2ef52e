"""Columns whose names or fields in files differ from those in the table: see `StoredColumn`."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.predicate import ColumnStats
from pyspark_lookup.columnar.types import cast_column, flatten_offsets, list_of_entries, spark_type, split_type
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.errors import SchemaError
from pyspark_lookup.options.enums import FileFormatName
from pyspark_lookup.scan.formats import FileIndex, Unit
from pyspark_lookup.storage.stores import FileVersion, StoredColumn
from pyspark_lookup.versions.model import partition_value

_FIELD_IDS = (b"PARQUET:field_id", b"iceberg.id")  # the metadata keys of Parquet and of ORC
_INSTANT, _LOCAL = pa.timestamp("us", tz="UTC"), pa.timestamp("us")
_UUID_BYTES, _UUID_TEXT = 16, 36
_HEX_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)
_DESCRIBED_BETTER = {
    (_LOCAL, _INSTANT),  # instants without a zone are in UTC
    (pa.date32(), _LOCAL),  # a widened date is the start of its day
    (pa.binary(), pa.string()),  # some writers of Parquet do not mark bytes as text
    (pa.int32(), pa.int16()),  # nor numbers as short
    (pa.int32(), pa.int8()),
}
"""(type in files, type in the table's metadata) of columns that are converted."""
_FEW = 16
_wide: dict[int, tuple[Sequence[StoredColumn], dict[str, StoredColumn]]] = {}
"""Columns by name, for the last tables with many columns; by the identity of the tuple, because its hash takes as long as a search."""
_HYPHENS = (8, 13, 18, 23)


def find_names(
    file: FileVersion, index: FileIndex, planned: pa.Schema, declared: pa.Schema | None = None
) -> dict[str, str]:
    """The name in a file of each planned column that the file has. `declared`: all columns that the files are declared to have, in order.

    Raises SchemaError for a file of columns without names that has more columns than are declared.
    """
    if file.columns is None and declared is not None and index.nameless:
        if len(index.schema) > len(declared):
            raise SchemaError(
                f"{file.url} has {len(index.schema)} columns without names, but lookup.schema has {len(declared)}: "
                f"{', '.join(declared.names)}: declare all of them, in their order"
            )
        stored = dict(zip(declared.names, index.schema.names, strict=False))
        return {name: stored[name] for name in planned.names if name in stored}
    if file.columns is None:
        folded = {name.lower(): name for name in index.schema.names}
        return {name: folded[name.lower()] for name in planned.names if name.lower() in folded}
    columns = {column.name: column for column in file.columns}
    fields = _Fields(index.stored_schema)
    by_place = file.format is not FileFormatName.ORC
    stored_names = {}
    for name in planned.names:
        place = fields.find(columns[name], by_place) if name in columns else None
        if place is not None:
            stored_names[name] = fields.all[place].name
    return stored_names


def type_as_planned(file: FileVersion, index: FileIndex, name: str, stored: str, planned: pa.DataType) -> pa.DataType:
    """The type of a file's column. The table's metadata may say more about it than the file."""
    if file.columns is None:
        return index.schema.field(stored).type
    return _type(index.stored_schema.field(stored).type, planned, _column(file.columns, name))


def stats_as_planned(
    file: FileVersion, index: FileIndex, unit: Unit, stored: str, planned: pa.DataType | None
) -> ColumnStats | None:
    """The bounds of a file's column in the planned type (None: its own type), if they are still bounds in that type."""
    stored_type = index.schema.field(stored).type
    stats = index.stats(unit, stored)
    if stats is None or file.columns is None or stored_type == planned:
        return stats
    if not pa.types.is_temporal(stored_type):
        return None if pa.types.is_binary(stored_type) else stats
    if (stored_type, planned) != (_LOCAL, _INSTANT):
        return None
    low, high = (None if end is None else end.replace(tzinfo=datetime.timezone.utc) for end in (stats.low, stats.high))
    return ColumnStats(low, high, stats.null_count, stats.rows)


def column_as_planned(file: FileVersion, column: pa.Array, name: str, planned: pa.DataType) -> pa.Array:
    """A file's column in the planned type. Raises SchemaError if a value would change."""
    if file.columns is None or (column.type == planned and not pa.types.is_nested(planned)):
        return cast_column(column, planned, name, file.url)
    # A struct may have other fields with the planned names.
    return _array(column, planned, _column(file.columns, name), name, file.url)


def missing_value(file: FileVersion, name: str, planned: pa.DataType) -> object:
    """The value of a column in all rows of a file that lacks it: its partition value, the column's default, or null."""
    text = dict(file.partition or ()).get(name)
    if text is not None:
        return _parse_value(text, planned)
    return None if file.columns is None else _default(_column(file.columns, name), planned)


def may_lack(file: FileVersion, name: str) -> bool:
    """Whether a column that a file lacks may have a value other than null there (a default, or its partition value)."""
    default = None if file.columns is None else _column(file.columns, name).default
    return default is not None or name in dict(file.partition or ())


def missing_column(file: FileVersion, name: str, planned: pa.DataType, rows: int) -> pa.Array:
    """A column that a file lacks, for its rows: see `missing_value`."""
    return _repeat(missing_value(file, name, planned), planned, rows)


def _repeat(value: object, kind: pa.DataType, rows: int) -> pa.Array:
    if value is None:
        return pa.nulls(rows, kind)
    return pa.array([value], kind).take(pa.array(np.zeros(rows, np.int64)))


def _default(column: StoredColumn, kind: pa.DataType) -> object:
    text = column.default
    if text is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: _default(_column(column.parts, field.name), field.type) for field in kind}
    if pa.types.is_nested(kind):
        return []
    return _parse_value(text, kind)


def _parse_value(text: str, kind: pa.DataType) -> object:
    """The value of a text in the metadata, where bytes are written in hexadecimal digits."""
    if pa.types.is_floating(kind):
        return float(text)
    return bytes.fromhex(text) if pa.types.is_binary(kind) else partition_value(text, kind)


def _column(columns: Sequence[StoredColumn], name: str) -> StoredColumn:
    """The stored column of that name; without an entry it has the same name in files."""
    if len(columns) <= _FEW:
        return next((column for column in columns if column.name == name), StoredColumn(name, name, None))
    entry = _wide.get(id(columns))
    if entry is None or entry[0] is not columns:
        entry = columns, {column.name: column for column in reversed(columns)}
        if len(_wide) > _FEW:
            _wide.clear()
        _wide[id(columns)] = entry
    return entry[1].get(name) or StoredColumn(name, name, None)


def _get_field_id(field: pa.Field) -> bytes | None:
    return next((field_id for key in _FIELD_IDS if (field_id := (field.metadata or {}).get(key)) is not None), None)


class _Fields:
    """The fields of a file, or of a struct in it, by field id and by name."""

    def __init__(self, fields: Iterable[pa.Field]) -> None:
        self.all = list(fields)
        self._folded = {field.name.lower(): place for place, field in enumerate(self.all)}

    @cached_property
    def _places(self) -> dict[str, int]:
        """The position of the first field of each name."""
        return {field.name: place for place, field in reversed(list(enumerate(self.all)))}

    @cached_property
    def _by_id(self) -> dict[bytes | None, int]:
        return {_get_field_id(field): place for place, field in reversed(list(enumerate(self.all)))}

    def find(self, column: StoredColumn, by_place: bool = False) -> int | None:
        """The position of a column; None if it is not there. `by_place`: a column without names is found by its position."""
        if column.field_id is None:
            return self._folded.get(column.stored.lower())
        if any(field_id is not None for field_id in self._by_id):
            return self._by_id.get(b"%d" % column.field_id)
        if column.names is None and by_place:
            return column.field_id - 1 if 0 < column.field_id <= len(self.all) else None
        names = (column.stored,) if column.names is None else column.names
        return min((self._places[name] for name in names if name in self._places), default=None)


def _type(stored: pa.DataType, planned: pa.DataType, column: StoredColumn) -> pa.DataType:
    parts = column.parts
    if pa.types.is_struct(planned) and pa.types.is_struct(stored):
        fields, kinds, places = list(stored), [], _Fields(stored)
        for field in planned:
            child = _column(parts, field.name)
            place = places.find(child)
            kinds.append(pa.null() if place is None else _type(fields[place].type, field.type, child))
        return pa.struct([pa.field(field.name, kind) for field, kind in zip(planned, kinds, strict=True)])
    if pa.types.is_list(planned) and split_type(stored)[0] == "list":
        return pa.list_(pa.field("element", _type(stored.value_type, planned.value_type, _column(parts, "element"))))
    if pa.types.is_map(planned) and pa.types.is_map(stored):
        key = _type(stored.key_type, planned.key_type, _column(parts, "key"))
        return pa.map_(key, pa.field("value", _type(stored.item_type, planned.item_type, _column(parts, "value"))))
    spark_stored = spark_type(stored, pa.null())
    as_planned = column.uuid or (spark_stored, planned) in _DESCRIBED_BETTER
    return planned if as_planned else spark_stored


def _array(column: pa.Array, planned: pa.DataType, stored: StoredColumn, name: str, origin: str) -> pa.Array:
    if pa.types.is_struct(planned) and pa.types.is_struct(column.type):
        places = _Fields(column.type)
        arrays, children = column.flatten(), []  # flatten() applies the parent's nulls and offset to the children
        for field in planned:
            child = _column(stored.parts, field.name)
            place = places.find(child)
            if place is None:
                children.append(_repeat(_default(child, field.type), field.type, len(column)))
            else:
                children.append(_array(arrays[place], field.type, child, f"{name}.{field.name}", origin))
        return pa.StructArray.from_arrays(
            children, fields=list(planned), mask=column.is_null() if column.null_count else None
        )
    if pa.types.is_list(planned) and split_type(column.type)[0] == "list":
        child = _column(stored.parts, "element")
        values = _array(column.flatten(), planned.value_type, child, f"{name}.element", origin)
        return pa.ListArray.from_arrays(flatten_offsets(column), values, type=planned)
    if pa.types.is_map(planned) and pa.types.is_map(column.type):
        as_list = list_of_entries(column)
        inner = as_list.flatten()
        keys = _array(inner.field(0), planned.key_type, _column(stored.parts, "key"), f"{name}.key", origin)
        items = _array(inner.field(1), planned.item_type, _column(stored.parts, "value"), f"{name}.value", origin)
        return pa.MapArray.from_arrays(flatten_offsets(as_list), keys, items, type=planned)
    return _text_of_uuids(column) if stored.uuid else cast_column(column, planned, name, origin)


def _text_of_uuids(column: pa.Array) -> pa.Array:
    """16 bytes each as text: 8-4-4-4-12 hexadecimal digits."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    fixed = column.cast(pa.binary()).fill_null(bytes(_UUID_BYTES)).cast(pa.binary(_UUID_BYTES))
    raw_bytes = np.frombuffer(fixed.buffers()[1], np.uint8).reshape(-1, _UUID_BYTES)
    data = raw_bytes[fixed.offset : fixed.offset + len(fixed)]
    digits = _HEX_DIGITS[np.stack([data >> 4, data & 15], axis=2).reshape(-1, 2 * _UUID_BYTES)]
    text = np.full((len(data), _UUID_TEXT), ord("-"), np.uint8)
    text[:, [place for place in range(_UUID_TEXT) if place not in _HYPHENS]] = digits
    offsets = np.arange(len(data) + 1, dtype=np.int32) * _UUID_TEXT
    texts = pa.StringArray.from_buffers(len(data), pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(text)))
    return pc.if_else(column.is_null(), pa.scalar(None, pa.string()), texts)
