"""Servers on loopback HTTP; and one of files that fails, cuts its answers short or ignores ranges when a test says so."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


@contextlib.contextmanager
def serving(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """The URL of a server that answers each request so, until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # an answer is one packet: several would wait for each other's acknowledgement, 40 ms each

        def log_message(self, format: str, *args: object) -> None: ...

        def do_GET(self) -> None:
            answer(self)

        do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815 -- the names of http.server

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class WebServer:
    """Files on loopback HTTP. `before(method, path)` runs ahead of each request and may return a status."""

    def __init__(self) -> None:
        self.url = ""
        self.files: dict[str, tuple[bytes, dict[str, str]]] = {}
        self.before: Callable[[str, str], int | None] = lambda method, path: None
        self.ranges = True
        self.cut = 0  # bytes missing at the end of each body

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        status = self.before(request.command, request.path)
        if status == 0:  # break the connection without an answer
            request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            request.connection.close()
            request.close_connection = True
            return
        if status is None and request.path not in self.files:
            status = 404
        data, headers = self.files.get(request.path, (b"", {}))
        size, byte_range = len(data), request.headers.get("Range")
        if status is None and byte_range and self.ranges:
            first, last = (int(part) for part in byte_range.removeprefix("bytes=").split("-"))
            data, status = data[first : last + 1], 206 if first < size else 416
        request.send_response(status or 200)
        headers = {"Content-Length": str(len(data) if status in (None, 206) else 0), **headers}
        for name, value in headers.items():
            if value:
                request.send_header(name, value)
        request.end_headers()
        if request.command == "GET" and status in (None, 206):
            request.wfile.write(data[: len(data) - self.cut])
            request.close_connection = self.cut > 0

    def put(self, path: str, data: bytes, etag: str = "", modified: str = "") -> str:
        """The file's URL."""
        self.files[path] = (data, {"ETag": etag, "Last-Modified": modified})
        return self.url + path


@pytest.fixture
def web() -> Iterator[WebServer]:
    server = WebServer()
    with serving(server.answer) as server.url:
        yield server
