"""SQLite, through Python's own module.

Its ADBC driver takes the type of a column from its first rows, and fails at a later row with another. Here a column has the type that the
table declares.
"""

from __future__ import annotations

import contextlib
import decimal
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from pyspark_lookup.errors import OptionError, SchemaError, raise_ours
from pyspark_lookup.sources.providers.databases.database import (
    BATCH_ROWS,
    Column,
    Condition,
    Connection,
    Database,
    Source,
    batch_from_rows,
    values_of,
)

_VARIABLES = 32_766 if sqlite3.sqlite_version_info >= (3, 32) else 999  # SQLite's limit for a statement
_CONDITIONS = 500  # of them, for a condition
_TEXTS = {pa.string(), pa.date32(), pa.timestamp("us"), pa.timestamp("us", "UTC")}


class Sqlite(Database):
    is_file, has_logins = True, False

    def check(self) -> None:
        self.address.check_parameters({})
        if self.address.host or not self.address.database:
            raise OptionError(
                f"option path = {self.address.place!r} names no SQLite file: write sqlite:///shop.db, or sqlite:////data/shop.db for an absolute path"
            )

    def keys_at_once(self, columns: int) -> int:
        return (_VARIABLES - _CONDITIONS) // columns

    def connect(self) -> Connection:
        # Read-only: a file that does not exist is an error, not a new database.
        path = Path(self.address.database).absolute()
        return _SqliteConnection(self, sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, isolation_level=None))


class _SqliteConnection(Connection):
    def __init__(self, database: Sqlite, connection: sqlite3.Connection) -> None:
        self._database = database
        self._connection = connection

    def columns(self, source: Source) -> list[Column]:
        # A view knows what the columns behind it are declared as; only this connection sees a temporary one.
        self._connection.execute(f"CREATE TEMP VIEW lookupcache_source AS SELECT * FROM {source.sql}")
        try:
            declared = self._connection.execute(
                "SELECT name, type FROM pragma_table_info('lookupcache_source')"
            ).fetchall()
        finally:
            self._connection.execute("DROP VIEW lookupcache_source")
        return [self._column(name, kind.upper()) for name, kind in declared]

    def _column(self, name: str, declared: str) -> Column:
        raw = f"t.{self._database.quote(name)}"
        kind = _type(declared)
        # These are stored as text or numbers, in spellings that SQLite does not compare by what they mean.
        findable = not (pa.types.is_decimal(kind) or pa.types.is_timestamp(kind))
        ordered = pa.types.is_integer(kind)
        return Column(name, kind, raw, raw, exact=kind != pa.string(), ordered=ordered, findable=findable)

    def rows(self, source: Source, columns: Sequence[Column], condition: Condition | None) -> Iterator[pa.RecordBatch]:
        # One statement sees one state, with or without a transaction.
        statement = self._database.select(source, columns, condition)
        parameters = [*map(_plain, values_of(condition))]
        with contextlib.closing(self._connection.execute(statement, parameters)) as cursor:
            while rows := cursor.fetchmany(BATCH_ROWS):
                yield _batch(rows, columns, source)

    def rows_of_keys(
        self,
        source: Source,
        columns: Sequence[Column],
        keys: Sequence[Column],
        values: pa.Table,
        condition: Condition | None,
    ) -> pa.Table:
        names = [f"k{number}" for number in range(len(keys))]
        marks = f"({', '.join('?' * len(keys))})"
        # An index with another collation finds a few rows more; the second comparison leaves them out.
        pairs = [
            f"{key.key} = k.{name} AND {key.key} COLLATE BINARY = k.{name}"
            for key, name in zip(keys, names, strict=True)
        ]
        joined = Source(f"lookupcache_keys AS k JOIN {source.sql} ON {' AND '.join(pairs)}", source.label)
        statement = (
            f"WITH lookupcache_keys ({', '.join(names)}) AS (VALUES {', '.join([marks] * values.num_rows)}) "
            f"{self._database.select(joined, columns, condition)}"
        )
        lists = [_stored(values[key.name].combine_chunks()).to_pylist() for key in keys]
        parameters = [value for row in zip(*lists, strict=True) for value in row]
        parameters += map(_plain, values_of(condition))
        rows = self._connection.execute(statement, parameters).fetchall()
        return pa.Table.from_batches([_batch(rows, columns, source)])

    def query(self, statement: str, most: int, since: pa.Array | None = None) -> pa.Table | None:
        statement, count = self._database.place_since(statement, "?")
        cursor = self._connection.execute(statement, [] if since is None else since.to_pylist() * count)
        if cursor.description is None:
            return pa.table({})
        rows = cursor.fetchmany(most + 1)
        columns = list(zip(*rows, strict=True)) or [()] * len(cursor.description)
        return (
            None
            if len(rows) > most
            else pa.table([pa.array(values) for values in columns], [name for name, *_ in cursor.description])
        )

    def close(self) -> None:
        self._connection.close()


def _type(declared: str) -> pa.DataType:
    """The Arrow type for the type that a table declares for a column; null if it declares none, or one that says nothing about the values."""
    word, _, digits = declared.partition("(")
    word = word.strip()
    if word.startswith("BOOL"):
        return pa.bool_()
    if word == "DATE":
        return pa.date32()
    if word in ("DATETIME", "TIMESTAMP"):
        return pa.timestamp("us")
    if word in ("NUMERIC", "DECIMAL") and digits:
        precision, _, scale = digits.rstrip(") ").partition(",")
        if precision.strip().isdecimal() and (scale.strip() or "0").isdecimal() and 0 < int(precision) <= 38:
            return pa.decimal128(int(precision), int(scale or 0))
    # The rules by which SQLite itself takes the affinity of a column from its declaration, in their order.
    if "INT" in word:
        return pa.int64()
    if any(part in word for part in ("CHAR", "CLOB", "TEXT", "JSON", "UUID")):
        return pa.string()
    if "BLOB" in word:
        return pa.binary()
    return pa.float64() if any(part in word for part in ("REAL", "FLOA", "DOUB")) else pa.null()


def _stored(values: pa.Array) -> pa.Array:
    """Keys as SQLite stores them: booleans as 0 and 1, dates as text."""
    if pa.types.is_boolean(values.type):
        return values.cast(pa.int64())
    return values.cast(pa.string()) if pa.types.is_date(values.type) else values


def _plain(value: Any) -> Any:
    return _stored(pa.array([value])).to_pylist()[0]


def _batch(rows: Sequence[Sequence[object]], columns: Sequence[Column], source: Source) -> pa.RecordBatch:
    return batch_from_rows(rows, columns, lambda values, column: _array(values, column, source))


def _array(values: Sequence[Any], column: Column, source: Source) -> pa.Array:
    """The stored values of a column as its type. Raises SchemaError for a value of another kind: SQLite stores any value in any column."""
    kind = column.type
    numbers = (int,) if pa.types.is_integer(kind) or pa.types.is_boolean(kind) else (int, float)
    expected: tuple[type, ...] = (bytes,) if kind == pa.binary() else (str,) if kind in _TEXTS else numbers
    expected = (int, float, str) if pa.types.is_decimal(kind) else expected
    others = set(map(type, values)) - {*expected, type(None)}
    try:
        if others:
            raise pa.ArrowInvalid(f"it is stored as {', '.join(sorted(other.__name__ for other in others))}")
        if pa.types.is_decimal(kind):
            return pa.array([None if value is None else decimal.Decimal(str(value)) for value in values], kind)
        if pa.types.is_boolean(kind):
            if not {*values} <= {0, 1, None}:
                raise pa.ArrowInvalid("it is neither 0 nor 1")
            return pa.array(values, pa.int64()).cast(kind)
        if kind in _TEXTS:
            texts = pa.array(values, pa.string())
            return texts if kind == pa.string() else texts.cast(kind)
        return pa.array(values, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as problem:
        raise_ours(
            SchemaError(
                f"{source.label}: column {column.name!r} has a value that is not of type {kind} ({problem}): correct it, or declare the column's type in "
                "lookup.schema"
            ),
            problem,
        )
