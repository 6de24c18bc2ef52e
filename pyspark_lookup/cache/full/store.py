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

from pyspark_lookup.cache.full.loader import StoredLayer, open_layers
from pyspark_lookup.cache.full.manifest import State, StoredVersion
from pyspark_lookup.cache.full.snapshot import Snapshot
from pyspark_lookup.io.context import HostContext
from pyspark_lookup.io.disk import Disk
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.table.model import Table, TableVersion

_LOCK_WAIT_S = 1.0
_KEPT_OPEN = 2


class StoredSnapshots:
    """The snapshots of a table under a key. `retained_s`: how long one is kept when there is a newer one.

    `known`: a version by its digest, if this host knows it otherwise.
    """

    def __init__(
        self,
        key: str,
        table: Table,
        disk: Disk,
        context: HostContext,
        retained_s: float,
        known: Callable[[str], TableVersion | None],
    ) -> None:
        self._key = key
        self._table = table
        self._disk = disk
        self._context = context
        self._retained_s = retained_s
        self._known = known
        self._mutex = threading.Lock()
        self._open: dict[str, tuple[tuple[StoredLayer, ...], Snapshot]] = {}
        self._versions: weakref.WeakKeyDictionary[Snapshot, TableVersion] = weakref.WeakKeyDictionary()

    # --- what there is ----------------------------------------------------------------------------

    def state(self) -> State:
        """What is on this host."""
        return self._disk.get_record("snapshot", self._key, State.from_json) or State()

    def seen(
        self, choose: Callable[[State], StoredVersion | None], version: TableVersion | None = None
    ) -> tuple[State, Snapshot | None]:
        """The state, and the snapshot that is chosen from it; of `version`, if the caller knows."""
        while True:
            state = self.state()
            stored = choose(state)
            snapshot = self.opened(stored, version)
            # Between reading of its layers and opening them they may have been compacted.
            if snapshot is not None or stored is None or choose(self.state()) == stored:
                return state, snapshot

    def expired(self, state: State) -> tuple[StoredVersion, ...]:
        """The versions past their time."""
        return state.expired(self._context.clock.wall_s(), self._retained_s)

    def opened(self, stored: StoredVersion | None, version: TableVersion | None = None) -> Snapshot | None:
        """A stored version, mapped; None if it is damaged or gone. `version`: which one it is, if the caller knows."""
        held = self._held(stored)
        if stored is None or held is not None:
            return held
        # What `lookup.partition` leaves out is part of what the version is, and of what types its columns have.
        found = self._disk.get_record("snapshot", self._beside(stored.digest), self._version_in)
        lost = found is None or found.digest != stored.digest
        if lost:
            found = version or self._known(stored.digest)
        snapshot = self.mapped(stored) if found is not None and found.digest == stored.digest else None
        if snapshot is not None and found is not None:
            self._remember(stored, snapshot, found)
            if lost:
                self.keep_version(snapshot)
        return snapshot

    def mapped(self, stored: StoredVersion | None) -> Snapshot | None:
        """The layers of a stored version, whatever is known of it; None if they are damaged or gone."""
        if stored is None:
            return None
        return self._held(stored) or open_layers(self._disk, self._key, stored.layers)

    def _held(self, stored: StoredVersion | None) -> Snapshot | None:
        with self._mutex:
            layers, snapshot = self._open.get(stored.digest, ((), None)) if stored is not None else ((), None)
        return snapshot if stored is not None and layers == stored.layers else None

    def keep_version(self, snapshot: Snapshot) -> None:
        """See to it that a snapshot's version is on record, as one that is in use."""
        version = self.version_of(snapshot)
        place = self._beside(version.digest)
        if self._disk.get_record("snapshot", place, self._version_in) is None:
            with contextlib.suppress(OSError):
                self._disk.replace_record("snapshot", place, version.to_json())

    def _version_in(self, found: Any) -> TableVersion:
        return TableVersion.from_json(self._table.id, found)

    def version_of(self, snapshot: Snapshot) -> TableVersion:
        """The version that a snapshot holds."""
        with self._mutex:
            return self._versions[snapshot]

    def _remember(self, stored: StoredVersion, snapshot: Snapshot, version: TableVersion) -> None:
        with self._mutex:
            self._open.pop(stored.digest, None)
            self._open[stored.digest] = stored.layers, snapshot
            self._versions[snapshot] = version
            while len(self._open) > _KEPT_OPEN:  # the oldest; who reads from it keeps it mapped
                del self._open[next(iter(self._open))]
        self._context.metrics.set_gauge("numCachedRecords", snapshot.rows)
        self._context.metrics.set_gauge("numCachedBytes", snapshot.bytes)

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

    def add(self, version: TableVersion, layers: tuple[StoredLayer, ...]) -> tuple[Snapshot, StoredVersion]:
        """A version as those layers, which are on disk, mapped.

        Raises OSError if they cannot be.
        """
        snapshot = open_layers(self._disk, self._key, layers)
        if snapshot is None:
            url = redact("path", self._table.url)
            raise OSError(f"the snapshot of {url} cannot be opened again: is the cache directory whole?")
        self._disk.replace_record("snapshot", self._beside(version.digest), version.to_json())
        stored = StoredVersion(version.digest, layers, snapshot.rows, snapshot.bytes)
        self._remember(stored, snapshot, version)
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
        used = {name for version in versions for layer in version.layers for name in (layer.name, layer.deleted)}
        names = [name for name in self._disk.segments(self._key) if name not in used]
        left = tuple(name for name in names if not self._disk.remove_segment(self._key, name))
        if left != state.left:
            self.record(dataclasses.replace(state, left=left))

    def _beside(self, digest: str) -> str:
        return f"{self._key}-{digest}"
