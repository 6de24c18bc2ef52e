"""The index of a snapshot's ranges beside a loop over all rows, while files change; and what processes of a host share of it."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup.cache.full.snapshot import Snapshot
from pyspark_lookup.columnar.keys import cast_keys
from pyspark_lookup.lookup.range_match import Match, MatchKind
from pyspark_lookup.lookup.snapshot_ranges import SnapshotRanges
from pyspark_lookup.options.enums import Overlap
from tests.support.fakes import FakeClock
from tests.support.full_cache import Table

FULL = {"lookup.cache": "FULL"}
KEYED = {**FULL, "lookup.keys": "id"}
BETWEEN = Match(MatchKind.BETWEEN, ("low", "high"), overlap=Overlap.NEWEST)
KINDS: dict[str, tuple[pa.DataType, Callable[[int], Any]]] = {
    "int": (pa.int64(), int),
    "text": (pa.string(), lambda number: f"{number:02d}" + "y" * (number % 9)),
    "decimal": (pa.decimal128(38, 2), lambda number: Decimal(number) * 10**20),
}
"""The types of bounds, each with a function that makes values of numbers, in the same order."""


@dataclasses.dataclass(frozen=True)
class Row:
    id: int | None
    low: int | None
    high: int | None
    n: int


class World:
    """A directory of small files with ranges, the rows that it has, and a host with a full cache of it."""

    def __init__(self, home: Path, kind: str, options: dict[str, str], seed: object) -> None:
        self.path, self.cache_dir, self.options = home / "t", home / "cache", options
        self.kind, self.of_number = KINDS[kind]
        self.draw = random.Random(str(seed))
        self.files: dict[int, list[Row]] = {}
        self.written = 0
        self.path.mkdir()
        for number in range(12):
            self.write(number, 30)
        self.clock = FakeClock()
        self.start()

    def start(self) -> None:
        """Begin a process that knows only what is on disk."""
        self.table = Table(self.path, self.cache_dir, self.options, self.clock)

    def write(self, number: int, count: int) -> None:
        rows = []
        for _ in range(count):
            low, high = self.draw.randrange(40), self.draw.randrange(40)
            if self.draw.random() < 0.8:
                low, high = min(low, high), max(low, high)
            bounds = [None if self.draw.random() < 0.05 else bound for bound in (low, high)]
            key = None if self.draw.random() < 0.05 else self.draw.randrange(40)
            rows.append(Row(key, *bounds, self.written))
            self.written += 1
        self.files[number] = rows
        columns: dict[str, pa.Array] = {"id": pa.array([row.id for row in rows], pa.int64())}
        for side in ("low", "high"):
            values = [getattr(row, side) for row in rows]
            columns[side] = pa.array([None if v is None else self.of_number(v) for v in values], self.kind)
        columns["n"] = pa.array([row.n for row in rows])
        pq.write_table(pa.table(columns), self.path / ".new")
        os.replace(self.path / ".new", self.path / f"{number:02d}.parquet")

    def change(self) -> None:
        """Replace a file or two, add one, or remove one."""
        self.clock.tick(60)
        for _ in range(self.draw.randrange(1, 3)):
            number = self.draw.randrange(16)
            if number in self.files and self.draw.random() < 0.25 and len(self.files) > 2:
                (self.path / f"{number:02d}.parquet").unlink()
                del self.files[number]
            else:
                self.write(number, self.draw.randrange(1, 40))

    def ranges(self, match: Match, snapshot: Snapshot | None = None, is_stored: bool = True) -> SnapshotRanges:
        snapshot = snapshot or self.table.full.reload()
        _, plan = self.table.host.plan(self.table.options, self.table.table)
        arrays = self.table.full.derived if is_stored else None
        return SnapshotRanges(snapshot, plan, match, self.kind, "lookup.keys" in self.options, arrays)

    def find(self, ranges: SnapshotRanges, asked: list[tuple[int | None, int | None]]) -> list[tuple[int, int]] | None:
        """(number of the question, n of the row) of each answer."""
        values = pa.array([None if value is None else self.of_number(value) for _, value in asked], self.kind)
        keys = []
        if "lookup.keys" in self.options:
            keys = cast_keys(
                pa.table({"id": pa.array([k for k, _ in asked], pa.int64())}), [ranges.snapshot.schema.field("id")]
            )
        found = ranges.find(keys, values)
        if found is None:
            return None
        (names,) = ranges.snapshot.take(["n"], found[1])
        return list(zip(found[0].tolist(), names.to_pylist(), strict=True))

    def expected(
        self, asked: list[tuple[int | None, int | None]], overlap: Overlap, counts: Callable[[Row], bool]
    ) -> list[tuple[int, int]] | None:
        rows = [row for number in sorted(self.files) for row in self.files[number] if counts(row)]
        answers: list[tuple[int, int]] = []
        for question, (key, value) in enumerate(asked):
            holding = [
                (place, row)
                for place, row in enumerate(rows)
                if value is not None
                and ("lookup.keys" not in self.options or (row.id == key and key is not None))
                and (row.low is None or row.high is None or row.low <= row.high)
                and (row.low is None or row.low <= value)
                and (row.high is None or value <= row.high)
            ]
            if len(holding) > 1 and overlap is Overlap.ERROR:
                return None
            if holding and overlap is Overlap.NEWEST:
                holding = [max(holding, key=lambda pair: (-1 if pair[1].low is None else pair[1].low, pair[0]))]
            answers += [(question, row.n) for _, row in holding]
        return answers


def questions(draw: random.Random) -> list[tuple[int | None, int | None]]:
    return [
        (None if draw.random() < 0.1 else draw.randrange(45), None if draw.random() < 0.1 else draw.randrange(42))
        for _ in range(120)
    ]


@pytest.mark.parametrize("keyed", [True, False], ids=["keys", "no keys"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_histories(tmp_path: Path, kind: str, keyed: bool) -> None:
    """However a table has changed, and whichever process has built which index: a lookup finds the rows that a loop finds."""
    where = {"lookup.where": "id <> 7"} if kind == "decimal" else {}
    world = World(tmp_path, kind, {**(KEYED if keyed else FULL), **where}, f"{kind} {keyed}")

    def counts(row: Row) -> bool:
        return not where or (row.id is not None and row.id != 7)

    layers = set()
    for step in range(12):
        snapshot = world.table.full.reload()
        layers.add(len(snapshot.layers))
        asked = questions(world.draw)
        for overlap in (Overlap.ALL, Overlap.NEWEST, Overlap.ERROR):
            match = dataclasses.replace(BETWEEN, overlap=overlap)
            expected = world.expected(asked, overlap, counts)
            for is_stored in (True, False):
                assert world.find(world.ranges(match, snapshot, is_stored), asked) == expected, (step, overlap)
            if expected is None:  # those of the questions that have one answer
                alone = [q for q in asked if world.expected([q], overlap, counts) is not None]
                assert world.find(world.ranges(match, snapshot), alone) == world.expected(alone, overlap, counts)
        for _ in range(2):  # the second time a build is at hand
            narrow = world.ranges(dataclasses.replace(BETWEEN, overlap=Overlap.NARROWEST), snapshot)
            all_rows = world.expected(asked, Overlap.ALL, counts) or []
            assert set(world.find(narrow, asked) or []) <= set(all_rows)
        world.change()
        if step % 4 == 3:
            world.start()
    assert max(layers) >= 3
