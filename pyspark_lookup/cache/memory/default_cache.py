"""`DefaultLookupCache`: FLIP-221's cache in the memory of one process. It works on whole columns of keys and rows.

The entry that was used least recently is evicted first, exactly. The memory of evicted, expired and replaced entries is not freed at once: when
it exceeds the memory of the live entries, these are copied into new columns.
"""

from __future__ import annotations

import functools
import math
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.cache.lookup_cache import CachedRows, LookupCache
from pyspark_lookup.columnar.buffers import child_arrays, child_types, has_offsets, is_bytes, list_offsets, read_column
from pyspark_lookup.columnar.keys import (
    KEY_INDEX,
    Keys,
    Numbers,
    as_bools,
    as_indices,
    cast_keys,
    check_key_types,
    draw_seed,
    offsets_and_data,
    one_array,
    sort_distinct,
)
from pyspark_lookup.columnar.types import cast_column, spark_type, widens
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.forks import resets_in_child
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.errors import OptionError, SchemaError
from pyspark_lookup.options.enums import CacheMode
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.options.parsing import is_number

_INT32_AT_MOST = 2**31 - 1
_SMALLEST = 1024


class GrowingNumbers:
    """An array of numbers of one type, to which numbers are appended. `view`: all numbers, in memory that may be written to.

    The array has more memory than the part in use. A view that was returned earlier does not change: new numbers are written
    after it, and if there is no room there, all numbers are copied to new memory. So a column can be read as one Arrow array without a copy.
    """

    def __init__(self, dtype: Any, room: int = 0) -> None:
        # The system gives memory only to the part that is written. (numpy requests huge pages for large arrays only in `empty`.)
        self._numbers: Numbers = np.empty(max(room, _SMALLEST), dtype)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def view(self) -> Numbers:
        return self._numbers[: self._count]

    def append(self, numbers: Any) -> None:
        """Put `numbers` (an array of this type) at the end."""
        end = self._count + len(numbers)
        if end > len(self._numbers):
            larger = np.empty(max(2 * len(self._numbers), end), self._numbers.dtype)
            larger[: self._count] = self.view
            self._numbers = larger
        self._numbers[self._count : end] = numbers
        self._count = end

    def drop_last(self) -> None:
        self._count -= 1

    def as_type(self, dtype: Any) -> GrowingNumbers:
        """The same numbers as another type."""
        converted = GrowingNumbers(dtype, max(len(self._numbers), self._count))
        converted.append(self.view)
        return converted

    def buffer(self) -> pa.Buffer:
        return pa.py_buffer(self.view)


class _GrowingBits:
    def __init__(self, rows: int = 0) -> None:
        self._bytes = GrowingNumbers(np.uint8)
        self._count = 0
        if rows:
            self.append(np.ones(rows, np.bool_))

    def append(self, bits: Numbers) -> None:
        spare = self._count % 8
        if spare:
            # The last byte is written again. Its lower bits stay the same, so readers of earlier rows see no change.
            last = np.unpackbits(self._bytes.view[-1:], bitorder="little", count=spare)
            self._bytes.drop_last()
            bits = np.concatenate([last, bits.view(np.uint8)])
        self._bytes.append(np.packbits(bits, bitorder="little"))
        self._count += len(bits) - spare

    def buffer(self) -> pa.Buffer:
        return self._bytes.buffer()


class GrowingColumn:
    """A column to which rows are appended. Its type must be one that `columnar.buffers` can store."""

    def __init__(self, kind: pa.DataType, name: str = "c", room: int = 0) -> None:
        self.kind = kind
        self.rows = 0
        self._name = name
        self._valid: _GrowingBits | None = None
        self._bits = _GrowingBits() if pa.types.is_boolean(kind) else None
        self._values: GrowingNumbers | None = None
        self._offsets: GrowingNumbers | None = None
        self._end = 0
        if is_bytes(kind) or has_offsets(kind):
            self._offsets = GrowingNumbers(np.int32, room)
            self._offsets.append(np.zeros(1, np.int32))
        if is_bytes(kind):
            self._values = GrowingNumbers(np.uint8)
        elif self._bits is None and not has_offsets(kind) and not pa.types.is_struct(kind):
            width = kind.bit_width // 8
            # Values are stored as numbers of the same width, or as plain bytes if numpy has no such numbers.
            self._values = GrowingNumbers(
                np.dtype(f"u{width}") if width in (1, 2, 4, 8) else np.dtype(f"V{width}"), room
            )
        self._children = [GrowingColumn(child, f"{name}.{n}") for n, child in enumerate(child_types(kind))]

    def append(self, array: pa.Array) -> None:
        """Append the rows of `array`, which has this column's type."""
        if array.null_count and self._valid is None:
            self._valid = _GrowingBits(self.rows)
        if self._valid is not None:
            self._valid.append(as_bools(array.is_valid()))
        if self._bits is not None:
            self._bits.append(as_bools(array.fill_null(False) if array.null_count else array))
        elif is_bytes(self.kind):
            offsets, data = offsets_and_data(array)
            assert self._values is not None
            self._values.append(data[offsets[0] : offsets[-1]])
            self._append_offsets(offsets)
        elif self._offsets is not None:
            self._append_offsets(list_offsets(array))
        elif self._values is not None and len(array):
            stored = self._values.view
            values = np.frombuffer(array.buffers()[1], stored.dtype, array.offset + len(array))
            self._values.append(values[array.offset :])
        for column, child in zip(self._children, child_arrays(array), strict=True):
            column.append(child)
        self.rows += len(array)

    def check_room(self, array: pa.Array) -> None:
        """Raise OverflowError if the rows of `array` cannot be appended."""
        if self._offsets is not None and not is_bytes(self.kind):
            offsets = list_offsets(array)
            if self._end + int(offsets[-1] - offsets[0]) > _INT32_AT_MOST:
                raise OverflowError(
                    f"the cached values of column {self._name!r} ({self.kind}) have more than {_INT32_AT_MOST} elements in total: set a lower "
                    "lookup.partial-cache.max-bytes, or leave the column out with lookup.columns"
                )
        for column, child in zip(self._children, child_arrays(array), strict=True):
            column.check_room(child)

    def _append_offsets(self, offsets: Numbers) -> None:
        assert self._offsets is not None
        moved = offsets[1:] + (self._end - int(offsets[0]))
        self._end += int(offsets[-1] - offsets[0])
        if self._end > _INT32_AT_MOST and self._offsets.view.dtype != np.int64:
            self._offsets = self._offsets.as_type(np.int64)
        self._offsets.append(moved)

    def view(self) -> pa.Array:
        """All rows so far as one array. Text and binary of more than 2 GiB get Arrow's large types."""
        return read_column(self._name, self.kind, self.rows, self._streams())

    def _streams(self) -> dict[str, pa.Buffer]:
        data = "bytes" if is_bytes(self.kind) else "values"
        numbers_by_part = {
            "valid": self._valid,
            "offsets": self._offsets,
            data: self._bits if self._bits is not None else self._values,
        }
        streams = {
            f"{self._name}.{part}": numbers.buffer() for part, numbers in numbers_by_part.items() if numbers is not None
        }
        for column in self._children:
            streams |= column._streams()
        return streams

    def take(self, rows: Numbers) -> GrowingColumn:
        """A new column with `rows` of this one, in that order, and with room for as many more."""
        column = GrowingColumn(self.kind, self._name, 2 * len(rows))
        rows_to_keep = self._take(rows)
        if is_bytes(self.kind):
            column._values = GrowingNumbers(np.uint8, 2 * rows_to_keep.nbytes)
        column.append(rows_to_keep)
        return column

    def _take(self, rows: Numbers) -> pa.Array:
        if len(rows) and int(rows[-1]) - int(rows[0]) == len(rows) - 1 and bool((rows[1:] > rows[:-1]).all()):
            return self.view().slice(int(rows[0]), len(rows))
        return pc.take(self.view(), as_indices(rows), boundscheck=False)

    def row_bytes(self, array: pa.Array) -> Numbers | int:
        """How many bytes each row of `array` takes in this column: exact for text and binary, an average for nested values."""
        if is_bytes(self.kind):
            offsets, _ = offsets_and_data(array)
            return np.asarray(offsets[1:] - offsets[:-1] + 4)
        if self._children:
            return -(-int(array.nbytes) // max(len(array), 1))
        return 1 if self._bits is not None else int(self.kind.bit_width) // 8


EqualKeys = Callable[[Numbers, Numbers], Numbers]
"""A function of (entries, rows of a batch): for each entry, whether it has the key of the row at the same place."""

_EMPTY = 0  # slots hold an entry's number + 1
_REMOVED = -1
_FILL_AT_MOST = 0.4


class Slots:
    """A hash table with open addressing. It finds the numbers of entries by their hashes, for a whole batch of keys at a time.

    `room`: for how many entries. The hash of an entry names a slot; the entry is in the first slot from there on that was free. Where an entry
    was removed, a mark stays, unless an empty slot follows, so that a search goes on beyond it. Equal hashes do not mean equal keys, so the
    caller compares the keys.
    """

    def __init__(self, room: int) -> None:
        bits = max(int(room / _FILL_AT_MOST), 1024).bit_length()
        self._slots = np.empty(1 << bits, np.int32)
        self._slots.fill(_EMPTY)
        self._mask = (1 << bits) - 1
        self._shift = np.uint64(64 - bits)
        self._places = GrowingNumbers(np.int64)  # the slot of each entry
        self._occupied = 0  # slots that are not empty, those with a mark of a removed entry included

    def has_room(self, count: int) -> bool:
        """Whether enough slots stay empty if `count` entries are added."""
        return self._occupied + count <= _FILL_AT_MOST * len(self._slots)

    def find(self, hashes: Numbers, equal_keys: EqualKeys) -> Numbers:
        """For each key, by its hash, the number of its entry; -1 if it has none."""
        row_entries = np.full(len(hashes), -1, np.int64)
        at = (hashes >> self._shift).view(np.int64)
        pending_rows = np.arange(len(hashes))
        while len(pending_rows):
            slot_values = self._slots[at]
            filled = np.flatnonzero(slot_values > 0)
            entries = slot_values[filled].astype(np.int64) - 1
            equal = equal_keys(entries, pending_rows[filled])
            hits = filled[equal]
            row_entries[pending_rows[hits]] = entries[equal]
            # The search ends for rows whose slot is empty, and for these rows, which have found their entries.
            slot_values[hits] = _EMPTY
            on = np.flatnonzero(slot_values != _EMPTY)
            pending_rows, at = pending_rows[on], (at[on] + 1) & self._mask
        return row_entries

    def place(self, hashes: Numbers, entries: Numbers, equal_keys: EqualKeys | None = None) -> Numbers:
        """Put `entries` (ascending) into slots; none of their keys may have a slot yet. Returns the entries that were left out.

        `equal_keys`: tells which entries have the same key; of these, only the last one gets a slot. None: all keys are different.
        """
        if len(entries):
            self._places.append(np.full(max(int(entries[-1]) + 1 - len(self._places), 0), -1, np.int64))
        places = self._places.view
        at = (hashes >> self._shift).view(np.int64)
        pending_entries = entries
        rows = np.arange(len(entries))
        double: list[Numbers] = []
        while len(at):
            free = self._slots[at] <= _EMPTY
            free_slots, takers = (at, pending_entries) if free.all() else (at[free], pending_entries[free])
            # If several entries are written to the same slot, the last one stays there. The others try the next slot.
            self._slots[free_slots] = takers + 1
            winners = self._slots[free_slots].astype(np.int64) - 1
            won = winners == takers
            if won.all():
                places[takers] = free_slots
                on = np.flatnonzero(~free)
            else:
                places[takers[won]] = free_slots[won]
                losers = np.flatnonzero(free)[~won]
                unplaced = ~free
                unplaced[losers] = True
                if equal_keys is not None:  # entries with the same key always try the same slot at the same time
                    twice = losers[equal_keys(winners[~won], rows[losers])]
                    double.append(pending_entries[twice])
                    unplaced[twice] = False
                on = np.flatnonzero(unplaced)
            rows, pending_entries, at = rows[on], pending_entries[on], (at[on] + 1) & self._mask
        self._occupied += len(entries)
        return np.concatenate(double) if double else np.zeros(0, np.int64)

    def remove(self, entries: Numbers) -> None:
        """Empty the slots of these entries."""
        at = self._places.view[entries]
        at = at[at >= 0]
        followed = self._slots[(at + 1) & self._mask] != _EMPTY
        self._slots[at] = np.where(followed, _REMOVED, _EMPTY)
        self._occupied -= len(at) - int(np.count_nonzero(followed))


# --- entries --------------------------------------------------------------------------------------

_ENTRY_BYTES = 64  # what each entry takes in addition to its values: numbers, and a share of the slots
_DEAD = -1


class Entries:
    """The entries of a cache, each a key with its rows. `key_fields`: the columns of keys. `row_fields`: the columns of rows."""

    def __init__(self, key_fields: Sequence[pa.Field], row_fields: Sequence[pa.Field], room: int = 1024) -> None:
        self.key_fields = tuple(key_fields)
        self.row_fields = tuple(row_fields)
        self._keys = [GrowingColumn(field.type, field.name) for field in key_fields]
        self._columns = [GrowingColumn(field.type, field.name) for field in row_fields]
        self._hashes = GrowingNumbers(np.uint64)
        # The number of each entry's latest access; _DEAD for a removed entry.
        self._latest_accesses = GrowingNumbers(np.int64)
        self._written_at_s = GrowingNumbers(np.float64)
        self._starts = GrowingNumbers(np.int64)  # the first row of each entry
        self._counts = GrowingNumbers(np.int64)  # the number of rows of each entry; 0 for a key without rows
        self._bytes = GrowingNumbers(np.int64)
        self._slots = Slots(room)
        self._fixed = len(key_fields) == 1 and pa.types.is_primitive(key_fields[0].type)
        self._row_end = 0
        self._one_each = True  # whether each entry has exactly one row: entry n has row n
        self.live = 0
        self.live_rows = 0  # a key without rows counts as one row
        self.live_bytes = 0
        self.all_bytes = 0  # the bytes of all entries, removed ones included

    @property
    def has_rows(self) -> bool:
        """Whether any row was ever put."""
        return self._row_end > 0

    def __len__(self) -> int:
        return len(self._latest_accesses)

    # --- finding ----------------------------------------------------------------------------------

    def find(self, keys: Keys, hashes: Numbers) -> Numbers:
        """For each key, the number of its entry; -1 if it has none, or has a null."""
        stored = Keys([column.view() for column in self._keys])
        stored_hashes = self._hashes.view

        def equal_keys(entries: Numbers, rows: Numbers) -> Numbers:
            if self._fixed:
                return stored.equal(entries, keys, rows)
            equal: Numbers = stored_hashes[entries] == hashes[rows]
            candidates = np.flatnonzero(equal)
            equal[candidates] = stored.equal(entries[candidates], keys, rows[candidates])
            return equal

        entry_numbers = self._slots.find(hashes, equal_keys)
        if keys.valid is not None:
            entry_numbers[~keys.valid] = -1
        return entry_numbers

    def locate_rows(self, entries: Numbers) -> tuple[Numbers, Numbers]:
        """The rows of `entries`, in the order of the entries: (for each row the position of its entry in `entries`, the row's number)."""
        if self._one_each:
            return np.arange(len(entries)), entries
        counts = self._counts.view[entries]
        ends = np.cumsum(counts)
        rows = np.arange(ends[-1] if len(ends) else 0)
        rows += np.repeat(self._starts.view[entries] - (ends - counts), counts)
        return np.repeat(np.arange(len(entries)), counts), rows

    def columns(self) -> list[pa.Array]:
        """The columns of all rows, those of removed entries included. These arrays never change, even if rows are added later."""
        return [column.view() for column in self._columns]

    def latest_accesses(self, entries: Numbers) -> Numbers:
        """The number of the latest access to each of `entries`; below zero for a removed entry."""
        return np.asarray(self._latest_accesses.view[entries])

    def touch(self, entries: Numbers, access: Numbers) -> None:
        """Record the accesses `access` to `entries`. If an entry occurs several times, its last access counts."""
        self._latest_accesses.view[entries] = access

    def written_s(self, entries: Numbers) -> Numbers:
        """The time at which each of `entries` was put, in seconds by the cache's clock."""
        return np.asarray(self._written_at_s.view[entries])

    def find_expired(self, limit_s: float) -> Numbers:
        """The live entries that were put at `limit_s` or earlier."""
        return np.flatnonzero((self._written_at_s.view <= limit_s) & (self._latest_accesses.view >= 0))

    # --- changing ---------------------------------------------------------------------------------

    def adopt(self, row_fields: Sequence[pa.Field]) -> None:
        """Set the columns of rows. Called when the first rows are put, if only keys without rows were put before."""
        self.row_fields = tuple(row_fields)
        self._columns = [GrowingColumn(field.type, field.name) for field in row_fields]

    def put(
        self, keys: Keys, hashes: Numbers, columns: Sequence[pa.Array], counts: Numbers, written_s: Numbers
    ) -> Numbers:
        """Add an entry for each key, and return the numbers of these entries. Older entries of the keys are removed.

        `columns`: the columns of the rows, in the order of their keys. `counts`: how many rows each key has. `written_s`: when each was loaded.
        """
        for column, array in zip(self._columns, columns, strict=True):
            column.check_room(array)  # check all columns before the first one changes
        first = len(self)
        older = self.find(keys, hashes)
        self.remove(sort_distinct(older[older >= 0]))
        if not self._slots.has_room(len(hashes)):
            self._grow(len(hashes))
        sizes = np.full(len(hashes), _ENTRY_BYTES, np.int64)
        for column, key in zip(self._keys, keys.columns, strict=True):
            column.append(key.array)
            sizes += column.row_bytes(key.array)
        row_bytes: Numbers | int = 0
        for column, array in zip(self._columns, columns, strict=True):
            column.append(array)
            row_bytes = row_bytes + column.row_bytes(array)
        ends = np.cumsum(counts)
        self._one_each &= bool((counts == 1).all())
        if isinstance(row_bytes, int):
            sizes += counts * row_bytes
        else:
            total = np.concatenate([[0], np.cumsum(row_bytes)])
            sizes += total[ends] - total[ends - counts]
        self._hashes.append(hashes)
        # Live entries, until their first access is recorded.
        self._latest_accesses.append(np.zeros(len(hashes), np.int64))
        self._written_at_s.append(written_s)
        self._starts.append(self._row_end + ends - counts)
        self._counts.append(counts)
        self._bytes.append(sizes)
        self._row_end += int(ends[-1]) if len(ends) else 0
        self.live += len(hashes)
        self.live_rows += int(np.maximum(counts, 1).sum())
        self.live_bytes += int(sizes.sum())
        self.all_bytes += int(sizes.sum())
        stored = Keys([column.view() for column in self._keys])
        added = np.arange(first, len(self))
        twice = self._slots.place(hashes, added, lambda entries, rows: stored.equal(entries, keys, rows))
        self._forget(twice)
        return added

    def weights(self, entries: Numbers | slice) -> tuple[Numbers, Numbers]:
        """For each of `entries`: (its number of rows, at least 1; its number of bytes)."""
        return np.maximum(self._counts.view[entries], 1), self._bytes.view[entries]

    def remove(self, entries: Numbers) -> None:
        """Remove entries. They must be live, and each may occur only once."""
        if len(entries):
            self._slots.remove(entries)
            self._forget(entries)

    def _forget(self, entries: Numbers) -> None:
        rows, sizes = self.weights(entries)
        self._latest_accesses.view[entries] = _DEAD
        self.live -= len(entries)
        self.live_rows -= int(rows.sum())
        self.live_bytes -= int(sizes.sum())

    def _grow(self, more: int) -> None:
        """Make enough slots for the live entries and `more` entries, with room to grow."""
        alive = np.flatnonzero(self._latest_accesses.view >= 0)
        slots = Slots(2 * (len(alive) + more))
        slots.place(self._hashes.view[alive], alive)
        self._slots = slots

    def compact(self) -> tuple[Entries, Numbers]:
        """(a copy with only the live entries, in the same order; for each entry its number in the copy, -1 if it was removed)."""
        alive = np.flatnonzero(self._latest_accesses.view >= 0)
        compacted = Entries(self.key_fields, self.row_fields, 0)
        _, rows = self.locate_rows(alive)
        compacted._keys = [column.take(alive) for column in self._keys]
        compacted._columns = [column.take(rows) for column in self._columns]
        for name in ("_hashes", "_latest_accesses", "_written_at_s", "_counts", "_bytes"):
            numbers: GrowingNumbers = getattr(self, name)
            live_numbers = GrowingNumbers(numbers.view.dtype, 2 * len(alive))
            live_numbers.append(numbers.view[alive])
            setattr(compacted, name, live_numbers)
        counts = compacted._counts.view
        ends = np.cumsum(counts)
        compacted._starts.append(ends - counts)
        compacted._row_end = len(rows)
        compacted._one_each = bool((counts == 1).all())
        compacted.all_bytes = self.live_bytes
        compacted.live, compacted.live_rows, compacted.live_bytes = self.live, self.live_rows, self.live_bytes
        compacted._slots = Slots(2 * len(alive))
        compacted._slots.place(compacted._hashes.view, np.arange(len(alive)))
        numbers_there = np.full(len(self), -1, np.int64)
        numbers_there[alive] = np.arange(len(alive))
        return compacted, numbers_there


_SLACK = 128 * 1024
_BATCHES_AT_MOST = 4096  # more batches, for instance of one key each, are merged


class AccessLog:
    """A log of accesses to entries, in order, numbered from 0. The times of accesses, in seconds, never decrease.

    Accesses are appended a batch at a time. To find the entries that were used least recently, the log is read from its old end, and accesses to
    entries with a later access are ignored. So the order is exact, and costs no Python step for each entry. `timed`: whether to keep the times of
    accesses, for `find_first_later`.
    """

    def __init__(self, timed: bool) -> None:
        self._timed = timed
        self._batches: deque[tuple[Numbers, Numbers]] = deque()  # (entries, numbers of the accesses)
        self._length = 0
        self._next = 0
        # (number of an access, time): the time of this access and of all later ones before the access in the next pair.
        self._times: deque[tuple[int, float]] = deque()

    def add(self, entries: Numbers, now_s: float) -> Numbers:
        """Add an access to each of `entries`, in order, at the time `now_s`. Returns the numbers of these accesses."""
        numbers = np.arange(self._next, self._next + len(entries))
        if self._timed and (not self._times or now_s > self._times[-1][1]):
            self._times.append((self._next, now_s))
        self._next += len(entries)
        self._batches.append((entries, numbers))
        self._length += len(entries)
        return numbers

    def find_first_later(self, limit_s: float) -> int:
        """The number of the first access after `limit_s`. `limit_s` must not decrease from call to call."""
        while self._times and self._times[0][1] <= limit_s:
            self._times.popleft()
        return self._times[0][0] if self._times else self._next

    def pop_earlier(self, access: int, latest: Callable[[Numbers], Numbers]) -> Numbers:
        """The entries whose latest access was before the access `access`. Their accesses are removed from the log.

        `latest`: returns the number of the latest access to each entry.
        """
        old_entries = [np.zeros(0, np.int64)]
        while self._batches and self._batches[0][1][0] < access:
            entries, numbers = self._batches.popleft()
            cut = int(np.searchsorted(numbers, access))
            if cut < len(numbers):
                self._batches.appendleft((entries[cut:], numbers[cut:]))
            self._length -= cut
            current = latest(entries[:cut]) == numbers[:cut]
            old_entries.append(entries[:cut][current])
        return np.concatenate(old_entries)

    def pop_oldest(self, latest: Callable[[Numbers], Numbers], enough: Callable[[Numbers], int | None]) -> Numbers:
        """As many of the least recently used entries as `enough` requires. Their accesses are removed from the log.

        `latest`: returns the number of the latest access to each entry. `enough`: called with the entries of one batch after the other; returns
        how many of them suffice (None: all of them, and more).
        """
        oldest_entries = [np.zeros(0, np.int64)]
        while self._batches:
            entries, numbers = self._batches.popleft()
            current = np.flatnonzero(latest(entries) == numbers)
            count = enough(entries[current])
            if count is None:
                self._length -= len(entries)
                oldest_entries.append(entries[current])
                continue
            cut = int(current[count]) if count < len(current) else len(entries)
            oldest_entries.append(entries[current[:count]])
            self._length -= cut
            if cut < len(entries):
                self._batches.appendleft((entries[cut:], numbers[cut:]))
            break
        return np.concatenate(oldest_entries)

    def trim(self, live: int, latest: Callable[[Numbers], Numbers]) -> None:
        """Drop accesses to entries with a later access, if these are more than half of the log. `live`: the number of entries.

        `latest`: returns the number of the latest access to each entry.
        """
        if self._length > 2 * live + _SLACK or len(self._batches) > _BATCHES_AT_MOST:
            self._rewrite(lambda entries: entries, latest)

    def renumber(self, numbers_there: Numbers, latest: Callable[[Numbers], Numbers]) -> None:
        """Renumber the entries. `numbers_there`: for each entry its new number (-1: it was removed).

        `latest`: takes new numbers of entries, and returns the number of the latest access to each of them.
        """
        self._rewrite(lambda entries: numbers_there[entries], latest)

    def _rewrite(self, move: Callable[[Numbers], Numbers], latest: Callable[[Numbers], Numbers]) -> None:
        entries, numbers = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for old_numbers, accesses in self._batches:
            moved = move(old_numbers)
            is_current = moved >= 0
            is_current[is_current] = latest(moved[is_current]) == accesses[is_current]
            entries.append(moved[is_current])
            numbers.append(accesses[is_current])
        whole = np.concatenate(entries), np.concatenate(numbers)
        self._batches = deque([whole] if len(whole[0]) else [])
        self._length = len(whole[0])


# --- the cache ------------------------------------------------------------------------------------

_GARBAGE_ROWS = 64 * 1024
_GARBAGE_BYTES = 1024 * 1024
_PURGES = 8  # how often, during one time to live after a write, expired entries are removed
_CLOCK = HostClock()


def _check_bound(name: str, value: Any) -> Any:
    """The bound `value`. Raises ValueError, which names it, unless it is a number of 0 or more."""
    if not is_number(value) or not value >= 0:
        raise ValueError(f"{name} = {value!r}: expected a number, 0 or more")
    return value


class DefaultLookupCacheBuilder:
    """Builds a `DefaultLookupCache`. Set at least one bound before `build`."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def expire_after_access(self, seconds: float) -> DefaultLookupCacheBuilder:
        """Drop an entry that was neither read nor put for this long (>= 0; 0 caches nothing)."""
        return self._set_bound("expire_after_access_s", seconds)

    def expire_after_write(self, seconds: float) -> DefaultLookupCacheBuilder:
        """Drop an entry this long after it was put (>= 0; 0 caches nothing)."""
        return self._set_bound("expire_after_write_s", seconds)

    def max_rows(self, rows: int) -> DefaultLookupCacheBuilder:
        """Cache at most this many rows (>= 0). A key without rows counts as one row."""
        return self._set_bound("max_rows", rows)

    def max_bytes(self, size: int) -> DefaultLookupCacheBuilder:
        """Cache entries of at most this many bytes in total (>= 0). The memory in use may be twice as large, because
        the memory of removed entries is freed later."""
        return self._set_bound("max_bytes", size)

    def cache_missing_key(self, wanted: bool) -> DefaultLookupCacheBuilder:
        """Whether to remember that a key has no rows (default: yes)."""
        self._values["cache_missing_key"] = wanted
        return self

    def _set_bound(self, name: str, value: float) -> DefaultLookupCacheBuilder:
        self._values[name] = _check_bound(name, value)
        return self

    def build(self) -> DefaultLookupCache:
        """The cache with these bounds. Raises OptionError if no bound was set (FLIP-221)."""
        return DefaultLookupCache(**self._values)


class DefaultLookupCache(LookupCache):
    """A cache within the bounds that `DefaultLookupCacheBuilder` sets.

    `clock`: returns a time in seconds that never decreases. A pickled copy has the same bounds, and no entries. An entry that is larger than a
    bound is not cached.
    """

    def __init__(
        self,
        *,
        expire_after_access_s: float | None = None,
        expire_after_write_s: float | None = None,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        cache_missing_key: bool = True,
        clock: Callable[[], float] = _CLOCK.steady_s,
        rng: random.Random | None = None,
    ) -> None:
        self._config: dict[str, Any] = {
            "expire_after_access_s": expire_after_access_s,
            "expire_after_write_s": expire_after_write_s,
            "max_rows": max_rows,
            "max_bytes": max_bytes,
            "cache_missing_key": cache_missing_key,
        }
        for name, bound in list(self._config.items())[:-1]:
            if bound is not None:
                _check_bound(name, bound)
        if all(bound is None for bound in list(self._config.values())[:-1]):
            raise OptionError(
                "a DefaultLookupCache without a bound would grow for ever: give it max_rows, max_bytes, expire_after_access_s or "
                "expire_after_write_s (from options: lookup.partial-cache.max-rows, lookup.partial-cache.max-bytes, "
                "lookup.partial-cache.expire-after-access or lookup.partial-cache.expire-after-write)"
            )
        self._access_s, self._write_s = expire_after_access_s, expire_after_write_s
        self._max_rows = math.inf if max_rows is None else max_rows
        self._max_bytes = math.inf if max_bytes is None else max_bytes
        self._missing = cache_missing_key
        self._clock = clock
        self._seed = draw_seed(rng or random.Random())
        self.reset_in_child()
        resets_in_child(self)

    def reset_in_child(self) -> None:
        """Drop all entries. The race: when this child was forked, a thread of the parent may have had the lock, and entries half changed."""
        self._lock = threading.RLock()
        self._metrics = CacheMetricGroup()
        self._now_s = -math.inf
        self._purge_at_s = -math.inf
        self._entries: Entries | None = None
        self._log = AccessLog(self._access_s is not None)

    @staticmethod
    def new_builder() -> DefaultLookupCacheBuilder:
        """A builder for a `DefaultLookupCache`."""
        return DefaultLookupCacheBuilder()

    @classmethod
    def from_options(cls, options: LookupOptions, clock: Callable[[], float] = _CLOCK.steady_s) -> DefaultLookupCache:
        """The cache that the options `lookup.partial-cache.*` describe. Raises OptionError unless `lookup.cache` is PARTIAL."""
        if options.cache.mode is not CacheMode.PARTIAL:
            raise OptionError(
                f"option lookup.cache = {options.cache.mode.value!r}: a DefaultLookupCache needs 'PARTIAL': set that"
            )
        return cls(**options.partial_cache.parameters, clock=clock)

    @property
    def config(self) -> dict[str, Any]:
        """The arguments with which the cache was made, except `clock` and `rng`, by name. A bound that is None does not apply."""
        return dict(self._config)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DefaultLookupCache) and self._config == other._config

    def __hash__(self) -> int:
        return hash(tuple(self._config.values()))

    def __repr__(self) -> str:
        bounds = ", ".join(f"{name}={value!r}" for name, value in self._config.items() if value is not None)
        return f"DefaultLookupCache({bounds})"

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(DefaultLookupCache, **self._config), ()

    # --- the operations of FLIP-221 -------------------------------------------------------------------

    def open(self, metrics: CacheMetricGroup) -> None:
        with self._lock:
            self._metrics = metrics
            self._set_gauges()

    def get_many(self, keys: pa.Table) -> CachedRows:
        return self._get(keys, access=True)

    def peek_many(self, keys: pa.Table) -> CachedRows:
        return self._get(keys, access=False)

    def _get(self, keys: pa.Table, access: bool) -> CachedRows:
        with self._lock:
            entries = self._entries
            if entries is None:
                requested_keys = Keys([one_array(column) for column in keys.columns])
                entry_numbers = np.full(requested_keys.rows, -1, np.int64)
            else:
                requested_keys = Keys(cast_keys(keys, entries.key_fields))
                entry_numbers = self._live(entries, requested_keys, self._time())
            present = entry_numbers >= 0
            hits = np.flatnonzero(present)
            hit_entries = entry_numbers if len(hits) == len(entry_numbers) else entry_numbers[hits]
            if access:
                valid_count = (
                    requested_keys.rows if requested_keys.valid is None else int(np.count_nonzero(requested_keys.valid))
                )
                self._metrics.inc("hitCount", len(hits))
                self._metrics.inc("missCount", valid_count - len(hits))
                if entries is not None and len(hit_entries):
                    entries.touch(hit_entries, self._log.add(hit_entries, self._now_s))
                    self._log.trim(entries.live, entries.latest_accesses)
            if entries is None:
                return CachedRows(present, None)
            columns, (places, rows), fields = entries.columns(), entries.locate_rows(hit_entries), entries.row_fields
            if not fields and not entries.has_rows:
                return CachedRows(present, None)
        # Outside the lock: these arrays never change, because columns grow only at their end.
        indices = as_indices(rows)
        arrays = [
            cast_column(pc.take(column, indices, boundscheck=False), field.type, field.name, "")
            for column, field in zip(columns, fields, strict=True)
        ]
        numbers = as_indices(hits[places])
        schema = pa.schema([*fields, pa.field(KEY_INDEX, pa.int64())])
        return CachedRows(present, pa.Table.from_arrays([*arrays, numbers], schema=schema))

    def _live(self, entries: Entries, keys: Keys, now_s: float) -> Numbers:
        """For each key, the number of its entry; -1 if it has none, or the entry has expired."""
        entry_numbers = entries.find(keys, keys.hashes(self._seed))
        if self._access_s is None and self._write_s is None:
            return entry_numbers
        hits = np.flatnonzero(entry_numbers >= 0)
        expired = np.zeros(len(hits), np.bool_)
        if self._access_s is not None:
            expired |= entries.latest_accesses(entry_numbers[hits]) < self._log.find_first_later(now_s - self._access_s)
        if self._write_s is not None:
            expired |= entries.written_s(entry_numbers[hits]) <= now_s - self._write_s
        entry_numbers[hits[expired]] = -1
        return entry_numbers

    def put_many(self, keys: pa.Table, rows: pa.Table, ages_s: Numbers | None = None) -> None:
        with self._lock:
            entries, fields = self._open(keys, rows)
            put_keys = Keys(cast_keys(keys, entries.key_fields))
            if put_keys.valid is not None:
                row = int(np.flatnonzero(~put_keys.valid)[0])
                raise ValueError(
                    f"key {keys.slice(row, 1).to_pylist()[0]} has a null: such a key matches no rows, so nothing can be cached for it"
                )
            columns, counts = group_rows(rows, fields, put_keys.rows)
            self._entries = entries
            if fields and not entries.row_fields:
                entries.adopt(fields)
            if not self._missing and not counts.all():
                keys_with_rows = as_indices(np.flatnonzero(counts))
                put_keys = Keys([column.array.take(keys_with_rows) for column in put_keys.columns])
                ages_s = None if ages_s is None else ages_s[counts > 0]
                counts = counts[counts > 0]
            if not put_keys.rows:
                return
            now_s = self._time()
            written_s = np.full(put_keys.rows, now_s) if ages_s is None else now_s - ages_s
            entry_numbers = entries.put(put_keys, put_keys.hashes(self._seed), columns, counts, written_s)
            alive = entry_numbers[entries.latest_accesses(entry_numbers) >= 0]
            entries.touch(alive, self._log.add(alive, now_s))
            weights, sizes = entries.weights(slice(int(entry_numbers[0]), None))
            too_large = (weights > self._max_rows) | (sizes > self._max_bytes)
            if too_large.any():
                entries.remove(
                    np.setdiff1d(entry_numbers[too_large], entry_numbers[entries.latest_accesses(entry_numbers) < 0])
                )
            self._purge(entries, now_s)
            self._evict(entries)
            self._compact(entries)
            self._set_gauges()

    def invalidate_many(self, keys: pa.Table) -> None:
        with self._lock:
            entries = self._entries
            if entries is not None:
                dropped_keys = Keys(cast_keys(keys, entries.key_fields))
                entry_numbers = entries.find(dropped_keys, dropped_keys.hashes(self._seed))
                entries.remove(sort_distinct(entry_numbers[entry_numbers >= 0]))
                self._compact(entries)
                self._set_gauges()

    def size(self) -> int:
        with self._lock:
            if self._entries is not None:
                self._purge(self._entries, self._time(), at_once=True)
                self._set_gauges()
            return 0 if self._entries is None else self._entries.live_rows

    def bytes(self) -> int:
        with self._lock:
            return 0 if self._entries is None else self._entries.live_bytes

    def close(self) -> None:
        with self._lock:
            self._entries = None
            self._log = AccessLog(self._access_s is not None)
            self._set_gauges()

    # --- expiry and eviction ------------------------------------------------------------------------

    def _time(self) -> float:
        """The current time, which is never before a time returned earlier."""
        self._now_s = max(self._now_s, self._clock())
        return self._now_s

    def _open(self, keys: pa.Table, rows: pa.Table) -> tuple[Entries, Sequence[pa.Field]]:
        """(the entries into which to put keys and rows, the columns of rows). The first keys and the first rows determine the types."""
        fields = [pa.field(f.name, spark_type(f.type)) for f in rows.schema if f.name != KEY_INDEX]
        entries = self._entries
        if entries is None:
            key_fields = [pa.field(field.name, spark_type(field.type)) for field in keys.schema]
            check_key_types(key_fields)
            return Entries(key_fields, []), fields
        return entries, entries.row_fields if entries.row_fields or entries.has_rows else fields

    def _purge(self, entries: Entries, now_s: float, at_once: bool = False) -> None:
        """Remove expired entries. Entries that expired after their last access are removed at each call. Entries that expired after they were put are
        removed only from time to time, or if `at_once`."""
        if self._access_s is not None:
            expired = self._log.pop_earlier(self._log.find_first_later(now_s - self._access_s), entries.latest_accesses)
            entries.remove(expired)
        if self._write_s is not None and (at_once or now_s >= self._purge_at_s):
            entries.remove(entries.find_expired(now_s - self._write_s))
            self._purge_at_s = now_s + self._write_s / _PURGES

    def _evict(self, entries: Entries) -> None:
        if self._write_s is not None and (entries.live_rows > self._max_rows or entries.live_bytes > self._max_bytes):
            self._purge(entries, self._now_s, at_once=True)
        rows, size = entries.live_rows - self._max_rows, entries.live_bytes - self._max_bytes
        if rows <= 0 and size <= 0:
            return

        def enough(entry_numbers: Numbers) -> int | None:
            nonlocal rows, size
            weights, sizes = entries.weights(entry_numbers)
            weights, sizes = np.cumsum(weights), np.cumsum(sizes)
            count = max(int(np.searchsorted(weights, rows)), int(np.searchsorted(sizes, size))) + 1
            if count > len(entry_numbers):
                if len(entry_numbers):
                    rows, size = rows - int(weights[-1]), size - int(sizes[-1])
                return None
            return count

        entries.remove(self._log.pop_oldest(entries.latest_accesses, enough))

    def _compact(self, entries: Entries) -> None:
        dead_entries, dead_bytes = len(entries) - entries.live, entries.all_bytes - entries.live_bytes
        if dead_entries > max(entries.live, _GARBAGE_ROWS) or dead_bytes > max(entries.live_bytes, _GARBAGE_BYTES):
            self._entries, numbers_there = entries.compact()
            self._log.renumber(numbers_there, self._entries.latest_accesses)

    def _set_gauges(self) -> None:
        entries = self._entries
        self._metrics.set_gauge("numCachedRecords", 0 if entries is None else entries.live_rows)
        self._metrics.set_gauge("numCachedBytes", 0 if entries is None else entries.live_bytes)


def group_rows(rows: pa.Table, fields: Sequence[pa.Field], keys: int) -> tuple[list[pa.Array], Numbers]:
    """(the columns of `rows`, ordered by key; the number of rows of each of the `keys` keys). `fields`: the columns that the rows must have."""
    if not rows.num_rows:
        return [pa.array([], field.type) for field in fields], np.zeros(keys, np.int64)
    if KEY_INDEX not in rows.column_names:
        raise SchemaError(f"rows have no column {KEY_INDEX}: add it, with the number of each row's key")
    missing_columns = [field.name for field in fields if field.name not in rows.column_names]
    if missing_columns or len(fields) + 1 != rows.num_columns:
        names = [name for name in rows.column_names if name != KEY_INDEX]
        raise SchemaError(
            f"rows have the columns {', '.join(names)}, but this cache has rows with {', '.join(f.name for f in fields)}: give all rows of "
            "a cache the same columns"
        )
    indices = one_array(rows.column(KEY_INDEX)).cast(pa.int64())
    numbers = np.frombuffer(indices.buffers()[1], np.int64, indices.offset + len(indices))[indices.offset :]
    if indices.null_count or int(numbers.min()) < 0 or int(numbers.max()) >= keys:
        raise ValueError(
            f"column {KEY_INDEX} must have, for each row, the number of the row's key, from 0 to {keys - 1}"
        )
    for field in fields:
        if not widens(spark_type(rows.schema.field(field.name).type, pa.null()), field.type):
            row_type = rows.schema.field(field.name).type
            raise SchemaError(
                f"rows have column {field.name!r} as {row_type}, but in this cache it is {field.type}: cast it"
            )
    columns = [cast_column(one_array(rows.column(field.name)), field.type, field.name, "rows") for field in fields]
    if (numbers[1:] < numbers[:-1]).any():
        order = as_indices(np.argsort(numbers, kind="stable"))
        columns = [column.take(order) for column in columns]
    return columns, np.bincount(numbers, minlength=keys)
