"""A soak from beginning to end: writers, a cluster and a stream are started, harmed while they run, stopped, and what came out is checked."""

import collections
import contextlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark_lookup.errors import PysparkLookupError, VersionGoneError
from pyspark_lookup.lookup.runtime import runtime
from pyspark_lookup.sources.registry import parse_options
from tests.history.checker import check, states
from tests.history.run import S3Place, start_worker
from tests.soak import tables
from tests.soak.chaos import FAULTS, Chaos, Clocks
from tests.soak.checker import check_batches, check_late, collect_batches
from tests.soak.watch import Watch, check_directory
from tests.support.cluster import Cluster, environment
from tests.support.s3server import S3Server
from tests.support.workers import Following, Notes, Workers, read_notes

ROWS_PER_SECOND = 200
WRITERS = ("publisher", "writer0", "writer1")
_SAMPLED_EVERY_S = 2.0
_STARTED_WITHIN_S = 300.0


class Soak:
    cluster: Cluster

    def __init__(self, work: Path, seed: int, hang_s: float) -> None:
        self.rng = random.Random(seed)
        self.clocks = Clocks(work)
        self.workers = Workers(work)
        self.directories = [work / "cache0", work / "cache1", work / "cache-driver"]
        self._work = work
        self._place = S3Place(work, S3Server(), tables.BUCKET, FAULTS)
        self._notes = work / "notes"
        self._following = Following(self._notes)
        self._counts = collections.Counter[str]()
        self._hang_s, self._written_at, self._unwritten_s = hang_s, time.monotonic(), 0.0
        self._versions = Notes(self._notes, "versions")
        self._noted = 0

    def start(self) -> None:
        """Returns once a first micro-batch is through."""
        os.environ["SOAK_PYTHON"] = sys.executable
        self._place.begin(self.rng.getrandbits(32))
        for name in WRITERS:
            self._start_writer(name)
        self._wait(lambda: self._kinds() >= {"published", "acknowledged"}, "the tables")
        settings = {"lookup.cache.max-bytes": str(tables.MAX_BYTES)}
        variables = [self.clocks.variables(number) for number in range(2)]
        self.cluster = Cluster(self._work, self.directories[:2], settings, variables)
        conf = self._work / "driver.conf"
        conf.write_text(f"lookup.cache.dir = {self.directories[2]}\nlookup.cache.max-bytes = {tables.MAX_BYTES}\n")
        arguments: dict[str, Any] = {"master": self.cluster.master, "home": str(self._work), "notes": str(self._notes)}
        arguments |= {"storage": self._place.storage, "rate": ROWS_PER_SECOND}
        wrapper = Path(__file__).with_name("python")
        python = {"PYSPARK_PYTHON": str(wrapper), "PYSPARK_DRIVER_PYTHON": sys.executable}
        self.workers.start(
            "application",
            "tests.soak.application",
            arguments,
            stdin=subprocess.PIPE,
            env={**environment(conf), **python},
        )
        self._wait(lambda: "progress" in self._kinds(), "a first micro-batch")

    def _start_writer(self, name: str) -> None:
        cache, seed = str(self._work / "cache-writers"), self.rng.getrandbits(32)
        if name == "publisher":
            arguments = {"name": name, "notes": str(self._notes), "cache": cache, "seed": seed}
            arguments["endpoint"] = self._place.storage["lookup.storage.endpoint_url"]
            self.workers.start(name, "tests.soak.publisher", arguments)
            return
        options = {"lookup.keys": "id", "lookup.cache.dir": cache, "lookup.max-retries": "8", **self._place.storage}
        options["lookup.write.compact-after"] = "6"
        more = {"pause_s": 12, "vacuumed_after": "60 s"}
        start_worker(self.workers, name, self._place, self._work, options, seed, **more)

    def restart_writer(self) -> None:
        name = self.rng.choice(WRITERS)
        self.workers.kill(name)
        self._start_writer(name)

    def fail(self, shares: dict[str, float]) -> None:
        self._place.proxy.begin_at_random(shares, self.rng.getrandbits(32))

    def _kinds(self) -> set[str]:
        return {note["kind"] for note in read_notes(self._notes)}

    def _wait(self, until: Callable[[], bool], event: str) -> None:
        start_s = time.monotonic()
        while not until():
            assert time.monotonic() - start_s < _STARTED_WITHIN_S, f"{event}: not there after {_STARTED_WITHIN_S} s"
            self.workers.check_alive()
            time.sleep(0.2)

    def close(self) -> None:
        self.workers.close()
        if hasattr(self, "cluster"):
            self.cluster.close()

    def run(self, seconds: float) -> dict[str, Any]:
        """Do harm for so long, and until each kind is done, at most twice as long. Returns the report, whose `wrong` is empty if all is well."""
        watch = Watch(self.cluster, self.workers.running["application"].pid, self.directories)
        chaos = Chaos(self)
        start_s, sample_at = time.monotonic(), 0.0
        while (now_s := time.monotonic()) < start_s + seconds or (
            chaos.pending_kinds and now_s < start_s + 2 * seconds
        ):
            time.sleep(0.1)
            self.workers.check_alive()
            self._follow()
            chaos.tick(now_s, self._counts["written"])
            if now_s >= sample_at:
                watch.sample()
                with contextlib.suppress(PysparkLookupError):  # in a storm
                    self._note_versions()
                sample_at = now_s + _SAMPLED_EVERY_S
        chaos.end()
        self.workers.tell("application", "stop")
        self.workers.must_end("application", _STARTED_WITHIN_S)
        self.cluster.close()
        for name in WRITERS:
            self.workers.kill(name)
        self._place.end()
        self._note_versions()
        return {**self._checked(watch.wrong()), **chaos.summarize(), "medians of the quarters": watch.summarize()}

    def _follow(self) -> None:
        """Take in what has happened. AssertionError if no micro-batch is written for `hang_s`, unless the run itself has stopped the query."""
        for note in self._following.new():
            kind = note["kind"]
            if note["who"] == "application":
                self._counts[kind] += 1
                if kind in ("written", "stopping") or (kind == "started" and self._written_at == math.inf):
                    self._written_at = math.inf if kind == "stopping" else note["at"]
                if kind.endswith(("ended", "not started")):
                    print(f"{kind}: {note['error']}", flush=True)
        self._unwritten_s = max(self._unwritten_s, time.monotonic() - self._written_at)
        assert self._unwritten_s <= self._hang_s, f"no micro-batch was written for {self._unwritten_s:.0f} s"

    def _note_versions(self) -> None:
        """Note which digest readers are told of each version of the managed table that is new, before a vacuum may remove it."""
        lookup_options = {"lookup.cache.dir": str(self._work / "cache-writers"), "lookup.max-retries": "8"}
        options = parse_options({"path": tables.MANAGED, **lookup_options, **self._place.storage})
        state = runtime().engine(options).managed.log(tables.MANAGED).latest()
        for change in state.changes:
            if change.position > self._noted:
                with contextlib.suppress(VersionGoneError):
                    digest = state.version(change.position).digest
                    self._versions.add("version", position=change.position, digest=digest)
                self._noted = change.position

    def _checked(self, wrong: list[str]) -> dict[str, Any]:
        notes = read_notes(self._notes)
        report: dict[str, Any] = {}
        try:
            history, tags = states(self._place.log(), self._place.read_file)
            writers = [note for note in notes if str(note["who"]).startswith("writer")]
            report["writes"] = check(writers, history, tags, lambda worker: True, lambda worker: True)
            report.update(check_batches(collect_batches(self._work, notes), notes, history))
            report["late"] = check_late(collect_batches(self._work, notes, "late"))
        except AssertionError as problem:
            wrong.append(str(problem))
            (self._work / "events.jsonl").write_bytes(b"\n".join(self._place.log()))
        report["directories"] = {}
        for directory in self.directories:
            report["directories"][directory.name], problems = check_directory(directory)
            wrong += problems
        took = [note["ms"] for note in notes if note["kind"] == "progress"]
        report["stream"] = {
            **self._counts,
            "median micro-batch (ms)": statistics.median(took),
            "slowest (ms)": max(took),
        }
        report["longest between micro-batches (s)"] = round(self._unwritten_s, 1)
        return {**report, "requests": dict(self._place.proxy.counts), "wrong": wrong}


def soak(work: Path, seconds: float, seed: int, hang_s: float) -> dict[str, Any]:
    """Run a soak for so many seconds; returns its report. AssertionError if it could not go on, or hung for `hang_s`."""
    running = Soak(work, seed, hang_s)
    if running.clocks.missing:
        print(f"clocks are not stepped: {running.clocks.missing}", flush=True)
    try:
        running.start()
        print("the stream runs", flush=True)
        report = running.run(seconds)
    finally:
        running.close()
    print(json.dumps(report, indent=1), flush=True)
    return report
