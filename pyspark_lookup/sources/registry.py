"""The lists of all kinds of tables. Each kind is a package of its own; a new kind is added to the lists here."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark_lookup.options.conf_file import conf_file_options
from pyspark_lookup.options.lookup_options import KindOptions, LookupOptions
from pyspark_lookup.sources.delta.source import DeltaSource
from pyspark_lookup.sources.files.source import FilesSource
from pyspark_lookup.sources.iceberg.source import IcebergOptions, IcebergSource
from pyspark_lookup.sources.managed.options import ChangeOptions, WriteOptions
from pyspark_lookup.sources.managed.source import LogSource
from pyspark_lookup.sources.opening import Opener
from pyspark_lookup.sources.providers.provided_tables import ProvidedTables
from pyspark_lookup.sources.providers.provider import ProviderOptions
from pyspark_lookup.versions.version_source import VersionSource

SOURCES: list[type[VersionSource]] = [LogSource, DeltaSource, IcebergSource, FilesSource]
"""The sources of all kinds, in the order in which they are asked for the kind of a path."""
OPENERS: list[type[Opener]] = [ProvidedTables]
"""Openers of tables whose options name another system instead of files. They are asked before the sources."""
OPTIONS: list[type[KindOptions]] = [ProviderOptions, IcebergOptions, ChangeOptions, WriteOptions]
"""The options that only one kind of table has, in the order in which they are checked and shown."""
SYSTEM_KEYS = frozenset[str]().union(*(kind.system_keys for kind in OPTIONS))
"""Options that name a table of another system, in place of a path."""
CATALOG_KEYS = frozenset[str]().union(*(kind.catalog_keys for kind in OPTIONS))
"""Options that name a catalog. With one of them, the path is the name of a table in that catalog."""


def parse_options(
    read: Mapping[str, str],
    table: Mapping[str, str] | None = None,
    conf: Mapping[str, str] | None = None,
    origin: str = "read option",
) -> LookupOptions:
    """The options of a read of `table` (its stored options) under `conf`, by default this host's conf file: see `LookupOptions.parse`."""
    return LookupOptions.parse(read, table, conf_file_options() if conf is None else conf, origin, OPTIONS)


def names_system(options: Mapping[str, str]) -> bool:
    """Whether options name a table of another system, in place of a path."""
    return not SYSTEM_KEYS.isdisjoint(key.lower() for key in options)


def names_catalog(options: Mapping[str, str]) -> bool:
    """Whether options name a catalog, so that their path is the name of a table in it."""
    return not CATALOG_KEYS.isdisjoint(key.lower() for key in options)
