"""Spark's pushed filters as predicates: each in its exact meaning, or none."""

from __future__ import annotations

import datetime
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import datasource as spark

from pyspark_lookup.columnar.binding import bind_compare
from pyspark_lookup.columnar.predicate import Compare, Constant, In, IsNull, NullSafeEqual, Predicate, StartsWith
from pyspark_lookup.spark.planning import predicate_of

UTC = datetime.timezone.utc
NEW_YEAR = datetime.datetime(2024, 1, 1)
TYPES = {
    "id": pa.int8(),
    "name": pa.string(),
    "amount": pa.decimal128(10, 2),
    "double": pa.float64(),
    "at": pa.timestamp("us", "UTC"),
    "clock": pa.timestamp("us"),
    "pair": pa.struct([("id", pa.int8())]),
}
FIELDS = {name: pa.field(name, kind) for name, kind in TYPES.items()}
ID, NAME, AMOUNT, DOUBLE, AT, CLOCK, PAIR = ((name,) for name in FIELDS)


@pytest.mark.parametrize(
    ("pushed", "expected"),
    [
        (spark.EqualTo(ID, 5), Compare("id", "=", 5)),
        (spark.GreaterThan(ID, 5), Compare("id", ">", 5)),
        (spark.GreaterThanOrEqual(ID, 5), Compare("id", ">=", 5)),
        (spark.LessThan(ID, 5), Compare("id", "<", 5)),
        (spark.LessThanOrEqual(ID, 5), Compare("id", "<=", 5)),
        (spark.EqualTo(AMOUNT, Decimal("1.50")), Compare("amount", "=", Decimal("1.50"))),
        (spark.EqualTo(AT, NEW_YEAR.replace(tzinfo=UTC)), Compare("at", "=", NEW_YEAR.replace(tzinfo=UTC))),
        (spark.EqualTo(CLOCK, NEW_YEAR), Compare("clock", "=", NEW_YEAR)),
        (spark.EqualNullSafe(ID, 5), NullSafeEqual("id", 5)),
        (spark.EqualNullSafe(ID, None), IsNull("id")),
        (spark.EqualNullSafe(ID, 500), Constant(False)),
        (spark.In(ID, (1, 2)), In("id", (1, 2), has_null=False)),
        (spark.In(ID, (None, 1)), In("id", (1,), has_null=True)),
        (spark.IsNull(PAIR), IsNull("pair")),
        (spark.IsNotNull(ID), IsNull("id", negated=True)),
        (spark.StringStartsWith(NAME, "a%_"), StartsWith("name", "a%_")),
        (spark.Not(spark.EqualTo(ID, 5)), Compare("id", "<>", 5)),
        (spark.Not(spark.LessThan(ID, 5)), Compare("id", ">=", 5)),
        (spark.Not(spark.In(ID, (1, None))), In("id", (1,), has_null=True, negated=True)),
        (spark.Not(spark.EqualNullSafe(ID, 5)), NullSafeEqual("id", 5, negated=True)),
        (spark.Not(spark.EqualNullSafe(ID, 500)), Constant(True)),
        (spark.Not(spark.IsNull(ID)), IsNull("id", negated=True)),
        (spark.Not(spark.StringStartsWith(NAME, "a")), StartsWith("name", "a", negated=True)),
    ],
)
def test_filters_keep_their_meaning(pushed: spark.Filter, expected: Predicate) -> None:
    """Each filter that Spark sends about a column has its predicate, NOT included."""
    assert predicate_of(pushed, FIELDS) == expected


@pytest.mark.parametrize(
    "pushed",
    [
        spark.EqualTo(("pair", "id"), 5),
        spark.IsNull(("unknown",)),
        spark.EqualTo(ID, "5"),
        spark.EqualTo(AT, NEW_YEAR),
        spark.EqualTo(CLOCK, NEW_YEAR.replace(tzinfo=UTC)),
        spark.In(NAME, ("a", 5)),
        spark.StringStartsWith(ID, "5"),
        spark.StringEndsWith(NAME, "a"),
        spark.StringContains(NAME, "a"),
    ],
)
def test_other_filters_are_left_to_spark(pushed: Any) -> None:
    """What has no exact counterpart here is no predicate, negated or not."""
    assert predicate_of(pushed, FIELDS) is None
    assert predicate_of(spark.Not(pushed), FIELDS) is None


def test_values_are_bound_as_in_lookup_where() -> None:
    """A pushed literal means what the same one means in `lookup.where`; NaN is a value."""
    for value in (5, 500, Decimal("4.5")):
        assert predicate_of(spark.LessThan(ID, value), FIELDS) == bind_compare(FIELDS["id"], "<", value)
    found = predicate_of(spark.EqualTo(DOUBLE, math.nan), FIELDS)
    assert isinstance(found, Compare)
    assert math.isnan(found.value)
