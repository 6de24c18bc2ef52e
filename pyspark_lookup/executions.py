"""Which version an execution reads: on record in the host's cache directory, for all its tasks and processes here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from pyspark_lookup.clock import HostClock
from pyspark_lookup.disk import Disk, key_of
from pyspark_lookup.hostversions import HostVersions
from pyspark_lookup.metrics import CacheMetricGroup
from pyspark_lookup.plain import name_of, number_of, text_of
from pyspark_lookup.table import Table, TableVersion

__all__ = ["Execution", "Executions", "Resolution"]


@dataclasses.dataclass(frozen=True)
class Execution:
    """What must see one version: a Spark execution, or a stream's micro-batch, of one application.

    Inside a `foreachBatch` function a micro-batch has several actions. What was planned there, at `planned_at_s` (Unix time),
    after an `action` of it had its version, is a query of its own: it may read back what that function has written.
    """

    application: str
    id: str
    action: str = ""
    planned_at_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Resolution:
    """A version, and whether this call decided it (False: an earlier resolver's record did)."""

    version: TableVersion
    decided_here: bool


class _Decided(NamedTuple):
    """What is on record of an execution: its version's digest, the action that resolved it, and when (Unix time)."""

    digest: str
    action: str
    at_s: float


class Executions:
    """The versions of executions on this host. The first of an execution to resolve one decides, by exclusive create."""

    def __init__(self, host: HostVersions, disk: Disk, metrics: CacheMetricGroup, clock: HostClock) -> None:
        self._host = host
        self._disk = disk
        self._metrics = metrics
        self._clock = clock

    def resolve(self, table: Table, execution: Execution, current: Callable[[], TableVersion]) -> Resolution:
        """The version on record of an execution; else the `current` one, which is put there."""
        recorded = self._recorded(table, self._key(table, execution))
        if recorded is None:
            with self._host.locked("resolve", self._key(table, execution)):
                key = self._key(table, execution)
                recorded = self._recorded(table, key)
                if recorded is None:
                    return self._record(table, key, current(), execution)
        self._metrics.inc("resolutionReuseCount")
        return Resolution(recorded, False)

    def replace(self, table: Table, execution: Execution, gone: str, newer: Callable[[], TableVersion]) -> TableVersion:
        """The version that is on record in place of that of digest `gone`; else a `newer` one, which is put there."""
        key = self._key(table, execution)
        recorded = self._recorded(table, key)
        if recorded is not None and recorded.digest != gone:
            return recorded  # another task noticed first
        version = newer()
        self._host.remember(table, version)
        decided = self._decided(version, execution)
        self._host.attempt(lambda disk: disk.replace_record("execution", key, decided))
        return version

    def _key(self, table: Table, execution: Execution) -> str:
        """What an execution's version is on record under: its own, or that of one action of it."""
        key = key_of(execution.application, execution.id, table.id)
        if execution.planned_at_s is None:
            return key
        first = self._disk.get_record("execution", key, _decided_of)
        if first is None or first.action == execution.action or execution.planned_at_s <= first.at_s:
            return key
        return key_of(execution.application, execution.id, execution.action, table.id)

    def _record(self, table: Table, key: str, version: TableVersion, execution: Execution) -> Resolution:
        """Make `version` the execution's, unless the lock was not had in time and another was first."""
        try:
            self._host.remember(table, version)  # before its digest: who sees the digest finds the files
            decided = self._decided(version, execution)
            winner = self._disk.create_record("execution", key, decided, _decided_of).digest
        except OSError:
            self._metrics.inc("cacheFailureCount")
            return Resolution(version, True)
        taken = self._host.files(table, winner) if winner != version.digest else None
        return Resolution(taken or version, taken is None)

    def _decided(self, version: TableVersion, execution: Execution) -> list[Any]:
        return [version.digest, execution.action, self._clock.wall_s()]

    def _recorded(self, table: Table, key: str) -> TableVersion | None:
        decided = self._disk.get_record("execution", key, _decided_of)
        return None if decided is None else self._host.files(table, decided.digest)


def _decided_of(found: Any) -> _Decided:
    digest, action, at_s = found
    return _Decided(name_of(digest), text_of(action), number_of(at_s))
