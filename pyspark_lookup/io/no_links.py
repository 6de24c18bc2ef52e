"""Directories by descriptor: what is put and removed below a directory of ours goes through no link that somebody has put there."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class PlaceTakenError(OSError):
    """Somebody has put something else where a directory of ours belongs."""


@contextlib.contextmanager
def open_below(
    root: str | os.PathLike[str] | int, names: Sequence[str], mode: int | None = None, durable: bool = True
) -> Iterator[int]:
    """A descriptor of the directory `names` below `root`: one that is open, or a path, which may lead through links.

    `mode`: of those that are made where they are missing. `durable`: they are there after a crash, too. Raises FileNotFoundError
    for a missing one without `mode`, PlaceTakenError where a link or a file is in a directory's place.
    """
    fd = os.dup(root) if isinstance(root, int) else os.open(root, _DIRECTORY)
    try:
        for depth, name in enumerate(names):
            below = _enter(
                fd,
                name,
                mode,
                durable,
                "/".join(names[: depth + 1]) if isinstance(root, int) else os.path.join(root, *names[: depth + 1]),
            )
            os.close(fd)
            fd = below
        yield fd
    finally:
        os.close(fd)


def _enter(above: int, name: str, mode: int | None, durable: bool, path: str) -> int:
    """A descriptor of the directory of that name in an open one; `path` is for errors."""
    while True:
        try:
            return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
        except FileNotFoundError:
            if mode is None:
                raise
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, mode, dir_fd=above)
                if durable:
                    os.fsync(above)
        except OSError as problem:
            if problem.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            raise PlaceTakenError(
                f"{path} is a link or a file in the place of a directory, and nothing is written or removed through it: remove it"
            ) from None
