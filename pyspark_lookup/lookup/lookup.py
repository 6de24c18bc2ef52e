"""Looks up the rows of a batch of keys, in a snapshot, in the partial cache or in the files; and reads rows for a `LookupTable`.

The result of a lookup has a row for each match, with the planned columns (keys first), and `key_index`: the position of the matching key in the
batch, ascending. Rows of one key come in file order. A key with a null matches nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.cache.full.loader import Layout
from pyspark_lookup.cache.full.snapshot import Snapshot, plan_columns
from pyspark_lookup.cache.memory import KEY_INDEX
from pyspark_lookup.cache.partial import castable_keys
from pyspark_lookup.cache.partial.host_cache import Freshness
from pyspark_lookup.cache.partial.read_through import PartialCache
from pyspark_lookup.columnar.keys import (
    SEED,
    Keys,
    Numbers,
    OneKey,
    as_array,
    as_bools,
    as_indices,
    cast_keys,
    distinct_keys,
    key_numbers,
    make_key_parser,
    match_rows,
    no_rows,
    one_array,
    take_matches,
    take_requested,
)
from pyspark_lookup.columnar.predicate import Among, And, Predicate, evaluate
from pyspark_lookup.columnar.python_values import KeyMaker, KeysLike, as_array_of_values, as_key_table, as_python
from pyspark_lookup.columnar.sql_predicate import parse_where
from pyspark_lookup.columnar.types import cast_exactly, resolve_names, spark_type
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.core.log_events import log_event
from pyspark_lookup.errors import (
    LookupFunctionError,
    OptionError,
    OverlapError,
    PredicateError,
    PysparkLookupError,
    SchemaError,
)
from pyspark_lookup.lookup import planner
from pyspark_lookup.lookup.planner import requested_keys
from pyspark_lookup.lookup.range_match import (
    Match,
    MatchedRanges,
    MatchKind,
    RangeMatcher,
    check_match_types,
    matching_rows,
    named_columns,
    stored_options,
)
from pyspark_lookup.lookup.read import ReadPlan, ReadTask, ResolvedTable, TableReader
from pyspark_lookup.lookup.runtime import Engine
from pyspark_lookup.lookup.snapshot_ranges import SnapshotRanges
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.enums import CacheMode
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.scan.formats import BATCH_ROWS
from pyspark_lookup.scan.table_scan import all_columns, coalesce, collect_table, to_slices
from pyspark_lookup.storage.disk import key_of
from pyspark_lookup.versions.executions import Execution, Resolution, read_with_restarts
from pyspark_lookup.versions.model import TableVersion, select_partitions

_log = logging.getLogger("pyspark_lookup.lookup")
_KEY_INDEX = pa.field(KEY_INDEX, pa.int64(), nullable=False)


def get_many(
    reader: TableReader,
    plan: ReadPlan,
    keys: pa.Table,
    names: Sequence[str],
    execution: Execution | None,
    version: TableVersion | None = None,
) -> pa.Table:
    """The rows that have any of `keys` in the columns `names`, all from one version.

    `version`: the current version, if the caller has just resolved it. Raises SchemaError if the keys do not fit the columns' types, and the
    errors of `TableReader.read`.
    """
    resolution, snapshot = reader.snapshots.resolve(plan, execution, version)
    return get_many_from_version(reader, plan, keys, names, execution, resolution, snapshot)[0]


def get_many_from_version(
    reader: TableReader,
    plan: ReadPlan,
    keys: pa.Table,
    names: Sequence[str],
    execution: Execution | None,
    resolution: Resolution,
    snapshot: Snapshot | None,
) -> tuple[pa.Table, Resolution]:
    """(the rows of a resolved version that have any of `keys`, the version from which they were read). Reads `snapshot`, if one is given.

    If a file of the version was gone, and `lookup.on-version-gone` allows it, the rows are from a newer version.
    """
    if KEY_INDEX in plan.projection.columns.names:
        raise SchemaError(
            f"the table's column {KEY_INDEX!r} has the same name as the column that a lookup adds to its rows: leave it out with lookup.columns"
        )
    fields = _key_fields(plan, names)
    schema = plan.projection.columns.append(_KEY_INDEX)
    if snapshot is not None:
        reader.metrics.inc("hitCount", _count_known(Keys(cast_keys(keys, fields))))
        batches = [
            batch
            for start in range(0, max(keys.num_rows, 1), BATCH_ROWS)
            for batch in _from_snapshot(plan, snapshot, keys.slice(start, BATCH_ROWS), fields, start, schema)
        ]
        return pa.Table.from_batches(batches, schema), resolution
    read = functools.partial(_from_store, reader, plan, keys, fields, schema)
    return _read_version(reader, plan, execution, resolution, read)


def read_all_from_version(
    reader: TableReader, plan: ReadPlan, execution: Execution | None, resolution: Resolution, snapshot: Snapshot | None
) -> tuple[pa.Table, Resolution]:
    """(all rows of a resolved version, the version from which they were read), as in `get_many_from_version`."""
    columns, url = plan.projection.columns, plan.table.url
    if snapshot is not None:
        batches = reader.snapshots.batches(plan, snapshot, resolution.version, None)
        return collect_table(batches, columns, url), resolution
    if not reader.versions.reads_all_rows:
        raise OptionError(
            f"{plan.options.place} returns rows by key only: give keys as well, or, if the provider is your own, make its "
            "factory return a provider with a scan"
        )

    def read(version: TableVersion) -> pa.Table:
        return collect_table(reader.versions.read_files(plan, version), columns, url)

    return _read_version(reader, plan, execution, resolution, read)


@dataclasses.dataclass(frozen=True)
class AllRows:
    """All rows of a version, with a `matcher` that finds the rows that match values of the type `kind`. `resolution`: names the version."""

    kind: pa.DataType
    rows: pa.Table
    matcher: RangeMatcher
    resolution: Resolution
    plan: ReadPlan

    def find(self, values: pa.Array) -> pa.Table:
        """The rows that match each value, with `KEY_INDEX`. Raises OverlapError for two rows that match a value, if `lookup.overlap` is ERROR."""
        with _naming_table(self.plan):
            numbers, places = self.matcher.find(values)
        return self.rows.take(as_indices(places)).append_column(_KEY_INDEX, as_array(numbers))


def match_all(
    reader: TableReader,
    plan: ReadPlan,
    match: Match,
    kind: pa.DataType,
    execution: Execution | None,
    resolution: Resolution,
    snapshot: Snapshot | None,
) -> AllRows:
    """All rows of a resolved version, to be matched with values of the type `kind`. The plan has the columns of the match."""
    if plan.options.cache.mode is CacheMode.PARTIAL:
        raise OptionError(
            f"option lookup.cache = 'PARTIAL' caches rows by key, and a lookup with only the argument {match.kind.value} has no key: set lookup.cache = FULL, or give keys as well"
        )
    rows, resolution = read_all_from_version(reader, plan, execution, resolution, snapshot)
    rows = rows.combine_chunks()
    columns = [one_array(rows.column(name)) for name in match.columns]

    def name_row(row: int) -> str:
        values = [column[row] for column in columns]
        place = find_row(reader, plan, resolution.version, match.columns, values)
        return place or redact("path", plan.table.url)

    matched = MatchedRanges(match, columns, kind, name_row)
    _count_unmatched(reader, matched)
    _log_unmatched(plan, resolution.version, matched)
    return AllRows(kind, rows, RangeMatcher(match, matched), resolution, plan)


@contextlib.contextmanager
def _naming_table(plan: ReadPlan) -> Iterator[None]:
    """A context in which an OverlapError names the table."""
    try:
        yield
    except OverlapError as problem:
        raise OverlapError(f"{plan.options.place}: {problem}") from None


class LastRanges:
    """Keeps the `SnapshotRanges` (index of ranges) of the last snapshot in which rows were looked up, for the next lookup.

    When the full cache of the table makes a new snapshot in this process, its index is built before lookups see it.
    """

    def __init__(self) -> None:
        # (the snapshot, the type of the values, the index): threads read and replace them together.
        self._last: tuple[Snapshot | None, pa.DataType | None, SnapshotRanges | None] = None, None, None
        self._index: Callable[[Snapshot], SnapshotRanges] | None = None

    def build_index(self, snapshot: Snapshot) -> None:
        """Build the index of a snapshot as for the last lookup, and store it beside the snapshot."""
        if self._index is not None:
            self._index(snapshot)

    def get(
        self, reader: TableReader, plan: ReadPlan, match: Match, kind: pa.DataType, snapshot: Snapshot, has_keys: bool
    ) -> SnapshotRanges | None:
        """The index by which to find rows of a snapshot by values of the type `kind`, and by the snapshot's keys if `has_keys`.

        None: a value of the table does not fit the type in the plan. Then the rows are compared one by one, so that only lookups that read this
        value fail.
        """
        last_snapshot, last_kind, index = self._last
        if last_snapshot is not snapshot or last_kind != kind:
            full, index = reader.fulls.get_cache(plan.table, plan.options), None
            derived = None if full is None else full.derived

            def index_ranges(snapshot: Snapshot) -> SnapshotRanges:
                return SnapshotRanges(snapshot, plan, match, kind, has_keys, derived)

            if full is not None:
                self._index = index_ranges
                full.add_index_builder(self)
            with contextlib.suppress(SchemaError):
                index = index_ranges(snapshot)
                _count_unmatched(reader, index)
                _log_unmatched(plan, snapshot.version, index)
            self._last = snapshot, kind, index
        return index


def match_indexed(
    reader: TableReader,
    plan: ReadPlan,
    index: SnapshotRanges | None,
    names: Sequence[str],
    keys: pa.Table | None,
    values: pa.Array,
    answer: Sequence[str],
) -> pa.Table | None:
    """For each value, the rows that match it and have its key, found by `index`: their columns `answer`, and `KEY_INDEX`.

    `keys`: for each value its key, in the key columns `names`; None: rows of any key. Returns None if there is no index, or if the lookup has
    to fail: the caller then compares the rows one by one, which raises the error.
    """
    if index is None or KEY_INDEX in plan.projection.columns.names:
        return None
    fields, arrays = [], []
    if keys is not None:
        fields = [index.snapshot.schema.field(name) for name in names]
        arrays = cast_keys(keys, fields)
    matches = index.find(arrays, values)
    if matches is None:
        return None
    reader.metrics.inc("hitCount", _count_known(Keys(arrays)) if arrays else len(values) - values.null_count)
    return rows_of_snapshot(plan, index.snapshot, answer, fields, arrays, *matches)


def match_keyed(
    reader: TableReader,
    plan: ReadPlan,
    match: Match,
    rows: pa.Table,
    keys: pa.Table,
    values: pa.Array,
    places: Numbers | None,
    version: TableVersion,
) -> pa.Table:
    """The `rows` of some keys, without those that do not match the value of their key (see `matching_rows`). The plan has the columns of the match."""
    locate = functools.partial(find_row, reader, plan, version, match.columns)
    with _naming_table(plan):
        return matching_rows(rows, keys, values, match, places, locate, functools.partial(_count_unmatched, reader))


def _count_unmatched(reader: TableReader, matched: MatchedRanges | SnapshotRanges) -> None:
    """Count the rows that match nothing because their range is empty, or because their network cannot be read."""
    reader.metrics.inc("rangeEmptyCount", matched.empty)
    reader.metrics.inc("networkSkippedCount", matched.skipped)


def _log_unmatched(plan: ReadPlan, version: TableVersion, matched: MatchedRanges | SnapshotRanges) -> None:
    """Log how many rows of a version match nothing, if any."""
    if matched.empty or matched.skipped:
        where, counts = redact("path", plan.table.url), {"empty": matched.empty, "skipped": matched.skipped}
        log_event(_log, logging.WARNING, "rows-match-nothing", table=where, version=version.digest, **counts)


def find_row(
    reader: TableReader, plan: ReadPlan, version: TableVersion, names: Sequence[str], values: Sequence[pa.Scalar]
) -> str | None:
    """The file in which a row has these values, and the row's number there, for errors; None if no file has it any more, and for a provider that
    returns rows by key only."""
    if not reader.versions.reads_all_rows:
        return None
    columns = pa.schema([plan.projection.columns.field(name) for name in names])
    projection = dataclasses.replace(plan.projection, columns=columns, predicate=None)
    with contextlib.suppress(PysparkLookupError):  # the file may be gone
        for file in select_partitions(plan.table, version, plan.options):
            number = 1
            for batch in reader.versions.prepare(plan.table, version, to_slices([file]), projection).batches():
                same = [
                    as_bools(pc.fill_null(pc.equal(*pair), False)) for pair in zip(batch.columns, values, strict=True)
                ]
                is_row = np.logical_and.reduce(same)
                if is_row.any():
                    return f"{redact('path', file.url)}, row {number + int(np.argmax(is_row)):,}"
                number += batch.num_rows
    return None


def _read_version(
    reader: TableReader,
    plan: ReadPlan,
    execution: Execution | None,
    resolution: Resolution,
    read: Callable[[TableVersion], pa.Table],
) -> tuple[pa.Table, Resolution]:
    """(what `read` returns for a resolved version, this version). If a file of it is gone, both are of the version that replaces it."""
    if plan.table.fails_when_gone(plan.options):  # other tasks may read this version, so it must not be replaced here
        resolution = resolution._replace(decided_here=False)
    rows, version = read_with_restarts(
        plan.table,
        resolution.version,
        read,
        lambda gone, change: reader.replace(plan, Resolution(gone, resolution.decided_here), execution, change),
    )
    return rows, Resolution(version, resolution.decided_here)


def _from_store(
    reader: TableReader,
    plan: ReadPlan,
    keys: pa.Table,
    fields: Sequence[pa.Field],
    schema: pa.Schema,
    version: TableVersion,
) -> pa.Table:
    """The result of a lookup without a snapshot. Raises SourceChangedError if a file of the version was replaced or removed."""
    if plan.options.cache.mode is CacheMode.PARTIAL:
        answer = _from_partial(reader, plan, keys, fields, version, schema)
        if answer is not None:
            return answer
    arrays = cast_keys(keys, fields)
    request_keys = Keys(arrays)
    if plan.options.cache.mode is CacheMode.FULL:
        reader.metrics.inc("missCount", _count_known(request_keys))
    if plan.options.cache.mode is not CacheMode.PARTIAL:
        return _get_uncached(reader, plan, arrays, fields, schema, version)
    # Count as the partial cache would: each distinct key is loaded once, and its repetitions are hits.
    different = len(distinct_keys(request_keys, request_keys.hashes(SEED))[0])
    reader.metrics.inc("missCount", different)
    reader.metrics.inc("hitCount", _count_known(request_keys) - different)
    try:
        rows = _get_uncached(reader, plan, arrays, fields, schema, version)
    except BaseException:
        reader.metrics.inc("numLoadFailures", different)
        raise
    reader.metrics.inc("loadCount", different)
    return rows


def _count_known(keys: Keys) -> int:
    """The number of keys without a null."""
    return keys.rows if keys.valid is None else int(np.count_nonzero(keys.valid))


def _key_fields(plan: ReadPlan, names: Sequence[str]) -> list[pa.Field]:
    """The key columns `names`, in the types in which they are read. They need not be among the columns of the result."""
    everything = all_columns((plan.projection.data, plan.projection.partitions))
    return [everything.field(name) for name in names]


def read_rows(
    reader: TableReader,
    plan: ReadPlan,
    task: ReadTask,
    execution: Execution | None,
    version: TableVersion | None = None,
) -> Iterator[pa.RecordBatch]:
    """The rows of a task, as from `TableReader.read`. If the plan limits the keys to a list (see `requested_keys`), they are looked up by key.

    Raises the errors of `TableReader.read` and `get_many`.
    """
    keys = requested_keys(plan)
    if keys is None or task.count > 1:
        return reader.read(plan, task, execution, version)
    everything = all_columns((plan.projection.data, plan.projection.partitions))
    names = resolve_names(plan.options.files.keys or (), everything, "lookup.keys")
    table = pa.Table.from_arrays(keys, names=names)
    order = as_indices(distinct_keys(Keys(keys), Keys(keys).hashes(SEED))[0])
    matches = get_many(reader, plan, table.take(order), names, execution, version)
    rows = matches.select(plan.projection.columns.names).cast(plan.projection.columns)
    return coalesce(rows.to_batches(), plan.projection.columns, reader.metrics)


def _from_snapshot(
    plan: ReadPlan, snapshot: Snapshot, keys: pa.Table, fields: Sequence[pa.Field], start: int, schema: pa.Schema
) -> list[pa.RecordBatch]:
    arrays = cast_keys(keys, [snapshot.schema.field(field.name) for field in fields])
    key_columns = _reusable_key_columns(fields, arrays)
    stored_names = [name for name in plan.needed_columns if name not in key_columns and name in snapshot.schema.names]
    try:
        answer = snapshot.get(stored_names, Keys(arrays))
    except pa.ArrowInvalid:
        if keys.num_rows <= 1:
            raise
        # A column of the rows takes more than the 2 GiB that one array can have.
        half = keys.num_rows // 2
        halves = (keys.slice(0, half), start), (keys.slice(half), start + half)
        return [batch for part, at in halves for batch in _from_snapshot(plan, snapshot, part, fields, at, schema)]
    return [
        _answer(plan, dict(zip(stored_names, answer.columns, strict=True)), key_columns, answer.keys, start, schema)
    ]


def rows_of_snapshot(
    plan: ReadPlan,
    snapshot: Snapshot,
    names: Sequence[str],
    fields: Sequence[pa.Field],
    keys: Sequence[pa.Array],
    numbers: Numbers,
    rows: Numbers,
) -> pa.Table:
    """The planned columns `names` of some rows of a snapshot, and `KEY_INDEX`.

    `rows`: the numbers of these rows in the snapshot. `numbers`: for each of them, the position of its key among the `keys`, whose columns are
    `fields`.
    """
    indices = as_indices(numbers)
    key_columns = {
        name: pc.take(array, indices, boundscheck=False)
        for name, array in _reusable_key_columns(fields, keys).items()
        if name in names
    }
    stored_names = [name for name in names if name not in key_columns and name in snapshot.schema.names]
    columns = dict(zip(stored_names, snapshot.take(stored_names, rows), strict=True)) | key_columns
    batch = plan_columns(columns, len(rows), names, plan.projection, plan.table.url)
    return pa.Table.from_arrays([*batch.columns, indices], schema=batch.schema.append(_KEY_INDEX))


@dataclasses.dataclass(frozen=True)
class _PartialRequest:
    """A request to the partial cache. `space`: the part of the cache for this table, its keys and the selected columns and partitions.

    `version`: the selected partitions of the version with the digest `whole_digest`. `arrays`: the keys, in the types `keys`. `value_schema`: the columns that the cache stores beside the keys. `key_columns`: the columns
    that the answer takes from the request.
    """

    space: str
    keys: pa.Schema
    arrays: list[pa.Array]
    value_schema: pa.Schema
    key_columns: Mapping[str, pa.Array]
    layout: Layout
    version: TableVersion
    whole_digest: str


def _make_request(
    reader: TableReader, plan: ReadPlan, keys: pa.Table, fields: Sequence[pa.Field], version: TableVersion
) -> _PartialRequest | None:
    """The request to the partial cache for some keys.

    None if rows in the cache lack a column that the plan needs, or if the identity of a file does not show each change.
    """
    if not version.cacheable:
        return None
    table, options = plan.table, plan.options
    layout = reader.versions.layout(table, options, version)
    if not set(plan.needed_columns) <= set(layout.columns.names):
        return None
    key_schema = pa.schema([layout.columns.field(field.name) for field in fields])
    arrays = cast_keys(keys, list(key_schema))
    key_columns = _reusable_key_columns(key_schema, arrays)
    value_schema = pa.schema([field for field in layout.columns if field.name not in key_columns])
    # The cache also stores rows for which the predicate is false, so that it can answer queries with another predicate.
    columns = None if options.read.columns is None else sorted(layout.columns.names)
    bound = (options.partial_cache.expire_after_write_s,) if reader.versions.dates_rows else ()
    space = key_of("partial", table.id, table.format, options.files.keys, columns, options.files.partition, *bound)
    selected_version = reader.versions.select(table, options, version)
    return _PartialRequest(
        space, key_schema, arrays, value_schema, key_columns, layout, selected_version, version.digest
    )


def _from_partial(
    reader: TableReader,
    plan: ReadPlan,
    keys: pa.Table,
    fields: Sequence[pa.Field],
    version: TableVersion,
    schema: pa.Schema,
) -> pa.Table | None:
    """The result of a lookup in the partial cache, which loads the keys that it lacks; None if the cache cannot store such rows."""
    request = _make_request(reader, plan, keys, fields, version)
    if request is None:
        return None

    def load(missing_keys: Sequence[pa.Array], ages_s: Numbers) -> pa.Table:
        missing_rows = reader.versions.rows_by_key(
            pa.Table.from_arrays(list(missing_keys), schema=request.keys), request.value_schema, ages_s
        )
        if missing_rows is not None:
            return missing_rows
        names = request.keys.names
        rows = reader.versions.rows_where(
            plan, request.layout, version, request.version.files, _key_predicate(names, missing_keys)
        )
        return take_matches(rows, match_rows(rows, names, Keys(missing_keys)), request.value_schema)

    cache, fresh = _partial_cache(reader, plan, request)
    try:
        rows = cache.lookup(request.arrays, fresh, load)
    except LookupFunctionError as problem:
        if problem.rows is not None:
            problem.rows = _partial_answer(plan, request, problem.rows, schema)
        raise
    return _partial_answer(plan, request, rows, schema)


def _partial_cache(reader: TableReader, plan: ReadPlan, request: _PartialRequest) -> tuple[PartialCache, Freshness]:
    key_bounds = functools.partial(reader.versions.key_bounds, plan.table, request.layout)

    def find_version(digest: str) -> TableVersion | None:
        version = reader.host.files(plan.table, digest)
        # The version may lack the partitions that the options select.
        with contextlib.suppress(PysparkLookupError):
            if version is not None:
                return reader.versions.select(plan.table, plan.options, version)
        return None

    return reader.partials.get_cache(
        plan.table,
        request.space,
        plan.options,
        request.keys,
        request.value_schema,
        request.version,
        key_bounds,
        find_version,
        request.whole_digest,
        reader.versions.changed_keys,
        functools.partial(reader.host.last_digest, plan.table),
    )


def _partial_answer(plan: ReadPlan, request: _PartialRequest, rows: pa.Table, schema: pa.Schema) -> pa.Table:
    value_columns = {name: one_array(rows.column(name)) for name in request.value_schema.names}
    return pa.Table.from_batches(
        [_answer(plan, value_columns, request.key_columns, key_numbers(rows), 0, schema)], schema
    )


def get_cached_rows(
    reader: TableReader, plan: ReadPlan, keys: pa.Table, names: Sequence[str], version: TableVersion
) -> tuple[pa.Table, Numbers]:
    """(the rows that the partial cache has for `keys`, for each key whether the cache knows its rows). Loads nothing.

    Unless `lookup.cache=PARTIAL`, no key is known.
    """
    schema = plan.projection.columns.append(_KEY_INDEX)
    fields = _key_fields(plan, names)
    request = (
        _make_request(reader, plan, keys, fields, version) if plan.options.cache.mode is CacheMode.PARTIAL else None
    )
    if request is None:
        return schema.empty_table(), np.zeros(keys.num_rows, np.bool_)
    cache, fresh = _partial_cache(reader, plan, request)
    rows, present = cache.get_held(request.arrays, fresh)
    return _partial_answer(plan, request, rows, schema), present


def _get_uncached(
    reader: TableReader,
    plan: ReadPlan,
    arrays: Sequence[pa.Array],
    fields: Sequence[pa.Field],
    schema: pa.Schema,
    version: TableVersion,
) -> pa.Table:
    """The result of a lookup in the files, or in a provider's table: the provider is asked for each distinct key once."""
    request_keys = Keys(arrays)
    names = [field.name for field in fields]
    if not reader.versions.looks_up_keys:
        key_predicate = _key_predicate(names, arrays)
        predicate = (
            key_predicate if plan.projection.predicate is None else And((plan.projection.predicate, key_predicate))
        )
        planned_columns = plan.projection.columns
        columns = pa.schema([*planned_columns, *(field for field in fields if field.name not in planned_columns.names)])
        projection = dataclasses.replace(plan.projection, columns=columns, predicate=predicate)
        read = reader.versions.read_files(dataclasses.replace(plan, projection=projection), version)
        return _join(collect_table(read, columns, plan.table.url), names, request_keys, schema)
    key_columns = _reusable_key_columns(fields, arrays)
    value_schema = pa.schema(
        [plan.projection.data.field(name) for name in plan.needed_columns if name not in key_columns]
    )
    distinct, places = distinct_keys(request_keys, request_keys.hashes(SEED))
    different = pa.Table.from_arrays([array.take(as_indices(distinct)) for array in arrays], schema=pa.schema(fields))

    def answer(rows: pa.Table) -> pa.Table:
        rows = take_requested(rows, places)
        value_columns = {name: one_array(rows.column(name)) for name in value_schema.names}
        return pa.Table.from_batches([_answer(plan, value_columns, key_columns, key_numbers(rows), 0, schema)], schema)

    if not len(distinct):
        return answer(no_rows(value_schema))
    try:
        rows = reader.versions.rows_by_key(different, value_schema)
    except LookupFunctionError as problem:
        if problem.rows is not None:
            failed_places = np.flatnonzero(np.isin(places, list(problem.failures)))
            problem.failures = {int(place): problem.failures[int(places[place])] for place in failed_places}
            problem.rows = answer(problem.rows)
        raise
    assert rows is not None
    return answer(rows)


def _reusable_key_columns(fields: Iterable[pa.Field], arrays: Sequence[pa.Array]) -> dict[str, pa.Array]:
    """The key columns whose values the result can take from the keys instead of the rows.

    Columns of floats are not among them: two zeros or two NaNs that are equal as keys may have different bits.
    """
    pairs = zip(fields, arrays, strict=True)
    return {field.name: array for field, array in pairs if not pa.types.is_floating(array.type)}


def _answer(
    plan: ReadPlan,
    value_columns: Mapping[str, pa.Array],
    key_columns: Mapping[str, pa.Array],
    numbers: Numbers,
    start: int,
    schema: pa.Schema,
) -> pa.RecordBatch:
    """The planned columns of some rows, without the rows for which the predicate is not true.

    `value_columns`: the columns of the rows as they are stored. `numbers`: for each row, the position of its key in `key_columns`. `start`: is
    added to these positions in the result.
    """
    projection = plan.projection
    names = plan.needed_columns
    indices = as_indices(numbers)
    repeated_keys = {
        name: pc.take(array, indices, boundscheck=False) for name, array in key_columns.items() if name in names
    }
    columns = {**value_columns, **repeated_keys}
    batch = plan_columns(columns, len(numbers), names, projection, plan.table.url)
    places = indices if not start else as_indices(numbers + start)
    if projection.predicate is not None:
        mask = evaluate(projection.predicate, dict(zip(names, batch.columns, strict=True)), batch.num_rows)
        batch, places = batch.filter(mask), places.filter(mask)
    columns_out = [batch.column(name) for name in projection.columns.names]
    return pa.RecordBatch.from_arrays([*columns_out, places], schema=schema)


def _key_predicate(names: Sequence[str], keys: Sequence[pa.Array]) -> Predicate:
    """A predicate that is true for each row with one of the keys. By it, a scan skips files and row groups without such rows."""
    parts = tuple(Among(name, pc.unique(array).drop_null()) for name, array in zip(names, keys, strict=True))
    return parts[0] if len(parts) == 1 else And(parts)


def _join(rows: pa.Table, names: Sequence[str], keys: Keys, schema: pa.Schema) -> pa.Table:
    """The rows of a scan that have one of `keys`, each repeated for each key that it has. `names`: their key columns."""
    matches = match_rows(rows, names, keys)
    answer = rows.select(schema.names[:-1]).take(as_indices(matches.rows))
    columns = [*answer.columns, pa.chunked_array([as_indices(matches.keys)])]
    return pa.Table.from_arrays(columns, schema=schema)


# --- queries of a LookupTable ---------------------------------------------------------------------


def scan(
    engine: Engine,
    resolved_table: ResolvedTable,
    options: LookupOptions,
    columns: Sequence[str] | None,
    predicate: str | None,
    clock: HostClock,
) -> pa.Table:
    """The rows of a version for which `lookup.where` and `predicate` are true, with the columns `columns` (None: all)."""
    schema, batches = scan_batches(engine, resolved_table, options, columns, predicate, clock)
    return collect_table(batches, schema, resolved_table.table.url)


def scan_batches(
    engine: Engine,
    resolved_table: ResolvedTable,
    options: LookupOptions,
    columns: Sequence[str] | None,
    predicate: str | None,
    clock: HostClock,
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """(the columns of `scan`, its rows, which are read as the iterator advances)."""
    overrides: dict[str, str] = {}
    check_columns(columns)
    if columns is not None:
        overrides["lookup.columns"] = ",".join("`" + name.replace("`", "``") + "`" for name in columns)
    selected_columns = planner.table_columns(resolved_table, options.override(overrides))
    # The two predicates are parsed separately: in a joined text, parentheses in one of them could change the meaning of the other.
    everything = all_columns((resolved_table.data, resolved_table.partitions))
    with naming("predicate"):
        predicates = [] if predicate is None else [parse_where(predicate, everything)]
    plan = planner.plan_read(resolved_table, options, selected_columns, clock, predicates)
    planner.reads_by_key(engine.reader, plan)  # raises an error that says how to read a provider's rows
    batches = read_rows(engine.reader, plan, ReadTask(0, 1), None, resolved_table.version)
    return plan.projection.columns, batches


def check_columns(columns: Sequence[str] | None) -> None:
    """Raise SchemaError if `columns` is not a list of names."""
    if columns is None:
        return
    is_collection = isinstance(columns, Collection) and not isinstance(columns, str)
    if not is_collection or not columns or not all(isinstance(name, str) for name in columns):
        example = [columns if isinstance(columns, str) and columns else "name"]
        raise SchemaError(f"argument columns = {columns!r}: give a list of names, such as {example!r}")


@contextlib.contextmanager
def naming(argument: str) -> Iterator[None]:
    """A context in which errors of a predicate name the argument `argument` instead of the option lookup.where."""
    try:
        yield
    except PredicateError as problem:
        raise PredicateError(str(problem).replace("option lookup.where", f"argument {argument}", 1)) from None


@dataclasses.dataclass
class KeyedRead:
    """How rows of a resolved table are read by key. `names`: the key columns, which are among the columns of `plan`.

    `direct`: the last snapshot for which `is_direct` returned True. `parse_key`: makes a key of a Python value.
    """

    names: tuple[str, ...]
    plan: ReadPlan
    direct: Snapshot | None = None
    parse_key: Callable[[object], OneKey | None] | None = None

    @cached_property
    def columns(self) -> list[str]:
        """The columns of the result."""
        return list(self.plan.projection.columns.names)

    def is_direct(self, snapshot: Snapshot) -> bool:
        """Whether values of a snapshot can be returned unchanged: the columns have the planned types, and there is one key column and no predicate."""
        if self.direct is not snapshot:
            projection, stored_schema = self.plan.projection, snapshot.schema
            fields = [stored_schema.field(name) for name in projection.columns.names if name in stored_schema.names]
            has_same_types = [field.type for field in fields] == projection.columns.types
            if (
                projection.predicate is not None
                or not has_same_types
                or len(self.names) > 1
                or KEY_INDEX in self.columns
            ):
                return False
            self.parse_key = make_key_parser(stored_schema.field(self.names[0]).type)
            self.direct = snapshot  # set last, because other threads test it first
        return True


def plan_keyed(resolved_table: ResolvedTable, options: LookupOptions, clock: HostClock) -> KeyedRead:
    """The `KeyedRead` of a resolved table, with its key columns first. Raises OptionError without `lookup.keys`."""
    named_keys = key_names(options)
    table_columns = planner.table_columns(resolved_table, options)
    everything = all_columns((resolved_table.data, resolved_table.partitions))
    names = resolve_names(named_keys, everything, "lookup.keys")
    columns = pa.schema(
        [*(everything.field(name) for name in names), *(field for field in table_columns if field.name not in names)]
    )
    return KeyedRead(tuple(names), planner.plan_read(resolved_table, options, columns, clock))


@dataclasses.dataclass
class MatchedRead:
    """How rows of a resolved table that match values are read. `names`: the columns with equality keys, if there are any. `columns`: the columns of the
    answer. `all_rows`: without keys, the rows of the last version that was read, if they are fixed (`TableReader.has_fixed_rows`)."""

    names: tuple[str, ...]
    plan: ReadPlan
    match: Match
    columns: list[str]
    all_rows: AllRows | None = None
    ranges: LastRanges = dataclasses.field(default_factory=LastRanges)


def match_columns(
    engine: Engine, resolved_table: ResolvedTable, options: LookupOptions, kind: MatchKind
) -> tuple[LookupOptions, Match]:
    """(the options, the match of the given kind that they describe). If the options name no columns for the match, they are completed by the
    options that the table's own properties store."""
    if not named_columns(kind, options.read):
        details = engine.reader.kinds.source(resolved_table.table).details(resolved_table.table, resolved_table.version)
        stored = stored_options(details.get("properties", {}))
        options = options.override({key: text for key, text in stored.items() if key not in options.explicit})
    names = named_columns(kind, options.read)
    if not names:
        raise OptionError(
            f"option {kind.option} is missing: it names the columns of the table that argument {kind.value} needs, such as "
            f"LookupTable(path, {{{kind.option!r}: {_EXAMPLES[kind]!r}}})"
        )
    everything = all_columns((resolved_table.data, resolved_table.partitions))
    names = tuple(resolve_names(names, everything, kind.option))
    check_match_types(kind, pa.schema([everything.field(name) for name in names]), f"option {kind.option}")
    return options, Match.from_options(kind, names, options.read)


_EXAMPLES = {
    MatchKind.AS_OF: "valid_from",
    MatchKind.BETWEEN: "low..high",
    MatchKind.CIDR: "network",
    MatchKind.STARTS_WITH: "dial_code",
}


def plan_matched(
    resolved_table: ResolvedTable, options: LookupOptions, match: Match, has_keys: bool, clock: HostClock
) -> MatchedRead:
    """A `MatchedRead` of a resolved table. Its keys are those of `lookup.keys` that are not columns of the match. Raises OptionError if keys are
    given, and there is no such column."""
    everything = all_columns((resolved_table.data, resolved_table.partitions))
    answer = list(planner.table_columns(resolved_table, options).names)
    names: tuple[str, ...] = ()
    if has_keys:
        all_names = resolve_names(key_names(options), everything, "lookup.keys")
        names = tuple(name for name in all_names if name not in match.columns)
        if not names:
            raise OptionError(
                f"option lookup.keys = {','.join(all_names)!r} names only columns that argument {match.kind.value} compares: look up without a key, "
                "or name other key columns"
            )
        options = options.with_values({"lookup.keys": names})
        answer = [*names, *(name for name in answer if name not in names)]
    columns = tuple(dict.fromkeys((*answer, *match.columns)))
    if options.read.columns is not None:  # a snapshot is to have the columns of the match, too
        options = options.with_values({"lookup.columns": columns})
    fields = [everything.field(name) for name in columns]
    return MatchedRead(names, planner.plan_read(resolved_table, options, pa.schema(fields), clock), match, answer)


def rows_of_values(
    reader: TableReader, read: MatchedRead, keys: pa.Table | None, values: pa.Array, version: TableVersion
) -> pa.Table:
    """The rows of a version that have one of the `keys` (None: any) and match the value at the same place: the columns, `key_index`."""
    match, plan = read.match, read.plan
    field = plan.projection.columns.field(match.columns[0])
    values = match.cast_values(field, pa.nulls(len(values), field.type) if pa.types.is_null(values.type) else values)
    resolution, snapshot = reader.snapshots.resolve(plan, None, version)
    if snapshot is not None:
        index = read.ranges.get(reader, plan, match, values.type, snapshot, keys is not None)
        matches = match_indexed(reader, plan, index, read.names, keys, values, read.columns)
        if matches is not None:
            return matches
    if keys is None:
        last = read.all_rows
        if last is None or last.kind != values.type or last.resolution.version.digest != resolution.version.digest:
            last = match_all(reader, plan, match, values.type, None, resolution, snapshot)
            read.all_rows = last if reader.has_fixed_rows(plan.table, last.resolution.version) else None
        is_known = "missCount" if snapshot is None else "hitCount"
        reader.metrics.inc(is_known, len(values) - values.null_count)
        return last.find(values).select([*read.columns, KEY_INDEX])
    arrays = cast_keys(keys, _key_fields(plan, read.names))
    request_keys = Keys(arrays)
    distinct, places = distinct_keys(request_keys, request_keys.hashes(SEED))
    different = pa.Table.from_arrays([array.take(as_indices(distinct)) for array in arrays], names=list(read.names))
    rows, resolution = get_many_from_version(reader, plan, different, read.names, None, resolution, snapshot)
    matches = match_keyed(reader, plan, match, rows, different, values, places, resolution.version)
    return matches.select([*read.columns, KEY_INDEX])


def get_rows(
    reader: TableReader, read: KeyedRead, key: Any, version: TableVersion, snapshot: Snapshot | None
) -> list[dict[str, Any]]:
    """The rows of a version with one key: a value, a tuple in the order of `lookup.keys`, or a dictionary by the names of the key columns.

    `snapshot`: the version's snapshot, if the caller has it.
    """
    resolution, covering_snapshot = _resolve(reader, read, version, snapshot)
    rows = None if covering_snapshot is None else _rows_direct(reader, read, key, covering_snapshot)
    if rows is None:
        keys = as_key_table([key], key_names(read.plan.options))
        matches = get_many_from_version(reader, read.plan, keys, read.names, None, resolution, covering_snapshot)[0]
        rows = as_python(matches.drop_columns([KEY_INDEX]))
    return rows


def _rows_direct(reader: TableReader, read: KeyedRead, key: Any, snapshot: Snapshot) -> list[dict[str, Any]] | None:
    """The rows of one key, read from the snapshot value by value, which is faster than by an Arrow table.

    None if the key or a column does not allow this.
    """
    if not read.is_direct(snapshot) or read.parse_key is None:
        return None
    lookup_key = read.parse_key(key)
    if lookup_key is None:
        return None
    try:
        rows = snapshot.get_one(read.columns, lookup_key)
    except (OverflowError, ValueError):
        # No Python type can hold one of the values. The read by an Arrow table raises an error that names its column.
        return None
    reader.metrics.inc("hitCount")
    return rows


def rows_of_keys(
    reader: TableReader, read: KeyedRead, keys: pa.Table, version: TableVersion, snapshot: Snapshot | None
) -> pa.Table:
    """The rows of a version with any of `keys`: the key columns, the other columns, and `key_index`.

    `snapshot`: the version's snapshot, if the caller has it.
    """
    return get_many_from_version(reader, read.plan, keys, read.names, None, *_resolve(reader, read, version, snapshot))[
        0
    ]


def _resolve(
    reader: TableReader, read: KeyedRead, version: TableVersion, snapshot: Snapshot | None
) -> tuple[Resolution, Snapshot | None]:
    if snapshot is None:
        return reader.snapshots.resolve(read.plan, None, version)
    return Resolution(version, True), reader.snapshots.covering(read.plan, snapshot)


def forget_keys(
    engine: Engine, resolved_table: ResolvedTable, options: LookupOptions, keys: KeysLike | KeyMaker
) -> None:
    """Drop the rows of `keys` from this host's partial caches. Raises the errors of `LookupTable.invalidate`."""
    if options.cache.mode is CacheMode.FULL:
        raise OptionError(
            "option lookup.cache = 'FULL': a snapshot has all rows of one version, so single keys cannot be dropped: use reload()"
        )
    everything = all_columns((resolved_table.data, resolved_table.partitions))
    names = resolve_names(key_names(options), everything, "lookup.keys")
    arrays = castable_keys(table_of_keys(resolved_table, options, keys), [everything.field(name) for name in names])
    engine.reader.partials.invalidate(resolved_table.table, pa.Table.from_arrays(arrays, names=list(names)))


def values_to_match(kind: MatchKind, values: Any) -> pa.Array:
    """The values of an argument of `LookupTable.get_many`, as an array. Raises SchemaError for types that Spark does not have.

    Addresses for CIDR may also be objects of Python's `ipaddress`.
    """
    if isinstance(values, (str, bytes)):
        raise OptionError(
            f"argument {kind.value} = {values!r}: give a list or an array, with a value for each key; for one value use get()"
        )
    if kind is MatchKind.CIDR and isinstance(values, (list, tuple)):
        values = [str(value) if isinstance(value, (IPv4Address, IPv6Address)) else value for value in values]
    label, advice = f"values of argument {kind.value}", "give a list, an array or a Series of values of one type"
    column = as_array_of_values(values, label, advice)
    if isinstance(column, pa.ChunkedArray):
        column = one_array(column)
    try:
        return column if pa.types.is_null(column.type) else cast_exactly(column, spark_type(column.type))
    except pa.ArrowException as problem:
        raise SchemaError(f"argument {kind.value}: {problem}") from None


def table_of_keys(resolved_table: ResolvedTable, options: LookupOptions, keys: KeysLike | KeyMaker) -> pa.Table:
    """The keys as a table. `keys`: in any form that `LookupTable.get_many` takes. Raises the errors of `as_key_table`."""
    names = key_names(options)
    return keys(names, resolved_table.columns) if callable(keys) else as_key_table(keys, names)


def key_names(options: LookupOptions) -> tuple[str, ...]:
    """The key columns that `lookup.keys` names. Raises OptionError if it names none."""
    if not options.files.keys:
        raise OptionError("option lookup.keys is missing: it names the key columns, such as lookup.keys = id")
    return options.files.keys
