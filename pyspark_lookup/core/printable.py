"""Makes foreign text safe for terminals, logs and pages."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

_NAMES_SHOWN = 30
_NAMES_COMPARED = 1000


def printable(text: str, lines: bool = False) -> str:
    """A text that cannot control a terminal: unprintable characters are escaped, and line ends unless `lines` is true."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or (lines and char == "\n") else char.encode("unicode_escape").decode()
        for char in text
    )


def names_shown(names: Sequence[str], unknown_name: str = "") -> str:
    """Names for an error about an unknown one: the first few, and the one that was probably meant."""
    more = f", … ({len(names)} in all)" if len(names) > _NAMES_SHOWN else ""
    spelled = {name.lower(): name for name in names[:_NAMES_COMPARED]}
    close_names = difflib.get_close_matches(unknown_name.lower(), spelled, 1, 0.7)
    return (
        ", ".join(names[:_NAMES_SHOWN]) + more + "".join(f": did you mean {spelled[name]!r}?" for name in close_names)
    )
