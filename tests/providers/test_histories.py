"""Tables of other systems: any history."""

from __future__ import annotations

import itertools
import random
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspark_lookup.base.errors import LookupFunctionError
from tests.fuzzing import MORE
from tests.providers.common import FLIP, ONCE, PARTIAL, SCHEMA, Desk, made, pairs, rows_of

IDS = st.integers(0, 12) | st.none()


@settings(max_examples=25 * MORE, deadline=None)
@given(
    batches=st.lists(st.lists(IDS, max_size=8), min_size=1, max_size=6),
    rows=st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["x", "y", ""])), max_size=12),
    size=st.integers(1, 4),
    kind=st.sampled_from(["sync", "async"]),
    seed=st.integers(0, 99),
    fails=st.sets(st.integers(0, 8), max_size=3),
)
def test_any_history(
    batches: list[list[int | None]],
    rows: list[tuple[int, str]],
    size: int,
    kind: str,
    seed: int,
    fails: set[int],
) -> None:
    """Whatever is asked and fails in whatever pieces: answers are those of a dictionary, each key is loaded until it is held, counters add up."""
    held: dict[int, list[str]] = {}
    for key, name in rows:
        held.setdefault(key, []).append(name)
    shuffled = random.Random(seed)
    calls = itertools.count()

    def answer(keys: pa.Table) -> pa.Table:
        if next(calls) in fails:
            raise OSError("down")
        order = rows_of(held)(keys).column("id").to_pylist()
        shuffled.shuffle(order)
        left = {key: iter(held[key]) for key in order}
        return pa.table({"id": order, "name": [next(left[key]) for key in order]}, schema=SCHEMA)

    function = made(kind, answer, size)
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as monkeypatch:
        desk = Desk(Path(directory) / "cache", monkeypatch)
        table = desk.serve(function, {**PARTIAL, **ONCE})
        known: set[int] = set()
        hits = misses = failures = 0
        for batch in batches:
            valid = [key for key in batch if key is not None]
            new = set(valid) - known
            misses, hits = misses + len(new), hits + len(valid) - len(new)
            expected = [(n, name) for n, key in enumerate(batch) for name in held.get(key, ())]  # type: ignore[arg-type]
            before = len(function.log.asked)
            try:
                assert pairs(table, *batch) == expected
                known |= new
                assert sorted(itertools.chain(*function.log.asked[before:])) == sorted(new)
            except LookupFunctionError:
                failures += len(new)
            assert all(len(keys) <= size for keys in function.log.asked)
        metrics = table.metrics()
        assert [metrics[name] for name in FLIP] == [hits, misses, misses - failures, failures]
        if batches and any(key is not None for batch in batches for key in batch):
            assert metrics["numCachedRecords"] == sum(max(len(held.get(key, ())), 1) for key in known)
        desk.close()
