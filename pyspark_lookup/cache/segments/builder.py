"""Building a segment: rows in any order come in, rows in hash order lie on disk, in bounded memory.

Rows are first dealt to partitions by the upper bits of their key's hash, which stays in the
processor's caches; then each partition is sorted by itself and appended to the file. Partitions
that do not fit in memory meanwhile wait in temporary files. Columns of few distinct texts become
codes with a dictionary: gathering codes costs a tenth of gathering text.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.buffers import ColumnSizes, ColumnWriter, without_hidden_values
from pyspark_lookup.columnar.hash_index import IndexBuilder, order_rows
from pyspark_lookup.columnar.keys import Keys, Numbers, Seed, as_array, as_indices, offsets_and_data
from pyspark_lookup.columnar.types import text_of_schema
from pyspark_lookup.io.disk import ReservedFile, SegmentWriter

CODES = pa.uint16()
ROW_BITS = np.uint64(40)  # of a position: the file's number above, the row in the file below
_CODES_AT_MOST = 2**16
_DEAL_ABOVE_BYTES = 32 * 1024 * 1024
_PARTITION_BYTES = 16 * 1024 * 1024
_PARTITIONS_AT_MOST = 256
_INT32_AT_MOST = 2**31 - 1


class SegmentBuilder:
    """Takes the rows of a segment and writes it.

    `keys` (names of columns of `schema`) may be empty: then rows stay as they come, without an index.
    `spill` makes temporary files of a size. Call `close` whatever happens.
    """

    def __init__(
        self,
        schema: pa.Schema,
        keys: Sequence[str],
        seed: Seed,
        spill: Callable[[int], ReservedFile],
        memory_bytes: int,
    ) -> None:
        self._schema = schema
        self._keys = tuple(schema.get_field_index(name) for name in keys)
        self._seed = seed
        self._memory_bytes = memory_bytes
        self._store = _PartitionStore(spill)
        self._codes = {
            n: _Codes() for n, field in enumerate(schema) if pa.types.is_string(field.type) and n not in self._keys
        }
        self._bounds: tuple[int, int] | None = None  # of a key that is one whole number
        self._sizes = [ColumnSizes(f"c{n}", field.type) for n, field in enumerate(schema)]
        self._waiting: list[tuple[pa.RecordBatch, Numbers]] = []
        self._partition_bits = 0
        self._dealing = False
        self._pending_bytes = 0
        self._last_position = -1
        self._in_order = True
        self.rows = 0
        self.meta: dict[str, Any] = {}  # what the footer says, after `finish`; the caller fills in `files`

    def add(self, batch: pa.RecordBatch, positions: Numbers, share_done: float) -> None:
        """Rows with the segment's schema, at `positions` (uint64: file number << ROW_BITS | row in the file).

        `share_done`: which part of everything has come with them, about.
        """
        if not batch.num_rows:
            return
        batch = pa.RecordBatch.from_arrays(list(map(without_hidden_values, batch.columns)), schema=batch.schema)
        self._in_order &= int(positions[0]) > self._last_position and bool((positions[1:] > positions[:-1]).all())
        self._last_position = int(positions[-1])
        self.rows += batch.num_rows
        if self._dealing:
            self._deal(batch, positions)
        else:
            self._waiting.append((batch, positions))
            self._pending_bytes += batch.nbytes
            if self._pending_bytes > _DEAL_ABOVE_BYTES:
                wanted = self._pending_bytes / max(share_done, 1e-6) / _PARTITION_BYTES
                self._partition_bits = min(max(int(wanted), 1), _PARTITIONS_AT_MOST).bit_length() - 1
                self._deal_waiting()
        if self._pending_bytes > self._memory_bytes:
            if not self._dealing:
                self._deal_waiting()
            self._store.spill()
            self._pending_bytes = 0

    def _deal_waiting(self) -> None:
        self._dealing, self._pending_bytes = True, 0
        for batch, positions in self._waiting:
            self._deal(batch, positions)
        self._waiting.clear()

    def _deal(self, batch: pa.RecordBatch, positions: Numbers) -> None:
        """Give each row to its partition; rows without a key go to the one behind all others."""
        for sizes, column in zip(self._sizes, batch.columns, strict=True):
            sizes.add(column)
        columns = [self._encode(n, column) for n, column in enumerate(batch.columns)]
        parts = 1 << self._partition_bits if self._keys else 1
        if self._keys:
            keys = Keys([batch.column(n) for n in self._keys])
            hashes = keys.hashes(self._seed)
            numbers = (
                (hashes >> np.uint64(64 - self._partition_bits)) if parts > 1 else np.zeros(len(hashes), np.uint64)
            )
            numbers = numbers.astype(np.uint16)
            if keys.valid is not None:
                numbers[~keys.valid] = parts
            self._widen_bounds(keys)
        else:
            hashes, numbers = np.zeros(batch.num_rows, np.uint64), np.zeros(batch.num_rows, np.uint16)
        counts = np.bincount(numbers, minlength=parts + 1)
        if np.count_nonzero(counts) > 1:
            order = np.argsort(numbers, kind="stable")
            indices = as_indices(order)
            columns = [pc.take(column, indices, boundscheck=False) for column in columns]
            hashes, positions = hashes[order], positions[order]
        ends = np.cumsum(counts).tolist()
        for part, end in enumerate(ends):
            start = ends[part - 1] if part else 0
            if end > start:
                piece = [column.slice(start, end - start) for column in columns]
                self._store.add(part, _Piece(piece, hashes[start:end], positions[start:end]))
        self._pending_bytes += sum(column.nbytes for column in columns) + 16 * batch.num_rows

    def finish(
        self, create: Callable[[Mapping[str, int]], SegmentWriter], file_rows: Sequence[int], strict: bool = True
    ) -> SegmentWriter:
        """The segment, complete but for the footer. `file_rows`: rows of each file, by its number.

        Raises SkewedError if the seed does not suit the keys, unless `strict` is False. The caller
        finishes and closes the writer.
        """
        if not self._dealing:
            self._deal_waiting()
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
        writer = create(regions)
        try:
            writers = [ColumnWriter(column, writer.append) for column in sizes]
            index = self._index() if self._keys else None
            for part in self._store.parts():
                piece = self._collect(self._store.take(part))
                if index is not None and part < (1 << self._partition_bits):
                    piece = self._order(piece, index)
                for column_writer, column in zip(writers, piece.columns, strict=True):
                    column_writer.add(column)
                files = (piece.positions >> ROW_BITS).astype(np.int64)
                ordinals = starts[files] + (piece.positions & ((np.uint64(1) << ROW_BITS) - np.uint64(1)))
                writer.append("ordinals", ordinals.astype(narrow))
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

    def _encode(self, number: int, column: pa.Array) -> pa.Array:
        codes = self._codes.get(number)
        if codes is None or codes.entries is None:
            return column
        encoded = codes.encode(column)
        if encoded is None:
            self._store.rewrite(number, codes.decode)
            return column
        return encoded

    def _widen_bounds(self, keys: Keys) -> None:
        if len(self._keys) != 1 or not _is_whole(self._schema.field(self._keys[0]).type):
            return
        values = keys.columns[0].values
        assert values is not None
        if keys.valid is not None:
            values = values[keys.valid]
        if len(values):
            low, high = int(values.min()), int(values.max())
            known = self._bounds or (low, high)
            self._bounds = min(low, known[0]), max(high, known[1])

    def _index(self) -> IndexBuilder:
        keyed = self.rows - self._store.rows(1 << self._partition_bits)
        first = self._schema.field(self._keys[0]).type
        wide = len(self._keys) > 1 or pa.types.is_string(first) or pa.types.is_binary(first)
        return IndexBuilder(keyed, self._bounds, wide)

    def _column(self, number: int, array: pa.Array) -> pa.Array:
        """A column as it will be written: codes become text again if their column had too many."""
        codes = self._codes.get(number)
        if codes is None or codes.entries is not None or array.type != CODES:
            return array
        return codes.decode(array)  # written to a temporary file before they were given up

    def _collect(self, pieces: list[_Piece]) -> _Piece:
        columns = []
        for number, field in enumerate(self._schema):
            arrays = [self._column(number, piece.columns[number]) for piece in pieces]
            columns.append(arrays[0] if len(arrays) == 1 else _concat(arrays, field.type))
        hashes = np.concatenate([piece.hashes for piece in pieces])
        positions = np.concatenate([piece.positions for piece in pieces])
        if self._in_order:
            return _Piece(columns, hashes, positions)
        return _Piece(columns, hashes, positions).take(np.argsort(positions, kind="stable"))

    def _order(self, piece: _Piece, index: IndexBuilder) -> _Piece:
        keys = Keys([piece.columns[n] for n in self._keys])
        order = order_rows(keys, piece.hashes)
        index.add(order, keys)
        return piece.take(order.rows)

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


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Some rows of a partition: columns, hashes of the keys, positions."""

    columns: list[pa.Array]
    hashes: Numbers
    positions: Numbers

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> _Piece:
        *columns, hashes, positions = batch.columns
        return cls(columns, *(np.frombuffer(a.buffers()[1], np.uint64, len(a)) for a in (hashes, positions)))

    def batch(self) -> pa.RecordBatch:
        """The piece as it is written to a temporary file."""
        columns = [*self.columns, as_array(self.hashes), as_array(self.positions)]
        return pa.RecordBatch.from_arrays(columns, [str(number) for number in range(len(columns))])

    def take(self, rows: Numbers) -> _Piece:
        indices = as_indices(rows)
        columns = [pc.take(column, indices, boundscheck=False) for column in self.columns]
        return _Piece(columns, self.hashes[rows], self.positions[rows])


class _PartitionStore:
    """Pieces of partitions, in memory or mapped from temporary files, in the order in which they came."""

    def __init__(self, spill: Callable[[int], ReservedFile]) -> None:
        self._spill = spill
        self._held: dict[int, list[_Piece]] = {}
        self._spilled: dict[int, list[_Piece]] = {}
        self._rows: collections.Counter[int] = collections.Counter()
        self._files: list[ReservedFile] = []

    def add(self, part: int, piece: _Piece) -> None:
        self._held.setdefault(part, []).append(piece)
        self._rows[part] += len(piece.hashes)

    def rows(self, part: int) -> int:
        return self._rows[part]

    def parts(self) -> list[int]:
        return sorted(self._rows)

    def take(self, part: int) -> list[_Piece]:
        """The pieces of a partition, which are let go of here."""
        return self._spilled.pop(part, []) + self._held.pop(part, [])

    def rewrite(self, number: int, rewritten: Callable[[pa.Array], pa.Array]) -> None:
        """Change a column of the pieces in memory, so that all of them have one schema."""
        for pieces in self._held.values():
            for piece in pieces:
                piece.columns[number] = rewritten(piece.columns[number])

    def spill(self) -> None:
        """Bring what is in memory to a temporary file, and map it in its place."""
        batches = [(part, piece.batch()) for part, pieces in self._held.items() for piece in pieces]
        file = self._spill(sum(batch.nbytes for _, batch in batches))
        self._files.append(file)
        with open(file.fd, "r+b", closefd=False) as out:
            with pa.ipc.new_file(out, batches[0][1].schema) as writer:
                for _, batch in batches:
                    writer.write_batch(batch)
            out.flush()
            file.resize(out.tell())
        self._held.clear()
        # What is mapped stays as long as pieces do.
        with pa.memory_map(str(file.path)) as mapped:
            reader = pa.ipc.open_file(mapped)
            for number, (part, _) in enumerate(batches):
                self._spilled.setdefault(part, []).append(_Piece.of(reader.get_batch(number)))

    def close(self) -> None:
        self._held.clear()
        self._spilled.clear()
        for file in self._files:
            file.close()


class _Codes:
    """The distinct texts of a column, numbered as they come; given up when there are too many.

    `entries` None: given up. Codes made until then are still turned back by `decode`.
    """

    def __init__(self) -> None:
        self.entries: pa.Array | None = pa.array([], pa.string())
        self._known = self.entries
        self._rows = 0

    def encode(self, column: pa.Array) -> pa.Array | None:
        """The column as codes; None from the moment when there are too many texts."""
        found = pc.dictionary_encode(column)
        numbers = pc.index_in(found.dictionary, value_set=self._known) if len(self._known) else None
        fresh = found.dictionary if numbers is None else found.dictionary.filter(numbers.is_null())
        self._rows += len(column)
        if len(self._known) + len(fresh) > min(max(64, self._rows // 4), _CODES_AT_MOST):
            self.entries = None
            return None
        self.entries = self._known = pa.concat_arrays([self._known, fresh])
        numbers = pc.index_in(found.dictionary, value_set=self._known).cast(CODES)
        return pc.take(numbers, found.indices)

    def decode(self, codes: pa.Array) -> pa.Array:
        return pc.take(self._known, codes)


def _concat(arrays: list[pa.Array], kind: pa.DataType) -> pa.Array:
    """One array of many; of more text than 32-bit offsets reach, one of large text."""
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        ends = (offsets_and_data(array)[0] for array in arrays if not pa.types.is_integer(array.type))
        if sum(int(offsets[-1] - offsets[0]) for offsets in ends) > _INT32_AT_MOST:
            large = pa.large_string() if pa.types.is_string(kind) else pa.large_binary()
            arrays = [array.cast(large) for array in arrays]
    return pa.concat_arrays(arrays)


def _is_whole(kind: pa.DataType) -> bool:
    """Whether values are whole numbers, so that slots may be addressed by them."""
    return bool(
        pa.types.is_integer(kind) or pa.types.is_date(kind) or pa.types.is_timestamp(kind) or pa.types.is_boolean(kind)
    )
