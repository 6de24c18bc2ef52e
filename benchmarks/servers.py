"""Remote stores on loopback with a delay per request: S3 for us, WebHDFS for Spark's own reader.

Spark's S3 client is not part of PySpark's package, its WebHDFS client is; both servers wait the same
time before each answer and send from the same files, so the stores differ in protocol only.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

_CHUNK = 1 << 20


class _WebHdfs(BaseHTTPRequestHandler):
    """The read side of WebHDFS over a local directory."""

    protocol_version = "HTTP/1.1"

    def __init__(self, root: Path, delay_s: float, bytes_per_s: float, *args: object) -> None:
        self._root, self._delay_s, self._bytes_per_s = root, delay_s, bytes_per_s
        super().__init__(*args)  # type: ignore[arg-type]

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        time.sleep(self._delay_s)
        url = urlsplit(self.path)
        query = {key.lower(): values[0] for key, values in parse_qs(url.query).items()}
        path = self._root / unquote(url.path).removeprefix("/webhdfs/v1").lstrip("/")
        if not path.exists():
            self._json(404, {"RemoteException": {"exception": "FileNotFoundException", "javaClassName": "java.io.FileNotFoundException", "message": str(path)}})  # fmt: skip
            return
        operation = query["op"].upper()
        if operation == "OPEN":
            self._send(path, int(query.get("offset", 0)), int(query.get("length", path.stat().st_size)))
        elif operation == "GETFILESTATUS":
            self._json(200, {"FileStatus": _status(path, "")})
        elif operation in ("LISTSTATUS", "LISTSTATUS_BATCH"):
            entries = (
                [_status(entry, entry.name) for entry in sorted(path.iterdir())]
                if path.is_dir()
                else [_status(path, "")]
            )
            statuses = {"FileStatuses": {"FileStatus": entries}}
            batch = {"DirectoryListing": {"partialListing": statuses, "remainingEntries": 0}}
            self._json(200, statuses if operation == "LISTSTATUS" else batch)
        elif operation in ("GETFILEBLOCKLOCATIONS", "GET_BLOCK_LOCATIONS"):
            block = {"offset": 0, "length": path.stat().st_size, "hosts": ["localhost"], "names": ["localhost:0"], "topologyPaths": [], "cachedHosts": [], "storageTypes": [], "corrupt": False}  # fmt: skip
            self._json(200, {"BlockLocations": {"BlockLocation": [block]}})
        else:
            self._json(400, {"RemoteException": {"exception": "UnsupportedOperationException", "javaClassName": "java.lang.UnsupportedOperationException", "message": operation}})  # fmt: skip

    def _json(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        # No Content-Type: Hadoop's client would parse it with a library that PySpark does not ship.
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send(self, path: Path, offset: int, length: int) -> None:
        length = max(min(length, path.stat().st_size - offset), 0)
        self.send_response(200)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                while length:
                    part = file.read(min(length, _CHUNK))
                    if self._bytes_per_s:
                        time.sleep(len(part) / self._bytes_per_s)
                    self.wfile.write(part)
                    length -= len(part)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the reader has closed the connection early


def _status(path: Path, suffix: str) -> dict[str, object]:
    status = path.stat()
    return {
        "accessTime": 0,
        "blockSize": 128 << 20,
        "group": "g",
        "length": 0 if path.is_dir() else status.st_size,
        "modificationTime": int(status.st_mtime * 1000),
        "owner": "o",
        "pathSuffix": suffix,
        "permission": "755",
        "replication": 1,
        "type": "DIRECTORY" if path.is_dir() else "FILE",
    }


@contextmanager
def webhdfs(root: Path, delay_s: float, bytes_per_s: float = 0) -> Iterator[str]:
    """A WebHDFS server over `root`; yields the URL of its root."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_WebHdfs, root, delay_s, bytes_per_s))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"webhdfs://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()


@contextmanager
def s3(root: Path, bucket: str, prefix: str, delay_s: float) -> Iterator[str]:
    """An S3 server with the files of `root` under `bucket/prefix`; yields its endpoint."""
    application = DomainDispatcherApplication(create_backend_app)
    delayed = threading.Event()

    def serve(environ: dict[str, object], start_response: object) -> object:
        if delayed.is_set():
            time.sleep(delay_s)
        return application(environ, start_response)

    server = make_server("127.0.0.1", 0, serve, threaded=True)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    client = boto3.client("s3", endpoint_url=endpoint)
    client.create_bucket(Bucket=bucket)
    for file in sorted(path for path in root.rglob("*") if path.is_file()):
        client.put_object(Bucket=bucket, Key=f"{prefix}/{file.relative_to(root)}", Body=file.read_bytes())
    delayed.set()
    yield endpoint
    server.shutdown()
    thread.join()
