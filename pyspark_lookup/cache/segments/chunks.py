"""Rows on their way into a segment: chunks of them, by partition, in memory or in temporary files; and texts as codes."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.keys import Numbers, as_array, offsets_and_data
from pyspark_lookup.storage.disk import ReservedFile

CODES = pa.uint16()
_CODES_AT_MOST = 2**16
HELD_AT_MOST = 2**30  # bytes of chunks, even with more memory: they would all be written at once
_SPILL_FILES = 16
_FRAME_BYTES = 1024  # of a batch and of each column, at most, in addition to the values
_INT32_AT_MOST = 2**31 - 1


@dataclasses.dataclass
class Chunk:
    """Rows that came together, sorted by partition, with their positions as the last column; `ends`: where each partition ends."""

    rows: pa.RecordBatch
    ends: list[int]

    @classmethod
    def from_columns(cls, columns: Sequence[pa.Array], positions: Numbers, ends: list[int]) -> Chunk:
        arrays = [*columns, as_array(positions)]
        return cls(pa.RecordBatch.from_arrays(arrays, [f"{number}" for number in range(len(arrays))]), ends)

    def piece(self, part: int) -> pa.RecordBatch:
        """The rows of a partition."""
        start = self.ends[part - 1] if part else 0
        return self.rows.slice(start, self.ends[part] - start)


def read_positions(rows: pa.RecordBatch) -> Numbers:
    """The positions of the rows of a chunk, or of a part of it."""
    column = rows.column(rows.num_columns - 1)
    return np.frombuffer(column.buffers()[1], np.uint64, len(column), 8 * column.offset)


class ChunkStore:
    """Chunks in memory, and pieces of them in temporary files. Threads may add chunks at once, and then take partitions.

    It holds `at_most` bytes, and as many again that are being written. A temporary file has the pieces of some neighbouring partitions. It
    is removed after the last of them is taken, mostly before the system has flushed it to the disk.
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
        with self._spilling:  # other threads with more chunks wait here
            with self._lock:
                if self._chunk_bytes <= self._at_most:
                    return
                chunks, self._chunks, self._chunk_bytes = self._chunks, [], 0
            self._write(chunks)

    def take(self, part: int) -> list[pa.RecordBatch]:
        """The pieces of a partition, ordered by position. Call it after the last `add`, and once per partition."""
        with self._spilling:
            self._full += self._open.values()
            self._open.clear()
            spilled = [piece for file in self._full for piece in file.take(part)]
        return _in_order(spilled + _pieces(self._chunks, part))

    def _write(self, chunks: list[Chunk]) -> None:
        """Write chunks to the temporary files."""
        # A file has one schema, but codes may have been given up since a chunk was made.
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
            # One batch, or several if 32-bit offsets do not reach all of the text.
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
    """A temporary file of record batches: written first, then mapped and taken."""

    def __init__(self, file: ReservedFile, schema: pa.Schema) -> None:
        self.schema = schema
        self._file = file
        self._out = open(file.fd, "r+b", closefd=False)  # noqa: SIM115 # open until it is taken from
        self._writer: pa.RecordBatchFileWriter | None = pa.ipc.new_file(self._out, schema)
        self._numbers: dict[int, list[int]] = {}  # of the batches of each partition
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
        """The rows of a partition. With the last one the file is closed and removed; the rows stay mapped while in use."""
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
    """The distinct texts of a column, numbered in order of appearance; given up when there are too many.

    `entries` is None once they are given up; `decode` still decodes the codes made until then. Threads may use it at once.
    """

    def __init__(self) -> None:
        self.entries: pa.Array | None = pa.array([], pa.string())
        self._texts = self.entries
        self._rows = 0
        self._lock = threading.Lock()

    def encode(self, column: pa.Array) -> pa.Array:
        """The column as codes; unchanged once there are too many texts."""
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
        """Codes as text; text is returned unchanged."""
        return pc.take(self._texts, column) if column.type == CODES else column


def _pieces(chunks: Sequence[Chunk], part: int) -> list[pa.RecordBatch]:
    """The pieces of a partition, ordered by the position of their first rows."""
    return _in_order([piece for piece in (chunk.piece(part) for chunk in chunks) if piece.num_rows])


def _in_order(pieces: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    return sorted(pieces, key=lambda piece: int(read_positions(piece)[0]))


def joined(arrays: Sequence[Numbers]) -> Numbers:
    if not arrays:
        return np.zeros(0, np.uint64)
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def concat(arrays: list[pa.Array], kind: pa.DataType | None = None) -> pa.Array:
    """Concatenate arrays. More text than 32-bit offsets reach becomes large text, if `kind` is the column's type."""
    if len(arrays) == 1:
        return arrays[0]
    if kind is not None and (pa.types.is_string(kind) or pa.types.is_binary(kind)):
        ends = (offsets_and_data(array)[0] for array in arrays if not pa.types.is_integer(array.type))
        if sum(int(offsets[-1] - offsets[0]) for offsets in ends) > _INT32_AT_MOST:
            large = pa.large_string() if pa.types.is_string(kind) else pa.large_binary()
            arrays = [array.cast(large) for array in arrays]
    return pa.concat_arrays(arrays)
