"""Open addressing over numpy: from a hash to the number of an entry, for a whole batch at a time.

An entry lies in the first free slot from the one that its hash names. A removed entry leaves a mark
behind unless an empty slot follows, so that those beyond it are still found. Whether two keys are one
is for the caller to say: a hash only leads to candidates.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pyspark_lookup.cache.memory.growing import GrowingNumbers
from pyspark_lookup.columnar.keys import Numbers

Same = Callable[[Numbers, Numbers], Numbers]
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
        self._places = GrowingNumbers(np.int64)  # of each entry its slot
        self._taken = 0  # slots that are not empty, at most

    def has_room_for(self, count: int) -> bool:
        """Whether so many more entries leave enough slots empty."""
        return self._taken + count <= _FILL_AT_MOST * len(self._slots)

    def find(self, hashes: Numbers, same: Same) -> Numbers:
        """The entry of each row's key, -1 where there is none."""
        found = np.full(len(hashes), -1, np.int64)
        at = (hashes >> self._shift).view(np.int64)
        left = np.arange(len(hashes))
        while len(left):
            held = self._slots[at]
            there = np.flatnonzero(held > 0)
            entries = held[there].astype(np.int64) - 1
            equal = same(entries, left[there])
            hits = there[equal]
            found[left[hits]] = entries[equal]
            held[hits] = _EMPTY  # found: nothing to go on with
            on = np.flatnonzero(held != _EMPTY)
            left, at = left[on], (at[on] + 1) & self._mask
        return found

    def place(self, hashes: Numbers, entries: Numbers, same: Same | None = None) -> Numbers:
        """Place `entries` (ascending), whose keys are not there; those that were left out.

        Of several with one key, as `same` says (None: all differ), the last is placed.
        """
        if len(entries):
            self._places.append(np.full(max(int(entries[-1]) + 1 - len(self._places), 0), -1, np.int64))
        places = self._places.view
        at = (hashes >> self._shift).view(np.int64)
        mine = entries
        rows = np.arange(len(entries))
        double: list[Numbers] = []
        while len(at):
            free = self._slots[at] <= _EMPTY
            wanted, takers = (at, mine) if free.all() else (at[free], mine[free])
            # Of several that want one slot the last to be written gets it.
            self._slots[wanted] = takers + 1
            winners = self._slots[wanted].astype(np.int64) - 1
            won = winners == takers
            if won.all():
                places[takers] = wanted
                on = np.flatnonzero(~free)
            else:
                places[takers[won]] = wanted[won]
                lost = np.flatnonzero(free)[~won]
                left = ~free
                left[lost] = True
                if same is not None:  # rows of one key always come to the same slot at the same time
                    twice = lost[same(winners[~won], rows[lost])]
                    double.append(mine[twice])
                    left[twice] = False
                on = np.flatnonzero(left)
            rows, mine, at = rows[on], mine[on], (at[on] + 1) & self._mask
        self._taken += len(entries)
        return np.concatenate(double) if double else np.zeros(0, np.int64)

    def remove(self, entries: Numbers) -> None:
        """Empty the slots of these entries."""
        at = self._places.view[entries]
        at = at[at >= 0]
        followed = self._slots[(at + 1) & self._mask] != _EMPTY
        self._slots[at] = np.where(followed, _REMOVED, _EMPTY)
        self._taken -= len(at) - int(np.count_nonzero(followed))
