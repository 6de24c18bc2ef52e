"""A provider's table, in the form of a table of files: a store with one file, whose identity is the provider's version; its versions; its rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa

from pyspark_lookup.columnar.types import cast_column, text_of_schema
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.errors import NotSupportedError, UfsNotFoundError
from pyspark_lookup.options.enums import CacheMode, FileFormatName
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.scan.contract import PreparedScan, PreparedUnit, TableScan, coalesce, matching_rows
from pyspark_lookup.scan.open_file import Projection, Slice
from pyspark_lookup.sources.providers.provider import ProvidedTable
from pyspark_lookup.storage.disk import key_of
from pyspark_lookup.storage.stores import Count, FileVersion, Listing
from pyspark_lookup.versions.model import Table, TableVersion, VersionMetadata
from pyspark_lookup.versions.version_source import Answer, Question, SourceParts, VersionSource

_SIZE = 1  # unknown; any will do, because a change of the one file is a change of the whole table


class ProvidedStore:
    """The store of a provider's table. `now_s`: the time that names a load of a provider without versions."""

    pins = True
    lists_after = False

    def __init__(self, provided_table: ProvidedTable, options: LookupOptions, now_s: Callable[[], float]) -> None:
        made_with = (options.path, options.provider_options)
        self.scope = f"provider:{provided_table.name}"
        self._url = f"{self.scope}/{key_of(*made_with)}"
        self._provided_table = provided_table
        # Each copy of the whole table is a new version. Rows by key have one version and expire one by one.
        self._each_time = options.cache is CacheMode.FULL
        self._now_s = now_s

    def url_of(self, path: str) -> str:
        return self._url

    def get_meta(self, path: str, count: Count) -> FileVersion:
        count("head")
        version = self._provided_table.version()
        if version is None:
            version = repr(self._now_s()) if self._each_time else "unversioned"
        return FileVersion(self._url, _SIZE, version)

    def get_status(self, path: str, count: Count) -> FileVersion | Listing:
        return self.get_meta(path, count)

    def list_status(self, path: str, count: Count) -> Listing:
        raise UfsNotFoundError(f"{self._url} is no directory")

    def pin(self, file: FileVersion) -> contextlib.AbstractContextManager[Callable[[int, int], bytes]]:
        raise UfsNotFoundError(f"{self._url} has no bytes")

    def list_files(self, path: str, after: str, at_most: int | None, count: Count) -> tuple[FileVersion, ...]:
        return ()

    def has_directory(self, path: str, count: Count) -> bool:
        return False

    def list_tree(self, path: str, count: Count) -> tuple[FileVersion, ...]:
        return ()

    def last_change_s(self, path: str, count: Count) -> tuple[float | None, float]:
        return None, self._now_s()

    def put_if_absent(self, path: str, data: bytes, count: Count) -> FileVersion | None:
        raise NotSupportedError(f"{self._url}: a provider's table is not written here")

    def delete(self, path: str, count: Count) -> None:
        raise NotSupportedError(f"{self._url}: a provider's table is not written here")

    def delete_many(self, directory: str, names: Sequence[str], count: Count) -> None:
        raise NotSupportedError(f"{self._url}: a provider's table is not written here")


class ProviderSource(VersionSource):
    """The table of one provider, as one file whose identity is the provider's version."""

    kinds = ("PROVIDER",)
    pins = ()
    retained = False
    one_asks = False  # version() is foreign code, which may hang: each process asks for itself

    def __init__(self, provided_table: ProvidedTable, parts: SourceParts) -> None:
        super().__init__(parts)
        self._provided_table = provided_table

    @classmethod
    def detect_kind(cls, status: FileVersion | Listing) -> str | None:
        return cls.kinds[0]

    def check_options(self, options: LookupOptions, kind: str) -> None:
        self._refuse_pin(options, kind)  # other options without a meaning here are refused where they are declared

    def detect_format(self, files: Sequence[FileVersion]) -> FileFormatName | None:
        return None

    def current(self, question: Question) -> Answer:
        table, status = question.table, question.status
        file = status if isinstance(status, FileVersion) else self._parts.ufs.get_meta(table.url)
        digest = key_of(table.id, file.url, file.size, file.identity)
        schema = text_of_schema(self._provided_table.schema)
        metadata = VersionMetadata(self._provided_table.name, None, "", digest, (), schema)
        return Answer(TableVersion(table.id, (file,), metadata), question.started_s)


class ProvidedScan(TableScan):
    """Reads of the table of one provider."""

    def __init__(self, provided_table: ProvidedTable, metrics: CacheMetricGroup) -> None:
        self._provided_table = provided_table
        self._metrics = metrics

    @property
    def reads_all_rows(self) -> bool:
        return self._provided_table.scans

    def rows_by_key(self, keys: pa.Table, columns: pa.Schema) -> pa.Table | None:
        return self._provided_table.lookup(keys, columns, self._metrics)

    def close(self) -> None:
        self._provided_table.close()

    def schema(self, table: Table, files: Sequence[FileVersion]) -> tuple[pa.Schema, pa.Schema]:
        return self._provided_table.schema, pa.schema([])

    def prepare(
        self,
        table: Table,
        pieces: Sequence[Slice],
        projection: Projection,
        columns_of_version: Callable[[], pa.Schema] | None = None,
    ) -> PreparedScan:
        return _Prepared(self._provided_table, pieces, projection, self._metrics)


class _Prepared:
    def __init__(
        self, provided_table: ProvidedTable, pieces: Sequence[Slice], projection: Projection, metrics: CacheMetricGroup
    ) -> None:
        self._provided_table = provided_table
        self._pieces = pieces
        self._projection = projection
        self._metrics = metrics

    def batches(self) -> Iterator[pa.RecordBatch]:
        projection = self._projection
        matches = (matching_rows(batch, projection.predicate) for batch in self._plan(projection.needed_columns))
        rows = (batch.select(projection.columns.names) for batch in matches if batch is not None)
        return coalesce(rows, projection.columns, self._metrics)

    def units(self) -> Iterator[PreparedUnit]:
        for piece in self._pieces:
            yield PreparedUnit(piece.file, 0, piece.file.size, None, self._plan(self._projection.columns.names))

    def _plan(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        fields = [self._projection.data.field(name) for name in names]
        for batch in self._provided_table.scan(pa.schema([self._provided_table.schema.field(name) for name in names])):
            columns = [cast_column(batch.column(f.name), f.type, f.name, self._provided_table.name) for f in fields]
            yield pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))
