"""DuckDB, through its own Arrow interface."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from pyspark_lookup.columnar.types import spark_type
from pyspark_lookup.core.forks import ForkSafeLock
from pyspark_lookup.errors import OptionError, SchemaError
from pyspark_lookup.sources.providers.databases.database import (
    BATCH_ROWS,
    UUID_PATTERN,
    Column,
    Condition,
    Connection,
    Database,
    Source,
    since_place,
    values_of,
)

# The race: the first connection to a file opens it, and only then gets it the functions that read Arrow tables. A second one that is made in
# between shares the open file, and lacks these functions.
_connecting = ForkSafeLock()


class Duckdb(Database):
    extra = "duckdb"
    is_file = True

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
            import duckdb
        except ImportError as problem:
            self.missing("duckdb", problem)
        # Read-only: other processes may read the file at the same time.
        path = Path(self.address.database).absolute()
        with _connecting:
            connection = duckdb.connect(str(path), read_only=True)
        return _DuckdbConnection(self, connection)


class _DuckdbConnection(Connection):
    def __init__(self, database: Duckdb, connection: Any) -> None:
        self._database = database
        self._connection = connection
        # Times are then the same wherever the process runs; and no text of a query is taken for the name of a variable of this process.
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute("SET python_enable_replacements = false")
        connection.execute("SET enable_progress_bar = false")  # it would go to the output of the process

    def columns(self, source: Source) -> list[Column]:
        relation = self._connection.sql(f"SELECT * FROM {source.sql}")
        schema = relation.limit(0).to_arrow_table().schema
        return [self._column(field, str(kind)) for field, kind in zip(schema, relation.types, strict=True)]

    def _column(self, field: pa.Field, kind: str) -> Column:
        raw = f"t.{self._database.quote(field.name)}"
        if pa.types.is_timestamp(field.type) or pa.types.is_date(field.type):
            # Spark has no infinite times, see PostgreSQL.
            name = "DATE" if pa.types.is_date(field.type) else "TIMESTAMPTZ" if field.type.tz else "TIMESTAMP"
            ends = f"WHEN {raw} > '1970-01-01' THEN '9999-12-31 23:59:59.999999'::{name} ELSE '0001-01-01'::{name}"
            value = f"CASE WHEN {raw} IS NULL OR isfinite({raw}) THEN {raw}::{name} {ends} END"
            return Column(field.name, spark_type(field.type), value, raw, ordered=True)
        try:
            type_ = spark_type(field.type)
        except SchemaError:  # such as a time of day or a union
            type_ = pa.null()
        as_text = pa.types.is_null(type_) or kind == "BIT" or isinstance(field.type, pa.BaseExtensionType)
        if kind == "UUID":
            return Column(field.name, pa.string(), f"{raw}::VARCHAR", raw, "{}::UUID", pattern=UUID_PATTERN)
        if as_text or pa.types.is_dictionary(field.type) or (pa.types.is_string(type_) and kind != "VARCHAR"):
            return Column(field.name, pa.string(), f"{raw}::VARCHAR", f"{raw}::VARCHAR", exact=False)
        exact = not (pa.types.is_string(type_) or pa.types.is_floating(type_) or pa.types.is_nested(type_))
        ordered = pa.types.is_integer(type_) or pa.types.is_decimal(type_)
        return Column(field.name, field.type, raw, raw, exact=exact, ordered=ordered)

    def rows(self, source: Source, columns: Sequence[Column], condition: Condition | None) -> Iterator[pa.RecordBatch]:
        # One statement sees one state.
        statement = self._database.select(source, columns, condition)
        yield from self._run(statement, condition).to_arrow_reader(BATCH_ROWS)

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
        pairs = [f"{key.key} = {key.parameter.format(f'k.{name}')}" for key, name in zip(keys, names, strict=True)]
        joined = Source(f"lookupcache_keys AS k JOIN {source.sql} ON {' AND '.join(pairs)}", source.label)
        statement = self._database.select(joined, columns, condition)
        rows: pa.Table = self._run(statement, condition).to_arrow_table()
        return rows

    def _run(self, statement: str, condition: Condition | None) -> Any:
        parameters = values_of(condition)
        return self._connection.sql(statement, params=parameters) if parameters else self._connection.sql(statement)

    def query(self, statement: str, since: pa.Array | None = None) -> pa.Table:
        if since is None:
            relation = self._connection.sql(statement)
        else:
            relation = self._connection.sql(since_place(statement, "$1")[0], params=since.to_pylist())
        rows: pa.Table = relation.to_arrow_table()
        return rows

    def close(self) -> None:
        self._connection.close()
