"""Parses the SQL of a predicate with sqlglot's Spark dialect; `sql_predicate` then converts its literals to the types of the table's columns.

Whatever cannot be evaluated exactly as in Spark is an error that quotes it: functions, comparisons of two columns, patterns, and casts that
depend on the session.
"""

from __future__ import annotations

import decimal
import math
import re
import struct
from collections.abc import Sequence
from typing import Any, cast

import pyarrow as pa
import sqlglot
from sqlglot import exp
from sqlglot.errors import ParseError, SqlglotError

from pyspark_lookup.columnar.predicate import And, Constant, IsNull, Or, Predicate, StartsWith, negate
from pyspark_lookup.columnar.sql_predicate import (
    NUMBERED,
    bind_compare,
    bind_in,
    bind_null_safe,
    count_digits,
    parse_date,
    parse_timestamp,
    refuse_collated,
    take_strings,
)
from pyspark_lookup.columnar.types import resolve_names
from pyspark_lookup.errors import PredicateError, SchemaError

_COMPARE = {"eq": "=", "neq": "<>", "lt": "<", "lte": "<=", "gt": ">", "gte": ">="}  # sqlglot's node names
_FLIPPED = {"=": "=", "<>": "<>", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_PLAIN = frozenset({"this", "expression", "expressions", "low", "high", "to", "is_string"})
_OF_SELECT = frozenset({"expressions", "from", "from_", "where", "kind"})
_INTEGER_BITS = {"TINYINT": 8, "SMALLINT": 16, "INT": 32, "BIGINT": 64}
_TIMESTAMPS = ("TIMESTAMP", "TIMESTAMPTZ", "TIMESTAMPLTZ", "TIMESTAMPNTZ")
_NUMBERS = (int, float, decimal.Decimal)
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_EXACT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_FLOATING = re.compile(rf"{_EXACT.pattern}|[+-]?inf(inity)?|nan", re.ASCII | re.IGNORECASE)
_EXPECTED = "expected one predicate without the word WHERE, such as \"id > 1 AND name LIKE 'a%'\""
_SUPPORTED = (
    "=, <>, <, <=, >, >=, <=>, IN, BETWEEN, LIKE 'prefix%', IS [NOT] NULL, AND, OR and NOT over a column and literals"
)


def bind_where(text: str, schema: pa.Schema) -> Predicate:
    """What `sql_predicate.parse_where` returns. Raises its errors, and also RecursionError and any error of sqlglot's."""
    plain, strings = take_strings(text)  # sqlglot's rules for escapes are not Spark's
    try:
        statements = sqlglot.parse(f"SELECT 1 FROM t WHERE ({plain}\n)", dialect="spark")
    except SqlglotError as problem:
        raise PredicateError(
            f"option lookup.where = {text!r} does not parse ({_fault(problem)}): {_EXPECTED}"
        ) from None
    select = statements[0] if len(statements) == 1 else None
    where = select.args.get("where") if isinstance(select, exp.Select) else None
    extra = {k for k, v in (select.args if select else {}).items() if v} - _OF_SELECT
    if where is None or extra or not isinstance(where.this, exp.Paren):
        raise PredicateError(f"option lookup.where = {text!r}: {_EXPECTED}")
    return _Binder(schema, strings).predicate(where.this.this)


def _fault(problem: SqlglotError) -> str:
    """What sqlglot found wrong, in words for a user: its own may name a class, or show the query around the predicate."""
    if not isinstance(problem, ParseError):
        return "a quote or a comment has no end"
    description = str(problem.errors[0]["description"])
    return "an operand is missing" if "<class" in description else repr(description)


class _Binder:
    def __init__(self, schema: pa.Schema, strings: Sequence[str]) -> None:
        self._schema = schema
        self._strings = strings

    def predicate(self, node: exp.Expression) -> Predicate:
        predicate = self._predicate(node)
        # From version 28 on, sqlglot parses NOT LIKE to a LIKE with the flag `negate`.
        return negate(predicate) if node.args.get("negate") else predicate

    def _predicate(self, node: exp.Expression) -> Predicate:
        self._check_plain(node, _PLAIN | {"negate"})
        if isinstance(node, exp.Paren):
            return self.predicate(node.this)
        if isinstance(node, (exp.And, exp.Or)):
            parts = tuple(self.predicate(cast(exp.Expression, part)) for part in node.flatten())
            return And(parts) if isinstance(node, exp.And) else Or(parts)
        if isinstance(node, exp.Not):
            return negate(self.predicate(node.this))
        if isinstance(node, exp.Boolean):
            return Constant(bool(node.this))
        if isinstance(node, exp.Null):
            return Constant(None)
        if isinstance(node, exp.Column):
            return bind_compare(self.column(node), "=", True)
        if isinstance(node, exp.Is) and isinstance(node.expression, exp.Null):
            return IsNull(self.column(node.this).name)
        if isinstance(node, exp.NullSafeEQ):
            field, _, value = self._sides(node, "=")
            return bind_null_safe(field, value)
        if (comparison := _COMPARE.get(node.key)) is not None:
            field, op, value = self._sides(node, comparison)
            return bind_compare(field, op, value)
        if isinstance(node, exp.Between):
            field = self.column(node.this)
            low, high = self.value(node.args["low"]), self.value(node.args["high"])
            return And((bind_compare(field, ">=", low), bind_compare(field, "<=", high)))
        if isinstance(node, exp.In) and node.expressions:
            return bind_in(self.column(node.this), [self.value(item) for item in node.expressions])
        if isinstance(node, exp.Like):
            return self._like(node)
        raise self._unsupported(node)

    def _sides(self, node: exp.Expression, op: str) -> tuple[pa.Field, str, Any]:
        left, right = node.this, node.expression
        if isinstance(_bare(left), exp.Column):
            return self.column(left), op, self.value(right)
        if isinstance(_bare(right), exp.Column):
            return self.column(right), _FLIPPED[op], self.value(left)
        raise self._unsupported(node)

    def _like(self, node: exp.Expression) -> Predicate:
        field, pattern = self.column(node.this), self.value(node.expression)
        if not pa.types.is_string(field.type):
            raise self._unsupported(node)
        if pattern is None:
            return Constant(None)
        prefix = pattern[:-1] if isinstance(pattern, str) and pattern.endswith("%") else None
        if prefix is None or set(prefix) & set("%_\\"):
            raise PredicateError(
                f"option lookup.where: {self._to_sql(node)!r}: LIKE takes a prefix only, such as 'abc%'; "
                "filter the rest in Spark"
            )
        refuse_collated(field)
        return StartsWith(field.name, prefix)

    def column(self, node: exp.Expression) -> pa.Field:
        node = _bare(node)
        if not isinstance(node, exp.Column) or len(node.parts) != 1:
            raise self._unsupported(node)
        try:
            name = resolve_names([node.name], self._schema, "lookup.where")[0]
        except SchemaError as problem:
            raise PredicateError(str(problem)) from None
        return self._schema.field(name)

    def value(self, node: exp.Expression) -> Any:
        """The Python value of a literal: int, Decimal, float (DOUBLE), str, bytes, bool, date, datetime, None."""
        node = _bare(node)
        self._check_plain(node, _PLAIN)
        if isinstance(node, exp.Null):
            return None
        if isinstance(node, exp.Boolean):
            return bool(node.this)
        if isinstance(node, exp.Neg):
            value = self.value(node.this)
            if isinstance(value, decimal.Decimal):
                return value.copy_negate()  # -value would round it to 28 digits
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return -value
        if isinstance(node, exp.Literal):
            if node.is_string:
                text = str(node.this)
                return self._strings[int(text[1:])] if text.startswith(NUMBERED) else text
            if (number := _number(str(node.this))) is not None:
                return number
        if isinstance(node, exp.HexString):
            return bytes.fromhex(node.name if len(node.name) % 2 == 0 else "0" + node.name)
        if isinstance(node, exp.Cast):
            return self._cast(node)
        raise self._unsupported(node)

    def _cast(self, node: exp.Expression) -> Any:
        """The value of `5L`, `1.5BD`, `DATE '…'`, `TIMESTAMP '…'`, `CAST('NaN' AS DOUBLE)`: casts that Spark makes without loss."""
        value, target = self.value(node.this), node.args["to"]
        kind = getattr(target.this, "name", "")
        if value is None:
            return None
        try:
            if kind in _INTEGER_BITS and (isinstance(value, int) or _matches(_INTEGER, value)):
                number = int(value)
                if (
                    not isinstance(value, bool)
                    and -(1 << _INTEGER_BITS[kind] - 1) <= number < 1 << _INTEGER_BITS[kind] - 1
                ):
                    return number
            if kind in ("DOUBLE", "FLOAT") and (isinstance(value, _NUMBERS) or _matches(_FLOATING, value)):
                double = float(value)
                return struct.unpack("f", struct.pack("f", double))[0] if kind == "FLOAT" else double
            if kind == "DECIMAL" and (isinstance(value, (int, decimal.Decimal)) or _matches(_EXACT, value)):
                exact = decimal.Decimal(value)
                if _fits(exact, [int(part.name) for part in target.expressions]):
                    return exact
            if kind == "DATE" and isinstance(value, str):
                return parse_date(value)
            if kind in _TIMESTAMPS and isinstance(value, str):
                return parse_timestamp(value)
        except (ValueError, ArithmeticError):
            pass
        raise self._unsupported(node)

    def _check_plain(self, node: exp.Expression, supported_args: frozenset[str]) -> None:
        """Raise PredicateError if a node has an argument that this module does not read, such as BETWEEN's SYMMETRIC, and so would ignore."""
        if any(value for name, value in node.args.items() if name not in supported_args):
            raise self._unsupported(node)

    def _unsupported(self, node: exp.Expression) -> PredicateError:
        return PredicateError(
            f"option lookup.where: {self._to_sql(node)!r} is not supported; supported are {_SUPPORTED}"
        )

    def _to_sql(self, node: exp.Expression) -> str:
        literal = re.compile(rf"'{NUMBERED}(\d+)'")
        return literal.sub(lambda match: "'" + self._strings[int(match[1])].replace("'", "''") + "'", node.sql("spark"))


def _bare(node: exp.Expression) -> exp.Expression:
    while isinstance(node, exp.Paren):
        node = node.this
    return node


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value.strip()) is not None


def _fits(value: decimal.Decimal, parameters: Sequence[int]) -> bool:
    """Whether a DECIMAL with the `parameters` (precision, scale) can hold the value without rounding."""
    precision = parameters[0] if parameters else 10
    scale = parameters[1] if len(parameters) > 1 else 0
    if not value.is_finite():
        return False
    whole, fraction = count_digits(value)
    return fraction <= scale and whole <= precision - scale


def _number(text: str) -> int | float | decimal.Decimal | None:
    """The number that a literal stands for in Spark; None if Spark refuses the literal.

    A literal with an exponent is a DOUBLE (float), one with a point a DECIMAL, any other an integer.
    """
    if "e" in text.lower():
        double = float(text)
        return double if math.isfinite(double) else None
    exact = decimal.Decimal(text)
    if len(exact.as_tuple().digits) > 38:
        return None
    return exact if "." in text else int(text)
