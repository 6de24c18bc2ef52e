"""DuckDB, through its own Arrow interface."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from pyspark_lookup.columnar.types import spark_type
from pyspark_lookup.core.forks import ForkSafeLock, resets_in_child
from pyspark_lookup.errors import OptionError, SchemaError
from pyspark_lookup.sources.providers.databases.database import (
    BATCH_ROWS,
    DOLLARS,
    UUID_PATTERN,
    Column,
    Condition,
    Connection,
    Database,
    Source,
    add_infinite_keys,
    replace_infinite,
    table_of_batches,
    tokens_of,
    values_of,
)

_HUGEINT = re.compile(r"U?HUGEINT(?=[,)\[]|$)")  # as a type in the text of a type, not as a field's name


class _OpenFiles:
    """The files that this process has open. All connections to a file are cursors of the first one.

    DuckDB opens a path once in a process: while a connection to it is open, others share its file, also after another file was put in its place,
    and in a forked child, which lacks the threads that serve it. So the file is then attached to a database in memory.
    """

    def __init__(self) -> None:
        # The race: the first connection to a file opens it, and only then gets it the functions that read Arrow tables.
        self._lock = ForkSafeLock()
        self._first: dict[tuple[str, object], _First] = {}  # by path and identity of the file
        self._inherited: list[Any] = []  # those of parent processes, which would hang if they were closed
        self._paths = set[str]()  # that parent processes had open
        resets_in_child(self)

    def reset_in_child(self) -> None:
        self._inherited.append(self._first)
        self._paths.update(path for path, _ in self._first)
        self._first = {}

    def connect(self, path: str) -> tuple[Any, Callable[[], None]]:
        """(a connection to the file that is at `path` now, a function that closes it)."""
        with self._lock:
            while (key := (path, _identity_of(path))) not in self._first:
                first = self._open(path)
                if _identity_of(path) == key[1]:
                    self._first[key] = first
                else:  # replaced in between
                    first.connection.close()
            first = self._first[key]
            connection = first.connection.cursor()
            first.cursors += 1
        if first.name:
            connection.execute(f'USE "{first.name}"')
        return connection, functools.partial(self._close, connection, key)

    def _open(self, path: str) -> _First:
        import duckdb

        if path not in self._paths.union(other for other, _ in self._first):
            # Read-only: other processes may read the file at the same time.
            return _First(duckdb.connect(path, read_only=True))
        connection = duckdb.connect()
        text = path.replace("'", "''")
        other_name = "AS memory_db" if Path(path).stem.lower() == "memory" else ""  # that name is taken
        connection.execute(f"ATTACH '{text}' {other_name} (READ_ONLY)")
        names = connection.execute("SELECT database_name FROM duckdb_databases() WHERE path IS NOT NULL").fetchall()
        return _First(connection, names[0][0].replace('"', '""'))

    def _close(self, connection: Any, key: tuple[str, object]) -> None:
        connection.close()
        with self._lock:
            first = self._first.get(key)
            if first is None:  # it is the parent's
                return
            first.cursors -= 1
            if not first.cursors:
                del self._first[key]
                first.connection.close()


@dataclasses.dataclass
class _First:
    """The connection that opened a file. `name`: its name in quotes, if it is attached to a database in memory. `cursors`: how many are open."""

    connection: Any
    name: str = ""
    cursors: int = 0


def _identity_of(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None  # to open it raises the error that says why
    return status.st_dev, status.st_ino


_open_files = _OpenFiles()


class Duckdb(Database):
    extra = "duckdb"
    is_file, has_logins = True, False
    tokens = tokens_of(*DOLLARS)

    def check(self) -> None:
        self.address.check_parameters({})
        if self.address.host or not self.address.database:
            raise OptionError(
                f"option path = {self.address.place!r} names no DuckDB file: write duckdb:///shop.duckdb, or duckdb:////data/shop.duckdb for an absolute path"
            )

    def keys_at_once(self, columns: int) -> int:
        return 1_000_000

    def connect(self) -> Connection:
        try:
            import duckdb  # noqa: F401
        except ImportError as problem:
            self.missing("duckdb", problem)
        return _DuckdbConnection(self, *_open_files.connect(str(Path(self.address.database).absolute())))


class _DuckdbConnection(Connection):
    def __init__(self, database: Duckdb, connection: Any, close: Callable[[], None]) -> None:
        self._database = database
        self._connection = connection
        self._close = close
        # Times are then the same wherever the process runs; and no text of a query is taken for the name of a variable of this process.
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute("SET python_enable_replacements = false")
        connection.execute("SET enable_progress_bar = false")  # it would go to the output of the process

    def columns(self, source: Source, parameters: Sequence[Any] = ()) -> list[Column]:
        relation = self._run(f"SELECT * FROM {source.sql} LIMIT 0", parameters)
        schema = relation.to_arrow_table().schema
        return [self._column(field, str(kind)) for field, kind in zip(schema, relation.types, strict=True)]

    def _column(self, field: pa.Field, kind: str) -> Column:
        raw = f"t.{self._database.quote(field.name)}"
        if pa.types.is_timestamp(field.type) or pa.types.is_date(field.type):
            name = "DATE" if pa.types.is_date(field.type) else "TIMESTAMPTZ" if field.type.tz else "TIMESTAMP"
            # Nanoseconds are rounded, and a key is what the rounded value is.
            in_type = f"{raw}::{name}" if kind == "TIMESTAMP_NS" else raw
            value = replace_infinite(f"{raw}::{name}", name)
            return Column(field.name, spark_type(field.type), value, in_type, ordered=True, infinite=name)
        try:
            type_ = spark_type(field.type)
        except SchemaError:  # such as a time of day or a union
            type_ = pa.null()
        as_text = pa.types.is_null(type_) or kind == "BIT" or isinstance(field.type, pa.BaseExtensionType)
        if kind == "UUID":
            return Column(field.name, pa.string(), f"{raw}::VARCHAR", raw, "{}::UUID", pattern=UUID_PATTERN)
        if as_text or pa.types.is_dictionary(field.type) or (pa.types.is_string(type_) and kind != "VARCHAR"):
            return Column(field.name, pa.string(), f"{raw}::VARCHAR", f"{raw}::VARCHAR", exact=False)
        # Arrow's decimals have fewer digits than HUGEINT, which the driver does not check. The cast fails for a number that has more.
        value = f"{raw}::{_HUGEINT.sub('DECIMAL(38, 0)', kind)}" if _HUGEINT.search(kind) else raw
        parameter = "{}::HUGEINT" if _HUGEINT.fullmatch(kind) else "{}"  # or the column would be cast to DECIMAL
        if kind == "UHUGEINT":  # DuckDB compares it with a HUGEINT as doubles
            return Column(field.name, field.type, value, raw, parameter, exact=False)
        exact = not (pa.types.is_string(type_) or pa.types.is_floating(type_) or pa.types.is_nested(type_))
        ordered = pa.types.is_integer(type_) or pa.types.is_decimal(type_)
        return Column(field.name, field.type, value, raw, parameter, exact=exact, ordered=ordered)

    def rows(self, source: Source, columns: Sequence[Column], condition: Condition | None) -> Iterator[pa.RecordBatch]:
        # One statement sees one state.
        statement = self._database.select(source, columns, condition)
        yield from self._run(statement, values_of(condition)).to_arrow_reader(BATCH_ROWS)

    def rows_of_keys(
        self,
        source: Source,
        columns: Sequence[Column],
        keys: Sequence[Column],
        values: pa.Table,
        condition: Condition | None,
    ) -> pa.Table:
        names = [f"k{number}" for number in range(len(keys))]
        self._connection.register("lookupcache_keys", values.rename_columns(names))
        requested = add_infinite_keys(f"SELECT {', '.join(names)} FROM lookupcache_keys", names, keys, values)
        pairs = [f"{key.key} = {key.parameter.format(f'k.{name}')}" for key, name in zip(keys, names, strict=True)]
        # No JOIN: several keys may be equal in the column's collation, and a row comes once.
        matching = Source(f"{source.sql} SEMI JOIN ({requested}) AS k ON {' AND '.join(pairs)}", source.label)
        statement = self._database.select(matching, columns, condition)
        rows: pa.Table = self._run(statement, values_of(condition)).to_arrow_table()
        return rows

    def _run(self, statement: str, parameters: Sequence[Any]) -> Any:
        return self._connection.sql(statement, params=parameters) if parameters else self._connection.sql(statement)

    def query(self, statement: str, most: int, since: pa.Array | None = None) -> pa.Table | None:
        if since is None:
            select, parameters = statement, []
        else:
            source, parameters = (
                self._database.subquery(self._database.place_since(statement, "$1")[0]),
                since.to_pylist(),
            )
            select = self._database.select(source, self.columns(source, parameters), None)
        reader = self._run(select, parameters).to_arrow_reader(BATCH_ROWS)
        return table_of_batches(reader, most, reader.schema)

    def close(self) -> None:
        close, self._close = self._close, lambda: None
        close()
