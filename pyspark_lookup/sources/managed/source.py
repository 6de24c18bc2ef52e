"""`LogSource`: the `VersionSource` of managed tables, which reads their versions from their notification logs."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from pyspark_lookup.core.write_ids import ValidWriteIdList
from pyspark_lookup.errors import TableFormatError, UfsNotFoundError, VersionGoneError, WriteConflictError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.sources.managed.log import (
    Change,
    DataFile,
    EarlierStateError,
    NotificationLog,
    TableState,
    TableWrite,
)
from pyspark_lookup.storage.stores import IMMUTABLE, LOG_DIRECTORY, FileStatistics, FileVersion, Listing
from pyspark_lookup.storage.stores.store import is_own
from pyspark_lookup.storage.ufs import Ufs
from pyspark_lookup.versions.model import DeleteFile, Table, TableVersion, VersionMetadata, require_metadata
from pyspark_lookup.versions.version_source import Answer, Question, SourceParts, TimeTravel, VersionSource

MANAGED = "MANAGED"
"""The name of this kind of table, as in `Table.kind`."""
_FILE = re.compile(r"^(.*?)/(?:write-\d{20}|stream-[^/]+/\d{12}-[0-9a-f]{16})/")
_NAMES_LOOKED_AT = 1000
_VERSIONS_KEPT = 8


class LogSource(VersionSource):
    """Reads the versions of managed tables from their logs. Each question for the current version reads the events that are new in the
    log."""

    kinds = (MANAGED,)
    markers = (LOG_DIRECTORY,)
    label = "a managed table"
    pins = (*VersionSource.pins, "lookup.valid-write-ids")

    def __init__(self, parts: SourceParts) -> None:
        super().__init__(parts)
        self._logs: dict[str, NotificationLog] = {}
        self._times = TimeTravel()

    @classmethod
    def has_own_file(cls, ufs: Ufs, marker_url: str) -> bool:
        return any(is_own(file.url) for file in ufs.list_files(f"{marker_url}/log", "/", _NAMES_LOOKED_AT))

    @classmethod
    def is_shown(cls, listing: Listing) -> bool:
        return False  # a log's directory may be left from a dropped table; a new table may be written there

    @classmethod
    def refuse_tables(cls, listing: Listing, directories: Sequence[str], pattern: str) -> None:
        if LOG_DIRECTORY in listing.directories and not pattern:
            raise UfsNotFoundError(
                f"{redact('path', listing.url)} has become a managed table since this query was planned: plan again (a new load() or SQL statement)"
            )
        inside = next((path for path in directories if path.rsplit("/", 1)[-1] == LOG_DIRECTORY), None)
        if inside is not None:
            raise TableFormatError(
                f"{redact('path', listing.url)} holds the managed table {redact('path', f'{listing.url}/{inside}'.rpartition('/')[0])}, "
                "whose log alone says which of its rows are valid: read it by its own path"
            )

    @classmethod
    def refuse_files(cls, urls: Sequence[str]) -> None:
        for url in urls:  # there may be very many, so a cheap test comes before the pattern
            match = _FILE.match(url) if "/write-" in url or "/stream-" in url else None
            if match is not None:
                raise TableFormatError(
                    f"{redact('path', url)} is a file of a managed table, whose log alone says which of its rows are valid: read "
                    f"{redact('path', match[1])}"
                )

    def check_options(self, options: LookupOptions, kind: str) -> None:
        self._refuse(options, ["lookup.partition"] if options.files.partition is not None else [])
        super().check_options(options, kind)

    def log(self, url: str) -> NotificationLog:
        """The log of the managed table at a canonical URL."""
        if url not in self._logs:
            self._logs[url] = NotificationLog(self._parts.ufs, self._parts.context, url)
        return self._logs[url]

    def current(self, question: Question) -> Answer:
        table = question.table
        state = self.log(table.url).latest()
        if state is None:
            raise UfsNotFoundError(
                f"{redact('path', table.url)} is not (or no longer) a managed table: its log is empty or gone. To read all its files as "
                f"they are, with deleted and uncommitted rows, move {LOG_DIRECTORY} away"
            )
        log, position = self.log(table.url), None
        if isinstance(table.pinned, datetime.datetime):
            position = self._find_position(log, state, table.pinned)
        return Answer(read_version(log, table, state, position), question.started_s)

    def _find_position(self, log: NotificationLog, state: TableState, at: datetime.datetime) -> int:
        """The position of the version that was current at a time. Lists the log only if the time is before the last event."""
        last_s = log.put_at_s(state.position)
        if last_s is not None and at.timestamp() >= last_s:
            return state.newest
        return self._times.find(log.url, state.table_id, at, lambda _: _list_commit_times(log, state))

    def candidates(
        self, table: Table, digest: str, newest: float, ask: Callable[[], TableVersion]
    ) -> Sequence[TableVersion]:
        states = [ask()]
        log = self.log(table.url)
        state = log.cached_state()
        if state is not None and table.pinned is None:
            with contextlib.suppress(
                VersionGoneError, ValueError, OverflowError
            ):  # `newest` may be infinity, which is not a position
                states.append(read_version(log, table, state, int(newest)))
        return states

    def restore(self, table: Table, metadata: VersionMetadata) -> TableVersion | None:
        if metadata.position is None:
            return None
        state = self.log(table.url).cached_state(metadata.position)
        if state is None or metadata.table_id != state.table_id or metadata.position > state.position:
            return None
        with contextlib.suppress(VersionGoneError, EarlierStateError):
            return managed_version(table, state, None if isinstance(table.pinned, str) else metadata.position)
        return None

    def has_commit(self, url: str, table_id: str, position: int) -> bool:
        """Whether the log, as this host knows it, has a commit at `position`. If not, the table was dropped, or restored from a copy."""
        state = self.log(url).cached_state(position)
        return state is not None and state.table_id == table_id and state.position >= position

    # --- what views show --------------------------------------------------------------------------

    def history(self, table: Table) -> list[dict[str, Any]] | None:
        log = self.log(table.url)
        state = log.latest()
        if state is None:
            return None
        commits = [
            (change, part.writes[change.write_id] if change.write_id else None) for part, change in _changes(log, state)
        ]
        put_at_s = log.put_times(log.pages.begin(state))
        return [
            _to_history_row(
                change,
                put_at_s.get(change.position, change.at_s),
                write,
                write is not None and log.pages.is_vacuumed(state, write),
            )
            for change, write in commits
        ]

    def write_ids(self, table: Table, version: TableVersion) -> dict[str, int]:
        log = self.log(table.url)
        state, valid = log.cached_state(), self.valid_write_ids(version)
        if state is None or valid is None or version.commit is None:
            return {}
        state = log.pages.find_state(state, version.commit[1])
        return {f"{table.url}/{file.path}": write_id for file, write_id, _ in state.files(valid)}

    def valid_write_ids(self, version: TableVersion) -> ValidWriteIdList | None:
        return None if version.metadata is None else ValidWriteIdList.parse(version.metadata.state)

    def details(self, table: Table, version: TableVersion) -> dict[str, Any]:
        metadata, state = require_metadata(table, version), self.log(table.url).cached_state()
        return {
            "table_id": metadata.table_id,
            "position": metadata.position,
            "keys": list(metadata.keys),
            "valid_write_ids": metadata.state,
            "properties": dict(state.definition.properties) if state is not None else {},
        }


def _changes(log: NotificationLog, state: TableState) -> Iterator[tuple[TableState, Change]]:
    return log.pages.changes(state, log.pages.begin(state), state.position)


def _list_commit_times(log: NotificationLog, state: TableState) -> list[tuple[int, int]]:
    """(position, Unix ms) of each change, by the store's clock, because the clocks of writers differ.

    If the store's clock was set back, a change may seem to be later than the last change. It then gets the time of the last change, so that
    the version with the latest time is always the current one.
    """
    # A trimmed log may have no change left; the last change then came before all events that are left.
    changes = [change for _, change in _changes(log, state)] or state.changes[-1:]
    put_at_s = log.put_times(log.pages.begin(state))
    earliest_s = min(put_at_s.values(), default=None)
    times = [put_at_s.get(change.position, change.at_s if earliest_s is None else earliest_s) for change in changes]
    return [(change.position, int(min(at_s, times[-1]) * 1000)) for change, at_s in zip(changes, times, strict=True)]


def _to_history_row(
    change: Change, committed_at_s: float, write: TableWrite | None, is_vacuumed: bool
) -> dict[str, Any]:
    return {
        "version": change.position,
        "committed_at": committed_at_s,
        "operation": "create" if write is None else write.mode.value.partition("_")[0],
        "write_id": change.write_id,
        "files_added": 0 if write is None else None if is_vacuumed else len(write.files),
        "rows_added": 0 if write is None else None if is_vacuumed else write.rows,
    }


def read_version(log: NotificationLog, table: Table, state: TableState, position: int | None = None) -> TableVersion:
    """Like `managed_version`, but also for versions that `state` is too new to tell. The earlier states for these versions are read from the
    store.

    `state`: the log's latest state. Raises VersionGoneError if files of the version were removed.
    """
    with contextlib.suppress(EarlierStateError):
        return managed_version(table, state, position)
    write_ids = ValidWriteIdList.parse(table.pinned) if position is None and isinstance(table.pinned, str) else None
    if write_ids is not None:
        earlier = log.pages.find_state_by_write_ids(state, write_ids)
    else:
        earlier = log.pages.find_state(state, position if position is not None else cast(int, table.pinned))
    with contextlib.suppress(EarlierStateError):
        version = managed_version(table, earlier, position)
        # The earlier state does not know what was vacuumed after it.
        is_readable = (version.commit or ("", 0))[1] >= state.oldest
        if is_readable and write_ids is not None:
            is_readable = not any(
                log.pages.is_vacuumed(state, write) for write in earlier.find_needed_writes(write_ids)
            )
        if is_readable:
            return version
    if write_ids is not None:
        reason = f"the list of write ids {str(write_ids)!r} needs files that were compacted or vacuumed since: take a newer list (LookupTable.valid_write_ids)"
    else:
        number = f"{table.pinned} (lookup.version)" if position is None else position
        reason = f"version {number} was vacuumed: versions from {state.oldest} on can be read"
    raise VersionGoneError(f"{redact('path', table.url)}: {reason}")


def managed_version(table: Table, state: TableState, position: int | None = None) -> TableVersion:
    """The version of a managed table at a position of its log (None: the version that the table pins, or the current one).

    Raises VersionGoneError for a version that the log does not have, EarlierStateError for a version that only an earlier state can tell.
    """
    cached_version = state.memo.get((table, position))
    if cached_version is not None:
        return cast(TableVersion, cached_version)
    try:
        version = _managed_version(table, state, position)
    except (VersionGoneError, WriteConflictError) as problem:
        raise type(problem)(f"{redact('path', table.url)}: {problem}") from None
    if len(state.memo) >= _VERSIONS_KEPT:
        state.memo.clear()
    state.memo[table, position] = version
    return version


def _managed_version(table: Table, state: TableState, position: int | None) -> TableVersion:
    try:
        if position is None and isinstance(table.pinned, str):
            write_ids = ValidWriteIdList.parse(table.pinned)
            metadata = state.resolve_version(write_ids, table.own_write_id)
        elif position is None and table.own_write_id is not None:
            write_ids = state.valid_write_ids().commit(table.own_write_id)
            metadata = state.resolve_version(write_ids, table.own_write_id)
        else:
            at = position if position is not None else cast("int | None", table.pinned)
            metadata = state.version(at)
            if position is None and at not in (None, metadata.position):
                raise VersionGoneError(
                    f"there is no version {at}: event {at} of the log changed nothing; the version before it is {metadata.position} "
                    "(LookupTable.versions() lists all)"
                )
            write_ids = ValidWriteIdList.parse(metadata.state)
    except ValueError as problem:
        raise VersionGoneError(str(problem)) from None
    deletes = tuple(DeleteFile(f"{table.url}/{file.path}", file.size) for file in state.deletes(write_ids))
    files = (
        dataclasses.replace(version_of_file(table, file), modified_at_s=at_s, deletes=deletes)
        for file, _, at_s in state.files(write_ids)
    )
    return TableVersion(table.id, tuple(sorted(files, key=lambda file: file.url)), metadata)


def version_of_file(table: Table, file: DataFile, identity: str = IMMUTABLE) -> FileVersion:
    """The `FileVersion` of a data file that a managed table's log names."""
    return FileVersion(f"{table.url}/{file.path}", file.size, identity, statistics=FileStatistics(file.rows))
