"""`Locations`: the URLs of the files that an Iceberg table's metadata names."""

from __future__ import annotations

import posixpath
import re

from pyspark_lookup.errors import NotSupportedError
from pyspark_lookup.options.conf_file import redact

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?://([^/]*))?")
_PATHS = ("", "file", "hdfs", "viewfs")  # schemes whose files differ by path only
_S3 = ("s3a", "s3n")


def plain_location(location: str) -> str:
    """A location in its canonical spelling: `s3://` instead of `s3a://`, and only the path on a disk or in HDFS."""
    match = _SCHEME.match(location)
    scheme, path = (match[1].lower(), location[match.end() :]) if match else ("", location)
    if scheme in _PATHS:
        return posixpath.normpath("/" + path.lstrip("/") if match or path.startswith("/") else path)
    authority = match[2] or "" if match else ""
    return f"{'s3' if scheme in _S3 else scheme}://{authority}{path}"


def parse_authority(location: str) -> str:
    """What comes before the path in a location: scheme and authority, or nothing."""
    match = _SCHEME.match(location)
    return match[0] if match else ""


def _parse_scheme(url: str) -> str:
    scheme = url.partition("://")[0].lower() if "://" in url else "file"
    return "s3" if scheme in _S3 else scheme


class Locations:
    """Maps locations in a table's metadata to URLs. The metadata's `location` lies at the URL `root`.

    The two differ if the table was written under another name or relative to the writer's directory, or was copied.
    """

    def __init__(self, location: str, root: str) -> None:
        self.location, self.root = location, root
        self._plain_location = plain_location(location)
        root_parts, location_parts = plain_location(root).split("/"), self._plain_location.split("/")
        common = 0
        while (
            common < min(len(root_parts), len(location_parts))
            and root_parts[-common - 1] == location_parts[-common - 1]
        ):
            common += 1
        # The directories above the common end of both: where the writer's files lay, and where they are now, if they were copied
        # together.
        self._location_above = "/".join(location_parts[: len(location_parts) - common])
        self._root_above = root.rsplit("/", common)[0]
        self._moved = common > 0 and (self._location_above, self._plain_location) != (
            "/".join(root_parts[: len(root_parts) - common]),
            plain_location(root),
        )

    def resolve_url(self, file_location: str) -> str:
        """The URL of a file. Raises ValueError for a relative path that is not below the table's location, NotSupportedError for a file in
        another store than the table's."""
        url = self._resolve(file_location)
        file_scheme, table_scheme = (_parse_scheme(address) for address in (url, self.root))
        if file_scheme != table_scheme and not {file_scheme, table_scheme} <= {"hdfs", "viewfs"}:
            raise NotSupportedError(
                f"{redact('path', self.root)}: its metadata names {redact('path', file_location)}, a file of another store"
            )
        return url

    def _resolve(self, file_location: str) -> str:
        plain = plain_location(file_location)
        if plain == self._plain_location or plain.startswith(self._plain_location + "/"):
            return self.root + plain[len(self._plain_location) :]
        if self._moved and (
            plain.startswith(self._location_above + "/") or (not self._location_above and "://" not in plain)
        ):
            return self._root_above + "/" + plain[len(self._location_above) :].lstrip("/")
        if plain.startswith("/"):
            scheme = _SCHEME.match(file_location)
            if scheme is None or scheme[1].lower() == "file":
                home = _SCHEME.match(self.root)
                # A path alone is in the table's own store.
                if scheme is None and home is not None and home[1] not in ("file", "s3"):
                    return f"{home[1]}://{home[2] or ''}{plain}"
                return "file://" + plain
            return f"{scheme[1].lower()}://{scheme[2] or ''}{plain}"
        if "://" in plain:
            return plain
        raise ValueError(f"the relative path {file_location!r} is not below the table's location {self.location!r}")
