"""What tests of Iceberg tables share: tables as users name them, catalogs to write into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyiceberg.catalog.sql import SqlCatalog

from pyspark_lookup import LookupTable
from tests.support.lake_tables import MODES


def opened(
    table: Path | str,
    cache: Path,
    mode: str = "none",
    keys: str | None = None,
    catalog: dict[str, str] | None = None,
    **options: Any,
) -> LookupTable:
    """A table in a mode of `MODES`, on the host of a cache directory; `table`: a directory, a metadata.json, or `namespace.name` in a
    `catalog` of these properties; `options`: as `version=3`."""
    given = {"lookup.cache.dir": str(cache), **MODES[mode], **({} if keys is None else {"lookup.keys": f"`{keys}`"})}
    if catalog is not None:
        given |= {"lookup.catalog": "tests", **{f"lookup.catalog.{name}": value for name, value in catalog.items()}}
    return LookupTable(str(table), given | {f"lookup.{name}": str(value) for name, value in options.items()})


def sql_catalog(home: Path) -> tuple[SqlCatalog, dict[str, str]]:
    """A catalog in a file of a directory, and its properties; it has the namespace `ns`."""
    properties = {"type": "sql", "uri": f"sqlite:///{home / 'catalog.db'}"}
    catalog = SqlCatalog("tests", **{**properties, "warehouse": home.as_uri()})
    catalog.create_namespace_if_not_exists("ns")
    return catalog, properties
