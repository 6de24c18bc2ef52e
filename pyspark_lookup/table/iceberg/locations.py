"""Where the files lie that an Iceberg table's metadata names."""

from __future__ import annotations

import posixpath
import re

from pyspark_lookup.base.errors import NotSupportedError
from pyspark_lookup.options.conf_file import redact

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?://([^/]*))?")
_PATHS = ("", "file", "hdfs", "viewfs")  # of which it is the path that tells files apart
_S3 = ("s3a", "s3n")


def plain_location(location: str) -> str:
    """One spelling of a location: `s3a://` is `s3://`, and of a path on a disk or in HDFS the path alone counts."""
    found = _SCHEME.match(location)
    scheme, rest = (found[1].lower(), location[found.end() :]) if found else ("", location)
    if scheme in _PATHS:
        return posixpath.normpath("/" + rest.lstrip("/") if found or rest.startswith("/") else rest)
    authority = found[2] or "" if found else ""
    return f"{'s3' if scheme in _S3 else scheme}://{authority}{rest}"


def authority_of(location: str) -> str:
    """What comes before the path in a location: scheme and authority, or nothing."""
    found = _SCHEME.match(location)
    return found[0] if found else ""


def _scheme_of(url: str) -> str:
    scheme = url.partition("://")[0].lower() if "://" in url else "file"
    return "s3" if scheme in _S3 else scheme


class Locations:
    """What metadata calls `location` is at the URL `root`: a table may have been written under another name, or relative to the writer's
    directory, or copied."""

    def __init__(self, location: str, root: str) -> None:
        self.location, self.root = location, root
        self._own = plain_location(location)
        here, there = plain_location(root).split("/"), self._own.split("/")
        shared = 0
        while shared < min(len(here), len(there)) and here[-shared - 1] == there[-shared - 1]:
            shared += 1
        # Above what both have in common: where the writer's files lay, and where they are now, if they were copied together.
        self._before = "/".join(there[: len(there) - shared])
        self._now = root.rsplit("/", shared)[0]
        self._moved = shared > 0 and (self._before, self._own) != (
            "/".join(here[: len(here) - shared]),
            plain_location(root),
        )

    def url_of(self, written: str) -> str:
        """The URL of a file. Raises ValueError for a relative path of which nobody knows where it begins, NotSupportedError for a file of
        another store than the table's."""
        url = self._url_of(written)
        theirs, own = (_scheme_of(each) for each in (url, self.root))
        if theirs != own and not {theirs, own} <= {"hdfs", "viewfs"}:
            raise NotSupportedError(
                f"{redact('path', self.root)}: its metadata names {redact('path', written)}, a file of another store"
            )
        return url

    def _url_of(self, written: str) -> str:
        plain = plain_location(written)
        if plain == self._own or plain.startswith(self._own + "/"):
            return self.root + plain[len(self._own) :]
        if self._moved and (plain.startswith(self._before + "/") or (not self._before and "://" not in plain)):
            return self._now + "/" + plain[len(self._before) :].lstrip("/")
        if plain.startswith("/"):
            scheme = _SCHEME.match(written)
            if scheme is None or scheme[1].lower() == "file":
                home = _SCHEME.match(self.root)
                # A path alone is one of the store that the table lies in.
                if scheme is None and home is not None and home[1] not in ("file", "s3"):
                    return f"{home[1]}://{home[2] or ''}{plain}"
                return "file://" + plain
            return f"{scheme[1].lower()}://{scheme[2] or ''}{plain}"
        if "://" in plain:
            return plain
        raise ValueError(f"a relative path, {written!r}, which is not below the table's location {self.location!r}")
