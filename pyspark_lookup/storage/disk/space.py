"""The budget of a cache directory: an account of the bytes that its files take, and files that are written within the budget.

The account is three numbers in the file `usage`, changed in place under a lock, so that nobody has to list the directory. The race: several
processes write at once, and each could see the same free bytes. So a process takes bytes from the budget before it writes them, and the files
of all processes together never exceed the budget.

A file that takes long to write has its reserved size from the beginning, and its writer holds a lock on it. If nobody holds that lock, the
writer has died, and the file is removed when others need room.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.core.threads import check
from pyspark_lookup.errors import CacheFullError
from pyspark_lookup.storage.disk.directory import (
    NEW_FILE,
    Directory,
    LockedFile,
    is_own_file,
    is_unlocked,
    list_directories,
    list_entries,
    list_names,
    use_file,
)

Kind = Literal["blocks", "segments", "records"]

PAGE = 4096  # files and directories take multiples of this many bytes on disk
_DISK_SHARE, _FREE_SHARE = (
    4,
    2,
)  # the default budget: a quarter of the disk, but at most half of the bytes that are free or already used here
RECORDS_SHARE = 16  # blocks and segments leave one sixteenth of the budget to records
_TRIES = 3  # attempts to take bytes: others may take those that an eviction has just freed
_RESERVED = ".reserved"
_USAGE = "%020d %020d %020d\n"


@dataclasses.dataclass
class Usage:
    """The bytes that the files of a directory take: blocks; segments, with files that are being built; records, with counters."""

    blocks: int = 0
    segments: int = 0
    records: int = 0

    @property
    def total(self) -> int:
        return self.blocks + self.segments + self.records

    def add(self, kind: Kind, amount: int) -> None:
        setattr(self, kind, max(getattr(self, kind) + amount, 0))


def on_disk(size: int) -> int:
    """The bytes that a file of `size` bytes takes on disk: whole pages."""
    return -(-size // PAGE) * PAGE


def default_budget(path: Path, used_bytes: int) -> int:
    """The default budget of a cache directory at `path`: a share of its disk. `used_bytes`: the bytes that the directory takes already."""
    for above in (path, *path.parents):
        with contextlib.suppress(OSError):
            disk = os.statvfs(above)
            return min(
                disk.f_blocks * disk.f_frsize // _DISK_SHARE,
                (used_bytes + disk.f_bavail * disk.f_frsize) // _FREE_SHARE,
            )
    return 0


class ReservedFile(LockedFile):
    """A file that is being written within the budget. It may first use the bytes that another file of the same build has reserved (`out_of`).

    `publish` gives the file its name. If the file is closed before that, it is removed, and its bytes go back to the budget.
    """

    def __init__(self, space: Space, path: Path, size: int, out_of: ReservedFile | None) -> None:
        self.path = path
        self.reserved_bytes = 0
        self._space = space
        self._out_of = out_of
        # The race: other processes take an unlocked file with the suffix `.reserved` for that of a dead process, and remove it. So the file is
        # locked under another name first.
        unseen = path.with_suffix("")
        super().__init__(space._retry(lambda: space._open(unseen, NEW_FILE)))
        try:
            with contextlib.suppress(OSError):  # some file systems have no such locks
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            space._rename(unseen, path)
            self.resize(size)
        except BaseException:
            self.close()
            raise

    def resize(self, size: int) -> None:
        """Reserve more bytes, or give some back, and set the file's size. Raises CacheFullError, or another OSError."""
        more = on_disk(size) - self.reserved_bytes
        if more > 0 and self._out_of is not None:
            shared = min(more, self._out_of.reserved_bytes)
            self._out_of._set(self._out_of.reserved_bytes - shared)
            self.reserved_bytes, more = self.reserved_bytes + shared, more - shared
        if more > 0:
            self._space.take("segments", more)
            self.reserved_bytes += more
        os.ftruncate(self.fd, size)
        if more < 0:
            with contextlib.suppress(OSError):  # the bytes go back when the file is closed, or with the next recount
                self._space.take("segments", more)
                self.reserved_bytes += more

    def _set(self, size: int) -> None:
        self.reserved_bytes = size
        os.ftruncate(self.fd, size)

    def publish(self, path: Path) -> None:
        """Give the file its name. Raises OSError if the file cannot be renamed."""
        self._space._rename(self.path, path)
        self.reserved_bytes = 0
        # The lock is released after the rename: under its old name, an unlocked file would be taken for that of a dead process.
        with contextlib.suppress(OSError):
            fcntl.flock(self.fd, fcntl.LOCK_UN)  # readers lock it themselves

    def close(self) -> None:
        """Close the file, and remove it if it was not published."""
        if self.fd < 0:
            return
        fd = self.take()
        self._space._remove(self.path)
        os.close(fd)
        with contextlib.suppress(OSError):
            self._space.take("segments", -self.reserved_bytes)
        self.reserved_bytes = 0


class Space(Directory, abc.ABC):
    """A directory with a budget. `max_bytes`: the budget in bytes; None: a quarter of the disk, or half of the free bytes if that is less."""

    def __init__(
        self,
        root: Path,
        max_bytes: int | None,
        metrics: CacheMetricGroup,
        now_s: Callable[[], float],
        creates: bool = True,
    ) -> None:
        super().__init__(root, metrics, now_s, creates)
        self._max_bytes = max_bytes
        self._turns = threading.Lock()

    def budget(self) -> int:
        """The bytes that the directory may take now."""
        return self._limit(self._read_usage() or Usage())

    def _limit(self, usage: Usage) -> int:
        return self._max_bytes if self._max_bytes is not None else default_budget(self._root, usage.total)

    def lacks(self, kind: Kind, amount: int) -> int:
        """How many bytes must be freed before `amount` bytes can be taken; 0 or less if none."""
        usage = self._read_usage() or Usage()
        limit = self._limit(usage)
        return usage.total + amount - (limit if kind == "records" else limit - limit // RECORDS_SHARE)

    def take(self, kind: Kind, amount: int) -> None:
        """Take bytes from the budget, and evict files if there are not enough. A negative `amount` gives bytes back.

        Raises CacheFullError if there is no room, another OSError if the directory fails.
        """
        if not amount:
            return
        for attempt in range(_TRIES):
            with self._account() as usage:
                if amount < 0 or self._has_room(usage, kind, amount):
                    usage.add(kind, amount)
                    return
            if attempt + 1 < _TRIES:
                self._make_room(kind, amount)
        raise self._full(amount, kind)

    def _has_room(self, usage: Usage, kind: Kind, amount: int) -> bool:
        limit = self._limit(usage)
        return usage.total + amount <= (limit if kind == "records" else limit - limit // RECORDS_SHARE)

    def most(self) -> int:
        """The most bytes that the segments of this directory can have once everything else is evicted."""
        usage = self._read_usage() or Usage()
        limit = self._limit(usage)
        return max(limit - limit // RECORDS_SHARE - usage.records, 0)

    def _full(self, amount: int, kind: Kind = "segments") -> CacheFullError:
        usage = self._read_usage() or Usage()
        limit = self._limit(usage)
        limit_name = "lookup.cache.max-bytes" if self._max_bytes is not None else "its share of the disk"
        kept = "" if kind == "records" else f", and {_size(limit // RECORDS_SHARE)} are kept for records"
        problem = CacheFullError(
            f"{_size(amount)} more do not fit into the cache directory {self._root.parent}: {limit_name} is {_size(limit)}, of which "
            f"{_size(usage.total)} are in use{kept}{self._free_space(amount)}. Raise lookup.cache.max-bytes, or cache less: set lookup.cache = 'PARTIAL' or 'NONE' for some tables"
        )
        problem.more = amount
        return problem

    def _free_space(self, amount: int) -> str:
        """The part of an error's text that says that the disk is full; "" if the disk is not full."""
        with contextlib.suppress(OSError):
            disk = os.statvfs(self._root.parent)
            free = disk.f_bavail * disk.f_frsize
            return f", and its disk is full ({_size(free)} free)" if free < max(amount, 2 * PAGE) else ""
        return ""

    @abc.abstractmethod
    def _make_room(self, kind: Kind, amount: int) -> None:
        """Evict the least valuable files until `amount` bytes of a kind can be taken."""

    # --- the account ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _account(self) -> Iterator[Usage]:
        """The account, for a `with` block that may change it. The block holds the account's lock, and the account is written back at its end.

        Raises OSError if another process keeps the lock.
        """
        # The threads of this process queue for a mutex first. If all of them polled for the file's lock, one might wait for ever.
        with self._turns, self._lock("usage.lock"), self._open_account() as fd:
            before = _parse(fd)
            usage = dataclasses.replace(before) if before is not None else self._count()
            yield usage
            if usage != before:
                text = _USAGE % (usage.blocks, usage.segments, usage.records)
                os.ftruncate(fd, len(text))
                os.pwrite(fd, text.encode(), 0)

    @contextlib.contextmanager
    def _open_account(self) -> Iterator[int]:
        path = self._root / "usage"
        try:
            with use_file(path) as fd:
                is_usable = is_own_file(os.fstat(fd))
        except OSError as problem:
            is_usable = isinstance(problem, FileNotFoundError)
        if not is_usable:  # e.g. a link, a socket or a directory
            self._remove_tree(path)
        with self._use(path, os.O_RDWR | os.O_CREAT) as fd:
            yield fd

    def _read_usage(self) -> Usage | None:
        """The account, read without its lock; None if there is no account."""
        with contextlib.suppress(OSError), use_file(self._root / "usage") as fd:
            return _parse(fd)
        return None

    def usage(self) -> Usage:
        """The bytes that the directory's files take, according to the account. The files are counted only if there is no account."""
        return self._read_usage() or self._count()

    def recount(self) -> None:
        """Correct the account by counting the files on disk. It becomes wrong if writers are killed, or files are removed by hand."""
        before = self._read_usage()
        counted = self._count()
        with self._account() as usage:
            # The race: other processes change the account while the files are counted. So their changes are added to the result.
            changed = before or dataclasses.replace(usage)
            usage.blocks = max(counted.blocks + usage.blocks - changed.blocks, 0)
            usage.records = max(counted.records + usage.records - changed.records, 0)
            usage.segments = self._count_segments()

    def _count(self) -> Usage:
        """The bytes that the files of the directory take, by listing them. Locks and claims do not count: they are small, and few."""
        blocks = sum(size for _, size, _ in self._walk(self._root / "blocks")) + self._count_directories()
        records = sum(size for kind in ("records", "counters") for _, size, _ in self._walk(self._root / kind))
        records += self._count_temporary()
        return Usage(blocks, self._count_segments(), records)

    def _count_directories(self) -> int:
        """The bytes of the directories with blocks, without the 256 shards. If the files are small, these are more than the bytes of the
        files."""
        shards = list_directories(self._root / "blocks")
        return PAGE * sum(len(names) for shard in shards for _, names, _ in os.walk(shard))

    def _count_temporary(self) -> int:
        """The bytes of temporary files, of killed writers and live ones. A file that also has its final name is counted under that name."""
        size = 0
        for name in list_names(self._root / "tmp"):
            with contextlib.suppress(OSError):
                status = (self._root / "tmp" / name).lstat()
                if status.st_nlink == 1 and not name.endswith(_RESERVED):
                    size += on_disk(status.st_size)
        return size

    def _count_segments(self) -> int:
        reserved = (size for _, size, path in self._walk(self._root / "tmp") if path.suffix == _RESERVED)
        return sum(size for _, size, _ in self._walk(self._root / "snapshots")) + sum(reserved)

    def _walk(self, root: Path) -> Iterator[tuple[float, int, Path]]:
        """(last use, bytes on disk, path) of each file below a directory."""
        for directory, _, names in os.walk(root):
            check()
            for name in names:
                path = Path(directory) / name
                with contextlib.suppress(OSError):
                    status = path.lstat()
                    yield status.st_mtime, on_disk(status.st_size), path

    # --- files within the budget ------------------------------------------------------------------

    def reserve(self, size: int, out_of: ReservedFile | None = None) -> ReservedFile:
        """A new file of `size` bytes within the budget. Raises CacheFullError, or another OSError if the file cannot be written."""
        return ReservedFile(self, self._root / "tmp" / f"{os.urandom(16).hex()}{_RESERVED}", size, out_of)

    def _reserved(self) -> Iterator[tuple[Path, bool]]:
        """(path, whether its writer has died) of each reserved file that was not published."""
        for path in list_entries(self._root / "tmp"):
            if path.suffix != _RESERVED:
                continue
            with contextlib.suppress(OSError), use_file(path) as fd:
                yield path, is_unlocked(fd)

    def _leftovers(self, now_s: float) -> list[Path]:
        """Old temporary files of killed writers. Files of live writers are left out, however old they are."""
        living = {path for path, is_dead in self._reserved() if not is_dead}
        return [path for path in super()._leftovers(now_s) if path not in living]

    def _drop(self, kind: Kind, path: Path) -> bool:
        """Remove a file and give its bytes back to the budget. Returns whether this call has removed the file."""
        try:
            size = path.lstat().st_size
        except OSError:
            return False
        if not self._remove(path):
            return False
        with contextlib.suppress(OSError):
            self.take(kind, -on_disk(size))
        return True


def _parse(fd: int) -> Usage | None:
    """The usage in an account file; None if the file is damaged."""
    try:
        if not is_own_file(os.fstat(fd)):
            return None
        blocks, segments, records = map(int, os.pread(fd, 128, 0).split())
        return Usage(blocks, segments, records) if min(blocks, segments, records) >= 0 else None
    except (OSError, ValueError):
        return None


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            break
        count /= 1000
        if unit == "GB":
            return f"{count:,.1f} TB"
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
