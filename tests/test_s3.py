"""S3 as the server sees it: how many requests, for which version, and what its failures become."""

from __future__ import annotations

import http.server
import os
import socket
import socketserver
import subprocess
import sys
import threading
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup import LookupTable
from pyspark_lookup.base.errors import (
    SourceChangedError,
    UfsNotFoundError,
    UfsPermissionError,
    UfsTimeoutError,
    UfsUnavailableError,
)
from pyspark_lookup.io.stores import FileVersion, Listing
from tests.fakes import Host, make_host

if TYPE_CHECKING:
    from tests.s3server import S3Server

OLD, NEW = b"old" * 100, b"new" * 100


@pytest.fixture
def bucket(s3: S3Server) -> str:
    """A bucket of this test's own."""
    name = f"b-{uuid.uuid4().hex[:12]}"
    s3.client.create_bucket(Bucket=name)
    s3.log.clear()
    return name


PARTIAL = b'HTTP/1.1 206 Partial Content\r\nETag: "x"\r\nContent-Range: bytes 0-299/300\r\nContent-Length: 300\r\n\r\n'


class RawServer:
    """An endpoint that answers every request with given bytes and hangs up (with none: waits), and keeps what it heard."""

    def __init__(self, answer: bytes) -> None:
        received: list[str] = []
        self.received = received
        self._done = done = threading.Event()

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                received.append(self.request.recv(65536).decode())
                self.request.sendall(answer)
                if not answer:
                    done.wait(60)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._done.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def raw_server() -> Iterator[Callable[[bytes], RawServer]]:
    """Makes raw servers, and closes them."""
    servers: list[RawServer] = []

    def make(answer: bytes) -> RawServer:
        servers.append(RawServer(answer))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


class KeyServer:
    """An endpoint that answers LIST for a bucket of given keys, a thousand to a page as S3 does, and keeps the prefixes.

    An object that is called `mark` is empty."""

    def __init__(self, keys: list[str]) -> None:
        self.asked: list[str] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None: ...

            def do_GET(self) -> None:
                query = dict(urllib.parse.parse_qsl(self.path.partition("?")[2]))
                outer.asked.append(query["prefix"])
                after = query.get("continuation-token", "")
                found = [key for key in sorted(keys) if key.startswith(query["prefix"]) and key > after]
                body = "".join(
                    f"<Contents><Key>{key}</Key><Size>{0 if key.endswith('mark') else 1}</Size><ETag>&quot;{key}&quot;</ETag></Contents>"
                    for key in found[:1000]
                )
                if len(found) > 1000:
                    body += f"<NextContinuationToken>{found[999]}</NextContinuationToken>"
                truncated = str(len(found) > 1000).lower()
                answer = f"<ListBucketResult><IsTruncated>{truncated}</IsTruncated>{body}</ListBucketResult>".encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.ufs = make_host(
            "s3://b/t", None, storage={"endpoint_url": f"http://127.0.0.1:{self._server.server_port}"}
        ).ufs

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def key_server() -> Iterator[Callable[[list[str]], KeyServer]]:
    """Makes key servers, and closes them."""
    servers: list[KeyServer] = []

    def make(keys: list[str]) -> KeyServer:
        servers.append(KeyServer(keys))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def host_of(s3: S3Server, path: str, cache_dir: Path | None = None, **options: Any) -> Host:
    return make_host(path, cache_dir, storage={"endpoint_url": s3.endpoint}, **options)


def put(s3: S3Server, bucket: str, *keys: str, data: bytes = OLD) -> None:
    """Write objects, and forget the requests that took."""
    for key in keys:
        s3.client.put_object(Bucket=bucket, Key=key, Body=data)
    s3.log.clear()


def requests(s3: S3Server) -> list[str]:
    """The kinds of requests since the last write."""
    return [request.kind for request in s3.log]


def whole(file: FileVersion) -> list[tuple[FileVersion, list[tuple[int, int]]]]:
    return [(file, [(0, file.size)])]


def read_cached(host: Host, file: FileVersion) -> bytes:
    """The file through the block cache."""
    location = host.blocks.get_blocks_and_locations(file.url, file)
    return bytes(host.blocks.read([(location, [(0, file.size)])])[0][0])


# --- directories -------------------------------------------------------------------------------------


def test_an_empty_object_of_a_directorys_name(s3: S3Server, bucket: str) -> None:
    """An empty object `mark` beside `mark/…`, as many tools put it, is no file: neither alone nor in its parent's listing."""
    put(s3, bucket, "t/mark", data=b"")
    ufs = host_of(s3, f"s3://{bucket}/t/mark").ufs
    alone = ufs.get_status(f"s3://{bucket}/t/mark")
    assert isinstance(alone, FileVersion)
    put(s3, bucket, "t/mark-1", "t/mark.x", "t/mark/a", "t/mark/d/b")
    put(s3, bucket, "t/mark/d", data=b"")
    for found in (ufs.get_status(f"s3://{bucket}/t/mark"), ufs.list_status(f"s3://{bucket}/t/mark")):
        assert isinstance(found, Listing)
        assert [file.url.removeprefix(f"s3://{bucket}/") for file in found.files] == ["t/mark/a", "t/mark/d/b"]
    names = [file.url.rpartition(f"{bucket}/")[2] for file in ufs.list_status(f"s3://{bucket}/t").files]
    assert names == ["t/mark-1", "t/mark.x", "t/mark/a", "t/mark/d/b"]


def test_an_empty_object_among_a_crowd(key_server: Callable[[list[str]], KeyServer]) -> None:
    """The directory is found also where more than a page of names lie between; without one the empty object is the file."""
    crowd = ["t/mark", *(f"t/mark-{number:04d}" for number in range(1001))]
    assert isinstance(key_server(crowd).ufs.get_status("s3://b/t/mark"), FileVersion)
    found = key_server([*crowd, "t/mark/a"]).ufs.get_status("s3://b/t/mark")
    assert isinstance(found, Listing)
    assert [file.url for file in found.files] == ["s3://b/t/mark/a"]


def test_a_slash_names_the_directory(s3: S3Server, bucket: str, cache_dir: Path) -> None:
    """Where an object and a directory have one name, the path with a slash is the directory, and without the object."""
    for key, value in (("t/both", 1), ("t/both/a", 2)):
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({"n": [value]}), sink)
        put(s3, bucket, key, data=sink.getvalue().to_pybytes())
    options = {"lookup.storage.endpoint_url": s3.endpoint, "lookup.cache.dir": str(cache_dir)}
    for _ in range(2):
        for path, value in (("t/both", 1), ("t/both/", 2)):
            for more in ({}, {"lookup.metadata.source": "CACHE", "lookup.metadata.sync-interval": "1 h"}):
                table = LookupTable(f"s3://{bucket}/{path}", {**options, "lookup.format": "parquet", **more})
                assert table.scan().to_pylist() == [{"n": value}]


# --- identity ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("versioned", [False, True], ids=["plain", "versioned"])
@pytest.mark.parametrize("key", ["dim/a.parquet", "dim/größe 1/a+b&c=d%20.csv"])
def test_head_and_list_give_one_token(s3: S3Server, bucket: str, versioned: bool, key: str) -> None:
    """An object's version is equal by HEAD, by LIST and by a question of unknown kind, also in a versioned bucket."""
    if versioned:
        s3.client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    put(s3, bucket, key, data=NEW)
    put(s3, bucket, key)
    path = f"s3://{bucket}/{key}"
    ufs = host_of(s3, path).ufs
    by_head = ufs.get_meta(path)
    assert requests(s3) == ["head"]
    (by_list,) = ufs.list_status(path.rpartition("/")[0]).files
    assert by_head == by_list == ufs.get_status(path)
    assert requests(s3) == ["head", "list", "list"]
    assert (by_head.url, by_head.size, by_head.cacheable) == (path, len(OLD), True)
    assert by_head.modified_at_s is not None
    assert ufs.read_many(whole(by_list)) == [[OLD]]


def test_a_multipart_object_has_one_token(s3: S3Server, bucket: str) -> None:
    """An object uploaded in parts (its ETag is no hash of its bytes) is equal by HEAD and LIST, and can be pinned."""
    upload = s3.client.create_multipart_upload(Bucket=bucket, Key="d/big")["UploadId"]
    part = {"Bucket": bucket, "Key": "d/big", "UploadId": upload, "PartNumber": 1}
    etag = s3.client.upload_part(**part, Body=OLD)["ETag"]
    s3.client.complete_multipart_upload(
        Bucket=bucket, Key="d/big", UploadId=upload, MultipartUpload={"Parts": [{"ETag": etag, "PartNumber": 1}]}
    )
    ufs = host_of(s3, f"s3://{bucket}/d").ufs
    (file,) = ufs.list_status(f"s3://{bucket}/d").files
    assert file.identity.endswith("-1")
    assert file == ufs.get_meta(f"s3://{bucket}/d/big")
    assert ufs.read_many(whole(file)) == [[OLD]]


def test_a_rollback_to_an_older_version_is_seen(s3: S3Server, bucket: str, cache_dir: Path) -> None:
    """After the newest version of an object is deleted, its predecessor's rows are served again, and no byte of the other."""
    s3.client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    path = f"s3://{bucket}/a"
    put(s3, bucket, "a")
    host = host_of(s3, path, cache_dir)
    first = host.ufs.get_meta(path)
    assert read_cached(host, first) == OLD
    newest = s3.client.put_object(Bucket=bucket, Key="a", Body=NEW)["VersionId"]
    second = host.ufs.get_meta(path)
    assert read_cached(host, second) == NEW
    s3.client.delete_object(Bucket=bucket, Key="a", VersionId=newest)
    third = host.ufs.get_meta(path)
    assert (third == first, third == second) == (True, False)
    s3.log.clear()
    assert read_cached(host, third) == OLD
    assert requests(s3) == []
    with pytest.raises(SourceChangedError):
        host.ufs.read_many(whole(second))


def test_equal_paths_in_two_buckets_or_servers_are_two_entries(s3: S3Server, bucket: str, cache_dir: Path) -> None:
    """One key in two buckets, and one URL at two endpoints, never answer for each other; `s3a://` is the same entry."""
    other = f"{bucket}-2"
    s3.client.create_bucket(Bucket=other)
    put(s3, bucket, "dim/a")
    put(s3, other, "dim/a", data=NEW)
    host = host_of(s3, f"s3://{bucket}/dim", cache_dir)
    answers = [read_cached(host, host.ufs.get_meta(f"s3://{name}/dim/a")) for name in (bucket, other, bucket)]
    assert answers == [OLD, NEW, OLD]
    assert requests(s3) == ["head", "get", "head", "get", "head"]
    assert host.ufs.url_of(f"s3a://{bucket}/dim/a") == f"s3://{bucket}/dim/a"
    elsewhere = make_host(
        f"s3://{bucket}/dim", cache_dir, storage={"endpoint_url": s3.endpoint.replace("127.0.0.1", "localhost")}
    )
    read_cached(elsewhere, elsewhere.ufs.get_meta(f"s3://{bucket}/dim/a"))
    assert requests(s3)[-2:] == ["head", "get"]


# --- pinned reads ------------------------------------------------------------------------------------


def test_every_read_is_pinned_by_if_match(raw_server: Callable[[bytes], RawServer]) -> None:
    """Each range is asked for with the version's ETag; no request is made to open the file or to check it."""
    server = raw_server(PARTIAL + OLD)
    host = make_host("s3://b/d/a", None, storage={"endpoint_url": server.endpoint})
    assert host.ufs.read_ranges(FileVersion("s3://b/d/a", 1000, "etag:x"), [(0, 300), (700, 300)]) == [OLD, OLD]
    asked = sorted(server.received)
    assert [text.split(" HTTP")[0] for text in asked] == ["GET /b/d/a"] * 2
    assert all('\r\nIf-Match: "x"\r\n' in text for text in asked)
    assert {text.partition("Range: ")[2].partition("\r")[0] for text in asked} == {"bytes=0-299", "bytes=700-999"}


def test_the_bytes_asked_for_are_the_bytes_sent(s3: S3Server, bucket: str) -> None:
    """Ranges are single requests of exactly their length; nothing is read ahead."""
    put(s3, bucket, "a")
    ufs = host_of(s3, f"s3://{bucket}/a").ufs
    file = ufs.get_meta(f"s3://{bucket}/a")
    assert ufs.read_ranges(file, [(0, 10), (290, 10)]) == [OLD[:10], OLD[290:]]
    assert [(request.kind, request.sent) for request in s3.log] == [("head", 0), ("get", 10), ("get", 10)]


# --- how many requests -------------------------------------------------------------------------------


def test_one_list_for_a_tree_of_directories(s3: S3Server, bucket: str) -> None:
    """A directory tree is one request, hidden directories and all; only what may be data is named."""
    put(s3, bucket, "t/a", "t/d=1/b", "t/d=1/deep/c", "t/_temporary/0/x", "t/.git/y", "t/_SUCCESS", "t/_d=2/z", "t/_spark_metadata/0", "t/marker/", "t-2/a")  # fmt: skip
    listing = host_of(s3, f"s3a://{bucket}/t").ufs.list_status(f"s3a://{bucket}/t")
    assert requests(s3) == ["list"]
    names = [file.url.removeprefix(f"s3://{bucket}/t/") for file in listing.files]
    assert names == ["_SUCCESS", "_d=2/z", "_spark_metadata/0", "a", "d=1/b", "d=1/deep/c"]
    assert listing.url == f"s3://{bucket}/t"
    assert listing.directories == {
        "d=1", "d=1/deep", "_temporary", "_temporary/0", ".git", "_d=2", "_spark_metadata", "marker",
    }  # fmt: skip


def test_one_list_per_thousand_objects(key_server: Callable[[list[str]], KeyServer]) -> None:
    """A listing is one request per 1000 keys, complete and in order; what a name is takes as many."""
    keys = [f"t/{n:04}" for n in range(2001)]
    server = key_server(keys)
    listing = server.ufs.list_status("s3://b/t")
    assert [file.url for file in listing.files] == [f"s3://b/{key}" for key in keys]
    assert server.asked == ["t/"] * 3
    assert server.ufs.get_status("s3://b/t") == listing
    assert server.asked[3:] == ["t"] * 3


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("dim", ["dim/a", "dim/b=1/c"]),
        ("dim/", ["dim/a", "dim/b=1/c"]),
        ("dim.parquet", "dim.parquet"),
        ("dim-old", ["dim-old/a"]),
        ("dim0", "dim0"),
        ("only", ["only/x"]),
        ("di", None),
        ("dim/a/b", None),
        ("nothing", None),
    ],
)
def test_what_a_name_is_costs_one_request(s3: S3Server, bucket: str, path: str, found: list[str] | str | None) -> None:
    """A file, a directory among siblings that share its name's beginning, or nothing: told by exactly one LIST."""
    put(s3, bucket, "dim-old/a", "dim.parquet", "dim/a", "dim/b=1/c", "dim0", "dim0x/y", "dimension/z", "only/x")
    ufs = host_of(s3, f"s3://{bucket}/{path}").ufs
    if found is None:
        with pytest.raises(UfsNotFoundError, match=f"{path} does not exist"):
            ufs.get_status(f"s3://{bucket}/{path}")
    else:
        status = ufs.get_status(f"s3://{bucket}/{path}")
        if isinstance(status, Listing):
            assert [file.url.removeprefix(f"s3://{bucket}/") for file in status.files] == found
            assert status == ufs.list_status(f"s3://{bucket}/{path}")
        else:
            assert status.url == f"s3://{bucket}/{found}"
            assert status == ufs.get_meta(f"s3://{bucket}/{path}")
        s3.log.pop()
    assert requests(s3) == ["list"]


@pytest.mark.parametrize("crowd", ["dim-{:04}", "dim.{:04}"])
def test_a_crowd_that_sorts_before_costs_one_request_more(key_server: Callable[[list[str]], KeyServer], crowd: str) -> None:  # fmt: skip
    """However many keys sort between a name and what lies below it, a directory costs two requests, a file one."""
    server = key_server([*(crowd.format(n) for n in range(5000)), "dim/a"])
    status = server.ufs.get_status("s3://b/dim")
    assert isinstance(status, Listing)
    assert [file.url for file in status.files] == ["s3://b/dim/a"]
    assert server.asked == ["dim", "dim/"]
    assert isinstance(server.ufs.get_status(f"s3://b/{crowd.format(4000)}"), FileVersion)
    assert len(server.asked) == 3


def test_a_crowd_that_sorts_after_costs_nothing(key_server: Callable[[list[str]], KeyServer]) -> None:
    """However many keys sort after a directory, they are not asked for."""
    server = key_server(["dim/a", *(f"dim{n:04}" for n in range(5000))])
    status = server.ufs.get_status("s3://b/dim")
    assert isinstance(status, Listing)
    assert [file.url for file in status.files] == ["s3://b/dim/a"]
    assert server.asked == ["dim"]


def test_a_bucket_is_a_directory(s3: S3Server, bucket: str) -> None:
    """A bucket's root is listed like any directory, and is no file."""
    put(s3, bucket, "a", "d/b")
    ufs = host_of(s3, f"s3://{bucket}").ufs
    listing = ufs.get_status(f"s3://{bucket}")
    assert isinstance(listing, Listing)
    assert [file.url for file in listing.files] == [f"s3://{bucket}/a", f"s3://{bucket}/d/b"]
    assert requests(s3) == ["list"]
    with pytest.raises(UfsNotFoundError, match="is a bucket"):
        ufs.get_meta(f"s3://{bucket}")
    assert requests(s3) == ["list"]


# --- failures ----------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[Host, str], object]] = {
    "head": lambda host, path: host.ufs.get_meta(path),
    "list": lambda host, path: host.ufs.list_status(path.rpartition("/")[0]),
    "status": lambda host, path: host.ufs.get_status(path),
    "get": lambda host, path: host.ufs.read_ranges(FileVersion(path, 300, ""), [(0, 300)]),
}


@pytest.mark.parametrize("status", [503, 500, 429])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_busy_server_is_asked_again(s3: S3Server, bucket: str, call: Callable[[Host, str], object], status: int) -> None:  # fmt: skip
    """503 (slow down), 500 and 429 are tried again by us alone: each request at the server is one counted attempt."""
    path = f"s3://{bucket}/d/a"
    put(s3, bucket, "d/a")
    host = host_of(s3, path, max_retries=2)
    left = [2]

    def fail(method: str, path: str) -> int | None:
        left[0] -= 1
        return status if left[0] >= 0 else None

    s3.before = fail
    call(host, path)
    counts = host.metrics.snapshot()
    assert len(s3.log) == 3 == counts["ufsHeadCount"] + counts["ufsListCount"] + counts["ufsGetCount"]
    assert counts["ufsRetryCount"] == 2 == len(host.clock.slept)
    s3.log.clear()
    s3.before = lambda method, path: status
    with pytest.raises(UfsUnavailableError):
        call(host, path)
    assert len(s3.log) == 3


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_refusal_is_raised_at_once(s3: S3Server, bucket: str, call: Callable[[Host, str], object], status: int) -> None:  # fmt: skip
    """A refused request is one request, and its error says to check the credentials."""
    put(s3, bucket, "d/a")
    s3.before = lambda method, path: status
    with pytest.raises(UfsPermissionError, match="check the credentials"):
        call(host_of(s3, f"s3://{bucket}/d/a", max_retries=3), f"s3://{bucket}/d/a")
    assert len(s3.log) == 1


def test_no_such_bucket(s3: S3Server) -> None:
    """A bucket that does not exist is not found, by every call."""
    path = f"s3://nobody-{uuid.uuid4().hex}/d/a"
    host = host_of(s3, path)
    for kind, call in CALLS.items():
        with pytest.raises(SourceChangedError if kind == "get" else UfsNotFoundError):
            call(host, path)


def test_nobody_listens() -> None:
    """An endpoint that refuses connections is unavailable, after as many attempts as were asked for."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    host = make_host("s3://b/d/a", None, max_retries=2, storage={"endpoint_url": f"http://127.0.0.1:{port}"})
    for call in CALLS.values():
        with pytest.raises(UfsUnavailableError):
            call(host, "s3://b/d/a")
    counts = host.metrics.snapshot()
    assert (counts["ufsHeadCount"], counts["ufsListCount"], counts["ufsGetCount"]) == (3, 6, 3)


def test_a_body_cut_short(raw_server: Callable[[bytes], RawServer]) -> None:
    """A connection that ends before the body does is transient: tried again, never handed out."""
    server = raw_server(PARTIAL + OLD[:120])
    host = make_host("s3://b/a", None, max_retries=1, storage={"endpoint_url": server.endpoint})
    with pytest.raises(UfsUnavailableError):
        host.ufs.read_ranges(FileVersion("s3://b/a", 300, "etag:x"), [(0, 300)])
    assert host.metrics.snapshot()["ufsGetCount"] == 2 == len(server.received)


def test_a_server_that_says_nothing(raw_server: Callable[[bytes], RawServer]) -> None:
    """A server that accepts and never answers ends in a timeout error, after the timeout and attempts the options set."""
    server = raw_server(b"")
    storage = {"endpoint_url": server.endpoint, "config_kwargs": {"read_timeout": 0.2}}
    host = make_host("s3://b/a", None, storage=storage, max_retries=1)
    with pytest.raises(UfsTimeoutError):
        host.ufs.get_meta("s3://b/a")
    assert host.metrics.snapshot()["ufsHeadCount"] == 2 == len(server.received)


def test_slow_down_is_tried_again_by_us_alone(raw_server: Callable[[bytes], RawServer]) -> None:
    """S3's SlowDown, which the client libraries like to try again by themselves, is one request per counted attempt."""
    body = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
    answer = b"HTTP/1.1 503 Slow Down\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    server = raw_server(answer)
    host = make_host("s3://b/a", None, storage={"endpoint_url": server.endpoint}, max_retries=2)
    with pytest.raises(UfsUnavailableError, match="reduce your request rate"):
        host.ufs.list_status("s3://b/a")
    assert host.metrics.snapshot()["ufsListCount"] == 3 == len(server.received)


def test_no_credentials(s3: S3Server) -> None:
    """Without any credentials the error says where they come from."""
    script = (
        "from tests.fakes import make_host\n"
        "import sys\n"
        "try:\n"
        "    make_host('s3://b/a', None, storage={'endpoint_url': sys.argv[1]}).ufs.get_meta('s3://b/a')\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environ |= {"AWS_EC2_METADATA_DISABLED": "true", "HOME": "/nonexistent", "AWS_DEFAULT_REGION": "us-east-1"}
    root = Path(__file__).parent.parent
    answer = subprocess.run(
        [sys.executable, "-c", script, s3.endpoint], cwd=root, env=environ, capture_output=True, text=True, check=True
    ).stdout
    assert answer.startswith("UfsPermissionError")
    assert "check the credentials in the environment or the conf file" in answer
    assert s3.log == []
