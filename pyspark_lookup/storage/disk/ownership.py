"""Whether a cache directory is ours: a marker says so. Without it nothing in the directory is removed, and nothing is added."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path

from pyspark_lookup.errors import CacheDirectoryError, raise_ours

LAYOUT = "v1"
_TRIES = 10
INNER = ("blocks", "records", "locks", "tmp", "snapshots", "claims", "counters")
MARKER = "CACHEDIR.TAG"  # name and first line as in bford.info/cachedir, so that backups leave caches out
_MARKER_TEXT = (
    b"Signature: 8a477f597d28d172789f06886806bc55\n"
    b"# A cache directory of lookupcache (pyspark_lookup), which removes what lies in it.\n"
)
MAGIC, SEGMENT_MAGIC = b"LKUPBLK1", b"LKUPSEG1"

_MARKER_BEGUN = re.compile(rf"\.{re.escape(MARKER)}\.[0-9a-f]{{16}}")
_HEX, _NAME = "[0-9a-f]", "[^/]+"
# The entries of a cache directory that a release before the marker has made: names, and how the files begin.
_CACHE_FILES = {
    re.compile(rf"blocks/{_HEX}{{2}}/{_HEX}{{32}}/{_HEX}{{32}}/[0-9]+-[0-9]+"): MAGIC,
    re.compile(rf"records/{_NAME}/{_NAME}|counters/{_NAME}"): MAGIC,
    re.compile(rf"snapshots/{_HEX}{{32}}/{_NAME}(?<!\.used)"): SEGMENT_MAGIC,
    re.compile(rf"snapshots/{_HEX}{{32}}/{_NAME}\.used|claims/{_NAME}/{_NAME}-{_HEX}{{32}}"): b"",
    re.compile(rf"tmp/{_HEX}{{32}}(?:\.reserved)?|usage"): b"",
    re.compile(rf"locks/[a-z]+-{_HEX}+|[a-z]+\.lock|swept"): None,
}


def make_whole(root: Path) -> None:
    """Make the cache directory `root`, private and marked as ours, with its fixed subdirectories. Raises CacheDirectoryError."""
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):  # others are removing it
            _make_whole(root)
            return
    raise CacheDirectoryError(f"cache directory {root} cannot be used: something removes it again and again")


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
    """Raise CacheDirectoryError unless `root` is a private cache directory of ours. Makes nothing."""
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
    """Whether a directory is marked as a cache of ours."""
    return is_marked(root / LAYOUT)


def is_marked(layout: Path) -> bool:
    """Whether a directory, which may not be a link, has our marker."""
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
    """Write the marker unless there is one. The directory must be empty, or made by an earlier release."""
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
            os.fsync(file.fileno())  # after a crash, an empty marker would look like another program's
        os.replace(temporary, layout / MARKER)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise_ours(_unusable(layout, error), error)


def _foreign(layout: Path) -> str | None:
    """The name of an entry that none of our releases has made; None if there is none."""
    for directory, directories, names in os.walk(layout):
        below = os.path.relpath(directory, layout)
        if below == ".":
            unknown_names = [name for name in directories if name not in INNER]
            names = [name for name in names if not _MARKER_BEGUN.fullmatch(name)]
            # A marker with another text is our own, damaged, if there are cache files beside it.
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
    """Whether a directory has our cache and nothing else, and nobody but this user can write to the cache."""
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
    """A CacheDirectoryError with the cause. A FileNotFoundError is returned unchanged, because callers then try again."""
    return (
        error
        if isinstance(error, FileNotFoundError)
        else CacheDirectoryError(f"cache directory {path} cannot be used: {error}")
    )


def _open_to_others(path: Path, mode: int) -> CacheDirectoryError:
    and_empty = ", and remove the files that others may have put into it" if mode & 0o022 else ""
    return CacheDirectoryError(
        f"cache directory {path} is open to other users (mode {mode:o}): chmod 700 it{and_empty}"
    )


def _directory(path: Path, instead: bool = False) -> os.stat_result:
    """Make a directory if it is missing, and return its status. `instead`: replace a file of that name."""
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
            f"cache directory {path} is not a directory (links are refused): set lookup.cache.dir"
        )
    if status.st_uid != os.geteuid():
        raise CacheDirectoryError(
            f"cache directory {path} belongs to user {status.st_uid}, not to {os.geteuid()}: set lookup.cache.dir"
        )
    return status
