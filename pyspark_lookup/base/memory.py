"""How much memory is free, so that what has no room there is an error, not the end of the process."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from pyspark_lookup.base.errors import NotSupportedError

_GROUP = Path("/sys/fs/cgroup")
_LARGE = 64 * 1024 * 1024  # bytes from which on it counts


def free_bytes() -> int:
    """What this process may still take of memory, about."""
    return min(_free(), default=sys.maxsize)


def check_room(size: int, what: str) -> None:
    """Raise NotSupportedError for what takes about that many bytes of memory, and more than are free."""
    if size > _LARGE and size > (free := free_bytes()):
        raise NotSupportedError(f"{what}: it takes about {size} bytes of memory, and {free} are free")


def _free() -> Iterator[int]:
    """What the host, the container and the process's own limit leave."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        yield _numbers(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    with contextlib.suppress(OSError, ValueError, KeyError):
        # What was read from files is in the group's sum, and goes when there is need.
        used = int((_GROUP / "memory.current").read_text()) - _numbers(_GROUP / "memory.stat")["inactive_file"]
        yield int((_GROUP / "memory.max").read_text()) - used  # `max`, if there is no limit, is no number
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        with contextlib.suppress(OSError):
            yield limit - int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _numbers(path: Path) -> dict[str, int]:
    """A file of lines with a name and a number each."""
    return {line.split()[0]: int(line.split()[1]) for line in path.read_text().splitlines()}
