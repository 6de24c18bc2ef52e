"""`TableStates`: the rows of a table after each of some writes. `find_difference`: the first row in which two tables differ."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from pyspark_lookup.columnar.keys import KEY_INDEX, Keys, as_indices, match_rows, one_array

_LONGEST = 100  # characters of a value in a message


class TableStates:
    """A table's rows after 0, 1, 2, … writes. Write number n deletes or changes the rows of key n - 1 of `keys`.

    `rows`: all rows after 0 writes. `keys`: those of the table, all different. At most `at_most` keys change, and at least one stays as it is.
    """

    def __init__(self, rows: pa.Table, keys: pa.Table, at_most: int) -> None:
        self.keys = keys.slice(0, min(at_most, keys.num_rows - 1)).combine_chunks()
        self._states = [rows]
        self._statuses: list[tuple[_Counted, _Counted]] = []  # for each key its old rows, its new rows
        last = rows_of(rows, keys.slice(keys.num_rows - 1))
        for number in range(len(self)):
            key, other = self.keys.slice(number, 1), last
            for name in keys.column_names:
                value = pa.repeat(key.column(name)[0], other.num_rows)
                other = other.set_column(other.schema.get_field_index(name), rows.schema.field(name), value)
            old_rows = rows_of(rows, key)
            new_rows = other
            if number % 2 == 0 or _count(old_rows) == _count(other):
                new_rows = other.slice(0, 0)
            self._statuses.append((_count(old_rows), _count(new_rows)))
            others = match_rows(self._states[-1], keys.column_names, _as_keys(key)).rows.tolist()
            kept = sorted({*range(self._states[-1].num_rows)} - {*others})
            kept_rows = self._states[-1].take(pa.array(kept, pa.int64()))
            self._states.append(pa.concat_tables([kept_rows, new_rows]).combine_chunks())
        self._counted_states = [_count(state) for state in self._states]

    def __len__(self) -> int:
        return int(self.keys.num_rows)

    def after(self, writes: int) -> pa.Table:
        """All rows after so many writes."""
        return self._states[writes]

    def find_writes(self, rows: pa.Table) -> int | None:
        """After how many writes the table has these rows; None: it never has."""
        counted = _count(rows.select(self._states[0].column_names))
        return self._counted_states.index(counted) if counted in self._counted_states else None

    def find_status(self, number: int, rows: pa.Table) -> bool | None:
        """Whether `rows` are the new ones of a key, by its number in `keys`; False: they are its old ones; None: neither."""
        old_rows, new_rows = self._statuses[number]
        counted = _count(rows.select(self._states[0].column_names))
        return True if counted == new_rows else False if counted == old_rows else None


_Counted = collections.Counter[tuple[Any, ...]]


def _count(rows: pa.Table) -> _Counted:
    return collections.Counter(_texts(rows))


def rows_of(rows: pa.Table, keys: pa.Table) -> pa.Table:
    """The rows that have any of `keys`."""
    return rows.take(as_indices(match_rows(rows, keys.column_names, _as_keys(keys)).rows))


def find_difference(expected: pa.Table, actual: pa.Table) -> tuple[int, str] | None:
    """(number of the key, what is wrong with its rows) of the first key whose rows are not the same, in any order; None if there is none.

    The number is in the column `KEY_INDEX`; without this column it is 0.
    """
    expected_rows, actual_rows = (
        collections.Counter(_texts(rows.select(expected.column_names))) for rows in (expected, actual)
    )
    missing, extra = expected_rows - actual_rows, actual_rows - expected_rows
    if not missing and not extra:
        return None
    number = min(row[-1] for row in (*missing, *extra))
    missing_row = next((row for row in missing if row[-1] == number), None)
    extra_row = next((row for row in extra if row[-1] == number), None)
    names = expected.column_names
    if extra_row is None:
        assert missing_row is not None
        times = actual_rows[missing_row], expected_rows[missing_row]
        more = f": it is there {times[0]} times, the table has it {times[1]} times" if times[0] else ""
        return number, f"lacks the row {_show(names, missing_row)}{more}"
    if missing_row is not None:
        return number, f"returned the row {_show(names, extra_row)} instead of {_show(names, missing_row)}"
    if expected_rows[extra_row]:
        return (
            number,
            f"returned the row {_show(names, extra_row)} {actual_rows[extra_row]} times, the table has it {expected_rows[extra_row]} times",
        )
    return number, f"returned the row {_show(names, extra_row)}, which the table does not have"


def _as_keys(keys: pa.Table) -> Keys:
    return Keys([one_array(column) for column in keys.columns])


def _texts(rows: pa.Table) -> list[tuple[Any, ...]]:
    """Each row as texts, which are the same for equal rows, and the number of its key."""
    names = [name for name in rows.column_names if name != KEY_INDEX]
    columns = [[_text(value) for value in _values(rows.column(name))] for name in names]
    numbers = rows.column(KEY_INDEX).to_pylist() if KEY_INDEX in rows.column_names else [0] * rows.num_rows
    return list(zip(*columns, numbers, strict=True))


def _values(column: pa.ChunkedArray) -> list[Any]:
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError):  # a time that Python does not have
        return list(column.cast(pa.int32() if pa.types.is_date32(column.type) else pa.int64()).to_pylist())


def _text(value: Any) -> str:
    if isinstance(value, float):  # zeros have no sign in a comparison, and NaN has one value
        return "nan" if math.isnan(value) else repr(value + 0.0)
    return repr(value)


def _show(names: Sequence[str], row: tuple[Any, ...]) -> str:
    texts = (text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…" for text in row[:-1])
    pairs = zip((name for name in names if name != KEY_INDEX), texts, strict=True)
    return "(" + ", ".join(f"{name} = {text}" for name, text in pairs) + ")"
