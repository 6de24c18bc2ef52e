"""Directories by descriptor: files below a directory of ours are written and removed without following links."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class PlaceTakenError(OSError):
    """Somebody has put something else where a directory of ours belongs."""


@contextlib.contextmanager
def open_below(root: str | os.PathLike[str], names: Sequence[str], mode: int | None = None) -> Iterator[int]:
    """A descriptor of the directory `names` below `root`, which itself may be reached by links.

    `mode`: of the missing directories that are made, so that they survive a crash. Raises the errors of `descend`.
    """
    fd = descend(os.open(root, DIRECTORY), names, os.fspath(root), mode, durable=True)
    try:
        yield fd
    finally:
        os.close(fd)


def descend(fd: int, names: Sequence[str], root: str, mode: int | None, durable: bool) -> int:
    """A descriptor of the directory `names` below an open one, which is closed. `root`: its path, for errors.

    `mode`: of the missing directories that are made. `durable`: they survive a crash. Raises FileNotFoundError for a missing one without
    `mode`, PlaceTakenError for a link or a file where a directory should be.
    """
    for depth, name in enumerate(names):
        try:
            below = _enter(fd, name, mode, durable)
        except NotADirectoryError:
            raise PlaceTakenError(
                f"{os.path.join(root, *names[: depth + 1])} is a link or a file where a directory should be, so nothing is written "
                "or removed there: remove it"
            ) from None
        finally:
            os.close(fd)
        fd = below
    return fd


def _enter(above: int, name: str, mode: int | None, durable: bool) -> int:
    """A descriptor of the directory `name` in the open directory `above`. Raises NotADirectoryError, also for a link."""
    while True:
        try:
            return os.open(name, DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
        except FileNotFoundError:
            if mode is None:
                raise
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, mode, dir_fd=above)
                if durable:
                    os.fsync(above)
        except OSError as problem:
            if problem.errno == errno.ELOOP:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name) from None
            raise
