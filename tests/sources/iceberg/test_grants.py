"""Iceberg tables that may only be reached through their REST catalog: credentials that it vends, and caches that respect its grants.

After each test, nothing of a credential may be in any file, log, error, or value that was shown.
"""

import concurrent.futures
import contextlib
import functools
import json
import logging
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pyspark_lookup.lookup.runtime
from pyspark_lookup import LookupTable, errors
from pyspark_lookup.lookup import planner
from pyspark_lookup.lookup.lookup_join import Lookup, LookupSpec, issue_token
from pyspark_lookup.lookup.runtime import Runtime
from pyspark_lookup.sources.iceberg.catalog import Catalog, CatalogAnswer
from pyspark_lookup.sources.registry import parse_options
from pyspark_lookup.storage.disk import Disk
from pyspark_lookup.storage.stores import VendedCredentials
from tests.support.command_line import Run, run
from tests.support.fakes import FakeClock
from tests.support.fuzzing import by_day
from tests.support.governed_catalog import GovernedCatalog, GovernedTable, configured, principal
from tests.support.iceberg_definition import in_catalog, sql_catalog
from tests.support.iceberg_writing import IcebergTable
from tests.support.lake_tables import MODES, opened
from tests.support.rest_catalog import RestCatalog, error_body
from tests.support.s3server import S3Server
from tests.support.short_credentials import ShortCredentials

__all__ = ["run"]
KEY = pa.field("id", pa.int32())
COLUMNS = {"id": "int", "name": "string"}
CACHED = {
    "none": {"metadata.source": "CACHE", "metadata.sync-interval": "1 d"},
    "partial": {"metadata.source": "CACHE", "metadata.sync-interval": "1 d"},
    "full": {"metadata.source": "CACHE", "full-cache.periodic-reload.interval": "1 d"},
}
EVERY_S = 300.0


class World:
    """A host whose clock is `clock`, a governed catalog and its store, and a table `ns.table` of three files with ids 1, 2 and 3."""

    def __init__(self, server: S3Server, home: Path, patch: pytest.MonkeyPatch) -> None:
        self.server, self.home, self._patch = server, home, patch
        self.store = ShortCredentials(server)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "of-the-process")  # which the store does not know
        self.catalog = GovernedCatalog(self.store, server.endpoint)
        self.clock = FakeClock(time.time())
        self.outputs: list[object] = []
        self.count = 0
        self.table = self.make("table")
        self.table.write(*([{"id": number, "name": f"n{number}"}] for number in (1, 2, 3)))
        self.catalog.grants |= {("alice", "ns.table"), ("bob", "ns.table")}

    def make(self, name: str) -> GovernedTable:
        return GovernedTable(self.catalog, self.server, self.home, name, COLUMNS)

    def process(self, name: str = "alice") -> "Process":
        self.count += 1
        return Process(self, name, Runtime(self.clock.host(), random.Random(self.count)), self._patch)

    def later(self, seconds: float) -> None:
        """Let time pass, on this host, for the catalog and for the store."""
        self.clock.tick(seconds)
        self.catalog.ahead_s += seconds
        self.store.ahead_s += seconds

    def take_requests(self) -> list[tuple[str, str]]:
        """The requests that the catalog got since the last call, and of whom."""
        requests = list(self.catalog.asked)
        self.catalog.asked.clear()
        return requests

    def refused(self, kind: type[Exception], match: str, act: Callable[[], object]) -> None:
        with pytest.raises(kind, match=match) as caught:
            act()
        assert "\n" not in str(caught.value)
        self.outputs += ["".join(traceback.format_exception(caught.value)), repr(caught.value)]


class Process:
    """A process of the host, whose environment has the token of a principal."""

    def __init__(self, world: World, name: str, runtime: Runtime, patch: pytest.MonkeyPatch) -> None:
        self._world, self._name, self._runtime, self._patch = world, name, runtime, patch
        self._readers: list[LookupTable] = []
        self._lookups: dict[str, Lookup] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with principal(self._world.catalog, self._name, self._patch), self._patch.context() as context:
            context.setattr(pyspark_lookup.lookup.runtime, "_current", self._runtime)
            yield

    def options(self, mode: str, **more: Any) -> dict[str, str]:
        settings = {
            "catalog": "tests", "catalog.type": "rest", "catalog.uri": self._world.catalog.uri, "keys": "id",
            "storage.endpoint_url": self._world.server.endpoint, **more,
        }  # fmt: skip
        fixed = {"lookup.cache.dir": str(self._world.home / "cache"), **MODES[mode]}
        return fixed | {f"lookup.{name}": str(value) for name, value in settings.items()}

    def open(self, mode: str = "none", name: str = "ns.table", cache: str = "cache", **more: Any) -> LookupTable:
        with self.running():
            catalog = {"type": "rest", "uri": self._world.catalog.uri}
            endpoint = {"storage.endpoint_url": self._world.server.endpoint}
            reader = opened(name, self._world.home / cache, mode, "id", catalog, **endpoint, **more)
        self._readers.append(reader)
        return reader

    def ids(self, reader: LookupTable) -> list[int]:
        """The ids of three keys that the reader finds; what it shows of itself is kept."""
        with self.running():
            numbers: list[int] = reader.get_many([1, 2, 3]).column("id").to_pylist()
            self._world.outputs += [repr(reader), reader.metrics(), reader.describe()]
        return numbers

    def warm(self, reader: LookupTable) -> str:
        with self.running():
            return reader.warm()

    def scanned(self, reader: LookupTable) -> list[int]:
        with self.running():
            return sorted(reader.scan().column("id").to_pylist())

    def issue(self, mode: str, **more: str) -> bytes:
        """A token of the current version, as a driver issues it."""
        with self.running():
            return issue_token(parse_options({"path": "ns.table", **self.options(mode, **more)}), None)

    def look_up(self, token: bytes, mode: str, **more: str) -> list[int]:
        """The ids of three keys, as a worker finds them that was told the version, and that keeps it open for the next batch."""
        with self.running():
            if mode not in self._lookups:
                options = {"path": "ns.table", **self.options(mode, **more)}
                spec = LookupSpec(options, pa.schema([KEY]), pa.schema([("name", pa.string())]), ("name",))
                self._lookups[mode] = Lookup(spec, {})
            matches = self._lookups[mode].find([pa.array([1, 2, 3], KEY.type)], token, None)
            return [1 + place for place in matches.keys.tolist()]

    def plan(self, mode: str) -> Callable[["Process"], list[int]]:
        """Plan a scan in this process. Returns a function that reads it in another one."""
        with self.running():
            options = parse_options({"path": "ns.table", **self.options(mode, **{"version-at": "PLAN"})})
            reader = pyspark_lookup.lookup.runtime.runtime().engine(options).reader
            resolved = reader.find(options)
            columns = planner.table_columns(resolved, options)
            plan = planner.plan_read(resolved, options, columns, self._world.clock.host())
            (task,) = planner.plan_tasks(reader, resolved, plan)

        def read(process: "Process") -> list[int]:
            with process.running():
                reader = pyspark_lookup.lookup.runtime.runtime().engine(options).reader
                return sorted(pa.Table.from_batches(reader.read(plan, task, None)).column("id").to_pylist())

        return read

    def close(self) -> None:
        with self.running():
            for reader in self._readers:
                reader.close()


@pytest.fixture
def world(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[World]:
    for name in ("pyspark_lookup", "pyiceberg"):
        caplog.set_level(logging.DEBUG, name)
    world = World(s3, tmp_path, monkeypatch)
    processes: list[Process] = []
    make = world.process
    monkeypatch.setattr(world, "process", lambda *of: processes.append(make(*of)) or processes[-1])
    with world.catalog:
        yield world
        for process in processes:
            process.close()
    world.outputs += [record.getMessage() + str(record.exc_info) for record in caplog.records]
    secrets = world.catalog.secrets
    assert secrets
    leaks = [text for text in map(str, world.outputs) if any(secret in text for secret in secrets)]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("principal-key" in path.parts for path in files)
    holding = [path for path in files if any(secret.encode() in path.read_bytes() for secret in secrets)]
    assert (leaks, holding) == ([], [])


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_asks_only_when_it_must(world: World, mode: str) -> None:
    """A worker does not ask while the bytes are there and its principal was authorised a short time ago; otherwise one process of the host asks."""
    driver = world.process()
    token = driver.issue(mode)
    assert driver.look_up(token, mode) == [1, 2, 3]
    assert world.take_requests() == [("alice", "table")]
    world.server.log.clear()
    world.later(EVERY_S - 1)
    worker = world.process()
    assert worker.look_up(token, mode) == [1, 2, 3]
    assert world.take_requests() == []
    world.later(1)
    for process in (worker, driver, world.process()):
        assert process.look_up(token, mode) == [1, 2, 3]
    assert world.take_requests() == [("alice", "table")]
    # Another principal shares the bytes if it may read the table, too.
    assert world.process("bob").look_up(token, mode) == [1, 2, 3]
    assert world.take_requests() == [("bob", "table")]
    mallory, message = world.process("mallory"), r"catalog 'tests' does not let this principal read ns\.table \(403"
    world.refused(errors.UfsPermissionError, message, lambda: mallory.look_up(token, mode))
    assert world.take_requests() == [("mallory", "table")]
    assert world.server.log == []


@pytest.mark.parametrize("mode", by_day(["partial", "none", "full"], 2))
def test_a_principal_who_may_see_the_definition_only(world: World, mode: str) -> None:
    """The catalog answers such a principal, but vends it nothing: the principal gets no cached rows, in whatever way it reads."""
    alice = world.process()
    token, read = alice.issue(mode), alice.plan(mode)
    for more in ({}, CACHED[mode]):
        assert alice.ids(alice.open(mode, **more)) == read(alice) == [1, 2, 3]
    world.catalog.sights.add(("mallory", "ns.table"))
    mallory = world.process("mallory")
    for act in (
        lambda: mallory.ids(mallory.open(mode)),
        lambda: mallory.ids(mallory.open(mode, **CACHED[mode])),
        lambda: mallory.look_up(token, mode),
        lambda: read(mallory),
    ):
        match = r"catalog 'tests' vends no credentials to this principal for ns\.table, and the store refuses those of this process"
        world.refused(errors.UfsPermissionError, match, act)
    # Likewise if alice may see no more than that from now on.
    world.catalog.sights.add(("alice", "ns.table"))
    world.catalog.grants.remove(("alice", "ns.table"))
    world.later(EVERY_S)
    for act in (lambda: alice.ids(alice.open(mode)), lambda: alice.look_up(token, mode), lambda: read(alice)):
        world.refused(errors.UfsPermissionError, match, act)


def test_a_table_that_names_files_of_another(world: World) -> None:
    """A table's owner decides which files and which id it names; who may not read the other table gets none of it from the host's caches."""
    alice = world.process()
    files = world.table.table.data([{"id": 2, "name": "secret"}])
    world.table.table.commit(files)
    world.table.send()
    assert alice.scanned(alice.open("partial")) == [1, 2, 2, 3]
    mallorys = world.make("mine")
    mallorys.write([{"id": 9, "name": "mine"}])
    mallorys.table.meta["table-uuid"] = world.table.table.meta["table-uuid"]
    mallorys.table.commit(files)
    mallorys.send()
    world.catalog.grants.add(("mallory", "ns.mine"))
    mallory = world.process("mallory")
    reader = mallory.open("partial", name="ns.mine")
    world.refused(errors.UfsPermissionError, "vended do not cover the location", lambda: mallory.scanned(reader))


@pytest.mark.parametrize("prefix", ["s3://b/t", "s3://b/t/", "s3a://b", "s3"])
def test_credentials_that_are_consent(prefix: str) -> None:
    for location in ("s3://b/t", "s3://b/t/"):
        metadata = {"location": location}
        for lives_s, vends in ((3600.0, True), (None, True), (0.0, False)):
            credential_set = [VendedCredentials(prefix, {}, lives_s)]
            assert CatalogAnswer("s3://b/t/metadata/1.metadata.json", metadata, "id", credential_set).vends is vends
        assert not CatalogAnswer("", metadata, "id", [VendedCredentials("s3://b/t2/", {}, None)]).vends


def test_credentials_for_another_place_are_no_consent(world: World) -> None:
    """Credentials for another place are no consent, nor are those that have ended; then the store decides."""
    alice = world.process()
    token, read = alice.issue("partial"), alice.plan("partial")
    assert alice.look_up(token, "partial") == read(alice) == [1, 2, 3]
    for prefix, lives_s, refusal in (
        ("s3://elsewhere/x", 3600.0, "vended do not cover the location"),
        (None, -100.0, "Bad Request"),
    ):
        world.catalog.prefix, world.catalog.lives_s = prefix, lives_s
        world.catalog.grants.add(("mallory", "ns.table"))
        mallory = world.process("mallory")
        for act in (functools.partial(mallory.look_up, token, "partial"), functools.partial(read, mallory)):
            world.refused(errors.UfsError, refusal, act)


def test_a_table_without_an_id(world: World) -> None:
    """Format 1 does not require one; its location is its id then."""
    path = world.catalog._path(world.catalog._tables["ns.table"])
    metadata = json.loads(path.read_bytes())
    del metadata["table-uuid"]
    path.write_text(json.dumps(metadata))
    alice = world.process()
    token, read = alice.issue("full"), alice.plan("full")
    assert alice.look_up(token, "full") == read(alice) == [1, 2, 3]
    world.take_requests()
    world.later(EVERY_S)
    assert alice.look_up(token, "full") == read(alice) == [1, 2, 3]
    assert world.take_requests() == [("alice", "table")]


def test_a_catalog_that_vends_nothing(world: World) -> None:
    """The store is asked whether it lets this process read, once in five minutes on a host, not once for each query."""
    world.catalog.sights.add(("alice", "ns.table"))
    world.catalog.grants.clear()
    world.store.open_keys.add("of-the-process")
    alice = world.process()
    reader, token = alice.open("partial"), alice.issue("partial")
    assert alice.ids(reader) == [1, 2, 3]
    world.server.log.clear()
    for _ in range(2):
        world.later(EVERY_S)
        for process in (alice, world.process()):
            assert alice.ids(reader) == process.look_up(token, "partial") == [1, 2, 3]
        assert [request.method for request in world.server.log] == ["HEAD"]
        world.server.log.clear()
    # A metadata file that was replaced and removed since the catalog named it is looked for again.
    world.later(EVERY_S)
    world.table.remove("metadata.json")
    world.refused(errors.DamagedFileError, "the metadata of the Iceberg table", lambda: alice.ids(reader))
    assert world.take_requests()[-2:] == [("alice", "table")] * 2


@pytest.mark.parametrize("mode", by_day(["none", "full", "partial"], 2))
def test_a_name_that_means_another_table(world: World, mode: str) -> None:
    """Queries that were planned on the first table read none of its cached rows once the time is over; new queries read the second."""
    alice = world.process()
    token, read = alice.issue(mode), alice.plan(mode)
    cached = alice.open(mode, **CACHED[mode])
    assert alice.ids(cached) == read(alice) == alice.look_up(token, mode) == [1, 2, 3]
    masked = world.make("masked")
    masked.write([{"id": 2, "name": "***"}])
    world.catalog.renamed = {("alice", "ns.table"): "ns.masked"}
    world.catalog.grants.add(("alice", "ns.masked"))
    for _ in range(2):
        world.later(EVERY_S)
        for process in (alice, world.process()):
            for act in (functools.partial(process.look_up, token, mode), functools.partial(read, process)):
                world.refused(
                    errors.VersionGoneError, r"catalog 'tests' the name ns\.table now means a different table", act
                )
        assert alice.ids(cached) == alice.ids(alice.open(mode)) == [2]


@pytest.mark.parametrize("mode", MODES)
def test_a_grant_that_is_revoked(world: World, mode: str) -> None:
    """A revoked grant ends what its principal gets of the host's caches: of the current version at once, of known versions within five minutes."""
    alice, bob = world.process(), world.process("bob")
    current, cached = alice.open(mode), alice.open(mode, **CACHED[mode])
    token = alice.issue(mode)
    for reader in (current, cached):
        assert alice.ids(reader) == [1, 2, 3]
    assert bob.look_up(token, mode) == [1, 2, 3]
    world.take_requests()
    world.catalog.grants.remove(("alice", "ns.table"))
    world.later(EVERY_S - 1)
    worker = world.process()
    assert alice.ids(cached) == worker.look_up(token, mode) == [1, 2, 3]
    assert world.take_requests() == []
    world.later(1)
    for act in (
        lambda: alice.ids(cached),
        lambda: alice.ids(current),
        lambda: worker.look_up(token, mode),
        lambda: alice.ids(alice.open(mode, **CACHED[mode])),
        *((functools.partial(alice.warm, cached),) if mode == "full" else ()),
    ):
        world.refused(errors.UfsPermissionError, r"does not let this principal read ns\.table \(403", act)
    assert bob.look_up(token, mode) == [1, 2, 3]
    world.catalog.grants.add(("alice", "ns.table"))
    assert alice.ids(cached) == alice.ids(current) == worker.look_up(token, mode) == [1, 2, 3]


def test_a_refusal_is_known_to_the_whole_host(world: World) -> None:
    """A query that was refused ends what others of its principal would have got until the five minutes are over."""
    alice, worker = world.process(), world.process()
    current = alice.open("partial")
    token = alice.issue("partial")
    assert alice.ids(current) == [1, 2, 3]
    world.catalog.grants.remove(("alice", "ns.table"))
    for act in (lambda: alice.ids(current), lambda: worker.look_up(token, "partial")):
        world.refused(errors.UfsPermissionError, "403", act)


@pytest.mark.parametrize("mode", MODES)
def test_a_catalog_that_is_down(world: World, mode: str) -> None:
    """A catalog that is down is an error that names it; in CACHE mode, the last version answers for as long as the principal was authorised."""
    alice = world.process()
    current, cached = alice.open(mode), alice.open(mode, **CACHED[mode])
    token = alice.issue(mode)
    for reader in (current, cached):
        assert alice.ids(reader) == [1, 2, 3]
    world.catalog.fault = lambda method, path: (503, error_body(503, "Unavailable", "later"))
    named = r"the Iceberg catalog 'tests' answered with HTTP status 503.*later"
    world.refused(errors.CatalogUnavailableError, named, lambda: alice.ids(current))
    world.later(EVERY_S - 1)
    assert alice.ids(cached) == alice.look_up(token, mode) == [1, 2, 3]
    world.later(1)
    for act in (lambda: alice.ids(cached), lambda: world.process().look_up(token, mode), lambda: alice.ids(current)):
        world.refused(errors.CatalogUnavailableError, named, act)
    world.catalog.fault = None
    assert alice.ids(cached) == alice.ids(current) == [1, 2, 3]


@pytest.mark.parametrize("reads_cache", [True, False])
def test_a_catalog_that_is_silent(world: World, monkeypatch: pytest.MonkeyPatch, reads_cache: bool) -> None:
    """One process of the host waits for the catalog's answer in vain; the others do not wait again for a minute, and get no rows that they may not get."""
    processes = [world.process() for _ in range(5)]
    arrived, calls, acquire = threading.Semaphore(0), [0], Disk.acquire

    def acquire_and_tell(disk: Disk, kind: str, name: str, timeout_s: float) -> Any:
        if kind in ("refresh", "authorise"):
            arrived.release()
        return acquire(disk, kind, name, timeout_s)

    def say_nothing(*_: object, **__: object) -> CatalogAnswer:
        calls[0] += 1
        for _ in processes if calls[0] == 1 else ():
            assert arrived.acquire(timeout=60)
        world.clock.tick(60)
        raise errors.CatalogUnavailableError("the Iceberg catalog 'tests' has not answered within 60 s")

    more = {"metadata.source": "CACHE", "metadata.sync-interval": "1 min"} if reads_cache else {}
    options = parse_options({"path": "ns.table", **processes[0].options("partial", **more)})
    with processes[0].running():
        engines = [process._runtime.engine(options) for process in processes]
        table, version = engines[0].reader.resolver.discover(options)
        sources = [engine.reader.kinds.source(table) for engine in engines]

        def ask(number: int) -> object:
            try:
                if reads_cache:
                    cached = engines[number].reader.resolver.current_versions.read_cached(table, options)
                    return None if cached is None else cached.digest
                return sources[number].authorise(table, sources[number].catalog_id(version))
            except errors.CatalogUnavailableError as problem:
                return str(problem)

        def ask_all() -> list[object]:
            with concurrent.futures.ThreadPoolExecutor(len(processes)) as threads:
                return [*threads.map(ask, range(len(processes)))]

        with monkeypatch.context() as patch:
            patch.setattr(Disk, "acquire", acquire_and_tell)
            patch.setattr(Catalog, "load", say_nothing)
            world.later(61 if reads_cache else EVERY_S)
            if reads_cache:  # the principal is authorised until five minutes are over
                assert ask_all() == [version.digest] * len(processes)
                world.later(59)
                assert [ask(number) for number in range(len(processes))] == [version.digest] * len(processes)
                assert calls == [1]
                world.later(1)
                assert ask(0) == version.digest
                assert calls == [2]
                world.later(EVERY_S)
                calls[0], arrived = 0, threading.Semaphore(0)
            answers = ask_all()
            world.later(59)
            answers.append(ask(0))
            assert calls == [1]
            world.later(1)
            assert "has not answered within 60 s" in str(ask(0))
            assert calls == [2]
        shared = [answer for answer in answers if "to a process of this host a moment ago" in str(answer)]
        assert len(shared) == len(processes)
        assert all("the Iceberg catalog 'tests'" in str(answer) for answer in answers)
        world.outputs += answers
        world.later(60)
        assert [ask(number) for number in range(2)] == [version.digest if reads_cache else None] * 2


@pytest.mark.parametrize(("ahead_s", "in_config"), [(86400.0, False), (-86400.0, True)])
def test_credentials_that_end_in_mid_scan(world: World, ahead_s: float, in_config: bool) -> None:
    """Credentials that end in mid-scan are renewed once, whatever the catalog's clock and the store's say to the host's; each file is read."""
    world.catalog.ahead_s = world.store.ahead_s = ahead_s
    world.catalog.in_config = in_config  # such a catalog does not answer the question for credentials alone
    world.catalog.endpoints = world.catalog.endpoints[: 1 if in_config else 2]
    alice = world.process()
    reader = alice.open()

    ended: set[str] = set()

    def expire_credentials(method: str, path: str) -> None:
        """End all that was vended, ahead of the first bytes of a manifest, and again ahead of the first of a data file."""
        kind = path.rpartition(".")[2]
        if method == "GET" and kind not in ended:
            ended.add(kind)
            world.store.expire()

    world.server.before = expire_credentials
    assert alice.scanned(reader) == [1, 2, 3]
    world.server.before = None
    assert ended == {"avro", "parquet"}
    assert {*world.store.refused} == {"ExpiredToken"}
    renewal = "table" if in_config else "credentials"
    assert world.take_requests() == [("alice", "table"), ("alice", renewal), ("alice", renewal)]
    # New ones are taken before the end, without a refusal.
    world.store.refused.clear()
    world.later(world.catalog.lives_s - EVERY_S)
    assert alice.scanned(alice.open(cache="other")) == [1, 2, 3]
    assert world.store.refused == []


def test_a_catalog_without_grants(world: World, tmp_path: Path) -> None:
    """A worker that was told its version asks it nothing, however old the answer is, and does not look into its configuration."""
    sql, properties = sql_catalog(tmp_path)
    table = IcebergTable.create(tmp_path / "local", COLUMNS, publish=in_catalog(sql, "ns.table"))
    table.commit(table.data([{"id": 2, "name": "n"}]))
    of_catalog = {f"catalog.{name}": value for name, value in properties.items()}
    driver, worker = world.process(), world.process()
    token = driver.issue("none", **of_catalog)
    world.later(EVERY_S)
    sql.close()
    (tmp_path / "catalog.db").unlink()
    assert worker.look_up(token, "none", **of_catalog) == [2]


def test_a_catalog_that_is_asked_at_its_endpoint(world: World) -> None:
    """The catalog is asked at `client.refresh-credentials-endpoint`; but no other host gets this process's token."""
    world.catalog.endpoints = world.catalog.endpoints[:1]
    place, ids = "v1/namespaces/ns/tables/table/credentials", [1, 2, 3]
    servers = [
        ("", "credentials"),
        (world.catalog.uri, "credentials"),
        ("http://other.example", "table"),
        ("http://[::1", "table"),
    ]
    for number, (server, kind) in enumerate(servers):
        endpoint = f"{server}/{place}"
        world.catalog.more = {"config": {"client.refresh-credentials-endpoint": endpoint}}
        alice = world.process()
        reader = alice.open()
        assert alice.scanned(reader) == ids
        world.table.write([{"id": 4 + number, "name": "new"}])
        ids.append(4 + number)
        world.take_requests()
        world.store.expire()
        # A store does not say of HEAD why it refuses it; young credentials would not be replaced.
        world.later(EVERY_S - 1)
        assert alice.scanned(reader) == ids
        assert world.take_requests() == [("alice", "table"), ("alice", kind)], number


def test_credentials_of_a_configuration_are_for_its_servers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes the options of a table cannot send them to another server; the same server may be named again."""
    monkeypatch.setenv("PYICEBERG_CATALOG__TESTS__URI", world.catalog.uri)
    for name in ("uri", "oauth2-server-uri"):
        alice = world.process()
        reader = alice.open(**{f"catalog.{name}": "http://other.example/token"})
        match = rf"lookup\.catalog\.{name} = 'http://other\.example/token' is a different server from"
        world.refused(errors.OptionError, match, functools.partial(alice.ids, reader))
    monkeypatch.delenv("PYICEBERG_CATALOG__TESTS__URI")
    unnamed = {"lookup.catalog": "unnamed", "lookup.catalog.type": "rest", "lookup.keys": "id"}
    world.refused(
        errors.OptionError,
        "'unnamed': the REST catalog has no uri: set lookup.catalog.uri",
        lambda: LookupTable("ns.t", unnamed).get(1),
    )
    assert world.take_requests() == []
    alice = world.process()
    assert alice.ids(alice.open()) == [1, 2, 3]


@pytest.mark.parametrize("path", ["/v1/config", "/v1/oauth/tokens"])
def test_redirects_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """A client's secret and the headers of a configuration stay with the catalog that they are for, also before the first table is asked for."""
    secret = {"credential": "client:SESAME"} if path != "/v1/config" else {}
    options = {"lookup.catalog": "tests", "lookup.cache.dir": str(tmp_path)}
    with (
        RestCatalog() as rest_catalog,
        configured(
            monkeypatch,
            type="rest",
            uri=rest_catalog.uri,
            oauth2_server_uri=rest_catalog.uri + "/v1/oauth/tokens",
            **secret,
        ),
    ):
        rest_catalog.fault = lambda _, requested_path: (307, b"") if requested_path == path else None
        with pytest.raises(errors.CatalogUnavailableError, match=r"HTTP status 307.*: check its endpoint") as caught:
            LookupTable("ns.table", options).scan()
    assert "SESAME" not in str(caught.value)
    assert {request.split()[1] for request in rest_catalog.requests} == {path}


FAULTS: list[tuple[tuple[int, Any], type[Exception], str]] = [
    ((404, error_body(404, "NoSuchTableException", "gone")), errors.UfsNotFoundError, r"has no table ns\.table: NoSuchTableException: gone"),
    ((403, error_body(403, "ForbiddenException", "no")), errors.UfsPermissionError, "does not let this principal read"),
    ((401, error_body(401, "NotAuthorizedException", "no")), errors.UfsPermissionError, "the token has expired or is wrong"),
    ((419, error_body(419, "AuthenticationTimeoutException", "no")), errors.UfsPermissionError, "the token has expired or is wrong"),
    ((404, b"<!DOCTYPE html><html>nginx</html>"), errors.CatalogUnavailableError, r"an HTML page \(HTTP status 404\), .*: check its endpoint"),
    ((404, b""), errors.CatalogUnavailableError, r"0 bytes \(HTTP status 404\), .*: check its endpoint"),
    ((200, b"<html>welcome</html>"), errors.CatalogUnavailableError, r"an HTML page \(HTTP status 200\), .*: check its endpoint"),
    ((200, {"metadata-location": "x", "config": {"s3.secret-access-key": "SESAME"}}), errors.CatalogUnavailableError, "cannot be read"),
    ((307, b""), errors.CatalogUnavailableError, r"0 bytes \(HTTP status 307\), .*: check its endpoint"),
    ((503, b"later"), errors.CatalogUnavailableError, "answered with HTTP status 503"),
    ((403, error_body(403, "x" * 490, "dapi-alice-SESAME0")), errors.UfsPermissionError, "shows a credential, so it is left out"),
]  # fmt: skip


def test_what_a_catalog_answers(world: World) -> None:
    """Each of its refusals is told from the others."""
    reader = (alice := world.process()).open()
    assert alice.ids(reader) == [1, 2, 3]
    for answer, kind, message in FAULTS:
        world.catalog.fault = lambda method, path, answer=answer: answer  # type: ignore[misc]
        world.refused(kind, rf"the Iceberg catalog 'tests'.*{message}", lambda: alice.ids(reader))
        if any(text in str(answer) for text in ("nginx", "SESAME0")):  # a new process asks for the configuration first
            new_process = world.process()
            world.refused(kind, message, lambda new_process=new_process: new_process.ids(new_process.open()))  # type: ignore[misc]
    world.catalog.fault = None
    assert world.process("alice").open() is not None


CONDITIONS: list[tuple[dict[str, Any], str]] = [
    ({"read-restrictions": {"required-row-filter": {"type": "eq", "left": {"type": "reference", "id": 1}, "right": 1}}}, "row filters or column masks.*required-row-filter"),
    ({"read-restrictions": {"required-column-projections": [{"field-id": 2, "action": "replace-with-null"}]}}, "required-column-projections"),
    ({"config": {"s3.remote-signing-enabled": "true"}, "storage-credentials": []}, r"s3\.remote-signing-enabled"),
    ({"config": {"scan-planning-mode": "server"}}, "scan-planning-mode"),
]  # fmt: skip


def test_conditions_that_are_not_met(world: World) -> None:
    """A table with conditions is refused by name, also where the rows are cached and the catalog need not be asked for the version."""
    alice = world.process()
    cached = alice.open("partial", **CACHED["partial"])
    assert alice.ids(cached) == [1, 2, 3]
    for more, condition in CONDITIONS:
        world.catalog.more = more
        world.later(EVERY_S)
        message = rf"table ns\.table of the Iceberg catalog 'tests'.*{condition}"
        world.refused(errors.NotSupportedError, message, lambda: alice.ids(cached))
    world.catalog.more = {"read-restrictions": {"required-row-filter": None, "required-column-projections": []}}
    assert alice.ids(cached) == [1, 2, 3]


@pytest.mark.parametrize("is_stated", [False, True])
def test_a_location_that_is_not_covered(world: World, is_stated: bool) -> None:
    """The catalog says that the credentials do not cover it, or the store does; the process's own credentials are not tried instead."""
    other_table = world.make("other")
    alice = world.process()
    if is_stated:
        world.catalog.prefix = other_table.url
        error = r"credentials that the Iceberg catalog 'tests' has vended do not cover the location, only s3://.*/table"
    else:
        vend = world.store.vend
        world.store.vend = lambda url, lives_s: vend(f"{url}/elsewhere", lives_s)  # type: ignore[method-assign]
        error = r"credentials that the Iceberg catalog 'tests' has vended, but the store refuses them: they do not cover the location \(Forbidden\): have"
    world.refused(errors.PysparkLookupError, error, lambda: alice.ids(alice.open()))
    assert world.take_requests() == [("alice", "table")]


def test_two_catalogs_of_one_name(world: World) -> None:
    """Under one URI each principal sees another table of the name: nobody gets the rows of the other, also in CACHE mode."""
    hidden = world.make("hidden")
    hidden.write([{"id": 2, "name": "hidden"}])
    world.catalog.grants.add(("bob", "ns.hidden"))
    world.catalog.renamed = {("bob", "ns.table"): "ns.hidden"}
    for mode in MODES:
        alice, bob = world.process(), world.process("bob")
        for more in ({}, CACHED[mode]):
            assert alice.ids(alice.open(mode, **more)) == [1, 2, 3]
            assert bob.ids(bob.open(mode, **more)) == [2]


def test_a_catalog_of_the_same_name_without_grants(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program of this host has a catalog in a file under this name, and a table of this name in it: each has its own rows."""
    sql, properties = sql_catalog(world.home)
    local = IcebergTable.create(world.home / "local", COLUMNS, publish=in_catalog(sql, "ns.table"))
    local.commit(local.data([{"id": 2, "name": "local"}]))
    options = {"lookup.catalog": "tests", "lookup.keys": "id", "lookup.cache.dir": str(world.home / "cache")}
    options |= {f"lookup.{name}": text for name, text in CACHED["partial"].items()} | MODES["partial"]
    options["lookup.storage.endpoint_url"] = world.server.endpoint
    governed, ungoverned = world.process(), world.process()
    for process, config in [(governed, {"type": "rest", "uri": world.catalog.uri}), (ungoverned, properties)] * 2:
        for name, text in config.items():
            monkeypatch.setenv(f"PYICEBERG_CATALOG__TESTS__{name.upper()}", text)
        with process.running():
            ids = LookupTable("ns.table", options).get_many([1, 2, 3]).column("id").to_pylist()
        assert ids == ([1, 2, 3] if process is governed else [2])
    sql.close()


def test_how_often_a_catalog_is_asked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """`lookup.catalog.authorise-every`: a duration; 0 asks at each read. Only the conf file can set more than the default of 5 min."""
    alice = world.process()
    with pytest.raises(errors.OptionError, match=r"authorise-every = '1 h' .*this host allows at most 300 s"):
        alice.open(**{"catalog.authorise-every": "1 h"})
    conf = world.home / "lookupcache.conf"
    conf.write_text("lookup.catalog.authorise-every = 2 h\n")
    monkeypatch.setenv("LOOKUPCACHE_CONF", str(conf))
    for every, request_count in (("1 h", 0), ("0 s", 2)):
        cached = alice.open("partial", **CACHED["partial"], **{"catalog.authorise-every": every})
        with alice.running():
            assert cached.get_many([1]).num_rows == 1
            world.take_requests()
            world.later(EVERY_S)
            assert [cached.get_many([1]).num_rows for _ in range(2)] == [1, 1]
        assert len(world.take_requests()) == request_count


def test_what_tells_a_principal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files from which clients of clouds take credentials count, too; where credentials may come from elsewhere, each process is a principal."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.delenv(name, raising=False)
    catalog = Catalog("tests", [("type", "rest")])
    principals = [catalog.find_principal()]
    for name in (".aws/credentials", ".config/gcloud/application_default_credentials.json", ".netrc", "elsewhere"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("alice")
        if name == "elsewhere":
            monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(path))
        assert catalog.find_principal() == catalog.find_principal()
        principals.append(catalog.find_principal())
        path.write_text("bob")
        principals.append(catalog.find_principal())
    assert len({json.dumps(parts) for parts in principals}) == len(principals)
    monkeypatch.setenv("PYICEBERG_CATALOG__TESTS__REST__SIGV4_ENABLED", "true")
    assert catalog.find_principal() != catalog.find_principal()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "alice")
    assert catalog.find_principal() == catalog.find_principal()


def test_the_command_line(world: World, run: Run) -> None:
    """`warm`, `advise`, `stats`, `report`, `serve-metrics` and `check` call the table by its URL, and show no property of the catalog."""
    alice, url, page, prom = world.process(), "catalog://tests/ns.table", world.home / "page.html", world.home / "prom"
    names = ["ns.table"]
    for name in ("catalog", "catalog.type", "catalog.uri", "keys", "storage.endpoint_url"):
        names += ["-o", f"lookup.{name}={alice.options('full')[f'lookup.{name}']}"]
    trace = world.home / "trace.parquet"
    pq.write_table(pa.table({"id": [1, 2, 1]}), trace)
    with alice.running():
        warmed, advised = run("warm", *names, "--json"), run("advise", *names, "--trace", trace, "--json")
    assert (warmed.code, warmed.json["rows"]) == (0, 3)
    assert (advised.json["options"], advised.json["distinct_keys"]) == ({"lookup.cache": "FULL"}, 2)
    for arguments in ((), (url,)):
        stats = run("stats", *arguments, "--json")
        (entry,) = stats.json["tables"]
        assert (entry["url"], entry["values"]["snapshotBuildCount"]) == (url, 1)
    results = [run("report", page), run("serve-metrics", "--textfile", prom), run("check")]
    assert [ran.code for ran in results] == [0, 0, 0]
    world.outputs += [warmed, advised, stats, *results]
    for text in (page.read_text(), prom.read_text()):
        assert url in text
        assert world.catalog.uri not in text
