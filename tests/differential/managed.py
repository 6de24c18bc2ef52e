"""A managed table of a history: written by the package, beside a plain list of the rows that it should have."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pyspark_lookup import LookupTable
from pyspark_lookup.partial import shared
from pyspark_lookup.writing import compaction, files
from tests.differential.histories import Step

__all__ = ["Managed", "shrink_sizes"]

_COMPACT_AFTER = "4"


def shrink_sizes(patch: pytest.MonkeyPatch) -> None:
    """Small tables have from here on what large ones have: several files a write, row groups, partial folds, merges."""
    patch.setattr(compaction, "_ALWAYS", 2000)
    patch.setattr(compaction, "_ALWAYS_UNASKED", 1000)
    patch.setattr(files, "_FILE_BYTES", 400)
    patch.setattr(files, "_PART_BYTES", 1600)
    patch.setattr(files, "_GROUP_BYTES", 200)
    patch.setattr(files, "_GROUP_ROWS", (2, 4))
    patch.setattr(shared, "_SEGMENTS_AT_MOST", 2)


class Managed:
    """A managed table and its model."""

    def __init__(
        self, path: Path, hosts: Path, keys: tuple[str, ...], texts: list[str], new_serial: Callable[[], int]
    ) -> None:
        self._path, self._hosts, self._keys, self._new_serial = path, hosts, keys, new_serial
        fixed = [("id", pa.int64()), ("v", pa.int64()), ("s", pa.int64()), ("c", pa.string())]
        self._texts = texts
        self.schema = pa.schema([*fixed, *((name, pa.string()) for name in texts)])
        self.rows: list[dict[str, Any]] = []

    def copied(self) -> Managed:
        """A model that goes its own way from here on."""
        other = copy.copy(self)
        other.rows = [dict(row) for row in self.rows]
        return other

    def take(self, step: Step, rng: random.Random) -> None:
        """Take a step. Raises what the package raises."""
        host, count, *inner = step.args
        options = {
            "lookup.cache.dir": str(self._hosts / host),
            "lookup.keys": ",".join(self._keys),
            "lookup.write.compact-after": _COMPACT_AFTER,
        }
        table = LookupTable(str(self._path), options)
        match step.op:
            case "append" | "upsert" | "delete" | "overwrite":
                self.rows = self._written(table, step.op, self.rows, count, rng)
            case "transaction":
                rows = self.rows
                with table.transaction() as transaction:
                    for op in inner[0]:
                        rows = self._written(transaction, op, rows, count, rng)
                self.rows = rows
            case "alter":
                name = f"x{self._new_serial()}"
                table.alter(columns=pa.schema([(name, pa.int64())]))
                self.schema = pa.schema([*self.schema, (name, pa.int64())])
                self.rows = [{**row, name: None} for row in self.rows]
            case "compact":
                table.compact()
            case "vacuum":
                table.vacuum("0 s", force=True)

    def _written(
        self, table: Any, op: str, before: list[dict[str, Any]], count: int, rng: random.Random
    ) -> list[dict[str, Any]]:
        """The rows after one write, which is made."""
        new = [self._row(rng) for _ in range(count)]
        if op in ("upsert", "delete"):
            distinct = {tuple(row[name] for name in self._keys): row for row in new}
            new = list(distinct.values())
        rows = pa.Table.from_pylist(new, self.schema)
        # A row with a null in its key has none: nothing replaces or removes it.
        named = {key for row in new if None not in (key := tuple(row[name] for name in self._keys))}
        match op:
            case "append" | "overwrite":
                table.write(rows, mode=op)
                return new if op == "overwrite" else before + new
            case "upsert":
                table.upsert(rows)
            case "delete":
                table.delete(rows.select(list(self._keys)))
                new = []
        return [row for row in before if tuple(row[name] for name in self._keys) not in named] + new

    def _row(self, rng: random.Random) -> dict[str, Any]:
        row: dict[str, Any] = dict.fromkeys(self.schema.names)
        row["id"] = None if rng.random() < 0.05 else rng.randrange(12)
        row["v"] = None if rng.random() < 0.1 else rng.randrange(8)
        row["s"] = self._new_serial()
        row["c"] = rng.choice((None, "x", "some text that is longer"))
        row |= {name: rng.choice(("01", "1", "eu")) for name in self._texts}
        return row
