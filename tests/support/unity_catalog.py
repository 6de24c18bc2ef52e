"""A Unity Catalog server on this host's loopback: the part of its OpenAPI (unitycatalog/unitycatalog, `api/all.yaml`) that a reader of Delta tables asks."""

import base64
import contextlib
import dataclasses
import json
import time
import urllib.parse
import uuid
from collections.abc import Callable
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from tests.support.web_server import serving

API = "/api/2.1/unity-catalog"
Fault = Callable[[str, str], tuple[int, Any] | None]
"""What a request, `("GET", "/tables/main.travel.airports")`, gets instead of its answer: a status and a body."""
Lend = Callable[[str, float], dict[str, str]]
"""AWS credentials for the objects below a URL, for some seconds."""


@dataclasses.dataclass
class Table:
    """A table as the catalog has it. `info`: what its `TableInfo` has besides. `staged`: the commits that are not published, by version."""

    location: str
    id: str = dataclasses.field(default_factory=lambda: str(uuid.uuid4()))
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    latest: int = 0
    staged: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)


class UnityServer(contextlib.ExitStack):
    """A context manager. `tokens`: the principal of each token. `readers`: the principals that may read a table, by its name. `clients`: the secret
    and the principal of each client. `lives_s`: for how long credentials are good, `ahead_s`: how far this server's clock is ahead of the host's.
    `page`: how many commits an answer has at most. `has_delta_api`: whether it is of release 0.5 or later, which has `api/delta.yaml`, too."""

    def __init__(self, vend: Lend | None = None) -> None:
        super().__init__()
        self.requests: list[str] = []
        self.fault: Fault | None = None
        self.tables: dict[str, Table] = {}
        self.tokens: dict[str, str] = {}
        self.clients: dict[str, tuple[str, str]] = {}
        self.readers: dict[str, set[str]] = {}
        self.lives_s, self.ahead_s, self.page = 3600.0, 0.0, 50
        self.has_delta_api = True
        self._vend = vend
        self.uri = self.enter_context(serving(self._serve))

    def count(self) -> list[str]:
        """The requests since the last call."""
        requests = [*self.requests]
        self.requests.clear()
        return requests

    def create(self, name: str, location: str, *readers: str, **info: Any) -> Table:
        """A table, in place of the one that has its name."""
        self.tables[name] = table = Table(location.rstrip("/"), info=info)
        self.readers[name] = {*readers}
        return table

    def _now_s(self) -> float:
        return time.time() + self.ahead_s

    def _answer(self, request: BaseHTTPRequestHandler) -> tuple[int, Any]:
        url = urllib.parse.urlsplit(request.path)
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        path = url.path.removeprefix(API)
        self.requests.append(f"{request.command} {path}")
        if self.fault is not None and (fault := self.fault(request.command, path)) is not None:
            return fault
        login = request.headers.get("Authorization", "")
        if (request.command, path) == ("POST", "/oidc/v1/token"):
            return self._token(login, urllib.parse.parse_qs(body.decode()))
        principal = self.tokens.get(login.removeprefix("Bearer "))
        if principal is None:
            return _error(401, "UNAUTHENTICATED", "Invalid access token.")
        body_values = json.loads(body) if body else {}
        match [request.command, *map(urllib.parse.unquote, path.strip("/").split("/"))]:
            case ["GET", "tables", name]:
                return self._answer_table(name, principal, self._info)
            case ["POST", "temporary-table-credentials"]:
                assert body_values["operation"] == "READ"
                return self._answer_table(self._name(body_values["table_id"]), principal, self._credentials)
            case ["GET", "delta", "preview", "commits"]:
                start, name = body_values["start_version"], self._name(body_values["table_id"])
                if name is not None and body_values["table_uri"] != self.tables[name].location:
                    return _error(400, "INVALID_ARGUMENT", "Table URI in the request does not match.")
                return self._answer_table(name, principal, lambda _, table: self._commits(table, start))
            case ["GET", "delta", "v1", "catalogs", catalog, "schemas", schema, "tables", own] if self.has_delta_api:
                status, answer = self._answer_table(f"{catalog}.{schema}.{own}", principal, self._managed)
                error = {"message": answer.get("message"), "type": "NoSuchTableException", "code": status}
                return status, answer if status == 200 else {"error": error}
        return 404, b"Status: 404\nDescription: Not Found\n"

    def _answer_table(
        self, name: str | None, principal: str, answer: Callable[[str, Table], dict[str, Any]]
    ) -> tuple[int, Any]:
        if name is None or name not in self.tables:
            return _error(404, "TABLE_NOT_FOUND", f"Table not found: {name}")
        if principal not in self.readers[name]:
            return _error(403, "PERMISSION_DENIED", "Access denied.")
        return 200, answer(name, self.tables[name])

    def _name(self, table_id: str) -> str | None:
        return next((name for name, table in self.tables.items() if table.id == table_id), None)

    def _info(self, name: str, table: Table) -> dict[str, Any]:
        catalog, schema, short_name = name.split(".")
        return {
            "name": short_name, "catalog_name": catalog, "schema_name": schema, "table_type": "EXTERNAL", "data_source_format": "DELTA",
            "columns": [], "storage_location": table.location, "table_id": table.id, "properties": {}, **table.info,
        }  # fmt: skip

    def _credentials(self, name: str, table: Table) -> dict[str, Any]:
        if self._vend is None:
            return {}
        vended = self._vend(table.location, self.lives_s)
        ends_ms = int((self._now_s() + self.lives_s) * 1000)
        return {"aws_temp_credentials": vended, "expiration_time": ends_ms, "url": table.location}

    def _commits(self, table: Table, start: int) -> dict[str, Any]:
        versions = [version for version in sorted(table.staged) if version >= start][: self.page]
        return {
            "commits": [table.staged[version] for version in reversed(versions)],
            "latest_table_version": table.latest,
        }

    def _managed(self, name: str, table: Table) -> dict[str, Any]:
        commits = [{key.replace("_", "-"): value for key, value in commit.items()} for commit in table.staged.values()]
        properties = self._info(name, table)["properties"]
        columns: dict[str, Any] = {"type": "struct", "fields": []}
        metadata = {
            "etag": "1", "table-type": "MANAGED", "table-uuid": table.id, "location": table.location, "created-time": 1,
            "updated-time": 1, "columns": columns, "partition-columns": [], "properties": properties,
        }  # fmt: skip
        return {"metadata": metadata, "commits": commits[::-1], "latest-table-version": table.latest}

    def _token(self, login: str, form: dict[str, list[str]]) -> tuple[int, Any]:
        client, _, secret = base64.b64decode(login.removeprefix("Basic ")).decode().partition(":")
        known_secret, principal = self.clients.get(client, (None, ""))
        if secret != known_secret or form["grant_type"] != ["client_credentials"] or form["scope"] != ["all-apis"]:
            return 401, {"error": "invalid_client"}
        token = f"token-of-{uuid.uuid4()}"
        self.tokens[token] = principal
        return 200, {"access_token": token, "token_type": "Bearer", "expires_in": 3600}

    def _serve(self, request: BaseHTTPRequestHandler) -> None:
        status, body = self._answer(request)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request.send_response_only(status)
        request.send_header("Date", formatdate(self._now_s(), usegmt=True))
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)


def _error(status: int, code: str, message: str) -> tuple[int, Any]:
    return status, {"error_code": code, "message": message}


def make_catalog_managed(directory: Path) -> None:
    """Make a Delta table on this disk one that its catalog manages, from its first commit on."""
    path = directory / f"_delta_log/{0:020}.json"
    actions = [json.loads(line) for line in path.read_text().splitlines()]
    for action in actions:
        if "protocol" in action:
            features = {"readerFeatures": ["catalogManaged"], "writerFeatures": ["catalogManaged", "inCommitTimestamp"]}
            action["protocol"] = {"minReaderVersion": 3, "minWriterVersion": 7, **features}
        if "metaData" in action:
            action["metaData"]["configuration"] = {"delta.enableInCommitTimestamps": "true"}
    infos = [action for action in actions if "commitInfo" in action]
    info = {**(infos[0]["commitInfo"] if infos else {}), "inCommitTimestamp": 1_000}
    remaining = [action for action in actions if "commitInfo" not in action]
    path.write_text("".join(json.dumps(action) + "\n" for action in [{"commitInfo": info}, *remaining]))


def stage(directory: Path, version: int, actions: list[dict[str, Any]]) -> dict[str, Any]:
    """Write a commit that is not published, nor ratified; as the catalog lists it when it is."""
    staged = directory / "_delta_log/_staged_commits"
    staged.mkdir(exist_ok=True)
    at_ms = (version + 1) * 1000
    name = f"{version:020}.{uuid.uuid4()}.json"
    info = {"commitInfo": {"inCommitTimestamp": at_ms, "txnId": str(uuid.uuid4()), "operation": "WRITE"}}
    text = "".join(json.dumps(action) + "\n" for action in [info, *actions])
    (staged / name).write_text(text)
    return {
        "version": version, "timestamp": at_ms, "file_name": name, "file_size": len(text), "file_modification_timestamp": at_ms,
    }  # fmt: skip


def publish(directory: Path, commit: dict[str, Any]) -> None:
    """Copy a ratified commit into the log."""
    staged = directory / "_delta_log/_staged_commits" / commit["file_name"]
    (directory / f"_delta_log/{commit['version']:020}.json").write_bytes(staged.read_bytes())
