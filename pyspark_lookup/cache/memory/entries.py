"""The entries of a cache in memory: their keys, rows, times and sizes, as whole columns.

Entries are numbered in the order in which they were put, and their rows are in the same order. Nothing is removed in place: a removed entry
is marked, and `compact` makes new columns without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.buffers import child_arrays, child_types, has_offsets, is_bytes, list_offsets, read_column
from pyspark_lookup.columnar.keys import Keys, Numbers, as_bools, as_indices, offsets_and_data

_INT32_AT_MOST = 2**31 - 1
_SMALLEST = 1024


class GrowingNumbers:
    """Numbers of one type, which grow at the end. `view`: all of them, in memory that may be written to.

    The buffers behind a column are larger than the part in use. A view that was handed out earlier does not change: new values are written
    behind it, and a full buffer is replaced, not changed. So a column is read as one Arrow array, without copying existing values.
    """

    def __init__(self, dtype: Any, room: int = 0) -> None:
        # Unused room takes no memory. (numpy requests huge pages for large arrays only in `empty`.)
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
        """The same numbers in another type."""
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
            # The last byte is written again with its lower bits unchanged, so readers of earlier rows see no change.
            last = np.unpackbits(self._bytes.view[-1:], bitorder="little", count=spare)
            self._bytes.drop_last()
            bits = np.concatenate([last, bits.view(np.uint8)])
        self._bytes.append(np.packbits(bits, bitorder="little"))
        self._count += len(bits) - spare

    def buffer(self) -> pa.Buffer:
        return self._bytes.buffer()


class GrowingColumn:
    """One column of a type that `buffers` can store."""

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
            # Copied in the widest numbers that divide it.
            self._values = GrowingNumbers(
                np.dtype(f"u{width}") if width in (1, 2, 4, 8) else np.dtype(f"V{width}"), room
            )
        self._children = [GrowingColumn(child, f"{name}.{n}") for n, child in enumerate(child_types(kind))]

    def append(self, array: pa.Array) -> None:
        """Put the rows of `array`, which has this column's type, at the end."""
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
                raise OverflowError(f"a column of type {self.kind} has more than {_INT32_AT_MOST} elements")
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
        """All rows so far; text and binary past 2 GiB as their large type."""
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
        """A column of these rows only, in this order, with room to double."""
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
        """The bytes that each row of `array` takes here: exact for text and binary, an average for nested values."""
        if is_bytes(self.kind):
            offsets, _ = offsets_and_data(array)
            return np.asarray(offsets[1:] - offsets[:-1] + 4)
        if self._children:
            return -(-int(array.nbytes) // max(len(array), 1))
        return 1 if self._bits is not None else int(self.kind.bit_width) // 8


EqualKeys = Callable[[Numbers, Numbers], Numbers]
"""(entries, rows of the batch) -> whether each entry has the key of the corresponding row."""

_EMPTY = 0  # slots hold an entry's number + 1
_REMOVED = -1
_FILL_AT_MOST = 0.4


class Slots:
    """A hash table with open addressing over numpy, a whole batch at a time: from hashes to the numbers of up to `room` entries, from 0.

    An entry is in the first slot that was free, counted from the one that its hash names. A removed entry leaves a mark, unless an empty
    slot follows, so that entries beyond it are still found. A hash only leads to candidates: the caller compares the keys.
    """

    def __init__(self, room: int) -> None:
        bits = max(int(room / _FILL_AT_MOST), 1024).bit_length()
        self._slots = np.empty(1 << bits, np.int32)
        self._slots.fill(_EMPTY)
        self._mask = (1 << bits) - 1
        self._shift = np.uint64(64 - bits)
        self._places = GrowingNumbers(np.int64)  # the slot of each entry
        self._occupied = 0  # slots that are not empty, removed entries included

    def has_room(self, count: int) -> bool:
        """Whether `count` more entries leave enough slots empty."""
        return self._occupied + count <= _FILL_AT_MOST * len(self._slots)

    def find(self, hashes: Numbers, equal_keys: EqualKeys) -> Numbers:
        """The entry of each row's key; -1 if there is none."""
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
            slot_values[hits] = _EMPTY  # matched: the next line takes it out of the search
            on = np.flatnonzero(slot_values != _EMPTY)
            pending_rows, at = pending_rows[on], (at[on] + 1) & self._mask
        return row_entries

    def place(self, hashes: Numbers, entries: Numbers, equal_keys: EqualKeys | None = None) -> Numbers:
        """Put `entries` (ascending), whose keys are in no slot yet, into slots. Returns the entries that were left out.

        If several have the same key, according to `equal_keys` (None: all differ), the last is placed.
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
            # If several entries get one slot, numpy keeps the last one written: the others try the next slot.
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
                if equal_keys is not None:  # all rows of one key try the same slot at the same time
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

_ENTRY_BYTES = 64  # the numbers that are kept per entry, including slots
_DEAD = -1


class Entries:
    """Entries with keys of `key_fields` and rows of `row_fields`."""

    def __init__(self, key_fields: Sequence[pa.Field], row_fields: Sequence[pa.Field], room: int = 1024) -> None:
        self.key_fields = tuple(key_fields)
        self.row_fields = tuple(row_fields)
        self._keys = [GrowingColumn(field.type) for field in key_fields]
        self._columns = [GrowingColumn(field.type) for field in row_fields]
        self._hashes = GrowingNumbers(np.uint64)
        self._latest_accesses = GrowingNumbers(np.int64)  # number of the latest access, _DEAD once gone
        self._written_at_s = GrowingNumbers(np.float64)
        self._starts = GrowingNumbers(np.int64)  # of its rows
        self._counts = GrowingNumbers(np.int64)  # of its rows; 0 for a key without rows
        self._bytes = GrowingNumbers(np.int64)
        self._slots = Slots(room)
        self._fixed = len(key_fields) == 1 and pa.types.is_primitive(key_fields[0].type)
        self._row_end = 0
        self._one_each = True  # entry n has exactly one row, row n
        self.live = 0
        self.live_rows = 0  # a key without rows counts as one
        self.live_bytes = 0
        self.all_bytes = 0  # including removed entries

    @property
    def has_rows(self) -> bool:
        """Whether any row was ever put."""
        return self._row_end > 0

    def __len__(self) -> int:
        return len(self._latest_accesses)

    # --- finding ----------------------------------------------------------------------------------

    def find(self, keys: Keys, hashes: Numbers) -> Numbers:
        """The entry of each key; -1 if there is none or the key has a null."""
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
        """(position in `entries`, row) of each row of the entries, in turn."""
        if self._one_each:
            return np.arange(len(entries)), entries
        counts = self._counts.view[entries]
        ends = np.cumsum(counts)
        rows = np.arange(ends[-1] if len(ends) else 0)
        rows += np.repeat(self._starts.view[entries] - (ends - counts), counts)
        return np.repeat(np.arange(len(entries)), counts), rows

    def columns(self) -> list[pa.Array]:
        """The columns of all rows, including removed ones. They stay valid as long as somebody holds them."""
        return [column.view() for column in self._columns]

    def latest_accesses(self, entries: Numbers) -> Numbers:
        """The number of the latest access to each entry, below zero if it is gone."""
        return np.asarray(self._latest_accesses.view[entries])

    def touch(self, entries: Numbers, access: Numbers) -> None:
        """Record accesses of entries; of several accesses of one entry the last counts."""
        self._latest_accesses.view[entries] = access

    def written_s(self, entries: Numbers) -> Numbers:
        """The time at which each entry was put."""
        return np.asarray(self._written_at_s.view[entries])

    def find_expired(self, limit_s: float) -> Numbers:
        """The live entries that were put at `limit_s` or earlier."""
        return np.flatnonzero((self._written_at_s.view <= limit_s) & (self._latest_accesses.view >= 0))

    # --- changing ---------------------------------------------------------------------------------

    def adopt(self, row_fields: Sequence[pa.Field]) -> None:
        """Set the columns of rows, when the first rows come after keys that had none."""
        self.row_fields = tuple(row_fields)
        self._columns = [GrowingColumn(field.type) for field in row_fields]

    def put(
        self, keys: Keys, hashes: Numbers, columns: Sequence[pa.Array], counts: Numbers, written_s: Numbers
    ) -> Numbers:
        """Add an entry per key, with the next `counts` of the rows, and return the entries' numbers. Older entries of the keys are removed."""
        for column, array in zip(self._columns, columns, strict=True):
            column.check_room(array)  # check all columns before the first one changes
        first = len(self)
        older = self.find(keys, hashes)
        self.remove(np.unique(older[older >= 0]))
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
        self._latest_accesses.append(
            np.zeros(len(hashes), np.int64)
        )  # below zero means removed: valid until the first access is recorded
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
        """(rows, where a key without any counts as one; bytes) of each entry."""
        return np.maximum(self._counts.view[entries], 1), self._bytes.view[entries]

    def remove(self, entries: Numbers) -> None:
        """Remove live entries, each of them named once."""
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
        """Make more slots, enough for the live entries and `more`."""
        alive = np.flatnonzero(self._latest_accesses.view >= 0)
        slots = Slots(2 * (len(alive) + more))
        slots.place(self._hashes.view[alive], alive)
        self._slots = slots

    def compact(self) -> tuple[Entries, Numbers]:
        """The live entries alone, in the same order; and for each old number the new one (-1: removed)."""
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
