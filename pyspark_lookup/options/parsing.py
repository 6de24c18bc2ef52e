"""Texts of options as values: each parser returns one, or raises ValueError saying what was expected."""

from __future__ import annotations

import codecs
import difflib
import enum
import re
from collections.abc import Callable
from typing import Any

from pyspark_lookup.base.write_ids import ValidWriteIdList
from pyspark_lookup.options.enums import ReloadStrategy, StreamStart

_DURATION_UNIT_S = {
    "ms": 1e-3, "milli": 1e-3, "millis": 1e-3, "millisecond": 1e-3, "milliseconds": 1e-3,
    "s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0, "seconds": 1.0,
    "min": 60.0, "mins": 60.0, "minute": 60.0, "minutes": 60.0,
    "h": 3600.0, "hour": 3600.0, "hours": 3600.0,
    "d": 86400.0, "day": 86400.0, "days": 86400.0,
}  # fmt: skip
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")
_ISO_DURATION = re.compile(r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?", re.IGNORECASE)
_LONGEST_S = 100 * 365 * 86400.0  # about what a lock can be waited for
_NAME = re.compile(r"\s*(?:`((?:[^`]|``)+)`|([^,`\s](?:[^,`]*[^,`\s])?))\s*(?=,|\Z)")
_BYTES = re.compile(r"(\d{1,18})\s*(?:([kmgt])i?)?b?")


def parse_duration_s(text: str) -> float:
    """Seconds (>= 0) of `10 s`, `500 ms`, `5 min`, `1 h`, `7 d` or ISO-8601 `PT10S`."""
    plain = _DURATION.fullmatch(text.strip().lower())
    iso = _ISO_DURATION.fullmatch(text.strip())
    seconds = float("nan")
    if plain and plain[2] in _DURATION_UNIT_S:
        seconds = float(plain[1]) * _DURATION_UNIT_S[plain[2]]
    elif iso and any(iso.groups()):
        seconds = sum(float(part or 0) * unit for part, unit in zip(iso.groups(), (86400, 3600, 60, 1), strict=True))
    if not seconds <= _LONGEST_S:
        raise ValueError("a duration such as '10 s', '5 min', '1 h' or 'PT10S', of 100 years at most")
    return seconds


def parse_bytes(text: str) -> int:
    """Bytes (>= 0) of `4 MiB`, `128m`, `1g` or a plain number; units are powers of 1024."""
    match = _BYTES.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError("a size such as '4 MiB', '128m' or '1073741824'")
    exponent = "kmgt".index(match[2]) + 1 if match[2] else 0
    return int(match[1]) << (10 * exponent)


def parse_sync_interval_s(text: str) -> float:
    if text.strip() in ("-1", "0"):
        return float(text)
    try:
        return parse_duration_s(text)
    except ValueError:
        raise ValueError("-1 (never), 0 (always) or a duration such as '5 min'") from None


def bounded_bytes(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = parse_bytes(text)
        if not low <= value <= high:
            raise ValueError(f"a size between {low} and {high} bytes")
        return value

    return parse


def parse_count(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text.strip()):
        raise ValueError("a whole number, 0 or more")
    return int(text)


def parse_long(text: str) -> int:
    """A count up to 2^63 - 1, which says that there is no bound."""
    if not re.fullmatch(r"\d{1,19}", text.strip()) or int(text) >= 2**63:
        raise ValueError(f"a whole number, 0 to {2**63 - 1}")
    return int(text)


def parse_boolean(text: str) -> bool:
    choices = {"true": True, "false": False}
    if text.strip().lower() not in choices:
        raise ValueError("true or false")
    return choices[text.strip().lower()]


def parse_names(text: str) -> tuple[str, ...]:
    """Comma-separated column names; a name with a comma goes in backquotes, as in Spark SQL."""
    names: list[str] = []
    end = -1  # of the name before, where its comma stands
    while end < len(text):
        match = _NAME.match(text, end + 1)
        if match is None:
            break
        names.append(match[1].replace("``", "`") if match[1] else match[2])
        end = match.end()
    if end != len(text) or len(set(names)) != len(names):
        raise ValueError("column names separated by commas, none twice")
    return tuple(names)


def parse_text(text: str) -> str:
    if not text.strip():
        raise ValueError("some text")
    return text.strip()


def choice_of(kind: type[enum.Enum]) -> Callable[[str], Any]:
    """One of an enum's values, in any letter case (as Flink parses them)."""

    def parse(text: str) -> enum.Enum:
        for member in kind:
            if member.value.lower() == text.strip().lower():
                return member
        choices = [str(member.value) for member in kind]
        near = difflib.get_close_matches(text.strip(), choices, 1, 0.4) or difflib.get_close_matches(
            text.strip().upper(), choices, 1, 0.4
        )
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"one of {', '.join(choices)}{hint}")

    return parse


def parse_character(text: str) -> str:
    """One character, a tab also as `\\t`."""
    found = "\t" if text == "\\t" else text
    if len(found) != 1 or not found.isascii() or found in "\r\n\0":
        raise ValueError("one ASCII character, such as ; or \\t")
    return found


def parse_quote(text: str) -> str:
    """One character, or nothing."""
    return parse_character(text) if text else ""


def parse_encoding(text: str) -> str:
    """The name of an encoding that Python has, as Python spells it."""
    try:
        found = codecs.lookup(text.strip())
    except (LookupError, ValueError):
        found = None
    if found is None or not found._is_text_encoding:
        raise ValueError("the name of an encoding, such as UTF-8, ISO-8859-1 or UTF-16")
    return str(found.name)


def parse_factory(text: str) -> str:
    module, separator, factory = text.strip().partition(":")
    if not separator or not all(part.isidentifier() for part in (*module.split("."), *factory.split("."))):
        raise ValueError("module:factory, e.g. 'my_company.lookups:customers'")
    return text.strip()


def parse_positive_count(text: str) -> int:
    count = parse_count(text)
    if count < 1:
        raise ValueError("a whole number, 1 or more")
    return count


def parse_position(text: str) -> int:
    """A position in the log of a managed table."""
    if not re.fullmatch(r"0*[1-9]\d{0,17}", text.strip()):
        raise ValueError("a position in the table's log, 1 or more, as LookupTable.versions() lists them")
    return int(text)


def parse_positive_duration_s(text: str) -> float:
    seconds = parse_duration_s(text)
    if seconds <= 0:
        raise ValueError("a duration greater than zero, such as '5 min'")
    return seconds


def parse_days(text: str) -> int:
    if not re.fullmatch(r"\d{1,5}", text.strip()) or int(text) < 1:
        raise ValueError("a whole number of days, at least 1 day and at most 99999")
    return int(text)


def parse_name(text: str) -> str:
    """One name, in backticks or without."""
    names = parse_names(text)
    if len(names) != 1:
        raise ValueError("one name")
    return names[0]


def parse_commit(text: str) -> str:
    """A commit of a managed table: the table's id and a log position."""
    table_id, _, position = text.strip().rpartition(":")
    if not table_id or not re.fullmatch(r"[0-9]{1,18}", position):
        raise ValueError("what LookupTable.floor says: the table's id and a log position, as id:7")
    return text.strip()


def parse_batch(text: str) -> tuple[str, int]:
    """A batch of somebody's: their name, and a number that grows."""
    query, _, number = text.strip().rpartition(":")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", query) or not re.fullmatch(r"[0-9]{1,12}", number):
        raise ValueError("a name (letters, digits, ., _, -) and the number of a batch, such as orders-by-city:17")
    return query, int(number)


def parse_write_ids(text: str) -> str:
    """The text of a list of valid write ids, as it is written."""
    return str(ValidWriteIdList.parse(text.strip()))


def parse_stream_start(text: str) -> StreamStart | int:
    """Where a stream of changes begins."""
    if re.fullmatch(r"[0-9]{1,18}", text.strip()) and int(text) >= 1:
        return int(text)
    try:
        found = choice_of(StreamStart)(text)
    except ValueError:
        raise ValueError("SNAPSHOT, LATEST or a log position, such as 12") from None
    assert isinstance(found, StreamStart)
    return found


def parse_reload_strategy(text: str) -> ReloadStrategy | str:
    """PERIODIC, TIMED, or who makes a trigger."""
    if ":" in text:
        try:
            return parse_factory(text)
        except ValueError:
            raise ValueError("PERIODIC, TIMED or module:factory, e.g. 'my_company.triggers:nightly'") from None
    found = choice_of(ReloadStrategy)(text)
    assert isinstance(found, ReloadStrategy)
    return found
