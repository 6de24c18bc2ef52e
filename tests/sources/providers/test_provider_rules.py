"""The providers of this package keep the rules that others have to keep, with real servers."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import json
import math
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pyspark_lookup.core.clock import HostClock
from pyspark_lookup.sources.providers.functions import LookupContext, LookupProvider
from pyspark_lookup.sources.providers.provider import BuiltInOptions, system_options
from pyspark_lookup.sources.registry import parse_options
from pyspark_lookup.testing import check_provider
from tests.support.changed_keys import changed_keys
from tests.support.databases import Database, Options
from tests.support.fuzzing import by_day
from tests.support.http_api import Api, api
from tests.support.redis_server import RedisServer

__all__ = ["api"]
ROWS = pa.table({
    "id": [1, 2, 2, 2, 3, 2**53 + 1, None], "name": ["one", "two", "Two", "two", "drei", "", "no id"], "n": [10, 20, None, 30, 40, 50, 60],
})  # fmt: skip
KEYS = ("id", "name")
PEOPLE = pa.table({"id": [1, 2, 3], "name": ["one", "o'two", "drei"], "n": [10, None, -30]})
Write = Callable[[pa.Table], None]


def make_factory(path: str, options: Options) -> Callable[[LookupContext], LookupProvider]:
    """The factory of the provider that reads with these options."""
    parsed = parse_options({"path": path, **options} if path else dict(options))
    system = system_options(parsed)
    assert isinstance(system, BuiltInOptions)
    return system.provide(parsed, HostClock())


def literal(database: Database, value: Any) -> str:
    """A value in the database's SQL."""
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        forms = {"postgresql": r"'\x{}'::bytea", "duckdb": "from_hex('{}')"}
        return forms.get(database.scheme, "x'{}'").format(value.hex())
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f"'{value}'"
    if isinstance(value, bool | int | decimal.Decimal):
        return str(value)
    text = str(value).replace("'", "''")
    return f"'{text.replace(chr(92), chr(92) * 2) if database.mark == '`' else text}'"


def inserts(database: Database, table: str, rows: pa.Table) -> list[str]:
    lines = [f"({', '.join(literal(database, value) for value in row.values())})" for row in rows.to_pylist()]
    return [f"INSERT INTO {database.quoted(table)} VALUES {', '.join(lines)}"] if lines else []


def create_people(database: Database) -> tuple[dict[str, str], Write]:
    """(the options that read a new table of the database, a function that writes it and notes what has changed)."""
    text = "VARCHAR(100)" if database.mark == "`" else "TEXT"
    people = database.create(f"id BIGINT, name {text}, n BIGINT")
    changed, versions = database.create(f"version BIGINT, id BIGINT, name {text}"), database.create("n BIGINT", "(0)")
    tables = [ROWS.slice(0, 0)]

    def write(rows: pa.Table) -> None:
        keys, number = changed_keys(tables[-1], rows, KEYS), len(tables)
        noted = keys.add_column(0, "version", pa.array([number] * keys.num_rows, pa.int64()))
        statements = [f"DELETE FROM {database.quoted(people)}", *inserts(database, people, rows)]
        statements += [
            *inserts(database, changed, noted),
            f"UPDATE {database.quoted(versions)} SET n = {number}",
            "COMMIT",
        ]
        database.transaction(statements)
        tables.append(rows)

    write(ROWS)
    return {
        "lookup.table": database.quoted(people),
        "lookup.keys": ",".join(KEYS),
        "lookup.version-query": f"SELECT n FROM {database.quoted(versions)}",
        "lookup.changes-query": f"SELECT id, name FROM {database.quoted(changed)} WHERE version > :since",
    }, write


@contextlib.contextmanager
def away(file: Path) -> Iterator[None]:
    """The file has another name."""
    hidden = file.rename(file.with_suffix(".away"))
    yield
    hidden.rename(file)


def make_outage(database: Database) -> contextlib.AbstractContextManager[None]:
    if database.server is None:
        return away(Path(urllib.parse.unquote(database.url.partition(":///")[2])))

    @contextlib.contextmanager
    def stopped(server: Any) -> Iterator[None]:
        server.stop()
        yield
        server.start()

    return stopped(database.server)


@pytest.mark.parametrize("fixture", by_day(["sqlite", "duckdb_file", "postgres", "mariadb"], 4))
def test_databases(request: pytest.FixtureRequest, fixture: str) -> None:
    """Databases keep the rules with two key columns, one of which differs in case only; with several rows of a key, and nulls."""
    database: Database = request.getfixturevalue(fixture)
    options, _ = create_people(database)
    check_provider(make_factory(database.url, options), ROWS, KEYS, largest_call=200)


@pytest.mark.nightly
def test_databases_beside_writes(database: Database) -> None:
    """Databases keep the rules with versions, changes and many rows; and while the database is away. Nobody can write a file of DuckDB that others read."""
    options, write = create_people(database)
    writer = {} if database.scheme == "duckdb" else {"write": write}
    check_provider(
        make_factory(database.url, options),
        ROWS,
        KEYS,
        largest_call=1000,
        outage=lambda: make_outage(database),
        **writer,
    )


DAY, MOMENT = datetime.date(2024, 2, 29), datetime.datetime(2024, 3, 31, 2, 30, 0, 123456)
INSTANT = MOMENT.replace(tzinfo=datetime.timezone.utc)
INTEGERS = pa.int64(), [-(2**62), 0, 7]
TEXTS = pa.string(), ["a b", "Ä'%_\\", ""]
FLOATS = pa.float64(), [0.1, -0.0, 1e300]
DECIMALS = (
    pa.decimal128(20, 2),
    [decimal.Decimal("0.10"), decimal.Decimal("-123456789012345678.90"), decimal.Decimal(0)],
)
BYTES = pa.binary(), [b"", b"\0\xff", b"a"]
DAYS = pa.date32(), [DAY, datetime.date(1970, 1, 1), datetime.date(1, 1, 1)]
MOMENTS = pa.timestamp("us"), [MOMENT, datetime.datetime(1969, 12, 31, 23, 59, 59), datetime.datetime(1001, 1, 1)]
INSTANTS = pa.timestamp("us", "UTC"), [INSTANT, INSTANT.replace(year=1970), INSTANT.replace(year=2100)]
UUIDS = pa.string(), [f"00000000-0000-4000-8000-00000000000{digit}" for digit in "0af"]
TYPES = {
    "sqlite": {"BIGINT": INTEGERS, "TEXT": TEXTS, "DOUBLE": FLOATS, "BLOB": BYTES, "DATE": DAYS},
    "duckdb_file": {
        "BIGINT": INTEGERS, "TINYINT": (pa.int8(), [-128, 0, 7]), "TEXT": TEXTS, "DOUBLE": FLOATS, "FLOAT": (pa.float32(), [0.5, -0.0, math.nan]),
        "DECIMAL(20, 2)": DECIMALS, "BLOB": BYTES, "DATE": DAYS, "TIMESTAMP": MOMENTS, "TIMESTAMPTZ": INSTANTS, "UUID": UUIDS,
        "ENUM('x', 'Y', 'z')": (pa.string(), ["x", "Y", "z"]), "TIME": (pa.string(), ["12:30:00", "00:00:00", "23:59:59"]),
        "HUGEINT": (pa.decimal128(38, 0), [decimal.Decimal("9" * 38), decimal.Decimal(0), decimal.Decimal(7)]),
        "UBIGINT": (pa.decimal128(20, 0), [decimal.Decimal(2**64 - 1), decimal.Decimal(0), decimal.Decimal(7)]),
    },
    "postgres": {
        "BIGINT": INTEGERS, "SMALLINT": (pa.int16(), [-(2**15), 0, 7]), "TEXT": TEXTS, "CHAR(5)": (pa.string(), ["abc  ", "ABC  ", "     "]), "NAME": TEXTS,
        "DOUBLE PRECISION": (pa.float64(), [*FLOATS[1], math.nan, -math.inf]), "REAL": (pa.float32(), [0.5, -0.0, math.nan]),
        "NUMERIC(20, 2)": DECIMALS, "BYTEA": BYTES, "DATE": DAYS, "TIMESTAMP": MOMENTS, "TIMESTAMPTZ": INSTANTS, "UUID": UUIDS, "JSON": (pa.string(), ["1", "{}", "[ ]"]),
        "INET": (pa.string(), ["10.0.0.1/32", "::1/128", "10.0.0.0/8"]), "INTERVAL": (pa.string(), ["1 day", "00:00:01", "2 mons"]), "OID": (pa.int64(), [0, 1, 2**32 - 1]),
    },
    "mariadb": {
        "BIGINT": INTEGERS, "TINYINT": (pa.int8(), [-128, 0, 7]), "VARCHAR(100)": TEXTS, "VARCHAR(100) CHARACTER SET latin1": TEXTS, "CHAR(5)": (pa.string(), ["abc", "ABC", ""]),
        "DOUBLE": FLOATS, "FLOAT": (pa.float32(), [0.5, -0.0, 1.25]), "DECIMAL(20, 2)": DECIMALS, "VARBINARY(100)": BYTES, "DATE": (DAYS[0], [*DAYS[1][:2], datetime.date(1001, 1, 1)]),
        "UUID": UUIDS, "INET6": (pa.string(), ["::1", "::2", "fe80::1"]), "ENUM('x', 'Y', 'z')": (pa.string(), ["x", "Y", "z"]),
        "YEAR": (pa.int16(), [1999, 2000, 2155]), "TIME": (pa.string(), ["-838:59:59", "00:00:00", "12:30:00"]),
        "DATETIME(6)": MOMENTS, "BIGINT UNSIGNED": (pa.decimal128(20, 0), [decimal.Decimal(2**64 - 1), decimal.Decimal(0), decimal.Decimal(7)]),
    },
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(("fixture", "kind"), [(fixture, kind) for fixture, types in TYPES.items() for kind in types])
def test_keys_of_databases(request: pytest.FixtureRequest, fixture: str, kind: str) -> None:
    """Databases keep the rules with a key column of each type."""
    database: Database = request.getfixturevalue(fixture)
    type_, values = TYPES[fixture][kind]
    rows = pa.table({"k": pa.array([*values, values[0], None], type_), "n": range(len(values) + 2)})
    name = database.create(f"k {kind}, n BIGINT", name="k")
    for statement in inserts(database, name, rows):
        database.execute(statement)
    options = {"lookup.table": database.quoted(name), "lookup.keys": "k"}
    check_provider(make_factory(database.url, options), rows, "k", largest_call=50)


@pytest.mark.parametrize(
    ("key", "more"), by_day([("id", {}), ("name", {}), ("id,name", {}), ("name", {"lookup.redis.value": "json"})], 4)
)
def test_redis(redis_server: RedisServer, key: str, more: Options) -> None:
    """Redis keeps the rules with hashes and JSON, by numbers and texts; also while somebody writes, and while the server is away."""
    names = key.split(",")
    pattern = ":".join(["person", *(f"{{{name}}}" for name in names)])

    def write(rows: pa.Table) -> None:
        with redis_server.client.pipeline(transaction=True) as pipeline:
            pipeline.flushall()
            for row in rows.to_pylist():
                place = ":".join(["person", *(str(row[name]) for name in names)])
                if more:
                    pipeline.set(place, encode_row(row))
                else:
                    pipeline.hset(place, mapping={name: value for name, value in row.items() if value is not None})
            pipeline.execute()

    @contextlib.contextmanager
    def outage() -> Iterator[None]:
        redis_server.stop()
        yield
        redis_server.start()
        write(PEOPLE)

    write(PEOPLE)
    options = {"lookup.provider": "redis", "lookup.redis.key-pattern": pattern, "lookup.keys": key, **more}
    options["lookup.schema"] = "id BIGINT, name STRING, n BIGINT"
    check_provider(
        make_factory(redis_server.url, options),
        PEOPLE,
        names,
        write=write,
        outage=outage,
        largest_call=200,
        timeout_s=60,
    )


def encode_row(row: dict[str, Any]) -> bytes:
    return json.dumps(row).encode()


@pytest.mark.parametrize(
    ("key", "form"),
    by_day([
        ("name", {"lookup.http.url": "/find", "lookup.http.body": '{"ids": "{keys}"}', "lookup.http.rows": "data.items"}),
        ("name", {"lookup.http.url": "/people/{name}"}),
        ("id", {"lookup.http.url": "/people?ids={keys}", "lookup.http.rows": "data.items"}),
    ], 3),
)  # fmt: skip
def test_http(api: Api, key: str, form: Options) -> None:
    """HTTP APIs keep the rules with one key in a request, and with many, also while somebody writes."""

    def write(rows: pa.Table) -> None:
        api.customers = {str(row[key]): row for row in rows.to_pylist()}

    write(PEOPLE)
    options = {
        "lookup.provider": "http",
        "lookup.keys": key,
        **form,
        "lookup.schema": "id BIGINT, name STRING, n BIGINT",
    }
    options["lookup.http.url"] = api.url + form["lookup.http.url"]
    check_provider(make_factory("", options), PEOPLE, key, write=write, largest_call=200)
