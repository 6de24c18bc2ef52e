"""`FsspecStore`: stores other than S3 and local disks, through fsspec."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn, cast

import fsspec

from pyspark_lookup.errors import NotSupportedError, OptionError, UfsError, UfsNotFoundError, raise_ours
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.storage.stores.listed_files import sort_files
from pyspark_lookup.storage.stores.store import (
    REMOTE_GRANULE_S,
    Count,
    FileVersion,
    Listing,
    is_entered,
    our_error,
    read_error,
    translate_errors,
)


@translate_errors
class FsspecStore:
    """Any fsspec filesystem except S3 and local disks.

    It cannot pin a read to a version, so `Ufs` compares the version after each read.
    """

    pins = False
    lists_after = False

    def __init__(self, path: str, protocol: str, options: Mapping[str, Any], now_s: Callable[[], float]) -> None:
        try:
            kind = fsspec.get_filesystem_class(protocol)
            arguments = {**kind._get_kwargs_from_urls(path), **options}
            self._fs = kind(**{**arguments, "skip_instance_cache": True, "use_listings_cache": False})
        except (ValueError, TypeError, ImportError) as error:
            if str(error) == f"Protocol not known: {protocol}":
                raise OptionError(
                    f"option path = {redact('path', path)!r}: nothing that is installed here reads {protocol}://. Install the fsspec library of this "
                    "store, such as adlfs for abfss://, or check the spelling"
                ) from None
            raise_ours(
                OptionError(
                    f"{redact('path', path)}: fsspec cannot make a filesystem for it ({error}): check the path, the options lookup.storage.…, "
                    "and that the store's fsspec library is installed"
                ),
                error,
            )
        except OSError as error:
            if "libjvm" not in str(error) and "libhdfs" not in str(error):
                raise_ours(our_error(error, path), error)
            raise OptionError(
                f"option path = {redact('path', path)!r}: HDFS is read through Java and Hadoop's libhdfs, which were not found: set "
                "JAVA_HOME and HADOOP_HOME, and set CLASSPATH to what `hadoop classpath --glob` prints"
            ) from None
        self._protocol = protocol
        self._web = protocol in ("http", "https")
        self._now_s = now_s
        place = {
            name: arguments[name] for name in ("account_name", "endpoint_url", "host", "port") if name in arguments
        }
        self.scope = protocol + json.dumps(place, default=str)

    def url_of(self, path: str) -> str:
        return path if self._web else str(self._fs.unstrip_protocol(self._fs._strip_protocol(path)))

    def _version(self, name: str, info: Mapping[str, Any]) -> FileVersion:
        url = self.url_of(name)
        if info.get("size") is None:
            raise UfsError(
                f"{redact('path', url)}: the server does not say how large the file is: copy it to a store that does"
            )
        modified = _instant(info)
        # Azure's listing states ETags without quotes, and its HEAD states them with quotes.
        token = next((f"{key}:{_unquoted(info[key])}" for key in _STRONG if info.get(key)), "")
        if self._web or not token:
            # Web servers often compute ETags from times in whole seconds, so other signs of a change are added.
            times = [f"{key}:{info[key]}" for key in _WEAK if info.get(key) is not None]
            token = ";".join([token, *times] if token else times)
        strong = (token.startswith(_STRONG) and not self._web) or modified is None or self._protocol == "memory"
        settled = strong or self._now_s() - cast(float, modified) > REMOTE_GRANULE_S
        return FileVersion(url, int(info["size"]), token, modified, settled)

    def get_meta(self, path: str, count: Count) -> FileVersion:
        count("head")
        info = self._info(path)
        if info["type"] == "directory":
            raise UfsNotFoundError(f"{redact('path', path)} is a directory, not a file")
        return self._version(path, info)

    def _info(self, path: str) -> dict[str, Any]:
        info = dict(self._fs.info(path))
        if self._protocol == "memory" and info["type"] == "file":
            info["modified"] = self._fs.modified(
                path
            )  # fsspec leaves the time out here; without it, equal sizes would look like equal files
        return info

    def _listed(self, info: Mapping[str, Any]) -> FileVersion:
        return self._version(info["name"], self._info(info["name"]) if self._protocol == "memory" else info)

    def list_status(self, path: str, count: Count) -> Listing:
        root = self._fs._strip_protocol(path).rstrip("/")
        files: list[FileVersion] = []
        directories: set[str] = set()
        pending = [root]
        while pending:
            directory = pending.pop()
            count("list")
            try:
                entries = self._fs.ls(directory, detail=True)
            except FileNotFoundError:
                if directory == root:
                    raise
                continue  # removed since it was listed
            for info in entries:
                name = info["name"].rstrip("/")
                if info["type"] == "directory":
                    directories.add(name[len(root) + 1 :])
                    if is_entered(name.rsplit("/", 1)[-1]):
                        pending.append(name)
                elif name == root:
                    raise UfsNotFoundError(f"{redact('path', path)} is a file, not a directory")
                else:
                    files.append(self._listed(info))
        return Listing(self.url_of(root), sort_files(files), frozenset(directories))

    def get_status(self, path: str, count: Count) -> FileVersion | Listing:
        """The file or the listing of a path. A name with an extension is tried as a file first, any other name as a directory."""
        looks_file = self._web or ("." in path.rstrip("/").rsplit("/", 1)[-1] and not path.endswith("/"))
        first, second = (self.get_meta, self.list_status) if looks_file else (self.list_status, self.get_meta)
        try:
            return first(path, count)
        except UfsNotFoundError:
            if self._web:
                raise
            return second(path, count)

    @contextlib.contextmanager
    def pin(self, file: FileVersion) -> Iterator[Callable[[int, int], bytes]]:
        def read(offset: int, length: int) -> bytes:
            name = self._fs._strip_protocol(file.url)
            try:
                data = cast(bytes, self._fs.cat_file(name, start=offset, end=offset + length))
            except Exception as error:
                raise_ours(read_error(error, file.url), error)
            # A web server without range support sends the whole file.
            return data[offset : offset + length] if self._web and len(data) == file.size != length else data

        yield read

    def list_files(self, path: str, after: str, at_most: int | None, count: Count) -> tuple[FileVersion, ...]:
        count("list")
        files = [info for info in self._fs.ls(path, detail=True) if info["type"] == "file"]
        named = sorted(
            ((info["name"].rsplit("/", 1)[-1], info["name"], info) for info in files), key=lambda one: one[:2]
        )
        return tuple(self._listed(info) for last, _, info in named if last > after)[:at_most]

    def has_directory(self, path: str, count: Count) -> bool:
        if self._web:
            return False  # the web has no directories
        count("head")
        with contextlib.suppress(FileNotFoundError):
            return bool(self._fs.info(path)["type"] == "directory")
        return False

    def last_change_s(self, path: str, count: Count) -> tuple[float | None, float]:
        count("list")
        infos = self._fs.find(self._fs._strip_protocol(path), withdirs=True, detail=True)
        if not infos:
            raise UfsNotFoundError(f"{redact('path', path)} does not exist")
        times = [at_s for info in infos.values() if (at_s := _instant(info)) is not None]
        return max(times, default=None), self._now_s()

    def _refuse(self, path: str, *_: object) -> NoReturn:
        """Raise NotSupportedError, because in most of these filesystems an exclusive create is a check and then a write: another writer may
        come in between."""
        raise NotSupportedError(
            f"{redact('path', path)}: managed tables can be written only to local disks and to S3, because {self._protocol} does not "
            "guarantee that a file is created only if it does not exist: give a path on a local disk or on S3"
        )

    # Only managed tables need these operations.
    list_tree = delete = delete_many = put_if_absent = _refuse


def _unquoted(etag: object) -> str:
    return str(etag).strip('"')


_STRONG = ("generation", "ETag", "etag", "Content-MD5", "md5")
_WEAK = (
    "modified",
    "mtime",
    "last_modified",
    "LastModified",
    "Last-Modified",
    "created",
    "updated",
    "modificationTime",
)


def _instant(info: Mapping[str, Any]) -> float | None:
    """When a file was modified, as Unix seconds, from the various forms that filesystems use; None if none is found."""
    for key in _WEAK:
        value = info.get(key)
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
        if isinstance(value, (int, float)):
            return value / 1000 if key == "modificationTime" else float(value)  # WebHDFS counts milliseconds
        if isinstance(value, str):
            for parse in (parsedate_to_datetime, datetime.fromisoformat):
                with contextlib.suppress(ValueError):
                    return parse(value).timestamp()
    return None
