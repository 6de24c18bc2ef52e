"""Reads deletion vectors of Delta and Iceberg tables: 64-bit roaring bitmaps in the portable serialization."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from pyroaring import BitMap64

from pyspark_lookup.columnar.keys import Numbers

_MAGIC = 1681511377
_EMPTY_PART_BYTES = 12  # the part's number, a cookie, and a count of 0
_ROWS_AT_MOST = 2**28  # deleted rows of one file; more would need too much memory


def checked_blob(data: bytes | memoryview, size: int) -> bytes:
    """The deletion vector in `data`, which has the vector's size (4 bytes), the vector itself, and the CRC-32 of the vector.

    `size`: the size of the vector, by the table's metadata. Raises ValueError if the size or the CRC-32 is another.
    """
    if len(data) != size + 8 or int.from_bytes(data[:4], "big") != size:
        raise ValueError("its size differs from the one in the table's metadata")
    vector = bytes(data[4:-4])
    if zlib.crc32(vector) != int.from_bytes(data[-4:], "big"):
        raise ValueError("its checksum is wrong")
    return vector


def read_roaring(data: bytes, count: int) -> Numbers:
    """The values (int64, ascending) of a 64-bit roaring bitmap in the portable serialization.

    Raises ValueError or struct.error if the bitmap is malformed or does not have `count` values.
    """
    if count > _ROWS_AT_MOST:
        raise ValueError(f"{count} deleted rows of one file, more than {_ROWS_AT_MOST}")
    (magic,) = struct.unpack_from("<i", data)
    if magic != _MAGIC:
        raise ValueError(f"it begins with the wrong magic number {magic}")
    bitmap = BitMap64.deserialize(bytes(data[4:]))
    # Checked before memory is allocated for the values: a few bytes may stand for 65,536 of them.
    if len(bitmap) > count:
        raise ValueError(f"{len(bitmap)} rows instead of {count}, the count in the table's metadata")
    if len(bitmap) < count:
        raise ValueError(f"{len(bitmap)} rows instead of {count}, the count in the table's metadata")
    # A part has the values with the same upper 32 bits. Bytes that belong to no part are an error, which `deserialize` does not notice: so
    # compare the sizes. `serialize` leaves out parts without values, which some writers list.
    parts, serialized = struct.unpack_from("<Q", data, 4)[0], bitmap.serialize()
    if len(serialized) + _EMPTY_PART_BYTES * (parts - struct.unpack_from("<Q", serialized)[0]) != len(data) - 4:
        raise ValueError("it has bytes outside its containers")
    if count and bitmap.max() >= 2**63:
        raise ValueError("its containers are out of order")
    return np.frombuffer(bitmap.to_array(), np.int64) if count else np.zeros(0, np.int64)
