"""The example providers against real databases: an SQLite file and a PostgreSQL server."""

from __future__ import annotations

import abc
import concurrent.futures
import contextlib
import dataclasses
import datetime
import itertools
import json
import multiprocessing
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from adbc_driver_postgresql import dbapi

from pyspark_lookup import LookupTable
from pyspark_lookup.base.errors import LookupFunctionError, OptionError
from tests.postgres import PostgresServer
from tests.providers.common import TEXTS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTIAL = {
    "lookup.cache": "PARTIAL",
    "lookup.partial-cache.max-rows": "10000",
    "lookup.partial-cache.expire-after-write": "1 h",
}
ONCE = {"lookup.max-retries": "0"}
MANY = 5000
_BOUND_S = 30.0  # far above what any of this takes
_numbers = itertools.count(1)

Row = dict[str, Any]


def logged(log: Path) -> Callable[..., sqlite3.Connection]:
    """`sqlite3.connect`, but for a line in a file for each statement that the connections run."""
    connect = sqlite3.connect

    def note(statement: str) -> None:
        with log.open("a") as file:
            file.write(json.dumps(statement) + "\n")

    def connected(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*args, **kwargs)
        connection.set_trace_callback(note)
        return connection

    return connected


@dataclasses.dataclass(frozen=True)
class Reference:
    """A table of a database as any process may read it. `log`: where its statements are noted, if not by a server."""

    path: str | None
    log: Path | None
    options: dict[str, str]

    def table(self, **more: str) -> LookupTable:
        return LookupTable(self.path, {**self.options, **more})

    def rows(self, keys: pa.Table) -> list[Row]:
        """What a table of its own answers."""
        with self.table() as table:
            return by_key(table.get_many(keys))

    def rows_elsewhere(self, keys: pa.Table) -> list[Row]:
        """What a process of its own is answered."""
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
            return pool.submit(_rows_here, self, keys).result(_BOUND_S)


def _rows_here(reference: Reference, keys: pa.Table) -> list[Row]:
    if reference.log is not None:
        sqlite3.connect = logged(reference.log)  # type: ignore[assignment]
    return reference.rows(keys)


class Database(abc.ABC):
    """A database with a log of what providers ask it."""

    provider: str
    path: str | None = None
    log: Path | None = None
    options: dict[str, str]

    def __init__(self, cache_dir: Path) -> None:
        self._cache_dir = cache_dir

    @abc.abstractmethod
    def execute(self, statement: str) -> None:
        """Run a statement that is not in the log."""

    @abc.abstractmethod
    def statements(self) -> list[str]:
        """What providers sent so far: one entry for each execution."""

    def made(self, columns: str, *rows: str, name: str = "") -> str:
        """A new table's name."""
        name = name or f"t{next(_numbers)}"
        quoted = '"' + name.replace('"', '""') + '"'
        self.execute(f"CREATE TABLE {quoted} ({columns})")
        if rows:
            self.execute(f"INSERT INTO {quoted} VALUES {', '.join(rows)}")
        return name

    def refer(self, table: str, keys: str, *more: dict[str, str]) -> Reference:
        options = {
            "lookup.provider": self.provider,
            "lookup.provider.table": table,
            "lookup.keys": keys,
            **self.options,
        }
        options["lookup.cache.dir"] = str(self._cache_dir)
        for added in more:
            options |= added
        return Reference(self.path, self.log, options)

    @contextlib.contextmanager
    def sends(self, count: int) -> Iterator[None]:
        """What is inside makes providers send exactly so many statements, of whatever kind."""
        before = len(self.statements())
        yield
        sent = [statement[:300] for statement in self.statements()[before:]]
        assert len(sent) == count, sent


class SqliteDatabase(Database):
    provider = "examples.sqlite_provider:provider"

    def __init__(self, directory: Path, cache_dir: Path) -> None:
        super().__init__(cache_dir)
        self.file = directory / "a b%41?#.db"
        self.path = str(self.file)
        self.log = directory / "statements"
        self.log.touch()
        self.options = {}

    def execute(self, statement: str) -> None:
        with contextlib.closing(sqlite3.Connection(self.file)) as connection, connection:
            connection.execute(statement)

    def statements(self) -> list[str]:
        assert self.log is not None
        return [json.loads(line) for line in self.log.read_text().splitlines()]


class PostgresDatabase(Database):
    provider = "examples.postgres_provider:provider"

    def __init__(self, server: PostgresServer, cache_dir: Path) -> None:
        super().__init__(cache_dir)
        self.server = server
        self.options = {"lookup.provider.uri": server.uri}

    def execute(self, statement: str) -> None:
        self.server.execute(statement)

    def statements(self) -> list[str]:
        return self.server.statements()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.close()


@pytest.fixture
def sqlite(tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> SqliteDatabase:
    database = SqliteDatabase(tmp_path, cache_dir)
    monkeypatch.setattr(sqlite3, "connect", logged(database.log))
    return database


@pytest.fixture
def postgres(postgres_server: PostgresServer, cache_dir: Path) -> Iterator[PostgresDatabase]:
    yield PostgresDatabase(postgres_server, cache_dir)
    postgres_server.start()  # whatever a test did


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest) -> Database:
    found: Database = request.getfixturevalue(request.param)
    return found


def ids(*numbers: int | None) -> pa.Table:
    return pa.table({"id": pa.array(numbers, pa.int64())})


def by_key(rows: pa.Table) -> list[Row]:
    """Rows in one order: a database promises none within a key."""
    return sorted(rows.to_pylist(), key=lambda row: (row["key_index"], repr(row)))


def people(database: Database) -> str:
    return database.made("id INTEGER, name TEXT", "(1, 'one')", "(2, 'two')", "(2, 'zwei')", "(3, NULL)")


PEOPLE = [(0, 1, "one"), (1, 2, "two"), (1, 2, "zwei"), (3, 3, None), (4, 1, "one")]
ASKED = ids(1, 2, 9, 3, 1, None)


def shown(rows: list[Row]) -> list[tuple[int, int, str | None]]:
    return [(row["key_index"], row["id"], row["name"]) for row in rows]


# --- rows --------------------------------------------------------------------------------------------


def test_rows_of_keys(database: Database) -> None:
    """Every row of a key comes, for each time that it was asked for; absent keys and null have none."""
    reference = database.refer(people(database), "id")
    assert shown(reference.rows(ASKED)) == PEOPLE
    with reference.table() as table:
        assert table.get(3) == [{"id": 3, "name": None}]
        assert table.get(9) == table.get(None) == []
        assert table.get_many(ids()).num_rows == 0


def test_sqlite_values_of_every_type(sqlite: SqliteDatabase) -> None:
    """Each declared type has its Arrow type, its limits come back, and so does null."""
    low, high, text = -(2**63), 2**63 - 1, TEXTS[-1]
    table = sqlite.made(
        "k TEXT, i integer, r REAL, t TEXT, b Blob",
        f"('low', {low}, -1.7976931348623157e308, '', x'')",
        f"('high', {high}, 5e-324, '{text}', x'00ff')",
        "('null', NULL, NULL, NULL, NULL)",
    )
    rows = sqlite.refer(table, "k").table().get_many(pa.table({"k": ["low", "high", "null"]}))
    assert rows.schema.types[:5] == [pa.string(), pa.int64(), pa.float64(), pa.string(), pa.binary()]
    assert [tuple(row.values())[:5] for row in by_key(rows)] == [
        ("low", low, -1.7976931348623157e308, "", b""),
        ("high", high, 5e-324, text, b"\x00\xff"),
        ("null", None, None, None, None),
    ]


POSTGRES = [
    ("smallint", "-32768", pa.int16(), -32768),
    ("integer", "2147483647", pa.int32(), 2**31 - 1),
    ("bigint", "-9223372036854775808", pa.int64(), -(2**63)),
    ("real", "1.5", pa.float32(), 1.5),
    ("double precision", "5e-324", pa.float64(), 5e-324),
    ("boolean", "true", pa.bool_(), True),
    ("text", "'ä€𝄞'", pa.string(), "ä€𝄞"),
    ("varchar(9)", "'v'", pa.string(), "v"),
    ("bytea", "'\\x00ff'", pa.binary(), b"\x00\xff"),
    ("date", "'2024-02-29'", pa.date32(), datetime.date(2024, 2, 29)),
    ("timestamp", "'2024-02-29 12:30:45.123456'", pa.timestamp("us"), datetime.datetime(2024, 2, 29, 12, 30, 45, 123456)),
    ("timestamptz", "'2024-02-29 12:30:45+02'", pa.timestamp("us", "UTC"), datetime.datetime(2024, 2, 29, 10, 30, 45, tzinfo=datetime.timezone.utc)),
    ("numeric(10, 2)", "1.50", pa.string(), "1.50"),
    ("char(3)", "'c'", pa.string(), "c  "),
    ("uuid", "'00010203-0405-0607-0809-0a0b0c0d0e0f'", pa.binary(), bytes(range(16))),
    ("jsonb", "'{\"a\": 1}'", pa.string(), '{"a": 1}'),
    ("integer[]", "'{1, NULL}'", pa.list_(pa.field("element", pa.int32())), [1, None]),
]  # fmt: skip
NO_KEYS = {"numeric(10, 2)", "char(3)", "uuid", "jsonb", "integer[]"}


def test_postgres_values_of_every_type(postgres: PostgresDatabase) -> None:
    """Each type has its Arrow type, values come back, and so does null."""
    declared = ", ".join(f"c{number} {kind}" for number, (kind, *_) in enumerate(POSTGRES))
    values, nulls = ", ".join(text for _, text, *_ in POSTGRES), ", ".join(["NULL"] * len(POSTGRES))
    table = postgres.made(f"id integer, {declared}", f"(1, {values})", f"(2, {nulls})")
    rows = postgres.refer(table, "id").table().get_many(ids(1, 2))
    assert rows.schema.types[1:-1] == [kind for *_, kind, _ in POSTGRES]
    full, empty = by_key(rows)
    assert list(full.values())[1:-1] == [value for *_, value in POSTGRES]
    assert list(empty.values())[1:-1] == [None] * len(POSTGRES)


@pytest.mark.parametrize("kind", [kind for kind, *_ in POSTGRES])
def test_postgres_keys_of_every_type(postgres: PostgresDatabase, kind: str) -> None:
    """A key of each type finds its row; a type whose values come as others is refused when the table is made."""
    ((_, text, arrow, value),) = (row for row in POSTGRES if row[0] == kind)
    reference = postgres.refer(postgres.made(f"k {kind}, v integer", f"({text}, 7)", "(NULL, 8)"), "k")
    if kind in NO_KEYS:
        with pytest.raises(OptionError, match=r"key column 'k' is .* make a view"):
            reference.table()
    else:
        (row,) = reference.rows(pa.table({"k": pa.array([value], arrow)}))
        assert row == {"k": value, "v": 7, "key_index": 0}


def test_sqlite_keys_of_every_type(sqlite: SqliteDatabase) -> None:
    """Integers, floats, texts and bytes find their rows; text is compared by its bytes whatever its collation."""
    table = sqlite.made(
        "i INTEGER, r REAL, t TEXT COLLATE NOCASE, b BLOB",
        "(1, 0.1, 'A', x'00')",
        "(2, 1e300, 'a', x'0000')",
        "(3, 0.0, 'b', x'')",
    )
    for name, found, lost in (("i", 2, 4), ("r", 1e300, 0.30000000000000004), ("t", "a", "B"), ("b", b"\0\0", b"\1")):
        rows = sqlite.refer(table, name).rows(pa.table({name: [found, lost]}))
        assert [(row["key_index"], row["i"]) for row in rows] == [(0, 2)]
    odd = pa.table({"r": [float("nan"), float("inf"), -0.0]})
    assert [(row["key_index"], row["i"]) for row in sqlite.refer(table, "r").rows(odd)] == [(2, 3)]


def test_composite_keys(database: Database) -> None:
    """A key of two columns finds the rows that have both, not each; they may be named in any order."""
    table = database.made("a INTEGER, b TEXT, v INTEGER", "(1, 'x', 1)", "(1, 'y', 2)", "(2, 'x', 3)", "(1, 'x', 4)")
    rows = database.refer(table, "b,a").rows(pa.table({"b": ["x", "y", "y", None], "a": [1, 1, 2, 1]}))
    assert [(row["key_index"], row["v"]) for row in rows] == [(0, 1), (0, 4), (1, 2)]


def test_text_is_never_sql(database: Database) -> None:
    """Keys, and names of tables and columns, that look like SQL are what they are."""
    name = "t\"'; DROP TABLE x; --?$1"
    quoted = [text.replace("'", "''") for text in TEXTS]
    database.made('"k ""1"" ?" TEXT, "select" INTEGER', *(f"('{t}', {n})" for n, t in enumerate(quoted)), name=name)
    reference = database.refer(name, '`k "1" ?`')
    rows = reference.rows(pa.table({'k "1" ?': [*TEXTS, *(text + "'" for text in TEXTS)]}))
    assert [(row["key_index"], row["select"]) for row in rows] == [(n, n) for n in range(len(TEXTS))]
    database.execute('DROP TABLE "' + name.replace('"', '""') + '"')


def test_only_columns_that_are_asked_for_are_fetched(database: Database) -> None:
    """`lookup.columns` reaches the statement, in any letter case."""
    table = database.made("id INTEGER, name TEXT, big TEXT", "(1, 'one', 'large')")
    assert database.refer(table, "id", {"lookup.columns": "NAME"}).rows(ids(1)) == [{"id": 1, "name": "one", "key_index": 0}]  # fmt: skip
    assert '"name"' in database.statements()[-1]
    assert '"big"' not in database.statements()[-1]


# --- statements --------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", ["a", "a,b"])
def test_many_keys_are_one_statement(database: Database, keys: str) -> None:
    """5,000 keys are one statement, whether a key has one column or two."""
    rows = [f"({number}, 'n{number}', {number})" for number in range(0, 2 * MANY, 2)]
    with database.refer(database.made("a INTEGER, b TEXT, v INTEGER", *rows), keys).table() as table:
        wanted = pa.table({"a": range(MANY), "b": [f"n{number}" for number in range(MANY)]})
        table.get_many(wanted.select(keys.split(",")).slice(0, 1))  # connects
        with database.sends(1):
            found = table.get_many(wanted.select(keys.split(",")))
    assert found["key_index"].to_pylist() == found["v"].to_pylist() == list(range(0, MANY, 2))


def test_more_keys_than_sqlite_binds_are_several_statements(sqlite: SqliteDatabase) -> None:
    """SQLite takes 32,766 bound values in a statement: more keys are more statements."""
    wanted = pa.table({"a": range(20_000), "b": [f"n{number}" for number in range(20_000)]})
    name = sqlite.made("a INTEGER, b TEXT, v INTEGER", "(0, 'n0', 1)", "(19999, 'n19999', 2)")
    with sqlite.refer(name, "a,b").table() as table:
        table.get((0, "n0"))
        with sqlite.sends(2):
            assert table.get_many(wanted)["key_index"].to_pylist() == [0, 19_999]


def test_the_count_is_of_executions(postgres: PostgresDatabase) -> None:
    """The same statement executed for each of three rows is three in the log that these tests count by."""
    rows = pa.record_batch({"k": [1, 2, 3]})
    with dbapi.connect(postgres.server.uri, autocommit=True) as connection, postgres.sends(3):
        assert connection.execute("SELECT $1 + 1", rows).fetch_arrow_table().num_rows == 3


# --- caches ------------------------------------------------------------------------------------------


def counted(table: LookupTable) -> tuple[int, int, int, int]:
    """(hits, misses, loads, failed loads) of keys, over all processes."""
    metrics = table.metrics()
    found = [metrics[name] for name in ("hitCount", "missCount", "loadCount", "numLoadFailures")]
    return found[0], found[1], found[2], found[3]


def test_a_cached_key_sends_nothing(database: Database) -> None:
    """With lookup.cache=PARTIAL a key is loaded once, absent ones too: not again by a fresh table, nor by another process."""
    reference = database.refer(people(database), "id", PARTIAL)
    with reference.table() as table:
        assert shown(by_key(table.get_many(ASKED))) == PEOPLE
        assert counted(table) == (1, 4, 4, 0)  # of 1, 2, 9, 3 and 1 again
        with database.sends(0):
            assert shown(by_key(table.get_many(ASKED))) == PEOPLE
            assert shown(reference.rows(ASKED)) == PEOPLE
        assert counted(table) == (11, 4, 4, 0)
        before = len(database.statements())
        assert shown(reference.rows_elsewhere(ASKED)) == PEOPLE
        assert [text for text in database.statements()[before:] if "keys" in text or "unnest" in text] == []
        assert counted(table) == (16, 4, 4, 0)
        with database.sends(1):
            assert table.get(7) == []


def test_a_replaced_sqlite_file_is_seen(sqlite: SqliteDatabase) -> None:
    """A file that was put in the place of the database is the database from then on."""
    with sqlite.refer(people(sqlite), "id").table() as table:
        assert table.get(1) == [{"id": 1, "name": "one"}]
        other = sqlite.file.with_name("other")
        other.write_bytes(sqlite.file.read_bytes().replace(b"one", b"new"))
        os.replace(other, sqlite.file)
        assert table.get(1) == [{"id": 1, "name": "new"}]


# --- failures ----------------------------------------------------------------------------------------


def test_mistakes_are_named(database: Database) -> None:
    """A table that is not there, or not named, is an error when the table is made."""
    people(database)
    for table, message in (("nope", "nope"), ("", r"lookup\.provider\.table")):
        with pytest.raises(OptionError, match=message):
            database.refer(table, "id").table()


def test_sqlite_mistakes_are_named(sqlite: SqliteDatabase) -> None:
    """A column of another type and a value of another type are named, and a missing file is not made."""
    with pytest.raises(OptionError, match=r"column 'b' is declared 'VARCHAR\(9\)'; known are INTEGER"):
        sqlite.refer(sqlite.made("a INTEGER, b VARCHAR(9)"), "a").table()
    with pytest.raises(LookupFunctionError, match=r"sqlite_provider:provider failed to look up key a = 1: .*'wrong'"):
        sqlite.refer(sqlite.made("a INTEGER, b INTEGER", "(1, 'wrong')"), "a", ONCE).rows(pa.table({"a": [1]}))
    missing = sqlite.file.with_name("missing")
    with pytest.raises(OptionError, match="unable to open"):
        LookupTable(str(missing), sqlite.refer("t", "id").options)
    assert not missing.exists()


def test_postgres_is_only_read(postgres: PostgresDatabase) -> None:
    """Not even a view can write."""
    postgres.execute("CREATE SEQUENCE counter")
    postgres.execute("CREATE VIEW counting AS SELECT nextval('counter') AS id")
    with pytest.raises(LookupFunctionError, match="read-only transaction"):
        postgres.refer("public.counting", "id", ONCE).rows(ids(1))


def test_postgres_restarted_between_lookups(postgres: PostgresDatabase) -> None:
    """A lookup whose connection was lost is tried again on another one, and does not fail."""
    with postgres.refer(people(postgres), "id", {"lookup.max-retries": "1"}).table() as table:
        assert table.get(1) == [{"id": 1, "name": "one"}]
        postgres.server.stop()
        postgres.server.start()
        assert shown(by_key(table.get_many(ASKED))) == PEOPLE
        assert table.metrics()["lookupRetryCount"] == 4


def test_postgres_started_during_a_lookup(postgres: PostgresDatabase) -> None:
    """A lookup without a server is tried again until there is one, as far as lookup.max-retries allows."""
    with postgres.refer(people(postgres), "id", PARTIAL, {"lookup.max-retries": "30"}).table() as table:
        assert table.get(9) == []
        postgres.server.stop()
        starting = threading.Timer(0.5, postgres.server.start)
        starting.start()
        try:
            assert table.get(1) == [{"id": 1, "name": "one"}]
        finally:
            starting.join()
        assert table.metrics()["lookupRetryCount"] > 1
        assert counted(table) == (0, 2, 2, 0)


def test_postgres_without_a_server(postgres: PostgresDatabase) -> None:
    """A lookup that no attempt helps fails, naming the provider and a key; nothing is kept of it, what was kept serves."""
    reference = postgres.refer(people(postgres), "id", PARTIAL, {"lookup.max-retries": "2"})
    with reference.table() as table:
        assert table.get(1) == [{"id": 1, "name": "one"}]
        postgres.server.stop()
        expected = r"examples\.postgres_provider:provider failed to look up key id = [29] and 1 more in 3 attempts"
        with pytest.raises(LookupFunctionError, match=expected):
            table.get_many(ids(2, 1, 9))
        assert counted(table) == (1, 3, 1, 2)
        assert table.get(1) == [{"id": 1, "name": "one"}]
        postgres.server.start()
        assert shown(by_key(table.get_many(ASKED))) == PEOPLE
        assert counted(table) == (4, 6, 4, 2)


# --- Spark -------------------------------------------------------------------------------------------


@pytest.mark.spark
def test_through_spark(spark: SparkSession, database: Database) -> None:
    """A read that says which keys it wants has their rows; what one query loaded the next ones need not."""
    before = len(database.statements())
    reference = database.refer(people(database), "id", PARTIAL, {"lookup.where": "id IN (1, 2)"})
    df = spark.read.format("lookupcache").options(**reference.options).load(database.path)
    for _ in range(2):
        assert sorted(map(tuple, df.collect())) == [(1, "one"), (2, "two"), (2, "zwei")]
    if database.log is None:  # the server has what Spark's workers sent
        assert len([text for text in database.statements()[before:] if "unnest" in text]) == 1


@pytest.mark.spark
def test_a_catalog_table(spark: SparkSession, database: Database) -> None:
    """CREATE TABLE keeps the options, and SELECT … WITH says which keys."""
    reference = database.refer(people(database), "id")
    given = {**({} if database.path is None else {"path": database.path}), **reference.options}
    options = ", ".join(f"`{key}` '{value}'" for key, value in given.items())
    spark.sql(f"CREATE TABLE provided USING lookupcache OPTIONS ({options})")
    try:
        rows = spark.sql("SELECT name FROM provided WITH (`lookup.where` = 'id = 2') ORDER BY name").collect()
        assert [row.name for row in rows] == ["two", "zwei"]
    finally:
        spark.sql("DROP TABLE provided")
