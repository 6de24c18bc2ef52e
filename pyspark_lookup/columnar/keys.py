"""Key columns as numbers, which are hashed and compared a whole column at a time; and the hash index over such columns.

Two keys are equal as in Spark's `=` inside a join: -0.0 is 0.0, NaN is NaN, text and binary are compared by bytes; a key with a null in any
column equals nothing. `Keys` are views of Arrow buffers; only booleans, strings with a null and floats that are hashed are copied.

The hash function is defined here, so that a process can read an index that another one wrote. The 64-bit words w of a value are folded into
its hash h one after the other, by h = mix(h ^ w). Here mix multiplies twice by secret odd numbers (the `Seed`), with a shift in between. A
key's bucket is the upper bits of its hash, which depend on all bits of the key. Without the seed nobody can construct keys that fall into
one bucket.

The hash index says which rows have a key, for a whole batch of keys at once; it may be memory-mapped.
Its rows are in hash order: sorted by the hash of their key. The rows of one key are together and keep
their order; rows with a null in their key are last. An index is DIRECT if the key is one column of
integers that lie close to each other; any other index is of the kind HASH. These are the arrays of an
index, all little-endian:

    starts   uint32[buckets + 1]   HASH: number of the first key of each bucket; bucket = hash >> shift
    hashes   uint64[keys]          HASH, unless the key is one column of fixed width: each key's hash
    slots    uint32[high - low + 1] DIRECT: 1 + number of the key `low + position`; 0 if no row has it
    first    uint32[keys + 1]      only if a key has several rows: the first row of each key, and the
                                   number of rows with a key

(With 2^32 rows and more, uint64 instead of uint32.) Keys are numbered in row order; if all are
unique, key number and row number are the same, and `first` is left out. The index has no copy of the
key columns: it uses those of the rows to compare the keys of a bucket with the key that is looked up.

The number of buckets is a power of two, and more than 4/3 of the number of rows with a key. A build
whose fullest bucket has more than `BUCKET_AT_MOST` keys draws another seed (see `SkewedError`).

The answer of a lookup is a table of rows; its column `KEY_INDEX` says to which key each row belongs.
"""

from __future__ import annotations

import dataclasses
import decimal
import hashlib
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.types import is_binary, is_text, show_type, widens, without_dictionary
from pyspark_lookup.core.decoding import show
from pyspark_lookup.errors import SchemaError

Numbers = np.ndarray[Any, np.dtype[Any]]

_WORD = 2**64 - 1
# Words of a value that is hashed word by word; the few longer values are hashed one by one with BLAKE2.
_WORDS_AT_MOST = 128


@dataclasses.dataclass(frozen=True)
class Seed:
    """The two secret odd multipliers of a hash."""

    first: int
    second: int

    def to_json(self) -> list[int]:
        return [self.first, self.second]

    @classmethod
    def from_json(cls, words: Any) -> Seed:
        """The seed that `to_json` wrote as `words`. Raises TypeError or ValueError for anything else."""
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
"""A key of one column, as a lookup of a single key uses it: an integer, or the bytes of a text or binary value."""


def make_key_parser(kind: pa.DataType) -> Callable[[object], OneKey | None]:
    """A function that returns a Python value as a key of a column of type `kind`.

    It returns None for a value that such a column cannot have, that only `cast_keys` can convert, or that is longer than 1 KiB.
    """
    if pa.types.is_integer(kind):
        low, high = _bounds(kind)
        return lambda key: key if type(key) is int and low <= key <= high else None
    if is_text(kind):
        return _encode_key
    if is_binary(kind):
        return lambda key: key if type(key) is bytes and len(key) <= 8 * _WORDS_AT_MOST else None
    return lambda key: None


def _encode_key(key: object) -> bytes | None:
    try:
        data = key.encode() if type(key) is str else None
    except UnicodeEncodeError:
        return None
    return data if data is not None and len(data) <= 8 * _WORDS_AT_MOST else None


def hash_one(key: OneKey, seed: Seed) -> int:
    """The hash of one key, the same number as `Keys.hashes` returns for it."""
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
    """One key column as Arrow's `array`, and as numbers in `values`, which are undefined where the array is null.

    `values`: one number for each row; for decimals two 64-bit words for each row; None for text and binary.
    """

    array: pa.Array
    values: Numbers | None

    @classmethod
    def from_array(cls, array: pa.Array) -> KeyColumn:
        """A view of an array of a type that `check_key_types` accepts."""
        return cls(array, _view_values(array))

    def fold_hashes(self, hashes: Numbers, seed: Seed) -> Numbers:
        """Fold the value of each row into the row's hash in `hashes`, in place, and return `hashes`."""
        if self.values is None:
            return _hash_bytes(self.array, hashes, seed)
        if self.values.ndim == 2:
            for word in range(2):
                hashes ^= self.values[:, word].view(np.uint64)
                _mix(hashes, seed)
            return hashes
        if self.values.dtype.kind == "f":
            with np.errstate(invalid="ignore"):  # a file may have signalling NaNs, about which numpy warns
                numbers = self.values.astype(np.float64) + 0.0  # -0.0 + 0.0 is 0.0
            numbers[np.isnan(numbers)] = np.nan  # NaN has many bit patterns
            hashes ^= numbers.view(np.uint64)
        else:
            hashes ^= self.values.astype(np.int64).view(np.uint64)
        return _mix(hashes, seed)

    def make_reader(self) -> Callable[[int], OneKey | None]:
        """A function that returns a row's key as `make_key_parser` returns it, for a type for which this is not always None."""
        if self.values is not None:
            return self.values.item
        binary = pa.large_binary() if pa.types.is_large_string(self.array.type) else pa.binary()
        return make_value_reader(self.array.cast(binary) if is_text(self.array.type) else self.array)

    def equal(self, rows: Numbers, other: KeyColumn, other_rows: Numbers) -> Numbers:
        """For each of `rows`, whether its value is the same as that of the row of `other` whose number is at the same place in `other_rows`."""
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
    """The key columns of some rows. `valid`: for each row, whether none of its key columns is null (None: no row has a null)."""

    def __init__(self, arrays: Sequence[pa.Array]) -> None:
        self.rows = len(arrays[0])
        self.columns = tuple(map(KeyColumn.from_array, arrays))
        self.valid: Numbers | None = None
        for array in arrays:
            if array.null_count:
                valid = as_bools(array.is_valid())
                self.valid = valid if self.valid is None else self.valid & valid

    def hashes(self, seed: Seed) -> Numbers:
        """The 64-bit hash of each row's key; undefined for rows that are not valid."""
        hashes = np.zeros(self.rows, np.uint64)
        for column in self.columns:
            column.fold_hashes(hashes, seed)
        return hashes

    def equal(self, rows: Numbers, other: Keys, other_rows: Numbers) -> Numbers:
        """For each of `rows`, whether its key is the same as that of the row of `other` whose number is at the same place in `other_rows`.

        All these rows must be valid.
        """
        is_equal = self.columns[0].equal(rows, other.columns[0], other_rows)
        for column, other_column in zip(self.columns[1:], other.columns[1:], strict=True):
            equal_rows = np.flatnonzero(is_equal)
            is_equal[equal_rows] = column.equal(rows[equal_rows], other_column, other_rows[equal_rows])
        return is_equal


# --- types ----------------------------------------------------------------------------------------


def check_key_types(fields: Sequence[pa.Field]) -> None:
    """Raise SchemaError if a column is nested (a list, map or struct): it cannot be a key."""
    for field in fields:
        if pa.types.is_nested(field.type):
            raise SchemaError(
                f"option lookup.keys: column {field.name!r} is {show_type(field.type)}, which cannot be a key: use columns of numbers, "
                "text, binary, dates, timestamps, decimals or booleans"
            )


def comparable(kind: pa.DataType, other_kind: pa.DataType) -> bool:
    """Whether values of two types compare without a loss, so that keys of one type can be looked up in a column of the other type."""
    return not pa.types.is_nested(kind) and _family(kind) == _family(other_kind)


def accepts(column: pa.DataType, keys: pa.DataType) -> bool:
    """Whether keys of the type `keys` can be looked up in a column of the type `column`.

    They can if neither type is nested, and the column's type has all values of the keys' type or the two types compare without loss.
    """
    return (widens(keys, column) and not pa.types.is_nested(column)) or comparable(keys, column)


def widen_keys(field: pa.Field, keys: pa.Array) -> pa.Array:
    """The keys to look up in the column `field`. They are cast to the column's type if it can hold all values of the keys' type.

    Raises SchemaError if such keys cannot be looked up in the column (`accepts`).
    """
    if keys.type == field.type:
        return keys
    if not accepts(field.type, keys.type):
        raise SchemaError(
            f"keys for column {field.name!r} of the table are {keys.type}, the column is {field.type}, and values of these types cannot be compared "
            "without loss: cast the keys if the cast changes no value (2.7 as INT is 2, and would find the row of 2), or, in a table of files, "
            "declare the table's column with another type in lookup.schema"
        )
    return keys.cast(field.type) if widens(keys.type, field.type) else keys


def cast_keys(table: pa.Table, fields: Sequence[pa.Field]) -> list[pa.Array]:
    """The key columns of `table` in the types of `fields`; a value outside a type's range becomes null.

    Columns are matched by name (ignoring letter case) or, if no name matches and there are as many columns as fields, by
    position. Raises SchemaError if neither is possible, and if the types of two matched columns do not compare without a loss.
    """
    spelled = {name.lower(): number for number, name in enumerate(table.column_names)}
    key_names = [field.name.lower() for field in fields]
    if all(name in spelled for name in key_names):
        columns = [table.column(spelled[name]) for name in key_names]
    elif len(fields) == table.num_columns and not any(name in spelled for name in key_names):
        columns = list(table.columns)
    else:
        raise SchemaError(
            f"keys have the columns {', '.join(table.column_names)}, but lookup.keys names {', '.join(f.name for f in fields)}: name the "
            "keys' columns as lookup.keys does"
        )
    return [_cast(one_array(column), field) for column, field in zip(columns, fields, strict=True)]


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array, with dictionary codes replaced by their values."""
    if column.num_chunks == 1:
        array = column.chunk(0)
        if 2 * array.nbytes < array.get_total_buffer_size():
            array = pa.concat_arrays([array])  # a copy, because a slice keeps all of its buffers
    else:
        array = column.combine_chunks()
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks)
    return without_dictionary(array) if pa.types.is_dictionary(array.type) else array


def _cast(array: pa.Array, field: pa.Field) -> pa.Array:
    kind = field.type
    if array.type == kind:
        return array
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), kind)
    if _family(array.type) != _family(kind):
        raise SchemaError(
            f"keys for column {field.name!r} are of type {array.type}, but the table's column is of type {kind}: cast the keys to {kind}"
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
    # A number that the cast would change equals no value of the column, so it becomes null.
    converted = pc.cast(array, kind, safe=False)
    is_exact = pc.or_(pc.equal(pc.cast(converted, array.type, safe=False), array), pc.is_nan(array))
    return pc.if_else(is_exact, converted, pa.scalar(None, kind))


def _as_decimals(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Integers or decimals as decimals of type `kind`; null for a number with more digits.

    Converts each distinct number in Python, because Arrow's cast overflows silently.
    """
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


def sort_distinct(values: Numbers) -> Numbers:
    """The distinct values, ascending.

    `numpy.unique` uses a hash table from NumPy 2.3 on, and took 60 times as long for half a million numbers.
    """
    ordered = np.sort(values)
    return ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])] if len(ordered) else ordered


def as_int64(array: pa.Array) -> Numbers:
    """The values of an int64 array without nulls, not copied. (`numpy.asarray` would import pandas.)"""
    return np.frombuffer(array.buffers()[1] or b"", np.int64, array.offset + len(array))[array.offset :]


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
    """Row numbers in the form that Arrow takes, without a copy if they are contiguous int64."""
    return pa.Array.from_buffers(pa.int64(), len(rows), [None, pa.py_buffer(np.ascontiguousarray(rows, np.int64))])


def offsets_and_data(array: pa.Array) -> tuple[Numbers, Numbers]:
    """(the position in the bytes at which each row's text or binary value begins, followed by the end of the last row, as int64; the bytes)."""
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    _, offsets, data = array.buffers()
    width = np.dtype(np.int64 if wide else np.int32)
    if offsets is None:
        return np.zeros(1, np.int64), np.zeros(0, np.uint8)
    row_offsets = np.frombuffer(offsets, width, array.offset + len(array) + 1)[array.offset :]
    return row_offsets.astype(np.int64, copy=False), np.frombuffer(data if data is not None else b"", np.uint8)


def make_value_reader(array: pa.Array) -> Callable[[int], Any]:
    """A function that returns the value of a row as `array[row].as_py()` does, but makes no objects of Arrow for signed integers, floats, text and binary."""
    if not len(array) or (read := _make_reader(array)) is None:
        return lambda row: array[row].as_py()
    if not array.null_count:
        return read
    bits, start = memoryview(array.buffers()[0]).cast("B"), array.offset

    def read_or_none(row: int) -> Any:
        place = start + row
        return read(row) if bits[place >> 3] >> (place & 7) & 1 else None

    return read_or_none


def _make_reader(array: pa.Array) -> Callable[[int], Any] | None:
    """A function that returns the value of a row that is not null; None for an array of another type than `make_value_reader` names."""
    kind, start, stop = array.type, array.offset, array.offset + len(array)
    if pa.types.is_signed_integer(kind) or kind in (pa.float32(), pa.float64()):
        code = "f" if pa.types.is_floating(kind) else "i"
        return np.frombuffer(array.buffers()[1], f"{code}{kind.bit_width // 8}", stop)[start:].data.__getitem__
    large = kind in (pa.large_string(), pa.large_binary())
    if not large and kind not in (pa.string(), pa.binary()):
        return None
    _, offsets, data = array.buffers()
    ends = np.frombuffer(offsets, np.int64 if large else np.int32, stop + 1)[start:].data
    content = memoryview(b"" if data is None else data).cast("B")
    if is_text(kind):
        return lambda row: str(content[ends[row] : ends[row + 1]], "utf-8")
    return lambda row: bytes(content[ends[row] : ends[row + 1]])


def _hash_bytes(array: pa.Array, hashes: Numbers, seed: Seed) -> Numbers:
    """Fold the text or binary value of each row into the row's hash in `hashes`, in place, and return `hashes`.

    The words of a value are its length, then its bytes, eight in a word, the last one padded with zeros.
    """
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


BUCKET_AT_MOST = 32
_PREFIX_BITS = 48
_AT_ONCE = 2**20  # values that one assignment sets, so that the temporary array with these values is small
_DIRECT_SPREAD = 4  # slots per row, at most; with more, slots would take more bytes than buckets do


class SkewedError(Exception):
    """With its current seed, an index has a bucket with more than `BUCKET_AT_MOST` keys: build the index with another seed."""


@dataclasses.dataclass(frozen=True)
class Matches:
    """Which rows have which keys, as pairs: `keys[i]` is the number of a key that was looked up, `rows[i]` that of a row that has it.

    Both arrays are int64. The pairs are ordered by key; those of one key are in row order.
    """

    keys: Numbers
    rows: Numbers


# --- building -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Order:
    """Rows in hash order. `rows`: their numbers. `first`: for each key, the position in `rows` of its first row. `hashes`: each key's hash."""

    rows: Numbers
    first: Numbers
    hashes: Numbers

    def last_rows(self) -> Order:
        """A hash order with only the last row of each key."""
        ends = np.append(self.first[1:], len(self.rows)) - 1
        return Order(self.rows[ends[: len(self.first)]], np.arange(len(self.first)), self.hashes)


def order_rows(keys: Keys, hashes: Numbers, rows: Numbers | None = None) -> Order:
    """The hash order of the rows of `keys` that are valid and among `rows` (None: all). Rows of one key keep their order in `rows`."""
    if rows is None:
        rows = np.arange(keys.rows)
    if keys.valid is not None:
        rows = rows[keys.valid[rows]]
    count = len(rows)
    rows = rows[_sorted_by_prefix(hashes[rows])]
    prefixes = hashes[rows] >> np.uint64(64 - _PREFIX_BITS)
    # Neighbours with the same prefix nearly always have the same key.
    neighbours = np.flatnonzero(prefixes[1:] == prefixes[:-1])
    same_key = np.zeros(max(count - 1, 0), np.bool_)
    same_key[neighbours] = keys.equal(rows[neighbours], keys, rows[neighbours + 1])
    for start, stop in _mixed_runs(prefixes, same_key, neighbours):
        _regroup(keys, rows, same_key, start, stop)
    first = np.concatenate([[0], np.flatnonzero(~same_key) + 1]) if count else np.zeros(0, np.int64)
    return Order(rows, first, hashes[rows[first]])


def _sorted_by_prefix(hashes: Numbers) -> Numbers:
    """The positions of `hashes`, sorted by the upper 48 bits of the hash; equal ones keep their order.

    Takes three passes of numpy's radix sort, which sorts by 16 bits at a time.
    """
    order = np.argsort((hashes >> np.uint64(16)).astype(np.uint16), kind="stable")
    for shift in (32, 48):
        digits = (hashes >> np.uint64(shift)).astype(np.uint16)
        order = order[np.argsort(digits[order], kind="stable")]
    return order


def _mixed_runs(prefixes: Numbers, same_key: Numbers, neighbours: Numbers) -> list[tuple[int, int]]:
    """The ranges (start, stop) of rows whose hashes have the same prefix, but that have more than one key."""
    mixed = neighbours[~same_key[neighbours]]
    starts = np.searchsorted(prefixes, prefixes[mixed], "left")
    stops = np.searchsorted(prefixes, prefixes[mixed], "right")
    return sorted(set(zip(starts.tolist(), stops.tolist(), strict=True)))


def _regroup(keys: Keys, rows: Numbers, same_key: Numbers, start: int, stop: int) -> None:
    """Bring the rows of each key in `rows[start:stop]` together, in place; set `same_key[i]` if rows `i` and `i + 1` now have the same key."""
    remaining = rows[start:stop].copy()
    at = start
    while len(remaining):
        is_equal = keys.equal(remaining, keys, np.full(len(remaining), remaining[0]))
        group = remaining[is_equal]
        rows[at : at + len(group)] = group
        same_key[at : at + len(group) - 1] = True
        at += len(group)
        if at < stop:
            same_key[at - 1] = False
        remaining = remaining[~is_equal]


class IndexBuilder:
    """Builds one index from the hash orders (`Order`) of consecutive ranges of hashes.

    `keyed_rows`: the maximum number of rows with a key. `bounds`: the smallest and the largest key, if the key is one column of integers,
    dates, timestamps or booleans; None for other keys. `wide`: the key is not one column of fixed width, so the index has hashes.
    `zeros(count, type)`: allocates an array of zeros.
    """

    def __init__(
        self,
        keyed_rows: int,
        bounds: tuple[int, int] | None,
        wide: bool,
        zeros: Callable[[int, np.dtype[Any]], Numbers] = np.zeros,
    ) -> None:
        self._count = np.dtype(np.uint32 if keyed_rows < 2**32 - 1 else np.uint64)
        low, high = bounds or (0, -1)
        self.low = low
        self._slots: Numbers | None = None
        spread = high - low + 1
        if 0 < spread <= max(_DIRECT_SPREAD * keyed_rows, 1024):
            self._slots = zeros(spread, self._count)
        self._zeros = zeros
        self._keyed_rows = keyed_rows
        bits = max(keyed_rows * 4 // 3, 2).bit_length()
        self._shift = np.uint64(64 - bits)
        self._buckets = zeros(0 if self._slots is not None else 2**bits + 1, self._count)
        self._hashes = zeros(keyed_rows, np.dtype(np.uint64)) if wide and self._slots is None else None
        self._first: Numbers | None = None  # None while all keys are unique
        self._keys = self.rows = 0
        self.fullest_bucket = 0  # the most keys in one bucket so far

    def add(self, order: Order, keys: Keys) -> None:
        """Add the rows of `keys` that are in `order`. Their hashes must be greater than those of all rows added before."""
        count = len(order.first)
        if not count:
            return
        if self._slots is not None:
            values = keys.columns[0].values
            assert values is not None
            at = values[order.rows[order.first]].astype(np.int64) - self.low
            self._slots[at] = np.arange(self._keys + 1, self._keys + count + 1, dtype=self._count)
        else:
            buckets = order.hashes >> self._shift
            begins = np.flatnonzero(np.concatenate([[True], buckets[1:] != buckets[:-1]]))
            lengths = np.diff(np.concatenate([begins, [count]])).astype(self._count)
            # Shifted by one, so that the running sum gives the start of each bucket.
            at = buckets[begins].astype(np.int64) + 1
            self._buckets[at] += lengths
            self.fullest_bucket = max(self.fullest_bucket, int(self._buckets[at].max()))
        if self._hashes is not None:
            self._hashes[self._keys : self._keys + count] = order.hashes
        if self._first is None and count < len(order.rows):
            self._first = self._zeros(self._keyed_rows + 1, self._count)
            for start in range(0, self._keys, _AT_ONCE):
                stop = min(start + _AT_ONCE, self._keys)
                self._first[start:stop] = np.arange(start, stop)
        if self._first is not None:
            self._first[self._keys : self._keys + count] = order.first + self.rows
        self._keys += count
        self.rows += len(order.rows)

    def arrays(self, strict: bool = True) -> dict[str, Numbers]:
        """The arrays of the index, by the names in this module's docstring.

        Raises SkewedError if `strict` and a bucket has more than `BUCKET_AT_MOST` keys. Lookups in such an index are correct, but slower.
        """
        if strict and self.fullest_bucket > BUCKET_AT_MOST:
            raise SkewedError(f"{self.fullest_bucket} keys in one bucket, more than {BUCKET_AT_MOST}")
        arrays: dict[str, Numbers] = {}
        if self._slots is not None:
            arrays["slots"] = self._slots
        else:
            arrays["starts"] = np.cumsum(self._buckets, dtype=self._count, out=self._buckets)
            if self._hashes is not None:
                arrays["hashes"] = self._hashes[: self._keys]
        if self._first is not None:
            self._first[self._keys] = self.rows
            arrays["first"] = self._first[: self._keys + 1]
        return arrays


# --- probing --------------------------------------------------------------------------------------


def check_index(arrays: Mapping[str, Numbers], keyed_rows: int, rows: int) -> None:
    """Raise ValueError unless the arrays (named as in this module's docstring) can be an index over `rows` rows, of which `keyed_rows` have a key.

    Checks only the lengths and the first and last values of the arrays.
    """
    slots, starts, hashes, first = map(arrays.get, ("slots", "starts", "hashes", "first"))
    if keyed_rows > rows or (slots is None) == (starts is None):
        raise ValueError("an index lacks slots or buckets, has both, or has too many rows")
    keys = keyed_rows
    if first is not None:
        keys = len(first) - 1
        if keys < 0 or first[0] != 0 or first[-1] != keyed_rows:
            raise ValueError("the first rows of the keys do not span all rows with a key")
    if hashes is not None and len(hashes) != keys:
        raise ValueError(f"{len(hashes)} hashes for {keys} keys")
    if starts is not None:
        buckets = len(starts) - 1
        if buckets < 2 or buckets & (buckets - 1) or starts[0] != 0 or starts[-1] != keys:
            raise ValueError("the number of buckets is not a power of 2, or they do not span all keys")


class KeyIndex:
    """An index over rows whose key columns are `stored`. `low`: the key to which the first slot belongs, if the index has slots."""

    def __init__(self, arrays: Mapping[str, Numbers], stored: list[pa.Array], low: int) -> None:
        self.arrays = arrays
        self._slots = arrays.get("slots")
        self._starts = arrays.get("starts")
        self._hashes = arrays.get("hashes")
        self._first = arrays.get("first")
        self._low = low
        self._stored = Keys(stored)
        self._read_key: Callable[[int], OneKey | None] | None = None
        if self._starts is not None:
            self._shift = np.uint64(65 - len(self._starts).bit_length())

    @property
    def unique(self) -> bool:
        """Whether no two rows have the same key."""
        return self._first is None

    def first_rows(self, numbers: Numbers) -> Numbers:
        """For each of these key numbers (int64), the first row that has the key. For the number after that of the last key, the number of rows with
        a key."""
        return numbers if self._first is None else self._first[numbers].astype(np.int64)

    def find_key_numbers(self, rows: Numbers) -> Numbers:
        """For each of `rows`, the number of its key. Each of these rows must have a key."""
        if self._first is None:
            return rows
        return np.asarray(np.searchsorted(self._first, rows, "right") - 1)

    def find_keys(self, keys: Keys, hashes: Numbers) -> Numbers:
        """For each of `keys`, its number in the index (int64); -1 if no row has it. `hashes`: see `probe`."""
        return self._probe_slots(keys) if self._slots is not None else self._probe_buckets(keys, hashes)

    def probe(self, keys: Keys, hashes: Numbers) -> Matches:
        """The rows that have any of `keys`. `hashes`: the hashes of `keys`, computed with the seed with which the index was built."""
        numbers = self.find_keys(keys, hashes)
        hits = np.flatnonzero(numbers >= 0)
        key_numbers = numbers if len(hits) == len(numbers) else numbers[hits]
        if self._first is None:
            return Matches(hits, key_numbers)
        begins = self._first[key_numbers].astype(np.int64)
        counts = self._first[key_numbers + 1].astype(np.int64) - begins
        ends = np.cumsum(counts)
        rows = np.arange(ends[-1] if len(ends) else 0)
        rows += np.repeat(begins - (ends - counts), counts)
        return Matches(np.repeat(hits, counts), rows)

    @property
    def uses_hashes(self) -> bool:
        """Whether `find_rows` needs the hash of a key."""
        return self._slots is None

    def find_rows(self, key: OneKey, hashed: int) -> range:
        """The rows that have `key`, if keys are a single column.

        `hashed`: its hash, computed with the seed with which the index was built; any number unless `uses_hashes`.
        """
        number = self._find_number(key, hashed)
        if number is None:
            return range(0)
        if self._first is None:
            return range(number, number + 1)
        return range(int(self._first[number]), int(self._first[number + 1]))

    def _find_number(self, key: OneKey, hashed: int) -> int | None:
        if self._slots is not None:
            at = int(key) - self._low
            number = int(self._slots[at]) - 1 if 0 <= at < len(self._slots) else -1
            return number if number >= 0 else None
        assert self._starts is not None
        bucket = hashed >> int(self._shift)
        hashes, first = self._hashes, self._first
        read = self._read_key = self._read_key or self._stored.columns[0].make_reader()
        for number in range(int(self._starts[bucket]), int(self._starts[bucket + 1])):
            row = number if first is None else int(first[number])
            if (hashes is None or hashes[number] == hashed) and read(row) == key:
                return number
        return None

    def _probe_slots(self, keys: Keys) -> Numbers:
        """For each of `keys`, its number in the index; -1 if no row has it."""
        assert self._slots is not None
        values = keys.columns[0].values
        assert values is not None
        # Modulo 2^64, a value below the first slot becomes larger than any slot.
        at = values.astype(np.int64).view(np.uint64) - np.uint64(self._low % 2**64)
        inside = at < np.uint64(len(self._slots))
        if keys.valid is not None:
            inside &= keys.valid
        if inside.all():
            return np.asarray(self._slots[at].astype(np.int64) - 1)
        numbers = np.full(keys.rows, -1, np.int64)
        numbers[inside] = self._slots[at[inside]].astype(np.int64) - 1
        return numbers

    def _probe_buckets(self, keys: Keys, hashes: Numbers) -> Numbers:
        assert self._starts is not None
        buckets = (hashes >> self._shift).view(np.int64)
        candidates = self._starts[buckets].astype(np.int64)
        ends = self._starts[buckets + 1].astype(np.int64)
        numbers = np.full(keys.rows, -1, np.int64)
        pending = candidates < ends
        if keys.valid is not None:
            pending &= keys.valid
        remaining = np.flatnonzero(pending)
        candidates, ends = candidates[remaining], ends[remaining]
        while len(remaining):
            matching = self._matching(candidates, keys, remaining, hashes)
            numbers[remaining[matching]] = candidates[matching]
            candidates += 1
            still_open = np.flatnonzero(~matching & (candidates < ends))
            remaining, candidates, ends = remaining[still_open], candidates[still_open], ends[still_open]
        return numbers

    def _matching(self, candidates: Numbers, keys: Keys, rows: Numbers, hashes: Numbers) -> Numbers:
        """For each candidate (a key number of the index), whether this key equals the key in the corresponding row of `keys`."""
        if self._hashes is None:
            return self._stored.equal(self.first_rows(candidates), keys, rows)
        matching: Numbers = self._hashes[candidates] == hashes[rows]
        same_hash = np.flatnonzero(matching)
        matching[same_hash] = self._stored.equal(self.first_rows(candidates[same_hash]), keys, rows[same_hash])
        return matching


KEY_INDEX = "key_index"
"""The name of the column that a lookup adds to its rows: the position (int64) of the row's key among the keys that were looked up."""
SEED = Seed(0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)
"""A seed that is not secret, for hashes that are used within one call only: a user who constructs keys that are slow to look up slows down
only that call."""


def distinct_keys(keys: Keys, hashes: Numbers) -> tuple[Numbers, Numbers]:
    """(for each distinct key without a null, the number of a row that has it; for each row, the position of its key in that list).

    A key with a null has the position -1.
    """
    order = order_rows(keys, hashes)
    places = np.full(keys.rows, -1, np.int64)
    places[order.rows] = np.repeat(np.arange(len(order.first)), np.diff([*order.first, len(order.rows)]))
    return order.rows[order.first], places


def match_rows(rows: pa.Table, names: Sequence[str], keys: Keys) -> Matches:
    """The numbers of the `rows` that have any of `keys`, ordered by key; the rows of one key keep their order. `names`: their key columns."""
    return RowIndex(rows, names).match(keys)


class RowIndex:
    """A hash index over the rows of a table in memory. `names`: the key columns."""

    def __init__(self, rows: pa.Table, names: Sequence[str]) -> None:
        stored = [one_array(rows.column(name)) for name in names]
        keys = Keys(stored)
        order = order_rows(keys, keys.hashes(SEED))
        self._rows = order.rows
        self._index = index_rows(order, keys)

    def match(self, keys: Keys) -> Matches:
        matches = self._index.probe(keys, keys.hashes(SEED))
        return Matches(matches.keys, self._rows[matches.rows])


def index_rows(order: Order, keys: Keys) -> KeyIndex:
    """An index over the rows of `keys` that are in `order`, with the seed `SEED`. Its rows are positions in `order.rows`, not row numbers."""
    builder = IndexBuilder(len(order.rows), None, wide=True)
    builder.add(order, keys)
    indices = as_indices(order.rows)
    stored = [pc.take(column.array, indices) for column in keys.columns]
    return KeyIndex(builder.arrays(strict=False), stored, 0)


def take_matches(rows: pa.Table, matches: Matches, schema: pa.Schema) -> pa.Table:
    """The rows of `rows` that `matches` names, with the columns of `schema` (which may be empty) and the column `KEY_INDEX`."""
    indices = as_indices(matches.rows)
    columns = [*(rows.column(name).take(indices) for name in schema.names), as_indices(matches.keys)]
    return pa.Table.from_arrays(columns, schema=schema.append(pa.field(KEY_INDEX, pa.int64())))


def key_numbers(rows: pa.Table) -> Numbers:
    return as_int64(one_array(rows.column(KEY_INDEX)))


def take_requested(rows: pa.Table, requested_keys: Numbers) -> pa.Table:
    """For each of `requested_keys`, the rows with this number in `KEY_INDEX`. The numbers may repeat. The rows come in the order of
    `requested_keys`.

    In the result, `KEY_INDEX` is instead the position of the number in `requested_keys`. `rows`: ordered by `KEY_INDEX`.
    """
    numbers = key_numbers(rows)
    starts = np.searchsorted(numbers, requested_keys, "left")
    counts = np.searchsorted(numbers, requested_keys, "right") - starts
    ends = np.cumsum(counts)
    row_numbers = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)
    return renumber(rows.take(as_indices(row_numbers)), np.repeat(np.arange(len(requested_keys)), counts))


def renumber(rows: pa.Table, numbers: Numbers) -> pa.Table:
    """The same rows with `KEY_INDEX` = `numbers`."""
    return rows.set_column(rows.num_columns - 1, rows.schema.field(KEY_INDEX), as_indices(numbers))


def no_rows(schema: pa.Schema) -> pa.Table:
    """An answer without rows, with the columns of `schema` and the column `KEY_INDEX`."""
    return schema.append(pa.field(KEY_INDEX, pa.int64())).empty_table()


def _as(schema: pa.Schema, rows: pa.Table) -> pa.Table:
    # Arrow casts no nulls of a struct with parts that have none, such as VARIANT, even if there is nothing to cast.
    return rows.cast(schema) if rows.schema.types != schema.types else rows.from_arrays(rows.columns, schema=schema)


def merge_rows(parts: Sequence[pa.Table], schema: pa.Schema) -> pa.Table:
    """The rows of several tables, ordered by `KEY_INDEX`. All rows of one key must be in one table. `schema`: the columns other than `KEY_INDEX`."""
    full = schema.append(pa.field(KEY_INDEX, pa.int64()))
    filled = [part for part in parts if part.num_rows]
    rows = pa.concat_tables([_as(full, part.select(full.names)) for part in filled]) if filled else full.empty_table()
    if len(filled) > 1:
        numbers = key_numbers(rows)
        rows = rows.take(as_indices(np.argsort(numbers, kind="stable")))
    return rows
