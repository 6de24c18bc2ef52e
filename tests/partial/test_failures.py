"""The partial cache: what goes wrong."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pyspark_lookup.columnar.keys import Keys
from tests.fakes import FakeClock
from tests.partial.common import NONE, SPACE, Process, edited, flip, rows_of
from tests.test_segments import files_at_most

DAMAGE: dict[str, Callable[[bytearray], object]] = {
    **{f"a bit flipped at {at}": flip(at) for at in (0, 0.1, 0.25, 0.5, 0.75, 0.9, 1)},
    "cut in half": lambda content: content.__delitem__(slice(len(content) // 2, None)),
    "one byte short": lambda content: content.pop(),
    "zeros": lambda content: content.__setitem__(slice(None), bytes(len(content))),
}


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_segment_is_a_miss(cache_dir: Path, clock: FakeClock, damage: str, merged: bool) -> None:
    """A file that is not as it was written is counted and removed; what lies beside answers, and its keys can be put again."""
    writer = Process(cache_dir, clock)
    keys = pa.array(range(1000), pa.int64())
    for _ in range(3):
        writer.put_rows([keys], rows_of([[n, n] for n in range(1000)]))
    assert writer.merge() == 1
    if not merged:
        shutil.rmtree(writer.directory)
        writer.put_rows([keys], rows_of([[n, n] for n in range(1000)]))
    (name,) = writer.names()
    assert name.endswith("+") == merged
    writer.put({5000: [5]})
    edited(writer.directory / name, DAMAGE[damage])
    process = Process(cache_dir, clock)
    assert process.get(1, 5000) == {1: None, 5000: [5]}
    assert (process.count("snapshotDamagedCount"), process.count("cacheFailureCount")) == (1, 0)
    assert name not in process.names()
    process.put({1: [7]})
    assert process.get(1, 5000) == {1: [7], 5000: [5]}
    process.merge()
    assert Process(cache_dir, clock).get(1, 5000) == {1: [7], 5000: [5]}


def test_a_directory_that_vanished(process: Process) -> None:
    """Without its directory a process misses and shares nothing; each failure is counted, none is raised."""
    process.put({1: [1]})
    assert process.get(1) == {1: [1]}
    shutil.rmtree(process.directory.parents[1])
    assert process.get(1) == {1: None}
    assert process.shared.sizes() == (0, 0)
    before = process.count("cacheFailureCount")
    process.put({2: [2]})
    process.touch(1, 2)
    assert process.count("cacheFailureCount") == before + 1
    assert process.get(1, 2) == {1: None, 2: None}
    assert process.merge() == 0


@pytest.mark.parametrize("broken", ["snapshots", "tmp"])
def test_a_directory_that_is_none(process: Process, broken: str) -> None:
    """Nor where only a part of it cannot be written."""
    root = process.directory.parents[1]
    shutil.rmtree(root / broken)
    (root / broken).touch()
    process.put({1: [1]})
    assert process.count("cacheFailureCount") >= 1
    assert process.get(1) == {1: None}
    process.touch(1)
    (root / broken).unlink()
    (root / broken).mkdir()
    process.put({1: [1]})
    assert process.get(1) == {1: [1]}


@pytest.mark.parametrize("size", [0, 5, 100, 1500])
def test_a_full_disk(process: Process, size: int) -> None:
    """A load that the disk does not take is counted and not shared, what is there answers; with room again it is shared."""
    process.put({1: [1]})
    with files_at_most(size):
        process.put({2: list(range(500))})
        assert process.count("cacheFailureCount") == 1
        assert process.get(1, 2) == {1: [1], 2: None}
    assert os.listdir(process.directory.parents[1] / "tmp") == []
    process.put({2: [2]})
    assert Process(process.directory.parents[2], process.clock).get(1, 2) == {1: [1], 2: [2]}


@pytest.mark.usefixtures("often")
def test_a_disk_that_is_full_for_a_merge(process: Process) -> None:
    """A merge that finds no room is counted and changes nothing; the next one may be luckier."""
    for number in range(3):
        process.put({number: list(range(300))})
    before = process.names()
    with files_at_most(8000):
        assert process.merge() == 1
    assert process.count("cacheFailureCount") == 1
    assert process.names() == before
    assert os.listdir(process.directory.parents[1] / "tmp") == []
    assert process.get(0, 1, 2) == {n: list(range(300)) for n in range(3)}
    process.put({3: list(range(300))})
    assert process.merge() == 1
    assert len(process.names()) == 1
    assert process.get(0, 1, 2, 3) == {n: list(range(300)) for n in range(4)}


USED: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: path.unlink(),
    "short": lambda path: path.write_bytes(b"\xff" * 3),
    "empty": lambda path: path.write_bytes(b""),
    "no file": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("change", USED.values(), ids=USED)
def test_used_times_that_cannot_be_kept(cache_dir: Path, clock: FakeClock, change: Callable[[Path], object]) -> None:
    """Where the file of used times is gone or not whole, entries are as old as their load, and still answer."""
    bounds = dataclasses.replace(NONE, expire_after_access_s=10.0)
    process = Process(cache_dir, clock, bounds)
    process.put({1: [1]})
    (numbers,) = process.directory.glob("*.used")
    change(numbers)
    process = Process(cache_dir, clock, bounds)
    assert process.get(1) == {1: [1]}
    clock.tick(9)
    process.touch(1)
    clock.tick(9)
    assert process.get(1) == {1: [1]}  # in this process it was used, wherever that is kept
    process.put({2: [2]})
    assert process.get(1, 2) == {1: [1], 2: [2]}
    clock.tick(10)
    assert process.get(1, 2) == {1: None, 2: None}


@pytest.mark.parametrize("used", [-1, -(2**63), 2**63 - 1, 10**15])
def test_used_times_that_cannot_be(cache_dir: Path, clock: FakeClock, used: int) -> None:
    """A time that nobody can have written is taken for the time of the load."""
    bounds = dataclasses.replace(NONE, expire_after_access_s=10.0)
    process = Process(cache_dir, clock, bounds)
    process.put({1: [1, 2]})
    (name,) = process.names()
    numbers = process.disk.open_numbers(SPACE, name, 2)
    assert numbers is not None
    np.frombuffer(numbers, np.int64)[:] = used
    clock.tick(9)
    assert Process(cache_dir, clock, NONE).get(1) == {1: [1, 2]}
    np.frombuffer(numbers, np.int64)[:] = used
    clock.tick(1)
    assert process.get(1) == {1: None}


def torn(process: Process, key: int) -> None:
    """The used times of a key's rows as a process leaves them that is killed while it writes them, or as one reads them meanwhile."""
    for name in process.names():
        part = next(part for part in process.shared._refreshed() if part.name == name)
        arrays = [pa.array([key], pa.int64())]
        rows = part.segment.probe(Keys(arrays), process.hashes(arrays)).rows
        part.used[rows[: len(rows) // 2]] = int(process.clock.steady_s * 1000)


def test_a_key_expires_with_all_its_rows(cache_dir: Path, clock: FakeClock) -> None:
    """Whatever the file of used times says, a key is answered with all its rows or not at all."""
    bounds = dataclasses.replace(NONE, expire_after_access_s=10.0)
    process = Process(cache_dir, clock, bounds)
    process.put({1: [1, 2, 3, 4]})
    clock.tick(5)
    torn(process, 1)
    clock.tick(6)
    assert process.get(1)[1] in ([1, 2, 3, 4], None)


def test_a_key_is_evicted_with_all_its_rows(cache_dir: Path, clock: FakeClock) -> None:
    """Whatever the file of used times says, an eviction takes all rows of a key or none."""
    process = Process(cache_dir, clock, dataclasses.replace(NONE, rows=16))
    process.put({1: [1, 2, 3, 4]})
    clock.tick(1)
    process.put({n: [n] for n in range(10, 23)})
    clock.tick(1)
    torn(process, 1)
    process.merge()
    assert process.get(1)[1] in ([1, 2, 3, 4], None)
