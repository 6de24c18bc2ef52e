"""Every `lookup.*` key: its type, default and one-line meaning. The only place strings become values.

`LookupOptions.parse` takes the layers in order of precedence and returns one frozen value:
read option > table option > `spark.lookupcache.*` > conf file > default.
A key no layer may hold, a value that does not parse and a combination that contradicts itself are
`OptionError`s that name the key, the value and the nearest valid choice.
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import functools
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import pyarrow as pa

from pyspark_lookup.choices import (
    CacheMode,
    CsvOptions,
    FileFormatName,
    FilterPushdown,
    KeyedWrite,
    MetadataSource,
    MissingColumns,
    OnBusy,
    OnError,
    OnReloadFailure,
    OnVersionGone,
    Overlap,
    ReloadStrategy,
    RetryPredicate,
    StreamStart,
    VersionAt,
    View,
)
from pyspark_lookup.conf import STORAGE, redact, storage_value, tells_secret
from pyspark_lookup.ddl import parse_columns
from pyspark_lookup.errors import OptionError
from pyspark_lookup.parsing import (
    bounded_bytes,
    choice_of,
    parse_batch,
    parse_boolean,
    parse_character,
    parse_commit,
    parse_count,
    parse_days,
    parse_duration_s,
    parse_encoding,
    parse_factory,
    parse_long,
    parse_name,
    parse_names,
    parse_position,
    parse_positive_count,
    parse_positive_duration_s,
    parse_quote,
    parse_reload_strategy,
    parse_stream_start,
    parse_sync_interval_s,
    parse_text,
)
from pyspark_lookup.reload import Blackout, ScheduleMode, parse_blackout, parse_iso_time
from pyspark_lookup.writeids import ValidWriteIdList

__all__ = [
    "HOST_KEYS",
    "SPARK_CONF_PREFIX",
    "CacheMode",
    "FileFormatName",
    "FilterPushdown",
    "KeyedWrite",
    "LookupOptions",
    "MetadataSource",
    "MissingColumns",
    "OnBusy",
    "OnError",
    "OnReloadFailure",
    "OnVersionGone",
    "Overlap",
    "ReloadStrategy",
    "RetryPredicate",
    "StreamStart",
    "VersionAt",
    "View",
    "is_local",
    "merged_options",
    "options_table",
]

T = TypeVar("T")


def _option(
    key: str, kind: str, parse: Callable[[str], Any], default: Any, doc: str, shown: str = "", hashed: bool = True
) -> Any:
    """A field of `LookupOptions` with the key, type label and meaning that users see."""
    if not shown:
        shown = "" if default is None else str(getattr(default, "value", default))
    metadata = {"key": key, "kind": kind, "parse": parse, "doc": doc, "shown": shown}
    return dataclasses.field(default=default, hash=None if hashed else False, metadata=metadata)


def _write_ids(text: str) -> str:
    return str(ValidWriteIdList.parse(text.strip()))


_MIB, _GIB = 1024**2, 1024**3
_FULL = "lookup.full-cache."
_PARTIAL = "lookup.partial-cache."
_PROVIDER = "lookup.provider."
SPARK_CONF_PREFIX = "spark.lookupcache."

# Options of a host, not of what a query means: a session may override these (spark.lookupcache.*) after the plan was made.
HOST_KEYS = frozenset({"lookup.cache.dir", "lookup.cache.max-bytes", "lookup.max-retries"})


@dataclasses.dataclass(frozen=True)
class LookupOptions:
    """The options of one table reference, typed and checked. Durations in seconds, sizes in bytes."""

    path: str = _option("path", "string", parse_text, "", "File, directory (read recursively) or glob; any fsspec URL. `s3a://` means `s3://`. Where an object and a directory have one name, `s3://bucket/name/` is the directory.")  # fmt: skip
    keys: tuple[str, ...] | None = _option("lookup.keys", "names", parse_names, None, "Key columns of the table.")
    format: FileFormatName | None = _option("lookup.format", "parquet, arrow, csv, json, orc", choice_of(FileFormatName), None, "File format.", "from the file names")  # fmt: skip
    schema: pa.Schema | None = _option("lookup.schema", "DDL", parse_columns, None, "The columns and their types, as in CREATE TABLE: `id INT, name STRING`. Text (CSV, JSON) is parsed to them; other files are cast where no value changes; a column that no file has is null.", "from the files")  # fmt: skip
    csv_header: bool = _option("lookup.csv.header", "boolean", parse_boolean, True, "Of CSV files: the first line names the columns; else they are `_c0`, `_c1`, …, or those of lookup.schema in their order.", "true")  # fmt: skip
    csv_sep: str = _option("lookup.csv.sep", "character", parse_character, ",", "Of CSV files: what separates values; `\\t` is a tab.")  # fmt: skip
    csv_quote: str = _option("lookup.csv.quote", "character or nothing", parse_quote, '"', "Of CSV files: what surrounds text that may hold anything.")  # fmt: skip
    csv_escape: str | None = _option("lookup.csv.escape", "character", parse_character, None, "Of CSV files: what stands before a quote inside of quoted text: `\\` in files that Spark wrote.", "the quote itself")  # fmt: skip
    csv_null_value: str = _option("lookup.csv.null-value", "text", str, "", "Of CSV files: text that is null, as an empty value without quotes always is.")  # fmt: skip
    csv_encoding: str = _option("lookup.csv.encoding", "name", parse_encoding, "utf-8", "Of CSV files: their encoding.")  # fmt: skip
    csv_infer_schema: bool = _option("lookup.csv.infer-schema", "boolean", parse_boolean, True, "Of CSV files: find out types from all values; false: every column is text.", "true")  # fmt: skip
    columns: tuple[str, ...] | None = _option("lookup.columns", "names", parse_names, None, "Columns to read, in this order.", "all")  # fmt: skip
    where: str | None = _option("lookup.where", "SQL predicate", parse_text, None, "Rows to read: `=`, `<>`, `<`, `<=`, `>`, `>=`, `<=>`, `IN`, `BETWEEN`, `LIKE 'prefix%'`, `IS [NOT] NULL`, `AND`, `OR`, `NOT` over this table's columns; prunes files and row groups.", "all rows")  # fmt: skip
    valid_from: str | None = _option("lookup.valid-from", "name", parse_name, None, "The column that says from when a row is valid, for `lookup_join(…, as_of=…)`; null: always was.")  # fmt: skip
    valid_to: str | None = _option("lookup.valid-to", "name", parse_name, None, "... and before when; null: still is. Without it a row is valid until the next one of its key.")  # fmt: skip
    overlap: Overlap = _option("lookup.overlap", "ERROR, NEWEST", choice_of(Overlap), Overlap.ERROR, "Where two rows of a key are valid at once: fail, or take the one that is valid since later.")  # fmt: skip
    partition: str | None = _option("lookup.partition", "`max_pt()` or `k=v,…`", parse_text, None, "Partition directories to read; `max_pt()` is the latest.", "all")  # fmt: skip
    view: View = _option("lookup.view", "data, files, versions, metrics, summary, told, changes", choice_of(View), View.DATA, "What a read returns: the rows; the files of the current version; the versions this host knows; its counters; one row about the current version; the version as a SQL function takes it; or, of a managed table, what its commits have changed (`readStream`).")  # fmt: skip
    metrics_tasks: int = _option("lookup.metrics.tasks", "integer", parse_positive_count, 32, "With lookup.view=metrics: tasks that look for hosts to answer; best several times as many as executors.", "32")  # fmt: skip
    success_file: bool = _option("lookup.success-file", "boolean", parse_boolean, False, "Refuse a directory without `_SUCCESS`.", "false")  # fmt: skip
    settle_s: float | None = _option("lookup.settle", "duration", parse_duration_s, None, "Wait until the newest file is at least this old.")  # fmt: skip
    on_busy: OnBusy = _option("lookup.on-busy", "KEEP, FAIL", choice_of(OnBusy), OnBusy.KEEP, "While a job writes the files (`_temporary`): go on with the last version this host knows, or fail.")  # fmt: skip
    busy_wait_s: float = _option("lookup.busy-wait", "duration", parse_duration_s, 30.0, "How long a query waits for such a job where this host knows no version, or lacks bytes of it that the job has removed.", "30 s")  # fmt: skip
    busy_timeout_s: float = _option("lookup.busy-timeout", "duration", parse_duration_s, 600.0, "A job in whose directory nothing has changed for so long is dead: its directory is ignored, and a warning names it.", "10 min")  # fmt: skip
    metadata_source: MetadataSource = _option("lookup.metadata.source", "UFS, CACHE", choice_of(MetadataSource), MetadataSource.UFS, "Who says which version is current: the store, once per query, or this host.")  # fmt: skip
    sync_interval_s: float | None = _option("lookup.metadata.sync-interval", "-1, 0 or duration", parse_sync_interval_s, None, "With CACHE: ask the store again when the known version is older than this (-1 never, 0 always).", "required with CACHE, but for FULL")  # fmt: skip
    version: int | None = _option("lookup.version", "log position", parse_position, None, "Of a managed table: read the version after this event of its log (time travel).", "the current version")  # fmt: skip
    valid_write_ids: str | None = _option("lookup.valid-write-ids", "`table:5:2:2:4`", _write_ids, None, "Of a managed table: read what this list lets through, in Hive's form: table id, high watermark, least open id, open ids, aborted ids.")  # fmt: skip
    floor: str | None = _option("lookup.floor", "`table id:log position`", parse_commit, None, "Of a managed table, with CACHE: what is read includes this commit (`LookupTable.floor` of its writer). Commits of the own host are included without it.")  # fmt: skip
    version_at: VersionAt = _option("lookup.version-at", "AUTO, PLAN, READ", choice_of(VersionAt), VersionAt.AUTO, "When a scan resolves its version. AUTO: at reading if the table fits one task, else at planning.")  # fmt: skip
    on_version_gone: OnVersionGone | None = _option("lookup.on-version-gone", "NEWER, FAIL", choice_of(OnVersionGone), None, "When a file was replaced after the version was resolved: read the newer one, or fail.", "NEWER; of a managed table FAIL")  # fmt: skip
    cache: CacheMode = _option("lookup.cache", "NONE, PARTIAL, FULL", choice_of(CacheMode), CacheMode.NONE, "What a host keeps (FLIP-221): NONE the blocks of the files; PARTIAL the rows of the keys that were asked for, on top; FULL all rows, decoded and indexed, on local disk.")  # fmt: skip
    partial_expire_after_access_s: float | None = _option("lookup.partial-cache.expire-after-access", "duration", parse_duration_s, None, "With PARTIAL: forget a key that was not asked for so long. At least one of the four bounds is needed.")  # fmt: skip
    partial_expire_after_write_s: float | None = _option("lookup.partial-cache.expire-after-write", "duration", parse_duration_s, None, "With PARTIAL: forget a key so long after it was loaded. Needed for a provider without versions.")  # fmt: skip
    partial_max_rows: int | None = _option("lookup.partial-cache.max-rows", "integer", parse_long, None, "With PARTIAL: rows to hold at most, in each process and in what the processes of a host share; a key without rows counts as one.")  # fmt: skip
    partial_max_bytes: int | None = _option("lookup.partial-cache.max-bytes", "size", bounded_bytes(0, 2**60), None, "With PARTIAL: bytes to hold at most, in each process and in what the processes of a host share.")  # fmt: skip
    partial_cache_missing_key: bool = _option("lookup.partial-cache.cache-missing-key", "boolean", parse_boolean, True, "With PARTIAL: remember that a key has no rows.", "true")  # fmt: skip
    reload_strategy: ReloadStrategy | str = _option("lookup.full-cache.reload-strategy", "PERIODIC, TIMED or `module:factory`", parse_reload_strategy, ReloadStrategy.PERIODIC, "With FULL: what reloads. Required with lookup.metadata.source=CACHE. A factory takes the `LookupOptions` and returns a `CacheReloadTrigger`.")  # fmt: skip
    reload_interval_s: float | None = _option("lookup.full-cache.periodic-reload.interval", "duration", parse_positive_duration_s, None, "PERIODIC: time between reloads.")  # fmt: skip
    reload_schedule_mode: ScheduleMode = _option("lookup.full-cache.periodic-reload.schedule-mode", "FIXED_DELAY, FIXED_RATE", choice_of(ScheduleMode), ScheduleMode.FIXED_DELAY, "PERIODIC: counted from the end of the last reload, or on a grid.")  # fmt: skip
    reload_iso_time: datetime.time | None = _option("lookup.full-cache.timed-reload.iso-time", "ISO time", parse_iso_time, None, "TIMED: time of day, local or with an offset: `10:15`, `10:15Z`, `10:15+07:00`.")  # fmt: skip
    reload_interval_days: int = _option("lookup.full-cache.timed-reload.interval-in-days", "integer", parse_days, 1, "TIMED: days between reloads.")  # fmt: skip
    blackout: Blackout | None = _option("lookup.full-cache.blackout", "times of day", parse_blackout, None, "With a reload strategy: no reload begins in these, e.g. `22:00-06:00, 12:00-13:00`; one that comes due waits for the end.")  # fmt: skip
    build_wait_s: float = _option("lookup.full-cache.build-wait", "duration", parse_duration_s, 30.0, "With UFS: how long a query waits for the snapshot of a new version; after it, the query reads the files themselves.", "30 s")  # fmt: skip
    retain_s: float | None = _option("lookup.full-cache.retain", "duration", parse_duration_s, None, "How long a superseded snapshot stays on disk.", "10 min, or two intervals if that is longer")  # fmt: skip
    on_reload_failure: OnReloadFailure = _option("lookup.full-cache.on-reload-failure", "KEEP, FAIL", choice_of(OnReloadFailure), OnReloadFailure.KEEP, "With CACHE, after a failed reload: serve the last snapshot, or fail until a reload succeeds.")  # fmt: skip
    max_staleness_s: float | None = _option("lookup.full-cache.max-staleness", "duration", parse_positive_duration_s, None, "With CACHE: never serve a snapshot older than this; a query then waits for a reload, or fails.", "any age")  # fmt: skip
    cache_dir: str | None = _option("lookup.cache.dir", "path", parse_text, None, "Directory of this host's cache, mode 0700, on a local disk.", "`lookupcache-<uid>` in the system's temporary directory")  # fmt: skip
    cache_max_bytes: int = _option("lookup.cache.max-bytes", "size", bounded_bytes(_MIB, 2**60), 10 * _GIB, "Disk budget of this host's blocks; snapshots come on top.", "10 GiB")  # fmt: skip
    block_size: int = _option("lookup.block.size", "size", bounded_bytes(64 * 1024, _GIB), 4 * _MIB, "Block of a format without natural blocks (CSV, JSON, ORC).", "4 MiB")  # fmt: skip
    max_retries: int = _option("lookup.max-retries", "integer", parse_count, 3, "Further attempts after a transient store error (n + 1 in all), with backoff (FLIP-221).")  # fmt: skip
    provider: str | None = _option("lookup.provider", "`module:factory`", parse_factory, None, "In place of files: a table of any other system. The factory takes a `LookupContext` and returns a `LookupProvider`.")  # fmt: skip
    provider_options: tuple[tuple[str, str], ...] = _option("lookup.provider.*", "any", str, (), "Passed to the provider, e.g. `lookup.provider.table`; never credentials.")  # fmt: skip
    async_capacity: int = _option("lookup.async.capacity", "integer", parse_positive_count, 100, "Of an asynchronous provider: calls that run at once.")  # fmt: skip
    async_timeout_s: float = _option("lookup.async.timeout", "duration", parse_positive_duration_s, 180.0, "Of a provider: how long a call may take, with what is tried again; of its scan(), each batch.", "3 min")  # fmt: skip
    retry_predicate: RetryPredicate | None = _option("lookup.retry.predicate", "lookup_miss", choice_of(RetryPredicate), None, "Of a provider: ask again for keys that have no rows, before that is remembered (FLIP-234). Needs the two options below.")  # fmt: skip
    retry_fixed_delay_s: float | None = _option("lookup.retry.fixed-delay", "duration", parse_positive_duration_s, None, "... after this long.")  # fmt: skip
    retry_max_attempts: int | None = _option("lookup.retry.max-attempts", "integer", parse_positive_count, None, "... so many times at most.")  # fmt: skip
    on_error: OnError = _option("lookup.on-error", "FAIL, NULL", choice_of(OnError), OnError.FAIL, "Of joins and SQL functions: when a lookup failed in every attempt, fail the query, or go on with null in its columns and the reason in the column `lookup_error`.")  # fmt: skip
    filter_pushdown: FilterPushdown = _option("lookup.filter-pushdown", "AUTO, true, false", choice_of(FilterPushdown), FilterPushdown.AUTO, "Prune by filters Spark pushes. AUTO: only on a Spark that scopes them to their scan (5.0).")  # fmt: skip
    split_size: int = _option("lookup.scan.split-size", "size", bounded_bytes(_MIB, 2**60), 128 * _MIB, "A scan above this many file bytes is split into several tasks.", "128 MiB")  # fmt: skip
    stream_start: StreamStart | int = _option("lookup.stream.start", "SNAPSHOT, LATEST or log position", parse_stream_start, StreamStart.SNAPSHOT, "Of a stream of changes: begin with the rows there are; with what is committed from now on; or with what was after this position.")  # fmt: skip
    stream_max_rows: int | None = _option("lookup.stream.max-rows-per-trigger", "integer", parse_positive_count, None, "Of a stream of changes: a micro-batch takes commits of about so many rows, or one.")  # fmt: skip
    stream_max_files: int | None = _option("lookup.stream.max-files-per-trigger", "integer", parse_positive_count, None, "... of so many files.")  # fmt: skip
    stream_max_bytes: int | None = _option("lookup.stream.max-bytes-per-trigger", "size", bounded_bytes(1, 2**60), None, "... of so many bytes.")  # fmt: skip
    write_mode: KeyedWrite | None = _option("lookup.write.mode", "upsert", choice_of(KeyedWrite), None, "Of writes in Spark's append mode: upsert, in place of the rows that have the same keys.")  # fmt: skip
    write_unique_keys: bool = _option("lookup.write.unique-keys", "boolean", parse_boolean, False, "Of writes: fail before the commit if two rows would have one key.", "false")  # fmt: skip
    write_merge_schema: bool = _option("lookup.write.merge-schema", "boolean", parse_boolean, False, "Of writes: add columns that the table does not have; older rows have null there.", "false")  # fmt: skip
    write_missing_columns: MissingColumns | None = _option("lookup.write.missing-columns", "KEEP, NULL", choice_of(MissingColumns), None, "Of upserts whose rows lack columns: a row that is there keeps its values (KEEP), or they become null (NULL).", "such an upsert is refused")  # fmt: skip
    write_batch: tuple[str, int] | None = _option("lookup.write.batch", "`name:number`", parse_batch, None, "Of batch writes, as in `foreachBatch`: write nothing if this batch of that name, or a later one, is committed.")  # fmt: skip
    create_if_not_exists: bool = _option("lookup.create-if-not-exists", "boolean", parse_boolean, False, "Of CREATE TABLE: if nothing is at the path, make a managed table there, with the columns of lookup.schema and the keys of lookup.keys.", "false")  # fmt: skip
    write_compact_after: int = _option("lookup.write.compact-after", "integer", parse_count, 20, "Of writes: who commits folds small writes together once there are so many; 0: nobody does (`LookupTable.compact`).", "20")  # fmt: skip
    write_timeout_s: float = _option("lookup.write.timeout", "duration", parse_positive_duration_s, 86400.0, "Of writes: one of which nothing was heard for so long may be aborted by others.", "24 h")  # fmt: skip
    storage: tuple[tuple[str, Any], ...] = _option("lookup.storage.*", "any", str, (), "Passed to the fsspec filesystem, e.g. `lookup.storage.endpoint_url`, `lookup.storage.anon`; never credentials.", hashed=False)  # fmt: skip # values may be JSON objects
    explicit: frozenset[str] = dataclasses.field(default=frozenset(), repr=False, compare=False)

    @classmethod
    def parse(
        cls,
        read: Mapping[str, str],
        table: Mapping[str, str] | None = None,
        conf: Mapping[str, str] | None = None,
    ) -> LookupOptions:
        """The options of a read of `table` (its stored options) under `conf` (a conf file's).

        Raises OptionError for an unknown key, a bad value, a contradiction, a credential outside
        the conf file, or a missing path.
        """
        layers = [(conf or {}, "conf file"), (table or {}, "table option"), (read, "read option")]
        values: dict[str, Any] = {}
        storage: dict[str, Any] = {}
        provider: dict[str, str] = {}
        explicit: set[str] = set()
        path = {key.lower(): text for layer, _ in layers for key, text in layer.items()}.get("path", "")
        for layer, origin in layers:
            for key in _retracted(layer):
                values.pop(_FIELDS[key].name, None)
                explicit.discard(key)
            for raw_key, text in layer.items():
                key = raw_key.lower()
                _refuse_secret(key, text, allowed=layer is conf)
                if key.startswith(STORAGE) and key.removeprefix(STORAGE).isidentifier():
                    # A conf file's credentials stay on their host: see `conf_file_secrets`. Its other
                    # storage options are for remote tables; local ones take none.
                    if not tells_secret(key, text) and not (layer is conf and is_local(path)):
                        storage[key.removeprefix(STORAGE)] = storage_value(text)
                    continue
                if key.startswith(_PROVIDER) and key.removeprefix(_PROVIDER):
                    provider[key.removeprefix(_PROVIDER)] = str(text)
                    continue
                # A conf file may hold credentials, also under a key that is misspelled.
                field = _field_of(key, text if layer is not conf or key in _FIELDS else "…")
                try:
                    values[field.name] = field.metadata["parse"](str(text))
                except ValueError as problem:
                    raise OptionError(f"option {key} = {redact(key, text)!r} ({origin}): expected {problem}") from None
                if layer is not conf:
                    explicit.add(key)
        values["storage"] = tuple(sorted(storage.items()))
        values["provider_options"] = tuple(sorted(provider.items()))
        options = cls(**values, explicit=frozenset(explicit))
        options._check()
        return options

    def _check(self) -> None:
        """Raise OptionError for a combination that contradicts itself."""
        self._check_provider()
        if not self.path and self.provider is None:
            raise OptionError(
                "option path is missing: give the table's file, directory or glob, e.g. load('s3://bucket/dim')"
            )
        if self.create_if_not_exists:
            raise OptionError("option lookup.create-if-not-exists is for CREATE TABLE … USING lookupcache: remove it")
        self._check_partial()
        self._check_full()
        if self.version is not None and self.valid_write_ids is not None:
            raise OptionError(
                "options lookup.version and lookup.valid-write-ids both say which version to read: give one"
            )
        cached = self.metadata_source is MetadataSource.CACHE
        if cached and self.sync_interval_s is None and self.cache is not CacheMode.FULL and self.provider is None:
            raise OptionError(
                "option lookup.metadata.source = 'CACHE' needs lookup.metadata.sync-interval: a duration such as '5 min', "
                "0 (ask the store at every query) or -1 (never ask again)"
            )
        if not cached and self.sync_interval_s is not None:
            raise OptionError(
                "option lookup.metadata.sync-interval contradicts lookup.metadata.source = 'UFS', which asks the store at "
                "every query: remove it, or set lookup.metadata.source = 'CACHE'"
            )
        given = {"lookup.valid-to", "lookup.overlap"} & self.explicit
        if given and (self.valid_from is None or (self.valid_to is None and "lookup.overlap" in given)):
            raise OptionError(f"option {min(given)} has no meaning without lookup.valid-from and lookup.valid-to")
        if sum(limit is not None for limit in self.stream_limits) > 1:
            raise OptionError(
                "options lookup.stream.max-rows-per-trigger, lookup.stream.max-files-per-trigger and "
                "lookup.stream.max-bytes-per-trigger all limit a micro-batch: give one"
            )
        if self.view not in (View.DATA, View.TOLD, View.CHANGES) and (self.where or self.columns):
            raise OptionError(
                f"option lookup.view = {self.view.value!r} has columns of its own: "
                "filter it in Spark instead of by lookup.where or lookup.columns"
            )

    def _check_provider(self) -> None:
        """Raise OptionError for options of a provider without one, and for options of files with one."""
        if (self.retry_predicate, self.retry_fixed_delay_s, self.retry_max_attempts).count(None) not in (0, 3):
            raise OptionError(
                "options lookup.retry.predicate, lookup.retry.fixed-delay and lookup.retry.max-attempts: give all three or none"
            )
        if self.provider is None:
            given = [key for key in self.explicit if key.startswith(("lookup.async.", "lookup.retry."))]
            given += [_PROVIDER + key for key, _ in self.provider_options]
            if given:
                raise OptionError(f"option {min(given)} is for tables of a provider: set lookup.provider, or remove it")
            return
        of_files = {"lookup.format", "lookup.partition", "lookup.success-file", "lookup.settle", "lookup.block.size"}
        of_files |= {"lookup.on-busy", "lookup.busy-wait", "lookup.busy-timeout", "lookup.schema", *_CSV}
        wrong = sorted(of_files & self.explicit) + [STORAGE + key for key, _ in self.storage]
        if wrong:
            raise OptionError(f"option {min(wrong)} is for tables of files: with lookup.provider it has no meaning")

    def _check_partial(self) -> None:
        """Raise OptionError for options of the partial cache that would be ignored, or without any bound."""
        given = sorted(key for key in self.explicit if key.startswith(_PARTIAL))
        if self.cache is not CacheMode.PARTIAL:
            if given:
                raise OptionError(
                    f"option {given[0]}: lookup.cache is {self.cache.value!r} and should be 'PARTIAL' for it to have a meaning"
                )
            return
        bounds = ("expire-after-access", "expire-after-write", "max-rows", "max-bytes")
        if not self.bounded and self.provider is None:
            raise OptionError(
                "option lookup.cache = 'PARTIAL' without any bound would grow for ever: set one of "
                + ", ".join(_PARTIAL + bound for bound in bounds)
            )

    def _check_full(self) -> None:
        """Raise OptionError for options of the full cache that would be ignored, or lack another."""
        given = sorted(key for key in self.explicit if key.startswith(_FULL))
        if self.cache is not CacheMode.FULL:
            if given:
                raise OptionError(
                    f"option {given[0]}: lookup.cache is {self.cache.value!r} and should be 'FULL' for it to have a meaning"
                )
            return
        strategy = self.reload_strategy
        named = strategy if isinstance(strategy, str) else strategy.value
        for prefix, needed in ((_FULL + "periodic-reload.", "PERIODIC"), (_FULL + "timed-reload.", "TIMED")):
            wrong = [key for key in given if key.startswith(prefix)] if named != needed else []
            if wrong:
                raise OptionError(f"option {wrong[0]}: {_FULL}reload-strategy is {named!r} and should be {needed!r}")
        cached = self.metadata_source is MetadataSource.CACHE
        if named == "TIMED" and self.reload_iso_time is None:
            raise OptionError(f"Missing '{_FULL}timed-reload.iso-time': a time such as '10:15' or '10:15Z'")
        # A provider may bring a trigger of its own.
        wants = cached and self.provider is None
        wants |= any("reload-strategy" in key or "periodic-reload" in key for key in given)
        if named == "PERIODIC" and self.reload_interval_s is None and wants:
            why = (
                "because lookup.cache = 'FULL' reloads by a schedule with lookup.metadata.source = 'CACHE', a"
                if cached
                else "a"
            )
            raise OptionError(f"Missing '{_FULL}periodic-reload.interval': {why} duration such as '5 min'")
        if self.blackout is not None and not self.reloads and _FULL + "blackout" in given:
            raise OptionError(
                f"option {_FULL}blackout is for scheduled reloads: set {_FULL}periodic-reload.interval too"
            )
        if cached and "lookup.metadata.sync-interval" in self.explicit:
            raise OptionError(
                "option lookup.metadata.sync-interval: with lookup.cache = 'FULL' the reload strategy says when to ask the "
                f"store; set {_FULL}periodic-reload.interval instead"
            )
        for key in ("build-wait",) if cached else ("on-reload-failure", "max-staleness"):
            if _FULL + key in given:
                raise OptionError(
                    f"option {_FULL}{key} has no meaning with lookup.metadata.source = {self.metadata_source.value!r}: "
                    + ("queries never wait for a reload" if cached else "every query checks the version at the store")
                )
        if self.max_staleness_s is not None and self.max_staleness_s < (self.reload_interval_s or 0):
            raise OptionError(
                f"option {_FULL}max-staleness = {self.max_staleness_s:g} s is less than {_FULL}periodic-reload.interval = "
                f"{self.reload_interval_s:g} s: queries would fail between reloads"
            )

    @property
    def csv(self) -> CsvOptions:
        """How CSV files are written."""
        return CsvOptions(*(getattr(self, _FIELDS[key].name) for key in _CSV))

    @property
    def pinned(self) -> int | str | None:
        """Which version of a managed table is read, if not the current one."""
        return self.version if self.version is not None else self.valid_write_ids

    @property
    def bounded(self) -> bool:
        """Whether anything bounds the partial cache."""
        return any(value is not None for name, value in self.partial_cache.items() if name != "cache_missing_key")

    @property
    def partial_cache(self) -> dict[str, Any]:
        """What bounds the partial cache, by the parameters of `DefaultLookupCache`."""
        names = (field.name for key, field in _FIELDS.items() if key.startswith(_PARTIAL))
        return {name.removeprefix("partial_"): getattr(self, name) for name in names}

    @property
    def reloads(self) -> bool:
        """Whether a trigger reloads the full cache."""
        return self.reload_strategy is not ReloadStrategy.PERIODIC or self.reload_interval_s is not None

    @functools.cached_property
    def full_cache(self) -> tuple[Any, ...]:
        """The values of all options of the full cache."""
        return tuple(getattr(self, field.name) for key, field in _FIELDS.items() if key.startswith(_FULL))

    @property
    def retained_s(self) -> float:
        """How long a superseded snapshot stays."""
        if self.retain_s is not None:
            return self.retain_s
        interval_s = self.reload_interval_s or 0.0
        if self.reload_strategy is ReloadStrategy.TIMED:
            interval_s = 86400.0 * self.reload_interval_days
        return max(600.0, 2 * interval_s)

    def overridden(self, overrides: Mapping[str, str]) -> LookupOptions:
        """These options with `overrides` (key -> text) in place of their own values. Raises OptionError."""
        values = {}
        for key, text in overrides.items():
            field = _field_of(key, text)
            try:
                values[field.name] = field.metadata["parse"](text)
            except ValueError as problem:
                raise OptionError(f"option {key} = {redact(key, text)!r}: expected {problem}") from None
        return dataclasses.replace(self, **values)

    def on_host(self, overrides: Mapping[str, str]) -> LookupOptions:
        """These options with `overrides` (key -> text) applied to host options nobody set explicitly.

        Only keys of `HOST_KEYS` have an effect; others are an OptionError.
        """
        values: dict[str, Any] = {}
        for key, text in overrides.items():
            field = _field_of(key, text)
            if key not in HOST_KEYS:
                raise OptionError(
                    f"conf {SPARK_CONF_PREFIX}{key.removeprefix('lookup.')}: only "
                    f"{', '.join(sorted(HOST_KEYS))} can be set for a session; give {key} as an option of the read or table"
                )
            if key in self.explicit:
                continue
            try:
                values[field.name] = field.metadata["parse"](text)
            except ValueError as problem:
                raise OptionError(
                    f"conf {SPARK_CONF_PREFIX}{key.removeprefix('lookup.')} = {text!r}: expected {problem}"
                ) from None
        return dataclasses.replace(self, **values)

    def cache_directory(self) -> Path:
        """Where this host keeps its cache. Nothing is created here."""
        if self.cache_dir is not None:
            return Path(self.cache_dir).expanduser().absolute()
        return Path(tempfile.gettempdir()) / f"lookupcache-{os.getuid()}"

    def storage_options(self) -> dict[str, Any]:
        """Keyword arguments for the fsspec filesystem."""
        return dict(self.storage)

    @property
    def stream_limits(self) -> tuple[int | None, int | None, int | None]:
        """At most so many rows, files and bytes in a micro-batch."""
        return self.stream_max_rows, self.stream_max_files, self.stream_max_bytes

    def __repr__(self) -> str:
        set_here = {
            field.metadata["key"]: getattr(self, field.name)
            for field in _FIELDS.values()
            if field.name not in ("storage", "provider_options") and getattr(self, field.name) != field.default
        }
        shown = {key: redact(key, value) if isinstance(value, str) else value for key, value in set_here.items()}
        shown |= {STORAGE + key: redact(key, value) for key, value in self.storage}
        shown |= {_PROVIDER + key: redact(key, value) for key, value in self.provider_options}
        return f"LookupOptions({', '.join(f'{key}={value!r}' for key, value in shown.items())})"


_FIELDS: dict[str, dataclasses.Field[Any]] = {
    field.metadata["key"]: field for field in dataclasses.fields(LookupOptions) if field.metadata
}
_CSV = tuple(key for key in _FIELDS if key.startswith("lookup.csv."))  # in the order of `CsvOptions`


def _refuse_secret(key: str, text: object, allowed: bool) -> None:
    if key.startswith(_PROVIDER) and tells_secret(key, text):
        raise OptionError(
            f"option {key} looks like a credential and would be stored in plans and catalogs: let the provider take it from "
            "the environment or from a file of its own"
        )
    if not allowed and key.startswith(STORAGE) and tells_secret(key, text):
        raise OptionError(
            f"option {key} looks like a credential and would be stored in plans and catalogs: take it from the "
            "environment, from the store's own chain (e.g. an instance role), or from the conf file ($LOOKUPCACHE_CONF)"
        )


def _field_of(key: str, text: object) -> dataclasses.Field[Any]:
    field = _FIELDS.get(key)
    if key.startswith(STORAGE):
        raise OptionError(
            f"unknown option {key} = {redact(key, text)!r}: {STORAGE}… takes the name of one parameter of the fsspec "
            f"filesystem, and JSON for a nested one, e.g. {STORAGE}client_kwargs = '{{\"verify\": false}}'"
        )
    if field is None:
        near = difflib.get_close_matches(key, _FIELDS, 1, 0.6)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(_FIELDS)}"
        raise OptionError(f"unknown option {key} = {redact(key, text)!r}: {hint}")
    return field


def is_local(path: str) -> bool:
    """Whether a path or URL names a file of this machine."""
    return "://" not in path or path.startswith(("file:", "local:"))


def _says(layer: Mapping[str, str], key: str, value: str) -> bool:
    return any(k.lower() == key and str(text).strip().upper() == value for k, text in layer.items())


def _retracted(layer: Mapping[str, str]) -> set[str]:
    """Options of lower layers that lose their meaning by what this layer chooses, such as an interval by UFS."""
    lost: set[str] = set()
    if _says(layer, "lookup.cache", "NONE") or _says(layer, "lookup.cache", "PARTIAL"):
        lost |= {key for key in _FIELDS if key.startswith(_FULL)}
    if _says(layer, "lookup.cache", "NONE") or _says(layer, "lookup.cache", "FULL"):
        lost |= {key for key in _FIELDS if key.startswith(_PARTIAL)}
    if _says(layer, "lookup.cache", "FULL"):
        lost.add("lookup.metadata.sync-interval")
    if _says(layer, "lookup.metadata.source", "UFS"):
        lost |= {"lookup.metadata.sync-interval", _FULL + "on-reload-failure", _FULL + "max-staleness"}
    if _says(layer, "lookup.metadata.source", "CACHE"):
        lost.add(_FULL + "build-wait")
    return lost - {key.lower() for key in layer}


def merged_options(table: Mapping[str, str], read: Mapping[str, str]) -> dict[str, str]:
    """The options of a table under those of a read, as one layer: what the read makes meaningless is left out."""
    lost = _retracted(read) | {key.lower() for key in read}
    kept = {key.lower(): text for key, text in table.items() if key.lower() not in lost}
    return {**kept, **{key.lower(): text for key, text in read.items()}}


def options_table() -> str:
    """The options as a Markdown table, for the README."""
    rows = ["| option | type | default | meaning |", "|---|---|---|---|"]
    for key, field in _FIELDS.items():
        meta = field.metadata
        rows.append(f"| `{key}` | {meta['kind']} | {meta['shown'] or '–'} | {meta['doc']} |")
    return "\n".join(rows)
