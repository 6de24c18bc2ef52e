"""What the headers of an HTTP answer say: how long it may be cached (RFC 9111), and when the server wants the next request.

The names of headers are in small letters; the values of a header that occurs several times are joined by commas.
"""

from __future__ import annotations

import email.utils
import math
import re
from collections.abc import Mapping

_DIRECTIVE = re.compile(r"""([^\s=,;"]+)(?:=(?:"((?:[^"\\]|\\.)*)"|([^\s,;"]*)))?""")
_NEXT = re.compile(r""";\s*rel\s*=\s*(?:"(?:[^"]*\s)?next(?:\s[^"]*)?"|next\b)""", re.IGNORECASE)


def lifetime_s(headers: Mapping[str, str], wall_s: float) -> float:
    """For how many seconds from now a private cache may use an answer without asking again; infinite if the server does not say.

    Zero for an answer that must not be stored, or that must be confirmed each time. Raises nothing: what cannot be parsed counts as zero, as the
    RFC demands.
    """
    directives = [
        (name.lower(), quoted or plain) for name, quoted, plain in _DIRECTIVE.findall(headers.get("cache-control", ""))
    ]
    names = {name for name, _ in directives}
    if names & {"no-store", "no-cache"}:
        return 0.0
    ages = [text for name, text in directives if name == "max-age"]
    if ages:
        return max(0.0, min(map(_seconds, ages)) - age_s(headers))
    if "expires" in headers:
        expires_s, date_s = _instant_s(headers["expires"]), _instant_s(headers.get("date", ""))
        return (
            0.0 if expires_s is None else max(0.0, expires_s - (wall_s if date_s is None else date_s) - age_s(headers))
        )
    return math.inf


def is_storable(headers: Mapping[str, str]) -> bool:
    """Whether an answer may be kept, so that a later request can revalidate it."""
    return "no-store" not in {name.lower() for name, *_ in _DIRECTIVE.findall(headers.get("cache-control", ""))}


def age_s(headers: Mapping[str, str]) -> float:
    """For how many seconds caches on the way have had the answer."""
    return _seconds(headers.get("age", ""))


def retry_after_s(headers: Mapping[str, str], wall_s: float) -> float | None:
    """The seconds until the server wants the next request; None if it does not say."""
    text = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d{1,9}", text):
        return float(text)
    at_s, date_s = _instant_s(text), _instant_s(headers.get("date", ""))
    return None if at_s is None else max(0.0, at_s - (wall_s if date_s is None else date_s))


def _seconds(text: str) -> float:
    return float(text) if re.fullmatch(r"\d{1,12}", text.strip()) else 0.0


def _instant_s(text: str) -> float | None:
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def has_next_page(headers: Mapping[str, str]) -> bool:
    """Whether the answer names a next page, which has more of what was requested (RFC 8288)."""
    return _NEXT.search(headers.get("link", "")) is not None
