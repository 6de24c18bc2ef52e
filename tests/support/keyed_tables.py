"""Rows of managed tables with a key of two columns, and writes of them."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import strategies as st

SCHEMA = pa.schema([("id", pa.int64()), ("part", pa.string()), ("v", pa.int64())])
Key = tuple[int | None, str | None]
Row = tuple[int | None, str | None, int]
keys = st.tuples(st.none() | st.integers(0, 6), st.sampled_from(["a", "b"]))
MODES_OF_WRITES = ["append", "append", "upsert", "upsert", "delete", "overwrite"]
writes = st.sampled_from(MODES_OF_WRITES).flatmap(
    lambda mode: st.tuples(st.just(mode), st.lists(keys, min_size=1, max_size=8, unique=mode == "upsert"))
)


def table_of(found: list[Row]) -> pa.Table:
    columns = list(zip(*found, strict=True)) if found else [(), (), ()]
    return pa.table(dict(zip(SCHEMA.names, columns, strict=True)), SCHEMA)


def rows_of(table: pa.Table) -> list[Row]:
    return sorted(zip(*(table.column(name).to_pylist() for name in SCHEMA.names), strict=True), key=repr)
