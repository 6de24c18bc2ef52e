"""What tests of Delta tables share: the oracle, rows as they compare, and deletion vectors written by hand."""

from __future__ import annotations

import base64
import collections
import json
import struct
import uuid
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from pyspark_lookup import LookupTable
from pyspark_lookup.sources.delta.vectors import _B85, _Z85

Rows = collections.Counter[str]
_MANY = 20_000
MODES = {
    "none": {"lookup.cache": "NONE"},
    "partial": {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "100000"},
    "full": {"lookup.cache": "FULL"},
}


def by_deltalake(table: Path, version: int | None = None) -> pa.Table:
    """All rows, as delta-rs reads them."""
    return pa.table(QueryBuilder().register("t", DeltaTable(str(table), version=version)).execute("SELECT * FROM t"))


def rows_of(rows: pa.Table) -> Rows:
    """The rows, whatever the order of columns; of many rows only what tells them from others."""
    names = sorted(rows.column_names)
    if rows.num_rows > _MANY:
        columns = ", ".join(f'"{name}"' for name in names)
        (found,) = duckdb.sql(f"SELECT count(*), sum(hash({columns})), bit_xor(hash({columns})) FROM rows").fetchall()
        return collections.Counter([repr(found)])
    return collections.Counter(repr([row[name] for name in names]) for row in rows.to_pylist())


def opened(table: Path, cache: Path, mode: str = "none", keys: str | None = None, **options: Any) -> LookupTable:
    """A table in a mode of `MODES`, on the host of a cache directory; `options`: as `version=3`."""
    given = {"lookup.cache.dir": str(cache), **MODES[mode], **({} if keys is None else {"lookup.keys": f"`{keys}`"})}
    return LookupTable(str(table), given | {f"lookup.{key}": str(value) for key, value in options.items()})


def encode_z85(data: bytes) -> str:
    digits = {ord(theirs): ord(ours) for ours, theirs in zip(_Z85, _B85, strict=True)}
    return base64.b85encode(data + bytes(-len(data) % 4)).decode().translate(digits)


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


def vector_of(table: Path, places: Sequence[int], storage: str) -> dict[str, Any]:
    """A deletion vector as the log has it, in a file of its own unless it is `i`."""
    if storage == "i":
        data = roaring(places)
        return _described(storage, data, places) | {"pathOrInlineDv": encode_z85(data)}
    return vectors_of(table, [places], storage)[0]


def vectors_of(table: Path, many: Sequence[Sequence[int]], storage: str = "u") -> list[dict[str, Any]]:
    """Deletion vectors as the log has them, in one file."""
    name, prefix = uuid.uuid4(), "ab" if storage == "u" else ""
    path = table / prefix / f"deletion_vector_{name}.bin"
    path.parent.mkdir(exist_ok=True)
    place = prefix + encode_z85(name.bytes) if storage == "u" else path.as_uri()
    blob, found = b"\1", []
    for places in many:
        data = roaring(places)
        found.append(_described(storage, data, places) | {"pathOrInlineDv": place, "offset": len(blob)})
        blob += struct.pack(">I", len(data)) + data + struct.pack(">I", zlib.crc32(data))
    path.write_bytes(blob)
    return found


def _described(storage: str, data: bytes, places: Sequence[int]) -> dict[str, Any]:
    return {"storageType": storage, "sizeInBytes": len(data), "cardinality": len({*places})}


def append_commit(table: Path, actions: Sequence[dict[str, Any]]) -> int:
    """Write a commit by hand; its version."""
    log = table / "_delta_log"
    version = max(int(path.stem) for path in log.glob("*.json") if path.stem.isdecimal()) + 1
    (log / f"{version:020}.json").write_text("".join(json.dumps(action) + "\n" for action in actions))
    return version
