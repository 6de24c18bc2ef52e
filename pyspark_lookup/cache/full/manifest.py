"""What a host knows of a table's snapshots: one record, replaced whole by whoever holds the table's lock."""

from __future__ import annotations

import dataclasses
from typing import Any

from pyspark_lookup.base.decoding import count_of, counts_of, name_of, number_of, text_of
from pyspark_lookup.cache.full.loader import StoredLayer


@dataclasses.dataclass(frozen=True)
class StoredVersion:
    """A version as layers on disk. `superseded_at_s`: since when a newer one is the latest (None: it is)."""

    digest: str
    layers: tuple[StoredLayer, ...]
    rows: int
    bytes: int
    superseded_at_s: float | None = None


@dataclasses.dataclass(frozen=True)
class State:
    """The versions held (the latest last), and how the loads went. Times in Unix seconds.

    `started_at_s`, `finished_at_s`: of the latest attempt. `loaded_at_s` (also `loaded_steady_s` on the
    clock of `boot`): start of the latest load that succeeded; the versions are as old as that.
    `failures`: attempts that failed since. `gone`: the path holds another kind of table by now. `left`: segments that could not
    be removed, being in use.
    """

    versions: tuple[StoredVersion, ...] = ()
    first_started_at_s: float | None = None
    started_at_s: float | None = None
    finished_at_s: float | None = None
    loaded_at_s: float | None = None
    loaded_steady_s: float = 0.0
    boot: str = ""
    failures: int = 0
    error: str = ""
    gone: bool = False
    left: tuple[str, ...] = ()

    @property
    def latest(self) -> StoredVersion | None:
        return self.versions[-1] if self.versions else None

    def find(self, digest: str) -> StoredVersion | None:
        """The version of that digest."""
        return next((version for version in self.versions if version.digest == digest), None)

    def age_s(self, wall_s: float, steady_s: float, boot: str) -> float:
        """How old the latest version may be, by the clock that says more."""
        if self.loaded_at_s is None:
            return float("inf")
        steady = steady_s - self.loaded_steady_s if boot == self.boot else 0.0
        return max(wall_s - self.loaded_at_s, steady)

    def with_version(self, stored: StoredVersion, now_s: float) -> State:
        """The state in which `stored` is the latest, in place of one of the same digest if there is one."""
        others = [
            version if version.superseded_at_s is not None else dataclasses.replace(version, superseded_at_s=now_s)
            for version in self.versions
            if version.digest != stored.digest
        ]
        return dataclasses.replace(self, versions=(*others, dataclasses.replace(stored, superseded_at_s=None)))

    def expired(self, now_s: float, retain_s: float) -> tuple[StoredVersion, ...]:
        """Superseded versions that were retained long enough; all that seem to be from a future, too."""
        return tuple(
            version
            for version in self.versions[:-1]
            if version.superseded_at_s is None or abs(now_s - version.superseded_at_s) > retain_s
        )

    def to_json(self) -> dict[str, Any]:
        """The state as a record."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, record: Any) -> State:
        """The state that a record holds. Raises one of `decoding.UNREADABLE` if it is none of ours."""
        versions = tuple(map(_version_of, record["versions"]))
        left, times = tuple(map(name_of, record["left"])), {name: _time_of(record[name]) for name in _TIMES}
        return cls(
            versions,
            loaded_steady_s=number_of(record["loaded_steady_s"]),
            boot=text_of(record["boot"]),
            failures=count_of(record["failures"]),
            error=text_of(record["error"]),
            gone=record["gone"] is True,
            left=left,
            **times,
        )


_TIMES = ("first_started_at_s", "started_at_s", "finished_at_s", "loaded_at_s")


def _time_of(found: Any) -> float | None:
    return None if found is None else number_of(found)


def _version_of(row: Any) -> StoredVersion:
    layers = tuple(map(_layer_of, row["layers"]))
    if not layers:
        raise ValueError("a version has layers")
    return StoredVersion(
        name_of(row["digest"]),
        layers,
        count_of(row["rows"]),
        count_of(row["bytes"]),
        _time_of(row["superseded_at_s"]),
    )


def _layer_of(found: Any) -> StoredLayer:
    deleted = None if found["deleted"] is None else name_of(found["deleted"])
    return StoredLayer(name_of(found["name"]), deleted, counts_of(found["gone"]), text_of(found["marked"]))
