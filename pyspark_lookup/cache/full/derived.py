"""Arrays that are computed from the rows of a snapshot, such as an index of ranges: stored beside its layers, and mapped by every process.

One process of the host computes them, under a lock; the others wait and then map them. A file is named after the layers that it was computed
from, so it is never out of date. It goes when they go (`StoredSnapshots.write`), and its bytes count in the budget of the cache directory.
Missing and damaged files are computed again. If they cannot be written, a process computes them for itself.
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
_PREFIX = "derived-"


@dataclasses.dataclass(frozen=True)
class Derived:
    """Arrays by name, and what else has to be known of them, as JSON values."""

    meta: Mapping[str, Any]
    arrays: Mapping[str, Numbers]


def name_derived(what: str, layers: str) -> str:
    """The name of the file with `what` was computed from the layers with the name `layers` (see `Snapshot.base_name`, `.layers_name`)."""
    return f"{_PREFIX}{what}-{layers}"


def layers_of(name: str) -> str | None:
    """The name of the layers from which a segment was computed; None for other segments."""
    return name.rsplit("-", 1)[1] if name.startswith(_PREFIX) else None


@dataclasses.dataclass(frozen=True)
class DerivedArrays:
    """The arrays beside one table's snapshots, which are stored under `key`. `wait_s`: how long to wait for another process that computes them."""

    key: str
    disk: Disk
    context: HostContext
    wait_s: float

    def get(self, name: str, compute: Callable[[], Derived], parse: Callable[[Derived], T]) -> T:
        """What `parse` makes of the arrays of that name, which `compute` returns if no process of this host has stored them yet.

        `parse` raises one of `UNREADABLE` if they are not of the expected form; then they are computed again.
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
        stored = self._find(name, parse)  # from now on this process has pages of the file in place of memory of its own
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
