"""`ProvidedTables`: the tables of providers that one process has open, with the same interfaces as tables of files."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa

from pyspark_lookup.cache.disk_lookup_cache import require_diskcache
from pyspark_lookup.cache.memory import DefaultLookupCache
from pyspark_lookup.columnar.keys import Numbers
from pyspark_lookup.columnar.predicate import Predicate
from pyspark_lookup.columnar.types import cast_column, text_of_schema
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.forks import ForkSafeLock
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.errors import NotSupportedError, OptionError, UfsNotFoundError
from pyspark_lookup.options.enums import CacheMode, FileFormatName, MetadataSource, OnError, PartialCacheStore
from pyspark_lookup.options.groups import FULL
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.scan.open_file import Projection, Slice
from pyspark_lookup.scan.table_scan import ChangedKeys, PreparedScan, PreparedUnit, TableScan, coalesce, matching_rows
from pyspark_lookup.sources.credentials import CredentialOptions
from pyspark_lookup.sources.opening import Opening
from pyspark_lookup.sources.providers.provider import (
    PROVIDER_OPTION,
    BuiltInOptions,
    ProvidedTable,
    ProviderOptions,
    dates_rows,
    system_options,
)
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import digest_of, key_of
from pyspark_lookup.storage.stores import Count, FileVersion, Listing
from pyspark_lookup.versions.model import Table, TableVersion, VersionMetadata
from pyspark_lookup.versions.version_source import Answer, Question, SourceParts, VersionSource


def with_provider(options: LookupOptions, provided_table: ProvidedTable) -> LookupOptions:
    """The options, completed by the provider's choices: a provider with a cache of its own or a scan decides `lookup.cache`.

    Raises OptionError for options that contradict the provider.
    """
    if not provided_table.scans and not provided_table.looks_up:
        raise OptionError(
            f"the provider of option {PROVIDER_OPTION} = {provided_table.name!r} has neither a lookup function nor a scan: make its factory return a "
            "provider with at least one of them"
        )
    explicit_cache = options.cache.mode if "lookup.cache" in options.explicit else None
    whole = provided_table.scans and not provided_table.looks_up
    brings = CacheMode.PARTIAL if provided_table.cache is not None else CacheMode.FULL if whole else None
    if brings is not None and explicit_cache not in (None, brings):
        raise OptionError(
            f"option lookup.cache = {options.cache.mode.value!r}: provider {provided_table.name} works only with {brings.value!r}: remove the option"
        )
    cache = brings or options.cache.mode
    if cache is CacheMode.FULL and not provided_table.scans:
        raise OptionError(
            f"option lookup.cache = 'FULL': provider {provided_table.name} has no scan function: set lookup.cache = 'PARTIAL' or "
            "'NONE', or, if the provider is your own, pass scan=... to it"
        )
    idle = [key for key in options.explicit if key == "lookup.async.capacity" and not provided_table.asynchronous]
    idle += [key for key in options.explicit if key.startswith("lookup.retry.") and whole]
    if idle:
        kind = "is read as a whole" if whole else "is synchronous (it gets one call at a time)"
        raise OptionError(
            f"option {min(idle)} has no meaning, because provider {provided_table.name} {kind}: remove it"
        )
    if not options.files.keys:
        raise OptionError(
            f"option lookup.keys is missing: name the key columns of provider {provided_table.name}, among {', '.join(provided_table.schema.names)}"
        )
    if provided_table.tells_changes and not provided_table.versioned:
        raise OptionError(
            f"option {PROVIDER_OPTION} = {provided_table.name!r}: the provider has changes() but no version(), and changes are counted from a version: give it a version(), too"
        )
    if options.read.on_error is OnError.STALE and (cache is CacheMode.NONE or provided_table.cache is not None):
        need, change = (
            ("lookup.cache = 'PARTIAL' or 'FULL'", "set that")
            if cache is CacheMode.NONE
            else (
                "a cache of lookupcache, not one that the provider supplies",
                "make the provider without its own cache",
            )
        )
        raise OptionError(
            f"option lookup.on-error = 'STALE' needs {need}, to have rows to answer with when provider {provided_table.name} fails: {change}, or remove "
            "lookup.on-error"
        )
    if cache is CacheMode.PARTIAL:
        _check_partial(options, provided_table)
    source = options.version.source
    if cache is CacheMode.FULL:
        _check_full(options, provided_table)
    elif source is MetadataSource.CACHE and options.version.sync_interval_s is None:
        raise OptionError("option lookup.metadata.source = 'CACHE' needs lookup.metadata.sync-interval: set it, too")
    if cache is CacheMode.FULL and not provided_table.versioned:
        if "lookup.metadata.source" in options.explicit and source is MetadataSource.UFS:
            raise OptionError(
                f"option lookup.metadata.source = 'UFS': provider {provided_table.name} has no version() to ask at every query: set lookup.metadata.source = 'CACHE'"
            )
        if provided_table.trigger is None and not options.full_cache.reloads:
            raise OptionError(
                f"provider {provided_table.name} has neither a reload trigger nor a version(): set "
                "lookup.full-cache.periodic-reload.interval, e.g. '5 min', or lookup.full-cache.reload-strategy"
            )
        source = MetadataSource.CACHE
    return options.with_values({"lookup.cache": cache, "lookup.metadata.source": source})


def _check_full(options: LookupOptions, provided_table: ProvidedTable) -> None:
    prefixes = tuple(FULL + name for name in ("reload-strategy", "periodic-reload.", "timed-reload."))
    reload_options = [key for key in options.explicit if key.startswith(prefixes)]
    if provided_table.trigger is not None and reload_options:
        raise OptionError(
            f"option {min(reload_options)}: provider {provided_table.name} has its own reload trigger: remove the option"
        )
    if (
        options.version.source is MetadataSource.CACHE
        and provided_table.trigger is None
        and not options.full_cache.reloads
    ):
        raise OptionError(
            f"option {FULL}periodic-reload.interval is missing: set it, because provider {provided_table.name} has no reload trigger"
        )


def _check_partial(options: LookupOptions, provided_table: ProvidedTable) -> None:
    cache = provided_table.cache
    if options.partial_cache.store is PartialCacheStore.DISKCACHE:
        require_diskcache()
        if options.read.on_error is OnError.STALE:
            raise OptionError(
                "option lookup.on-error = 'STALE' needs the last rows of each key, which lookup.partial-cache.store = 'DISKCACHE' does not keep: "
                "remove one of them"
            )
    cache_options = [key for key in options.explicit if key.startswith("lookup.partial-cache.")]
    if cache is not None and cache_options:
        raise OptionError(
            f"option {min(cache_options)}: provider {provided_table.name} has its own cache: remove the option"
        )
    expires = options.partial_cache.expire_after_write_s is not None
    if isinstance(cache, DefaultLookupCache):
        expires = cache.config["expire_after_write_s"] is not None
    if not provided_table.versioned and not expires and (cache is None or isinstance(cache, DefaultLookupCache)):
        raise OptionError(
            f"provider {provided_table.name} has no version() that tells when rows have changed: set "
            "lookup.partial-cache.expire-after-write to the greatest age that an answer may have"
        )
    if cache is None and not options.partial_cache.bounded:
        raise OptionError(
            "option lookup.cache = 'PARTIAL': without a bound the cache would grow for ever: set lookup.partial-cache.max-rows"
        )


# --- a provider's table, in the form of a table of files ------------------------------------------

_SIZE = 1  # a placeholder: the table's one file has no size


class ProvidedStore:
    """The store of a provider's table. `now_s`: returns the time, which becomes the version of each full load from a provider without
    versions."""

    pins = True
    lists_after = False

    def __init__(self, provided_table: ProvidedTable, options: LookupOptions, now_s: Callable[[], float]) -> None:
        made_with = (
            options.files.path,
            options.kind(ProviderOptions).parameters,
            *(kind.identity for kind in options.kinds),
        )
        # With other columns it is another table: copies and cached rows have the columns of their time.
        made_with += (text_of_schema(provided_table.schema),)
        self.scope = f"provider:{provided_table.name}"
        self._url = f"{self.scope}/{key_of(*made_with)}"
        self._provided_table = provided_table
        # In a FULL cache, each load of the whole table is a new version. Otherwise there is one version, and cached rows expire one by one.
        self._each_time = options.cache.mode is CacheMode.FULL
        self._now_s = now_s

    def url_of(self, path: str) -> str:
        return self._url

    def get_meta(self, path: str, count: Count) -> FileVersion:
        count("head")
        version = self._provided_table.version()
        if version is None:
            version = repr(self._now_s()) if self._each_time else "unversioned"
        return FileVersion(self._url, _SIZE, version)

    def get_status(self, path: str, count: Count) -> FileVersion | Listing:
        return self.get_meta(path, count)

    def list_status(self, path: str, count: Count) -> Listing:
        raise UfsNotFoundError(f"{self._url} is a provider's table, which has rows but no directory to list")

    def pin(self, file: FileVersion) -> contextlib.AbstractContextManager[Callable[[int, int], bytes]]:
        raise UfsNotFoundError(f"{self._url} is a provider's table, which has rows but no file to read")

    def list_files(self, path: str, after: str, at_most: int | None, count: Count) -> tuple[FileVersion, ...]:
        return ()

    def has_directory(self, path: str, count: Count) -> bool:
        return False

    def list_tree(self, path: str, count: Count) -> tuple[FileVersion, ...]:
        return ()

    def last_change_s(self, path: str, count: Count) -> tuple[float | None, float]:
        return None, self._now_s()

    def put_if_absent(self, path: str, data: bytes, count: Count) -> FileVersion | None:
        raise NotSupportedError(
            f"{self._url}: lookupcache does not write to a provider's table: write to the provider's own system"
        )

    def delete(self, path: str, count: Count) -> None:
        raise NotSupportedError(
            f"{self._url}: lookupcache does not write to a provider's table: write to the provider's own system"
        )

    def delete_many(self, directory: str, names: Sequence[str], count: Count) -> None:
        raise NotSupportedError(
            f"{self._url}: lookupcache does not write to a provider's table: write to the provider's own system"
        )


class ProviderSource(VersionSource):
    """Presents a provider's table as a table of one file, whose identity is the provider's version."""

    kinds = ("PROVIDER",)
    label = "a provider's table"
    pins = ()
    retained = False
    fleeting = True
    one_asks = False  # version() is the user's code, which may hang: each process calls it for itself

    def __init__(self, provided_table: ProvidedTable, options: LookupOptions, parts: SourceParts) -> None:
        super().__init__(parts)
        self._provided_table = provided_table
        self.shows_changes = provided_table.versioned or options.cache.mode is CacheMode.FULL  # see `ProvidedStore`

    @classmethod
    def detect_kind(cls, status: FileVersion | Listing) -> str | None:
        return cls.kinds[0]

    def check_options(self, options: LookupOptions, kind: str) -> None:
        self._refuse_pin(options)  # other options that have no meaning here are refused by `ProviderOptions.check`

    def detect_format(self, files: Sequence[FileVersion]) -> FileFormatName | None:
        return None

    def current(self, question: Question) -> Answer:
        table, status = question.table, question.status
        file = status if isinstance(status, FileVersion) else self._parts.ufs.get_meta(table.url)
        digest = digest_of(table.id, file.url, file.size, file.identity)
        schema = text_of_schema(self._provided_table.schema)
        metadata = VersionMetadata(self._provided_table.name, None, "", digest, (), schema)
        return Answer(TableVersion(table.id, (file,), metadata), question.started_s)


class ProvidedScan(TableScan):
    """Reads the rows of a provider's table."""

    def __init__(self, provided_table: ProvidedTable, context: HostContext) -> None:
        self._provided_table = provided_table
        self._metrics = context.metrics
        provided_table.limit(context)

    @property
    def reads_all_rows(self) -> bool:
        return self._provided_table.scans

    @property
    def looks_up_keys(self) -> bool:
        return self._provided_table.looks_up

    @property
    def dates_rows(self) -> bool:
        return self._provided_table.dates_rows

    def rows_by_key(self, keys: pa.Table, columns: pa.Schema, ages_s: Numbers | None = None) -> pa.Table | None:
        return self._provided_table.lookup(keys, columns, self._metrics, ages_s) if self.looks_up_keys else None

    @property
    def tells_changes(self) -> bool:
        return self._provided_table.tells_changes

    def changed_keys(self, since: TableVersion, now: TableVersion, keys: pa.Schema) -> ChangedKeys | None:
        (before,), (after,) = since.files, now.files
        return self._provided_table.changed_keys(before.identity, after.identity, keys, self._metrics)

    def close(self) -> None:
        self._provided_table.close()

    def schema(self, table: Table, files: Sequence[FileVersion]) -> tuple[pa.Schema, pa.Schema]:
        return self._provided_table.schema, pa.schema([])

    def prepare(
        self,
        table: Table,
        pieces: Sequence[Slice],
        projection: Projection,
        columns_of_version: Callable[[], pa.Schema] | None = None,
    ) -> PreparedScan:
        return _Prepared(self._provided_table, pieces, projection, self._metrics)


class _Prepared:
    def __init__(
        self, provided_table: ProvidedTable, pieces: Sequence[Slice], projection: Projection, metrics: CacheMetricGroup
    ) -> None:
        self._provided_table = provided_table
        self._pieces = pieces
        self._projection = projection
        self._metrics = metrics

    def batches(self) -> Iterator[pa.RecordBatch]:
        projection = self._projection
        planned = self._plan(projection.needed_columns, projection.predicate)
        matches = (matching_rows(batch, projection.predicate) for batch in planned)
        rows = (batch.select(projection.columns.names) for batch in matches if batch is not None)
        return coalesce(rows, projection.columns, self._metrics)

    def units(self) -> Iterator[PreparedUnit]:
        for piece in self._pieces:
            yield PreparedUnit(piece.file, 0, piece.file.size, None, self._plan(self._projection.columns.names))

    def _plan(self, names: Sequence[str], predicate: Predicate | None = None) -> Iterator[pa.RecordBatch]:
        fields = [self._projection.data.field(name) for name in names]
        columns = pa.schema([self._provided_table.schema.field(name) for name in names])
        for batch in self._provided_table.scan(columns, predicate):
            columns = [cast_column(batch.column(f.name), f.type, f.name, self._provided_table.name) for f in fields]
            yield pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


# --- the tables of one process --------------------------------------------------------------------


_CHECKED_S = 10.0


class ProvidedTables:
    """Opens the tables that `lookup.provider` names. The first caller for a table makes it; other callers wait until it is made.

    If the system's own columns may change (those of a database), whoever opens a table checks them, once in `checked_s` at most, and makes the
    table again if they have changed. What has the earlier one open goes on with it.
    """

    def __init__(self, clock: HostClock, checked_s: float = _CHECKED_S) -> None:
        self._clock = clock
        self._checked_s = checked_s
        self._numbers = itertools.count()
        self._lock = ForkSafeLock()
        self.futures: dict[str, concurrent.futures.Future[ProvidedTable]] = {}

    def open(self, options: LookupOptions) -> Opening | None:
        if system_options(options) is None:
            return None
        key = _key(options)
        table = self._table(key, options)
        return Opening(
            key_of(key, table.number),
            functools.partial(with_provider, provided_table=table),
            functools.partial(ProvidedStore, table, options),
            functools.partial(ProviderSource, table, options),
            functools.partial(ProvidedScan, table),
            table.cache,
            table.trigger,
        )

    def _table(self, key: str, options: LookupOptions) -> ProvidedTable:
        """The table of a provider. It is made without holding the lock, because the provider's factory may hang, or open a table itself."""
        with self._lock:
            existing = self.futures.get(key)
            future = existing or self.futures.setdefault(key, concurrent.futures.Future())
        if existing is None:
            try:
                future.set_result(ProvidedTable(options, self._clock, next(self._numbers)))
            except BaseException as problem:
                with self._lock:
                    del self.futures[key]
                future.set_exception(problem)
        table = future.result()
        if not table.has_changed(self._checked_s):
            return table
        with self._lock:
            if self.futures.get(key) is future:
                del self.futures[key]
        return self._table(key, options)


def _key(options: LookupOptions) -> str:
    files, read = options.files, options.read
    made_with = files.path, files.keys, read.columns, read.where, read.on_error, options.storage.max_retries
    system = system_options(options)
    of_built_in = (system, files.schema, options.cache.mode) if isinstance(system, BuiltInOptions) else ()
    # The ages that rows with lifetimes get are right for this bound alone.
    bound = (options.partial_cache.expire_after_write_s,) if dates_rows(options) else ()
    return key_of(
        options.kind(ProviderOptions),
        options.kind(CredentialOptions),
        *of_built_in,
        *bound,
        *made_with,
        options.cache.directory(),
    )
