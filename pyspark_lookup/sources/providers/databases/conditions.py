"""Pushes down the parts of a predicate (`lookup.where`) that a database can evaluate. The whole predicate is evaluated here afterwards."""

from __future__ import annotations

import datetime
import decimal
import re
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from pyspark_lookup.columnar.predicate import And, Compare, In, IsNull, NullSafeEqual, Or, Predicate
from pyspark_lookup.columnar.types import spark_type
from pyspark_lookup.sources.providers.databases.database import Column, Condition

_MOST_VALUES = 400  # parameters of a condition


def condition_of(
    predicate: Predicate, columns: Mapping[str, Column], types: pa.Schema, placeholder: Callable[[int], str]
) -> Condition | None:
    """A condition that holds for every row for which the predicate does, and for as few others as possible; None if there is none.

    `types`: the columns in the types in which the predicate compares them. `placeholder`: returns the SQL of the parameter with a number (from 1).
    """
    parameters: list[tuple[Any, Column]] = []
    sql = _Translation(columns, types, placeholder, parameters).translate(predicate)
    return None if sql is None else Condition(sql, tuple(parameters))


class _Translation:
    def __init__(
        self,
        columns: Mapping[str, Column],
        types: pa.Schema,
        placeholder: Callable[[int], str],
        parameters: list[tuple[Any, Column]],
    ) -> None:
        self._columns = columns
        self._types = types
        self._placeholder = placeholder
        self._parameters = parameters

    def translate(self, predicate: Predicate) -> str | None:
        """A condition in SQL that holds for each row for which the predicate does, and maybe for others; None if no such condition excludes a row.

        Appends the values that the condition compares with to the parameters.
        """
        if isinstance(predicate, And):
            parts = [sql for part in predicate.parts if (sql := self.translate(part)) is not None]
            return f"({' AND '.join(parts)})" if parts else None
        before = len(self._parameters)
        sql = self._alternatives(predicate.parts) if isinstance(predicate, Or) else self._leaf(predicate)
        if sql is None:
            del self._parameters[before:]
        return sql

    def _alternatives(self, predicates: tuple[Predicate, ...]) -> str | None:
        parts = [self.translate(part) for part in predicates]
        return None if None in parts else f"({' OR '.join(filter(None, parts))})"

    def _leaf(self, leaf: Predicate) -> str | None:
        column = self._columns.get(getattr(leaf, "column", None) or "")
        if column is None:
            return None
        if isinstance(leaf, IsNull):
            return f"{column.key} IS {'NOT ' if leaf.negated else ''}NULL"
        if isinstance(leaf, Compare) and (leaf.op == "=" or (leaf.op != "<>" and column.ordered)):
            return self._compare(column, leaf.op, leaf.value)
        if isinstance(leaf, NullSafeEqual) and not leaf.negated:
            return self._compare(column, "=", leaf.value)
        if isinstance(leaf, In) and not leaf.negated and 0 < len(leaf.values) <= _MOST_VALUES - len(self._parameters):
            parts = [self._compare(column, "=", value) for value in leaf.values]
            return None if None in parts else f"({' OR '.join(filter(None, parts))})"
        return None

    def _compare(self, column: Column, op: str, value: Any) -> str | None:
        # Spark compares floats and NaN in its own way, and the first and last years stand for infinite times.
        if (
            not column.findable
            or not _is_compared_alike(self._types.field(column.name).type, column.type, value)
            or pa.types.is_floating(column.type)
            or isinstance(value, float)
            or pa.types.is_nested(column.type)
        ):
            return None
        if isinstance(value, datetime.date) and not 1 < value.year < 9999:
            return None
        if column.pattern and re.search(column.pattern, value) is None:
            return "1 = 0"
        self._parameters.append((value, column))
        return f"{column.key} {op} {column.parameter.format(self._placeholder(len(self._parameters)), array='')}"


def _is_compared_alike(declared: pa.DataType, kind: pa.DataType, value: Any) -> bool:
    """Whether a column's values compare with `value` in the database, where they are of the type `kind`, as they do in the type `declared`.

    The database compares in its own type: numbers by their size, also where the predicate compares their texts.
    """
    if declared == spark_type(kind):
        return True
    if not all(pa.types.is_integer(number) or pa.types.is_decimal(number) for number in (declared, kind)):
        return False
    # The parameter has the column's type, and drivers take no decimal for an integer.
    if isinstance(value, decimal.Decimal) and pa.types.is_integer(kind):
        return False
    try:
        pa.array([value], kind)
    except pa.ArrowInvalid:
        return False
    return True
