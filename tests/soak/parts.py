"""The parts of a soak, each a process of its own: store, proxy, writers, a cluster of two executors, and the application."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster import Cluster, environment
from tests.soak import tables
from tests.soak.chaos import Clocks, Disk, LimitedFiles, SmallDisk
from tests.soak.notes import notes_in
from tests.soak.processes import python_workers

STARTED_WITHIN_S = 300.0
ROWS_PER_SECOND = 200
WRITERS = {"publisher": 0, "committer0": 0, "committer1": 1, "upkeep": 0}
_WRAPPER = Path(__file__).with_name("python")


class Parts:
    """The processes of one soak, in a directory of its own. `disk` is that of the second executor's cache."""

    disk: Disk
    cluster: Cluster

    def __init__(self, work: Path, rng: random.Random) -> None:
        self.work = work
        self.notes = work / "notes"
        self._rng = rng
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._closing = contextlib.ExitStack()
        self._no_tmpfs = ""
        self.clocks = Clocks(work)
        try:
            self.disk = SmallDisk(work / "disk")
        except OSError as problem:
            self._no_tmpfs = str(problem)
            self.disk = LimitedFiles(work / "cache1", lambda: python_workers(self.cluster.workers[1].pid))
        self._closing.callback(self.disk.close)
        self.directories = [work / "cache0", self.disk.directory, work / "cache-driver"]

    def start(self) -> None:
        """Returns once a first micro-batch is through."""
        os.environ["SOAK_PYTHON"] = sys.executable
        self.store = self._hear("store", {})
        self.endpoint = self._hear("proxy", {"store": self.store, "seed": self._rng.getrandbits(32)})
        tables.client(self.store).create_bucket(Bucket=tables.BUCKET)
        for name in WRITERS:
            self._start_writer(name)
        self._wait(lambda: {note["kind"] for note in notes_in(self.notes)} >= {"published", "committed"}, "the tables")
        settings = {"lookup.cache.max-bytes": str(tables.MAX_BYTES)}
        variables = [self.clocks.variables(number) for number in range(2)]
        self.cluster = Cluster(self.work, self.directories[:2], settings, variables)
        self._closing.callback(self.cluster.close)
        conf = self.work / "driver.conf"
        conf.write_text(f"lookup.cache.dir = {self.directories[2]}\nlookup.cache.max-bytes = {tables.MAX_BYTES}\n")
        given = {"master": self.cluster.master, "home": str(self.work), "notes": str(self.notes)}
        given |= {"endpoint": self.endpoint, "rate": ROWS_PER_SECOND}
        python = {"PYSPARK_PYTHON": str(_WRAPPER), "PYSPARK_DRIVER_PYTHON": sys.executable}
        self._spawn("application", given, stdin=subprocess.PIPE, env={**environment(conf), **python})
        self._wait(lambda: any(note["kind"] == "progress" for note in notes_in(self.notes)), "a first micro-batch")

    def missing(self) -> dict[str, str]:
        """What of the harm cannot be done here, and why."""
        found = {"clock not stepped": self.clocks.missing, "no full tmpfs": self._no_tmpfs}
        return {what: why for what, why in found.items() if why}

    # --- processes --------------------------------------------------------------------------------

    @property
    def application(self) -> int:
        """Its process."""
        return self._processes["application"].pid

    def _start_writer(self, name: str) -> None:
        given = {"role": name.rstrip("01"), "name": name, "index": WRITERS[name], "notes": str(self.notes)}
        given |= {"store": self.store, "endpoint": self.endpoint, "seed": self._rng.getrandbits(32)}
        self._spawn(name, {**given, "cache": str(self.work / "cache-writers")}, module="writers")

    def restart_writer(self, rng: random.Random) -> None:
        """Kill one of the writers, and have another process go on in its place."""
        name = rng.choice(sorted(WRITERS))
        self._end(name)
        self._start_writer(name)

    def stop_writers(self) -> None:
        for name in WRITERS:
            self._end(name)

    def _end(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def _spawn(self, name: str, given: dict[str, Any], module: str | None = None, **more: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", f"tests.soak.{module or name}", json.dumps(given)]
        with (self.work / f"{name}.log").open("a") as log:
            self._processes[name] = subprocess.Popen(command, stderr=log, text=True, **more)
        return self._processes[name]

    def _hear(self, name: str, given: dict[str, Any]) -> str:
        process = self._spawn(name, given, stdout=subprocess.PIPE)
        assert process.stdout is not None
        return process.stdout.readline().strip()

    def _wait(self, until: Callable[[], bool], what: str) -> None:
        began = time.monotonic()
        while not until():
            assert time.monotonic() - began < STARTED_WITHIN_S, f"{what}: not there after {STARTED_WITHIN_S} s"
            self.check_alive()
            time.sleep(0.2)

    def check_alive(self) -> None:
        """AssertionError if a process has ended by itself."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                tail = (self.work / f"{name}.log").read_text()[-3000:]
                raise AssertionError(f"{name} has ended ({process.returncode}):\n{tail}")

    def order(self, text: str) -> None:
        """Tell the application."""
        stdin = self._processes["application"].stdin
        assert stdin is not None
        stdin.write(text + "\n")
        stdin.flush()

    def stop_application(self) -> None:
        """Have it end the query and itself, and stop the cluster."""
        self.order("stop")
        self._processes["application"].wait(timeout=STARTED_WITHIN_S)
        del self._processes["application"]
        self.cluster.close()

    def close(self) -> None:
        for name in list(self._processes):
            self._end(name)
        self._closing.close()
