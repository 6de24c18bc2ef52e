"""The partial cache: tables of files."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.fakes import FakeClock
from tests.support.full_cache import EACH, publish
from tests.support.partial_cache import BOUND_S, COUNTERS, Dim


def put_file(path: Path, **columns: Any) -> None:
    """A parquet file in place by rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.new"
    pq.write_table(pa.table(columns), temporary)
    os.replace(temporary, path)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A sorted table of ten files in version 1."""
    for number in range(10):
        publish(tmp_path / "dim", number, 1, rows=20)
    return tmp_path / "dim"


FIRSTS = [number * EACH for number in range(10)]


def test_a_commit_to_one_end_leaves_the_rest_warm(directory: Path, cache_dir: Path) -> None:
    """When the last of ten files is replaced, its keys are loaded anew by one data request; the others are carried over."""
    dim = Dim(directory, cache_dir)
    assert [row["version"] for row in dim.check({"id": FIRSTS})] == [1] * 10
    assert dim.metric("loadCount") == 10
    other = Dim(directory, cache_dir, clock=dim.host.clock)
    assert other.grown(lambda: other.get(*FIRSTS), *COUNTERS) == (10, 0, 0, 0)
    publish(directory, 9, 2, rows=20)
    for table in (dim, other):
        table.fetched()
        calls = table.calls(lambda table=table: table.get(*FIRSTS))  # type: ignore[misc]
        assert table.fetched() == ({"9.parquet"} if table is dim else set())
        assert calls.count("get") == (1 if table is dim else 0)
        assert [row["version"] for row in table.check({"id": FIRSTS})] == [1] * 9 + [2]
    # The other one takes over what the first one loaded, and what neither of the versions can differ in.
    assert (dim.metric("sharedCarriedOverCount"), other.metric("sharedCarriedOverCount")) == (9, 9)
    assert (dim.metric("loadCount"), other.metric("loadCount")) == (11, 0)


def test_what_a_batch_of_keys_costs(tmp_path: Path, cache_dir: Path) -> None:
    """Cold: one request for each touched row group and column at most, many at once; warm, and in another process: no data."""
    noise = pa.array([os.urandom(1100) for _ in range(4000)])
    path = publish(tmp_path / "dim", 0, 1, rows=4000, columns={"noise": noise}) / "0.parquet"
    dim, wanted = Dim(path, cache_dir), range(7, 4000, 400)  # neighbours would share a request
    dim.check({"id": []})  # the footer
    asked: list[Any] = []
    together = threading.Event()

    def meet(kind: str, subject: Any) -> None:
        if kind == "get":
            asked.append(subject)
            if len(asked) == 4:
                together.set()
            assert together.wait(BOUND_S)

    dim.host.store.before = meet
    assert dim.versions(*wanted) == [1] * len(wanted)
    assert 4 <= len(asked) <= 4 * len(wanted)
    assert sum(length for _, _, length in asked) < path.stat().st_size / 2
    for process in (dim, Dim(path, cache_dir, clock=dim.host.clock)):
        assert process.calls(lambda process=process: process.versions(*wanted)) == ["head"] * 2  # type: ignore[misc]


def test_files_that_are_too_new_are_not_cached(directory: Path, cache_dir: Path) -> None:
    """While the state of a file may still be another's, keys are answered from the files each time, and counted so: each different one."""
    clock = FakeClock(wall_s=(directory / "7.parquet").stat().st_ctime)
    dim = Dim(directory, cache_dir, clock=clock)
    for count in (1, 2):
        assert [row["version"] for row in dim.check({"id": [0, 500, 7, 500, None]})] == [1, 1, 1, 1]
        assert (dim.metric("missCount"), dim.metric("hitCount"), dim.metric("loadCount")) == (
            3 * count,
            count,
            3 * count,
        )
    assert list((cache_dir / "v1" / "snapshots").iterdir()) == []
    clock.tick(10)
    for _ in range(2):
        dim.check({"id": [0, 500, 7]})
    assert (dim.metric("missCount"), dim.metric("hitCount"), dim.metric("loadCount")) == (9, 5, 9)


def test_a_change_in_another_partition(tmp_path: Path, cache_dir: Path) -> None:
    """What becomes of partitions that are not read costs nothing."""
    put_file(tmp_path / "dim" / "dt=2" / "a.parquet", id=[1, 2], v=[3, 4])
    dim = Dim(tmp_path / "dim", cache_dir, {"lookup.partition": "max_pt()"})
    dim.check({"id": [1, 2, 3]})
    put_file(tmp_path / "dim" / "dt=1" / "a.parquet", id=[2, 3], v=[1, 2])
    assert dim.grown(lambda: dim.check({"id": [1, 2, 3]}), *COUNTERS) == (3, 0, 0, 0)


def test_scans_leave_the_cache_as_it_is(directory: Path, cache_dir: Path) -> None:
    """A scan that does not say which keys it wants neither asks the cache nor fills it; one that does, does."""
    dim = Dim(directory, cache_dir)
    dim.get(0, 500)
    before = sorted(path.name for path in (cache_dir / "v1" / "snapshots").glob("*/*"))

    assert dim.grown(dim.matching, "hitCount", "missCount", "loadCount") == (0, 0, 0)
    assert len(dim.matching()) == 200
    assert len(dim.matching("id > 10 AND id < 15")) == 4
    assert (dim.metric("hitCount"), dim.metric("missCount")) == (0, 2)
    assert sorted(path.name for path in (cache_dir / "v1" / "snapshots").glob("*/*")) == before
    assert dim.grown(lambda: dim.get(0, 500), "hitCount", "missCount", "loadCount") == (2, 0, 0)
    where = "id IN (0, 500, 1000)"
    assert dim.grown(lambda: dim.matching(where), "hitCount", "missCount", "loadCount") == (2, 1, 1)
    assert dim.grown(lambda: dim.matching(where), "hitCount", "missCount", "loadCount") == (3, 0, 0)
    assert len(dim.matching(where)) == 3


def test_one_cache_for_all_predicates(directory: Path, cache_dir: Path) -> None:
    """Rows are kept whatever lookup.where says, so they answer under another predicate as well."""
    plain, some = Dim(directory, cache_dir), Dim(directory, cache_dir, {"lookup.where": "text LIKE '1-xx%'"})
    assert [(row["id"], row["text"]) for row in some.get(0, 2, 503)] == [(2, "1-xx"), (503, "1-xxx")]
    assert plain.grown(lambda: plain.check({"id": [0, 2, 503]}), *COUNTERS[:3]) == (3, 0, 0)


def test_a_file_that_is_replaced_during_a_load(directory: Path, cache_dir: Path) -> None:
    """A load that finds its file replaced is done again from the new version; nothing of the old one is kept under it."""
    dim = Dim(directory, cache_dir, {"lookup.on-version-gone": "NEWER"})
    dim.get(0)
    shutil.rmtree(cache_dir / "v1" / "blocks")
    (cache_dir / "v1" / "blocks").mkdir()

    def replace(kind: str, subject: Any) -> None:
        if kind == "get" and subject[0].endswith("/1.parquet"):
            dim.host.store.before = lambda kind, subject: None
            publish(directory, 1, 2, rows=20)

    dim.host.store.before = replace
    assert [row["version"] for row in dim.get(0, 500)] == [1, 2]
    assert dim.metric("versionGoneCount") == 1
    assert dim.metric("loadCount") + dim.metric("numLoadFailures") == dim.metric("missCount")
    for _ in range(2):
        assert [row["version"] for row in dim.check({"id": [0, 500]})] == [1, 2]
