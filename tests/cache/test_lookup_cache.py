"""`KeyLookupCache`: what a cache of one key at a time is called with."""

import datetime
from typing import Any

import pyarrow as pa

from pyspark_lookup.cache.memory import KEY_INDEX
from tests.support.memory_cache import Dictionary, opened

DAY = datetime.date(2026, 1, 1)
BEFORE_YEAR_1 = -(10**6)  # days since 1970


def make_dates(days: list[int | None]) -> pa.Array:
    return pa.array(days, pa.int32()).view(pa.date32())


def test_dates_that_python_does_not_have() -> None:
    """Keys with a date before the year 1 are misses, and so are keys one of whose rows has such a date; nulls are never passed on either."""
    calls: list[Any] = []

    class Recorder(Dictionary):
        def invalidate(self, key: Any) -> None:
            calls.append(dict(key))
            super().invalidate(key)

    cache, _ = opened(Recorder())
    day = (DAY - datetime.date(1970, 1, 1)).days
    keys = pa.table({"d": make_dates([day, BEFORE_YEAR_1, day + 1])})
    rows = pa.table({
        "since": make_dates([day, day, day, BEFORE_YEAR_1]),
        KEY_INDEX: pa.array([0, 1, 2, 2], pa.int64()),
    })  # fmt: skip
    cache.put({"d": DAY + datetime.timedelta(1)}, [{"since": DAY}])
    cache.put_many(keys, rows)
    for answer in (cache.get_many(keys), cache.peek_many(keys)):
        assert answer.present.tolist() == [True, False, False]
        assert answer.rows is not None
        assert answer.rows.to_pylist() == [{"since": DAY, KEY_INDEX: 0}]
    assert calls == [{"d": DAY + datetime.timedelta(1)}]
    cache.invalidate_many(pa.table({"d": make_dates([BEFORE_YEAR_1, None, day])}))
    assert calls[1:] == [{"d": DAY}]
    assert cache.entries == {}
