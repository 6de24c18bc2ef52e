"""The block cache: (file version, byte range) -> bytes, from this host's disk or by one fetch.

A block is a natural unit of its format: a parquet footer or column chunk, an Arrow record batch, an
aligned range of another file. The store says which version is current; this cache is asked for that
version and never answers from another (Alluxio's getBlocksAndLocations, by equality of versions).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from pyspark_lookup.io.context import HostContext
from pyspark_lookup.io.disk import BlockKey, Disk, key_of
from pyspark_lookup.io.stores import FileVersion, Range
from pyspark_lookup.io.ufs import Ufs

Data = bytes | memoryview

_Block = tuple[int, Range]
"""A block of one of several files: its place among them, and its range."""

_CLAIMED_AT_ONCE = 256  # blocks, and open lock files, per round
_MERGE_GAP_BYTES = 64 * 1024  # ranges this close are one request
_MERGED_BYTES = 16 * 1024 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class BlocksAndLocations:
    """One file version as the cache knows it: `held` are the (offset, length) of blocks on disk.

    A block may vanish afterwards (evicted, damaged); reading it is then a miss.
    """

    file: FileVersion
    held: frozenset[Range]
    path_key: str
    version_key: str

    def key(self, block: Range) -> BlockKey:
        return BlockKey(self.path_key, self.version_key, *block)


def path_key_of(scope: str, path: str) -> str:
    """What the blocks of a file of a store are kept under."""
    return key_of(scope, path)


class BlockCache:
    """Blocks of one store's files, on this host's disk; without a disk, straight from the store.

    One loader per block across the processes of the host: others wait up to `wait_s` for it, then
    fetch for themselves. A failing cache never fails a read.
    """

    def __init__(self, ufs: Ufs, context: HostContext, wait_s: float) -> None:
        self._keeps = True
        self._ufs = ufs
        self._context = context
        self._wait_s = wait_s

    def read_only(self) -> BlockCache:
        """The same blocks for a reader whose own fetches are not to be kept: what it reads, it stores elsewhere."""
        twin = copy.copy(self)
        twin._keeps = False
        return twin

    def get_blocks_and_locations(self, path: str, version: FileVersion) -> BlocksAndLocations:
        """The blocks held of `path` in exactly this `version`. No call to the store."""
        path_key = path_key_of(self._ufs.scope, path)
        version_key = key_of(version.size, version.identity)
        disk = self._context.disk
        versions = disk.versions_held(path_key) if disk else frozenset()
        held: frozenset[Range] = frozenset()
        if disk and version_key in versions:
            known, held = "fileCachedCount", disk.blocks_held(path_key, version_key)
        else:  # to be synced again, or loaded, as its blocks are read
            known = "fileResyncedCount" if versions else "fileLoadedCount"
        self._context.metrics.inc("getBlocksAndLocationsCount")
        self._context.metrics.inc(known)
        return BlocksAndLocations(version, held, path_key, version_key)

    def read(self, wanted: Sequence[tuple[BlocksAndLocations, Sequence[Range]]]) -> list[list[Data]]:
        """The bytes of each block of each file, in the order asked; what is missing is fetched and kept.

        Raises SourceChangedError if a file that must be fetched is no longer in its version, another
        UfsError if the store fails.
        """
        found: dict[_Block, Data] = {}
        missing: list[_Block] = []
        for index, (location, blocks) in enumerate(wanted):
            for block in dict.fromkeys(blocks):
                data = self._read_cached(location, block)
                if data is None:
                    missing.append((index, block))
                else:
                    found[index, block] = data
        self._context.metrics.inc("blockHitCount", len(found))
        locations = [location for location, _ in wanted]
        for start in range(0, len(missing), _CLAIMED_AT_ONCE):
            self._load(locations, missing[start : start + _CLAIMED_AT_ONCE], found)
        return [[found[index, block] for block in blocks] for index, (_, blocks) in enumerate(wanted)]

    def read_anew(self, location: BlocksAndLocations, blocks: Sequence[Range]) -> list[Data]:
        """The bytes of blocks as the store gives them now, which are not kept; what is held of the file's version is forgotten.

        For bytes that make no sense, and may have been damaged on their way here. If these make sense, they were: say so by
        `count_damaged`. Raises as `read`.
        """
        if self._context.disk is not None:
            self._context.disk.forget_blocks(location.path_key, location.version_key)
        found: dict[_Block, Data] = {}
        self.read_only()._fetch([location], [(0, block) for block in blocks], found)
        return [found[0, block] for block in blocks]

    def count_damaged(self) -> None:
        """Count a block that was damaged, for the store has its file whole."""
        self._context.metrics.inc("blockDamagedCount")

    def _read_cached(self, location: BlocksAndLocations, block: Range) -> Data | None:
        if self._context.disk is None or not location.file.cacheable or block not in location.held:
            return None
        return self._context.disk.get_block(location.key(block))

    def _load(self, locations: list[BlocksAndLocations], missing: list[_Block], found: dict[_Block, Data]) -> None:
        """Fetch what no other process is fetching; then collect what others fetched meanwhile.

        Nothing is waited for while a lock is held, so two loaders cannot wait for each other.
        """
        mine: list[_Block] = []
        others: list[tuple[Disk, int, Range]] = []
        with contextlib.ExitStack() as held:
            claimed: dict[Path, bool] = {}
            for index, block in missing:
                disk = self._disk_for(locations[index])
                if disk is None:
                    mine.append((index, block))
                    continue
                key = locations[index].key(block)
                path = disk.lock_path("block", key.name)
                if path not in claimed:
                    claimed[path] = self._claim(disk, key.name, 0, held)
                if not claimed[path]:
                    others.append((disk, index, block))
                # Looked up again under the lock: its last holder may just have published it.
                elif not self._find(disk, key, found, index):
                    mine.append((index, block))
            self._fetch(locations, mine, found)
        wait_s = self._wait_s
        for disk, index, block in others:
            key = locations[index].key(block)
            with contextlib.ExitStack() as held:
                self._context.metrics.inc("blockWaitCount")
                if not self._claim(disk, key.name, wait_s, held):
                    wait_s = 0  # patience is for the whole read, not for each block of a stuck loader
                if not self._find(disk, key, found, index):  # the other loader failed, died, or holds on too long
                    self._fetch(locations, [(index, block)], found)

    def _find(self, disk: Disk, key: BlockKey, found: dict[_Block, Data], index: int) -> bool:
        """Whether a block is on disk; then it is among what was found."""
        data = disk.get_block(key)
        if data is not None:
            found[index, (key.offset, key.length)] = data
            self._context.metrics.inc("blockHitCount")
        return data is not None

    def _claim(self, disk: Disk, name: str, timeout_s: float, held: contextlib.ExitStack) -> bool:
        """Whether the lock is held by us now, or cannot be had at all because the directory is broken."""
        try:
            lock = disk.acquire("block", name, timeout_s)
        except OSError:
            self._context.metrics.inc("cacheFailureCount")
            return True
        if lock is None:
            return False
        held.callback(lock.release)
        return True

    def _fetch(self, locations: list[BlocksAndLocations], blocks: list[_Block], found: dict[_Block, Data]) -> None:
        by_file: dict[int, list[Range]] = {}
        for index, block in blocks:
            by_file.setdefault(index, []).append(block)
        merged = {index: _merge(sorted(ranges)) for index, ranges in by_file.items()}
        requests = [(locations[index].file, [span for span, _ in spans]) for index, spans in merged.items()]
        self._context.metrics.inc("blockMissCount", len(blocks))
        answers = self._ufs.read_many(requests)
        for (index, spans), parts in zip(merged.items(), answers, strict=True):
            location = locations[index]
            kept: dict[BlockKey, Data] = {}
            for ((start, _), members), data in zip(spans, parts, strict=True):
                view = memoryview(data)
                for offset, length in members:
                    part = view[offset - start : offset - start + length]
                    found[index, (offset, length)] = part
                    kept[location.key((offset, length))] = part
            disk = self._disk_for(location)
            if disk is not None:
                disk.put_blocks(kept)

    def _disk_for(self, location: BlocksAndLocations) -> Disk | None:
        """Where blocks of a file are kept, if they are."""
        return self._context.disk if self._keeps and location.file.cacheable else None


def _merge(blocks: list[Range]) -> list[tuple[Range, list[Range]]]:
    """Sorted blocks as requests: neighbours share one, up to a size; each with its members."""
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
