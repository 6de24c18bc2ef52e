"""What tests of Iceberg tables share: tables as users open them, catalogs to write into."""

from pathlib import Path

from pyiceberg.catalog.sql import SqlCatalog

from tests.support.lake_tables import opened

__all__ = ["opened", "sql_catalog"]


def sql_catalog(home: Path) -> tuple[SqlCatalog, dict[str, str]]:
    """A catalog in a file of a directory, and its properties; it has the namespace `ns`."""
    properties = {"type": "sql", "uri": f"sqlite:///{home / 'catalog.db'}"}
    catalog = SqlCatalog("tests", **{**properties, "warehouse": home.as_uri()})
    catalog.create_namespace_if_not_exists("ns")
    return catalog, properties
