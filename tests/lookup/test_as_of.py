"""As-of lookups without Spark: which of a key's rows is valid at a time, against a plain loop."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup.cache.memory import KEY_INDEX
from pyspark_lookup.errors import OverlapError
from pyspark_lookup.lookup.lookup_join import Validity, valid_rows
from pyspark_lookup.options.enums import Overlap

INSTANT = pa.timestamp("us", "UTC")
moments = st.none() | st.integers(0, 8)
found_rows = st.lists(st.tuples(st.integers(0, 4), moments, moments), max_size=20)


def expected(rows: list[Any], times: list[int | None], by_end: bool, newest: bool) -> list[int] | None:
    """The numbers of the rows that are valid, by key; None where two are, and one must be."""
    found = []
    for key, time in enumerate(times):
        valid = []
        for number, (of, start, end) in enumerate(rows):
            begun = start is None or (time is not None and start <= time)
            ended = by_end and end is not None and time is not None and end <= time
            if of == key and time is not None and begun and not ended:
                valid.append((-1 if start is None else start, number))
        if len(valid) > 1 and by_end and not newest:
            return None
        if valid:
            found.append(max(valid)[1])
    return found


@given(found_rows, st.lists(moments, min_size=5, max_size=5), st.booleans(), st.booleans(), st.sampled_from(["int", "instant", "zoned", "date"]))  # fmt: skip
def test_a_row_that_was_valid(rows: list[Any], times: list[int | None], by_end: bool, newest: bool, kind: str) -> None:
    """One row for each key at most, the one a loop finds, or an error that names a key; times of the session's zone are the same instants."""
    rows = sorted(rows, key=lambda row: row[0])
    form = {"int": pa.int64(), "instant": INSTANT, "zoned": INSTANT, "date": pa.date32()}[kind]
    asked_form = pa.timestamp("us", "America/New_York") if kind == "zoned" else form

    def column(values: list[int | None]) -> pa.Array:
        return pa.array(values, pa.int32() if kind == "date" else pa.int64()).cast(form)

    table = pa.table(
        {
            "number": range(len(rows)),
            "since": column([row[1] for row in rows]),
            "until": column([row[2] for row in rows]),
            KEY_INDEX: pa.array([row[0] for row in rows], pa.int64()),
        }
    )
    keys = pa.table({"id": range(5)})
    validity = Validity("since", "until" if by_end else None, Overlap.NEWEST if newest else Overlap.ERROR)
    at = column(times).cast(asked_form)
    wanted = expected(rows, times, by_end, newest)
    if wanted is None:
        with pytest.raises(OverlapError, match=r"valid at the same time, by since and until: here id = \d"):
            valid_rows(table, keys, at, validity)
        return
    answer = valid_rows(table, keys, at, validity)
    assert answer.column("number").to_pylist() == wanted
    assert answer.column(KEY_INDEX).to_pylist() == sorted(answer.column(KEY_INDEX).to_pylist())
