"""MySQL and MariaDB, through PyMySQL. Values come as the texts of the protocol, which Arrow parses by columns."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from pyspark_lookup.errors import OptionError, SchemaError, raise_ours
from pyspark_lookup.sources.providers.databases.database import (
    BACKSLASHES,
    BATCH_ROWS,
    Column,
    Condition,
    Connection,
    Database,
    Source,
    batch_from_rows,
    table_of_batches,
    tokens_of,
    values_of,
)

_INTEGERS = {"TINY": 8, "SHORT": 16, "INT24": 32, "LONG": 32, "LONGLONG": 64}
_SIGNED = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}
_UNSIGNED = {8: pa.uint8(), 16: pa.uint16(), 32: pa.uint32(), 64: pa.uint64()}
_TIMES = {
    "DATE": pa.date32(),
    "NEWDATE": pa.date32(),
    "DATETIME": pa.timestamp("us"),
    "TIMESTAMP": pa.timestamp("us", "UTC"),
}
_LAST_YEAR = 2155  # of the type YEAR
_FIRST_DAY, _LAST_DAY = -719_528, 2_932_896  # those of the years 0000 and 9999, in days since 1970
_DAY = 86_400_000_000  # in microseconds
_BINARY = 63  # the number of the character set of bytes
_PARAMETERS = {
    "user": "user",
    "unix_socket": "unix_socket",
    "ssl_ca": "ssl_ca",
    "ssl_cert": "ssl_cert",
    "ssl_key": "ssl_key",
}
_OPTION_FILE = "~/.my.cnf"
# Texts and results are then the same whatever the server is set to, and nothing can be written. Only SQL modes that change texts are
# removed: the user's statements may need the others. (In one of them, '' is NULL, so a comma takes the place of each.)
_SETTINGS = (
    "SET SESSION time_zone = '+00:00', SESSION sql_select_limit = 18446744073709551615, "
    "SESSION sql_mode = REPLACE(REPLACE(@@sql_mode, 'PAD_CHAR_TO_FULL_LENGTH', ','), 'EMPTY_STRING_IS_NULL', ',')",
    "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY",
)


class Mysql(Database):
    extra = "mysql"
    quote_mark = "`"
    tokens = tokens_of(*BACKSLASHES, r"#[^\n]*")

    def check(self) -> None:
        self.address.check_parameters(_PARAMETERS)
        if self.address.host.startswith("/"):
            raise OptionError(
                f"option path = {self.address.place!r} has a file in the place of the host: write {self.address.scheme}:///database?unix_socket=/run/mysqld/mysqld.sock"
            )
        if not self.address.database:
            raise OptionError(
                f"option path = {self.address.place!r} names no database: write {self.address.scheme}://host/database"
            )

    def quote(self, name: str) -> str:
        return super().quote(name).replace("%", "%%")  # the driver puts parameters in the place of %s

    def subquery(self, text: str) -> Source:
        return super().subquery(text.replace("%", "%%"))

    def placeholder(self, number: int) -> str:
        return "%s"

    def connect(self) -> Connection:
        try:
            import pymysql
            import pymysql.converters
        except ImportError as problem:
            self.missing("PyMySQL", problem)
        address, login = self.address, self.login()
        more = {name: value for name, value in address.parameters.items() if name != "user"}
        password = login.get("password", os.environ.get("MYSQL_PWD", ""))
        connection = pymysql.connect(
            host=address.host or None,
            port=address.port or 0,
            user=login.get("user"),
            password=password.encode(),
            database=address.database,
            charset="utf8mb4",
            autocommit=True,
            conv=dict(pymysql.converters.encoders),  # no decoders: values stay texts
            read_default_file=_OPTION_FILE if os.path.exists(os.path.expanduser(_OPTION_FILE)) else None,
            # A certificate that is named is checked, and so is the name of the host.
            ssl_verify_identity=True if "ssl_ca" in more else None,
            **more,
        )
        return _MysqlConnection(self, connection)


class _MysqlConnection(Connection):
    def __init__(self, database: Mysql, connection: Any) -> None:
        self._database = database
        self._connection = connection
        for statement in _SETTINGS:
            self._execute(statement)

    def _execute(self, statement: str) -> None:
        with self._connection.cursor() as cursor:
            cursor.execute(statement)

    def columns(self, source: Source) -> list[Column]:
        with self._connection.cursor() as cursor:
            cursor.execute(
                "SET SESSION character_set_results = NULL"
            )  # the description then has the columns' own character sets
            cursor.execute(f"SELECT * FROM {source.sql} LIMIT 0", ())
            columns = self._describe_result(cursor)
            cursor.execute("SET SESSION character_set_results = utf8mb4")
        return columns

    def _describe_result(self, cursor: Any) -> list[Column]:
        """The columns of a cursor's result, if it is selected from as `t`."""
        return [_column(field, f"t.{self._database.quote(field.name)}") for field in cursor._result.fields or ()]

    def rows(self, source: Source, columns: Sequence[Column], condition: Condition | None) -> Iterator[pa.RecordBatch]:
        statement = self._database.select(source, columns, condition)
        self._execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
        with self._streaming(statement, values_of(condition)) as cursor:
            while rows := cursor.fetchmany(BATCH_ROWS):
                yield _batch(rows, columns, source)
        self._execute("COMMIT")

    @contextlib.contextmanager
    def _streaming(self, statement: str, parameters: Sequence[Any]) -> Iterator[Any]:
        """A cursor over a result whose rows are not in memory. If rows are left, or after an error, the connection is closed."""
        from pymysql.cursors import SSCursor

        cursor = self._connection.cursor(SSCursor)
        is_read = False
        try:
            cursor.execute(statement, parameters)
            yield cursor
            is_read = not cursor._result.unbuffered_active
        finally:
            if is_read:
                cursor.close()
            else:
                self.close()
                if cursor._result is not None:  # the driver would read the rest of the rows
                    cursor._result.unbuffered_active = False
                cursor.connection = None

    def rows_of_keys(
        self,
        source: Source,
        columns: Sequence[Column],
        keys: Sequence[Column],
        values: pa.Table,
        condition: Condition | None,
    ) -> pa.Table:
        lists = [_to_parameters(values[key.name]) for key in keys]
        marks = ", ".join(key.parameter.format("%s") for key in keys)
        names = ", ".join(key.key for key in keys)
        requested = f"({names}) IN ({', '.join([f'({marks})'] * values.num_rows)})"
        parameters = [*values_of(condition), *(value for row in zip(*lists, strict=True) for value in row)]
        with self._connection.cursor() as cursor:
            cursor.execute(self._database.select(source, columns, condition, requested), parameters)
            return pa.Table.from_batches([_batch(cursor.fetchall(), columns, source)])

    def query(self, statement: str, most: int, since: pa.Array | None = None) -> pa.Table | None:
        statement, count = self._database.place_since(statement.replace("%", "%%"), "%s")
        parameters = [] if since is None else _to_parameters(since) * count
        columns, rows = self._fetch(statement, parameters, most)
        if rows is None or pa.float32() not in rows.schema.types:
            return rows
        # A FLOAT comes as a text of six digits. So we ask again, for doubles.
        statement = self._database.select(Source(f"({statement}) AS t", "the query"), columns, None)
        return self._fetch(statement, parameters, most)[1]

    def _fetch(self, statement: str, parameters: Sequence[Any], most: int) -> tuple[list[Column], pa.Table | None]:
        """The columns and rows of a statement's result; no rows if there are more than `most`."""
        with self._streaming(statement, parameters) as cursor:
            columns = self._describe_result(cursor)
            parts = iter(lambda: cursor.fetchmany(BATCH_ROWS) or None, None)
            batches = (_batch(rows, columns, Source("", "the query")) for rows in parts)
            return columns, table_of_batches(batches, most, pa.schema([column.field for column in columns]))

    def close(self) -> None:
        with contextlib.suppress(Exception):
            # Without a farewell to the server, before which the driver would read the rest of an unfinished result.
            self._connection._force_close()


def _column(field: Any, raw: str) -> Column:
    """The column that a result's descriptor describes. `raw`: SQL of its value."""
    from pymysql.constants import FIELD_TYPE, FLAG

    code = next((name for name, number in vars(FIELD_TYPE).items() if number == field.type_code), "")
    unsigned = bool(field.flags & FLAG.UNSIGNED)
    if code in _INTEGERS:
        kind = (_UNSIGNED if unsigned else _SIGNED)[_INTEGERS[code]]
        return Column(field.name, kind, raw, raw, ordered=True)
    # To the server, the numbers 1 to 99 are years of two digits, and no year is less than a number after the last year.
    if code == "YEAR":
        return Column(field.name, pa.int16(), raw, raw, exact=False, range=(0, _LAST_YEAR))
    if code == "FLOAT":  # as a double, whose text has all digits
        return Column(field.name, pa.float32(), f"({raw} + 0e0)", f"({raw} + 0e0)", exact=False, finite=True)
    if code == "DOUBLE":
        return Column(field.name, pa.float64(), raw, raw, exact=False, finite=True)
    if code in ("DECIMAL", "NEWDECIMAL"):
        precision = field.length - (0 if unsigned else 1) - (1 if field.scale else 0)
        kind = pa.decimal128(precision, field.scale) if precision <= 38 else pa.string()
        return Column(field.name, kind, raw, raw, exact=precision <= 38, ordered=precision <= 38)
    if code in _TIMES:
        kind = _TIMES[code]
        taken = (_FIRST_DAY, _LAST_DAY) if pa.types.is_date(kind) else (_FIRST_DAY * _DAY, (_LAST_DAY + 1) * _DAY - 1)
        return Column(field.name, kind, raw, raw, ordered=True, range=taken)
    if code in ("BIT", "GEOMETRY"):
        return Column(field.name, pa.binary(), raw, raw, findable=False)
    if code == "JSON":  # no text equals one
        return Column(field.name, pa.string(), raw, raw, findable=False)
    if code in ("TIME", "NULL"):
        return Column(field.name, pa.string(), raw, raw, exact=False)
    if field.charsetnr == _BINARY:
        return Column(field.name, pa.binary(), raw, raw)
    # The server refuses to compare with a text that the column's character set does not have. Converted, it has question marks for these characters.
    charset = _charset(field.charsetnr)
    key = raw if charset else f"CONVERT({raw} USING utf8mb4)"
    return Column(
        field.name,
        pa.string(),
        raw,
        key,
        "{}" if charset in ("", "utf8mb4") else f"CONVERT({{}} USING {charset})",
        exact=False,
    )


def _charset(collation: int) -> str:
    """The character set of a collation with this number; empty if it is not known."""
    from pymysql.charset import charset_by_id

    try:
        return str(charset_by_id(collation).name)
    except KeyError:
        return ""


def _to_parameters(values: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Values as the driver takes them. Times are texts, since Python has no year 0."""
    if pa.types.is_timestamp(values.type):  # without the time zone, which is UTC
        values = values.cast(pa.timestamp("us")).cast(pa.string())
    elif pa.types.is_date(values.type):
        values = values.cast(pa.string())
    parameters: list[Any] = values.to_pylist()
    return parameters


def _batch(rows: Sequence[Sequence[Any]], columns: Sequence[Column], source: Source) -> pa.RecordBatch:
    return batch_from_rows(rows, columns, lambda values, column: _array(values, column, source))


def _array(values: Sequence[Any], column: Column, source: Source) -> pa.Array:
    if column.type == pa.binary():
        return pa.array(values, pa.binary())
    texts = pa.array(values, pa.string())
    try:
        if pa.types.is_timestamp(column.type):
            return texts.cast(pa.timestamp("us")).cast(column.type)
        return texts.cast(column.type)
    except pa.ArrowInvalid as problem:  # such as the day 0000-00-00
        raise_ours(
            SchemaError(
                f"{source.label}: column {column.name!r} has a value that is not of type {column.type} ({problem}): correct it, or convert it in a SELECT in lookup.query"
            ),
            problem,
        )
