"""The parts of a soak, each a process of its own: the store, writers, a cluster of two executors, and the application."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.cluster import Cluster, environment
from tests.soak import tables
from tests.workers import Workers, notes_in

FAULTS = {"delayed": 0.05, "refused": 0.02, "lost": 0.01, "unanswered": 0.01, "truncated": 0.01}
"""How often the store fails, of all requests."""
STORM = {**FAULTS, "refused": 0.4, "lost": 0.1}
STARTED_WITHIN_S = 300.0
ROWS_PER_SECOND = 200
WRITERS = {"publisher": 0, "committer0": 0, "committer1": 1, "upkeep": 0}
_WRAPPER = Path(__file__).with_name("python")


class Parts:
    """The processes of one soak, in a directory of its own."""

    cluster: Cluster

    def __init__(self, work: Path, rng: random.Random) -> None:
        self.work = work
        self.notes = work / "notes"
        self.workers = Workers(work)
        self._rng = rng
        self.directories = [work / "cache0", work / "cache1", work / "cache-driver"]

    def start(self, variables: Sequence[Mapping[str, str]]) -> None:
        """Returns once a first micro-batch is through. `variables`: those of the environments of the executors."""
        os.environ["SOAK_PYTHON"] = sys.executable
        self.workers.start("store", "tests.proxy", {}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.store, self.endpoint = self.workers.hear("store")
        self.fail(FAULTS)
        tables.client(self.store).create_bucket(Bucket=tables.BUCKET)
        for name in WRITERS:
            self._start_writer(name)
        self._wait(
            lambda: {note["kind"] for note in notes_in(self.notes)} >= {"published", "acknowledged"}, "the tables"
        )
        settings = {"lookup.cache.max-bytes": str(tables.MAX_BYTES)}
        self.cluster = Cluster(self.work, self.directories[:2], settings, variables)
        conf = self.work / "driver.conf"
        conf.write_text(f"lookup.cache.dir = {self.directories[2]}\nlookup.cache.max-bytes = {tables.MAX_BYTES}\n")
        given = {"master": self.cluster.master, "home": str(self.work), "notes": str(self.notes)}
        given |= {"endpoint": self.endpoint, "rate": ROWS_PER_SECOND}
        python = {"PYSPARK_PYTHON": str(_WRAPPER), "PYSPARK_DRIVER_PYTHON": sys.executable}
        self.workers.start(
            "application", "tests.soak.application", given, stdin=subprocess.PIPE, env={**environment(conf), **python}
        )
        self._wait(lambda: any(note["kind"] == "progress" for note in notes_in(self.notes)), "a first micro-batch")

    def fail(self, shares: Mapping[str, float]) -> dict[str, int]:
        """Let the store fail so often from now on; how often it has done what."""
        self.workers.tell("store", json.dumps(shares))
        counts: dict[str, int] = self.workers.hear("store")
        return counts

    @property
    def application(self) -> int:
        """Its process."""
        return self.workers.running["application"].pid

    def _start_writer(self, name: str) -> None:
        given = {"role": name.rstrip("01"), "name": name, "index": WRITERS[name], "notes": str(self.notes)}
        given |= {
            "endpoint": self.endpoint,
            "seed": self._rng.getrandbits(32),
            "cache": str(self.work / "cache-writers"),
        }
        self.workers.start(name, "tests.soak.writers", given)

    def restart_writer(self, rng: random.Random) -> None:
        """Kill one of the writers, and have another process go on in its place."""
        name = rng.choice(sorted(WRITERS))
        self.workers.kill(name)
        self._start_writer(name)

    def _wait(self, until: Callable[[], bool], what: str) -> None:
        began = time.monotonic()
        while not until():
            assert time.monotonic() - began < STARTED_WITHIN_S, f"{what}: not there after {STARTED_WITHIN_S} s"
            self.workers.check_alive()
            time.sleep(0.2)

    def stop(self) -> None:
        """Have the application end the query and itself, stop the cluster and the writers, and have the store fail no more."""
        self.workers.tell("application", "stop")
        self.workers.must_end("application", STARTED_WITHIN_S)
        self.cluster.close()
        for name in WRITERS:
            self.workers.kill(name)

    def close(self) -> None:
        self.workers.close()
        if hasattr(self, "cluster"):
            self.cluster.close()
