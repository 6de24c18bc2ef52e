"""Key columns: what is equal hashes alike, what differs does not, and keys given in other types find what they mean."""

from __future__ import annotations

import datetime
import decimal
import hashlib
import itertools
import math
import random
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pyspark_lookup.base.errors import SchemaError
from pyspark_lookup.columnar.keys import (
    KeyColumn,
    Keys,
    Numbers,
    Seed,
    as_indices,
    bits_of,
    cast_keys,
    check_key_types,
    draw_seed,
    offsets_and_data,
)
from tests.fuzzing import MORE

SEED = Seed(0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)
OTHER = Seed(0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
US, US_UTC = pa.timestamp("us"), pa.timestamp("us", "UTC")
# Every type a key of a table may have, as Spark takes it.
KINDS = [
    pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(),
    pa.string(), pa.binary(), pa.date32(), US, US_UTC, pa.duration("us"),
    pa.decimal128(5, 2), pa.decimal128(20, 0), pa.decimal128(38, 10),
]  # fmt: skip
each_kind = pytest.mark.parametrize("kind", KINDS, ids=map(str, KINDS))
LARGE = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
TEXTS = ["", "\0", "\0\0", "a", "a\0", "a\0\0", "\0a", "a" * 7, "a" * 8, "a" * 8 + "\0", "a" * 9, "é", "é" * 4]
LONG = ["x" * 1024, "x" * 1025, "x" * 1024 + "y", "y" + "x" * 1024, "x" * 5000, "x" * 4999 + "\0"]
# Not-a-numbers: those that arithmetic makes, and (signalling) those that only raw bits are.
QUIET = {
    pa.float64(): [0x7FF8 << 48, 0xFFF8 << 48, 0x7FF8 << 48 | 1, 2**64 - 1],
    pa.float32(): [0x7FC00000, 0xFFC00001, 2**32 - 1],
}
SIGNALLING = {pa.float64(): [0x7FF0 << 48 | 1, 0xFFF4 << 48], pa.float32(): [0x7F800001, 0xFFA00000]}


def examples(count: int) -> settings:
    """So many examples, by night `MORE` times as many, however slow the machine is."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=count * MORE, deadline=None, suppress_health_check=slow)


def number(digits: int, scale: int) -> decimal.Decimal:
    """`digits` times ten to the -scale, exactly (decimal's own arithmetic rounds to 28 digits)."""
    return decimal.Decimal(f"{digits}E{-scale}")


def values_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Values of a type, as `pa.array` takes them: times as numbers, for Python has not all of them."""
    if pa.types.is_boolean(kind):
        return st.booleans()
    if pa.types.is_decimal(kind):
        most = 10**kind.precision - 1
        few = min(most, 10)
        digits = st.integers(-most, most) | st.integers(-few, few) | st.sampled_from([most, -most])
        return digits.map(lambda n: number(n, kind.scale))
    if pa.types.is_floating(kind):
        floats = st.floats(width=kind.bit_width)  # type: ignore[arg-type]
        return floats | st.sampled_from([0.0, -0.0, math.nan, math.inf, 1.0, 1.5])
    # By number, or hypothesis would print the long ones whenever it names the strategy.
    special = st.integers(0, len(TEXTS + LONG) - 1).map(lambda n: (TEXTS + LONG)[n])
    if pa.types.is_string(kind):
        return st.text(st.characters(codec="utf-8"), max_size=20) | special
    if pa.types.is_binary(kind):
        return st.binary(max_size=20) | special.map(str.encode)
    top = 2 ** (kind.bit_width - 1)
    return st.integers(-top, top - 1) | st.integers(-3, 3) | st.sampled_from([-top, top - 1, -top + 1])


def plain(array: pa.Array) -> list[Any]:
    """The values such that Python's equality is that of keys; null is None."""
    kind = array.type
    if pa.types.is_temporal(kind):
        array = array.cast(pa.int32() if pa.types.is_date32(kind) else pa.int64())
    values: list[Any] = array.to_pylist()
    return ["NaN" if isinstance(value, float) and math.isnan(value) else value for value in values]


def bits(numbers: Sequence[int], kind: pa.DataType) -> pa.Array:
    """An array of values given by their bits."""
    raw = np.array(numbers, np.dtype(f"u{kind.bit_width // 8}"))
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(raw)])


def hashed(*columns: pa.Array, seed: Seed = SEED) -> list[int]:
    found: list[int] = Keys(columns).hashes(seed).tolist()
    return found


def everywhere(array: pa.Array) -> dict[str, pa.Array]:
    """The same values as they may come: a slice of more, behind another offset, from a file, with large offsets."""
    around = pa.concat_arrays([array, array])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, pa.schema([("k", array.type)])) as writer:
        writer.write_batch(pa.record_batch([array], ["k"]))
    forms = {
        "whole": array,
        "slice": around.slice(len(array)),
        "slice of a slice": pa.concat_arrays([array.slice(0, 3), array, array]).slice(1).slice(2, len(array))
        if len(array) >= 3
        else around.slice(0, len(array)),
        "file": pa.ipc.open_file(sink.getvalue()).get_batch(0).column(0),
    }
    if array.type in LARGE:
        forms["large"] = around.cast(LARGE[array.type]).slice(len(array))
    return forms


def pairs_of(count: int) -> tuple[Numbers, Numbers]:
    """Every pair of rows."""
    left, right = np.meshgrid(np.arange(count), np.arange(count), indexing="ij")
    return left.ravel(), right.ravel()


# --- hashes and equality -----------------------------------------------------------------------------


def mixed(word: int, seed: Seed) -> int:
    word = word * seed.first % 2**64
    return (word ^ word >> 32) * seed.second % 2**64


def hash_of(value: Any, kind: pa.DataType, before: int, seed: Seed) -> int:
    """The hash as the head of the module says it: 64-bit words, each folded in by h = mix(h ^ w)."""
    if pa.types.is_decimal(kind):
        digits = int(decimal.Decimal(value).scaleb(kind.scale, decimal.Context(prec=80)))
        words = [digits % 2**64, (digits >> 64) % 2**64]
    elif pa.types.is_floating(kind):
        words = [struct.unpack("<Q", struct.pack("<d", value))[0]]
    elif isinstance(value, (str, bytes)):
        data = value.encode() if isinstance(value, str) else value
        words = [len(data)]
        words += [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    else:
        words = [int(value) % 2**64]
    for word in words:
        before = mixed(before ^ word, seed)
    return before


@each_kind
@examples(16)
@given(data=st.data())
def test_a_hash_is_a_file_format(kind: pa.DataType, data: st.DataObject) -> None:
    """Hashes are what the documentation says, to the bit, so that any process finds what any other wrote."""
    text = pa.types.is_string(kind) or pa.types.is_binary(kind)
    short = values_of(kind).filter(lambda value: len(value) <= 1024) if text else values_of(kind)
    values = data.draw(st.lists(short, min_size=1, max_size=8))
    array = pa.array(values, kind)
    # -0.0 counts as 0.0, and all NaNs as the one that Python has.
    words = [value + 0.0 if isinstance(value, float) else value for value in array_values(array)]
    assert hashed(array) == [hash_of(value, kind, 0, SEED) for value in words]
    twice = [hash_of(value, kind, hash_of(value, kind, 0, OTHER), OTHER) for value in words]
    assert hashed(array, array, seed=OTHER) == twice


def array_values(array: pa.Array) -> list[Any]:
    """Values as they are hashed: times as numbers, NaN as it is."""
    floating = pa.types.is_floating(array.type)
    return [math.nan if floating and value == "NaN" else value for value in plain(array)]


def test_long_values_are_hashed_by_a_keyed_digest() -> None:
    """A value of more than 1 KiB counts by its length and by BLAKE2b under the seed, in a column of one length or of many."""
    secret = SEED.first.to_bytes(8, "little") + SEED.second.to_bytes(8, "little")
    value = bytes(range(256)) * 5
    digest = int.from_bytes(hashlib.blake2b(value, digest_size=8, key=secret).digest(), "little")
    assert hashed(pa.array([value])) == [mixed(len(value), SEED) ^ digest]
    assert hashed(pa.array([b"x", value, b""]))[1] == mixed(len(value), SEED) ^ digest


@each_kind
@examples(16)
@given(data=st.data())
def test_equal_keys_hash_alike_wherever_they_lie(kind: pa.DataType, data: st.DataObject) -> None:
    """Rows are equal and hash alike exactly where their values are equal, in whole columns, slices, files and large types."""
    pool = data.draw(st.lists(values_of(kind), min_size=1, max_size=5))
    values = data.draw(st.lists(st.none() | st.sampled_from(pool), min_size=1, max_size=12))
    array = pa.array(values, kind)
    expected = plain(array)
    reference = hashed(array)
    left, right = pairs_of(len(values))
    both = np.array([expected[a] is not None and expected[b] is not None for a, b in zip(left, right, strict=True)])
    left, right = left[both], right[both]
    alike = [expected[a] == expected[b] for a, b in zip(left, right, strict=True)]
    assert [reference[a] == reference[b] for a, b in zip(left, right, strict=True)] == alike
    for form, other in everywhere(array).items():
        keys = Keys([other])
        assert keys.rows == len(values)
        known = [True] * len(values) if keys.valid is None else keys.valid.tolist()
        assert known == [value is not None for value in expected], form
        hashes = keys.hashes(SEED).tolist()
        assert [h for h, v in zip(hashes, known, strict=True) if v] == [
            h for h, v in zip(reference, known, strict=True) if v
        ], form
        assert Keys([array]).equal(left, keys, right).tolist() == alike, form
        assert keys.equal(left, Keys([array]), right).tolist() == alike, form
    for row, value in enumerate(expected):
        if value is not None:
            assert hashed(array.slice(row, 1)) == [reference[row]]


@examples(40)
@given(data=st.data())
def test_composite_keys(data: st.DataObject) -> None:
    """A key of several columns equals another, and hashes as it, where all columns do; a null in any makes it nothing."""
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=2, max_size=3))
    pools = [data.draw(st.lists(st.none() | values_of(kind), min_size=1, max_size=2)) for kind in kinds]
    rows = data.draw(st.lists(st.tuples(*map(st.sampled_from, pools)), min_size=1, max_size=10))
    columns = [pa.array([row[n] for row in rows], kind) for n, kind in enumerate(kinds)]
    expected = list(zip(*map(plain, columns), strict=True))
    keys = Keys([pa.concat_arrays([column, column]).slice(len(rows)) for column in columns])
    known = [None not in row for row in expected]
    assert (keys.valid is None) is all(known)
    assert keys.valid is None or keys.valid.tolist() == known
    valid = np.flatnonzero(known)
    left, right = (valid[rows] for rows in pairs_of(len(valid)))
    alike = [expected[a] == expected[b] for a, b in zip(left, right, strict=True)]
    assert keys.equal(left, Keys(columns), right).tolist() == alike
    hashes = keys.hashes(SEED)
    assert (hashes[left] == hashes[right]).tolist() == alike


def test_the_order_of_columns_matters() -> None:
    """(1, 2) is not (2, 1), nor ("ab", "c") ("a", "bc")."""
    numbers = pa.array([1, 2]), pa.array([2, 1])
    texts = pa.array(["ab", "a"]), pa.array(["c", "bc"])
    for columns in (numbers, texts):
        assert len(set(hashed(*columns))) == 2
        assert not Keys(columns).equal(np.array([0]), Keys(columns), np.array([1])).any()


@pytest.mark.parametrize("seed", [SEED, OTHER, draw_seed(random.Random(5))])
def test_nuls_and_lengths_tell_texts_apart(seed: Seed) -> None:
    """Texts that differ only in NULs, in the last byte or in length differ, up to several KiB."""
    texts = [*TEXTS, *LONG, *("\0" * length for length in (7, 8, 9, 16, 1023, 1024, 1025, 2000))]
    for kind in (pa.string(), pa.large_binary()):
        array = pa.array(texts, kind)
        assert len(set(hashed(array, seed=seed))) == len(texts)
        left, right = pairs_of(len(texts))
        assert (Keys([array]).equal(left, Keys([array]), right) == (left == right)).all()


def test_null_texts_may_span_bytes() -> None:
    """Bytes behind a null count for nothing: the values beside it hash as they do without it."""
    for values, null in ((["aaaa", "bbbb", "cccc"], 1), (["a", "x" * 3000, "cc"], 1), (["x" * 2000, "b", "c"], 0)):
        whole = pa.array(values)
        marks = pa.array([row != null for row in range(3)])
        array = pa.Array.from_buffers(pa.string(), 3, [marks.buffers()[1], *whole.buffers()[1:]])
        assert array.null_count == 1
        for row in {0, 1, 2} - {null}:
            assert hashed(array)[row] == hashed(whole)[row]
            assert hashed(array.slice(row))[0] == hashed(whole)[row]


def check_nans(kind: pa.DataType, patterns: list[int]) -> None:
    """All these NaNs are one key, both zeros another, and none of them is a third."""
    sign = 1 << (kind.bit_width - 1)
    array = bits([*patterns, 0, sign, 1, sign | 1], kind)
    names = ["NaN"] * len(patterns) + ["zero"] * 2 + ["tiny", "-tiny"]
    hashes = hashed(array)
    left, right = pairs_of(len(array))
    alike = [names[a] == names[b] for a, b in zip(left, right, strict=True)]
    assert [hashes[a] == hashes[b] for a, b in zip(left, right, strict=True)] == alike
    assert Keys([array]).equal(left, Keys([array]), right).tolist() == alike


@pytest.mark.parametrize("kind", SIGNALLING, ids=str)
def test_a_signalling_nan_is_nan(kind: pa.DataType) -> None:
    """A NaN that no arithmetic made, as bits in a file may be, is the same key, and hashing it is no warning."""
    check_nans(kind, QUIET[kind] + SIGNALLING[kind])


@each_kind
def test_columns_without_rows(kind: pa.DataType) -> None:
    """An empty column of any type, however it came to be, is a key column of no rows."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, pa.schema([("k", kind)])) as writer:
        writer.write_batch(pa.record_batch([pa.array([], kind)], ["k"]))
    empties = [
        pa.array([], kind), pa.nulls(0, kind), pa.nulls(3, kind).slice(3), pa.ipc.open_file(sink.getvalue()).get_batch(0)[0],
        pa.chunked_array([], kind).combine_chunks(), pa.table({"k": pa.array([], kind)})["k"].combine_chunks(),
    ]  # fmt: skip
    nothing = np.zeros(0, np.int64)
    for array in empties:
        keys = Keys([array])
        assert (keys.rows, keys.valid, keys.hashes(SEED).tolist()) == (0, None, [])
        assert keys.equal(nothing, keys, nothing).tolist() == []


def test_a_slice_without_its_null() -> None:
    """A slice that leaves the nulls of its column out is all valid."""
    array = pa.array([None, 1, 2, None])
    assert Keys([array.slice(1, 2)]).valid is None
    assert Keys([array.slice(1, 2), pa.array([3, None])]).valid is not None


def test_booleans_behind_offsets() -> None:
    """Booleans are read from the right bit, nulls among them or not, for every offset within two bytes."""
    truths = [bool(int(c)) for c in f"{0b1011001110001111010010:022b}"]
    for nulls, start, length in itertools.product((False, True), range(17), range(5)):
        values = [None if nulls and n % 3 == 1 else truth for n, truth in enumerate(truths)]
        array = pa.array(values, pa.bool_()).slice(start, length)
        found = KeyColumn.of(array).values
        assert found is not None
        expected = values[start : start + length]
        assert [bool(f) for f, e in zip(found.tolist(), expected, strict=True) if e is not None] == [
            e for e in expected if e is not None
        ]
        if length and None not in expected:
            assert bits_of(array).tolist() == expected


def test_seeds_are_odd_and_drawn() -> None:
    """A seed is two odd 64-bit numbers of the generator given, and decides the hash."""
    first, second = draw_seed(random.Random(1)), draw_seed(random.Random(2))
    assert first == draw_seed(random.Random(1))
    assert first != second
    rng = random.Random(3)
    drawn = [draw_seed(rng) for _ in range(50)]
    assert len(set(drawn)) == 50
    assert all(part % 2 == 1 and 0 < part < 2**64 for seed in drawn for part in (seed.first, seed.second))
    for column in (pa.array([1]), pa.array(["a"]), pa.array(["a" * 2000]), pa.array([0.5])):
        assert hashed(column, seed=first) != hashed(column, seed=second)


def test_what_is_hashed_stays_as_it_was() -> None:
    """Hashing and comparing write nothing into the columns, which may be a mapped file."""
    for array in (
        pa.array([1, -2, 3]),
        bits([*QUIET[pa.float64()], 1 << 63], pa.float64()),
        pa.array(["a", "bb", "é" * 3000]),
    ):
        before = [buffer.to_pybytes() for buffer in array.buffers() if buffer is not None]
        keys = Keys([array])
        keys.hashes(SEED)
        keys.equal(np.arange(3), keys, np.arange(3)[::-1])
        assert [buffer.to_pybytes() for buffer in array.buffers() if buffer is not None] == before


@examples(40)
@given(rows=st.lists(st.integers(0, 2**62), max_size=20), start=st.integers(0, 5))
def test_row_numbers_as_arrow_takes_them(rows: list[int], start: int) -> None:
    """`as_indices` gives the numbers as int64, of any numpy integers and any stride."""
    numbers = np.array(rows, np.int64)[start:]
    assert as_indices(numbers).to_pylist() == rows[start:]
    assert as_indices(numbers[::-1]).to_pylist() == rows[start:][::-1]
    assert as_indices(np.array([3, 2], np.uint32)).equals(pa.array([3, 2], pa.int64()))


@examples(40)
@given(values=st.lists(st.none() | st.text(max_size=5), max_size=10), data=st.data())
def test_offsets_and_bytes(values: list[str | None], data: st.DataObject) -> None:
    """`offsets_and_data` gives each row's bytes, of slices and of large types too."""
    start = data.draw(st.integers(0, len(values)))
    for kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
        encoded = [None if value is None else value.encode() for value in values]
        array = pa.array(encoded if "binary" in str(kind) else values, kind).slice(start)
        offsets, found = offsets_and_data(array)
        assert offsets.dtype == np.int64
        assert len(offsets) == len(array) + 1
        rows = [found[a:b].tobytes() for a, b in itertools.pairwise(offsets.tolist())]
        assert rows == [value or b"" for value in encoded[start:]]


# --- which columns can be keys, and which of the given ones they are ------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int64()),
        pa.struct([("x", pa.int64())]),
        pa.struct([]),
        pa.map_(pa.string(), pa.int64()),
        pa.list_(pa.list_(pa.string())),
    ],
    ids=str,
)
def test_nested_columns_cannot_be_keys(kind: pa.DataType) -> None:
    """A key column of a nested type is refused with its name, its type and the option to change."""
    with pytest.raises(SchemaError) as caught:
        check_key_types([pa.field("id", pa.int64()), pa.field("tags", kind)])
    assert "'tags'" in str(caught.value)
    assert str(kind) in str(caught.value)
    assert "lookup.keys" in str(caught.value)


def cast(array: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> list[Any]:
    """One column of keys as the table's type; the values in the form of `plain`."""
    (found,) = cast_keys(pa.table({"k": array}), [pa.field("k", kind)])
    assert found.type == kind
    assert isinstance(found, pa.Array)
    found.validate(full=True)
    return plain(found)


FIELDS = [pa.field("Id", pa.int64()), pa.field("name", pa.string())]


@pytest.mark.parametrize(
    "names",
    [["Id", "name"], ["name", "Id"], ["ID", "NAME"], ["NAME", "id"], ["x", "name", "id"], ["straße", "ID", "Name"]],
)
def test_keys_are_taken_by_name(names: list[str]) -> None:
    """Columns are found by name in any order, letter case aside, and others beside them are let be."""
    columns = {"id": pa.array([1, 2], pa.int32()), "name": pa.array(["a", "b"])}
    table = pa.table([columns.get(name.lower(), pa.array([[0], [0]])) for name in names], names)
    first, second = cast_keys(table, FIELDS)
    assert first.equals(pa.array([1, 2], pa.int64()))
    assert second.equals(pa.array(["a", "b"]))


def test_keys_are_taken_by_place() -> None:
    """Columns of other names, as many as there are keys, are taken in their order."""
    first, second = cast_keys(pa.table({"a": [1], "b": ["x"]}), FIELDS)
    assert (first.to_pylist(), second.to_pylist()) == ([1], ["x"])
    with pytest.raises(SchemaError, match="'Id' are string, the table's are int64"):
        cast_keys(pa.table({"b": ["x"], "a": [1]}), FIELDS)


@pytest.mark.parametrize("names", [["id"], ["id", "x"], ["x", "name"], ["x"], ["x", "y", "z"], ["name", "x", "y"], []])
def test_keys_that_are_not_clear_are_refused(names: list[str]) -> None:
    """Too few or too many columns, and names of which only some are known, are an error that names both sides."""
    table = pa.table([pa.array([1])] * len(names), names)
    with pytest.raises(SchemaError) as caught:
        cast_keys(table, FIELDS)
    assert "Id, name" in str(caught.value)
    assert ", ".join(names) in str(caught.value)


# --- keys in other types than the table's ---------------------------------------------------------------

INTS = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
GIVEN_INTS = [*INTS, pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]


def bounds(kind: pa.DataType) -> tuple[int, int]:
    info = np.iinfo(kind.to_pandas_dtype())
    return int(info.min), int(info.max)


@pytest.mark.parametrize("kind", INTS, ids=str)
@pytest.mark.parametrize("given_kind", GIVEN_INTS, ids=str)
def test_whole_numbers_of_any_width(given_kind: pa.DataType, kind: pa.DataType) -> None:
    """A whole number that the column's type has is that number; any other, as 2^63 in int64, is null and finds nothing."""
    (low, high), (least, most) = bounds(given_kind), bounds(kind)
    edges = {low, low + 1, high, high - 1, least, least - 1, most, most + 1, 0, 1, -1, 100}
    values = [None, *sorted(edge for edge in edges if low <= edge <= high)]
    expected = [value if value is not None and least <= value <= most else None for value in values]
    assert cast(pa.array(values, given_kind), kind) == expected
    assert cast(pa.array([0, *values], given_kind).slice(1), kind) == expected
    assert cast(pa.chunked_array([pa.array([v], given_kind) for v in values]), kind) == expected


def exactly(value: decimal.Decimal | int | None, kind: pa.DataType) -> decimal.Decimal | None:
    """The value if a decimal of that type can be it."""
    if value is None:
        return None
    scaled = decimal.Decimal(value).scaleb(kind.scale, decimal.Context(prec=200))
    whole = scaled.quantize(decimal.Decimal(1), context=decimal.Context(prec=200))
    fits = scaled == whole and whole.copy_abs() < decimal.Decimal(f"1E{kind.precision}")
    return decimal.Decimal(value) if fits else None


DECIMALS = [
    pa.decimal128(1, 0), pa.decimal128(5, 2), pa.decimal128(9, 9), pa.decimal128(18, 4), pa.decimal128(38, 0),
    pa.decimal128(38, 10), pa.decimal128(38, 38),
]  # fmt: skip
GIVEN_DECIMALS = [*DECIMALS, pa.decimal32(5, 2), pa.decimal64(15, 2), pa.decimal256(60, 2)]


@examples(100)
@given(data=st.data())
def test_decimals_of_any_precision(data: st.DataObject) -> None:
    """A decimal, of any width, is the same number in the column's type, or null where that has too few digits for it."""
    given_kind, kind = data.draw(st.sampled_from(GIVEN_DECIMALS)), data.draw(st.sampled_from(DECIMALS))
    assume(kind.precision - kind.scale + max(kind.scale, given_kind.scale) < 76)  # see test_decimals_far_apart
    values = data.draw(st.lists(st.none() | values_of(given_kind), max_size=6))
    array = pa.array(values, given_kind)
    assert cast(array, kind) == [exactly(value, kind) for value in values]


@pytest.mark.parametrize(
    ("given_kind", "kind"),
    [
        (pa.decimal128(38, 38), pa.decimal128(38, 0)),
        (pa.decimal256(76, 70), pa.decimal128(38, 10)),
        (pa.decimal256(76, 0), pa.decimal128(38, 10)),
    ],
    ids=str,
)
def test_decimals_far_apart(given_kind: pa.DataType, kind: pa.DataType) -> None:
    """A decimal of many digits behind the point is null in a column of many before it, unless it is 0; and the other way round."""
    values = [None, number(0, 0), number(10**given_kind.precision - 1, given_kind.scale)]
    assert cast(pa.array(values, given_kind), kind) == [exactly(value, kind) for value in values]


@examples(80)
@given(data=st.data())
def test_whole_numbers_as_decimals(data: st.DataObject) -> None:
    """A whole number is the same number as a decimal, or null where that has too few digits before the point."""
    given_kind, kind = data.draw(st.sampled_from(GIVEN_INTS)), data.draw(st.sampled_from(DECIMALS))
    low, high = bounds(given_kind)
    near = st.sampled_from([n + d for n in (0, 10, 1000, 100_000) for d in (-1, 0, 1)])
    either = (st.integers(low, high) | near).filter(lambda n: low <= n <= high)
    values = data.draw(st.lists(st.none() | either, max_size=6))
    assert cast(pa.array(values, given_kind), kind) == [exactly(value, kind) for value in values]


@pytest.mark.parametrize("kind", INTS, ids=str)
def test_decimals_as_whole_numbers(kind: pa.DataType) -> None:
    """A decimal that is a whole number in the column's range is that number."""
    low, high = bounds(kind)
    for given_kind in (pa.decimal128(21, 0), pa.decimal128(38, 10), pa.decimal256(60, 2)):
        values = [None, 0, 1, -1, 100, low, high]
        array = pa.array([None if v is None else decimal.Decimal(v) for v in values], given_kind)
        assert cast(array, kind) == values


@pytest.mark.parametrize("value", ["1.5", "300", "-129", "1E20", "0.01"])
def test_decimals_that_are_no_whole_number_of_the_column(value: str) -> None:
    """A decimal that the column's whole numbers do not have is null, and the keys beside it are found."""
    given_kind = pa.decimal128(38, 10) if value != "1E20" else pa.decimal128(21, 0)
    assert cast(pa.array([decimal.Decimal(value), decimal.Decimal(7)], given_kind), pa.int8()) == [None, 7]


@examples(80)
@given(values=st.lists(st.none() | st.floats() | st.floats(width=32), max_size=8))
def test_doubles_as_floats(values: list[float | None]) -> None:
    """A double is the float of the same value, NaN and infinities too; one that no float equals is null."""
    with np.errstate(over="ignore"):
        kept = [None if v is None or (float(np.float32(v)) != v and not math.isnan(v)) else v for v in values]
    assert cast(pa.array(values, pa.float64()), pa.float32()) == plain(pa.array(kept, pa.float64()))
    (found,) = cast_keys(pa.table({"k": pa.array([-0.0])}), [pa.field("k", pa.float32())])
    assert math.copysign(1, found[0].as_py()) == -1


@examples(40)
@given(values=st.lists(st.none() | st.floats(width=32), max_size=8))
def test_floats_as_doubles(values: list[float | None]) -> None:
    """A float is the double of the same value."""
    assert cast(pa.array(values, pa.float32()), pa.float64()) == plain(pa.array(values, pa.float64()))


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()], ids=str)
def test_half_floats(kind: pa.DataType) -> None:
    """A half float is the float of the same value."""
    assert cast(pa.array([np.float16(1.5), None], pa.float16()), kind) == [1.5, None]


def test_text_and_binary_of_any_layout() -> None:
    """Text is its characters and binary its bytes, in every type that Arrow has for them."""
    texts = ["a", None, "", "a longer text than fits a view", "\0"]
    for given_kind in (pa.large_string(), pa.string_view(), pa.string()):
        assert cast(pa.array(texts, given_kind), pa.string()) == texts
        assert cast(pa.chunked_array([pa.array([t], given_kind) for t in texts]), pa.string()) == texts
    raw = [b"ab", None, b"\0\0"]
    for given_kind in (pa.large_binary(), pa.binary_view(), pa.binary(2), pa.binary()):
        assert cast(pa.array(raw, given_kind), pa.binary()) == raw


@pytest.mark.parametrize("index", [pa.int8(), pa.int32(), pa.uint16()], ids=str)
def test_dictionary_encoded_keys(index: pa.DataType) -> None:
    """Dictionary-encoded keys are their values, in chunks with different dictionaries and in other types of the family."""
    texts = [pa.array(["x", None, "y"]), pa.array(["y", "z"])]
    encoded = [pc.dictionary_encode(chunk).cast(pa.dictionary(index, pa.string())) for chunk in texts]
    assert cast(pa.chunked_array(encoded), pa.string()) == ["x", None, "y", "y", "z"]
    assert cast(encoded[0].slice(1), pa.string()) == [None, "y"]
    numbers = pa.array([1, 300, None, 1]).dictionary_encode()
    assert cast(numbers, pa.int8()) == [1, None, None, 1]
    assert cast(pa.chunked_array([], pa.dictionary(index, pa.string())), pa.string()) == []


def test_dates_and_their_days() -> None:
    """A date64 is the date32 of the same day."""
    days = [datetime.date(1970, 1, 1), datetime.date(1969, 12, 31), None, datetime.date(2024, 2, 29), datetime.date.max]
    expected = [None if day is None else (day - datetime.date(1970, 1, 1)).days for day in days]
    assert cast(pa.array(days, pa.date64()), pa.date32()) == expected


UNITS = {"s": 1_000_000, "ms": 1000, "us": 1}


@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Tokyo", "+02:00"])
def test_timestamps_of_any_unit(zone: str | None) -> None:
    """A timestamp is the one of the same microsecond; one between two microseconds is null; a zone changes no instant."""
    kind = US if zone is None else US_UTC
    for unit, factor in UNITS.items():
        values = [0, 1, -1, None, 1_700_000_000, -(2**62 // factor), 2**62 // factor]
        array = pa.array(values, pa.timestamp(unit, zone))
        assert cast(array, kind) == [None if v is None else v * factor for v in values]
    fine = [
        0,
        1,
        999,
        1000,
        -1,
        -999,
        -1000,
        -1001,
        None,
        2**63 - 1,
        -(2**63),
        9_223_372_036_854_775_000,
        -(2**63) + 808,
    ]
    expected = [None if v is None or v % 1000 else v // 1000 for v in fine]
    assert cast(pa.array(fine, pa.timestamp("ns", zone)), kind) == expected
    assert expected.count(None) == 8


@pytest.mark.parametrize(
    ("given_kind", "value", "kind"),
    [
        (pa.timestamp("s"), 2**60, US),
        (pa.timestamp("ms", "UTC"), -(2**62), US_UTC),
        (pa.date64(), 2**62 // 86_400_000 * 86_400_000, pa.date32()),
        (pa.date64(), 1, pa.date32()),
    ],
    ids=str,
)
def test_times_that_the_column_cannot_hold(given_kind: pa.DataType, value: int, kind: pa.DataType) -> None:
    """A time outside the range of the column's type is null, and the keys beside it are found."""
    assert cast(pa.array([value, 0], given_kind), kind) == [None, 0]


@each_kind
def test_keys_of_no_type_are_null(kind: pa.DataType) -> None:
    """A column of nulls fits every key, and finds nothing."""
    assert cast(pa.nulls(3), kind) == [None] * 3
    assert cast(pa.nulls(3, kind), kind) == [None] * 3
    assert cast(pa.nulls(0), kind) == []


@each_kind
@examples(8)
@given(data=st.data())
def test_keys_of_the_tables_type_stay(kind: pa.DataType, data: st.DataObject) -> None:
    """Keys of the column's own type are what they were, in any chunks and of any value."""
    values = data.draw(st.lists(st.none() | values_of(kind), max_size=6))
    cut = data.draw(st.integers(0, len(values)))
    array = pa.array(values, kind)
    assert cast(array, kind) == plain(array)
    assert cast(pa.chunked_array([array.slice(0, cut), array.slice(cut)], kind), kind) == plain(array)


FAMILIES: dict[str, list[pa.DataType]] = {
    "exact number": [pa.int8(), pa.int64(), pa.uint64(), pa.decimal128(5, 2)],
    "float": [pa.float32(), pa.float64()],
    "text": [pa.string(), pa.large_string(), pa.string_view()],
    "binary": [pa.binary(), pa.large_binary(), pa.binary(3)],
    "date": [pa.date32(), pa.date64()],
    "timestamp": [pa.timestamp("us"), pa.timestamp("ns"), pa.timestamp("s")],
    "instant": [pa.timestamp("us", "UTC"), pa.timestamp("ns", "Asia/Tokyo")],
    "boolean": [pa.bool_()],
    "duration": [pa.duration("us")],
    "time": [pa.time64("us")],
    "nested": [pa.list_(pa.int64())],
}


@pytest.mark.parametrize("one", FAMILIES)
@pytest.mark.parametrize("other", FAMILIES)
def test_families_do_not_mix(one: str, other: str) -> None:
    """Keys of another family than the column's are refused, naming the column and both types; within one they are not."""
    kinds = [kind for kind in FAMILIES[other] if kind in KINDS]
    for given_kind, kind in itertools.product(FAMILIES[one], kinds):
        table = pa.table({"Key": pa.nulls(2, given_kind)})
        if one == other:
            (found,) = cast_keys(table, [pa.field("key", kind)])
            assert (found.type, found.null_count) == (kind, 2)
            continue
        with pytest.raises(SchemaError) as caught:
            cast_keys(table, [pa.field("key", kind)])
        assert "'key'" in str(caught.value)
        assert f"keys of column 'key' are {given_kind}, the table's are {kind}" in str(caught.value)


def test_an_encoded_key_of_another_family_is_refused() -> None:
    """A dictionary hides no family: its values' type is what the message names."""
    with pytest.raises(SchemaError, match="keys of column 'k' are string, the table's are int64"):
        cast(pa.array(["1"]).dictionary_encode(), pa.int64())
    with pytest.raises(SchemaError, match="are int64, the table's are string"):
        cast(pa.array([1]).dictionary_encode(), pa.string())
