"""Arrays computed from the rows of a snapshot, such as an index of ranges. They are stored in segments beside the snapshot's layers.

One process of the host computes the arrays, under a lock. The other processes wait, and then map the segment. A segment is named after the
layers from which it was computed (`store.name_derived`), so it is never out of date. It is removed together with these layers (`StoredSnapshots.write`), or
earlier if others need the room and nobody has it mapped: its bytes count in the budget of the cache directory. A missing or damaged segment is computed again. If a segment cannot be written, each
process computes the arrays for itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from pyspark_lookup.columnar.keys import Numbers
from pyspark_lookup.core.decoding import UNREADABLE
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import Disk, OpenSegment

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Derived:
    """The arrays of one segment, by name. `meta`: other facts about the arrays, as JSON values."""

    meta: Mapping[str, Any]
    arrays: Mapping[str, Numbers]


@dataclasses.dataclass(frozen=True)
class DerivedArrays:
    """The arrays that are stored for the snapshots of one table. `key`: the key of the table on the disk. `wait_s`: how long to wait for another
    process that computes the same arrays."""

    key: str
    disk: Disk
    context: HostContext
    wait_s: float

    def get(self, name: str, compute: Callable[[], Derived], parse: Callable[[Derived], T]) -> T:
        """What `parse` returns for the arrays with this name. If no process of this host has stored them yet, `compute` makes them.

        `parse` raises one of `UNREADABLE` for arrays that are not of the expected form. Then they are computed again.
        """
        stored = self._find(name, parse)
        if stored is not None:
            return stored
        lock = None
        with contextlib.suppress(OSError):
            # A process that was suspended while it computes keeps its lock. After the wait, this process computes the same arrays.
            lock = self.disk.acquire("derive", f"{self.key}-{name}", self.wait_s)
        try:
            stored = self._find(name, parse)  # another process may have stored them meanwhile
            if stored is not None:
                return stored
            derived = compute()
            self.context.metrics.inc("derivedBuildCount")
            self._store(name, derived)
        finally:
            if lock is not None:
                lock.release()
        stored = self._find(name, parse)  # this process now maps the segment, and frees its own copy of the arrays
        return parse(derived) if stored is None else stored

    def _find(self, name: str, parse: Callable[[Derived], T]) -> T | None:
        opened = self.disk.open_segment(self.key, name)
        if opened is None:
            return None
        try:
            return parse(_read(opened))
        except UNREADABLE:
            self.disk.discard_segment(self.key, name)
            return None

    def _store(self, name: str, derived: Derived) -> None:
        kinds = {part: array.dtype.str for part, array in derived.arrays.items()}
        try:
            writer = self.disk.create_segment({part: array.nbytes for part, array in derived.arrays.items()})
            with contextlib.closing(writer):
                for part, array in derived.arrays.items():
                    writer.append(part, np.ascontiguousarray(array))
                writer.finish({"kinds": kinds, "derived": derived.meta})
                self.disk.publish_segment(self.key, name, writer)
        except OSError:  # the budget may have no room
            self.context.metrics.inc("cacheFailureCount")


def _read(opened: OpenSegment) -> Derived:
    arrays = {}
    for part, text in opened.meta["kinds"].items():
        region, kind = opened.regions[part], np.dtype(text)
        arrays[part] = np.frombuffer(region, kind, len(region) // kind.itemsize)
    return Derived(opened.meta["derived"], arrays)
