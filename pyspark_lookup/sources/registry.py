"""The lists of all kinds of tables. Each kind is a package; to add a kind, add its package to the lists here."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark_lookup.errors import OptionError
from pyspark_lookup.options.conf_file import conf_file_options
from pyspark_lookup.options.lookup_options import KindOptions, LookupOptions
from pyspark_lookup.options.parsing import parse_positive_duration_s
from pyspark_lookup.sources.catalogs import CatalogOptions
from pyspark_lookup.sources.credentials import CredentialOptions
from pyspark_lookup.sources.delta.source import DeltaSource
from pyspark_lookup.sources.delta.unity import UnityOptions
from pyspark_lookup.sources.files.source import FilesSource
from pyspark_lookup.sources.iceberg.source import IcebergOptions, IcebergSource
from pyspark_lookup.sources.managed.options import ChangeOptions, WriteOptions
from pyspark_lookup.sources.managed.source import LogSource
from pyspark_lookup.sources.opening import Opener
from pyspark_lookup.sources.providers.databases.database_table import DatabaseOptions
from pyspark_lookup.sources.providers.provided_tables import ProvidedTables
from pyspark_lookup.sources.providers.provider import ProviderOptions
from pyspark_lookup.sources.providers.services.http import HttpOptions
from pyspark_lookup.sources.providers.services.redis import RedisOptions
from pyspark_lookup.versions.version_source import VersionSource

SOURCES: list[type[VersionSource]] = [LogSource, DeltaSource, IcebergSource, FilesSource]
"""The sources of all kinds of tables at paths. They are asked in this order whether a path is a table of their kind."""
OPENERS: list[type[Opener]] = [ProvidedTables]
"""The openers of tables of other systems. They are asked before the sources whether the options name such a table."""
OPTIONS: list[type[KindOptions]] = [
    ProviderOptions,
    CredentialOptions,
    DatabaseOptions,
    HttpOptions,
    RedisOptions,
    CatalogOptions,
    UnityOptions,
    IcebergOptions,
    ChangeOptions,
    WriteOptions,
]
"""The groups of options that only one kind of table has. They are checked and documented in this order."""
SYSTEM_KEYS = frozenset[str]().union(*(kind.system_keys for kind in OPTIONS))
"""The options that name a table of another system, in place of a path."""
CATALOG_KEYS = frozenset[str]().union(*(kind.catalog_keys for kind in OPTIONS))
"""The options that name a catalog. If one of them is set, the path is the name of a table in that catalog."""


def parse_options(
    read: Mapping[str, str],
    table: Mapping[str, str] | None = None,
    conf: Mapping[str, str] | None = None,
    origin: str = "read option",
) -> LookupOptions:
    """The options of a read, from three sources (see `LookupOptions.parse`).

    `read`: the read's own options. `table`: the options stored with the table, if any. `conf`: by default the options in this host's conf
    file. `origin` names the read's options in errors.
    """
    return LookupOptions.parse(read, table, conf_file_options() if conf is None else conf, origin, OPTIONS)


def take_retry_delay(options: Mapping[str, str]) -> tuple[dict[str, str], float | None]:
    """(the options of a lookup whose facts wait, without the one that says how often keys without rows are looked up again; its seconds or None).

    The option is taken only if it stands alone: with the other options of retries it means that each lookup repeats itself. Raises OptionError
    if it is not a duration.
    """
    delays = {kind.retry_delay for kind in OPTIONS if kind.retry_delay is not None}
    groups = tuple(f"{delay.rpartition('.')[0]}." for delay in delays)
    keys = [key for key in options if key.lower().startswith(groups)]
    if len(keys) != 1 or keys[0].lower() not in delays:
        return dict(options), None
    try:
        delay_s = parse_positive_duration_s(options[keys[0]])
    except ValueError as problem:
        raise OptionError(f"option {keys[0]} = {options[keys[0]]!r}: expected {problem}") from None
    return {key: value for key, value in options.items() if key not in keys}, delay_s


def names_system(options: Mapping[str, str]) -> bool:
    """Whether the options name a table of another system, in place of a path."""
    return not SYSTEM_KEYS.isdisjoint(key.lower() for key in options)


def names_catalog(options: Mapping[str, str]) -> bool:
    """Whether the options name a catalog, so that their path is the name of a table in this catalog."""
    return not CATALOG_KEYS.isdisjoint(key.lower() for key in options)
