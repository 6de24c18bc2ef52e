"""The cache in memory answers as an ordered dictionary would that knows the same bounds."""

import contextlib
import dataclasses
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup.cache.lookup_cache import LookupCache
from pyspark_lookup.cache.memory import KEY_INDEX, CachedRows
from pyspark_lookup.columnar.keys import Keys, Seed
from tests.support.fakes import FakeClock
from tests.support.fuzzing import fuzzed
from tests.support.key_values import KINDS, plain, scalar_values
from tests.support.memory_cache import (
    ROWS,
    UNBOUNDED,
    Dictionary,
    Row,
    counts,
    make_cache,
    make_disk_cache,
    make_row,
    opened,
    small,
)

WEAK = Seed(1, 1)  # leaves small numbers where they are: all at the first slot


@dataclasses.dataclass(frozen=True)
class Bounds:
    expire_after_access_s: int | None
    expire_after_write_s: int | None
    max_rows: int | None
    max_bytes: int | None
    cache_missing_key: bool

    @property
    def by_age_and_size(self) -> bool:
        return self.expire_after_write_s is not None and (self.max_rows, self.max_bytes) != (None, None)


@dataclasses.dataclass
class Entry:
    rows: list[Row]
    bytes: int
    used_s: float
    written_s: float

    @property
    def weight(self) -> int:
        return max(len(self.rows), 1)


class Model:
    """The cache as a few lines of Python have it: an ordered dictionary, the least recently used first."""

    def __init__(self, bounds: Bounds, entry_bytes: Callable[[Any, list[Row]], int]) -> None:
        self.bounds = bounds
        self.entries: OrderedDict[Any, Entry] = OrderedDict()
        self.hits = self.misses = 0
        self._entry_bytes = entry_bytes

    def purge(self, now_s: float) -> None:
        for key, entry in list(self.entries.items()):
            access_s, write_s = self.bounds.expire_after_access_s, self.bounds.expire_after_write_s
            idle = access_s is not None and now_s - entry.used_s >= access_s
            if idle or (write_s is not None and now_s - entry.written_s >= write_s):
                del self.entries[key]

    def get(self, keys: list[Any], now_s: float, access: bool = True) -> list[list[Row] | None]:
        self.purge(now_s)
        answer: list[list[Row] | None] = []
        for key in keys:
            entry = self.entries.get(key)
            answer.append(None if entry is None else entry.rows)
            if not access or None in key:
                continue
            if entry is None:
                self.misses += 1
            else:
                self.hits += 1
                entry.used_s = now_s
                self.entries.move_to_end(key)
        return answer

    def put(self, batch: list[tuple[Any, list[Row], int]], now_s: float) -> None:
        last: dict[Any, tuple[list[Row], int]] = {}
        for key, rows, age in batch:
            if rows or self.bounds.cache_missing_key:
                last.pop(key, None)
                last[key] = rows, age
        for key in last:
            self.entries.pop(key, None)
        most_rows = UNBOUNDED if self.bounds.max_rows is None else self.bounds.max_rows
        most_bytes = UNBOUNDED if self.bounds.max_bytes is None else self.bounds.max_bytes
        for key, (rows, age) in last.items():
            entry = Entry(rows, self._entry_bytes(key, rows), now_s, now_s - age)
            if entry.weight <= most_rows and entry.bytes <= most_bytes:
                self.entries[key] = entry
        self.purge(now_s)
        while self.size() > most_rows or self.bytes() > most_bytes:
            self.entries.popitem(last=False)

    def invalidate(self, keys: list[Any]) -> None:
        for key in keys:
            self.entries.pop(key, None)

    def size(self) -> int:
        return sum(entry.weight for entry in self.entries.values())

    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries.values())


@dataclasses.dataclass(frozen=True)
class Step:
    """After `tick` seconds do `name` with keys of the pool (below zero: with a null), their numbers of rows and ages; `mixed`: their order."""

    name: str
    keys: list[tuple[int, int, int]]
    tick: int
    mixed: int


STEPS = st.builds(
    Step,
    st.sampled_from(["put", "put", "put", "get", "get", "peek", "invalidate", "wait", "close"]),
    st.lists(st.tuples(st.integers(-2, 11) | st.integers(-2, 59), st.integers(0, 3), st.integers(0, 3)), max_size=8),
    st.integers(0, 2),
    st.integers(1, 3),
)


@contextlib.contextmanager
def hashing(hashes: str) -> Iterator[None]:
    """Sizes inside the cache are small; hashes depend on the seed, or are all alike."""
    with small(), pytest.MonkeyPatch.context() as patch:
        if hashes == "alike":
            patch.setattr(Keys, "hashes", lambda keys, seed: np.zeros(keys.rows, np.uint64))
        yield


@st.composite
def drawn_bounds(draw: st.DrawFn) -> Bounds:
    seconds = st.sampled_from([None, None, 1, 3, 6, 0])
    access_s, write_s = draw(seconds), draw(seconds)
    rows = draw(st.none() | st.integers(1, 12) | st.sampled_from([UNBOUNDED, 0]))
    size = draw(st.none() | st.none() | st.integers(0, 1500))
    if access_s is write_s is rows is size is None:
        rows = 6
    return Bounds(access_s, write_s, rows, size, draw(st.booleans()))


class Pair:
    """A cache and its model, which get the same calls and are compared after each step."""

    def __init__(self, kinds: Sequence[pa.DataType], pool: list[tuple[Any, ...]], bounds: Bounds, hashes: str) -> None:
        self.clock = FakeClock()
        self.bounds = bounds
        self.kinds = kinds
        self.pool = pool
        self.cache, self.metrics = opened(make_cache(self.clock, **dataclasses.asdict(bounds)))
        if hashes == "weak":
            self.cache._seed = WEAK
        self.model = Model(bounds, self.entry_bytes)
        self._raw = dict(zip(self.table(pool)[1], pool, strict=True))
        self.results: list[tuple[CachedRows, list[list[Row] | None]]] = []
        self._serial = 0
        self._alone: dict[tuple[Any, ...], int] = {}

    def table(self, keys: Sequence[tuple[Any, ...]]) -> tuple[pa.Table, list[tuple[Any, ...]]]:
        """Keys as a table, and as the model knows them."""
        columns = [pa.array([key[n] for key in keys], kind) for n, kind in enumerate(self.kinds)]
        table = pa.table(dict(zip("abc", columns, strict=False)))
        return table, list(zip(*map(plain, columns), strict=True))

    def step_keys(self, step: Step) -> tuple[pa.Table, list[tuple[Any, ...]]]:
        keys = []
        for number, _, _ in step.keys:
            key = list(self.pool[number % len(self.pool)])
            if number < 0:
                key[number % len(key)] = None
            keys.append(tuple(key))
        return self.table(keys)

    def entry_bytes(self, key: Any, rows: list[Row]) -> int:
        """Bytes of an entry, which are those that a cache with nothing else holds."""
        entry = (key, *(row["v"] for row in rows))
        if entry not in self._alone:
            alone = make_cache()
            table, _ = self.table([self._raw[key]])
            alone.put_many(table, pa.Table.from_pylist([{**row, KEY_INDEX: 0} for row in rows], ROWS))
            self._alone[entry] = alone.bytes()
        return self._alone[entry]

    def do(self, step: Step, watched: bool) -> None:
        self.clock.tick(step.tick)
        now_s = self.clock.steady_s
        if watched:
            self.compare_size()
        if step.name == "put":
            self.put_step(dataclasses.replace(step, keys=[(max(number, 0), *more) for number, *more in step.keys]))
        elif step.name in ("get", "peek"):
            keys, model_keys = self.step_keys(step)
            answer = self.cache.get_many(keys) if step.name == "get" else self.cache.peek_many(keys)
            self.check(answer, self.model.get(model_keys, now_s, step.name == "get"))
        elif step.name == "invalidate":
            keys, model_keys = self.step_keys(step)
            self.cache.invalidate_many(keys)
            self.model.invalidate(model_keys)
        elif step.name == "close" and step.mixed == 1:
            self.cache.close()
            self.model.entries.clear()
        keys, model_keys = self.table(self.pool)
        self.check(self.cache.peek_many(keys), self.model.get(model_keys, now_s, access=False))
        assert counts(self.metrics) == (self.model.hits, self.model.misses)
        assert self.bounds.max_bytes is None or self.cache.bytes() <= self.bounds.max_bytes
        if watched:
            self.compare_size()

    def put_step(self, step: Step) -> None:
        keys, model_keys = self.step_keys(step)
        rows: list[list[Row]] = []
        for _, count, _ in step.keys:
            rows.append([make_row(self._serial + n) for n in range(count)])
            self._serial += count
        flat = [{**row, KEY_INDEX: place} for place, key_rows in enumerate(rows) for row in key_rows]
        flat.sort(key=lambda row: row["v"] % step.mixed)
        together = [
            [{name: row[name] for name in "vtb"} for row in flat if row[KEY_INDEX] == n] for n in range(len(model_keys))
        ]
        ages = [age for _, _, age in step.keys] if step.tick else [0] * len(model_keys)
        if self.bounds.by_age_and_size and self.bounds.expire_after_write_s:
            ages = [min(age, self.bounds.expire_after_write_s - 1) for age in ages]
        self.cache.put_many(keys, pa.Table.from_pylist(flat, ROWS), np.array(ages, np.float64) if step.tick else None)
        self.model.put(list(zip(model_keys, together, ages, strict=True)), self.clock.steady_s)

    def compare_size(self) -> None:
        self.model.purge(self.clock.steady_s)
        assert self.cache.size() == self.model.size()
        assert self.cache.bytes() == self.model.bytes()
        gauges = self.metrics.snapshot()
        if self.model.entries:
            assert (gauges["numCachedRecords"], gauges["numCachedBytes"]) == (self.model.size(), self.model.bytes())

    def check(self, answer: CachedRows, expected: list[list[Row] | None]) -> None:
        self.compare(answer, expected)
        self.results.append((answer, expected))

    def compare_results(self) -> None:
        for answer, expected in self.results:
            self.compare(answer, expected)

    def compare(self, answer: CachedRows, expected: list[list[Row] | None]) -> None:
        assert answer.present.dtype == np.bool_
        assert answer.present.tolist() == [rows is not None for rows in expected]
        together = [{**row, KEY_INDEX: place} for place, rows in enumerate(expected) for row in rows or ()]
        if answer.rows is None:
            assert not together
        else:
            assert answer.rows.schema == ROWS
            assert answer.rows.to_pylist() == together


COMPOSITE = (pa.int32(), pa.string()), (pa.string(), pa.float64(), pa.bool_())
KEY_KINDS: list[tuple[pa.DataType, ...]] = [*((kind,) for kind in KINDS), *COMPOSITE]


@pytest.mark.parametrize("kinds", KEY_KINDS, ids=lambda kinds: "-".join(map(str, kinds)))
@fuzzed(12)
@given(data=st.data())
def test_a_cache_is_an_ordered_dictionary(kinds: tuple[pa.DataType, ...], data: st.DataObject) -> None:
    """Whatever is put, read and forgotten, with hashes that collide or do not: rows, order, size, bytes and counts are the model's."""
    size = data.draw(st.sampled_from([(1, 12), (1, 12), (40, 60)]), label="size")
    pool = data.draw(st.lists(st.tuples(*map(scalar_values, kinds)), min_size=size[0], max_size=size[1]), label="pool")
    bounds = data.draw(drawn_bounds(), label="bounds")
    hashes = data.draw(st.sampled_from(["good", "weak", "alike"]), label="hashes")
    # By age an entry is taken away from time to time only, unless somebody asks for the size.
    watched = bounds.by_age_and_size or data.draw(st.booleans(), label="watched")
    with hashing(hashes):
        pair = Pair(kinds, pool, bounds, hashes)
        for step in data.draw(st.lists(STEPS, max_size=25) | st.lists(STEPS, min_size=20, max_size=40), label="steps"):
            pair.do(step, watched)
        pair.compare_results()


@pytest.mark.parametrize("cache_kind", ["one key at a time", pytest.param("on disk", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kinds", KEY_KINDS, ids=lambda kinds: "-".join(map(str, kinds)))
@fuzzed(3)
@given(data=st.data())
def test_other_caches(kinds: tuple[pa.DataType, ...], cache_kind: str, data: st.DataObject) -> None:
    """A cache of single keys and a cache on disk answer as the cache in memory does: keys of every type, absences, nulls."""
    values = [st.integers(-700_000, 700_000) if pa.types.is_temporal(kind) else scalar_values(kind) for kind in kinds]
    pool = data.draw(st.lists(st.tuples(*values), min_size=1, max_size=8))  # Python has not all times
    keys = data.draw(st.lists(st.tuples(*(value | st.none() for value in values)), max_size=8))
    reference = make_cache()
    directory = tempfile.TemporaryDirectory()
    slow: LookupCache = Dictionary() if cache_kind == "one key at a time" else make_disk_cache(Path(directory.name))
    columns = [[pa.array([key[n] for key in part], kind) for n, kind in enumerate(kinds)] for part in (pool, keys)]
    table, probes = (pa.table(dict(zip("abc", arrays, strict=False))) for arrays in columns)
    probes = pa.concat_tables([probes, table])
    counts = data.draw(st.lists(st.integers(0, 2), min_size=len(pool), max_size=len(pool)))
    rows = [{**make_row(n), KEY_INDEX: place} for place, n in enumerate(counts) for n in range(n)]
    invalidated = table.slice(data.draw(st.integers(0, len(pool))))
    assert slow.get_many(table).rows is None
    for cache in (slow, reference):
        cache.put_many(table, pa.Table.from_pylist(rows, ROWS))
        cache.invalidate_many(invalidated)
    for answer, expected in (
        (slow.get_many(probes), reference.get_many(probes)),
        (slow.peek_many(probes), reference.peek_many(probes)),
    ):
        assert answer.present.tolist() == expected.present.tolist()
        assert expected.rows is not None
        assert answer.rows == expected.rows
    with pytest.raises(ValueError, match="has a null"):
        slow.put_many(pa.table({name: pa.nulls(1) for name in probes.column_names}), pa.Table.from_pylist([], ROWS))
    directory.cleanup()
