"""The partial cache: generated histories."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup.cache.partial.host_cache import REFUSE_ABOVE, Bounds
from pyspark_lookup.columnar.keys import Numbers
from pyspark_lookup.storage.disk import Disk
from tests.support.fakes import FakeClock
from tests.support.fuzzing import fuzzed
from tests.support.partial_cache import BOUNDED, NONE, Differ, Process, new_directory

IDS = st.integers(0, 9)
KEYS = st.lists(IDS, min_size=1, max_size=6, unique=True)
STEPS = [
    st.tuples(st.just("put"), st.integers(0, 1), KEYS), st.tuples(st.just("put"), st.integers(0, 1), KEYS),
    st.tuples(st.just("get"), st.integers(0, 2), KEYS), st.tuples(st.just("get"), st.integers(0, 2), KEYS),
    st.tuples(st.just("merge"), st.integers(0, 1), st.booleans()),
    st.tuples(st.just("change"), st.lists(IDS, max_size=3)), st.tuples(st.just("touch"), st.integers(0, 1), KEYS),
    st.tuples(st.just("tick"), st.sampled_from([0.0, 0.5, 4.0, 9.5, 10.0])),
    st.tuples(st.just("straggle"), st.integers(0, 1), KEYS, st.integers(1, 3)),
]  # fmt: skip


class History:
    """A table that changes from version to version, two processes that share loads of it, and what must be true of them."""

    def __init__(self, root: Path, bounds: Bounds) -> None:
        self.clock = FakeClock()
        self.root, self.bounds = root, bounds
        self.exact = bounds.rows == bounds.bytes == math.inf
        self.processes = [Process(root / "cache", self.clock, bounds) for _ in range(2)]
        self.serial = 0
        self.tables: list[dict[int, list[int]]] = [{key: self.new(key) for key in range(10)}]
        self.shared: set[int] = set()  # keys that somebody put and that did not change since
        self.written_s: dict[int, float] = {}
        self.surely_written_s: dict[int, float] = {}  # with the rows of now
        self.used_s: dict[int, float] = {}  # or touched, wherever it was
        self.surely_used_s: dict[int, float] = {}

    def new(self, key: int) -> list[int]:
        self.serial += 1
        return [self.serial * 100 + n for n in range((key + self.serial // 2) % 4)]

    def may_differ(self, number: int) -> Differ:
        def answer(version: str, keys: Sequence[pa.Array]) -> Numbers | None:
            old_number = int(version.removeprefix("v"))
            if not self.exact and (old_number + number) % 3 == 0:
                return None
            new_rows, old_rows = self.tables[number], self.tables[old_number]
            wary = 0 if self.exact else 3  # says so of some that do not
            return np.array(
                [new_rows[key] != old_rows[key] or (wary and key % wary == 0) for key in keys[0].to_pylist()], bool
            )

        return answer

    def step(self, kind: str, *args: Any) -> None:
        current = len(self.tables) - 1
        if kind == "change":
            self.tables.append({**self.tables[-1], **{key: self.new(key) for key in args[0]}})
            self.shared -= set(args[0])
        elif kind == "tick":
            self.clock.tick(args[0])
        elif kind == "merge":
            with pytest.MonkeyPatch.context() as patch:
                if args[1]:  # killed before it clears up
                    patch.setattr(Disk, "unlink_segment", lambda self, table, name: None)
                self.processes[args[0]].merge()
        elif kind == "touch":
            self.processes[args[0]].touch(*args[1])
            self.used_s |= dict.fromkeys(args[1], self.clock.steady_s)
        elif kind in {"put", "straggle"}:
            number = max(current - (args[2] if kind == "straggle" else 0), 0)
            table = self.tables[number]
            rows = {key: table[key] for key in args[1]}
            is_latest = functools.partial(lambda number: number == len(self.tables) - 1, number)  # when it is asked
            self.processes[args[0]].put(rows, f"v{number}", self.may_differ(number), is_latest)
            times = dict.fromkeys(args[1], self.clock.steady_s)
            self.written_s |= times
            self.used_s |= times
            if kind == "put":
                self.shared |= set(args[1])
                self.surely_written_s |= times
                self.surely_used_s |= times
        else:
            self.get(current, *args)

    def get(self, number: int, process: int, keys: Sequence[int]) -> None:
        reader = self.processes[process] if process < 2 else Process(self.root / "cache", self.clock, self.bounds)
        before = reader.count("sharedCarriedOverCount")
        answers = reader.get(*keys, version=f"v{number}", may_differ=self.may_differ(number))
        answered = [key for key in keys if answers[key] is not None]
        assert {key: answers[key] for key in answered} == {key: self.tables[number][key] for key in answered}
        assert reader.count("sharedCarriedOverCount") - before <= len(answered)
        assert all(self.is_fresh(key, self.written_s, self.used_s) for key in answered)
        assert self.bounds.missing_keys or all(answers[key] for key in answered)
        if self.exact:
            lasting = self.shared & set(keys) - set(answered)
            assert not any(self.is_fresh(key, self.surely_written_s, self.surely_used_s) for key in lasting)
        self.used_s |= dict.fromkeys(answered, self.clock.steady_s)
        self.surely_used_s |= dict.fromkeys(answered, self.clock.steady_s)

    def is_fresh(self, key: int, written_s: dict[int, float], used_s: dict[int, float]) -> bool:
        write_s, access_s = self.bounds.expire_after_write_s, self.bounds.expire_after_access_s
        is_young = write_s is None or self.clock.steady_s - written_s[key] < write_s
        return is_young and (access_s is None or self.clock.steady_s - used_s[key] < access_s)

    def end(self) -> None:
        for number in range(len(self.tables) - 1 if self.exact else 0, len(self.tables)):
            self.get(number, 2, range(10))
        for process in self.processes:
            assert process.count("cacheFailureCount") == process.count("snapshotDamagedCount") == 0
            sizes = process.shared.sizes()
            assert sizes[0] <= self.bounds.rows * (REFUSE_ABOVE + 2)  # a load of each, not knowing of the other's


BOTH_EXPIRIES = dataclasses.replace(NONE, expire_after_access_s=4.5, expire_after_write_s=10.0)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize(
    "bounds", [*BOUNDED, BOTH_EXPIRIES], ids=["none", "rows", "bytes", "access", "write", "some", "both"]
)
@fuzzed(28)
@given(steps=st.lists(st.one_of(*STEPS), min_size=8, max_size=40))
def test_nothing_is_lost_before_its_time(bounds: Bounds, steps: list[tuple[Any, ...]]) -> None:
    """An answer is what the table has, or a miss; that only where a key has changed or expired, to the moment, or room is bounded."""
    with new_directory() as root:
        history = History(root, bounds)
        for step in steps:
            history.step(*step)
        history.end()
