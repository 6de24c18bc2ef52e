"""The databases that tests look things up in. A server serves all tests of a process."""

from __future__ import annotations

import contextlib
import sqlite3
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.support.databases import Database, lent
from tests.support.mariadb import MariadbServer
from tests.support.postgres import PostgresServer
from tests.support.redis_server import RedisServer


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    with contextlib.closing(PostgresServer()) as server:
        yield server


@pytest.fixture(scope="session")
def mariadb_server() -> Iterator[MariadbServer]:
    with contextlib.closing(MariadbServer()) as server:
        yield server


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with contextlib.closing(RedisServer()) as server:
        yield server


@pytest.fixture
def sqlite(tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    file, statements, connect = tmp_path / "a b%41?#.db", list[str](), sqlite3.connect

    def connect_and_trace(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*args, **kwargs)
        connection.set_trace_callback(statements.append)
        return connection

    def execute(statement: str) -> None:
        with contextlib.closing(sqlite3.Connection(file)) as connection, connection:
            connection.execute(statement)

    monkeypatch.setattr(sqlite3, "connect", connect_and_trace)
    yield from lent(Database(f"sqlite:///{urllib.parse.quote(str(file))}", execute, lambda: statements, cache_dir))


@pytest.fixture
def duckdb_file(tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    file, statements, connect = tmp_path / "a b%41?#.duckdb", list[str](), duckdb.connect

    class Traced:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._connection = connect(*args, **kwargs)

        def cursor(self) -> Any:
            traced = object.__new__(Traced)
            traced._connection = self._connection.cursor()
            return traced

        def register(self, name: str, rows: Any) -> None:
            statements.append(f"REGISTER {rows.column(0).to_pylist()}")
            self._connection.register(name, rows)

        def sql(self, statement: str, **kwargs: Any) -> Any:
            statements.append(statement)
            return self._connection.sql(statement, **kwargs)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._connection, name)

    def execute(statement: str) -> None:
        with contextlib.closing(connect(str(file))) as connection:
            connection.execute(statement)

    monkeypatch.setattr(duckdb, "connect", Traced)
    yield from lent(Database(f"duckdb:///{urllib.parse.quote(str(file))}", execute, lambda: statements, cache_dir))


@pytest.fixture
def postgres(postgres_server: PostgresServer, cache_dir: Path) -> Iterator[Database]:
    server = postgres_server
    yield from lent(Database(server.uri, server.execute, server.statements, cache_dir, server=server))


@pytest.fixture
def mariadb(mariadb_server: MariadbServer, cache_dir: Path) -> Iterator[Database]:
    server = mariadb_server
    yield from lent(Database(server.url, server.execute, server.statements, cache_dir, "`", server))


@pytest.fixture(params=["sqlite", "duckdb_file", "postgres", "mariadb"])
def database(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["postgres", "mariadb"])
def served(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)
