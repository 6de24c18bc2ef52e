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

    `mode`: of those that are made where they are missing; they are there after a crash, too. Raises as `descend`.
    """
    fd = descend(os.open(root, DIRECTORY), names, os.fspath(root), mode, durable=True)
    try:
        yield fd
    finally:
        os.close(fd)


def descend(fd: int, names: Sequence[str], root: str, mode: int | None, durable: bool) -> int:
    """A descriptor of the directory `names` below an open one, which is closed; `root` is its path, for errors.

    `mode`: of those that are made where they are missing. `durable`: they are there after a crash, too. Raises FileNotFoundError
    for a missing one without `mode`, PlaceTakenError where a link or a file is in a directory's place.
    """
    for depth, name in enumerate(names):
        try:
            below = _enter(fd, name, mode, durable)
        except NotADirectoryError:
            raise PlaceTakenError(
                f"{os.path.join(root, *names[: depth + 1])} is a link or a file in the place of a directory, and nothing is written "
                "or removed through it: remove it"
            ) from None
        finally:
            os.close(fd)
        fd = below
    return fd


def _enter(above: int, name: str, mode: int | None, durable: bool) -> int:
    """A descriptor of the directory of that name in an open one. NotADirectoryError for a link, too."""
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
