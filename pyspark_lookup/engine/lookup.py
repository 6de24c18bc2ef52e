"""Rows by key, for a whole batch of keys at once, from a snapshot or from the files.

Answers have the planned columns (keys first), one row per match, and `key_index`: the place of the
key it answers, ascending; rows of one key come in file order. A key with a null answers nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.base.errors import LookupFunctionError, SchemaError
from pyspark_lookup.cache.full.loader import Layout
from pyspark_lookup.cache.full.snapshot import Snapshot
from pyspark_lookup.cache.full.snapshot_scan import plan_columns
from pyspark_lookup.cache.memory import KEY_INDEX
from pyspark_lookup.cache.partial.host_segment import Freshness
from pyspark_lookup.cache.partial.read_through import PartialCache
from pyspark_lookup.columnar.key_rows import SEED, distinct_keys, key_numbers, match_rows, no_rows, rows_at, rows_for
from pyspark_lookup.columnar.keys import Keys, Numbers, as_indices, cast_keys, one_array
from pyspark_lookup.columnar.predicate import Among, And, Predicate, evaluate
from pyspark_lookup.columnar.types import resolve_names
from pyspark_lookup.engine.plan import ReadPlan, ReadTask
from pyspark_lookup.engine.planner import keys_of
from pyspark_lookup.engine.table_reader import TableReader
from pyspark_lookup.io.disk import key_of
from pyspark_lookup.options.enums import CacheMode
from pyspark_lookup.scan.contract import all_columns, coalesce, table_of
from pyspark_lookup.scan.formats import BATCH_ROWS
from pyspark_lookup.table.executions import Execution, Resolution
from pyspark_lookup.table.model import TableVersion
from pyspark_lookup.table.partitions import select_partitions
from pyspark_lookup.table.restarts import read_with_restarts


def get_many(
    reader: TableReader,
    plan: ReadPlan,
    keys: pa.Table,
    names: Sequence[str],
    execution: Execution | None,
    version: TableVersion | None = None,
) -> pa.Table:
    """The rows whose columns `names` have any of the values in `keys`; all from one version.

    `version`: the current one, if the caller has just resolved it. Raises SchemaError if the keys do not fit, and
    what reading raises.
    """
    resolution, snapshot = reader.snapshots.resolve(plan, execution, version)
    return get_many_at(reader, plan, keys, names, execution, resolution, snapshot)[0]


def get_many_at(
    reader: TableReader,
    plan: ReadPlan,
    keys: pa.Table,
    names: Sequence[str],
    execution: Execution | None,
    resolution: Resolution,
    snapshot: Snapshot | None,
) -> tuple[pa.Table, Resolution]:
    """The same of a version that is resolved already, from its snapshot if there is one; and the version it became.

    That is another one if a file was gone, and `lookup.on-version-gone` lets a newer one take its place.
    """
    if KEY_INDEX in plan.projection.columns.names:
        raise SchemaError(f"the table has a column {KEY_INDEX!r}, as the answer does: leave it out by lookup.columns")
    if plan.table.fails_when_gone(plan.options):  # others may have been told of this version
        resolution = dataclasses.replace(resolution, decided_here=False)
    fields = _key_fields(plan, names)
    schema = plan.projection.columns.append(pa.field(KEY_INDEX, pa.int64(), nullable=False))
    if snapshot is not None:
        reader.metrics.inc("hitCount", _count_known(Keys(cast_keys(keys, fields))))
        batches = [
            batch
            for start in range(0, max(keys.num_rows, 1), BATCH_ROWS)
            for batch in _from_snapshot(plan, snapshot, keys.slice(start, BATCH_ROWS), fields, start, schema)
        ]
        return pa.Table.from_batches(batches, schema), resolution
    rows, version = read_with_restarts(
        plan.table,
        resolution.version,
        functools.partial(_from_store, reader, plan, keys, fields, schema),
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
    """The answer without a snapshot. Raises SourceChangedError if a file is no longer in the version."""
    if plan.options.cache is CacheMode.PARTIAL:
        found = _from_partial(reader, plan, keys, fields, version, schema)
        if found is not None:
            return found
    arrays = cast_keys(keys, fields)
    probed = Keys(arrays)
    if plan.options.cache is CacheMode.FULL:
        reader.metrics.inc("missCount", _count_known(probed))
    if plan.options.cache is not CacheMode.PARTIAL:
        return _get_uncached(reader, plan, arrays, fields, schema, version)
    # As the cache counts: each different key is loaded once, and its repeats are hits.
    different = len(distinct_keys(probed, probed.hashes(SEED))[0])
    reader.metrics.inc("missCount", different)
    reader.metrics.inc("hitCount", _count_known(probed) - different)
    try:
        rows = _get_uncached(reader, plan, arrays, fields, schema, version)
    except BaseException:
        reader.metrics.inc("numLoadFailures", different)
        raise
    reader.metrics.inc("loadCount", different)
    return rows


def _count_known(keys: Keys) -> int:
    """How many keys have no null."""
    return keys.rows if keys.valid is None else int(np.count_nonzero(keys.valid))


def _key_fields(plan: ReadPlan, names: Sequence[str]) -> list[pa.Field]:
    """The key columns in the types in which they are read, whether or not they are part of the answer."""
    everything = all_columns((plan.projection.data, plan.projection.partitions))
    return [everything.field(name) for name in names]


def read_rows(
    reader: TableReader,
    plan: ReadPlan,
    task: ReadTask,
    execution: Execution | None,
    version: TableVersion | None = None,
) -> Iterator[pa.RecordBatch]:
    """The rows of a task as `TableReader.read` gives them; those of a plan that says which keys it wants, by key.

    Raises what `TableReader.read` and `get_many` raise.
    """
    keys = keys_of(plan)
    if keys is None or task.count > 1:
        return reader.read(plan, task, execution, version)
    everything = all_columns((plan.projection.data, plan.projection.partitions))
    names = resolve_names(plan.options.keys or (), everything, "lookup.keys")
    table = pa.Table.from_arrays(keys, names=names)
    order = as_indices(distinct_keys(Keys(keys), Keys(keys).hashes(SEED))[0])
    found = get_many(reader, plan, table.take(order), names, execution, version)
    rows = found.select(plan.projection.columns.names).cast(plan.projection.columns)
    return coalesce(rows.to_batches(), plan.projection.columns, reader.metrics)


def _from_snapshot(
    plan: ReadPlan, snapshot: Snapshot, keys: pa.Table, fields: Sequence[pa.Field], start: int, schema: pa.Schema
) -> list[pa.RecordBatch]:
    arrays = cast_keys(keys, [snapshot.schema.field(field.name) for field in fields])
    given = _given(fields, arrays)
    stored = [name for name in plan.needed if name not in given and name in snapshot.schema.names]
    answer = snapshot.get(stored, Keys(arrays))
    return [_answer(plan, dict(zip(stored, answer.columns, strict=True)), given, answer.keys, start, schema)]


@dataclasses.dataclass(frozen=True)
class _Asked:
    """Keys as the partial cache takes them: typed as its rows are; `kept` are the columns it holds beside them."""

    space: str
    keys: pa.Schema
    arrays: list[pa.Array]
    kept: pa.Schema
    given: Mapping[str, pa.Array]
    layout: Layout
    version: TableVersion


def _ask(
    reader: TableReader, plan: ReadPlan, keys: pa.Table, fields: Sequence[pa.Field], version: TableVersion
) -> _Asked | None:
    """None if the cache's rows lack a column, or the version's files cannot be told from others."""
    if not all(file.cacheable for file in version.files):
        return None
    table, options = plan.table, plan.options
    layout = reader.versions.layout(table, options, version)
    if not set(plan.needed) <= set(layout.columns.names):
        return None
    typed = pa.schema([layout.columns.field(field.name) for field in fields])
    arrays = cast_keys(keys, list(typed))
    given = _given(typed, arrays)
    kept = pa.schema([field for field in layout.columns if field.name not in given])
    # Rows are kept whatever the predicate, so that they answer under another one as well.
    columns = None if options.columns is None else sorted(layout.columns.names)
    space = key_of("partial", table.id, options.keys, columns, options.partition)
    chosen = version.of_files(select_partitions(table, version, options))
    return _Asked(space, typed, arrays, kept, given, layout, chosen)


def _from_partial(
    reader: TableReader,
    plan: ReadPlan,
    keys: pa.Table,
    fields: Sequence[pa.Field],
    version: TableVersion,
    schema: pa.Schema,
) -> pa.Table | None:
    """The answer through the partial cache; None if it cannot hold such rows."""
    asked = _ask(reader, plan, keys, fields, version)
    if asked is None:
        return None

    def load(wanted: Sequence[pa.Array]) -> pa.Table:
        found = reader.versions.rows_by_key(pa.Table.from_arrays(list(wanted), schema=asked.keys), asked.kept)
        if found is not None:
            return found
        names = asked.keys.names
        rows = reader.versions.rows_where(plan, asked.layout, version, asked.version.files, _wanted(names, wanted))
        return rows_at(rows, match_rows(rows, names, Keys(wanted)), asked.kept)

    cache, fresh = _partial_cache(reader, plan, asked)
    try:
        rows = cache.lookup(asked.arrays, fresh, load)
    except LookupFunctionError as problem:
        if problem.rows is not None:
            problem.rows = _partial_answer(plan, asked, problem.rows, schema)
        raise
    return _partial_answer(plan, asked, rows, schema)


def _partial_cache(reader: TableReader, plan: ReadPlan, asked: _Asked) -> tuple[PartialCache, Freshness]:
    bounds_of = functools.partial(reader.versions.bounds_of, plan.table, asked.layout)
    return reader.partials.get_cache(
        plan.table, asked.space, plan.options, asked.keys, asked.kept, asked.version, bounds_of
    )


def _partial_answer(plan: ReadPlan, asked: _Asked, rows: pa.Table, schema: pa.Schema) -> pa.Table:
    held = {name: one_array(rows.column(name)) for name in asked.kept.names}
    return pa.Table.from_batches([_answer(plan, held, asked.given, key_numbers(rows), 0, schema)], schema)


def get_held_at(
    reader: TableReader, plan: ReadPlan, keys: pa.Table, names: Sequence[str], version: TableVersion
) -> tuple[pa.Table, Numbers]:
    """What is cached of the rows of those keys, without a load; and which keys that answers (one bool each).

    With `lookup.cache=PARTIAL`; in the other modes nothing is.
    """
    schema = plan.projection.columns.append(pa.field(KEY_INDEX, pa.int64(), nullable=False))
    fields = _key_fields(plan, names)
    asked = _ask(reader, plan, keys, fields, version) if plan.options.cache is CacheMode.PARTIAL else None
    if asked is None:
        return schema.empty_table(), np.zeros(keys.num_rows, np.bool_)
    cache, fresh = _partial_cache(reader, plan, asked)
    rows, present = cache.get_held(asked.arrays, fresh)
    return _partial_answer(plan, asked, rows, schema), present


def _get_uncached(
    reader: TableReader,
    plan: ReadPlan,
    arrays: Sequence[pa.Array],
    fields: Sequence[pa.Field],
    schema: pa.Schema,
    version: TableVersion,
) -> pa.Table:
    """The answer from the files, or of a provider, which is asked once for each key."""
    probed = Keys(arrays)
    names = [field.name for field in fields]
    if reader.versions.reads_all_rows:
        wanted = _wanted(names, arrays)
        predicate = wanted if plan.projection.predicate is None else And((plan.projection.predicate, wanted))
        planned = plan.projection.columns
        columns = pa.schema([*planned, *(field for field in fields if field.name not in planned.names)])
        projection = dataclasses.replace(plan.projection, columns=columns, predicate=predicate)
        read = reader.versions.read_files(dataclasses.replace(plan, projection=projection), version)
        return _join(table_of(read, columns, plan.table.url), names, probed, schema)
    given = _given(fields, arrays)
    kept = pa.schema([plan.projection.data.field(name) for name in plan.needed if name not in given])
    chosen, places = distinct_keys(probed, probed.hashes(SEED))
    different = pa.Table.from_arrays([array.take(as_indices(chosen)) for array in arrays], schema=pa.schema(fields))

    def answer(rows: pa.Table) -> pa.Table:
        rows = rows_for(rows, places)
        held = {name: one_array(rows.column(name)) for name in kept.names}
        return pa.Table.from_batches([_answer(plan, held, given, key_numbers(rows), 0, schema)], schema)

    if not len(chosen):
        return answer(no_rows(kept))
    try:
        rows = reader.versions.rows_by_key(different, kept)
    except LookupFunctionError as problem:
        if problem.rows is not None:
            failed = np.flatnonzero(np.isin(places, list(problem.failures)))
            problem.failures = {int(place): problem.failures[int(places[place])] for place in failed}
            problem.rows = answer(problem.rows)
        raise
    assert rows is not None
    return answer(rows)


def _given(fields: Iterable[pa.Field], arrays: Sequence[pa.Array]) -> dict[str, pa.Array]:
    """Key columns that need not be stored: what was asked for is what was found, but for floats, whose zeros and NaNs have several forms."""
    pairs = zip(fields, arrays, strict=True)
    return {field.name: array for field, array in pairs if not pa.types.is_floating(array.type)}


def _answer(
    plan: ReadPlan,
    held: Mapping[str, pa.Array],
    given: Mapping[str, pa.Array],
    numbers: Numbers,
    start: int,
    schema: pa.Schema,
) -> pa.RecordBatch:
    """Rows of the keys `numbers` as planned: columns that were `held`, and those that were `given` with the keys."""
    projection = plan.projection
    needed = plan.needed
    indices = as_indices(numbers)
    taken = {name: pc.take(array, indices, boundscheck=False) for name, array in given.items()}
    columns = {**held, **taken}
    batch = plan_columns(columns, len(numbers), needed, projection, plan.table.url)
    places = indices if not start else as_indices(numbers + start)
    if projection.predicate is not None:
        mask = evaluate(projection.predicate, dict(zip(needed, batch.columns, strict=True)), batch.num_rows)
        batch, places = batch.filter(mask), places.filter(mask)
    columns_out = [batch.column(name) for name in projection.columns.names]
    return pa.RecordBatch.from_arrays([*columns_out, places], schema=schema)


def _wanted(names: Sequence[str], keys: Sequence[pa.Array]) -> Predicate:
    """What every row with any of the keys fulfils, to read no more than that."""
    parts = tuple(Among(name, pc.unique(array).drop_null()) for name, array in zip(names, keys, strict=True))
    return parts[0] if len(parts) == 1 else And(parts)


def _join(rows: pa.Table, names: Sequence[str], keys: Keys, schema: pa.Schema) -> pa.Table:
    """Rows of a scan by the keys they answer."""
    matches = match_rows(rows, names, keys)
    found = rows.select(schema.names[:-1]).take(as_indices(matches.rows))
    columns = [*found.columns, pa.chunked_array([as_indices(matches.keys)])]
    return pa.Table.from_arrays(columns, schema=schema)
