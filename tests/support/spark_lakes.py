"""Tables of Delta and Iceberg that change while tests read them through Spark."""

from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from tests.support.iceberg_definition import sql_catalog
from tests.support.spark_tables import NO_OPTIONS


def make_rows(ids: range, version: int) -> pa.Table:
    """Rows (id, version, part), in which their writer says which version it has made."""
    return pa.table({"id": [*ids], "version": [version] * len(ids), "part": [f"p {key % 2}" for key in ids]})


class DeltaDim:
    """A table that delta-rs writes."""

    options = NO_OPTIONS

    def __init__(self, home: Path) -> None:
        self.path = str(home / "dim")

    def append(self, ids: range, version: int) -> int:
        write_deltalake(self.path, make_rows(ids, version), mode="append", partition_by=["part"])
        return DeltaTable(self.path).version()

    def delete(self, where: str) -> int:
        DeltaTable(self.path).delete(where)
        return DeltaTable(self.path).version()


class IcebergDim:
    """A table of an SQL catalog that PyIceberg writes."""

    def __init__(self, home: Path) -> None:
        catalog, properties = sql_catalog(home)
        self.table = catalog.create_table("ns.dim", make_rows(range(1), 0).schema)
        with self.table.update_spec() as spec:
            spec.add_identity("part")
        self.path, self.options = "ns.dim", {"lookup.catalog": "tests"}
        self.options |= {f"lookup.catalog.{name}": text for name, text in properties.items()}

    def append(self, ids: range, version: int) -> int:
        """Add rows, and the snapshot that has them."""
        self.table.append(make_rows(ids, version))
        return self._snapshot()

    def delete(self, where: str) -> int:
        self.table.delete(where)
        return self._snapshot()

    def _snapshot(self) -> int:
        return self.table.current_snapshot().snapshot_id


LakeTable = DeltaDim | IcebergDim
