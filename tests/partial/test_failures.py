"""The partial cache: what goes wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyspark_lookup.io.disk import Disk
from tests.fakes import FakeClock
from tests.partial.common import NONE, Process
from tests.test_segments import files_at_most


@contextlib.contextmanager
def failing(what: int | str) -> Iterator[None]:
    """A disk that takes files of so many bytes, or a call of the directory that fails."""

    def fail(*args: Any, **more: Any) -> None:
        raise OSError("failed on purpose")

    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        if isinstance(what, int):
            stack.enter_context(files_at_most(what))
        else:
            patch.setattr(Disk, what, fail)
        yield


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("merging", [False, True], ids=["put", "merge"])
@pytest.mark.parametrize("what", [0, 5, 100, 1500, "create_segment", "open_numbers", "publish_segment"])
def test_what_fails_changes_nothing(process: Process, what: int | str, merging: bool) -> None:
    """A load or merge that finds no room, or is killed before it is published, is counted and changes nothing; later it is done."""
    rows = {n: list(range(500)) for n in range(4)}
    for key in range(3 if merging else 2):
        process.put({key: rows[key]})
    before = process.names()
    with failing(what):
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
