"""The partial cache: tables of files."""

import os
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.support.full_cache import EACH, publish
from tests.support.partial_cache import BOUND_S, COUNTERS, Dim


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for number in range(10):
        publish(tmp_path / "dim", number, 1, rows=20)
    return tmp_path / "dim"


FIRSTS = [number * EACH for number in range(10)]


def test_a_commit_to_one_end_leaves_the_rest_warm(directory: Path, cache_dir: Path) -> None:
    """When the last of ten files is replaced, its keys are loaded anew by one data request; the others are carried over."""
    dim = Dim(directory, cache_dir)
    assert [row["version"] for row in dim.check({"id": FIRSTS})] == [1] * 10
    assert dim.metric("loadCount") == 10
    second = Dim(directory, cache_dir, clock=dim.host.clock)
    assert second.count_growth(lambda: second.get(*FIRSTS), *COUNTERS) == (10, 0, 0, 0)
    publish(directory, 9, 2, rows=20)
    for table in (dim, second):
        table.fetched()
        calls = table.calls(lambda table=table: table.get(*FIRSTS))  # type: ignore[misc]
        assert table.fetched() == ({"9.parquet"} if table is dim else set())
        assert calls.count("get") == (1 if table is dim else 0)
        assert [row["version"] for row in table.check({"id": FIRSTS})] == [1] * 9 + [2]
    # The other one takes over what the first one loaded, and what neither of the versions can differ in.
    assert (dim.metric("sharedCarriedOverCount"), second.metric("sharedCarriedOverCount")) == (9, 9)
    assert (dim.metric("loadCount"), second.metric("loadCount")) == (11, 0)


def test_what_a_batch_of_keys_costs(tmp_path: Path, cache_dir: Path) -> None:
    """Cold: one request for each touched row group and column at most, many at once; warm, and in another process: no data."""
    noise = pa.array([os.urandom(1100) for _ in range(4000)])
    path = publish(tmp_path / "dim", 0, 1, rows=4000, columns={"noise": noise}) / "0.parquet"
    dim, ids = Dim(path, cache_dir), range(7, 4000, 400)  # neighbours would share a request
    dim.check({"id": []})  # the footer
    requests: list[Any] = []
    together = threading.Event()

    def meet(kind: str, subject: Any) -> None:
        if kind == "get":
            requests.append(subject)
            if len(requests) == 4:
                together.set()
            assert together.wait(BOUND_S)

    dim.host.store.before = meet
    assert dim.versions(*ids) == [1] * len(ids)
    assert 4 <= len(requests) <= 4 * len(ids)
    assert sum(length for _, _, length in requests) < path.stat().st_size / 2
    for process in (dim, Dim(path, cache_dir, clock=dim.host.clock)):
        assert process.calls(lambda process=process: process.versions(*ids)) == ["head"] * 2  # type: ignore[misc]


def test_scans_leave_the_cache_as_it_is(directory: Path, cache_dir: Path) -> None:
    """A scan that does not say which keys it wants neither asks the cache nor fills it; one that does, does."""
    dim = Dim(directory, cache_dir)
    dim.get(0, 500)
    before = sorted(path.name for path in (cache_dir / "v1" / "snapshots").glob("*/*"))

    assert dim.count_growth(dim.matching, "hitCount", "missCount", "loadCount") == (0, 0, 0)
    assert len(dim.matching()) == 200
    assert len(dim.matching("id > 10 AND id < 15")) == 4
    assert (dim.metric("hitCount"), dim.metric("missCount")) == (0, 2)
    assert sorted(path.name for path in (cache_dir / "v1" / "snapshots").glob("*/*")) == before
    assert dim.count_growth(lambda: dim.get(0, 500), "hitCount", "missCount", "loadCount") == (2, 0, 0)
    where = "id IN (0, 500, 1000)"
    assert dim.count_growth(lambda: dim.matching(where), "hitCount", "missCount", "loadCount") == (2, 1, 1)
    assert dim.count_growth(lambda: dim.matching(where), "hitCount", "missCount", "loadCount") == (3, 0, 0)
    assert len(dim.matching(where)) == 3
