"""Databases whose ADBC driver takes `?` as a parameter: Snowflake, BigQuery, and servers of Flight SQL.

No test of ours starts one of them. What is here relies on what every ADBC driver promises; tests run it with the driver for SQLite.
"""

from __future__ import annotations

import abc
import contextlib
import importlib
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from pyspark_lookup.columnar.types import spark_type, unreadable_type
from pyspark_lookup.errors import SchemaError
from pyspark_lookup.sources.providers.databases.database import (
    BACKSLASHES,
    DOLLARS,
    Column,
    Condition,
    Connection,
    Database,
    Source,
    table_of_batches,
    tokens_of,
)


class AdbcDatabase(Database):
    """A database of one ADBC driver. `module`: the Python package of the driver."""

    module: str

    @abc.abstractmethod
    def arguments(self, login: dict[str, str]) -> dict[str, Any]:
        """The arguments of the driver's `connect`. `login`: `user` and `password`, as far as they are known."""

    def keys_at_once(self, columns: int) -> int:
        return 1_000 // columns

    def connect(self) -> Connection:
        try:
            dbapi = importlib.import_module(f"{self.module}.dbapi")
        except ImportError as problem:
            self.missing(self.module.replace("_", "-"), problem)
        login = self.login()
        with self.connecting(login.get("password")):
            return _AdbcConnection(self, dbapi.connect(**self.arguments(login), autocommit=True))


class Snowflake(AdbcDatabase):
    extra, module = "snowflake", "adbc_driver_snowflake"
    tokens = tokens_of(*BACKSLASHES, *DOLLARS)

    def arguments(self, login: dict[str, str]) -> dict[str, Any]:
        parameters = urllib.parse.urlencode(
            {name: text for name, text in self.address.parameters.items() if name != "user"}
        )
        user, password = (urllib.parse.quote(login.get(name, ""), safe="") for name in ("user", "password"))
        account = f"{user}:{password}@{self.address.host}" if login else self.address.host
        return {"uri": f"{account}/{self.address.database}{'?' + parameters if parameters else ''}"}


class Bigquery(AdbcDatabase):
    extra, module, quote_mark = "bigquery", "adbc_driver_bigquery", "`"
    has_logins = False
    tokens = tokens_of(*BACKSLASHES, r"#[^\n]*")

    def check(self) -> None:
        self.address.check_parameters({})

    def quote(self, name: str) -> str:
        return "`" + name.replace("\\", "\\\\").replace("`", "\\`") + "`"

    def arguments(self, login: dict[str, str]) -> dict[str, Any]:
        project, dataset = self.address.host, self.address.database
        options = {"adbc.bigquery.sql.project_id": project, "adbc.bigquery.sql.dataset_id": dataset}
        return {"db_kwargs": {name: text for name, text in options.items() if text}}


class FlightSql(AdbcDatabase):
    extra, module = "flightsql", "adbc_driver_flightsql"

    def check(self) -> None:
        self.address.check_parameters({"user": "", "tls": ""})

    def arguments(self, login: dict[str, str]) -> dict[str, Any]:
        scheme = "grpc" if self.address.parameters.get("tls") == "false" else "grpc+tls"
        names = {"user": "username", "password": "password"}
        return {
            "uri": f"{scheme}://{self.address.server}",
            "db_kwargs": {names[name]: text for name, text in login.items()},
        }


class _AdbcConnection(Connection):
    def __init__(self, database: AdbcDatabase, connection: Any) -> None:
        self._database = database
        self._connection = connection

    def columns(self, source: Source) -> list[Column]:
        schema = self._run(f"SELECT * FROM {source.sql} WHERE 1 = 0", []).schema
        return [self._column(field, source) for field in schema]

    def _column(self, field: pa.Field, source: Source) -> Column:
        raw = f"t.{self._database.quote(field.name)}"
        try:
            kind = spark_type(field.type)
        except SchemaError as problem:
            reason = (
                f"{source.label}: column {field.name!r}: {problem} (a SELECT in lookup.query that casts it can help)"
            )
            return Column(field.name, unreadable_type(reason), raw, raw, findable=False)
        integer = pa.types.is_integer(kind)
        return Column(field.name, field.type, raw, raw, exact=integer or pa.types.is_date(kind), ordered=integer)

    def rows(self, source: Source, columns: Sequence[Column], condition: Condition | None) -> Iterator[pa.RecordBatch]:
        # One statement sees one state.
        statement = self._database.select(source, columns, condition)
        with self._connection.cursor() as cursor:
            cursor.execute(statement, _bound(condition.parameters if condition else ()))
            yield from cursor.fetch_record_batch()

    def rows_of_keys(
        self,
        source: Source,
        columns: Sequence[Column],
        keys: Sequence[Column],
        values: pa.Table,
        condition: Condition | None,
    ) -> pa.Table:
        lists = [values[key.name].to_pylist() for key in keys]
        alike = " AND ".join(f"{key.key} = ?" for key in keys)
        requested = f"{keys[0].key} IN ({', '.join('?' * values.num_rows)})"
        if len(keys) > 1:
            requested = f"({' OR '.join([f'({alike})'] * values.num_rows)})"
        parameters = [*(condition.parameters if condition else ())]
        parameters += [pair for row in zip(*lists, strict=True) for pair in zip(row, keys, strict=True)]
        return self._run(self._database.select(source, columns, condition, requested), parameters)

    def _run(self, statement: str, parameters: Sequence[tuple[Any, Column]]) -> pa.Table:
        with self._connection.cursor() as cursor:
            cursor.execute(statement, _bound(parameters))
            rows: pa.Table = cursor.fetch_arrow_table()
            return rows

    def query(self, statement: str, most: int, since: pa.Array | None = None) -> pa.Table | None:
        statement, count = self._database.place_since(statement, "?")
        parameters = [] if since is None else [(since[0].as_py(), Column("", since.type, "", ""))] * count
        with self._connection.cursor() as cursor:
            cursor.execute(statement, _bound(parameters))
            reader = cursor.fetch_record_batch()
            return table_of_batches(reader, most, reader.schema)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._connection.close()


def _bound(parameters: Sequence[tuple[Any, Column]]) -> pa.RecordBatch | None:
    """The parameters as one row: drivers run a statement once for each row."""
    if not parameters:
        return None
    arrays = [pa.array([value], spark_type(column.type)) for value, column in parameters]
    return pa.RecordBatch.from_arrays(arrays, [str(number) for number in range(len(arrays))])
