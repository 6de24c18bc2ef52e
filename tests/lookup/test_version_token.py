"""Versions told to the tasks of an execution: what announcing one costs and secures, and who can answer from it."""

import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pyspark_lookup.errors import VersionGoneError
from pyspark_lookup.versions.executions import Execution
from tests.support.fakes import FakeClock, Later
from tests.support.full_cache import publish
from tests.support.version_tokens import FAIL, FULL, NOTHING, ONE, PARTIAL, TWO, Process

SERVED = {**FULL, "lookup.metadata.source": "CACHE", "lookup.full-cache.periodic-reload.interval": "1 min"}
BOUND_S = 30.0  # far above what any of this takes


def write_dim(path: Path, version: int, *numbers: int) -> Path:
    """Files of a table in this version."""
    for number in numbers:
        publish(path, number, version)
    return path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A table of three files in version 1, some time older than what comes next."""
    path = write_dim(tmp_path / "dim", 1, 0, 1, 2)
    for file in path.iterdir():
        os.utime(file, (file.stat().st_atime, file.stat().st_mtime - 100))
    return path


@pytest.mark.parametrize(
    ("name", "first", "later"),
    [("0.parquet", ["status"], "head"), (".", ["status"], "list"), ("*.parquet", ["status", "list"], "list")],
    ids=["file", "directory", "glob"],
)
def test_announcing_costs_one_metadata_call(
    name: str, first: list[str], later: str, directory: Path, cache_dir: Path
) -> None:
    """Announcing costs one call to learn what a path is (two for a glob), then one of the cheaper sort; none where tasks of the host are told."""
    process = Process(directory / name, cache_dir)
    token = process.announce(ONE)
    assert [kind for kind in process.calls() if kind != "get"] == first
    assert process.announce(TWO) == token
    assert process.calls() == [later]
    assert process.announce(None) == token
    assert process.calls() == [later]
    task = Process(directory / name, cache_dir)
    assert task.receive(token) == process.receive(token)
    assert task.calls() == process.calls() == []


def test_bytes_that_were_too_new_to_keep_are_secured_later(directory: Path, cache_dir: Path) -> None:
    """A version that was announced while its files were new is secured by the next announcement that can keep it."""
    clock = FakeClock((directory / "2.parquet").stat().st_ctime)
    process = Process(directory, cache_dir, clock=clock)
    process.announce(ONE)
    clock.tick(60)
    token = process.announce(TWO)
    write_dim(directory, 2, 0, 1, 2)
    process.calls()
    assert process.states(token) == {1}
    assert process.calls() == []


@pytest.mark.parametrize("options", [NOTHING, PARTIAL, FULL], ids=["NONE", "PARTIAL", "FULL"])
def test_a_table_that_changes_meanwhile_is_announced_as_it_is_then(
    options: Mapping[str, str], directory: Path, cache_dir: Path
) -> None:
    """A file replaced while it is being secured: the newer version is announced, and is the execution's."""
    process = Process(directory, cache_dir, options)
    table, before = process.host.resolver.discover(process.options)
    process.replace_during_read(lambda: write_dim(directory, 2, 0, 1, 2))
    token = process.announce(ONE)
    assert token.digest != before.digest
    assert process.count_gone() == 1
    task = Process(directory, cache_dir, options)
    assert task.states(token) == {2}
    assert task.host.resolver.resolve(table, task.options, ONE).version.digest == token.digest
    assert task.calls() == []


@pytest.mark.parametrize(("age_s", "replaced"), [(0.0, False), (60.0, False), (1.0, True)])
def test_a_snapshot_is_built_before_it_is_announced(
    age_s: float, replaced: bool, directory: Path, cache_dir: Path
) -> None:
    """FULL: when tasks are told, the host has the snapshot, of files that are old enough, in the state that they have then."""
    clock = FakeClock(changed_s := max(file.stat().st_ctime for file in directory.iterdir()))
    clock.tick(age_s)
    process = Process(directory, cache_dir, FULL, clock)

    def replace() -> None:
        write_dim(directory, 2, 0, 1, 2)
        clock.wall_s = max(file.stat().st_ctime for file in directory.iterdir())

    if replaced:
        process.replace_during_read(replace)
    token = process.announce()
    assert changed_s < clock.wall_s
    assert bool(clock.slept) == (age_s < 60)
    task = Process(directory, cache_dir, FULL, clock)
    assert task.has_snapshot(token)
    assert task.calls() == []
    assert task.states(token) == {1 + replaced}


def test_a_version_that_is_served_is_announced_without_a_call(tmp_path: Path, cache_dir: Path) -> None:
    """FULL in CACHE mode: a host announces what it serves, whatever the store has; one that learns of the table later finds it."""
    path = tmp_path / "dim"
    for day in (1, 2):
        write_dim(path / f"day={day}", 1, day)
    for number, options in enumerate(({**SERVED, **FAIL, "lookup.partition": "max_pt()"}, SERVED)):
        first, second = (Process(path, cache_dir / str(number), options, start=Later()) for _ in range(2))
        token = first.announce(ONE)
        write_dim(path / "day=1", 1, 3 + number)
        first.calls()
        assert first.announce(TWO).digest == second.announce(Execution("app", "3")).digest == token.digest
        assert second.has_snapshot(token) or "lookup.partition" in options  # whose snapshot is of a part
        assert first.calls() == second.calls() == []
        process = Process(path, cache_dir.with_name("other-cache") / str(number), options, start=Later())
        assert process.receive(token)[1].digest == token.digest


@pytest.mark.parametrize(("name", "call"), [("0.parquet", "head"), (".", "list")])
def test_another_host_asks_once(name: str, call: str, directory: Path, cache_dir: Path) -> None:
    """A host that lacks the files lists once, however many of its tasks start together; without any files the version is gone (FAIL)."""
    token = Process(directory / name, cache_dir).announce()
    tasks = [Process(directory / name, cache_dir.with_name("other-cache")) for _ in range(4)]
    start = threading.Barrier(len(tasks))

    def find(task: Process) -> str:
        start.wait(BOUND_S)
        return task.receive(token)[1].digest

    with ThreadPoolExecutor(len(tasks)) as pool:
        assert set(pool.map(find, tasks)) == {token.digest}
    assert [kind for task in tasks for kind in task.calls()] == [call]
    assert sum(task.count_gone() for task in tasks) == 0
    for file in directory.iterdir():
        file.unlink()
    with pytest.raises(VersionGoneError, match="dim"):
        Process(directory / name, directory.with_name("late"), FAIL).receive(token)
