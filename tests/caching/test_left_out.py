"""The cache in memory answers as an ordered dictionary would that knows the same bounds, and as FLIP-221 says: what they leave out."""

from __future__ import annotations

import pytest

from tests.caching.common import cache_of, counts, held, keys_of, opened, rows_of
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


@pytest.mark.parametrize("bound", ["expire_after_access_s", "expire_after_write_s"])
def test_a_put_gives_up_what_has_expired(bound: str) -> None:
    """What has expired takes no memory for ever, though nobody asks for it or for the size."""
    clock = FakeClock()
    cache, metrics = opened(cache_of(clock, **{bound: 8}))
    for number in range(5):
        cache.put_many(keys_of(2 * number, 2 * number + 1), rows_of(1, []))
        assert metrics.snapshot()["numCachedRecords"] == 2
        clock.tick(9)


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
