"""The cache in memory: what Flink's own tests say (FLIP-221) of refusals, copies and bounds; the rest is in `test_same_as_a_dict`."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest

from pyspark_lookup.cache.memory import DefaultLookupCache, DefaultLookupCacheBuilder
from pyspark_lookup.errors import OptionError
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.sources.registry import parse_options
from tests.support.fakes import FakeClock
from tests.support.memory_cache import Row, opened

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
        assert copied.get_if_present(named("a")) == [named("b")]
        assert cache.size() == 4
    for name, value in GIVEN.items():
        other = not value if isinstance(value, bool) else value + 1
        assert DefaultLookupCache(**{**GIVEN, name: other}) != cache
    assert cache != GIVEN


def options(**more: str) -> LookupOptions:
    given = {"path": "/t", "lookup.keys": "k", "lookup.cache": "PARTIAL"}
    return parse_options({**given, **{f"lookup.partial-cache.{name}": text for name, text in more.items()}})


def test_options_are_honoured() -> None:
    """`lookup.partial-cache.*` say what the builder says, and a cache of them is on the clock that it is given."""
    found = DefaultLookupCache.from_options(
        options(**{
            "expire-after-access": "15513 ms", "expire-after-write": "18213 ms", "max-rows": "15213",
            "max-bytes": "1 MiB", "cache-missing-key": "false",
        })
    )  # fmt: skip
    builder = DefaultLookupCache.new_builder().expire_after_access(15.513).expire_after_write(18.213)
    builder.max_rows(15213).max_bytes(2**20).cache_missing_key(False)
    assert found == DefaultLookupCache(**GIVEN) == builder.build()
    clock = FakeClock()
    timed = DefaultLookupCache.from_options(options(**{"expire-after-write": "5 s"}), lambda: clock.steady_s)
    assert timed == DefaultLookupCacheBuilder().expire_after_write(5).build()
    timed.put(KEY, FOUR)
    clock.tick(5)
    assert timed.get_if_present(KEY) is None


@pytest.mark.parametrize("mode", ["NONE", "FULL"])
def test_options_of_another_cache_are_refused(mode: str) -> None:
    """Only lookup.cache=PARTIAL describes this cache."""
    with pytest.raises(OptionError, match=r"lookup\.cache .*should be 'PARTIAL'"):
        DefaultLookupCache.from_options(parse_options({"path": "/t", "lookup.keys": "k", "lookup.cache": mode}))


def test_a_cache_needs_a_bound() -> None:
    """Without any bound a cache would grow for ever: the error names all four."""
    unbounded = options(**{"max-rows": "1"}).with_values({"lookup.partial-cache.max-rows": None})
    for make, given in (
        (options, ()),
        (DefaultLookupCache.from_options, (unbounded,)),
        (DefaultLookupCache, ()),
        (DefaultLookupCacheBuilder().cache_missing_key(True).build, ()),
    ):
        with pytest.raises(OptionError, match=r"grow (for ever|without bound)") as caught:
            make(*given)
        assert all(bound in str(caught.value) for bound in BOUNDS)


@pytest.mark.parametrize("name", ["expire_after_access", "expire_after_write", "max_rows", "max_bytes"])
def test_a_bound_is_not_negative(name: str) -> None:
    """The builder takes 0 and more, and says which bound was wrong."""
    for wrong in (-1, math.nan):
        with pytest.raises(ValueError, match=name):
            getattr(DefaultLookupCacheBuilder(), name)(wrong)
    getattr(DefaultLookupCacheBuilder(), name)(0).build()
