"""`BlockCache`: returns the bytes of a range of a file's version, from this host's disk, or by a single fetch from the store.

A block is a range that a file format reads as a whole: a Parquet footer or column chunk, an Arrow record batch, or an aligned range of
another file. The caller knows the file's current version from the store. The cache returns only bytes of exactly this version (like Alluxio's
getBlocksAndLocations, but versions are compared by equality).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Sequence

from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import BlockKey, Disk, key_of
from pyspark_lookup.storage.stores import FileVersion, Range
from pyspark_lookup.storage.ufs import Ufs

Data = bytes | memoryview

_Block = tuple[int, Range]
"""A block of one of several files: the file's number, and the range."""

_CLAIMED_AT_ONCE = 256  # blocks that a process locks and fetches in one round, each with an open lock file
_MERGE_GAP_BYTES = 64 * 1024  # blocks with at most this gap between them are fetched by one request
_MERGED_BYTES = 16 * 1024 * 1024  # the most bytes of such a request


@dataclasses.dataclass(frozen=True, slots=True)
class BlocksAndLocations:
    """A file's version, the ranges of its blocks that are on disk, as (offset, length), and the keys of these blocks.

    A block may vanish afterwards because it is evicted or damaged. It is then fetched from the store when it is read.
    """

    file: FileVersion
    cached_blocks: frozenset[Range]
    path_key: str
    version_key: str

    def key(self, block: Range) -> BlockKey:
        return BlockKey(self.path_key, self.version_key, *block)


def make_path_key(scope: str, path: str) -> str:
    """The hash by which the cache identifies a file of a store. `scope`: as in `Ufs.scope`."""
    return key_of(scope, path)


class BlockCache:
    """Blocks of one store's files, cached on this host's disk. Without a disk they come straight from the store.

    The race: several processes of the host may need the same block at once. One of them fetches it. The others wait for up to `wait_s`, and
    then fetch it themselves. If the cache fails, reads still succeed.
    """

    def __init__(self, ufs: Ufs, context: HostContext, wait_s: float) -> None:
        self._keeps = True
        self._ufs = ufs
        self._context = context
        self.wait_s = wait_s

    @property
    def disk(self) -> Disk | None:
        """The host's cache directory; None if there is none, or if fetched bytes are not kept."""
        return self._context.disk if self._keeps else None

    @property
    def scope(self) -> str:
        """The scope of the store, see `Ufs.scope`."""
        return self._ufs.scope

    def read_only(self) -> BlockCache:
        """The same cache, except that it does not keep the bytes that it fetches: for a reader that stores them elsewhere."""
        twin = copy.copy(self)
        twin._keeps = False
        return twin

    def get_blocks_and_locations(self, path: str, version: FileVersion) -> BlocksAndLocations:
        """The cached blocks of `path` in exactly this `version`. Makes no call to the store."""
        path_key = make_path_key(self._ufs.scope, path)
        version_key = key_of(version.size, version.identity)
        disk = self._context.disk
        versions = disk.versions_held(path_key) if disk else frozenset()
        cached_blocks: frozenset[Range] = frozenset()
        if disk and version_key in versions:
            counter_name, cached_blocks = "fileCachedCount", disk.blocks_held(path_key, version_key)
        else:  # no block of this version is on disk yet
            counter_name = "fileResyncedCount" if versions else "fileLoadedCount"
        self._context.metrics.inc("getBlocksAndLocationsCount")
        self._context.metrics.inc(counter_name)
        return BlocksAndLocations(version, cached_blocks, path_key, version_key)

    def read(self, requests: Sequence[tuple[BlocksAndLocations, Sequence[Range]]]) -> list[list[Data]]:
        """The bytes of each block of each file, in the order of `requests`. Missing blocks are fetched and cached.

        Raises SourceChangedError if a file that must be fetched no longer has the requested version, another UfsError if the store fails.
        """
        block_data: dict[_Block, Data] = {}
        missing: list[_Block] = []
        for index, (location, blocks) in enumerate(requests):
            for block in dict.fromkeys(blocks):
                data = self._read_cached(location, block)
                if data is None:
                    missing.append((index, block))
                else:
                    block_data[index, block] = data
        self._context.metrics.inc("blockHitCount", len(block_data))
        locations = [location for location, _ in requests]
        for start in range(0, len(missing), _CLAIMED_AT_ONCE):
            self._load(locations, missing[start : start + _CLAIMED_AT_ONCE], block_data)
        return [[block_data[index, block] for block in blocks] for index, (_, blocks) in enumerate(requests)]

    def read_anew(self, location: BlocksAndLocations, blocks: Sequence[Range]) -> list[Data]:
        """The bytes of blocks, fetched again and not cached. All cached blocks of the file's version are removed.

        Call this if bytes cannot be decoded, because they may have been damaged on their way from the store. If the new bytes can be decoded,
        call `count_damaged`. Raises the errors of `read`.
        """
        if self._context.disk is not None:
            self._context.disk.forget_blocks(location.path_key, location.version_key)
        block_data: dict[_Block, Data] = {}
        self.read_only()._fetch([location], [(0, block) for block in blocks], block_data)
        return [block_data[0, block] for block in blocks]

    def count_damaged(self) -> None:
        """Count a block that arrived damaged although the store's file is intact."""
        self._context.metrics.inc("blockDamagedCount")

    def _read_cached(self, location: BlocksAndLocations, block: Range) -> Data | None:
        if self._context.disk is None or not location.file.cacheable or block not in location.cached_blocks:
            return None
        return self._context.disk.get_block(location.key(block))

    def _load(self, locations: list[BlocksAndLocations], missing: list[_Block], block_data: dict[_Block, Data]) -> None:
        """Fetch the blocks that no other process is fetching, then wait for the blocks of the other processes.

        No lock is held while waiting, so two loaders cannot wait for each other.
        """
        to_fetch: list[_Block] = []
        elsewhere: list[tuple[Disk, int, Range]] = []
        with contextlib.ExitStack() as locks:
            names = [
                locations[index].key(block).name
                for index, block in missing
                if self._target_disk(locations[index]) is not None
            ]
            claimed = self._claim_free(names, locks)
            for index, block in missing:
                disk = self._target_disk(locations[index])
                if disk is None:
                    to_fetch.append((index, block))
                    continue
                key = locations[index].key(block)
                if not claimed.get(key.name, True):
                    elsewhere.append((disk, index, block))
                # The race: the lock's last holder may just have published the block, so it is looked up again under the lock.
                elif not self._find(disk, key, block_data, index):
                    to_fetch.append((index, block))
            self._fetch(locations, to_fetch, block_data)
        wait_s = self.wait_s
        for disk, index, block in elsewhere:
            key = locations[index].key(block)
            with contextlib.ExitStack() as locks:
                self._context.metrics.inc("blockWaitCount")
                if not self._claim(disk, key.name, wait_s, locks):
                    wait_s = (
                        0  # `wait_s` is the limit for the whole read, not for each block of another process that hangs
                    )
                if not self._find(disk, key, block_data, index):  # the other loader failed, died, or takes too long
                    self._fetch(locations, [(index, block)], block_data)

    def _find(self, disk: Disk, key: BlockKey, block_data: dict[_Block, Data], index: int) -> bool:
        """Add a block to `block_data` if it is on disk. Returns whether it is on disk."""
        data = disk.get_block(key)
        if data is not None:
            block_data[index, (key.offset, key.length)] = data
            self._context.metrics.inc("blockHitCount")
        return data is not None

    def _claim_free(self, names: Sequence[str], locks: contextlib.ExitStack) -> dict[str, bool]:
        """By the names of some blocks: whether this process has acquired the block's lock, which `locks` releases.

        Empty if the cache directory fails: then this process should load the blocks without locks.
        """
        disk = self._context.disk
        if disk is None or not names:
            return {}
        try:
            acquired = disk.acquire_free("block", names)
        except OSError:
            self._context.metrics.inc("cacheFailureCount")
            return {}
        for lock in acquired.values():
            if lock is not None:
                locks.callback(lock.release)
        return {name: lock is not None for name, lock in acquired.items()}

    def _claim(self, disk: Disk, name: str, timeout_s: float, locks: contextlib.ExitStack) -> bool:
        """Acquire a block's lock, which `locks` later releases. Returns whether this process should fetch the block.

        It should if it has the lock. It also should, without a lock, if the cache directory fails.
        """
        try:
            lock = disk.acquire("block", name, timeout_s)
        except OSError:
            self._context.metrics.inc("cacheFailureCount")
            return True
        if lock is None:
            return False
        locks.callback(lock.release)
        return True

    def _fetch(self, locations: list[BlocksAndLocations], blocks: list[_Block], block_data: dict[_Block, Data]) -> None:
        by_file: dict[int, list[Range]] = {}
        for index, block in blocks:
            by_file.setdefault(index, []).append(block)
        merged = {index: _merge(sorted(ranges)) for index, ranges in by_file.items()}
        requests = [(locations[index].file, [span for span, _ in spans]) for index, spans in merged.items()]
        self._context.metrics.inc("blockMissCount", len(blocks))
        answers = self._ufs.read_many(requests)
        to_keep: dict[BlockKey, Data] = {}
        for (index, spans), parts in zip(merged.items(), answers, strict=True):
            location = locations[index]
            is_kept = self._target_disk(location) is not None
            for ((start, _), members), data in zip(spans, parts, strict=True):
                view = memoryview(data)
                for offset, length in members:
                    part = view[offset - start : offset - start + length]
                    block_data[index, (offset, length)] = part
                    if is_kept:
                        to_keep[location.key((offset, length))] = part
        if self._context.disk is not None and to_keep:
            self._context.disk.put_blocks(to_keep)

    def _target_disk(self, location: BlocksAndLocations) -> Disk | None:
        """The disk on which the blocks of a file are kept; None if they are not kept."""
        return self._context.disk if self._keeps and location.file.cacheable else None


def _merge(blocks: list[Range]) -> list[tuple[Range, list[Range]]]:
    """(range to request, the blocks in it) for sorted blocks. Blocks at most 64 KiB apart share a request of up to 16 MiB."""
    spans: list[tuple[Range, list[Range]]] = []
    for offset, length in blocks:
        if spans:
            (start, size), members = spans[-1]
            end = max(start + size, offset + length)
            if offset - (start + size) <= _MERGE_GAP_BYTES and end - start <= _MERGED_BYTES:
                spans[-1] = ((start, end - start), [*members, (offset, length)])
                continue
        spans.append(((offset, length), [(offset, length)]))
    return spans
