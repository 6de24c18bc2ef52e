"""Checks of values that were read from JSON. `as_text(value)`, for instance, returns a str, or raises TypeError or ValueError.

The checks are needed because files may be damaged, or written by another version of this package.
"""

from __future__ import annotations

import decimal
import math
import os
import re
import reprlib
from typing import Any

UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""The errors that decoding raises for malformed values."""

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_COUNT_AT_MOST = 2**63
_OF_PYTHON = re.compile(
    "indices must be|object is not|argument must be|unsupported operand|has no len|not supported between"
)
_EXPONENT_AT_MOST = 400  # more than any double has, and any decimal of a table


def show(value: Any) -> str:
    """The repr of any value for a message, shortened if it is long or deep."""
    return _short.repr(value)


def describe_fault(problem: BaseException) -> str:
    """What is wrong with a malformed document, as words for a message. `problem`: the error that its decoder raised."""
    if isinstance(problem, KeyError) and problem.args:
        return f"it has no {show(problem.args[0])}"
    if isinstance(problem, (EOFError, IndexError)):
        return "it is incomplete"
    if isinstance(problem, AttributeError) or (isinstance(problem, TypeError) and _OF_PYTHON.search(str(problem))):
        return "a value in it has the wrong type"
    return str(problem).strip().removesuffix(".") or type(problem).__name__


def as_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{show(value)} is not text")
    return value


def as_texts(value: Any) -> tuple[str, ...]:
    return tuple(map(as_text, _as_list(value)))


def as_name(value: Any) -> str:
    """The value, checked to be a file name that stays within its directory: without separators, and not `.` or `..`."""
    name = as_text(value)
    if name in ("", ".", "..") or "/" in name or not is_encodable(name):
        raise ValueError(f"{show(name)} is not a file name")
    return name


def is_encodable(text: str) -> bool:
    """Whether this system can have a file with this name."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def is_utf8(text: str) -> bool:
    """Whether a text can be encoded as UTF-8, as stores and Arrow require.

    A text from JSON may contain one half of a UTF-16 pair, which cannot be encoded.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_count(value: Any) -> int:
    """The value, checked to be a whole number from 0 to 2**63 - 1."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _COUNT_AT_MOST:
        raise TypeError(f"{show(value)} is not a whole number from 0 to 2**63 - 1")
    return value


def as_positive(value: Any) -> int:
    """The value, checked to be a whole number from 1 to 2**63 - 1."""
    if not (count := as_count(value)):
        raise TypeError("0 is not a whole number from 1 to 2**63 - 1")
    return count


def as_counts(value: Any) -> tuple[int, ...]:
    return tuple(map(as_count, _as_list(value)))


def as_number(value: Any) -> float:
    """The value as a float, checked to be a finite number."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{show(value)} is not a number")
    if not math.isfinite(number := float(value)):
        raise ValueError(f"{number} is not a finite number")
    return number


def as_decimal(text: str) -> decimal.Decimal | None:
    """The number in a text; None if the text is not a number, or is NaN, infinite, or has an exponent that no column can have.

    Arithmetic with larger exponents could take minutes.
    """
    try:
        number = decimal.Decimal(text)
    except decimal.InvalidOperation:
        return None
    exponent = number.as_tuple().exponent
    bounded = isinstance(exponent, int) and -_EXPONENT_AT_MOST <= exponent <= number.adjusted() <= _EXPONENT_AT_MOST
    return number if bounded else None


def _as_list(value: Any) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{show(value)} is not a list")
    return value
