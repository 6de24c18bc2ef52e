"""`Directory`: a private directory of the host, in which each file is complete or missing, because files get their names by rename or link.

A marker file says that the directory is a cache of lookupcache. Without the marker, nothing in the directory is removed, and nothing is
added. Files in the directory are written and removed through the descriptors of their directories, without following links.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import hashlib
import os
import re
import stat
import struct
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from pyspark_lookup.core.decoding import as_name
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.errors import CacheDirectoryError, raise_ours

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class PlaceTakenError(OSError):
    """A link or a file is in the place of a directory."""


@contextlib.contextmanager
def open_below(root: str | os.PathLike[str], names: Sequence[str], mode: int | None = None) -> Iterator[int]:
    """A descriptor of the directory `names` below `root`. The path of `root` itself may contain links.

    `mode`: missing directories are created with this mode, and synced to disk; None: they are not created, and FileNotFoundError is raised.
    Raises the other errors of `descend`, too.
    """
    fd = descend(os.open(root, DIRECTORY), names, os.fspath(root), mode, durable=True)
    try:
        yield fd
    finally:
        os.close(fd)


def descend(
    fd: int, names: Sequence[str], root: str, mode: int | None, durable: bool, made: list[str] | None = None
) -> int:
    """A descriptor of the directory `names` below the open directory `fd`, which is closed. `root`: the path of `fd`, for errors.

    `mode`: the mode of missing directories, which are then made; None: a missing directory raises FileNotFoundError. `durable`: whether new
    directories must survive a crash. `made`: the names of new directories are added to it. Raises PlaceTakenError for a link or a file where
    a directory should be.
    """
    for depth, name in enumerate(names):
        try:
            below = _enter(fd, name, mode, durable, made)
        except NotADirectoryError:
            raise PlaceTakenError(
                f"{os.path.join(root, *names[: depth + 1])} is a link or a file where a directory should be, so nothing is written "
                "or removed there: move it away"
            ) from None
        finally:
            os.close(fd)
        fd = below
    return fd


def _enter(above: int, name: str, mode: int | None, durable: bool, made: list[str] | None = None) -> int:
    """A descriptor of the directory `name` in the open directory `above`. Raises NotADirectoryError for a file or a link."""
    while True:
        try:
            return os.open(name, DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
        except FileNotFoundError:
            if mode is None:
                raise
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, mode, dir_fd=above)
                if made is not None:
                    made.append(name)
                if durable:
                    os.fsync(above)
        except OSError as problem:
            if problem.errno == errno.ELOOP:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name) from None
            raise


LAYOUT = "v1"
_MARKER_TRIES = 10
INNER = ("blocks", "records", "locks", "tmp", "snapshots", "claims", "counters")
MARKER = "CACHEDIR.TAG"  # name and first line follow bford.info/cachedir, by which backups leave caches out
_MARKER_TEXT = (
    b"Signature: 8a477f597d28d172789f06886806bc55\n"
    b"# A cache directory of lookupcache (pyspark_lookup), which removes what lies in it.\n"
)
MAGIC, SEGMENT_MAGIC = b"LKUPBLK1", b"LKUPSEG1"

_MARKER_BEGUN = re.compile(rf"\.{re.escape(MARKER)}\.[0-9a-f]{{16}}")
_HEX, _NAME = "[0-9a-f]", "[^/]+"
# The files that a release without markers made in a cache directory: the form of their names, and the first bytes of these files (b"": any
# bytes; None: the files are empty).
_CACHE_FILES = {
    re.compile(rf"blocks/{_HEX}{{2}}/{_HEX}{{32}}/{_HEX}{{32}}/[0-9]+-[0-9]+"): MAGIC,
    re.compile(rf"records/{_NAME}/{_NAME}|counters/{_NAME}"): MAGIC,
    re.compile(rf"snapshots/{_HEX}{{32}}/{_NAME}(?<!\.used)"): SEGMENT_MAGIC,
    re.compile(rf"snapshots/{_HEX}{{32}}/{_NAME}\.used|claims/{_NAME}/{_NAME}-{_HEX}{{32}}"): b"",
    re.compile(rf"tmp/{_HEX}{{32}}(?:\.reserved)?|usage"): b"",
    re.compile(rf"locks/[a-z]+-{_HEX}+|[a-z]+\.lock|swept"): None,
}


def make_whole(root: Path) -> None:
    """Make the cache directory `root`, private and marked, with its fixed subdirectories. Raises CacheDirectoryError if that is
    impossible."""
    for _ in range(_MARKER_TRIES):
        with contextlib.suppress(FileNotFoundError):  # the race: another process removes the directory meanwhile
            _make_whole(root)
            return
    raise CacheDirectoryError(
        f"cache directory {root} cannot be used: something removes it again and again; set lookup.cache.dir to another place"
    )


def _make_whole(root: Path) -> None:
    status, layout = _directory(root), root / LAYOUT
    if _mode(status) & 0o077 and not _is_ours_alone(root):
        raise _open_to_others(root, _mode(status))
    _set_private(root, status)
    inner = _directory(layout)
    _mark(layout)
    if _mode(inner) & 0o022:
        raise _open_to_others(layout, _mode(inner))
    _set_private(layout, inner)
    for name in INNER:
        _set_private(layout / name, _directory(layout / name, instead=True))


def check_ours(root: Path) -> None:
    """Raise CacheDirectoryError unless `root` is a private cache directory of lookupcache. Makes nothing."""
    layout = root / LAYOUT
    if not is_marked(layout):
        raise CacheDirectoryError(
            f"{root} is not a cache directory of lookupcache (it has no {LAYOUT}/{MARKER}), so nothing in it is read or removed: "
            "give the directory that lookup.cache.dir names"
        )
    for path in (root, layout):
        mode = _mode(_status(path))
        if mode & 0o077:
            raise _open_to_others(path, mode)


def is_cache_directory(root: Path) -> bool:
    """Whether a directory is marked as a cache of lookupcache."""
    return is_marked(root / LAYOUT)


def is_marked(layout: Path) -> bool:
    """Whether a directory has the marker. False for a link to a directory."""
    try:
        directory = os.open(layout, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fd = os.open(MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return False
    finally:
        os.close(directory)
    try:
        status = os.fstat(fd)
        is_file = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        return is_file and os.read(fd, len(_MARKER_TEXT) + 1) == _MARKER_TEXT
    except OSError:
        return False
    finally:
        os.close(fd)


def _mark(layout: Path) -> None:
    """Write the marker unless there is one. The directory must be empty, or be the cache of an earlier release."""
    if is_marked(layout):
        return
    foreign = _foreign(layout)
    if foreign is not None and not is_marked(layout):  # another process may have written the marker first
        raise CacheDirectoryError(
            f"{layout} has no {MARKER}, and {foreign} in it does not belong to a cache, so nothing is changed in there: set lookup.cache.dir to another place"
        )
    temporary = layout / f".{MARKER}.{os.urandom(8).hex()}"
    try:
        with open(temporary, "xb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o600)) as file:
            file.write(_MARKER_TEXT)
            file.flush()
            os.fsync(file.fileno())  # after a crash, an empty marker would look like a file of another program
        os.replace(temporary, layout / MARKER)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise_ours(_unusable(layout, error), error)


def _foreign(layout: Path) -> str | None:
    """The name of an entry that no release of lookupcache has made; None if there is none."""
    for directory, directories, names in os.walk(layout):
        below = os.path.relpath(directory, layout)
        if below == ".":
            unknown_names = [name for name in directories if name not in INNER]
            names = [name for name in names if not _MARKER_BEGUN.fullmatch(name)]
            # A marker with another text counts as ours, but damaged, if there are cache files beside it.
            if MARKER in names and _is_cache(layout):
                names.remove(MARKER)
            if unknown_names:
                return unknown_names[0]
        else:
            names = [f"{below}/{name}" for name in names]
        links = [name for name in directories if os.path.islink(os.path.join(directory, name))]
        for name in (*links, *names):
            if not _is_of_ours(layout / name, name):
                return name
    return None


def _is_cache(layout: Path) -> bool:
    """Whether the directory has a file with the name and the first bytes of a cache file."""
    beginnings = {pattern: begin for pattern, begin in _CACHE_FILES.items() if begin}
    names = (str(path.relative_to(layout)) for path in layout.rglob("*"))
    return any(
        pattern.fullmatch(name) is not None and _is_of_ours(layout / name, name)
        for name in names
        for pattern in beginnings
    )


def _is_of_ours(path: Path, name: str) -> bool:
    for pattern, begin in _CACHE_FILES.items():
        if pattern.fullmatch(name):
            try:
                status = path.lstat()
                if not stat.S_ISREG(status.st_mode) or (begin is None and status.st_size):
                    return False
                with open(path, "rb") as file:
                    return not begin or file.read(len(begin)) == begin
            except FileNotFoundError:  # gone by now
                return True
            except OSError:
                return False
    return False


def _is_ours_alone(root: Path) -> bool:
    """Whether a directory has a cache of lookupcache and nothing else, and only this user can write to the cache."""
    layout = root / LAYOUT
    try:
        return is_marked(layout) and not _mode(_status(layout)) & 0o022 and os.listdir(root) == [LAYOUT]
    except OSError:
        return False


def _set_private(path: Path, status: os.stat_result) -> None:
    """Set a directory's mode to 0700 if others have any permission."""
    if _mode(status) & 0o077:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchmod(fd, 0o700)
        finally:
            os.close(fd)


def _mode(status: os.stat_result) -> int:
    return stat.S_IMODE(status.st_mode)


def _unusable(path: Path, error: OSError) -> OSError:
    """The CacheDirectoryError for an OSError. A FileNotFoundError is returned unchanged, because callers then try again."""
    return (
        error
        if isinstance(error, FileNotFoundError)
        else CacheDirectoryError(
            f"cache directory {path} cannot be used ({error}): repair it, or set lookup.cache.dir to another place"
        )
    )


def _open_to_others(path: Path, mode: int) -> CacheDirectoryError:
    and_empty = ", and remove the files that others may have put into it" if mode & 0o022 else ""
    return CacheDirectoryError(
        f"cache directory {path} is open to other users (mode {mode:o}): chmod 700 it{and_empty}"
    )


def _directory(path: Path, instead: bool = False) -> os.stat_result:
    """Make a directory if it is missing, and return its status. `instead`: whether to replace a file of that name."""
    try:
        _make(path)
        if instead and stat.S_ISREG(path.lstat().st_mode):
            os.unlink(path)
            _make(path)
    except OSError as error:
        raise_ours(_unusable(path, error), error)
    return _status(path)


def _make(path: Path) -> None:
    """Make a directory with mode 0700, and the missing directories above it."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except FileNotFoundError:
        _make(path.parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)


def _status(path: Path) -> os.stat_result:
    try:
        status = os.lstat(path)
    except OSError as error:
        raise_ours(_unusable(path, error), error)
    if not stat.S_ISDIR(status.st_mode):
        raise CacheDirectoryError(
            f"cache directory {path} is not a directory (links are refused): set lookup.cache.dir to another place"
        )
    if status.st_uid != os.geteuid():
        raise CacheDirectoryError(
            f"cache directory {path} belongs to user {status.st_uid}, not to {os.geteuid()}: set lookup.cache.dir to another place"
        )
    return status


Self = TypeVar("Self", bound="Directory")
T = TypeVar("T")

_HEADER = struct.Struct("<8sQI16s")
HEADER_BYTES = _HEADER.size
NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL
_TRIES = 5  # attempts to act in a directory that others are removing
_LOCK_POLL_S, _ACQUIRE_POLL_S = 0.001, 0.01
_LOCK_WAIT_S = 1.0  # the wait for a lock that is held for short work only; a longer wait would delay reads
LEFTOVER_AFTER_S = 3600.0  # after this time an unfinished file counts as left by a killed writer
CONTENT_AT_MOST = 512 * 1024 * 1024  # bytes of a record or claim; those that we write are far smaller


def key_of(*parts: object) -> str:
    """A hash of the texts of some parts, as 32 hex digits. Parts such as ("ab", "c") and ("a", "bc") have different hashes."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        text = _encode(str(part))
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()


def digest_of(*parts: object) -> str:
    """A hash of the texts of some parts, as 15 hex digits: 60 bits, so that a BIGINT also has room for the number of the table's kind."""
    return key_of(*parts)[:15]


def key_of_texts(texts: Sequence[str]) -> str:
    """A hash of many texts, as 32 hex digits, computed without a hashing step for each text."""
    lengths = ",".join(map(str, map(len, texts)))
    return key_of(lengths, "".join(texts))


def _encode(text: str) -> bytes:
    """A text as UTF-8. Surrogate escapes become the bytes of the file name that they stand for; other lone surrogates are encoded like
    characters."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


class LockedFile:
    """A file that this process has open and locked, which shows others that the process lives. `fd`: -1 after it was closed.

    A forked child closes its copy: otherwise the file would seem to have a live owner after the parent's death.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._process = os.getpid()
        _locked_files.add(self)

    def take(self) -> int:
        """The descriptor, for the caller to close; -1 if the file is closed.

        `fd` is -1 before the file is closed: a child forked after the close would otherwise close another file that has got this number.
        """
        fd, self.fd = self.fd, -1
        return fd


_locked_files: weakref.WeakSet[LockedFile] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for file in list(_locked_files):
        if file.fd >= 0:
            os.close(file.take())


os.register_at_fork(after_in_child=_leave_to_parent)


class Lock(LockedFile):
    """A lock that is held until it is released or its process dies. A forked child does not hold it.

    The file of a lock of the kind limit has a small state, which the holder reads and writes. Nothing protects it from damage.
    """

    def read(self, size: int, at: int) -> bytes:
        """`size` bytes of the state; zeros after its end. Raises OSError."""
        return os.pread(self.fd, size, at).ljust(size, b"\0")

    def write(self, data: bytes, at: int) -> None:
        """Replace bytes of the state. Raises OSError."""
        os.pwrite(self.fd, data, at)

    def release(self) -> None:
        if self.fd >= 0:
            fd = self.take()
            try:
                # Just after a fork the child has the file open, too, so closing it here would not unlock it. The child itself must not unlock it:
                # it may free the lock of another thread of its parent before `_leave_to_parent` runs.
                if self._process == os.getpid():
                    fcntl.flock(fd, fcntl.LOCK_UN)
            finally:
                os.close(fd)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.release()


class Directory:
    """The directory `root` of one user, for all worker processes of the host, with locks, and with files that are complete or missing.

    The next writer makes missing directories again. If `creates` is false, the directory must exist and have the marker. The constructor
    raises CacheDirectoryError if the directory is not private to this user, or has other programs' files.

    Everything is written and removed through `_open_parent` or `_use`, which follow no link and work only below a directory with the marker.
    """

    def __init__(self, root: Path, metrics: CacheMetricGroup, now_s: Callable[[], float], creates: bool = True) -> None:
        self._root = root / LAYOUT
        self._metrics = metrics
        self._now_s = now_s
        self._creates = creates
        if creates:
            make_whole(root)
        else:
            check_ours(root)

    @contextlib.contextmanager
    def _open_parent(self, path: Path, makes: bool = False) -> Iterator[tuple[int, str]]:
        """(a descriptor of the directory in which a path lies, the path's name in this directory), for a `with` block.

        `makes`: whether to make missing directories; if not, they raise FileNotFoundError. Raises CacheDirectoryError or PlaceTakenError if a
        directory on the way does not belong to the cache.
        """
        names = str(path)[len(str(self._root)) + 1 :].split("/")
        try:
            fd = self._open_directory(names[:-1], makes)
        except (FileNotFoundError, PlaceTakenError):
            if not (makes and self._creates):
                raise
            self._clear_way(path)
            make_whole(self._root.parent)
            fd = self._open_directory(names[:-1], makes)
        try:
            yield fd, names[-1]
        except OSError as problem:
            if problem.filename == names[-1]:
                problem.filename = str(path)
            raise
        finally:
            os.close(fd)

    def _open_directory(self, names: Sequence[str], makes: bool) -> int:
        """A descriptor of a directory below the root. Raises FileNotFoundError unless the root is private, belongs to this user and has the
        marker."""
        root = str(self._root)
        try:
            fd = os.open(root, DIRECTORY | os.O_NOFOLLOW)
        except NotADirectoryError:
            raise PlaceTakenError(f"{root} is no longer a directory") from None
        try:
            status = os.fstat(fd)
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise FileNotFoundError(errno.ENOENT, "the cache directory has been replaced", root)
            os.stat(MARKER, dir_fd=fd, follow_symlinks=False)
        except OSError:
            os.close(fd)
            raise
        return descend(fd, names, root, 0o700 if makes else None, durable=False)

    def _clear_way(self, path: Path) -> None:
        """Remove a file of this user if it is where a directory above `path` should be. Links stay."""
        for above in reversed(path.relative_to(self._root).parents[:-1]):
            with contextlib.suppress(OSError):
                if is_own_file((self._root / above).lstat()):
                    self._remove(self._root / above)

    def _retry(self, act: Callable[[], T]) -> T:
        """The result of `act`. If it raises FileNotFoundError, it is called again.

        The race: another process may remove a directory that `act` has just found or made.
        """
        for _ in range(_TRIES):
            with contextlib.suppress(FileNotFoundError):
                return act()
        return act()

    @contextlib.contextmanager
    def _use(self, path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
        """A descriptor of a file, as from `use_file`, for a `with` block. With O_CREAT, missing directories above the file are made."""
        fd = self._retry(lambda: self._open(path, flags)) if flags & os.O_CREAT else self._open(path, flags)
        try:
            yield fd
        finally:
            os.close(fd)

    def _open(self, path: Path, flags: int) -> int:
        with self._open_parent(path, bool(flags & os.O_CREAT)) as (directory, name):
            fd = open_file(name, flags, directory)
            status = os.fstat(fd)
            if flags & os.O_CREAT and not (is_own_file(status) and status.st_nlink <= 1):
                # The file will be written in place. If it has another hard link, that may be a document of the user, so it is not written.
                os.close(fd)
                self._remove(path)
                fd = open_file(name, flags, directory)
            return fd

    def counting(self: Self, metrics: CacheMetricGroup) -> Self:
        """The same directory with other counters. It is not opened and checked again."""
        twin = copy.copy(self)
        twin._metrics = metrics
        return twin

    # --- locks ------------------------------------------------------------------------------------

    def acquire(self, kind: str, name: str, timeout_s: float) -> Lock | None:
        """Acquire this host's lock `name`; None if another process still holds it after `timeout_s` (>= 0).

        Release the lock when done. The kernel releases it if the process dies. Raises OSError if the directory cannot be written. The names
        of a kind share 4096 lock files, except for the kinds reload and limit, where each has its own. To avoid deadlocks, wait for a lock only while
        holding none, or one of an earlier kind in the order discover, reload, resolve, refresh, block, derive.
        """
        path, until_s = self.lock_path(kind, name), time.monotonic() + timeout_s
        while True:
            lock = self._retry(lambda: self._try_lock(path))
            if lock is not None or time.monotonic() >= until_s:
                return lock
            time.sleep(_ACQUIRE_POLL_S)

    def _try_lock(self, path: Path) -> Lock | None:
        """Lock a file; None if another process or thread holds its lock."""
        with self._open_parent(path, makes=True) as (directory, name):
            return _lock_file(directory, name)

    def acquire_free(self, kind: str, names: Iterable[str]) -> dict[str, Lock | None]:
        """The locks of one kind, by their names: those that are free are acquired, as with `acquire`; None for the others.

        Names that share a lock file have one lock. The directory of the locks is opened only once. Raises OSError if it cannot be written;
        then no lock is held.
        """
        files = {name: self.lock_path(kind, name).name for name in names}

        def lock_all() -> dict[str, Lock | None]:
            locks: dict[str, Lock | None] = {}
            with (
                contextlib.ExitStack() as undo,
                self._open_parent(self._root / "locks" / kind, makes=True) as (directory, _),
            ):
                for file in {*files.values()}:
                    lock = locks[file] = _lock_file(directory, file)
                    if lock is not None:
                        undo.callback(lock.release)
                undo.pop_all()
            return locks

        locks = self._retry(lock_all)
        return {name: locks[file] for name, file in files.items()}

    @contextlib.contextmanager
    def hold(self, kind: str, name: str, timeout_s: float) -> Iterator[bool]:
        """`acquire` a lock, and release it at the end of a `with` block. Yields whether it was acquired."""
        lock = self.acquire(kind, name, timeout_s)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                lock.release()

    def lock_path(self, kind: str, name: str) -> Path:
        """The path of the file for a lock. Several names may share a file, and then exclude each other."""
        shared = key_of(name) if kind in ("reload", "limit") else key_of(name)[:3]
        return self._root / "locks" / f"{kind}-{shared}"

    def use_lock(self, path: Path) -> None:
        """Show other processes that the holder of a lock makes progress. Errors are ignored."""
        with contextlib.suppress(OSError), self._use(path) as fd:
            os.utime(fd)

    def latest_lock_use(self, path: Path) -> int:
        """When `use_lock` was last called for a lock, in ns (Unix time); 0 if there is no such lock."""
        with contextlib.suppress(OSError), use_file(path) as fd:
            return os.fstat(fd).st_mtime_ns
        return 0

    @contextlib.contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        """Hold one of the directory's own locks during a `with` block.

        Raises TimeoutError if another process keeps it, another OSError if the directory is gone.
        """
        path = self._root / name
        with self._use(path, os.O_RDWR | os.O_CREAT) as fd:
            if not lock_soon(fd, fcntl.LOCK_EX):
                raise TimeoutError(
                    errno.ETIMEDOUT,
                    "another process has held the lock for too long: end that process if it hangs",
                    str(path),
                )
            try:
                yield
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)  # closing does not unlock it if a forked child has it open as well

    # --- files ------------------------------------------------------------------------------------

    def _place(self, *names: str) -> Path:
        """The path of these names below the root. They may come from a record, so a name that leads elsewhere raises OSError."""
        try:
            return self._root.joinpath(*map(as_name, names))
        except ValueError as problem:
            raise OSError(errno.EINVAL, str(problem)) from None

    def _temporary(self) -> Path:
        """A path in `tmp/` that no other writer uses."""
        return self._root / "tmp" / os.urandom(16).hex()

    @contextlib.contextmanager
    def _temporary_file(self, data: bytes) -> Iterator[tuple[int, str]]:
        """(a descriptor of the directory, the name) of a temporary file with `data`, which is removed at the end of the `with` block."""
        with (
            self._open_parent(self._temporary(), makes=True) as (directory, name),
            use_temporary(directory, name, data),
        ):
            yield directory, name

    def _publish(self, path: Path, data: bytes) -> None:
        def publish() -> None:
            with self._temporary_file(data) as (source, name), self._open_parent(path, makes=True) as (target, new):
                os.replace(name, new, src_dir_fd=source, dst_dir_fd=target)

        self._retry(publish)

    def _publish_new(self, path: Path, data: bytes) -> bool:
        """Publish a file unless there is one. Returns whether there was none."""

        def publish() -> bool:
            with self._temporary_file(data) as (source, name), self._open_parent(path, makes=True) as (target, new):
                try:
                    # A link fails if the name exists, unlike a rename.
                    os.link(name, new, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
                except FileExistsError:
                    return False
            return True

        return self._retry(publish)

    def _rename(self, path: Path, new: Path) -> None:
        """Rename a file. A file that has the new name is replaced. Raises FileNotFoundError if the file to rename is gone."""
        with self._open_parent(path) as (source, name), self._open_parent(new, makes=True) as (target, new_name):
            os.replace(name, new_name, src_dir_fd=source, dst_dir_fd=target)

    def _remove(self, path: Path) -> bool:
        """Remove a file, or the link in its place. Returns whether this call has removed it."""
        try:
            with self._open_parent(path) as (directory, name):
                os.unlink(name, dir_fd=directory)
        except OSError:
            return False
        return True

    def _make_directory(self, path: Path) -> bool:
        """Make a directory. Returns whether it was missing."""
        with self._open_parent(path, makes=True) as (directory, name):
            try:
                os.mkdir(name, 0o700, dir_fd=directory)
            except FileExistsError:
                return False
            return True

    def _remove_directory(self, path: Path) -> bool:
        """Remove an empty directory. Returns whether this call has removed it."""
        try:
            with self._open_parent(path) as (directory, name):
                os.rmdir(name, dir_fd=directory)
        except OSError:
            return False
        return True

    def _remove_tree(self, path: Path) -> None:
        """Remove a file, or a directory with everything in it, as far as possible."""
        if self._remove(path):
            return
        with contextlib.suppress(OSError), self._open_parent(path) as (above, name):
            for _, directories, names, directory in os.fwalk(name, topdown=False, dir_fd=above):
                for below in (*names, *directories):
                    with contextlib.suppress(OSError):
                        os.unlink(below, dir_fd=directory)
                    with contextlib.suppress(OSError):
                        os.rmdir(below, dir_fd=directory)
            os.rmdir(name, dir_fd=above)

    def _leftovers(self, now_s: float) -> list[Path]:
        """Old temporary files, whose writers were killed."""
        return find_older(LEFTOVER_AFTER_S, now_s, list_entries(self._root / "tmp"))


def _lock_file(directory: int, name: str) -> Lock | None:
    """Lock a file in an open directory; None if another process or thread holds its lock. A missing file is made."""
    fd = open_file(name, os.O_RDWR | os.O_CREAT, directory)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The race: if the file was removed after it was opened here, others lock the new file of that name, and this lock excludes
        # nobody. So the lock counts only if the name still leads to the locked file.
        if os.fstat(fd).st_ino == os.stat(name, dir_fd=directory, follow_symlinks=False).st_ino:
            return Lock(fd)
    except BlockingIOError:
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


@contextlib.contextmanager
def use_temporary(directory: int, name: str, data: bytes) -> Iterator[None]:
    """A new file with `data` in an open directory. It is removed at the end of the `with` block, unless it has another name by then."""
    try:
        with open(open_file(name, NEW_FILE, directory), "wb") as file:
            file.write(data)
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=directory)


@contextlib.contextmanager
def use_file(path: Path) -> Iterator[int]:
    """A descriptor of a file to read, for a `with` block. Follows no link and does not wait for the writer of a pipe. Raises the errors of
    `os.open`."""
    fd = open_file(path)
    try:
        yield fd
    finally:
        os.close(fd)


def open_file(path: str | Path, flags: int = os.O_RDONLY, directory: int | None = None) -> int:
    """Open a file as `use_file` does. The caller closes the descriptor. `directory`: an open directory, in which `path` is a name."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=directory)


def sync_directory(path: str | Path) -> None:
    """Flush a directory to the disk, so that the names in it survive a crash. Raises OSError if that fails."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_own_file(status: os.stat_result) -> bool:
    """Whether `status` is that of a regular file of this user."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def lock_soon(fd: int, kind: int) -> bool:
    """Lock a file (`kind`: as in `fcntl`). Returns False if that takes longer than `_LOCK_WAIT_S`, because the holder may be suspended."""
    until_s = time.monotonic() + _LOCK_WAIT_S
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= until_s:
            return False
        time.sleep(_LOCK_POLL_S)


def is_unlocked(fd: int) -> bool:
    """Whether nobody holds a lock on a file. If so, the process that made the file has ended. Raises OSError if the file cannot be locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True


def read_content(path: Path, at_most: int = CONTENT_AT_MOST) -> tuple[bytes, float]:
    """(bytes, modification time) of a file made by `wrap`. The bytes are b"" for any other file, or for a file larger than `at_most`.

    If the file's size is not the one in its header, the file is not read. Raises OSError if there is no file, or the disk fails.
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


def list_names(path: Path | str) -> list[str]:
    """The names in a directory; none if it cannot be listed."""
    try:
        return os.listdir(path)
    except OSError:
        return []


def list_entries(path: Path) -> list[Path]:
    """The paths of everything in a directory; none if it cannot be listed."""
    return [path / name for name in list_names(path)]


def list_directories(path: Path) -> list[Path]:
    """The directories in a directory, without links; none if it cannot be listed."""
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        return [Path(entry) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []


def find_older(age_s: float, now_s: float, paths: Iterable[Path]) -> list[Path]:
    """The paths that were last modified more than `age_s` ago."""
    old_paths = []
    for path in paths:
        with contextlib.suppress(OSError):
            if now_s - path.lstat().st_mtime > age_s:
                old_paths.append(path)
    return old_paths


def list_entries_below(path: Path) -> list[Path]:
    """The paths of everything in the subdirectories of a directory."""
    entries: list[Path] = []
    for directory in list_directories(path):
        entries += list_entries(directory)
    return entries


def memory_backed(path: Path) -> bool:
    """Whether a directory lies on a file system in memory (tmpfs), as far as the operating system tells."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return False
    above = [(point, kind) for point, kind in mounts if path.resolve().is_relative_to(point)]
    return bool(above) and max(above, key=lambda mount: len(mount[0]))[1] in ("tmpfs", "ramfs")


def wrap(data: bytes | memoryview, name: str) -> bytes:
    name_digest = bytes.fromhex(key_of(name))
    return _HEADER.pack(MAGIC, len(data), zlib.crc32(data, zlib.crc32(name_digest)), name_digest) + data


def unwrap(blob: bytes, name: str) -> memoryview | None:
    """The payload of a file that `wrap` made for `name`; None if the file is damaged or was made for another name."""
    if len(blob) < HEADER_BYTES:
        return None
    magic, length, crc, name_digest = _HEADER.unpack_from(blob)
    if magic != MAGIC or length != len(blob) - HEADER_BYTES or name_digest != bytes.fromhex(key_of(name)):
        return None
    data = memoryview(blob)[HEADER_BYTES:]
    return data if zlib.crc32(data, zlib.crc32(name_digest)) == crc else None
