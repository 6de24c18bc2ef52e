"""`DatabaseTable`: makes the provider of a table or query of a database. `DatabaseOptions`: the options that describe it."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import tenacity

from pyspark_lookup.columnar.ddl import type_ddl
from pyspark_lookup.columnar.keys import Keys, as_indices, match_rows, one_array
from pyspark_lookup.columnar.predicate import Predicate
from pyspark_lookup.columnar.sql_predicate import parse_where
from pyspark_lookup.columnar.types import (
    cast_column,
    is_text,
    lenient_schema,
    resolve_names,
    show_type,
    spark_type,
    split_type,
    unreadable,
    unreadable_type,
)
from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.errors import (
    LookupFunctionError,
    OptionError,
    PysparkLookupError,
    SchemaError,
    raise_ours,
    reason_of,
)
from pyspark_lookup.options.enums import CacheMode
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.options.parsing import Kind, option, parse_text
from pyspark_lookup.sources.credentials import CREDENTIALS, CredentialOptions
from pyspark_lookup.sources.providers.databases.adbc import Bigquery, FlightSql, Snowflake
from pyspark_lookup.sources.providers.databases.address import Address
from pyspark_lookup.sources.providers.databases.conditions import condition_of
from pyspark_lookup.sources.providers.databases.database import (
    Column,
    Condition,
    Connection,
    Database,
    Source,
)
from pyspark_lookup.sources.providers.databases.duckdb import Duckdb
from pyspark_lookup.sources.providers.databases.mysql import Mysql
from pyspark_lookup.sources.providers.databases.postgresql import Postgresql
from pyspark_lookup.sources.providers.databases.sqlite import Sqlite
from pyspark_lookup.sources.providers.functions import (
    FinalLookupError,
    LookupContext,
    LookupFunction,
    LookupProvider,
)
from pyspark_lookup.sources.providers.provider import (
    BuiltInOptions,
    BuiltInProvider,
    ProviderOptions,
    refuse_options_of_files,
)

T = TypeVar("T")
DATABASES: dict[str, type[Database]] = {
    "bigquery": Bigquery,
    "duckdb": Duckdb,
    "flightsql": FlightSql,
    "mariadb": Mysql,
    "mysql": Mysql,
    "postgres": Postgresql,
    "postgresql": Postgresql,
    "snowflake": Snowflake,
    "sqlite": Sqlite,
}
"""The kinds of databases, by the schemes of their URLs."""

MOST_CHANGES = 4_000_000
"""If lookup.changes-query returns more keys than this, they do not go into memory: any key may have changed."""


def _is_database(path: str) -> bool:
    scheme, separator, _ = path.partition("://")
    return bool(separator) and scheme.partition("+")[0].lower() in DATABASES


@dataclasses.dataclass(frozen=True)
class DatabaseOptions(BuiltInOptions):
    """The options that name a table or query of an SQL database. The option `path` is the database's URL."""

    system_keys: ClassVar[frozenset[str]] = frozenset({"lookup.table", "lookup.query"})
    schemes: ClassVar[frozenset[str]] = frozenset(DATABASES)
    suggestions: ClassVar[dict[str, str]] = {"dbtable": "lookup.table", "tablename": "lookup.table", "url": "path"}

    # fmt: off
    table: str | None = option(
        "lookup.table", Kind("name", parse_text), None,
        doc="A table or view of an SQL database, spelled as in the database's catalog: `customers`, `public.customers`. The path is the database's "
            "URL: `postgresql://host/shop`, `mysql://…`, `sqlite:///shop.db`, `duckdb:///…`. See [databases](databases.md).",
    )
    query: str | None = option(
        "lookup.query", Kind("SQL", parse_text), None,
        doc="A SELECT in the database's own SQL, in place of lookup.table.",
    )
    version_query: str | None = option(
        "lookup.version-query", Kind("SQL", parse_text), None,
        doc="Databases: a statement that returns one value, which changes whenever a row of the table may have changed. Without it, a cached answer "
            "may be as old as the cache's options allow.",
    )
    changes_query: str | None = option(
        "lookup.changes-query", Kind("SQL", parse_text), None,
        doc="Databases: a statement that returns the keys that have changed since the version `:since`, including those of deleted rows. A row "
            "with a null key means that any key may have changed.",
    )
    # fmt: on

    @property
    def system(self) -> str | None:
        return "lookup.table" if self.table is not None else "lookup.query" if self.query is not None else None

    @property
    def identity(self) -> tuple[Any, ...]:
        # What a host knows of a table's versions and changes holds for these statements only.
        return self.table, self.query, self.version_query, self.changes_query

    def check(self, options: LookupOptions) -> None:
        path = options.files.path
        if self.system is None:
            if _is_database(path):
                raise OptionError(
                    "option lookup.table is missing: the path is the URL of a database, so name a table in it, or set lookup.query"
                )
            of_databases = ("lookup.version-query", "lookup.changes-query")
            misplaced = [key for key in of_databases if key in options.explicit]
            if misplaced:
                raise OptionError(
                    f"option {misplaced[0]} is for tables of databases: set lookup.table or lookup.query, or remove it"
                )
            return
        if self.table is not None and self.query is not None:
            raise OptionError("options lookup.table and lookup.query both say what to read: give only one of them")
        if not _is_database(path):
            raise OptionError(
                f"option {self.system} is for databases: set path to the URL of one, {', '.join(f'{scheme}://…' for scheme in sorted(DATABASES))}"
            )
        refuse_options_of_files(options, self.system)
        if self.changes_query is not None and self.version_query is None:
            raise OptionError(
                "option lookup.changes-query needs lookup.version-query, whose values are its versions: set it, too"
            )
        dialect = DATABASES[Address.parse(path).scheme]
        if CREDENTIALS in options.explicit and not dialect.has_logins:
            raise OptionError(
                f"option {CREDENTIALS} returns a user and a password, which {path.partition('://')[0]}:// does not take: remove it"
            )
        if self.changes_query is not None and not dialect.place_since(self.changes_query, "")[1]:
            raise OptionError(
                "option lookup.changes-query has no :since: return only changes whose version is greater than :since, e.g. WHERE n > :since"
            )
        self._database(options)

    def _database(self, options: LookupOptions) -> Database:
        address = Address.parse(options.files.path)
        return DATABASES[address.scheme](address, options.kind(CredentialOptions).function)

    def provide(self, options: LookupOptions, clock: HostClock) -> Callable[[LookupContext], LookupProvider]:
        database = self._database(options)
        source = database.subquery(self.query) if self.table is None else database.table(self.table)  # type: ignore[arg-type]
        return DatabaseTable(database, source, self, options, clock).provider


class DatabaseTable:
    """A table or query of a database: makes its providers, for the columns and keys that are read. It is described once.

    `read`: the options of the read. After an error, the request for the columns is repeated as often as lookups are (`lookup.max-retries`).
    """

    def __init__(
        self, database: Database, source: Source, options: DatabaseOptions, read: LookupOptions, clock: HostClock
    ) -> None:
        self._retry = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(read.storage.max_retries + 1),
            wait=tenacity.wait_random_exponential(multiplier=0.1, max=5),
            retry=tenacity.retry_if_not_exception_type(PysparkLookupError),
            sleep=clock.sleep,
            reraise=True,
        )
        self._database = database
        self._source = source
        self._options = options
        # A connection that is limited is one only as long as it counts.
        self._keeps_connection = not database.is_file and read.kind(ProviderOptions).max_connections is None
        self._declared = read.files.schema
        # A cache keeps all rows of a key, and serves every predicate.
        self._where = read.read.where if read.cache.mode is CacheMode.NONE else None
        self._described: list[Column] | None = None

    def provider(self, context: LookupContext) -> BuiltInProvider:
        columns, types = self._columns()
        keys = _named(columns, context.keys)
        for key in keys:
            if unreadable(types.field(key.name).type) is not None:
                continue  # the caller refuses such a key
            if not key.findable or types.field(key.name).type != spark_type(key.type):
                advice = (
                    f"declare it in lookup.schema as {type_ddl(spark_type(key.type))}, its type there"
                    if key.findable and self._declared is not None
                    else "cast the column in lookup.query, e.g. to text"
                    if self._options.table is None
                    else "read the table with lookup.query instead of lookup.table, and cast the column there, e.g. to text"
                )
                raise OptionError(
                    f"{self._source.label} of {self._database.address.place}: key column {key.name!r} cannot be compared as "
                    f"{types.field(key.name).type} in the database: {advice}"
                )
        readable = [column for column in columns if unreadable(types.field(column.name).type) is None]
        read = readable if context.columns is None else _named(columns, (*context.keys, *context.columns))
        key_types = pa.schema([types.field(key.name) for key in keys])
        versions = _Versions(self._database, self._options, key_types, self._keeps_connection)
        reader = _Reader(self._database, self._source, columns, types)
        where = (
            None
            if self._where is None
            else condition_of(parse_where(self._where, types), reader.columns, types, self._database.placeholder)
        )
        return BuiltInProvider(
            _Lookups(reader, read, keys, where),
            reader.scan,
            types,
            version=None if self._options.version_query is None else versions.current,
            changes=None if self._options.changes_query is None else versions.changes,
            has_changed=lambda: self._describe() != self._described,
        )

    def _columns(self) -> tuple[list[Column], pa.Schema]:
        """(the columns, in the types in which the database returns them; their types here)."""
        if self._described is None:
            self._described = self._describe_with_retries()
        columns = self._described
        if self._declared is not None:
            names = resolve_names(
                self._declared.names, pa.schema([column.field for column in columns]), "lookup.schema"
            )
            columns = _named(columns, names)
            types = pa.schema([pa.field(name, field.type) for name, field in zip(names, self._declared, strict=True)])
            columns = sorted(columns, key=lambda column: names.index(column.name))
            columns = [
                _declared(column, field.type) if pa.types.is_null(column.type) else column
                for column, field in zip(columns, types, strict=True)
            ]
            for column, field in zip(columns, types, strict=True):
                if unreadable(column.type) is None and not _converts(column.type, field.type):
                    raise SchemaError(
                        f"column {column.name!r} of {self._source.label} of {self._database.address.place} is {show_type(column.type)} and cannot be "
                        f"read as {show_type(field.type)}, its type in lookup.schema or .schema(…): declare a type that fits its values"
                    )
            return columns, types
        place = f"{self._source.label} of {self._database.address.place}"
        fields = [
            column.field.with_type(
                unreadable_type(f"{place}: column {column.name!r} has no declared type (lookup.schema can declare it)")
            )
            if pa.types.is_null(column.type)
            else column.field
            for column in columns
        ]
        return columns, lenient_schema(pa.schema(fields), place)

    def _describe_with_retries(self) -> list[Column]:
        try:
            return self._retry(self._describe)
        except PysparkLookupError:
            raise
        except Exception as problem:
            option = self._options.system
            raise_ours(
                LookupFunctionError(
                    f"{self._database.address.place} cannot be read with option {option}: {reason_of(problem)}: check {option}, and whether the "
                    "database answers"
                ),
                problem,
            )

    def _describe(self) -> list[Column]:
        with contextlib.closing(self._database.connect()) as connection:
            return connection.columns(self._source)


def _declared(column: Column, kind: pa.DataType) -> Column:
    """A column that the database gives no type, with the type that lookup.schema gives it."""
    findable = not (pa.types.is_decimal(kind) or pa.types.is_timestamp(kind))
    # Floats come as doubles, so that a value is refused which a float cannot hold.
    return dataclasses.replace(
        column, type=pa.float64() if kind == pa.float32() else kind, exact=False, findable=findable
    )


def _converts(kind: pa.DataType, declared: pa.DataType) -> bool:
    """Whether some values of the type `kind` can be read as `declared`. `cast_column` then tries each value.

    Arrow would take a number for a count of days or microseconds, and fields of structs by their positions.
    """
    (shape, parts), (declared_shape, declared_parts) = split_type(kind), split_type(declared)
    if shape is not None or declared_shape is not None:
        return _folded(shape) == _folded(declared_shape) and all(map(_converts, parts, declared_parts))
    return is_text(kind) or is_text(declared) or pa.types.is_temporal(kind) == pa.types.is_temporal(declared)


def _folded(shape: object) -> object:
    """The shape of a nested type, with the names of fields in lower case."""
    return tuple(name.lower() for name in shape) if isinstance(shape, tuple) else shape


def _named(columns: Sequence[Column], names: Sequence[str]) -> list[Column]:
    """The columns with these names, in any letter case, in the order of the table."""
    folded = {name.lower() for name in names}
    return [column for column in columns if column.name.lower() in folded]


class _Reader:
    """Reads rows, with the columns in the types of `types`."""

    def __init__(self, database: Database, source: Source, columns: Sequence[Column], types: pa.Schema) -> None:
        self.database = database
        self.source = source
        self.types = types
        self.columns = {column.name: column for column in columns}

    def scan(self, names: Sequence[str], predicate: Predicate | None) -> Iterator[pa.RecordBatch]:
        """All rows for which the predicate holds, and maybe others, in one read-only transaction on a connection of its own."""
        condition = (
            None if predicate is None else condition_of(predicate, self.columns, self.types, self.database.placeholder)
        )
        columns = [self.columns[name] for name in names]
        with contextlib.closing(self.database.connect()) as connection:
            for batch in connection.rows(self.source, columns, condition):
                yield from self.typed(pa.Table.from_batches([batch])).to_batches()

    def typed(self, rows: pa.Table) -> pa.Table:
        fields = [self.types.field(name) for name in rows.column_names]
        arrays = [
            cast_column(one_array(column), field.type, field.name, self.source.label)
            for column, field in zip(rows.columns, fields, strict=True)
        ]
        return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


class _Versions:
    """Asks for versions and changes, on a connection of its own. A connection that was lost is made again. `keeps_connection`: whether the next
    question has the same connection."""

    def __init__(self, database: Database, options: DatabaseOptions, keys: pa.Schema, keeps_connection: bool) -> None:
        self._database = database
        self._options = options
        self._keys = keys
        self._keeps_connection = keeps_connection
        self._lock = threading.Lock()  # versions and changes are asked for in different threads
        self._connection: Connection | None = None
        self._type: pa.DataType | None = None  # that of versions in the database

    def current(self) -> str:
        """The current version, as a text."""
        value = self._value()
        self._type = value.type
        try:
            if not isinstance(value.type, pa.BaseExtensionType):
                return str(value.cast(pa.string())[0].as_py())
        except pa.ArrowException:
            pass
        raise FinalLookupError(
            f"option lookup.version-query returned a value of the type {value.type}: cast it to text or a number in the statement"
        )

    def changes(self, since: str) -> pa.Table | None:
        """The keys that have changed since a version; None if any may have."""
        assert self._options.changes_query is not None
        statement = self._database.without_end(self._options.changes_query)
        try:
            version = pa.array([since]).cast(self._type or self._value().type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):  # lookup.version-query was another statement then
            return None
        rows = self._ask("lookup.changes-query", lambda connection: connection.query(statement, MOST_CHANGES, version))
        if rows is None:
            return None
        spelled = {name.lower(): name for name in rows.column_names}
        missing = [name for name in self._keys.names if name.lower() not in spelled]
        if missing:
            raise FinalLookupError(
                f"option lookup.changes-query returned no column {missing[0]!r}: it must return the key columns, {', '.join(self._keys.names)}"
            )
        columns = [one_array(rows[spelled[field.name.lower()]]) for field in self._keys]
        if any(column.null_count for column in columns):
            return None
        arrays = [
            cast_column(column, field.type, field.name, "lookup.changes-query")
            for column, field in zip(columns, self._keys, strict=True)
        ]
        return pa.Table.from_arrays(arrays, schema=self._keys)

    def _value(self) -> pa.Array:
        """An array with the version, in the database's type."""
        assert self._options.version_query is not None
        statement = self._database.without_end(self._options.version_query)
        rows = self._ask("lookup.version-query", lambda connection: connection.query(statement, 1))
        if rows is None or rows.num_rows != 1 or rows.num_columns != 1 or rows.column(0).null_count:
            if rows is None:
                outcome = "returned several rows"
            else:
                is_value = rows.num_rows == 1 == rows.num_columns
                outcome = (
                    "returned NULL"
                    if is_value
                    else f"did not return a single value (rows: {rows.num_rows}, columns: {rows.num_columns})"
                )
            raise FinalLookupError(
                f"option lookup.version-query {outcome}: make it return one value, such as coalesce(max(n), 0)"
            )
        return one_array(rows.column(0))

    def _ask(self, option: str, ask: Callable[[Connection], T]) -> T:
        """What `ask` returns for a connection. `option`: the one that has the statement."""
        with self._lock:
            kept = self._connection
            self._connection = None
            if kept is not None:
                with contextlib.suppress(Exception):  # the server may have closed it since
                    answer = ask(kept)
                    self._keep(kept, answer)
                    return answer
                kept.close()
            connection = self._database.connect()
            try:
                answer = ask(connection)
            except BaseException as problem:
                connection.close()
                if isinstance(problem, PysparkLookupError) or not isinstance(problem, Exception):
                    raise
                raise_ours(LookupFunctionError(f"option {option} failed: {reason_of(problem)}"), problem)
            self._keep(connection, answer)
            return answer

    def _keep(self, connection: Connection, answer: object) -> None:
        """Keep a connection that has given this answer for the next question, or close it."""
        if self._keeps_connection and answer is not None:
            self._connection = connection
        else:
            connection.close()


class _Lookups(LookupFunction):
    """Looks up a batch of keys in one statement. After an error, it closes its connection, and the next attempt connects again."""

    def __init__(
        self, reader: _Reader, columns: Sequence[Column], keys: Sequence[Column], condition: Condition | None
    ) -> None:
        self._reader = reader
        self._condition = condition
        self._columns = columns
        self._keys = {key.name: key for key in keys}
        self._exact = all(key.exact for key in keys)
        self.batch_size = reader.database.keys_at_once(max(len(keys), 1))
        self._connection: Connection | None = None

    def lookup(self, keys: pa.Table) -> pa.Table:
        columns = [self._keys[name] for name in keys.column_names]
        requested = keys
        for column in columns:  # no row has any other value
            if column.pattern:
                requested = requested.filter(pc.match_substring_regex(requested[column.name], column.pattern))
            if column.range is not None:
                numbers = requested[column.name].cast(pa.int32() if pa.types.is_date32(column.type) else pa.int64())
                first, last = column.range
                requested = requested.filter(pc.and_(pc.greater_equal(numbers, first), pc.less_equal(numbers, last)))
            if column.finite:
                requested = requested.filter(pc.is_finite(requested[column.name]))
        if not requested.num_rows:
            return self._reader.types.empty_table()
        if self._connection is None:
            self._connection = self._reader.database.connect()
        try:
            rows = self._connection.rows_of_keys(
                self._reader.source, self._columns, columns, requested, self._condition
            )
        except BaseException:
            self.close()
            raise
        if self._reader.database.is_file:
            self.close()
        rows = self._reader.typed(rows)
        if self._exact:
            return rows
        matches = match_rows(rows, keys.column_names, Keys([one_array(column) for column in keys.columns]))
        return rows.take(as_indices(matches.rows))

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
