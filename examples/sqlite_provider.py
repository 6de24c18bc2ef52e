"""A table of an SQLite database as a lookup table.

    LookupTable("/data/shop.db", {
        "lookup.provider": "sqlite_provider:provider",  # this file, copied to where your Python and Spark's workers import it
        "lookup.provider.table": "customers",
        "lookup.keys": "id",
    })

The path is the database file. Columns are declared INTEGER, REAL, TEXT or BLOB, and the rows hold what their
column declares (`CREATE TABLE … STRICT` sees to it). An index on the key columns makes lookups fast.

There is no `version()`, so lookup.cache=PARTIAL needs lookup.partial-cache.expire-after-write. SQLite has
nothing that could be one. `PRAGMA data_version` tells changes apart only within one connection, and the time and size
of the file and its -wal can stay as they are while the rows change: commits within one tick of the clock look
alike, and in WAL mode the file changes before its readers see the new rows, so that old rows would be kept
under the new version. A table that counts its own changes in the transactions that make them could have one.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from pyspark_lookup import LookupContext, LookupFunction, LookupFunctionProvider, OptionError

__all__ = ["SqliteLookup", "provider"]

_TYPES = {"INTEGER": pa.int64(), "REAL": pa.float64(), "TEXT": pa.string(), "BLOB": pa.binary()}
_MAX_VARIABLES = 32766 if sqlite3.sqlite_version_info >= (3, 32) else 999


def provider(context: LookupContext) -> LookupFunctionProvider:
    """The table `lookup.provider.table` of the database at `path`. Raises OptionError if it cannot be looked up."""
    table = context.options.get("table")
    if context.path is None or not table:
        raise OptionError("an SQLite table needs a path, the database file, and lookup.provider.table")
    path = Path(context.path).absolute()
    schema = _schema(path, table)
    function = SqliteLookup(path, table, _asked(context, schema))
    # Each key is as many bound variables as it has columns.
    function.batch_size = _MAX_VARIABLES // max(len(context.keys), 1)
    return LookupFunctionProvider(function, schema)


class SqliteLookup(LookupFunction):
    """Looks up a batch of keys in one statement, on a connection of its own.

    Connecting takes a fraction of a millisecond, and only a new connection sees a file that was put in the place
    of the old one.
    """

    def __init__(self, path: Path, table: str, columns: pa.Schema) -> None:
        self._path = path
        self._table = table
        self._columns = columns

    def lookup(self, keys: pa.Table) -> pa.Table:
        names = [_quoted(name) for name in keys.column_names]
        marks = f"({', '.join('?' * keys.num_columns)})"
        # Keys are equal by their bytes. Where the table is declared with another collation, its index finds a few more.
        pairs = [f"t.{name} = keys.{name} AND t.{name} COLLATE BINARY = keys.{name}" for name in names]
        statement = (
            f"WITH keys ({', '.join(names)}) AS (VALUES {', '.join([marks] * keys.num_rows)}) "
            f"SELECT {', '.join('t.' + _quoted(name) for name in self._columns.names)} "
            f"FROM keys JOIN main.{_quoted(self._table)} AS t ON {' AND '.join(pairs)}"
        )
        bound = [value for key in zip(*(column.to_pylist() for column in keys.columns), strict=True) for value in key]
        with contextlib.closing(_connect(self._path)) as connection:
            rows = connection.execute(statement, bound).fetchall()
        return _as_arrow(rows, self._columns)


def _connect(path: Path) -> sqlite3.Connection:
    """Read-only: a file that does not exist is an error, not a new database."""
    return sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)


def _schema(path: Path, table: str) -> pa.Schema:
    """The columns of the table as they are declared."""
    with contextlib.closing(_connect(path)) as connection:
        declared = connection.execute("SELECT name, type FROM pragma_table_info(?)", [table]).fetchall()
    if not declared:
        raise OptionError(f"option lookup.provider.table = {table!r}: {path} has no such table")
    for name, kind in declared:
        if kind.upper() not in _TYPES:
            raise OptionError(
                f"table {table!r} of {path}: column {name!r} is declared {kind!r}; known are {', '.join(_TYPES)}"
            )
    return pa.schema([(name, _TYPES[kind.upper()]) for name, kind in declared])


def _asked(context: LookupContext, schema: pa.Schema) -> pa.Schema:
    """The columns to fetch: those of `lookup.columns` and the keys. Their letter case is as the user spelled it."""
    if context.columns is None:
        return schema
    names = {name.casefold() for name in (*context.keys, *context.columns)}
    return pa.schema([field for field in schema if field.name.casefold() in names])


def _as_arrow(rows: Sequence[Sequence[object]], schema: pa.Schema) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else ((),) * len(schema)
    return pa.Table.from_arrays(
        [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)], schema=schema
    )


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
