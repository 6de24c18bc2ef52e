"""`lookup.view`: what a host knows about a table, as rows.

`files`: the files of the current version (one metadata call). `versions`: the versions this host has
resolved. `metrics`: this host's counters. Nothing of the table's data is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pyarrow as pa

from pyspark_lookup.metrics import COUNTERS, GAUGES
from pyspark_lookup.options import LookupOptions, View
from pyspark_lookup.runtime import Engine

__all__ = ["ViewTask", "view_batches", "view_schema"]

_INSTANT = pa.timestamp("us", "UTC")
_SCHEMAS = {
    View.FILES: pa.schema(
        [("url", pa.string()), ("size", pa.int64()), ("identity", pa.string()), ("modified_at", _INSTANT)]
    ),
    View.VERSIONS: pa.schema(
        [("digest", pa.string()), ("resolved_at", _INSTANT), ("files", pa.int64()), ("bytes", pa.int64())]
    ),
    View.METRICS: pa.schema([("name", pa.string()), ("value", pa.int64()), ("meaning", pa.string())]),
}


@dataclasses.dataclass(frozen=True)
class ViewTask:
    """The one task of a view."""

    view: View


def view_schema(view: View) -> pa.Schema:
    """The columns of a view."""
    return _SCHEMAS[view]


def view_batches(engine: Engine, task: ViewTask, options: LookupOptions) -> Iterator[pa.RecordBatch]:
    """The rows of a view, as one batch."""
    rows = {View.FILES: _files, View.VERSIONS: _versions, View.METRICS: _metrics}[task.view](engine, options)
    yield pa.RecordBatch.from_pylist(rows, schema=_SCHEMAS[task.view])


def _micros(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1e6)


def _files(engine: Engine, options: LookupOptions) -> list[dict[str, object]]:
    _, version = engine.reader.metadata.discover(options)
    return [
        {"url": file.url, "size": file.size, "identity": file.identity, "modified_at": _micros(file.modified_at_s)}
        for file in version.files
    ]


def _versions(engine: Engine, options: LookupOptions) -> list[dict[str, object]]:
    return [
        {**row, "resolved_at": _micros(row["resolved_at"])} for row in engine.reader.metadata.known_versions(options)
    ]


def _metrics(engine: Engine, options: LookupOptions) -> list[dict[str, object]]:
    values = engine.host_metrics()
    return [{"name": name, "value": values[name], "meaning": doc} for name, doc in {**COUNTERS, **GAUGES}.items()]
