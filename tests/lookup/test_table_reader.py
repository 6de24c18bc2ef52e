"""A planned read while its table changes: one version whole, or the named error, never a mixture."""

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup.errors import VersionGoneError
from pyspark_lookup.lookup.read import ReadPlan, ReadTask
from pyspark_lookup.versions.executions import Execution
from tests.support.fakes import FakeClock, Host, make_host

ROWS = 20_000


def publish(path: Path, version: int, rows: int = ROWS, group: int = 2_000) -> None:
    """Put version `version` of a table in place by rename: every row says its version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = pa.array([os.urandom(24) for _ in range(rows)])
    table = pa.table({"id": range(rows), "version": pa.array([version] * rows, pa.int32()), "noise": noise})
    temporary = path.with_name(f".{path.name}.new")
    pq.write_table(table, temporary, row_group_size=group)
    os.replace(temporary, path)


def rewrite_in_place(path: Path, version: int) -> None:
    """The same through the open file, as a careless writer does it."""
    new_path = path.with_name(f".{path.name}.other")
    publish(new_path, version)
    path.write_bytes(new_path.read_bytes())
    new_path.unlink()


SMALL = {"scan.split-size": "1 MiB"}


def versions(host: Host, plan: ReadPlan, task: ReadTask, execution: Execution | None = None) -> tuple[set[int], int]:
    """(versions among the rows, number of rows) of one task."""
    versions_read: set[int] = set()
    rows = 0
    for batch in host.reader.read(plan, task, execution):
        versions_read.update(batch.column("version").unique().to_pylist())
        rows += batch.num_rows
    return versions_read, rows


@pytest.mark.parametrize("change", [publish, rewrite_in_place])
def test_one_task_scan_starts_over_at_every_point(tmp_path: Path, change: Callable[[Path, int], None]) -> None:
    """A file replaced before any of its reads gives new rows, and whole ones; after the last one, at the first batch, the old ones."""
    path = tmp_path / "dim.parquet"
    point = calls = 0
    while point <= calls:
        host = make_host(str(path), None)
        publish(path, 0)
        plan, (task,) = host.planned(path)
        host.store.calls.clear()

        def replace(kind: str, subject: object, host: Host = host, point: int = point) -> None:
            if len(host.store.calls) == point:
                change(path, point)

        host.store.before = replace
        if point == 0:
            batches = host.reader.read(plan, task, None)
            calls = len(host.store.calls)
            assert calls > 2
            change(path, 1)
            assert {v for batch in batches for v in batch.column("version").unique().to_pylist()} == {0}
            assert len(host.store.calls) == calls
        else:
            assert versions(host, plan, task) == ({point}, ROWS), f"changed before call {point}"
        point += 1


def test_planning_starts_over_when_a_file_changes(tmp_path: Path) -> None:
    """A file replaced before its footer is read: the plan is the new version's; where it happens each time, the end is VersionGoneError."""
    path = tmp_path / "dim.parquet"
    publish(path, 0)
    host = make_host(str(path), None)

    def replace(kind: str, subject: object) -> None:
        if len(host.store.calls) == 2:
            pq.write_table(pa.table({"other": [1]}), path)

    host.store.before = replace
    plan, (task,) = host.planned(path)
    assert plan.projection.columns.names == ["other"]
    publish(path, 1)  # a version whose columns are not known yet
    host.store.before = lambda kind, subject: publish(path, 1) if kind == "get" else None
    with pytest.raises(VersionGoneError, match="during each of"):
        host.planned(path)
    with pytest.raises(VersionGoneError, match="during each of"):
        versions(host, plan, task)


@pytest.mark.parametrize("choice", ["NEWER", "FAIL"])
def test_who_lost_its_version_follows_the_option(tmp_path: Path, cache_dir: Path, choice: str) -> None:
    """NEWER reads a file that was replaced whole and new; FAIL, or a file that is gone, is an error; for all tasks of an execution."""
    whole, path = tmp_path / "dim", tmp_path / "dim.parquet"
    for number in range(4):
        publish(whole / f"{number}.parquet", 0, rows=24_000)
    publish(path, 0)
    host, first, second = make_host(str(whole), None), *(make_host(str(path), cache_dir) for _ in range(2))
    plan, tasks = host.planned(whole, SMALL | {"on-version-gone": choice})
    # Shares are equal in bytes, and so are the files: each task has one whole file.
    assert [[piece.whole for piece in task.pieces or ()] for task in tasks] == [[True]] * 4
    shared, (alone,) = first.planned(path, {"on-version-gone": choice})
    execution = Execution("app", "1")
    first.resolver.resolve(shared.table, shared.options, execution)
    publish(whole / "3.parquet", 9, rows=24_000)
    publish(path, 1)
    if choice == "NEWER":
        assert versions(host, plan, tasks[3]) == ({9}, 24_000)
        for process in (second, first):  # the record moved on
            assert versions(process, shared, alone, execution) == ({1}, ROWS)
    else:
        for process, old_plan, task in ((host, plan, tasks[3]), (second, shared, alone)):
            with pytest.raises(VersionGoneError):
                versions(process, old_plan, task, execution)
    (whole / "2.parquet").unlink()
    with pytest.raises(VersionGoneError):
        versions(host, plan, tasks[2])


@pytest.mark.parametrize(
    ("more", "cached", "expected"),
    [
        ({}, True, {1}),
        ({"version-at": "PLAN"}, True, {0}),
        (SMALL | {"version-at": "READ"}, True, {1}),
        (SMALL, True, {0}),
        *((SMALL | {"on-version-gone": choice}, False, set()) for choice in ("NEWER", "FAIL")),
    ],
    ids=str,
)
def test_who_resolves(tmp_path: Path, cache_dir: Path, more: dict[str, str], cached: bool, expected: set[int]) -> None:
    """AUTO: a one-task scan follows its table, a split one is read from this host's blocks, or fails; PLAN freezes, READ lets follow."""
    path = tmp_path / "dim.parquet"
    publish(path, 0, rows=60_000)
    host = make_host(str(path), cache_dir if cached else None)
    plan, tasks = host.planned(path, more)
    assert (len(tasks) > 1) is ("scan.split-size" in more)
    for task in tasks if cached else tasks[:1]:
        assert versions(host, plan, task)[0] == {0}
    publish(path, 1, rows=60_000)
    host.store.calls.clear()
    if not expected:
        with pytest.raises(VersionGoneError, match="files with new names"):
            versions(host, plan, tasks[1])
        assert host.metrics.snapshot()["versionGoneCount"] >= 1
        return
    answers = [versions(host, plan, task, Execution("app", "1")) for task in tasks]
    assert (set().union(*(part for part, _ in answers)), sum(rows for _, rows in answers)) == (expected, 60_000)
    assert host.store.kinds().count("head") == (expected == {1})  # once per execution and host
    assert expected == {1} or not host.store.calls


def test_a_plan_of_another_host(tmp_path: Path, cache_dir: Path) -> None:
    """How old it is, nobody can tell by another host's clock: a file that was too new when it was planned is not kept."""
    path = tmp_path / "dim.parquet"
    publish(path, 0, rows=60_000)
    clock, ahead = FakeClock(path.stat().st_mtime), FakeClock(path.stat().st_mtime + 3600)
    plan, (first, *_) = make_host(str(path), None, clock).planned(path, SMALL)
    for boot, is_kept in (("boot-2", False), ("boot-1", True)):
        ahead.steady_s += 3600
        assert versions(make_host(str(path), cache_dir, ahead, boot=boot), plan, first)[0] == {0}
        assert any((cache_dir / "v1/blocks").glob("*/*")) is is_kept
