"""The example providers: an SQLite file, and a PostgreSQL server."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import importlib
import itertools
import operator
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from pyspark_lookup import LookupTable
from pyspark_lookup.errors import LookupFunctionError, OptionError
from pyspark_lookup.sources.providers.functions import LookupContext
from tests.support.lookup_functions import TEXTS, counted, ids
from tests.support.postgres import PostgresServer
from tests.support.sparks import DATA_SOURCES, needs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Options = dict[str, str]
PARTIAL = {"lookup.cache": "PARTIAL", "lookup.partial-cache.expire-after-write": "1 h"}
ONCE = {"lookup.max-retries": "0"}
SQLITE_FILE = "a b%41?#.db"
NUMBERS = itertools.count()  # of tables, in databases that several tests use
PEOPLE = pa.table({"id": [1, 2, 2, 3], "name": ["one", "two", "zwei", None], "n": [10, 20, 21, 30]})
REQUESTED = ids(1, 2, 9, 3, 1, None)
ANSWER = [(0, 1, "one", 10), (1, 2, "two", 20), (1, 2, "zwei", 21), (3, 3, None, 30), (4, 1, "one", 10)]


def shown(rows: pa.Table) -> list[tuple[int, int, str | None, int]]:
    """Rows of people in one order: within a key there is none."""
    found = [(row["key_index"], row["id"], row["name"], row["n"]) for row in rows.to_pylist()]
    return sorted(found, key=repr)


def literal(value: object) -> str:
    text = "'" + str(value).replace("'", "''") + "'"
    return "NULL" if value is None else str(value) if isinstance(value, int) else text


@dataclasses.dataclass
class Database:
    """A database, how statements are executed in it, those that providers have sent, and how users refer to a table."""

    module: str
    execute: Callable[[str], object]
    statements: Callable[[], list[str]]
    refer: Callable[[str], tuple[str | None, Options]]
    cache_dir: Path
    tables: list[LookupTable] = dataclasses.field(default_factory=list)

    def named(self, name: str, keys: str, *more: Options) -> tuple[str | None, Options]:
        """The path and the options of a lookup in a table."""
        path, options = self.refer(name)
        ours = {"lookup.provider": f"{self.module}:provider", "lookup.cache.dir": str(self.cache_dir)}
        return path, functools.reduce(operator.or_, more, {**options, **ours, "lookup.keys": keys})

    def table(self, name: str, keys: str, *more: Options) -> LookupTable:
        self.tables.append(LookupTable(*self.named(name, keys, *more)))
        return self.tables[-1]

    def create(self, columns: str, *rows: str, name: str = "t") -> str:
        """A new table's name."""
        name += str(next(NUMBERS))
        self.execute(f"CREATE TABLE {quoted(name)} ({columns})")
        if rows:
            self.execute(f"INSERT INTO {quoted(name)} VALUES {', '.join(rows)}")
        return name

    def create_of(self, rows: pa.Table, name: str = "t") -> str:
        """The name of a new table of these rows."""
        kinds = {pa.int64(): "INTEGER", pa.string(): "TEXT"}
        columns = ", ".join(f"{quoted(field.name)} {kinds[field.type]}" for field in rows.schema)
        values = zip(*(column.to_pylist() for column in rows.columns), strict=True)
        return self.create(columns, *(f"({', '.join(map(literal, row))})" for row in values), name=name)


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    with contextlib.closing(PostgresServer()) as server:
        yield server


@pytest.fixture
def sqlite(tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    file, sent, connect = tmp_path / SQLITE_FILE, list[str](), sqlite3.connect

    def connected(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*args, **kwargs)
        connection.set_trace_callback(sent.append)
        return connection

    def execute(statement: str) -> None:
        with contextlib.closing(sqlite3.Connection(file)) as connection, connection:
            connection.execute(statement)

    def refer(name: str) -> tuple[str, Options]:
        return str(file), {"lookup.provider.table": name}

    monkeypatch.setattr(sqlite3, "connect", connected)
    database = Database("examples.sqlite_provider", execute, lambda: sent, refer, cache_dir)
    yield database
    for table in database.tables:
        table.close()


@pytest.fixture
def postgres(postgres_server: PostgresServer, cache_dir: Path) -> Iterator[Database]:
    def refer(name: str) -> tuple[None, Options]:
        return None, {"lookup.provider.uri": postgres_server.uri, "lookup.provider.table": name}

    module, execute, statements = "examples.postgres_provider", postgres_server.execute, postgres_server.statements
    database = Database(module, execute, statements, refer, cache_dir)
    yield database
    for table in database.tables:
        table.close()
    postgres_server.start()  # whatever a test did


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("cache", [{}, PARTIAL], ids=["NONE", "PARTIAL"])
def test_rows_of_keys(database: Database, cache: Options) -> None:
    """Every row of a key comes, for each time that it was asked for; absent keys and null have none. A cache asks for each once."""
    name = database.create_of(PEOPLE)
    table = database.table(name, "id", cache)
    for again in range(2):
        assert shown(table.get_many(REQUESTED)) == ANSWER
        assert counted(table) == ({"hitCount": 1 + 5 * again, "missCount": 4, "loadCount": 4} if cache else {})
    assert table.get(9) == table.get(None) == []
    assert table.get_many(ids()).num_rows == 0


def test_composite_keys(database: Database) -> None:
    """A key of two columns finds the rows that have both, not one of each; they may be named in any order."""
    name = database.create_of(pa.table({"a": [1, 1, 2, 1], "b": ["x", "y", "x", "x"], "v": [1, 2, 3, 4]}))
    found = database.table(name, "b,a").get_many(pa.table({"b": ["x", "y", "y", None], "a": [1, 1, 2, 1]}))
    assert sorted((row["key_index"], row["v"]) for row in found.to_pylist()) == [(0, 1), (0, 4), (1, 2)]


def test_text_is_never_sql(database: Database) -> None:
    """Keys, and names of tables and columns, that look like SQL are what they are."""
    texts = [*TEXTS, "x" * 5000]
    name = database.create_of(pa.table({'k "1" ?': texts, "Select": range(len(texts))}), "t\"'; DROP TABLE x; --?$1")
    asked = pa.table({'k "1" ?': [*texts, *(text + "'" for text in texts)]})
    found = database.table(name, '`k "1" ?`').get_many(asked).to_pylist()
    assert [(row["key_index"], row["Select"]) for row in found] == [(n, n) for n in range(len(texts))]


def test_only_columns_that_are_asked_for_are_fetched(database: Database) -> None:
    """`lookup.columns` reaches the statement, in any letter case."""
    name = database.create_of(PEOPLE)
    assert database.table(name, "id", {"lookup.columns": "NAME"}).get(1) == [{"id": 1, "name": "one"}]
    path, options = database.refer(name)
    context = LookupContext(
        ("id",), ("name",), {key.removeprefix("lookup.provider."): options[key] for key in options}, path
    )
    provider = importlib.import_module(database.module).provider(context)
    assert provider.function.lookup(ids(1)).column_names == ["id", "name"]
    assert '"name"' in database.statements()[-1]
    assert '"n"' not in database.statements()[-1]


POSTGRES = [
    ("integer", "2147483647", pa.int32(), 2**31 - 1),
    ("bigint", "-9223372036854775808", pa.int64(), -(2**63)),
    ("double precision", "5e-324", pa.float64(), 5e-324),
    ("text", "'ä€𝄞'", pa.string(), "ä€𝄞"),
    ("bytea", "'\\x00ff'", pa.binary(), b"\x00\xff"),
    ("timestamp", "'2024-02-29 12:30:45.123456'", pa.timestamp("us"), datetime.datetime(2024, 2, 29, 12, 30, 45, 123456)),
    ("timestamptz", "'2024-02-29 12:30:45+02'", pa.timestamp("us", "UTC"), datetime.datetime(2024, 2, 29, 10, 30, 45, tzinfo=datetime.timezone.utc)),
    ("numeric(10, 2)", "1.50", pa.string(), "1.50"),
    ("jsonb", "'{\"a\": 1}'", pa.string(), '{"a": 1}'),
    ("integer[]", "'{1, NULL}'", pa.list_(pa.field("element", pa.int32())), [1, None]),
]  # fmt: skip
NO_KEYS = {"numeric(10, 2)", "jsonb", "integer[]"}


def test_postgres_values_and_keys_of_every_type(postgres: Database) -> None:
    """Each type has its Arrow type, values and nulls come back, a key finds its row; types whose values come as others are not keys."""
    declared = ", ".join(f"c{number} {kind}" for number, (kind, *_) in enumerate(POSTGRES))
    values, nulls = ", ".join(text for _, text, *_ in POSTGRES), ", ".join(["NULL"] * len(POSTGRES))
    table = postgres.create(f"id integer, {declared}", f"(1, {values})", f"(2, {nulls})")
    rows = postgres.table(table, "id").get_many(ids(1, 2))
    assert rows.schema.types[1:-1] == [kind for *_, kind, _ in POSTGRES]
    full, empty = rows.to_pylist()
    assert list(full.values())[1:-1] == [value for *_, value in POSTGRES]
    assert list(empty.values())[1:-1] == [None] * len(POSTGRES)
    for number, (kind, _, arrow, value) in enumerate(POSTGRES):
        if kind in NO_KEYS:
            with pytest.raises(OptionError, match=rf"key column 'c{number}' is .* make a view"):
                postgres.table(table, f"c{number}")
        else:
            found = postgres.table(table, f"c{number}").get_many(pa.table({f"c{number}": pa.array([value], arrow)}))
            assert found["id"].to_pylist() == [1]


def test_sqlite_values(sqlite: Database) -> None:
    """Limits and null come back; text is found by its bytes in any collation; a value of another type than declared is named."""
    low, high = -(2**63), 2**63 - 1
    columns = "i INTEGER, r REAL, t TEXT COLLATE NOCASE, b BLOB"
    name = sqlite.create(columns, f"({low}, 5e-324, 'a', x'00ff')", f"({high}, 0, 'A', x'')", "('wrong', 0, 'c', x'')")
    table = sqlite.table(name, "t", ONCE)
    assert table.get("a") == [{"i": low, "r": 5e-324, "t": "a", "b": b"\0\xff"}]
    assert table.get("A") == [{"i": high, "r": 0.0, "t": "A", "b": b""}]
    with pytest.raises(LookupFunctionError, match=r"sqlite_provider:provider failed to look up key t = 'c': .*'wrong'"):
        table.get("c")
    with pytest.raises(OptionError, match=r"column 'b' is declared 'VARCHAR\(9\)'; known are INTEGER"):
        sqlite.table(sqlite.create("a INTEGER, b VARCHAR(9)"), "a")


def test_a_replaced_sqlite_file_is_seen(sqlite: Database, tmp_path: Path) -> None:
    """A file that was put in the place of the database is the database from then on."""
    table = sqlite.table(sqlite.create_of(PEOPLE), "id")
    assert table.get(1)[0]["name"] == "one"
    other = tmp_path / "other"
    other.write_bytes((tmp_path / SQLITE_FILE).read_bytes().replace(b"one", b"new"))
    other.replace(tmp_path / SQLITE_FILE)
    assert table.get(1)[0]["name"] == "new"


def test_postgres_is_only_read(postgres: Database) -> None:
    """Not even a view can write."""
    postgres.execute("CREATE SEQUENCE counter")
    postgres.execute("CREATE VIEW counting AS SELECT nextval('counter') AS id")
    with pytest.raises(LookupFunctionError, match="read-only transaction"):
        postgres.table("public.counting", "id", ONCE).get(1)


def test_postgres_without_a_server(postgres: Database, postgres_server: PostgresServer) -> None:
    """Lookups without a server are tried again as often as allowed, and served by one that comes back; what fails leaves nothing."""

    def opened(retries: int, cache: Options) -> LookupTable:
        table = postgres.table(postgres.create_of(PEOPLE), "id", cache, {"lookup.max-retries": str(retries)})
        assert table.get(1)[0]["name"] == "one"
        return table

    failing, later = opened(2, PARTIAL), opened(1, {})
    postgres_server.stop()
    expected = r"examples\.postgres_provider:provider failed to look up key id = [29] and 1 more in 3 attempts"
    with pytest.raises(LookupFunctionError, match=expected):
        failing.get_many(ids(2, 1, 9))
    assert counted(failing) == {"hitCount": 1, "missCount": 3, "loadCount": 1, "numLoadFailures": 2}
    assert failing.get(1)[0]["name"] == "one"
    postgres_server.start()
    assert shown(later.get_many(REQUESTED)) == ANSWER  # its connection was lost
    assert later.metrics()["lookupRetryCount"] == 4
    assert shown(failing.get_many(REQUESTED)) == ANSWER
    assert counted(failing) == {"hitCount": 4, "missCount": 6, "loadCount": 4, "numLoadFailures": 2}


@needs(DATA_SOURCES)
@pytest.mark.spark
def test_through_spark(spark: SparkSession, database: Database) -> None:
    """A read, or a SELECT from a catalog's table, that says which keys it wants has their rows; a later query loads none again."""
    before = len(database.statements())
    path, options = database.named(database.create_of(PEOPLE), "id", PARTIAL)
    options |= {"path": path} if path else {}
    df = spark.read.format("lookupcache").options(**options).option("lookup.where", "id IN (1, 2)").load()
    for _ in range(2):
        assert sorted(map(tuple, df.collect())) == [(1, "one", 10), (2, "two", 20), (2, "zwei", 21)]
    given = ", ".join(f"`{key}` '{value}'" for key, value in options.items())
    spark.sql(f"CREATE TABLE provided USING lookupcache OPTIONS ({given})")
    try:
        rows = spark.sql("SELECT name FROM provided WITH (`lookup.where` = 'id = 2') ORDER BY name").collect()
        assert [row.name for row in rows] == ["two", "zwei"]
    finally:
        spark.sql("DROP TABLE provided")
    if "postgres" in database.module:  # the server has what Spark's workers sent
        assert len([text for text in database.statements()[before:] if "unnest" in text]) == 1
