"""`HostSchemas`: the columns of a table's versions, cached by digest in the process and on the host. A version never changes."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from pyspark_lookup.columnar.types import schema_of_text, text_of_schema
from pyspark_lookup.scan.contract import TableScan
from pyspark_lookup.scan.open_file import Latest
from pyspark_lookup.storage.context import HostContext
from pyspark_lookup.storage.disk import key_of
from pyspark_lookup.versions.model import Table, TableVersion, require_metadata

_AT_MOST = 8  # versions in a process


class HostSchemas:
    """The columns of versions, read by `scan` and cached."""

    def __init__(self, scan: TableScan, context: HostContext) -> None:
        self._scan = scan
        self._context = context
        self._schemas = Latest[tuple[pa.Schema, pa.Schema]](_AT_MOST)

    def get_columns(self, table: Table, version: TableVersion) -> tuple[pa.Schema, pa.Schema]:
        """(columns in the files, partition columns) of a version, from the table's metadata or, without that, from its files."""
        if version.metadata is not None or table.retained:
            return require_metadata(table, version).columns
        if not all(file.cacheable for file in version.files):
            return self._scan.schema(table, version.files)
        key = key_of(version.digest, table.format)
        schemas = self._schemas.get((key,)) or self._keep(table, version, key)
        self._schemas.put((key,), schemas, 1)
        return schemas

    def _keep(self, table: Table, version: TableVersion, key: str) -> tuple[pa.Schema, pa.Schema]:
        disk = self._context.disk
        record: tuple[pa.Schema, pa.Schema] | None = disk.get_record("schema", key, _parse_schemas) if disk else None
        if record is not None:
            return record
        schemas = self._scan.schema(table, version.files)
        if disk:
            try:
                disk.replace_record("schema", key, [text_of_schema(schema) for schema in schemas])
            except OSError:
                self._context.metrics.inc("cacheFailureCount")
        return schemas


def _parse_schemas(texts: Any) -> tuple[pa.Schema, pa.Schema]:
    data, partitions = map(schema_of_text, texts)
    return data, partitions
