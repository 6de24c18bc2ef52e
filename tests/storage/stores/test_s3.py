"""Refusals and redirects of S3: an error of one line that says what to do, no useless retries, nothing sent to other hosts."""

import asyncio
import functools
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup import LookupTable, errors
from tests.support.fakes import make_host
from tests.support.proxy import request_kind
from tests.support.s3server import Application, S3Server
from tests.support.web_server import WebServer, web

__all__ = ["web"]

ROWS = pa.table({"id": [1, 2, 3], "name": ["a", "b", "c"]})
PATH = "s3://refusals/dim/a.parquet"
SECRETS = ("AKIAIOSFODNN7EXAMPLE", "SESAME42", "TOKEN42")
_BODY = (
    "<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message><AWSAccessKeyId>AKIAIOSFODNN7EXAMPLE</AWSAccessKeyId>"
    "<Token-0>TOKEN42</Token-0><StringToSign>AWS4-HMAC-SHA256 SESAME42</StringToSign></Error>"
)


@pytest.fixture
def store(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A store with one file, and a session token for it in the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    for name, secret in zip(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"), SECRETS, strict=True):
        monkeypatch.setenv(name, secret)
    if "refusals" not in [bucket["Name"] for bucket in s3.client.list_buckets()["Buckets"]]:
        s3.client.create_bucket(Bucket="refusals")
    file = io.BytesIO()
    pq.write_table(ROWS, file)
    s3.client.put_object(Bucket="refusals", Key="dim/a.parquet", Body=file.getvalue())
    s3.log.clear()
    return s3


def refuse(s3: S3Server, kinds: Iterable[str], status: int, code: str, message: str = "No.", **headers: str) -> None:
    """Answer requests of these kinds with a refusal of S3."""

    def between(environ: Any, start: Any, app: Application) -> Iterable[bytes]:
        if request_kind(environ) not in kinds:
            return app(environ, start)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        body = _BODY.format(code=code, message=message).encode()
        answer_headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
        start(f"{status} {code}", answer_headers + [(name.replace("_", "-"), value) for name, value in headers.items()])
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else body]

    s3.between = between


REFUSALS: list[tuple[int, str, str, dict[str, str], type[errors.UfsError], str]] = [
    (400, "ExpiredToken", "The provided token has expired.", {}, errors.UfsPermissionError, "renew them, and restart this process"),
    (400, "InvalidToken", "The provided token is malformed.", {}, errors.UfsPermissionError, "renew them, and restart this process"),
    (403, "InvalidAccessKeyId", "It does not exist.", {}, errors.UfsPermissionError, "check the credentials"),
    (403, "SignatureDoesNotMatch", "It does not match.", {}, errors.UfsPermissionError, "check the credentials"),
    (403, "RequestTimeTooSkewed", "Too large.", {}, errors.UfsPermissionError, "set the clock of this host"),
    (403, "AccessDenied", "Access Denied", {}, errors.UfsPermissionError, "they need s3:{permission}"),
    (403, "InvalidObjectState", "Glacier.", {}, errors.UfsPermissionError, "restore it first"),
    (404, "NoSuchBucket", "It does not exist.", {}, errors.UfsNotFoundError, "there is no such bucket"),
    (400, "InvalidRequest", "The object was stored using a form of Server Side Encryption.", {}, errors.UfsError, "SSE-C"),
    (301, "PermanentRedirect", "Elsewhere.", {"x_amz_bucket_region": "eu-west-1"}, errors.UfsError, "is in region eu-west-1: set AWS_DEFAULT_REGION"),
    (307, "TemporaryRedirect", "Elsewhere.", {"Location": "http://other.example/x"}, errors.UfsError, "redirect to other.example is not followed"),
    (400, "AuthorizationHeaderMalformed", "Wrong.", {"x_amz_bucket_region": "eu-west-1"}, errors.UfsError, "is in region eu-west-1"),
    (400, "RequestTimeout", "Not read.", {}, errors.UfsTimeoutError, "Not read"),
    (503, "SlowDown", "Please reduce your request rate.", {}, errors.UfsUnavailableError, "Please reduce your request rate"),
    (405, "MethodNotAllowed", "Line\n one.", {}, errors.UfsError, "Line one (MethodNotAllowed)"),
]  # fmt: skip


def test_a_refusal_says_what_to_do(store: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is one line that names the object, in an error of the class that fits; only transient failures are retried."""
    monkeypatch.setattr(asyncio, "sleep", functools.partial(asyncio.sleep, 0))  # s3fs waits 0.1 s after each SlowDown
    host = make_host(PATH, None, max_retries=2)
    file = host.ufs.get_meta(PATH)
    calls: dict[str, tuple[str, Callable[[], object]]] = {
        "list": ("ListBucket", lambda: host.ufs.list_status("s3://refusals/dim")),
        "get": ("GetObject", lambda: host.ufs.read_ranges(file, [(0, file.size)])),
        "put": ("PutObject", lambda: host.ufs.put_if_absent("s3://refusals/t/a", b"mine")),
        "head": ("GetObject", lambda: host.ufs.get_meta(PATH)),
    }
    for status, code, message, headers, error_type, says in REFUSALS:
        for kind, (permission, call) in calls.items():
            refuse(store, {kind} if kind != "put" else {"put", "get", "head"}, status, code, message, **headers)
            host.metrics.inc("ufsRetryCount", -host.metrics.snapshot()["ufsRetryCount"])
            with pytest.raises(errors.UfsError, match=r"^[^\n]*s3://refusals/") as caught:
                call()
            text = str(caught.value)
            assert "\n" not in text
            assert not [secret for secret in SECRETS if secret in text]
            if kind == "head" and status == 400:  # S3 does not say why
                assert "expired credentials, another region, or encryption with a key that only the writer has" in text
                continue
            if kind != "head" or status in (301, 307):  # whose answers have no body
                assert says.format(permission=permission) in text
            transient = error_type in (errors.UfsUnavailableError, errors.UfsTimeoutError)
            assert (host.metrics.snapshot()["ufsRetryCount"] > 0) is transient
            assert isinstance(caught.value, errors.UfsUnavailableError if kind == "put" and transient else error_type)


def test_a_redirect_takes_nothing_along(store: S3Server, web: WebServer) -> None:
    """Neither the session token, nor the written bytes, nor the request itself goes to the host that an answer names."""
    redirected_requests: list[str] = []
    web.before = lambda method, path: redirected_requests.append(method)
    host = make_host(PATH, None)
    file = host.ufs.get_meta(PATH)
    calls: list[Callable[[], Any]] = [
        lambda: host.ufs.get_meta(PATH), lambda: host.ufs.list_status("s3://refusals/dim"),
        lambda: host.ufs.read_ranges(file, [(0, 5)]), lambda: host.ufs.put_if_absent("s3://refusals/t/a", b"rows"),
        lambda: host.ufs.delete("s3://refusals/t/_lookup/log/00000000000000000001.json"),
    ]  # fmt: skip
    for status in (301, 302, 307, 308):
        refuse(store, ("head", "list", "get", "put", "delete"), status, "TemporaryRedirect", Location=f"{web.url}/x")
        for call in calls:
            with pytest.raises(errors.UfsError, match=r"another region \(the redirect to 127\.0\.0\.1 is not followed"):
                call()
    refuse(store, ("head",), 307, "TemporaryRedirect", Location="http://[")
    with pytest.raises(errors.UfsError, match="in another region: set"):
        calls[0]()
    assert redirected_requests == []


@pytest.mark.parametrize(("name", "more"), [("content-length", 10), ("content-length", -10), ("etag", None)])
def test_a_head_that_is_not_true(store: S3Server, cache_dir: Path, name: str, more: int | None) -> None:
    """A wrong size or ETag in the answer to HEAD gives an error that names the object, and no rows."""
    wrong = '"another"' if more is None else str(make_host(PATH, None).ufs.get_meta(PATH).size + more)

    def between(environ: Any, start: Any, app: Application) -> Iterable[bytes]:
        def changed(status: str, headers: list[tuple[str, str]], exc_info: object = None) -> Any:
            return start(status, [*({key.lower(): value for key, value in headers} | {name: wrong}).items()])

        if request_kind(environ) == "list":  # so that it is HEAD which tells the file's version
            start("403 Forbidden", [])
            return [b"<Error><Code>AccessDenied</Code><Message>x</Message></Error>"]
        return app(environ, changed if request_kind(environ) == "head" else start)

    store.between = between
    problems = (errors.DamagedFileError, errors.UfsError, errors.VersionGoneError)
    words = r"^[^\n]*s3://refusals/dim/a\.parquet[^\n]*$"
    table = LookupTable(PATH, {"lookup.cache.dir": str(cache_dir), "lookup.max-retries": 0})
    with pytest.raises(problems, match=words), table:
        table.scan()
