"""Versions and changes of databases: the recipes of docs/databases.md, as they are, beside random writes."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from pyspark_lookup import LookupTable
from tests.support.databases import Database
from tests.support.fuzzing import BY_NIGHT
from tests.support.postgres import PostgresServer

PAGE = (Path(__file__).parents[3] / "docs" / "databases.md").read_text(encoding="utf-8")
HEADINGS = {"postgresql": "PostgreSQL", "mariadb": "MySQL and MariaDB", "sqlite": "SQLite", "duckdb": "DuckDB"}
VERSION, CHANGES = re.findall(r"-- lookup\.[a-z-]+-query\n((?:(?!--|```).*\n)+)", PAGE)[:2]
FOLLOWED = {
    "lookup.version-query": VERSION,
    "lookup.changes-query": CHANGES,
    "lookup.table": "customers",
    "lookup.keys": "id",
}
PARTIAL = {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": "10000"}
FULL = {"lookup.cache": "FULL"}
COUNT = 12  # keys


def recipe(database: Database) -> str:
    """The first block of SQL below the database's heading."""
    below = PAGE.partition(f"\n### {HEADINGS[database.scheme]}\n")[2]
    return re.findall(r"```sql\n(.*?)```", below, re.DOTALL)[0]


class Customers:
    """The table `customers` with its recipe, and the rows that it should have. `changed`: keys that were written since the start."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.rows: dict[int, str] = {}
        self.written: list[int] = []
        for name in ("customers_changes", "customers_version", "customers"):
            database.execute(f"DROP TABLE IF EXISTS {name}")
        if database.scheme == "postgresql":
            database.execute("DROP FUNCTION IF EXISTS customers_changed")
        database.execute("CREATE TABLE customers (id INTEGER PRIMARY KEY, city VARCHAR(40))")
        database.script(recipe(database))

    def statements(self, rng: random.Random) -> tuple[list[str], dict[int, str], list[int]]:
        """Some statements of one transaction, the rows after them, and the keys that they write."""
        rows, written, statements = dict(self.rows), list[int](), list[str]()
        for _ in range(rng.randrange(1, 4)):
            key, city, act = rng.randrange(COUNT), f"city {rng.random()}", rng.random()
            if key not in rows:
                statements.append(f"INSERT INTO customers VALUES ({key}, '{city}')")
                rows[key] = city
            elif act < 0.3:
                statements.append(f"DELETE FROM customers WHERE id = {key}")
                del rows[key]
            elif act < 0.5 and (free := rng.randrange(COUNT)) not in rows and self._database.scheme != "duckdb":
                statements.append(f"UPDATE customers SET id = {free} WHERE id = {key}")
                rows[free] = rows.pop(key)
                written.append(free)
            else:
                statements.append(f"UPDATE customers SET city = '{city}' WHERE id = {key}")
                rows[key] = city
            written.append(key)
        if self._database.scheme == "duckdb":  # which has no triggers
            statements.append("UPDATE customers_version SET n = n + 1")
            statements += [f"INSERT INTO customers_changes SELECT n, {key} FROM customers_version" for key in written]
        return statements, rows, written

    def write(self, rng: random.Random) -> None:
        """Write some rows, or try to."""
        statements, rows, written = self.statements(rng)
        fails = rng.random() < 0.2
        self._database.transaction([*statements, *(["ROLLBACK"] if fails else ["COMMIT"])])
        if not fails:
            self.rows = rows
            self.written += written


@pytest.mark.parametrize("seed", [1])
def test_recipes(database: Database, cache_dir: Path, seed: int) -> None:
    """Lookups in all modes on two hosts have the rows of the last commit; caches ask for no key that was not written, and copy once."""
    rng = random.Random(seed)
    customers = Customers(database)
    hosts = [
        (mode, LookupTable(database.url, FOLLOWED | mode | {"lookup.cache.dir": str(cache_dir / f"{host} {number}")}))
        for host in "ab"
        for number, mode in enumerate(({}, PARTIAL, FULL))
    ]
    database.tables += [table for _, table in hosts]
    seen = dict.fromkeys(range(len(hosts)), 0)
    asked = pa.table({"id": pa.array(range(COUNT), pa.int32())})
    for step in range(14 if BY_NIGHT else 6):
        customers.write(rng)
        for number in range(len(hosts)) if step == 0 else rng.sample(range(len(hosts)), 3):
            mode, table = hosts[number]
            before = table.metrics()
            found = {row["key_index"]: row["city"] for row in table.get_many(asked).to_pylist()}
            assert found == customers.rows
            after, since = table.metrics(), set(customers.written[seen[number] :])
            if step and mode is PARTIAL:
                assert after["missCount"] - before["missCount"] == len(since)
            if step and mode is FULL:
                assert after["changedKeyCount"] - before["changedKeyCount"] == len(since)
            seen[number] = len(customers.written)
    fulls = [table for mode, table in hosts if mode is FULL]
    assert sorted(fulls[0].scan()["city"].to_pylist()) == sorted(customers.rows.values())
    # After a backup was restored, or changes were removed, all may have changed.
    database.execute("UPDATE customers_version SET trimmed = n + 1000, n = n + 1000")
    for mode, table in hosts:
        before = table.metrics()
        assert {row["key_index"]: row["city"] for row in table.get_many(asked).to_pylist()} == customers.rows
        assert mode is not PARTIAL or table.metrics()["missCount"] - before["missCount"] == COUNT
    partial = hosts[1][1]
    assert partial.metrics()["changesFailureCount"] == 0


def test_writers_wait_for_each_other(postgres: Database, postgres_server: PostgresServer) -> None:
    """No version becomes visible before one with a lower number: the second writer waits, and TRUNCATE is a change of all."""
    customers = Customers(postgres)
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
    table = postgres.table("customers", "id", FOLLOWED, PARTIAL)
    assert [table.get(key)[0]["city"] for key in (1, 2)] == ["Hamar", "Voss"]
    postgres.execute("TRUNCATE customers")
    assert table.get(1) == table.get(2) == []
    assert customers.rows == {}


def test_a_snapshot_as_version(postgres: Database) -> None:
    """`pg_current_snapshot()` changes with each commit, and not without one."""
    name = postgres.create("id integer, n integer", "(1, 1)")
    table = postgres.table(name, "id", PARTIAL, {"lookup.version-query": "SELECT pg_current_snapshot()::text"})
    assert table.get(1) == table.get(1) == [{"id": 1, "n": 1}]
    assert table.metrics()["missCount"] == 1
    postgres.execute(f"UPDATE {name} SET n = 2")
    assert table.get(1) == [{"id": 1, "n": 2}]


def test_since_has_the_type_of_the_version(postgres: Database) -> None:
    """It is compared without a cast; in texts and comments it is no parameter."""
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


SCAN = """
import resource, sys
from pyspark_lookup import LookupTable
url, cache = sys.argv[1:]
options = {"lookup.table": "wide", "lookup.keys": "id", "lookup.cache.dir": cache}
with LookupTable(url, options | {"lookup.cache": "FULL", "lookup.version-query": "SELECT 1", "lookup.full-cache.build-memory": "16 MiB"}) as table:
    table.get(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(table.metrics()["numCachedRecords"], before)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("count", [400_000])
def test_copies_are_streamed(database: Database, cache_dir: Path, count: int) -> None:
    """A copy of 400 MB takes less than 250 MB more memory than a copy of one row."""
    filled = {
        "postgresql": f"INSERT INTO wide SELECT i, repeat(md5(i::text), 32) FROM generate_series(1, {count}) i",
        "mariadb": f"INSERT INTO wide SELECT seq, repeat(md5(seq), 32) FROM seq_1_to_{count}",
        "duckdb": f"INSERT INTO wide SELECT i, repeat(md5(i::VARCHAR), 32) FROM range({count}) r(i)",
        "sqlite": f"INSERT INTO wide WITH RECURSIVE s(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM s WHERE i < {count}) SELECT i, hex(randomblob(512)) FROM s",
    }
    peaks = []
    for statement in ("INSERT INTO wide VALUES (1, 'x')", filled[database.scheme]):
        database.execute("DROP TABLE IF EXISTS wide")
        database.execute("CREATE TABLE wide (id INTEGER, body TEXT)")
        database.execute(statement)
        command = [sys.executable, "-c", SCAN, database.url, str(cache_dir / str(len(peaks)))]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
        assert done.returncode == 0, done.stderr
        rows, peak = map(int, done.stdout.split())
        assert rows == (1 if not peaks else count)
        peaks.append(peak)
    assert (peaks[1] - peaks[0]) * 1024 < 250e6
