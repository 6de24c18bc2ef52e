"""Spark's pushed filters as predicates, where they mean exactly the same."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
from pyspark.sql import datasource as spark

from pyspark_lookup.base.errors import PredicateError
from pyspark_lookup.columnar.binding import bind_compare, bind_in
from pyspark_lookup.columnar.predicate import Compare, Constant, IsNull, NullSafeEqual, Predicate, StartsWith, negate

_COMPARE: Mapping[type[spark.Filter], str] = {
    spark.EqualTo: "=",
    spark.GreaterThan: ">",
    spark.GreaterThanOrEqual: ">=",
    spark.LessThan: "<",
    spark.LessThanOrEqual: "<=",
}


def predicate_of(pushed: spark.Filter, fields: Mapping[str, pa.Field]) -> Predicate | None:
    """The predicate a pushed filter means over top-level columns; None if it has no counterpart here."""
    if isinstance(pushed, spark.Not):
        inner = predicate_of(pushed.child, fields)
        return None if inner is None else negate(inner)
    path: tuple[str, ...] = getattr(pushed, "attribute", ())
    if len(path) != 1 or path[0] not in fields:
        return None
    field = fields[path[0]]
    try:
        return _leaf(pushed, field)
    except PredicateError:
        return None


def _leaf(pushed: spark.Filter, field: pa.Field) -> Predicate | None:
    if type(pushed) in _COMPARE:
        return bind_compare(field, _COMPARE[type(pushed)], pushed.value)  # type: ignore[attr-defined]
    if isinstance(pushed, spark.EqualNullSafe):
        if pushed.value is None:
            return IsNull(field.name)
        bound = bind_compare(field, "=", pushed.value)
        return NullSafeEqual(field.name, bound.value) if isinstance(bound, Compare) else Constant(False)
    if isinstance(pushed, spark.In):
        return bind_in(field, list(pushed.value))
    if isinstance(pushed, (spark.IsNull, spark.IsNotNull)):
        return IsNull(field.name, negated=isinstance(pushed, spark.IsNotNull))
    if isinstance(pushed, spark.StringStartsWith) and pa.types.is_string(field.type):
        return StartsWith(field.name, pushed.value)
    return None
