"""A `Disk` as tests open it: blocks and segments to put into it and ways to damage them, locks that another process holds, a disk that is full."""

import contextlib
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.storage.disk import BlockKey, Disk, SegmentWriter, key_of
from pyspark_lookup.storage.disk.directory import HEADER_BYTES
from tests.support.fakes import FakeClock

META = {"rows": 7, "nested": {"a": [1, None, "ü"]}}


def random_data(number: int, length: int = 1000) -> bytes:
    return random.Random(number).randbytes(length)


REGIONS = {"one": random_data(1, 1000), "none": b"", "two": random_data(2, 77), "three": random_data(3, 64)}


def key(number: int, length: int = 1000, version: str = "v") -> BlockKey:
    """The block `number` of its own file."""
    return BlockKey(key_of("file", number), key_of(version), 0, length)


class Opened:
    """A `Disk` with its counters and a clock that tells the real time until it is moved."""

    def __init__(self, root: Path, max_bytes: int | None = 2**30, clock: FakeClock | None = None) -> None:
        self.root = root / "v1"
        self.clock = clock or FakeClock(time.time())
        self.metrics = CacheMetricGroup()
        self.disk = Disk(root, max_bytes, self.metrics, lambda: self.clock.wall_s, random.Random(7))

    def count(self, name: str) -> int:
        return self.metrics.snapshot()[name]

    def path(self, key: BlockKey) -> Path:
        return self.root / "blocks" / key.name

    def usage(self) -> int:
        return sum(map(int, (self.root / "usage").read_text().split()))


@contextlib.contextmanager
def writing(
    opened: Opened, sizes: Mapping[str, int], name: str = "s", table: str = "t", meta: Any = META
) -> Iterator[SegmentWriter]:
    """A writer of regions of these sizes, which is published at the end of the block."""
    writer = opened.disk.create_segment(sizes)
    try:
        yield writer
        writer.finish(meta)
        opened.disk.publish_segment(table, name, writer)
    finally:
        writer.close()


def published(opened: Opened, name: str = "s", table: str = "t") -> Path:
    """A segment of `REGIONS`; its path."""
    with writing(opened, {key: len(data) for key, data in REGIONS.items()}, name, table) as writer:
        for key, data in REGIONS.items():
            writer.append(key, data)
    return segment_path(opened, name, table)


def segment_path(opened: Opened, name: str = "s", table: str = "t") -> Path:
    return opened.root / "snapshots" / table / name


@contextlib.contextmanager
def holding(*paths: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the locks behind these files, until the end of the block."""
    script = (
        "import fcntl, sys\n"
        "files = [open(path, 'a') for path in sys.argv[1:]]\n"
        "[fcntl.flock(file, fcntl.LOCK_EX) for file in files]\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-S", "-c", script, *map(str, paths)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "held\n"
        try:
            yield child
        finally:
            child.kill()


@contextlib.contextmanager
def files_at_most(size: int) -> Iterator[None]:
    """No file of this process may grow beyond so many bytes: a write that crosses the limit is cut short, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def handles_below(root: Path) -> list[str]:
    """The files below a directory that this process has open, removed ones too. (Others may be closed by the garbage collector any moment.)"""
    paths = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own, and what another thread closed since
            paths.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(name for name in paths if name.startswith(f"{root}/"))


def bytes_below(directory: Path) -> int:
    """Bytes on disk of the files below a directory."""
    size = 0
    for place, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(place, name)).st_blocks * 512
    return size


def flipped(blob: bytes, bit: int) -> bytes:
    changed = bytearray(blob)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


BLOCK_DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda blob: blob[:-1],
    "empty": lambda blob: b"",
    "longer": lambda blob: blob + b"x",
    "zeroed": lambda blob: blob[:HEADER_BYTES] + bytes(len(blob) - HEADER_BYTES),
    "a bit flipped": lambda blob: flipped(blob, 4000),
}
