"""Open addressing over numpy: from a hash to the number of an entry, for a whole batch at a time.

An entry is in the first slot that was free, from the one that its hash names. A removed entry leaves a mark, unless an empty
slot follows, so that entries beyond it are still found. A hash only leads to candidates: the caller compares the keys.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pyspark_lookup.cache.memory.growing import GrowingNumbers
from pyspark_lookup.columnar.keys import Numbers

EqualKeys = Callable[[Numbers, Numbers], Numbers]
"""(entries, rows of the batch) -> whether each entry has the key of the row beside it."""

_EMPTY = 0  # slots hold an entry's number + 1
_REMOVED = -1
_FILL_AT_MOST = 0.4


class Slots:
    """Slots for up to `room` entries, which are numbered from 0."""

    def __init__(self, room: int) -> None:
        bits = max(int(room / _FILL_AT_MOST), 1024).bit_length()
        self._slots = np.empty(1 << bits, np.int32)
        self._slots.fill(_EMPTY)
        self._mask = (1 << bits) - 1
        self._shift = np.uint64(64 - bits)
        self._places = GrowingNumbers(np.int64)  # the slot of each entry
        self._occupied = 0  # slots that are not empty, at most

    def has_room(self, count: int) -> bool:
        """Whether `count` more entries leave enough slots empty."""
        return self._occupied + count <= _FILL_AT_MOST * len(self._slots)

    def find(self, hashes: Numbers, equal_keys: EqualKeys) -> Numbers:
        """The entry of each row's key, -1 where there is none."""
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
            slot_values[hits] = _EMPTY  # found: the next line drops it
            on = np.flatnonzero(slot_values != _EMPTY)
            pending_rows, at = pending_rows[on], (at[on] + 1) & self._mask
        return row_entries

    def place(self, hashes: Numbers, entries: Numbers, equal_keys: EqualKeys | None = None) -> Numbers:
        """Put `entries` (ascending), whose keys are in no slot yet, into slots. Returns those that were left out.

        Of several with one key, as `equal_keys` says (None: all differ), the last is placed.
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
                if equal_keys is not None:  # rows of one key always come to the same slot at the same time
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
