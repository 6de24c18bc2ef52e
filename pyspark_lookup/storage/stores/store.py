"""The interface that all stores share, and its values, above all `FileVersion`: one state of one file, with what a table's metadata says of it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pyspark_lookup.columnar.keys import Numbers
from pyspark_lookup.columnar.predicate import ColumnStats
from pyspark_lookup.core.credentials import without_url_credentials
from pyspark_lookup.core.decoding import as_count, as_number, as_text, as_texts
from pyspark_lookup.options.enums import FileFormatName

if TYPE_CHECKING:
    import pyarrow as pa

Range = tuple[int, int]
"""(offset, length) in bytes."""
PartitionValues = tuple[tuple[str, str | None], ...]
"""(column, value as text; None: null) of each partition column."""

IMMUTABLE = "immutable:"
"""The prefix of the identity of a file that never changes: its name identifies it, even after it is copied."""
DELETE_FILE = IMMUTABLE + "deletes"
"""The identity of an immutable delete file."""
PART_OF_FILE = IMMUTABLE + "part"
"""The identity of an immutable file of unknown size, of which only some bytes are read: its size is given as 0."""


@dataclasses.dataclass(frozen=True)
class EqualityColumns:
    """The columns (`schema`) whose values in a row of `file` say which rows are deleted."""

    file: FileVersion
    schema: pa.Schema


class Deletes(Protocol):
    """Names the deleted rows of data files: by a delete file, a deletion vector, or their positions in the value itself.

    A value that travels with the files of a version, also to other processes.
    """

    @property
    def name(self) -> str:
        """A name, equal for files that delete the same rows."""

    @property
    def place(self) -> tuple[FileVersion, Range] | None:
        """The bytes that name the rows; None if the value itself has their positions."""

    @property
    def keys(self) -> FileVersion | None:
        """A file with the key columns of the deleted rows, whose bounds show caches which keys may be affected; None: there is none."""

    @property
    def equality(self) -> EqualityColumns | None:
        """The columns by whose values rows are deleted; None: rows are deleted by position."""

    def positions(self, data: bytes | memoryview) -> Mapping[str, Numbers]:
        """The positions of deleted rows (ascending, from 0), by the data file's path below its table.

        `data`: the bytes of `place`, empty without one. Raises DamagedFileError.
        """

    def to_json(self) -> list[Any]:
        """The value as a JSON list; its first item is the kind that `versions.deletes.DELETES` looks up to parse it."""


@dataclasses.dataclass(frozen=True, slots=True)
class FileStatistics:
    """What a table's metadata says of a file's rows: their number (deleted ones included), and the bounds of columns by name."""

    rows: int | None = None
    bounds: Mapping[str, ColumnStats] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class StoredColumn:
    """How files store a column that the table calls `name`: as `stored`, or under a field id. `parts`: the columns inside a nested column.

    `names`: its possible names in files without field ids (None: there it is found by position, or in ORC by `stored`). `default`: its
    value, as text, in files that lack it (None: null). `uuid`: the files have 16 bytes for what is text in the table.
    """

    name: str
    stored: str
    field_id: int | None
    parts: tuple[StoredColumn, ...] = ()
    names: tuple[str, ...] | None = ()
    default: str | None = None
    uuid: bool = False

    def to_json(self) -> list[Any]:
        """The column as a JSON value."""
        parts = [part.to_json() for part in self.parts]
        return [self.name, self.stored, self.field_id, parts, self.names, self.default, self.uuid]

    @classmethod
    def from_json(cls, record: Any) -> StoredColumn:
        """The column in a list from `to_json`. Raises TypeError or ValueError for any other value."""
        name, stored, field_id, parts, names, default, uuid = record
        number = None if field_id is None else as_count(field_id)
        called = None if names is None else as_texts(names)
        value = None if default is None else as_text(default)
        inner = tuple(map(cls.from_json, parts))
        return cls(as_text(name), as_text(stored), number, inner, called, value, uuid is True)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class FileVersion:
    """One state of one file: its URL, size in bytes and identity, compared by equality only.

    `identity`: the store's strongest token; "" means that it has none, and the bytes are not cached. `modified_at_s` (Unix time of the
    store's clock, None if unknown) and `settled` (False: so new that the identity may yet stand for other bytes) describe the observation,
    not the state. From the table's metadata, for the version that the file belongs to: `partition` (None: its directories say it),
    `deletes`, `statistics` (None: its footer has them), `columns` (None: their names are those in the file), `format` (None: that of the
    table's other files).
    """

    url: str
    size: int
    identity: str
    modified_at_s: float | None = dataclasses.field(default=None, compare=False)
    settled: bool = dataclasses.field(default=True, compare=False)
    partition: PartitionValues | None = dataclasses.field(default=None, compare=False)
    deletes: tuple[Deletes, ...] = dataclasses.field(default=(), compare=False)
    statistics: FileStatistics | None = dataclasses.field(default=None, compare=False)
    columns: tuple[StoredColumn, ...] | None = dataclasses.field(default=None, compare=False)
    format: FileFormatName | None = dataclasses.field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"FileVersion({without_url_credentials(self.url)!r}, {self.size}, {self.identity!r})"

    @property
    def cacheable(self) -> bool:
        """Whether bytes read under this version may be cached."""
        return bool(self.identity) and self.settled

    @property
    def immutable(self) -> bool:
        """Whether the file's name alone determines its bytes."""
        return self.identity.startswith(IMMUTABLE)

    def to_json(self) -> list[Any]:
        """The file as a JSON value, without what the table's metadata says of it."""
        return [self.url, self.size, self.identity, self.modified_at_s, self.settled]

    @classmethod
    def from_json(cls, record: Any) -> FileVersion:
        """The file that `to_json` wrote. Raises TypeError or ValueError if it is malformed."""
        url, size, identity, modified_at_s, settled = record
        modified_at_s = None if modified_at_s is None else as_number(modified_at_s)
        return cls(as_text(url), as_count(size), as_text(identity), modified_at_s, settled is True)

    def as_immutable(self) -> FileVersion:
        """The same file, marked as one whose name is never used for other bytes."""
        return FileVersion(self.url, self.size, IMMUTABLE, self.modified_at_s)


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
