"""A Delta table: written by delta-rs, its deletion vectors by hand, and read by delta-rs after each step."""

import json
import random
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder, write_deltalake

from tests.models.adapter import DrawnRows, Ground, Past
from tests.models.answers import Content, Row, known_content
from tests.models.histories import Step
from tests.models.values import shown
from tests.support.delta_evaluation import live_files
from tests.support.delta_tables import give_vectors, write_vector

_REMOVED_FROM_LOG = 2  # of three commits before a checkpoint


class Delta(DrawnRows):
    """A Delta table, partitioned by its columns of text, with deletion vectors or without."""

    values = ("01", "1", "eu", "b c", "ü/%", None)

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._has_vectors = ground.new_serial() % 2 == 0
        self._versions: dict[int, Content] = {}
        self._kept_from = 0

    @property
    def _table(self) -> DeltaTable:
        return DeltaTable(self.name)

    def content(self) -> Content:
        return self._versions[max(self._versions)]

    def past(self) -> list[Past]:
        return [
            Past({"lookup.version": str(version)}, lambda content=content: content, version >= self._kept_from)
            for version, content in self._versions.items()
        ]

    def take(self, step: Step, rng: random.Random) -> None:
        count = step.args[1] if len(step.args) > 1 else 1
        condition = f"id % {rng.randint(2, 7)} = {rng.randrange(2)}"
        match step.op:
            case "append" | "overwrite":
                self._write(self.drawn_rows(step.op, count, rng), step.op)
            case "upsert" | "transaction":
                self._merge(self.drawn_rows("upsert", count, rng))
            case "delete":
                self._table.delete(condition)
            case "update":
                self._table.update(updates={"v": "7", "c": "'updated'"}, predicate=condition)
            case "delete_places":
                self._delete_places(rng)
            case "alter":
                self.schema = pa.schema([*self.schema, (f"x{self.ground.new_serial()}", pa.int64())])
                self._write([], "append")
            case "restore":
                self._restore(rng)
            case "compact":
                self._table.optimize.compact()
            case "checkpoint":
                self._table.create_checkpoint()
            case "clean":
                self._clean()
            case "vacuum":
                self._table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
                self._kept_from = self._table.version()
        self._note()

    def _write(self, rows: list[Row], mode: Any) -> None:
        has_vectors = {"delta.enableDeletionVectors": "true"} if self._has_vectors and not self._versions else None
        how = {"mode": mode, "partition_by": self.texts or None, "schema_mode": "merge", "configuration": has_vectors}
        write_deltalake(self.name, pa.Table.from_pylist(rows, self.schema), **how)

    def _merge(self, rows: list[Row]) -> None:
        of_key = " AND ".join(f"t.{name} = s.{name}" for name in self.keys)
        new = pa.Table.from_pylist(rows, self.schema)
        merge = self._table.merge(new, of_key, source_alias="s", target_alias="t")
        merge.when_matched_update({"s": "s.s", "c": "s.c"}).when_not_matched_insert_all().execute()

    def _delete_places(self, rng: random.Random) -> None:
        """Delete rows by a vector, from a file without deleted rows."""
        if not self._has_vectors:
            return
        whole = [add for _, add in sorted(live_files(self.ground.path).items()) if not add["deletionVector"]]
        if not whole:
            return
        add = rng.choice(whole)
        count = json.loads(add["stats"])["numRecords"]
        vector = write_vector(self.ground.path, rng.sample(range(count), rng.randint(1, count)), rng.choice("iup"))
        give_vectors(self.ground.path, [add], [vector])

    def _restore(self, rng: random.Random) -> None:
        earlier = [version for version in self._versions if version >= self._kept_from][:-1]
        if earlier:
            version = rng.choice(earlier)
            self._table.restore(version)
            self.schema = pa.schema([*self._versions[version].data])

    def _clean(self) -> None:
        """A checkpoint, and the clean-up of the log before it."""
        table = self._table
        table.create_checkpoint()
        commits = sorted((self.ground.path / "_delta_log").glob("*.json"))
        removed = commits[: len(commits) * _REMOVED_FROM_LOG // (_REMOVED_FROM_LOG + 1)]
        current = f"{table.version():020d}"
        removed += [name for name in commits[0].parent.glob("*.checkpoint.*") if not name.name.startswith(current)]
        for file in removed:
            file.unlink()
        self._kept_from = table.version()

    def _note(self) -> None:
        """Remember what delta-rs reads in the version that is there now."""
        table = self._table
        if table.version() in self._versions:
            return
        rows = pa.table(QueryBuilder().register("t", table).execute("SELECT * FROM t"))
        rows = rows.select([field.name for field in table.schema().fields])
        schema = pa.schema([(field.name, shown(field.type)) for field in rows.schema])
        self._versions[table.version()] = known_content(schema, rows.to_pylist(), self.texts)
