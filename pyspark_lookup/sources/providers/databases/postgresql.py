"""PostgreSQL, through its ADBC driver: rows come as Arrow, in the server's binary format."""

from __future__ import annotations

import contextlib
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

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
)

# These values mean the same in Arrow as in PostgreSQL. All others come as the text that PostgreSQL makes of them.
_SAME = {
    "bool": pa.bool_(), "int2": pa.int16(), "int4": pa.int32(), "int8": pa.int64(), "float4": pa.float32(), "float8": pa.float64(),
    "text": pa.string(), "varchar": pa.string(), "bpchar": pa.string(), "name": pa.string(), "bytea": pa.binary(),
    "date": pa.date32(), "timestamp": pa.timestamp("us"), "timestamptz": pa.timestamp("us", "UTC"),
}  # fmt: skip
_EXACT = {"bool", "int2", "int4", "int8", "date", "timestamp", "timestamptz", "bytea", "uuid"}
_IN_LISTS = {"bool", "int2", "int4", "int8", "float4", "float8", "text", "varchar", "bytea"}
_BATCH_BYTES = 4 * 1024 * 1024  # of a scan: some ten batches are in memory at once
_TEXT_PATTERN = r"^[^\x00]*$"  # the server refuses a text with the character NUL
_FIRST_DAY, _LAST_DAY = -2_440_588, 2_145_042_905  # that the server takes, in days since 1970
_FIRST_TIME = _FIRST_DAY * 86_400_000_000  # in microseconds; the last one is later than int64 can say
_LAST_INSTANT = "294247-01-10 04:00:54.775807"  # that int64 can say: the driver's values wrap around after it
# Texts that the server makes of values are then the same whatever the server, the role and the database are set to.
_SETTINGS = (
    "SELECT set_config('default_transaction_read_only', 'on', false), set_config('TimeZone', 'UTC', false), "
    "set_config('DateStyle', 'ISO, YMD', false), set_config('IntervalStyle', 'postgres', false), "
    "set_config('extra_float_digits', '1', false), set_config('bytea_output', 'hex', false)"
)


class Postgresql(Database):
    extra = "postgres"
    tokens = tokens_of(*DOLLARS)

    def keys_at_once(self, columns: int) -> int:
        return 100_000  # a message to the server has 1 GB at most

    def placeholder(self, number: int) -> str:
        return f"${number}"

    def connect(self) -> Connection:
        try:
            from adbc_driver_postgresql import dbapi
        except ImportError as problem:
            self.missing("adbc-driver-postgresql", problem)
        login = {name: text for name, text in self.login().items() if name == "password" or text != self.address.user}
        uri = self.address.url
        if login:
            uri += ("&" if "?" in uri else "?") + urllib.parse.urlencode(login, quote_via=urllib.parse.quote)
        with self.connecting(login.get("password")):
            return _PostgresqlConnection(self, dbapi.connect(uri, autocommit=True))


class _PostgresqlConnection(Connection):
    def __init__(self, database: Postgresql, connection: Any) -> None:
        self._database = database
        self._connection = connection
        self._run(_SETTINGS)

    def _run(self, statement: str) -> None:
        with self._connection.cursor() as cursor:
            cursor.execute(statement)

    def columns(self, source: Source) -> list[Column]:
        with self._connection.cursor() as cursor:
            schema = cursor.adbc_execute_schema(f"SELECT * FROM {source.sql}")
        return [self._column(field) for field in schema]

    def _column(self, field: pa.Field) -> Column:
        metadata = field.metadata or {}
        kind = metadata.get(b"POSTGRESQL:type", b"").decode()
        raw = f"t.{self._database.quote(field.name)}"
        if kind in ("date", "timestamp", "timestamptz"):
            # To send instants, the driver would set the session's time zone in a transaction of its own, which ends ours. The session's zone is UTC.
            parameter = "{}::timestamp{array}::timestamptz{array}" if kind == "timestamptz" else "{}"
            taken = (_FIRST_DAY, _LAST_DAY) if kind == "date" else (_FIRST_TIME, 2**63 - 1)
            value = replace_infinite(raw, kind)
            if kind != "date":  # this cast fails, and its error shows the value
                late = f"({raw}::text || ' is later than {_LAST_INSTANT} UTC')::{kind}"
                value = f"CASE WHEN {raw} > '{_LAST_INSTANT}' AND {raw} < 'infinity' THEN {late} ELSE {value} END"
            return Column(field.name, _SAME[kind], value, raw, parameter, ordered=True, range=taken, infinite=kind)
        if kind in _SAME:
            # `char(n)` ignores trailing spaces, and a collation may treat different texts as equal.
            parameter = "{}::text{array}::bpchar{array}" if kind == "bpchar" else "{}"
            pattern = _TEXT_PATTERN if _SAME[kind] == pa.string() else ""
            exact, ordered = kind in _EXACT, kind.startswith("int")
            return Column(field.name, _SAME[kind], raw, raw, parameter, exact, ordered, pattern=pattern)
        if kind.startswith("_") and kind[1:] in _IN_LISTS:
            # Arrow's lists have one dimension: the cast of this text fails for an array that has more.
            value = f"CASE WHEN array_ndims({raw}) > 1 THEN (array_dims({raw}) || ' is an array of several dimensions')::{kind[1:]}[] ELSE {raw} END"
            return Column(field.name, pa.list_(_SAME[kind[1:]]), value, f"{raw}::text", exact=False)
        if kind.startswith("_"):
            return Column(field.name, pa.list_(pa.string()), f"{raw}::text[]", f"{raw}::text", exact=False)
        if kind == "numeric" and (decimal := _decimal(int(metadata[b"POSTGRESQL:typmod"]))) is not None:
            return Column(field.name, decimal, f"{raw}::text", raw, "{}::text{array}::numeric{array}", True, True)
        if kind == "uuid":
            return Column(
                field.name, pa.string(), f"{raw}::text", raw, "{}::text{array}::uuid{array}", pattern=UUID_PATTERN
            )
        if kind == "oid":
            return Column(field.name, pa.int64(), f"{raw}::bigint", f"{raw}::bigint", ordered=True)
        return Column(field.name, pa.string(), f"{raw}::text", f"{raw}::text", exact=False, pattern=_TEXT_PATTERN)

    def rows(self, source: Source, columns: Sequence[Column], condition: Condition | None) -> Iterator[pa.RecordBatch]:
        statement = self._database.select(source, columns, condition)
        self._run("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        with self._connection.cursor() as cursor:
            if condition is None or not condition.parameters:  # by COPY, which is streamed
                cursor.adbc_statement.set_options(**{"adbc.postgresql.batch_size_hint_bytes": str(_BATCH_BYTES)})
                cursor.execute(statement)
                for batch in cursor.fetch_record_batch():
                    yield _typed(batch, columns)
            else:  # COPY takes no parameters, and any other result would be in memory as a whole
                cursor.execute(f"DECLARE lookupcache NO SCROLL CURSOR FOR {statement}", _bound(condition.parameters))
                cursor.adbc_statement.set_options(**{"adbc.postgresql.use_copy": "false"})
                fetched = True
                while fetched:
                    cursor.execute(f"FETCH FORWARD {BATCH_ROWS} FROM lookupcache")
                    fetched = False
                    for batch in cursor.fetch_record_batch():
                        fetched |= batch.num_rows > 0
                        yield _typed(batch, columns)
        self._run("COMMIT")

    def rows_of_keys(
        self,
        source: Source,
        columns: Sequence[Column],
        keys: Sequence[Column],
        values: pa.Table,
        condition: Condition | None,
    ) -> pa.Table:
        parameters = condition.parameters if condition else ()
        count = len(parameters)
        arrays = [
            pa.ListArray.from_arrays([0, values.num_rows], _bindable(values[key.name].combine_chunks(), key))
            for key in keys
        ]
        casts = [key.parameter.format(f"${count + number}", array="[]") for number, key in enumerate(keys, 1)]
        # No JOIN: several keys may be equal in the column's collation, and a row comes once.
        names = [f"k{number}" for number in range(len(keys))]
        select = f"SELECT {', '.join(names)} FROM unnest({', '.join(casts)}) AS k ({', '.join(names)})"
        requested = add_infinite_keys(select, names, keys, values)
        matches = f"({', '.join(key.key for key in keys)}) IN ({requested})"
        if len(keys) == 1:  # with an array, the server takes an index for more keys
            array = casts[0] if requested == select else f"ARRAY({requested})"
            matches = f"{keys[0].key} = ANY ({array})"
        statement = self._database.select(source, columns, condition, matches)
        bound = _bound(parameters)
        bound = pa.record_batch(
            [*bound.columns, *arrays], [str(number) for number in range(len(bound.columns) + len(arrays))]
        )
        with self._connection.cursor() as cursor:
            cursor.execute(statement, bound)
            batches = [_typed(batch, columns) for batch in cursor.fetch_record_batch()]
        # The columns may have become wider since they were described.
        return (
            pa.Table.from_batches(batches) if batches else pa.schema([column.field for column in columns]).empty_table()
        )

    def query(self, statement: str, most: int, since: pa.Array | None = None) -> pa.Table | None:
        if since is not None:
            value, kind = since[0].as_py(), since.type
            instant = pa.types.is_timestamp(kind) and kind.tz is not None
            parameter = "$1::timestamp::timestamptz" if instant else "$1"
            bound: Condition | None = Condition("true", ((value, Column("", kind, "", "")),))
            if pa.types.is_string(kind):
                # Also a number without a limit of its digits is a text here. A literal has the type of what it is compared with.
                text = value.replace("\\", "\\\\").replace("'", "''")
                parameter, bound = f"E'{text}'", None
            source = self._database.subquery(self._database.place_since(statement, parameter)[0])
            columns = self.columns(source)
            batches = self.rows(source, columns, bound)
            return table_of_batches(batches, most, pa.schema([column.field for column in columns]))
        with self._connection.cursor() as cursor:
            cursor.execute(statement)
            reader = cursor.fetch_record_batch()
            rows = table_of_batches(reader, most, reader.schema)
        return None if rows is None else pa.table([_storage(column) for column in rows.columns], rows.column_names)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._connection.close()


def _storage(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column as plain text if the driver returns its values as texts of an unknown type; any other column unchanged."""
    is_text = isinstance(column.type, pa.BaseExtensionType) and pa.types.is_string(column.type.storage_type)
    return column.cast(pa.string()) if is_text else column


def _decimal(modifier: int) -> pa.DataType | None:
    """The type of a `numeric` with this modifier; None if its digits are not limited, or Spark's decimals have fewer."""
    if modifier < 4:
        return None
    precision, scale = (modifier - 4) >> 16 & 0xFFFF, (((modifier - 4) & 0x7FF) ^ 1024) - 1024
    precision = max(precision - min(scale, 0), scale)
    return pa.decimal128(precision, max(scale, 0)) if precision <= 38 else None


def _bindable(values: pa.Array, column: Column) -> pa.Array:
    """Values in the type in which the driver sends them. Where a parameter is cast, it is a text or a time in UTC."""
    if pa.types.is_timestamp(column.type):
        return values.cast(pa.timestamp("us"))
    return values.cast(pa.string()) if column.parameter != "{}" else values


def _bound(parameters: Sequence[tuple[Any, Column]]) -> pa.RecordBatch:
    arrays = [_bindable(pa.array([value], column.type), column) for value, column in parameters]
    return pa.RecordBatch.from_arrays(arrays, [str(number) for number in range(len(arrays))])


def _typed(batch: pa.RecordBatch, columns: Sequence[Column]) -> pa.RecordBatch:
    """The rows in the columns' types: decimals come as text."""
    arrays = [
        array.cast(column.type) if pa.types.is_decimal(column.type) else array
        for array, column in zip(batch.columns, columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, [column.name for column in columns])
