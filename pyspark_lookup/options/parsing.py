"""Declares options (`option`) and parses their texts. A parser returns the value, or raises a ValueError whose text says what it expected."""

from __future__ import annotations

import codecs
import dataclasses
import datetime
import difflib
import enum
import importlib
import numbers
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from pyspark_lookup.core.credentials import has_unusual_login, without_url_credentials
from pyspark_lookup.core.write_ids import ValidWriteIdList
from pyspark_lookup.errors import OptionError, foreign_repr, raise_ours, reason_of
from pyspark_lookup.options.enums import ReloadStrategy, StreamStart

T = TypeVar("T")

_DURATION_UNIT_S = {
    "ms": 1e-3, "milli": 1e-3, "millis": 1e-3, "millisecond": 1e-3, "milliseconds": 1e-3,
    "s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0, "seconds": 1.0,
    "min": 60.0, "mins": 60.0, "minute": 60.0, "minutes": 60.0,
    "h": 3600.0, "hour": 3600.0, "hours": 3600.0,
    "d": 86400.0, "day": 86400.0, "days": 86400.0,
}  # fmt: skip
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")
_ISO_DURATION = re.compile(r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?", re.IGNORECASE)
_LONGEST_S = 100 * 365 * 86400.0  # about the longest time that a lock can wait
_NAME = re.compile(r"\s*(?:`((?:[^`]|``)+)`|([^,`\s](?:[^,`]*[^,`\s])?))\s*(?=,|\Z)")
_PART = r"(\s*`(?:[^`]|``)+`\s*|(?:(?!\.\.)[^`])+)"
_PAIR = re.compile(rf"{_PART}\.\.{_PART}")
_BYTES = re.compile(r"(\d{1,18})\s*(?:([kmgt])i?)?b?")


def parse_duration_s(text: str) -> float:
    """The seconds (0 or more) that a text such as `10 s`, `500 ms`, `5 min`, `1 h`, `7 d` or `PT10S` (ISO 8601) states."""
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
    """The bytes (0 or more) that a text such as `4 MiB`, `128m`, `1g` or a plain number states. Units are powers of 1024."""
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


def whole_number(low: int, high: int, expected: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"\d{1,19}", text.strip()) or not low <= int(text) <= high:
            raise ValueError(expected)
        return int(text)

    return parse


def parse_boolean(text: str) -> bool:
    choices = {"true": True, "false": False}
    if text.strip().lower() not in choices:
        raise ValueError("true or false")
    return choices[text.strip().lower()]


def parse_names(text: str) -> tuple[str, ...]:
    """Comma-separated column names; a name with a comma goes in backquotes, as in Spark SQL."""
    names: list[str] = []
    end = -1  # the position of the comma after the last name
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
        raise ValueError("non-empty text")
    return text.strip()


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(/*)(.*)", re.DOTALL)
_REMOTE = [
    "abfs",
    "abfss",
    "adl",
    "dbfs",
    "ftp",
    "gcs",
    "gs",
    "hdfs",
    "http",
    "https",
    "oss",
    "s3",
    "s3a",
    "s3n",
    "sftp",
    "viewfs",
    "wasb",
    "wasbs",
    "webhdfs",
]
_DATABASE_FILES = ("duckdb", "sqlite")
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)\}?(?=/|$)|%([A-Za-z_]\w*)%(?=[/\\]|$)")
_DRIVE = re.compile(r"[A-Za-z]:[\\/](?!/)|\\\\")
_OF_FORMAT = re.compile(r"(\w+)\.`(.+)`", re.DOTALL)


def parse_path(text: str) -> str:
    """A path or URL, with its scheme in small letters. Raises ValueError for a path that other programs understand but this package does not."""
    path = parse_text(text)
    if "\0" in path or not _is_encodable(path):
        raise ValueError("a path without NUL characters or unpaired surrogates, which file names cannot have")
    if (of_format := _OF_FORMAT.fullmatch(path)) is not None:
        raise ValueError(f"the path alone, {of_format[2]!r}: the format ({of_format[1]}) is detected")
    if (variable := _VARIABLE.match(path.removeprefix("file://"))) is not None:
        raise ValueError(f"a path written out in full: the variable {variable[0]} is not expanded here")
    if _DRIVE.match(path) is not None:
        raise ValueError("a path of Linux or macOS, such as '/…', or a URL: Windows drives are not supported")
    match = _SCHEME.fullmatch(path)
    if match is None:
        return path
    scheme, slashes, location = match[1].lower(), match[2], match[3]
    if scheme.partition("+")[0] in _DATABASE_FILES and location and slashes in ("/", "///", "////"):
        # After three slashes comes a path relative to the working directory, as in SQLAlchemy. Spark's catalog keeps one of four slashes.
        return f"{scheme}:///{os.path.abspath(location) if slashes == '///' else '/' + location}"
    url = f"{scheme}://{location}"
    shown = location if without_url_credentials(url) == url else "…"
    if scheme == "dbfs":
        raise ValueError(f"the path at which Databricks mounts it, '/dbfs/{shown}'")
    if scheme in _REMOTE and len(slashes) != 2:
        place = f"<namenode>/{shown}" if scheme == "hdfs" else shown
        raise ValueError(f"two slashes, '{scheme}://{place}'")
    if scheme in _REMOTE and has_unusual_login(path):
        raise ValueError(
            "a URL in which each space, quote and slash before the @ is percent-encoded (%20, %27, %2F): otherwise error messages of the store could show the password"
        )
    if scheme in ("file", "local") and slashes == "//" and location and not location.startswith("/"):
        host, _, below = location.partition("/")
        raise ValueError(
            f"a path of this machine, '{scheme}:///{below if host == 'localhost' else '…'}': after two slashes comes the name of a host"
        )
    return f"{scheme}:{slashes}{location}" if scheme in (*_REMOTE, "file", "local") or slashes == "//" else path


def _is_encodable(path: str) -> bool:
    """Whether a file can have this path: whether each surrogate in it stands for a byte that is not UTF-8, as in Python's paths."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


def parse_character(text: str) -> str:
    """One character; a tab may be written as `\\t`."""
    character = "\t" if text == "\\t" else text
    if len(character) != 1 or not character.isascii() or character in "\r\n\0":
        raise ValueError("one ASCII character, such as ; or \\t")
    return character


def parse_quote(text: str) -> str:
    return parse_character(text) if text else ""


def parse_encoding(text: str) -> str:
    """The name of a text encoding, in Python's spelling. Raises ValueError for an encoding that Python does not know."""
    try:
        codec = codecs.lookup(text.strip())
    except (LookupError, ValueError):
        codec = None
    if codec is None or not codec._is_text_encoding:
        raise ValueError("the name of an encoding, such as UTF-8, ISO-8859-1 or UTF-16")
    return str(codec.name)


def parse_factory(text: str) -> str:
    module, separator, factory = text.strip().partition(":")
    if not separator or not all(part.isidentifier() for part in (*module.split("."), *factory.split("."))):
        raise ValueError("module:factory, e.g. 'my_company.lookups:customers'")
    return text.strip()


def parse_function(text: str) -> str:
    try:
        return parse_factory(text)
    except ValueError:
        raise ValueError("module:function, e.g. 'my_company.logins:of_shop'") from None


def make(option: str, name: str, argument: Any, kind: type[T]) -> T:
    """What the factory `name` (`module:factory`) returns for `argument`: an object of type `kind`.

    Raises OptionError, which names the option, if the factory cannot be imported, raises an error, or returns an object of another type.
    """
    module, _, path = name.partition(":")
    try:
        factory: Any = importlib.import_module(module)
        for part in path.split("."):
            factory = getattr(factory, part)
        instance = factory(argument)
    except OptionError:
        raise
    except Exception as problem:  # any error of the user's module when it is imported or called
        raise_ours(OptionError(f"option {option} = {name!r} failed: {reason_of(problem)}"), problem)
    if not isinstance(instance, kind):
        raise OptionError(
            f"option {option} = {name!r}: the factory returned {foreign_repr(instance)}: make it return a {kind.__name__}"
        )
    return instance


def parse_positive_duration_s(text: str) -> float:
    seconds = parse_duration_s(text)
    if seconds <= 0:
        raise ValueError("a duration greater than zero, such as '5 min'")
    return seconds


def parse_name(text: str) -> str:
    """A single column name; it may be in backquotes."""
    try:
        (name,) = parse_names(text)
    except ValueError:
        raise ValueError("the name of one column") from None
    return name


def parse_pair(text: str) -> tuple[str, str]:
    """Two column names with `..` between them; a name with two dots in a row goes in backquotes."""
    pair = _PAIR.fullmatch(text)
    if pair is None:
        raise ValueError("two columns of the table, such as low..high")
    return parse_name(pair[1]), parse_name(pair[2])


def parse_network_columns(text: str) -> tuple[str, ...]:
    """One column name, or two as in `parse_pair`."""
    try:
        return parse_pair(text) if (".." in text and "`" not in text) or _PAIR.fullmatch(text) else (parse_name(text),)
    except ValueError:
        raise ValueError("a column of the table, such as network, or two, such as first..last") from None


def parse_commit(text: str) -> str:
    """The text `table id:log position`, which names a commit of a managed table."""
    table_id, _, position = text.strip().rpartition(":")
    if not table_id or not re.fullmatch(r"[0-9]{1,18}", position):
        raise ValueError("a table's id and a log position, such as id:7, in the form that LookupTable.floor returns")
    return text.strip()


def parse_instant(text: str) -> datetime.datetime:
    """The instant that a text names, in UTC. A time without a zone is taken as UTC."""
    try:
        # Python 3.10 does not parse a Z.
        at = datetime.datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text.strip()))
        return (at if at.tzinfo else at.replace(tzinfo=datetime.timezone.utc)).astimezone(datetime.timezone.utc)
    except (ValueError, OverflowError):
        raise ValueError("a time such as 2026-03-01T12:00:00+01:00, or 2026-03-01 11:00:00 in UTC") from None


def parse_batch(text: str) -> tuple[str, int]:
    """(the writer's name, the number of its batch) of a text such as `orders-by-city:17`."""
    query, _, number = text.strip().rpartition(":")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", query) or not re.fullmatch(r"[0-9]{1,12}", number):
        raise ValueError("a name (letters, digits, ., _, -) and the number of a batch, such as orders-by-city:17")
    return query, int(number)


def parse_write_ids(text: str) -> str:
    """A list of valid write ids as text, in the spelling of `ValidWriteIdList`."""
    try:
        return str(ValidWriteIdList.parse(text.strip()))
    except ValueError:
        raise ValueError(
            "a list that LookupTable.valid_write_ids returns, such as 't1:5:2:2,4:' (table id, high watermark, least open id, open ids, aborted ids)"
        ) from None


def parse_stream_start(text: str) -> StreamStart | int:
    if re.fullmatch(r"[0-9]{1,18}", text.strip()) and int(text) >= 1:
        return int(text)
    try:
        start: StreamStart = choice(StreamStart).parse(text)
    except ValueError:
        raise ValueError("SNAPSHOT, LATEST or a log position, such as 12") from None
    return start


def parse_reload_strategy(text: str) -> ReloadStrategy | str:
    """PERIODIC, TIMED, or the factory of a trigger (`module:factory`)."""
    if ":" in text:
        try:
            return parse_factory(text)
        except ValueError:
            raise ValueError("PERIODIC, TIMED or module:factory, e.g. 'my_company.triggers:nightly'") from None
    strategy: ReloadStrategy = choice(ReloadStrategy).parse(text)
    return strategy


class Kind(NamedTuple):
    """The type of an option: `label` names it for users, `parse` returns the value of a text or raises ValueError with what it expected."""

    label: str
    parse: Callable[[str], Any]


BOOLEAN = Kind("boolean", parse_boolean)
COUNT = Kind("integer", whole_number(0, 10**9 - 1, f"a whole number, 0 to {10**9 - 1}"))
POSITIVE_COUNT = Kind("integer", whole_number(1, 10**9 - 1, f"a whole number, 1 to {10**9 - 1}"))
LONG = Kind("integer", whole_number(0, 2**63 - 1, f"a whole number, 0 to {2**63 - 1}"))
DURATION = Kind("duration", parse_duration_s)
POSITIVE_DURATION = Kind("duration", parse_positive_duration_s)
NAME = Kind("name", parse_name)
NAMES = Kind("names", parse_names)
PAIR = Kind("`low..high`", parse_pair)
NETWORK_COLUMNS = Kind("name or `first..last`", parse_network_columns)
MIB, GIB, MOST = 1024**2, 1024**3, 2**60


def choice(enum_class: type[enum.Enum]) -> Kind:
    """The `Kind` of an option whose values are those of an enum, in any letter case (as in Flink)."""
    choices = [str(member.value) for member in enum_class]

    def parse(text: str) -> enum.Enum:
        stripped = text.strip()
        for member in enum_class:
            if member.value.lower() == stripped.lower():
                return member
        close_words = [
            word for form in (stripped, stripped.upper()) for word in difflib.get_close_matches(form, choices, 1, 0.4)
        ]
        hint = f" (did you mean {close_words[0]}?)" if close_words else ""
        raise ValueError(f"one of {', '.join(choices)}{hint}")

    return Kind(", ".join(choices), parse)


def size(low: int, high: int) -> Kind:
    """The `Kind` of an option that is a size, from `low` to `high` bytes."""

    def parse(text: str) -> int:
        value = parse_bytes(text)
        if not low <= value <= high:
            lowest = f"{low // MIB} MiB" if low >= MIB else f"{low} B"
            raise ValueError(f"a size from {lowest} to {high // 2**60} EiB")
        return value

    return Kind("size", parse)


def option(
    key: str,
    kind: Kind,
    default: Any,
    *,
    doc: str,
    default_text: str = "",
    hashed: bool = True,
    secrets: str = "",
    bounded: bool = False,
) -> Any:
    """The dataclass field that declares an option, for a group of options.

    `default_text`: the default as users see it, if that is not the text of `default`. `hashed`: False for a value that Python cannot hash.
    `secrets`: for an option that refuses credentials, the advice where to put them instead. `bounded`: the most that a read may set is the
    value in the conf file, or the default if that does not have the option.
    """
    if not default_text and default not in (None, ()):
        default_text = str(default).lower() if isinstance(default, bool) else str(getattr(default, "value", default))
    metadata = {
        "key": key,
        "kind": kind.label,
        "parse": kind.parse,
        "doc": doc,
        "default_text": default_text,
        "secrets": secrets,
        "bounded": bounded,
    }
    return dataclasses.field(default=default, hash=None if hashed else False, metadata=metadata)


def is_number(value: Any) -> bool:
    """Whether a value is a real number. True and False do not count as numbers."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_argument(name: str, value: Any, kinds: type | tuple[type, ...], expected: str) -> None:
    """Raise OptionError, which names the argument, unless its value is of one of the types `kinds`. True and False do not count as numbers."""
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise OptionError(f"argument {name} = {foreign_repr(value)}: expected {expected}")


def duration_argument_s(name: str, value: Any) -> float:
    """The seconds in an argument that is a duration: a text such as `7 d`, or a timedelta. Raises OptionError for any other argument."""
    check_argument(
        name, value, (str, datetime.timedelta), "a duration such as '7 d' or 'PT10S', or a datetime.timedelta"
    )
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    try:
        return parse_duration_s(value)
    except ValueError as problem:
        raise OptionError(f"argument {name} = {foreign_repr(value)}: expected {problem}") from None


def option_text(value: Any) -> str:
    """An option's value as the text that Spark would pass: "true" for `True`, names in backquotes for a list, seconds for a timedelta."""
    if isinstance(value, datetime.timedelta):
        return f"{value / datetime.timedelta(seconds=1):f} s"
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, (list, tuple)):
        return ",".join("`" + str(name).replace("`", "``") + "`" for name in value)
    return str(value).lower() if isinstance(value, bool) else str(value)
