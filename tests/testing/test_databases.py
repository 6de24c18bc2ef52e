"""Tables of databases keep the rules of providers."""

import contextlib
import sqlite3
from pathlib import Path

import pyarrow as pa

from pyspark_lookup.sources.providers.provider import BuiltInOptions, system_options
from pyspark_lookup.sources.registry import parse_options
from pyspark_lookup.testing import check_provider


def test_sqlite(tmp_path: Path) -> None:
    """Also while somebody writes."""
    columns = {"id": [1, 2, 2, 3, None], "name": ["one", "two", "Two", "drei", "no id"], "n": [10, 20, None, 30, 40]}
    file = tmp_path / "shop.db"

    def write(rows: pa.Table) -> None:
        with contextlib.closing(sqlite3.connect(file)) as connection, connection:
            connection.execute("DELETE FROM people")
            connection.executemany("INSERT INTO people VALUES (:id, :name, :n)", rows.to_pylist())

    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE people (id BIGINT, name TEXT, n BIGINT)")
    write(pa.table(columns))
    table = {"path": f"sqlite:///{file}", "lookup.table": "people", "lookup.keys": "id,name"}
    options = parse_options(table)
    system = system_options(options)
    assert isinstance(system, BuiltInOptions)
    check_provider(system.provide(options), pa.table(columns), ("id", "name"), write=write, largest_call=1000)
