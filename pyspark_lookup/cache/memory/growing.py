"""Columns that grow at their end and are read as one Arrow array, without copying existing values.

The buffers behind a column are larger than the part in use. A view that was handed out earlier does not change: new values are written
behind it, and a full buffer is replaced, not changed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.buffers import child_arrays, child_types, has_offsets, is_bytes, list_offsets, read_column
from pyspark_lookup.columnar.keys import Numbers, as_bools, as_indices, offsets_and_data

_INT32_AT_MOST = 2**31 - 1
_SMALLEST = 1024


class GrowingNumbers:
    """Numbers of one type, which grow at the end. `view`: all of them, in memory that may be written to."""

    def __init__(self, dtype: Any, room: int = 0) -> None:
        # Unused room takes no memory. (numpy requests huge pages for large arrays only in `empty`.)
        self._numbers: Numbers = np.empty(max(room, _SMALLEST), dtype)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def view(self) -> Numbers:
        return self._numbers[: self._count]

    def append(self, numbers: Any) -> None:
        """Put `numbers` (an array of this type) at the end."""
        end = self._count + len(numbers)
        if end > len(self._numbers):
            larger = np.empty(max(2 * len(self._numbers), end), self._numbers.dtype)
            larger[: self._count] = self.view
            self._numbers = larger
        self._numbers[self._count : end] = numbers
        self._count = end

    def drop_last(self) -> None:
        self._count -= 1

    def as_type(self, dtype: Any) -> GrowingNumbers:
        """The same numbers in another type."""
        converted = GrowingNumbers(dtype, max(len(self._numbers), self._count))
        converted.append(self.view)
        return converted

    def buffer(self) -> pa.Buffer:
        return pa.py_buffer(self.view)


class _GrowingBits:
    def __init__(self, rows: int = 0) -> None:
        self._bytes = GrowingNumbers(np.uint8)
        self._count = 0
        if rows:
            self.append(np.ones(rows, np.bool_))

    def append(self, bits: Numbers) -> None:
        spare = self._count % 8
        if spare:
            # The last byte is written again with its lower bits unchanged, so readers of earlier rows see no change.
            last = np.unpackbits(self._bytes.view[-1:], bitorder="little", count=spare)
            self._bytes.drop_last()
            bits = np.concatenate([last, bits.view(np.uint8)])
        self._bytes.append(np.packbits(bits, bitorder="little"))
        self._count += len(bits) - spare

    def buffer(self) -> pa.Buffer:
        return self._bytes.buffer()


class GrowingColumn:
    """One column of a type that `buffers` can store."""

    def __init__(self, kind: pa.DataType, name: str = "c", room: int = 0) -> None:
        self.kind = kind
        self.rows = 0
        self._name = name
        self._valid: _GrowingBits | None = None
        self._bits = _GrowingBits() if pa.types.is_boolean(kind) else None
        self._values: GrowingNumbers | None = None
        self._offsets: GrowingNumbers | None = None
        self._end = 0
        if is_bytes(kind) or has_offsets(kind):
            self._offsets = GrowingNumbers(np.int32, room)
            self._offsets.append(np.zeros(1, np.int32))
        if is_bytes(kind):
            self._values = GrowingNumbers(np.uint8)
        elif self._bits is None and not has_offsets(kind) and not pa.types.is_struct(kind):
            width = kind.bit_width // 8
            # Copied in the widest numbers that divide it.
            self._values = GrowingNumbers(
                np.dtype(f"u{width}") if width in (1, 2, 4, 8) else np.dtype(f"V{width}"), room
            )
        self._children = [GrowingColumn(child, f"{name}.{n}") for n, child in enumerate(child_types(kind))]

    def append(self, array: pa.Array) -> None:
        """Put the rows of `array`, which has this column's type, at the end."""
        if array.null_count and self._valid is None:
            self._valid = _GrowingBits(self.rows)
        if self._valid is not None:
            self._valid.append(as_bools(array.is_valid()))
        if self._bits is not None:
            self._bits.append(as_bools(array.fill_null(False) if array.null_count else array))
        elif is_bytes(self.kind):
            offsets, data = offsets_and_data(array)
            assert self._values is not None
            self._values.append(data[offsets[0] : offsets[-1]])
            self._append_offsets(offsets)
        elif self._offsets is not None:
            self._append_offsets(list_offsets(array))
        elif self._values is not None and len(array):
            stored = self._values.view
            values = np.frombuffer(array.buffers()[1], stored.dtype, array.offset + len(array))
            self._values.append(values[array.offset :])
        for column, child in zip(self._children, child_arrays(array), strict=True):
            column.append(child)
        self.rows += len(array)

    def check_room(self, array: pa.Array) -> None:
        """Raise OverflowError if the rows of `array` cannot be appended."""
        if self._offsets is not None and not is_bytes(self.kind):
            offsets = list_offsets(array)
            if self._end + int(offsets[-1] - offsets[0]) > _INT32_AT_MOST:
                raise OverflowError(f"a column of type {self.kind} has more than {_INT32_AT_MOST} elements")
        for column, child in zip(self._children, child_arrays(array), strict=True):
            column.check_room(child)

    def _append_offsets(self, offsets: Numbers) -> None:
        assert self._offsets is not None
        moved = offsets[1:] + (self._end - int(offsets[0]))
        self._end += int(offsets[-1] - offsets[0])
        if self._end > _INT32_AT_MOST and self._offsets.view.dtype != np.int64:
            self._offsets = self._offsets.as_type(np.int64)
        self._offsets.append(moved)

    def view(self) -> pa.Array:
        """All rows so far; text and binary past 2 GiB as their large type."""
        return read_column(self._name, self.kind, self.rows, self._streams())

    def _streams(self) -> dict[str, pa.Buffer]:
        data = "bytes" if is_bytes(self.kind) else "values"
        numbers_by_part = {
            "valid": self._valid,
            "offsets": self._offsets,
            data: self._bits if self._bits is not None else self._values,
        }
        streams = {
            f"{self._name}.{part}": numbers.buffer() for part, numbers in numbers_by_part.items() if numbers is not None
        }
        for column in self._children:
            streams |= column._streams()
        return streams

    def take(self, rows: Numbers) -> GrowingColumn:
        """A column of these rows only, in this order, with room to double."""
        column = GrowingColumn(self.kind, self._name, 2 * len(rows))
        rows_to_keep = self._take(rows)
        if is_bytes(self.kind):
            column._values = GrowingNumbers(np.uint8, 2 * rows_to_keep.nbytes)
        column.append(rows_to_keep)
        return column

    def _take(self, rows: Numbers) -> pa.Array:
        if len(rows) and int(rows[-1]) - int(rows[0]) == len(rows) - 1 and bool((rows[1:] > rows[:-1]).all()):
            return self.view().slice(int(rows[0]), len(rows))
        return pc.take(self.view(), as_indices(rows), boundscheck=False)

    def row_bytes(self, array: pa.Array) -> Numbers | int:
        """The bytes that each row of `array` takes here: exact for text and binary, an average for nested values."""
        if is_bytes(self.kind):
            offsets, _ = offsets_and_data(array)
            return np.asarray(offsets[1:] - offsets[:-1] + 4)
        if self._children:
            return -(-int(array.nbytes) // max(len(array), 1))
        return 1 if self._bits is not None else int(self.kind.bit_width) // 8
