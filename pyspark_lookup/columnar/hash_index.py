"""The hash index, memory-mapped or in memory: which rows hold a key, for a whole batch of keys at once.

It lies beside rows in hash order: by the hash of their key, the rows of one key together and in
their own order, rows without a key (a null in it) last. Arrays, all little-endian:

    starts   uint32[buckets + 1]   HASH: number of the first key of each bucket; bucket = hash >> shift
    hashes   uint64[keys]          HASH, unless the key is one column of fixed width: each key's hash
    slots    uint32[high - low + 1] DIRECT (one integer column, dense): 1 + number of the key, 0: absent
    first    uint32[keys + 1]      not unique: the first row of each key, and the number of keyed rows

(uint64 instead of uint32 where there are that many rows.) Keys are numbered in row order; if all are
unique, key number and row number are the same, and `first` is left out. The key columns themselves
are the rows' own. A candidate whose hash or bucket agrees is compared by value before it is a match.

There are four buckets for three keys or more, and the number of keys in one is bounded: a build whose
fullest bucket holds more than `BUCKET_AT_MOST` draws another seed (see `SkewedError`).

Answers are tables of rows with a column `KEY_INDEX`, the number of the key to which each row belongs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.keys import Keys, Numbers, OneKey, Seed, as_indices, one_array

BUCKET_AT_MOST = 32
_PREFIX_BITS = 48
_AT_ONCE = 2**20  # values that are set at once
_DIRECT_SPREAD = 4  # slots per row, at most: as many bytes as the hash index takes


class SkewedError(Exception):
    """A bucket holds too many keys under this seed."""


@dataclasses.dataclass(frozen=True)
class Matches:
    """Pairs of a probed key and a row that has it, by key and then in row order; both int64."""

    keys: Numbers
    rows: Numbers


# --- building -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Order:
    """Rows in hash order: `rows` is the permutation, `first` the position in it at which each key begins, `hashes` by key."""

    rows: Numbers
    first: Numbers
    hashes: Numbers


def order_rows(keys: Keys, hashes: Numbers, rows: Numbers | None = None) -> Order:
    """The hash order of the valid rows of `keys`. Rows of one key stay in the order of `rows` (None: in their own)."""
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
    """The stable order by the upper 48 bits, in three passes of numpy's radix sort, which sorts by 16 bits at a time."""
    order = np.argsort((hashes >> np.uint64(16)).astype(np.uint16), kind="stable")
    for shift in (32, 48):
        digits = (hashes >> np.uint64(shift)).astype(np.uint16)
        order = order[np.argsort(digits[order], kind="stable")]
    return order


def _mixed_runs(prefixes: Numbers, same_key: Numbers, neighbours: Numbers) -> list[tuple[int, int]]:
    """[start, stop) of runs of the same prefix that have more than one key."""
    mixed = neighbours[~same_key[neighbours]]
    starts = np.searchsorted(prefixes, prefixes[mixed], "left")
    stops = np.searchsorted(prefixes, prefixes[mixed], "right")
    return sorted(set(zip(starts.tolist(), stops.tolist(), strict=True)))


def _regroup(keys: Keys, rows: Numbers, same_key: Numbers, start: int, stop: int) -> None:
    """Bring the rows of each key in a run together, in place."""
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
    """Combines the orders of consecutive ranges of the hash space into one index.

    `keyed_rows`: the maximum number of rows with a key. `bounds`: the smallest and largest value of a key that is one whole number, date,
    timestamp or boolean. `wide`: the key is not one column of fixed width, so hashes are kept. `zeros` allocates an array of a number of
    values of a type.
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
        """Add the next rows: the `order` of `keys`, whose hashes are greater than all before."""
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
        """The arrays of the index, by the names at the top of this module.

        Raises SkewedError if a bucket is too full and `strict`; without `strict` such an index is correct, but slower to probe.
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
    """Raise ValueError unless the arrays (named as at the top of this module) are an index over that many rows with a key.

    Checks only the first and last values of the arrays.
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
    """An index over rows whose key columns are `stored`. `low`: the value of the first slot."""

    def __init__(self, arrays: Mapping[str, Numbers], stored: list[pa.Array], low: int) -> None:
        self._slots = arrays.get("slots")
        self._starts = arrays.get("starts")
        self._hashes = arrays.get("hashes")
        self._first = arrays.get("first")
        self._low = low
        self._stored = Keys(stored)
        if self._starts is not None:
            self._shift = np.uint64(65 - len(self._starts).bit_length())

    @property
    def unique(self) -> bool:
        """Whether no two rows have the same key."""
        return self._first is None

    def find_key_numbers(self, rows: Numbers) -> Numbers:
        """The number of the key of each row; every row has one."""
        if self._first is None:
            return rows
        return np.asarray(np.searchsorted(self._first, rows, "right") - 1)

    def probe(self, keys: Keys, hashes: Numbers) -> Matches:
        """The rows that have any of `keys`. `hashes`: of the keys, under the seed of the build."""
        numbers = self._probe_slots(keys) if self._slots is not None else self._probe_buckets(keys, hashes)
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

    def find_rows(self, key: OneKey, hashed: int) -> range:
        """The rows that have a key of a single column. `hashed`: its hash under the seed of the build."""
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
        column, hashes, first = self._stored.columns[0], self._hashes, self._first
        for number in range(int(self._starts[bucket]), int(self._starts[bucket + 1])):
            if (hashes is None or hashes[number] == hashed) and column.holds(
                number if first is None else int(first[number]), key
            ):
                return number
        return None

    def _probe_slots(self, keys: Keys) -> Numbers:
        """The number of each key; -1 if there is none."""
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
        """For each candidate (a key number) whether it is the key of the corresponding row."""
        if self._hashes is None:
            return self._stored.equal(self._first_rows(candidates), keys, rows)
        matching: Numbers = self._hashes[candidates] == hashes[rows]
        same_hash = np.flatnonzero(matching)
        matching[same_hash] = self._stored.equal(self._first_rows(candidates[same_hash]), keys, rows[same_hash])
        return matching

    def _first_rows(self, numbers: Numbers) -> Numbers:
        rows: Numbers = numbers if self._first is None else self._first[numbers].astype(np.int64)
        return rows


KEY_INDEX = "key_index"
"""The column of a table of rows that has the key of each row, as the key's position (int64) in the table of keys."""
SEED = Seed(0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)
"""For hashes within one call. Somebody who knows it can construct keys that are slow to look up, but slows only their own call."""


def distinct_keys(keys: Keys, hashes: Numbers) -> tuple[Numbers, Numbers]:
    """(for each distinct key without a null, the number of a row that has it; for each row, the position of its key in that list).

    A key with a null has the position -1.
    """
    order = order_rows(keys, hashes)
    places = np.full(keys.rows, -1, np.int64)
    places[order.rows] = np.repeat(np.arange(len(order.first)), np.diff([*order.first, len(order.rows)]))
    return order.rows[order.first], places


def match_rows(rows: pa.Table, names: Sequence[str], keys: Keys) -> Matches:
    """The matches of keys and rows: (position of the key, row), by key; rows of one key in their order."""
    return RowIndex(rows, names).match(keys)


class RowIndex:
    """A hash index over rows by their key columns `names`."""

    def __init__(self, rows: pa.Table, names: Sequence[str]) -> None:
        stored = [one_array(rows.column(name)) for name in names]
        keys = Keys(stored)
        order = order_rows(keys, keys.hashes(SEED))
        builder = IndexBuilder(keys.rows, None, wide=True)
        builder.add(order, keys)
        indices = as_indices(order.rows)
        self._rows = order.rows
        self._index = KeyIndex(builder.arrays(strict=False), [pc.take(array, indices) for array in stored], 0)

    def match(self, keys: Keys) -> Matches:
        matches = self._index.probe(keys, keys.hashes(SEED))
        return Matches(matches.keys, self._rows[matches.rows])


def take_matches(rows: pa.Table, matches: Matches, schema: pa.Schema) -> pa.Table:
    """Matching rows with the columns of `schema` (which may be empty) and `KEY_INDEX`."""
    indices = as_indices(matches.rows)
    columns = [*(rows.column(name).take(indices) for name in schema.names), as_indices(matches.keys)]
    return pa.Table.from_arrays(columns, schema=schema.append(pa.field(KEY_INDEX, pa.int64())))


def key_numbers(rows: pa.Table) -> Numbers:
    column = one_array(rows.column(KEY_INDEX))
    return np.frombuffer(column.buffers()[1] or b"", np.int64, column.offset + len(column))[column.offset :]


def take_requested(rows: pa.Table, requested_keys: Numbers) -> pa.Table:
    """The rows of `requested_keys`, in their order and with repeats; `KEY_INDEX` is the position among them.

    `rows` are those of keys 0, 1, …, ascending.
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
    """A table without rows. `schema`: of the columns other than `KEY_INDEX`."""
    return schema.append(pa.field(KEY_INDEX, pa.int64())).empty_table()


def merge_rows(parts: Sequence[pa.Table], schema: pa.Schema) -> pa.Table:
    """The rows of several tables, by key. All rows of one key must be in one table. `schema`: as for `no_rows`."""
    full = schema.append(pa.field(KEY_INDEX, pa.int64()))
    filled = [part for part in parts if part.num_rows]
    rows = pa.concat_tables([part.select(full.names).cast(full) for part in filled]) if filled else full.empty_table()
    if len(filled) > 1:
        numbers = key_numbers(rows)
        rows = rows.take(as_indices(np.argsort(numbers, kind="stable")))
    return rows
