"""The cache in memory answers as an ordered dictionary would that knows the same bounds, and as FLIP-221 says: what they leave out."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from pyspark_lookup.cache.memory import KEY_INDEX
from tests.caching.common import cache_of, counts, found_in, held, keys_of, opened, rows_of
from tests.fakes import FakeClock


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
