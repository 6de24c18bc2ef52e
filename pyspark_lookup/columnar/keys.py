"""Key columns as numbers, hashed and compared by whole columns, whatever their type.

Two keys are equal as in Spark's `=` inside a join: -0.0 is 0.0, NaN is NaN, text and binary are compared by bytes; a key with a null in any
column equals nothing. `Keys` are views of Arrow buffers; only booleans, strings with a null and floats that are hashed are copied.

The hash is our own, so that any process can read the files of any other: 64-bit words w of a value are folded by h = mix(h ^ w), where mix
multiplies twice by secret odd numbers with a shift in between. The upper bits are the good ones. Without the seed nobody can construct keys
that fall into one bucket.
"""

from __future__ import annotations

import contextlib
import dataclasses
import decimal
import hashlib
import random
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.types import is_binary, is_text, widens, without_dictionary
from pyspark_lookup.core.decoding import show
from pyspark_lookup.errors import SchemaError

Numbers = np.ndarray[Any, np.dtype[Any]]

_WORD = 2**64 - 1
_WORDS_AT_MOST = (
    128  # words of a value that is hashed word by word; the few longer values are hashed one by one with BLAKE2
)


@dataclasses.dataclass(frozen=True)
class Seed:
    """Two secret odd multipliers."""

    first: int
    second: int

    def to_json(self) -> list[int]:
        return [self.first, self.second]

    @classmethod
    def from_json(cls, words: Any) -> Seed:
        """The seed that `to_json` wrote. Raises TypeError or ValueError if it is malformed."""
        first, second = words
        for word in (first, second):
            if not isinstance(word, int) or not 0 < word < 2**64:
                raise ValueError(f"{show(word)} is not a seed")
        return cls(first, second)


def draw_seed(rng: random.Random) -> Seed:
    return Seed(rng.getrandbits(64) | 1, rng.getrandbits(64) | 1)


def _mix(words: Numbers, seed: Seed) -> Numbers:
    """Hashes of 64-bit words, in place."""
    words *= np.uint64(seed.first)
    words ^= words >> np.uint64(32)
    words *= np.uint64(seed.second)
    return words


OneKey = int | bytes
"""A key of a single column, a whole number or text, in the form that `KeyColumn` has, but without arrays."""


def one_key(key: object, kind: pa.DataType) -> OneKey | None:
    """A Python value as a key of a column of that type; None if it is not such a key, or needs a conversion (see `cast_keys`)."""
    if type(key) is int and pa.types.is_integer(kind):
        low, high = _bounds(kind)
        return key if low <= key <= high else None
    data: bytes | None = None
    if type(key) is str and is_text(kind):
        with contextlib.suppress(UnicodeEncodeError):
            data = key.encode()
    elif type(key) is bytes and is_binary(kind):
        data = key
    return data if data is not None and len(data) <= 8 * _WORDS_AT_MOST else None


def hash_one(key: OneKey, seed: Seed) -> int:
    """The hash that `Keys.hashes` computes for one key."""
    words: Sequence[int] = (key & _WORD,) if isinstance(key, int) else ()
    if isinstance(key, bytes):
        count = -(-len(key) // 8)
        words = (len(key), *struct.unpack(f"<{count}Q", key.ljust(8 * count, b"\0")))
    hashed = 0
    for word in words:
        hashed = (hashed ^ word) * seed.first & _WORD
        hashed = (hashed ^ hashed >> 32) * seed.second & _WORD
    return hashed


@dataclasses.dataclass(frozen=True)
class KeyColumn:
    """One column: `array` as Arrow has it, valid in the rows that matter, and its numbers.

    `values`: the fixed-width values, (rows, 2) words of a decimal, or None for text and binary.
    """

    array: pa.Array
    values: Numbers | None

    @classmethod
    def from_array(cls, array: pa.Array) -> KeyColumn:
        """A view of an array of a type that `check_key_types` accepts."""
        return cls(array, _view_values(array))

    def fold_hashes(self, hashes: Numbers, seed: Seed) -> Numbers:
        """`hashes` with this column folded in, in place."""
        if self.values is None:
            return _hash_bytes(self.array, hashes, seed)
        if self.values.ndim == 2:
            for word in range(2):
                hashes ^= self.values[:, word].view(np.uint64)
                _mix(hashes, seed)
            return hashes
        if self.values.dtype.kind == "f":
            with np.errstate(invalid="ignore"):  # warnings about signalling NaNs, which bits in a file may be
                numbers = self.values.astype(np.float64) + 0.0  # -0.0 + 0.0 is 0.0
            numbers[np.isnan(numbers)] = np.nan  # NaN has many bit patterns
            hashes ^= numbers.view(np.uint64)
        else:
            hashes ^= self.values.astype(np.int64).view(np.uint64)
        return _mix(hashes, seed)

    def holds(self, row: int, key: OneKey) -> bool:
        """Whether a row has a key."""
        if self.values is None:
            buffer = self.array[row].as_buffer()
            return buffer is not None and buffer.to_pybytes() == key
        return int(self.values[row]) == key

    def equal(self, rows: Numbers, other: KeyColumn, other_rows: Numbers) -> Numbers:
        """For each of `rows` whether it has the same value as the corresponding row of `other`."""
        if self.values is None or other.values is None:
            values, other_values = _take(self.array, rows), _take(other.array, other_rows)
            if other_values.type != values.type:
                other_values = other_values.cast(values.type)
            return as_bools(pc.equal(values, other_values))
        values, other_values = self.values[rows], other.values[other_rows]
        is_equal: Numbers = values == other_values
        if is_equal.ndim == 2:
            return np.asarray(is_equal.all(axis=1))
        if values.dtype.kind == "f":
            is_equal |= np.isnan(values) & np.isnan(other_values)
        return is_equal


class Keys:
    """The key columns of some rows. `valid`: the rows without a null in any of them (None: all)."""

    def __init__(self, arrays: Sequence[pa.Array]) -> None:
        self.rows = len(arrays[0])
        self.columns = tuple(map(KeyColumn.from_array, arrays))
        self.valid: Numbers | None = None
        for array in arrays:
            if array.null_count:
                valid = as_bools(array.is_valid())
                self.valid = valid if self.valid is None else self.valid & valid

    def hashes(self, seed: Seed) -> Numbers:
        """64-bit hashes, one per row; undefined for rows that are not valid."""
        hashes = np.zeros(self.rows, np.uint64)
        for column in self.columns:
            column.fold_hashes(hashes, seed)
        return hashes

    def equal(self, rows: Numbers, other: Keys, other_rows: Numbers) -> Numbers:
        """For each of `rows` whether it has the same key as the corresponding row of `other`. All these rows must be valid."""
        is_equal = self.columns[0].equal(rows, other.columns[0], other_rows)
        for column, other_column in zip(self.columns[1:], other.columns[1:], strict=True):
            equal_rows = np.flatnonzero(is_equal)
            is_equal[equal_rows] = column.equal(rows[equal_rows], other_column, other_rows[equal_rows])
        return is_equal


# --- types ----------------------------------------------------------------------------------------


def check_key_types(fields: Sequence[pa.Field]) -> None:
    """Raise SchemaError unless columns of these types can be keys: nested ones cannot, as in Spark's maps."""
    for field in fields:
        if pa.types.is_nested(field.type):
            raise SchemaError(
                f"option lookup.keys: column {field.name!r} is {field.type}, which cannot be a key: use columns of numbers, "
                "text, binary, dates, timestamps, decimals or booleans"
            )


def comparable(kind: pa.DataType, other_kind: pa.DataType) -> bool:
    """Whether keys of the two types compare without a loss, so that keys of one can be looked up among the other."""
    return not pa.types.is_nested(kind) and _family(kind) == _family(other_kind)


def accepts(column: pa.DataType, keys: pa.DataType) -> bool:
    """Whether keys of a type can be looked up in a column: the column has all of their values, or the types compare without a loss."""
    return (widens(keys, column) and not pa.types.is_nested(column)) or comparable(keys, column)


def widen_keys(field: pa.Field, keys: pa.Array) -> pa.Array:
    """Keys to look up in a column, cast to its type if that has all of their values. Raises SchemaError if the column does not accept their type."""
    if keys.type == field.type:
        return keys
    if not accepts(field.type, keys.type):
        raise SchemaError(
            f"keys for column {field.name!r} of the table are {keys.type}, the column is {field.type}: no type holds the values of both. A cast "
            "may change values: 2.7 becomes 2, and finds the row of 2. Cast the DataFrame's column only if it has no such values, or "
            "declare the table's column with lookup.schema in a type that fits both"
        )
    return keys.cast(field.type) if widens(keys.type, field.type) else keys


def cast_keys(table: pa.Table, fields: Sequence[pa.Field]) -> list[pa.Array]:
    """The key columns of `table` in the types of `fields`; a value outside a type's range becomes null.

    Columns are matched by name (ignoring letter case) or, if none has such a name and the count agrees, by position. Raises SchemaError
    naming the column and both types if their types do not compare without a loss.
    """
    spelled = {name.lower(): number for number, name in enumerate(table.column_names)}
    key_names = [field.name.lower() for field in fields]
    if all(name in spelled for name in key_names):
        columns = [table.column(spelled[name]) for name in key_names]
    elif len(fields) == table.num_columns and not any(name in spelled for name in key_names):
        columns = list(table.columns)
    else:
        raise SchemaError(
            f"keys have the columns {', '.join(table.column_names)}; lookup.keys are {', '.join(f.name for f in fields)}"
        )
    return [_cast(one_array(column), field) for column, field in zip(columns, fields, strict=True)]


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array, with dictionary codes replaced by their values."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks == 1 else pa.concat_arrays(array.chunks)
    return without_dictionary(array) if pa.types.is_dictionary(array.type) else array


def _cast(array: pa.Array, field: pa.Field) -> pa.Array:
    kind = field.type
    if array.type == kind:
        return array
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), kind)
    if _family(array.type) != _family(kind):
        raise SchemaError(
            f"keys of column {field.name!r} are {array.type}, the table's are {kind}: cast them to {kind}"
        )
    if pa.types.is_integer(kind) and pa.types.is_integer(array.type):
        (low, high), (own_low, own_high) = _bounds(kind), _bounds(array.type)
        least, most = (pa.scalar(n, array.type) for n in (max(low, own_low), min(high, own_high)))
        inside = pc.and_(pc.greater_equal(array, least), pc.less_equal(array, most))
        return pc.if_else(inside, array, pa.scalar(None, array.type)).cast(kind)
    if pa.types.is_decimal(array.type) and array.type.bit_width < 128:  # Arrow's casts of these to integers fail
        array = array.cast(pa.decimal128(array.type.precision, array.type.scale))
    if pa.types.is_decimal(kind):
        return array.cast(kind) if widens(array.type, kind) else _as_decimals(array, kind)
    if not pa.types.is_floating(kind):
        return _cast_fitting(array, kind)
    if pa.types.is_float16(array.type):
        array = array.cast(pa.float32())
    # A number that the column's type does not have equals none of its values.
    converted = pc.cast(array, kind, safe=False)
    is_exact = pc.or_(pc.equal(pc.cast(converted, array.type, safe=False), array), pc.is_nan(array))
    return pc.if_else(is_exact, converted, pa.scalar(None, kind))


def _as_decimals(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Exact numbers as `kind`, null if they have more digits. One by one, because Arrow's cast overflows silently."""
    encoded = array.dictionary_encode()
    with decimal.localcontext(decimal.Context(prec=200)):
        limit = decimal.Decimal(10) ** (kind.precision - kind.scale)
        numbers = [decimal.Decimal(value) for value in encoded.dictionary.to_pylist()]
        # Arrow takes at most as many digits as the type has, zeros included.
        step = decimal.Decimal(1).scaleb(-kind.scale)
        fitting = [value.quantize(step) if abs(value) < limit and value % step == 0 else None for value in numbers]
    return pc.take(pa.array(fitting, kind), encoded.indices)


def _cast_fitting(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """`array` as `kind`, null where a value would change. If the cast fails, each half is cast alone, down to single values."""
    try:
        return array.cast(kind)
    except pa.ArrowInvalid:
        if len(array) == 1:
            return pa.nulls(1, kind)
    half = len(array) // 2
    return pa.concat_arrays([_cast_fitting(array.slice(0, half), kind), _cast_fitting(array.slice(half), kind)])


def _bounds(kind: pa.DataType) -> tuple[int, int]:
    """The lowest and highest value of an integer type."""
    signed = pa.types.is_signed_integer(kind)
    most = (1 << (kind.bit_width - signed)) - 1
    return -most - 1 if signed else 0, most


def _family(kind: pa.DataType) -> str:
    """The name of a type's family: types of one family compare with each other without a loss."""
    if pa.types.is_integer(kind) or pa.types.is_decimal(kind):
        return "exact number"
    if pa.types.is_floating(kind):
        return "float"
    if is_text(kind):
        return "text"
    if is_binary(kind):
        return "binary"
    if pa.types.is_timestamp(kind):
        return "instant" if kind.tz is not None else "timestamp"
    return "date" if pa.types.is_date(kind) else str(kind)


# --- Arrow buffers as numpy arrays ----------------------------------------------------------------


def as_bools(array: pa.BooleanArray) -> Numbers:
    """A boolean array without nulls as a numpy array."""
    raw = np.frombuffer(array.buffers()[1], np.uint8)
    bits = np.unpackbits(raw, bitorder="little", count=array.offset + len(array))
    return bits[array.offset :].view(np.bool_)


def _view_values(array: pa.Array) -> Numbers | None:
    kind = array.type
    if pa.types.is_boolean(kind):
        return as_bools(array if not array.null_count else pc.fill_null(array, False)).view(np.int8)
    if not pa.types.is_primitive(kind) and not pa.types.is_decimal(kind):
        return None
    buffer = array.buffers()[1]
    start, stop = array.offset, array.offset + len(array)
    if buffer is None:  # only possible without rows
        buffer = b""
    if pa.types.is_decimal(kind):
        words = np.frombuffer(buffer, np.int64, 2 * stop).reshape(-1, 2)
        return words[start:]
    code = "f" if pa.types.is_floating(kind) else "i"
    return np.frombuffer(buffer, np.dtype(f"{code}{kind.bit_width // 8}"), stop)[start:]


def _take(array: pa.Array, rows: Numbers) -> pa.Array:
    if len(rows) == len(array) and len(rows) and rows[0] == 0 and _is_range(rows):
        return array
    return pc.take(array, as_indices(rows), boundscheck=False)


def _is_range(rows: Numbers) -> bool:
    return bool(rows[-1] == len(rows) - 1 and (np.diff(rows) == 1).all())


def as_array(values: Numbers) -> pa.Array:
    """Numbers or booleans as an Arrow array of their type. Contiguous numbers are not copied."""
    packed = np.packbits(values, bitorder="little") if values.dtype == np.bool_ else np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(packed)])


def as_indices(rows: Numbers) -> pa.Array:
    """Row numbers in the form that Arrow takes, without a copy if they are int64."""
    return pa.Array.from_buffers(pa.int64(), len(rows), [None, pa.py_buffer(np.ascontiguousarray(rows, np.int64))])


def offsets_and_data(array: pa.Array) -> tuple[Numbers, Numbers]:
    """Offsets of a text or binary array's rows into its bytes, as int64, and the bytes."""
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    _, offsets, data = array.buffers()
    width = np.dtype(np.int64 if wide else np.int32)
    if offsets is None:
        return np.zeros(1, np.int64), np.zeros(0, np.uint8)
    row_offsets = np.frombuffer(offsets, width, array.offset + len(array) + 1)[array.offset :]
    return row_offsets.astype(np.int64, copy=False), np.frombuffer(data if data is not None else b"", np.uint8)


def _hash_bytes(array: pa.Array, hashes: Numbers, seed: Seed) -> Numbers:
    """`hashes` with the bytes of each row folded in: its length, then its words, the last one padded with zeros."""
    offsets, data = offsets_and_data(array)
    lengths = offsets[1:] - offsets[:-1]
    if array.null_count:
        lengths = lengths * as_bools(array.is_valid())
    hashes ^= lengths.view(np.uint64)
    _mix(hashes, seed)
    if not len(lengths):
        return hashes
    longest = int(lengths.max())
    if longest and longest == int(lengths.min()):
        width = -(-longest // 8) * 8
        block = data[offsets[0] : offsets[-1]].reshape(-1, longest)
        if width != longest:
            padded = np.zeros((len(lengths), width), np.uint8)
            padded[:, :longest] = block
            block = padded
        if longest <= 8 * _WORDS_AT_MOST:
            words = np.ascontiguousarray(block).view(np.uint64)
            for number in range(words.shape[1]):
                hashes ^= words[:, number]
                _mix(hashes, seed)
            return hashes
    return _hash_ragged(offsets[:-1], lengths, data, hashes, seed)


def _hash_ragged(starts: Numbers, lengths: Numbers, data: Numbers, hashes: Numbers, seed: Seed) -> Numbers:
    long = np.flatnonzero(lengths > 8 * _WORDS_AT_MOST)
    if len(long):
        lengths = lengths.copy()
        secret = seed.first.to_bytes(8, "little") + seed.second.to_bytes(8, "little")
        for row in long.tolist():
            value = data[starts[row] : starts[row] + lengths[row]]
            digest = hashlib.blake2b(value.tobytes(), digest_size=8, key=secret).digest()
            hashes[row] ^= np.uint64(int.from_bytes(digest, "little"))
        lengths[long] = 0
    low = int(starts.min())
    high = int((starts + lengths).max())
    padded = np.zeros(max(high - low, 0) + 8, np.uint8)
    padded[:-8] = data[low:high] if high > low else 0
    # A word may begin at any byte.
    words = np.ndarray((len(padded) - 7,), np.dtype("<u8"), padded, 0, (1,))
    rows = np.flatnonzero(lengths > 0)
    at, remaining = starts[rows] - low, lengths[rows]
    all_rows = len(rows) == len(hashes)
    folded = hashes if all_rows else hashes[rows]
    while len(rows):
        word = words[at]
        short = remaining < 8
        if short.any():
            word[short] &= (np.uint64(1) << (remaining[short].astype(np.uint64) * np.uint64(8))) - np.uint64(1)
        folded ^= word
        _mix(folded, seed)
        hashes[rows] = folded
        longer = np.flatnonzero(remaining > 8)
        rows, at, remaining = rows[longer], at[longer] + 8, remaining[longer] - 8
        folded = hashes[rows]
    return hashes
