"""64-bit roaring bitmaps in the portable form, as deletion vectors of Delta and Iceberg are."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from pyspark_lookup.columnar.keys import Numbers

_MAGIC = 1681511377
_COOKIE, _COOKIE_WITH_RUNS = 12346, 12347
_NO_OFFSETS = 4  # containers, below which a bitmap with runs has no table of where they begin
_ARRAY_AT_MOST = 4096  # values of a container, above which it is a bitmap
_BITMAP_BYTES = 8192
_CONTAINERS_AT_MOST = _CONTAINER_VALUES = 2**16
_ROWS_AT_MOST = 2**28  # of one file that are deleted, for which there is room in memory


def checked_blob(data: bytes | memoryview, size: int) -> bytes:
    """A deletion vector in a file: its size, itself, and its CRC-32. Raises ValueError if they do not fit."""
    if len(data) != size + 8 or int.from_bytes(data[:4], "big") != size:
        raise ValueError("its size is not that in the log")
    vector = bytes(data[4:-4])
    if zlib.crc32(vector) != int.from_bytes(data[-4:], "big"):
        raise ValueError("its checksum is wrong")
    return vector


def read_roaring(data: bytes, count: int) -> Numbers:
    """The `count` values (int64, ascending) of a 64-bit roaring bitmap in the portable form. Raises ValueError or struct.error."""
    if count > _ROWS_AT_MOST:
        raise ValueError(f"{count} deleted rows of one file, more than {_ROWS_AT_MOST}")
    magic, bitmaps = struct.unpack_from("<iq", data)
    if magic != _MAGIC:
        raise ValueError(f"magic number {magic}")
    at, parts, left = 12, [], count
    previous = -1
    for _ in range(bitmaps):
        (high,) = struct.unpack_from("<I", data, at)
        if high <= previous or high >= 2**31:
            raise ValueError("its parts are out of order")
        previous = high
        low, at = _read_bitmap(data, at + 4, left)
        left -= len(low)
        parts.append(low + (high << 32))
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes follow its end")
    if left:
        raise ValueError(f"{count - left} rows, where {count} are announced")
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _read_bitmap(data: bytes, at: int, at_most: int) -> tuple[Numbers, int]:
    """(the values of a 32-bit bitmap that begins at `at`, where it ends)."""
    (cookie,) = struct.unpack_from("<I", data, at)
    if cookie & 0xFFFF == _COOKIE_WITH_RUNS:
        count, at = (cookie >> 16) + 1, at + 4
        bits = np.frombuffer(data, np.uint8, (count + 7) // 8, at)
        runs, at = np.unpackbits(bits, bitorder="little", count=count).astype(bool), at + (count + 7) // 8
    elif cookie == _COOKIE:
        (count,) = struct.unpack_from("<I", data, at + 4)
        if count > _CONTAINERS_AT_MOST:  # before there is room for them
            raise ValueError(f"{count} containers")
        runs, at = np.zeros(count, bool), at + 8
    else:
        raise ValueError(f"cookie {cookie}")
    heads = np.frombuffer(data, "<u2", 2 * count, at).reshape(-1, 2).astype(np.int64)
    if (np.diff(heads[:, 0]) <= 0).any():
        raise ValueError("its containers are out of order")
    if heads[:, 1].sum() + count > at_most:  # a few bytes may stand for 65,536 values
        raise ValueError("it has more rows than are announced")
    at += 4 * count
    if not runs.any() or count >= _NO_OFFSETS:
        at += 4 * count  # where each begins: one after the other
    parts = []
    for (key, less), is_run in zip(heads.tolist(), runs.tolist(), strict=True):
        values, at = _read_container(data, at, less + 1, is_run)
        if len(values) != less + 1 or (np.diff(values) <= 0).any() or values[-1] >= _CONTAINER_VALUES:
            raise ValueError("a container does not hold what it says")
        parts.append(values + (key << 16))
    return np.concatenate(parts) if parts else np.zeros(0, np.int64), at


def _read_container(data: bytes, at: int, count: int, is_run: bool) -> tuple[Numbers, int]:
    if is_run:
        (runs,) = struct.unpack_from("<H", data, at)
        pairs = np.frombuffer(data, "<u2", 2 * runs, at + 2).reshape(-1, 2).astype(np.int64)
        lengths = pairs[:, 1] + 1
        if lengths.sum() != count:  # before there is room for them
            raise ValueError("a container of runs does not hold what it says")
        starts = np.repeat(pairs[:, 0] - (np.cumsum(lengths) - lengths), lengths)
        return starts + np.arange(len(starts)), at + 2 + 4 * runs
    if count <= _ARRAY_AT_MOST:
        return np.frombuffer(data, "<u2", count, at).astype(np.int64), at + 2 * count
    bits = np.unpackbits(np.frombuffer(data, np.uint8, _BITMAP_BYTES, at), bitorder="little")
    return np.flatnonzero(bits), at + _BITMAP_BYTES
