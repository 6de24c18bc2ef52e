"""One case of the matrix: a table, a write, a fault, and everybody who looks at what became of it."""

import contextlib
import dataclasses
import datetime
import hashlib
import itertools
import random
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pyspark_lookup import LookupTable
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.errors import CommitUnknownError, PysparkLookupError
from pyspark_lookup.lookup import lookup_table as api
from pyspark_lookup.lookup import runtime as runtime_module
from pyspark_lookup.lookup.runtime import Runtime
from pyspark_lookup.storage import ufs as ufs_module
from pyspark_lookup.storage.stores import open_store
from pyspark_lookup.storage.stores.s3 import S3Store
from pyspark_lookup.versions import resolver as resolver_module
from tests.faults.direct import door, put_object
from tests.faults.writes import Caller, Events, Kind, counted, list_events, named, parsed, remove_rows, rows
from tests.history.checker import Rows, State, states
from tests.support import fakes
from tests.support.proxy import Fault, Mode, Proxy, Sent, backend, read_objects, request_kind
from tests.support.s3server import Application, S3Server

BUCKET, BELOW = "faults", "table/"
RETRIES = 2
CACHES = tuple(fakes.CACHES.values())
_HOUR = datetime.timedelta(hours=1)


@contextlib.contextmanager
def home() -> Iterator[Path]:
    """A directory for hosts, in memory if there is such a place: a case makes many small files."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as path:
        yield Path(path)


class Bench:
    """A place for one table at a time, in the store itself, and hosts that come and go."""

    def __init__(self, server: S3Server, home: Path, patch: pytest.MonkeyPatch) -> None:
        self._server = server
        self._home = home
        self.proxy = Proxy(server)
        with contextlib.suppress(server.client.exceptions.BucketAlreadyOwnedByYou):
            server.client.create_bucket(Bucket=BUCKET)
        self._doors: dict[str, S3Store] = {}
        self._prepared: dict[str, dict[str, bytes]] = {}
        self._wall_s = time.time() + 60
        self.slept: list[float] = []
        self.outcomes: dict[str, bool] = {}
        self.runtime = self._process(0)

        def opened(path: str, options: Mapping[str, Any], now_s: Any = time.time) -> S3Store:
            # Its connections outlive the hosts of one case.
            if repr(options) not in self._doors:
                store = open_store(path, options, now_s)
                assert isinstance(store, S3Store)
                self._doors[repr(options)] = door(store, self.proxy)
            return self._doors[repr(options)]

        patch.setattr(runtime_module, "open_store", opened)
        # One request after the other, so that their numbers are the same in every run.
        for module in (ufs_module, resolver_module):
            patch.setattr(module, "run_in_order", lambda do, items, threads: map(do, items))
        patch.setattr(api, "runtime", lambda: self.runtime)

    def _process(self, seed: int) -> Runtime:
        """A new process. Its clock stands still and its dice are the same, so that equal histories leave equal bytes."""
        return Runtime(HostClock(lambda: self._wall_s, lambda: 1000.0, self.slept.append, "boot"), random.Random(seed))

    def fill(self, objects: Mapping[str, bytes]) -> None:
        for name in read_objects(BUCKET):
            backend().delete_object(BUCKET, name)
        for name, data in objects.items():
            put_object(BUCKET, name, data).last_modified -= _HOUR

    def prepared(self, kind: Kind) -> dict[str, bytes]:
        """The objects of the table that a write of this kind begins with."""
        if kind.table is None:
            return {}
        name = kind.table.__name__
        if name not in self._prepared:
            self.fill({})
            with self.host("prepare", 1):
                kind.table(LookupTable(None, {**self.options("prepare"), "lookup.keys": "id"}))
            self._prepared[name] = read_objects(BUCKET)
        return self._prepared[name]

    @contextlib.contextmanager
    def answering(self, kind: str, answer: str, times: int | None = None, first: int = 0) -> Iterator[list[Sent]]:
        """Give all requests of a kind (None: all kinds) this answer, from the one with the number `first` on; yields the requests so far."""
        self.proxy.begin_always(kind, answer, first, times)
        try:
            yield self.proxy.requests
        finally:
            self.proxy.end()

    @contextlib.contextmanager
    def without_if_match(self, number: int, later: Mapping[str, bytes]) -> Iterator[None]:
        """Let the store ignore If-Match, and replace objects after so many GETs."""
        gets = itertools.count()

        def between(environ: Any, start: Any, app: Application) -> Iterable[bytes]:
            if request_kind(environ) == "get" and next(gets) == number:
                self.fill(later)
            environ.pop("HTTP_IF_MATCH", None)
            return app(environ, start)

        self.proxy.begin_always("none", "lost", 0, 0)
        self._server.between = between
        try:
            yield
        finally:
            self.proxy.end()

    def options(self, host: str) -> dict[str, str]:
        return {
            "path": f"s3://{BUCKET}/{BELOW.rstrip('/')}",
            "lookup.storage.endpoint_url": self._server.endpoint,
            "lookup.cache.dir": str(self._home / host),
            "lookup.max-retries": str(RETRIES),
            "lookup.write.compact-after": "0",
            "lookup.write.missing-columns": "NULL",
        }

    @contextlib.contextmanager
    def host(self, name: str, seed: int) -> Iterator[None]:
        before, self.runtime = self.runtime, self._process(seed)
        try:
            yield
        finally:
            self.runtime = before

    def clear(self) -> None:
        for path in self._home.iterdir():
            shutil.rmtree(path, ignore_errors=True)

    def state(self, how: str) -> str:
        """A digest of how a write ended, and of what the store and the writer's host hold then."""
        digest = hashlib.sha256(how.encode())
        for name, data in sorted(read_objects(BUCKET).items()):
            digest.update(f"{name} {len(data)} ".encode() + data)
        for part in ("blocks", "records"):
            for path in sorted((self._home / "writer" / part).rglob("*")):
                if path.is_file():
                    data = path.read_bytes()
                    digest.update(f"{path.relative_to(self._home)} {len(data)} ".encode() + data)
        return digest.hexdigest()


@dataclasses.dataclass
class Done:
    """How a write ended: acknowledged (with the position that it was told), failed, or unknown; and what it took."""

    how: str
    position: int | None = None
    problem: PysparkLookupError | None = None
    requests: Sequence[Sent] = ()


def run_write(kind: Kind, caller: Caller) -> Done:
    """How a write ends. Errors that are not ours are raised."""
    try:
        return Done("acknowledged", kind.write(caller))
    except CommitUnknownError as problem:
        return Done("unknown", problem=problem)
    except PysparkLookupError as problem:
        return Done("failed", problem=problem)


_SURVIVED = ("lost", "500", "503", "bare", "cut", "short", "empty", "page", "blank")
EXTRA_REQUESTS_AT_MOST = {"503": 7 * 40}
"""How many more requests a write may make than without a fault, by the store's answer. Each call asks a store that refuses everything for a minute,
at most 40 times. A transaction that goes on after that makes seven such calls."""


def check_ended(fault: Fault, end: Done, least: int) -> None:
    """Check how a case has ended, and for how many requests. `least`: those of the write without a fault."""
    assert len(end.requests) <= least + EXTRA_REQUESTS_AT_MOST.get(fault.answer, 75), f"{len(end.requests)} requests"
    if fault.mode in (Mode.DONE, Mode.NOT_DONE, Mode.RETRIED) and fault.answer in _SURVIVED:
        assert end.how == "acknowledged", f"one bad answer, and the write {end.how}: {end.problem!r}"


class Case:
    """A write of one kind to a fresh copy of its table, with or without a fault."""

    def __init__(self, bench: Bench, kind: Kind, fault: Fault | None, seed: int = 0) -> None:
        self._bench = bench
        self._kind = kind
        self._fault = fault
        self._seed = seed
        self._at_first = bench.prepared(kind)

    def run(self) -> Done:
        """Write under the fault, and let everybody look. Raises AssertionError where somebody sees what must not be."""
        bench, kind = self._bench, self._kind
        bench.clear()
        bench.fill(self._at_first)
        try:
            with bench.host("writer", 2):
                caller = Caller(bench.runtime, bench.options("writer"))
                if kind.warm:
                    caller.table().scan()
                    caller.table().get(1)
                end = self._write(caller)
                state = bench.state(f"{kind.name} {end.how} {end.position}")
                known_outcome = bench.outcomes.get(state)
                is_there = self._look(end.how, end.position) if known_outcome is None else known_outcome
                self._read("the writer's process", "writer", is_there, CACHES[:1])
            if known_outcome is None:
                with bench.host("writer", 3):
                    self._read("another process of that host", "writer", is_there, CACHES)
                with bench.host("late", 4):
                    self._read("a late host", "late", is_there, CACHES)
                with bench.host("writer", 5):
                    self._retry(Caller(bench.runtime, bench.options("writer")), is_there)
                bench.outcomes[state] = is_there
        finally:
            bench.proxy.end()
        return end

    def _write(self, caller: Caller) -> Done:
        self._bench.proxy.begin(self._fault, self._seed)
        try:
            end = run_write(self._kind, caller)
        finally:
            self._bench.proxy.end()
        end.requests = self._bench.proxy.requests
        return end

    def _look(self, how: str, position: int | None = None) -> bool:
        """Whether the write is there, as the log and the files say it; it must be as it ended."""
        events, history = self._state()
        kind = self._kind
        latest = history[-1].rows if history else Rows()
        if kind.there is None:
            assert latest in (kind.before, kind.after), f"{how}, and the rows are {sorted(latest)}"
            is_there = latest == kind.after
        else:
            assert latest == kind.before, f"{how}, and the rows are {sorted(latest)}"
            is_there = kind.there(events)
        if how == "acknowledged":
            assert is_there, "acknowledged and not there"
        if how == "failed":
            assert not is_there or kind.name == "vacuum", "failed and there"
        if position is not None and kind.there is None:
            assert position in [state.position for state in history], f"{position} is not a commit"
            (at,) = [state.rows for state in history if state.position == position]
            assert at == kind.after, f"at {position} the rows are {sorted(at)}"
        return is_there

    def _state(self) -> tuple[Events, list[State]]:
        """The log's events, and the table after each commit, all read here."""
        objects = read_objects(BUCKET)
        texts = list_events(objects, BELOW)
        events = parsed(texts)
        missing = [path for path in named(events) if BELOW + path not in objects]
        assert not missing, f"the log names files that are not there: {missing}"
        if not texts:
            return events, []
        all_objects = {**self._at_first, **objects}  # what was vacuumed counts in the states before
        return events, states(texts, lambda path: all_objects[BELOW + path])[0]

    def _read(
        self, reader: str, host: str, is_there: bool, caches: Sequence[Mapping[str, str]], more: Rows | None = None
    ) -> None:
        """Scans and lookups on a host give the rows there are, from the files and from the caches."""
        kind = self._kind
        expected = more if more is not None else kind.after if is_there else kind.before
        options = self._bench.options(host)
        if not list_events(read_objects(BUCKET), BELOW):
            return
        keys = sorted({id_ for id_, _, _ in (*kind.before, *kind.after, *expected)})
        expected_rows = remove_rows(expected, set(range(100)) - set(keys))
        for cache in caches:
            with LookupTable(None, {**options, **cache}) as table:
                mode = cache.get("lookup.cache", "NONE")
                rows_seen = counted(table.scan())
                assert rows_seen == expected, f"{reader} scans {sorted(rows_seen)} ({mode})"
                actual = counted(table.get_many(pa.table({"id": keys})))
                assert actual == expected_rows, f"{reader} finds {sorted(actual)} ({mode})"

    def _retry(self, caller: Caller, is_there: bool) -> None:
        """The caller tries again what has failed, or is not there; then others write, and all is as it must be."""
        kind = self._kind
        if kind.repeats or not is_there:
            retry = run_write(kind, caller)
            assert retry.how == "acknowledged", f"the retry: {retry.problem!r}"
            assert self._look("acknowledged", retry.position)
        table = caller.table()
        table.upsert(rows([1, 60], "later"))
        expected = remove_rows(kind.after, [1, 60]) + counted(rows([1, 60], "later"))
        table.compact()
        _, history = self._state()
        assert history[-1].rows == expected, f"after an upsert and a compaction the rows are {sorted(history[-1].rows)}"
        self._read("the writer, going on,", "writer", True, CACHES[:2], expected)
        with self._bench.host("later", 6):
            self._read("a host later on", "later", True, CACHES[:1], expected)
