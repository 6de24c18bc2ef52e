"""As-of lookups: of the rows with a key the one that was valid at a time (type 2 of slowly changing dimensions).

A row is valid from its `valid_from` on (null: always was) and before its `valid_to` (null: still is). Without a column
`valid_to` it is valid until the next row of its key.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.cache.memory import KEY_INDEX
from pyspark_lookup.columnar.keys import as_indices, one_array
from pyspark_lookup.columnar.types import widens
from pyspark_lookup.errors import OverlapError, SchemaError
from pyspark_lookup.options.enums import Overlap


@dataclasses.dataclass(frozen=True)
class Validity:
    """The columns that say when a row is valid, and what to do if two rows of a key are valid at once."""

    start: str
    end: str | None
    overlap: Overlap

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.start,) if self.end is None else (self.start, self.end)


def cast_times(field: pa.Field, times: pa.Array) -> pa.Array:
    """The times, cast to the type of the column that says when a row is valid. Raises SchemaError if that type cannot hold them all."""
    times_type, kind = times.type, field.type
    if (
        pa.types.is_timestamp(times_type)
        and times_type.tz is not None
        and pa.types.is_timestamp(kind)
        and kind.tz is not None
    ):
        times_type = pa.timestamp(times_type.unit, kind.tz)  # instants come in the session's time zone
    if not widens(times_type, kind):
        raise SchemaError(
            f"times of the argument as_of are {times.type}, the table's {field.name!r} is {kind}: give a time, date or number of one type, "
            "cast with df.withColumn"
        )
    return times.cast(kind)


def valid_rows(matches: pa.Table, keys: pa.Table, times: pa.Array, validity: Validity) -> pa.Table:
    """The rows of `matches` that were valid at the time asked for: at most one for each key, by `KEY_INDEX`.

    `times`: one for each of the `keys`, of the type of the validity's columns; no row is valid at null. Raises OverlapError
    for two rows that are valid at once, unless `lookup.overlap` is NEWEST.
    """
    numbers = one_array(matches.column(KEY_INDEX))
    start = one_array(matches.column(validity.start))
    row_times = times.take(numbers)
    valid = pc.and_(pc.is_valid(row_times), pc.fill_null(pc.less_equal(start, row_times), True))
    if validity.end is not None:
        end = one_array(matches.column(validity.end))
        valid = pc.and_(valid, pc.fill_null(pc.greater(end, row_times), True))
    rows = matches.filter(valid)
    counts = np.bincount(np.asarray(one_array(rows.column(KEY_INDEX))), minlength=0)
    if not len(counts) or counts.max() <= 1:
        return rows
    if validity.end is not None and validity.overlap is Overlap.ERROR:
        raise _overlap(keys, times, int(np.argmax(counts > 1)), int(counts.max()), validity)
    valid_from = one_array(rows.column(validity.start))
    # Nulls first; rows with equal times stay in their order.
    parts = pa.table(
        {"key": rows.column(KEY_INDEX), "known": valid_from.is_valid().cast(pa.int8()), "start": valid_from}
    )
    order = pc.sort_indices(parts, sort_keys=[(name, "ascending") for name in parts.column_names])
    sorted_places = np.asarray(one_array(rows.column(KEY_INDEX)).take(order))
    last = np.flatnonzero(np.concatenate([sorted_places[1:] != sorted_places[:-1], [True]]))
    return rows.take(order.take(as_indices(last)))


def _overlap(keys: pa.Table, times: pa.Array, row: int, most: int, validity: Validity) -> OverlapError:
    key = ", ".join(f"{name} = {keys.column(name)[row].as_py()!r}" for name in keys.column_names)
    return OverlapError(
        f"several rows (up to {most}) of one key are valid at once, by {' and '.join(validity.columns)}: here {key} at "
        f"{times[row].as_py()}; mend the table, or set lookup.overlap = NEWEST for the one with the latest {validity.start}"
    )
