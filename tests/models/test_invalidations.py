"""Random histories of a table whose values change, and of keys that are invalidated: by processes that stall, on clocks that are set."""

import dataclasses
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pytest

from pyspark_lookup.cache.partial import invalidations
from pyspark_lookup.cache.partial.host_cache import Freshness
from tests.support.fakes import FakeClock
from tests.support.fuzzing import seeds
from tests.support.partial_cache import ROWS, Source, Worker, unknown

_HISTORIES = 4
_STEPS = 40
_KEYS = range(2)


class _Host:
    """The processes of a host, and a table whose values count how often their key has changed."""

    def __init__(self, root: Path, seed: int) -> None:
        self._rng = random.Random(seed)
        self._clock = FakeClock()
        self._source = Source(v1={key: [0] for key in _KEYS})
        self._least = defaultdict[int, int](int)
        self._stalled: list[Callable[[], None]] = []
        self._root = root
        self._processes = [self._process() for _ in range(3)]

    def _process(self) -> Worker:
        def steady_s() -> float:
            now_s = self._clock.steady_s
            while self._stalled:
                self._stalled.pop()()
            return now_s

        host = dataclasses.replace(self._clock.host(), steady_s=steady_s)
        return Worker(self._root, self._source, self._clock, host=host)

    def take(self, steps: int) -> None:
        for _ in range(steps):
            self._clock.tick(self._rng.choice((0.001, 1.0)))
            (step,) = self._rng.choices(
                (self._change, self._look, self._invalidate, self._set, self._merge), (4, 5, 4, 1, 1)
            )
            step()

    def _change(self) -> None:
        self._source.versions["v1"][self._rng.choice(_KEYS)][0] += 1  # type: ignore[index]

    def _look(self) -> None:
        least = dict(self._least)
        keys = self._rng.sample(_KEYS, self._rng.randint(1, 2))
        for key, (value,) in zip(keys, self._rng.choice(self._processes).lookup(*keys), strict=True):
            assert value >= least.get(key, 0), f"key {key} was invalidated since it was {value}"

    def _invalidate(self) -> None:
        keys = self._rng.sample(_KEYS, self._rng.randint(1, 2))
        values = {key: self._source.versions["v1"][key][0] for key in keys}
        if self._rng.random() < 0.5:
            self._stalled.append(lambda: self.take(self._rng.randint(2, 7)))
        self._rng.choice(self._processes).invalidations.add(pa.table({"k": pa.array(keys, pa.int64())}))
        self._clock.tick(0.001)
        for key, value in values.items():
            self._least[key] = max(self._least[key], value)

    def _set(self) -> None:
        self._clock.wall_s += self._rng.choice((-3600.0, 3600.0))
        self._processes[self._rng.randrange(3)] = self._process()

    def _merge(self) -> None:
        self._rng.choice(self._processes).process.shared._merge(Freshness("v1", ROWS, unknown))


def test_no_process_answers_from_before_an_invalidation(tmp_path: Path) -> None:
    """No answer is from before an invalidation, whichever process loaded a row. Some are recorded with their keys, others with their time."""
    for seed in seeds(_HISTORIES):
        with mock.patch.object(invalidations, "_BYTES_AT_MOST", (23, 2**20)[seed % 4 == 0]):
            try:
                _Host(tmp_path / str(seed), seed).take(_STEPS)
            except AssertionError as problem:
                pytest.fail(f"seed {seed}: {problem}", pytrace=False)
