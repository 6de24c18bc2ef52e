"""What tests of Delta and of Iceberg tables share: modes, rows as they compare, calls as they count, roaring bitmaps written by hand."""

from __future__ import annotations

import collections
import struct
from collections.abc import Callable, Iterable
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from pyspark_lookup import LookupTable

Rows = collections.Counter[str]
_MANY = 20_000
MODES = {
    "none": {"lookup.cache": "NONE"},
    "partial": {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "100000"},
    "full": {"lookup.cache": "FULL"},
}
COUNTS = ("ufsHeadCount", "ufsListCount", "ufsGetCount")


def rows_of(rows: pa.Table) -> Rows:
    """The rows, whatever the order of columns; of many rows only what tells them from others."""
    names = sorted(rows.column_names)
    if rows.num_rows > _MANY:
        columns = ", ".join(f'"{name}"' for name in names)
        (found,) = duckdb.sql(f"SELECT count(*), sum(hash({columns})), bit_xor(hash({columns})) FROM rows").fetchall()
        return collections.Counter([repr(found)])
    return collections.Counter(repr([row[name] for name in names]) for row in rows.to_pylist())


def counting(table: LookupTable, act: Callable[[], Any]) -> tuple[int, int, int, int]:
    """(heads, lists, gets, bytes) of what is done."""
    before = table.metrics()
    act()
    after = table.metrics()
    heads, lists, gets = (after[name] - before[name] for name in COUNTS)
    return heads, lists, gets, after["ufsGetBytes"] - before["ufsGetBytes"]


def roaring(values: Iterable[int], runs: bool = False) -> bytes:
    """A 64-bit roaring bitmap in the portable form: containers as arrays or bitmaps, or as `runs`."""
    every = np.unique(np.array([*values], np.int64))
    highs = sorted({int(value) for value in every >> 32})
    parts = [struct.pack("<iq", 1681511377, len(highs))]
    for high in highs:
        low = every[every >> 32 == high] & 0xFFFFFFFF
        keys = sorted({int(value) for value in low >> 16})
        containers = [(low[low >> 16 == key] & 0xFFFF).astype("<u2") for key in keys]
        heads = b"".join(struct.pack("<HH", key, len(one) - 1) for key, one in zip(keys, containers, strict=True))
        bodies = [_container(one, runs) for one in containers]
        parts.append(struct.pack("<I", high))
        if runs:
            flags = np.packbits(np.ones(len(keys), bool), bitorder="little").tobytes()
            parts.append(struct.pack("<I", 12347 | (len(keys) - 1) << 16) + flags + heads)
        else:
            parts.append(struct.pack("<II", 12346, len(keys)) + heads)
        if not runs or len(keys) >= 4:
            parts.append(bytes(4 * len(keys)))  # where each begins, which readers may skip
        parts += bodies
    return b"".join(parts)


def _container(values: Any, runs: bool) -> bytes:
    if runs:
        starts = np.flatnonzero(np.diff(values.astype(np.int64), prepend=-2) != 1)
        lengths = np.diff([*starts, len(values)])
        pairs = [struct.pack("<HH", values[start], length - 1) for start, length in zip(starts, lengths, strict=True)]
        return struct.pack("<H", len(pairs)) + b"".join(pairs)
    if len(values) <= 4096:
        return bytes(values.tobytes())
    bits = np.zeros(2**16, bool)
    bits[values] = True
    return np.packbits(bits, bitorder="little").tobytes()
