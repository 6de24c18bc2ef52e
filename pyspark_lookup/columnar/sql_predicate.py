"""Converts the text of `lookup.where`, a predicate in Spark SQL, to a `Predicate` over a table's columns.

`sql_parser` parses the text. The `bind_…` functions convert a literal to the type of the column with which it is compared, by Spark's rules
of type coercion.
"""

from __future__ import annotations

import datetime
import decimal
import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from pyspark_lookup.columnar.predicate import (
    Compare,
    Constant,
    In,
    IsNull,
    NullSafeEqual,
    Predicate,
)
from pyspark_lookup.columnar.types import collated_field, show_type
from pyspark_lookup.core.decoding import UNREADABLE, show
from pyspark_lookup.errors import PredicateError


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
        is_beyond = not -(2**63) <= value < 2**63
        if pa.types.is_integer(kind) and is_beyond and op in ("<", "<=", ">", ">="):
            # No BIGINT is beyond the literal. Spark's DecimalPrecision rule makes this a constant, even for null rows.
            return Constant(op.startswith("<") == (value > 0))
        return _bind_exact(field, op, decimal.Decimal(value), scale)
    return Compare(field.name, op, _coerce(field, value))


def refuse_collated(field: pa.Field) -> None:
    """Raise PredicateError for a column with a collation: Spark does not compare its texts by their bytes."""
    if collated_field(field) is not None:
        raise PredicateError(
            f"option lookup.where: column {field.name!r} has a collation, by which Spark compares text, but lookup.where compares bytes: "
            "filter the column with Spark's WHERE, or, in a table of files, declare it as STRING in lookup.schema"
        )


def bind_null_safe(field: pa.Field, value: Any) -> Predicate:
    """The comparison `field <=> value`. A value that the column's type cannot hold equals the value of no row, not even a null."""
    if value is None:
        return IsNull(field.name)
    comparison = bind_compare(field, "=", value)
    return NullSafeEqual(field.name, comparison.value) if isinstance(comparison, Compare) else Constant(False)


def bind_in(field: pa.Field, values: list[Any]) -> Predicate:
    """The predicate `field IN values`. A value that the column's type cannot hold matches no row."""
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
    """The comparison of an integer or decimal column with any number, without rounding or overflow. `scale`: the column's `_exact_scale`."""
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
    """Raise PredicateError if a decimal type for the column and all values would need more than 38 digits, because Spark would round then."""
    kind = field.type
    whole, fraction = kind.precision - scale if pa.types.is_decimal(kind) else _SPARK_DIGITS[kind], scale
    if len(values) == 1 and abs(values[0]) > decimal.Decimal(10) ** whole:
        return  # the number is beyond the column's range, so the result is the same whether Spark rounds it or not
    for value in values:
        digits = count_digits(value)
        whole, fraction = max(whole, digits[0]), max(fraction, digits[1])
        if whole + fraction > 38:
            raise PredicateError(
                f"option lookup.where: to compare column {field.name!r} of type {kind} with {value:f}, Spark would have to round one of them: "
                "give a number with fewer digits"
            )


def count_digits(value: decimal.Decimal) -> tuple[int, int]:
    """(digits before the point, digits after the point) that a finite number needs."""
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
        f"option lookup.where: column {field.name!r} of type {show_type(kind)} cannot be compared with {_show_literal(value)}"
        + (f": quote it: '{value}'" if pa.types.is_string(kind) else ": compare it with a literal of its type")
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
        except OverflowError:
            raise PredicateError(
                f"option lookup.where: {_show_literal(value)} for column {field.name!r} is outside the years 1 to 9999 in UTC: give a time within "
                "them"
            ) from None
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
    """The timestamp of a text such as `2024-01-31 12:00:00.5 +01:00`. Raises ValueError for any other spelling.

    The zone may be missing, and so may the fraction, the seconds, or the time of day as a whole.
    """
    match = _TIMESTAMP.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    day, minutes, seconds, fraction, zone = match.groups(default="")
    zone = "+00:00" if zone in ("Z", "UTC") else zone
    return datetime.datetime.fromisoformat(f"{day}T{minutes or '00:00'}:{seconds or '00'}.{fraction:0<6}{zone}")


def _parse(parse: Callable[[str], Any], text: str, field: pa.Field) -> Any:
    spelling = (
        "2024-01-31" if pa.types.is_date(field.type) else f"2024-01-31 12:00:00{'+00:00' if field.type.tz else ''}"
    )
    try:
        return parse(text)
    except ValueError:
        raise PredicateError(
            f"option lookup.where: {text!r} is not a valid {show_type(field.type)} value for column {field.name!r}: write it as '{spelling}'"
        ) from None


NUMBERED = "\ue000"
"""The first character of the text with which `take_strings` replaces a literal, by which such texts differ from literals that sqlglot adds."""
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
    # Two escapes that are the two halves of a UTF-16 surrogate pair are one character.
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def parse_where(text: str, schema: pa.Schema) -> Predicate:
    """The predicate that an SQL text states about columns of `schema`.

    Raises PredicateError, which shows the part of the text that is malformed or not supported.
    """
    # Imported here: sqlglot takes longer to import than any other dependency of a worker, and few workers parse a predicate.
    from pyspark_lookup.columnar.sql_parser import bind_where

    try:
        return bind_where(text, schema)
    except RecursionError:
        raise PredicateError(f"option lookup.where is nested too deeply, simplify it: {text[:100]!r}…") from None
    except PredicateError:
        raise
    except UNREADABLE as problem:  # any error of sqlglot's
        raise PredicateError(f"option lookup.where = {show(text)} is not understood ({problem}): simplify it") from None
