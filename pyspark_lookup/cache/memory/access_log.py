"""The order of accesses: which entries are the least recently used, and which were not used since a time.

A batch of accesses is appended to the log as it comes. An access that is read from the old end counts only if no later one of
the same entry followed. So the order is exact, and costs no Python step per entry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from pyspark_lookup.columnar.keys import Numbers

_SLACK = 128 * 1024
_BATCHES_AT_MOST = 4096  # small ones, as of one key each


class AccessLog:
    """Accesses by number, ascending from 0, each of an entry at a time in seconds that never goes back.

    `timed`: whether to keep the times of accesses, for `find_first_later`.
    """

    def __init__(self, timed: bool) -> None:
        self._timed = timed
        self._batches: deque[tuple[Numbers, Numbers]] = deque()  # (entries, numbers of the accesses)
        self._length = 0
        self._next = 0
        self._times: deque[tuple[int, float]] = deque()  # (first access, when): those up to the next pair's

    def add(self, entries: Numbers, now_s: float) -> Numbers:
        """Accesses of these entries, in turn, now; their numbers."""
        numbers = np.arange(self._next, self._next + len(entries))
        if self._timed and (not self._times or now_s > self._times[-1][1]):
            self._times.append((self._next, now_s))
        self._next += len(entries)
        self._batches.append((entries, numbers))
        self._length += len(entries)
        return numbers

    def find_first_later(self, limit_s: float) -> int:
        """The number of the first access later than `limit_s`. Later calls must not ask about earlier times."""
        while self._times and self._times[0][1] <= limit_s:
            self._times.popleft()
        return self._times[0][0] if self._times else self._next

    def pop_earlier(self, access: int, latest: Callable[[Numbers], Numbers]) -> Numbers:
        """Remove and return the entries whose latest access, as `latest` says, was before `access`."""
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
        """Remove and return the entries used longest ago, batch by batch, until `enough` says how many of a batch will do."""
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
        """Drop accesses that no longer count, if they are more than half of the log. `live`: how many entries there are."""
        if self._length > 2 * live + _SLACK or len(self._batches) > _BATCHES_AT_MOST:
            self._rewrite(lambda entries: entries, latest)

    def renumber(self, numbers_there: Numbers, latest: Callable[[Numbers], Numbers]) -> None:
        """Give entries their new numbers (-1: removed). `latest` takes the new numbers."""
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
