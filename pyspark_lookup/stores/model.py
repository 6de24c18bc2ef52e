"""The values and the interface that all stores share."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Protocol

__all__ = [
    "LOCAL_GRANULE_S",
    "REMOTE_GRANULE_S",
    "SETTLED_AFTER_S",
    "Count",
    "FileVersion",
    "Listing",
    "Range",
    "Store",
    "is_entered",
]

Range = tuple[int, int]
"""(offset, length) in bytes."""
Count = Callable[[str], None]
"""Told "head", "list", "get" or "put" before each call to the store."""

# An mtime this close to now may stand for two contents (git's "racy" entries): one timer tick of an
# older kernel for local files, the whole seconds of HTTP and the slack of others.
LOCAL_GRANULE_S = 0.02
REMOTE_GRANULE_S = 2.0
SETTLED_AFTER_S = REMOTE_GRANULE_S
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
    def put_if_absent(self, path: str, data: bytes, count: Count) -> bool: ...


def is_entered(name: str) -> bool:
    """Whether a directory of this name is listed: not those Spark and Hive skip (`_…`, `.…`, but not `_k=v`)."""
    return not name.startswith(".") and (not name.startswith("_") or "=" in name or name == "_spark_metadata")
