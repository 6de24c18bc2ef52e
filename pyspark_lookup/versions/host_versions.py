"""`HostVersions`: a host's records of tables' versions, which its processes share.

It records the version of a table that was last resolved, and when; the files of each version, by the version's digest; and the newest commit
that the host has made to a table. This commit is the table's "floor" on the host: no read here may return an older version. All are small
files in the host's cache directory. A record that is lost costs a call to the store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pyspark_lookup.core.decoding import as_count, as_name, as_number, as_text
from pyspark_lookup.errors import CatalogUnavailableError
from pyspark_lookup.options.enums import MetadataSource
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import Disk, Held, key_of
from pyspark_lookup.storage.stores import SETTLED_AFTER_S
from pyspark_lookup.storage.stores.vended import SILENT_FROM_S
from pyspark_lookup.storage.ufs import Ufs
from pyspark_lookup.versions.file_columns import ColumnFiles
from pyspark_lookup.versions.listed_columns import ListedColumns, files_from_json, files_to_json, open_columns
from pyspark_lookup.versions.model import Table, TableVersion, VersionMetadata

_LOCK_WAIT_S = 30.0
_READABLE_AT_MOST = 31
_HELD_AT_MOST = 16
_UNRECORDED = 0.1  # share of `lookup.busy-timeout` for which an unchanged version is not recorded again
_COLUMNS_AT_MOST = 3
_RACES = 1000  # attempts of one resolution to record its version, while other processes are faster


class HostVersions:
    """A host's records of tables' versions. Without a disk in `context`, nothing is recorded or found.

    `restore`: `VersionSource.restore` of the table's source. `has_commit`: whether the log at a URL has a commit, given the URL, the table's
    id and the commit's position.
    """

    def __init__(
        self,
        ufs: Ufs,
        context: HostContext,
        restore: Callable[[Table, VersionMetadata], TableVersion | None],
        has_commit: Callable[[str, str, int], bool],
    ) -> None:
        self._ufs = ufs
        self._context = context
        self._unwritten_floors: dict[str, dict[str, Any]] = {}  # floors that could not be written to the disk
        # Digests of versions whose record this process has read and understood.
        self._readable_digests: set[str] = set()
        self._seen_s: dict[str, float] = {}
        self._last: dict[str, Held[tuple[int, Any | None]]] = {}
        self._floors: dict[str, Held[Any | None]] = {}
        self._catalog: str | None = None
        self._call_s = 0.0
        self._columns: dict[str, ListedColumns] = {}  # the columns that this process used last, by name
        self._restore = restore
        self._has_commit = has_commit

    # --- the last version -------------------------------------------------------------------------

    def last(self, table: Table) -> dict[str, Any] | None:
        """The record of the table's last version: `digest`, `log`, `started_s`, `boot` and `wall_s`; None if there is none.

        `log`: (table id, position). `started_s`: when its resolution began, on the steady clock since the start of the machine that `boot`
        names. `wall_s`: when it was recorded (Unix time).
        """
        return self._newest(table)[1]

    def _newest(self, table: Table) -> tuple[int, dict[str, Any] | None]:
        if self._context.disk is None:
            return 0, None
        last = self._last.get(table.id)
        if last is None:
            if len(self._last) >= _HELD_AT_MOST:
                self._last.clear()
            self._last[table.id] = last = self._context.disk.hold_newest("table", table.id, _parse_last)
        return last.get()

    def last_digest(self, table: Table) -> str | None:
        """The digest of the table's last version; None if there is none on record."""
        record = self.last(table)
        return None if record is None else record["digest"]

    def forget(self, table: Table) -> None:
        """Forget the table's last version."""
        self.attempt(lambda disk: disk.forget_records("table", table.id))

    def learn(
        self, table: Table, version: TableVersion, started_s: float, trust_store: bool = False, renew: bool = True
    ) -> TableVersion | None:
        """Record a version whose resolution began at `started_s`. Returns this version, or the one on record if that one is newer.

        So a slow listing cannot take the host back to an older state (monotonic reads). Returns None if the version on record is newer, but
        its files are not on record: then ask the store again. With `trust_store`, `version` is recorded in this case, too. Without `renew`,
        a version that was recorded recently is not recorded again.

        The race: other processes record versions at the same time. Records are numbered, and each is created exclusively, with the number
        after that of the newest record with which its version was compared. A process that finds this number taken compares again.
        """
        if self._context.disk is None:
            return version
        try:
            for _ in range(_RACES):  # bounded, because a directory may fail to list the records in it
                number, record = self._newest(table)
                if record and self._is_newer(record, version, started_s):
                    newer = self.files(table, record["digest"])
                    if newer is not None or not trust_store:
                        return newer
                if record and not renew and self._is_known(record, table, version, started_s):
                    self._check_floor(self._context.disk, table, version, started_s)
                    return version
                if self._record_successor(self._context.disk, table, version, started_s, number):
                    self._update_records(self._context.disk, table, version, started_s, record)
                    return version
        except OSError:
            pass
        self._context.metrics.inc("cacheFailureCount")  # a later query asks the store; this one has its answer
        return version

    def _is_newer(self, record: Mapping[str, Any], version: TableVersion, started_s: float) -> bool:
        """Whether the version on record is newer than `version`.

        If both are in the same log, their positions are compared; otherwise the times at which their resolutions began.
        """
        commit, recorded_commit = version.commit, record.get("log")
        if commit is not None and recorded_commit is not None and commit[0] == recorded_commit[0]:
            return int(recorded_commit[1]) > commit[1]
        return bool(record["boot"] == self._context.clock.boot and record["started_s"] > started_s)

    def _is_known(self, record: Mapping[str, Any], table: Table, version: TableVersion, started_s: float) -> bool:
        """Whether `record` has this version, and is so recent that the version need not be recorded again.

        If the record has the version, also notes, for `seen_s`, when this process saw the version.
        """
        if (record["digest"], record["log"], record["boot"]) != (
            version.digest,
            version.commit,
            self._context.clock.boot,
        ):
            return False
        self._seen_s = {table.id: started_s}
        return 0 <= started_s - float(record["started_s"]) < _UNRECORDED * table.busy.timeout_s

    def seen_s(self, table: Table) -> float:
        """When this process last found the table's version unchanged, and did not record it again (steady clock); 0.0: never."""
        return self._seen_s.get(table.id, 0.0)

    def missing_since_s(self, table: Table, seen_s: float) -> float:
        """When this host first found that a table which it last saw at `seen_s` is missing. If it finds this only now: the current time, which it records.

        Times are on the steady clock.
        """
        now_s, boot = self._context.clock.steady_s(), self._context.clock.boot
        if self._context.disk is None:
            return now_s
        record = self._context.disk.get_record("missing", table.id, _parse_missing)
        if record is not None and record["boot"] == boot and seen_s <= record["since_s"] <= now_s:
            return float(record["since_s"])
        self.attempt(lambda disk: disk.replace_record("missing", table.id, {"since_s": now_s, "boot": boot}))
        return now_s

    def forget_missing(self, table: Table) -> None:
        """Forget when a table was found to be missing."""
        self.attempt(lambda disk: disk.remove_record("missing", table.id))

    def _record_successor(self, disk: Disk, table: Table, version: TableVersion, started_s: float, number: int) -> bool:
        """Record a version under the number after `number`. Returns False if another process has already created a record of this number."""
        self._remember_files(table, version)
        value = {
            "digest": version.digest,
            "log": version.commit,
            "started_s": started_s,
            "boot": self._context.clock.boot,
            "wall_s": self._context.clock.wall_s(),
        }
        return disk.succeed_record("table", table.id, number, value)

    def _update_records(
        self, disk: Disk, table: Table, version: TableVersion, started_s: float, last_record: Mapping[str, Any] | None
    ) -> None:
        """Update what depends on the last version, after `version` was recorded: this host's newest commit (`_check_floor`), and the list of known
        versions. `last_record`: the record of the version before `version`."""
        self._check_floor(disk, table, version, started_s)
        if last_record is None or last_record["digest"] != version.digest:
            row = {
                "digest": version.digest,
                "resolved_at": self._context.clock.wall_s(),
                "files": len(version.files),
                "bytes": version.bytes,
                "position": version.number,
            }
            disk.replace_record("version", f"{key_of(table.scope, table.url)}-{version.digest}", row)

    def _check_floor(self, disk: Disk, table: Table, version: TableVersion, started_s: float) -> None:
        """Forget this host's newest commit to the table if the table's log no longer has this commit."""
        floor = self._get_floor(table.url) if version.commit is not None else None
        if floor is not None and self._is_obsolete(table.url, floor, started_s):
            with self.lock("floor", table.url):
                # Again, under the lock: a commit may have raised the floor meanwhile.
                floor = self._get_floor(table.url)
                if floor is not None and self._is_obsolete(table.url, floor, started_s):
                    self._unwritten_floors.pop(table.url, None)
                    disk.remove_record("floor", self._floor_key(table.url))

    # --- floors: a host reads what it has committed ------------------------------------------------

    def raise_floor(self, table: Table, table_id: str, position: int) -> None:
        """From now on, let this host read no version of the table from before this commit, which it has made (read your own writes).

        If this cannot be recorded, the host forgets its last version of the table, so that the next read asks the store.
        """
        if self._context.disk is None:
            return
        url = table.url
        with self.lock("floor", url):
            floor = self.floor(url)
            if floor is None or floor[0] != table_id or floor[1] < position:
                value = {
                    "commit": [table_id, position],
                    "raised_s": self._context.clock.steady_s(),
                    "boot": self._context.clock.boot,
                }
                try:
                    self._context.disk.replace_record("floor", self._floor_key(url), value)
                    self._unwritten_floors.pop(url, None)
                except OSError:
                    self._context.metrics.inc("cacheFailureCount")
                    self._unwritten_floors[url] = {**value, "commit": (table_id, position)}
                    self.forget(table)

    @property
    def has_unwritten(self) -> bool:
        """Whether this process has made a commit that it could not record on the disk, so that other processes do not know it."""
        return bool(self._unwritten_floors)

    def floor(self, url: str) -> tuple[str, int] | None:
        """(table id, log position) of the newest commit that this host has made to the table at `url`; None if it has made none."""
        floor_record = self._get_floor(url)
        return floor_record["commit"] if floor_record is not None else None

    def _get_floor(self, url: str) -> dict[str, Any] | None:
        if self._context.disk is None:
            return None
        if url not in self._floors:
            self._floors[url] = self._context.disk.hold_record("floor", self._floor_key(url), _parse_floor)
        return self._unwritten_floors.get(url) or self._floors[url].get()

    def _is_obsolete(self, url: str, floor: Mapping[str, Any], started_s: float) -> bool:
        """Whether the log lacks this host's newest commit, because the table was dropped, or restored from a copy.

        `started_s`: when the resolution of the current version began. If it began before the commit, it may have missed the commit: then False.
        """
        if floor["boot"] == self._context.clock.boot and started_s <= floor["raised_s"]:
            return False
        table_id, position = floor["commit"]
        return not self._has_commit(url, table_id, position)

    def with_floor(self, table: Table, options: LookupOptions) -> LookupOptions:
        """The options of a read that is planned on this host, with its newest commit to the table, so that executors on other hosts include it."""
        floor = self.floor(table.url) if options.version.source is MetadataSource.CACHE else None
        return options if floor is None else options.with_values({"lookup.floor": f"{floor[0]}:{floor[1]}"})

    def _floor_key(self, url: str) -> str:
        return key_of(self._ufs.scope, url)

    def floors(self, url: str, options: LookupOptions) -> list[tuple[str, int]]:
        """(table id, log position) of the commits that a read must include: the newest one by this host, and the one that `options` name."""
        own_floor = self.floor(url)
        floors = [own_floor] if own_floor is not None else []
        if options.version.floor is not None:
            table_id, _, position = options.version.floor.rpartition(":")
            floors.append((table_id, int(position)))
        return floors

    def includes_own_writes(self, table: Table, options: LookupOptions, version: TableVersion) -> bool:
        """Whether a version from the host's records includes the commits that `floors` returns."""
        return self.reaches(version.commit, table.url, options)

    def reaches(self, log: Sequence[Any] | None, url: str, options: LookupOptions) -> bool:
        """Whether a version at `log` (table id, position) includes the commits that `floors` returns; True for a table without a log."""
        if log is None:
            return True
        return all(log[0] == table_id and log[1] >= position for table_id, position in self.floors(url, options))

    def remember(self, table: Table, version: TableVersion) -> None:
        """Record a version's files, for readers that know only the digest of the version."""
        self.attempt(lambda disk: self._remember_files(table, version))

    def record_token(self, table: Table, version: TableVersion) -> None:
        """Record, for `known_versions`, that a version token of the version is issued now."""
        place = f"{key_of(table.scope, table.url)}-{version.digest}"
        self.attempt(lambda disk: disk.replace_record("token", place, {"token_at": self._context.clock.wall_s()}))

    def known_versions(self, options: LookupOptions) -> list[dict[str, Any]]:
        """The versions of the table at `options.files.path` that this host has resolved, oldest first.

        Each has `digest`, `resolved_at` (Unix time at which it last became the current version), `files`, `bytes`, `position` (its version
        number; None: it has none), and `token_at` (when a token of it was last issued; None: never).
        """
        if self._context.disk is None:
            return []
        prefix = f"{key_of(self._ufs.scope, self._ufs.url_of(options.files.path))}-"
        token_times = dict(self._context.disk.records("token", prefix, lambda row: as_number(row["token_at"])))
        records = self._context.disk.records("version", prefix, _parse_version_row)
        rows = [{**row, "token_at": token_times.get(key)} for key, row in records]
        return sorted(rows, key=lambda row: row["resolved_at"])

    def _remember_files(self, table: Table, version: TableVersion) -> None:
        if self._context.disk is None or self._is_remembered(self._context.disk, table, version.digest):
            return
        restored_version = None if version.metadata is None else self._restore(table, version.metadata)
        if restored_version is not None and restored_version.digest == version.digest:
            # The table's source finds the files by the metadata, so the record needs none.
            record = dataclasses.replace(version, files=()).to_json() | {"files": None}
        elif isinstance(version.files, ColumnFiles) and isinstance(version.files.columns, ListedColumns):
            columns = version.files.columns
            record = {"files": files_to_json(version.files, columns, self._context.disk), "metadata": None}
            self._keep_columns(columns)
        else:
            record = version.to_json()
        if version.is_settled:
            self._context.disk.replace_record("files", version.digest, record)
        else:
            # Some files are so new that a change might not show in their identity. The record has the time, by which a reader can tell whether
            # the files are old enough by now.
            unsettled_record = {
                "seen_s": self._context.clock.steady_s(),
                "boot": self._context.clock.boot,
                "version": record,
            }
            self._context.disk.replace_record("unsettled", version.digest, unsettled_record)

    def _is_remembered(self, disk: Disk, table: Table, digest: str) -> bool:
        """Whether a version's files are on record, in a form that this release can read. Each process reads a record once to find this out."""
        if not disk.has_record("files", digest):
            return False
        if digest not in self._readable_digests:
            if disk.get_record("files", digest, functools.partial(self._parse_version, table)) is None:
                return False
            self._readable_digests = {*list(self._readable_digests)[-_READABLE_AT_MOST:], digest}
        return True

    def files(self, table: Table, digest: str) -> TableVersion | None:
        """The version with the digest `digest`, if this host has its files on record; otherwise None."""
        if self._context.disk is None:
            return None
        parse_version = functools.partial(self._parse_version, table)
        version, settled = self._context.disk.get_record("files", digest, parse_version), True
        if version is None:
            unsettled_record = self._context.disk.get_record(
                "unsettled", digest, functools.partial(_parse_unsettled, parse_version)
            )
            if unsettled_record is None:
                return None
            seen_s, boot, version = unsettled_record
            settled = boot == self._context.clock.boot and self._context.clock.steady_s() - seen_s > SETTLED_AFTER_S
        if isinstance(version, VersionMetadata):
            version = self._restore(table, version)
        if isinstance(version, ColumnFiles):
            # The record and the columns each have a checksum, and a header with a hash of their name: no need to compute the digest again.
            version = TableVersion(table.id, version, known_digest=digest)
        if version is None or version.digest != digest:
            return None
        return version.settled() if settled else version

    def _parse_version(self, table: Table, record: Any) -> TableVersion | VersionMetadata | ColumnFiles:
        """The content of a record: the version itself, or the metadata or the files from which the version can be made."""
        if record["files"] is None:
            return VersionMetadata.from_json(record["metadata"])
        if isinstance(record["files"], dict):
            return files_from_json(record["files"], functools.partial(self._open_columns, table))
        return TableVersion.from_json(table.id, record)

    def _open_columns(self, table: Table, name: str) -> ListedColumns | None:
        columns = self._columns.get(name)
        if columns is None and self._context.disk is not None:
            columns = open_columns(self._context.disk, name, table.root)
            if columns is not None:
                self._keep_columns(columns)
        return columns

    def _keep_columns(self, columns: ListedColumns) -> None:
        assert columns.name is not None
        self._columns = {**dict(list(self._columns.items())[-_COLUMNS_AT_MOST:]), columns.name: columns}

    def attempt(self, write: Callable[[Disk], None]) -> None:
        """Call `write` with the host's cache directory. A failure is counted and otherwise ignored: it costs a later call to the store."""
        if self._context.disk is None:
            return
        try:
            write(self._context.disk)
        except OSError:
            self._context.metrics.inc("cacheFailureCount")

    def asks_catalog(self, name: str, call_s: float) -> None:
        """From now on, requests under a lock may go to a catalog, which `name` names in errors. Each of its calls ends after `call_s`."""
        self._catalog, self._call_s = name, call_s

    @contextlib.contextmanager
    def lock(self, kind: str, name: str, is_needed: bool = True, pauses: bool = False) -> Iterator[None]:
        """Hold a lock of this host, if `is_needed`. If the lock is not free in time, or the cache directory fails, go on without the lock.

        If a process that had the lock asked a catalog that gave no answer, this is the answer for all who waited for the lock meanwhile
        (CatalogUnavailableError): otherwise each of them would wait for the silent catalog, one after the other. With `pauses`, it is also the
        answer for all who come within the time that a call may take, whether or not they need the lock.
        """
        lock, since_s = None, self._context.clock.steady_s()
        try:
            if is_needed and self._context.disk is not None:
                lock = self._context.disk.acquire(kind, name, self._call_s + _LOCK_WAIT_S)
        except OSError:
            self._context.metrics.inc("cacheFailureCount")
        shares_silence = self._catalog is not None and (lock is not None or pauses)
        began_s = self._context.clock.steady_s()
        try:
            if shares_silence and self._was_silent(name, since_s - self._call_s if pauses else since_s):
                raise CatalogUnavailableError(
                    f"{self._catalog} gave no answer to a process of this host a moment ago: try again in {self._call_s:g} s, or check its uri, in the table's options or this machine's configuration"
                )
            yield
        except CatalogUnavailableError:
            ended_s = self._context.clock.steady_s()
            if shares_silence and ended_s - began_s >= SILENT_FROM_S:
                silence = {"ended_s": ended_s, "boot": self._context.clock.boot}
                self.attempt(lambda disk: disk.replace_record("silence", key_of(name), silence))
            raise
        finally:
            if lock is not None:
                lock.release()

    def _was_silent(self, name: str, since_s: float) -> bool:
        """Whether this host has waited in vain, until after `since_s` (steady clock), for a catalog that was asked in a block of `lock`."""
        disk = self._context.disk
        silence = None if disk is None else disk.get_record("silence", key_of(name), _parse_silence)
        return silence is not None and silence["boot"] == self._context.clock.boot and silence["ended_s"] > since_s


# --- checks of records -----------------------------------------------------------------------------


def _parse_last(record: Any) -> dict[str, Any]:
    return {
        "digest": as_name(record["digest"]),
        "log": None if record["log"] is None else _parse_commit(record["log"]),
        "started_s": as_number(record["started_s"]),
        "boot": as_text(record["boot"]),
        "wall_s": as_number(record["wall_s"]),
    }


def _parse_commit(pair: Any) -> tuple[str, int]:
    table_id, position = pair
    return as_text(table_id), as_count(position)


def _parse_floor(record: Any) -> dict[str, Any]:
    commit, raised_s, boot = _parse_commit(record["commit"]), as_number(record["raised_s"]), as_text(record["boot"])
    return {"commit": commit, "raised_s": raised_s, "boot": boot}


def _parse_missing(record: Any) -> dict[str, Any]:
    return {"since_s": as_number(record["since_s"]), "boot": as_text(record["boot"])}


def _parse_silence(record: Any) -> dict[str, Any]:
    return {"ended_s": as_number(record["ended_s"]), "boot": as_text(record["boot"])}


def _parse_version_row(record: Any) -> dict[str, Any]:
    return {
        "digest": as_name(record["digest"]),
        "resolved_at": as_number(record["resolved_at"]),
        "files": as_count(record["files"]),
        "bytes": as_count(record["bytes"]),
        "position": None if record["position"] is None else as_count(record["position"]),
    }


def _parse_unsettled(
    parse_version: Callable[[Any], TableVersion | VersionMetadata | ColumnFiles], record: Any
) -> tuple[float, str, TableVersion | VersionMetadata | ColumnFiles]:
    return as_number(record["seen_s"]), as_text(record["boot"]), parse_version(record["version"])
