"""The cache in memory answers as an ordered dictionary would that knows the same bounds, and as FLIP-221 says: how good it is."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pyarrow as pa
import pytest

from pyspark_lookup.cache.memory import KEY_INDEX
from pyspark_lookup.columnar.keys import Numbers
from tests.caching.common import cache_of, counts, opened

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
