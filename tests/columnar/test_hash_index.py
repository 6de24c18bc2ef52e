"""The index answers as a Python dict of lists would, whatever the keys, the seed and the hashes are."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup.columnar import hash_index
from pyspark_lookup.columnar.hash_index import BUCKET_AT_MOST, IndexBuilder, KeyIndex, SkewedError, order_rows
from pyspark_lookup.columnar.keys import Keys, Numbers, Seed, as_indices, draw_seed, hash_one, one_key
from tests.support.fuzzing import fuzzed
from tests.support.key_values import KINDS, SEED, US, each_kind, mixed, plain, values_of

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
            one = None if pa.types.is_temporal(kind) else one_key(key, kind)
            if one is not None:
                hashed = hash_one(one, self.seed) if hashes is None else int(hashes[place])
                assert list(self.index.find_rows(one, hashed)) == matches.rows[matches.keys == place].tolist()
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


COLLISIONS: dict[str, Callable[[int], int]] = {
    "all bits": lambda n: 0xABCDEF << 40,
    "no bits set": lambda n: 0,
    "all bits set": lambda n: 2**64 - 1,
    "the upper 48 bits": lambda n: 0xABCDEF << 40 | n * 40503 % 2**16,
    "three values": lambda n: n % 3 << 62 | 5,
    "two of the upper 48": lambda n: n % 2 << 16 | n,
    "all but bits 16 to 32": lambda n: 0xABC << 48 | n * 40503 % 2**16 << 16,
    "all but bits 32 to 48": lambda n: 0xABC << 48 | n * 40503 % 2**16 << 32 | 0xDEF << 16,
    "all but the upper 16": lambda n: n * 40503 % 2**16 << 48 | 0xABCDEF << 16,
    "nothing": lambda n: mixed(n + 1, SEED),
}
"""Hashes of the n-th key, which agree in as many bits as said for different ones."""


def colliding(columns: Sequence[pa.Array], how: str) -> Numbers:
    """Such hashes of keys, equal for equal ones."""
    numbers: dict[Any, int] = {}
    ids = [numbers.setdefault(key, len(numbers)) for key in zip(*map(plain, columns), strict=True)]
    return np.array([COLLISIONS[how](n) for n in ids], np.uint64)


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
@fuzzed(30)
@given(data=st.data())
def test_probing(kind: pa.DataType, data: st.DataObject) -> None:
    """By slots and by hash, in any parts, with hashes that collide: exactly the rows of each key, in their order; nulls find nothing."""
    kinds = [kind, *data.draw(st.just([]) | st.lists(st.sampled_from(KINDS), min_size=1, max_size=2))]
    columns, asked = data.draw(key_columns(kinds))
    for slots in (True, False):
        index = built(columns, parts=data.draw(st.integers(0, 3)), slots=slots)
        for some in (asked, columns, [column.slice(1) for column in asked], [pa.nulls(2, kind) for kind in kinds]):
            assert index.pairs(some) == index.expected(some)
        keys = [key for key in zip(*map(plain, columns), strict=True) if None not in key]
        assert index.index.unique is ("first" not in index.arrays) is (len(set(keys)) == len(keys))
    how = data.draw(st.sampled_from([*COLLISIONS]))
    forged = colliding([pa.concat_arrays([a, b]) for a, b in zip(columns, asked, strict=True)], how)
    stored, probed = forged[: len(columns[0])], forged[len(columns[0]) :]
    index = built(columns, hashes=stored, strict=False, slots=False)
    assert index.pairs(asked, probed) == index.expected(asked)
    assert index.pairs(columns, stored) == index.expected(columns)
    nothing = built([column.slice(0, 0) for column in columns])
    assert nothing.index.unique
    assert nothing.pairs(asked) == nothing.pairs([column.slice(0, 0) for column in asked]) == []


DENSE: list[tuple[Sequence[Any], list[pa.DataType]]] = [
    (range(100, 1100), [pa.int64(), pa.int16(), pa.date32(), US]),
    ([-128, 127, 0], [pa.int8()]),
    (range(0, 4000, 4), [pa.int32()]),  # as many slots as four for each key
    ([0, 1023], [pa.int64()]),
    ([-(2**63), -(2**63) + 5, -(2**63) + 1], [pa.int64()]),
    ([2**63 - 1, 2**63 - 6], [pa.int64(), US]),
    ([True, False], [pa.bool_()]),
    ([True], [pa.bool_()]),
]
SPARSE: list[tuple[Sequence[Any], list[pa.DataType]]] = [
    (range(0, 5000, 5), [pa.int32()]),
    ([0, 1024], [pa.int64()]),
    ([-(2**63), 2**63 - 1], [pa.int64(), US]),
    ([-(2**31), 2**31 - 1], [pa.date32()]),
]


@pytest.mark.parametrize(("cases", "by_slot"), [(DENSE, True), (SPARSE, False)], ids=["dense", "sparse"])
def test_dense_numbers_have_slots(cases: list[tuple[Sequence[Any], list[pa.DataType]]], by_slot: bool) -> None:
    """Numbers close together are addressed by value, others by hash; at the ends of the type both are right."""
    for values, kind in ((values, kind) for values, kinds in cases for kind in kinds):
        index = built([pa.array([*values, *list(values)[:2]], kind)])
        assert ("slots" in index.arrays, "starts" in index.arrays) == (by_slot, not by_slot)
        low, high = -(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1) - 1
        near = {v + d for v in (*values, low, high, 0) for d in (-1, 0, 1)}
        known = [True, False] if pa.types.is_boolean(kind) else sorted(v for v in near if low <= v <= high)
        asked = [pa.array([None, *known], kind)]
        assert index.pairs(asked) == index.expected(asked)
        if by_slot:
            spread = int(max(values)) - int(min(values)) + 1
            assert (index.arrays["slots"].dtype, len(index.arrays["slots"])) == (np.uint32, spread)


def test_counts_of_64_bits() -> None:
    """Where there are 2^32 rows numbers take 64 bits, and what is found is the same."""
    column = pa.array([5, 7, 5, 9])
    keys = Keys([column])
    order = order_rows(keys, keys.hashes(SEED))
    stored = [column.take(as_indices(order.rows))]
    found = []
    for count, width in ((4, np.uint32), (2**32 - 2, np.uint32), (2**32 - 1, np.uint64), (2**40, np.uint64)):
        builder = IndexBuilder(count, (5, 9), False, lambda length, kind: np.zeros(min(length, 100), kind))
        builder.add(order, keys)
        arrays = builder.arrays()
        assert {name: array.dtype for name, array in arrays.items()} == {"slots": width, "first": width}
        matches = KeyIndex(arrays, stored, builder.low).probe(keys, keys.hashes(SEED))
        found.append((matches.keys.tolist(), order.rows[matches.rows].tolist()))
    assert found == [([0, 0, 1, 2, 2, 3], [0, 2, 1, 0, 2, 3])] * 4


def test_the_first_key_with_several_rows_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys before it, which have one row each, are found in their own rows."""
    monkeypatch.setattr(hash_index, "_AT_ONCE", 7)
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


def test_regular_keys_are_no_skew() -> None:
    """Keys as tables have them (steps of any size, one bit set, numbered texts, grids) fill no bucket under any seed drawn."""
    numbers = range(3000)
    columns: list[list[pa.Array]] = [
        *([pa.array([n << shift for n in numbers])] for shift in (0, 1, 10, 32, 45)),
        [pa.array([1 << n for n in range(63)] + [-(1 << n) for n in range(64)] + [(1 << n) - 1 for n in range(2, 63)])],
        *([pa.array([f"{before}{n:08d}{after}" for n in numbers])] for before, after in (("", ""), ("k" * 20, ""), ("", "z" * 30))),
        [pa.array([n % 60 for n in numbers]), pa.array([n // 60 for n in numbers])],
        [pa.array([n / 4 for n in numbers])],
        [pa.array([float(n << 30) for n in numbers])],
        [pa.array([n * 86_400_000_000 for n in range(-1500, 1500)], US)],
    ]  # fmt: skip
    for arrays in columns:
        for number in range(8):
            index = built(arrays, draw_seed(random.Random(number)), slots=False)
            assert len(index.pairs(arrays)) == len(arrays[0])
            assert len(arrays[0]) * 4 // 3 < len(index.arrays["starts"]) - 1 <= len(arrays[0]) * 8 // 3
