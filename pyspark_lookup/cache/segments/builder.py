"""Builds a segment in bounded memory: takes rows in any order, and writes them in the order of their keys' hashes.

Rows are first divided into partitions by the upper bits of their key's hash, a chunk at a time. Then each partition is sorted and appended
to the file. Chunks that do not fit in memory wait in temporary files, partition by partition. Several threads do both steps: nearly all
time is spent in Arrow and numpy, which release the GIL. Columns with few distinct texts become codes with a dictionary, because gathering
codes costs a tenth of gathering text.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.cache.segments.chunks import CODES, Chunk, ChunkStore, Codes, concat, joined, read_positions
from pyspark_lookup.columnar.buffers import ColumnSizes, ColumnWriter, without_hidden_values
from pyspark_lookup.columnar.hash_index import IndexBuilder, Order, order_rows
from pyspark_lookup.columnar.keys import Keys, Numbers, Seed, as_indices
from pyspark_lookup.columnar.types import text_of_schema
from pyspark_lookup.core.threads import run_in_order
from pyspark_lookup.storage.disk import ReservedFile, SegmentWriter

ROW_BITS = np.uint64(40)  # of a position: the file's number is above, the row in the file below
_DEAL_ABOVE_BYTES = 32 * 1024 * 1024
_CHUNK_BYTES = 16 * 1024 * 1024
_PARTITION_BYTES = 16 * 1024 * 1024
_PARTITIONS_AT_MOST = 1024
_MAPPED_ABOVE_BYTES = 32 * 1024 * 1024  # a larger array of the index is made in a temporary file
_SHARES = 16  # of the memory: a thread works on one or two of them

_Columns = tuple[list[pa.Array], Numbers]  # columns, and the positions of their rows


class SegmentBuilder:
    """Takes the rows of a segment and writes it.

    `keys` (names of columns of `schema`) may be empty: then rows keep their order, and there is no index. `spill` makes a temporary file of
    a size. `memory_bytes`: about how much memory it may use. `threads`: the number of threads that add rows, and write the segment; 0: only
    the caller's. Always call `close`.
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
        self._bounds: tuple[int, int] | None = None  # of a key that is a single whole number
        self._keyless_rows = 0
        self._sizes = [ColumnSizes(f"c{n}", field.type) for n, field in enumerate(schema)]
        self._waiting: list[_Columns] = []
        self._waiting_bytes, self._waiting_share = 0, 0.0
        self._partition_bits: int | None = None  # set once rows are dealt
        self.rows = 0
        self.meta: dict[str, Any] = {}  # the footer's contents, after `finish`; the caller fills in `files`

    def add(self, rows: Iterable[tuple[pa.RecordBatch, Numbers, float]]) -> None:
        """Add batches with the segment's schema, in any order; several threads may do so at once.

        Each batch comes with the positions of its rows (uint64: file number << ROW_BITS | row in the file), and with its approximate share
        of all rows.
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
        """Set the number of partitions. Returns the rows that have waited for it."""
        self._partition_bits = partition_bits
        waiting, self._waiting = self._waiting, []
        return waiting

    @property
    def _partitions(self) -> int:
        """The number of partitions. Rows without a key are in one more, after the others."""
        return 1 << (self._partition_bits or 0) if self._keys else 0

    def _deal(self, columns: list[pa.Array], positions: Numbers) -> None:
        """Bring the rows of each partition together; rows without a key come last."""
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
        file_rows: Sequence[int],
        strict: bool = True,
        progress: Callable[[float], None] = lambda share: None,
    ) -> SegmentWriter:
        """Write the segment except for its footer, and return it. `file_rows`: the number of rows of each file, by its number.

        `progress` is called with the share of the rows that is written. Raises SkewedError if the seed does not suit the keys, unless
        `strict` is False. The caller finishes and closes the writer.
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
            "files": [],
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
        """Count rows without a key, and track the bounds of whole-number keys: the index needs both before its first key."""
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
        """An array of zeros. A large one is mapped from a temporary file, so it takes no memory of the process."""
        size = count * kind.itemsize
        if size <= _MAPPED_ABOVE_BYTES:
            return np.zeros(count, kind)
        file = self._spill(size)
        self._mapped.append(file)
        # On a full disk, writing to a hole in a mapped file would kill the process.
        os.posix_fallocate(file.fd, 0, size)
        # Opened again, because a mapping keeps its descriptor open, also in a forked child, and with it the lock of `file`.
        with open(file.path, "r+b") as reopened:
            return np.frombuffer(mmap.mmap(reopened.fileno(), size), kind)

    def _arrange(self, part: int, starts: Numbers, narrow: type[np.unsignedinteger[Any]]) -> _Arranged | None:
        """The rows of a partition in the order that they have in the file; None if there are none. `starts`: the first row of each file."""
        pieces = self._store.take(part)
        if not pieces:
            return None
        columns = []
        for number, field in enumerate(self._schema):
            arrays = [self._final(number, piece.column(number)) for piece in pieces]
            columns.append(concat(arrays, field.type))
        positions = joined(list(map(read_positions, pieces)))
        by_position = None
        if not (positions[1:] > positions[:-1]).all():  # chunks came from layers, or overlapped
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
        """A column as it is written: codes become text again if the column had too many distinct texts."""
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
    """A partition in the order that it has in the file. `keyed`: the sort order, and the keys of the rows before sorting."""

    columns: list[pa.Array]
    ordinals: Numbers
    keyed: tuple[Order, Keys] | None


def _is_whole(kind: pa.DataType) -> bool:
    """Whether values are whole numbers, which can serve as addresses of slots."""
    return bool(
        pa.types.is_integer(kind) or pa.types.is_date(kind) or pa.types.is_timestamp(kind) or pa.types.is_boolean(kind)
    )
