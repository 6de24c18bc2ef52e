"""Scans of a snapshot: the same columns, types and rows as from the files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from pyspark_lookup.cache.full.snapshot import Ranges, Snapshot
from pyspark_lookup.columnar.key_rows import SEED, distinct_keys
from pyspark_lookup.columnar.keys import Keys, as_indices
from pyspark_lookup.columnar.predicate import And, Compare, In, Predicate, referenced_columns
from pyspark_lookup.columnar.types import check_readable, conform_columns
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.errors import SchemaError
from pyspark_lookup.scan.formats import BATCH_ROWS
from pyspark_lookup.scan.open_file import Projection
from pyspark_lookup.scan.table_scan import coalesce, matching_rows

_KEYS_AT_MOST = 100_000  # combinations of key values in a predicate; with more, a scan is as fast


def snapshot_batches(
    snapshot: Snapshot,
    projection: Projection,
    ranges: Ranges | None,
    whole: Callable[[], pa.Schema],
    url: str,
    metrics: CacheMetricGroup,
) -> Iterator[pa.RecordBatch]:
    """The projected rows of a snapshot, or of parts of its files.

    A predicate that restricts the keys is answered by the index. Every error is raised before the first batch. `whole` returns the columns
    of all files of the version.
    """
    predicate = projection.predicate
    tested = referenced_columns(predicate)
    names = list(dict.fromkeys([*projection.columns.names, *sorted(tested)]))
    stored = [name for name in names if name in snapshot.schema.names]
    _check(snapshot, projection, names, whole, url)
    keyed = pa.schema([snapshot.schema.field(name) for name in snapshot.keys])
    keys = key_values(predicate, keyed) if predicate is not None and ranges is None else None
    if keys is not None:
        # Different values may be the same key: NaN and NaN, or two values that are equal as float32.
        probed = Keys(keys)
        if probed.rows > 1:
            distinct_rows = as_indices(np.sort(distinct_keys(probed, probed.hashes(SEED))[0]))
            probed = Keys([values.take(distinct_rows) for values in keys])
        answer = snapshot.get(stored, probed)
        pieces: Iterator[tuple[int, list[pa.Array]]] = iter([(len(answer.keys), answer.columns)])
    else:
        pieces = snapshot.batches(stored, ranges)

    def batches() -> Iterator[pa.RecordBatch]:
        for rows, columns in pieces:
            for start in range(0, rows, BATCH_ROWS):
                part = [column.slice(start, BATCH_ROWS) for column in columns] if rows > BATCH_ROWS else columns
                stored_columns = dict(zip(stored, part, strict=True))
                batch = plan_columns(stored_columns, min(rows - start, BATCH_ROWS), names, projection, url)
                matching_batch = matching_rows(batch, predicate)
                if matching_batch is not None:
                    yield matching_batch.select(projection.columns.names)

    return coalesce(batches(), projection.columns, metrics)


def _check(
    snapshot: Snapshot, projection: Projection, names: Sequence[str], whole: Callable[[], pa.Schema], url: str
) -> None:
    """Raise the SchemaError that reading the files would raise."""
    missing_columns = [] if projection.declared else [name for name in names if name not in snapshot.schema.names]
    if missing_columns:
        elsewhere = {name.lower() for name in whole().names}
        missing_columns = [name for name in missing_columns if name.lower() not in elsewhere]
    if missing_columns:
        raise SchemaError(
            f"no file of {url} has column {missing_columns[0]!r} any more: the table changed; plan again (a new load() or SQL "
            "statement; a catalog table must be created again)"
        )
    for name in names:
        if name in snapshot.schema.names:
            stored_type = snapshot.schema.field(name).type
            check_readable(_plan(projection, name), stored_type, url, projection.declared)


def _plan(projection: Projection, name: str) -> pa.Field:
    return (projection.data if name in projection.data.names else projection.partitions).field(name)


def plan_columns(
    columns: Mapping[str, pa.Array], rows: int, names: Sequence[str], projection: Projection, url: str
) -> pa.RecordBatch:
    """Columns of a snapshot as the planned columns of those names; a column that it lacks is null."""
    return conform_columns(columns, rows, pa.schema([_plan(projection, name) for name in names]), url)


def key_values(predicate: Predicate, keys: pa.Schema) -> list[pa.Array] | None:
    """The only keys whose rows can fulfil the predicate, as columns of `keys`; None if it does not restrict them."""
    if not keys.names:
        return None
    parts = _parts(predicate)
    choices: list[tuple[object, ...]] = []
    for field in keys:
        value_lists = [values for part in parts if (values := _values(part, field.name)) is not None]
        if not value_lists:
            return None
        values = min(value_lists, key=len)
        if any(isinstance(value, float) for value in values) and not pa.types.is_floating(field.type):
            return None  # compared as doubles, and one double equals several large integers
        choices.append(values)
    if math.prod(map(len, choices)) > _KEYS_AT_MOST:
        return None
    rows = list(itertools.product(*choices))
    try:
        return [pa.array([row[number] for row in rows], field.type) for number, field in enumerate(keys)]
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return None  # the literal's type is not the column's; the scan compares them like Spark


def _parts(predicate: Predicate) -> list[Predicate]:
    """The conjuncts of a predicate."""
    if isinstance(predicate, And):
        return [part for inner in predicate.parts for part in _parts(inner)]
    return [predicate]


def _values(part: Predicate, name: str) -> tuple[object, ...] | None:
    """The values of a column that a predicate allows; None if it does not limit them to a list."""
    if isinstance(part, Compare) and part.column == name and part.op == "=":
        return (part.value,)
    if isinstance(part, In) and part.column == name and not part.negated:
        return part.values
    return None
