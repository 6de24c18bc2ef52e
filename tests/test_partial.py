"""The partial cache: what one process loaded answers for all of the host, for as long as it is right."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import decimal
import gc
import itertools
import math
import multiprocessing
import os
import random
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import csv

from pyspark_lookup import planner
from pyspark_lookup.cache import KEY_INDEX, CachedRows, DefaultLookupCache, LookupCache
from pyspark_lookup.clock import HostClock
from pyspark_lookup.disk import Disk, key_of
from pyspark_lookup.errors import UfsUnavailableError
from pyspark_lookup.keys import Keys, Numbers, Seed
from pyspark_lookup.lookup import get_many, read_rows
from pyspark_lookup.metrics import CacheMetricGroup
from pyspark_lookup.options import LookupOptions
from pyspark_lookup.partial import PartialTables, changes, shared
from pyspark_lookup.partial.caching import Load, PartialCache
from pyspark_lookup.partial.changes import Changes
from pyspark_lookup.partial.flight import Flights
from pyspark_lookup.partial.shared import REFUSE_ABOVE, Bounds, Freshness, SharedCache, SharedRows
from pyspark_lookup.predicate import Among, ColumnStats, evaluate, joined_stats, may_match
from pyspark_lookup.reader import ReadTask
from pyspark_lookup.schema import cast_column, spark_type
from pyspark_lookup.snapshot.schedule import in_thread
from pyspark_lookup.table import TableVersion
from pyspark_lookup.ufs import FileVersion
from tests.fakes import FakeClock, Host, Later, make_host
from tests.processes.test_fill import in_fresh_process
from tests.test_claims import HereClock, run_all
from tests.test_columns import kinds, nested_values
from tests.test_disk import Opened, handles_below
from tests.test_full_cache import EACH, Table, publish
from tests.test_keys import KINDS, QUIET, SIGNALLING, bits, each_kind, examples, plain, values_of
from tests.test_segments import files_at_most

BOUND_S = 60.0  # far above what any of this takes
SEED = Seed(0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)
OTHER_SEED = Seed(0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SPACE = "0" * 32
KEYS = pa.schema([("k", pa.int64())])
ROWS = pa.schema([("v", pa.int64()), ("t", pa.string())])
NONE = Bounds(math.inf, math.inf, None, None, True)
Differ = Callable[[str, Sequence[pa.Array]], Numbers | None]
Held = dict[Any, list[Any] | None]


def unknown(version: str, keys: Sequence[pa.Array]) -> None:
    """Nothing is known of another version."""


def differing(*changed: int) -> Differ:
    """These keys may have other rows in any other version, and no others."""
    return lambda version, keys: np.isin(keys[0].to_numpy(), list(changed))


def rows_of(lists: Iterable[Sequence[int]]) -> pa.Table:
    """The rows of some keys, given as lists of values."""
    pairs = [(number, value) for number, values in enumerate(lists) for value in values]
    columns = {"v": [value for _, value in pairs], "t": [f"t{value}" for _, value in pairs]}
    schema = ROWS.append(pa.field(KEY_INDEX, pa.int64()))
    return pa.table({**columns, KEY_INDEX: [number for number, _ in pairs]}, schema=schema)


def by_key(keys: Sequence[Any], present: Iterable[bool], rows: pa.Table) -> Held:
    """The column v of each key's rows, None of a key that is absent; the text beside must be that row's."""
    held: Held = {key: [] if there else None for key, there in zip(keys, present, strict=True)}
    numbers = rows.column(KEY_INDEX).to_pylist()
    assert numbers == sorted(numbers)
    for number, value, text in zip(numbers, rows.column("v").to_pylist(), rows.column("t").to_pylist(), strict=True):
        there = held[keys[number]]
        assert there is not None
        assert text == f"t{value}"
        there.append(value)
    return held


class Process:
    """A process of a host as far as it shares loads: its view, its counters, and what it wants to do beside."""

    def __init__(
        self,
        root: Path,
        clock: FakeClock | None = None,
        bounds: Bounds = NONE,
        *,
        keys: pa.Schema = KEYS,
        boot: str = "boot-1",
        seed: Seed = SEED,
    ) -> None:
        self.clock = clock or FakeClock()
        self.host = self.clock.host(boot)
        self.metrics = CacheMetricGroup()
        self.disk = Disk(root, 2**30, self.metrics, lambda: self.clock.wall_s, random.Random(7))
        self.later = Later()
        self.seed = seed
        rng = random.Random(os.urandom(8))
        self.shared = SharedCache(self.disk, SPACE, keys, seed, bounds, self.metrics, self.host, rng, self.later)
        self.directory = root / "v1" / "snapshots" / SPACE

    def hashes(self, keys: Sequence[pa.Array]) -> Numbers:
        return Keys(keys).hashes(self.seed)

    def put_rows(
        self,
        keys: Sequence[pa.Array],
        rows: pa.Table,
        version: str = "v1",
        may_differ: Differ = unknown,
        latest: Callable[[], bool] = lambda: True,
    ) -> None:
        """Share rows that were loaded just now. Names of segments are times, so none has another's."""
        schema = pa.schema([field for field in rows.schema if field.name != KEY_INDEX])
        self.clock.wall_s += 0.001
        fresh = Freshness(version, schema, may_differ, latest)
        self.shared.put(keys, self.hashes(keys), rows, fresh, self.clock.steady_s)

    def get_rows(
        self, keys: Sequence[pa.Array], schema: pa.Schema, version: str = "v1", may_differ: Differ = unknown
    ) -> SharedRows | None:
        return self.shared.get(keys, self.hashes(keys), Freshness(version, schema, may_differ))

    def put(
        self,
        rows: Mapping[int, Sequence[int]],
        version: str = "v1",
        may_differ: Differ = unknown,
        latest: Callable[[], bool] = lambda: True,
    ) -> None:
        keys = [pa.array(list(rows), pa.int64())]
        self.put_rows(keys, rows_of(rows.values()), version, may_differ, latest)

    def get(self, *keys: int, version: str = "v1", may_differ: Differ = unknown) -> Held:
        found = self.get_rows([pa.array(keys, pa.int64())], ROWS, version, may_differ)
        if found is None:
            return dict.fromkeys(keys)
        assert found.present.any()
        assert (found.ages_s >= 0).all()
        return by_key(keys, found.present.tolist(), found.rows)

    def touch(self, *keys: int) -> None:
        arrays = [pa.array(keys, pa.int64())]
        self.shared.touch(arrays, self.hashes(arrays))

    def merge(self) -> int:
        """Do what waits to be done beside; how much that was."""
        waiting = [run for _, run in self.later.waiting]
        self.later.waiting.clear()
        for run in waiting:
            run()
        return len(waiting)

    def names(self) -> list[str]:
        return self.disk.segments(SPACE)

    def count(self, name: str) -> int:
        return self.metrics.snapshot()[name]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def process(cache_dir: Path, clock: FakeClock) -> Process:
    return Process(cache_dir, clock)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than two segments are many."""
    monkeypatch.setattr(shared, "_SEGMENTS_AT_MOST", 2)


@contextlib.contextmanager
def new_directory() -> Iterator[Path]:
    """A directory of its own for one of many examples."""
    with tempfile.TemporaryDirectory() as root:
        yield Path(root)


# --- rows by key, for all processes of a host --------------------------------------------------------


@pytest.mark.parametrize("missing", [True, False])
def test_what_was_put_is_there_for_all(cache_dir: Path, clock: FakeClock, missing: bool) -> None:
    """Rows come back in their order, also to another process at its next get; keys without rows as the bounds say."""
    bounds = dataclasses.replace(NONE, missing_keys=missing)
    one, other = Process(cache_dir, clock, bounds), Process(cache_dir, clock, bounds)
    assert other.get(1) == {1: None}
    one.put({3: [30], 2: [], 1: [12, 10, 11], 5: []})
    none = [] if missing else None
    for process in (one, other, Process(cache_dir, clock, bounds)):
        assert process.get(1, 4, 2, 3) == {1: [12, 10, 11], 4: None, 2: none, 3: [30]}
        assert process.get(5) == {5: none}
        assert process.get(4) == {4: None}
    assert one.shared.sizes()[0] == (6 if missing else 4)
    assert one.shared.sizes() == other.shared.sizes()
    assert one.shared.sizes()[1] == sum((one.directory / name).stat().st_size for name in one.names())
    one.put({7: [], 8: []})
    assert len(one.names()) == (2 if missing else 1)


def test_the_latest_put_of_a_key_counts(process: Process) -> None:
    """All rows of a key come from its latest load, whatever an earlier one brought."""
    process.put({1: [1, 2, 3], 2: [4]})
    process.put({1: [5], 3: []})
    process.put({3: [6, 7]})
    assert process.get(1, 2, 3) == {1: [5], 2: [4], 3: [6, 7]}
    process.put({1: []})
    assert process.get(1, 2) == {1: [], 2: [4]}


def test_the_age_is_since_the_load(cache_dir: Path, clock: FakeClock) -> None:
    """Who takes a key over learns how long ago it was loaded."""
    process = Process(cache_dir, clock)
    process.put({1: [1, 2]})
    clock.tick(3)
    process.put({2: [], 3: [3]})
    clock.tick(4)
    found = Process(cache_dir, clock).get_rows([pa.array([3, 1, 2], pa.int64())], ROWS)
    assert found is not None
    assert found.ages_s.tolist() == [4, 7, 4]


def put_in_child(root: Path) -> None:
    Process(root).put({1: [10, 11], 2: []})


def test_a_real_process(cache_dir: Path, process: Process) -> None:
    """What a process put that has ended since is there."""
    assert process.get(1) == {1: None}
    in_fresh_process(put_in_child, cache_dir)
    assert process.get(1, 2, 3) == {1: [10, 11], 2: [], 3: None}


def get_in_child(root: Path) -> None:
    process = Process(root)
    process.put({1: [1]})
    assert process.get(1) == {1: [1]}
    child = os.fork()
    if not child:
        try:
            assert process.get(1) == {1: [1]}
            process.put({2: [2]})
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert process.get(1, 2) == {1: [1], 2: [2]}


def test_a_forked_child_shares_too(cache_dir: Path) -> None:
    """A child that was forked off a process with open segments reads them, and adds to them."""
    in_fresh_process(get_in_child, cache_dir)


@st.composite
def loads(draw: st.DrawFn, key_kinds: st.SearchStrategy[Sequence[pa.DataType]], row_kinds: Any) -> Any:
    """(key columns, all different, rows with an index): what a load brings, of any types."""
    types = draw(key_kinds)
    count = draw(st.integers(1, 8))
    columns = [draw(st.lists(values_of(kind), min_size=count, max_size=count)) for kind in types]
    arrays = [pa.array(values, kind) for values, kind in zip(columns, types, strict=True)]
    firsts = {key: n for n, key in reversed(list(enumerate(zip(*map(plain, arrays), strict=True))))}
    chosen = sorted(firsts.values())
    arrays = [array.take(pa.array(chosen, pa.int64())) for array in arrays]
    counts = draw(st.lists(st.integers(0, 3), min_size=len(chosen), max_size=len(chosen)))
    places = [place for place, n in enumerate(counts) for _ in range(n)]
    made = {}
    for number, array in enumerate(arrays):
        if pa.types.is_floating(array.type):  # kept with the rows, for it has several forms
            made[f"k{number}"] = array.take(pa.array(places, pa.int64()))
    for number, kind in enumerate(draw(st.lists(row_kinds, max_size=3))):
        values = draw(st.lists(nested_values(kind), min_size=len(places), max_size=len(places)))
        made[f"c{number}"] = pa.array(values, kind)
    return arrays, pa.table({**made, KEY_INDEX: pa.array(places, pa.int64())})


def same(one: pa.Array, other: pa.Array) -> bool:
    """Whether two arrays are alike to the bit: a NaN is not equal to itself."""
    if pa.types.is_floating(one.type):
        whole = pa.int32() if one.type == pa.float32() else pa.int64()
        return bool(one.view(whole).equals(other.view(whole)))
    return bool(one.equals(other))


def check_load(keys: Sequence[pa.Array], rows: pa.Table, data: st.DataObject) -> None:
    """After the load was put, any of its keys are present with their rows, here and in another process, merged or not."""
    names = [f"k{number}" for number in range(len(keys))]
    fields = pa.schema([(name, array.type) for name, array in zip(names, keys, strict=True)])
    schema = pa.schema([field for field in rows.schema if field.name != KEY_INDEX])
    with new_directory() as root:
        process = Process(root / "cache", keys=fields)
        process.put_rows(keys, rows)
        asked = data.draw(st.permutations(range(len(keys[0])))) if len(keys[0]) > 1 else [0]
        asked = asked[: data.draw(st.integers(1, len(asked)))]
        some = [array.take(pa.array(asked, pa.int64())) for array in keys]
        places = rows.column(KEY_INDEX).to_pylist()
        wanted = [n for key in asked for n, place in enumerate(places) if place == key]
        numbers = [n for n, key in enumerate(asked) for place in places if place == key]
        expected = rows.select(schema.names).take(pa.array(wanted, pa.int64()))
        for reader in (process, Process(root / "cache", process.clock, keys=fields)):
            found = reader.get_rows(some, schema)
            assert found is not None
            assert found.present.all()
            assert found.rows.column(KEY_INDEX).to_pylist() == numbers
            for name in schema.names:
                column = found.rows.column(name).combine_chunks()
                column.validate(full=True)
                assert same(column, expected.column(name).combine_chunks())
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(shared, "_SEGMENTS_AT_MOST", 2)
                while not reader.later.waiting:
                    reader.put_rows(keys, rows)
                assert reader.merge() == 1
                assert len(reader.names()) == 1
        assert process.count("cacheFailureCount") == process.count("snapshotDamagedCount") == 0


@examples(60)
@given(load=loads(st.just([pa.int64()]), kinds(2)), data=st.data())
def test_columns_of_all_types(load: Any, data: st.DataObject) -> None:
    """Columns of every type, nested ones too, come back with their nulls."""
    check_load(*load, data)


@examples(120)
@given(load=loads(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3), st.just(pa.int32())), data=st.data())
def test_keys_of_all_types(load: Any, data: st.DataObject) -> None:
    """Keys of every type, and of several columns, find what was put for them."""
    check_load(*load, data)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()], ids=str)
def test_float_keys_keep_each_rows_own_form(cache_dir: Path, kind: pa.DataType) -> None:
    """Zeros and NaNs of any form are one key; each of its rows keeps the form it has in the table, through merges too."""
    fields = pa.schema([("k", kind)])
    process = Process(cache_dir, keys=fields)
    nans = bits([*QUIET[kind], *SIGNALLING[kind]], kind)
    values = pa.concat_arrays([pa.array([-0.0, 0.0, -0.0, 1.5], kind), nans])
    places = [0, 0, 0, 1, *[2] * len(nans)]
    rows = pa.table({"k": values, "v": range(len(values)), KEY_INDEX: places})
    keys = [pa.array([0.0, 1.5, math.nan, 7.0], kind)]
    process.put_rows(keys, rows)

    def check(reader: Process) -> None:
        for asked in ([-0.0, math.nan, 1.5, 7.0], [0.0, math.nan, 1.5, 7.0]):
            found = reader.get_rows([pa.array(asked, kind)], pa.schema([("k", kind), ("v", pa.int64())]))
            assert found is not None
            assert found.present.all()
            order = [0, 1, 2, *range(4, len(values)), 3]
            assert found.rows.column("v").to_pylist() == order
            assert same(found.rows.column("k").combine_chunks(), values.take(pa.array(order)))

    check(process)
    check(Process(cache_dir, process.clock, keys=fields))
    for _ in range(2):
        process.put_rows(keys, rows)
    assert process.merge() == 1
    check(Process(cache_dir, process.clock, keys=fields))


@each_kind
def test_no_key_is_another(cache_dir: Path, kind: pa.DataType) -> None:
    """A key that nobody put is absent, however near another lies."""
    near: dict[str, list[Any]] = {"string": ["a", "a\0", "", "b"], "binary": [b"a", b"a\0", b"", b"b"]}
    near["bool"] = [True, False]
    one = decimal.Decimal(1).scaleb(-kind.scale) if pa.types.is_decimal(kind) else 1
    values = near.get(str(kind), [one * n for n in (1, 2, 3, -1)])
    arrays = [pa.array(values, kind)]
    process = Process(cache_dir, keys=pa.schema([("k", kind)]))
    process.put_rows([arrays[0].slice(0, 1)], rows_of([[5]]).slice(0, 1))
    found = process.get_rows(arrays, ROWS)
    assert found is not None
    assert found.present.tolist() == [True] + [False] * (len(values) - 1)


# --- expiry ------------------------------------------------------------------------------------------


def test_expiry_after_write(cache_dir: Path, clock: FakeClock) -> None:
    """An entry is gone exactly the given time after its load, whoever uses it meanwhile; another load starts anew."""
    bounds = dataclasses.replace(NONE, expire_after_write_s=10.0)
    one, other = Process(cache_dir, clock, bounds), Process(cache_dir, clock, bounds)
    one.put({1: [1], 2: [2]})
    clock.tick(9.5)
    assert other.get(1, 2) == {1: [1], 2: [2]}
    one.put({2: [3]})
    clock.tick(0.499)
    assert other.get(1) == {1: [1]}
    one.touch(1)
    clock.tick(0.001)
    for process in (one, other, Process(cache_dir, clock, bounds)):
        assert process.get(1, 2) == {1: None, 2: [3]}
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


EXPIRING = [{"expire_after_write_s": 10.0}, {"expire_after_access_s": 10.0}]


@pytest.mark.parametrize("bound", [{}, *EXPIRING], ids=["none", "write", "access"])
def test_another_boot(cache_dir: Path, clock: FakeClock, bound: dict[str, float]) -> None:
    """Nobody knows how old an entry is whose host was started anew: it has expired if entries expire, else it is good."""
    bounds = dataclasses.replace(NONE, **bound)
    Process(cache_dir, clock, bounds, boot="before").put({1: [1], 2: []})
    process = Process(cache_dir, clock, bounds, boot="after")
    assert process.get(1, 2, 3) == ({1: None, 2: None, 3: None} if bound else {1: [1], 2: [], 3: None})
    process.put({1: [5]})
    assert process.get(1) == {1: [5]}


# --- versions ----------------------------------------------------------------------------------------


def test_an_entry_is_of_a_version(cache_dir: Path, clock: FakeClock) -> None:
    """A load answers for its version; for another one only keys that cannot differ, each of which is counted."""
    one = Process(cache_dir, clock)
    one.put({1: [1, 2], 2: [3], 3: []}, "v1")
    for may_differ, carried in (
        (unknown, []),
        (differing(1, 2, 3), []),
        (differing(2), [1, 3]),
        (differing(), [1, 2, 3]),
    ):
        other = Process(cache_dir, clock)
        expected = {key: rows if key in carried else None for key, rows in {1: [1, 2], 2: [3], 3: []}.items()}
        assert other.get(1, 2, 3, version="v2", may_differ=may_differ) == expected
        assert other.count("sharedCarriedOverCount") == len(carried)
        assert other.get(1, 2, 3, version="v1", may_differ=may_differ) == {1: [1, 2], 2: [3], 3: []}
        assert other.count("sharedCarriedOverCount") == len(carried)


def test_each_version_has_its_own_rows(process: Process) -> None:
    """Loads of several versions lie beside each other; the latest one that can be right answers."""
    process.put({1: [1], 2: [2]}, "v1")
    process.put({1: [10], 3: [3]}, "v2", differing(1))
    process.put({1: [1]}, "v1")
    assert process.get(1, 2, 3, version="v1", may_differ=differing(1)) == {1: [1], 2: [2], 3: [3]}
    assert process.get(1, 2, 3, version="v2", may_differ=differing(1)) == {1: [10], 2: [2], 3: [3]}
    assert process.get(1, 2, 3, version="v3", may_differ=differing(1)) == {1: None, 2: [2], 3: [3]}
    assert process.get(1, 2, 3, version="v3") == {1: None, 2: None, 3: None}


def test_only_keys_that_are_not_found_yet_are_asked_about(process: Process) -> None:
    """What a version differs in is asked for the keys that later segments do not have."""
    process.put({1: [1], 2: [2], 3: [3]}, "v1")
    process.put({2: [20]}, "v2")
    asked: list[tuple[str, list[int]]] = []

    def may_differ(version: str, keys: Sequence[pa.Array]) -> Numbers:
        asked.append((version, keys[0].to_pylist()))
        return np.zeros(len(keys[0]), np.bool_)

    assert process.get(3, 2, 4, version="v2", may_differ=may_differ) == {3: [3], 2: [20], 4: None}
    assert asked == [("v1", [3, 4])]


OTHER_SCHEMAS = {
    "a column of another type": pa.schema([("v", pa.int32()), ("t", pa.string())]),
    "a column that was not there": pa.schema([*ROWS, ("more", pa.int64())]),
    "a column under another name": pa.schema([("V", pa.int64()), ("t", pa.string())]),
}


@pytest.mark.parametrize("schema", OTHER_SCHEMAS.values(), ids=OTHER_SCHEMAS)
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_rows_of_other_columns_are_a_miss(process: Process, schema: pa.Schema, version: str) -> None:
    """A load that lacks a wanted column, or has it in another type, does not answer; fewer columns are no matter."""
    keys = [pa.array([1, 2], pa.int64())]
    process.put({1: [1], 2: []})
    assert process.get_rows(keys, schema, version, differing()) is None
    found = process.get_rows(keys, pa.schema([("t", pa.string())]), version, differing())
    assert found is not None
    assert found.rows.column("t").to_pylist() == ["t1"]
    found = process.get_rows(keys, pa.schema([]), version, differing())
    assert found is not None
    assert found.present.all()
    assert found.rows.num_rows == 1
    process.touch(1)


@pytest.mark.usefixtures("often")
def test_a_merge_drops_what_lacks_a_column(process: Process) -> None:
    """Once the table has another column, what was loaded before is given up with the next merge."""
    wider = pa.schema([*ROWS, ("more", pa.int64())])
    process.put({1: [1], 2: [2]})
    process.put({3: [3]})
    rows = rows_of([[5]])
    rows = rows.add_column(2, "more", pa.array([6], pa.int64()))
    process.put_rows([pa.array([5], pa.int64())], rows, "v2", differing())
    assert process.merge() == 1
    assert len(process.names()) == 1
    keys = [pa.array([1, 5], pa.int64())]
    found = process.get_rows(keys, wider, "v2", differing())
    assert found is not None
    assert found.present.tolist() == [False, True]
    assert found.rows.column("more").to_pylist() == [6]


D = decimal.Decimal
KEY_TYPES: dict[str, tuple[pa.Array, pa.Array, pa.Array]] = {  # (put, asked for in another type, those of them that are new)
    "wider": (pa.array([1, 2], pa.int32()), pa.array([1, 2**40], pa.int64()), pa.array([2**40], pa.int64())),
    "narrower": (pa.array([1, 2**40], pa.int64()), pa.array([1, 2], pa.int32()), pa.array([2], pa.int32())),
    "text": (pa.array([1, 2], pa.int64()), pa.array(["1", "b"]), pa.array(["b"])),
    "number": (pa.array(["1", "b"]), pa.array([1, 2], pa.int64()), pa.array([2], pa.int64())),
    "decimal": (pa.array([1, 2], pa.int32()), pa.array([D(1), D(2)], pa.decimal128(12, 0)), pa.array([D(2)], pa.decimal128(12, 0))),
    "scale": (pa.array([D("1.00")], pa.decimal128(5, 2)), pa.array([D("0.100")], pa.decimal128(7, 3)), pa.array([D("0.100")], pa.decimal128(7, 3))),
}  # fmt: skip
each_key_type = pytest.mark.parametrize("change", KEY_TYPES)


def retyped(cache_dir: Path, change: str) -> tuple[Process, Process, pa.Array, pa.Array]:
    """A process that put keys, one that takes them for another type, and that one's keys."""
    before, after, new = KEY_TYPES[change]
    old = Process(cache_dir, keys=pa.schema([("k", before.type)]))
    old.put_rows([before], rows_of([[100 + n] for n in range(len(before))]))
    return old, Process(cache_dir, old.clock, keys=pa.schema([("k", after.type)])), after, new


@each_key_type
def test_keys_of_another_type_are_a_miss_in_another_version(cache_dir: Path, change: str) -> None:
    """Where the type of a key changed with the version, nothing that was put before answers."""
    _, process, keys, _ = retyped(cache_dir, change)
    assert process.get_rows([keys], ROWS, "v2") is None


@each_key_type
def test_keys_of_another_type_are_a_miss_in_one_version(cache_dir: Path, change: str) -> None:
    """Of one version, too: with lookup.partition, files that were left out may have changed the type."""
    _, process, keys, new = retyped(cache_dir, change)
    found = process.get_rows([keys], ROWS)
    assert found is None or not found.present[pc.is_in(keys, new).to_numpy(zero_copy_only=False)].any()


@each_key_type
def test_a_touch_passes_keys_of_another_type_by(cache_dir: Path, change: str) -> None:
    """Telling the host what is in use does not fail for what was put before."""
    _, process, keys, _ = retyped(cache_dir, change)
    process.shared.touch([keys], process.hashes([keys]))


@pytest.mark.usefixtures("often")
@each_key_type
def test_a_merge_drops_keys_of_another_type(cache_dir: Path, change: str) -> None:
    """Once keys have another type, what was put before goes with the next merge, and that merge is done."""
    _, process, keys, _ = retyped(cache_dir, change)
    for _ in range(2):
        process.put_rows([keys], rows_of([[5]] * len(keys)), "v2")
    assert process.merge() == 1
    assert len(process.names()) == 1
    found = process.get_rows([keys], ROWS, "v2")
    assert found is not None
    assert found.present.all()
    assert found.rows.column("v").to_pylist() == [5] * len(keys)


# --- what goes wrong ---------------------------------------------------------------------------------


def edited(path: Path, edit: Callable[[bytearray], object]) -> None:
    """Change a file in place, as a failing disk does."""
    content = bytearray(path.read_bytes())
    edit(content)
    with path.open("r+b") as file:
        file.write(content)
        file.truncate(len(content))
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 12_345))


def flip(at: float) -> Callable[[bytearray], object]:
    def edit(content: bytearray) -> None:
        content[int(at * (len(content) - 1))] ^= 1

    return edit


DAMAGE: dict[str, Callable[[bytearray], object]] = {
    **{f"a bit flipped at {at}": flip(at) for at in (0, 0.1, 0.25, 0.5, 0.75, 0.9, 1)},
    "cut in half": lambda content: content.__delitem__(slice(len(content) // 2, None)),
    "one byte short": lambda content: content.pop(),
    "zeros": lambda content: content.__setitem__(slice(None), bytes(len(content))),
}


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_segment_is_a_miss(cache_dir: Path, clock: FakeClock, damage: str, merged: bool) -> None:
    """A file that is not as it was written is counted and removed; what lies beside answers, and its keys can be put again."""
    writer = Process(cache_dir, clock)
    keys = pa.array(range(1000), pa.int64())
    for _ in range(3):
        writer.put_rows([keys], rows_of([[n, n] for n in range(1000)]))
    assert writer.merge() == 1
    if not merged:
        shutil.rmtree(writer.directory)
        writer.put_rows([keys], rows_of([[n, n] for n in range(1000)]))
    (name,) = writer.names()
    assert name.endswith("+") == merged
    writer.put({5000: [5]})
    edited(writer.directory / name, DAMAGE[damage])
    process = Process(cache_dir, clock)
    assert process.get(1, 5000) == {1: None, 5000: [5]}
    assert (process.count("snapshotDamagedCount"), process.count("cacheFailureCount")) == (1, 0)
    assert name not in process.names()
    process.put({1: [7]})
    assert process.get(1, 5000) == {1: [7], 5000: [5]}
    process.merge()
    assert Process(cache_dir, clock).get(1, 5000) == {1: [7], 5000: [5]}


def test_an_empty_segment_is_damaged(process: Process) -> None:
    """What a crash may leave of a small segment, a name without content, is removed when it is seen."""
    process.put({1: [1]})
    (name,) = process.names()
    os.truncate(process.directory / name, 0)
    reader = Process(process.directory.parents[2], process.clock)
    for _ in range(3):
        assert reader.get(1) == {1: None}
    assert reader.count("snapshotDamagedCount") == 1
    assert reader.names() == []


def test_a_directory_that_vanished(process: Process) -> None:
    """Without its directory a process misses and shares nothing; each failure is counted, none is raised."""
    process.put({1: [1]})
    assert process.get(1) == {1: [1]}
    shutil.rmtree(process.directory.parents[1])
    assert process.get(1) == {1: None}
    assert process.shared.sizes() == (0, 0)
    before = process.count("cacheFailureCount")
    process.put({2: [2]})
    process.touch(1, 2)
    assert process.count("cacheFailureCount") == before + 1
    assert process.get(1, 2) == {1: None, 2: None}
    assert process.merge() == 0


@pytest.mark.parametrize("broken", ["snapshots", "tmp"])
def test_a_directory_that_is_none(process: Process, broken: str) -> None:
    """Nor where only a part of it cannot be written."""
    root = process.directory.parents[1]
    shutil.rmtree(root / broken)
    (root / broken).touch()
    process.put({1: [1]})
    assert process.count("cacheFailureCount") >= 1
    assert process.get(1) == {1: None}
    process.touch(1)
    (root / broken).unlink()
    (root / broken).mkdir()
    process.put({1: [1]})
    assert process.get(1) == {1: [1]}


@pytest.mark.parametrize("size", [0, 5, 100, 1500])
def test_a_full_disk(process: Process, size: int) -> None:
    """A load that the disk does not take is counted and not shared, what is there answers; with room again it is shared."""
    process.put({1: [1]})
    with files_at_most(size):
        process.put({2: list(range(500))})
        assert process.count("cacheFailureCount") == 1
        assert process.get(1, 2) == {1: [1], 2: None}
    assert os.listdir(process.directory.parents[1] / "tmp") == []
    process.put({2: [2]})
    assert Process(process.directory.parents[2], process.clock).get(1, 2) == {1: [1], 2: [2]}


@pytest.mark.usefixtures("often")
def test_a_disk_that_is_full_for_a_merge(process: Process) -> None:
    """A merge that finds no room is counted and changes nothing; the next one may be luckier."""
    for number in range(3):
        process.put({number: list(range(300))})
    before = process.names()
    with files_at_most(8000):
        assert process.merge() == 1
    assert process.count("cacheFailureCount") == 1
    assert process.names() == before
    assert os.listdir(process.directory.parents[1] / "tmp") == []
    assert process.get(0, 1, 2) == {n: list(range(300)) for n in range(3)}
    process.put({3: list(range(300))})
    assert process.merge() == 1
    assert len(process.names()) == 1
    assert process.get(0, 1, 2, 3) == {n: list(range(300)) for n in range(4)}


USED: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: path.unlink(),
    "short": lambda path: path.write_bytes(b"\xff" * 3),
    "empty": lambda path: path.write_bytes(b""),
    "no file": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("change", USED.values(), ids=USED)
def test_used_times_that_cannot_be_kept(cache_dir: Path, clock: FakeClock, change: Callable[[Path], object]) -> None:
    """Where the file of used times is gone or not whole, entries are as old as their load, and still answer."""
    bounds = dataclasses.replace(NONE, expire_after_access_s=10.0)
    process = Process(cache_dir, clock, bounds)
    process.put({1: [1]})
    (numbers,) = process.directory.glob("*.used")
    change(numbers)
    process = Process(cache_dir, clock, bounds)
    assert process.get(1) == {1: [1]}
    clock.tick(9)
    process.touch(1)
    clock.tick(9)
    assert process.get(1) == {1: [1]}  # in this process it was used, wherever that is kept
    process.put({2: [2]})
    assert process.get(1, 2) == {1: [1], 2: [2]}
    clock.tick(10)
    assert process.get(1, 2) == {1: None, 2: None}


@pytest.mark.parametrize("used", [-1, -(2**63), 2**63 - 1, 10**15])
def test_used_times_that_cannot_be(cache_dir: Path, clock: FakeClock, used: int) -> None:
    """A time that nobody can have written is taken for the time of the load."""
    bounds = dataclasses.replace(NONE, expire_after_access_s=10.0)
    process = Process(cache_dir, clock, bounds)
    process.put({1: [1, 2]})
    (name,) = process.names()
    numbers = process.disk.open_numbers(SPACE, name, 2)
    assert numbers is not None
    np.frombuffer(numbers, np.int64)[:] = used
    clock.tick(9)
    assert Process(cache_dir, clock, NONE).get(1) == {1: [1, 2]}
    np.frombuffer(numbers, np.int64)[:] = used
    clock.tick(1)
    assert process.get(1) == {1: None}


def torn(process: Process, key: int) -> None:
    """The used times of a key's rows as a process leaves them that is killed while it writes them, or as one reads them meanwhile."""
    for name in process.names():
        part = next(part for part in process.shared._refreshed() if part.name == name)
        arrays = [pa.array([key], pa.int64())]
        rows = part.segment.probe(Keys(arrays), process.hashes(arrays)).rows
        part.used[rows[: len(rows) // 2]] = int(process.clock.steady_s * 1000)


def test_a_key_expires_with_all_its_rows(cache_dir: Path, clock: FakeClock) -> None:
    """Whatever the file of used times says, a key is answered with all its rows or not at all."""
    bounds = dataclasses.replace(NONE, expire_after_access_s=10.0)
    process = Process(cache_dir, clock, bounds)
    process.put({1: [1, 2, 3, 4]})
    clock.tick(5)
    torn(process, 1)
    clock.tick(6)
    assert process.get(1)[1] in ([1, 2, 3, 4], None)


def test_a_key_is_evicted_with_all_its_rows(cache_dir: Path, clock: FakeClock) -> None:
    """Whatever the file of used times says, an eviction takes all rows of a key or none."""
    process = Process(cache_dir, clock, dataclasses.replace(NONE, rows=16))
    process.put({1: [1, 2, 3, 4]})
    clock.tick(1)
    process.put({n: [n] for n in range(10, 23)})
    clock.tick(1)
    torn(process, 1)
    process.merge()
    assert process.get(1)[1] in ([1, 2, 3, 4], None)


# --- merging -----------------------------------------------------------------------------------------


def test_many_segments_become_few(cache_dir: Path, clock: FakeClock) -> None:
    """Above eight segments a process makes them one, beside whoever put the ninth; all answer as before."""
    one, other = Process(cache_dir, clock), Process(cache_dir, clock)
    expected: Held = {}
    for number in range(9):
        assert one.later.waiting == other.later.waiting == []
        rows = {number: [number] * (number % 3), number + 1: [100 + number]}
        (one if number % 2 else other).put(rows)
        expected |= rows
    assert [name.split("-")[1] for name, _ in other.later.waiting] == ["merge"]
    assert len(one.names()) == 9
    other.put({50: [50]})
    assert other.merge() == 1
    assert other.count("sharedMergeCount") == 1
    assert len(one.names()) == 1
    assert sorted(os.listdir(one.directory)) == [*one.names(), f"{one.names()[0]}.used"]
    for process in (one, other, Process(cache_dir, clock)):
        assert process.get(*expected, 50, 77) == {**expected, 50: [50], 77: None}
        assert process.shared.sizes()[0] == sum(max(len(rows or []), 1) for rows in expected.values()) + 1
    assert one.count("sharedCarriedOverCount") == other.count("sharedCarriedOverCount") == 0


def test_a_large_segment_is_not_moved_each_time(process: Process) -> None:
    """Small loads are merged among themselves until they are worth merging with what is large."""
    process.put({n: [n] for n in range(1000)})
    for number in range(8):
        process.put({2000 + number: [1]})
    (large, *small) = process.names()
    assert process.merge() == 1
    assert process.names() == [large, f"{small[-1]}+"]
    assert process.get(999, 2000, 2007) == {999: [999], 2000: [1], 2007: [1]}


@pytest.mark.usefixtures("often")
def test_a_merge_keeps_what_can_answer(cache_dir: Path, clock: FakeClock) -> None:
    """Of versions that differ in some keys a merge keeps the others, as of the version of whoever merges."""
    process = Process(cache_dir, clock)
    process.put({1: [1], 2: [2], 3: []}, "v1")
    process.put({4: [4]}, "v2", differing(1))
    process.put({5: [5]}, "v3", differing(1))
    assert process.merge() == 1
    assert len(process.names()) == 1
    other = Process(cache_dir, clock)
    assert other.get(1, 2, 3, 4, 5, version="v3") == {1: None, 2: [2], 3: [], 4: [4], 5: [5]}
    assert other.count("sharedCarriedOverCount") == 0
    assert other.get(2, version="v1") == {2: None}


@pytest.mark.usefixtures("often")
def test_a_merge_gives_up_what_nothing_is_known_of(process: Process) -> None:
    """Of a version that cannot be compared nothing is kept."""
    process.put({1: [1]}, "v1")
    process.put({2: [2]}, "v2")
    process.put({3: [3]}, "v3", lambda version, keys: None if version == "v1" else np.zeros(len(keys[0]), np.bool_))
    assert process.merge() == 1
    assert process.get(1, 2, 3, version="v3") == {1: None, 2: [2], 3: [3]}


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("bound", EXPIRING, ids=["write", "access"])
def test_a_merge_drops_what_has_expired(cache_dir: Path, clock: FakeClock, bound: dict[str, float]) -> None:
    """Expired entries go with a merge; if all have expired, no segment is left."""
    process = Process(cache_dir, clock, dataclasses.replace(NONE, **bound))
    process.put({1: [1], 2: [2, 3]})
    process.put({2: [4]})
    clock.tick(5)
    process.put({3: [5]})
    clock.tick(5)
    assert process.merge() == 1
    assert process.shared.sizes()[0] == 1
    assert process.get(1, 2, 3) == {1: None, 2: None, 3: [5]}
    clock.tick(10)
    for number in range(3):
        process.put({number: []})
    clock.tick(10)
    assert process.merge() == 1
    assert process.names() == os.listdir(process.directory) == []
    assert process.shared.sizes() == (0, 0)


@pytest.mark.usefixtures("often")
def test_used_times_survive_a_merge(cache_dir: Path, clock: FakeClock) -> None:
    """An entry that was used lives on from then, also when it has moved to another file."""
    bounds = dataclasses.replace(NONE, expire_after_access_s=10.0)
    process = Process(cache_dir, clock, bounds)
    rows = {n: [n] * (n % 3) for n in range(60)}
    for start in (0, 20):
        process.put({n: rows[n] for n in range(start, start + 20)})
    clock.tick(4)
    process.touch(*range(0, 40, 2))
    clock.tick(4)
    process.touch(*range(0, 40, 4))
    process.put({n: rows[n] for n in range(40, 60)})
    assert process.merge() == 1
    assert len(process.names()) == 1
    clock.tick(5)  # 13: used at 0, 4 or 8
    other = Process(cache_dir, clock, bounds)
    assert set(map(str, other.get(*range(1, 40, 2)).values())) == {"None"}
    clock.tick(0.999)
    assert other.get(2, 6, 38, 40) == {n: rows[n] for n in (2, 6, 38, 40)}
    clock.tick(0.001)  # 14
    assert other.get(10, 14, 2, 4, 59) == {10: None, 14: None, 2: rows[2], 4: rows[4], 59: rows[59]}
    clock.tick(4)  # 18
    assert other.get(8, 12, 41, 4, 59) == {8: None, 12: None, 41: None, 4: rows[4], 59: rows[59]}


@pytest.mark.usefixtures("often")
def test_only_one_merges(cache_dir: Path, clock: FakeClock) -> None:
    """While another process merges, a second one does nothing, and says so to nobody."""
    process = Process(cache_dir, clock)
    for number in range(3):
        process.put({number: [number]})
    lock = Process(cache_dir, clock).disk.acquire("merge", SPACE, 0)
    assert lock is not None
    before = process.names()
    assert process.merge() == 1
    assert process.names() == before
    assert process.count("sharedMergeCount") == process.count("cacheFailureCount") == 0
    lock.release()
    process.put({3: [3]})
    assert process.merge() == 1
    assert len(process.names()) == 1
    lock = process.disk.acquire("merge", SPACE, 0)  # it was given back
    assert lock is not None
    lock.release()


@pytest.mark.usefixtures("often")
def test_a_second_merge_finds_nothing_to_do(cache_dir: Path, clock: FakeClock) -> None:
    """Two that wanted to merge the same segments do it once after the other, and lose nothing."""
    one, other = Process(cache_dir, clock), Process(cache_dir, clock)
    for number in range(3):
        one.put({number: [number]})
    other.put({3: [3]})
    assert one.merge() == other.merge() == 1
    assert one.get(0, 1, 2, 3) == other.get(0, 1, 2, 3) == {n: [n] for n in range(4)}
    assert len(one.names()) == 1


@pytest.mark.usefixtures("often")
def test_a_reader_goes_on_while_segments_are_removed(cache_dir: Path, clock: FakeClock) -> None:
    """A get that has the segments open when another process merges them away answers from them to its end."""
    reader, writer = Process(cache_dir, clock), Process(cache_dir, clock)
    writer.put({1: [1, 2], 2: []}, "v1")
    writer.put({3: [3]}, "v1")
    merged = []

    def may_differ(version: str, keys: Sequence[pa.Array]) -> Numbers:
        if not merged:
            merged.append(True)
            writer.put({4: [4]}, "v1")
            assert writer.merge() == 1
            assert len(writer.names()) == 1
            gc.collect()
        return np.zeros(len(keys[0]), np.bool_)

    assert reader.get(1, 2, 3, 4, version="v2", may_differ=may_differ) == {1: [1, 2], 2: [], 3: [3], 4: None}
    assert reader.get(1, 2, 3, 4) == {1: [1, 2], 2: [], 3: [3], 4: [4]}
    assert reader.count("snapshotDamagedCount") == reader.count("cacheFailureCount") == 0


@pytest.mark.usefixtures("often")
def test_no_handle_is_left(cache_dir: Path, clock: FakeClock) -> None:
    """Files that were merged away are let go of at the next look, and all of them with the cache."""
    one, other = Process(cache_dir, clock), Process(cache_dir, clock)
    for number in range(12):
        one.put({number: [number], number + 1: []})
        assert other.get(number) == {number: [number]}
        one.merge()
    assert len(one.names()) <= 2
    other.get(0)
    one.get(0)
    gc.collect()
    assert handles_below(cache_dir) == 2 * 2 * len(one.names())  # each its segment and its numbers
    assert sorted(os.listdir(one.directory)) == sorted([*one.names(), *(f"{name}.used" for name in one.names())])
    del one, other
    gc.collect()
    assert handles_below(cache_dir) == 0


@pytest.mark.usefixtures("often")
def test_a_merge_that_is_killed_before_it_clears_up(cache_dir: Path, clock: FakeClock) -> None:
    """Once a merged segment is there its members count no more, though they still are; answers and sizes are of it."""
    process = Process(cache_dir, clock)
    for number in range(3):
        process.put({number: [number], 9: [90 + number]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Disk, "unlink_segment", lambda self, table, name: None)
        assert process.merge() == 1
    assert len(process.names()) == 4
    for reader in (process, Process(cache_dir, clock)):
        assert reader.get(0, 1, 2, 9) == {0: [0], 1: [1], 2: [2], 9: [92]}
        assert reader.shared.sizes()[0] == 4
    process.put({n: [n] for n in range(10, 14)})
    assert process.shared.sizes()[0] == 8
    assert process.merge() == 0  # two count, so there is nothing to merge
    process.put({n: [n] for n in range(14, 18)})
    assert process.merge() == 1
    for reader in (process, Process(cache_dir, clock)):
        assert reader.get(0, 1, 2, 9, 17) == {0: [0], 1: [1], 2: [2], 9: [92], 17: [17]}


def half_merged(process: Process) -> None:
    """What is on disk when the one who merged was killed before it removed the members."""
    for number in range(3):
        process.put({number: [number]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Disk, "unlink_segment", lambda self, table, name: None)
        assert process.merge() == 1
    assert len(process.names()) == 4


@pytest.mark.usefixtures("often")
def test_what_a_killed_merge_left_goes_with_the_next(process: Process) -> None:
    """The next merge removes what the killed one had to, and nothing counts twice."""
    half_merged(process)
    for number in range(10, 12):
        process.put({number * 10 + n: [n] for n in range(3)})
    assert process.merge() == 1
    assert process.shared.sizes()[0] == 9
    assert len(process.names()) == 1


@pytest.mark.usefixtures("often")
def test_what_a_killed_merge_left_is_not_opened_each_time(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at a directory that did not change opens nothing."""
    half_merged(process)
    assert process.get(0) == {0: [0]}
    opened: list[str] = []
    open_segment = Disk.open_segment
    monkeypatch.setattr(Disk, "open_segment", lambda *args: opened.append(args[2]) or open_segment(*args))
    assert process.get(0, 1) == {0: [0], 1: [1]}
    assert opened == []


@pytest.mark.usefixtures("often")
def test_a_merge_that_is_killed_before_it_is_published(cache_dir: Path, clock: FakeClock) -> None:
    """Without its name a merged segment is nothing, and its members answer as before."""
    process = Process(cache_dir, clock)
    for number in range(3):
        process.put({number: [number]})

    def fail(*args: Any, **more: Any) -> None:
        raise OSError("killed here")

    for at in ("create_segment", "open_numbers", "publish_segment"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Disk, at, fail)
            process.merge()
        assert len([name for name in process.names() if "+" not in name]) >= 3
        assert Process(cache_dir, clock).get(0, 1, 2) == {n: [n] for n in range(3)}
        process.put({5: [5]})
    (process.directory.parents[1] / "tmp" / "1-2-3-abcd").write_bytes(b"half of a segment")
    (process.directory / f"{process.names()[-1]}+.used").touch()
    assert Process(cache_dir, clock).get(0, 1, 2, 5) == {**{n: [n] for n in range(3)}, 5: [5]}
    assert process.merge() == 1
    assert Process(cache_dir, clock).get(0, 1, 2, 5) == {**{n: [n] for n in range(3)}, 5: [5]}


def killed_while_merging(root: Path, at: str) -> None:
    process = Process(root)
    process.clock.tick(100)
    for number in range(9):
        process.put({number: [number, number + 1], 99: [number]})

    def die(*args: Any, **more: Any) -> None:
        os.kill(os.getpid(), 9)

    setattr(Disk, at, die)
    process.merge()


@pytest.mark.parametrize("at", ["open_numbers", "publish_segment", "unlink_segment"])
def test_a_merging_process_that_is_killed(cache_dir: Path, at: str) -> None:
    """Whenever the one that merges is killed, the others answer as before and can merge."""
    child = multiprocessing.get_context("spawn").Process(target=killed_while_merging, args=(cache_dir, at))
    child.start()
    child.join(BOUND_S)
    assert child.exitcode == -9
    process = Process(cache_dir)
    process.clock.tick(200)
    expected = {**{n: [n, n + 1] for n in range(9)}, 99: [8]}
    assert process.get(*expected) == expected
    for number in range(9):
        process.put({number: [number, number + 1]})
    assert process.merge() == 1
    assert process.get(*expected) == Process(cache_dir, process.clock).get(*expected) == expected


@pytest.mark.usefixtures("often")
def test_a_straggler_takes_nothing_away(process: Process) -> None:
    """What an older version's reader puts late does not replace what the current version has, in a merge either."""
    process.put({1: [1]}, "v2", differing(1))
    process.put({1: [0]}, "v1", differing(1))
    process.put({2: [2]}, "v2", differing(1))
    assert process.merge() == 1
    assert process.get(1, 2, version="v2", may_differ=differing(1)) == {1: [1], 2: [2]}


@pytest.mark.usefixtures("often")
def test_a_straggler_merges_nothing_away(cache_dir: Path, clock: FakeClock) -> None:
    """Who answers from an older version does not give up what is newer."""
    current, straggler = Process(cache_dir, clock), Process(cache_dir, clock)
    current.put({1: [10], 2: [2]}, "v2", differing(1))
    current.put({3: [3]}, "v2", differing(1))
    straggler.put({1: [1]}, "v1", differing(1), lambda: False)
    straggler.merge()
    assert current.get(1, 2, 3, version="v2", may_differ=differing(1)) == {1: [10], 2: [2], 3: [3]}


@pytest.mark.usefixtures("often")
def test_a_merge_does_not_make_the_age_of_another_boot_known(cache_dir: Path, clock: FakeClock) -> None:
    """Rows that were loaded before the host was started anew stay of unknown age, though somebody merged them."""
    before = FakeClock()
    before.tick(100_000)
    Process(cache_dir, before, boot="before").put({1: [1]})
    process = Process(cache_dir, clock, boot="after")
    process.clock.wall_s = before.wall_s
    process.put({2: [2]})
    process.put({3: [3]})
    assert process.merge() == 1
    clock.tick(5)
    for bound in EXPIRING:
        expiring = Process(cache_dir, clock, dataclasses.replace(NONE, **bound), boot="after")
        assert expiring.get(1, 2) == {1: None, 2: [2]}
    assert process.get(1, 2) == {1: [1], 2: [2]}


@pytest.mark.usefixtures("often")
def test_an_unknown_age_is_no_age_since_the_boot(cache_dir: Path, clock: FakeClock) -> None:
    """Not even where the host has not been up for as long as entries live."""
    Process(cache_dir, clock, boot="before").put({1: [1]})
    process = Process(cache_dir, clock, boot="after")
    process.put({2: [2]})
    process.put({3: [3]})
    assert process.merge() == 1
    bounds = dataclasses.replace(NONE, expire_after_access_s=5000.0)  # the clock is at 1000
    assert Process(cache_dir, clock, bounds, boot="after").get(1, 2) == {1: None, 2: [2]}


@pytest.mark.usefixtures("often")
def test_another_seed(cache_dir: Path, clock: FakeClock) -> None:
    """Where the record of the seed was lost and made anew, processes with both seeds share nothing, or what is right."""
    fields = pa.schema([("k", pa.string())])
    one, other = Process(cache_dir, clock, keys=fields), Process(cache_dir, clock, keys=fields, seed=OTHER_SEED)
    keys = pa.array([f"key {n}" for n in range(100)])
    for process, some in ((one, keys), (other, keys), (one, pa.array([f"new {n}" for n in range(100)]))):
        process.put_rows([some], rows_of([[n] for n in range(100)]))
    assert one.merge() <= 1
    for process in (one, other):
        found = process.get_rows([keys], ROWS)
        assert found is None or found.rows.column("v").to_pylist() == list(range(100))


@pytest.mark.usefixtures("often")
def test_a_key_that_is_used_while_it_is_merged(
    cache_dir: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key whose rows lie in two batches of a merge is kept with all its rows or not at all, whenever it is used."""
    monkeypatch.setattr(shared, "BATCH_ROWS", 2)
    bounds = dataclasses.replace(NONE, expire_after_access_s=10.0)
    merging, reading = Process(cache_dir, clock, bounds), Process(cache_dir, clock, bounds)
    merging.put({1: [1, 2, 3, 4]}, "v1")
    clock.tick(9.5)

    def slow(version: str, keys: Sequence[pa.Array]) -> Numbers:
        clock.tick(1)
        reading.touch(1)
        return np.zeros(len(keys[0]), np.bool_)

    clock.tick(0.5)
    for key in (2, 3):
        merging.put({key: [key] * 4}, "v2", slow)
    assert merging.merge() == 1
    assert merging.get(1, version="v2", may_differ=differing())[1] in ([1, 2, 3, 4], None)


# --- within the bounds -------------------------------------------------------------------------------


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


# --- generated histories -----------------------------------------------------------------------------

IDS = st.integers(0, 9)
SOME = st.lists(IDS, min_size=1, max_size=6, unique=True)
STEPS = [
    st.tuples(st.just("put"), st.integers(0, 1), SOME),
    st.tuples(st.just("put"), st.integers(0, 1), SOME),
    st.tuples(st.just("get"), st.integers(0, 2), SOME),
    st.tuples(st.just("get"), st.integers(0, 2), SOME),
    st.tuples(st.just("merge"), st.integers(0, 1)),
    st.tuples(st.just("change"), st.lists(IDS, max_size=3)),
    st.tuples(st.just("touch"), st.integers(0, 1), SOME),
    st.tuples(st.just("tick"), st.sampled_from([0.0, 0.5, 4.0, 9.5, 10.0])),
]
LATE = st.tuples(st.just("straggle"), st.integers(0, 1), SOME, st.integers(1, 3))


class History:
    """A table that changes from version to version, two processes that share loads of it, and what must be true of them."""

    def __init__(self, root: Path, bounds: Bounds, exact: bool) -> None:
        self.clock = FakeClock()
        self.root, self.bounds, self.exact = root, bounds, exact
        self.processes = [Process(root / "cache", self.clock, bounds) for _ in range(2)]
        self.serial = 0
        self.tables: list[dict[int, list[int]]] = [{key: self.new(key) for key in range(10)}]
        self.shared: set[int] = set()  # keys that somebody put and that did not change since
        self.written: dict[int, float] = {}
        self.used: dict[int, float] = {}

    def new(self, key: int) -> list[int]:
        self.serial += 1
        return [self.serial * 100 + n for n in range((key + self.serial) % 4)]

    def may_differ(self, number: int) -> Differ:
        def answer(version: str, keys: Sequence[pa.Array]) -> Numbers | None:
            other = int(version.removeprefix("v"))
            if not self.exact and (other + number) % 3 == 0:
                return None
            one, two = self.tables[number], self.tables[other]
            wary = 0 if self.exact else 3  # says so of some that do not
            return np.array([one[key] != two[key] or (wary and key % wary == 0) for key in keys[0].to_pylist()], bool)

        return answer

    def step(self, kind: str, *args: Any) -> None:
        current = len(self.tables) - 1
        if kind == "change":
            self.tables.append({**self.tables[-1], **{key: self.new(key) for key in args[0]}})
            self.shared -= set(args[0])
        elif kind == "tick":
            self.clock.tick(args[0])
        elif kind == "merge":
            self.processes[args[0]].merge()
        elif kind == "touch":
            self.processes[args[0]].touch(*args[1])
            self.used |= dict.fromkeys(args[1], self.clock.steady_s)
        elif kind in {"put", "straggle"}:
            number = max(current - (args[2] if kind == "straggle" else 0), 0)
            table = self.tables[number]
            self.processes[args[0]].put(
                {key: table[key] for key in args[1]},
                f"v{number}",
                self.may_differ(number),
                lambda: number == len(self.tables) - 1,
            )
            self.written |= dict.fromkeys(args[1], self.clock.steady_s)
            self.used |= dict.fromkeys(args[1], self.clock.steady_s)
            self.shared |= set(args[1]) if kind == "put" else set()
        else:
            self.get(current, *args)

    def get(self, number: int, process: int, keys: Sequence[int]) -> None:
        reader = self.processes[process] if process < 2 else Process(self.root / "cache", self.clock, self.bounds)
        before = reader.count("sharedCarriedOverCount")
        held = reader.get(*keys, version=f"v{number}", may_differ=self.may_differ(number))
        answered = [key for key in keys if held[key] is not None]
        assert {key: held[key] for key in answered} == {key: self.tables[number][key] for key in answered}
        assert reader.count("sharedCarriedOverCount") - before <= len(answered)
        if self.exact:
            assert set(answered) >= self.shared & set(keys)
        now_s, bounds = self.clock.steady_s, self.bounds
        for key in answered:
            assert bounds.expire_after_write_s is None or now_s - self.written[key] < bounds.expire_after_write_s
            assert bounds.expire_after_access_s is None or now_s - self.used[key] < bounds.expire_after_access_s
            self.used[key] = now_s

    def end(self) -> None:
        for number in range(len(self.tables) - 1 if self.exact else 0, len(self.tables)):
            self.get(number, 2, range(10))
        for process in self.processes:
            assert process.count("cacheFailureCount") == process.count("snapshotDamagedCount") == 0
            held = process.shared.sizes()
            assert held[0] <= self.bounds.rows * (REFUSE_ABOVE + 2)  # a load of each, not knowing of the other's


BOUNDED = [
    NONE,
    dataclasses.replace(NONE, rows=12),
    dataclasses.replace(NONE, bytes=6000),
    dataclasses.replace(NONE, expire_after_access_s=10.0),
    dataclasses.replace(NONE, expire_after_write_s=10.0),
    dataclasses.replace(NONE, rows=16, expire_after_access_s=10.0, missing_keys=False),
]


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("bounds", BOUNDED, ids=["none", "rows", "bytes", "access", "write", "some"])
@examples(60)
@given(steps=st.lists(st.one_of(*STEPS, LATE), min_size=8, max_size=40))
def test_any_history_is_answered_rightly(bounds: Bounds, steps: list[tuple[Any, ...]]) -> None:
    """Whatever was put, merged, evicted or has expired, of whichever version: an answer is what the table has, or a miss."""
    with new_directory() as root:
        history = History(root, bounds, exact=False)
        for step in steps:
            history.step(*step)
        history.end()


@pytest.mark.usefixtures("often")
@examples(120)
@given(steps=st.lists(st.one_of(*STEPS), min_size=8, max_size=40))
def test_nothing_is_lost_without_bounds(steps: list[tuple[Any, ...]]) -> None:
    """Without bounds and expiry what was put answers for as long as its key does not change, however it is merged."""
    with new_directory() as root:
        history = History(root, NONE, exact=True)
        for step in steps:
            history.step(*step)
        history.end()


@examples(60)
@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=20), is_text=st.booleans())
def test_the_numbers_of_keys(counts: list[int], is_text: bool) -> None:
    """Rows of one key have one number, below how many rows there are, which no row of another has."""
    kind = pa.string() if is_text else pa.int64()
    with new_directory() as root:
        process = Process(root / "cache", keys=pa.schema([("k", kind)]))
        keys = pa.array([n * 10**12 for n in range(len(counts))]).cast(kind)
        process.put_rows([keys], rows_of([[n] * count for n, count in enumerate(counts)]))
        (part,) = process.shared._refreshed()
        numbers = part.segment.key_numbers(np.arange(part.segment.rows)).tolist()
        (values,) = part.segment.take(["v"], np.arange(part.segment.rows))
        assert len(set(zip(numbers, values.to_pylist(), strict=True))) == len(set(numbers)) == len(counts)
        assert max(numbers) < part.segment.rows == len(part.used)


# --- files of segments -------------------------------------------------------------------------------


@pytest.fixture
def opened(cache_dir: Path) -> Opened:
    return Opened(cache_dir)


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
    assert handles_below(opened.root) == 0


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
    assert handles_below(opened.root) == 0


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


# --- which keys a change of files can have touched -----------------------------------------------------

NUMBER_KEYS = pa.schema([("k", pa.int64())])
Bounded = list[ColumnStats | None]


def stats(low: Any, high: Any, nulls: int | None = 0, rows: int = 10) -> ColumnStats:
    return ColumnStats(low, high, nulls, rows)


NOTHING_BUT_NULLS = stats(None, None, 10)
EMPTY = stats(None, None, 0, 0)


class Known:
    """What a process of a host knows of a table's versions, whose files have these bounds."""

    def __init__(
        self, cache_dir: Path | None, bounds: Mapping[str, Bounded], keys: pa.Schema = NUMBER_KEYS, number: int = 0
    ) -> None:
        self.opened = Opened(cache_dir) if cache_dir is not None else None
        self.metrics = self.opened.metrics if self.opened is not None else CacheMetricGroup()
        self.changes = Changes(self.opened.disk if self.opened is not None else None, SPACE, keys, self.metrics)
        self.bounds, self.asked = bounds, 0
        self.keys = keys

    @staticmethod
    def version(*names: str) -> TableVersion:
        """The version of those files; `a.1` and `a.2` are two states of one."""
        files = (FileVersion(f"file:///dim/{name.split('.')[0]}", 100, name) for name in names)
        return TableVersion("t", tuple(files))

    def remember(self, *names: str) -> TableVersion:
        def bounds_of(files: Sequence[FileVersion]) -> list[Bounded]:
            self.asked += 1
            return [self.bounds[file.identity] for file in files]

        version = self.version(*names)
        self.changes.remember(version, bounds_of)
        return version

    def differ(self, old: TableVersion, new: TableVersion, *columns: Sequence[Any]) -> list[bool] | None:
        arrays = [pa.array(values, field.type) for values, field in zip(columns, self.keys, strict=True)]
        found = self.changes.may_differ(old.digest, new.digest, arrays)
        return None if found is None else found.tolist()


RANGES: dict[str, Bounded] = {
    "a.1": [stats(0, 9)],
    "a.2": [stats(5, 12)],
    "b.1": [stats(10, 19)],
    "c.1": [stats(20, 29)],
    "nulls.1": [NOTHING_BUT_NULLS],
    "empty.1": [EMPTY],
    "some.1": [stats(3, 4, 5)],
    "unknown.1": [None],
    "half.1": [stats(3, None)],
}
ASKED = [-1, 0, 4, 9, 10, 12, 13, 19, 20, 29, 30]


@pytest.mark.parametrize(
    ("old", "new", "touched"),
    [
        ("a.1 b.1 c.1", "a.1 b.1 c.1", []),
        ("a.1 c.1", "a.1 b.1 c.1", [10, 12, 13, 19]),  # added
        ("a.1 b.1 c.1", "a.1 b.1", [20, 29]),  # removed
        ("a.1 c.1", "a.2 c.1", [0, 4, 9, 10, 12]),  # replaced: what was there and what is
        ("a.1", "c.1", [0, 4, 9, 20, 29]),
        ("a.1", "", [0, 4, 9]),
        ("c.1", "c.1 nulls.1 empty.1", []),
        ("c.1 some.1", "c.1", [4]),
        ("c.1 unknown.1", "c.1 unknown.1", []),
        ("c.1", "c.1 unknown.1", ASKED),
        ("c.1 half.1", "c.1", ASKED),
    ],
)
def test_a_key_within_the_bounds_of_a_changed_file(cache_dir: Path, old: str, new: str, touched: list[int]) -> None:
    """A key may differ if a file that only one version has can hold it; alike in both directions, and for other processes."""
    known = Known(cache_dir, RANGES)
    one, other = known.remember(*old.split()), known.remember(*new.split())
    expected = [key in touched for key in ASKED]
    for process in (known, Known(cache_dir, {})):
        assert process.differ(one, other, ASKED) == expected
        assert process.differ(other, one, ASKED) == expected
        assert process.differ(one, one, ASKED) == [False] * len(ASKED)
        assert process.differ(one, other, []) == []
        assert process.asked == (len({one.digest, other.digest}) if process is known else 0)
    assert known.metrics.snapshot()["cacheFailureCount"] == 0


def test_bounds_are_recorded_once(cache_dir: Path) -> None:
    """The files of a version are asked for their bounds by one process, once; for other key columns once more."""
    known = Known(cache_dir, RANGES)
    for _ in range(3):
        version = known.remember("a.1", "b.1")
    other = Known(cache_dir, {})
    assert other.remember("a.1", "b.1").digest == version.digest
    assert (known.asked, other.asked) == (1, 0)
    two_columns = Known(cache_dir, {"a.1": [stats(0, 1), stats(0, 1)]}, pa.schema([*NUMBER_KEYS, ("l", pa.int64())]))
    two_columns.remember("a.1")
    two_columns.remember("a.1")
    assert two_columns.asked == 1


def test_of_a_version_that_is_not_on_record_nothing_is_known(cache_dir: Path) -> None:
    """Either version may be the one."""
    known = Known(cache_dir, RANGES)
    seen, never = known.remember("a.1"), known.version("b.1")
    assert known.differ(seen, never, [1]) is None
    assert known.differ(never, seen, [1]) is None
    without = Known(None, RANGES)
    one, other = without.remember("a.1"), without.remember("b.1")
    assert without.differ(one, other, [1]) is None
    assert without.asked == 0


def test_the_latest_version(cache_dir: Path) -> None:
    """The host knows which version was put on record last; without a record any may be."""
    known, other = Known(cache_dir, RANGES), Known(cache_dir, RANGES)
    assert known.changes.is_latest("anything")
    one = known.remember("a.1")
    assert known.changes.is_latest(one.digest)
    two = other.remember("a.2")
    for process in (known, other):
        assert not process.changes.is_latest(one.digest)
        assert process.changes.is_latest(two.digest)
        process.remember("a.1")  # known already, so it is no news
        assert process.changes.is_latest(two.digest)
    assert Known(None, RANGES).changes.is_latest(one.digest)


def test_a_damaged_record_is_none(cache_dir: Path) -> None:
    """Bounds that are not as they were written are not believed, counted, and recorded anew."""
    known = Known(cache_dir, RANGES)
    one, other = known.remember("a.1"), known.remember("b.1")
    assert known.opened is not None
    for path in (known.opened.root / "records" / "bounds").iterdir():
        edited(path, flip(0.5))
    fresh = Known(cache_dir, RANGES)
    assert fresh.differ(one, other, [1]) is None
    assert fresh.metrics.snapshot()["cacheFailureCount"] == 2
    fresh.remember("a.1")
    fresh.remember("b.1")
    assert fresh.asked == 2
    assert Known(cache_dir, {}).differ(one, other, [1, 50]) == [True, False]


@pytest.mark.parametrize("value", [5, ["x"], {"a": 1}, "bm8gQXJyb3c=", "x"])
def test_a_record_of_another_kind_is_none(cache_dir: Path, value: Any) -> None:
    """What another release may have recorded under the name is not believed."""
    known = Known(cache_dir, RANGES)
    one, other = known.remember("a.1"), known.remember("b.1")
    assert known.opened is not None
    known.opened.disk.replace_record("bounds", key_of(one.digest, "k"), value)
    assert Known(cache_dir, RANGES).differ(one, other, [1]) is None


def test_keys_of_another_type_have_other_bounds(cache_dir: Path) -> None:
    """Where the key of two versions has two types nothing is known, whichever was recorded last."""
    narrow = Known(cache_dir, RANGES, pa.schema([("k", pa.int32())]))
    one = narrow.remember("a.1")
    wide = Known(cache_dir, RANGES)
    other = wide.remember("b.1")
    assert wide.differ(one, other, [1]) is None
    assert narrow.differ(one, other, [1]) is None
    wide.remember("a.1")
    assert wide.differ(one, other, [1, 30]) == [True, False]


def test_too_many_changes(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more changed files than are worth comparing nothing is carried over."""
    bounds = {f"{n}.1": [stats(n, n)] for n in range(6)}
    known = Known(cache_dir, bounds)
    one, other = known.remember("0.1", "1.1", "2.1", "3.1"), known.remember("0.1", "1.1", "4.1")
    monkeypatch.setattr(changes, "_CHANGED_AT_MOST", 3)
    assert known.differ(one, other, [0, 1, 2, 3, 4, 5]) == [False, False, True, True, True, False]
    monkeypatch.setattr(changes, "_CHANGED_AT_MOST", 2)
    assert known.differ(one, other, [0, 1]) is None


def test_many_versions(cache_dir: Path) -> None:
    """However many versions there were, each is known, though a process does not keep all of them in memory."""
    bounds = {f"{n}.1": [stats(n, n)] for n in range(60)}
    known = Known(cache_dir, bounds)
    versions = [known.remember(f"{n}.1", "59.1") for n in range(58)]
    for n in (0, 30, 57, 0):
        assert known.differ(versions[n], versions[56], [n, 56, 58, 59]) == [True, True, False, False]
    assert len(known.changes._known) <= 16
    assert known.asked == 58


def test_a_disk_that_takes_no_record(cache_dir: Path) -> None:
    """Without a place to record them bounds are known to this process only, and the failure is counted."""
    known = Known(cache_dir, RANGES)
    with files_at_most(0):
        one, other = known.remember("a.1"), known.remember("b.1")
    assert known.metrics.snapshot()["cacheFailureCount"] == 2
    assert known.differ(one, other, [1, 15, 30]) == [True, True, False]
    assert Known(cache_dir, RANGES).differ(one, other, [1]) is None


def test_threads_that_learn_of_versions_at_once(cache_dir: Path) -> None:
    """Another thread may learn of a version at any moment while this one forgets old ones."""
    known = Known(cache_dir, {f"{n}.1": [stats(n, n)] for n in range(40)})

    class Interrupted(dict[str, Any]):
        """A switch to another thread happens between a look at the oldest and its removal."""

        armed = False

        def __iter__(self) -> Iterator[str]:
            found = super().__iter__()
            if self.armed:
                self.armed = False
                thread = threading.Thread(target=known.remember, args=("39.1",), daemon=True)
                thread.start()
                thread.join(0.3)  # with a lock it goes on after us
            return found

    known.changes._known = Interrupted()
    for n in range(16):
        known.remember(f"{n}.1")
    known.changes._known.armed = True
    known.remember("20.1")


DAY = datetime.date(2024, 1, 10)
NOON = datetime.datetime(2024, 1, 10, 12)
UTC = datetime.timezone.utc
TYPED: dict[pa.DataType, tuple[Any, Any, list[Any], list[Any]]] = {  # low, high, values within, others
    pa.bool_(): (False, False, [False], [True]),
    pa.int8(): (-3, 5, [-3, 0, 5], [-4, 6, 127]),
    pa.int64(): (-(2**62), 2**62, [0, 2**62], [2**62 + 1, -(2**63)]),
    pa.float32(): (-0.5, 2.25, [-0.5, -0.0, 2.25, math.nan], [-0.75, 2.5, math.inf, -math.inf]),
    pa.float64(): (0.0, 0.0, [0.0, -0.0, math.nan], [5e-324, -5e-324, math.inf]),
    pa.string(): ("b", "d", ["b", "bz", "c", "d"], ["", "a", "d\0", "é", "日"]),
    pa.binary(): (b"b", b"d\xff", [b"b", b"d", b"d\xff"], [b"", b"a\xff", b"d\xff\0", b"\xff"]),
    pa.date32(): (DAY, DAY, [DAY], [DAY.replace(day=9), DAY.replace(day=11)]),
    pa.timestamp("us"): (NOON, NOON, [NOON], [NOON.replace(microsecond=1), NOON.replace(hour=11)]),
    pa.timestamp("us", "UTC"): (
        NOON.replace(tzinfo=UTC), NOON.replace(tzinfo=UTC, hour=13),
        [NOON.replace(tzinfo=UTC), NOON.replace(tzinfo=UTC, hour=13)], [NOON.replace(tzinfo=UTC, hour=14)],
    ),
    pa.duration("us"): (datetime.timedelta(1), datetime.timedelta(2), [datetime.timedelta(1.5)], [datetime.timedelta(3)]),
    pa.decimal128(5, 2): (decimal.Decimal("-1.50"), decimal.Decimal(3), [decimal.Decimal("-1.50"), decimal.Decimal(3)], [decimal.Decimal("3.01"), decimal.Decimal("-1.51")]),
    pa.decimal128(38, 0): (5, 10**37, [decimal.Decimal(10**37)], [decimal.Decimal(10**37 + 1), decimal.Decimal(4)]),
}  # fmt: skip


@pytest.mark.parametrize("kind", TYPED, ids=str)
def test_bounds_of_each_type(cache_dir: Path, kind: pa.DataType) -> None:
    """Keys of every type compare with the bounds as their values do; a NaN is within any."""
    low, high, inside, outside = TYPED[kind]
    known = Known(cache_dir, {"a.1": [stats(low, high)]}, pa.schema([("k", kind)]))
    one, other = known.remember("a.1"), known.remember()
    for process in (known, Known(cache_dir, {}, known.keys)):
        expected = [True] * len(inside) + [False] * len(outside)
        assert process.differ(one, other, [*inside, *outside]) == expected
        assert process.differ(other, one, outside) == [False] * len(outside)


@pytest.mark.parametrize(
    ("kind", "low", "high", "key"),
    [
        (pa.float64(), math.nan, 1.0, 5.0),
        (pa.float64(), 1.0, math.nan, 5.0),
        (pa.float64(), None, None, math.nan),  # nothing but NaNs
        (pa.string(), b"\xff", b"\xff", "a"),
        (pa.int8(), 0, 300, 5),
        (pa.int8(), "a", "b", 5),
        (pa.decimal128(3, 1), decimal.Decimal("0.123"), decimal.Decimal(5), decimal.Decimal("9.9")),
    ],
)
def test_bounds_that_are_none(cache_dir: Path, kind: pa.DataType, low: Any, high: Any, key: Any) -> None:
    """A bound that is no value of the key's type bounds nothing."""
    known = Known(cache_dir, {"a.1": [stats(low, high)]}, pa.schema([("k", kind)]))
    assert known.differ(known.remember("a.1"), known.remember(), [key]) == [True]


def test_composite_keys(cache_dir: Path) -> None:
    """A file can hold a key only if it can hold each of its parts; what is not known of one part may be."""
    keys = pa.schema([("k", pa.int64()), ("t", pa.string())])
    bounds = {
        "both.1": [stats(0, 9), stats("b", "d")],
        "one.1": [stats(20, 29), None],
        "nulls.1": [stats(0, 99), NOTHING_BUT_NULLS],
    }
    known = Known(cache_dir, bounds, keys)
    none, every = known.remember(), known.remember(*bounds)
    pairs = {(5, "c"): True, (5, "a"): False, (10, "c"): False, (25, "zzz"): True, (25, ""): True, (50, "c"): False}
    found = known.differ(none, every, [k for k, _ in pairs], [t for _, t in pairs])
    assert found == list(pairs.values())


# The values of generated key columns, by type.
DOMAIN: dict[pa.DataType, list[Any]] = {
    pa.int32(): [*range(-3, 9), 2**31 - 1],
    pa.int64(): [*range(-3, 9), 2**62],
    pa.string(): ["", "a", "aa", "b", "ba", "é", "z", "a\0"],
    pa.float64(): [-1.5, -0.0, 0.0, 1.0, 2.0, math.inf, -math.inf, math.nan],
    pa.decimal128(7, 2): [decimal.Decimal(n) / 4 for n in range(-3, 9)],
    pa.date32(): [DAY + datetime.timedelta(n) for n in range(8)],
    pa.timestamp("us"): [NOON + datetime.timedelta(microseconds=n) for n in range(8)],
    pa.timestamp("us", "UTC"): [NOON.replace(tzinfo=UTC) + datetime.timedelta(hours=n) for n in range(8)],
    pa.binary(): [b"", b"a", b"a\0", b"b", b"\xff", b"\x80"],
    pa.bool_(): [False, True],
    pa.duration("us"): [datetime.timedelta(n) for n in range(4)],
}


@st.composite
def two_versions(draw: st.DrawFn, types: Sequence[pa.DataType]) -> Any:
    """(types of the keys, files of one version, files of the next): lists of keys by file name, None without the columns."""
    chosen = draw(st.lists(st.sampled_from(types), min_size=1, max_size=2))
    values = [st.none() | st.sampled_from(DOMAIN[kind]) for kind in chosen]
    file = st.lists(st.tuples(*values), max_size=6)
    names = ["a", "b", "c", "d"]
    before = {name: draw(file) for name in names[: draw(st.integers(1, 4))]}
    after = dict(before)
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)):
        change = draw(st.none() | file)
        if change is not None:
            after[name] = change
        elif len(after) > 1:
            after.pop(name, None)
    return chosen, before, after


def write_files(path: Path, types: Sequence[pa.DataType], files: Mapping[str, Sequence[Any]], number: int) -> None:
    """The files of a version, each in small row groups; those that are as they were are left alone."""
    for old in path.glob("*.parquet"):
        if old.stem not in files:
            old.unlink()
    for name, keys in files.items():
        state = path / f".{name}"
        if state.exists() and state.read_text() == repr(keys):
            continue
        state.write_text(repr(keys))
        columns = {f"k{n}": pa.array([key[n] for key in keys], kind) for n, kind in enumerate(types)}
        rows = pa.table({**columns, "v": pa.array([f"{name} {number} {n}" for n in range(len(keys))], pa.string())})
        pq.write_table(rows, path / ".new", row_group_size=3)
        os.replace(path / ".new", path / f"{name}.parquet")


def comparable(key: Sequence[Any]) -> tuple[Any, ...]:
    return tuple("NaN" if isinstance(part, float) and math.isnan(part) else part for part in key)


def rows_by_key(files: Mapping[str, Sequence[Any]], numbers: Mapping[str, int]) -> dict[Any, list[str]]:
    """The rows of each key in file order, by brute force."""
    found: dict[Any, list[str]] = {}
    for name in sorted(files):
        for n, key in enumerate(files[name]):
            found.setdefault(comparable(key), []).append(f"{name} {numbers[name]} {n}")
    return found


def check_carried(types: Sequence[pa.DataType], before: Any, after: Any, domain: Sequence[Any] = ()) -> None:
    """A key that cannot differ has the rows in one version that it has in the other. `domain`: keys to ask for."""
    with new_directory() as root:
        path = root / "dim"
        path.mkdir()
        names = [f"k{n}" for n in range(len(types))]
        options = LookupOptions.parse({"path": str(path), "lookup.keys": ",".join(names)})
        host = make_host(str(path), root / "cache")
        schema = pa.schema([(name, spark_type(kind)) for name, kind in zip(names, types, strict=True)])
        found = Changes(host.disk, SPACE, schema, host.metrics)
        versions = []
        for number, files in enumerate((before, after)):
            write_files(path, types, files, number)
            table, version = host.metadata.discover(options)
            layout = host.reader.layout(table, options, version)
            assert [layout.columns.field(name) for name in names] == list(schema)
            found.remember(version, lambda files, t=table, at=layout: host.reader.bounds_of(t, at, files))
            versions.append(version.digest)
        numbers = [dict.fromkeys(before, 0), {name: int(before.get(name) != after[name]) for name in after}]
        rows = [rows_by_key(files, at) for files, at in zip((before, after), numbers, strict=True)]
        asked = list(itertools.product(*(domain or DOMAIN[kind] for kind in types)))
        arrays = [pa.array([key[n] for key in asked], kind) for n, kind in enumerate(types)]
        arrays = [cast_column(array, field.type, "", "") for array, field in zip(arrays, schema, strict=True)]
        there, back = (found.may_differ(*pair, arrays) for pair in (versions, versions[::-1]))
        assert there is not None
        assert back is not None
        assert there.tolist() == back.tolist()
        for key, touched in zip(asked, there.tolist(), strict=True):
            one, other = (of_version.get(comparable(key), []) for of_version in rows)
            assert touched or one == other, key
        if before == after:
            assert not there.any()


@examples(90)
@given(case=two_versions([pa.int32(), pa.int64(), pa.string()]))
def test_what_cannot_differ_does_not(case: Any) -> None:
    """Of generated tables of parquet files with whole and text keys, some files replaced, added or removed."""
    check_carried(*case)


@examples(90)
@given(case=two_versions([*DOMAIN]))
def test_what_cannot_differ_does_not_for_any_type(case: Any) -> None:
    """So for keys of every other type, NaNs and zeros of both signs among them."""
    check_carried(*case)


# Types that files may have and keys may not, with some of their values, as keys in another order than as stored.
STORED: dict[pa.DataType, list[Any]] = {
    pa.uint8(): [0, 1, 127, 128, 255],
    pa.uint32(): [0, 1, 2**31 - 1, 2**31, 2**32 - 1],
    pa.uint64(): [0, 1, 2**63 - 1, 2**63, 2**64 - 1],
    pa.float16(): [np.float16(value) for value in (-2.0, -0.0, 0.5, 1.0, math.inf)],
    pa.large_string(): ["", "a", "b", "é"],
    pa.dictionary(pa.int32(), pa.string()): ["", "a", "b", "é"],
    pa.binary(2): [b"\0\0", b"aa", b"ab", b"\xff\xff"],
    pa.timestamp("ms"): [NOON + datetime.timedelta(milliseconds=n) for n in range(5)],
    pa.timestamp("s", "Europe/Berlin"): [NOON.replace(tzinfo=UTC) + datetime.timedelta(hours=n) for n in range(5)],
    pa.timestamp("ns"): [NOON + datetime.timedelta(microseconds=n) for n in range(5)],
    pa.date64(): [DAY + datetime.timedelta(n) for n in range(5)],
    pa.decimal128(20, 5): [decimal.Decimal(n) / 8 for n in (-9, -1, 0, 1, 100_000)],
}


@pytest.mark.parametrize("kind", STORED, ids=str)
@examples(15)
@given(data=st.data())
def test_what_cannot_differ_does_not_however_it_is_stored(kind: pa.DataType, data: st.DataObject) -> None:
    """So where files store keys in types that are read as others."""
    keys = st.lists(st.tuples(st.none() | st.sampled_from(STORED[kind])), max_size=5)
    before = {"a": data.draw(keys), "b": data.draw(keys)}
    after = {**before, data.draw(st.sampled_from(["b", "c"])): data.draw(keys)}
    check_carried([kind], before, after, STORED[kind])


class Dim(Table):
    """A table of files on a host of its own that is looked up through the partial cache."""

    def __init__(
        self,
        path: Path,
        cache_dir: Path,
        options: Mapping[str, str] | None = None,
        clock: FakeClock | None = None,
        keys: str = "id",
    ) -> None:
        given = {"lookup.keys": keys, "lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "100000"}
        super().__init__(path, cache_dir, {**given, **(options or {})}, clock)

    def rows(self, columns: Mapping[str, Any], cache: bool = True) -> list[dict[str, Any]]:
        """The rows of these keys, without the cache on request."""
        options = self.options
        if not cache:
            off = {"lookup.partition": options.partition} if options.partition else {}
            known = {"path": options.path, "lookup.keys": ",".join(options.keys or ())}
            options = LookupOptions.parse({**known, **off})
        found = planner.find(self.host.reader, options, self.table)
        shown = planner.table_columns(found, options)
        names = list(columns)
        ordered = pa.schema([shown.field(n) for n in (*names, *(n for n in shown.names if n not in names))])
        plan = planner.plan_read(found, options, ordered, self.host.clock.host())
        answer: list[dict[str, Any]] = get_many(
            self.host.reader, plan, pa.table(dict(columns)), names, None, found.version
        ).to_pylist()
        return answer

    def check(self, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The rows of these keys, which must be those that the files have."""
        answer = self.rows(columns)
        assert answer == self.rows(columns, cache=False)
        return answer

    def grown(self, run: Callable[[], object], *names: str) -> tuple[int, ...]:
        """By how much `run` lets counters grow."""
        before = self.host.metrics.snapshot()
        run()
        after = self.host.metrics.snapshot()
        return tuple(after[name] - before[name] for name in names)


def put_file(path: Path, **columns: Any) -> None:
    """A parquet file in place by rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.new"
    pq.write_table(pa.table(columns), temporary)
    os.replace(temporary, path)


COUNTERS = ("hitCount", "missCount", "loadCount", "sharedCarriedOverCount")


def test_partition_columns_as_keys(tmp_path: Path, cache_dir: Path) -> None:
    """A key that names its directory is touched by changes of that directory only, whatever the format of the files."""
    path = tmp_path / "dim"
    for day in (1, 2, 3):
        (path / f"day={day}").mkdir(parents=True)
        csv.write_csv(pa.table({"id": [1, 2], "v": [day * 10 + 1, day * 10 + 2]}), path / f"day={day}" / "a.csv")
    dim = Dim(path, cache_dir, keys="day,id")
    keys = {"day": [1, 1, 2, 3, 4], "id": [1, 2, 1, 1, 1]}
    assert [row["v"] for row in dim.check(keys)] == [11, 12, 21, 31]
    csv.write_csv(pa.table({"id": [1, 3], "v": [210, 230]}), path / "day=2" / "a.csv")
    assert dim.grown(lambda: dim.rows(keys), *COUNTERS) == (4, 1, 1, 4)
    assert [row["v"] for row in dim.check(keys)] == [11, 12, 210, 31]
    (path / "day=4").mkdir()
    csv.write_csv(pa.table({"id": [1], "v": [41]}), path / "day=4" / "a.csv")
    assert dim.grown(lambda: dim.check(keys), *COUNTERS) == (4, 1, 1, 4)
    shutil.rmtree(path / "day=1")
    assert dim.grown(lambda: dim.check(keys), *COUNTERS) == (3, 2, 2, 3)


def test_files_without_bounds_are_read_again(tmp_path: Path, cache_dir: Path) -> None:
    """Of a CSV file nothing is known, so after a change every key is loaded anew, and rightly."""
    path = tmp_path / "dim"
    path.mkdir()
    for name in ("a", "b"):
        csv.write_csv(pa.table({"id": [1, 2], "v": [name + "1", name + "2"]}), path / f"{name}.csv")
    dim = Dim(path, cache_dir)
    assert [row["v"] for row in dim.check({"id": [2, 1]})] == ["a2", "b2", "a1", "b1"]
    csv.write_csv(pa.table({"id": [9], "v": ["c9"]}), path / "c.csv")
    assert dim.grown(lambda: dim.check({"id": [2, 1, 9]}), *COUNTERS) == (0, 3, 3, 0)


def test_bounds_of_files(tmp_path: Path, cache_dir: Path) -> None:
    """A file's bounds are those of its row groups together, or its directory's value; a column that it lacks is null."""
    path = tmp_path / "dim"
    full = pa.table({"id": [5, 3, None, 9, 8, 7], "t": ["b", "a", "z", None, None, None]})
    (path / "p=1").mkdir(parents=True)
    (path / "p=__HIVE_DEFAULT_PARTITION__").mkdir()
    pq.write_table(full, path / "p=1" / "a.parquet", row_group_size=3)
    pq.ParquetWriter(path / "p=1" / "b.parquet", full.schema).close()
    pq.write_table(full.select(["id"]).slice(2, 1), path / "p=1" / "c.parquet")
    pq.write_table(full, path / "p=__HIVE_DEFAULT_PARTITION__" / "d.parquet", write_statistics=False)
    host = make_host(str(path), cache_dir)
    options = LookupOptions.parse({"path": str(path), "lookup.keys": "ID,t,p"})
    table, version = host.metadata.discover(options)
    layout = host.reader.layout(table, options, version)
    assert layout.keys == ("id", "t", "p")
    a, b, c, d = host.reader.bounds_of(table, layout, version.files)
    assert a == [stats(3, 9, 1, 6), stats("a", "z", 3, 6), stats(1, 1, 0, 1)]
    assert [part is not None and part.all_null for part in b] == [True, True, False]
    assert [part is not None and part.all_null for part in c] == [True, True, False]
    assert d[2] is not None
    assert d[2].all_null
    assert all(part is None or part.low is part.high is None for part in d[:2])
    assert host.reader.bounds_of(table, layout, ()) == []


# --- bounds of several parts, and many keys at once ----------------------------------------------------


@examples(200)
@given(parts=st.lists(st.tuples(st.lists(st.none() | st.integers(-9, 9), max_size=5), st.booleans(), st.booleans()), max_size=5))  # fmt: skip
def test_joined_bounds(parts: list[tuple[list[int | None], bool, bool]]) -> None:
    """The bounds of several row groups hold every value of each; what is not known of one is not known of all."""
    made = []
    for values, bounded, counted in parts:
        known = [value for value in values if value is not None]
        low, high = (min(known), max(known)) if known and bounded else (None, None)
        made.append(ColumnStats(low, high, values.count(None) if counted else None, len(values)))
    joined = joined_stats(made)
    assert joined is not None
    everything = [value for values, _, _ in parts for value in values]
    known = [value for value in everything if value is not None]
    assert joined.rows == len(everything)
    assert joined.null_count in (None, everything.count(None))
    assert (joined.null_count is None) == any(not counted for _, _, counted in parts)
    assert joined.all_null <= (not known)
    if joined.low is not None:
        assert known
        assert (joined.low, joined.high) == (min(known), max(known))
    elif all(bounded and counted for _, bounded, counted in parts):
        assert not known
    assert joined_stats([*made, None]) is None


@pytest.mark.parametrize("nan", [stats(math.nan, math.nan), stats(0.0, math.nan)])
def test_joined_bounds_that_are_nan(nan: ColumnStats) -> None:
    """Some writers' bounds are NaN: they bound nothing, nor do those joined with them."""
    for parts in ([nan, stats(1.0, 2.0)], [stats(1.0, 2.0), nan]):
        joined = joined_stats(parts)
        assert joined is None or joined.low is None or math.isnan(joined.low) or math.isnan(joined.high)


@examples(150)
@given(kind=st.sampled_from(KINDS), data=st.data())
def test_among(kind: pa.DataType, data: st.DataObject) -> None:
    """True of the rows that hold one of the values (of floats: of any value), and of bounds that one may lie between."""
    wanted = data.draw(st.lists(values_of(kind), min_size=1, max_size=6))
    rows = data.draw(st.lists(st.none() | values_of(kind) | st.sampled_from(wanted), max_size=8))
    values, column = pc.unique(pa.array(wanted, kind)), pa.array(rows, kind)
    node = Among("c", values)
    found = evaluate(node, {"c": column}, len(column)).to_pylist()
    known = set(plain(values))
    for value, is_found in zip(plain(column), found, strict=True):
        there = value is not None and value in known
        assert bool(is_found) == (there or (pa.types.is_floating(kind) and value is not None))
    here = column.drop_null()
    with contextlib.suppress(ValueError, OverflowError):  # Python has not all values of all types
        ordered = sorted(value for value in here.to_pylist() if not (isinstance(value, float) and math.isnan(value)))
        if ordered and not pa.types.is_temporal(kind):
            bounds = ColumnStats(ordered[0], ordered[-1], column.null_count, len(column))
            holds = any(found) and not pa.types.is_floating(kind)
            assert node.within(bounds) or not holds
            assert may_match(node, lambda name: bounds) == node.within(bounds)
    assert node.within(ColumnStats(None, None, None, 5))
    assert not may_match(node, lambda name: ColumnStats(None, None, 5, 5))
    assert may_match(node, lambda name: None)


@examples(100)
@given(wanted=st.sets(st.integers(-20, 20), min_size=1), low=st.integers(-20, 20), high=st.integers(-20, 20))
def test_among_is_exact_for_whole_numbers(wanted: set[int], low: int, high: int) -> None:
    """Bounds match if and only if one of the values lies between them."""
    node = Among("c", pa.array(wanted, pa.int64()))
    assert node.ordered == sorted(wanted)
    expected = any(low <= value <= high for value in wanted)
    assert node.within(ColumnStats(low, high, 0, 5)) == expected
    assert not Among("c", pa.array([], pa.int64())).within(ColumnStats(low, high, 0, 5))


@pytest.mark.parametrize(
    "values",
    [
        pa.array([1.0, math.nan]),
        pa.array([2**62], pa.int64()).cast(pa.timestamp("us")),
        pa.array([2**31 - 1], pa.int32()).cast(pa.date32()),
    ],
    ids=str,
)
def test_among_values_without_an_order(values: pa.Array) -> None:
    """Where Python cannot order the values, or lacks one, any bounds may hold one."""
    node = Among("c", values)
    assert node.ordered is None
    assert node.within(ColumnStats(5, 6, 0, 1))


# --- a lookup through the caches -----------------------------------------------------------------------

TOLD = ("hitCount", "missCount", "loadCount", "numLoadFailures")


class Source:
    """A table as loads see it: rows by version and key. What was loaded is on record; `before` runs ahead of each load."""

    def __init__(self, **versions: Mapping[int, Sequence[int]]) -> None:
        self.versions = versions or {"v1": {n: [n * 10 + i for i in range(n % 3)] for n in range(200)}}
        self.loads: list[list[int]] = []
        self.before: Callable[[list[int]], object] = lambda keys: None

    def load(self, version: str) -> Load:
        def load(keys: Sequence[pa.Array]) -> pa.Table:
            assert [array.null_count for array in keys] == [0]
            wanted = keys[0].to_pylist()
            assert len(set(wanted)) == len(wanted)
            self.loads.append(wanted)
            self.before(wanted)
            return rows_of([self.versions[version].get(key, []) for key in wanted])

        return load

    def loaded(self) -> list[int]:
        """The keys that were loaded, in order of value; forgotten by asking."""
        keys = sorted(key for load in self.loads for key in load)
        self.loads.clear()
        return keys


class Waited(CacheMetricGroup):
    """Counters that say when somebody begins to wait for another's load."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Event()

    def inc(self, name: str, amount: int = 1) -> None:
        super().inc(name, amount)
        if name == "loadWaitCount" and amount:
            self.waits.set()


class Worker:
    """A process with its own cache and, if it has a directory, what the host shares."""

    def __init__(
        self,
        root: Path | None,
        source: Source,
        clock: FakeClock | None = None,
        bounds: Bounds = NONE,
        *,
        host: HostClock | None = None,
        wait_s: float = 60.0,
        make: Callable[[], LookupCache] | None = None,
    ) -> None:
        self.clock = clock or FakeClock()
        self.source = source
        self.host = host or self.clock.host()
        self.metrics = Waited()
        self.later = Later()
        self.made = 0
        self.make = make
        self.bounds = bounds
        wall_s = self.host.wall_s
        self.root = root or Path("/nonexistent")
        self.disk = None if root is None else Disk(root, 2**30, self.metrics, wall_s, random.Random(7))
        self.shared = None
        if self.disk is not None:
            rng = random.Random(os.urandom(8))
            self.shared = SharedCache(self.disk, SPACE, KEYS, SEED, bounds, self.metrics, self.host, rng, self.later)
        flights = Flights(self.disk, SPACE, SEED, self.metrics, self.host, wait_s)
        self.cache = PartialCache(KEYS.names, self._make, self.shared, flights, self.metrics, self.host)

    def _make(self) -> LookupCache:
        self.made += 1
        if self.make is not None:
            return self.make()
        return DefaultLookupCache(
            max_rows=2**62 if math.isinf(self.bounds.rows) else int(self.bounds.rows),
            expire_after_access_s=self.bounds.expire_after_access_s,
            expire_after_write_s=self.bounds.expire_after_write_s,
            cache_missing_key=self.bounds.missing_keys,
            clock=self.host.steady_s,
            rng=random.Random(7),
        )

    def lookup(
        self, *keys: int | None, version: str = "v1", may_differ: Differ = unknown, load: Load | None = None
    ) -> list[list[int]]:
        """The values of each key's rows."""
        self.clock.wall_s += 0.001
        fresh = Freshness(version, ROWS, may_differ)
        rows = self.cache.lookup([pa.array(keys, pa.int64())], fresh, load or self.source.load(version))
        assert rows.schema.equals(ROWS.append(pa.field(KEY_INDEX, pa.int64())))
        held = by_key(range(len(keys)), [True] * len(keys), rows)
        return [values or [] for values in held.values()]

    def told(self) -> tuple[int, ...]:
        """(hits, misses, loads, failures) so far."""
        seen = self.metrics.snapshot()
        return tuple(seen[name] for name in TOLD)

    def count(self, name: str) -> int:
        return self.metrics.snapshot()[name]


@pytest.fixture
def source() -> Source:
    return Source()


SHARED = pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "alone"])


@SHARED
def test_what_a_lookup_counts(cache_dir: Path, source: Source, is_shared: bool) -> None:
    """Keys are counted: a hit for what is there, a miss and a load for what is not, nothing for a null."""
    worker = Worker(cache_dir if is_shared else None, source)
    assert worker.lookup(1, 2, 3) == [[10], [20, 21], []]
    assert worker.told() == (0, 3, 3, 0)  # cold
    assert worker.lookup(3, 1, 2) == [[], [10], [20, 21]]
    assert worker.told() == (3, 3, 3, 0)  # warm
    assert worker.lookup(4, 1, 5) == [[40], [10], [50, 51]]
    assert worker.told() == (4, 5, 5, 0)  # partly
    assert worker.lookup(6, 7, 6, 7, 7, 1, 1) == [[], [70], [], [70], [70], [10], [10]]
    assert worker.told() == (9, 7, 7, 0)  # repeated keys are loaded once
    assert worker.lookup(None, 8, None, 1) == [[], [80, 81], [], [10]]
    assert worker.told() == (10, 8, 8, 0)
    assert worker.lookup(None, None) == [[], []]
    assert worker.lookup() == []
    assert worker.told() == (10, 8, 8, 0)
    assert worker.lookup(500, 500) == [[], []]
    assert worker.lookup(500) == [[]]
    assert worker.told() == (12, 9, 9, 0)  # that a key has no rows is known, too
    assert source.loaded() == [1, 2, 3, 4, 5, 6, 7, 8, 500]
    rows = sum(max(key % 3, 1) for key in range(1, 9)) + 1
    assert worker.count("numCachedRecords") == rows
    assert worker.count("numCachedBytes") > 0
    assert worker.count("loadWaitCount") == worker.count("cacheFailureCount") == 0


def test_what_another_process_loaded_is_a_hit(cache_dir: Path, clock: FakeClock, source: Source) -> None:
    """Rows and keys without rows are taken over from the host, once; what it lacks is loaded, and shared in turn."""
    one, other = Worker(cache_dir, source, clock), Worker(cache_dir, source, clock)
    assert one.lookup(1, 2, 3) == [[10], [20, 21], []]
    assert source.loaded() == [1, 2, 3]
    assert other.lookup(4, 3, 2, 2) == [[40], [], [20, 21], [20, 21]]
    assert source.loaded() == [4]
    assert other.told() == (3, 1, 1, 0)
    assert one.lookup(4, 1) == [[40], [10]]
    assert source.loaded() == []
    assert one.told() == (2, 3, 3, 0)
    shutil.rmtree(cache_dir)
    assert other.lookup(2, 3, 4) == [[20, 21], [], [40]]
    assert source.loaded() == []


def test_missing_keys_are_forgotten_on_request(cache_dir: Path, clock: FakeClock, source: Source) -> None:
    """Without cache-missing-key a key without rows is asked for each time."""
    bounds = dataclasses.replace(NONE, missing_keys=False)
    workers = [Worker(cache_dir, source, clock, bounds), Worker(None, source, clock, bounds)]
    for worker in workers:
        for _ in range(3):
            assert worker.lookup(3, 3, 1) == [[], [], [10]]
        assert worker.told() == (5, 4, 4, 0)
        assert source.loaded() == [1, 3, 3, 3]


@SHARED
def test_a_load_that_fails(cache_dir: Path, source: Source, is_shared: bool) -> None:
    """A failure is told to the caller and counted by key, with what was a hit beside it; nothing is kept of it."""
    worker = Worker(cache_dir if is_shared else None, source)
    worker.lookup(1, 2)

    def fail(keys: list[int]) -> None:
        raise UfsUnavailableError("injected")

    source.before = fail
    for _ in range(2):
        with pytest.raises(UfsUnavailableError, match="injected"):
            worker.lookup(4, 1, 5, 2, 4, None)
    assert worker.told() == (2 * 3, 2 + 2 * 2, 2, 4)
    assert worker.lookup(1, 2) == [[10], [20, 21]]
    source.before = lambda keys: None
    source.loaded()
    assert worker.lookup(4, 5) == [[40], [50, 51]]
    assert source.loaded() == [4, 5]
    assert worker.told() == (8, 8, 4, 4)


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
    assert worker.disk is not None
    found: list[float] = []
    for path in (worker.root / "v1" / "snapshots" / SPACE).glob("*.used"):
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


def test_what_one_process_uses_stays_for_all(cache_dir: Path, clock: FakeClock, source: Source) -> None:
    """A key that one process asks for all the time does not expire for the host, nor is it given up for room."""
    bounds = dataclasses.replace(NONE, rows=40, expire_after_access_s=10.0)
    worker, other = Worker(cache_dir, source, clock, bounds), Worker(cache_dir, source, clock, bounds)
    worker.lookup(1, 2)
    for _ in range(4):
        clock.tick(5)
        worker.lookup(1, 2)
    clock.tick(1)
    assert other.lookup(1, 2) == [[10], [20, 21]]
    source.loaded()
    for start in range(10, 100, 10):
        clock.tick(2)
        worker.lookup(1, 2)
        other.lookup(*range(start, start + 10))
        for _, run in other.later.waiting:
            run()
        other.later.waiting.clear()
    assert Worker(cache_dir, source, clock, bounds).lookup(1, 2) == [[10], [20, 21]]
    assert not {1, 2} & set(source.loaded())


VERSIONS = {
    "v1": {1: [10], 2: [20, 21], 3: []},
    "v2": {1: [11], 2: [20, 21], 3: []},
}


def test_another_version(cache_dir: Path, clock: FakeClock) -> None:
    """With the version the cache of this process is given up; what did not change is taken from the host, in both directions."""
    source = Source(**VERSIONS)
    worker = Worker(cache_dir, source, clock)
    assert worker.lookup(1, 2, 3) == [[10], [20, 21], []]
    source.loaded()
    assert worker.lookup(1, 2, 3, version="v2", may_differ=differing(1)) == [[11], [20, 21], []]
    assert source.loaded() == [1]
    assert worker.count("sharedCarriedOverCount") == 2
    assert worker.told() == (2, 4, 4, 0)
    assert worker.lookup(1, 2, 3, version="v2", may_differ=differing(1)) == [[11], [20, 21], []]
    assert worker.count("sharedCarriedOverCount") == 2
    assert worker.lookup(1, 2, 3, may_differ=differing(1)) == [[10], [20, 21], []]
    assert source.loaded() == []
    assert worker.made == 3


def test_another_version_of_what_is_not_shared(source: Source) -> None:
    """Without a directory a new version is loaded anew."""
    source.versions = VERSIONS
    worker = Worker(None, source)
    worker.lookup(1, 2)
    assert worker.lookup(1, 2, version="v2", may_differ=differing()) == [[11], [20, 21]]
    assert source.loaded() == [1, 1, 2, 2]
    assert worker.lookup(1, 2, version="v2") == [[11], [20, 21]]
    assert source.loaded() == []


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


def test_a_lookup_while_the_version_changes_to_and_fro(cache_dir: Path, clock: FakeClock) -> None:
    """Threads that answer from two versions at once get the rows of theirs."""
    source = Source(v1={n: [n] for n in range(50)}, v2={n: [n + 1000] for n in range(50)})
    one_cache = DefaultLookupCache(max_rows=30, clock=clock.host().steady_s, rng=random.Random(7))
    for worker in (Worker(cache_dir, source, clock), Worker(None, source, clock, make=lambda: one_cache)):

        def work(version: str, add: int, seed: int, worker: Worker = worker) -> None:
            rng = random.Random(seed)
            for _ in range(40):
                keys = [rng.randrange(50) for _ in range(5)]
                assert worker.lookup(*keys, version=version) == [[key + add] for key in keys]

        run_all(lambda work=work: work("v1", 0, 1), lambda work=work: work("v2", 1000, 2), lambda work=work: work("v2", 1000, 3))  # type: ignore[misc] # fmt: skip


# --- single flight -------------------------------------------------------------------------------------

HERE = pytest.mark.parametrize("where", ["one process", "no directory", "two processes"])


def two_workers(cache_dir: Path, source: Source, where: str) -> tuple[Worker, Worker]:
    """Two callers at once: threads of one process, that shares or does not, or processes."""
    root = None if where == "no directory" else cache_dir
    one = Worker(root, source, host=HostClock())
    return one, one if where != "two processes" else Worker(root, source, host=HostClock())


@HERE
def test_keys_that_two_lack_are_loaded_once(cache_dir: Path, source: Source, where: str) -> None:
    """Who comes while the keys are being loaded waits, and has hits; of overlapping sets each key is loaded once."""
    one, other = two_workers(cache_dir, source, where)
    loading = threading.Event()

    def meet(keys: list[int]) -> None:
        if 1 in keys:
            loading.set()
            assert other.metrics.waits.wait(BOUND_S)

    source.before = meet
    answers: dict[str, Any] = {}

    def second() -> None:
        assert loading.wait(BOUND_S)
        answers["other"] = other.lookup(2, 4, 1, 2)

    run_all(lambda: answers.update(one=one.lookup(1, 2, 3)), second)
    assert answers == {"one": [[10], [20, 21], []], "other": [[20, 21], [40], [10], [20, 21]]}
    assert source.loaded() == [1, 2, 3, 4]
    assert other.count("loadWaitCount") == 2
    if where == "two processes":
        assert one.told() == (0, 3, 3, 0)
        assert other.told() == (3, 1, 1, 0)
    else:
        assert one.told() == (3, 4, 4, 0)


@HERE
def test_when_a_load_fails_the_others_try(cache_dir: Path, source: Source, where: str) -> None:
    """Who waited for a load that failed loads for itself; the error is for the one whose load it was."""
    one, other = two_workers(cache_dir, source, where)
    loading = threading.Event()

    def fail_once(keys: list[int]) -> None:
        if not loading.is_set():
            loading.set()
            assert other.metrics.waits.wait(BOUND_S)
            raise UfsUnavailableError("injected")

    source.before = fail_once

    def first() -> None:
        with pytest.raises(UfsUnavailableError):
            one.lookup(1, 2)

    def second() -> None:
        assert loading.wait(BOUND_S)
        assert other.lookup(2, 1) == [[20, 21], [10]]

    run_all(first, second)
    assert [sorted(keys) for keys in source.loads] == [[1, 2], [1, 2]]
    assert tuple(map(sum, zip(*{id(w): w.told() for w in (one, other)}.values(), strict=True))) == (0, 4, 2, 2)


def load_forever(root: Path, loading: Any) -> None:
    source = Source()

    def hang(keys: list[int]) -> None:
        loading.set()
        threading.Event().wait(2 * BOUND_S)

    source.before = hang
    Worker(root, source).lookup(1, 2)


def test_when_the_loader_is_killed_the_others_go_on(cache_dir: Path, source: Source) -> None:
    """Keys that a process was loading when it was killed are loaded by who waited for it, at once."""
    context = multiprocessing.get_context("spawn")
    loading = context.Event()
    child = context.Process(target=load_forever, args=(cache_dir, loading))
    child.start()
    try:
        assert loading.wait(BOUND_S)

        def kill() -> None:
            child.kill()
            child.join(BOUND_S)

        clock = HereClock(kill)
        worker = Worker(cache_dir, source, clock.fake, host=clock.host())
        assert worker.lookup(2, 4, 1) == [[20, 21], [40], [10]]
        assert len(clock.fake.slept) == 1
        assert source.loads == [[4], [2, 1]] or [sorted(keys) for keys in source.loads] == [[4], [1, 2]]
        assert worker.told() == (0, 3, 3, 0)
        assert worker.count("loadWaitCount") == 2
    finally:
        child.kill()
        child.join()


def test_a_loader_that_does_not_end_is_waited_for_once(cache_dir: Path, clock: FakeClock, source: Source) -> None:
    """After the time one waits for another its keys are loaded all the same, and from then on at once."""
    worker = Worker(cache_dir, source, clock, wait_s=20.0)
    arrays = [pa.array([1, 2, 5], pa.int64())]
    stuck = Opened(cache_dir).disk.create_claim(SPACE, "v1", np.sort(Keys(arrays).hashes(SEED)).tobytes())
    assert worker.lookup(1, 3) == [[10], []]
    assert 20 <= sum(clock.slept) <= 20.1
    clock.slept.clear()
    assert worker.lookup(2, 5, 1) == [[20, 21], [50, 51], [10]]
    assert clock.slept == []
    assert source.loaded() == [1, 2, 3, 5]
    stuck.release()


def test_a_thread_that_does_not_end_is_waited_for_once(source: Source) -> None:
    """So in one process: who has waited for another thread as long as was said loads for itself."""
    worker = Worker(None, source, wait_s=0.01)
    loading, end = threading.Event(), threading.Event()

    def hang(keys: list[int]) -> None:
        if not loading.is_set():
            loading.set()
            end.wait(BOUND_S)

    source.before = hang
    answers: list[Any] = []
    hanging = threading.Thread(target=worker.lookup, args=(1, 2), daemon=True)
    other = threading.Thread(target=lambda: answers.append(worker.lookup(2)), daemon=True)
    hanging.start()
    assert loading.wait(BOUND_S)
    other.start()
    other.join(1.0)
    found = list(answers)
    end.set()
    hanging.join(BOUND_S)
    other.join(BOUND_S)
    assert found == [[[20, 21]]]


@pytest.mark.parametrize("broken", ["claims", "locks", "snapshots", "tmp", "all"])
def test_a_broken_directory_costs_loads_only(cache_dir: Path, source: Source, broken: str) -> None:
    """Whatever of the directory cannot be written: a process answers by itself, and counts the failures."""
    worker = Worker(cache_dir, source)
    root = cache_dir / "v1"
    for name in [broken] if broken != "all" else ["claims", "locks", "snapshots", "tmp"]:
        shutil.rmtree(root / name)
        (root / name).touch()
    for _ in range(2):
        assert worker.lookup(1, 2, 3) == [[10], [20, 21], []]
    assert source.loaded() == [1, 2, 3]
    assert worker.told() == (3, 3, 3, 0)
    assert worker.count("cacheFailureCount") > 0
    worker.clock.tick(2)
    assert worker.lookup(1) == [[10]]
    shutil.rmtree(cache_dir)
    assert worker.lookup(1, 4) == [[10], [40]]


@HERE
def test_keys_of_one_hash_cost_a_wait_and_no_more(
    cache_dir: Path, source: Source, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all keys have one hash a lookup waits for another's, and still gets its own rows."""
    monkeypatch.setattr(Keys, "hashes", lambda self, seed: np.zeros(self.rows, np.uint64))
    one, other = two_workers(cache_dir, source, where)
    loading = threading.Event()

    def meet(keys: list[int]) -> None:
        if 1 in keys:
            loading.set()
            assert other.metrics.waits.wait(BOUND_S)

    source.before = meet
    answers: dict[str, Any] = {}

    def second() -> None:
        assert loading.wait(BOUND_S)
        answers["other"] = other.lookup(4, 5)

    run_all(lambda: answers.update(one=one.lookup(1, 2)), second)
    assert answers == {"one": [[10], [20, 21]], "other": [[40], [50, 51]]}
    assert source.loads == [[1, 2], [4, 5]]
    assert one.lookup(1, 5, 7, 2) == [[10], [50, 51], [70], [20, 21]]


@HERE
def test_crossing_lookups_end(cache_dir: Path, where: str) -> None:
    """Two that ask for the same keys in other orders, over and over, do not wait for each other, and load each key once."""
    source = Source(v1={n: [n] for n in range(100)})
    one, other = two_workers(cache_dir, source, where)

    def work(worker: Worker, order: int) -> None:
        for number in range(0, 60, 3):
            keys = [number, number + 1, number + 2][::order]
            assert worker.lookup(*keys) == [[key] for key in keys]

    run_all(lambda: work(one, 1), lambda: work(other, -1))
    assert source.loaded() == list(range(60))


@HERE
def test_many_callers_of_few_keys(cache_dir: Path, where: str) -> None:
    """However many ask at once, in any sets: each key is loaded once, and every answer is right."""
    source = Source(v1={n: [n, n + 1000] for n in range(30)})
    workers = two_workers(cache_dir, source, where)

    def work(number: int) -> None:
        rng = random.Random(number)
        for _ in range(15):
            keys = [rng.randrange(30) for _ in range(rng.randrange(1, 8))]
            assert workers[number % 2].lookup(*keys) == [[key, key + 1000] for key in keys]

    run_all(*(lambda number=number: work(number) for number in range(5)))  # type: ignore[misc]
    loaded = source.loaded()
    assert len(loaded) == len(set(loaded))


@examples(60)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.integers(0, 2), st.lists(st.none() | st.integers(0, 9), max_size=6), st.booleans()),
            st.tuples(st.just(3), st.lists(st.integers(0, 9), max_size=2), st.just(False)),
            st.tuples(st.just(4), st.just([5, 20]), st.booleans()),
        ),
        max_size=20,
    ),
    bounds=st.sampled_from(BOUNDED),
)
def test_any_lookups_are_answered_and_counted_rightly(
    steps: list[tuple[int, list[int | None], bool]], bounds: Bounds
) -> None:
    """In any history of lookups, failing loads, changes and time: right rows, hits + misses = keys, loads + failures = misses."""
    with new_directory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "_SEGMENTS_AT_MOST", 2)
        clock = FakeClock()
        tables: list[dict[int, list[int]]] = [{n: [n * 10 + i for i in range(n % 4)] for n in range(10)}]
        source = Source(v0=tables[0])
        workers = [Worker(root / "cache", source, clock, bounds), Worker(root / "cache", source, clock, bounds)]
        workers.append(Worker(None, source, clock, bounds))

        def may_differ(version: str, keys: Sequence[pa.Array]) -> Numbers:
            old = tables[int(version.removeprefix("v"))]
            return np.array([old[key] != tables[-1][key] for key in keys[0].to_pylist()], bool)

        def fail(keys: list[int]) -> None:
            raise UfsUnavailableError("injected")

        for kind, keys, flag in steps:
            if kind == 3:
                changed = {key: [*tables[-1][key], len(tables) * 1000] for key in keys if key is not None}
                tables.append({**tables[-1], **changed})
                source.versions = {**source.versions, f"v{len(tables) - 1}": tables[-1]}
                continue
            if kind == 4:
                clock.tick(5.0 if flag else 10.0)
                for worker in workers:
                    for _, run in worker.later.waiting:
                        run()
                    worker.later.waiting.clear()
                continue
            worker = workers[kind]
            before = worker.told()
            source.before = fail if flag else lambda keys: None
            version = f"v{len(tables) - 1}"
            try:
                answer = worker.lookup(*keys, version=version, may_differ=may_differ)
            except UfsUnavailableError:
                assert flag
            else:
                assert answer == [[] if key is None else tables[-1][key] for key in keys]
            hits, misses, loads, failures = (a - b for a, b in zip(worker.told(), before, strict=True))
            assert hits + misses == sum(key is not None for key in keys)
            assert loads + failures == misses <= len(set(keys) - {None})
            assert sum(map(len, source.loads)) == misses
            source.loads.clear()


# --- the caches of a table -----------------------------------------------------------------------------


class Plain(LookupCache):
    """A cache of somebody's own, of which nothing is known."""

    def __init__(self) -> None:
        self.inner = DefaultLookupCache(max_rows=100)
        self.opened = self.closed = 0

    def open(self, metrics: CacheMetricGroup) -> None:
        self.opened += 1
        self.inner.open(metrics)

    def get_many(self, keys: pa.Table) -> CachedRows:
        return self.inner.get_many(keys)

    def peek_many(self, keys: pa.Table) -> CachedRows:
        return self.inner.peek_many(keys)

    def put_many(self, keys: pa.Table, rows: pa.Table, ages_s: Numbers | None = None) -> None:
        self.inner.put_many(keys, rows, ages_s)

    def invalidate_many(self, keys: pa.Table) -> None:
        self.inner.invalidate_many(keys)

    def size(self) -> int:
        return self.inner.size()

    def bytes(self) -> int:
        return self.inner.bytes()

    def close(self) -> None:
        self.closed += 1
        self.inner.close()


class Tables:
    """The caches of tables in one process, asked without a reader in between."""

    def __init__(self, root: Path | None, source: Source, own: LookupCache | None = None, **bounds: str) -> None:
        self.clock = FakeClock()
        self.metrics = CacheMetricGroup()
        disk = Disk(root, 2**30, self.metrics, lambda: self.clock.wall_s, random.Random(7)) if root else None
        rng = random.Random(os.urandom(8))
        self.tables = PartialTables(disk, self.metrics, self.clock.host(), rng, Later(), own)
        self.source = source
        given = {"lookup.partial-cache.max-rows": "1000", **bounds}
        self.options = LookupOptions.parse({"path": "/dim", "lookup.keys": "k", "lookup.cache": "PARTIAL", **given})

    def lookup(self, *keys: int, version: str = "v1", space: str = "s") -> list[int]:
        files = TableVersion("t", (FileVersion("file:///dim/a", 1, version),))
        cache, fresh = self.tables.of(
            space, self.options, KEYS, ROWS, files, lambda files: [[stats(0, 5)] for _ in files]
        )
        rows = cache.lookup([pa.array(keys, pa.int64())], fresh, self.source.load(version))
        values: list[int] = rows.column("v").to_pylist()
        return values


def test_processes_draw_one_seed(cache_dir: Path, source: Source) -> None:
    """All processes of a host share by one seed, drawn by the first; tables and other options have their own caches."""
    one, other = Tables(cache_dir, source), Tables(cache_dir, source)
    assert one.lookup(1, 2) == [10, 20, 21]
    assert other.lookup(2, 1) == [20, 21, 10]
    assert source.loaded() == [1, 2]
    assert one.lookup(1, space="another table") == [10]
    assert source.loaded() == [1]
    assert one.lookup(8, version="v1") == [80, 81]
    source.versions = {"v1": source.versions["v1"], "v2": source.versions["v1"]}
    source.loaded()
    assert one.lookup(1, 8, version="v2") == [10, 80, 81]  # both files may hold keys up to 5
    assert source.loaded() == [1]


def test_a_seed_that_cannot_be_shared(cache_dir: Path, source: Source) -> None:
    """Without a record of the seed a process caches for itself; that is counted."""
    tables = Tables(cache_dir, source)
    (cache_dir / "v1" / "records").rmdir()
    (cache_dir / "v1" / "records").touch()
    assert tables.lookup(1) == tables.lookup(1) == [10]
    assert source.loaded() == [1]
    assert list((cache_dir / "v1" / "snapshots").iterdir()) == []
    assert tables.metrics.snapshot()["cacheFailureCount"] > 0


def test_a_cache_of_ones_own(cache_dir: Path, source: Source) -> None:
    """A cache of which only its class knows the bounds is not shared, and serves one version at a time; a default one shares."""
    own = Plain()
    tables = Tables(cache_dir, source, own)
    assert tables.lookup(1, 2) == tables.lookup(1, 2) == [10, 20, 21]
    assert source.loaded() == [1, 2]
    assert (own.opened, own.closed, own.size()) == (1, 0, 3)
    source.versions = {"v1": source.versions["v1"], "v2": {1: [5]}}
    assert tables.lookup(1, 2, version="v2") == [5]
    assert source.loaded() == [1, 2]
    assert (own.opened, own.closed) == (2, 1)
    assert list((cache_dir / "v1" / "snapshots").iterdir()) == []
    default = DefaultLookupCache(max_rows=100)
    assert Tables(cache_dir, source, default).lookup(1) == [10]
    assert default.size() == 1
    assert Tables(cache_dir, source, DefaultLookupCache(max_rows=5)).lookup(1) == [10]
    assert source.loaded() == [1]


def test_without_a_directory(source: Source) -> None:
    """There is a cache in the process all the same."""
    tables = Tables(None, source)
    assert tables.lookup(1, 2) == tables.lookup(1, 2) == [10, 20, 21]
    assert source.loaded() == [1, 2]
    assert tables.metrics.snapshot()["cacheFailureCount"] == 0


# --- tables of files -----------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A sorted table of a hundred files in version 1."""
    for number in range(100):
        publish(tmp_path / "dim", number, 1, rows=20)
    return tmp_path / "dim"


FIRSTS = [number * EACH for number in range(100)]


def test_a_commit_to_one_end_leaves_the_rest_warm(directory: Path, cache_dir: Path) -> None:
    """When the last of a hundred files is replaced, its keys are loaded anew by one data request; the others are carried over."""
    dim = Dim(directory, cache_dir)
    assert [row["version"] for row in dim.check({"id": FIRSTS})] == [1] * 100
    assert dim.metric("loadCount") == 100
    other = Dim(directory, cache_dir, clock=dim.host.clock)
    assert other.grown(lambda: other.get(*FIRSTS), *COUNTERS) == (100, 0, 0, 0)
    publish(directory, 99, 2, rows=20)
    for table in (dim, other):
        table.fetched()
        calls = table.calls(lambda table=table: table.get(*FIRSTS))  # type: ignore[misc]
        assert table.fetched() == ({"99.parquet"} if table is dim else set())
        assert calls.count("get") == (1 if table is dim else 0)
        assert [row["version"] for row in table.check({"id": FIRSTS})] == [1] * 99 + [2]
    # The other one takes over what the first one loaded, and what neither of the versions can differ in.
    assert (dim.metric("sharedCarriedOverCount"), other.metric("sharedCarriedOverCount")) == (99, 99)
    assert (dim.metric("loadCount"), other.metric("loadCount")) == (101, 0)
    publish(directory, 100, 3, rows=20)
    keys = [*FIRSTS, 100 * EACH]
    assert dim.grown(lambda: dim.check({"id": keys}), "hitCount", "missCount") == (100, 1)
    (directory / "100.parquet").unlink()
    assert dim.grown(lambda: dim.check({"id": keys}), "hitCount", "missCount") == (100, 1)


def test_keys_without_rows_are_carried_over_with_care(directory: Path, cache_dir: Path) -> None:
    """That a key has no rows holds for a new version only if no new file can have it."""
    dim = Dim(directory, cache_dir)
    keys = {"id": [EACH + 30, 100 * EACH + 3]}
    assert dim.check(keys) == []
    publish(directory, 100, 2, rows=20)
    assert dim.grown(lambda: dim.check(keys), *COUNTERS) == (1, 1, 1, 1)
    assert [row["id"] for row in dim.rows(keys)] == [100 * EACH + 3]


def test_many_commits(directory: Path, cache_dir: Path) -> None:
    """Commit after commit, merged in between: answers are those of the files, and only what changed is loaded."""
    rng = random.Random(5)
    dim, other = Dim(directory, cache_dir), Dim(directory, cache_dir)
    dim.get(*FIRSTS[::5])
    for version in range(2, 16):
        changed = rng.randrange(100)
        publish(directory, changed, version, rows=20)
        dim.host.clock.tick(0.1)
        other.host.clock.tick(0.1)
        for table in (dim, other):
            before = table.metric("loadCount")
            assert {row["version"] for row in table.check({"id": [FIRSTS[changed]]})} == {version}
            table.check({"id": FIRSTS[::5]})
            assert table.metric("loadCount") - before <= 1
            for _, run in table.later.waiting:
                run()
            table.later.waiting.clear()
    assert dim.metric("sharedMergeCount") + other.metric("sharedMergeCount") > 0


def test_the_latest_partition(tmp_path: Path, cache_dir: Path) -> None:
    """With max_pt() rows come from the latest partition, whatever was cached of the one before."""
    path = tmp_path / "dim"
    put_file(path / "dt=1" / "a.parquet", id=[1, 2, 3], v=[11, 12, 13])
    dim = Dim(path, cache_dir, {"lookup.partition": "max_pt()"})
    keys = {"id": [1, 2, 3, 9]}
    assert [(row["v"], row["dt"]) for row in dim.check(keys)] == [(11, 1), (12, 1), (13, 1)]
    put_file(path / "dt=2" / "a.parquet", id=[2, 3, 4], v=[22, 23, 24])
    assert [(row["v"], row["dt"]) for row in dim.check(keys)] == [(22, 2), (23, 2)]
    put_file(path / "dt=1" / "b.parquet", id=[2, 9], v=[0, 0])  # of no matter
    assert dim.grown(lambda: dim.check(keys), *COUNTERS) == (4, 0, 0, 0)
    shutil.rmtree(path / "dt=2")
    assert [row["v"] for row in dim.check(keys)] == [11, 12, 0, 13, 0]


def test_files_that_are_too_new_are_not_cached(directory: Path, cache_dir: Path) -> None:
    """While the state of a file may still be another's, keys are answered from the files each time, and counted so."""
    clock = FakeClock(wall_s=(directory / "7.parquet").stat().st_ctime)
    dim = Dim(directory, cache_dir, clock=clock)
    for count in (1, 2):
        assert [row["version"] for row in dim.check({"id": [0, 500, 7]})] == [1, 1, 1]
        assert (dim.metric("missCount"), dim.metric("hitCount"), dim.metric("loadCount")) == (3 * count, 0, 3 * count)
    assert list((cache_dir / "v1" / "snapshots").iterdir()) == []
    clock.tick(10)
    for _ in range(2):
        dim.check({"id": [0, 500, 7]})
    assert (dim.metric("missCount"), dim.metric("hitCount"), dim.metric("loadCount")) == (9, 3, 9)


@pytest.mark.parametrize("is_first", [True, False], ids=["one file", "all files"])
def test_a_key_column_that_becomes_wider(tmp_path: Path, cache_dir: Path, is_first: bool) -> None:
    """When whole numbers become longer ones, all keys are right, the old ones and those that only the new type has."""
    path = tmp_path / "dim"
    for name in ("a", "b"):
        put_file(path / f"{name}.parquet", id=pa.array([1, 2], pa.int32()), v=[f"{name}1", f"{name}2"])
    dim = Dim(path, cache_dir)
    dim.check({"id": [1, 2, 3]})
    for name in ("b",) if is_first else ("a", "b"):
        put_file(path / f"{name}.parquet", id=pa.array([2, 3, 2**40], pa.int64()), v=[f"{name}2", f"{name}3", "far"])
    keys = {"id": [1, 2, 3, 2**40]}
    for _ in range(2):
        dim.host.clock.tick(2)
        assert "far" in [row["v"] for row in dim.check(keys)]
    for name in ("a", "b"):
        put_file(path / f"{name}.parquet", id=pa.array([1, 2], pa.int32()), v=[f"{name}1", f"{name}2"])
    for _ in range(2):
        dim.host.clock.tick(2)
        dim.check({"id": [1, 2, 3]})


def test_a_key_column_that_becomes_text(tmp_path: Path, cache_dir: Path) -> None:
    """When a table is written anew with text for its numbers, lookups go on, seconds later as well."""
    put_file(tmp_path / "dim" / "a.parquet", id=[1, 2], v=[1, 2])
    dim = Dim(tmp_path / "dim", cache_dir)
    dim.check({"id": [1]})
    put_file(tmp_path / "dim" / "a.parquet", id=["a", "b"], v=[1, 2])
    for _ in range(2):
        assert [row["v"] for row in dim.check({"id": ["b"]})] == [2]
        dim.host.clock.tick(2)


def test_a_key_column_that_becomes_a_number(tmp_path: Path, cache_dir: Path) -> None:
    """When text keys become numbers, what the host shares is still merged."""
    put_file(tmp_path / "dim" / "a.parquet", id=["a", "b"], v=[1, 2])
    dim = Dim(tmp_path / "dim", cache_dir)
    dim.check({"id": ["a"]})
    put_file(tmp_path / "dim" / "a.parquet", id=range(20), v=range(20))
    for number in range(10):
        dim.check({"id": [number]})
    for _, run in dim.later.waiting:
        run()
    assert dim.metric("sharedMergeCount") == 1


def test_a_column_that_only_another_partition_has(tmp_path: Path, cache_dir: Path) -> None:
    """A column that the latest partition lacks is null there, as without a cache."""
    put_file(tmp_path / "dim" / "dt=1" / "a.parquet", id=[1, 2], v=[1, 2], more=[5, 6])
    put_file(tmp_path / "dim" / "dt=2" / "a.parquet", id=[1, 2], v=[3, 4])
    dim = Dim(tmp_path / "dim", cache_dir, {"lookup.partition": "max_pt()"})
    assert dim.check({"id": [2]}) == [{"id": 2, "v": 4, "more": None, "dt": 2, "key_index": 0}]


def test_a_column_that_comes_with_another_partition(tmp_path: Path, cache_dir: Path) -> None:
    """When a file of an older partition brings a column, rows that are cached of the latest one get it, too."""
    put_file(tmp_path / "dim" / "dt=2" / "a.parquet", id=[1, 2], v=[3, 4])
    dim = Dim(tmp_path / "dim", cache_dir, {"lookup.partition": "max_pt()"})
    assert len(dim.check({"id": [2]})) == 1
    put_file(tmp_path / "dim" / "dt=1" / "a.parquet", id=[1, 2], v=[1, 2], more=[5, 6])
    assert dim.check({"id": [2]}) == [{"id": 2, "v": 4, "more": None, "dt": 2, "key_index": 0}]


def test_a_key_that_gets_another_scale_with_another_partition(tmp_path: Path, cache_dir: Path) -> None:
    """When a file of an older partition gives the key a finer scale, 0.100 does not find the rows of 1.00."""
    number = decimal.Decimal
    put_file(tmp_path / "dim" / "dt=2" / "a.parquet", id=pa.array([number("1.00")], pa.decimal128(5, 2)), v=[1])
    dim = Dim(tmp_path / "dim", cache_dir, {"lookup.partition": "max_pt()"})
    assert len(dim.check({"id": pa.array([number("1.00")], pa.decimal128(5, 2))})) == 1
    put_file(tmp_path / "dim" / "dt=1" / "a.parquet", id=pa.array([number("5.000")], pa.decimal128(7, 3)), v=[5])
    keys = {"id": pa.array([number("1.00"), number("0.100")], pa.decimal128(7, 3))}
    assert [row["v"] for row in dim.check(keys)] == [1]


def test_scans_leave_the_cache_as_it_is(directory: Path, cache_dir: Path) -> None:
    """A scan that does not say which keys it wants neither asks the cache nor fills it; one that does, does."""
    dim = Dim(directory, cache_dir)
    dim.get(0, 500)
    before = sorted(path.name for path in (cache_dir / "v1" / "snapshots").glob("*/*"))

    def scan(**more: str) -> int:
        options = dim.options.overridden(more)
        found = planner.find(dim.host.reader, options, dim.table)
        plan = planner.plan_read(found, options, planner.table_columns(found, options), dim.host.clock.host())
        return sum(batch.num_rows for batch in read_rows(dim.host.reader, plan, ReadTask(0, 1), None))

    assert dim.grown(scan, "hitCount", "missCount", "loadCount") == (0, 0, 0)
    assert scan() == 2000
    assert scan(**{"lookup.where": "id > 10 AND id < 15"}) == 4
    assert (dim.metric("hitCount"), dim.metric("missCount")) == (0, 2)
    assert sorted(path.name for path in (cache_dir / "v1" / "snapshots").glob("*/*")) == before
    assert dim.grown(lambda: dim.get(0, 500), "hitCount", "missCount", "loadCount") == (2, 0, 0)
    where = {"lookup.where": "id IN (0, 500, 1000)"}
    assert dim.grown(lambda: scan(**where), "hitCount", "missCount", "loadCount") == (2, 1, 1)
    assert dim.grown(lambda: scan(**where), "hitCount", "missCount", "loadCount") == (3, 0, 0)
    assert scan(**where) == 3


def test_one_cache_for_all_predicates(directory: Path, cache_dir: Path) -> None:
    """Rows are kept whatever lookup.where says, so they answer under another predicate as well."""
    plain, some = Dim(directory, cache_dir), Dim(directory, cache_dir, {"lookup.where": "text LIKE '1-xx%'"})
    assert [(row["id"], row["text"]) for row in some.get(0, 2, 503)] == [(2, "1-xx"), (503, "1-xxx")]
    assert plain.grown(lambda: plain.check({"id": [0, 2, 503]}), *COUNTERS[:3]) == (3, 0, 0)


def test_a_store_that_fails(directory: Path, cache_dir: Path) -> None:
    """What cannot be read is told to the caller, counted, and read the next time; what is warm is not read."""
    dim = Dim(directory, cache_dir)
    dim.get(0)
    shutil.rmtree(cache_dir / "v1" / "blocks")
    (cache_dir / "v1" / "blocks").mkdir()

    def fail(kind: str, subject: object) -> None:
        if kind == "get":
            raise UfsUnavailableError("injected")

    dim.host.store.before = fail
    assert [row["version"] for row in dim.get(0)] == [1]
    with pytest.raises(UfsUnavailableError):
        dim.get(0, 500, 1000)
    assert (dim.metric("hitCount"), dim.metric("missCount"), dim.metric("loadCount")) == (2, 3, 1)
    assert dim.metric("numLoadFailures") == 2
    dim.host.store.before = lambda kind, subject: None
    assert len(dim.check({"id": [0, 500, 1000]})) == 3


def test_a_file_that_is_replaced_during_a_load(directory: Path, cache_dir: Path) -> None:
    """A load that finds its file replaced is done again from the new version; nothing of the old one is kept under it."""
    dim = Dim(directory, cache_dir, {"lookup.on-version-gone": "NEWER"})
    dim.get(0)
    shutil.rmtree(cache_dir / "v1" / "blocks")
    (cache_dir / "v1" / "blocks").mkdir()

    def replace(kind: str, subject: Any) -> None:
        if kind == "get" and subject[0].endswith("/1.parquet"):
            dim.host.store.before = lambda kind, subject: None
            publish(directory, 1, 2, rows=20)

    dim.host.store.before = replace
    assert [row["version"] for row in dim.get(0, 500)] == [1, 2]
    assert dim.metric("versionGoneCount") == 1
    assert dim.metric("loadCount") + dim.metric("numLoadFailures") == dim.metric("missCount")
    for _ in range(2):
        assert [row["version"] for row in dim.check({"id": [0, 500]})] == [1, 2]


def test_real_threads_and_merges(directory: Path, cache_dir: Path) -> None:
    """With merges in threads of their own, many small loads are answered rightly and become few files."""
    host: Host = make_host(str(directory), cache_dir, FakeClock(), start=in_thread)
    dim = Dim(directory, cache_dir, {"lookup.partial-cache.max-rows": "50"})
    dim.host = host

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(25):
            ids = [rng.choice(FIRSTS) + rng.randrange(30) for _ in range(3)]
            assert [row["id"] for row in dim.get(*ids)] == [i for i in ids if i % EACH < 20]

    run_all(*(lambda seed=seed: work(seed) for seed in range(3)))  # type: ignore[misc]
    for thread in threading.enumerate():
        if "-merge-" in thread.name:
            thread.join(BOUND_S)
    assert host.metrics.snapshot()["sharedEvictedCount"] > 0
    assert host.metrics.snapshot()["cacheFailureCount"] == host.metrics.snapshot()["snapshotDamagedCount"] == 0
    assert Counter(path.suffix for path in (cache_dir / "v1" / "snapshots").glob("*/*"))[".used"] <= 10
