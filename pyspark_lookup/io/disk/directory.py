"""A private directory of the host and how files come and go in it: whole, by rename, or not at all."""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import hashlib
import os
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from pyspark_lookup.base.decoding import name_of
from pyspark_lookup.base.errors import CacheDirectoryError
from pyspark_lookup.base.metrics import CacheMetricGroup

Self = TypeVar("Self", bound="Directory")
Lock = FileLock  # a lock that is held: release() it

_LAYOUT = "v1"
_HEADER = struct.Struct("<8sQI16s")
HEADER_BYTES = _HEADER.size
_MAGIC = b"LKUPBLK1"
_LOCK_POLL_S = 0.001
_LOCK_WAIT_S = 1.0  # for the counter and for evictions: longer than either takes, short for a read that waits
LEFTOVER_AFTER_S = 3600.0
CONTENT_AT_MOST = 512 * 1024 * 1024  # bytes of a record or claim: none of ours comes near it


def key_of(*parts: object) -> str:
    """32 hex digits for any parts; equal for equal texts only (each is length-prefixed)."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        text = str(part).encode("utf-8", "surrogateescape")
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()


class Directory:
    """The directory `root` of one user, for all worker processes of the host; locks and whole files.

    Raises CacheDirectoryError on creation if the directory is not this user's own and private.
    """

    def __init__(self, root: Path, metrics: CacheMetricGroup, now_s: Callable[[], float]) -> None:
        self._root = root / _LAYOUT
        self._metrics = metrics
        self._now_s = now_s
        own_private_directory(root)
        own_private_directory(self._root)
        for name in ("blocks", "records", "locks", "tmp", "snapshots", "claims", "counters"):
            _own_directory(self._root / name)

    def counting(self: Self, metrics: CacheMetricGroup) -> Self:
        """This directory, opened and checked already, counting into another group."""
        twin = copy.copy(self)
        twin._metrics = metrics
        return twin

    # --- locks ------------------------------------------------------------------------------------

    def acquire(self, kind: str, name: str, timeout_s: float) -> Lock | None:
        """The held lock `name` of this host, or None if it was not had within `timeout_s` (>= 0).

        Release it when done; the kernel does if the process dies. OSError if the directory cannot
        be written. Names of one kind share 4096 lock files (those of kind reload have their own), so wait
        for a lock only while holding none, or one of an earlier kind in the order reload, resolve,
        refresh, block.
        """
        path = self.lock_path(kind, name)
        os.stat(path.parent)  # filelock would create it anew, open to others
        lock = FileLock(path)
        try:
            lock.acquire(timeout=timeout_s, poll_interval=0.01)
        except Timeout:
            return None
        return lock

    @contextlib.contextmanager
    def hold(self, kind: str, name: str, timeout_s: float) -> Iterator[bool]:
        """As `acquire`, released at the end of the block; whether it was had."""
        lock = self.acquire(kind, name, timeout_s)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                lock.release()

    def lock_path(self, kind: str, name: str) -> Path:
        """The file behind a lock: equal for names that exclude each other by chance."""
        shared = key_of(name)[:3] if kind != "reload" else key_of(name)
        return self._root / "locks" / f"{kind}-{shared}"

    @contextlib.contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        """Hold one of the directory's own locks. TimeoutError if it is not had soon, another OSError if the directory is gone."""
        path = self._root / name
        with use_file(path, os.O_RDWR | os.O_CREAT) as fd:
            until_s = time.monotonic() + _LOCK_WAIT_S
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= until_s:
                        raise TimeoutError(errno.ETIMEDOUT, "another process holds it for long", str(path)) from None
                    time.sleep(_LOCK_POLL_S)
            try:
                yield
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile holds it as well

    # --- files ------------------------------------------------------------------------------------

    def _place(self, *names: str) -> Path:
        """The file or directory of those names, which may come from another file. OSError for one that leads elsewhere."""
        try:
            return self._root.joinpath(*map(name_of, names))
        except ValueError as problem:
            raise OSError(errno.EINVAL, str(problem)) from None

    def _temporary(self) -> Path:
        """A name in `tmp/` that nobody else has."""
        return self._root / "tmp" / os.urandom(16).hex()

    def _write_temporary(self, data: bytes) -> Path:
        path = self._temporary()
        try:
            with open(path, "xb") as file:
                file.write(data)
        except OSError:
            self._remove(path)
            raise
        return path

    def _publish(self, path: Path, data: bytes) -> None:
        temporary = self._write_temporary(data)
        try:
            os.replace(temporary, path)
        except OSError:
            self._remove(temporary)
            raise

    def _publish_new(self, path: Path, data: bytes) -> bool:
        """`_publish` where there is no file yet; whether there was none."""
        temporary = self._write_temporary(data)
        try:
            os.link(temporary, path)  # fails if it exists, unlike rename
        except FileExistsError:
            return False
        finally:
            os.unlink(temporary)
        return True

    def _remove(self, path: Path) -> bool:
        try:
            os.unlink(path)
        except OSError:
            return False
        return True

    def _leftovers(self, now_s: float) -> list[Path]:
        """Files of writers that were killed."""
        return older_than(LEFTOVER_AFTER_S, now_s, (self._root / "tmp").iterdir())


def own_private_directory(path: Path) -> None:
    """Create `path` with mode 0700, or make sure that it is this user's own and private."""
    mode = stat.S_IMODE(_own_directory(path).st_mode)
    if mode & 0o077:
        and_empty = ", and remove what others may have put into it" if mode & 0o022 else ""
        raise CacheDirectoryError(
            f"cache directory {path} is open to other users (mode {mode:o}): chmod 700 it{and_empty}"
        )


def _own_directory(path: Path) -> os.stat_result:
    """What the system says of a directory of this user's, made with mode 0700 if it is not there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        status = os.lstat(path)
    except OSError as error:
        raise CacheDirectoryError(f"cache directory {path} cannot be used: {error}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise CacheDirectoryError(
            f"cache directory {path} is not a directory (links are refused): set lookup.cache.dir"
        )
    if status.st_uid != os.geteuid():
        raise CacheDirectoryError(
            f"cache directory {path} belongs to user {status.st_uid}, not to {os.geteuid()}: set lookup.cache.dir"
        )
    return status


@contextlib.contextmanager
def use_file(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """A descriptor of a file; no link in its place is followed, and no pipe waited for. OSError as `os.open`."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def sync_directory(path: str | Path) -> None:
    """Bring the names in a directory to the disk. OSError if that fails."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_own_file(status: os.stat_result) -> bool:
    """Whether that is a file of this user's: no directory, pipe, socket or device, and nobody else's."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def is_unlocked(fd: int) -> bool:
    """Whether nobody holds a lock on a file, and so whoever made it has ended. OSError if that cannot be asked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True


def content_of(path: Path, at_most: int = CONTENT_AT_MOST) -> tuple[bytes, float]:
    """(what a file made by `wrap` holds, when it was last touched); b"" for anything else that lies there, or a larger one.

    Nothing is read of what does not have the size that its header says. OSError if there is nothing, or the disk fails.
    """
    try:
        with use_file(path) as fd:
            status = os.fstat(fd)
            head = os.pread(fd, HEADER_BYTES, 0) if is_own_file(status) and status.st_size <= at_most else b""
            if len(head) < HEADER_BYTES or _HEADER.unpack(head)[1] != status.st_size - HEADER_BYTES:
                return b"", status.st_mtime
            with open(fd, "rb", closefd=False, buffering=0) as file:
                return file.read(), status.st_mtime
    except OSError as problem:
        if problem.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            return b"", 0.0
        raise


def names_in(path: Path) -> list[str]:
    """The names in a directory, none if it cannot be listed."""
    try:
        return os.listdir(path)
    except OSError:
        return []


def directories_in(path: Path) -> list[Path]:
    """The directories that lie in one, none if it cannot be listed; links to directories are left out."""
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        return [Path(entry) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []


def older_than(age_s: float, now_s: float, paths: Iterable[Path]) -> list[Path]:
    """Those of the paths that were last touched longer ago."""
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            if now_s - path.lstat().st_mtime > age_s:
                found.append(path)
    return found


def entries_below(path: Path) -> list[Path]:
    """What lies in the directories that lie in one."""
    found: list[Path] = []
    for directory in directories_in(path):
        with contextlib.suppress(OSError):
            found += directory.iterdir()
    return found


def memory_backed(path: Path) -> bool:
    """Whether a directory lies on tmpfs, as far as the system tells."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return False
    above = [(point, kind) for point, kind in mounts if path.resolve().is_relative_to(point)]
    return bool(above) and max(above, key=lambda mount: len(mount[0]))[1] in ("tmpfs", "ramfs")


def wrap(data: bytes | memoryview, name: str) -> bytes:
    bound = bytes.fromhex(key_of(name))
    return _HEADER.pack(_MAGIC, len(data), zlib.crc32(data, zlib.crc32(bound)), bound) + data


def unwrap(blob: bytes, name: str) -> memoryview | None:
    """The payload of a file made for `name`; None if anything about it is wrong."""
    if len(blob) < HEADER_BYTES:
        return None
    magic, length, crc, bound = _HEADER.unpack_from(blob)
    if magic != _MAGIC or length != len(blob) - HEADER_BYTES or bound != bytes.fromhex(key_of(name)):
        return None
    data = memoryview(blob)[HEADER_BYTES:]
    return data if zlib.crc32(data, zlib.crc32(bound)) == crc else None
