"""A table of a PostgreSQL database as a lookup table, Arrow all the way.

    LookupTable(None, {
        "lookup.provider": "postgres_provider:provider",  # this file, copied to where your Python and Spark's workers import it
        "lookup.provider.uri": "postgresql://db.example.com/shop?user=reader&connect_timeout=5",
        "lookup.provider.table": "public.customers",
        "lookup.keys": "id",
        "lookup.cache": "PARTIAL",
        "lookup.partial-cache.max-rows": 1000000,
        "lookup.partial-cache.expire-after-write": "5 min",
    })

Options must not hold credentials, for they are stored in plans and catalogs; a `user:password@` or `user@` in
a URI counts as one. The password comes from where libpq looks for it on each machine that reads: PGPASSWORD,
PGPASSFILE, ~/.pgpass or PGSERVICEFILE. Each process that reads has a connection.

The table may be a view, and its columns are typed as the driver types them: numeric is text, uuid 16 bytes;
time and interval have no counterpart in Spark. A view that casts them says otherwise.

It takes adbc-driver-postgresql 1.11 or newer: with an older one, a process whose connection is lost is aborted.

There is no `version()`, so lookup.cache=PARTIAL needs lookup.partial-cache.expire-after-write.
"""

from __future__ import annotations

import contextlib

import pyarrow as pa
from adbc_driver_postgresql import dbapi

from pyspark_lookup import LookupContext, LookupFunction, LookupFunctionProvider, OptionError

__all__ = ["PostgresLookup", "provider"]

# Keys of other types come as text (numeric, char) or bytes (uuid) that the server does not compare as such.
_KEY_TYPES = frozenset({
    "bigint", "boolean", "bytea", "character varying", "date", "double precision", "integer", "real", "smallint", "text",
    "timestamp with time zone", "timestamp without time zone",
})  # fmt: skip
_TYPES = (
    "SELECT attname, atttypid::regtype::text FROM pg_attribute WHERE attrelid = $1::regclass AND attname = ANY ($2)"
)


def provider(context: LookupContext) -> LookupFunctionProvider:
    """The table `lookup.provider.table` (or `schema.table`, spelled as in the catalog) at `lookup.provider.uri`."""
    uri, table = context.options.get("uri"), context.options.get("table")
    if not uri or not table:
        raise OptionError("a PostgreSQL table needs lookup.provider.uri and lookup.provider.table")
    name = ".".join(map(_quoted, table.split(".")))
    with _connect(uri) as connection, connection.cursor() as cursor:
        schema = cursor.adbc_execute_schema(f"SELECT * FROM {name}")  # described, not run
        keys = pa.array([context.keys], pa.list_(pa.string()))
        cursor.execute(_TYPES, pa.record_batch([pa.array([name]), keys], ["table", "keys"]))
        for key, kind in cursor.fetchall():
            if kind not in _KEY_TYPES:
                raise OptionError(f"table {table}: key column {key!r} is {kind}; make a view that casts it to text")
    return LookupFunctionProvider(PostgresLookup(uri, name, _asked(context, schema)), schema)


class PostgresLookup(LookupFunction):
    """Looks up a batch of keys in one statement, whose parameters are one array per key column.

    (Bound as rows, each key would be a statement.) A connection that failed is given up, and the next lookup,
    which may be the next attempt at this one, connects anew.
    """

    batch_size = 100_000  # a message to the server has 1 GB at most

    def __init__(self, uri: str, table: str, columns: pa.Schema) -> None:
        self._uri = uri
        self._table = table
        self._columns = columns
        self._connection: dbapi.Connection | None = None

    def lookup(self, keys: pa.Table) -> pa.Table:
        arrays = [pa.ListArray.from_arrays([0, keys.num_rows], column.combine_chunks()) for column in keys.columns]
        if self._connection is None:
            self._connection = _connect(self._uri)
        try:
            with self._connection.cursor() as cursor:
                cursor.execute(self._statement(keys.column_names), pa.record_batch(arrays, keys.column_names))
                return cursor.fetch_arrow_table()
        except Exception:
            self.close()
            raise

    def _statement(self, keys: list[str]) -> str:
        columns = [f"t.{_quoted(name)}" for name in self._columns.names]
        arrays = [f"${number}" for number in range(1, len(keys) + 1)]
        pairs = [f"t.{_quoted(key)} = k.{_quoted(key)}" for key in keys]
        return (
            f"SELECT {', '.join(columns)} FROM unnest({', '.join(arrays)}) AS k ({', '.join(map(_quoted, keys))}) "
            f"JOIN {self._table} AS t ON {' AND '.join(pairs)}"
        )

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(dbapi.Error):
                connection.close()


def _connect(uri: str) -> dbapi.Connection:
    """A connection on which each statement is a transaction of its own, and so sees the rows of its moment."""
    connection = dbapi.connect(uri, autocommit=True)
    with connection.cursor() as cursor:
        cursor.execute("SET default_transaction_read_only = on")
    return connection


def _asked(context: LookupContext, schema: pa.Schema) -> pa.Schema:
    """The columns to fetch: those of `lookup.columns` and the keys. Their letter case is as the user spelled it."""
    if context.columns is None:
        return schema
    names = {name.casefold() for name in (*context.keys, *context.columns)}
    return pa.schema([field for field in schema if field.name.casefold() in names])


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
