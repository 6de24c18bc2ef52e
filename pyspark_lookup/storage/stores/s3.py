"""`S3Store`: S3, through single calls of the client of s3fs.

`info` and `cat_ranges` of s3fs are not used, because they trust cached listings and do not pin a read to a version.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any, cast

import fsspec

from pyspark_lookup.errors import (
    SourceChangedError,
    UfsError,
    UfsNotFoundError,
    UfsTimeoutError,
    UfsUnavailableError,
    raise_ours,
)
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.storage.stores.listed_files import sort_files
from pyspark_lookup.storage.stores.store import (
    REDIRECTS,
    Count,
    FileVersion,
    Listing,
    error_code,
    http_status,
    is_entered,
    log_directories,
    our_error,
    read_error,
    translate_errors,
)

_PAGE = 1000  # objects that one request lists or removes
_CHECK_ENDPOINT = "check the endpoint (lookup.storage.endpoint_url)"


def _sent_once() -> dict[str, Any]:
    """The part of a client's configuration that makes it send each request once, and only to the host that it is for.

    Otherwise, aiohttp would repeat a request whose connection ends without an answer. If the store had executed the first request, it would
    refuse the second, and a commit that is in the log would look like a failed one. aiohttp would also follow redirects, and send the session
    token, the object's key and the written bytes to another host. botocore handles redirects itself: it asks for the bucket's region, and
    signs again.
    """
    # These modules come with s3fs and take long to import, so they are imported only when a store is opened.
    from aiobotocore.config import AioConfig
    from aiobotocore.httpsession import AIOHTTPSession
    from botocore.exceptions import ClientError

    class HereOnly:
        def __init__(self, session: Any) -> None:
            self._session = session

        def request(self, *args: Any, **options: Any) -> Any:
            return self._session.request(*args, **{**options, "allow_redirects": False})

    class SentOnce(AIOHTTPSession):  # type: ignore[misc]
        async def _get_session(self, proxy_url: str | None) -> Any:
            session = await super()._get_session(proxy_url)
            session._retry_connection = False
            return HereOnly(session)

        async def send(self, request: Any) -> Any:
            answer = await super().send(request)
            # botocore asks for the bucket's region by HEAD, and asks again if the HEAD is redirected. Without this error it would never stop
            # if no answer names a region.
            if (
                request.method == "HEAD"
                and answer.status_code in REDIRECTS
                and "x-amz-bucket-region" not in answer.headers
            ):
                metadata = {"HTTPStatusCode": answer.status_code, "HTTPHeaders": dict(answer.headers)}
                raise ClientError({"Error": {"Code": "TemporaryRedirect"}, "ResponseMetadata": metadata}, "HEAD")
            return answer

    # Releases before May 2025 lack this parameter.
    takes = "http_session_cls" in inspect.signature(AioConfig).parameters
    return {"http_session_cls": SentOnce} if takes else {}


@translate_errors
class S3Store:
    """S3 and compatible stores. Files are identified by their ETag, which HEAD and LIST return alike, and reads are pinned by If-Match."""

    pins = True
    lists_after = True

    def __init__(self, storage_options: Mapping[str, Any]) -> None:
        options = dict(storage_options)
        # The client makes one attempt only. `Ufs` repeats it, so that every attempt is counted, and one option limits them all.
        config = {"retries": {"total_max_attempts": 1, "mode": "standard"}, **_sent_once()}
        config |= options.pop("config_kwargs", {})
        self._fs = fsspec.filesystem(
            "s3", skip_instance_cache=True, use_listings_cache=False, config_kwargs=config, **options
        )
        self._fs.retries = 1
        endpoints = [options.get("endpoint_url"), (options.get("client_kwargs") or {}).get("endpoint_url")]
        endpoints += [os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")]
        self.scope = "s3" + json.dumps(next(filter(None, endpoints), None))

    def url_of(self, path: str) -> str:
        return "s3://" + str(path.split("://", 1)[1]).rstrip("/")

    @staticmethod
    def _bucket_key(url: str) -> tuple[str, str]:
        bucket, _, key = url.split("://", 1)[1].partition("/")
        return bucket, key

    def get_meta(self, path: str, count: Count) -> FileVersion:
        bucket, key = self._bucket_key(path)
        if not key:
            raise UfsNotFoundError(f"{redact('path', path)} is a bucket, not a file")
        count("head")
        head = self._fs.call_s3("head_object", Bucket=bucket, Key=key)
        return _to_version(bucket, key, head.get("ContentLength"), head)

    def _pages(
        self, bucket: str, prefix: str, count: Count, at_most: int | None = None, after: str = "", below: bool = True
    ) -> Iterator[dict[str, Any]]:
        """The pages of a listing: at most `at_most` objects, beginning after the key `after`. `below`: whether to list subdirectories,
        too."""
        kind = {} if below else {"Delimiter": "/"}
        more: dict[str, Any] = {"StartAfter": after} if after else {}
        while True:
            count("list")
            if at_most is not None:
                more["MaxKeys"] = min(at_most, _PAGE)
            page = self._page(bucket, prefix, **kind, **more)
            yield page
            if at_most is not None:
                at_most -= len(page.get("Contents", []))
            if not page["IsTruncated"] or at_most == 0:
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def _page(self, bucket: str, prefix: str, **more: Any) -> dict[str, Any]:
        try:
            page: dict[str, Any] = self._fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, **more)
        except Exception as error:
            # For an existing bucket S3 answers any prefix with a listing, perhaps an empty one, but never with "not found".
            if http_status(error) != 404 or error_code(error) == "NoSuchBucket":
                raise
            url = redact("path", f"s3://{bucket}/{prefix}")
            raise_ours(UfsUnavailableError(f"{url}: the answer is not a listing ({error}): {_CHECK_ENDPOINT}"), error)
        # The client would show an empty body, or the error page of a gateway, as an empty listing.
        is_incomplete = "IsTruncated" not in page or (page["IsTruncated"] and "NextContinuationToken" not in page)
        if is_incomplete or not all(item["Key"].startswith(prefix) for item in page.get("Contents", [])):
            raise UfsUnavailableError(
                f"{redact('path', f's3://{bucket}/{prefix}')}: the answer is not a listing: {_CHECK_ENDPOINT}"
            )
        return page

    def list_status(self, path: str, count: Count) -> Listing:
        bucket, key = self._bucket_key(path)
        directory = key.rstrip("/") + "/" if key else ""
        listed_objects = _ListedObjects(bucket, directory)
        for page in self._pages(bucket, directory, count):
            logs = listed_objects.add(page, page.get("Contents", []))
            if logs:
                return Listing(f"s3://{bucket}/{key}".rstrip("/"), (), logs)
        return listed_objects.listing()

    def get_status(self, path: str, count: Count) -> FileVersion | Listing:
        """The file or the listing of a path, by one LIST with the path as prefix, which returns the object itself first.

        If LIST is denied, one HEAD is sent instead. Many tools put an empty object with a directory's name beside the directory's objects.
        Such an object is not a file.
        """
        bucket, key = self._bucket_key(path)
        if not key or key.endswith("/"):
            return self.list_status(path, count)
        try:
            return self._status(path, bucket, key, count)
        except Exception as error:
            if error_code(error) == "AccessDenied":
                with contextlib.suppress(UfsError):
                    return self.get_meta(path, count)
            raise

    def _status(self, path: str, bucket: str, key: str, count: Count) -> FileVersion | Listing:
        directory = key + "/"
        listed_objects = _ListedObjects(bucket, directory)
        empty: FileVersion | None = None
        for page in self._pages(bucket, key, count):
            contents = page.get("Contents", [])
            if contents and contents[0]["Key"] == key:
                empty = _to_version(bucket, key, contents[0]["Size"], contents[0])
                if empty.size:
                    return empty
            logs = listed_objects.add(page, [item for item in contents if item["Key"].startswith(directory)])
            if logs:
                return Listing(f"s3://{bucket}/{key}", (), logs)
            if contents and contents[-1]["Key"] > directory and not contents[-1]["Key"].startswith(directory):
                break  # the listing has passed the directory: the keys that follow only begin with the same letters
            if contents and contents[-1]["Key"] < directory and page.get("IsTruncated"):
                try:
                    return self.list_status(
                        path, count
                    )  # many other keys come before the directory: list the directory alone
                except UfsNotFoundError:
                    if empty is None:
                        raise
                break
        return empty if empty is not None and not listed_objects.count else listed_objects.listing()

    @contextlib.contextmanager
    def pin(self, file: FileVersion) -> Iterator[Callable[[int, int], bytes]]:
        bucket, key = self._bucket_key(file.url)
        etag = "" if file.immutable else file.identity.removeprefix("etag:")
        match = {"IfMatch": f'"{etag}"'} if etag else {}

        async def get(offset: int, length: int) -> bytes:
            # A GET without a range returns the object's checksum, too, which the client compares.
            part = {} if (offset, length) == (0, file.size) else {"Range": f"bytes={offset}-{offset + length - 1}"}
            reply = await self._fs._call_s3("get_object", Bucket=bucket, Key=key, **part, **match)
            async with reply["Body"] as body:
                data = cast(bytes, await body.read())
            answer_etag = reply.get("ETag", "").strip('"')
            if not answer_etag:
                url = redact("path", file.url)
                raise UfsUnavailableError(
                    f"{url}: the answer has no ETag, so it is not from an S3 store: {_CHECK_ENDPOINT}"
                )
            # A gateway may ignore If-Match. Then the ETag of its answer shows which version the bytes are of.
            if etag and answer_etag != etag:
                raise SourceChangedError(f"{redact('path', file.url)} changed while it was read")
            return data

        def read(offset: int, length: int) -> bytes:
            try:
                return cast(bytes, fsspec.asyn.sync(self._fs.loop, get, offset, length))
            except Exception as error:
                raise_ours(read_error(error, file.url), error)

        yield read

    def list_files(self, path: str, after: str, at_most: int | None, count: Count) -> tuple[FileVersion, ...]:
        bucket, key = self._bucket_key(path)
        directory = key.rstrip("/") + "/"
        pages = self._pages(bucket, directory, count, at_most, directory + after if after else "", below=False)
        return self._versions(bucket, pages)

    def has_directory(self, path: str, count: Count) -> bool:
        bucket, key = self._bucket_key(path)
        return any(page.get("Contents") for page in self._pages(bucket, key.rstrip("/") + "/", count, at_most=1))

    def list_tree(self, path: str, count: Count) -> tuple[FileVersion, ...]:
        bucket, key = self._bucket_key(path)
        return self._versions(bucket, self._pages(bucket, key.rstrip("/") + "/", count))

    def _versions(self, bucket: str, pages: Iterable[dict[str, Any]]) -> tuple[FileVersion, ...]:
        return tuple(_to_version(bucket, o["Key"], o["Size"], o) for page in pages for o in page.get("Contents", []))

    def last_change_s(self, path: str, count: Count) -> tuple[float | None, float]:
        bucket, key = self._bucket_key(path)
        now_s, times = 0.0, []
        for page in self._pages(bucket, key.rstrip("/") + "/", count):
            now_s = _answered_at_s(page) or now_s
            times += [item["LastModified"].timestamp() for item in page.get("Contents", [])]
        if not times:
            raise UfsNotFoundError(f"{redact('path', path)} does not exist")
        return max(times), now_s

    def delete(self, path: str, count: Count) -> None:
        """Remove an object, if it exists."""
        bucket, key = self._bucket_key(path)
        count("delete")
        self._fs.call_s3("delete_object", Bucket=bucket, Key=key)

    def delete_many(self, directory: str, names: Sequence[str], count: Count) -> None:
        bucket, prefix = self._bucket_key(directory)
        for start in range(0, len(names), _PAGE):
            keys = [{"Key": f"{prefix}/{name}"} for name in names[start : start + _PAGE]]
            count("delete")
            answer = self._fs.call_s3("delete_objects", Bucket=bucket, Delete={"Objects": keys, "Quiet": True})
            for failed in answer.get("Errors", []):
                reason = failed.get("Message") or failed.get("Code") or "the store does not say why"
                raise UfsError(
                    f"{redact('path', directory)}: {failed.get('Key')} was not removed: {reason}: try again, and check that the credentials have "
                    "s3:DeleteObject"
                )

    def put_if_absent(self, path: str, data: bytes, count: Count) -> FileVersion | None:
        """Put an object with If-None-Match, and return its version; None if there is an object already.

        Raises UfsUnavailableError if another writer puts the object at the same moment (409), or if the answer does not show whether it was
        put.
        """
        bucket, key = self._bucket_key(path)
        count("put")
        try:
            answer = self._fs.call_s3("put_object", Bucket=bucket, Key=key, Body=data, IfNoneMatch="*")
        except Exception as error:
            mapped = our_error(error, path)
            if isinstance(mapped, SourceChangedError):  # 412
                return None
            if http_status(error) is None and isinstance(mapped, UfsError) and not isinstance(mapped, UfsTimeoutError):
                mapped = UfsUnavailableError(str(mapped))  # the answer was not understood
            raise_ours(mapped, error)
        return _to_version(bucket, key, len(data), answer)


def _to_version(bucket: str, key: str, size: int | None, info: Mapping[str, Any]) -> FileVersion:
    url, etag, modified = f"s3://{bucket}/{key}", info.get("ETag"), info.get("LastModified")
    if size is None or not etag:
        raise UfsUnavailableError(
            f"{redact('path', url)}: the answer has no size or no ETag, so it is not from an S3 store: {_CHECK_ENDPOINT}"
        )
    return FileVersion(url, size, "etag:" + etag.strip('"'), modified.timestamp() if modified else None)


class _ListedObjects:
    """The objects below a directory that the pages of a listing show. `directory`: a key that ends with a slash, or ""."""

    def __init__(self, bucket: str, directory: str) -> None:
        self._bucket = bucket
        self._directory = directory
        self._files: list[FileVersion] = []
        self._directories: set[str] = set()
        self._listed_at_s: float | None = None
        self.count = 0

    def add(self, page: dict[str, Any], objects: Sequence[dict[str, Any]]) -> frozenset[str]:
        """Add the objects of a page. Returns the names of directories of logs among them: if there is one, the rest of the listing is not
        needed."""
        self._listed_at_s = self._listed_at_s or _answered_at_s(page)
        self.count += len(objects)
        names = {parents[0] for item in objects if (parents := self._take(item))}
        return frozenset(names.intersection(log_directories))

    def _take(self, item: dict[str, Any]) -> list[str]:
        """Add an object. Returns the names of the directories in which it lies."""
        relative = item["Key"][len(self._directory) :]
        parents: list[str] = relative.split("/")[:-1]
        if parents and relative.rpartition("/")[0] not in self._directories:
            self._directories.update("/".join(parents[: depth + 1]) for depth in range(len(parents)))
        if relative and not relative.endswith("/") and all(map(is_entered, parents)):
            self._files.append(_to_version(self._bucket, item["Key"], item["Size"], item))
        return parents

    def listing(self) -> Listing:
        """The listing of all objects that were added. Raises UfsNotFoundError if there is none."""
        url = f"s3://{self._bucket}/{self._directory}".rstrip("/")
        if not self.count:
            raise UfsNotFoundError(f"{redact('path', url)} does not exist")
        # Leave out empty objects with the name of a directory (see `get_status`).
        files = (file for file in self._files if file.size or file.url[len(url) + 1 :] not in self._directories)
        return Listing(url, sort_files(files), frozenset(self._directories), self._listed_at_s)


def _answered_at_s(page: dict[str, Any]) -> float | None:
    """The time of a store's answer (Unix seconds), on the store's clock; None if the answer does not state it."""
    date = page.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    try:
        return None if date is None else parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None
