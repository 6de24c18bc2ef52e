"""A REST catalog on this host's loopback: what a reader asks of one, over tables that are registered in memory."""

from __future__ import annotations

import json
import threading
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

Fault = Callable[[str, str], tuple[int, Any] | None]
"""What a request, `("GET", "/v1/config")`, gets instead of its answer: a status and a body."""


class RestCatalog:
    """A context manager; `requests` are those that came, as `"GET /v1/config"`."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.fault: Fault | None = None
        self.config: dict[str, str] = {}
        """What each answer has as the table's configuration."""
        self._tables: dict[str, str] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.uri = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> RestCatalog:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def publisher(self, identifier: str) -> Callable[[str], None]:
        """What makes a location of metadata.json on this disk that of the table `namespace.name`."""
        return lambda location: self._tables.update({identifier: location})

    def answer(self, method: str, path: str) -> tuple[int, Any]:
        self.requests.append(f"{method} {path}")
        if self.fault is not None and (found := self.fault(method, path)) is not None:
            return found
        match [urllib.parse.unquote(part) for part in path.strip("/").split("/")]:
            case ["v1", "config"]:
                return 200, {"defaults": {}, "overrides": {}}
            case ["v1", "namespaces", namespace, "tables", name]:
                identifier = f"{namespace}.{name}".replace("\x1f", ".")
                location = self._tables.get(identifier)
                if location is None:
                    return 404, _error(404, "NoSuchTableException", f"Table does not exist: {identifier}")
                meta = json.loads(Path(location.removeprefix("file://")).read_bytes())
                return 200, {"metadata-location": location, "metadata": meta, "config": self.config}
        return 404, _error(404, "NotFoundException", f"no route: {method} {path}")


def _error(code: int, kind: str, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "code": code}}


def _handler(catalog: RestCatalog) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # an answer is one packet: several would wait for each other's acknowledgement, 40 ms each

        def log_message(self, *_: Any) -> None:
            """Nothing."""

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, body = catalog.answer(self.command, urllib.parse.urlsplit(self.path).path)
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else data)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_POST(self) -> None:
            self.do_GET()

    return Handler
