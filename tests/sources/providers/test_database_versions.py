"""Versions and changes of databases: the recipes of docs/databases.md, as they are, beside random writes."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import subprocess
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import duckdb
import pyarrow as pa
import pytest

from pyspark_lookup import LookupTable
from pyspark_lookup.errors import LookupFunctionError
from pyspark_lookup.sources.providers.databases import database as kinds
from pyspark_lookup.sources.providers.databases import database_table
from tests.support.databases import CHANGES, VERSION, Database, literal, recipe
from tests.support.followed_tables import AGED, History, Options, Requests, System, Way, Write
from tests.support.fuzzing import BY_NIGHT, by_day, seeds
from tests.support.lookup_functions import ids
from tests.support.postgres import PostgresServer
from tests.support.workers import in_fresh_process, measure_growth

PARTIAL = {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "10000"}
FULL = {"lookup.cache": "FULL", "lookup.full-cache.build-wait": "1 h"}
VERSIONED = {"lookup.version-query": VERSION}
CHANGING = VERSIONED | {"lookup.changes-query": CHANGES}
RELOADED = FULL | {"lookup.metadata.source": "CACHE", "lookup.full-cache.reload-strategy": "PERIODIC", "lookup.full-cache.periodic-reload.interval": "60 s"}  # fmt: skip
CACHED = PARTIAL | {"lookup.metadata.source": "CACHE", "lookup.metadata.sync-interval": "30 s"}
WAYS = (
    Way("PARTIAL", PARTIAL | CHANGING, versions=True, changes=True),
    Way("FULL", FULL | CHANGING, versions=True, changes=True),
    Way("NONE", {}),
    Way("PARTIAL", PARTIAL | VERSIONED, versions=True),
    Way("PARTIAL", AGED, age_s=60, expires_s=60),
    Way("PARTIAL", AGED | CHANGING, expires_s=60, versions=True, changes=True),
    Way("PARTIAL", CACHED | VERSIONED, age_s=30, versions=True),
    Way("PARTIAL", CACHED | CHANGING, age_s=30, versions=True, changes=True),
    Way("FULL", FULL | VERSIONED, versions=True),
    Way("FULL", RELOADED, age_s=60, expires_s=60),
    Way("FULL", RELOADED | CHANGING, age_s=60, expires_s=60, versions=True, changes=True),
)


class Customers(System):
    """The table `customers` with its recipe."""

    options: ClassVar[Options] = {"lookup.table": "customers"}
    ways = WAYS

    def __init__(self, database: Database) -> None:
        self._database = database
        self._scheme = database.scheme
        self.path = database.url
        self.clears_all = self._scheme == "postgresql"
        for name in ("customers_changes", "customers_version", "customers"):
            database.execute(f"DROP TABLE IF EXISTS {name}")
        if self._scheme == "postgresql":
            database.execute("DROP FUNCTION IF EXISTS customers_changed")
        # DuckDB does not take a key again in the transaction that has removed it.
        key = "INTEGER" if self._scheme == "duckdb" else "INTEGER PRIMARY KEY"
        database.execute(f"CREATE TABLE customers (id {key}, city VARCHAR(4000))")
        database.script(recipe(database.scheme))
        self._statement_count = 0

    def _sql(self, write: Write) -> Iterator[str]:
        key, value = write.key, f"'{write.value}'"
        insert = f"INSERT INTO customers VALUES ({key}, {value})"
        remove = f"DELETE FROM customers WHERE id = {key}"
        appended = f"concat(city, {value})" if self._scheme == "mariadb" else f"city || {value}"
        upsert = "ON DUPLICATE KEY UPDATE" if self._scheme == "mariadb" else "ON CONFLICT (id) DO UPDATE SET"
        if write.op == "upsert" and self._scheme == "duckdb":
            yield remove
            yield insert
            return
        yield {
            "insert": insert,
            "upsert": f"{insert} {upsert} city = {value}",
            "update": f"UPDATE customers SET city = {value} WHERE id = {key}",
            "delete": remove,
            "move": f"UPDATE customers SET id = {write.to} WHERE id = {key}",
            "append": f"UPDATE customers SET city = {appended}",
            "clear": "TRUNCATE customers" if self.clears_all else "DELETE FROM customers",
            "touch": f"UPDATE customers SET city = {value} WHERE id = -1",
        }[write.op]

    def write(self, writes: Sequence[Write], keys: set[int], commit: bool) -> None:
        statements = [statement for write in writes for statement in self._sql(write)]
        if self._scheme == "duckdb":  # which has no triggers
            statements.append("UPDATE customers_version SET n = n + 1")
            statements += [f"INSERT INTO customers_changes SELECT n, {key} FROM customers_version" for key in keys]
        self.maintain([*statements, *([] if commit else ["ROLLBACK"])])

    def maintain(self, statements: Sequence[str]) -> None:
        self._database.transaction([*statements, *([] if statements[-1] == "ROLLBACK" else ["COMMIT"])])

    def disconnect(self) -> None:
        if self._database.server is not None:
            self._database.server.end_connections()

    def take_requests(self) -> Requests:
        server, requests = self._database.server, Requests()
        statements = (
            server.statements(parameters=True) if isinstance(server, PostgresServer) else self._database.statements()
        )
        for text in statements[self._statement_count :]:
            keys = KEYS_IN[self._scheme].search(text)
            if keys is not None:
                requests.keys += map(int, re.findall(r"\d+", keys[1]))
            elif "FROM customers_changes" in text:
                requests.changes += "FETCH" not in text and "LIMIT 0" not in text
            elif "FROM customers_version" in text:
                requests.versions += "trimmed" not in text
            else:
                requests.scans += "SELECT t." in text and "lookupcache_keys" not in text
        self._statement_count = len(statements)
        return requests

    @contextlib.contextmanager
    def interrupted(self, between: Callable[[], None]) -> Iterator[None]:
        in_file = self._scheme == "duckdb"  # which cannot be written while it is open to read

        def interrupt(call: Callable[..., Any]) -> Callable[..., Any]:
            def call_between(*args: Any, **kwargs: Any) -> Any:
                with contextlib.suppress(duckdb.ConnectionException):
                    between()
                answer = call(*args, **kwargs)
                if not in_file:
                    between()
                return answer

            return call_between

        kind: type = kinds.Database if in_file else kinds.Connection
        names = ["connect"] if in_file else ["query", "rows_of_keys", "rows"]
        with pytest.MonkeyPatch.context() as patch:
            for cls in kind.__subclasses__():
                for name in names:
                    if name in vars(cls):
                        patch.setattr(cls, name, interrupt(getattr(cls, name)))
            yield


KEYS_IN = {
    "postgresql": re.compile(r"= ANY \(\$1\) -- \$1 = '\{(.*)\}'"),
    "mariadb": re.compile(r" IN \((\(.*\))\)$"),
    "sqlite": re.compile(r"AS \(VALUES (.*?)\) SELECT", re.DOTALL),
    "duckdb": re.compile(r"^REGISTER \[(.*)\]"),
}
"""The keys in a statement that looks up rows, as the database has received it."""


@pytest.mark.parametrize("seed", seeds(1))
def test_histories(database: Database, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Lookups on two hosts, by night in all modes, beside random writes: no row is older than promised, and no key is asked for that need not be."""
    history = History(Customers(database), cache_dir, seed, 9 if BY_NIGHT else 2, monkeypatch)
    history.run(150 if BY_NIGHT else 30)


def test_writers_wait_for_each_other(postgres: Database, postgres_server: PostgresServer) -> None:
    """No version becomes visible before one with a lower number: the second writer waits, and TRUNCATE is a change of all."""
    Customers(postgres)
    postgres.execute("INSERT INTO customers VALUES (1, 'Oslo'), (2, 'Bergen')")
    command = ["psql", f"{postgres_server.uri}&application_name=lookupcache-tests", "-Xq"]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert first.stdin is not None
    assert first.stdout is not None
    first.stdin.write("BEGIN; UPDATE customers SET city = 'Hamar' WHERE id = 1;\n\\echo written\n")
    first.stdin.flush()
    assert first.stdout.readline() == "written\n"
    with pytest.raises(AssertionError, match="lock timeout"):
        postgres.execute("SET lock_timeout = '50 ms'; UPDATE customers SET city = 'Voss' WHERE id = 2")
    first.communicate("COMMIT;\n")
    postgres.execute("UPDATE customers SET city = 'Voss' WHERE id = 2")
    table = postgres.table("customers", "id", CHANGING, PARTIAL)
    assert [table.get(key)[0]["city"] for key in (1, 2)] == ["Hamar", "Voss"]
    postgres.execute("TRUNCATE customers")
    assert table.get(1) == table.get(2) == []


def test_a_snapshot_as_version(postgres: Database) -> None:
    """`pg_current_snapshot()` changes with each commit, and not without one. It must be a text."""
    name = postgres.create("id integer, n integer", "(1, 1)")
    table = postgres.table(name, "id", PARTIAL, {"lookup.version-query": "SELECT pg_current_snapshot()::text"})
    assert table.get(1) == table.get(1) == [{"id": 1, "n": 1}]
    assert table.metrics()["missCount"] == 1
    postgres.execute(f"UPDATE {name} SET n = 2")
    assert table.get(1) == [{"id": 1, "n": 2}]
    for value in ("pg_current_snapshot()", "gen_random_uuid()", "interval '1 day'"):
        with pytest.raises(
            LookupFunctionError, match=r"lookup.version-query returned a value of the type .*: cast it to text"
        ):
            postgres.table(name, "id", PARTIAL, {"lookup.version-query": f"SELECT {value}"}).get(1)


def test_versions_belong_to_their_query(sqlite: Database) -> None:
    """A host does not take what it knows of a table from others that follow it in another way, or not at all, for the version."""
    name = sqlite.create("id INTEGER, n INTEGER", "(1, 1)")
    hourly = PARTIAL | {"lookup.metadata.source": "CACHE", "lookup.metadata.sync-interval": "1 h"}
    for number in range(2):
        sqlite.table(name, "id", AGED, {"lookup.columns": "n"}).get(1)
        assert sqlite.table(name, "id", hourly, {"lookup.version-query": f"SELECT {number}"}).get(1)
        assert sqlite.statements().count(f"SELECT {number}") == 1


def test_since_has_the_type_of_the_version(postgres: Database) -> None:
    """`:since` is compared without a cast; in texts and comments it is no parameter."""
    for name in ("items", "changed"):
        postgres.execute(f"DROP TABLE IF EXISTS {name}")
    postgres.execute("CREATE TABLE items (id uuid, n integer)")
    postgres.execute("CREATE TABLE changed (id uuid, at timestamptz)")
    postgres.execute("INSERT INTO items SELECT md5(i::text)::uuid, i FROM generate_series(1, 3) i")
    postgres.execute("INSERT INTO changed VALUES (md5('1')::uuid, '2024-01-01 00:00:00.000001+02')")
    followed = {
        "lookup.version-query": "SELECT max(at) FROM changed",
        "lookup.changes-query": "SELECT id FROM changed WHERE at > :since AND ':since' = ':since' -- :since",
    }
    table = postgres.table("items", "id", PARTIAL, followed)
    keys = table.scan(["id"])
    assert sorted(table.get_many(keys)["n"].to_pylist()) == [1, 2, 3]
    postgres.execute("UPDATE items SET n = 20 WHERE n = 2")
    postgres.execute("INSERT INTO changed VALUES (md5('2')::uuid, '2024-01-01 00:00:00.000002+02')")
    assert sorted(table.get_many(keys)["n"].to_pylist()) == [1, 3, 20]
    assert table.metrics()["missCount"] == 4
    assert table.metrics()["changesFailureCount"] == 0


@pytest.mark.parametrize("fixture", ["postgres", "duckdb_file"])
def test_changed_keys_that_are_infinite_times(request: pytest.FixtureRequest, fixture: str) -> None:
    """A change of a row with an infinite date reaches caches, which know it by the last day; also with a version whose digits have no limit."""
    database: Database = request.getfixturevalue(fixture)
    name, log = (
        database.create("d DATE, n INTEGER", "('infinity', 1)"),
        database.create("n INTEGER, d DATE", "(1, NULL)"),
    )
    version = "sum(n)::numeric" if fixture == "postgres" else "max(n)"
    followed = {
        "lookup.version-query": f"SELECT {version} FROM {log}",
        "lookup.changes-query": f"SELECT d FROM {log} WHERE n > :since",
    }
    tables = [database.table(name, "d", cache, followed) for cache in (PARTIAL, FULL)]
    last = datetime.date(9999, 12, 31)
    for n in range(1, 4):
        for table in tables:
            assert table.get(last) == [{"d": last, "n": n}]
        database.execute(f"UPDATE {name} SET n = n + 1")
        database.execute(f"INSERT INTO {log} VALUES ({10 * n}, 'infinity')")
    assert [table.metrics()["changesFailureCount"] for table in tables] == [0, 0]


def test_changes_without_the_key(postgres: Database) -> None:
    """The error of the query is counted, and all keys are looked up again."""
    name = postgres.create("id integer, n integer", "(1, 1)")
    postgres.execute("CREATE TABLE IF NOT EXISTS counted (n integer); INSERT INTO counted VALUES (1)")
    followed = {
        "lookup.version-query": "SELECT count(*) FROM counted",
        "lookup.changes-query": "SELECT n FROM counted WHERE n > :since",
    }
    table = postgres.table(name, "id", PARTIAL, followed, {"lookup.max-retries": "0"})
    assert table.get(1) == [{"id": 1, "n": 1}]
    postgres.execute(f"UPDATE {name} SET n = 2; INSERT INTO counted VALUES (2)")
    assert table.get(1) == [{"id": 1, "n": 2}]
    assert table.metrics()["changesFailureCount"] == 1


def test_mariadb_floats_that_change(mariadb: Database) -> None:
    """Changed keys and versions have all digits of a FLOAT. In the server's results, it has six."""
    name = mariadb.create("id FLOAT, v INTEGER", "(16777216, 1)", "(0.1, 1)")
    log = mariadb.create("n FLOAT, id FLOAT", "(16777214, NULL)", name="log")
    followed = {
        "lookup.version-query": f"SELECT max(n) FROM {log}",
        "lookup.changes-query": f"SELECT id FROM {log} WHERE n > :since AND '%s' <> ''",
    }
    table = mariadb.table(name, "id", PARTIAL, followed)
    keys = pa.table({"id": pa.array([16777216, 0.1], pa.float32())})
    for number in (1, 2):
        assert table.get_many(keys)["v"].to_pylist() == [number] * 2
        mariadb.execute(f"UPDATE {name} SET v = v + 1")
        mariadb.execute(f"INSERT INTO {log} VALUES ({16777214 + number}, 16777216), ({16777214 + number}, 0.1)")
    assert (table.metrics()["changedKeyCount"], table.metrics()["changesFailureCount"]) == (2, 0)


@pytest.mark.parametrize(
    ("fixture", "key", "old", "new"), [("sqlite", "INTEGER", None, 5), ("mariadb", "VARCHAR(9)", "a", "A")]
)
def test_keys_that_the_recipe_logs(
    request: pytest.FixtureRequest, fixture: str, key: str, old: int | str | None, new: int | str
) -> None:
    """An update logs the old key, even if the database does not call the new one different: a null, or a text in a lax collation."""
    database: Database = request.getfixturevalue(fixture)
    for name in ("customers_changes", "customers_version", "customers"):
        database.execute(f"DROP TABLE IF EXISTS {name}")
    database.execute(f"CREATE TABLE customers (id {key}, city VARCHAR(9))")
    logged = re.sub(r"\bid INT(EGER)?\b", f"id {key}", recipe(database.scheme))
    database.script(logged)
    database.execute(f"INSERT INTO customers VALUES ({literal(old)}, 'Oslo')")
    table = database.table("customers", "id", FULL, CHANGING)
    assert table.scan()["id"].to_pylist() == [old]
    database.execute(f"UPDATE customers SET id = {literal(new)}")
    assert table.scan()["id"].to_pylist() == [new]
    assert table.metrics()["changesFailureCount"] == 0


@pytest.mark.parametrize("database", by_day(["mariadb", "sqlite", "postgres", "duckdb_file"], 2), indirect=True)
def test_more_changes_than_go_into_memory(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys count as changed; the next question has the present version, whatever connection it is asked on."""
    monkeypatch.setattr(database_table, "MOST_CHANGES", 5)
    customers = Customers(database)
    tables = [database.table("customers", "id", mode, CHANGING) for mode in (PARTIAL, FULL)]
    for number, keys in enumerate([range(6), range(6), (1, 2)]):
        writes = [Write("upsert", key, f"city {number}") for key in keys]
        customers.write(writes, {*keys}, True)
        for table in tables:
            assert table.get_many(ids(*keys))["city"].to_pylist() == [f"city {number}"] * len(keys)
    metrics = tables[0].metrics()  # the two share them
    assert (metrics["changedKeyCount"], metrics["changesFailureCount"]) == (2 * 2, 0)


def copy(url: str, cache: Path, answer: Path) -> None:
    options = {
        "lookup.table": "wide",
        "lookup.keys": "id",
        "lookup.cache.dir": str(cache),
        "lookup.version-query": "SELECT 1",
    }
    with LookupTable(url, {**options, **FULL, "lookup.full-cache.build-memory": "16 MiB"}) as table:
        growth = measure_growth(table.warm)
        answer.write_text(f"{table.metrics()['numCachedRecords']} {growth}")


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [400_000])
def test_copies_are_streamed(database: Database, tmp_path: Path, count: int) -> None:
    """A copy of 400 MB takes less than 200 MB more memory than a copy of one row. DuckDB itself also keeps the blocks of its file in memory."""
    filled = {
        "postgresql": f"INSERT INTO wide SELECT i, repeat(md5(i::text), 32) FROM generate_series(1, {count}) i",
        "mariadb": f"INSERT INTO wide SELECT seq, repeat(md5(seq), 32) FROM seq_1_to_{count}",
        "duckdb": f"INSERT INTO wide SELECT i, repeat(md5(i::VARCHAR), 32) FROM range({count}) r(i)",
        "sqlite": f"INSERT INTO wide WITH RECURSIVE s(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM s WHERE i < {count}) SELECT i, hex(randomblob(512)) FROM s",
    }
    growths = []
    for statement in ("INSERT INTO wide VALUES (1, 'x')", filled[database.scheme]):
        database.execute("DROP TABLE IF EXISTS wide")
        database.execute("CREATE TABLE wide (id INTEGER, body TEXT)")
        database.execute(statement)
        cache, answer = tmp_path / f"copy-{len(growths)}", tmp_path / "answer"
        in_fresh_process(copy, database.url, cache, answer, bound_s=400)
        rows, most = map(int, answer.read_text().split())
        assert rows == (count if growths else 1)
        growths.append(most)
    file_bytes = (
        os.path.getsize(urllib.parse.unquote(database.url.removeprefix("duckdb:///")))
        if database.scheme == "duckdb"
        else 0
    )
    assert growths[1] - growths[0] - file_bytes < 200e6
