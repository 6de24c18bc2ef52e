"""An HTTP API on loopback: customers by id, one in a request or many; it counts requests, and misbehaves as a test says."""

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.support.web_server import serving

Misbehave = Callable[[BaseHTTPRequestHandler], None]


class Api:
    """`customers`: the JSON of each, by id. `headers`: in each answer with status 200 or 404. `requests`: (method, path, body) of each, `asked`: its
    headers. `faults`: what the next requests get instead of an answer, in turn."""

    def __init__(self) -> None:
        self.customers: dict[str, Any] = {}
        self.headers: dict[str, str] = {}
        self.etags = False
        self.requests: list[tuple[str, str, Any]] = []
        self.asked: list[dict[str, str]] = []
        self.statuses: list[int] = []
        self.faults: list[Misbehave] = []
        self.url = ""

    def count(self) -> int:
        """The requests since the last call."""
        counted = len(self.requests)
        self.requests.clear()
        self.asked.clear()
        self.statuses.clear()
        return counted

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        self.requests.append((request.command, request.path, json.loads(body) if body else None))
        self.asked.append(dict(request.headers.items()))
        if self.faults:
            self.faults.pop(0)(request)
            return
        url = urlsplit(request.path)
        if body or url.query:
            named = json.loads(body)["ids"] if body else parse_qs(url.query)["ids"][0].split(",")
            rows = [self.customers[key] for key in map(str, named) if key in self.customers]
            self.reply(request, 200, {"data": {"items": rows}})
        elif (name := unquote(url.path.rpartition("/")[2])) in self.customers:
            self.reply(request, 200, self.customers[name])
        else:
            self.reply(request, 404, {"error": "no such customer"})

    def reply(self, request: BaseHTTPRequestHandler, status: int, value: Any, **headers: str) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        response = {
            **(self.headers if status in (200, 404) else {}),
            **{name.replace("_", "-"): headers[name] for name in headers},
        }
        if self.etags and status == 200:
            response["ETag"] = f'"{hash(content)}"'
            if request.headers.get("If-None-Match") == response["ETag"]:
                status, content = 304, b""
        self.statuses.append(status)
        request.send_response(status)
        for name, text in {"Content-Type": "application/json", "Content-Length": str(len(content)), **response}.items():
            request.send_header(name, text)
        request.end_headers()
        request.wfile.write(content)

    def misbehave(self, status: int, value: Any = b"", **headers: str) -> Misbehave:
        """A fault: this answer."""
        return lambda request: self.reply(request, status, value, **headers)


@pytest.fixture
def api() -> Iterator[Api]:
    server = Api()
    with serving(server.answer) as server.url:
        yield server


class StoppableApi:
    """A server of an `Api` that can be killed and started again at the same address. `tls`: makes its connections those of HTTPS."""

    def __init__(self, api: Api, tls: ssl.SSLContext | None = None) -> None:
        self._api = api
        self._tls = tls
        self.port = 0
        self.start()

    def start(self) -> None:
        answer = self._api.answer

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1

            def log_message(self, format: str, *args: object) -> None: ...

            def do_GET(self) -> None:
                self.server.connections.append(self.connection)  # type: ignore[attr-defined]
                answer(self)

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.connections = []  # type: ignore[attr-defined]
        self._server.daemon_threads = True
        if self._tls is not None:
            self._server.socket = self._tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns when no connection is left."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        for connection in self._server.connections:  # type: ignore[attr-defined]
            with contextlib.suppress(OSError):  # it has ended by itself
                connection.shutdown(socket.SHUT_RDWR)
