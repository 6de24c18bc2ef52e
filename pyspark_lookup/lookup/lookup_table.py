"""`LookupTable`: reads and writes without Spark, and transactions."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import pyarrow as pa

from pyspark_lookup.cache.full.full_cache import FullCache
from pyspark_lookup.cache.full.snapshot import Snapshot
from pyspark_lookup.columnar.ddl import parse_columns
from pyspark_lookup.columnar.keys import KEY_INDEX
from pyspark_lookup.columnar.python_values import KeyMaker, KeysLike, RowsLike, as_arrow_rows, as_key_table, as_python
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.core.write_ids import ValidWriteIdList
from pyspark_lookup.errors import (
    CHANGED_KIND,
    DamagedFileError,
    NotSupportedError,
    OptionError,
    SchemaError,
    UfsError,
    UfsNotFoundError,
)
from pyspark_lookup.lookup import planner
from pyspark_lookup.lookup.catalog_tables import named_options
from pyspark_lookup.lookup.lookup import (
    KeyedRead,
    MatchedRead,
    check_columns,
    forget_keys,
    get_rows,
    key_names,
    match_columns,
    naming,
    plan_keyed,
    plan_matched,
    rows_of_keys,
    rows_of_values,
    scan,
    table_of_keys,
    values_to_match,
)
from pyspark_lookup.lookup.metadata_tables import ViewTask, describe_table, scan_changes, view_batches
from pyspark_lookup.lookup.range_match import MatchKind
from pyspark_lookup.lookup.read import ResolvedTable, with_table_keys
from pyspark_lookup.lookup.runtime import Engine, Runtime, runtime
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import CacheMode, MetadataSource, View
from pyspark_lookup.options.groups import is_idle_in_gets, refuse_in_reads
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.options.parsing import check_argument, duration_argument_s, option_text
from pyspark_lookup.sources.managed import batch_directory
from pyspark_lookup.sources.managed.change_feed import change_columns
from pyspark_lookup.sources.managed.log import Batch, WriteMode
from pyspark_lookup.sources.managed.options import ChangeOptions, WriteOptions
from pyspark_lookup.sources.registry import parse_options
from pyspark_lookup.versions.model import TableVersion, require_metadata

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")


@dataclasses.dataclass
class OpenTable:
    """A table as a `LookupTable` last found it, with the plans of its reads, which are used again while the table stays the same.

    `options`: those of the `LookupTable`, completed by the table's metadata. `full`: the table's full cache if `lookup.metadata.source` is CACHE;
    otherwise None.
    """

    engine: Engine
    resolved_table: ResolvedTable
    options: LookupOptions
    full: FullCache | None
    _matched_reads: dict[tuple[MatchKind, bool], MatchedRead] = dataclasses.field(default_factory=dict)

    @cached_property
    def read(self) -> KeyedRead:
        """How the table's rows are read by key. Raises OptionError without `lookup.keys`."""
        return plan_keyed(self.resolved_table, self.options, runtime().clock)

    def matched_read(self, kind: MatchKind, has_keys: bool) -> MatchedRead:
        """How rows that match values are read. Raises OptionError if neither the options nor the table say which columns match."""
        # The columns of the match are found again each time, because the table's properties may have changed.
        options, match = match_columns(self.engine, self.resolved_table, self.options, kind)
        read = self._matched_reads.get((kind, has_keys))
        if read is None or read.match != match:
            read = plan_matched(self.resolved_table, options, match, has_keys, runtime().clock)
            self._matched_reads[kind, has_keys] = read
        return read

    def find(self, keys: KeysLike | KeyMaker | None, kind: MatchKind, values: Any, version: TableVersion) -> pa.Table:
        """The rows of a version that match `values`, as `LookupTable.get_many` returns them.

        `keys`: for each value, the key that its rows must have; None: rows of any key.
        """
        read = self.matched_read(kind, keys is not None)
        array, key_table = values_to_match(kind, values), None
        if keys is not None:
            key_table = table_of_keys(self.resolved_table, read.plan.options, keys)
            if key_table.num_rows != len(array):
                raise OptionError(
                    f"argument {kind.value} has {len(array):,} values for {key_table.num_rows:,} keys: give a value for each key"
                )
        return rows_of_values(self.engine.reader, read, key_table, array, version)

    def unchanged(self) -> Snapshot | None:
        """In CACHE mode, the snapshot of `resolved_table.version`, if the full cache still answers from it and needs no reload; otherwise None."""
        if self.full is None:
            return None
        snapshots = self.engine.reader.snapshots
        return snapshots.unchanged(self.full, self.resolved_table.table, self.options, self.resolved_table.version)


def refresh_table(engine: Engine, options: LookupOptions, before: OpenTable | None, same_options: bool) -> OpenTable:
    """The table that is at `options.files.path` now; `before` itself if nothing has changed since. `same_options`: `before` has the same options.

    Makes one metadata call. Raises the errors of `TableReader.find`.
    """
    last_table = before.resolved_table.table if before is not None else None
    last = before.resolved_table if before is not None and same_options and before.engine is engine else None
    resolved_table = engine.reader.find(options, last_table, last)
    if (
        before is not None
        and last is not None
        and resolved_table.table is last.table
        and resolved_table.data is last.data
    ):
        before.resolved_table = resolved_table
        return before
    complete = with_table_keys(options, resolved_table.version)
    cached = options.version.source is MetadataSource.CACHE
    return OpenTable(
        engine,
        resolved_table,
        complete,
        engine.reader.fulls.get_cache(resolved_table.table, complete) if cached else None,
    )


# --- transactions ---------------------------------------------------------------------------------


def _match_argument(keys: Any, between: Any, cidr: Any, starts_with: Any, as_of: Any) -> tuple[MatchKind, Any] | None:
    """(the kind of match whose argument is given, the argument); None if only `keys` are given.

    Raises OptionError if arguments of several kinds are given, or no argument at all.
    """
    if keys is not ... and as_of is between is cidr is starts_with is ...:
        return None
    values = (as_of, between, cidr, starts_with)
    arguments = [(kind, value) for kind, value in zip(MatchKind, values, strict=True) if value is not ...]
    if len(arguments) > 1:
        names = " and ".join(kind.value for kind, _ in arguments)
        raise OptionError(f"arguments {names}: give only one of them; for both, look up twice, or filter the result")
    if not arguments and keys is ...:
        raise OptionError("a key is missing: give a key, or between, cidr, starts_with or as_of")
    return arguments[0] if arguments else None


def _as_rows(matches: pa.Table) -> list[dict[str, Any]]:
    return as_python(matches.drop_columns([KEY_INDEX]))


WritingMode = Literal["append", "overwrite", "upsert"]
_MODES = {mode.value: mode for mode in (WriteMode.APPEND, WriteMode.OVERWRITE, WriteMode.UPSERT)}


def write_mode(mode: str, options: LookupOptions) -> WriteMode:
    """The write mode with that name; an append with `lookup.write.mode` = upsert is an upsert. Raises OptionError for any other name."""
    member = _MODES.get(mode.lower()) if isinstance(mode, str) else None
    if member is None:
        raise OptionError(f"argument mode = {mode!r}: give 'append', 'overwrite' or 'upsert'")
    is_upsert = options.kind(WriteOptions).is_upsert(member is WriteMode.OVERWRITE)
    return WriteMode.UPSERT if is_upsert else member


def check_no_batch(options: LookupOptions, operation: str) -> None:
    """Raise OptionError for `lookup.write.batch`, which `operation` would ignore."""
    if options.kind(WriteOptions).batch is not None:
        raise OptionError(f"option lookup.write.batch is for single writes of rows, not for {operation}: remove it")


def check_no_where(options: LookupOptions, how: WriteMode) -> None:
    """Raise OptionError for `lookup.where`, unless rows are appended: other writes take rows that a reader with this option does not see."""
    if options.read.where is not None and how is not WriteMode.APPEND:
        raise OptionError(
            f"option lookup.where = {options.read.where!r} is for reads and does not limit which rows the {how.value} replaces or deletes: use a "
            "LookupTable without this option, such as LookupTable(path)"
        )


class Transaction:
    """Several writes that become visible together when the `with` block ends, or never if the block raises (as with Hive's write ids).

    `LookupTable.transaction` returns one, for one thread of one process. Its reads see the table as it was at the start of the block, together
    with the transaction's own writes. They read files, whatever `lookup.cache` says. A transaction without writes puts nothing in the log. Other
    writers may commit meanwhile: if several writes have the same key, the last commit wins.
    """

    def __init__(self, engine: Engine, options: LookupOptions, clock: HostClock) -> None:
        check_no_batch(options, "a transaction")
        # A version that only this transaction sees would waste space in a cache.
        self._options = options.with_values({"lookup.cache": CacheMode.NONE})
        self._engine = engine
        self._clock = clock
        self._writes = engine.managed.open_writes(options)
        self._ended = False
        self._pid = os.getpid()
        self.position: int | None = None
        """The log position of the transaction's commit; None before the commit, and if the transaction changed nothing."""

    # --- writes -----------------------------------------------------------------------------------

    def write(self, rows: RowsLike, mode: WritingMode = "append") -> None:
        """Write rows, like `LookupTable.write`. An overwrite also replaces the rows that this transaction has written before."""
        self._check_open()
        how = write_mode(mode, self._options)
        check_no_where(self._options, how)
        arrow_rows = as_arrow_rows(rows, lambda: self._engine.managed.schema(self._options), how is WriteMode.UPSERT)
        if isinstance(arrow_rows, pa.Table) and not arrow_rows.num_rows and how is not WriteMode.OVERWRITE:
            return
        self._writes.write(
            arrow_rows.schema, arrow_rows.to_batches() if isinstance(arrow_rows, pa.Table) else arrow_rows, how
        )

    def upsert(self, rows: RowsLike) -> None:
        """Write rows, each in place of the rows with the same key, like `LookupTable.upsert`."""
        self.write(rows, "upsert")

    def delete(self, keys: KeysLike) -> None:
        """Delete the rows with these keys, like `LookupTable.delete`."""
        self._check_open()
        check_no_where(self._options, WriteMode.DELETE)
        self._writes.delete(as_key_table(keys, self._engine.managed.keys(self._options)))

    # --- reads ------------------------------------------------------------------------------------

    @property
    def valid_write_ids(self) -> ValidWriteIdList | None:
        """The writes whose rows this transaction sees, its own write included; None before the table exists."""
        self._check_open()
        return self._writes.valid_write_ids()

    def scan(self, columns: Sequence[str] | None = None, predicate: str | None = None) -> pa.Table:
        """The rows that the transaction sees, in the form of `LookupTable.scan`."""
        open_table = self._open()
        return scan(self._engine, open_table.resolved_table, open_table.options, columns, predicate, self._clock)

    def get(
        self, key: Any = ..., *, between: Any = ..., cidr: Any = ..., starts_with: Any = ..., as_of: Any = ...
    ) -> list[dict[str, Any]]:
        """The rows with a key, or that match a value, as the transaction sees them, in the form of `LookupTable.get`."""
        open_table, argument = self._open(), _match_argument(key, between, cidr, starts_with, as_of)
        version = open_table.resolved_table.version
        if argument is not None:
            kind, value = argument
            return _as_rows(open_table.find(None if key is ... else [key], kind, [value], version))
        return get_rows(self._engine.reader, open_table.read, key, version, None)

    def get_many(
        self, keys: Any = ..., *, between: Any = ..., cidr: Any = ..., starts_with: Any = ..., as_of: Any = ...
    ) -> pa.Table:
        """The rows with some keys, or that match values, as the transaction sees them, in the form of `LookupTable.get_many`."""
        open_table, argument = self._open(), _match_argument(keys, between, cidr, starts_with, as_of)
        if argument is not None:
            return open_table.find(None if keys is ... else keys, *argument, open_table.resolved_table.version)
        key_table = as_key_table(keys, key_names(open_table.options))
        return rows_of_keys(self._engine.reader, open_table.read, key_table, open_table.resolved_table.version, None)

    def _open(self) -> OpenTable:
        self._check_open()
        if self._writes.valid_write_ids() is None:
            raise UfsNotFoundError(
                f"{self._engine.url_of(self._options.files.path)} is not a managed table yet: write to it first"
            )
        table, version = self._writes.version()
        resolved_table = ResolvedTable(table, version, *require_metadata(table, version).columns)
        return OpenTable(self._engine, resolved_table, with_table_keys(self._options, resolved_table.version), None)

    # --- the end of the transaction ---------------------------------------------------------------

    def commit(self) -> None:
        """Make all writes visible in one commit, as the end of the block does. Raises the errors of `LookupTable.write`."""
        self._check_open()
        self._ended = True
        with self._engine.committing(self._options):
            self.position = self._writes.commit()

    def abort(self) -> None:
        """Discard all writes, as an error in the block does. Does nothing if the transaction has ended, or in a forked child."""
        if not self._ended and self._pid == os.getpid():  # a forked child must not abort its parent's transaction
            self._ended = True
            with self._engine.publish():
                self._writes.abort("the transaction was aborted")

    def _check_open(self) -> None:
        if self._ended:
            raise ValueError("this transaction has ended: begin another transaction")
        if self._pid != os.getpid():
            raise ValueError(
                "this transaction belongs to the parent process: begin another transaction in this process"
            )

    def __enter__(self) -> Transaction:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        elif not self._ended and self._pid == os.getpid():
            self.commit()


# --- the table ------------------------------------------------------------------------------------


class LookupTable:
    """A table of any kind, read through this host's cache, always in its current version.

    `options`: those of the Spark format, as a mapping:
    `LookupTable("s3://bucket/dim", {"lookup.where": "id < 10"})`. The constructor reads nothing.
    An instance is for one process; it may be used after a fork, because it then opens stores and caches again.

    Raises OptionError for options that are unknown or contradict each other.
    """

    def __init__(self, path: str | os.PathLike[str] | None, options: Mapping[str, Any] | None = None) -> None:
        check_argument("options", options, (Mapping, type(None)), "a dictionary, such as {'lookup.keys': 'id'}")
        option_texts = {key: option_text(value) for key, value in (options or {}).items()}
        if path is not None:
            option_texts["path"] = option_text(path)
        self._option_texts = option_texts
        self._options = runtime().effective(parse_options(option_texts))
        self._reads_changes = self._options.kind(ChangeOptions).first is not None
        if self._options.read.view is not View.DATA and not self._reads_changes:
            raise OptionError(
                f"option lookup.view = {self._options.read.view.value!r}: views are for Spark; use describe(), metrics() or lookup.changes-from"
            )
        self._idle_options = frozenset(filter(is_idle_in_gets, self._options.explicit))
        self._closed = False
        self._open_table: OpenTable | None = None
        self._engine_of: tuple[Runtime, Engine] | None = None

    @classmethod
    def for_name(cls, spark: SparkSession, name: str) -> LookupTable:
        """The catalog table `name` of a session, with the options with which it was created.

        Raises OptionError if it is not a lookupcache table, if its options are lost, or if ALTER TABLE has changed its location.
        """
        return cls.of_stored(named_options(spark, name)[0])

    @classmethod
    def of_stored(cls, options: Mapping[str, str]) -> LookupTable:
        """The table with the options that a catalog has stored, `path` included. Options that have no effect on a `LookupTable` are accepted."""
        table = cls(None, options)
        table._idle_options = frozenset()
        return table

    @property
    def given(self) -> dict[str, str]:
        """The options with which this `LookupTable` was made, including `path`. A Spark read of the same table takes the same options."""
        return dict(self._option_texts)

    def scan(
        self,
        columns: Sequence[str] | None = None,
        predicate: str | None = None,
        *,
        valid_write_ids: ValidWriteIdList | str | None = None,
    ) -> pa.Table:
        """The rows of the current version as one Arrow table. Makes one metadata call, and reads from the store what this host has not cached.

        `columns`: the names of the columns to return, in this order (default: all columns). `predicate`: a condition in addition to
        `lookup.where`, in the same SQL. `valid_write_ids`: the writes of a managed table to read (as `lookup.valid-write-ids`). With
        `lookup.changes-from`, returns changes, in any order. Raises SchemaError for an unknown column, PredicateError, NotATableError if
        there is no table, VersionGoneError for a version that can no longer be read, or another UfsError.
        """
        if self._reads_changes and valid_write_ids is None:
            return self._scan_changes(columns, predicate)
        return self._ask(
            valid_write_ids,
            lambda open_table, _: scan(
                open_table.engine, open_table.resolved_table, open_table.options, columns, predicate, runtime().clock
            ),
        )

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """The rows of `scan()` as an Arrow C stream, for any library that takes one: polars, pandas, DuckDB, `pyarrow.table`.

        `requested_schema`: the types to which the columns are cast, if all values fit. Otherwise the columns keep their own types, as the Arrow
        PyCapsule interface allows. Raises ValueError if the columns of this schema are not the table's, and the errors of `scan`.
        """
        rows = self.scan()
        if requested_schema is not None:
            target_schema = pa.Schema._import_from_c_capsule(requested_schema)
            with contextlib.suppress(pa.ArrowException):
                rows = rows.cast(target_schema)
        return rows.__arrow_c_stream__()

    def _scan_changes(self, columns: Sequence[str] | None, predicate: str | None) -> pa.Table:
        self._check_open()
        check_columns(columns)
        engine = self._engine()
        with engine.publish(), naming("predicate"):
            table_schema = planner.table_columns(self._resolve(engine, self._options), self._options)
            return scan_changes(engine, self._options, table_schema, columns, predicate)

    def get(
        self,
        key: Any = ...,
        *,
        between: Any = ...,
        cidr: Any = ...,
        starts_with: Any = ...,
        as_of: Any = ...,
        valid_write_ids: ValidWriteIdList | str | None = None,
    ) -> list[dict[str, Any]]:
        """The rows with this key, as dictionaries, in file order; [] if no row has the key, or the key is None.

        `key`: a value, a tuple in the order of `lookup.keys`, or a dictionary by the names of the key columns.

        With one of the other arguments, a value, the rows that match it: `between` finds rows in whose range it lies (`lookup.range`), `cidr`
        the networks of an address (`lookup.cidr`), `starts_with` the prefixes of a string (`lookup.starts-with`), and `as_of` rows that are
        valid at a time (`lookup.valid-from`). Beside it, a key is optional. Key columns are then those of `lookup.keys` that are not columns
        of the match. `lookup.overlap` says what happens if several rows match. None matches nothing. Raises the errors of `get_many`.
        """
        argument = _match_argument(key, between, cidr, starts_with, as_of)

        def answer(open_table: OpenTable, snapshot: Snapshot | None) -> list[dict[str, Any]]:
            engine, version = open_table.engine, open_table.resolved_table.version
            started_s = engine.steady_s()
            if argument is None:
                rows = get_rows(engine.reader, open_table.read, key, version, snapshot)
            else:
                kind, value = argument
                rows = _as_rows(open_table.find(None if key is ... else [key], kind, [value], version))
            engine.time_lookup(started_s)
            return rows

        return self._ask(valid_write_ids, answer)

    def get_many(
        self,
        keys: KeysLike | KeyMaker | EllipsisType = ...,
        *,
        between: KeysLike | EllipsisType = ...,
        cidr: KeysLike | EllipsisType = ...,
        starts_with: KeysLike | EllipsisType = ...,
        as_of: KeysLike | EllipsisType = ...,
        valid_write_ids: ValidWriteIdList | str | None = None,
    ) -> pa.Table:
        """The rows of all keys at once: key columns, the table's other columns, and `key_index`.

        `keys`: a table with the columns of `lookup.keys`; or a list of values, of tuples in the order of `lookup.keys`, or of
        dictionaries (see `KeysLike`); or a function that makes such a table (see `KeyMaker`). The answer has one row per match,
        sorted by `key_index` (int64: the position of the key in `keys`); rows of one key come in file order. One metadata call in UFS mode.

        `between`, `cidr`, `starts_with`, `as_of`: as for `get`, a list or array of values, one for each key. Without `keys`, `key_index` is the
        position of the value; unless `lookup.cache` is FULL, the first call for a version then reads the whole table, and this object keeps
        its rows and an index of them in memory.

        Raises OptionError without `lookup.keys`, SchemaError for keys or values of other types, OverlapError if several rows match a value
        and `lookup.overlap` is ERROR, DamagedFileError for a network that cannot be read (`lookup.on-bad-network`), and the errors of `scan`.
        """
        argument = _match_argument(keys, between, cidr, starts_with, as_of)

        def answer(open_table: OpenTable, snapshot: Snapshot | None) -> pa.Table:
            engine, version = open_table.engine, open_table.resolved_table.version
            started_s = engine.steady_s()
            if argument is not None:
                rows = open_table.find(None if keys is ... else keys, *argument, version)
            else:
                assert not isinstance(keys, EllipsisType)  # a key or a match is given
                key_table = table_of_keys(open_table.resolved_table, open_table.options, keys)
                rows = rows_of_keys(engine.reader, open_table.read, key_table, version, snapshot)
            engine.time_lookup(started_s)
            return rows

        return self._ask(valid_write_ids, answer)

    def invalidate(self, keys: KeysLike | KeyMaker) -> None:
        """Drop what this host has cached of these keys, including the fact that a key has no rows. `keys`: in any form that `get_many` takes.

        The next lookup of these keys reads the table again. This affects all users of the table on this host that have the same key columns and
        lookup.cache=PARTIAL. A load that is running does not cache its rows of these keys. Makes one metadata call in UFS mode. Raises
        OptionError for lookup.cache=FULL (call `reload` instead), SchemaError for keys of other types, and OSError if the cache directory
        cannot be written.
        """
        self._check_open()
        engine = self._engine()
        with engine.publish():
            open_table = self._refresh(engine, self._options)
            forget_keys(engine, open_table.resolved_table, open_table.options, keys)

    def _ask(
        self, valid_write_ids: ValidWriteIdList | str | None, answer: Callable[[OpenTable, Snapshot | None], T]
    ) -> T:
        """What `answer` returns, called with the table in its current version, and with the snapshot from which this version can be read at once (or
        None)."""
        self._check_open()
        if self._idle_options:
            refuse_in_reads(self._idle_options, on_error=self._options.read.on_error)
        if self._reads_changes:
            raise OptionError(
                "option lookup.changes-from reads changes, which cannot be looked up by key, or read as of valid_write_ids: call scan() without arguments "
                "to read the changes, or remove the option to read rows"
            )
        options, open_table = self._options, self._open_table
        if valid_write_ids is not None:
            options = options.override({"lookup.valid-write-ids": str(valid_write_ids)})
        engine = self._engine() if options is self._options else runtime().engine(options)
        try:
            is_reusable = open_table is not None and open_table.engine is engine and options is self._options
            snapshot = open_table.unchanged() if open_table is not None and is_reusable else None
            if open_table is None or snapshot is None:
                open_table = self._refresh(engine, options)
            version = open_table.resolved_table.version
            engine.reader.resolver.count_served(open_table.resolved_table.table, version)
            engine.reader.resolver.count_asked(version)
            return answer(open_table, snapshot)
        finally:
            engine.publish_soon()

    def write(self, rows: RowsLike, mode: WritingMode = "append") -> int:
        """Write rows to this managed table in one commit, and return the log position of this commit.

        `rows`: anything that exports an Arrow C stream (pyarrow, pandas, polars, DuckDB), or a list of dictionaries. If there are no rows, nothing
        is committed, and the position is that of the current version. `mode`: "append", "upsert" (see `upsert`), or "overwrite", which replaces
        all rows of the table. The first write creates the table, with `lookup.keys` as its key columns. All rows become visible at once, or
        none.

        Raises SchemaError for rows that do not fit, WriteConflictError if another write makes this write impossible, NonUniqueKeyError
        (`lookup.write.unique-keys`), NotATableError for a path with other files, NotSupportedError for a store in which a file cannot be created
        exclusively, CommitUnknownError if the store does not say whether the rows are committed, or another UfsError.
        """
        return self._write(rows, write_mode(mode, self._options))

    def _write(self, rows: RowsLike, how: WriteMode) -> int:
        self._check_open()
        check_no_where(self._options, how)
        engine = self._engine()
        arrow_rows = as_arrow_rows(rows, lambda: engine.managed.schema(self._options), how is WriteMode.UPSERT)
        with engine.committing(self._options) as writer:
            # A write without rows needs no write id. Nor does a batch, which may have been written before.
            nothing = isinstance(arrow_rows, pa.Table) and not arrow_rows.num_rows and how is not WriteMode.OVERWRITE
            batch = self._options.kind(WriteOptions).batch
            if batch is not None:
                name: str | None = batch_directory(batch, runtime().nonce())
            else:
                name = runtime().nonce() if nothing else None
            job = writer.begin(arrow_rows.schema, how, name)
            try:
                files = writer.write(
                    job, arrow_rows.to_batches() if isinstance(arrow_rows, pa.Table) else arrow_rows, "part"
                )
            except BaseException:
                # The error of the write says more than one of the abort.
                with contextlib.suppress(UfsError, DamagedFileError):
                    writer.abort(job, ())
                raise
            state = writer.commit(job, files, None if batch is None else Batch(*batch))
            if state is None:  # this batch was written before
                state = engine.managed.log(engine.url_of(self._options.files.path)).latest()
                assert state is not None
                return state.newest
            return writer.commit_position(job, state)

    def upsert(self, rows: RowsLike) -> int:
        """Write rows in one commit, each in place of the rows with the same key, and return the log position of this commit.

        If several writes have the same key, the last commit wins. Raises NonUniqueKeyError if two of the rows have the same key,
        OptionError for a table without key columns, and the errors of `write`.
        """
        return self._write(rows, WriteMode.UPSERT)

    def transaction(self) -> Transaction:
        """A transaction, which makes several writes in one commit: `with table.transaction() as t: t.write(…); t.upsert(…); t.scan()`.

        `t` sees the table as it was when the transaction began, together with its own writes. No other reader sees these writes before the block
        ends. If the block raises or this process dies, no reader ever sees them.
        """
        self._check_open()
        return Transaction(self._engine(), self._options, runtime().clock)

    def delete(self, keys: KeysLike | None = None, *, where: str | None = None) -> int:
        """Delete rows in one commit, and return the log position of this commit. Give either `keys` or `where`.

        `keys`: the keys of the rows, in any form that `get_many` takes. `where`: a predicate, as in `lookup.where`, that is true for the rows; the
        table then needs no key columns. A delete also deletes rows that others commit while it runs, but no rows that are committed after it.
        If there are no such rows, nothing is committed. Raises SchemaError for keys of other types, PredicateError, OptionError unless exactly
        one of the two arguments is given, and the errors of `upsert`.
        """
        self._check_open()
        check_no_batch(self._options, "a delete")
        check_no_where(self._options, WriteMode.DELETE)
        if (keys is None) == (where is None):
            raise OptionError(
                "arguments keys and where: give either keys or a predicate, such as where=\"state = 'NY'\""
            )
        engine = self._engine()
        if where is None:
            with engine.committing(self._options) as writer:
                return writer.delete(as_key_table(keys, engine.managed.keys(self._options)))
        check_argument("where", where, str, "a predicate, such as \"state = 'NY'\"")
        with naming("where"), engine.committing(self._options) as writer:
            return writer.delete_where(where)

    def compact(self) -> int:
        """Rewrite small writes and deletes as larger files sorted by key, and return the log position of the current version.

        This is one commit, which changes no row. If it would gain nothing, there is no commit. Raises WriteConflictError if other writers
        replaced the same rows during each of several attempts, and the errors of `write`.
        """
        self._check_open()
        engine = self._engine()
        with engine.publish():
            return engine.managed.compactor(self._options).compact().newest

    def vacuum(self, older_than: str | datetime.timedelta = "7 d", force: bool = False) -> dict[str, int | None]:
        """Remove the files that are needed by no version that was current within the last `older_than`, by the store's clock.

        Returns the number of removed `files`, their `bytes`, and `oldest`: the first log position from which on each version can be read (None:
        all versions can). Reading an earlier version raises VersionGoneError. `force`: allow less than 7 days, if no other process reads or
        writes the table now. Raises OptionError for a time that is too short or not a duration, UfsNotFoundError if there is no table, or
        another UfsError.
        """
        self._check_open()
        older_than_s = duration_argument_s("older_than", older_than)
        check_argument("force", force, bool, "True or False")
        engine = self._engine()
        with engine.publish():
            return dataclasses.asdict(engine.managed.vacuum(self._options, older_than_s, force))

    def alter(
        self,
        columns: pa.Schema | str | None = None,
        keys: Sequence[str] | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> int:
        """Change this managed table's columns, keys or properties in one commit, and return the log position of this commit.

        `columns`: columns to add, as a schema or as text such as `country STRING`; they are null in existing rows. `keys`: the new key columns.
        `properties`: strings to store with the table, which `describe` shows. If nothing changes, there is no commit, and the position is that of
        the current version. Raises SchemaError for columns or keys that do not fit, and the errors of `write`.
        """
        self._check_open()
        try:
            new_columns = parse_columns(columns) if isinstance(columns, str) else columns
        except ValueError as problem:
            raise SchemaError(f"argument columns = {columns!r}: expected {problem}") from None
        if not isinstance(new_columns, pa.Schema | None):
            raise TypeError(
                f"argument columns: give a pyarrow.Schema, or text such as 'country STRING', not {type(columns).__name__}"
            )
        check_argument("keys", keys, (list, tuple, type(None)), "a list of names of columns")
        for name in keys or ():
            check_argument("keys", name, str, "names of columns")
        check_argument("properties", properties, (Mapping, type(None)), "a dictionary of strings")
        for text in itertools.chain(*(properties or {}).items()):
            check_argument("properties", text, str, "a dictionary of strings, such as {'lookup.log.retention': '30 d'}")
        engine = self._engine()
        with engine.publish():
            return engine.managed.writer(self._options).alter(new_columns, keys, properties)

    def reload(self) -> str:
        """Load the current version into this host's full cache now, and return the version's digest. Only with `lookup.cache=FULL`.

        Only files that have changed are fetched. A long load shows a progress bar or log lines. If the load fails, its error is raised, and the
        snapshot that was loaded before stays.
        """
        full = self._full()
        try:
            snapshot = full.reload()
        except CHANGED_KIND:
            self._resolve(self._engine(), self._options)  # the table may be of another kind by now
            if self._full() is full:
                raise
            full = self._full()
            snapshot = full.reload()
        return snapshot.version.digest

    def warm(self) -> str:
        """Make sure that this host's full cache has the current version, and return the version's digest. Makes one metadata call.

        Like `reload`, but in CACHE mode does nothing if a snapshot already answers queries.
        """
        if self._options.version.source is MetadataSource.CACHE:
            full = self._full()
            latest = full.latest()
            assert self._open_table is not None
            engine, table = self._engine(), self._open_table.resolved_table.table
            if latest is not None and engine.reader.kinds.source(table).is_authorised(table, latest):
                return latest.digest
        return self.reload()

    def _full(self) -> FullCache:
        self._check_open()
        engine = self._engine()
        if self._open_table is None:
            self._resolve(engine, self._options)
        assert self._open_table is not None
        full = engine.reader.fulls.get_cache(self._open_table.resolved_table.table, self._open_table.options)
        if full is None:
            raise OptionError(
                f"option lookup.cache = {self._options.cache.mode.value!r}: only 'FULL' has a snapshot to load: set that"
                if self._options.cache.mode is not CacheMode.FULL
                else f"option lookup.cache = 'FULL' keeps its snapshots on disk: {runtime().cache_problem(self._options)}"
            )
        return full

    @property
    def schema(self) -> pa.Schema:
        """The columns of the current version, as `scan` returns them. Makes one metadata call in UFS mode."""
        self._check_open()
        columns = planner.table_columns(self._resolve(self._engine(), self._options), self._options)
        return change_columns(columns) if self._reads_changes else columns

    @property
    def keys(self) -> tuple[str, ...]:
        """The key columns: `lookup.keys`, or those of a managed table. Raises OptionError if there are none."""
        self._check_open()
        return key_names(self._refresh(self._engine(), self._options).options)

    def files(self) -> list[dict[str, Any]]:
        """The files of the current version: `url`, `size`, `identity`, `modified_at`, and, for a managed table, `write_id` and `rows`."""
        return self._view(View.FILES)

    def versions(self) -> list[dict[str, Any]]:
        """The versions of the table that this host has read, oldest first; for a table that lists its versions, all of these.

        The columns are those of `lookup.view=versions`.
        """
        return self._view(View.VERSIONS)

    def _view(self, view: View) -> list[dict[str, Any]]:
        self._check_open()
        engine = self._engine()
        (batch,) = view_batches(engine, ViewTask(view), self._options, bytes)
        rows: list[dict[str, Any]] = batch.to_pylist()
        return rows

    @property
    def version(self) -> str:
        """The digest of the current version: 15 hex digits, which change if and only if a file changes. Makes one metadata call in UFS mode."""
        self._check_open()
        return self._resolve(self._engine(), self._options).version.digest

    @property
    def valid_write_ids(self) -> ValidWriteIdList:
        """The write ids of this managed table that are valid now. Raises NotSupportedError for any other kind of table."""
        self._check_open()
        engine = self._engine()
        resolved_table = self._resolve(engine, self._options)
        valid = engine.reader.kinds.source(resolved_table.table).valid_write_ids(resolved_table.version)
        if valid is None:
            raise NotSupportedError(
                f"{redact('path', self._options.files.path)}: only managed tables, which this package writes, have write ids: use `version`, or check the path"
            )
        return valid

    @property
    def floor(self) -> str | None:
        """This host's last commit to the table, in the form of `lookup.floor`; None if there is none. No store call."""
        self._check_open()
        engine = self._engine()
        floor = engine.reader.host.floor(engine.url_of(self._options.files.path))
        return None if floor is None else f"{floor[0]}:{floor[1]}"

    def metrics(self) -> dict[str, int]:
        """This table's counters and gauges on this host, over all its processes. `docs/reference/metrics.md` says what each means."""
        self._check_open()
        return self._engine().host_metrics()

    def metrics_by_worker(self) -> dict[str, dict[str, int]]:
        """The counters of each process of this host, by `<host>-<process>`. The counters of processes that have ended are added up as `ended`."""
        self._check_open()
        return self._engine().worker_metrics()

    def describe(self) -> dict[str, Any]:
        """The table as this host sees it: path, format, columns, version, files, bytes, options.

        Managed, Delta and Iceberg tables add their `table_id`, their `properties`, and the version in the form that `lookup.version` takes:
        `position` (managed, Delta) or `snapshot_id` (Iceberg, with `format_version`). Managed tables also add `keys` and `valid_write_ids`.
        """
        self._check_open()
        engine = self._engine()
        return describe_table(engine, self._resolve(engine, self._options), self._options)

    def close(self) -> None:
        """Publish the counters, stop reloading, and refuse further use. The host's cache stays."""
        if not self._closed:
            open_table, self._open_table = self._open_table, None
            self._engine().let_go(
                (open_table.resolved_table.table, open_table.options) if open_table is not None else None, self
            )
        self._closed = True

    def _engine(self) -> Engine:
        """This process's engine for the table."""
        current = runtime()
        if self._engine_of is None or self._engine_of[0] is not current:
            self._engine_of = current, current.engine(self._options)
        return self._engine_of[1]

    def _resolve(self, engine: Engine, options: LookupOptions) -> ResolvedTable:
        return self._refresh(engine, options).resolved_table

    def _refresh(self, engine: Engine, options: LookupOptions) -> OpenTable:
        """The table in its current version. It is kept for the next call if `options` are this object's own options."""
        before, has_own_options = self._open_table, options is self._options
        open_table = refresh_table(engine, options, before, has_own_options)
        if has_own_options and open_table is not before:
            if before is not None and before.resolved_table.table.id != open_table.resolved_table.table.id:
                # The path now has another kind of table.
                engine.reader.let_go(before.resolved_table.table, before.options, self)
            self._open_table = open_table
            engine.reader.hold(open_table.resolved_table.table, open_table.options, self)
        return open_table

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this LookupTable is closed: make another LookupTable")

    def __repr__(self) -> str:
        """The path, the cache mode, and the last version that this process has seen, without a store call."""
        version = "not read yet"
        if self._open_table is not None and not self._closed:
            last = self._engine().reader.host.last(self._open_table.resolved_table.table)
            version = f"version {last['digest']}" if last is not None else version
        return f"LookupTable({self._options.place!r}, {self._options.cache.mode.value}, {'closed' if self._closed else version})"

    def __enter__(self) -> LookupTable:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
