"""A kind of table that only tests know: its versions, partition values and deleted rows are in one JSON file beside the data.

It shows what a `VersionSource` has to be, and that nothing else asks what kind a table is. Importing it makes it known.
"""

import dataclasses
import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pyspark_lookup.columnar.keys import Numbers
from pyspark_lookup.columnar.types import text_of_schema
from pyspark_lookup.errors import VersionGoneError
from pyspark_lookup.sources.registry import SOURCES
from pyspark_lookup.storage.disk import key_of
from pyspark_lookup.storage.stores import IMMUTABLE, FileStatistics, FileVersion, Listing
from pyspark_lookup.versions.model import DELETES, Table, TableVersion, VersionMetadata
from pyspark_lookup.versions.version_source import Answer, Question, VersionSource

__all__ = ["InlineDeletes", "ToySource", "commit"]
_NAME = "_toy.json"


@dataclasses.dataclass(frozen=True)
class InlineDeletes:
    """Deleted rows of one file, by their positions: the value itself says them, as a deletion vector in memory."""

    path: str
    rows: tuple[int, ...]
    place = None
    keys = None

    @property
    def name(self) -> str:
        return key_of(self.path, self.rows)

    def positions(self, data: bytes | memoryview) -> Mapping[str, Numbers]:
        return {self.path: np.array(self.rows, np.int64)}

    def to_json(self) -> list[Any]:
        return ["toy", self.path, list(self.rows)]


class ToySource(VersionSource):
    """Tables of that kind."""

    kinds = ("TOY",)

    @classmethod
    def detect_kind(cls, status: FileVersion | Listing) -> str | None:
        toy = isinstance(status, Listing) and any(file.url.endswith(f"/{_NAME}") for file in status.files)
        return cls.kinds[0] if toy else None

    def current(self, question: Question) -> Answer:
        versions = self._versions(question.table)
        pinned = question.table.pinned
        if pinned is None or (isinstance(pinned, int) and 0 <= pinned < len(versions)):
            return Answer(versions[-1 if pinned is None else int(pinned)], question.started_s)
        raise VersionGoneError(f"{question.table.url} has no version {pinned}")

    def candidates(
        self, table: Table, digest: str, newest: float, ask: Callable[[], TableVersion]
    ) -> Sequence[TableVersion]:
        return [ask(), *self._versions(table)]

    def history(self, table: Table) -> list[dict[str, Any]] | None:
        return [{"version": v.newest, "committed_at": v.newest, "operation": "toy"} for v in self._versions(table)]

    def _versions(self, table: Table) -> list[TableVersion]:
        file = self._parts.ufs.get_meta(f"{table.url}/{_NAME}")
        states = json.loads(self._parts.ufs.read_ranges(file, [(0, file.size)])[0])
        return [_version(table, number, state) for number, state in enumerate(states)]


def _version(table: Table, number: int, state: dict[str, Any]) -> TableVersion:
    metadata = VersionMetadata(
        state["id"],
        number,
        "",
        key_of(state["id"], number),
        ("id",),
        state["schema"],
        partitions=("region",),
        number=number,
    )
    files = [
        FileVersion(
            f"{table.url}/{file['path']}",
            file["size"],
            IMMUTABLE,
            partition=(("region", file["region"]),),
            deletes=(InlineDeletes(file["path"], tuple(file["deleted"])),) if file["deleted"] else (),
            statistics=FileStatistics(file["rows"]),
        )
        for file in state["files"]
    ]
    return TableVersion(table.id, tuple(sorted(files, key=lambda file: file.url)), metadata)


def commit(
    directory: Path, rows: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]], deleted: Mapping[str, Sequence[int]]
) -> None:
    """A version with new files, by name and region, and with rows of files deleted, by name and position."""
    directory.mkdir(exist_ok=True)
    path = directory / _NAME
    states = json.loads(path.read_text()) if path.exists() else []
    files = [dict(file) for file in states[-1]["files"]] if states else []
    for (name, region), content in rows.items():
        data = pa.Table.from_pylist(
            [dict(row) for row in content], pa.schema([("id", pa.int64()), ("name", pa.string())])
        )
        pq.write_table(data, directory / name)
        size = (directory / name).stat().st_size
        files.append({"path": name, "size": size, "region": region, "rows": len(content), "deleted": []})
    for file in files:
        file["deleted"] = sorted({*file["deleted"], *deleted.get(file["path"], ())})
    columns = pa.schema([("id", pa.int64()), ("name", pa.string()), ("region", pa.string())])
    table_id = states[-1]["id"] if states else uuid.uuid4().hex
    states.append({"id": table_id, "schema": text_of_schema(columns), "files": files})
    (directory / "_new").write_text(json.dumps(states))
    os.replace(directory / "_new", path)


DELETES["toy"] = lambda found: InlineDeletes(str(found[0]), tuple(map(int, found[1])))
if ToySource not in SOURCES:
    SOURCES.insert(0, ToySource)


def people(first: int, count: int, version: int) -> list[dict[str, Any]]:
    return [{"id": id_, "name": f"{id_} of {version}"} for id_ in range(first, first + count)]
