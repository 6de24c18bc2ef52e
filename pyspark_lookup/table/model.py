"""`Table` and `TableVersion`: what a path means, and which state of it.

Pure functions of a listing: which files are data, which partition values their directories say,
and whether the listing is a version at all (a table format's directory, a job in progress and a
directory that lost its files are not).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import cast

import pyarrow as pa

from pyspark_lookup.base.errors import VersionGoneError
from pyspark_lookup.base.write_ids import ValidWriteIdList
from pyspark_lookup.io.disk import key_of
from pyspark_lookup.io.stores import HIDDEN, IMMUTABLE, LOG_DIRECTORY
from pyspark_lookup.io.ufs import FileVersion, Listing
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import CsvOptions, FileFormatName, OnVersionGone
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.table.glob import glob_root
from pyspark_lookup.table.log import DataFile, LogVersion, TableState

__all__ = ["Busy", "Kind", "Table", "TableVersion", "kind_of", "managed_version", "version_of_file"]

_VERSIONS_KEPT = 8


class Kind(enum.Enum):
    """What a path is; learned at planning, so that an execution needs one call."""

    FILE = "FILE"
    DIRECTORY = "DIRECTORY"
    GLOB = "GLOB"
    MANAGED = "MANAGED"


@dataclasses.dataclass(frozen=True)
class Busy:
    """What is done while a job writes a table's files: see the options `lookup.on-busy`, `.busy-wait` and `.busy-timeout`."""

    keep: bool = True
    wait_s: float = 30.0
    timeout_s: float = 600.0


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of files: where it is, in which store, and how its files are read.

    `url` is the canonical path; `format` is None only until the files are known. `pinned`: of a managed table, the
    one version that is read, by a log position or a list of write ids; None: the current one. `own`: a write that is open
    and seen all the same, by its transaction. `csv`: how CSV files are written. `declared`: the columns that somebody has said
    it has; None: those that its files have.
    """

    url: str
    scope: str
    kind: Kind
    format: FileFormatName | None
    success_file: bool = False
    settle_s: float | None = None
    pinned: int | str | None = None
    own: int | None = None
    busy: Busy = Busy()
    csv: CsvOptions = CsvOptions()
    declared: pa.Schema | None = None

    def __repr__(self) -> str:
        return f"Table({redact('path', self.url)!r}, {self.kind.value}, {self.format}, {self.pinned!r})"

    @functools.cached_property
    def id(self) -> str:
        """32 hex digits, equal for references that must agree on the current version."""
        return key_of(self.scope, self.url, self.kind.value, self.success_file, self.settle_s, *self._pin)

    @property
    def _pin(self) -> tuple[object, ...]:
        read = () if (self.csv, self.declared) == (CsvOptions(), None) else (self.csv, self.declared)
        return read if self.pinned is None else (self.pinned,)

    @property
    def managed(self) -> bool:
        """Whether the table has a log, by which it was written."""
        return self.kind is Kind.MANAGED

    def fails_when_gone(self, options: LookupOptions) -> bool:
        """Whether a version that can no longer be read is an error, or is replaced by the current one."""
        chosen = options.on_version_gone or (OnVersionGone.FAIL if self.managed else OnVersionGone.NEWER)
        return chosen is OnVersionGone.FAIL

    @property
    def root(self) -> str:
        """The directory below which partition directories count."""
        return glob_root(self.url) if self.kind is Kind.GLOB else self.url


@dataclasses.dataclass(frozen=True)
class TableVersion:
    """One state of a table: its data files' versions, by URL. `digest` (32 hex digits) names it.

    `log`: of a managed table, which version of its log this is.
    """

    table_id: str
    files: tuple[FileVersion, ...]
    log: LogVersion | None = None

    @functools.cached_property
    def digest(self) -> str:
        if self.log is not None:
            return self.log.digest
        parts = (part for file in self.files for part in (file.url, file.size, file.identity))
        return key_of(self.table_id, *parts)

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    def settled(self) -> TableVersion:
        """The same version, seen long enough ago that its identities stand for one content each."""
        if all(file.settled for file in self.files):
            return self
        files = tuple(dataclasses.replace(file, settled=True) for file in self.files)
        return dataclasses.replace(self, files=files)

    def of_files(self, files: tuple[FileVersion, ...]) -> TableVersion:
        """The version that has only those of the files, as `lookup.partition` leaves them."""
        return self if files == self.files else TableVersion(self.table_id, files)

    @property
    def hidden(self) -> tuple[FileVersion, ...]:
        """Files that say which rows of `files` do not count."""
        return self.files[0].hidden if self.files else ()

    def valid_log(self, table: Table) -> LogVersion:
        """What says which writes may be seen. Raises ValueError without that: no rows of a managed table are read so (HIVE-21637)."""
        if self.log is None or self.table_id != table.id:
            raise ValueError(
                f"a version of {redact('path', table.url)}, a managed table, came without its list of write ids"
            )
        return self.log

    @property
    def newest(self) -> float:
        """What helps another host to find this version: its position in the log, or when its newest file was modified."""
        if self.log is not None:
            return float(self.log.position)
        return max((file.modified_at_s or 0.0 for file in self.files), default=0.0)


def managed_version(table: Table, state: TableState, position: int | None = None) -> TableVersion:
    """The version of a managed table at a position of its log (None: what the table's `pinned` says, or the current one).

    Raises VersionGoneError for a pinned one that the log does not have.
    """
    known = state.memo.get((table, position))
    if known is not None:
        return cast(TableVersion, known)
    try:
        version = _managed_version(table, state, position)
    except VersionGoneError as problem:
        raise VersionGoneError(f"{redact('path', table.url)}: {problem}") from None
    if len(state.memo) >= _VERSIONS_KEPT:
        state.memo.clear()
    state.memo[table, position] = version
    return version


def _managed_version(table: Table, state: TableState, position: int | None) -> TableVersion:
    try:
        if position is None and isinstance(table.pinned, str):
            write_ids = ValidWriteIdList.parse(table.pinned)
            log = state.version_of(write_ids, table.own)
        elif position is None and table.own is not None:
            write_ids = state.valid_write_ids().commit(table.own)
            log = state.version_of(write_ids, table.own)
        else:
            at = position if position is not None else cast("int | None", table.pinned)
            log = state.version(at)
            write_ids = ValidWriteIdList.parse(log.write_ids)
    except ValueError as problem:
        raise VersionGoneError(str(problem)) from None
    hidden = tuple(version_of_file(table, file, HIDDEN) for file in state.hidden(write_ids))
    files = (
        dataclasses.replace(version_of_file(table, file), modified_at_s=at_s, hidden=hidden)
        for file, _, at_s in state.files(write_ids)
    )
    return TableVersion(table.id, tuple(sorted(files, key=lambda file: file.url)), log)


def version_of_file(table: Table, file: DataFile, identity: str = IMMUTABLE) -> FileVersion:
    """A file that a managed table's log names, as the store has it."""
    return FileVersion(f"{table.url}/{file.path}", file.size, identity)


def kind_of(status: FileVersion | Listing) -> Kind:
    """What a path is, by what the store says of it."""
    if isinstance(status, FileVersion):
        return Kind.FILE
    return Kind.MANAGED if LOG_DIRECTORY in status.directories else Kind.DIRECTORY
