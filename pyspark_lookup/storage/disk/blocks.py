"""`Disk`: a whole cache directory, with its blocks, the order of eviction when the budget is short, `sweep` and `check`.

`Claims`: claims tell other processes what this process is about to do. A claim is a file `claims/<space>/<group>-<name>`, on which its writer
holds an exclusive lock until the work is done. If the writer dies, the kernel releases the lock, and the next reader removes the claim.

The race: two processes could read the claims, find none, and both create one. So a caller reads the claims and creates its own while it holds
a lock of `Directory.acquire`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.decoding import as_texts
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.errors import CacheFullError
from pyspark_lookup.storage.disk.directory import (
    CONTENT_AT_MOST,
    HEADER_BYTES,
    LEFTOVER_AFTER_S,
    MARKER,
    NEW_FILE,
    Directory,
    LockedFile,
    PlaceTakenError,
    descend,
    find_older,
    is_own_file,
    is_unlocked,
    list_directories,
    list_entries_below,
    list_names,
    read_content,
    unwrap,
    use_file,
    use_temporary,
    wrap,
)
from pyspark_lookup.storage.disk.records import SERIES, Counters, is_known_kind
from pyspark_lookup.storage.disk.segments import DERIVED, Segments
from pyspark_lookup.storage.disk.space import PAGE, RECORDS_SHARE, Kind, ReservedFile, default_budget, on_disk

_POLL_S = 0.002
_POLL_AT_MOST_S = 0.05


class Claim(LockedFile):
    """A claim that this process holds. Release it when the work has ended, even if it ended with an error. A forked child does not hold it."""

    def __init__(self, directory: Claims, path: Path, fd: int) -> None:
        self.directory, self.path = directory, path
        super().__init__(fd)

    def release(self) -> None:
        if self.fd >= 0:
            self.directory._remove(self.path)
            os.close(self.take())


class Claims(Directory):
    """A directory with claims. Read the claims and create a new one under one lock, so that no two processes claim the same work."""

    def create_claim(self, space: str, group: str, payload: bytes) -> Claim:
        """Create a claim, which this process then holds. Raises OSError if the claim cannot be written."""
        return self._retry(lambda: self._create_claim(space, group, payload))

    def _create_claim(self, space: str, group: str, payload: bytes) -> Claim:
        temporary = self._temporary()
        fd = self._open(temporary, NEW_FILE)
        path = self._root / "claims" / space / f"{group}-{temporary.name}"
        try:
            # The race: a reader would remove a claim that is not locked. So the file is locked before it gets its name.
            fcntl.flock(fd, fcntl.LOCK_EX)
            view = memoryview(payload)
            while view:
                view = view[os.write(fd, view) :]
            self._rename(temporary, path)
        except OSError:
            self._remove(temporary)
            os.close(fd)
            raise
        return Claim(self, path, fd)

    def claims(self, space: str, group: str) -> list[tuple[str, bytes]]:
        """(name, payload) of the claims of a group that live processes hold. Claims of dead processes are removed."""
        directory = self._root / "claims" / space
        active_claims = []
        try:
            names = [name for name in os.listdir(directory) if name.startswith(f"{group}-")]
        except FileNotFoundError:
            return []
        for name in names:
            try:
                with use_file(directory / name) as fd:
                    status = os.fstat(fd)
                    if is_unlocked(fd):
                        self._remove(directory / name)
                    elif is_own_file(status) and status.st_size <= CONTENT_AT_MOST:
                        active_claims.append((name, os.pread(fd, status.st_size, 0)))
            except OSError as problem:
                if problem.errno not in (
                    errno.ENOENT,
                    errno.ELOOP,
                    errno.ENXIO,
                ):  # released meanwhile; or a link, or a socket
                    raise
        return active_claims

    def wait_for_claim(self, space: str, name: str, timeout_s: float, clock: HostClock) -> bool:
        """Wait until a claim is released, or its process has died. Returns False if that takes longer than `timeout_s`."""
        until_s = clock.steady_s() + timeout_s
        pause_s = _POLL_S
        while True:
            try:
                with use_file(self._root / "claims" / space / name) as fd:
                    if is_unlocked(fd):
                        return True
            except OSError:
                return True
            if clock.steady_s() >= until_s:
                return False
            clock.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_AT_MOST_S)

    def _sweep_claims(self, now_s: float) -> None:
        """Remove the old claims of dead processes."""
        for path in find_older(LEFTOVER_AFTER_S, now_s, list_entries_below(self._root / "claims")):
            with contextlib.suppress(OSError), use_file(path) as fd:
                if is_unlocked(fd):
                    self._remove(path)


_EVICT_MORE = 10  # an eviction frees the missing bytes and a tenth of the bytes that blocks may take
_LARGEST_SHARE = 8  # a block above an eighth of the budget is not kept: it would evict too many others
_SHARE_AT_MOST = 16 * 1024 * 1024  # the most bytes of blocks that are taken from the budget at once
_TOUCH_AFTER_S = 60.0
SWEEP_EVERY_S = 600.0
_IN_USE_S = 600.0  # a table that was used within this time is not evicted for another table
# The kinds of records that may be evicted, because they only save calls to the store. Other records say what this host has committed, or
# which versions its processes have agreed on.
_FORGOTTEN_FOR_SPACE = (
    "asked",
    "bounds",
    "files",
    "log",
    "log-tail",
    "missing",
    "plan",
    "reloads",
    "schema",
    "token",
    "unsettled",
    "version",
)


def _is_forgotten_for_space(kind: str) -> bool:
    return kind in _FORGOTTEN_FOR_SPACE or not is_known_kind(kind)


@dataclasses.dataclass(frozen=True, slots=True)
class BlockKey:
    """Names a block on disk: hashes (`key_of`) of its file's path and version, and its byte range in that file."""

    path_key: str
    version_key: str
    offset: int
    length: int

    @property
    def name(self) -> str:
        return f"{self.path_key[:2]}/{self.path_key}/{self.version_key}/{self.offset}-{self.length}"


@dataclasses.dataclass(frozen=True)
class DiskReport:
    """The result of `Disk.check`: the number of blocks and their bytes, the damaged files, and the files that killed writers have left."""

    blocks: int
    bytes: int
    damaged: tuple[str, ...]
    leftovers: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class DiskSpace:
    """The space of a cache directory, in bytes: its blocks, segments and records, its budget for all of them, and the free space of its disk
    (-1: unknown)."""

    blocks: int
    budget: int
    segments: int
    free: int
    records: int = 0

    @property
    def used_bytes(self) -> int:
        return self.blocks + self.segments + self.records


def empty_space(above: Path, max_bytes: int | None) -> DiskSpace:
    """The space of a cache directory that does not exist yet. `above`: the existing directory in which it would be made."""
    disk = os.statvfs(above)
    budget = default_budget(above, 0) if max_bytes is None else max_bytes
    return DiskSpace(0, budget, 0, disk.f_bavail * disk.f_frsize)


class Disk(Segments, Claims, Counters):
    """One host's cache directory, within its budget (`max_bytes`; None: the default). Safe to use from many processes and threads.

    Reads and writes of blocks never raise. A failure is counted, and a failed read has the same result as a missing block.
    """

    def __init__(
        self,
        root: Path,
        max_bytes: int | None,
        metrics: CacheMetricGroup,
        now_s: Callable[[], float],
        rng: random.Random,
        creates: bool = True,
    ) -> None:
        super().__init__(root, max_bytes, metrics, now_s, creates)
        self._blocks = str(self._root / "blocks")
        self._rng = rng

    # --- blocks -----------------------------------------------------------------------------------

    def versions_held(self, path_key: str) -> frozenset[str]:
        """The version keys under which blocks of this path are on disk."""
        return frozenset(list_names(f"{self._blocks}/{path_key[:2]}/{path_key}"))

    def blocks_held(self, path_key: str, version_key: str) -> frozenset[tuple[int, int]]:
        """(offset, length) of each block of a file version that is on disk now."""
        names = list_names(f"{self._blocks}/{path_key[:2]}/{path_key}/{version_key}")
        pairs = (name.split("-") for name in names)
        return frozenset((int(p[0]), int(p[1])) for p in pairs if len(p) == 2 and all(map(str.isdecimal, p)))

    def get_block(self, key: BlockKey) -> memoryview | None:
        """A block's bytes, checked against their checksum; None if the block is missing or damaged. A damaged block is removed."""
        path = self._root / "blocks" / key.name
        try:
            content, used_at = read_content(path, key.length + HEADER_BYTES)
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
            # Eviction removes the blocks with the oldest modification time first. The time is set at most once a minute, to save writes.
            with contextlib.suppress(OSError):
                os.utime(path)
        return data

    def put_blocks(self, blocks: Mapping[BlockKey, bytes | memoryview]) -> None:
        """Publish blocks, and evict older blocks if there is no room. A block that cannot be kept is counted; no error is raised."""
        largest = self.budget() // _LARGEST_SHARE
        fitting = {key: data for key, data in blocks.items() if len(data) <= largest}
        self._metrics.inc("blockRefusedCount", len(blocks) - len(fitting))
        share: dict[BlockKey, bytes | memoryview] = {}
        size, places = 0, set[Path]()
        for key, data in fitting.items():
            if share and size + on_disk(len(data) + HEADER_BYTES) > min(largest, _SHARE_AT_MOST):
                self._put_share(share, size)
                share, size, places = {}, 0, set()
            share[key] = data
            size += on_disk(len(data) + HEADER_BYTES)
            place = (self._root / "blocks" / key.name).parent
            if place not in places and not place.is_dir():
                size += 2 * PAGE
            places.add(place)
        if share:
            self._put_share(share, size)

    def _put_share(self, blocks: Mapping[BlockKey, bytes | memoryview], size: int) -> None:
        try:
            self.take("blocks", size)
        except CacheFullError:
            self._metrics.inc("blockRefusedCount", len(blocks))
            return
        except OSError:
            self._metrics.inc("cacheFailureCount")
            return
        waiting, grown, made = dict(blocks), 0, list[str]()

        def put() -> None:
            nonlocal grown
            with (
                self._open_parent(self._temporary(), makes=True) as (temporary, _),
                self._open_parent(self._root / "blocks" / "-", makes=True) as (above, _),
            ):
                while waiting:
                    key, data = next(iter(waiting.items()))
                    grown += self._retry(lambda: self._put_block(temporary, above, key, data, made))  # noqa: B023
                    del waiting[key]

        try:
            self._retry(put)
        except OSError:
            # The disk is full, or the directory has vanished: the caller has the bytes in memory anyway.
            self._metrics.inc("cacheFailureCount")
        with contextlib.suppress(OSError):  # give back what is not used
            self.take("blocks", grown + PAGE * len(made) - size)

    def _put_block(self, temporary: int, above: int, key: BlockKey, data: bytes | memoryview, made: list[str]) -> int:
        """Publish a block. Returns the bytes of its file, 0 if it replaces another.

        `temporary` and `above`: the open directories of temporary files and of blocks. `made`: the names of new directories are added to it.
        """
        shard, path_key, version_key, name = key.name.split("/")
        root = str(self._root / "blocks")
        try:
            inner = descend(os.dup(above), [shard], root, 0o700, durable=False)
            directory = descend(inner, [path_key, version_key], f"{root}/{shard}", 0o700, durable=False, made=made)
        except PlaceTakenError:
            if not self._creates:
                raise
            self._clear_way(self._root / "blocks" / key.name)
            raise FileNotFoundError from None  # then it is tried again
        try:
            try:
                os.stat(name, dir_fd=directory, follow_symlinks=False)
                grown = 0
            except FileNotFoundError:
                grown = on_disk(len(data) + HEADER_BYTES)
            new = os.urandom(16).hex()
            with use_temporary(temporary, new, wrap(data, key.name)):
                os.replace(new, name, src_dir_fd=temporary, dst_dir_fd=directory)
            return grown
        finally:
            os.close(directory)

    def _remove_empty(self, *paths: Path) -> int:
        """Remove the empty directories among `paths`. Returns the bytes that this frees."""
        return PAGE * sum(map(self._remove_directory, paths))

    def forget_blocks(self, path_key: str, version_key: str) -> None:
        """Remove the blocks of a file version."""
        freed, place = 0, self._root / "blocks" / path_key[:2] / path_key
        for _, size, path in self._walk(place / version_key):
            freed += size if self._remove(path) else 0
        freed += self._remove_empty(place / version_key, place)
        with contextlib.suppress(OSError):
            self.take("blocks", -freed)

    def forget_files(self, path_keys: Iterable[str]) -> None:
        """Remove the blocks of all versions of the files."""
        freed = 0
        for path_key in path_keys:
            place = self._root / "blocks" / path_key[:2] / path_key
            for _, size, path in self._walk(place):
                freed += size if self._remove(path) else 0
            freed += self._remove_empty(*list_directories(place), place)
        if freed:
            with contextlib.suppress(OSError):
                self.take("blocks", -freed)

    # --- space ------------------------------------------------------------------------------------

    def _make_room(self, kind: Kind, amount: int) -> None:
        """Free bytes, in this order: unfinished files of dead writers, superseded snapshots, old records (only if a record needs the room),
        blocks, derived segments, unused tables.

        Derived segments and unused tables are not removed for a block, and mapped segments stay. Raises OSError if another process keeps the lock for too long.
        """
        steps = [self._remove_dead, self._evict_superseded]
        steps += [self._evict_records] if kind == "records" else []
        steps += [self._evict_blocks]
        steps += [self._evict_derived, self._evict_tables] if kind != "blocks" else []
        with self._lock("evict.lock"):
            for step in steps:
                shortage = self.lacks(kind, amount)
                if shortage <= 0:
                    return
                step(shortage)

    def reserve_room(self, size: int) -> ReservedFile:
        """Reserve room for a build that needs about `size` bytes. If there cannot be enough room, raises CacheFullError without evicting
        anything."""
        self.check_room(size)
        return self.reserve(size)

    def check_room(self, size: int) -> None:
        """Raise CacheFullError if there is no room for `size` bytes, even after evicting everything that may be evicted."""
        lacking = self.lacks("segments", size)
        if lacking > 0 and lacking > self._evictable():
            raise self._full(size)

    def _evictable(self) -> int:
        """The bytes that could be freed for a new segment."""
        names = {(table, name) for table, name in self._superseded() if not self.is_mapped(table, name)}
        names |= {*self._unused_derived()}
        names |= {(table, name) for table in self._unused_tables() for name in self.segments(table)}
        paths = [path for path, is_dead in self._reserved() if is_dead]
        paths += [self._root / "snapshots" / table / name for table, name in names]
        size = self.usage().blocks
        for path in paths:
            with contextlib.suppress(OSError):  # it is gone by now
                size += on_disk(path.lstat().st_size)
        return size

    def _remove_dead(self, shortage: int) -> None:
        """Remove the unfinished files of killed processes."""
        for path, is_dead in list(self._reserved()):
            if is_dead:
                self._drop("segments", path)

    def _superseded(self) -> list[tuple[str, str]]:
        """(table, name) of each segment that only superseded versions need."""
        records = self.records("superseded", "", as_texts)
        return [(table, name) for table, names in records for name in names]

    def _evict_superseded(self, shortage: int) -> None:
        for table, name in self._superseded():
            self.remove_segment(table, name)

    def _unused_derived(self) -> list[tuple[str, str]]:
        """(table, name) of each derived segment that nobody has mapped. No lookup may need it any more, because its options have changed."""
        tables = [directory.name for directory in list_directories(self._root / "snapshots")]
        derived = [(table, name) for table in tables for name in self.segments(table) if name.startswith(DERIVED)]
        return [(table, name) for table, name in derived if not self.is_mapped(table, name)]

    def _evict_derived(self, shortage: int) -> None:
        for table, name in self._unused_derived():
            self.remove_segment(table, name)

    def _unused_tables(self) -> list[str]:
        """The tables whose segments nobody has mapped and which were not used recently, the least recently used first."""
        unused: list[tuple[float, str]] = []
        now_s = self._now_s()
        for directory in list_directories(self._root / "snapshots"):
            with contextlib.suppress(OSError):
                used_s = directory.lstat().st_mtime
                if abs(now_s - used_s) > _IN_USE_S:
                    unused.append((used_s, directory.name))
        return [
            table
            for _, table in sorted(unused)
            if not any(self.is_mapped(table, name) for name in self.segments(table))
        ]

    def _evict_tables(self, shortage: int) -> None:
        for table in self._unused_tables():
            if shortage <= 0:
                return
            before = self.usage().segments
            removed = [self.remove_segment(table, name) for name in self.segments(table)]
            self._metrics.inc("tableEvictedCount", int(any(removed)))
            shortage -= before - self.usage().segments

    def _evict_blocks(self, shortage: int) -> None:
        """Remove the least recently used blocks in a sample of shards. Frees `shortage` bytes and a tenth of the bytes that blocks may take.

        The work is limited: shards are visited in random order, until the sample has four times the bytes to free.
        """
        usage = self.usage()
        shortage += max(self.budget() - usage.segments - usage.records, 0) // _EVICT_MORE
        shards = list_directories(self._root / "blocks")
        self._rng.shuffle(shards)
        sample: list[tuple[float, int, Path]] = []
        sampled = 0
        for shard in shards:
            for block in self._walk(shard):
                sample.append(block)
                sampled += block[1]
            if sampled >= 4 * shortage:
                break
        if sampled < min(shortage, usage.blocks):  # the account is wrong: it states more bytes of blocks than there are
            self.recount()
            shortage -= usage.total - self.usage().total
        freed = 0
        for _, size, path in sorted(sample, key=lambda block: block[0]):
            if freed >= shortage:
                break
            if self._remove(path):
                freed += size
                self._metrics.inc("blockEvictedCount")
                freed += self._remove_empty(path.parent, path.parent.parent)
        self.take("blocks", -freed)

    def _evict_records(self, shortage: int) -> None:
        """Remove the least recently used records, except for those used in the last minutes, which running queries may need."""
        now_s = self._now_s()
        # These include the kinds that only another release knows.
        kinds = [kind for kind in list_directories(self._root / "records") if _is_forgotten_for_space(kind.name)]
        old = [
            (at_s, size, path) for kind in kinds for at_s, size, path in self._walk(kind) if now_s - at_s > _IN_USE_S
        ]
        for _, size, path in sorted(old):
            if shortage <= 0:
                return
            shortage -= size if self._drop("records", path) else 0

    def used_bytes(self) -> int:
        """The bytes that all files take on disk, by listing them."""
        return self._count().total

    def space(self) -> DiskSpace:
        """The space that the directory takes, by its count of the bytes in use, without listing files."""
        usage = self.usage()
        try:
            disk = os.statvfs(self._root)
            budget, free = self.budget(), disk.f_bavail * disk.f_frsize
        except OSError:
            budget, free = self._max_bytes or 0, -1
        return DiskSpace(usage.blocks, budget, usage.segments, free, usage.records)

    def sweep(self) -> None:
        """Remove files of killed writers and expired files, and correct the recorded use of space.

        Does nothing if a process of the host has done this in the last 10 minutes.
        """
        marker = self._root / "swept"
        now_s = self._now_s()
        with contextlib.suppress(OSError):
            if marker.exists() and abs(now_s - marker.lstat().st_mtime) < SWEEP_EVERY_S:
                return
            for path in (
                marker,
                self._root / MARKER,
            ):  # CACHEDIR.TAG is touched, so that programs which remove old files leave it
                with self._use(path, os.O_RDWR | os.O_CREAT) as fd:
                    os.utime(fd)
            for path in self._leftovers(now_s):
                self._remove(path)
            self._remove_dead(0)
            self._sweep_records(now_s)
            self._sweep_segments(now_s)
            self._sweep_claims(now_s)
            self._sweep_counters(now_s)
            self.recount()
            self._evict_records(self.usage().records - self.budget() // RECORDS_SHARE)

    def clear(self) -> tuple[int, int]:
        """Remove blocks, segments, records, claims, and the counters of dead processes. Returns (number of files, bytes).

        Counters of live processes and files that are still being written stay. So does the mark that `forget_records` leaves for a removed series of
        records. Until the caches fill again, readers find nothing, and a running query may lose its version.
        """
        self._remove_dead(0)
        alive = {self._root / "counters" / counts.name for counts in self.counters("") if counts.alive}
        files = freed = 0
        for series in list_directories(self._root / "records"):
            kind, _, key = series.name.partition(SERIES)
            if key:
                self.forget_records(kind, key)
        for kind in ("blocks", "snapshots", "claims", "counters", "records"):
            for directory, _, names in os.walk(self._root / kind, topdown=False):
                if SERIES in Path(directory).name:
                    continue
                for name in names:
                    path = Path(directory) / name
                    with contextlib.suppress(OSError):
                        size = path.lstat().st_blocks * 512
                        if path not in alive and self._remove(path):
                            files, freed = files + 1, freed + size
                if kind != "records" and Path(directory) != self._root / kind:
                    self._remove_directory(Path(directory))
        self.recount()
        return files, freed

    def check(self, repair: bool = False) -> DiskReport:
        """Read every block, record, segment and file of counters, and report the damaged files.

        `repair`: remove the damaged files and those that killed writers have left, and correct the recorded use of space.
        """
        damaged: list[str] = []
        blocks = total = 0
        for _, size, path in self._walk(self._root / "blocks"):
            name = path.relative_to(self._root / "blocks").as_posix()
            with contextlib.suppress(FileNotFoundError):
                length = path.name.rpartition("-")[2]
                file_size = path.lstat().st_size
                data = (
                    unwrap(read_content(path, file_size)[0], name) if length == str(file_size - HEADER_BYTES) else None
                )
                if data is None:
                    damaged.append(f"blocks/{name}")
                else:
                    blocks, total = blocks + 1, total + size
        for path in (*self._damaged_records(), *self._damaged_segments(), *self._damaged_counters()):
            damaged.append(path.relative_to(self._root).as_posix())
        leftovers = self._leftovers(self._now_s())
        if repair:
            for name in damaged:
                self._remove_tree(self._root / name)  # a directory may have that name
            for path in leftovers:
                self._remove(path)
            self.recount()
        return DiskReport(blocks, total, tuple(sorted(damaged)), tuple(sorted(p.name for p in leftovers)))
