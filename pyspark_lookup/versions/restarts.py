"""Reads that start over when files vanish while they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pyspark_lookup.errors import SourceChangedError, VersionGoneError, raise_ours
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.versions.model import Table, TableVersion

_STARTS = 5
T = TypeVar("T")


def read_again(read: Callable[[], T], *problems: type[Exception]) -> T:
    """The result of `read`. After one of the `problems` it is called again, until the same problem comes twice in a row.

    The race: a clean-up removes old files of a log at any moment, also between a listing and the read of what it lists. The files that
    replace them exist before, so the next attempt finds them.
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

    Raises the errors of both, and VersionGoneError for a table that changes during several reads in a row.
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
                            f"{redacted_path}: version{place} has lost files: {change}. VACUUM removes files that newer versions do not need"
                        ),
                        change,
                    )
                raise_ours(
                    VersionGoneError(
                        f"{redacted_path}: {change}, although it belongs to the current version{place}: it was not removed by the "
                        "table's own tools; restore it"
                    ),
                    change,
                )
    raise VersionGoneError(
        f"{redact('path', table.url)} changed during each of {_STARTS} reads: write files with new names and keep the old files for "
        "a while, or set lookup.settle"
    )
