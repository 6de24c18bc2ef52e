"""The full cache: which snapshot answers in UFS and in CACHE mode, what a load fetches, what stays on disk."""

import errno
import itertools
import os
import threading
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import orc

from pyspark_lookup import LookupTable, errors
from pyspark_lookup.cache.full import snapshot as snapshot_module
from pyspark_lookup.cache.full.loader import SnapshotLoader
from pyspark_lookup.lookup import planner
from pyspark_lookup.lookup.read import ReadTask
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.options.reload_trigger import CacheReloadTrigger, LastReload
from pyspark_lookup.scan.formats import BATCH_ROWS
from pyspark_lookup.storage.disk import Disk, SegmentWriter
from tests.support.fakes import FakeClock, make_host, wait_until_settled
from tests.support.full_cache import CACHE, EACH, FULL, TIMED, WAIT, Table, publish
from tests.support.managed_tables import Site, site

__all__ = ["site"]
DAY_S, HOUR_S = 86400.0, 3600.0
STRATEGY = "lookup.full-cache.reload-strategy"
LIMITED = {**CACHE, "lookup.full-cache.max-staleness": "10 min"}
each_step = pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S], ids=["forward", "back"])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for number in range(10):
        publish(tmp_path / "dim", number, 1)
    return tmp_path / "dim"


def test_queries_and_builds(directory: Path, cache_dir: Path) -> None:
    """Once a process has built a version's snapshot no lookup reads data; a query waits for it during build-wait, then reads files."""
    table = Table(directory, cache_dir, {**FULL, "lookup.full-cache.build-wait": "0 s"})
    table.warm()
    for process in (table, Table(directory, cache_dir, FULL)):
        assert process.calls(lambda process=process: process.versions(3, 4999, 7000)) == ["list"] * 2  # type: ignore[misc]
        assert process.metrics("hitCount", "missCount", "numCachedRecords") == [3, 0, 5000]
        assert process.metric("numCachedBytes") > 0
    publish(directory, 0, 2)
    assert table.versions(3, 700) == [2, 1]
    assert table.metrics("snapshotReadThroughCount", "missCount") == [1, 2]
    assert len(table.later.waiting) == 1  # the build goes on beside the query
    table.later.loads()
    assert table.calls(lambda: table.versions(3)) == ["list"] * 2
    assert table.metric("snapshotReadThroughCount") == 1
    publish(directory, 0, 3)
    waiting = Table(directory, cache_dir, FULL)
    waiting.host = make_host(str(directory), cache_dir)  # one with threads
    assert waiting.versions(3, 700) == [3, 1]
    assert waiting.metrics("hitCount", "snapshotReadThroughCount") == [2, 0]


def test_values_that_are_one_key(tmp_path: Path, cache_dir: Path) -> None:
    """Values of an IN that are one key of the index, as NaN and NaN, or two texts of one float32, find its rows once."""
    path, ids = str(tmp_path / "a.parquet"), pa.array([0.1, float("nan"), 0.2], pa.float32())
    pq.write_table(pa.table({"id": ids, "n": [1, 2, 3]}), path)
    wait_until_settled(Path(path))
    two_nans, texts = "CAST('nan' AS FLOAT), CAST('nan' AS DOUBLE)", "0.2, 0.20000000298023224, 0.10000000149011612"
    with LookupTable(path, {**FULL, "lookup.cache.dir": str(cache_dir)}) as table:
        for values, expected in ((two_nans, [2]), (texts, [1, 3])):
            assert sorted(table.scan(predicate=f"id IN ({values})").column("n").to_pylist()) == expected


@pytest.mark.parametrize("options", [{**FULL, "lookup.full-cache.build-wait": "0 s"}, CACHE], ids=["UFS", "CACHE"])
def test_a_failing_build_does_not_fail_the_query(directory: Path, cache_dir: Path, options: dict[str, str]) -> None:
    """When a snapshot cannot be written the query reads the files, and the failure is counted."""
    table = Table(directory, cache_dir, options)
    snapshots = cache_dir / "v1" / "snapshots"
    snapshots.rmdir()
    snapshots.symlink_to("nowhere")
    with pytest.raises(OSError):
        table.full.reload()
    assert table.metric("numLoadFailures") == 1
    assert table.versions(3) == [1]
    assert table.metric("cacheFailureCount") > 0 or options is not CACHE


def test_what_a_change_makes_of_the_layers(directory: Path, cache_dir: Path) -> None:
    """Overlays replace those they hide, four become one, and a base takes the place of all once a quarter of it is hidden; no file is read twice."""
    table = Table(directory, cache_dir, FULL)
    table.warm()
    table.fetched()
    changes = [(0, EACH - n, 2) for n in range(5)] + [(1, EACH, 3), (2, EACH, 4), (3, EACH, 2)]
    for version, (number, rows, layers) in enumerate(changes, 2):
        publish(directory, number, version, rows=rows)
        snapshot = table.full.reload()
        assert len(snapshot.layers) == layers
        assert table.versions(number * EACH, 4999) == [version, 1]
        assert snapshot.rows == (5000 - EACH + rows if number == 0 else 5000 - 4)
        assert table.fetched() == {f"{number}.parquet"}
    table.later.loads()
    assert table.fetched() == set()
    assert table.metric("snapshotCompactionCount") == 1
    assert [layer.segment.rows for layer in table.full.reload().layers] == [5000 - 4]
    assert table.versions(0, 500, 1000, 1500, 2000) == [6, 7, 8, 9, 1]
    before = table.segments()
    for number in (0, 1):
        publish(directory, number, 10)
    table.down("1.parquet")
    with pytest.raises(errors.UfsUnavailableError):  # what fails half-way leaves all as it was
        table.full.reload()
    assert table.segments() == before
    assert list((cache_dir / "v1" / "tmp").iterdir()) == []
    table.up()
    table.warm()
    assert table.versions(0, 500) == [10, 10]


def test_a_record_of_another_release_is_replaced(directory: Path, cache_dir: Path) -> None:
    """A process that cannot read the record of a snapshot's version writes it anew, so the next process can."""
    table = Table(directory, cache_dir, FULL)
    table.warm()
    latest = table.full._stored.state().latest
    assert latest is not None
    table.full.disk.replace_record("snapshot", f"{table.full.key}-{latest.digest}", {"of": "another release"})
    failures = [table.metric("cacheFailureCount")]
    for _ in range(2):
        process = Table(directory, cache_dir, FULL)
        assert process.versions(3) == [1]
        failures.append(process.metric("cacheFailureCount"))
    assert (failures[1] > 0, failures[2]) == (True, 0)


def test_many_small_changes_write_few_rows(directory: Path, cache_dir: Path) -> None:
    """Instead of a fourth overlay, a reload rewrites the last one, and those before it that have less than four times the rows after them."""
    table = Table(directory, cache_dir, FULL)
    table.warm()
    sizes: dict[str, int] = {}
    for number in range(100, 160):
        publish(directory, number, 2, rows=1)
        snapshot = table.full.reload()
        latest = table.full._stored.state().latest
        assert latest is not None and len(snapshot.layers) <= 4
        sizes |= {layer.name: at.segment.rows for layer, at in zip(latest.layers, snapshot.layers, strict=True)}
        assert table.versions(0, 100 * EACH, number * EACH) == [1, 2, 2]
    assert sum(sizes.values()) - 5000 < 60 * 5  # 630 if it rewrote all three each time


@pytest.mark.parametrize(("batch_rows", "at_once"), [(BATCH_ROWS, 16 * BATCH_ROWS), (100, 300), (300, 300)])
def test_tasks_share_the_rows_of_a_snapshot(
    directory: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, batch_rows: int, at_once: int
) -> None:
    """Of several layers each row is in one task's share, however many tasks there are, and none reads a file."""
    monkeypatch.setattr(snapshot_module, "BATCH_ROWS", batch_rows)
    monkeypatch.setattr(snapshot_module, "_SELECTED_AT_ONCE", at_once)
    table = Table(directory, cache_dir, FULL)
    table.warm()
    publish(directory, 3, 2)
    table.warm()
    table.fetched()
    _, plan = table.host.plan(table.options, table.table)
    for count in (1, 2, 7):
        shares = [table.host.reader.read(plan, ReadTask(number, count), None) for number in range(count)]
        rows = pa.Table.from_batches(itertools.chain(*shares), plan.projection.columns)
        expected = [2 if id_ // EACH == 3 else 1 for id_ in range(5000)]
        assert rows.sort_by("id").column("version").to_pylist() == expected
    assert table.fetched() == set()


def test_one_process_of_the_host_loads_at_a_time(directory: Path, cache_dir: Path) -> None:
    """While one process loads, another asks the store for nothing: it waits, and then finds all but the changes there."""
    first, second = Table(directory, cache_dir, CACHE), Table(directory, cache_dir, CACHE)
    beside = threading.Thread(target=second.full.reload)
    meanwhile: list[list[str]] = []

    def begin_beside(kind: str, subject: object) -> None:
        if not meanwhile:
            before = len(second.host.store.calls)
            beside.start()
            beside.join(0.2)
            meanwhile.append(second.host.store.kinds()[before:])

    first.host.store.before = begin_beside
    first.full.reload()
    beside.join(30)
    assert not beside.is_alive()
    assert meanwhile == [[]]
    assert "get" not in second.host.store.kinds()


def test_loads_that_fail(directory: Path, cache_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Before the first load queries fail with its error. KEEP: afterwards failures are counted and logged once, and the old rows are served."""
    table = Table(directory, cache_dir, CACHE)
    table.down()
    for load in (lambda: table.get(0), table.full.current) * 2:
        with pytest.raises(errors.UfsUnavailableError, match="no answer"):
            load()
    assert table.metrics("numLoadFailures", "loadCount", "latestLoadTime") == [2, 0, -1]
    table.up()
    assert table.versions(0) == [1]
    assert table.metrics("hitCount", "missCount", "loadCount") == [1, 0, 1]
    assert table.metric("latestLoadTime") >= 0
    publish(directory, 0, 2)
    table.down()
    caplog.clear()
    for failures in (3, 4, 5):
        table.run_due_loads()
        assert table.versions(0) == [1]
        assert table.metric("numLoadFailures") == failures
    assert len([r for r in caplog.records if "failed" in r.message and r.levelname == "WARNING"]) == 1
    table.up()
    table.host.clock.tick(61)
    table.full.schedule.run_due()
    assert table.versions(0) == [1]
    table.later.loads()
    assert table.versions(0) == [2]
    assert table.metric("loadCount") == 2


def test_fail_refuses_after_a_failed_reload_until_one_succeeds(directory: Path, cache_dir: Path) -> None:
    """FAIL: after a failed reload lookups raise its error, in every process, and serve again after the next."""
    options = {**CACHE, "lookup.full-cache.on-reload-failure": "FAIL"}
    table = Table(directory, cache_dir, options)
    table.get(0)
    table.down()
    table.run_due_loads()
    second = Table(directory, cache_dir, options)
    for process in (table, second):
        with pytest.raises(errors.ReloadFailedError, match="no answer"):
            process.get(0)
    table.up()
    table.run_due_loads()
    assert table.versions(0) == second.versions(0) == [1]


@pytest.mark.parametrize("options", [CACHE, TIMED], ids=["PERIODIC", "TIMED"])
def test_a_reload_that_is_overdue_is_made_by_the_query_that_finds_it(
    directory: Path, cache_dir: Path, options: dict[str, str]
) -> None:
    """A query makes the reload, once, whether no worker lived when it was due or one stands still; a failing store is asked once an interval."""
    first = Table(directory, cache_dir, options)
    clock = first.host.clock
    first.get(0)
    first.end()
    publish(directory, 0, 2)
    fresh = Table(directory, cache_dir, options, clock)
    fresh.full.schedule.run_due()
    assert fresh.later.loads() == 0
    assert fresh.versions(0) == [1]
    fresh.end()
    clock.tick(DAY_S)
    second = Table(directory, cache_dir, options, clock)
    second.later.at_once = True
    assert second.versions(0) == [2]
    second.full.schedule.run_due()
    assert second.metrics("loadCount", "staleServedCount") == [1, 0]
    publish(directory, 0, 3)
    clock.tick(DAY_S)
    third = Table(directory, cache_dir, options, clock)
    third.later.at_once = True
    assert third.versions(0) == [3]  # `second` holds the schedule, and does nothing
    for process in (second, third):
        process.full.schedule.run_due()
    assert [process.metric("loadCount") for process in (second, third)] == [1, 1]
    second.end()
    third.end()
    clock.tick(DAY_S)
    for failures in (1, 0):  # processes that live for one query
        broken = Table(directory, cache_dir, options, clock)
        broken.later.at_once = True
        broken.down()
        assert broken.versions(0) == [3]
        assert broken.metrics("numLoadFailures", "staleServedCount") == [failures, 1]
        broken.end()


@pytest.mark.parametrize("failing", ["KEEP", "FAIL"])
def test_a_load_that_another_process_does_not_end(directory: Path, cache_dir: Path, failing: str) -> None:
    """Queries answer from the old rows; once the load has taken build-wait, these are counted as stale, or refused."""
    options = {**CACHE, WAIT: "5 s", "lookup.full-cache.on-reload-failure": failing}
    slow = Table(directory, cache_dir, options)
    clock = slow.host.clock
    slow.get(0)
    publish(directory, 0, 2)
    table = Table(directory, cache_dir, options, clock)
    outcomes: list[object] = []

    def ask(kind: str, subject: object) -> None:
        if kind != "list":
            return
        for seconds in (1, 3, 3):
            clock.tick(seconds)
            try:
                outcomes.append((table.versions(0), table.metric("staleServedCount")))
            except errors.ReloadFailedError as problem:
                outcomes.append(str(problem).partition(": try again")[0][-44:])

    slow.host.store.before = ask
    assert slow.run_due_loads(60) == 1
    error = "not ended after lookup.full-cache.build-wait = 5 s"[-44:]
    assert outcomes == [([1], 0), ([1], 0), ([1], 1) if failing == "KEEP" else error]
    assert table.versions(0) == [2]
    assert table.later.loads() == 1  # which finds that it was made
    assert table.metric("loadCount") == 0


def test_a_first_load_that_another_process_does_not_end(directory: Path, cache_dir: Path) -> None:
    """After build-wait a query reads the files, and the next one does not wait again."""
    stopped, table = Table(directory, cache_dir, CACHE), Table(directory, cache_dir, CACHE)
    with stopped.full._stored.lock():
        assert table.versions(0, 501) == [1, 1]
        publish(directory, 0, 2)
        table.host.clock.tick(1)
        assert table.versions(0, 501) == [2, 1]
        assert table.metrics("hitCount", "numLoadFailures") == [0, 0]
    assert stopped.versions(0) == [2]


def test_a_reload_that_cannot_be_recorded(directory: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full: not every query that finds the reload overdue tries it. Queries answer from the old rows, which is counted."""
    table = Table(directory, cache_dir, {**CACHE, WAIT: "30 s"})
    table.later.at_once = True
    table.get(0)
    publish(directory, 0, 2)
    table.host.clock.tick(DAY_S)
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "full"))
    with monkeypatch.context() as patch:
        for owner, name in ((SegmentWriter, "finish"), (Disk, "_publish"), (Disk, "_put_new")):
            patch.setattr(owner, name, full)
        assert [table.versions(0) for _ in range(5)] == [[1]] * 5
        assert table.metrics("numLoadFailures", "staleServedCount") == [1, 5]
    table.host.clock.tick(61)
    assert table.versions(0) == [2]


def test_a_query_waits_for_the_late_load_of_another_process(directory: Path, cache_dir: Path) -> None:
    """A query that finds another process in the overdue load waits, answers from what that loads, and loads nothing itself."""
    options = {**CACHE, WAIT: "30 s"}
    slow, table = Table(directory, cache_dir, options), Table(directory, cache_dir, options)
    slow.get(0)
    publish(directory, 0, 2)
    for process in (slow, table):
        process.host.clock.tick(DAY_S)
        process.later.at_once = True
    answers: list[object] = []
    beside = threading.Thread(target=lambda: answers.append(table.versions(0)))

    def begin_beside(kind: str, subject: object) -> None:
        if kind == "list":
            beside.start()
            beside.join(0.2)
            assert answers == []

    slow.host.store.before = begin_beside
    slow.full.reload()
    beside.join(30)
    assert answers == [[2]]
    assert table.metrics("loadCount", "staleServedCount") == [0, 0]


def test_blackout_puts_a_reload_off(directory: Path, cache_dir: Path) -> None:
    """A reload that comes due in a blackout begins when that ends; the first load does not wait."""
    clock = FakeClock(wall_s=4_000_000_800.0)  # 2096-10-02T07:20:00Z
    table = Table(directory, cache_dir, {**CACHE, "lookup.full-cache.blackout": "07:00-08:00Z"}, clock)
    assert table.versions(0) == [1]
    publish(directory, 0, 2)
    assert [table.run_due_loads(seconds) for seconds in (0, 1200, 1199, 1)] == [0, 0, 0, 1]
    assert table.versions(0) == [2]


class EveryCall(CacheReloadTrigger):
    """A trigger of a user's: reloads when told, and keeps what became of it."""

    instances: ClassVar[list["EveryCall"]] = []

    def __init__(self, options: LookupOptions) -> None:
        self.keys = options.files.keys
        self.outcomes: list[BaseException | None] = []
        self.closed = False
        EveryCall.instances.append(self)

    def open(self, context: CacheReloadTrigger.Context) -> None:
        self.context = context
        context.schedule(context.current_processing_time() + 10, self.fire)

    def fire(self) -> None:
        self.context.trigger_reload().add_done_callback(lambda done: self.outcomes.append(done.exception()))

    def close(self) -> None:
        self.closed = True


def test_a_custom_trigger_reloads_and_learns_of_failures(directory: Path, cache_dir: Path) -> None:
    """A trigger from module:factory gets the options and a context; its future has the failure of its reload."""
    options = {"lookup.metadata.source": "CACHE", STRATEGY: f"{__name__}:EveryCall"}
    table = Table(directory, cache_dir, {**FULL, **options})
    table.get(0)
    table.full.schedule.run_due()
    trigger = EveryCall.instances[-1]
    assert trigger.keys == ("id",)
    last = trigger.context.last_reload()
    assert last.started_at_s == table.host.clock.wall_s
    with pytest.raises(errors.NotSupportedError, match=r"no watermark in a Spark worker: use current_processing_time"):
        trigger.context.current_watermark()
    publish(directory, 0, 2)
    table.run_due_loads(10)
    assert table.versions(0) == [2]
    table.down()
    trigger.fire()
    table.later.loads()
    assert [type(outcome) for outcome in trigger.outcomes] == [type(None), errors.UfsUnavailableError]
    table.end()
    assert trigger.closed


def test_hosts_reload_apart(directory: Path, cache_dir: Path) -> None:
    """Each host reloads late by a part of the jitter that follows from its name and is the same in all its processes; until then, no reload is overdue."""
    options = {**CACHE, "lookup.full-cache.reload-jitter": "30 s"}
    delays = []
    for name in ("a", "a", "b", "c"):
        table = Table(directory, cache_dir / name, options, name=name)
        table.warm()
        clock, schedule = table.host.clock, table.full.schedule
        delays.append(schedule.late_s)
        last = LastReload(clock.wall_s, clock.wall_s, clock.wall_s)
        assert schedule.due_s(last, clock.wall_s) == clock.wall_s + 60 + schedule.late_s
    assert delays[0] == delays[1]
    assert len({delay for delay in delays if 0 <= delay < 30}) == 3


def test_each_schedule_is_kept(directory: Path, cache_dir: Path) -> None:
    """Two references share a snapshot: the process that keeps the schedule of one does not keep that of the other from its reloads."""
    clock = FakeClock()
    slow, fast = (
        Table(directory, cache_dir, {**CACHE, "lookup.full-cache.periodic-reload.interval": interval}, clock)
        for interval in ("1 h", "1 min")
    )
    for table in (slow, fast):
        table.get(0)
        table.full.schedule.run_due()
    publish(directory, 0, 2)
    assert (slow.run_due_loads(), fast.run_due_loads(0)) == (0, 1)
    assert slow.versions(0) == [2]
    assert slow.run_due_loads(HOUR_S) == 1
    assert fast.run_due_loads(0) == 0  # it was made


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        *(({STRATEGY: f"{__name__}:{name}"}, errors.PysparkLookupError, "failed") for name in ("publish", "no_such")),
        ({STRATEGY: "builtins:repr"}, errors.PysparkLookupError, "return a CacheReloadTrigger"),
        ({"lookup.keys": "tags"}, errors.SchemaError, "'tags'"),
    ],
)  # fmt: skip
def test_what_is_refused_at_planning(
    directory: Path, cache_dir: Path, options: dict[str, str], error: type[Exception], words: str
) -> None:
    """Planning refuses a trigger factory that cannot be found, raises or returns no trigger; and a list as a key."""
    publish(directory, 0, 1, columns={"tags": [[1]] * EACH})
    table = Table(directory, cache_dir, {**FULL, **options})
    with pytest.raises(error, match=words):
        planner.table_columns(table.host.reader.find(table.options), table.options)


def test_superseded_snapshots_go_after_their_time(directory: Path, cache_dir: Path) -> None:
    """A superseded version can be asked for during `retain`; then its segments go, once no version needs them and nobody reads them."""
    table = Table(directory, cache_dir, {**FULL, "lookup.full-cache.retain": "5 min"})
    snapshot = table.full.reload()
    batches = snapshot.batches(["version"])
    _, first = table.host.resolver.discover(table.options)
    for number in range(10):
        publish(directory, number, 2)
    table.full.reload()
    assert len(table.segments()) == 2
    table.host.clock.tick(299)
    assert table.full.find(first) is not None
    for seconds in (2, 10):
        table.host.clock.tick(seconds)
        table.full.find(first)
        table.later.loads()
        assert table.full.find(first) is None
        assert len(table.segments()) == (2 if seconds == 2 else 1)
        if seconds == 2:
            assert {value for _, (column,) in batches for value in column.to_pylist()} == {1}
            del snapshot, batches
    assert table.versions(0) == [2]


def test_no_segment_goes_before_what_names_it(
    directory: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that dies while it gives up a superseded version leaves no record that names segments which are gone."""
    table = Table(directory, cache_dir, {**FULL, "lookup.full-cache.retain": "0 s"})
    table.full.reload()
    for number in range(10):
        publish(directory, number, 2)
    table.full.reload()
    replace = table.host.disk.replace_record
    lacking: list[set[str]] = []

    def look_and_replace(kind: str, key: str, value: object) -> None:
        state = table.full._stored.state()
        named = {layer.name for version in state.versions for layer in version.layers}
        lacking.append(named - set(table.segments()))
        replace(kind, key, value)

    monkeypatch.setattr(table.host.disk, "replace_record", look_and_replace)
    table.host.clock.tick(1)
    table.full.reload()
    assert len(table.segments()) == 1
    assert lacking
    assert not any(lacking)


@pytest.mark.parametrize("gets_on_s", [0, 1500])
def test_a_process_that_stands_still_in_a_load(site: Site, monkeypatch: pytest.MonkeyPatch, gets_on_s: int) -> None:
    """A reload waits for another process's as long as that makes progress, then fails and names the lock; queries read the snapshot."""
    site.created().write([{"id": 1}])
    table = site.table(FULL)
    assert table.get(1) == [{"id": 1, "name": None}]
    full, began_s = table._full(), site.clock.steady_s
    lock = full.disk.acquire("reload", full.key, 0)
    path = full.disk.lock_path("reload", full.key)

    def acquire(kind: str, name: str, timeout_s: float) -> None:
        site.clock.tick(max(timeout_s, 0.1))
        if site.clock.steady_s < began_s + gets_on_s:
            os.utime(path, (site.clock.steady_s,) * 2)

    with monkeypatch.context() as patch:
        patch.setattr(type(full.disk), "acquire", lambda disk, *args: acquire(*args))
        with pytest.raises(errors.ReloadFailedError, match=f"holds {path} and has made no progress for 10 minutes"):
            table.reload()
    assert gets_on_s + 590 <= site.clock.steady_s - began_s <= gets_on_s + 610
    assert table.get(1) == [{"id": 1, "name": None}]
    lock.release()
    before = path.stat().st_mtime_ns
    site.clock.tick(60)
    table.reload()
    assert path.stat().st_mtime_ns > before


def test_a_unit_that_takes_long_makes_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a load sees that it gets on with each batch: a provider's rows, or a large file of ORC, are one unit."""
    (tmp_path / "t").mkdir()
    orc.write_table(pa.table({"id": range(20 * BATCH_ROWS)}), tmp_path / "t" / "a.orc")
    full, signs = LookupTable(str(tmp_path / "t"), {**FULL, "lookup.cache.dir": str(tmp_path / "cache")})._full(), []
    monkeypatch.setattr(type(full._stored), "show_progress", lambda stored: signs.append(1))
    full.reload()
    assert len(signs) > 20


def run_schedule(table: Table) -> int:
    """Run the schedule as its loop does; returns how many loads that makes."""
    table.full.schedule.run_due()
    return table.later.loads()


@each_step
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("mode", ["FIXED_DELAY", "FIXED_RATE"])
def test_a_reload_comes_within_its_interval(
    directory: Path, cache_dir: Path, step_s: float, mode: str, restarted: bool
) -> None:
    """PERIODIC: a step of the clock neither delays the next reload nor changes their pace, also for a process that begins after it."""
    options = {**LIMITED, "lookup.full-cache.periodic-reload.schedule-mode": mode}
    table = Table(directory, cache_dir, options)
    clock = table.host.clock
    assert table.versions(0) == [1]
    assert restarted or run_schedule(table) == 0
    clock.tick(30)
    publish(directory, 0, 2)
    clock.wall_s += step_s
    if restarted:
        table = Table(directory, cache_dir, options, clock)
        table.versions(0)
    loads = run_schedule(table)
    for _ in range(60):
        clock.tick(1)
        loads += run_schedule(table)
    assert loads >= 1
    assert table.versions(0) == [2]
    loads = 0
    for _ in range(180):
        clock.tick(1)
        loads += run_schedule(table)
    assert 2 <= loads <= 4


def test_timers_after_the_clock_was_set_back(directory: Path, cache_dir: Path) -> None:
    """An action that a trigger has scheduled runs once, at its time or when the clock was set back; each timer can be cancelled by itself."""
    table = Table(directory, cache_dir, CACHE)
    clock, schedule = table.host.clock, table.full.schedule
    ran: list[float] = []

    def action() -> None:
        ran.append(clock.steady_s)

    schedule.run_due()
    began_s = clock.steady_s
    schedule.schedule(clock.wall_s + 5, action)
    schedule.schedule(clock.wall_s + 6, action)()
    schedule.schedule(clock.wall_s + 7, action)
    cancel = schedule.schedule(clock.wall_s + 8, action)
    for _ in range(5):
        clock.tick(1)
        schedule.run_due()
    assert ran == [began_s + 5]
    clock.wall_s -= HOUR_S
    cancel()
    schedule.run_due()
    assert ran == [began_s + 5] * 2
    clock.wall_s += HOUR_S
    clock.tick(60)
    schedule.run_due()
    assert len(ran) == 2


@each_step
def test_the_limit_of_staleness_holds(directory: Path, cache_dir: Path, step_s: float) -> None:
    """lookup.full-cache.max-staleness counts time that has passed, whatever clocks show; with the store down nothing is served."""
    table = Table(directory, cache_dir, LIMITED)
    assert table.versions(0) == [1]
    publish(directory, 0, 2)
    table.host.clock.wall_s += step_s
    table.host.clock.tick(601)
    table.down()
    with pytest.raises(errors.ReloadFailedError):
        table.versions(0)
    table.up()
    full = mock.patch.object(SnapshotLoader, "load", side_effect=errors.CacheFullError("no room"))
    with full, pytest.raises(errors.ReloadFailedError, match=r"and its reload failed: no room$"):
        table.versions(0)
    assert table.versions(0) == [2]
