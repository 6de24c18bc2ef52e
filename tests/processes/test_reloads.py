"""A thousand reloads under reading: real processes that share a cache directory, killed and paused anywhere."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup.errors import VersionGoneError
from pyspark_lookup.lookup.lookup_table import LookupTable
from pyspark_lookup.sources.registry import parse_options
from tests.support.fakes import FakeClock, make_host
from tests.support.workers import BOUND_S, in_fresh_process, must_end

FILES, EACH, RELOADS = 3, 400, 1000
IDS = [0, EACH, 2 * EACH, 10**9]  # one of each file, and one that none has
FULL = {"lookup.keys": "id", "lookup.cache": "FULL", "lookup.full-cache.retain": "1 s"}
CACHE = {**FULL, "lookup.metadata.source": "CACHE", "lookup.full-cache.periodic-reload.interval": "1 h"}
UFS = {**FULL, "lookup.full-cache.build-wait": "20 ms", "lookup.on-version-gone": "FAIL"}
PARTIAL = {"lookup.keys": "id", "lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "300"}
READERS = (CACHE, CACHE, UFS, UFS, PARTIAL, PARTIAL)
STOP = len(READERS)  # where the readers see that it is over


def publish(path: Path, step: int) -> None:
    """State `step` of the table: file step % FILES says so in every row, and has another size than before."""
    number = step % FILES
    ids = range(number * EACH, (number + 1) * EACH)
    table = pa.table({"id": ids, "step": pa.array([step] * EACH, pa.int32())})
    temporary = path / f".{number}.new"
    pq.write_table(table.replace_schema_metadata({"pad": "x" * (step // FILES)}), temporary)
    os.replace(temporary, path / f"{number}.parquet")


def state_of(table: LookupTable, ids: list[int]) -> int:
    """The state that all rows found are of; fails if there never was one."""
    rows = table.get_many(pa.table({"id": ids}))
    assert rows.column("id").to_pylist() == [id_ for id_ in ids if id_ < FILES * EACH]
    steps = sorted(
        {(step, id_ // EACH) for step, id_ in zip(*(rows.column(c).to_pylist() for c in ("step", "id")), strict=True)}
    )
    latest = steps[-1][0]
    assert steps == [(step, step % FILES) for step in range(latest - 2, latest + 1)]
    return latest


def read(path: Path, options: Mapping[str, str], place: int, counts: Any, answer: Path) -> None:
    rng, table = random.Random(os.getpid()), LookupTable(str(path), dict(options))
    newest, fds = 0, len(os.listdir("/proc/self/fd"))
    while not counts[STOP] or not newest:
        try:
            state = state_of(table, IDS + rng.choices(range(2 * FILES * EACH), k=50))
        except VersionGoneError:  # replaced in place before it was read: said, not mixed
            continue
        assert state >= newest, (state, newest)
        newest = state
        counts[place] += 1
    maps = sum("/snapshots/" in line for line in Path("/proc/self/maps").read_text().splitlines())
    answer.write_text(json.dumps([len(os.listdir("/proc/self/fd")) - fds, maps, table.metrics()]))


def reload(path: Path, options: Mapping[str, str], pipe: Any) -> None:
    table = LookupTable(str(path), dict(options))
    while pipe.recv():
        pipe.send(table.reload())


def cached(home: Path, options: Mapping[str, str]) -> dict[str, str]:
    return {**options, "lookup.cache.dir": str(home / options["lookup.cache"])}


def chaos(path: Path, home: Path) -> None:
    context, rng = multiprocessing.get_context("fork"), random.Random(11)
    counts = context.Array("q", len(READERS) + 1, lock=False)  # without a lock, which one that is killed would keep
    path.mkdir()
    for step in range(FILES):
        publish(path, step)

    def start(function: Any, *given: Any) -> Any:
        process = context.Process(target=function, args=(path, *given), daemon=True)
        process.start()
        return process

    def reader(place: int) -> Any:
        return start(read, cached(home, READERS[place]), place, counts, home / f"answer-{place}")

    def reloader() -> tuple[Any, Any]:
        mine, theirs = context.Pipe()  # what was under way in that of a process which was killed is nobody's
        return start(reload, cached(home, CACHE), theirs), mine

    readers = [reader(place) for place in range(len(READERS))]
    reloading, pipe = reloader()
    kills = pauses = 0
    for step in range(FILES, FILES + RELOADS):
        publish(path, step)
        pipe.send(True)
        chance = rng.random()
        if chance > 0.2:
            assert pipe.poll(BOUND_S), "a reload hangs"
            pipe.recv()
            continue
        for _ in range(rng.randrange(30_000)):  # in the middle of it, anywhere
            pass
        if chance < 0.08:
            os.kill(reloading.pid, signal.SIGSTOP)
            before, deadline = list(counts[:2]), time.monotonic() + BOUND_S
            # Whatever it holds right now, nobody who answers from a snapshot waits for it.
            while not all(counts[n] > before[n] + 3 for n in range(2)):
                os.sched_yield()
                assert time.monotonic() < deadline, "readers wait for a reload"
            pauses += 1
        place = rng.randrange(len(READERS))
        for process in (reloading, readers[place]):
            process.kill()
            process.join()
        (reloading, pipe), readers[place] = reloader(), reader(place)
        kills += 1
    counts[STOP] = 1
    pipe.send(False)
    must_end([*readers, reloading])
    assert kills > 100
    assert pauses > 30
    table = LookupTable(str(path), cached(home, CACHE))
    table.reload()
    assert state_of(table, IDS) == FILES + RELOADS - 1


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_reloads_under_reading_with_kills(tmp_path: Path) -> None:
    """Every answer is wholly of one state, none goes back, nobody waits, and afterwards disk and handles are as before."""
    path, clock = tmp_path / "dim", FakeClock()
    in_fresh_process(chaos, path, tmp_path, bound_s=1000)
    for place, options in enumerate(READERS):
        fds, maps, metrics = json.loads((tmp_path / f"answer-{place}").read_text())
        assert metrics["snapshotDamagedCount"] == metrics["cacheFailureCount"] == 0
        if options is PARTIAL:
            assert metrics["missCount"] == metrics["loadCount"] + metrics["numLoadFailures"]
        else:
            assert (fds <= 20, maps <= 16) == (True, True)  # two snapshots of four layers with deletes each, some locks
    for options in (CACHE, UFS):
        host = make_host(str(path), tmp_path / "FULL", clock)
        opts = parse_options({"path": str(path), **options})
        full = host.reader.fulls.get_cache(host.resolver.discover(opts)[0], opts)
        assert full is not None
        assert host.disk is not None
        layers = full.reload().layers
        clock.tick(10)
        assert full.reload().rows == FILES * EACH
        assert len(host.disk.segments(full.key)) <= 2 * len(layers)
    host.disk.sweep()
    assert list((tmp_path / "FULL" / "v1" / "tmp").iterdir()) == []
    assert host.disk.check().damaged == ()
