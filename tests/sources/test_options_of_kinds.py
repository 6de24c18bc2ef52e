"""Every option with every kind of table: it is used, refused by name, or harmless for a reason that is stated here."""

import dataclasses
import random
import sqlite3
from pathlib import Path

import pyarrow as pa
import pytest

from pyspark_lookup import LookupContext, LookupFunction, LookupFunctionProvider, errors
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.lookup.runtime import Runtime
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.sources.registry import OPTIONS, parse_options
from pyspark_lookup.versions.model import Table

COLUMNS = {"lookup.schema": "id BIGINT, name STRING"}
SERVER = "http://127.0.0.1:1"
CATALOG = {"lookup.catalog": "prod", "lookup.catalog.uri": SERVER, "lookup.catalog.type": "rest"}
HTTP = {"lookup.provider": "http", "lookup.http.url": f"{SERVER}/{{id}}", **COLUMNS}
KINDS: dict[str, tuple[dict[str, str], str | None]] = {
    "file": ({"path": "s3://b/t/x.parquet"}, "FILE"),
    "directory": ({"path": "s3://b/t"}, "DIRECTORY"),
    "glob": ({"path": "s3://b/t/*"}, "GLOB"),
    "managed": ({"path": "s3://b/t"}, "MANAGED"),
    "delta": ({"path": "s3://b/t"}, "DELTA"),
    "iceberg": ({"path": "s3://b/t"}, "ICEBERG"),
    "unity": ({"path": "a.b.c", "lookup.catalog": "unity", "lookup.catalog.uri": SERVER}, "DELTA"),
    "rest": ({"path": "a.b.c", **CATALOG}, "ICEBERG"),
    "sql": ({"path": "a.b.c", **CATALOG, "lookup.catalog.type": "sql", "lookup.catalog.uri": "sqlite:///x"}, "ICEBERG"),
    "provider": ({"lookup.provider": f"{__name__}:provide"}, None),
    "http": (HTTP, None),
    "redis": ({"lookup.provider": "redis", "path": "redis://127.0.0.1:1", "lookup.redis.key-pattern": "c:{id}", **COLUMNS}, None),
    "database": ({"path": "sqlite:///shop.db", "lookup.table": "t"}, None),
}  # fmt: skip
"""What names a table of each kind, and the kind's name in the engine; None: the system is the only one."""


class Nothing(LookupFunction):
    def lookup(self, keys: pa.Table) -> pa.Table:
        return keys


def provide(context: LookupContext) -> LookupFunctionProvider:
    schema = pa.schema([("id", pa.int64()), ("name", pa.string())])
    return LookupFunctionProvider(Nothing(), schema, version=lambda: "1", scan=lambda: iter(()))


@dataclasses.dataclass(frozen=True)
class Use:
    """Which kinds of tables take the options `names` (with `*`: those that begin so). `value`: a text for a test, `beside`: what it needs beside it.

    `harmless`: kinds for which they mean nothing, and why nobody need be told.
    """

    names: str
    kinds: frozenset[str] | set[str]
    value: str = ""
    beside: dict[str, str] = dataclasses.field(default_factory=dict)
    harmless: frozenset[str] | set[str] = frozenset()
    why: str = ""


ALL = frozenset(KINDS)
FILES, SYSTEMS = {"file", "directory", "glob"}, {"provider", "http", "redis", "database"}
ICEBERG, CATALOGS = {"iceberg", "rest", "sql"}, {"unity", "rest", "sql"}
VERSIONED = ALL - FILES - SYSTEMS
SCANNED = ALL - {"http", "redis"}
AT_WRITE = "a write to such a table is an error, and a LookupTable has the options of its writes"
PARTIAL = {"lookup.cache": "PARTIAL", "lookup.partial-cache.expire-after-write": "1 h"}
FULL = {"lookup.cache": "FULL", "lookup.full-cache.periodic-reload.interval": "1 h"}
TIMED = {"lookup.cache": "FULL", "lookup.full-cache.reload-strategy": "TIMED", "lookup.full-cache.timed-reload.iso-time": "10:15"}  # fmt: skip
CACHE = {"lookup.metadata.source": "CACHE"}
RETRY = {"lookup.retry.predicate": "lookup_miss", "lookup.retry.fixed-delay": "1 s", "lookup.retry.max-attempts": "1"}
USES = [
    Use("path lookup.keys lookup.cache.dir lookup.provider lookup.table lookup.query", ALL),  # they name the table, or no kind works without them
    Use("lookup.format", FILES, "csv"),
    Use("lookup.schema", FILES | {"http", "redis", "database"}, "id BIGINT"),
    Use("lookup.partition", ALL - SYSTEMS - {"managed"}, "k=1"),
    Use("lookup.success-file", {"directory", "glob"}, "true"),
    Use("lookup.settle lookup.busy-wait lookup.busy-timeout", FILES, "1 s"),
    Use("lookup.on-busy", FILES, "FAIL"),
    Use("lookup.csv.header lookup.csv.infer-schema", FILES, "false"),
    Use("lookup.csv.sep lookup.csv.quote lookup.csv.escape lookup.csv.null-value", FILES, "!"),
    Use("lookup.csv.encoding", FILES, "latin-1"),
    Use("lookup.columns lookup.cidr lookup.starts-with lookup.valid-from", ALL, "id"),
    Use("lookup.where", ALL, "id = 1"),
    Use("lookup.range", ALL, "a..b"),
    Use("lookup.valid-to", ALL, "b", {"lookup.valid-from": "a"}),
    Use("lookup.overlap", ALL, "ALL"),
    Use("lookup.range.bounds", ALL, "()"),
    Use("lookup.on-bad-network", ALL, "SKIP"),
    Use("lookup.view", ALL, "summary"),
    Use("lookup.on-error", ALL, "NULL"),
    Use("lookup.scan.split-size", ALL - SYSTEMS, "1 MiB", harmless=SYSTEMS, why="one task reads the rows of another system, whatever their size"),
    Use("lookup.metadata.source", ALL, "CACHE", {"lookup.metadata.sync-interval": "1 s"}),
    Use("lookup.metadata.sync-interval", ALL, "1 s", CACHE),
    Use("lookup.version", VERSIONED, "1"),
    Use("lookup.timestamp", VERSIONED, "2026-01-01"),
    Use("lookup.valid-write-ids", {"managed"}, "t:1:9223372036854775807::"),
    Use("lookup.floor", {"managed"}, "t:1", harmless=ALL - {"managed"}, why="lookups set it themselves, and the path may have another kind of table by then"),
    Use("lookup.version-at", ALL, "PLAN"),
    Use("lookup.on-version-gone", ALL, "FAIL"),
    Use("lookup.cache", ALL, "PARTIAL", PARTIAL),
    Use("lookup.cache.max-bytes", ALL, "100 MiB"),
    Use("lookup.max-retries", ALL, "1"),
    Use("lookup.storage.*", ALL - SYSTEMS, "x"),
    Use("lookup.partial-cache.expire-after-access lookup.partial-cache.expire-after-write", ALL, "1 s", PARTIAL),
    Use("lookup.partial-cache.max-rows lookup.partial-cache.max-bytes", ALL, "1", PARTIAL),
    Use("lookup.partial-cache.cache-missing-key", ALL, "false", PARTIAL),
    Use("lookup.partial-cache.store", SYSTEMS, "DISKCACHE", {**PARTIAL, "lookup.partial-cache.max-bytes": "2 MiB"}),
    Use("lookup.full-cache.reload-strategy", SCANNED, "PERIODIC", FULL),
    Use("lookup.full-cache.periodic-reload.interval lookup.full-cache.build-wait lookup.full-cache.retain", SCANNED, "1 h", FULL),
    Use("lookup.full-cache.periodic-reload.schedule-mode", SCANNED, "FIXED_RATE", FULL),
    Use("lookup.full-cache.timed-reload.iso-time", SCANNED, "10:16", TIMED),
    Use("lookup.full-cache.timed-reload.interval-in-days", SCANNED, "2", TIMED),
    Use("lookup.full-cache.blackout", SCANNED, "22:00-23:00", FULL),
    Use("lookup.full-cache.reload-jitter", SCANNED, "1 s", FULL),
    Use("lookup.full-cache.build-memory", SCANNED, "64 MiB", FULL),
    Use("lookup.full-cache.on-reload-failure", SCANNED, "FAIL", FULL | CACHE),
    Use("lookup.full-cache.max-staleness", SCANNED, "2 h", FULL | CACHE),
    Use("lookup.provider.*", {"provider"}, "x"),
    Use("lookup.async.capacity", {"http"}, "7"),
    Use("lookup.async.timeout lookup.circuit-breaker.wait-duration", SYSTEMS, "1 s"),
    Use("lookup.rate-limit lookup.max-connections", SYSTEMS, "7"),
    Use("lookup.retry.predicate", SYSTEMS, "lookup_miss", RETRY),
    Use("lookup.retry.fixed-delay", SYSTEMS, "1 s", RETRY),
    Use("lookup.retry.max-attempts", SYSTEMS, "1", RETRY),
    Use("lookup.credentials", {"unity", "http", "redis"}, "m:f"),  # and databases that have logins, see below
    Use("lookup.version-query", {"database"}, "SELECT 1"),
    Use("lookup.changes-query", {"database"}, "SELECT :since", {"lookup.version-query": "SELECT 1"}),
    Use("lookup.http.url", {"http"}, f"{SERVER}/x/{{id}}"),
    Use("lookup.http.body", {"http"}, '{"a": "{id}"}', {"lookup.http.url": SERVER}),
    Use("lookup.http.rows", {"http"}, "a"),
    Use("lookup.http.batch-size", {"http"}, "100"),  # the default
    Use("lookup.http.timeout", {"http"}, "30 s"),  # the default
    Use("lookup.http.header.*", {"http"}, "y"),
    Use("lookup.redis.key-pattern", {"redis"}, "c:{id}"),
    Use("lookup.redis.value", {"redis"}, "HASH"),  # the default
    Use("lookup.catalog", CATALOGS, "prod"),
    Use("lookup.catalog.*", {"rest", "sql"}, "y"),
    Use("lookup.catalog.authorise-every", {"unity", "rest"}, "1 s"),
    Use("lookup.branch lookup.tag", ICEBERG, "b"),
    Use("lookup.changes-from", {"managed"}, "1", harmless=ALL - {"managed"}, why="to read changes of such a table is an error"),
    Use("lookup.changes-to", {"managed"}, "1", {"lookup.changes-from": "1"}, harmless=ALL - {"managed"}, why="to read changes of such a table is an error"),
    Use("lookup.stream.start", {"managed"}, "LATEST", harmless=ALL - {"managed"}, why="a stream of changes of such a table is an error"),
    Use("lookup.stream.max-rows-per-trigger lookup.stream.max-files-per-trigger lookup.stream.max-bytes-per-trigger", {"managed"}, "1",
        harmless=ALL - {"managed"}, why="a stream of changes of such a table is an error"),
    Use("lookup.create-if-not-exists", frozenset(), "true"),  # CREATE TABLE takes it before it is parsed
    Use("lookup.write.mode", {"managed"}, "upsert", harmless=ALL - {"managed"}, why=AT_WRITE),
    Use("lookup.write.unique-keys lookup.write.merge-schema", {"managed"}, "true", harmless=ALL - {"managed"}, why=AT_WRITE),
    Use("lookup.write.missing-columns", {"managed"}, "KEEP", harmless=ALL - {"managed"}, why=AT_WRITE),
    Use("lookup.write.batch", {"managed"}, "n:1", harmless=ALL - {"managed"}, why=AT_WRITE),
    Use("lookup.write.compact-after", {"managed"}, "1", harmless=ALL - {"managed"}, why=AT_WRITE),
    Use("lookup.write.timeout", {"managed"}, "1 s", harmless=ALL - {"managed"}, why=AT_WRITE),
]  # fmt: skip
USE_BY_NAME = {name: use for use in USES for name in use.names.split()}


def test_every_option_with_every_kind_of_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with sqlite3.connect("shop.db") as shop:
        shop.execute("CREATE TABLE t (id BIGINT, name TEXT)")
    shop.close()
    runtime = Runtime(HostClock(), random.Random(1))

    def complete(kind: str, more: dict[str, str]) -> LookupOptions:
        named = {"lookup.keys": "id", "lookup.cache.dir": f"{tmp_path}/c", **KINDS[kind][0]}
        return runtime.effective(parse_options({**named, **more}, conf={}))

    engines = {kind: runtime.engine(complete(kind, {})) for kind in KINDS}

    def open_table(kind: str, more: dict[str, str]) -> Table:
        kinds = engines[kind].reader.kinds
        return kinds.to_table(complete(kind, more), KINDS[kind][1] or kinds.names[0])

    names = {
        field.metadata["key"]
        for group in (*vars(LookupOptions.parse({"path": "x"})).values(), *(kind() for kind in OPTIONS))
        if dataclasses.is_dataclass(group)
        for field in dataclasses.fields(group)
    }
    assert names == USE_BY_NAME.keys()
    wrong = []
    for name, use in USE_BY_NAME.items():
        if not use.value:
            continue
        assert bool(use.harmless) == bool(use.why)
        key = name.replace("*", "x")
        for kind in KINDS:
            refusal = None
            try:
                open_table(kind, {**use.beside, key: use.value})
            except errors.OptionError as problem:
                refusal = str(problem)
            if kind in use.kinds or kind in use.harmless:
                if refusal is not None:
                    wrong.append((key, kind, refusal))
            elif refusal is None or not any(part in refusal for part in (key, *use.beside)):
                wrong.append((key, kind, refusal or "ignored"))
    assert wrong == []


@pytest.mark.parametrize(
    ("path", "takes"),
    [("postgresql://h/db", True), ("mysql://h/db", True), ("sqlite:///x.db", False), ("duckdb:///x.db", False), ("bigquery://p/d", False)],
)  # fmt: skip
def test_databases_that_have_logins(path: str, takes: bool) -> None:
    options = {"path": path, "lookup.table": "t", "lookup.credentials": "m:f"}
    if takes:
        assert parse_options(options, conf={}).files.path == path
        return
    message = r"option lookup\.credentials returns a user and a password, which .* does not take"
    with pytest.raises(errors.OptionError, match=message):
        parse_options(options, conf={})


def test_the_conf_files_options_are_for_tables_that_take_them() -> None:
    """The conf file has defaults for all tables of a host, so an option that only some of them take does not refuse the others."""
    conf = {"lookup.credentials": "m:f", "lookup.http.timeout": "5 s", "lookup.storage.endpoint_url": SERVER}
    for named, _ in KINDS.values():
        if "lookup.catalog" not in named:
            parse_options({"lookup.keys": "id", **named}, conf=conf)
