"""Batches of keys in, lists of rows out: what the tasks of a lookup join and of a SQL function do.

A task gets its `LookupSpec` as text and the version as a column beside its keys; what it opens for them
stays open in this module for the next batch and the next task of the process.
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

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.base.errors import (
    DamagedFileError,
    LookupFunctionError,
    NonUniqueKeyError,
    NotATableError,
    ReloadFailedError,
    UfsError,
    VersionGoneError,
)
from pyspark_lookup.base.log_events import log_event
from pyspark_lookup.cache.full.snapshot import Snapshot
from pyspark_lookup.cache.memory import KEY_INDEX
from pyspark_lookup.columnar.keys import Numbers, as_indices, bits_of, one_array
from pyspark_lookup.columnar.types import resolve_names
from pyspark_lookup.engine import planner
from pyspark_lookup.engine.as_of import Validity, valid_rows
from pyspark_lookup.engine.lookup import get_held_at, get_many_at
from pyspark_lookup.engine.plan import ReadPlan
from pyspark_lookup.engine.runtime import Engine, runtime
from pyspark_lookup.engine.version_token import VersionToken, resolve_and_secure, table_of_token
from pyspark_lookup.options.conf_file import conf_file_options, redact
from pyspark_lookup.options.enums import MetadataSource, OnError
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.scan.contract import all_columns
from pyspark_lookup.table.executions import Execution, Resolution

ERROR_COLUMN = "lookup_error"
"""What failed, where `lookup.on-error=NULL` let a row pass without its columns; null elsewhere."""
FOUND_COLUMN = "_lookup_found"
"""Whether a list's row is one of the table's."""

_log = logging.getLogger("pyspark_lookup.join")
_FAILED = b"!"  # in place of a version that could not be resolved, with what there is to say about it
_MESSAGE_BYTES = 1000
_VERSIONS_AT_MOST = 2  # kept open, the current one and the one before
_CAUGHT = (UfsError, LookupFunctionError, VersionGoneError, NotATableError, DamagedFileError, ReloadFailedError)


@dataclasses.dataclass(frozen=True)
class LookupSpec:
    """One lookup of a query: the table's options, its key columns in the order of the arguments, and the answer.

    `columns`: those of the table, as planned; in the answer the first of them are called `names`. `many`: a list of rows
    for each key, else one row or null. `marked`: with `FOUND_COLUMN`. `as_of`: the last argument is a time, at which the
    row is valid by these columns (the second may be None).
    """

    options: Mapping[str, str]
    keys: tuple[str, ...]
    columns: pa.Schema
    names: tuple[str, ...]
    many: bool
    marked: bool
    as_of: tuple[str, str | None] | None = None

    def to_text(self) -> str:
        """The spec as it travels; the same for equal specs."""
        schema = base64.b64encode(self.columns.remove_metadata().serialize().to_pybytes()).decode()
        fields = [dict(self.options), self.keys, schema, self.names, self.many, self.marked, self.as_of]
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def of_text(cls, text: str) -> LookupSpec:
        """The spec that `to_text` wrote."""
        options, keys, schema, names, many, marked, as_of = json.loads(text)
        columns = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(schema)))
        validity = None if as_of is None else (as_of[0], as_of[1])
        return cls(options, tuple(keys), columns, tuple(names), many, marked, validity)


def issue_token(options: LookupOptions, execution: Execution | None) -> bytes:
    """The version that `execution` reads, as the token that its tasks get.

    Raises what resolving raises; with `lookup.on-error=NULL` tasks get that instead.
    """
    engine = runtime().engine(options)
    try:
        table, version = resolve_and_secure(engine.reader, options, execution, engine.known)
        engine.known = table
        engine.reader.metrics.inc("tokenCount")
        engine.reader.resolver.host.record_token(table, version)
        return VersionToken.of(table, version).to_bytes()
    except _CAUGHT as problem:
        if options.on_error is OnError.FAIL:
            raise
        return _FAILED + _message(problem).encode(errors="replace")[:_MESSAGE_BYTES]
    finally:
        engine.publish_metrics()


@dataclasses.dataclass
class _At:
    """A version as tasks of this process answer from it."""

    plan: ReadPlan
    names: list[str]
    resolution: Resolution
    snapshot: Snapshot | None
    execution: Execution | None
    agreed: bool = True  # False: another version in place of the token's, for this execution only


class Lookup:
    """Answers batches of one spec in this process."""

    def __init__(self, spec: LookupSpec, session: Mapping[str, str]) -> None:
        self._spec = spec
        given = LookupOptions.parse(spec.options, conf=conf_file_options()).on_host(session)
        self._options = runtime().effective(given)
        self._engine: Engine = runtime().engine(self._options)
        self._versions: collections.OrderedDict[bytes, _At] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._validity = None if spec.as_of is None else Validity(*spec.as_of, self._options.overlap)
        fields = [pa.field(name, field.type) for name, field in zip(spec.names, spec.columns, strict=False)]
        if self._options.on_error is OnError.NULL:
            fields.append(pa.field(ERROR_COLUMN, pa.string()))
        if spec.marked:
            fields.append(pa.field(FOUND_COLUMN, pa.bool_()))
        self._fields = fields

    def answers(self, keys: Sequence[pa.Array], tokens: pa.Array, execution: Execution | None) -> pa.Array:
        """For each key a list of its rows (or its row, or null), as structs; a key with a null has none.

        `tokens`: the version each row is to be answered from, as `issue_token` gave it. Raises NonUniqueKeyError for
        a second row where there may be one, and what looking up raises, but with `lookup.on-error=NULL`.
        """
        different = tokens.dictionary_encode()
        if len(different.dictionary) == 1:
            return self._answers(keys, different.dictionary[0].as_py(), execution)
        parts, places = [], []
        for number, value in enumerate(different.dictionary.to_pylist()):
            chosen = np.flatnonzero(np.asarray(different.indices) == number)
            indices = as_indices(chosen)
            parts.append(self._answers([array.take(indices) for array in keys], value, execution))
            places.append(chosen)
        if not parts:
            return pa.nulls(0, self.type)
        return pa.concat_arrays(parts).take(as_indices(np.argsort(np.concatenate(places), kind="stable")))

    @property
    def type(self) -> pa.DataType:
        """The type of the answers."""
        row = pa.struct(self._fields)
        return pa.list_(pa.field("element", row)) if self._spec.many else row

    def publish(self) -> None:
        """Put this process's counters where others of the host find them."""
        self._engine.publish_metrics()

    def _answers(self, keys: Sequence[pa.Array], token: bytes, execution: Execution | None) -> pa.Array:
        times = keys[-1] if self._validity is not None else None
        table = pa.Table.from_arrays(list(keys[: len(self._spec.keys)]), names=list(self._spec.keys))
        if token.startswith(_FAILED):
            known = np.zeros(table.num_rows, np.bool_)
            return self._fail(table, times, self._nothing(), known, token[len(_FAILED) :].decode(errors="replace"))
        at: _At | None = None
        try:
            with self._engine.measure("lookupTime"):
                at = self._at(token, execution)
                reader = self._engine.reader
                reader.resolver.count_served(at.plan.table, at.resolution.version)
                found, resolution = get_many_at(reader, at.plan, table, at.names, execution, at.resolution, at.snapshot)
            self._follow(at, resolution, execution)
        except _CAUGHT as problem:
            if self._options.on_error is OnError.FAIL:
                raise
            where = redact("path", self._options.path)
            log_event(_log, logging.WARNING, "lookup-failed", table=where, keys=table.num_rows, error=_message(problem))
            return self._fail(table, times, *self._get_held(at, table), _message(problem))
        return self._shape(table, times, found, None)

    def _nothing(self) -> pa.Table:
        return self._spec.columns.append(pa.field(KEY_INDEX, pa.int64())).empty_table()

    def _get_held(self, at: _At | None, table: pa.Table) -> tuple[pa.Table, Numbers]:
        """What can be answered without the store."""
        with contextlib.suppress(*_CAUGHT):  # it may be asked for the bounds of a version's files
            if at is not None:
                return get_held_at(self._engine.reader, at.plan, table, at.names, at.resolution.version)
        return self._nothing(), np.zeros(table.num_rows, np.bool_)

    def _follow(self, at: _At, resolution: Resolution, execution: Execution | None) -> None:
        """Go on with the version that took the place of one that is gone: what is cached of that is not to be mixed in."""
        if resolution.version.digest != at.resolution.version.digest:
            with self._lock:
                at.resolution = dataclasses.replace(resolution, decided_here=False)
                at.agreed, at.execution = False, execution

    def _at(self, token: bytes, execution: Execution | None) -> _At:
        with self._lock:
            at = self._versions.get(token)
            if at is None or (not at.agreed and at.execution != execution):
                at = self._versions[token] = self._open(token, execution)
                while len(self._versions) > _VERSIONS_AT_MOST:
                    self._versions.popitem(last=False)
            elif at.snapshot is None:  # the first batch has waited for it
                at.snapshot = self._snapshot(at.plan, at.resolution, wait_s=0.0)
            return at

    def _open(self, token: bytes, execution: Execution | None) -> _At:
        reader = self._engine.reader
        version_token = VersionToken.of_bytes(token)
        found = table_of_token(reader, self._options, version_token, execution)
        everything = all_columns((found.data, found.partitions))
        names = resolve_names(self._options.keys or (), everything, "lookup.keys")
        plan = planner.plan_read(found, self._options, self._spec.columns, runtime().clock)
        resolution = Resolution(found.version, decided_here=False)
        agreed = found.version.digest == version_token.digest
        return _At(plan, names, resolution, self._snapshot(plan, resolution), execution, agreed)

    def _snapshot(self, plan: ReadPlan, resolution: Resolution, wait_s: float | None = None) -> Snapshot | None:
        reader = self._engine.reader
        full = reader.fulls.of(plan.table, self._options)
        if full is None:
            return None
        if self._options.metadata_source is MetadataSource.CACHE and full.find(resolution.version) is None:
            full.current()  # the first load of a host that did not resolve
        return reader.snapshots.covering(
            plan, reader.snapshots.of(plan.table, self._options, resolution.version, wait_s)
        )

    # --- the answer's form ------------------------------------------------------------------------

    def _fail(self, keys: pa.Table, times: pa.Array | None, found: pa.Table, known: Numbers, message: str) -> pa.Array:
        """The answer where only the `known` keys have one: the others get a row that says why, unless they have a null."""
        valid = np.ones(keys.num_rows, np.bool_)
        for column in keys.columns:
            if column.null_count:
                valid &= bits_of(one_array(column.is_valid()))
        unknown = np.flatnonzero(valid & ~known)
        return self._shape(keys, times, found, (unknown, message))

    def _shape(
        self, keys: pa.Table, times: pa.Array | None, found: pa.Table, failed: tuple[Numbers, str] | None
    ) -> pa.Array:
        if self._validity is not None and times is not None:
            found = valid_rows(found, keys, times, self._validity)
        count = keys.num_rows
        numbers = np.asarray(one_array(found.column(KEY_INDEX)))
        columns = [one_array(found.column(name)) for name in self._spec.columns.names[: len(self._spec.names)]]
        rows = found.num_rows
        if self._options.on_error is OnError.NULL:
            columns.append(pa.nulls(rows, pa.string()))
        if self._spec.marked:
            columns.append(_repeat(True, rows))
        if failed is not None and len(failed[0]):
            extra, message = failed
            columns = [pa.concat_arrays([column, pa.nulls(len(extra), column.type)]) for column in columns]
            place = len(self._spec.names)
            said = pa.concat_arrays([pa.nulls(rows, pa.string()), pa.array([message] * len(extra), pa.string())])
            columns[place] = said
            numbers = np.concatenate([numbers, extra])
            order = np.argsort(numbers, kind="stable")
            columns = [column.take(as_indices(order)) for column in columns]
            numbers = numbers[order]
        structs = _structs(columns, self._fields, len(numbers))
        counts = np.bincount(numbers, minlength=count)
        if self._spec.many:
            offsets = np.zeros(count + 1, np.int32)
            np.cumsum(counts, out=offsets[1:])
            return pa.ListArray.from_arrays(pa.array(offsets), structs, type=self.type)
        if len(counts) and counts.max() > 1:
            raise self._not_unique(keys, int(np.argmax(counts > 1)), int(counts.max()))
        if len(numbers) == count:
            return structs
        places = np.cumsum(counts) - 1
        return structs.take(pa.array(places, mask=counts == 0))

    def _not_unique(self, keys: pa.Table, row: int, most: int) -> NonUniqueKeyError:
        key = ", ".join(f"{name} = {keys.column(name)[row].as_py()!r}" for name in keys.column_names)
        return NonUniqueKeyError(
            f"the table has several rows (up to {most}) for one key, here {key}: register the function with multi=True, "
            "which returns an array, or use lookup_join"
        )


def _structs(columns: Sequence[pa.Array], fields: Sequence[pa.Field], rows: int) -> pa.StructArray:
    if not columns:  # Arrow would not know how many
        return pa.array([{}] * rows, pa.struct([]))
    return pa.StructArray.from_arrays(list(columns), fields=list(fields))


def _repeat(value: bool, rows: int) -> pa.Array:
    return pc.fill_null(pa.nulls(rows, pa.bool_()), value)


def _message(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}"


@functools.lru_cache(maxsize=64)
def _lookup(text: str, session: tuple[tuple[str, str], ...], pid: int) -> Lookup:
    return Lookup(LookupSpec.of_text(text), dict(session))


def lookup_of(text: str, session: Mapping[str, str]) -> Lookup:
    """This process's lookup of a spec, under what the session sets of a host's options."""
    return _lookup(text, tuple(sorted(session.items())), os.getpid())


@functools.lru_cache(maxsize=64)
def parse_options(text: str) -> LookupOptions:
    """The options of a table from JSON, over this host's conf file."""
    return LookupOptions.parse(json.loads(text), conf=conf_file_options())
