"""Rows by key, for a whole batch of keys at once, from a snapshot or from the files.

Answers have the planned columns (keys first), one row per match, and `key_index`: the place of the
key it answers, ascending; rows of one key come in file order. A key with a null answers nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.errors import SchemaError
from pyspark_lookup.formats import BATCH_ROWS
from pyspark_lookup.index import IndexBuilder, KeyIndex, order_rows
from pyspark_lookup.keys import Keys, Seed, as_indices, cast_keys
from pyspark_lookup.metadata import Execution
from pyspark_lookup.options import CacheMode, OnVersionGone
from pyspark_lookup.predicate import And, Compare, In, Predicate, columns_of, evaluate
from pyspark_lookup.reader import ReadPlan, TableReader
from pyspark_lookup.snapshot.layers import Snapshot
from pyspark_lookup.snapshot.reading import planned_columns
from pyspark_lookup.table import TableVersion

__all__ = ["KEY_INDEX", "get_many"]

KEY_INDEX = "key_index"
_IN_AT_MOST = 10_000  # values in a predicate; of more, only the range prunes
_SEED = Seed(0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)  # of an index that one call uses


def get_many(
    reader: TableReader,
    plan: ReadPlan,
    keys: pa.Table,
    names: Sequence[str],
    execution: Execution | None,
    version: TableVersion | None = None,
) -> pa.Table:
    """The rows whose columns `names` have any of the values in `keys`; all from one version.

    `plan`: whose columns are those of the answer, `names` first. `version`: the current one, if the
    caller has just resolved it. Raises SchemaError if the keys do not fit, and what reading raises.
    """
    if KEY_INDEX in plan.projection.columns.names:
        raise SchemaError(f"the table has a column {KEY_INDEX!r}, as the answer does: leave it out by lookup.columns")
    resolution, snapshot = reader.resolve(plan, execution, version)
    if plan.options.on_version_gone is OnVersionGone.FAIL:  # others may have been told of this version
        resolution = dataclasses.replace(resolution, decided_here=False)
    fields = [plan.projection.columns.field(name) for name in names]
    arrays = cast_keys(keys, fields)
    probed = Keys(arrays)
    valid = probed.rows if probed.valid is None else int(np.count_nonzero(probed.valid))
    schema = plan.projection.columns.append(pa.field(KEY_INDEX, pa.int64(), nullable=False))
    if snapshot is not None:
        reader.metrics.inc("hitCount", valid)
        batches = [
            batch
            for start in range(0, max(probed.rows, 1), BATCH_ROWS)
            for batch in _from_snapshot(plan, snapshot, keys.slice(start, BATCH_ROWS), fields, start, schema)
        ]
        return pa.Table.from_batches(batches, schema)
    if plan.options.cache is CacheMode.FULL:
        reader.metrics.inc("missCount", valid)
    wanted = _wanted(names, arrays)
    predicates = [p for p in (plan.projection.predicate, wanted) if p is not None]
    predicate = None if not predicates else And(tuple(predicates)) if len(predicates) > 1 else predicates[0]
    narrowed = dataclasses.replace(plan, projection=dataclasses.replace(plan.projection, predicate=predicate))
    rows = pa.Table.from_batches(list(reader.read_files(narrowed, execution, resolution)), plan.projection.columns)
    return _joined(rows, names, probed, schema)


def _from_snapshot(
    plan: ReadPlan, snapshot: Snapshot, keys: pa.Table, fields: Sequence[pa.Field], start: int, schema: pa.Schema
) -> list[pa.RecordBatch]:
    projection = plan.projection
    names = [field.name for field in fields]
    arrays = cast_keys(keys, [snapshot.schema.field(name) for name in names])
    tested = columns_of(projection.predicate) if projection.predicate is not None else frozenset()
    needed = list(dict.fromkeys([*projection.columns.names, *sorted(tested)]))
    # What was asked for is what was found, but for floats, whose zeros and NaNs have several forms.
    given = {n: a for n, a in zip(names, arrays, strict=True) if not pa.types.is_floating(a.type)}
    stored = [name for name in needed if name not in given and name in snapshot.schema.names]
    answer = snapshot.get(stored, Keys(arrays))
    indices = as_indices(answer.keys)
    columns = [*answer.columns, *(pc.take(array, indices, boundscheck=False) for array in given.values())]
    batch = planned_columns(columns, [*stored, *given], len(answer.keys), needed, projection, plan.table.url)
    numbers = indices if not start else as_indices(answer.keys + start)
    if projection.predicate is not None:
        mask = evaluate(projection.predicate, dict(zip(needed, batch.columns, strict=True)), batch.num_rows)
        batch, numbers = batch.filter(mask), numbers.filter(mask)
    columns = [batch.column(name) for name in projection.columns.names]
    return [pa.RecordBatch.from_arrays([*columns, numbers], schema=schema)]


def _wanted(names: Sequence[str], keys: Sequence[pa.Array]) -> Predicate | None:
    """What every row with any of the keys fulfils, to read no more than that; None: read everything."""
    parts = [part for name, array in zip(names, keys, strict=True) if (part := _column_wanted(name, array)) is not None]
    return And(tuple(parts)) if parts else None


def _column_wanted(name: str, array: pa.Array) -> Predicate | None:
    distinct = pc.unique(array).drop_null()
    try:
        if len(distinct) <= _IN_AT_MOST:
            return In(name, tuple(distinct.to_pylist()), has_null=False)
        if pa.types.is_floating(array.type) or pa.types.is_boolean(array.type):
            return None
        bounds = pc.min_max(distinct)
        low, high = bounds["min"].as_py(), bounds["max"].as_py()
    except (ValueError, OverflowError, pa.ArrowNotImplementedError):  # a time that Python cannot express
        return None
    return And((Compare(name, ">=", low), Compare(name, "<=", high)))


def _joined(rows: pa.Table, names: Sequence[str], keys: Keys, schema: pa.Schema) -> pa.Table:
    """Rows of a scan by the keys they answer."""
    stored = [_one(rows.column(name)) for name in names]
    held = Keys(stored)
    order = order_rows(held, held.hashes(_SEED))
    builder = IndexBuilder(held.rows, None, wide=True)
    builder.add(order, held)
    indices = as_indices(order.rows)
    index = KeyIndex(builder.arrays(strict=False), [pc.take(array, indices) for array in stored], 0)
    matches = index.probe(keys, keys.hashes(_SEED))
    found = rows.take(as_indices(order.rows[matches.rows]))
    columns = [*found.columns, pa.chunked_array([as_indices(matches.keys)])]
    return pa.Table.from_arrays(columns, schema=schema)


def _one(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [pa.array([], column.type)])
