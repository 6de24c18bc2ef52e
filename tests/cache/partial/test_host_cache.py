"""The partial cache: rows by key, for all processes of a host."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup.cache.memory import KEY_INDEX
from pyspark_lookup.cache.partial import host_cache
from tests.support.column_values import kinds
from tests.support.fakes import FakeClock
from tests.support.fuzzing import fuzzed
from tests.support.key_values import KINDS, plain, values_of
from tests.support.partial_cache import NONE, ROWS, Process, differing, loads, new_directory


def test_how_long_ago_rows_were_loaded(cache_dir: Path, clock: FakeClock) -> None:
    """Rows come back in their order, to another process at its next get, with their ages; absences take no room if nobody keeps them."""
    one, other = (Process(cache_dir, clock, dataclasses.replace(NONE, missing_keys=False)) for _ in range(2))
    assert other.get(1) == {1: None}
    one.put({3: [30], 2: [], 1: [12, 10, 11]})
    assert other.get(1, 2, 3) == {1: [12, 10, 11], 2: None, 3: [30]}
    one.put({7: [], 8: []})
    assert (len(one.names()), one.shared.sizes()[0], other.shared.sizes()) == (1, 4, one.shared.sizes())
    clock.tick(3)
    one.put({4: [4]})
    clock.tick(4)
    found = other.get_rows([pa.array([4, 1, 3], pa.int64())], ROWS)
    assert found is not None
    assert found.ages_s.tolist() == [4, 7, 7]


def same(one: pa.Array, other: pa.Array) -> bool:
    """Whether two arrays are alike to the bit: a NaN is not equal to itself."""
    if pa.types.is_floating(one.type):
        whole = pa.int32() if one.type == pa.float32() else pa.int64()
        return bool(one.view(whole).equals(other.view(whole)))
    return bool(one.equals(other))


@fuzzed(60)
@given(load=loads(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3), kinds(2)), data=st.data())
def test_keys_and_columns_of_all_types(load: Any, data: st.DataObject) -> None:
    """Any keys of a load have its rows, of every type, and no others are there, here and in another process, merged or not."""
    keys, rows = load
    fields = pa.schema([(f"k{number}", array.type) for number, array in enumerate(keys)])
    schema = pa.schema([field for field in rows.schema if field.name != KEY_INDEX])
    with new_directory() as root:
        process = Process(root / "cache", keys=fields)
        process.put_rows(keys, rows)
        asked = data.draw(st.permutations(range(len(keys[0])))) if len(keys[0]) > 1 else [0]
        asked = asked[: data.draw(st.integers(1, len(asked)))]
        some = [array.take(pa.array(asked, pa.int64())) for array in keys]
        if data.draw(st.booleans()):  # floating-point numbers in the plainest of their forms
            some = [
                pa.array(array.to_numpy() + 0, array.type) if pa.types.is_floating(array.type) else array
                for array in some
            ]
        held = {*zip(*map(plain, keys), strict=True)}
        near = data.draw(st.lists(st.tuples(*(values_of(array.type) for array in keys)), max_size=5))
        absent = [pa.array([key[n] for key in near], array.type) for n, array in enumerate(keys)]
        is_there = [key in held for key in zip(*map(plain, absent), strict=True)]
        places = rows.column(KEY_INDEX).to_pylist()
        wanted = [n for key in asked for n, place in enumerate(places) if place == key]
        numbers = [n for n, key in enumerate(asked) for place in places if place == key]
        expected = rows.select(schema.names).take(pa.array(wanted, pa.int64()))
        for reader in (process, Process(root / "cache", process.clock, keys=fields)):
            others = reader.get_rows(absent, schema)
            assert (others.present.tolist() if others is not None else [False] * len(near)) == is_there
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


def test_the_wall_clock_is_set_back(cache_dir: Path, clock: FakeClock) -> None:
    """What was loaded last is the latest all the same, also once it is merged."""
    process = Process(cache_dir, clock)
    process.put({1: [15], 2: [25]})
    clock.wall_s -= 3600
    process.put({1: [16]})
    assert Process(cache_dir, clock).get(1, 2) == {1: [16], 2: [25]}
    clock.wall_s -= 3600
    for number in range(3, 12):
        process.put({number: [number], 1: [number]})
    assert process.merge() == 1
    assert Process(cache_dir, clock).get(1, 2, 11) == {1: [11], 2: [25], 11: [11]}
