"""`Executions` records, in the host's cache directory, which version of a table a Spark execution reads, so that all its tasks read this one.

`read_with_restarts` begins a read again, with a newer version, if files vanish while they are read.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from pyspark_lookup.core.decoding import as_name, as_number
from pyspark_lookup.errors import SourceChangedError, VersionGoneError, raise_ours
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import Disk, key_of
from pyspark_lookup.versions.host_versions import HostVersions
from pyspark_lookup.versions.model import Table, TableVersion

_STARTS = 5
T = TypeVar("T")


def read_again(read: Callable[[], T], *problems: type[Exception]) -> T:
    """The result of `read`. After one of the `problems`, `read` is called again, up to 5 times in all. An error with the same text as the error
    of the attempt before is raised at once.

    The race: a clean-up may remove old files of a log at any moment, also between a listing and the read of a listed file. The files that
    replace the old ones were written before, so the next attempt finds them.
    """
    before = ""
    for _ in range(_STARTS - 1):
        try:
            return read()
        except problems as problem:
            if str(problem) == before:
                raise
            before = str(problem)
    return read()


def read_with_restarts(
    table: Table,
    version: TableVersion,
    read: Callable[[TableVersion], T],
    renew: Callable[[TableVersion, SourceChangedError], TableVersion],
) -> tuple[T, TableVersion]:
    """(the result of `read` for a version, that version). If a file is gone, `renew` returns the version to read instead.

    Raises the errors of `read` and `renew`, and VersionGoneError for a table that changes during several reads in a row, or that keeps its
    versions and has nevertheless lost files.
    """
    for _ in range(_STARTS):
        try:
            return read(version), version
        except SourceChangedError as change:
            gone_version, version = version, renew(version, change)
            if table.retained and version.digest == gone_version.digest:
                redacted_path, place = redact("path", table.url), "" if version.number is None else f" {version.number}"
                if table.pinned is not None:
                    raise_ours(
                        VersionGoneError(
                            f"{redacted_path}: the requested version{place} has lost files: {change}. A clean-up (VACUUM, expire_snapshots) removes files that newer versions do not need: read a newer version"
                        ),
                        change,
                    )
                raise_ours(
                    VersionGoneError(
                        f"{redacted_path}: {change}, but the current version{place} needs this file, so it was not a clean-up by the "
                        "table's own tools: restore the file"
                    ),
                    change,
                )
    advice = table.how_to_keep_versions + ("" if table.retained else ", or set lookup.settle")
    raise VersionGoneError(f"{redact('path', table.url)} changed during each of {_STARTS} reads: {advice}")


@dataclasses.dataclass(frozen=True)
class Build:
    """The micro-batch in whose `foreachBatch` function a lookup was built, and when it was built (Unix time)."""

    stream: str
    batch: str
    at_s: float

    @property
    def execution(self) -> str:
        """The id of the execution to which all lookups belong that are built in this micro-batch."""
        return f"stream {self.stream} batch {self.batch}"


@dataclasses.dataclass(frozen=True)
class Execution:
    """A Spark execution, or a stream's micro-batch, of one application: all its tasks read one version.

    `built_at_s`: the Unix time at which a function of `foreachBatch` built the lookup or DataFrame that reads the table. The function may have
    written to the table just before, so the read needs a version that was resolved after this time. None: any version will do.
    """

    application: str
    id: str
    built_at_s: float | None = None


class Resolution(NamedTuple):
    """The version that an execution reads. `decided_here`: this call chose the version; if False, it was already on record."""

    version: TableVersion
    decided_here: bool


class _Decision(NamedTuple):
    """What is on record for an execution: the digest of the version that it reads, and when the resolution of this version began (Unix time)."""

    digest: str
    at_s: float


class Executions:
    """This host's records of the versions that executions read.

    The race: tasks of one execution ask for the current version at the same time, and may get different ones. Exclusive create lets only one
    task record its version, and all others read that version.
    """

    def __init__(
        self,
        host: HostVersions,
        disk: Disk,
        context: HostContext,
    ) -> None:
        self._host = host
        self._disk = disk
        self._context = context

    def resolve(
        self, table: Table, execution: Execution, current: Callable[[], TableVersion], one_asks: bool
    ) -> Resolution:
        """The version on record for an execution; if there is none, the version that `current` returns, which is then recorded.

        `one_asks`: only one task calls `current` at a time, and the others wait for its record.
        """
        key = self._key(table, execution)
        recorded_version = self._find_recorded(table, key)
        if recorded_version is None:
            with self._host.lock("resolve", key, one_asks):
                key = self._key(table, execution)
                recorded_version = self._find_recorded(table, key)
                if recorded_version is None:
                    # The recorded time must not be before `built_at_s`, which may come from another host's clock: otherwise the next
                    # action of the query would not accept this record, and resolve again.
                    at_s = max(self._context.clock.wall_s(), execution.built_at_s or 0.0)
                    return self._record(table, key, current(), at_s)
        self._context.metrics.inc("resolutionReuseCount")
        return Resolution(recorded_version, False)

    def replace(
        self, table: Table, execution: Execution, gone_digest: str, newer: Callable[[], TableVersion]
    ) -> TableVersion:
        """The version to read instead of the one with `gone_digest`.

        It is the version that another task has recorded for the execution since, or else the one that `newer` returns, which is then recorded.
        """
        key = self._key(table, execution)
        recorded_version = self._find_recorded(table, key)
        if recorded_version is not None and recorded_version.digest != gone_digest:
            return recorded_version  # another task was first
        decision = self._disk.get_record("execution", key, _parse_decision)
        # The record keeps its time, so that readers with the same `built_at_s` find it as they found the old one.
        at_s = self._context.clock.wall_s() if decision is None else decision.at_s
        version = newer()
        self._host.remember(table, version)
        self._host.attempt(lambda disk: disk.replace_record("execution", key, [version.digest, at_s]))
        return version

    def _key(self, table: Table, execution: Execution) -> str:
        """The key of the record that counts for an execution.

        An execution may have several records, in order. The first one whose version was resolved at `built_at_s` or later counts. If there is
        none, this is the key for the next record.
        """
        for number in itertools.count():
            key = key_of(execution.application, execution.id, table.id, number)
            decision = (
                self._disk.get_record("execution", key, _parse_decision) if execution.built_at_s is not None else None
            )
            if decision is None or execution.built_at_s is None or execution.built_at_s <= decision.at_s:
                return key
        raise AssertionError("not reached: the numbers have no end")

    def _record(self, table: Table, key: str, version: TableVersion, at_s: float) -> Resolution:
        """Record that the execution reads `version`, and return this version.

        If another task has recorded a version meanwhile, because the wait for the lock timed out, return the version of that task.
        """
        try:
            self._host.remember(table, version)  # before its digest, so that whoever sees the digest finds the files
            winner = self._disk.create_record("execution", key, [version.digest, at_s], _parse_decision).digest
        except OSError:
            self._context.metrics.inc("cacheFailureCount")
            return Resolution(version, True)
        winning_version = self._host.files(table, winner) if winner != version.digest else None
        return Resolution(winning_version or version, winning_version is None)

    def _find_recorded(self, table: Table, key: str) -> TableVersion | None:
        decision = self._disk.get_record("execution", key, _parse_decision)
        return None if decision is None else self._host.files(table, decision.digest)


def _parse_decision(record: Any) -> _Decision:
    digest, at_s = record
    return _Decision(as_name(digest), as_number(at_s))
