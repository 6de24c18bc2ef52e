"""Reads VARIANT columns as Parquet files store them: `assemble` puts the parts of a shredded column together.

The format is in Parquet's VariantEncoding.md and VariantShredding.md; comments quote them. A VARIANT is a pair of binary values. Its `metadata`
is a dictionary of field names, its `value` refers to them by number. A shredded column also has a tree of columns called `typed_value`, which
have the values of a type that the writer expected. All rows are put together at once, one node of this tree after the other, each after its
children.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.keys import Numbers, as_bools, offsets_and_data
from pyspark_lookup.columnar.types import VARIANT, has_variant_parts, split_type, without_dictionary

_NULL = b"\x00"
_OBJECT, _ARRAY = 2, 3  # the basic types, in the two lowest bits of a value's first byte
_TRUE, _FALSE = 1 << 2, 2 << 2
_DECIMALS = ((9, 8, 4), (18, 9, 8), (38, 10, 16))
"""(largest precision, number of the primitive type, bytes of the unscaled value)."""
_BINARY, _STRING, _UUID = 15, 16, 20
_SHORT_STRING, _SHORT_BYTES = 1, 63  # the basic type of short strings, and the most bytes that one has
_FIXED: Mapping[pa.DataType, int] = {
    pa.int8(): 3,
    pa.int16(): 4,
    pa.int32(): 5,
    pa.int64(): 6,
    pa.float64(): 7,
    pa.date32(): 11,
    pa.timestamp("us", "UTC"): 12,
    pa.timestamp("us"): 13,
    pa.float32(): 14,
    pa.time64("us"): 17,
    pa.timestamp("ns", "UTC"): 18,
    pa.timestamp("ns"): 19,
}
"""The numbers of the primitive types whose values are stored in Arrow's own form."""
_BYTES = pa.large_binary()  # the values of many small files together may take more than 2 GiB


def assemble(column: pa.StructArray) -> pa.StructArray:
    """A column of the type `VARIANT`, from the parts by which Parquet stores it: `metadata`, `value` and, if it is shredded, `typed_value`.

    Raises ValueError if parts contradict each other, or have a type that no VARIANT has.
    """
    if not has_variant_parts(column.type):
        raise ValueError(f"its type is {column.type}, not a struct of metadata and value")
    # flatten() applies the column's nulls to its parts.
    parts = dict(zip((field.name for field in column.type), column.flatten(), strict=True))
    metadata, value = parts["metadata"], parts.get("value")
    if pc.any(pc.and_(metadata.is_null(), column.is_valid())).as_py():
        raise ValueError("a value has no metadata")
    if value is None or "typed_value" in parts:
        dictionaries = _Dictionaries(metadata)
        value = dictionaries.encode(value, parts["typed_value"], dictionaries.numbers)
    # "If a Variant is missing in a context where a value is required, readers must return a Variant null"
    values = pc.fill_null(value.cast(pa.binary()), _NULL)
    metadata = pc.fill_null(metadata.cast(pa.binary()), b"")  # in null rows: no part of the type has nulls
    mask = column.is_null() if column.null_count else None
    return pa.StructArray.from_arrays([values, metadata], fields=list(VARIANT), mask=mask)


class _Dictionaries:
    """The field names in the metadata of a column. Rows with the same metadata share a dictionary.

    `numbers`: the number of each row's dictionary, -1 for a row that is null. `firsts`: the number of each dictionary's first name among the names
    of all dictionaries. `ranks`: for each of these names, its rank in "lexicographical order"; the same names have the same rank.
    """

    def __init__(self, metadata: pa.Array) -> None:
        encoded = metadata.dictionary_encode()
        self.numbers: Numbers = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        offsets, data = offsets_and_data(encoded.dictionary)
        starts, ends = offsets[:-1], offsets[1:]
        headers = _uint(data, starts, np.ones(len(starts), np.int64))
        _check(ends > starts, "metadata is empty")
        _check(headers & 15 == 1, "metadata is of a version that is not 1")
        widths = (headers >> 6) + 1
        self._sizes = _uint(data, starts + 1, widths)
        at = starts + 1 + widths  # of the first offset
        bytes_at = at + widths * (self._sizes + 1)
        _check(bytes_at <= ends, "metadata ends within its dictionary")
        self.firsts = _begins(self._sizes)
        self._owners = np.repeat(np.arange(len(starts)), self._sizes)
        self._places = np.arange(len(self._owners)) - self.firsts[self._owners]
        of_name, base = widths[self._owners], bytes_at[self._owners]
        name_at = at[self._owners] + self._places * of_name
        begins = base + _uint(data, name_at, of_name)
        names_end = base + _uint(data, name_at + of_name, of_name)
        _check((begins <= names_end) & (names_end <= ends[self._owners]), "metadata ends within a name")
        codes = _slices(data, begins, names_end - begins).dictionary_encode()
        self._names, self._codes = codes.dictionary, codes.indices.to_numpy(zero_copy_only=False)
        ranks = np.empty(len(self._names), np.int64)
        ranks[pc.array_sort_indices(self._names).to_numpy()] = np.arange(len(self._names))
        self.ranks = ranks[self._codes]

    def encode(self, value: pa.Array | None, typed: pa.Array | None, numbers: Numbers) -> pa.LargeBinaryArray:
        """The values of one node of a shredded column; null where the value is missing. `numbers`: the numbers of the rows' dictionaries."""
        value = None if value is None else value.cast(_BYTES)
        if typed is None:
            if value is None:
                raise ValueError("one of its parts has neither value nor typed_value")
            return value
        shape, _ = split_type(typed.type)
        if pa.types.is_struct(typed.type):
            encoded = self._encode_objects(value, typed, numbers)
        elif shape == "list":
            encoded = self._encode_arrays(typed, numbers)
        else:
            encoded = _encode_primitives(typed)
        # "When both value and typed_value for a field are non-null, […] the typed_value column must be used."
        return encoded if value is None else pc.coalesce(encoded, value)

    def _encode_arrays(self, typed: pa.Array, numbers: Numbers) -> pa.LargeBinaryArray:
        counts = pc.fill_null(pc.list_value_length(typed), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        value, inner = _node(typed.flatten())
        elements = self.encode(value, inner, np.repeat(numbers, counts))
        is_valid = as_bools(typed.is_valid())
        return _spread(_pack(counts[is_valid], pc.fill_null(elements, _NULL)), is_valid)

    def _encode_objects(self, value: pa.Array | None, typed: pa.StructArray, numbers: Numbers) -> pa.LargeBinaryArray:
        rows: list[Numbers] = []
        names: list[Numbers] = []
        items: list[pa.Array] = []
        for field, child in zip(typed.type, typed.flatten(), strict=True):
            encoded = self.encode(*_node(child), numbers)
            is_present = as_bools(encoded.is_valid())
            rows.append(np.flatnonzero(is_present))
            names.append(self._find(field.name, numbers[is_present]))
            items.append(encoded.drop_null())
        is_valid = as_bools(typed.is_valid())
        if value is not None and (is_partial := is_valid & as_bools(value.is_valid())).any():
            owners = numbers[is_partial]
            row, name, item = self._split_objects(value.filter(pa.array(is_partial)), owners)
            rows.append(np.flatnonzero(is_partial)[row])
            names.append(name)
            items.append(item)
        row, name = np.concatenate(rows), np.concatenate(names)
        # "field IDs and offsets must be listed in the order of the corresponding field names, sorted lexicographically"
        order = np.lexsort((self.ranks[name], row))
        row, name = row[order], name[order]
        ranks = self.ranks[name]
        if ((row[1:] == row[:-1]) & (ranks[1:] == ranks[:-1])).any():
            raise ValueError("an object has a field both in value and in typed_value")
        counts = np.bincount(row, minlength=len(typed))[is_valid]
        ids = name - self.firsts[numbers[row]]
        return _spread(_pack(counts, pa.concat_arrays(items).take(pa.array(order)), ids), is_valid)

    def _find(self, name: str, numbers: Numbers) -> Numbers:
        """The numbers of a field's name in some dictionaries. Raises ValueError if one of them lacks it."""
        code = pc.index(self._names, pa.scalar(name.encode(), _BYTES)).as_py()
        hits = np.flatnonzero(self._codes == code)[::-1]  # of a name that is there twice, the first one counts
        by_dictionary = np.full(len(self.firsts), -1)
        by_dictionary[self._owners[hits]] = hits
        # "All field names of a Variant, whether shredded or not, must be present in the metadata."
        names = by_dictionary[numbers]
        _check(names >= 0, f"metadata lacks the name of the field {name!r}")
        return names

    def _split_objects(self, objects: pa.Array, numbers: Numbers) -> tuple[Numbers, Numbers, pa.LargeBinaryArray]:
        """For each field of some objects: the object's row, the number of the field's name, and the field's value."""
        offsets, data = offsets_and_data(objects)
        starts, ends = offsets[:-1], offsets[1:]
        headers = _uint(data, starts, np.ones(len(starts), np.int64))
        _check((ends > starts) & (headers & 3 == _OBJECT), "a value beside the fields of an object is no object")
        offset_bytes, id_bytes = (headers >> 2 & 3) + 1, (headers >> 4 & 3) + 1
        count_bytes = np.where(headers >> 6 & 1, 4, 1)
        counts = _uint(data, starts + 1, count_bytes)
        ids_at = starts + 1 + count_bytes
        offsets_at = ids_at + counts * id_bytes
        values_at = offsets_at + (counts + 1) * offset_bytes
        _check(values_at <= ends, "an object ends before its values")
        sizes = _uint(data, offsets_at + counts * offset_bytes, offset_bytes)
        _check(values_at + sizes <= ends, "an object ends within its values")
        row = np.repeat(np.arange(len(starts)), counts)
        place = np.arange(len(row)) - _begins(counts)[row]
        ids = _uint(data, ids_at[row] + place * id_bytes[row], id_bytes[row])
        _check(ids < self._sizes[numbers][row], "an object has a field that metadata does not name")
        begins = _uint(data, offsets_at[row] + place * offset_bytes[row], offset_bytes[row])
        _check(begins < sizes[row], "a field of an object begins after the object's end")
        # "the actual value entries do not need to be in any particular order": a value ends where the next one in its object begins.
        begins_of_row = row << 32 | begins
        ordered = np.sort(np.concatenate([begins_of_row, np.arange(len(starts)) << 32 | sizes]))
        lengths = ordered[np.searchsorted(ordered, begins_of_row, "right")] - begins_of_row
        return row, self.firsts[numbers[row]] + ids, _slices(data, values_at[row] + begins, lengths)


def _node(column: pa.Array) -> tuple[pa.Array | None, pa.Array | None]:
    """(`value`, `typed_value`) of a shredded field or element."""
    if not pa.types.is_struct(column.type):
        raise ValueError(f"one of its parts is {column.type}, not a struct of value and typed_value")
    parts = dict(zip((field.name for field in column.type), column.flatten(), strict=True))
    return parts.get("value"), parts.get("typed_value")


def _encode_primitives(typed: pa.Array) -> pa.LargeBinaryArray:
    """Flat values, each as a VARIANT; null where they are null. Raises ValueError for a type that no VARIANT has."""
    is_valid = as_bools(typed.is_valid())
    dense = typed.drop_null()
    if pa.types.is_dictionary(dense.type):
        dense = without_dictionary(dense)
    if isinstance(dense, pa.ExtensionArray):
        dense = dense.storage
    kind = dense.type
    if pa.types.is_boolean(kind):
        encoded = _fixed_rows(np.where(as_bools(dense), _TRUE, _FALSE).astype(np.uint8).reshape(-1, 1))
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        texts = dense.cast(_BYTES)
        lengths = np.diff(offsets_and_data(texts)[0])
        is_short = lengths <= _SHORT_BYTES
        heads = np.where(is_short, lengths << 2 | _SHORT_STRING, lengths << 8 | _STRING << 2)
        encoded = _join(_little_endian(heads, np.where(is_short, 1, 5)), texts)
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        values = dense.cast(_BYTES)
        lengths = np.diff(offsets_and_data(values)[0])
        encoded = _join(_little_endian(lengths << 8 | _BINARY << 2, np.full(len(lengths), 5)), values)
    elif pa.types.is_decimal(kind) and kind.precision <= 38:
        number, width = next((number, width) for most, number, width in _DECIMALS if kind.precision <= most)
        raw = _raw_values(dense.cast(pa.decimal128(kind.precision, kind.scale)))
        encoded = _fixed_rows(_with_head(raw[:, :width], number << 2, kind.scale))
    elif kind in _FIXED:
        encoded = _fixed_rows(_with_head(_raw_values(dense), _FIXED[kind] << 2))
    elif kind == pa.binary(16):
        encoded = _fixed_rows(_with_head(_raw_values(dense), _UUID << 2))
    else:
        raise ValueError(f"one of its parts is {kind}, a type that no VARIANT has")
    return _spread(encoded, is_valid)


def _raw_values(dense: pa.Array) -> Numbers:
    """The bytes of values of a fixed width, one row for each value."""
    width = dense.type.bit_width // 8
    buffer = dense.buffers()[1]
    raw = np.frombuffer(b"" if buffer is None else buffer, np.uint8)
    return raw[dense.offset * width : (dense.offset + len(dense)) * width].reshape(-1, width)


def _with_head(raw: Numbers, *head: int) -> Numbers:
    return np.concatenate([np.tile(np.array(head, np.uint8), (len(raw), 1)), raw], axis=1)


def _fixed_rows(raw: Numbers) -> pa.LargeBinaryArray:
    return _binary(np.arange(len(raw) + 1) * raw.shape[1], raw)


def _pack(counts: Numbers, items: pa.Array, ids: Numbers | None = None) -> pa.LargeBinaryArray:
    """Arrays, or objects if there are `ids`. `counts`: how many of the `items`, which are values, each of them has."""
    ends = np.cumsum(counts)
    begins = ends - counts
    offsets, data = offsets_and_data(items)
    sizes = offsets[ends] - offsets[begins]
    _check(sizes < 2**32, "a value has more than 4 GiB")
    rows = np.repeat(np.arange(len(counts)), counts + 1)
    # Each row has one more offset than values: the end of its last value.
    numbers = offsets[np.arange(len(rows)) - rows] - offsets[begins][rows]
    offset_bytes = _bytes_needed(sizes)
    parts = [_concatenated(_little_endian(numbers, offset_bytes[rows]), counts + 1), _rows_of(offsets, data, ends)]
    is_large = counts > 255
    if ids is None:
        heads = (is_large << 2 | offset_bytes - 1) << 2 | _ARRAY
    else:
        id_bytes = np.ones(len(counts), np.int64)
        rows = np.repeat(np.arange(len(counts)), counts)
        np.maximum.at(id_bytes, rows, _bytes_needed(ids))
        parts.insert(0, _concatenated(_little_endian(ids, id_bytes[rows]), counts))
        heads = (is_large << 4 | id_bytes - 1 << 2 | offset_bytes - 1) << 2 | _OBJECT
    return _join(_little_endian(counts << 8 | heads, np.where(is_large, 5, 2)), *parts)


def _bytes_needed(numbers: Numbers) -> Numbers:
    """How many bytes each number takes, from 1 to 4."""
    return 1 + (numbers > 0xFF) + (numbers > 0xFFFF) + (numbers > 0xFFFFFF)


def _little_endian(numbers: Numbers, widths: Numbers) -> pa.LargeBinaryArray:
    """Numbers as bytes, the least significant byte first. `widths`: how many bytes each number gets, 8 at most."""
    raw = numbers.astype("<u8").view(np.uint8).reshape(-1, 8)
    return _binary(np.concatenate([[0], np.cumsum(widths)]), raw[np.arange(8) < widths[:, None]])


def _concatenated(items: pa.LargeBinaryArray, counts: Numbers) -> pa.LargeBinaryArray:
    """The values of each row, one after the other. `counts`: how many of the `items` each row has."""
    return _rows_of(*offsets_and_data(items), np.cumsum(counts))


def _rows_of(offsets: Numbers, data: Numbers, ends: Numbers) -> pa.LargeBinaryArray:
    return _binary(offsets[np.concatenate([[0], ends])], data)


def _join(*parts: pa.LargeBinaryArray) -> pa.LargeBinaryArray:
    return pc.binary_join_element_wise(*parts, pa.scalar(b"", _BYTES))


def _spread(dense: pa.LargeBinaryArray, is_valid: Numbers) -> pa.LargeBinaryArray:
    """The values of `dense` in the rows that are valid, and null in all others."""
    if is_valid.all():
        return dense
    return dense.take(pa.array(np.cumsum(is_valid) - 1, mask=~is_valid))


def _binary(offsets: Numbers, data: Numbers) -> pa.LargeBinaryArray:
    buffers = [None, pa.py_buffer(offsets.astype(np.int64)), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.Array.from_buffers(_BYTES, len(offsets) - 1, buffers)


def _slices(data: Numbers, starts: Numbers, lengths: Numbers) -> pa.LargeBinaryArray:
    """The slices of `data` with these starts and lengths."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return _binary(offsets, data[np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)])


def _begins(counts: Numbers) -> Numbers:
    return np.cumsum(counts) - counts


def _uint(data: Numbers, places: Numbers, widths: Numbers) -> Numbers:
    """The unsigned little-endian integers at the offsets `places` of `data`. `widths`: the number of bytes of each (1 to 4).

    The caller checks that each integer lies within its VARIANT value. Past the end of `data`, its last byte is read again.
    """
    numbers = np.zeros(len(places), np.int64)
    for byte in range(4):
        some = data[np.minimum(places + byte, max(len(data) - 1, 0))].astype(np.int64) if len(data) else numbers
        numbers = numbers | np.where(byte < widths, some << 8 * byte, 0)
    return numbers


def _check(holds: Numbers, problem: str) -> None:
    if not holds.all():
        raise ValueError(problem)
