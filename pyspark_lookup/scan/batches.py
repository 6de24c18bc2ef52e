"""Batches of rows, as a scan gives them out: filtered, and not too small."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from pyspark_lookup.base.metrics import CacheMetricGroup
from pyspark_lookup.columnar.predicate import Predicate, evaluate
from pyspark_lookup.scan.formats import BATCH_ROWS


def coalesced(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, metrics: CacheMetricGroup
) -> Iterator[pa.RecordBatch]:
    """The rows in batches of about 64k, with exactly `schema`."""
    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        metrics.inc("rowsReadCount", batch.num_rows)
        if rows and rows + batch.num_rows > BATCH_ROWS:
            yield _joined(waiting, schema)
            waiting, rows = [], 0
        waiting.append(batch)
        rows += batch.num_rows
    if waiting:
        yield _joined(waiting, schema)


def matching_rows(batch: pa.RecordBatch, predicate: Predicate | None) -> pa.RecordBatch | None:
    """The rows for which the predicate is true; None if there are none."""
    if predicate is None:
        return batch
    mask = mask_of(predicate, batch)
    if mask.true_count == 0:
        return None
    return batch.filter(mask) if mask.true_count < batch.num_rows or mask.null_count else batch


def _joined(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    batch = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    return pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def mask_of(predicate: Predicate | None, batch: pa.RecordBatch) -> pa.BooleanArray:
    assert predicate is not None
    return evaluate(predicate, dict(zip(batch.schema.names, batch.columns, strict=True)), batch.num_rows)
