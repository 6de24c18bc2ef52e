"""A REST catalog with principals and grants, after the public OpenAPI description, which vends credentials that the store really checks."""

import contextlib
import threading
import time
import urllib.parse
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.utils.config import Config

from pyspark_lookup.sources.iceberg import pyiceberg_catalog
from tests.support.iceberg_values import Kind
from tests.support.iceberg_writing import IcebergTable
from tests.support.rest_catalog import RestCatalog, error_body
from tests.support.s3server import Mirror, S3Server
from tests.support.short_credentials import ShortCredentials

_CREDENTIALS = "GET /v1/{prefix}/namespaces/{namespace}/tables/{table}/credentials"
_LOAD = "GET /v1/{prefix}/namespaces/{namespace}/tables/{table}"


class GovernedCatalog(RestCatalog):
    """`tokens`: the principal of each token; `everybody`: of those without one. `grants`: (principal, table) of those who may read. `sights`: of those
    who may see the table, and are vended nothing. `lives_s`: of what is vended.

    `ahead_s`: how far its clock is ahead of the host's. `more`: what answers about a table have besides. `prefix`: what credentials are said to be
    for, instead of their table's location. `in_config`: they have no prefix. `renamed`: the table that a principal sees under a name. `asked`: what came with a known token, as `("alice", "table")`.
    """

    def __init__(self, store: ShortCredentials, endpoint: str) -> None:
        self.store, self.endpoint = store, endpoint
        self._request = threading.local()
        self.tokens: dict[str, str] = {}
        self.everybody: str | None = None
        self.grants: set[tuple[str, str]] = set()
        self.sights: set[tuple[str, str]] = set()
        self.asked: list[tuple[str, str]] = []
        self.lives_s, self.ahead_s = 3600.0, 0.0
        self.more: dict[str, Any] = {}
        self.prefix: str | None = None
        self.in_config = False
        self.endpoints = [_LOAD, _CREDENTIALS]
        self.renamed: dict[tuple[str, str], str] = {}
        super().__init__()

    def _serve(self, request: BaseHTTPRequestHandler) -> None:
        request.date_time_string = lambda timestamp=None: formatdate(time.time() + self.ahead_s, usegmt=True)  # type: ignore[method-assign]
        self._request.headers = request.headers
        super()._serve(request)

    def answer(self, method: str, path: str) -> tuple[int, Any]:
        if self.fault is not None and (fault_answer := self.fault(method, path)) is not None:
            self.requests.append(f"{method} {path}")
            return fault_answer
        headers = self._request.headers
        token = headers.get("Authorization", "").removeprefix("Bearer ")
        principal = self.tokens.get(token, self.everybody)
        if principal is None:
            return 401, error_body(401, "NotAuthorizedException", "who is this?")
        parts = [urllib.parse.unquote(part) for part in path.strip("/").split("/")]
        if parts == ["v1", "config"]:
            return 200, {"defaults": {}, "overrides": {}, "endpoints": self.endpoints}
        kind = "credentials" if parts[-1] == "credentials" else "table"
        self.asked.append((principal, kind))
        table = self.renamed.get((principal, f"{parts[2]}.{parts[4]}"), f"{parts[2]}.{parts[4]}")
        status, body = super().answer(method, "/v1/namespaces/{}/tables/{}".format(*table.split(".")))
        if status != 200:
            return status, body
        may_read = (principal, table) in self.grants
        if not may_read and (kind == "credentials" or (principal, table) not in self.sights):
            return 403, error_body(403, "ForbiddenException", f"{principal} may not read {table}")
        vended = {}
        if may_read and headers.get("X-Iceberg-Access-Delegation") == "vended-credentials":
            vended = self._vend(body["metadata"]["location"])
        if kind == "credentials":
            return 200, {key: value for key, value in vended.items() if key == "storage-credentials"}
        config = {"s3.endpoint": self.endpoint, "client.region": "us-east-1", **vended.pop("config", {})}
        return 200, body | vended | self.more | {"config": config | self.more.get("config", {})}

    def _vend(self, location: str) -> dict[str, Any]:
        vended = self.store.vend(location, self.lives_s)
        end_ms = (time.time() + self.ahead_s + self.lives_s) * 1000
        config = {
            "s3.access-key-id": vended["access_key_id"],
            "s3.secret-access-key": vended["secret_access_key"],
            "s3.session-token": vended["session_token"],
            "s3.session-token-expires-at-ms": str(int(end_ms)),
        }
        if self.in_config:
            return {"config": config}
        return {"storage-credentials": [{"prefix": self.prefix or location, "config": config}]}

    @property
    def secrets(self) -> list[str]:
        """All that must be nowhere: tokens of principals, and what was vended."""
        return [*self.tokens, *(secret for vended in self.store.issued for secret in vended.values())]


class GovernedTable(Mirror):
    """An Iceberg table `ns.<name>` of a governed catalog, which is written on this disk and lies in a bucket."""

    def __init__(
        self, catalog: GovernedCatalog, server: S3Server, home: Path, name: str, columns: dict[str, Kind]
    ) -> None:
        super().__init__(home / name, f"{home.name}-{name}", server)
        self.name, publish = f"ns.{name}", catalog.publisher(f"ns.{name}")
        catalog.local[self.url] = self.local
        self.table = IcebergTable.create(self.local, columns, publish=publish, location=self.url)

    def write(self, *commits: list[dict[str, Any]]) -> None:
        """Commit rows, each list as one file."""
        for rows in commits:
            self.table.commit(self.table.data(rows))
        self.send()


@contextlib.contextmanager
def principal(catalog: GovernedCatalog, name: str, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Be this principal of the catalog `tests`, with a token in the environment, as long as the block lasts."""
    token = next(
        (token for token, principal_name in catalog.tokens.items() if principal_name == name),
        f"dapi-{name}-SESAME{len(catalog.tokens)}",
    )
    catalog.tokens[token] = name
    with configured(patch, token=token):
        yield


@contextlib.contextmanager
def configured(patch: pytest.MonkeyPatch, **properties: str) -> Iterator[None]:
    """PyIceberg's configuration has these properties of the catalog `tests`, as long as the block lasts."""
    with patch.context() as patched:
        for name, text in properties.items():
            patched.setenv(f"PYICEBERG_CATALOG__TESTS__{name.upper()}", text)
        for module in ("pyiceberg.catalog", pyiceberg_catalog.__name__):
            patched.setattr(f"{module}._ENV_CONFIG", Config())
        yield
