"""`Table` and `TableVersion`: what a path means, and which state of it.

Pure functions of a listing: which files are data, which partition values their directories say,
and whether the listing is a version at all (a table format's directory, a job in progress and a
directory that lost its files are not).
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fnmatch
import functools
import re
from collections.abc import Sequence
from typing import cast
from urllib.parse import unquote

import pyarrow as pa

from pyspark_lookup.choices import CsvOptions
from pyspark_lookup.conf import redact
from pyspark_lookup.disk import key_of
from pyspark_lookup.errors import (
    NotATableError,
    OptionError,
    SchemaError,
    TableBusyError,
    TableEmptyError,
    TableFormatError,
    UfsNotFoundError,
    VersionGoneError,
)
from pyspark_lookup.notifications import DataFile, LogVersion, TableState
from pyspark_lookup.options import FileFormatName, LookupOptions, OnVersionGone
from pyspark_lookup.stores import HIDDEN, IMMUTABLE, LOG_DIRECTORY
from pyspark_lookup.ufs import FileVersion, Listing
from pyspark_lookup.writeids import ValidWriteIdList

__all__ = [
    "Busy",
    "Kind",
    "PartitionValue",
    "Table",
    "TableVersion",
    "data_files",
    "glob_root",
    "is_glob",
    "job_directories",
    "kind_of",
    "managed_version",
    "partition_fields",
    "partition_value",
    "partition_values",
    "select_partitions",
    "version_of_file",
]

PartitionValue = str | None
_VERSIONS_KEPT = 8
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_GLOB = re.compile(r"[*?\[{]")
_INTEGER = re.compile(r"[+-]?\d{1,38}")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class Kind(enum.Enum):
    """What a path is; learned at planning, so that an execution needs one call."""

    FILE = "FILE"
    DIRECTORY = "DIRECTORY"
    GLOB = "GLOB"
    MANAGED = "MANAGED"


@dataclasses.dataclass(frozen=True)
class Busy:
    """What is done while a job writes a table's files: see the options `lookup.on-busy`, `.busy-wait` and `.busy-timeout`."""

    keep: bool = True
    wait_s: float = 30.0
    timeout_s: float = 600.0


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of files: where it is, in which store, and how its files are read.

    `url` is the canonical path; `format` is None only until the files are known. `pinned`: of a managed table, the
    one version that is read, by a log position or a list of write ids; None: the current one. `own`: a write that is open
    and seen all the same, by its transaction. `csv`: how CSV files are written. `declared`: the columns that somebody has said
    it has; None: those that its files have.
    """

    url: str
    scope: str
    kind: Kind
    format: FileFormatName | None
    success_file: bool = False
    settle_s: float | None = None
    pinned: int | str | None = None
    own: int | None = None
    busy: Busy = Busy()
    csv: CsvOptions = CsvOptions()
    declared: pa.Schema | None = None

    def __repr__(self) -> str:
        return f"Table({redact('path', self.url)!r}, {self.kind.value}, {self.format}, {self.pinned!r})"

    @functools.cached_property
    def id(self) -> str:
        """32 hex digits, equal for references that must agree on the current version."""
        return key_of(self.scope, self.url, self.kind.value, self.success_file, self.settle_s, *self._pin)

    @property
    def _pin(self) -> tuple[object, ...]:
        read = () if (self.csv, self.declared) == (CsvOptions(), None) else (self.csv, self.declared)
        return read if self.pinned is None else (self.pinned,)

    @property
    def managed(self) -> bool:
        """Whether the table has a log, by which it was written."""
        return self.kind is Kind.MANAGED

    def fails_when_gone(self, options: LookupOptions) -> bool:
        """Whether a version that can no longer be read is an error, or is replaced by the current one."""
        chosen = options.on_version_gone or (OnVersionGone.FAIL if self.managed else OnVersionGone.NEWER)
        return chosen is OnVersionGone.FAIL

    @property
    def root(self) -> str:
        """The directory below which partition directories count."""
        return glob_root(self.url) if self.kind is Kind.GLOB else self.url


@dataclasses.dataclass(frozen=True)
class TableVersion:
    """One state of a table: its data files' versions, by URL. `digest` (32 hex digits) names it.

    `log`: of a managed table, which version of its log this is.
    """

    table_id: str
    files: tuple[FileVersion, ...]
    log: LogVersion | None = None

    @functools.cached_property
    def digest(self) -> str:
        if self.log is not None:
            return self.log.digest
        parts = (part for file in self.files for part in (file.url, file.size, file.identity))
        return key_of(self.table_id, *parts)

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    def settled(self) -> TableVersion:
        """The same version, seen long enough ago that its identities stand for one content each."""
        if all(file.settled for file in self.files):
            return self
        files = tuple(dataclasses.replace(file, settled=True) for file in self.files)
        return dataclasses.replace(self, files=files)

    def of_files(self, files: tuple[FileVersion, ...]) -> TableVersion:
        """The version that has only those of the files, as `lookup.partition` leaves them."""
        return self if files == self.files else TableVersion(self.table_id, files)

    @property
    def hidden(self) -> tuple[FileVersion, ...]:
        """Files that say which rows of `files` do not count."""
        return self.files[0].hidden if self.files else ()

    def valid_log(self, table: Table) -> LogVersion:
        """What says which writes may be seen. Raises ValueError without that: no rows of a managed table are read so (HIVE-21637)."""
        if self.log is None or self.table_id != table.id:
            raise ValueError(
                f"a version of {redact('path', table.url)}, a managed table, came without its list of write ids"
            )
        return self.log

    @property
    def newest(self) -> float:
        """What helps another host to find this version: its position in the log, or when its newest file was modified."""
        if self.log is not None:
            return float(self.log.position)
        return max((file.modified_at_s or 0.0 for file in self.files), default=0.0)


def managed_version(table: Table, state: TableState, position: int | None = None) -> TableVersion:
    """The version of a managed table at a position of its log (None: what the table's `pinned` says, or the current one).

    Raises VersionGoneError for a pinned one that the log does not have.
    """
    known = state.memo.get((table, position))
    if known is not None:
        return cast(TableVersion, known)
    try:
        version = _managed_version(table, state, position)
    except VersionGoneError as problem:
        raise VersionGoneError(f"{redact('path', table.url)}: {problem}") from None
    if len(state.memo) >= _VERSIONS_KEPT:
        state.memo.clear()
    state.memo[table, position] = version
    return version


def _managed_version(table: Table, state: TableState, position: int | None) -> TableVersion:
    try:
        if position is None and isinstance(table.pinned, str):
            write_ids = ValidWriteIdList.parse(table.pinned)
            log = state.version_of(write_ids, table.own)
        elif position is None and table.own is not None:
            write_ids = state.valid_write_ids().commit(table.own)
            log = state.version_of(write_ids, table.own)
        else:
            at = position if position is not None else cast("int | None", table.pinned)
            log = state.version(at)
            write_ids = ValidWriteIdList.parse(log.write_ids)
    except ValueError as problem:
        raise VersionGoneError(str(problem)) from None
    hidden = tuple(version_of_file(table, file, HIDDEN) for file in state.hidden(write_ids))
    files = (
        dataclasses.replace(version_of_file(table, file), modified_at_s=at_s, hidden=hidden)
        for file, _, at_s in state.files(write_ids)
    )
    return TableVersion(table.id, tuple(sorted(files, key=lambda file: file.url)), log)


def version_of_file(table: Table, file: DataFile, identity: str = IMMUTABLE) -> FileVersion:
    """A file that a managed table's log names, as the store has it."""
    return FileVersion(f"{table.url}/{file.path}", file.size, identity)


def kind_of(status: FileVersion | Listing) -> Kind:
    """What a path is, by what the store says of it."""
    if isinstance(status, FileVersion):
        return Kind.FILE
    return Kind.MANAGED if LOG_DIRECTORY in status.directories else Kind.DIRECTORY


def is_glob(path: str) -> bool:
    """Whether a path has wildcards (`*`, `?`, `[…]`, `{a,b}`). A web URL's `?` starts its query."""
    return not path.startswith(("http://", "https://")) and _GLOB.search(path) is not None


def glob_root(url: str) -> str:
    """The directory above the first component with a wildcard."""
    return re.split(_GLOB, url, maxsplit=1)[0].rpartition("/")[0]


def _glob_matches(url: str, pattern: str) -> bool:
    """Whether a file, or a directory above it, matches the pattern component by component."""
    found = url.split("/")
    return any(len(found) >= len(wanted) and _components_match(found, wanted) for wanted in _alternatives(pattern))


def _glob_reaches(directory: str, pattern: str) -> bool:
    """Whether files below this directory, or directories below it, may match the pattern."""
    return any(_components_match(directory.split("/"), wanted) for wanted in _alternatives(pattern))


def _components_match(found: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether the components that both have match."""
    return all(fnmatch.fnmatchcase(name, part) for name, part in zip(found, wanted, strict=False))


@functools.lru_cache(maxsize=128)
def _alternatives(pattern: str) -> tuple[tuple[str, ...], ...]:
    """The components of each pattern without braces that one with braces stands for."""
    braces = re.search(r"\{([^{}]*)\}", pattern)
    if braces is None:
        return (tuple(pattern.replace("[^", "[!").split("/")),)
    choices = (pattern[: braces.start()] + choice + pattern[braces.end() :] for choice in braces[1].split(","))
    return tuple(parts for choice in choices for parts in _alternatives(choice))


def job_directories(table_url: str, kind: Kind, listing: Listing) -> list[str]:
    """The directories of jobs that write the table, or died doing so; relative to the listing's."""
    found = _reached(listing, table_url if kind is Kind.GLOB else "")
    return sorted(d for d in found if _is_job_directory(d.rsplit("/", 1)[-1]))


def data_files(
    table_url: str, kind: Kind, listing: Listing, success_file: bool = False, dead: Sequence[str] = ()
) -> tuple[FileVersion, ...]:
    """The data files of a listing, by URL: no empty ones, none in or named `_…` or `.…`. `dead`: directories of dead jobs.

    Raises TableFormatError, TableBusyError or TableEmptyError if the listing is not a version.
    """
    if LOG_DIRECTORY in listing.directories and kind is Kind.DIRECTORY:
        raise UfsNotFoundError(f"{listing.url} became a managed table since this query was planned: plan it again")
    pattern = table_url if kind is Kind.GLOB else ""
    _refuse_table_formats(listing, pattern)
    busy = [directory for directory in job_directories(table_url, kind, listing) if directory not in dead]
    if busy:
        raise TableBusyError(
            f"{listing.url} holds {busy[0]}: a job is writing it, or died less than lookup.busy-timeout ago. Wait for the job, or "
            "remove the directory if you know that no job runs"
        )
    names = {file.url: file.url[len(listing.url) :].lstrip("/") for file in listing.files}
    if success_file and "_SUCCESS" not in names.values():
        raise TableBusyError(f"{listing.url} has no _SUCCESS file, which lookup.success-file=true requires")
    files = tuple(
        file
        for file in listing.files
        if file.size > 0
        and not any(_skipped(part) for part in names[file.url].split("/"))
        and (not pattern or _glob_matches(file.url, pattern))
    )
    if not files:
        what = (
            "no file matches the glob" if kind is Kind.GLOB else "it holds no data file (names with _ or . are skipped)"
        )
        raise TableEmptyError(f"{table_url} is no table now: {what}")
    return files


def _skipped(name: str) -> bool:
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def _is_job_directory(name: str) -> bool:
    return name in ("_temporary", "__magic") or name.startswith((".spark-staging-", ".hive-staging", "_spark_staging"))


def _reached(listing: Listing, pattern: str) -> list[str]:
    """The directories that lie where a glob's files may be; other tables beside them are none of its business."""
    if not pattern:
        return list(listing.directories)
    return [d for d in listing.directories if _glob_reaches(f"{listing.url}/{d}".rpartition("/")[0], pattern)]


def _refuse_table_formats(listing: Listing, pattern: str) -> None:
    found = {d.rsplit("/", 1)[-1]: d for d in _reached(listing, pattern)}
    for marker, name, provider in (
        ("_delta_log", "Delta", "as docs/recipes.md shows"),
        (".hoodie", "Hudi", "of yours"),
    ):
        if marker in found:
            raise TableFormatError(
                f"{listing.url} holds {found[marker]}, so it is a {name} table: its files alone are not a version of it. "
                f"Read it through a lookup.provider {provider}, with format('{name.lower()}'), or export the current version "
                "as plain files"
            )
    for file in listing.files:
        directory, _, name = file.url.rpartition("/")
        table, _, parent = directory.rpartition("/")
        if parent == "metadata" and name.endswith(".metadata.json") and (not pattern or _glob_reaches(table, pattern)):
            raise TableFormatError(
                f"{listing.url} holds {file.url[len(listing.url) + 1 :]}, so it is an Iceberg table: its files alone are not "
                "a version of it. Read it through a lookup.provider as docs/recipes.md shows, through its catalog, or export "
                "the current version as plain files"
            )


# --- Hive-style partitions ------------------------------------------------------------------------


def partition_values(root: str, url: str) -> tuple[tuple[str, PartitionValue], ...]:
    """(column, raw value) of the `k=v` directories between the root and a file."""
    parts = url[len(root) :].strip("/").split("/")[:-1]
    pairs = (part.partition("=") for part in parts if "=" in part)
    return tuple((unquote(k), None if v == _NULL_PARTITION else unquote(v)) for k, _, v in pairs if k)


def partition_fields(table: Table, files: Sequence[FileVersion]) -> pa.Schema:
    """The partition columns of a version and their types, inferred from all values as Spark does.

    Integers become int32, int64 or a decimal, ISO dates date32, other numbers float64, the rest string
    (also times, and a mixture that float64 would round).
    Raises NotATableError naming two files whose directories do not agree on the columns.
    """
    if table.kind is Kind.FILE or table.managed:
        return pa.schema([])
    columns: dict[str, list[PartitionValue]] = {}
    first: tuple[str, ...] | None = None
    for file in files:
        pairs = partition_values(table.root, file.url)
        names = tuple(name for name, _ in pairs)
        if len({name.casefold() for name in names}) < len(names):
            raise NotATableError(
                f"{redact('path', file.url)} lies in two directories of one partition column: {list(names)}"
            )
        if first is None:
            first = names
        if names != first:
            raise NotATableError(
                f"{file.url} has partition columns {list(names)} but {files[0].url} has {list(first)}: "
                "give the directory or glob of one table"
            )
        for name, value in pairs:
            columns.setdefault(name, []).append(value)
    declared = {field.name.casefold(): field for field in table.declared or ()}
    fields = []
    for name, values in columns.items():
        field = declared.get(name.casefold())
        if field is not None and field.name != name:
            raise SchemaError(
                f"column {field.name!r} of lookup.schema is spelled {name!r} in the directories: spell it so"
            )
        fields.append(pa.field(name, _partition_type(values) if field is None else field.type))
    return pa.schema(fields)


def _partition_type(values: list[PartitionValue]) -> pa.DataType:
    known = {value for value in values if value is not None}
    integers = [int(value) for value in known if _INTEGER.fullmatch(value)]
    bits = max(((n if n >= 0 else ~n).bit_length() + 1 for n in integers), default=0)
    if known and len(integers) == len(known):
        digits = max(len(str(abs(n))) for n in integers)
        return pa.int32() if bits <= 32 else pa.int64() if bits <= 64 else pa.decimal128(digits, 0)
    if known and all(_is_date(value) for value in known):
        return pa.date32()
    numbers = all(_NUMBER.fullmatch(value) for value in known)
    return pa.float64() if known and numbers and bits <= 32 else pa.string()


def _is_date(value: str) -> bool:
    try:
        return re.fullmatch(r"\d{4}-\d\d-\d\d", value) is not None and bool(datetime.date.fromisoformat(value))
    except ValueError:
        return False


def partition_value(value: PartitionValue, kind: pa.DataType) -> object:
    """A raw partition value as a Python value of its column's type. Raises ValueError if it is none."""
    if value is None:
        return None
    if pa.types.is_integer(kind) or pa.types.is_decimal(kind):
        # Python reads more spellings (1_000) than inference takes for a number; so for the others.
        number = int(value) if _INTEGER.fullmatch(value) else None
        bound = 10**kind.precision - 1 if pa.types.is_decimal(kind) else (1 << (kind.bit_width - 1)) - 1
        low = -bound if pa.types.is_decimal(kind) else -bound - 1
        if number is None or not low <= number <= bound:
            raise ValueError(value)
        return decimal.Decimal(number) if pa.types.is_decimal(kind) else number
    if pa.types.is_date(kind):
        if not _is_date(value):
            raise ValueError(value)
        return datetime.date.fromisoformat(value)
    if pa.types.is_floating(kind):
        if not _NUMBER.fullmatch(value):
            raise ValueError(value)
        return float(value)
    if not pa.types.is_string(kind):  # of a schema that somebody has declared
        try:
            return pa.array([value]).cast(kind)[0].as_py()
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise ValueError(value) from None
    return value


def select_partitions(table: Table, files: Sequence[FileVersion], options: LookupOptions) -> tuple[FileVersion, ...]:
    """The files that `lookup.partition` leaves: those of the latest partition, or of given values.

    `max_pt()` is the largest value of the first partition column, then of the second among those, …;
    a null value is the smallest. Raises OptionError for a table or column without partitions.
    """
    if options.partition is None:
        return tuple(files)
    fields = partition_fields(table, files)
    if not fields.names:
        raise OptionError(f"option lookup.partition = {options.partition!r}: {table.url} has no k=v directories")
    typed = {
        file: {
            name: partition_value(value, fields.field(name).type)
            for name, value in partition_values(table.root, file.url)
        }
        for file in files
    }
    if options.partition.replace(" ", "").lower() == "max_pt()":
        chosen = list(files)
        for name in fields.names:
            known = [value for file in chosen if (value := typed[file][name]) is not None]
            latest = max(known) if known else None  # type: ignore[type-var]
            chosen = [file for file in chosen if typed[file][name] == latest]
        return tuple(chosen)
    wanted: dict[str, object] = {}
    spelled = {name.casefold(): name for name in fields.names}
    for pair in options.partition.split(","):
        given, separator, value = (part.strip() for part in pair.partition("="))
        name = spelled.get(given.casefold(), "")
        if not separator or not name:
            raise OptionError(
                f"option lookup.partition = {options.partition!r}: expected max_pt() or k=v,… over {', '.join(fields.names)}"
            )
        try:
            raw = None if value == _NULL_PARTITION else unquote(value)
            wanted[name] = partition_value(raw, fields.field(name).type)
        except ValueError:
            raise OptionError(
                f"option lookup.partition = {options.partition!r}: {value!r} is no {fields.field(name).type} for column {name}"
            ) from None
    return tuple(file for file in files if all(typed[file][name] == value for name, value in wanted.items()))
