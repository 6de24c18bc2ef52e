"""What tests of Delta and of Iceberg tables share: modes, rows as they compare, calls as they count, roaring bitmaps."""

import collections
import struct
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
from pyroaring import BitMap64

from pyspark_lookup import LookupTable

Rows = collections.Counter[str]
_MANY = 20_000
MODES = {
    "none": {"lookup.cache": "NONE"},
    "partial": {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "100000"},
    "full": {"lookup.cache": "FULL"},
}
COUNTS = ("ufsHeadCount", "ufsListCount", "ufsGetCount")


def opened(
    table: Path | str,
    cache: Path,
    mode: str = "none",
    keys: str | None = None,
    catalog: dict[str, str] | None = None,
    **options: Any,
) -> LookupTable:
    """A table in a mode of `MODES`, of a directory, a metadata.json, or `namespace.name` in a `catalog`; `options`: as `version=3`."""
    mode_options = {
        "lookup.cache.dir": str(cache),
        **MODES[mode],
        **({} if keys is None else {"lookup.keys": f"`{keys}`"}),
    }
    if catalog is not None:
        mode_options |= {
            "lookup.catalog": "tests",
            **{f"lookup.catalog.{name}": value for name, value in catalog.items()},
        }
    return LookupTable(str(table), mode_options | {f"lookup.{name}": str(value) for name, value in options.items()})


def as_multiset(rows: pa.Table) -> Rows:
    """The rows, whatever the order of columns; of many rows only what tells them from others."""
    names = sorted(rows.column_names)
    if rows.num_rows > _MANY:
        columns = ", ".join(f'"{name}"' for name in names)
        (digest,) = duckdb.sql(f"SELECT count(*), sum(hash({columns})), bit_xor(hash({columns})) FROM rows").fetchall()
        return collections.Counter([repr(digest)])
    return collections.Counter(repr([row[name] for name in names]) for row in rows.to_pylist())


def counting(table: LookupTable, act: Callable[[], Any]) -> tuple[int, int, int, int]:
    """(heads, lists, gets, bytes) of what is done."""
    before = table.metrics()
    act()
    after = table.metrics()
    heads, lists, gets = (after[name] - before[name] for name in COUNTS)
    return heads, lists, gets, after["ufsGetBytes"] - before["ufsGetBytes"]


def roaring(values: Iterable[int], runs: bool = False) -> bytes:
    """A 64-bit roaring bitmap as tables have it, with `runs` where they are shorter."""
    bitmap = BitMap64(values)
    if runs:
        bitmap.run_optimize()
    return struct.pack("<i", 1681511377) + bytes(bitmap.serialize())


def sealed(data: bytes) -> bytes:
    """A bitmap as a file holds it: between its size and its checksum."""
    return struct.pack(">I", len(data)) + data + struct.pack(">I", zlib.crc32(data))
