"""An S3 server on loopback (moto) that logs every request and lets a test act between two of them."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import boto3
from moto.s3.responses import S3Response
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment  # from Python 3.11 on


_puts = threading.Lock()


def application() -> DomainDispatcherApplication:
    """moto, with an If-None-Match that holds.

    moto looks whether there is an object and puts one in two steps, so two threads can both be told that theirs is the
    first. S3 does it in one, and a table's log stands on that.
    """
    S3Response.put_object = _one_by_one(S3Response.put_object)
    return DomainDispatcherApplication(create_backend_app)


def _one_by_one(put: Callable[[S3Response], Any]) -> Callable[[S3Response], Any]:
    if hasattr(put, "__wrapped__"):
        return put

    @functools.wraps(put)
    def put_object(self: S3Response) -> Any:
        with _puts:
            return put(self)

    return put_object


@dataclasses.dataclass(frozen=True)
class Request:
    """One request as the server saw it: `sent` are the body bytes it answered with."""

    method: str
    path: str
    query: str
    sent: int

    @property
    def kind(self) -> str:
        """head, list, get, or the method's name."""
        if self.method == "GET":
            return "list" if "list-type" in self.query else "get"
        return self.method.lower()


class S3Server:
    """moto behind a log. `before` is called with (method, path) ahead of each request and may answer it with
    a status, `after` with each request once it is served, ahead of its answer; both may write to the store."""

    def __init__(self) -> None:
        self._app = application()
        self.log: list[Request] = []
        self.before: Callable[[str, str], int | None] | None = None
        self.after: Callable[[Request], None] | None = None
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.client: Any = boto3.client("s3", endpoint_url=self.endpoint)

    def _serve(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if self.before is not None:
            status = self.before(method, path)
            if status is not None:  # fail this request with that HTTP status
                start_response(f"{status} injected", [("Content-Length", "0")])
                self.log.append(Request(method, path, environ["QUERY_STRING"], 0))
                return [b""]
        body = b"".join(self._app(environ, start_response))
        sent = 0 if method == "HEAD" else len(body)
        request = Request(method, path, environ["QUERY_STRING"], sent)
        self.log.append(request)
        if self.after is not None:
            self.after(request)
        return [body]

    def count(self) -> dict[str, int]:
        """Requests so far by kind, and "bytes" of object data sent."""
        counts = {kind: sum(r.kind == kind for r in self.log) for kind in ("head", "list", "get")}
        return {**counts, "bytes": sum(r.sent for r in self.log if r.kind == "get")}

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
