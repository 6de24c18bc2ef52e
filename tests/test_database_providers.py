"""The example providers against real databases: an SQLite file and a PostgreSQL server."""

from __future__ import annotations

import concurrent.futures
import contextlib
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

from pyspark_lookup import LookupTable
from pyspark_lookup.base.errors import LookupFunctionError, OptionError
from tests.postgres import PostgresServer
from tests.providers.common import TEXTS, ids

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTIAL = {"cache": "PARTIAL", "partial_cache.max_rows": 10_000, "partial_cache.expire_after_write": "1 h"}
ONCE = {"max_retries": 0}
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


def by_key(rows: pa.Table) -> list[Row]:
    """Rows in one order: a database promises none within a key."""
    return sorted(rows.to_pylist(), key=lambda row: (row["key_index"], repr(row)))


def rows_of(options: dict[str, str], keys: pa.Table, log: Path | None = None) -> list[Row]:
    """What a table of its own answers. `log`: where the statements of SQLite in a new process are noted."""
    if log is not None:
        sqlite3.connect = logged(log)  # type: ignore[assignment]
    with LookupTable(None, options) as table:
        return by_key(table.get_many(keys))


class Database:
    """A database with a log of what providers ask it. Statements that are executed here are not in it."""

    provider: str
    log: Path | None = None
    execute: Callable[[str], None]
    statements: Callable[[], list[str]]  # that providers sent so far: one entry for each execution

    def __init__(self, cache_dir: Path) -> None:
        self.options = {"lookup.provider": self.provider, "lookup.cache.dir": str(cache_dir)}

    def made(self, columns: str, *rows: str, name: str = "") -> str:
        """A new table's name."""
        name = name or f"t{next(_numbers)}"
        quoted = '"' + name.replace('"', '""') + '"'
        self.execute(f"CREATE TABLE {quoted} ({columns})")
        if rows:
            self.execute(f"INSERT INTO {quoted} VALUES {', '.join(rows)}")
        return name

    def people(self) -> str:
        return self.made("id INTEGER, name TEXT", "(1, 'one')", "(2, 'two')", "(2, 'zwei')", "(3, NULL)")

    def refer(self, table: str, keys: str, **more: str | int) -> dict[str, str]:
        """The options of a lookup in a table."""
        named = {f"lookup.{key.replace('_', '-')}": str(value) for key, value in more.items()}
        return {**self.options, "lookup.provider.table": table, "lookup.keys": keys, **named}

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
        self.log = directory / "statements"
        self.log.touch()
        self.options["path"] = str(self.file)

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
        self.execute, self.statements = server.execute, server.statements
        self.options["lookup.provider.uri"] = server.uri


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


PEOPLE = [(0, 1, "one"), (1, 2, "two"), (1, 2, "zwei"), (3, 3, None), (4, 1, "one")]
ASKED = ids(1, 2, 9, 3, 1, None)


def shown(rows: list[Row]) -> list[tuple[int, int, str | None]]:
    return [(row["key_index"], row["id"], row["name"]) for row in rows]


# --- rows --------------------------------------------------------------------------------------------


def test_rows_of_keys(database: Database) -> None:
    """Every row of a key comes, for each time that it was asked for; absent keys and null have none."""
    with LookupTable(None, database.refer(database.people(), "id")) as table:
        assert shown(by_key(table.get_many(ASKED))) == PEOPLE
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
    rows = LookupTable(None, sqlite.refer(table, "k")).get_many(pa.table({"k": ["low", "high", "null"]}))
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
    rows = LookupTable(None, postgres.refer(table, "id")).get_many(ids(1, 2))
    assert rows.schema.types[1:-1] == [kind for *_, kind, _ in POSTGRES]
    full, empty = by_key(rows)
    assert list(full.values())[1:-1] == [value for *_, value in POSTGRES]
    assert list(empty.values())[1:-1] == [None] * len(POSTGRES)


def test_postgres_keys_of_every_type(postgres: PostgresDatabase) -> None:
    """A key of each type finds its row; a type whose values come as others is refused when the table is made."""
    for kind, text, arrow, value in POSTGRES:
        options = postgres.refer(postgres.made(f"k {kind}, v integer", f"({text}, 7)", "(NULL, 8)"), "k")
        if kind in NO_KEYS:
            with pytest.raises(OptionError, match=r"key column 'k' is .* make a view"):
                LookupTable(None, options)
        else:
            rows = rows_of(options, pa.table({"k": pa.array([value], arrow)}))
            assert rows == [{"k": value, "v": 7, "key_index": 0}]


def test_sqlite_keys_of_every_type(sqlite: SqliteDatabase) -> None:
    """Integers, floats, texts and bytes find their rows; text is compared by its bytes whatever its collation."""
    columns = "i INTEGER, r REAL, t TEXT COLLATE NOCASE, b BLOB"
    table = sqlite.made(columns, "(1, 0.1, 'A', x'00')", "(2, 1e300, 'a', x'0000')", "(3, 0.0, 'b', x'')")
    for name, found, lost in (("i", 2, 4), ("r", 1e300, 0.30000000000000004), ("t", "a", "B"), ("b", b"\0\0", b"\1")):
        rows = rows_of(sqlite.refer(table, name), pa.table({name: [found, lost]}))
        assert [(row["key_index"], row["i"]) for row in rows] == [(0, 2)]
    odd = pa.table({"r": [float("nan"), float("inf"), -0.0]})
    assert [(row["key_index"], row["i"]) for row in rows_of(sqlite.refer(table, "r"), odd)] == [(2, 3)]


def test_composite_keys(database: Database) -> None:
    """A key of two columns finds the rows that have both, not each; they may be named in any order."""
    table = database.made("a INTEGER, b TEXT, v INTEGER", "(1, 'x', 1)", "(1, 'y', 2)", "(2, 'x', 3)", "(1, 'x', 4)")
    rows = rows_of(database.refer(table, "b,a"), pa.table({"b": ["x", "y", "y", None], "a": [1, 1, 2, 1]}))
    assert [(row["key_index"], row["v"]) for row in rows] == [(0, 1), (0, 4), (1, 2)]


def test_text_is_never_sql(database: Database) -> None:
    """Keys, and names of tables and columns, that look like SQL are what they are."""
    name = "t\"'; DROP TABLE x; --?$1"
    quoted = [text.replace("'", "''") for text in TEXTS]
    database.made('"k ""1"" ?" TEXT, "select" INTEGER', *(f"('{t}', {n})" for n, t in enumerate(quoted)), name=name)
    asked = pa.table({'k "1" ?': [*TEXTS, *(text + "'" for text in TEXTS)]})
    rows = rows_of(database.refer(name, '`k "1" ?`'), asked)
    assert [(row["key_index"], row["select"]) for row in rows] == [(n, n) for n in range(len(TEXTS))]
    database.execute('DROP TABLE "' + name.replace('"', '""') + '"')


def test_only_columns_that_are_asked_for_are_fetched(database: Database) -> None:
    """`lookup.columns` reaches the statement, in any letter case."""
    table = database.made("id INTEGER, name TEXT, big TEXT", "(1, 'one', 'large')")
    rows = rows_of(database.refer(table, "id", columns="NAME"), ids(1))
    assert rows == [{"id": 1, "name": "one", "key_index": 0}]
    assert '"name"' in database.statements()[-1]
    assert '"big"' not in database.statements()[-1]


# --- statements --------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", ["a", "a,b"])
def test_many_keys_are_one_statement(database: Database, keys: str) -> None:
    """5,000 keys are one statement, whether a key has one column or two."""
    rows = [f"({number}, 'n{number}', {number})" for number in range(0, 2 * MANY, 2)]
    wanted = pa.table({"a": range(MANY), "b": [f"n{number}" for number in range(MANY)]}).select(keys.split(","))
    with LookupTable(None, database.refer(database.made("a INTEGER, b TEXT, v INTEGER", *rows), keys)) as table:
        table.get_many(wanted.slice(0, 1))  # connects
        with database.sends(1):
            found = table.get_many(wanted)
    assert found["key_index"].to_pylist() == found["v"].to_pylist() == list(range(0, MANY, 2))


def test_more_keys_than_sqlite_binds_are_several_statements(sqlite: SqliteDatabase) -> None:
    """SQLite takes 32,766 bound values in a statement: more keys are more statements."""
    wanted = pa.table({"a": range(20_000), "b": [f"n{number}" for number in range(20_000)]})
    name = sqlite.made("a INTEGER, b TEXT, v INTEGER", "(0, 'n0', 1)", "(19999, 'n19999', 2)")
    with LookupTable(None, sqlite.refer(name, "a,b")) as table:
        table.get((0, "n0"))
        with sqlite.sends(2):
            assert table.get_many(wanted)["key_index"].to_pylist() == [0, 19_999]


# --- caches ------------------------------------------------------------------------------------------


def counted(table: LookupTable) -> tuple[int, int, int, int]:
    """(hits, misses, loads, failed loads) of keys, over all processes."""
    metrics = table.metrics()
    found = [metrics[name] for name in ("hitCount", "missCount", "loadCount", "numLoadFailures")]
    return found[0], found[1], found[2], found[3]


def test_a_cached_key_sends_nothing(database: Database) -> None:
    """With lookup.cache=PARTIAL a key is loaded once, absent ones too: not again by a fresh table, nor by another process."""
    options = database.refer(database.people(), "id", **PARTIAL)
    with LookupTable(None, options) as table:
        assert shown(by_key(table.get_many(ASKED))) == PEOPLE
        assert counted(table) == (1, 4, 4, 0)  # of 1, 2, 9, 3 and 1 again
        with database.sends(0):
            assert shown(by_key(table.get_many(ASKED))) == PEOPLE
            assert shown(rows_of(options, ASKED)) == PEOPLE
        assert counted(table) == (11, 4, 4, 0)
        before = len(database.statements())
        with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            assert shown(pool.submit(rows_of, options, ASKED, database.log).result(_BOUND_S)) == PEOPLE
        assert [text for text in database.statements()[before:] if "keys" in text or "unnest" in text] == []
        assert counted(table) == (16, 4, 4, 0)
        with database.sends(1):
            assert table.get(7) == []


def test_a_replaced_sqlite_file_is_seen(sqlite: SqliteDatabase) -> None:
    """A file that was put in the place of the database is the database from then on."""
    with LookupTable(None, sqlite.refer(sqlite.people(), "id")) as table:
        assert table.get(1) == [{"id": 1, "name": "one"}]
        other = sqlite.file.with_name("other")
        other.write_bytes(sqlite.file.read_bytes().replace(b"one", b"new"))
        os.replace(other, sqlite.file)
        assert table.get(1) == [{"id": 1, "name": "new"}]


# --- failures ----------------------------------------------------------------------------------------


def test_mistakes_are_named(database: Database) -> None:
    """A table that is not there, or not named, is an error when the table is made."""
    database.people()
    for table, message in (("nope", "nope"), ("", r"lookup\.provider\.table")):
        with pytest.raises(OptionError, match=message):
            LookupTable(None, database.refer(table, "id"))


def test_sqlite_mistakes_are_named(sqlite: SqliteDatabase) -> None:
    """A column of another type and a value of another type are named, and a missing file is not made."""
    with pytest.raises(OptionError, match=r"column 'b' is declared 'VARCHAR\(9\)'; known are INTEGER"):
        LookupTable(None, sqlite.refer(sqlite.made("a INTEGER, b VARCHAR(9)"), "a"))
    table = sqlite.made("id INTEGER, b INTEGER", "(1, 'wrong')")
    with pytest.raises(LookupFunctionError, match=r"sqlite_provider:provider failed to look up key id = 1: .*'wrong'"):
        rows_of(sqlite.refer(table, "id", **ONCE), ids(1))
    missing = sqlite.file.with_name("missing")
    with pytest.raises(OptionError, match="unable to open"):
        LookupTable(None, {**sqlite.refer("t", "id"), "path": str(missing)})
    assert not missing.exists()


def test_postgres_is_only_read(postgres: PostgresDatabase) -> None:
    """Not even a view can write."""
    postgres.execute("CREATE SEQUENCE counter")
    postgres.execute("CREATE VIEW counting AS SELECT nextval('counter') AS id")
    with pytest.raises(LookupFunctionError, match="read-only transaction"):
        rows_of(postgres.refer("public.counting", "id", **ONCE), ids(1))


def test_postgres_without_a_server(postgres: PostgresDatabase) -> None:
    """Lookups without a server are tried again as far as lookup.max-retries allows, and served by one that comes back.

    What no attempt helps fails, naming the provider and a key; nothing is kept of it, what was kept serves.
    """

    def opened(**more: str | int) -> LookupTable:
        table = LookupTable(None, postgres.refer(postgres.people(), "id", **more))
        assert table.get(1) == [{"id": 1, "name": "one"}]
        return table

    with opened(**PARTIAL, max_retries=2) as failing, opened(**PARTIAL, max_retries=30) as waiting, opened(max_retries=1) as later:  # fmt: skip
        postgres.server.stop()
        expected = r"examples\.postgres_provider:provider failed to look up key id = [29] and 1 more in 3 attempts"
        with pytest.raises(LookupFunctionError, match=expected):
            failing.get_many(ids(2, 1, 9))
        assert counted(failing) == (1, 3, 1, 2)
        assert failing.get(1) == [{"id": 1, "name": "one"}]
        starting = threading.Timer(0.5, postgres.server.start)
        starting.start()
        try:
            assert waiting.get(3) == [{"id": 3, "name": None}]
        finally:
            starting.join()
        assert waiting.metrics()["lookupRetryCount"] > 1
        assert counted(waiting) == (0, 2, 2, 0)
        assert shown(by_key(later.get_many(ASKED))) == PEOPLE  # its connection was lost
        assert later.metrics()["lookupRetryCount"] == 4
        assert shown(by_key(failing.get_many(ASKED))) == PEOPLE
        assert counted(failing) == (4, 6, 4, 2)


# --- Spark -------------------------------------------------------------------------------------------


@pytest.mark.spark
def test_through_spark(spark: SparkSession, database: Database) -> None:
    """A read, or a SELECT from a catalog's table, that says which keys it wants has their rows; a later query loads none again."""
    before = len(database.statements())
    options = database.refer(database.people(), "id", **PARTIAL)
    df = spark.read.format("lookupcache").options(**options).option("lookup.where", "id IN (1, 2)").load()
    for _ in range(2):
        assert sorted(map(tuple, df.collect())) == [(1, "one"), (2, "two"), (2, "zwei")]
    given = ", ".join(f"`{key}` '{value}'" for key, value in options.items())
    spark.sql(f"CREATE TABLE provided USING lookupcache OPTIONS ({given})")
    try:
        rows = spark.sql("SELECT name FROM provided WITH (`lookup.where` = 'id = 2') ORDER BY name").collect()
        assert [row.name for row in rows] == ["two", "zwei"]
    finally:
        spark.sql("DROP TABLE provided")
    if database.log is None:  # the server has what Spark's workers sent
        assert len([text for text in database.statements()[before:] if "unnest" in text]) == 1
