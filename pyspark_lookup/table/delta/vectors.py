"""Deletion vectors: which rows of a Delta data file are deleted, as 64-bit roaring bitmaps."""

from __future__ import annotations

import base64
import dataclasses
import struct
import uuid
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from pyspark_lookup.base.decoding import UNREADABLE, count_of, text_of
from pyspark_lookup.base.errors import DamagedFileError
from pyspark_lookup.columnar.keys import Numbers
from pyspark_lookup.io.stores import PART_OF_FILE, FileVersion, Range
from pyspark_lookup.options.conf_file import redact

_MAGIC = 1681511377
_COOKIE, _COOKIE_WITH_RUNS = 12346, 12347
_NO_OFFSETS = 4  # containers, below which a bitmap with runs has no table of where they begin
_ARRAY_AT_MOST = 4096  # values of a container, above which it is a bitmap
_BITMAP_BYTES = 8192
_CONTAINERS_AT_MOST = _CONTAINER_VALUES = 2**16
# Z85 (ZeroMQ 32) is base 85 with other digits than Python's.
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_DIGITS = {ord(ours): ord(theirs) for ours, theirs in zip(_Z85, _B85, strict=True)}
_UUID_DIGITS = 20


def decode_z85(text: str) -> bytes:
    """The bytes of a Z85 text. Raises ValueError for another one."""
    if len(text) % 5 or not set(text) <= set(_Z85):
        raise ValueError(f"no Z85: {text[:40]!r}")
    return base64.b85decode(text.translate(_DIGITS))


@dataclasses.dataclass(frozen=True)
class DeletionVector:
    """A deletion vector of one data file, as the log describes it: `storage` is `i`, `u` or `p`, `data` what goes with it.

    `path`: the data file's below the table, or its URL outside of it. `url`: the file with the vector; None for one in the log itself.
    """

    path: str
    storage: str
    data: str
    offset: int
    size: int
    cardinality: int
    url: str | None

    @property
    def name(self) -> str:
        """As the protocol's unique id of a vector."""
        return f"{self.storage}{self.data}@{self.offset}#{self.path}"

    @property
    def place(self) -> tuple[FileVersion, Range] | None:
        return None if self.url is None else (FileVersion(self.url, 0, PART_OF_FILE), (self.offset, self.size + 8))

    keys = None

    def positions(self, data: bytes | memoryview) -> Mapping[str, Numbers]:
        try:
            found = read_roaring(decode_z85(self.data)[: self.size] if self.url is None else _checked(data, self.size))
            if len(found) != self.cardinality:
                raise ValueError(f"{len(found)} rows, where the log says {self.cardinality}")
        except (*UNREADABLE, struct.error) as problem:
            of = "the deletion vector of " if self.url is None else ""
            at = "" if self.url is None else f" at {self.offset}"
            shown = redact("path", self.path if self.url is None else self.url)
            raise DamagedFileError(f"{of}{shown}{at} is damaged: {problem}") from None
        return {self.path: found}

    def to_json(self) -> list[Any]:
        return ["vector", self.path, self.storage, self.data, self.offset, self.size, self.cardinality, self.url]

    @classmethod
    def from_json(cls, found: Any) -> DeletionVector:
        """What `to_json` wrote, without its first part. Raises TypeError or ValueError for anything else."""
        path, storage, data, offset, size, cardinality, url = found
        place = None if url is None else text_of(url)
        counts = (count_of(offset), count_of(size), count_of(cardinality))
        return cls(text_of(path), text_of(storage), text_of(data), *counts, place)


def vector_url(table: str, storage: str, data: str) -> str | None:
    """Where a vector lies; None if it is in the log. Raises ValueError for what the protocol does not know."""
    if storage == "i":
        return None
    if storage == "p":
        return data
    if storage != "u" or len(data) < _UUID_DIGITS:
        raise ValueError(f"storageType {storage!r} of a deletion vector")
    prefix, name = data[:-_UUID_DIGITS], uuid.UUID(bytes=decode_z85(data[-_UUID_DIGITS:]))
    return "/".join([table, *([prefix] if prefix else []), f"deletion_vector_{name}.bin"])


def _checked(data: bytes | memoryview, size: int) -> bytes:
    """A vector in a file: its size, itself, and its CRC-32. Raises ValueError if they do not fit."""
    if len(data) != size + 8 or int.from_bytes(data[:4], "big") != size:
        raise ValueError("its size is not that in the log")
    vector = bytes(data[4:-4])
    if zlib.crc32(vector) != int.from_bytes(data[-4:], "big"):
        raise ValueError("its checksum is wrong")
    return vector


def read_roaring(data: bytes) -> Numbers:
    """The values (int64, ascending) of a 64-bit roaring bitmap in the portable form. Raises ValueError or struct.error."""
    magic, count = struct.unpack_from("<iq", data)
    if magic != _MAGIC:
        raise ValueError(f"magic number {magic}")
    at, parts = 12, []
    previous = -1
    for _ in range(count):
        (high,) = struct.unpack_from("<I", data, at)
        if high <= previous or high >= 2**31:
            raise ValueError("its parts are out of order")
        previous = high
        low, at = _read_bitmap(data, at + 4)
        parts.append(low + (high << 32))
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes follow its end")
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _read_bitmap(data: bytes, at: int) -> tuple[Numbers, int]:
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
