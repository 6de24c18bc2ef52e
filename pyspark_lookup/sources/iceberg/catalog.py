"""`Pointer`: where a table's current metadata lies, according to a version hint, a catalog, or the user, who may give the path of a metadata
file.

`Catalog` asks an Iceberg catalog, through PyIceberg. `CatalogStore` gives access to the stores in which the catalog's tables lie.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import importlib
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar, cast

from pyspark_lookup.core import threads
from pyspark_lookup.core.decoding import as_text
from pyspark_lookup.errors import (
    CatalogUnavailableError,
    DamagedFileError,
    NotSupportedError,
    OptionError,
    UfsNotFoundError,
    raise_ours,
)
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.storage.stores import CATALOG_SCHEME, Count, FileVersion, Listing, Store
from pyspark_lookup.storage.ufs import Ufs

METADATA_DIRECTORY, METADATA_SUFFIX = "metadata", ".metadata.json"
HINT = "version-hint.text"
_HINT_BYTES = 1000  # no version hint is longer
_INSTEAD = "give the table's name in its catalog (lookup.catalog) or the path of a metadata file"


@dataclasses.dataclass(frozen=True)
class Pointer:
    """Where a table's metadata lies. `source_file`: the file that says so: a hint, or the metadata file itself (None: a catalog says so).

    `modified_at_s`: when that file was written. It is compared as well, because a table that was created anew may have a hint with the same
    content, and so with the same ETag. `size`: the size of the metadata file, if known. `table_id`: the table's id, if the catalog has sent
    it.
    """

    location: str
    source_file: FileVersion | None = None
    modified_at_s: float | None = None
    size: int | None = dataclasses.field(default=None, compare=False)
    table_id: str | None = None

    @classmethod
    def from_file(cls, location: str, source_file: FileVersion, size: int | None = None) -> Pointer:
        """The pointer to the metadata file at `location`. `source_file`: the version hint that names this file, or the metadata file
        itself."""
        return cls(location, source_file, source_file.modified_at_s, size)

    @property
    def settled(self) -> bool:
        """Whether `source_file` is so old that any later change would show in its identity; True if a catalog gave the pointer."""
        return self.source_file is None or self.source_file.cacheable

    def matches_hint(self, hint: FileVersion) -> bool:
        """Whether the pointer was read from this state of the hint, as far as the store's identities show."""
        return (self.source_file, self.modified_at_s) == (hint, hint.modified_at_s) and self.settled and hint.cacheable

    def to_json(self) -> list[Any]:
        return [self.location, None if self.source_file is None else self.source_file.to_json(), self.table_id]

    @classmethod
    def from_json(cls, record: Any) -> Pointer:
        """The pointer that `to_json` wrote. Raises TypeError or ValueError for a malformed record."""
        location, source_file, table_id = record
        if source_file is not None:
            return cls.from_file(as_text(location), FileVersion.from_json(source_file))
        return cls(as_text(location), table_id=None if table_id is None else as_text(table_id))


def read_pointer(ufs: Ufs, table: str, last_pointer: Pointer | None) -> Pointer:
    """The pointer in the version hint of the table at a URL. One call if the hint is still the one of `last_pointer`.

    Raises UfsNotFoundError if there is no hint, DamagedFileError for a hint that names no existing file.
    """
    directory = f"{table}/{METADATA_DIRECTORY}"
    hint = ufs.get_meta(f"{directory}/{HINT}")
    if last_pointer is not None and last_pointer.matches_hint(hint):
        return last_pointer
    redacted_path = redact("path", hint.url)
    if hint.size > _HINT_BYTES:
        raise DamagedFileError(f"{redacted_path} is not a version hint: it has {hint.size} bytes; {_INSTEAD}")
    try:
        hint_text = ufs.read_ranges(hint, [(0, hint.size)])[0].decode().strip()
    except UnicodeDecodeError as problem:
        raise DamagedFileError(f"{redacted_path} is not a version hint: {problem}; {_INSTEAD}") from None
    for name in _names(hint_text):
        try:
            file = ufs.get_meta(f"{directory}/{name}")
            return Pointer.from_file(file.url, hint, file.size)
        except UfsNotFoundError:
            continue
    raise DamagedFileError(
        f"{redacted_path} names version {hint_text!r}, but there is no file {' or '.join(_names(hint_text))}; {_INSTEAD}"
    )


def _names(hint_text: str) -> list[str]:
    """The names of the metadata files that the hint may mean."""
    if not hint_text or "/" in hint_text:
        return []
    if hint_text.endswith((METADATA_SUFFIX, f"{METADATA_SUFFIX}.gz")):
        return [hint_text]
    starts = [f"v{hint_text}", hint_text] if hint_text.isdecimal() else [hint_text]
    return [
        start + end for start in starts for end in (METADATA_SUFFIX, f".gz{METADATA_SUFFIX}", f"{METADATA_SUFFIX}.gz")
    ]


T = TypeVar("T")

_CALL_S = 60.0  # because PyIceberg's client of REST catalogs waits without a limit
_READER = "pyspark_lookup.sources.iceberg.pyiceberg_catalog"


class Catalog:
    """The catalog with this name in PyIceberg's configuration, or with these `properties` instead. Must not be used after a fork.

    PyIceberg is imported when the catalog is first asked. `call_s`: the timeout of each call.
    """

    def __init__(self, name: str, properties: Sequence[tuple[str, str]], call_s: float = _CALL_S) -> None:
        self.name = name
        self._properties = dict(properties)
        self._call_s = call_s
        self._lock = threading.Lock()
        self._client: Any = None

    def load(self, table: str) -> tuple[str, dict[str, Any] | None]:
        """(where the metadata of a table lies, the metadata itself if the catalog sends it). One call.

        Raises UfsNotFoundError if the catalog has no such table, OptionError if the catalog is not configured, CatalogUnavailableError if it
        does not answer.
        """
        reader = _import(self.name)
        with self._lock:
            client = self._client
        if client is None:
            client = self._within(lambda: reader.open_catalog(self.name, self._properties))
            with self._lock:
                self._client = client
        return cast(
            "tuple[str, dict[str, Any] | None]", self._within(lambda: reader.load_table(client, self.name, table))
        )

    def _within(self, call: Callable[[], T]) -> T:
        """The result of a call. Raises CatalogUnavailableError if the call takes longer than `call_s`."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as problem:
                future.set_exception(problem)

        threads.start("lookupcache-catalog", run, foreign=True)
        try:
            return future.result(self._call_s)
        except concurrent.futures.TimeoutError:
            with self._lock:
                self._client = None
            raise CatalogUnavailableError(
                f"the Iceberg catalog {self.name!r} has not answered within {self._call_s:g} s: try again later, or check the catalog's uri"
            ) from None


def _import(name: str) -> Any:
    try:
        return importlib.import_module(_READER)
    except ImportError as problem:
        raise_ours(
            OptionError(
                f"option lookup.catalog = {name!r} needs PyIceberg, which this machine does not have: pip install "
                f"'pyspark-lookup[iceberg]' ({problem})"
            ),
            problem,
        )


# --- the stores of a catalog's tables -------------------------------------------------------------


class CatalogStore:
    """The stores in which a catalog's tables lie. The table itself has the URL `catalog://<catalog>/<name>`, which no store knows.

    `open_store`: opens the store of a URL. `properties`: the properties of the catalog, which tell it from other catalogs with the same name.
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
        raise NotSupportedError(
            f"{redact('path', path)}: lookupcache does not write to tables of a catalog: write with format('iceberg')"
        )

    list_tree = delete = delete_many = put_if_absent = _refuse
