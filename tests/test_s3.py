"""S3 as the server sees it: how many requests, for which version, and what its failures become."""

from __future__ import annotations

import contextlib
import http.server
import os
import threading
import urllib.parse
import uuid
from collections.abc import Callable, Iterable, Iterator
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
from pyspark_lookup.base.metrics import CacheMetricGroup
from pyspark_lookup.io.stores import FileVersion, Listing
from pyspark_lookup.io.ufs import Ufs
from tests.fakes import Host, make_host
from tests.test_stores import serving, unserved

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


@contextlib.contextmanager
def raw(
    answer: bytes | None, **options: Any
) -> Iterator[tuple[Ufs, CacheMetricGroup, list[http.server.BaseHTTPRequestHandler]]]:
    """An endpoint that answers every request with given bytes and hangs up (None: waits); what it was asked."""
    done, asked = threading.Event(), list[http.server.BaseHTTPRequestHandler]()

    def send(request: http.server.BaseHTTPRequestHandler) -> None:
        asked.append(request)
        if answer is None:
            done.wait(60)
        else:
            request.wfile.write(answer)
        request.close_connection = True

    with serving(send) as endpoint:
        storage: dict[str, object] = {"endpoint_url": endpoint}
        if answer is None:
            storage["config_kwargs"] = {"read_timeout": 0.2}
        host = make_host("s3://b/a", None, storage=storage, **options)
        yield host.ufs, host.metrics, asked
        done.set()


@contextlib.contextmanager
def keys_of(keys: Iterable[str]) -> Iterator[tuple[Ufs, list[str]]]:
    """A bucket of given keys that answers LIST, a thousand to a page as S3 does; and the prefixes that were asked for.

    An object that is called `mark` is empty."""
    asked: list[str] = []

    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        query = dict(urllib.parse.parse_qsl(request.path.partition("?")[2]))
        asked.append(query["prefix"])
        after = query.get("continuation-token", "")
        found = [key for key in sorted(keys) if key.startswith(query["prefix"]) and key > after]
        body = "".join(
            f"<Contents><Key>{key}</Key><Size>{0 if key.endswith('mark') else 1}</Size><ETag>&quot;{key}&quot;</ETag></Contents>"
            for key in found[:1000]
        )
        if len(found) > 1000:
            body += f"<NextContinuationToken>{found[999]}</NextContinuationToken>"
        truncated = str(len(found) > 1000).lower()
        data = f"<ListBucketResult><IsTruncated>{truncated}</IsTruncated>{body}</ListBucketResult>".encode()
        request.send_response(200)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    with serving(answer) as endpoint:
        yield make_host("s3://b/t", None, storage={"endpoint_url": endpoint}).ufs, asked


def below(ufs: Ufs, path: str) -> list[str] | None:
    """The names of what lies below a path; None of a file."""
    found = ufs.get_status(path)
    return [file.url for file in found.files] if isinstance(found, Listing) else None


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


# --- directories -------------------------------------------------------------------------------------


def test_an_empty_object_of_a_directorys_name(s3: S3Server, bucket: str) -> None:
    """An empty object `mark` beside `mark/…`, as many tools put it, is no file: neither alone nor in its parent's listing."""
    root = f"s3://{bucket}/t"
    put(s3, bucket, "t/mark", data=b"")
    ufs = host_of(s3, root).ufs
    assert below(ufs, f"{root}/mark") is None
    put(s3, bucket, "t/mark-1", "t/mark.x", "t/mark/a", "t/mark/d/b")
    put(s3, bucket, "t/mark/d", data=b"")
    inner = [f"{root}/mark/a", f"{root}/mark/d/b"]
    assert below(ufs, f"{root}/mark") == [file.url for file in ufs.list_status(f"{root}/mark").files] == inner
    assert below(ufs, root) == [f"{root}/mark-1", f"{root}/mark.x", *inner]


def test_an_empty_object_among_a_crowd() -> None:
    """The directory is found also where more than a page of names lie between; without one the empty object is the file."""
    crowd = ["t/mark", *(f"t/mark-{number:04d}" for number in range(1001))]
    for more, found in (([], None), (["t/mark/a"], ["s3://b/t/mark/a"])):
        with keys_of([*crowd, *more]) as (ufs, _):
            assert below(ufs, "s3://b/t/mark") == found


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


@pytest.mark.parametrize("kind", ["plain", "versioned", "multipart"])
@pytest.mark.parametrize("key", ["dim/a.parquet", "dim/größe 1/a+b&c=d%20.csv"])
def test_head_and_list_give_one_token(s3: S3Server, bucket: str, kind: str, key: str) -> None:
    """An object's version is equal by HEAD, LIST and status, also in a versioned bucket and uploaded in parts, and can be pinned."""
    if kind == "versioned":
        s3.client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    put(s3, bucket, key, data=NEW)
    put(s3, bucket, key)
    if kind == "multipart":
        upload = {"UploadId": s3.client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]}
        upload |= {"Bucket": bucket, "Key": key}
        etag = s3.client.upload_part(**upload, PartNumber=1, Body=OLD)["ETag"]
        s3.client.complete_multipart_upload(**upload, MultipartUpload={"Parts": [{"ETag": etag, "PartNumber": 1}]})
        s3.log.clear()
    path = f"s3://{bucket}/{key}"
    ufs = host_of(s3, path).ufs
    by_head = ufs.get_meta(path)
    (by_list,) = ufs.list_status(path.rpartition("/")[0]).files
    assert by_head == by_list == ufs.get_status(path)
    assert requests(s3) == ["head", "list", "list"]
    assert (by_head.url, by_head.size, by_head.cacheable) == (path, len(OLD), True)
    assert by_head.identity.endswith("-1") is (kind == "multipart")
    assert by_head.modified_at_s is not None
    assert ufs.read_many(whole(by_list)) == [[OLD]]


# --- pinned reads ------------------------------------------------------------------------------------


def test_every_read_is_pinned_by_if_match() -> None:
    """Each range is asked for with the version's ETag; no request is made to open the file or to check it."""
    with raw(PARTIAL + OLD) as (ufs, _, asked):
        assert ufs.read_ranges(FileVersion("s3://b/d/a", 1000, "etag:x"), [(0, 300), (700, 300)]) == [OLD, OLD]
    assert [(request.command, request.path) for request in asked] == [("GET", "/b/d/a")] * 2
    assert [request.headers["If-Match"] for request in asked] == ['"x"'] * 2
    assert {request.headers["Range"] for request in asked} == {"bytes=0-299", "bytes=700-999"}


# --- how many requests -------------------------------------------------------------------------------


def test_one_list_for_a_tree_of_directories(s3: S3Server, bucket: str) -> None:
    """A directory tree is one request, hidden directories and all; only what may be data is named."""
    data = ["t/_SUCCESS", "t/_d=2/z", "t/_spark_metadata/0", "t/a", "t/d=1/b", "t/d=1/deep/c"]
    put(s3, bucket, *data, "t/_temporary/0/x", "t/.git/y", "t/marker/", "t-2/a")
    listing = host_of(s3, f"s3a://{bucket}/t").ufs.list_status(f"s3a://{bucket}/t")
    assert requests(s3) == ["list"]
    assert listing.url == f"s3://{bucket}/t"
    assert [file.url for file in listing.files] == [f"s3://{bucket}/{key}" for key in data]
    assert listing.directories == {
        "d=1", "d=1/deep", "_temporary", "_temporary/0", ".git", "_d=2", "_spark_metadata", "marker",
    }  # fmt: skip


def test_one_list_per_thousand_objects() -> None:
    """A listing is one request per 1000 keys, complete and in order; what a name is takes as many."""
    keys = [f"t/{n:04}" for n in range(2001)]
    with keys_of(keys) as (ufs, asked):
        assert [file.url for file in ufs.list_status("s3://b/t").files] == [f"s3://b/{key}" for key in keys]
        assert asked == ["t/"] * 3
        assert below(ufs, "s3://b/t") == [f"s3://b/{key}" for key in keys]
        assert asked[3:] == ["t"] * 3


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("dim", ["dim/a", "dim/b=1/c"]),
        ("dim/", ["dim/a", "dim/b=1/c"]),
        ("dim.parquet", "dim.parquet"),
        ("dim-old", ["dim-old/a"]),
        ("dim0", "dim0"),
        (
            "",
            ["dim-old/a", "dim.parquet", "dim/a", "dim/b=1/c", "dim0", "dim0x/y", "dimension/z"],
        ),  # a bucket is a directory
        ("di", None),
        ("dim/a/b", None),
        ("nothing", None),
    ],
)
def test_what_a_name_is_costs_one_request(s3: S3Server, bucket: str, path: str, found: list[str] | str | None) -> None:
    """A file, a directory among siblings that share its name's beginning, or nothing: told by exactly one LIST."""
    put(s3, bucket, "dim-old/a", "dim.parquet", "dim/a", "dim/b=1/c", "dim0", "dim0x/y", "dimension/z")
    url = f"s3://{bucket}/{path}"
    ufs = host_of(s3, url).ufs
    if found is None:
        with pytest.raises(UfsNotFoundError, match=f"{path} does not exist"):
            ufs.get_status(url)
    else:
        status = ufs.get_status(url)
        if isinstance(status, Listing):
            assert [file.url.removeprefix(f"s3://{bucket}/") for file in status.files] == found
            assert status == ufs.list_status(url)
        else:
            assert status.url == f"s3://{bucket}/{found}"
            assert status == ufs.get_meta(url)
        s3.log.pop()
    assert requests(s3) == ["list"]
    if not path:
        with pytest.raises(UfsNotFoundError, match="is a bucket"):
            ufs.get_meta(url)


@pytest.mark.parametrize(("crowd", "asked_for"), [("dim-{:04}", 2), ("dim.{:04}", 2), ("dim{:04}", 1)])
def test_a_crowd_costs_one_request_more(crowd: str, asked_for: int) -> None:
    """However many keys sort before what lies below a name, a directory costs two requests, a file one; keys after it cost nothing."""
    with keys_of([*(crowd.format(n) for n in range(5000)), "dim/a"]) as (ufs, asked):
        assert below(ufs, "s3://b/dim") == ["s3://b/dim/a"]
        assert asked == ["dim", "dim/"][:asked_for]
        assert below(ufs, f"s3://b/{crowd.format(4000)}") is None
        assert len(asked) == asked_for + 1


# --- failures ----------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[Host, str], object]] = {
    "head": lambda host, path: host.ufs.get_meta(path),
    "list": lambda host, path: host.ufs.list_status(path.rpartition("/")[0]),
    "status": lambda host, path: host.ufs.get_status(path),
    "get": lambda host, path: host.ufs.read_ranges(FileVersion(path, 300, ""), [(0, 300)]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_busy_server_is_asked_again(s3: S3Server, bucket: str, call: Callable[[Host, str], object]) -> None:
    """503, 500 and 429 are tried again by us alone: each request at the server is a counted attempt. A refusal is raised at once."""
    path = f"s3://{bucket}/d/a"
    put(s3, bucket, "d/a")
    host = host_of(s3, path, max_retries=3)
    answers = iter([503, 500, 429])
    s3.before = lambda method, path: next(answers, None)
    call(host, path)
    counts = host.metrics.snapshot()
    assert len(s3.log) == 4 == counts["ufsHeadCount"] + counts["ufsListCount"] + counts["ufsGetCount"]
    assert counts["ufsRetryCount"] == 3 == len(host.clock.slept)
    for status, error, says, attempts in (
        (503, UfsUnavailableError, None, 4),
        (401, UfsPermissionError, "check the credentials", 1),
        (403, UfsPermissionError, "check the credentials", 1),
    ):
        s3.log.clear()
        s3.before = lambda method, path, status=status: status
        with pytest.raises(error, match=says):
            call(host, path)
        assert len(s3.log) == attempts


def test_no_such_bucket(s3: S3Server) -> None:
    """A bucket that does not exist is not found, by every call; an endpoint that refuses connections is tried again, and unavailable."""
    path = f"s3://nobody-{uuid.uuid4().hex}/d/a"
    away = make_host("s3://b/d/a", None, max_retries=2, storage={"endpoint_url": unserved()})
    for kind, call in CALLS.items():
        with pytest.raises(SourceChangedError if kind == "get" else UfsNotFoundError):
            call(host_of(s3, path), path)
        with pytest.raises(UfsUnavailableError):
            call(away, "s3://b/d/a")
    counts = away.metrics.snapshot()
    assert (counts["ufsHeadCount"], counts["ufsListCount"], counts["ufsGetCount"]) == (3, 6, 3)


def test_a_server_that_says_nothing() -> None:
    """A server that accepts and never answers ends in a timeout error, after the timeout and attempts the options set."""
    with raw(None, max_retries=1) as (ufs, metrics, asked):
        with pytest.raises(UfsTimeoutError):
            ufs.get_meta("s3://b/a")
        assert metrics.snapshot()["ufsHeadCount"] == 2 == len(asked)


def test_no_credentials(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any credentials the error says where they come from."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in (
        ("AWS_EC2_METADATA_DISABLED", "true"),
        ("HOME", "/nonexistent"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(UfsPermissionError, match="check the credentials in the environment or the conf file"):
        host_of(s3, "s3://b/a").ufs.get_meta("s3://b/a")
    assert s3.log == []
