"""Real processes that share snapshots: reloads under reading with kills, and what a worker's copy costs.

As in `test_fill`, each test hands a function of this module to a fresh process, which may fork.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup.base.errors import VersionGoneError
from pyspark_lookup.engine import planner
from pyspark_lookup.engine.lookup import get_many
from pyspark_lookup.engine.lookup_table import LookupTable
from pyspark_lookup.engine.runtime import runtime
from pyspark_lookup.options.lookup_options import LookupOptions
from tests.fakes import FakeClock, make_host
from tests.workers import BOUND_S, Forked, in_fresh_process, must_end, run_processes

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

# --- 1,000 reloads ------------------------------------------------------------------------------------

FILES = 3
EACH = 400
RELOADS = 1000
KEYS = pa.table({"id": [0, EACH, 2 * EACH, 1, 10**9]})
FULL = {"lookup.keys": "id", "lookup.cache": "FULL", "lookup.full-cache.retain": "1 s"}
CACHE = {**FULL, "lookup.metadata.source": "CACHE", "lookup.full-cache.periodic-reload.interval": "1 h"}
UFS = {**FULL, "lookup.full-cache.build-wait": "20 ms", "lookup.on-version-gone": "FAIL"}


def publish(path: Path, step: int) -> None:
    """State `step` of the table: file step % FILES says so in every row. Each file's size tells its step."""
    number = step % FILES
    ids = range(number * EACH, (number + 1) * EACH)
    table = pa.table({"id": ids, "step": pa.array([step] * EACH, pa.int32())})
    table = table.replace_schema_metadata({"pad": "x" * (step // FILES)})
    temporary = path / f".{number}.new"
    pq.write_table(table, temporary, compression="none", use_dictionary=False)
    known = path.parent / "sizes" / f"{number}-{temporary.stat().st_size}"
    assert not known.exists()
    known.write_text(str(step))
    os.replace(temporary, path / f"{number}.parquet")


def first_states(path: Path) -> None:
    """The table, when each file is there."""
    path.mkdir()
    (path.parent / "sizes").mkdir()
    for step in range(FILES):
        publish(path, step)


def state_of(steps: list[int]) -> int:
    """The state in which the files have these steps; fails if there never was one."""
    latest = max(steps)
    assert sorted(steps) == [latest - 2, latest - 1, latest], steps
    assert all(step % FILES == number for number, step in enumerate(steps)), steps
    return latest


def answered(rows: pa.Table) -> list[int]:
    """The step that each file's rows say; every key has its one row."""
    assert rows.column("key_index").to_pylist() == [0, 1, 2, 3]
    steps: list[int] = rows.column("step").to_pylist()
    assert steps[3] == steps[0]
    return steps[:FILES]


def handles() -> tuple[int, int]:
    """(open file descriptors, mappings of snapshots) of this process."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(os.listdir("/proc/self/fd")), sum("/snapshots/" in line for line in maps)


def cache_reader(path: Path, options: Mapping[str, str], place: int, counts: Any, stop: Any, answer: Path) -> None:
    table = LookupTable(str(path), dict(options))
    newest = 0
    seen = set()
    fds, _ = handles()
    while not stop.is_set():
        state = state_of(answered(table.get_many(KEYS)))
        assert state >= newest, (state, newest)
        newest = state
        seen.add(state)
        counts[place] += 1
        if counts[place] % 16 == 0:
            scanned = table.scan()
            assert scanned.num_rows == FILES * EACH
            steps = sorted(scanned.column("step").unique().to_pylist())
            newest = max(newest, state_of([next(s for s in steps if s % FILES == n) for n in range(FILES)]))
    metrics = runtime().engine(LookupOptions.parse({"path": str(path), **options})).reader.metrics.snapshot()
    answer.write_text(json.dumps([len(seen), handles()[0] - fds, handles()[1], metrics["snapshotReadThroughCount"]]))


def ufs_reader(path: Path, options: Mapping[str, str], place: int, counts: Any, stop: Any, answer: Path) -> None:
    opts = LookupOptions.parse({"path": str(path), **options})
    reader = runtime().engine(opts).reader
    hits = 0
    seen = set()
    fds, _ = handles()
    while not stop.is_set():
        found = planner.find(reader, opts)
        asked = [int((path.parent / "sizes" / f"{n}-{f.size}").read_text()) for n, f in enumerate(found.version.files)]
        plan = planner.plan_read(found, opts, planner.table_columns(found, opts), runtime().clock)
        with contextlib.suppress(VersionGoneError):  # replaced in place before it was read: said, not mixed
            assert answered(get_many(reader, plan, KEYS, ["id"], None, found.version)) == asked
            hits += 1
            seen.add(max(asked))
        counts[place] += 1
    answer.write_text(json.dumps([len(seen), handles()[0] - fds, handles()[1], hits]))


def reloader(path: Path, options: Mapping[str, str], pipe: Any) -> None:
    table = LookupTable(str(path), dict(options))
    while pipe.recv():
        pipe.send(table.reload())


def until(done: Any, what: str) -> None:
    """Return once `done()` is true; other processes have the processor meanwhile."""
    deadline = time.monotonic() + BOUND_S
    while not done():
        os.sched_yield()
        assert time.monotonic() < deadline, what


def chaos(path: Path, cache_dir: Path, answers: Path) -> None:
    context = multiprocessing.get_context("fork")
    rng = random.Random(11)
    first_states(path)
    at = {"lookup.cache.dir": str(cache_dir)}
    cached, current = {**CACHE, **at}, {**UFS, **at}
    counts = context.Array("q", 4, lock=False)
    stop = context.Event()
    mine, theirs = context.Pipe()

    def begin(place: int) -> Any:
        function, options = (cache_reader, cached) if place < 2 else (ufs_reader, current)
        return function, (path, options, place, counts, stop, answers / str(place))

    def begin_reloader(place: int) -> Any:
        nonlocal mine, theirs
        mine, theirs = context.Pipe()  # what was under way in that of a process which was killed is nobody's
        return reloader, (path, cached, theirs)

    readers, reloaders = Forked(begin, 4), Forked(begin_reloader, 1)
    kills = stops = 0
    for step in range(FILES, FILES + RELOADS):
        publish(path, step)
        mine.send(True)
        chance = rng.random()
        if chance < 0.06:  # in the middle of it, anywhere
            for _ in range(rng.randrange(30_000)):
                pass
            if chance < 0.03:
                os.kill(reloaders.processes[0].pid, signal.SIGSTOP)
                before = list(counts[:2])
                # Whatever it holds right now, nobody who answers from a snapshot waits for it.
                until(lambda b=before: all(counts[n] > b[n] + 3 for n in range(2)), "readers wait for a reload")
                stops += 1
            reloaders.replace(0)
            kills += 1
            if kills % 8 == 0:
                readers.replace(rng.randrange(4))
            continue
        assert mine.poll(BOUND_S), "a reload hangs"
        mine.recv()
    stop.set()
    mine.send(False)
    must_end([*readers.processes, *reloaders.processes])
    (answers / "kills").write_text(json.dumps([kills, stops]))
    # What stays: the latest version of each mode, once the others are past their time.
    last = LookupTable(str(path), cached)
    assert max(answered(last.get_many(KEYS))) <= FILES + RELOADS - 1
    last.reload()
    assert max(answered(last.get_many(KEYS))) == FILES + RELOADS - 1


def test_a_thousand_reloads_under_reading_with_kills(tmp_path: Path) -> None:
    """Every answer is wholly of one state, none goes back, nobody waits, and afterwards disk and handles are as before."""
    answers = tmp_path / "answers"
    answers.mkdir()
    cache_dir = tmp_path / "cache"
    in_fresh_process(chaos, tmp_path / "dim", cache_dir, answers, bound_s=500)
    kills, stops = json.loads((answers / "kills").read_text())
    assert kills > 20
    assert stops > 5
    for place in range(4):
        states, fds, maps, count = json.loads((answers / str(place)).read_text())
        assert states > 10
        assert fds <= 20  # two snapshots of four layers with hidden rows each, and a lock or two
        assert maps <= 16
        assert (count == 0) if place < 2 else (count > 10)
    clock = FakeClock()
    for options in (CACHE, UFS):
        host = make_host(str(tmp_path / "dim"), cache_dir, clock)
        opts = LookupOptions.parse({"path": str(tmp_path / "dim"), **options})
        table, _ = host.resolver.discover(opts)
        full = host.reader.fulls.of(table, opts)
        assert full is not None
        assert host.disk is not None
        snapshot = full.reload()
        clock.tick(10)
        assert full.reload().rows == FILES * EACH
        names = host.disk.segments(full.key)
        assert len(names) <= 2 * len(snapshot.layers)
    host.disk.sweep()
    assert list((cache_dir / "v1" / "tmp").iterdir()) == []
    report = host.disk.check()
    assert report.damaged == ()


# --- memory -------------------------------------------------------------------------------------------

ROWS = 1_000_000


def memory(within: str = "") -> Counter[str]:
    """Bytes of this process's memory by smaps' names, of the mappings of such files."""
    found = Counter[str]()
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()
        if not head[0].endswith(":"):
            inside = within in line
        elif inside and head[-1] == "kB":
            found[head[0].rstrip(":")] += int(head[1]) * 1024
    return found


def probing(path: Path, options: Mapping[str, str], barrier: Any, answer: Path) -> None:
    table = LookupTable(str(path), dict(options))
    table.get(1)
    rng = np.random.default_rng(os.getpid())
    ids = [pa.table({"id": rng.integers(0, ROWS, 65_536)}) for _ in range(20)]
    table.get_many(ids[0].slice(0, 10))
    before = memory()
    for keys in ids:
        assert table.get_many(keys).num_rows == 65_536
    barrier.wait(BOUND_S)
    grown = memory()["Private_Dirty"] - before["Private_Dirty"]
    of = memory("/snapshots/")
    answer.write_text(json.dumps([of["Rss"], of["Pss"], of["Private_Clean"] + of["Private_Dirty"], grown]))
    barrier.wait(BOUND_S)


def share(path: Path, cache_dir: Path, answers: Path) -> None:
    path.mkdir()
    ids = np.random.default_rng(1).permutation(ROWS)
    texts = pa.array([f"customer-{n:016d}" for n in ids])
    pq.write_table(pa.table({"id": ids, "v": ids / 7, "name": texts, "w": ids * 3}), path / "a.parquet")
    options = {**CACHE, "lookup.cache.dir": str(cache_dir)}
    LookupTable(str(path), options).warm()
    barrier = multiprocessing.get_context("spawn").Barrier(4)
    run_processes("spawn", probing, [(path, options, barrier, answers / str(n)) for n in range(4)])


def test_workers_share_one_copy(tmp_path: Path) -> None:
    """Four processes that probe one snapshot all over have it in memory once: under a tenth of it is private to each."""
    answers = tmp_path / "answers"
    answers.mkdir()
    in_fresh_process(share, tmp_path / "dim", tmp_path / "cache", answers)
    (segment,) = (tmp_path / "cache" / "v1" / "snapshots").glob("*/*")
    size = segment.stat().st_size
    for place in range(4):
        mapped, proportional, private, grown = json.loads((answers / str(place)).read_text())
        assert mapped > 0.5 * size
        assert proportional < 0.35 * mapped
        assert private < 0.1 * size
        assert grown < 0.1 * size + 40 * 2**20  # what a batch of answers takes, once
