"""Which keys a write of a table changes, as a table's writers have to note them."""

import collections
import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa


def _plain(value: Any) -> Any:
    """Equal for values that are the same key."""
    if isinstance(value, float):
        return math.nan if math.isnan(value) else value + 0.0
    return value


def list_keys(rows: pa.Table, names: Sequence[str]) -> list[tuple[Any, ...]]:
    columns = [[_plain(value) for value in rows.column(name).to_pylist()] for name in names]
    return list(zip(*columns, strict=True))


def changed_keys(old: pa.Table, new: pa.Table, keys: Sequence[str]) -> pa.Table:
    """The keys that do not have the same rows in both tables, those with a null included."""
    names = [*keys, *(name for name in new.column_names if name not in keys)]
    before, after = (collections.Counter(list_keys(rows, names)) for rows in (old, new))
    differing = {row[: len(keys)] for row in ((before - after) + (after - before))}
    schema = new.select(keys).schema
    return pa.Table.from_pylist([dict(zip(keys, key, strict=True)) for key in differing], schema)
