"""Options of the full cache: bad values, and combinations in which one would be ignored or lacks another."""

from __future__ import annotations

import pytest

from pyspark_lookup.errors import OptionError
from pyspark_lookup.sources.registry import parse_options

FULL = "lookup.full-cache."
PATH = {"path": "/t", "lookup.cache": "FULL"}
CACHE = {**PATH, "lookup.metadata.source": "CACHE"}
PERIODIC = {**CACHE, FULL + "periodic-reload.interval": "1 min"}
TIMED = {**CACHE, FULL + "reload-strategy": "TIMED", FULL + "timed-reload.iso-time": "10:15"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        # Bad values, with the FLIP's words.
        ({**CACHE, FULL + "periodic-reload.interval": "0 s"}, [FULL + "periodic-reload.interval", "greater than zero"]),

        ({**TIMED, FULL + "timed-reload.interval-in-days": "0"}, ["interval-in-days = '0'", "at least 1 day"]),

        ({**TIMED, FULL + "timed-reload.iso-time": "10"}, ["iso-time = '10'", "ISO time"]),

        ({**CACHE, FULL + "reload-strategy": "a b:c"}, ["module:factory"]),
        ({**PERIODIC, FULL + "max-staleness": "0 s"}, ["greater than zero"]),
        ({**PERIODIC, FULL + "blackout": "6-8"}, [FULL + "blackout"]),
        # Wrong cache or strategy, missing parts.
        ({"path": "/t", FULL + "retain": "1 h"}, ["'NONE'", "set lookup.cache = 'FULL'"]),
        (CACHE, [f"option {FULL}periodic-reload.interval is missing"]),
        ({**CACHE, FULL + "reload-strategy": "TIMED"}, [f"option {FULL}timed-reload.iso-time is missing"]),

        ({**TIMED, FULL + "periodic-reload.interval": "1 min"}, ["periodic-reload.interval", "set 'PERIODIC'"]),
        ({**PERIODIC, FULL + "timed-reload.iso-time": "10:15"}, ["timed-reload.iso-time", "set 'TIMED'"]),
        # Without a meaning.
        ({**PERIODIC, "lookup.metadata.sync-interval": "1 min"}, ["lookup.metadata.sync-interval", "reload strategy"]),
        ({**PATH, FULL + "on-reload-failure": "FAIL"}, ["on-reload-failure", "'UFS'"]),

        ({**PATH, FULL + "blackout": "22:00-06:00"}, ["blackout", "periodic-reload.interval"]),
        ({**PATH, FULL + "reload-jitter": "1 min"}, ["reload-jitter", "periodic-reload.interval"]),
        ({**PERIODIC, FULL + "reload-jitter": "61 s"}, ["reload-jitter = 61 s", "interval = 60 s", "at most that"]),
        ({**CACHE, FULL + "reload-strategy": "a:b", FULL + "reload-jitter": "1 s"}, ["reload-jitter", "'a:b'"]),
        ({**PERIODIC, FULL + "max-staleness": "30 s"}, ["max-staleness = 30 s", "less than"]),
    ],
)  # fmt: skip
def test_refusals(options: dict[str, str], words: list[str]) -> None:
    """A bad value or combination is refused by key and value, and the message says what to do."""
    with pytest.raises(OptionError) as caught:
        parse_options(options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_one_read_may_go_without_the_full_cache() -> None:
    """A read that says NONE, or UFS, of a table that is created as FULL in CACHE mode takes the rest with it."""
    table = PERIODIC | {FULL + "max-staleness": "1 h"}
    plain = parse_options({"lookup.cache": "NONE", "lookup.metadata.source": "UFS"}, table)
    assert not plain.full_cache.reloads
    fresh = parse_options({"lookup.metadata.source": "UFS"}, table)
    assert fresh.full_cache.max_staleness_s is None
    cached = parse_options({"lookup.cache": "NONE", "lookup.metadata.sync-interval": "5 s"}, table)
    assert cached.version.sync_interval_s == 5
