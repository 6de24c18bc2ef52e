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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pyspark_lookup.base.errors import UfsUnavailableError
from pyspark_lookup.cache.partial.host_cache import REFUSE_ABOVE, SharedCache
from pyspark_lookup.cache.partial.host_segment import Freshness
from pyspark_lookup.cache.partial.read_through import PartialCache
from pyspark_lookup.engine.lookup_table import LookupTable
from pyspark_lookup.io.block_cache import BlockCache
from pyspark_lookup.table.host_versions import HostVersions
from tests.processes.test_snapshots import EACH, FILES, first_states, publish
from tests.workers import Forked, Notes, fail_at_random, in_fresh_process, must_end, notes_in

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


def with_notes(notes: Notes) -> None:
    """From now on it is noted when this process first knew of a version, each key it loaded and shared, and failures."""
    seen: set[str] = set()
    lookup, put, learned = PartialCache.lookup, SharedCache.put, HostVersions.learn

    def note(version: str) -> None:
        if version not in seen:
            seen.add(version)
            notes.add("seen", version=version)

    def noted_learned(self: HostVersions, table: Any, version: Any, *more: Any, **named: Any) -> Any:
        note(version.digest)  # before anybody else on the host can know of it
        return learned(self, table, version, *more, **named)

    def noted_lookup(self: PartialCache, keys: Sequence[pa.Array], fresh: Freshness, load: Any) -> pa.Table:
        note(fresh.version)
        try:
            return lookup(self, keys, fresh, load)
        except UfsUnavailableError:
            notes.add("failed", version=fresh.version)
            raise

    def noted_put(self: SharedCache, keys: Any, hashes: Any, rows: Any, fresh: Freshness, loaded_s: float) -> None:
        put(self, keys, hashes, rows, fresh, loaded_s)
        notes.add("load", version=fresh.version, keys=keys[0].to_pylist())

    HostVersions.learn = noted_learned  # type: ignore[method-assign]
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


def worker(path: Path, root: Path, place: int, seed: int, stop: Any) -> None:
    kind, options = ("large", LARGE) if place % 2 else ("small", SMALL)
    rng = np.random.default_rng(seed)
    fail_at_random(random.Random(seed), 0.1, 0.02)
    BlockCache._disk_for = lambda self, location: None  # type: ignore[method-assign]
    with_notes(Notes(root / f"notes-{kind}", str(place)))
    table = LookupTable(str(path), {**options, "lookup.cache.dir": str(root / kind)})
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
    (root / f"answer-{place}").write_text(json.dumps([lookups, most, used, table.metrics()]))


def chaos(path: Path, root: Path) -> None:
    rng = random.Random(3)
    first_states(path)
    stop = multiprocessing.get_context("fork").Event()
    seeds = iter(range(10**6))
    workers = Forked(lambda place: (worker, (path, root, place, next(seeds), stop)), PROCESSES)
    kills, step = 0, FILES
    began = time.monotonic()

    def goes_on(now: float) -> bool:
        enough = kills > KILLS and step > FILES + STEPS and len(loads_in(root)) > KEYS
        return not enough and now < began + AT_MOST_S

    while (now := time.monotonic()) < began + SECONDS or goes_on(now):
        stop.wait(0.1)  # the others have the processors meanwhile
        if rng.random() < 0.3:
            workers.replace(rng.randrange(PROCESSES))
            kills += 1
        if rng.random() < 0.15:
            publish(path, step)
            step += 1
    stop.set()
    must_end(workers.processes)
    (root / "done").write_text(json.dumps([kills, step]))


def loads_in(root: Path) -> dict[tuple[str, int], list[float]]:
    """When those with a large cache have loaded each key of each version."""
    loads: dict[tuple[str, int], list[float]] = defaultdict(list)
    for note in notes_in(root / "notes-large"):
        for key in note.get("keys", []):
            loads[note["version"], key].append(note["at"])
    return loads


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
    notes = notes_in(root / "notes-large")
    assert any(note["kind"] == "failed" for note in [*notes, *notes_in(root / "notes-small")])
    seen: dict[str, float] = {}
    for note in notes:
        if note["kind"] == "seen":
            seen.setdefault(note["version"], note["at"])
    loads = loads_in(root)
    assert len(loads) > KEYS
    for (version, key), times in loads.items():
        for again in times[1:]:
            # What is superseded may be given up: it was asked for by one that had resolved it before.
            assert any(seen[version] < birth <= again for birth in seen.values()), (version, key, times)
    used = sum(f.stat().st_size for f in (root / "small" / "v1" / "snapshots").rglob("*"))
    assert used < 2_000_000
