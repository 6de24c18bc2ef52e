"""The partial cache: expiry."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.fakes import FakeClock
from tests.partial.common import EXPIRING, NONE, Process


def test_expiry_after_write(cache_dir: Path, clock: FakeClock) -> None:
    """An entry is gone exactly the given time after its load, whoever uses it meanwhile, also that of a key without rows; another load starts anew."""
    bounds = dataclasses.replace(NONE, expire_after_write_s=10.0)
    one, other = Process(cache_dir, clock, bounds), Process(cache_dir, clock, bounds)
    one.put({1: [1], 2: [2], 3: []})
    clock.tick(9.5)
    assert other.get(1, 2, 3) == {1: [1], 2: [2], 3: []}
    one.put({2: [3]})
    clock.tick(0.499)
    assert other.get(1) == {1: [1]}
    one.touch(1)
    clock.tick(0.001)
    for process in (one, other, Process(cache_dir, clock, bounds)):
        assert process.get(1, 2, 3) == {1: None, 2: [3], 3: None}
    clock.tick(9.5)
    assert other.get(2) == {2: None}


@pytest.mark.parametrize("use", ["get", "touch", "another's get"])
def test_expiry_after_access(cache_dir: Path, clock: FakeClock, use: str) -> None:
    """An entry is gone exactly the given time after its last use in any process; each use starts the time anew."""
    bounds = dataclasses.replace(NONE, expire_after_access_s=10.0)
    one, other = Process(cache_dir, clock, bounds), Process(cache_dir, clock, bounds)
    one.put({1: [1, 2], 2: [], 3: [3]})
    clock.tick(9.0)
    if use == "touch":
        one.touch(1, 2, 2)
    else:
        (one if use == "get" else other).get(1, 2)
    clock.tick(1.0)
    for process in (one, other, Process(cache_dir, clock, bounds)):
        assert process.get(3) == {3: None}
    clock.tick(8.875)
    assert Process(cache_dir, clock, bounds).get(1, 2, 3) == {1: [1, 2], 2: [], 3: None}
    clock.tick(9.875)
    assert other.get(2) == {2: []}
    clock.tick(0.125)
    for process in (one, other):
        assert process.get(1, 2) == {1: None, 2: []}
    clock.tick(10)
    assert one.get(1, 2, 3) == {1: None, 2: None, 3: None}


def test_what_was_replaced_does_not_come_back(cache_dir: Path, clock: FakeClock) -> None:
    """With both times to live the sooner one counts."""
    bounds = dataclasses.replace(NONE, expire_after_access_s=4.0, expire_after_write_s=10.0)
    process = Process(cache_dir, clock, bounds)
    process.put({1: [1], 2: [2]})
    for _ in range(3):
        clock.tick(3)
        assert process.get(1) == {1: [1]}
    assert process.get(2) == {2: None}
    clock.tick(1)
    assert process.get(1) == {1: None}


@pytest.mark.parametrize("bound", [{}, *EXPIRING], ids=["none", "write", "access"])
def test_another_boot(cache_dir: Path, clock: FakeClock, bound: dict[str, float]) -> None:
    """Nobody knows how old an entry is whose host was started anew: it has expired if entries expire, else it is good."""
    bounds = dataclasses.replace(NONE, **bound)
    Process(cache_dir, clock, bounds, boot="before").put({1: [1], 2: []})
    process = Process(cache_dir, clock, bounds, boot="after")
    assert process.get(1, 2, 3) == ({1: None, 2: None, 3: None} if bound else {1: [1], 2: [], 3: None})
    process.put({1: [5]})
    assert process.get(1) == {1: [5]}
