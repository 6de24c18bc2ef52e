"""As-of lookups: of the rows with a key the one that was valid at a time (type 2 of slowly changing dimensions).

A row is valid from its `valid_from` on (null: always was) and before its `valid_to` (null: still is). Without a column
`valid_to` it is valid until the next row of its key.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.base.errors import OverlapError, SchemaError
from pyspark_lookup.cache.memory import KEY_INDEX
from pyspark_lookup.columnar.keys import as_indices, one_array
from pyspark_lookup.columnar.types import widens
from pyspark_lookup.options.enums import Overlap


@dataclasses.dataclass(frozen=True)
class Validity:
    """The columns that say when a row is valid, and what is to be done where two rows of a key are at once."""

    start: str
    end: str | None
    overlap: Overlap

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.start,) if self.end is None else (self.start, self.end)


def times_for(field: pa.Field, times: pa.Array) -> pa.Array:
    """Times in the type of the column that says when a row is valid. Raises SchemaError if that does not have all of theirs."""
    own, kind = times.type, field.type
    if pa.types.is_timestamp(own) and own.tz is not None and pa.types.is_timestamp(kind) and kind.tz is not None:
        own = pa.timestamp(own.unit, kind.tz)  # instants come in the session's time zone
    if not widens(own, kind):
        raise SchemaError(
            f"times of the argument as_of are {times.type}, the table's {field.name!r} is {kind}: give a time, date or number of one type, "
            "cast with df.withColumn"
        )
    return times.cast(kind)


def valid_rows(found: pa.Table, keys: pa.Table, times: pa.Array, validity: Validity) -> pa.Table:
    """The rows of `found` that were valid at the time of the key they answer: one at most for each, by `KEY_INDEX`.

    `times`: one for each of the `keys`, of the type of the validity's columns; at null nothing is valid. Raises OverlapError
    for two rows that are valid at once, unless the newest is wanted.
    """
    numbers = one_array(found.column(KEY_INDEX))
    start = one_array(found.column(validity.start))
    at = times.take(numbers)
    valid = pc.and_(pc.is_valid(at), pc.fill_null(pc.less_equal(start, at), True))
    if validity.end is not None:
        end = one_array(found.column(validity.end))
        valid = pc.and_(valid, pc.fill_null(pc.greater(end, at), True))
    rows = found.filter(valid)
    counts = np.bincount(np.asarray(one_array(rows.column(KEY_INDEX))), minlength=0)
    if not len(counts) or counts.max() <= 1:
        return rows
    if validity.end is not None and validity.overlap is Overlap.ERROR:
        raise _overlap(keys, times, int(np.argmax(counts > 1)), int(counts.max()), validity)
    begun = one_array(rows.column(validity.start))
    # Nulls first; rows that are alike stay in their order.
    parts = pa.table({"key": rows.column(KEY_INDEX), "known": begun.is_valid().cast(pa.int8()), "start": begun})
    order = pc.sort_indices(parts, sort_keys=[(name, "ascending") for name in parts.column_names])
    ordered = np.asarray(one_array(rows.column(KEY_INDEX)).take(order))
    last = np.flatnonzero(np.concatenate([ordered[1:] != ordered[:-1], [True]]))
    return rows.take(order.take(as_indices(last)))


def _overlap(keys: pa.Table, times: pa.Array, row: int, most: int, validity: Validity) -> OverlapError:
    key = ", ".join(f"{name} = {keys.column(name)[row].as_py()!r}" for name in keys.column_names)
    return OverlapError(
        f"several rows (up to {most}) of one key are valid at once, by {' and '.join(validity.columns)}: here {key} at "
        f"{times[row].as_py()}; mend the table, or set lookup.overlap = NEWEST for the one with the latest {validity.start}"
    )
