"""`Database`: diskcache's cache, with bytes as keys and values. Nothing in its file can make a reader run code, open another file, or wait.

The subclasses override parts of diskcache that are not public, so its version is limited to 5.6. They are needed because
- diskcache unpickles keys and values of its file (CVE-2025-69872), and opens and removes files that it names;
- it executes pragmas that the file names;
- it waits up to a minute for a lock when it opens a file, whatever its `timeout`.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import diskcache
from diskcache.core import ENOVAL, METADATA, MODE_RAW, UNKNOWN

_SETTINGS: Mapping[str, Any] = {
    "eviction_policy": "least-recently-stored",  # a read then writes nothing
    "cull_limit": 0,  # `Database.put` culls after its transaction, because free pages count until the transaction ends
    "statistics": 0,
    "tag_index": 0,
    # A write-ahead log would need a file in shared memory. Whoever truncates such a file, or one that is mapped, ends the process (SIGBUS).
    "sqlite_journal_mode": "truncate",
    "sqlite_mmap_size": 0,
    "sqlite_synchronous": 0,  # after a power failure, the file may be damaged: it is then recreated
    "sqlite_auto_vacuum": 1,
    "sqlite_cache_size": 8192,
    "disk_min_file_size": 2**62,  # all values are in the database
}
_KEYS_AT_ONCE = 500  # bound variables of a statement; SQLite allows at least 999
_POLL_S = 0.001


class RefusedError(ValueError):
    """The database has a key or a value that this package does not write: a pickle, a text, the name of a file."""


class BytesDisk(diskcache.Disk):  # type: ignore[misc]
    """Stores bytes in the database, and refuses everything else."""

    def put(self, key: Any) -> tuple[Any, bool]:
        return sqlite3.Binary(_as_bytes(key)), True

    def get(self, key: Any, raw: Any) -> bytes:
        return _as_bytes(key if raw == 1 else None)

    def store(self, value: Any, read: bool, key: Any = UNKNOWN) -> tuple[int, int, None, Any]:
        return 0, MODE_RAW, None, sqlite3.Binary(_as_bytes(None if read else value))

    def fetch(self, mode: Any, filename: Any, value: Any, read: bool) -> bytes:
        return _as_bytes(value if mode == MODE_RAW and filename is None and not read else None)

    def remove(self, file_path: str) -> None:
        """Does nothing: there are no files."""


def _as_bytes(value: Any) -> bytes:
    if type(value) is not bytes:
        raise RefusedError("an entry of the database is not bytes, so the entry is ignored")
    return value


class Database(diskcache.Cache):  # type: ignore[misc]
    """The database in `directory`, which is made if it is missing, with mode 0700. `wait_s`: the longest wait for a lock of another process.

    Use it in one thread at a time, and call `close` after each use, which closes the connection.
    """

    def __init__(self, directory: str, max_bytes: int, wait_s: float) -> None:
        os.makedirs(directory, 0o700, exist_ok=True)
        status = os.stat(directory)
        if status.st_uid != os.geteuid():
            raise PermissionError(
                f"{directory} belongs to another user: set lookup.cache.dir (or the argument directory) to another place"
            )
        if status.st_mode & 0o077:
            raise PermissionError(f"{directory} is open to other users: chmod 700 it")
        self.refused = 0  # entries that were left out because they are not bytes
        self._wait_s = wait_s
        self._sure = {**_SETTINGS, "size_limit": max_bytes}
        super().__init__(directory, wait_s, BytesDisk, **self._sure)

    @property
    def _sql_retry(self) -> Callable[..., Any]:
        def execute(statement: str, *args: Any) -> Any:
            until_s = time.monotonic() + self._wait_s
            while True:
                try:
                    return self._sql(statement, *args)
                except sqlite3.OperationalError as problem:
                    if "locked" not in str(problem) or time.monotonic() > until_s:
                        raise
                    time.sleep(_POLL_S)

        return execute

    def reset(self, key: str, value: Any = ENOVAL, update: bool = True) -> Any:
        """As in diskcache, except that the settings in `_SETTINGS` override those in the file."""
        if key in self._sure:
            value = self._sure[key]
        elif key not in METADATA:
            return None
        if value is ENOVAL:
            ((value,),) = self._sql_retry("SELECT value FROM Settings WHERE key = ?", (key,)).fetchall()
        elif key.startswith("sqlite_"):
            pragma = key.removeprefix("sqlite_")
            if self._sql_retry(f"PRAGMA {pragma}").fetchall() != [(value,)]:
                self._sql_retry(f"PRAGMA {pragma} = {value}").fetchall()
        setattr(self, key, value)
        return value

    def find(self, names: Sequence[bytes]) -> dict[bytes, bytes]:
        """The values of those keys that are there, and are bytes."""
        values: dict[bytes, bytes] = {}
        for start in range(0, len(names), _KEYS_AT_ONCE):
            some = names[start : start + _KEYS_AT_ONCE]
            marks = ", ".join("?" * len(some))
            statement = f"SELECT key, mode, filename, value FROM Cache WHERE raw = 1 AND key IN ({marks})"
            for name, mode, filename, value in self._sql(statement, [sqlite3.Binary(name) for name in some]):
                try:
                    values[_as_bytes(name)] = self.disk.fetch(mode, filename, value, False)
                except RefusedError:
                    self.refused += 1
        return values

    def put(self, entries: Mapping[bytes, bytes], expire_s: float | None) -> None:
        """Store entries in one transaction, and remove the earliest ones if there are too many bytes. `expire_s`: when they may be removed."""
        with self.transact():
            for name, value in entries.items():
                self.set(name, value, expire_s)
        self.cull()

    def remove(self, names: Sequence[bytes]) -> None:
        with self.transact():
            for name in names:
                self.delete(name)


def is_damaged(problem: Exception) -> bool:
    """Whether an error says that the database's file is not a database, or is incomplete."""
    says = ("malformed", "not a database", "no such table", "no such column")
    return isinstance(problem, sqlite3.DatabaseError) and any(text in str(problem) for text in says)


def truncate(directory: str) -> None:
    """Empty the file of a damaged database. Processes that use it meanwhile get errors, but no wrong entries, because entries have checksums."""
    fd = os.open(os.path.join(directory, diskcache.core.DBNAME), os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)
