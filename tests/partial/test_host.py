"""The partial cache: rows by key, for all processes of a host."""

from __future__ import annotations

import dataclasses
import decimal
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup.cache.memory import KEY_INDEX
from pyspark_lookup.cache.partial import host_cache
from tests.fakes import FakeClock
from tests.partial.common import NONE, ROWS, Process, loads, new_directory, rows_of
from tests.processes.test_fill import in_fresh_process
from tests.test_columns import kinds
from tests.test_keys import KINDS, QUIET, SIGNALLING, bits, each_kind, examples


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
                patch.setattr(host_cache, "_SEGMENTS_AT_MOST", 2)
                while not reader.later.waiting:
                    reader.put_rows(keys, rows)
                assert reader.merge() == 1
                assert len(reader.names()) == 1
        assert process.count("cacheFailureCount") == process.count("snapshotDamagedCount") == 0


@examples(24)
@given(load=loads(st.just([pa.int64()]), kinds(2)), data=st.data())
def test_columns_of_all_types(load: Any, data: st.DataObject) -> None:
    """Columns of every type, nested ones too, come back with their nulls."""
    check_load(*load, data)


@examples(48)
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
