"""The S3 store's own code with a way around the server: only requests on which a fault acts go through it.

The others are answered out of moto's objects at once, as moto would. A case so takes a tenth of the time.
"""

from __future__ import annotations

import base64
import io
import zlib
from typing import Any

from botocore.exceptions import ClientError

from pyspark_lookup.io.stores.s3 import S3Store
from tests.faults.server import Proxy, Sent

_KINDS = {
    "head_object": "head",
    "list_objects_v2": "list",
    "get_object": "get",
    "put_object": "put",
    "delete_object": "delete",
}


class _Body(io.BytesIO):
    async def __aenter__(self) -> _Body:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    async def read(self) -> bytes:  # type: ignore[override]
        return self.getvalue()


class _Client:
    """The calls that `S3Store` makes: through s3fs and the server where the proxy acts, otherwise answered here."""

    def __init__(self, through: Any, proxy: Proxy, backend: Any) -> None:
        self._through = through
        self._proxy = proxy
        self._backend = backend
        self.loop = through.loop

    def call_s3(self, name: str, **given: Any) -> dict[str, Any]:
        found: dict[str, Any] = (
            self._through.call_s3(name, **given) if self._acts(name, given) else self._at_once(name, given)
        )
        return found

    async def _call_s3(self, name: str, **given: Any) -> dict[str, Any]:
        found: dict[str, Any] = (
            await self._through._call_s3(name, **given) if self._acts(name, given) else self._at_once(name, given)
        )
        return found

    def _acts(self, name: str, given: dict[str, Any]) -> bool:
        return self._proxy.takes(Sent(_KINDS[name], given.get("Key") or given["Prefix"], given.get("Range", "")))

    def _at_once(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = getattr(self, name)(**given)
        return found

    def _key(self, bucket: str, key: str, name: str) -> Any:
        found = self._backend.get_bucket(bucket).keys.get(key)
        if found is None:
            raise _error(404, "NoSuchKey", name)
        return found

    def head_object(self, Bucket: str, Key: str) -> dict[str, Any]:  # noqa: N803 - as botocore names them
        found = self._key(Bucket, Key, "HeadObject")
        return {"ContentLength": found.size, "ETag": found.etag, "LastModified": found.last_modified}

    def get_object(self, Bucket: str, Key: str, Range: str = "", IfMatch: str = "") -> dict[str, Any]:  # noqa: N803
        found = self._key(Bucket, Key, "GetObject")
        if IfMatch and IfMatch != found.etag:
            raise _error(412, "PreconditionFailed", "GetObject")
        first, last = map(int, Range.removeprefix("bytes=").split("-")) if Range else (0, found.size)
        if Range and first >= found.size:
            raise _error(416, "InvalidRange", "GetObject")
        return {"ETag": found.etag, "Body": _Body(found.value[first : last + 1])}

    def list_objects_v2(
        self,
        Bucket: str,  # noqa: N803
        Prefix: str,  # noqa: N803
        StartAfter: str = "",  # noqa: N803
        MaxKeys: int = 1000,  # noqa: N803
        ContinuationToken: str = "",  # noqa: N803
    ) -> dict[str, Any]:
        after = ContinuationToken or StartAfter
        keys = self._backend.get_bucket(Bucket).keys
        names = sorted(name for name in list(keys) if name.startswith(Prefix) and name > after)
        page = [keys[name] for name in names[:MaxKeys]]
        told = [{"Key": k.name, "Size": k.size, "ETag": k.etag, "LastModified": k.last_modified} for k in page]
        more = len(names) > MaxKeys
        return {
            "IsTruncated": more,
            "Contents": told,
            **({"NextContinuationToken": names[MaxKeys - 1]} if more else {}),
        }

    def put_object(self, Bucket: str, Key: str, Body: bytes, IfNoneMatch: str) -> dict[str, Any]:  # noqa: N803
        assert IfNoneMatch == "*"
        if self._backend.get_bucket(Bucket).keys.get(Key) is not None:
            raise _error(412, "PreconditionFailed", "PutObject")
        return {"ETag": put(self._backend, Bucket, Key, Body).etag}

    def delete_object(self, Bucket: str, Key: str) -> dict[str, Any]:  # noqa: N803
        self._backend.delete_object(Bucket, Key)
        return {}


def _error(status: int, code: str, name: str) -> ClientError:
    found: Any = {"Error": {"Code": code, "Message": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(found, name)


def put(backend: Any, bucket: str, name: str, data: bytes) -> Any:
    """moto's object, put without a request, with the checksum that a client sends beside it."""
    key = backend.put_object(bucket, name, data)
    key.checksum_algorithm = "CRC32"
    key.checksum_value = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
    return key


def door(store: S3Store, proxy: Proxy, backend: Any) -> S3Store:
    """The store, which goes through the server where the proxy acts."""
    store._fs = _Client(store._fs, proxy, backend)
    return store
