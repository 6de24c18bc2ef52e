"""A managed table of a history: the package writes it, and a plain list holds the rows that it should have."""

import collections
import dataclasses
import functools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from pyspark_lookup import LookupTable
from pyspark_lookup.errors import WriteConflictError
from pyspark_lookup.lookup.runtime import runtime
from pyspark_lookup.sources.managed import Job, TableWriter, WriteSizes
from pyspark_lookup.sources.managed.change_feed import CHANGE_TYPE, COMMIT_TIMESTAMP, LOG_POSITION
from pyspark_lookup.sources.managed.conflicts import KeyedRows
from pyspark_lookup.sources.managed.log import DataFile, WriteMode
from pyspark_lookup.sources.registry import parse_options
from tests.models.adapter import DrawnRows, Ground, Past
from tests.models.answers import Content, Row, known_content
from tests.models.histories import Step
from tests.models.values import plain

_CHANGES = ("insert", "delete", "update_preimage", "update_postimage")
_COMPACT_AFTER = "4"
SIZES = WriteSizes(
    file_bytes=400, row_group_bytes=200, row_group_rows=(2, 4), merge_bytes=800, compact_bytes=2000,
    unasked_compact_bytes=1000, small_file_bytes=1000, log_page=6,
)  # fmt: skip
"""With these sizes small tables have what large ones have: several files for a write, row groups, partial folds, merges, trimmed logs."""


@dataclasses.dataclass(frozen=True)
class _Open:
    """A write that has begun: its files, its rows, and its place in the order in which writes began."""

    job: Job
    files: list[DataFile]
    op: str
    rows: list[Row]
    order: int


@dataclasses.dataclass
class _Model:
    """The expected table: its rows, each with the place of its write in the order in which writes began."""

    schema: pa.Schema
    rows: list[tuple[Row, int]] = dataclasses.field(default_factory=list)
    versions: dict[int, tuple[pa.Schema, list[Row]]] = dataclasses.field(default_factory=dict)
    """The rows at each position."""
    opened: list[_Open] = dataclasses.field(default_factory=list)
    order: int = 0
    overwritten: bool = False
    oldest: int = 0
    """The position from which on all versions can be read."""

    @property
    def plain_rows(self) -> list[Row]:
        """The rows that should be there now."""
        return [{name: row.get(name) for name in self.schema.names} for row, _ in self.rows]


class Managed(DrawnRows):
    """A managed table, and its model."""

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._model = _Model(self.schema)

    def content(self) -> Content:
        return known_content(self._model.schema, self._model.plain_rows)

    def past(self) -> list[Past]:
        def past(number: int, state: tuple[pa.Schema, list[Row]]) -> Past:
            content = functools.partial(known_content, *state)
            return Past({"lookup.version": str(number)}, content, number >= self._model.oldest)

        return [past(number, state) for number, state in sorted(self._model.versions.items())]

    def other_checks(self, rng: random.Random) -> Iterator[tuple[dict[str, str], Callable[[pa.Table], str]]]:
        """The changes between two versions."""
        positions = sorted(position for position in self._model.versions if position >= self._model.oldest)
        if len(positions) > 1:
            first, last = sorted(rng.sample(positions, 2))
            options = {"lookup.changes-from": str(first + 1), "lookup.changes-to": str(last)}
            yield options, functools.partial(self._wrong_changes, first, last)

    def _wrong_changes(self, first: int, last: int, changes: pa.Table) -> str:
        """What is wrong with the changes after a version. Replayed, they must give the later versions, and both images of an update must have its key."""
        names = [name for name in changes.schema.names if name not in (CHANGE_TYPE, LOG_POSITION, COMMIT_TIMESTAMP)]

        def counted(rows: Iterable[Row]) -> collections.Counter[str]:
            return collections.Counter(plain({name: row.get(name) for name in names}) for row in rows)

        rows, versions = changes.to_pylist(), self._model.versions
        by_position = {at: [row for row in rows if row[LOG_POSITION] == at] for at in range(first + 1, last + 1)}
        if sum(map(len, by_position.values())) != len(rows):
            return "changes of other versions"
        state = counted(versions[first][1])
        for position, changed_rows in by_position.items():
            by_type = {kind: [row for row in changed_rows if row[CHANGE_TYPE] == kind] for kind in _CHANGES}
            state.subtract(counted(by_type["delete"] + by_type["update_preimage"]))
            if any(count < 0 for count in state.values()):
                return f"at {position} rows go that were not there: {-state}"
            state = +state + counted(by_type["insert"] + by_type["update_postimage"])
            if position in versions and state != counted(versions[position][1]):
                return f"at {position} there are {state}, not {counted(versions[position][1])}"
            before, after = (
                {self.key_of(row) for row in by_type[f"update_{image}"]} for image in ("preimage", "postimage")
            )
            if before != after:
                return f"at {position} the images of updates have different keys"
        return ""

    def take(self, step: Step, rng: random.Random) -> None:
        host, count, *inner = step.args
        options = {"lookup.cache.dir": str(self.ground.hosts / host), "lookup.keys": ",".join(self.keys)}
        options["lookup.write.compact-after"] = _COMPACT_AFTER
        table = LookupTable(self.name, options)
        model = self._model
        match step.op:
            case "append" | "upsert" | "delete" | "delete_where" | "overwrite":
                model.rows = self._written(table, step.op, model.rows, count, rng)
            case "transaction":
                state = model.rows
                with table.transaction() as transaction:
                    for op in inner[0]:
                        state = self._written(transaction, op, state, count, rng)
                model.rows = state
            case "begin":
                self._begin(options, inner[0], count, rng)
            case "commit" if model.opened:
                self._commit(options, model.opened.pop(count % len(model.opened)))
            case "alter":
                self._alter(table)
            case "compact":
                self._compact(table, options)
            case "vacuum":
                table.alter(properties={"lookup.log.retention": "0 s"})
                model.oldest = table.vacuum("0 s", force=True)["oldest"] or model.oldest
        model.versions[table.describe()["position"]] = (model.schema, model.plain_rows)

    @staticmethod
    def _where(new: list[Row]) -> tuple[str, Callable[[Row], bool]]:
        """A predicate for a delete, and a function that says whether a row meets it."""
        id_, v = new[0]["id"], new[0]["v"]
        if v is None or v % 2:
            return ("id IS NULL" if id_ is None else f"id = {id_}"), lambda row: row["id"] == id_
        return f"v < {v - 3}", lambda row: row["v"] is not None and row["v"] < v - 3

    def _after(self, op: str, new: list[Row], order: int, before: list[tuple[Row, int]]) -> list[tuple[Row, int]]:
        """The rows after a write that is committed now and began at its place in the order."""
        if op == "delete_where":
            return [(row, row_order) for row, row_order in before if not self._where(new)[1](row)]
        # A row with a null in its key has none: nothing replaces or removes it.
        named = {key for row in new if None not in (key := self.key_of(row))} if op in ("upsert", "delete") else set()
        replaced = order if op == "overwrite" else 0
        remaining = [
            (row, row_order) for row, row_order in before if self.key_of(row) not in named and row_order >= replaced
        ]
        return remaining if op == "delete" else remaining + [(row, order) for row in new]

    def _written(
        self, table: Any, op: str, before: list[tuple[Row, int]], count: int, rng: random.Random
    ) -> list[tuple[Row, int]]:
        """Make one write. Returns the rows after it."""
        new = self.drawn_rows(op, count, rng)
        rows = pa.Table.from_pylist(new, self.schema)
        self._model.order += 1
        self._model.overwritten |= op == "overwrite"
        match op:
            case "append" | "overwrite":
                table.write(rows, mode=op)
            case "upsert":
                table.upsert(rows)
            case "delete_where":
                table.delete(where=self._where(new)[0])
            case "delete":
                table.delete(rows.select(list(self.keys)))
        return self._after(op, new, self._model.order, before)

    def _writer(self, options: dict[str, str]) -> TableWriter:
        lookup_options = parse_options({**options, "path": self.name})
        return runtime().engine(lookup_options).managed.writer(lookup_options)

    def _begin(self, options: dict[str, str], op: str, count: int, rng: random.Random) -> None:
        writer = self._writer(options)
        new = self.drawn_rows(op, count, rng)
        rows = pa.Table.from_pylist(new, self.schema)
        if op == "delete":
            rows = rows.select(list(self.keys))
        job = writer.begin(rows.schema, WriteMode(op))
        self._model.order += 1
        files = [] if op in ("delete", "delete_where") else writer.write(job, rows.to_batches(), "part")
        self._model.opened.append(_Open(job, files, op, new, self._model.order))

    def _commit(self, options: dict[str, str], write: _Open) -> None:
        writer = self._writer(options)
        keys = pa.Table.from_pylist(write.rows, self.schema).select(list(self.keys))
        self._model.overwritten |= write.op == "overwrite"
        try:
            effect = writer.deletion(keys) if write.op == "delete" else None
            effect = writer.deletion_where(self._where(write.rows)[0]) if write.op == "delete_where" else effect
            writer.commit(write.job, write.files, effect=effect)
        except WriteConflictError:
            if not self._model.overwritten:
                raise
        else:
            self._model.rows = self._after(write.op, write.rows, write.order, self._model.rows)

    def _alter(self, table: LookupTable) -> None:
        name = f"x{self.ground.new_serial()}"
        table.alter(columns=pa.schema([(name, pa.int64())]))
        self.schema = self._model.schema = pa.schema([*self.schema, (name, pa.int64())])

    def _compact(self, table: LookupTable, options: dict[str, str]) -> None:
        """Compact. Meanwhile an open write is committed, once the compaction has read what it folds."""
        pending, self._model.opened = self._model.opened[:1], self._model.opened[1:]
        count = KeyedRows.count

        def counted(rows: KeyedRows, files: Any) -> int:
            number = count(rows, files)
            if pending:
                self._commit(options, pending.pop())
            return number

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KeyedRows, "count", counted)
            table.compact()
        if pending:
            self._commit(options, pending.pop())
