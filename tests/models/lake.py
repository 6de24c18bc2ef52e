"""Delta and Iceberg tables of a history: written by delta-rs and PyIceberg, beside a plain list of the rows that they should have."""

from __future__ import annotations

import abc
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table
from pyiceberg.types import LongType

from tests.models.histories import Step
from tests.models.modelled import Modelled, Row

_REMOVED_FROM_LOG = 2  # of three commits before a checkpoint


class LakeTable(Modelled):
    """A table of a format whose metadata says what its files are."""

    partitioned = True

    def __init__(
        self, path: Path, hosts: Path, keys: tuple[str, ...], texts: list[str], new_serial: Callable[[], int]
    ) -> None:
        super().__init__(path, hosts, keys, texts, new_serial)
        self._rows: list[Row] = []
        self._kept_from = -1

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple({name: row.get(name) for name in self.schema.names} for row in self._rows)

    def take(self, step: Step, rng: random.Random) -> None:
        _, count, *_ = step.args
        match step.op:
            case "append" | "upsert" | "delete" | "overwrite":
                self._write(step.op, self.drawn_rows(step.op, count, rng))
            case "transaction":
                self._write("upsert", self.drawn_rows("upsert", count, rng))
            case "alter":
                name = f"x{self._new_serial()}"
                self.schema = pa.schema([*self.schema, (name, pa.int64())])
                self._add_column(name)
            case "copy_aside" | "restore" | "swap_copies" | "begin":
                earlier = [version for version in self.versions if self.keeps(version)][:-1]
                if earlier:
                    self._restore(rng.choice(earlier))
            case "compact" | "vacuum" | "commit":
                self._maintain(step.op)
        self._note()

    def _write(self, op: str, new: list[Row]) -> None:
        if op in ("upsert", "delete"):
            named = {key for row in new if None not in (key := self.key_of(row))}
            if named:
                self._delete(sorted(named))
            self._rows = [row for row in self._rows if self.key_of(row) not in named]
        if op == "delete":
            return
        self._put(pa.Table.from_pylist(new, self.schema), op == "overwrite")
        self._rows = new if op == "overwrite" else self._rows + new

    def _predicate(self, keys: list[tuple[Any, ...]]) -> str:
        def equal(name: str, value: Any) -> str:
            return f"{name} = " + (f"'{value}'" if isinstance(value, str) else str(value))

        return " OR ".join(
            "(" + " AND ".join(equal(name, value) for name, value in zip(self._keys, key, strict=True)) + ")"
            for key in keys
        )

    @abc.abstractmethod
    def _put(self, rows: pa.Table, overwrite: bool) -> None: ...

    @abc.abstractmethod
    def _delete(self, keys: list[tuple[Any, ...]]) -> None: ...

    @abc.abstractmethod
    def _add_column(self, name: str) -> None: ...

    @abc.abstractmethod
    def _restore(self, version: int) -> None: ...

    @abc.abstractmethod
    def _maintain(self, op: str) -> None: ...

    @abc.abstractmethod
    def _note(self) -> None:
        """Remember what the version that is there now holds."""


class DeltaLake(LakeTable):
    """A Delta table."""

    def _table(self) -> DeltaTable:
        return DeltaTable(str(self._path))

    def _put(self, rows: pa.Table, overwrite: bool) -> None:
        mode: Any = "overwrite" if overwrite else "append"
        write_deltalake(str(self._path), rows, mode=mode, partition_by=self.texts or None, schema_mode="merge")

    def _delete(self, keys: list[tuple[Any, ...]]) -> None:
        self._table().delete(self._predicate(keys))

    def _add_column(self, name: str) -> None:
        self._put(self.schema.empty_table(), False)

    def _restore(self, version: int) -> None:
        self._table().restore(version)
        self.schema, rows = self.versions[version]
        self._rows = list(rows)

    def _maintain(self, op: str) -> None:
        table = self._table()
        if op == "compact":
            table.optimize.compact()
        elif op == "vacuum":
            table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
            self._kept_from = table.version()
        else:  # a checkpoint, and the clean-up of the log before it
            table.create_checkpoint()
            commits = sorted((self._path / "_delta_log").glob("*.json"))
            for commit in commits[: len(commits) * _REMOVED_FROM_LOG // (_REMOVED_FROM_LOG + 1)]:
                commit.unlink()
            self._kept_from = table.version()

    def _note(self) -> None:
        self.versions[self._table().version()] = (self.schema, self.rows)

    def keeps(self, version: int) -> bool:
        return version >= self._kept_from


class IcebergLake(LakeTable):
    """An Iceberg table in a directory with a version hint; a catalog of its own commits it."""

    def __init__(
        self, path: Path, hosts: Path, keys: tuple[str, ...], texts: list[str], new_serial: Callable[[], int]
    ) -> None:
        super().__init__(path, hosts, keys, texts, new_serial)
        place = path.parent / f"catalog{new_serial()}.db"
        catalog = SqlCatalog("c", uri=f"sqlite:///{place}", warehouse=path.parent.as_uri())
        catalog.create_namespace("ns")
        self._table: Table = catalog.create_table("ns.t", self.schema, location=path.as_uri())
        if texts:
            with self._table.update_spec() as spec:
                for name in texts:
                    spec.add_identity(name)

    def _put(self, rows: pa.Table, overwrite: bool) -> None:
        if overwrite:
            with warnings.catch_warnings(action="ignore"):  # there may be nothing to delete
                self._table.overwrite(rows)
        else:
            self._table.append(rows)

    def _delete(self, keys: list[tuple[Any, ...]]) -> None:
        with warnings.catch_warnings(action="ignore"):
            self._table.delete(self._predicate(keys))

    def _add_column(self, name: str) -> None:
        with self._table.update_schema() as update:
            update.add_column(name, LongType())

    def _restore(self, version: int) -> None:
        self._table.manage_snapshots().set_current_snapshot(version).commit()
        _, rows = self.versions[version]
        self._rows = list(rows)  # with the columns of now

    def _maintain(self, op: str) -> None:
        if op == "vacuum":
            current = self._table.current_snapshot()
            others = [one.snapshot_id for one in self._table.snapshots() if one != current]
            if others:
                self._table.maintenance.expire_snapshots().by_ids(others).commit()
                self.versions = {}

    def _note(self) -> None:
        name = self._table.metadata_location.rpartition("/")[2].removesuffix(".metadata.json")
        hint = self._path / "metadata" / "version-hint.text"
        hint.with_suffix(".new").write_text(name)
        hint.with_suffix(".new").replace(hint)
        snapshot = self._table.current_snapshot()
        if snapshot is not None and snapshot.snapshot_id not in self.versions:
            self.versions[snapshot.snapshot_id] = (self.schema, self.rows)
