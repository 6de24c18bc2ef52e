"""`LocalStore`: files of this machine, read through the operating system, because fsspec rounds mtime_ns to a float."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from fsspec.implementations.local import make_path_posix

from pyspark_lookup.errors import SourceChangedError, UfsNotFoundError, UfsUnavailableError, raise_ours
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.storage.disk.directory import open_below, sync_directory
from pyspark_lookup.storage.stores.listed_files import ListedFiles, listed_local_files
from pyspark_lookup.storage.stores.store import (
    LOCAL_GRANULE_S,
    PART_OF_FILE,
    Count,
    FileVersion,
    Listing,
    is_entered,
    log_directories,
    read_error,
    split_path,
    translate_errors,
)

_WALKS = 5  # attempts to list a directory that is replaced during each attempt
_HELD_AT_MOST, _HELD_FILES = 8, 200_000  # the most listings that are cached, and the most files in all of them
_PUTS = 100  # attempts to put a file into a directory that others keep removing
_Inode = tuple[int, int]


class _Walk:
    """The files and subdirectories that a walk through a directory has met, in the order of the walk."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.times = array.array("q")  # for each file its size, mtime and ctime, both in ns
        self.inodes = array.array("Q")
        self.directories: set[str] = set()

    def add(self, name: str, status: os.stat_result) -> None:
        """Add a file, by its path below the directory."""
        self.names.append(name)
        self.times.extend((status.st_size, status.st_mtime_ns, status.st_ctime_ns))
        self.inodes.append(status.st_ino)

    @property
    def state(self) -> tuple[object, ...]:
        """A value that is equal for walks that met the same files in the same states. All names are one text, which is smaller than one
        object for each."""
        return "\0".join(self.names), self.times, self.inodes, self.directories

    def files(self, prefix: str, now_s: float) -> tuple[FileVersion, ...] | ListedFiles:
        """The files by URL, as columns if they are many. `prefix`: the directory's URL and a slash."""
        if len(self.names) >= ListedFiles.least:
            with contextlib.suppress(UnicodeEncodeError):  # a name that is not UTF-8
                return listed_local_files(prefix, self.names, self.times, self.inodes, now_s - LOCAL_GRANULE_S)
        numbers = zip(self.times[::3], self.times[1::3], self.times[2::3], self.inodes, strict=True)
        files = (_to_version(prefix + name, now_s, *row) for name, row in zip(self.names, numbers, strict=True))
        return tuple(sorted(files, key=lambda file: file.url))


def _to_version(url: str, now_s: float, size: int, mtime_ns: int, ctime_ns: int, inode: int) -> FileVersion:
    """The version of a file, from the values that a stat has returned."""
    return FileVersion(
        url,
        size,
        f"{mtime_ns}:{ctime_ns}:{inode}",
        _seconds(mtime_ns),
        # If the file's time is ahead of the clock, its age is unknown, so it counts as too new.
        settled=now_s - max(_seconds(mtime_ns), _seconds(ctime_ns)) > LOCAL_GRANULE_S,
    )


def _seconds(time_ns: int) -> float:
    seconds, rest_ns = divmod(time_ns, 10**9)
    return seconds + 1e-9 * rest_ns


def _inode(status: os.stat_result) -> _Inode:
    return status.st_dev, status.st_ino


@translate_errors
class LocalStore:
    """Files of this machine, or mounted on it. Their identity is (mtime_ns, ctime_ns, inode)."""

    scope = "file"
    pins = True
    lists_after = False

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()  # for `_held`
        self._held: dict[
            str, tuple[tuple[object, ...], Listing]
        ] = {}  # by directory: the state and the listing of the last walk

    def url_of(self, path: str) -> str:
        """The URL `file:///absolute/path` of a path in any spelling, without resolving links."""
        return "file://" + self._path(path)

    @staticmethod
    def _path(path: str) -> str:
        if path.startswith("file:") and not path.startswith("file://"):
            path = path.removeprefix("file:")
        return os.path.abspath(str(make_path_posix(path.removeprefix("file://").removeprefix("local://"))))

    def _version(self, path: str, status: os.stat_result) -> FileVersion:
        """The version of the file at an absolute path."""
        numbers = status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
        return _to_version(f"file://{path}", self._now_s(), *numbers)

    def get_meta(self, path: str, count: Count) -> FileVersion | None:
        count("head")
        local = self._path(path)
        try:
            status = os.stat(local)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
            raise UfsNotFoundError(f"{redact('path', path)} is {kind}, not a file")
        return self._version(local, status)

    def list_status(self, path: str, count: Count) -> Listing:
        root = self._path(path)
        for _ in range(_WALKS):
            # The race: `root` may be a link, and be set to another directory during the walk, but all entries must come from one directory.
            # The directory's inode number shows this. The directory stays open meanwhile, because the number of a removed directory may
            # otherwise be used again.
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    inode = _inode(os.fstat(descriptor))
                    listing = self._walk(root, descriptor, inode, count)
                    if listing is not None and _inode(os.stat(root)) == inode:
                        return listing
                finally:
                    os.close(descriptor)
        os.stat(root)
        raise UfsUnavailableError(
            f"{redact('path', path)} was replaced by another directory during each of {_WALKS} listings: try again later"
        )

    def _walk(self, root: str, descriptor: int, inode: _Inode, count: Count) -> Listing | None:
        """List the open directory with this `inode`, which is called `root`; None if that name now leads to another directory.

        If nothing has changed since the last walk, the result is the same object as before.
        """
        walk = _Walk()
        pending: list[tuple[str, frozenset[_Inode]]] = []

        def take(entry: os.DirEntry[str], below: str, above: frozenset[_Inode]) -> None:
            try:
                if entry.is_dir():
                    walk.directories.add(below + entry.name)
                    if is_entered(entry.name):
                        pending.append((below + entry.name, above))
                elif stat.S_ISREG((status := entry.stat()).st_mode):
                    walk.add(below + entry.name, status)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ELOOP):  # the entry was removed, or is a dead link
                    raise

        count("list")
        for entry in list(os.scandir(descriptor)):
            take(entry, "", frozenset([inode]))
        if pending:
            real = os.path.realpath(root)
            if _inode(os.stat(real)) != inode:
                return None
            while pending:
                directory, above = pending.pop()
                count("list")
                try:
                    status, entries = os.stat(f"{real}/{directory}"), list(os.scandir(f"{real}/{directory}"))
                except FileNotFoundError:
                    continue  # removed since it was listed
                if _inode(status) in above:
                    continue  # a link to a directory that it lies in
                for entry in entries:
                    take(entry, f"{directory}/", above | {_inode(status)})
            if os.path.realpath(root) != real:
                return None
        return self._to_listing(root, walk)

    def _to_listing(self, root: str, walk: _Walk) -> Listing:
        """The listing of a walk. It is the same object as last time if nothing has changed and all files were settled."""
        state = walk.state
        with self._lock:
            held = self._held.pop(root, None)
        if held is None or held[0] != state:
            files = walk.files(f"file://{root.rstrip('/')}/", self._now_s())
            held = state, Listing(f"file://{root}", files, frozenset(walk.directories))
            if not (files.settled.all() if isinstance(files, ListedFiles) else all(file.settled for file in files)):
                return held[1]
        with self._lock:
            held_files = len(walk.inodes) + sum(len(listing.files) for _, listing in self._held.values())
            while self._held and (len(self._held) >= _HELD_AT_MOST or held_files > _HELD_FILES):
                held_files -= len(self._held.pop(next(iter(self._held)))[1].files)
            self._held[root] = held
        return held[1]

    def get_status(self, path: str, count: Count) -> FileVersion | Listing:
        root = self._path(path)
        logs = [name for name in log_directories if os.path.isdir(os.path.join(root, name))]
        if logs:
            count("list")
            return Listing(self.url_of(root), (), frozenset(logs))
        if os.path.isdir(root):
            return self.list_status(path, count)
        file = self.get_meta(path, count)
        if file is None:
            raise UfsNotFoundError(f"{redact('path', path)} does not exist")
        return file

    @contextlib.contextmanager
    def pin(self, file: FileVersion) -> Iterator[Callable[[int, int], bytes]]:
        """A function that reads the file through one descriptor, for a `with` block.

        Before the first read and after the last, the open file must be this version. Otherwise raises SourceChangedError.
        """
        try:
            # Non-blocking, because a pipe may have replaced the file, and opening a pipe would wait for its writer.
            descriptor = os.open(self._path(file.url), os.O_RDONLY | os.O_NONBLOCK)
        except (OSError, ValueError) as error:  # ValueError: not a file name
            raise_ours(read_error(error, file.url), error)
        try:
            self._check(descriptor, file)

            def read(offset: int, length: int) -> bytes:
                parts = []
                while length > 0:
                    try:
                        part = os.pread(descriptor, length, offset)
                    except OSError as error:
                        raise_ours(read_error(error, file.url), error)
                    if not part:
                        break
                    parts.append(part)
                    offset, length = offset + len(part), length - len(part)
                if length:  # shorter than its version says: it is being rewritten in place
                    raise SourceChangedError(f"{redact('path', file.url)} changed while it was read")
                return b"".join(parts) if len(parts) != 1 else parts[0]

            yield read
            self._check(descriptor, file)
        finally:
            os.close(descriptor)

    def _check(self, descriptor: int, file: FileVersion) -> None:
        status = os.fstat(descriptor)
        if file.immutable:
            is_same = status.st_size == file.size or file.identity == PART_OF_FILE
        else:
            is_same = self._version(self._path(file.url), status) == file
        if not is_same:
            raise SourceChangedError(f"{redact('path', file.url)} changed after the version to read was chosen")

    def list_files(self, path: str, after: str, at_most: int | None, count: Count) -> tuple[FileVersion, ...]:
        root = self._path(path)
        count("list")
        with os.scandir(root) as entries:
            names = sorted(entry.name for entry in entries if entry.name > after and not entry.name.startswith("."))
        return self._versions((os.path.join(root, name) for name in names[:at_most]), os.stat)

    def has_directory(self, path: str, count: Count) -> bool:
        return os.path.isdir(self._path(path))

    def list_tree(self, path: str, count: Count) -> tuple[FileVersion, ...]:
        paths: list[str] = []
        for directory, _, names in os.walk(self._path(path)):
            count("list")
            paths += (os.path.join(directory, name) for name in names)
        return self._versions(paths, os.lstat)

    def _versions(self, paths: Iterable[str], ask: Callable[[str], os.stat_result]) -> tuple[FileVersion, ...]:
        """The versions of the regular files among the paths. `ask`: `os.stat` or `os.lstat`."""
        versions = []
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                status = ask(path)
                if stat.S_ISREG(status.st_mode):
                    versions.append(self._version(path, status))
        return tuple(versions)

    def last_change_s(self, path: str, count: Count) -> tuple[float | None, float]:
        root = self._path(path)
        newest_s = os.stat(root).st_mtime
        for directory, _, names in os.walk(root):
            count("list")
            for name in (".", *names):
                with contextlib.suppress(FileNotFoundError):
                    newest_s = max(newest_s, os.lstat(os.path.join(directory, name)).st_mtime)
        return newest_s, self._now_s()

    def delete(self, path: str, count: Count) -> None:
        """Remove a file, if it exists, and its directory if that is then empty. Raises OSError if a directory on the way is a link."""
        root, names = split_path(self._path(path))
        count("delete")
        with contextlib.suppress(FileNotFoundError), open_below(root, names[:-1]) as directory:
            os.unlink(names[-1], dir_fd=directory)
        if len(names) > 1:
            with contextlib.suppress(OSError), open_below(root, names[:-2]) as above:
                os.rmdir(names[-2], dir_fd=above)

    def delete_many(self, directory: str, names: Sequence[str], count: Count) -> None:
        for name in names:
            self.delete(f"{directory}/{name}", count)

    def put_if_absent(self, path: str, data: bytes, count: Count) -> FileVersion | None:
        """Write a new file, and return its version; None if `path` has a file already. After a crash the file is complete or missing.

        Raises UfsUnavailableError if the file was written but may not survive a crash, another OSError if a directory on the way is a link.
        """
        local = self._path(path)
        root, names = split_path(local)
        count("put")
        for _ in range(_PUTS):
            self._make_directory(root)
            # The race: another process may remove the directory with its last file.
            with contextlib.suppress(FileNotFoundError), open_below(root, names[:-1], 0o777) as directory:
                status = self._write_new(directory, names[-1], data)
                if status is None:
                    return None
                try:
                    os.fsync(directory)
                except OSError as error:
                    raise_ours(
                        UfsUnavailableError(
                            f"{redact('path', path)} was written, but the disk does not confirm that the file will survive a crash ({error}): check the disk"
                        ),
                        error,
                    )
                return self._version(local, status)
        raise UfsUnavailableError(
            f"{redact('path', path)} was not written: another program removes its directory again and again, or a link in its path leads nowhere: stop that "
            "program, or correct the link"
        )

    @staticmethod
    def _write_new(directory: int, name: str, data: bytes) -> os.stat_result | None:
        """Write a whole file in an open directory. Returns its status; None if the name is taken."""
        # The file gets its name by a link, once it is complete. Otherwise readers could see an empty file, which would stay if the writer died.
        temporary = f".{name}.{os.urandom(8).hex()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(temporary, flags, 0o666, dir_fd=directory), "wb") as file:
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.link(temporary, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
            except FileExistsError:
                return None
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=directory)
            return os.fstat(file.fileno())

    def _make_directory(self, directory: str) -> None:
        """Make a directory and the missing directories above it, so that they survive a crash."""
        missing = []
        while not os.path.isdir(directory):
            missing.append(directory)
            directory = os.path.dirname(directory)
        for new_directory in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(new_directory)
            sync_directory(os.path.dirname(new_directory))
