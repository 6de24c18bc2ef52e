"""A REST catalog on this host's loopback: what a reader asks of one, over tables that are registered in memory."""

import contextlib
import json
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from tests.support.web_server import serving

Fault = Callable[[str, str], tuple[int, Any] | None]
"""What a request, `("GET", "/v1/config")`, gets instead of its answer: a status and a body. A redirect leads to `/elsewhere`."""
_REDIRECTS = (301, 302, 307, 308)


class RestCatalog(contextlib.ExitStack):
    """A context manager; `requests` are those that came, as `"GET /v1/config"`."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[str] = []
        self.fault: Fault | None = None
        self.config: dict[str, str] = {}
        """What each answer has as the table's configuration."""
        self.local: dict[str, Path] = {}
        """Where the tables lie on this disk whose locations begin with these URLs."""
        self._tables: dict[str, str] = {}
        self.uri = self.enter_context(serving(self._serve))

    def publisher(self, identifier: str) -> Callable[[str], None]:
        """What makes a location of metadata.json that of the table `namespace.name`."""
        return lambda location: self._tables.update({identifier: location})

    def answer(self, method: str, path: str) -> tuple[int, Any]:
        self.requests.append(f"{method} {path}")
        if self.fault is not None and (fault_answer := self.fault(method, path)) is not None:
            return fault_answer
        match [urllib.parse.unquote(part) for part in path.strip("/").split("/")]:
            case ["v1", "config"]:
                return 200, {"defaults": {}, "overrides": {}}
            case ["v1", "namespaces", namespace, "tables", name]:
                identifier = f"{namespace}.{name}".replace("\x1f", ".")
                location = self._tables.get(identifier)
                if location is None:
                    return 404, error_body(404, "NoSuchTableException", f"Table does not exist: {identifier}")
                meta = json.loads(self._path(location).read_bytes())
                return 200, {"metadata-location": location, "metadata": meta, "config": self.config}
        return 404, error_body(404, "NotFoundException", f"no route: {method} {path}")

    def _path(self, location: str) -> Path:
        place = next((url for url in self.local if location.startswith(f"{url}/")), None)
        return (
            Path(location.removeprefix("file://")) if place is None else self.local[place] / location[len(place) + 1 :]
        )

    def _serve(self, request: BaseHTTPRequestHandler) -> None:
        request.rfile.read(int(request.headers.get("Content-Length") or 0))
        status, body = self.answer(request.command, urllib.parse.urlsplit(request.path).path)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request.send_response(status)
        if status in _REDIRECTS:
            request.send_header("Location", f"{self.uri}/elsewhere")
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(b"" if request.command == "HEAD" else data)


def error_body(code: int, kind: str, message: str) -> dict[str, Any]:
    """As each error of such a catalog has it."""
    return {"error": {"message": message, "type": kind, "code": code}}
