"""A provider's rows as `Scan` gives those of files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa

from pyspark_lookup.base.metrics import CacheMetricGroup
from pyspark_lookup.columnar.keys import Numbers
from pyspark_lookup.columnar.predicate import ColumnStats, columns_of
from pyspark_lookup.columnar.types import cast_column
from pyspark_lookup.io.stores import FileVersion
from pyspark_lookup.providers.provider import ProvidedTable
from pyspark_lookup.scan.batches import coalesced, matching_rows
from pyspark_lookup.scan.contract import PreparedScan
from pyspark_lookup.scan.open_file import Projection, Slice
from pyspark_lookup.table.model import Table


class ProvidedScan:
    """Reads of the table of one provider."""

    def __init__(self, provided: ProvidedTable, metrics: CacheMetricGroup) -> None:
        self._provided = provided
        self._metrics = metrics

    @property
    def reads_all_rows(self) -> bool:
        return self._provided.scans

    def rows_by_key(self, keys: pa.Table, columns: pa.Schema) -> pa.Table | None:
        return self._provided.lookup(keys, columns, self._metrics)

    def close(self) -> None:
        self._provided.close()

    def splittable(self, table: Table) -> bool:
        return False

    def schema(self, table: Table, files: Sequence[FileVersion]) -> tuple[pa.Schema, pa.Schema]:
        return self._provided.schema, pa.schema([])

    def bounds(
        self, table: Table, files: Sequence[FileVersion], partitions: pa.Schema, names: Sequence[str]
    ) -> list[list[ColumnStats | None]]:
        return [[None for _ in names] for _ in files]

    def rows(self, table: Table, files: Sequence[FileVersion]) -> int | None:
        return None

    def deleted(self, table: Table, files: Sequence[FileVersion]) -> dict[str, Numbers]:
        return {}

    def prepare(
        self,
        table: Table,
        pieces: Sequence[Slice],
        projection: Projection,
        columns_of_version: Callable[[], pa.Schema] | None = None,
    ) -> PreparedScan:
        return _Prepared(self._provided, pieces, projection, self._metrics)


class _Prepared:
    def __init__(
        self, provided: ProvidedTable, pieces: Sequence[Slice], projection: Projection, metrics: CacheMetricGroup
    ) -> None:
        self._provided = provided
        self._pieces = pieces
        self._projection = projection
        self._metrics = metrics

    def batches(self) -> Iterator[pa.RecordBatch]:
        projection = self._projection
        tested = columns_of(projection.predicate) if projection.predicate is not None else frozenset()
        needed = list(dict.fromkeys([*projection.columns.names, *sorted(tested)]))
        kept = (matching_rows(batch, projection.predicate) for batch in self._planned(needed))
        rows = (batch.select(projection.columns.names) for batch in kept if batch is not None)
        return coalesced(rows, projection.columns, self._metrics)

    def units(self) -> Iterator[tuple[FileVersion, int, Iterator[pa.RecordBatch]]]:
        for piece in self._pieces:
            yield piece.file, 0, self._planned(self._projection.columns.names)

    def _planned(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        fields = [self._projection.data.field(name) for name in names]
        for batch in self._provided.scan(pa.schema([self._provided.schema.field(name) for name in names])):
            columns = [cast_column(batch.column(f.name), f.type, f.name, self._provided.name) for f in fields]
            yield pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))
