"""`lookup.where`: converts a Spark SQL predicate's text to a `Predicate` over a table's columns.

The text is parsed by sqlglot in its Spark dialect. Parts that cannot be evaluated exactly like in Spark (functions, column against column,
patterns, session-dependent casts) are refused by an error that quotes them.

The `bind_…` functions convert a literal to the type of the column with which it is compared, by the rules of Spark's type coercion.
"""

from __future__ import annotations

import datetime
import decimal
import math
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, cast

import pyarrow as pa
import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from pyspark_lookup.columnar.predicate import (
    And,
    Compare,
    Constant,
    In,
    IsNull,
    NullSafeEqual,
    Or,
    Predicate,
    StartsWith,
    negate,
)
from pyspark_lookup.columnar.types import collated_field, resolve_names
from pyspark_lookup.core.decoding import UNREADABLE, show
from pyspark_lookup.errors import PredicateError, SchemaError


def bind_compare(field: pa.Field, op: str, value: Any) -> Predicate:
    """The comparison `field op value`, with the literal converted to the column's type as Spark converts it.

    Raises PredicateError naming the column if Spark would refuse the comparison, round a value for it, or cast in a way that depends on the
    session.
    """
    refuse_collated(field)
    if value is None:
        return Constant(None)
    kind = field.type
    scale = _exact_scale(kind)
    if scale is not None and isinstance(value, float):
        return Compare(field.name, op, value)  # Spark compares both as doubles
    if scale is not None and isinstance(value, (int, decimal.Decimal)) and not isinstance(value, bool):
        # To Spark, a literal with a point, or too large for a BIGINT, is a DECIMAL.
        is_decimal = isinstance(value, decimal.Decimal) or not -(2**63) <= value < 2**63
        if pa.types.is_integer(kind) and is_decimal and op in ("<", "<=", ">", ">="):
            limit = 1 << (kind.bit_width - 1)
            if not -limit <= decimal.Decimal(value) <= limit - 1:
                # By Spark's DecimalPrecision rule this is a constant, even for rows that are null.
                return Constant(op.startswith("<") == (value > 0))
        return _bind_exact(field, op, decimal.Decimal(value), scale)
    return Compare(field.name, op, _coerce(field, value))


def refuse_collated(field: pa.Field) -> None:
    """Raise PredicateError for a column with a collation: Spark does not compare its texts by their bytes."""
    if collated_field(field) is not None:
        raise PredicateError(
            f"option lookup.where: column {field.name!r} has a collation, by which Spark compares texts, but lookup.where compares bytes: "
            "filter the column with Spark's WHERE, or declare it as STRING in lookup.schema"
        )


def bind_null_safe(field: pa.Field, value: Any) -> Predicate:
    """The comparison `field <=> value`. A value that the column's type does not have equals no row, not even one with a null."""
    if value is None:
        return IsNull(field.name)
    comparison = bind_compare(field, "=", value)
    return NullSafeEqual(field.name, comparison.value) if isinstance(comparison, Compare) else Constant(False)


def bind_in(field: pa.Field, values: list[Any]) -> Predicate:
    """The predicate `field IN values`. Values that the column's type does not have match no row."""
    literals = [value for value in values if value is not None]
    if any(isinstance(value, float) for value in literals):  # one DOUBLE makes the whole list doubles
        literals = [
            float(v) if isinstance(v, (int, decimal.Decimal)) and not isinstance(v, bool) else v for v in literals
        ]
    exact = [decimal.Decimal(v) for v in literals if isinstance(v, (int, decimal.Decimal)) and not isinstance(v, bool)]
    if (scale := _exact_scale(field.type)) is not None:
        _check_digits(field, scale, exact)
    comparisons = [bind_compare(field, "=", value) for value in literals]
    domain_values = tuple(dict.fromkeys(leaf.value for leaf in comparisons if isinstance(leaf, Compare)))
    return In(field.name, domain_values, has_null=any(value is None for value in values))


_SPARK_DIGITS = {pa.int8(): 3, pa.int16(): 5, pa.int32(): 10, pa.int64(): 20}  # DecimalType.forType


def _exact_scale(kind: pa.DataType) -> int | None:
    """The number of fractional digits of an integer or decimal type; None for other types."""
    if pa.types.is_integer(kind):
        return 0
    return int(kind.scale) if pa.types.is_decimal(kind) else None


def _bind_exact(field: pa.Field, op: str, value: decimal.Decimal, scale: int) -> Predicate:
    """Compare an integer or decimal column with any number, without rounding or overflow."""
    with decimal.localcontext(decimal.Context(prec=200)):
        _check_digits(field, scale, [value])
        scaled = value.scaleb(scale)
        floor = scaled.to_integral_value(decimal.ROUND_FLOOR)
        if scaled != floor:  # the number lies between two values of the column's type, so no row equals it
            if op in ("=", "<>"):
                return Constant(op == "<>", field.name)
            op = "<=" if op in ("<", "<=") else ">"
        digits = field.type.precision if pa.types.is_decimal(field.type) else None
        limit = decimal.Decimal(10) ** digits - 1 if digits else decimal.Decimal(2) ** (field.type.bit_width - 1) - 1
        low = -limit if digits else -limit - 1
        if floor > limit:
            return Constant(op in ("<", "<=", "<>"), field.name)
        if floor < low:
            return Constant(op in (">", ">=", "<>"), field.name)
        exact = floor.scaleb(-scale)
    return Compare(field.name, op, exact if digits else int(floor))


def _check_digits(field: pa.Field, scale: int, values: list[decimal.Decimal]) -> None:
    """Raise PredicateError if column and values need a decimal type of more than 38 digits: Spark would round."""
    kind = field.type
    whole, fraction = kind.precision - scale if pa.types.is_decimal(kind) else _SPARK_DIGITS[kind], scale
    if len(values) == 1 and abs(values[0]) > decimal.Decimal(10) ** whole:
        return  # the number is beyond the column's range, whether Spark rounds it or not
    for value in values:
        digits = count_digits(value)
        whole, fraction = max(whole, digits[0]), max(fraction, digits[1])
        if whole + fraction > 38:
            raise PredicateError(
                f"option lookup.where: to compare column {field.name!r} of type {kind} with {value:f}, Spark would have to round one of them: "
                "give a number with fewer digits"
            )


def count_digits(value: decimal.Decimal) -> tuple[int, int]:
    """The number of digits that a finite number needs before and after the point."""
    with decimal.localcontext(decimal.Context(prec=400)):
        exponent = value.normalize().as_tuple().exponent
    assert isinstance(exponent, int)
    return max(value.adjusted() + 1, 0), max(-exponent, 0)


def _coerce(field: pa.Field, value: Any) -> Any:
    """`value` as a Python value of the column's type. Raises PredicateError if Spark would compare with another value, or not at all."""
    kind = field.type
    if pa.types.is_floating(kind) and isinstance(value, (int, float, decimal.Decimal)) and not isinstance(value, bool):
        return float(value)
    same_domain = ((pa.types.is_string, str), (pa.types.is_binary, bytes), (pa.types.is_boolean, bool))
    if any(test(kind) and isinstance(value, python) for test, python in same_domain):
        return value
    if pa.types.is_date(kind):
        if isinstance(value, str):
            value = _parse(parse_date, value, field)
        if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
            return value
    if pa.types.is_timestamp(kind):
        return _coerce_timestamp(field, value)
    raise PredicateError(
        f"option lookup.where: column {field.name!r} of type {kind} cannot be compared with {_show_literal(value)}"
        + (f"; quote it: '{value}'" if pa.types.is_string(kind) else "")
    )


def _show_literal(value: Any) -> str:
    return f"'{value}'" if isinstance(value, datetime.date) else repr(value)


def _coerce_timestamp(field: pa.Field, value: Any) -> datetime.datetime:
    zoned = field.type.tz is not None
    if isinstance(value, str):
        value = _parse(parse_timestamp, value, field)
    elif isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        value = datetime.datetime.combine(value, datetime.time())
    if isinstance(value, datetime.datetime) and zoned == (value.tzinfo is not None):
        try:
            return value.astimezone(datetime.timezone.utc) if zoned else value
        except OverflowError:  # year 0 or 10000 in UTC
            pass
    need = "with its zone, e.g. '2024-01-31 12:00:00+00:00'" if zoned else "without a zone, e.g. '2024-01-31 12:00:00'"
    raise PredicateError(
        f"option lookup.where: give {_show_literal(value)} for column {field.name!r} as a timestamp {need}"
    )


# Only spellings that Spark and all Python versions read alike: Spark reads some that Python does not, and Python some that Spark does not.
_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_TIMESTAMP = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[ T](\d\d:\d\d)(?::(\d\d)(?:\.(\d{1,6}))?)? ?(Z|UTC|[+-]\d\d:\d\d)?)?", re.ASCII
)


def parse_date(text: str) -> datetime.date:
    """The date of a text such as `2024-01-31`. Raises ValueError for any other spelling."""
    if not _DATE.fullmatch(text.strip()):
        raise ValueError(text)
    return datetime.date.fromisoformat(text.strip())


def parse_timestamp(text: str) -> datetime.datetime:
    """The timestamp of a text such as `2024-01-31 12:00:00.5 +01:00`, of which all but the date may be missing. Raises ValueError for other texts."""
    match = _TIMESTAMP.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    day, minutes, seconds, fraction, zone = match.groups(default="")
    zone = "+00:00" if zone in ("Z", "UTC") else zone
    return datetime.datetime.fromisoformat(f"{day}T{minutes or '00:00'}:{seconds or '00'}.{fraction:0<6}{zone}")


def _parse(parse: Callable[[str], Any], text: str, field: pa.Field) -> Any:
    try:
        return parse(text)
    except ValueError:
        raise PredicateError(
            f"option lookup.where: {text!r} is not a valid {field.type} value for column {field.name!r} (write ISO-8601)"
        ) from None


NUMBERED = "\ue000"
"""The first character of the text that `take_strings` puts in a literal's place. Literals that the parser makes itself do not have it."""
_TOKEN = re.compile(
    r"""(?P<skipped>--[^\n]*|/\*.*?\*/|`(?:[^`]|``)*`|\b[xX](?:'[^']*'|"[^"]*"))"""
    r"""|(?P<raw>\b[rR](?:'[^']*'|"[^"]*"))|(?P<text>'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*")""",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([01][0-7]{2})|(.))|(''|\"\")", re.DOTALL)
_CONTROLS = {"0": "\0", "b": "\b", "n": "\n", "r": "\r", "t": "\t", "Z": "\x1a", "%": r"\%", "_": r"\_"}


def take_strings(sql: str) -> tuple[str, list[str]]:
    """(the statement with each string literal replaced by `NUMBERED` and its number, the literals' texts as Spark 4 reads them).

    As in Spark, a quote in a literal may be doubled or escaped, and adjacent literals are one text.
    """
    strings: list[str] = []
    parts: list[str] = []
    at, last_end = 0, -1
    for token in _TOKEN.finditer(sql):
        between = sql[at : token.start()]
        at = token.end()
        if token["skipped"]:
            parts += [between, token[0]]
            continue
        text = token["raw"][2:-1] if token["raw"] else _meaning(token["text"])
        if last_end >= 0 and parts and not between.strip() and last_end == len(parts):
            strings[-1] += text
            continue
        parts += [between, f"'{NUMBERED}{len(strings)}'"]
        strings.append(text)
        last_end = len(parts)
    return "".join([*parts, sql[at:]]), strings


def _meaning(literal: str) -> str:
    quote, body = literal[0], literal[1:-1]

    def char(match: re.Match[str]) -> str:
        four, eight, octal, letter, doubled = match.groups()
        if doubled:
            return doubled[0] if doubled[0] == quote else doubled
        if octal:
            return chr(int(octal, 8))
        return chr(int(four or eight, 16)) if four or eight else _CONTROLS.get(letter, letter)

    text = _ESCAPE.sub(char, body)
    # Two escaped UTF-16 halves are one character.
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# --- predicates -----------------------------------------------------------------------------------

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
_SUPPORTED = (
    "=, <>, <, <=, >, >=, <=>, IN, BETWEEN, LIKE 'prefix%', IS [NOT] NULL, AND, OR and NOT over a column and literals"
)


def parse_where(text: str, schema: pa.Schema) -> Predicate:
    """The predicate of an SQL text, over columns of `schema`.

    Raises PredicateError showing the part that is malformed or not supported.
    """
    try:
        return _parse_where(text, schema)
    except RecursionError:
        raise PredicateError(f"option lookup.where is nested too deeply, simplify it: {text[:100]!r}…") from None
    except PredicateError:
        raise
    except UNREADABLE as problem:  # any error of sqlglot's
        raise PredicateError(f"option lookup.where = {show(text)} is not understood: {problem!r}") from None


def _parse_where(text: str, schema: pa.Schema) -> Predicate:
    plain, strings = take_strings(text)  # sqlglot has its own rules for escapes
    try:
        statements = sqlglot.parse(f"SELECT 1 FROM t WHERE ({plain}\n)", dialect="spark")
    except SqlglotError as problem:
        raise PredicateError(f"option lookup.where = {text!r} does not parse: {str(problem).splitlines()[0]}") from None
    select = statements[0] if len(statements) == 1 else None
    where = select.args.get("where") if isinstance(select, exp.Select) else None
    extra = {k for k, v in (select.args if select else {}).items() if v} - _OF_SELECT
    if where is None or extra or not isinstance(where.this, exp.Paren):
        raise PredicateError(f"option lookup.where = {text!r}: expected one predicate, without the word WHERE")
    return _Binder(schema, strings).predicate(where.this.this)


class _Binder:
    def __init__(self, schema: pa.Schema, strings: Sequence[str]) -> None:
        self._schema = schema
        self._strings = strings

    def predicate(self, node: exp.Expression) -> Predicate:
        predicate = self._predicate(node)
        # Since version 28 sqlglot has NOT LIKE as a flag.
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
        """Refuse arguments of a node that this module does not read, such as BETWEEN's SYMMETRIC, which would otherwise be dropped silently."""
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
    """Whether a DECIMAL of these parameters can have the value without rounding."""
    precision = parameters[0] if parameters else 10
    scale = parameters[1] if len(parameters) > 1 else 0
    if not value.is_finite():
        return False
    whole, fraction = count_digits(value)
    return fraction <= scale and whole <= precision - scale


def _number(text: str) -> int | float | decimal.Decimal | None:
    """A number in the type that Spark gives it: an integer, a DECIMAL if it has a point, a DOUBLE if it has an exponent. None: Spark refuses it."""
    if "e" in text.lower():
        double = float(text)
        return double if math.isfinite(double) else None
    exact = decimal.Decimal(text)
    if len(exact.as_tuple().digits) > 38:
        return None
    return exact if "." in text else int(text)
