"""HTTP APIs as lookup tables: what is requested, what of the answers is taken and for how long it is kept, and what faults do."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import decimal
import email.utils
import gzip
import json
import math
import socket
import ssl
import struct
import subprocess
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup import LookupTable, lookup_join
from pyspark_lookup.columnar.ddl import parse_columns
from pyspark_lookup.errors import LookupFunctionError, OptionError, SchemaError
from pyspark_lookup.sources.providers.services import http_function
from pyspark_lookup.sources.providers.services.answers import AnswerReader
from pyspark_lookup.sources.providers.services.freshness import has_next_page, lifetime_s, retry_after_s
from pyspark_lookup.sources.providers.services.http_function import Answer, Answers, Clock, HttpFunction
from pyspark_lookup.sources.providers.services.http_request import RequestTemplate
from pyspark_lookup.sources.registry import parse_options
from tests.support.followed_tables import AGED, History, Requests, System, Way, Write
from tests.support.fuzzing import BY_NIGHT, seeds
from tests.support.http_api import Api, StoppableApi, api
from tests.support.lookup_functions import ONCE, PARTIAL, Desk, Options, ids

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["api"]
SCHEMA = "id BIGINT, name STRING, balance DECIMAL(20, 2)"


def customer(number: int) -> dict[str, Any]:
    return {"id": number, "name": f"name {number}", "balance": 10**15 + number, "unused": [1]}


def row(number: int) -> dict[str, Any]:
    return {"id": number, "name": f"name {number}", "balance": decimal.Decimal(10**15 + number)}


@pytest.fixture
def shop(api: Api) -> Api:
    api.customers = {str(number): customer(number) for number in range(1, 6)}
    return api


def make_options(api: Api, *more: Options) -> dict[str, Any]:
    options = {"lookup.http.url": f"{api.url}/customers/{{id}}", "lookup.schema": SCHEMA}
    for group in more:
        options |= group
    return options


def of_many(api: Api) -> dict[str, str]:
    return {"lookup.http.url": f"{api.url}/customers?ids={{keys}}", "lookup.http.rows": "data.items"}


def by_body(api: Api) -> dict[str, str]:
    options = {"lookup.http.url": f"{api.url}/find", "lookup.http.body": '{"ids": "{keys}", "active": true}'}
    return options | {"lookup.http.rows": "data.items"}


@pytest.mark.parametrize("form", [lambda api: {}, of_many, by_body], ids=["one", "many", "body"])
def test_rows_of_keys(shop: Api, desk: Desk, form: Any) -> None:
    """Rows come by their keys, absent keys and null have none, and each key is asked for once; in each form of request."""
    rows = desk.table("http", make_options(shop, form(shop))).get_many(ids(3, 9, 1, None, 3)).to_pylist()
    assert [(fields.pop("key_index"), fields) for fields in rows] == [(0, row(3)), (2, row(1)), (4, row(3))]
    assert shop.count() == (1 if form(shop) else 3)


def test_a_server_that_is_down_is_no_other_server(shop: Api, desk: Desk) -> None:
    """Tables of one server count its failures together; the tables of another server are looked up all the same."""
    breaker = {"lookup.circuit-breaker.wait-duration": "30 s", "lookup.max-retries": 0}
    tables = [
        desk.table("http", make_options(shop, breaker, {"lookup.http.url": f"{server}/{path}/{{id}}"}))
        for server, path in (("http://127.0.0.1:1", "a"), ("http://127.0.0.1:1", "b"), (shop.url, "customers"))
    ]
    for number, (table, message) in enumerate([(tables[0], "failed to look up")] * 5 + [(tables[1], "was not called")]):
        with pytest.raises(LookupFunctionError, match=message):
            table.get(number)
    assert tables[2].get(3) == [row(3)]


def test_batches(shop: Api, desk: Desk) -> None:
    """A request has at most `lookup.http.batch-size` keys; a body is sent as JSON, with the values of its own that it had."""
    table = desk.table(
        "http", make_options(shop, by_body(shop), {"lookup.http.batch-size": 2, "lookup.async.capacity": 1})
    )
    assert table.get_many(ids(1, 2, 3)).num_rows == 3
    assert shop.requests == [
        ("POST", "/find", {"ids": [1, 2], "active": True}),
        ("POST", "/find", {"ids": [3], "active": True}),
    ]
    assert {headers["Content-Type"] for headers in shop.asked} == {"application/json"}


def test_texts_in_urls(api: Api, desk: Desk) -> None:
    """Keys that mean something in a URL are encoded; one that no path can have has no row, and causes no request."""
    texts = ["a/b", "..%2f..", "?x=1&y", "#", "ä€𝄞 %", "a,b", "{id}", "\n"]
    api.customers = {text: {"name": text.upper()} for text in texts}  # the answers do not repeat the key
    table = desk.table("http", make_options(api, {"lookup.schema": "id STRING, name STRING"}))
    rows = table.get_many(pa.table({"id": [*texts, "", ".", ".."]})).to_pylist()
    assert [(fields["id"], fields["name"]) for fields in rows] == [(text, text.upper()) for text in texts]
    assert api.count() == len(texts)
    many = desk.table("http", make_options(api, of_many(api), ONCE, {"lookup.schema": "id STRING, name STRING"}))
    with pytest.raises(
        LookupFunctionError,
        match=r"the key 'a,b' has a comma, which separates keys: put \{keys\} into lookup.http.body",
    ):
        many.get("a,b")


def test_composite_keys(api: Api, desk: Desk) -> None:
    """Each key column has its place; two keys never share a request's text."""
    api.faults = [api.misbehave(200, [{"line": 2, "city": "Oslo"}])]
    options = make_options(
        api, {"lookup.keys": "order,line", "lookup.schema": "order STRING, line INT, city STRING"}, ONCE
    )
    table = desk.table("http", options | {"lookup.http.url": f"{api.url}/orders/{{order}}-{{line}}"})
    assert table.get(("a", 2)) == [{"order": "a", "line": 2, "city": "Oslo"}]
    assert api.requests[0][1] == "/orders/a-2"
    with pytest.raises(LookupFunctionError, match=r"order = 'a-1' contains '-', which separates it"):
        table.get(("a-1", 2))
    body = {"lookup.http.url": f"{api.url}/find", "lookup.http.body": '{"ids": "{keys}"}'}
    api.faults = [api.misbehave(200, [{"order": "a-1", "line": 2, "city": "Bergen"}])]
    assert desk.table("http", options | body).get(("a-1", 2))[0]["city"] == "Bergen"
    assert api.requests[-1] == ("POST", "/find", {"ids": [{"order": "a-1", "line": 2}]})


VALUES = [
    ("INT", 5, 5), ("BIGINT", 2**62, 2**62), ("DOUBLE", 0.1, 0.1), ("DECIMAL(38, 18)", "0.100000000000000001", decimal.Decimal("0.100000000000000001")),
    ("BOOLEAN", True, True), ("DATE", "2026-02-28", datetime.date(2026, 2, 28)), ("STRING", "x", "x"), ("STRING", {"a": [1]}, '{"a":[1]}'),
    ("TIMESTAMP", "2026-03-01T12:00:00+01:00", datetime.datetime(2026, 3, 1, 11, tzinfo=datetime.timezone.utc)),
    ("STRUCT<city: STRING>", {"city": "Oslo", "zip": 1}, {"city": "Oslo"}), ("ARRAY<INT>", [1, None], [1, None]),
    ("MAP<STRING, INT>", {"a": 1}, [("a", 1)]), ("INT", None, None),
]  # fmt: skip


def test_values_of_every_type() -> None:
    """JSON values have the declared types, without a loss; a value of another type is named."""
    for kind, value, expected in VALUES:
        reader = AnswerReader(parse_columns(f"id INT, value {kind}"), None, ("id",))
        content = json.dumps({"id": 1, "value": value}).replace('"0.100000000000000001"', "0.100000000000000001")
        assert reader.read(content.encode(), None).to_pylist() == [{"id": 1, "value": expected}], kind
    reader = AnswerReader(parse_columns("id INT, value INT"), None, ("id",))
    for wrong in ('"x"', "1.5", "true", "[1]", str(2**31)):
        with pytest.raises((ValueError, TypeError)):
            reader.read(f'{{"id": 1, "value": {wrong}}}'.encode(), None)


def test_rows_by_path() -> None:
    """A JMESPath expression selects rows, renames fields and reaches into objects; numbers keep their digits on the way."""
    answer = {"docs": [{"found": True, "_source": {"user": {"id": 7}, "name": "a"}}, {"found": False}, None]}
    reader = AnswerReader(
        parse_columns("id INT, name STRING"), "docs[?found]._source.{id: user.id, name: name}", ("id",)
    )
    assert reader.read(json.dumps(answer).encode(), None).to_pylist() == [{"id": 7, "name": "a"}]
    reader = AnswerReader(parse_columns("id INT, price DECIMAL(30, 20)"), "items[?price > `1`]", ("id",))
    content = b'{"items": [{"id": 1, "price": 0.5}, {"id": 2, "price": 1.00000000000000000001}]}'
    assert reader.read(content, None)["price"].to_pylist() == [decimal.Decimal("1.00000000000000000001")]
    assert AnswerReader(parse_columns("id INT"), "nothing.here", ("id",)).read(b'{"a": 1}', None).num_rows == 0
    with pytest.raises(ValueError, match=r"lookup.http.rows = 'length\(@\)' fails"):
        AnswerReader(parse_columns("id INT"), "length(@)", ("id",)).read(b"1", None)


def test_an_etag_is_sent_back(shop: Api, desk: Desk) -> None:
    """A row that the cache no longer has is asked for with its ETag: status 304 is the row, and a changed row comes whole."""
    shop.etags = True
    table = desk.table("http", make_options(shop, PARTIAL))
    assert table.get(1) == [row(1)]
    table.invalidate(ids(1))
    assert table.get(1) == [row(1)]
    assert shop.statuses == [200, 304]
    shop.customers["1"]["name"] = "new"
    table.invalidate(ids(1))
    assert table.get(1)[0]["name"] == "new"
    assert shop.statuses == [200, 304, 200]
    del shop.customers["1"]
    table.invalidate(ids(1))
    assert table.get(1) == []


def test_an_etag_is_of_one_resource(api: Api, desk: Desk) -> None:
    """Where a redirect leads elsewhere by now, the other resource is not asked with the ETag of the first, which may be its own, too."""
    asked = list[bool]()

    def revision(name: str) -> Callable[[BaseHTTPRequestHandler], None]:
        def answer(request: BaseHTTPRequestHandler) -> None:
            asked.append(request.headers.get("If-None-Match") == '"1"')
            api.reply(request, *((304, b"") if asked[-1] else (200, {"id": 1, "name": name})), ETag='"1"')

        return answer

    table = desk.table("http", make_options(api, ONCE))
    for path, name in (("/a", "a"), ("/b", "b"), ("/b", "b")):
        api.faults = [api.misbehave(302, Location=path), revision(name)]
        assert table.get(1)[0]["name"] == name
    assert asked == [False, False, True]
    api.faults = [api.misbehave(302, Location="/c"), api.misbehave(304)]
    with pytest.raises(LookupFunctionError, match=r"status 304"):
        table.get(1)


def test_max_age_ends_before_the_caches_own_bound(shop: Api, desk: Desk) -> None:
    """A row, or that there is none, is used until max-age is over, less the Age; never longer than expire-after-write; also by other processes."""
    shop.headers = {"Cache-Control": "private, max-age=100", "Age": "40"}
    table = desk.table("http", make_options(shop, PARTIAL))
    table.get_many(ids(1, 9))
    shop.headers = {}
    table.get_many(ids(2))
    assert shop.count() == 3
    desk.clock.tick(59.0)
    table.get_many(ids(1, 9, 2))
    desk.restart()
    desk.table("http", make_options(shop, PARTIAL)).get_many(ids(1, 9, 2))
    assert shop.count() == 0
    desk.clock.tick(1.5)
    shop.headers = {"Cache-Control": "max-age=1000000", "Age": "3000"}
    table.get_many(ids(1, 9, 2))
    assert sorted(path for _, path, _ in shop.requests) == ["/customers/1", "/customers/9"]
    desk.clock.tick(599.0)  # an hour after the other server read it
    table.get_many(ids(1))
    assert shop.count() == 2
    desk.clock.tick(2.0)
    table.get_many(ids(1))
    assert shop.count() == 1


def test_a_lifetime_ends_under_every_bound(shop: Api, desk: Desk) -> None:
    """A table with another expire-after-write uses a row no longer than the server allows, in the process that loaded it and in others."""
    shop.headers = {"Cache-Control": "max-age=100"}
    tables = []
    for number, bound in enumerate(("1 h", "2 h", "3 h", "3 h")):
        if number == 2:
            desk.restart()
        tables.append(
            desk.table("http", make_options(shop, PARTIAL, {"lookup.partial-cache.expire-after-write": bound}))
        )
        assert tables[-1].get(1) == [row(1)]
    assert shop.count() == 3
    desk.clock.tick(101.0)
    for table in tables[:3]:
        assert table.get(1) == [row(1)]
    assert shop.count() == 3


@pytest.mark.parametrize("control", ["no-store", "no-cache", "max-age=0", "max-age=60, no-store"])
def test_what_must_not_be_stored(shop: Api, desk: Desk, control: str) -> None:
    """An answer that must not be stored is for its lookup only; with no-store nothing of it comes to the disk, while other keys of the lookup are cached."""
    shop.etags = True
    shop.headers = {"Cache-Control": control}
    table = desk.table("http", make_options(shop, PARTIAL))
    for _ in range(2):
        assert table.get_many(ids(1, 9))["name"].to_pylist() == ["name 1"]
        assert shop.count() == 2
    stored = b"".join(path.read_bytes() for path in desk.cache_dir.rglob("*") if path.is_file())
    assert b"name 1" not in stored
    shop.headers = {}

    def answer(request: BaseHTTPRequestHandler) -> None:
        number = int(request.path[-1])
        shop.reply(request, 200, customer(number), Cache_Control=control if number == 4 else "public")

    shop.faults = [answer] * 3
    table = desk.table("http", make_options(shop, PARTIAL, {"lookup.async.capacity": 1}))
    for _ in range(2):
        assert table.get_many(ids(4, 5))["id"].to_pylist() == [4, 5]
    assert sorted(path for _, path, _ in shop.requests) == ["/customers/4", "/customers/4", "/customers/5"]


def test_lifetimes() -> None:
    """An answer is fresh as RFC 9111 says for a private cache; what cannot be parsed is not fresh."""
    now_s = 1_800_000_000.0
    later, at_once = (email.utils.formatdate(now_s + seconds, usegmt=True) for seconds in (60, 0))
    for headers, expected in (
        ({}, float("inf")), ({"cache-control": "max-age=60"}, 60.0), ({"cache-control": 'Max-Age="60"', "age": "50"}, 10.0),
        ({"cache-control": "max-age=60, max-age=5"}, 5.0), ({"cache-control": "s-maxage=60"}, float("inf")),
        ({"cache-control": "max-age=60, no-cache"}, 0.0), ({"cache-control": "max-age=x"}, 0.0), ({"cache-control": "public", "expires": later}, 60.0),
        ({"expires": later, "date": later}, 0.0), ({"expires": "0"}, 0.0), ({"cache-control": "max-age=5", "expires": later}, 5.0),
        ({"cache-control": 'private="no-store"'}, float("inf")), ({"cache-control": "max-age=60", "age": "70"}, 0.0),
    ):  # fmt: skip
        assert lifetime_s(headers, now_s) == pytest.approx(expected), headers
    for text, expected_s in (("5", 5.0), (later, 60.0), (at_once, 0.0), ("soon", None), ("-1", None), ("", None)):
        assert retry_after_s({"retry-after": text}, now_s) == expected_s
    assert has_next_page({"link": '<https://a/?page=1>; rel="prev", <https://a/?page=3>; rel="last next"'})
    assert not has_next_page({"link": '<https://a/next>; rel="prev"; title="next"'})


class Slept:
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s, self.slept = 1000.0, list[float]()

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds

    def clock(self) -> Clock:
        return Clock(lambda: self.now_s, lambda: self.now_s, self.sleep)


def make_http_function(api: Api, slept: Slept, **arguments: Any) -> HttpFunction:
    defaults: dict[str, Any] = {
        "batch_size": 1,
        "timeout_s": 20.0,
        "pause_at_most_s": 180.0,
        "headers": {},
        "login": None,
    }
    reader = AnswerReader(parse_columns("id BIGINT, name STRING"), None, ("id",))
    template = RequestTemplate(f"{api.url}/customers/{{id}}", None)
    return HttpFunction(template, reader, origin=api.url, clock=slept.clock(), **(defaults | arguments))


def test_retry_after_is_respected(shop: Api) -> None:
    """No request of this process is sent before the time that the server names; a lookup that would wait too long fails at once."""
    slept = Slept()
    function = make_http_function(shop, slept)

    async def run() -> None:
        await function.open()
        for status, after, pause_s in ((429, "7", 7.0), (503, "90", 90.0)):
            shop.faults = [shop.misbehave(status, b"busy", Retry_After=after)]
            with pytest.raises(LookupFunctionError, match=rf"GET {shop.url}/customers/1: status {status} .*: busy"):
                await function.lookup(ids(1))
            answers = await asyncio.gather(function.lookup(ids(1)), function.lookup(ids(2)))
            assert [answer.rows.num_rows for answer in answers] == [1, 1]
            assert slept.slept[0] == pause_s
            assert shop.count() == 3
            slept.slept.clear()
        shop.faults = [shop.misbehave(429, b"", Retry_After="100000")]
        for expected in (r"status 429", r"the server accepts no requests for another 3600 s \(Retry-After\)"):
            with pytest.raises(LookupFunctionError, match=expected):
                await function.lookup(ids(1))
        assert shop.count() == 1
        assert slept.slept == []
        await function.close()

    asyncio.run(run())


def broken(request: BaseHTTPRequestHandler) -> None:
    """End the connection without an answer."""
    request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.connection.close()
    request.close_connection = True


def cut(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.send_header("Content-Length", "1000")
    request.end_headers()
    request.wfile.write(b'{"id": 1, "name": "a"}')
    request.close_connection = True


FAULTS: dict[str, tuple[Any, str]] = {
    "not JSON": ((200, b"<html>Sign in</html>"), r"the answer \(application/json\) cannot be read: "),
    "no text": ((200, b'{"name": "\xff"}'), r"cannot be read"),
    "half": ((200, b'{"id": 1, "na'), r"cannot be read"),
    "deep": ((200, b'{"name": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), r"nested more than \d+ deep"),
    "a name twice": ((200, b'{"id": 1, "name": "a", "name": "b"}'), r"an object has the name 'name' twice"),
    "NaN": ((200, b'{"id": 1, "name": NaN}'), r"NaN is not a number in JSON"),
    "half a character": ((200, b'{"id": 1, "name": "\\ud800"}'), r"cannot be read"),
    "no object": ((200, b"[5]"), r"5 is not a JSON object: each row must be one"),
    "another type": ((200, b'{"id": "x"}'), r"'x' is not a valid int64"),
    "another key": ((200, b'{"id": 2, "name": "b"}'), r"returned a row with key id = 2, which is not among the requested keys \(key id = 1\)"),
    "huge": ((200, b" " * 400_000 + b"{}"), r"the answer has more than 300000 bytes"),
    "huge when unpacked": ((200, gzip.compress(b" " * 10_000_000 + b"{}"), {"Content_Encoding": "gzip"}), r"the answer has more than 300000 bytes"),
    "a next page": ((200, b"[]", {"Link": '</customers/1?page=2>; rel="next"'}), r"the answer has a next page"),
    "not modified": ((304, b""), r"status 304"),
    "partial": ((206, b"{}"), r"status 206"),
    "refused": ((403, b'{"error": "token=hunter2hunter2 is not allowed"}'), r"status 403 Forbidden: .*\[redacted\]"),
    "failed": ((500, b""), r"status 500 Internal Server Error"),
    "elsewhere": ((302, b"", {"Location": "http://localhost:1/customers/1?secret=x"}), r"status 302 redirects to http://localhost:1, which is not followed"),
    "as somebody": ((302, b"", {"Location": "//user@127.0.0.1/customers/1"}), r"status 302 redirects to an address that is not a URL, which is not followed"),
    "nowhere": ((302, b"", {"Location": "http://[/"}), r"status 302 redirects to|Invalid"),
    "cut": (cut, r"ClientPayloadError"),
    "lost": (broken, r"ServerDisconnectedError|ClientOSError"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(shop: Api, desk: Desk, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """An answer that is none is an error that names the URL and the key, leaves nothing, and does no harm to the next lookup."""
    answer, expected = FAULTS[fault]
    defaults = {**HttpFunction.__init__.__kwdefaults__, "answer_bytes": 300_000}
    monkeypatch.setattr(HttpFunction.__init__, "__kwdefaults__", defaults)
    table = desk.table("http", make_options(shop, PARTIAL, ONCE))
    if callable(answer):
        shop.faults = [answer] * 3  # a connection that ends at once is tried again
    else:
        shop.faults = [shop.misbehave(answer[0], answer[1], **(answer[2] if len(answer) > 2 else {}))]
    with pytest.raises(LookupFunctionError, match=r"^provider http .*" + expected) as caught:
        table.get(1)
    assert fault == "another key" or f"look up key id = 1: GET {shop.url}/customers/1: " in str(caught.value)
    shop.faults = []
    assert table.get(1) == [row(1)]


def test_a_server_that_does_not_answer(shop: Api, desk: Desk) -> None:
    """A silent server is waited for as long as `lookup.http.timeout`; other keys are answered."""
    ended = threading.Event()
    shop.faults = [lambda request: (ended.wait(20), broken(request))[0]]
    table = desk.table("http", make_options(shop, ONCE, {"lookup.http.timeout": "300 ms", "lookup.async.capacity": 1}))
    with pytest.raises(LookupFunctionError, match=r"no answer within lookup.http.timeout = 0.3 s"):
        table.get(1)
    ended.set()
    assert table.get(1) == [row(1)]


def test_a_server_that_takes_no_connection(shop: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is not made in time is named as such: no longer wait for the answer would help."""
    monkeypatch.setattr(http_function, "_CONNECT_S", 0.2)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        shop.url = f"http://127.0.0.1:{server.getsockname()[1]}"
        for _ in range(4):  # more than it keeps waiting, so that the next one gets no answer
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        function = make_http_function(shop, Slept())

        async def run() -> None:
            await function.open()
            with pytest.raises(LookupFunctionError, match=r"no connection to the server within 0.2 s"):
                await function.lookup(ids(1))
            await function.close()

        asyncio.run(run())


def test_stored_answers_are_bounded() -> None:
    """URLs and headers count, too: many small answers take no more memory than a few large ones."""
    answers = Answers(100_000)
    headers = {"etag": '"1"', "set-cookie": "x" * 100_000, "last-modified": "y" * 2000}
    urls = [f"http://shop/{'z' * 2000}/{number}" for number in range(100)]
    for url in urls:
        answers.put(url, Answer(url, b"{}", headers))
    kept = [answer for url in urls if (answer := answers.get(url)) is not None]
    assert 10 < len(kept) < 25
    assert kept[0].headers.keys() == {"etag", "last-modified"}
    answers.put("http://shop/large", Answer("http://shop/large", b"x" * 100_000, headers))
    assert answers.get(urls[-1]) is not None  # one that is too large is not worth all others


def test_a_batch_that_is_not_there(shop: Api, desk: Desk) -> None:
    """A status that means no rows for one key is no answer for a batch."""
    table = desk.table("http", make_options(shop, of_many(shop), ONCE))
    shop.faults = [shop.misbehave(404)] * 9
    with pytest.raises(LookupFunctionError, match=r"status 404 .*to a request for many keys, the API must answer 200"):
        table.get_many(ids(1, 2))


@pytest.mark.parametrize(
    ("status", "requests"),
    [
        *((final, 1) for final in (400, 401, 403, 405, 409, 422, 451)),
        *((passing, 3) for passing in (408, 425, 429, 500, 503)),
    ],
)
def test_statuses_that_are_asked_again(shop: Api, desk: Desk, status: int, requests: int) -> None:
    """A request that the server refuses is not sent a second time; one that it cannot answer now is."""
    table = desk.table("http", make_options(shop, {"lookup.max-retries": 2}))
    shop.faults = [shop.misbehave(status)] * requests
    with pytest.raises(
        LookupFunctionError,
        match=rf"failed to look up key id = 1{' in 3 attempts' if requests > 1 else ''}: .*status {status}",
    ):
        table.get(1)
    assert shop.count() == requests
    assert table.get(1) == [row(1)]


def test_redirects_on_the_same_server(shop: Api, desk: Desk) -> None:
    """Redirects on the same server are followed, a few times; those of a POST only where it stays one."""
    shop.faults = [shop.misbehave(301, Location="/moved/1"), shop.misbehave(307, Location=f"{shop.url}/customers/2?x")]
    table = desk.table("http", make_options(shop, ONCE))
    shop.customers["2"]["id"] = 1
    shop.faults[1] = shop.misbehave(307, Location=f"{shop.url}/customers/2")
    assert table.get(1)[0]["name"] == "name 2"
    shop.faults = [shop.misbehave(302, Location="/again")] * 9
    with pytest.raises(LookupFunctionError, match=r"more than 5 redirects"):
        table.get(1)
    shop.faults = [shop.misbehave(308, Location="/elsewhere")]
    table = desk.table("http", make_options(shop, by_body(shop), ONCE))
    assert table.get(3) == [row(3)]
    assert [path for _, path, _ in shop.requests[-2:]] == ["/find", "/elsewhere"]
    shop.faults = [shop.misbehave(303, Location="/elsewhere")]
    with pytest.raises(LookupFunctionError, match=r"status 303 redirects a POST request"):
        table.get(3)


class Customers(System):
    """An API that answers with rows as old as its header `Age` says. `fresh`: its `Cache-Control`, and for how long that lets rows be cached."""

    path = None

    def __init__(self, api: Api, form: Options, fresh: tuple[str, float], age_s: float, etags: bool) -> None:
        control, lifetime_s = fresh
        promised_s = max(min(60.0, lifetime_s), age_s)
        self._api, self._age_s = api, age_s
        self.options = make_options(api, form, {"lookup.provider": "http", "lookup.schema": "id INT, city STRING"})
        early_s = max(age_s, 60.0 - lifetime_s + age_s)
        partial = Way("PARTIAL", AGED, promised_s, promised_s - age_s, answered_s=age_s, early_s=early_s)
        self.ways = (Way("NONE", {}, age_s, answered_s=age_s), partial)
        api.headers = {"Age": f"{age_s:g}", **({"Cache-Control": control} if control else {})}
        api.etags = etags
        api.customers = self  # type: ignore[assignment]

    def __contains__(self, name: str) -> bool:
        return self[name]["city"] is not None

    def __getitem__(self, name: str) -> dict[str, Any]:
        return {"id": int(name), "city": self.world.get_value(int(name), self.world.clock.steady_s - self._age_s)}

    def write(self, writes: Sequence[Write], keys: set[int], commit: bool) -> None:
        """Let the API show the rows of the world."""

    def take_requests(self) -> Requests:
        requests = Requests()
        for _, path, body in self._api.requests:
            requests.keys += (
                body["ids"] if body else map(int, path.rpartition("=" if "=" in path else "/")[2].split(","))
            )
        self._api.count()
        return requests

    @contextlib.contextmanager
    def interrupted(self, between: Callable[[], None]) -> Iterator[None]:
        make, read = RequestTemplate.make, AnswerReader.read

        def make_between(template: RequestTemplate, keys: pa.Table) -> Any:
            between()
            return make(template, keys)

        def read_between(reader: AnswerReader, *args: Any) -> pa.Table:
            between()
            return read(reader, *args)

        with (
            mock.patch.object(RequestTemplate, "make", make_between),
            mock.patch.object(AnswerReader, "read", read_between),
        ):
            yield


FRESH = [("", math.inf), ("max-age=30", 30.0), ("no-cache", 0.0), ("max-age=600", 600.0)]


def test_histories(api: Api, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside random writes no row is older than promised, and no key is asked for that may be cached, on two hosts, whatever the server's headers."""
    for seed in seeds(4):
        form = (dict, of_many, by_body)[seed % 3](*([api] if seed % 3 else []))
        system = Customers(api, form, FRESH[seed % 4], (0.0, 5.0)[seed // 2 % 2], seed % 5 < 3)
        try:
            History(system, cache_dir / str(seed), seed, 2, monkeypatch).run(200 if BY_NIGHT else 20)
        except AssertionError as problem:
            pytest.fail(f"seed {seed}: {problem}", pytrace=False)


LOGINS: list[dict[str, str]] = [{"token": "first"}, {"user": "me", "password": "ö"}, {"X-API-Key": "third"}]
REQUESTED_URLS: list[str] = []


def next_login(url: str) -> dict[str, str]:
    """The function that `lookup.credentials` names. It may run an event loop of its own."""
    asyncio.run(asyncio.sleep(0))
    REQUESTED_URLS.append(url)
    return LOGINS[(len(REQUESTED_URLS) - 1) % len(LOGINS)]


def test_credentials(shop: Api, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials come from the environment or from a function, which is asked again if the server refuses them; no option and no error has them."""
    REQUESTED_URLS.clear()
    table = desk.table("http", make_options(shop, {"lookup.credentials": f"{__name__}:next_login"}))
    table.get(1)
    shop.faults = [shop.misbehave(401), shop.misbehave(401)]
    table.get_many(ids(2))
    assert [headers.get("Authorization", headers.get("X-API-Key")) for headers in shop.asked] == [
        "Bearer first", "Bearer first", "Basic bWU6w7Y=", "third",
    ]  # fmt: skip
    assert [f"{shop.url}/customers/"] * 3 == REQUESTED_URLS
    monkeypatch.setenv("SHOP_TOKEN", "s3cr3ts3cr3t")
    headers = {"lookup.http.header.Authorization": "Bearer ${SHOP_TOKEN}", "lookup.http.header.X-Tenant": "7"}
    options = make_options(shop, headers, ONCE)
    desk.table("http", options).get(1)
    assert (shop.asked[-1]["Authorization"], shop.asked[-1]["X-Tenant"]) == ("Bearer s3cr3ts3cr3t", "7")
    shop.faults = [shop.misbehave(403, b"no access for Bearer s3cr3ts3cr3t")]
    with pytest.raises(LookupFunctionError) as caught:
        desk.table("http", options).get(1)
    assert (
        "s3cr3ts3cr3t"
        not in f"{caught.value} {caught.value.__cause__!r} {parse_options(options | {'lookup.provider': 'http', 'lookup.keys': 'id'})!r}"
    )
    monkeypatch.delenv("SHOP_TOKEN")
    desk.restart()
    with pytest.raises(
        LookupFunctionError,
        match=r"environment variable SHOP_TOKEN, which option lookup.http.header.authorization names, is not set on this machine",
    ):
        desk.table("http", options).get(1)


def test_a_server_that_repeats_a_credential(shop: Api, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a server says is left out of an error if it shows a credential of the request, in whatever spelling."""
    monkeypatch.setenv("SHOP_TOKEN", "abcd1234efgh")
    monkeypatch.setattr(f"{__name__}.LOGINS", [{"user": "me", "password": "k9/z ü"}])
    options = {"lookup.http.header.X-Api-Key": "Key ${SHOP_TOKEN}", "lookup.credentials": f"{__name__}:next_login"}
    table = desk.table("http", make_options(shop, options, ONCE))
    pair = base64.b64encode("me:k9/z ü".encode()).decode()
    for secret in ("abcd1234efgh", "k9/z ü", "k9%2fz+%C3%BC", r"k9\/z ü", r"k9/z \u00fc", f"Basic {pair}", pair):
        for fault in (
            shop.misbehave(403, f"no such key {secret}".encode()),
            shop.misbehave(403, b"x" * 197 + secret.encode()),
            shop.misbehave(200, f"""{{"id": "{secret.replace(chr(92), chr(92) * 2)}"}}""".encode()),
            shop.misbehave(302, Location="http://abcd1234efgh/"),
        ):
            shop.faults = [fault]
            with pytest.raises(
                LookupFunctionError, match=r"shows a credential, so it is left out\)|\[redacted\]"
            ) as caught:
                table.get(1)
            shown = "".join(traceback.format_exception(caught.value))
            assert not any(part in shown for part in ("abc", "k9", pair[:3])), shown
    shop.faults = [shop.misbehave(403, b"no such Key")]
    with pytest.raises(LookupFunctionError, match="status 403 Forbidden: no such Key"):
        table.get(1)


A = "https://api.example.com"
WRONG: list[tuple[dict[str, str], str]] = [
    ({"lookup.provider": "htp"}, r"option lookup.provider = 'htp': expected http, redis or module:factory"),
    ({"lookup.http.url": ""}, r"option lookup.http.url = '' .*: expected the URL of an API"),
    ({"lookup.http.url": "ftp://a/{id}"}, r"expected the URL of an API"),
    ({"lookup.http.url": "https://{id}.example.com/"}, r"expected the URL of an API"),
    ({"lookup.http.url": f"{A}/customers"}, r"the key column \{id\} is missing"),
    ({"lookup.http.url": f"{A}/{{id}}/{{city}}"}, r"\{city\} is not a key column"),
    ({"lookup.http.url": f"{A}/{{id"}, r"expected key columns in braces"),
    ({"lookup.http.url": f"{A}/{{id!r}}"}, r"expected key columns in braces"),
    ({"lookup.http.url": f"{A}/{{id}}?api_key=abc"}, r"option lookup.http.url holds a credential"),
    ({"lookup.http.url": "https://me:hunter2@api.example.com/{id}"}, r"option lookup.http.url holds a credential"),
    ({"lookup.http.url": "https://[::1/{id}"}, r"expected the URL of an API"),
    ({"lookup.http.url": "https://m e:hunter2@api.example.com/{id}"}, r"option lookup.http.url = 'https://\[redacted\]@api.example.com/\{id\}'"),
    ({"lookup.http.body": "{"}, r"option lookup.http.body = '\{' .*: expected JSON"),
    ({"lookup.http.url": A, "lookup.http.body": '{"ids": "{keys}", "id": "{id}"}'}, r"remove the other names in braces"),
    ({"lookup.http.url": f"{A}/{{id}}", "lookup.http.body": '{"ids": "{keys}"}'}, r"option lookup.http.url = '.*/\{id\}': \{keys\} stands for all key"),
    ({"lookup.http.url": f"{A}/{{city}}", "lookup.http.body": '{"id": "{id}"}'}, r"option lookup.http.url = .*\{city\} is not a key column"),
    ({"lookup.http.url": f"{A}/{{id}}", "lookup.http.body": '{"c": "{city}"}'}, r"option lookup.http.body = .*\{city\} is not a key column"),
    ({"lookup.http.url": A, "lookup.http.body": '{"ids": 1}'}, r"the key column \{id\} is missing"),
    ({"lookup.http.url": A, "lookup.http.body": '{"ids": "{keys}", "password": "hunter2"}'}, r"option lookup.http.body holds a credential"),
    ({"lookup.http.url": f"{A}?ids={{keys}}", "lookup.keys": "id,name"}, r"\{keys\} in a URL stands for the values of one key column"),
    ({"lookup.http.rows": "a["}, r"option lookup.http.rows = 'a\[' .*: expected a JMESPath expression"),
    ({"lookup.http.header.authorization": "Bearer hunter2hunter2"}, r"option lookup.http.header.authorization holds a credential"),
    ({"lookup.http.header.X-API-Key": "hunter2"}, r"option lookup.http.header.x-api-key holds a credential"),
    ({"lookup.http.header.X-API-Key": "hunter2 ${X}"}, r"option lookup.http.header.x-api-key holds a credential"),
    ({"lookup.http.header.Host": "a"}, r"option lookup.http.header.host: lookupcache sets this header itself"),
    ({"lookup.http.header.X": "a\r\nY: b"}, r"the value has a line break or a NUL"),
    ({"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "5"}, r"set lookup.partial-cache.expire-after-write"),
    ({"path": "/t"}, r"option path has no meaning with lookup.provider = 'http'"),
    ({"lookup.schema": "id DOUBLE"}, r"key column 'id' is double, whose values have more than one spelling"),
    ({"lookup.schema": "no BIGINT"}, r"no column 'id'"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "expected"), WRONG, ids=[expected for _, expected in WRONG])
def test_options_that_are_wrong(cache_dir: Path, options: dict[str, str], expected: str) -> None:
    """Wrong options are refused by name, without a request and without a credential."""
    whole = {
        "lookup.provider": "http",
        "lookup.keys": "id",
        "lookup.schema": "id BIGINT, name STRING",
        "lookup.http.url": f"{A}/{{id}}",
    }
    whole |= {"lookup.cache.dir": str(cache_dir)} | options
    with pytest.raises((OptionError, SchemaError), match=expected) as caught:
        LookupTable(whole.pop("path", None), whole)
    assert "hunter2" not in str(caught.value)


def test_options_that_are_missing() -> None:
    """Options that are missing are named."""
    for options, expected in (
        ({"lookup.provider": "http", "lookup.keys": "id"}, r"option lookup.http.url is missing"),
        ({"lookup.provider": "http", "lookup.keys": "id", "lookup.http.url": f"{A}/{{id}}"}, r"option lookup.schema is missing"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=expected):
            parse_options(options)


def test_only_columns_that_are_read(shop: Api, desk: Desk) -> None:
    """A value of a column that is not read may be anything."""
    shop.customers["1"]["balance"] = "much"
    assert desk.table("http", make_options(shop, {"lookup.columns": "name"})).get(1) == [{"id": 1, "name": "name 1"}]


def test_a_server_that_comes_back(shop: Api, desk: Desk) -> None:
    """Lookups fail while it is away, with cached keys answered, and go on when it is back at its address."""
    server = StoppableApi(shop)
    options = make_options(shop, PARTIAL, ONCE) | {
        "lookup.http.url": f"http://127.0.0.1:{server.port}/customers/{{id}}"
    }
    table = desk.table("http", options)
    assert table.get(1) == [row(1)]
    server.stop()
    with pytest.raises(LookupFunctionError, match=r"key id = 2: .*ClientConnectorError"):
        table.get_many(ids(1, 2))
    assert table.get(1) == [row(1)]
    server.start()
    assert table.get_many(ids(1, 2)).num_rows == 2
    server.stop()


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    return


def test_proxies_of_the_environment(shop: Api, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that the environment names is used, but not for hosts that it excepts."""
    monkeypatch.setenv("http_proxy", shop.url)
    options = make_options(shop) | {"lookup.http.url": "http://api.invalid/customers/{id}"}
    assert desk.table("http", options).get(1) == [row(1)]
    assert shop.requests[0][1] == "http://api.invalid/customers/1"
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert desk.table("http", make_options(shop)).get(1) == [row(1)]


def test_certificates_are_verified(shop: Api, desk: Desk, tmp_path: Path) -> None:
    """A server whose certificate nobody vouches for gets no request."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    how = f"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=127.0.0.1 -keyout {key} -out {certificate}"
    subprocess.run(["openssl", *how.split()], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = StoppableApi(shop, context)
    options = make_options(shop, ONCE) | {"lookup.http.url": f"https://127.0.0.1:{server.port}/customers/{{id}}"}
    with pytest.raises(LookupFunctionError, match=r"GET https://.*CERTIFICATE_VERIFY_FAILED"):
        desk.table("http", options).get(1)
    server.stop()
    assert shop.count() == 0


@pytest.mark.spark
@pytest.mark.nightly  # by day: test_databases.test_through_spark
def test_a_stream(spark: SparkSession, shop: Api, tmp_path: Path) -> None:
    """Each micro-batch asks for the keys that no earlier one has asked for, once, from Spark's workers; a server that fails for a moment ends no stream."""
    options = make_options(shop, PARTIAL, {"lookup.provider": "http", "lookup.cache.dir": str(tmp_path / "cache")})
    (tmp_path / "facts").mkdir()
    facts = spark.readStream.schema("id LONG").parquet(str(tmp_path / "facts"))
    joined = lookup_join(facts, None, "id", options=options).select("id", "name")
    query = joined.writeStream.format("memory").queryName("of_http").start()
    try:
        for number, keys in enumerate(([1, 2, 9, 1], [2, 3, 9])):
            shop.faults = [shop.misbehave(503, b"", Retry_After="0")]
            pq.write_table(pa.table({"id": keys}), tmp_path / "facts" / f"{number}.parquet")
            query.processAllAvailable()
            assert shop.count() == (4, 2)[number]
        rows = sorted(tuple(fields) for fields in spark.table("of_http").collect())
        assert rows == sorted(
            [(1, "name 1"), (1, "name 1"), (2, "name 2"), (2, "name 2"), (3, "name 3"), (9, None), (9, None)], key=str
        )
    finally:
        query.stop()
