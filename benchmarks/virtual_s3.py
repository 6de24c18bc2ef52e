"""A model of S3 in virtual time: requests take time, bytes need bandwidth, and too many requests are refused.

`StoreModel` says whether a request is carried out and when its answer is complete. `VirtualS3` is the package's own S3 store over a bucket in
memory, with such a model: what it lists, reads and pins, and how it takes a refusal, is the code that talks to S3.
"""

from __future__ import annotations

import bisect
import dataclasses
import datetime
import hashlib
import math
import random
from collections.abc import Mapping
from typing import Any

from botocore.exceptions import ClientError

from benchmarks.virtual_time import VirtualTime
from pyspark_lookup.storage.stores.s3 import S3Store

CLASSES = {"get": "read", "head": "read", "list": "list", "put": "write", "delete": "write"}
"""The rate limit that each kind of request counts against. LIST has one of its own, which S3 does not document."""
_P99 = 2.326  # the 99th percentile, in standard deviations above the median


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a store can do. Rates are requests a second and prefix, times are seconds, bandwidth is bytes a second.

    `burst_s`: after a pause, the requests of this many seconds may come at once. Latencies have a log-normal distribution.
    """

    rates: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"read": 5500.0, "list": 3500.0, "write": 3500.0}
    )
    burst_s: float = 1.0
    latency_s: float = 0.1
    latency_p99_s: float = 0.2
    connection_bytes_per_s: float = 90e6
    host_bytes_per_s: float = 1.25e9

    def scaled(self, share: float) -> Limits:
        """The limits that a share of the hosts meets when all hosts share these limits."""
        return dataclasses.replace(self, rates={name: rate * share for name, rate in self.rates.items()})


class StoreModel:
    """Answers requests within limits. Refused requests do not count against the rate. Each run needs its own instance."""

    def __init__(self, limits: Limits, seed: int) -> None:
        self._limits = limits
        self._rng = random.Random(seed)
        self._sigma = math.log(limits.latency_p99_s / limits.latency_s) / _P99
        self._tokens: dict[tuple[str, str], tuple[float, float]] = {}
        self._link_free_s: dict[int, float] = {}

    def ask(self, now_s: float, host: int, prefix: str, kind: str, size: int) -> tuple[bool, float]:
        """(whether a request is carried out, the time at which its answer is complete). `size`: the bytes of the answer."""
        limits, of_class = self._limits, CLASSES[kind]
        rate = limits.rates[of_class]
        most = max(rate * limits.burst_s, 1.0)
        tokens, since_s = self._tokens.get((prefix, of_class), (most, now_s))
        tokens = min(tokens + (now_s - since_s) * rate, most)
        accepted = tokens >= 1
        self._tokens[prefix, of_class] = tokens - accepted, now_s
        first_byte_s = now_s + limits.latency_s * math.exp(self._sigma * self._rng.gauss(0, 1))
        if not accepted or not size:
            return accepted, first_byte_s
        free_s = max(first_byte_s, self._link_free_s.get(host, 0.0)) + size / limits.host_bytes_per_s
        self._link_free_s[host] = free_s
        return True, max(free_s, first_byte_s + size / limits.connection_bytes_per_s)


@dataclasses.dataclass
class Request:
    """A request as the store sees it. `table`: the first part of its key, which counts as its prefix. `size`: bytes of the answer."""

    host: int
    table: str
    kind: str
    size: int
    start_s: float
    end_s: float
    accepted: bool


@dataclasses.dataclass(frozen=True)
class _Stored:
    data: bytes
    etag: str
    modified: datetime.datetime

    @property
    def about(self) -> dict[str, Any]:
        return {"ETag": f'"{self.etag}"', "LastModified": self.modified}


class Bucket:
    """Objects by key, in order."""

    def __init__(self) -> None:
        self.objects: dict[str, _Stored] = {}
        self.keys: list[str] = []

    def put(self, key: str, data: bytes | None, at_s: float) -> None:
        """Put an object at a Unix time, or remove it (`data` None)."""
        if data is None:
            if self.objects.pop(key, None) is not None:
                self.keys.remove(key)
            return
        if key not in self.objects:
            bisect.insort(self.keys, key)
        modified = datetime.datetime.fromtimestamp(at_s, datetime.timezone.utc)
        self.objects[key] = _Stored(data, hashlib.md5(data, usedforsecurity=False).hexdigest(), modified)


def _refusal(operation: str, status: int, code: str, message: str = "") -> ClientError:
    return ClientError(
        {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}, operation
    )


class _Body:
    """The body of an answer, as aiobotocore has it."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def __aenter__(self) -> _Body:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    async def read(self) -> bytes:
        return self._data


class _Client:
    """The calls of s3fs that `S3Store` makes. An answer shows the bucket's state at the time the request began."""

    loop = None

    def __init__(self, bucket: Bucket, model: StoreModel, time: VirtualTime, log: list[Request]) -> None:
        self._bucket, self._model, self._time, self._log = bucket, model, time, log

    async def _call_s3(self, method: str, **arguments: Any) -> Any:
        return self.call_s3(method, **arguments)

    def call_s3(self, method: str, **arguments: Any) -> Any:
        del arguments["Bucket"]
        return getattr(self, f"_{method}")(**arguments)

    def _wait(self, kind: str, key: str, size: int, operation: str) -> None:
        """Let the time of a request pass, and log it. Raises SlowDown if the store refuses it."""
        began_s, host, table = self._time.now_s, self._time.current.owner.host, key.split("/", 1)[0]
        accepted, end_s = self._model.ask(began_s, host, table, kind, size)
        self._log.append(Request(host, table, kind, size * accepted, began_s, end_s, accepted))
        self._time.sleep(end_s - began_s)
        if not accepted:
            raise _refusal(operation, 503, "SlowDown", "Please reduce your request rate.")

    def _head_object(self, Key: str) -> dict[str, Any]:  # noqa: N803 # the names of S3
        stored = self._bucket.objects.get(Key)
        self._wait("head", Key, 0, "HeadObject")
        if stored is None:
            raise _refusal("HeadObject", 404, "404")
        return {**stored.about, "ContentLength": len(stored.data)}

    def _get_object(self, Key: str, Range: str = "", IfMatch: str = "") -> dict[str, Any]:  # noqa: N803
        stored = self._bucket.objects.get(Key)
        data = b"" if stored is None else stored.data
        if Range:
            first, last = map(int, Range.removeprefix("bytes=").split("-"))
            data = data[first : last + 1]
        self._wait("get", Key, len(data), "GetObject")
        if stored is None:
            raise _refusal("GetObject", 404, "NoSuchKey")
        if IfMatch and IfMatch.strip('"') != stored.etag:
            raise _refusal("GetObject", 412, "PreconditionFailed")
        return {**stored.about, "Body": _Body(data)}

    def _list_objects_v2(
        self,
        Prefix: str,  # noqa: N803
        Delimiter: str = "",  # noqa: N803
        StartAfter: str = "",  # noqa: N803
        ContinuationToken: str = "",  # noqa: N803
        MaxKeys: int = 1000,  # noqa: N803
    ) -> dict[str, Any]:
        keys, after = self._bucket.keys, StartAfter or ContinuationToken
        begin = max(bisect.bisect_left(keys, Prefix), bisect.bisect_right(keys, after) if after else 0)
        contents: list[dict[str, Any]] = []
        more = False
        for place in range(begin, len(keys)):
            key = keys[place]
            if not key.startswith(Prefix):
                break
            if Delimiter and Delimiter in key[len(Prefix) :]:
                continue
            if more := len(contents) == MaxKeys:
                break
            stored = self._bucket.objects[key]
            contents.append({"Key": key, "Size": len(stored.data), **stored.about})
        self._wait("list", Prefix, sum(map(_entry_bytes, contents)), "ListObjectsV2")
        page: dict[str, Any] = {"Contents": contents, "IsTruncated": more}
        return {**page, "NextContinuationToken": contents[-1]["Key"]} if more else page


def _entry_bytes(item: Mapping[str, Any]) -> int:
    """The size of an entry in the XML of a listing, in bytes: its key, and about 250 bytes around it."""
    return len(item["Key"]) + 250


class VirtualS3(S3Store):
    """The package's S3 store over a bucket in memory, in virtual time. Each request is appended to `log`."""

    def __init__(self, bucket: Bucket, model: StoreModel, time: VirtualTime, log: list[Request]) -> None:
        self._fs: Any = _Client(bucket, model, time, log)
        self.scope = "s3"
