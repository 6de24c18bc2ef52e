"""An S3 server on loopback (moto) that logs every request and lets a test act between two of them."""

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import boto3
import botocore.session
import moto.backends
from moto.s3.responses import S3Response
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

_acting = threading.RLock()
# Tests open S3 for many processes and make many requests. botocore's models of all services are read once for all processes,
# the names of moto's modules once for all requests.
botocore.session.create_loader = functools.cache(botocore.session.create_loader)
_moto_modules = [*moto.backends.list_of_moto_modules()]
moto.backends.list_of_moto_modules = lambda: _moto_modules


def application() -> DomainDispatcherApplication:
    """moto, which does one request after the other once it has read them.

    It takes steps that others see between: two threads that put by If-None-Match can both find no object and are both told
    that theirs is the first, and a listing fails where an object is removed. S3 does each request at once, and a table's log
    stands on that.
    """
    for step in ("_key_response", "_bucket_response"):
        setattr(S3Response, step, _one_by_one(getattr(S3Response, step)))
    return DomainDispatcherApplication(create_backend_app)


def _one_by_one(act: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(act, "__wrapped__"):
        return act

    @functools.wraps(act)
    def acting(*arguments: Any) -> Any:
        with _acting:
            return act(*arguments)

    return acting


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


Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class S3Server:
    """moto behind a log. `before` is called with (method, path) ahead of each request and may answer it with
    a status, `after` with each request once it is served, ahead of its answer; both may write to the store.
    `between` stands before moto: it is given the request and moto, and gives the answer."""

    def __init__(self) -> None:
        self._app = application()
        self.log: list[Request] = []
        self.before: Callable[[str, str], int | None] | None = None
        self.after: Callable[[Request], None] | None = None
        self.between: Callable[[dict[str, Any], Callable[..., Any], Application], Iterable[bytes]] | None = None
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.client: Any = boto3.client("s3", endpoint_url=self.endpoint)

    def _serve(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if self.before is not None:
            status = self.before(method, path)
            if status is not None:  # fail this request with that HTTP status
                start_response(f"{status} injected", [("Content-Length", "0")])
                self.log.append(Request(method, path, environ["QUERY_STRING"], 0))
                return [b""]
        if self.between is not None:
            body = b"".join(self.between(environ, start_response, self._app))
        else:
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


class Mirror:
    """A directory on this disk, which lies in a bucket as well if there is a server: its URL is there, then."""

    def __init__(self, local: Path, bucket: str, server: S3Server | None) -> None:
        self.local, self.server = local, server
        self.url, self.storage = local.as_uri(), dict[str, str]()
        self._sent: dict[str, int] = {}
        if server is not None:
            self._bucket = bucket.replace("_", "-").lower()[:60].strip("-")
            server.client.create_bucket(Bucket=self._bucket)
            self.url, self.storage = f"s3://{self._bucket}/table", {"storage.endpoint_url": server.endpoint}

    def remove(self, suffix: str) -> None:
        """Remove the objects whose names end so from the bucket."""
        assert self.server is not None
        for item in self.server.client.list_objects_v2(Bucket=self._bucket)["Contents"]:
            if item["Key"].endswith(suffix):
                self.server.client.delete_object(Bucket=self._bucket, Key=item["Key"])

    def send(self) -> None:
        """Put what is new or has changed where it belongs."""
        for path in sorted(self.local.rglob("*")) if self.server is not None else ():
            key = f"table/{path.relative_to(self.local)}"
            if path.is_file() and self._sent.get(key) != (changed_ns := path.stat().st_mtime_ns):
                self.server.client.put_object(Bucket=self._bucket, Key=key, Body=path.read_bytes())
                self._sent[key] = changed_ns
