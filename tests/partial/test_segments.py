"""The partial cache: files of segments."""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path

import numpy as np
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
        opened.disk.publish_segment(SPACE, name, writer, **({"checked": more["checked"]} if "checked" in more else {}))
    finally:
        writer.close()
    return opened.root / "snapshots" / SPACE / name


def test_numbers_beside_a_segment(opened: Opened) -> None:
    """They are zero at first, and what one writes all see; they are no segment."""
    path = published(opened, "s")
    assert opened.disk.open_numbers(SPACE, "s", 3) is None
    one = opened.disk.open_numbers(SPACE, "s", 3, create=True)
    other = Opened(opened.root.parent).disk.open_numbers(SPACE, "s", 3)
    assert one is not None
    assert other is not None
    assert np.frombuffer(other, np.int64).tolist() == [0, 0, 0]
    np.frombuffer(one, np.int64)[1] = -5
    assert np.frombuffer(other, np.int64).tolist() == [0, -5, 0]
    assert opened.disk.segments(SPACE) == ["s"]
    assert (path.parent / "s.used").stat().st_mode & 0o777 == 0o600
    assert opened.disk.check().damaged == ()
    assert opened.count("cacheFailureCount") == 0


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


def test_unlinking_takes_a_segment_from_no_reader(opened: Opened) -> None:
    """An unlinked segment is gone with its numbers and its record, and who has it open goes on."""
    path = published(opened, "s")
    published(opened, "other")
    segment = opened.disk.open_segment(SPACE, "s")
    used = opened.disk.open_numbers(SPACE, "s", 2, create=True)
    assert segment is not None
    assert used is not None
    opened.disk.unlink_segment(SPACE, "s")
    opened.disk.unlink_segment(SPACE, "s")
    opened.disk.unlink_segment(SPACE, "never")
    assert os.listdir(path.parent) == ["other"]
    assert not opened.disk.has_record("segment", f"{SPACE}-s")
    assert opened.disk.open_segment(SPACE, "s") is None
    assert bytes(segment.regions["r"]) == b"1234"
    np.frombuffer(used, np.int64)[:] = 7
    assert opened.count("snapshotDamagedCount") == opened.count("cacheFailureCount") == 0
    del segment, used
    gc.collect()
    assert handles_below(opened.root) == []


@pytest.mark.parametrize(
    ("more", "syncs"), [({}, 2), ({"durable": False}, 1), ({"durable": False, "checked": False}, 0)]
)
def test_what_a_small_segment_saves(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, more: dict[str, bool], syncs: int
) -> None:
    """One that need not outlive a crash is not brought to the disk: it is read through by whoever opens it first."""
    calls: list[int] = []
    monkeypatch.setattr(os, "fsync", calls.append)
    published(opened, "s", **more)
    assert len(calls) == syncs
    recorded = opened.disk.has_record("segment", f"{SPACE}-s")
    assert recorded == more.get("checked", True)
    assert opened.disk.open_segment(SPACE, "s") is not None
    assert opened.disk.has_record("segment", f"{SPACE}-s")


def test_an_unchecked_segment_that_is_half_there(opened: Opened) -> None:
    """After a crash a small segment may have any bytes: it is found out when it is opened, though its time tells nothing."""
    path = published(opened, "s", durable=False, checked=False)
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(64)
        file.write(bytes(4))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert opened.disk.open_segment(SPACE, "s") is None
    assert opened.count("snapshotDamagedCount") == 1
    assert not path.exists()


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
