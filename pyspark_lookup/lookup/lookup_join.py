"""Looks up batches of keys for lookup joins and SQL functions, in Spark's tasks. `LookupPass` makes one lookup, or several one after the other.

What a process opens for a lookup stays open in this module for the next batch and the next task. A task gets the description of its lookups, a
`PassSpec`, as text. The versions to read come as columns beside the keys. From one lookup to the next, only row numbers are passed on; the
looked-up columns are copied once, at the end.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup import errors
from pyspark_lookup.cache.full.snapshot import Snapshot
from pyspark_lookup.cache.memory import KEY_INDEX
from pyspark_lookup.columnar.keys import (
    SEED,
    Keys,
    Numbers,
    as_bools,
    as_indices,
    as_int64,
    distinct_keys,
    one_array,
    widen_keys,
)
from pyspark_lookup.columnar.types import resolve_names, schema_of_text, text_of_schema
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.core.log_events import log_event
from pyspark_lookup.errors import (
    DamagedFileError,
    LookupFunctionError,
    NonUniqueKeyError,
    NotATableError,
    NotSupportedError,
    PysparkLookupError,
    ReloadFailedError,
    UfsError,
    VersionGoneError,
)
from pyspark_lookup.lookup import planner
from pyspark_lookup.lookup.lookup import (
    AllRows,
    LastRanges,
    get_cached_rows,
    get_many_from_version,
    match_all,
    match_indexed,
    match_keyed,
)
from pyspark_lookup.lookup.range_match import Match, MatchKind, show
from pyspark_lookup.lookup.read import ReadPlan
from pyspark_lookup.lookup.runtime import Engine, runtime
from pyspark_lookup.lookup.version_token import VersionToken, resolve_and_secure, table_of_token
from pyspark_lookup.options.conf_file import conf_file_options, redact
from pyspark_lookup.options.enums import CacheMode, MetadataSource, OnError
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.scan.table_scan import all_columns
from pyspark_lookup.sources.registry import parse_options
from pyspark_lookup.versions.executions import Build, Execution, Resolution

# --- one lookup -----------------------------------------------------------------------------------

ERROR_COLUMN = "lookup_error"
"""The column that `lookup.on-error=NULL` adds: the error of a row whose lookup failed; null in all other rows."""

_log = logging.getLogger("pyspark_lookup.join")
# The first byte of an error message that stands in the place of a token, if the version could not be resolved.
_FAILED = b"!"
_MESSAGE_BYTES = 1000
_OF_KEY_CACHES = re.compile(r"lookup\.(cache$|partial-cache\.|on-error$)")
_SAMPLE = 1000  # how many keys are examined to find out whether keys repeat
_VERSIONS_AT_MOST = 2  # how many versions stay open: the current version and the one before
LOOKUP_ERRORS = (UfsError, LookupFunctionError, VersionGoneError, NotATableError, DamagedFileError, ReloadFailedError)


@dataclasses.dataclass(frozen=True)
class LookupSpec:
    """The description of one lookup of a query.

    `options`: those of the table. `keys`: the table's key columns, in the order of the arguments, and in the arguments' types (if these are not
    known, in the table's types). `columns`: the table's columns to read; the first of them are returned, with the names `names`. `match`: how the
    last argument, which is then no key, matches some of these columns. `caches_keys`: whether the partial cache of the options may answer; False:
    only the provider's own cache may.
    """

    options: Mapping[str, str]
    keys: pa.Schema
    columns: pa.Schema
    names: tuple[str, ...]
    match: tuple[MatchKind, tuple[str, ...]] | None = None
    caches_keys: bool = True

    @property
    def argument_names(self) -> list[str]:
        """What errors call the arguments: the key columns, then the name of the match, if there is one."""
        return [*self.keys.names, *([] if self.match is None else [self.match[0].value])]

    def cast_arguments(self, arguments: Sequence[pa.Array]) -> list[pa.Array]:
        """The arguments (the keys, then the value to match) in the types in which they are looked up.

        Raises SchemaError if they do not fit the types of the table.
        """
        keys = [widen_keys(field, column) for field, column in zip(self.keys, arguments, strict=False)]
        if self.match is not None:
            kind, columns = self.match
            keys.append(Match(kind, columns).cast_values(self.columns.field(columns[0]), arguments[-1]))
        return keys

    def to_json(self) -> list[Any]:
        """The spec as a JSON value, for tasks. Equal specs have equal values."""
        match = None if self.match is None else [self.match[0].value, self.match[1]]
        schemas = text_of_schema(self.keys), text_of_schema(self.columns)
        return [dict(self.options), *schemas, self.names, match, self.caches_keys]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> LookupSpec:
        """The spec that `to_json` returned as a list."""
        options, keys, columns, names, match, caches_keys = fields
        kind = None if match is None else (MatchKind(match[0]), tuple(match[1]))
        return cls(options, schema_of_text(keys), schema_of_text(columns), tuple(names), kind, caches_keys)

    def parse_options(self) -> LookupOptions:
        """The options, with those of this host's conf file."""
        read, conf = dict(self.options), conf_file_options()
        if not self.caches_keys:
            read, conf = _without_key_caches(read), _without_key_caches(conf)
        return parse_options(read, conf=conf)


def _without_key_caches(options: Mapping[str, str]) -> dict[str, str]:
    """The options without `lookup.cache`, those of the partial cache, and `lookup.on-error`, which may need a cache."""
    return {key: text for key, text in options.items() if not _OF_KEY_CACHES.match(key.lower())}


def issue_token(options: LookupOptions, execution: Execution | None) -> bytes:
    """The version token by which all tasks of `execution` read the same version.

    Raises the errors of `resolve_and_secure`. With `lookup.on-error=NULL`, returns the error instead of a token, for the tasks to handle.
    """
    engine = runtime().engine(options)
    try:
        table, version = resolve_and_secure(engine.reader, options, execution, engine.last_table)
        engine.last_table = table
        engine.reader.metrics.inc("tokenCount")
        engine.reader.host.record_token(table, version)
        return VersionToken.from_version(engine.reader.kinds, table, version).to_bytes()
    except PysparkLookupError as problem:
        if options.read.on_error is not OnError.NULL:
            raise
        return _FAILED + message_of(problem).encode(errors="replace")[:_MESSAGE_BYTES]
    finally:
        engine.publish_metrics()


def columns_of_token(token: bytes) -> tuple[int, int, bytes | None]:
    """What `issue_token` returned, as the values of three columns: the token's two numbers, and the error that stands in its place, or None."""
    if token.startswith(_FAILED):
        return 0, 0, token
    return (*VersionToken.from_bytes(token).to_numbers(), None)


def _token_of_columns(columns: Sequence[pa.Array], row: int) -> bytes:
    """The token, or the error in its place, in a row of `columns`.

    These are the columns that `columns_of_token` filled, of which the third may be missing; or a single column of tokens.
    """
    values = [column[row].as_py() for column in columns]
    if len(values) == 1:
        return values[0] or b""
    if values[2:] and values[2] is not None:
        return bytes(values[2])
    return VersionToken.from_numbers(*values[:2]).to_bytes()


@dataclasses.dataclass
class _OpenVersion:
    """A version that this process has opened for lookups. `names`: the key columns. `all_rows`: kept for lookups without keys.

    `is_lasting`: whether later executions with the same token may use it. False: it is for `execution` only, because it is a newer version than
    the token names, or because its rows may change although the token stays the same (`TableReader.has_fixed_rows`).
    """

    plan: ReadPlan
    names: list[str]
    resolution: Resolution
    snapshot: Snapshot | None
    execution: Execution | None
    is_lasting: bool
    all_rows: AllRows | None = None
    ranges: LastRanges = dataclasses.field(default_factory=LastRanges)


@dataclasses.dataclass(frozen=True)
class LookupRows:
    """The rows that a lookup has found. `keys`: for each row, the position of its key in the batch of keys, ascending. `columns`: the rows' columns."""

    keys: Numbers
    columns: list[pa.Array]


@dataclasses.dataclass(frozen=True)
class _Batch:
    """The keys of a batch of rows, to look up. `values`: for each row of the batch, the value that the table's rows with its key must match (None:
    there is no such value). `places`: for each row of the batch, the position of its key in `keys`; -1 for a key with a null (None: `keys` has
    the key of each row, in the order of the rows)."""

    keys: pa.Table
    values: pa.Array | None = None
    places: Numbers | None = None

    @classmethod
    def from_arguments(cls, names: Sequence[str], arguments: Sequence[pa.Array]) -> _Batch:
        """A batch of the keys in the first arguments, called `names`, and of the values in one more argument, if there is one.

        With values, keys that repeat often are in the batch once: otherwise all of their rows would be fetched for each value.
        """
        keys = pa.Table.from_arrays(list(arguments[: len(names)]), names=list(names))
        if len(arguments) == len(names):
            return cls(keys)
        request_keys = Keys(arguments[: len(names)])
        hashes = request_keys.hashes(SEED)
        some = np.sort(hashes[:_SAMPLE])
        if 4 * np.count_nonzero(some[1:] == some[:-1]) <= len(some):
            return cls(keys, arguments[-1])
        distinct, places = distinct_keys(request_keys, hashes)
        return cls(keys.take(as_indices(distinct)), arguments[-1], places)

    @property
    def repeats(self) -> int:
        """How many rows of the batch have a key that an earlier row has, too, and that is in `keys` only once."""
        return 0 if self.places is None else int(np.count_nonzero(self.places >= 0)) - self.keys.num_rows

    def rows_of(self, keys: Numbers) -> Numbers:
        """The rows of the batch, ascending, that have one of the keys with the numbers `keys`, and a value that is not null."""
        is_asked = np.zeros(self.keys.num_rows + 1, np.bool_)
        is_asked[keys] = True
        rows = is_asked[:-1] if self.places is None else is_asked[self.places]
        if self.values is not None and self.values.null_count:
            rows = rows & as_bools(self.values.is_valid())
        return np.flatnonzero(rows)


class Lookup:
    """Makes the lookup that a `LookupSpec` describes, for batches of keys, in this process. `session`: the options that the session sets."""

    def __init__(self, spec: LookupSpec, session: Mapping[str, str]) -> None:
        self.spec = spec
        self._options = runtime().effective(spec.parse_options().on_host(session))
        self._engine: Engine = runtime().engine(self._options)
        self._versions: collections.OrderedDict[bytes, _OpenVersion] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._match = None if spec.match is None else Match.from_options(*spec.match, self._options.read)

    @property
    def fields(self) -> list[pa.Field]:
        """The columns that the lookup returns."""
        spec = self.spec
        fields = [pa.field(name, field.type) for name, field in zip(spec.names, spec.columns, strict=False)]
        return [*fields, pa.field(ERROR_COLUMN, pa.string())] if self._options.read.on_error is OnError.NULL else fields

    def find(self, keys: Sequence[pa.Array], token: bytes, execution: Execution | None) -> LookupRows:
        """The rows of `keys` (the key columns, then the value to match, if any), in the version that `token` names.

        `token`: what `issue_token` returned. A key with a null has no rows. Raises the errors of a lookup. With `lookup.on-error=NULL`, a key
        whose lookup failed has a row with the error.
        """
        # If there are no keys, the values to match are the keys of the batch, except in the lookup itself.
        match, names = self._match, self.spec.keys.names
        batch_names = names or (match.columns[:1] if match is not None else ())
        make_batch = functools.cache(functools.partial(_Batch.from_arguments, batch_names, keys))
        if not len(keys[0]):  # no keys: no call
            return self._rows(self._nothing(), None)
        if token.startswith(_FAILED):
            batch, message = make_batch(), token[len(_FAILED) :].decode(errors="replace")
            self._refuse(message)
            return self._fail(batch, self._nothing(), np.zeros(batch.keys.num_rows, np.bool_), message)
        open_version: _OpenVersion | None = None
        try:
            started_s = self._engine.steady_s()
            open_version = self._get_version(token, execution)
            reader = self._engine.reader
            reader.resolver.count_served(open_version.plan.table, open_version.resolution.version)
            matches, resolution = self._match_indexed(open_version, keys), open_version.resolution
            if matches is None and match is not None and not names:
                matches, resolution = self._match_all(open_version, match, keys[0], execution)
            elif matches is None:
                matches, resolution = get_many_from_version(
                    reader,
                    open_version.plan,
                    make_batch().keys,
                    open_version.names,
                    execution,
                    open_version.resolution,
                    open_version.snapshot,
                )
                self._count_repeats(make_batch(), open_version)
                matches = self._matching(make_batch(), matches, open_version)
            self._engine.time_lookup(started_s)
            self._follow(open_version, resolution, execution)
        except LOOKUP_ERRORS as problem:
            if self._options.read.on_error is not OnError.NULL:
                raise
            batch = make_batch()
            rows, failures = (
                (problem.rows, problem.failures) if isinstance(problem, LookupFunctionError) else (None, {})
            )
            where, count = redact("path", self._options.files.path), len(failures) or batch.keys.num_rows
            log_event(_log, logging.WARNING, "lookup-failed", table=where, keys=count, error=message_of(problem))
            try:
                if rows is not None:
                    failed_rows = batch.rows_of(np.array(list(failures), np.int64))
                    failed_keys = failed_rows if batch.places is None else batch.places[failed_rows]
                    reasons = [message_of(failures[key]) for key in failed_keys.tolist()]
                    return self._rows(self._matching(batch, rows, open_version), (failed_rows, reasons))
                return self._fail(batch, *self._get_cached(open_version, batch.keys), message_of(problem), open_version)
            except DamagedFileError as bad_network:  # the rows that are at hand have it
                no_answers = np.zeros(batch.keys.num_rows, np.bool_)
                return self._fail(batch, self._nothing(), no_answers, message_of(bad_network))
        return self._rows(matches, None)

    @property
    def engine(self) -> Engine:
        """What this process has open for the table."""
        return self._engine

    @property
    def cache_mode(self) -> CacheMode:
        """The cache in which the lookup finds its rows."""
        return self._options.cache.mode

    @property
    def place(self) -> str:
        """What errors call the table."""
        return self._options.place

    def publish(self) -> None:
        """Publish this process's counters to the other processes of the host."""
        self._engine.publish_metrics()

    def _refuse(self, message: str) -> None:
        """Raise the error of a version that could not be resolved, unless `lookup.on-error` lets the rows pass."""
        name, _, text = message.partition(": ")
        kind = getattr(errors, name, None)
        # If a provider has defined the class of the error, this process does not know the class.
        if not isinstance(kind, type) or not issubclass(kind, PysparkLookupError):
            kind, text = LookupFunctionError, message
        if self._options.read.on_error is not OnError.NULL or not issubclass(kind, LOOKUP_ERRORS):
            raise kind(text)

    def _nothing(self) -> pa.Table:
        return self.spec.columns.append(pa.field(KEY_INDEX, pa.int64())).empty_table()

    def _get_cached(self, open_version: _OpenVersion | None, table: pa.Table) -> tuple[pa.Table, Numbers]:
        """(the cached rows of the keys in `table`, for each key whether the cache knows its rows). Loads no rows from the store."""
        with contextlib.suppress(*LOOKUP_ERRORS):  # the cache may read the bounds of the version's files
            if open_version is not None and self.spec.keys.names:
                return get_cached_rows(
                    self._engine.reader, open_version.plan, table, open_version.names, open_version.resolution.version
                )
        return self._nothing(), np.zeros(table.num_rows, np.bool_)

    def _match_indexed(self, open_version: _OpenVersion, arguments: Sequence[pa.Array]) -> pa.Table | None:
        """The rows of a snapshot that match each value, and have its key, see `match_indexed`; None if there is no snapshot, or no match."""
        snapshot, names = open_version.snapshot, self.spec.keys.names
        if self._match is None or snapshot is None:
            return None
        keys = pa.Table.from_arrays(list(arguments[: len(names)]), names=names) if names else None
        answer = self.spec.columns.names[: len(self.spec.names)]
        with self._lock:  # one thread builds the index
            ranges = open_version.ranges.get(
                self._engine.reader, open_version.plan, self._match, arguments[-1].type, snapshot, bool(names)
            )
        return match_indexed(
            self._engine.reader, open_version.plan, ranges, open_version.names, keys, arguments[-1], answer
        )

    def _match_all(
        self, open_version: _OpenVersion, match: Match, values: pa.Array, execution: Execution | None
    ) -> tuple[pa.Table, Resolution]:
        """(the rows of the whole table that match `values`, with `KEY_INDEX`; the version from which they were read).

        The first call for a version reads the whole table.
        """
        reader, plan = self._engine.reader, open_version.plan
        with self._lock:
            if open_version.all_rows is None or open_version.all_rows.kind != values.type:
                open_version.all_rows = match_all(
                    reader, plan, match, values.type, execution, open_version.resolution, open_version.snapshot
                )
            all_rows = open_version.all_rows
        matches = all_rows.find(values)
        is_known = "missCount" if open_version.snapshot is None else "hitCount"
        reader.metrics.inc(is_known, len(values) - values.null_count)
        return matches, all_rows.resolution

    def _follow(self, open_version: _OpenVersion, resolution: Resolution, execution: Execution | None) -> None:
        """If a newer version has replaced a lost one, read the newer one from now on: later batches must not get cached rows of the lost version."""
        if resolution.version.digest != open_version.resolution.version.digest:
            with self._lock:
                open_version.resolution = resolution._replace(decided_here=False)
                open_version.is_lasting, open_version.execution = False, execution

    def _get_version(self, token: bytes, execution: Execution | None) -> _OpenVersion:
        with self._lock:
            open_version = self._versions.get(token)
            if open_version is None or (not open_version.is_lasting and open_version.execution != execution):
                open_version = self._open(token, execution)
                version = open_version.resolution.version
                # Without an execution, rows that may change would be kept for ever.
                if execution is not None or self._engine.reader.has_fixed_rows(open_version.plan.table, version):
                    self._versions[token] = open_version
                while len(self._versions) > _VERSIONS_AT_MOST:
                    self._versions.popitem(last=False)
                return open_version
            table = open_version.plan.table
            source = self._engine.reader.kinds.source(table)
            source.authorise(table, source.catalog_id(open_version.resolution.version))
            # Without a wait, because the first batch has already waited for the snapshot.
            if open_version.snapshot is None:
                open_version.snapshot = self._snapshot(open_version.plan, open_version.resolution, wait_s=0.0)
            return open_version

    def _open(self, token: bytes, execution: Execution | None) -> _OpenVersion:
        reader = self._engine.reader
        version_token = VersionToken.from_bytes(token)
        resolved_table = table_of_token(reader, self._options, version_token, execution)
        everything = all_columns((resolved_table.data, resolved_table.partitions))
        names = resolve_names(self._options.files.keys or (), everything, "lookup.keys")
        plan = planner.plan_read(resolved_table, self._options, self.spec.columns, runtime().clock)
        resolution = Resolution(resolved_table.version, decided_here=False)
        is_lasting = resolved_table.version.digest == version_token.digest and reader.has_fixed_rows(
            resolved_table.table, resolved_table.version
        )
        return _OpenVersion(plan, names, resolution, self._snapshot(plan, resolution), execution, is_lasting)

    def _snapshot(self, plan: ReadPlan, resolution: Resolution, wait_s: float | None = None) -> Snapshot | None:
        reader = self._engine.reader
        full = reader.fulls.get_cache(plan.table, self._options)
        if full is None:
            return None
        if self._options.version.source is MetadataSource.CACHE and full.find(resolution.version) is None:
            full.current()  # makes the first load, on a host other than the one that resolved the version
        return reader.snapshots.covering(
            plan, reader.snapshots.get(plan.table, self._options, resolution.version, wait_s)
        )

    def _count_repeats(self, batch: _Batch, open_version: _OpenVersion) -> None:
        """Count a hit or a miss for each key that repeats in the batch, because the cache was asked for each key only once."""
        mode = open_version.plan.options.cache.mode
        if mode is not CacheMode.NONE:
            is_miss = mode is CacheMode.FULL and open_version.snapshot is None
            self._engine.reader.metrics.inc("missCount" if is_miss else "hitCount", batch.repeats)

    def _matching(self, batch: _Batch, rows: pa.Table, open_version: _OpenVersion | None) -> pa.Table:
        """The `rows` of the batch's keys, without the rows that do not match the batch's values."""
        if self._match is None or batch.values is None or open_version is None:
            return rows
        reader, plan, version = self._engine.reader, open_version.plan, open_version.resolution.version
        return match_keyed(reader, plan, self._match, rows, batch.keys, batch.values, batch.places, version)

    def _fail(
        self,
        batch: _Batch,
        rows: pa.Table,
        has_answer: Numbers,
        message: str,
        open_version: _OpenVersion | None = None,
    ) -> LookupRows:
        """The result if only some keys could be looked up. `rows`: the rows of these keys. `has_answer`: for each key, whether it is one of them.

        Each row of the batch with another key gets a row with the error `message`, unless its key or value is null.
        """
        is_failed = ~has_answer
        for column in batch.keys.columns:
            if column.null_count:
                is_failed &= as_bools(one_array(column.is_valid()))
        failed_rows = batch.rows_of(np.flatnonzero(is_failed))
        return self._rows(self._matching(batch, rows, open_version), (failed_rows, [message] * len(failed_rows)))

    def _rows(self, rows: pa.Table, failures: tuple[Numbers, Sequence[str]] | None) -> LookupRows:
        """The result with `rows`. `failures`: (the rows of the batch whose lookup failed, ascending; for each the reason)."""
        numbers = as_int64(one_array(rows.column(KEY_INDEX)))
        columns = [one_array(rows.column(name)) for name in self.spec.columns.names[: len(self.spec.names)]]
        if self._options.read.on_error is OnError.NULL:
            columns.append(pa.nulls(rows.num_rows, pa.string()))
        if failures is not None and len(failures[0]):
            extra, reasons = failures
            extra_columns = [
                *(pa.nulls(len(extra), column.type) for column in columns[:-1]),
                pa.array(reasons, pa.string()),
            ]
            numbers = np.concatenate([numbers, extra])
            order = np.argsort(numbers, kind="stable")
            pairs = zip(columns, extra_columns, strict=True)
            columns = [pa.concat_arrays(pair).take(as_indices(order)) for pair in pairs]
            numbers = numbers[order]
        return LookupRows(numbers, columns)


def message_of(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}"


@functools.lru_cache(maxsize=64)
def _lookup(text: str, session: tuple[tuple[str, str], ...], pid: int) -> Lookup:
    return Lookup(LookupSpec.from_json(json.loads(text)), dict(session))


def open_lookup(spec: LookupSpec, session: Mapping[str, str]) -> Lookup:
    """This process's `Lookup` for a spec. `session`: the options in `HOST_KEYS` that the Spark session sets."""
    return _lookup(json.dumps(spec.to_json(), sort_keys=True), tuple(sorted(session.items())), os.getpid())


@functools.lru_cache(maxsize=64)
def options_from_json(text: str) -> LookupOptions:
    """The options of a table from JSON; options that are missing there are taken from this host's conf file."""
    return parse_options(json.loads(text))


# --- several lookups, one after the other ---------------------------------------------------------

FOUND_COLUMN = "_lookup_found"
"""A column that is true in each row that a pass returns, and null in the row that Spark makes of an empty list."""

# Limits for the results that are in memory at once: keys with several rows in each of several tables multiply the results.
_RESULTS_AT_ONCE = 1_000_000
_BYTES_AT_ONCE = 128 * 2**20
Place = int | tuple[int, int]
"""Where a key comes from: the number of an argument, or (number of an earlier lookup, number of one of its columns)."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """One lookup of a pass. `places`: where its keys, and the value to match, come from. `how`: `left`, `inner`, `left_semi` or `left_anti`.

    `version`: the numbers of the columns that name the version to read: one column of tokens as bytes, or the columns of `columns_of_token`.
    `build`: the micro-batch in whose `foreachBatch` function the lookup was built, if any.
    """

    lookup: LookupSpec
    places: tuple[Place, ...]
    version: tuple[int, ...]
    how: str
    build: Build | None = None


@dataclasses.dataclass(frozen=True)
class PassSpec:
    """The description of a pass: several lookups, made one after the other in a single step of the plan.

    `many`: for each row of the input, the pass returns a list of results; False: it returns one result or null.
    """

    stages: tuple[Stage, ...]
    many: bool

    @property
    def drops(self) -> bool:
        """Whether the pass drops input rows without results: one of its lookups is no left join."""
        return any(stage.how != "left" for stage in self.stages)

    def to_text(self) -> str:
        """The spec as text, for tasks. Equal specs have equal texts."""
        stages = [
            [s.lookup.to_json(), s.places, s.version, s.how, s.build and dataclasses.astuple(s.build)]
            for s in self.stages
        ]
        return json.dumps([stages, self.many], sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> PassSpec:
        """The spec that `to_text` wrote."""
        stages, many = json.loads(text)
        return cls(tuple(_parse_stage(*fields) for fields in stages), many)


def _parse_stage(
    lookup: Sequence[Any], places: Sequence[Any], version: Sequence[int], how: str, build: Sequence[Any] | None
) -> Stage:
    key_places = tuple(place if isinstance(place, int) else (place[0], place[1]) for place in places)
    return Stage(LookupSpec.from_json(lookup), key_places, tuple(version), how, Build(*build) if build else None)


@dataclasses.dataclass(frozen=True)
class _Results:
    """The results so far of the rows `first` to `last` - 1 of a batch, in the order of the rows.

    `rows`: for each result, the row of the batch to which it belongs (None: each row has one result). `matches`: for each lookup made so far,
    (its columns, for each result the position of its row in these columns). A position of -1: the lookup has no row for the result. None
    instead of positions: 0, 1, 2, …
    """

    first: int
    last: int
    rows: Numbers | None
    matches: tuple[tuple[list[pa.Array], Numbers | None], ...]

    @cached_property
    def bytes(self) -> Numbers:
        """For each result, about how many bytes its columns take."""
        sizes = np.zeros(self.count, np.int64)
        for columns, places in self.matches:
            if columns and len(columns[0]):
                of_rows = row_sizes(columns)
                sizes += of_rows if places is None else np.where(places < 0, _fixed_bytes(columns), of_rows[places])
            else:
                sizes += _fixed_bytes(columns)
        return sizes

    def fits(self, size: int) -> bool:
        """Whether all results together take at most about `size` bytes. This is cheap to compute if no row of a lookup is repeated."""
        if self.rows is None or all(places is None for _, places in self.matches):
            columns = [column for columns, _ in self.matches for column in columns]
            return sum(int(column.nbytes) for column in columns) + self.count * _fixed_bytes(columns) <= size
        return bool(self.bytes.sum() <= size)

    @property
    def count(self) -> int:
        return self.last - self.first if self.rows is None else len(self.rows)

    def argument(self, column: pa.Array) -> pa.Array:
        """A column of the batch, repeated for each result."""
        return column.slice(self.first, self.count) if self.rows is None else column.take(as_indices(self.rows))

    def column(self, lookup: int, number: int) -> pa.Array:
        """A column of a lookup, repeated for each result."""
        columns, places = self.matches[lookup]
        return columns[number] if places is None else columns[number].take(_indices(places))

    def all_columns(self) -> Iterator[pa.Array]:
        """The columns of all lookups, in order, repeated for each result."""
        for columns, places in self.matches:
            indices = None if places is None else _indices(places)
            yield from columns if indices is None else (column.take(indices) for column in columns)

    def extend(self, selection: Numbers | None, columns: list[pa.Array], places: Numbers | None) -> _Results:
        """The results with the numbers `selection`, in this order (None: all results), with the columns of one more lookup.

        `columns`: the columns of the lookup's rows. `places`: for each of the selected results, the position of its row in these columns.
        """
        if selection is None:
            return dataclasses.replace(self, matches=(*self.matches, (columns, places)))
        rows = selection + self.first if self.rows is None else self.rows[selection]
        matches = [
            (old_columns, selection if old_places is None else old_places[selection])
            for old_columns, old_places in self.matches
        ]
        return _Results(self.first, self.last, rows, (*matches, (columns, places)))

    def parts(self, count: int, size: int) -> Iterator[_Results]:
        """The results in parts of at most about `count` results and `size` bytes. The results of one row of the batch stay together."""
        if self.last - self.first == 1 or (self.count <= count and self.fits(size)):
            yield self
            return
        rows = np.arange(self.first, self.last) if self.rows is None else self.rows
        # A part has `count` units. Each result takes one unit of a part, or more units if it has many bytes.
        ends = np.cumsum(np.maximum(self.bytes * count // size, 1))
        start, first = 0, self.first
        while first < self.last:
            stop = int(np.searchsorted(ends, (ends[start - 1] if start else 0) + count, "right"))
            last = max(int(rows[stop]) if stop < len(rows) else self.last, first + 1)
            stop = int(np.searchsorted(rows, last))
            span = slice(start, stop)
            matches = [
                (columns, np.arange(start, stop) if old_places is None else old_places[span])
                for columns, old_places in self.matches
            ]
            yield _Results(first, last, rows[span], tuple(matches))
            start, first = stop, last


class LookupPass:
    """Makes the lookups that a `PassSpec` describes, for batches of rows, in this process."""

    def __init__(self, spec: PassSpec, session: Mapping[str, str]) -> None:
        self.spec = spec
        self._lookups: list[Lookup] = [open_lookup(stage.lookup, session) for stage in spec.stages]
        fields = [field for lookup in self._lookups for field in lookup.fields]
        self._fields = [*fields, pa.field(FOUND_COLUMN, pa.bool_())] if spec.drops or not fields else fields

    @property
    def engines(self) -> list[Engine]:
        """What this process has open for the table of each lookup."""
        return [lookup.engine for lookup in self._lookups]

    @property
    def in_memory(self) -> bool:
        """Whether all lookups are in full caches."""
        return all(lookup.cache_mode is CacheMode.FULL for lookup in self._lookups)

    @property
    def type(self) -> pa.DataType:
        """The type of the arrays that `answers` returns."""
        row = pa.struct(self._fields)
        return pa.list_(pa.field("element", row)) if self.spec.many else row

    def answers(
        self,
        columns: Sequence[pa.Array],
        versions: Sequence[pa.Array],
        executions: Sequence[Execution | None],
        row_bytes: int = 2**31 - 1,
    ) -> Iterator[pa.Array]:
        """For each row of a batch, the list of its results (unless `spec.many`: its only result, or null), as structs, in one or several arrays.

        `columns`: the arguments of the pass. `versions`: the columns that name the versions to read for each row (see `Stage`). `executions`: the
        execution of each lookup. `row_bytes`: the most bytes that Spark can take as the results of one row. Raises NonUniqueKeyError for a
        second result if there may be only one, NotSupportedError for too many bytes, and the errors of the lookups.
        """
        for start, stop in _runs(versions):
            tokens = [
                _token_of_columns([versions[number] for number in stage.version], start) for stage in self.spec.stages
            ]
            whole = _Results(start, stop, None, ())
            for results in self._extend(columns, tokens, executions, whole, min(_BYTES_AT_ONCE, row_bytes)):
                self._check_size(columns, results, row_bytes)
                yield self._shape(columns, results)

    def publish(self) -> None:
        """Publish this process's counters to the other processes of the host."""
        for lookup in self._lookups:
            lookup.publish()

    def _extend(
        self,
        columns: Sequence[pa.Array],
        tokens: Sequence[bytes],
        executions: Sequence[Execution | None],
        results: _Results,
        size: int,
    ) -> Iterator[_Results]:
        """The results after all lookups that have not been made yet, in parts of about `size` bytes."""
        number = len(results.matches)
        if number == len(self._lookups):
            yield results
            return
        stage = self.spec.stages[number]
        arguments = [
            results.argument(columns[place]) if isinstance(place, int) else results.column(*place)
            for place in stage.places
        ]
        lookup_rows = self._lookups[number].find(
            stage.lookup.cast_arguments(arguments), tokens[number], executions[number]
        )
        # The only lookup of a pass, if it is a left join, may leave out rows without a match: Spark makes a row of each empty list.
        how = "inner" if len(self._lookups) == 1 and stage.how == "left" else stage.how
        selection, places = _JOINS[how](results.count, lookup_rows)
        for part in results.extend(selection, lookup_rows.columns, places).parts(_RESULTS_AT_ONCE, size):
            yield from self._extend(columns, tokens, executions, part, size)

    def _shape(self, arguments: Sequence[pa.Array], results: _Results) -> pa.Array:
        fields, count, rows = self._fields, results.count, results.last - results.first
        columns = list(results.all_columns())
        if len(columns) < len(fields):
            columns.append(pc.fill_null(pa.nulls(count, pa.bool_()), True))
        structs = pa.StructArray.from_arrays(columns, fields=fields)
        if results.rows is None:
            counts = np.ones(rows, np.int64)
        else:
            counts = np.bincount(results.rows - results.first, minlength=rows)
        if self.spec.many:
            offsets = np.zeros(rows + 1, np.int32)
            np.cumsum(counts, out=offsets[1:])
            return pa.ListArray.from_arrays(pa.array(offsets), structs, type=self.type)
        if rows and counts.max() > 1:
            raise self._not_unique(arguments, int(np.argmax(counts > 1)) + results.first, int(counts.max()))
        if count == rows:
            return structs
        return structs.take(pa.array(np.cumsum(counts) - 1, mask=counts == 0))

    def _check_size(self, arguments: Sequence[pa.Array], results: _Results, row_bytes: int) -> None:
        """Raise NotSupportedError if the results of one row, which Spark takes as one value, have more bytes than Spark can take."""
        if results.last - results.first > 1:  # results that are larger than a part are those of a single row
            return
        # In Spark, a struct has 8 bytes for its position, 8 for its nulls, and for each field 8 in addition to the bytes of text.
        size = int(results.bytes.sum()) + results.count * (16 + 8 * len(self._fields))
        if size > row_bytes:
            raise NotSupportedError(
                f"{results.count:,} rows of {' and '.join(lookup.place for lookup in self._lookups)} have the same key, "
                f"{self._key(arguments, results.first)}: Spark would get them as one row "
                f"of {size:,} bytes, but a row may have {row_bytes:,} at most (an eighth of spark.executor.memory, or of spark.driver.memory with a "
                "local master). Look up fewer columns, filter this key out first, use Spark's own join with "
                "spark.read.format('lookupcache').load(…), or give Spark more memory"
            )

    def _key(self, arguments: Sequence[pa.Array], row: int) -> str:
        """The keys of a row, as text for errors, without keys that come from earlier lookups."""
        names_by_place = {
            place: name
            for stage in reversed(self.spec.stages)
            for name, place in zip(stage.lookup.argument_names, stage.places, strict=True)
            if isinstance(place, int)
        }
        return ", ".join(f"{name} = {show(arguments[place][row])}" for place, name in sorted(names_by_place.items()))

    def _not_unique(self, arguments: Sequence[pa.Array], row: int, most: int) -> NonUniqueKeyError:
        return NonUniqueKeyError(
            f"{self._lookups[0].place} has several rows (up to {most}) for one key, here {self._key(arguments, row)}: give register_lookup "
            "multi=True, so that the function returns an array, or use lookup_join"
        )


def _fixed_bytes(columns: Sequence[pa.Array]) -> int:
    """About how many bytes a row of nulls takes in some columns."""
    types = [column.type for column in columns]
    return sum(max(t.bit_width // 8, 1) if pa.types.is_primitive(t) or pa.types.is_decimal(t) else 4 for t in types)


def row_sizes(columns: Sequence[pa.Array]) -> Numbers:
    """About how many bytes each row of some columns takes: exact for text and binary, the average for other types."""
    sizes = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
            sizes += np.diff(np.frombuffer(column.buffers()[1], np.int32)[column.offset :][: len(column) + 1])
        else:
            sizes += column.nbytes // len(column)
    return sizes


def _runs(versions: Sequence[pa.Array]) -> Iterator[tuple[int, int]]:
    """The runs of neighbouring rows of a batch with the same versions, each as (first row, row after the last)."""
    cuts = {0, len(versions[0])}
    for column in versions:
        if pa.types.is_int64(column.type) and not column.null_count:
            numbers = as_int64(column)
            changes = numbers[1:] != numbers[:-1]
        else:
            # Nulls need no comparison: where an error begins or ends, the numbers in the other columns change, too.
            following, before = column.slice(1), column.slice(0, max(len(column) - 1, 0))
            changes = as_bools(pc.fill_null(pc.not_equal(following, before), False))
        cuts.update((np.flatnonzero(changes) + 1).tolist())
    return itertools.pairwise(sorted(cuts))


_Joined = tuple[Numbers | None, Numbers | None]
"""(the numbers of the results that a join keeps, for each of these the position of its match in the lookup's rows).

None instead of numbers: all results, each once. None instead of positions: 0, 1, 2, …"""


def _counts(count: int, lookup_rows: LookupRows) -> Numbers:
    return np.bincount(lookup_rows.keys, minlength=count)


def _join_inner(count: int, lookup_rows: LookupRows) -> _Joined:
    if len(lookup_rows.keys) == count and _counts(count, lookup_rows).max(initial=1) == 1:
        return None, None
    return lookup_rows.keys, None


def _join_left(count: int, lookup_rows: LookupRows) -> _Joined:
    counts = _counts(count, lookup_rows)
    if counts.max(initial=0) <= 1:
        if len(lookup_rows.keys) == count:
            return None, None
        places = np.full(count, -1)
        places[lookup_rows.keys] = np.arange(len(lookup_rows.keys))
        return None, places
    repeats = np.maximum(counts, 1)
    places = np.full(int(repeats.sum()), -1)
    places[np.repeat(counts > 0, repeats)] = np.arange(len(lookup_rows.keys))
    return np.repeat(np.arange(count), repeats), places


def _join_semi(count: int, lookup_rows: LookupRows) -> _Joined:
    selection, first = np.unique(lookup_rows.keys, return_index=True)
    return selection, first


def _join_anti(count: int, lookup_rows: LookupRows) -> _Joined:
    """A join that keeps the results without a match, and the results whose lookup failed."""
    places = np.full(count, -1)
    absent = _counts(count, lookup_rows) == 0
    if lookup_rows.columns:  # the last column has the errors, if there is one
        failed_rows = np.flatnonzero(as_bools(lookup_rows.columns[-1].is_valid()))
        places[lookup_rows.keys[failed_rows]] = failed_rows
    selection = np.flatnonzero(absent | (places >= 0))
    return selection, places[selection]


_JOINS: Mapping[str, Callable[[int, LookupRows], _Joined]] = {
    "left": _join_left,
    "inner": _join_inner,
    "left_semi": _join_semi,
    "left_anti": _join_anti,
}


def _indices(places: Numbers) -> pa.Array:
    """Positions as the indices for a take; null in place of -1."""
    absent = places < 0
    return pa.array(places, mask=absent) if absent.any() else as_indices(places)


@functools.lru_cache(maxsize=64)
def _pass(text: str, session: tuple[tuple[str, str], ...], pid: int) -> LookupPass:
    return LookupPass(PassSpec.from_text(text), dict(session))


def open_pass(text: str, session: Mapping[str, str]) -> LookupPass:
    """This process's `LookupPass` for the text of a `PassSpec`. `session`: the options in `HOST_KEYS` that the Spark session sets."""
    return _pass(text, tuple(sorted(session.items())), os.getpid())
