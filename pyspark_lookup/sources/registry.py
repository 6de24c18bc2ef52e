"""The kinds of tables: each has its package and its line here."""

from __future__ import annotations

from pyspark_lookup.sources.delta.source import DeltaSource
from pyspark_lookup.sources.files.source import FilesSource
from pyspark_lookup.sources.iceberg.source import IcebergSource
from pyspark_lookup.sources.managed.source import LogSource
from pyspark_lookup.sources.opening import Opener
from pyspark_lookup.sources.providers.provided_tables import ProvidedTables
from pyspark_lookup.versions.version_source import VersionSource

SOURCES: list[type[VersionSource]] = [LogSource, DeltaSource, IcebergSource, FilesSource]
"""The sources of all kinds, in the order in which they are asked for the kind of a path."""
OPENERS: list[type[Opener]] = [ProvidedTables]
"""Openers of references that name no files. They are asked before the sources."""
