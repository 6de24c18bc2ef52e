"""The partial cache: within the bounds."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pyspark_lookup.cache.partial.host_cache import REFUSE_ABOVE
from pyspark_lookup.columnar.keys import Numbers
from tests.fakes import FakeClock
from tests.partial.common import NONE, Process


@pytest.mark.parametrize("batch", [1, 5, 40])
def test_rows_stay_within_their_bound(cache_dir: Path, clock: FakeClock, batch: int) -> None:
    """Whatever is put, what is held is above the bound by a load at most, and within it after each merge."""
    process = Process(cache_dir, clock, dataclasses.replace(NONE, rows=100))
    for number in range(200 // batch):
        clock.tick(1)
        process.put({number * batch + n: [n] * (n % 3) for n in range(batch)})
        process.merge()
        assert process.shared.sizes()[0] <= 100
    assert process.shared.sizes()[0] > 40
    assert process.count("sharedEvictedCount") > 0
    assert process.count("sharedRefusedCount") == 0


def test_bytes_stay_within_their_bound(cache_dir: Path, clock: FakeClock) -> None:
    """So are the bytes of the files."""
    process = Process(cache_dir, clock, dataclasses.replace(NONE, bytes=60_000))
    evicted = 0
    for number in range(60):
        clock.tick(1)
        process.put({number * 50 + n: [n, 10**15 + n] for n in range(50)})
        process.merge()
        size = process.shared.sizes()[1]
        assert size == sum((process.directory / name).stat().st_size for name in process.names())
        assert size <= 60_000
        evicted = max(evicted, process.count("sharedEvictedCount"))
    assert size > 30_000
    assert evicted
    assert process.get(59 * 50) == {59 * 50: [0, 10**15]}


def used_order(process: Process, clock: FakeClock, rng: random.Random, counts: Mapping[int, int]) -> list[int]:
    """Use the keys one after the other, in any order; the latest one first."""
    order = list(counts)
    rng.shuffle(order)
    for key in order:
        clock.tick(0.25)
        if rng.random() < 0.5:
            process.touch(key)
        else:
            assert process.get(key) == {key: [key * 10 + n for n in range(counts[key])]}
    return order[::-1]


@pytest.mark.parametrize("merged_before", [False, True])
@pytest.mark.parametrize("number", range(4))
def test_eviction_keeps_what_was_used_last(cache_dir: Path, clock: FakeClock, number: int, merged_before: bool) -> None:
    """Exactly the keys used last stay, as many as fit in seven eighths of the bound; each with all its rows."""
    rng = random.Random(number)
    counts = {key: rng.randrange(4) for key in range(120)}
    large = Process(cache_dir, clock)
    keys = list(counts)
    rng.shuffle(keys)
    for start in range(0, 120, 12):
        large.put({key: [key * 10 + n for n in range(counts[key])] for key in keys[start : start + 12]})
        clock.tick(1)
    order = used_order(large, clock, rng, counts)
    if merged_before:
        assert large.merge() == 1
        assert len(large.names()) == 1
    small = Process(cache_dir, clock, dataclasses.replace(NONE, rows=80))
    clock.tick(1)
    small.get(999)  # has it look
    small.put({2000: [5]})
    assert small.count("sharedRefusedCount") == 1  # above nine eighths of 80
    assert small.merge() == 1
    room, kept = 70, []
    for key in order:
        room -= max(counts[key], 1)
        if room < 0:
            break
        kept.append(key)
    held = small.get(*counts)
    assert {key for key, rows in held.items() if rows is not None} == set(kept)
    assert all(len(held[key] or []) == counts[key] for key in kept)
    total = sum(max(n, 1) for n in counts.values())
    assert small.count("sharedEvictedCount") == total - small.shared.sizes()[0]
    assert small.shared.sizes()[0] <= 70


def test_of_those_used_at_one_moment_some_stay(cache_dir: Path, clock: FakeClock) -> None:
    """A single large load that is all of one age is not given up as a whole; each key stays with all its rows or goes."""
    process = Process(cache_dir, clock, dataclasses.replace(NONE, rows=1000))
    process.put({n: [n, n] for n in range(450)})
    process.put({n: [n, n] for n in range(450, 550)})
    assert process.merge() == 1
    held = process.get(*range(550))
    there = [key for key, rows in held.items() if rows is not None]
    assert 850 <= 2 * len(there) <= 875
    assert all(held[key] == [key, key] for key in there)


def test_too_much_is_refused(cache_dir: Path, clock: FakeClock) -> None:
    """Above nine eighths of a bound nothing more is put until a merge has made room; each refusal is counted."""
    bounds = dataclasses.replace(NONE, rows=80)
    process = Process(cache_dir, clock, bounds)
    limit = 80 * REFUSE_ABOVE
    for number in range(9):
        process.put({number * 10 + n: [n] for n in range(10)})
    assert process.shared.sizes()[0] == limit
    process.put({500: [1]})
    assert process.shared.sizes()[0] == limit + 1
    assert process.count("sharedRefusedCount") == 0
    process.put({600: [1]})
    process.put({601: [1], 602: []})
    assert process.count("sharedRefusedCount") == 2
    assert process.get(600, 601) == {600: None, 601: None}
    assert process.merge() == 1
    process.put({600: [1]})
    assert process.get(600) == {600: [1]}


def test_a_load_larger_than_the_bound_is_not_shared(cache_dir: Path, clock: FakeClock) -> None:
    """It would drive out all the rest for itself."""
    process = Process(cache_dir, clock, dataclasses.replace(NONE, rows=10))
    process.put({1: [1]})
    process.put({2: list(range(11))})
    process.put({3: list(range(10))})
    assert process.get(1, 2, 3) == {1: [1], 2: None, 3: list(range(10))}
    nothing = Process(cache_dir.parent / "none", clock, dataclasses.replace(NONE, rows=0))
    nothing.put({1: [1], 2: []})
    assert nothing.get(1, 2) == {1: None, 2: None}
    assert nothing.names() == []


def test_what_is_used_during_an_eviction_is_not_taken_for_unused(cache_dir: Path, clock: FakeClock) -> None:
    """Keys that another process uses while room is made are those used last."""
    merging, reading = (Process(cache_dir, clock, dataclasses.replace(NONE, rows=100)) for _ in range(2))
    hot = range(10)
    merging.put({key: [key] for key in hot}, "v1")
    clock.tick(1)
    merging.put({key: [key] for key in range(10, 60)}, "v1")
    clock.tick(1)
    reading.touch(*hot)

    def slow(version: str, keys: Sequence[pa.Array]) -> Numbers:
        clock.tick(0.5)
        reading.touch(*hot)
        return np.zeros(len(keys[0]), np.bool_)

    merging.put({key: [key] for key in range(60, 110)}, "v2", slow)
    assert merging.merge() == 1
    assert merging.count("sharedEvictedCount") > 0
    assert merging.get(*hot, version="v2") == {key: [key] for key in hot}


def test_what_is_used_during_a_get_has_not_expired(cache_dir: Path, clock: FakeClock) -> None:
    """An entry that another process uses while one looks for it is there."""
    bounds = dataclasses.replace(NONE, expire_after_access_s=10.0)
    one, other = Process(cache_dir, clock, bounds), Process(cache_dir, clock, bounds)
    one.put({1: [1]}, "v1")
    clock.tick(9)
    other.touch(1)
    clock.tick(9)

    def slow(version: str, keys: Sequence[pa.Array]) -> Numbers:
        clock.tick(0.5)
        other.touch(1)
        return np.zeros(len(keys[0]), np.bool_)

    assert one.get(1, version="v2", may_differ=slow) == {1: [1]}
