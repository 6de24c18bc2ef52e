"""Tables that a catalog names: the files of each may lie in any store."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from typing import NoReturn

from pyspark_lookup.errors import NotSupportedError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.storage.stores.file_version import FileVersion
from pyspark_lookup.storage.stores.store import CATALOG_SCHEME, Count, Listing, Store


class CatalogStore:
    """The stores of a catalog's tables. The table's own name is `catalog://<catalog>/<name>`: for this the catalog is asked, not a store.

    `open_store`: opens the store of a URL. `properties`: of the catalog, which tell it from others of its name.
    """

    pins = False
    lists_after = False

    def __init__(
        self, catalog: str, properties: Sequence[tuple[str, str]], open_store: Callable[[str], Store], scope: str
    ) -> None:
        self._prefix = f"{CATALOG_SCHEME}{catalog}/"
        self._open = open_store
        self._stores: dict[str, Store] = {}
        self.scope = "catalog" + json.dumps([catalog, properties, scope])

    def url_of(self, path: str) -> str:
        if path.startswith(self._prefix):
            return path
        if "://" not in path and not path.startswith(("/", "file:")):
            return self._prefix + path
        return self._select_store(path).url_of(path)

    def _select_store(self, url: str) -> Store:
        protocol, separator, location = url.partition("://")
        if not separator:
            protocol, location = "file", ""
        if protocol in ("s3", "s3a", "s3n", "file"):
            place = "s3" if protocol.startswith("s3") else protocol
        else:  # URLs of other protocols may name a host
            place = f"{protocol}://{location.partition('/')[0]}"
        if place not in self._stores:
            self._stores[place] = self._open(url)
        return self._stores[place]

    def get_meta(self, path: str, count: Count) -> FileVersion:
        return self._select_store(path).get_meta(path, count)

    def list_status(self, path: str, count: Count) -> Listing:
        return self._select_store(path).list_status(path, count)

    def get_status(self, path: str, count: Count) -> FileVersion | Listing:
        return self._select_store(path).get_status(path, count)

    def pin(self, file: FileVersion) -> contextlib.AbstractContextManager[Callable[[int, int], bytes]]:
        return self._select_store(file.url).pin(file)

    def list_files(self, path: str, after: str, at_most: int | None, count: Count) -> tuple[FileVersion, ...]:
        return self._select_store(path).list_files(path, after, at_most, count)

    def has_directory(self, path: str, count: Count) -> bool:
        return self._select_store(path).has_directory(path, count)

    def last_change_s(self, path: str, count: Count) -> tuple[float | None, float]:
        return self._select_store(path).last_change_s(path, count)

    def _refuse(self, path: str, *_: object) -> NoReturn:
        raise NotSupportedError(f"{redact('path', path)}: tables of a catalog are not written here")

    list_tree = delete = delete_many = put_if_absent = _refuse
