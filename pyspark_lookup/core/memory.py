"""Checks the free memory, so that data that is too large raises an error instead of killing the process."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from pyspark_lookup.errors import NotSupportedError

_GROUP = Path("/sys/fs/cgroup")
_LARGE = 64 * 1024 * 1024  # smaller sizes, in bytes, are not checked


def free_bytes() -> int:
    """About how many bytes of memory this process can still take."""
    return min(_read_free(), default=sys.maxsize)


def has_room(size: int) -> bool:
    """Whether `size` bytes of memory are free. Sizes up to 64 MiB are not checked."""
    return size <= _LARGE or size <= free_bytes()


def check_room(size: int, purpose: str) -> None:
    """Raise NotSupportedError if fewer than `size` bytes of memory are free.

    `purpose`: the first words of the message, a plural that names the data for which the memory is needed.
    """
    if not has_room(size):
        raise NotSupportedError(
            f"{purpose} need about {size} bytes of memory, but only {free_bytes()} are free: give this process more memory, or restore the file if it is damaged"
        )


def _read_free() -> Iterator[int]:
    """The free bytes of the host, of the container, and below the process's own limit, as far as they are known."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        yield _numbers(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    with contextlib.suppress(OSError, ValueError, KeyError):
        statistics = _numbers(_GROUP / "memory.stat")
        # `memory.current` includes the page cache and mapped snapshots, which the kernel drops when memory runs short.
        current_bytes = int((_GROUP / "memory.current").read_text())
        used_bytes = max(current_bytes - statistics["inactive_file"] - statistics["active_file"], 0)
        # If there is no limit, the file contains `max`, and int() raises ValueError.
        yield int((_GROUP / "memory.max").read_text()) - used_bytes
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        with contextlib.suppress(OSError):
            yield limit - int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _numbers(path: Path) -> dict[str, int]:
    """The numbers in a file by name. Every line of the file begins with a name and a number."""
    return {line.split()[0]: int(line.split()[1]) for line in path.read_text().splitlines()}
