"""One budget for all of a cache directory: blocks, snapshots, rows by key, records. No host fills its disk."""

import collections
import contextlib
import gc
import importlib
import itertools
import os
import random
import socket
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from pyspark_lookup import CacheFullError, LookupTable
from pyspark_lookup.cache.full import loader
from pyspark_lookup.cache.memory import DefaultLookupCache
from pyspark_lookup.core.metrics import CacheMetricGroup
from pyspark_lookup.lookup import lookup_table as api
from pyspark_lookup.lookup import runtime as runtime_module
from pyspark_lookup.lookup.runtime import Runtime
from pyspark_lookup.sources.registry import parse_options
from pyspark_lookup.storage.disk import Disk, SegmentWriter
from pyspark_lookup.storage.disk.space import ReservedFile
from pyspark_lookup.storage.host_metrics import read_reloads
from tests.support.disks import bytes_below, handles_below
from tests.support.fakes import CACHES, FakeClock, wait_until_settled
from tests.support.full_cache import CACHE, EACH, FULL, Table, publish
from tests.support.fuzzing import by_day, seeds
from tests.support.lookup_functions import SCHEMA, Desk, SyncFunction, names, provider
from tests.support.partial_cache import run_waiting
from tests.support.workers import in_fresh_process

MIB = 2**20
BUDGET = 2 * MIB
SLACK = 16 * 1024  # what is neither a block, a segment nor a record: locks, claims, the account itself
FILES = 4
MODES = {
    "FULL": {**FULL, "lookup.full-cache.build-wait": "0 s", "lookup.full-cache.retain": "1 h"},
    "PARTIAL": {"lookup.keys": "id", "lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "100000"},
    "NONE": {"lookup.keys": "id"},
}
WIDE: dict[str, object] = {f"c{place}": [0] * EACH for place in range(60)}
"""Columns that are small in the file, and large in a snapshot."""


class Killed(BaseException):
    """A process has died here."""


@contextlib.contextmanager
def dying(rng: random.Random) -> Iterator[None]:
    """A process that dies while it writes a segment: its files stay, its locks do not."""
    room, append = rng.randrange(6), SegmentWriter.append

    def cut(writer: SegmentWriter, name: str, data: object) -> None:
        nonlocal room
        room -= 1
        if room < 0:
            raise Killed
        append(writer, name, data)

    def closed(file: ReservedFile) -> None:
        if file.fd >= 0:
            os.close(file.fd)
            file.fd = -1

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(SegmentWriter, "append", cut)
        patch.setattr(ReservedFile, "close", closed)
        yield


class Host:
    """Processes of one host that share a directory, over tables of files of many sizes."""

    def __init__(self, base: Path, rng: random.Random) -> None:
        self.base, self.rng = base, rng
        self.cache_dir = base / "cache"
        self.clock = FakeClock(time.time() + 10)
        self.versions: dict[tuple[int, int], int] = collections.defaultdict(int)
        self.processes: dict[tuple[int, int, str], Table] = {}
        self.open_objects: list[object] = []
        self.counts: collections.Counter[str] = collections.Counter()
        for table, number in itertools.product(range(3), range(FILES)):
            self.change(table, number)

    def path(self, table: int) -> Path:
        return self.base / f"dim{table}"

    def change(self, table: int, number: int) -> None:
        self.versions[table, number] += 1
        noise = [self.rng.randbytes(self.rng.choice([10, 100, 300])) for _ in range(EACH)]
        columns = {"noise": noise, **(WIDE if table == 2 else {})}
        publish(self.path(table), number, self.versions[table, number], columns=columns)

    def process(self, number: int, table: int, mode: str) -> Table:
        place = number, table, mode
        if place not in self.processes:
            options = (self.path(table), self.cache_dir, MODES[mode], self.clock)
            self.processes[place] = Table(*options, max_bytes=BUDGET)
        return self.processes[place]

    def end(self, place: tuple[int, int, str]) -> None:
        """The end of a process, as far as others see it."""
        process = self.processes.pop(place)
        if place[2] == "FULL":
            process.full.close()
        process.host.reader.partials.close()
        self.counts.update(process.host.metrics.snapshot())

    def step(self) -> str:
        rng = self.rng
        table = rng.randrange(3)
        place = rng.randrange(2), table, rng.choice(["FULL", "FULL", "FULL", "PARTIAL", "NONE"])
        rare_steps = ["die", "end", "end", "hold", "free", "wait", "wait", "upkeep"]
        action = rng.choice(["get"] * 6 + ["change"] * 4 + rare_steps)
        if action == "change":
            self.change(rng.randrange(3), rng.randrange(FILES))
        elif action in ("get", "die"):
            process = self.process(*place)
            with dying(rng) if action == "die" else contextlib.nullcontext():
                ids = [number * EACH + rng.randrange(EACH) for number in range(FILES)]
                for _ in range(2):
                    assert process.versions(*ids) == [self.versions[table, number] for number in range(FILES)]
                    run_waiting(process.later)
            if action == "die":
                self.end(place)
        elif action == "hold":
            with contextlib.suppress(CacheFullError):
                self.open_objects.append(self.process(place[0], table, "FULL").full.reload())
        elif action == "free":
            self.open_objects.clear()
        elif action == "end" and self.processes:
            self.end(rng.choice(sorted(self.processes)))
        elif action == "wait":
            self.clock.tick(rng.choice([1.0, 700.0, 700.0]))
        elif action == "upkeep":
            disk = self.process(*place).host.disk
            rng.choice([disk.sweep, disk.sweep, disk.recount, lambda: disk.check(repair=True), disk.clear])()
        return f"{action} {place}"


def test_no_host_fills_its_disk(tmp_path: Path) -> None:
    """Whatever processes read, build, hold and leave behind: the directory stays within its budget, its account and all answers are right."""
    counts: collections.Counter[str] = collections.Counter()
    for seed in seeds(1):
        host = Host(tmp_path / str(seed), random.Random(seed))
        steps_done: list[str] = []
        for _ in range(100):
            steps_done.append(host.step())
            assert bytes_below(host.cache_dir) <= BUDGET + SLACK, (seed, steps_done[-5:])
        host.open_objects.clear()
        disk = host.process(0, 0, "NONE").host.disk
        assert disk.usage().total >= disk.used_bytes(), seed
        disk.recount()
        assert disk.usage().total == disk.used_bytes(), seed
        for place in list(host.processes):
            host.end(place)
        counts += host.counts
    happened = ("snapshotBuildCount", "snapshotOverBudgetCount", "tableEvictedCount", "blockEvictedCount")
    assert all(counts[name] for name in happened), counts


@pytest.mark.parametrize("given_up", [False, True], ids=["refused", "given up"])
def test_a_build_without_room(
    tmp_path: Path, cache_dir: Path, given_up: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without room, the table is read from its files, and the build tried once in a minute, counted, logged once and shown; with room it is built."""
    for number in range(10):
        publish(tmp_path / "dim", number, 1, columns=WIDE)
    if given_up:
        monkeypatch.setattr(loader, "_DECODED_SHARE", 0.1)
        monkeypatch.setattr(loader, "DECODED_AT_MOST", 0)
    clock = FakeClock()
    first, second = (Table(tmp_path / "dim", cache_dir, MODES["FULL"], clock, max_bytes=BUDGET) for _ in range(2))
    disk = first.host.disk
    for table in (first, second, first):
        assert table.versions(3, 4999) == [1, 1]
        table.later.loads()
    assert (first.metric("snapshotOverBudgetCount"), second.metric("snapshotOverBudgetCount")) == (1, 0)
    assert (first.metric("numLoadFailures"), first.metric("cacheFailureCount"), second.metric("hitCount")) == (0, 0, 0)
    assert list((cache_dir / "v1" / "tmp").iterdir()) == []
    assert disk.usage().total == disk.used_bytes() < BUDGET
    reason = second.full.refusal(first.host.resolver.discover(first.options)[1])
    assert "lookup.cache.max-bytes is 2.1 MB" in reason
    ((reload,),) = read_reloads(disk).values()
    assert reload.error.startswith("not built: ")
    fetched = len(first.fetched())
    assert fetched == 10
    clock.tick(61)
    with pytest.raises(CacheFullError, match=r"Raise lookup\.cache\.max-bytes"):
        first.full.reload()
    assert first.fetched() == set()  # it was not begun
    assert len([r for r in caplog.records if r.levelname == "WARNING" and "no room" in r.message]) == 1
    clock.tick(61)
    roomy = Table(tmp_path / "dim", cache_dir, MODES["FULL"], clock, max_bytes=20 * MIB)
    assert roomy.versions(3) == [1]
    roomy.later.loads()
    assert roomy.versions(3) == second.versions(3) == [1]
    assert (roomy.metric("hitCount"), second.metric("hitCount")) == (1, 1)
    assert second.full.refusal(first.host.resolver.discover(first.options)[1]) is None


@pytest.mark.parametrize("call", [("fcntl", "flock"), ("os", "replace")], ids=["begun", "published"])
def test_a_file_that_is_being_written_is_nobody_elses(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, call: tuple[str, str]
) -> None:
    """Another process makes room just before or after each lock and each renaming: it takes no file of a living process for a dead one's."""
    first, second = (Disk(cache_dir, BUDGET, CacheMetricGroup(), time.time, random.Random(n)) for n in range(2))
    module, real = importlib.import_module(call[0]), getattr(importlib.import_module(call[0]), call[1])
    looking = threading.Lock()

    def beside(*args: object, **more: object) -> None:
        alone = looking.acquire(blocking=False)
        if alone:
            second._remove_dead(0)
        real(*args, **more)
        if alone:
            second._remove_dead(0)
            looking.release()

    monkeypatch.setattr(module, call[1], beside)
    with contextlib.closing(first.create_segment({"a": 10})) as writer:
        writer.append("a", b"0123456789")
        writer.finish({})
        first.publish_segment("t", "n", writer)
    assert first.open_segment("t", "n") is not None
    assert first.usage().total == first.used_bytes()
    # One that is gone when its size is asked for is not an error.
    monkeypatch.setattr(first, "_reserved", lambda: [(cache_dir / "gone.reserved", True)])
    with pytest.raises(CacheFullError):
        first.check_room(BUDGET)


def die_beside_a_child(cache_dir: Path) -> None:
    """A process that has forked a child dies: what it was writing, its locks and its claims are nobody's, although the child lives."""
    first, second = (Disk(cache_dir, BUDGET, CacheMetricGroup(), time.time, random.Random(n)) for n in range(2))
    file = first.reserve(100_000)
    lock, claim = first.acquire("block", "x", 0), first.create_claim("s", "g", b"")
    counters = first.new_counters("process", {}, {"n": 1})
    assert lock is not None
    assert second.acquire("block", "x", 0) is None
    os.utime(file.path, (time.time() - 7200,) * 2)  # it takes long
    second.sweep()
    assert file.path.exists()
    assert second.usage().segments > 100_000
    parent_end, child_end = socket.socketpair()
    child = os.fork()
    if not child:
        parent_end.close()
        child_end.send(b"!")
        child_end.recv(1)  # until its parent has ended
        os._exit(0)
    assert parent_end.recv(1)
    for locked_file in (file, lock, claim, counters):
        os.close(locked_file.fd)  # as its death does
    second._remove_dead(0)
    assert not file.path.exists()
    assert second.usage().segments == 0
    assert second.acquire("block", "x", 0) is not None
    assert second.claims("s", "g") == []
    assert not second.counters("process")[0].alive
    parent_end.close()
    child_end.close()
    os.waitpid(child, 0)


def test_a_file_that_is_being_written_outlives_no_process(cache_dir: Path) -> None:
    """A file that is being written is swept when its writer has died, not because it is old. Locks and claims end with their process, too."""
    in_fresh_process(die_beside_a_child, cache_dir)


def test_what_goes_first(tmp_path: Path, cache_dir: Path) -> None:
    """Superseded snapshots, then blocks, then the table unused for longest; never what somebody reads or used a moment ago."""
    clock = FakeClock(time.time() + 10)
    noise = {"noise": [random.Random(n).randbytes(230) for n in range(EACH)]}  # half a MB a table

    def load_table(name: str) -> Table:
        for number in range(4):
            publish(tmp_path / name, number, 1, columns=noise)
        table = Table(tmp_path / name, cache_dir, MODES["FULL"], clock, max_bytes=2 * MIB)
        with contextlib.suppress(CacheFullError):  # blocks are those of files whose columns were looked up
            table.full.reload()
        return table

    first_table = load_table("one")
    disk = first_table.host.disk
    for version in (2, 3, 4):  # each time all but one file: bases, of which three are superseded
        for number in range(3):
            publish(tmp_path / "one", number, version, columns=noise)
        first_table.full.reload()
    first_table.full.close()  # a process that keeps none of them mapped
    latest = first_table.full.reload()
    assert len(first_table.segments()) < 4
    assert first_table.versions(0) == [4]
    two = load_table("two")
    assert len(first_table.segments()) == 1
    assert two.metrics("snapshotBuildCount", "tableEvictedCount") == [1, 0]
    before = disk.usage()
    assert before.blocks > 0
    two.full.close()
    clock.tick(1000)  # now nobody has used it lately, but there are blocks
    three = load_table("three")
    assert three.metrics("snapshotBuildCount", "tableEvictedCount") == [1, 0]
    assert three.metric("blockEvictedCount") > 0
    assert disk.usage().blocks < before.blocks
    four = load_table("four")
    assert four.metrics("snapshotBuildCount", "tableEvictedCount") == [1, 1]
    assert [len(table.segments()) for table in (first_table, two, three)] == [1, 0, 1]
    four.full.close()  # nobody reads it, but it was used a moment ago
    assert load_table("five").metrics("snapshotBuildCount", "snapshotOverBudgetCount") == [0, 1]
    clock.tick(1000)
    assert latest.rows == 2000  # and is mapped, as the third one's
    assert load_table("six").metrics("snapshotBuildCount", "tableEvictedCount") == [1, 1]
    assert [len(table.segments()) for table in (first_table, three, four)] == [1, 1, 0]


def test_the_default_is_a_share_of_the_disk(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the disk; half of what is free and ours if that is less, as it is at the moment."""
    disk = Disk(cache_dir, None, CacheMetricGroup(), time.time, random.Random(1))
    for free, budget in ((900, 250), (400, 200), (0, 0)):
        status = types.SimpleNamespace(f_blocks=1000, f_bavail=free, f_frsize=MIB)
        monkeypatch.setattr(os, "statvfs", lambda path, status=status: status)
        assert disk.budget() == disk.space().budget == budget * MIB
    with pytest.raises(CacheFullError, match="its share of the disk is 0 B"):
        disk.replace_record("version", "k", 1)


def test_close_leaves_nothing_open(tmp_path: Path, cache_dir: Path) -> None:
    """After the last table of a path is closed this process has no file of the directory open, and no thread; counters go on adding up."""
    publish(tmp_path / "dim", 0, 1)
    wait_until_settled(tmp_path / "dim" / "0.parquet")
    threads = set(threading.enumerate())
    for mode in (FULL, MODES["PARTIAL"], MODES["NONE"], CACHE) * 2:
        with LookupTable(str(tmp_path / "dim"), {**mode, "lookup.cache.dir": str(cache_dir)}) as table:
            assert table.get(3)[0]["version"] == 1
            assert handles_below(cache_dir) != []
        assert handles_below(cache_dir) == []
    with LookupTable(str(tmp_path / "dim"), {"lookup.cache.dir": str(cache_dir)}) as table:
        assert table.metrics()["lookupTimeCount"] == 8
    assert handles_below(cache_dir) == []
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)
    assert set(threading.enumerate()) <= threads


@pytest.mark.parametrize("mode", by_day(["FULL", "PARTIAL"], 2))
def test_a_process_that_opens_many_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """A process keeps the engines of the tables used last and of those in use; nothing committed, invalidated or counted is lost with another."""
    monkeypatch.setattr(runtime_module, "_ENGINES_KEPT", 2)
    current = Runtime(FakeClock(time.time()).host(), random.Random(7))
    monkeypatch.setattr(api, "runtime", lambda: current)

    def table(number: int) -> LookupTable:
        options = {"lookup.keys": "id", "lookup.cache.dir": str(tmp_path / "cache"), **CACHES[mode]}
        return LookupTable(str(tmp_path / f"t{number}"), options)

    open_tables = [table(number) for number in range(2)]
    for open_table in open_tables:
        open_table.write([{"id": 7, "v": 0}])
        assert open_table.get(7) == [{"id": 7, "v": 0}]
    handles = len(handles_below(tmp_path))
    for number in range(2, 7):
        table(number).write([{"id": 7, "v": number}])
        assert table(number).get(7) == [{"id": 7, "v": number}]
        gc.collect()
    assert len(current._engines) <= 2 + len(open_tables)
    assert len(handles_below(tmp_path)) <= handles + 2 * 4
    for number in range(2, 7):
        table(number).upsert([{"id": 7, "v": -number}])
    for number in range(2, 7):
        assert table(number).get(7) == [{"id": 7, "v": -number}]
        assert table(number).metrics()["resolutionCount"] >= 2
    assert [open_table.get(7) for open_table in open_tables] == [[{"id": 7, "v": 0}]] * 2


def test_what_is_invalidated_without_a_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider's own cache outlives the engine, so what is known of its keys does, too."""
    monkeypatch.setattr(runtime_module, "_ENGINES_KEPT", 1)
    desk, calls, cache = Desk(tmp_path / "cache", monkeypatch), itertools.count(1), DefaultLookupCache(max_rows=10)
    (tmp_path / "cache").write_text("no directory")
    function = SyncFunction(lambda keys: pa.table({"id": keys["id"], "name": [f"call {next(calls)}"]}, SCHEMA))
    options = {"lookup.keys": "id", "lookup.cache.dir": str(tmp_path / "cache")}
    factory = desk.name(lambda context: provider(function, version=lambda: "1", cache=cache))
    provided = {**options, "lookup.provider": factory}
    assert [names(LookupTable(None, provided), 1) for _ in range(2)] == [["call 1"]] * 2
    LookupTable(None, provided).invalidate([1])
    for number in range(4):
        api.runtime().engine(parse_options({"path": str(tmp_path / f"t{number}"), **options}))
    gc.collect()
    assert names(LookupTable(None, provided), 1) == ["call 2"]
