"""What each kind of store offers: an identity per file, a listing, reads pinned to a version.

`LocalStore` speaks to the operating system (fsspec rounds mtime_ns to a float), `S3Store` to s3fs's
client (its own `info` and `cat_ranges` trust listings and do not pin), `FsspecStore` to any other
fsspec filesystem. This is the only module that imports fsspec. Instances belong to one process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, Protocol, TypeVar, cast

import fsspec
from fsspec.core import split_protocol
from fsspec.implementations.local import make_path_posix

from pyspark_lookup.errors import (
    OptionError,
    PysparkLookupError,
    SourceChangedError,
    UfsError,
    UfsNotFoundError,
    UfsPermissionError,
    UfsTimeoutError,
    UfsUnavailableError,
)
from pyspark_lookup.options import is_local, redact

__all__ = [
    "LOCAL_GRANULE_S",
    "SETTLED_AFTER_S",
    "Count",
    "FileVersion",
    "FsspecStore",
    "Listing",
    "LocalStore",
    "Range",
    "S3Store",
    "Store",
    "open_store",
]

F = TypeVar("F", bound=Callable[..., Any])
Range = tuple[int, int]
"""(offset, length) in bytes."""
Count = Callable[[str], None]
"""Told "head", "list" or "get" before each call to the store."""

# An mtime this close to now may stand for two contents (git's "racy" entries): one timer tick of an
# older kernel for local files, the whole seconds of HTTP and the slack of others.
LOCAL_GRANULE_S = 0.02
_REMOTE_GRANULE_S = 2.0
SETTLED_AFTER_S = _REMOTE_GRANULE_S
"""An identity seen this long ago, and still the file's, stands for one content in any store."""


@dataclasses.dataclass(frozen=True, slots=True)
class FileVersion:
    """One state of one file: its URL, size in bytes and identity, compared by equality only.

    `identity` is the store's strongest token; "" means it has none and the bytes are not kept.
    `modified_at_s` (Unix time of the store's clock, None if unknown) and `settled` (False: so new
    that the identity may yet stand for other bytes) describe the observation, not the state.
    """

    url: str
    size: int
    identity: str
    modified_at_s: float | None = dataclasses.field(default=None, compare=False)
    settled: bool = dataclasses.field(default=True, compare=False)

    @property
    def cacheable(self) -> bool:
        """Whether bytes read under this version may be kept."""
        return bool(self.identity) and self.settled


@dataclasses.dataclass(frozen=True, slots=True)
class Listing:
    """What lies below a directory: `files` by URL, and `directories` that were seen (relative paths)."""

    url: str
    files: tuple[FileVersion, ...]
    directories: frozenset[str]


class Store(Protocol):
    """One storage system with one set of options. `pins`: reads refuse another version themselves."""

    scope: str
    pins: bool

    def url_of(self, path: str) -> str: ...
    def get_meta(self, path: str, count: Count) -> FileVersion: ...
    def list_status(self, path: str, count: Count) -> Listing: ...
    def get_status(self, path: str, count: Count) -> FileVersion | Listing: ...
    def pinned(self, file: FileVersion) -> contextlib.AbstractContextManager[Callable[[int, int], bytes]]: ...


def open_store(path: str, storage_options: Mapping[str, Any], now_s: Callable[[], float] = time.time) -> Store:
    """The store a path or URL names. Raises OptionError for a protocol fsspec does not know."""
    protocol, _ = split_protocol(path)
    if is_local(path):
        if storage_options:
            raise OptionError(
                f"option lookup.storage.{next(iter(storage_options))}: local paths take no storage options"
            )
        return LocalStore(now_s)
    if protocol in ("s3", "s3a", "s3n"):
        return S3Store(storage_options)
    return FsspecStore(path, str(protocol), storage_options, now_s)


def _entered(name: str) -> bool:
    """Whether a directory of this name is listed: not those Spark and Hive skip (`_…`, `.…`, but not `_k=v`)."""
    return not name.startswith(".") and (not name.startswith("_") or "=" in name or name == "_spark_metadata")


# --- errors ---------------------------------------------------------------------------------------


def _translated(operation: F) -> F:
    """Let only our errors out of a store's method; its second argument names the file."""

    @functools.wraps(operation)
    def call(self: Store, subject: Any, *args: Any) -> Any:
        try:
            return operation(self, subject, *args)
        except Exception as error:
            raise _our_error(error, str(getattr(subject, "url", subject))) from error

    return cast(F, call)


def _our_error(error: BaseException, url: str) -> BaseException:
    """The error of ours that says what a foreign one means; ours pass unchanged."""
    if isinstance(error, PysparkLookupError):
        return error
    url = redact("path", url)
    chain = [error, error.__cause__ or error]
    status = next((s for e in chain if (s := _http_status(e)) is not None), None)
    names = {base.__name__ for e in chain for base in type(e).__mro__}
    # fsspec's web client says FileNotFoundError for every failure; its cause says which.
    missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
    text = f"{url}: {redact('path', chain[missing])}"
    timed_out = isinstance(error, TimeoutError) or status == 408 or any("Timeout" in name for name in names)
    transient = status == 429 or (status or 0) >= 500 or names & _LOST or _error_code(error) in _TRANSIENT_CODES
    if status in (412, 304) or (isinstance(error, FileNotFoundError) and "FileExpired" in names):
        return SourceChangedError(f"{url} changed while it was read")
    if status in (404, 410) or (missing and not (status or timed_out or transient)):
        return UfsNotFoundError(f"{url} does not exist")
    if status in (401, 403) or isinstance(error, PermissionError) or "NoCredentialsError" in names:
        return UfsPermissionError(f"{text} (check the credentials in the environment or the conf file)")
    if timed_out:
        return UfsTimeoutError(text)
    return UfsUnavailableError(text) if transient else UfsError(text)


def _read_error(error: Exception, url: str) -> BaseException:
    """As `_our_error`, of a read: a file that is gone, or ends before the range, is another version."""
    ours = _our_error(error, url)
    if isinstance(ours, UfsNotFoundError) or _http_status(error.__cause__ or error) == 416:
        return SourceChangedError(f"{redact('path', url)} was replaced or removed")
    return ours


_LOST = {"ConnectionError", "ClientConnectionError", "ClientPayloadError", "HTTPClientError", "IncompleteReadError"}
_TRANSIENT_CODES = {"SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "OperationAborted"}


def _http_status(error: BaseException) -> int | None:
    """The HTTP status of a botocore ClientError or an aiohttp ClientResponseError."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return cast("int | None", response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else None


def _error_code(error: BaseException) -> str | None:
    response = getattr(error.__cause__ or error, "response", None)
    return response.get("Error", {}).get("Code") if isinstance(response, dict) else None


# --- local files ----------------------------------------------------------------------------------


class LocalStore:
    """Files of this machine (or mounted on it), identified by (mtime_ns, ctime_ns, inode)."""

    scope = "file"
    pins = True

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s

    def url_of(self, path: str) -> str:
        """`file:///absolute/path` of any spelling, without resolving links."""
        return "file://" + self._path(path)

    @staticmethod
    def _path(path: str) -> str:
        if path.startswith("file:") and not path.startswith("file://"):
            path = path.removeprefix("file:")
        return os.path.abspath(str(make_path_posix(path.removeprefix("file://").removeprefix("local://"))))

    def _version(self, path: str, status: os.stat_result) -> FileVersion:
        changed_s = max(status.st_mtime, status.st_ctime)
        return FileVersion(
            self.url_of(path),
            status.st_size,
            f"{status.st_mtime_ns}:{status.st_ctime_ns}:{status.st_ino}",
            status.st_mtime,
            # A change time ahead of the clock proves nothing, so it counts as too new.
            settled=self._now_s() - changed_s > LOCAL_GRANULE_S,
        )

    @_translated
    def get_meta(self, path: str, count: Count) -> FileVersion:
        count("head")
        local = self._path(path)
        status = os.stat(local)
        if stat.S_ISDIR(status.st_mode):
            raise UfsNotFoundError(f"{path} is a directory, not a file")
        return self._version(local, status)

    @_translated
    def list_status(self, path: str, count: Count) -> Listing:
        root = self._path(path)
        files: list[FileVersion] = []
        directories: set[str] = set()
        pending: list[tuple[str, frozenset[tuple[int, int]]]] = [(root, frozenset())]
        while pending:
            directory, above = pending.pop()
            count("list")
            try:
                status, entries = os.stat(directory), list(os.scandir(directory))
            except FileNotFoundError:
                if directory == root:
                    raise
                continue  # removed since it was listed
            here = (status.st_dev, status.st_ino)
            if here in above:
                continue  # a link to a directory that it lies in
            for entry in entries:
                try:
                    if entry.is_dir():
                        directories.add(os.path.relpath(entry.path, root))
                        if _entered(entry.name):
                            pending.append((entry.path, above | {here}))
                    elif stat.S_ISREG((status := entry.stat()).st_mode):
                        files.append(self._version(entry.path, status))
                except OSError as error:
                    if error.errno not in (errno.ENOENT, errno.ELOOP):  # removed since, or a dead link
                        raise
        return Listing(self.url_of(root), tuple(sorted(files, key=lambda f: f.url)), frozenset(directories))

    @_translated
    def get_status(self, path: str, count: Count) -> FileVersion | Listing:
        if os.path.isdir(self._path(path)):
            return self.list_status(path, count)
        return self.get_meta(path, count)

    @contextlib.contextmanager
    def pinned(self, file: FileVersion) -> Iterator[Callable[[int, int], bytes]]:
        """Reads through one descriptor, which must be `file` before the first and after the last."""
        try:
            descriptor = os.open(self._path(file.url), os.O_RDONLY)
        except OSError as error:
            raise _read_error(error, file.url) from error
        try:
            self._check(descriptor, file)

            def read(offset: int, length: int) -> bytes:
                parts = []
                while length > 0:
                    try:
                        part = os.pread(descriptor, length, offset)
                    except OSError as error:
                        raise _our_error(error, file.url) from error
                    if not part:
                        break
                    parts.append(part)
                    offset, length = offset + len(part), length - len(part)
                if length:  # shorter than its version says: it is being rewritten in place
                    raise SourceChangedError(f"{file.url} changed while it was read")
                return b"".join(parts) if len(parts) != 1 else parts[0]

            yield read
            self._check(descriptor, file)
        finally:
            os.close(descriptor)

    def _check(self, descriptor: int, file: FileVersion) -> None:
        if self._version(self._path(file.url), os.fstat(descriptor)) != file:
            raise SourceChangedError(f"{file.url} changed since its version was resolved")


# --- S3 -------------------------------------------------------------------------------------------


class S3Store:
    """S3 and compatible stores, identified by ETag (equal from HEAD and LIST), pinned by If-Match."""

    pins = True

    def __init__(self, storage_options: Mapping[str, Any]) -> None:
        options = dict(storage_options)
        # One attempt each: `Ufs` retries, so that every attempt is counted and bounded by one option.
        config = {"retries": {"total_max_attempts": 1, "mode": "standard"}, **options.pop("config_kwargs", {})}
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

    @_translated
    def get_meta(self, path: str, count: Count) -> FileVersion:
        bucket, key = self._bucket_key(path)
        if not key:
            raise UfsNotFoundError(f"{path} is a bucket, not a file")
        count("head")
        found = self._fs.call_s3("head_object", Bucket=bucket, Key=key)
        return self._version(bucket, key, found["ContentLength"], found)

    @staticmethod
    def _version(bucket: str, key: str, size: int, found: Mapping[str, Any]) -> FileVersion:
        etag, modified = found.get("ETag"), found.get("LastModified")
        identity = "etag:" + etag.strip('"') if etag else ""
        return FileVersion(f"s3://{bucket}/{key}", size, identity, modified.timestamp() if modified else None)

    def _pages(self, bucket: str, prefix: str, count: Count) -> Iterator[dict[str, Any]]:
        token: dict[str, str] = {}
        while True:
            count("list")
            page = self._fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, **token)
            yield page
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def _listing(self, bucket: str, directory: str, objects: list[dict[str, Any]]) -> Listing:
        url = f"s3://{bucket}/{directory}".rstrip("/")
        if not objects:
            raise UfsNotFoundError(f"{url} does not exist")
        files: list[FileVersion] = []
        directories: set[str] = set()
        for found in objects:
            relative = found["Key"][len(directory) :]
            parents = relative.split("/")[:-1]
            directories.update("/".join(parents[: depth + 1]) for depth in range(len(parents)))
            if relative and not relative.endswith("/") and all(map(_entered, parents)):
                files.append(self._version(bucket, found["Key"], found["Size"], found))
        return Listing(url, tuple(sorted(files, key=lambda f: f.url)), frozenset(directories))

    @_translated
    def list_status(self, path: str, count: Count) -> Listing:
        bucket, key = self._bucket_key(path)
        directory = key.rstrip("/") + "/" if key else ""
        objects = [found for page in self._pages(bucket, directory, count) for found in page.get("Contents", [])]
        return self._listing(bucket, directory, objects)

    @_translated
    def get_status(self, path: str, count: Count) -> FileVersion | Listing:
        """One LIST of the name as a prefix: the object itself, if there is one, sorts first."""
        bucket, key = self._bucket_key(path)
        if not key or key.endswith("/"):
            return self.list_status(path, count)
        directory = key + "/"
        objects: list[dict[str, Any]] = []
        for page in self._pages(bucket, key, count):
            contents = page.get("Contents", [])
            if not objects and contents and contents[0]["Key"] == key:
                return self._version(bucket, key, contents[0]["Size"], contents[0])
            objects += [found for found in contents if found["Key"].startswith(directory)]
            if contents and contents[-1]["Key"] > directory and not contents[-1]["Key"].startswith(directory):
                break  # sorted past it: the other keys share the name's beginning only
            if contents and contents[-1]["Key"] < directory and page.get("IsTruncated"):
                return self.list_status(path, count)  # a crowd of siblings: ask for it alone
        return self._listing(bucket, directory, objects)

    @contextlib.contextmanager
    def pinned(self, file: FileVersion) -> Iterator[Callable[[int, int], bytes]]:
        bucket, key = self._bucket_key(file.url)
        etag = file.identity.removeprefix("etag:")
        match = {"IfMatch": f'"{etag}"'} if etag else {}

        async def get(offset: int, length: int) -> bytes:
            reply = await self._fs._call_s3(
                "get_object", Bucket=bucket, Key=key, Range=f"bytes={offset}-{offset + length - 1}", **match
            )
            async with reply["Body"] as body:
                return cast(bytes, await body.read())

        def read(offset: int, length: int) -> bytes:
            try:
                return cast(bytes, fsspec.asyn.sync(self._fs.loop, get, offset, length))
            except Exception as error:
                raise _read_error(error, file.url) from error

        yield read


# --- any other fsspec filesystem ------------------------------------------------------------------


class FsspecStore:
    """Any other fsspec filesystem; unpinned, so `Ufs` compares the version after each read."""

    pins = False

    def __init__(self, path: str, protocol: str, options: Mapping[str, Any], now_s: Callable[[], float]) -> None:
        try:
            kind = fsspec.get_filesystem_class(protocol)
            given = {**kind._get_kwargs_from_urls(path), **options}
            self._fs = kind(**{**given, "skip_instance_cache": True, "use_listings_cache": False})
        except (ValueError, TypeError, ImportError) as error:
            raise OptionError(f"option path = {redact('path', path)!r}: {error}") from error
        self._protocol = protocol
        self._web = protocol in ("http", "https")
        self._now_s = now_s
        place = {name: given[name] for name in ("account_name", "endpoint_url", "host", "port") if name in given}
        self.scope = protocol + json.dumps(place, default=str)

    def url_of(self, path: str) -> str:
        return path if self._web else str(self._fs.unstrip_protocol(self._fs._strip_protocol(path)))

    def _version(self, name: str, info: Mapping[str, Any]) -> FileVersion:
        url = self.url_of(name)
        if info.get("size") is None:
            raise UfsError(f"{redact('path', url)}: the server does not say its size")
        modified = _instant(info)
        token = next((f"{key}:{info[key]}" for key in _STRONG if info.get(key)), "")
        if self._web or not token:
            # Web servers often build ETags from whole seconds, so the time stands beside it.
            times = [f"{key}:{info[key]}" for key in _WEAK if info.get(key) is not None]
            token = ";".join([token, *times] if token else times)
        strong = (token.startswith(_STRONG) and not self._web) or modified is None or self._protocol == "memory"
        settled = strong or self._now_s() - cast(float, modified) > _REMOTE_GRANULE_S
        return FileVersion(url, int(info["size"]), token, modified, settled)

    @_translated
    def get_meta(self, path: str, count: Count) -> FileVersion:
        count("head")
        info = self._info(path)
        if info["type"] == "directory":
            raise UfsNotFoundError(f"{redact('path', path)} is a directory, not a file")
        return self._version(path, info)

    def _info(self, path: str) -> dict[str, Any]:
        info = dict(self._fs.info(path))
        if self._protocol == "memory" and info["type"] == "file":
            info["modified"] = self._fs.modified(path)  # not in info, and equal sizes are common
        return info

    @_translated
    def list_status(self, path: str, count: Count) -> Listing:
        root = self._fs._strip_protocol(path).rstrip("/")
        files: list[FileVersion] = []
        directories: set[str] = set()
        pending = [root]
        while pending:
            directory = pending.pop()
            count("list")
            try:
                found = self._fs.ls(directory, detail=True)
            except FileNotFoundError:
                if directory == root:
                    raise
                continue  # removed since it was listed
            for info in found:
                name = info["name"].rstrip("/")
                if info["type"] == "directory":
                    directories.add(name[len(root) + 1 :])
                    if _entered(name.rsplit("/", 1)[-1]):
                        pending.append(name)
                elif name == root:
                    raise UfsNotFoundError(f"{redact('path', path)} is a file, not a directory")
                else:
                    if self._protocol == "memory":
                        info = self._info(name)
                    files.append(self._version(name, info))
        return Listing(self.url_of(root), tuple(sorted(files, key=lambda f: f.url)), frozenset(directories))

    @_translated
    def get_status(self, path: str, count: Count) -> FileVersion | Listing:
        """A name with an extension is tried as a file first, another as a directory first."""
        looks_file = self._web or ("." in path.rstrip("/").rsplit("/", 1)[-1] and not path.endswith("/"))
        first, second = (self.get_meta, self.list_status) if looks_file else (self.list_status, self.get_meta)
        try:
            return first(path, count)
        except UfsNotFoundError:
            if self._web:
                raise
            return second(path, count)

    @contextlib.contextmanager
    def pinned(self, file: FileVersion) -> Iterator[Callable[[int, int], bytes]]:
        def read(offset: int, length: int) -> bytes:
            name = self._fs._strip_protocol(file.url)
            try:
                data = cast(bytes, self._fs.cat_file(name, start=offset, end=offset + length))
            except Exception as error:
                raise _read_error(error, file.url) from error
            # A web server without range support sends the whole file.
            return data[offset : offset + length] if self._web and len(data) == file.size != length else data

        yield read


_STRONG = ("generation", "ETag", "etag", "Content-MD5", "md5")
_WEAK = ("modified", "mtime", "last_modified", "LastModified", "Last-Modified", "created", "updated")


def _instant(info: Mapping[str, Any]) -> float | None:
    """The file's modification time as Unix seconds, of whatever form a filesystem gives it."""
    for key in _WEAK:
        value = info.get(key)
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
        if isinstance(value, (int, float)):
            return float(value)
        if isinstance(value, str):
            for parse in (parsedate_to_datetime, datetime.fromisoformat):
                with contextlib.suppress(ValueError):
                    return parse(value).timestamp()
    return None
