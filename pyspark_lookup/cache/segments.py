"""Segments of rows: files with rows and an index of their keys. `Segment` maps one into memory, `SegmentBuilder` writes one in bounded memory.

A segment has these regions: for column number n its streams `c<n>…` (see `columnar.buffers`); for a column of codes the dictionary `d<n>…`;
`ordinals`, for each row its position if all files are read in order; the arrays of the index, `index.…` (see `columnar.keys`); and `files`,
the list of the data files (`SegmentFiles`).

A builder takes rows in any order, and writes them in the order of their keys' hashes. It takes a chunk of rows at a time, and divides the
chunk into partitions by the upper bits of the hashes. At the end it sorts each partition and appends it to the file. Chunks that do not fit in
memory wait in temporary files, partition by partition. Several threads do both steps: nearly all time is spent in Arrow and numpy, which
release the GIL. A text column with few distinct texts is stored as codes with a dictionary, because gathering codes costs a tenth of gathering
texts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.buffers import ColumnSizes, ColumnWriter, check_column, read_column, without_hidden_values
from pyspark_lookup.columnar.keys import (
    IndexBuilder,
    KeyIndex,
    Keys,
    Matches,
    Numbers,
    OneKey,
    Order,
    Seed,
    as_array,
    as_indices,
    as_int64,
    check_index,
    make_value_reader,
    offsets_and_data,
    order_rows,
)
from pyspark_lookup.columnar.types import schema_of_text, text_of_schema
from pyspark_lookup.core.decoding import UNREADABLE, as_count, as_texts
from pyspark_lookup.core.threads import run_in_order
from pyspark_lookup.storage.disk import Disk, OpenSegment, ReservedFile, SegmentWriter
from pyspark_lookup.versions.column_segments import ipc_file, open_batch
from pyspark_lookup.versions.file_columns import FileStates, encode_url

CODES = pa.uint16()
_CODES_AT_MOST = 2**16
HELD_AT_MOST = 2**30  # the most bytes of chunks in memory: more would be written to disk at the same time
_SPILL_FILES = 16
_FRAME_BYTES = 1024  # the most bytes that the file format adds to the values, for each batch and for each column
_INT32_AT_MOST = 2**31 - 1


@dataclasses.dataclass
class Chunk:
    """Rows that were added at the same time, sorted by partition, with their positions as the last column. `ends`: where each partition ends."""

    rows: pa.RecordBatch
    ends: list[int]

    @classmethod
    def from_columns(cls, columns: Sequence[pa.Array], positions: Numbers, ends: list[int]) -> Chunk:
        arrays = [*columns, as_array(positions)]
        return cls(pa.RecordBatch.from_arrays(arrays, [f"{number}" for number in range(len(arrays))]), ends)

    def piece(self, part: int) -> pa.RecordBatch:
        """The rows of the partition with the number `part`."""
        start = self.ends[part - 1] if part else 0
        return self.rows.slice(start, self.ends[part] - start)


def read_positions(rows: pa.RecordBatch) -> Numbers:
    """The positions of rows (see `SegmentBuilder.add`), which are the last column of a chunk and of its pieces."""
    column = rows.column(rows.num_columns - 1)
    return np.frombuffer(column.buffers()[1], np.uint64, len(column), 8 * column.offset)


class ChunkStore:
    """Keeps chunks in memory, and pieces of chunks in temporary files. Several threads may add chunks at once, and then take partitions.

    Chunks take up to `at_most` bytes of memory, and twice as many while chunks are written. A temporary file has the pieces of some
    neighbouring partitions. It is removed after the last of these partitions is taken, mostly before the system has flushed it to the disk.
    `codes`: the `Codes` of columns, by column number.
    """

    def __init__(self, spill: Callable[[int], ReservedFile], at_most: int, codes: Mapping[int, Codes]) -> None:
        self._spill = spill
        self._at_most = min(at_most, HELD_AT_MOST)
        self._codes = codes
        self._spilling = threading.Lock()  # guards the files
        self._lock = threading.Lock()  # guards the chunks in memory
        self._chunks: list[Chunk] = []
        self._chunk_bytes = 0
        self._open: dict[int, _SpillFile] = {}  # by group of partitions
        self._full: list[_SpillFile] = []

    def add(self, chunk: Chunk) -> None:
        with self._lock:
            self._chunks.append(chunk)
            self._chunk_bytes += chunk.rows.nbytes
            if self._chunk_bytes <= self._at_most:
                return
        with self._spilling:  # threads that add more chunks wait here while one thread writes
            with self._lock:
                if self._chunk_bytes <= self._at_most:
                    return
                chunks, self._chunks, self._chunk_bytes = self._chunks, [], 0
            self._write(chunks)

    def take(self, part: int) -> list[pa.RecordBatch]:
        """The pieces of a partition, ordered by position. Call this after the last `add`, and once for each partition."""
        with self._spilling:
            self._full += self._open.values()
            self._open.clear()
            spilled = [piece for file in self._full for piece in file.take(part)]
        return _in_order(spilled + _pieces(self._chunks, part))

    def _write(self, chunks: list[Chunk]) -> None:
        """Write chunks to the temporary files."""
        # A file has one schema. So decode the codes of a column that has turned out, since a chunk was made, to have too many texts for codes.
        for number in [number for number, codes in self._codes.items() if codes.entries is None]:
            for chunk in chunks:
                column = chunk.rows.column(number)
                if column.type == CODES:
                    column = self._codes[number].decode(column)
                    chunk.rows = chunk.rows.set_column(number, f"{number}", column)
        schema, parts = chunks[0].rows.schema, len(chunks[0].ends)
        for part in range(parts):
            pieces = _pieces(chunks, part)
            if not pieces:
                continue
            group = part * _SPILL_FILES // parts
            if group in self._open and self._open[group].schema != schema:
                self._full.append(self._open.pop(group))
            if group not in self._open:
                self._open[group] = _SpillFile(self._spill(0), schema)
            # One batch, or several if a column's text is longer than 32-bit offsets can express.
            for batch in pa.Table.from_batches(pieces).combine_chunks().to_batches():
                self._open[group].write(part, batch)

    def close(self) -> None:
        """Remove the temporary files."""
        self._chunks.clear()
        for file in [*self._open.values(), *self._full]:
            file.close()
        self._open.clear()
        self._full.clear()


class _SpillFile:
    """A temporary file of record batches: all are written first; then `take` reads each partition back once."""

    def __init__(self, file: ReservedFile, schema: pa.Schema) -> None:
        self.schema = schema
        self._file = file
        self._out = open(file.fd, "r+b", closefd=False)  # noqa: SIM115 # open until it is taken from
        self._writer: pa.RecordBatchFileWriter | None = pa.ipc.new_file(self._out, schema)
        self._numbers: dict[int, list[int]] = {}  # by partition, the numbers of its batches in the file
        self._reader: pa.RecordBatchFileReader | None = None
        self._count = 0

    def write(self, part: int, batch: pa.RecordBatch) -> None:
        assert self._writer is not None
        frame = _FRAME_BYTES * (1 + batch.num_columns)
        self._file.resize(self._out.tell() + batch.nbytes + frame)
        self._writer.write_batch(batch)
        self._numbers.setdefault(part, []).append(self._count)
        self._count += 1

    def take(self, part: int) -> list[pa.RecordBatch]:
        """The rows of a partition, which stay mapped while they are in use. When the last partition is taken, the file is removed."""
        if self._writer is not None:
            self._end()
            self._reader = pa.ipc.open_file(pa.memory_map(str(self._file.path)))
        pieces = []
        for number in self._numbers.pop(part, ()):
            assert self._reader is not None
            pieces.append(self._reader.get_batch(number))
        if not self._numbers:
            self.close()
        return pieces

    def _end(self) -> None:
        assert self._writer is not None
        self._writer.close()
        self._writer = None
        self._out.flush()
        self._file.resize(self._out.tell())

    def close(self) -> None:
        self._reader = None
        with contextlib.suppress(OSError, pa.ArrowException):  # the disk may be full
            self._out.close()
        self._file.close()


class Codes:
    """The distinct texts of a column. The code of a text is its number, in the order in which texts appear.

    When there are too many texts, `encode` makes no more codes, and `entries` becomes None; `decode` still decodes the codes made before.
    Several threads may use the object at once.
    """

    def __init__(self) -> None:
        self.entries: pa.Array | None = pa.array([], pa.string())
        self._texts = self.entries
        self._rows = 0
        self._lock = threading.Lock()

    def encode(self, column: pa.Array) -> pa.Array:
        """The column as codes; the column itself if there are too many texts."""
        if self.entries is None:
            return column
        encoded = pc.dictionary_encode(column)
        with self._lock:
            if self.entries is None:
                return column
            numbers = pc.index_in(encoded.dictionary, value_set=self._texts) if len(self._texts) else None
            fresh = encoded.dictionary if numbers is None else encoded.dictionary.filter(numbers.is_null())
            self._rows += len(column)
            if len(self._texts) + len(fresh) > min(max(64, self._rows // 4), _CODES_AT_MOST):
                self.entries = None
                return column
            self.entries = self._texts = pa.concat_arrays([self._texts, fresh])
            numbers = pc.index_in(encoded.dictionary, value_set=self._texts).cast(CODES)
        return pc.take(numbers, encoded.indices)

    def decode(self, column: pa.Array) -> pa.Array:
        """A column of codes as text; a column of text is returned as it is."""
        return pc.take(self._texts, column) if column.type == CODES else column


def _pieces(chunks: Sequence[Chunk], part: int) -> list[pa.RecordBatch]:
    """The non-empty pieces of a partition in `chunks`, ordered by the position of their first rows."""
    return _in_order([piece for piece in (chunk.piece(part) for chunk in chunks) if piece.num_rows])


def _in_order(pieces: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    return sorted(pieces, key=lambda piece: int(read_positions(piece)[0]))


def joined(arrays: Sequence[Numbers]) -> Numbers:
    if not arrays:
        return np.zeros(0, np.uint64)
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def concat(arrays: list[pa.Array], kind: pa.DataType | None = None) -> pa.Array:
    """The arrays, one after the other, as one array. `kind`: the column's type, if it may be text or binary.

    Text that is longer than 32-bit offsets can express becomes Arrow's large text; without `kind` this is an error of Arrow's.
    """
    if len(arrays) == 1:
        return arrays[0]
    if kind is not None and (pa.types.is_string(kind) or pa.types.is_binary(kind)):
        ends = (offsets_and_data(array)[0] for array in arrays if not pa.types.is_integer(array.type))
        if sum(int(offsets[-1] - offsets[0]) for offsets in ends) > _INT32_AT_MOST:
            large = pa.large_string() if pa.types.is_string(kind) else pa.large_binary()
            arrays = [array.cast(large) for array in arrays]
    return pa.concat_arrays(arrays)


_FILES = "files"
WITHOUT_FILES = "without_files"
"""In the metadata of a segment: True if its rows are not those of data files. They count as the rows of one file without a name."""
_FILE_COLUMNS = pa.schema(
    {
        "url": pa.binary(),
        "size": pa.int64(),
        "identity": pa.string(),
        "rows": pa.int64(),
        "middles": pa.list_(pa.int64()),
        "counts": pa.list_(pa.int64()),
    }
)


@dataclasses.dataclass(frozen=True)
class SegmentFiles:
    """The data files whose rows are in a segment, as columns. `rows`: the number of rows of each file (int64), deleted ones included.

    `middles` and `counts`: for each file a list (int64) with an item for each of its row groups, in order: the position of the middle byte of the
    row group, and its number of rows.
    """

    states: FileStates
    rows: Numbers
    middles: pa.ListArray
    counts: pa.ListArray

    @classmethod
    def from_batch(cls, batch: pa.RecordBatch) -> SegmentFiles:
        """The files in the batch that `to_batch` made. Raises ValueError for any other batch."""
        if batch.schema != _FILE_COLUMNS or any(column.null_count for column in batch.columns):
            raise ValueError("the columns of the list of a segment's files differ from those expected, or have nulls")
        urls, sizes, identities, rows, middles, counts = batch.columns
        if not middles.offsets.equals(counts.offsets):
            raise ValueError("a file's lists of row groups have different lengths")
        return cls(FileStates(urls, as_int64(sizes), identities), as_int64(rows), middles, counts)

    def to_batch(self) -> pa.RecordBatch:
        columns = [self.states.urls, as_array(self.states.sizes), self.states.identities, as_array(self.rows)]
        return pa.RecordBatch.from_arrays([*columns, self.middles, self.counts], schema=_FILE_COLUMNS)

    @classmethod
    def from_units(cls, states: FileStates, units: Sequence[Sequence[tuple[int, int]]]) -> SegmentFiles:
        """The files `states` with these row groups, whose rows are counted. `units`: for each file, what the method `units` returns."""
        lists = (pa.array([[pair[side] for pair in some] for some in units], pa.list_(pa.int64())) for side in (0, 1))
        return cls(states, np.array([sum(count for _, count in some) for some in units], np.int64), *lists)

    @classmethod
    def single(cls, url: str, size: int, identity: str, rows: int) -> SegmentFiles:
        """One file with `rows` rows, whose row groups are not known."""
        urls, identities = pa.array([encode_url(url)], pa.binary()), pa.array([identity], pa.string())
        no_units = pa.array([[]], pa.list_(pa.int64()))
        return cls(FileStates(urls, np.array([size]), identities), np.array([rows]), no_units, no_units)

    @classmethod
    def merge(cls, parts: Sequence[tuple[Numbers, SegmentFiles]]) -> SegmentFiles:
        """The files of all parts in the order of their numbers. `parts`: (the numbers of the files of a part, these files)."""
        order = np.argsort(np.concatenate([numbers for numbers, _ in parts]))
        batches = [files.to_batch() for _, files in parts]
        columns = zip(*(batch.columns for batch in batches), strict=True)
        joined = pa.RecordBatch.from_arrays([pa.concat_arrays(arrays) for arrays in columns], schema=_FILE_COLUMNS)
        return cls.from_batch(joined.take(as_indices(order)))

    def take(self, numbers: Numbers) -> SegmentFiles:
        """The files with these numbers."""
        return SegmentFiles.from_batch(self.to_batch().take(as_indices(numbers)))

    def __len__(self) -> int:
        return len(self.rows)

    def units(self, place: int) -> list[tuple[int, int]]:
        """The row groups of the file at `place`: (position of the middle byte, number of rows)."""
        return list(zip(self.middles[place].as_py(), self.counts[place].as_py(), strict=True))


def write_file_list(writer: SegmentWriter, files: SegmentFiles) -> None:
    """Write the list of a segment's data files to the segment."""
    writer.add(_FILES, ipc_file(files.to_batch()))


class Segment:
    """A segment in memory that is mapped from its file, so that all processes of the host share it. Rows are in hash order (`columnar.keys`).

    Raises one of `UNREADABLE`, ArrowException or OSError if the parts of the file do not fit together.
    """

    def __init__(self, opened: OpenSegment) -> None:
        self.meta = meta = opened.meta
        self.rows = as_count(meta["rows"])
        self.bytes = opened.bytes
        self.schema: pa.Schema = schema_of_text(meta["schema"])
        self.keys = as_texts(meta["keys"])
        self.seed = Seed.from_json(meta["seed"])
        self.files = (
            SegmentFiles.single("", 0, "", self.rows)
            if meta.get(WITHOUT_FILES) is True
            else SegmentFiles.from_batch(open_batch(opened.regions[_FILES]))
        )
        self._streams = {name: pa.py_buffer(region) for name, region in opened.regions.items()}
        self._dictionaries = {number: as_count(entries) for number, entries in meta["dictionaries"].items()}
        self._columns: dict[str, tuple[pa.Array, pa.Array | None]] = {}
        self._readers: dict[str, Callable[[int], Any]] = {}
        self._check_columns(opened.regions)
        self.ordinals = _numbers(opened.regions["ordinals"], self.rows)
        self.file_starts = np.concatenate([[0], np.cumsum(self.files.rows)])
        if self.file_starts[-1] < self.rows:
            raise ValueError("the files have fewer rows than the segment")
        self._index: KeyIndex | None = None
        self.key_count = 0
        if self.keys:
            keyed = as_count(meta["keyed_rows"])
            arrays = {
                name.removeprefix("index."): _index_array(name, region, keyed)
                for name, region in opened.regions.items()
                if name.startswith("index.")
            }
            check_index(arrays, keyed, self.rows)
            self.key_count = keyed if (first := arrays.get("first")) is None else len(first) - 1
            stored = [self._column(name)[0] for name in self.keys]
            self._index = KeyIndex(arrays, stored, int(np.int64(meta["low"])))
            if keyed:
                self._check_first(Keys([column.slice(0, 1) for column in stored]))

    def locate_in_files(self, rows: Numbers) -> tuple[Numbers, Numbers]:
        """(for each row the number of its file, for each row its position in the file). `rows`: numbers of rows."""
        ordinals = self.ordinals[rows].astype(np.int64)
        files = np.searchsorted(self.file_starts, ordinals, "right") - 1
        return files, ordinals - self.file_starts[files]

    def _check_columns(self, regions: Mapping[str, memoryview]) -> None:
        """Raise ValueError or KeyError unless the streams of each column exist and have the right sizes. A checksum protects their contents."""
        if len(set(self.schema.names)) < len(self.schema) or not set(self.keys) <= set(self.schema.names):
            raise ValueError("column names are not unique, or a key is not among them")
        for number, field in enumerate(self.schema):
            entries = self._dictionaries.get(str(number))
            check_column(f"c{number}", field.type if entries is None else CODES, self.rows, regions)
            if entries is not None:
                check_column(f"d{number}", pa.string(), entries, regions)

    def _check_first(self, key: Keys) -> None:
        """Raise ValueError unless a lookup of `key`, the first row's key, finds this row. If not, the seed or the index is wrong."""
        rows = self.probe(key, key.hashes(self.seed)).rows
        if not len(rows) or rows[0] != 0:
            raise ValueError("a lookup of the first row's key does not find the row: the seed or the index is wrong")

    def probe(self, keys: Keys, hashes: Numbers) -> Matches:
        """The rows that have any of `keys`. `hashes`: the hashes of `keys`, computed with this segment's seed."""
        assert self._index is not None
        return self._index.probe(keys, hashes)

    def find_keys(self, keys: Keys, hashes: Numbers) -> Numbers:
        """For each of `keys`, its number among this segment's `key_count` keys (int64); -1 if no row has it. `hashes`: see `probe`."""
        assert self._index is not None
        return self._index.find_keys(keys, hashes)

    def first_rows(self, numbers: Numbers) -> Numbers:
        """For each of these key numbers, the first row that has the key; the rows of one key are neighbours. For the number `key_count`, which no key
        has, the number of rows with a key."""
        assert self._index is not None
        return self._index.first_rows(numbers)

    def locate_rows(self, key: OneKey, hashed: int) -> range:
        """The rows that have `key`, if keys are a single column. `hashed`: its hash, computed with this segment's seed; any number unless
        `uses_hashes`."""
        assert self._index is not None
        return self._index.find_rows(key, hashed)

    @property
    def uses_hashes(self) -> bool:
        """Whether `locate_rows` needs the hash of a key."""
        return self._index is not None and self._index.uses_hashes

    @property
    def unique(self) -> bool:
        """Whether no two rows have the same key."""
        return self._index is not None and self._index.unique

    def key_numbers(self, rows: Numbers) -> Numbers:
        """For each of `rows`, the number of its key. Two rows have the same number if and only if they have the same key."""
        assert self._index is not None
        return self._index.find_key_numbers(rows)

    def _column(self, name: str) -> tuple[pa.Array, pa.Array | None]:
        """(a column, None), or for a column that is stored as codes (the codes, the dictionary with their texts)."""
        if name not in self._columns:
            number = self.schema.get_field_index(name)
            entries = self._dictionaries.get(str(number))
            kind = self.schema.field(number).type if entries is None else CODES
            column = read_column(f"c{number}", kind, self.rows, self._streams)
            texts = None if entries is None else read_column(f"d{number}", pa.string(), entries, self._streams)
            self._columns[name] = column, texts
        return self._columns[name]

    def take(self, names: Sequence[str], rows: Numbers) -> list[pa.Array]:
        """The columns `names` of `rows`; codes become the texts that they stand for."""
        indices = as_indices(rows)
        return [_text(pc.take(column, indices, boundscheck=False), texts) for column, texts in map(self._column, names)]

    def row(self, names: Sequence[str], row: int) -> dict[str, Any]:
        """The values of one row in the columns `names`, as Python values by column."""
        return {name: (self._readers.get(name) or self._make_reader(name))(row) for name in names}

    def _make_reader(self, name: str) -> Callable[[int], Any]:
        """A function that returns the value of a row in the column `name`."""
        column, texts = self._column(name)
        read = read_code = make_value_reader(column)
        if texts is not None:
            read_text = make_value_reader(texts)

            def read(row: int) -> str | None:
                code = read_code(row)
                return None if code is None else read_text(code)

        self._readers[name] = read
        return read

    def slice(self, names: Sequence[str], start: int, stop: int) -> list[pa.Array]:
        """The columns `names` of the rows from `start` to before `stop`; codes become the texts that they stand for."""
        return [_text(column.slice(start, stop - start), texts) for column, texts in map(self._column, names)]


def open_rows(disk: Disk, table: str, name: str) -> Segment | None:
    """A segment of rows, mapped, which is not evicted while it is in use.

    None if there is no segment of this name, or if it is damaged or not a segment of rows. Such a segment is removed.
    """
    opened = disk.open_segment(table, name)
    if opened is None:
        return None
    try:
        return Segment(opened)
    except (pa.ArrowException, OSError, *UNREADABLE):
        disk.discard_segment(table, name)
        return None


def _text(column: pa.Array, texts: pa.Array | None) -> pa.Array:
    return column if texts is None else pc.take(texts, column, boundscheck=False)


def _numbers(region: memoryview, rows: int) -> Numbers:
    numbers = np.frombuffer(region, np.uint32 if len(region) == 4 * rows else np.uint64)
    if len(numbers) != rows:
        raise ValueError(f"{len(numbers)} numbers for {rows} rows")
    return numbers


def _index_array(name: str, region: memoryview, keyed_rows: int) -> Numbers:
    if name == "index.hashes":
        return np.frombuffer(region, np.uint64)
    return np.frombuffer(region, np.uint32 if keyed_rows < 2**32 - 1 else np.uint64)


# The lower bits of a position, which have the row's place in the file; the upper bits have the file's number.
ROW_BITS = np.uint64(40)
_DEAL_ABOVE_BYTES = 32 * 1024 * 1024  # fewer bytes of rows are not divided into partitions
_CHUNK_BYTES = 16 * 1024 * 1024
_PARTITION_BYTES = 16 * 1024 * 1024
_PARTITIONS_AT_MOST = 1024
_MAPPED_ABOVE_BYTES = 32 * 1024 * 1024  # a larger array of the index is made in a temporary file, not in memory
_SHARES = 16  # a thread's memory is for this many chunks or partitions; the thread works on one or two at a time

_Columns = tuple[list[pa.Array], Numbers]  # the columns of some rows, and the positions of these rows


class SegmentBuilder:
    """Takes the rows of a segment (`add`), and then writes the segment (`finish`). Always call `close` at the end.

    `keys` (names of columns of `schema`) may be empty: then rows keep their order, and there is no index. `spill`: returns a new temporary
    file of a size in bytes. `memory_bytes`: about how much memory the builder may use. `threads`: how many threads add rows, and write the
    segment; 0: only the caller's thread.
    """

    def __init__(
        self,
        schema: pa.Schema,
        keys: Sequence[str],
        seed: Seed,
        spill: Callable[[int], ReservedFile],
        memory_bytes: int,
        threads: int = 0,
    ) -> None:
        self._schema = schema
        self._keys = tuple(schema.get_field_index(name) for name in keys)
        self._seed = seed
        self._threads = threads
        self._spill = spill
        share = memory_bytes // (_SHARES * max(threads, 1))
        self._deal_above_bytes = min(_DEAL_ABOVE_BYTES, memory_bytes // 4)
        self._chunk_bytes = min(_CHUNK_BYTES, share)
        self._partition_bytes = max(min(_PARTITION_BYTES, share), 1)
        self._codes = {
            n: Codes() for n, field in enumerate(schema) if pa.types.is_string(field.type) and n not in self._keys
        }
        self._store = ChunkStore(spill, memory_bytes // 4, self._codes)
        self._mapped: list[ReservedFile] = []
        self._lock = threading.Lock()  # guards all attributes that follow
        # The lowest and the highest key, if keys are one column of whole numbers.
        self._bounds: tuple[int, int] | None = None
        self._keyless_rows = 0
        self._sizes = [ColumnSizes(f"c{n}", field.type, field.name) for n, field in enumerate(schema)]
        self._waiting: list[_Columns] = []
        self._waiting_bytes, self._waiting_share = 0, 0.0
        self._partition_bits: int | None = None  # set once rows are divided into partitions
        self.rows = 0
        # After `finish`, the content of the segment's footer. The caller calls `write_file_list`, or adds WITHOUT_FILES.
        self.meta: dict[str, Any] = {}

    def add(self, rows: Iterable[tuple[pa.RecordBatch, Numbers, float]]) -> None:
        """Add batches with the segment's schema, in any order. Several threads may call this at once.

        `rows`: tuples (batch, positions of its rows, about which share of all rows it has). A position is a uint64: file number << ROW_BITS |
        row in the file.
        """
        chunk: list[tuple[pa.RecordBatch, Numbers, float]] = []
        size = 0
        for batch_rows in rows:
            if chunk and size + batch_rows[0].nbytes > self._chunk_bytes:
                self._add(chunk)
                chunk, size = [], 0
            chunk.append(batch_rows)
            size += batch_rows[0].nbytes
        self._add(chunk)

    def _add(self, chunk: list[tuple[pa.RecordBatch, Numbers, float]]) -> None:
        if not chunk:
            return
        positions = joined([places for _, places, _ in chunk])
        columns = [concat([batch.column(n) for batch, _, _ in chunk]) for n in range(len(self._schema))]
        columns = [without_hidden_values(column) for column in columns]
        ready = [(columns, positions)]
        with self._lock:
            self.rows += len(positions)
            for sizes, column in zip(self._sizes, columns, strict=True):
                sizes.add(column)
            if self._partition_bits is None:
                self._waiting += ready
                self._waiting_bytes += sum(column.nbytes for column in columns)
                self._waiting_share += sum(share for _, _, share in chunk)
                ready = []
                if self._waiting_bytes > self._deal_above_bytes:
                    partition_count = int(self._waiting_bytes / max(self._waiting_share, 1e-6) / self._partition_bytes)
                    ready = self._begin_dealing(min(max(partition_count, 1), _PARTITIONS_AT_MOST).bit_length() - 1)
        for dealt_rows in ready:
            self._deal(*dealt_rows)

    def _begin_dealing(self, partition_bits: int) -> list[_Columns]:
        """Set the number of partitions, 2 ** `partition_bits`. Returns the rows that were added before."""
        self._partition_bits = partition_bits
        waiting, self._waiting = self._waiting, []
        return waiting

    @property
    def _partitions(self) -> int:
        """The number of partitions of rows with a key. Rows without a key are in one more partition after these."""
        return 1 << (self._partition_bits or 0) if self._keys else 0

    def _deal(self, columns: list[pa.Array], positions: Numbers) -> None:
        """Put rows into the store, sorted by partition; rows without a key come last."""
        encoded = [self._codes[n].encode(column) if n in self._codes else column for n, column in enumerate(columns)]
        if not self._keys:
            self._store.add(Chunk.from_columns(encoded, positions, [len(positions)]))
            return
        keys = Keys([columns[n] for n in self._keys])
        hashes = keys.hashes(self._seed)
        numbers = np.zeros(len(hashes), np.uint16)
        if self._partition_bits:
            numbers = (hashes >> np.uint64(64 - self._partition_bits)).astype(np.uint16)
        if keys.valid is not None:
            numbers[~keys.valid] = self._partitions
        counts = np.bincount(numbers, minlength=self._partitions + 1)
        self._count(keys, int(counts[-1]))
        if np.count_nonzero(counts) > 1:
            order = np.argsort(numbers, kind="stable")
            indices = as_indices(order)
            encoded = [pc.take(column, indices, boundscheck=False) for column in encoded]
            positions = positions[order]
        self._store.add(Chunk.from_columns(encoded, positions, np.cumsum(counts).tolist()))

    def finish(
        self,
        create: Callable[[Mapping[str, int]], SegmentWriter],
        file_rows: Sequence[int] | Numbers,
        strict: bool = True,
        progress: Callable[[float], None] = lambda share: None,
    ) -> SegmentWriter:
        """Write the segment except for its footer. Returns its writer, which the caller finishes and closes.

        `create`: returns the writer, given the size of each region. `file_rows`: the number of rows of each file, by the file's number.
        `progress`: called with the share of the rows that is written. If `strict`, raises SkewedError if with this seed too many keys share a
        bucket of the index.
        """
        if self._partition_bits is None:
            for waiting in self._begin_dealing(0):
                self._deal(*waiting)
        starts = np.concatenate([[0], np.cumsum(np.asarray(file_rows, np.uint64))]).astype(np.uint64)
        narrow = np.uint32 if self.rows < 2**32 else np.uint64
        coded = {n for n, codes in self._codes.items() if codes.entries is not None}
        sizes = [size.as_codes(CODES) if n in coded else size for n, size in enumerate(self._sizes)]
        regions = {name: size for column in sizes for name, size in column.streams().items()}
        regions["ordinals"] = self.rows * np.dtype(narrow).itemsize
        self.meta = {
            "rows": self.rows,
            "schema": text_of_schema(self._schema),
            "keys": [self._schema.names[n] for n in self._keys],
            "seed": self._seed.to_json(),
        }

        def arrange(part: int) -> _Arranged | None:
            return self._arrange(part, starts, narrow)

        writer = create(regions)
        try:
            writers = [ColumnWriter(column, writer.append) for column in sizes]
            index = self._index() if self._keys else None
            rows_written = 0
            for arranged in run_in_order(arrange, range(self._partitions + 1), self._threads):
                if arranged is None:
                    continue
                if index is not None and arranged.keyed is not None:
                    index.add(*arranged.keyed)
                for column_writer, column in zip(writers, arranged.columns, strict=True):
                    column_writer.add(column)
                writer.append("ordinals", arranged.ordinals)
                rows_written += len(arranged.ordinals)
                progress(rows_written / self.rows)
            for column_writer in writers:
                column_writer.finish()
            self._write_dictionaries(writer)
            if index is not None:
                self.meta |= {"keyed_rows": index.rows, "low": index.low}
                for name, array in index.arrays(strict).items():
                    writer.add(f"index.{name}", array)
        except BaseException:
            writer.close()
            raise
        return writer

    def _count(self, keys: Keys, keyless: int) -> None:
        """Count rows without a key, and note the lowest and highest key if keys are whole numbers: the index needs both before its first key."""
        low = high = None
        if len(self._keys) == 1 and _is_whole(self._schema.field(self._keys[0]).type):
            values = keys.columns[0].values
            assert values is not None
            if keys.valid is not None:
                values = values[keys.valid]
            if len(values):
                low, high = int(values.min()), int(values.max())
        with self._lock:
            self._keyless_rows += keyless
            if low is not None and high is not None:
                bounds = self._bounds or (low, high)
                self._bounds = min(low, bounds[0]), max(high, bounds[1])

    def _index(self) -> IndexBuilder:
        keyed = self.rows - self._keyless_rows
        first = self._schema.field(self._keys[0]).type
        wide = len(self._keys) > 1 or pa.types.is_string(first) or pa.types.is_binary(first)
        return IndexBuilder(keyed, self._bounds, wide, self._zeros)

    def _zeros(self, count: int, kind: np.dtype[Any]) -> Numbers:
        """An array of zeros. A large array is mapped from a temporary file, so that it takes no memory of the process."""
        size = count * kind.itemsize
        if size <= _MAPPED_ABOVE_BYTES:
            return np.zeros(count, kind)
        file = self._spill(size)
        self._mapped.append(file)
        # On a full disk, writing to a hole in a mapped file would kill the process.
        os.posix_fallocate(file.fd, 0, size)
        # The mapping keeps a descriptor open, also in a forked child. With the descriptor of `file`, this would keep its lock. So the file is
        # opened again.
        with open(file.path, "r+b") as reopened:
            return np.frombuffer(mmap.mmap(reopened.fileno(), size), kind)

    def _arrange(self, part: int, starts: Numbers, narrow: type[np.unsignedinteger[Any]]) -> _Arranged | None:
        """The rows of a partition in the order in which they are written; None if the partition is empty.

        `starts`: the number of rows in all files before each data file. `narrow`: the type of ordinals.
        """
        pieces = self._store.take(part)
        if not pieces:
            return None
        columns = []
        for number, field in enumerate(self._schema):
            arrays = [self._final(number, piece.column(number)) for piece in pieces]
            columns.append(concat(arrays, field.type))
        positions = joined(list(map(read_positions, pieces)))
        by_position = None
        if not (positions[1:] > positions[:-1]).all():  # chunks came from layers, or from several threads
            by_position = np.argsort(positions, kind="stable")
        keyed, rows = None, by_position
        if part < self._partitions:
            keys = Keys([columns[n] for n in self._keys])
            order = order_rows(keys, keys.hashes(self._seed), by_position)
            keyed, rows = (order, keys), order.rows
        if rows is not None:
            indices = as_indices(rows)
            columns = [pc.take(column, indices, boundscheck=False) for column in columns]
            positions = positions[rows]
        files = (positions >> ROW_BITS).astype(np.int64)
        ordinals = starts[files] + (positions & ((np.uint64(1) << ROW_BITS) - np.uint64(1)))
        return _Arranged(columns, ordinals.astype(narrow), keyed)

    def _final(self, number: int, array: pa.Array) -> pa.Array:
        """A column in the form in which it is written: codes become text again if the column turned out to have too many distinct texts."""
        codes = self._codes.get(number)
        return array if codes is None or codes.entries is not None else codes.decode(array)

    def _write_dictionaries(self, writer: SegmentWriter) -> None:
        counts: dict[str, int] = {}
        for number, codes in self._codes.items():
            if codes.entries is None:
                continue
            sizes = ColumnSizes(f"d{number}", pa.string())
            sizes.add(codes.entries)
            for name, size in sizes.streams().items():
                writer.reserve(name, size)
            column = ColumnWriter(sizes, writer.append)
            column.add(codes.entries)
            column.finish()
            counts[str(number)] = len(codes.entries)
        self.meta["dictionaries"] = counts

    def close(self) -> None:
        """Remove the temporary files."""
        self._store.close()
        for file in self._mapped:
            file.close()


@dataclasses.dataclass(frozen=True)
class _Arranged:
    """The rows of a partition in the order in which they are written.

    `keyed`: (the hash order of the rows, the rows' keys before they were sorted); None for rows without a key.
    """

    columns: list[pa.Array]
    ordinals: Numbers
    keyed: tuple[Order, Keys] | None


def _is_whole(kind: pa.DataType) -> bool:
    """Whether values of a type are stored as whole numbers, so that the index may use them as positions in an array."""
    return bool(
        pa.types.is_integer(kind) or pa.types.is_date(kind) or pa.types.is_timestamp(kind) or pa.types.is_boolean(kind)
    )
