"""The sources of versions, in the order in which they are asked for the kind of a path."""

from __future__ import annotations

from pyspark_lookup.table.delta.source import DeltaSource
from pyspark_lookup.table.files_source import FilesSource
from pyspark_lookup.table.iceberg.source import IcebergSource
from pyspark_lookup.table.log_source import LogSource
from pyspark_lookup.table.source import VersionSource

SOURCES: list[type[VersionSource]] = [LogSource, DeltaSource, IcebergSource, FilesSource]
