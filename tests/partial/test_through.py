"""The partial cache: a lookup through the caches."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyspark_lookup.cache.memory import DefaultLookupCache
from tests.fakes import FakeClock
from tests.partial.common import NONE, Source, Worker, differing

SHARED = pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "alone"])


def test_an_interrupted_load_is_a_failure(cache_dir: Path, source: Source) -> None:
    """Also where it is no error of ours, and the keys are free for others."""
    worker = Worker(cache_dir, source)

    def interrupt(keys: list[int]) -> None:
        raise KeyboardInterrupt

    source.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        worker.lookup(1)
    assert worker.told() == (0, 1, 0, 1)
    assert list((cache_dir / "v1" / "claims").glob("*/*")) == []


@SHARED
def test_entries_are_as_old_as_the_moment_before_their_load(
    cache_dir: Path, clock: FakeClock, source: Source, is_shared: bool
) -> None:
    """What took three seconds to load is three seconds old when it comes, here and for the host; so long the load took."""
    bounds = dataclasses.replace(NONE, expire_after_write_s=10.0)
    root = cache_dir if is_shared else None
    worker = Worker(root, source, clock, bounds)
    source.before = lambda keys: clock.tick(3)
    worker.lookup(1, 2)
    assert worker.count("latestLoadTime") == 3000
    source.before = lambda keys: None
    clock.tick(6.875)
    worker.lookup(1)
    if is_shared:
        other = Worker(root, source, clock, bounds)
        assert other.lookup(1) == [[10]]
        assert source.loaded() == [1, 2]
        clock.tick(0.125)
        other.lookup(1)
        assert source.loaded() == [1]
    else:
        clock.tick(0.125)
        worker.lookup(1, 2)
        assert source.loaded() == [1, 1, 2, 2]
        assert worker.count("latestLoadTime") == 0


def in_use(worker: Worker) -> list[float]:
    """When each shared key was last used, in seconds since the clock began; 0: not since its load, or no key."""
    assert worker.process is not None
    found: list[float] = []
    for path in worker.process.directory.glob("*.used"):
        found += [max(used / 1000 - 1000, 0) for used in np.frombuffer(path.read_bytes(), np.int64).tolist()]
    return sorted(found)


def test_the_host_is_told_what_is_in_use(cache_dir: Path, clock: FakeClock, source: Source) -> None:
    """While a process answers all by itself it says once a second at most what it uses, or others would give that up."""
    worker = Worker(cache_dir, source, clock)
    worker.lookup(1, 2)
    assert in_use(worker) == [0, 0, 0]
    for seconds, expected in ((0.5, [0, 0, 0]), (0.5, [0, 0, 1]), (0.75, [0, 0, 1]), (0.25, [0, 0, 2])):
        clock.tick(seconds)
        worker.lookup(2, 2, None)
        assert in_use(worker) == expected
    clock.tick(3)
    worker.lookup(1, 2)
    assert in_use(worker) == [0, 5, 5]
    Worker(cache_dir, source, clock).lookup(1)
    assert worker.told() == (2 + 4 * 2, 2, 2, 0)


VERSIONS = {
    "v1": {1: [10], 2: [20, 21], 3: []},
    "v2": {1: [11], 2: [20, 21], 3: []},
}


@SHARED
@pytest.mark.parametrize("one_cache", [True, False])
def test_who_still_answers_from_an_older_version(
    cache_dir: Path, clock: FakeClock, is_shared: bool, one_cache: bool
) -> None:
    """A load that began before the version changed answers its caller, and comes into no cache of the new version."""
    source = Source(**VERSIONS)
    cache = DefaultLookupCache(max_rows=100, clock=clock.host().steady_s, rng=random.Random(7))
    worker = Worker(cache_dir if is_shared else None, source, clock, make=(lambda: cache) if one_cache else None)
    seen: list[Any] = []

    def switch(keys: list[int]) -> None:
        source.before = lambda keys: None
        seen.append(worker.lookup(2, version="v2", may_differ=differing(1)))

    source.before = switch
    assert worker.lookup(1, 2) == [[10], [20, 21]]
    assert seen == [[[20, 21]]]
    assert worker.lookup(1, 2, version="v2", may_differ=differing(1)) == [[11], [20, 21]]
    source.loaded()
    # And a lookup that begins later finds what is there of its own version only.
    assert worker.lookup(1, 2, may_differ=differing(1)) == [[10], [20, 21]]
    assert source.loaded() == ([] if is_shared else [1, 2])
    assert worker.lookup(1, version="v2", may_differ=differing(1)) == [[11]]
