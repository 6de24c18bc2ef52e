"""Spark's pushed filters as predicates: each in its exact meaning, or none."""

from __future__ import annotations

import datetime
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import datasource as spark

from pyspark_lookup.columnar.predicate import Compare
from pyspark_lookup.columnar.sql_predicate import parse_where
from pyspark_lookup.spark.planning import predicate_of

UTC = datetime.timezone.utc
NEW_YEAR = datetime.datetime(2024, 1, 1)
SCHEMA = pa.schema(
    {
        "id": pa.int8(),
        "name": pa.string(),
        "amount": pa.decimal128(10, 2),
        "double": pa.float64(),
        "at": pa.timestamp("us", "UTC"),
        "clock": pa.timestamp("us"),
        "pair": pa.struct([("id", pa.int8())]),
    }
)
FIELDS = {field.name: field for field in SCHEMA}
ID, NAME, AMOUNT, DOUBLE, AT, CLOCK, PAIR = ((name,) for name in FIELDS)
MEANINGS: list[tuple[spark.Filter, str | None]] = [
    (spark.EqualTo(ID, 5), "id = 5"),
    (spark.GreaterThan(ID, 5), "id > 5"),
    (spark.GreaterThanOrEqual(ID, 5), "id >= 5"),
    (spark.LessThan(ID, 5), "id < 5"),
    (spark.LessThan(ID, 500), "id < 500"),
    (spark.LessThan(ID, Decimal("4.5")), "id < 4.5"),
    (spark.LessThanOrEqual(ID, 5), "id <= 5"),
    (spark.EqualTo(AMOUNT, Decimal("1.50")), "amount = 1.50"),
    (spark.EqualTo(AT, NEW_YEAR.replace(tzinfo=UTC)), "at = TIMESTAMP '2024-01-01 00:00:00 UTC'"),
    (spark.EqualTo(CLOCK, NEW_YEAR), "clock = TIMESTAMP_NTZ '2024-01-01 00:00:00'"),
    (spark.EqualNullSafe(ID, 5), "id <=> 5"),
    (spark.EqualNullSafe(ID, None), "id IS NULL"),
    (spark.EqualNullSafe(ID, 500), "false"),
    (spark.In(ID, (1, 2)), "id IN (1, 2)"),
    (spark.In(ID, (None, 1)), "id IN (NULL, 1)"),
    (spark.IsNull(PAIR), "pair IS NULL"),
    (spark.IsNotNull(ID), "id IS NOT NULL"),
    (spark.StringStartsWith(NAME, "a"), "name LIKE 'a%'"),
    # What has no exact counterpart here.
    (spark.EqualTo(("pair", "id"), 5), None),
    (spark.IsNull(("unknown",)), None),
    (spark.EqualTo(ID, "5"), None),
    (spark.EqualTo(AT, NEW_YEAR), None),
    (spark.EqualTo(CLOCK, NEW_YEAR.replace(tzinfo=UTC)), None),
    (spark.In(NAME, ("a", 5)), None),
    (spark.StringStartsWith(ID, "5"), None),
    (spark.StringEndsWith(NAME, "a"), None),
    (spark.StringContains(NAME, "a"), None),
]


@pytest.mark.parametrize(("pushed", "text"), MEANINGS)
def test_filters_keep_their_meaning(pushed: Any, text: str | None) -> None:
    """Each filter that Spark sends about a column means what the same text means in `lookup.where`, NOT included, or nothing."""
    for filter_, where in ((pushed, text), (spark.Not(pushed), f"NOT ({text})")):
        assert predicate_of(filter_, FIELDS) == (None if text is None else parse_where(where or "", SCHEMA))


def test_values_that_no_text_has() -> None:
    """NaN is a value; what LIKE takes for a pattern is text."""
    found = predicate_of(spark.EqualTo(DOUBLE, math.nan), FIELDS)
    assert isinstance(found, Compare)
    assert math.isnan(found.value)
    assert getattr(predicate_of(spark.StringStartsWith(NAME, "a%_"), FIELDS), "prefix", None) == "a%_"
