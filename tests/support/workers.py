"""Processes of the tests: started, paused, killed and started again, over stores that fail; and the notes that they leave."""

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pyspark_lookup.errors import UfsUnavailableError
from pyspark_lookup.lookup import runtime as runtime_module
from pyspark_lookup.storage.stores import open_store
from tests.support.fakes import FaultyStore

BOUND_S = 120  # far above what any of this takes; a process not done by then hangs


def in_fresh_process(function: Callable[..., None], *args: Any, bound_s: float = BOUND_S) -> None:
    """Run it in a spawned process, which may fork as that of the tests may not; it must end well, and in time."""
    child = multiprocessing.get_context("spawn").Process(target=function, args=args)
    child.start()
    child.join(bound_s)
    if child.is_alive():
        child.kill()
        pytest.fail("the process hangs")
    assert child.exitcode == 0


def anonymous_bytes() -> int:
    """The memory that this process has beside the pages of files."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def measure_growth(run: Callable[[], object]) -> int:
    """How many bytes more than before `anonymous_bytes` are at most while a function runs."""
    before, most, ended = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            most[0] = max(most[0], anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run()
    finally:
        ended.set()
        watcher.join()
    return most[0] - before


def must_end(processes: list[Any]) -> None:
    """Wait for started processes; none may fail or hang."""
    try:
        for process in processes:
            process.join(BOUND_S)
        assert [process.exitcode for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            process.kill()


class Workers:
    """Processes by name: modules that are run as programs, each with a JSON object. What they complain of is in `<name>.err`."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self.running: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, module: str, arguments: Mapping[str, Any], **more: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", module, json.dumps(arguments)]
        with (self._work / f"{name}.err").open("a") as errors:
            self.running[name] = subprocess.Popen(command, stderr=errors, text=True, **more)
        return self.running[name]

    def tell(self, name: str, text: str) -> None:
        """Give a line to one that was started with a pipe for it."""
        self.running[name].stdin.write(text + "\n")
        self.running[name].stdin.flush()

    def kill(self, name: str) -> None:
        with self.running.pop(name) as process:
            process.kill()

    @contextlib.contextmanager
    def paused(self, names: Iterable[str]) -> Iterator[None]:
        """Have processes stand still meanwhile: what they had begun they end later, over what others have done."""
        processes = [self.running[name] for name in names]
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for process in processes:
                process.send_signal(signal.SIGCONT)

    def check_alive(self) -> None:
        """AssertionError if one has ended by itself."""
        for name, process in self.running.items():
            assert process.poll() is None, f"{name} has ended ({process.returncode}):\n{self._complaints(name)}"

    def must_end(self, name: str, within_s: float = BOUND_S) -> None:
        """Wait for one that ends by itself; AssertionError if that is not well."""
        with self.running.pop(name) as process:
            assert process.wait(within_s) == 0, f"{name}:\n{self._complaints(name)}"

    def _complaints(self, name: str) -> str:
        return (self._work / f"{name}.err").read_text()[-3000:]

    def close(self) -> None:
        for name in list(self.running):
            self.kill(name)


def fail_at_random(rng: random.Random, failing: float, slow_s: float, graves: Path) -> None:
    """From now on so many calls of this process's stores fail, and a tenth is slow. `graves` keeps data files and events that it removes."""

    def disturb(kind: str, subject: object) -> None:
        if kind == "delete":
            _bury(str(subject).removeprefix("file://"), graves)
        if rng.random() < 0.1:
            time.sleep(rng.random() * slow_s)  # what a slow store does
        if rng.random() < failing:
            raise UfsUnavailableError(f"{kind} {subject}: injected")

    runtime_module.open_store = lambda *args: FaultyStore(open_store(*args), disturb)


def _bury(path: str, graves: Path) -> None:
    """Keep what is about to be removed: a data file; or any events of a log, as which ones is not told."""
    events, data = path.endswith("/_lookup/log"), path.endswith(".parquet")
    for file in Path(path).glob("*.json") if events else [Path(path)] if data else []:
        if not (graves / file.name).exists():
            with contextlib.suppress(FileNotFoundError):
                copy = graves / f".{file.name}.{os.getpid()}"
                shutil.copyfile(file, copy)
                copy.rename(graves / file.name)


class Notes:
    """A process's notes: JSON lines that outlive a kill. Times are of the machine's monotonic clock, which all processes share."""

    def __init__(self, directory: Path, name: str) -> None:
        directory.mkdir(exist_ok=True)
        self._file = (directory / f"{name}.jsonl").open("a", buffering=1)
        self._file.write("\n")  # what a kill has cut off stays a line of its own
        self._name = name

    def add(self, kind: str, **values: Any) -> None:
        note = {"who": self._name, "kind": kind, "at": time.monotonic(), **values}
        self._file.write(json.dumps(note) + "\n")


class Following:
    """The notes that come to a directory while one looks."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}

    def new(self) -> list[dict[str, Any]]:
        """The notes since the last call, by time; a line that a kill has cut off is none."""
        notes = []
        for path in self._directory.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.splitlines():
                with contextlib.suppress(ValueError):
                    notes.append(json.loads(line))
        return sorted(notes, key=lambda note: float(note["at"]))


def read_notes(directory: Path) -> list[dict[str, Any]]:
    return Following(directory).new()
