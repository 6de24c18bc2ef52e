"""An Iceberg table as a lookup table, read by PyIceberg: no JVM.

    LookupTable(None, {
        "lookup.provider": "examples.iceberg_provider:by_key",
        "lookup.provider.catalog": "prod",
        "lookup.provider.table": "shop.customers",
        "lookup.keys": "id",
        "lookup.cache": "PARTIAL",
        "lookup.partial-cache.max-rows": 1000000,
    })

`by_key` looks up, for lookup.cache NONE and PARTIAL; `whole` is copied to each host, for FULL. The catalog is one that PyIceberg
is configured for on each machine that reads, in .pyiceberg.yaml or PYICEBERG_CATALOG__PROD__… in the environment: credentials
belong there. Other `lookup.provider.…` are properties of the catalog, e.g. `lookup.provider.uri`.

The version is the table's id with those of its snapshot and its schema: a new snapshot is seen by the next query, for one
question to the catalog and one to the store.

It takes pyiceberg 0.11 or newer. Equality deletes, which PyIceberg cannot read, are an error.
"""

from __future__ import annotations

import functools

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.catalog import load_catalog
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, GreaterThanOrEqual, In, LessThanOrEqual
from pyiceberg.table import Table

from pyspark_lookup import (
    FullCachingLookupProvider,
    LookupContext,
    LookupFunction,
    LookupFunctionProvider,
    OptionError,
)

__all__ = ["IcebergLookup", "IcebergSource", "by_key", "whole"]


def by_key(context: LookupContext) -> LookupFunctionProvider:
    """The table `lookup.provider.table`, asked by key."""
    source = IcebergSource(context)
    return LookupFunctionProvider(IcebergLookup(source), source.schema, source.version)


def whole(context: LookupContext) -> FullCachingLookupProvider:
    """All of the table `lookup.provider.table`."""
    source = IcebergSource(context)
    return FullCachingLookupProvider(source.read, source.schema, version=source.version)


class IcebergSource:
    """The current snapshot of an Iceberg table.

    It is loaded anew for each question: the lookup that comes after `version` must not be answered from an older one.
    """

    def __init__(self, context: LookupContext) -> None:
        properties = dict(context.options)
        name, table = properties.pop("catalog", None), properties.pop("table", None)
        if not table:
            raise OptionError("an Iceberg table needs lookup.provider.table, e.g. 'shop.customers'")
        self._catalog = load_catalog(name, **properties)
        self._name = table
        self.schema = self._load().schema().as_arrow()
        wanted = self.schema.names if context.columns is None else (*context.keys, *context.columns)
        self._columns = tuple(name for name in self.schema.names if name in wanted)

    def version(self) -> str:
        """What is another one whenever a row may be: also for a table that took this one's name, or other columns."""
        metadata = self._load().metadata
        return f"{metadata.table_uuid}:{metadata.current_snapshot_id}:{metadata.current_schema_id}"

    def read(self, wanted: BooleanExpression | None = None) -> pa.RecordBatchReader:
        """The rows of which an expression is true; files and row groups that cannot have any are not read."""
        return self._load().scan(wanted or AlwaysTrue(), self._columns).to_arrow_batch_reader()

    def _load(self) -> Table:
        return self._catalog.load_table(self._name)


class IcebergLookup(LookupFunction):
    """Looks up a batch of keys in one scan."""

    batch_size = 1000  # 0.1 ms each: to many more a copy of the whole table answers sooner

    def __init__(self, source: IcebergSource) -> None:
        self._source = source

    def lookup(self, keys: pa.Table) -> pa.Table:
        wanted = functools.reduce(And, [_among(name, keys[name].unique()) for name in keys.column_names])
        rows = self._source.read(wanted).read_all()
        return rows if keys.num_columns == 1 else _having(rows, keys)


def _among(name: str, values: pa.Array) -> BooleanExpression:
    """PyIceberg prunes by up to 200 values; by the range they lie in, however many there are."""
    ends = pc.min_max(values).as_py()
    between = And(GreaterThanOrEqual(name, ends["min"]), LessThanOrEqual(name, ends["max"]))
    return And(between, In(name, values.to_pylist()))


def _having(rows: pa.Table, keys: pa.Table) -> pa.Table:
    """The rows that have all columns of one of the keys, not each of another one."""
    numbered = rows.select(keys.column_names).cast(keys.schema).append_column("", pa.array(np.arange(rows.num_rows)))
    return rows.take(numbered.join(keys, keys.column_names, join_type="left semi").column(""))
