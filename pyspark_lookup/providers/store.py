"""A provider as a store with one file in it, whose identity is the provider's version."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from pyspark_lookup.base.errors import NotSupportedError, UfsNotFoundError
from pyspark_lookup.io.disk import key_of
from pyspark_lookup.io.stores import Count, FileVersion, Listing
from pyspark_lookup.options.enums import CacheMode
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.providers.provider import ProvidedTable

_UNVERSIONED = "unversioned"
_SIZE = 1  # nobody knows it; with any, a change of the one file is a change of the whole table


class ProvidedStore:
    """The table of a provider. `now_s`: names the loads of one that has no versions."""

    pins = True

    def __init__(self, provided: ProvidedTable, options: LookupOptions, now_s: Callable[[], float]) -> None:
        made_with = (options.path, options.provider_options)
        self.scope = f"provider:{provided.name}"
        self._url = f"{self.scope}/{key_of(*made_with)}"
        self._provided = provided
        # What is copied as a whole is another state at each copy; rows by key expire one by one.
        self._each_time = options.cache is CacheMode.FULL
        self._now_s = now_s

    def url_of(self, path: str) -> str:
        return self._url

    def get_meta(self, path: str, count: Count) -> FileVersion:
        count("head")
        version = self._provided.version()
        if version is None:
            version = repr(self._now_s()) if self._each_time else _UNVERSIONED
        return FileVersion(self._url, _SIZE, version)

    def get_status(self, path: str, count: Count) -> FileVersion | Listing:
        return self.get_meta(path, count)

    def list_status(self, path: str, count: Count) -> Listing:
        raise UfsNotFoundError(f"{self._url} is no directory")

    def pinned(self, file: FileVersion) -> contextlib.AbstractContextManager[Callable[[int, int], bytes]]:
        raise UfsNotFoundError(f"{self._url} has no bytes")

    def list_files(self, path: str, after: str, at_most: int | None, count: Count) -> tuple[FileVersion, ...]:
        return ()

    def list_tree(self, path: str, count: Count) -> tuple[FileVersion, ...]:
        return ()

    def last_change_s(self, path: str, count: Count) -> tuple[float | None, float]:
        return None, self._now_s()

    def put_if_absent(self, path: str, data: bytes, count: Count) -> FileVersion | None:
        raise NotSupportedError(f"{self._url}: a provider's table is not written here")

    def delete(self, path: str, count: Count) -> None:
        raise NotSupportedError(f"{self._url}: a provider's table is not written here")
