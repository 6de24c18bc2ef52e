"""A history from beginning to end: processes are started, some paused, some killed and started again, and all is checked."""

import collections
import random
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.history.checker import check, states
from tests.soak.watch import check_directory
from tests.support.fakes import CACHES
from tests.support.proxy import GRAVES, Proxy, read_objects
from tests.support.s3server import S3Server
from tests.support.workers import Workers, read_notes

FAILING = 0.08
"""Of the store's calls: lost before they arrive; on S3 as many are lost afterwards."""
FAULTS = {"delayed": FAILING / 4, "lost": FAILING, "unanswered": FAILING}
WRITERS = 6
READERS = ("NONE-UFS-shared", "NONE-CACHE-own", "PARTIAL-UFS-shared", "PARTIAL-CACHE-own", "PARTIAL-CACHE-shared")
READERS += ("FULL-UFS-shared", "FULL-CACHE-own", "FULL-CACHE-shared")
DAMAGE = {"blockDamagedCount", "snapshotDamagedCount"}
PAUSED = 3
"""How many processes stand still at any time, for up to two seconds."""
ENOUGH = collections.Counter({"acknowledged": 10, "failed": 1, "scan": 50, "get": 50, "follow": 10})
"""How many notes of some kinds there are to be: a slow machine takes longer over them."""
SIZES = {
    "file_bytes": 1200, "row_group_rows": (4, 8), "row_group_bytes": 1, "merge_bytes": 3000, "compact_bytes": 3000,
    "unasked_compact_bytes": 3000, "small_file_bytes": 1500, "log_page": 40,
}  # fmt: skip
"""`WriteSizes` that its tables cross: writes of several files and row groups, folds that leave files outside, trimmed logs."""
KEPT_S = 5.0
UPKEEP = {"lookup.write.vacuum-after": f"{KEPT_S:g} s", "lookup.log.retention": "20 s"}
"""Properties of its tables: the log is trimmed, and `graves` keep what is removed of it."""
_SOURCE: dict[str, dict[str, str]] = {
    "UFS": {},
    "CACHE": {"lookup.metadata.source": "CACHE", "lookup.metadata.sync-interval": "1 s"},
}
_FULL_CACHE = {"lookup.metadata.source": "CACHE", "lookup.full-cache.periodic-reload.interval": "1 s"}
_SMALL = {
    "NONE": {},
    "PARTIAL": {**CACHES["PARTIAL"], "lookup.partial-cache.max-rows": "150"},
    "FULL": {**CACHES["FULL"], "lookup.full-cache.retain": "1 s"},
}
"""Caches that lose keys, and snapshots, under their readers."""


class Place:
    """Where a history's table lies, and how the checker reads it without our code: a table on this machine's disk."""

    failing = FAILING
    storage: Mapping[str, str] = MappingProxyType({})

    def __init__(self, work: Path) -> None:
        self.graves = work / "graves"
        self.graves.mkdir(parents=True)
        self._table = work / "table"
        self.path = str(self._table)

    def log(self) -> list[bytes]:
        paths = {path.name: path for path in [*self.graves.glob("*.json"), *self._current_events()]}
        return [paths[name].read_bytes() for name in sorted(paths)]

    def _current_events(self) -> list[Path]:
        return list((self._table / "_lookup" / "log").glob("*.json"))

    def trimmed(self) -> int:
        return len(self.log()) - len(self._current_events())

    def read_file(self, path: str) -> bytes:
        grave = self.graves / path.rpartition("/")[2]
        return (grave if grave.exists() else self._table / path).read_bytes()

    def begin(self, seed: int) -> None:
        """Let the store fail from now on; on this machine's disk its processes see to that (`failing`)."""

    def end(self) -> int:
        """Let the store answer as usual again; returns how many files were removed."""
        return len(list(self.graves.glob("*.parquet")))


class S3Place(Place):
    """A table on the S3 server, whose proxy fails: these shares of all requests."""

    failing = 0.0

    def __init__(self, work: Path, server: S3Server, bucket: str, shares: Mapping[str, float] = FAULTS) -> None:
        super().__init__(work)
        self._bucket, self.proxy, self._shares = bucket, Proxy(server), shares
        self.path, self.storage = f"s3://{bucket}/table", {"lookup.storage.endpoint_url": server.endpoint}
        server.client.create_bucket(Bucket=bucket)

    def log(self) -> list[bytes]:
        name = "table/_lookup/log/"
        buried = read_objects(GRAVES, f"{self._bucket}/{name}")
        events = {key.removeprefix(f"{self._bucket}/"): value for key, value in buried.items()}
        events |= read_objects(self._bucket, name)
        return [events[name] for name in sorted(events)]

    def trimmed(self) -> int:
        return len(self.log()) - len(read_objects(self._bucket, "table/_lookup/log/"))

    def read_file(self, path: str) -> bytes:
        name = f"table/{path}"
        grave = read_objects(GRAVES, f"{self._bucket}/{name}")
        return grave[f"{self._bucket}/{name}"] if grave else read_objects(self._bucket, name)[name]

    def begin(self, seed: int) -> None:
        self.proxy.begin_at_random(self._shares, seed)

    def end(self) -> int:
        self.proxy.end()
        return len(read_objects(GRAVES, f"{self._bucket}/"))


def readers(work: Path) -> dict[str, dict[str, str]]:
    """Names and options of the readers: all cache modes and sources, on the writers' host and on hosts of their own."""
    options = {}
    for name in READERS:
        cache, source, host = name.split("-")
        source_options = _FULL_CACHE if (cache, source) == ("FULL", "CACHE") else _SOURCE[source]
        directory = work / "cache" / ("shared" if host == "shared" else name)
        options[name] = {**_SMALL[cache], **source_options, "lookup.cache.dir": str(directory)}
    return options


def start_worker(
    workers: Workers, name: str, place: Place, work: Path, options: Mapping[str, str], seed: float, **more: Any
) -> None:
    """Start a writer or a reader of a table; its name says which."""
    role = next((role for role in ("writer", "follower") if name.startswith(role)), "reader")
    arguments = {"name": name, "path": place.path, "options": options, "seed": seed, "stop": str(work / "stop")}
    arguments |= {"role": role, "notes": str(work / "notes"), "graves": str(place.graves), "failing": place.failing}
    arguments |= {"pause_s": 0, "vacuumed_after": "5 s", "sizes": {}, "properties": {}, "kept_s": None}
    workers.start(name, "tests.history.worker", {**arguments, **more})


def run(place: Place, work: Path, seconds: float, seed: int) -> dict[str, int]:
    """Run a history for so many seconds, up to three times as many until it has `ENOUGH`. Returns counts; AssertionError for what cannot be."""
    rng = random.Random(seed)
    stop, notes = work / "stop", work / "notes"
    start_s = time.monotonic()
    base = {"lookup.keys": "id", "lookup.max-retries": "3", **place.storage}
    writing = {**base, "lookup.write.compact-after": "3"}
    roles = {f"writer{n}": {**writing, "lookup.cache.dir": str(work / "cache" / "shared")} for n in range(WRITERS)}
    roles |= {name: {**base, **options} for name, options in readers(work).items()}
    roles["follower-UFS-shared"] = {**base, "lookup.cache.dir": str(work / "cache" / "shared")}
    workers = Workers(work)

    more = {"sizes": SIZES, "properties": UPKEEP, "kept_s": KEPT_S}

    def start(name: str) -> None:
        start_worker(workers, name, place, work, roles[name], rng.random(), **more)

    kills = 0
    place.begin(seed)
    try:
        start("writer0")
        while not _counts(notes)["acknowledged"] and time.monotonic() < start_s + 3 * seconds:  # readers want a table
            if workers.running["writer0"].poll() is not None:
                start("writer0")
            time.sleep(0.05)
        for name in roles.keys() - {"writer0"}:
            start(name)
        while (now_s := time.monotonic()) < start_s + seconds or (
            now_s < start_s + 3 * seconds and not _counts(notes) >= ENOUGH
        ):
            with workers.paused(rng.sample(sorted(roles), PAUSED)):
                time.sleep(rng.uniform(0.2, 2.0))
            name = rng.choice(sorted(roles))
            workers.kill(name)
            kills += 1
            start(name)
        stop.touch()
        for name in roles:
            workers.must_end(name)
    finally:
        workers.close()
        removed = place.end()
    history, tags = states(place.log(), place.read_file)
    note_counts = check(read_notes(notes), history, tags, _sees_all, lambda worker: worker.endswith("-shared"))
    for directory in (work / "cache").iterdir():
        directory_report, wrong = check_directory(directory)
        assert (wrong, directory_report["counted"].keys() & DAMAGE) == ([], set())
    note_counts.update(collections.Counter(f"{state.mode} commits" for state in history if state.mode))
    note_counts.update(
        {"kills": kills, "commits": len(history) - 1, "events": len(place.log()), "removed files": removed}
    )
    note_counts["trimmed events"] = place.trimmed()
    print(f"{place.path}: {dict(note_counts)}", flush=True)
    return dict(note_counts)


def _sees_all(worker: str) -> bool:
    return "-UFS-" in worker or worker.startswith("writer")


def _counts(notes: Path) -> collections.Counter[str]:
    return collections.Counter(note["kind"] for note in read_notes(notes))
