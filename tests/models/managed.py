"""A managed table of a history: written by the package, beside a plain list of the rows that it should have."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pyspark_lookup import LookupTable
from pyspark_lookup.errors import WriteConflictError
from pyspark_lookup.lookup.runtime import runtime
from pyspark_lookup.sources.managed import Job, TableWriter, WriteSizes
from pyspark_lookup.sources.managed.log import DataFile, WriteMode
from pyspark_lookup.sources.managed.rows_by_key import KeyedRows
from pyspark_lookup.sources.registry import parse_options
from tests.models.histories import Step
from tests.models.modelled import Modelled, Row

_COMPACT_AFTER = "4"
SIZES = WriteSizes(
    file_bytes=400,
    row_group_bytes=200,
    row_group_rows=(2, 4),
    merge_bytes=800,
    compact_bytes=2000,
    unasked_compact_bytes=1000,
    small_file_bytes=1000,
    log_page=6,
)
"""Small tables have by these what large ones have: several files a write, row groups, partial folds, merges, trimmed logs."""


@dataclasses.dataclass(frozen=True)
class _Open:
    """A write that was begun: its files, its rows, and its place in the order of beginnings."""

    job: Job
    files: list[DataFile]
    op: str
    rows: list[Row]
    order: int


class Managed(Modelled):
    """A managed table and its model: its rows, each with the place of its write in the order of beginnings."""

    def __init__(
        self, path: Path, hosts: Path, keys: tuple[str, ...], texts: list[str], new_serial: Callable[[], int]
    ) -> None:
        super().__init__(path, hosts, keys, texts, new_serial)
        self._state: list[tuple[Row, int]] = []
        self._opened: list[_Open] = []
        self._order = 0
        self._overwritten = False
        self._oldest = 0  # position from which on all can be read

    def keeps(self, version: int) -> bool:
        return version >= self._oldest

    @property
    def rows(self) -> tuple[Row, ...]:
        """What should be there now."""
        return tuple({name: row.get(name) for name in self.schema.names} for row, _ in self._state)

    def copied(self) -> Managed:
        """A model that goes its own way from here on. What is open stays so for ever in one that is a copy."""
        other = copy.copy(self)
        other._opened, other.versions = [], dict(self.versions)
        return other

    def take(self, step: Step, rng: random.Random) -> None:
        host, count, *inner = step.args
        options = {
            "lookup.cache.dir": str(self._hosts / host),
            "lookup.keys": ",".join(self._keys),
            "lookup.write.compact-after": _COMPACT_AFTER,
        }
        table = LookupTable(str(self._path), options)
        match step.op:
            case "append" | "upsert" | "delete" | "delete_where" | "overwrite":
                self._state = self._written(table, step.op, self._state, count, rng)
            case "transaction":
                state = self._state
                with table.transaction() as transaction:
                    for op in inner[0]:
                        state = self._written(transaction, op, state, count, rng)
                self._state = state
            case "begin":
                self._begin(options, inner[0], count, rng)
            case "commit" if self._opened:
                self._commit(options, self._opened.pop(count % len(self._opened)))
            case "alter":
                self._alter(table)
            case "compact":
                self._compact(table, options)
            case "vacuum":
                table.alter(properties={"lookup.log.retention": "0 s"})
                self._oldest = table.vacuum("0 s", force=True)["oldest"] or self._oldest
        self.versions[table.describe()["position"]] = (self.schema, self.rows)

    @staticmethod
    def _where(new: list[Row]) -> tuple[str, Callable[[Row], bool]]:
        """A predicate by which rows are deleted, and what it says of one."""
        id_, v = new[0]["id"], new[0]["v"]
        if v is None or v % 2:
            return ("id IS NULL" if id_ is None else f"id = {id_}"), lambda row: row["id"] == id_
        return f"v < {v - 3}", lambda row: row["v"] is not None and row["v"] < v - 3

    def _after(self, op: str, new: list[Row], order: int, before: list[tuple[Row, int]]) -> list[tuple[Row, int]]:
        """The rows after a write that is committed now and began at its place in the order."""
        if op == "delete_where":
            return [(row, of) for row, of in before if not self._where(new)[1](row)]
        # A row with a null in its key has none: nothing replaces or removes it.
        named = {key for row in new if None not in (key := self.key_of(row))} if op in ("upsert", "delete") else set()
        kept = [
            (row, of) for row, of in before if self.key_of(row) not in named and not (op == "overwrite" and of < order)
        ]
        return kept if op == "delete" else kept + [(row, order) for row in new]

    def _written(
        self, table: Any, op: str, before: list[tuple[Row, int]], count: int, rng: random.Random
    ) -> list[tuple[Row, int]]:
        """The rows after one write, which is made."""
        new = self.drawn_rows(op, count, rng)
        rows = pa.Table.from_pylist(new, self.schema)
        self._order += 1
        self._overwritten |= op == "overwrite"
        match op:
            case "append" | "overwrite":
                table.write(rows, mode=op)
            case "upsert":
                table.upsert(rows)
            case "delete_where":
                table.delete(where=self._where(new)[0])
            case "delete":
                table.delete(rows.select(list(self._keys)))
        return self._after(op, new, self._order, before)

    # --- writes that overlap ----------------------------------------------------------------------

    def _writer(self, options: dict[str, str]) -> TableWriter:
        given = parse_options({**options, "path": str(self._path)})
        return runtime().engine(given).managed.writer(given)

    def _begin(self, options: dict[str, str], op: str, count: int, rng: random.Random) -> None:
        writer = self._writer(options)
        new = self.drawn_rows(op, count, rng)
        rows = pa.Table.from_pylist(new, self.schema)
        if op == "delete":
            rows = rows.select(list(self._keys))
        job = writer.begin(rows.schema, WriteMode(op))
        self._order += 1
        found = [] if op in ("delete", "delete_where") else writer.write(job, rows.to_batches(), "part")
        self._opened.append(_Open(job, found, op, new, self._order))

    def _commit(self, options: dict[str, str], write: _Open) -> None:
        writer = self._writer(options)
        keys = pa.Table.from_pylist(write.rows, self.schema).select(list(self._keys))
        self._overwritten |= write.op == "overwrite"
        try:
            effect = writer.deletion(keys) if write.op == "delete" else None
            effect = writer.deletion_where(self._where(write.rows)[0]) if write.op == "delete_where" else effect
            writer.commit(write.job, write.files, effect=effect)
        except WriteConflictError:
            if not self._overwritten:
                raise
        else:
            self._state = self._after(write.op, write.rows, write.order, self._state)

    def _alter(self, table: LookupTable) -> None:
        name = f"x{self._new_serial()}"
        table.alter(columns=pa.schema([(name, pa.int64())]))
        self.schema = pa.schema([*self.schema, (name, pa.int64())])

    def _compact(self, table: LookupTable, options: dict[str, str]) -> None:
        """Compact, while one of the writes that are open is committed: once the compaction has read what it folds."""
        pending, self._opened = self._opened[:1], self._opened[1:]
        count = KeyedRows.count

        def counted(rows: KeyedRows, found: Any) -> int:
            number = count(rows, found)
            if pending:
                self._commit(options, pending.pop())
            return number

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KeyedRows, "count", counted)
            table.compact()
        if pending:
            self._commit(options, pending.pop())
