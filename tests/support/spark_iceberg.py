"""An Iceberg table that changes while tests read it through Spark."""

from __future__ import annotations

from pathlib import Path

from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType

from tests.support.fakes import wait_until_settled
from tests.support.iceberg_tables import sql_catalog
from tests.support.spark_lakes import rows_of

_SCHEMA = Schema(
    NestedField(1, "id", LongType()), NestedField(2, "version", LongType()), NestedField(3, "part", StringType())
)
_SPEC = PartitionSpec(PartitionField(3, 1000, IdentityTransform(), "part"))


class Dim:
    """A table that PyIceberg writes. Readers name it by `path` and `options`: in an SQL catalog, or by the hint in its directory."""

    def __init__(self, home: Path, named_by: str) -> None:
        catalog, properties = sql_catalog(home)
        self.table = catalog.create_table("ns.dim", _SCHEMA, partition_spec=_SPEC)
        self.path, self.options = "ns.dim", {"lookup.catalog": "tests"}
        self.options |= {f"lookup.catalog.{name}": text for name, text in properties.items()}
        self._hint = None
        if named_by == "hint":
            self.path, self.options = self.table.location().removeprefix("file://"), {}
            self._hint = Path(self.path, "metadata", "version-hint.text")

    def append(self, ids: range, version: int) -> int:
        """Add rows, and the snapshot that has them."""
        self.table.append(rows_of(ids, version))
        return self.publish()

    def delete(self, where: str) -> int:
        self.table.delete(where)
        return self.publish()

    def publish(self) -> int:
        """Have the hint say what the catalog says."""
        if self._hint is not None:
            self._hint.write_text(Path(self.table.metadata_location).name)
            wait_until_settled(self._hint)
        snapshot = self.table.current_snapshot()
        assert snapshot is not None
        return snapshot.snapshot_id
