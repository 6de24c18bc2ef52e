"""The partial cache: files of segments."""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path

import pytest

from tests.partial.common import SPACE
from tests.test_disk import Opened, handles_below
from tests.test_segments import files_at_most


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
    (opened.root / "snapshots").touch()
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
