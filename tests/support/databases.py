"""Databases of tests: files of SQLite and DuckDB, servers of PostgreSQL and MariaDB, and the tables that a test opens there."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
import re
import sqlite3
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from pyspark_lookup import LookupTable
from tests.support.mariadb import MariadbServer
from tests.support.postgres import PostgresServer

Options = dict[str, str]
NUMBERS = itertools.count()  # of tables, in databases that several tests use
_PAGE = (Path(__file__).parents[2] / "docs" / "databases.md").read_text(encoding="utf-8")
_HEADINGS = {"postgresql": "PostgreSQL", "mariadb": "MySQL and MariaDB", "sqlite": "SQLite", "duckdb": "DuckDB"}
VERSION, CHANGES = re.findall(r"-- lookup\.[a-z-]+-query\n((?:(?!--|```).*\n)+)", _PAGE)[:2]
"""The two queries of the recipes for a table `customers`."""


def recipe(scheme: str) -> str:
    """The first block of SQL below the heading of a kind of database in docs/databases.md."""
    below = _PAGE.partition(f"\n### {_HEADINGS[scheme]}\n")[2]
    return re.findall(r"```sql\n(.*?)```", below, re.DOTALL)[0]


def literal(value: object) -> str:
    text = "'" + str(value).replace("'", "''") + "'"
    return "NULL" if value is None else str(value) if isinstance(value, int) else text


@dataclasses.dataclass
class Database:
    """A database: its URL, how statements are executed in it, and those that lookups have sent."""

    url: str
    execute: Callable[[str], object]
    statements: Callable[[], list[str]]
    cache_dir: Path
    mark: str = '"'
    server: PostgresServer | MariadbServer | None = None
    tables: list[LookupTable] = dataclasses.field(default_factory=list)

    @property
    def scheme(self) -> str:
        return self.url.partition("://")[0]

    def quoted(self, name: str) -> str:
        return self.mark + name.replace(self.mark, self.mark * 2) + self.mark

    def named(self, name: str, keys: str, *more: Options) -> Options:
        """The options of a lookup in a table."""
        options = {"lookup.cache.dir": str(self.cache_dir), "lookup.table": self.quoted(name), "lookup.keys": keys}
        return functools.reduce(operator.or_, more, options)

    def transaction(self, statements: Sequence[str]) -> None:
        """Run statements in one transaction; the last one ends it."""
        if self.scheme in ("postgresql", "duckdb"):
            self.execute("; ".join(["BEGIN", *statements]))
        elif self.scheme == "mariadb":
            for statement in ["BEGIN", *statements]:
                self.execute(statement)
        else:
            with contextlib.closing(
                sqlite3.Connection(urllib.parse.unquote(self.url.removeprefix("sqlite:///")), isolation_level=None)
            ) as connection:
                for statement in ["BEGIN", *statements]:
                    connection.execute(statement)

    def script(self, text: str) -> None:
        """Run statements, each of which begins at the start of a line."""
        if self.scheme == "postgresql":
            self.execute(text)
        else:
            for statement in re.split(r";\n(?!\s|END)", text.strip().removesuffix(";")):
                self.execute(statement)

    def table(self, name: str, keys: str, *more: Options) -> LookupTable:
        self.tables.append(LookupTable(self.url, self.named(name, keys, *more)))
        return self.tables[-1]

    def query(self, sql: str, keys: str, *more: Options) -> LookupTable:
        options = {"lookup.cache.dir": str(self.cache_dir), "lookup.query": sql, "lookup.keys": keys}
        self.tables.append(LookupTable(self.url, functools.reduce(operator.or_, more, options)))
        return self.tables[-1]

    def create(self, columns: str, *rows: str, name: str = "t") -> str:
        """A new table's name."""
        name += str(next(NUMBERS))
        self.execute(f"CREATE TABLE {self.quoted(name)} ({columns})")
        if rows:
            self.execute(f"INSERT INTO {self.quoted(name)} VALUES {', '.join(rows)}")
        return name

    def create_table(self, rows: pa.Table, name: str = "t") -> str:
        """The name of a new table of these rows."""
        kinds = {pa.int64(): "INTEGER", pa.string(): "TEXT"}
        columns = ", ".join(f"{self.quoted(field.name)} {kinds[field.type]}" for field in rows.schema)
        escaped = (lambda value: literal(value).replace("\\", "\\\\")) if self.mark == "`" else literal
        values = zip(*(column.to_pylist() for column in rows.columns), strict=True)
        return self.create(columns, *(f"({', '.join(map(escaped, row))})" for row in values), name=name)


def lent(database: Database) -> Iterator[Database]:
    """The database, for one test."""
    yield database
    for table in database.tables:
        table.close()
    if database.server is not None:
        database.server.start()  # whatever a test did
