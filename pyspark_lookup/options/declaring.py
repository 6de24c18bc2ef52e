"""How options are declared: a field of a dataclass with its key, what its text may be, and what it means."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

from pyspark_lookup.options.parsing import (
    bounded_bytes,
    choice_of,
    parse_boolean,
    parse_count,
    parse_duration_s,
    parse_long,
    parse_name,
    parse_names,
    parse_positive_count,
    parse_positive_duration_s,
)


class Kind(NamedTuple):
    """What an option's text may be: what users are told, and what makes a value of it or raises ValueError."""

    label: str
    parse: Callable[[str], Any]


BOOLEAN = Kind("boolean", parse_boolean)
COUNT = Kind("integer", parse_count)
POSITIVE_COUNT = Kind("integer", parse_positive_count)
LONG = Kind("integer", parse_long)
DURATION = Kind("duration", parse_duration_s)
POSITIVE_DURATION = Kind("duration", parse_positive_duration_s)
NAME = Kind("name", parse_name)
NAMES = Kind("names", parse_names)
MIB, GIB, MOST = 1024**2, 1024**3, 2**60


def choice(of: type[enum.Enum]) -> Kind:
    """One of the values of an enum."""
    return Kind(", ".join(member.value for member in of), choice_of(of))


def size(low: int, high: int) -> Kind:
    """A size in bytes, within bounds."""
    return Kind("size", bounded_bytes(low, high))


def option(key: str, kind: Kind, default: Any, *, doc: str, shown: str = "", hashed: bool = True) -> Any:
    """A field of `LookupOptions`. `shown`: the default as users see it, where its text is not that."""
    if not shown and default is not None:
        shown = str(default).lower() if isinstance(default, bool) else str(getattr(default, "value", default))
    metadata = {"key": key, "kind": kind.label, "parse": kind.parse, "doc": doc, "shown": shown}
    return dataclasses.field(default=default, hash=None if hashed else False, metadata=metadata)
