"""A Delta table as a lookup table, read by delta-rs: no JVM.

    LookupTable("/data/customers", {
        "lookup.provider": "examples.delta_provider:by_key",
        "lookup.keys": "id",
        "lookup.cache": "PARTIAL",
        "lookup.partial-cache.max-rows": 1000000,
    })

`by_key` looks up, for lookup.cache NONE and PARTIAL; `whole` is copied to each host, for FULL. The path is the table's
directory or URL. `lookup.provider.…` are storage options of delta-rs, e.g. `lookup.provider.aws_endpoint_url`; they must not
hold credentials, which come from the environment of each machine that reads.

The version is the table's id and the number of its newest commit, which the next query sees. To learn it the log is read since
its last checkpoint.

It takes deltalake 1.6.6 or newer. Before, a row that a deletion vector has removed came back when it was looked up by key;
those releases lack `DeltaTable.scan`, so this fails there.
"""

from __future__ import annotations

import datetime

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable

from pyspark_lookup import (
    FullCachingLookupProvider,
    LookupContext,
    LookupFunction,
    LookupFunctionProvider,
    OptionError,
)

__all__ = ["DeltaLookup", "DeltaSource", "by_key", "whole"]


def by_key(context: LookupContext) -> LookupFunctionProvider:
    """The table at `path`, asked by key. Raises OptionError for a key that is no integer, text or date."""
    source = DeltaSource(context)
    for name in context.keys:
        if name in source.schema.names and not _is_key(source.schema.field(name).type):
            kind = source.schema.field(name).type
            raise OptionError(f"{context.path}: key column {name!r} is {kind}; keys are integers, texts or dates")
    return LookupFunctionProvider(DeltaLookup(source), source.schema, source.version)


def whole(context: LookupContext) -> FullCachingLookupProvider:
    """All of the table at `path`."""
    source = DeltaSource(context)
    return FullCachingLookupProvider(source.read, source.schema, version=source.version)


class DeltaSource:
    """The newest version of a Delta table.

    It is opened anew for each question: a lookup that comes after `version` must not be answered from an older one, and
    `DeltaTable.update_incremental` does not notice another table in the place of this one.
    """

    def __init__(self, context: LookupContext) -> None:
        if context.path is None:
            raise OptionError("a Delta table needs a path: its directory or URL")
        self._uri = context.path
        self._storage = dict(context.options)
        self.schema = pa.schema(self._open().schema().to_arrow())
        wanted = self.schema.names if context.columns is None else (*context.keys, *context.columns)
        self._columns = pa.schema([field for field in self.schema if field.name in wanted])

    def version(self) -> str:
        """The table's id, for another table may take its place, and the number of its last commit."""
        table = self._open()
        return f"{table.metadata().id}:{table.version()}"

    def read(self, predicate: str | None = None) -> pa.RecordBatchReader:
        """The rows of which an SQL predicate is true; files and row groups that cannot have any are not read."""
        rows = pa.RecordBatchReader.from_stream(self._open().scan(self._columns.names, predicate))
        return rows.cast(self._columns)  # texts come as views, of which pyarrow takes none by number

    def _open(self) -> DeltaTable:
        return DeltaTable(self._uri, storage_options=self._storage)


class DeltaLookup(LookupFunction):
    """Looks up a batch of keys in one scan."""

    batch_size = 1000  # 0.1 ms each: to many more a copy of the whole table answers sooner

    def __init__(self, source: DeltaSource) -> None:
        self._source = source

    def lookup(self, keys: pa.Table) -> pa.Table:
        parts = [f"{_quoted(name)} IN ({_literals(keys[name].unique())})" for name in keys.column_names]
        rows = self._source.read(" AND ".join(parts)).read_all()
        return rows if len(parts) == 1 else _having(rows, keys)


def _having(rows: pa.Table, keys: pa.Table) -> pa.Table:
    """The rows that have all columns of one of the keys, not each of another one."""
    numbered = rows.select(keys.column_names).cast(keys.schema).append_column("", pa.array(np.arange(rows.num_rows)))
    return rows.take(numbered.join(keys, keys.column_names, join_type="left semi").column(""))


def _is_key(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_date(kind)


def _literals(values: pa.Array) -> str:
    return ", ".join(map(_literal, values.to_pylist()))


def _literal(value: int | str | datetime.date) -> str:
    if isinstance(value, int):
        return str(value)
    return f"DATE '{value}'" if isinstance(value, datetime.date) else "'" + value.replace("'", "''") + "'"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
