"""String literals of Spark SQL, and the texts that they stand for."""

from __future__ import annotations

import re

NUMBERED = "\ue000"
"""Stands before a literal's number: other literals are a parser's own."""
_TOKEN = re.compile(
    r"""(?P<skipped>--[^\n]*|/\*.*?\*/|`(?:[^`]|``)*`|\b[xX](?:'[^']*'|"[^"]*"))"""
    r"""|(?P<raw>\b[rR](?:'[^']*'|"[^"]*"))|(?P<text>'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*")""",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([01][0-7]{2})|(.))|(''|\"\")", re.DOTALL)
_CONTROLS = {"0": "\0", "b": "\b", "n": "\n", "r": "\r", "t": "\t", "Z": "\x1a", "%": r"\%", "_": r"\_"}


def take_strings(sql: str) -> tuple[str, list[str]]:
    """(the statement with each string literal replaced by `NUMBERED` and its number, the literals' texts as Spark 4 reads them).

    A quote is doubled or escaped; adjacent literals are one.
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
    # Two escaped halves are one character.
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
