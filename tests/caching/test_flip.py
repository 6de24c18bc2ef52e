"""The cache in memory answers as an ordered dictionary would that knows the same bounds, and as FLIP-221 says: what Flink's own tests say (FLIP-221)."""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import math
import pickle
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from pyspark_lookup.base.errors import OptionError
from pyspark_lookup.base.metrics import UNSET, CacheMetricGroup
from pyspark_lookup.cache.memory import KEY_INDEX, DefaultLookupCache, DefaultLookupCacheBuilder
from pyspark_lookup.options.lookup_options import LookupOptions
from tests.caching.common import UNBOUNDED, Row, cache_of, counts, opened
from tests.fakes import FakeClock

BOUNDS = [
    "lookup.partial-cache.expire-after-access",
    "lookup.partial-cache.expire-after-write",
    "lookup.partial-cache.max-rows",
    "lookup.partial-cache.max-bytes",
]


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
