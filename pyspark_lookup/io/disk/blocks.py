"""Blocks of files within a budget; sweeping and checking of the whole cache directory."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pyspark_lookup.base.metrics import CacheMetricGroup
from pyspark_lookup.io.disk.claims import Claims
from pyspark_lookup.io.disk.counters import Counters
from pyspark_lookup.io.disk.directory import (
    HEADER_BYTES,
    content_of,
    directories_in,
    entries_below,
    is_own_file,
    names_in,
    unwrap,
    use_file,
    wrap,
)
from pyspark_lookup.io.disk.segments import Segments

_KEEP_FULL = 0.9  # evict down to this share of the budget
_LARGEST_SHARE = 8  # a block above max_bytes / 8 would sweep out too much for itself
_TOUCH_AFTER_S = 60.0
_SWEEP_EVERY_S = 600.0
_USAGE_AT_MOST = 32  # bytes of a number of bytes


@dataclasses.dataclass(frozen=True, slots=True)
class BlockKey:
    """Names a block on disk: keys of the file's path and version, and a byte range."""

    path_key: str
    version_key: str
    offset: int
    length: int

    @property
    def name(self) -> str:
        return f"{self.path_key[:2]}/{self.path_key}/{self.version_key}/{self.offset}-{self.length}"


@dataclasses.dataclass(frozen=True)
class DiskReport:
    """What `Disk.check` found: blocks and bytes held, damaged files, leftovers of killed writers."""

    blocks: int
    bytes: int
    damaged: tuple[str, ...]
    leftovers: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class DiskSpace:
    """Bytes of the blocks (as counted, and their budget) and of the segments of a cache directory, and what is free there."""

    blocks: int
    budget: int
    segments: int
    free: int


class Disk(Segments, Claims, Counters):
    """One host's cache directory within `max_bytes` of blocks. Safe from many processes and threads.

    Once it is made, reads and writes of blocks never raise: a failure is counted and the answer is a miss.
    """

    def __init__(
        self,
        root: Path,
        max_bytes: int,
        metrics: CacheMetricGroup,
        now_s: Callable[[], float],
        rng: random.Random,
    ) -> None:
        super().__init__(root, metrics, now_s)
        self._max_bytes = max_bytes
        self._rng = rng

    # --- blocks -----------------------------------------------------------------------------------

    def versions_held(self, path_key: str) -> frozenset[str]:
        """Version keys of which any block of this path lies on disk."""
        return frozenset(names_in(self._root / "blocks" / path_key[:2] / path_key))

    def blocks_held(self, path_key: str, version_key: str) -> frozenset[tuple[int, int]]:
        """(offset, length) of the blocks of one file version on disk at this moment."""
        names = names_in(self._root / "blocks" / path_key[:2] / path_key / version_key)
        pairs = (name.split("-") for name in names)
        return frozenset((int(p[0]), int(p[1])) for p in pairs if len(p) == 2 and all(map(str.isdecimal, p)))

    def get_block(self, key: BlockKey) -> memoryview | None:
        """A block's bytes, verified; None if it is not there or was damaged (then it is removed)."""
        path = self._root / "blocks" / key.name
        try:
            content, used_at = content_of(path, key.length + HEADER_BYTES)
            data = unwrap(content, key.name)
        except FileNotFoundError:
            return None
        except OSError:
            self._metrics.inc("cacheFailureCount")
            return None
        if data is None or len(data) != key.length:
            self._metrics.inc("blockDamagedCount")
            self._remove(path)
            return None
        if abs(self._now_s() - used_at) > _TOUCH_AFTER_S:
            # The access time that eviction orders by; coarse, so that hot blocks cost no writes.
            with contextlib.suppress(OSError):
                os.utime(path)
        return data

    def put_blocks(self, blocks: Mapping[BlockKey, bytes | memoryview]) -> None:
        """Publish blocks, evicting older ones for space. One that cannot be kept is counted, not raised."""
        largest = self._max_bytes // _LARGEST_SHARE
        fitting = {key: data for key, data in blocks.items() if len(data) <= largest}
        self._metrics.inc("blockRefusedCount", len(blocks) - len(fitting))
        # In shares of the budget, so that there is always something on disk to make room with.
        share: dict[BlockKey, bytes | memoryview] = {}
        size = 0
        for key, data in fitting.items():
            if share and size + len(data) + HEADER_BYTES > largest:
                self._put_share(share, size)
                share, size = {}, 0
            share[key] = data
            size += len(data) + HEADER_BYTES
        if share:
            self._put_share(share, size)

    def _put_share(self, blocks: Mapping[BlockKey, bytes | memoryview], size: int) -> None:
        try:
            used = self._add_usage(size)
        except OSError:
            self._metrics.inc("cacheFailureCount")
            return
        unused = size  # claimed, and not (newly) on disk
        try:
            if used > self._max_bytes:
                self._evict(size)
            for key, data in blocks.items():
                path = self._root / "blocks" / key.name
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                replaced = path.exists()
                self._publish(path, wrap(data, key.name))
                unused -= 0 if replaced else len(data) + HEADER_BYTES
        except OSError:
            # Full disk, or the directory vanished under us: the bytes are in memory already.
            self._metrics.inc("cacheFailureCount")
        if unused:
            with contextlib.suppress(OSError):
                self._add_usage(-unused)

    def forget_blocks(self, path_key: str, version_key: str) -> None:
        """Remove the blocks of one file version."""
        freed = 0
        for _, size, path in self._walk(self._root / "blocks" / path_key[:2] / path_key / version_key):
            freed += size if self._remove(path) else 0
        with contextlib.suppress(OSError):
            self._add_usage(-freed)

    # --- space ------------------------------------------------------------------------------------

    def _add_usage(self, amount: int, recount: bool = False) -> int:
        """Add to the bytes held by all blocks; the new total. `recount`: to what is on disk, and forget what killed writers claimed."""
        with self._lock("usage.lock"):
            used = max((self.used_bytes() if recount else self._read_total()) + amount, 0)
            self._publish(self._root / "usage", b"%d" % used)
        return used

    def _read_total(self) -> int:
        """The total on record; counted if there is none."""
        try:
            with use_file(self._root / "usage") as fd:
                return int(os.read(fd, _USAGE_AT_MOST) if is_own_file(os.fstat(fd)) else b"")
        except (OSError, ValueError):
            return self.used_bytes()

    def _walk(self, root: Path) -> Iterator[tuple[float, int, Path]]:
        """(last use, bytes on disk, path) of the blocks below a directory."""
        for directory, _, names in os.walk(root):
            for name in names:
                path = Path(directory) / name
                with contextlib.suppress(OSError):
                    status = path.lstat()
                    yield status.st_mtime, status.st_size, path

    def _evict(self, claimed: int) -> None:
        """Remove the least recently used blocks of a sample of shards until the budget has room.

        Bounded: shards are visited in random order, only as many as hold four times what must go.
        """
        with self._lock("evict.lock"):
            used = self._add_usage(0)
            needed = used - int(self._max_bytes * _KEEP_FULL)
            if needed <= 0:
                return  # another process has just done it
            shards = directories_in(self._root / "blocks")
            self._rng.shuffle(shards)
            sample: list[tuple[float, int, Path]] = []
            sampled = 0
            for shard in shards:
                for found in self._walk(shard):
                    sample.append(found)
                    sampled += found[1]
                if sampled >= 4 * needed:
                    break
            if sampled < needed:  # more must go than there is: the count is wrong
                needed = self._add_usage(claimed, recount=True) - int(self._max_bytes * _KEEP_FULL)
            freed = 0
            for _, size, path in sorted(sample, key=lambda found: found[0]):
                if freed >= needed:
                    break
                if self._remove(path):
                    freed += size
                    self._metrics.inc("blockEvictedCount")
                    for parent in (path.parent, path.parent.parent):
                        with contextlib.suppress(OSError):
                            parent.rmdir()
            self._add_usage(-freed)

    def used_bytes(self) -> int:
        """Bytes of all blocks on disk, counted file by file."""
        return sum(size for _, size, _ in self._walk(self._root / "blocks"))

    def space(self) -> DiskSpace:
        """What the directory takes, without a look at each block; -1 where that cannot be found out."""
        blocks = self._read_total()
        try:
            segments = sum(path.lstat().st_blocks * 512 for path in entries_below(self._root / "snapshots"))
            free = os.statvfs(self._root)
        except OSError:
            return DiskSpace(blocks, self._max_bytes, -1, -1)
        return DiskSpace(blocks, self._max_bytes, segments, free.f_bavail * free.f_frsize)

    def sweep(self) -> None:
        """Remove leftovers of killed writers and records past their time, and recount; at most every 10 minutes per host."""
        marker = self._root / "swept"
        now = self._now_s()
        with contextlib.suppress(OSError):
            if marker.exists() and abs(now - marker.lstat().st_mtime) < _SWEEP_EVERY_S:
                return
            marker.touch()
            for path in self._leftovers(now):
                self._remove(path)
            self._sweep_records(now)
            self._sweep_segments(now)
            self._sweep_claims(now)
            self._sweep_counters(now)
            self._add_usage(0, recount=True)

    def clear(self) -> tuple[int, int]:
        """Remove blocks, segments and what is known of snapshots; (files, bytes) of that. Who reads meanwhile has misses, no more.

        What queries that run have agreed on, what this host has committed, and counters stay.
        """
        files = freed = 0
        for kind in ("blocks", "snapshots", "claims", "records/snapshot", "records/segment"):
            if (self._root / kind).is_symlink():
                continue
            for directory, _, names in os.walk(self._root / kind, topdown=False):
                for name in names:
                    path = Path(directory) / name
                    with contextlib.suppress(OSError):
                        size = path.lstat().st_blocks * 512
                        if self._remove(path):
                            files, freed = files + 1, freed + size
                if not kind.startswith("records/") and Path(directory) != self._root / kind:
                    with contextlib.suppress(OSError):
                        os.rmdir(directory)
        self._add_usage(0, recount=True)
        return files, freed

    def check(self, repair: bool = False) -> DiskReport:
        """Read every block, record and segment and say what is damaged; with `repair`, remove it and recount."""
        damaged: list[str] = []
        blocks = total = 0
        for _, size, path in self._walk(self._root / "blocks"):
            name = path.relative_to(self._root / "blocks").as_posix()
            with contextlib.suppress(FileNotFoundError):
                length = path.name.rpartition("-")[2]
                data = unwrap(content_of(path, size)[0], name) if length == str(size - HEADER_BYTES) else None
                if data is None:
                    damaged.append(f"blocks/{name}")
                else:
                    blocks, total = blocks + 1, total + size
        for path in (*self._damaged_records(), *self._damaged_segments(), *self._damaged_counters()):
            damaged.append(path.relative_to(self._root).as_posix())
        leftovers = self._leftovers(self._now_s())
        if repair:
            for name in damaged:
                if not self._remove(self._root / name):  # a directory that somebody has put there
                    shutil.rmtree(self._root / name, ignore_errors=True)
            for path in leftovers:
                self._remove(path)
            self._add_usage(0, recount=True)
        return DiskReport(blocks, total, tuple(sorted(damaged)), tuple(sorted(p.name for p in leftovers)))
