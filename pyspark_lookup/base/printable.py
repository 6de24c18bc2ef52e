"""Texts of others on terminals, in logs and in pages."""

from __future__ import annotations


def printable(text: str, lines: bool = False) -> str:
    """A text that moves no cursor and turns no direction: what is not printable is escaped, line ends too unless it may have `lines`."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or (lines and char == "\n") else char.encode("unicode_escape").decode()
        for char in text
    )
