"""64-bit roaring bitmaps in the portable form, the format of deletion vectors in Delta and Iceberg."""

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
    """The deletion vector in a file's bytes, which are its size, the vector and its CRC-32. Raises ValueError if these do not match."""
    if len(data) != size + 8 or int.from_bytes(data[:4], "big") != size:
        raise ValueError("its size is not the one that the table's metadata says")
    vector = bytes(data[4:-4])
    if zlib.crc32(vector) != int.from_bytes(data[-4:], "big"):
        raise ValueError("its checksum is wrong")
    return vector


def read_roaring(data: bytes, count: int) -> Numbers:
    """The `count` values (int64, ascending) of a 64-bit roaring bitmap in the portable form. Raises ValueError or struct.error."""
    if count > _ROWS_AT_MOST:
        raise ValueError(f"{count} deleted rows of one file, more than {_ROWS_AT_MOST}")
    (magic,) = struct.unpack_from("<i", data)
    if magic != _MAGIC:
        raise ValueError(f"it begins with the wrong magic number {magic}")
    bitmap = BitMap64.deserialize(bytes(data[4:]))
    if len(bitmap) > count:  # before memory is allocated for them: a few bytes may stand for 65,536 values
        raise ValueError(f"{len(bitmap)} rows instead of the {count} that the table's metadata says")
    if len(bitmap) < count:
        raise ValueError(f"{len(bitmap)} rows instead of the {count} that the table's metadata says")
    # The reader skips bytes that belong to no part. Parts without rows, which some writers list, are not in the bitmap.
    parts, serialized = struct.unpack_from("<Q", data, 4)[0], bitmap.serialize()
    if len(serialized) + _EMPTY_PART_BYTES * (parts - struct.unpack_from("<Q", serialized)[0]) != len(data) - 4:
        raise ValueError("it has bytes outside its containers")
    if count and bitmap.max() >= 2**63:
        raise ValueError("its containers are out of order")
    return np.frombuffer(bitmap.to_array(), np.int64) if count else np.zeros(0, np.int64)
