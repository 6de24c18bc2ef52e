"""Eight real processes with one partial cache: killed at any moment, over a store that fails and is slow.

As in `test_fill`, the test hands a function of this module to a fresh process, which may fork.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import resource
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import pyspark_lookup.engine.runtime as runtime_module
from pyspark_lookup.base.errors import UfsUnavailableError
from pyspark_lookup.cache.partial.host_cache import REFUSE_ABOVE, SharedCache
from pyspark_lookup.cache.partial.host_segment import Freshness
from pyspark_lookup.cache.partial.read_through import PartialCache
from pyspark_lookup.engine.lookup_table import LookupTable
from pyspark_lookup.io.block_cache import BlockCache
from pyspark_lookup.io.stores import open_store
from pyspark_lookup.table.host_versions import HostVersions
from tests.fakes import FaultyStore
from tests.processes.test_fill import in_fresh_process, must_end
from tests.processes.test_snapshots import EACH, FILES, publish

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]

SECONDS = 20
AT_MOST_S = 120  # on a slow machine, until there are more of these
KILLS, STEPS, KEYS = 20, 5, 2000
LOOKUPS = 3  # by each process that is there in the end
PROCESSES = 8
BATCH = 100
ROWS = 300  # of the processes with a small cache
PARTIAL = {"lookup.keys": "id", "lookup.cache": "PARTIAL", "lookup.max-retries": "1"}
LARGE = {**PARTIAL, "lookup.partial-cache.max-rows": "1000000"}
SMALL = {**PARTIAL, "lookup.partial-cache.max-rows": str(ROWS)}
TIMES_OUT = 0.02


def with_faults(rng: random.Random) -> None:
    """From now on one call of the store in twenty fails and one in twenty is slow; nothing fetched is kept as blocks."""

    def before(kind: str, subject: object) -> None:
        chance = rng.random()
        if chance < 0.05:
            raise UfsUnavailableError(f"{kind} {subject}: injected")
        if chance < 0.1:
            time.sleep(TIMES_OUT)  # what a slow store does

    def opened(*args: Any) -> FaultyStore:
        store = FaultyStore(open_store(*args))
        store.before = before
        return store

    runtime_module.open_store = opened  # type: ignore[assignment]
    BlockCache._keepable = lambda self, location: False  # type: ignore[method-assign]


def with_log(path: Path) -> None:
    """From now on `path` tells when this process first knew of a version, each key it loaded and shared, and failures."""
    log = path.open("a", buffering=1)
    seen: set[str] = set()
    lookup, put, learned = PartialCache.lookup, SharedCache.put, HostVersions.learned

    def note(version: str) -> None:
        if version not in seen:
            seen.add(version)
            log.write(json.dumps(["seen", time.monotonic(), version, []]) + "\n")

    def noted_learned(self: HostVersions, table: Any, version: Any, *more: Any, **named: Any) -> Any:
        note(version.digest)  # before anybody else on the host can know of it
        return learned(self, table, version, *more, **named)

    def noted_lookup(self: PartialCache, keys: Sequence[pa.Array], fresh: Freshness, load: Any) -> pa.Table:
        note(fresh.version)
        try:
            return lookup(self, keys, fresh, load)
        except UfsUnavailableError:
            log.write(json.dumps(["failed", time.monotonic(), fresh.version, []]) + "\n")
            raise

    def noted_put(self: SharedCache, keys: Any, hashes: Any, rows: Any, fresh: Freshness, loaded_s: float) -> None:
        put(self, keys, hashes, rows, fresh, loaded_s)
        log.write(json.dumps(["load", time.monotonic(), fresh.version, keys[0].to_pylist()]) + "\n")

    HostVersions.learned = noted_learned  # type: ignore[method-assign]
    PartialCache.lookup = noted_lookup  # type: ignore[method-assign]
    SharedCache.put = noted_put  # type: ignore[method-assign]


def check(ids: Sequence[int], found: pa.Table) -> None:
    """Each key has its one row or, where no file has it, none; and all rows are of one published state."""
    steps: dict[int, set[int]] = defaultdict(set)
    there = [(n, i) for n, i in enumerate(ids) if i < FILES * EACH]
    assert found.column("key_index").to_pylist() == [n for n, _ in there]
    assert found.column("id").to_pylist() == [i for _, i in there]
    for (_, i), step in zip(there, found.column("step").to_pylist(), strict=True):
        steps[i // EACH].add(step)
    assert all(len(of_file) == 1 and step % FILES == n for n, of_file in steps.items() for step in of_file), steps
    latest = [step for of_file in steps.values() for step in of_file]
    assert not latest or max(latest) < min(latest) + FILES, steps


def worker(path: Path, options: Mapping[str, str], seed: int, stop: Any, answer: Path, log: Path) -> None:
    rng = np.random.default_rng(seed)
    with_faults(random.Random(seed))
    with_log(log)
    table = LookupTable(str(path), dict(options))
    lookups = most = 0
    while not stop.is_set() or lookups < LOOKUPS:
        ids = (rng.zipf(1.1, BATCH) % int(1.2 * FILES * EACH)).tolist()
        try:
            check(ids, table.get_many(pa.table({"id": ids})))
        except UfsUnavailableError:
            continue
        lookups += 1
        most = max(most, table.metrics()["numCachedRecords"])
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer.write_text(json.dumps([lookups, most, used, table.metrics()]))


def chaos(path: Path, root: Path) -> None:
    context = multiprocessing.get_context("fork")
    rng = random.Random(3)
    path.mkdir()
    (path.parent / "sizes").mkdir()
    for step in range(FILES):
        publish(path, step)
    stop = context.Event()
    seeds = iter(range(10**6))

    def started(place: int) -> Any:
        kind, options = ("large", LARGE) if place % 2 else ("small", SMALL)
        at = {**options, "lookup.cache.dir": str(root / kind)}
        args = (path, at, next(seeds), stop, root / f"answer-{place}", root / f"log-{kind}-{place}")
        process = context.Process(target=worker, args=args)
        process.start()
        return process

    workers = [started(place) for place in range(PROCESSES)]
    kills, step = 0, FILES
    began = time.monotonic()

    def goes_on(now: float) -> bool:
        loads = {(version, key) for _, _, version, keys in lines_of(root, "large") for key in keys}
        enough = kills > KILLS and step > FILES + STEPS and len(loads) > KEYS
        return not enough and now < began + AT_MOST_S

    while (now := time.monotonic()) < began + SECONDS or goes_on(now):
        stop.wait(0.1)  # the others have the processors meanwhile
        if rng.random() < 0.3:
            place = rng.randrange(PROCESSES)
            workers[place].kill()
            workers[place].join()
            workers[place] = started(place)
            kills += 1
        if rng.random() < 0.15:
            publish(path, step)
            step += 1
    stop.set()
    must_end(workers)
    (root / "done").write_text(json.dumps([kills, step]))


def lines_of(root: Path, kind: str) -> Iterator[list[Any]]:
    """What the processes with one kind of cache have noted; a line that a kill has cut short is none."""
    for log in root.glob(f"log-{kind}-*"):
        yield from (json.loads(line) for line in log.read_text().splitlines() if line.endswith("]"))


def test_eight_processes(tmp_path: Path) -> None:
    """No wrong row; no key loaded twice for a current version; rows, disk and memory within their bounds."""
    root = tmp_path / "root"
    root.mkdir()
    in_fresh_process(chaos, tmp_path / "dim", root, bound_s=300)
    kills, steps = json.loads((root / "done").read_text())
    assert kills > KILLS
    assert steps > FILES + STEPS
    answers = [json.loads((root / f"answer-{place}").read_text()) for place in range(PROCESSES)]
    for place, (lookups, most, used_kb, metrics) in enumerate(answers):
        assert lookups >= LOOKUPS
        assert used_kb < 600_000
        assert metrics["hitCount"] > 0
        assert metrics["missCount"] > 0
        assert metrics["missCount"] == metrics["loadCount"] + metrics["numLoadFailures"]
        assert metrics["snapshotDamagedCount"] == metrics["cacheFailureCount"] == 0
        if place % 2 == 0:  # of four processes each may add a batch when nothing is refused yet
            assert most <= ROWS * REFUSE_ABOVE + PROCESSES // 2 * BATCH
    assert any(kind == "failed" for of in ("small", "large") for kind, *_ in lines_of(root, of))
    seen: dict[str, float] = {}
    loads: dict[tuple[str, int], list[float]] = defaultdict(list)
    for kind, at, version, keys in lines_of(root, "large"):
        if kind == "seen":
            seen[version] = min(at, seen.get(version, at))
        for key in keys:
            loads[version, key].append(at)
    assert len(loads) > KEYS
    births = sorted(seen.values())
    for (version, key), times in loads.items():
        for again in sorted(times)[1:]:
            # What is superseded may be given up: it was asked for by one that had resolved it before.
            assert any(seen[version] < birth <= again for birth in births), (version, key, times)
    used = sum(f.stat().st_size for f in (root / "small" / "v1" / "snapshots").rglob("*"))
    assert used < 2_000_000
