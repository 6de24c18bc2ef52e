"""Large tables of Delta and Iceberg, which change alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from pyspark_lookup import LookupTable
from tests.support.delta_tables import by_deltalake
from tests.support.fakes import wait_until_settled
from tests.support.iceberg_writing import IcebergTable

FILES = 13
Row = dict[str, Any]


def row(id_: int, region: str = "eu", name: str = "") -> Row:
    return {"id": id_, "name": name or f"n{id_:03}", "region": region}


def in_order(rows: Iterable[Row]) -> list[Row]:
    return sorted(
        ({name: row[name] for name in ("id", "name", "region")} for row in rows), key=lambda row: [*row.values()]
    )


def scan_rows(reader: LookupTable) -> list[Row]:
    return in_order(reader.scan().to_pylist())


def snapshot_files(cache: Path, prefix: str = "") -> set[str]:
    return {path.name for path in cache.glob(f"**/snapshots/*/{prefix}*")}


class LargeDelta:
    """`FILES` commits of ten rows each, in two regions, with a checkpoint after seven of them."""

    def __init__(self, home: Path) -> None:
        self.path = home / "t"
        fill(self.append)

    def append(self, *rows: Row) -> None:
        write_deltalake(str(self.path), pa.Table.from_pylist(rows), mode="append", partition_by=["region"])
        if self.version() == 6:
            DeltaTable(str(self.path)).create_checkpoint()

    def change(self, step: int) -> None:
        DeltaTable(str(self.path)).delete(f"id % 40 = {step}")
        self.append(*map(row, range(1000 + step * 100, 1020 + step * 100)))

    def empty(self) -> None:
        DeltaTable(str(self.path)).delete()

    def version(self) -> int:
        return DeltaTable(str(self.path)).version()

    def rows(self) -> list[Row]:
        return in_order(by_deltalake(self.path).to_pylist())


class LargeIceberg:
    """The same, with a manifest for each file. What names a version is old enough to be kept."""

    def __init__(self, home: Path) -> None:
        self.path = home / "t"
        columns = dict(zip(row(0), ("int", "string", "string"), strict=True))
        self.table = IcebergTable.create(self.path, columns, spec=[("region", "identity")])
        fill(lambda *rows: self.table.commit(self.table.data(rows)))
        self._settle()

    def append(self, *rows: Row) -> None:
        self.table.commit(self.table.data(rows))
        self._settle()

    def _settle(self) -> None:
        wait_until_settled(self.path / "metadata" / "version-hint.text")

    def change(self, step: int) -> None:
        files = [entry for entry in self.table.live() if not entry.file["content"]]
        self.table.commit([], files[step::5])
        self.append(*map(row, range(1000 + step * 100, 1020 + step * 100)))
        eu = self.table.make_partition(row(0))
        self.table.commit([self.table.equality([{"id": 1000 + step * 100}], ["id"], partition=eu)])
        if step == 2:
            self.table.commit(rewrite=True)

    def empty(self) -> None:
        self.table.commit([], self.table.live())

    def version(self) -> int:
        return int(self.table.meta["current-snapshot-id"])

    def rows(self) -> list[Row]:
        return read_live_rows(self.table)


LargeTable = LargeDelta | LargeIceberg


def fill(append: Callable[..., object]) -> None:
    for number in range(FILES):
        append(*(row(id_, ("eu", "ü/ %")[number % 2]) for id_ in range(number * 10, number * 10 + 10)))


def read_live_rows(table: IcebergTable) -> list[Row]:
    """The rows of an Iceberg table that no delete names."""
    files = [entry for entry in table.live() if not entry.file["content"]]
    return in_order(row for entry in files for _, row in table.live_rows(entry))
