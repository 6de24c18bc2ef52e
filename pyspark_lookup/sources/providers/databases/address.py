"""`Address`: where a database is, as the URL in the option `path` says. A URL never has a password."""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Mapping
from typing import Any

from pyspark_lookup.core.credentials import names_secret
from pyspark_lookup.errors import OptionError, raise_ours

_FILES_OF_SECRETS = frozenset({"passfile", "sslkey", "ssl_key", "servicefile"})  # parameters that name a file


@dataclasses.dataclass(frozen=True)
class Address:
    """A database's URL and its parts. `scheme`: the kind of database, without SQLAlchemy's `+driver`. `url`: with that scheme."""

    scheme: str
    host: str
    port: int | None
    database: str
    user: str
    parameters: Mapping[str, str]
    url: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """The address that a URL states. Raises OptionError for a URL with a password, whose message does not show the URL, and for one that is
        malformed."""
        scheme, _, location = url.partition("://")
        scheme = scheme.partition("+")[0].lower()
        url = f"{scheme}://{location}"
        try:
            parts = urllib.parse.urlsplit(url)
            port = None if "," in parts.netloc else parts.port  # libpq takes several hosts
            parameters = dict(
                urllib.parse.parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
            )
        except ValueError:
            raise_ours(
                OptionError(
                    "option path is a database's URL that cannot be parsed: write it as in SQLAlchemy, e.g. postgresql://host:5432/database, an IPv6 address "
                    "in brackets (postgresql://[::1]/database), and no password"
                ),
                None,
            )
        if parts.fragment or (parts.netloc and "@" in parts.path):  # maybe the end of a password
            raise OptionError(
                f"option path is a {scheme} URL with # or with @ after its host: write them as %23 and %40, and leave out a password"
            )
        secret = next(
            (name for name in parameters if names_secret(name) and name.lower() not in _FILES_OF_SECRETS), None
        )
        if parts.password is not None or secret is not None:
            raise OptionError(
                f"option path is a {scheme} URL with a password, which plans and catalogs would store: leave it out, and let each machine that "
                "connects read it from its environment or the driver's own file, or from the function that lookup.credentials names"
            )
        return cls(
            scheme,
            urllib.parse.unquote(parts.hostname or ""),
            port,
            urllib.parse.unquote(parts.path.removeprefix("/")),
            urllib.parse.unquote(parts.username or "") or parameters.get("user", ""),
            parameters,
            url,
        )

    @property
    def server(self) -> str:
        """The host, an IPv6 address in brackets, and the port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"

    @property
    def place(self) -> str:
        """The URL without its user and parameters, for messages."""
        return f"{self.scheme}://{self.server}/{self.database}"

    def check_parameters(self, known: Mapping[str, Any]) -> None:
        """Raise OptionError for a parameter that is not `known`."""
        unknown = sorted(self.parameters.keys() - known.keys())
        if unknown:
            raise OptionError(
                f"option path: unknown parameter {unknown[0]!r} in the {self.scheme} URL: remove it (known parameters: {', '.join(sorted(known)) or 'none'})"
            )
