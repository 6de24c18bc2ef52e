"""The deleted rows of a version's files, read through the block cache, and batches without them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from pyspark_lookup.base.errors import DamagedFileError
from pyspark_lookup.columnar.keys import Numbers
from pyspark_lookup.io.block_cache import BlockCache
from pyspark_lookup.io.stores import Deletes, FileVersion, Range

_KEPT = 512  # deletes in memory, of those used last


def drop_deleted(deleted: Numbers | None, first: int, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Numbers]:
    """The rows of a batch that are not deleted, and their positions in the file; `first` is that of the batch's first row."""
    positions = np.arange(first, first + batch.num_rows)
    live = live_mask(deleted, first, batch.num_rows)
    return (batch, positions) if live is None else (batch.filter(pa.array(live)), positions[live])


def live_mask(deleted: Numbers | None, first: int, rows: int) -> Numbers | None:
    """Which of the `rows` rows of a file from position `first` on are not deleted; None: all. `deleted`: positions, ascending."""
    if deleted is None:
        return None
    low, high = np.searchsorted(deleted, [first, first + rows])
    if low == high:
        return None
    mask = np.ones(rows, np.bool_)
    mask[deleted[low:high] - first] = False
    return mask


class DeletedRows:
    """What deletes by position say, decoded once in this process."""

    def __init__(self, blocks: BlockCache) -> None:
        self._blocks = blocks
        self._lock = threading.Lock()
        self._known: dict[str, Mapping[str, Numbers]] = {}
        # Of the version that was asked about last: its deletes, and what they say together of each file.
        self._merged: tuple[tuple[str, ...], dict[tuple[str, int], Numbers | None]] = (), {}
        self._groups: dict[tuple[str, ...], int] = {}  # numbers of those that files have together

    def of(self, root: str, files: Iterable[FileVersion]) -> dict[str, Numbers]:
        """For each of the files that has deleted rows, by URL, their positions, ascending. `root`: the table's URL."""
        files = [file for file in files if any(one.equality is None for one in file.deletes)]
        # All files of a managed table's version have the same ones.
        several = {id(file.deletes): tuple(one for one in file.deletes if one.equality is None) for file in files}
        deletes = {one.name: one for some in several.values() for one in some}
        if not deletes:
            return {}
        with self._lock:
            of, merged = self._merged
            if of != tuple(deletes):
                merged = {}
                self._merged, self._groups = (tuple(deletes), merged), {}
            groups = {
                key: self._groups.setdefault(tuple(one.name for one in some), len(self._groups))
                for key, some in several.items()
            }
        places = {file.url: (file.url, groups[id(file.deletes)]) for file in files}
        new = {file.url: file for file in files if places[file.url] not in merged}
        if new:
            known = self._read(list(deletes.values()))
            for url, file in new.items():
                path = url.removeprefix(root + "/")
                parts = [known[one.name][path] for one in several[id(file.deletes)] if path in known[one.name]]
                merged[places[url]] = None if not parts else np.unique(np.concatenate(parts))
        return {file.url: positions for file in files if (positions := merged[places[file.url]]) is not None}

    def _read(self, deletes: Sequence[Deletes]) -> dict[str, Mapping[str, Numbers]]:
        """path -> positions, for each of the deletes by name."""
        with self._lock:
            found = {one.name: self._known[one.name] for one in deletes if one.name in self._known}
        missing = [one for one in deletes if one.name not in found]
        parts: dict[FileVersion, list[Range]] = {}  # what lies in one file is one request
        for file, part in (place for one in missing if (place := one.place) is not None):
            parts.setdefault(file, []).append(part)
        locations = {file: self._blocks.get_blocks_and_locations(file.url, file) for file in parts}
        read = self._blocks.read([(locations[file], ranges) for file, ranges in parts.items()])
        texts = {
            (file, part): data
            for file, some in zip(parts, read, strict=True)
            for part, data in zip(parts[file], some, strict=True)
        }
        for one in missing:
            if one.place is None:
                found[one.name] = one.positions(b"")
                continue
            file, part = one.place
            try:
                found[one.name] = one.positions(texts[file, part])
            except DamagedFileError:  # on its way here, perhaps
                found[one.name] = one.positions(self._blocks.read_anew(locations[file], [part])[0])
                self._blocks.count_damaged()
        with self._lock:
            for name, positions in found.items():
                self._known.pop(name, None)
                self._known[name] = positions
            while len(self._known) > max(_KEPT, len(found)):
                del self._known[next(iter(self._known))]
        return found
