"""The partial cache: lookups through the caches, alone and several at once."""

import dataclasses
import fcntl
import functools
import gc
import random
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

from pyspark_lookup.cache.memory import DefaultLookupCache
from pyspark_lookup.cache.partial import invalidations, read_through
from pyspark_lookup.cache.partial.host_cache import Freshness
from pyspark_lookup.cache.partial.read_through import Flights
from pyspark_lookup.columnar.keys import Keys, Numbers
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.errors import UfsUnavailableError
from pyspark_lookup.storage.context import HostContext
from tests.support.disks import Opened, handles_below
from tests.support.fakes import FakeClock
from tests.support.partial_cache import BOUND_S, NONE, ROWS, SEED, SPACE, Source, Worker, differing

TWO_CALLERS = pytest.mark.parametrize("where", ["one process", "no directory", "two processes"])
V1 = "1" * 32
SHARED = pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "alone"])


def run_all(*functions: Callable[[], object]) -> None:
    with ThreadPoolExecutor(len(functions)) as pool:
        for future in [pool.submit(function) for function in functions]:
            future.result(BOUND_S)


def test_an_interrupted_load_is_a_failure(cache_dir: Path, source: Source) -> None:
    """A load that ends by KeyboardInterrupt, too, counts as failed, and its keys are free for others."""
    worker = Worker(cache_dir, source)
    source.before = mock.Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        worker.lookup(1)
    assert worker.get_counters() == (0, 1, 0, 1)
    assert list((cache_dir / "v1" / "claims").glob("*/*")) == []


@SHARED
def test_entries_are_as_old_as_the_moment_before_their_load(
    cache_dir: Path, clock: FakeClock, source: Source, is_shared: bool
) -> None:
    """Rows that took three seconds to load are three seconds old when they come, here and for the host; so long is the load's time."""
    bounds = dataclasses.replace(NONE, expire_after_write_s=10.0)
    root = cache_dir if is_shared else None
    worker = Worker(root, source, clock, bounds)
    source.before = lambda keys: clock.tick(3)
    worker.lookup(1, 2)
    assert worker.count("latestLoadTime") == 3000
    source.before = lambda keys: None
    clock.tick(6.875)
    worker.lookup(1)
    if is_shared:
        second = Worker(root, source, clock, bounds)
        assert second.lookup(1) == [[10]]
        assert source.loaded() == [1, 2]
        clock.tick(0.125)
        second.lookup(1)
        assert source.loaded() == [1]
    else:
        clock.tick(0.125)
        worker.lookup(1, 2)
        assert source.loaded() == [1, 1, 2, 2]
        assert worker.count("latestLoadTime") == 0


@SHARED
@pytest.mark.parametrize("before", [1, 0])
def test_keys_that_are_to_be_forgotten(
    cache_dir: Path, clock: FakeClock, source: Source, is_shared: bool, before: int
) -> None:
    """Forgotten keys, and no others, are loaded again once, whichever process looks up, before and after a merge; a load under way is not kept."""
    root = cache_dir if is_shared else None
    worker = Worker(root, source, clock)
    second = Worker(root, source, clock) if is_shared else worker
    for reader in (worker, second):
        reader.lookup(1, 2, 3, 4)
    assert source.loaded() == [1, 2, 3, 4]
    if before:  # the caller has seen one already
        worker.invalidate(77)
        worker.lookup(4)
    worker.invalidate(1, 3)
    worker.invalidate(3)
    source.versions["v1"] = {1: [11], 2: [21], 3: [31], 4: [41]}
    assert second.lookup(1, 2, 3) == [[11], [20, 21], [31]]
    assert worker.lookup(1, 2, 3, 4) == [[11], [20, 21], [31], [40]]
    assert source.loaded() == [1, 3]

    def meanwhile(keys: list[int]) -> None:
        source.before = lambda keys: None
        second.invalidate(5)
        second.lookup(4)

    source.versions["v1"][5] = [50]
    source.before = meanwhile
    assert worker.lookup(5) == [[50]]
    source.versions["v1"][5] = [51]
    assert [reader.lookup(5, 5) for reader in (second, worker)] == [[[51], [51]]] * 2
    assert source.loaded() == [5, 5]
    if worker.process is not None:
        worker.process.shared._merge(Freshness("v1", ROWS, lambda version, keys: None))
        assert Worker(root, source, clock).lookup(1, 2, 3, 5) == [[11], [20, 21], [31], [51]]
        assert (source.loaded(), len(worker.process.names())) == ([], 1)


@pytest.mark.parametrize("before", [True, False])
def test_calls_are_counted_anew_where_the_directory_was_removed(
    cache_dir: Path, clock: FakeClock, source: Source, before: bool
) -> None:
    """Once the records were removed, the next call makes a process forget what it holds, whatever number that call has."""
    reader, caller = Worker(cache_dir, source, clock), Worker(cache_dir, source, clock)
    source.versions["v1"] = {1: [15]}
    if before:
        caller.invalidate(77)
    assert reader.lookup(1) == [[15]]
    shutil.rmtree(cache_dir / "v1" / "records")
    source.versions["v1"] = {1: [16]}
    caller.invalidate(1)
    assert reader.lookup(1) == [[16]]


RELOADED = {"many keys": [1, 2], "damage": [1, 1, 2, 2], "lost": [1, 2], "a reboot": [1]}


@pytest.mark.parametrize("harm", RELOADED)
def test_what_is_known_of_forgotten_keys_has_an_end(
    cache_dir: Path, clock: FakeClock, source: Source, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is not known any more which keys were forgotten, all that was loaded before is loaded again; after a reboot it is known."""
    worker = Worker(cache_dir, source, clock)
    worker.lookup(1, 2)
    monkeypatch.setattr(invalidations, "_BYTES_AT_MOST", 47 if harm == "many keys" else 48)
    worker.invalidate(1)
    worker.invalidate(8)
    (*_, record) = sorted((cache_dir / "v1" / "records").glob("invalidated~*/*"))
    if harm == "damage":
        record.write_bytes(b"noise")
    elif harm == "lost":  # with what the host shares
        worker.lookup(8)
        shutil.rmtree(record.parent)
        Opened(cache_dir).disk.clear()
    source.loaded()
    now_s = clock.host("boot-2").steady_s
    rebooted = dataclasses.replace(clock.host("boot-2"), steady_s=lambda: now_s() - 1000)
    later = Worker(cache_dir, source, clock, host=rebooted if harm == "a reboot" else None)
    for reader in (later,) if harm == "a reboot" else (later, worker):
        for _ in range(2):
            assert reader.lookup(1, 2) == [[10], [20, 21]]
    assert source.loaded() == RELOADED[harm]


VERSIONS = {"v1": {1: [10], 2: [20, 21], 3: []}, "v2": {1: [11], 2: [20, 21], 3: []}}


@SHARED
@pytest.mark.parametrize("one_cache", [True, False])
def test_who_answers_from_an_older_version(cache_dir: Path, clock: FakeClock, is_shared: bool, one_cache: bool) -> None:
    """A load that began before the version changed still answers its caller, but its rows are put into no cache of the new version."""
    source = Source(**VERSIONS)
    cache = DefaultLookupCache(max_rows=100, clock=clock.host().steady_s, rng=random.Random(7))
    worker = Worker(cache_dir if is_shared else None, source, clock, make=(lambda: cache) if one_cache else None)
    answers: list[Any] = []

    def switch(keys: list[int]) -> None:
        source.before = lambda keys: None
        answers.append(worker.lookup(2, version="v2", may_differ=differing(1)))

    source.before = switch
    assert worker.lookup(1, 2) == [[10], [20, 21]]
    assert answers == [[[20, 21]]]
    assert worker.lookup(1, 2, version="v2", may_differ=differing(1)) == [[11], [20, 21]]
    source.loaded()
    # And a lookup that begins later finds what is there of its own version only.
    assert worker.lookup(1, 2, may_differ=differing(1)) == [[10], [20, 21]]
    assert source.loaded() == ([] if is_shared else [1, 2])
    assert worker.lookup(1, version="v2", may_differ=differing(1)) == [[11]]


def two_workers(cache_dir: Path, source: Source, where: str) -> tuple[Worker, Worker]:
    """Two callers at once: threads of one process, that shares or does not, or processes."""
    root = None if where == "no directory" else cache_dir
    first = Worker(root, source, host=HostClock())
    return first, first if where != "two processes" else Worker(root, source, host=HostClock())


def wait_in_load(source: Source, waiting: Worker, problem: Exception | None = None) -> threading.Event:
    """The first load goes on when somebody waits for it, and may fail then; the event says that it has begun."""
    loading = threading.Event()

    def meet(keys: list[int]) -> None:
        if not loading.is_set():
            loading.set()
            assert waiting.metrics.waits.wait(BOUND_S)
            if problem is not None:
                raise problem

    source.before = meet
    return loading


@TWO_CALLERS
@pytest.mark.parametrize("hashes", ["good", "alike"])
def test_keys_that_two_lack_are_loaded_once(
    cache_dir: Path, source: Source, where: str, hashes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that comes while keys are being loaded waits, and has hits; each key is loaded once, also where all have one hash."""
    if hashes == "alike":
        monkeypatch.setattr(Keys, "hashes", lambda self, seed: np.zeros(self.rows, np.uint64))
    first, second = two_workers(cache_dir, source, where)
    loading = wait_in_load(source, second)
    answers: dict[str, Any] = {}

    def look_up_beside() -> None:
        assert loading.wait(BOUND_S)
        answers["second"] = second.lookup(2, 4, 1, 2)

    run_all(lambda: answers.update(first=first.lookup(1, 2, 3)), look_up_beside)
    assert answers == {"first": [[10], [20, 21], []], "second": [[20, 21], [40], [10], [20, 21]]}
    assert source.loaded() == [1, 2, 3, 4]
    assert first.lookup(1, 4, 7, 2) == [[10], [40], [70], [20, 21]]
    if hashes == "alike":
        return
    assert second.count("loadWaitCount") == 2
    if where == "two processes":
        assert first.get_counters() == (3, 4, 4, 0)
        assert second.get_counters() == (3, 1, 1, 0)
    else:
        assert first.get_counters() == (6, 5, 5, 0)


@TWO_CALLERS
def test_when_a_load_fails_the_others_try(cache_dir: Path, source: Source, where: str) -> None:
    """A caller that waited for a load that failed loads for itself; the error is for the caller whose load it was."""
    first, second = two_workers(cache_dir, source, where)
    loading = wait_in_load(source, second, UfsUnavailableError("injected"))

    def fail() -> None:
        with pytest.raises(UfsUnavailableError):
            first.lookup(1, 2)

    def look_up_beside() -> None:
        assert loading.wait(BOUND_S)
        assert second.lookup(2, 1) == [[20, 21], [10]]

    run_all(fail, look_up_beside)
    assert [sorted(keys) for keys in source.loads] == [[1, 2], [1, 2]]
    assert tuple(map(sum, zip(*{id(w): w.get_counters() for w in (first, second)}.values(), strict=True))) == (
        0,
        4,
        2,
        2,
    )


def test_a_loader_that_does_not_end_is_waited_for_once(cache_dir: Path, clock: FakeClock, source: Source) -> None:
    """After the longest wait for another's load its keys are loaded all the same, and from then on at once."""
    worker = Worker(cache_dir, source, clock, wait_s=20.0)
    arrays = [pa.array([1, 2, 5], pa.int64())]
    stuck = Opened(cache_dir).disk.create_claim(SPACE, "v1", np.sort(Keys(arrays).hashes(SEED)).tobytes())
    assert worker.lookup(1, 3) == [[10], []]
    assert 20 <= sum(clock.slept) <= 20.1
    clock.slept.clear()
    assert worker.lookup(2, 5, 1) == [[20, 21], [50, 51], [10]]
    assert clock.slept == []
    assert source.loaded() == [1, 2, 3, 5]
    stuck.release()


def test_a_thread_that_does_not_end_is_waited_for_once(source: Source) -> None:
    """Within one process, too, a caller that has waited for another thread as long as was said loads for itself."""
    worker = Worker(None, source, wait_s=0.01)
    loading, end = threading.Event(), threading.Event()

    def hang(keys: list[int]) -> None:
        if not loading.is_set():
            loading.set()
            assert end.wait(BOUND_S)

    def look_up_beside() -> None:
        assert loading.wait(BOUND_S)
        assert worker.lookup(2) == [[20, 21]]
        end.set()

    source.before = hang
    run_all(lambda: worker.lookup(1, 2), look_up_beside)


@pytest.mark.parametrize("broken", ["claims", "locks", "snapshots", "tmp", "all"])
def test_a_broken_directory_costs_loads_only(cache_dir: Path, source: Source, broken: str) -> None:
    """Whatever of the directory cannot be written, a process answers by itself, and counts the failures; it shares once the directory is there again."""
    worker = Worker(cache_dir, source)
    root = cache_dir / "v1"
    for name in [broken] if broken != "all" else ["claims", "locks", "snapshots", "tmp"]:
        shutil.rmtree(root / name)
        (root / name).symlink_to("nowhere")
    for _ in range(2):
        assert worker.lookup(1, 2, 3) == [[10], [20, 21], []]
    assert source.loaded() == [1, 2, 3]
    assert worker.get_counters() == (3, 3, 3, 0)
    assert worker.count("cacheFailureCount") > 0
    worker.clock.tick(2)
    assert worker.lookup(1) == [[10]]
    if broken != "all":
        (root / broken).unlink()
        (root / broken).mkdir()
        worker.lookup(5)
        assert Worker(cache_dir, source).lookup(5) == [[50, 51]]
        assert source.loaded() == [5]
    shutil.rmtree(cache_dir)
    assert worker.lookup(1, 4) == [[10], [40]]


@TWO_CALLERS
def test_many_callers_of_few_keys(cache_dir: Path, where: str) -> None:
    """However many callers ask at once, in any sets, each key is loaded once, and every answer is right."""
    source = Source(v1={n: [n, n + 1000] for n in range(30)})
    workers = two_workers(cache_dir, source, where)

    def work(number: int) -> None:
        rng = random.Random(number)
        for _ in range(15):
            keys = [rng.randrange(30) for _ in range(rng.randrange(1, 8))]
            assert workers[number % 2].lookup(*keys) == [[key, key + 1000] for key in keys]

    run_all(*(functools.partial(work, number) for number in range(5)))
    loaded = source.loaded()
    assert len(loaded) == len(set(loaded))


def numbers(*hashes: int) -> Numbers:
    return np.array(hashes, np.uint64)


def make_flights(opened: Opened) -> Flights:
    context = HostContext(opened.disk, opened.metrics, FakeClock().host(), random.Random())
    return Flights(context, SPACE, SEED, BOUND_S)


def test_nothing_is_claimed_by_who_loads_nothing(opened: Opened) -> None:
    """A call that leaves all its keys to others stands in nobody's way; after any number of flights nothing is open or locked."""
    flights = [make_flights(opened) for _ in range(4)]
    with flights[0].claim(numbers(1, 2), V1), flights[1].claim(numbers(1, 2), V1) as second:
        assert not second.to_load.any()
        with flights[2].claim(numbers(3), V1) as more:
            assert more.to_load.all()
            more.wait()
        with flights[0].claim(numbers(), V1) as none:
            assert len(none.to_load) == 0
    for number in range(20):
        with flights[number % 4].claim(numbers(number, 100), V1), flights[(number + 1) % 4].claim(numbers(100), V1):
            pass
    gc.collect()
    assert handles_below(opened.root) == []
    for path in (opened.root / "locks").iterdir():
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_lock_that_is_not_had_costs_single_flight_only(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another process holds the lock for too long, a process loads without saying so."""
    monkeypatch.setattr(read_through, "_LOCK_WAIT_S", 0.0)
    lock = Opened(opened.root.parent).disk.acquire("claim", SPACE, 0)
    with make_flights(opened).claim(numbers(1), V1) as first, make_flights(opened).claim(numbers(1), V1) as second:
        assert first.to_load.all()
        assert second.to_load.all()
    lock.release()
    assert list((opened.root / "claims").glob("*/*")) == []
