"""`Segment`: rows as columns over a mapped file, with their index, and with the file and position that each row came from.

Regions: the streams of column n as `c<n>…` (`buffers`), the dictionary of a column of codes as `d<n>…`, `ordinals` (each row's position
when all files are read in order) and `index.…` (`hash_index`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.cache.segments.chunks import CODES
from pyspark_lookup.columnar.buffers import check_column, read_column
from pyspark_lookup.columnar.hash_index import KeyIndex, Matches, check_index
from pyspark_lookup.columnar.keys import Keys, Numbers, OneKey, Seed, as_indices
from pyspark_lookup.columnar.types import schema_of_text
from pyspark_lookup.core.decoding import UNREADABLE, as_count, as_number, as_text, as_texts
from pyspark_lookup.storage.disk import Disk, OpenSegment


@dataclasses.dataclass(frozen=True)
class SegmentFile:
    """One file whose rows are in a segment. `units`: (middle byte, rows) of its row groups, in order."""

    url: str
    size: int
    identity: str
    rows: int
    units: tuple[tuple[int, int], ...]
    modified_at_s: float | None = None


class Segment:
    """Rows in hash order (see `hash_index`), over memory that all processes of the host share.

    Raises one of `UNREADABLE` if the parts of the file do not fit together.
    """

    def __init__(self, opened: OpenSegment) -> None:
        self.meta = meta = opened.meta
        self.rows = as_count(meta["rows"])
        self.bytes = opened.bytes
        self.schema: pa.Schema = schema_of_text(meta["schema"])
        self.keys = as_texts(meta["keys"])
        self.seed = Seed.from_json(meta["seed"])
        self.files = [_parse_file(file) for file in meta["files"]]
        # The delete files that were applied when this segment was written: it lacks the rows that they name.
        self.marks = as_texts(meta.get("marks", ()))
        self._streams = {name: pa.py_buffer(region) for name, region in opened.regions.items()}
        self._dictionaries = {number: as_count(entries) for number, entries in meta["dictionaries"].items()}
        self._columns: dict[str, tuple[pa.Array, pa.Array | None]] = {}
        self._check_columns(opened.regions)
        self.ordinals = _numbers(opened.regions["ordinals"], self.rows)
        self.file_starts = np.cumsum([0, *(file.rows for file in self.files)])
        if self.file_starts[-1] < self.rows:
            raise ValueError("the files have fewer rows than the segment")
        self._index: KeyIndex | None = None
        if self.keys:
            keyed = as_count(meta["keyed_rows"])
            arrays = {
                name.removeprefix("index."): _index_array(name, region, keyed)
                for name, region in opened.regions.items()
                if name.startswith("index.")
            }
            check_index(arrays, keyed, self.rows)
            stored = [self._column(name)[0] for name in self.keys]
            self._index = KeyIndex(arrays, stored, int(np.int64(meta["low"])))
            if keyed:
                self._check_first(Keys([column.slice(0, 1) for column in stored]))

    def _check_columns(self, regions: Mapping[str, memoryview]) -> None:
        """Raise ValueError or KeyError unless every column is there. The contents are not checked, because they have a checksum."""
        if len(set(self.schema.names)) < len(self.schema) or not set(self.keys) <= set(self.schema.names):
            raise ValueError("column names are not unique, or a key is not among them")
        for number, field in enumerate(self.schema):
            entries = self._dictionaries.get(str(number))
            check_column(f"c{number}", field.type if entries is None else CODES, self.rows, regions)
            if entries is not None:
                check_column(f"d{number}", pa.string(), entries, regions)

    def _check_first(self, key: Keys) -> None:
        """Raise ValueError unless a probe finds the first row by its key: else the seed or the index is wrong."""
        rows = self.probe(key, key.hashes(self.seed)).rows
        if not len(rows) or rows[0] != 0:
            raise ValueError("a probe with the first row's key does not find it: the seed or the index is wrong")

    def probe(self, keys: Keys, hashes: Numbers) -> Matches:
        """The rows of all `keys`. `hashes`: of the keys under this segment's seed."""
        assert self._index is not None
        return self._index.probe(keys, hashes)

    def locate_rows(self, key: OneKey, hashed: int) -> range:
        """All rows of one key of a single column. `hashed`: its hash under this segment's seed."""
        assert self._index is not None
        return self._index.find_rows(key, hashed)

    @property
    def unique(self) -> bool:
        """Whether no two rows have the same key."""
        return self._index is not None and self._index.unique

    def key_numbers(self, rows: Numbers) -> Numbers:
        """The number of each row's key. Only rows with the same key have the same number."""
        assert self._index is not None
        return self._index.find_key_numbers(rows)

    def _column(self, name: str) -> tuple[pa.Array, pa.Array | None]:
        """A column, and the dictionary of its texts if it has codes."""
        if name not in self._columns:
            number = self.schema.get_field_index(name)
            entries = self._dictionaries.get(str(number))
            kind = self.schema.field(number).type if entries is None else CODES
            column = read_column(f"c{number}", kind, self.rows, self._streams)
            texts = None if entries is None else read_column(f"d{number}", pa.string(), entries, self._streams)
            self._columns[name] = column, texts
        return self._columns[name]

    def take(self, names: Sequence[str], rows: Numbers) -> list[pa.Array]:
        """The named columns of these rows, with codes decoded."""
        indices = as_indices(rows)
        return [_text(pc.take(column, indices, boundscheck=False), texts) for column, texts in map(self._column, names)]

    def row(self, names: Sequence[str], row: int) -> tuple[Any, ...]:
        """The named columns of one row, as Python values."""
        return tuple(_value(*self._column(name), row) for name in names)

    def slice(self, names: Sequence[str], start: int, stop: int) -> list[pa.Array]:
        """The named columns of the rows from `start` up to `stop`."""
        return [_text(column.slice(start, stop - start), texts) for column, texts in map(self._column, names)]


def open_rows(disk: Disk, table: str, name: str) -> Segment | None:
    """Open a segment of rows, pinned; None if there is none, or it is damaged or of another form (then it is removed)."""
    opened = disk.open_segment(table, name)
    if opened is None:
        return None
    try:
        return Segment(opened)
    except UNREADABLE:
        disk.discard_segment(table, name)
        return None


def _parse_file(record: Any) -> SegmentFile:
    url, size, identity, rows, units, *modified = record
    parts = tuple((as_count(middle), as_count(count)) for middle, count in units)
    at_s = None if modified in ([], [None]) else as_number(*modified)
    return SegmentFile(as_text(url), as_count(size), as_text(identity), as_count(rows), parts, at_s)


def _text(column: pa.Array, texts: pa.Array | None) -> pa.Array:
    return column if texts is None else pc.take(texts, column, boundscheck=False)


def _value(column: pa.Array, texts: pa.Array | None, row: int) -> Any:
    value = column[row].as_py()
    return value if texts is None or value is None else texts[value].as_py()


def _numbers(region: memoryview, rows: int) -> Numbers:
    numbers = np.frombuffer(region, np.uint32 if len(region) == 4 * rows else np.uint64)
    if len(numbers) != rows:
        raise ValueError(f"{len(numbers)} numbers for {rows} rows")
    return numbers


def _index_array(name: str, region: memoryview, keyed_rows: int) -> Numbers:
    if name == "index.hashes":
        return np.frombuffer(region, np.uint64)
    return np.frombuffer(region, np.uint32 if keyed_rows < 2**32 - 1 else np.uint64)
