"""Batches of keys in, rows out: one lookup of a lookup join or of a SQL function, as tasks carry it out.

What a process opens for a lookup stays open in this module for the next batch and the next task.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import dataclasses
import functools
import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pyspark_lookup import errors
from pyspark_lookup.cache.full.snapshot import Snapshot
from pyspark_lookup.cache.memory import KEY_INDEX
from pyspark_lookup.columnar.keys import Numbers, as_bools, as_indices, one_array, widen_keys
from pyspark_lookup.columnar.types import resolve_names
from pyspark_lookup.core.log_events import log_event
from pyspark_lookup.errors import (
    DamagedFileError,
    LookupFunctionError,
    NotATableError,
    PysparkLookupError,
    ReloadFailedError,
    UfsError,
    VersionGoneError,
)
from pyspark_lookup.lookup import planner
from pyspark_lookup.lookup.as_of import Validity, cast_times, valid_rows
from pyspark_lookup.lookup.lookup import get_cached_rows, get_many_from_version
from pyspark_lookup.lookup.plan import ReadPlan
from pyspark_lookup.lookup.runtime import Engine, runtime
from pyspark_lookup.lookup.version_token import VersionToken, resolve_and_secure, table_of_token
from pyspark_lookup.options.conf_file import conf_file_options, redact
from pyspark_lookup.options.enums import MetadataSource, OnError
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.scan.contract import all_columns
from pyspark_lookup.versions.executions import Execution, Resolution

ERROR_COLUMN = "lookup_error"
"""What failed, where `lookup.on-error=NULL` let a row pass without its columns; null elsewhere."""

_log = logging.getLogger("pyspark_lookup.join")
_FAILED = b"!"  # in place of a token: the version could not be resolved; the error follows
_SEVERAL = b"+"  # in front of several tokens, each with its length
_MESSAGE_BYTES = 1000
_VERSIONS_AT_MOST = 2  # that stay open: the current one and the one before
_CAUGHT = (UfsError, LookupFunctionError, VersionGoneError, NotATableError, DamagedFileError, ReloadFailedError)


@dataclasses.dataclass(frozen=True)
class LookupSpec:
    """One lookup of a query: the table's options, and the columns of its answer.

    `keys`: the table's key columns, in the order of the arguments and in the arguments' types (in the table's types if those were
    unknown). `columns`: the table's columns, as planned; the first of them are the answer, under `names`. `as_of`: the columns that
    say when a row is valid (the second may be None); the last argument is then a time.
    """

    options: Mapping[str, str]
    keys: pa.Schema
    columns: pa.Schema
    names: tuple[str, ...]
    as_of: tuple[str, str | None] | None = None

    def cast_arguments(self, arguments: Sequence[pa.Array]) -> list[pa.Array]:
        """Keys, and times after them, in the types in which they are looked up. Raises SchemaError if they do not fit the table's."""
        keys = [widen_keys(field, column) for field, column in zip(self.keys, arguments, strict=False)]
        if self.as_of is not None:
            keys.append(cast_times(self.columns.field(self.as_of[0]), arguments[-1]))
        return keys

    def to_json(self) -> list[Any]:
        """The spec as JSON values, for tasks; equal specs give equal values."""
        return [dict(self.options), _schema_text(self.keys), _schema_text(self.columns), self.names, self.as_of]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> LookupSpec:
        """The spec that `to_json` made."""
        options, keys, columns, names, as_of = fields
        validity = None if as_of is None else (as_of[0], as_of[1])
        return cls(options, _parse_schema(keys), _parse_schema(columns), tuple(names), validity)


def _schema_text(schema: pa.Schema) -> str:
    return base64.b64encode(schema.remove_metadata().serialize().to_pybytes()).decode()


def _parse_schema(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))


def issue_token(options: LookupOptions, execution: Execution | None) -> bytes:
    """The token of the version that `execution` reads, for all its tasks.

    Raises what resolving raises. With `lookup.on-error=NULL` the tasks get the error in place of a token, and handle it.
    """
    engine = runtime().engine(options)
    try:
        table, version = resolve_and_secure(engine.reader, options, execution, engine.last_table)
        engine.last_table = table
        engine.reader.metrics.inc("tokenCount")
        engine.reader.resolver.host.record_token(table, version)
        return VersionToken.from_version(table, version).to_bytes()
    except PysparkLookupError as problem:
        if options.on_error is OnError.FAIL:
            raise
        return _FAILED + _message(problem).encode(errors="replace")[:_MESSAGE_BYTES]
    finally:
        engine.publish_metrics()


def join_tokens(tokens: Sequence[bytes]) -> bytes:
    """Tokens of `issue_token` as one value, which each row carries: one column per token would cost as much as a looked-up column."""
    if len(tokens) == 1:
        return tokens[0]
    return _SEVERAL + b"".join(len(token).to_bytes(2, "big") + token for token in tokens)


def split_tokens(joined_tokens: bytes) -> list[bytes]:
    """The tokens that `join_tokens` joined."""
    if not joined_tokens.startswith(_SEVERAL):
        return [joined_tokens]
    tokens, position = [], len(_SEVERAL)
    while position < len(joined_tokens):
        start, position = position + 2, position + 2 + int.from_bytes(joined_tokens[position : position + 2], "big")
        tokens.append(joined_tokens[start:position])
    return tokens


@dataclasses.dataclass
class _OpenVersion:
    """A version from which tasks of this process answer."""

    plan: ReadPlan
    names: list[str]
    resolution: Resolution
    snapshot: Snapshot | None
    execution: Execution | None
    is_token_version: bool = True  # False: a newer version replaces the token's, for this execution only


@dataclasses.dataclass(frozen=True)
class LookupRows:
    """The rows of a lookup: the place of the key that each row answers, ascending, and the columns."""

    keys: Numbers
    columns: list[pa.Array]


class Lookup:
    """Answers batches of one spec in this process."""

    def __init__(self, spec: LookupSpec, session: Mapping[str, str]) -> None:
        self.spec = spec
        spec_options = LookupOptions.parse(spec.options, conf=conf_file_options()).on_host(session)
        self._options = runtime().effective(spec_options)
        self._engine: Engine = runtime().engine(self._options)
        self._versions: collections.OrderedDict[bytes, _OpenVersion] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._validity = None if spec.as_of is None else Validity(*spec.as_of, self._options.overlap)

    @property
    def fields(self) -> list[pa.Field]:
        """The columns of the answer."""
        spec = self.spec
        fields = [pa.field(name, field.type) for name, field in zip(spec.names, spec.columns, strict=False)]
        return [*fields, pa.field(ERROR_COLUMN, pa.string())] if self._options.on_error is OnError.NULL else fields

    def find(self, keys: Sequence[pa.Array], token: bytes, execution: Execution | None) -> LookupRows:
        """The rows of the keys (and times), of the version of a token of `issue_token`; a key with a null has none.

        Raises what looking up raises; with `lookup.on-error=NULL` a key that failed has a row with the error instead.
        """
        count = len(self.spec.keys)
        times = keys[count] if self._validity is not None else None
        table = pa.Table.from_arrays(list(keys[:count]), names=self.spec.keys.names)
        if not table.num_rows:  # no keys: no call
            return self._rows(table, times, self._nothing(), None)
        if token.startswith(_FAILED):
            has_row, message = np.zeros(table.num_rows, np.bool_), token[len(_FAILED) :].decode(errors="replace")
            self._refuse(message)
            return self._fail(table, times, self._nothing(), has_row, message)
        open_version: _OpenVersion | None = None
        try:
            with self._engine.measure("lookupTime"):
                open_version = self._get_version(token, execution)
                reader = self._engine.reader
                reader.resolver.count_served(open_version.plan.table, open_version.resolution.version)
                matches, resolution = get_many_from_version(
                    reader,
                    open_version.plan,
                    table,
                    open_version.names,
                    execution,
                    open_version.resolution,
                    open_version.snapshot,
                )
            self._follow(open_version, resolution, execution)
        except _CAUGHT as problem:
            if self._options.on_error is OnError.FAIL:
                raise
            rows, failures = (
                (problem.rows, problem.failures) if isinstance(problem, LookupFunctionError) else (None, {})
            )
            where, count = redact("path", self._options.path), len(failures) or table.num_rows
            log_event(_log, logging.WARNING, "lookup-failed", table=where, keys=count, error=_message(problem))
            if rows is not None:
                places = np.array(sorted(failures))
                reasons = [_message(failures[place]) for place in places.tolist()]
                return self._rows(table, times, rows, (places, reasons))
            return self._fail(table, times, *self._get_cached(open_version, table), _message(problem))
        return self._rows(table, times, matches, None)

    def publish(self) -> None:
        """Put this process's counters where other processes of the host find them."""
        self._engine.publish_metrics()

    def _refuse(self, message: str) -> None:
        """Raise the error of a version that could not be resolved, unless `lookup.on-error` lets the rows pass."""
        name, _, text = message.partition(": ")
        kind = getattr(errors, name, None)
        if not isinstance(kind, type) or not issubclass(
            kind, PysparkLookupError
        ):  # the error is of a class of the provider
            kind, text = LookupFunctionError, message
        if self._options.on_error is OnError.FAIL or not issubclass(kind, _CAUGHT):
            raise kind(text)

    def _nothing(self) -> pa.Table:
        return self.spec.columns.append(pa.field(KEY_INDEX, pa.int64())).empty_table()

    def _get_cached(self, open_version: _OpenVersion | None, table: pa.Table) -> tuple[pa.Table, Numbers]:
        """The rows that can be answered without the store, and which keys have an answer."""
        with contextlib.suppress(*_CAUGHT):  # the cache may read the bounds of the version's files
            if open_version is not None:
                return get_cached_rows(
                    self._engine.reader, open_version.plan, table, open_version.names, open_version.resolution.version
                )
        return self._nothing(), np.zeros(table.num_rows, np.bool_)

    def _follow(self, open_version: _OpenVersion, resolution: Resolution, execution: Execution | None) -> None:
        """Go on with the version that replaced a lost one, so that cached rows of the lost one are not mixed in."""
        if resolution.version.digest != open_version.resolution.version.digest:
            with self._lock:
                open_version.resolution = dataclasses.replace(resolution, decided_here=False)
                open_version.is_token_version, open_version.execution = False, execution

    def _get_version(self, token: bytes, execution: Execution | None) -> _OpenVersion:
        with self._lock:
            open_version = self._versions.get(token)
            if open_version is None or (not open_version.is_token_version and open_version.execution != execution):
                open_version = self._versions[token] = self._open(token, execution)
                while len(self._versions) > _VERSIONS_AT_MOST:
                    self._versions.popitem(last=False)
            elif open_version.snapshot is None:  # the first batch has waited for it
                open_version.snapshot = self._snapshot(open_version.plan, open_version.resolution, wait_s=0.0)
            return open_version

    def _open(self, token: bytes, execution: Execution | None) -> _OpenVersion:
        reader = self._engine.reader
        version_token = VersionToken.from_bytes(token)
        resolved_table = table_of_token(reader, self._options, version_token, execution)
        everything = all_columns((resolved_table.data, resolved_table.partitions))
        names = resolve_names(self._options.keys or (), everything, "lookup.keys")
        plan = planner.plan_read(resolved_table, self._options, self.spec.columns, runtime().clock)
        resolution = Resolution(resolved_table.version, decided_here=False)
        is_token_version = resolved_table.version.digest == version_token.digest
        return _OpenVersion(plan, names, resolution, self._snapshot(plan, resolution), execution, is_token_version)

    def _snapshot(self, plan: ReadPlan, resolution: Resolution, wait_s: float | None = None) -> Snapshot | None:
        reader = self._engine.reader
        full = reader.fulls.get_cache(plan.table, self._options)
        if full is None:
            return None
        if self._options.metadata_source is MetadataSource.CACHE and full.find(resolution.version) is None:
            full.current()  # the first load of a host that did not resolve
        return reader.snapshots.covering(
            plan, reader.snapshots.get(plan.table, self._options, resolution.version, wait_s)
        )

    def _fail(
        self, keys: pa.Table, times: pa.Array | None, rows: pa.Table, has_answer: Numbers, message: str
    ) -> LookupRows:
        """The answer if only some keys have one, those where `has_answer`: every other key without a null gets a row that says why."""
        valid = np.ones(keys.num_rows, np.bool_)
        for column in keys.columns:
            if column.null_count:
                valid &= as_bools(one_array(column.is_valid()))
        unknown = np.flatnonzero(valid & ~has_answer)
        return self._rows(keys, times, rows, (unknown, [message] * len(unknown)))

    def _rows(
        self, keys: pa.Table, times: pa.Array | None, rows: pa.Table, failures: tuple[Numbers, Sequence[str]] | None
    ) -> LookupRows:
        if self._validity is not None and times is not None:
            rows = valid_rows(rows, keys, times, self._validity)
        numbers = np.asarray(one_array(rows.column(KEY_INDEX)))
        columns = [one_array(rows.column(name)) for name in self.spec.columns.names[: len(self.spec.names)]]
        if self._options.on_error is OnError.NULL:
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


def _message(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}"


@functools.lru_cache(maxsize=64)
def _lookup(text: str, session: tuple[tuple[str, str], ...], pid: int) -> Lookup:
    return Lookup(LookupSpec.from_json(json.loads(text)), dict(session))


def open_lookup(spec: LookupSpec, session: Mapping[str, str]) -> Lookup:
    """This process's lookup of a spec, under what the session sets of a host's options."""
    return _lookup(json.dumps(spec.to_json(), sort_keys=True), tuple(sorted(session.items())), os.getpid())


@functools.lru_cache(maxsize=64)
def parse_options(text: str) -> LookupOptions:
    """The options of a table from JSON, over this host's conf file."""
    return LookupOptions.parse(json.loads(text), conf=conf_file_options())
