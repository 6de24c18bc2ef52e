"""The index of a snapshot's ranges beside a loop over all rows, while files change; and what processes of a host share of it."""

from __future__ import annotations

import dataclasses
import errno
import json
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup import LookupTable
from pyspark_lookup.cache.full.derived import DerivedArrays
from pyspark_lookup.cache.full.snapshot import Snapshot
from pyspark_lookup.columnar.keys import cast_keys
from pyspark_lookup.columnar.ranges import RangeIndex
from pyspark_lookup.lookup.range_match import Match, MatchKind
from pyspark_lookup.lookup.snapshot_ranges import SnapshotRanges
from pyspark_lookup.options.enums import Overlap
from pyspark_lookup.storage.disk import Disk, SegmentWriter
from tests.support.disks import Opened
from tests.support.fakes import FakeClock, wait_until_settled
from tests.support.full_cache import Table
from tests.support.fuzzing import by_day
from tests.support.workers import BOUND_S, anonymous_bytes, in_fresh_process, must_end

FULL = {"lookup.cache": "FULL"}
KEYED = {**FULL, "lookup.keys": "id"}
BETWEEN = Match(MatchKind.BETWEEN, ("low", "high"), overlap=Overlap.NEWEST)
KINDS: dict[str, tuple[pa.DataType, Callable[[int], Any]]] = {
    "int": (pa.int64(), int),
    "text": (pa.string(), lambda number: f"{number:02d}" + "y" * (number % 9)),
    "decimal": (pa.decimal128(38, 2), lambda number: Decimal(number) * 10**20),
}
"""The types of bounds, each with a function that makes values of numbers, in the same order."""
HISTORIES = [("int", True), ("int", False), ("text", False), ("text", True), ("decimal", True), ("decimal", False)]
"""The types of bounds, and whether there are keys."""


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
        self.next_row = 0
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
            bounds = [None if self.draw.random() < 0.05 else value for value in (low, high)]
            key = None if self.draw.random() < 0.05 else self.draw.randrange(40)
            rows.append(Row(key, *bounds, self.next_row))
            self.next_row += 1
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

    def find(self, ranges: SnapshotRanges, probes: list[tuple[int | None, int | None]]) -> list[tuple[int, int]] | None:
        """(number of the question, n of the row) of each answer."""
        values = pa.array([None if value is None else self.of_number(value) for _, value in probes], self.kind)
        keys = []
        if "lookup.keys" in self.options:
            keys = cast_keys(
                pa.table({"id": pa.array([k for k, _ in probes], pa.int64())}), [ranges.snapshot.schema.field("id")]
            )
        matches = ranges.find(keys, values)
        if matches is None:
            return None
        (names,) = ranges.snapshot.take(["n"], matches[1])
        return list(zip(matches[0].tolist(), names.to_pylist(), strict=True))

    def find_holding(
        self, probes: list[tuple[int | None, int | None]], counts: Callable[[Row], bool]
    ) -> list[list[tuple[int, Row]]]:
        """For each question the rows that hold its value, with their places: by a loop over all rows."""
        rows = [row for number in sorted(self.files) for row in self.files[number] if counts(row)]
        return [
            [
                (place, row)
                for place, row in enumerate(rows)
                if value is not None
                and ("lookup.keys" not in self.options or (row.id == key and key is not None))
                and (row.low is None or row.high is None or row.low <= row.high)
                and (row.low is None or row.low <= value)
                and (row.high is None or value <= row.high)
            ]
            for key, value in probes
        ]


def choose(holding: list[list[tuple[int, Row]]], overlap: Overlap) -> list[tuple[int, int]] | None:
    """(number of the question, n of the row) of each answer; None for an error."""
    if overlap is Overlap.ERROR and any(len(pairs) > 1 for pairs in holding):
        return None
    if overlap is Overlap.NEWEST:
        holding = [
            [max(pairs, key=lambda pair: (-1 if pair[1].low is None else pair[1].low, pair[0]))] if pairs else []
            for pairs in holding
        ]
    return [(question, row.n) for question, pairs in enumerate(holding) for _, row in pairs]


def questions(draw: random.Random) -> list[tuple[int | None, int | None]]:
    return [
        (None if draw.random() < 0.1 else draw.randrange(45), None if draw.random() < 0.1 else draw.randrange(42))
        for _ in range(120)
    ]


@pytest.mark.parametrize(("kind", "keyed"), by_day(HISTORIES, 2))
def test_histories(tmp_path: Path, kind: str, keyed: bool) -> None:
    """However a table has changed, and whichever process has built which index: a lookup finds the rows that a loop finds."""
    where = {"lookup.where": "id <> 7"} if kind == "decimal" else {}
    world = World(tmp_path, kind, {**(KEYED if keyed else FULL), **where}, f"{kind} {keyed}")

    def counts(row: Row) -> bool:
        return not where or (row.id is not None and row.id != 7)

    layers = set()
    for step in range(10):
        snapshot = world.table.full.reload()
        layers.add(len(snapshot.layers))
        probes = questions(world.draw)
        holding = world.find_holding(probes, counts)
        for overlap in (Overlap.ALL, Overlap.NEWEST, Overlap.ERROR):
            match = dataclasses.replace(BETWEEN, overlap=overlap)
            expected = choose(holding, overlap)
            for is_stored in (True, False):
                assert world.find(world.ranges(match, snapshot, is_stored), probes) == expected, (step, overlap)
            if expected is None:  # those of the questions that have one answer
                alone = [probe for probe, pairs in zip(probes, holding, strict=True) if len(pairs) < 2]
                answers = choose([pairs for pairs in holding if len(pairs) < 2], overlap)
                assert world.find(world.ranges(match, snapshot), alone) == answers
        for _ in range(2):  # the second time a build is at hand
            narrow = world.ranges(dataclasses.replace(BETWEEN, overlap=Overlap.NARROWEST), snapshot)
            assert set(world.find(narrow, probes) or []) <= set(choose(holding, Overlap.ALL) or [])
        world.change()
        if step % 4 == 3:
            world.start()
    assert max(layers) >= 3


@pytest.mark.parametrize("keyed", [True, False], ids=["keys", "no keys"])
def test_rows_that_match_nothing(tmp_path: Path, keyed: bool) -> None:
    """Nothing matches in a table without rows, with null keys only, or with ranges that hold no value; such ranges are counted."""
    path, options = tmp_path / "t.parquet", {**(KEYED if keyed else FULL), "lookup.range": "low..high"}
    tables: list[tuple[list[tuple[int | None, int, int]], int]] = [
        ([], 0),
        ([(None, 3, 1)] * 3, 3),
        ([(1, 3, 1)] * 3, 3),
    ]
    for overlap in ("ALL", "ERROR", "NARROWEST"):
        for number, (rows, empty) in enumerate(tables):
            columns = [pa.array([row[n] for row in rows], pa.int64()) for n in range(3)]
            pq.write_table(pa.table(columns, ["id", "low", "high"]), path)
            wait_until_settled(path)
            cache = {"lookup.cache.dir": str(tmp_path / f"{overlap}{number}"), "lookup.overlap": overlap}
            for _ in range(2):
                with LookupTable(str(path), {**options, **cache}) as table:
                    keys = {"keys": [1, 2, 1, None]} if keyed else {}
                    assert table.get_many(**keys, between=[2, 2, None, 1]).num_rows == 0
                    counted = table.metrics()["rangeEmptyCount"]
            assert counted == (0 if keyed and rows and rows[0][0] is None else 2 * empty)


def test_lookups_of_several_kinds_in_turn(tmp_path: Path) -> None:
    """Each kind keeps its index: the rows of a version that match nothing are counted once, not at each change of the kind."""
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"id": [1, 2], "low": [3, 1], "high": [1, 3], "code": ["a", "b"]}), path)
    wait_until_settled(path)
    kinds = {"lookup.range": "low..high", "lookup.starts-with": "code", "lookup.cache.dir": str(tmp_path / "cache")}
    with LookupTable(str(path), {**KEYED, **kinds}) as table:
        for _ in range(3):
            for rows in (table.get(between=2), table.get(starts_with="bc"), table.get(2, between=2)):
                assert [row["id"] for row in rows] == [2]
        assert table.metrics()["rangeEmptyCount"] == 2  # with keys, and without


def test_a_reload_builds_the_index(tmp_path: Path) -> None:
    """A reload builds the index before lookups see the new snapshot, so that none of them waits for it; also where the reload merges layers."""
    path = tmp_path / "t"
    path.mkdir()
    numbers = pa.array(range(60))
    for number in range(8):
        file = path / f"{number}.parquet"
        pq.write_table(pa.table({"id": numbers, "low": [number * 10] * 60, "high": [number * 10 + 8] * 60}), file)
        wait_until_settled(file)
    options = {**KEYED, "lookup.range": "low..high", "lookup.cache.dir": str(tmp_path / "cache")}
    with LookupTable(str(path), options) as table:
        assert [row["low"] for row in table.get(7, between=25)] == [20]
        for number in range(8, 12):
            file = path / f"{number}.parquet"
            pq.write_table(pa.table({"id": numbers, "low": [number * 10] * 60, "high": [number * 10 + 8] * 60}), file)
            wait_until_settled(file)
            table.reload()
            built = table.metrics()["derivedBuildCount"]
            assert built > number - 8
            assert [row["low"] for row in table.get(7, between=number * 10 + 5)] == [number * 10]
            assert table.metrics()["derivedBuildCount"] == built


# --- processes of one host ------------------------------------------------------------------------


def make_table(home: Path, rows: int = 3000) -> Path:
    """A table of a file, with five periods for each id."""
    numbers = np.arange(rows)
    path = home / "t.parquet"
    pq.write_table(pa.table({"id": numbers // 5, "low": numbers % 5 * 10, "high": numbers % 5 * 10 + 8}), path)
    wait_until_settled(path)
    return path


def look_up(home: Path, count: int = 50) -> tuple[list[Any], Mapping[str, int]]:
    """(the answers of a `LookupTable` to some keys and values, its metrics)."""
    options = {**KEYED, "lookup.range": "low..high", "lookup.cache.dir": str(home / "cache")}
    with LookupTable(str(home / "t.parquet"), options) as table:
        ids = pa.table({"id": np.arange(count)})
        rows = table.get_many(ids, between=pa.array(np.arange(count) * 7 % 50))
        return rows.select(["id", "low", "key_index"]).to_pylist(), table.metrics()


def expected_rows(count: int = 50) -> list[dict[str, int]]:
    values = [number * 7 % 50 for number in range(count)]
    return [{"id": n, "low": v // 10 * 10, "key_index": n} for n, v in enumerate(values) if v % 10 <= 8]


def look_up_in_child(home: Path, answer: Path, barrier: Any) -> None:
    barrier.wait(BOUND_S)
    answer.write_text(json.dumps(look_up(home)[0]))


def index_files(home: Path) -> list[Path]:
    return sorted(path for path in (home / "cache/v1/snapshots").glob("*/*") if path.name.startswith("derived-"))


def test_one_process_of_the_host_builds(tmp_path: Path) -> None:
    """However many processes look up at once, one builds; the others map what it has stored."""
    make_table(tmp_path)
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(2)
    answers = [tmp_path / f"answer{number}" for number in range(2)]
    processes = [spawn.Process(target=look_up_in_child, args=(tmp_path, answer, barrier)) for answer in answers]
    for process in processes:
        process.start()
    must_end(processes)
    assert [json.loads(answer.read_text()) for answer in answers] == [expected_rows()] * 2
    assert len(index_files(tmp_path)) == 1
    rows, metrics = look_up(tmp_path)
    assert rows == expected_rows()
    assert metrics["derivedBuildCount"] == 1  # by all processes of the host


def die_while_building(home: Path) -> None:
    def die(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    RangeIndex.build = die  # type: ignore[method-assign, assignment]
    look_up(home)


def die_while_writing(home: Path) -> None:
    def die(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    store, SegmentWriter.finish = DerivedArrays._store, SegmentWriter.finish

    def store_and_die(*arguments: Any) -> None:
        SegmentWriter.finish = die  # type: ignore[method-assign, assignment]
        store(*arguments)

    DerivedArrays._store = store_and_die  # type: ignore[method-assign]
    look_up(home)


@pytest.mark.parametrize("die", [die_while_building, die_while_writing])
def test_a_builder_that_is_killed(tmp_path: Path, die: Callable[[Path], None]) -> None:
    """The lock of a killed builder is free, and the next process builds."""
    make_table(tmp_path)
    process = multiprocessing.get_context("spawn").Process(target=die, args=(tmp_path,))
    process.start()
    process.join(BOUND_S)
    assert process.exitcode == -signal.SIGKILL
    assert index_files(tmp_path) == []
    assert look_up(tmp_path)[0] == expected_rows()
    assert len(index_files(tmp_path)) == 1


def test_damage(tmp_path: Path) -> None:
    """A file that is cut off, or whose bytes or arrays are not those that it should have, is built again."""
    make_table(tmp_path)
    look_up(tmp_path)
    (path,) = index_files(tmp_path)
    whole = path.read_bytes()
    middle = len(whole) // 2
    for damaged in (whole[:middle], whole[:middle] + b"damage" + whole[middle + 6 :], b""):
        path.write_bytes(damaged)
        assert look_up(tmp_path)[0] == expected_rows()
        assert index_files(tmp_path) == [path]
        assert len(path.read_bytes()) == len(whole)
    disk = Opened(tmp_path / "cache").disk
    for arrays in ({"index.starts": np.arange(3)}, {}):
        disk.unlink_segment(path.parent.name, path.name)
        kinds = {name: array.dtype.str for name, array in arrays.items()}
        writer = disk.create_segment({name: array.nbytes for name, array in arrays.items()})
        for name, array in arrays.items():
            writer.append(name, array)
        writer.finish({"kinds": kinds, "derived": {"is_ipv4": False, "later": 0}})
        disk.publish_segment(path.parent.name, path.name, writer)
        assert look_up(tmp_path)[0] == expected_rows()
        assert len(path.read_bytes()) == len(whole)


def test_an_index_goes_with_its_snapshot(tmp_path: Path) -> None:
    """An index counts in the budget, and is removed when no version has its layers any more; that of the base stays for all its overlays."""
    world = World(tmp_path, "int", KEYED, "gone")
    world.ranges(BETWEEN)
    (base,) = indexes(world)
    world.clock.tick(60)
    world.write(3, 20)
    world.ranges(BETWEEN)
    assert len(indexes(world)) == 2
    assert base in indexes(world)
    for number in range(12):
        world.write(number, 30)
    world.clock.tick(60)
    world.table.full.reload()
    world.clock.tick(7200)
    world.write(20, 3)
    world.table.full.reload()
    assert base not in indexes(world)
    before = world.table.host.disk.usage().segments
    world.ranges(BETWEEN)
    assert world.table.host.disk.usage().segments > before


def indexes(world: World) -> list[str]:
    return [name for name in world.table.segments() if name.startswith("derived-")]


def test_a_full_directory(tmp_path: Path) -> None:
    """Without room for the index, a process has it in memory."""
    world = World(tmp_path, "int", KEYED, "full")
    snapshot = world.table.full.reload()
    probes = questions(world.draw)
    with mock.patch.object(Disk, "create_segment", side_effect=OSError(errno.ENOSPC, "full")):
        ranges = world.ranges(BETWEEN, snapshot)
    assert world.find(ranges, probes) == choose(world.find_holding(probes, lambda row: True), Overlap.NEWEST)
    assert world.table.metric("cacheFailureCount") == 1
    assert indexes(world) == []


def test_room_for_the_next_snapshot(tmp_path: Path) -> None:
    """If the next snapshot lacks room beside the last one and its index, the index goes; answers come from snapshots all the time."""
    make_table(tmp_path, 30_000)
    look_up(tmp_path)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "cache/v1/snapshots").glob("*/*")}
    index = sum(size for name, size in sizes.items() if name.startswith("derived-"))
    snapshot = sum(sizes.values()) - index
    options = {**KEYED, "lookup.range": "low..high", "lookup.cache.dir": str(tmp_path / "small")}
    with LookupTable(
        str(tmp_path / "t.parquet"),
        {**options, "lookup.cache.max-bytes": str((2 * snapshot + index // 2) * 16 // 15)},
    ) as table:
        table.get(1, between=3)
        make_table(tmp_path, 29_995)
        for _ in range(3):
            assert table.get(1, between=3) == [{"id": 1, "low": 0, "high": 8}]
        counted = table.metrics()
    assert [counted[name] for name in ("missCount", "hitCount", "snapshotBuildCount")] == [0, 4, 2]


def measure_anonymous(home: Path, count: int, answer: Path) -> None:
    memory = []
    for overlap in ("NEWEST", "ALL"):
        options = {**KEYED, "lookup.range": "low..high", "lookup.cache.dir": str(home / "cache")}
        with LookupTable(str(home / "t.parquet"), {**options, "lookup.overlap": overlap}) as table:
            table.get_many(pa.table({"id": np.arange(10)}))
            before = anonymous_bytes()
            table.get_many(pa.table({"id": np.arange(count)}), between=pa.array(np.arange(count) % 50))
            memory.append(anonymous_bytes() - before)
    answer.write_text(json.dumps(memory))


def test_another_process_takes_little_memory(tmp_path: Path) -> None:
    """The index of 200,000 rows, and their columns, are pages of files that all processes share: 0.2 MB were measured, the index has 4 MB."""
    make_table(tmp_path, 200_000)
    measure_anonymous(tmp_path, 1000, tmp_path / "answer")  # builds the index
    in_fresh_process(measure_anonymous, tmp_path, 1000, tmp_path / "answer")
    assert max(json.loads((tmp_path / "answer").read_text())) < 3 * 2**19
