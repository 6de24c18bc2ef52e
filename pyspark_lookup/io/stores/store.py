"""The values and the interface that all stores share."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from pyspark_lookup.base.decoding import count_of, number_of, text_of
from pyspark_lookup.base.errors import without_credentials

__all__ = [
    "HIDDEN",
    "IMMUTABLE",
    "LOCAL_GRANULE_S",
    "LOG_DIRECTORY",
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
"""Told "head", "list", "get", "put" or "delete" before each call to the store."""

LOG_DIRECTORY = "_lookup"
"""What a managed table's directory holds beside its data; listings stop where they meet it."""

# An mtime this close to now may stand for two contents (git's "racy" entries): one timer tick of an
# older kernel for local files, the whole seconds of HTTP and the slack of others.
LOCAL_GRANULE_S = 0.02
REMOTE_GRANULE_S = 2.0
IMMUTABLE = "immutable:"
"""The identity of a file that nobody ever changes begins so: it is told by its name, also where it was copied to."""
HIDDEN = IMMUTABLE + "hidden"
"""The identity of such a file that names rows of others which do not count any more."""
SETTLED_AFTER_S = REMOTE_GRANULE_S
"""An identity seen this long ago, and still the file's, stands for one content in any store."""


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class FileVersion:
    """One state of one file: its URL, size in bytes and identity, compared by equality only.

    `identity` is the store's strongest token; "" means it has none and the bytes are not kept.
    `modified_at_s` (Unix time of the store's clock, None if unknown) and `settled` (False: so new
    that the identity may yet stand for other bytes) describe the observation, not the state. `hidden`, of a
    managed table: files that say which rows of this one, and of others, do not count in the version it is of.
    """

    url: str
    size: int
    identity: str
    modified_at_s: float | None = dataclasses.field(default=None, compare=False)
    settled: bool = dataclasses.field(default=True, compare=False)
    hidden: tuple[FileVersion, ...] = dataclasses.field(default=(), compare=False)

    def __repr__(self) -> str:
        return f"FileVersion({without_credentials(self.url)!r}, {self.size}, {self.identity!r})"

    @property
    def cacheable(self) -> bool:
        """Whether bytes read under this version may be kept."""
        return bool(self.identity) and self.settled

    @property
    def immutable(self) -> bool:
        """Whether the name alone says which bytes these are."""
        return self.identity.startswith(IMMUTABLE)

    def plain(self) -> list[Any]:
        """The file as JSON can hold it, without what it hides."""
        return [self.url, self.size, self.identity, self.modified_at_s, self.settled]

    @classmethod
    def of_plain(cls, found: Any) -> FileVersion:
        """The file that `plain` wrote. Raises TypeError or ValueError for anything else."""
        url, size, identity, modified_at_s, settled = found
        modified_at_s = None if modified_at_s is None else number_of(modified_at_s)
        return cls(text_of(url), count_of(size), text_of(identity), modified_at_s, settled is True)

    def as_immutable(self) -> FileVersion:
        """The same file, if its name is never used for other bytes."""
        return FileVersion(self.url, self.size, IMMUTABLE, self.modified_at_s)


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
    def list_files(self, path: str, after: str, at_most: int | None, count: Count) -> tuple[FileVersion, ...]: ...
    def list_tree(self, path: str, count: Count) -> tuple[FileVersion, ...]: ...
    def last_change_s(self, path: str, count: Count) -> tuple[float | None, float]: ...
    def put_if_absent(self, path: str, data: bytes, count: Count) -> FileVersion | None: ...
    def delete(self, path: str, count: Count) -> None: ...


def is_entered(name: str) -> bool:
    """Whether a directory of this name is listed: not those Spark and Hive skip (`_…`, `.…`, but not `_k=v`)."""
    return not name.startswith(".") and (not name.startswith("_") or "=" in name or name == "_spark_metadata")
