"""Random histories of Delta tables: every version in every mode, on a host that follows along and on one that arrives late."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field, Schema, write_deltalake

from tests.support.delta_tables import append_commit, by_deltalake, files_of, opened, vector_of
from tests.support.fuzzing import seeds
from tests.support.lake_tables import MODES, Rows, rows_of

KEYS = 30


def drawn(rng: random.Random, count: int) -> pa.Table:
    return pa.table(
        {
            "id": pa.array([rng.randrange(KEYS) for _ in range(count)], pa.int64()),
            "part": pa.array([rng.choice(["a", "b c", "ü/%", None]) for _ in range(count)], pa.string()),
            "name": pa.array([rng.choice(["x", "y", None, "z" * 40]) for _ in range(count)], pa.string()),
            "value": pa.array([rng.choice([None, 1.5, -2.0]) for _ in range(count)], pa.float64()),
        }
    )


class History:
    """A Delta table that changes by one operation after the other."""

    def __init__(self, path: Path, rng: random.Random) -> None:
        self.path, self.rng = path, rng
        partitioned = rng.choice([None, ["part"]])
        configuration = {"delta.enableDeletionVectors": "true"} if rng.random() < 0.5 else {}
        write_deltalake(str(path), drawn(rng, 20), partition_by=partitioned, configuration=configuration)
        self.vectors = bool(configuration)

    def step(self) -> str:
        """One operation, and its name."""
        table, rng = DeltaTable(str(self.path)), self.rng
        ways = ["append", "append", "overwrite", "merge", "delete", "update", "optimize", "checkpoint", "evolve"]
        way = rng.choice([*ways, *(["vector"] * 3 if self.vectors else [])])
        condition = f"id % {rng.randint(2, 7)} = {rng.randrange(2)}"
        if way == "append":
            write_deltalake(str(self.path), self.fitting(drawn(rng, rng.randrange(1, 15))), mode="append")
        elif way == "overwrite":
            write_deltalake(str(self.path), self.fitting(drawn(rng, rng.randrange(1, 15))), mode="overwrite")
        elif way == "merge":
            rows = drawn(rng, 6).select(["id", "name"]).group_by("id").aggregate([("name", "min")])
            merge = table.merge(rows.rename_columns(["id", "name"]), "t.id = s.id", source_alias="s", target_alias="t")
            merge.when_matched_update({"name": "s.name"}).when_not_matched_insert(
                {"id": "s.id", "name": "s.name"}
            ).execute()
        elif way == "delete":
            table.delete(condition)
        elif way == "update":
            table.update(updates={"value": "7.25"}, predicate=condition)
        elif way == "optimize":
            table.optimize.compact()
        elif way == "checkpoint":
            table.create_checkpoint()
        elif way == "evolve":
            names = {field.name for field in table.schema().fields}
            fields = [Field(name, "long") for name in ("extra", "more") if name not in names][:1]
            if fields:
                table.alter.add_columns(fields)
        elif way == "vector":
            self.delete_by_vector(table)
        return way

    def fitting(self, rows: pa.Table) -> pa.Table:
        for field in Schema.from_arrow(DeltaTable(str(self.path)).schema().to_arrow()).fields[rows.num_columns :]:
            column = [self.rng.choice([None, 1, 2]) for _ in range(rows.num_rows)]
            rows = rows.append_column(field.name, pa.array(column, pa.int64()))
        return rows

    def delete_by_vector(self, table: DeltaTable) -> None:
        """Delete some rows of a file that has none deleted."""
        files = {key: add for key, add in files_of(self.path, table.version()).items() if not key[1]}
        if not files:
            return
        add = self.rng.choice([files[key] for key in sorted(files)])
        rows = json.loads(add["stats"])["numRecords"]
        vector = vector_of(self.path, self.rng.sample(range(rows), self.rng.randint(1, rows)), self.rng.choice("iup"))
        removed = {"path": add["path"], "deletionTimestamp": 1, "dataChange": True}
        append_commit(self.path, [{"remove": removed}, {"add": {**add, "dataChange": True, "deletionVector": vector}}])


@pytest.mark.parametrize("seed", seeds(2))
def test_every_version(tmp_path: Path, seed: int) -> None:
    """Scans and lookups of the current version after each operation, and of each version at the end; vacuum takes what nobody needs."""
    rng = random.Random(seed)
    history = History(tmp_path / "table", rng)
    truth: list[Rows] = []
    steps = ["create"]
    for number in range(12):
        table = by_deltalake(history.path)
        truth += [rows_of(table)] * (DeltaTable(str(history.path)).version() + 1 - len(truth))
        for mode in MODES:
            for cache in ("follows", f"late{number}"):
                of = (seed, steps, mode, cache)
                dim = opened(history.path, tmp_path / cache, mode, "id")
                asked = [key for key in range(KEYS + 1) if rng.random() < 0.7]
                wanted = [key for key in table.column("id").to_pylist() if key in asked]
                found = dim.get_many(asked)
                assert sorted(found.column("id").to_pylist()) == sorted(wanted), of
                mine = rows_of(found.drop_columns(["key_index"]))
                assert mine == rows_of(
                    pa.Table.from_pylist(
                        [r for r in table.to_pylist() if r["id"] in asked], found.drop_columns(["key_index"]).schema
                    )
                ), of
                if mode != "partial":
                    assert rows_of(dim.scan()) == truth[-1], of
                assert dim.metrics()["numLoadFailures"] == 0, of  # which an answer from the store would hide
        steps.append(history.step())
    table = by_deltalake(history.path)
    truth += [rows_of(table)] * (DeltaTable(str(history.path)).version() + 1 - len(truth))
    for version in rng.sample(range(len(truth)), len(truth)):
        for mode in ("none", "full"):
            found = opened(history.path, tmp_path / "follows", mode, "id", version=version).scan()
            assert rows_of(found) == truth[version], (seed, steps, version, mode)
    DeltaTable(str(history.path)).vacuum(0, dry_run=False, enforce_retention_duration=False)
    assert rows_of(opened(history.path, tmp_path / "after").scan()) == truth[-1]
