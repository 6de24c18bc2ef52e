"""The only door to the host's cache directory: publish by rename, records, locks, budget, `check()`.

Layout, below a directory of mode 0700 that this user owns::

    v1/blocks/<2 hex>/<path key>/<version key>/<offset>-<length>   one block
    v1/records/<kind>/<key>                                        one small JSON value
    v1/locks/<kind>-<3 hex>                                        never removed
    v1/tmp/                                                        files being written
    v1/usage                                                       bytes of all blocks

Every file is a header (magic, length, CRC-32, the name it was made for) and its payload, complete or
not there: writers rename or link it into place. Readers take no lock; what is gone or damaged is a
miss. Nothing is ever unpickled. The directory is one user's, for all worker processes of the host.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
import os
import random
import stat
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pyspark_lookup.errors import CacheDirectoryError
from pyspark_lookup.metrics import CacheMetricGroup

__all__ = ["BlockKey", "Disk", "DiskReport", "key_of", "memory_backed"]

_LAYOUT = "v1"
_HEADER = struct.Struct("<8sQI16s")
_MAGIC = b"LKUPBLK1"
_KEEP_FULL = 0.9  # evict down to this share of the budget
_LARGEST_SHARE = 8  # a block above max_bytes / 8 would sweep out too much for itself
_LOCK_WAIT_S = 1.0  # for the counter and for evictions: longer than either takes, short for a read that waits
_TOUCH_AFTER_S = 60.0
_SWEEP_EVERY_S = 600.0
_LEFTOVER_AFTER_S = 3600.0
_DAY_S = 86400.0
# Counted from the last use (touched once a day), so what is in use is never swept.
_RECORDS_KEPT_S = {
    "execution": _DAY_S,
    "plan": _DAY_S,
    "unsettled": _DAY_S,
    "files": 7 * _DAY_S,
    "schema": 7 * _DAY_S,
    "table": 30 * _DAY_S,
    "version": 30 * _DAY_S,
}


def key_of(*parts: object) -> str:
    """32 hex digits for any parts; equal for equal texts only (each is length-prefixed)."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        text = str(part).encode("utf-8", "surrogateescape")
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()


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


class Disk:
    """One host's cache directory within `max_bytes` of blocks. Safe from many processes and threads.

    Raises CacheDirectoryError on creation if the directory is not this user's own and private.
    Afterwards reads and writes of blocks never raise: a failure is counted and the answer is a miss.
    """

    def __init__(
        self,
        root: Path,
        max_bytes: int,
        metrics: CacheMetricGroup,
        now_s: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._root = root / _LAYOUT
        self._max_bytes = max_bytes
        self._metrics = metrics
        self._now_s = now_s
        self._rng = rng
        self._serial = 0
        self._mutex = threading.Lock()
        _own_private_directory(root)
        _own_private_directory(self._root)
        for name in ("blocks", "records", "locks", "tmp"):
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._root / name, 0o700)

    def counting(self, metrics: CacheMetricGroup) -> Disk:
        """This directory, opened and checked already, counting into another group."""
        twin = copy.copy(self)
        twin._metrics = metrics
        return twin

    # --- blocks -----------------------------------------------------------------------------------

    def versions_held(self, path_key: str) -> frozenset[str]:
        """Version keys of which any block of this path lies on disk."""
        try:
            return frozenset(os.listdir(self._root / "blocks" / path_key[:2] / path_key))
        except OSError:
            return frozenset()

    def blocks_held(self, path_key: str, version_key: str) -> frozenset[tuple[int, int]]:
        """(offset, length) of the blocks of one file version on disk at this moment."""
        try:
            names = os.listdir(self._root / "blocks" / path_key[:2] / path_key / version_key)
        except OSError:
            return frozenset()
        pairs = (name.split("-") for name in names)
        return frozenset((int(p[0]), int(p[1])) for p in pairs if len(p) == 2 and all(map(str.isdecimal, p)))

    def get_block(self, key: BlockKey) -> memoryview | None:
        """A block's bytes, verified; None if it is not there or was damaged (then it is removed)."""
        path = self._root / "blocks" / key.name
        try:
            with open(path, "rb") as file:
                data = _unwrap(file.read(), key.name)
                used_at = os.fstat(file.fileno()).st_mtime
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
            if share and size + len(data) + _HEADER.size > largest:
                self._put_share(share, size)
                share, size = {}, 0
            share[key] = data
            size += len(data) + _HEADER.size
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
                self._publish(path, _wrap(data, key.name))
                unused -= 0 if replaced else len(data) + _HEADER.size
        except OSError:
            # Full disk, or the directory vanished under us: the bytes are in memory already.
            self._metrics.inc("cacheFailureCount")
        if unused:
            with contextlib.suppress(OSError):
                self._add_usage(-unused)

    # --- records: small JSON values ---------------------------------------------------------------

    def get_record(self, kind: str, key: str) -> Any | None:
        """A record's value; None if there is none or it is damaged."""
        return self._load_record(kind, key)

    def has_record(self, kind: str, key: str) -> bool:
        """Whether an undamaged record is there."""
        try:
            data = (self._root / "records" / kind / key).read_bytes()
        except OSError:
            return False
        return _unwrap(data, f"{kind}/{key}") is not None

    def create_record(self, kind: str, key: str, value: Any) -> Any:
        """Record `value` unless the key has one already; the recorded value either way.

        Exclusive across processes: of many callers, all return the same value. OSError if the
        directory cannot be written.
        """
        path = self._record_path(kind, key)
        for _ in range(3):
            temporary = self._write_temporary(_wrap(_json(value), f"{kind}/{key}"))
            try:
                os.link(temporary, path)  # fails if it exists, unlike rename
                return value
            except FileExistsError:
                winner = self._load_record(kind, key)
                if winner is not None:
                    return winner
                with self._locked("repair.lock"):  # or one might remove the record that another has just made
                    if path.exists() and self._load_record(kind, key) is None:
                        self._remove(path)  # damaged: clear the place and race for it again
            finally:
                os.unlink(temporary)
        raise OSError(f"record {path} cannot be created")

    def replace_record(self, kind: str, key: str, value: Any) -> None:
        """Record `value`, whatever was there. OSError if the directory cannot be written."""
        self._publish(self._record_path(kind, key), _wrap(_json(value), f"{kind}/{key}"))

    def records(self, kind: str, prefix: str) -> Iterator[tuple[str, Any]]:
        """(key, value) of the readable records of a kind whose key starts with `prefix`."""
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(self._root / "records" / kind)):
                if name.startswith(prefix) and (value := self._load_record(kind, name)) is not None:
                    yield name, value

    def fold_records(self, kind: str, prefix: str, above: int, fold: Callable[[list[Any]], Any]) -> None:
        """Replace the idle ones of more than `above` records of a prefix by one that `fold` makes of them."""
        directory = self._root / "records" / kind
        names = [name for name in os.listdir(directory) if name.startswith(prefix)]
        if len(names) <= above:
            return
        with self._locked("fold.lock"):
            now = self._now_s()
            total = f"{prefix}-folded"
            idle: dict[str, Any] = {}
            for name in names:
                with contextlib.suppress(OSError):
                    if name == total or now - (directory / name).stat().st_mtime > _LEFTOVER_AFTER_S:
                        value = self._load_record(kind, name)
                        if value is not None:
                            idle[name] = value
            if len(idle) > 1:
                self.replace_record(kind, total, fold(list(idle.values())))
                for name in idle.keys() - {total}:
                    self.remove_record(kind, name)

    def remove_record(self, kind: str, key: str) -> None:
        """Forget a record, if it is there."""
        self._remove(self._root / "records" / kind / key)

    def _record_path(self, kind: str, key: str) -> Path:
        path = self._root / "records" / kind / key
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def _load_record(self, kind: str, key: str) -> Any | None:
        path = self._root / "records" / kind / key
        try:
            with open(path, "rb") as file:
                value = _record_value(file.read(), f"{kind}/{key}")
                used_at = os.fstat(file.fileno()).st_mtime
        except OSError:
            return None
        if value is None:
            self._metrics.inc("cacheFailureCount")
        elif abs(self._now_s() - used_at) > _DAY_S:
            with contextlib.suppress(OSError):
                os.utime(path)
        return value

    # --- locks ------------------------------------------------------------------------------------

    def acquire(self, kind: str, name: str, timeout_s: float) -> FileLock | None:
        """The held lock `name` of this host, or None if it was not had within `timeout_s` (>= 0).

        Release it when done; the kernel does if the process dies. OSError if the directory cannot
        be written. Names of one kind share 4096 lock files, so wait for a lock only while holding
        none, or one of an earlier kind in the order resolve, refresh, block.
        """
        path = self.lock_path(kind, name)
        os.stat(path.parent)  # filelock would create it anew, open to others
        lock = FileLock(path)
        try:
            lock.acquire(timeout=timeout_s, poll_interval=0.01)
        except Timeout:
            return None
        return lock

    def lock_path(self, kind: str, name: str) -> Path:
        """The file behind a lock: equal for names that exclude each other by chance."""
        return self._root / "locks" / f"{kind}-{key_of(name)[:3]}"

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Hold one of the directory's own locks. OSError if it is not had soon, or the directory is gone."""
        os.stat(self._root)  # filelock would create it anew, open to others
        with FileLock(self._root / name, timeout=_LOCK_WAIT_S):
            yield

    # --- space ------------------------------------------------------------------------------------

    def _add_usage(self, amount: int) -> int:
        """Add to the bytes held by all blocks; the new total."""
        with self._locked("usage.lock"):
            try:
                used = int((self._root / "usage").read_bytes())
            except (OSError, ValueError):
                used = self.used_bytes()
            used = max(used + amount, 0)
            self._publish(self._root / "usage", b"%d" % used)
        return used

    def _recount(self, claimed: int) -> int:
        """Set the total to what is on disk and `claimed`, about to be. Claims of killed writers are forgotten."""
        with self._locked("usage.lock"):
            used = self.used_bytes() + claimed
            self._publish(self._root / "usage", b"%d" % used)
        return used

    def _walk(self, shard: str = "") -> Iterator[tuple[float, int, Path]]:
        """(last use, bytes on disk, path) of the blocks, of one shard or of all."""
        for directory, _, names in os.walk(self._root / "blocks" / shard):
            for name in names:
                path = Path(directory) / name
                with contextlib.suppress(OSError):
                    status = path.stat()
                    yield status.st_mtime, status.st_size, path

    def _evict(self, claimed: int) -> None:
        """Remove the least recently used blocks of a sample of shards until the budget has room.

        Bounded: shards are visited in random order, only as many as hold four times what must go.
        """
        with self._locked("evict.lock"):
            used = self._add_usage(0)
            needed = used - int(self._max_bytes * _KEEP_FULL)
            if needed <= 0:
                return  # another process has just done it
            shards = os.listdir(self._root / "blocks")
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
                needed = self._recount(claimed) - int(self._max_bytes * _KEEP_FULL)
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
        return sum(size for _, size, _ in self._walk())

    def sweep(self) -> None:
        """Remove leftovers of killed writers and records past their time, and recount; at most every 10 minutes per host."""
        marker = self._root / "swept"
        now = self._now_s()
        with contextlib.suppress(OSError):
            if marker.exists() and abs(now - marker.stat().st_mtime) < _SWEEP_EVERY_S:
                return
            marker.touch()
            for path in self._leftovers(now):
                self._remove(path)
            for kind, kept_s in _RECORDS_KEPT_S.items():
                directory = self._root / "records" / kind
                for path in directory.iterdir() if directory.exists() else []:
                    with contextlib.suppress(OSError):
                        if now - path.stat().st_mtime > kept_s:
                            self._remove(path)
            self._recount(0)

    def _leftovers(self, now_s: float) -> list[Path]:
        found = []
        for path in (self._root / "tmp").iterdir():
            with contextlib.suppress(OSError):
                if now_s - path.stat().st_mtime > _LEFTOVER_AFTER_S:
                    found.append(path)
        return found

    def check(self, repair: bool = False) -> DiskReport:
        """Read every block and record and say what is damaged; with `repair`, remove it and recount."""
        damaged: list[str] = []
        blocks = total = 0
        for _, size, path in self._walk():
            name = path.relative_to(self._root / "blocks").as_posix()
            with contextlib.suppress(FileNotFoundError):
                data = _unwrap(path.read_bytes(), name)
                if data is None or not path.name.endswith(f"-{len(data)}"):
                    damaged.append(f"blocks/{name}")
                else:
                    blocks, total = blocks + 1, total + size
        for path in (self._root / "records").glob("*/*"):
            with contextlib.suppress(FileNotFoundError):
                if _record_value(path.read_bytes(), f"{path.parent.name}/{path.name}") is None:
                    damaged.append(path.relative_to(self._root).as_posix())
        leftovers = self._leftovers(self._now_s())
        if repair:
            for name in damaged:
                self._remove(self._root / name)
            for path in leftovers:
                self._remove(path)
            self._recount(0)
        return DiskReport(blocks, total, tuple(sorted(damaged)), tuple(sorted(p.name for p in leftovers)))

    # --- files ------------------------------------------------------------------------------------

    def _write_temporary(self, data: bytes) -> Path:
        with self._mutex:
            self._serial += 1
            serial = self._serial
        path = self._root / "tmp" / f"{os.getpid()}-{threading.get_ident()}-{serial}-{os.urandom(4).hex()}"
        try:
            with open(path, "xb") as file:
                file.write(data)
        except OSError:
            self._remove(path)
            raise
        return path

    def _publish(self, path: Path, data: bytes) -> None:
        temporary = self._write_temporary(data)
        try:
            os.replace(temporary, path)
        except OSError:
            self._remove(temporary)
            raise

    def _remove(self, path: Path) -> bool:
        try:
            os.unlink(path)
        except OSError:
            return False
        return True


def _own_private_directory(path: Path) -> None:
    """Create `path` with mode 0700, or make sure that it is this user's own and private."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        status = os.lstat(path)
    except OSError as error:
        raise CacheDirectoryError(f"cache directory {path} cannot be used: {error}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise CacheDirectoryError(
            f"cache directory {path} is not a directory (links are refused): set lookup.cache.dir"
        )
    if status.st_uid != os.geteuid():
        raise CacheDirectoryError(
            f"cache directory {path} belongs to user {status.st_uid}, not to {os.geteuid()}: set lookup.cache.dir"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise CacheDirectoryError(
            f"cache directory {path} is open to other users (mode {stat.S_IMODE(status.st_mode):o}): chmod 700 it"
        )


def memory_backed(path: Path) -> bool:
    """Whether a directory lies on tmpfs, as far as the system tells."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return False
    above = [(point, kind) for point, kind in mounts if path.resolve().is_relative_to(point)]
    return bool(above) and max(above, key=lambda mount: len(mount[0]))[1] in ("tmpfs", "ramfs")


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _wrap(data: bytes | memoryview, name: str) -> bytes:
    bound = bytes.fromhex(key_of(name))
    return _HEADER.pack(_MAGIC, len(data), zlib.crc32(data, zlib.crc32(bound)), bound) + data


def _record_value(blob: bytes, name: str) -> Any | None:
    """The value of a record's file; None if anything about it is wrong."""
    data = _unwrap(blob, name)
    try:
        return None if data is None else json.loads(bytes(data))
    except (ValueError, RecursionError):
        return None


def _unwrap(blob: bytes, name: str) -> memoryview | None:
    """The payload of a file made for `name`; None if anything about it is wrong."""
    if len(blob) < _HEADER.size:
        return None
    magic, length, crc, bound = _HEADER.unpack_from(blob)
    if magic != _MAGIC or length != len(blob) - _HEADER.size or bound != bytes.fromhex(key_of(name)):
        return None
    data = memoryview(blob)[_HEADER.size :]
    return data if zlib.crc32(data, zlib.crc32(bound)) == crc else None
