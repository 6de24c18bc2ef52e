"""Tables of rows with a column `KEY_INDEX`, the number of the key to which each row belongs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.hash_index import IndexBuilder, KeyIndex, Matches, order_rows
from pyspark_lookup.columnar.keys import Keys, Numbers, Seed, as_indices, one_array

KEY_INDEX = "key_index"
"""The column of a table of rows that has the key of each row, as the key's position (int64) in the table of keys."""
SEED = Seed(0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)
"""For hashes within one call. Somebody who knows it can construct keys that are slow to look up, but slows only their own call."""


def distinct_keys(keys: Keys, hashes: Numbers) -> tuple[Numbers, Numbers]:
    """(for each distinct key without a null, the number of a row that has it; for each row, the position of its key in that list).

    A key with a null has the position -1.
    """
    order = order_rows(keys, hashes)
    places = np.full(keys.rows, -1, np.int64)
    places[order.rows] = np.repeat(np.arange(len(order.first)), np.diff([*order.first, len(order.rows)]))
    return order.rows[order.first], places


def match_rows(rows: pa.Table, names: Sequence[str], keys: Keys) -> Matches:
    """The matches of keys and rows: (position of the key, row), by key; rows of one key in their order."""
    return RowIndex(rows, names).match(keys)


class RowIndex:
    """A hash index over rows by their key columns `names`."""

    def __init__(self, rows: pa.Table, names: Sequence[str]) -> None:
        stored = [one_array(rows.column(name)) for name in names]
        keys = Keys(stored)
        order = order_rows(keys, keys.hashes(SEED))
        builder = IndexBuilder(keys.rows, None, wide=True)
        builder.add(order, keys)
        indices = as_indices(order.rows)
        self._rows = order.rows
        self._index = KeyIndex(builder.arrays(strict=False), [pc.take(array, indices) for array in stored], 0)

    def match(self, keys: Keys) -> Matches:
        matches = self._index.probe(keys, keys.hashes(SEED))
        return Matches(matches.keys, self._rows[matches.rows])


def take_matches(rows: pa.Table, matches: Matches, schema: pa.Schema) -> pa.Table:
    """Matching rows with the columns of `schema` (which may be empty) and `KEY_INDEX`."""
    indices = as_indices(matches.rows)
    columns = [*(rows.column(name).take(indices) for name in schema.names), as_indices(matches.keys)]
    return pa.Table.from_arrays(columns, schema=schema.append(pa.field(KEY_INDEX, pa.int64())))


def key_numbers(rows: pa.Table) -> Numbers:
    column = one_array(rows.column(KEY_INDEX))
    return np.frombuffer(column.buffers()[1] or b"", np.int64, column.offset + len(column))[column.offset :]


def take_requested(rows: pa.Table, requested_keys: Numbers) -> pa.Table:
    """The rows of `requested_keys`, in their order and with repeats; `KEY_INDEX` is the position among them.

    `rows` are those of keys 0, 1, …, ascending.
    """
    numbers = key_numbers(rows)
    starts = np.searchsorted(numbers, requested_keys, "left")
    counts = np.searchsorted(numbers, requested_keys, "right") - starts
    ends = np.cumsum(counts)
    row_numbers = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)
    return renumber(rows.take(as_indices(row_numbers)), np.repeat(np.arange(len(requested_keys)), counts))


def renumber(rows: pa.Table, numbers: Numbers) -> pa.Table:
    """The same rows with `KEY_INDEX` = `numbers`."""
    return rows.set_column(rows.num_columns - 1, rows.schema.field(KEY_INDEX), as_indices(numbers))


def no_rows(schema: pa.Schema) -> pa.Table:
    """A table without rows. `schema`: of the columns other than `KEY_INDEX`."""
    return schema.append(pa.field(KEY_INDEX, pa.int64())).empty_table()


def merge_rows(parts: Sequence[pa.Table], schema: pa.Schema) -> pa.Table:
    """The rows of several tables, by key. All rows of one key must be in one table. `schema`: as for `no_rows`."""
    full = schema.append(pa.field(KEY_INDEX, pa.int64()))
    filled = [part for part in parts if part.num_rows]
    rows = pa.concat_tables([part.select(full.names).cast(full) for part in filled]) if filled else full.empty_table()
    if len(filled) > 1:
        numbers = key_numbers(rows)
        rows = rows.take(as_indices(np.argsort(numbers, kind="stable")))
    return rows
