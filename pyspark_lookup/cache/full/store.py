"""`StoredSnapshots`: one table's snapshots on this host's disk, and those that this process has mapped.

The record of what there is is replaced whole by whoever holds the table's lock; readers take none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from pyspark_lookup.base.clock import HostClock
from pyspark_lookup.base.metrics import CacheMetricGroup
from pyspark_lookup.cache.full.loader import StoredLayer, open_layers
from pyspark_lookup.cache.full.manifest import State, StoredVersion
from pyspark_lookup.cache.full.snapshot import Snapshot
from pyspark_lookup.io.disk import Disk
from pyspark_lookup.io.stores import HIDDEN
from pyspark_lookup.io.ufs import FileVersion
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.table.model import Table, TableVersion

__all__ = ["StoredSnapshots"]

_LOCK_WAIT_S = 1.0
_KEPT_OPEN = 2


class StoredSnapshots:
    """The snapshots of a table under a key. `retained_s`: how long one is kept when there is a newer one."""

    def __init__(
        self, key: str, table: Table, disk: Disk, metrics: CacheMetricGroup, clock: HostClock, retained_s: float
    ) -> None:
        self._key = key
        self._table = table
        self._disk = disk
        self._metrics = metrics
        self._clock = clock
        self._retained_s = retained_s
        self._mutex = threading.Lock()
        self._open: dict[str, tuple[tuple[StoredLayer, ...], Snapshot]] = {}
        self._versions: weakref.WeakKeyDictionary[Snapshot, TableVersion] = weakref.WeakKeyDictionary()
        self._stored_as: weakref.WeakKeyDictionary[Snapshot, StoredVersion] = weakref.WeakKeyDictionary()

    # --- what there is ----------------------------------------------------------------------------

    def state(self) -> State:
        """What is on this host."""
        return self._disk.get_record("snapshot", self._key, State.of_json) or State()

    def seen(self, choose: Callable[[State], StoredVersion | None]) -> tuple[State, Snapshot | None]:
        """The state, and the snapshot that is chosen from it."""
        while True:
            state = self.state()
            stored = choose(state)
            snapshot = self.opened(stored)
            # Between reading of its layers and opening them they may have been folded.
            if snapshot is not None or stored is None or choose(self.state()) == stored:
                return state, snapshot

    def expired(self, state: State) -> tuple[StoredVersion, ...]:
        """The versions past their time."""
        return state.expired(self._clock.wall_s(), self._retained_s)

    def opened(self, stored: StoredVersion | None) -> Snapshot | None:
        """A stored version, mapped; None if it is damaged or gone."""
        if stored is None:
            return None
        with self._mutex:
            held = self._open.get(stored.digest)
        if held is not None and held[0] == stored.layers:
            return held[1]
        snapshot = open_layers(self._disk, self._key, stored.layers)
        if snapshot is not None:
            self._remember(stored, snapshot)
        return snapshot

    def version_of(self, snapshot: Snapshot) -> TableVersion:
        """The version that a snapshot holds."""
        with self._mutex:
            known = self._versions.get(snapshot)
        if known is None:
            known = self._version_in(snapshot)
            with self._mutex:
                self._versions[snapshot] = known
        return known

    def _version_in(self, snapshot: Snapshot) -> TableVersion:
        with self._mutex:
            stored = self._stored_as[snapshot]
        marks = tuple(FileVersion(url, size, HIDDEN) for url, size in stored.marks)
        files = [
            FileVersion(file.url, file.size, file.identity, file.modified_at_s, hidden=marks)
            for layer in snapshot.layers
            for file, rank in zip(layer.segment.files, layer.ranks.tolist(), strict=True)
            if rank >= 0
        ]
        # What `lookup.partition` leaves out is part of what the version is, and of what types its columns have.
        files += self._disk.get_record("snapshot", self._beside(stored.digest), _files_of) or ()
        return TableVersion(self._table.id, tuple(sorted(files, key=lambda file: file.url)), stored.log)

    def _remember(self, stored: StoredVersion, snapshot: Snapshot) -> None:
        with self._mutex:
            self._open.pop(stored.digest, None)
            self._open[stored.digest] = stored.layers, snapshot
            self._stored_as[snapshot] = stored
            while len(self._open) > _KEPT_OPEN:  # the oldest; who reads from it keeps it mapped
                del self._open[next(iter(self._open))]
        self._metrics.set_gauge("numCachedRecords", snapshot.rows)
        self._metrics.set_gauge("numCachedBytes", snapshot.bytes)

    def forget(self) -> None:
        """Let go of what is mapped; what is on disk stays."""
        with self._mutex:
            self._open.clear()

    # --- changes: the lock is held ----------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the table's lock of this host, however long it takes."""
        lock = None
        while lock is None:
            lock = self._disk.acquire("reload", self._key, _LOCK_WAIT_S)
        try:
            yield
        finally:
            lock.release()

    def add(
        self, version: TableVersion, chosen: TableVersion, layers: tuple[StoredLayer, ...]
    ) -> tuple[Snapshot, StoredVersion]:
        """A version as those layers, which have the rows of the `chosen` files and are on disk, mapped.

        Raises OSError if they cannot be.
        """
        snapshot = open_layers(self._disk, self._key, layers)
        if snapshot is None:
            url = redact("path", self._table.url)
            raise OSError(f"the snapshot of {url} cannot be opened again: is the cache directory whole?")
        marks = tuple((mark.url, mark.size) for mark in version.hidden)
        if chosen is not version:
            kept = {file.url for file in chosen.files}
            others = [file.plain() for file in version.files if file.url not in kept]
            self._disk.replace_record("snapshot", self._beside(version.digest), others)
        stored = StoredVersion(version.digest, layers, snapshot.rows, snapshot.bytes, None, version.log, marks)
        self._remember(stored, snapshot)
        return snapshot, stored

    def record(self, state: State) -> None:
        """Have that be what is on this host."""
        self._disk.replace_record("snapshot", self._key, state.to_json())

    def write(self, state: State) -> None:
        """Record a state without versions past their time, then remove their segments."""
        expired = self.expired(state)
        versions = tuple(version for version in state.versions if version not in expired)
        state = dataclasses.replace(state, versions=versions)
        self.record(state)
        with self._mutex:
            for version in expired:
                self._open.pop(version.digest, None)
                self._disk.remove_record("snapshot", self._beside(version.digest))
        used = {name for version in versions for layer in version.layers for name in (layer.name, layer.hidden)}
        names = [name for name in self._disk.segments(self._key) if name not in used]
        left = tuple(name for name in names if not self._disk.remove_segment(self._key, name))
        if left != state.left:
            self.record(dataclasses.replace(state, left=left))

    def _beside(self, digest: str) -> str:
        return f"{self._key}-{digest}"


def _files_of(found: Any) -> tuple[FileVersion, ...]:
    return tuple(map(FileVersion.of_plain, found))
