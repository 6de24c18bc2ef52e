"""The partial cache: tables of files."""

from __future__ import annotations

import decimal
import os
import random
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup.base.errors import UfsUnavailableError
from pyspark_lookup.engine import planner
from pyspark_lookup.engine.lookup import read_rows
from pyspark_lookup.engine.plan import ReadTask
from pyspark_lookup.io.context import in_thread
from tests.fakes import FakeClock, Host, make_host
from tests.partial.common import BOUND_S, COUNTERS, Dim
from tests.test_claims import run_all
from tests.test_full_cache import EACH, publish


def put_file(path: Path, **columns: Any) -> None:
    """A parquet file in place by rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.new"
    pq.write_table(pa.table(columns), temporary)
    os.replace(temporary, path)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A sorted table of a hundred files in version 1."""
    for number in range(100):
        publish(tmp_path / "dim", number, 1, rows=20)
    return tmp_path / "dim"


FIRSTS = [number * EACH for number in range(100)]


def test_a_commit_to_one_end_leaves_the_rest_warm(directory: Path, cache_dir: Path) -> None:
    """When the last of a hundred files is replaced, its keys are loaded anew by one data request; the others are carried over."""
    dim = Dim(directory, cache_dir)
    assert [row["version"] for row in dim.check({"id": FIRSTS})] == [1] * 100
    assert dim.metric("loadCount") == 100
    other = Dim(directory, cache_dir, clock=dim.host.clock)
    assert other.grown(lambda: other.get(*FIRSTS), *COUNTERS) == (100, 0, 0, 0)
    publish(directory, 99, 2, rows=20)
    for table in (dim, other):
        table.fetched()
        calls = table.calls(lambda table=table: table.get(*FIRSTS))  # type: ignore[misc]
        assert table.fetched() == ({"99.parquet"} if table is dim else set())
        assert calls.count("get") == (1 if table is dim else 0)
        assert [row["version"] for row in table.check({"id": FIRSTS})] == [1] * 99 + [2]
    # The other one takes over what the first one loaded, and what neither of the versions can differ in.
    assert (dim.metric("sharedCarriedOverCount"), other.metric("sharedCarriedOverCount")) == (99, 99)
    assert (dim.metric("loadCount"), other.metric("loadCount")) == (101, 0)
    publish(directory, 100, 3, rows=20)
    keys = [*FIRSTS, 100 * EACH]
    assert dim.grown(lambda: dim.check({"id": keys}), "hitCount", "missCount") == (100, 1)
    (directory / "100.parquet").unlink()
    assert dim.grown(lambda: dim.check({"id": keys}), "hitCount", "missCount") == (100, 1)


def test_keys_without_rows_are_carried_over_with_care(directory: Path, cache_dir: Path) -> None:
    """That a key has no rows holds for a new version only if no new file can have it."""
    dim = Dim(directory, cache_dir)
    keys = {"id": [EACH + 30, 100 * EACH + 3]}
    assert dim.check(keys) == []
    publish(directory, 100, 2, rows=20)
    assert dim.grown(lambda: dim.check(keys), *COUNTERS) == (1, 1, 1, 1)
    assert [row["id"] for row in dim.rows(keys)] == [100 * EACH + 3]


def test_the_latest_partition(tmp_path: Path, cache_dir: Path) -> None:
    """With max_pt() rows come from the latest partition, whatever was cached of the one before."""
    path = tmp_path / "dim"
    put_file(path / "dt=1" / "a.parquet", id=[1, 2, 3], v=[11, 12, 13])
    dim = Dim(path, cache_dir, {"lookup.partition": "max_pt()"})
    keys = {"id": [1, 2, 3, 9]}
    assert [(row["v"], row["dt"]) for row in dim.check(keys)] == [(11, 1), (12, 1), (13, 1)]
    put_file(path / "dt=2" / "a.parquet", id=[2, 3, 4], v=[22, 23, 24])
    assert [(row["v"], row["dt"]) for row in dim.check(keys)] == [(22, 2), (23, 2)]
    put_file(path / "dt=1" / "b.parquet", id=[2, 9], v=[0, 0])  # of no matter
    assert dim.grown(lambda: dim.check(keys), *COUNTERS) == (4, 0, 0, 0)
    shutil.rmtree(path / "dt=2")
    assert [row["v"] for row in dim.check(keys)] == [11, 12, 0, 13, 0]


def test_files_that_are_too_new_are_not_cached(directory: Path, cache_dir: Path) -> None:
    """While the state of a file may still be another's, keys are answered from the files each time, and counted so."""
    clock = FakeClock(wall_s=(directory / "7.parquet").stat().st_ctime)
    dim = Dim(directory, cache_dir, clock=clock)
    for count in (1, 2):
        assert [row["version"] for row in dim.check({"id": [0, 500, 7]})] == [1, 1, 1]
        assert (dim.metric("missCount"), dim.metric("hitCount"), dim.metric("loadCount")) == (3 * count, 0, 3 * count)
    assert list((cache_dir / "v1" / "snapshots").iterdir()) == []
    clock.tick(10)
    for _ in range(2):
        dim.check({"id": [0, 500, 7]})
    assert (dim.metric("missCount"), dim.metric("hitCount"), dim.metric("loadCount")) == (9, 3, 9)


@pytest.mark.parametrize("is_first", [True, False], ids=["one file", "all files"])
def test_a_key_column_that_becomes_wider(tmp_path: Path, cache_dir: Path, is_first: bool) -> None:
    """When whole numbers become longer ones, all keys are right, the old ones and those that only the new type has."""
    path = tmp_path / "dim"
    for name in ("a", "b"):
        put_file(path / f"{name}.parquet", id=pa.array([1, 2], pa.int32()), v=[f"{name}1", f"{name}2"])
    dim = Dim(path, cache_dir)
    dim.check({"id": [1, 2, 3]})
    for name in ("b",) if is_first else ("a", "b"):
        put_file(path / f"{name}.parquet", id=pa.array([2, 3, 2**40], pa.int64()), v=[f"{name}2", f"{name}3", "far"])
    keys = {"id": [1, 2, 3, 2**40]}
    for _ in range(2):
        dim.host.clock.tick(2)
        assert "far" in [row["v"] for row in dim.check(keys)]
    for name in ("a", "b"):
        put_file(path / f"{name}.parquet", id=pa.array([1, 2], pa.int32()), v=[f"{name}1", f"{name}2"])
    for _ in range(2):
        dim.host.clock.tick(2)
        dim.check({"id": [1, 2, 3]})


def test_a_key_column_that_becomes_text(tmp_path: Path, cache_dir: Path) -> None:
    """When a table is written anew with text for its numbers, lookups go on, seconds later as well."""
    put_file(tmp_path / "dim" / "a.parquet", id=[1, 2], v=[1, 2])
    dim = Dim(tmp_path / "dim", cache_dir)
    dim.check({"id": [1]})
    put_file(tmp_path / "dim" / "a.parquet", id=["a", "b"], v=[1, 2])
    for _ in range(2):
        assert [row["v"] for row in dim.check({"id": ["b"]})] == [2]
        dim.host.clock.tick(2)


def test_a_key_column_that_becomes_a_number(tmp_path: Path, cache_dir: Path) -> None:
    """When text keys become numbers, what the host shares is still merged."""
    put_file(tmp_path / "dim" / "a.parquet", id=["a", "b"], v=[1, 2])
    dim = Dim(tmp_path / "dim", cache_dir)
    dim.check({"id": ["a"]})
    put_file(tmp_path / "dim" / "a.parquet", id=range(20), v=range(20))
    for number in range(10):
        dim.check({"id": [number]})
    for _, run in dim.later.waiting:
        run()
    assert dim.metric("sharedMergeCount") == 1


def test_a_column_that_only_another_partition_has(tmp_path: Path, cache_dir: Path) -> None:
    """A column that the latest partition lacks is null there, as without a cache."""
    put_file(tmp_path / "dim" / "dt=1" / "a.parquet", id=[1, 2], v=[1, 2], more=[5, 6])
    put_file(tmp_path / "dim" / "dt=2" / "a.parquet", id=[1, 2], v=[3, 4])
    dim = Dim(tmp_path / "dim", cache_dir, {"lookup.partition": "max_pt()"})
    assert dim.check({"id": [2]}) == [{"id": 2, "v": 4, "more": None, "dt": 2, "key_index": 0}]


def test_a_column_that_comes_with_another_partition(tmp_path: Path, cache_dir: Path) -> None:
    """When a file of an older partition brings a column, rows that are cached of the latest one get it, too."""
    put_file(tmp_path / "dim" / "dt=2" / "a.parquet", id=[1, 2], v=[3, 4])
    dim = Dim(tmp_path / "dim", cache_dir, {"lookup.partition": "max_pt()"})
    assert len(dim.check({"id": [2]})) == 1
    put_file(tmp_path / "dim" / "dt=1" / "a.parquet", id=[1, 2], v=[1, 2], more=[5, 6])
    assert dim.check({"id": [2]}) == [{"id": 2, "v": 4, "more": None, "dt": 2, "key_index": 0}]


def test_a_key_that_gets_another_scale_with_another_partition(tmp_path: Path, cache_dir: Path) -> None:
    """When a file of an older partition gives the key a finer scale, 0.100 does not find the rows of 1.00."""
    number = decimal.Decimal
    put_file(tmp_path / "dim" / "dt=2" / "a.parquet", id=pa.array([number("1.00")], pa.decimal128(5, 2)), v=[1])
    dim = Dim(tmp_path / "dim", cache_dir, {"lookup.partition": "max_pt()"})
    assert len(dim.check({"id": pa.array([number("1.00")], pa.decimal128(5, 2))})) == 1
    put_file(tmp_path / "dim" / "dt=1" / "a.parquet", id=pa.array([number("5.000")], pa.decimal128(7, 3)), v=[5])
    keys = {"id": pa.array([number("1.00"), number("0.100")], pa.decimal128(7, 3))}
    assert [row["v"] for row in dim.check(keys)] == [1]


def test_scans_leave_the_cache_as_it_is(directory: Path, cache_dir: Path) -> None:
    """A scan that does not say which keys it wants neither asks the cache nor fills it; one that does, does."""
    dim = Dim(directory, cache_dir)
    dim.get(0, 500)
    before = sorted(path.name for path in (cache_dir / "v1" / "snapshots").glob("*/*"))

    def scan(**more: str) -> int:
        options = dim.options.overridden(more)
        found = planner.find(dim.host.reader, options, dim.table)
        plan = planner.plan_read(found, options, planner.table_columns(found, options), dim.host.clock.host())
        return sum(batch.num_rows for batch in read_rows(dim.host.reader, plan, ReadTask(0, 1), None))

    assert dim.grown(scan, "hitCount", "missCount", "loadCount") == (0, 0, 0)
    assert scan() == 2000
    assert scan(**{"lookup.where": "id > 10 AND id < 15"}) == 4
    assert (dim.metric("hitCount"), dim.metric("missCount")) == (0, 2)
    assert sorted(path.name for path in (cache_dir / "v1" / "snapshots").glob("*/*")) == before
    assert dim.grown(lambda: dim.get(0, 500), "hitCount", "missCount", "loadCount") == (2, 0, 0)
    where = {"lookup.where": "id IN (0, 500, 1000)"}
    assert dim.grown(lambda: scan(**where), "hitCount", "missCount", "loadCount") == (2, 1, 1)
    assert dim.grown(lambda: scan(**where), "hitCount", "missCount", "loadCount") == (3, 0, 0)
    assert scan(**where) == 3


def test_one_cache_for_all_predicates(directory: Path, cache_dir: Path) -> None:
    """Rows are kept whatever lookup.where says, so they answer under another predicate as well."""
    plain, some = Dim(directory, cache_dir), Dim(directory, cache_dir, {"lookup.where": "text LIKE '1-xx%'"})
    assert [(row["id"], row["text"]) for row in some.get(0, 2, 503)] == [(2, "1-xx"), (503, "1-xxx")]
    assert plain.grown(lambda: plain.check({"id": [0, 2, 503]}), *COUNTERS[:3]) == (3, 0, 0)


def test_a_store_that_fails(directory: Path, cache_dir: Path) -> None:
    """What cannot be read is told to the caller, counted, and read the next time; what is warm is not read."""
    dim = Dim(directory, cache_dir)
    dim.get(0)
    shutil.rmtree(cache_dir / "v1" / "blocks")
    (cache_dir / "v1" / "blocks").mkdir()

    def fail(kind: str, subject: object) -> None:
        if kind == "get":
            raise UfsUnavailableError("injected")

    dim.host.store.before = fail
    assert [row["version"] for row in dim.get(0)] == [1]
    with pytest.raises(UfsUnavailableError):
        dim.get(0, 500, 1000)
    assert (dim.metric("hitCount"), dim.metric("missCount"), dim.metric("loadCount")) == (2, 3, 1)
    assert dim.metric("numLoadFailures") == 2
    dim.host.store.before = lambda kind, subject: None
    assert len(dim.check({"id": [0, 500, 1000]})) == 3


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


def test_real_threads_and_merges(directory: Path, cache_dir: Path) -> None:
    """With merges in threads of their own, many small loads are answered rightly and become few files."""
    host: Host = make_host(str(directory), cache_dir, FakeClock(), start=in_thread)
    dim = Dim(directory, cache_dir, {"lookup.partial-cache.max-rows": "50"})
    dim.host = host

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(25):
            ids = [rng.choice(FIRSTS) + rng.randrange(30) for _ in range(3)]
            assert [row["id"] for row in dim.get(*ids)] == [i for i in ids if i % EACH < 20]

    run_all(*(lambda seed=seed: work(seed) for seed in range(3)))  # type: ignore[misc]
    for thread in threading.enumerate():
        if "-merge-" in thread.name:
            thread.join(BOUND_S)
    assert host.metrics.snapshot()["sharedEvictedCount"] > 0
    assert host.metrics.snapshot()["cacheFailureCount"] == host.metrics.snapshot()["snapshotDamagedCount"] == 0
    assert Counter(path.suffix for path in (cache_dir / "v1" / "snapshots").glob("*/*"))[".used"] <= 10
