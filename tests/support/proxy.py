"""A proxy before the S3 server: a request is carried out or not, and its answer is lost or another one; by number, kind or at random."""

import collections
import dataclasses
import enum
import functools
import itertools
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends

from tests.support.s3server import Application, S3Server

Headers = list[tuple[str, str]]
Decision = tuple[bool, str | None]
"""Whether a request is carried out, and what it is answered with (None: what the store says)."""
_REFUSALS = {
    "400": (400, "ExpiredToken"), "403": (403, "AccessDenied"), "404": (404, "NoSuchKey"),
    "409": (409, "ConditionalRequestConflict"), "412": (412, "PreconditionFailed"), "500": (500, "InternalError"),
    "503": (503, "SlowDown"),
}  # fmt: skip
_CHANGED = ("damaged", "bare", "damaged bare", "cut", "short", "empty", "page", "blank")
ANSWERS = ("lost", *_REFUSALS, *_CHANGED)
"""What a request may be answered with.

lost: the connection ends without an answer. A number: a refusal, as S3 words it. damaged: bytes of the body are others. bare:
the headers that say of which version it is, and its checksum, are missing. cut: the connection ends within the body. short:
half of the body, as if that were all. empty: no body. page: a page that a gateway gives, with status 200. blank: status 200
and nothing else.
"""
AT_RANDOM = {
    "refused": (False, "503"), "lost": (False, "lost"), "unanswered": (True, "lost"), "truncated": (True, "cut"),
}  # fmt: skip
"""What may happen at random, by name: whether the request is carried out, and its answer."""
GRAVES = "graves"
"""The bucket that keeps data files which were removed, under their buckets and names."""
_DELAY_S = 0.5
_PAGE = b"<!DOCTYPE html><html><head><title>Sign in</title></head><body>Please sign in to go on.</body></html>"
_TELLING = ("etag", "last-modified", "x-amz-")


class Mode(enum.Enum):
    """What a fault is about: which attempts, and whether they are carried out."""

    DONE = "carried out, and answered so"
    NOT_DONE = "not carried out, and answered so"
    RETRIED = "carried out, its answer lost, and the next attempt answered so"
    LASTING = "carried out, its answer lost, and everything after it answered so"
    OUTAGE = "not carried out, and everything from it on answered so"


@dataclasses.dataclass(frozen=True)
class Fault:
    """What becomes of the request of that number (from 1 on)."""

    number: int
    answer: str
    mode: Mode

    def __str__(self) -> str:
        return f"request {self.number} {self.mode.value}: {self.answer}"


@dataclasses.dataclass(frozen=True)
class Sent:
    """A request as the writer sent it: head, list, get, put or delete, of an object or a prefix, and of which bytes."""

    kind: str
    key: str
    range: str = ""


@dataclasses.dataclass(frozen=True)
class Answer:
    status: str
    headers: Headers
    body: bytes

    def without(self, *names: str) -> "Answer":
        """The answer without headers whose names begin so."""
        return dataclasses.replace(self, headers=[h for h in self.headers if not h[0].lower().startswith(names)])


def list_faults(requests: list[Sent]) -> list[Fault]:
    """Every fault that can hit one of `requests`, the requests of one write: each request with each mode and each answer that make a difference."""
    return [
        Fault(n, a, m)
        for n, request in enumerate(requests, 1)
        for m in Mode
        for a in ANSWERS
        if _differs(request, a, m)
    ]


def _differs(request: Sent, answer: str, mode: Mode) -> bool:
    """Whether such a fault differs in its effect from all that come before it in `ANSWERS` and `Mode`."""
    whole = _is_whole(answer)
    if request.kind not in ("get", "list") and answer in ("damaged", "damaged bare", "cut", "short", "empty"):
        return False  # their answers have no body
    if mode is Mode.NOT_DONE:
        return whole and request.kind in ("put", "delete")  # else nobody can tell whether it was carried out
    if mode is Mode.OUTAGE:  # to a read it makes no difference whether it was carried out before
        return whole and (request.kind in ("put", "delete") or answer == "lost")
    return not (mode is Mode.LASTING and answer == "lost" and request.kind not in ("put", "delete"))  # as an outage


def _is_whole(answer: str) -> bool:
    """Whether nothing is left of the answer that there was."""
    return answer in _REFUSALS or answer in ("lost", "page", "blank")


def backend() -> Any:
    """The storage that all servers of this process share."""
    return s3_backends[DEFAULT_ACCOUNT_ID]["aws"]


def read_objects(bucket: str, prefix: str = "") -> dict[str, bytes]:
    """What lies in a bucket, by its name, read without a request."""
    keys = backend().get_bucket(bucket).keys
    entries = ((name, keys.get(name)) for name in list(keys) if name.startswith(prefix))
    return {name: key.value for name, key in entries if key is not None}


class Proxy:
    """Counts the requests of a write, and changes the answers of an `S3Server` to those that the fault is about.

    `requests`: those of the write so far. `counts`: how many requests had which fault at random; `whole` are the others.
    """

    def __init__(self, server: S3Server) -> None:
        self._server = server
        self._lock = threading.Lock()
        self.requests: list[Sent] = []
        self.counts = collections.Counter[str]()
        self._fault: Fault | None = None
        self._at_work = False
        self._lost_request: Sent | None = None
        self._arrived = 0
        self._rng = random.Random()

    def begin(self, fault: Fault | None, seed: int = 0) -> None:
        """Count from here on, and let that become of a request (None: nothing). `seed`: where the bytes of answers are damaged."""
        self.requests, self._fault, self._lost_request, self._arrived = [], fault, None, 0
        self._rng.seed(seed)
        self._at_work = True
        self._server.between = functools.partial(self._answer, self._decide)

    def begin_always(self, kind: str, answer: str, first: int, times: int | None) -> None:
        """Answer requests of a kind so, so many times from the one with the number `first` on; they are not carried out."""
        self.begin(None)
        counts = itertools.count()

        def decide(environ: dict[str, Any]) -> Decision:
            number = next(counts) if request_kind(environ) == kind else -1
            acts = number >= first and (times is None or number < first + times)
            return not acts or not _is_whole(answer), answer if acts else None

        self._server.between = functools.partial(self._answer, decide)

    def begin_at_random(self, shares: Mapping[str, float], seed: int) -> None:
        """Let these shares of all requests be `delayed` or as `AT_RANDOM` says, and keep data files that are removed."""
        self._rng.seed(seed)
        if GRAVES not in backend().buckets:
            backend().create_bucket(GRAVES, "us-east-1")

        def decide(environ: dict[str, Any]) -> Decision:
            with self._lock:
                drawn, delay_s = self._rng.random(), self._rng.uniform(0, _DELAY_S)
                ends = itertools.accumulate(shares.values())
                name = next((name for name, end in zip(shares, ends, strict=True) if drawn < end), "whole")
                self.counts[name] += 1
            if name == "delayed":
                time.sleep(delay_s)
            carried_out, answer = AT_RANDOM.get(name, (True, None))
            if carried_out:
                _bury(environ)
            return carried_out, answer

        self._server.between = functools.partial(self._answer, decide)

    def end(self) -> None:
        """Let the store answer as it does."""
        self._at_work = False
        self._server.between = None

    def takes(self, request: Sent) -> bool:
        """Whether a request, which is counted, has to go through the server."""
        with self._lock:
            if not self._at_work:
                return False
            self.requests.append(request)
            fault, number = self._fault, len(self.requests)
            if fault is None or number == fault.number:
                self._lost_request = request
                return True
            if number < fault.number:
                return False
            if fault.mode is Mode.RETRIED and request == self._lost_request:
                self._lost_request = None
                return True
            return fault.mode in (Mode.LASTING, Mode.OUTAGE)

    def _answer(
        self,
        decide: Callable[[dict[str, Any]], Decision],
        environ: dict[str, Any],
        start: Callable[..., Any],
        app: Application,
    ) -> Iterable[bytes]:
        carried_out, name = decide(environ)
        with self._lock:
            rng = random.Random(self._rng.getrandbits(32))
        store_answer = _ask(environ, app) if carried_out else _unasked(environ)
        if name == "lost":
            _hang_up(environ)
        answer = store_answer if name is None else _changed(store_answer, name, rng)
        start(answer.status, answer.headers)
        if name == "cut":
            return _cut(environ, answer.body)
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else answer.body]

    def _decide(self, environ: dict[str, Any]) -> Decision:
        fault = self._fault
        with self._lock:
            self._arrived += 1
            first = self._arrived == 1
        if fault is None:
            return True, None
        if first:
            if fault.mode in (Mode.RETRIED, Mode.LASTING):
                return True, "lost"
            return fault.mode is Mode.DONE, fault.answer
        return not _is_whole(fault.answer), fault.answer


def request_kind(environ: dict[str, Any]) -> str:
    """The kind of a request, as `Sent` has it."""
    method: str = environ["REQUEST_METHOD"]
    return "list" if method == "GET" and "list-type" in environ["QUERY_STRING"] else method.lower()


def _ask(environ: dict[str, Any], app: Application) -> Answer:
    """The store's answer."""
    responses: list[tuple[str, Headers]] = []

    def start(status: str, headers: Headers, exc_info: object = None) -> Callable[[bytes], object]:
        responses.append((status, headers))
        return lambda data: None

    body = b"".join(app(environ, start))
    status, headers = responses[-1]
    return Answer(status, headers, body)


def _unasked(environ: dict[str, Any]) -> Answer:
    """An empty answer without asking the store; the request's body is read, as its sender waits for that."""
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    return Answer("200 OK", [("Content-Length", "0")], b"")


def _bury(environ: dict[str, Any]) -> None:
    """Keep what is about to be removed: a data file; or any events of logs, as the request's body says which ones."""
    bucket, _, name = environ["PATH_INFO"].lstrip("/").partition("/")
    if environ["REQUEST_METHOD"] == "POST" and "delete" in environ["QUERY_STRING"]:
        buried = {key: value for key, value in read_objects(bucket).items() if "/_lookup/log/" in key}
    elif environ["REQUEST_METHOD"] == "DELETE" and name.endswith(".parquet"):
        buried = read_objects(bucket, name)
    else:
        return
    for key, value in buried.items():
        backend().put_object(GRAVES, f"{bucket}/{key}", value)


def _hang_up(environ: dict[str, Any]) -> None:
    connection: socket.socket = environ["werkzeug.socket"]
    connection.shutdown(socket.SHUT_RDWR)
    raise ConnectionResetError("the answer is lost")


def _cut(environ: dict[str, Any], body: bytes) -> Iterable[bytes]:
    yield body[: len(body) // 2]
    _hang_up(environ)


def _changed(answer: Answer, name: str, rng: random.Random) -> Answer:
    if name in _REFUSALS:
        status, code = _REFUSALS[name]
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
        # The answer to a HEAD has the length of a body that does not come.
        headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
        return Answer(f"{status} {code}", headers, body)
    if name in ("page", "blank"):
        body = _PAGE if name == "page" else b""
        return Answer("200 OK", [("Content-Type", "text/html"), ("Content-Length", str(len(body)))], body)
    if name.endswith("bare"):
        answer = answer.without(*_TELLING)
    if name.startswith("damaged"):
        answer = dataclasses.replace(answer, body=_damaged(answer.body, rng))
    if name in ("short", "empty"):
        body = answer.body[: len(answer.body) // 2 if name == "short" else 0]
        remaining = answer.without("content-length")
        return dataclasses.replace(
            remaining, headers=[*remaining.headers, ("Content-Length", str(len(body)))], body=body
        )
    return answer


def _damaged(body: bytes, rng: random.Random) -> bytes:
    """As many bytes, of which some are others: at one place, or a stretch of them."""
    changed = bytearray(body)
    if changed:
        at = rng.randrange(len(changed))
        for place in range(at, min(at + rng.choice([1, 1, 8, 64]), len(changed))):
            changed[place] ^= 1 << rng.randrange(8)
    return bytes(changed)
