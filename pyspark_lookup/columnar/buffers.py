"""Arrow columns as streams of bytes: written piece by piece, read back as one array over a mapped file.

A column of any length is one array, because to gather rows from several chunks, Arrow first copies the
whole column. A column of text or binary gets 64-bit offsets if it has more than 2 GiB; lists and maps
always have 32-bit offsets. These are all streams that a column named `c` can have; its type says which
of them it has:

    c.valid    bits, only if a value is null        c.values   fixed-width values (booleans: bits)
    c.offsets  int32 or int64, rows + 1             c.bytes    text and binary
    c.0, c.1 … streams of the children: elements of a list, entries of a map, fields of a struct
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.keys import Numbers, as_bools, offsets_and_data
from pyspark_lookup.errors import NotSupportedError

_Append = Callable[[str, Any], None]

_INT32_AT_MOST = 2**31 - 1


class ColumnSizes:
    """A column's number of rows and the sizes of its streams. Both must be known before the first byte is written.

    `name`: that of its streams. `column`: that of the column, for errors.
    """

    def __init__(self, name: str, kind: pa.DataType, column: str = "") -> None:
        self.name = name
        self.column = column
        self.kind = kind
        self.rows = 0
        self.nulls = 0
        self.bytes = 0
        self.children = [
            ColumnSizes(f"{name}.{number}", child, column) for number, child in enumerate(child_types(kind))
        ]

    def add(self, array: pa.Array) -> None:
        self.rows += len(array)
        self.nulls += array.null_count
        if is_bytes(self.kind):
            offsets, _ = offsets_and_data(array)
            self.bytes += int(offsets[-1] - offsets[0])
        for sizes, child in zip(self.children, child_arrays(array), strict=True):
            sizes.add(child)

    def as_codes(self, codes: pa.DataType) -> ColumnSizes:
        """The sizes of a column that stores, for each of these rows, a code instead of the value. `codes`: the type of the codes."""
        sizes = ColumnSizes(self.name, codes)
        sizes.rows, sizes.nulls = self.rows, self.nulls
        return sizes

    @property
    def wide(self) -> bool:
        """Whether the offsets need 64 bits."""
        return self.bytes > _INT32_AT_MOST

    def streams(self) -> dict[str, int]:
        """The number of bytes of each stream, by the stream's name, in the order in which the streams lie in a file."""
        sizes: dict[str, int] = {}
        if self.nulls:
            sizes[f"{self.name}.valid"] = -(-self.rows // 8)
        if pa.types.is_boolean(self.kind):
            sizes[f"{self.name}.values"] = -(-self.rows // 8)
        elif is_bytes(self.kind):
            sizes[f"{self.name}.offsets"] = (self.rows + 1) * (8 if self.wide else 4)
            sizes[f"{self.name}.bytes"] = self.bytes
        elif has_offsets(self.kind):
            if self.children[0].rows > _INT32_AT_MOST:
                raise NotSupportedError(
                    f"the values of column {self.column!r} ({self.kind}) have {self.children[0].rows} elements in total, and a snapshot holds "
                    f"{_INT32_AT_MOST} at most: leave the column out with lookup.columns, or set lookup.cache = NONE"
                )
            sizes[f"{self.name}.offsets"] = (self.rows + 1) * 4
        elif not pa.types.is_struct(self.kind):
            sizes[f"{self.name}.values"] = self.rows * (self.kind.bit_width // 8)
        for child in self.children:
            sizes |= child.streams()
        return sizes


class ColumnWriter:
    """Writes one column piece by piece. `append(stream, buffer)` is called for each buffer, and writes it after the stream's last byte."""

    def __init__(self, sizes: ColumnSizes, append: _Append) -> None:
        self._sizes = sizes
        self._append = append
        self._name = sizes.name
        self._end = 0  # the number of bytes or elements written
        self._started = 0  # 1 once the first offset is written
        self._pending_bits: dict[str, Numbers] = {}  # bits that do not fill a byte yet
        self._children = [ColumnWriter(child, append) for child in sizes.children]

    def add(self, array: pa.Array) -> None:
        kind = self._sizes.kind
        if self._sizes.nulls:
            self._add_bits("valid", as_bools(array.is_valid()))
        if pa.types.is_boolean(kind):
            self._add_bits("values", as_bools(array.fill_null(False) if array.null_count else array))
        elif is_bytes(kind):
            offsets, data = offsets_and_data(array)
            self._add_offsets(offsets)
            self._append(f"{self._name}.bytes", data[offsets[0] : offsets[-1]])
        elif has_offsets(kind):
            self._add_offsets(list_offsets(array))
        elif not pa.types.is_struct(kind):
            width = kind.bit_width // 8
            buffer = array.buffers()[1]
            if len(array):
                start = array.offset * width
                self._append(f"{self._name}.values", memoryview(buffer)[start : start + len(array) * width])
        for writer, child in zip(self._children, child_arrays(array), strict=True):
            writer.add(child)

    def _add_offsets(self, offsets: Numbers) -> None:
        width = np.int64 if self._sizes.wide else np.int32
        moved = offsets + (self._end - offsets[0])
        self._append(f"{self._name}.offsets", moved[self._started :].astype(width))
        self._end, self._started = int(moved[-1]), 1

    def _add_bits(self, stream: str, bits: Numbers) -> None:
        bits = np.concatenate([self._pending_bits[stream], bits]) if stream in self._pending_bits else bits
        whole = len(bits) // 8 * 8
        self._append(f"{self._name}.{stream}", np.packbits(bits[:whole], bitorder="little"))
        self._pending_bits[stream] = bits[whole:].copy()

    def finish(self) -> None:
        """Append what is known only at the end: bits that fill no whole byte, and the one offset of a column without rows."""
        for stream, bits in self._pending_bits.items():
            self._append(f"{self._name}.{stream}", np.packbits(bits, bitorder="little"))
        if not self._started and (is_bytes(self._sizes.kind) or has_offsets(self._sizes.kind)):
            self._add_offsets(np.zeros(1, np.int64))
        for child in self._children:
            child.finish()


def read_column(name: str, kind: pa.DataType, rows: int, streams: Mapping[str, pa.Buffer]) -> pa.Array:
    """The column `name` with `rows` rows, as a view of its streams. Text and binary with 64-bit offsets get Arrow's large types."""
    valid = streams.get(f"{name}.valid")
    if is_bytes(kind):
        offsets, data = streams[f"{name}.offsets"], streams[f"{name}.bytes"]
        if offsets.size == (rows + 1) * 8:
            kind = pa.large_string() if pa.types.is_string(kind) else pa.large_binary()
        return pa.Array.from_buffers(kind, rows, [valid, offsets, data])
    if pa.types.is_struct(kind):
        fields = [read_column(f"{name}.{n}", field.type, rows, streams) for n, field in enumerate(kind)]
        kind = pa.struct([field.with_type(child.type) for field, child in zip(kind, fields, strict=True)])
        return pa.Array.from_buffers(kind, rows, [valid], children=fields)
    if has_offsets(kind):
        offsets = streams[f"{name}.offsets"]
        (inner,) = child_types(kind)
        count = int(np.frombuffer(offsets, np.int32)[-1])
        child = read_column(f"{name}.0", inner, count, streams)
        if pa.types.is_map(kind):
            key, item = child.type
            kind = pa.map_(key.type, kind.item_field.with_type(item.type))
        else:
            kind = pa.list_(kind.value_field.with_type(child.type))
        return pa.Array.from_buffers(kind, rows, [valid, offsets], children=[child])
    return pa.Array.from_buffers(kind, rows, [valid, streams[f"{name}.values"]])


def check_column(name: str, kind: pa.DataType, rows: int, streams: Mapping[str, memoryview]) -> None:
    """Raise ValueError unless the streams have the sizes of a column `name` of type `kind` with `rows` rows, KeyError if a stream is missing.

    Reads nothing of the streams except the last offset, which says how many elements or bytes there must be.
    """
    bits = -(-rows // 8)
    if f"{name}.valid" in streams:
        _check_size(name, "valid", streams, bits)
    if pa.types.is_boolean(kind):
        _check_size(name, "values", streams, bits)
    elif is_bytes(kind):
        wide = len(streams[f"{name}.offsets"]) == (rows + 1) * 8
        _check_size(name, "offsets", streams, (rows + 1) * (8 if wide else 4))
        _check_size(name, "bytes", streams, _last_offset(streams[f"{name}.offsets"], np.int64 if wide else np.int32))
    elif has_offsets(kind):
        _check_size(name, "offsets", streams, (rows + 1) * 4)
        rows = _last_offset(streams[f"{name}.offsets"], np.int32)
    elif not pa.types.is_struct(kind):
        if kind.num_fields or isinstance(kind, (pa.DictionaryType, pa.BaseExtensionType)):
            raise ValueError(f"a snapshot cannot have columns of type {kind}")
        _check_size(name, "values", streams, rows * (kind.bit_width // 8))
    for number, child in enumerate(child_types(kind)):
        check_column(f"{name}.{number}", child, rows, streams)


def _check_size(name: str, stream: str, streams: Mapping[str, memoryview], size: int) -> None:
    if len(streams[f"{name}.{stream}"]) != size:
        raise ValueError(f"{name}.{stream} has {len(streams[f'{name}.{stream}'])} bytes, not {size}")


def _last_offset(offsets: memoryview, width: type[np.signedinteger[Any]]) -> int:
    last = int(np.frombuffer(offsets, width)[-1])
    if last < 0:
        raise ValueError(f"the last offset is negative: {last}")
    return last


def without_hidden_values(array: pa.Array) -> pa.Array:
    """The same values in an array whose nulls take no bytes and no elements, so that its size depends on its values alone.

    In Arrow, a null text, binary, list or map may have a length. A null of fixed-size binary has one even after a cast to binary.
    """
    return pc.take(array, pa.array(np.arange(len(array)))) if _has_hidden_values(array) else array


def _has_hidden_values(array: pa.Array) -> bool:
    if array.null_count and (is_bytes(array.type) or has_offsets(array.type)):
        offsets = offsets_and_data(array)[0] if is_bytes(array.type) else list_offsets(array)
        if np.diff(offsets)[as_bools(array.is_null())].any():
            return True
    return any(map(_has_hidden_values, child_arrays(array)))


def is_bytes(kind: pa.DataType) -> bool:
    """Whether a type is text or binary."""
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_large_binary(kind)
    )


def has_offsets(kind: pa.DataType) -> bool:
    """Whether a type is a list or a map."""
    return bool(pa.types.is_list(kind) or pa.types.is_map(kind))


def child_types(kind: pa.DataType) -> list[pa.DataType]:
    """The types of a nested type's children: fields of a struct, the entry of a map, the element of a list. [] for a flat type."""
    if pa.types.is_struct(kind):
        return [field.type for field in kind]
    if pa.types.is_map(kind):
        return [pa.struct([pa.field("key", kind.key_type, nullable=False), pa.field("value", kind.item_type)])]
    return [kind.value_type] if pa.types.is_list(kind) else []


def child_arrays(array: pa.Array) -> list[pa.Array]:
    """The children of a nested array, without elements that belong to none of its rows. [] for a flat array."""
    if pa.types.is_struct(array.type):
        return [array.field(number) for number in range(array.type.num_fields)]
    if has_offsets(array.type):
        offsets = list_offsets(array)
        return [array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))]
    return []


def list_offsets(array: pa.Array) -> Numbers:
    """The position (int64) at which the elements of each row of a list or map begin, and, as the last one, the end of the last row."""
    buffer = array.buffers()[1]
    if buffer is None or not buffer.size:
        return np.zeros(1, np.int64)
    return np.frombuffer(buffer, np.int32, array.offset + len(array) + 1)[array.offset :].astype(np.int64)
