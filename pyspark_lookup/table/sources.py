"""The sources of versions that there are, in the order in which they are asked what a path is."""

from __future__ import annotations

from pyspark_lookup.table.delta.source import DeltaSource
from pyspark_lookup.table.files_source import FilesSource
from pyspark_lookup.table.iceberg.source import IcebergSource
from pyspark_lookup.table.log_source import LogSource
from pyspark_lookup.table.source import VersionSource

SOURCES: list[type[VersionSource]] = [LogSource, DeltaSource, IcebergSource, FilesSource]
