"""Declares the options of `LookupOptions`, in groups: the table's files, what a read returns, the version, the caches (FLIP-221), the stores."""

from __future__ import annotations

import dataclasses
import datetime
import os
import tempfile
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark_lookup.columnar.ddl import parse_columns
from pyspark_lookup.errors import OptionError
from pyspark_lookup.options import enums
from pyspark_lookup.options.enums import (
    CacheMode,
    FileFormatName,
    OnBusy,
    OnReloadFailure,
    PartialCacheStore,
    ReloadStrategy,
)
from pyspark_lookup.options.parsing import (
    BOOLEAN,
    COUNT,
    DURATION,
    LONG,
    MIB,
    MOST,
    NAME,
    NAMES,
    NETWORK_COLUMNS,
    PAIR,
    POSITIVE_DURATION,
    Kind,
    choice,
    option,
    parse_character,
    parse_commit,
    parse_encoding,
    parse_instant,
    parse_path,
    parse_quote,
    parse_reload_strategy,
    parse_sync_interval_s,
    parse_text,
    parse_write_ids,
    size,
    whole_number,
)
from pyspark_lookup.options.reload_trigger import Blackout, ScheduleMode, parse_blackout, parse_iso_time

if TYPE_CHECKING:
    import pyarrow as pa


@dataclasses.dataclass(frozen=True)
class FileOptions:
    """The table's path, how its files are read, and how jobs that write them are handled."""

    # fmt: off
    path: str = option(
        "path", Kind("string", parse_path), "",
        doc="File, directory (read recursively) or glob; any fsspec URL. `s3a://` means `s3://`. If an object and "
            "a directory share a name, `s3://bucket/name/` is the directory.",
    )
    keys: tuple[str, ...] | None = option(
        "lookup.keys", NAMES, None,
        doc="Key columns of the table, by which lookups find rows and upserts replace them.",
    )
    format: FileFormatName | None = option(
        "lookup.format", choice(FileFormatName), None, default_text="from the file names",
        doc="File format.",
    )
    schema: pa.Schema | None = option(
        "lookup.schema", Kind("DDL", parse_columns), None, default_text="from the files",
        doc="The columns and their types, as in CREATE TABLE: `id INT, name STRING`. Text (CSV, JSON) is parsed as "
            "these types. Other files are cast to them, and a value that would change is an error. A column that no "
            "file has is null.",
    )
    partition: str | None = option(
        "lookup.partition", Kind("`max_pt()` or `k=v,…`", parse_text), None, default_text="all",
        doc="Partitions to read: those with the values that are named, or the one with the largest values (`max_pt()`).",
    )
    success_file: bool = option(
        "lookup.success-file", BOOLEAN, False,
        doc="true: a directory without a file `_SUCCESS` (jobs of Spark and Hadoop write it when they have finished) counts as one that a job is "
            "still writing; `lookup.on-busy` says what a query does then. `lookup.busy-timeout` does not apply.",
    )
    settle_s: float | None = option(
        "lookup.settle", DURATION, None,
        doc="Read a version only when its newest file is at least this old, because a job may still be writing files. Until then, a query waits, and lists "
            "the files again. If there are newer files in each of 20 listings, the table counts as busy (`lookup.on-busy`).",
    )
    on_busy: OnBusy = option(
        "lookup.on-busy", choice(OnBusy), OnBusy.KEEP,
        doc="While a job is writing the table's files (the table's directory then contains one such as `_temporary`): use the last version "
            "that this host knows (KEEP), or fail (FAIL).",
    )
    busy_wait_s: float = option(
        "lookup.busy-wait", DURATION, 30.0, default_text="30 s",
        doc="With `lookup.on-busy` = KEEP: how long a query waits for a job that is writing the files. It waits only if this host knows no "
            "earlier version, if the job has removed files that this host has not cached, or if the table was there within the last "
            "`lookup.busy-timeout` and is now gone or empty. With FAIL, it fails at once.",
    )
    busy_timeout_s: float = option(
        "lookup.busy-timeout", DURATION, 600.0, default_text="10 min",
        doc="A job that has changed nothing in its own directory (such as `_temporary`) for this long counts as dead: queries ignore "
            "this directory, and a warning names it.",
    )
    # fmt: on

    @property
    def names_directory(self) -> bool:
        """Whether the path's spelling says that it is a directory: it ends with a slash, and is no web URL."""
        return self.path.endswith("/") and not self.path.startswith(("http://", "https://"))


@dataclasses.dataclass(frozen=True)
class CsvOptions:
    """The syntax of CSV files. With `escape` None, a quote inside quoted text must be doubled; a file where it is not doubled is an error."""

    # fmt: off
    header: bool = option(
        "lookup.csv.header", BOOLEAN, True,
        doc="CSV files: the first line has the column names. Otherwise the columns are called `_c0`, `_c1`, …, or as in "
            "lookup.schema.",
    )
    sep: str = option(
        "lookup.csv.sep", Kind("character", parse_character), ",",
        doc="CSV files: the separator between values; `\\t` is a tab.",
    )
    quote: str = option(
        "lookup.csv.quote", Kind("character or nothing", parse_quote), '"',
        doc="CSV files: the quote character. Quoted text may contain separators and line breaks. "
            "If the option is empty, quotes are ordinary characters.",
    )
    escape: str | None = option(
        "lookup.csv.escape", Kind("character", parse_character), None, default_text="the quote itself",
        doc="CSV files: the character that escapes a quote inside quoted text: `\\` in files that Spark wrote.",
    )
    null_value: str = option(
        "lookup.csv.null-value", Kind("string", str), "",
        doc="CSV files: the string that means null. An unquoted empty value is always null.",
    )
    encoding: str = option(
        "lookup.csv.encoding", Kind("name", parse_encoding), "utf-8",
        doc="CSV files: the character encoding.",
    )
    infer_schema: bool = option(
        "lookup.csv.infer-schema", BOOLEAN, True,
        doc="CSV files: infer column types from all values; false: every column is text.",
    )
    # fmt: on


EXPLICIT = "lookup.given"
"""An internal option of reads that are part of a lookup: the names of the options that the user gave for the lookup itself.

All other options of such a read were stored with the table.
"""
BUILT = "lookup.built"
"""An internal option of the same reads, as JSON: the micro-batch in whose `foreachBatch` function the lookup was made, and when it was made."""
ANY_TYPE = "lookup.any-type"
"""An internal option of reads that ask only for a table's columns: a column that Spark cannot read is VOID then, and its metadata says why."""
OF_MATCHES = {
    "lookup.range": "between", "lookup.cidr": "cidr", "lookup.starts-with": "starts_with", "lookup.valid-from": "as_of",
    "lookup.valid-to": "as_of", "lookup.overlap": "as_of, between, cidr or starts_with", "lookup.range.bounds": "as_of or between",
    "lookup.on-bad-network": "cidr",
}  # fmt: skip
"""Options of lookups of rows that match a value by their range, network or prefix, or that are valid at a time; for each, the arguments of a
lookup with which it has an effect."""


@dataclasses.dataclass(frozen=True)
class Ref:
    """A named reference to a version: `kind` is `branch` or `tag`."""

    kind: str
    name: str

    def __str__(self) -> str:
        return self.name


Pin = int | datetime.datetime | str | Ref
"""A version of a table: its number, the one that was current at a time, a list of valid write ids, or a branch or tag."""
_NUMBER = whole_number(
    0, 2**63 - 1, "the number of a version that LookupTable.versions() lists (1 or more for a managed table)"
)


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """Which columns and rows of the table a read returns, and in which view."""

    # fmt: off
    columns: tuple[str, ...] | None = option(
        "lookup.columns", NAMES, None, default_text="all",
        doc="Columns to read, in this order.",
    )
    where: str | None = option(
        "lookup.where", Kind("SQL predicate", parse_text), None, default_text="all rows",
        doc="A predicate over this table's columns: only rows for which it is true are read. It may consist of `=`, `<>`, `<`, `<=`, `>`, `>=`, `<=>`, "
            "`IN`, `BETWEEN`, `LIKE 'prefix%'`, `IS [NOT] NULL`, `AND`, `OR` and `NOT`. Files and row groups whose statistics show that they "
            "have no such row are skipped.",
    )
    between: tuple[str, str] | None = option(
        "lookup.range", PAIR, None,
        doc="For lookups with `between`: the columns with the lowest and the highest value of a row's range.",
    )
    cidr: tuple[str, ...] | None = option(
        "lookup.cidr", NETWORK_COLUMNS, None,
        doc="For lookups with `cidr`: one column with networks, or two columns: a network's first and last address, or its address and the length "
            "of its prefix.",
    )
    starts_with: str | None = option(
        "lookup.starts-with", NAME, None,
        doc="For lookups with `starts_with`: the column with prefixes.",
    )
    valid_from: str | None = option(
        "lookup.valid-from", NAME, None,
        doc="For lookups with `as_of`: the column with the time from which a row is valid. If it is null, the row has always been valid.",
    )
    valid_to: str | None = option(
        "lookup.valid-to", NAME, None,
        doc="For lookups with `as_of`: the column with the time until which a row is valid (exclusive, unless `lookup.range.bounds` says otherwise). If it is null, the row is still "
            "valid. Without this option, a row is valid until the next row of its key.",
    )
    overlap: enums.Overlap | None = option(
        "lookup.overlap", choice(enums.Overlap), None, default_text="ERROR; NARROWEST for networks and prefixes",
        doc="If several rows of a key match a value (or are valid at a time): fail (ERROR), take the smallest range or network, or the "
            "longest prefix (NARROWEST), take the range that begins last (NEWEST), or return all rows (ALL).",
    )
    bounds: enums.Bounds | None = option(
        "lookup.range.bounds", choice(enums.Bounds), None, default_text="`[]`; `[)` for as_of",
        doc="Whether a range includes its lowest and its highest value: `[` and `]` mean that it does, `(` and `)` that it does not.",
    )
    on_bad_network: enums.OnBadNetwork = option(
        "lookup.on-bad-network", choice(enums.OnBadNetwork), enums.OnBadNetwork.ERROR,
        doc="If a row's network cannot be read, or has host bits set (`10.1.2.3/8`): fail (ERROR), or let the row match nothing (SKIP).",
    )
    view: enums.View = option(
        "lookup.view", choice(enums.View), enums.View.DATA,
        doc="What a read returns. `data`: rows; `files`: the files of the current version; `versions`: the versions that the "
            "table's log or metadata lists, or, if the table keeps none, those that this host knows; `metrics`: this host's counters; `summary`: one row about the current version; `token`: "
            "the current version as bytes, for the SQL functions of `register_lookup`; `changes`: the changes that the commits of a managed table "
            "made (`readStream`, or with `lookup.changes-from`).",
    )
    on_error: enums.OnError = option(
        "lookup.on-error", choice(enums.OnError), enums.OnError.FAIL,
        doc="What happens if a lookup fails in every attempt. Joins and SQL functions: the query fails (FAIL), or the looked-up columns are null and the "
            "column `lookup_error` has the reason (NULL). STALE, for providers with `lookup.cache` = PARTIAL or FULL: lookups, and scans of the full cache, return the last "
            "rows that this host has cached, however old they are; a key that the host has never cached fails.",
    )
    split_size: int = option(
        "lookup.scan.split-size", size(MIB, MOST), 128 * MIB, default_text="128 MiB",
        doc="A scan of more than this, over all its files, is split into tasks of about this size. It is also the "
            "size up to which joins and SQL functions use the full cache by default (see `lookup.cache`).",
    )
    # fmt: on

    def check(self, explicit: AbstractSet[str]) -> None:
        """Raise OptionError if an option that the user has set (its key is in `explicit`) has no effect."""
        if "lookup.valid-to" in explicit and self.valid_from is None:
            raise OptionError(
                "option lookup.valid-to has no effect without lookup.valid-from: set lookup.valid-from, too, or remove lookup.valid-to"
            )
        # A full cache has only the columns that these options need, and the views SUMMARY and TOKEN are about that cache.
        takes_columns = enums.View.DATA, enums.View.CHANGES, enums.View.SUMMARY, enums.View.TOKEN
        if self.view not in takes_columns and (self.where or self.columns):
            raise OptionError(
                f"option lookup.view = {self.view.value!r} returns columns that are not the table's: "
                "remove lookup.where and lookup.columns, and filter the result in Spark"
            )


@dataclasses.dataclass(frozen=True)
class VersionOptions:
    """Which version of the table is read, and who says which version is current."""

    # fmt: off
    source: enums.MetadataSource = option(
        "lookup.metadata.source", choice(enums.MetadataSource), enums.MetadataSource.UFS,
        doc="Who says which version is current: the store (UFS, the underlying file system), which each query asks once, or this host (CACHE), "
            "which asks the store only from time to time.",
    )
    sync_interval_s: float | None = option(
        "lookup.metadata.sync-interval", Kind("-1, 0 or duration", parse_sync_interval_s), None, default_text="none; CACHE needs it, unless lookup.cache=FULL",
        doc="With CACHE: a query asks the store again if this host last asked it longer ago than this (-1: never again, 0: always).",
    )
    number: int | None = option(
        "lookup.version", Kind("version number", _NUMBER), None, default_text="the current version",
        doc="Tables that keep their versions: read this version (time travel). `lookup.view=versions` lists them.",
    )
    timestamp: datetime.datetime | None = option(
        "lookup.timestamp", Kind("ISO 8601 time", parse_instant), None,
        doc="Tables that keep their versions: read the version that was current at this time, such as "
            "`2026-03-01T12:00:00+01:00`. A time without a zone is in UTC.",
    )
    valid_write_ids: str | None = option(
        "lookup.valid-write-ids", Kind("`table:5:2:2:4`", parse_write_ids), None,
        doc="Managed tables: read only the writes that are valid in this list, which `LookupTable.valid_write_ids` returns. It has "
            "Hive's format, with the table's id in place of its name: table id, high watermark, least open id, open ids, aborted ids.",
    )
    floor: str | None = option(
        "lookup.floor", Kind("`table id:log position`", parse_commit), None,
        doc="Managed tables, with CACHE: read a version that includes at least this commit. The host that has made the commit gets this "
            "value from `LookupTable.floor`. A host's reads always include its own commits.",
    )
    at: enums.VersionAt = option(
        "lookup.version-at", choice(enums.VersionAt), enums.VersionAt.AUTO,
        doc="When a scan decides which version it reads. PLAN: when it is planned; READ: when its task reads; AUTO: READ if the "
            "table fits into one task, else PLAN.",
    )
    on_gone: enums.OnVersionGone | None = option(
        "lookup.on-version-gone", choice(enums.OnVersionGone), None, default_text="NEWER; FAIL for tables that keep versions",
        doc="If a file is replaced or removed after the query has decided which version it reads: read the newer version (NEWER), or fail (FAIL). "
            "With NEWER, a scan of several tasks may mix rows of both versions: it reads each replaced file in its new state, and fails if a file "
            "was removed, or if several tasks share a replaced file. With FAIL, a scan of one task that chose the version itself (see "
            "`lookup.version-at`) still reads the newer version if it has returned no rows yet.",
    )
    # fmt: on

    @property
    def pins(self) -> dict[str, Pin]:
        """The values of the options that name a version to read, by key."""
        pins = {
            "lookup.version": self.number,
            "lookup.timestamp": self.timestamp,
            "lookup.valid-write-ids": self.valid_write_ids,
        }
        return {key: value for key, value in pins.items() if value is not None}

    def check(self, caches_version: bool) -> None:
        """Raise OptionError if `lookup.metadata.sync-interval` is missing, or contradicts `lookup.metadata.source`.

        `caches_version`: CACHE needs the interval, because neither a full cache nor another system decides when to ask the store.
        """
        cached = self.source is enums.MetadataSource.CACHE
        if cached and self.sync_interval_s is None and caches_version:
            raise OptionError(
                "option lookup.metadata.source = 'CACHE' needs lookup.metadata.sync-interval: a duration such as '5 min', "
                "0 (ask the store at every query) or -1 (never ask again)"
            )
        if not cached and self.sync_interval_s is not None:
            raise OptionError(
                "option lookup.metadata.sync-interval contradicts lookup.metadata.source = 'UFS', which asks the store at "
                "every query: remove it, or set lookup.metadata.source = 'CACHE'"
            )


def is_idle_in_gets(key: str) -> bool:
    """Whether an option has an effect only in joins, SQL functions or streams, and none in a `LookupTable`'s own reads."""
    return key == "lookup.on-error" or key.startswith("lookup.stream.")


def refuse_in_reads(
    explicit: Iterable[str],
    view: enums.View = enums.View.DATA,
    stream: bool = False,
    matches: bool = False,
    on_error: enums.OnError = enums.OnError.FAIL,
) -> None:
    """Raise OptionError if an option of a read has no effect in this kind of read.

    `explicit`: the options of the read itself. Options stored with a table are not checked, because they are for all uses of the table.
    `stream`: the read is, or may be, a stream of changes. `matches`: the read is a lookup by validity, range, network or prefix.
    `on_error`: the value of `lookup.on-error`.
    """
    for key in sorted(key.lower() for key in explicit):
        if key.startswith("lookup.write."):
            raise OptionError(f"option {key} is for writes: remove it from the read")
        if key.startswith("lookup.stream.") and not stream:
            raise OptionError(f"option {key} is for streams of changes (readStream): remove it")
        if key in OF_MATCHES and not matches:
            raise OptionError(
                f"option {key} is for lookups with {OF_MATCHES[key]} (lookup_join, register_lookup, LookupTable.get): remove it"
            )
        if key == "lookup.on-error" and view is not enums.View.TOKEN and on_error is not enums.OnError.STALE:
            raise OptionError(
                f"option {key} = {on_error.value} is for lookup_join and register_lookup: scans and get() fail on each error anyway (except "
                "with STALE, for a provider with a cache): remove it here"
            )


PARTIAL = "lookup.partial-cache."
_DISKCACHE_LEAST_BYTES = 2**20  # an empty database has 50 kB
FULL = "lookup.full-cache."
_DAYS = Kind("integer", whole_number(1, 36_500, "a whole number of days, at least 1 day and at most 36500"))


@dataclasses.dataclass(frozen=True)
class CacheOptions:
    """What a host caches of the table, and in which directory."""

    # fmt: off
    mode: CacheMode = option(
        "lookup.cache", choice(CacheMode), CacheMode.NONE, default_text="NONE; for joins and SQL functions, FULL if the table is small",
        doc="What a host caches (FLIP-221). NONE: the parts of the files that it has read. PARTIAL: also the rows of the keys that "
            "were looked up. FULL: all rows, decoded and indexed, on local disk. If neither an option nor the conf file sets this, joins and "
            "SQL functions use FULL for a table whose files have up to `lookup.scan.split-size` in total, unless `lookup.metadata.source` = CACHE.",
    )
    path: str | None = option(
        "lookup.cache.dir", Kind("path", parse_text), None, default_text="`lookupcache-<uid>` in the system's temporary directory",
        doc="Directory of this host's cache, mode 0700, on a local disk.",
    )
    max_bytes: int | None = option(
        "lookup.cache.max-bytes", size(MIB, MOST), None, default_text="a quarter of the directory's disk, or half of the free space if that is less",
        doc="The most bytes that the cache directory may take, with all that is in it: parts of files, snapshots of full caches, rows by key, "
            "small records.",
    )
    # fmt: on

    def directory(self) -> Path:
        """The path of this host's cache directory, which need not exist yet."""
        if self.path is not None:
            return Path(self.path).expanduser().absolute()
        return Path(tempfile.gettempdir()) / f"lookupcache-{os.getuid()}"


@dataclasses.dataclass(frozen=True)
class StorageOptions:
    """How a host connects to the store. `parameters`: keyword arguments of the fsspec filesystem."""

    # fmt: off
    max_retries: int = option(
        "lookup.max-retries", COUNT, 3,
        doc="How often a call is repeated after a transient error of the store, or after an error of a provider (FLIP-221), with growing pauses. If the store "
            "refuses calls because it gets too many (503, 429), they are repeated for a minute before this number counts. "
            "0: no call is repeated.",
    )
    parameters: tuple[tuple[str, Any], ...] = option(
        "lookup.storage.*", Kind("any", str), (), hashed=False,
        doc="Parameters of the fsspec filesystem that connects to the store, e.g. `lookup.storage.endpoint_url`, `lookup.storage.anon`; "
            "credentials only in the conf file.",
    )
    # fmt: on


@dataclasses.dataclass(frozen=True)
class PartialCacheOptions:
    """How long the partial cache keeps a key, and how much it keeps."""

    # fmt: off
    expire_after_access_s: float | None = option(
        "lookup.partial-cache.expire-after-access", DURATION, None,
        doc="With PARTIAL: drop a key that has not been looked up for this long. PARTIAL needs at least one of "
            "`expire-after-access`, `expire-after-write`, `max-rows` and `max-bytes`.",
    )
    expire_after_write_s: float | None = option(
        "lookup.partial-cache.expire-after-write", DURATION, None,
        doc="With PARTIAL: drop a key this long after it was loaded. Needed for a provider without versions.",
    )
    max_rows: int | None = option(
        "lookup.partial-cache.max-rows", LONG, None,
        doc="With PARTIAL: the maximum number of rows, in each process and in the cache that a host's processes share; a key "
            "without rows counts as one row.",
    )
    max_bytes: int | None = option(
        "lookup.partial-cache.max-bytes", size(0, MOST), None,
        doc="With PARTIAL: the maximum number of bytes, in each process and in the cache that a host's processes share.",
    )
    cache_missing_key: bool = option(
        "lookup.partial-cache.cache-missing-key", BOOLEAN, True,
        doc="With PARTIAL: also remember which keys have no rows.",
    )
    store: PartialCacheStore = option(
        "lookup.partial-cache.store", choice(PartialCacheStore), PartialCacheStore.BUILT_IN,
        doc="With PARTIAL: where rows by key are kept. BUILT_IN: in the memory of each process, and in files that the host's processes share. "
            "DISKCACHE: in a database of [diskcache](decisions/diskcache.md), for tables of other systems; needs `max-bytes`.",
    )
    # fmt: on

    @property
    def bounded(self) -> bool:
        """Whether an option limits how long the partial cache keeps keys, or how much it keeps."""
        bounds = (self.expire_after_access_s, self.expire_after_write_s, self.max_rows, self.max_bytes)
        return any(bound is not None for bound in bounds)

    @property
    def parameters(self) -> dict[str, Any]:
        """These options as keyword arguments of `DefaultLookupCache`."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "store"}

    def check(self, explicit: AbstractSet[str], mode: CacheMode, needs_bound: bool) -> None:
        """Raise OptionError if an option that the user has set (its key is in `explicit`) has no effect with the cache's `mode`.

        Raises it also if `needs_bound` and a partial cache has no bound, because it would grow for ever.
        """
        explicit_keys = sorted(key for key in explicit if key.startswith(PARTIAL))
        if mode is not CacheMode.PARTIAL:
            if explicit_keys:
                raise OptionError(
                    f"option {explicit_keys[0]} has no effect with lookup.cache = {mode.value!r}: set lookup.cache = 'PARTIAL', or remove it"
                )
            return
        if self.store is PartialCacheStore.DISKCACHE:
            idle = [key for key in explicit_keys if key in (PARTIAL + "max-rows", PARTIAL + "expire-after-access")]
            if idle:
                raise OptionError(
                    f"option {idle[0]} has no effect with {PARTIAL}store = 'DISKCACHE', which is bounded by {PARTIAL}max-bytes: remove it"
                )
            if self.max_bytes is None:
                raise OptionError(f"option {PARTIAL}store = 'DISKCACHE' needs {PARTIAL}max-bytes: set it, too")
            if self.max_bytes < _DISKCACHE_LEAST_BYTES:
                raise OptionError(
                    f"option {PARTIAL}max-bytes = {self.max_bytes}: with {PARTIAL}store = 'DISKCACHE', give 1 MiB or more"
                )
        bounds = ("expire-after-access", "expire-after-write", "max-rows", "max-bytes")
        if not self.bounded and needs_bound:
            raise OptionError(
                "option lookup.cache = 'PARTIAL': without a bound the cache would grow for ever; set one of "
                + ", ".join(PARTIAL + bound_name for bound_name in bounds)
            )


@dataclasses.dataclass(frozen=True)
class FullCacheOptions:
    """When the full cache reloads, and the memory, disk and time that it may take."""

    # fmt: off
    strategy: ReloadStrategy | str = option(
        "lookup.full-cache.reload-strategy", Kind("PERIODIC, TIMED or `module:factory`", parse_reload_strategy), ReloadStrategy.PERIODIC,
        doc="With FULL: what triggers reloads. With lookup.metadata.source=UFS, a query that finds a new version triggers a reload, too, so you can "
            "leave out this option and the interval. PERIODIC needs `periodic-reload.interval` if you set PERIODIC yourself, and always with "
            "CACHE. TIMED needs `timed-reload.iso-time`. A factory takes the `LookupOptions` and returns a `CacheReloadTrigger`.",
    )
    interval_s: float | None = option(
        "lookup.full-cache.periodic-reload.interval", POSITIVE_DURATION, None,
        doc="PERIODIC: the time between reloads.",
    )
    schedule_mode: ScheduleMode = option(
        "lookup.full-cache.periodic-reload.schedule-mode", choice(ScheduleMode), ScheduleMode.FIXED_DELAY,
        doc="PERIODIC: the next reload is due one interval after the last one has ended (FIXED_DELAY), or whole intervals "
            "after the first load began (FIXED_RATE).",
    )
    iso_time: datetime.time | None = option(
        "lookup.full-cache.timed-reload.iso-time", Kind("ISO time", parse_iso_time), None,
        doc="TIMED: the time of day at which a reload starts, local or with an offset: `10:15`, `10:15Z`, `10:15+07:00`.",
    )
    interval_days: int = option(
        "lookup.full-cache.timed-reload.interval-in-days", _DAYS, 1,
        doc="TIMED: days between reloads.",
    )
    blackout: Blackout | None = option(
        "lookup.full-cache.blackout", Kind("times of day", parse_blackout), None,
        doc="Times of day at which no scheduled reload starts, e.g. `22:00-06:00, 12:00-13:00`. A reload that becomes due at such a time "
            "starts when the blackout is over.",
    )
    jitter_s: float = option(
        "lookup.full-cache.reload-jitter", DURATION, 0.0, default_text="0 s",
        doc="Each host delays its scheduled reloads by a time of its own, which is always the same and at most this long. So "
            "hosts that start together, or reload at the same time of day, do not all ask the store at the same moment. See "
            "[scaling](scaling.md).",
    )
    build_wait_s: float = option(
        "lookup.full-cache.build-wait", DURATION, 30.0, default_text="30 s",
        doc="How long a query waits for the full cache. With UFS: a query that finds a new version waits until it is loaded; after this "
            "time, the query reads the files. With CACHE: a query waits for an overdue reload; after this time, it uses the old snapshot, or "
            "fails if `on-reload-failure` or `max-staleness` requires that. If another process is still loading the first "
            "snapshot after this time, the query reads the files.",
    )
    build_memory_bytes: int | None = option(
        "lookup.full-cache.build-memory", size(16 * MIB, MOST), None, default_text="an eighth of the free memory, at most 2 GiB",
        doc="The memory that the build of a snapshot may use. Rows that do not fit go to temporary files in the cache "
            "directory.",
    )
    retain_s: float | None = option(
        "lookup.full-cache.retain", DURATION, None, default_text="10 min, or two reload intervals if that is longer",
        doc="How long a snapshot stays on disk after a newer one has replaced it, unless the cache needs its space earlier.",
    )
    on_reload_failure: OnReloadFailure = option(
        "lookup.full-cache.on-reload-failure", choice(OnReloadFailure), OnReloadFailure.KEEP,
        doc="With CACHE, if a reload has failed, or is overdue and has not ended after `build-wait`: answer from the "
            "last snapshot (KEEP), or fail until a reload succeeds (FAIL).",
    )
    max_staleness_s: float | None = option(
        "lookup.full-cache.max-staleness", POSITIVE_DURATION, None, default_text="any age",
        doc="With CACHE: never answer from a snapshot older than this. A query then waits for a reload, or fails.",
    )
    # fmt: on

    @property
    def reloads(self) -> bool:
        """Whether the full cache has a schedule, by which a trigger reloads it."""
        return self.strategy is not ReloadStrategy.PERIODIC or self.interval_s is not None

    @property
    def schedule(self) -> tuple[Any, ...]:
        """The options that determine when the full cache reloads."""
        periodic = self.interval_s, self.schedule_mode
        return self.strategy, *periodic, self.iso_time, self.interval_days, self.blackout, self.jitter_s

    @property
    def retained_s(self) -> float:
        """How long a snapshot stays on disk after a newer one has replaced it, in seconds: the option's value, or else its default."""
        if self.retain_s is not None:
            return self.retain_s
        interval_s = self.interval_s or 0.0
        if self.strategy is ReloadStrategy.TIMED:
            interval_s = 86400.0 * self.interval_days
        return max(600.0, 2 * interval_s)

    def check(self, explicit: AbstractSet[str], mode: CacheMode, cached: bool, needs_trigger: bool) -> None:
        """Raise OptionError if an option that the user has set (its key is in `explicit`) has no effect with `mode`, or needs another option.

        `mode`: that of the cache. `cached`: `lookup.metadata.source` is CACHE. `needs_trigger`: no system (a provider) brings a trigger for
        its table.
        """
        explicit_keys = sorted(key for key in explicit if key.startswith(FULL))
        if mode is not CacheMode.FULL:
            if explicit_keys:
                raise OptionError(
                    f"option {explicit_keys[0]} has no effect with lookup.cache = {mode.value!r}: set lookup.cache = 'FULL', or remove it"
                )
            return
        strategy = self.strategy
        strategy_name = strategy if isinstance(strategy, str) else strategy.value
        for prefix, required in ((FULL + "periodic-reload.", "PERIODIC"), (FULL + "timed-reload.", "TIMED")):
            misplaced = [key for key in explicit_keys if key.startswith(prefix)] if strategy_name != required else []
            if misplaced:
                raise OptionError(
                    f"option {misplaced[0]} has no effect with {FULL}reload-strategy = {strategy_name!r}: set reload-strategy = {required!r}, or remove {misplaced[0]}"
                )
        if strategy_name == "TIMED" and self.iso_time is None:
            raise OptionError(f"option {FULL}timed-reload.iso-time is missing: set a time such as '10:15' or '10:15Z'")
        wants = cached and needs_trigger
        wants |= any("reload-strategy" in key or "periodic-reload" in key for key in explicit_keys)
        if strategy_name == "PERIODIC" and self.interval_s is None and wants:
            why = (
                "with lookup.cache = 'FULL' and lookup.metadata.source = 'CACHE', reloads need a schedule; "
                if cached
                else ""
            )
            raise OptionError(f"option {FULL}periodic-reload.interval is missing: {why}set a duration such as '5 min'")
        for key in ("blackout", "reload-jitter"):
            if FULL + key in explicit_keys and not self.reloads:
                raise OptionError(
                    f"option {FULL}{key} is for scheduled reloads: set {FULL}periodic-reload.interval, too"
                )
        if self.jitter_s and isinstance(strategy, str):
            raise OptionError(
                f"option {FULL}reload-jitter has no effect on the reloads of {strategy!r}: let that trigger add a delay of its own, or remove the option"
            )
        if self.interval_s is not None and self.jitter_s > self.interval_s:
            raise OptionError(
                f"option {FULL}reload-jitter = {self.jitter_s:g} s is longer than {FULL}periodic-reload.interval = {self.interval_s:g} s, "
                f"within which each host reloads once: set {self.interval_s:g} s or less"
            )
        if cached and "lookup.metadata.sync-interval" in explicit:
            raise OptionError(
                "option lookup.metadata.sync-interval: with lookup.cache = 'FULL' the reload strategy says when to ask the "
                f"store; set {FULL}periodic-reload.interval instead"
            )
        for key in () if cached else ("on-reload-failure", "max-staleness"):
            if FULL + key in explicit_keys:
                raise OptionError(
                    f"option {FULL}{key} has no effect with lookup.metadata.source = 'UFS', where every query asks the store for the "
                    "version: set lookup.metadata.source = 'CACHE', or remove it"
                )
        if self.max_staleness_s is not None and self.max_staleness_s < (self.interval_s or 0):
            raise OptionError(
                f"option {FULL}max-staleness = {self.max_staleness_s:g} s is less than {FULL}periodic-reload.interval = "
                f"{self.interval_s:g} s: between the scheduled reloads, queries would have to wait for reloads of their own: set max-staleness to "
                f"{self.interval_s:g} s or more, or a shorter interval"
            )
