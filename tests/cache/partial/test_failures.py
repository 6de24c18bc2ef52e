"""The partial cache: what goes wrong, and what becomes of its files."""

from __future__ import annotations

import dataclasses
import gc
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from pyspark_lookup.storage.disk import Disk
from tests.support.disks import Opened, files_at_most, handles_below
from tests.support.fakes import FakeClock
from tests.support.partial_cache import NONE, SPACE, Process


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("merging", [False, True], ids=["put", "merge"])
@pytest.mark.parametrize("what", [0, 5, 100, 1500, "create_segment", "open_numbers", "publish_segment"])
def test_what_fails_changes_nothing(process: Process, what: int | str, merging: bool) -> None:
    """A load or merge that finds no room, or is killed before it is published, is counted and changes nothing; later it is done."""
    rows = {n: list(range(500)) for n in range(4)}
    for key in range(3 if merging else 2):
        process.put({key: rows[key]})
    before = process.names()
    failure = OSError("failed on purpose")
    with files_at_most(what) if isinstance(what, int) else mock.patch.object(Disk, what, side_effect=failure):
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


USED: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: path.unlink(),
    "short": lambda path: path.write_bytes(b"\xff" * 3),
    "empty": lambda path: path.write_bytes(b""),
    "no file": lambda path: (path.unlink(), path.mkdir()),
    **{
        str(used): lambda path, used=used: path.write_bytes(np.full(1, used).tobytes())  # type: ignore[misc]
        for used in (-1, -(2**63), 2**63 - 1, 10**15)
    },
}


@pytest.mark.parametrize("change", USED.values(), ids=USED)
def test_used_times_that_cannot_be(cache_dir: Path, clock: FakeClock, change: Callable[[Path], object]) -> None:
    """Where the file of used times is gone, not whole or has times that nobody can have written, entries are as old as their load."""
    bounds = dataclasses.replace(NONE, expire_after_access_s=10.0)
    for age_s, expected in ((10.0, None), (9.0, [1, 2])):
        process = Process(cache_dir / str(age_s), clock, bounds)
        process.put({1: [1, 2]})
        (numbers,) = process.directory.glob("*.used")
        change(numbers)
        clock.tick(age_s)
        process = Process(process.root, clock, bounds)
        assert process.get(1) == {1: expected}
    clock.tick(9)
    assert process.get(1) == {1: [1, 2]}  # in this process it was used, wherever that is kept
    process.put({2: [2]})
    assert process.get(1, 2) == {1: [1, 2], 2: [2]}
    clock.tick(10)
    assert process.get(1, 2) == {1: None, 2: None}


def published(opened: Opened, name: str, **more: bool) -> Path:
    """A small segment of the space."""
    writer = opened.disk.create_segment({"r": 4})
    try:
        writer.append("r", b"1234")
        writer.finish({}, **({"durable": more["durable"]} if "durable" in more else {}))
        opened.disk.publish_segment(SPACE, name, writer)
    finally:
        writer.close()
    return opened.root / "snapshots" / SPACE / name


def test_numbers_that_cannot_be_had(opened: Opened) -> None:
    """A full disk, or no directory, is counted, and leaves nothing open."""
    published(opened, "s")
    with files_at_most(15):
        assert opened.disk.open_numbers(SPACE, "s", 2, create=True) is None
    assert opened.count("cacheFailureCount") == 1
    assert opened.disk.open_numbers(SPACE, "s", 2, create=True) is not None
    shutil.rmtree(opened.root / "snapshots")
    assert opened.disk.open_numbers(SPACE, "s", 2) is None
    assert opened.count("cacheFailureCount") == 1
    (opened.root / "snapshots").symlink_to("nowhere")
    assert opened.disk.open_numbers(SPACE, "s", 2, create=True) is None
    assert opened.count("cacheFailureCount") == 2
    gc.collect()
    assert handles_below(opened.root) == []


@pytest.mark.parametrize(("more", "syncs"), [({}, 2), ({"durable": False}, 0)])
def test_what_a_small_segment_saves(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, more: dict[str, bool], syncs: int
) -> None:
    """One that need not outlive a crash is not brought to the disk: it is read through by whoever opens it first."""
    calls: list[int] = []
    monkeypatch.setattr(os, "fsync", calls.append)
    published(opened, "s", **more)
    assert len(calls) == syncs
    recorded = opened.disk.has_record("segment", f"{SPACE}-s")
    assert recorded == more.get("durable", True)
    assert opened.disk.open_segment(SPACE, "s") is not None
    assert opened.disk.has_record("segment", f"{SPACE}-s")


def test_the_sweep_removes_numbers_without_a_segment(opened: Opened) -> None:
    """Numbers whose segment is gone go after a while, also of a table in use; others stay."""
    opened.disk.create_record("snapshot", SPACE, {"seed": [1, 3]})
    path = published(opened, "s")
    for name in ("s", "gone", "new"):
        assert opened.disk.open_numbers(SPACE, name, 1, create=True) is not None
    for name in ("s", "s.used", "gone.used"):
        os.utime(path.parent / name, (opened.clock.wall_s - 7200,) * 2)
    opened.disk.sweep()
    assert sorted(os.listdir(path.parent)) == ["new.used", "s", "s.used"]
