"""`StoredSnapshots`: the snapshots of one table on this host's disk, and those that this process has mapped into memory.

One record, a `State`, lists the snapshots. Only a process with the table's lock replaces this record, always as a whole. So readers take no
lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pyspark_lookup.cache.full.loader import StoredLayer, name_layers, open_layers
from pyspark_lookup.cache.full.snapshot import Snapshot
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.decoding import as_count, as_counts, as_name, as_number, as_text, as_texts
from pyspark_lookup.core.threads import check
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import DERIVED, Disk
from pyspark_lookup.versions.model import Table, TableVersion, has_same_rows

_LOCK_WAIT_S = 1.0
_SIGN_EVERY_S = 10.0
_KEPT_OPEN = 2
_KNOWN_AT_MOST = 256


@dataclasses.dataclass(frozen=True)
class StoredVersion:
    """A version whose snapshot is on disk, in `layers`. `superseded_at_s`: since when there is a newer one (None: this is the latest)."""

    digest: str
    layers: tuple[StoredLayer, ...]
    rows: int
    bytes: int
    superseded_at_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Refused:
    """A build of a snapshot for which the cache directory had no room: when (Unix time) and why.

    `wanted`: about how many bytes the snapshot needs. `of_bytes`: the size of its data files.
    """

    at_s: float
    reason: str
    wanted: int
    of_bytes: int


@dataclasses.dataclass(frozen=True)
class State:
    """What a host knows of a table's snapshots: the stored versions, the latest one last, and how the loads ended. Times are Unix seconds.

    `first_started_at_s`: when the first load began. `started_at_s`, `finished_at_s`: when the latest load that has ended began and ended, even
    if it failed. `finished_steady_s`: its end on the steady clock of the machine start that `finished_boot` names. `loaded_at_s`: when the
    latest successful load began, from which the age of the latest version counts. `loaded_steady_s`: the same on the steady clock of `boot`.
    `failures`: how many loads have failed since. `error`: the error of the last one. `loading_since_s`: when a load began that has not ended;
    its process may have died. `gone`: there is a table of another kind at the path now. `left`: segments that could not be removed, because
    they were in use. `refused`: set if the cache directory's budget had no room for the latest load. `known`: the digests of the
    latest versions, also of those that are no longer stored.
    """

    versions: tuple[StoredVersion, ...] = ()
    first_started_at_s: float | None = None
    started_at_s: float | None = None
    finished_at_s: float | None = None
    finished_steady_s: float = 0.0
    finished_boot: str = ""
    loaded_at_s: float | None = None
    loaded_steady_s: float = 0.0
    boot: str = ""
    failures: int = 0
    error: str = ""
    gone: bool = False
    left: tuple[str, ...] = ()
    loading_since_s: float | None = None
    refused: Refused | None = None
    known: tuple[str, ...] = ()

    @property
    def latest(self) -> StoredVersion | None:
        return self.versions[-1] if self.versions else None

    def find(self, digest: str) -> StoredVersion | None:
        return next((version for version in self.versions if version.digest == digest), None)

    def age_s(self, wall_s: float, steady_s: float, boot: str) -> float:
        """The age of the latest version in seconds: the larger one of its ages by the wall clock and by the steady clock."""
        if self.loaded_at_s is None:
            return float("inf")
        steady = steady_s - self.loaded_steady_s if boot == self.boot else 0.0
        return max(wall_s - self.loaded_at_s, steady)

    def ended(self, clock: HostClock) -> State:
        """The state after a load that ends now."""
        return dataclasses.replace(
            self, finished_at_s=clock.wall_s(), finished_steady_s=clock.steady_s(), finished_boot=clock.boot
        )

    def with_version(self, stored: StoredVersion, now_s: float) -> State:
        """This state with `stored` as the latest version. If the state has a version with the same digest, `stored` replaces it."""
        older_versions = [
            version if version.superseded_at_s is not None else dataclasses.replace(version, superseded_at_s=now_s)
            for version in self.versions
            if version.digest != stored.digest
        ]
        versions = (*older_versions, dataclasses.replace(stored, superseded_at_s=None))
        known = tuple(digest for digest in self.known if digest != stored.digest)
        return dataclasses.replace(self, versions=versions, known=(*known, stored.digest)[-_KNOWN_AT_MOST:])

    def find_expired(self, now_s: float, retain_s: float) -> tuple[StoredVersion, ...]:
        """The versions superseded more than `retain_s` ago, or, because the clock was set back since, more than that in the future."""
        return tuple(
            version
            for version in self.versions[:-1]
            if version.superseded_at_s is None or abs(now_s - version.superseded_at_s) > retain_s
        )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, record: Any) -> State:
        """The state that `to_json` returned. Raises one of `decoding.UNREADABLE` for any other value."""
        versions = tuple(map(_parse_version, record["versions"]))
        unremoved, times = tuple(map(as_name, record["left"])), {name: _parse_time(record[name]) for name in _TIMES}
        return cls(
            versions,
            finished_steady_s=as_number(record["finished_steady_s"]),
            finished_boot=as_text(record["finished_boot"]),
            loaded_steady_s=as_number(record["loaded_steady_s"]),
            boot=as_text(record["boot"]),
            failures=as_count(record["failures"]),
            error=as_text(record["error"]),
            gone=record["gone"] is True,
            left=unremoved,
            refused=None if record["refused"] is None else _parse_refusal(record["refused"]),
            known=as_texts(record.get("known", ())),
            **times,
        )


def _segment_names(version: StoredVersion) -> set[str]:
    """The names of the segments in which a version is stored."""
    return {name for layer in version.layers for name in (layer.name, layer.deleted) if name is not None}


def name_derived(what: str, layers: str) -> str:
    """The name of the segment that has what was computed from some layers. `what`: names the computation. `layers`: names the layers, as
    `Snapshot.base_name` or `.layers_name` does."""
    return f"{DERIVED}{what}-{layers}"


def layers_of(name: str) -> str | None:
    """The text `layers` that `name_derived` put into the name of a segment; None for the name of any other segment."""
    return name.rsplit("-", 1)[1] if name.startswith(DERIVED) else None


def _names_of(versions: Sequence[StoredVersion], names: Sequence[str]) -> set[str]:
    """The names of the segments that `versions` need, and those of the `names` that belong to segments computed from the layers of `versions`."""
    layers = {name for version in versions for name in (version.layers[0].name, name_layers(version.layers))}
    derived = {name for name in names if layers_of(name) in layers}
    return derived.union(*map(_segment_names, versions))


_NOTHING = State()
_TIMES = ("first_started_at_s", "started_at_s", "finished_at_s", "loaded_at_s", "loading_since_s")


def _parse_time(value: Any) -> float | None:
    return None if value is None else as_number(value)


def _parse_refusal(row: Any) -> Refused:
    return Refused(as_number(row["at_s"]), as_text(row["reason"]), as_count(row["wanted"]), as_count(row["of_bytes"]))


def _parse_version(row: Any) -> StoredVersion:
    layers = tuple(map(_parse_layer, row["layers"]))
    if not layers:
        raise ValueError("a stored version has no layers")
    return StoredVersion(
        as_name(row["digest"]),
        layers,
        as_count(row["rows"]),
        as_count(row["bytes"]),
        _parse_time(row["superseded_at_s"]),
    )


def _parse_layer(record: Any) -> StoredLayer:
    deleted = None if record["deleted"] is None else as_name(record["deleted"])
    return StoredLayer(as_name(record["name"]), deleted, as_counts(record["gone"]))


@dataclasses.dataclass(eq=False, repr=False)
class StoredSnapshots:
    """The snapshots of one table, stored under `key`. `retained_s`: how long a snapshot is kept after a newer one has replaced it.

    `find_version`: returns the version with a digest from other records of this host; None if these do not have it. `recorded`: the table's
    state, None if there is none; it stays the same object while it does not change.
    """

    key: str
    table: Table
    disk: Disk
    context: HostContext
    retained_s: float
    find_version: Callable[[str], TableVersion | None]

    def __post_init__(self) -> None:
        self._mutex = threading.Lock()
        self._open: dict[str, tuple[tuple[StoredLayer, ...], Snapshot]] = {}
        self._progress_shown_s = -math.inf
        self.recorded = self.disk.hold_record("snapshot", self.key, State.from_json)

    # --- reads ------------------------------------------------------------------------------------

    def state(self) -> State:
        """The table's state on this host."""
        return self.recorded.get() or _NOTHING

    def find(
        self, choose: Callable[[State], StoredVersion | None], version: TableVersion | None = None
    ) -> tuple[State, Snapshot | None]:
        """(the state, the snapshot of the version that `choose` selects from it). `version`: this version, if the caller has it already."""
        while True:
            state = self.state()
            if state.refused is not None:
                self.forget()  # unmap the snapshots: only an unmapped one can be evicted
            stored = choose(state)
            snapshot = self.open(stored, version)
            # The race: a compaction may have removed the layers after this process read their names. Then the state has changed, too, and is
            # read again.
            if snapshot is not None or stored is None or choose(self.state()) == stored:
                return state, snapshot

    def find_same_rows(self, version: TableVersion) -> Snapshot | None:
        """The latest snapshot if only compactions lie between its version and `version`; otherwise None."""
        _, latest = self.find(lambda state: state.latest)
        return latest if latest is not None and has_same_rows(version, latest.version) else None

    def find_expired(self, state: State) -> tuple[StoredVersion, ...]:
        """The versions that were replaced by newer ones at least `retained_s` ago."""
        return state.find_expired(self.context.clock.wall_s(), self.retained_s)

    def open(self, stored: StoredVersion | None, version: TableVersion | None = None) -> Snapshot | None:
        """The snapshot of a stored version, mapped; None if it is damaged or was removed. `version`: the version, if the caller has it already."""
        mapped_snapshot = self._find_open(stored)
        if stored is None or mapped_snapshot is not None:
            return mapped_snapshot
        # The record has all files of the version, also those that `lookup.partition` leaves out, because the types of columns depend on all
        # of them.
        recorded_version = self._read_version(stored)
        known_version = recorded_version or version or self.find_version(stored.digest)
        snapshot = self.map(stored) if known_version is not None and known_version.digest == stored.digest else None
        if snapshot is not None and known_version is not None:
            self.disk.use_table(self.key)
            snapshot.version = known_version
            self._remember(stored, snapshot)
            if recorded_version is None:
                self._record_version(snapshot)
        return snapshot

    def _read_version(self, stored: StoredVersion) -> TableVersion | None:
        """The version of a stored snapshot, from the record beside the snapshot; None if the record is missing or damaged."""
        parse = functools.partial(TableVersion.from_json, self.table.id)
        version: TableVersion | None = self.disk.get_record("snapshot", self._beside(stored.digest), parse)
        return version if version is not None and version.digest == stored.digest else None

    def version(self, stored: StoredVersion) -> TableVersion | None:
        """The version of a stored snapshot; None if the snapshot is not mapped and no record of the version is left."""
        mapped_snapshot = self._find_open(stored)
        if mapped_snapshot is not None:
            return mapped_snapshot.version
        return self._read_version(stored) or self.find_version(stored.digest)

    def map(self, stored: StoredVersion | None) -> Snapshot | None:
        """The snapshot of a stored version, mapped, but without its `version`; None if its layers are damaged or were removed."""
        if stored is None:
            return None
        return self._find_open(stored) or open_layers(self.disk, self.key, stored.layers)

    def map_compatible(
        self, stored: StoredVersion | None, last_version: TableVersion | None, version: TableVersion
    ) -> Snapshot | None:
        """What `map` returns, but None if a column of the layers is a different column in `version`, although it has the same name.

        `last_version`: the version of `stored`; None: not known. Then the result is None, unless `version` has no `stored_columns`: columns are
        identified by their names.
        """
        layers = self.map(stored)
        if layers is None or not version.stored_columns:
            return layers
        if last_version is None:
            return None
        old_columns, new_columns = last_version.stored_columns, version.stored_columns
        return (
            layers
            if all(
                old_columns.get(name) == new_columns.get(name, old_columns.get(name)) for name in layers.schema.names
            )
            else None
        )

    def _find_open(self, stored: StoredVersion | None) -> Snapshot | None:
        with self._mutex:
            layers, snapshot = self._open.get(stored.digest, ((), None)) if stored is not None else ((), None)
        return snapshot if stored is not None and layers == stored.layers else None

    def keep_version(self, snapshot: Snapshot) -> None:
        """Record a snapshot's version, or mark the record of it as used."""
        if self.disk.get_record("snapshot", self._beside(snapshot.version.digest)) is None:
            self._record_version(snapshot)

    def _record_version(self, snapshot: Snapshot) -> None:
        """Write the record of a snapshot's version. It replaces a record that is damaged, or that another release wrote."""
        place = self._beside(snapshot.version.digest)
        with contextlib.suppress(OSError):
            self.disk.replace_record("snapshot", place, snapshot.version.to_json(statistics=False))

    def _remember(self, stored: StoredVersion, snapshot: Snapshot) -> None:
        with self._mutex:
            self._open.pop(stored.digest, None)
            self._open[stored.digest] = stored.layers, snapshot
            while len(self._open) > _KEPT_OPEN:  # drop the oldest snapshot; it stays mapped while a query reads it
                del self._open[next(iter(self._open))]
        self.context.metrics.set_gauge("numCachedRecords", snapshot.rows)
        self.context.metrics.set_gauge("numCachedBytes", snapshot.bytes)

    def forget(self, spared_version: StoredVersion | None = None) -> None:
        """Unmap the snapshots of all versions except `spared_version`. Files on disk stay."""
        with self._mutex:
            self._open = {
                digest: entry
                for digest, entry in self._open.items()
                if spared_version and digest == spared_version.digest
            }

    # --- changes, for callers that hold the lock --------------------------------------------------

    @contextlib.contextmanager
    def lock(self, wait_s: float = math.inf, silent_s: float = math.inf) -> Iterator[bool]:
        """Hold the table's lock on this host. Yields False if the lock could not be acquired within `wait_s`.

        Gives up earlier if the process with the lock has shown no progress for `silent_s`: a suspended process never releases its locks.
        """
        now_s = self.context.clock.steady_s
        lock, sign, until_s, silent_until_s = None, -1, now_s() + wait_s, math.inf
        while lock is None:
            check()
            left_s = max(until_s - now_s(), 0.0)
            lock = self.disk.acquire("reload", self.key, min(left_s, _LOCK_WAIT_S))
            if lock is None:
                before, sign = sign, self.disk.latest_lock_use(self.lock_path)
                if sign != before:
                    silent_until_s = now_s() + silent_s
                if left_s <= _LOCK_WAIT_S or now_s() >= silent_until_s:
                    yield False
                    return
        try:
            yield True
        finally:
            lock.release()

    @property
    def lock_path(self) -> Path:
        """The table's lock file."""
        return self.disk.lock_path("reload", self.key)

    def show_progress(self) -> None:
        """Touch the lock file, at most every 10 seconds. Processes that wait for the lock see from this that the load makes progress."""
        if abs(self.context.clock.steady_s() - self._progress_shown_s) >= _SIGN_EVERY_S:
            self._progress_shown_s = self.context.clock.steady_s()
            self.disk.use_lock(self.lock_path)

    def add(self, version: TableVersion, layers: tuple[StoredLayer, ...]) -> tuple[Snapshot, StoredVersion]:
        """Map the layers of a new version, and record the version. Returns (its snapshot, its entry for the state).

        Raises OSError if the layers cannot be opened.
        """
        snapshot = open_layers(self.disk, self.key, layers)
        if snapshot is None:
            url = redact("path", self.table.url)
            raise OSError(
                f"the snapshot of {url} cannot be opened after it was written: run `pyspark-lookup check --repair` on the cache directory, and check its disk"
            )
        self.disk.replace_record("snapshot", self._beside(version.digest), version.to_json(statistics=False))
        self.disk.use_table(self.key)
        stored = StoredVersion(version.digest, layers, snapshot.rows, snapshot.bytes)
        snapshot.version = version
        self._remember(stored, snapshot)
        return snapshot, stored

    def is_locked(self) -> bool:
        """Whether some process has the table's lock at this moment."""
        try:
            lock = self.disk.acquire("reload", self.key, 0.0)
        except OSError:
            return False
        if lock is not None:
            lock.release()
        return lock is None

    def record(self, state: State) -> None:
        """Record the table's state on this host, instead of the state recorded before."""
        self.disk.replace_record("snapshot", self.key, state.to_json())

    def write(self, state: State) -> None:
        """Record a state without the versions that have expired or lost segments. Then remove the segments that no version needs."""
        segment_names = set(self.disk.segments(self.key))
        lost_versions = [
            version for version in state.versions[:-1] if not segment_names.issuperset(_segment_names(version))
        ]
        expired = (*self.find_expired(state), *lost_versions)
        versions = tuple(version for version in state.versions if version not in expired)
        state = dataclasses.replace(state, versions=versions)
        self.record(state)
        with self._mutex:
            for version in expired:
                self._open.pop(version.digest, None)
                self.disk.remove_record("snapshot", self._beside(version.digest))
        stored_names = self.disk.segments(self.key)
        used_names = _names_of(versions, stored_names)
        names = [name for name in stored_names if name not in used_names]
        unremoved = tuple(name for name in names if not self.disk.remove_segment(self.key, name))
        if unremoved != state.left:
            self.record(dataclasses.replace(state, left=unremoved))
        latest = _names_of(versions[-1:], stored_names)
        with contextlib.suppress(OSError):  # if this fails, the segments are removed when their versions expire
            self.disk.supersede_segments(self.key, [*unremoved, *(used_names - latest)])

    def _beside(self, digest: str) -> str:
        return f"{self.key}-{digest}"
