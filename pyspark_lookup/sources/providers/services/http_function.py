"""`HttpFunction`: looks up keys by requests to an HTTP API, on one client that keeps its connections."""

from __future__ import annotations

import asyncio
import base64
import collections
import dataclasses
import itertools
import math
import os
import re
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from pyspark_lookup.core.credentials import find_origin, list_header_secrets, redact_server_text
from pyspark_lookup.errors import LookupFunctionError, OptionError, SchemaError, foreign_text, raise_ours
from pyspark_lookup.sources.credentials import CREDENTIALS, Credentials
from pyspark_lookup.sources.providers.call_runner import call_and_await
from pyspark_lookup.sources.providers.functions import AsyncLookupFunction, DatedRows, FinalLookupError
from pyspark_lookup.sources.providers.services.answers import AnswerReader
from pyspark_lookup.sources.providers.services.freshness import (
    age_s,
    has_next_page,
    is_storable,
    lifetime_s,
    retry_after_s,
)
from pyspark_lookup.sources.providers.services.http_request import Request, RequestTemplate

if TYPE_CHECKING:
    import aiohttp
    import yarl

HEADER = "lookup.http.header."
VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)\}")
"""An environment variable in the value of a header."""
_CHUNK_BYTES = 64 * 1024
_ANSWER_BYTES = 64 * 1024**2
_STORED_BYTES = 16 * 1024**2
_ENTRY_BYTES = 1024  # of Python's objects for each stored answer
# What is asked of an answer that the server has confirmed (status 304) without repeating it. Its Age is that of the confirmation.
_KEPT_HEADERS = frozenset({"cache-control", "content-type", "date", "etag", "expires", "last-modified"})
_SHOWN_CHARACTERS = 200
_ERROR_BYTES = 16 * 1024  # of an error are read; a credential that begins in the part that is shown ends before that
_CONNECT_S = 10.0
_REDIRECTS = 5
_PAUSE_S = 3600.0  # the longest pause that a server can ask for
_REDIRECTED, _MISSING, _PAUSING = (301, 302, 303, 307, 308), (404, 410), (429, 503)
_PASSING = (408, 425, 429)  # the client errors that RFC 9110, 8470 and 6585 let a client repeat


@dataclasses.dataclass(frozen=True)
class Clock:
    """The clocks of a function: `wall_s` and `steady_s` return a time in seconds, `sleep` waits."""

    wall_s: Callable[[], float] = time.time
    steady_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer with rows. `url`: of the request that it answers, after redirects. `content`: None if the key has no row. `headers`: by names in small
    letters."""

    url: str
    content: bytes | None
    headers: Mapping[str, str]


class Answers:
    """The last answers that a later request may revalidate, by the URL that was requested first. They take about `most_bytes` of memory at most."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._answers: collections.OrderedDict[str, Answer] = collections.OrderedDict()

    def get(self, url: str) -> Answer | None:
        return self._answers.get(url)

    def put(self, url: str, answer: Answer) -> None:
        self.drop(url)
        if answer.content is None or not validators(answer.headers):
            return
        kept = {name: text for name, text in answer.headers.items() if name in _KEPT_HEADERS}
        answer = dataclasses.replace(answer, headers=kept)
        size = _memory_bytes(url, answer)
        if size > self._most_bytes:
            return
        self._answers[url] = answer
        self._bytes += size
        while self._bytes > self._most_bytes:
            self.drop(next(iter(self._answers)))

    def drop(self, url: str) -> None:
        answer = self._answers.pop(url, None)
        self._bytes -= 0 if answer is None else _memory_bytes(url, answer)


def _memory_bytes(url: str, answer: Answer) -> int:
    parts = url, answer.url, answer.content, *answer.headers.values()
    return sum(map(sys.getsizeof, parts)) + _ENTRY_BYTES


def validators(headers: Mapping[str, str]) -> dict[str, str]:
    """The request headers that ask the server whether an answer with these headers is still valid; none if it cannot be asked that."""
    if "etag" in headers:
        return {"If-None-Match": headers["etag"]}
    return {"If-Modified-Since": headers["last-modified"]} if "last-modified" in headers else {}


class HttpFunction(AsyncLookupFunction):
    """Looks up keys in an HTTP API.

    `headers`: headers of each request, in which `${NAME}` is an environment variable. `login`: returns `user` and `password`, a `token`, or
    headers. `timeout_option`: the option that has set `timeout_s`. `pause_at_most_s`: how long a lookup waits if the server asks for a pause.
    """

    def __init__(
        self,
        requests: RequestTemplate,
        reader: AnswerReader,
        *,
        origin: str,
        batch_size: int,
        timeout_s: float,
        timeout_option: str = "lookup.http.timeout",
        pause_at_most_s: float,
        headers: Mapping[str, str],
        login: Credentials | None,
        answer_bytes: int = _ANSWER_BYTES,
        stored_bytes: int = _STORED_BYTES,
        clock: Clock | None = None,
    ) -> None:
        self.batch_size = batch_size
        self._requests = requests
        self._reader = reader
        self._origin = origin
        self._timeout_s = timeout_s
        self._timeout_option = timeout_option
        self._pause_at_most_s = pause_at_most_s
        self._headers = headers
        self._login = login
        self._answer_bytes = answer_bytes
        self._answers = Answers(stored_bytes)
        self._clock = clock or Clock()
        self._session: aiohttp.ClientSession | None = None
        self._login_headers: dict[str, str] | None = None
        self._session_secrets: list[str] = []
        # Of the last two logins: requests with the earlier one may still be under way.
        self._login_secrets = collections.deque[list[str]](maxlen=2)
        self._resume_s = -math.inf  # no request before this time (steady clock)

    async def open(self) -> None:
        import aiohttp

        headers = {"User-Agent": "lookupcache", "Accept": "application/json"}
        filled = {name: _with_variables(name, value) for name, value in self._headers.items()}
        headers |= {name.title(): value for name, value in filled.items()}
        self._session_secrets = [
            os.environ[name] for value in self._headers.values() for name in VARIABLE.findall(value)
        ]
        for name, value in filled.items():
            if value != self._headers[name]:
                self._session_secrets += list_header_secrets(value)
        if self._requests.method == "POST":
            headers.setdefault("Content-Type", "application/json")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # lookup.async.capacity limits the requests
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
            proxy=_proxy(self._origin),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=min(_CONNECT_S, self._timeout_s)),
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def lookup(self, keys: pa.Table) -> DatedRows:
        request = self._requests.make(keys)
        if request is None:
            return DatedRows(self._reader.schema.empty_table())
        answer = await self._ask(request)
        lifetime = lifetime_s(answer.headers, self._clock.wall_s())
        if answer.content is None:
            return DatedRows(self._reader.schema.empty_table(), age_s(answer.headers), lifetime)
        key = None if self._requests.batch else {name: keys.column(name)[0] for name in keys.column_names}
        try:
            rows = self._reader.read(answer.content, key)
        except (ValueError, SchemaError) as problem:
            content_type = answer.headers.get("content-type", "no type")
            says = f"the answer ({self._redact(content_type)}) cannot be read: {self._redact(str(problem))}"
            raise_ours(self._error(request, says), None)
        return DatedRows(rows, age_s(answer.headers), lifetime)

    async def _ask(self, request: Request) -> Answer:
        """The answer to a request. If there is none, raises LookupFunctionError, which names the URL."""
        import aiohttp

        url, stored = request.url, self._answers.get(request.url) if request.body is None else None
        try:
            for _ in range(_REDIRECTS + 1):
                # Other resources, to which a redirect may lead by now, may have the same validators.
                revalidated = stored if stored is not None and stored.url == url else None
                conditions = {} if revalidated is None else validators(revalidated.headers)
                await self._await_turn(request)
                login = await self._login_header()
                async with self._client.request(
                    self._requests.method,
                    _as_url(url),
                    data=request.body,
                    headers={**conditions, **login},
                    allow_redirects=False,
                ) as response:
                    if response.status not in _REDIRECTED:
                        return await self._answer(request, url, response, revalidated, login)
                    url = self._redirected(request, url, response)
        except aiohttp.ConnectionTimeoutError:  # also a TimeoutError
            raise self._error(
                request,
                f"no connection to the server within {min(_CONNECT_S, self._timeout_s):g} s: see whether lookup.http.url is right, and whether this "
                "machine may connect to it",
            ) from None
        except asyncio.TimeoutError:
            raise self._error(
                request,
                f"no answer within {self._timeout_option} = {self._timeout_s:g} s: raise the option if the API needs longer",
            ) from None
        except (aiohttp.ClientError, OSError) as problem:
            raise_ours(self._error(request, f"{type(problem).__name__}: {self._redact(str(problem))}"), None)
        raise self._error(request, f"more than {_REDIRECTS} redirects: correct lookup.http.url")

    async def _answer(
        self,
        request: Request,
        url: str,
        response: aiohttp.ClientResponse,
        stored: Answer | None,
        login: Mapping[str, str],
    ) -> Answer:
        """The answer from `url`. `stored`: the one whose validators were sent."""
        headers = {name.lower(): ", ".join(response.headers.getall(name)) for name in response.headers}
        if response.status == 304 and stored is not None:
            answer = Answer(url, stored.content, {**stored.headers, **headers})
        elif response.status == 204 or (response.status in _MISSING and not self._requests.batch):
            answer = Answer(url, None, headers)
        elif response.status == 200:
            if has_next_page(headers):
                advice = (
                    "lower lookup.http.batch-size"
                    if self._requests.batch
                    else "make lookup.http.url ask for all rows of a key on one page"
                )
                raise self._error(request, f"the answer has a next page, which is not read: {advice}")
            answer = Answer(url, await self._content(request, response), headers)
        else:
            raise await self._refused(request, response, headers, login)
        if request.body is None and is_storable(answer.headers):
            self._answers.put(request.url, answer)
        else:
            self._answers.drop(request.url)
        return answer

    async def _content(self, request: Request, response: aiohttp.ClientResponse) -> bytes:
        chunks, size = [], 0
        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
            chunks.append(chunk)
            size += len(chunk)
            if size > self._answer_bytes:
                response.close()
                advice = (
                    "lower lookup.http.batch-size"
                    if self._requests.batch
                    else "make lookup.http.url ask for fewer fields"
                )
                raise self._error(request, f"the answer has more than {self._answer_bytes} bytes: {advice}")
        return b"".join(chunks)

    async def _refused(
        self, request: Request, response: aiohttp.ClientResponse, headers: Mapping[str, str], login: Mapping[str, str]
    ) -> LookupFunctionError:
        """The error for an answer whose status means that it has no rows."""
        pause_s = retry_after_s(headers, self._clock.wall_s()) if response.status in _PAUSING else None
        if pause_s is not None:
            self._resume_s = max(self._resume_s, self._clock.steady_s() + min(pause_s, _PAUSE_S))
        is_final = 400 <= response.status < 500 and response.status not in _PASSING
        if response.status == 401 and self._login is not None:
            is_final = False  # the next attempt asks the function of lookup.credentials again
            if login is self._login_headers:
                self._login_headers = None
        body = bytearray()
        while len(body) < _ERROR_BYTES and (chunk := await response.content.read(_ERROR_BYTES - len(body))):
            body += chunk
        text = body.decode(errors="replace").strip()
        says = f": {self._redact(text, _SHOWN_CHARACTERS)}" if text else ""
        hint = (
            "; to a request for many keys, the API must answer 200 even if it has none of their rows"
            if response.status in _MISSING
            else ""
        )
        return self._error(
            request, f"status {response.status} {self._redact(response.reason or '')}{says}{hint}", is_final
        )

    def _redirected(self, request: Request, url: str, response: aiohttp.ClientResponse) -> str:
        """The URL to which an answer redirects, on the same server. Raises LookupFunctionError for any other."""
        try:
            target = urllib.parse.urljoin(url, response.headers.get("Location", ""))
        except ValueError:
            target = ""
        if request.body is not None and response.status not in (307, 308):
            raise self._error(request, f"status {response.status} redirects a POST request: correct lookup.http.url")
        origin = find_origin(target)
        if origin is None or origin != find_origin(url):
            place = "an address that is not a URL" if origin is None else self._redact("{}://{}:{}".format(*origin))
            raise self._error(
                request,
                f"status {response.status} redirects to {place}, which is not followed: correct lookup.http.url",
            )
        return target

    async def _await_turn(self, request: Request) -> None:
        """Wait until the server allows requests again (Retry-After). Raises LookupFunctionError at once if that takes longer than a lookup may."""
        while (pause_s := self._resume_s - self._clock.steady_s()) > 0:
            if pause_s > self._pause_at_most_s:
                raise self._error(
                    request,
                    f"the server accepts no requests for another {pause_s:.0f} s (Retry-After): try again then",
                )
            await self._clock.sleep(pause_s)

    async def _login_header(self) -> dict[str, str]:
        if self._login_headers is None:
            login = {} if self._login is None else await call_and_await(self._login, self._origin)
            self._login_headers = _headers_of(login)
            self._login_secrets.append(
                [part for text in self._login_headers.values() for part in list_header_secrets(text)]
            )
        return self._login_headers

    def _redact(self, text: str, most: int | None = None) -> str:
        """What the server says, for an error, at most `most` characters of it; a hint instead, if the text shows a credential of a request."""
        redacted_text = redact_server_text(text, itertools.chain(self._session_secrets, *self._login_secrets))
        return redacted_text if redacted_text != text else text[:most]

    @property
    def _client(self) -> aiohttp.ClientSession:
        assert self._session is not None
        return self._session

    def _error(self, request: Request, says: str, is_final: bool = False) -> LookupFunctionError:
        kind = FinalLookupError if is_final else LookupFunctionError
        return kind(f"{self._requests.method} {request.url}: {foreign_text(says)}")


def _as_url(text: str) -> yarl.URL:
    import yarl

    return yarl.URL(text, encoded=True)  # a value that is encoded must not be decoded again


def _proxy(url: str) -> str | None:
    """The proxy that the environment names for a URL, as other programs do: `HTTPS_PROXY`, `HTTP_PROXY`, `NO_PROXY`."""
    parts = urllib.parse.urlsplit(url)
    return None if urllib.request.proxy_bypass(parts.netloc) else urllib.request.getproxies().get(parts.scheme)


def _with_variables(name: str, value: str) -> str:
    """A header's value with its environment variables. Raises OptionError for one that is not set, or has a line break or a NUL."""

    def variable(match: re.Match[str]) -> str:
        text = os.environ.get(match[1])
        if not text or re.search(r"[\r\n\0]", text):
            problem = "has a line break or a NUL: set it to one line" if text else "is not set on this machine: set it"
            raise OptionError(f"environment variable {match[1]}, which option {HEADER}{name} names, {problem}")
        return text

    return VARIABLE.sub(variable, value)


def _headers_of(login: Mapping[str, str]) -> dict[str, str]:
    """The headers of a request with credentials: `user` and `password`, a `token`, or headers by name."""
    headers = {name: text for name, text in login.items() if name not in ("user", "password", "token")}
    if "token" in login:
        headers["Authorization"] = f"Bearer {login['token']}"
    elif "user" in login or "password" in login:
        pair = f"{login.get('user', '')}:{login.get('password', '')}".encode()
        headers["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
    if any(re.search(r"[\r\n\0]", name + text) for name, text in headers.items()):
        raise OptionError(
            f"the function of option {CREDENTIALS} returned a header with more than one line: make it return one line"
        )
    return headers
