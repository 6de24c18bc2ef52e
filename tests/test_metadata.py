"""Versions: who says which one is current, what it costs, and what this host remembers."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup.base.errors import TableBusyError, TableEmptyError, UfsNotFoundError, UfsUnavailableError
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.table.executions import Execution
from pyspark_lookup.table.model import Table, TableVersion
from tests.fakes import FakeClock, Host, make_host

_serial = itertools.count()


def write(path: Path, text: str = "") -> Path:
    """A small parquet file; each has another size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": [1], "text": [text + "x" * next(_serial)]}), path)
    return path


def options(path: Path) -> LookupOptions:
    return LookupOptions.parse({"path": str(path)})


def cached(path: Path, interval: str) -> LookupOptions:
    return LookupOptions.parse(
        {"path": str(path), "lookup.metadata.source": "CACHE", "lookup.metadata.sync-interval": interval}
    )


def resolve(host: Host, table: Table, opts: LookupOptions, execution: Execution | None = None) -> TableVersion:
    return host.resolver.resolve(table, opts, execution).version


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A table of three files."""
    for name in "abc":
        write(tmp_path / "dim" / f"{name}.parquet")
    return tmp_path / "dim"


def test_a_file_costs_one_head_and_a_directory_one_list(tmp_path: Path, cache_dir: Path) -> None:
    """Planning makes one metadata call, each execution one more: a HEAD of a file, a LIST of a directory."""
    single = write(tmp_path / "one.parquet")
    write(tmp_path / "dim" / "a.parquet")
    write(tmp_path / "dim" / "b.parquet")
    for path, kind, counter in ((single, "head", "ufsHeadCount"), (tmp_path / "dim", "list", "ufsListCount")):
        host = make_host(str(path), cache_dir)
        opts = options(path)
        table, planned = host.resolver.discover(opts)
        assert host.store.kinds() == ["status"]
        assert host.metrics.snapshot()[counter] == 1
        assert resolve(host, table, opts) == planned
        assert host.store.kinds() == ["status", kind]
        assert host.metrics.snapshot()[counter] == 2
        assert host.metrics.snapshot()["ufsGetCount"] == 0


def test_one_execution_sees_one_version_and_asks_once(directory: Path, cache_dir: Path) -> None:
    """The first resolver of an execution records its version; later ones take it, whatever changed since."""
    first, second = make_host(str(directory), cache_dir), make_host(str(directory), cache_dir)
    opts = options(directory)
    table, _ = first.resolver.discover(opts)
    execution = Execution("app", "execution 1")
    one = first.resolver.resolve(table, opts, execution)
    write(directory / "a.parquet")
    again = second.resolver.resolve(table, opts, execution)
    assert again.version == one.version
    assert one.decided_here
    assert not again.decided_here
    assert second.store.calls == []
    assert second.metrics.snapshot()["resolutionReuseCount"] == 1
    assert resolve(second, table, opts, Execution("app", "execution 2")) != one.version
    assert resolve(second, table, opts, Execution("other app", "execution 1")) != one.version


def test_cache_mode_makes_no_call_within_its_interval(directory: Path, cache_dir: Path) -> None:
    """`>0`: at most that old, counted from when it was learned, never from its last use."""
    clock = FakeClock()
    host = make_host(str(directory), cache_dir, clock)
    opts = cached(directory, "10 s")
    table, first = host.resolver.discover(opts)
    write(directory / "a.parquet")
    for _ in range(4):
        clock.tick(2.5)
        assert resolve(host, table, opts) == first
        assert host.resolver.discover(opts)[1] == first
    assert host.store.kinds() == ["status"]
    clock.tick(0.1)
    second = resolve(host, table, opts)
    assert second != first
    assert host.store.kinds() == ["status", "list"]
    assert host.metrics.snapshot()["metadataCacheCount"] == 8


def test_sync_interval_minus_one_never_asks_and_zero_always_does(directory: Path, cache_dir: Path) -> None:
    """`-1` keeps the first version for ever, `0` asks at every query."""
    host = make_host(str(directory), cache_dir)
    never, always = cached(directory, "-1"), cached(directory, "0")
    table, first = host.resolver.discover(never)
    write(directory / "a.parquet")
    host.clock.tick(1e9)
    assert resolve(host, table, never) == first
    assert host.store.kinds() == ["status"]
    assert resolve(host, table, always) != first
    resolve(host, table, always)
    assert host.store.kinds() == ["status", "list", "list"]


def test_a_stepped_wall_clock_does_not_extend_the_interval(directory: Path, cache_dir: Path) -> None:
    """Wall clock stepped by an hour either way: neither stale beyond the bound nor asked too early."""
    clock = FakeClock()
    host = make_host(str(directory), cache_dir, clock)
    opts = cached(directory, "10 s")
    table, first = host.resolver.discover(opts)
    for step in (-3600.0, 7200.0):
        clock.wall_s += step
        assert resolve(host, table, opts) == first
    assert len(host.store.calls) == 1
    write(directory / "a.parquet")
    clock.wall_s -= 3600.0
    clock.steady_s += 10.1
    assert resolve(host, table, opts) != first


def test_another_boot_is_not_trusted_for_an_age(directory: Path, cache_dir: Path) -> None:
    """After a reboot the steady clock starts anew, so a known version's age is unknown: the store is asked."""
    opts = cached(directory, "1 h")
    table, first = make_host(str(directory), cache_dir).resolver.discover(opts)
    write(directory / "a.parquet")
    rebooted = make_host(str(directory), cache_dir, boot="boot-2")
    assert resolve(rebooted, table, opts) != first


def test_what_was_learned_before_a_reboot_is_not_newer(directory: Path, cache_dir: Path) -> None:
    """The steady clock starts anew and shows less than before: what the store says now counts all the same."""
    opts = options(directory)
    table, first = make_host(str(directory), cache_dir).resolver.discover(opts)
    write(directory / "a.parquet")
    clock = FakeClock()
    clock.steady_s = 1.0
    rebooted = make_host(str(directory), cache_dir, clock, boot="boot-2")
    assert resolve(rebooted, table, opts) != first


def test_who_knows_a_version_knows_its_files(directory: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are on record before its digest is: in the moment it is, another process answers from it without a call."""
    first, second = make_host(str(directory), cache_dir), make_host(str(directory), cache_dir)
    opts = options(directory)
    table, _ = first.resolver.discover(opts)
    write(directory / "a.parquet")
    assert first.disk is not None
    put = first.disk.succeed_record
    seen: list[TableVersion] = []

    def put_and_look(*args: object) -> bool:
        done = put(*args)  # type: ignore[arg-type]
        seen.append(resolve(second, table, cached(directory, "-1")))
        return done

    monkeypatch.setattr(first.disk, "succeed_record", put_and_look)
    assert [resolve(first, table, opts)] == seen
    assert second.store.calls == []


def test_the_version_of_another_table_is_none_of_this_one(tmp_path: Path, cache_dir: Path) -> None:
    """A digest, as a version token brings it, of a table that this host knows as well."""
    one, other = (write(tmp_path / name / "a.parquet").parent for name in ("one", "other"))
    host = make_host(str(tmp_path), cache_dir)
    table, version = host.resolver.discover(options(one))
    _, foreign = host.resolver.discover(options(other))
    assert host.resolver.version_of(table, version.digest) == version
    assert host.resolver.version_of(table, foreign.digest) is None


def test_who_does_not_get_the_lock_takes_what_was_decided_first(
    directory: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that resolves an execution beside another, as the lock was held for too long, reads the version of the first on record."""
    slow, fast = make_host(str(directory), cache_dir), make_host(str(directory), cache_dir)
    opts = options(directory)
    table, _ = slow.resolver.discover(opts)
    execution = Execution("app", "execution 1")
    monkeypatch.setattr(slow.disk, "acquire", lambda kind, name, timeout_s: None)
    first: list[TableVersion] = []

    def meanwhile(kind: str, subject: object) -> None:
        if not first:
            first.append(resolve(fast, table, opts, execution))
            write(directory / "a.parquet")

    slow.store.before = meanwhile
    resolution = slow.resolver.resolve(table, opts, execution)
    assert [resolution.version] == first
    assert not resolution.decided_here


def test_cache_mode_keeps_the_last_version_through_states_that_are_none(directory: Path, cache_dir: Path) -> None:
    """A directory that is moved away or emptied: UFS mode raises, CACHE mode keeps the last version and counts it."""
    host = make_host(str(directory), cache_dir)
    kept, current = cached(directory, "0"), options(directory)
    table, first = host.resolver.discover(kept)
    moved = directory.with_name("moved")
    shutil.move(directory, moved)
    with pytest.raises(UfsNotFoundError):
        resolve(host, table, current)
    assert resolve(host, table, kept) == first
    directory.mkdir()
    with pytest.raises(TableEmptyError):
        resolve(host, table, current)
    assert resolve(host, table, kept) == first
    assert host.resolver.discover(kept)[1] == first
    assert host.metrics.snapshot()["keptVersionCount"] == 3


def test_cache_mode_does_not_hide_a_failing_store(directory: Path, cache_dir: Path) -> None:
    """An expired version whose refresh fails at the store is an error, not an older answer."""
    host = make_host(str(directory), cache_dir)
    opts = cached(directory, "10 s")
    table, _ = host.resolver.discover(opts)
    host.clock.tick(11)

    def fail(kind: str, subject: object) -> None:
        raise UfsUnavailableError("down")

    host.store.before = fail
    with pytest.raises(UfsUnavailableError):
        resolve(host, table, opts)


def test_a_slow_listing_cannot_take_the_host_back(directory: Path, cache_dir: Path) -> None:
    """Monotonic reads: of two overlapping resolutions the one that started later wins, whatever finishes last."""
    clock = FakeClock()
    slow, fast = make_host(str(directory), cache_dir, clock), make_host(str(directory), cache_dir, clock)
    opts = options(directory)
    table, _ = slow.resolver.discover(opts)
    answers: list[TableVersion] = []
    listed = slow.store._inner.list_status

    def interleave(path: str, count: Callable[[str], None]) -> object:
        listing = listed(path, count)  # the old state …
        write(directory / "a.parquet")
        clock.tick(1)
        answers.append(resolve(fast, table, opts))  # … and meanwhile another query saw the new one
        return listing

    slow.store._inner.list_status = interleave  # type: ignore[method-assign,assignment]
    assert resolve(slow, table, opts) == answers[0]
    assert resolve(fast, table, cached(directory, "-1")) == answers[0]


def test_settle_waits_for_quiet_without_sleeping_too_long(directory: Path, cache_dir: Path) -> None:
    """`lookup.settle`: a version whose newest file is younger waits until it is not; busy for long is an error."""
    newest = max(file.stat().st_mtime for file in directory.iterdir())
    clock = FakeClock(wall_s=newest + 4)
    host = make_host(str(directory), cache_dir, clock)
    opts = LookupOptions.parse({"path": str(directory), "lookup.settle": "10 s", "lookup.on-busy": "FAIL"})
    table, _ = host.resolver.discover(opts)
    assert clock.slept == pytest.approx([6.0], abs=0.01)
    clock.wall_s = newest + 100
    resolve(host, table, opts)
    assert len(clock.slept) == 1

    def write_on(kind: str, subject: object) -> None:
        os.utime(directory / "a.parquet", (clock.wall_s, clock.wall_s))

    host.store.before = write_on
    with pytest.raises(TableBusyError, match=r"lookup\.settle"):
        resolve(host, table, opts)


def test_a_listing_that_lost_files_is_confirmed(directory: Path, cache_dir: Path) -> None:
    """Files gone and none new may be a job that has begun to overwrite: the version is one after which no more went."""
    host = make_host(str(directory), cache_dir)
    opts = options(directory)
    table, _ = host.resolver.discover(opts)
    (directory / "a.parquet").unlink()
    host.store.calls.clear()

    def go_on(kind: str, subject: object) -> None:
        if len(host.store.calls) == 2:
            (directory / "b.parquet").unlink()

    host.store.before = go_on
    version = resolve(host, table, opts)
    assert [Path(file.url).name for file in version.files] == ["c.parquet"]
    assert host.store.kinds() == ["list", "list", "list"]
    assert host.clock.slept == [1.0, 1.0]
    assert resolve(host, table, opts) == version
    assert host.store.kinds() == ["list"] * 4
    (directory / "c.parquet").unlink()
    with pytest.raises(TableEmptyError):
        resolve(host, table, opts)


def test_success_file_is_required_when_asked_for(directory: Path, cache_dir: Path) -> None:
    """`lookup.success-file=true` refuses a directory without `_SUCCESS`."""
    host = make_host(str(directory), cache_dir)
    opts = LookupOptions.parse({"path": str(directory), "lookup.success-file": "true"})
    with pytest.raises(TableBusyError, match="_SUCCESS"):
        host.resolver.discover(opts)
    (directory / "_SUCCESS").touch()
    assert len(host.resolver.discover(opts)[1].files) == 3


def test_a_streaming_sinks_log_decides_which_files_count(directory: Path, cache_dir: Path) -> None:
    """`_spark_metadata` is honoured: uncommitted files are not read, a compact log stands for all before it."""
    log = directory / "_spark_metadata"
    log.mkdir()

    def entries(*names: str) -> str:
        lines = [json.dumps({"path": f"file://{directory}/{name}", "size": 1, "action": "add"}) for name in names]
        return "\n".join(["v1", *lines])

    (log / "0").write_text(entries("a.parquet"))
    host = make_host(str(directory), cache_dir)
    opts = options(directory)
    table, version = host.resolver.discover(opts)
    assert [Path(file.url).name for file in version.files] == ["a.parquet"]
    (log / "1.compact").write_text(entries("a.parquet", "b.parquet"))
    (log / "2").write_text(entries("c.parquet"))
    assert [Path(file.url).name for file in resolve(host, table, opts).files] == [f"{n}.parquet" for n in "abc"]
    host.store.calls.clear()
    resolve(host, table, opts)
    assert host.store.kinds() == ["list"]


def test_a_broken_cache_directory_costs_calls_not_answers(directory: Path, cache_dir: Path) -> None:
    """With the cache directory removed, or none at all, every resolution asks the store and is right."""
    host = make_host(str(directory), cache_dir)
    opts = options(directory)
    table, _ = host.resolver.discover(opts)
    shutil.rmtree(cache_dir)
    write(directory / "a.parquet")
    version = resolve(host, table, opts, Execution("app", "e"))
    assert version == make_host(str(directory), None).resolver.discover(opts)[1]
    assert host.metrics.snapshot()["cacheFailureCount"] > 0
    uncached = make_host(str(directory), None)
    assert resolve(uncached, table, cached(directory, "-1")) == version


def test_known_versions_are_those_this_host_resolved(directory: Path, cache_dir: Path) -> None:
    """`known_versions`: one row per version in the order of resolution, with its files and bytes."""
    host = make_host(str(directory), cache_dir)
    opts = options(directory)
    first = host.resolver.discover(opts)[1]
    host.clock.tick(5)
    write(directory / "d.parquet")
    second = host.resolver.discover(opts)[1]
    rows = host.resolver.host.known_versions(opts)
    assert [row["digest"] for row in rows] == [first.digest, second.digest]
    assert rows[1]["files"] == 4
    assert rows[1]["bytes"] == second.bytes


def test_proposals_three_cases_in_calls(directory: Path, cache_dir: Path) -> None:
    """Alluxio's table: an action that asks the status n times costs n get_meta and 1 get_blocks_and_locations;
    a listing costs 1 call to the store and none to the cache; our own query costs 1 + 1."""
    file = str(directory / "a.parquet")
    for asked in (2, 3):  # `fs head`, and `head` through fuse
        host = make_host(file, cache_dir)
        for _ in range(asked):
            version = host.ufs.get_meta(file)
        location = host.blocks.get_blocks_and_locations(version.url, version)
        host.blocks.read([(location, [(0, 16)])])
        counts = host.metrics.snapshot()
        assert (counts["ufsHeadCount"], counts["getBlocksAndLocationsCount"]) == (asked, 1)
    host = make_host(file, cache_dir)
    host.ufs.list_status(str(directory))
    counts = host.metrics.snapshot()
    assert (counts["ufsListCount"], counts["ufsHeadCount"], counts["getBlocksAndLocationsCount"]) == (1, 0, 0)


def test_a_version_too_new_to_keep_settles(directory: Path, cache_dir: Path) -> None:
    """Files as new as the clock's granule are not kept; the same version, remembered for 2 s, is."""
    newest = max(file.stat().st_ctime for file in directory.iterdir())
    clock = FakeClock(wall_s=newest)
    host = make_host(str(directory), cache_dir, clock)
    opts = cached(directory, "-1")
    table, version = host.resolver.discover(opts)
    assert not all(file.cacheable for file in version.files)
    assert not all(file.cacheable for file in resolve(host, table, opts).files)
    clock.tick(2.1)
    assert resolve(host, table, opts) == version
    assert all(file.cacheable for file in resolve(host, table, opts).files)
    assert len(host.store.calls) == 1
    rebooted = make_host(str(directory), cache_dir, clock, boot="boot-2")
    assert not all(file.cacheable for file in resolve(rebooted, table, opts).files)
