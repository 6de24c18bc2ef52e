"""The deleted rows of a version's files, read through the block cache, and batches without them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from pyspark_lookup.columnar.keys import Numbers
from pyspark_lookup.errors import DamagedFileError
from pyspark_lookup.storage.block_cache import BlockCache
from pyspark_lookup.storage.stores import Deletes, FileVersion, Range

_DELETES_AT_MOST = 512  # deletes in memory, the most recently used


def drop_deleted(deleted: Numbers | None, first: int, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Numbers]:
    """The rows of a batch that are not deleted, and their positions in the file; `first` is that of the batch's first row."""
    positions = np.arange(first, first + batch.num_rows)
    live = live_mask(deleted, first, batch.num_rows)
    return (batch, positions) if live is None else (batch.filter(pa.array(live)), positions[live])


def live_mask(deleted: Numbers | None, first: int, rows: int) -> Numbers | None:
    """A mask of `rows` rows from position `first` of a file: True for rows that are not deleted; None if none is deleted. `deleted`:
    positions, ascending."""
    if deleted is None:
        return None
    low, high = np.searchsorted(deleted, [first, first + rows])
    if low == high:
        return None
    mask = np.ones(rows, np.bool_)
    mask[deleted[low:high] - first] = False
    return mask


class DeletedRows:
    """The positions of deleted rows in each file. Each delete file is decoded once per process."""

    def __init__(self, blocks: BlockCache) -> None:
        self._blocks = blocks
        self._lock = threading.Lock()
        self._positions_by_name: dict[str, Mapping[str, Numbers]] = {}
        # Of the version that was asked about last: its deletes, and what they say together of each file.
        self._merged: tuple[tuple[str, ...], dict[tuple[str, int], Numbers | None]] = (), {}
        self._groups: dict[tuple[str, ...], int] = {}  # the numbers of combinations of deletes

    def read_positions(self, root: str, files: Iterable[FileVersion]) -> dict[str, Numbers]:
        """The positions of deleted rows, ascending, by the URL of each file that has some. `root`: the table's URL."""
        files = [file for file in files if any(delete.equality is None for delete in file.deletes)]
        # All files of a managed table's version have the same deletes.
        position_deletes = {
            id(file.deletes): tuple(delete for delete in file.deletes if delete.equality is None) for file in files
        }
        deletes = {delete.name: delete for group in position_deletes.values() for delete in group}
        if not deletes:
            return {}
        with self._lock:
            names, merged = self._merged
            if names != tuple(deletes):
                merged = {}
                self._merged, self._groups = (tuple(deletes), merged), {}
            groups = {
                key: self._groups.setdefault(tuple(delete.name for delete in group), len(self._groups))
                for key, group in position_deletes.items()
            }
        places = {file.url: (file.url, groups[id(file.deletes)]) for file in files}
        new = {file.url: file for file in files if places[file.url] not in merged}
        if new:
            by_name = self._read(list(deletes.values()))
            for url, file in new.items():
                path = url.removeprefix(root + "/")
                parts = [
                    by_name[delete.name][path]
                    for delete in position_deletes[id(file.deletes)]
                    if path in by_name[delete.name]
                ]
                merged[places[url]] = None if not parts else np.unique(np.concatenate(parts))
        return {file.url: positions for file in files if (positions := merged[places[file.url]]) is not None}

    def _read(self, deletes: Sequence[Deletes]) -> dict[str, Mapping[str, Numbers]]:
        """For each of the deletes by its name, the positions by path of data file."""
        with self._lock:
            by_name = {
                delete.name: self._positions_by_name[delete.name]
                for delete in deletes
                if delete.name in self._positions_by_name
            }
        missing = [delete for delete in deletes if delete.name not in by_name]
        parts: dict[FileVersion, list[Range]] = {}  # ranges in the same file are one request
        for file, part in (place for delete in missing if (place := delete.place) is not None):
            parts.setdefault(file, []).append(part)
        locations = {file: self._blocks.get_blocks_and_locations(file.url, file) for file in parts}
        read = self._blocks.read([(locations[file], ranges) for file, ranges in parts.items()])
        texts = {
            (file, part): data
            for file, contents in zip(parts, read, strict=True)
            for part, data in zip(parts[file], contents, strict=True)
        }
        for delete in missing:
            if delete.place is None:
                by_name[delete.name] = delete.positions(b"")
                continue
            file, part = delete.place
            try:
                by_name[delete.name] = delete.positions(texts[file, part])
            except DamagedFileError:  # the bytes may have been damaged in transfer
                by_name[delete.name] = delete.positions(self._blocks.read_anew(locations[file], [part])[0])
                self._blocks.count_damaged()
        with self._lock:
            for name, positions in by_name.items():
                self._positions_by_name.pop(name, None)
                self._positions_by_name[name] = positions
            while len(self._positions_by_name) > max(_DELETES_AT_MOST, len(by_name)):
                del self._positions_by_name[next(iter(self._positions_by_name))]
        return by_name
