"""The values and the interface that all stores share."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from pyspark_lookup.storage.stores.file_version import FileVersion

Count = Callable[[str], None]
"""Called with "head", "list", "get", "put" or "delete" before each call to the store."""

CATALOG_SCHEME = "catalog://"
"""The prefix of the URL of a table that a catalog knows by name, instead of a store by its files."""
LOG_DIRECTORY = "_lookup"
"""The directory of a managed table's log, beside its data."""
log_directories = [LOG_DIRECTORY]
"""Names of the directories that mark tables with a log. Listings stop at them. Kinds of tables add theirs."""

# With an mtime this close to now, two contents may have the same one (git's "racy" entries): one timer tick of an older kernel
# for local files, the whole seconds of HTTP and some slack for others.
LOCAL_GRANULE_S = 0.02
REMOTE_GRANULE_S = 2.0
SETTLED_AFTER_S = REMOTE_GRANULE_S
"""If a file still has the identity that it had this long ago, that identity stands for one content, in any store."""


@dataclasses.dataclass(frozen=True, slots=True)
class Listing:
    """The files below a directory: `files` by URL, and the `directories` that were seen (relative paths).

    `listed_at_s`: the time of the listing on the store's clock, which also sets the files' times; None if that is the host's clock.
    """

    url: str
    files: tuple[FileVersion, ...]
    directories: frozenset[str]
    listed_at_s: float | None = None


class Store(Protocol):
    """One storage system with one set of options. `pins`: its reads refuse another version themselves. `lists_after`: a listing after a name
    costs only what it returns."""

    scope: str
    pins: bool
    lists_after: bool

    def url_of(self, path: str) -> str: ...
    def get_meta(self, path: str, count: Count) -> FileVersion: ...
    def list_status(self, path: str, count: Count) -> Listing: ...
    def get_status(self, path: str, count: Count) -> FileVersion | Listing: ...
    def pin(self, file: FileVersion) -> contextlib.AbstractContextManager[Callable[[int, int], bytes]]: ...
    def list_files(self, path: str, after: str, at_most: int | None, count: Count) -> tuple[FileVersion, ...]: ...
    def has_directory(self, path: str, count: Count) -> bool: ...
    def list_tree(self, path: str, count: Count) -> tuple[FileVersion, ...]: ...
    def last_change_s(self, path: str, count: Count) -> tuple[float | None, float]: ...
    def put_if_absent(self, path: str, data: bytes, count: Count) -> FileVersion | None: ...
    def delete(self, path: str, count: Count) -> None: ...
    def delete_many(self, directory: str, names: Sequence[str], count: Count) -> None: ...


def add_log_directory(name: str) -> str:
    """Let listings stop at directories of this name, and return it. Modules of kinds of tables call it when they are imported."""
    if name not in log_directories:
        log_directories.append(name)
    return name


def is_entered(name: str) -> bool:
    """Whether listings enter a directory of this name. Like Spark and Hive they skip `_…` and `.…`, but not `_k=v`."""
    return not name.startswith(".") and (not name.startswith("_") or "=" in name or name == "_spark_metadata")
