"""Rows of a managed table's files that do not count any more: what upserts and deletes leave behind.

A write by key puts a file that names the rows it takes the place of, by their file and place in it, beside their
keys. Such files are parquet, so that their bounds tell which keys a write can have touched.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pyspark_lookup.base.decoding import UNREADABLE
from pyspark_lookup.base.errors import DamagedFileError
from pyspark_lookup.columnar.keys import Numbers, one_array
from pyspark_lookup.io.block_cache import BlockCache
from pyspark_lookup.io.ufs import FileVersion
from pyspark_lookup.options.conf_file import redact

__all__ = [
    "PATH",
    "ROW",
    "HiddenRows",
    "counted",
    "distinct_places",
    "hidden_bytes",
    "place_fields",
    "places_of",
    "seen_rows",
]

PATH, ROW = "_lookup_file", "_lookup_row"
"""The columns that say where a row is: its file's path below the table, and its place in it (int64, from 0)."""
_KEPT = 512  # files in memory, of those used last


def place_fields() -> list[pa.Field]:
    """The fields of `PATH` and `ROW`."""
    return [pa.field(PATH, pa.string()), pa.field(ROW, pa.int64())]


def distinct_places(rows: pa.Table) -> pa.Table:
    """Those rows by `PATH` and `ROW`, each place once: two writes that overlapped may both have hidden it."""
    ordered = rows.sort_by([(PATH, "ascending"), (ROW, "ascending")]).combine_chunks()
    if ordered.num_rows < 2:
        return ordered
    differs = (
        pc.not_equal(column.slice(1), column.slice(0, len(column) - 1))
        for column in (one_array(ordered.column(name)) for name in (PATH, ROW))
    )
    first = pa.concat_arrays([pa.array([True]), pc.or_(*differs)])
    return ordered.filter(first)


def hidden_bytes(rows: pa.Table) -> bytes:
    """The file that names those rows, as `distinct_places` gives them: their key columns, `PATH` and `ROW`."""
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, compression="zstd", compression_level=1, write_page_checksum=True)
    data = bytes(sink.getvalue().to_pybytes())
    places_of("rows to be hidden", data)  # a file that cannot be read would make the table unreadable
    return data


def counted(hidden: Numbers | None, first: int, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Numbers]:
    """The rows of a batch that count, and their places in the file; `first` is that of the batch's first row."""
    places = np.arange(first, first + batch.num_rows)
    seen = seen_rows(hidden, first, batch.num_rows)
    return (batch, places) if seen is None else (batch.filter(pa.array(seen)), places[seen])


def seen_rows(hidden: Numbers | None, first: int, rows: int) -> Numbers | None:
    """Which of the `rows` rows of a file from the place `first` on count; None: all. `hidden`: places of those that do not."""
    if hidden is None:
        return None
    low, high = np.searchsorted(hidden, [first, first + rows])
    if low == high:
        return None
    mask = np.ones(rows, np.bool_)
    mask[hidden[low:high] - first] = False
    return mask


class HiddenRows:
    """What such files say, decoded once in this process."""

    def __init__(self, blocks: BlockCache) -> None:
        self._blocks = blocks
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, Numbers]] = {}
        # Of the version that was asked about last: its marking files, and what they say together of each file.
        self._merged: tuple[tuple[str, ...], dict[str, Numbers | None]] = (), {}

    def of(self, root: str, files: Iterable[FileVersion]) -> dict[str, Numbers]:
        """For each of the files that has such rows, by URL, their places in it, ascending. `root`: the table's URL."""
        files = list(files)
        # All files of a version say the same.
        several = {id(file.hidden): file.hidden for file in files}.values()
        marks = {mark.url: mark for hidden in several for mark in hidden}
        if not marks:
            return {}
        with self._lock:
            of, merged = self._merged
            if of != tuple(marks):
                merged = {}
                self._merged = tuple(marks), merged
        wanted = dict.fromkeys(file.url for file in files)
        new = [url for url in wanted if url not in merged]
        if new:
            known = self._read(list(marks.values()))
            for url in new:
                path = url.removeprefix(root + "/")
                parts = [known[mark][path] for mark in marks if path in known[mark]]
                merged[url] = None if not parts else np.unique(np.concatenate(parts))
        return {url: places for url in wanted if (places := merged[url]) is not None}

    def _read(self, marks: Sequence[FileVersion]) -> dict[str, dict[str, Numbers]]:
        """path -> places, for each of the marking files by URL."""
        with self._lock:
            found = {mark.url: self._known[mark.url] for mark in marks if mark.url in self._known}
        missing = [mark for mark in marks if mark.url not in found]
        locations = [self._blocks.get_blocks_and_locations(mark.url, mark) for mark in missing]
        texts = self._blocks.read([(location, [(0, location.file.size)]) for location in locations])
        for mark, location, (data,) in zip(missing, locations, texts, strict=True):
            try:
                found[mark.url] = places_of(mark.url, data)
            except DamagedFileError:  # on its way here, perhaps
                found[mark.url] = places_of(mark.url, self._blocks.read_anew(location, [(0, mark.size)])[0])
                self._blocks.count_damaged()
        with self._lock:
            for url, places in found.items():
                self._known.pop(url, None)
                self._known[url] = places
            while len(self._known) > max(_KEPT, len(found)):
                del self._known[next(iter(self._known))]
        return found


def places_of(url: str, data: bytes | memoryview) -> dict[str, Numbers]:
    """path -> places of the rows that such a file names, ascending, each once. Raises DamagedFileError, which shows `url`.

    A file may name a place twice: compactions of earlier releases wrote such files where two writes by key had overlapped.
    """
    try:
        table = pq.read_table(pa.BufferReader(data), columns=[PATH, ROW], page_checksum_verification=True)
        table = table.combine_chunks()
        table.validate(full=True)
        if table.schema.types != [field.type for field in place_fields()] or any(c.null_count for c in table.columns):
            raise ValueError("a path and a place were expected of each row")
        paths, rows = table.column(PATH).to_numpy(), table.column(ROW).to_numpy()
        starts = np.flatnonzero(np.concatenate([[len(rows) > 0], paths[1:] != paths[:-1]]))
        parts = np.split(rows, starts[1:]) if len(starts) else []
        places = {str(paths[start]): part for start, part in zip(starts, parts, strict=True)}
        if len(places) < len(parts) or any(part[0] < 0 or (np.diff(part) < 0).any() for part in parts):
            raise ValueError("the places of each file were expected together, in their order")
        places = {path: np.unique(part) for path, part in places.items()}
    except (*UNREADABLE, pa.ArrowException, OSError) as problem:
        shown = redact("path", url)
        raise DamagedFileError(f"{shown} does not name the rows that an upsert or delete hides: {problem}") from problem
    return places
