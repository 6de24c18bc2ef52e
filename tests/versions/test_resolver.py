"""Versions: who says which one is current, what it costs, and what this host remembers."""

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup.errors import (
    DamagedFileError,
    TableBusyError,
    TableEmptyError,
    UfsNotFoundError,
    UfsUnavailableError,
)
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.sources.registry import parse_options
from pyspark_lookup.storage.block_cache import BlockCache
from pyspark_lookup.storage.stores import ListedFiles
from pyspark_lookup.versions.executions import Execution
from pyspark_lookup.versions.model import Table, TableVersion
from tests.support.fakes import FakeClock, Host, make_host

_serial = itertools.count()


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": [1], "text": [text + "x" * next(_serial)]}), path)
    return path


def options(path: Path) -> LookupOptions:
    return parse_options({"path": str(path)})


def cached(path: Path, interval: str) -> LookupOptions:
    source = {"lookup.metadata.source": "CACHE", "lookup.metadata.sync-interval": interval}
    return parse_options({"path": str(path), **source})


class Dim:
    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path / "dim"
        self.cache_dir = tmp_path / "cache"
        self.clock = FakeClock()
        for name in "abc":
            write(self.path / f"{name}.parquet")
        self.options = options(self.path)
        self.host = self.process()
        self.table: Table | None = None

    def process(self, clock: FakeClock | None = None, boot: str = "boot-1") -> Host:
        return make_host(str(self.path), self.cache_dir, clock or self.clock, boot=boot)

    def discover(self, opts: LookupOptions | None = None) -> TableVersion:
        self.table, version = self.host.resolver.discover(opts or self.options)
        return version

    def resolve(
        self, opts: LookupOptions | None = None, host: Host | None = None, execution: Execution | None = None
    ) -> TableVersion:
        return (host or self.host).resolver.resolve(self.table, opts or self.options, execution).version

    def change(self, name: str = "a") -> None:
        write(self.path / f"{name}.parquet")


@pytest.fixture
def dim(tmp_path: Path) -> Dim:
    return Dim(tmp_path)


def names(version: TableVersion) -> list[str]:
    return [Path(file.url).name for file in version.files]


def test_one_execution_sees_one_version_and_asks_once(dim: Dim) -> None:
    """The first resolver of an execution records its version; later ones take it, whatever changed since."""
    second, execution = dim.process(), Execution("app", "execution 1")
    dim.discover()
    first = dim.host.resolver.resolve(dim.table, dim.options, execution)
    dim.change()
    repeated = second.resolver.resolve(dim.table, dim.options, execution)
    assert (repeated.version, first.decided_here, repeated.decided_here) == (first.version, True, False)
    assert second.store.calls == []
    assert second.metrics.snapshot()["resolutionReuseCount"] == 1
    for another_execution in (Execution("app", "execution 2"), Execution("other app", "execution 1")):
        assert dim.resolve(host=second, execution=another_execution) != first.version


def test_cache_mode_makes_no_call_within_its_interval(dim: Dim) -> None:
    """`>0`: at most that old since it was learned, by a clock that is not stepped; `-1`: kept for ever; `0`: asked at every query."""
    opts = cached(dim.path, "10 s")
    first = dim.discover(opts)
    dim.change()
    for step_s in (-3600.0, 7200.0, 0.0, -3600.0):
        dim.clock.wall_s += step_s
        dim.clock.tick(2.5)
        assert dim.resolve(opts) == first
        assert dim.discover(opts) == first
    assert dim.host.store.kinds() == ["status"]
    dim.clock.tick(0.1)
    assert dim.resolve(opts) != first
    assert dim.host.store.kinds() == ["status", "list"]
    assert dim.host.metrics.snapshot()["metadataCacheCount"] == 8
    never, always = cached(dim.path, "-1"), cached(dim.path, "0")
    second = dim.resolve(never)
    dim.change()
    dim.clock.tick(1e9)
    assert dim.resolve(never) == second
    assert dim.resolve(always) == dim.resolve(always) != second
    assert dim.host.store.kinds() == ["status", "list", "list", "list"]


def test_of_workers_that_begin_at_once_one_asks(dim: Dim, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of a new host wait for the first of them, and find its records. On a host that knows the table, none waits."""
    opts, second, third = cached(dim.path, "10 s"), dim.process(), dim.process()
    acquire, locks = second.disk.acquire, []

    def wait(kind: str, name: str, timeout_s: float) -> object:
        locks.append(kind)
        if kind == "discover":
            dim.discover(opts)
        return acquire(kind, name, timeout_s)

    for host in (second, third):
        monkeypatch.setattr(host.disk, "acquire", wait)
        host.resolver.discover(opts)
        assert host.store.calls == []
    assert (dim.host.store.kinds(), locks) == (["status"], ["discover"])


def test_another_boot_is_not_trusted_for_an_age(dim: Dim) -> None:
    """After a reboot the steady clock starts anew, so a known version's age is unknown, and it is not newer either: the store is asked."""
    opts, clock = cached(dim.path, "1 h"), FakeClock()
    first = dim.discover(opts)
    dim.change()
    second = dim.resolve(opts, dim.process(boot="boot-2"))
    assert second != first
    dim.change()
    clock.steady_s = 1.0
    assert dim.resolve(host=dim.process(clock, "boot-3")) not in (first, second)


def test_who_knows_a_version_knows_its_files(dim: Dim, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version's files are on record before its digest is: as soon as that is, another process answers from it without a call."""
    second = dim.process()
    dim.discover()
    dim.change()
    succeed_record = dim.host.disk.succeed_record
    versions: list[TableVersion] = []

    def put_and_look(*args: object) -> bool:
        is_recorded = succeed_record(*args)  # type: ignore[arg-type]
        versions.append(dim.resolve(cached(dim.path, "-1"), second))
        return is_recorded

    monkeypatch.setattr(dim.host.disk, "succeed_record", put_and_look)
    assert [dim.resolve()] == versions
    assert second.store.calls == []


def test_the_version_of_another_table_is_none_of_this_one(dim: Dim) -> None:
    """A digest, as a version token brings it, of a table that this host knows as well."""
    other_path = write(dim.path.with_name("other") / "a.parquet").parent
    version = dim.discover()
    _, foreign = dim.host.resolver.discover(options(other_path))
    assert dim.host.resolver.current_versions.find_recorded(dim.table, version.digest) == version
    assert dim.host.resolver.current_versions.find_recorded(dim.table, foreign.digest) is None


def test_who_does_not_get_the_lock_takes_what_was_decided_first(dim: Dim, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that resolves an execution beside another, as the lock was held for too long, reads the version of the first on record."""
    fast, execution = dim.process(), Execution("app", "execution 1")
    dim.discover()
    monkeypatch.setattr(dim.host.disk, "acquire", lambda kind, name, timeout_s: None)
    first: list[TableVersion] = []

    def meanwhile(kind: str, subject: object) -> None:
        if not first:
            first.append(dim.resolve(host=fast, execution=execution))
            dim.change()

    dim.host.store.before = meanwhile
    resolution = dim.host.resolver.resolve(dim.table, dim.options, execution)
    assert ([resolution.version], resolution.decided_here) == (first, False)


def test_cache_mode_keeps_the_last_version_through_states_that_are_none(dim: Dim) -> None:
    """Moved away or emptied: UFS mode raises, CACHE mode keeps the last version and counts it; a store that fails is an error."""
    opts = cached(dim.path, "0")
    first = dim.discover(opts)
    shutil.move(dim.path, dim.path.with_name("moved"))
    with pytest.raises(UfsNotFoundError):
        dim.resolve()
    assert dim.resolve(opts) == first
    dim.path.mkdir()
    with pytest.raises(TableEmptyError):
        dim.resolve()
    assert dim.resolve(opts) == dim.discover(opts) == first
    assert dim.host.metrics.snapshot()["keptVersionCount"] == 3
    dim.host.store.before = mock.Mock(side_effect=UfsUnavailableError("down"))
    with pytest.raises(UfsUnavailableError):
        dim.resolve(opts)


def test_a_slow_listing_cannot_take_the_host_back(dim: Dim) -> None:
    """Monotonic reads: of two overlapping resolutions the one that started later wins, whatever finishes last."""
    fast = dim.process()
    dim.discover()
    answers: list[TableVersion] = []
    listed = dim.host.store._inner.list_status

    def interleave(path: str, count: Callable[[str], None]) -> object:
        listing = listed(path, count)  # the old state …
        dim.change()
        dim.clock.tick(1)
        answers.append(dim.resolve(host=fast))  # … and meanwhile another query saw the new one
        return listing

    dim.host.store._inner.list_status = interleave  # type: ignore[method-assign,assignment]
    assert dim.resolve() == answers[0]
    assert dim.resolve(cached(dim.path, "-1"), fast) == answers[0]


def test_a_version_that_does_not_change_is_recorded_now_and_then(dim: Dim) -> None:
    """Often enough for who asks whether the table was here lately, and at each refresh of CACHE mode, which asks how old it is."""
    dim.discover()
    kinds: list[str] = []
    for seconds, options in ((30, None), (29, None), (2, None), (30, None), (1, cached(dim.path, "1 s")), (1, None)):
        before = dim.host.resolver.host._newest(dim.table)[0]
        dim.clock.tick(seconds)
        dim.resolve(options)
        kinds.append("recorded" if dim.host.resolver.host._newest(dim.table)[0] > before else "")
    assert kinds == ["", "", "recorded", "", "recorded", ""]


def test_settle_waits_for_quiet_without_sleeping_too_long(dim: Dim) -> None:
    """`lookup.settle`: a version whose newest file is younger waits until it is not; busy for long is an error."""
    newest = max(file.stat().st_mtime for file in dim.path.iterdir())
    dim.clock.wall_s = newest + 4
    opts = parse_options({"path": str(dim.path), "lookup.settle": "10 s", "lookup.on-busy": "FAIL"})
    dim.discover(opts)
    assert dim.clock.slept == pytest.approx([6.0], abs=0.01)
    dim.clock.wall_s = newest + 100
    dim.resolve(opts)
    assert len(dim.clock.slept) == 1

    def keep_writing(kind: str, subject: object) -> None:
        os.utime(dim.path / "a.parquet", (dim.clock.wall_s, dim.clock.wall_s))

    dim.host.store.before = keep_writing
    with pytest.raises(TableBusyError, match=r"lookup\.settle"):
        dim.resolve(opts)


def test_a_listing_that_lost_files_is_confirmed(dim: Dim) -> None:
    """Files gone and none new may be a job that has begun to overwrite: the version is one after which no more went."""
    dim.discover()
    (dim.path / "a.parquet").unlink()
    store = dim.host.store
    store.calls.clear()

    def remove_more(kind: str, subject: object) -> None:
        if len(store.calls) == 2:
            (dim.path / "b.parquet").unlink()

    store.before = remove_more
    version = dim.resolve()
    assert (names(version), store.kinds(), dim.clock.slept) == (["c.parquet"], ["list"] * 3, [1.0, 1.0])
    assert dim.resolve() == version
    assert store.kinds() == ["list"] * 4
    (dim.path / "c.parquet").unlink()
    with pytest.raises(TableEmptyError):
        dim.resolve()


def test_a_streaming_sinks_log_decides_which_files_count(dim: Dim) -> None:
    """`_spark_metadata` is honoured: uncommitted files are not read, a compact log stands for all before it."""
    (dim.path / "_spark_metadata").mkdir()

    def commit(entry: str, *names: str) -> None:
        lines = [json.dumps({"path": f"file://{dim.path}/{name}", "size": 1, "action": "add"}) for name in names]
        (dim.path / "_spark_metadata" / entry).write_text("\n".join(["v1", *lines]))

    commit("0", "a.parquet")
    assert names(dim.discover()) == ["a.parquet"]
    commit("1.compact", "a.parquet", "b.parquet")
    commit("2", "c.parquet")
    assert names(dim.resolve()) == ["a.parquet", "b.parquet", "c.parquet"]
    dim.host.store.calls.clear()
    dim.resolve()
    assert dim.host.store.kinds() == ["list"]


@pytest.mark.parametrize("least", [0, 10**6], ids=["columns", "objects"])
def test_markers_of_databricks_jobs_decide_which_files_count(
    dim: Dim, monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    """Files of jobs on Databricks count from their commit until another job has removed them. Markers are about one directory."""
    monkeypatch.setattr(ListedFiles, "least", least)

    def mark(name: str, added: object = (), removed: object = ()) -> None:
        (dim.path / name).write_text(json.dumps({"added": added, "removed": removed}))

    def shown() -> set[str]:
        return {file.url.partition("/dim/")[2] for file in dim.discover().files}

    first, second, failed, third = (f"part-{n}-x.parquet" for n in ("0-tid-1", "0-tid-2", "1-tid-2", "0-tid-3"))
    files = {first, second, failed, third, f"d/{first}", f"d/{second}"}
    for name in files:
        write(dim.path / name)
    files |= {"a.parquet", "b.parquet", "c.parquet"}
    assert shown() == files  # without markers
    (dim.path / "_started_2").touch()
    (dim.path / "_committed_2").touch()  # an empty one does not count
    assert shown() == files - {second, failed}
    mark("_committed_2", [second], [first, "a.parquet"])
    files -= {failed, first, "a.parquet"}
    assert shown() == files
    dim.host.store.calls.clear()
    assert shown() == files
    assert dim.host.store.kinds() == ["status"]  # markers are read once
    mark("_committed_vacuum9", [], [third, "_started_2"])
    (dim.path / "_started_2").unlink()
    assert shown() == files - {third}
    (dim.path / "_committed_by_etl").write_text("run 17")  # no marker
    assert shown() == files - {third}
    mark("_committed_5")
    real = BlockCache.read

    def read(self: BlockCache, requests: Any) -> Any:
        (dim.path / "_committed_5").unlink(missing_ok=True)  # by VACUUM, since it was listed
        return real(self, requests)

    with monkeypatch.context() as patched:
        patched.setattr(BlockCache, "read", read)
        assert shown() == files - {third}
    mark("_committed_4", "x")
    with pytest.raises(DamagedFileError, match="_committed_4 is damaged: it does not say which files"):
        shown()


def test_a_version_too_new_to_keep_settles(dim: Dim) -> None:
    """Files as new as the clock's granule are not kept; the same version, remembered for 2 s, is."""
    dim.clock.wall_s = max(file.stat().st_ctime for file in dim.path.iterdir())
    opts = cached(dim.path, "-1")
    version = dim.discover(opts)
    for current in (version, dim.resolve(opts)):
        assert not all(file.cacheable for file in current.files)
    dim.clock.tick(2.1)
    assert dim.resolve(opts) == version
    assert all(file.cacheable for file in dim.resolve(opts).files)
    assert len(dim.host.store.calls) == 1
    rebooted = dim.process(boot="boot-2")
    assert not all(file.cacheable for file in dim.resolve(opts, rebooted).files)
