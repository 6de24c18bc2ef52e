"""The partial cache: within the bounds."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from pyspark_lookup.cache.partial.host_cache import REFUSE_ABOVE
from tests.fakes import FakeClock
from tests.partial.common import NONE, Process, using


@pytest.mark.parametrize(
    ("bound", "most", "keys", "batch"),
    [("rows", 100, 200, 1), ("rows", 100, 200, 5), ("rows", 100, 200, 40), ("bytes", 60_000, 3000, 50)],
)
def test_what_is_held_stays_within_its_bound(
    cache_dir: Path, clock: FakeClock, bound: str, most: int, keys: int, batch: int
) -> None:
    """Whatever is put, what is held is above the bound by a load at most, and within it after each merge."""
    process = Process(cache_dir, clock, dataclasses.replace(NONE, **{bound: most}))
    for start in range(0, keys, batch):
        clock.tick(1)
        process.put({start + n: [n, 10**15 + n][: n % 3] for n in range(batch)})
        process.merge()
        size = process.shared.sizes()[bound == "bytes"]
        assert size <= most
    assert size > 0.4 * most
    assert process.shared.sizes()[1] == sum((process.directory / name).stat().st_size for name in process.names())
    assert process.count("sharedEvictedCount") > 0
    assert process.count("sharedRefusedCount") == 0
    assert process.get(keys - 1) == {keys - 1: [batch - 1, 10**15 + batch - 1][: (batch - 1) % 3]}


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
    process = Process(cache_dir, clock, dataclasses.replace(NONE, rows=80))
    for number in range(9):
        process.put({number * 10 + n: [n] for n in range(10)})
    assert process.shared.sizes()[0] == 80 * REFUSE_ABOVE
    process.put({500: [1]})
    assert process.shared.sizes()[0] == 80 * REFUSE_ABOVE + 1
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
    for keys in (range(10), range(10, 60)):
        merging.put({key: [key] for key in keys}, "v1")
        clock.tick(1)
    reading.touch(*range(10))
    merging.put({key: [key] for key in range(60, 110)}, "v2", using(clock, reading, *range(10)))
    assert merging.merge() == 1
    assert merging.count("sharedEvictedCount") > 0
    assert merging.get(*range(10), version="v2") == {key: [key] for key in range(10)}


def test_what_is_used_during_a_get_has_not_expired(cache_dir: Path, clock: FakeClock) -> None:
    """An entry that another process uses while one looks for it is there."""
    bounds = dataclasses.replace(NONE, expire_after_access_s=10.0)
    one, other = Process(cache_dir, clock, bounds), Process(cache_dir, clock, bounds)
    one.put({1: [1]}, "v1")
    clock.tick(9)
    other.touch(1)
    clock.tick(9)
    assert one.get(1, version="v2", may_differ=using(clock, other, 1)) == {1: [1]}
