"""What does a cluster ask of a store, and when does each of its hosts have a new version? In virtual time, without Spark.

    python -m benchmarks.sim_cluster --hosts 1000     # some minutes on one core
    python -m benchmarks.sim_cluster --quick          # half a minute: fewer hosts, smaller tables

Four tables (Delta, Iceberg, a directory, a managed table) get a commit every minute. Each worker of each host looks up keys in each of them
in every micro-batch. What is real: the engine of `pyspark_lookup` with its caches, locks, schedules and retries, and its S3 store; each host
has a cache directory, each worker a runtime. What is a model: the store (`virtual_s3.py`) and time (`virtual_time.py`), in which computing
takes none.

A thousand hosts are more than one machine can hold. So a few real hosts run first, and each request of theirs is recorded with the one that
it waited for. The other hosts repeat these records, each at its own times, against the same model of a store. `--parts check` runs the same
hosts both ways and prints both results.
"""

from __future__ import annotations

import argparse
import bisect
import collections
import dataclasses
import functools
import heapq
import itertools
import logging
import math
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import write_deltalake
from pyiceberg.catalog.sql import SqlCatalog

from benchmarks.virtual_s3 import Bucket, Limits, Request, StoreModel, VirtualS3
from benchmarks.virtual_time import VirtualTime, simulate_engine
from pyspark_lookup import LookupTable, PeriodicCacheReloadTrigger
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.lookup import runtime as runtimes
from pyspark_lookup.options.reload_trigger import LastReload

BEGIN_S = 1_800_000_000.0  # Unix time at which the hosts start
COMMIT_EVERY_S, COMMIT_AT_S = 60.0, 17.0
TABLES = ("delta", "iceberg", "directory", "managed")

# --- the tables -----------------------------------------------------------------------------------

Change = tuple[str, bytes | None]
"""The key of an object, and its new content; None: the object is removed."""


@dataclasses.dataclass(frozen=True)
class History:
    """The objects of a table when the hosts start, and the changes of each commit after that."""

    first: list[Change]
    commits: list[list[Change]]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The size of a table: `rows` in `files` at first, then `commits` commits of `new_rows` rows, each in one file."""

    rows: int
    files: int
    commits: int
    new_rows: int = 1000

    def first(self) -> Iterator[pa.Table]:
        for ids in np.array_split(np.arange(1, self.rows + 1), self.files):
            yield _rows(ids, 0)
        yield _rows(np.arange(1), 0)

    def commit(self, number: int) -> pa.Table:
        """New rows, and one with id 0, from which a reader can tell that it reads this commit."""
        begin = self.rows + number * self.new_rows
        return _rows(np.concatenate([[0], np.arange(begin, begin + self.new_rows)]), number)


def _rows(ids: Any, commit: int) -> pa.Table:
    rng = np.random.default_rng([commit, len(ids)])
    names = np.char.add("customer-", rng.integers(0, 10**6, len(ids)).astype(str))
    commits = np.full(len(ids), commit)
    return pa.table({"id": ids.astype(np.int64), "commit": commits, "score": rng.random(len(ids)), "name": names})


def make_histories(home: Path, sizes: Sizes) -> dict[str, History]:
    """Make each table's history, written by the usual library for its kind: deltalake, PyIceberg, pyarrow or this package."""
    return {name: _history(name, home / name, sizes, _writer(name, home / name)) for name in TABLES}


def _writer(name: str, place: Path) -> Callable[[pa.Table], object]:
    """The function that adds rows to a table in one commit."""
    place.mkdir(parents=True)
    if name == "delta":
        configuration = {"delta.checkpointInterval": "10"}
        return lambda rows: write_deltalake(place, rows, mode="append", configuration=configuration)
    if name == "iceberg":
        catalog = SqlCatalog("sim", uri="sqlite:///:memory:", warehouse=place.as_uri())
        catalog.create_namespace("ns")
        table = catalog.create_table("ns.sim", _rows(np.arange(1), 0).schema, location=place.as_uri())

        def append(rows: pa.Table) -> None:
            table.append(rows)
            hint = Path(table.metadata_location.removeprefix("file://")).name
            (place / "metadata" / "version-hint.text").write_text(hint)

        return append
    if name == "managed":
        managed = LookupTable(place, {"lookup.keys": "id", "lookup.cache.dir": str(place.with_name("writer"))})
        return managed.write
    numbers = itertools.count()
    return lambda rows: pq.write_table(rows, place / f"part-{next(numbers):05d}.parquet", compression="zstd")


def _history(name: str, place: Path, sizes: Sizes, append: Callable[[pa.Table], object]) -> History:
    objects: dict[str, bytes] = {}

    def changes() -> list[Change]:
        nonlocal objects
        before, objects = objects, {}
        for path in place.rglob("*"):
            if path.is_file():
                objects[f"{name}/{path.relative_to(place)}"] = path.read_bytes()
        return [(key, objects.get(key)) for key in {**before, **objects} if objects.get(key) != before.get(key)]

    for rows in sizes.first():
        append(rows)
    first, commits = changes(), []
    for number in range(1, sizes.commits + 1):
        append(sizes.commit(number))
        commits.append(changes())
    return History(first, commits)


def commit_s(number: int) -> float:
    """When a commit becomes visible in the store. Commits are numbered from 1."""
    return (number - 1) * COMMIT_EVERY_S + COMMIT_AT_S


def committed(at_s: float, commits: int) -> int:
    """The number of the newest commit at a time; 0: none yet."""
    return min(max(math.floor((at_s - COMMIT_AT_S) / COMMIT_EVERY_S) + 1, 0), commits)


# --- real hosts -----------------------------------------------------------------------------------

CACHES: dict[str, dict[str, str]] = {
    "NONE": {"lookup.cache": "NONE"},
    "PARTIAL": {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "100000"},
    "FULL": {"lookup.cache": "FULL"},
}
MODES = {"delta": "FULL", "iceberg": "PARTIAL", "directory": "NONE", "managed": "FULL"}
"""The cache of each table in the cluster."""


def cluster_options(interval_s: float) -> dict[str, dict[str, str]]:
    """The options with which the cluster reads its tables: all ask the store once per interval."""
    options = {}
    for name, mode in MODES.items():
        when = "lookup.full-cache.periodic-reload.interval" if mode == "FULL" else "lookup.metadata.sync-interval"
        options[name] = {**CACHES[mode], "lookup.metadata.source": "CACHE", when: f"{interval_s:g} s"}
    return options


@dataclasses.dataclass(frozen=True)
class Worker:
    """A process of a host."""

    host: int
    number: int
    runtime: runtimes.Runtime | None


@dataclasses.dataclass(frozen=True)
class Seen:
    """An answer: which commit it was read from, and when."""

    host: int
    table: str
    commit: int
    at_s: float


@dataclasses.dataclass
class Outcome:
    """What happened: all requests, the answers that showed a host something new, and the errors of lookups."""

    requests: list[Request] = dataclasses.field(default_factory=list)
    seen: list[Seen] = dataclasses.field(default_factory=list)
    errors: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    """How long the run took, in seconds of this machine's CPU."""


class RealHosts:
    """Hosts of workers that run the engine. `options`: the tables of each host, by name, with their options."""

    def __init__(
        self, histories: Mapping[str, History], options: Sequence[Mapping[str, Mapping[str, str]]], workers: int
    ) -> None:
        self._histories, self._options, self._workers = histories, options, workers

    def run(self, minutes: float, limits: Limits, batch_s: float, seed: int) -> Outcome:
        """Start all hosts at once, with empty caches, and run them for some minutes."""
        outcome, bucket, model = Outcome(), Bucket(), StoreModel(limits, seed)
        time_ = VirtualTime(lambda owner: setattr(runtimes, "_current", owner and owner.runtime))
        for key, data in itertools.chain(*(history.first for history in self._histories.values())):
            bucket.put(key, data, BEGIN_S - 3600)
        random.seed(seed)  # tenacity draws its pauses from this generator
        began_s = time.process_time()
        in_place: dict[str, Any] = {
            "_current": None,
            "open_store": lambda *_: VirtualS3(bucket, model, time_, outcome.requests),
        }
        with (
            tempfile.TemporaryDirectory(dir=_fast_directory()) as home,
            simulate_engine(time_, BEGIN_S),
            mock.patch.multiple(runtimes, **in_place),
        ):
            try:
                for host, number in itertools.product(range(len(self._options)), range(self._workers)):
                    clock = HostClock(
                        lambda: BEGIN_S + time_.now_s, lambda: 1000 + time_.now_s, time_.sleep, f"host-{host}"
                    )
                    worker = Worker(
                        host,
                        number,
                        runtimes.Runtime(clock, random.Random(f"{seed} {host} {number}"), host=f"host-{host}"),
                    )
                    work = functools.partial(self._work, time_, worker, Path(home), batch_s, outcome)
                    time_.start(f"worker-{host}-{number}", work, worker)
                time_.start("commits", functools.partial(self._commit, time_, bucket), Worker(-1, 0, None))
                time_.run(60 * minutes)
            finally:
                time_.close()
        outcome.seconds = time.process_time() - began_s
        return outcome

    def _commit(self, time_: VirtualTime, bucket: Bucket) -> None:
        for number in range(1, max(len(history.commits) for history in self._histories.values()) + 1):
            time_.sleep(commit_s(number) - time_.now_s)
            for key, data in itertools.chain(*(history.commits[number - 1] for history in self._histories.values())):
                bucket.put(key, data, BEGIN_S + time_.now_s)

    def _work(self, time_: VirtualTime, worker: Worker, home: Path, batch_s: float, outcome: Outcome) -> None:
        common = {"lookup.keys": "id", "lookup.cache.dir": str(home / f"host-{worker.host}")}
        tables = {
            name: LookupTable(f"s3://lake/{name}", {**common, **options})
            for name, options in self._options[worker.host].items()
        }
        rng = np.random.default_rng([worker.host, worker.number])
        newest = dict.fromkeys(tables, -1)
        while True:
            for name, table in tables.items():
                keys = pa.table({"id": np.concatenate([[0], rng.integers(1, 1000, 10)])})
                try:
                    rows = table.get_many(keys)
                except Exception as problem:
                    outcome.errors.append(f"{name}: {problem}")
                    continue
                commit = pc.max(rows.filter(pc.equal(rows["key_index"], 0))["commit"]).as_py()
                if commit > newest[name]:
                    newest[name] = commit
                    outcome.seen.append(Seen(worker.host, name, commit, time_.now_s))
            time_.sleep((math.floor(time_.now_s / batch_s) + 1) * batch_s - time_.now_s)


def _fast_directory() -> str | None:
    """Where the hosts' caches lie: in memory if possible, because the simulation does not count the time of a disk."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


# --- what they did, and hosts that do the same ------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Step:
    """A request of a program. It is sent `delay_s` after the answer to step number `after`; -1: after the program's start."""

    table: str
    kind: str
    size: int
    after: int
    delay_s: float


class Program:
    """The requests that a host makes for one purpose, each with the one that it waits for."""

    def __init__(self, requests: Sequence[Request]) -> None:
        ordered = sorted(requests, key=lambda request: request.start_s)
        ends = sorted((request.end_s, number) for number, request in enumerate(ordered))
        self.steps: list[Step] = []
        self.next: dict[int, list[int]] = collections.defaultdict(list)
        for number, request in enumerate(ordered):
            # Computing takes no time here, so a request begins when the answer it waited for arrives, or a pause after that.
            place = bisect.bisect_right(ends, (request.start_s, len(ordered))) - 1
            ended_s, after = ends[place] if place >= 0 else (ordered[0].start_s, -1)
            self.steps.append(Step(request.table, request.kind, request.size, after, request.start_s - ended_s))
            self.next[after].append(number)


_IDLE_S = 0.5  # a host that has waited for no answer for this long has finished its program
Programs = dict[tuple[str, int, int], list[Program]]
"""Programs by table and by the commits before and after; those of the start of a host under ("", -1, 0)."""


def _parts(requests: Sequence[Request]) -> Iterator[list[Request]]:
    """Cut the requests, in order of time, where none was under way for `_IDLE_S`."""
    part, end_s = list[Request](), -math.inf
    for request in sorted(requests, key=lambda request: request.start_s):
        if part and request.start_s > end_s + _IDLE_S:
            yield part
            part = []
        part.append(request)
        end_s = max(end_s, request.end_s)
    yield part


def recorded(requests: Sequence[Request], commits: int) -> Programs:
    """Find the programs in the requests of real hosts."""
    programs: Programs = collections.defaultdict(list)
    by_place: dict[tuple[int, str], list[Request]] = collections.defaultdict(list)
    for request in requests:
        starts = request.start_s < COMMIT_AT_S
        by_place[request.host, "" if starts else request.table].append(request)
    for (_, table), of_place in by_place.items():
        before = 0
        for part in _parts(of_place) if table else [of_place]:
            after = committed(part[0].start_s, commits)
            programs[(table, before, after) if table else ("", -1, 0)].append(Program(part))
            before = after
    return programs


@dataclasses.dataclass
class _Run:
    """A program that a host is running."""

    host: int
    program: Program
    left: int
    done: Callable[[_Run], None]
    began_s: dict[str, float] = dataclasses.field(default_factory=dict)  # by table
    ended_s: dict[str, float] = dataclasses.field(default_factory=dict)


class Replay:
    """Hosts that repeat recorded programs, each at its own times. A request that is refused is repeated as `Ufs` repeats it."""

    def __init__(self, programs: Programs, limits: Limits, commits: int, batch_s: float, seed: int) -> None:
        self._programs, self._commits, self._batch_s = programs, commits, batch_s
        self._model, self._rng = StoreModel(limits, seed), random.Random(seed)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._now_s = 0.0
        self.outcome = Outcome()

    def run(
        self,
        minutes: float,
        starts_s: Sequence[float],
        interval_s: float,
        jitter_s: float = 0.0,
    ) -> Outcome:
        """Run hosts that start at these times for some minutes."""
        began_s = time.process_time()
        for host, start_s in enumerate(starts_s):
            of_host = _Host(self, host, interval_s, self._rng.random() * jitter_s)
            self.at(start_s, self.start, host, "", -1, 0, of_host.started)
        until_s = 60 * minutes
        while self._events and self._events[0][0] < until_s:
            self._now_s, _, act, arguments = heapq.heappop(self._events)
            act(*arguments)
        self.outcome.seconds = time.process_time() - began_s
        return self.outcome

    def at(self, at_s: float, act: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), act, arguments))

    def start(self, host: int, table: str, before: int, after: int, on_done: Callable[[_Run], None]) -> None:
        program = self._find(host, table, before, after)
        run = _Run(host, program, len(program.steps), on_done)
        self._go_on(run, -1)

    def _find(self, host: int, table: str, before: int, after: int) -> Program:
        """Find a program that was recorded for these commits, or else the one whose number of commits is nearest."""
        if (table, before, after) not in self._programs:
            candidates = [key for key in self._programs if key[0] == table]
            nearest = min(candidates, key=lambda key: (abs(key[2] - key[1] - (after - before)), abs(key[2] - after)))
            self._programs[table, before, after] = self._programs[nearest]
        choices = self._programs[table, before, after]
        return choices[host % len(choices)]

    def _go_on(self, run: _Run, after: int) -> None:
        for number in run.program.next.get(after, ()):
            self.at(self._now_s + run.program.steps[number].delay_s, self._send, run, number, 1, 0.0)

    def _send(self, run: _Run, number: int, attempt: int, paused_s: float) -> None:
        step, now_s = run.program.steps[number], self._now_s
        run.began_s.setdefault(step.table, now_s)
        accepted, end_s = self._model.ask(now_s, run.host, step.table, step.kind, step.size)
        request = Request(run.host, step.table, step.kind, step.size * accepted, now_s, end_s, accepted)
        self.outcome.requests.append(request)
        if accepted:
            self.at(end_s, self._receive, run, number)
        elif paused_s < 60:
            pause_s = self._rng.uniform(0, min(0.1 * 2 ** (attempt - 1), 5))
            self.at(end_s + pause_s, self._send, run, number, attempt + 1, paused_s + pause_s)
        else:
            self.outcome.errors.append(f"{step.table}: refused for a minute")

    def _receive(self, run: _Run, number: int) -> None:
        run.ended_s[run.program.steps[number].table] = self._now_s
        run.left -= 1
        if run.left:
            self._go_on(run, number)
        else:
            run.done(run)

    def commit(self, at_s: float) -> int:
        return committed(at_s, self._commits)

    def batch_after(self, at_s: float) -> float:
        """The first micro-batch at a time or later."""
        return math.ceil(at_s / self._batch_s) * self._batch_s


class _Host:
    """When a host of a replay asks the store, and what it has then."""

    def __init__(self, replay: Replay, host: int, interval_s: float, late_s: float) -> None:
        self._replay, self._host, self._interval_s = replay, host, interval_s
        self._trigger = PeriodicCacheReloadTrigger(interval_s)
        self._trigger.late_s = late_s
        self._first_s: dict[str, float] = {}
        self._commits: dict[str, int] = {}

    def started(self, run: _Run) -> None:
        for table in MODES:
            self._first_s[table] = run.began_s[table]
            self._keep(table, run, self._replay.commit(run.began_s[table]))

    def _keep(self, table: str, run: _Run, commit: int) -> None:
        """Record which commit the host has now, and schedule its next request."""
        replay, began_s, ended_s = self._replay, run.began_s[table], run.ended_s[table]
        shows_s = replay.batch_after(ended_s) if MODES[table] == "FULL" and table in self._commits else ended_s
        if commit > self._commits.get(table, -1):
            replay.outcome.seen.append(Seen(self._host, table, commit, shows_s))
        self._commits[table] = commit
        if MODES[table] == "FULL":
            last = LastReload(self._first_s[table], began_s, ended_s)
            replay.at(self._trigger.due_s(last, ended_s), self._ask, table)
        else:  # the first micro-batch for which the version is too old
            replay.at(
                replay.batch_after(max(math.nextafter(began_s + self._interval_s, math.inf), ended_s)), self._ask, table
            )

    def _ask(self, table: str) -> None:
        commit = self._replay.commit(self._replay._now_s)
        on_done = functools.partial(self._asked, table, commit)
        self._replay.start(self._host, table, self._commits[table], commit, on_done)

    def _asked(self, table: str, commit: int, run: _Run) -> None:
        self._keep(table, run, commit)


# --- what is printed --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Prices:
    """List prices in dollars: for 1000 requests, and for a gigabyte that leaves the store."""

    writes: float
    reads: float
    gigabyte: float

    def of(self, requests: Sequence[Request]) -> float:
        """What these requests cost. Refused ones cost nothing: S3 does not bill 5xx."""
        writes = sum(request.kind in ("list", "put") for request in requests if request.accepted)
        reads = sum(request.kind in ("get", "head") for request in requests if request.accepted)
        sent_bytes = sum(request.size for request in requests)
        return writes / 1000 * self.writes + reads / 1000 * self.reads + sent_bytes / 1e9 * self.gigabyte


KINDS = ("list", "head", "get")


def counts(requests: Sequence[Request]) -> list[int]:
    """Count the requests of each of the `KINDS` that were carried out."""
    kinds = collections.Counter(request.kind for request in requests if request.accepted)
    return [kinds[kind] for kind in KINDS]


def refused(requests: Sequence[Request]) -> int:
    return sum(not request.accepted for request in requests)


def peak(requests: Sequence[Request]) -> int:
    """The largest number of requests that one prefix got within a second, including refused ones."""
    seconds = collections.Counter((request.table, int(request.start_s)) for request in requests)
    return max(seconds.values(), default=0)


def delays(outcome: Outcome, table: str, commit: int, hosts: int) -> list[float]:
    """How long after a commit each host answered from it or a newer one, in order; infinity if one never did."""
    first = dict.fromkeys(range(hosts), math.inf)
    for answer in outcome.seen:
        if answer.table == table and answer.commit >= commit:
            first[answer.host] = min(first[answer.host], answer.at_s)
    return sorted(at_s - (commit_s(commit) if commit else 0.0) for at_s in first.values())


def percentiles(outcome: Outcome, table: str, commits: Sequence[int], hosts: int) -> str:
    """The delays until 50, 99 and 100 % of the hosts have a commit, over all `commits`, as cells of a table."""
    every = sorted(itertools.chain(*(delays(outcome, table, commit, hosts) for commit in commits)))
    places = (math.ceil(share * len(every)) - 1 for share in (0.5, 0.99, 1.0))
    return " | ".join(f"{every[place]:.1f}" for place in places)


def show(title: str, columns: str, rows: Sequence[str]) -> None:
    print(f"\n## {title}\n\n| {columns} |\n|{'---|' * (columns.count('|') + 1)}")
    for row in rows:
        print(f"| {row} |")
    sys.stdout.flush()


def show_costs(histories: Mapping[str, History], workers: int, seed: int) -> None:
    """Print what one host asks of the store in each mode: at its start, when nothing has changed, and after a commit."""
    pairs = list(itertools.product(TABLES, CACHES))
    real = RealHosts(histories, [{name: CACHES[mode]} for name, mode in pairs], 1)
    outcome = real.run(COMMIT_AT_S / 60 + 2.2, Limits(), 30.0, seed)
    rows = []
    for host, (name, mode) in enumerate(pairs):
        cells = []
        for begin_s, end_s in ((0, 29), (60, 89), (90, 119)):  # commits at 17 and 77 s, micro-batches every 30 s
            of_host = [r for r in outcome.requests if r.host == host and begin_s <= r.start_s < end_s]
            cells.append(" + ".join(map(str, counts(of_host))) + f" | {sum(r.size for r in of_host):,}")
        rows.append(f"{name} | {mode} | {' | '.join(cells)}")
    columns = "table | cache | start: LIST + HEAD + GET | bytes | unchanged | bytes | a commit | bytes"
    show("One host, one worker (real engine)", columns, rows)
    _show_errors(outcome)


def _show_errors(outcome: Outcome) -> None:
    if outcome.errors:
        print(f"\n{len(outcome.errors)} lookups failed, the first with: {outcome.errors[0]}")


def show_check(histories: Mapping[str, History], args: argparse.Namespace, limits: Limits) -> None:
    """Print the results of the same hosts, run by the engine and by a replay of two other hosts."""
    options = cluster_options(args.interval_s)
    scaled = limits.scaled(args.check_hosts / args.hosts)
    minutes, commits = args.check_minutes, args.commits
    two = RealHosts(histories, [options] * 2, args.check_workers).run(minutes, Limits(), args.batch_s, args.seed)
    hosts = RealHosts(histories, [options] * args.check_hosts, args.check_workers)
    real = hosts.run(minutes, scaled, args.batch_s, args.seed + 1)
    programs = recorded(two.requests, commits)
    replay = Replay(programs, scaled, commits, args.batch_s, args.seed + 2)
    replayed = replay.run(minutes, [0.0] * args.check_hosts, args.interval_s)
    rows = []
    newest = committed(60 * minutes - 2 * args.interval_s, commits)
    for name, outcome in (("engine", real), ("replay", replayed)):
        for table in MODES:
            of_table = [request for request in outcome.requests if request.table == table]
            cells = [*map(str, counts(of_table)), f"{sum(r.size for r in of_table):,}", str(refused(of_table))]
            starts = percentiles(outcome, table, [0], args.check_hosts)
            later = percentiles(outcome, table, range(1, newest + 1), args.check_hosts)
            rows.append(f"{name} | {table} | {' | '.join(cells)} | {starts} | {later}")
    columns = (
        "how | table | LIST | HEAD | GET | bytes | refused | start: 50 % | 99 % | 100 % | a commit: 50 % | 99 % | 100 %"
    )
    title = f"{args.check_hosts} hosts of {args.check_workers} workers, real and replayed, limits of {scaled.rates['read']:g} GET/s"
    show(title, columns, rows)
    print(f"\nCPU: engine {real.seconds:.1f} s, replay {replayed.seconds:.1f} s.")
    _show_errors(real)
    _show_errors(replayed)


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A run of all hosts: they start within `spread_s`, with a `lookup.full-cache.reload-jitter` of `jitter_s`."""

    name: str
    limits: Limits
    spread_s: float = 0.0
    jitter_s: float = 0.0


def show_cluster(programs: Programs, args: argparse.Namespace, scenarios: Sequence[Scenario]) -> None:
    """Print what all hosts ask of the store, what it costs, and when each has a new version."""
    prices = Prices(args.dollars_per_1000_writes, args.dollars_per_1000_reads, args.dollars_per_gb)
    spent, start, later = [], [], []
    for scenario in scenarios:
        replay = Replay(programs, scenario.limits, args.minutes, args.batch_s, args.seed)
        starts_s = [scenario.spread_s * host / args.hosts for host in range(args.hosts)]
        outcome = replay.run(args.minutes, starts_s, args.interval_s, scenario.jitter_s)
        began_s = 60 * math.ceil((scenario.spread_s + 60) / 60)
        cold = [request for request in outcome.requests if request.start_s < began_s]
        warm = [request for request in outcome.requests if request.start_s >= began_s]
        minutes = args.minutes - began_s / 60
        for name, requests in (("start", cold), ("a minute", warm)):
            over = minutes if requests is warm else 1
            cells = [f"{count / over:,.0f}" for count in counts(requests)]
            cells += [f"{sum(r.size for r in requests) / over / 1e6:,.0f}", f"{peak(requests):,}"]
            cells += [f"{refused(requests) / over:,.0f}", f"{prices.of(requests) / over:.4f}"]
            cells += ["" if requests is cold else f"{prices.of(requests) / over * 1440:.2f}"]
            spent.append(f"{scenario.name} | {name} | {' | '.join(cells)}")
        newest = committed(60 * args.minutes - 2 * args.interval_s, args.minutes)
        oldest = committed(began_s, args.minutes) + 1
        for table in MODES:
            start.append(f"{scenario.name} | {table} | {percentiles(outcome, table, [0], args.hosts)}")
            later.append(
                f"{scenario.name} | {table} | {percentiles(outcome, table, range(oldest, newest + 1), args.hosts)}"
            )
        _show_errors(outcome)
    title = f"{args.hosts} hosts of {args.workers} workers (replayed)"
    columns = "scenario | when | LIST | HEAD | GET | MB | most in a second to a prefix | refused | $ | $ a day"
    show(f"{title}: requests", columns, spent)
    show(f"{title}: seconds until hosts answer for the first time", "scenario | table | 50 % | 99 % | 100 %", start)
    show(f"{title}: seconds from a commit until hosts answer from it", "scenario | table | 50 % | 99 % | 100 %", later)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes: only to see that it runs")
    parser.add_argument("--parts", default="costs,check,cluster")
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=16, help="processes of a host")
    parser.add_argument("--real-hosts", type=int, default=2, help="hosts whose requests are recorded")
    parser.add_argument("--only", default="", help="run the scenarios whose names have this")
    parser.add_argument("--minutes", type=int, default=10, help="virtual time of the cluster")
    parser.add_argument("--batch-s", type=float, default=20.0, help="time between micro-batches")
    parser.add_argument("--interval-s", type=float, default=60.0, help="reload and sync interval")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--commits", type=int, default=3, help="commits that real hosts see")
    parser.add_argument("--check-hosts", type=int, default=20)
    parser.add_argument("--check-workers", type=int, default=2)
    parser.add_argument("--check-minutes", type=float, default=4)
    parser.add_argument("--seed", type=int, default=7)
    limits = Limits()
    parser.add_argument("--gets-per-s", type=float, default=limits.rates["read"], help="GET and HEAD, per prefix")
    parser.add_argument("--lists-per-s", type=float, default=limits.rates["list"])
    parser.add_argument("--latency-s", type=float, default=limits.latency_s)
    parser.add_argument("--latency-p99-s", type=float, default=limits.latency_p99_s)
    parser.add_argument("--connection-mb-per-s", type=float, default=limits.connection_bytes_per_s / 1e6)
    parser.add_argument("--host-gbit-per-s", type=float, default=limits.host_bytes_per_s * 8 / 1e9)
    # S3 Standard, us-east-1, 2026-11: https://aws.amazon.com/s3/pricing/
    parser.add_argument("--dollars-per-1000-writes", type=float, default=0.005, help="PUT, COPY, POST and LIST")
    parser.add_argument("--dollars-per-1000-reads", type=float, default=0.0004, help="GET, HEAD and others")
    parser.add_argument("--dollars-per-gb", type=float, default=0.0, help="traffic within a region is free")
    args = parser.parse_args()
    if args.quick:
        small = {"hosts": 50, "workers": 2, "minutes": 7, "rows": 2000, "files": 4, "commits": 2, "check_hosts": 3}
        vars(args).update(small, check_workers=1, check_minutes=3)
    return args


def main() -> None:
    args = _arguments()
    began_s = time.process_time()
    logging.getLogger("pyspark_lookup").setLevel(
        logging.ERROR
    )  # the caches lie in memory, and the store is slow on purpose
    limits = Limits(
        {"read": args.gets_per_s, "list": args.lists_per_s, "write": args.lists_per_s},
        latency_s=args.latency_s,
        latency_p99_s=args.latency_p99_s,
        connection_bytes_per_s=args.connection_mb_per_s * 1e6,
        host_bytes_per_s=args.host_gbit_per_s * 1e9 / 8,
    )
    print(f"command: {' '.join(['python', '-m', 'benchmarks.sim_cluster', *sys.argv[1:]])}")
    print(f"machine: {platform.machine()}, Linux {platform.release()}, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as home:
        histories = make_histories(Path(home), Sizes(args.rows, args.files, args.commits))
    if "costs" in args.parts:
        show_costs(histories, args.workers, args.seed)
    if "check" in args.parts:
        show_check(histories, args, limits)
    if "cluster" in args.parts:
        options = cluster_options(args.interval_s)
        minutes = (commit_s(args.commits) + 3 * args.interval_s) / 60
        hosts = RealHosts(histories, [options] * args.real_hosts, args.workers)
        real = hosts.run(minutes, Limits(), args.batch_s, args.seed)
        _show_errors(real)
        programs = recorded(real.requests, args.commits)
        print(
            f"\nCPU of {args.real_hosts} real hosts of {args.workers} workers, for {minutes:.1f} minutes: {real.seconds:.1f} s."
        )
        tenth = limits.scaled(0.1)
        scenarios = [
            Scenario("in step", limits),
            Scenario("with jitter", limits, jitter_s=args.interval_s),
            Scenario("start spread over 60 s", limits, spread_s=60.0),
            Scenario("in step, a tenth of the rate", tenth),
            Scenario("with jitter, a tenth of the rate", tenth, jitter_s=args.interval_s),
        ]
        show_cluster(programs, args, [scenario for scenario in scenarios if args.only in scenario.name])
    print(f"\nCPU in all: {time.process_time() - began_s:.0f} s.")


if __name__ == "__main__":
    main()
