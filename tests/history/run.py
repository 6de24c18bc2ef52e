"""A history from beginning to end: processes are started, some paused, some killed and started again, and all is checked.

`python -m tests.history.run --minutes 30` runs both stores, as long each as half of it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests import nightly
from tests.history.checker import check, notes_of, states
from tests.s3server import S3Server

WRITERS = 6
PAUSED = 3
"""How many processes stand still at any time, for up to two seconds."""
ENOUGH = {"acknowledged": 10, "failed": 1, "scan": 50, "get": 50}
"""How many notes of some kinds there are to be: a slow machine takes longer over them."""
SIZES = {
    "file_bytes": 1200,
    "row_group_rows": (4, 8),
    "row_group_bytes": 1,
    "merge_bytes": 3000,
    "compact_bytes": 3000,
    "unasked_compact_bytes": 3000,
    "small_file_bytes": 1500,
}
"""`WriteSizes` that its tables cross: writes of several files and row groups, folds that leave files outside."""
_CACHE = {
    "NONE": {},
    "PARTIAL": {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "1000"},
    "FULL": {"lookup.cache": "FULL"},
}
_SOURCE: dict[str, dict[str, str]] = {
    "UFS": {},
    "CACHE": {"lookup.metadata.source": "CACHE", "lookup.metadata.sync-interval": "1 s"},
}
_FULL_CACHE = {"lookup.metadata.source": "CACHE", "lookup.full-cache.periodic-reload.interval": "1 s"}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a history's table lies, and how the checker reads it without our code."""

    path: str
    storage: dict[str, str]
    list_log: Callable[[], list[bytes]]
    read_file: Callable[[str], bytes]


def local_place(directory: Path) -> Place:
    """A table on this machine's disk."""
    table = directory / "table"

    def events() -> list[bytes]:
        return [path.read_bytes() for path in sorted((table / "_lookup" / "log").glob("*.json"))]

    return Place(str(table), {}, events, lambda path: (table / path).read_bytes())


def s3_place(server: S3Server, bucket: str) -> Place:
    """A table on the S3 server."""
    server.client.create_bucket(Bucket=bucket)

    def get(key: str) -> bytes:
        data: bytes = server.client.get_object(Bucket=bucket, Key=key)["Body"].read()
        return data

    def events() -> list[bytes]:
        pages = server.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix="table/_lookup/log/")
        return [get(key) for key in sorted(found["Key"] for page in pages for found in page.get("Contents", []))]

    storage = {"lookup.storage.endpoint_url": server.endpoint}
    return Place(f"s3://{bucket}/table", storage, events, lambda path: get(f"table/{path}"))


def readers(work: Path) -> dict[str, dict[str, str]]:
    """Names and options of the readers: all cache modes and sources, on the writers' host and on hosts of their own."""
    found = {}
    for (cache, source), host in zip(itertools.product(_CACHE, _SOURCE), itertools.cycle(["shared", "own"])):
        name = f"{cache}-{source}-{host}"
        chosen = _FULL_CACHE if (cache, source) == ("FULL", "CACHE") else _SOURCE[source]
        directory = work / "cache" / ("shared" if host == "shared" else name)
        found[name] = {**_CACHE[cache], **chosen, "lookup.cache.dir": str(directory)}
    for name in ("FULL-UFS-shared", "PARTIAL-CACHE-shared"):
        cache, source, _ = name.split("-")
        found[name] = {**_CACHE[cache], **_SOURCE[source], "lookup.cache.dir": str(work / "cache" / "shared")}
    return found


def run(
    place: Place, work: Path, seconds: float, seed: int, log: Callable[[str], None] = lambda text: None
) -> dict[str, int]:
    """What a history of so many seconds came to, three times as many if it takes that until there is `ENOUGH` in it.

    AssertionError if it cannot be, or a process failed.
    """
    rng = random.Random(seed)
    (work / "notes").mkdir(parents=True)
    (work / "graves").mkdir()
    stop = work / "stop"
    began = time.monotonic()
    base = {"lookup.keys": "id", "lookup.max-retries": "3", **place.storage}
    writing = {**base, "lookup.write.compact-after": "3"}
    roles = {f"writer{n}": {**writing, "lookup.cache.dir": str(work / "cache" / "shared")} for n in range(WRITERS)}
    roles |= {name: {**base, **options} for name, options in readers(work).items()}

    def start(name: str) -> subprocess.Popen[bytes]:
        given: dict[str, Any] = {"name": name, "path": place.path, "options": roles[name], "seed": rng.random()}
        given |= {"role": "writer" if name.startswith("writer") else "reader", "stop": str(stop)}
        given |= {"graves": str(work / "graves"), "sizes": SIZES}
        given["notes"] = str(work / "notes" / f"{name}.jsonl")
        with open(work / f"{name}.err", "ab") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.history.worker", json.dumps(given)], stderr=errors, env=os.environ
            )

    running = {"writer0": start("writer0")}
    while not _counts(work)["acknowledged"] and time.monotonic() < began + 3 * seconds:  # readers want a table
        if running["writer0"].poll() is not None:
            running["writer0"] = start("writer0")
        time.sleep(0.05)
    running |= {name: start(name) for name in roles if name != "writer0"}
    kills = 0
    try:
        while (now := time.monotonic()) < began + seconds or (now < began + 3 * seconds and not _is_enough(work)):
            with _stopped([running[name] for name in rng.sample(sorted(running), PAUSED)]):
                time.sleep(rng.uniform(0.2, 2.0))
            name = rng.choice(sorted(running))
            running[name].send_signal(signal.SIGKILL)
            running[name].wait()
            kills += 1
            running[name] = start(name)
        stop.touch()
        for name, process in running.items():
            assert process.wait(timeout=120) == 0, f"{name}: {(work / f'{name}.err').read_text()[-3000:]}"
    finally:
        for process in running.values():
            process.kill()
            process.wait()

    def read_file(path: str) -> bytes:
        grave = work / "graves" / path.rpartition("/")[2]
        return grave.read_bytes() if grave.exists() else place.read_file(path)

    found, tags = states(place.list_log(), read_file)
    told = check(
        _notes(work),
        found,
        tags,
        lambda who: "-UFS-" in who or who.startswith("writer"),
        lambda who: who.endswith("-shared"),
    )
    told.update(collections.Counter(f"{state.mode} commits" for state in found if state.mode))
    told.update({"kills": kills, "commits": len(found) - 1, "events": len(place.list_log())})
    told["removed files"] = len(list((work / "graves").glob("*.parquet")))
    log(f"{place.path}: {dict(told)}")
    return dict(told)


@contextlib.contextmanager
def _stopped(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Have processes stand still meanwhile: what they had begun they end later, over what others have done."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


def _notes(work: Path) -> Iterator[dict[str, Any]]:
    return notes_of(line for path in sorted((work / "notes").glob("*.jsonl")) for line in path.read_text().splitlines())


def _counts(work: Path) -> collections.Counter[str]:
    return collections.Counter(note["kind"] for note in _notes(work))


def _is_enough(work: Path) -> bool:
    counts = _counts(work)
    return all(counts[kind] >= least for kind, least in ENOUGH.items())


def main() -> None:
    minutes, seed = nightly.arguments(__doc__)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with nightly.directory("history") as work:
        run(local_place(work / "local"), work / "local", minutes * 30, seed, print)
        server = S3Server()
        run(s3_place(server, "history"), work / "s3", minutes * 30, seed + 1, print)


if __name__ == "__main__":
    main()
