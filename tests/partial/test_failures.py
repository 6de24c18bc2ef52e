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
from tests.partial.common import NONE, SPACE, Process
from tests.test_segments import files_at_most


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("merged", [False, True])
def test_a_damaged_segment_is_a_miss(cache_dir: Path, clock: FakeClock, merged: bool) -> None:
    """A file that is not as it was written (`test_segments` has all ways) is counted and removed; what lies beside answers, and its
    keys can be put again."""
    writer = Process(cache_dir, clock)
    rows = {n: [n, n] for n in range(1000)}
    for _ in range(3 if merged else 1):
        writer.put(rows)
    assert writer.merge() == merged
    (name,) = writer.names()
    assert name.endswith("+") == merged
    writer.put({5000: [5]})
    path = writer.directory / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 12_345))
    process = Process(cache_dir, clock)
    assert process.get(1, 5000) == {1: None, 5000: [5]}
    assert (process.count("snapshotDamagedCount"), process.count("cacheFailureCount")) == (1, 0)
    assert name not in process.names()
    process.put({1: [7]})
    assert process.get(1, 5000) == {1: [7], 5000: [5]}
    process.merge()
    assert Process(cache_dir, clock).get(1, 5000) == {1: [7], 5000: [5]}


@pytest.mark.parametrize("broken", ["snapshots", "tmp"])
def test_a_directory_that_is_none(process: Process, broken: str) -> None:
    """Where the directory, or a part of it, cannot be written a process misses and shares nothing; failures are counted, none is
    raised, and once it is there again so is what is put."""
    root = process.directory.parents[1]
    process.put({1: [1]})
    assert process.get(1) == {1: [1]}
    shutil.rmtree(root)
    root.mkdir()
    for name in ("snapshots", "tmp"):
        (root / name).touch() if name == broken else (root / name).mkdir()
    assert process.get(1) == {1: None}
    assert process.shared.sizes() == (0, 0)
    before = process.count("cacheFailureCount")
    process.put({2: [2]})
    assert process.count("cacheFailureCount") > before
    process.touch(1, 2)
    assert process.get(1, 2) == {1: None, 2: None}
    assert process.merge() == 0
    (root / broken).unlink()
    (root / broken).mkdir()
    process.put({1: [1]})
    assert process.get(1) == {1: [1]}


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize(("size", "merging"), [(0, False), (5, False), (100, False), (1500, False), (8000, True)])
def test_a_full_disk(process: Process, size: int, merging: bool) -> None:
    """A load or merge that finds no room is counted and changes nothing; with room again it is done."""
    rows = {n: list(range(500)) for n in range(4)}
    for key in range(3 if merging else 2):
        process.put({key: rows[key]})
    before = process.names()
    with files_at_most(size):
        if merging:
            assert process.merge() == 1
        else:
            process.put({2: rows[2]})
        assert process.count("cacheFailureCount") == 1
        assert process.get(*rows) == {**rows, 2: rows[2] if merging else None, 3: None}
    assert process.names() == before
    assert os.listdir(process.directory.parents[1] / "tmp") == []
    for key in (2, 3):
        process.put({key: rows[key]})
    assert process.merge() == 1
    assert len(process.names()) == 1
    assert Process(process.directory.parents[2], process.clock).get(*rows) == rows


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
        part = next(part for part in process.shared._refresh() if part.name == name)
        arrays = [pa.array([key], pa.int64())]
        rows = part.segment.probe(Keys(arrays), process.hashes(arrays)).rows
        part.used[rows[: len(rows) // 2]] = int(process.clock.steady_s * 1000)


@pytest.mark.parametrize("bound", [{"expire_after_access_s": 10.0}, {"rows": 16}], ids=str)
def test_a_key_goes_with_all_its_rows(cache_dir: Path, clock: FakeClock, bound: dict[str, float]) -> None:
    """Whatever the file of used times says, a key expires, or is evicted, with all its rows or not at all."""
    process = Process(cache_dir, clock, dataclasses.replace(NONE, **bound))
    process.put({1: [1, 2, 3, 4]})
    clock.tick(5)
    process.put({n: [n] for n in range(10, 23)})
    torn(process, 1)
    clock.tick(6)
    process.merge()
    assert process.get(1)[1] in ([1, 2, 3, 4], None)
