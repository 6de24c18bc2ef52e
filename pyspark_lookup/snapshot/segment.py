"""A segment as rows: columns over a mapped file, the index beside them, and where each row came from.

Regions: the streams of column n as `c<n>…` (`columns`), the texts of one kept as codes as
`d<n>…`, `ordinals` (each row's place when all files are read in order) and `index.…` (`index`).
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columns import read_column
from pyspark_lookup.disk import OpenSegment
from pyspark_lookup.index import KeyIndex, Matches
from pyspark_lookup.keys import Keys, Numbers, Seed, as_indices
from pyspark_lookup.snapshot.build import CODES

__all__ = ["Segment", "SegmentFile"]


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
    """Rows in hash order (see `index`), over memory that all processes of the host share."""

    def __init__(self, opened: OpenSegment) -> None:
        meta = opened.meta
        self.rows: int = meta["rows"]
        self.bytes = opened.bytes
        self.schema: pa.Schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(meta["schema"])))
        self.keys: tuple[str, ...] = tuple(meta["keys"])
        self.seed = Seed(*meta["seed"])
        self.files = [
            SegmentFile(url, size, identity, rows, tuple((middle, count) for middle, count in units), *modified)
            for url, size, identity, rows, units, *modified in meta["files"]
        ]
        # Files that named rows which were left out when this was written.
        self.marks: tuple[str, ...] = tuple(meta.get("marks", ()))
        self._streams = {name: pa.py_buffer(region) for name, region in opened.regions.items()}
        self._dictionaries: Mapping[str, int] = meta["dictionaries"]
        self._columns: dict[str, tuple[pa.Array, pa.Array | None]] = {}
        self.ordinals = _numbers(opened.regions["ordinals"], self.rows)
        self.file_starts = np.cumsum([0, *(file.rows for file in self.files)])
        self._index: KeyIndex | None = None
        if self.keys:
            arrays = {
                name.removeprefix("index."): _index_array(name, region, meta["keyed_rows"])
                for name, region in opened.regions.items()
                if name.startswith("index.")
            }
            self._index = KeyIndex(arrays, [self._column(name)[0] for name in self.keys], meta["low"])

    def probe(self, keys: Keys, hashes: Numbers) -> Matches:
        """All rows of all keys; `hashes` under this segment's seed."""
        assert self._index is not None
        return self._index.probe(keys, hashes)

    @property
    def unique(self) -> bool:
        """Whether no two rows have one key."""
        return self._index is not None and self._index.unique

    def key_numbers(self, rows: Numbers) -> Numbers:
        """The number of each row's key: rows of one key have one number, and no other row has it."""
        assert self._index is not None
        return self._index.numbers_of(rows)

    def _column(self, name: str) -> tuple[pa.Array, pa.Array | None]:
        """A column, and its dictionary if it is one of codes."""
        if name not in self._columns:
            number = self.schema.get_field_index(name)
            entries = self._dictionaries.get(str(number))
            kind = self.schema.field(number).type if entries is None else CODES
            column = read_column(f"c{number}", kind, self.rows, self._streams)
            texts = None if entries is None else read_column(f"d{number}", pa.string(), entries, self._streams)
            self._columns[name] = column, texts
        return self._columns[name]

    def take(self, names: Sequence[str], rows: Numbers) -> list[pa.Array]:
        """The named columns of those rows, text as text."""
        indices = as_indices(rows)
        return [_text(pc.take(column, indices, boundscheck=False), texts) for column, texts in map(self._column, names)]

    def slice(self, names: Sequence[str], start: int, stop: int) -> list[pa.Array]:
        """The named columns of the rows from `start` up to `stop`."""
        return [_text(column.slice(start, stop - start), texts) for column, texts in map(self._column, names)]


def _text(column: pa.Array, texts: pa.Array | None) -> pa.Array:
    return column if texts is None else pc.take(texts, column, boundscheck=False)


def _numbers(region: memoryview, rows: int) -> Numbers:
    return np.frombuffer(region, np.uint32 if len(region) == 4 * rows else np.uint64)


def _index_array(name: str, region: memoryview, keyed_rows: int) -> Numbers:
    if name == "index.hashes":
        return np.frombuffer(region, np.uint64)
    return np.frombuffer(region, np.uint32 if keyed_rows < 2**32 - 1 else np.uint64)
