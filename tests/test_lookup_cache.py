"""The cache in memory answers as an ordered dictionary would that knows the same bounds, and as FLIP-221 says."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import math
import pickle
import random
import sys
import threading
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup.cache import (
    KEY_INDEX,
    CachedRows,
    DefaultLookupCache,
    DefaultLookupCacheBuilder,
    growing,
    lru,
    memory,
)
from pyspark_lookup.errors import OptionError, SchemaError
from pyspark_lookup.keys import Keys, Numbers, Seed
from pyspark_lookup.metrics import UNSET, CacheMetricGroup
from pyspark_lookup.options import LookupOptions
from tests.fakes import FakeClock
from tests.test_columns import kinds, pieces_of
from tests.test_keys import KINDS, US, examples, plain, values_of

UNBOUNDED = 2**63 - 1
WEAK = Seed(1, 1)  # leaves small numbers where they are: all at the first slot
BOUNDS = [
    "lookup.partial-cache.expire-after-access",
    "lookup.partial-cache.expire-after-write",
    "lookup.partial-cache.max-rows",
    "lookup.partial-cache.max-bytes",
]
ROWS = pa.schema([("v", pa.int64()), ("t", pa.string()), ("b", pa.bool_()), (KEY_INDEX, pa.int64())])

Row = dict[str, Any]


@contextlib.contextmanager
def small() -> Iterator[None]:
    """Columns grow, the log is trimmed and entries are moved together after a handful of them, not after thousands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growing, "_SMALLEST", 1)
        patch.setattr(lru, "_SLACK", 2)
        patch.setattr(memory, "_GARBAGE_ROWS", 4)
        yield


def cache_of(clock: FakeClock | None = None, **bounds: Any) -> DefaultLookupCache:
    """A cache with these bounds (none: as good as unbounded) whose hashes are the same in each run."""
    clock = clock or FakeClock()
    return DefaultLookupCache(**(bounds or {"max_rows": UNBOUNDED}), clock=lambda: clock.steady_s, rng=random.Random(7))


def opened(cache: DefaultLookupCache) -> tuple[DefaultLookupCache, CacheMetricGroup]:
    metrics = CacheMetricGroup()
    cache.open(metrics)
    return cache, metrics


def counts(metrics: CacheMetricGroup) -> tuple[int, int]:
    """(hits, misses) so far."""
    seen = metrics.snapshot()
    return seen["hitCount"], seen["missCount"]


def keys_of(*numbers: int) -> pa.Table:
    return pa.table({"k": pa.array(numbers, pa.int64())})


def rows_of(*values: int | list[int]) -> pa.Table:
    """Rows for as many keys: each has the one row, or those of a list."""
    lists = [value if isinstance(value, list) else [value] for value in values]
    places = [place for place, rows in enumerate(lists) for _ in rows]
    return pa.table({
        "v": pa.array([value for rows in lists for value in rows], pa.int64()),
        KEY_INDEX: pa.array(places, pa.int64()),
    })  # fmt: skip


def found_in(found: CachedRows) -> list[list[Any] | None]:
    """Of each key the column v of its rows, None where the key is absent."""
    lists: list[list[Any] | None] = [[] if present else None for present in found.present.tolist()]
    if found.rows is not None:
        for value, place in zip(found.rows["v"].to_pylist(), found.rows[KEY_INDEX].to_pylist(), strict=True):
            rows = lists[place]
            assert rows is not None
            rows.append(value)
    return lists


def held(cache: DefaultLookupCache, numbers: Sequence[int]) -> list[int]:
    """Those of the keys that are there; no access."""
    return [n for n, there in zip(numbers, cache.peek_many(keys_of(*numbers)).present.tolist(), strict=True) if there]


# --- what Flink's own tests say (FLIP-221) -----------------------------------------------------------


def named(*parts: Any) -> Row:
    """A key or a row of texts, by column."""
    return {f"f{number}": str(part) for number, part in enumerate(parts)}


KEY = named("foo", "lookup", "key")
FOUR = [named("bar", "lookup", "value", number) for number in range(4)]


def test_rows_are_read_as_they_were_put() -> None:
    """A key that was put has its rows in their order, one that was not is unknown."""
    cache, _ = opened(pickle.loads(pickle.dumps(cache_of())))
    cache.put(KEY, FOUR)
    assert cache.get_if_present(named("non", "exist", "key")) is None
    assert cache.get_if_present(KEY) == FOUR


def test_expire_after_access() -> None:
    """A read renews an entry; without one for longer than its time to live it is gone."""
    clock = FakeClock()
    cache, _ = opened(cache_of(clock, expire_after_access_s=15.213))
    cache.put(KEY, FOUR)
    for wait_s, expected in ((15.203, FOUR), (15.203, FOUR), (15.223, None)):
        clock.tick(wait_s)
        assert cache.get_if_present(KEY) == expected


def test_expire_after_write() -> None:
    """An entry is there at once and gone once its time to live is over."""
    clock = FakeClock()
    cache, _ = opened(cache_of(clock, expire_after_write_s=15.213))
    cache.put(KEY, FOUR)
    assert cache.get_if_present(KEY) == FOUR
    clock.tick(15.223)
    assert cache.get_if_present(KEY) is None


def test_the_eleventh_of_ten_rows_takes_the_place_of_the_first() -> None:
    """Where ten rows fit, the eleventh key makes the first one go and no other."""
    cache, _ = opened(cache_of(max_rows=10))
    for number in range(11):
        cache.put(named("lookup", "key", number), [named("lookup", "value", number)])
    assert cache.get_if_present(named("lookup", "key", 0)) is None
    for number in range(1, 11):
        assert cache.get_if_present(named("lookup", "key", number)) == [named("lookup", "value", number)]


def test_a_null_key_is_refused() -> None:
    """Rows without a key have no place."""
    cache, _ = opened(cache_of())
    cache.put(KEY, FOUR)
    with pytest.raises(ValueError, match="null key"):
        cache.put({**KEY, "f1": None}, FOUR)
    with pytest.raises(ValueError, match="null key"):
        cache.put_many(pa.table({"f0": ["a", None], "f1": ["b"] * 2, "f2": ["c"] * 2}), pa.table({KEY_INDEX: [0, 1]}))
    assert cache.get_if_present(KEY) == FOUR
    assert cache.size() == 4


def test_null_rows_are_refused() -> None:
    """A key without rows has an empty list of them, not none at all."""
    cache, _ = opened(cache_of())
    with pytest.raises(ValueError, match="null value"):
        cache.put(KEY, None)  # type: ignore[arg-type]
    assert cache.get_if_present(KEY) is None


def test_a_key_without_rows_is_remembered() -> None:
    """A key that was put without rows is known to have none, which is a hit."""
    cache, metrics = opened(cache_of())
    cache.put(KEY, [])
    assert cache.get_if_present(KEY) == []
    assert counts(metrics) == (1, 0)
    assert cache.size() == 1


def test_a_key_without_rows_is_not_remembered_on_request() -> None:
    """With cache_missing_key=False a key without rows stays unknown."""
    cache, metrics = opened(cache_of(max_rows=UNBOUNDED, cache_missing_key=False))
    assert cache.put(KEY, []) is None
    assert cache.get_if_present(KEY) is None
    assert counts(metrics) == (0, 1)
    assert cache.size() == 0


def test_metrics() -> None:
    """Rows and bytes are gauges from the start, hits and misses count keys; what only a load knows is not set."""
    cache, metrics = opened(cache_of())
    start = metrics.snapshot()
    assert [start[name] for name in ("hitCount", "missCount", "numCachedRecords", "numCachedBytes")] == [0] * 4
    assert [start[name] for name in ("loadCount", "numLoadFailures", "latestLoadTime")] == [0, 0, UNSET]
    cache.put(KEY, FOUR)
    assert metrics.snapshot()["numCachedRecords"] == 4
    assert metrics.snapshot()["numCachedBytes"] == cache.bytes() > 0
    assert counts(metrics) == (0, 0)
    cache.get_if_present(KEY)
    assert counts(metrics) == (1, 0)
    cache.get_if_present(named("non", "exist", "key"))
    assert counts(metrics) == (1, 1)
    assert metrics.snapshot()["loadCount"] == 0


GIVEN = {
    "expire_after_access_s": 15.513,
    "expire_after_write_s": 18.213,
    "max_rows": 15213,
    "max_bytes": 2**20,
    "cache_missing_key": False,
}


def test_a_copy_has_the_same_bounds() -> None:
    """Pickling keeps the configuration, drops what is held, and caches are equal by their configuration."""
    cache, _ = opened(DefaultLookupCache(**GIVEN))
    cache.put(KEY, FOUR)
    for copied in (pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)):
        assert copied == cache
        assert hash(copied) == hash(cache)
        assert repr(copied) == repr(cache)
        assert all(f"{name}={value!r}" in repr(copied) for name, value in GIVEN.items())
        assert copied.size() == copied.bytes() == 0
        assert copied.get_if_present(KEY) is None
        copied.put(named("a"), [named("b")])  # may have other columns: nothing is left of the old ones
        assert cache.size() == 4
    for name, value in GIVEN.items():
        other = not value if isinstance(value, bool) else value + 1
        assert DefaultLookupCache(**{**GIVEN, name: other}) != cache
    assert cache != GIVEN


def test_many_threads_open_one_cache_with_one_group() -> None:
    """However many users open a cache with one group of metrics, each get counts once."""
    cache, metrics = cache_of(), CacheMetricGroup()

    def put(number: int) -> None:
        cache.open(metrics)
        cache.put(named(f"key-{number}"), [named(f"value-{number}")])

    def get(number: int) -> list[Row] | None:
        cache.open(metrics)
        return cache.get_if_present(named(f"key-{number}" if number >= 0 else "missing"))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(put, range(4)))
        good, missing = list(pool.map(get, range(4))), list(pool.map(get, [-1] * 4))
    assert good == [[named(f"value-{number}")] for number in range(4)]
    assert missing == [None] * 4
    assert counts(metrics) == (4, 4)
    assert metrics.snapshot()["numCachedRecords"] == 4


def options(**more: str) -> LookupOptions:
    given = {"path": "/t", "lookup.keys": "k", "lookup.cache": "PARTIAL"}
    return LookupOptions.parse({**given, **{f"lookup.partial-cache.{name}": text for name, text in more.items()}})


def test_options_are_honoured() -> None:
    """`lookup.partial-cache.*` say what the builder says, and a cache of them is on the clock that it is given."""
    found = DefaultLookupCache.from_options(
        options(**{
            "expire-after-access": "15513 ms", "expire-after-write": "18213 ms", "max-rows": "15213",
            "max-bytes": "1 MiB", "cache-missing-key": "false",
        })
    )  # fmt: skip
    builder = DefaultLookupCache.new_builder().expire_after_access(15.513).expire_after_write(18.213)
    assert (
        found
        == DefaultLookupCache(**GIVEN)
        == builder.max_rows(15213).max_bytes(2**20).cache_missing_key(False).build()
    )
    clock = FakeClock()
    timed = DefaultLookupCache.from_options(options(**{"expire-after-write": "5 s"}), lambda: clock.steady_s)
    assert timed == DefaultLookupCacheBuilder().expire_after_write(5).build()
    timed.put(KEY, FOUR)
    clock.tick(5)
    assert timed.get_if_present(KEY) is None


@pytest.mark.parametrize("mode", ["NONE", "FULL"])
def test_options_of_another_cache_are_refused(mode: str) -> None:
    """Only lookup.cache=PARTIAL describes this cache."""
    given = {"path": "/t", "lookup.keys": "k", "lookup.cache": mode}
    with pytest.raises(OptionError, match=r"lookup\.cache .*should be 'PARTIAL'"):
        DefaultLookupCache.from_options(LookupOptions.parse(given))


@pytest.mark.parametrize(
    "make",
    [
        options,
        lambda: DefaultLookupCache.from_options(
            dataclasses.replace(options(**{"max-rows": "1"}), partial_max_rows=None)
        ),
        DefaultLookupCache,
        DefaultLookupCacheBuilder().build,
        DefaultLookupCacheBuilder().cache_missing_key(True).build,
    ],
    ids=["options", "from_options", "cache", "builder", "builder with more"],
)  # fmt: skip
def test_a_cache_needs_a_bound(make: Callable[[], object]) -> None:
    """Without any bound a cache would grow for ever: the error names all four."""
    with pytest.raises(OptionError, match=r"grow (for ever|without bound)") as caught:
        make()
    assert all(bound in str(caught.value) for bound in BOUNDS)


@pytest.mark.parametrize("name", ["expire_after_access", "expire_after_write", "max_rows", "max_bytes"])
def test_a_bound_is_not_negative(name: str) -> None:
    """The builder takes 0 and more, and says which bound was wrong."""
    for wrong in (-1, math.nan):
        with pytest.raises(ValueError, match=name):
            getattr(DefaultLookupCacheBuilder(), name)(wrong)
    assert (
        getattr(DefaultLookupCacheBuilder(), name)(0).build() == getattr(DefaultLookupCacheBuilder(), name)(0).build()
    )


# --- what they leave out -----------------------------------------------------------------------------


def test_put_twice_replaces() -> None:
    """The rows put last are the rows of a key, more of them or fewer; `put` returns those before."""
    cache = cache_of()
    assert cache.put({"k": 1}, [{"v": 1}, {"v": 2}]) is None
    assert cache.put({"k": 1}, [{"v": 3}]) == [{"v": 1}, {"v": 2}]
    assert cache.get_if_present({"k": 1}) == [{"v": 3}]
    assert cache.put({"k": 1}, []) == [{"v": 3}]
    assert cache.put({"k": 1}, [{"v": 4}, {"v": 4}]) == []
    assert cache.get_if_present({"k": 1}) == [{"v": 4}, {"v": 4}]
    assert cache.size() == 2


def test_what_put_returns_is_no_access() -> None:
    """`put` and `peek_many` count neither hit nor miss, and looking is no access."""
    clock = FakeClock()
    cache, metrics = opened(cache_of(clock, expire_after_access_s=10))
    cache.put({"k": 1}, [{"v": 1}])
    clock.tick(9)
    assert found_in(cache.peek_many(keys_of(1, 2))) == [[1], None]
    clock.tick(1)
    assert cache.put({"k": 1}, [{"v": 2}]) is None
    assert counts(metrics) == (0, 0)


def test_no_rows_do_not_replace_where_they_are_not_remembered() -> None:
    """With cache_missing_key=False, putting no rows leaves the older ones, also within a batch."""
    clock = FakeClock()
    cache = cache_of(clock, expire_after_write_s=10, cache_missing_key=False)
    cache.put({"k": 1}, [{"v": 1}])
    assert cache.put({"k": 1}, []) == [{"v": 1}]
    cache.put_many(keys_of(2, 3, 2), rows_of(20, [], []), np.array([4.0, 0.0, 0.0]))
    assert found_in(cache.get_many(keys_of(1, 2, 3))) == [[1], [20], None]
    clock.tick(6)
    assert held(cache, [1, 2, 3]) == [1]


def test_invalidate() -> None:
    """A key that is forgotten is absent, may be put again, and counted nothing when it went."""
    cache, metrics = opened(cache_of())
    cache.invalidate({"k": 1})
    cache.put_many(keys_of(1, 2, 3), rows_of(10, [20, 21], []))
    cache.invalidate({"k": 2})
    cache.invalidate({"k": 2})
    assert counts(metrics) == (0, 0)
    assert metrics.snapshot()["numCachedRecords"] == cache.size() == 2
    assert found_in(cache.get_many(keys_of(1, 2, 3))) == [[10], None, []]
    cache.put({"k": 2}, [{"v": 22}])
    cache.invalidate_many(pa.table({"k": pa.array([3, None, 3, 9, 1])}))
    assert found_in(cache.get_many(keys_of(1, 2, 3))) == [None, [22], None]
    assert cache.size() == 1
    cache.invalidate({"k": 2})
    assert (cache.size(), cache.bytes()) == (0, 0)


@pytest.mark.parametrize("bound", ["expire_after_access_s", "expire_after_write_s"])
def test_an_entry_is_gone_at_the_very_moment(bound: str) -> None:
    """An entry is there until its age is its time to live, and from then on it is not."""
    clock = FakeClock()
    cache = cache_of(clock, **{bound: 8.0})
    cache.put({"k": 1}, [{"v": 1}])
    clock.tick(8.0 - 2**-20)
    assert held(cache, [1]) == [1]
    assert cache.size() == 1
    clock.tick(2**-20)
    assert held(cache, [1]) == []
    assert cache.get_if_present({"k": 1}) is None
    assert (cache.size(), cache.bytes()) == (0, 0)


@pytest.mark.parametrize(
    "bounds", [{"expire_after_write_s": 10}, {"expire_after_write_s": 10, "expire_after_access_s": 8}]
)
def test_reads_do_not_renew_what_was_written(bounds: dict[str, float]) -> None:
    """Since it was written an entry ages whether it is read or not, and putting it makes it new."""
    clock = FakeClock()
    cache = cache_of(clock, **bounds)
    cache.put({"k": 1}, [{"v": 1}])
    for _ in range(3):
        clock.tick(3)
        assert cache.get_if_present({"k": 1}) == [{"v": 1}]
    clock.tick(1)
    assert cache.get_if_present({"k": 1}) is None
    cache.put({"k": 1}, [{"v": 2}])
    clock.tick(6)
    cache.put({"k": 1}, [{"v": 3}])
    clock.tick(7)
    assert cache.get_if_present({"k": 1}) == [{"v": 3}]


def test_reads_and_puts_renew_the_access() -> None:
    """Since the last access an entry ages; a read and a put begin anew, each key for itself."""
    clock = FakeClock()
    cache = cache_of(clock, expire_after_access_s=10)
    cache.put_many(keys_of(1, 2, 3), rows_of(1, 2, 3))
    clock.tick(6)
    cache.get_many(keys_of(1, 9))
    cache.put_many(keys_of(2), rows_of(20))
    clock.tick(4)
    assert held(cache, [1, 2, 3]) == [1, 2]
    clock.tick(6)
    assert held(cache, [1, 2, 3]) == []


@pytest.mark.parametrize("bound", ["expire_after_access_s", "expire_after_write_s"])
def test_a_put_gives_up_what_has_expired(bound: str) -> None:
    """What has expired takes no memory for ever, though nobody asks for it or for the size."""
    clock = FakeClock()
    cache, metrics = opened(cache_of(clock, **{bound: 8}))
    for number in range(5):
        cache.put_many(keys_of(2 * number, 2 * number + 1), rows_of(1, []))
        assert metrics.snapshot()["numCachedRecords"] == 2
        clock.tick(9)


@pytest.mark.parametrize(("waited", "read"), [(8, True), (3, False)])
def test_either_expiry_ends_an_entry(waited: float, read: bool) -> None:
    """With both set an entry goes by the one that comes first."""
    clock = FakeClock()
    cache = cache_of(clock, expire_after_access_s=3, expire_after_write_s=8)
    cache.put({"k": 1}, [{"v": 1}])
    for _ in range(int(waited) - 1):
        clock.tick(1)
        assert not read or cache.get_if_present({"k": 1})
    assert held(cache, [1]) == [1]
    clock.tick(1)
    assert held(cache, [1]) == []


@pytest.mark.parametrize("bound", ["expire_after_access_s", "expire_after_write_s", "max_rows", "max_bytes"])
def test_a_bound_of_zero_keeps_nothing(bound: str) -> None:
    """With any bound of 0 every get is a miss, whatever was put."""
    cache, metrics = opened(cache_of(**{bound: 0}))
    cache.put_many(keys_of(1, 2), rows_of([1, 2], []))
    assert found_in(cache.get_many(keys_of(1, 2))) == [None, None]
    assert counts(metrics) == (0, 2)
    assert (cache.size(), cache.bytes()) == (0, 0)
    assert cache.put({"k": 1}, [{"v": 1}]) is None
    assert cache.put({"k": 1}, [{"v": 1}]) is None


def test_ages_are_of_the_write() -> None:
    """An entry put with an age expires that much earlier by its write; its access is now."""
    clock = FakeClock()
    written, accessed = (cache_of(clock, **{f"expire_after_{name}_s": 10}) for name in ("write", "access"))
    for cache in (written, accessed):
        cache.put_many(keys_of(1, 2, 3, 4), rows_of(1, 2, 3, 4), np.array([0.0, 4.0, 9.0, 10.0]))
    assert held(written, [1, 2, 3, 4]) == [1, 2, 3]
    clock.tick(1)
    assert held(written, [1, 2, 3, 4]) == [1, 2]
    clock.tick(5)
    assert held(written, [1, 2, 3, 4]) == [1]
    clock.tick(3)
    assert held(accessed, [1, 2, 3, 4]) == [1, 2, 3, 4]
    clock.tick(1)
    assert held(written, [1, 2, 3, 4]) == held(accessed, [1, 2, 3, 4]) == []


def test_of_a_key_that_comes_twice_the_later_one_counts() -> None:
    """Its rows, its age and its place among the accesses are the later ones'."""
    clock = FakeClock()
    cache = cache_of(clock, max_rows=3, expire_after_write_s=10)
    cache.put_many(keys_of(1, 2, 1, 3, 1), rows_of([1, 2, 3], 20, 11, 30, 12), np.array([0.0, 0.0, 0.0, 0.0, 4.0]))
    assert cache.size() == 3
    cache.put_many(keys_of(4), rows_of(40))
    assert found_in(cache.peek_many(keys_of(1, 2, 3, 4))) == [[12], None, [30], [40]]
    clock.tick(6)
    assert held(cache, [1, 2, 3, 4]) == [3, 4]


def test_rows_are_the_unit() -> None:
    """max_rows counts rows, a key without any being one; so do the size and the gauge."""
    cache, metrics = opened(cache_of(max_rows=5))
    cache.put_many(keys_of(1, 2, 3), rows_of([1, 2, 3], [], 30))
    assert metrics.snapshot()["numCachedRecords"] == cache.size() == 5
    cache.put_many(keys_of(4), rows_of([]))
    assert held(cache, [1, 2, 3, 4]) == [2, 3, 4]
    assert metrics.snapshot()["numCachedRecords"] == cache.size() == 3


@pytest.mark.parametrize("bounds", [{"max_rows": 3}, {"max_bytes": 400}])
def test_an_entry_larger_than_a_bound_is_not_kept(bounds: dict[str, int]) -> None:
    """What can never fit makes nothing else go, but replaces what its key had."""
    cache = cache_of(**bounds)
    cache.put_many(keys_of(1, 2), rows_of(1, 2))
    cache.put_many(keys_of(3, 2), rows_of(list(range(60)), list(range(60))))
    assert held(cache, [1, 2, 3]) == [1]
    cache.put_many(keys_of(4, 4), rows_of(4, list(range(60))))
    assert held(cache, [1, 4]) == [1]
    assert cache.size() == 1


def test_keys_with_a_null_are_absent() -> None:
    """A key with a null in any column is neither a hit nor a miss, and no key at all."""
    cache, metrics = opened(cache_of())
    null = {"a": pa.array([1, None, 1, None], pa.int64()), "b": ["x", "x", None, None]}
    assert cache.get_many(pa.table(null)).present.tolist() == [False] * 4
    assert counts(metrics) == (0, 1)
    cache.put({"a": 1, "b": "x"}, [{"v": 1}])
    cache.put({"a": 0, "b": ""}, [{"v": 0}])
    assert found_in(cache.get_many(pa.table(null))) == [[1], None, None, None]
    assert cache.get_if_present({"a": None, "b": "x"}) is None
    assert counts(metrics) == (1, 1)


def test_time_does_not_go_back() -> None:
    """A clock that is set back makes no entry younger and none older."""
    clock = FakeClock()
    cache = cache_of(clock, expire_after_access_s=10, expire_after_write_s=10)
    cache.put({"k": 1}, [{"v": 1}])
    clock.tick(9)
    assert held(cache, [1]) == [1]
    clock.steady_s -= 500
    cache.put({"k": 2}, [{"v": 2}])
    clock.steady_s += 501
    assert held(cache, [1, 2]) == [2]
    clock.tick(9)
    assert held(cache, [1, 2]) == []


def test_close() -> None:
    """A closed cache holds nothing and may be used again, with other columns too; closing is safe at any time."""
    cache = cache_of()
    cache.close()
    cache, metrics = opened(cache)
    cache.put({"k": 1}, [{"v": 1}])
    cache.close()
    cache.close()
    assert (cache.size(), cache.bytes()) == (0, 0)
    assert cache.get_if_present({"k": 1}) is None
    cache.open(metrics)
    assert metrics.snapshot()["numCachedRecords"] == metrics.snapshot()["numCachedBytes"] == 0
    cache.put({"name": "one"}, [{"w": "text"}])
    assert cache.get_if_present({"name": "one"}) == [{"w": "text"}]
    assert counts(metrics) == (1, 1)


def test_empty_batches() -> None:
    """No keys are no work: they find nothing, change nothing and count nothing."""
    cache, metrics = opened(cache_of())
    for _ in range(2):
        found = cache.get_many(keys_of())
        assert found.present.tolist() == []
        assert found.rows is None or found.rows.num_rows == 0
        cache.put_many(keys_of(), rows_of())
        cache.invalidate_many(keys_of())
        with pytest.raises(ValueError, match=KEY_INDEX):
            cache.put_many(keys_of(), rows_of(1))
        cache.put({"k": 1}, [{"v": 1}])
    assert counts(metrics) == (0, 0)
    assert cache.size() == 1


# --- the same as an ordered dictionary ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Bounds:
    access_s: int | None
    write_s: int | None
    rows: int | None
    bytes: int | None
    missing: bool

    def cache(self, clock: FakeClock) -> DefaultLookupCache:
        return cache_of(
            clock,
            expire_after_access_s=self.access_s,
            expire_after_write_s=self.write_s,
            max_rows=self.rows,
            max_bytes=self.bytes,
            cache_missing_key=self.missing,
        )

    @property
    def by_age_and_size(self) -> bool:
        return self.write_s is not None and (self.rows is not None or self.bytes is not None)


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

    def __init__(self, bounds: Bounds, bytes_of: Callable[[Any, list[Row]], int]) -> None:
        self.bounds = bounds
        self.held: OrderedDict[Any, Entry] = OrderedDict()
        self.hits = self.misses = 0
        self._bytes_of = bytes_of

    def purge(self, now_s: float) -> None:
        for key, entry in list(self.held.items()):
            idle = self.bounds.access_s is not None and now_s - entry.used_s >= self.bounds.access_s
            if idle or (self.bounds.write_s is not None and now_s - entry.written_s >= self.bounds.write_s):
                del self.held[key]

    def get(self, keys: list[Any], now_s: float, access: bool = True) -> list[list[Row] | None]:
        self.purge(now_s)
        found: list[list[Row] | None] = []
        for key in keys:
            entry = self.held.get(key)
            found.append(None if entry is None else entry.rows)
            if not access or None in key:
                continue
            if entry is None:
                self.misses += 1
            else:
                self.hits += 1
                entry.used_s = now_s
                self.held.move_to_end(key)
        return found

    def put(self, batch: list[tuple[Any, list[Row], int]], now_s: float) -> None:
        last: dict[Any, tuple[list[Row], int]] = {}
        for key, rows, age in batch:
            if rows or self.bounds.missing:
                last.pop(key, None)
                last[key] = rows, age
        for key in last:
            self.held.pop(key, None)
        most_rows = UNBOUNDED if self.bounds.rows is None else self.bounds.rows
        most_bytes = UNBOUNDED if self.bounds.bytes is None else self.bounds.bytes
        for key, (rows, age) in last.items():
            entry = Entry(rows, self._bytes_of(key, rows), now_s, now_s - age)
            if entry.weight <= most_rows and entry.bytes <= most_bytes:
                self.held[key] = entry
        self.purge(now_s)
        while self.size() > most_rows or self.bytes() > most_bytes:
            self.held.popitem(last=False)

    def invalidate(self, keys: list[Any]) -> None:
        for key in keys:
            self.held.pop(key, None)

    def size(self) -> int:
        return sum(entry.weight for entry in self.held.values())

    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.held.values())


@dataclasses.dataclass(frozen=True)
class Step:
    """Let `tick` seconds pass, then do `name` with keys of the pool, below zero for one with a null.

    Each key comes with how many rows it is given and how old they are. `mixed`: how the rows of several
    keys lie among each other.
    """

    name: str
    keys: list[tuple[int, int, int]]
    tick: int
    mixed: int


STEPS = st.builds(
    Step,
    st.sampled_from(["put", "put", "put", "get", "get", "peek", "invalidate", "wait", "close"]),
    st.lists(st.tuples(st.integers(-2, 11), st.integers(0, 3), st.integers(0, 3)), max_size=8),
    st.integers(0, 2),
    st.integers(1, 3),
)


@contextlib.contextmanager
def hashing(hashes: str) -> Iterator[None]:
    """All is small; the hashes are those of the seed, or all alike."""
    with small(), pytest.MonkeyPatch.context() as patch:
        if hashes == "alike":
            patch.setattr(Keys, "hashes", lambda keys, seed: np.zeros(keys.rows, np.uint64))
        yield


@st.composite
def bounds_of(draw: st.DrawFn) -> Bounds:
    seconds = st.sampled_from([None, None, 1, 3, 6, 0])
    access_s, write_s = draw(seconds), draw(seconds)
    rows = draw(st.none() | st.integers(1, 12) | st.sampled_from([UNBOUNDED, 0]))
    size = draw(st.none() | st.none() | st.integers(0, 1500))
    if access_s is write_s is rows is size is None:
        rows = 6
    return Bounds(access_s, write_s, rows, size, draw(st.booleans()))


def row_of(serial: int) -> Row:
    """A row that no other is equal to, with nulls."""
    return {"v": serial, "t": None if serial % 5 == 0 else "é" * (serial % 40), "b": [None, True, False][serial % 3]}


class Pair:
    """A cache and its model, which are told the same and compared after each step."""

    def __init__(self, kinds: Sequence[pa.DataType], pool: list[tuple[Any, ...]], bounds: Bounds, hashes: str) -> None:
        self.clock = FakeClock()
        self.bounds = bounds
        self.kinds = kinds
        self.pool = pool
        self.cache, self.metrics = opened(bounds.cache(self.clock))
        if hashes == "weak":
            self.cache._seed = WEAK
        self.model = Model(bounds, self.bytes_of)
        self._raw = dict(zip(self.table(pool)[1], pool, strict=True))
        self.results: list[tuple[CachedRows, list[list[Row] | None]]] = []
        self._serial = 0
        self._alone: dict[tuple[Any, ...], int] = {}

    def table(self, keys: Sequence[tuple[Any, ...]]) -> tuple[pa.Table, list[tuple[Any, ...]]]:
        """Keys as a table, and as the model knows them."""
        columns = [pa.array([key[n] for key in keys], kind) for n, kind in enumerate(self.kinds)]
        table = pa.table(dict(zip("abc", columns, strict=False)))
        return table, list(zip(*map(plain, columns), strict=True))

    def asked(self, step: Step) -> tuple[pa.Table, list[tuple[Any, ...]]]:
        keys = []
        for number, _, _ in step.keys:
            key = list(self.pool[number % len(self.pool)])
            if number < 0:
                key[number % len(key)] = None
            keys.append(tuple(key))
        return self.table(keys)

    def bytes_of(self, key: Any, rows: list[Row]) -> int:
        """Bytes of an entry, which are those that a cache with nothing else holds."""
        known = (key, *(row["v"] for row in rows))
        if known not in self._alone:
            alone = cache_of()
            table, _ = self.table([self._raw[key]])
            alone.put_many(table, pa.Table.from_pylist([{**row, KEY_INDEX: 0} for row in rows], ROWS))
            self._alone[known] = alone.bytes()
        return self._alone[known]

    def do(self, step: Step, watched: bool) -> None:
        self.clock.tick(step.tick)
        now_s = self.clock.steady_s
        if watched:
            self.compare_size()
        if step.name == "put":
            self.put(dataclasses.replace(step, keys=[(max(number, 0), *more) for number, *more in step.keys]))
        elif step.name in ("get", "peek"):
            keys, known = self.asked(step)
            found = self.cache.get_many(keys) if step.name == "get" else self.cache.peek_many(keys)
            self.check(found, self.model.get(known, now_s, step.name == "get"))
        elif step.name == "invalidate":
            keys, known = self.asked(step)
            self.cache.invalidate_many(keys)
            self.model.invalidate(known)
        elif step.name == "close" and step.mixed == 1:
            self.cache.close()
            self.model.held.clear()
        keys, known = self.table(self.pool)
        self.check(self.cache.peek_many(keys), self.model.get(known, now_s, access=False))
        assert counts(self.metrics) == (self.model.hits, self.model.misses)
        assert self.bounds.bytes is None or self.cache.bytes() <= self.bounds.bytes
        if watched:
            self.compare_size()

    def put(self, step: Step) -> None:
        keys, known = self.asked(step)
        rows: list[list[Row]] = []
        for _, count, _ in step.keys:
            rows.append([row_of(self._serial + n) for n in range(count)])
            self._serial += count
        flat = [{**row, KEY_INDEX: place} for place, some in enumerate(rows) for row in some]
        flat.sort(key=lambda row: row["v"] % step.mixed)
        together = [
            [{name: row[name] for name in "vtb"} for row in flat if row[KEY_INDEX] == n] for n in range(len(known))
        ]
        ages = [age for _, _, age in step.keys] if step.tick else [0] * len(known)
        if self.bounds.by_age_and_size and self.bounds.write_s:
            ages = [min(age, self.bounds.write_s - 1) for age in ages]
        self.cache.put_many(keys, pa.Table.from_pylist(flat, ROWS), np.array(ages, np.float64) if step.tick else None)
        self.model.put(list(zip(known, together, ages, strict=True)), self.clock.steady_s)

    def compare_size(self) -> None:
        self.model.purge(self.clock.steady_s)
        assert self.cache.size() == self.model.size()
        assert self.cache.bytes() == self.model.bytes()
        seen = self.metrics.snapshot()
        if self.model.held:
            assert (seen["numCachedRecords"], seen["numCachedBytes"]) == (self.model.size(), self.model.bytes())

    def check(self, found: CachedRows, expected: list[list[Row] | None]) -> None:
        self.compare(found, expected)
        self.results.append((found, expected))

    def compare_results(self) -> None:
        """What was answered on the way is the same at the end."""
        for found, expected in self.results:
            self.compare(found, expected)

    def compare(self, found: CachedRows, expected: list[list[Row] | None]) -> None:
        assert found.present.dtype == np.bool_
        assert found.present.tolist() == [rows is not None for rows in expected]
        together = [{**row, KEY_INDEX: place} for place, rows in enumerate(expected) for row in rows or ()]
        if found.rows is None:
            assert not together
        else:
            assert found.rows.schema == ROWS
            assert found.rows.to_pylist() == together


COMPOSITE = (pa.int32(), pa.string()), (pa.string(), pa.float64(), pa.bool_())
KEY_KINDS: list[tuple[pa.DataType, ...]] = [*((kind,) for kind in KINDS), *COMPOSITE]


@pytest.mark.parametrize("kinds", KEY_KINDS, ids=lambda kinds: "-".join(map(str, kinds)))
@examples(40)
@given(data=st.data())
def test_a_cache_is_an_ordered_dictionary(kinds: tuple[pa.DataType, ...], data: st.DataObject) -> None:
    """Whatever is put, read and forgotten: presence, rows, their order, size, bytes and counts are the model's.

    With keys of all types, and with hashes that are good, that lie together, and that are all alike.
    """
    pool = data.draw(st.lists(st.tuples(*map(values_of, kinds)), min_size=1, max_size=12), label="pool")
    bounds = data.draw(bounds_of(), label="bounds")
    hashes = data.draw(st.sampled_from(["good", "weak", "alike"]), label="hashes")
    # By age an entry is taken away from time to time only, unless somebody asks for the size.
    watched = bounds.by_age_and_size or data.draw(st.booleans(), label="watched")
    with hashing(hashes):
        pair = Pair(kinds, pool, bounds, hashes)
        for step in data.draw(st.lists(STEPS, max_size=25) | st.lists(STEPS, min_size=20, max_size=40), label="steps"):
            pair.do(step, watched)
        pair.compare_results()


LONG_RUNS = {
    "rows": Bounds(None, None, 60, None, True),
    "bytes": Bounds(None, None, None, 6000, True),
    "access": Bounds(40, None, None, None, False),
    "time": Bounds(30, 50, None, None, True),
    "all": Bounds(30, 50, 60, 6000, True),
}


@pytest.mark.parametrize("bounds", LONG_RUNS.values(), ids=LONG_RUNS)
@pytest.mark.parametrize(
    "kinds", [(pa.int64(),), (pa.string(),), COMPOSITE[1]], ids=lambda kinds: "-".join(map(str, kinds))
)
@pytest.mark.parametrize("hashes", ["good", "alike"])
def test_a_cache_stays_an_ordered_dictionary(kinds: tuple[pa.DataType, ...], bounds: Bounds, hashes: str) -> None:
    """The same over many steps on many keys, some of which are asked for more often."""
    draw = random.Random(str(kinds) + hashes)
    numbers = [0, -1, 2**63 - 1, -(2**63), *range(1, 57)]
    values = {pa.int64(): numbers, pa.string(): [str(n) * (n % 7) + "é" for n in numbers]}
    values[pa.float64()] = [math.nan, -0.0, *(n / 3 for n in numbers[2:])]
    values[pa.bool_()] = [n % 2 == 0 for n in numbers]
    pool = list(zip(*(values[kind] for kind in kinds), strict=True))
    names = ["put"] * 10 + ["get"] * 12 + ["peek", "invalidate", "invalidate", "wait"]
    with hashing(hashes):
        pair = Pair(kinds, pool, bounds, hashes)
        for _ in range(120):
            some = [int(60 * draw.random() ** 2) if draw.randrange(40) else -1 for _ in range(draw.randrange(25))]
            keys = [(number, draw.randrange(4), draw.randrange(20)) for number in some]
            pair.do(Step(draw.choice(names), keys, draw.choice([0, 0, 1, 2, 9]), draw.randrange(1, 4)), True)
        pair.compare_results()


@examples(150)
@given(
    limit=st.integers(100, 3000),
    batches=st.lists(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 400)), max_size=12), max_size=12),
)
def test_only_the_least_recently_used_make_way_for_bytes(limit: int, batches: list[list[tuple[int, int]]]) -> None:
    """Entries never take more bytes than the bound, and those that are there were used later than those that went."""
    cache = cache_of(max_bytes=limit)
    order: dict[int, int] = {}  # key -> length of its text, the least recently put first
    for batch in batches:
        keys = keys_of(*(key for key, _ in batch))
        texts = ["x" * length for _, length in batch]
        cache.put_many(
            keys, pa.table({"t": pa.array(texts, pa.string()), KEY_INDEX: pa.array(range(len(batch)), pa.int64())})
        )
        for key, length in batch:
            order.pop(key, None)
            order[key] = length
        assert cache.bytes() <= limit
        sizes = {key: size_alone(length) for key, length in order.items()}
        fitting = [key for key in order if sizes[key] <= limit]
        there = held(cache, list(order))
        assert there == fitting[len(fitting) - len(there) :]
        order = {key: order[key] for key in there}
        assert cache.bytes() == sum(sizes[key] for key in there)


@functools.cache
def size_alone(length: int) -> int:
    """Bytes of an entry with one text: a little more than the text."""
    alone = cache_of()
    alone.put({"k": 0}, [{"t": "x" * length}])
    assert length < alone.bytes() < length + 150
    return alone.bytes()


@pytest.mark.parametrize("bounds", [{"max_rows": 300_000}, {"max_rows": 300_000, "expire_after_access_s": 1e9}])
def test_no_entry_is_lost_below_the_bound(bounds: dict[str, Any]) -> None:
    """As many keys as there is room for are all there; one more, and exactly the oldest is gone."""
    cache, metrics = opened(cache_of(**bounds))
    numbers = np.random.default_rng(3).permutation(600_001)
    for start in range(0, 300_000, 10_000):
        batch = numbers[start : start + 10_000]
        cache.put_many(pa.table({"k": batch}), pa.table({"v": batch * 3, KEY_INDEX: np.arange(10_000)}))
    assert cache.size() == 300_000
    kept = pa.table({"k": numbers[:300_000]})
    found = cache.get_many(kept)
    assert found.present.all()
    assert found.rows is not None
    assert (found.rows["v"].to_numpy() == numbers[:300_000] * 3).all()
    assert not cache.peek_many(pa.table({"k": numbers[300_000:]})).present.any()
    cache.put({"k": int(numbers[300_000])}, [{"v": 0}])
    assert np.flatnonzero(~cache.peek_many(kept).present).tolist() == [0]
    assert cache.size() == metrics.snapshot()["numCachedRecords"] == 300_000
    # And all of them go for as many others, whose numbers follow once those of the dead are given up.
    for start in range(300_001, 600_001, 10_000):
        batch = numbers[start : start + 10_000]
        cache.put_many(pa.table({"k": batch}), pa.table({"v": batch * 3, KEY_INDEX: np.arange(10_000)}))
    found = cache.get_many(pa.table({"k": numbers}))
    assert (found.present == (np.arange(600_001) > 300_000)).all()
    assert found.rows is not None
    assert (found.rows["v"].to_numpy() == numbers[300_001:] * 3).all()


PAIRS = [(number, number ^ 5) for number in range(300)]  # hash alike under the weak seed


def colliding(kind: str) -> tuple[list[tuple[Any, ...]], pa.DataType]:
    if kind == "at the first slot":
        return [(number,) for number in range(300)], pa.int64()
    if kind == "from the last slot to the first":
        return [(number,) for number in range(-150, 150)], pa.int64()
    return PAIRS, pa.int64()


@pytest.mark.parametrize("kind", ["at the first slot", "from the last slot to the first", "alike"])
def test_colliding_hashes(kind: str) -> None:
    """Keys that hash to the same slot, or alike to the last bit, are told apart, when some of them are gone as well."""
    values, arrow = colliding(kind)
    names = "ab"[: len(values[0])]

    def table(some: Sequence[tuple[Any, ...]]) -> pa.Table:
        return pa.table({name: pa.array([key[n] for key in some], arrow) for n, name in enumerate(names)})

    with small():
        cache = cache_of()
        cache._seed = WEAK
        hashes = Keys([column.combine_chunks() for column in table(values).columns]).hashes(WEAK)
        slots = set((hashes >> np.uint64(53)).tolist())
        assert slots <= {0, 2**11 - 1}
        assert len(set(hashes.tolist())) == (1 if kind == "alike" else 300)
        expected: dict[tuple[Any, ...], int] = {}
        draw = random.Random(11)
        for serial in range(60):
            some = draw.choices(values, k=draw.randrange(20))
            if serial % 3 == 2:
                cache.invalidate_many(table(some))
                for key in some:
                    expected.pop(key, None)
            else:
                cache.put_many(table(some), rows_of(*(1000 * serial + n for n in range(len(some)))))
                expected |= {key: 1000 * serial + n for n, key in enumerate(some)}
            assert cache.size() == len(expected)
            found = found_in(cache.get_many(table(values)))
            assert found == [[expected[key]] if key in expected else None for key in values]


# --- rows of all types -------------------------------------------------------------------------------


def check_types(kind: pa.DataType, pieces: list[pa.Array], draw: random.Random) -> None:
    """Rows put in pieces come back by whatever keys are asked for, while others are replaced and forgotten."""
    whole = pa.concat_arrays(pieces) if pieces else pa.array([], kind)
    numbers = list(range(len(whole)))
    with small():
        cache = cache_of()
        row = 0
        for piece in pieces:
            # Each row is first put for a key that is replaced by the next piece.
            keys = [-1, *range(row, row + len(piece))]
            places = pa.array([*range(1, len(piece) + 1), *([0] if len(piece) else [])], pa.int64())
            rows = pa.concat_arrays([piece, piece.slice(0, 1)])
            cache.put_many(keys_of(*keys), pa.table({"c": rows, KEY_INDEX: places}))
            row += len(piece)
        early = cache.peek_many(keys_of(*numbers))
        gone = draw.sample(numbers, len(numbers) // 2)
        cache.invalidate_many(keys_of(-1, *gone))
        asked = draw.choices(numbers, k=len(numbers))
        left = [number for number in asked if number not in gone]
        found = cache.get_many(keys_of(*asked))
        assert found.present.tolist() == [number not in gone for number in asked]
        if not pieces:
            assert found.rows is None
            return
        for result, expected in ((found, left), (early, numbers)):
            assert result.rows is not None
            assert result.rows.schema == pa.schema([("c", kind), (KEY_INDEX, pa.int64())])
            result.rows.validate(full=True)
            column = result.rows["c"].combine_chunks()
            assert column.equals(pc.take(whole, pa.array(expected, pa.int64())))


@examples(150)
@given(data=st.data())
def test_rows_of_every_type(data: st.DataObject) -> None:
    """Values of all types, nested ones and nulls at any level come back equal and in the type that was put."""
    kind = data.draw(kinds(2), label="kind")
    pieces = pieces_of(data.draw, kind)
    check_types(kind, pieces, random.Random(len(pieces)))


EXAMPLES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.bool_(), [True, None, False, True, False, None, True, True, None, False, True]),
    (pa.string(), ["", None, "a", "é" * 50, ""]),
    (pa.binary(), [b"", b"\0", None, b"x" * 99]),
    (pa.decimal128(38, 10), [None, 0, -1, 10**27]),
    (US, [0, None, -1, 2**60]),
    (pa.list_(pa.field("element", pa.string())), [[], None, ["", None], ["a", "b"]]),
    (pa.map_(pa.string(), pa.int32()), [[], None, [("a", 1), ("b", None)]]),
    (
        pa.struct([("x", pa.bool_()), ("y", pa.list_(pa.field("element", pa.int64())))]),
        [None, {"x": True, "y": [1]}, {"x": None, "y": None}],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "values"), EXAMPLES, ids=[str(kind) for kind, _ in EXAMPLES])
def test_rows_of_some_types(kind: pa.DataType, values: list[Any]) -> None:
    """Nulls first or last, empty texts and empty lists come back, however the pieces are cut."""
    array = pa.array(values, kind)
    for cut in range(len(values) + 1):
        check_types(kind, [array.slice(0, cut), array.slice(cut), array], random.Random(cut))


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.binary(),
        pa.list_(pa.field("element", pa.string())),
        pa.struct([("s", pa.string()), ("n", pa.int64())]),
        pa.map_(pa.string(), pa.binary()),
    ],
    ids=str,
)
def test_text_past_32_bits(kind: pa.DataType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text whose offsets need 64 bits comes back in the type that was put, from then on and after dead rows went."""
    monkeypatch.setattr(growing, "_INT32_AT_MOST", 100)
    text = "text of some length"
    value: Any = text.encode() if pa.types.is_binary(kind) else text
    if pa.types.is_list(kind):
        value = [text]
    elif pa.types.is_struct(kind):
        value = {"s": text, "n": 1}
    elif pa.types.is_map(kind):
        value = [(text, text.encode())]
    with small():
        cache = cache_of(max_rows=30)
        for number in range(50):
            keys = pa.table({"k": [f"key number {number}"]})
            cache.put_many(keys, pa.table({"c": pa.array([value], kind), KEY_INDEX: [0]}))
            found = cache.get_many(pa.table({"k": [f"key number {n}" for n in (number, max(0, number - 5))]}))
            assert found.present.all()
            assert found.rows is not None
            assert found.rows.schema.field("c").type == kind
            assert found.rows["c"].to_pylist() == [value] * 2
        assert cache.size() == 30


@pytest.mark.parametrize("large", [pa.large_string(), pa.large_binary()], ids=str)
def test_offsets_take_64_bits_only_where_they_have_to(large: pa.DataType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column is of its large type from the byte on that is one too many, and of its own again with fewer rows."""
    monkeypatch.setattr(growing, "_INT32_AT_MOST", 10)
    kind = pa.string() if pa.types.is_large_string(large) else pa.binary()
    column = growing.GrowingColumn(kind)
    column.append(pa.array(["12345", None, "67890"], kind))
    before = column.view()
    column.append(pa.array(["x", "", "12345"], kind).slice(1, 1))
    assert column.view().type == before.type == kind
    column.append(pa.array(["12345", "x", None], kind).slice(1))
    whole = pa.array(["12345", None, "67890", "", "x", None], large)
    assert column.view().equals(whole)
    assert before.equals(whole.slice(0, 3).cast(kind))
    assert column.kept(np.array([0, 2, 3])).view().equals(pa.array(["12345", "67890", ""], kind))
    assert column.kept(np.array([1, 2, 3, 4])).view().equals(whole.slice(1, 4).cast(kind))


# --- the contract ------------------------------------------------------------------------------------


def over(numbers: Numbers) -> pa.Array:
    """An array over the memory of `numbers`."""
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(numbers)])


def test_what_was_passed_in_may_change() -> None:
    """Keys, rows, ages and what was answered are the caller's: changing them changes nothing in the cache."""
    clock = FakeClock()
    cache = cache_of(clock, expire_after_write_s=10, max_rows=100)
    for count in (1, 3, 5):
        keys, values, ages = np.arange(count), np.arange(count) + 100, np.zeros(count)
        places = np.arange(count)
        cache.put_many(pa.table({"k": over(keys)}), pa.table({"v": over(values), KEY_INDEX: over(places)}), ages)
        for passed in (keys, values, places, ages):
            passed.fill(-7)
        asked = np.arange(count)
        found = cache.get_many(pa.table({"k": over(asked)}))
        asked.fill(-7)
        found.present.fill(False)
        assert found_in(cache.get_many(keys_of(*range(count)))) == [[100 + n] for n in range(count)]
    clock.tick(9)
    assert held(cache, list(range(5))) == list(range(5))
    rows = [{"v": 1}, {"v": 2}]
    key = {"k": 1}
    cache.put(key, rows)
    rows[0]["v"] = 9
    rows.pop()
    answer = cache.get_if_present(key)
    assert answer == [{"v": 1}, {"v": 2}]
    answer.clear()
    assert cache.get_if_present({"k": 1}) == [{"v": 1}, {"v": 2}]


def test_answers_stay_as_they_were() -> None:
    """What was answered is the same after the cache has grown, replaced all of it, moved it and let it go."""
    with small():
        cache = cache_of(max_rows=40)
        answers = []
        for serial in range(300):
            batch = [(serial + n) % 70 for n in range(serial % 9)]
            rows = [{**row_of(1000 * serial + n), KEY_INDEX: n // 2} for n in range(2 * len(batch)) if serial % 4]
            cache.put_many(keys_of(*batch), pa.Table.from_pylist(rows, ROWS))
            found = cache.get_many(keys_of(*range(70)))
            answers.append((found, found.present.tolist(), found.rows and found.rows.to_pylist()))
            if serial == 200:
                cache.close()
        cache.close()
        for found, present, expected in answers:
            assert found.present.tolist() == present
            assert (found.rows and found.rows.to_pylist()) == expected


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(
    "bounds", [{"max_rows": 30}, {"max_rows": UNBOUNDED}, {"max_bytes": 2000, "expire_after_access_s": 60}]
)
def test_many_threads(bounds: dict[str, int], switching: None) -> None:
    """From any number of threads no key gets rows of another, and hits and misses add up."""
    cache, metrics = opened(cache_of(**bounds))
    asked = [0] * 6

    def rows_for(keys: list[int]) -> list[Row]:
        return [
            {"v": 100 * key + n, "t": "x" * key, KEY_INDEX: at} for at, key in enumerate(keys) for n in range(key % 4)
        ]

    schema = pa.schema([("v", pa.int64()), ("t", pa.string()), (KEY_INDEX, pa.int64())])

    def work(thread: int) -> None:
        draw = random.Random(thread)
        for turn in range(150):
            keys = [draw.randrange(25) for _ in range(draw.randrange(1, 8))]
            if turn % 3 == 0:
                cache.put_many(keys_of(*keys), pa.Table.from_pylist(rows_for(keys), schema))
            elif turn % 20 == 7:
                cache.invalidate_many(keys_of(*keys))
                cache.open(metrics)
            else:
                found = cache.get_many(keys_of(*keys))
                asked[thread] += len(keys)
                if found.rows is None:
                    assert not found.present.any()
                    continue
                expected = [row for row in rows_for(keys) if found.present[row[KEY_INDEX]]]
                assert found.rows.to_pylist() == expected
                assert cache.size() >= 0 <= cache.bytes()

    with small(), concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert sum(counts(metrics)) == sum(asked)
    assert counts(metrics)[0] > 0
    assert cache.size() <= bounds.get("max_rows", UNBOUNDED)
    assert cache.bytes() <= bounds.get("max_bytes", UNBOUNDED)


def test_a_user_more_begins_to_count_for_itself() -> None:
    """Opening a cache again keeps what it holds; with another group, that group counts from then on."""
    cache, first = opened(cache_of())
    cache.put({"k": 1}, [{"v": 1}])
    cache.open(first)
    cache.get_if_present({"k": 1})
    assert counts(first) == (1, 0)
    _, second = opened(cache)
    assert second.snapshot()["numCachedRecords"] == 1
    cache.get_many(keys_of(1, 2, 1))
    assert (counts(first), counts(second)) == ((1, 0), (2, 1))


def test_a_cache_that_was_not_opened_works() -> None:
    """Without a group there is nobody to count for; that is all."""
    cache = cache_of()
    cache.put({"k": 1}, [{"v": 1}])
    assert cache.get_if_present({"k": 1}) == [{"v": 1}]


COLUMNS = {"a": pa.array([1, 2, -3], pa.int64()), "b": pa.array(["x", "y", ""], pa.string())}


@pytest.mark.parametrize(
    "form",
    [
        lambda a, b: pa.table({"b": b, "a": a}),
        lambda a, b: pa.table({"B": b, "A": a}),
        lambda a, b: pa.table({"left": a, "right": b}),
        lambda a, b: pa.table({"a": a.cast(pa.int8()), "b": b}),
        lambda a, b: pa.table({"a": a.cast(pa.decimal128(20, 0)), "b": b.cast(pa.large_string())}),
        lambda a, b: pa.table({"a": a.dictionary_encode(), "b": b.dictionary_encode()}),
        lambda a, b: pa.table({"a": pa.chunked_array([a[:1], a[:0], a[1:]]), "b": pa.chunked_array([b[:2], b[2:]])}),
        lambda a, b: pa.concat_tables([pa.table({"a": a, "b": b})] * 2).slice(3),
        lambda a, b: pa.table({"a": pa.chunked_array([a.dictionary_encode(), a[:0].dictionary_encode()]), "b": b}),
        lambda a, b: pa.table({"a": a, "b": b.cast(pa.string_view())}),
        lambda a, b: pa.table({"more": a, "b": b, "a": a}),
    ],
    ids=["order", "case", "place", "narrow", "wide", "codes", "chunks", "slice", "codes in chunks", "views", "more"],
)  # fmt: skip
def test_keys_in_other_forms(form: Callable[[pa.Array, pa.Array], pa.Table]) -> None:
    """Keys mean the same in another order of columns, in narrower types, as codes and in chunks, to all operations."""
    cache = cache_of()
    cache.put_many(pa.table(COLUMNS), rows_of(1, [2, 3], []))
    keys = form(*COLUMNS.values())
    assert found_in(cache.get_many(keys)) == [[1], [2, 3], []]
    cache.put_many(keys, rows_of([4, 5], 6, 7))
    assert found_in(cache.get_many(pa.table(COLUMNS))) == [[4, 5], [6], [7]]
    assert cache.size() == 4
    cache.invalidate_many(keys.slice(1, 1))
    assert found_in(cache.peek_many(keys)) == [[4, 5], None, [7]]
    other = cache_of()
    other.put_many(keys, rows_of(1, [2, 3], []))
    assert found_in(other.get_many(keys)) == [[1], [2, 3], []]


def test_keys_that_no_column_can_hold() -> None:
    """A number too large for the key column equals none of its keys; it is absent, and cannot be put."""
    cache = cache_of()
    cache.put_many(pa.table({"k": pa.array([1], pa.int32())}), rows_of(1))
    assert found_in(cache.get_many(keys_of(1, 2**32 + 1, -(2**63)))) == [[1], None, None]
    with pytest.raises(ValueError, match="null key"):
        cache.put_many(keys_of(2**32 + 1), rows_of(2))


def test_keys_of_another_kind_are_refused() -> None:
    """Keys that cannot mean those of the cache are an error, and nothing changes."""
    cache, metrics = opened(cache_of())
    cache.put_many(keys_of(1), rows_of(1))
    for wrong in (pa.table({"k": ["1"]}), pa.table({"k": [1.0]}), pa.table({"x": [1], "y": [2]})):
        for operation in (cache.get_many, cache.peek_many, cache.invalidate_many):
            with pytest.raises(SchemaError):
                operation(wrong)
        with pytest.raises(SchemaError):
            cache.put_many(wrong, rows_of(1))
    with pytest.raises(SchemaError, match="cannot be a key"):
        cache_of().put_many(pa.table({"k": [[1]]}), rows_of(1))
    assert counts(metrics) == (0, 0)
    assert held(cache, [1]) == [1]


@pytest.mark.parametrize(
    "rows",
    [
        pa.table({"v": [1]}),
        pa.table({"v": [1], "w": [1]}),
        pa.table({"v": [1], "w": [1], "x": [1]}),
        pa.table({"w": [1], "x": [1]}),
        pa.table({"v": ["no number"], "w": [1]}),
        pa.table({"v": [1.5], "w": [1]}),
    ],
    ids=["missing", "no index", "extra", "other", "text", "fraction"],
)
def test_other_rows_are_refused(rows: pa.Table) -> None:
    """Rows with a column less, one more or one of another type are an error, and the key keeps those it has."""
    cache = cache_of()
    cache.put_many(keys_of(1), pa.table({"v": [1], "w": [1], KEY_INDEX: [0]}))
    if rows.column_names != ["v", "w"] or rows.schema.field("v").type != pa.int64():
        rows = rows.append_column(KEY_INDEX, pa.array([0], pa.int64()))
    with pytest.raises(SchemaError):
        cache.put_many(keys_of(1), rows)
    assert cache.get_if_present({"k": 1}) == [{"v": 1, "w": 1}]
    assert cache.size() == 1


@pytest.mark.parametrize(
    "places", [[0, 2], [-1, 0], [2**40, 1], [0, None], [None, None], [-(2**63), 2**63 - 1]], ids=str
)
def test_rows_without_a_key_are_refused(places: list[int | None]) -> None:
    """A row whose key is null or none of those given is an error, and nothing is put."""
    cache = cache_of()
    cache.put_many(keys_of(5), rows_of(5))
    rows = pa.table({"v": pa.array([1, 2], pa.int64()), KEY_INDEX: pa.array(places, pa.int64())})
    with pytest.raises(ValueError, match="rows without a key"):
        cache.put_many(keys_of(1, 2), rows)
    assert held(cache, [1, 2, 5]) == [5]
    assert cache.size() == 1


def test_rows_in_other_forms() -> None:
    """Rows may have columns in another order, as codes, narrower, in chunks, and an index of any integer type."""
    cache = cache_of()
    cache.put_many(keys_of(0), pa.table({"v": pa.array([0], pa.int64()), "t": ["z"], KEY_INDEX: [0]}))
    texts = pa.array(["b", "a", "b", None])
    cache.put_many(
        keys_of(1, 2),
        pa.table({
            KEY_INDEX: pa.chunked_array([pa.array([1, 0], pa.uint8()), pa.array([1, 1], pa.uint8())]),
            "t": texts.dictionary_encode(),
            "v": pa.array([1, 2, 3, 4], pa.int16()),
        }),
    )  # fmt: skip
    found = cache.get_many(keys_of(2, 1, 2))
    assert found.rows is not None
    assert found.rows.schema == pa.schema([("v", pa.int64()), ("t", pa.string()), (KEY_INDEX, pa.int64())])
    twice = [(1, "b"), (3, "b"), (4, None)]
    expected = [(*row, 0) for row in twice] + [(2, "a", 1)] + [(*row, 2) for row in twice]
    assert list(zip(*(column.to_pylist() for column in found.rows.columns), strict=True)) == expected


def test_the_order_of_rows_within_a_key_stays() -> None:
    """However rows of several keys lie among each other, those of one key keep their order."""
    cache = cache_of()
    draw = np.random.default_rng(5)
    for _ in range(5):
        places = draw.integers(0, 50, 1000)
        cache.put_many(keys_of(*range(50)), pa.table({"v": np.arange(1000), KEY_INDEX: places}))
        expected = [np.flatnonzero(places == key).tolist() for key in range(50)]
        assert found_in(cache.get_many(keys_of(*range(50)))) == expected
        assert cache.size() == sum(max(len(rows), 1) for rows in expected)


def test_a_key_asked_for_twice_is_answered_twice() -> None:
    """Each of several equal keys has the rows, and is a hit or a miss of its own."""
    cache, metrics = opened(cache_of())
    cache.put_many(keys_of(1, 2), rows_of([10, 11], []))
    assert found_in(cache.get_many(keys_of(1, 3, 2, 1, 3))) == [[10, 11], None, [], [10, 11], None]
    assert counts(metrics) == (3, 2)


@pytest.mark.parametrize(
    ("values", "other"),
    [
        ([0.0, math.nan, 1.5], [-0.0, -math.nan, 1.5]),
        ([0, -1, 2**63 - 1, -(2**63)], [0, -1, 2**63 - 1, -(2**63)]),
        (["", "a", "a\0"], ["", "a", "a\0"]),
        ([b"", b"\0", b"\0\0"], [b"", b"\0", b"\0\0"]),
        ([True, False], [True, False]),
    ],
    ids=["floats", "integers", "texts", "bytes", "booleans"],
)
def test_keys_are_equal_as_keys(values: list[Any], other: list[Any]) -> None:
    """NaN is NaN and -0.0 is 0.0; the ends of a type's range, 0, empty texts and NULs are keys like others."""
    cache = cache_of()
    for number, value in enumerate(values):
        assert cache.put({"k": value}, [{"v": number}]) is None
    for number, value in enumerate(other):
        assert cache.get_if_present({"k": value}) == [{"v": number}]
        assert cache.put({"k": value}, [{"v": -number}]) == [{"v": number}]
    assert cache.size() == len(values)


# --- how good it is ----------------------------------------------------------------------------------

ROOM = 10_000


def traces() -> dict[str, Numbers]:
    """Keys asked for: often the same ones, and the same with long runs of keys that nobody asks for again."""
    draw = np.random.default_rng(17)
    often = draw.zipf(1.1, 300_000) % 1_000_003
    mixed = often[:200_000].reshape(-1, 5_000)
    runs = 2_000_000 + np.arange(20 * 5_000).reshape(-1, 5_000)
    parts = [part for n, some in enumerate(mixed) for part in ([some, runs[n // 2]] if n % 2 else [some])]
    return {"zipf": often, "zipf with scans": np.concatenate(parts)}


@pytest.mark.parametrize("name", ["zipf", "zipf with scans"])
def test_the_hit_rate_is_that_of_an_exact_lru(name: str) -> None:
    """Asked for in batches, what was missing put after each, a cache hits exactly where an ordered dictionary does."""
    trace = traces()[name]
    cache, metrics = opened(cache_of(max_rows=ROOM))
    exact: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for start in range(0, len(trace), 1000):
        keys = trace[start : start + 1000]
        found = cache.get_many(pa.table({"k": keys}))
        missing = keys[~found.present]
        cache.put_many(pa.table({"k": missing}), pa.table({"v": missing, KEY_INDEX: np.arange(len(missing))}))
        there = [key in exact for key in keys.tolist()]
        hits += sum(there)
        for key, hit in zip(keys.tolist(), there, strict=True):
            if hit:
                exact.move_to_end(key)
        for key in missing.tolist():
            exact[key] = None
            exact.move_to_end(key)
        while len(exact) > ROOM:
            exact.popitem(last=False)
    assert abs(counts(metrics)[0] - hits) <= 0.002 * len(trace)
    assert counts(metrics) == (hits, len(trace) - hits)
    assert 0.2 < hits / len(trace) < 0.9


# --- what once was wrong -----------------------------------------------------------------------------


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


def test_rows_of_another_type_are_not_converted() -> None:
    """A value comes back as it was put, or is refused, where the column has another type."""
    for held_type, other in ((pa.string(), pa.int64()), (pa.int64(), pa.string()), (pa.int64(), pa.bool_())):
        cache = cache_of()
        cache.put_many(keys_of(1), pa.table({"v": pa.array([], held_type), KEY_INDEX: pa.array([], pa.int64())}))
        with pytest.raises(SchemaError):
            cache.put_many(keys_of(2), pa.table({"v": pa.array([1], pa.int64()).cast(other), KEY_INDEX: [0]}))


def test_a_row_with_more_columns_is_not_cut() -> None:
    """Of rows with different columns none is lost without a word."""
    cache = cache_of()
    with contextlib.suppress(SchemaError):
        cache.put({"k": 1}, [{"v": 1}, {"v": 2, "w": 3}])
        assert cache.get_if_present({"k": 1}) == [{"v": 1, "w": None}, {"v": 2, "w": 3}]


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
    take = memory.as_indices

    def taken(rows: Numbers) -> pa.Array:
        monkeypatch.setattr(memory, "as_indices", take)
        other = threading.Thread(target=cache.put, args=({"k": 2}, [{"v": 2}]))
        other.start()
        other.join(5)
        return take(rows)

    monkeypatch.setattr(memory, "as_indices", taken)
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
            for _ in range(3000):
                clock.tick(1)
                cache.get_many(asked)
            assert tracemalloc.get_traced_memory()[0] < 50_000
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
