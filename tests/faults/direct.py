"""The S3 store's code with a way around the server for requests on which no fault acts: moto's objects answer them, in a tenth of the time."""

import base64
import io
import zlib
from typing import Any

from botocore.exceptions import ClientError

from pyspark_lookup.storage.stores.s3 import S3Store
from tests.support.proxy import Proxy, Sent, backend

_KINDS = {
    "head_object": "head", "list_objects_v2": "list", "get_object": "get", "put_object": "put",
    "delete_object": "delete",
}  # fmt: skip


class _Body(io.BytesIO):
    async def __aenter__(self) -> "_Body":
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    async def read(self) -> bytes:  # type: ignore[override]
        return self.getvalue()


class _Client:
    """The calls that `S3Store` makes: through s3fs and the server where the proxy acts, otherwise answered here."""

    def __init__(self, through: Any, proxy: Proxy) -> None:
        self._through = through
        self._proxy = proxy
        self.loop = through.loop

    def call_s3(self, name: str, **parameters: Any) -> Any:
        if self._acts(name, parameters):
            return self._through.call_s3(name, **parameters)
        return getattr(self, name)(parameters)

    async def _call_s3(self, name: str, **parameters: Any) -> Any:
        if self._acts(name, parameters):
            return await self._through._call_s3(name, **parameters)
        return getattr(self, name)(parameters)

    def _acts(self, name: str, parameters: dict[str, Any]) -> bool:
        return self._proxy.takes(
            Sent(_KINDS[name], parameters.get("Key") or parameters["Prefix"], parameters.get("Range", ""))
        )

    def _get_key(self, parameters: dict[str, Any]) -> Any:
        key = backend().get_bucket(parameters["Bucket"]).keys.get(parameters["Key"])
        if key is None:
            raise _error(404, "NoSuchKey")
        return key

    def head_object(self, parameters: dict[str, Any]) -> dict[str, Any]:
        key = self._get_key(parameters)
        return {"ContentLength": key.size, "ETag": key.etag, "LastModified": key.last_modified}

    def get_object(self, parameters: dict[str, Any]) -> dict[str, Any]:
        key = self._get_key(parameters)
        if parameters.get("IfMatch", key.etag) != key.etag:
            raise _error(412, "PreconditionFailed")
        first, last = map(int, parameters.get("Range", f"bytes=0-{key.size}").removeprefix("bytes=").split("-"))
        if "Range" in parameters and first >= key.size:
            raise _error(416, "InvalidRange")
        return {"ETag": key.etag, "Body": _Body(key.value[first : last + 1])}

    def list_objects_v2(self, parameters: dict[str, Any]) -> dict[str, Any]:
        after = parameters.get("ContinuationToken") or parameters.get("StartAfter", "")
        most = parameters.get("MaxKeys", 1000)
        keys = backend().get_bucket(parameters["Bucket"]).keys
        names = sorted(name for name in list(keys) if name.startswith(parameters["Prefix"]) and name > after)
        page = [keys[name] for name in names[:most]]
        contents = [{"Key": k.name, "Size": k.size, "ETag": k.etag, "LastModified": k.last_modified} for k in page]
        more = {"NextContinuationToken": names[most - 1]} if len(names) > most else {}
        return {"IsTruncated": bool(more), "Contents": contents, **more}

    def put_object(self, parameters: dict[str, Any]) -> dict[str, Any]:
        assert parameters["IfNoneMatch"] == "*"
        if backend().get_bucket(parameters["Bucket"]).keys.get(parameters["Key"]) is not None:
            raise _error(412, "PreconditionFailed")
        return {"ETag": put_object(parameters["Bucket"], parameters["Key"], parameters["Body"]).etag}

    def delete_object(self, parameters: dict[str, Any]) -> dict[str, Any]:
        backend().delete_object(parameters["Bucket"], parameters["Key"])
        return {}


def _error(status: int, code: str) -> ClientError:
    response: Any = {"Error": {"Code": code, "Message": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(response, "injected")


def put_object(bucket: str, name: str, data: bytes) -> Any:
    """moto's object, put without a request, with the checksum that a client sends beside it."""
    key = backend().put_object(bucket, name, data)
    key.checksum_algorithm = "CRC32"
    key.checksum_value = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
    return key


def door(store: S3Store, proxy: Proxy) -> S3Store:
    """The store, which goes through the server where the proxy acts."""
    store._fs = _Client(store._fs, proxy)
    return store
