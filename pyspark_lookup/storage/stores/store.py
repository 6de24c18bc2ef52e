"""The interface of all stores, and the values that it uses, above all `FileVersion`: one state of one file, and what a table's metadata says
of it.

The module also knows the names of the files of managed tables, and translates the errors of other libraries into ours. Files with other
names, in a table's directory, are never written or removed.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from pyspark_lookup.columnar.keys import Numbers
from pyspark_lookup.columnar.predicate import ColumnStats
from pyspark_lookup.core.credentials import find_origin, without_url_credentials
from pyspark_lookup.core.decoding import as_count, as_number, as_text, as_texts
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.errors import (
    PysparkLookupError,
    SourceChangedError,
    UfsError,
    UfsNotFoundError,
    UfsPermissionError,
    UfsThrottledError,
    UfsTimeoutError,
    UfsUnavailableError,
    foreign_text,
    raise_ours,
)
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import FileFormatName

if TYPE_CHECKING:
    import pyarrow as pa

    from pyspark_lookup.storage.stores.listed_files import ListedFiles

Range = tuple[int, int]
"""(offset, length) in bytes."""
PartitionValues = tuple[tuple[str, str | None], ...]
"""For each partition column: (column, value as text; None: null)."""

IMMUTABLE = "immutable:"
"""The prefix of the identity of a file that never changes. Its name alone identifies its bytes, even after the file is copied."""
DELETE_FILE = IMMUTABLE + "deletes"
"""The identity of an immutable delete file."""
PART_OF_FILE = IMMUTABLE + "part"
"""The identity of an immutable file of which only some bytes are read. Its size is not known, and is given as 0."""


@dataclasses.dataclass(frozen=True)
class EqualityColumns:
    """The delete file `file`, and the columns (`schema`) by whose values it deletes rows."""

    file: FileVersion
    schema: pa.Schema


class EqualityDeletes(Protocol):
    """A delete file that names the deleted rows by their values. It deletes rows of data files with a lower sequence number than
    `sequence`."""

    @property
    def name(self) -> str:
        """A name that is equal for files that delete the same rows."""

    @property
    def sequence(self) -> int: ...

    @property
    def keys(self) -> FileVersion:
        """The delete file, with those of its columns that the table still has. Their bounds show which keys the deletes may affect."""

    @property
    def equality(self) -> EqualityColumns:
        """The columns by whose values rows are deleted."""

    @property
    def compared(self) -> Hashable:
        """A key to group deletes by, cheaper to compute than `equality`: equal for delete files that compare the same columns of the same schema."""

    def without_bounds(self) -> EqualityDeletes:
        """The same deletes, without the bounds of their columns."""

    def to_json(self) -> list[Any]:
        """The deletes as a JSON list. Its first item is the kind, for which `versions.model.DELETES` has the parser."""


@dataclasses.dataclass(frozen=True, eq=False)
class EqualityGroup:
    """The equality deletes of one partition, or of all partitions, in the order of their sequence numbers.

    All data files that they concern share one group.
    """

    files: tuple[EqualityDeletes, ...]

    @classmethod
    def from_names(cls, names: Iterable[str], deletes_by_name: Mapping[str, EqualityDeletes]) -> EqualityGroup:
        """The group of the deletes with these names. Raises KeyError for an unknown name."""
        return cls(tuple(sorted((deletes_by_name[name] for name in names), key=lambda deletes: deletes.sequence)))

    @property
    def sequence(self) -> int:
        """The highest sequence number of the deletes."""
        return self.files[-1].sequence

    def after(self, sequence: int) -> tuple[EqualityDeletes, ...]:
        """The deletes with higher sequence numbers than `sequence`."""
        return self.files[bisect.bisect_right(self.files, sequence, key=lambda deletes: deletes.sequence) :]

    @cached_property
    def by_columns(self) -> tuple[tuple[EqualityColumns, tuple[EqualityDeletes, ...]], ...]:
        """For each set of columns: these columns, and the deletes that compare them, in order."""
        groups: dict[Hashable, list[EqualityDeletes]] = {}
        for deletes in self.files:
            groups.setdefault(deletes.compared, []).append(deletes)
        return tuple((some[0].equality, tuple(some)) for some in groups.values())

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(deletes.name for deletes in self.files)


class Deletes(Protocol):
    """Tells which rows of data files are deleted by position. The positions are in a delete file, in a deletion vector, or in this object.

    The object travels with the files of a version, also to other processes.
    """

    @property
    def name(self) -> str:
        """A name that is equal for objects that delete the same rows."""

    @property
    def place(self) -> tuple[FileVersion, Range] | None:
        """The file and the range of bytes that name the rows; None if this object has the positions."""

    @property
    def keys(self) -> FileVersion | None:
        """A file with the key columns of the deleted rows; None if there is none. The file's bounds show caches which keys the deletes may
        affect."""

    def positions(self, data: bytes | memoryview) -> Mapping[str, Numbers]:
        """The positions of the deleted rows (ascending, from 0), by the path of their data file below its table.

        `data`: the bytes at `place`; empty if there is no place. Raises DamagedFileError for malformed bytes.
        """

    def to_json(self) -> list[Any]:
        """The deletes as a JSON list. Its first item is the kind, for which `versions.model.DELETES` has the parser."""


@dataclasses.dataclass(frozen=True, slots=True)
class FileStatistics:
    """The number of a file's rows, deleted ones included, and the bounds of its columns by name, as the table's metadata states them."""

    rows: int | None = None
    bounds: Mapping[str, ColumnStats] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class StoredColumn:
    """How files store the column that the table calls `name`: under the name `stored`, or under a field id. `parts`: the columns inside a
    nested column.

    `names`: the names that the column may have in files without field ids (None: in these files the column is found by its position, or, in
    ORC, by `stored`). `default`: the column's value, as text, in files that lack the column (None: null). `uuid`: files store 16 bytes, which
    the table shows as text.
    """

    name: str
    stored: str
    field_id: int | None
    parts: tuple[StoredColumn, ...] = ()
    names: tuple[str, ...] | None = ()
    default: str | None = None
    uuid: bool = False

    def to_json(self) -> list[Any]:
        """The column as a JSON list, which `from_json` reads."""
        parts = [part.to_json() for part in self.parts]
        return [self.name, self.stored, self.field_id, parts, self.names, self.default, self.uuid]

    @classmethod
    def from_json(cls, record: Any) -> StoredColumn:
        """The column that `to_json` wrote. Raises TypeError or ValueError for a malformed record."""
        name, stored, field_id, parts, names, default, uuid = record
        number = None if field_id is None else as_count(field_id)
        called = None if names is None else as_texts(names)
        value = None if default is None else as_text(default)
        inner = tuple(map(cls.from_json, parts))
        return cls(as_text(name), as_text(stored), number, inner, called, value, uuid is True)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class FileVersion:
    """One state of one file: its URL, size in bytes and identity. File versions are equal if these three are equal.

    `identity`: the strongest token of the store that tells two states of the file apart. If it is "", the store has no such token, and the
    bytes are not cached. `modified_at_s` (Unix time on the store's clock, None if unknown) and `settled` (False: the file is so new that
    later bytes may get the same identity) describe the observation, not the state.

    The other fields come from the table's metadata, for the version that the file belongs to. `partition` (None: the names of the file's
    directories tell it), `deletes`, `statistics` (None: the file's footer has them), `columns` (None: the file has the table's column names),
    `format` (None: the format of the table's other files), `equality`: equality deletes; those with a higher sequence number than
    the file's `sequence` apply to it.
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
    equality: tuple[EqualityGroup, ...] = dataclasses.field(default=(), compare=False)
    sequence: int = dataclasses.field(default=0, compare=False)

    def __repr__(self) -> str:
        return f"FileVersion({without_url_credentials(self.url)!r}, {self.size}, {self.identity!r})"

    @property
    def cacheable(self) -> bool:
        """Whether bytes that were read under this version may be cached."""
        return bool(self.identity) and self.settled

    @property
    def immutable(self) -> bool:
        """Whether the file's name alone determines its bytes."""
        return self.identity.startswith(IMMUTABLE)

    @property
    def state_name(self) -> str | None:
        """A text of URL, size and identity, which determines the bytes of an immutable file; None for any other file."""
        return f"{self.url}\0{self.size}\0{self.identity}" if self.immutable else None

    def to_json(self) -> list[Any]:
        """The file as a JSON list, without the fields that come from the table's metadata."""
        return [self.url, self.size, self.identity, self.modified_at_s, self.settled]

    @classmethod
    def from_json(cls, record: Any) -> FileVersion:
        """The file that `to_json` wrote. Raises TypeError or ValueError for a malformed record."""
        url, size, identity, modified_at_s, settled = record
        modified_at_s = None if modified_at_s is None else as_number(modified_at_s)
        return cls(as_text(url), as_count(size), as_text(identity), modified_at_s, settled is True)

    def as_immutable(self) -> FileVersion:
        """The same file, marked as one whose name is never used for other bytes."""
        return FileVersion(self.url, self.size, IMMUTABLE, self.modified_at_s)


Count = Callable[[str], None]
"""Called with "head", "list", "get", "put" or "delete" before each call to the store."""

CATALOG_SCHEME = "catalog://"
"""The prefix of the URL of a table that is identified by its name in a catalog, not by a path in a store."""
LOG_DIRECTORY = "_lookup"
"""The directory of a managed table's log, beside its data."""
log_directories = [LOG_DIRECTORY]
"""The names of directories that mark a table with a log. A listing that finds one stops there. See `add_log_directory`."""

# A file that was modified this recently may change again without a new mtime (git calls such entries "racy"). For local files this is one
# timer tick of an older kernel; for others a whole second, as HTTP has, and some slack.
LOCAL_GRANULE_S = 0.02
REMOTE_GRANULE_S = 2.0
SETTLED_AFTER_S = REMOTE_GRANULE_S
"""Seconds. If a file has had the same identity for this long, that identity stands for one content, in any store."""


@dataclasses.dataclass(frozen=True, slots=True)
class Listing:
    """The files below a directory: `files` by URL (many files are a `ListedFiles`), and the relative paths of the `directories` that were
    seen.

    `listed_at_s`: the time of the listing on the store's clock, which also sets the times of the files; None if that is the host's clock.
    """

    url: str
    files: tuple[FileVersion, ...] | ListedFiles
    directories: frozenset[str]
    listed_at_s: float | None = None

    def urls_ending(self, end: str) -> list[str]:
        """The URLs of the files that end with `end`."""
        urls = self.files.urls_ending(end) if not isinstance(self.files, tuple) else (file.url for file in self.files)
        return [url for url in urls if url.endswith(end)]


class Store(Protocol):
    """One storage system with one set of options. `Ufs` says what its functions return.

    `get_meta` returns None for a missing file, or raises UfsNotFoundError if the store reports that by an error.

    `pins`: whether a read inside `pin` fails by itself if the file has another version. `lists_after`: whether a listing of the names after a
    given name costs only as much as the files that it returns.
    """

    scope: str

    @property
    def pins(self) -> bool: ...
    @property
    def lists_after(self) -> bool: ...
    def url_of(self, path: str) -> str: ...
    def get_meta(self, path: str, count: Count) -> FileVersion | None: ...
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
    """Make listings stop at directories with this name, and return the name. Modules of kinds of tables call this when they are imported."""
    if name not in log_directories:
        log_directories.append(name)
    return name


def is_entered(name: str) -> bool:
    """Whether listings include the files in a directory of this name. Like Spark and Hive, they skip `_…` and `.…`, but not `_k=v`."""
    return not name.startswith(".") and (not name.startswith("_") or "=" in name or name == "_spark_metadata")


_HEX = "[0-9a-f]"
_DATA = rf"(?:(?:part|kept|compacted)(?:-[0-9]{{5,}})*|deletes)(?:-{_HEX}{{16}}){{1,2}}\.parquet"
_OF_LOG = rf"(?:log|checkpoints)/[0-9]{{20}}\.json|heartbeats/[0-9]{{20}}-{_HEX}+|vacuum-{_HEX}+"
_DIRECTORY = r"write-[0-9]{20}|stream-[^/]+/[0-9]{12}-[^/]+"
_DATA_FILE = re.compile(rf"(?:{_DIRECTORY})/{_DATA}")
_FILE = re.compile(rf"(.*/|)({LOG_DIRECTORY}/(?:{_OF_LOG})|(?:{_DIRECTORY})/{_DATA})", re.DOTALL)
_TEMPORARY = re.compile(rf"(.*/)\.([^/]+)\.{_HEX}+", re.DOTALL)


def split_path(path: str) -> tuple[str, list[str]]:
    """(the table's directory, the names below it) for the path of a managed table's file; (the file's directory, [its name]) for any other
    path."""
    named = _FILE.fullmatch(path)
    if named is None or not named[1].strip("/"):
        directory, _, name = path.rpartition("/")
        return directory, [name]
    return named[1].rstrip("/"), named[2].split("/")


def is_own(path: str) -> bool:
    """Whether a path has the form of the path of a managed table's file."""
    return _FILE.fullmatch(path) is not None


def is_data_file(name: str) -> bool:
    """Whether `name`, a path below a table's directory, is one that lookupcache gives to data files."""
    return _DATA_FILE.fullmatch(name) is not None


def whole_name(name: str) -> str:
    """The final name of a temporary file; any other name is returned unchanged."""
    temporary = _TEMPORARY.fullmatch("/" + name)
    return name if temporary is None else (temporary[1] + temporary[2])[1:]


S = TypeVar("S", bound=Store)

_OPERATIONS = (
    "get_meta",
    "list_status",
    "get_status",
    "list_files",
    "has_directory",
    "list_tree",
    "last_change_s",
    "delete",
    "delete_many",
    "put_if_absent",
)


def translate_errors(store: type[S]) -> type[S]:
    """Change a store's class so that its operations on a path raise only our errors."""
    for name in _OPERATIONS:
        setattr(store, name, _translate(getattr(store, name)))
    return store


def _translate(operation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operation)
    def call(self: Store, path: str, *args: Any) -> Any:
        try:
            return operation(self, path, *args)
        except PysparkLookupError:
            raise
        except Exception as error:
            raise_ours(our_error(error, path), error)

    return call


def our_error(error: BaseException, url: str) -> BaseException:
    """Our error that corresponds to an error of another library. An error of ours is returned unchanged."""
    if isinstance(error, PysparkLookupError):
        return error
    url = redact("path", url)
    chain, code, status = _chain(error), error_code(error), http_status(error)
    names = {base.__name__ for e in chain for base in type(e).__mro__}
    # fsspec's web client raises FileNotFoundError for every failure; the cause of that error shows what has failed.
    missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
    timed_out = isinstance(error, TimeoutError) or status == 408 or any("Timeout" in name for name in names)
    # 409: another conditional write of this key was under way.
    transient = status in (409, 429) or (status or 0) >= 500 or names & _LOST_CONNECTION or code in _TRANSIENT_CODES
    if status in (412, 304) or (isinstance(error, FileNotFoundError) and "FileExpired" in names):
        return SourceChangedError(f"{url} changed while it was read")
    if code == "NoSuchBucket":
        return UfsNotFoundError(
            f"{url}: there is no such bucket: check its name and the endpoint (lookup.storage.endpoint_url)"
        )
    if status in (404, 410) or (missing and not (status or timed_out or transient)):
        return UfsNotFoundError(f"{url} does not exist")
    text = f"{url}: {_reason(chain, missing)}"
    if advice := _advice(error, code, status):
        text += f" ({advice})"
    if code in _REGION_CODES or status in REDIRECTS:
        return UfsError(text)
    # s3fs raises PermissionError for 405, too, which is not about credentials.
    local = status is None and (
        isinstance(error, PermissionError) or str(error).startswith("Forbidden: ")
    )  # gcsfs's 403
    if status in (401, 403) or code in _EXPIRED or local or "NoCredentialsError" in names:
        refusal = UfsPermissionError(text if advice else f"{text} ({_CHECK})")
        refusal.expired = code in _EXPIRED or status == 401 or None
        refusal.reason = foreign_text(_reason(chain, missing))
        return refusal
    if timed_out:
        return UfsTimeoutError(text)
    if status == 400 and _operation(error) == "HeadObject":  # S3's answer to expired credentials, too
        unexplained = UfsError(text)
        unexplained.expired = None
        return unexplained
    # S3's answer to HEAD has no body, and so no code besides the status.
    if status == 429 or code == "SlowDown" or (status == 503 and code == "503"):
        return UfsThrottledError(text)
    return UfsUnavailableError(text) if transient else UfsError(text)


def _chain(error: BaseException) -> list[BaseException]:
    """An error and a few of its causes, the error first; the error twice if it has no cause."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and len(chain) < _CAUSES:
        chain.append(cause)
    return chain if len(chain) > 1 else [error, error]


def _reason(chain: Sequence[BaseException], missing: bool) -> str:
    """The reason in the store's answer, or otherwise the error's text, in one line and without the error numbers of s3fs (`[Errno 22]`)."""
    answer = _answer(chain[0]).get("Error", {})
    code, message = answer.get("Code"), answer.get("Message")
    reason = message or str(chain[missing]) or type(chain[0]).__name__
    # Secrets are hidden before the lines are joined, because a secret may span several lines.
    line = " ".join(foreign_text(reason[:_LONGEST_REASON]).split()).rstrip(".")
    return line if not message or not code or code.isdigit() else f"{line} ({code})"


def _advice(error: BaseException, code: str | None, status: int | None) -> str | None:
    """Advice on what to do about a refusal by S3; None if the answer does not show what is wrong."""
    answer = _answer(error)
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region = answer.get("Error", {}).get("Region") or headers.get("x-amz-bucket-region")
    if code in _REGION_CODES or status in REDIRECTS:
        origin = find_origin(headers.get("location", ""))
        host = answer.get("Error", {}).get("Endpoint") if origin is None else origin[1]
        where = f"the bucket is in region {region}" if region else "the bucket is in another region"
        to = f" (the redirect to {host} is not followed)" if host and not region else ""
        return (
            f"{where}{to}: set AWS_DEFAULT_REGION, or set lookup.storage.endpoint_url to the store that has the bucket"
        )
    if code in _EXPIRED:
        return (
            "the credentials are no longer valid: renew them, and restart this process if it takes them from the environment or the "
            "conf file"
        )
    if code in _BY_CODE:
        return _BY_CODE[code]
    if code == "InvalidRequest" and "encryption" in answer.get("Error", {}).get("Message", "").lower():
        return (
            "the object is encrypted with a key that only its writer has (SSE-C): write it again with SSE-S3 or SSE-KMS"
        )
    operation = _operation(error)
    if status == 400 and operation == "HeadObject":  # the answer to HEAD has no body
        return "S3 does not say why: check for expired credentials, another region, or encryption with a key that only the writer has (SSE-C)"
    permission = _PERMISSIONS.get(operation) if status in (401, 403) else None
    return f"{_CHECK}: they need {permission}" if permission else None


def _operation(error: BaseException) -> str:
    """The name of S3's operation in an error; "" if the error has none."""
    return next((name for cause in _chain(error) if (name := getattr(cause, "operation_name", None))), "")


def _answer(error: BaseException) -> dict[str, Any]:
    """S3's answer in an error; {} if the error has none."""
    answers = (getattr(cause, "response", None) for cause in _chain(error))
    return next((answer for answer in answers if isinstance(answer, dict)), {})


def read_error(error: Exception, url: str) -> BaseException:
    """Like `our_error`, for reads. A file that is gone, or is a directory now, or ends before the range, is a SourceChangedError."""
    mapped = our_error(error, url)
    if error_code(error) == "NoSuchBucket":
        return mapped
    if isinstance(mapped, UfsNotFoundError) or isinstance(error, IsADirectoryError) or http_status(error) == 416:
        return SourceChangedError(f"{redact('path', url)} was replaced or removed")
    return mapped


_LOST_CONNECTION = {
    "ConnectionError",
    "ClientConnectionError",
    "ClientPayloadError",
    "FlexibleChecksumError",
    "HTTPClientError",
    "IncompleteReadError",
    "ResponseParserError",
}
_CAUSES = 5  # causes of an error that are searched for the store's answer
_LONGEST_REASON = 2000  # characters
_CHECK = "check the credentials in the environment or the conf file"
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired", "RequestExpired"}
_BY_CODE = {
    "InvalidAccessKeyId": _CHECK,
    "SignatureDoesNotMatch": _CHECK,
    "RequestTimeTooSkewed": "set the clock of this host",
    "InvalidObjectState": "the object is archived: restore it first",
}
_REGION_CODES = {
    "PermanentRedirect",
    "TemporaryRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
}
REDIRECTS = (301, 302, 303, 307, 308)
"""The HTTP statuses by which a store names another host."""
_PERMISSIONS = {
    "ListObjectsV2": "s3:ListBucket for the bucket",
    "HeadObject": "s3:GetObject, and s3:ListBucket to learn that a file is missing",
    "GetObject": "s3:GetObject",
    "PutObject": "s3:PutObject",
    "DeleteObject": "s3:DeleteObject",
    "DeleteObjects": "s3:DeleteObject",
}
_TRANSIENT_CODES = {"SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "OperationAborted"}


def http_status(error: BaseException) -> int | None:
    """The HTTP status in an error or in one of its causes: botocore's ClientError, aiohttp's ClientResponseError, the errors of gcsfs and of
    Azure's clients. None if there is no status."""
    return next((status for cause in _chain(error) if (status := _status(cause)) is not None), None)


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return cast("int | None", response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    for name in ("status", "status_code", "code"):  # aiohttp, azure.core, gcsfs
        status = getattr(error, name, None)
        if isinstance(status, int) and not isinstance(status, bool):
            return status
    return None


def error_code(error: BaseException) -> str | None:
    """S3's code in an error or in one of its causes; None if there is no code."""
    return cast("str | None", _answer(error).get("Error", {}).get("Code"))
