"""The index answers as a Python dict of lists would, whatever the keys, the seed and the hashes are."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup.columnar.hash_index import (
    BUCKET_AT_MOST,
    IndexBuilder,
    KeyIndex,
    Matches,
    Order,
    SkewedError,
    order_rows,
)
from pyspark_lookup.columnar.keys import Keys, Numbers, Seed, as_indices, draw_seed
from tests.test_keys import KINDS, SEED, US, each_kind, examples, plain, values_of

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
        """(probed key, given row) as the index finds them, checked for the order it promises."""
        keys = Keys(probed)
        matches = self.index.probe(keys, keys.hashes(self.seed) if hashes is None else hashes)
        assert matches.keys.dtype == matches.rows.dtype == np.int64
        found = list(zip(matches.keys.tolist(), matches.rows.tolist(), strict=True))
        assert found == sorted(found)
        return [(key, int(self.rows[row])) for key, row in found]

    def expected(self, probed: Sequence[pa.Array]) -> list[tuple[int, int]]:
        """The same by a dict of lists."""
        held: dict[Any, list[int]] = {}
        for row, key in enumerate(zip(*map(plain, self.columns), strict=True)):
            if None not in key:
                held.setdefault(key, []).append(row)
        asked = enumerate(zip(*map(plain, probed), strict=True))
        return [(number, row) for number, key in asked for row in held.get(key, ())]


def built(
    columns: list[pa.Array],
    seed: Seed = SEED,
    *,
    parts: int = 0,
    hashes: Numbers | None = None,
    strict: bool = True,
    slots: bool = True,
) -> Built:
    """An index as a snapshot's builder makes it, of 2**`parts` ranges of the hash space one after the other."""
    keys = Keys(columns)
    hashes = keys.hashes(seed) if hashes is None else hashes
    known = np.ones(keys.rows, np.bool_) if keys.valid is None else keys.valid
    kind = columns[0].type
    fixed = len(columns) == 1 and keys.columns[0].values is not None
    bounds = None
    if slots and fixed and is_whole(kind) and known.any():
        values = keys.columns[0].values[known]  # type: ignore[index]
        bounds = int(values.min()), int(values.max())
    builder = IndexBuilder(int(known.sum()), bounds, not fixed)
    part_of = hashes >> np.uint64(64 - parts) if parts else np.zeros(keys.rows, np.uint64)
    ordered = []
    for part in range(1 << parts):
        rows = np.flatnonzero(known & (part_of == part))
        piece = Keys([column.take(as_indices(rows)) for column in columns])
        order = order_rows(piece, hashes[rows])
        builder.add(order, piece)
        ordered.append(rows[order.rows])
    rows = np.concatenate([*ordered, np.flatnonzero(~known)])
    assert builder.rows == known.sum()
    arrays = builder.arrays(strict)
    stored = [column.take(as_indices(rows)) for column in columns]
    return Built(columns, seed, arrays, KeyIndex(arrays, stored, builder.low), rows)


def is_whole(kind: pa.DataType) -> bool:
    """Whether keys of this type may have slots."""
    return not (pa.types.is_floating(kind) or pa.types.is_decimal(kind) or pa.types.is_duration(kind))


def slotted(index: Built) -> bool:
    """Whether the keys are looked up by their value; else it is by their hash."""
    assert ("slots" in index.arrays) != ("starts" in index.arrays)
    return "slots" in index.arrays


# --- any keys --------------------------------------------------------------------------------------------


@st.composite
def key_columns(draw: st.DrawFn, kinds: Sequence[pa.DataType]) -> tuple[list[pa.Array], list[pa.Array]]:
    """Key columns of a table, unique or heavily duplicate, with nulls; and keys to probe, most of them there."""
    pool = draw(st.lists(st.tuples(*map(values_of, kinds)), min_size=1, max_size=12))
    rows = pool if draw(st.booleans()) else draw(st.lists(st.sampled_from(pool), max_size=40))
    others = draw(st.lists(st.tuples(*map(values_of, kinds)), max_size=4))
    asked = draw(st.lists(st.sampled_from(pool + others), max_size=20))
    nulls = st.lists(st.integers(0, 40), max_size=4)

    def columns(of: list[tuple[Any, ...]]) -> list[pa.Array]:
        found = []
        for place, kind in enumerate(kinds):
            gone = set(draw(nulls)) if draw(st.booleans()) else set()
            found.append(pa.array([None if n in gone else row[place] for n, row in enumerate(of)], kind))
        return found

    return columns(rows), columns(asked)


@each_kind
@examples(24)
@given(data=st.data())
def test_probing_one_column(kind: pa.DataType, data: st.DataObject) -> None:
    """Of every type the index gives exactly the rows of each key, by key and then in row order; nulls find nothing."""
    columns, asked = data.draw(key_columns([kind]))
    for slots in (True, False):
        index = built(columns, parts=data.draw(st.integers(0, 3)), slots=slots)
        assert index.pairs(asked) == index.expected(asked)
        assert index.pairs(columns) == index.expected(columns)
        assert index.pairs([column.slice(1) for column in asked]) == index.expected([c.slice(1) for c in asked])


@examples(40)
@given(data=st.data())
def test_probing_composite_keys(data: st.DataObject) -> None:
    """Of several columns of any types together, too."""
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=2, max_size=3))
    columns, asked = data.draw(key_columns(kinds))
    index = built(columns, parts=data.draw(st.integers(0, 3)))
    assert index.pairs(asked) == index.expected(asked)
    assert index.pairs(columns) == index.expected(columns)


@each_kind
@pytest.mark.parametrize("repeats", [1, 50])
def test_many_keys(kind: pa.DataType, repeats: int) -> None:
    """Thousands of rows, each key once or fifty times in no order, are found with all their rows and no others."""
    rng = random.Random(f"{kind} {repeats}")
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        values: list[Any] = [f"key {n}" if n % 5 else f"{n} " * 30 for n in range(1500)]
        values = values if pa.types.is_string(kind) else [value.encode() for value in values]
    elif pa.types.is_boolean(kind):
        values = [True]
    elif pa.types.is_integer(kind) and kind.bit_width <= 16:
        values = rng.sample(range(-(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1)), 200)
    elif pa.types.is_decimal(kind):
        values = rng.sample(range(-999, 999), 1500)
    elif pa.types.is_floating(kind):
        values = [float(number) / 4 for number in rng.sample(range(-(10**6), 10**6), 1500)]
    else:
        values = rng.sample(range(-(2**31), 2**31), 1500)
    kept, others = values[: len(values) * 9 // 10 or 1], values[len(values) * 9 // 10 :]
    rows = kept[: max(len(kept) // (repeats // 5 or 1), 1)] * repeats
    rng.shuffle(rows)
    index = built([pa.array(rows, kind)], parts=3)
    asked = [pa.array([*rows[:500], *others, None, *kept], kind)]
    assert index.pairs(asked) == index.expected(asked)
    assert index.index.unique is (len(set(rows)) == len(rows))
    everything = [pa.array(rows, kind)]
    assert len(index.pairs(everything)) == len(rows) * repeats


# --- what is kept, and how --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "kind", "by_slot"),
    [
        (range(100, 1100), pa.int64(), True),
        (range(-500, 500), pa.int16(), True),
        ([-128, 127, 0], pa.int8(), True),
        (range(0, 4000, 4), pa.int32(), True),  # as many slots as four for each key
        (range(0, 5000, 5), pa.int32(), False),
        ([0, 1023], pa.int64(), True),
        ([0, 1024], pa.int64(), False),
        ([-(2**63), 2**63 - 1], pa.int64(), False),
        ([-(2**63), -(2**63) + 5, -(2**63) + 1], pa.int64(), True),
        ([2**63 - 1, 2**63 - 6], pa.int64(), True),
        ([-(2**63), 2**63 - 1], US, False),
        ([2**63 - 1, 2**63 - 2], US, True),
        (range(18_000, 19_000), pa.date32(), True),
        ([-(2**31), 2**31 - 1], pa.date32(), False),
        ([True, False], pa.bool_(), True),
        ([True], pa.bool_(), True),
    ],
    ids=str,
)
def test_dense_numbers_have_slots(values: Sequence[Any], kind: pa.DataType, by_slot: bool) -> None:
    """Numbers close together are addressed by value, others by hash; at the ends of the type both are right."""
    rows = [pa.array([*values, *list(values)[:2]], kind)]
    index = built(rows)
    assert slotted(index) is by_slot
    if pa.types.is_boolean(kind):
        asked: list[Any] = [True, False, None]
    else:
        low, high = -(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1) - 1
        near = {v + d for v in (*values, low, high, 0) for d in (-1, 0, 1)}
        asked = [None, *sorted(v for v in near if low <= v <= high)]
    assert index.pairs([pa.array(asked, kind)]) == index.expected([pa.array(asked, kind)])
    if by_slot:
        spread = int(max(values)) - int(min(values)) + 1
        assert (index.arrays["slots"].dtype, len(index.arrays["slots"])) == (np.uint32, spread)


@examples(24)
@given(data=st.data())
def test_the_layout_is_as_documented(data: st.DataObject) -> None:
    """`first` is kept for duplicates only and `hashes` for wide keys only; buckets are as many as said, and start in order."""
    kinds = data.draw(st.sampled_from([[pa.int64()], [pa.string()], [pa.decimal128(38, 10)], [pa.int8(), pa.date32()]]))
    columns, _ = data.draw(key_columns(kinds))
    index = built(columns, slots=False)
    keys = [key for key in zip(*map(plain, columns), strict=True) if None not in key]
    distinct = len(set(keys))
    assert index.index.unique is (distinct == len(keys))
    assert ("first" in index.arrays) is (distinct < len(keys))
    wide = len(kinds) > 1 or pa.types.is_string(kinds[0])
    assert set(index.arrays) - {"first"} == ({"starts", "hashes"} if wide else {"starts"})
    starts = index.arrays["starts"].tolist()
    assert starts == sorted(starts)
    assert (starts[0], starts[-1]) == (0, distinct)
    buckets = len(starts) - 1
    assert buckets & (buckets - 1) == 0
    assert len(keys) * 4 // 3 < buckets <= max(len(keys) * 8 // 3, 4)
    if wide:
        assert index.arrays["hashes"].dtype == np.uint64
        assert len(index.arrays["hashes"]) == distinct
    if "first" in index.arrays:
        first = index.arrays["first"].tolist()
        ordered = [keys_of(columns)[row] for row in index.rows[: len(keys)].tolist()]
        assert [[*group] for _, group in itertools.groupby(ordered)] == [
            ordered[a:b] for a, b in itertools.pairwise(first)
        ]
        assert first[-1] == len(keys)


def keys_of(columns: Sequence[pa.Array]) -> list[tuple[Any, ...]]:
    return list(zip(*map(plain, columns), strict=True))


def test_counts_of_64_bits() -> None:
    """Where there are 2^32 rows numbers take 64 bits, and what is found is the same."""
    column = pa.array([5, 7, 5, 9])
    keys = Keys([column])
    order = order_rows(keys, keys.hashes(SEED))
    stored = [column.take(as_indices(order.rows))]
    found = []
    for count, width in ((4, np.uint32), (2**32 - 2, np.uint32), (2**32 - 1, np.uint64), (2**40, np.uint64)):
        builder = IndexBuilder(count, (5, 9), False)
        builder.add(order, keys)
        arrays = builder.arrays()
        assert {name: array.dtype for name, array in arrays.items()} == {"slots": width, "first": width}
        matches = KeyIndex(arrays, stored, builder.low).probe(keys, keys.hashes(SEED))
        found.append((matches.keys.tolist(), order.rows[matches.rows].tolist()))
    assert found == [([0, 0, 1, 2, 2, 3], [0, 2, 1, 0, 2, 3])] * 4


@pytest.mark.parametrize(
    "kinds", [[pa.int64()], [pa.string()], [pa.bool_(), pa.int8()], [pa.decimal128(9, 2)]], ids=str
)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_nothing_to_find(kinds: list[pa.DataType], rows: int) -> None:
    """An index of no rows, or of null keys only, finds nothing; neither does asking for nothing."""
    index = built([pa.nulls(rows, kind) for kind in kinds])
    one = {pa.string(): "x", pa.bool_(): True}
    some = [pa.array([one.get(kind, 1)] * 3, kind) for kind in kinds]
    assert index.pairs(some) == []
    assert index.pairs([pa.array([], kind) for kind in kinds]) == []
    assert index.index.unique
    full = built(some)
    assert full.pairs([pa.array([], kind) for kind in kinds]) == []
    assert full.pairs([pa.nulls(4, kind) for kind in kinds]) == []
    assert len(full.pairs(some)) == 9


# --- order -----------------------------------------------------------------------------------------------


def check_order(columns: list[pa.Array], hashes: Numbers) -> Order:
    """The order, after checking that it is one: by the upper 48 bits, keys together, rows of a key as they came."""
    order = order_rows(Keys(columns), hashes)
    keys = keys_of(columns)
    rows = order.rows.tolist()
    assert sorted(rows) == [n for n, key in enumerate(keys) if None not in key]
    prefixes = [int(hashes[row]) >> 16 for row in rows]
    assert prefixes == sorted(prefixes)
    groups = [(key, [*group]) for key, group in itertools.groupby(rows, key=lambda row: keys[row])]
    assert len({key for key, _ in groups}) == len(groups)
    assert all(group == sorted(group) for _, group in groups)
    assert order.first.tolist() == [0, *itertools.accumulate(len(group) for _, group in groups)][: len(groups)]
    assert order.hashes.tolist() == [int(hashes[group[0]]) for _, group in groups]
    return order


@examples(40)
@given(data=st.data())
def test_rows_in_hash_order(data: st.DataObject) -> None:
    """Valid rows come in the order of their hashes, rows of one key together and in their own order."""
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=2))
    columns, _ = data.draw(key_columns(kinds))
    check_order(columns, Keys(columns).hashes(SEED))


def colliding(columns: Sequence[pa.Array], how: str) -> Numbers:
    """Hashes, equal for equal keys, that agree in as many bits as said for different ones."""
    numbers: dict[Any, int] = {}
    ids = [numbers.setdefault(key, len(numbers)) for key in keys_of(columns)]
    some = {
        "all bits": [0xABCDEF << 40 for _ in ids],
        "no bits set": [0 for _ in ids],
        "all bits set": [2**64 - 1 for _ in ids],
        "the upper 48 bits": [0xABCDEF << 40 | n * 40503 % 2**16 for n in ids],
        "three values": [n % 3 << 62 | 5 for n in ids],
        "two of the upper 48": [n % 2 << 16 | n for n in ids],
        "all but bits 16 to 32": [0xABC << 48 | n * 40503 % 2**16 << 16 for n in ids],
        "all but bits 32 to 48": [0xABC << 48 | n * 40503 % 2**16 << 32 | 0xDEF << 16 for n in ids],
        "all but the upper 16": [n * 40503 % 2**16 << 48 | 0xABCDEF << 16 for n in ids],
    }[how]
    return np.array(some, np.uint64)


COLLISIONS = [
    "all bits", "no bits set", "all bits set", "the upper 48 bits", "three values", "two of the upper 48",
    "all but bits 16 to 32", "all but bits 32 to 48", "all but the upper 16",
]  # fmt: skip


@pytest.mark.parametrize("how", COLLISIONS)
@examples(16)
@given(data=st.data())
def test_colliding_hashes_change_no_answer(how: str, data: st.DataObject) -> None:
    """Keys whose hashes agree in many bits, or in all, are still told apart, ordered and found with their rows."""
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=2))
    columns, asked = data.draw(key_columns(kinds))
    together = [pa.concat_arrays([a, b]) for a, b in zip(columns, asked, strict=True)]
    forged = colliding(together, how)
    stored, probed = forged[: len(columns[0])], forged[len(columns[0]) :]
    check_order(columns, stored)
    index = built(columns, hashes=stored, strict=False, slots=False)
    assert index.pairs(asked, probed) == index.expected(asked)
    assert index.pairs(columns, stored) == index.expected(columns)


# --- skew ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [False, True])
def test_a_full_bucket_is_an_error_and_then_only_slow(wide: bool) -> None:
    """One key more in a bucket than allowed is SkewedError if strict; without, and with one key less, the answers are right."""
    for count in (BUCKET_AT_MOST, BUCKET_AT_MOST + 1, 300):
        values = [n * 1_000_003 for n in range(count)]
        columns = [pa.array([str(v) for v in values]) if wide else pa.array(values)]
        hashes = np.full(count, 2**63, np.uint64)
        if count > BUCKET_AT_MOST:
            with pytest.raises(SkewedError, match=str(count)):
                built(columns, hashes=hashes)
        index = built(columns, hashes=hashes, strict=count <= BUCKET_AT_MOST)
        assert index.pairs(columns, hashes) == [(n, n) for n in range(count)]
        strange = [pa.array(["x"] if wide else [1])]
        assert index.pairs(strange, np.full(1, 2**63, np.uint64)) == []


def test_many_rows_of_one_key_are_no_skew() -> None:
    """What fills a bucket is keys: ten thousand rows of one key, under its hash, are one."""
    for column in (pa.array([7 * 10**15] * 10_000), pa.array(["x"] * 10_000)):
        index = built([column], slots=False)
        assert index.pairs([column.slice(0, 1)]) == [(0, row) for row in range(10_000)]


def test_skew_across_partitions_counts_together() -> None:
    """A bucket that two parts of the hash space share is too full if both together fill it."""
    values = pa.array([n * 1_000_003 for n in range(60)])
    half = BUCKET_AT_MOST // 2 + 1
    # There are 64 buckets; the first of them spans four of 256 parts.
    hashes = np.array([n << 40 for n in range(half)] + [1 << 56 | n << 40 for n in range(half)], np.uint64)
    columns = [values.slice(0, 2 * half)]
    for parts in (0, 8):
        with pytest.raises(SkewedError):
            built(columns, hashes=hashes, parts=parts)
        index = built(columns, hashes=hashes, parts=parts, strict=False)
        assert index.pairs(columns, hashes) == index.expected(columns)


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
    """Thousands of numbers chosen to collide under one seed are spread by any other that is drawn."""
    known = draw_seed(random.Random(1))
    values = aimed(known, 3000)
    column = pa.array(values)
    assert len({h >> 16 for h in Keys([column]).hashes(known).tolist()}) == 1
    with pytest.raises(SkewedError):
        built([column], known)
    with pytest.raises(SkewedError):
        built([pa.array([n << 16 for n in range(100)])], WEAK)
    slow = built([column.slice(0, 200)], known, strict=False)
    assert slow.pairs([column]) == [(n, n) for n in range(200)]
    for number in range(20):
        drawn = draw_seed(random.Random(100 + number))
        assert built([column], drawn).pairs([column]) == [(n, n) for n in range(3000)]


@pytest.mark.parametrize("shape", ["steps", "powers", "texts", "pairs", "floats", "times"])
def test_regular_keys_are_no_skew(shape: str) -> None:
    """Keys as tables have them (steps of any size, one bit set, numbered texts, grids) fill no bucket under any seed drawn."""
    columns = {
        "steps": [[n << shift for n in range(3000)] for shift in (0, 1, 10, 32, 45)],
        "powers": [[1 << n for n in range(63)] + [-(1 << n) for n in range(64)] + [(1 << n) - 1 for n in range(2, 63)]],
        "texts": [
            [f"{prefix}{n:08d}{suffix}" for n in range(3000)]
            for prefix, suffix in (("", ""), ("k" * 20, ""), ("", "z" * 30))
        ],
        "pairs": [[(n % 60, n // 60) for n in range(3000)]],
        "floats": [[n / 4 for n in range(3000)], [float(n << 30) for n in range(3000)]],
        "times": [[n * 86_400_000_000 for n in range(-1500, 1500)]],
    }[shape]
    for values in columns:
        if shape == "pairs":
            arrays = [pa.array([a for a, _ in values]), pa.array([b for _, b in values])]
        else:
            arrays = [pa.array(values, US if shape == "times" else None)]
        for number in range(8):
            index = built(arrays, draw_seed(random.Random(number)), slots=False)
            assert len(index.pairs(arrays)) == len(values)


# --- parts -----------------------------------------------------------------------------------------------


@examples(32)
@given(data=st.data())
def test_parts_make_the_index_of_the_whole(data: st.DataObject) -> None:
    """Adding ranges of the hash space one after the other gives the same arrays, to the byte, as adding all at once."""
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=2))
    columns, asked = data.draw(key_columns(kinds))
    slots = data.draw(st.booleans())
    whole = built(columns, slots=slots)
    for parts in (1, 3, 8):
        index = built(columns, parts=parts, slots=slots)
        assert index.rows.tolist() == whole.rows.tolist()
        assert {name: (a.dtype, a.tolist()) for name, a in index.arrays.items()} == {
            name: (a.dtype, a.tolist()) for name, a in whole.arrays.items()
        }
        assert index.pairs(asked) == whole.expected(asked)


def test_the_fullest_bucket_is_told() -> None:
    """The builder says how full its fullest bucket is, so far; slots have none."""
    column = pa.array([n * 1_000_003 for n in range(40)])
    keys = Keys([column])
    builder = IndexBuilder(40, None, False)
    assert builder.fullest_bucket == 0
    for start, stop, fullest in ((0, 10, 10), (10, 30, 20), (30, 40, 20)):
        piece = Keys([column.slice(start, stop - start)])
        builder.add(order_rows(piece, np.full(stop - start, start << 58, np.uint64)), piece)
        assert builder.fullest_bucket == fullest
    dense = IndexBuilder(40, (0, 39 * 1_000_003), False)
    dense.add(order_rows(keys, keys.hashes(SEED)), keys)
    assert dense.fullest_bucket <= BUCKET_AT_MOST


def test_matches_are_values() -> None:
    """`Matches` and `Order` cannot be changed by who gets them."""
    matches = Matches(np.zeros(1, np.int64), np.zeros(1, np.int64))
    order = Order(matches.keys, matches.keys, matches.keys.view(np.uint64))
    for value in (matches, order):
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.rows = np.ones(1, np.int64)  # type: ignore[misc]
