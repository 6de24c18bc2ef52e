"""Real processes that share what is cached: every mode under reloads with kills, and what a worker's copy of a snapshot costs.

As in `test_fill`, each test hands a function of this module to a fresh process, which may fork.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup.base.errors import UfsUnavailableError, VersionGoneError
from pyspark_lookup.cache.partial.host_cache import REFUSE_ABOVE
from pyspark_lookup.engine.lookup_table import LookupTable
from pyspark_lookup.engine.runtime import runtime
from pyspark_lookup.io.block_cache import BlockCache
from pyspark_lookup.options.lookup_options import LookupOptions
from tests.fakes import FakeClock, make_host
from tests.workers import BOUND_S, Forked, fail_at_random, in_fresh_process, must_end, run_processes

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

# --- reloads with kills ------------------------------------------------------------------------------------

FILES = 3
EACH = 400
RELOADS = 200
IDS = [0, EACH, 2 * EACH, 10**9]  # one of each file, and one that none has
BATCH = 50
ROWS = 300  # of a small cache
FULL = {"lookup.keys": "id", "lookup.cache": "FULL", "lookup.full-cache.retain": "1 s"}
CACHE = {**FULL, "lookup.metadata.source": "CACHE", "lookup.full-cache.periodic-reload.interval": "1 h"}
UFS = {**FULL, "lookup.full-cache.build-wait": "20 ms", "lookup.on-version-gone": "FAIL"}
LARGE = {"lookup.keys": "id", "lookup.cache": "PARTIAL", "lookup.max-retries": "1"}
LARGE |= {"lookup.partial-cache.max-rows": "1000000"}
SMALL = {**LARGE, "lookup.partial-cache.max-rows": str(ROWS)}
READERS = (CACHE, CACHE, UFS, UFS, LARGE, LARGE, SMALL, SMALL)


def publish(path: Path, step: int) -> None:
    """State `step` of the table: file step % FILES says so in every row, and has another size than before."""
    number = step % FILES
    ids = range(number * EACH, (number + 1) * EACH)
    table = pa.table({"id": ids, "step": pa.array([step] * EACH, pa.int32())})
    table = table.replace_schema_metadata({"pad": "x" * (step // FILES)})
    temporary = path / f".{number}.new"
    pq.write_table(table, temporary, compression="none", use_dictionary=False)
    os.replace(temporary, path / f"{number}.parquet")


def state_of(ids: Sequence[int], rows: pa.Table) -> int:
    """The state that rows are of, one for each key that a file has; fails if there never was one."""
    there = [(number, id_) for number, id_ in enumerate(ids) if id_ < FILES * EACH]
    assert list(zip(rows.column("key_index").to_pylist(), rows.column("id").to_pylist(), strict=True)) == there
    found = zip(there, rows.column("step").to_pylist(), strict=True)
    steps = sorted({(id_ // EACH, step) for (_, id_), step in found})
    latest = max(step for _, step in steps)
    assert sorted(step for _, step in steps) == [latest - 2, latest - 1, latest], steps
    assert all(step % FILES == number for number, step in steps), steps
    return latest


def handles() -> tuple[int, int]:
    """(open file descriptors, mappings of snapshots) of this process."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(os.listdir("/proc/self/fd")), sum("/snapshots/" in line for line in maps)


def reader(path: Path, options: Mapping[str, str], place: int, counts: Any, stop: Any, answer: Path) -> None:
    partial = options["lookup.cache"] == "PARTIAL"
    rng = np.random.default_rng(os.getpid())
    if partial:
        fail_at_random(random.Random(os.getpid()), 0.1, 0.02)
        BlockCache._disk_for = lambda self, location: None  # type: ignore[method-assign]
    table = LookupTable(str(path), dict(options))
    newest = most = 0
    seen = set()
    fds, _ = handles()
    while not stop.is_set() or not seen:
        ids = [*IDS, *(rng.zipf(1.1, BATCH) % int(1.2 * FILES * EACH)).tolist()]
        try:
            state = state_of(ids, table.get_many(pa.table({"id": ids})))
        except (UfsUnavailableError, VersionGoneError):  # replaced in place before it was read: said, not mixed
            continue
        assert state >= newest, (state, newest)
        newest = state
        seen.add(state)
        counts[place] += 1
        most = max(most, table.metrics()["numCachedRecords"]) if partial else 0
    own = runtime().engine(LookupOptions.parse({"path": str(path), **options})).reader.metrics.snapshot()
    metrics = {**table.metrics(), "own reads through": own["snapshotReadThroughCount"]}
    answer.write_text(json.dumps([len(seen), handles()[0] - fds, handles()[1], most, metrics]))


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


def cache_of(home: Path, options: Mapping[str, str]) -> dict[str, str]:
    """Options with the cache directory of their mode."""
    name = {"FULL": "full", "PARTIAL": "small" if options == SMALL else "large"}[options["lookup.cache"]]
    return {**options, "lookup.cache.dir": str(home / name)}


def chaos(path: Path, home: Path) -> None:
    context = multiprocessing.get_context("fork")
    rng = random.Random(11)
    path.mkdir()
    for step in range(FILES):
        publish(path, step)
    counts = context.Array("q", len(READERS), lock=False)
    stop = context.Event()
    mine, theirs = context.Pipe()

    def begin(place: int) -> Any:
        return reader, (path, cache_of(home, READERS[place]), place, counts, stop, home / f"answer-{place}")

    def begin_reloader(place: int) -> Any:
        nonlocal mine, theirs
        mine, theirs = context.Pipe()  # what was under way in that of a process which was killed is nobody's
        return reloader, (path, cache_of(home, CACHE), theirs)

    readers, reloaders = Forked(begin, len(READERS)), Forked(begin_reloader, 1)
    kills = stops = 0
    for step in range(FILES, FILES + RELOADS):
        publish(path, step)
        mine.send(True)
        chance = rng.random()
        if chance < 0.2:  # in the middle of it, anywhere
            for _ in range(rng.randrange(30_000)):
                pass
            if chance < 0.08:
                os.kill(reloaders.processes[0].pid, signal.SIGSTOP)
                before = list(counts[:2])
                # Whatever it holds right now, nobody who answers from a snapshot waits for it.
                until(lambda b=before: all(counts[n] > b[n] + 3 for n in range(2)), "readers wait for a reload")
                stops += 1
            reloaders.replace(0)
            readers.replace(rng.choice([*range(len(READERS)), *range(4, len(READERS))]))
            kills += 1
            continue
        assert mine.poll(BOUND_S), "a reload hangs"
        mine.recv()
    stop.set()
    mine.send(False)
    must_end([*readers.processes, *reloaders.processes])
    (home / "kills").write_text(json.dumps([kills, stops]))
    # What stays: the latest version of each mode, once the others are past their time.
    last = LookupTable(str(path), cache_of(home, CACHE))
    last.reload()
    assert state_of(IDS, last.get_many(pa.table({"id": IDS}))) == FILES + RELOADS - 1


def test_reloads_under_reading_with_kills(tmp_path: Path) -> None:
    """Every answer is wholly of one state, none goes back, nobody waits, and afterwards disk and handles are as before."""
    path = tmp_path / "dim"
    in_fresh_process(chaos, path, tmp_path, bound_s=500)
    kills, stops = json.loads((tmp_path / "kills").read_text())
    assert kills > 20
    assert stops > 5
    for place, options in enumerate(READERS):
        states, fds, maps, most, metrics = json.loads((tmp_path / f"answer-{place}").read_text())
        assert states > 0
        assert metrics["snapshotDamagedCount"] == metrics["cacheFailureCount"] == 0
        if options["lookup.cache"] == "FULL":
            assert fds <= 20  # two snapshots of four layers with hidden rows each, and a lock or two
            assert maps <= 16
            assert options == UFS or metrics["own reads through"] == 0
        else:
            assert metrics["missCount"] == metrics["loadCount"] + metrics["numLoadFailures"]
            assert min(metrics["hitCount"], metrics["loadCount"], metrics["numLoadFailures"]) > 0
            # Of two processes each may add a batch when nothing is refused yet.
            assert options == LARGE or most <= ROWS * REFUSE_ABOVE + 2 * (BATCH + len(IDS))
    assert sum(f.stat().st_size for f in (tmp_path / "small" / "v1" / "snapshots").rglob("*")) < 2_000_000
    clock = FakeClock()
    for options in (CACHE, UFS):
        host = make_host(str(path), tmp_path / "full", clock)
        opts = LookupOptions.parse({"path": str(path), **options})
        table, _ = host.resolver.discover(opts)
        full = host.reader.fulls.of(table, opts)
        assert full is not None
        assert host.disk is not None
        snapshot = full.reload()
        clock.tick(10)
        assert full.reload().rows == FILES * EACH
        assert len(host.disk.segments(full.key)) <= 2 * len(snapshot.layers)
    host.disk.sweep()
    assert list((tmp_path / "full" / "v1" / "tmp").iterdir()) == []
    assert host.disk.check().damaged == ()


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
