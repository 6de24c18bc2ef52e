"""Key columns: what is equal hashes alike, keys in other types find what they mean, and the index answers as a dict of lists would."""

import dataclasses
import decimal
import hashlib
import itertools
import math
import random
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup.columnar import keys as keys_module
from pyspark_lookup.columnar.keys import (
    BUCKET_AT_MOST,
    IndexBuilder,
    KeyIndex,
    Keys,
    Numbers,
    Seed,
    SkewedError,
    as_indices,
    cast_keys,
    draw_seed,
    hash_one,
    make_key_parser,
    make_value_reader,
    order_rows,
)
from pyspark_lookup.errors import SchemaError
from tests.support.fuzzing import fuzzed
from tests.support.key_values import (
    KINDS,
    LARGE,
    LONG,
    QUIET,
    SEED,
    SIGNALLING,
    TEXTS,
    US,
    US_UTC,
    bits,
    each_kind,
    mixed,
    number,
    plain,
    scalar_values,
)

OTHER_SEED = Seed(0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def hashed(*columns: pa.Array) -> list[int]:
    return Keys(columns).hashes(SEED).tolist()


def everywhere(array: pa.Array) -> list[pa.Array]:
    """The same values as they may come: behind another offset, from a file, with large offsets."""
    before = array.slice(0, 3)  # other values
    around = pa.concat_arrays([before, array])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, pa.schema([("k", array.type)])) as writer:
        writer.write_batch(pa.record_batch([array], ["k"]))
    large = around.cast(LARGE.get(array.type, array.type))
    read = pa.ipc.open_file(sink.getvalue()).get_batch(0).column(0)
    return [array, around.slice(len(before)), large.slice(len(before)), read]


def row_pairs(count: int) -> tuple[Numbers, Numbers]:
    first, second = np.meshgrid(np.arange(count), np.arange(count), indexing="ij")
    return first.ravel(), second.ravel()


def expected_hash(value: Any, kind: pa.DataType, before: int, seed: Seed) -> int:
    """The hash as the head of the module says it: 64-bit words, each folded in by h = mix(h ^ w)."""
    digest = 0
    if pa.types.is_decimal(kind):
        digits = int(decimal.Decimal(value).scaleb(kind.scale, decimal.Context(prec=80)))
        words = [digits % 2**64, (digits >> 64) % 2**64]
    elif pa.types.is_floating(kind):
        # -0.0 counts as 0.0, and all NaNs as the one that Python has.
        words = [struct.unpack("<Q", struct.pack("<d", math.nan if value == "NaN" else value + 0.0))[0]]
    elif isinstance(value, (str, bytes)):
        data = value.encode() if isinstance(value, str) else value
        words = [len(data)]
        if len(data) <= 1024:
            words += [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
        else:
            secret = seed.first.to_bytes(8, "little") + seed.second.to_bytes(8, "little")
            digest = int.from_bytes(hashlib.blake2b(data, digest_size=8, key=secret).digest(), "little")
    else:
        words = [int(value) % 2**64]
    for word in words:
        before = mixed(before ^ word, seed)
    return before ^ digest


@each_kind
@fuzzed(24)
@given(data=st.data())
def test_equal_keys_hash_alike(kind: pa.DataType, data: st.DataObject) -> None:
    """Keys are equal where all values are, and none with a null is; hashes are the documented ones, wherever a column lies."""
    kinds = [kind, *data.draw(st.just([]) | st.lists(st.sampled_from(KINDS), min_size=1, max_size=2))]
    seed = data.draw(st.sampled_from([SEED, OTHER_SEED]))
    pools = [data.draw(st.lists(st.none() | scalar_values(of), min_size=2, max_size=4, unique_by=repr)) for of in kinds]
    rows = data.draw(st.just([]) | st.lists(st.tuples(*map(st.sampled_from, pools)), min_size=4, max_size=12))
    columns = [pa.array([row[n] for row in rows], of) for n, of in enumerate(kinds)]
    values = list(zip(*map(plain, columns), strict=True))
    valid_rows = [row for row, value in enumerate(values) if None not in value]
    hashes = []
    for row in valid_rows:
        hashes.append(0)
        for value, of in zip(values[row], kinds, strict=True):
            hashes[-1] = expected_hash(value, of, hashes[-1], seed)
    first, second = (np.array(valid_rows, np.int64)[places][::-1] for places in row_pairs(len(valid_rows)))
    are_equal = [values[a] == values[b] for a, b in zip(first, second, strict=True)]
    for form in zip(*map(everywhere, columns), strict=True):
        keys, original = Keys(form), Keys(columns)
        assert keys.rows == len(rows)
        assert (keys.valid is None) is (len(valid_rows) == len(rows))
        assert keys.valid is None or np.flatnonzero(keys.valid).tolist() == valid_rows
        assert keys.hashes(seed)[valid_rows].tolist() == hashes
        assert keys.equal(first, original, second).tolist() == original.equal(first, keys, second).tolist() == are_equal
        for row, expected in zip(valid_rows, hashes, strict=True):
            alone = Keys([column.slice(row, 1) for column in form])  # without its column's nulls
            assert (alone.valid, alone.hashes(seed).tolist()) == (None, [expected])


TEN_VALUES: list[tuple[list[pa.DataType], list[Any]]] = [
    ([pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32()], [1, -2, 3, 4, 100, 6, 7, 8, 9, 10]),
    ([pa.float64(), pa.float16()], [0.5, 1.5, -2.25, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.5]),
    ([pa.uint8()], [1, 2, 3, 4, 200, 6, 7, 8, 9, 10]),
    ([pa.string(), pa.large_string(), pa.string_view()], ["a", "", "日本", "d", "eee", "f", "g", "h", "i", "j"]),
    ([pa.binary(), pa.large_binary()], [b"a", b"", b"\xff", b"d", b"eee", b"f", b"g", b"h", b"i", b"j"]),
    ([pa.bool_()], [True, False, False, True, True, True, False, False, True, True]),
]
ONE_BY_ONE = {kind: values for kinds, values in TEN_VALUES for kind in kinds}


@pytest.mark.parametrize("kind", ONE_BY_ONE, ids=str)
@pytest.mark.parametrize("nulls", [(), (0, 3, 9)], ids=["", "nulls"])
def test_values_one_by_one(kind: pa.DataType, nulls: Sequence[int]) -> None:
    """A row has the value that Arrow returns, also in an array that is a part of another or empty."""
    values = [None if row in nulls else value for row, value in enumerate(ONE_BY_ONE[kind])]
    array = pa.array(values, kind)
    for part in (array, array.slice(2), array.slice(3, 5), array.slice(4, 0)):
        read = make_value_reader(part)
        assert [read(row) for row in range(len(part))] == part.to_pylist()


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


@pytest.mark.parametrize("kind", SIGNALLING, ids=str)
def test_a_signalling_nan_is_nan(kind: pa.DataType) -> None:
    """All NaNs are one key, those too that no arithmetic made and only bits in a file are; both zeros another, and none is a third."""
    sign = 1 << (kind.bit_width - 1)
    patterns = QUIET[kind] + SIGNALLING[kind]
    array = bits([*patterns, 0, sign, 1, sign | 1], kind)
    names = ["NaN"] * len(patterns) + ["zero"] * 2 + ["tiny", "-tiny"]
    hashes = hashed(array)
    first, second = row_pairs(len(array))
    are_equal = [names[a] == names[b] for a, b in zip(first, second, strict=True)]
    assert [hashes[a] == hashes[b] for a, b in zip(first, second, strict=True)] == are_equal
    assert Keys([array]).equal(first, Keys([array]), second).tolist() == are_equal


def cast(array: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> list[Any]:
    """One column of keys, cast to the table's type; returns the values in the form of `plain`."""
    (column,) = cast_keys(pa.table({"k": array}), [pa.field("k", kind)])
    assert column.type == kind
    column.validate(full=True)
    return plain(column)


FIELDS = [pa.field("Id", pa.int64()), pa.field("name", pa.string())]


@pytest.mark.parametrize(
    ("names", "clear"),
    [
        *((names, True) for names in ("Id name", "name Id", "ID NAME", "NAME id", "x name id", "straße ID Name")),
        ("a b", True),
        *((names, False) for names in ("id", "id x", "x name", "x", "x y z", "name x y", "")),
    ],
)
def test_keys_are_taken_by_name_or_place(names: str, clear: bool) -> None:
    """Columns are found by name, letter case aside, or all by place; too few or too many are an error that names both sides."""
    texts = pa.array(["a", "b"])
    columns_by_name = {"id": pa.array([1, 2], pa.int32()), "name": texts, "a": pa.array([1, 2]), "b": texts}
    table = pa.table([columns_by_name.get(name.lower(), pa.array([[0], [0]])) for name in names.split()], names.split())
    if clear:
        first, second = cast_keys(table, FIELDS)
        assert first.equals(pa.array([1, 2], pa.int64()))
        assert second.equals(texts)
        return
    with pytest.raises(SchemaError) as caught:
        cast_keys(table, FIELDS)
    assert "Id, name" in str(caught.value)
    assert ", ".join(names.split()) in str(caught.value)


INTS = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
UNSIGNED = [pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
DECIMALS = [pa.decimal128(*digits) for digits in ((1, 0), (5, 2), (9, 9), (18, 4), (38, 0), (38, 10), (38, 38))]
OTHER_DECIMALS = [
    pa.decimal32(5, 2), pa.decimal64(15, 2), pa.decimal256(60, 2), pa.decimal256(76, 70), pa.decimal256(76, 0),
]  # fmt: skip
UNITS = {"s": 10**9, "ms": 10**6, "us": 1000, "ns": 1}
FAMILIES: dict[str, tuple[list[pa.DataType], list[pa.DataType]]] = {
    "exact number": (
        [*INTS, *UNSIGNED, *DECIMALS, *OTHER_DECIMALS, pa.dictionary(pa.int16(), pa.int64())],
        [*INTS, *DECIMALS],
    ),
    "float": ([pa.float16(), pa.float32(), pa.float64()], [pa.float32(), pa.float64()]),
    "text": (
        [pa.string(), pa.large_string(), pa.string_view(), *(pa.dictionary(i, pa.string()) for i in (pa.int8(), pa.uint16()))],
        [pa.string()],
    ),
    "binary": ([pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(2)], [pa.binary()]),
    "date": ([pa.date32(), pa.date64()], [pa.date32()]),
    "timestamp": ([pa.timestamp(unit) for unit in UNITS], [US]),
    "instant": ([pa.timestamp(unit, zone) for unit in UNITS for zone in ("UTC", "Asia/Tokyo", "+02:00")], [US_UTC]),
    "boolean": ([pa.bool_()], [pa.bool_()]),
    "duration": ([pa.duration("us")], [pa.duration("us")]),
    "time": ([pa.time64("us")], []),
    "nested": ([pa.list_(pa.int64())], []),
}  # fmt: skip
"""Types that keys of a kind may come in, and those that a table may have for them."""


def edge_values(kind: pa.DataType) -> list[Any]:
    """The values at the edges of a type: numbers exactly, times in nanoseconds."""
    if pa.types.is_integer(kind):
        info = np.iinfo(kind.to_pandas_dtype())
        return [decimal.Decimal(int(edge) + d) for edge in (info.min, info.max) for d in (-1, 0, 1)]
    if pa.types.is_decimal(kind):
        most = 10**kind.precision - 1
        return [number(digits, kind.scale) for digits in (most, -most, most + 1, 1)]
    if pa.types.is_floating(kind):
        exact = [0.0, -0.0, 0.1, 1.5, math.nan, math.inf, -math.inf, 65504.0, 2.0**-24, 2.0**24 + 1, 1e300]
        return [*exact, float(np.float32(0.1)), 3.4028234663852886e38]
    if "string" in str(kind) or "binary" in str(kind):
        return [*TEXTS, *LONG] if "string" in str(kind) else [b"ab", b"", b"\0\0", b"x" * 2000]
    if pa.types.is_boolean(kind):
        return [True, False]
    unit = unit_ns(kind)
    top = 2 ** (kind.bit_width - 1)
    return [n * unit for n in (-top, -top + 1, -1, 0, 1, 999, 1000, 1_700_000_000, top - 808, top - 1)]


def unit_ns(kind: pa.DataType) -> int:
    return 86_400 * 10**9 if pa.types.is_date32(kind) else UNITS["ms" if pa.types.is_date64(kind) else kind.unit]


def convert(value: Any, kind: pa.DataType) -> Any:
    """The value as one of that type, as a number if it is a time; None if there is none."""
    if pa.types.is_dictionary(kind):
        return convert(value, kind.value_type)
    if pa.types.is_integer(kind):
        info = np.iinfo(kind.to_pandas_dtype())
        return int(value) if value == int(value) and info.min <= value <= info.max else None
    if pa.types.is_decimal(kind):
        digits = value.scaleb(kind.scale, decimal.Context(prec=200))
        fits = digits == int(digits) and abs(int(digits)) < 10**kind.precision
        return number(int(digits), kind.scale) if fits else None
    if pa.types.is_floating(kind):
        with np.errstate(over="ignore"):
            rounded = kind.to_pandas_dtype()(value).item()
        return rounded if rounded == value or math.isnan(value) else None
    if pa.types.is_temporal(kind):
        units, remainder = divmod(value, unit_ns(kind))
        top = 2 ** (kind.bit_width - 1)
        return units if remainder == 0 and -top <= units < top else None
    return value if not pa.types.is_fixed_size_binary(kind) or len(value) == kind.byte_width else None


def make_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(kind):
        return make_array(values, kind.value_type).dictionary_encode().cast(kind)
    if pa.types.is_temporal(kind):
        return pa.array(values, pa.int32() if kind.bit_width == 32 else pa.int64()).view(kind)
    return pa.array([np.float16(v) if v is not None and pa.types.is_float16(kind) else v for v in values], kind)


@pytest.mark.parametrize("family", [family for family, (_, kinds) in FAMILIES.items() if kinds])
def test_keys_in_another_type(family: str) -> None:
    """A key in any type of its family is the same value in the column's, in any chunks, or null where that has no such value."""
    given_kinds, kinds = FAMILIES[family]
    values = [value for kind in given_kinds if not pa.types.is_dictionary(kind) for value in edge_values(kind)]
    if family == "exact number":
        values += map(decimal.Decimal, ["0", "1", "-1", "100", "1.5", "0.01", "1E20", "300", "-129"])
    values = list({repr(value): value for value in values}.values())
    for given_kind, kind in itertools.product(given_kinds, kinds):
        convertible = [value for value in values if convert(value, given_kind) is not None]
        keys = make_array([None, *(convert(value, given_kind) for value in convertible)], given_kind)
        expected = [None, *(convert(value, kind) for value in convertible)]
        expected_plain = ["NaN" if isinstance(value, float) and math.isnan(value) else value for value in expected]
        one_by_one = [keys.slice(row, 1) for row in range(len(keys))]
        for form in (keys, pa.concat_arrays([keys, keys]).slice(len(keys)), pa.chunked_array(one_by_one)):
            actual = cast(form, kind)
            assert actual == expected_plain, (given_kind, kind)
            assert family != "float" or list(map(repr, actual)) == list(map(repr, expected_plain))  # -0.0 is not 0.0
        assert cast(pa.chunked_array([], given_kind), kind) == []


@pytest.mark.parametrize("given_family", FAMILIES)
@pytest.mark.parametrize("table_family", FAMILIES)
def test_families_do_not_mix(given_family: str, table_family: str) -> None:
    """Keys of another family are refused, naming the column and both types; nulls of the same one, or of no type, find nothing."""
    for given_kind, kind in itertools.product(FAMILIES[given_family][0], FAMILIES[table_family][1]):
        assert cast(pa.nulls(3), kind) == [None] * 3
        nulls = pa.nulls(2, given_kind)
        if given_family == table_family:
            assert cast(nulls, kind) == [None, None]
            continue
        named_kind = given_kind.value_type if pa.types.is_dictionary(given_kind) else given_kind
        with pytest.raises(
            SchemaError,
            match=re.escape(
                f"keys for column 'key' are of type {named_kind}, but the table's column is of type {kind}"
            ),
        ):
            cast_keys(pa.table({"Key": nulls}), [pa.field("key", kind)])


WEAK = Seed(1, 1)  # leaves small numbers where they are: all in the first bucket


@dataclasses.dataclass
class Built:
    """An index over `columns`: `rows` are the rows given in the order in which it has them."""

    columns: list[pa.Array]
    seed: Seed
    arrays: dict[str, Numbers]
    index: KeyIndex
    rows: Numbers

    def pairs(self, probed: Sequence[pa.Array], hashes: Numbers | None = None) -> list[tuple[int, int]]:
        """(probed key, given row) as the index finds them, checked for the order it promises; one by one it finds the same."""
        keys = Keys(probed)
        matches = self.index.probe(keys, keys.hashes(self.seed) if hashes is None else hashes)
        kind = probed[0].type
        for place, key in enumerate(plain(probed[0])) if len(probed) == 1 else ():
            python_key = None if pa.types.is_temporal(kind) else make_key_parser(kind)(key)
            if python_key is not None:
                hashed = hash_one(python_key, self.seed) if hashes is None else int(hashes[place])
                assert list(self.index.find_rows(python_key, hashed)) == matches.rows[matches.keys == place].tolist()
        assert matches.keys.dtype == matches.rows.dtype == np.int64
        actual = list(zip(matches.keys.tolist(), matches.rows.tolist(), strict=True))
        assert actual == sorted(actual)
        return [(key, int(self.rows[row])) for key, row in actual]

    def expected(self, probed: Sequence[pa.Array]) -> list[tuple[int, int]]:
        """The same pairs, found by a dict of lists."""
        rows_by_key: dict[Any, list[int]] = {}
        for row, key in enumerate(zip(*map(plain, self.columns), strict=True)):
            if None not in key:
                rows_by_key.setdefault(key, []).append(row)
        numbered_keys = enumerate(zip(*map(plain, probed), strict=True))
        return [(number, row) for number, key in numbered_keys for row in rows_by_key.get(key, ())]


def built(
    columns: list[pa.Array], seed: Seed = SEED, *,
    parts: int = 0, hashes: Numbers | None = None, strict: bool = True, slots: bool = True,
) -> Built:  # fmt: skip
    """An index as a snapshot's builder makes it, of 2**`parts` ranges of the hash space one after the other."""
    keys = Keys(columns)
    hashes = keys.hashes(seed) if hashes is None else hashes
    valid = np.ones(keys.rows, np.bool_) if keys.valid is None else keys.valid
    kind = columns[0].type
    fixed = len(columns) == 1 and keys.columns[0].values is not None
    bounds = None
    without_slots = pa.types.is_floating(kind) or pa.types.is_decimal(kind) or pa.types.is_duration(kind)
    if slots and fixed and not without_slots and valid.any():
        values = keys.columns[0].values[valid]  # type: ignore[index]
        bounds = int(values.min()), int(values.max())
    builder = IndexBuilder(int(valid.sum()), bounds, not fixed)
    part_of = hashes >> np.uint64(64 - parts) if parts else np.zeros(keys.rows, np.uint64)
    ordered = []
    for part in range(1 << parts):
        rows = np.flatnonzero(valid & (part_of == part))
        piece = Keys([column.take(as_indices(rows)) for column in columns])
        order = order_rows(piece, hashes[rows])
        builder.add(order, piece)
        ordered.append(rows[order.rows])
    rows = np.concatenate([*ordered, np.flatnonzero(~valid)])
    assert builder.rows == valid.sum()
    arrays = builder.arrays(strict)
    stored = [column.take(as_indices(rows)) for column in columns]
    return Built(columns, seed, arrays, KeyIndex(arrays, stored, builder.low), rows)


COLLISIONS: dict[str, Callable[[int], int]] = {
    "all bits": lambda n: 0xABCDEF << 40, "no bits set": lambda n: 0, "all bits set": lambda n: 2**64 - 1,
    "the upper 48 bits": lambda n: 0xABCDEF << 40 | n * 40503 % 2**16, "three values": lambda n: n % 3 << 62 | 5,
    "two of the upper 48": lambda n: n % 2 << 16 | n,
    "all but bits 16 to 32": lambda n: 0xABC << 48 | n * 40503 % 2**16 << 16,
    "all but bits 32 to 48": lambda n: 0xABC << 48 | n * 40503 % 2**16 << 32 | 0xDEF << 16,
    "all but the upper 16": lambda n: n * 40503 % 2**16 << 48 | 0xABCDEF << 16, "nothing": lambda n: mixed(n + 1, SEED),
}  # fmt: skip
"""Hashes of the n-th key, which agree in as many bits as said for different ones."""


def colliding(columns: Sequence[pa.Array], how: str) -> Numbers:
    """Hashes of keys that collide as `how` says; equal keys have equal ones."""
    numbers: dict[Any, int] = {}
    ids = [numbers.setdefault(key, len(numbers)) for key in zip(*map(plain, columns), strict=True)]
    return np.array([COLLISIONS[how](n) for n in ids], np.uint64)


@st.composite
def key_columns(draw: st.DrawFn, kinds: Sequence[pa.DataType]) -> tuple[list[pa.Array], list[pa.Array]]:
    """Key columns of a table, unique or heavily duplicate, with nulls; and keys to probe, most of them there."""
    pool = draw(st.lists(st.tuples(*map(scalar_values, kinds)), min_size=1, max_size=12))
    rows = pool if draw(st.booleans()) else draw(st.lists(st.sampled_from(pool), max_size=40))
    absent = draw(st.lists(st.tuples(*map(scalar_values, kinds)), max_size=4))
    probed = draw(st.lists(st.sampled_from(pool + absent), max_size=20))
    nulls = st.lists(st.integers(0, 40), max_size=4)

    def columns(of: list[tuple[Any, ...]]) -> list[pa.Array]:
        arrays = []
        for place, kind in enumerate(kinds):
            null_rows = set(draw(nulls)) if draw(st.booleans()) else set()
            arrays.append(pa.array([None if n in null_rows else row[place] for n, row in enumerate(of)], kind))
        return arrays

    return columns(rows), columns(probed)


@each_kind
@fuzzed(30)
@given(data=st.data())
def test_probing(kind: pa.DataType, data: st.DataObject) -> None:
    """Probing by slots and by hash, in any parts, with hashes that collide, finds exactly the rows of each key, in their order; nulls find nothing."""
    kinds = [kind, *data.draw(st.just([]) | st.lists(st.sampled_from(KINDS), min_size=1, max_size=2))]
    columns, probed = data.draw(key_columns(kinds))
    for slots in (True, False):
        index = built(columns, parts=data.draw(st.integers(0, 3)), slots=slots)
        for part in (probed, columns, [column.slice(1) for column in probed], [pa.nulls(2, kind) for kind in kinds]):
            assert index.pairs(part) == index.expected(part)
        keys = [key for key in zip(*map(plain, columns), strict=True) if None not in key]
        assert index.index.unique is ("first" not in index.arrays) is (len(set(keys)) == len(keys))
    how = data.draw(st.sampled_from([*COLLISIONS]))
    forged = colliding([pa.concat_arrays([a, b]) for a, b in zip(columns, probed, strict=True)], how)
    stored_hashes, probed_hashes = forged[: len(columns[0])], forged[len(columns[0]) :]
    index = built(columns, hashes=stored_hashes, strict=False, slots=False)
    assert index.pairs(probed, probed_hashes) == index.expected(probed)
    assert index.pairs(columns, stored_hashes) == index.expected(columns)
    nothing = built([column.slice(0, 0) for column in columns])
    assert nothing.index.unique
    assert nothing.pairs(probed) == nothing.pairs([column.slice(0, 0) for column in probed]) == []


def test_the_first_key_with_several_rows_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys before it, which have one row each, are found in their own rows."""
    monkeypatch.setattr(keys_module, "_AT_ONCE", 7)
    values = np.arange(100) * 1_000_003
    last = values[np.argmax(Keys([pa.array(values)]).hashes(SEED))]
    index = built([pa.array(np.append(values, last))], parts=4)
    probed = [pa.array(values)]
    assert index.pairs(probed) == index.expected(probed)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("parts", [0, 8])
def test_a_full_bucket_is_an_error_and_then_only_slow(wide: bool, parts: int) -> None:
    """A key too many in a bucket, of one part or of two that share it, is SkewedError if strict, and else found."""
    for count in (BUCKET_AT_MOST, BUCKET_AT_MOST + 1, 300):
        values = [n * 1_000_003 for n in range(count)]
        columns = [pa.array([str(v) for v in values]) if wide else pa.array(values)]
        # Of the first two counts there are 64 buckets, each of which spans four of 256 parts.
        hashes = np.array([2**63 | (n % 2 << 56 if count < 48 else 0) for n in range(count)], np.uint64)
        if count > BUCKET_AT_MOST:
            with pytest.raises(SkewedError, match=str(count)):
                built(columns, hashes=hashes, parts=parts)
        index = built(columns, hashes=hashes, parts=parts, strict=count <= BUCKET_AT_MOST)
        assert index.pairs(columns, hashes) == [(n, n) for n in range(count)]
        strange = [pa.array(["x"] if wide else [1])]
        assert index.pairs(strange, np.full(1, 2**63, np.uint64)) == []


def aimed(seed: Seed, count: int) -> list[int]:
    """64-bit keys whose hashes under this seed agree in the upper 48 bits: the mixing, backwards."""
    first, second = pow(seed.first, -1, 2**64), pow(seed.second, -1, 2**64)
    keys = []
    for low in range(count):
        word = (0xC0FFEE << 40 | low) * second % 2**64
        word = (word ^ word >> 32) * first % 2**64
        keys.append(word - 2**64 if word >= 2**63 else word)
    return keys


def test_keys_aimed_at_one_bucket_miss_it_under_another_seed() -> None:
    """A thousand numbers chosen to collide under one seed are spread by any other that is drawn."""
    seed = draw_seed(random.Random(1))
    values = aimed(seed, 1000)
    column = pa.array(values)
    assert len({h >> 16 for h in Keys([column]).hashes(seed).tolist()}) == 1
    with pytest.raises(SkewedError):
        built([column], seed)
    with pytest.raises(SkewedError):
        built([pa.array([n << 16 for n in range(100)])], WEAK)
    slow = built([column.slice(0, 200)], seed, strict=False)
    assert slow.pairs([column]) == [(n, n) for n in range(200)]
    for drawn_number in range(20):
        drawn = draw_seed(random.Random(100 + drawn_number))
        assert built([column], drawn).pairs([column]) == [(n, n) for n in range(1000)]
