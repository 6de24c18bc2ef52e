"""The cache in memory answers as an ordered dictionary would that knows the same bounds, and as FLIP-221 says: what once was wrong."""

from __future__ import annotations

import contextlib
import threading
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from pyspark_lookup.base.errors import SchemaError
from pyspark_lookup.cache.memory import KEY_INDEX, default_cache, growing
from pyspark_lookup.columnar.keys import Numbers
from tests.caching.common import cache_of, found_in, held, keys_of, opened, rows_of, small
from tests.fakes import FakeClock


@pytest.mark.parametrize(
    ("keys", "rows"),
    [
        (pa.table({"k": [None]}), rows_of(1)),
        (keys_of(1), pa.table({"v": ["text"], KEY_INDEX: [7]})),
        (pa.table({"k": pa.array([None, "a"])}), pa.table({"v": ["text"], KEY_INDEX: [0]})),
    ],
    ids=["a key of nulls", "rows without a key", "a null among keys"],
)
def test_a_refused_put_leaves_no_trace(keys: pa.Table, rows: pa.Table) -> None:
    """After a put that was refused, the columns of the next one decide."""
    cache = cache_of()
    with pytest.raises(ValueError, match="key"):
        cache.put_many(keys, rows)
    cache.put_many(keys_of(1), rows_of(1))
    assert found_in(cache.get_many(keys_of(1))) == [[1]]


def test_a_null_does_not_decide_the_type() -> None:
    """A value comes back as it was put, also where the first row of its column had none."""
    cache = cache_of()
    cache.put({"k": 1}, [{"v": None}])
    with contextlib.suppress(SchemaError):  # an error would do: rows are as they were put, or not at all
        cache.put({"k": 2}, [{"v": 5}])
        assert cache.get_if_present({"k": 2}) == [{"v": 5}]


def test_rows_without_columns_are_rows() -> None:
    """Where rows without any column are held, rows with one are refused."""
    cache = cache_of()
    cache.put_many(keys_of(1), pa.table({KEY_INDEX: [0]}))
    with pytest.raises(SchemaError):
        cache.put_many(keys_of(2), rows_of(2))


def test_the_first_row_may_come_while_a_key_without_rows_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A get that runs while the cache learns the columns of its rows is answered."""
    cache = cache_of()
    cache.put({"k": 1}, [])
    take = default_cache.as_indices

    def taken(rows: Numbers) -> pa.Array:
        monkeypatch.setattr(default_cache, "as_indices", take)
        other = threading.Thread(target=cache.put, args=({"k": 2}, [{"v": 2}]))
        other.start()
        other.join(5)
        return take(rows)

    monkeypatch.setattr(default_cache, "as_indices", taken)
    assert cache.get_many(keys_of(1, 3)).present.tolist() == [True, False]


def test_reading_takes_no_memory_for_ever() -> None:
    """However often a cache is read, the moments of it are not kept where nothing expires by them."""
    clock = FakeClock()
    with small():
        cache = cache_of(clock, max_rows=10)
        cache.put({"k": 1}, [{"v": 1}])
        asked = keys_of(1)
        tracemalloc.start()
        try:
            for _ in range(8_000):
                clock.tick(1)
                cache.get_many(asked)
            # A number for each time would be more; other threads of the process may have something, too.
            assert tracemalloc.get_traced_memory()[0] < 240_000
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("bounds", [{"max_bytes": 2**20}, {"max_rows": 10}])
def test_the_dead_take_little_more_than_the_living(bounds: dict[str, int]) -> None:
    """Memory in use is a small multiple of what is held, also where entries are few and large."""
    cache = cache_of(**bounds)
    text = "x" * 100_000
    tracemalloc.start()
    try:
        for number in range(200):
            cache.put_many(keys_of(number), pa.table({"t": [text], KEY_INDEX: [0]}))
        assert cache.bytes() <= 11 * 100_000
        assert tracemalloc.get_traced_memory()[0] < 8 * 2**20
    finally:
        tracemalloc.stop()


def test_a_column_that_is_full_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a put that did not fit, what is held is as before, and less can still be put."""
    monkeypatch.setattr(growing, "_INT32_AT_MOST", 10)
    cache = cache_of()

    def put(key: int, elements: int) -> None:
        cache.put_many(keys_of(key), pa.table({"v": pa.array([[key] * elements]), KEY_INDEX: [0]}))

    put(1, 4)
    with pytest.raises(OverflowError):
        put(2, 8)
    put(3, 1)
    assert found_in(cache.get_many(keys_of(1, 2, 3))) == [[[1] * 4], None, [[3]]]


def test_a_closed_cache_shows_no_rows() -> None:
    """Once a cache is closed its gauges say that it holds nothing."""
    cache, metrics = opened(cache_of())
    cache.put({"k": 1}, [{"v": 1}])
    cache.close()
    assert (metrics.snapshot()["numCachedRecords"], metrics.snapshot()["numCachedBytes"]) == (0, 0)


def test_what_has_expired_takes_no_room() -> None:
    """No entry has to go for others that have expired."""
    clock = FakeClock()
    cache = cache_of(clock, max_rows=3, expire_after_write_s=80)
    cache.put_many(keys_of(1, 2), rows_of(1, 2), np.array([0.0, 79.0]))
    clock.tick(1)
    cache.put_many(keys_of(3, 4), rows_of(3, 4))
    assert held(cache, [1, 2, 3, 4]) == [1, 3, 4]


def test_columns_that_nobody_gave_are_not_known() -> None:
    """Until a row was given, or a table with its columns, there are no rows to answer with."""
    cache = cache_of()
    cache.put({"k": 1}, [])
    found = cache.get_many(keys_of(1, 2))
    assert found.present.tolist() == [True, False]
    assert found.rows is None
