"""What tests of large tables share, whose files are columns: from how many files on, tables of each kind, another process, and columns that are lost."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from pyspark_lookup import LookupTable
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.errors import CacheFullError
from pyspark_lookup.lookup import lookup_table as api
from pyspark_lookup.lookup.runtime import Runtime
from pyspark_lookup.sources.delta.source import DeltaSource
from pyspark_lookup.sources.iceberg.source import IcebergSource
from pyspark_lookup.storage.disk import Disk
from tests.support.delta_tables import by_deltalake
from tests.support.disks import flipped
from tests.support.fakes import wait_until_settled
from tests.support.fuzzing import BY_NIGHT
from tests.support.iceberg_writing import IcebergTable

FILES = 16
Lose = Callable[[Iterable[Path]], None]
Row = dict[str, Any]


@pytest.fixture(autouse=True)
def mapped_from(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """So many files become columns: half of the tests read a table of one as they read one of thousands, the others by night."""
    count = (1, 1000)[(zlib.crc32(request.node.nodeid.encode()) + BY_NIGHT) % 2]
    for source in (DeltaSource, IcebergSource):
        monkeypatch.setattr(source, "mapped_from", count)
    return count


@pytest.fixture
def restart(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """What is opened from now on is of another process."""

    def begin() -> None:
        runtime = Runtime(HostClock(), random.Random())
        monkeypatch.setattr(api, "runtime", lambda: runtime)

    begin()
    return begin


@pytest.fixture(params=["removed", "damaged", "full"])
def lose(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Lose:
    """Makes what lies there unreadable; or nothing can be put there, as there is no room."""
    if request.param == "full":
        monkeypatch.setattr(Disk, "create_segment", mock.Mock(side_effect=CacheFullError("no room")))

    def lost(paths: Iterable[Path]) -> None:
        for path in paths:
            if request.param == "damaged":
                path.write_bytes(flipped(content := path.read_bytes(), len(content) * 4))
            else:
                path.unlink()

    return lost


def row(id_: int, region: str = "eu", name: str = "") -> Row:
    return {"id": id_, "name": name or f"n{id_:03}", "region": region}


def in_order(rows: Iterable[Row]) -> list[Row]:
    return sorted(
        ({name: one[name] for name in ("id", "name", "region")} for one in rows), key=lambda one: [*one.values()]
    )


def rows_of(reader: LookupTable) -> list[Row]:
    return in_order(reader.scan().to_pylist())


def snapshot_files(cache: Path, prefix: str = "") -> set[str]:
    return {path.name for path in cache.glob(f"**/snapshots/*/{prefix}*")}


class LargeDelta:
    """`FILES` commits of ten rows each, in two regions, with a checkpoint after seven of them."""

    def __init__(self, home: Path) -> None:
        self.path = home / "t"
        fill(self)

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
        fill(self)

    def append(self, *rows: Row) -> None:
        self.table.commit(self.table.data(rows))
        wait_until_settled(self.path / "metadata" / "version-hint.text")

    def change(self, step: int) -> None:
        files = [entry for entry in self.table.live() if not entry.file["content"]]
        self.table.commit([], files[step::5])
        self.append(*map(row, range(1000 + step * 100, 1020 + step * 100)))
        eu = self.table.partition_of(row(0))
        self.table.commit([self.table.equality([{"id": 1000 + step * 100}], ["id"], partition=eu)])
        if step == 2:
            self.table.commit(rewrite=True)

    def empty(self) -> None:
        self.table.commit([], self.table.live())

    def version(self) -> int:
        return int(self.table.meta["current-snapshot-id"])

    def rows(self) -> list[Row]:
        return rows_in(self.table)


LargeTable = LargeDelta | LargeIceberg


def fill(table: LargeTable) -> None:
    for number in range(FILES):
        table.append(*(row(id_, ("eu", "ü/ %")[number % 2]) for id_ in range(number * 10, number * 10 + 10)))


def rows_in(table: IcebergTable) -> list[Row]:
    """The rows of an Iceberg table that no delete names."""
    files = [entry for entry in table.live() if not entry.file["content"]]
    return in_order(one for entry in files for _, one in table.rows_of(entry))
