"""A managed table with its writer, and a host that has read its log."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from pyspark_lookup import LookupTable
from pyspark_lookup.sources.registry import parse_options
from pyspark_lookup.versions.model import Table, TableVersion, VersionMetadata
from tests.support.fakes import Host, make_host


def rows(ids: range | list[int], version: int = 1) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64()), "version": pa.array([version] * len(ids), pa.int64())})


class Dim:
    """A managed table and a host that writes it."""

    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path / "dim"
        self._cache = tmp_path / "cache"
        self.writer = self.table("writer", {"lookup.keys": "id"})

    def table(self, host: str, options: dict[str, str] | None = None) -> LookupTable:
        return LookupTable(str(self.path), {"lookup.cache.dir": str(self._cache / host), **(options or {})})

    def known(self) -> tuple[Host, Table, TableVersion, VersionMetadata]:
        """A host that has read the table's log, and what it knows."""
        host = make_host(str(self.path), self._cache / "host")
        table, version = host.resolver.discover(parse_options({"path": str(self.path)}))
        assert version.metadata is not None
        return host, table, version, version.metadata
