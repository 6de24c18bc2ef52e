"""The partial cache: rows by key, for all processes of a host; how they are merged and given up, and what goes wrong."""

import dataclasses
import gc
import os
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pytest

from pyspark_lookup.cache.partial import host_cache
from pyspark_lookup.storage.disk import Disk
from tests.support.disks import files_at_most, handles_below
from tests.support.fakes import FakeClock
from tests.support.partial_cache import EXPIRING, NONE, ROWS, SPACE, Process, differing, using

pytestmark = pytest.mark.usefixtures("often")


def test_how_long_ago_rows_were_loaded(cache_dir: Path, clock: FakeClock) -> None:
    """Rows come back in their order, to another process at its next get, with their ages; absences take no room if nobody keeps them."""
    writer, reader = (Process(cache_dir, clock, dataclasses.replace(NONE, missing_keys=False)) for _ in range(2))
    assert reader.get(1) == {1: None}
    writer.put({3: [30], 2: [], 1: [12, 10, 11]})
    assert reader.get(1, 2, 3) == {1: [12, 10, 11], 2: None, 3: [30]}
    writer.put({7: [], 8: []})
    assert (len(writer.names()), writer.shared.sizes()[0], reader.shared.sizes()) == (1, 4, writer.shared.sizes())
    clock.tick(3)
    writer.put({4: [4]})
    clock.tick(4)
    answer = reader.get_rows([pa.array([4, 1, 3], pa.int64())], ROWS)
    assert answer.ages_s.tolist() == [4, 7, 7]


OTHER_SCHEMAS = {
    "a column of another type": pa.schema([("v", pa.int32()), ("t", pa.string())]),
    "a column that was not there": pa.schema([*ROWS, ("more", pa.int64())]),
    "a column under another name": pa.schema([("V", pa.int64()), ("t", pa.string())]),
}


@pytest.mark.parametrize("schema", OTHER_SCHEMAS.values(), ids=OTHER_SCHEMAS)
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_rows_of_other_columns_are_a_miss(process: Process, schema: pa.Schema, version: str) -> None:
    """A load that lacks a wanted column, or has it in another type, does not answer; fewer columns are no matter."""
    keys = [pa.array([1, 2], pa.int64())]
    process.put({1: [1], 2: []})
    assert process.get_rows(keys, schema, version, differing()) is None
    answer = process.get_rows(keys, pa.schema([("t", pa.string())]), version, differing())
    assert answer.rows.column("t").to_pylist() == ["t1"]
    answer = process.get_rows(keys, pa.schema([]), version, differing())
    assert answer.present.all()
    assert answer.rows.num_rows == 1
    process.touch(1)


def test_the_wall_clock_is_set_back(cache_dir: Path, clock: FakeClock) -> None:
    """Rows that were loaded last are the latest although the clock was set back, also once they are merged."""
    process = Process(cache_dir, clock)
    process.put({1: [15], 2: [25]})
    clock.wall_s -= 3600
    process.put({1: [16]})
    assert Process(cache_dir, clock).get(1, 2) == {1: [16], 2: [25]}
    clock.wall_s -= 3600
    for number in range(3, 12):
        process.put({number: [number], 1: [number]})
    assert process.merge() == 1
    assert Process(cache_dir, clock).get(1, 2, 11) == {1: [11], 2: [25], 11: [11]}


def test_no_handle_is_left(cache_dir: Path, clock: FakeClock) -> None:
    """At its next look a process closes files that were merged away, and forgets their numbers and records; it closes all files with the cache."""
    writer, reader = Process(cache_dir, clock), Process(cache_dir, clock)
    names: set[str] = set()
    for number in range(12):
        writer.put({number: [number], number + 1: []})
        names |= {*writer.names()}
        assert reader.get(number) == {number: [number]}
        writer.merge()
    assert len(writer.names()) <= 2
    reader.get(0)
    writer.get(0)
    gc.collect()
    assert len(handles_below(cache_dir)) == 2 * 2 * len(writer.names())  # each its segment and its numbers
    assert sorted(os.listdir(writer.directory)) == sorted(
        [*writer.names(), *(f"{name}.used" for name in writer.names())]
    )
    assert {path.stat().st_mode & 0o777 for path in writer.directory.iterdir()} == {0o600}
    recorded = {name for name in names | {*writer.names()} if writer.disk.has_record("segment", f"{SPACE}-{name}")}
    assert recorded == {*writer.names()}
    del writer, reader
    gc.collect()
    assert handles_below(cache_dir) == []


@pytest.mark.parametrize(("merged", "up_s"), [(False, 0), (True, 0), (True, 100_000)])
@pytest.mark.parametrize("bounds", [{}, *EXPIRING, {"expire_after_access_s": 5000.0}], ids=str)
def test_another_boot(cache_dir: Path, clock: FakeClock, bounds: dict[str, float], merged: bool, up_s: float) -> None:
    """Nobody knows how old an entry is whose host was started anew: it has expired if entries expire, merged or not, else it is good."""
    before = FakeClock()
    before.tick(up_s)
    Process(cache_dir, before, boot="before").put({1: [1], 4: []})
    clock.wall_s = before.wall_s
    process = Process(cache_dir, clock, boot="after")
    for key in (2, 3):
        process.put({key: [key]})
    if merged:
        assert process.merge() == 1
    clock.tick(5)
    expiring = Process(cache_dir, clock, dataclasses.replace(NONE, **bounds), boot="after")
    assert expiring.get(1, 2, 4) == {1: None if bounds else [1], 2: [2], 4: None if bounds else []}
    assert process.get(1, 2, 4) == {1: [1], 2: [2], 4: []}


def test_a_key_that_is_used_in_a_merge(cache_dir: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key whose rows lie in two batches of a merge is kept with all its rows or not at all, whenever it is used."""
    monkeypatch.setattr(host_cache, "BATCH_ROWS", 2)
    bounds = dataclasses.replace(NONE, expire_after_access_s=10.0)
    merging, reading = Process(cache_dir, clock, bounds), Process(cache_dir, clock, bounds)
    merging.put({1: [1, 2, 3, 4]}, "v1")
    clock.tick(10)
    for key in (2, 3):
        merging.put({key: [key] * 4}, "v2", using(clock, reading, 1))
    assert merging.merge() == 1
    assert merging.get(1, version="v2", may_differ=differing())[1] in ([1, 2, 3, 4], None)


@pytest.mark.parametrize("merging", [False, True], ids=["put", "merge"])
@pytest.mark.parametrize("failing", [0, 100, 1500, "create_segment", "open_numbers", "publish_segment"])
def test_what_fails_changes_nothing(process: Process, failing: int | str, merging: bool) -> None:
    """A load or merge that finds no room, or is killed before it is published, is counted and changes nothing; later it is done."""
    rows = {n: list(range(500)) for n in range(4)}
    for key in range(3 if merging else 2):
        process.put({key: rows[key]})
    before = process.names()
    failure = OSError("failed on purpose")
    with files_at_most(failing) if isinstance(failing, int) else mock.patch.object(Disk, failing, side_effect=failure):
        if merging:
            assert process.merge() == 1
        else:
            process.put({2: rows[2]})
    assert process.count("cacheFailureCount") == 1
    for reader in (process, Process(process.root, process.clock)):
        assert reader.get(*rows) == {**rows, 2: rows[2] if merging else None, 3: None}
    assert process.names() == before
    assert os.listdir(process.root / "v1" / "tmp") == []
    (process.directory / f"{before[-1]}+.used").touch()
    for key in (2, 3):
        process.put({key: rows[key]})
    assert process.merge() == 1
    assert len(process.names()) == 1
    assert Process(process.root, process.clock).get(*rows) == rows
